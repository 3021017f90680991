"""Rules 33 to 40: `variables`. A trainable `tf.Variable` there is a differentiated value here."""

import functools

import numpy as np

from .case import Differs, case, floats


def _scaled(b, rule):
    """Return `(x, v) -> f(x)`, where `f` closes over `v` and has the rule."""

    def loss(x, v):
        @b.custom_gradient
        def f(x):
            return x * v, rule

        return f(x)

    return loss


@case(33, 34)
def variables_as_documented(b):
    def loss(x, w):
        @b.custom_gradient
        def linear_poly(x):
            poly = w[1] * x + w[0]

            def grad_fn(dpoly, variables):
                assert len(variables) == 1
                assert variables[0] is w
                dw = dpoly * b.stack([x**1, x**0])
                return dpoly * w[1], [b.sum(b.reshape(dw, [2, -1]), axis=1)]

            return poly, grad_fn

        return linear_poly(x)

    return b.value_and_gradient(loss, floats(1, 2, 3), variables=[floats(1, 1)])


@case(33)
def rule_without_variables(b):
    return b.error(
        lambda: b.value_and_gradient(_scaled(b, lambda dy: dy * 5.0), 2.0, variables=[3.0])
    )


@case(33)
def var_positional_does_not_take_variables(b):
    return b.error(
        lambda: b.value_and_gradient(_scaled(b, lambda *dys: dys[0] * 5.0), 2.0, variables=[3.0])
    )


@case(
    33,
    differs=Differs(
        "a rule without `variables` is an error at every call, differentiated or not",
        "it is an error only when such a value is differentiated",
        {"returns": 6.0},
    ),
)
def rule_without_variables_not_differentiated(b):
    v = b.constant(3.0)
    if not b.is_jax:
        v = b.tf.Variable(v)
    f = b.custom_gradient(lambda x: (x * v, lambda dy: dy * 5.0))
    return b.error(lambda: b.run(f, 2.0))


@case(33)
def signature_forms(b):
    def by_keyword_only(dy, *, variables):
        return dy * 5.0, [dy * 7.0 for _ in variables]

    def by_kwargs(dy, **kwargs):
        return dy * 5.0, [dy * 7.0 for _ in kwargs["variables"]]

    def by_default(dy, variables=None):
        return dy * 5.0, [dy * 7.0 for _ in variables]

    def after_a_default(dy, scale=7.0, variables=None):
        return dy * 5.0, [dy * scale for _ in variables]

    def first(k, dy, variables):
        return dy * 5.0, [dy * k for _ in variables]

    rules = [by_keyword_only, by_kwargs, by_default, after_a_default, functools.partial(first, 7.0)]
    return [b.value_and_gradient(_scaled(b, rule), 2.0, variables=[3.0]) for rule in rules]


@case(34)
def containers(b):
    rules = [
        lambda dy, variables=None: (dy * 5.0, [dy * 7.0]),
        lambda dy, variables=None: [dy * 5.0, [dy * 7.0]],
        lambda dy, variables=None: ([dy * 5.0], [dy * 7.0]),
        lambda dy, variables=None: ((dy * 5.0,), [dy * 7.0]),
    ]
    return [b.value_and_gradient(_scaled(b, rule), 2.0, variables=[3.0]) for rule in rules]


@case(
    34,
    differs=Differs(
        "`grad_vars` must be a list: a tuple is a `TypeError`",
        "a tuple does as well",
        {"returns": [6.0, [5.0, 7.0]]},
    ),
)
def tuple_of_variable_gradients(b):
    rule = lambda dy, variables=None: (dy * 5.0, (dy * 7.0,))  # noqa: E731
    return b.error(lambda: b.value_and_gradient(_scaled(b, rule), 2.0, variables=[3.0]))


