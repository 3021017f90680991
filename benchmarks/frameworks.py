"""The same rules in TensorFlow and PyTorch, on the same machine in one run.

Optional: a framework that is not installed is left out, and its row says so. A rule is written
once, in the few operations that all of them share, and all compute the same numbers, which is
checked first. Chunks are taken by a Python loop, so that eager and compiled programs do the same.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.results import OURS, Group
from benchmarks.timing import Settings, compare
from benchmarks.workload import HAND, Rule, Way

SECTION = "frameworks"
OURS_JIT = "tfgrad_jax, jax.jit"
CHUNKS = 4

Function = Callable[..., Any]
Calls = dict[str, Callable[[], Any]]


def _jax(forward: Function, backward: Function, args: Any, moved: list[int]) -> Calls:
    xp = SimpleNamespace(
        exp=jnp.exp, log=jnp.log, t=jnp.transpose, total=jnp.sum, join=jnp.concatenate,
        sum=lambda a: a.sum(1, keepdims=True), top=lambda a: a.max(1, keepdims=True),
        one_hot=jax.nn.one_hot,
    )  # fmt: skip
    rule = Rule(lambda *args: forward(xp, *args), backward)

    def gradient(way: str) -> Function:
        h = Way(way)(rule)
        return jax.value_and_grad(lambda *args: h(*args).sum(), moved)

    ours, jitted, by_hand = gradient(OURS), jax.jit(gradient(OURS)), jax.jit(gradient(HAND))
    args = jax.tree.map(jnp.asarray, args)
    calls = {OURS_JIT: jitted, "tfgrad_jax, eager": ours, "jax.custom_vjp, jax.jit": by_hand}
    return {name: lambda f=f: f(*args) for name, f in calls.items()}


def _tensorflow(forward: Function, backward: Function, args: Any, moved: list[int]) -> Calls:
    import tensorflow as tf

    xp = SimpleNamespace(
        exp=tf.exp, log=tf.math.log, t=tf.transpose, total=tf.reduce_sum, one_hot=tf.one_hot,
        sum=lambda a: tf.reduce_sum(a, 1, keepdims=True), join=lambda parts: tf.concat(parts, 0),
        top=lambda a: tf.reduce_max(a, 1, keepdims=True),
    )  # fmt: skip

    @tf.custom_gradient
    def h(*args: Any) -> Any:
        y, residuals = forward(xp, *args)
        return y, lambda dy: backward(residuals, dy)

    args = tuple(map(tf.constant, args))

    def gradient(*args: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([args[i] for i in moved])
            y = tf.reduce_sum(h(*args))
        return y, tape.gradient(y, [args[i] for i in moved])

    calls = {"eager": gradient, "tf.function": tf.function(gradient)}
    calls["XLA"] = tf.function(gradient, jit_compile=True)
    return {f"tf.custom_gradient, {name}": lambda f=f: f(*args) for name, f in calls.items()}


def _torch(forward: Function, backward: Function, args: Any, moved: list[int]) -> Calls:
    import torch

    xp = SimpleNamespace(
        exp=torch.exp, log=torch.log, t=torch.t, total=torch.sum, join=torch.cat,
        sum=lambda a: a.sum(1, keepdim=True), top=lambda a: a.amax(1, keepdim=True),
        one_hot=lambda a, n: torch.nn.functional.one_hot(a, n).float(),
    )  # fmt: skip

    class H(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            y, residuals = forward(xp, *args)
            ctx.save_for_backward(*residuals)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            return backward(ctx.saved_tensors, dy)

    args = tuple(torch.tensor(a, requires_grad=i in moved) for i, a in enumerate(args))

    def gradient(*args: Any) -> Any:
        y = H.apply(*args).sum()
        return y.detach(), torch.autograd.grad(y, [args[i] for i in moved])

    calls = {"eager": gradient, "torch.compile": torch.compile(gradient)}
    return {f"torch.autograd.Function, {name}": lambda f=f: f(*args) for name, f in calls.items()}


def _log1pexp(xp: Any, x: Any) -> Any:
    e = xp.exp(x)
    return xp.log(1 + e), (e,)


def _log1pexp_backward(residuals: Any, dy: Any) -> Any:
    return (dy * (1 - 1 / (1 + residuals[0])),)


def _cross_entropy(xp: Any, x: Any, w: Any, labels: Any) -> Any:
    """Form the gradients in the forward pass, chunk by chunk."""
    tokens = labels.shape[0]
    size = tokens // CHUNKS
    loss, dxs, dw = 0.0, [], 0.0
    for i in range(CHUNKS):
        rows = slice(i * size, (i + 1) * size)
        logits = x[rows] @ w
        top = xp.top(logits)
        e = xp.exp(logits - top)
        total = xp.sum(e)
        here = xp.one_hot(labels[rows], w.shape[1])
        loss = loss + xp.total(xp.log(total) + top - xp.sum(here * logits))
        d = (e / total - here) / tokens
        dxs.append(d @ xp.t(w))
        dw = dw + xp.t(x[rows]) @ d
    return loss / tokens, (xp.join(dxs), dw)


def _cross_entropy_backward(residuals: Any, dy: Any) -> Any:
    return *(dy * g for g in residuals), None


CASES = {
    "log1pexp": (_log1pexp, _log1pexp_backward),
    "linear + cross-entropy": (_cross_entropy, _cross_entropy_backward),
}


def _arguments(name: str, toy: bool) -> tuple[Any, ...]:
    draw = np.random.default_rng(0).standard_normal
    if name == "log1pexp":
        return (draw(1 << (8 if toy else 22), np.float32),)
    tokens, width, words = (16, 8, 32) if toy else (1024, 256, 8192)
    x, w = draw((tokens, width), np.float32), draw((width, words), np.float32)
    return x, w * np.float32(width**-0.5), np.arange(tokens) * 7 % words


def measure(name: str, settings: Settings) -> list[Group]:
    args = _arguments(name, settings.toy)
    moved = [i for i, a in enumerate(args) if a.dtype == np.float32]
    contestants: Calls = {}
    missing = {}
    for framework in (_jax, _tensorflow, _torch):
        try:
            contestants.update(framework(*CASES[name], args, moved))
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
    rounds = settings.rounds(15, 50)
    measured = compare(contestants, OURS_JIT, 6 * settings.scale, rounds, settle=0.02)
    measured.failures.update(missing)
    note = "value and gradient; " + ", ".join(str(np.shape(a)) for a in args)
    return [Group.timed(SECTION, name, "time", measured, note)]
