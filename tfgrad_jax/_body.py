"""Run `f` as a function of its captured values and its inputs: always as a copy that holds these.

`Program` calls `value` where JAX does not differentiate, and `made` where it does: that returns the
rule, too. `uses` shows which captured values `y` depends on, by a trace of `f`. Where JAX records
operations anyway, `made_by_one_trace` does both at once.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import tree_flatten

from . import _errors
from ._autodiff.custom import HiddenTracerError
from ._closure.reach import OpaqueError, TooMuchError, Walk
from ._closure.skeleton import Cells, Skeleton, dissect
from ._closure.traced import dependence_on, first_uses
from ._compat import INLINE, is_ref
from ._frontend.grad_fn import Contract, Surroundings
from ._frontend.structure import Outputs
from ._trace import is_recorded, plainly
from ._types import is_traced


class Made(NamedTuple):
    """What `f` has made: its value, and its rule."""

    leaves: list[Any]
    outputs: Outputs
    grad_fn: Callable[..., Any]
    cells: Cells  # the user's variables, as `converted` needs them
    unused: Container[int]  # tracers that `f` does not use, by id


class Body:
    """`f` as a function of operands: its captured values, then its inputs. It holds none."""

    def __init__(
        self,
        contract: Contract,
        skeleton: Skeleton,  # copies the surroundings
        count: int,  # of the captured values
        has_primal: bool,
    ) -> None:
        self._contract, self._skeleton = contract, skeleton
        self._count, self._has_primal = count, has_primal
        self.treedef: Any = None  # the structure of `y`, once `f` has run
        self._types: Any = None  # the types of its leaves
        self.known_uses: dict[int, Any] | None = None  # once a trace has shown them

    def names(self) -> list[str]:
        """Return the names of the operands, for JAX's own errors."""
        inputs = self._contract.inputs
        paths = inputs.leaf_paths()
        closed_over = [f"closed over {i}" for i in range(self._count)]
        return [*closed_over, *(paths[i] for i in inputs.operands)]

    def value(self, operands: Sequence[Any]) -> list[Any]:
        """Return the leaves of `y`, in a call that JAX does not differentiate."""
        copies = self._skeleton.copies(operands[: self._count])
        surroundings, inputs = Surroundings(*copies.values[:5]), operands[self._count :]
        with plainly():
            if self._has_primal:
                leaves, treedef = tree_flatten(self._contract.value(surroundings, inputs))
                leaves = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves]
            else:
                leaves, outputs, _ = self._contract.apply(surroundings, inputs)
                treedef = outputs.treedef
        copies.assign()
        self._set_type(treedef, leaves)
        return leaves

    def made(self, operands: Sequence[Any], needs_uses: bool) -> Made:
        """Return the value and the rule, in a call that JAX differentiates."""
        made = None
        if needs_uses and self.known_uses is None and self._may_run_in_a_trace(operands):
            made = self._made_by_one_trace(operands)
        made = made or self._made(operands)
        self._set_type(made.outputs.treedef, made.leaves)
        return made

    def _made(self, operands: Sequence[Any]) -> Made:
        copies = self._skeleton.copies(operands[: self._count])
        surroundings = Surroundings(*copies.values[:5])
        leaves, outputs, grad_fn = self._contract.apply(surroundings, operands[self._count :])
        copies.assign()
        return Made(leaves, outputs, grad_fn, copies.cells(), copies.unused)

    def _may_run_in_a_trace(self, operands: Sequence[Any]) -> bool:
        """Return whether `f` sees the same, and JAX copies what it does, in a trace of its own."""
        if self._contract.is_watched or any(map(is_ref, operands)):  # a `jit` returns no Ref
            return False
        return is_recorded(operands)

    def _made_by_one_trace(self, operands: Sequence[Any]) -> Made | None:
        """Run `f` in a trace that also shows how `y` uses captured values.

        JAX records the operations on the operands anyway. So `f` runs once, in a trace of its own,
        and JAX copies the operations from there. Return None if the rule cannot be copied.
        """
        known: list[Any] = []

        def run(*operands: Any) -> Any:
            leaves, outputs, grad_fn, cells, unused = self._made(operands)
            skeleton, residuals = dissect([grad_fn], Walk([grad_fn], unused=unused), cells)
            known[:] = outputs, skeleton, unused
            return leaves, residuals

        f = jax.jit(self._contract.source.named(run, self.names()), inline=INLINE)
        try:
            closed = f.trace(*operands).jaxpr
        except (OpaqueError, TooMuchError):
            return None
        if len(closed.jaxpr.invars) > len(operands):  # JAX makes operands of captured tracers
            raise HiddenTracerError
        outputs, skeleton, unused = known
        first = len(closed.consts)
        uses = first_uses(closed, outputs.count).items()
        self.known_uses = _places({i - first: e for i, e in uses if 0 <= i - first < self._count})
        leaves, residuals = f(*operands)
        # Some versions of JAX return a new tracer for an operand; a rule may compare by `is`.
        place = {id(v): i for i, v in enumerate(closed.jaxpr.invars)}
        results = [place.get(id(v)) for v in closed.jaxpr.outvars[outputs.count :]]
        residuals = [
            r if i is None else operands[i] for i, r in zip(results, residuals, strict=True)
        ]
        copies = skeleton.copies(residuals)
        return Made(leaves, outputs, copies.values[0], copies.cells(), unused)

    def _set_type(self, treedef: Any, leaves: Sequence[Any]) -> None:
        """Note the type of `y`, which must be the same of `primal` and of `f`."""
        types = [(leaf.shape, leaf.dtype) for leaf in leaves]
        known = self.treedef, self._types
        if self.treedef is not None and known != (treedef, types):
            raise _errors.primal_mismatch(self._contract.source, known, (treedef, types))
        self.treedef, self._types = treedef, types

    def look_for_tracers(self, operands: Sequence[Any]) -> None:
        """Raise if `f` holds a tracer that the walk did not see; a trace of `f` shows it.

        The results of `f` are tracers, and no operand is. A `jit` or a `vmap` around the call may
        also make tracers of constants.
        """
        captured, inputs = operands[: self._count], operands[self._count :]
        closed = jax.make_jaxpr(lambda: self._leaves(captured, inputs))()
        if is_traced(closed.consts):
            raise HiddenTracerError

    def _leaves(self, captured: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        surroundings = Surroundings(*self._skeleton(captured)[:5])
        with plainly():
            return self._contract.apply(surroundings, inputs)[0]

    def uses(self, operands: Sequence[Any]) -> dict[int, Any]:
        """Return the captured values that `y` depends on, in the order of first use, with its line.

        If that is not known, JAX traces `f` once to learn it, on values or on their types.
        """
        if self.known_uses is None:
            captured, inputs = operands[: self._count], operands[self._count :]
            self.known_uses = _places(dependence_on(self._leaves, captured, inputs))
        return self.known_uses

    def note_uses(self, captured: Sequence[Any], uses: Sequence[tuple[Any, Any]]) -> None:
        """Store how `y` uses captured values, which a trace has shown."""
        place = {id(c): i for i, c in enumerate(captured)}
        self.known_uses = _places({place[id(v)]: eqn for v, eqn in uses if id(v) in place})


def _places(uses: Mapping[int, Any]) -> dict[int, Any]:
    """Return where the equations come from. The equations may hold values; this does not."""
    return {i: getattr(eqn, "source_info", None) for i, eqn in uses.items()}
