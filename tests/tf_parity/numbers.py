"""Rules 57 to 59 and 61: complex numbers, dtypes, what is not finite."""

import numpy as np

from .case import TYPE_ERROR, Case, by, square, table

Z = np.complex64(1 + 2j)
W = np.complex64(3 - 1j)


def _losses(b):
    return [lambda y: y, lambda y: b.real(y), lambda y: b.imag(y), lambda y: b.abs(y) ** 2]


def _theirs(b, answer):
    """Return a value and its gradient as TensorFlow has them: conjugated for JAX."""
    y, g = answer
    return [y, b.conj(g) if b.is_jax else g]


def _by_z(b, f, z=Z):
    return [_theirs(b, b.grads(lambda z, loss=loss: loss(f(z)), z)) for loss in _losses(b)]


# fmt: off
table(
    __name__,
    what_tensorflow_calls_the_gradient=Case(57, lambda b: _by_z(b, lambda z: z * b.constant(W))),
    wrong_on_purpose=Case(57, lambda b: _by_z(b,
        b.custom(lambda z: (z * z, lambda dy: dy * z * 7.0)))),
    real_gradient_of_a_complex_input=Case(58, lambda b:
        b.declared(lambda z: (b.abs(z), by(5.0)), Z), ours=TYPE_ERROR),
    complex_gradient_of_a_real_input=Case(58, lambda b:
        b.declared(lambda x: (b.complex(x, x * x), by(5.0)), 2.0), ours=TYPE_ERROR),
    python_numbers_are_weak=Case(59, lambda b:
        b.grads(square(b, lambda dy: dy * 5.0 + 1), b.constant(2.0, "float16"))),
    gradients_beyond_the_range=Case(61, lambda b:
        [b.grads(square(b, rule), 2.0, upstream=u) for rule in (by(float("nan")), lambda dy:
        dy / 0.0) for u in (1.0, 0.0, float("inf"))]),
)
