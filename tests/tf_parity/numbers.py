"""Rules 57 to 59 and 61: complex numbers, dtypes, what is not finite."""

import numpy as np

from .case import Differs, case

Z = np.complex64(1 + 2j)
W = np.complex64(3 - 1j)


def _losses(b):
    return [
        lambda y: y,
        lambda y: b.real(y),
        lambda y: b.imag(y),
        lambda y: b.abs(y) ** 2,
    ]


def _by_z(b, f, z=Z):
    """Return the gradients of losses of f, as TensorFlow has them: conjugated for JAX."""
    answers = []
    for loss in _losses(b):
        y, g = b.value_and_gradient(lambda z, loss=loss: loss(f(z)), z)
        answers.append([y, b.conj(g) if b.is_jax else g])
    return answers


@case(57)
def what_tensorflow_calls_the_gradient(b):
    """Without a custom gradient: TensorFlow's is the conjugate of JAX's."""
    w = b.constant(W)
    return [_by_z(b, lambda z: z * w), _by_z(b, lambda z: z * z), _by_z(b, b.exp)]


@case(57)
def product(b):
    w = b.constant(W)
    return _by_z(b, b.custom_gradient(lambda z: (z * w, lambda dy: dy * b.conj(w))))


@case(57)
def square(b):
    return _by_z(b, b.custom_gradient(lambda z: (z * z, lambda dy: dy * b.conj(2 * z))))


@case(57)
def wrong_on_purpose(b):
    w = b.constant(W)
    return _by_z(b, b.custom_gradient(lambda z: (z * w, lambda dy: dy * w * 7.0)))


@case(57)
def upstream_as_it_comes(b):
    """The rule's arguments, not only its product with them: dL/dRe + i dL/dIm."""
    return _by_z(b, b.custom_gradient(lambda z: (z * 2.0, lambda dy: dy * dy * 1j)))


@case(57)
def explicit_upstream(b):
    f = b.custom_gradient(lambda z: (z * z, lambda dy: dy * b.conj(2 * z)))
    u = np.complex64(0.5 - 3j)
    y, g = b.value_and_gradient(f, Z, upstream=np.conj(u) if b.is_jax else u)
    return [y, b.conj(g) if b.is_jax else g]


@case(57)
def chained(b):
    f = b.custom_gradient(lambda z: (z * z, lambda dy: dy * b.conj(2 * z) * 5.0))
    h = b.custom_gradient(lambda z: (b.exp(z), lambda dy: dy * b.conj(b.exp(z)) * 3.0))
    return _by_z(b, lambda z: h(f(z) * 0.1) * z)


@case(57, double=True)
def complex128(b):
    f = b.custom_gradient(lambda z: (z * z * z, lambda dy: dy * b.conj(3 * z * z)))
    return _by_z(b, f, np.complex128(1 + 2j))


@case(45, 57)
def second_order(b):
    """d/dz of |dL/dz|^2, where L = Re f(z)."""
    f = b.custom_gradient(lambda z: (z * z * z, lambda dy: dy * b.conj(3 * z * z) * 5.0))

    def squared(z):
        g = b.gradient_of(lambda z: b.real(f(z)))(z)
        return b.real(g * b.conj(g))

    y, g = b.value_and_gradient(squared, Z)
    return [y, b.conj(g) if b.is_jax else g]


@case(58)
def real_output(b):
    @b.custom_gradient
    def magnitude(z):
        def grad(dy):
            b.seen(dy)
            return b.cast(dy, "complex64") * z / b.cast(b.abs(z), "complex64") * 5.0

        return b.abs(z), grad

    y, g = b.value_and_gradient(lambda z: 3.0 * magnitude(z), Z)
    return [y, b.conj(g) if b.is_jax else g]


@case(58)
def real_input(b):
    @b.custom_gradient
    def f(x):
        def grad(dy):
            b.seen(dy)
            return b.real(dy) + b.imag(dy) * 2.0 * x

        return b.complex(x, x * x), grad

    return [b.value_and_gradient(lambda x, loss=loss: loss(f(x)), 2.0) for loss in _losses(b)]


