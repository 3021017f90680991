"""Run a call under JAX's transformations.

    capture.py      what a call captured
    hoist.py        the call becomes a function of the tracers that it captured, and of its inputs
    transparent.py  a trace makes a call copyable, if it is not
    rule.py         its rule becomes a function of the tracers that it holds, its residuals
    program.py      both together, as `_autodiff` differentiates them
    ordinary.py     `variables="autodiff"`: a `jax.vjp` around the program

Only this folder imports all three groups. `_closure` finds tracers, and copies the objects that
hold them with other values in their places. `_autodiff` makes JAX run the function and its rule.
`_frontend` calls `f` and its rule as the user wrote them.
"""

import contextlib

from jax.errors import UnexpectedTracerError
from jax.tree_util import tree_leaves, tree_unflatten

from tfgrad_jax._autodiff.custom import differentiated
from tfgrad_jax._frontend.grad_fn import Call
from tfgrad_jax._jax.types import PyTree, is_traced
from tfgrad_jax._messages.runs import explain_run, note_another_run

from .capture import Capture
from .hoist import by_trace, hoist
from .program import Program


def run(call: Call, name: str) -> PyTree:
    """Return `y`, under a transformation."""
    with contextlib.suppress(UnexpectedTracerError):
        capture = hoist(call)
        y = _value(call, capture, name)
        if capture.values or call.operands or not is_traced(tree_leaves(y)):
            return y
    # The function reads a tracer from a place that no walk reaches, such as a global variable. A
    # trace shows it among its constants. JAX has refused the tracer, whose linearize trace is no
    # longer valid in the forward pass, or we have met it (`errors.hidden_tracer`).
    note_another_run(call.spec.source)
    try:
        return _value(call, by_trace(call), name)
    except Exception as error:
        explain_run(error, call.spec.source)
        raise


def _value(call: Call, capture: Capture, name: str) -> PyTree:
    """Return `y`, whose derivative is the declared one."""
    operands = [*capture.values, *call.operands]
    if not operands:
        return call.value()  # not that of `capture.call`: a traced call holds other things
    program = Program.of(capture)
    leaves = differentiated(program, name, operands)
    return tree_unflatten(program.y.treedef, leaves)
