"""Name the user's functions, with the file and line where they are written.

`Source` and `Where` become text in messages, jaxprs and JAX's errors. `Source.named` gives JAX the
user's names for the functions that it traces. `line` and its kin return the line of a function
that led to an operation or to an error.
"""

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .._jax import shown, trace, watch
from .tracebacks import is_of_jax, is_ours


class _Operands(inspect.Signature):
    """The signature of a function of operands, from which JAX's errors take the operands' names."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__([inspect.Parameter("operands", inspect.Parameter.VAR_POSITIONAL)])
        self._names = names

    def bind(self, *operands: Any, **kwargs: Any) -> inspect.BoundArguments:
        bound = super().bind(*operands, **kwargs)
        if len(self._names) == len(operands):
            bound.arguments = dict(zip(self._names, operands, strict=True))
        return bound


def _resolve(f: Any) -> tuple[str | None, types.CodeType | None]:
    """Return the name and the code of the function that `f` wraps or calls; None if not known."""
    if type(f) is types.FunctionType and not hasattr(f, "__wrapped__"):
        return f.__qualname__, f.__code__  # fast path for the usual rule
    inner: Any = inspect.unwrap(f)
    while not hasattr(inner, "__code__"):
        if isinstance(inner, functools.partial):
            inner = inner.func
        elif hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__
        elif isinstance(
            call := inspect.getattr_static(type(inner), "__call__", None), types.FunctionType
        ):
            return type(inner).__qualname__, call.__code__
        else:
            return getattr(f, "__qualname__", None), None
    return getattr(inner, "__qualname__", inner.__code__.co_name), inner.__code__


def describe(f: Callable[..., Any]) -> str:
    """Name a function and where it is written, as in "`f` (model.py:12)"."""
    return str(Source.of(f))


def codes_inside(code: types.CodeType | None) -> Iterator[types.CodeType]:
    """Yield the code objects of the functions that are written inside another one."""
    for constant in code.co_consts if code else ():
        if isinstance(constant, types.CodeType):
            yield constant
            yield from codes_inside(constant)


def is_within(outer: types.CodeType | None, code: types.CodeType | None) -> bool:
    """Return whether the function of `code` is written inside that of `outer`."""
    return any(inner is code for inner in codes_inside(outer))


_TRACES = {module.__file__ for module in (shown, trace, watch)}


class Source(NamedTuple):
    """The name and the code of a function. Neither holds values, so a jaxpr may keep them."""

    name: str
    code: types.CodeType | None

    @classmethod
    def of(cls, f: Callable[..., Any]) -> "Source":
        name, code = _resolve(f)
        return cls(repr(f) if name is None else name, code)

    def named(self, run: Any, names: Sequence[str]) -> Callable[..., Any]:
        """Let JAX's own errors show this source, and these names of operands, for our function.

        No wrapper, which would be one frame more at each level of a nest: Python allows 1,000.
        """
        if self.code is not None:
            name = self.name.rpartition(".")[2]
            run.__signature__ = _Operands(names)
            run.__wrapped__ = types.SimpleNamespace(__name__=name, __code__=self.code)
        return run

    def line(self, source_info: Any) -> str:
        """Return "file:line" of the line in the function that led to a source that JAX recorded."""
        if self.code is None:
            return ""
        lines = {line for _, _, line in self.code.co_lines()}
        traceback = getattr(source_info, "traceback", None)
        for frame in getattr(traceback, "frames", ()):
            if frame.file_name == self.code.co_filename and frame.line_num in lines:
                return f"{frame.file_name}:{frame.line_num}"
        return f"{self.code.co_filename}:{self.code.co_firstlineno}"

    def line_of(self, eqn: Any) -> str:
        """Return "file:line" of the line in the rule of the function that led to an equation."""
        # JAX records the frames of an equation from the inside out. Those of a traced rule begin in
        # the rule, above any frame of this package. What JAX lowers or evaluates later has the
        # frames of the call instead: they begin in this package, and hold no line of the rule.
        # (Our own traces are between the rule and JAX.)
        traceback = getattr(getattr(eqn, "source_info", None), "traceback", None)
        frames = [f for f in getattr(traceback, "frames", ()) if f.file_name not in _TRACES]
        lines = [(f.file_name, f.line_num) for f in frames]
        inner = itertools.takewhile(lambda line: not is_ours(line[0]), lines)
        return self._line(inner)

    def line_in(self, error: BaseException) -> str:
        """Return "file:line" of the line in the function, or its rule, that led to an error."""
        frames, tb = [], error.__traceback__
        while tb is not None:
            frames.append((tb.tb_frame.f_code.co_filename, tb.tb_lineno))
            tb = tb.tb_next
        return self._line(reversed(frames))

    def _line(self, lines: Iterable[tuple[str, int]]) -> str:
        """Return the innermost line in the function, or else outside of JAX and this package.

        `lines` come from the inside out.
        """
        lines = [(file, n) for file, n in lines if not (is_ours(file) or is_of_jax(file))]
        codes = [self.code, *codes_inside(self.code)] if self.code else []
        written = {(code.co_filename, n) for code in codes for _, _, n in code.co_lines()}
        found = next((line for line in lines if line in written), next(iter(lines), None))
        return f"{found[0]}:{found[1]}" if found else ""

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
        return f"The rule {describe(self.grad_fn)} of {self.source}"
