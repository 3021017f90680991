"""Weights that have no gradient: an error, or a warning, if JAX differentiates them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tfgrad_jax._closure.names import named
from tfgrad_jax._closure.reach import survey
from tfgrad_jax._frontend.grad_fn import Held
from tfgrad_jax._jax.compat import is_ref
from tfgrad_jax._jax.types import Aval, Leaf, OperandIndex, type_of
from tfgrad_jax._messages import errors, gradient_errors
from tfgrad_jax._messages.source import Source


class Use(NamedTuple):
    """Of a captured value: its type, whether it is a Ref, and where `f` used it first."""

    type: Aval
    is_ref: bool
    line: Any

    @classmethod
    def of(cls, value: Leaf, line: Any) -> "Use":
        return cls(type_of(value), is_ref(value), line)


Names = Callable[[Sequence[OperandIndex]], Mapping[OperandIndex, str]]


class Refused(NamedTuple):
    """Captured values that `f` uses and that have no gradient: an error if they need one."""

    source: Source
    uses: Mapping[OperandIndex, Use]
    declared: bool  # whether others are declared

    def check(self, wanted: Sequence[OperandIndex], names: Names) -> None:
        found = {i: self.uses[i] for i in wanted if i in self.uses}
        if found and all(use.is_ref for use in found.values()):
            raise errors.captured_ref(self.source)
        if found:
            of = names([*found])
            lines = [(of.get(i, ""), u.type, self.source.line(u.line)) for i, u in found.items()]
            raise errors.no_gradient_for_captured(self.source, lines, self.declared)


def warn_of(source: Source, values: Mapping[OperandIndex, Aval], names: Names) -> None:
    """Warn of values that are differentiated, and that only a rule reads."""
    if values:
        of = names([*values])
        gradient_errors.warn_of_unlisted(source, [(of.get(i, ""), s) for i, s in values.items()])


def names_of(
    held: Held, values: Mapping[OperandIndex, Leaf], rule: Any = None
) -> Mapping[OperandIndex, str]:
    """Name some of the values that a call captured as the user writes them."""
    if not values:
        return {}
    roots = [("", held.f), ("", held.primal), *(("self", v) for v in held.bound_to)]
    roots += [*held.keywords.items(), ("args", held.inputs)]
    roots += [("", rule)] if rule is not None else []
    ids = {id(v) for v in values.values()}
    found = named(roots, survey([held, rule], lambda v: id(v) in ids))
    return {i: found[id(v)].name for i, v in values.items() if id(v) in found}
