"""The ports of `examples/ports`, each against the TensorFlow code that it was made from."""

import importlib

import numpy as np
import pytest

from .case import case, floats

X = floats(-3.1, -1.2, -0.4, 0.0, 0.3, 0.9, 2.6)
MATRIX = np.asarray([[0.5, -2.0, 0.2], [-0.1, 0.7, 1.5]], np.float32)
ROWS = np.asarray([[1.0, 2.0], [-0.5, 0.25], [0.0, 1.5]], np.float32)


def port(b, module, function):
    """Return the function of this backend."""
    found = importlib.import_module(f"examples.ports.{module}")
    return getattr(found, function) if b.is_jax else found.original(b.tf)


@case(1, 45)
def log1pexp(b):
    return b.derivatives(port(b, "log1pexp", "log1pexp"), X, 3)


@case(1, 45)
def gradient_reversal(b):
    reverse = port(b, "gradient_reversal", "reverse_gradient")
    return [
        b.value_and_gradient(lambda x: reverse(x, 0.5) * b.constant(X), X),
        b.derivatives(lambda x: b.sin(reverse(x * x, 0.5)), X, 2),
    ]


@case(18, 22, none_is_zero=True)
def gradient_reversal_with_a_watched_strength(b):
    reverse = port(b, "gradient_reversal", "reverse_gradient")
    return b.value_and_gradient(lambda x, k: reverse(x, k) * x, X, 0.5)


@case(12, 46)
def clip_gradient(b):
    clip = port(b, "clip_gradient", "clip_gradient")
    return [
        b.value_and_gradient(lambda x, k=limit: clip(x, k) * b.constant(X), X)
        for limit in (0.5, 100.0)
    ] + [b.derivatives(lambda x: b.sum(clip(x, 0.5) ** 3), floats(0.6, 0.8), 2)]


@case(12)
def clip_gradient_of_zero(b):
    clip = port(b, "clip_gradient", "clip_gradient")
    return b.value_and_gradient(lambda x: 0.0 * clip(x, 0.5), X)


@case(18, 24)
def learned_quantization(b):
    quantize = port(b, "learned_quantization", "quantize")
    return [
        b.value_and_gradient(lambda x, s, n=bits: quantize(x, s, bits=n) ** 2, X, 0.3)
        for bits in (2, 4)
    ]


@case(44)
def spike(b):
    spike = port(b, "spike", "spike")
    nonzero = X[X != 0]  # the derivative of |x| at 0, in the second order, is another convention
    return [b.value_and_gradient(spike, X), b.derivatives(spike, nonzero, 2)]


@case(44, 56)
def spiking_neuron(b):
    spike = port(b, "spike", "spike")

    def simulate(currents):
        potential, fired = currents[0] * 0.0, []
        for t in range(4):
            potential = 0.9 * potential + currents[t]
            fired.append(spike(potential - 1.0))
            potential = potential - fired[-1]
        return b.stack(fired)

    return b.value_and_gradient(simulate, floats(0.6, 0.7, 0.1, 0.9))


@case(45)
def focal_loss(b):
    loss = port(b, "focal_loss", "focal_loss")
    labels = b.constant(floats(1, 0, 1, 1, 0, 0, 1))
    return [
        b.value_and_gradient(lambda z, g=gamma: loss(z, labels, gamma=g), X) for gamma in (2.0, 1.5)
    ] + [b.derivatives(lambda z: loss(z, labels, gamma=2.0), X, 2)]


@case(61)
def focal_loss_far_out(b):
    loss = port(b, "focal_loss", "focal_loss")
    labels = b.constant(floats(1, 0, 1, 0))
    return b.value_and_gradient(
        lambda z: loss(z, labels, gamma=2.0), floats(-200.0, -200.0, 200.0, 200.0)
    )


@case(12, 22)
def fused_cross_entropy(b):
    cross_entropy = port(b, "fused_cross_entropy", "cross_entropy")
    labels = b.constant(np.eye(3, dtype=np.float32)[:2])
    weights = b.constant(floats(1, 10))
    return b.value_and_gradient(lambda z: cross_entropy(z, labels) * weights, MATRIX)


