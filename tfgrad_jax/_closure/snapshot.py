"""What the variables of functions held at the call.

A rule must see its variables as they were at the call, as it does under `jit`; but a loop, or a
scope that still runs, may have assigned to them since. (What an object or a dict holds, a rule
reads when it runs.) Nothing of the user's is written, not even for a while: when 8 threads pulled
back layers that were made in one loop, 1,229 of 1,600 gradients were wrong. Instead `skeleton.py`
copies the functions around what the variables held.

Variables to which the code itself assigns, such as a counter, are the user's own, and live.
"""

import types

from .objects import Object, content_of
from .reach import Id, Reached

_EMPTY = object()


class Snapshot:
    """What the variables of functions that lead to no tracer hold now, by the ids of their cells.

    What code reads that `runs_now` cannot change before. Then nothing is held: the call of a layer
    would keep the batch that its callback reads alive, as long as the gradient is not computed.
    """

    def __init__(self, reached: Reached, runs_now: bool = False) -> None:
        self._held: dict[Id, tuple[types.CellType, Object]] = {}
        for f in () if runs_now else reached.functions:
            for cell in f.__closure__ or ():
                key, content = id(cell), content_of(cell, _EMPTY)
                # A variable that is not assigned yet has its value later.
                if content is not _EMPTY and key not in reached.way and key not in reached.assigned:
                    self._held[key] = cell, content

    def changed(self) -> dict[Id, Object]:
        """Return what those variables held that hold something else now."""
        pairs = self._held.items()
        return {key: c for key, (cell, c) in pairs if content_of(cell, _EMPTY) is not c}
