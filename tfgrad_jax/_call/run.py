"""Run a call under JAX's transformations.

    hoist.py        the call becomes a function of the tracers that it captured, and of its inputs
    transparent.py  `f` runs: a copy of it, or in a trace, which makes a call copyable
    rule.py         its rule becomes a function of the tracers that it holds, its residuals
    program.py      both together, as `_autodiff` differentiates them
    ordinary.py     `variables="autodiff"`: a `jax.vjp` around the program

Only this folder imports all three groups. `_closure` finds tracers, and copies the objects that
hold them with other values in their places. `_autodiff` makes JAX run the function and its rule.
`_frontend` calls `f` and its rule as the user wrote them.
"""

import functools

from jax.errors import UnexpectedTracerError
from jax.tree_util import tree_leaves, tree_unflatten

from tfgrad_jax._autodiff.custom import differentiated
from tfgrad_jax._frontend.grad_fn import Call
from tfgrad_jax._jax.reasons import noting
from tfgrad_jax._jax.types import PyTree, is_traced
from tfgrad_jax._messages import errors
from tfgrad_jax._messages.tracebacks import frames_of_jax, is_own, note

from .hoist import Hoisted, by_trace, hoist


def run(call: Call, name: str) -> PyTree:
    """Return `y`, under a transformation."""
    hoisted = hoist(call)
    _, values = hoisted
    if not (values or call.operands):
        y = call.value()
        if not is_traced(tree_leaves(y)):
            return y
        hoisted = _, values = _traced_again(call, hoisted)  # a `jit` makes tracers of constants
        return _value(call, hoisted, name) if values else y
    try:
        return _value(call, hoisted, name)
    except UnexpectedTracerError as error:
        if not (is_own(error) or frames_of_jax(error)):
            raise  # by the user's code
        # Maybe the function reads a tracer from a place that no walk reaches, such as a global
        # variable. JAX has refused the tracer, whose linearize trace is no longer valid in the
        # forward pass, or we have met it (`errors.hidden_tracer`). A trace shows it among its
        # constants. If there is none, the error is of the user's code.
        again = program, _ = _traced_again(call, hoisted)
        if not program.reads_hidden:
            raise
    return _value(call, again, name)


def _traced_again(call: Call, hoisted: Hoisted) -> Hoisted:
    """Run `f` a second time, in a trace: what it makes once, it made in the first."""
    why = functools.partial(errors.ran_again, call.spec.source)
    try:
        return by_trace(call, hoisted, why)
    except Exception as error:
        note(error, why())
        raise


def _value(call: Call, hoisted: Hoisted, name: str) -> PyTree:
    """Return `y`, whose derivative is the declared one."""
    program, values = hoisted
    with noting(is_ours=False):
        leaves = differentiated(program, name, [*values, *call.operands])
    return tree_unflatten(program.y.treedef, leaves)
