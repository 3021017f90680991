"""The rule of a call: from the `grad_fn` that `f` returned to what JAX carries and runs.

JAX wants a rule as arrays, its residuals, and a `Run`: a function of residuals, cotangents and the
indices of the operands that are wanted, which returns their gradients. A rule holds its *parts*:
the values of the variables that it may list, and the `grad_fn`. `hoisted` takes the tracers out of
the parts; these are the residuals. If there are no tracers, `kept` leaves the parts as they are.
`RuleSpec.run` runs the rule on parts, copied or not.

This module also decides where the gradient of each captured value comes from: see `Origin`.
"""

import enum
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from tfgrad_jax._autodiff.rule import Run
from tfgrad_jax._closure.assigned import Watched, refuse_assigned
from tfgrad_jax._closure.reach import BUDGET, BUDGET_STAGED, reach
from tfgrad_jax._closure.skeleton import Copies, frozen, hoist_tracers
from tfgrad_jax._closure.snapshot import Snapshot
from tfgrad_jax._closure.traced import Uses, traced
from tfgrad_jax._frontend.grad_fn import Call, GradFn, Gradients, Held, Variables
from tfgrad_jax._jax.compat import is_ref
from tfgrad_jax._jax.trace import is_staging
from tfgrad_jax._jax.types import Aval, Leaf, OperandIndex, Spec, is_differentiable
from tfgrad_jax._messages import errors
from tfgrad_jax._messages.source import Source

from .capture import CapturedIndex, Values

Wanted: TypeAlias = Sequence[OperandIndex]  # those that are being differentiated
Gradient: TypeAlias = Leaf | None
Parts: TypeAlias = Values  # the values of the variables that a rule may list, then `GradFn.held`


class Origin(enum.Enum):
    """Where the gradient of a captured value comes from."""

    DECLARED = "the rule always returns it"
    UNDECLARED = "the rule returns it, where the value is being differentiated and `y` uses it"
    AUTODIFF = "the operations of `f`"
    CONSTANT = "it has none"
    MISSING = "an error, where the value is being differentiated and `y` uses it"


def origin(value: Leaf, call: Call, is_declared: bool, accepts_variables: bool) -> Origin:
    if is_declared:
        return Origin.DECLARED
    if not is_differentiable(value.dtype):
        return Origin.CONSTANT
    if call.autodiff and not is_ref(value):
        return Origin.AUTODIFF
    if call.chooses(accepts_variables) and not is_ref(value):
        return Origin.UNDECLARED
    return Origin.CONSTANT if call.spec.in_rule else Origin.MISSING


class Declared(NamedTuple):
    """The rule lists the declared variables, always."""

    gives: Sequence[CapturedIndex]
    variables: Variables | None

    def listed(self, wanted: Wanted) -> Sequence[CapturedIndex]:
        return self.gives

    def argument(self, values: Values, wanted: Wanted) -> tuple[Variables | None, Values]:
        """Return what the rule gets, as a structure and its values."""
        return self.variables, values


class Undeclared(NamedTuple):
    """The rule lists those of the values that `y` uses which are being differentiated."""

    gives: Sequence[CapturedIndex]  # if there are no `uses`, in the order of their first use
    specs: Sequence[Spec]  # their types in the forward pass
    uses: Callable[[], Uses] | None  # which of them `y` uses, if that is not known yet

    def listed(self, wanted: Wanted) -> Sequence[CapturedIndex]:
        some = [i for i in self.gives if i in wanted]
        return [i for i in self.uses() if i in some] if some and self.uses else some

    def argument(self, values: Values, wanted: Wanted) -> tuple[Variables | None, Values]:
        """Return what the rule gets, as a structure and its values."""
        place = {i: k for k, i in enumerate(self.gives)}
        some = [place[i] for i in self.listed(wanted)]
        values = [values[k] for k in some]
        return Variables.listed(values, [self.specs[k] for k in some]) if some else None, values


