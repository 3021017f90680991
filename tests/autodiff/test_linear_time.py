"""What a rule calls is followed once for each kind of its operands, however often it is called.

Functions that each call the one below twice hold 2**n calls of the lowest one, and JAX traces each
once. With 24 levels, what followed every call would not end.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.helpers import assert_same

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.timeout(120)


def tower(levels, lowest):
    """Return a function that calls the lowest one 2**levels times."""
    f = jax.jit(lowest)
    for _ in range(levels):
        f = jax.jit(lambda x, below=f: below(below(x)))
    return f


LOWEST = {
    "linear": lambda d: -d,
    "a function with a rule": custom_gradient(lambda d: (-d, lambda dy: -dy)),
    "a loop": lambda d: lax.fori_loop(0, 3, lambda _, c: -c, d),
    "a branch": lambda d: lax.cond(True, jnp.negative, jnp.positive, d),
}


@pytest.mark.parametrize("lowest", LOWEST)
def test_a_rule_of_nested_functions_that_call_twice(lowest):
    for levels in (4, 24) if lowest == "linear" else (4,):  # the others take longer to lower
        h = custom_gradient(lambda x, n=levels: (jnp.sin(x), tower(n, LOWEST[lowest])))
        push = jax.jit(lambda x, h=h: jax.jvp(h, (x,), (x,))[1])
        push.lower(2.0)  # which transposes the rule; XLA would take its time for all the calls
        if levels == 4:  # of an even number of them
            assert_same(push(2.0), jnp.float32(2))


@pytest.mark.parametrize("mode", [jax.jit, jax.vmap], ids=["jit", "vmap of jit"])
def test_the_value_of_nested_functions_that_call_twice(mode):
    for levels in (4, 24):
        h = custom_gradient(lambda x, n=levels: (tower(n, jnp.negative)(x), lambda dy: 7 * dy))
        run = mode(jax.jit(h))
        jax.make_jaxpr(run)(jnp.ones(2))
        if levels == 4:
            assert_same(run(jnp.ones(2)), jnp.ones(2))
