"""The derivative of one call, as a pytree: what the forward pass hands to the backward pass.

`grad_fn` is a closure over values of the forward pass, and JAX must carry these from one to
the other itself. `lift` finds them in the cells of the closure, so that the backward pass can
call `grad_fn` as it is; where they cannot be seen there, `traced_rule` traces `grad_fn` to a
jaxpr and finds them among its constants. `captures` asks the same question of a function `f`
before it is called.
"""

import dataclasses
import enum
import functools
import operator
import types
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.errors import ConcretizationTypeError, TracerArrayConversionError
from jax.tree_util import tree_flatten, tree_leaves, tree_structure, tree_unflatten

from ._call import Contract, Variables
from ._compat import evaluate, without_consts
from ._structure import Outputs, Spec

# A rule that branches on values cannot be traced; it still runs on concrete ones.
NeedsValuesError = (ConcretizationTypeError, TracerArrayConversionError)

_LEAF = tree_structure(0)


class Rule:
    """The derivative of a program at a point: cotangents of the outputs -> of the operands.

    A pytree, so that JAX can carry it from the forward to the backward pass: its leaves are
    the residuals, and all else is static.
    """

    __slots__ = ("residuals", "static")

    def __init__(self, static: "Static", residuals: Sequence[Any]) -> None:
        self.static = static
        self.residuals = residuals

    def __call__(self, cotangents: Sequence[Any]) -> list[Any]:
        """Return the cotangent of each operand, or None where it is zero."""
        return self.static.run(self.residuals, cotangents)

    def check(self, perturbed: Sequence[bool]) -> None:
        """Raise if an operand that has no gradient is differentiated."""
        if self.static.refuse is not None:
            self.static.refuse(perturbed)


@dataclasses.dataclass(eq=False)
class Static:
    """What a `Rule` is beside its residuals."""

    run: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    specs: Sequence[Spec]  # of the operands
    outputs: Outputs
    refuse: Callable[[Sequence[bool]], None] | None = None


jax.tree_util.register_pytree_node(
    Rule, lambda rule: (rule.residuals, rule.static), lambda static, leaves: Rule(static, leaves)
)


# --- lifting: residuals from the cells of a closure ---------------------------------------------

