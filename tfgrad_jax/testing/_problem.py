"""`Problem`: the function to check and what it decorates, as functions of arrays.

`Call` is the call to check, and the leaves of its arguments by name.

What is checked are the arrays among the arguments, and those that `variables` declares. These the
function may hold anywhere: other values take their place at each operation (`replacing`). Whatever
else operations take is `unchecked`.
"""

import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.source_info_util import current, summarize
from jax.tree_util import (
    PyTreeDef,
    all_leaves,
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_structure,
    tree_unflatten,
)

from .._custom_gradient import CustomGradient
from .._frontend.signature import requires_variables
from .._jax.types import AnyFunction, Leaf, PyTree, Values, has_gradient, is_array
from .._jax.watching import replacing
from .._messages.errors import bad_option
from .._messages.source import Source
from .._messages.text import kind_of, type_name

Checked: TypeAlias = Any  # a function, a method or a layer, decorated or around what is
_T = TypeVar("_T")
_Id: TypeAlias = int  # of an array


class UserCodeError(Exception):
    """The user's code raised an error, or JAX did that ran it: the cause of this one."""


def attempt(code: Callable[..., _T], *args: Any) -> _T:
    """Run code of the user's, which may raise anything: then raise `UserCodeError`.

    That one alone is caught, so that an error of ours is not taken for the user's.
    """
    try:
        return code(*args)
    except Exception as error:
        raise UserCodeError(str(error)) from error


class Function(NamedTuple):
    """A function of the arrays that are checked; `holding` gives them to what it holds."""

    of_arrays: Callable[..., list[jax.Array]]
    holding: Callable[[Values], AbstractContextManager[object]]

    def __call__(self, *xs: Leaf) -> list[jax.Array]:
        return attempt(self.of_arrays, *xs)

    def forward(self, *xs: Leaf) -> list[jax.Array]:
        """Return the value as where JAX differentiates: not that of a `primal`."""
        return attempt(lambda: jax.vjp(self.of_arrays, *xs)[0])

    def gradients(self, xs: Values, us: Sequence[Values]) -> list[list[jax.Array]]:
        """Return the gradients for each upstream, as they are declared."""
        return attempt(self._gradients, xs, us)

    def _gradients(self, xs: Values, us: Sequence[Values]) -> list[list[jax.Array]]:
        _, pull_back = jax.vjp(self.of_arrays, *xs)
        with self.holding(xs):  # the rule may read weights of the function
            return [list(pull_back(u)) for u in us]

    def derivative(self, count: int) -> "Function":
        """Return the gradient in `count` arrays, as a function of these and of the upstreams."""

        def gradient(*both: Leaf) -> list[jax.Array]:
            return self._gradients(both[:count], [list(both[count:])])[0]

        return Function(gradient, self.holding)


def decorated(h: Checked) -> CustomGradient[..., Any] | None:
    """Return the `CustomGradient` that a function is, or that a method is bound from."""
    f = getattr(h, "__func__", h)
    found = getattr(f, "_custom_gradient", f)  # a wrapper has a copy of this attribute
    known = isinstance(found, CustomGradient) and (found is f or found._method is f)
    return found if known else None


def name_of(h: Checked) -> str:
    return Source.of(inspect.unwrap(h)).name.replace("<locals>.", "")  # `jax.jit(f)` has no name


