"""Linear operators that are rules: outside of JAX, as each other's rules, and transposed by JAX.

A pair of operators is `x -> 7 M x` and `y -> 7 M^T y` in code that JAX cannot look into, each the
rule of the other. The function under test has the second as its rule, and the value `M x`. The
oracle is a `custom_jvp` with the matrix.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.scipy.sparse.linalg import bicgstab, cg, gmres
from random_programs import explicit_mesh
from support.helpers import assert_same, eager_and_jit

from tfgrad_jax import custom_gradient

N = 4
X, T = jnp.float32([0.5, -1.0, 2.0, 0.25]), jnp.float32([1.0, 2.0, -1.0, 0.5])
MATRIX = np.float32(np.random.default_rng(0).standard_normal((N, N)) + 4 * np.eye(N))


def by_callback(matrix, x):
    return jax.pure_callback(lambda x: matrix @ np.asarray(x), x, x, vmap_method="sequential")


def by_kernel(matrix, x):
    def kernel(m, x, y):
        y[...] = m[...] @ x[...]

    return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(matrix, x)


foreign_p = Primitive("foreign")  # of another library, without a derivative
foreign_p.def_impl(lambda matrix, x: matrix @ x)
foreign_p.def_abstract_eval(lambda matrix, x: x)
mlir.register_lowering(foreign_p, mlir.lower_fun(jnp.matmul, multiple_results=False))
batching.primitive_batchers[foreign_p] = lambda args, dims: (
    jnp.moveaxis(args[1], dims[1], 0) @ args[0].T,
    0,
)
OPAQUE = {"callback": by_callback, "kernel": by_kernel, "primitive": foreign_p.bind}


def pair(apply):
    """Return an operator with a wrong factor in its rule, and the pair that the rule is made of.

    `stop_gradient` is for the second order: JAX differentiates the value then, too.
    """

    @custom_gradient
    def forward(x):
        return 7 * apply(MATRIX, lax.stop_gradient(x)), lambda dy: adjoint(dy)

    @custom_gradient
    def adjoint(y):
        return 7 * apply(MATRIX.T, lax.stop_gradient(y)), lambda dx: forward(dx)

    h = custom_gradient(lambda x: (apply(MATRIX, lax.stop_gradient(x)), adjoint))
    return h, forward, adjoint


@jax.custom_jvp
def reference(x):
    return MATRIX @ x


reference.defjvp(lambda primals, tangents: (reference(*primals), 7 * MATRIX @ tangents[0]))


def loss(h):
    return lambda x: jnp.sum(jnp.sin(h(x)) * jnp.arange(1.0, N + 1))


WAYS = {
    "jvp": lambda h: jax.jvp(h, (X,), (T,))[1],
    "linearize": lambda h: jax.linearize(h, X)[1](T),
    "jacfwd": lambda h: jax.jacfwd(h)(X),
    "grad": lambda h: jax.grad(loss(h))(X),
    "hessian": lambda h: jax.hessian(loss(h))(X),
    "jvp of grad": lambda h: jax.jvp(jax.grad(loss(h)), (X,), (T,))[1],
    "jacfwd of jacfwd": lambda h: jax.jacfwd(jax.jacfwd(loss(h)))(X),
    "grad of jvp": lambda h: jax.grad(lambda x: jax.jvp(loss(h), (x,), (T,))[1])(X),
    "third order": lambda h: jax.jvp(jax.hessian(loss(h)), (X,), (T,))[1],
    "jvp of scan": lambda h: jax.jvp(
        lambda x: lax.scan(lambda c, _: (h(c) / 7, None), x, None, length=2)[0], (X,), (T,)
    )[1],
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", OPAQUE)
def test_an_operator_and_its_adjoint_have_both_modes_at_every_order(kind, way):
    h, _, _ = pair(OPAQUE[kind])
    for run in (lambda f: f(), lambda f: jax.jit(f)()):
        got, expected = (run(lambda h=h: WAYS[way](h)) for h in (h, reference))
        assert_same(got, expected, rtol=1e-3, atol=1e-3)


def test_the_adjoint_is_not_run_to_transpose_it():
    calls = []

    @custom_gradient
    def forward(x):
        calls.append("forward")
        return by_callback(MATRIX, x), lambda dy: adjoint(dy)

    def ran(y):
        calls.append("adjoint")
        return MATRIX.T @ np.asarray(y)

    @custom_gradient
    def adjoint(y):
        return jax.pure_callback(ran, y, y), lambda dx: forward(dx)

    assert_same(jax.jvp(forward, (X,), (T,)), (MATRIX @ X, MATRIX @ T), rtol=1e-5)
    assert calls.count("adjoint") == 0


@eager_and_jit
def test_an_adjoint_that_has_no_rule_serves_the_first_order(mode):
    forward = custom_gradient(
        lambda x: (by_callback(MATRIX, x), lambda dy: by_callback(MATRIX.T, dy))
    )
    h = custom_gradient(lambda x: (jnp.sin(x), lambda dy: forward(7 * dy * jnp.cos(x))))
    tangent = mode(lambda x: jax.jvp(h, (x,), (T,))[1])(X)
    assert_same(tangent, 7 * jnp.cos(X) * (MATRIX.T @ T), rtol=1e-5)


@pytest.mark.parametrize("mask", [np.zeros(N), np.arange(N)], ids=["all dead", "alive"])
@eager_and_jit
def test_a_rule_is_linear_whatever_its_residuals_are(mode, mask):
    _, _, adjoint = pair(by_callback)
    h = custom_gradient(lambda x, m: (x, lambda dy: (7 * dy + adjoint(m * dy), None)))
    tangent = mode(lambda m: jax.jvp(lambda x: h(x, m), (X,), (T,))[1])(jnp.float32(mask))
    assert_same(tangent, 7 * T + mask.astype(np.float32) * (7 * MATRIX @ T), rtol=1e-5)


def declared(value, rule, x=X):
    """Return a function whose rule calls another one, of this value and rule, opaque to JAX."""

    @custom_gradient
    def inner(y):
        return jax.pure_callback(value, y, y), lambda d: rule(y, d)

    return custom_gradient(lambda x: (jnp.sin(x), lambda dy: inner(7 * dy)))


@pytest.mark.parametrize(
    ("value", "rule", "says"),
    [
        (
            lambda y: np.clip(y, -1, 1),
            lambda y, d: jnp.where(abs(y) < 1, d, 0),
            "`inner`, whose derivative",
        ),
        (lambda y: y**2, lambda y, d: 2 * y * d, "`inner`, whose derivative depends on"),
        (lambda y: y, lambda y, d: jnp.clip(d, -1, 1), "`max`|`clamp`"),
        (lambda y: y, lambda y, d: d + 1, "`add` of an upstream and a constant"),
        (lambda y: y, lambda y, d: X, "does not depend on the upstreams"),
    ],
    ids=["clip", "square", "clipped gradient", "affine gradient", "constant gradient"],
)
def test_an_opaque_function_that_is_not_linear_is_refused(value, rule, says):
    with pytest.raises(TypeError, match=says):
        jax.jvp(declared(value, rule), (X,), (T,))


def test_what_is_not_linear_is_refused_around_an_opaque_function():
    _, _, adjoint = pair(by_callback)
    clipped = custom_gradient(lambda y: (adjoint(jnp.clip(y, -1, 1)), lambda d: d))
    negative = jax.jit(jnp.negative)
    for rule in (lambda dy: by_callback(MATRIX, dy), lambda dy: negative(by_callback(MATRIX, dy))):
        h = custom_gradient(lambda x, rule=rule: (x, rule))
        with pytest.raises(TypeError, match="contains `pure_callback`, which JAX cannot"):
            jax.jvp(h, (X,), (T,))
    for rule in (clipped, lambda dy: adjoint(dy) + 1, lambda dy: adjoint(dy) * dy):
        h = custom_gradient(lambda x, rule=rule: (x, rule))
        with pytest.raises(TypeError, match="is not linear in its upstream"):
            jax.jvp(h, (X,), (T,))


# --- jax.linear_transpose -------------------------------------------------------------------------


def tripled(w):
    return custom_gradient(lambda x: (3 * w * x, lambda dy: 7 * w * dy))


def transposed(f, ct=T):
    return jax.linear_transpose(f, X)(ct)[0]


def test_linear_transpose_is_the_rule():
    assert_same(transposed(tripled(1.0)), 7 * T)
    assert_same(transposed(lambda x: tripled(2.0)(x) + x), 15 * T)
    assert_same(jax.jit(lambda w: transposed(tripled(w)))(X), 7 * X * T)
    # JAX's `linear_call` has no derivative by what it captures, and no batching.
    with pytest.raises(AssertionError):
        jax.grad(lambda w: transposed(tripled(w)).sum())(X)
    with pytest.raises(NotImplementedError, match="linear_call"):
        jax.vmap(lambda t: transposed(tripled(1.0), t))(jnp.stack([T, X]))
    for apply in OPAQUE.values():
        assert_same(transposed(pair(apply)[0]), 7 * MATRIX.T @ T, rtol=1e-5)
    two = custom_gradient(lambda x, y: (x + y, lambda dy: (3 * dy, 5 * dy)))
    assert_same(jax.linear_transpose(two, X, X)(T), (3 * T, 5 * T))


@pytest.mark.parametrize(
    "staged",
    [
        jax.jit,
        jax.checkpoint,
        lambda h: lambda x: lax.scan(lambda c, _: (h(c), None), x, None, length=1)[0],
        lambda h: lambda x: lax.cond(X[0] > 0, h, h, x),
        lambda h: lambda x: jax.vmap(h)(x),
    ],
    ids=["jit", "checkpoint", "scan", "cond", "vmap"],
)
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


SOLVERS = {
    "bicgstab": lambda a, b: bicgstab(a, b, tol=1e-7)[0],
    "gmres": lambda a, b: gmres(a, b, tol=1e-7)[0],
    "custom_linear_solve": lambda a, b: lax.custom_linear_solve(
        a, b, *[lambda a, b: bicgstab(a, b, tol=1e-7)[0]] * 2
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("kind", ["plain", *OPAQUE])
def test_a_decorated_product_in_a_solver(kind, solver):
    """JAX transposes the product to differentiate the solution; its rule is wrong by a factor."""
    apply = {"plain": jnp.matmul, **OPAQUE}[kind]
    h, _, _ = pair(apply)
    inverse = jnp.linalg.inv(MATRIX)
    got = jax.grad(lambda b: jnp.sum(jnp.sin(SOLVERS[solver](h, b))))(X)
    assert_same(got, inverse.T @ jnp.cos(inverse @ X) / 7, rtol=1e-3, atol=1e-4)
    assert_same(jax.jvp(lambda b: SOLVERS[solver](h, b), (X,), (T,))[1], inverse @ T, rtol=1e-3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", [contextlib.nullcontext, explicit_mesh])
@pytest.mark.parametrize("solver", [cg, bicgstab])
def test_a_rule_that_solves_has_both_modes_at_second_order(solver, mesh):
    """JAX's solvers pass their right side and a constant through one `device_put`."""
    matrix = MATRIX.T @ MATRIX
    inverse = np.linalg.inv(matrix)
    solve = lambda dy: solver(lambda v: matrix @ v, dy, tol=1e-7)[0]  # noqa: E731
    h = custom_gradient(lambda x: (x**2, lambda dy: solve(dy * jnp.sin(x))))
    push = lambda x: jax.jvp(h, (x,), (T,))[1]  # noqa: E731
    pull = lambda x: jax.vjp(h, x)[1](T)[0]  # noqa: E731
    of_push, of_pull = jnp.diag(jnp.cos(X) * (inverse @ T)), inverse @ jnp.diag(jnp.cos(X) * T)
    for f, expected in ((push, of_push), (pull, of_pull)):
        for derivative in (jax.jacfwd, jax.jacrev):
            for mode in (lambda f: f, jax.jit):
                with mesh():
                    got = mode(derivative(f))(X)
                assert_same(got, expected, rtol=1e-3, atol=1e-3)


