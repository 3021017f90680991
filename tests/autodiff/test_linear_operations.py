"""Which rules are linear maps: forward mode applies the transpose, or names what is in the way.

A linear rule is a matrix: its columns are the rule applied to the unit vectors, and its transpose,
by NumPy, is what forward mode must apply. A rule that is no linear map must be refused, with the
name of the operation that is to blame.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same, eager_and_jit
from jax import lax

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.slow

N = 4
X = jnp.asarray([0.5, -1.0, 2.0, 0.25], jnp.float32)
MASK = X > 0
INDEX = jnp.asarray([2, 0, 2])
MATRIX = jnp.asarray(np.random.default_rng(0).standard_normal((N, N)), jnp.float32) + 4 * jnp.eye(N)
ZEROS, ONES = jnp.zeros(N), jnp.ones(N)


def scanned(body):
    """Return the rule that applies `body(carry, x)` along `X`, beginning with the upstream."""
    return lambda dy: lax.scan(lambda c, x: (body(c, x), jnp.sum(c)), dy, X)


@jax.custom_jvp
def bent(x):
    return jnp.abs(x)


bent.defjvp(lambda primals, tangents: (bent(*primals), 7 * tangents[0]))

LINEAR = {
    "identity": lambda dy: dy,
    "zero": lambda dy: jnp.zeros(3),
    "mul": lambda dy: X * dy * 2.0,
    "div": lambda dy: dy / X,
    "neg": lambda dy: -dy,
    "add": lambda dy: dy + 3 * dy[::-1],
    "sub": lambda dy: X * dy - dy,
    "add zero": lambda dy: dy + 0.0,
    "sub zeros": lambda dy: ZEROS - dy,
    "times zero": lambda dy: 0.0 * dy,
    "multiplied sum with zeros": lambda dy: (dy + ZEROS * X) * X,
    "where": lambda dy: jnp.where(MASK, dy, 0),
    "where not": lambda dy: jnp.where(MASK, jnp.zeros_like(dy), dy),
    "where both": lambda dy: jnp.where(MASK, dy, 2 * dy),
    "select by index": lambda dy: lax.select_n(jnp.asarray([0, 1, 1, 0]), dy, 3 * dy),
    "concatenate": lambda dy: jnp.concatenate([jnp.zeros(2), dy, dy[:1]]),
    "pad": lambda dy: jnp.pad(dy, (1, 2)),
    "interior pad": lambda dy: lax.pad(dy, jnp.float32(0), [(1, 0, 1)]),
    "stack": lambda dy: jnp.stack([dy, ZEROS, 2 * dy]),
    "reshape, transpose": lambda dy: dy.reshape(2, 2).T,
    "sum": lambda dy: dy.sum(),
    "mean": lambda dy: dy.mean(),
    "broadcast": lambda dy: jnp.broadcast_to(dy[:, None], (N, 3)),
    "cumsum": lambda dy: jnp.cumsum(dy[::-1])[::-1],
    "roll": lambda dy: jnp.roll(dy, 1),
    "diag": lambda dy: jnp.diag(dy),
    "tril": lambda dy: jnp.tril(jnp.outer(dy, X)),
    "gather": lambda dy: dy[INDEX],
    "gather along an axis": lambda dy: jnp.take_along_axis(dy, jnp.argsort(X), 0),
    "slice": lambda dy: dy[1:3],
    "dynamic slice": lambda dy: lax.dynamic_slice(dy, (jnp.argmax(X),), (2,)),
    "dynamic update of zeros": lambda dy: lax.dynamic_update_slice(ZEROS, dy[:2], (1,)),
    "dynamic update by zeros": lambda dy: lax.dynamic_update_slice(dy, ZEROS[:2], (1,)),
    "scatter-add": lambda dy: ZEROS.at[INDEX].add(dy[:3]),
    "scatter-add to the upstream": lambda dy: dy.at[INDEX].add(dy[:3]),
    "scatter": lambda dy: ZEROS.at[jnp.asarray([3, 1])].set(dy[:2]),
    "segment sum": lambda dy: jax.ops.segment_sum(dy, jnp.asarray([0, 1, 0, 2]), 3),
    "dot": lambda dy: MATRIX @ dy,
    "outer": lambda dy: jnp.outer(dy, X),
    "einsum": lambda dy: jnp.einsum("ij,j,j->i", MATRIX, X, dy),
    "convolution": lambda dy: jnp.convolve(dy, X, mode="same"),
    "solve": lambda dy: jnp.linalg.solve(MATRIX.T, dy),
    "triangular solve": lambda dy: lax.linalg.triangular_solve(
        jnp.tril(MATRIX), dy[:, None], left_side=True, lower=True
    ),
    "fft": lambda dy: jnp.fft.rfft(dy).real,
    "complex": lambda dy: jnp.imag(jnp.conj(lax.complex(dy, X * dy))),
    "of another precision": lambda dy: (dy.astype(jnp.bfloat16) * 2).astype(jnp.float32),
    "reduce_window": lambda dy: lax.reduce_window(dy, 0.0, lax.add, (2,), (1,), "SAME"),
    "jit": lambda dy: jax.jit(lambda dy, x: dy * x)(dy, X),
    "jit in jit": lambda dy: jax.jit(lambda dy: jax.jit(lambda dy: dy * 3)(dy) + dy)(dy),
    "jit of a constant": lambda dy: jax.jit(jnp.sin)(X) * dy,
    "jit that returns a zero": lambda dy: dy + jax.jit(lambda: jnp.zeros(N))(),
    "checkpoint": lambda dy: jax.checkpoint(lambda dy: jnp.sin(X) * dy)(dy),
    "vmap": lambda dy: jax.vmap(lambda d, row: d * row)(dy, MATRIX),
    "map": lambda dy: lax.map(lambda d: 3 * d, dy),
    "cond": lambda dy: lax.cond(X[0] > 0, lambda dy: 3 * dy, lambda dy: ZEROS, dy),
    "switch": lambda dy: lax.switch(INDEX[1], [lambda dy: X * dy, lambda dy: dy], dy),
    "scan": scanned(lambda c, x: c * x + c[::-1]),
    "fori_loop": lambda dy: lax.fori_loop(0, 3, lambda i, c: c * X[i], dy),
    "constant custom_jvp": lambda dy: bent(X) * dy,
    "constant of jax.nn": lambda dy: jax.nn.softmax(X) * (dy - jnp.sum(dy * jax.nn.relu(X))),
    "stop_gradient of a constant": lambda dy: lax.stop_gradient(X) * dy,
    "constant while": lambda dy: lax.while_loop(lambda x: x[0] < 9, lambda x: 2 * x, X) * dy,
    "linalg of constants": lambda dy: jnp.linalg.inv(MATRIX) @ dy,
    "linear function": lambda dy: jax.jvp(lambda x: jnp.sin(x) * x, (X,), (dy,))[1],
    "another transpose": lambda dy: jax.vjp(lambda x: jnp.sin(MATRIX @ x), X)[1](dy)[0],
    "nonlinear of zero": lambda dy: dy * X + 0.0 * jnp.exp(X),
}

NOT_LINEAR = {
    "power": (lambda dy: dy**2, "integer_pow|square|mul"),
    "product": (lambda dy: dy * dy[::-1], "`mul` of two upstreams"),
    "square in a dot": (lambda dy: jnp.dot(dy, dy), "`dot_general` of two upstreams"),
    "quotient": (lambda dy: X / dy, "`div`"),
    "normalized": (lambda dy: dy / jnp.sqrt(jnp.sum(dy**2)), "integer_pow|square|mul|sqrt|div"),
    "clip": (lambda dy: jnp.clip(dy, -1, 1), "max|min|clamp"),
    "sign": (lambda dy: jnp.sign(dy), "sign"),
    "abs": (lambda dy: jnp.abs(dy), "abs"),
    "tanh": (lambda dy: X * jnp.tanh(dy), "tanh"),
    "exp": (lambda dy: jnp.exp(dy), "exp"),
    "round": (lambda dy: jnp.round(dy), "round"),
    "max": (lambda dy: jnp.max(dy), "max"),
    "sort": (lambda dy: jnp.sort(dy), "sort"),
    "comparison": (lambda dy: jnp.where(dy > 0, dy, 0), "select_n|gt"),
    "index": (lambda dy: X[jnp.argmax(dy)] * ONES, "argmax|gather|dynamic_slice|add"),
    "add a constant": (lambda dy: dy + 1, "`add` of an upstream and a constant"),
    "add a capture": (lambda dy: dy + X, "`add` of an upstream and a constant"),
    "subtract": (lambda dy: X - dy, "`sub` of an upstream and a constant"),
    "add a computed constant": (lambda dy: dy + jnp.cos(ZEROS), "`add` of an upstream and"),
    "where": (lambda dy: jnp.where(MASK, dy, 1), "`select_n` of an upstream and a constant"),
    "concatenate": (lambda dy: jnp.concatenate([dy, X]), "`concatenate` of an upstream and"),
    "pad": (lambda dy: jnp.pad(dy, 1, constant_values=1), "`pad` of an upstream and a constant"),
    "scatter": (lambda dy: ONES.at[1].set(dy[0]), "`scatter` of an upstream and a constant"),
    "scatter-add": (lambda dy: X.at[INDEX].add(dy[:3]), "`scatter-add` of an upstream and"),
    "dynamic update": (
        lambda dy: lax.dynamic_update_slice(X, dy[:2], (1,)),
        "`dynamic_update_slice` of an upstream and a constant",
    ),
    "jit": (lambda dy: jax.jit(lambda dy: dy + 1)(dy), "`add` of an upstream and a constant"),
    "jit of a product": (lambda dy: jax.jit(lambda a: a * a)(dy), "`mul` of two upstreams"),
    "checkpoint": (lambda dy: jax.checkpoint(lambda dy: dy + X)(dy), "`add` of an upstream and"),
    "scan": (scanned(lambda c, x: jnp.sin(c)), "sin|scan"),
    "affine scan": (scanned(lambda c, x: c + x), "add|scan"),
    "affine cond": (lambda dy: lax.cond(MASK[0], lambda d: d + X, lambda d: d, dy), "add|cond"),
    "cond on the upstream": (
        lambda dy: lax.cond(dy[0] > 0, lambda d: d, lambda d: 2 * d, dy),
        "cond|gt|convert_element_type",
    ),
    "affine loop": (lambda dy: lax.fori_loop(0, 2, lambda i, c: c + X, dy), "add|scan|while"),
    "ignores the upstream": (lambda dy: X, "upstream"),
    "constant in one gradient": (lambda dy: [dy, X], "upstream"),
}


def declared_by(rule, *upstreams):
    """Return a function of no particular value whose gradients are what `rule` returns.

    Also its arguments, which are like the gradients, for upstreams like the given ones.
    """

    @custom_gradient(convention="jax")
    def h(*xs):
        return list(upstreams), lambda dys: jax.tree.leaves(rule(*dys))

    return h, tuple(jax.tree.leaves(rule(*upstreams)))


def push(rule, upstreams, tangents, mode=lambda f: f):
    """Return the tangents of the outputs."""
    h, args = declared_by(rule, *upstreams)
    return mode(lambda *tangents: jax.jvp(h, args, tangents)[1])(*tangents)


@pytest.mark.parametrize("name", LINEAR)
def test_forward_mode_applies_the_transpose(name):
    rule = LINEAR[name]
    h, args = declared_by(rule, X)
    rng = np.random.default_rng(1)
    tangents = [jnp.asarray(rng.integers(-8, 9, a.shape) / 4, a.dtype) for a in args]
    (dy,) = push(rule, [X], tangents)
    columns = jax.vmap(lambda unit: jax.tree.leaves(rule(unit)))(jnp.eye(N, dtype=jnp.float32))
    expected = sum(
        np.asarray(c).reshape(N, -1) @ np.ravel(t) for c, t in zip(columns, tangents, strict=True)
    )
    assert_same(dy, jnp.asarray(expected, jnp.float32), rtol=2e-5, atol=2e-5)
    assert_same(jax.vjp(h, *args)[1]([X]), args)  # reverse mode runs the rule


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_forward_mode_names_the_operation(name):
    rule, operation = NOT_LINEAR[name]
    h, args = declared_by(rule, X)
    assert_same(jax.vjp(h, *args)[1]([X]), args)  # reverse mode runs the rule
    with pytest.raises(TypeError, match=operation):
        push(rule, [X], args)


@eager_and_jit
def test_several_upstreams_and_gradients(mode):
    def rule(a, b):
        return [MATRIX @ a + 2 * b, jnp.sum(a), X * b]

    da, db = push(rule, [ONES, 2 * X], [X, jnp.float32(3), -X], mode)
    assert_same(da, MATRIX.T @ X + 3)
    assert_same(db, 2 * X - X * X)


def test_product_of_two_upstreams():
    with pytest.raises(TypeError, match="`mul` of two upstreams"):
        push(lambda a, b: a * b, [X, X], [X])


def test_upstream_that_is_not_used():
    assert_same(push(lambda a, b: 3 * a, [X, ONES], [X]), [3 * X, ZEROS])


def test_complex_rules():
    z = lax.complex(X, X[::-1])
    for rule, expected in (
        (lambda dy: dy * z, lambda t: t * z),
        (lambda dy: jnp.conj(dy), lambda t: jnp.conj(t)),
        (lambda dy: dy * z + jnp.conj(dy), lambda t: t * z + jnp.conj(t)),
    ):
        assert_same(push(rule, [z], [2 * z]), [expected(2 * z)])


def test_rule_that_branches_on_captured_values():
    assert_same(push(lambda dy: 3 * dy if X[0] > 0 else 5 * dy, [X], [X]), [3 * X])


def test_rule_that_branches_on_its_upstream():
    with pytest.raises(TypeError, match="branch on the upstream"):
        push(lambda dy: 3 * dy if dy[0] > 0 else 5 * dy, [X], [X])


def test_traced_constants():
    @jax.jit
    def pushed(x, t):
        return push(lambda dy: jnp.where(x > 0, x * dy, 0), [X], [t])

    assert_same(pushed(X, ONES), [jnp.where(X > 0, X, 0)])

    @jax.jit
    def refused(x):
        return push(lambda dy: dy + x, [X], [x])

    with pytest.raises(TypeError, match="`add` of an upstream and a constant"):
        refused(X)
