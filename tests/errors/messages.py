"""Errors as texts: what is raised eagerly and under `jit`, and how a message names a function."""

import jax
import jax.numpy as jnp
import pytest

from tfgrad_jax import custom_gradient


def place(f, offset=0):
    """Return "file:line" of a line of a function, counted from its decorator."""
    code = getattr(f, "__wrapped__", f).__code__
    return f"{code.co_filename}:{code.co_firstlineno + offset}"


def name(f):
    return f.__qualname__.replace("<locals>.", "")


def at(f):
    """Name a function the way a message does."""
    return f"`{name(f)}` ({place(f)})"


def message(kind, call, *args):
    """Return the text that a call raises, having compared it with that under `jit`."""
    with pytest.raises(kind) as eager:
        call(*args)
    assert type(eager.value) is kind
    with pytest.raises(kind) as jitted:
        jax.jit(call)(*args)
    assert text(jitted) == text(eager)
    return text(eager)


def text(caught):
    return str(caught.value)


def gradient_message(kind, f, *args, **options):
    """Return what the gradient of the sum of `f` with respect to all arguments raises."""
    h = custom_gradient(f, **options)

    def loss(*args):
        return sum(jnp.sum(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(h(*args)))

    return message(kind, jax.grad(loss, tuple(range(len(args)))), *args)


def prefix(f, rule_name="grad"):
    """Return how each message about the rule of `f` starts."""
    code = next(c for c in f.__code__.co_consts if getattr(c, "co_name", None) == rule_name)
    rule = f"`{name(f)}.{rule_name}` ({code.co_filename}:{code.co_firstlineno})"
    return f"The gradient function {rule} of {at(f)}"
