"""The declared gradient is the derivative at every order, and in both modes.

The running example has the value `x**2` and declares the gradient `7 x`. With `L = h(x)**2`,

    L'   = 2 h * 7 x                = 14 x h
    L''  = 14 h + 14 x * 7 x        = 14 h + 98 x**2
    L''' = 14 * 7 x + 196 x         = 294 x

which at `x = 2` is 112, 448 and 588. Where `f`'s own derivative takes the place of the rule after
the first order, as in `jax.custom_gradient`, `L''` is 14 * 4 + 14 x * 2 x = 168.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from tfgrad_jax import custom_gradient

# JAX keeps the rule of a custom_jvp inside a scan since custom_jvp is a primitive of its own.
SCAN_KEEPS_EVERY_RULE = hasattr(jax.config, "jax_custom_jvp3")


@custom_gradient
def h(x):
    return x**2, lambda dy: 7 * dy * x


def closed_over(x):
    """The same, but declared in a closure over something that is traced wherever `x` is."""
    two = lax.stop_gradient(2 + 0 * x)

    @custom_gradient
    def h(x):
        return x**two, lambda dy: 7 * dy * x * two / 2

    return h(x)


class _Rule:
    def __init__(self, x):
        self.x = x

    def __call__(self, dy):
        return 7 * dy * self.x


@custom_gradient
def traced(x):
    return x**2, _Rule(x)


forward = custom_gradient(h.__wrapped__, forward_mode=True)

FUNCTIONS = {"lifted": h, "hoisted": closed_over, "traced": traced, "forward mode": forward}


def in_scan(loss):
    return lambda x: lax.scan(lambda c, k: (c + loss(k), None), 0.0, jnp.stack([x]))[0]


AROUND = {
    "nothing": lambda loss: loss,
    "jit": jax.jit,
    "vmap": lambda loss: lambda x: jnp.sum(jax.vmap(loss)(jnp.stack([x]))),
    "cond": lambda loss: lambda x: lax.cond(x > 0, loss, lambda x: x, x),
    "switch": lambda loss: lambda x: lax.switch(1, [lambda x: x, loss], x),
    "checkpoint": jax.checkpoint,
    "map": lambda loss: lambda x: jnp.sum(lax.map(loss, jnp.stack([x]))),
}


def crossed(rows, columns, row):
    """Pair rows with columns: in full for one row, elsewhere with two columns; the rest is slow."""
    return [
        pytest.param(r, c, marks=() if r == row or c in columns[:2] else pytest.mark.slow)
        for r in rows
        for c in columns
    ]


def third(loss):
    return jax.grad(jax.grad(jax.grad(loss)))


@pytest.mark.parametrize(
    ("function", "around"),
    crossed(FUNCTIONS, ["nothing", "jit", "vmap", "cond", "switch", "checkpoint"], "lifted"),
)
def test_reverse_over_reverse(function, around):
    loss = AROUND[around](lambda x: FUNCTIONS[function](x) ** 2)
    assert_same(jax.value_and_grad(loss)(2.0), (jnp.float32(16), jnp.float32(112)))
    assert_same(jax.grad(jax.grad(loss))(2.0), jnp.float32(448))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_third_order(function):
    assert_same(third(lambda x: FUNCTIONS[function](x) ** 2)(2.0), jnp.float32(588))


@pytest.mark.parametrize("around", ["jit", "vmap", "checkpoint"])
def test_third_order_under_transformations(around):
    assert_same(third(AROUND[around](lambda x: h(x) ** 2))(2.0), jnp.float32(588))


@pytest.mark.parametrize(
    ("function", "around"),
    crossed(FUNCTIONS, ["nothing", "jit", "vmap", "cond", "checkpoint"], "lifted"),
)
def test_hessian_is_forward_over_reverse(function, around):
    loss = AROUND[around](lambda x: FUNCTIONS[function](x) ** 2)
    assert_same(jax.hessian(loss)(2.0), jnp.float32(448))


def test_transformations_of_the_derivative():
    second = jax.grad(jax.grad(lambda x: h(x) ** 2))
    assert_same(jax.jit(second)(2.0), jnp.float32(448))
    assert_same(jax.vmap(second)(jnp.float32([2, 1])), jnp.float32([448, 112]))
    assert_same(jax.checkpoint(second)(2.0), jnp.float32(448))
    assert_same(in_scan(second)(2.0), jnp.float32(448))
    assert_same(jax.grad(jax.jit(jax.grad(lambda x: h(x) ** 2)))(2.0), jnp.float32(448))
    assert_same(jax.grad(jax.checkpoint(jax.grad(lambda x: h(x) ** 2)))(2.0), jnp.float32(448))


def test_what_jax_custom_gradient_does_instead():
    """The number that this package exists to put right; see the module's head."""
    theirs = jax.custom_gradient(h.__wrapped__)
    assert_same(jax.grad(lambda x: theirs(x) ** 2)(2.0), jnp.float32(112))
    assert_same(jax.grad(jax.grad(lambda x: theirs(x) ** 2))(2.0), jnp.float32(168))


