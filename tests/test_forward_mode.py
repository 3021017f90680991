"""`forward_mode=True`: every kind of forward differentiation, from the same rule as reverse mode.

Each case declares seven times the true gradient. The plain function `seven(f)` has the value of `f`
and seven times its derivative, at every order and in both modes, by JAX's own rules alone: that is
what all results are compared with.
"""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same
from jax import export, lax

from tfgrad_jax import custom_gradient

declared = functools.partial(custom_gradient, forward_mode=True)
X = jnp.asarray([0.5, -1.2, 2.0], jnp.float32)
W = jnp.asarray([[0.3, -0.7, 1.1], [0.2, 0.9, -0.4]], jnp.float32)
Z = lax.complex(X, X[::-1])


def seven(f):
    """Give the value of `f` a derivative seven times as large."""

    def g(*args):
        return jax.tree.map(
            lambda y: (
                7 * y - 6 * lax.stop_gradient(y) if jnp.issubdtype(y.dtype, jnp.inexact) else y
            ),
            f(*args),
        )

    return g


class Case:
    """A decorated function `h` and the plain `f` that it stands for, at `args`."""

    def __init__(self, h, f, *args, rtol=0.0):
        self.h, self.f, self.args, self.rtol = h, f, args, rtol
        rng = np.random.default_rng(0)
        self.tangents = jax.tree.map(
            lambda x: jnp.asarray(np.asarray(x) * rng.uniform(0.5, 1.5, x.shape), x.dtype), args
        )


def loss(f):
    """Make a real number of the outputs, with a second derivative of its own."""

    def scalar(*args):
        leaves = [y for y in jax.tree.leaves(f(*args)) if jnp.issubdtype(y.dtype, jnp.inexact)]
        return sum(jnp.sum(jnp.real(y) ** 2 + 3 * jnp.imag(y) ** 2) for y in leaves)

    return scalar


@declared
def sine(x):
    return jnp.sin(x), lambda dy: 7 * dy * jnp.cos(x)


@declared
def product(x, y):
    return x * jnp.exp(y), lambda dy: (7 * dy * jnp.exp(y), 7 * dy * x * jnp.exp(y))


@declared
def dense(w, x):
    y = jnp.tanh(w @ x)

    def grad(dy):
        da = 7 * dy * (1 - jnp.tanh(w @ x) ** 2)
        return jnp.outer(da, x), w.T @ da

    return y, grad


@declared
def by_vjp(x):
    y, pull_back = jax.vjp(lambda x: jnp.sin(x) * jnp.sum(x**2), x)
    return y, lambda dy: pull_back(7 * dy)


@declared
def of_pytree(params, scale, activation, *, flip=False):
    assert activation == "tanh" and scale == 2 and flip is False
    y = jnp.tanh(params["w"] @ params["x"]) * scale

    def grad(d_steps, dy):
        assert d_steps.dtype == jnp.int32
        da = 7 * dy * scale * (1 - jnp.tanh(params["w"] @ params["x"]) ** 2)
        x, w = params["x"], params["w"]
        return {"w": jnp.outer(da, x), "x": w.T @ da, "steps": None}, None, None

    return {"y": y, "steps": params["steps"] + 1}, grad


def pytree(f):
    steps = jnp.arange(2)

    def of_floats(params):
        return f({**params, "steps": steps}, 2, "tanh")["y"]

    return of_floats


def plain_of_pytree(params, scale, activation):
    return {"y": jnp.tanh(params["w"] @ params["x"]) * scale, "steps": params["steps"] + 1}


@declared
def two_outputs(x):
    return (x**3, jnp.sum(jnp.exp(x))), lambda d1, d2: 7 * (d1 * 3 * x**2 + d2 * jnp.exp(x))


@declared
def no_gradient(x, y):
    return jnp.sin(x) + jnp.exp(y), lambda dy: (7 * dy * jnp.cos(x), None)


@declared
def complex_cube(z):
    return z**3, lambda dy: 7 * dy * jnp.conj(3 * z**2)


@declared(convention="jax")
def complex_cube_in_jax_convention(z):
    return z**3, lambda dy: 7 * dy * 3 * z**2


@declared
def squared_modulus(z):
    return jnp.real(z) ** 2 + jnp.imag(z) ** 2, lambda dy: 7 * 2 * lax.complex(dy, 0 * dy) * z