@case(
    58,
    differs=Differs(
        "a real gradient of a complex input is handed back as it is",
        "it is a `TypeError` that says how to convert it",
        {"raises": "TypeError"},
    ),
)
def real_gradient_of_a_complex_input(b):
    f = b.custom_gradient(lambda z: (b.abs(z), lambda dy: dy * 5.0))
    return b.error(lambda: b.value_and_gradient(f, Z))


@case(
    58,
    differs=Differs(
        "a complex gradient of a real input is handed back as it is",
        "it is a `TypeError` that says how to take its real part",
        {"raises": "TypeError"},
    ),
)
def complex_gradient_of_a_real_input(b):
    f = b.custom_gradient(lambda x: (b.complex(x, x * x), lambda dy: dy * 5.0))
    return b.error(lambda: b.value_and_gradient(f, 2.0))


@case(22, 57, none_is_zero=True)
def none_for_a_complex_input(b):
    f = b.custom_gradient(lambda z, x: (z * b.complex(x, x), lambda dy: (None, b.real(dy))))
    return b.value_and_gradient(lambda z, x: b.real(f(z, x)), Z, 2.0)


@case(33, 57)
def complex_variables(b):
    def loss(z, v):
        @b.custom_gradient
        def f(z):
            def grad(dy, variables=None):
                return dy * b.conj(v * 1.0), [dy * b.conj(z) * 7.0]

            return z * v, grad

        return b.imag(f(z))

    y, (gz, gv) = b.value_and_gradient(loss, Z, variables=[W])
    return [y, b.conj(gz), b.conj(gv)] if b.is_jax else [y, gz, gv]


@case(52, 58)
def forward_mode(b):
    """A holomorphic function has the same tangent in both conventions."""
    w = b.constant(W)
    f = b.custom_gradient(lambda z: (z * w, lambda dy: dy * b.conj(w)))
    return [b.jvp(f, [Z], [np.complex64(t)]) for t in (1, 1j)]


@case(59, double=True)
def every_precision(b):
    @b.custom_gradient
    def f(x):
        def grad(dy):
            b.seen(dy)
            return dy * 5

        return x * x, grad

    dtypes = ["float16", "bfloat16", "float32", "float64"]
    return [b.value_and_gradient(f, b.constant(2.0, dtype)) for dtype in dtypes]


@case(59)
def mixed_precision_cast(b):
    @b.custom_gradient
    def f(x):
        def grad(dy):
            b.seen(dy)
            return b.cast(dy, "float16") * 5

        return b.cast(x, "float32") * 3.0, grad

    return b.value_and_gradient(f, b.constant(2.0, "float16"))


@case(
    24,
    59,
    differs=Differs(
        "a float32 gradient of a float16 input is handed back as it is, an error further down",
        "it is cast to the dtype of its input",
        [{"returns": [6.0, np.float16(5)]}, {"returns": [12.0, np.float16(10)]}],
    ),
)
def mixed_precision_not_cast(b):
    f = b.custom_gradient(lambda x: (b.cast(x, "float32") * 3.0, lambda dy: dy * 5.0))
    x = b.constant(2.0, "float16")
    return [
        b.error(lambda: b.value_and_gradient(f, x)),
        b.error(lambda: b.value_and_gradient(lambda x: f(x * 2), x)),
    ]


@case(59)
def python_numbers_are_weak(b):
    f = b.custom_gradient(lambda x: (x * x, lambda dy: dy * 5.0 + 1))
    h = b.custom_gradient(lambda x: (x * x, lambda dy: dy * np.float32(5.0)))
    return [b.value_and_gradient(f, b.constant(2.0, "float16")), b.value_and_gradient(h, 2.0)]


@case(59)
def gradients_beyond_the_range(b):
    f = b.custom_gradient(lambda x: (x * x, lambda dy: dy * float("nan")))
    h = b.custom_gradient(lambda x: (x * x, lambda dy: dy / 0.0))
    return [b.value_and_gradient(f, 2.0), b.value_and_gradient(h, 2.0)]


@case(61)
def nan_times_a_zero_upstream(b):
    f = b.custom_gradient(lambda x: (x * x, lambda dy: dy * float("nan")))
    return b.value_and_gradient(f, 2.0, upstream=0.0)
