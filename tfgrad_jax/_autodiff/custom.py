"""Make JAX use a rule: the one place that knows `jax.custom_vjp` and `jax.custom_jvp`.

`differentiable` returns what runs a program (`program.py`), a custom_jvp over a custom_vjp:

    not differentiated    primal
    differentiated        jvp: `Program.forward`, then `push` of the tangents; reverse mode
                          transposes that, which runs the rule
    where JAX drops a     forward and backward: `Program.forward`, then the rule
    custom_jvp

`forward` returns `attach(y, operands, rule)`, not `y`: the identity on `y` whose derivative
with respect to the operands is the rule again. So the declared gradient holds at every order,
where `y` alone would have the derivative of `f`'s own operations. Each differentiation takes
one `attach` away; nothing runs twice, and it compiles to nothing. In a program that is
recorded, `attach` is a custom derivative too, and not the primitive: kernels have no lowering
for that.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from tfgrad_jax._closure.residuals import Rule, is_traced
from tfgrad_jax._compat import (
    DROPS_CUSTOM_JVP,
    below,
    instantiate,
    is_linearizing,
    is_ref,
    is_staging,
)

from . import primitives
from .primitives import Pull, push


def _named(f: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Give `f` a name, and keep its signature: JAX works it out at every call of a custom rule."""
    f.__name__ = f.__qualname__ = name
    f.__signature__ = inspect.signature(f)  # type: ignore[attr-defined]
    return f


def _arrays(operands: Sequence[Any]) -> list[Any]:
    """Return Python numbers that are differentiated as (weakly typed) arrays."""
    return [o if isinstance(o, jax.Array) or is_ref(o) else jnp.asarray(o) for o in operands]


def _tangents(leaves: Sequence[Any], rule: Rule, tangents: Sequence[Any]) -> list[Any]:
    """Return the tangents of the leaves for those of the operands."""
    outputs = rule.static.outputs
    moved = [i for i in rule.static.moved if not isinstance(tangents[i], SymbolicZero)]
    ys, dxs = [leaves[i] for i in outputs], [tangents[i] for i in moved]
    dys = push(Pull.of(rule.static, moved), rule.residuals, ys, dxs) if moved else None
    found = dict(zip(outputs, dys or map(jnp.zeros_like, ys), strict=True))
    return [
        found[i] if i in found else np.zeros(y.shape, jax.dtypes.float0)
        for i, y in enumerate(leaves)
    ]


@functools.cache
def differentiable(name: str, may_refuse: bool) -> Callable[..., list[Any]]:
    """Return what runs a program on operands so that JAX differentiates it by its rule.

    What is perturbed is known only with `symbolic_zeros`, which kernels do not lower; so only
    programs ask for it that `may_refuse` to be differentiated.
    """

    def primal(program: Any, *operands: Any) -> list[Any]:
        return program.primal(_arrays(operands))

    def forward(program: Any, *operands: Any) -> Any:
        # Not with `symbolic_zeros`, which a shard_map has not: what may be differentiated is.
        arrays = _arrays(operands)
        leaves, rule = program.forward(arrays, [True] * len(arrays))
        return _attached(leaves, arrays, rule, False), rule

    def backward(rule: Rule, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        return None, *rule([instantiate(cotangents[i]) for i in rule.static.outputs])

    def reverse(program: Any, *operands: Any) -> list[Any]:
        return pair(program, *operands)

    def jvp(primals: Any, tangents: Any) -> Any:
        (program, *operands), (_, *dots) = primals, tangents
        perturbed = [not isinstance(t, SymbolicZero) for t in dots]
        linearizing = is_linearizing()
        with below(operands):
            operands = _arrays(operands)
            leaves, rule = program.forward(operands, perturbed)
            leaves = _attached(leaves, operands, rule, linearizing)
        return leaves, _tangents(leaves, rule, dots)

    pair = jax.custom_vjp(_named(primal, name))
    pair.defvjp(_named(forward, name), _named(backward, name))
    both = jax.custom_jvp(_named(reverse, name))
    both.defjvp(_named(jvp, name), symbolic_zeros=may_refuse)
    return both


# --- attach -------------------------------------------------------------------------------------


def _attached(
    leaves: Sequence[Any], operands: Sequence[Any], rule: Rule, linearizing: bool
) -> Sequence[Any]:
    """Return the leaves with the rule as their derivative with respect to the operands."""
    if not is_traced((*operands, *rule.residuals)):
        return leaves
    moved, outputs = rule.static.moved, rule.static.outputs
    ys, xs = [leaves[i] for i in outputs], [operands[i] for i in moved]
    # JAX evaluates in part what it has recorded without linearizing, and may drop a custom_jvp.
    recorded = is_staging() and (linearizing or not DROPS_CUSTOM_JVP)
    attach = _recorded(rule.static.refuse is not None) if recorded else primitives.attach
    attached = dict(
        zip(outputs, attach(Pull.of(rule.static, moved), rule.residuals, xs, ys), strict=False)
    )
    return [attached.get(i, y) for i, y in enumerate(leaves)]


@functools.cache
def _recorded(may_refuse: bool) -> Callable[..., list[Any]]:
    """Return `primitives.attach` as a custom derivative: in a program it is no operation."""

    def value(pull: Pull, residuals: Any, xs: Any, ys: Any) -> list[Any]:
        return ys

    def forward(pull: Pull, residuals: Any, xs: Any, ys: Any) -> Any:
        pull.check([True] * len(xs))
        return primitives.attach(pull, residuals, xs, ys), (pull, residuals)

    def backward(kept: tuple[Pull, Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        pull, residuals = kept
        return None, None, pull.run(residuals, list(map(instantiate, cotangents))), None

    def jvp(primals: Any, tangents: Any) -> Any:
        (pull, residuals, xs, ys), (_, _, dxs, _) = primals, tangents
        moved = [i for i, t in enumerate(dxs) if not isinstance(t, SymbolicZero)]
        pull.check([i in moved for i in range(len(xs))])
        with below((*jax.tree.leaves(residuals), *xs, *ys)):
            again = is_staging() and not DROPS_CUSTOM_JVP
            attach = _recorded(may_refuse) if again else primitives.attach
            out = attach(pull, residuals, xs, ys)
        if not moved:
            return out, list(map(jnp.zeros_like, ys))
        return out, push(pull.only(moved), residuals, ys, [dxs[i] for i in moved])

    identity: Callable[..., list[Any]] = value
    if DROPS_CUSTOM_JVP:
        pair = jax.custom_vjp(_named(value, "attach"))
        pair.defvjp(forward, backward)

        def identity(pull: Pull, residuals: Any, xs: Any, ys: Any) -> list[Any]:
            return pair(pull, residuals, xs, ys)

    both = jax.custom_jvp(_named(identity, "attach"))
    both.defjvp(_named(jvp, "attach"), symbolic_zeros=may_refuse)
    return both
