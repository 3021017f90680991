"""What a function closes over is seen through mutable arrays (`jax.new_ref`) too.

The value is `w x**2` in every case, by way of a Ref. The declared derivatives are `7 w x` for the
input and, where the rule takes `variables`, `5 x**2` for the weight.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same
from jax import lax
from ways import (
    REVERSE,
    SECOND,
    assert_derivative,
    by,
    by_hand,
    gradient,
    hand_written,
    jvp,
    linearize,
    skip_where_jax_fails,
)

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.deep

# JAX maps no function that makes a Ref of a value that is not mapped, as `jacfwd` does.
FORWARD = {"jvp": jvp, "linearize": linearize}
TWICE = {name: SECOND[name] for name in ("grad of grad", "jacrev of jacrev")}
SOME = ("grad", "jit(grad)", "grad(vmap)", "jvp", "grad of grad")


def initial(w, x):
    return jax.new_ref(w * x**2)[...]


def written(w, x):
    ref = jax.new_ref(jnp.zeros_like(x))
    ref[...] = w * x**2
    return ref[...]


def added(w, x):
    ref = jax.new_ref(jnp.zeros_like(x))
    ref[...] += w * x
    return ref[...] * x


def frozen(w, x):
    ref = jax.new_ref(jnp.zeros_like(x))
    ref[...] = w * x**2
    return jax.freeze(ref)


def written_in_jit(w, x):
    ref = jax.new_ref(jnp.zeros_like(x))

    @jax.jit
    def write(ref, x):
        ref[...] = w * x**2

    write(ref, x)
    return ref[...]


def captured_by_jit(w, x):
    ref = jax.new_ref(jnp.zeros_like(x))

    @jax.jit
    def write(x):
        ref[...] = w * x**2

    write(x)
    return ref[...]


def in_a_loop(w, x):
    ref = jax.new_ref(jnp.zeros_like(x))

    def body(i, _):
        ref[...] += w * x / 4

    lax.fori_loop(0, 4, body, None)
    return ref[...] * x


def by_a_chain(w, x):
    first, second = jax.new_ref(jnp.zeros_like(x)), jax.new_ref(jnp.zeros_like(x))
    first[...] = w * x
    second[...] = first[...] * x
    first[...] = jnp.zeros_like(x)
    return second[...]


REFS = [initial, written, added, frozen, written_in_jit, captured_by_jit, in_a_loop, by_a_chain]


def with_variables(compute):
    def h(w, x):
        @custom_gradient
        def f(x):
            def grad(dy, variables):
                (v,) = variables
                assert v is w
                return 7 * dy * v * x, [5 * dy * x**2]

            return compute(w, x), grad

        return f(x)

    return h


def without(compute, variables=None):
    def h(w, x):
        @custom_gradient(variables=variables)
        def f(x):
            return compute(w, x), lambda dy: 7 * dy * w * x

        return f(x)

    return h


declared = hand_written(lambda w, x: w * x**2, lambda w, x: 5 * x**2, lambda w, x: 7 * w * x)
ordinary = hand_written(lambda w, x: w * x**2, lambda w, x: x**2, lambda w, x: 7 * w * x)


def squared(h):
    return lambda w, x: h(w, x) ** 2


def test_values():
    for compute in REFS:
        assert float(compute(3.0, jnp.float32(2))) == 12


@pytest.mark.parametrize("compute", REFS)
@by({**REVERSE, **FORWARD, **TWICE}, SOME)
def test_variables(compute, way):
    args = jnp.float32(3), jnp.float32(2)
    hand = by_hand(way, compute, lambda w, x: 5 * x**2, lambda w, x: 7 * w * x)
    skip_where_jax_fails(way, squared(hand), squared(declared), *args)
    assert_derivative(way, squared(with_variables(compute)), squared(declared), *args)


@pytest.mark.parametrize("compute", REFS)
@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_error_for_a_lost_weight(compute, mode):
    h, args = without(compute), (jnp.float32(3), jnp.float32(2))
    for differentiate in (gradient, jvp):
        with pytest.raises(TypeError, match=r"float32\[\]"):
            mode(differentiate(h))(*args)
    assert_same(mode(jax.grad(h, 1))(*args), jnp.float32(42))  # `w` is not differentiated


@pytest.mark.parametrize("compute", REFS)
@by({**REVERSE, **FORWARD, **TWICE}, SOME)
def test_autodiff(compute, way):
    args = jnp.float32(3), jnp.float32(2)
    skip_where_jax_fails(way, squared(compute), squared(lambda w, x: w * x**2), *args)
    h = squared(without(compute, "autodiff"))
    try:
        assert_derivative(way, h, squared(ordinary), *args)
    except TypeError as error:  # forward mode transposes; JAX cannot where a loop makes a Ref
        assert re.search("new_ref.*cannot transpose", str(error))


# --- a captured Ref that holds a differentiated value ---------------------------------------------


def test_a_captured_ref_that_holds_a_weight():
    """Made outside of `f` from a weight: as good as the weight itself."""

    def h(variables):
        def of(w, x):
            ref = jax.new_ref(w * 1.0)

            @custom_gradient(variables=variables)
            def f(x):
                kept = ref[...]
                return kept * x**2, lambda dy: 7 * dy * kept * x

            return f(x)

        return of

    args = jnp.float32(3), jnp.float32(2)
    for variables in (None, "autodiff"):  # no gradient goes through it: an error, and not a zero
        with pytest.raises(TypeError, match="closes over"):
            gradient(h(variables))(*args)
