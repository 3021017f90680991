"""Show what a custom gradient does: what it keeps, and where that comes from.

A call keeps for its backward pass what `jax.vjp` of it returns: the leaves of its pull-back.
`explain` reads where these come from, in a jaxpr in which every array is an operand. A function
that branches on values runs eagerly instead.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.tree_util import (
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_structure,
    tree_unflatten,
)

from ._closure.names import is_known, named
from ._closure.reach import survey
from ._custom_gradient import CustomGradient
from ._family import is_recomputed
from ._jax.compat import is_ref
from ._jax.jaxpr import Identity, reads
from ._jax.types import (
    NEEDS_VALUES,
    AnyFunction,
    Aval,
    Eqn,
    Inert,
    Leaf,
    PyTree,
    has_gradient,
    is_array,
    type_of,
)
from ._messages import tool_errors
from ._messages.source import Source
from ._messages.text import aligned, type_name
from ._tools.call import (
    CallOnArrays,
    Made,
    UserCodeError,
    ValueIndex,
    attempt,
    bound,
    decorated,
    differentiable,
)
from ._tools.forward import forward_mode

_TYPE = jax.ShapeDtypeStruct


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
    """Report where each gradient comes from, and what the rule keeps.

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
        its version); whether forward mode works.

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
    h, args = bound(h, args)
    source, runs = Source.of(h), _Runs()
    look = _Look(CallOnArrays.of(runs.watched(h), args, kwargs), runs)
    name = source.name.replace("<locals>.", "")
    try:
        closed, shapes = jax.make_jaxpr(look, return_shape=True)(*look.arrays)
    except NEEDS_VALUES as error:
        if any(isinstance(v, _TYPE) for v in look.arrays):
            raise tool_errors.explain_needs_values(name) from error
        variables, eqns = list(map(jnp.asarray, look.arrays)), []
        kept, known, plain = look(*variables, is_eager=True)
    else:
        jaxpr = closed.jaxpr
        variables, eqns = [*jaxpr.invars, *jaxpr.constvars], jaxpr.eqns
        kept, known, plain = tree_unflatten(tree_structure(shapes), jaxpr.outvars)
    table = functools.partial(_residuals, look.named([*known, *variables]), eqns, source)
    residuals, autodiff = table(kept), None if plain is None else table(plain)
    rows = list(map(Seen, look.names, map(type_name, look.arrays), look.gradients))
    unseen = [
        Seen(name, type_name(v), f"unknown: {why or 'not replaced'}")
        for name, v, why in look.constants
    ]
    return Explanation(
        name=name,
        inputs=rows[: look.inputs],
        captured=[*rows[look.inputs :], *unseen],
        residuals=residuals,
        kept_bytes=_bytes(residuals),
        new_bytes=_bytes([r for r in residuals if r.origin == "new"]),
        autodiff=autodiff,
        autodiff_bytes=None if autodiff is None else _bytes(autodiff),
        forward_mode=look.forward_mode,
        obstacle=look.obstacle,
    )


def _bytes(residuals: Sequence[Residual]) -> int:
    return sum(r.bytes for r in residuals)


_Label: TypeAlias = tuple[str, str]  # the name and the origin of an array


