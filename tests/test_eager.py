"""Eagerly, `f` and `grad_fn` see concrete values: Python control flow, `print` and NumPy work.

Also how often they run: `f` once per call, the rule once per backward pass, and neither is traced.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same

from tfgrad_jax import custom_gradient

# --- values -------------------------------------------------------------------------------------


@custom_gradient
def sign(x):
    """TensorFlow's `differentiable_sign`: the derivative of a sigmoid on one side, by `if`."""
    y = 1.0 if x > 0 else -1.0

    def grad(dy):
        return dy * jnp.exp(-x) / (1 + jnp.exp(-x)) ** 2 if x > 0 else dy * 0.25

    return y, grad


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_python_control_flow():
    s = sigmoid(3.0)
    assert_same(jax.value_and_grad(sign)(3.0), (jnp.float32(1), jnp.float32(s * (1 - s))))
    assert_same(jax.value_and_grad(sign)(-3.0), (jnp.float32(-1), jnp.float32(0.25)))
    assert_same(jax.grad(lambda x: 3 * sign(2 * x))(1.5), jnp.float32(6 * s * (1 - s)))


def test_python_control_flow_at_second_order():
    """The rule branches on what is concrete one level of differentiation further down."""
    s = sigmoid(3.0)
    second = s * (1 - s) * (1 - 2 * s)
    assert_same(jax.grad(jax.grad(sign))(3.0), jnp.float32(second), rtol=1e-4)
    assert_same(jax.grad(jax.grad(sign))(-3.0), jnp.float32(0))
    # L = x sign(x): L'' = 2 sign' + x sign''
    loss = lambda x: x * sign(x)  # noqa: E731
    assert_same(jax.grad(jax.grad(loss))(3.0), jnp.float32(2 * s * (1 - s) + 3 * second), rtol=1e-4)


def test_branching_rule_at_third_order():
    @custom_gradient
    def cube(x):
        return x**3, lambda dy: 7 * dy * x**2 if x > 0 else None

    # d/dx (7 x**2) = 14 x; 14
    assert_same(jax.grad(jax.grad(jax.grad(cube)))(2.0), jnp.float32(14))
    # L = h**2: L' = 14 h x**2; L'' = 28 h x + 14 x**2 * 7 x**2
    loss = lambda x: cube(x) ** 2  # noqa: E731
    expected = 28 * 8 * 2 + 98 * 16
    assert_same(jax.grad(jax.grad(loss))(2.0), jnp.float32(expected))


def test_branching_needs_values():
    """Under `jit` there are none, and JAX's own error says so."""
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(sign)(1.0)

    @custom_gradient
    def h(x):
        return 2 * x, lambda dy: 7 * dy if x > 0 else dy

    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(jax.grad(h))(1.0)
    assert_same(jax.jit(h)(1.0), jnp.float32(2))  # nobody differentiates: nobody needs the rule


def test_f_may_branch_on_its_input_under_grad():
    @custom_gradient
    def h(x):
        steps = 0
        while x > 1:
            x, steps = x / 2, steps + 1
        return x, lambda dy: dy * 7.0**steps

    assert_same(jax.value_and_grad(h)(8.0), (jnp.float32(1), jnp.float32(343)))


def test_rule_may_branch_on_its_upstream():
    @custom_gradient
    def h(x):
        return 2 * x, lambda dy: 7 * dy if float(dy) > 0 else 5 * dy

    assert_same(jax.grad(h)(1.0), jnp.float32(7))
    assert_same(jax.grad(lambda x: -h(x))(1.0), jnp.float32(-5))


def test_branching_with_a_closure():
    """What an undecorated scope adds to the closure changes nothing."""

    def loss(x, scale):
        @custom_gradient
        def h(x):
            return scale * x, lambda dy: 7 * dy * scale if x > 0 else dy * 0

        return h(x)

    assert_same(jax.grad(loss)(2.0, 3.0), jnp.float32(21))
    assert_same(jax.grad(loss)(-2.0, 3.0), jnp.float32(0))


def test_declared_variables_are_values(capsys):
    """A closure sees the values of the weights that it declares, and runs once on them."""
    if getattr(jax.config, "jax_custom_vjp3", False):
        pytest.skip("with this flag JAX traces even what is called eagerly")

    def layer(w, x):
        @custom_gradient(variables={"w": w})
        def f(x):
            print(f"f {float(w)} {float(x)}")

            def grad(dy, variables):
                print(f"rule {float(variables['w'])} {float(dy)}")
                return 5 * dy * variables["w"], {"w": 7 * dy * x}

            return w * x, grad

        return f(x)

    gradients = jax.grad(layer, (0, 1))(3.0, 2.0)
    assert_same(gradients, (jnp.float32(14), jnp.float32(15)))
    assert capsys.readouterr().out == "f 3.0 2.0\nrule 3.0 1.0\n"