Rebuild = Callable[[Sequence[Any]], Callable[..., Any]]
_TRACER = object()  # stands for a tracer among the leaves of a `_Skeleton`
_CONTAINERS = (list, tuple, dict)
_SIMPLE = (
    jax.Array, np.ndarray, np.generic, bool, int, float, complex, str, bytes, type(None),
    type(Ellipsis), slice, np.dtype, np.ufunc, enum.Enum, types.ModuleType,
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip
# Objects that hold nothing but the function they wrap.
_WRAPPERS = (type(jax.jit(len)), jax.custom_vjp, jax.custom_jvp)


def lift(f: Callable[..., Any]) -> tuple[Rebuild, list[Any]] | None:
    """Return `(rebuild, residuals)`: the tracers in a closure, and how to replace them.

    `rebuild(residuals)` is `f` with other values for its tracers; cells and defaults that hold
    none stay the very same. None if the closure cannot be seen through.
    """
    if type(f) is not types.FunctionType:
        return None
    slots = _slots(f)
    residuals: list[Any] = []
    changes = []  # (index of the slot, leaves, treedef) of those that hold tracers
    for index, content in enumerate(slots):
        if isinstance(content, Tracer):
            residuals.append(content)
            changes.append((index, [_TRACER], _LEAF))
            continue
        if content is None or content is f:
            continue
        leaves, treedef = tree_flatten(content)
        traced = [isinstance(leaf, Tracer) for leaf in leaves]
        rest = [leaf for t, leaf in zip(traced, leaves, strict=True) if not t]
        if captures(rest) is not False:
            return None
        if any(traced):
            residuals += [leaf for t, leaf in zip(traced, leaves, strict=True) if t]
            leaves = [_TRACER if t else leaf for t, leaf in zip(traced, leaves, strict=True)]
            changes.append((index, leaves, treedef))
    if not changes:
        return lambda _: f, []
    return Skeleton(f, slots, changes), residuals


class Skeleton:
    """A closure without its tracers, which must not outlive their trace."""

    def __init__(self, f: types.FunctionType, slots: list[Any], changes: list[Any]) -> None:
        self._code, self._globals, self._name = f.__code__, f.__globals__, f.__name__
        self._qualname = f.__qualname__
        self._changes = changes
        changed = {index for index, *_ in changes}
        self._itself = [index for index, content in enumerate(slots) if content is f]
        self._slots = [None if i in changed or s is f else s for i, s in enumerate(slots)]
        new = changed.union(self._itself)
        self._cells = [None if i in new else c for i, c in enumerate(f.__closure__ or ())]

    def __call__(self, residuals: Sequence[Any]) -> Callable[..., Any]:
        """Return the closure around other values."""
        slots = list(self._slots)
        for index, leaves, treedef in self._filled(residuals):
            slots[index] = tree_unflatten(treedef, leaves)
        closure = tuple(
            types.CellType(slots[i]) if cell is None else cell for i, cell in enumerate(self._cells)
        )
        f = types.FunctionType(self._code, self._globals, self._name, slots[-2], closure)
        f.__kwdefaults__ = slots[-1]
        f.__qualname__ = self._qualname
        for index in self._itself:
            closure[index].cell_contents = f
        return f

    def is_intact(self, f: Any, residuals: Sequence[Any]) -> bool:
        """Tell whether `f`, made here, has assigned to nothing that it was given."""
        slots = _slots(f)
        for index, leaves, treedef in self._filled(residuals):
            now, structure = tree_flatten(slots[index])
            if structure != treedef or not all(map(operator.is_, now, leaves)):
                return False
        return True

    def _filled(self, residuals: Sequence[Any]) -> Iterable[tuple[int, list[Any], Any]]:
        rest = iter(residuals)
        for index, leaves, treedef in self._changes:
            yield index, [next(rest) if leaf is _TRACER else leaf for leaf in leaves], treedef


def _slots(f: types.FunctionType) -> list[Any]:
    """Return all that a function holds: the contents of its cells, then its defaults."""
    slots = []
    for cell in f.__closure__ or ():
        try:
            slots.append(cell.cell_contents)
        except ValueError:  # a variable that is not assigned yet
            slots.append(None)
    return [*slots, f.__defaults__, f.__kwdefaults__]


class Transparent:
    """An object that tells which values it holds, for `captures` to look into."""

    def held(self) -> Sequence[Any]:
        raise NotImplementedError


class Cleared:
    """Values from which no tracer can be reached while these cells keep their contents."""

    __slots__ = ("_cells", "_contents", "_visited")

    def __init__(self, visited: dict[int, Any], cells: list[types.CellType]) -> None:
        self._visited = visited
        self._cells = cells
        self._contents = [cell.cell_contents for cell in cells]

    def covers(self, values: Sequence[Any]) -> bool:
        """Tell whether all of the values are among these, and nothing has been reassigned."""
        if not all(id(v) in self._visited or _is_simple(v) for v in values):
            return False
        try:
            return all(map(operator.is_, map(_cell_contents, self._cells), self._contents))
        except ValueError:  # one has been emptied
            return False


def _is_simple(value: Any) -> bool:
    return isinstance(value, _SIMPLE) and not isinstance(value, Tracer)  # which is a `jax.Array`


_cell_contents = operator.attrgetter("cell_contents")
# What the call around this one has looked through: decorated functions that call each other would
# look through those below them at every level.
cleared: ContextVar[Cleared | None] = ContextVar("cleared", default=None)


def captures(values: Sequence[Any]) -> bool | None:
    """Tell whether a tracer can be reached from `values` through functions and containers.

    True if there is one, False if there is none, None if that cannot be seen.
    """
    return search(values)[0]


def search(values: Sequence[Any]) -> tuple[bool | None, Cleared | None]:
    """Do as `captures`, and return what the calls inside need not look through again."""
    known = cleared.get()
    if known is not None and known.covers(values):
        return False, None
    pending = list(values)
    visited: dict[int, Any] = {}  # by id, and kept, so that no id is used twice
    cells: list[types.CellType] = []
    opaque, calls, fixed = False, 0, True
    while pending:
        value = pending.pop()
        if isinstance(value, Tracer):
            return True, None
        if id(value) in visited or isinstance(value, _SIMPLE):
            continue
        visited[id(value)] = value
        parts = _parts(value)
        if parts is None:
            opaque = True
            continue
        pending.extend(parts)
        if isinstance(value, types.FunctionType):
            cells.extend(value.__closure__ or ())
            fixed = fixed and value.__defaults__ is None and value.__kwdefaults__ is None
        elif isinstance(value, Transparent):
            calls += 1
        else:
            fixed = fixed and isinstance(value, tuple)
    if opaque:
        return None, None
    try:
        return False, Cleared(visited, cells) if fixed and calls else None
    except ValueError:  # a variable that is not assigned yet
        return False, None


def _parts(value: Any) -> Iterable[Any] | None:
    """Return what an object holds, or None if it may hold anything."""
    if isinstance(value, types.FunctionType):
        return _slots(value)
    if isinstance(value, type):
        # Only the methods of a class that is made inside a function can close over a tracer.
        local = [cls for cls in value.__mro__ if "<locals>" in cls.__qualname__]
        return [v for cls in local for name, v in vars(cls).items() if name != "_abc_impl"]
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, property):
        return value.fget, value.fset, value.fdel
    if isinstance(value, _CONTAINERS):
        return value.values() if isinstance(value, dict) else value
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, Transparent):
        return value.held()
    if isinstance(value, _WRAPPERS) and hasattr(value, "__wrapped__"):
        return (value.__wrapped__,)
    leaves = tree_leaves(value)
    if len(leaves) != 1 or leaves[0] is not value:  # a pytree
        return [type(value), *leaves]
    return [type(value), *vars(value).values()] if _is_plain_object(value) else None