@case(22, none_is_zero=True)
def fused_cross_entropy_of_watched_labels(b):
    cross_entropy = port(b, "fused_cross_entropy", "cross_entropy")
    return b.value_and_gradient(cross_entropy, MATRIX, np.eye(3, dtype=np.float32)[:2])


@case(33, 34)
def reversible_block(b):
    block = port(b, "reversible_block", "reversible_block")
    wf, wg = MATRIX[:, :2], MATRIX[:, 1:]

    def loss(x1, x2, wf, wg):
        y1, y2 = block({"f": wf, "g": wg}, x1, x2) if b.is_jax else block(wf, wg, x1, x2)
        return b.sum(y1 * y1) + 3.0 * b.sum(b.sin(y2))

    return b.value_and_gradient(loss, ROWS, 2.0 * ROWS, variables=[wf, wg])


@case(33, 40)
def two_reversible_blocks_with_the_same_weights(b):
    block = port(b, "reversible_block", "reversible_block")

    def loss(x1, x2, wf, wg):
        weights = ({"f": wf, "g": wg},) if b.is_jax else (wf, wg)
        y1, y2 = block(*weights, *block(*weights, x1, x2))
        return b.sum(y1 * y2)

    return b.value_and_gradient(
        loss, ROWS, 2.0 * ROWS, variables=[MATRIX[:, :2], 0.5 * MATRIX[:, 1:]]
    )


@case(45)
def matrix_sqrt(b):
    root = port(b, "matrix_sqrt", "matrix_sqrt")
    a = np.asarray([[2.0, 0.5, 0.1], [0.5, 1.5, -0.2], [0.1, -0.2, 3.0]], np.float32)
    weights = b.constant(np.arange(9, dtype=np.float32).reshape(3, 3))
    return [
        b.value_and_gradient(lambda a: root(a) * weights, a),
        b.value_and_gradient(lambda a: root(a) * weights, np.eye(3, dtype=np.float32)),
    ]


@case(33, 36)
def binary_layer(b):
    kernel = MATRIX
    bias = floats(0.5, 0.0, -0.5)
    if b.is_jax:
        make = port(b, "binary_layer", "BinaryDense")

        def loss(x, kernel, bias):
            return b.sum(make({"kernel": kernel, "bias": bias})(x) ** 2)

        return b.value_and_gradient(loss, ROWS, variables=[kernel, bias])
    layer = port(b, "binary_layer", "BinaryDense")(3)
    layer.build((None, 2))
    layer.set_weights([kernel, bias])
    variables = [layer.kernel.value, layer.bias.value]

    def answer(x):
        with b.tf.GradientTape() as tape:
            tape.watch(x)
            y = b.sum(layer(x) ** 2)
        return [y, tape.gradient(y, [x, *variables])]

    return b.run(answer, ROWS)


@case(1, 44, modes=("eager",))
def training_run(b):
    """A differentiable sign, trained by Adam: every tenth of 100 steps."""

    @b.custom_gradient
    def sign(x):
        s = b.sigmoid(x)
        return b.sign(x), lambda dy: dy * s * (1 - s)

    def loss(x):
        return b.sum((sign(x) - 1.0) ** 2) / 2

    if b.is_jax:
        optax = pytest.importorskip("optax")
        adam = optax.adam(1e-1, eps=1e-7)

        @b.jax.jit
        def step(x, state):
            updates, state = adam.update(b.jax.grad(loss)(x), state)
            return optax.apply_updates(x, updates), state

        x = b.constant(-1.0)
        state, xs = adam.init(x), []
        for _ in range(100):
            x, state = step(x, state)
            xs.append(x)
        return b.stack(xs[9::10])
    x = b.tf.Variable(-1.0)
    adam, xs = b.tf.keras.optimizers.Adam(1e-1), []
    for _ in range(100):
        with b.tf.GradientTape() as tape:
            y = loss(x)
        adam.apply_gradients([(tape.gradient(y, x), x)])
        xs.append(b.tf.identity(x))
    return b.stack(xs[9::10])
