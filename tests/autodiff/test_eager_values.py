"""Eagerly, `f` and `grad_fn` see concrete values, in every mode and at every order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import assert_same

from tfgrad_jax import custom_gradient


@custom_gradient
def sign(x):
    """TensorFlow's `differentiable_sign`: the derivative of a sigmoid on one side, by `if`."""

    def grad(dy):
        return dy * jnp.exp(-x) / (1 + jnp.exp(-x)) ** 2 if x > 0 else dy * 0.25

    return (1.0 if x > 0 else -1.0), grad


@custom_gradient
def cube(x):
    return x**3, lambda dy: 7 * dy * x**2 if x > 0 else (None,)


@custom_gradient
def scaled_by(a, b):
    return a * b, lambda dy: (7 * dy * b, 5 * dy * a) if b > 0 else (dy, None)


def of_autodiff(w, x):
    @custom_gradient(variables="autodiff")
    def f(x):
        return (w * x**2 if x > 1 else w * x), lambda dy: 7 * dy * w * x

    return f(x)


S = 1 / (1 + np.exp(-3.0))
BRANCHES = {
    "right": (jax.grad(sign), [3.0], S * (1 - S)),
    "second order": (jax.grad(jax.grad(sign)), [3.0], S * (1 - S) * (1 - 2 * S)),
    "jvp": (jax.jacfwd(sign), [3.0], S * (1 - S)),
    "not mapped": (lambda b: jax.vmap(scaled_by, (0, None))(jnp.ones(1), b)[0], [3.0], 3.0),
    "value under jit": (jax.jit(cube), [2.0], 8.0),  # nothing needs the rule
    "third order": (jax.grad(jax.grad(jax.grad(cube))), [2.0], 14.0),
    "jvp of grad": (jax.jacfwd(jax.grad(cube)), [2.0], 28.0),
    "no gradient on one side": (jax.grad(cube), [-2.0], 0.0),
    "of two inputs, mixed": (lambda a: jax.jacfwd(jax.grad(scaled_by), 1)(a, 3.0), [2.0], 7.0),
    "autodiff, by w": (jax.grad(of_autodiff), [3.0, 2.0], 4.0),
    "autodiff, second order": (jax.grad(jax.grad(lambda w: of_autodiff(w, 2.0) ** 2)), [3.0], 32.0),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_python_branches_on_values(name):
    derivative, args, expected = BRANCHES[name]
    assert_same(derivative(*map(jnp.float32, args)), jnp.float32(expected), rtol=1e-4)


# Forward mode traces a rule for any upstream, so it shows a value only where JAX has one.
NO_VALUE = {
    "jit": lambda h: jax.jit(jax.jacfwd(h))(1.0),
    "scan": lambda h: jax.lax.scan(lambda c, x: (c, jax.jacfwd(h)(x)), 0, jnp.ones(2)),
    "jvp of jvp": lambda h: jax.jacfwd(jax.jacfwd(h))(1.0),
    "grad of jvp": lambda h: jax.grad(jax.jacfwd(h))(1.0),
}


@pytest.mark.parametrize("name", NO_VALUE)
def test_forward_mode_of_a_branch_on_a_traced_value_raises_the_error_of_jax(name):
    """The branch is not on the upstream, so the rule is linear: another error would be untrue."""
    branching = custom_gradient(lambda x: (x * x, lambda dy: 7 * dy * (x if x > 0 else 3 * x)))
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        NO_VALUE[name](branching)
    assert "_autodiff" not in str(caught.value)
    assert sum("Under `jax.jvp`" in note for note in caught.value.__notes__) == 1


READS = {
    "if": (lambda dy: 7 * dy if dy > 0 else dy, jax.errors.TracerBoolConversionError),
    "float": (lambda dy: 7 * dy * float(dy), jax.errors.ConcretizationTypeError),
    "NumPy": (lambda dy: np.sign(np.asarray(dy)) * dy, jax.errors.TracerArrayConversionError),
}


@pytest.mark.parametrize("read", READS)
def test_a_rule_that_reads_its_upstream_runs_once_in_forward_mode(read):
    rule, error = READS[read]
    runs = []
    h = custom_gradient(lambda x: (x, lambda dy: (runs.append(dy), rule(dy))[1]))
    with pytest.raises(error) as caught:
        jax.jvp(h, (1.0,), (1.0,))
    (note,) = [note for note in caught.value.__notes__ if "Under `jax.jvp`" in note]
    assert "test_eager_values.py" in note and "jax.grad" in note
    assert len(runs) == 1
