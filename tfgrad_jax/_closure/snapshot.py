"""Let the variables that functions close over hold what they held at the call, while code runs.

A rule must see its closure as it was at the call, as it does under `jit`; but a loop, or a scope
that still runs, may have assigned to its variables since. Variables that lead to a tracer are
copied instead (`skeleton.py`).
"""

import contextlib
import types
from collections.abc import Iterable, Iterator

from .reach import content_of

_EMPTY = object()
_NOTHING = contextlib.nullcontext()  # most functions have no such variables, and this is fast


class Snapshot:
    """What variables hold now."""

    def __init__(self, cells: Iterable[types.CellType]) -> None:
        contents = ((cell, content_of(cell, _EMPTY)) for cell in cells)
        # By id, as a cell has no hash. A variable that is not assigned yet has its value later.
        self._contents = {id(cell): (cell, c) for cell, c in contents if c is not _EMPTY}

    @property
    def cells(self) -> list[types.CellType]:
        return [cell for cell, _ in self._contents.values()]

    def restored(self) -> contextlib.AbstractContextManager[None]:
        """Let the variables hold this again; afterwards, what they held before.

        A variable that the code assigns to is the user's own from then on: it counts, say.
        """
        return self._restored() if self._contents else _NOTHING

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        before = [(cell, c, content_of(cell, _EMPTY)) for cell, c in self._contents.values()]
        try:
            for cell, content, _ in before:
                cell.cell_contents = content
            yield
        finally:
            for cell, content, old in before:
                if content_of(cell, _EMPTY) is not content:
                    self._contents.pop(id(cell), None)
                elif old is _EMPTY:
                    del cell.cell_contents
                else:
                    cell.cell_contents = old
