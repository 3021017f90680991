"""`recompute_grad` has the derivatives of the function, `grad_pass_through` those of the identity.

The function that is passed through has the gradient 5 of its own, decorated ones inside have 7.
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
from support.ways import FORWARD, REVERSE, SECOND, assert_derivative

from tfgrad_jax import custom_gradient, grad_pass_through, recompute_grad

X = jnp.asarray(np.linspace(0.2, 1.4, 4), jnp.float32)
THREE = jnp.float32(3)


@custom_gradient
def seven(x):
    return x * x, lambda dy: 7 * dy * x


def body(x):
    return jnp.sin(x) * jnp.exp(x)


def five(x):
    return 5 * x + 1


def identity_with(value):
    """Return the oracle of a function that is passed through: its value plus `x - x`."""
    return lambda x: x + lax.stop_gradient(value(x) - x)


def total(f):
    return lambda *args: jnp.sum(f(*args))


WAYS = {**REVERSE, **FORWARD, **SECOND}


BRIEF = "grad", "jit(grad)", "jvp", "hessian"
OF_VECTORS = sorted({*WAYS} - {"grad of grad"})  # whose gradient is no number


@pytest.mark.parametrize("way", sample(OF_VECTORS, 12, BRIEF))
def test_derivatives_are_those_of_the_function_or_of_the_identity(way):
    def squared(f):
        return lambda x: jnp.sum(f(x) ** 2)

    assert_derivative(WAYS[way], squared(recompute_grad(body)), squared(body), X)
    passed, identity = grad_pass_through(five), identity_with(five)
    assert_derivative(WAYS[way], squared(passed), squared(identity), X)
    assert_same((recompute_grad(body)(X), passed(X)), (body(X), five(X)))


# --- arguments and functions of every kind --------------------------------------------------------


@eager_and_jit
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_gradients_keep_the_dtype_of_the_input(dtype, mode):
    x = jnp.asarray([0.5, 2.0], dtype)
    loss = lambda f: lambda x: jnp.sum(jnp.real(f(x))).astype(jnp.float32)  # noqa: E731
    square = recompute_grad(lambda x: x * x)
    assert_same(mode(jax.grad(loss(square)))(x), mode(jax.grad(loss(lambda x: x * x)))(x))
    for made in ("float16", "float32"):
        f = grad_pass_through(lambda x, made=made: jnp.round(jnp.real(x)).astype(made))
        assert f(x).dtype == made
        assert_same(mode(jax.grad(lambda x, f=f: 2 * loss(f)(x)))(x), jnp.full_like(x, 2))


def test_complex_gradients_pass_through_in_the_convention_of_jax():
    z = jnp.asarray([1 + 2j, 0.5 - 1j], jnp.complex64)
    loss = lambda f: lambda z: jnp.sum(jnp.real((2 + 3j) * f(z)))  # noqa: E731
    expected = jax.grad(loss(lambda z: z))(z)
    assert_same(jax.grad(loss(grad_pass_through(lambda z: 5 * z)))(z), expected)
    made = grad_pass_through(lambda x: lax.complex(x, x))
    g = jax.grad(lambda x: jnp.sum(jnp.real(3 * made(x)) + jnp.imag(5 * made(x))))(X)
    assert_same(g, jnp.full_like(X, 3))
    holomorphic = jax.grad(total(recompute_grad(lambda z: z * z)), holomorphic=True)(z)
    assert_same(holomorphic, 2 * z)


@eager_and_jit
def test_pytrees_match_leaf_by_leaf(mode):
    """The structures may differ; dictionaries are in the order of keys, without a warning."""

    def rounded(d, y):
        return {"b": jnp.sign(d["b"]), "a": jnp.round(d["a"])}, [5 * y]

    f = grad_pass_through(rounded)

    def loss(d, y):
        by_key, (third,) = f(d, y)
        return jnp.sum(3 * by_key["a"]) + jnp.sum(5 * by_key["b"]) + 7 * third

    got = mode(jax.grad(loss, (0, 1)))({"b": jnp.ones(2), "a": X}, THREE)
    assert_same(got, ({"b": jnp.full(2, 5.0), "a": jnp.full(4, 3.0)}, jnp.float32(7)))
    g = recompute_grad(lambda d, y: {"p": d["a"] * d["b"][0], "o": (d["b"][1] * y, 3.0, True)})
    loss = lambda d, y: g(d, y)["p"] + 10 * g(d, y)["o"][0]  # noqa: E731
    two, four, five = map(jnp.float32, (2, 4, 5))
    got = mode(jax.grad(loss, (0, 1)))({"a": two, "b": [THREE, four]}, five)
    assert_same(got, ({"a": THREE, "b": [two, jnp.float32(50)]}, jnp.float32(40)))


@eager_and_jit
def test_settings_reach_the_function_as_they_are(mode):
    seen = []

    def f(x, mode, flag, n, nothing, function, dtype, *rest, scale=1, **named):
        seen.append((mode, flag, n, nothing, function, dtype, rest, scale, named))
        return x * x * (3 if mode == "triple" and flag and n == 3 else 1)

    settings = ("triple", True, 3, None, len, jnp.float32, "rest")
    for decorate, expected in ((recompute_grad, 6 * X), (grad_pass_through, jnp.ones_like(X))):
        h = functools.partial(decorate(f), scale=2, axis=None)
        assert_same(mode(jax.grad(lambda x, h=h: h(x, *settings).sum()))(X), expected)
        expected = (*settings[:6], ("rest",), 2, {"axis": None})
        assert seen
        assert all(repr(s) == repr(expected) and s[1] is True for s in seen)
        seen.clear()


def test_arguments_by_name_and_twice():
    f = recompute_grad(lambda x, k=1.0, *, s=1.0: x * x * k * s)
    assert_same(jax.grad(lambda x: f(x=x).sum())(X), 2 * X)
    assert_same(jax.grad(lambda k: f(X, k=k, s=2.0).sum())(THREE), 2 * jnp.sum(X * X))
    assert_same(jax.grad(lambda s: f(X, s=s).sum())(THREE), jnp.sum(X * X))
    assert_same(
        jax.grad(lambda x: recompute_grad(lambda x, y: x * y * y)(x, x).sum())(X), 3 * X * X
    )
    for f in (lambda x, y=0.0: jnp.round(x), lambda y=0.0, x=None: jnp.round(x)):
        h = grad_pass_through(f)
        assert_same(jax.grad(lambda x, h=h: h(x=x).sum())(X), jnp.ones_like(X))


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
    h = grad_pass_through(lambda one, x: (key, jnp.round(x)))
    assert_same(mode(jax.grad(lambda x: h(jnp.float32(1), x)[1].sum()))(X), jnp.ones_like(X))
    to_int = grad_pass_through(lambda x: x.astype(jnp.int32))
    loss = lambda x: to_int(x).astype(jnp.float32).sum()  # noqa: E731
    with pytest.warns(UserWarning, match="no output that has a gradient"):
        assert_same(mode(jax.grad(loss))(X), jnp.zeros_like(X))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=[])
class Scaled:
    """A pytree, and yet `self` is no input."""

    factor = 2.0

    def __init__(self, w):
        self.w = w

    def plain(self, x):
        return self.w * x * x

    method = recompute_grad(plain)
    passed = grad_pass_through(plain)
    static = staticmethod(recompute_grad(lambda x: x * x))
    of_class = classmethod(recompute_grad(lambda cls, x: cls.factor * x * x))
    __call__ = method


CALLABLES = {
    "method": (Scaled(THREE).method, 6), "callable object": (Scaled(THREE), 6),
    "class": (Scaled.of_class, 4),
    "partial": (recompute_grad(functools.partial(lambda k, x: k * x * x, 2.0)), 4),
    "jit": (recompute_grad(jax.jit(lambda x: x * x)), 2),
    "with a policy": (
        recompute_grad(policy=jax.checkpoint_policies.dots_saveable)(lambda x: x * x), 2,
    ),
    "passed": (Scaled(THREE).passed, 0),
    "passed jit": (grad_pass_through(jax.jit(jnp.round)), 0),
    "passed NumPy": (grad_pass_through(lambda x: jnp.asarray(np.round(np.asarray(x)))), 0),
}  # fmt: skip


@pytest.mark.parametrize("kind", CALLABLES)
def test_callables_of_every_kind(kind):
    f, slope = CALLABLES[kind]
    expected = slope * X if slope else jnp.ones_like(X)
    assert_same(jax.grad(total(f))(X), expected)
    if kind != "passed NumPy":
        assert_same(jax.jit(jax.grad(total(f)))(X), expected)


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


# --- what they close over, and decorated functions ------------------------------------------------


@eager_and_jit
def test_closed_over_values_have_gradients_if_recomputed_and_none_if_passed_through(mode):
    def loss(decorate, w, x):
        return decorate(lambda x: jnp.sin(w * x))(x).sum()

    w = jnp.float32(1.5)
    plain = functools.partial(loss, lambda f: f)
    for derivative in (lambda f: jax.grad(f, (0, 1)), jax.hessian):
        got = mode(derivative(functools.partial(loss, recompute_grad)))(w, X)
        assert_same(got, derivative(plain)(w, X))
    got = mode(jax.grad(functools.partial(loss, grad_pass_through), (0, 1)))(w, X)
    assert_same(got, (jnp.float32(0), jnp.ones_like(X)))
    by_self = mode(jax.grad(lambda w: Scaled(w).method(X).sum() + Scaled(w).passed(X).sum()))
    assert_same(by_self(w), jnp.sum(X * X))
    assert_same(mode(jax.grad(lambda w: recompute_grad(lambda: w * w)()))(THREE), jnp.float32(6))


@eager_and_jit
def test_decorated_functions_inside_keep_their_rules(mode):
    within = recompute_grad(lambda x: jnp.sin(seven(x)))
    assert_same(mode(jax.grad(total(within)))(X), jnp.cos(X * X) * 7 * X)
    # The second derivative of sin(h) is -sin(h) h'**2 + cos(h) h'', with h' = 7 x.
    x = jnp.float32(0.7)
    expected = -jnp.sin(x * x) * (7 * x) ** 2 + jnp.cos(x * x) * 7
    assert_same(mode(jax.grad(jax.grad(within)))(x), expected)
    assert_same(mode(jax.jacfwd(within))(x), jnp.cos(x * x) * 7 * x)
    assert_same(mode(jax.grad(total(grad_pass_through(seven))))(X), jnp.ones_like(X))


# --- what is kept, and what runs again ------------------------------------------------------------


def deep(x):
    for _ in range(6):
        x = jnp.sin(x) * x
    return x


def named(x):
    return jnp.sin(checkpoint_name(jnp.sin(jnp.sin(x)), "middle"))


POLICIES = jax.checkpoint_policies
KEPT = {  # elements for an argument of 100: at least, at most
    "plain": (deep, 600, 10**4), "recomputed": (recompute_grad(deep), 0, 100),
    "nothing": (recompute_grad(deep, policy=POLICIES.nothing_saveable), 0, 100),
    "by name": (
        recompute_grad(named, policy=POLICIES.save_only_these_names("middle")), 101, 200,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KEPT)
def test_the_arguments_alone_are_kept_or_what_the_policy_says(kind):
    f, least, most = KEPT[kind]
    x = jnp.linspace(0.1, 1.0, 100)
    kept = sum(np.size(leaf) for leaf in jax.tree.leaves(jax.vjp(f, x)[1]))
    assert least <= kept <= most
    assert_same(jax.grad(total(f))(x), jax.grad(total(named if kind == "by name" else deep))(x))


def test_outputs_that_do_not_match_are_an_error_where_jax_differentiates():
    h = grad_pass_through(lambda x: (x, x))
    assert_same(h(X), (X, X))
    with pytest.raises(ValueError, match="must match in number and shape") as error:
        jax.grad(lambda x: h(x)[0].sum())(X)
    assert "inputs:  float32[4]\n  outputs: float32[4], float32[4]\n" in str(error.value)