def _residuals(
    known: Sequence[tuple[Leaf, _Label]], eqns: Sequence[Eqn], source: Source, kept: Sequence[Leaf]
) -> list[Residual]:
    """Return a row for each array that is kept: by its name, or by the operation that makes it.

    The arrays are variables of a jaxpr. An output with the rule attached is the same array.
    """
    identities = [e for e in eqns if isinstance(e.primitive, Identity)]
    below = {id(a): b for e in identities for a, b in zip(e.outvars, e.invars, strict=False)}
    made = {id(v): eqn for eqn in eqns for v in eqn.outvars}

    def same(v: Leaf) -> Leaf:
        while id(v) in below:
            v = below[id(v)]
        return v

    labels: dict[int, _Label] = {}
    for v, (name, origin) in known:  # the rule's name comes first
        labels[id(same(v))] = labels.get(id(same(v)), (name,))[0], origin

    def row(v: Leaf) -> Residual:
        name, origin = labels.get(id(v), ("(unnamed)", "new"))
        eqn = made.get(id(v))
        if eqn is not None and id(v) not in labels:
            if eqn.primitive.name == "reduce_precision":  # a `checkpoint` rounds what it keeps
                eqn = made.get(id(eqn.invars[0]), eqn)
            line = Path(source.first_use(eqn)).name
            name = f"`{eqn.params.get('name', eqn.primitive.name)}` ({line})"
        t: Aval = getattr(v, "aval", v)
        return Residual(name, type_name(t), math.prod(t.shape) * t.dtype.itemsize, origin)

    return list({id(v): row(v) for v in map(same, kept)}.values())


class _Look:
    """What is found out about a call while it runs as a function of its arrays, mostly in a trace.

    It returns arrays; in the jaxpr variables stand for them. So what is kept is compared with what
    is known by identity, and no array need exist.
    """

    gradients: Sequence[str]
    forward_mode: bool | None = None
    obstacle = ""

    def __init__(self, call: CallOnArrays, runs: "_Runs") -> None:
        self._call, self._runs, values = call, runs, call.values
        self._at = [i for i, v in enumerate(values) if isinstance(v, _TYPE) or _is_operand(v)]
        self.arrays = [values[i] for i in self._at]
        self.names = [call.names[i] for i in self._at]
        self.inputs = sum(i < len(call.leaves) for i in self._at)
        self.constants = call.held.constants
        self._labels: list[_Label] = []

    def __call__(
        self, *arrays: Leaf, is_eager: bool = False
    ) -> tuple[list[Leaf], list[Leaf], list[Leaf] | None]:
        """Return what is kept, the arrays that have labels, and what plain autodiff keeps."""
        call, given = self._call, dict(zip(self._at, arrays, strict=True))
        possible = [i for i in self._at if has_gradient(given[i])]
        refused = call.refused(possible, given)
        some = {i: given[i] for i in possible if i not in refused}

        def pulled_back(of: Callable[[Made], PyTree]) -> Any:
            def of_some(new: dict[ValueIndex, Leaf]) -> tuple[list[Leaf], dict[str, Leaf]]:
                y = of(call.made({**given, **new}))
                paths = tree_flatten_with_path(y)[0]  # the very arrays: the rule may keep one
                outputs = {f"y{keystr(path)}": v for path, v in paths if isinstance(v, jax.Array)}
                return differentiable(y), outputs

            return jax.vjp(of_some, some, has_aux=True)

        ys, pull, outputs = pulled_back(Made.value)
        last_rule = lambda: self._runs.last().grad_fn  # noqa: E731
        self.forward_mode, self.obstacle = forward_mode(pull, ys, list(some.values()), last_rule)
        every = None
        with contextlib.suppress(UserCodeError):  # as before, or it branches on its upstream
            every = reads(attempt(jax.make_jaxpr(pull), ys))
        # What no upstream reaches is zero, if the rule is linear.
        zero = "zero or constant" if self.forward_mode is False else "zero"
        ignored = [i for i, (upstreams, _) in zip(some, every or (), strict=False) if not upstreams]
        gradients = {i: f"none: {type_of(v).dtype} has no derivative" for i, v in given.items()}
        gradients |= {i: self._by(i) for i in some} | dict.fromkeys(ignored, zero)
        gradients |= dict.fromkeys(refused, "none: an error where it is differentiated")
        self.gradients = list(gradients.values())
        plain, of_plain = None, Made.plain if decorated(call.h) else Made.undecorated
        with contextlib.suppress(UserCodeError):  # it has no derivative
            _, plain_pull, _ = attempt(pulled_back, of_plain)
            attempt(jax.eval_shape, plain_pull, ys)  # a loop says only now that it has none
            plain = _leaves(plain_pull)
        # The rule also reads what no operand stands for: eagerly all, staged global arrays, say.
        constants = {id(v): (name, v) for name, v, _ in self.constants}
        held = self._runs.last().held
        read = [v for _, v in held] if every is None else [v for _, read in every for v in read]
        kept = [*_leaves(pull), *(v for v in read if is_eager or id(v) in constants)]
        self._labels = [(name, "new") for name, _ in held]
        self._labels += [(name, "output") for name in outputs]
        self._labels += [(name, "captured") for name, _ in constants.values()]
        known = [*held, *outputs.items(), *constants.values()]
        return kept, [v for _, v in known], plain

    def _by(self, i: ValueIndex) -> str:
        """Return where the gradient of an array comes from."""
        owner, is_held = decorated(self._call.h), i >= len(self._call.leaves)
        by_autodiff = owner is None or (is_held and isinstance(owner._declaration.variables, str))
        return "autodiff" if by_autodiff else "by the rule"

    def named(self, variables: Sequence[Leaf]) -> list[tuple[Leaf, _Label]]:
        """Name the arrays that have labels, the operands, and the constants of the jaxpr."""
        labels = [*self._labels, *((name, "input") for name in self.names[: self.inputs])]
        labels += [(name, "captured") for name in self.names[self.inputs :]]
        labels += [("(unnamed)", "captured")] * (len(variables) - len(labels))
        return list(zip(variables, labels, strict=True))