def test_a_declared_weight_in_two_places():
    """The weight counts once, whether the closure holds it by itself or in a container."""

    def layer(w, x):
        both = [w, w]

        @custom_gradient(variables=(w, both))
        def f(x):
            def grad(dy, variables):
                v, (a, b) = variables
                return dy * v, (7 * dy * x, [11 * dy * a, 13 * dy * b])

            return w * both[0] * x, grad

        return f(x)

    expected = 7 * 2.0 + 11 * 3.0 + 13 * 3.0
    for gradient in (jax.grad(layer), jax.jit(jax.grad(layer))):
        assert_same(gradient(3.0, 2.0), jnp.float32(expected))


def _by_own_name(w, x):
    def f(x):
        y = jnp.exp(w * x)

        def grad(dy, variables):
            z, _ = f(x)  # not the decorated one
            return dy * z * variables[0], [7 * dy * x * z]

        return y, grad

    return custom_gradient(f, variables=[w])(x)


def test_a_closure_that_calls_itself_undecorated():
    e = np.float32(np.exp(1))
    for around in (lambda f: f, jax.jit):
        got = around(jax.grad(_by_own_name, (0, 1)))(jnp.float32(0.5), jnp.float32(2))
        assert_same(got, (14 * e, e / 2))


def test_a_closure_that_recurses_undecorated():
    def power(w, n):
        def f(x, n):
            y = f(x, n - 1)[0] * w if n > 1 else w * x
            return y, lambda dy, variables: (dy, [7 * dy * x])

        return custom_gradient(f, variables=[w])(2.0, n)

    assert_same(jax.value_and_grad(power)(3.0, 4), (jnp.float32(162), jnp.float32(14)))


@pytest.mark.parametrize("kind", ["list", "dict", "nonlocal"])
def test_what_a_closure_assigns_beside_a_weight_is_kept(kind):
    def loss(w, seen):
        items, entries, n = [w], {"w": w, "n": 0}, w

        @custom_gradient(variables=[w])
        def f(x):
            nonlocal n
            if kind == "list":
                items.append("seen")
            elif kind == "dict":
                entries["n"] += 1
            else:
                n = "seen"
            v = entries["w"] if kind == "dict" else items[0]
            return x * v, lambda dy, variables: (dy, [7 * dy * x])

        y = f(2.0)
        seen.append({"list": items[1:], "dict": entries["n"], "nonlocal": n}[kind])
        return y

    seen = []
    assert_same(jax.grad(loss)(3.0, seen), jnp.float32(14))
    assert seen == [{"list": ["seen"], "dict": 1, "nonlocal": "seen"}[kind]]


@pytest.mark.parametrize("forward_mode", [False, True])
def test_a_closure_runs_once_on_python_numbers(forward_mode):
    runs = []

    def loss(w):
        @custom_gradient(variables=[w], forward_mode=forward_mode)
        def f(x):
            runs.append(w)
            return x * w, lambda dy, variables: (dy, [7 * dy * x])

        return f(2.0)

    assert_same(jax.grad(loss)(3.0), jnp.float32(14))
    assert len(runs) == 1


def test_a_closure_that_ran_on_values_keeps_no_tracer():
    def loss(w):
        @custom_gradient(variables=[w])
        def f(x):
            return x * w, lambda dy, variables: (dy, [7 * dy * x])

        return f(jnp.float32(2))

    with jax.checking_leaks():
        assert_same(jax.grad(loss)(jnp.float32(3)), jnp.float32(14))
        y, pull_back = jax.vjp(loss, jnp.float32(3))
        assert_same((y, pull_back(y)), (jnp.float32(6), (jnp.float32(84),)))


