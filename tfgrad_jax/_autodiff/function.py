"""What JAX is made to differentiate: a function of operands, with a rule.

`_call/program.py` has the one that users write. `custom.py` runs its methods, and says when.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from .._jax.types import Leaf, OperandIndex
from .._messages.source import Source
from .rule import Run


class Forward(NamedTuple):
    """The value of a function at a point, and its rule there."""

    leaves: list[Leaf]
    outputs: Sequence[int]  # positions of the leaves that have cotangents
    run: Run
    residuals: list[Leaf]
    gives: Collection[OperandIndex]  # for which operands it may return a gradient


class Function(Protocol):
    """A function of operands, with a rule. JAX compares it by identity: a pytree without leaves."""

    @property
    def source(self) -> Source: ...
    @property
    def has_primal(self) -> bool:
        """Whether `value` runs other code than `forward`."""
        ...

    @property
    def needs_perturbed(self) -> bool:
        """Whether its rule must know which operands are being differentiated."""
        ...

    def names(self) -> Sequence[str]:
        """Return the names of the operands, for JAX's own errors."""

    def value(self, operands: Sequence[Leaf]) -> list[Leaf]:
        """Return the leaves of the value, in a call that JAX does not differentiate."""

    def forward(self, operands: Sequence[Leaf], perturbed: Sequence[OperandIndex]) -> Forward:
        """Return the leaves of the value and the rule, for `perturbed` operands (positions)."""
