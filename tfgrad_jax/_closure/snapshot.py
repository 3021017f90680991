"""What the variables of functions held at the call.

A rule must see its closure as it was at the call, as it does under `jit`; but a loop, or a scope
that still runs, may have assigned to its variables since. `skeleton.py` then copies the functions
around what the variables held. Variables to which the code itself assigns are the user's own: they
count, say.
"""

import dis
import functools
import types
from collections.abc import Container, Iterable

from .reach import content_of

_EMPTY = object()


class Snapshot:
    """What the variables of functions hold now, and those to which they assign: `live`."""

    def __init__(self, functions: Iterable[types.FunctionType], without: Container[int]) -> None:
        held: dict[int, tuple[types.CellType, object]] = {}  # by id: a cell has no hash
        live: set[int] = set()
        for f in functions:
            assigned = _assigned(f.__code__) if f.__closure__ else ()
            for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
                content = content_of(cell, _EMPTY)
                # A variable that is not assigned yet has its value later.
                if content is not _EMPTY and id(cell) not in without:
                    held[id(cell)] = cell, content
                if name in assigned:
                    live.add(id(cell))
        self._held = {key: pair for key, pair in held.items() if key not in live}
        self.live = {key: content for key, (_, content) in held.items() if key in live}

    def contents(self) -> dict[int, object]:
        """Return what variables held, by the ids of their cells; but not the live ones."""
        return {key: content for key, (_, content) in self._held.items()}

    def changed(self) -> dict[int, object]:
        """Return the contents of variables that hold something else now."""
        pairs = self._held.items()
        return {key: c for key, (cell, c) in pairs if content_of(cell, _EMPTY) is not c}


@functools.cache
def _assigned(code: types.CodeType) -> frozenset[str]:
    """Return the variables of outer scopes to which a function, or one inside it, assigns."""
    stores = ("STORE_DEREF", "DELETE_DEREF")
    names = {i.argval for i in dis.get_instructions(code) if i.opname in stores}
    inner = [_assigned(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return frozenset(names.union(*inner).intersection(code.co_freevars))
