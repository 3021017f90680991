"""Our three JAX primitives, registered as JAX's page on primitives says.

`attach` is the identity on `ys`; its derivative with respect to `xs` is a rule. `push` maps
tangents of the `xs` to tangents of the `ys`. Its transpose is the rule, so reverse mode runs the
rule as it is; forward mode evaluates `push` by transposing the rule (`transpose.py`). `depend` is
the identity on `ys`; its results are batched if any operand is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from tfgrad_jax._jax.compat import batched_type, tangent_type, zeros
from tfgrad_jax._messages import errors
from tfgrad_jax._messages.tracebacks import hidden

from .linearity import NotLinearError
from .rule import Pull
from .transpose import empty, push_forward, refusal, transposed


def _primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    return primitive


attach_p, push_p, depend_p = map(_primitive, ("attach", "push", "depend"))


def zero_tangent(value: Any) -> Any:
    """Return the tangent of a value that is zero."""
    return zeros(tangent_type(value))


def _instantiated(value: Any) -> Any:
    return zeros(value.aval) if type(value) is ad.Zero else value


def _first(*args: Any, count: int, **_: Any) -> list[Any]:
    """Return the first operands, the `ys`: these are the results of `attach` and `depend`."""
    return list(args[:count])


def _mapped(values: Sequence[Any], dims: Sequence[Any], size: int) -> tuple[list[Any], list[int]]:
    """Return the values, all with a mapped axis, and the positions of this axis.

    A value without one gets it in front. No axis is moved: under `vmap`, JAX assumes that a staged
    value has the type of the value that it differentiates, mapped axis included.
    """
    with_axis = [
        jnp.broadcast_to(v, (size, *jnp.shape(v))) if d is None else v
        for v, d in zip(values, dims, strict=True)
    ]
    return with_axis, [0 if d is None else d for d in dims]


def _in_front(values: Sequence[Any], dims: Sequence[Any]) -> list[Any]:
    """Return the values with the mapped axis in front, where there is one."""
    return [v if d is None else jnp.moveaxis(v, d, 0) for v, d in zip(values, dims, strict=True)]


def _life() -> ClosedJaxpr:
    """Return a new, empty jaxpr as a parameter of an equation, so that JAX's caches forget it.

    JAX caches the type of each equation that it records, by its parameters; these are rules, and
    rules hold arrays. The cache has weak references to jaxprs, and drops an entry when one of them
    is deleted. So the entry lives no longer than the equation.
    """
    return ClosedJaxpr(empty(), ())


# --- depend -------------------------------------------------------------------------------------


def depend(ys: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Return `ys`; under `vmap` they are mapped if any of the others is."""
    return depend_p.bind(*ys, *others, count=len(ys))


def _depend_batch(axis: Any, args: Any, dims: Any, *, count: int) -> Any:
    ys, at = _mapped(args[:count], dims[:count], axis.size)
    return depend(ys, _in_front(args[count:], dims[count:])), at


def _depend_jvp(primals: Any, tangents: Any, *, count: int) -> Any:
    return depend_p.bind(*primals, count=count), list(tangents[:count])


def _depend_transpose(cotangents: Any, *args: Any, count: int) -> list[Any]:
    return [*cotangents, *[None] * (len(args) - count)]


# --- attach -------------------------------------------------------------------------------------


def attach(pull: Pull, residuals: Sequence[Any], xs: Sequence[Any], ys: Sequence[Any]) -> list[Any]:
    """Return `ys` with the rule as their derivative with respect to `xs`."""
    return attach_p.bind(*ys, *xs, *residuals, count=len(ys), xs=len(xs), pull=pull, life=_life())


def _attach_jvp(primals: Any, tangents: Any, *, count: int, xs: int, pull: Pull, life: Any) -> Any:
    ys, residuals = primals[:count], primals[count + xs :]
    out = attach_p.bind(*primals, count=count, xs=xs, pull=pull, life=life)
    dxs = tangents[count : count + xs]
    nonzero = [i for i, t in enumerate(dxs) if type(t) is not ad.Zero]
    if not nonzero:
        if pull.pure and any(type(t) is not ad.Zero for t in tangents[:count]):
            raise errors.hidden_tracer(pull.source)  # `y` has a tangent, and no operand has one
        return out, [ad.Zero(tangent_type(y)) for y in ys]
    return out, push(pull.only(nonzero), residuals, ys, [dxs[i] for i in nonzero])


def _attach_batch(
    axis: Any, args: Any, dims: Any, *, count: int, xs: int, pull: Pull, life: Any
) -> Any:
    end = count + xs
    ys, at = _mapped(args[:count], dims[:count], axis.size)
    new = pull.batched(axis, dims[end:], at, [d is not None for d in dims[count:end]])
    return attach(new, args[end:], _in_front(args[count:end], dims[count:end]), ys), at


# --- push ---------------------------------------------------------------------------------------


