"""What a call captured: its functions as a plan for copies, and the values that were in them."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from tfgrad_jax._closure.objects import Object
from tfgrad_jax._closure.reach import Reached
from tfgrad_jax._closure.skeleton import Skeleton, hoist_tracers
from tfgrad_jax._closure.traced import Uses
from tfgrad_jax._frontend.grad_fn import Call
from tfgrad_jax._jax.trace import is_staging
from tfgrad_jax._jax.types import Leaf
from tfgrad_jax._messages import errors

CapturedIndex: TypeAlias = int  # an `OperandIndex` of a captured value: these come first
Values: TypeAlias = Sequence[Leaf]  # arrays, tracers, or types in their places


class Capture(NamedTuple):
    """The functions of a call, without the values that they captured, and these values."""

    skeleton: Skeleton  # copies `call.apply`, `call.primal`, and then the declared variables
    values: list[Leaf]
    declared: list[CapturedIndex]  # the declared variables among them
    uses: Uses | None  # how `y` uses them, if a trace has shown it


def held(call: Call) -> list[Object]:
    """Return what a call holds beside its inputs."""
    _, declared = call.declared
    return [call.apply, call.primal, *declared]


def captured(call: Call, found: Reached) -> Capture:
    """Take out of a call what a walk from what it holds has found."""
    _, declared = call.declared
    # What is recorded may run again, when JAX differentiates it.
    skeleton, values = hoist_tracers(held(call), found, runs_now=not is_staging())
    place = {id(v): i for i, v in enumerate(values)}  # later, two may be the same object
    if not all(id(v) in place for v in declared):
        raise errors.leaked_variable(call.spec.source)
    return Capture(skeleton, values, [place[id(v)] for v in declared], None)
