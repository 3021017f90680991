"""What a call captured: a plan for copies of what it holds, and the values that were in it."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from tfgrad_jax._closure.reach import BUDGET, Reached, reach
from tfgrad_jax._closure.skeleton import Skeleton, hoist_tracers
from tfgrad_jax._closure.traced import Uses
from tfgrad_jax._frontend.grad_fn import Call
from tfgrad_jax._jax.compat import is_ref
from tfgrad_jax._jax.trace import is_staging
from tfgrad_jax._jax.types import Leaf, is_differentiable
from tfgrad_jax._messages import errors

CapturedIndex: TypeAlias = int  # an `OperandIndex` of a captured value: these come first
Values: TypeAlias = Sequence[Leaf]  # arrays, tracers, or types in their places


class Capture(NamedTuple):
    """A call without the values that it captured, and these values."""

    call: Call
    skeleton: Skeleton  # copies `call.held`
    values: list[Leaf]
    declared: list[CapturedIndex]  # the declared variables among them
    # Of a call that was traced, because its rule may have to list values, or to refuse them:
    uses: Uses | None = None  # how `y` uses them
    accepts_variables: bool = False  # whether the rule does
    reads_hidden: bool = False  # whether `f` reads a tracer that was not captured before


def is_settled(value: Leaf, call: Call) -> bool:
    """Return whether an undeclared value gets its gradient from the operations of `f`, or has none.

    That of any other depends on whether `y` uses it, and on the rule.
    """
    return not is_differentiable(value.dtype) or (call.autodiff and not is_ref(value))


def reached(call: Call, budget: int = BUDGET) -> Reached:
    """Return what a call holds besides its operands, and its declared variables."""
    _, declared = call.declared
    return reach([*call.held, *declared], budget=budget)


def captured(call: Call, found: Reached) -> Capture:
    """Take out of a call what a walk from what it holds has found."""
    _, declared = call.declared
    # What is recorded may run again, when JAX differentiates it.
    now = not is_staging()
    skeleton, values = hoist_tracers(call.held, found, also=declared, runs_now=now)
    place = {id(v): i for i, v in enumerate(values)}  # later, two may be the same object
    if not all(id(v) in place for v in declared):
        raise errors.leaked_variable(call.spec.source)
    return Capture(call, skeleton, values, [place[id(v)] for v in declared])