@pytest.mark.parametrize("function", ["lifted", "hoisted", "traced"])
def test_forward_mode_is_refused_by_default(function):
    f = FUNCTIONS[function]
    for call in (
        lambda: jax.jvp(f, (2.0,), (1.0,)),
        lambda: jax.jacfwd(f)(2.0),
        lambda: jax.jit(jax.jacfwd(f))(2.0),
        lambda: jax.linearize(f, 2.0)[1](1.0),
    ):
        with pytest.raises(TypeError, match=r"forward-mode autodiff \(jvp\) to a custom_vjp"):
            call()


def test_composition():
    # h(h(x)) = x**4; L' = 7 h * 7 x = 49 x h; L'' = 49 h + 49 x * 7 x = 49 * 4 + 343 * 4
    assert_same(jax.grad(lambda x: h(h(x)))(2.0), jnp.float32(392))
    assert_same(jax.grad(jax.grad(lambda x: h(h(x))))(2.0), jnp.float32(1568))


def test_what_a_rule_captured_of_f_is_plain():
    """`y` inside the rule is `f`'s own: its derivative is the ordinary one."""

    @custom_gradient
    def with_inner_y(x):
        y = x**2
        return y, lambda dy: 7 * dy * y

    # h' = 7 x**2; h'' = 14 x, not 7 * 7 x**2
    assert_same(jax.grad(jax.grad(with_inner_y))(3.0), jnp.float32(42))
    assert_same(jax.jit(jax.grad(jax.grad(with_inner_y)))(3.0), jnp.float32(42))


# --- inside a scan --------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", [in_scan, AROUND["map"]])
def test_scan_in_reverse_mode(loop):
    loss = loop(lambda x: h(x) ** 2)
    assert_same(jax.grad(loss)(2.0), jnp.float32(112))
    assert_same(jax.grad(jax.grad(loss))(2.0), jnp.float32(448))
    assert_same(jax.jit(jax.grad(jax.grad(loss)))(2.0), jnp.float32(448))
    assert_same(third(loss)(2.0), jnp.float32(588))


def test_scan_with_a_closure():
    loss = in_scan(lambda x: closed_over(x) ** 2)
    assert_same(jax.grad(jax.grad(loss))(2.0), jnp.float32(448))


def test_scan_forward_over_reverse():
    loss = in_scan(lambda x: h(x) ** 2)
    if SCAN_KEEPS_EVERY_RULE:
        assert_same(jax.hessian(loss)(2.0), jnp.float32(448))
    else:  # before that, JAX refuses: no number rather than a wrong one
        with pytest.raises(TypeError, match=r"forward-mode autodiff \(jvp\) to a custom_vjp"):
            jax.hessian(loss)(2.0)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_checkpoint_of_scan(function):
    """Where `jax.checkpoint` evaluates the scan in part, the rule must stay in it."""
    loss = jax.checkpoint(in_scan(lambda x: FUNCTIONS[function](x) ** 2))
    assert_same(jax.grad(loss)(2.0), jnp.float32(112))
    assert_same(jax.grad(jax.grad(loss))(2.0), jnp.float32(448))


def test_scan_of_checkpoint():
    loss = in_scan(jax.checkpoint(lambda x: h(x) ** 2))
    assert_same(jax.grad(jax.grad(loss))(2.0), jnp.float32(448))


# --- rules that call decorated functions ----------------------------------------------------------


@custom_gradient
def exp(x):
    return jnp.exp(x), lambda dy: 7 * dy * exp(x)


