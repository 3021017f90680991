"""Rules 64 to 74: `recompute_grad`, `grad_pass_through`, `stop_gradient`."""

import collections

import numpy as np

from .case import Differs, case, floats

Pair = collections.namedtuple("Pair", "q p")


def _body(b):
    return lambda x: b.sin(x) * x


@case(64)
def recompute(b):
    return b.value_and_gradient(b.recompute_grad(_body(b)), 2.0)


@case(64)
def recompute_of_a_vector_and_an_upstream(b):
    f = b.recompute_grad(_body(b))
    return b.value_and_gradient(f, floats(1, 2, 3), upstream=floats(1, 10, 100))


@case(64)
def recompute_in_a_chain(b):
    f = b.recompute_grad(_body(b))
    return b.value_and_gradient(lambda x: f(f(x) * 2.0) + x, 0.7)


@case(64, modes=("eager",))
def recompute_runs_again(b):
    @b.recompute_grad
    def f(x):
        b.note("f")
        return b.sin(x) * x

    return b.run(f, 2.0)


@case(64, modes=("eager",))
def recompute_metadata(b):
    def f(x):
        """What f does."""
        return x

    h = b.recompute_grad(f)
    b.note(h.__name__, h.__doc__, h.__wrapped__ is f)
    return None


@case(
    65,
    modes=("eager",),
    differs=Differs(
        "a stateful random mask is drawn anew in the backward pass, so that the gradient belongs "
        "to another mask than the value",
        "randomness comes from keys, which are the same in both passes",
        True,
    ),
)
def recompute_random(b):
    x = np.ones(64, np.float32)

    def masked(x):
        if b.is_jax:
            mask = b.jax.random.bernoulli(b.jax.random.key(0), shape=(64,))
        else:
            mask = b.tf.random.uniform([64]) > 0.5
        return x * b.cast(mask, "float32")

    y, g = b.value_and_gradient(b.recompute_grad(masked), x)
    return bool(np.all(np.asarray(y) == np.asarray(g)))


@case(66)
def recompute_structures(b):
    @b.recompute_grad
    def f(d, e):
        return {"p": d["a"] * d["b"][0], "o": (d["b"][1] * e, d["a"] * e)}

    def loss(d, e):
        y = f(d, e)
        return y["p"] + 10.0 * y["o"][0] + 100.0 * y["o"][1]

    return b.value_and_gradient(loss, {"a": 2.0, "b": [3.0, 4.0]}, 5.0)


@case(66)
def recompute_part_of_the_outputs(b):
    f = b.recompute_grad(lambda x: (x * x, b.sin(x), 3.0 * x))
    return b.value_and_gradient(lambda x: f(x)[1], 2.0)


@case(66)
def recompute_same_array_twice(b):
    f = b.recompute_grad(lambda x, y: x * y * y)
    return b.value_and_gradient(lambda x: f(x, x), 3.0)


@case(66)
def recompute_empty_array(b):
    return b.value_and_gradient(b.recompute_grad(_body(b)), np.ones((0, 2), np.float32))


@case(66)
def recompute_nested(b):
    inner = b.recompute_grad(_body(b))
    return b.value_and_gradient(b.recompute_grad(lambda x: inner(x) * inner(2.0 * x)), 0.7)


@case(66)
def recompute_jacobian(b):
    return b.jacobian(b.recompute_grad(lambda x: x * b.sum(x)), floats(1, 2, 3))


@case(66)
def recompute_in_a_loop(b):
    f = b.recompute_grad(_body(b))
    return b.value_and_gradient(lambda x: b.repeat(3, f, x), 0.9)


@case(66)
def recompute_unused_argument(b):
    f = b.recompute_grad(lambda x, u: x * x)
    return b.value_and_gradient(f, 2.0, floats(3, 4))


@case(66)
def recompute_without_arguments(b):
    return b.value_and_gradient(lambda v: b.recompute_grad(lambda: v * v)(), variables=[3.0])


@case(67)
def recompute_variables(b):
    def loss(x, v, w):
        return b.recompute_grad(lambda x: x * x * v)(x) + w

    return b.value_and_gradient(loss, 2.0, variables=[3.0, 4.0])


@case(67, none_is_zero=True)
def recompute_unused_variable(b):
    def loss(x, v, w):
        return b.recompute_grad(lambda x: x * x * v)(x)

    return b.value_and_gradient(loss, 2.0, variables=[3.0, 4.0])


@case(67)
def recompute_variable_as_an_argument(b):
    def loss(w, v):
        return b.recompute_grad(lambda a: a * a * v)(w)

    return b.value_and_gradient(loss, variables=[3.0, 4.0])


@case(
    67,
    differs=Differs(
        "a watched tensor that the function closes over gets None",
        "it gets its ordinary gradient",
        [12.0, [12.0, 4.0]],
        better=True,
    ),
)
def recompute_closed_over(b):
    def loss(x, c):
        return b.recompute_grad(lambda x: x * x * c)(x)

    return b.value_and_gradient(loss, 2.0, 3.0)