@case(34)
def wrong_number_of_variable_gradients(b):
    def loss(rule):
        def of(x, v, w):
            return b.custom_gradient(lambda x: (x * v * w, rule))(x)

        return of

    rules = [
        lambda dy, variables=None: (dy, [dy]),
        lambda dy, variables=None: (dy, [dy, dy, dy]),
        lambda dy, variables=None: (dy, []),
    ]
    return [
        b.error(lambda rule=rule: b.value_and_gradient(loss(rule), 2.0, variables=[3.0, 4.0]))
        for rule in rules
    ]


@case(
    34,
    differs=Differs(
        "None instead of the list of variable gradients is a `TypeError`",
        "None stands for a whole structure of gradients: all zero",
        {"returns": [6.0, [5.0, 0.0]]},
    ),
)
def none_for_all_variables(b):
    rule = lambda dy, variables=None: (dy * 5.0, None)  # noqa: E731
    return b.error(lambda: b.value_and_gradient(_scaled(b, rule), 2.0, variables=[3.0]))


@case(34, graph_differs="the type of the error is `OperatorNotAllowedInGraphError`")
def no_pair(b):
    rule = lambda dy, variables=None: dy  # noqa: E731
    return b.error(lambda: b.value_and_gradient(_scaled(b, rule), 2.0, variables=[3.0]))


@case(
    34,
    differs=Differs(
        "three values instead of the pair are a `ValueError` (too many values to unpack)",
        "anything but a pair is a `TypeError` that says what is expected",
        {"raises": "TypeError"},
    ),
)
def three_values(b):
    rule = lambda dy, variables=None: (dy, dy, dy)  # noqa: E731
    return b.error(lambda: b.value_and_gradient(_scaled(b, rule), 2.0, variables=[3.0]))


@case(34, none_is_zero=True)
def none_for_a_variable(b):
    rule = lambda dy, variables=None: (dy * 5.0, [None])  # noqa: E731
    return b.value_and_gradient(_scaled(b, rule), 2.0, variables=[3.0])


@case(34)
def no_arguments(b):
    def loss(v):
        return b.custom_gradient(lambda: (v * v, lambda dy, variables: ([], [dy * 7.0])))()

    return b.value_and_gradient(loss, variables=[3.0])


@case(35)
def variables_not_passed_if_there_are_none(b):
    def with_default(dy, variables=None):
        b.note(variables)
        return dy * 5.0

    def with_kwargs(dy, **kwargs):
        b.note(sorted(kwargs))
        return dy * 6.0

    return [
        b.value_and_gradient(b.custom_gradient(lambda x, rule=rule: (x * x, rule)), 2.0)
        for rule in (with_default, with_kwargs)
    ]


@case(
    35,
    differs=Differs(
        "a rule that requires `variables` is a `TypeError` if `f` uses none",
        "it gets an empty list",
        {"returns": [4.0, 5.0]},
    ),
)
def required_variables_though_there_are_none(b):
    f = b.custom_gradient(lambda x: (x * x, lambda dy, variables: (dy * 5.0, list(variables))))
    return b.error(lambda: b.value_and_gradient(f, 2.0))


@case(35)
def empty_variable_gradients_though_there_are_none(b):
    f = b.custom_gradient(lambda x: (x * x, lambda dy, variables=None: (dy * 5.0, [])))
    return b.value_and_gradient(f, 2.0)


@case(36)
def listed_once(b):
    def loss(x, v):
        @b.custom_gradient
        def f(x):
            def grad(dy, variables=None):
                b.note(len(variables))
                return dy * 5.0, [dy * 7.0]

            return x * v + v * 1.0 + v * v, grad

        return f(x)

    return b.value_and_gradient(loss, 2.0, variables=[3.0])


def _uses(b, use):
    """Tell whether a variable that is used in this way is listed."""

    def loss(x, v):
        @b.custom_gradient
        def f(x):
            def grad(dy, variables=None):
                b.note(len(variables or ()))
                ones = [dy * b.constant([1.0, 1.0]) for _ in variables or ()]
                return (dy * 5.0, ones) if variables else dy * 5.0

            return use(x, v), grad

        return f(x)

    return b.value_and_gradient(loss, 2.0, variables=[floats(3, 4)])


