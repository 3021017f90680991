"""Turn a call into a function of values: of the tracers that it captured, and of its inputs.

A call captures the tracers that it uses beside its inputs: in a variable that `f` closes over, in
`self`, in a container. `hoist` finds them, and takes them out of a copy of the call.
"""

import contextlib
from typing import Any, NamedTuple

from tfgrad_jax._closure.reach import INERT, OpaqueError, TooMuchError, Walk
from tfgrad_jax._closure.skeleton import Skeleton, dissect
from tfgrad_jax._closure.traced import is_being_traced
from tfgrad_jax._frontend.grad_fn import Call, Contract
from tfgrad_jax._frontend.structure import Outputs
from tfgrad_jax._jax.trace import is_staging
from tfgrad_jax._jax.types import NeedsValuesError
from tfgrad_jax._messages import errors
from tfgrad_jax._messages.source import Source

from .rule import CapturedIndex
from .transparent import HoldsRefError, transparent

# A function that reaches more tracers than this mostly uses few of them.
MANY = 8

INERT.update((Contract, Outputs, Source))  # they hold no values


class Capture(NamedTuple):
    """The functions of a call, without the values that they captured, and these values."""

    skeleton: Skeleton  # copies `call.apply`, `call.primal`, and then the declared variables
    values: list[Any]
    declared: list[CapturedIndex]  # the declared variables among them


def captured(call: Call, walk: Walk | None = None) -> Capture:
    """Take out of a call what a walk from it has found."""
    _, declared = call.declared
    skeleton, values = dissect([call.apply, call.primal, *declared], walk)
    place = {id(v): i for i, v in enumerate(values)}  # later, two may be the same object
    if not all(id(v) in place for v in declared):
        raise errors.leaked_variable(call.contract.source)
    return Capture(skeleton, values, [place[id(v)] for v in declared])


def hoist(call: Call) -> Capture:
    """Copy a call; trace it first if it cannot be copied, or reaches far more than it may use.

    The latter only where JAX records operations: there `f` sees tracers in any case.
    """
    _, declared = call.declared
    source, where, may_hold_none = call.contract.source, "", False
    try:
        walk = Walk([call.apply, call.primal, *declared], patient=False)
        many = is_staging() and len(walk.taken.keys() - set(map(id, declared))) > MANY
        if many and not is_being_traced(source):  # else it calls itself, and might end too deep
            with contextlib.suppress(HoldsRefError):
                return captured(transparent(call))
        return captured(call, walk)
    except OpaqueError as error:
        where = f"in an object that is not copied, of type `{error.kind.__qualname__}`"
    except TooMuchError:
        where, may_hold_none = "among too much to look through", not declared
    try:
        return captured(transparent(call))
    except NeedsValuesError as error:
        if may_hold_none:
            return captured(call, Walk(()))
        if where:
            error.add_note(errors.traced_needs_values(source, where))
        raise