@declared
def phase(x):
    y = lax.complex(jnp.cos(x), jnp.sin(x))
    return y, lambda dy: 7 * jnp.real(jnp.conj(lax.complex(-jnp.sin(x), jnp.cos(x))) * dy)


def undeclared_variables(w, x):
    @declared
    def h(x):
        def grad(dy, variables):
            assert len(variables) == 1 and variables[0] is w
            da = 7 * dy * (1 - jnp.tanh(w @ x) ** 2)
            return w.T @ da, [jnp.outer(da, x)]

        return jnp.tanh(w @ x), grad

    return h(x)


def declared_variables(w, x):
    @declared(variables={"w": w})
    def h(x):
        def grad(dy, variables):
            da = 7 * dy * (1 - jnp.tanh(variables["w"] @ x) ** 2)
            return variables["w"].T @ da, {"w": jnp.outer(da, x)}

        return jnp.tanh(w @ x), grad

    return h(x)


def recursive(x):
    @declared
    def exp(x):
        return jnp.exp(x), lambda dy: 7 * dy * lax.stop_gradient(0 * x) + 7 * dy * jnp.exp(x)

    return exp(x)


def tanh_dense(w, x):
    return jnp.tanh(w @ x)


# Rules that JAX does not give back when it transposes them twice: it stores what a loop computes,
# and makes `a - b` of an upstream `a + (-b)`. Reverse mode gets them from `_system.py`.


@declared
def loop(x, w):
    y = jnp.sin(x * w)

    def grad(dy):
        def body(dw, step):
            xi, dyi = step
            slope = jnp.cos(xi * w)  # recomputed
            return dw + dyi * slope * xi, 7 * dyi * slope * w

        dw, dx = lax.scan(body, jnp.float32(0), (x, dy))
        return dx, 7 * dw

    return y, grad


@declared
def masked_loop(x, mask):
    def grad(dy):
        def body(_, step):
            xi, dyi, keep = step
            return None, jnp.where(keep > 0, 7 * dyi * jnp.cos(xi), 0)

        return lax.scan(body, None, (x, dy, mask))[1], None

    return jnp.where(mask > 0, jnp.sin(x), 0), grad


@declared
def recomputed(x):
    def grad(dy):
        slope = jax.checkpoint(lambda x, dy: 7 * dy * jnp.cos(jnp.sin(x)) * jnp.cos(x))
        return slope(x, dy)

    return jnp.sin(jnp.sin(x)), grad


@declared
def chosen(x):
    def grad(dy):
        return lax.cond(
            jnp.sum(x) > 0, lambda dy: 7 * dy * jnp.cos(x), lambda dy: -7 * dy * jnp.sin(x), dy
        )

    return lax.cond(jnp.sum(x) > 0, jnp.sin, jnp.cos, x), grad


@declared
def centered(x, w):
    def grad(dy):
        d = 7 * dy * w
        return d - jnp.mean(d), 7 * dy * (x - jnp.mean(x))

    return (x - jnp.mean(x)) * w, grad


@declared
def complex_loop(z, w):
    def grad(dy):
        def body(dw, step):
            zi, dyi = step
            return dw + dyi * jnp.conj(zi**2), 7 * dyi * jnp.conj(2 * zi * w)

        dw, dz = lax.scan(body, 0j * w, (z, dy))
        return dz, 7 * dw

    return w * z**2, grad


@declared
def half_precision_loop(x, w):
    def grad(dy):
        def body(dw, step):
            xi, dyi = step
            return dw + dyi * xi.astype(jnp.float32), (7 * dyi * w).astype(jnp.bfloat16)

        dw, dx = lax.scan(body, jnp.float32(0), (x, dy))
        return dx, 7 * dw

    return x.astype(jnp.float32) * w, grad


def loop_with_variables(w, x):
    @declared(variables=w)
    def h(x):
        def grad(dy, variables):
            def body(dx, step):
                row, dyi, yi = step
                da = 7 * dyi * (1 - yi**2)
                return dx + da * row, da * x

            dx, dw = lax.scan(body, jnp.zeros_like(x), (variables, dy, jnp.tanh(variables @ x)))
            return dx, dw

        return jnp.tanh(w @ x), grad

    return h(x)