@case(
    68,
    differs=Differs(
        "`g(x=x)` gets None in eager mode and is a `ValueError` in graph mode",
        "`g(x=x)` is `g(x)`",
        {"returns": [4.0, 4.0]},
    ),
)
def recompute_by_name(b):
    f = b.recompute_grad(lambda x: x * x)
    return b.error(lambda: b.value_and_gradient(lambda x: f(x=x), 2.0))


@case(
    68,
    differs=Differs(
        "an argument by name gets None in eager mode and is a `ValueError` in graph mode",
        "it gets its gradient",
        {"returns": [12.0, [12.0, 4.0]]},
    ),
)
def recompute_second_argument_by_name(b):
    f = b.recompute_grad(lambda x, k=1.0: x * x * k)
    return b.error(lambda: b.value_and_gradient(lambda x, k: f(x, k=k), 2.0, 3.0))


@case(68)
def recompute_python_numbers(b):
    f = b.recompute_grad(lambda x, k: x * x * k)
    return b.value_and_gradient(lambda x: f(x, 3.0), 2.0)


@case(
    68,
    70,
    differs=Differs(
        "strings reach the function as they are in eager mode alone; bools fail in graph mode",
        "what is no array reaches the function as it is, compiled or not",
        {"returns": [12.0, 12.0]},
    ),
)
def recompute_static_arguments(b):
    @b.recompute_grad
    def f(x, mode, flag, n, function=None):
        k = 3.0 if mode == "triple" and flag is True and n == 3 and function is len else 1.0
        return x * x * k

    return b.error(
        lambda: b.value_and_gradient(lambda x: f(x, "triple", True, 3, function=len), 2.0)
    )


@case(69, graph_differs="second order is a `NotImplementedError`")
def recompute_second_order(b):
    f = b.recompute_grad(lambda x: x**3)
    return b.error(lambda: b.derivatives(f, 2.0, 2))


@case(
    69,
    differs=Differs(
        "second order of `g(x)**2`, or through a Variable, is a `NotImplementedError`",
        "every order works",
        [{"returns": [64.0, 192.0, 480.0]}, {"returns": [36.0, [18.0, 24.0]]}],
        better=True,
    ),
)
def recompute_second_order_everywhere(b):
    f = b.recompute_grad(lambda x: x**3)

    def gradient_at(x, v):
        return b.gradient_of(b.recompute_grad(lambda x: x * x * v * v))(x)

    return [
        b.error(lambda: b.derivatives(lambda x: f(x) ** 2, 2.0, 2)),
        b.error(lambda: b.value_and_gradient(gradient_at, 2.0, variables=[3.0])),
    ]


@case(
    69,
    differs=Differs(
        "forward mode is a `NotImplementedError`",
        "forward mode works",
        {"returns": [8.0, 12.0]},
        better=True,
    ),
)
def recompute_forward_mode(b):
    return b.error(lambda: b.jvp(b.recompute_grad(lambda x: x**3), [2.0], [1.0]))


@case(
    70,
    differs=Differs(
        "a decorated method fails", "a decorated method works", {"returns": [12.0, 12.0]}
    ),
)
def recompute_method(b):
    class Model:
        k = 3.0

        @b.recompute_grad
        def f(self, x):
            return x * x * self.k

    return b.error(lambda: b.value_and_gradient(Model().f, 2.0))


@case(70, graph_differs="complex numbers are an error")
def recompute_complex(b):
    f = b.recompute_grad(lambda z: z * z)

    def answer():
        y, g = b.value_and_gradient(lambda z: b.real(f(z)), np.complex64(1 + 2j))
        return [y, b.conj(g) if b.is_jax else g]

    return b.error(answer)


@case(70)
def recompute_integer_output(b):
    f = b.recompute_grad(lambda x: (x * x, b.cast(x, "int32")))
    return b.value_and_gradient(lambda x: f(x)[0], 2.5)


@case(
    70,
    differs=Differs(
        "Python numbers among the outputs are an error",
        "they are numbers",
        {"returns": [4.0, 4.0]},
    ),
)
def recompute_python_number_output(b):
    f = b.recompute_grad(lambda x: (x * x, 3.0))
    return b.error(lambda: b.value_and_gradient(lambda x: f(x)[0], 2.0))


@case(70)
def recompute_over_a_custom_gradient(b):
    f = b.custom_gradient(lambda x: (x * x, lambda dy: dy * 7.0 * x))
    return b.value_and_gradient(b.recompute_grad(lambda x: f(x) * 2.0), 3.0)


@case(70)
def recompute_kinds_of_functions(b):
    import functools

    class Square:
        def __call__(self, x):
            return x * x

    kinds = [functools.partial(lambda k, x: k * x * x, 3.0), b.compile(lambda x: x * x)]
    bound = Square().__call__
    return [b.value_and_gradient(b.recompute_grad(f), 2.0) for f in [*kinds, bound]]


@case(71)
def pass_through(b):
    return b.value_and_gradient(b.grad_pass_through(b.round), floats(0.4, 1.6, -2.7))


@case(71)
def pass_through_in_a_chain(b):
    f = b.grad_pass_through(b.round)
    return b.value_and_gradient(lambda x: 3.0 * f(x * x) * x, 1.6)


