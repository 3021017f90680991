"""`recompute_grad` and `grad_pass_through`, in depth.

What `recompute_grad(f)` should give is `f` itself under JAX; that it recomputes is seen in what
the backward pass keeps. The decorated functions inside have rules that are wrong by a factor.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same

from tfgrad_jax import custom_gradient, grad_pass_through, recompute_grad

X = jnp.asarray(np.linspace(0.2, 1.4, 4), jnp.float32)


def body(x):
    return jnp.sin(x) * jnp.exp(x)


@custom_gradient
def seven(x):
    return x * x, lambda dy: 7 * dy * x


def kept(f, *args):
    """Return the number of array elements that the backward pass of `f` keeps."""
    return sum(np.size(leaf) for leaf in jax.tree.leaves(jax.vjp(f, *args)[1]))


# --- recompute_grad: derivatives ----------------------------------------------------------------


def _derivatives(f):
    total = lambda x: jnp.sum(f(x))  # noqa: E731
    return {
        "value": f,
        "gradient": jax.grad(total),
        "compiled": jax.jit(jax.grad(total)),
        "second": jax.grad(lambda x: jnp.sum(jax.grad(total)(x) ** 2)),
        "jvp": lambda x: jax.jvp(f, (x,), (2 * x,)),
        "jacfwd": jax.jacfwd(f),
        "jacrev": jax.jacrev(f),
        "hessian": jax.hessian(total),
        "forward over forward": jax.jacfwd(jax.jacfwd(f)),
        "vmap": jax.vmap(jax.grad(lambda x: f(x))),
        "gradient of vmap": jax.grad(lambda x: jnp.sum(jax.vmap(f)(x))),
        "scan": jax.grad(lambda x: jnp.sum(jax.lax.scan(lambda c, _: (f(c), None), x, None, 2)[0])),
        "cond": jax.grad(lambda x: jnp.sum(jax.lax.cond(x[0] > 0, f, lambda x: x, x))),
        "linearize": lambda x: jax.linearize(f, x)[1](x),
        "nonlinear use": jax.hessian(lambda x: jnp.sum(f(x) ** 2)),
    }


@pytest.mark.parametrize("name", _derivatives(body))
def test_recompute_has_the_derivatives_of_the_function(name):
    recomputed, plain = _derivatives(recompute_grad(body)), _derivatives(body)
    assert_same(recomputed[name](X), plain[name](X))


def test_recompute_third_order():
    f = recompute_grad(lambda x: x**5)
    assert_same(jax.grad(jax.grad(jax.grad(f)))(jnp.float32(2.0)), jnp.float32(240.0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_recompute_keeps_the_dtype(dtype):
    x = jnp.asarray([0.5, 2.0], dtype)
    assert_same(jax.grad(lambda x: recompute_grad(lambda x: x * x)(x).sum())(x), 2 * x)


def test_recompute_in_double_precision(x64):
    x = jnp.asarray([0.5, 2.0], jnp.float64)
    expected = jax.grad(lambda x: body(x).sum())(x)
    assert expected.dtype == jnp.float64
    assert_same(jax.grad(lambda x: recompute_grad(body)(x).sum())(x), expected, rtol=1e-12)


def test_recompute_complex():
    z = jnp.asarray([1 + 2j, 0.5 - 1j], jnp.complex64)

    def loss(f, z):
        return jnp.sum(jnp.abs(f(z)) ** 2)

    square = lambda z: z * z  # noqa: E731
    expected = jax.grad(functools.partial(loss, square))(z)
    assert_same(jax.grad(functools.partial(loss, recompute_grad(square)))(z), expected)
    holomorphic = jax.grad(lambda z: jnp.sum(recompute_grad(square)(z)), holomorphic=True)(z)
    assert_same(holomorphic, 2 * z)


# --- recompute_grad: it recomputes --------------------------------------------------------------


def deep(x):
    for _ in range(6):
        x = jnp.sin(x) * x
    return x


def test_recompute_keeps_the_arguments_alone():
    x = jnp.ones(100, jnp.float32)
    assert kept(deep, x) >= 6 * 100
    assert kept(recompute_grad(deep), x) <= 100


def test_policy_says_what_is_kept():
    x = jnp.ones(100, jnp.float32)
    everything = recompute_grad(deep, policy=jax.checkpoint_policies.everything_saveable)
    nothing = recompute_grad(deep, policy=jax.checkpoint_policies.nothing_saveable)
    assert kept(everything, x) >= 6 * 100
    assert kept(nothing, x) <= 100
    expected = jax.grad(lambda x: deep(x).sum())(x)
    for f in (everything, nothing):
        assert_same(jax.grad(lambda x, f=f: f(x).sum())(x), expected)


def test_policy_by_name():
    from jax.ad_checkpoint import checkpoint_name

    def f(x):
        return jnp.sin(checkpoint_name(jnp.sin(jnp.sin(x)), "middle"))

    x = jnp.ones(100, jnp.float32)
    policy = jax.checkpoint_policies.save_only_these_names("middle")
    assert kept(recompute_grad(f), x) <= 100
    assert 100 < kept(recompute_grad(f, policy=policy), x) <= 200


def test_the_function_runs_again_in_the_backward_pass():
    runs = []

    @recompute_grad
    def f(x):
        jax.debug.callback(lambda: runs.append(1))
        return jnp.sin(x)

    jax.block_until_ready(f(X))
    jax.effects_barrier()
    forward = len(runs)
    jax.block_until_ready(jax.grad(lambda x: f(x).sum())(X))
    jax.effects_barrier()
    assert forward == 1
    assert len(runs) - forward >= 2


# --- recompute_grad: arguments ------------------------------------------------------------------


def test_recompute_pytrees_in_and_out():
    @recompute_grad
    def f(d, e):
        return {"p": d["a"] * d["b"][0], "o": (d["b"][1] * e, d["a"] * e)}

    def loss(d, e):
        y = f(d, e)
        return y["p"] + 10 * y["o"][0] + 100 * y["o"][1]

    two, three, four, five = map(jnp.float32, (2, 3, 4, 5))
    g = jax.grad(loss, (0, 1))({"a": two, "b": [three, four]}, five)
    expected = {"a": jnp.float32(503), "b": [two, jnp.float32(50)]}, jnp.float32(240)
    assert_same(g, expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_recompute_static_arguments(compiled):
    seen = []

    @recompute_grad
    def f(x, mode, flag, n, nothing, function, dtype, *rest, scale=1, **named):
        seen.append((mode, flag, n, nothing, function, dtype, rest, scale, named))
        return x * x * (3 if mode == "triple" and flag and n == 3 else 1)

    def loss(x):
        static = ("triple", True, 3, None, len, jnp.float32)
        return f(x, *static, "rest", scale=2, axis=None).sum()

    g = jax.grad(loss)
    assert_same((jax.jit(g) if compiled else g)(X), 6 * X)
    expected = ("triple", True, 3, None, len, jnp.float32, ("rest",), 2, {"axis": None})
    assert set(map(repr, seen)) == {repr(expected)}
    assert all(s[1] is True and s[3] is None for s in seen)


def test_recompute_arguments_by_name():
    f = recompute_grad(lambda x, k=1.0, *, s=1.0: x * x * k * s)
    three = jnp.float32(3.0)
    assert_same(jax.grad(lambda x: f(x=x).sum())(X), 2 * X)
    by_k = jax.grad(lambda k: f(X, k=k, s=2.0).sum())(three)
    assert_same(by_k, 2 * jnp.sum(X * X))
    assert_same(jax.grad(lambda s: f(X, s=s).sum())(three), jnp.sum(X * X))


def test_recompute_integers_bools_and_keys_among_the_arrays():
    key = jax.random.key(0)

    @recompute_grad
    def f(x, n, mask, key):
        noise = jax.random.normal(key, x.shape, x.dtype)
        return jnp.where(mask, x * x * n.astype(x.dtype), x) * noise

    n, mask = jnp.arange(4), jnp.array([True, False, True, False])
    g = jax.jit(jax.grad(lambda x: f(x, n, mask, key).sum()))(X)
    noise = jax.random.normal(key, X.shape, X.dtype)
    assert_same(g, jnp.where(mask, 2 * X * n.astype(X.dtype), 1.0) * noise)


def test_recompute_integer_and_number_outputs():
    f = recompute_grad(lambda x: (x * x, jnp.arange(2), 3.0, True))
    y, pull_back = jax.vjp(lambda x: f(x)[0], X)
    assert_same(pull_back(jnp.ones_like(y))[0], 2 * X)
    assert f(X)[1].dtype == jnp.arange(2).dtype
    assert f(X)[2] == 3.0


def test_recompute_unused_and_empty_arguments():
    f = recompute_grad(lambda x, unused, empty: x * x + empty.sum())
    empty = jnp.ones((0, 2), jnp.float32)
    g = jax.grad(lambda *a: f(*a).sum(), (0, 1, 2))(X, X, empty)
    assert_same(g, (2 * X, jnp.zeros_like(X), empty))


def test_recompute_the_same_array_twice():
    f = recompute_grad(lambda x, y: x * y * y)
    assert_same(jax.grad(lambda x: f(x, x).sum())(X), 3 * X * X)


# --- recompute_grad: functions ------------------------------------------------------------------


class Scaled:
    """All kinds of methods."""

    factor = 2.0

    def __init__(self, w):
        self.w = w

    @recompute_grad
    def method(self, x):
        return self.w * x * x

    @staticmethod
    @recompute_grad
    def static(x):
        return x * x

    @classmethod
    @recompute_grad
    def of_class(cls, x):
        return cls.factor * x * x

    @recompute_grad
    def __call__(self, x):
        return self.w * x * x


def test_recompute_methods():
    three = jnp.float32(3.0)
    of_x = lambda f: jax.grad(lambda x: f(x).sum())(X)  # noqa: E731
    assert_same(of_x(Scaled(three).method), 6 * X)
    assert_same(of_x(Scaled(three)), 6 * X)
    assert_same(of_x(recompute_grad(Scaled(three).method)), 6 * X)
    assert_same(of_x(Scaled.static), 2 * X)
    assert_same(of_x(Scaled(three).static), 2 * X)
    assert_same(of_x(Scaled.of_class), 4 * X)
    by_weight = jax.grad(lambda w: Scaled(w).method(X).sum())(three)
    assert_same(by_weight, jnp.sum(X * X))
    called_on_the_class = jax.grad(lambda x: Scaled.method(Scaled(three), x).sum())(X)
    assert_same(called_on_the_class, 6 * X)


@pytest.mark.parametrize("compiled", [False, True])
def test_recompute_differentiates_what_is_closed_over(compiled):
    def loss(w, x):
        return recompute_grad(lambda x: jnp.sin(w * x))(x).sum()

    def plain(w, x):
        return jnp.sin(w * x).sum()

    w = jnp.float32(1.5)
    wrap = jax.jit if compiled else (lambda f: f)
    assert_same(wrap(jax.grad(loss, (0, 1)))(w, X), jax.grad(plain, (0, 1))(w, X))
    assert_same(wrap(jax.hessian(loss))(w, X), jax.hessian(plain)(w, X))


def test_recompute_without_arguments():
    w = jnp.float32(3.0)
    assert_same(jax.grad(lambda w: recompute_grad(lambda: w * w)())(w), jnp.float32(6.0))


def test_recompute_nested():
    inner = recompute_grad(body)
    outer = recompute_grad(lambda x: inner(x) * inner(2 * x))
    expected = jax.grad(lambda x: (body(x) * body(2 * x)).sum())(X)
    assert_same(jax.grad(lambda x: outer(x).sum())(X), expected)


@pytest.mark.parametrize(
    "f",
    [
        functools.partial(lambda k, x: k * x * x, 1.0),
        jax.jit(lambda x: x * x),
        jax.vmap(lambda x: x * x),
        type("Square", (), {"__call__": lambda self, x: x * x})(),
    ],
    ids=["partial", "jit", "vmap", "object"],
)
def test_recompute_any_callable(f):
    assert_same(jax.grad(lambda x: recompute_grad(f)(x).sum())(X), 2 * X)


def test_recompute_keeps_the_metadata():
    def f(x, k=1):
        """What f does."""
        return x * k

    h = recompute_grad(f)
    assert (h.__name__, h.__doc__, h.__wrapped__) == ("f", "What f does.", f)
    assert inspect.signature(h) == inspect.signature(f)


def test_recompute_passes_errors_on():
    @recompute_grad
    def f(x):
        raise KeyError("from f")

    with pytest.raises(KeyError, match="from f"):
        jax.grad(lambda x: f(x).sum())(X)


# --- recompute_grad: decorated functions inside -------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_recompute_uses_the_declared_gradient_inside(compiled):
    wrap = jax.jit if compiled else (lambda f: f)
    direct = wrap(jax.grad(lambda x: recompute_grad(seven)(x).sum()))
    within = wrap(jax.grad(lambda x: recompute_grad(lambda x: jnp.sin(seven(x)))(x).sum()))
    assert_same(direct(X), 7 * X)
    assert_same(within(X), jnp.cos(X * X) * 7 * X)


def test_recompute_second_order_of_a_decorated_function():
    """d2 sin(h): -sin(h) h'^2 + cos(h) h'', with h' = 7x and h'' = 7."""
    f = recompute_grad(lambda x: jnp.sin(seven(x)))
    x = jnp.float32(0.7)
    expected = -jnp.sin(x * x) * (7 * x) ** 2 + jnp.cos(x * x) * 7
    assert_same(jax.grad(jax.grad(f))(x), expected)


def test_recompute_forward_mode_of_a_decorated_function():
    h = custom_gradient(lambda x: (x * x, lambda dy: 7 * dy * x), forward_mode=True)
    f = recompute_grad(lambda x: 3 * h(x))
    assert_same(jax.jvp(f, (X,), (jnp.ones_like(X),))[1], 21 * X)


@pytest.mark.parametrize("compiled", [False, True])
def test_recompute_passes_variables_on(compiled):
    def loss(w, x):
        @recompute_grad
        def f(x):
            @custom_gradient
            def h(x):
                def grad(dy, variables):
                    return 5 * dy * w, [7 * jnp.sum(dy * x) for _ in variables]

                return w * x, grad

            return h(x)

        return f(x).sum()

    g = jax.grad(loss, (0, 1))
    w = jnp.float32(3.0)
    expected = 7 * jnp.sum(X), 15 * jnp.ones_like(X)
    assert_same((jax.jit(g) if compiled else g)(w, X), expected)


def test_recompute_in_a_rule():
    @custom_gradient
    def h(x):
        inner = recompute_grad(lambda x: 7 * jnp.sin(x))
        return x * x, lambda dy: dy * inner(x)

    x = jnp.float32(0.7)
    assert_same(jax.grad(h)(x), 7 * jnp.sin(x))
    assert_same(jax.grad(jax.grad(h))(x), 7 * jnp.cos(x))


# --- grad_pass_through --------------------------------------------------------------------------


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


def test_pass_through_refuses_forward_mode():
    with pytest.raises(TypeError):
        jax.jvp(grad_pass_through(jnp.round), (X,), (X,))
