"""How often user code runs, against a hand-written `jax.custom_vjp`; and what it compiles to.

`f` may be traced once more than by hand, which happens where the rule is an object that cannot
be seen through; the compiled program is that of weights that are passed by hand.
"""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same

from tfgrad_jax import _rules, custom_gradient

RUNS: collections.Counter[str] = collections.Counter()


@pytest.fixture(autouse=True)
def reset():
    RUNS.clear()


def by_hand(w, x):
    """Pass the weight explicitly; made anew at each call, as the closures below are."""

    @jax.custom_vjp
    def f(w, x):
        RUNS["f"] += 1
        return w * x**2

    def forward(w, x):
        RUNS["f"] += 1
        return w * x**2, (w, x)

    def backward(residuals, dy):
        RUNS["rule"] += 1
        w, x = residuals
        return 5 * dy * x**2, 7 * dy * w * x

    f.defvjp(forward, backward)
    return f(w, x)


def explicit(w, x):
    @custom_gradient
    def f(w, x):
        RUNS["f"] += 1

        def grad(dy):
            RUNS["rule"] += 1
            return 5 * dy * x**2, 7 * dy * w * x

        return w * x**2, grad

    return f(w, x)


def undeclared(w, x):
    @custom_gradient
    def f(x):
        RUNS["f"] += 1

        def grad(dy, variables):
            RUNS["rule"] += 1
            return 7 * dy * w * x, [5 * dy * x**2 for _ in variables]

        return w * x**2, grad

    return f(x)


def declared(w, x):
    @custom_gradient(variables={"w": w})
    def f(x):
        RUNS["f"] += 1

        def grad(dy, variables):
            RUNS["rule"] += 1
            return 7 * dy * variables["w"] * x, {"w": 5 * dy * x**2}

        return w * x**2, grad

    return f(x)


def autodiff(w, x):
    @custom_gradient(variables="autodiff")
    def f(x):
        RUNS["f"] += 1

        def grad(dy):
            RUNS["rule"] += 1
            return 7 * dy * w * x

        return w * x**2, grad

    return f(x)


class Opaque:
    """A rule that must be traced to know what it holds."""

    def __init__(self, w, x):
        self.w, self.x = w, x

    def __call__(self, dy, variables):
        RUNS["rule"] += 1
        return 7 * dy * self.w * self.x, [5 * dy * self.x**2 for _ in variables]


def opaque(w, x):
    @custom_gradient
    def f(x):
        RUNS["f"] += 1
        return w * x**2, Opaque(w, x)

    return f(x)


BOTH = (0, 1)
PAIR = jnp.array([3.0, 2.0])

TRANSFORMATIONS = {
    "call": lambda f: f(3.0, 2.0),
    "jit": lambda f: jax.jit(f)(3.0, 2.0),
    "vmap": lambda f: jax.vmap(f)(PAIR, PAIR),
    "grad": lambda f: jax.grad(f, BOTH)(3.0, 2.0),
    "grad by inputs": lambda f: jax.grad(f, 1)(3.0, 2.0),
    "grad by weights": lambda f: jax.grad(f)(3.0, 2.0),
    "jit of grad": lambda f: jax.jit(jax.grad(f, BOTH))(3.0, 2.0),
    "grad of jit": lambda f: jax.grad(jax.jit(f), BOTH)(3.0, 2.0),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f, BOTH))(PAIR, PAIR),
    "grad of vmap": lambda f: jax.grad(lambda w, x: jax.vmap(f)(w, x).sum(), BOTH)(PAIR, PAIR),
    "scan": lambda f: jax.grad(
        lambda w, x: jax.lax.scan(lambda sum_, x: (sum_ + f(w, x), None), 0.0, x)[0], BOTH
    )(3.0, PAIR),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f), BOTH)(3.0, 2.0),
    "cond": lambda f: jax.grad(lambda w, x: jax.lax.cond(x > 0, f, lambda w, x: w * x, w, x), BOTH)(
        3.0, 2.0
    ),
    "hessian": lambda f: jax.hessian(f, BOTH)(3.0, 2.0),
}


