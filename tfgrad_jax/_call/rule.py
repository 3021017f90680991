"""The rule of a call: from the `grad_fn` that `f` returned to what JAX carries and runs.

JAX wants a rule as arrays, its residuals, and a `Run`: a function of residuals, cotangents and the
positions of the operands that are wanted, which returns their gradients. `Listing.run` is such a
function, but of *parts*, which hold the residuals: `GradFn.gradients`, which runs the rule, and the
values of its variables. `hoisted` takes the tracers out of the parts. These are the residuals.

This module also decides where the gradient of each captured value comes from: see `Origin`.
"""

import contextlib
import enum
import functools
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple, TypeAlias

from tfgrad_jax._autodiff.rule import Run
from tfgrad_jax._closure.reach import OpaqueError, TooMuchError, Walk
from tfgrad_jax._closure.skeleton import Skeleton, dissect, frozen
from tfgrad_jax._closure.snapshot import Snapshot
from tfgrad_jax._closure.traced import traced
from tfgrad_jax._frontend.grad_fn import Call, GradFn, Gradients, Variables
from tfgrad_jax._jax.compat import is_ref
from tfgrad_jax._jax.types import Spec, is_differentiable
from tfgrad_jax._messages import errors
from tfgrad_jax._messages.source import Source

OperandIndex: TypeAlias = int  # among the captured values and then the inputs, as JAX has them
CapturedIndex: TypeAlias = int  # among the captured values: the first operands
Wanted: TypeAlias = Sequence[OperandIndex]  # those that are being differentiated
Values: TypeAlias = Sequence[Any]  # arrays, tracers, or types in their places
Leaf: TypeAlias = Any  # of `y`: an array
Leaves: TypeAlias = Sequence[Leaf]
Gradient: TypeAlias = Any  # an array, or None


class Origin(enum.Enum):
    """Where the gradient of a captured value comes from."""

    DECLARED = "the rule always returns it"
    UNDECLARED = "the rule returns it, where the value is being differentiated and `y` uses it"
    AUTODIFF = "the operations of `f`"
    CONSTANT = "it has none"
    MISSING = "an error, where the value is being differentiated and `y` uses it"


def origin(value: Any, call: Call, is_declared: bool, accepts_variables: bool) -> Origin:
    if is_declared:
        return Origin.DECLARED
    if not is_differentiable(value.dtype):
        return Origin.CONSTANT
    if call.autodiff and not is_ref(value):
        return Origin.AUTODIFF
    if call.variables is None and accepts_variables and not is_ref(value):
        return Origin.UNDECLARED
    return Origin.CONSTANT if call.contract.in_rule else Origin.MISSING


class Listing(NamedTuple):
    """Which captured values a rule gives gradients for. It holds no values: JAX keeps it."""

    source: Source  # of `f`
    captured: int  # how many of the operands are captured values
    gives: list[CapturedIndex]  # all that the rule may list, in this order
    declared: Variables | None
    # The types in the forward pass of undeclared variables, of which the rule lists those that are
    # being differentiated; None if it always lists the declared ones.
    specs: Sequence[Spec] | None
    missing: Container[CapturedIndex]  # those that have no gradient
    refuse: Callable[[Sequence[CapturedIndex]], None]  # raises if `y` uses one of these

    def listed(self, wanted: Wanted) -> list[CapturedIndex]:
        """Return the variables that the rule lists where these operands are differentiated."""
        if missing := [i for i in wanted if i in self.missing]:
            self.refuse(missing)
        return self.gives if self.specs is None else [i for i in self.gives if i in wanted]

    def variables(self, values: Values, wanted: Wanted) -> tuple[Variables | None, Values]:
        """Return these variables as the rule gets them; `values` are those of all."""
        if self.specs is None:
            return self.declared, values
        listed = self.listed(wanted)
        places = [k for k, i in enumerate(self.gives) if i in listed]
        values = [values[k] for k in places]
        return Variables.listed(values, [self.specs[k] for k in places]) if listed else None, values

    def run(self, parts: Values, cotangents: Values, wanted: Wanted) -> list[Gradient]:
        """Run a rule; `parts` are `GradFn.gradients` and the values of what it may list."""
        gradients, *values = parts
        listed = self.listed(wanted)
        returned = gradients(cotangents, *self.variables(values, wanted))
        inputs = range(self.captured, self.captured + len(returned) - len(listed))
        found: dict[OperandIndex, Gradient] = {}
        for i, g in zip([*inputs, *listed], returned, strict=True):
            known = found.get(i)  # a value may be declared twice
            found[i] = g if known is None else known if g is None else known + g
        return [found.get(i) for i in wanted]


def hoisted(
    listing: Listing, grad_fn: GradFn, values: Values, upstreams: Sequence[Any], wanted: Wanted
) -> tuple[Run, list[Any]]:
    """Return a rule as a function of residuals, and the residuals: the tracers in its parts.

    It is copied around them; if it cannot be copied, it is traced first. Raises an error of
    `NeedsValuesError` if a rule that is traced needs values.
    """
    parts = [grad_fn.gradients, *values]
    with contextlib.suppress(OpaqueError, TooMuchError):
        walk = Walk(parts, patient=listing.specs is not None)  # if traced, it cannot choose
        return _around(listing, *dissect(parts, walk))
    variables = listing.variables(values, wanted)
    gradients = transparent_rule(listing.source, grad_fn, upstreams, *variables)
    return _around(listing, *dissect([gradients, *values]))


def kept(
    listing: Listing, grad_fn: GradFn, values: Values, snapshot: Snapshot
) -> tuple[Run, list[Any]]:
    """Return the rule around its parts as they are, and a snapshot of the variables of `f`."""
    parts = [grad_fn.gradients, *values]
    if snapshot.live:  # `f` may have assigned to what its rule reads
        with contextlib.suppress(TooMuchError):
            snapshot = dissect(parts, Walk(parts, takes=lambda _: False))[0].snapshot

    def run(residuals: Values, cotangents: Values, wanted: Wanted) -> list[Gradient]:
        return listing.run(frozen(parts, snapshot.changed()), cotangents, wanted)

    return run, []


def _around(listing: Listing, skeleton: Skeleton, residuals: list[Any]) -> tuple[Run, list[Any]]:
    def run(residuals: Values, cotangents: Values, wanted: Wanted) -> list[Gradient]:
        return listing.run(skeleton.copies(residuals), cotangents, wanted)

    return run, residuals


def transparent_rule(
    source: Source,
    grad_fn: GradFn,
    upstreams: Sequence[Any],  # their types
    variables: Variables | None,
    values: Values,
) -> Gradients:
    """Return the same as `grad_fn.gradients`, which evaluates a jaxpr around a list of tracers.

    The rule runs once, now, with these variables, and gives gradients for all of them or for none.
    """
    run, consts, *_ = traced(
        lambda *cotangents: (grad_fn.gradients(cotangents, variables, values), None),
        *upstreams,
        source=grad_fn.source,
    )
    count = len(values)

    def gradients(consts: Values, cotangents: Values, _: Any, values: Values) -> list[Gradient]:
        if len(values) not in (0, count):
            raise errors.fixed_variables(source)
        found = run(consts, cotangents)
        return found[: len(found) - count + len(values)]

    return functools.partial(gradients, consts)
