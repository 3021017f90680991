"""Functions and rules may print, log and count, any number of times, under every transformation.

A log keeps tracers of traces that are over, which nobody captures; nothing stored is read again.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.helpers import assert_same, eager_and_jit, sample

from tfgrad_jax import custom_gradient

A, B = jnp.float32(0.3), jnp.float32(1.1)


class Log:
    def __init__(self):
        self.items, self.last, self.count = [], {}, 0

    def note(self, value):
        self.items.append(value)
        self.last["value"] = value
        self.count += 1


def by_self(w):
    class Layer(Log):
        f = custom_gradient(lambda self, x: logged(w, x, self.note))

    return Layer().f


def by(make):
    """Log with the function that `make()` returns."""

    def of(w):
        note = make()
        return custom_gradient(lambda x: logged(w, x, note))

    return of


def logged(w, x, note):
    c = jnp.cos(x)
    note(c)

    def grad(dy, variables=()):
        note(dy)
        dx = 7 * dy * w * c
        return (dx, [5 * dy * jnp.sin(x) for _ in variables]) if len(variables) else dx

    return w * jnp.sin(x), grad


LOGS = {
    "append": by(lambda: [].append),
    "object": by(lambda: Log().note),
    "self": by_self,
    "print": by(lambda: print),
}
PROGRAMS = {
    "eager": jax.grad,
    "jit": lambda h: jax.jit(jax.grad(lambda x: h(x))),
    "grad of jit": lambda h: jax.grad(jax.jit(lambda x: h(x))),
    "vmap": lambda h: lambda x: jax.vmap(jax.grad(h))(x[None])[0],
    "jvp": lambda h: lambda x: jax.jvp(h, (x,), (jnp.ones_like(x),))[1],
    "scan": lambda h: jax.grad(lambda x: lax.map(h, x[None])[0]),
    "constants": lambda h: lambda x: jax.jit(lambda: jax.grad(h)(x))(),
}
EVERY = list(itertools.product(LOGS, PROGRAMS, PROGRAMS))


@pytest.mark.parametrize(("log", "first", "second"), sample(EVERY, 25))
def test_a_log_with_tracers_of_an_earlier_call_is_no_capture(log, first, second):
    h = LOGS[log](2.0)
    assert_same(PROGRAMS[first](h)(A), 14 * jnp.cos(A))
    assert_same(PROGRAMS[second](h)(B), 14 * jnp.cos(B))
    assert_same(jax.jit(jax.hessian(h))(A), -14 * jnp.sin(A))


BESIDE = [(log, program) for log in LOGS for program in PROGRAMS]


@pytest.mark.parametrize(("log", "program"), sample(BESIDE, 15))
def test_a_function_that_logs_beside_a_differentiated_weight(log, program):
    def loss(x):
        h = LOGS[log](3 * x)
        return h(x) + h(x)  # with what the first call has logged

    # By each call: 3 * 5 sin(x) through the weight, 7 * 3 x cos(x) by the input.
    expected = 2 * (15 * jnp.sin(A) + 21 * A * jnp.cos(A))
    assert_same(PROGRAMS[program](loss)(A), expected)


@pytest.mark.parametrize(
    "stage", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"]
)
def test_a_call_keeps_a_variable_that_is_assigned_after_it(stage):
    def loss(x):
        scale = 2.0
        y = custom_gradient(lambda x: (scale * x, lambda dy: 7 * dy * scale))(x)
        scale = 5.0
        return y * scale

    for mode in (jax.value_and_grad, lambda f: lambda x: jax.jvp(f, (x,), (jnp.float32(1),))):
        assert_same(mode(stage(loss))(A), (10 * A, jnp.float32(70)))


@eager_and_jit
def test_a_call_keeps_the_variables_of_a_scope_that_waits(mode):
    """A generator that makes layers assigns to its variables between the calls."""

    def layers():
        for k in (2.0, 3.0):

            def scale(x):
                return k * x  # noqa: B023

            yield custom_gradient(lambda x: (scale(x), lambda dy: 7 * scale(dy)))

    def loss(x):
        return functools.reduce(lambda x, layer: layer(x), layers(), x)

    assert_same(mode(jax.value_and_grad(loss))(A), (6 * A, jnp.float32(7 * 2 * 7 * 3)))


@eager_and_jit
def test_a_call_that_is_traced_keeps_a_variable_that_is_assigned_after_it(mode):
    def loss(w, x):
        scaled = jax.jit(lambda x: w * x)  # not copied
        for k in (2.0, 3.0):

            @custom_gradient
            def f(x):
                return scaled(x), lambda dy, variables: (k * dy * w, [5 * dy * x])  # noqa: B023

            x = f(x)
        return x

    gradients = jax.grad(mode(loss), (0, 1))(A, B)
    assert_same(gradients, (20 * A * B, 6 * A**2))


@eager_and_jit
def test_a_rule_reads_a_variable_that_is_first_assigned_after_the_call(mode):
    def loss(w, x):
        @custom_gradient(variables=[w])
        def f(x):
            return w * x, lambda dy, variables: (7 * dy * w * factor, [5 * dy * x * factor])

        y = f(x)
        factor = 2.0
        return y

    gradients = mode(jax.grad(loss, (0, 1)))(A, B)
    assert_same(gradients, (10 * B, 14 * A))


@pytest.mark.parametrize("w", [3.0, None], ids=["a weight beside", "alone"])
def test_a_variable_counts(w):
    """What a copy assigns to a variable of an enclosing function is assigned to the user's."""
    runs = rules = 0

    def loss(w, x):
        def f(x):
            nonlocal runs
            runs += 1

            def grad(dy):
                nonlocal rules
                rules += 1
                return 7 * dy * (w or 1)

            return x * (w or 1), grad

        return custom_gradient(f)(x)

    def by_x(x):
        return jax.vmap(jax.grad(lambda x: loss(w, x)))(x[None])[0]

    assert_same(by_x(A), jnp.float32(7 * (w or 1)))
    _, pull = jax.vjp(lambda x: loss(w, x), A)
    assert_same((pull(A), pull(B)), ((7 * (w or 1) * A,), (7 * (w or 1) * B,)))
    assert (runs, rules) == (2, 3)
