"""The rule of a call: from the `grad_fn` that `f` returned to what JAX carries and runs.

JAX wants a rule as arrays, its residuals, and a `Run`: a function of residuals, cotangents and the
indices of the operands that are wanted, which returns their gradients. A rule holds its *parts*:
the values of the variables that it may list, and the `grad_fn`. `hoisted` takes the tracers out of
the parts; these are the residuals. If there are no tracers, `kept` leaves the parts as they are.
`UserRule.run` runs the rule on parts, copied or not.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from tfgrad_jax._autodiff.rule import Run
from tfgrad_jax._closure.assigned import refuse_assigned
from tfgrad_jax._closure.objects import Watched
from tfgrad_jax._closure.reach import BUDGET, BUDGET_STAGED, is_captured, reach
from tfgrad_jax._closure.skeleton import Copies, frozen, hoist_tracers
from tfgrad_jax._closure.snapshot import Owned, Snapshot
from tfgrad_jax._closure.traced import SourceInfo, traced
from tfgrad_jax._frontend.grad_fn import GradFn, HeldByRule, Variables
from tfgrad_jax._jax.trace import is_staging
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


class Refused(NamedTuple):
    """Captured values that `y` uses and that have no gradient: an error if they need one."""

    source: Source
    uses: Mapping[CapturedIndex, tuple[Spec, bool, SourceInfo]]  # whether a value is a Ref
    declared: bool  # whether others are declared

    def check(self, wanted: Wanted) -> None:
        found = [use for i, use in self.uses.items() if i in wanted]
        if found and all(is_ref for _, is_ref, _ in found):
            raise errors.captured_ref(self.source)
        if found:
            lines = [(of, self.source.line(at)) for of, _, at in found]
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
        """Return what it holds, in a new list; copies are made of what is in it."""
        return list(self.values), self.grad_fn.held

    def run(self, parts: Callable[[Values], Copies]) -> Run:
        """Return what runs the rule on parts, which hold the residuals. JAX keeps it."""
        bare = self.grad_fn._replace(held=None)
        code = self._replace(grad_fn=bare, values=(), watched=(), owned=dict)
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
        refuse_assigned(watched, self.grad_fn.source)
        listed = self.listing.listed(wanted)
        inputs = range(self.captured, self.captured + len(returned) - len(listed))
        by_operand: dict[OperandIndex, Gradient] = {}
        for i, gradient in zip([*inputs, *listed], returned, strict=True):
            other = by_operand.get(i)  # a value may be declared twice
            if other is not None and gradient is not None:
                gradient = other + gradient
            by_operand[i] = other if gradient is None else gradient
        return [by_operand.get(i) for i in wanted]


def hoisted(
    rule: UserRule, upstreams: Sequence[Aval], ys: Values, wanted: Wanted
) -> tuple[Run, list[Leaf]]:
    """Return a rule as a function of residuals, and the residuals: the tracers in its parts.

    The outputs `ys` are residuals as well, if it reads them: their derivative is the declared one.

    It is copied around them; if it cannot be copied, it is traced first. Raises an error of
    `NEEDS_VALUES` if a rule that is traced needs values. `upstreams` are types.
    """
    # A rule that was traced lists the same variables at every order. So where it may choose, look
    # through more objects before it is traced.
    is_patient = bool(rule.listing.specs) or not is_staging()
    takes = takes_also(ys)
    parts = rule.parts()
    found = reach(parts, takes, budget=BUDGET if is_patient else BUDGET_STAGED)
    if found.obstacle:
        variables = rule.listing.argument(rule.values, wanted)
        by_jaxpr = transparent_rule(rule.source, rule.grad_fn, upstreams, *variables)
        refuse_assigned(rule.watched, by_jaxpr.source)
        rule = rule._replace(grad_fn=by_jaxpr)
        parts = rule.parts()
        found = reach(parts, takes)
    skeleton, residuals = hoist_tracers(parts, found, rule.watched, owned=rule.owned)
    return rule.run(skeleton.copies), residuals


def made(ys: Values, owned: Owned) -> Values:
    """Return the outputs that `f` has made itself: not a constant that it holds and returns."""
    if is_traced(ys):  # a tracer that it holds is an operand
        return ys
    return [y for y in ys if id(y) not in owned()]


def takes_also(ys: Values) -> Callable[[Leaf], bool]:
    """Return what says which values to take out of a rule: tracers, Refs and these outputs."""
    ids = set(map(id, ys))
    return lambda value: is_captured(value) or id(value) in ids


def kept(rule: UserRule) -> tuple[Run, list[Leaf]]:
    """Return the rule around its parts as they are."""
    parts = rule.parts()
    copies = {id(w.value) for w in rule.watched}
    found = reach(parts, lambda _: False, ends=copies, lenient=True)
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
) -> GradFn:
    """Return the same rule, which evaluates a jaxpr around a list of tracers.

    It runs once, now, with these variables, and gives gradients for all of them or for none.
    """
    run, consts, *_ = traced(
        lambda *cotangents: (grad_fn.gradients(grad_fn.held, cotangents, variables, values), None),
        *upstreams,
        source=grad_fn.source,
    )
    count = len(values)

    def gradients(
        consts: HeldByRule, cotangents: Values, _: Variables | None, values: Values
    ) -> list[Gradient]:
        if len(values) not in (0, count):
            raise errors.fixed_variables(source)
        every = run(consts, cotangents)
        return every[: len(every) - count + len(values)]

    return grad_fn._replace(gradients=gradients, held=consts)
