"""Whether forward mode works for a rule, which it transposes."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves

from tfgrad_jax._autodiff.linearity import NotLinearError, check
from tfgrad_jax._autodiff.transpose import transposed
from tfgrad_jax._jax.compat import cotangent_type, tangent_dtype
from tfgrad_jax._jax.types import NEEDS_VALUES, AnyFunction, Aval, Cotangents, Leaf, PyTree
from tfgrad_jax._messages.source import Source

from .call import UserCodeError, attempt


def forward_mode(
    pull: Callable[[Cotangents], PyTree],
    ys: Sequence[Leaf],
    xs: Sequence[Leaf],
    last_rule: Callable[[], AnyFunction | None],
) -> tuple[bool | None, str]:
    """Return whether forward mode works, and the operation that rules it out, with its line.

    None: the rule raises, and the text says what. An error of `NEEDS_VALUES` is raised as it is.
    `pull` maps cotangents of `ys` to gradients of `xs`. It runs a rule, the `last_rule` then.
    """
    types = [cotangent_type(y) for y in ys]
    tangents = [jnp.zeros_like(x, tangent_dtype(x.dtype)) for x in xs]
    try:
        attempt(transposed, lambda cotangents: tree_leaves(pull(cotangents)), types, tangents)
    except UserCodeError as failure:
        error, grad_fn = failure.error, last_rule()
        if isinstance(error, NEEDS_VALUES):
            raise error from None
        if not isinstance(error, NotLinearError):
            text = f"the rule raised {type(error).__name__}: {error}"
            return None, text.partition("\n")[0]
        return False, f"{error}{_line(error, grad_fn, types) if grad_fn else ''}"
    return True, ""


def _line(error: NotLinearError, grad_fn: AnyFunction, types: Sequence[Aval]) -> str:
    """Return the line of the operation that is not linear, or else the first one of the rule.

    What JAX evaluates from a jaxpr has the frames of the call. So trace the rule itself.
    """
    eqn = error.eqn
    try:
        with contextlib.suppress(UserCodeError):  # it takes `variables`, or raises as before
            check(attempt(jax.make_jaxpr(lambda *upstreams: grad_fn(*upstreams)), *types))
    except NotLinearError as own:
        eqn = own.eqn
    return f" ({Path(Source.of(grad_fn).first_use(eqn)).name})"
