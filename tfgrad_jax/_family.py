"""The other two of TensorFlow's family: `recompute_grad` and `grad_pass_through`.

Both return a function that does its work when it is called: `recompute_grad` hands the arrays
among the arguments to `jax.checkpoint`, `grad_pass_through` is a `custom_gradient` whose rule
returns its upstreams.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves

from . import _errors
from ._custom_gradient import CustomGradient, custom_gradient
from ._structure import is_operand, spec, split

_P = ParamSpec("_P")
_R = TypeVar("_R")


def recompute_grad(
    f: Callable[_P, _R], *, policy: Callable[..., bool] | None = None
) -> Callable[_P, _R]:
    """Recompute `f` in the backward pass instead of keeping its intermediate values.

    `tf.recompute_grad` for JAX: the value and every derivative are those of `f`, at every
    order and in both modes; memory between the passes is that of the arguments.

    Args:
        f: any function of pytrees. Arguments that are no arrays (strings, booleans, integers,
            callables, None) reach it unchanged; values that it closes over are differentiated.
            A method works too.
        policy: which intermediate values to keep all the same, as in `jax.checkpoint`.

    Returns:
        The function, with the signature of `f`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from tfgrad_jax import recompute_grad
        >>> @recompute_grad
        ... def block(x, activation="tanh"):
        ...     return getattr(jnp, activation)(x) * x
        >>> round(float(jax.grad(block)(1.0)), 4)
        1.1816
    """

    @functools.wraps(f)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        operands, layout = split((args, kwargs), ("args", "kwargs"))

        def of_operands(*operands: Any) -> Any:
            args, kwargs = layout.join(operands)
            return f(*args, **kwargs)

        return jax.checkpoint(of_operands, policy=policy)(*operands)

    return recomputed


def grad_pass_through(f: Callable[_P, _R]) -> CustomGradient[_P, _R]:
    """Give `f` the gradient of the identity.

    `tf.grad_pass_through` for JAX: each array among the inputs gets the gradient of the
    output in its place, cast to its dtype. What `f` closes over gets no gradient.

    Args:
        f: a function whose outputs match its inputs (the arrays among them) in number and
            shape.

    Returns:
        The function, with the signature of `f`.

    Raises:
        ValueError: at the call, if outputs and inputs do not match.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from tfgrad_jax import grad_pass_through
        >>> straight_through_round = grad_pass_through(jnp.round)
        >>> jax.value_and_grad(straight_through_round)(2.7)
        (Array(3., dtype=float32), Array(1., dtype=float32, weak_type=True))
    """

    @functools.wraps(f)
    def with_rule(*args: Any, **kwargs: Any) -> Any:
        y = f(*args, **kwargs)
        inputs = [spec(x) for x in tree_leaves(args) if is_operand(x)]
        outputs = [spec(leaf) for leaf in tree_leaves(y)]
        if [s.shape for s in inputs] != [s.shape for s in outputs]:
            raise _errors.pass_through_mismatch(f, inputs, outputs)

        def grad(*dys: Any, variables: Any) -> Any:
            gradients = []
            for dy, given, wanted in zip(dys, outputs, inputs, strict=True):
                if not (given.differentiable and wanted.differentiable):
                    gradients.append(None)
                elif jnp.iscomplexobj(dy) and not jnp.issubdtype(wanted.dtype, jnp.complexfloating):
                    gradients.append(jnp.real(dy))
                else:
                    gradients.append(dy.astype(wanted.dtype))
            return gradients, [None] * len(variables)

        return y, grad

    return custom_gradient(with_rule)