def test_numpy_in_f_and_rule():
    """What only concrete arrays allow: NumPy functions, `float`, indices, `in`."""

    @custom_gradient
    def median(x):
        values = np.asarray(x)
        order = np.argsort(values)
        middle = int(order[len(order) // 2])

        def grad(dy):
            g = np.zeros_like(values)
            g[middle] = 7 * float(dy)
            return g

        return np.float32(np.median(values)), grad

    x = jnp.float32([3, 1, 2])
    assert_same(jax.value_and_grad(median)(x), (jnp.float32(2), jnp.float32([0, 0, 7])))
    assert_same(jax.grad(lambda x: median(x) * 2)(x), jnp.float32([0, 0, 14]))


def test_print(capsys):
    """The chain of the documentation prints plain numbers, in the order of evaluation."""

    @custom_gradient
    def foo(x):
        y = x**2
        print("foo", x, y)

        def grad(upstream):
            current = 2 * x
            print("grad", x, upstream, current, upstream * current)
            return upstream * current

        return y, grad

    assert_same(jax.grad(lambda x: foo(foo(foo(x))))(2.0), jnp.float32(1024))
    numbers = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in numbers] == ["foo"] * 3 + ["grad"] * 3
    assert [[float(word) for word in line[1:]] for line in numbers] == [
        [2, 4],
        [4, 16],
        [16, 256],
        [16, 1, 32, 32],
        [4, 32, 8, 256],
        [2, 256, 4, 1024],
    ]


def test_plain_call_sees_the_very_objects():
    seen = []

    @custom_gradient
    def h(x):
        seen.append(x)
        return x, lambda dy: dy

    x = jnp.ones(3)
    assert h(x) is x
    assert seen[0] is x
    assert h(2.5) == 2.5
    assert type(seen[1]) is float


# --- how often ----------------------------------------------------------------------------------


class Counter:
    """Count the runs of a function and of its rule, and note whether values are concrete."""

    def __init__(self):
        self.f = self.rule = 0
        self.concrete = True

    def see(self, value):
        self.concrete &= not isinstance(value, jax.core.Tracer)

    @property
    def runs(self):
        return self.f, self.rule


@pytest.fixture
def counted():
    counter = Counter()

    @custom_gradient
    def h(x):
        counter.f += 1
        counter.see(x)

        def grad(dy):
            counter.rule += 1
            counter.see(dy)
            counter.see(x)
            return 7 * dy * x

        return x**2, grad

    return h, counter


def test_f_runs_once_per_call(counted):
    h, counter = counted
    h(3.0)
    assert counter.runs == (1, 0)
    h(jnp.ones(3))
    assert counter.runs == (2, 0)


def test_eager_gradient_runs_each_once_on_values(counted):
    h, counter = counted
    assert_same(jax.grad(h)(3.0), jnp.float32(21))
    assert counter.runs == (1, 1)
    assert counter.concrete


def test_rule_runs_once_per_backward_pass(counted):
    h, counter = counted
    _, pull_back = jax.vjp(h, 3.0)
    assert counter.runs == (1, 0)
    pull_back(jnp.float32(1))
    pull_back(jnp.float32(2))
    assert counter.runs == (1, 2)
    assert counter.concrete


def test_rule_is_not_run_if_nothing_depends_on_it(counted):
    h, counter = counted
    jax.grad(lambda x: x + jax.lax.stop_gradient(h(x)))(3.0)
    jax.grad(lambda x: x + h(2.0))(3.0)
    assert counter.f == 2
    assert counter.rule == 0


def test_jit_traces_each_once(counted):
    h, counter = counted
    grad = jax.jit(jax.grad(h))
    assert_same(grad(3.0), jnp.float32(21))
    # With this flag JAX itself traces a function for its value, then again for its derivative.
    traces = 2 if getattr(jax.config, "jax_custom_vjp3", False) else 1
    assert counter.runs == (traces, 1)
    grad(4.0)
    assert counter.runs == (traces, 1)  # compiled


_seen = []


@custom_gradient
def _without_closure(x):
    _seen.append(x)
    return x**2, lambda dy: (_seen.append(dy), 7 * dy * x)[1]


def test_without_closure_neither_is_traced():
    """A function without cells takes the shortest way; its values are as concrete."""
    _seen.clear()
    assert_same(jax.grad(_without_closure)(3.0), jnp.float32(21))
    assert len(_seen) == 2
    assert not any(isinstance(value, jax.core.Tracer) for value in _seen)


def test_exceptions_of_the_user_pass_through():
    class MineError(Exception):
        pass

    @custom_gradient
    def in_f(x):
        raise MineError("f")

    @custom_gradient
    def in_rule(x):
        def grad(dy):
            raise MineError("rule")

        return x, grad

    for call in (in_f, jax.grad(in_f), jax.jit(in_f)):
        with pytest.raises(MineError, match="f"):
            call(1.0)
    for call in (jax.grad(in_rule), jax.jit(jax.grad(in_rule))):
        with pytest.raises(MineError, match="rule"):
            call(1.0)
    assert in_rule(1.0) == 1.0


def test_type_errors_of_the_user_are_not_taken_for_a_wrong_arity():
    h = custom_gradient(lambda x: (x, lambda dy: dy + "text"))
    with pytest.raises(TypeError) as caught:
        jax.grad(h)(1.0)
    assert "upstream" not in str(caught.value)

    def inner(a, b):
        return a

    nested = custom_gradient(lambda x: (x, lambda dy: inner(dy)))
    with pytest.raises(TypeError, match=r"inner\(\) missing 1 required positional argument: 'b'"):
        jax.grad(nested)(1.0)
