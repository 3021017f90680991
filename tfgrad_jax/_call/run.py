"""Run a call under JAX's transformations.

    hoist.py        the call becomes a function of the tracers that it captured, and of its inputs;
                    if it cannot be copied around other values, a trace makes it so
                    (transparent.py)
    rule.py         its rule becomes a function of the tracers that it holds, its residuals
    program.py      both together, as `_autodiff` differentiates them
    ordinary.py     the same, for `variables="autodiff"`

Only this folder imports all three groups. `_closure` finds tracers, and copies the objects that
hold them with other values in their places. `_autodiff` makes JAX run the function and its rule.
`_frontend` calls `f` and its rule as the user wrote them.
"""

import contextlib
from typing import Any

from jax.errors import UnexpectedTracerError
from jax.tree_util import tree_leaves, tree_unflatten

from tfgrad_jax._autodiff.custom import HiddenTracerError, differentiated
from tfgrad_jax._frontend.grad_fn import Call
from tfgrad_jax._jax.types import is_traced
from tfgrad_jax._messages import errors

from .hoist import Capture, captured, hoist
from .ordinary import Ordinary
from .program import Program
from .transparent import transparent


def run(call: Call, name: str) -> Any:
    """Return `y`, under a transformation."""
    with contextlib.suppress(HiddenTracerError, UnexpectedTracerError):
        capture = hoist(call)
        y = _value(call, capture, name)
        if capture.values or call.operands or not is_traced(tree_leaves(y)):
            return y
    # The function reads a tracer from a place that we do not search, such as a global variable. A
    # trace finds it.
    try:
        return _value(call, captured(transparent(call)), name)
    except HiddenTracerError:
        raise errors.hidden_tracer(call.contract.source) from None


def _value(call: Call, capture: Capture, name: str) -> Any:
    """Return `y`, whose derivative is the declared one."""
    operands = [*capture.values, *call.operands]
    if not operands:
        return call.value(())
    program = (Ordinary if call.autodiff and capture.values else Program)(call, capture)
    leaves = differentiated(program, name, operands)
    return tree_unflatten(program.treedef, leaves)
