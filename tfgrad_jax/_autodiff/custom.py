"""Make JAX use a rule: the one place that knows `jax.custom_vjp` and `jax.custom_jvp`.

`differentiable` returns what runs a program (`program.py`), a custom_jvp and a custom_vjp:

    not differentiated    primal
    by `grad` or `vjp`,   forward and backward of the custom_vjp: `Program.forward`, then the rule
    directly
    otherwise             jvp: `Program.forward`, then `push` of the tangents; reverse mode
                          transposes that, which runs the rule
    where JAX drops a     forward and backward of the custom_vjp, which then stands below the
    custom_jvp            custom_jvp

`forward` returns `attach(y, operands, rule)`, not `y`: the identity on `y` whose derivative
with respect to the operands is the rule again. So the declared gradient holds at every order,
where `y` alone would have the derivative of `f`'s own operations. Each differentiation takes
one `attach` away; nothing runs twice, and it compiles to nothing.
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
from tfgrad_jax._compat import KEEPS_CUSTOM_JVP, below, instantiate, is_ref, is_reverse
from tfgrad_jax._tracebacks import hidden

from .primitives import Pull, attach, depend, push


def _named(f: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Give `f` a name, and keep its signature: JAX works it out at every call of a custom rule."""
    f.__name__ = f.__qualname__ = name
    f.__signature__ = inspect.signature(f)  # type: ignore[attr-defined]
    return hidden(jax.named_scope(name)(f))  # the name of the operations in profiles


def _arrays(operands: Sequence[Any]) -> list[Any]:
    """Return Python numbers that are differentiated as (weakly typed) arrays."""
    return [o if isinstance(o, jax.Array) or is_ref(o) else jnp.asarray(o) for o in operands]


def _tangents(leaves: Sequence[Any], rule: Rule, tangents: Sequence[Any]) -> list[Any]:
    """Return the tangents of the leaves for those of the operands."""
    outputs = rule.static.outputs
    moved = [i for i in rule.static.moved if not isinstance(tangents[i], SymbolicZero)]
    ys, dxs = [leaves[i] for i in outputs], [tangents[i] for i in moved]
    dys = push(*Pull.of(rule, moved), ys, dxs) if moved else None
    found = dict(zip(outputs, dys or map(jnp.zeros_like, ys), strict=True))
    return [
        found[i] if i in found else np.zeros(y.shape, jax.dtypes.float0)
        for i, y in enumerate(leaves)
    ]


@functools.cache
def differentiable(name: str, may_refuse: bool, has_refs: bool) -> Callable[..., list[Any]]:
    """Return what runs a program on operands so that JAX differentiates it by its rule.

    What is perturbed is known only with `symbolic_zeros`, which kernels do not lower; so only
    programs ask for it that `may_refuse` to be differentiated. JAX takes Refs through a custom_vjp,
    and not through a custom_jvp.
    """

    def primal(program: Any, *operands: Any) -> list[Any]:
        return program.primal(_arrays(operands))

    def result(program: Any, operands: Sequence[Any], perturbed: Sequence[bool]) -> Any:
        operands = _arrays(operands)
        leaves, rule = program.forward(operands, perturbed)
        return program.laid_out(_attached(leaves, operands, rule)), rule

    def forward(program: Any, *operands: Any) -> Any:
        # A shard_map has no `symbolic_zeros`: what may be differentiated is.
        perturbed = [True] * len(operands)
        if has_refs and may_refuse:
            perturbed = [o.perturbed for o in operands]
            operands = tuple(o.value for o in operands)
        leaves, rule = result(program, operands, perturbed)
        return leaves, _apart(rule, operands)

    def forward_at_once(program: Any, *operands: Any) -> Any:
        return result(program, operands, [True] * len(operands))

    def backward(rule: Rule, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        return None, *rule([instantiate(cotangents[i]) for i in rule.static.outputs])

    def reverse(program: Any, *operands: Any) -> list[Any]:
        return pair(program, *operands)

    def jvp(primals: Any, tangents: Any) -> Any:
        (program, *operands), (_, *dots) = primals, tangents
        perturbed = [not isinstance(t, SymbolicZero) for t in dots]
        with below(operands):
            leaves, rule = result(program, operands, perturbed)
        return leaves, _tangents(leaves, rule, dots)

    pair = jax.custom_vjp(_named(primal, name))
    pair.defvjp(
        _named(forward, name), _named(backward, name), symbolic_zeros=has_refs and may_refuse
    )
    if has_refs:
        return pair
    # Kernel compilers for GPUs know a custom_jvp, and no custom_vjp.
    value = primal if KEEPS_CUSTOM_JVP else functools.wraps(primal)(reverse)
    both = jax.custom_jvp(value)
    both.defjvp(_named(jvp, name), symbolic_zeros=may_refuse)
    if may_refuse:
        return both
    at_once = jax.custom_vjp(_named(primal, name))
    at_once.defvjp(_named(forward_at_once, name), _named(backward, name))

    def run(program: Any, *operands: Any) -> list[Any]:
        # JAX linearizes a custom_jvp, and only notes a custom_vjp.
        return (at_once if is_reverse(operands) else both)(program, *operands)

    return run


def _apart(rule: Rule, operands: Sequence[Any]) -> Rule:
    """Return the rule with no operand among its residuals, but what has the same value.

    JAX does not save a residual that is an operand, and before 0.12 it takes another value for it
    where the custom_vjp was staged together with constants.
    """
    own = {id(o) for o in operands if not is_ref(o)}
    kept = [depend([r], [])[0] if id(r) in own else r for r in rule.residuals]
    return Rule(rule.static, kept)


def _attached(leaves: Sequence[Any], operands: Sequence[Any], rule: Rule) -> Sequence[Any]:
    """Return the leaves with the rule as their derivative with respect to the operands.

    As in `Program.primal`, each is mapped that has a mapped operand: JAX holds that the two agree.
    """
    if not is_traced((*operands, *rule.residuals)):
        return leaves
    moved, outputs = rule.static.moved, rule.static.outputs
    ys, xs = [leaves[i] for i in outputs], [operands[i] for i in moved]
    attached = attach(*Pull.of(rule, moved), xs, ys)
    if len(ys) == len(leaves) and len(xs) == len(operands):
        return attached  # each depends on every operand
    known = dict(zip(outputs, attached, strict=True))
    traced = {i: o for i, o in enumerate(operands) if is_traced([o]) and not is_ref(o)}
    seen = {*moved}
    others = [o for i, o in traced.items() if i not in seen]
    for i, leaf in enumerate(leaves):
        ignored = others if i in known else list(traced.values())
        if ignored:
            (known[i],) = depend([known.get(i, leaf)], ignored)
    return [known.get(i, leaf) for i, leaf in enumerate(leaves)]
