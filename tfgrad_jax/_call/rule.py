"""The rule of a call: from the `grad_fn` that `f` returned to what JAX carries and runs.

JAX wants a rule as arrays, its residuals, and a `Run`: a function of residuals, cotangents and the
indices of the operands that are wanted, which returns their gradients. A rule holds its *parts*:
the values of the variables that it may list, and the `grad_fn`. `hoisted` takes the tracers out of
the parts; these are the residuals. If there are no tracers, `kept` leaves the parts as they are.
`UserRule.run` runs the rule on parts, copied or not.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

from tfgrad_jax._autodiff.rule import Run
from tfgrad_jax._closure.assigned import refuse_assigned
from tfgrad_jax._closure.names import named
from tfgrad_jax._closure.objects import Object
from tfgrad_jax._closure.reach import constants_of, is_captured, reach, survey
from tfgrad_jax._closure.skeleton import Copies, frozen, hoist_tracers
from tfgrad_jax._closure.snapshot import Owned, Snapshot, Watched
from tfgrad_jax._closure.traced import traced
from tfgrad_jax._frontend.grad_fn import GradFn, Held, HeldByRule, Variables
from tfgrad_jax._jax.jaxpr import SourceInfo
from tfgrad_jax._jax.reasons import Why
from tfgrad_jax._jax.types import Aval, Leaf, OperandIndex, Spec, is_traced
from tfgrad_jax._messages import errors
from tfgrad_jax._messages.source import Source

CapturedIndex: TypeAlias = int  # an `OperandIndex` of a captured value: these come first
Values: TypeAlias = Sequence[Leaf]  # arrays or tracers
Wanted: TypeAlias = Sequence[OperandIndex]  # those that are being differentiated
Gradient: TypeAlias = Leaf | None
Parts: TypeAlias = tuple[Values, HeldByRule]  # of the variables that a rule may list; `GradFn.held`


class Listing(NamedTuple):
    """Which captured values a rule gives gradients for. It holds no values: JAX keeps it."""

    gives: Sequence[CapturedIndex]  # undeclared ones in the order of their first use in `y`
    variables: Variables | None  # the declared ones
    specs: Sequence[Spec]  # the types of undeclared ones in the forward pass; else none

    def listed(self, wanted: Wanted) -> Sequence[CapturedIndex]:
        """Return the declared variables, or those undeclared ones that are being differentiated."""
        return [i for i in self.gives if i in wanted] if self.specs else self.gives

    def argument(self, values: Values, wanted: Wanted) -> tuple[Variables | None, Values]:
        """Return what the rule gets, as a structure and its values."""
        if not self.specs:
            return self.variables, values
        some = [k for k, i in enumerate(self.gives) if i in wanted]
        values = [values[k] for k in some]
        return Variables.listed(values, [self.specs[k] for k in some]) if some else None, values


Names: TypeAlias = Mapping[CapturedIndex, str]  # as the user writes them; "" if it is not known


def names_of(held: Any, values: Mapping[CapturedIndex, Leaf]) -> Names:
    """Name some of the values that a call captured, from what it holds."""
    if not (values and isinstance(held, Held)):  # or it was traced before
        return dict.fromkeys(values, "")
    roots = [("", held.f), ("", held.primal), *(("self", v) for v in held.bound_to)]
    roots += [*held.keywords.items(), ("args", held.inputs)]
    ids = {id(v) for v in values.values()}
    found = named(roots, survey([held], lambda v: id(v) in ids))
    return {i: found[id(v)].name if id(v) in found else "" for i, v in values.items()}


Uses: TypeAlias = dict[CapturedIndex, SourceInfo]  # where `y` uses values, in order of first use


class Refused(NamedTuple):
    """Captured values that `y` uses and that have no gradient: an error if they need one."""

    source: Source
    uses: Mapping[CapturedIndex, tuple[Spec, bool, SourceInfo]]  # whether a value is a Ref
    names: Names
    declared: bool  # whether others are declared

    def check(self, wanted: Wanted) -> None:
        found = {i: use for i, use in self.uses.items() if i in wanted}
        if found and all(is_ref for _, is_ref, _ in found.values()):
            raise errors.captured_ref(self.source)
        if found:
            lines = [(self.names[i], of, self.source.line(at)) for i, (of, _, at) in found.items()]
            raise errors.no_gradient_for_captured(self.source, lines, self.declared)


class UserRule(NamedTuple):
    """A rule that `f` returned, with what it may list, and what it may not assign to."""

    grad_fn: GradFn
    source: Source  # of `f`
    listing: Listing
    refused: Refused
    captured: int  # how many of the operands are captured values
    values: Values  # of what it may list
    watched: Sequence[Watched]
    owned: Owned  # what `f` has not made

    def parts(self) -> Parts:
        """Return what it holds."""
        return tuple(self.values), self.grad_fn.held

    def run(self, parts: Callable[[Values], Copies]) -> Run:
        """Return what runs the rule on parts, which hold the residuals. JAX keeps it."""
        bare = self.grad_fn._replace(held=None, y=None)
        code = self._replace(grad_fn=bare, values=(), watched=(), owned=Owned())
        return functools.partial(code._run, parts)

    def _run(
        self,
        parts: Callable[[Values], Copies],
        residuals: Values,
        cotangents: Values,
        wanted: Wanted,
    ) -> list[Gradient]:
        """Return the gradients of the wanted operands. With its first argument, it is a `Run`."""
        self.refused.check(wanted)
        (values, held), watched = parts(residuals)
        variables = self.listing.argument(values, wanted)
        returned = self.grad_fn.gradients(held, cotangents, *variables)
        refuse_assigned(watched, self.grad_fn.source, [held])
        listed = self.listing.listed(wanted)
        inputs = range(self.captured, self.captured + len(returned) - len(listed))
        by_operand: dict[OperandIndex, Gradient] = {}
        for i, gradient in zip([*inputs, *listed], returned, strict=True):
            other = by_operand.get(i)  # a value may be declared twice
            if other is not None and gradient is not None:
                gradient = other + gradient
            by_operand[i] = other if gradient is None else gradient
        return [by_operand.get(i) for i in wanted]


class Own:
    """The only output of a run of `f`: its rule means `h(x)` if it holds this very object."""

    def __init__(self, grad_fn: GradFn, leaf: Leaf | None, owned: Owned) -> None:
        self.y, self._leaf, self._owned = grad_fn.y, leaf, owned

    def takes(self, value: Leaf) -> bool:
        """Return whether to take a value out of a rule: a tracer, a Ref, or this output."""
        return is_captured(value) or (value is self.y and self._is_made)

    def as_array(self, values: Values) -> list[Leaf]:
        """Return the values, with an array where they have an output that `f` returned as NumPy."""
        return [self._leaf if v is self.y else v for v in values]

    @functools.cached_property
    def _is_made(self) -> bool:
        """Return whether `f` has made it: neither a variable that `f` reads nor an input is it.

        What is in an object or a list counts as made: `f` may have put it there.
        """
        if not isinstance(self._owned.held, Held):
            return True
        held = self._owned.held
        constants: list[Object] = [held.f, held.primal, *held.inputs, *held.keywords.values()]
        seen = set()
        for value in constants:  # it grows by what functions read
            if type(value) is FunctionType and id(value) not in seen:
                seen.add(id(value))
                constants += constants_of(value)
        return not any(value is self.y for value in constants)


def hoisted(
    rule: UserRule, upstreams: Sequence[Aval], own: Own, wanted: Wanted
) -> tuple[Run, list[Leaf]]:
    """Return a rule as a function of residuals, and the residuals: the tracers in its parts.

    So is its own output, even if it has a value: its derivative is the declared one.

    It is copied around them; if it cannot be copied, it is traced first. Raises an error of
    `NEEDS_VALUES` if a rule that is traced needs values. `upstreams` are types.
    """
    parts = rule.parts()
    found = reach(parts, own.takes)
    if found.obstacle and own.y is not None and not is_traced([own.y]):
        # A trace would compute at once what depends on it, as on a constant. So a `jit` is left
        # out, and the rule is copied.
        without_jit = survey(parts, own.takes)
        if id(own.y) in without_jit.captured:
            if not without_jit.is_copied:
                raise errors.own_output_not_copied(rule.source, found.obstacle)
            found = without_jit
    if found.obstacle:
        variables = rule.listing.argument(rule.values, wanted)
        why = functools.partial(errors.obstructed, rule.grad_fn.source, found.obstacle)
        by_jaxpr = transparent_rule(rule.source, rule.grad_fn, upstreams, *variables, why)
        refuse_assigned(rule.watched, by_jaxpr.source, parts)
        rule = rule._replace(grad_fn=by_jaxpr)
        parts = rule.parts()
        found = reach(parts, own.takes)
    skeleton, residuals = hoist_tracers(parts, found, rule.watched, owned=rule.owned)
    return rule.run(skeleton.copies), own.as_array(residuals)


def kept(rule: UserRule) -> tuple[Run, list[Leaf]]:
    """Return the rule around its parts as they are."""
    parts = rule.parts()
    copies = {id(w.value) for w in rule.watched}
    found = survey(parts, ends=copies)
    snapshot = Snapshot(found, owned=rule.owned)
    # If the rule reaches none of them, do not hold them: the batch that `f` alone reads would stay
    # in memory until the backward pass.
    reaches_copies = not found.is_complete or not copies.isdisjoint(found.visited)
    watched = list(rule.watched) if reaches_copies else []

    def current(_: Values) -> Copies:
        return Copies(frozen(parts, snapshot.changed()), watched)

    return rule.run(current), []


def transparent_rule(
    source: Source,  # of `f`
    grad_fn: GradFn,
    upstreams: Sequence[Aval],  # their types
    variables: Variables | None,
    values: Values,
    why: Why = None,
) -> GradFn:
    """Return the same rule, which evaluates a jaxpr around a list of tracers.

    It runs once, now, with these variables, and gives gradients for all of them or for none.
    """
    rule = traced(
        lambda *cotangents: (grad_fn.gradients(grad_fn.held, cotangents, variables, values), None),
        *upstreams,
        source=grad_fn.source,
        why=why,
    )
    run, count = rule.run, len(values)

    def gradients(
        consts: HeldByRule, cotangents: Values, _: Variables | None, values: Values
    ) -> list[Gradient]:
        if len(values) not in (0, count):
            raise errors.fixed_variables(source)
        every = run(consts, cotangents)
        return every[: len(every) - count + len(values)]

    return grad_fn._replace(gradients=gradients, held=tuple(rule.consts))
