"""Two whole training steps: the network of examples/train_digits.py, and a small transformer."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.results import CHECKPOINT, HAND, OURS, OURS_FORWARD, PLAIN
from benchmarks.workloads.common import Function, Workload, by_hand, normal, with_ours
from benchmarks.workloads.cross_entropy import backward as head_backward
from benchmarks.workloads.cross_entropy import forward as head_forward
from benchmarks.workloads.cross_entropy import ours as our_head
from benchmarks.workloads.cross_entropy import plain as plain_head
from benchmarks.workloads.elementwise import norm, norm_backward, norm_forward
from tfgrad_jax import custom_gradient

# --- the digits -----------------------------------------------------------------------------------

LAYERS = (64, 256, 256, 10)


def _sign(x: Any) -> Any:
    return jnp.sign(x), x


def _sign_backward(x: Any, dy: Any) -> Any:
    return (dy * (1 - jnp.tanh(x) ** 2),)


def _straight_through(x: Any) -> Any:
    """The same without a custom gradient."""
    smooth = jnp.tanh(x)
    return smooth + jax.lax.stop_gradient(jnp.sign(x) - smooth)


def digits_step() -> Workload:
    """One step of Adam on binary units with the gradient of tanh."""

    def arguments(size: str, dtype: Any) -> Any:
        batch = 8 if size == "tiny" else 128
        params = [
            (normal(i, (n, m), dtype, n**-0.5), jnp.zeros(m, dtype))
            for i, (n, m) in enumerate(itertools.pairwise(LAYERS))
        ]
        return params, normal(9, (batch, LAYERS[0]), dtype), jnp.arange(batch) % LAYERS[-1]

    def loss(activation: Function, checkpoint: bool = False) -> Function:
        def layer(x: Any, w: Any, b: Any) -> Any:
            return activation(x @ w + b)

        if checkpoint:
            layer = jax.checkpoint(layer)

        def total(params: Any, images: Any, labels: Any) -> Any:
            x = images
            for w, b in params[:-1]:
                x = layer(x, w, b)
            w, b = params[-1]
            logs = jax.nn.log_softmax(x @ w + b)
            return -jnp.take_along_axis(logs, labels[:, None], 1).mean()

        return total

    def step(loss: Function) -> Function:
        import optax

        optimizer = optax.adam(3e-3)

        def update(params: Any, images: Any, labels: Any) -> Any:
            state = optimizer.init(params)  # zeros: part of the program, the same for all
            value, gradients = jax.value_and_grad(loss)(params, images, labels)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, value

        return update

    return Workload(
        "digits training step",
        arguments,
        {
            PLAIN: loss(_straight_through),
            CHECKPOINT: loss(_straight_through, checkpoint=True),
            HAND: loss(by_hand(_sign, _sign_backward)),
            OURS: loss(with_ours(_sign, _sign_backward)),
            OURS_FORWARD: loss(with_ours(_sign, _sign_backward, forward_mode=True)),
        },
        (0,),
        step=step,
        note="plain autodiff: tanh(x) + stop_gradient(sign(x) - tanh(x))",
    )


# --- a small transformer --------------------------------------------------------------------------


class Pieces(NamedTuple):
    """What a transformer is made of and has a custom gradient."""

    activation: Function
    norm: Function  # (x, scale)
    loss: Function  # (tokens, weights, labels)


def _gelu(x: Any) -> Any:
    return x * jax.nn.sigmoid(1.702 * x)


def _gelu_forward(x: Any) -> Any:
    return _gelu(x), x


def _gelu_backward(x: Any, dy: Any) -> Any:
    s = jax.nn.sigmoid(1.702 * x)
    return (dy * (s + 1.702 * x * s * (1 - s)),)


def _closed_norm(forward_mode: bool) -> Function:
    def apply(x: Any, scale: Any) -> Any:
        @custom_gradient(forward_mode=forward_mode)
        def of_x(x: Any) -> Any:
            y, residuals = norm_forward(x, scale)

            def grad(dy: Any, variables: Any) -> Any:
                dx, dscale = norm_backward(residuals, dy)
                return dx, [dscale]

            return y, grad

        return of_x(x)

    return apply


def _ours(forward_mode: bool = False) -> Pieces:
    return Pieces(
        with_ours(_gelu_forward, _gelu_backward, forward_mode),
        _closed_norm(forward_mode),
        our_head(forward_mode),
    )


def transformer_step() -> Workload:
    """One step of gradient descent; two blocks, four heads."""
    shapes = {"tiny": (2, 8, 16, 32), "full": (8, 128, 128, 2048), "gpu": (16, 1024, 1024, 32768)}

    def arguments(size: str, dtype: Any) -> Any:
        batch, length, width, words = shapes[size]
        scale = width**-0.5
        blocks = [
            {
                "norms": (jnp.ones(width, dtype), jnp.ones(width, dtype)),
                "qkv": normal(10 * i, (3, width, width), dtype, scale),
                "out": normal(10 * i + 1, (width, width), dtype, scale),
                "up": normal(10 * i + 2, (width, 4 * width), dtype, scale),
                "down": normal(10 * i + 3, (4 * width, width), dtype, scale / 2),
            }
            for i in range(2)
        ]
        params = {
            "embedding": normal(100, (words, width), dtype),
            "blocks": blocks,
            "head": normal(101, (width, words), dtype, scale),
        }
        words_in = jnp.arange(batch * length).reshape(batch, length) * 7919 % words
        return params, words_in, jnp.roll(words_in, -1, 1)

    def loss(pieces: Pieces, wrap: Callable[[Function], Function] = lambda f: f) -> Function:
        def block(x: Any, p: Any) -> Any:
            batch, length, width = x.shape
            heads = 4
            q, k, v = (
                (pieces.norm(x, p["norms"][0]) @ w).reshape(batch, length, heads, width // heads)
                for w in p["qkv"]
            )
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5
            causal = jnp.tril(jnp.ones((length, length), bool))
            weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), -1)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
            x = x + mixed @ p["out"]
            return x + pieces.activation(pieces.norm(x, p["norms"][1]) @ p["up"]) @ p["down"]

        wrapped = wrap(block)
        total_loss = wrap(pieces.loss)

        def total(params: Any, words: Any, labels: Any) -> Any:
            x = params["embedding"][words]
            for p in params["blocks"]:
                x = wrapped(x, p)
            return total_loss(x.reshape(-1, x.shape[-1]), params["head"], labels.reshape(-1))

        return total

    def step(loss: Function) -> Function:
        def update(params: Any, words: Any, labels: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(params, words, labels)
            return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), value

        return update

    plain = Pieces(_gelu, norm, plain_head)
    hand = Pieces(
        by_hand(_gelu_forward, _gelu_backward),
        by_hand(norm_forward, norm_backward),
        by_hand(head_forward, head_backward),
    )
    return Workload(
        "transformer step",
        arguments,
        {
            PLAIN: loss(plain),
            CHECKPOINT: loss(plain, jax.checkpoint),
            HAND: loss(hand),
            OURS: loss(_ours()),
            OURS_FORWARD: loss(_ours(forward_mode=True)),
        },
        (0,),
        step=step,
        note="ours closes over scales (undeclared) and head (variables=w)",
    )
