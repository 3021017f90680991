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

from tfgrad_jax._compat import can_transpose, is_ref, is_staging
from tfgrad_jax._frontend.structure import is_kind
from tfgrad_jax._jaxpr import flow, without_consts

# What an intermediate value of a rule is, as a function of the upstream gradients.
_ZERO, _CONSTANT, _LINEAR = range(3)  # max(a, b) is the kind of a sum

# Linear in all their operands together.
_TOGETHER = (
    "neg", "reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "slice", "rev",
    "reduce_sum", "cumsum", "reduce_precision", "copy", "copy_p", "stop_gradient",
    "real", "imag", "conj", "complex", "concatenate", "pad", "add", "sub", "add_any", "psum",
    "psum2", "psum_invariant", "pvary", "pcast", "all_gather", "all_to_all", "ppermute", "fft",
    "reduce_window_sum", "sharding_constraint", "mesh_cast", "reshard",
)  # fmt: skip
# Operations that are linear in the operands at these positions (None: in all of them together),
# while the others, such as indices, are constant.
_LINEAR_IN: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(_TOGETHER),
    "gather": (0,),
    "dynamic_slice": (0,),
    "div": (0,),
    "dynamic_update_slice": (0, 1),
    "scatter-add": (0, 2),
    "scatter": (0, 2),
    "triangular_solve": (1,),
    "select_n": tuple(range(1, 100)),
}
_PRODUCTS = {"mul", "dot_general", "conv_general_dilated"}


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
        if name in _LINEAR_IN:
            positions = _LINEAR_IN[name] or range(len(operands))
            for i, kind in enumerate(operands):
                if kind == _LINEAR and i not in positions:
                    raise NotLinearError(f"`{name}`, which is not linear in its operand {i}")
            kinds = [kind for i, kind in enumerate(operands) if i in positions]
            return functools.reduce(functools.partial(self.join, name), kinds)
        if _LINEAR not in operands:
            nothing = can_transpose(eqn.primitive) and set(operands) == {_ZERO}
            return _ZERO if nothing else _CONSTANT  # what is linear maps zero to zero
        self.unknown.append(eqn)
        return _LINEAR

    def join(self, name: str, a: int, b: int) -> int:
        if {a, b} == {_CONSTANT, _LINEAR}:
            raise NotLinearError(f"`{name}` of an upstream and a constant")
        return max(a, b)

    def branch(self, name: str, predicate: int, result: int) -> int:
        if predicate == _LINEAR:
            raise NotLinearError(f"`{name}` whose predicate depends on an upstream")
        return result
