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

import functools
from typing import TypeAlias

from tfgrad_jax._closure.reach import BUDGET, BUDGET_STAGED, Reached, reach
from tfgrad_jax._closure.skeleton import hoist_tracers
from tfgrad_jax._frontend.grad_fn import Call
from tfgrad_jax._jax.reasons import Why
from tfgrad_jax._jax.trace import is_staging
from tfgrad_jax._jax.types import NEEDS_VALUES, Leaf
from tfgrad_jax._messages import errors

from .program import Program
from .rule import names_of
from .transparent import traced_call

Hoisted: TypeAlias = tuple[Program, list[Leaf]]  # and the values that the call captured


def hoist(call: Call) -> Hoisted:
    """Copy a call, or trace it: a copy of it, or around an obstacle the call itself."""
    records = is_staging()
    found = _reached(call, BUDGET_STAGED if records else BUDGET)
    hoisted = program, values = _copied(call, reach(call.declared[1]) if found.obstacle else found)
    # Under `jit`, a trace costs little, and shows which few weights of a model a layer reads.
    is_pruned = records and call.autodiff and bool(values)
    is_known = not (program.undeclared or is_pruned)
    if not found.obstacle and (is_known or not records):
        return hoisted
    # Where JAX records operations, `f` would see no values in any case.
    why = functools.partial(errors.obstructed, call.spec.source, found.obstacle)
    try:
        return by_trace(call, hoisted, None if records else why)
    except NEEDS_VALUES:
        if not (found.is_complete or found.captured):
            # So far no tracer was found among very much: `f` runs as it is, and may capture none.
            return hoisted
        raise


def by_trace(call: Call, hoisted: Hoisted, why: Why) -> Hoisted:
    """Return the same call, which evaluates a jaxpr.

    If its rule cannot be returned from a trace, the call stays as it is, and only its uses are
    known. A note says `why` it is traced, if it needs a value.
    """
    program, values = hoisted
    shown = traced_call(call, program.held, values, why)
    if shown.call is not None:
        program, values = _copied(shown.call, _reached(shown.call))
    place = {id(v): i for i, v in enumerate(values)}
    uses = {place[key]: at for key, at in shown.uses.items() if key in place}
    read = {place[key] for key in shown.read if key in place and place[key] not in uses}
    # Names are for an error or a warning, of what the rule does not list.
    is_listed = shown.accepts_variables and program.chooses and not read
    some = {i: values[i] for i in (*uses, *read) if i in program.undeclared and not is_listed}
    names = names_of(call.held, some) if some else {}
    facts = shown.accepts_variables, shown.reads_hidden
    return program.with_uses(uses, read, names, *facts), values


def _reached(call: Call, budget: int = BUDGET) -> Reached:
    """Return what a call holds besides its operands, and its declared variables."""
    return reach([call.held, *call.declared[1]], budget=budget)


def _copied(call: Call, found: Reached) -> Hoisted:
    """Take out of a call what a walk from what it holds has found."""
    _, declared = call.declared
    # What is recorded may run again, when JAX differentiates it.
    now = not is_staging()
    skeleton, values = hoist_tracers([call.held], found, also=declared, runs_now=now)
    place = {id(v): i for i, v in enumerate(values)}  # later, two may be the same object
    if not all(id(v) in place for v in declared):
        raise errors.leaked_variable(call.spec.source)
    return Program.of(call, skeleton, values, [place[id(v)] for v in declared]), values
