"""The arrays that functions hold, by name, for `explain`.

`Arrays` is a `Skeleton` that takes out arrays, JAX tracing them or not, from methods, partial
functions and ordinary objects too. `add` runs for each value that is looked into; `names` then has
the way to each array, as the user would write it. What cannot be made anew stays as it is.
`Named` is the engine's body, with the names of what its rule keeps.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from tfgrad_jax._compat import is_ref
from tfgrad_jax._frontend.grad_fn import Call, checked_pair
from tfgrad_jax._source import names_in

from .body import Body, Result
from .cells import OpaqueError, Plan, Skeleton, Wrapper, _held, content_of, same

_LIMIT = 5_000  # objects to look at


class Name(NamedTuple):
    """How to get at a value, and where the first step leads."""

    path: str
    place: str

    def then(self, step: str, place: str) -> "Name":
        """Return the name of what is held there."""
        return Name(self.path + step if self.path else step.lstrip("."), self.place or place)


class Arrays(Skeleton):
    """Values without the arrays in them: `tracers`, with their `names`."""

    def __init__(self) -> None:
        super().__init__(search=True)
        self.names: list[Name] = []
        self._by_id: dict[int, tuple[Name, Any]] = {}  # and the value, so that no id is used twice
        self._above: set[int] = set()  # what is being looked into: a cycle stays as it is
        self._hits = 0  # how often there was an array
        self._holds: dict[int, bool] = {}  # whether a function or a cell holds one

    def name(self, value: Any, name: Name) -> None:
        self._by_id.setdefault(id(value), (name, value))

    def _plan(self, value: Any) -> Plan:
        known = self._by_id.get(id(value))
        name = Name("", "") if known is None else known[0]
        if isinstance(value, jax.Array):
            self._hits += 1
            if id(value) not in self._known:
                self.name(value, name)  # and keep it
                self.names.append(name)
                return self._tracer(value)
            return self._known[id(value)][1]
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, Wrapper):
            cls, held, _ = value.unwrapped()
            make: Callable[[Sequence[Any]], Any] = lambda parts: cls(*parts)  # noqa: E731
            steps: Iterable[Any] = (("", part) for part in held)
        else:
            found = _parts(value)
            if found is None:
                return same(value)
            make, steps = found
        if id(value) in self._above or len(self._by_id) > _LIMIT:
            return same(value)
        self._above.add(id(value))
        hits, plans = self._hits, []
        for step, part in steps:
            self.name(part, name.then(step, name.place))
            plans.append(self._plan(part))
        self._above.remove(id(value))
        if hits == self._hits:  # what holds no array stays itself
            return same(value)
        return lambda values, made: make([plan(values, made) for plan in plans])

    def _counted(self, value: Any, look: Callable[[], Any]) -> Any:
        """Look into a function or a cell, or remember whether it holds an array."""
        hits, known = self._hits, self._holds.get(id(value))
        self._holds.setdefault(id(value), True)  # as long as it is being looked into
        found = look()
        self._hits += bool(known)
        self._holds[id(value)] = self._hits > hits
        return found

    def _cell(self, cell: types.CellType) -> Plan:
        return self._counted(cell, lambda: super(Arrays, self)._cell(cell))

    def _function(self, f: types.FunctionType) -> Plan:
        known = self._by_id.get(id(f))
        name, code = Name("", "") if known is None else known[0], f.__code__
        for cell, content in zip(code.co_freevars, f.__closure__ or (), strict=True):
            self.name(content_of(content), name.then(f".{cell}", "closure"))
        defaults, count = f.__defaults__ or (), code.co_argcount
        named = dict(zip(code.co_varnames[count - len(defaults) : count], defaults, strict=True))
        for key, value in (named | (f.__kwdefaults__ or {})).items():
            self.name(value, name.then(f".{key}", "default"))
        self.name(f.__dict__.get("__wrapped__"), name)
        hits = self._hits
        plan = self._counted(f, lambda: super(Arrays, self)._function(f))
        return plan if self._hits > hits else same(f)


def _parts(value: Any) -> tuple[Callable[[Sequence[Any]], Any], Iterable[Any]] | None:
    """Return how to make a value anew, and what it holds with the steps to it; None if unknown."""
    cls = type(value)
    if isinstance(value, type | types.ModuleType) or is_ref(value):
        return None
    if cls is types.MethodType:
        return (lambda new: types.MethodType(*new)), (("", value.__func__), ("", value.__self__))
    if cls is functools.partial:
        held = (("", value.func), (".args", value.args), (".keywords", value.keywords))
        return (lambda new: functools.partial(new[0], *new[1], **new[2])), held
    try:
        leaves, treedef = tree_flatten_with_path(value, is_leaf=lambda v: v is not value)
    except (TypeError, ValueError):  # such as keys that cannot be sorted
        return None
    if len(leaves) != 1 or leaves[0][1] is not value:
        return treedef.unflatten, ((keystr(path), leaf) for path, leaf in leaves)
    names = [s for c in cls.__mro__ for s in _listed(vars(c).get("__slots__", ()))]
    slots = [s for s in names if s not in ("__dict__", "__weakref__") and hasattr(value, s)]
    attributes = getattr(value, "__dict__", None)
    try:
        object.__new__(cls)
    except TypeError:  # it is made in another way
        return None
    if not slots and not isinstance(attributes, dict):
        return None
    attributes = attributes or {}
    keys = list(attributes)

    def make(new: Sequence[Any]) -> Any:
        made = object.__new__(cls)
        for slot, part in zip(slots, new, strict=False):
            object.__setattr__(made, slot, part)
        if keys:
            made.__dict__.update(zip(keys, new[len(slots) :], strict=True))
        return made

    held = [(f".{s}", getattr(value, s)) for s in slots]
    return make, held + [(f".{k}", attributes[k]) for k in keys]


def _listed(slots: Any) -> Sequence[str]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def arrays_in(value: Any) -> list[tuple[Any, str]]:
    """Return the arrays that can be reached from a value, with their names."""
    arrays = Arrays()
    arrays.name(value, Name("", ""))
    with contextlib.suppress(OpaqueError, RecursionError):  # what was found until then
        arrays.add(value)
    return [(a, name.path) for a, name in zip(arrays.tracers, arrays.names, strict=True)]


class Named(Body):
    """The engine's body, with the names of what the rule keeps."""

    def __init__(self, call: Call, skeleton: Any, captured: Sequence[Any], eager: bool) -> None:
        super().__init__(call, skeleton, captured)
        self.names: list[str] = []  # of the residuals of the rule
        self.rules: list[Any] = []  # of each run of the function
        self._eager = eager

    def _on(self, captured: Sequence[Any]) -> Call:
        call = super()._on(captured)

        @functools.wraps(call.f)
        def f(*args: Any, **kwargs: Any) -> Any:
            pair = checked_pair(call.f, call.f(*args, **kwargs))
            self.rules.append(pair[1])
            return pair

        return call.replaced(f=f)

    def forward(self, captured: Sequence[Any], inputs: Sequence[Any], traced: bool) -> Result:
        first = len(self.rules)
        result = super().forward(captured, inputs, True)
        found, residuals = arrays_in(self.rules[first]), list(result.residuals)
        count = len(residuals)
        if self._eager:  # it is kept even if JAX is not tracing it
            residuals += [v for v, _ in found if all(v is not r for r in residuals)]
        names = {id(v): name for v, name in found}
        self.names = [names.get(id(r), "") for r in residuals]

        def run(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            return result.run(residuals[:count], cotangents)

        return result._replace(run=run, residuals=residuals)


def elsewhere(held: Sequence[Any], known: Sequence[Any]) -> list[tuple[Any, str]]:
    """Return the other arrays that functions may use: global ones by name, and hidden ones."""
    found: dict[int, tuple[Any, str]] = {}
    seen: dict[int, Any] = {}
    pending = list(held)
    while pending and len(seen) < _LIMIT:
        value = pending.pop()
        if isinstance(value, jax.Array) or is_ref(value):
            found.setdefault(id(value), (value, ""))
        elif id(value) not in seen and not isinstance(value, types.ModuleType):
            seen[id(value)] = value
            pending += _held(value, type(value)) or ()
        if isinstance(value, types.FunctionType):
            for name in names_in(value.__code__):
                content = value.__globals__.get(name)
                if isinstance(content, jax.Array):
                    found[id(content)] = (content, name)
    return [row for row in found.values() if all(row[0] is not k for k in known)]
