"""Show what a custom gradient does: which gradient each input gets, and what is kept for it.

A call keeps for its backward pass the leaves of its pull-back. `explain` traces both, so each leaf
is a variable of a jaxpr: an operand, an output, a constant, or what an operation makes.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import jax
from jax import ShapeDtypeStruct
from jax.extend.core import Jaxpr
from jax.extend.source_info_util import summarize
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves

from ._jax.compat import is_ref, type_of, zeros
from ._jax.jaxpr import Identity, dependence, without_consts
from ._jax.types import AnyFunction, Leaf, PyTree, has_gradient, is_array
from ._messages.errors import bad_option
from ._messages.text import aligned, type_name
from ._tools import Call, decorated, differentiable, name_of, refuse_pair


class Seen(NamedTuple):
    """An input, and its gradient: "by the rule", "autodiff" (no rule), "zero", or "none: " why."""

    name: str
    type: str
    gradient: str


class Residual(NamedTuple):
    """An array that is kept: an input or output, or of the operation and line that make it."""

    name: str
    type: str
    bytes: int
    origin: str  # "new", or an array in memory anyway: "input", "output" or "captured"


class Explanation(NamedTuple):
    """What a custom gradient does at some arguments. Prints as a table."""

    name: str
    inputs: Sequence[Seen]
    residuals: Sequence[Residual]
    kept_bytes: int
    new_bytes: int  # of the residuals that are no input, output or captured value
    forward_mode: bool
    obstacle: str  # why forward mode does not work

    def __repr__(self) -> str:
        kept = [(r.name, r.type, f"{r.bytes:,} B", r.origin) for r in self.residuals]
        kept += [("total", "", f"{self.kept_bytes:,} B", f"of which {self.new_bytes:,} B new")]
        lines = [f"Custom gradient of `{self.name}`"]
        heads = ("inputs", "", "gradient"), ("kept for the backward pass", "", "", "")
        for head, table in zip(heads, (self.inputs, kept), strict=True):
            rows = [(f"  {name}", *rest) for name, *rest in table]
            lines += [f"  {line}" for line in aligned([head, *rows])]
        forward = "works" if self.forward_mode else f"no: {self.obstacle}"
        return "\n".join([*lines, f"  forward mode: {forward}"])


def explain(h: AnyFunction, /, *args: PyTree, **kwargs: PyTree) -> Explanation:
    """Report which gradient each input gets, and what is kept for the backward pass.

    JAX traces `h`, as under `jax.jit`, so a branch on a value is an error; nothing is computed.

    Args:
        h: a function, such as one that `custom_gradient` returned, a method or a layer.
        *args: its arguments, or `jax.ShapeDtypeStruct` in the place of arrays.
        **kwargs: its keyword arguments.

    Returns:
        An `Explanation`, which prints as a table: the gradient of each input; what is kept for the
        backward pass, and how large it is; whether forward mode works.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from tfgrad_jax import custom_gradient, explain
        >>> square = custom_gradient(lambda x: (x * x, lambda dy: 2 * x * dy))
        >>> found = explain(square, jax.ShapeDtypeStruct((512, 512), jnp.float32))
        >>> [(r.name, r.bytes, r.origin) for r in found.residuals], found.new_bytes
        ([('x', 1048576, 'input')], 0)
    """
    if not callable(h):
        raise bad_option("h", h, "a function, and its arguments after it", "explain")
    call = Call.of(h, args, kwargs)
    arrays = {i: v for i, v in enumerate(call.leaves) if _is_operand(v)}
    some = [i for i, v in arrays.items() if has_gradient(v)]
    outputs: list[str] = []
    zero: set[int] = set()

    def value(given: Mapping[int, Leaf]) -> tuple[list[Leaf], PyTree]:
        y = call.run(call.h, given)
        refuse_pair(call.h, y, "explain")
        return differentiable(y), y

    def kept(given: dict[int, Leaf]) -> list[Leaf]:
        x = {i: given[i] for i in some}
        ys, pull, y = jax.vjp(lambda new: value(given | new), x, has_aux=True)
        back = jax.make_jaxpr(pull)([zeros(jax.typeof(y).to_ct_aval()) for y in ys])
        upstreams = (1 << len(ys)) - 1 << len(back.consts)
        reached = zip(some, dependence(without_consts(back)), strict=True)
        zero.update(i for i, mask in reached if not mask & upstreams)
        named = [(p, v) for p, v in tree_flatten_with_path(y)[0] if isinstance(v, jax.Array)]
        outputs.extend(f"y{keystr(path)}" for path, _ in named)
        return [*(v for _, v in named), *filter(_is_operand, tree_leaves(pull))]

    def forward(given: dict[int, Leaf]) -> list[Leaf]:
        x = {i: given[i] for i in some}
        return jax.jvp(lambda new: value(given | new)[0], (x,), (x,))[1]

    jaxpr, obstacle = jax.make_jaxpr(kept)(arrays).jaxpr, ""
    try:  # what JAX cannot transpose, it says no earlier
        jax.jit(forward).lower(arrays)
    except Exception as error:
        obstacle = str(error).partition("\n")[0].partition(". ")[0]
    none = {i: f"none: {type_of(v).dtype} has no derivative" for i, v in arrays.items()}
    by = none | dict.fromkeys(some, "by the rule" if decorated(call.h) else "autodiff")
    by |= dict.fromkeys(zero, "zero")
    inputs = [Seen(call.names[i], type_name(v), by[i]) for i, v in arrays.items()]
    residuals = _residuals(jaxpr, [row.name for row in inputs], outputs)
    new = sum(r.bytes for r in residuals if r.origin == "new")
    size = sum(r.bytes for r in residuals)
    return Explanation(name_of(call.h), inputs, residuals, size, new, not obstacle, obstacle)


def _is_operand(v: Leaf) -> bool:
    return (is_array(v) and not is_ref(v)) or isinstance(v, float | complex | ShapeDtypeStruct)


def _residuals(jaxpr: Jaxpr, names: Sequence[str], outputs: Sequence[str]) -> list[Residual]:
    """Return a row for each array that is kept: the results of a jaxpr after the outputs."""
    labels: dict[int, tuple[str, str]] = {}
    same: dict[int, Leaf] = {}  # an output to which a rule is attached is the same array
    for e in jaxpr.eqns:
        line = summarize(e.source_info).rpartition("/")[2].partition(" ")[0]
        made = f"`{e.params.get('name', e.primitive.name)}` ({line})", "new"
        labels |= dict.fromkeys(map(id, e.outvars), made)
        if isinstance(e.primitive, Identity):
            same |= {id(a): same.get(id(b), b) for a, b in zip(e.outvars, e.invars, strict=False)}
    results = [same.get(id(v), v) for v in jaxpr.outvars]
    labels |= {id(v): (name, "output") for name, v in zip(outputs, results, strict=False)}
    labels |= {id(v): (name, "input") for name, v in zip(names, jaxpr.invars, strict=True)}
    rows = []
    for key, t in {id(v): v.aval for v in results[len(outputs) :]}.items():
        name, origin = labels.get(key, ("(unnamed)", "captured"))
        rows.append(Residual(name, type_name(t), prod(t.shape) * t.dtype.itemsize, origin))
    return rows
