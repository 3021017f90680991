"""What `explain` finds out about a call, while JAX traces it or eagerly."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves

from tfgrad_jax._autodiff.linearity import NotLinearError, check
from tfgrad_jax._autodiff.transpose import transposed
from tfgrad_jax._jax.compat import cotangent_type, tangent_dtype
from tfgrad_jax._jax.jaxpr import reads
from tfgrad_jax._jax.types import NEEDS_VALUES, AnyFunction, Aval, Leaf, PyTree, spec
from tfgrad_jax._messages.source import Source

from .call import ArrayIndex, Call, last_run

# A trace returns arrays alone. So the facts are the static part of the pytree that it returns, and
# nothing is written from inside of it. The same record then holds the variables of the jaxpr: what
# is kept is compared with inputs and outputs by identity, and no array need exist.
_ARRAYS = ["kept", "outputs", "held", "plain"]
_FACTS = ["held_names", "differentiated", "gradients", "forward_mode", "obstacle", "y_types"]


@functools.partial(jax.tree_util.register_dataclass, data_fields=_ARRAYS, meta_fields=_FACTS)
@dataclasses.dataclass(frozen=True)
class Look:
    """What is found out about a call: arrays, or the variables of a jaxpr in their place."""

    kept: Sequence[Leaf]
    outputs: Mapping[str, Leaf]
    held: Sequence[Leaf]  # what the rule holds
    plain: Sequence[Leaf] | None  # what plain autodiff keeps
    held_names: tuple[str, ...]
    differentiated: tuple[ArrayIndex, ...]
    gradients: tuple[str, ...]  # of the arrays of the call
    forward_mode: bool | None
    obstacle: str
    y_types: tuple[Aval, ...]


def look_at(call: Call, is_eager: bool, *arrays: Leaf) -> Look:
    possible = [i for i, v in enumerate(arrays) if spec(v).differentiable]
    refused: list[ArrayIndex] = []
    if call.is_refused(possible, arrays):
        refused = [i for i in possible if call.is_refused([i], arrays)]
    positions = [i for i in possible if i not in refused]
    ys, pull, kept, outputs = call.vjp(positions, arrays)
    rule = _look_at_rule(ys, pull, [arrays[i] for i in positions], is_eager)
    held = last_run().held
    arrays_held = [v for _, v in held]
    # Eagerly, the rule keeps what JAX is not tracing. Staged, it reads what no operand stands for,
    # such as a global array.
    read = [a.value for a in call.held.constants if id(a.value) in rule.reads]
    ignored = {positions[k] for k in rule.ignored}

    def gradient(i: ArrayIndex) -> str:
        if i not in possible:
            return f"none: {spec(arrays[i]).dtype} has no derivative"
        if i in refused:
            return "none: an error where it is differentiated"
        return rule.zero if i in ignored else call.kind(i)

    return Look(
        kept=[*kept, *(arrays_held if is_eager else read)],
        outputs=outputs,
        held=arrays_held,
        plain=_kept_by_autodiff(call, positions, arrays),
        held_names=tuple(name for name, _ in held),
        differentiated=tuple(positions),
        gradients=tuple(map(gradient, range(len(arrays)))),
        forward_mode=rule.forward_mode,
        obstacle=rule.obstacle,
        y_types=tuple(map(jax.typeof, ys)),
    )


def _kept_by_autodiff(
    call: Call, positions: Sequence[ArrayIndex], arrays: Sequence[Leaf]
) -> Sequence[Leaf] | None:
    with contextlib.suppress(Exception):  # of any type: that of what has no derivative
        plain = call.vjp(positions, arrays, plain=True)
        jax.eval_shape(plain.pull, plain.ys)  # a loop says only now that it has none
        return plain.kept
    return None


class _Rule(NamedTuple):
    """What is found out about a rule."""

    forward_mode: bool | None
    obstacle: str
    zero: str  # the gradient of an array that no upstream reaches
    ignored: Sequence[int]  # positions of these arrays
    reads: set[int]  # ids of the constant arrays that it reads


def _look_at_rule(
    ys: Sequence[Leaf],
    pull: Callable[[Sequence[Leaf]], PyTree],
    arrays: Sequence[Leaf],
    is_eager: bool,
) -> _Rule:
    tangents = [jnp.zeros_like(v, tangent_dtype(v.dtype)) for v in arrays]
    forward_mode, obstacle, zero, every = True, "", "zero", []
    types = [cotangent_type(y) for y in ys]
    try:
        every = [] if is_eager else reads(jax.make_jaxpr(pull)(ys))  # it may need values
        transposed(lambda cotangents: tree_leaves(pull(cotangents)), types, tangents)
    except NotLinearError as error:
        grad_fn = last_run().grad_fn
        line = _line_of(error, grad_fn, types) if grad_fn else ""
        place = f" ({Path(line).name})" if line else ""
        forward_mode, obstacle, zero = False, f"{error}{place}", "zero or constant"
    except NEEDS_VALUES:
        raise
    except Exception as error:  # of any type: that of the rule
        text = f"the rule raised {type(error).__name__}: {error}".partition("\n")[0]
        return _Rule(None, text, zero, [], set())
    ignored = [i for i, (upstreams, _) in enumerate(every) if not upstreams]
    read = {id(array) for _, arrays in every for array in arrays}
    return _Rule(forward_mode, obstacle, zero, ignored, read)


def _line_of(error: NotLinearError, grad_fn: AnyFunction, types: Sequence[Aval]) -> str:
    """Return the line of the operation that is not linear, or else the first one of the rule.

    What JAX evaluates from a jaxpr has the frames of the call. So trace the rule itself.
    """
    eqn = error.eqn
    with contextlib.suppress(Exception):  # it may take `variables`, or raise as before
        try:
            check(jax.make_jaxpr(lambda *upstreams: grad_fn(*upstreams))(*types))
        except NotLinearError as own:
            eqn = own.eqn
    return Source.of(grad_fn).first_use(eqn)
