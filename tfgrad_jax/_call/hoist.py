"""Turn a call into a function of values: of the tracers that it captured, and of its inputs.

A call captures the tracers that it uses besides its inputs: in a variable that `f` closes over, in
`self`, in a container. `hoist` finds them, and takes them out of the call. Here, and only here, is
decided whether the call is traced:

    what it captured                             `f` runs               and sees
    nothing                                      as it is               values
    what is declared, or has no gradient         on copies              values
    what has the ordinary gradient               on copies              values; under `jit`: traced
    anything else                                on copies, followed    values, but of these
    what is not copied; very much                traced, at the call    what `jit` shows

Undeclared variables are those that `y` uses, in the order of their first use: to follow them shows
that, or to trace `f`. On copies, `f` runs one level down, in `Program.forward`, where the inputs
have values, unless JAX records what runs there.
"""

import dataclasses
import functools
from typing import TypeAlias

from tfgrad_jax._closure.reach import Reached, reach
from tfgrad_jax._closure.referents import REFERENTS
from tfgrad_jax._closure.skeleton import hoist_tracers
from tfgrad_jax._frontend.grad_fn import Call, Held, HeldByTrace
from tfgrad_jax._jax.reasons import Why
from tfgrad_jax._jax.trace import is_staging
from tfgrad_jax._jax.types import NEEDS_VALUES, Leaf
from tfgrad_jax._messages import errors

from .program import Program
from .rule import names_of
from .transparent import traced_call

Hoisted: TypeAlias = tuple[Program, list[Leaf]]  # and the values that the call captured

# Each walk of a call begins here: as for tuples, no look at the class, which holds nothing.
REFERENTS |= dict.fromkeys((Held, HeldByTrace), REFERENTS[tuple])


def hoist(call: Call) -> Hoisted:
    """Copy a call, or trace it: a copy of it, or around an obstacle the call itself."""
    records, found = is_staging(), _reached(call)
    hoisted = _, values = _copied(call, reach(call.declared[1]) if found.obstacle else found)
    # Under `jit`, a trace costs little, and shows which few weights of a model a layer reads. Of
    # the others, `jax.vjp` would make zeros in each layer.
    is_pruned = records and call.autodiff and bool(values)
    if not (found.obstacle or is_pruned):
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
    """Return the same call, which evaluates a jaxpr; as it is, if that cannot return its rule.

    A note says `why` it is traced, if it needs a value.
    """
    program, values = hoisted
    traced = traced_call(call, program.held, values, why)
    if traced.call is None:
        return hoisted
    program, values = _copied(traced.call, _reached(traced.call))
    # What the user holds is gone later, and a long search for names is for errors alone.
    is_listed = traced.accepts_variables and program.declared.variables is None
    names = names_of(call.held, {} if is_listed else {i: values[i] for i in program.undeclared})
    facts = {"written": names, "reads_hidden": traced.reads_hidden}
    return dataclasses.replace(program, **facts), values


def _reached(call: Call) -> Reached:
    """Return what a call holds besides its operands, and its declared variables."""
    return reach([call.held, *call.declared[1]])


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