@case(36)
def ways_of_reading(b):
    compiled = b.compile(lambda x, v: x * v[0])
    uses = [
        lambda x, v: x * v[0],
        lambda x, v: x * b.sum(v * v),
        lambda x, v: x * b.gather(v, [0])[0],
        lambda x, v: b.cond(x > 1.0, lambda: x * v[0], lambda: x * v[1]),
        lambda x, v: compiled(x, b.asarray(v)),
    ]
    return [_uses(b, use) for use in uses]


@case(36, none_is_zero=True)
def what_is_no_reading(b):
    return [
        _uses(b, lambda x, v: x * float(v.shape[0])),
        _uses(b, lambda x, v: x * (1.0 if v is not None else 2.0)),
    ]


@case(
    36,
    differs=Differs(
        "a Variable that `f` reads is listed, even if `y` does not depend on it",
        "`variables` are the values that `y` depends on",
        {"answer": [2.0, [5.0, floats(0, 0)]], "notes": [0]},
    ),
)
def read_without_need(b):
    def use(x, v):
        b.sum(v * 2.0)
        return x * 1.0

    return _uses(b, use)


@case(36)
def variable_behind_stop_gradient(b):
    return _uses(b, lambda x, v: x * b.stop_gradient(v * 1.0)[0])


@case(36)
def used_inside_a_decorated_function(b):
    """The outer rule alone counts, and it is the one that gets the variable."""

    def loss(x, v):
        @b.custom_gradient
        def inner(x):
            return x * v, lambda dy, variables=None: (dy * 50.0, [dy * 70.0])

        @b.custom_gradient
        def outer(x):
            return inner(x) * 2.0, lambda dy, variables=None: (dy * 5.0, [dy * 7.0])

        return outer(x)

    return b.value_and_gradient(loss, 2.0, variables=[3.0])


@case(36)
def outer_rule_needs_variables_too(b):
    def loss(x, v):
        @b.custom_gradient
        def inner(x):
            return x * v, lambda dy, variables=None: (dy * 50.0, [dy * 70.0])

        return b.custom_gradient(lambda x: (inner(x) * 2.0, lambda dy: dy * 5.0))(x)

    return b.error(lambda: b.value_and_gradient(loss, 2.0, variables=[3.0]))


@case(37)
def variables_are_matched_by_identity(b):
    def loss(x, v, w):
        @b.custom_gradient
        def f(x):
            def grad(dy, variables=None):
                return dy, [dy * u * (10.0 if u is v else 100.0) for u in variables]

            return x * v * w, grad

        return f(x)

    return b.value_and_gradient(loss, 2.0, variables=[3.0, 4.0])


@case(38)
def value_that_is_not_differentiated(b):
    v = b.constant(3.0) if b.is_jax else b.tf.Variable(3.0, trainable=False)
    f = b.custom_gradient(lambda x: (x * v, lambda dy: dy * 5.0))
    return b.value_and_gradient(f, 2.0)


@case(38)
def one_differentiated_and_one_not(b):
    frozen = b.constant(3.0) if b.is_jax else b.tf.Variable(3.0, trainable=False)

    def loss(x, v):
        @b.custom_gradient
        def f(x):
            def grad(dy, variables=None):
                b.note(len(variables))
                return dy * 5.0, [dy * 7.0]

            return x * v * frozen, grad

        return f(x)

    return b.value_and_gradient(loss, 2.0, variables=[4.0])


@case(38, none_is_zero=True)
def used_by_the_rule_alone(b):
    def loss(x, v):
        return b.custom_gradient(lambda x: (x * 2.0, lambda dy: dy * v))(x)

    return b.value_and_gradient(loss, 2.0, variables=[3.0])


@case(38, 45)
def used_by_the_rule_alone_second_order(b):
    def gradient_at(v):
        f = b.custom_gradient(lambda x: (x * 2.0, lambda dy: dy * v * v))
        return b.gradient_of(f)(b.constant(2.0))

    return b.value_and_gradient(gradient_at, 3.0)