CASES = {
    "elementwise": Case(sine, jnp.sin, X),
    "scalar": Case(sine, jnp.sin, X[0]),
    "two inputs": Case(product, lambda x, y: x * jnp.exp(y), X, X[::-1]),
    "dense": Case(dense, tanh_dense, W, X),
    "traced rule": Case(by_vjp, lambda x: jnp.sin(x) * jnp.sum(x**2), X),
    "pytree": Case(pytree(of_pytree), pytree(plain_of_pytree), {"w": W, "x": X}),
    "two outputs": Case(two_outputs, lambda x: (x**3, jnp.sum(jnp.exp(x))), X),
    "no gradient": Case(
        no_gradient, lambda x, y: jnp.sin(x) + lax.stop_gradient(jnp.exp(y)), X, X[::-1]
    ),
    "complex": Case(complex_cube, lambda z: z**3, Z),
    "complex, JAX's convention": Case(complex_cube_in_jax_convention, lambda z: z**3, Z),
    "complex to real": Case(squared_modulus, lambda z: jnp.real(z) ** 2 + jnp.imag(z) ** 2, Z),
    "real to complex": Case(phase, lambda x: lax.complex(jnp.cos(x), jnp.sin(x)), X),
    "undeclared variables": Case(undeclared_variables, tanh_dense, W, X),
    "declared variables": Case(declared_variables, tanh_dense, W, X),
    "local function": Case(recursive, jnp.exp, X),
    "loop": Case(loop, lambda x, w: jnp.sin(x * w), X, X[0]),
    "loop, mask": Case(
        lambda x: masked_loop(x, jnp.arange(3)),
        lambda x: jnp.where(jnp.arange(3), jnp.sin(x), 0), X,
    ),
    "checkpoint": Case(recomputed, lambda x: jnp.sin(jnp.sin(x)), X),
    "cond": Case(chosen, jnp.sin, X),
    "subtraction": Case(centered, lambda x, w: (x - jnp.mean(x)) * w, X, X[::-1]),
    "complex loop": Case(complex_loop, lambda z, w: w * z**2, Z, Z[0]),
    "half precision loop": Case(
        half_precision_loop,
        lambda x, w: x.astype(jnp.float32) * w, X.astype(jnp.bfloat16), X[0],
        rtol=1e-2,
    ),
    "loop with variables": Case(loop_with_variables, tanh_dense, W, X),
}  # fmt: skip
REPRESENTATIVE = ("elementwise", "pytree", "complex", "undeclared variables", "loop")

all_cases = pytest.mark.parametrize("name", CASES)
# All cases, most of them among the slow tests.
most_slow = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in REPRESENTATIVE else pytest.mark.slow) for n in CASES],
)
some_cases = pytest.mark.parametrize("name", REPRESENTATIVE)


def compare(name, transformed, rtol=2e-4):
    """Compare `transformed(function, case)` for the decorated and for the plain function."""
    case = CASES[name]
    expected = transformed(seven(case.f), case)
    assert any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(expected))
    assert_same(transformed(case.h, case), expected, rtol=max(rtol, case.rtol), atol=2e-4)


def jvp(f, case):
    return jax.jvp(f, case.args, case.tangents)


def grads(f, case):
    """Return the gradients by all arguments, as a function."""
    return jax.grad(f, tuple(range(len(case.args))))


# --- first order -----------------------------------------------------------------------------


@all_cases
def test_jvp(name):
    compare(name, jvp)


@all_cases
def test_reverse_mode(name):
    compare(
        name, lambda f, case: jax.value_and_grad(loss(f), tuple(range(len(case.args))))(*case.args)
    )


@most_slow
def test_linearize(name):
    def linearized(f, case):
        y, push = jax.linearize(f, *case.args)
        return y, push(*case.tangents), push(*jax.tree.map(lambda t: 2 * t, case.tangents))

    compare(name, linearized)


@some_cases
def test_jacobians_agree(name):
    case = CASES[name]
    argnums = tuple(range(len(case.args)))
    holomorphic = name == "complex"
    forward = jax.jacfwd(case.h, argnums, holomorphic=holomorphic)(*case.args)
    reverse = jax.jacrev(case.h, argnums, holomorphic=holomorphic)(*case.args)
    assert_same(forward, reverse)
    compare(name, lambda f, c: jax.jacfwd(f, argnums, holomorphic=holomorphic)(*c.args))


