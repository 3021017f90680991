"""Check that a rule is linear in its upstreams, before it is transposed.

`check` follows the upstreams through the equations of the rule, into its loops and branches. It
refuses operations that add a constant to an upstream, because JAX would drop the constant, and
those that JAX cannot transpose. Any other operation is linear in the operand that the upstream
reaches, or JAX refuses to transpose it.

What JAX has in its registry of transposes needs no line here. An operation that adds, or that is
linear in some operands alone, has a row in `_OPERATIONS`, and no other place knows its name.
"""

import enum
import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive

from .._jax.compat import can_differentiate, can_transpose, is_ref
from .._jax.jaxpr import ONE_BY_ONE, Analysis, Follow, Followed, Identity
from .._jax.types import Aval, Eqn, Leaf, is_kind


class Degree(enum.IntEnum):
    """How a value in a rule depends on the upstreams. A sum has the largest kind of its terms."""

    ZERO, CONSTANT, LINEAR = range(3)


ZERO, CONSTANT, LINEAR = Degree
Kinds: TypeAlias = Sequence[Degree]


class NotLinearError(Exception):
    """The rule is not linear, or JAX cannot transpose it; the text names the operation."""

    def __init__(self, text: str, eqn: Eqn | None = None) -> None:
        super().__init__(text)
        self.eqn = eqn  # of the operation, or of the `jit` that calls it


# --- what each operation does -------------------------------------------------------------------

How: TypeAlias = Callable[[Eqn, Kinds], Degree]  # the kinds of the operands -> that of the results


def _aval(atom: object) -> Aval:
    return cast("Aval", atom).aval


def _join(name: str, a: Degree, b: Degree) -> Degree:
    if {a, b} == {CONSTANT, LINEAR}:
        raise NotLinearError(f"`{name}` of an upstream and a constant")
    return max(a, b)


def _any_operand(eqn: Eqn, kinds: Kinds) -> Degree:
    """An operation that is linear in whichever operand the upstream reaches."""
    return LINEAR if LINEAR in kinds else max(kinds, default=ZERO)


def _linear_in(*groups: slice) -> How:
    """One that is linear in the operands of each group together, and in one group at a time."""

    def how(eqn: Eqn, kinds: Kinds) -> Degree:
        name, places = eqn.primitive.name, range(len(kinds))
        for i, kind in enumerate(kinds):
            if kind == LINEAR and not any(i in places[group] for group in groups):
                raise NotLinearError(f"`{name}`, which is not linear in its operand {i}")
        join = functools.partial(_join, name)
        each = [functools.reduce(join, kinds[group]) for group in groups]
        if each.count(LINEAR) > 1:
            raise NotLinearError(f"`{name}` of two upstreams")
        # An upstream times zero counts as linear, not as zero: otherwise `dy * mask * dy` would
        # pass where the mask is all zeros, and raise with the next batch. No value decides what is
        # refused.
        return LINEAR if LINEAR in each else min(each)

    return how


def _gather(eqn: Eqn, kinds: Kinds) -> Degree:
    # What is out of bounds gets the fill value. JAX transposes a `gather` as if that were zero, so
    # another one is a constant beside the upstream. NaN, the default, marks what has no value.
    fill = eqn.params["fill_value"]
    return _join("gather", kinds[0], CONSTANT) if fill and not np.isnan(fill) else kinds[0]


def _convert(eqn: Eqn, kinds: Kinds) -> Degree:
    dtype = _aval(eqn.outvars[0]).dtype
    if kinds[0] == LINEAR and not is_kind(dtype, jnp.inexact):
        raise NotLinearError(f"`convert_element_type` to {np.dtype(dtype).name}")
    return kinds[0]


def _bit_cast(eqn: Eqn, kinds: Kinds) -> Degree:
    """A mark if it keeps the dtype: `custom.py` has these around the value of a function."""
    is_mark = eqn.params["new_dtype"] == _aval(eqn.invars[0]).dtype
    return kinds[0] if is_mark else _not_linear(eqn, kinds)


def _push(eqn: Eqn, kinds: Kinds) -> Degree:
    """The derivative of a decorated function: linear in its tangents."""
    if LINEAR in kinds[len(eqn.params["rule"].perturbed) :]:
        raise NotLinearError("the derivative of a decorated function at an upstream")
    return _any_operand(eqn, kinds)


def _not_linear(eqn: Eqn, kinds: Kinds) -> Degree:
    if LINEAR in kinds:
        raise NotLinearError(f"`{eqn.primitive.name}`, which is not linear")
    return CONSTANT


def _opaque(eqn: Eqn, kinds: Kinds) -> Degree:
    """Code that JAX cannot transpose. A decorated function around it may say how."""
    return LINEAR if LINEAR in kinds else CONSTANT


def _ref(eqn: Eqn, kinds: Kinds) -> Degree:
    """What makes, reads or writes a Ref. Upstreams are not followed into one."""
    if LINEAR in kinds:
        raise NotLinearError("a `Ref` to which an upstream is written")
    return CONSTANT


_ADD = "add add_any complex concatenate pad stack sub"
_MULTIPLY = "mul dot_general conv_general_dilated ragged_dot_general"
_SCATTER = "scatter scatter-add scatter-sub"
_FIRST = "div scatter-mul select_and_gather_add select_and_scatter_add"
# These are linear, but some version of JAX does not transpose them by its registry.
_ANY = "slice dynamic_slice copy_p reshard mesh_cast pcast relayout"
_REF = "new_ref get swap addupdate freeze"
# JAX cannot differentiate or transpose the code in these. Some are in its registries all the same:
# with a rule that raises, in words that do not say which rule of the user's it is. `stop_gradient`
# has a transpose, zero, which is not that of the identity.
_CODE = "pure_callback io_callback ffi_call pallas_call mpmd_map stop_gradient"

