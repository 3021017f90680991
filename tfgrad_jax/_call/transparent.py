"""Make a call copyable by a trace: for what cannot be copied, or reaches far more than it uses.

The functions of a transparent call evaluate a jaxpr. All the tracers that they hold are in lists,
so the call is then copied like any other.

A call may reach all the weights of a model, and use few of them. If each layer captured every
weight, the cost of a model would be quadratic in its size. The functions of a transparent call hold
only the tracers that `f` uses, and those that its rule reaches. A rule runs only when JAX
differentiates, so nothing shows which of these it uses: run for a look, it would use up a list that
`f` filled for it, raise, or write.
"""

import dataclasses
import functools
from typing import Any

from tfgrad_jax._closure.reach import OpaqueError, TooMuchError, Walk
from tfgrad_jax._closure.skeleton import dissect, frozen
from tfgrad_jax._closure.traced import Traced, traced
from tfgrad_jax._frontend.grad_fn import Call, GradFn, Variables
from tfgrad_jax._jax.compat import is_ref
from tfgrad_jax._jax.trace import is_own, plainly
from tfgrad_jax._jax.types import is_traced, spec

from .rule import Values, transparent_rule


class HoldsRefError(ValueError):
    """`f` makes a Ref for its rule, which a trace cannot return."""


def transparent(call: Call) -> Call:
    """Return the same call, whose functions evaluate jaxprs around lists of tracers.

    `f` runs once, now. The results of its jaxpr are the leaves of `y`, and what `f` computed for
    its rule. What else the rule holds, such as weights, is in a list.
    """
    source, inputs = call.contract.source, call.contract.inputs
    paths = inputs.leaf_paths()

    def arrays(*operands: Any) -> Any:
        leaves, outputs, grad_fn = call.apply(operands)
        gradients, *about = grad_fn  # the others hold no values
        chooses = call.chooses(grad_fn.accepts_variables)
        try:
            skeleton, held = dissect([gradients], Walk([gradients], patient=chooses))
        except (OpaqueError, TooMuchError):
            # To see what `y` uses, `f` runs again: this trace has not ended.
            variables = _undeclared(_value(call), outputs.count) if chooses else call.declared
            types = outputs.cotangents(leaves)
            skeleton, held = dissect([transparent_rule(source, grad_fn, types, *variables)])
        computed = {i: v for i, v in enumerate(held) if is_own(v)}
        if any(map(is_ref, computed.values())):
            raise HoldsRefError(f"JAX traces {source}, and its rule holds a Ref.")
        others = [None if i in computed else v for i, v in enumerate(held)]
        return (leaves, computed), (outputs, skeleton, others, about)

    names = [paths[i] for i in inputs.operands]
    f = traced(arrays, *call.operands, source=source, names=names)
    evaluate, (outputs, skeleton, others, (accepts, rule)) = f.run, f.aside

    def evaluated(consts: Values, others: Values, operands: Values) -> Any:
        leaves, computed = evaluate(consts, operands)
        copies = skeleton.copies([computed.get(i, v) for i, v in enumerate(others)])
        # The snapshot of the call does not know the variables of the rule.
        (gradients,) = frozen(copies, skeleton.snapshot.contents())
        return leaves, outputs, GradFn(gradients, accepts, rule)

    apply = functools.partial(evaluated, f.consts, others)
    primal = None
    if call.primal is not None:
        y = traced(lambda *operands: (call.primal(operands), None), *call.operands)
        primal = functools.partial(y.run, y.consts)
    return dataclasses.replace(call, apply=apply, primal=primal)


def _value(call: Call) -> Traced:
    """Trace the leaves of `y` alone."""

    def leaves(*operands: Any) -> Any:
        with plainly():
            return call.apply(operands)[0], None

    return traced(leaves, *call.operands)


def _undeclared(y: Traced, results: int) -> tuple[Variables | None, list[Any]]:
    """Return the differentiable tracers that these results use, as variables, and as a list."""
    used = [y.consts[i] for i in y.uses(results)]
    values = [v for v in used if is_traced([v]) and spec(v).differentiable]
    return Variables.listed(values, list(map(spec, values))) if values else None, values
