"""Push tangents through a rule so that reverse mode gets the rule itself back.

`solved` runs where forward mode meets a rule with a loop or, in a compiled program, one that
subtracts upstreams: from `_linear.push_forward`. There the tangents `J t` are the transpose of the
rule, `J^T`, and reverse mode would transpose that once more: the same numbers, but JAX keeps all
that the loop computed on the way, where the rule recomputes it, and makes `a + (-b)` of `a - b`.
JAX has one linear operation whose transpose can be given, and which is batched and differentiated
at every order: `lax.custom_linear_solve`. So `J t` is made part of a solution.

With `M (u, v) = (u, v - J u)`, which has the inverse `(u, v + J u)`, the symmetric system

    M^T q = a
    M   p = b          for b = (t, 0) has the solution p = (t, J t)

and its transpose, which is itself, gives for a = (0, c) the solution q = (J^T c, c): the rule,
called on the cotangent. What is computed in vain, one half each time, the compiler drops.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._structure import sum_of_nothing

Map = Callable[[list[Any]], Sequence[Any]]


def solved(push: Map, pull: Map, tangents: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Return `push(tangents)`, which are like `outputs`, with `pull` as the transpose."""

    def m(p: Any, combine: Any) -> Any:
        u, v = p
        return u, list(map(combine, v, push(u)))

    def m_transposed(q: Any, combine: Any) -> Any:
        u, v = q
        return list(map(combine, u, pull(v))), v

    def apply(x: Any) -> Any:
        p, q = x
        return _linked((m_transposed(q, lax.sub), m(p, lax.sub)))

    def solve(_: Any, right: Any) -> Any:
        a, b = right
        return _linked((m(b, lax.add), m_transposed(a, lax.add)))

    no_t, no_y = ([jnp.zeros_like(x) for x in these] for these in (tangents, outputs))
    right = _linked(((no_t, no_y), (list(tangents), no_y)))
    solution = lax.custom_linear_solve(apply, right, solve, solve, symmetric=True)
    (_, result), _ = _linked(solution)
    return result


def _linked(x: Any) -> Any:
    """Make every leaf depend on all leaves, by none of their elements.

    JAX transposes the system only if all of its leaves have tangents or none has. This
    compiles to nothing.
    """
    leaves, treedef = jax.tree.flatten(x)
    none = {dtype: sum_of_nothing(leaves, dtype) for dtype in {leaf.dtype for leaf in leaves}}
    linked = [lax.sub(leaf, lax.broadcast(none[leaf.dtype], leaf.shape)) for leaf in leaves]
    return treedef.unflatten(linked)
