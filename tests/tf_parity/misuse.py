"""Rules 60 and 61, and the table of misuses: what is raised, and when."""

import concurrent.futures

import numpy as np

from .case import Differs, case


class _OursError(Exception):
    pass


@case(60)
def error_in_f(b):
    def f(x):
        raise _OursError

    return b.error(lambda: b.run(b.custom_gradient(f), 2.0))


@case(60)
def error_in_grad_fn(b):
    def raising(error):
        def grad(dy):
            raise error

        return b.custom_gradient(lambda x: (x * x, grad))

    errors = [_OursError("a"), ValueError("b"), KeyError("c"), NotImplementedError(), TypeError()]
    return [b.error(lambda e=e: b.value_and_gradient(raising(e), 2.0)) for e in errors]


@case(60)
def error_in_grad_fn_is_not_met_without_a_gradient(b):
    def grad(dy):
        raise _OursError

    return b.run(b.custom_gradient(lambda x: (x * x, grad)), 2.0)


@case(60)
def all_goes_on_after_an_error(b):
    def grad(dy):
        raise _OursError

    f = b.custom_gradient(lambda x: (x * x, grad))
    h = b.custom_gradient(lambda x: (x * x, lambda dy: dy * 5.0))
    return [b.error(lambda: b.value_and_gradient(f, 2.0)), b.value_and_gradient(h, 2.0)]


@case(60, graph_differs="the type of the error is `OperatorNotAllowedInGraphError`")
def y_alone(b):
    return b.error(lambda: b.run(b.custom_gradient(lambda x: x * x), 2.0))


@case(
    5,
    modes=("eager",),
    differs=Differs(
        "`return y` of a `y` of length two unpacks into y and grad_fn: `unsupported callable`",
        "the second of the two is no function: `TypeError` that says so",
        {"raises": "TypeError", "says": True},
    ),
)
def y_alone_of_length_two(b):
    f = b.custom_gradient(lambda x: x * x)
    try:
        b.run(f, np.asarray([3, 4], np.float32))
    except TypeError as error:
        return {"raises": "TypeError", "says": "grad_fn" in str(error)}


@case(
    60,
    differs=Differs(
        "three results of `f` are a `ValueError` (too many values to unpack)",
        "anything but a pair is a `TypeError` that says what is expected",
        {"raises": "TypeError"},
    ),
)
def three_results(b):
    f = b.custom_gradient(lambda x: (x * x, lambda dy: dy, 1))
    return b.error(lambda: b.run(f, 2.0))


@case(60)
def no_result(b):
    return b.error(lambda: b.run(b.custom_gradient(lambda x: None), 2.0))


@case(
    21,
    60,
    differs=Differs(
        "the message counts gradients (`expected to return 2 gradients, but returned 1`)",
        "the message also names the function, the rule and the inputs",
        [True, True, True],
    ),
    modes=("eager",),
)
def what_the_message_names(b):
    @b.custom_gradient
    def energy(weights, bias):
        def energy_rule(dy):
            return dy, dy, dy

        return weights * bias, energy_rule

    try:
        b.value_and_gradient(energy, 2.0, 3.0)
    except ValueError as error:
        return [word in str(error) for word in ("energy", "energy_rule", "weights")]


@case(
    33,
    41,
    modes=("eager",),
    differs=Differs(
        "the message lists the Variables",
        "the message gives dtype, shape and line of each closed-over value, and the remedies",
        [True, True, True, True],
    ),
)
def what_the_message_about_closed_over_values_names(b):
    def loss(x, v):
        return b.custom_gradient(lambda x: (x * b.sum(v), lambda dy: dy * 5.0))(x)

    try:
        b.value_and_gradient(loss, 2.0, variables=[np.ones((2, 3), np.float32)])
    except TypeError as error:
        words = ("float32[2, 3]", "misuse.py", "variables", "autodiff")
        return [word in str(error) for word in words]


@case(61, modes=("eager",))
def assertion_in_the_rule(b):
    def grad(dy):
        assert float(dy) < 1.0, "too big"
        return dy

    return b.error(lambda: b.value_and_gradient(b.custom_gradient(lambda x: (x * x, grad)), 2.0))


@case(21, 22, graph_differs="the type of the error is `InternalError`")
def two_nones_for_one_input(b):
    f = b.custom_gradient(lambda x: (x * x, lambda dy: (None, None)))
    return b.error(lambda: b.value_and_gradient(f, 2.0))


@case(63, modes=("eager",))
def threads(b):
    f = b.custom_gradient(lambda x: (x**3, lambda dy: dy * b.sin(x)))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda x: b.derivatives(f, x, 2), [0.5, 1.0, 2.0, 3.0]))
