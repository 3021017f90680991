"""The same rules in TensorFlow and PyTorch, on the same machine in one run.

Optional: a framework that is not installed is left out, and its rows say so. All contestants
compute the same numbers, which is checked first. Chunks are taken by a Python loop everywhere,
so that eager and compiled programs do the same.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.results import Group
from benchmarks.settings import Settings, Task
from benchmarks.timing import compare
from benchmarks.workloads.common import by_hand
from tfgrad_jax import custom_gradient

SECTION = "frameworks"
OURS_JIT = "tfgrad_jax, jax.jit"
CHUNKS = 4
RATE = 1e-2

Calls = dict[str, Callable[[], Any]]


def tasks(settings: Settings) -> Iterator[Task]:
    for name in CASES:
        yield Task(SECTION, name, functools.partial(measure, name, settings))


def measure(name: str, settings: Settings) -> list[Group]:
    values = CASES[name][0]("tiny" if settings.quick else "full")
    contestants: Calls = {}
    missing = {}
    for framework, build in zip(("JAX", "TensorFlow", "PyTorch"), CASES[name][1:], strict=True):
        try:
            contestants.update(build(*values))
        except ImportError as error:
            missing[framework] = f"not measured: {error}"
    expected = None
    for contestant, call in contestants.items():
        result = [np.asarray(x, np.float32) for x in jax.tree.leaves(call())]
        expected = expected or result
        for a, b in zip(expected, result, strict=True):
            scale = np.abs(a).max()
            np.testing.assert_allclose(a / scale, b / scale, atol=2e-4, err_msg=contestant)
    least, most = settings.rounds
    rounds = min(15, least), min(50, most)
    # Threads of one framework that spin while they wait would slow down the next one.
    measured = compare(contestants, OURS_JIT, 6 * settings.scale, rounds, settle=0.02)
    measured.failures.update(missing)
    note = "value and gradient; " + ", ".join(str(np.shape(v)) for v in jax.tree.leaves(values))
    return [Group.timed(SECTION, name, "time", measured, note)]


def _three_tf(f: Callable[..., Any], args: tuple[Any, ...]) -> Calls:
    import tensorflow as tf

    graph, xla = tf.function(f), tf.function(f, jit_compile=True)
    return {
        "tf.custom_gradient, eager": lambda: f(*args),
        "tf.custom_gradient, tf.function": lambda: graph(*args),
        "tf.custom_gradient, XLA": lambda: xla(*args),
    }


def _two_torch(f: Callable[..., Any], args: tuple[Any, ...]) -> Calls:
    import torch

    compiled = torch.compile(f)

    def call(f: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: jax.tree.map(lambda t: t.detach(), f(*args))

    return {
        "torch.autograd.Function, eager": call(f),
        "torch.autograd.Function, torch.compile": call(compiled),
    }


def _three_jax(f: Callable[..., Any], by_hand: Callable[..., Any], args: tuple[Any, ...]) -> Calls:
    compiled, compiled_by_hand = jax.jit(f), jax.jit(by_hand)
    return {
        OURS_JIT: lambda: compiled(*args),
        "tfgrad_jax, eager": lambda: f(*args),
        "jax.custom_vjp, jax.jit": lambda: compiled_by_hand(*args),
    }


# --- log1pexp -------------------------------------------------------------------------------------


def _log1pexp_values(size: str) -> tuple[Any, ...]:
    n = 1 << (8 if size == "tiny" else 22)
    return (np.random.default_rng(0).standard_normal(n, dtype=np.float32),)


def _log1pexp_jax(x: Any) -> Calls:
    @custom_gradient
    def h(x: Any) -> Any:
        e = jnp.exp(x)
        return jnp.log(1 + e), lambda dy: dy * (1 - 1 / (1 + e))

    def backward(e: Any, dy: Any) -> Any:
        return (dy * (1 - 1 / (1 + e)),)

    def forward(x: Any) -> Any:
        e = jnp.exp(x)
        return jnp.log(1 + e), e

    def mean_of(h: Callable[..., Any]) -> Callable[..., Any]:
        return jax.value_and_grad(lambda x: h(x).mean())

    return _three_jax(mean_of(h), mean_of(by_hand(forward, backward)), (jnp.asarray(x),))


def _log1pexp_tf(x: Any) -> Calls:
    import tensorflow as tf

    @tf.custom_gradient
    def h(x: Any) -> Any:
        e = tf.exp(x)
        return tf.math.log(1 + e), lambda dy: dy * (1 - 1 / (1 + e))

    def value_and_grad(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_mean(h(x))
        return y, tape.gradient(y, x)

    return _three_tf(value_and_grad, (tf.constant(x),))


def _log1pexp_torch(x: Any) -> Calls:
    import torch

    class H(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            e = torch.exp(x)
            ctx.save_for_backward(e)
            return torch.log(1 + e)

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            (e,) = ctx.saved_tensors
            return dy * (1 - 1 / (1 + e))

    def value_and_grad(x: Any) -> Any:
        y = H.apply(x).mean()
        return y, torch.autograd.grad(y, x)[0]

    return _two_torch(value_and_grad, (torch.tensor(x, requires_grad=True),))


# --- linear + cross-entropy, gradients formed in the forward pass ---------------------------------


def _head_values(size: str) -> tuple[Any, ...]:
    tokens, width, words = (16, 8, 32) if size == "tiny" else (1024, 256, 8192)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((tokens, width), dtype=np.float32)
    w = rng.standard_normal((width, words), dtype=np.float32) / np.float32(width**0.5)
    return x, w, rng.integers(0, words, tokens)


def _head(x: Any, w: Any, labels: Any, xp: Any) -> tuple[Any, Any, Any]:
    """Return the loss and both gradients; `xp` is the framework's few operations."""
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
    return loss / tokens, xp.concatenate(dxs), dw


