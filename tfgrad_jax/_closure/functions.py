"""A function as a pytree: what its variables hold are its children.

`taken_apart` takes the arrays out of a rule that match, through the variables of functions, their
defaults, `functools.partial`, methods, decorated functions and pytrees, and returns what puts it
together around others. Where such an array is in another object, nothing can be put together: then
the rule is recorded instead.
"""

import dis
import functools
import gc
import operator
import types
from collections.abc import Callable, Iterable, Iterator, MappingView, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import tree_flatten, tree_unflatten

from tfgrad_jax._jax.types import Copied

_ENDS = (
    str, bytes, int, float, complex, bool, type(None), types.ModuleType, types.CodeType, np.dtype,
)  # fmt: skip
_ARRAYS = Tracer, jax.Array, np.ndarray, np.generic
_JITTED = type(jax.jit(len))
_CONTAINERS = frozenset({tuple, list, dict})
_ITERATORS = Iterator, MappingView
_CODE = types.FunctionType, types.BuiltinFunctionType, classmethod, staticmethod, property
BUDGET = 10_000


def content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


_EMPTY = object()


@functools.cache
def assigned_in(code: types.CodeType) -> frozenset[str]:
    """Return the variables of outer scopes to which code assigns."""
    names = set(code.co_freevars)
    stores = (i for i in dis.get_instructions(code) if i.opname in ("STORE_DEREF", "DELETE_DEREF"))
    found = {i.argval for i in stores}
    inner = [assigned_in(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return frozenset(found.union(*inner) & names)


@functools.cache
def names_in(code: types.CodeType) -> frozenset[str]:
    inner = [names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


class Apart(NamedTuple):
    """A rule, taken apart."""

    taken: list[Any]  # the arrays that it holds
    # The rule around others, and what tells whether it left containers of the user as they were.
    remade: Callable[[Sequence[Any]], tuple[Any, Callable[[], bool]]]
    is_whole: bool  # False: an object holds one that was not taken
    named: Sequence[Any]  # those of the taken ones that variables of the rule itself hold


class _Again:
    """One time that a rule is put together."""

    def __init__(self, new: Sequence[Any]) -> None:
        self.new = new
        self.made: dict[int, Any] = {}
        self.of_user: list[tuple[Any, Sequence[Any]]] = []
        self.later: list[Callable[[], None]] = []  # variables to fill: they may lead in a circle

    def of(self, plan: "_Plan | None", value: Any) -> Any:
        if plan is None:
            return value
        if id(plan) not in self.made:
            self.made[id(plan)] = plan.value
            plan.make(self)
        return self.made[id(plan)]


class _Plan:
    """How to make a value anew. It is the value itself where nothing in it has changed."""

    leads = False  # to something that was taken: then the plan does not hold the value
    value: Any = None
    plans: "Sequence[_Plan | None]" = ()

    def forget(self) -> None:
        """Hold no tracer."""

    def make(self, again: _Again) -> None:
        raise NotImplementedError


class _Taken(_Plan):
    leads = True

    def __init__(self, place: int) -> None:
        self.place = place

    def make(self, again: _Again) -> None:
        again.made[id(self)] = again.new[self.place]


class _Container(_Plan):
    """A pytree, a method, a decorated function or a `functools.partial`."""

    def __init__(self, value: Any, parts: Sequence[Any], again: Callable[[Any], Any]) -> None:
        self.value, self.parts, self.again = value, parts, again
        self.is_of_user = False

    def forget(self) -> None:
        self.value = None
        self.parts = _forgotten(self.parts, self.plans)

    def make(self, again: _Again) -> None:
        now = list(map(again.of, self.plans, self.parts))
        if self.leads or any(a is not b for a, b in zip(now, self.parts, strict=True)):
            made = again.made[id(self)] = self.again(now)
            if self.is_of_user:
                again.of_user.append((made, now))


class _Function(_Plan):
    """A function whose variables have the values that they had; but those to which it assigns."""

    def __init__(self, f: types.FunctionType) -> None:
        self.value = f
        self.code, self.globals, self.name = f.__code__, f.__globals__, f.__name__
        self.others = f.__qualname__, f.__module__, f.__doc__
        live = assigned_in(f.__code__)
        self.cells: list[Any] = list(f.__closure__ or ())
        held = map(content, self.cells)
        names = zip(f.__code__.co_freevars, held, strict=True)
        self.parts = [_EMPTY if n in live else v for n, v in names]
        self.parts += [f.__defaults__, f.__kwdefaults__, f.__dict__ or None]

    def forget(self) -> None:
        self.value = None
        self.parts = _forgotten(self.parts, self.plans)
        live = [v is _EMPTY for v in self.parts[:-3]]
        self.cells = [c if is_live else None for c, is_live in zip(self.cells, live, strict=True)]

    def is_changed(self) -> bool:
        """Return whether a variable has another value now."""
        pairs = zip(self.cells, self.parts, strict=False)
        return any(v is not _EMPTY and content(c) is not v for c, v in pairs)

    def make(self, again: _Again) -> None:
        if self.leads:
            g = self._new(again)
            again.later.append(lambda: self._fill(g, map(again.of, self.plans, self.parts)))
            self._finish(g, map(again.of, self.plans[-3:], self.parts[-3:]))
            return
        now = list(map(again.of, self.plans, self.parts))
        if self.is_changed() or any(a is not b for a, b in zip(now, self.parts, strict=True)):
            g = self._new(again)
            self._fill(g, now)
            self._finish(g, now[-3:])

    def _new(self, again: _Again) -> types.FunctionType:
        live = zip(self.cells, self.parts, strict=False)
        cells = [c if v is _EMPTY else types.CellType() for c, v in live]
        g = types.FunctionType(self.code, self.globals, self.name, None, tuple(cells))
        again.made[id(self)] = g
        return g

    def _fill(self, g: Any, held: Iterable[Any]) -> None:
        for cell, v in zip(g.__closure__ or (), held, strict=False):
            if v is not _EMPTY:
                cell.cell_contents = v

    def _finish(self, g: Any, others: Iterable[Any]) -> None:
        g.__defaults__, g.__kwdefaults__, attributes = others
        g.__qualname__, g.__module__, g.__doc__ = self.others
        g.__dict__.update(attributes or {})


def constants_of(held: Any) -> list[Any] | None:
    """Return the arrays that code can read from outside; None if they may be in other places.

    A quick look at functions: their variables, defaults, and named globals.
    """
    found: list[Any] = []
    pending, seen = [*held], set()
    for one in pending:  # it grows
        cls = type(one)
        if cls in _PLAIN and cls is not types.ModuleType:
            continue
        if isinstance(one, _ARRAYS):
            if isinstance(one, Tracer) or (cls is np.ndarray and one.dtype == object):
                return None
            found.append(one)
        elif cls is types.ModuleType:
            if one.__name__.partition(".")[0] not in _LIBRARIES:
                return None
        elif cls is types.FunctionType:
            if id(one) in seen or _is_ours(one):
                continue
            seen.add(id(one))
            if one.__dict__ or len(seen) > 20:
                return None
            named = one.__globals__
            pending += [named[n] for n in names_in(one.__code__) if n in named]
            pending += [*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
            pending += map(content, one.__closure__ or ())
        elif isinstance(one, Copied):
            pending += one._declaration[:3]
        elif not (one is _EMPTY or _is_of_library(one, cls)):
            return None
    return found


def _is_of_library(one: Any, cls: type) -> bool:
    """Return whether one is a function or a class of a library, which holds nothing of the user's."""
    if cls is types.BuiltinFunctionType:
        return type(one.__self__) in _PLAIN
    if cls not in _CALLABLES:
        return False
    if cls is _JITTED and type(one.__wrapped__) is not types.FunctionType:
        return False
    return _is_ours(one)


def _is_ours(one: Any) -> bool:
    return str(one.__module__).partition(".")[0] in _LIBRARIES


_CALLABLES = frozenset({
    _JITTED, type, jax.custom_jvp, jax.custom_vjp, type(jax.numpy.float32), type(jax.numpy.add),
})  # fmt: skip
_LIBRARIES = frozenset({
    "jax", "jaxlib", "numpy", "tfgrad_jax", "builtins", "math", "functools", "itertools",
    "operator", "typing",
})  # fmt: skip


def _forgotten(parts: Sequence[Any], plans: Sequence[_Plan | None]) -> list[Any]:
    return [None if p is not None and p.leads else v for v, p in zip(parts, plans, strict=True)]


Takes: TypeAlias = Callable[[Any], bool]


def taken_apart(root: Any, takes: Takes, of_user: Sequence[types.CellType] = ()) -> Apart:
    """Take the arrays out of a rule that `takes` accepts.

    The rule gets other lists and dicts for those that variables `of_user` hold, which it must not
    change.
    """
    fixed = {id(content(cell)) for cell in of_user}
    taken: dict[int, _Taken] = {}
    values: list[Any] = []
    plans: dict[int, _Plan | None] = {}
    keep: list[Any] = []  # so that no id is used twice
    nodes: list[_Plan] = []
    unfinished: set[int] = set()  # containers, since the last function
    is_whole, is_circular = True, False

    def plan(v: Any) -> _Plan | None:
        nonlocal is_whole, is_circular, unfinished
        cls = type(v)
        if cls in _PLAIN:
            return None
        if takes(v):
            if id(v) not in taken:
                taken[id(v)] = _Taken(len(values))
                values.append(v)
            return taken[id(v)]
        if isinstance(v, _ENDS) or (isinstance(v, _ARRAYS) and cls is not np.ndarray):
            return None
        if id(v) in plans:
            is_circular = is_circular or id(v) in unfinished
            return plans[id(v)]
        keep.append(v)
        node: Any
        if cls is types.FunctionType:
            if not (v.__closure__ or v.__defaults__ or v.__kwdefaults__ or v.__dict__):
                return None
            node = _Function(v)
        elif cls in _CONTAINERS and _is_plain(v):
            plans[id(v)] = None
            return None
        elif cls is tuple or cls is list:  # the common pytrees, faster
            node = _Container(v, list(v), cls)
        elif cls is dict and _PLAIN.issuperset(map(type, v)):
            node = _Container(v, list(v.values()), functools.partial(_dict, list(v)))
        elif cls is types.MethodType:
            node = _Container(v, [v.__func__, v.__self__], _method)
        elif cls is _JITTED:  # remade without the `jit`
            node = _Container(v, [v.__wrapped__], _only)
        elif isinstance(v, Copied):
            node = _Container(v, *_declared(v))
        elif cls is functools.partial:
            node = _Container(v, [v.func, v.args, v.keywords], _partial)
        else:
            parts, treedef = _one_level(v) if not isinstance(v, _ITERATORS) else (None, None)
            if parts is None or leads_to(treedef.node_data()[1], takes):
                is_whole = is_whole and not leads_to(v, takes)
                plans[id(v)] = None
                return None
            node = _Container(v, parts, functools.partial(tree_unflatten, treedef))
        if id(v) in fixed and cls in (list, dict):
            node.is_of_user = True
        plans[id(v)] = node
        outside = unfinished
        unfinished = set() if cls is types.FunctionType else {*outside, id(v)}
        node.plans = list(map(plan, node.parts))
        unfinished = outside
        if cls is not types.FunctionType and not any(node.plans):
            plans[id(v)] = None
            return None
        nodes.append(node)
        return node

    try:
        top = plan(root)
    except RecursionError:
        return Apart([], functools.partial(_remade, None, None, None), False, [])
    changed = bool(values)
    while changed:
        changed = False
        for node in nodes:
            if not node.leads and any(p is not None and p.leads for p in node.plans):
                node.leads = changed = True
    for node in nodes:
        if node.leads:
            node.forget()
    named = [values[p.place] for p in _of_function(root, plans) if isinstance(p, _Taken)]
    if values:
        remade = functools.partial(_remade, None, top, None)
    else:
        functions = [node for node in nodes if type(node) is _Function]
        remade = functools.partial(_remade, root, top, functions)
    return Apart(values, remade, is_whole and not (values and is_circular), named)


def _of_function(root: Any, plans: dict[int, _Plan | None]) -> Sequence[_Plan | None]:
    """Return the plans for the variables of the function in a rule, and of its values."""
    _, f = root
    while type(f) in (types.MethodType, functools.partial):
        f = getattr(f, "func", None) or f.__func__
    node = plans.get(id(f))
    if not isinstance(node, _Function):
        return []
    defaults = [p for d in node.plans[-3:-1] if d is not None for p in d.plans]
    return [*node.plans[:-3], *defaults]


_PLAIN = frozenset({
    str, bytes, int, float, complex, bool, type(None), types.ModuleType,
})  # fmt: skip


def _is_plain(v: Any) -> bool:
    """Return whether a list, a tuple or a dict holds plain values alone."""
    values = [v, v.values()] if type(v) is dict else [v]
    return all(_PLAIN.issuperset(map(type, some)) for some in values)


def _dict(keys: Sequence[Any], now: Sequence[Any]) -> Any:
    return dict(zip(keys, now, strict=True))


def _method(now: Sequence[Any]) -> Any:
    return types.MethodType(*now)


def _partial(now: Sequence[Any]) -> Any:
    return functools.partial(now[0], *now[1], **now[2])


def _only(now: Sequence[Any]) -> Any:
    return now[0]


def _declared(h: Any) -> tuple[Sequence[Any], Callable[[Any], Any]]:
    """Return what a decorated function holds, and what makes one anew, without what it holds."""
    (f, variables, primal, *options), cls = h._declaration, type(h)
    declaration = type(h._declaration)
    attributes = {k: v for k, v in vars(h).items() if not k.startswith("__")}

    def again(now: Sequence[Any]) -> Any:
        made = cls(declaration(*now[:3], *options))
        vars(made).update(now[3])
        return made

    return [f, variables, primal, attributes], again


def _remade(
    root: Any, plan: _Plan | None, functions: Sequence[_Function] | None, new: Sequence[Any]
) -> tuple[Any, Callable[[], bool]]:
    if functions is not None and not any(f.is_changed() for f in functions):
        return root, _unchanged
    again = _Again(new)
    made = again.of(plan, root)
    while again.later:
        again.later.pop()()
    if not again.of_user:
        return made, _unchanged

    def check() -> bool:
        now = ((list(v.values()) if type(v) is dict else v, was) for v, was in again.of_user)
        return all(len(a) == len(b) and all(map(operator.is_, a, b)) for a, b in now)

    return made, check


def _unchanged() -> bool:
    return True


def _one_level(v: Any) -> tuple[Any, Any]:
    """Return the children of a pytree, and its structure; None if it is none."""
    first = True

    def is_leaf(_: Any) -> bool:
        nonlocal first
        first, was = False, first
        return not was

    try:
        leaves, treedef = tree_flatten(v, is_leaf=is_leaf)
    except ValueError:  # keys that cannot be sorted
        return None, None
    return (None, None) if len(leaves) == 1 and leaves[0] is v else (leaves, treedef)


def leads_to(value: Any, is_it: Takes) -> bool:
    """Return whether an object leads to such a value; too large a one may."""
    pending, seen, keep = [value], set(), []
    while pending:
        one = pending.pop()
        if isinstance(one, _ARRAYS):
            if is_it(one):
                return True
            if type(one) is not np.ndarray or one.dtype != object:
                continue
        if isinstance(one, _ENDS) or id(one) in seen:
            continue
        seen.add(id(one))
        keep.append(one)
        if len(seen) > BUDGET:
            return True
        if is_it(one):  # a Ref
            return True
        if type(one) is np.ndarray:
            pending += one.ravel().tolist()
        elif isinstance(one, types.FunctionType):
            if not _is_ours(one):
                some = one.__globals__
                pending += [some[n] for n in names_in(one.__code__) if n in some]
            pending += [one.__defaults__, one.__kwdefaults__, one.__dict__]
            pending += map(content, one.__closure__ or ())
        elif isinstance(one, type):
            if not _is_ours(one):
                pending += [x for x in vars(one).values() if not isinstance(x, _CODE)]
        else:
            pending += gc.get_referents(one)
    return False