def counted(transformation: Any, f: Any) -> collections.Counter[str]:
    RUNS.clear()
    transformation(f)
    return collections.Counter(RUNS)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_against_by_hand(name):
    transformation = TRANSFORMATIONS[name]
    hand = counted(transformation, by_hand)
    for f in (explicit, undeclared, declared, autodiff, opaque):
        runs = counted(transformation, f)
        assert runs["f"] <= hand["f"] + 1, (f.__name__, runs, hand)
        # A second derivative runs the rule once more: the declared one holds there too.
        assert runs["rule"] <= hand["rule"] + 1, (f.__name__, runs, hand)
        if f in (undeclared, declared, autodiff):  # `f` is not even traced once more
            assert runs["f"] <= hand["f"], (f.__name__, runs, hand)


@custom_gradient
def module_level(x):
    RUNS["f"] += 1

    def grad(dy):
        RUNS["rule"] += 1
        return 7 * dy * x

    return x**2, grad


class Layer:
    w = jnp.float32(3.0)

    @custom_gradient
    def method(self, x):
        RUNS["f"] += 1

        def grad(dy):
            RUNS["rule"] += 1
            return 7 * dy * self.w * x

        return self.w * x**2, grad


def closure_of_arrays():
    w = jnp.float32(3.0)

    @custom_gradient
    def f(x):
        RUNS["f"] += 1

        def grad(dy):
            RUNS["rule"] += 1
            return 7 * dy * w * x

        return w * x**2, grad

    return f


@pytest.mark.parametrize(
    "f", [module_level, Layer().method, closure_of_arrays()], ids=["module", "method", "closure"]
)
def test_once_per_eager_call_when_nothing_is_captured(f):
    for _ in range(2):
        assert counted(lambda f: f(2.0), f) == {"f": 1}
        assert counted(lambda f: f(jnp.float32(2.0)), f) == {"f": 1}
        assert counted(lambda f: jax.grad(f)(2.0), f) == {"f": 1, "rule": 1}
        twice = counted(lambda f: jax.grad(lambda x: f(f(x)))(2.0), f)
        assert twice == {"f": 2, "rule": 2}


def test_not_traced_again_by_a_compiled_function():
    f = jax.jit(jax.grad(undeclared, BOTH))
    f(3.0, 2.0)
    assert RUNS == {"f": 1, "rule": 1}
    f(4.0, 5.0)
    assert RUNS == {"f": 1, "rule": 1}


def test_a_rule_that_calls_its_own_function_is_traced_a_few_times_at_any_depth():
    def loss(w, x):
        @custom_gradient
        def exp(x):
            RUNS["f"] += 1
            return jnp.exp(w * x), lambda dy: dy * w * exp(x)

        return exp(x)

    counts = []
    differentiated = loss
    for _ in range(4):
        differentiated = jax.grad(differentiated, 1)
        counts.append(counted(lambda f: jax.jit(f)(1.0, 1.0), differentiated)["f"])
    assert max(counts) <= 8, counts


