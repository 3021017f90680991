"""Our three JAX primitives, registered as JAX's page on primitives says.

`attach` is the identity on `ys`; its derivative with respect to `xs` is a rule. `push` maps
tangents of the `xs` to tangents of the `ys`. Its transpose is the rule, so reverse mode runs the
rule as it is; forward mode evaluates `push` by transposing the rule (`transpose.py`). `depend` is
the identity on `ys`; its results are batched if any operand is.

Their operands are flat lists, in parts of these `sizes`, and the rest.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from .._jax.compat import batched_type, broadcast, tangent_type, zeros
from .._jax.jaxpr import Identity
from .._jax.types import AnyFunction, Aval, Cotangents, Dim, Leaf, Tangents, is_traced
from .._messages import errors
from .._messages.tracebacks import hidden
from .rule import Axis, Pull, replaced
from .transpose import explained, push_forward

_Values: TypeAlias = Sequence[Leaf]
_Batched: TypeAlias = tuple[list[Leaf], list[Dim]]  # values, and which axis of each is mapped
_WithTangents: TypeAlias = tuple[list[Leaf], list[Leaf]]
_Dims: TypeAlias = Sequence[Dim]
_Sizes: TypeAlias = tuple[int, ...]
_Types: TypeAlias = tuple[Aval, ...]


attach_p, depend_p, push_p = Identity("attach"), Identity("depend"), Primitive("push")
push_p.multiple_results = True


def _instantiated(value: Leaf) -> Leaf:
    return zeros(value.aval) if type(value) is ad.Zero else value


def _nonzero(tangents: Tangents) -> list[int]:
    return [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]


def _split(values: _Values, sizes: _Sizes) -> list[list[Leaf]]:
    """Return parts of these sizes, and the rest."""
    parts, start = [], 0
    for size in sizes:
        parts.append(list(values[start : start + size]))
        start += size
    return [*parts, list(values[start:])]


def _mapped(values: _Values, dims: _Dims, axis: Axis) -> _Batched:
    """Return the values, all with a mapped axis; a value without one gets it in front."""
    # To move each axis to the front would be simpler. But under `vmap`, JAX assumes that a staged
    # value has the type of the value that it differentiates, mapped axis included. With the axis in
    # front, a `scan` under two `vmap`s gave wrong second derivatives where both had the same size.
    with_axis = [broadcast(v, axis) if d is None else v for v, d in zip(values, dims, strict=True)]
    return with_axis, [0 if d is None else d for d in dims]


def _in_front(values: _Values, dims: _Dims) -> list[Leaf]:
    """Return the values with the mapped axis in front, where there is one."""
    return [v if d is None else jnp.moveaxis(v, d, 0) for v, d in zip(values, dims, strict=True)]


def _bind(primitive: Primitive, *args: Leaf, **params: Any) -> list[Leaf]:
    """Bind a primitive that has a rule among its parameters, so that JAX's caches forget it."""
    # JAX caches the type of each equation that it records, by its parameters. Ours are rules, and
    # rules hold arrays: each new `jit` of a function left a hundred objects there. The cache has
    # weak references to jaxprs, and drops an entry when one of them is deleted. With a new, empty
    # jaxpr among its parameters, an entry lives no longer than the equation.
    return primitive.bind(*args, **params, life=ClosedJaxpr(_EMPTY, ()))


_EMPTY = jax.make_jaxpr(lambda: ())().jaxpr


# --- depend -------------------------------------------------------------------------------------


def depend(ys: _Values, others: _Values) -> list[Leaf]:
    """Return `ys`; under `vmap` they are mapped if any of the others is."""
    # A staged call may be mapped later, and then differentiated: `vmap(jit(h), in_axes=(0, None))`
    # where `y` ignores the first input. An output that ignores a mapped operand must be mapped with
    # it, because the rule may use that operand. JAX's custom_vjp is wrong or raises there.
    return depend_p.bind(*ys, *others, sizes=(len(ys),))


# Both identities compile to nothing. Mosaic and Triton, which compile kernels, do not know them,
# and their tables are not ours to extend. So a Pallas kernel may compute a gradient, because JAX
# then drops the value and its `attach`; but not both a value and its gradient.
def _identity(*args: Leaf, sizes: _Sizes, **others: Any) -> list[Leaf]:
    return list(args[: sizes[0]])


