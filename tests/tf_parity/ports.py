"""The ports of `examples/ports`, each against the TensorFlow code that it was made from."""

import functools
import importlib

import numpy as np

from .case import case, floats

X = floats(-3.1, -1.2, -0.4, 0.0, 0.3, 0.9, 2.6)
MATRIX = np.asarray([[0.5, -2.0, 0.2], [-0.1, 0.7, 1.5]], np.float32)
ROWS = np.asarray([[1.0, 2.0], [-0.5, 0.25], [0.0, 1.5]], np.float32)


def ported(name, *rules):
    """Add a case that gets the function of this name from its port, or the original."""

    def add(function):
        @case(*rules)
        @functools.wraps(function)
        def answer(b):
            found = importlib.import_module(f"examples.ports.{function.__name__}")
            return function(b, getattr(found, name) if b.is_jax else found.original(b.tf))

    return add


@ported("reverse_gradient", 1, 22, 45)
def gradient_reversal(b, reverse):
    return [
        b.grads(lambda x, k: reverse(x, k) * b.constant(X), X, 0.5),
        b.derivatives(lambda x: b.sin(reverse(x * x, 0.5)), X, 2),
    ]


@ported("clip_gradient", 12, 46)
def clip_gradient(b, clip):
    return [b.grads(lambda x, k=limit: clip(x, k) * b.constant(X), X) for limit in (0.5, 100.0)] + [
        b.grads(lambda x: 0.0 * clip(x, 0.5), X),
        b.derivatives(lambda x: b.sum(clip(x, 0.5) ** 3), floats(0.6, 0.8), 2),
    ]


@ported("quantize", 18, 24)
def learned_quantization(b, quantize):
    return [b.grads(lambda x, s, n=n: quantize(x, s, bits=n) ** 2, X, 0.3) for n in (2, 4)]


@ported("spike", 44, 56)
def spike(b, spike):

    def simulate(currents):
        potential, fired = currents[0] * 0.0, []
        for t in range(4):
            potential = 0.9 * potential + currents[t]
            fired.append(spike(potential - 1.0))
            potential = potential - fired[-1]
        return b.stack(fired)

    nonzero = X[X != 0]  # the derivative of |x| at 0, in the second order, is another convention
    return [
        b.grads(spike, X),
        b.derivatives(spike, nonzero, 2),
        b.grads(simulate, floats(0.6, 0.7, 0.1, 0.9)),
    ]


@ported("focal_loss", 45, 61)
def focal_loss(b, loss):
    labels, far = b.constant(floats(1, 0, 1, 1, 0, 0, 1)), floats(-200, -200, 200, 200)
    return [
        *[b.grads(lambda z, g=g: loss(z, labels, gamma=g), X) for g in (2.0, 1.5)],
        b.derivatives(lambda z: loss(z, labels, gamma=2.0), X, 2),
        b.grads(lambda z: loss(z, b.constant(floats(1, 0, 1, 0)), gamma=2.0), far),
    ]


@ported("cross_entropy", 12, 22)
def fused_cross_entropy(b, cross_entropy):
    weights = b.constant(floats(1, 10))
    labels = np.eye(3, dtype=np.float32)[:2]
    return b.grads(lambda z, t: cross_entropy(z, t) * weights, MATRIX, labels)


@ported("reversible_block", 33, 34, 40)
def reversible_block(b, block):

    def loss(x1, x2, wf, wg):
        weights = ({"f": wf, "g": wg},) if b.is_jax else (wf, wg)
        y1, y2 = block(*weights, *block(*weights, x1, x2))
        return b.sum(y1 * y1) + 3.0 * b.sum(b.sin(y2))

    return b.grads(loss, ROWS, 2.0 * ROWS, variables=[MATRIX[:, :2], 0.5 * MATRIX[:, 1:]])


@ported("matrix_sqrt", 45)
def matrix_sqrt(b, root):
    a = np.asarray([[2.0, 0.5, 0.1], [0.5, 1.5, -0.2], [0.1, -0.2, 3.0]], np.float32)
    weights = b.constant(np.arange(9, dtype=np.float32).reshape(3, 3))
    return [b.grads(lambda a: root(a) * weights, m) for m in (a, np.eye(3, dtype=np.float32))]


@ported("BinaryDense", 33, 36)
def binary_layer(b, make):
    kernel, bias = MATRIX, floats(0.5, 0.0, -0.5)
    if b.is_jax:
        return b.grads(
            lambda x, kernel, bias: b.sum(make({"kernel": kernel, "bias": bias})(x) ** 2),
            ROWS,
            variables=[kernel, bias],
        )
    layer = make(3)
    layer.build((None, 2))
    layer.set_weights([kernel, bias])
    return of_tape(b, lambda x: b.sum(layer(x) ** 2), ROWS, layer.kernel.value, layer.bias.value)


