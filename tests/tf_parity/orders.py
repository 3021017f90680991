"""Rules 45 to 50: second and higher derivatives."""

from .case import TYPE_ERROR, Case, case, sine_rule, table


def _calls_itself(b):
    h = b.custom(lambda x: (x**3, lambda dy: dy * 10.0 * h(x)))
    return h


def _decorated_grad_fn(b):
    @b.custom
    def f(x):
        @b.custom
        def grad_fn(dy):
            return dy * 3.0 * x**2, lambda ddy: 1000.0 * ddy

        return x**3, grad_fn

    return f


def _fused(b, gradients):
    """Return the documented `op_with_fused_backprop`, whose inner rule returns `gradients`."""

    @b.custom
    def op_with_fused_backprop(x):
        y, x_grad = x**3, 3.0 * x**2

        def first_order_gradient(dy):
            @b.custom
            def first_order_custom(unused_x):
                return x_grad, lambda ddy: gradients(ddy, x)

            return dy * first_order_custom(x)

        return y, first_order_gradient

    return op_with_fused_backprop


@case(48, 49, ours=[8.0, 12.0, 12.0, 6.0])
def fused_backprop_as_documented_and_as_ported(b):
    one = b.is_jax
    op = _fused(b, lambda ddy, x: ddy * 6.0 * x if one else (ddy * 6.0 * x, ddy * 100.0))
    return b.derivatives(op, 2.0, 3)


@case(50, ours=[100.0, 1.0, 0.0])
def log1pexp_as_documented_and_as_ported(b):
    from examples.ports.log1pexp import log1pexp, original

    return b.derivatives(log1pexp if b.is_jax else original(b.tf), 100.0, 2)


# fmt: off
table(
    __name__,
    derivative_of_the_rule=Case(45, lambda b: b.derivatives(sine_rule(b), 2.0, 3)),
    rule_calls_its_own_function=Case(45, lambda b: b.derivatives(_calls_itself(b), 2.0, 3)),
    nonlinear_in_the_upstream=Case(46, lambda b:
        b.derivatives(lambda x: 3.0 * b.custom(lambda x: (x**2, lambda dy: dy * dy * x))(x) * x,
        2.0, 2)),
    decorated_grad_fn=Case(47, lambda b: b.derivatives(_decorated_grad_fn(b), 2.0, 2),
        ours=TYPE_ERROR),
    rule_calls_its_own_function_compiled=Case(49, lambda b:
        b.derivatives(b.compile(_calls_itself(b)), 2.0, 2), ours=[8.0, 80.0, 800.0],
        modes=("eager",)),
)
