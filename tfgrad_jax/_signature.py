"""Turn the arguments of a call into the inputs of the custom gradient.

`Signature(f)` runs once, when `f` is decorated; `fits` and `bind` run at every call:
`fits` is the test that lets a purely positional call through untouched, `bind` does the
work for all others and raises the error for a call that does not fit.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from . import _errors

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


class Bound(NamedTuple):
    """The arguments of one call, sorted by what they mean to the gradient."""

    inputs: tuple[Any, ...]  # in the order of the signature
    named: tuple[str, ...]  # names of the last inputs: those after a skipped default
    rest: Mapping[str, Any]  # keyword-only arguments and **kwargs: closed over


class Signature:
    """The parameters of `f` after its first `bound` ones (`self` of a method)."""

    __slots__ = ("_most", "_names", "_needed", "_parameters", "_signature")

    def __init__(self, f: Callable[..., Any], bound: int = 0) -> None:
        try:
            signature = inspect.signature(f)
        except (TypeError, ValueError):  # a builtin that tells nothing of its parameters
            signature = inspect.Signature(
                [
                    inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
                    inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
                ]
            )
        parameters = list(signature.parameters.values())
        for _ in range(bound):
            if parameters and parameters[0].kind in _POSITIONAL:
                del parameters[0]
        self._parameters = parameters
        self._signature = signature.replace(parameters=parameters)
        positional = [p for p in parameters if p.kind in _POSITIONAL]
        self._names = tuple(p.name for p in positional)
        self._needed = sum(p.default is p.empty for p in positional)
        self._most = len(positional)
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            self._most = 1 << 30
        if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
            self._most = -1  # such a call is never purely positional

    def fits(self, count: int) -> bool:
        """Tell whether `count` positional arguments alone make a valid call."""
        return self._needed <= count <= self._most

    def bind(
        self, f: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Bound:
        """Sort the arguments of a call; raise `TypeError` if they do not fit."""
        try:
            values = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise _errors.bad_call(f, self._signature, error) from None
        inputs: list[Any] = []
        named: list[str] = []
        rest: dict[str, Any] = {}
        skipped = False
        for p in self._parameters:
            if p.name not in values:
                skipped = True  # a default was left out: it is no input
            elif p.kind in _POSITIONAL:
                inputs.append(values[p.name])
                if skipped:
                    named.append(p.name)
            elif p.kind is p.VAR_POSITIONAL:
                inputs.extend(values[p.name])
            elif p.kind is p.KEYWORD_ONLY:
                rest[p.name] = values[p.name]
            else:
                rest.update(values[p.name])
        return Bound(tuple(inputs), tuple(named), rest)

    def input_names(self, bound: Bound) -> tuple[str, ...]:
        """Name the inputs the way the caller knows them, for error messages."""
        count = len(bound.inputs) - len(bound.named)
        names = self._names[:count]
        if len(names) < count:
            star = next((p.name for p in self._parameters if p.kind is p.VAR_POSITIONAL), "args")
            names += tuple(f"{star}[{i}]" for i in range(count - len(names)))
        return names + bound.named