@custom_gradient
def sin(x):
    return jnp.sin(x), lambda dy: 7 * dy * cos(x)


@custom_gradient
def cos(x):
    return jnp.cos(x), lambda dy: -5 * dy * sin(x)


def closure_exp(x):
    one = lax.stop_gradient(1 + 0 * x)

    @custom_gradient
    def exp(x):
        return jnp.exp(one * x), lambda dy: 7 * dy * exp(x) * one

    return exp(x)


def closure_sin(x):
    one = lax.stop_gradient(1 + 0 * x)

    @custom_gradient
    def sin(x):
        return jnp.sin(one * x), lambda dy: 7 * dy * cos(x)

    @custom_gradient
    def cos(x):
        return jnp.cos(one * x), lambda dy: -5 * dy * sin(x)

    return sin(x)


_E, _S, _C = math.exp(0.5), math.sin(0.5), math.cos(0.5)
RECURSIVE = {
    "exp": (exp, [_E, 7 * _E, 49 * _E, 343 * _E]),
    "exp in a closure": (closure_exp, [_E, 7 * _E, 49 * _E, 343 * _E]),
    "sin and cos": (sin, [_S, 7 * _C, -35 * _S, -245 * _C]),
    "sin and cos in a closure": (closure_sin, [_S, 7 * _C, -35 * _S, -245 * _C]),
}


@pytest.mark.parametrize(
    ("name", "around"), crossed(RECURSIVE, ["nothing", "checkpoint", "jit", "vmap"], None)
)
def test_recursion(name, around):
    f, expected = RECURSIVE[name]
    f = AROUND[around](f)
    actual = [f(0.5), jax.grad(f)(0.5), jax.grad(jax.grad(f))(0.5), third(f)(0.5)]
    assert_same(actual, [jnp.float32(e) for e in expected], rtol=1e-4)


@pytest.mark.parametrize("name", RECURSIVE)
def test_recursion_jitted_whole(name):
    f, expected = RECURSIVE[name]
    assert_same(jax.jit(third(f))(0.5), jnp.float32(expected[3]), rtol=1e-4)


@pytest.mark.parametrize("name", RECURSIVE)
def test_recursion_in_scan(name):
    f, expected = RECURSIVE[name]
    second = jax.grad(jax.grad(in_scan(f)))
    assert_same(second(0.5), jnp.float32(expected[2]), rtol=1e-4)


@pytest.mark.parametrize("name", RECURSIVE)
def test_recursion_forward_over_reverse(name):
    f, expected = RECURSIVE[name]
    assert_same(jax.hessian(f)(0.5), jnp.float32(expected[2]), rtol=1e-4)


def test_recursion_with_differentiated_closure():
    """`d/dw` and `d/dx` of `exp(w x)`, by rules that are 7 and 5 times too large."""

    def loss(w, x):
        @custom_gradient
        def e(x):
            def grad(dy, variables=()):
                dx = 7 * dy * w * e(x)
                return (dx, [5 * dy * x * e(x)]) if len(variables) else dx

            return jnp.exp(w * x), grad

        return e(x)

    w, x = 2.0, 0.5
    y = math.exp(w * x)
    assert_same(jax.grad(loss, (0, 1))(w, x), (jnp.float32(5 * x * y), jnp.float32(7 * w * y)))
    # The call inside the rule sees `w` as a constant, so its rule for `x` alone counts:
    # d/dx (7 w e(x)) = 7 w * 7 w e; d/dw of it: the factor w alone, 7 e.
    dx = jax.grad(loss, 1)
    assert_same(jax.grad(dx, 1)(w, x), jnp.float32(49 * w**2 * y))


def test_a_rule_that_is_itself_decorated():
    """TensorFlow's documented form: the rule of the rule gives the derivative by `dy`."""

    @custom_gradient
    def op(x):
        @custom_gradient
        def grad(dy):
            return 7 * dy * x, lambda ddy: 11 * ddy * x

        return x**2, grad

    assert_same(jax.grad(op)(3.0), jnp.float32(21))

    # `x` is closed over inside the rule and constant there; `dy = 2 h(x)` gives 11 * 2 h' x.
    def gradient_by_upstream(dy):
        return jax.vjp(op, 3.0)[1](dy)[0]

    assert_same(jax.grad(gradient_by_upstream)(1.0), jnp.float32(33))