def _is_operand(value: Leaf) -> bool:
    return is_array(value) and not is_ref(value)


def _leaves(pull: PyTree) -> list[Leaf]:
    return list(filter(_is_operand, tree_leaves(pull)))


# --- watching the rule ----------------------------------------------------------------------------


class _Run(NamedTuple):
    """A run of a watched rule."""

    grad_fn: AnyFunction | None
    held: Sequence[tuple[str, jax.Array]]  # the arrays that it holds, by name


class _Runs(Inert):
    """The runs of the rules of a watched function.

    Which array a rule keeps under which name only the rule can tell, so it notes it when it runs:
    its copy holds what the pull-back keeps. A list in a closure would not do: it holds tracers
    later, so the engine would copy it with the rule, and note the next run in the copy.
    """

    def __init__(self) -> None:
        self._every: list[_Run] = []

    def last(self) -> _Run:
        """Return the last run whose arrays can still be used."""
        runs = (run for run in self._every[::-1] if all(is_known(v) for _, v in run.held))
        return next(runs, _Run(None, []))

    def note(self, grad_fn: AnyFunction) -> None:
        arrays = named([("", grad_fn)], survey([grad_fn], is_known)).values()
        self._every.append(_Run(grad_fn, [(one.name, one.value) for one in arrays]))

    def watched(self, h: Any) -> AnyFunction:
        """Return a decorated function, or a method, such that the runs of its rules are noted."""
        owner = decorated(h)
        if owner is None:
            if is_recomputed(getattr(h, "__func__", h)):
                return h
            below = getattr(h, "__wrapped__", None)
            wraps = isinstance(below, CustomGradient) or is_recomputed(below)
            raise tool_errors.not_explainable(h, wraps)
        f = owner._declaration.f

        @functools.wraps(f)
        def with_notes(*args: PyTree, **kwargs: PyTree) -> PyTree:
            pair = f(*args, **kwargs)
            if not (isinstance(pair, tuple | list) and len(pair) == 2 and callable(pair[1])):
                return pair  # an error later
            y, grad_fn = pair

            @functools.wraps(grad_fn)
            def noting(*upstreams: PyTree, **variables: PyTree) -> PyTree:
                self.note(grad_fn)
                return grad_fn(*upstreams, **variables)

            return y, noting

        again = CustomGradient(owner._declaration._replace(f=with_notes))
        return again if h is owner else again.__get__(h.__self__)
