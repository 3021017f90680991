"""A case: a function of a `Backend`, and what its answers are compared with."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .backend import MODES, Backend, Jax

RECORDED = Path(__file__).with_name("recorded.json")

# Of results that went through a few operations; a dtype that is not listed is compared exactly.
_TOLERANCE = {
    "float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-12,
    "complex64": 1e-5, "complex128": 1e-12,
}  # fmt: skip


class Differs(NamedTuple):
    """A deliberate difference: what each does, in words, and our answer."""

    theirs: str
    ours: str
    answer: Any
    better: bool = False  # TensorFlow loses the declared gradient, or its documentation is wrong


class Case(NamedTuple):
    """One case, named `<module>.<function>`."""

    name: str
    rules: tuple[int, ...]
    function: Callable[[Backend], Any]
    modes: Sequence[str]
    none_is_zero: bool  # TensorFlow says None where every gradient of JAX is a number: zero
    graph_differs: str | None  # how the graph mode of TensorFlow differs from eager, ours does not
    differs: Differs | None
    double: bool

    def answer(self, backend: Backend) -> Any:
        """Run the case; return its answer as JSON."""
        backend.notes = []
        with backend.settings(self.double):
            answer = backend.plain(self.function(backend))
        if backend.notes:
            return {"answer": answer, "notes": backend.plain(backend.notes)}
        return answer

    @property
    def expected(self) -> Any:
        """Our answer, where it differs."""
        assert self.differs is not None
        return Jax("eager").plain(self.differs.answer)


CASES: dict[str, Case] = {}


def case(
    *rules: int,
    modes: Sequence[str] = MODES,
    none_is_zero: bool = False,
    graph_differs: str | None = None,
    differs: Differs | None = None,
    double: bool = False,
) -> Callable[[Callable[[Backend], Any]], Callable[[Backend], Any]]:
    """Register a case under the rules of TensorFlow's behavior that it shows."""

    def register(function: Callable[[Backend], Any]) -> Callable[[Backend], Any]:
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        assert name not in CASES, name
        CASES[name] = Case(
            name, rules, function, modes, none_is_zero, graph_differs, differs, double
        )
        return function

    return register


def floats(*values: Any) -> np.ndarray:
    """Return the float32 vector that an answer is expected to be."""
    return np.asarray(values, np.float32)


def recorded() -> dict[str, Any]:
    """Return TensorFlow's recorded answers: name of the case -> mode -> answer."""
    return json.loads(RECORDED.read_text())["answers"]


def disagreement(expected: Any, got: Any, none_is_zero: bool = False, path: str = "") -> str | None:
    """Say where two answers differ, or None."""
    if none_is_zero and expected is None and _is_zero(got):
        return None
    if isinstance(expected, dict) and "dtype" in expected and "value" in expected:
        return _arrays_disagree(expected, got, path)
    if isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        pairs = [(f"{path}[{i}]", e, g) for i, (e, g) in enumerate(zip(expected, got, strict=True))]
    elif isinstance(expected, dict) and isinstance(got, dict) and expected.keys() == got.keys():
        pairs = [(f"{path}.{k}", e, got[k]) for k, e in expected.items()]
    else:
        return None if expected == got else f"at {path or 'top'}: expected {expected}, got {got}"
    for where, e, g in pairs:
        found = disagreement(e, g, none_is_zero, where)
        if found:
            return found
    return None


def _is_zero(got: Any) -> bool:
    if not (isinstance(got, dict) and "value" in got):
        return False
    return not np.any(np.asarray(got["value"]))


def _arrays_disagree(expected: Any, got: Any, path: str) -> str | None:
    text = f"at {path or 'top'}: expected {expected}, got {got}"
    if not (isinstance(got, dict) and got.keys() == expected.keys()):
        return text
    if (expected["dtype"], expected["shape"]) != (got["dtype"], got["shape"]):
        return text
    tolerance = _TOLERANCE.get(expected["dtype"], 0.0)
    for e, g in zip(_flat(expected["value"]), _flat(got["value"]), strict=True):
        e, g = float(e), float(g)
        same = e == g or (math.isnan(e) and math.isnan(g))
        if not same and not abs(e - g) <= tolerance * (1.0 + abs(e)):
            return text
    return None


def _flat(value: Any) -> list[Any]:
    return [v for part in value for v in _flat(part)] if isinstance(value, list) else [value]