def _head_jax(x: Any, w: Any, labels: Any) -> Calls:
    class Ops:
        top = staticmethod(lambda a: a.max(1, keepdims=True))
        sum = staticmethod(lambda a: a.sum(1, keepdims=True))
        one_hot = staticmethod(lambda a, n: jax.nn.one_hot(a, n))
        total, exp, log, t = jnp.sum, jnp.exp, jnp.log, jnp.transpose
        concatenate = jnp.concatenate

    def loss(x: Any, w: Any, labels: Any) -> Any:
        @custom_gradient(variables=w)
        def of_tokens(x: Any) -> Any:
            y, dx, dw = _head(x, w, labels, Ops)
            return y, lambda dy, variables: (dy * dx, dy * dw)

        return of_tokens(x)

    def forward(x: Any, w: Any, labels: Any) -> Any:
        y, *gradients = _head(x, w, labels, Ops)
        return y, gradients

    hand = by_hand(forward, lambda gradients, dy: (*(dy * g for g in gradients), None))
    args = jnp.asarray(x), jnp.asarray(w), jnp.asarray(labels)
    return _three_jax(*(jax.value_and_grad(f, (0, 1)) for f in (loss, hand)), args)


def _head_tf(x: Any, w: Any, labels: Any) -> Calls:
    import tensorflow as tf

    class Ops:
        top = staticmethod(lambda a: tf.reduce_max(a, 1, keepdims=True))
        sum = staticmethod(lambda a: tf.reduce_sum(a, 1, keepdims=True))
        total = staticmethod(tf.reduce_sum)
        one_hot = staticmethod(tf.one_hot)
        exp, log, t = map(staticmethod, (tf.exp, tf.math.log, tf.transpose))
        concatenate = staticmethod(lambda parts: tf.concat(parts, 0))

    @tf.custom_gradient
    def loss(x: Any, w: Any, labels: Any) -> Any:
        y, dx, dw = _head(x, w, labels, Ops)
        return y, lambda dy: (dy * dx, dy * dw, None)

    def value_and_grad(x: Any, w: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch((x, w))
            y = loss(x, w, labels)
        return y, tape.gradient(y, (x, w))

    return _three_tf(value_and_grad, (tf.constant(x), tf.constant(w), tf.constant(labels)))


def _head_torch(x: Any, w: Any, labels: Any) -> Calls:
    import torch

    class Ops:
        top = staticmethod(lambda a: a.amax(1, keepdim=True))
        sum = staticmethod(lambda a: a.sum(1, keepdim=True))
        one_hot = staticmethod(lambda a, n: torch.nn.functional.one_hot(a, n).float())
        total, exp, log, t = torch.sum, torch.exp, torch.log, torch.t
        concatenate = torch.cat

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, w: Any, labels: Any) -> Any:
            y, dx, dw = _head(x, w, labels, Ops)
            ctx.save_for_backward(dx, dw)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            dx, dw = ctx.saved_tensors
            return dy * dx, dy * dw, None

    def value_and_grad(x: Any, w: Any, labels: Any) -> Any:
        y = Loss.apply(x, w, labels)
        return y, *torch.autograd.grad(y, (x, w))

    x, w = (torch.tensor(a, requires_grad=True) for a in (x, w))
    return _two_torch(value_and_grad, (x, w, torch.tensor(labels)))


