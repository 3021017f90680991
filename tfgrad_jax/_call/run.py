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

from jax.errors import UnexpectedTracerError
from jax.tree_util import tree_leaves, tree_unflatten

from tfgrad_jax._autodiff.custom import differentiated
from tfgrad_jax._frontend.grad_fn import Call
from tfgrad_jax._jax.reasons import because
from tfgrad_jax._jax.types import PyTree, is_traced
from tfgrad_jax._messages import errors
from tfgrad_jax._messages.tracebacks import frames_of_jax, is_own, note

from .capture import Capture
from .hoist import hoist
from .program import Program
from .transparent import by_trace


def run(call: Call, name: str) -> PyTree:
    """Return `y`, under a transformation."""
    capture = hoist(call)
    if not (capture.values or call.operands):
        y = call.value()  # not that of `capture.call`: a traced call holds other things
        if not is_traced(tree_leaves(y)):
            return y
        capture = _traced_again(capture)  # a `jit` makes tracers of constants, too
        return _value(capture, name) if capture.values else y
    try:
        return _value(capture, name)
    except UnexpectedTracerError as error:
        if not (is_own(error) or frames_of_jax(error)):
            raise  # by the user's code
        # Maybe the function reads a tracer from a place that no walk reaches, such as a global
        # variable. JAX has refused the tracer, whose linearize trace is no longer valid in the
        # forward pass, or we have met it (`errors.hidden_tracer`). A trace shows it among its
        # constants. If there is none, the error is of the user's code.
        again = _traced_again(capture)
        if not again.reads_hidden:
            raise
    return _value(again, name)


def _traced_again(capture: Capture) -> Capture:
    """Run `f` a second time, in a trace: what it makes once, it made in the first."""
    why = errors.ran_again(capture.call.spec.source)
    try:
        return by_trace(capture, why)
    except Exception as error:
        note(error, why)
        raise


def _value(capture: Capture, name: str) -> PyTree:
    """Return `y`, whose derivative is the declared one."""
    program = Program.of(capture)
    with because(None):
        leaves = differentiated(program, name, [*capture.values, *capture.call.operands])
    return tree_unflatten(program.y.treedef, leaves)
