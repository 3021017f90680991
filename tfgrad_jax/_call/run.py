"""Run a call under JAX's transformations. Nothing that the user holds is copied.

JAX differentiates the call here     `direct`: `f` runs as it is, one level down
it records or maps it                a program, which JAX differentiates later
"""

from typing import Any

from jax.core import Tracer
from jax.tree_util import tree_unflatten

from .._autodiff.custom import differentiated
from .._closure.walk import survey
from .._frontend.grad_fn import Call
from .._jax.compat import is_ref, parent_of
from .._jax.shown import is_live
from .._jax.trace import differentiates, has_values, innermost, is_of
from .._jax.types import PyTree
from .._jax.watch import Watch
from .._messages import errors
from .direct import direct
from .program import is_late, late, traced_call


def run(call: Call, name: str) -> PyTree:
    """Return `y`, under a transformation."""
    of = innermost()
    if not all(map(is_live, call.declared[1])):
        raise errors.leaked(call.spec.source)
    if _is_direct(call, of):
        return direct(call, name, of)
    program, y, operands = late(call) if is_late(call) else traced_call(call)
    leaves = differentiated(program, name, operands) if operands else program.value([])
    return tree_unflatten(y.treedef, leaves)


def _is_direct(call: Call, of: Any) -> bool:
    """Return whether JAX differentiates the call in its innermost transformation, `of`."""
    if not differentiates(of) or any(map(is_ref, call.operands)):
        return False
    if call.autodiff and not has_values(parent_of(of)):
        return False  # at the next order, `y` has the rule where its own operations are recorded
    if call.held.primal is None:
        return True
    # A primal runs where nothing is differentiated.
    watch = Watch.now()

    def is_its(v: object) -> bool:
        if watch is not None and isinstance(v, Tracer):
            v = watch.lower(v)  # it shows what may be a tracer of an outer derivative
        return isinstance(v, Tracer) and is_of(v, of)

    return survey((call.operands, call.variables, call.held), is_its).leads