@case(71)
def pass_through_two(b):
    f = b.grad_pass_through(lambda x, y: (b.round(x), b.sign(y)))

    def loss(x, y):
        a, c = f(x, y)
        return 3.0 * a + 5.0 * c

    return b.value_and_gradient(loss, 1.6, -2.0)


@case(71)
def pass_through_structures(b):
    f = b.grad_pass_through(lambda d: (b.round(d["b"]), [b.sign(d["a"])]))

    def loss(d):
        first, (second,) = f(d)
        return 3.0 * first + 5.0 * second

    return b.value_and_gradient(loss, {"b": 1.6, "a": -2.0})


@case(
    71,
    differs=Differs(
        "a wrong number of outputs is the count error of `custom_gradient`, when the gradient is "
        "asked",
        "it is a `ValueError` at the call that lists inputs and outputs",
        [{"raises": "ValueError"}] * 2,
    ),
)
def pass_through_counts(b):
    f = b.grad_pass_through(lambda x, y: x * y)
    h = b.grad_pass_through(lambda x: (x, x))
    return [b.error(lambda: b.run(f, 2.0, 3.0)), b.error(lambda: len(b.run(h, 2.0)))]


@case(
    71,
    differs=Differs(
        "keywords are a `ValueError` in graph mode",
        "keywords that are no arrays work in every mode",
        {"returns": [floats(2), floats(1)]},
    ),
)
def pass_through_keywords(b):
    f = b.grad_pass_through(lambda x, how="round": b.round(x) if how == "round" else x)
    return b.error(lambda: b.value_and_gradient(lambda x: f(x, how="round"), floats(1.6)))


@case(
    72,
    differs=Differs(
        "an output of another shape gives a gradient of a wrong shape",
        "it is a `ValueError` at the call",
        {"raises": "ValueError"},
    ),
)
def pass_through_of_another_shape(b):
    f = b.grad_pass_through(b.sum)
    return b.error(lambda: b.value_and_gradient(f, floats(1, 2, 3)))


@case(
    72,
    differs=Differs(
        "an output of another dtype gives a gradient of that dtype",
        "the gradient is cast to the dtype of the input",
        [np.float16(2), 1.0],
    ),
)
def pass_through_of_another_dtype(b):
    f = b.grad_pass_through(lambda x: b.cast(b.round(x), "float16"))
    return b.value_and_gradient(f, 1.6)


@case(72, none_is_zero=True)
def pass_through_integer(b):
    f = b.grad_pass_through(lambda x: b.cast(x, "int32"))
    return b.value_and_gradient(lambda x: b.cast(f(x), "float32"), 1.6)


@case(72, none_is_zero=True)
def pass_through_variable(b):
    def loss(x, v):
        return b.grad_pass_through(lambda x: b.round(x * v))(x)

    return b.value_and_gradient(loss, 1.6, variables=[3.0])


@case(72)
def pass_through_variable_as_an_argument(b):
    return b.value_and_gradient(lambda v: 3.0 * b.grad_pass_through(b.round)(v), variables=[1.6])


@case(72)
def pass_through_second_order(b):
    f = b.grad_pass_through(b.round)
    return b.derivatives(lambda x: f(x) ** 2, 1.6, 2)


@case(72, none_is_zero=True, modes=("eager",))
def pass_through_second_order_alone(b):
    return b.derivatives(b.grad_pass_through(b.round), 1.6, 2)


@case(72)
def pass_through_method(b):
    class Model:
        k = 2.0

        def f(self, x):
            return b.round(x * self.k)

    return b.value_and_gradient(b.grad_pass_through(Model().f), 1.3)


@case(73, none_is_zero=True)
def pass_through_documented(b):
    """The documented example: y = 9, dy/dz = 6, dy/dx = 0, where x was assigned."""

    def loss(x, z):
        kept = b.grad_pass_through(lambda z: b.stop_gradient(z * 1.0))(z)
        return kept * kept + 0.0 * b.stop_gradient(x)

    return b.value_and_gradient(loss, 5.0, 3.0)


@case(74, none_is_zero=True)
def stop_gradient(b):
    return [
        b.value_and_gradient(lambda x: b.stop_gradient(x), 2.0),
        b.value_and_gradient(lambda x: b.stop_gradient(x) * x, 2.0),
    ]


@case(74, none_is_zero=True)
def stop_gradient_straight_through(b):
    return b.derivatives(lambda x: x + b.stop_gradient(b.round(x) - x), 1.6, 2)


@case(74, none_is_zero=True)
def stop_gradient_forward_mode(b):
    return b.jvp(lambda x: b.stop_gradient(x * x), [2.0], [1.0])


@case(
    74,
    differs=Differs(
        "`tf.stop_gradient` stacks a list into one tensor and fails for a dict",
        "`jax.lax.stop_gradient` takes any pytree",
        {"returns": {"a": 2.0, "b": [3.0]}},
    ),
)
def stop_gradient_of_a_structure(b):
    return b.error(lambda: b.run(b.stop_gradient, {"a": 2.0, "b": [3.0]}))
