"""Rules 51 to 53: forward mode, which TensorFlow calls `ForwardAccumulator`."""

from .case import Differs, case, floats

ORDINARY = "forward mode silently uses the ordinary derivative of `f`"
TRANSPOSED = "forward mode transposes the declared gradient"


@case(51, differs=Differs(ORDINARY, TRANSPOSED, [6.0, 5.0], better=True))
def one_input(b):
    return b.jvp(b.custom_gradient(lambda x: (x * 3.0, lambda dy: dy * 5.0)), [2.0], [1.0])


@case(51, differs=Differs(ORDINARY, TRANSPOSED, [6.0, 510.0]))
def two_inputs(b):
    f = b.custom_gradient(lambda x, y: (x * y, lambda dy: (dy * 10.0, dy * 100.0)))
    return b.jvp(f, [2.0, 3.0], [1.0, 5.0])


@case(51, differs=Differs(ORDINARY, TRANSPOSED, [{"a": 4.0, "b": 6.0}, {"a": 10.0, "b": 100.0}]))
def two_outputs(b):
    @b.custom_gradient
    def f(x):
        return {"b": 3 * x, "a": 2 * x}, lambda da, db: da * 10.0 + db * 100.0

    return b.jvp(f, [2.0], [1.0])


@case(51, differs=Differs(ORDINARY, TRANSPOSED, [floats(1, 2), floats(21, 43)]))
def linear_map(b):
    """A gradient of A^T dy means a tangent of A t."""
    a = b.constant([[1.0, 2.0], [3.0, 4.0]])

    @b.custom_gradient
    def f(x):
        return x * 1.0, lambda dy: b.sum(a * b.reshape(dy, [2, 1]), axis=0)

    return b.jvp(f, [floats(1, 2)], [floats(1, 10)])


@case(
    51,
    differs=Differs(
        ORDINARY,
        "a rule that is not linear in its upstream has no forward mode: `TypeError`",
        [{"raises": "TypeError"}] * 3,
    ),
)
def nonlinear_rules(b):
    rules = [lambda dy: dy * dy * 5.0, lambda dy: dy * 5.0 + 1.0, lambda dy: b.maximum(dy, 0.0)]
    return [
        b.error(lambda r=r: b.jvp(b.custom_gradient(lambda x: (x * 3.0, r)), [2.0], [1.0]))
        for r in rules
    ]


@case(51, differs=Differs(ORDINARY, "the tangent is zero", [6.0, 0.0]))
def none_as_the_gradient(b):
    return b.jvp(b.custom_gradient(lambda x: (x * 3.0, lambda dy: None)), [2.0], [1.0])


@case(51, differs=Differs(ORDINARY, TRANSPOSED, [6.0, 75.0]))
def with_variables(b):
    def loss(x, v):
        return b.custom_gradient(
            lambda x: (x * v, lambda dy, variables=None: (dy * 5.0, [dy * 7.0]))
        )(x)

    if b.is_jax:
        return b.jvp(loss, [2.0, 3.0], [1.0, 10.0])
    v = b.tf.Variable(3.0)
    with b.tf.autodiff.ForwardAccumulator([v], [b.constant(10.0)]) as accumulator:
        y = loss(b.constant(2.0), v)
    return [y, accumulator.jvp(y)]


@case(
    51,
    differs=Differs(
        ORDINARY,
        "the tangent of a closed-over value without a gradient is a `TypeError`",
        {"raises": "TypeError"},
    ),
)
def closed_over_tangent(b):
    def loss(x, c):
        return b.custom_gradient(lambda x: (x * c, lambda dy: dy * 5.0))(x)

    return b.error(lambda: b.jvp(loss, [2.0, 3.0], [1.0, 10.0]))


@case(52, modes=("eager",))
def f_without_an_ordinary_derivative(b):
    """Where f has no derivative of its own, TensorFlow transposes the rule too."""
    f = b.custom_gradient(lambda x: (b.stop_gradient(x**3), lambda dy: dy * 5.0))
    k = b.custom_gradient(lambda x: (b.constant(7.0), lambda dy: dy * 5.0))
    return [b.jvp(f, [2.0], [1.0]), b.jvp(k, [2.0], [1.0])]


@case(52, modes=("graph",), differs=Differs("the tangent is zero", TRANSPOSED, [8.0, 5.0]))
def f_without_an_ordinary_derivative_compiled(b):
    f = b.custom_gradient(lambda x: (b.stop_gradient(x**3), lambda dy: dy * 5.0))
    return b.jvp(f, [2.0], [1.0])


@case(51)
def beside_an_integer_output(b):
    f = b.custom_gradient(lambda x: ((2.0 * x, b.cast(x, "int32")), lambda da, dn: da * 2.0))

    def of_float(x):
        return f(x)[0]

    return b.jvp(of_float, [2.0], [1.0])


@case(53)
def forward_over_reverse(b):
    f = b.custom_gradient(lambda x: (x**3, lambda dy: dy * b.sin(x)))
    return b.jvp(b.gradient_of(f), [2.0], [1.0])


@case(53)
def hessian_vector_product(b):
    f = b.custom_gradient(lambda x: (b.sum(x**3), lambda dy: dy * b.sin(x)))
    return b.jvp(b.gradient_of(f), [floats(1, 2, 3)], [floats(1, 10, 100)])


@case(53)
def forward_over_reverse_of_a_nonlinear_use(b):
    f = b.custom_gradient(lambda x: (x**3, lambda dy: dy * 3.0 * x**2))
    return b.jvp(b.gradient_of(lambda x: f(x) ** 2), [2.0], [1.0])


@case(53, differs=Differs(ORDINARY, TRANSPOSED + ", again and again", [5.0, 3.0]))
def forward_over_forward(b):
    f = b.custom_gradient(lambda x: (x**3, lambda dy: dy * 3.0 * x))

    def tangent(x):
        if b.is_jax:
            return b.jax.jvp(f, (x,), (b.ones_like(x),))[1]
        with b.tf.autodiff.ForwardAccumulator(x, b.ones_like(x)) as accumulator:
            y = f(x)
        return accumulator.jvp(y)

    return [b.run(lambda x: tangent(x) - 1.0, 2.0), b.jvp(tangent, [2.0], [1.0])[1]]


@case(53, differs=Differs(ORDINARY, TRANSPOSED, 3.0))
def reverse_over_forward(b):
    f = b.custom_gradient(lambda x: (x**3, lambda dy: dy * 3.0 * x))

    def tangent(x):
        if b.is_jax:
            return b.jax.jvp(f, (x,), (b.ones_like(x),))[1]
        with b.tf.autodiff.ForwardAccumulator(x, b.ones_like(x)) as accumulator:
            y = f(x)
        return accumulator.jvp(y)

    return b.value_and_gradient(tangent, 2.0)[1]
