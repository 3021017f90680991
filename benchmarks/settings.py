"""What the command line asks for, and the unit of work that the progress bar counts."""

from collections.abc import Callable
from typing import NamedTuple

from benchmarks.results import Group


class Settings(NamedTuple):
    quick: bool = False

    @property
    def scale(self) -> float:
        """How much of the usual time to spend on a comparison."""
        return 0.02 if self.quick else 1.0

    @property
    def rounds(self) -> tuple[int, int]:
        """The least and the most rounds of a comparison."""
        return (2, 5) if self.quick else (9, 300)


class Task(NamedTuple):
    """Part of a section; `run` measures it."""

    section: str
    case: str
    run: Callable[[], list[Group]]

    @property
    def name(self) -> str:
        return f"{self.section}/{self.case}"
