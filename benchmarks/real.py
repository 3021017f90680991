"""Workloads at the sizes that people run: what a custom gradient saves, in time and memory.

`WORKLOADS` are measured by `workload.measure`, as the tiny ones are. `largest_batch` asks the
compiler how many sequences a training step of GPT-2 can take.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import rules
from benchmarks.results import OURS, Group
from benchmarks.tiny import LOG1PEXP
from benchmarks.ways import BOTH, CHECKPOINT, HAND, OPTAX, PLAIN, Function, Way
from benchmarks.workload import Workload, normal, of

RUN = ("run grad", "program grad")


# --- one rule -------------------------------------------------------------------------------------


def _norm(shape: Any, dtype: Any) -> Any:
    return (normal(0, shape, dtype), normal(1, shape[-1:], dtype)), normal(2, shape, dtype)


def _qkv(shape: Any, dtype: Any) -> Any:
    return (tuple(normal(seed, shape, dtype) for seed in range(3)),)


def _tokens(shape: Any, dtype: Any) -> Any:
    tokens, width, words, *given = shape
    dtype = given[0] if given and dtype == jnp.float32 else dtype
    params = normal(0, (tokens, width), dtype), normal(1, (width, words), dtype, width**-0.5)
    return params, jnp.arange(tokens) * 7919 % words


def _implicit(shape: Any, dtype: Any) -> Any:
    # Norm about 0.4: the iteration has converged to float64 precision after 40 steps.
    width = shape[1]
    return ((normal(0, (width, width), dtype, 0.2 * width**-0.5), normal(1, shape, dtype)),)


CROSS_ENTROPY = of(rules.CROSS_ENTROPY, lambda h: lambda params, labels: h(*params[::-1], labels))


# --- quantization-aware training ------------------------------------------------------------------


def _lsq(way: Way, size: Any) -> Function:
    """Three layers whose weights and activations have four bits, with learned step sizes."""
    quantize = way(rules.LSQ)

    def loss(params: Any, x: Any, labels: Any) -> Any:
        for w, w_step, x_step in params:
            x = jax.nn.relu(quantize(x_step, x) @ quantize(w_step, w))
        return rules.logits_loss(jnp.eye(x.shape[1], dtype=x.dtype), x, labels)

    return loss


def _lsq_arguments(shape: Any, dtype: Any) -> Any:
    batch, width = shape
    step = jnp.asarray(0.1, dtype)
    params = [
        (normal(i, (n, m), dtype, n**-0.5), step * n**-0.5 * 5, step * 3)
        for i, (n, m) in enumerate(itertools.pairwise((width, width, width, 16)))
    ]
    return params, normal(9, (batch, width), dtype), jnp.arange(batch) % 16


# --- a spiking network ----------------------------------------------------------------------------


def _spiking(way: Way, size: Any) -> Function:
    """Leaky integrate-and-fire neurons with a surrogate gradient."""
    spike = way.inner(rules.SPIKE)

    def loss(weights: Any, inputs: Any, targets: Any) -> Any:
        w_in, w_back, w_out = weights

        def step(carry: Any, x: Any) -> Any:
            v, fired, rate = carry
            v = 0.9 * v * (1 - fired) + x @ w_in + fired @ w_back
            fired = spike(v - 1)
            return (v, fired, rate + fired / len(inputs)), None

        start = (jnp.zeros((inputs.shape[1], len(w_back)), inputs.dtype),) * 3
        (_, _, rate), _ = jax.lax.scan(way.block(step), start, inputs)
        return ((rate @ w_out - targets) ** 2).mean()

    return loss


def _spiking_arguments(shape: Any, dtype: Any) -> Any:
    steps, batch, width = shape
    scale = width**-0.5
    weights = tuple(normal(i, (width, width), dtype, scale) for i in range(3))
    return weights, abs(normal(3, (steps, batch, width), dtype)), normal(4, (batch, width), dtype)


# --- a training step of GPT-2 ---------------------------------------------------------------------


class Shape(NamedTuple):
    layers: int
    batch: int
    length: int
    width: int = 768
    heads: int = 12
    words: int = 50257
    dtype: Any = None  # of activations, if not that of the parameters


def gpt(way: Way, shape: Shape) -> Function:
    """RMSNorm, activation, attention and loss are rules; embedding and head share weights."""
    norm, gelu = way.inner(rules.RMSNORM), way.inner(rules.GELU)
    attention, fused_loss = way.inner(rules.ATTENTION), way(rules.CROSS_ENTROPY)

    def block(x: Any, p: Any) -> Any:
        p = jax.tree.map(lambda w: w.astype(x.dtype), p)

        def heads(w: Any) -> Any:
            y = (norm(p["norms"][0], x) @ w).reshape(*x.shape[:2], shape.heads, -1)
            return y.swapaxes(1, 2).reshape(-1, x.shape[1], y.shape[-1])

        mixed = attention(*map(heads, p["qkv"])).reshape(len(x), shape.heads, x.shape[1], -1)
        x = x + mixed.swapaxes(1, 2).reshape(x.shape) @ p["out"]
        return x + gelu(norm(p["norms"][1], x) @ p["up"]) @ p["down"], None

    def loss(params: Any, words: Any, labels: Any) -> Any:
        table = params["words"].astype(shape.dtype or params["words"].dtype)
        x = table[words] + params["places"].astype(table.dtype)
        x, _ = jax.lax.scan(way.block(block), x, params["blocks"])
        x = norm(params["norm"].astype(x.dtype), x).reshape(-1, shape.width)
        return fused_loss(table.T, x, labels.reshape(-1))

    return loss


def gpt_arguments(shape: Shape, dtype: Any) -> Any:
    n, width, scale = shape.layers, shape.width, 0.02
    params = {
        "words": normal(0, (shape.words, width), dtype, scale),
        "places": normal(1, (shape.length, width), dtype, scale),
        "norm": jnp.ones(width, dtype),
        "blocks": {
            "norms": jnp.ones((n, 2, width), dtype),
            "qkv": normal(2, (n, 3, width, width), dtype, scale),
            "out": normal(3, (n, width, width), dtype, scale),
            "up": normal(4, (n, width, 4 * width), dtype, scale),
            "down": normal(5, (n, 4 * width, width), dtype, scale),
        },
    }
    words = jnp.arange(shape.batch * shape.length).reshape(shape.batch, -1) * 7919 % shape.words
    return params, words, jnp.roll(words, -1, 1)


def adam_step(loss: Function) -> Function:
    import optax

    optimizer = optax.adam(1e-4)

    def update(params: Any, *batch: Any) -> Any:
        state = optimizer.init(params)  # zeros: part of the program, the same for all
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return update


TOY = Shape(2, 2, 8, 16, 2, 32)
WHOLE = Shape(12, 8, 1024, dtype=jnp.bfloat16)
LARGE = (8192, 4096, 128256, jnp.bfloat16)
GPT = Workload(
    "workloads", "GPT-2 training step", gpt, gpt_arguments,
    (TOY, Shape(2, 2, 512), WHOLE), (*RUN, "program jvp"),
    (PLAIN, CHECKPOINT, OPTAX, HAND, BOTH, OURS),
    step=adam_step, note="2 of its 12 layers on a CPU; ours closes over scales and embedding",
)  # fmt: skip
WORKLOADS = (
    Workload(
        "workloads", "log1pexp", of(LOG1PEXP, lambda h: lambda x: h(x).sum()),
        lambda shape, dtype: (normal(0, shape, dtype),), ((256,), (1 << 25,), (1 << 28,)),
        traffic=lambda x: 2 * x.nbytes,  # read x, write its gradient
    ),
    Workload(
        "workloads", "RMSNorm",
        of(rules.RMSNORM, lambda h: lambda params, t: (h(*params[::-1]) * t).sum()),
        _norm, ((8, 32), (1 << 14, 1024), (1 << 16, 4096)),
        traffic=lambda params, t: 3 * t.nbytes,  # read x and t, write the gradient of x
    ),
    Workload(
        "workloads", "attention, recomputed",
        of(rules.ATTENTION, lambda h: lambda qkv: (h(*qkv) ** 2).mean()),
        _qkv, ((2, 256, 4), (4, 2048, 64), (32, 8192, 128)),
        work=lambda qkv: 7 * 2 * qkv[0].size * qkv[0].shape[1],
    ),
    Workload(
        "workloads", "cross-entropy", CROSS_ENTROPY,
        _tokens, ((512, 8, 32), (2048, 256, 16384), (8192, 1024, 50257)),
        work=lambda params, labels: 3 * 2 * params[0].size * params[1].shape[1],
        note="ours closes over the weights (declared)",
    ),
    Workload(
        "workloads", "cross-entropy of a large model", CROSS_ENTROPY,
        _tokens, ((512, 8, 32), LARGE, LARGE), RUN, big=True,
        note="ours closes over the weights (declared)",
    ),
    Workload(
        "workloads", "implicit layer",
        of(rules.IMPLICIT, lambda h: lambda params: (h(*params) ** 2).mean()),
        _implicit, ((4, 8), (1024, 256), (8192, 2048)),
        note=f"{rules.ITERATIONS} iterations in either direction; ours closes over w (declared)",
    ),
    Workload(
        "workloads", "LSQ training", _lsq,
        _lsq_arguments, ((8, 16), (4096, 512), (32768, 4096)), RUN,
        note="gradients for weights and step sizes; ours closes over the steps (declared)",
    ),
    Workload(
        "workloads", "spiking network, 1,000 steps", _spiking,
        _spiking_arguments, ((10, 2, 8), (1000, 32, 128), (1000, 256, 1024)),
    ),
    Workload(
        "workloads", "Pallas kernel pair",
        of(rules.PALLAS, lambda h: lambda params: (h(*params) ** 2).mean()),
        lambda shape, dtype: (tuple(normal(seed, shape, dtype) for seed in range(2)),),
        ((8, 16), (512, 256), (1 << 15, 1024)), RUN,
        note="interpreted on a CPU: its time there says nothing",
    ),
    GPT,
)  # fmt: skip


def largest_batch(size: str) -> list[Group]:
    """Ask the compiler how many sequences a step of the whole model can take."""
    shape, budget = TOY, 1e6
    if size != "toy":
        device = jax.devices()[0].memory_stats() or {}
        budget = device.get("bytes_limit", 16e9)
        shape = WHOLE if size == "gpu" else WHOLE._replace(dtype=None)

    @functools.cache
    def needed(way: str, batch: int) -> float:
        m = GPT.compiled("grad", way, shape._replace(batch=batch)).memory_analysis()
        operands = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
        return m.temp_size_in_bytes + operands

    batches = {}
    for way in (PLAIN, OURS) if size == "toy" else GPT.ways:
        low, high = 2, 4
        for _ in range(2):  # the memory is about linear in the batch
            slope = (needed(way, high) - needed(way, low)) / (high - low)
            guess = max(1, int(low + (budget - needed(way, low)) / slope))
            if guess != high:
                low, high = high, guess
        while high and needed(way, high) > budget:
            high -= 1
        while needed(way, high + 1) <= budget:
            high += 1
        batches[way] = float(high)
    note = f"of {shape.length} tokens, {shape.layers} layers, in {budget / 1e9:.3g} GB, not run"
    return [Group("workloads", GPT.name, "largest batch", "sequences", batches, note=note)]