def test_fused_second_order():
    """TensorFlow's `op_with_fused_backprop`, with an inner input for the captured gradient."""

    @custom_gradient
    def op(x):
        y, dx = x**3, 5 * x**2  # a fused operation: value and gradient at once

        @custom_gradient
        def first_order(unused_x):
            return dx, lambda ddx: 600 * ddx * x

        return y, lambda dy: dy * first_order(x)

    assert_same(jax.grad(op)(2.0), jnp.float32(20))
    assert_same(jax.grad(jax.grad(op))(2.0), jnp.float32(1200))
    assert_same(jax.jit(jax.grad(jax.grad(op)))(2.0), jnp.float32(1200))


# --- rules that are not linear in their upstream --------------------------------------------------


@custom_gradient
def clipped(x):
    return x**2, lambda dy: jnp.clip(7 * dy * x, -50.0, 50.0)


def test_nonlinear_rule():
    # L' = clip(14 x h). In L'', the upstream of `h` is 14 x, by a rule that clips it again:
    # 14 h + clip(98 x**2) where L' is not clipped, and 0 where it is.
    loss = lambda x: clipped(x) ** 2  # noqa: E731
    for f in (loss, jax.jit(loss), jax.checkpoint(loss)):
        assert_same(jax.grad(f)(0.5), jnp.float32(1.75))
        assert_same(jax.grad(jax.grad(f))(0.5), jnp.float32(3.5 + 24.5))
        assert_same(third(f)(0.5), jnp.float32(147))
    xs = jnp.float32([1, 2])
    assert_same(jax.vmap(jax.grad(loss))(xs), jnp.float32([14, 50]))
    assert_same(jax.vmap(jax.grad(jax.grad(loss)))(xs), jnp.float32([14 + 50, 0]))


def test_nonlinear_rule_in_forward_over_reverse():
    with pytest.raises(TypeError, match="forward-mode"):
        jax.hessian(lambda x: clipped(x) ** 2)(1.0)


def test_affine_rule():
    """A rule that adds a constant to the upstream: right in reverse mode, never transposed."""

    @custom_gradient
    def affine(x):
        return x**2, lambda dy: 7 * (dy + 3) * x

    # L' = 7 (2 h + 3) x = 14 x h + 21 x; L'' = 14 h + 14 x (7 (1 + 3/(14x)) x) ...: by hand,
    # with dy1 = 2 h and the inner upstream of h being 14 x, h contributes 7 (14 x + 3) x.
    def second(x):
        return 7 * (2 * x**2 + 3) + 7 * (14 * x + 3) * x

    loss = lambda x: affine(x) ** 2  # noqa: E731
    assert_same(jax.grad(loss)(2.0), jnp.float32(7 * 11 * 2))
    for f in (loss, jax.jit(loss), jax.checkpoint(loss)):
        assert_same(jax.grad(jax.grad(f))(2.0), jnp.float32(second(2.0)))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.hessian(loss)(2.0)


# --- several inputs and outputs -------------------------------------------------------------------


def test_hessian_of_two_inputs():
    """Value `x**2 y`, declared gradient `(7 x y, 5 x)`: the Hessian of `h` is not symmetric."""

    @custom_gradient
    def two(x, y):
        return x**2 * y, lambda dy: (7 * dy * x * y, 5 * dy * x)

    expected = (
        (jnp.float32(7 * 3), jnp.float32(7 * 2)),
        (jnp.float32(5), jnp.float32(0)),
    )
    assert_same(jax.hessian(two, (0, 1))(2.0, 3.0), expected)
    assert_same(jax.jacrev(jax.grad(two, (0, 1)), (0, 1))(2.0, 3.0), expected)


def test_second_order_with_several_outputs():
    @custom_gradient
    def pair(x):
        return {"a": x**2, "b": x**3}, lambda da, db: 7 * da * x + 11 * db * x

    def loss(x):
        y = pair(x)
        return y["a"] * y["b"]

    # L' = 7 b x + 11 a x; L'' = 7 (11 x x + b) + 11 (7 x x + a) = 154 x**2 + 7 b + 11 a
    x = 2.0
    second = 154 * x**2 + 7 * x**3 + 11 * x**2
    assert_same(jax.grad(jax.grad(loss))(x), jnp.float32(second))
    assert_same(jax.jit(jax.hessian(loss))(x), jnp.float32(second))


