"""The ports of `examples/ports`, each against the TensorFlow code that it was made from."""

import importlib

import numpy as np

from .case import Case, floats, table

X = floats(-3.1, -1.2, -0.4, 0.0, 0.3, 0.9, 2.6)
MATRIX = np.asarray([[0.5, -2.0, 0.2], [-0.1, 0.7, 1.5]], np.float32)
ROWS = np.asarray([[1.0, 2.0], [-0.5, 0.25], [0.0, 1.5]], np.float32)


def port(b, module, function):
    """Return the function of this backend."""
    found = importlib.import_module(f"examples.ports.{module}")
    return getattr(found, function) if b.is_jax else found.original(b.tf)


def gradient_reversal(b):
    reverse = port(b, "gradient_reversal", "reverse_gradient")
    return [
        b.grads(lambda x, k: reverse(x, k) * b.constant(X), X, 0.5),
        b.derivatives(lambda x: b.sin(reverse(x * x, 0.5)), X, 2),
    ]


def clip_gradient(b):
    clip = port(b, "clip_gradient", "clip_gradient")
    return [b.grads(lambda x, k=limit: clip(x, k) * b.constant(X), X) for limit in (0.5, 100.0)] + [
        b.grads(lambda x: 0.0 * clip(x, 0.5), X),
        b.derivatives(lambda x: b.sum(clip(x, 0.5) ** 3), floats(0.6, 0.8), 2),
    ]


def learned_quantization(b):
    quantize = port(b, "learned_quantization", "quantize")
    return [b.grads(lambda x, s, n=n: quantize(x, s, bits=n) ** 2, X, 0.3) for n in (2, 4)]


def spike(b):
    spike = port(b, "spike", "spike")

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


def focal_loss(b):
    loss = port(b, "focal_loss", "focal_loss")
    labels, far = b.constant(floats(1, 0, 1, 1, 0, 0, 1)), floats(-200, -200, 200, 200)
    return [
        *[b.grads(lambda z, g=g: loss(z, labels, gamma=g), X) for g in (2.0, 1.5)],
        b.derivatives(lambda z: loss(z, labels, gamma=2.0), X, 2),
        b.grads(lambda z: loss(z, b.constant(floats(1, 0, 1, 0)), gamma=2.0), far),
    ]


def fused_cross_entropy(b):
    cross_entropy = port(b, "fused_cross_entropy", "cross_entropy")
    weights = b.constant(floats(1, 10))
    labels = np.eye(3, dtype=np.float32)[:2]
    return b.grads(lambda z, t: cross_entropy(z, t) * weights, MATRIX, labels)


def reversible_block(b):
    block = port(b, "reversible_block", "reversible_block")

    def loss(x1, x2, wf, wg):
        weights = ({"f": wf, "g": wg},) if b.is_jax else (wf, wg)
        y1, y2 = block(*weights, *block(*weights, x1, x2))
        return b.sum(y1 * y1) + 3.0 * b.sum(b.sin(y2))

    return b.grads(loss, ROWS, 2.0 * ROWS, variables=[MATRIX[:, :2], 0.5 * MATRIX[:, 1:]])


def matrix_sqrt(b):
    root = port(b, "matrix_sqrt", "matrix_sqrt")
    a = np.asarray([[2.0, 0.5, 0.1], [0.5, 1.5, -0.2], [0.1, -0.2, 3.0]], np.float32)
    weights = b.constant(np.arange(9, dtype=np.float32).reshape(3, 3))
    return [b.grads(lambda a: root(a) * weights, m) for m in (a, np.eye(3, dtype=np.float32))]


def binary_layer(b):
    kernel, bias = MATRIX, floats(0.5, 0.0, -0.5)
    make = port(b, "binary_layer", "BinaryDense")
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


def stylegan_blur(b):
    blur = port(b, "stylegan_blur", "blur")
    return b.derivatives(lambda x: b.sin(blur(b.sin(blur(x)))), X, 3)


def compression_bottleneck(b):
    apply = port(b, "compression_bottleneck", "perturb_and_apply")
    noise = b.constant(0.4 * np.cos(np.arange(7, dtype=np.float32)))

    def loss(x, scale):
        if b.is_jax:
            return apply(lambda s, x: b.tanh(s * x), scale, x, noise) ** 2
        return apply(lambda x: b.tanh(scale * x), x, noise) ** 2

    return b.grads(loss, X, variables=[np.float32(1.3)])


