"""Rules 45 to 50: second and higher derivatives."""

import numpy as np

from .case import Differs, case, floats


@case(45)
def derivative_of_the_rule(b):
    f = b.custom_gradient(lambda x: (x**3, lambda dy: dy * b.sin(x)))
    return b.derivatives(f, 2.0, 3)


@case(45)
def log1pexp(b):
    @b.custom_gradient
    def log1pexp(x):
        e = b.exp(x)
        return b.log(1 + e), lambda upstream: upstream * (1 - 1 / (1 + e))

    return b.derivatives(log1pexp, 1.0, 3)


@case(45)
def rule_uses_the_inner_value(b):
    """`y` inside is f's own, so its derivative there is the ordinary one."""

    @b.custom_gradient
    def f(x):
        y = x**3
        return y, lambda dy: dy * 0.1 * y

    return b.derivatives(f, 2.0, 3)


@case(45)
def rule_calls_its_own_function(b):
    def f(x):
        return x**3, lambda dy: dy * 10.0 * h(x)

    h = b.custom_gradient(f)
    return b.derivatives(h, 2.0, 3)


@case(45)
def two_rules_call_each_other(b):
    def f(x):
        return b.sin(x), lambda dy: dy * 2.0 * h(x)

    def g(x):
        return b.cos(x), lambda dy: dy * -3.0 * k(x)

    k, h = b.custom_gradient(f), b.custom_gradient(g)
    return b.derivatives(k, 0.7, 3)


@case(45)
def nonlinear_use(b):
    """h(x)**2: the value of h in the first derivative has the declared derivative in the next."""
    f = b.custom_gradient(lambda x: (x**3, lambda dy: dy * b.sin(x)))
    return b.derivatives(lambda x: f(x) ** 2, 2.0, 3)


@case(45)
def wrong_on_purpose_and_squared(b):
    f = b.custom_gradient(lambda x: (x**2, lambda dy: dy * 7.0 * x))
    return b.derivatives(lambda x: f(x) ** 2, 2.0, 3)


@case(45)
def composed(b):
    f = b.custom_gradient(lambda x: (b.sin(x), lambda dy: dy * 3.0 * b.cos(x)))
    return b.derivatives(lambda x: f(f(x) * x), 0.7, 2)


@case(45)
def two_outputs(b):
    @b.custom_gradient
    def f(x):
        return (x**2, b.sin(x)), lambda da, db: da * 5.0 * x * x + db * 7.0 * b.cos(x)

    def loss(x):
        first, second = f(x)
        return first * second

    return b.derivatives(loss, 0.7, 2)


@case(45, none_is_zero=True)
def hessian_of_two_inputs(b):
    """The Hessian of the declared gradients, which is not symmetric."""
    f = b.custom_gradient(lambda x, y: (x * y, lambda dy: (dy * y**2, dy * x**3)))

    def row(i):
        return lambda x, y: b.gradient_of(f)(x, y)[i]

    return [b.value_and_gradient(row(i), 2.0, 3.0) for i in range(2)]


@case(45)
def rule_differentiates(b):
    """The rule takes the derivative of f's own operations, by a nested gradient."""

    def value(x):
        return x**3

    f = b.custom_gradient(lambda x: (value(x), lambda dy: dy * 2.0 * b.gradient_of(value)(x)))
    return b.derivatives(f, 2.0, 3)


@case(45)
def vector_derivatives(b):
    f = b.custom_gradient(lambda x: (b.sum(x**3), lambda dy: dy * b.sin(x) * 5.0))
    return b.derivatives(f, floats(0.5, 1.0, 2.0), 2)


@case(45)
def matrix_second_order(b):
    @b.custom_gradient
    def f(w, x):
        y = b.sum(w * x)
        return y, lambda dy: (dy * x * x, dy * w * w)

    def penalty(w, x):
        gw, gx = b.gradient_of(f)(w, x)
        return b.sum(gw * gw) + b.sum(gx)

    return b.value_and_gradient(penalty, floats(1, 2), floats(3, 4))


