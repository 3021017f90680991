"""What a call captured: a plan for copies of what it holds, and the values that were in it."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from tfgrad_jax._closure.path import path
from tfgrad_jax._closure.reach import BUDGET, Reached, reach
from tfgrad_jax._closure.skeleton import Skeleton, hoist_tracers
from tfgrad_jax._closure.traced import Uses
from tfgrad_jax._frontend.grad_fn import Call, Held
from tfgrad_jax._jax.compat import is_ref
from tfgrad_jax._jax.trace import is_staging
from tfgrad_jax._jax.types import Leaf, is_differentiable
from tfgrad_jax._messages import errors

CapturedIndex: TypeAlias = int  # an `OperandIndex` of a captured value: these come first
Values: TypeAlias = Sequence[Leaf]  # arrays, tracers, or types in their places


class Names(NamedTuple):
    """How the user writes captured values."""

    paths: Mapping[CapturedIndex, str]  # such as `self.w`; "" if it is not known
    in_instance: bool = False  # of a method, which holds all of them

    @classmethod
    def of(cls, held: Held, found: Reached, values: Mapping[CapturedIndex, Leaf]) -> "Names":
        """Name values that a walk from what a call holds has found."""
        f, primal, constants, keywords, *bound_to = held
        roots = {id(v): "" for v in (f, primal, constants, keywords)}
        roots |= {id(v): name for name, v in keywords.items()} | {id(v): "self" for v in bound_to}
        paths = {i: path(found, v, roots) for i, v in values.items()}
        return cls(paths, bool(bound_to) and all(p.startswith("self.") for p in paths.values()))


class Capture(NamedTuple):
    """A call without the values that it captured, and these values."""

    call: Call
    skeleton: Skeleton  # copies `call.held`
    values: list[Leaf]
    declared: list[CapturedIndex]  # the declared variables among them
    found: Reached  # what led to them
    # Of a call that was traced, because its rule may have to list values, or to refuse them:
    uses: Uses | None = None  # how `y` uses them
    accepts_variables: bool = False  # whether the rule does
    reads_hidden: bool = False  # whether `f` reads a tracer that was not captured before
    read: Collection[CapturedIndex] = ()  # those that only a rule reads that does
    names: Names | None = None  # of both


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
    return Capture(call, skeleton, values, [place[id(v)] for v in declared], found)
