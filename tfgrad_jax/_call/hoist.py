"""Turn a call into a function of values: of the tracers that it captured, and of its inputs.

A call captures the tracers that it uses besides its inputs: in a variable that `f` closes over, in
`self`, in a container. `hoist` finds them, and takes them out of a copy of the call. Here, and only
here, is decided whether the call is traced first:

    what the call holds                     JAX runs operations     JAX records them (`jit`, `scan`)
    up to `MANY` undeclared tracers         copied                  copied
    more than these                         copied                  traced, on a copy; copied,
                                                                    if its rule cannot be
    an obstacle: not copied, or too much    traced                  traced

(Also copied: a call with a `primal` or a Ref, and one of a function that is being traced already.)
"""

import contextlib

from tfgrad_jax._closure.reach import BUDGET, BUDGET_STAGED, Reached, reach
from tfgrad_jax._closure.traced import is_being_traced
from tfgrad_jax._frontend.grad_fn import Call
from tfgrad_jax._jax.compat import is_ref
from tfgrad_jax._jax.trace import is_staging
from tfgrad_jax._jax.types import NEEDS_VALUES
from tfgrad_jax._messages import errors

from .capture import Capture, captured, reached
from .transparent import HoldsRefError, RuleNotCopiedError, transparent

# A function that reaches more tracers than this mostly uses few of them. If each layer of a model
# captured every weight, the cost of the model would be quadratic in its size.
MANY = 8


def hoist(call: Call) -> Capture:
    """Copy a call; trace it first if it cannot be copied, or if that is cheaper."""
    found = reached(call, BUDGET_STAGED if is_staging() else BUDGET)
    if found.obstacle:
        return _around_obstacle(call, found)
    if _is_cheaper_by_trace(call, found):
        with contextlib.suppress(RuleNotCopiedError, HoldsRefError, *NEEDS_VALUES):
            return by_trace(call, found)
    return captured(call, found)


def _is_cheaper_by_trace(call: Call, found: Reached) -> bool:
    """Return whether a trace shows what `f` uses of what it reaches, for less than it saves.

    JAX records the operations in any case, and `f` sees tracers.
    """
    _, declared = call.declared
    others = found.captured.keys() - set(map(id, declared))
    if len(others) <= MANY or not is_staging():
        return False
    if call.primal is not None or any(map(is_ref, found.captured.values())):
        return False
    # A function that is being traced calls itself: each level would be a trace in a trace.
    return not is_being_traced(call.spec.source)


def by_trace(call: Call, found: Reached | None = None) -> Capture:
    """Trace a call, and copy what evaluates its jaxpr.

    A copy of it is traced around what was `found`; if nothing was, the call itself is traced.
    """
    capture = captured(call, found or _declared_alone(call))
    traced, used = transparent(call, capture, may_trace_rule=found is None)
    capture = captured(traced, reached(traced))
    place = {id(v): i for i, v in enumerate(capture.values)}
    return capture._replace(uses={place[id(v)]: at for v, at in used if id(v) in place})


def _declared_alone(call: Call) -> Reached:
    return reach(call.declared[1])


def _around_obstacle(call: Call, found: Reached) -> Capture:
    try:
        return by_trace(call)
    except NEEDS_VALUES as error:
        if not (found.is_complete or found.captured):
            # So far no tracer was found among very much: `f` runs as it is, and may capture none.
            return captured(call, _declared_alone(call))
        error.add_note(errors.traced_needs_values(call.spec.source, found.obstacle))
        raise
