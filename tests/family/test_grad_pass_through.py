"""`grad_pass_through`: the value of the function, the gradient of the identity."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same

from tfgrad_jax import custom_gradient, grad_pass_through

X = jnp.asarray(np.linspace(0.2, 1.4, 4), jnp.float32)


@custom_gradient
def seven(x):
    return x * x, lambda dy: 7 * dy * x


def shifted(x):
    """A function whose own gradient is 5, not 1."""
    return 5 * x + 1


def test_pass_through_value_and_gradient():
    value, g = jax.value_and_grad(lambda x: (3 * grad_pass_through(shifted)(x)).sum())(X)
    assert_same(value, jnp.sum(3 * shifted(X)))
    assert_same(g, 3 * jnp.ones_like(X))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
        lambda f: jax.grad(lambda x: jax.jit(f)(x).sum()),
        lambda f: jax.vmap(jax.grad(f)),
        lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum()),
        lambda f: jax.grad(lambda x: jax.lax.map(f, x).sum()),
        lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum()),
        lambda f: jax.grad(lambda x: jax.lax.cond(x[0] > 0, f, lambda x: x, x).sum()),
        lambda f: jax.grad(lambda x: jax.lax.fori_loop(0, 2, lambda _, x: f(x), x).sum()),
    ],
    ids=["jit", "in jit", "of vmap", "in vmap", "map", "checkpoint", "cond", "loop"],
)
def test_pass_through_under_transformations(transform):
    assert_same(transform(grad_pass_through(shifted))(X), jnp.ones_like(X))


def test_pass_through_second_order():
    """The value in `f(x)**2` is differentiated by the rule again: 2, where f's own is 10."""
    f = grad_pass_through(shifted)
    x = jnp.float32(2.0)
    assert_same(jax.grad(lambda x: f(x) ** 2)(x), 2 * shifted(x))
    assert_same(jax.grad(jax.grad(lambda x: f(x) ** 2))(x), jnp.float32(2.0))
    assert_same(jax.hessian(lambda x: f(x) ** 2)(x), jnp.float32(2.0))
    assert_same(jax.grad(jax.grad(f))(x), jnp.float32(0.0))


def test_pass_through_several_inputs_in_order():
    f = grad_pass_through(lambda x, y: (jnp.round(x), jnp.sign(y)))

    def loss(x, y):
        a, b = f(x, y)
        return jnp.sum(3 * a) + jnp.sum(5 * b)

    g = jax.grad(loss, (0, 1))(X, jnp.ones(2, jnp.float32))
    assert_same(g, (jnp.full(4, 3.0, jnp.float32), jnp.full(2, 5.0, jnp.float32)))


def test_pass_through_pytrees_leaf_by_leaf():
    """The structures may differ; the leaves match in order (dictionaries by sorted key)."""
    f = grad_pass_through(lambda d: (jnp.round(d["a"]), [jnp.sign(d["b"])]))

    def loss(d):
        first, (second,) = f(d)
        return jnp.sum(3 * first) + jnp.sum(5 * second)

    g = jax.grad(loss)({"b": jnp.ones(2, jnp.float32), "a": X})
    assert_same(g, {"b": jnp.full(2, 5.0, jnp.float32), "a": jnp.full(4, 3.0, jnp.float32)})


@pytest.mark.parametrize(
    ("given", "made"), [("float32", "float16"), ("bfloat16", "float32"), ("float16", "bfloat16")]
)
def test_pass_through_casts_to_the_dtype_of_the_input(given, made):
    f = grad_pass_through(lambda x: jnp.round(x).astype(made))
    x = X.astype(given)
    assert f(x).dtype == made
    assert_same(jax.grad(lambda x: (2 * f(x)).sum().astype(jnp.float32))(x), jnp.full_like(x, 2))


def test_pass_through_integer_outputs_and_inputs_have_no_gradient():
    f = grad_pass_through(lambda x: x.astype(jnp.int32))
    assert_same(jax.grad(lambda x: f(x).astype(jnp.float32).sum())(X), jnp.zeros_like(X))
    h = grad_pass_through(lambda x, n: (jnp.round(x), n + 1))
    n = jnp.arange(3)
    assert_same(jax.grad(lambda x: h(x, n)[0].sum())(X), jnp.ones_like(X))
    to_float = grad_pass_through(lambda n: n.astype(jnp.float32))
    assert_same(jax.grad(lambda x: (x[:3] * to_float(n)).sum())(X), jnp.array([0, 1, 2, 0.0]))


def test_pass_through_complex():
    z = jnp.asarray([1 + 2j, 0.5 - 1j], jnp.complex64)
    f = grad_pass_through(lambda z: 5 * z)
    expected = jax.grad(lambda z: jnp.sum(jnp.real((2 + 3j) * z)))(z)
    assert_same(jax.grad(lambda z: jnp.sum(jnp.real((2 + 3j) * f(z))))(z), expected)
    real = grad_pass_through(lambda z: jnp.abs(z))
    g = jax.grad(lambda z: jnp.sum(2 * real(z)))(z)
    assert_same(g, jnp.full(2, 2 + 0j, jnp.complex64))
    made = grad_pass_through(lambda x: jax.lax.complex(x, x))
    g = jax.grad(lambda x: jnp.sum(jnp.real(3 * made(x)) + jnp.imag(5 * made(x))))(X)
    assert_same(g, jnp.full_like(X, 3))