def push(
    pull: Pull, residuals: Sequence[Any], ys: Sequence[Any], tangents: Sequence[Any]
) -> list[Any]:
    """Return the tangents of `ys` for those of the `xs`."""
    types = tuple(tangent_type(y) for y in ys)
    return _push(residuals, tangents, pull, types)


def _push(residuals: Sequence[Any], tangents: Any, pull: Pull, types: Sequence[Any]) -> list[Any]:
    count = len(residuals)
    return push_p.bind(*residuals, *tangents, pull=pull, types=types, count=count, life=_life())


def _push_type(*args: Any, types: Sequence[Any], **_: Any) -> list[Any]:
    return list(types)


def _push_value(
    *args: Any, pull: Pull, types: Sequence[Any], count: int, life: Any = None
) -> list[Any]:
    residuals = args[:count]
    return push_forward(lambda cts: pull.run(residuals, cts), types, args[count:], pull.source)


def _push_jvp(primals: Any, tangents: Any, *, pull: Pull, types: Any, count: int, life: Any) -> Any:
    residuals, ts = primals[:count], primals[count:]
    out = push_p.bind(*primals, pull=pull, types=types, count=count, life=life)
    total: Any = None
    if any(type(t) is not ad.Zero for t in tangents[count:]):
        dts = map(_instantiated, tangents[count:])
        total = _push(residuals, dts, pull, types)
    nonzero = [i for i, t in enumerate(tangents[:count]) if type(t) is not ad.Zero]
    if nonzero:
        # Forward mode that is differentiated again: JAX differentiates the code of `_push_value`.
        def at(*some: Any) -> list[Any]:
            mixed = list(residuals)
            for i, r in zip(nonzero, some, strict=True):
                mixed[i] = r
            return transposed(lambda cts: pull.run(mixed, cts), types, ts)

        at_primals, dots = ([values[i] for i in nonzero] for values in (residuals, tangents))
        try:
            more = jax.jvp(at, at_primals, dots)[1]
        except NotLinearError as error:
            if error.error is None:
                raise refusal(pull.source, error) from None
            more = _push(primals, dots, pull.derivative(count, nonzero), types)
        total = more if total is None else [jnp.add(a, b) for a, b in zip(total, more, strict=True)]
    return out, [ad.Zero(t) for t in types] if total is None else total


def _push_transpose(
    cotangents: Any, *args: Any, pull: Pull, types: Any, count: int, life: Any
) -> list[Any]:
    if any(map(ad.is_undefined_primal, args[:count])):
        text = "a gradient that depends on its inputs"
        raise errors.not_linear(pull.source, text)
    gradients = pull.run(args[:count], [_instantiated(c) for c in cotangents])
    back = [
        None if not ad.is_undefined_primal(t) else ad.Zero(t.aval) if g is None else g
        for g, t in zip(gradients, args[count:], strict=True)
    ]
    return [*[None] * count, *back]


def _push_batch(
    axis: Any, args: Any, dims: Any, *, pull: Pull, types: Any, count: int, life: Any
) -> Any:
    mapped = [d is not None for d in dims[count:]]
    new = pull.batched(axis, dims[:count], [0] * len(types), mapped)
    types = tuple(batched_type(t, axis) for t in types)
    tangents = _in_front(args[count:], dims[count:])
    out = _push(args[:count], tangents, new, types)
    return out, [0] * len(types)


def _push_lowering(context: Any, *args: Any, pull: Pull, **params: Any) -> Any:
    def value(*args: Any) -> list[Any]:
        return _push_value(*args, pull=pull, **params)

    # JAX names what it traces in the error of a rule that branches on values.
    return mlir.lower_fun(pull.source.named(value, ()), multiple_results=True)(context, *args)


mlir.register_lowering(push_p, hidden(_push_lowering))

# --- registration with JAX ----------------------------------------------------------------------

for _p, _value, _type in (
    (depend_p, _first, _first),
    (attach_p, _first, _first),
    (push_p, _push_value, _push_type),
):
    _value = hidden(_value)
    _p.def_impl(_value)
    _p.def_abstract_eval(_type)
    if _p is not push_p:
        mlir.register_lowering(_p, mlir.lower_fun(_value, multiple_results=True))


def _only_mapped(primitive: Primitive, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for `vmap`, skipped if no operand is mapped: JAX calls it then, too."""

    def batch(axis: Any, args: Any, dims: Any, **params: Any) -> Any:
        if any(d is not None for d in dims):
            return rule(axis, args, dims, **params)
        out = primitive.bind(*args, **params)
        return out, [None] * len(out)

    return batch


ad.primitive_jvps[depend_p] = hidden(_depend_jvp)
ad.primitive_jvps[attach_p] = hidden(_attach_jvp)
ad.primitive_jvps[push_p] = hidden(_push_jvp)
ad.primitive_transposes[depend_p] = hidden(_depend_transpose)
ad.primitive_transposes[push_p] = hidden(_push_transpose)
for _p, _batch in ((depend_p, _depend_batch), (attach_p, _attach_batch), (push_p, _push_batch)):
    batching.fancy_primitive_batchers[_p] = hidden(_only_mapped(_p, _batch))
