"""Our three JAX primitives, registered as JAX's page on primitives says.

`attach` is the identity on the leaves of a value. The derivative of some of them, `ys`, with
respect to operands, `xs`, is a rule. `push` maps tangents of the `xs` to tangents of the `ys`. Its
transpose is the rule, so reverse mode runs the rule as it is; forward mode evaluates `push` by
transposing the rule (`transpose.py`). `depend` is the identity on `ys`; its results are batched if
any operand is.

Their operands are flat lists: of `attach` the leaves, the `xs` and the residuals, of `push` the
tangents and the residuals. The rule among their parameters says how many `xs` there are.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from .._jax.compat import batched_type, broadcast, zeros
from .._jax.jaxpr import Identity
from .._jax.types import AnyFunction, Aval, Cotangents, Dim, Leaf, Tangents, Values, is_traced
from .._messages import errors
from .._messages.tracebacks import hidden
from .rule import Axis, Rule, replaced
from .transpose import push_forward

_Batched: TypeAlias = tuple[list[Leaf], list[Dim]]  # values, and which axis of each is mapped
_WithTangents: TypeAlias = tuple[list[Leaf], list[Leaf]]
_Dims: TypeAlias = Sequence[Dim]
_Types: TypeAlias = tuple[Aval, ...]


attach_p, depend_p, push_p = Identity("attach"), Identity("depend"), Primitive("push")
push_p.multiple_results = True


def _instantiated(value: Leaf) -> Leaf:
    return zeros(value.aval) if type(value) is ad.Zero else value


def _nonzero(tangents: Tangents) -> list[int]:
    return [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]


def _split(values: Values, *sizes: int) -> list[list[Leaf]]:
    """Return parts of these sizes, and the rest."""
    ends = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    return [list(values[i:j]) for i, j in zip(ends, [*ends[1:], len(values)], strict=True)]


def _mapped(values: Values, dims: _Dims, axis: Axis) -> _Batched:
    """Return the values, all with a mapped axis; a value without one gets it in front."""
    # To move each axis to the front would be simpler. But under `vmap`, JAX assumes that a staged
    # value has the type of the value that it differentiates, mapped axis included. With the axis in
    # front, a `scan` under two `vmap`s gave wrong second derivatives where both had the same size.
    with_axis = [broadcast(v, axis) if d is None else v for v, d in zip(values, dims, strict=True)]
    return with_axis, [0 if d is None else d for d in dims]


def _in_front(values: Values, dims: _Dims) -> list[Leaf]:
    """Return the values with the mapped axis in front, where there is one."""
    return [v if d is None else jnp.moveaxis(v, d, 0) for v, d in zip(values, dims, strict=True)]


def _life() -> ClosedJaxpr:
    """Return a parameter for equations that have a rule, so that JAX's caches forget them."""
    # JAX caches the type of each equation that it records, by its parameters. Ours are rules, and
    # rules hold arrays: each new `jit` of a function left a hundred objects there. The cache has
    # weak references to jaxprs, and drops an entry when one of them is deleted. With a new, empty
    # jaxpr among its parameters, an entry lives no longer than the equation.
    return ClosedJaxpr(_EMPTY, ())


_EMPTY = jax.make_jaxpr(lambda: ())().jaxpr


# --- depend -------------------------------------------------------------------------------------


def depend(ys: Values, others: Values) -> list[Leaf]:
    """Return `ys`; under `vmap` they are mapped if any of the others is."""
    # A staged call may be mapped later, and then differentiated: `vmap(jit(h), in_axes=(0, None))`
    # where `y` ignores the first input. An output that ignores a mapped operand must be mapped with
    # it, because the rule may use that operand. JAX's custom_vjp is wrong or raises there.
    return depend_p.bind(*ys, *others, count=len(ys))


# Both identities compile to nothing. Mosaic and Triton, which compile kernels, do not know them,
# and their tables are not ours to extend. So a Pallas kernel may compute a gradient, because JAX
# then drops the value and its `attach`; but not both a value and its gradient.
def _identity(*args: Leaf, count: int, **others: Any) -> list[Leaf]:
    return list(args[:count])