ON_DEVICES = {
    "cg": lambda dy: cg(lambda v: 2 * v, 4 * dy, tol=1e-7)[0],
    "device_put": lambda dy: 2 * jax.device_put((dy, MATRIX))[0],
    "barrier": lambda dy: 2 * lax.optimization_barrier((dy, MATRIX))[0],
    "psum": lambda dy: sum(lax.psum((dy, dy), "i")),
    "jitted": jax.jit(lambda dy: 2 * lax.optimization_barrier((dy, MATRIX))[0]),
}


@pytest.mark.parametrize("name", ON_DEVICES)
def test_a_rule_on_devices_has_both_modes(name):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": jax.P(), "out_specs": jax.P(), "check_vma": False}
    rule = jax.shard_map(ON_DEVICES[name], mesh=mesh, **specs)  # twice the upstream
    h = custom_gradient(lambda x: (x**2, lambda dy: rule(dy * jnp.sin(x))))
    push = jax.jit(lambda x: jax.jvp(h, (x,), (T,))[1])
    assert_same(push(X), 2 * jnp.sin(X) * T, rtol=1e-5)
    assert_same(jax.jit(lambda x: jax.vjp(h, x)[1](T)[0])(X), 2 * jnp.sin(X) * T, rtol=1e-5)
    if name != "cg":  # of which JAX has no second derivative there
        assert_same(jax.jvp(push, (X,), (T,))[1], 2 * jnp.cos(X) * T**2, rtol=1e-5)


def test_the_jaxpr_of_a_staged_call_shows_the_users_name():
    @custom_gradient
    def scaled(x):
        return 3 * x, lambda dy: 7 * dy

    text = str(jax.make_jaxpr(scaled)(X))
    assert "name=scaled" in text and "_value" not in text


@pytest.mark.parametrize("protocol", ["undeclared", "declared"])
def test_the_jaxpr_of_a_gradient_holds_the_operations_alone(protocol):
    """One trace finds undeclared variables; nothing of it is left."""

    def loss(w, x):
        @custom_gradient(variables=[w] if protocol == "declared" else None)
        def scaled(x):
            y = jnp.sin(x * w)
            return y, lambda dy, variables: (7 * dy * w * y, [5 * dy * x * y])

        return jnp.sum(scaled(x))

    closed = jax.make_jaxpr(jax.grad(loss, (0, 1)))(X, T)
    names = [eqn.primitive.name for eqn in closed.jaxpr.eqns]
    assert names.count("sin") == 1 and not {"jit", "pjit"} & {*names}
    assert_same(
        jax.core.eval_jaxpr(closed.jaxpr, closed.consts, X, T),
        [5 * T * jnp.sin(X * T), 7 * X * jnp.sin(X * T)],
    )