def favor_attention(b):
    numerator = port(b, "favor_attention", "causal_numerator")
    return b.grads(lambda q, k, v: numerator(q, k, v) ** 2, ROWS, ROWS[::-1] + 1, MATRIX.T)


def chunked_integral(b):
    integrate = port(b, "chunked_integral", "integrate")
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


def quantizer_range(b):
    quantize, low, high = port(b, "quantizer_range", "quantize"), np.float32(-0.9), np.float32(2.0)
    if b.is_jax:
        return b.grads(
            lambda x, low, high: b.sum(quantize(x, {"low": low, "high": high}) ** 2),
            X,
            variables=[low, high],
        )
    low, high = b.tf.Variable(low, name="low"), b.tf.Variable(high, name="high")
    return of_tape(b, lambda x: b.sum(quantize(x, low, high) ** 2), X, low, high)


def checkpointed_layer(b):
    weights = [MATRIX, floats(0.5, 0.0, -0.5)]
    checkpoint = port(b, "checkpointed_layer", "checkpoint")
    if b.is_jax:
        make = port(b, "checkpointed_layer", "Dense")
        return b.grads(
            lambda x, w, c: b.sum(checkpoint(make({"kernel": w, "bias": c}))(x) ** 2),
            ROWS,
            variables=weights,
        )
    layer = b.tf.keras.layers.Dense(3, activation="tanh")
    layer.build((None, 2))
    layer.set_weights(weights)
    variables = [w.value for w in layer.trainable_weights]
    return of_tape(b, lambda x: b.sum(checkpoint(layer)(x) ** 2), ROWS, *variables)


def float8_state(b):
    quantize = port(b, "float8_state", "quantize_gradient")
    return [
        b.grads(lambda x, s, h: quantize(x, s, h) ** 3, X, 0.5, history)
        for history in (floats(0, 0, 0), floats(20, 30, 10))
    ]


def data_consistency(b):
    solve = port(b, "data_consistency", "data_consistency")
    masks = np.asarray([[1, 0, 1, 1], [0, 1, 1, 0]], np.complex64)
    strength = np.complex64(0.3)

    def energy(re, im):
        y = solve(b.complex(re, im), b.constant(masks), b.constant(strength))
        return b.abs(y) ** 2 + b.sin(b.real(y))

    image = np.sin(np.arange(8, dtype=np.float32)).reshape(2, 4)
    return b.grads(energy, image, image[::-1])


# fmt: off
table(
    __name__,
    log1pexp=Case((1, 45), lambda b: b.derivatives(port(b, "log1pexp", "log1pexp"), X, 3)),
    gradient_reversal=Case((1, 22, 45), gradient_reversal),
    clip_gradient=Case((12, 46), clip_gradient),
    learned_quantization=Case((18, 24), learned_quantization),
    spike=Case((44, 56), spike),
    focal_loss=Case((45, 61), focal_loss),
    fused_cross_entropy=Case((12, 22), fused_cross_entropy),
    reversible_block=Case((33, 34, 40), reversible_block),
    matrix_sqrt=Case(45, matrix_sqrt),
    binary_layer=Case((33, 36), binary_layer),
    stylegan_blur=Case(47, stylegan_blur),
    compression_bottleneck=Case((33, 40), compression_bottleneck),
    favor_attention=Case(12, favor_attention),
    chunked_integral=Case((33, 40), chunked_integral),
    quantizer_range=Case((33, 37), quantizer_range),
    bessel=Case((22, 45), lambda b: b.derivatives(lambda z: port(b, "bessel", "ive")(2, z),
        floats(0.5, 1.0, 3.0), 2)),
    parameter_shift=Case((16, 45), lambda b: b.derivatives(lambda a:
        b.sin(port(b, "parameter_shift", "circuit")(*b.unstack(a))), floats(0.3, 0.7, 1.1), 2)),
    checkpointed_layer=Case((33, 36), checkpointed_layer),
    float8_state=Case(12, float8_state),
    data_consistency=Case((45, 57), data_consistency),
)