def _depend_jvp(primals: Values, tangents: Tangents, *, count: int) -> _WithTangents:
    return depend_p.bind(*primals, count=count), list(tangents[:count])


def _depend_batch(axis: Axis, args: Values, dims: _Dims, *, count: int) -> _Batched:
    ys, at = _mapped(args[:count], dims[:count], axis)
    return depend(ys, args[count:]), at


# --- attach -------------------------------------------------------------------------------------


def attach(rule: Rule, residuals: Values, xs: Values, leaves: Values) -> list[Leaf]:
    """Return the leaves with the rule as the derivative of its outputs with respect to `xs`."""
    return attach_p.bind(*leaves, *xs, *residuals, rule=rule, count=len(leaves), life=_life())


def _attach_jvp(
    primals: Values, tangents: Tangents, *, rule: Rule, count: int, **life: Any
) -> _WithTangents:
    out = attach_p.bind(*primals, rule=rule, count=count, **life)
    dots = [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in out]
    dys, dxs, _ = _split(tangents, count, len(rule.perturbed))
    if nonzero := _nonzero(dxs):
        residuals = rule.reading(primals[count + len(dxs) :], out)
        moving = rule.only(rule.perturbed[i] for i in nonzero)
        ys, moved = [out[i] for i in rule.outputs], [dxs[i] for i in nonzero]
        return out, replaced(dots, rule.outputs, push(moving, residuals, ys, moved))
    # `y` has a tangent, and no operand has one: it comes from a tracer that we did not find, such
    # as one in a global variable. Its derivative would be that of `f`'s own operations. A Ref may
    # have such tangents, so a function with Refs is let pass.
    if len(dxs) == rule.n_operands and _nonzero(dys):
        raise errors.leaked(rule.source)
    return out, dots


def _attach_batch(
    axis: Axis, args: Values, dims: _Dims, *, rule: Rule, count: int, **life: Any
) -> _Batched:
    sizes = count, len(rule.perturbed)
    (leaves, xs, residuals), (dims, x_dims, kept) = _split(args, *sizes), _split(dims, *sizes)
    leaves, at = _mapped(leaves, dims, axis)
    residuals, kept = rule.reading(residuals, leaves), rule.reading(kept, at)
    ys = [at[i] for i in rule.outputs]
    new = rule.batched(axis, kept, ys, [d is not None for d in x_dims])
    return attach(new, residuals, _in_front(xs, x_dims), leaves), at


# --- push ---------------------------------------------------------------------------------------


def push(rule: Rule, residuals: Values, ys: Values, tangents: Tangents) -> list[Leaf]:
    """Return the tangents of `ys` for those of the `xs`."""
    # Where `ys` are mapped, each example has its own upstream, even if nothing that the rule reads
    # is mapped: `y = x + k`, mapped along `k`. The rule would get the sum of all upstreams, and run
    # where the name of the axis is not bound. So an empty array is mapped with `ys`, one residual
    # more, which the rule ignores; `ys` themselves would be kept for the backward pass.
    if is_traced(ys):
        residuals = [*residuals, *depend([jax.lax.iota(np.int32, 0)], ys)]
    types = tuple(jax.typeof(y).to_tangent_aval() for y in ys)
    return push_by_type(residuals, tangents, rule, types)


def push_by_type(residuals: Values, tangents: Tangents, rule: Rule, types: _Types) -> list[Leaf]:
    return push_p.bind(*tangents, *residuals, rule=rule, types=types, life=_life())


def _push_type(*args: Leaf, types: _Types, **others: Any) -> list[Aval]:
    return list(types)


def _push_value(*args: Leaf, rule: Rule, types: _Types, **life: Any) -> list[Leaf]:
    tangents, residuals = _split(args, len(rule.perturbed))
    return push_forward(lambda cts: rule(residuals, cts), types, tangents, rule.source)