# Which captured values a rule gives gradients for. It holds no values: JAX keeps it.
Listing: TypeAlias = Declared | Undeclared


class RuleSpec(NamedTuple):
    """How to run a rule, and how to read its result. It holds no values: JAX keeps it."""

    gradients: Gradients
    source: Source  # of the rule
    listing: Listing
    captured: int  # how many of the operands are captured values: the first ones

    def run(
        self,
        parts: Callable[[Values], Copies],
        residuals: Values,
        cotangents: Values,
        wanted: Wanted,
    ) -> list[Gradient]:
        """Return the gradients of the wanted operands. With its first argument, it is a `Run`."""
        gradients, source, listing, captured = self
        current, watched = parts(residuals)
        count = len(listing.gives)
        variables = listing.argument(current[:count], wanted)
        returned = gradients(current[count:], cotangents, *variables)
        refuse_assigned(watched, source)
        listed = listing.listed(wanted)
        inputs = range(captured, captured + len(returned) - len(listed))
        by_operand: dict[OperandIndex, Gradient] = {}
        for i, gradient in zip([*inputs, *listed], returned, strict=True):
            other = by_operand.get(i)  # a value may be declared twice
            if other is not None and gradient is not None:
                gradient = other + gradient
            by_operand[i] = other if gradient is None else gradient
        return [by_operand.get(i) for i in wanted]


class UserRule(NamedTuple):
    """A rule that `f` returned, with what it may list, and what it may not assign to."""

    grad_fn: GradFn
    source: Source  # of `f`
    listing: Listing
    captured: int  # how many of the operands are captured values
    values: Values  # of what it may list
    watched: Sequence[Watched]

    @property
    def parts(self) -> Parts:
        return [*self.values, *self.grad_fn.held]

    def run(self, parts: Callable[[Values], Copies]) -> Run:
        """Return what runs the rule on parts, which hold the residuals."""
        grad_fn = self.grad_fn
        spec = RuleSpec(grad_fn.gradients, grad_fn.source, self.listing, self.captured)
        return functools.partial(spec.run, parts)


def hoisted(rule: UserRule, upstreams: Sequence[Aval], wanted: Wanted) -> tuple[Run, list[Leaf]]:
    """Return a rule as a function of residuals, and the residuals: the tracers in its parts.

    It is copied around them; if it cannot be copied, it is traced first. Raises an error of
    `NEEDS_VALUES` if a rule that is traced needs values. `upstreams` are types.
    """
    # A rule that was traced lists the same variables at every order. So where it may choose, look
    # through more objects before it is traced.
    is_patient = isinstance(rule.listing, Undeclared) or not is_staging()
    found = reach(rule.parts, budget=BUDGET if is_patient else BUDGET_STAGED)
    if found.obstacle:
        variables = rule.listing.argument(rule.values, wanted)
        by_jaxpr = transparent_rule(rule.source, rule.grad_fn, upstreams, *variables)
        refuse_assigned(rule.watched, by_jaxpr.source)
        rule = rule._replace(grad_fn=by_jaxpr)
        found = reach(rule.parts)
    skeleton, residuals = hoist_tracers(rule.parts, found, rule.watched)
    return rule.run(skeleton.copies), residuals


def kept(rule: UserRule) -> tuple[Run, list[Leaf]]:
    """Return the rule around its parts as they are."""
    parts = rule.parts
    copies = {id(w.value) for w in rule.watched}
    found = reach(parts, lambda _: False, ends=copies, lenient=True)
    snapshot = Snapshot(found)
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
        consts: Held, cotangents: Values, _: Variables | None, values: Values
    ) -> list[Gradient]:
        if len(values) not in (0, count):
            raise errors.fixed_variables(source)
        every = run(consts, cotangents)
        return every[: len(every) - count + len(values)]

    return grad_fn._replace(gradients=gradients, held=consts)
