"""How often user code runs: `f` once per call, the rule once per backward pass."""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same

from tfgrad_jax import custom_gradient


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