def _push_jvp(primals: Values, tangents: Tangents, *, rule: Rule, **others: Any) -> _WithTangents:
    out = push_p.bind(*primals, rule=rule, **others)
    count, parts = len(rule.perturbed), []
    if _nonzero(tangents[:count]):
        moved = [*map(_instantiated, tangents[:count]), *primals[count:]]
        parts.append(push_p.bind(*moved, rule=rule, **others))
    # JAX differentiates the code that evaluates a `push`.
    if some := [i for i in _nonzero(tangents) if i >= count]:

        def of_some(*values: Leaf) -> list[Leaf]:
            return _push_value(*replaced(primals, some, values), rule=rule, **others)

        at = [primals[i] for i in some], [tangents[i] for i in some]
        parts.append(jax.jvp(of_some, *at)[1])
    if not parts:
        return out, [ad.Zero(t) for t in others["types"]]
    first, *more = parts
    return out, [jnp.add(a, b) for a, b in zip(first, *more, strict=True)] if more else first


def _push_transpose(
    cotangents: Cotangents, *args: Leaf, rule: Rule, types: _Types, **life: Any
) -> list[Leaf]:
    tangents, residuals = _split(args, len(rule.perturbed))
    if any(map(ad.is_undefined_primal, residuals)):
        text = "a gradient that depends on its inputs"
        raise errors.not_linear(rule.source, text)
    gradients = rule(residuals, list(map(_instantiated, cotangents)))
    back = [
        None if not ad.is_undefined_primal(t) else ad.Zero(t.aval) if g is None else g
        for g, t in zip(gradients, tangents, strict=True)
    ]
    return [*back, *[None] * len(residuals)]


def _push_batch(
    axis: Axis, args: Values, dims: _Dims, *, rule: Rule, types: _Types, **life: Any
) -> _Batched:
    count = len(rule.perturbed)
    (tangents, residuals), (x_dims, dims) = _split(args, count), _split(dims, count)
    at: list[Dim] = [0] * len(types)
    new = rule.batched(axis, dims, at, [d is not None for d in x_dims])
    out_types = tuple(batched_type(t, axis) for t in types)
    return push_by_type(residuals, _in_front(tangents, x_dims), new, out_types), at


def _push_lowering(context: Any, *args: Any, rule: Rule, **params: Any) -> Any:
    def value(*args: Leaf) -> list[Leaf]:
        return _push_value(*args, rule=rule, **params)

    # JAX names the function that it traces here in the error of a rule that branches on values.
    lowered = mlir.lower_fun(rule.source.named(value, ()), multiple_results=True)
    return lowered(context, *args)


# --- registration with JAX ----------------------------------------------------------------------


def _only_mapped(primitive: Primitive, rule: AnyFunction) -> AnyFunction:
    """Return the rule for `vmap`, skipped if no operand is mapped: JAX calls it then, too."""

    def batch(axis: Axis, args: Values, dims: _Dims, **params: Any) -> _Batched:
        if any(d is not None for d in dims):
            return rule(axis, args, dims, **params)
        out = primitive.bind(*args, **params)
        return out, [None] * len(out)

    return batch


_LOWERED = mlir.lower_fun(_identity, multiple_results=True)
_RULES: dict[Primitive, list[AnyFunction]] = {
    depend_p: [_identity, _identity, _depend_jvp, _depend_batch, _LOWERED],
    attach_p: [_identity, _identity, _attach_jvp, _attach_batch, _LOWERED],
    push_p: [_push_value, _push_type, _push_jvp, _push_batch, hidden(_push_lowering)],
}
for _p, (_value, _type, _jvp, _batch, _lowering) in _RULES.items():
    _p.def_impl(hidden(_value))
    _p.def_abstract_eval(_type)
    ad.primitive_jvps[_p] = hidden(_jvp)
    batching.fancy_primitive_batchers[_p] = hidden(_only_mapped(_p, _batch))
    mlir.register_lowering(_p, _lowering)
ad.primitive_transposes[push_p] = hidden(_push_transpose)