_OPERATIONS: dict[str, How] = {
    **dict.fromkeys(_ADD.split(), _linear_in(slice(None))),
    **dict.fromkeys(_MULTIPLY.split(), _linear_in(slice(0, 1), slice(1, 2))),
    **dict.fromkeys(_SCATTER.split(), _linear_in(slice(0, None, 2))),
    **dict.fromkeys(_FIRST.split(), _linear_in(slice(0, 1))),
    **dict.fromkeys(_ANY.split(), _any_operand),
    **dict.fromkeys(_REF.split(), _ref),
    **dict.fromkeys(_CODE.split(), _opaque),
    "bitcast_convert_type": _bit_cast,
    "convert_element_type": _convert,
    "dynamic_update_slice": _linear_in(slice(2)),
    "gather": _gather,
    "polynomial": _linear_in(slice(1, None)),
    "push": _push,
    "ragged_all_to_all": _linear_in(slice(2)),
    "select_n": _linear_in(slice(1, None)),
    "triangular_solve": _linear_in(slice(1, 2)),
    "tridiagonal_solve": _linear_in(slice(3, 4)),
}


def _how(primitive: Primitive, has_results: bool) -> How:
    if primitive.name in _OPERATIONS:
        return _OPERATIONS[primitive.name]
    # JAX is the judge of all others. What it transposes maps zero to zero; what it differentiates
    # and does not transpose, such as `sin`, is not linear. A callback for its effect, such as
    # `jax.debug.print`, returns nothing that could be wrong.
    if can_transpose(primitive) or not has_results:
        return _any_operand
    return _not_linear if can_differentiate(primitive) else _opaque


# --- the analysis -------------------------------------------------------------------------------

_NO_TRANSPOSE = ("while", "custom_vmap_call")  # calls that JAX cannot transpose


def check(closed: ClosedJaxpr, is_transpose: bool = False) -> "Linearity":
    """Raise unless the traced rule is linear; return what was found.

    It is to be transposed, unless it `is_transpose` already: then code that is opaque to JAX may be
    in it.
    """
    found = Linearity(may_be_opaque=is_transpose)
    kinds = [*map(found.constant, closed.consts), *[LINEAR] * len(closed.jaxpr.invars)]
    if CONSTANT in found.follow(closed.jaxpr, kinds):
        raise NotLinearError(
            "a gradient that is not zero and does not depend on the upstreams (did you forget to "
            "multiply by dy?)"
        )
    return found


class Linearity(Analysis[Degree]):
    """Classify each value as a function of the upstreams; raise where it is not linear."""

    def __init__(self, may_be_opaque: bool = False) -> None:
        super().__init__()
        self.declared: Eqn | None = None  # a call that has a derivative of its own, at an upstream
        self.declares = False  # whether there is such a call, at an upstream or not
        self._may_be_opaque = may_be_opaque

    def constant(self, value: Leaf) -> Degree:
        """Return whether a constant is zero; a large one counts as not zero."""
        if isinstance(value, jax.core.Tracer) or is_ref(value):
            return CONSTANT  # its value is not known, or may be another one later
        if np.size(value) > 1 << 16:  # to look at all entries would take time
            return CONSTANT
        try:
            return CONSTANT if np.any(np.asarray(value)) else ZERO
        except (TypeError, ValueError, RuntimeError):  # cannot be read: a PRNG key, say
            return CONSTANT

    def call(self, eqn: Eqn, operands: Kinds, follow: Follow[Degree]) -> Followed[Degree]:
        name, analysis = eqn.primitive.name, self
        if name in _NO_TRANSPOSE and LINEAR in operands and not self._may_be_opaque:
            raise NotLinearError(f"`{name}`, which JAX cannot transpose", eqn)
        if name.startswith(("custom_jvp", "custom_vjp")):  # it has a derivative of its own
            # A wrong derivative in a decorated function does not make it linear: so its body is
            # looked through, too. Only its rule transposes it, so there may be anything else in it.
            analysis = self if self._may_be_opaque else self._of_bodies
            self.declares = True
            if LINEAR in operands:
                self.declared = self.declared or eqn
        try:
            return follow(eqn, operands, analysis)
        except NotLinearError as error:
            if name == "jit":
                # JAX traces it once for all calls: the lines inside may be of another call.
                error.args, error.eqn = (f"{error} (in `{eqn.params['name']}`)",), eqn
            raise

    @functools.cached_property
    def _of_bodies(self) -> "Linearity":
        return Linearity(may_be_opaque=True)

    def step(self, eqn: Eqn, operands: Kinds) -> list[Degree]:
        name = eqn.primitive.name
        if isinstance(eqn.primitive, Identity) or name in ONE_BY_ONE:
            return list(operands[: len(eqn.outvars)])
        how = _how(eqn.primitive, bool(eqn.outvars))
        if how is _opaque and LINEAR in operands and eqn.outvars and not self._may_be_opaque:
            raise NotLinearError(f"`{name}`, which JAX cannot transpose", eqn)
        try:
            return [how(eqn, operands)] * len(eqn.outvars)
        except NotLinearError as error:
            error.eqn = eqn
            raise

    def join(self, name: str, a: Degree, b: Degree) -> Degree:
        return _join(name, a, b)

    def branch(self, name: str, predicate: Degree, result: Degree) -> Degree:
        return result  # no predicate is an upstream: `step` has refused, or it is opaque