# --- random rules, against a small algebra --------------------------------------------------------
#
# An expression in `x` and `u = h(x)` is a polynomial {(i, j): c}, the sum of `c x**i u**j`. Its
# derivative is `d/dx + D d/du`, where `D`, in `x` and `u` itself, is the *declared* gradient.


def derivative(p, declared):
    result = {}
    for (i, j), c in p.items():
        if i:
            result[i - 1, j] = result.get((i - 1, j), 0) + c * i
        if j:
            for (k, m), d in declared.items():
                key = (i + k, j - 1 + m)
                result[key] = result.get(key, 0) + c * j * d
    return result


def evaluate(p, x, u):
    return sum((c * x**i * u**j for (i, j), c in p.items()), 0 * x)


def polynomials(most_x, most_u, size):
    powers = st.tuples(st.integers(0, most_x), st.integers(0, most_u))
    return st.dictionaries(powers, st.integers(-3, 3), min_size=1, max_size=size)


random_rules = given(
    value=polynomials(2, 0, 3),
    declared=polynomials(2, 1, 2),
    loss=polynomials(1, 2, 2),
    x=st.sampled_from([-1.5, -0.5, 0.25, 1.0, 2.0]),
)


def check_orders(value, declared, loss, x, around):
    """Compare with the algebra; the rule is `dy * D(x, h(x))`: it may call the function itself."""

    @custom_gradient
    def h(x):
        def grad(dy):
            return dy * evaluate(declared, x, h(x) if any(j for _, j in declared) else 0)

        return evaluate(value, x, 0 * x), grad

    f = lambda x: evaluate(loss, x, h(x))  # noqa: E731
    u = evaluate(value, x, 0.0)
    expected = loss
    for order in range(4):
        derivative_of_f = functools.reduce(lambda g, _: jax.grad(g), range(order), f)
        actual = around(derivative_of_f)(jnp.float32(x))
        wanted = np.float32(evaluate(expected, x, u))
        scale = evaluate({k: abs(c) for k, c in expected.items()}, abs(x), abs(u)) + 1
        np.testing.assert_allclose(actual, wanted, atol=1e-5 * scale, rtol=1e-5)
        assert actual.dtype == jnp.float32
        expected = derivative(expected, declared)


@random_rules
def test_random_rules_agree_with_algebra(value, declared, loss, x):
    check_orders(value, declared, loss, x, lambda f: f)


@pytest.mark.slow
@random_rules
def test_random_rules_agree_with_algebra_under_jit(value, declared, loss, x):
    check_orders(value, declared, loss, x, jax.jit)


def test_a_rule_that_multiplies_by_zero():
    """Zero times an upstream is zero, and still depends on that upstream."""

    @custom_gradient
    def h(x):
        return 3 * x, lambda dy: dy * (h(x) * 0.0) + 7 * dy * h(x)

    # h'' = 7 * 7 h
    assert_same(jax.grad(jax.grad(h))(2.0), jnp.float32(294))
    assert_same(jax.jit(jax.grad(jax.grad(h)))(2.0), jnp.float32(294))


def test_the_algebra_itself():
    """The example of the head, and an undecorated function, whose rule is its derivative."""
    seven_x, u_squared = {(1, 0): 7}, {(0, 2): 1}
    results = []
    p = u_squared
    for _ in range(4):
        results.append(evaluate(p, 2.0, 4.0))
        p = derivative(p, seven_x)
    assert results == [16, 112, 448, 588]
    assert derivative({(3, 1): 2}, {(1, 0): 2}) == {(2, 1): 6, (4, 0): 4}


def test_declaring_an_undecorated_name_twice_is_independent():
    """Two functions made by one factory keep their own rules at every order."""

    def make(factor):
        return custom_gradient(lambda x: (x**2, lambda dy: factor * dy * x))

    seven, three = make(7), make(3)
    # d/dx (7 x three + seven 3 x) = 7 three + 7 x 3 x + 7 x 3 x + 3 seven
    second = jax.grad(jax.grad(lambda x: seven(x) * three(x)))
    assert_same(second(2.0), jnp.float32(7 * 4 + 42 * 4 + 3 * 4))
    assert re.match("<custom_gradient of", repr(seven))
