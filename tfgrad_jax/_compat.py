"""What JAX tells in another way in each version, or only in a roundabout way, in one place.

What differs between versions has the condition for its removal beside it. `traces_eagerly` is asked
at every direct call, and `is_staging` before a closure is traced; `without_consts` and `evaluate`
run where a traced function of the user is kept and called again; `same_axes` runs on every
gradient of a traced input; the types of tracers are asked for where tracers meet.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr

# On JAX 0.6, the batching rule of a custom_vjp inside a jaxpr fails if it is differentiated at
# the same time; not on 0.10. Remove when the oldest supported JAX lacks this primitive.
_BATCHES_TOO_LATE = hasattr(jax.custom_derivatives, "custom_vjp_call_jaxpr_p")

# On JAX 0.6, a third derivative through a linear system fails at a cotangent that is a symbolic
# zero; not on 0.7. Remove together with the above.
SYSTEM_LOSES_ZEROS = _BATCHES_TOO_LATE

# Before custom_jvp became a primitive of its own, JAX dropped a custom_jvp rule inside a scan
# when it evaluated the scan in part, and put the function itself in its place: so on 0.6 and
# 0.10, not on 0.12. Remove when the oldest supported JAX has this flag.
SCAN_DROPS_CUSTOM_JVP = not hasattr(jax.config, "jax_custom_jvp3")


def traces_eagerly() -> bool:
    """Tell whether JAX traces a function with a custom derivative even when called eagerly."""
    config = jax.config
    return getattr(config, "jax_custom_vjp3", False) or getattr(config, "jax_custom_jvp3", False)


def is_staging() -> bool:
    """Tell whether operations are being recorded, as under `jit` and `scan`, and not run."""
    return isinstance(jax.lax.iota(np.int32, 1), Tracer)


@functools.cache
def batch_tracer() -> type:
    """Return the type of the tracers of `vmap`."""
    (found,) = _tracers(lambda f: jax.vmap(f)(jnp.zeros(1)))
    return found


@functools.cache
def derivative_tracers() -> set[type]:
    """Return the types of the tracers of `jvp`, `linearize` and `grad`."""
    return _tracers(lambda f: jax.jvp(f, (1.0,), (1.0,))) | _tracers(lambda f: jax.grad(f)(1.0))


def _tracers(transform: Callable[[Callable[[Any], Any]], Any]) -> set[type]:
    found: set[type] = set()

    def see(x: Any) -> Any:
        found.add(type(x))
        return x

    jax.eval_shape(lambda: transform(see))
    return found


def without_consts(closed: ClosedJaxpr) -> Jaxpr:
    """Return the jaxpr with its constants as leading arguments, and without their values."""
    jaxpr = closed.jaxpr
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def evaluate(jaxpr: Jaxpr, *args: Any) -> list[Any]:
    """Evaluate a jaxpr that has no constants, equation by equation."""
    run = functools.partial(jax.core.eval_jaxpr, jaxpr, ())
    if _BATCHES_TOO_LATE and any(e.primitive.name.startswith("custom_vjp") for e in jaxpr.eqns):
        keep_all = jax.checkpoint_policies.everything_saveable
        run = jax.checkpoint(run, policy=keep_all, prevent_cse=False)  # batched as a whole first
    return run(*args)


def varying(value: Any) -> frozenset[Any]:
    """Return the mesh axes of a `shard_map` along which a value differs between devices."""
    if not isinstance(value, Tracer):
        return frozenset()
    aval = jax.typeof(value)
    if hasattr(aval, "manual_axis_type"):
        return frozenset(aval.manual_axis_type.varying)
    return getattr(aval, "vma", frozenset())  # JAX 0.6 tells nothing


def same_axes(gradient: Any, axes: frozenset[Any]) -> Any:
    """Make a gradient vary along the axes along which its input does.

    For an input that all devices share, each has computed its own part: JAX adds these up when
    it differentiates its own operations, and so does this.
    """
    own = varying(gradient)
    if own - axes:
        gradient = jax.lax.psum(gradient, tuple(own - axes))
    if axes - own:
        gradient = _vary(gradient, tuple(axes - own))
    return gradient


def _vary(value: Any, axes: Sequence[Any]) -> Any:
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(value, axes, to="varying")
    return jax.lax.pvary(value, axes)  # pyrefly: ignore  # of JAX 0.6 to 0.8