@pytest.mark.parametrize("compiled", [False, True])
def test_pass_through_static_arguments_and_keywords(compiled):
    @grad_pass_through
    def f(x, mode, digits=0, *, function=None):
        assert isinstance(mode, str)
        assert isinstance(digits, int)
        return function(x, digits) if mode == "round" else x

    g = jax.grad(lambda x: f(x, "round", digits=1, function=jnp.round).sum())
    assert_same((jax.jit(g) if compiled else g)(X), jnp.ones_like(X))
    assert_same(jax.grad(lambda x: f(x=x, mode="none").sum())(X), jnp.ones_like(X))


@pytest.mark.parametrize("compiled", [False, True])
def test_pass_through_stops_what_is_closed_over(compiled):
    def loss(w, x):
        return grad_pass_through(lambda x: jnp.round(w * x))(x).sum()

    g = jax.grad(loss, (0, 1))
    expected = jnp.zeros_like(X), jnp.ones_like(X)
    assert_same((jax.jit(g) if compiled else g)(X + 1, X), expected)


def test_pass_through_methods():
    class Quantizer:
        def __init__(self, step):
            self.step = step

        @grad_pass_through
        def __call__(self, x):
            return jnp.round(x / self.step) * self.step

        def plain(self, x):
            return jnp.round(x / self.step) * self.step

    q = Quantizer(jnp.float32(0.5))
    assert_same(jax.grad(lambda x: q(x).sum())(X), jnp.ones_like(X))
    assert_same(jax.grad(lambda x: grad_pass_through(q.plain)(x).sum())(X), jnp.ones_like(X))
    by_step = jax.grad(lambda s: Quantizer(s)(X).sum())(jnp.float32(0.5))
    assert_same(by_step, jnp.float32(0.0))


def test_pass_through_a_decorated_function_hides_its_rule():
    assert_same(jax.grad(lambda x: grad_pass_through(seven)(x).sum())(X), jnp.ones_like(X))


def test_pass_through_in_a_rule():
    quantize = grad_pass_through(jnp.round)
    h = custom_gradient(lambda x: (x * x, lambda dy: dy * quantize(7 * x)))
    x = jnp.float32(0.7)
    assert_same(jax.grad(h)(x), jnp.float32(5.0))
    assert_same(jax.grad(jax.grad(h))(x), jnp.float32(7.0))


def test_pass_through_sees_concrete_values_eagerly():
    f = grad_pass_through(lambda x: jnp.asarray(np.round(np.asarray(x))))
    assert_same(jax.grad(lambda x: f(x).sum())(X), jnp.ones_like(X))


def test_pass_through_keeps_the_metadata():
    def f(x, k=1):
        """What f does."""
        return x * k

    h = grad_pass_through(f)
    assert (h.__name__, h.__doc__) == ("f", "What f does.")
    assert inspect.signature(h) == inspect.signature(f)


@pytest.mark.parametrize(
    "f",
    [
        functools.partial(lambda k, x: jnp.round(k * x), 1.0),
        jax.jit(jnp.round),
        jnp.round,
        type("Round", (), {"__call__": lambda self, x: jnp.round(x)})(),
    ],
    ids=["partial", "jit", "jnp", "object"],
)
def test_pass_through_any_callable(f):
    assert_same(jax.grad(lambda x: grad_pass_through(f)(x).sum())(X), jnp.ones_like(X))


@pytest.mark.parametrize(
    ("f", "inputs", "outputs"),
    [
        (lambda x: jnp.sum(x), "float32[4]", "float32[]"),
        (lambda x: (x, x), "float32[4]", "float32[4], float32[4]"),
        (lambda x: (), "float32[4]", "none"),
        (lambda x: x[None], "float32[4]", "float32[1, 4]"),
    ],
    ids=["shape", "more", "none", "rank"],
)
@pytest.mark.parametrize("differentiated", [False, True])
def test_pass_through_mismatch_is_an_error_at_the_call(f, inputs, outputs, differentiated):
    h = grad_pass_through(f)
    with pytest.raises(ValueError, match="must match in number and shape") as error:
        jax.vjp(h, X) if differentiated else h(X)
    assert f"inputs:  {inputs}\n" in str(error.value)
    assert f"outputs: {outputs}\n" in str(error.value)
    assert "custom_gradient" in str(error.value)


def test_pass_through_in_forward_mode():
    f = grad_pass_through(shifted)
    assert_same(jax.jvp(f, (X,), (2 * X,)), (shifted(X), 2 * X))
    assert_same(jax.jacfwd(f)(X), jnp.eye(4))
    assert_same(jax.jvp(grad_pass_through(jnp.round), (X,), (X,)), (jnp.round(X), X))