class Call(NamedTuple):
    """A call of a function, or of a bound method, and the leaves of its arguments."""

    h: Checked
    bound: inspect.BoundArguments
    treedef: PyTreeDef
    leaves: Values
    names: Sequence[str]  # of the leaves, as a user writes them
    is_input: Sequence[bool]  # of the leaves; arguments that are passed by keyword alone are none

    @classmethod
    def of(cls, h: Checked, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> "Call":
        if hasattr(h, "__func__"):  # equinox has a class of its own for bound methods
            h = types.MethodType(h.__func__, h.__self__)
        owner, call = decorated(h), getattr(h, "__call__", None)  # noqa: B004
        if owner is h and owner._is_method and args:  # called on the class
            h, args = h.__get__(args[0]), args[1:]
        elif isinstance(call, types.MethodType) and not hasattr(h, "__wrapped__"):
            h = call  # of an object, such as a layer
        try:
            bound = inspect.signature(h).bind(*args, **kwargs)
        except (TypeError, ValueError):  # of a builtin, or a wrapper shows that of what it wraps
            bound = inspect.signature(lambda *args, **kwargs: None).bind(*args, **kwargs)
        flat, treedef = tree_flatten_with_path([*bound.arguments.values()])
        of = [bound.signature.parameters[[*bound.arguments][path[0].idx]] for path, _ in flat]
        names = [p.name + keystr(path[1:]) for p, (path, _) in zip(of, flat, strict=True)]
        is_input = [p.kind < p.KEYWORD_ONLY for p in of]
        return cls(h, bound, treedef, [leaf for _, leaf in flat], names, is_input)

    @property
    def bound_to(self) -> tuple[object, ...]:
        return (self.h.__self__,) if isinstance(self.h, types.MethodType) else ()

    def run(self, f: Callable[..., _T], new: Mapping[int, Leaf]) -> _T:
        """Call a function with these arguments, and new leaves among them."""
        leaves = [new.get(i, leaf) for i, leaf in enumerate(self.leaves)]
        given = zip(self.bound.arguments, tree_unflatten(self.treedef, leaves), strict=True)
        bound = inspect.BoundArguments(self.bound.signature, dict(given))
        return f(*bound.args, **bound.kwargs)


class Problem:
    """`h` and the undecorated function, as functions of the arrays that are checked."""

    def __init__(self, call: Call, reference: AnyFunction | None, is_exact: bool) -> None:
        self._call = call
        self.name, owner = name_of(call.h), decorated(call.h)
        y = call.run(call.h, {})  # an error of the user's stays as it is
        if owner is None and any(map(callable, tree_leaves(y))):
            pair = "a decorated function: this one returns a pair (forgot `@custom_gradient`?)"
            raise bad_option("h", self.name, pair, "check_gradient")
        inputs = [(i, v) for i, v in enumerate(call.leaves) if call.is_input[i]]
        self._at = [i for i, v in inputs if isinstance(v, float | complex) or _is_floating(v)]
        self.names, self.declared = [call.names[i] for i in self._at], list[jax.Array]()
        self.unchecked = list[str]()
        variables = owner and owner._declaration.variables
        self._look_at_variables(variables)
        # Not the declared ones themselves: to a custom_vjp inside, JAX passes the very array that
        # it differentiates, and `replacing` would put the tracer there again. That leaked, in a
        # `reference` with a rule for the weight of a layer.
        self.xs = [*(call.leaves[i] for i in self._at), *map(jnp.array, self.declared)]
        if not (self.xs and any(jnp.isfinite(v).any() for v in _differentiable(y))):
            every = zip(call.names, call.leaves, strict=True)
            given = ", ".join(f"`{name}` is {kind_of(v)}" for name, v in every) or "none"
            floats = f"float inputs (2.0, not 2): {given}"
            needs = "float outputs, finite here" if self.xs else floats
            raise bad_option("h", self.name, f"a function with {needs}", "check_gradient")
        value = self._plain if owner else call.h
        of_f, rule = call.run(self._pair, {}) if owner else (y, None)
        self.has_its_structure = tree_structure(of_f) == tree_structure(y)  # not that of a `primal`
        plain = reference or (value if owner else None)
        self.h, self.value = self._function(call.h), self._function(value)
        self.plain = None if plain is None else self._function(plain)
        self.may_have_primal = owner is None or owner._declaration.primal is not None
        if reference and self.plain:  # here, an error of the user's stays as it is
            ys, _ = jax.vjp(self.plain.of_arrays, *self.xs)
            if [v.shape for v in ys] != [v.shape for v in _differentiable(y)]:
                expected = "a function with outputs of the same shapes as those of `h`"
                raise bad_option("reference", reference, expected, "check_gradient")
        # By "autodiff", JAX differentiates weights as it does without a rule.
        if not (isinstance(variables, str) and is_exact):
            self._look_at_the_rest(value)
            if rule and variables is None and not self.unchecked and requires_variables(rule):
                none = "the rule takes `variables` and gets none, as numbers and NumPy arrays are"
                self.unchecked.append(f"its weights ({none} constants)")

    @property
    def example(self) -> str:
        """Return how to check a weight that the function holds."""
        bound, w = self._call.bound, "weight" if "w" in self._call.bound.arguments else "w"
        every = bound.signature.parameters.values()
        names = [p.name for p in every if p.name in bound.arguments and p.kind < p.KEYWORD_ONLY]
        inputs = ", ".join(names)
        return f"check_gradient(lambda {w}, {inputs}: make({w})({inputs}), {w}, {inputs})"

    def _function(self, f: AnyFunction) -> Function:
        start, end = len(self._at), len(self.xs)

        def holding(xs: Values) -> AbstractContextManager[object]:
            return replacing(self.declared, xs[start:end]) if start < end else nullcontext()

        def of_arrays(*xs: Leaf) -> list[jax.Array]:
            with holding(xs):
                return _differentiable(self._call.run(f, dict(zip(self._at, xs, strict=False))))

        return Function(of_arrays, holding)

    def _pair(self, *args: PyTree, **kwargs: PyTree) -> tuple[PyTree, AnyFunction]:
        return self._call.h.__wrapped__(*self._call.bound_to, *args, **kwargs)

    def _plain(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self._pair(*args, **kwargs)[0]

    def _look_at_variables(self, variables: PyTree) -> None:
        """Note which declared variables are checked, each once; a number has no identity."""
        if callable(variables) and all_leaves([variables]):
            variables = variables(*self._call.bound_to)
        for path, v in tree_flatten_with_path(variables)[0]:
            name = f"variables{keystr(path)}"
            if isinstance(v, float | complex | np.ndarray | np.generic):
                self.unchecked.append(f"{name} ({kind_of(v)}: make it a `jax.Array`)")
            elif _is_floating(v) and all(v is not other for other in self.declared):
                self.declared.append(v)
                self.names.append(name)

    def _look_at_the_rest(self, f: AnyFunction) -> None:
        """Note the arrays that the function takes from elsewhere.

        An array that the code makes anew each time, as `jnp.float32(2)`, is another one in a second
        run: the first one still lives, so no other has its id.
        """
        call, one, other = self._call, self._taken(f), self._taken(f)
        names = {id(v): call.names[i] for i, v in enumerate(call.leaves) if i not in self._at}
        declared = dict(zip(map(id, self.declared), self.names[len(self._at) :], strict=True))
        for key, (array, line) in one.items():
            text = f"{names.get(key, f'a {type_name(array)}')} ({line})"
            if key in declared:
                text = f"{declared[key]} (also where it is not replaced, as inside of a `jax.jit`)"
            self.unchecked += [text] * (key in other)

    def _taken(self, f: AnyFunction) -> dict[_Id, tuple[jax.Array, str]]:
        """Return the arrays that operations take and none has made, with the line that does."""
        # Copies: an argument may be the very array that the function holds.
        xs = [jnp.array(x) if is_array(x) else x for x in self.xs[: len(self._at)]]
        known = {id(v): v for v in (*xs, *self.declared)}  # kept alive, so that an id stays one's
        found: dict[_Id, tuple[jax.Array, str]] = {}

        def look_at(values: Values) -> None:
            for v in values:
                is_value = isinstance(v, jax.Array) and not isinstance(v, Tracer)
                if id(v) not in known and is_value and has_gradient(v):
                    found[id(v)] = v, summarize(current()).rpartition("/")[2]
                known[id(v)] = v

        def note(values: Values, params: Mapping[str, Any], results: Values) -> None:
            look_at(values)
            for v in _constants_inside(params, set()):  # JAX has traced them: they are not replaced
                known.pop(id(v), None)
                look_at([v])
            known.update((id(r), r) for r in results)

        with replacing(self.declared, self.declared, note):
            look_at(tree_leaves(self._call.run(f, dict(zip(self._at, xs, strict=True)))))
        return found


def _differentiable(y: PyTree) -> list[jax.Array]:
    """Return the leaves that have a derivative."""
    return [jnp.asarray(leaf) for leaf in tree_leaves(y) if has_gradient(leaf)]


def _is_floating(leaf: Leaf) -> bool:
    return is_array(leaf) and has_gradient(leaf)


def _constants_inside(params: Mapping[str, Any], known: set[_Id]) -> Iterator[Leaf]:
    """Yield the constants of the jaxprs that an operation calls, and of those that these call."""
    for part in tree_leaves([*params.values()]):
        if isinstance(part, ClosedJaxpr):
            yield from part.consts
            part = part.jaxpr
        if isinstance(part, Jaxpr) and id(part) not in known:
            known.add(id(part))
            for eqn in part.eqns:
                yield from _constants_inside(eqn.params, known)