def of_tape(b, f, x, *variables):
    """Return TensorFlow's value and gradients of a function that reads variables of its own."""

    def answer(x):
        with b.tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        return [y, tape.gradient(y, [x, *variables])]

    return b.run(answer, x)


@ported("blur", 47)
def stylegan_blur(b, blur):
    return b.derivatives(lambda x: b.sin(blur(b.sin(blur(x)))), X, 3)


@ported("perturb_and_apply", 33, 40)
def compression_bottleneck(b, apply):
    noise = b.constant(0.4 * np.cos(np.arange(7, dtype=np.float32)))

    def loss(x, scale):
        if b.is_jax:
            return apply(lambda s, x: b.tanh(s * x), scale, x, noise) ** 2
        return apply(lambda x: b.tanh(scale * x), x, noise) ** 2

    return b.grads(loss, X, variables=[np.float32(1.3)])


@ported("causal_numerator", 12)
def favor_attention(b, numerator):
    return b.grads(lambda q, k, v: numerator(q, k, v) ** 2, ROWS, ROWS[::-1] + 1, MATRIX.T)


@ported("integrate", 33, 40)
def chunked_integral(b, integrate):
    points = np.linspace(0.0, 1.0, 12, dtype=np.float32).reshape(3, 4)

    def loss(rate, power):
        if b.is_jax:
            value = integrate(
                lambda p, x: b.exp(-p[0] * x) * (x + 1.0) ** p[1], (rate, power), b.constant(points)
            )
        else:
            value = integrate(lambda x: b.exp(-rate * x) * (x + 1.0) ** power, points)
        return 3.0 * value**2

    return b.grads(loss, variables=[np.float32(0.7), np.float32(1.5)])


@ported("quantize", 33, 37)
def quantizer_range(b, quantize):
    low, high = np.float32(-0.9), np.float32(2.0)
    if b.is_jax:
        return b.grads(
            lambda x, low, high: b.sum(quantize(x, {"low": low, "high": high}) ** 2),
            X,
            variables=[low, high],
        )
    low, high = b.tf.Variable(low, name="low"), b.tf.Variable(high, name="high")
    return of_tape(b, lambda x: b.sum(quantize(x, low, high) ** 2), X, low, high)


@ported("checkpoint", 33, 36)
def checkpointed_layer(b, checkpoint):
    weights = [MATRIX, floats(0.5, 0.0, -0.5)]
    if b.is_jax:
        from examples.ports.checkpointed_layer import Dense

        return b.grads(
            lambda x, w, c: b.sum(checkpoint(Dense({"kernel": w, "bias": c}))(x) ** 2),
            ROWS,
            variables=weights,
        )
    layer = b.tf.keras.layers.Dense(3, activation="tanh")
    layer.build((None, 2))
    layer.set_weights(weights)
    variables = [w.value for w in layer.trainable_weights]
    return of_tape(b, lambda x: b.sum(checkpoint(layer)(x) ** 2), ROWS, *variables)


@ported("quantize_gradient", 12)
def float8_state(b, quantize):
    return [
        b.grads(lambda x, s, h: quantize(x, s, h) ** 3, X, 0.5, history)
        for history in (floats(0, 0, 0), floats(20, 30, 10))
    ]


@ported("data_consistency", 45, 57)
def data_consistency(b, solve):
    masks = np.asarray([[1, 0, 1, 1], [0, 1, 1, 0]], np.complex64)
    strength = np.complex64(0.3)

    def energy(re, im):
        y = solve(b.complex(re, im), b.constant(masks), b.constant(strength))
        return b.abs(y) ** 2 + b.sin(b.real(y))

    image = np.sin(np.arange(8, dtype=np.float32)).reshape(2, 4)
    return b.grads(energy, image, image[::-1])


@ported("log1pexp", 1, 45)
def log1pexp(b, log1pexp):
    return b.derivatives(log1pexp, X, 3)


@ported("ive", 22, 45)
def bessel(b, ive):
    return b.derivatives(lambda z: ive(2, z), floats(0.5, 1.0, 3.0), 2)


@ported("circuit", 16, 45)
def parameter_shift(b, circuit):
    return b.derivatives(lambda a: b.sin(circuit(*b.unstack(a))), floats(0.3, 0.7, 1.1), 2)
