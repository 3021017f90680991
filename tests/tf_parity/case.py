"""A case: a function of a `Backend`, and what its answers are compared with."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .backend import MODES, Backend

RECORDED = Path(__file__).with_name("recorded.json")

# Of results that went through a few operations; a dtype that is not listed is compared exactly.
TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2, "float64": 1e-12, "complex128": 1e-12}
TOLERANCE |= {"float32": 1e-5, "complex64": 1e-5}


class Case(NamedTuple):
    """A row of a table: the rules of TensorFlow's behavior that it shows, and how it shows them."""

    rules: int | tuple[int, ...]
    function: Callable[[Backend], Any]
    ours: Any = None  # our answer, where it differs on purpose; docs/from_tensorflow.md says how
    modes: Sequence[str] = MODES
    double: bool = False

    def answer(self, backend: Backend) -> Any:
        """Run the case; return its answer, or the type of the error, as JSON."""
        backend.notes = []
        with backend.settings(self.double):
            answer = backend.plain(backend.error(lambda: self.function(backend)))
        if backend.notes:
            return {"answer": answer, "notes": backend.plain(backend.notes)}
        return answer


CASES: dict[str, Case] = {}

# Answers that many cases share.
TYPE_ERROR, VALUE_ERROR = {"raises": "TypeError"}, {"raises": "ValueError"}


def table(module, **rows):
    """Add cases, named `<module>.<row>`."""
    CASES.update({f"{module.rpartition('.')[2]}.{name}": row for name, row in rows.items()})


def case(*rules, **options):
    """Add a function as a case of its name."""

    def add(function):
        table(function.__module__, **{function.__name__: Case(rules, function, **options)})
        return function

    return add


def by(*factors, variable=None):
    """Return a rule: one factor of the upstream for each input, and one for every variable."""

    def inputs(dy):
        gradients = tuple(None if factor is None else dy * factor for factor in factors)
        return gradients[0] if len(factors) == 1 and factors[0] is not None else gradients

    if variable is None:
        return inputs
    return lambda dy, variables=None: (inputs(dy), [dy * variable for _ in variables])


def square(b, rule):
    """Decorate `x -> x * x` with a rule."""
    return b.custom(lambda x: (x * x, rule))


def product(b, rule):
    """Decorate `x, y -> x * y` with a rule."""
    return b.custom(lambda x, y: (x * y, rule))


def scaled(b, rule):
    """Return `x, v -> f(x)`, where `f` closes over `v` and has the rule."""
    return lambda x, v: b.custom(lambda x: (x * v, rule))(x)


def sine_rule(b):
    """Decorate `x -> x**3` with a rule that is a sine."""
    return b.custom(lambda x: (x**3, lambda dy: dy * b.sin(x)))


def floats(*values):
    """Return the float32 vector that an answer is expected to be."""
    return np.asarray(values, np.float32)


def recorded() -> dict[str, Any]:
    """Return TensorFlow's recorded answers: name of the case -> mode -> answer."""
    return json.loads(RECORDED.read_text())["answers"]


def disagreement(expected, got, path=""):
    """Say where two answers differ, or None. Where TensorFlow says None, JAX has zeros."""
    if isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        pairs = [(f"{path}[{i}]", e, g) for i, (e, g) in enumerate(zip(expected, got, strict=True))]
    elif isinstance(expected, dict) and isinstance(got, dict) and expected.keys() == got.keys():
        if "dtype" in expected and _close(expected, got):
            return None
        pairs = [(f"{path}.{k}", e, got[k]) for k, e in expected.items()]
    elif expected is None and isinstance(got, dict) and not np.any(got.get("value", True)):
        return None
    else:
        return None if expected == got else f"at {path or 'top'}: expected {expected}, got {got}"
    return next(filter(None, (disagreement(e, g, at) for at, e, g in pairs)), None)


def _close(expected, got):
    if (expected["dtype"], expected["shape"]) != (got["dtype"], got["shape"]):
        return False
    tolerance = TOLERANCE.get(expected["dtype"], 0.0)
    values = (np.asarray(answer["value"]).astype(float) for answer in (got, expected))
    return np.allclose(*values, rtol=tolerance, atol=tolerance, equal_nan=True)
