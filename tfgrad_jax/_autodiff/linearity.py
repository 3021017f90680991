"""Check that a rule is linear in its upstreams, before it is transposed.

`check` follows the upstreams through the equations of the rule, into its loops and branches. It
refuses operations that add a constant to an upstream, because JAX would drop the constant, and
those that JAX cannot transpose. Any other operation is linear in the operand that the upstream
reaches, or `jax.linear_transpose` refuses it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from tfgrad_jax._jax.compat import can_differentiate, can_transpose, is_ref
from tfgrad_jax._jax.jaxpr import (
    ONE_BY_ONE,
    Followed,
    Identity,
    flow,
    is_declared,
    without_consts,
)
from tfgrad_jax._jax.trace import is_staging
from tfgrad_jax._jax.types import is_differentiable, is_kind

# The kinds of intermediate values of a rule, as functions of the upstream gradients.
_ZERO, _CONSTANT, _LINEAR = range(3)  # max(a, b) is the kind of a sum

# Sums and the like: linear in all operands together, but an upstream plus a constant is not linear.
_ADDS = {
    "add",
    "add_any",
    "addupdate",
    "complex",
    "concatenate",
    "dynamic_update_slice",
    "pad",
    "ragged_all_to_all",
    "scatter",
    "scatter-add",
    "scatter-sub",
    "select_n",
    "stack",
    "sub",
    "swap",
}
# These are linear in each operand, one at a time,
_PRODUCTS = {"mul", "dot_general", "conv_general_dilated", "ragged_dot_general"}
# and these in the operand at this position alone.
_LINEAR_IN = {
    "div": 0,
    "scatter-mul": 0,
    "triangular_solve": 1,
    "tridiagonal_solve": 3,
    "select_and_scatter_add": 0,
    "select_and_gather_add": 0,
}
# JAX cannot differentiate or transpose the code in these. Some are in its registries all the same:
# with a rule that raises.
_OPAQUE = {"pure_callback", "io_callback", "ffi_call", "pallas_call", "mpmd_map"}
# Linear, but some version of JAX does not transpose them by its registry.
_LINEAR_TOO = {
    "gather",
    "slice",
    "dynamic_slice",
    "copy_p",
    "stop_gradient",
    "psum2",
    "reshard",
    "mesh_cast",
    "pcast",
    "optimization_barrier",
    "get",
    "swap",
    "addupdate",
    "relayout",
}


# The size up to which we check whether all entries of a constant are zero.
_MANY = 1 << 16


class NotLinearError(Exception):
    """The rule is not linear in its upstream gradients; the text names the operation."""

    def __init__(self, text: str, eqn: Any = None, error: Exception | None = None) -> None:
        super().__init__(text)
        self.eqn = eqn  # of the operation, or of the `jit` that calls it
        self.error = error  # or the error of Python code that needs a value


def check(closed: ClosedJaxpr, upstreams: int | None = None) -> "_Linearity":
    """Raise unless the traced rule is linear; return what was found.

    `upstreams` says how many of the last arguments are upstreams; None: all of them.
    """
    analysis, inputs = _Linearity(), len(closed.jaxpr.invars)
    others = 0 if upstreams is None else inputs - upstreams
    kinds = [*map(analysis.constant, closed.consts), *[_CONSTANT] * others]
    kinds += [_LINEAR] * (inputs - others)
    results = flow(without_consts(closed), kinds, analysis)
    if analysis.opaque and upstreams is None:
        name = analysis.opaque[0].primitive.name
        raise NotLinearError(f"`{name}`, which JAX cannot transpose", analysis.opaque[0])
    if _CONSTANT in results:
        raise NotLinearError("a gradient that is not zero and does not depend on the upstreams")
    return analysis


class _Linearity:
    """Classify each value as a function of the upstreams; raise where it is not linear."""

    def __init__(self) -> None:
        self.opaque: list[Any] = []  # equations that JAX cannot transpose, outside of `declared`
        # Calls of functions with a rule that have some inside: only the rule transposes these.
        self.declared: list[Any] = []
        # What only affects derivatives: other such calls, and `stop_gradient`. By the ids of the
        # equations around each and its own: calls of a jitted function share their equations.
        self.inlined: set[tuple[int, ...]] = set()
        self._path: tuple[int, ...] = ()
        self.declares = False  # whether there is a call with a derivative, at an upstream or not
        self._in_shard_map = False

    def constant(self, value: Any) -> int:
        """Return whether a constant is zero; a large one counts as not zero."""
        if isinstance(value, jax.core.Tracer) or (is_ref(value) and is_staging()):
            return _CONSTANT  # its value is not known
        if np.size(value) > _MANY:
            return _CONSTANT
        try:
            return _CONSTANT if np.any(np.asarray(value)) else _ZERO
        except (TypeError, ValueError, RuntimeError):  # cannot be read: a PRNG key, say
            return _CONSTANT

    def call(self, eqn: Any, operands: Sequence[int], follow: Callable[..., Followed]) -> Followed:
        if eqn.primitive.name == "while" and _LINEAR in operands:
            raise NotLinearError("`while`, which JAX cannot transpose", eqn)
        outside, self.opaque = self.opaque, []
        before, self._in_shard_map = self._in_shard_map, eqn.primitive.name == "shard_map"
        self._in_shard_map |= before
        around, self._path = self._path, (*self._path, id(eqn))
        try:
            followed = follow(eqn, operands, self)
        except NotLinearError as error:
            if eqn.primitive.name != "jit":
                raise
            # JAX traces the function once for all calls: the lines inside may be of another call.
            raise NotLinearError(f"{error} (in `{eqn.params['name']}`)", eqn) from None
        path, self._path, self._in_shard_map = self._path, around, before
        self.declares |= is_declared(eqn)
        if self.opaque and is_declared(eqn):
            self.declared.append(eqn)
            self.opaque = []
        elif _LINEAR in operands and (is_declared(eqn) or eqn.primitive.name == "custom_vmap_call"):
            self.inlined.add(path)
        self.opaque = outside + self.opaque
        return followed

    def step(self, eqn: Any, operands: Sequence[int]) -> Any:
        try:
            return self._kind(eqn, operands)
        except NotLinearError as error:
            raise NotLinearError(str(error), eqn) from None

    def _kind(self, eqn: Any, operands: Sequence[int]) -> Any:
        name, known = eqn.primitive.name, self._is_known(eqn.primitive)
        is_put = _names_no_device(eqn) and not self._in_shard_map
        is_identity = name == "stop_gradient" or is_put or _is_no_cast(eqn)
        if is_identity and _LINEAR in operands:
            self.inlined.add((*self._path, id(eqn)))
        if is_identity:
            return list(operands)
        if name == "push" and _LINEAR in operands[: eqn.params["n_residuals"]]:
            raise NotLinearError("the derivative of a decorated function at an upstream")
        if name == "convert_element_type":
            dtype = eqn.outvars[0].aval.dtype
            if operands[0] == _LINEAR and not is_kind(dtype, jnp.inexact):
                raise NotLinearError(f"`convert_element_type` to {np.dtype(dtype).name}")
            return operands[0]
        if isinstance(eqn.primitive, Identity) or name in ONE_BY_ONE:
            return list(operands[: len(eqn.outvars)])
        with_tangents = zip(eqn.invars, operands, strict=True)
        kinds = [k for a, k in with_tangents if is_differentiable(a.aval.dtype)] or list(operands)
        if name in _PRODUCTS:
            if kinds.count(_LINEAR) > 1:
                raise NotLinearError(f"`{name}` of two upstreams")
            # Linear even in a product with zero: what is refused does not depend on values.
            return _LINEAR if _LINEAR in kinds else min(kinds)
        if name == "gather" and (fill := eqn.params["fill_value"]) and not np.isnan(fill):
            kinds.append(_CONSTANT)  # JAX transposes it as if it filled with zeros
        if name == "polynomial":  # in its coefficients
            if operands[0] == _LINEAR:
                raise NotLinearError("`polynomial`, which is not linear in its operand 0")
            kinds = list(operands[1:])
        if name in _ADDS or name in ("gather", "polynomial"):
            return functools.reduce(functools.partial(self.join, name), kinds)
        if name in _LINEAR_IN:
            position = _LINEAR_IN[name]
            for i, kind in enumerate(operands):
                if kind == _LINEAR and i != position:
                    raise NotLinearError(f"`{name}`, which is not linear in its operand {i}")
            return operands[position]
        if _LINEAR not in operands:
            return _ZERO if known and not any(kinds) else _CONSTANT
        if known or not eqn.outvars:
            return _LINEAR
        if name not in _OPAQUE and can_differentiate(eqn.primitive):
            raise NotLinearError(f"`{name}`, which is not linear")
        self.opaque.append(eqn)
        return _LINEAR

    def _is_known(self, primitive: Any) -> bool:
        """Return whether JAX has a transpose of an operation, or raises an error of its own."""
        if primitive.name in _OPAQUE:
            return False
        return primitive.name in _LINEAR_TOO or can_transpose(primitive)

    def join(self, name: str, a: int, b: int) -> int:
        if {a, b} == {_CONSTANT, _LINEAR}:
            raise NotLinearError(f"`{name}` of an upstream and a constant")
        return max(a, b)

    def branch(self, name: str, predicate: int, result: int) -> int:
        return result  # no predicate is an upstream: `step` has refused, or it is opaque


def _names_no_device(eqn: Any) -> bool:
    """Return whether a `device_put` names no device. JAX may be unable to differentiate it."""
    is_put = eqn.primitive.name == "device_put"
    return is_put and all(device is None for device in eqn.params["devices"])


def _is_no_cast(eqn: Any) -> bool:
    """Return whether a bit cast keeps its dtype: `custom.py` marks values by one."""
    is_cast = eqn.primitive.name == "bitcast_convert_type"
    return is_cast and eqn.params["new_dtype"] == eqn.invars[0].aval.dtype
