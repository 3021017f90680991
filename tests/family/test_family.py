"""`recompute_grad` has the derivatives of the function, `grad_pass_through` those of the identity.

`tests/tf_parity/family.py` compares both with TensorFlow's; here is what JAX has besides. The
function that is passed through has the gradient 5 of its own, decorated ones inside have 7.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from support.helpers import assert_same, eager_and_jit, sample
from support.ways import WAYS, assert_derivative

from tfgrad_jax import custom_gradient, grad_pass_through, recompute_grad
from tfgrad_jax.testing import check_gradient

X = jnp.asarray(np.linspace(0.2, 1.4, 4), jnp.float32)
THREE = jnp.float32(3)


@custom_gradient
def seven(x):
    return x * x, lambda dy: 7 * dy * x


def body(x):
    return jnp.sin(x) * jnp.exp(x)


def five(x):
    return 5 * x + 1


def total(f):
    return lambda *args: jnp.sum(f(*args))


BRIEF = "grad", "jit(grad)", "jvp", "hessian"
OF_VECTORS = sorted({*WAYS} - {"grad of grad"})  # whose gradient is no number


@pytest.mark.parametrize("way", sample(OF_VECTORS, 6, BRIEF))
def test_derivatives_are_those_of_the_function_or_of_the_identity(way):
    def squared(f):
        return lambda x: jnp.sum(f(x) ** 2)

    def identity(x):  # with the value of the function that is passed through
        return x + lax.stop_gradient(five(x) - x)

    assert_derivative(WAYS[way], squared(recompute_grad(body)), squared(body), X)
    assert_derivative(WAYS[way], squared(grad_pass_through(five)), squared(identity), X)
    assert_same((recompute_grad(body)(X), grad_pass_through(five)(X)), (body(X), five(X)))
    assert check_gradient(grad_pass_through(five), X, expect="surrogate", reference=identity)


# --- arguments and functions of every kind --------------------------------------------------------


@eager_and_jit
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_gradients_keep_the_dtype_of_the_input(dtype, mode):
    x = jnp.asarray([0.5, 2.0], dtype)
    loss = lambda f: lambda x: jnp.sum(jnp.real(f(x))).astype(jnp.float32)  # noqa: E731
    square = lambda x: x * x  # noqa: E731
    assert_same(mode(jax.grad(loss(recompute_grad(square))))(x), mode(jax.grad(loss(square)))(x))
    for made in ("float16", "float32"):
        f = grad_pass_through(lambda x, made=made: jnp.round(jnp.real(x)).astype(made))
        assert f(x).dtype == made
        assert_same(mode(jax.grad(lambda x, f=f: 2 * loss(f)(x)))(x), jnp.full_like(x, 2))


def test_complex_gradients_are_in_the_convention_of_jax():
    z = jnp.asarray([1 + 2j, 0.5 - 1j], jnp.complex64)
    loss = lambda f: lambda z: jnp.sum(jnp.real((2 + 3j) * f(z)))  # noqa: E731
    expected = jax.grad(loss(lambda z: z))(z)
    assert_same(jax.grad(loss(grad_pass_through(lambda z: 5 * z)))(z), expected)
    holomorphic = jax.grad(total(recompute_grad(lambda z: z * z)), holomorphic=True)(z)
    assert_same(holomorphic, 2 * z)


@eager_and_jit
def test_pytrees_match_leaf_by_leaf(mode):
    """The structures may differ; dictionaries are in the order of keys, without a warning."""

    def rounded(d, y):
        return {"b": jnp.sign(d["b"]), "a": jnp.round(d["a"])}, [5 * y]

    def loss(f, d, y):
        by_key, (third,) = f(d, y)
        return jnp.sum(3 * by_key["a"]) + jnp.sum(5 * by_key["b"]) + 7 * third

    of = functools.partial(loss, grad_pass_through(rounded))
    got = mode(jax.grad(of, (0, 1)))({"b": jnp.ones(2), "a": X}, THREE)
    assert_same(got, ({"b": jnp.full(2, 5.0), "a": jnp.full(4, 3.0)}, jnp.float32(7)))
    of = functools.partial(loss, recompute_grad(rounded))
    got = mode(jax.grad(of, (0, 1)))({"b": jnp.ones(2), "a": X}, THREE)
    assert_same(got, ({"b": jnp.zeros(2), "a": jnp.zeros(4)}, jnp.float32(35)))


@eager_and_jit
def test_integers_masks_keys_and_what_is_not_used(mode):
    key, n, mask = jax.random.key(0), jnp.arange(4), jnp.array([True, False, True, False])

    @recompute_grad
    def f(x, n, mask, key, unused, empty):
        noise = jax.random.normal(key, x.shape, x.dtype)
        return jnp.where(mask, x * x * n.astype(x.dtype), x) * noise

    loss = lambda x, unused: f(x, n, mask, key, unused, jnp.ones((0, 2))).sum()  # noqa: E731
    noise = jax.random.normal(key, X.shape, X.dtype)
    expected = jnp.where(mask, 2 * X * n.astype(X.dtype), 1.0) * noise
    assert_same(mode(jax.grad(loss, (0, 1)))(X, X), (expected, jnp.zeros_like(X)))
    h = grad_pass_through(lambda x, n, one: (jnp.round(x), n + one))
    assert_same(mode(jax.grad(lambda x: h(x, n, 1)[0].sum()))(X), jnp.ones_like(X))
    h = grad_pass_through(lambda one, x: (key, jnp.round(x)))  # a key has no gradient
    assert_same(mode(jax.grad(lambda x: h(jnp.float32(1), x)[1].sum()))(X), jnp.ones_like(X))


def test_outputs_that_do_not_match_are_an_error_where_jax_differentiates():
    h = grad_pass_through(lambda x: (x, x))
    assert_same(h(X), (X, X))
    with pytest.raises(ValueError, match="must match in number and shape") as caught:
        jax.grad(lambda x: h(x)[0].sum())(X)
    assert "inputs:  float32[4]\n  outputs: float32[4], float32[4]\n" in str(caught.value)


class Scaled:
    w = 3.0

    @grad_pass_through
    def passed(self, x):
        return self.w * x * x


DOTS = jax.checkpoint_policies.dots_saveable
CALLABLES = {  # and their gradients, divided by X
    "partial": (recompute_grad(functools.partial(lambda k, x: k * x * x, 2.0)), 4),
    "jit": (recompute_grad(jax.jit(lambda x: x * x)), 2),
    "with a policy": (recompute_grad(policy=DOTS)(lambda x: x * x), 2),
    "passed method": (Scaled().passed, 1 / X),
    "passed jit": (grad_pass_through(jax.jit(jnp.round)), 1 / X),
}


@pytest.mark.parametrize("kind", CALLABLES)
def test_callables_of_every_kind(kind):
    f, slope = CALLABLES[kind]
    assert_same(jax.grad(total(f))(X), slope * X)
    assert_same(jax.jit(jax.grad(total(f)))(X), slope * X)


@pytest.mark.parametrize("decorate", [recompute_grad, grad_pass_through])
def test_metadata_and_errors_are_those_of_the_function(decorate):
    @decorate
    def f(x, k=1):
        """What f does."""
        raise KeyError("from f")

    assert (f.__name__, f.__doc__) == ("f", "What f does.")
    assert str(inspect.signature(f)) == "(x, k=1)"
    with pytest.raises(KeyError, match="from f"):
        jax.grad(total(f))(X)


# --- decorated functions --------------------------------------------------------------------------


@eager_and_jit
def test_decorated_functions_inside_keep_their_rules(mode):
    within = recompute_grad(lambda x: jnp.sin(seven(x)))
    # The second derivative of sin(h) is -sin(h) h'**2 + cos(h) h'', with h' = 7 x.
    x = jnp.float32(0.7)
    second = -jnp.sin(x * x) * (7 * x) ** 2 + jnp.cos(x * x) * 7
    assert_same(mode(jax.grad(within))(x), jnp.cos(x * x) * 7 * x)
    assert_same(mode(jax.jacfwd(within))(x), jnp.cos(x * x) * 7 * x)
    assert_same(mode(jax.grad(jax.grad(within)))(x), second)
    assert_same(mode(jax.grad(total(grad_pass_through(seven))))(X), jnp.ones_like(X))


# --- what is kept ---------------------------------------------------------------------------------


def deep(x):
    x = jnp.sin(checkpoint_name(jnp.sin(jnp.sin(x)), "middle"))
    for _ in range(6):
        x = jnp.sin(x) * x
    return x


NAMED = jax.checkpoint_policies.save_only_these_names("middle")
KEPT = {  # elements for an argument of 100: at least, at most
    "plain": (deep, 600, 10**4),
    "recomputed": (recompute_grad(deep), 0, 100),
    "by name": (recompute_grad(deep, policy=NAMED), 101, 200),
}


@pytest.mark.parametrize("kind", KEPT)
def test_the_arguments_alone_are_kept_or_what_the_policy_says(kind):
    f, least, most = KEPT[kind]
    x = jnp.linspace(0.1, 1.0, 100)
    kept = sum(np.size(leaf) for leaf in jax.tree.leaves(jax.vjp(f, x)[1]))
    assert least <= kept <= most
    assert_same(jax.grad(total(f))(x), jax.grad(total(deep))(x))
