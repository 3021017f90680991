"""Turn a call into a function of values: of the tracers that it captured, and of its inputs.

A call captures the tracers that it uses besides its inputs: in a variable that `f` closes over, in
`self`, in a container. `hoist` finds them, and takes them out of the call. Here, and only here, is
decided whether the call is traced:

    what it captured                             `f` runs               and sees
    nothing                                      as it is               values
    what is declared, or has no gradient         on copies              values
    what has the ordinary gradient               on copies              values; under `jit`: traced
    anything else                                on copies, traced      values, but of these
    anything else, under `jit`                   traced, at the call    what `jit` shows
    what is not copied; very much                traced, at the call    what `jit` shows

A trace shows what `y` uses, in which order. So only what is traced has undeclared variables. That
on copies is one level down, in `Program.forward`, where the inputs have values.
"""

from tfgrad_jax._closure.reach import BUDGET, BUDGET_STAGED, reach
from tfgrad_jax._frontend.grad_fn import Call
from tfgrad_jax._jax.trace import is_staging
from tfgrad_jax._jax.types import NEEDS_VALUES
from tfgrad_jax._messages import errors

from .capture import Capture, captured, is_settled, reached
from .transparent import by_trace


def hoist(call: Call) -> Capture:
    """Copy a call, or trace it: a copy of it, or around an obstacle the call itself."""
    records = is_staging()
    found = reached(call, BUDGET_STAGED if records else BUDGET)
    capture = captured(call, reach(call.declared[1]) if found.obstacle else found)
    declared = set(capture.declared)
    others = [v for i, v in enumerate(capture.values) if i not in declared]
    # Under `jit`, a trace costs little, and shows which few weights of a model a layer reads.
    is_pruned = bool(others) and call.autodiff and records
    is_known = not is_pruned and all(is_settled(v, call) for v in others)
    if not found.obstacle and (is_known or not records):
        return capture
    # Where JAX records operations, `f` would see no values in any case.
    why = "" if records else errors.obstructed(call.spec.source, found.obstacle)
    try:
        return by_trace(capture, why)
    except NEEDS_VALUES:
        if not (found.is_complete or found.captured):
            # So far no tracer was found among very much: `f` runs as it is, and may capture none.
            return capture
        raise