def test_nested_functions_are_looked_through_once(monkeypatch):
    """The cost of a call must not grow with the square of the depth."""

    def nested(depth):
        @custom_gradient
        def innermost(x):
            return jnp.sin(x), lambda dy: 7 * dy * jnp.cos(x)

        def around(inner):
            @custom_gradient
            def f(x):
                y = inner(x)
                return y, lambda dy: dy * y

            return f

        h = innermost
        for _ in range(depth):
            h = around(h)
        return h

    def looked_through(depth):
        count = 0

        def counting(value, parts=_rules._parts):
            nonlocal count
            count += 1
            return parts(value)

        with monkeypatch.context() as patch:
            patch.setattr(_rules, "_parts", counting)
            got = jax.jit(jax.grad(nested(depth)))(0.5)
        assert_same(got, jnp.float32(np.sin(0.5)))
        return count

    counts = [looked_through(depth) for depth in (4, 8, 16)]
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0])


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_keyword_below_a_function_that_was_looked_through(jit):
    def loss(x):
        @custom_gradient
        def inner(x, *, scale):
            def grad(dy, variables):
                return 5 * dy * scale, [7 * dy * x for _ in variables]

            return scale * x, grad

        @custom_gradient
        def outer(x):
            dx = jax.grad(lambda x: inner(x, scale=3 * x))(x)
            return 1.0 * x, lambda dy: dy * dx

        return outer(x)

    gradient = jax.jit(jax.grad(loss)) if jit else jax.grad(loss)
    assert_same(gradient(2.0), jnp.float32(5 * 6 + 21 * 2))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_what_a_function_assigns_is_seen_by_those_below_it(jit):
    """They have been looked through before `f` ran, and then held no tracer."""

    def loss(x):
        w = None

        @custom_gradient
        def inner(x):
            def grad(dy, variables):
                (v,) = variables
                return 5 * dy * v, [7 * dy * x]

            return w * x, grad

        @custom_gradient
        def outer(x):
            dx = jax.grad(through)(x)
            return 1.0 * x, lambda dy: dy * dx

        def through(x):
            nonlocal w
            w = 3 * x
            return inner(x)

        return outer(x)

    gradient = jax.jit(jax.grad(loss)) if jit else jax.grad(loss)
    # The rule of `outer` is the gradient of `inner` at w = 3 x: 5 w + 3 * 7 x.
    assert_same(gradient(2.0), jnp.float32(5 * 6 + 21 * 2))


def test_a_cell_that_a_function_empties():
    def make():
        scale = 1.0

        @custom_gradient
        def inner(x):
            return x**2, lambda dy: 7 * dy * x * scale

        @custom_gradient
        def outer(x):
            nonlocal scale
            del scale
            y = inner(x)
            scale = 2.0
            return y, lambda dy: 5 * dy * scale

        return outer

    assert_same(jnp.asarray(make()(3.0)), jnp.float32(9))
    assert_same(jax.grad(make())(3.0), jnp.float32(10))


def costs(f: Any, *args: Any) -> tuple[Any, ...]:
    compiled = jax.jit(jax.grad(f, BOTH)).lower(*args).compile()
    analysis, memory = compiled.cost_analysis(), compiled.memory_analysis()
    return analysis["flops"], analysis["bytes accessed"], memory.temp_size_in_bytes


def dense(w, x):
    """A layer whose rule is that of the layer, with the weight closed over."""

    @custom_gradient
    def f(x):
        y = jnp.tanh(x @ w)

        def grad(dy, variables):
            dz = dy * (1 - y**2)
            return dz @ w.T, [x.T @ dz for _ in variables]

        return y, grad

    return f(x)


@jax.custom_vjp
def dense_by_hand(w, x):
    return jnp.tanh(x @ w)


def _forward(w, x):
    y = jnp.tanh(x @ w)
    return y, (w, x, y)


def _backward(residuals, dy):
    w, x, y = residuals
    dz = dy * (1 - y**2)
    return x.T @ dz, dz @ w.T


dense_by_hand.defvjp(_forward, _backward)


@pytest.mark.parametrize("steps", [1, 3], ids=["one call", "scan"])
def test_the_compiled_program_is_that_of_weights_passed_by_hand(steps):
    def loss(layer):
        def of(w, x):
            if steps == 1:
                return layer(w, layer(w, x)).sum()
            return jax.lax.scan(lambda x, _: (layer(w, x), None), x, None, steps)[0].sum()

        return of

    w, x = jnp.ones((32, 32)), jnp.ones((16, 32))
    assert costs(loss(dense), w, x) == costs(loss(dense_by_hand), w, x)
