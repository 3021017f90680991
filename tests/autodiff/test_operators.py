"""Operators outside of JAX and solvers: what more they do than `rules.py` shows of each rule.

That an operator and its adjoint are each other's rules, `rules.py` says; here is what runs, what
`jax.linear_transpose` makes of a decorated function, and what a solver does with one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import ad
from jax.scipy.sparse.linalg import bicgstab
from rules import OPAQUE, OPERATOR, X, by_callback, pair
from support.helpers import assert_same, eager_and_jit

from tfgrad_jax import custom_gradient

T = jnp.float32([1.0, 2.0, -1.0, 0.5])
STAGED = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda d: lax.cond(X[0] > 0, f, lambda d: d, d),
    "scan": lambda f: lambda d: lax.scan(lambda c, _: (f(c), None), d, None, length=1)[0],
}


def test_the_adjoint_is_not_run_to_transpose_it():
    calls = []

    @custom_gradient
    def forward(x):
        calls.append("forward")
        return by_callback(OPERATOR, x), lambda dy: adjoint(dy)

    def ran(y):
        calls.append("adjoint")
        return OPERATOR.T @ np.asarray(y)

    @custom_gradient
    def adjoint(y):
        return jax.pure_callback(ran, y, y), lambda dx: forward(dx)

    assert_same(jax.jvp(forward, (X,), (T,)), (OPERATOR @ X, OPERATOR @ T), rtol=1e-5)
    assert calls.count("adjoint") == 0


# --- what is declared inside a rule holds ---------------------------------------------------------

# Megatron's f and g: each device has its own loss, so these are each other's transposes, and not
# what JAX makes of a `psum` (`vmap` and an unchecked `shard_map` transpose it to another one).


@custom_gradient
def spread(x):
    return x, lambda dy: added(dy)


@custom_gradient
def added(x):
    return lax.psum(x, "i"), lambda dy: spread(dy)


TANGENTS = {spread: lambda t: t, added: lambda t: lax.psum(t, "i")}
OVER = {"vmap": lambda f: jax.vmap(f, axis_name="i"), "shard_map": lambda f: on_devices(f)}


def on_devices(f):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    ins = jax.P("i")
    return jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=ins, check_vma=False)


def pushed(f):
    return lambda x: jax.jvp(f, (x,), (x + 1,))[1]


def gradient(h):
    return lambda x: jax.vjp(h, x)[1](2 * h(x))[0]


# The derivative of a loss has the pair in it in reverse, its transpose in forward mode. The
# gradient of `h(x)**2` is `of(2 h(x))`, its tangent `of(2 h(t))`.
WAYS = {
    "jvp": (pushed, lambda h, of: pushed(TANGENTS[h])),
    "jvp of a square": (
        lambda h: pushed(lambda x: h(x) ** 2),
        lambda h, of: pushed(lambda x: TANGENTS[h](x) ** 2),
    ),
    "jvp of a gradient": (
        lambda h: pushed(gradient(h)),
        lambda h, of: lambda x: TANGENTS[of](2 * TANGENTS[h](x + 1)),
    ),
}


@eager_and_jit
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("h", "of"), [(spread, added), (added, spread)], ids=["spread", "added"])
def test_forward_mode_keeps_each_rule_of_a_pair_over_an_axis(h, of, way, over, mode):
    x = jnp.float32([1, 2, 3, 4])
    ours, expected = WAYS[way]
    assert_same(mode(OVER[over](ours(h)))(x), OVER[over](expected(h, of))(x))


@eager_and_jit
@pytest.mark.parametrize("around", [lambda f: f, *STAGED.values()], ids=["plain", *STAGED])
def test_another_gradient_than_that_of_its_value_is_the_transpose(around, mode):
    """Reverse mode runs `11 d`; what is declared of it is 5, and forward mode transposes that."""
    inner = custom_gradient(lambda d: (11 * d, lambda dy: 5 * dy))
    of_jax = jax.custom_jvp(lambda d: 11 * d)
    of_jax.defjvp(lambda primals, tangents: (of_jax(*primals), 5 * tangents[0]))
    for declared in (inner, of_jax):
        h = custom_gradient(lambda x, d=declared: (jnp.sin(x), lambda dy: around(d)(x * dy)))
        assert_same(mode(lambda x, h=h: jax.vjp(h, x)[1](T)[0])(X), 11 * X * T)
        assert_same(mode(lambda x, h=h: jax.jvp(h, (x,), (T,))[1])(X), 5 * X * T)


# --- jax.linear_transpose -------------------------------------------------------------------------


def tripled(w):
    return custom_gradient(lambda x: (3 * w * x, lambda dy: 7 * w * dy))


def transposed(f, ct=T):
    return jax.linear_transpose(f, X)(ct)[0]


def test_linear_transpose_is_the_rule():
    assert_same(transposed(tripled(1.0)), 7 * T)
    assert_same(transposed(lambda x: tripled(2.0)(x) + x), 15 * T)
    assert_same(jax.jit(lambda w: transposed(tripled(w)))(X), 7 * X * T)
    for apply in OPAQUE.values():
        assert_same(transposed(pair(apply)[0]), 7 * OPERATOR.T @ T, rtol=1e-5)
    two = custom_gradient(lambda x, y: (x + y, lambda dy: (3 * dy, 5 * dy)))
    assert_same(jax.linear_transpose(two, X, X)(T), (3 * T, 5 * T))


@pytest.mark.parametrize("staged", [*STAGED.values(), jax.vmap], ids=[*STAGED, "vmap"])
@pytest.mark.parametrize("taught", [False, True], ids=["", "stop_gradient has a transpose"])
def test_linear_transpose_of_a_transformed_function_is_an_error(staged, taught, monkeypatch):
    if taught:  # as `import lineax` does
        stop = jax.make_jaxpr(lax.stop_gradient)(1.0).eqns[0].primitive
        transpose = lambda ct, _: [ct]  # noqa: E731
        monkeypatch.setitem(ad.primitive_transposes, stop, transpose)
        assert_same(transposed(jax.jit(lambda x: 3 * lax.stop_gradient(x))), 3 * T)
    with pytest.raises(NotImplementedError, match="Transpose rule"):
        transposed(staged(tripled(1.0)))


def test_linear_transpose_of_a_function_that_is_not_linear_is_an_error():
    with pytest.raises(TypeError, match="a gradient that depends on its inputs"):
        transposed(custom_gradient(lambda x: (x * x, lambda dy: dy * x)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["plain", *OPAQUE])
def test_a_decorated_product_in_a_solver(kind):
    """JAX transposes the product to differentiate the solution; its rule is wrong by a factor."""
    h, _, _ = pair({"plain": jnp.matmul, **OPAQUE}[kind])
    solve, inverse = lambda b: bicgstab(h, b, tol=1e-7)[0], np.linalg.inv(OPERATOR)
    got = jax.grad(lambda b: jnp.sum(jnp.sin(solve(b))))(X)
    assert_same(got, inverse.T @ jnp.cos(inverse @ X) / 7, rtol=1e-3, atol=1e-4)
    assert_same(jax.jvp(solve, (X,), (T,))[1], inverse @ T, rtol=1e-3)


def test_a_transpose_is_mapped_and_differentiated_by_what_the_function_closes_over():
    def transposed(w, ct):
        f = custom_gradient(lambda x, z: ((w * x, z), lambda dx, dz: (7 * w * dx, 5 * dz)))
        return jax.linear_transpose(f, ct, ct)((ct, w * ct))[0]

    rows = jnp.float32([2, 3])
    assert_same(jax.vmap(transposed, (None, 0))(jnp.float32(4), rows), 28 * rows)
    assert_same(jax.vmap(jax.grad(transposed), (None, 0))(jnp.float32(4), rows), 7 * rows)