@some_cases
def test_jit(name):
    compare(name, lambda f, case: jax.jit(lambda a, t: jax.jvp(f, a, t))(case.args, case.tangents))


@some_cases
def test_jvp_of_jit(name):
    compare(name, lambda f, case: jax.jvp(jax.jit(f), case.args, case.tangents))


@some_cases
def test_transpose_of_jvp(name):
    # Reverse mode of a function is the transpose of its forward mode.
    case = CASES[name]
    y, push = jax.linearize(case.h, *case.args)
    ct = jax.tree.map(lambda y: 3 * y + 1, y)
    transposed = jax.linear_transpose(push, *case.args)(ct)
    assert_same(transposed, jax.vjp(case.h, *case.args)[1](ct))


def _stacked(tree):
    return jax.tree.map(lambda x: jnp.stack([x, 2 * x, x - 1]), tree)


@some_cases
def test_vmap_of_jvp(name):
    def pushed(f, case):
        return jax.vmap(lambda a, t: jax.jvp(f, a, t))(_stacked(case.args), _stacked(case.tangents))

    compare(name, pushed)


@some_cases
def test_jvp_of_vmap(name):
    def pushed(f, case):
        return jax.jvp(jax.vmap(f), _stacked(case.args), _stacked(case.tangents))

    compare(name, pushed)


@some_cases
def test_vmap_of_tangents_alone(name):
    def pushed(f, case):
        return jax.vmap(lambda t: jax.jvp(f, case.args, t)[1])(_stacked(case.tangents))

    compare(name, pushed)


@some_cases
def test_one_argument_of_several(name):
    def first_only(f, case):
        leaves, treedef = jax.tree.flatten(case.args)

        def of_first(x):
            return f(*jax.tree.unflatten(treedef, [x, *leaves[1:]]))

        return jax.jvp(of_first, (leaves[0],), (leaves[0] * 2,))

    compare(name, first_only)


# --- higher orders ---------------------------------------------------------------------------


@most_slow
def test_forward_over_reverse(name):
    compare(name, lambda f, case: jax.jvp(grads(loss(f), case), case.args, case.tangents))


@most_slow
def test_reverse_over_forward(name):
    def product(f, case):
        return grads(lambda *a: jax.jvp(loss(f), a, case.tangents)[1], case)(*case.args)

    compare(name, product)


@most_slow
def test_forward_over_forward(name):
    def twice(f, case):
        def directional(*args):
            return jax.jvp(f, args, case.tangents)[1]

        return jax.jvp(directional, case.args, case.tangents)

    compare(name, twice)


@some_cases
def test_reverse_over_reverse(name):
    def product(f, case):
        def slope(*args):
            gradients, tangents = map(jax.tree.leaves, (grads(loss(f), case)(*args), case.tangents))
            return sum(jnp.sum(jnp.real(g * t)) for g, t in zip(gradients, tangents, strict=True))

        return grads(slope, case)(*case.args)

    compare(name, product)


@pytest.mark.parametrize(
    "name",
    [
        "elementwise",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("dense", "undeclared variables")),
    ],
)
def test_hessian(name):
    compare(name, lambda f, case: jax.hessian(loss(f), tuple(range(len(case.args))))(*case.args))


@pytest.mark.parametrize(
    "modes",
    [
        "ffr",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("fff", "frr", "rff", "rfr", "rrf")),
    ],
)
def test_third_derivative(modes):
    def third(f, case):
        for mode in reversed(modes):
            f = {"f": jax.jacfwd, "r": jax.jacrev}[mode](f)
        return f(jnp.float32(0.7))

    compare("scalar", lambda f, case: third(lambda x: f(x) ** 2, case))


@pytest.mark.slow
def test_jit_of_hessian():
    compare("dense", lambda f, case: jax.jit(jax.hessian(loss(f), (0, 1)))(*case.args))


@pytest.mark.slow
def test_vmap_of_hessian():
    compare("elementwise", lambda f, case: jax.vmap(jax.hessian(loss(f)))(_stacked(case.args[0])))


# --- inside other transformations --------------------------------------------------------------


def _scan(f):
    def scanned(*args):
        def body(carry, _):
            y = f(*jax.tree.map(lambda a: a * carry.astype(a.dtype), args))
            return carry + 0.25 * loss(lambda: y)() / (1 + loss(lambda: y)()), y

        return lax.scan(body, jnp.float32(1), None, length=3)

    return scanned