@case(45, 12)
def derivative_by_the_upstream(b):
    """The gradient is a function of its upstream too."""
    f = b.custom_gradient(lambda x: (x**3, lambda dy: dy * b.sin(x)))
    inner = b.gradient_of(lambda x, u: f(x) * u)
    return b.value_and_gradient(lambda x, u: inner(x, u)[0], 2.0, 3.0)


@case(46, none_is_zero=True)
def constant_rule(b):
    f = b.custom_gradient(lambda x: (x * x, lambda dy: b.constant(5.0)))
    return b.derivatives(f, 2.0, 2)


@case(46, none_is_zero=True, modes=("eager",))
def rule_in_numpy(b):
    f = b.custom_gradient(lambda x: (x * x, lambda dy: dy * float(np.sin(2.0))))
    return b.derivatives(f, 2.0, 2)


@case(46, none_is_zero=True)
def stop_gradient_in_the_rule(b):
    f = b.custom_gradient(lambda x: (x**3, lambda dy: dy * b.stop_gradient(b.sin(x))))
    return b.derivatives(f, 2.0, 2)


@case(46)
def nonlinear_in_the_upstream(b):
    f = b.custom_gradient(lambda x: (x**2, lambda dy: dy * dy * x))
    return b.derivatives(lambda x: 3.0 * f(x) * x, 2.0, 2)


@case(46)
def clipping_rule(b):
    f = b.custom_gradient(lambda x: (x**2, lambda dy: b.minimum(dy, 2.0) * 3.0 * x))
    return b.derivatives(lambda x: f(x) ** 2, 0.4, 2)


@case(
    47,
    differs=Differs(
        "a decorated `grad_fn` that closes over `x`: eager mode differentiates it ordinarily if "
        "the upstream is not watched, graph mode gives None",
        "what a rule closes over is constant for the decorated functions in it: zero, at every "
        "order",
        [8.0, 12.0, 0.0],
    ),
)
def decorated_grad_fn(b):
    @b.custom_gradient
    def f(x):
        @b.custom_gradient
        def grad_fn(dy):
            return dy * 3.0 * x**2, lambda ddy: 1000.0 * ddy

        return x**3, grad_fn

    return b.derivatives(f, 2.0, 2)


@case(47)
def decorated_grad_fn_in_a_chain(b):
    @b.custom_gradient
    def f(x):
        @b.custom_gradient
        def grad_fn(dy):
            return dy * 3.0 * x**2, lambda ddy: 1000.0 * ddy

        return x**3, grad_fn

    return b.derivatives(lambda x: f(x) ** 2, 2.0, 2)


def _as_printed(b, gradients):
    """Return the documented `op_with_fused_backprop`, whose inner rule returns `gradients`."""

    @b.custom_gradient
    def op_with_fused_backprop(x):
        y, x_grad = x**3, 3.0 * x**2

        def first_order_gradient(dy):
            @b.custom_gradient
            def first_order_custom(unused_x):
                def second_order_and_transpose(ddy):
                    return gradients(ddy, x)

                return x_grad, second_order_and_transpose

            return dy * first_order_custom(x)

        return y, first_order_gradient

    return op_with_fused_backprop


@case(48, graph_differs="the type of the error is `InternalError`")
def fused_backprop_as_printed(b):
    op = _as_printed(b, lambda ddy, x: (ddy * 6.0 * x, ddy * 100.0))
    return [b.derivatives(op, 2.0, 1), b.error(lambda: b.derivatives(op, 2.0, 2))]


@case(
    48,
    differs=Differs(
        "the documented `op_with_fused_backprop` raises at second order: its inner rule returns "
        "two gradients for one input",
        "the port returns one, and has every order (as printed, the error names the input)",
        {"returns": [8.0, 12.0, 12.0, 6.0]},
        better=True,
    ),
)
def fused_backprop_as_documented_and_as_ported(b):
    one = b.is_jax
    op = _as_printed(b, lambda ddy, x: ddy * 6.0 * x if one else (ddy * 6.0 * x, ddy * 100.0))
    return b.error(lambda: b.derivatives(op, 2.0, 3))


@case(
    49,
    modes=("eager",),
    differs=Differs(
        "a rule that calls a decorated function raises (`out of scope`) when `tf.function(f)` is "
        "differentiated twice from outside",
        "the declared second derivative, however the compilation is nested",
        {"returns": [8.0, 12.0, 1200.0]},
        better=True,
    ),
)
def fused_backprop_of_a_compiled_function(b):
    return b.error(lambda: b.derivatives(b.compile(_fused(b)), 2.0, 2))