# --- one step of gradient descent on the binary network of examples/train_digits.py ---------------


def _step_values(size: str) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    sizes = (64, 256, 256, 10)
    weights = [
        rng.standard_normal((n, m), dtype=np.float32) / np.float32(n**0.5)
        for n, m in itertools.pairwise(sizes)
    ]
    batch = 8 if size == "tiny" else 128
    images = rng.standard_normal((batch, 64), dtype=np.float32)
    return weights, images, np.arange(batch) % 10


def _step_jax(weights: Any, images: Any, labels: Any) -> Calls:
    @custom_gradient
    def binary(x: Any) -> Any:
        return jnp.sign(x), lambda dy: dy * (1 - jnp.tanh(x) ** 2)

    hand = by_hand(lambda x: (jnp.sign(x), x), lambda x, dy: (dy * (1 - jnp.tanh(x) ** 2),))

    def step_with(binary: Callable[..., Any]) -> Callable[..., Any]:
        def loss(weights: Any, images: Any, labels: Any) -> Any:
            x = images
            for w in weights[:-1]:
                x = binary(x @ w)
            logs = jax.nn.log_softmax(x @ weights[-1])
            return -jnp.take_along_axis(logs, labels[:, None], 1).mean()

        def step(weights: Any, images: Any, labels: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(weights, images, labels)
            return value, [w - RATE * g for w, g in zip(weights, gradients, strict=True)]

        return step

    args = jax.tree.map(jnp.asarray, (weights, images, labels))
    return _three_jax(step_with(binary), step_with(hand), args)


def _step_tf(weights: Any, images: Any, labels: Any) -> Calls:
    import tensorflow as tf

    @tf.custom_gradient
    def binary(x: Any) -> Any:
        return tf.sign(x), lambda dy: dy * (1 - tf.tanh(x) ** 2)

    def step(weights: Any, images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            x = images
            for w in weights[:-1]:
                x = binary(x @ w)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x @ weights[-1])
            value = tf.reduce_mean(losses)
        gradients = tape.gradient(value, weights)
        return value, [w - RATE * g for w, g in zip(weights, gradients, strict=True)]

    return _three_tf(step, ([tf.constant(w) for w in weights], tf.constant(images), labels))


def _step_torch(weights: Any, images: Any, labels: Any) -> Calls:
    import torch

    class Binary(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return torch.sign(x)

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            (x,) = ctx.saved_tensors
            return dy * (1 - torch.tanh(x) ** 2)

    def step(weights: Any, images: Any, labels: Any) -> Any:
        x = images
        for w in weights[:-1]:
            x = Binary.apply(x @ w)
        value = torch.nn.functional.cross_entropy(x @ weights[-1], labels)
        gradients = torch.autograd.grad(value, weights)
        return value, [w - RATE * g for w, g in zip(weights, gradients, strict=True)]

    weights = [torch.tensor(w, requires_grad=True) for w in weights]
    return _two_torch(step, (weights, torch.tensor(images), torch.tensor(labels)))


# (values, JAX, TensorFlow, PyTorch)
CASES: dict[str, tuple[Callable[..., Any], ...]] = {
    "log1pexp": (_log1pexp_values, _log1pexp_jax, _log1pexp_tf, _log1pexp_torch),
    "linear + cross-entropy": (_head_values, _head_jax, _head_tf, _head_torch),
    "digits training step": (_step_values, _step_jax, _step_tf, _step_torch),
}
