"""Rules 33 to 44 and 62: `variables`, and what else `f` closes over.

A trainable `tf.Variable` there is a differentiated value here.
"""

from .case import TYPE_ERROR, VALUE_ERROR, Case, by, case, floats, scaled, square, table


def _rule(rule):
    """Return a case: the gradients of `x * v` with the rule."""
    return lambda b: b.grads(scaled(b, rule), 2.0, variables=[3.0])


@case(33, 34, 37)
def variables_as_documented(b):
    def loss(x, w):
        @b.custom
        def linear_poly(x):
            poly = w[1] * x + w[0]

            def grad_fn(dpoly, variables):
                assert len(variables) == 1
                assert variables[0] is w
                dw = dpoly * b.stack([x**1, x**0])
                return dpoly * w[1], [b.sum(b.reshape(dw, [2, -1]), axis=1)]

            return poly, grad_fn

        return linear_poly(x)

    return b.grads(loss, floats(1, 2, 3), variables=[floats(1, 1)])


def not_differentiated(b, **options):
    """Return a value to close over that no tape watches."""
    return b.constant(3.0) if b.is_jax else b.tf.Variable(3.0, **options)


def inner_decorated_function(b, outer_rule):
    """The outer rule alone counts, and it is the one that gets the variable."""

    def loss(x, v):
        inner = b.custom(lambda x: (x * v, by(50.0, variable=70.0)))
        return b.custom(lambda x: (inner(x) * 2.0, outer_rule))(x)

    return b.grads(loss, 2.0, variables=[3.0])


@case(38)
def one_differentiated_and_one_not(b):
    frozen = not_differentiated(b, trainable=False)

    def both(x, v):
        return b.custom(lambda x: (x * v * frozen, by(5.0, variable=7.0)))(x)

    return [b.grads(scaled(b, by(5.0)), 2.0, frozen, wrt=[0]), b.grads(both, 2.0, variables=[4.0])]


@case(38, 43, 45)
def used_by_the_rule_alone_second_order(b):
    def gradient_at(v):
        f = b.custom(lambda x: (x * 2.0, lambda dy: dy * v * v))
        return b.gradient_of(f)(b.constant(2.0))

    return b.grads(gradient_at, 3.0)


def either(dy, variables=None):
    return (dy * 5.0, [dy * 7.0]) if variables else dy * 5.0


# fmt: off
table(
    __name__,
    rule_without_variables=Case(33, lambda b: [b.error(lambda rule=rule:
        b.grads(scaled(b, rule), 2.0, variables=[3.0])) for rule in (by(5.0), lambda *dys:
        dys[0] * 5.0)]),
    rule_without_variables_not_differentiated=Case(33, lambda b:
        b.run(lambda x: scaled(b, by(5.0))(x, not_differentiated(b)), 2.0), ours=6.0),
    tuple_of_variable_gradients=Case(34, _rule(lambda dy, variables=None: (dy * 5.0, (dy * 7.0,))),
        ours=[6.0, [5.0, 7.0]]),
    none_for_all_variables=Case(34, _rule(lambda dy, variables=None: (dy * 5.0, None)),
        ours=[6.0, [5.0, 0.0]]),
    three_values=Case(34, _rule(lambda dy, variables=None: (dy, dy, dy)), ours=TYPE_ERROR),
    variable_gradient_of_a_wrong_shape=Case(34, lambda b:
        b.grads(lambda x, v: b.custom(lambda x: (x * b.sum(v), by(5.0, variable=7.0)))(x), 2.0,
        variables=[floats(3, 4)]), ours=VALUE_ERROR),
    required_variables_though_there_are_none=Case(35, lambda b:
        b.grads(square(b, lambda dy, variables: (dy * 5.0, list(variables))), 2.0),
        ours=[4.0, 5.0]),
    used_inside_a_decorated_function=Case(36, lambda b:
        inner_decorated_function(b, by(5.0, variable=7.0))),
    argument_and_closed_over=Case(39, lambda b:
        b.grads(lambda v: scaled(b, either)(v, v), variables=[3.0]), ours=[9.0, 12.0]),
    watched_value=Case(41, lambda b: b.grads(scaled(b, by(5.0)), 2.0, 3.0), ours=TYPE_ERROR),
    only_the_closed_over_value_is_watched=Case(42, lambda b:
        b.grads(scaled(b, by(5.0)), 2.0, 3.0, wrt=[1]), ours=TYPE_ERROR),
    outer_rule_hides_the_inner_one=Case(62, lambda b:
        b.declared(lambda x: (b.custom(lambda x: (x * 2.0, by(100.0)))(x) * 3.0, by(5.0)), 2.0)),
)