@case(
    49,
    modes=("eager",),
    differs=Differs(
        "a rule that calls its own function raises (`out of scope`) when `tf.function(f)` is "
        "differentiated twice from outside",
        "the rule again, at every order",
        {"returns": [8.0, 80.0, 800.0]},
    ),
)
def rule_calls_its_own_function_compiled(b):
    def f(x):
        return x**3, lambda dy: dy * 10.0 * h(x)

    h = b.custom_gradient(f)
    return b.error(lambda: b.derivatives(b.compile(h), 2.0, 2))


@case(
    50,
    modes=("eager",),
    differs=Differs(
        "the documented `log1pexp` under `tf.function` has a NaN for its first derivative at 100 "
        "if two tapes watch its input",
        "the gradient is 1, however the function is compiled and differentiated",
        1.0,
        better=True,
    ),
)
def log1pexp_compiled_at_100_under_two_gradients(b):
    @b.compile
    @b.custom_gradient
    def log1pexp(x):
        e = b.exp(x)
        return b.log(1 + e), lambda upstream: upstream * (1 - 1 / (1 + e))

    if b.is_jax:
        return b.jax.vjp(b.gradient_of(log1pexp), b.constant(100.0))[0]
    x = b.constant(100.0)
    with b.tf.GradientTape() as outer:
        outer.watch(x)
        return b.gradient_of(log1pexp)(x)


def _fused(b):
    @b.custom_gradient
    def op(x):
        y, x_grad = x**3, 3.0 * x**2

        def first_order_gradient(dy):
            @b.custom_gradient
            def first_order_custom(unused_x):
                return x_grad, lambda ddy: ddy * 600.0 * x

            return dy * first_order_custom(x)

        return y, first_order_gradient

    return op


@case(48, 49)
def fused_backprop(b):
    op = _fused(b)
    return [
        b.derivatives(op, 2.0, 3),
        b.derivatives(lambda x: 5.0 * op(2.0 * x), 2.0, 2),
        b.derivatives(lambda x: op(x) ** 2, 2.0, 2),
    ]


@case(48, 49)
def fused_backprop_of_two_inputs(b):
    @b.custom_gradient
    def op(x):
        def first_order_gradient(dy):
            @b.custom_gradient
            def first_order_custom(unused_x, unused_dy):
                def second_order_and_transpose(ddy):
                    return ddy * dy * 600.0 * x, ddy * 30.0 * x**2

                return dy * 3.0 * x**2, second_order_and_transpose

            return first_order_custom(x, dy)

        return x**3, first_order_gradient

    return [b.derivatives(op, 2.0, 2), b.derivatives(lambda x: op(x) ** 2, 2.0, 2)]


@case(48)
def hessian_of_fused_backprop(b):
    op = _fused(b)
    return b.jacobian(b.gradient_of(lambda x: b.sum(op(x))), floats(1, 2))


@case(50)
def log1pexp_at_100(b):
    """The documented example: its gradient is right, its value is not."""

    @b.custom_gradient
    def log1pexp(x):
        e = b.exp(x)
        return b.log(1 + e), lambda upstream: upstream * (1 - 1 / (1 + e))

    return [b.value_and_gradient(log1pexp, 100.0), b.derivatives(log1pexp, 100.0, 2)]


@case(50)
def log1pexp_undecorated_at_100(b):
    return b.value_and_gradient(lambda x: b.log(1 + b.exp(x)), 100.0)


@case(
    50,
    differs=Differs(
        "the documented `log1pexp` returns inf at 100, and its second derivative is NaN",
        "the port in `examples/ports/log1pexp.py` returns 100, and its derivatives are right",
        [100.0, 1.0, 0.0],
        better=True,
    ),
)
def log1pexp_as_documented_and_as_ported(b):
    if b.is_jax:
        from examples.ports.log1pexp import log1pexp
    else:
        from examples.ports.log1pexp import original

        log1pexp = original(b.tf)
    return b.derivatives(log1pexp, 100.0, 2)
