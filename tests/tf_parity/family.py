"""Rules 64 to 74: `recompute_grad`, `grad_pass_through`, `stop_gradient`."""

import numpy as np

from .case import VALUE_ERROR, Case, case, floats, table


@case(68, 70, ours=[12.0, 12.0])
def recompute_static_arguments(b):
    @b.recompute_grad
    def f(x, mode, flag, n, function=None):
        k = 3.0 if mode == "triple" and flag is True and n == 3 and function is len else 1.0
        return x * x * k

    return b.grads(lambda x: f(x, "triple", True, 3, function=len), 2.0)


@case(69, ours=[[64.0, 192.0, 480.0], [36.0, [18.0, 24.0]]])
def recompute_second_order_everywhere(b):
    f = b.recompute_grad(lambda x: x**3)

    def gradient_at(x, v):
        return b.gradient_of(b.recompute_grad(lambda x: x * x * v * v))(x)

    return [
        b.error(lambda: b.derivatives(lambda x: f(x) ** 2, 2.0, 2)),
        b.error(lambda: b.grads(gradient_at, 2.0, variables=[3.0])),
    ]


@case(70)
def recompute_complex(b):
    y, g = b.grads(lambda z: b.real(b.recompute_grad(lambda z: z * z)(z)), np.complex64(1 + 2j))
    return [y, b.conj(g) if b.is_jax else g]


@case(73)
def pass_through_documented(b):
    """The documented example: y = 9, dy/dz = 6, dy/dx = 0, where x was assigned."""

    def loss(x, z):
        kept = b.grad_pass_through(lambda z: b.stop_gradient(z * 1.0))(z)
        return kept * kept + 0.0 * b.stop_gradient(x)

    return b.grads(loss, 5.0, 3.0)


# fmt: off
table(
    __name__,
    recompute=Case(64, lambda b: b.grads(b.recompute_grad(lambda x: b.sin(x) * x), floats(1, 2, 3),
        upstream=floats(1, 10, 100))),
    recompute_without_arguments=Case(66, lambda b:
        b.grads(lambda v: b.recompute_grad(lambda: v * v)(), variables=[3.0])),
    recompute_variables=Case(67, lambda b: b.grads(lambda x, v, w:
        b.recompute_grad(lambda x: x * x * v + w)(x), 2.0, variables=[3.0, 4.0])),
    recompute_closed_over=Case(67, lambda b: b.grads(lambda x, c:
        b.recompute_grad(lambda x: x * x * c)(x), 2.0, 3.0), ours=[12.0, [12.0, 4.0]]),
    recompute_by_name=Case(68, lambda b: b.grads(lambda x: b.recompute_grad(lambda x: x * x)(x=x),
        2.0), ours=[4.0, 4.0]),
    recompute_forward_mode=Case(69, lambda b: b.jvp(b.recompute_grad(lambda x: x**3), [2.0],
        [1.0]), ours=[8.0, 12.0]),
    pass_through=Case(71, lambda b: b.grads(b.grad_pass_through(b.round), floats(0.4, 1.6, -2.7))),
    pass_through_counts=Case(71, lambda b: [b.error(lambda:
        b.run(b.grad_pass_through(lambda x, y: x * y), 2.0, 3.0)),
        b.error(lambda: len(b.run(b.grad_pass_through(lambda x: (x, x)), 2.0)))]),
    pass_through_keywords=Case(71, lambda b: b.grads(lambda x:
        b.grad_pass_through(lambda x, how="": b.round(x) if how else x)(x, how="y"), floats(1.6)),
        ours=[floats(2), floats(1)]),
    pass_through_of_another_shape=Case(72, lambda b:
        b.grads(b.grad_pass_through(b.sum), floats(1, 2, 3)), ours=VALUE_ERROR),
    pass_through_of_another_dtype=Case(72, lambda b:
        b.grads(b.grad_pass_through(lambda x: b.cast(b.round(x), "float16")), 1.6),
        ours=[np.float16(2), 1.0]),
    pass_through_integer=Case(72, lambda b: b.grads(lambda x:
        b.cast(b.grad_pass_through(lambda x: b.cast(x, "int32"))(x), "float32"), 1.6)),
    pass_through_second_order=Case(72, lambda b:
        b.derivatives(lambda x: b.grad_pass_through(b.round)(x) ** 2, 1.6, 2)),
    stop_gradient_straight_through=Case(74, lambda b:
        b.derivatives(lambda x: x + b.stop_gradient(b.round(x) - x), 1.6, 2)),
    stop_gradient_of_a_structure=Case(74, lambda b: b.run(b.stop_gradient, {"a": 2.0, "b": [3.0]}),
        ours={"a": 2.0, "b": [3.0]}),
)
