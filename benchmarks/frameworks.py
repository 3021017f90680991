"""The same rule in TensorFlow and PyTorch, on the same machine in one run: `measure`.

Optional: a framework that is not installed is left out, and its row says so. All compute the same
numbers, which is checked first.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.results import OURS, Group
from benchmarks.timing import race
from benchmarks.ways import HAND, Function, Rule, Way

OURS_JIT = "tfgrad_jax, jax.jit"


def _forward(exp: Function, log: Function, x: Any) -> Any:
    e = exp(x)
    return log(1 + e), e


def _backward(e: Any, dy: Any) -> Any:
    return dy * (1 - 1 / (1 + e))


def _jax(numbers: np.ndarray) -> dict[str, Function]:
    rule = Rule(lambda x: _forward(jnp.exp, jnp.log, x), lambda e, dy: (_backward(e, dy),))

    def gradient(way: str) -> Function:
        h = Way(way)(rule)
        return jax.value_and_grad(lambda x: h(x).sum())

    x = jnp.asarray(numbers)
    calls = {OURS_JIT: jax.jit(gradient(OURS)), "tfgrad_jax, eager": gradient(OURS)}
    calls["jax.custom_vjp, jax.jit"] = jax.jit(gradient(HAND))
    return {name: lambda f=f: f(x) for name, f in calls.items()}


def _tensorflow(numbers: np.ndarray) -> dict[str, Function]:
    import tensorflow as tf

    @tf.custom_gradient
    def h(x: Any) -> Any:
        y, e = _forward(tf.exp, tf.math.log, x)
        return y, lambda dy: _backward(e, dy)

    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(h(x))
        return y, tape.gradient(y, x)

    x = tf.constant(numbers)
    calls = {"eager": gradient, "tf.function": tf.function(gradient)}
    calls["XLA"] = tf.function(gradient, jit_compile=True)
    return {f"tf.custom_gradient, {name}": lambda f=f: f(x) for name, f in calls.items()}


def _torch(numbers: np.ndarray) -> dict[str, Function]:
    import torch

    class H(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            y, e = _forward(torch.exp, torch.log, x)
            ctx.save_for_backward(e)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            return _backward(*ctx.saved_tensors, dy)

    def gradient(x: Any) -> Any:
        y = H.apply(x).sum()
        return y.detach(), *torch.autograd.grad(y, x)

    x = torch.tensor(numbers, requires_grad=True)
    calls = {"eager": gradient, "torch.compile": torch.compile(gradient)}
    return {f"torch.autograd.Function, {name}": lambda f=f: f(x) for name, f in calls.items()}


def measure(size: str) -> list[Group]:
    numbers = np.random.default_rng(0).standard_normal(1 << (8 if size == "toy" else 22), "f")
    contestants, missing = {}, {}
    for framework in (_jax, _tensorflow, _torch):
        try:
            contestants |= framework(numbers)
        except ImportError as error:
            missing[framework.__name__[1:]] = f"not measured: {error}"
    expected = jax.tree.leaves(contestants[OURS_JIT]())
    for name, call in contestants.items():
        for a, b in zip(expected, jax.tree.leaves(call()), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, err_msg=name)
    # Threads of one framework that spin while they wait would slow down the next one.
    times = race(contestants, OURS_JIT, size, seconds=6, settle=0.02)
    times["failures"] |= missing
    return [Group("frameworks", "log1pexp", "time", "s", **times)]