def _depend_jvp(primals: _Values, tangents: Tangents, *, sizes: _Sizes) -> _WithTangents:
    return depend_p.bind(*primals, sizes=sizes), list(tangents[: sizes[0]])


def _depend_transpose(cotangents: Cotangents, *args: Leaf, sizes: _Sizes) -> list[Leaf]:
    return [*cotangents, *[None] * (len(args) - sizes[0])]


def _depend_batch(axis: Axis, args: _Values, dims: _Dims, *, sizes: _Sizes) -> _Batched:
    (ys, others), (y_dims, dims) = _split(args, sizes), _split(dims, sizes)
    ys, at = _mapped(ys, y_dims, axis)
    return depend(ys, _in_front(others, dims)), at


# --- attach -------------------------------------------------------------------------------------


def attach(pull: Pull, residuals: _Values, xs: _Values, ys: _Values) -> list[Leaf]:
    """Return `ys` with the rule as their derivative with respect to `xs`."""
    sizes = len(ys), len(xs)
    return _bind(attach_p, *ys, *xs, *residuals, sizes=sizes, pull=pull)


def _attach_jvp(
    primals: _Values, tangents: Tangents, *, sizes: _Sizes, pull: Pull, **life: Any
) -> _WithTangents:
    out = _bind(attach_p, *primals, sizes=sizes, pull=pull)
    (ys, _, residuals), (dys, dxs, _) = _split(primals, sizes), _split(tangents, sizes)
    nonzero = _nonzero(dxs)
    if nonzero:
        residuals = pull.reading(residuals, out)
        return out, push(pull.only(nonzero), residuals, out, [dxs[i] for i in nonzero])
    # `y` has a tangent, and no operand has one: it comes from a tracer that we did not find, such
    # as one in a global variable. Its derivative would be that of `f`'s own operations. A Ref may
    # have such tangents, so a function with Refs is let pass.
    if pull.pure and _nonzero(dys):
        raise errors.leaked(pull.source)
    return out, [ad.Zero(tangent_type(y)) for y in ys]


def _attach_batch(
    axis: Axis, args: _Values, dims: _Dims, *, sizes: _Sizes, pull: Pull, **life: Any
) -> _Batched:
    (ys, xs, residuals), parts = _split(args, sizes), _split(dims, sizes)
    ys, at = _mapped(ys, parts[0], axis)
    residuals, residual_dims = pull.reading(residuals, ys), pull.reading(parts[2], at)
    new = pull.batched(axis, residual_dims, at, [d is not None for d in parts[1]])
    return attach(new, residuals, _in_front(xs, parts[1]), ys), at


# --- push ---------------------------------------------------------------------------------------


def push(pull: Pull, residuals: _Values, ys: _Values, tangents: Tangents) -> list[Leaf]:
    """Return the tangents of `ys` for those of the `xs`."""
    # Where `ys` are mapped, each example has its own upstream, even if nothing that the rule reads
    # is mapped: `y = x + k`, mapped along `k`. The rule would get the sum of all upstreams, and run
    # where the name of the axis is not bound. So an empty array is mapped with `ys`, one residual
    # more, which the rule ignores; `ys` themselves would be kept for the backward pass.
    if is_traced(ys):
        residuals = [*residuals, *depend([jax.lax.iota(np.int32, 0)], ys)]
    return push_by_type(residuals, tangents, pull, tuple(map(tangent_type, ys)))


def push_by_type(residuals: _Values, tangents: Tangents, pull: Pull, types: _Types) -> list[Leaf]:
    sizes = (len(residuals),)
    return _bind(push_p, *residuals, *tangents, sizes=sizes, pull=pull, types=types)


def _push_type(*args: Leaf, types: _Types, **_: Any) -> list[Aval]:
    return list(types)


def _push_value(*args: Leaf, sizes: _Sizes, pull: Pull, types: _Types, **life: Any) -> list[Leaf]:
    residuals, tangents = _split(args, sizes)
    if pull.forward is not None:
        return pull.forward(residuals, tangents, pull.perturbed)
    return push_forward(lambda cts: pull.run(residuals, cts), types, tangents, pull.source)