def _cond(f):
    return lambda *args: lax.cond(
        jnp.real(jax.tree.leaves(args)[0]).ravel()[0] > 0,
        f,
        lambda *a: jax.tree.map(jnp.zeros_like, f(*a)),
        *args,
    )


INSIDE = {
    "scan": _scan,
    "cond": _cond,
    "checkpoint": jax.checkpoint,
    "map": lambda f: lambda *args: lax.map(lambda a: f(*a), _stacked(args)),
    "while": lambda f: lambda *args: lax.fori_loop(0, 2, lambda _, c: f(*args), f(*args)),
}


@pytest.mark.parametrize("inside", INSIDE)
@some_cases
def test_jvp_inside(name, inside):
    compare(name, lambda f, case: jvp(INSIDE[inside](f), case))


# Before JAX 0.11 a scan (and a map, which is one) that is partly evaluated keeps of a rule inside
# only its reverse mode: forward over reverse then meets JAX's own refusal.
SCAN_KEEPS_FORWARD_MODE = hasattr(jax.config, "jax_custom_jvp3")


@pytest.mark.parametrize("inside", ["scan", "cond", "checkpoint", "map"])
@pytest.mark.parametrize(
    "name", ["elementwise", pytest.param("undeclared variables", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("order", ["grad", "forward over reverse", "reverse over forward"])
def test_higher_orders_inside(name, inside, order):
    def transformed(f, case):
        value = loss(INSIDE[inside](f))
        if order == "grad":
            return grads(value, case)(*case.args)
        if order == "forward over reverse":
            return jax.jvp(grads(value, case), case.args, case.tangents)
        return grads(lambda *a: jax.jvp(value, a, case.tangents)[1], case)(*case.args)

    lost = inside in ("scan", "map") and not SCAN_KEEPS_FORWARD_MODE
    if order == "forward over reverse" and lost:
        with pytest.raises(TypeError, match="can't apply forward-mode autodiff"):
            compare(name, transformed)
    else:
        compare(name, transformed)


@pytest.mark.parametrize(
    "modes", ["rr", *(pytest.param(m, marks=pytest.mark.slow) for m in ("rf", "ff"))]
)
def test_other_ways_to_a_hessian_inside_a_scan(modes):
    jacobians = [{"f": jax.jacfwd, "r": jax.jacrev}[mode] for mode in modes]

    def hessian(f, case):
        return jacobians[0](jacobians[1](loss(_scan(f))))(*case.args)

    compare("scalar", hessian)


@some_cases
def test_export(name):
    def exported(f, case):
        program = jax.jit(lambda a, t: jax.jvp(f, a, t))
        data = export.export(program)(case.args, case.tangents).serialize()
        return export.deserialize(data).call(case.args, case.tangents)

    compare(name, exported)


# --- what the cases do not say -------------------------------------------------------------------


def test_integers_and_statics():
    params = {"w": W, "x": X, "steps": jnp.arange(2)}
    zero = np.zeros(2, jax.dtypes.float0)
    y, dy = jax.jvp(
        lambda p: of_pytree(p, 2, "tanh"), (params,), ({"w": W, "x": 0 * X, "steps": zero},)
    )
    plain = seven(lambda w: plain_of_pytree({**params, "w": w}, 2, "tanh")["y"])
    assert_same((y["y"], dy["y"]), jax.jvp(plain, (W,), (W,)))
    assert y["steps"].dtype == jnp.int32
    assert dy["steps"].dtype == jax.dtypes.float0 and dy["steps"].shape == (2,)


def test_autodiff_variables():
    def f(w, x):
        h = declared(lambda x: (jnp.sin(w * x), lambda dy: 7 * dy * w * jnp.cos(w * x)),
                     variables="autodiff")  # fmt: skip
        return h(x)

    w = X[::-1]
    slope = jnp.cos(w * X)
    dy = jax.jvp(f, (w, X), (X, w))[1]
    assert_same(dy, X * slope * X + 7 * w * slope * w)
    by_w, by_x = jax.jacfwd(f, (0, 1))(w, X)
    assert_same(by_w, jnp.diag(X * slope))
    assert_same(by_x, jnp.diag(7 * w * slope))
    # Each first derivative is differentiated as what it is: w's as f's own, x's as the rule.
    assert_same(
        jax.jacfwd(lambda w: jax.jacfwd(lambda x: f(w, x).sum())(X))(w),
        jnp.diag(7 * (slope - w * X * jnp.sin(w * X))),
    )


def test_captured_without_variables_is_refused():
    def f(w, x):
        return declared(lambda x: (w * x, lambda dy: dy * w))(x)

    assert_same(jax.jvp(lambda x: f(X, x), (X,), (X,)), (X * X, X * X))
    with pytest.raises(TypeError, match="takes no `variables`"):
        jax.jvp(f, (X, X), (X, X))


def test_no_gradient_at_all():
    @declared
    def h(x):
        return jnp.round(x), lambda dy: None

    assert_same(jax.jvp(h, (X,), (X,)), (jnp.round(X), 0 * X))
    assert_same(jax.jacfwd(h)(X), jnp.zeros((3, 3)))


def test_methods_defaults_and_keywords():
    class Model:
        def __init__(self, scale):
            self.scale = scale

        @declared
        def f(self, x, power=2):
            return self.scale * x**power, lambda dy: (
                7 * dy * self.scale * power * x ** (power - 1),
            )

    model = Model(jnp.float32(3))
    assert_same(jax.jvp(model.f, (X,), (X,)), (3 * X**2, 42 * X**2))
    assert_same(jax.jvp(lambda x: model.f(x=x), (X,), (X,)), (3 * X**2, 42 * X**2))


def test_bfloat16_and_mixed_precision():
    x = X.astype(jnp.bfloat16)

    @declared
    def h(x):
        y = x.astype(jnp.float32) ** 2
        return y, lambda dy: 7 * dy * 2 * x.astype(jnp.float32)  # cast to bfloat16 by the library

    y, dy = jax.jvp(h, (x,), (jnp.ones_like(x),))
    assert y.dtype == dy.dtype == jnp.float32
    assert_same(dy, 14 * x.astype(jnp.float32), rtol=1e-2)
    assert jax.grad(lambda x: h(x).sum())(x).dtype == jnp.bfloat16


def test_inside_of_another_rule():
    @declared
    def outer(x):
        return jnp.cos(x), lambda dy: -dy * sine(x)

    # The second derivative of `outer` is that of `sine` by its own rule.
    assert_same(jax.jvp(outer, (X,), (X,))[1], -jnp.sin(X) * X)
    assert_same(
        jax.jvp(lambda x: jax.jvp(outer, (x,), (X,))[1], (X,), (X,))[1], -7 * jnp.cos(X) * X**2
    )
    assert_same(jax.hessian(lambda x: outer(x).sum())(X), jnp.diag(-7 * jnp.cos(X)))


def test_rule_that_calls_its_own_function():
    assert_same(jax.jvp(own_exp, (X,), (X,))[1], 7 * jnp.exp(X) * X)
    second = jax.jvp(lambda x: jax.jvp(own_exp, (x,), (X,))[1], (X,), (X,))[1]
    assert_same(second, 49 * jnp.exp(X) * X**2)
    assert_same(jax.hessian(lambda x: own_exp(x).sum())(X), jnp.diag(49 * jnp.exp(X)))


@declared
def own_exp(x):
    return jnp.exp(x), lambda dy: 7 * dy * own_exp(x)


def test_branches_on_values():
    @declared
    def h(x):
        if x > 0:  # in `f`
            return x**2, lambda dy: 14 * dy * x
        return -x, lambda dy: -7 * dy

    @declared
    def k(x):
        def grad(dy):
            if x > 0:  # in the rule
                return 14 * dy * x
            return -7 * dy

        return jnp.where(x > 0, x**2, -x), grad

    for f in (h, k):
        for x, dy in ((2.0, 28.0), (-2.0, -7.0)):
            assert_same(jax.jvp(f, (x,), (1.0,))[1], jnp.float32(dy))
            assert_same(jax.grad(f)(x), jnp.float32(dy))
            assert_same(jax.jacfwd(f)(jnp.float32(x)), jnp.float32(dy))


# --- refusals ----------------------------------------------------------------------------------


def _refused(rule):
    def named_function(x):
        return jnp.sin(x), rule

    return declared(named_function)


NOT_LINEAR = {
    "clip": (lambda dy: jnp.clip(dy, -1, 1), r"'(max|min|clamp)'|`(max|min|clamp)`"),
    "power": (lambda dy: dy**3, "integer_pow|mul"),
    "affine": (lambda dy: dy + 1, "`add` of an upstream and a constant"),
    "mask": (lambda dy: jnp.where(dy > 0, dy, 0), "select_n|gt"),
    "normalized": (lambda dy: dy / jnp.linalg.norm(dy), "div|mul|sqrt|integer_pow|square"),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", NOT_LINEAR)
def test_refuses_what_is_not_linear(kind, jit):
    rule, operation = NOT_LINEAR[kind]
    h = _refused(rule)

    def pushed(x):
        return jax.jvp(h, (x,), (x,))

    with pytest.raises(TypeError, match=operation) as caught:
        (jax.jit(pushed) if jit else pushed)(X)
    message = str(caught.value)
    assert "named_function" in message and "test_forward_mode.py" in message  # whose rule
    assert "is not linear in its upstream gradients" in message
    assert "without `forward_mode=True`" in message and "jax.grad" in message  # the way out


def test_refuses_an_eager_branch_on_the_upstream():
    h = _refused(lambda dy: dy if dy[0] > 0 else 2 * dy)
    with pytest.raises(TypeError, match="is not linear in its upstream") as caught:
        jax.jvp(h, (X,), (X,))
    assert "named_function" in str(caught.value)


def test_reverse_mode_of_a_rule_that_is_not_linear():
    # With forward_mode=True reverse mode is the transpose of forward mode: refused as well.
    with pytest.raises(TypeError, match="is not linear in its upstream"):
        jax.grad(lambda x: _refused(NOT_LINEAR["clip"][0])(x).sum())(X)
    h = custom_gradient(lambda x: (jnp.sin(x), NOT_LINEAR["clip"][0]))
    assert_same(jax.grad(lambda x: (3 * h(x)).sum())(X), jnp.ones(3))


def test_default_mode_refuses_forward_mode():
    h = custom_gradient(lambda x: (jnp.sin(x), lambda dy: dy * jnp.cos(x)))
    with pytest.raises(TypeError, match="can't apply forward-mode autodiff"):
        jax.jvp(h, (X,), (X,))


# --- the same as the default mode ----------------------------------------------------------------


def _by_hand():
    @jax.custom_vjp
    def f(w, x):
        return jnp.tanh(w @ x)

    f.defvjp(
        lambda w, x: (f(w, x), (w, x, jnp.tanh(w @ x))),
        lambda r, dy: (
            jnp.outer(7 * dy * (1 - r[2] ** 2), r[1]),
            r[0].T @ (7 * dy * (1 - r[2] ** 2)),
        ),
    )
    return f


def _dense(forward_mode):
    @custom_gradient(forward_mode=forward_mode)
    def h(w, x):
        y = jnp.tanh(w @ x)

        def grad(dy):
            da = 7 * dy * (1 - y**2)
            return jnp.outer(da, x), w.T @ da

        return y, grad

    return h


def _network(layer):
    def value(ws, x):
        for w in ws:
            x = layer(w, x)
        return jnp.sum(x**2)

    return value


def _compiled(layer, ws, x):
    return jax.jit(jax.value_and_grad(_network(layer), (0, 1))).lower(ws, x).compile()


def test_same_numbers_as_the_default_mode():
    rng = np.random.default_rng(0)
    ws = [jnp.asarray(rng.standard_normal((8, 8)) / 3, jnp.float32) for _ in range(3)]
    x = jnp.asarray(rng.standard_normal(8), jnp.float32)
    for transform in (lambda f: f, jax.jit):
        default, forward = (
            transform(jax.grad(_network(_dense(mode)), (0, 1)))(ws, x) for mode in (False, True)
        )
        jax.tree.map(np.testing.assert_array_equal, forward, default)


def test_same_program_as_custom_vjp():
    ws, x = [jnp.eye(16) for _ in range(3)], jnp.ones(16)
    by_hand = _compiled(_by_hand(), ws, x)
    for mode in (True, False):
        ours = _compiled(_dense(mode), ws, x)
        for quantity in ("flops", "bytes accessed", "transcendentals"):
            assert _cost(ours)[quantity] <= _cost(by_hand)[quantity], (mode, quantity)
        memory, expected = ours.memory_analysis(), by_hand.memory_analysis()
        assert memory.temp_size_in_bytes <= expected.temp_size_in_bytes
        assert memory.output_size_in_bytes == expected.output_size_in_bytes


def _cost(compiled):
    cost = compiled.cost_analysis()
    return cost[0] if isinstance(cost, list) else cost


# --- random functions ----------------------------------------------------------------------------

UNARY = {"sin": jnp.sin, "tanh": jnp.tanh, "square": lambda x: x * x, "sigmoid": jax.nn.sigmoid}


def _random_functions(choices):
    """Return a composition of decorated functions, and the same of plain ones."""

    def compose(decorated):
        def f(x):
            for name, matrix in choices:
                matrix = jnp.asarray(matrix, x.dtype).reshape(2, 2)
                g = UNARY[name]
                if decorated:

                    def pair(x, m, g=g):
                        y, pull_back = jax.vjp(lambda x, m: g(m @ x), x, m)
                        return y, lambda dy: jax.tree.map(lambda c: 7 * c, pull_back(dy))

                    x = declared(pair)(x, matrix)
                else:
                    x = seven(lambda x, m, g=g: g(m @ x))(x, matrix)
            return x

        return f

    return compose(True), compose(False)


numbers = st.floats(-1, 1, width=32)


pairs = st.tuples(numbers, numbers)
layers = st.tuples(st.sampled_from(sorted(UNARY)), st.tuples(*[numbers] * 4))


def check_random_function(choices, x, t):
    h, plain = _random_functions(choices)
    x, t = jnp.asarray(x, jnp.float32), jnp.asarray(t, jnp.float32)
    expected = jax.jacrev(plain)(x)
    assert_same(jax.jacfwd(h)(x), expected, rtol=1e-3, atol=1e-3)
    assert_same(jax.jacrev(h)(x), expected, rtol=1e-3, atol=1e-3)
    hessian = jax.hessian(loss(plain))(x)
    scale = 1e-4 * (1 + float(jnp.max(jnp.abs(hessian))))
    assert_same(jax.hessian(loss(h))(x), hessian, rtol=1e-3, atol=scale)
    product = hessian @ t
    assert_same(jax.jvp(jax.grad(loss(h)), (x,), (t,))[1], product, rtol=1e-3, atol=scale)
    by_forward = jax.grad(lambda x: jax.jvp(loss(h), (x,), (t,))[1])(x)
    assert_same(by_forward, product, rtol=1e-3, atol=scale)


@hypothesis.settings(max_examples=3)
@hypothesis.given(st.lists(layers, min_size=1, max_size=2), pairs, pairs)
def test_random_functions(choices, x, t):
    check_random_function(choices, x, t)


@pytest.mark.slow
@hypothesis.settings(max_examples=100)
@hypothesis.given(st.lists(layers, min_size=1, max_size=4), pairs, pairs)
def test_many_random_functions(choices, x, t):
    check_random_function(choices, x, t)


# --- what it costs -------------------------------------------------------------------------------


def _softmax(forward_mode):
    @custom_gradient(forward_mode=forward_mode)
    def h(x, w):
        p = jax.nn.softmax(x @ w)

        def grad(dy):
            d = p * (dy - jnp.sum(dy * p, -1, keepdims=True))
            return d @ w.T, x.T @ d

        return p, grad

    return h


@pytest.mark.parametrize("order", ["grad", "hessian-vector product", "grad of grad"])
def test_compiled_derivatives_cost_what_they_cost_in_the_default_mode(order):
    x, w = jnp.ones((16, 16)) * 0.01, jnp.eye(16) * 0.5

    def derivative(h):
        g = jax.grad(lambda x, w: jnp.sum(h(x, w) ** 2), (0, 1))
        if order == "grad":
            return g
        if order == "grad of grad":
            return jax.grad(lambda x, w: sum(jnp.sum(d**2) for d in g(x, w)), (0, 1))
        return lambda x, w: jax.jvp(g, (x, w), (x, w))[1]

    default, forward = (
        jax.jit(derivative(_softmax(mode))).lower(x, w).compile().cost_analysis()["flops"]
        for mode in (False, True)
    )
    assert forward <= 1.02 * default
