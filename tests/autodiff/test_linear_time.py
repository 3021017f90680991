"""What a rule calls is followed once for each kind of its operands, however often it is called.

Functions that each call the one below twice hold 2**n calls of the lowest one, and JAX traces each
once. What is counted is how often an analysis looks at an operation.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.helpers import assert_same

from tfgrad_jax import custom_gradient
from tfgrad_jax._autodiff.linearity import Linearity
from tfgrad_jax._jax import jaxpr


def tower(levels, lowest):
    """Return a function that calls the lowest one 2**levels times."""
    f = jax.jit(lowest)
    for _ in range(levels):
        f = jax.jit(lambda x, below=f: below(below(x)))
    return f


@pytest.fixture
def steps(monkeypatch):
    """Count the operations that an analysis looks at."""
    counted = []

    def counting(kind):
        def step(self, eqn, operands, step=kind.step):
            counted.append(eqn)
            return step(self, eqn, operands)

        monkeypatch.setattr(kind, "step", step)

    for kind in (Linearity, jaxpr.Dependence):
        counting(kind)
    return counted


LOWEST = {
    "linear": lambda d: -d,
    "stopped": lambda d: -lax.stop_gradient(d),
    "a function with a rule": custom_gradient(lambda d: (-d, lambda dy: -dy)),
    "a loop": lambda d: lax.fori_loop(0, 3, lambda _, c: -c, d),
    "a branch": lambda d: lax.cond(True, jnp.negative, jnp.positive, d),
}


@pytest.mark.parametrize("lowest", LOWEST)
def test_a_rule_of_nested_functions_that_call_twice(lowest, steps):
    counts = []
    for levels in (4, 16):
        h = custom_gradient(lambda x, n=levels: (jnp.sin(x), tower(n, LOWEST[lowest])))
        got = jax.make_jaxpr(lambda x, h=h: jax.jvp(h, (x,), (x,))[1])(2.0)
        counts.append(len(steps))
        if levels == 4:  # of an even number of them
            assert_same(jax.core.eval_jaxpr(got.jaxpr, got.consts, 2.0), [jnp.float32(2)])
        steps.clear()
    assert counts[1] <= counts[0] + 12 * 20, counts


@pytest.mark.parametrize("mode", [jax.jit, jax.vmap], ids=["jit", "vmap of jit"])
def test_the_value_of_nested_functions_that_call_twice(mode, steps):
    counts = []
    for levels in (4, 16):
        h = custom_gradient(lambda x, n=levels: (tower(n, jnp.negative)(x), lambda dy: 7 * dy))
        run = mode(jax.jit(h))
        jax.make_jaxpr(run)(jnp.ones(2))  # XLA would take its time for all the calls
        if levels == 4:
            assert_same(run(jnp.ones(2)), jnp.ones(2))
        counts.append(len(steps))
        steps.clear()
    assert 0 < counts[1] <= counts[0] + 12 * 20, counts
