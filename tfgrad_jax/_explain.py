"""Show what a custom gradient is at some arguments: what it keeps, for whom, and what it costs.

`explain` finds out whose call it is (`_owner`). `_study.py` collects what it reports, and
`_report.py` makes the table.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

from . import _errors
from ._custom_gradient import CustomGradient
from ._family import is_recomputed
from ._report import Explanation
from ._study import Study


def explain(h: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Report what a custom gradient does: its inputs, what it closes over and keeps, and its cost.

    Every array among the arguments counts as traced, as under `jax.jit`, and so does every array
    that the function closes over. `h` is run, traced and compiled, and not executed unless it
    branches on values.

    Args:
        h: a function that `custom_gradient`, `grad_pass_through` or `recompute_grad` returned.
        *args: its arguments, or `jax.ShapeDtypeStruct` in the place of arrays.
        **kwargs: its keyword arguments.

    Returns:
        An `Explanation`, which prints as a table, with the fields `inputs`, `captured` (and the
        gradient that each gets), `residuals`, `autodiff` (what JAX would keep for the undecorated
        function; by version), `forward_mode` and the `obstacle` to it, `costs` by the compiler, and
        `notes` on what is not known. `kept_bytes`, `new_bytes` and `autodiff_bytes` are the sums.

    Raises:
        TypeError: if `h` is not such a function, or needs values and got none.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from tfgrad_jax import custom_gradient, explain
        >>> @custom_gradient
        ... def tanh(x):
        ...     y = jnp.tanh(x)
        ...     return y, lambda dy: dy * (1 - y**2)
        >>> found = explain(tanh, jax.ShapeDtypeStruct((512, 512), jnp.float32))
        >>> [(r.name, r.bytes, r.origin) for r in found.residuals]
        [('y', 1048576, 'output')]
        >>> found.new_bytes
        0
    """
    owner, bound_to, args, recomputed = _owner(h, args)
    study = Study(owner, bound_to, args, kwargs, recomputed)
    study.run()
    return Explanation(
        study.name, study.inputs(), study.captured_values(), study.residuals, study.autodiff,
        study.forward_mode, study.obstacle, study.costs, tuple(study.notes),
    )  # fmt: skip


def _owner(h: Any, args: tuple[Any, ...]) -> tuple[CustomGradient, tuple[Any, ...], Any, bool]:
    """Return whose call it is, what that is bound to, its arguments and whether it recomputes."""
    f, bound_to = h, ()
    if isinstance(h, types.MethodType):
        f, bound_to = h.__func__, (h.__self__,)
    if is_recomputed(f):

        @functools.wraps(f)
        def both(*args: Any, **kwargs: Any) -> Any:
            return f.__wrapped__(*args, **kwargs), lambda: f(*args, **kwargs)

        return CustomGradient(both, "autodiff", None, "tf"), bound_to, args, True
    owner = getattr(f, "_custom_gradient", f)
    if not isinstance(owner, CustomGradient) or (owner is not f and owner._method is not f):
        inner = getattr(h, "__wrapped__", None)
        raise _errors.not_explainable(h, isinstance(inner, CustomGradient) or is_recomputed(inner))
    if owner is f:
        args = (*bound_to, *args)
        bound = owner._in_class and args and owner._binds(args[0])
        bound_to, args = (args[:1], args[1:]) if bound else ((), args)
    return owner, bound_to, args, False
