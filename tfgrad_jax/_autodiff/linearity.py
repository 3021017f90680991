"""Check that a rule is linear in its upstreams, before it is transposed.

`check` follows the upstreams through the equations of the rule, into its loops and branches. It
knows which operations are linear, and leaves all others to `jax.linear_transpose`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from tfgrad_jax._compat import can_transpose, is_ref
from tfgrad_jax._jaxpr import flow, without_consts
from tfgrad_jax._trace import is_staging
from tfgrad_jax._types import is_differentiable, is_kind

# What an intermediate value of a rule is, as a function of the upstream gradients.
_ZERO, _CONSTANT, _LINEAR = range(3)  # max(a, b) is the kind of a sum

# What JAX can transpose is linear in its operands together: a constant beside an upstream is
# refused. These are linear in each of them, one at a time,
_PRODUCTS = {"mul", "dot_general", "conv_general_dilated", "ragged_dot_general", "scatter-mul"}
# and these in the operands at these positions.
_LINEAR_IN = {
    "div": (0,),
    "triangular_solve": (1,),
    "tridiagonal_solve": (3,),
    "select_and_scatter_add": (0,),
    "select_and_gather_add": (0,),
}
# These are left to `jax.linear_transpose`: some are in the registry for the error that they raise.
_JUDGED_BY_JAX = {
    "pure_callback", "io_callback", "ffi_call", "pallas_call", "custom_linear_solve", "linear_call",
}  # fmt: skip
# Transposed by JAX in another way than by its registry, in some version.
_LINEAR_TOO = {
    "gather", "slice", "dynamic_slice", "copy_p", "stop_gradient", "psum2", "reshard", "mesh_cast",
    "pcast", "optimization_barrier",
}  # fmt: skip


class NotLinearError(Exception):
    """The rule is not linear in its upstream gradients; says which operation is not."""

    def __init__(self, text: str, eqn: Any = None) -> None:
        super().__init__(text)
        self.eqn = eqn  # of the operation, where it is known


def check(closed: ClosedJaxpr) -> list[Any]:
    """Raise unless the traced rule is linear; return the equations that are not known."""
    analysis = _Linearity()
    kinds = [*map(analysis.constant, closed.consts), *[_LINEAR] * len(closed.jaxpr.invars)]
    if _CONSTANT in flow(without_consts(closed), kinds, analysis):
        raise NotLinearError("a gradient that is not zero and does not depend on the upstreams")
    return analysis.unknown


class _Linearity:
    """Classify each value as a function of the upstreams.

    Raises at the first operation that is not linear. One that is not known here counts as
    linear and is added to `unknown`: `jax.linear_transpose` is the judge of it.
    """

    def __init__(self) -> None:
        self.unknown: list[Any] = []

    def constant(self, value: Any) -> int:
        """Return whether a constant is zero; large ones are not looked into."""
        if isinstance(value, jax.core.Tracer) or (is_ref(value) and is_staging()):
            return _CONSTANT  # its value is not known
        if np.size(value) > 1 << 16:
            return _CONSTANT
        try:
            return _CONSTANT if np.any(np.asarray(value)) else _ZERO
        except (TypeError, ValueError):  # a PRNG key
            return _CONSTANT

    def step(self, eqn: Any, operands: Sequence[int]) -> int:
        try:
            return self._kind(eqn, operands)
        except NotLinearError as error:
            raise NotLinearError(str(error), eqn) from None

    def _kind(self, eqn: Any, operands: Sequence[int]) -> int:
        name = eqn.primitive.name
        if name in _PRODUCTS:
            if list(operands).count(_LINEAR) > 1:
                raise NotLinearError(f"`{name}` of two upstreams")
            return _ZERO if _ZERO in operands else max(operands)
        if name == "convert_element_type":
            dtype = eqn.outvars[0].aval.dtype
            if operands[0] == _LINEAR and not is_kind(dtype, jnp.inexact):
                raise NotLinearError(f"`convert_element_type` to {np.dtype(dtype).name}")
            return operands[0]
        known = name in _LINEAR_TOO or can_transpose(eqn.primitive)
        if not known or name in _JUDGED_BY_JAX:
            if _LINEAR not in operands:
                return _CONSTANT
            self.unknown.append(eqn)
            return _LINEAR
        moves = [is_differentiable(a.aval.dtype) for a in eqn.invars]
        positions = _LINEAR_IN.get(name, [i for i, m in enumerate(moves) if m])
        for i, kind in enumerate(operands):
            if kind == _LINEAR and i not in positions:
                raise NotLinearError(f"`{name}`, which is not linear in its operand {i}")
        kinds = [operands[i] for i in positions] or operands
        return functools.reduce(functools.partial(self.join, name), kinds)

    def join(self, name: str, a: int, b: int) -> int:
        if {a, b} == {_CONSTANT, _LINEAR}:
            raise NotLinearError(f"`{name}` of an upstream and a constant")
        return max(a, b)

    def branch(self, name: str, predicate: int, result: int) -> int:
        if predicate == _LINEAR:
            raise NotLinearError(f"`{name}` whose predicate depends on an upstream")
        return result
