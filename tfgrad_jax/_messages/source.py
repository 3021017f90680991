"""Name the user's functions, with the file and line where they are written.

`Source` and `Where` become text in messages, jaxprs and JAX's errors. `Source.named` gives JAX the
user's names for the functions that it traces, and `Source.line` is the line that led to an
operation.
"""

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function, and of the functions that are written inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


class Source(NamedTuple):
    """The name and the code of a function. Neither holds values, so a jaxpr may keep them."""

    name: str
    code: types.CodeType | None

    @classmethod
    def of(cls, f: Callable[..., Any]) -> "Source":
        """Return the source of the function that `f` is, wraps or calls."""
        inner: Any = inspect.unwrap(f)
        while not hasattr(inner, "__code__"):
            call = inspect.getattr_static(type(inner), "__call__", None)
            if isinstance(inner, functools.partial):
                inner = inner.func
            elif hasattr(inner, "__wrapped__"):
                inner = inner.__wrapped__
            elif isinstance(call, types.FunctionType):
                return cls(type(inner).__qualname__, call.__code__)
            else:
                names = (getattr(f, a, "") for a in ("__qualname__", "__name__"))
                return cls(next(filter(None, names), type(inner).__qualname__), None)
        return cls(getattr(inner, "__qualname__", inner.__code__.co_name), inner.__code__)

    def named(self, run: Any, names: Sequence[str]) -> Callable[..., Any]:
        """Let JAX's own errors show this source, and these names of operands, for our function.

        No wrapper, which would be one frame more at each level of a nest: Python allows 1,000.
        """
        if self.code is not None:
            kind = inspect.Parameter.POSITIONAL_ONLY
            words = dict.fromkeys(re.sub(r"\W+", "_", name).strip("_") for name in names)
            run.__signature__ = inspect.Signature([inspect.Parameter(w, kind) for w in words])
            name = self.name.rpartition(".")[2]
            run.__wrapped__ = types.SimpleNamespace(__name__=name, __code__=self.code)
        return run

    def line(self, source_info: Any) -> str:
        """Return "file:line" of the innermost line in the function that led to an operation.

        JAX records the frames of an operation from the inside out.
        """
        codes = codes_in(self.code) if self.code else ()
        written = {(code.co_filename, n) for code in codes for _, _, n in code.co_lines()}
        frames = getattr(getattr(source_info, "traceback", None), "frames", ())
        lines = ((frame.file_name, frame.line_num) for frame in frames)
        return next((f"{file}:{n}" for file, n in lines if (file, n) in written), "")

    def __str__(self) -> str:
        name = self.name.replace("<locals>.", "")
        if self.code is None:
            return f"`{name}`"
        return f"`{name}` ({self.code.co_filename}:{self.code.co_firstlineno})"


class Where(NamedTuple):
    """Whose rule an error is about."""

    source: Source
    grad_fn: Callable[..., Any]
    of: str = "input"  # what the rule gives gradients for: "input" or "variable"

    def __str__(self) -> str:
        return f"The rule {Source.of(self.grad_fn)} of {self.source}"
