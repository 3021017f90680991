"""Rules 54 to 56: Jacobians, vectorization, control flow."""

import numpy as np

from .case import Differs, case, floats


@case(54)
def jacobian(b):
    f = b.custom_gradient(lambda x: (x**2, lambda dy: dy * b.sin(x) * 5.0))
    return b.jacobian(f, floats(1, 2, 3))


@case(54)
def jacobian_of_another_shape(b):
    @b.custom_gradient
    def f(x):
        y = b.stack([x[0] * x[1], x[2]])
        return y, lambda dy: b.stack([dy[0] * 2.0, dy[0] * 3.0, dy[1] * 4.0])

    return b.jacobian(f, floats(1, 2, 3))


@case(54)
def batch_jacobian(b):
    f = b.custom_gradient(
        lambda x: (b.stack([x[:, 0] * x[:, 1], x[:, 0]], axis=1), lambda dy: dy * 10.0)
    )
    x = np.asarray([[1, 2], [3, 4]], np.float32)

    def of(x):
        if b.is_jax:
            return b.jax.vmap(b.jax.jacrev(lambda row: f(row[None])[0]))(x)
        with b.tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        return tape.batch_jacobian(y, x)

    return b.run(of, x)


@case(45, 54)
def hessian(b):
    f = b.custom_gradient(lambda x: (b.sum(x**3), lambda dy: dy * b.sin(x)))
    return b.jacobian(b.gradient_of(f), floats(1, 2))


@case(
    54,
    modes=("eager",),
    differs=Differs(
        "a rule that needs values (`float(dy)`, a Python `if`) fails under `tape.jacobian`",
        "so does it under `jacrev`, by a tracer error of JAX",
        {"raises": "ConcretizationTypeError"},
    ),
)
def rule_that_needs_values_in_a_jacobian(b):
    f = b.custom_gradient(lambda x: (x**2, lambda dy: dy * float(b.sum(dy))))
    return b.error(lambda: b.jacobian(f, floats(1, 2)))


@case(
    55,
    differs=Differs(
        "`tf.vectorized_map` inside a tape silently loses the declared gradient",
        "`vmap` keeps it",
        [floats(1, 4, 9), floats(5, 5, 5)],
        better=True,
    ),
)
def gradient_of_a_vectorized_function(b):
    f = b.custom_gradient(lambda x: (x * x, lambda dy: dy * 5.0))
    return b.value_and_gradient(lambda x: b.vectorized_map(f, x), floats(1, 2, 3))


@case(55)
def gradient_of_a_mapped_function(b):
    f = b.custom_gradient(lambda x: (x * x, lambda dy: dy * 5.0))
    return b.value_and_gradient(lambda x: b.map_fn(f, x), floats(1, 2, 3))


@case(55)
def vectorized_gradient(b):
    f = b.custom_gradient(lambda x: (x**3, lambda dy: dy * b.sin(x)))
    return b.run(lambda x: b.vectorized_map(b.gradient_of(f), x), floats(1, 2, 3))


@case(55)
def mapped_gradient(b):
    f = b.custom_gradient(lambda x: (x**3, lambda dy: dy * b.sin(x)))
    return b.run(lambda x: b.map_fn(b.gradient_of(f), x), floats(1, 2, 3))


@case(
    55,
    differs=Differs(
        "the outer gradient of a Jacobian loses the rule of a decorated function in `grad_fn`",
        "the rule is kept",
        floats(100, 100),
        better=True,
    ),
)
def gradient_of_a_jacobian(b):
    h = b.custom_gradient(lambda u: (u * 1.0, lambda d: d * 100.0))
    f = b.custom_gradient(lambda x: (x**3, lambda dy: h(dy * x)))

    def total(x):
        if b.is_jax:
            return b.sum(b.jax.jacrev(f)(x))
        with b.tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = f(x)
        return b.sum(tape.jacobian(y, x))

    return b.value_and_gradient(total, floats(1, 2))[1]


@case(56)
def loop(b):
    f = b.custom_gradient(lambda y: (y * y, lambda dy: dy * y))
    return b.value_and_gradient(lambda x: b.repeat(3, f, x), 2.0)


@case(56)
def loop_with_values_kept_for_the_rule(b):
    @b.custom_gradient
    def f(y):
        c = b.cos(y)
        return b.sin(y), lambda dy: 3.0 * dy * c

    return b.value_and_gradient(lambda x: b.repeat(4, f, x), 0.7)


@case(56)
def loop_inside_the_function(b):
    @b.custom_gradient
    def f(x):
        return b.repeat(3, lambda y: y * x, x), lambda dy: b.repeat(2, lambda d: d * 5.0, dy)

    return b.value_and_gradient(f, 2.0)


@case(33, 56)
def loop_with_variables(b):
    def loss(x, v):
        f = b.custom_gradient(lambda y: (y * v, lambda dy, variables=None: (dy * 2.0, [dy * 7.0])))
        return b.repeat(2, f, x)

    return b.value_and_gradient(loss, 2.0, variables=[3.0])


@case(56)
def scan(b):
    f = b.custom_gradient(lambda y: (y * 1.0, lambda dy: dy * 2.0))
    return b.value_and_gradient(lambda x: b.scan(lambda a, e: f(a * e), x), floats(1, 2, 3))


@case(45, 56)
def second_order_through_a_loop(b):
    """Linear in h, so that its value is not needed in the first derivative."""
    f = b.custom_gradient(lambda y: (y * 2.0, lambda dy: dy * 3.0))
    return b.derivatives(lambda x: b.repeat(2, f, x) * x, 2.0, 2)


@case(56)
def cond(b):
    f = b.custom_gradient(lambda x: (x * x, lambda dy: dy * 5.0))
    h = b.custom_gradient(lambda x: (x * x, lambda dy: dy * 6.0))

    def loss(x):
        return b.cond(x > 1.0, lambda: f(x), lambda: h(x))

    return [b.value_and_gradient(loss, 2.0), b.value_and_gradient(loss, 0.5)]


@case(45, 56, graph_differs="second order through `tf.cond` is a bare `AssertionError`")
def second_order_through_cond(b):
    f = b.custom_gradient(lambda x: (x**3, lambda dy: dy * b.sin(x)))

    def loss(x):
        return b.cond(x > 1.0, lambda: f(x) ** 2, lambda: x * 1.0)

    return b.error(lambda: b.derivatives(loss, 2.0, 2))


@case(56)
def numpy_function(b):
    @b.custom_gradient
    def f(x):
        return b.numpy_function(np.sin, x), lambda dy: dy * b.numpy_function(np.cos, x)

    return b.value_and_gradient(f, 2.0)


@case(9, 56)
def gradient_of_a_compiled_function(b):
    f = b.custom_gradient(lambda x: (x**3, lambda dy: dy * b.sin(x)))
    return b.derivatives(b.compile(f), 2.0, 2)