def _is_plain_object(value: Any) -> bool:
    """Tell whether all that an object holds is in its `__dict__`."""
    heap_type = 1 << 9  # made by a `class` statement
    return hasattr(value, "__dict__") and all(
        cls.__flags__ & heap_type and not vars(cls).get("__slots__")
        for cls in type(value).__mro__[:-1]
    )


def lifted_rule(
    contract: Contract,
    rebuild: Rebuild,
    residuals: Sequence[Any],
    outputs: Outputs,
    specs: Sequence[Spec],
    variables: Callable[[Sequence[Any]], Variables | None],
) -> Rule:
    """Return the rule that calls `grad_fn` itself, rebuilt around the residuals."""

    def run(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        grad_fn = rebuild(residuals)
        return contract.gradients(grad_fn, outputs, cotangents, specs, variables(residuals))

    return Rule(Static(run, specs, outputs), residuals)


# --- tracing: residuals from the constants of a jaxpr -------------------------------------------


def traced_rule(
    contract: Contract,
    grad_fn: Callable[..., Any],
    leaves: Sequence[Any],
    outputs: Outputs,
    specs: Sequence[Spec],
    variables: Variables | None,
) -> Rule:
    """Trace `grad_fn` on upstreams like the outputs `leaves`; residuals are what it captured."""
    present: list[bool] = []  # a jaxpr has no None among its results: keep the pattern beside it

    def gradients(cotangents: Sequence[Any]) -> list[Any]:
        results = contract.gradients(grad_fn, outputs, cotangents, specs, variables)
        present[:] = [g is not None for g in results]
        return [g for g in results if g is not None]

    closed = jax.make_jaxpr(gradients)([leaves[i] for i in outputs.differentiable])
    jaxpr = without_consts(closed)
    traced = [i for i, c in enumerate(closed.consts) if isinstance(c, Tracer)]
    residuals = [closed.consts[i] for i in traced]
    consts = [None if isinstance(c, Tracer) else c for c in closed.consts]

    def run(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        filled = list(consts)
        for i, residual in zip(traced, residuals, strict=True):
            filled[i] = residual
        results = iter(evaluate(jaxpr, *filled, *cotangents))
        return [next(results) if p else None for p in present]

    return Rule(Static(run, specs, outputs), residuals)
