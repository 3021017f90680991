"""Rules 41 to 44: values that `f` closes over and that are no Variables; unconnected values."""

from .case import Differs, case


@case(
    41,
    differs=Differs(
        "a closed-over tensor that is watched silently gets None",
        "to differentiate it is a `TypeError` that lists the remedies",
        {"raises": "TypeError"},
        better=True,
    ),
)
def watched_value(b):
    def loss(x, c):
        return b.custom_gradient(lambda x: (x * c, lambda dy: dy * 5.0))(x)

    return b.error(lambda: b.value_and_gradient(loss, 2.0, 3.0))


@case(
    42,
    differs=Differs(
        "if the closed-over tensor alone is watched, eager mode gives it the ordinary gradient "
        "and graph mode None",
        "to differentiate it is a `TypeError` that lists the remedies",
        {"raises": "TypeError"},
        better=True,
    ),
)
def only_the_closed_over_value_is_watched(b):
    def loss(x, c):
        return b.custom_gradient(lambda x: (x * c, lambda dy: dy * 5.0))(x)

    return b.error(lambda: b.value_and_gradient(loss, 2.0, 3.0, wrt=[1]))


@case(
    42,
    differs=Differs(
        "`f()` that closes over a watched tensor: eager mode gives the ordinary gradient, "
        "graph mode None",
        "to differentiate it is a `TypeError` that lists the remedies",
        {"raises": "TypeError"},
    ),
)
def no_arguments(b):
    def loss(c):
        return b.custom_gradient(lambda: (c * c, lambda dy: []))()

    return b.error(lambda: b.value_and_gradient(loss, 3.0))


@case(
    41,
    differs=Differs(
        "a closed-over intermediate value carries no gradient, silently",
        "to differentiate it is a `TypeError` that lists the remedies",
        {"raises": "TypeError"},
    ),
)
def intermediate_value(b):
    def loss(x):
        h = x * x
        return b.custom_gradient(lambda u: (u * h, lambda dy: dy * 5.0))(3.0 * x)

    return b.error(lambda: b.value_and_gradient(loss, 2.0))


@case(41)
def intermediate_value_stopped(b):
    """What TensorFlow does silently, said: the remedy that keeps its numbers."""

    def loss(x):
        h = b.stop_gradient(x * x)
        return b.custom_gradient(lambda u: (u * h, lambda dy: dy * 5.0))(3.0 * x)

    return b.value_and_gradient(loss, 2.0)


@case(41)
def value_that_is_not_watched(b):
    def loss(x, c):
        return b.custom_gradient(lambda x: (x * c, lambda dy: dy * 5.0 * c))(x)

    return b.value_and_gradient(loss, 2.0, 3.0, wrt=[0])


@case(41, graph_differs="the type of the error is `InternalError`")
def extra_gradient(b):
    c = b.constant(3.0)
    f = b.custom_gradient(lambda x: (x * c, lambda dy: (dy * 5.0, dy * 7.0)))
    return b.error(lambda: b.value_and_gradient(f, 2.0))


@case(43)
def used_by_the_rule_second_order(b):
    def gradient_at(c, x):
        f = b.custom_gradient(lambda u: (u * 3.0, lambda dy: dy * c * u))
        return b.gradient_of(f)(x)

    return b.value_and_gradient(gradient_at, 3.0, 2.0)


@case(43)
def intermediate_values_kept_for_the_rule(b):
    @b.custom_gradient
    def f(x):
        s, c = b.sin(x), b.cos(x)
        return s, lambda dy: dy * c * 5.0

    return b.derivatives(f, 0.7, 2)


@case(44)
def stop_gradient_inside(b):
    f = b.custom_gradient(lambda x: (b.stop_gradient(x * x), lambda dy: dy * 5.0))
    return b.value_and_gradient(f, 2.0)


@case(44)
def f_ignores_its_input(b):
    f = b.custom_gradient(lambda x: (b.constant(7.0), lambda dy: dy * 5.0))
    return b.value_and_gradient(f, 2.0)


@case(44)
def operation_without_a_gradient(b):
    f = b.custom_gradient(lambda x: (b.floor(x) + b.sign(x), lambda dy: dy * 5.0))
    return b.value_and_gradient(f, 2.5)


@case(44)
def integers_inside(b):
    f = b.custom_gradient(lambda x: (b.cast(b.cast(x, "int32"), "float32"), lambda dy: dy * 5.0))
    return b.value_and_gradient(f, 2.5)


@case(62)
def outer_rule_hides_the_inner_one(b):
    inner = b.custom_gradient(lambda x: (x * 2.0, lambda dy: dy * 100.0))
    outer = b.custom_gradient(lambda x: (inner(x) * 3.0, lambda dy: dy * 5.0))
    return b.value_and_gradient(outer, 2.0)


@case(62)
def inner_rule_differentiated_in_the_outer_one(b):
    inner = b.custom_gradient(lambda x: (x * 2.0, lambda dy: dy * 100.0))

    @b.custom_gradient
    def outer(x):
        def grad(dy):
            return dy * b.gradient_of(lambda x: inner(x) * 3.0)(x)

        return inner(x) * 3.0, grad

    return b.value_and_gradient(outer, 2.0)
