"""The same rules in TensorFlow and PyTorch, on the same machine in one run: `measure`.

Optional: a framework that is not installed is left out, and its row says so. A rule is written
once, in the few operations that all of them name alike, and all compute the same numbers, which
is checked first.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.results import OURS, Group
from benchmarks.timing import race
from benchmarks.ways import HAND, Function, Rule, Way

OURS_JIT = "tfgrad_jax, jax.jit"

Calls = dict[str, Function]


def _jax(forward: Function, backward: Function, args: Any, moved: list[int]) -> Calls:
    rule = Rule(lambda *args: forward(jnp, jnp.log, *args), backward)

    def gradient(way: str) -> Function:
        h = Way(way)(rule)
        return jax.value_and_grad(lambda *args: h(*args).sum(), moved)

    args = jax.tree.map(jnp.asarray, args)
    calls = {OURS_JIT: jax.jit(gradient(OURS)), "tfgrad_jax, eager": gradient(OURS)}
    calls["jax.custom_vjp, jax.jit"] = jax.jit(gradient(HAND))
    return {name: lambda f=f: f(*args) for name, f in calls.items()}


def _tensorflow(forward: Function, backward: Function, args: Any, moved: list[int]) -> Calls:
    import tensorflow as tf

    @tf.custom_gradient
    def h(*args: Any) -> Any:
        y, residuals = forward(tf, tf.math.log, *args)
        return y, lambda dy: backward(residuals, dy)

    def gradient(*args: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([args[i] for i in moved])
            y = tf.reduce_sum(h(*args))
        return y, tape.gradient(y, [args[i] for i in moved])

    args = tuple(map(tf.constant, args))
    calls = {"eager": gradient, "tf.function": tf.function(gradient)}
    calls["XLA"] = tf.function(gradient, jit_compile=True)
    return {f"tf.custom_gradient, {name}": lambda f=f: f(*args) for name, f in calls.items()}


def _torch(forward: Function, backward: Function, args: Any, moved: list[int]) -> Calls:
    import torch

    class H(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            y, residuals = forward(torch, torch.log, *args)
            ctx.save_for_backward(*residuals)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            return backward(ctx.saved_tensors, dy)

    def gradient(*args: Any) -> Any:
        y = H.apply(*args).sum()
        return y.detach(), torch.autograd.grad(y, [args[i] for i in moved])

    args = tuple(torch.tensor(a, requires_grad=i in moved) for i, a in enumerate(args))
    calls = {"eager": gradient, "torch.compile": torch.compile(gradient)}
    return {f"torch.autograd.Function, {name}": lambda f=f: f(*args) for name, f in calls.items()}


def _log1pexp(xp: Any, log: Function, x: Any) -> Any:
    e = xp.exp(x)
    return log(1 + e), (e,)


def _cross_entropy(xp: Any, log: Function, x: Any, w: Any, here: Any) -> Any:
    """Form the gradients in the forward pass; `here` is one-hot."""
    logits = x @ w
    e = xp.exp(logits)
    total = xp.einsum("tv->t", e)
    loss = xp.einsum("t->", log(total)) - xp.einsum("tv,tv->", logits, here)
    d = e / total[:, None] - here
    return loss, (xp.einsum("tv,nv->tn", d, w), xp.einsum("tn,tv->nv", x, d))


CASES = {
    "log1pexp": (_log1pexp, lambda kept, dy: (dy * (1 - 1 / (1 + kept[0])),)),
    "linear + cross-entropy": (_cross_entropy, lambda kept, dy: (*(dy * g for g in kept), None)),
}


def _arguments(name: str, toy: bool) -> tuple[Any, ...]:
    draw = np.random.default_rng(0).standard_normal
    if name == "log1pexp":
        return (draw(1 << (8 if toy else 22), np.float32),)
    tokens, width, words = (16, 8, 32) if toy else (1024, 256, 8192)
    x, w = draw((tokens, width), np.float32), draw((width, words), np.float32)
    return x, w * np.float32(width**-0.5), np.eye(words, dtype=np.float32)[np.arange(tokens)]


def measure(name: str, size: str) -> list[Group]:
    args = _arguments(name, size == "toy")
    moved = [0] if len(args) == 1 else [0, 1]
    contestants, missing = {}, {}
    for framework in (_jax, _tensorflow, _torch):
        try:
            contestants |= framework(*CASES[name], args, moved)
        except ImportError as error:
            missing[framework.__name__[1:]] = f"not measured: {error}"
    expected = None
    for contestant, call in contestants.items():
        got = [np.asarray(x, np.float32) for x in jax.tree.leaves(call())]
        expected = expected or got
        for a, b in zip(expected, got, strict=True):
            scale = np.abs(a).max()
            np.testing.assert_allclose(a / scale, b / scale, atol=2e-4, err_msg=contestant)
    # Threads of one framework that spin while they wait would slow down the next one.
    times = race(contestants, OURS_JIT, size, 6, (15, 50), settle=0.02)
    times["failures"] |= missing
    note = "value and gradient; " + ", ".join(str(np.shape(a)) for a in args)
    return [Group("frameworks", name, "time", "s", note=note, **times)]
