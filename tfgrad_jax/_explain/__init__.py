"""Show what a custom gradient does: what it keeps, where that comes from, and what it costs.

A call keeps for its backward pass what `jax.vjp` of it returns: the leaves of its pull-back.
`explain` reads where these come from, in a jaxpr in which every array is an operand.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from pathlib import Path
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.tree_util import tree_structure, tree_unflatten

from tfgrad_jax._jax.jaxpr import Identity
from tfgrad_jax._jax.types import NEEDS_VALUES, AnyFunction, Aval, Eqn, Leaf, PyTree
from tfgrad_jax._messages import tool_errors
from tfgrad_jax._messages.source import Source
from tfgrad_jax._messages.text import aligned, type_name

from .call import TYPE, ArrayIndex, Call, called_with, watching
from .look import Look, look_at


class Seen(NamedTuple):
    """An array that the function reads, and the gradient it gets if JAX differentiates it."""

    name: str
    type: str
    gradient: str  # "by the rule", "autodiff", "zero", or "none: " and why


class Residual(NamedTuple):
    """An array that is kept for the backward pass."""

    name: str  # the rule's variable, or the operation and the line that compute it
    type: str
    bytes: int
    origin: str  # "new", or an array in memory anyway: "input", "captured" or "output"


class Explanation(NamedTuple):
    """What a custom gradient does at some arguments. Prints as a table."""

    name: str
    inputs: Sequence[Seen]
    captured: Sequence[Seen]
    residuals: Sequence[Residual]
    kept_bytes: int
    new_bytes: int  # of the residuals that are no input, output or captured value
    autodiff: Sequence[Residual] | None  # what plain autodiff keeps; None if it does not work
    autodiff_bytes: int | None
    forward_mode: bool | None  # None: unknown
    obstacle: str  # why forward mode does not work, or why that is unknown
    costs: Callable[[], dict[str, dict[str, float]]]  # compiles: the estimates for each program

    def __repr__(self) -> str:
        plain = "unknown" if self.autodiff_bytes is None else f"{self.autodiff_bytes:,} B"
        kept = [(r.name, r.type, f"{r.bytes:,} B", r.origin) for r in self.residuals]
        kept += [("total", "", f"{self.kept_bytes:,} B", f"of which {self.new_bytes:,} B new")]
        kept += [("by autodiff", "", plain, "")]
        lines = [f"Custom gradient of `{self.name}`"]
        for head, table in (
            (("inputs", "", "gradient"), self.inputs),
            (("closed over", "", "gradient"), self.captured),
            (("kept by the rule", "", "", ""), kept),
        ):
            rows = [(f"  {name}", *rest) for name, *rest in table]
            lines += [f"  {line}" for line in aligned([head, *rows])] if table else []
        forward = {True: "works", False: "no: ", None: "unknown: "}[self.forward_mode]
        return "\n".join([*lines, f"  forward mode: {forward}{self.obstacle}"])


def explain(h: AnyFunction, /, *args: PyTree, **kwargs: PyTree) -> Explanation:
    """Report where each gradient comes from, what the rule keeps, and what that costs.

    All arrays among the arguments, and all that the function closes over, are treated as traced,
    as under `jax.jit`. `h` is traced, and executed only if it branches on values.

    Args:
        h: a function that `custom_gradient`, `grad_pass_through` or `recompute_grad` returned, or
            a `functools.partial` of one.
        *args: its arguments, or `jax.ShapeDtypeStruct` in the place of arrays.
        **kwargs: its keyword arguments.

    Returns:
        An `Explanation`, which prints as a table: the arrays that `h` reads and the gradient of
        each; what the rule keeps, and what JAX would keep for the undecorated function (depends on
        its version); whether forward mode works. `costs()` compiles, and returns estimates.

    Raises:
        TypeError: if `h` is not such a function, or needs values and got none.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from tfgrad_jax import custom_gradient, explain
        >>> square = custom_gradient(lambda x: (x * x, lambda dy: 2 * x * dy))
        >>> found = explain(square, jax.ShapeDtypeStruct((512, 512), jnp.float32))
        >>> [(r.name, r.bytes, r.origin) for r in found.residuals], found.new_bytes
        ([('x', 1048576, 'input')], 0)
    """
    while isinstance(h, functools.partial):
        h, args, kwargs = h.func, (*h.args, *args), {**h.keywords, **kwargs}
    return copy_context().run(_explained, called_with(h, args, kwargs))


_Named: TypeAlias = tuple[str, str, Leaf]  # name, origin, and the array or a variable of a jaxpr


def _explained(call: Call) -> Explanation:
    """Trace the call, or run it where it branches on values."""
    watching()
    traced = functools.partial(look_at, call, False)
    try:
        closed, shapes = jax.make_jaxpr(traced, return_shape=True)(*call.arrays)
    except NEEDS_VALUES as error:
        if any(isinstance(v, TYPE) for v in call.arrays):
            raise tool_errors.explain_needs_values(_name(call)) from error
        arrays = list(map(jnp.asarray, call.arrays))
        return _explanation(call, look_at(call, True, *arrays), arrays, (), ())
    jaxpr = closed.jaxpr
    found = tree_unflatten(tree_structure(shapes), jaxpr.outvars)
    constants = zip(jaxpr.constvars, closed.consts, strict=True)
    return _explanation(call, found, jaxpr.invars, jaxpr.eqns, constants)


def _explanation(
    call: Call,
    found: Look,
    operands: Sequence[Leaf],  # variables of a jaxpr, or arrays, which stand for those of the call
    eqns: Sequence[Eqn],
    constants: Iterable[tuple[Leaf, Leaf]],  # the variables of a jaxpr for these, and their values
) -> Explanation:
    n = len(call.held.arrays)
    names = {id(a.value): a.name for a in call.held.constants}
    rows: list[_Named] = []
    rows += [(name, "new", v) for name, v in zip(found.held_names, found.held, strict=True)]
    # The outputs have the rule attached; without it, they are what the rule may keep.
    inner = [p for e in eqns if isinstance(e.primitive, Identity) for p in zip(e.outvars, e.invars)]
    below = {id(v): within for v, within in inner}
    rows += [(name, "output", below.get(id(v), v)) for name, v in found.outputs.items()]
    rows += [(a.name, "captured", a.value) for a in call.held.constants]
    rows += [(names.get(id(c), "(unnamed)"), "captured", v) for v, c in constants]
    origins = ["captured"] * n + ["input"] * len(call.given)
    rows += zip(call.names, origins, operands, strict=True)
    table = functools.partial(_residuals, rows=rows, eqns=eqns, source=call.source)
    residuals = table(found.kept)
    autodiff = None if found.plain is None else table(found.plain)
    seen = list(map(Seen, call.names, map(type_name, call.arrays), found.gradients))
    unseen = [
        Seen(name, type_name(v), f"unknown: {why or 'not replaced'}")
        for name, v, why in call.held.constants
    ]
    return Explanation(
        name=_name(call),
        inputs=seen[n:],
        captured=[*seen[:n], *unseen],
        residuals=residuals,
        kept_bytes=_bytes(residuals),
        new_bytes=_bytes([r for r in residuals if r.origin == "new"]),
        autodiff=autodiff,
        autodiff_bytes=None if autodiff is None else _bytes(autodiff),
        forward_mode=found.forward_mode,
        obstacle=found.obstacle,
        costs=functools.partial(_costs, call, found.differentiated, found.y_types),
    )


def _name(call: Call) -> str:
    return call.source.name.replace("<locals>.", "")


def _residuals(
    kept: Sequence[Leaf], rows: Sequence[_Named], eqns: Sequence[Eqn], source: Source
) -> list[Residual]:
    """Return a row for each array that is kept: by its name, or by the operation that makes it."""
    named: dict[int, tuple[str, str]] = {}
    for name, origin, v in rows:
        named[id(v)] = named.get(id(v), (name,))[0], origin  # the rule's name comes first
    made = {id(v): eqn for eqn in eqns for v in eqn.outvars}

    def maker(v: Leaf) -> Eqn | None:
        eqn = made.get(id(v))
        if eqn is None or eqn.primitive.name != "reduce_precision":
            return eqn
        return made.get(id(eqn.invars[0]), eqn)  # a `checkpoint` rounds what its policy keeps

    def row(v: Leaf) -> Residual:
        name, origin = named.get(id(v), ("(unnamed)", "new"))
        if id(v) not in named and (eqn := maker(v)):
            line = Path(source.first_use(eqn)).name
            name = f"`{eqn.params.get('name', eqn.primitive.name)}` ({line})"
        t: Aval = getattr(v, "aval", v)
        return Residual(name, type_name(t), math.prod(t.shape) * t.dtype.itemsize, origin)

    return list({id(v): row(v) for v in kept}.values())


def _bytes(residuals: Sequence[Residual]) -> int:
    return sum(r.bytes for r in residuals)


def _costs(
    call: Call, positions: Sequence[ArrayIndex], y_types: Sequence[Aval]
) -> dict[str, dict[str, float]]:
    """Compile the value, the gradient and that of plain autodiff; return what JAX estimates."""
    programs: dict[str, AnyFunction] = {
        "value": lambda _, *arrays: call.value(arrays),
        "gradient": lambda dys, *arrays: call.vjp(positions, arrays).pull(dys),
        "gradient by autodiff": lambda dys, *arrays: call.vjp(positions, arrays, True).pull(dys),
    }
    found = {}
    for of, program in programs.items():
        with contextlib.suppress(Exception):  # of any type: that of tracing or compiling
            compiled = jax.jit(program).lower(list(y_types), *call.arrays).compile()
            temporary = getattr(compiled.memory_analysis(), "temp_size_in_bytes", math.nan)
            found[of] = {**(compiled.cost_analysis() or {}), "temporary bytes": temporary}
    return found
