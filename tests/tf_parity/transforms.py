"""Rules 51 to 56: forward mode (TensorFlow's `ForwardAccumulator`), Jacobians, control flow."""

from .case import TYPE_ERROR, Case, by, case, floats, scaled, sine_rule, square, table


@case(51, ours=[TYPE_ERROR] * 3)
def forward_nonlinear_rules(b):
    rules = [lambda dy: dy * dy * 5.0, lambda dy: dy * 5.0 + 1.0, lambda dy: b.maximum(dy, 0.0)]
    return [b.error(lambda r=r: b.jvp(square(b, r), [2.0], [1.0])) for r in rules]


def _without_a_derivative(b):
    return b.jvp(b.custom(lambda x: (b.stop_gradient(x**3), by(5.0))), [2.0], [1.0])


@case(45, 56)
def second_order_through_cond(b):
    def loss(x):
        return b.cond(x > 1.0, lambda: sine_rule(b)(x) ** 2, lambda: x * 1.0)

    return b.derivatives(loss, 2.0, 2)


# fmt: off
table(
    __name__,
    forward_one_input=Case(51, lambda b: b.jvp(b.custom(lambda x: (x * 3.0, by(5.0))), [2.0],
        [1.0]), ours=[6.0, 5.0]),
    forward_without_a_gradient=Case(51, lambda b: b.jvp(square(b, by(None)), [2.0], [1.0]),
        ours=[4.0, 0.0]),
    forward_closed_over_tangent=Case(51, lambda b:
        b.jvp(scaled(b, by(5.0)), [2.0, 3.0], [1.0, 10.0]), ours=TYPE_ERROR),
    f_without_an_ordinary_derivative_compiled=Case(52, _without_a_derivative, ours=[8.0, 5.0],
        modes=("graph",)),
    forward_over_reverse=Case(53, lambda b: b.jvp(b.gradient_of(sine_rule(b)), [floats(1, 2)],
        [floats(1, 10)])),
    hessian=Case((45, 54), lambda b: b.jacobian(b.gradient_of(b.custom(lambda x:
        (b.sum(x**3), lambda dy: dy * b.sin(x)))), floats(1, 2))),
    rule_that_needs_values_in_a_jacobian=Case(54, lambda b:
        b.jacobian(square(b, lambda dy: dy * float(b.sum(dy))), floats(1, 2)),
        ours={"raises": "ConcretizationTypeError"}, modes=("eager",)),
    gradient_of_a_vectorized_function=Case(55, lambda b:
        b.grads(lambda x: b.vectorized_map(square(b, by(5.0)), x), floats(1, 2, 3)),
        ours=[floats(1, 4, 9), floats(5, 5, 5)]),
    vectorized_gradient=Case(55, lambda b: b.run(lambda x:
        b.vectorized_map(b.gradient_of(sine_rule(b)), x), floats(1, 2, 3))),
)