def _push_jvp(
    primals: _Values, tangents: Tangents, *, sizes: _Sizes, pull: Pull, types: _Types, **life: Any
) -> _WithTangents:
    out = _bind(push_p, *primals, sizes=sizes, pull=pull, types=types)
    (residuals, ts), (dots, dts) = _split(primals, sizes), _split(tangents, sizes)
    parts = []
    if _nonzero(dts):
        parts.append(push_by_type(residuals, list(map(_instantiated, dts)), pull, types))
    if some := _nonzero(dots):  # JAX differentiates the code that evaluates a `push`

        def of_some(*values: Leaf) -> list[Leaf]:
            mixed = replaced(residuals, some, values)
            return _push_value(*mixed, *ts, sizes=sizes, pull=pull, types=types)

        at = [residuals[i] for i in some], [dots[i] for i in some]
        parts.append(jax.jvp(of_some, *at)[1])
    if not parts:
        return out, [ad.Zero(t) for t in types]
    first, *others = parts
    return out, [jnp.add(a, b) for a, b in zip(first, *others, strict=True)] if others else first


def _push_transpose(
    cotangents: Cotangents, *args: Leaf, sizes: _Sizes, pull: Pull, types: _Types, **life: Any
) -> list[Leaf]:
    residuals, tangents = _split(args, sizes)
    if any(map(ad.is_undefined_primal, residuals)):
        text = "a gradient that depends on its inputs"
        raise errors.not_linear(pull.source, text)
    cotangents = list(map(_instantiated, cotangents))
    with explained(pull.source):
        if pull.forward is None:
            gradients = pull.run(residuals, cotangents)
        else:
            xs = tuple(t.aval for t in tangents)
            gradients = push_by_type(residuals, cotangents, pull.transposed(), xs)
    back = [
        None if not ad.is_undefined_primal(t) else ad.Zero(t.aval) if g is None else g
        for g, t in zip(gradients, tangents, strict=True)
    ]
    return [*[None] * len(residuals), *back]


def _push_batch(
    axis: Axis,
    args: _Values,
    dims: _Dims,
    *,
    sizes: _Sizes,
    pull: Pull,
    types: _Types,
    **life: Any,
) -> _Batched:
    (residuals, tangents), (residual_dims, x_dims) = _split(args, sizes), _split(dims, sizes)
    if pull.forward is not None:
        tangents, x_dims = _mapped(tangents, x_dims, axis)
    in_front: list[Dim] = [0] * len(types)
    new = pull.batched(axis, residual_dims, in_front, [d is not None for d in x_dims])
    out_types = tuple(batched_type(t, axis) for t in types)
    return push_by_type(residuals, _in_front(tangents, x_dims), new, out_types), in_front


def _push_lowering(context: Any, *args: Any, pull: Pull, **params: Any) -> Any:
    def value(*args: Leaf) -> list[Leaf]:
        return _push_value(*args, pull=pull, **params)

    # JAX names the function that it traces here in the error of a rule that branches on values.
    lowered = mlir.lower_fun(pull.source.named(value, ()), multiple_results=True)
    with explained(pull.source):
        return lowered(context, *args)


# --- registration with JAX ----------------------------------------------------------------------


def _only_mapped(primitive: Primitive, rule: AnyFunction) -> AnyFunction:
    """Return the rule for `vmap`, skipped if no operand is mapped: JAX calls it then, too."""

    def batch(axis: Axis, args: _Values, dims: _Dims, **params: Any) -> _Batched:
        if any(d is not None for d in dims):
            return rule(axis, args, dims, **params)
        out = primitive.bind(*args, **params)
        return out, [None] * len(out)

    return batch


def _register(
    primitive: Primitive,
    value: AnyFunction,
    abstract: AnyFunction,
    jvp: AnyFunction,
    batch: AnyFunction,
    lowering: AnyFunction,
) -> None:
    primitive.def_impl(hidden(value))
    primitive.def_abstract_eval(abstract)
    ad.primitive_jvps[primitive] = hidden(jvp)
    batching.fancy_primitive_batchers[primitive] = hidden(_only_mapped(primitive, batch))
    mlir.register_lowering(primitive, lowering)


_LOWERED = mlir.lower_fun(_identity, multiple_results=True)
_register(depend_p, _identity, _identity, _depend_jvp, _depend_batch, _LOWERED)
_register(attach_p, _identity, _identity, _attach_jvp, _attach_batch, _LOWERED)
_register(push_p, _push_value, _push_type, _push_jvp, _push_batch, hidden(_push_lowering))
ad.primitive_transposes[depend_p] = hidden(_depend_transpose)
ad.primitive_transposes[push_p] = hidden(_push_transpose)