@case(
    39,
    differs=Differs(
        "a Variable that is both argument and closed over: eager mode counts the argument alone, "
        "graph mode adds both gradients",
        "both count, and their gradients are added, as in TensorFlow's graph mode",
        [9.0, 12.0],
    ),
)
def argument_and_closed_over(b):
    def loss(v):
        @b.custom_gradient
        def f(x):
            def grad(dy, variables=None):
                return (dy * 5.0, [dy * 7.0]) if variables else dy * 5.0

            return x * v, grad

        return f(v)

    return b.value_and_gradient(loss, variables=[3.0])


@case(39)
def argument_and_another_closed_over(b):
    def loss(x, v, w):
        @b.custom_gradient
        def f(a, x):
            def grad(dy, variables=None):
                assert len(variables) == 1
                assert variables[0] is w
                return (dy * 1.0, dy * 10.0), [dy * 100.0]

            return a * x * w, grad

        return f(v, x)

    return b.value_and_gradient(loss, 2.0, variables=[3.0, 4.0])


@case(40)
def gradients_accumulate(b):
    def loss(x, v):
        f = b.custom_gradient(lambda x: (x * v, lambda dy, variables=None: (dy * 5.0, [dy * 7.0])))
        return f(x) + f(2.0 * x) + v

    return b.value_and_gradient(loss, 2.0, variables=[3.0])


@case(40)
def the_variable_is_the_only_source(b):
    def loss(x, v):
        return b.custom_gradient(
            lambda x: (x * v, lambda dy, variables=None: (dy * 5.0, [dy * x * 7.0]))
        )(x)

    return b.value_and_gradient(loss, 2.0, wrt=[], variables=[3.0])


@case(40, 45)
def second_order_with_variables(b):
    def loss(x, v):
        f = b.custom_gradient(
            lambda x: (x * v, lambda dy, variables=None: (dy * b.sin(x) * v, [dy * x * v]))
        )
        return b.gradient_of(f)(x)

    return b.value_and_gradient(loss, 2.0, variables=[3.0])


@case(40)
def variables_of_a_structure(b):
    """The rule returns gradients for several arrays, of different shapes."""

    def loss(x, w, bias):
        @b.custom_gradient
        def f(x):
            def grad(dy, variables=None):
                known = {id(w): b.ones_like(w) * 7.0, id(bias): b.ones_like(bias) * 9.0}
                return dy * 5.0, [known[id(u)] * b.sum(dy) for u in variables]

            return x * b.sum(w) + bias, grad

        return f(x)

    return b.value_and_gradient(loss, floats(1, 2), variables=[np.ones((2, 2), np.float32), 3.0])


@case(
    34,
    differs=Differs(
        "in eager mode a variable gradient of another shape is handed back as it is",
        "it is a `ValueError`, as for inputs",
        {"raises": "ValueError"},
    ),
)
def variable_gradient_of_a_wrong_shape(b):
    def loss(x, v):
        return b.custom_gradient(
            lambda x: (x * b.sum(v), lambda dy, variables=None: (dy * 5.0, [dy * 7.0]))
        )(x)

    return b.error(lambda: b.value_and_gradient(loss, 2.0, variables=[floats(3, 4)]))


@case(36)
def layer_of_a_model(b):
    """A method that reads the weights of its object."""

    class Dense:
        def __init__(self, w, bias):
            self.w, self.bias = w, bias

        @b.custom_gradient
        def __call__(self, x):
            def grad(dy, variables=None):
                known = {id(self.w): 7.0 * x * dy, id(self.bias): 9.0 * dy}
                return 5.0 * dy * self.w, [known[id(u)] for u in variables]

            return x * self.w + self.bias, grad

    return b.value_and_gradient(lambda x, w, c: Dense(w, c)(x), 2.0, variables=[3.0, 4.0])
