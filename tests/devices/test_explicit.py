"""Under explicit sharding each result has the value, dtype and *sharding* of a hand-written rule.

With `AxisType.Explicit` the type of an array carries its sharding, so a zero that is made from a
shape alone has the wrong type. Rules are wrong by factors of 7 and 5; the oracle is a
`jax.custom_jvp` with the same factors, which has both modes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.helpers import assert_same, sample
from support.pairs import RULES, STYLES, Rule

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.skipif("jax.device_count() < 8", reason="needs eight devices")
_uniform = np.random.default_rng(0).uniform
_ROWS, _WEIGHT = np.float32(_uniform(0.2, 1.2, (8, 16))), np.float32(_uniform(0.2, 1.2, (16, 4)))


@pytest.fixture(scope="module")
def over():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


def by_hand(value, push):
    h = jax.custom_jvp(value)
    h.defjvp(lambda primals, tangents: (h(*primals), push(*primals, *tangents)))
    return h


# --- programs: decorated, by hand, and where the arguments are ------------------------------------

EACH = (P("data", "model"), P("data", "model"))
RULE = RULES["elementwise"]
SCALED = by_hand(
    lambda w, x: jnp.sin(w * x), lambda w, x, dw, dx: 7 * jnp.cos(w * x) * (x * dw + w * dx)
)
PROGRAMS = {name: (style(RULE), SCALED, EACH) for name, style in STYLES.items()}


def program(value, push, *specs):
    def register(h):
        PROGRAMS[h.__name__.replace("_", " ")] = h, by_hand(value, push), specs or EACH
        return h

    return register


@program(lambda w, x: jnp.sin(w * x), lambda w, x, dw, dx: jnp.cos(w * x) * (x * dw + 7 * w * dx))
def autodiff(w, x):
    def f(x):
        return jnp.sin(w * x), lambda dy: 7 * dy * w * jnp.cos(w * x)

    return custom_gradient(f, variables="autodiff")(x)


@program(lambda w, x: w * x, lambda w, x, dw, dx: 7 * w * dx)
@custom_gradient
def no_gradient_for_one(w, x):
    return w * x, lambda dy: (None, 7 * dy * w)


@program(lambda w, x: w * x + 0, lambda w, x, dw, dx: 7 * w * dx + 5 * x * dw)
def outputs_that_are_not_used_or_integers(w, x):
    @custom_gradient
    def f(w, x):
        n = x.astype(jnp.int32)

        def grad(dn, dy, unused):
            assert jax.typeof(dn) == jax.typeof(n)
            assert jax.typeof(unused).sharding == jax.typeof(x).sharding
            return 5 * dy * x + unused, 7 * dy * w

        return (n, w * x, 3 * w), grad

    return f(w, x)[1]


def product(of_w, of_x, of_y):
    """Return `x @ w` and its oracle; the specs say over which axes each array is split."""

    def value(w, x):
        return jnp.matmul(x, w, out_sharding=P(*of_y))

    def rule(w, x, dy):
        dw = jnp.matmul(x.T, dy, out_sharding=P(*of_w))
        return 5 * dw, 7 * jnp.matmul(dy, w.T, out_sharding=P(*of_x))

    h = custom_gradient(lambda w, x: (value(w, x), lambda dy: rule(w, x, dy)))
    oracle = by_hand(value, lambda w, x, dw, dx: 7 * value(w, dx) + 5 * value(dw, x))
    return h, oracle, (P(*of_w), P(*of_x))


PROGRAMS |= {
    "matmul": product((None, "model"), ("data", None), ("data", "model")),
    "contraction over a split axis": product(("model", None), ("data", "model"), ("data", None)),
}


# --- ways -----------------------------------------------------------------------------------------


def _scan(f):
    def scanned(w, x):
        def body(total, scale):
            return total + jnp.sum(f(scale * w, x)), f(w, scale * x)

        return lax.scan(body, jnp.float32(0), jnp.float32([1, 0.5]))

    return scanned


def _loss(f):
    return lambda *args: sum(jnp.sum(jnp.cos(y)) for y in jax.tree.leaves(f(*args)))


def _grad(f):
    return jax.grad(_loss(f), (0, 1))


def _tangent(a):
    return 1 + a / 2


def _pushed(f):
    return lambda w, x: jax.jvp(f, (w, x), (_tangent(w), _tangent(x)))


WAYS = {
    "value": lambda f: f,
    "vjp": lambda f: lambda w, x: jax.vjp(f, w, x)[1](f(w, x)),
    "grad": _grad,
    "jvp": _pushed,
    "grad of jit": lambda f: _grad(jax.jit(f)),
    "jvp of jit": lambda f: _pushed(jax.jit(f)),
    "product with the hessian": lambda f: _pushed(_grad(f)),
    "grad of jvp": lambda f: _grad(_pushed(f)),
    "grad of grad": lambda f: _grad(_grad(f)),
    "checkpoint": lambda f: _grad(jax.checkpoint(f)),
    "scan": _scan,
    "grad of scan": lambda f: _grad(_scan(f)),
    "jvp of scan": lambda f: _pushed(_scan(f)),
    "vmap of grad": lambda f: _mapped(_grad(f)),
    "vmap of jvp": lambda f: _mapped(_pushed(f)),
    "grad of vmap": lambda f: _grad(_mapped(f)),
    "jvp of vmap": lambda f: _pushed(_mapped(f)),
    "cond": lambda f: _grad(lambda w, x: lax.cond(True, f, f, w, x)),
    # Over the rows, which the devices share.
    "vmap of a split axis": lambda f: jax.vmap(_pushed(_grad(f))),
}


def _two(a):
    return jnp.stack([a, a / 2])


def _mapped(f):
    return lambda w, x: jax.vmap(f)(_two(w), _two(x))


def arguments(name, over):
    """A weight that multiplies rows elementwise, or from the right."""
    specs = PROGRAMS[name][2]
    weight = _ROWS[::-1] if specs == EACH else _WEIGHT
    return [
        jax.device_put(a, NamedSharding(over, s))
        for a, s in zip((weight, _ROWS), specs, strict=True)
    ]


def assert_same_types(actual, expected):
    assert_same(jax.device_get(actual), jax.device_get(expected), rtol=1e-3, atol=1e-3)
    assert jax.tree.map(jax.typeof, actual) == jax.tree.map(jax.typeof, expected)


MODES = {
    "eager": lambda f, *args: f(*args),
    "jit": lambda f, *args: jax.jit(f)(*args),
    "jit of constants": lambda f, *args: jax.jit(lambda: f(*args))(),
}
EVERY = [
    (n, w, m)
    for n in PROGRAMS
    for w in WAYS
    for m in MODES
    if w != "vmap of a split axis" or PROGRAMS[n][2] == EACH
]
CORE = [(n, w, m) for n, w, m in EVERY if m == "jit" and (n == "inputs" or w in ("grad", "jvp"))]


@pytest.mark.parametrize(("name", "way", "mode"), sample(EVERY, 25, CORE))
def test_as_by_hand(name, way, mode, over):
    ours, hand, _ = PROGRAMS[name]
    with jax.set_mesh(over):
        args = arguments(name, over)
        expected = MODES[mode](WAYS[way](hand), *args)
        assert_same_types(MODES[mode](WAYS[way](ours), *args), expected)


@pytest.mark.parametrize("mode", ["eager", "jit"])
@pytest.mark.parametrize("way", ["value", "vjp", "jvp", "jvp of jit"])
def test_values_in_host_memory_stay_there(way, mode):
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    args = [jax.device_put(a, host) for a in (_ROWS[::-1], _ROWS)]
    for name in ("inputs", "undeclared", "declared", "no gradient for one"):
        ours, hand, _ = PROGRAMS[name]
        expected = MODES[mode](WAYS[way](hand), *args)
        assert_same_types(MODES[mode](WAYS[way](ours), *args), expected)


# --- a spec has more than its partitions ----------------------------------------------------------

# Rows are split over "data", and the weight is *reduced* over it: each device adds what its rows
# give to the gradient, which is *unreduced*. JAX raises where such a spec is unpacked.
REDUCED, UNREDUCED = P(None, None, reduced={"data"}), P(None, None, unreduced={"data"})


def reduced_rule(residuals, dy):
    w, x = residuals
    return jnp.matmul(5 * x.T, dy, out_sharding=UNREDUCED), 7 * jnp.matmul(dy, w.T)


OF_REDUCED = Rule(lambda w, x: (jnp.matmul(x, w), (w, x)), reduced_rule, ())


@pytest.fixture
def reduced(over):
    """A weight and rows; skip where JAX cannot differentiate plain code of these."""
    with jax.set_mesh(over):
        try:
            w, x = jax.device_put(_WEIGHT, REDUCED), jax.device_put(_ROWS, P("data", None))
            jax.reshard(jax.grad(lambda w: jnp.sum(jnp.matmul(x, w)))(w), P())
        except Exception as error:  # of many kinds, by version
            pytest.skip(f"JAX fails with plain code: {type(error).__name__}")
        yield w, x


@pytest.mark.sampled(12)
@pytest.mark.parametrize("mode", ["eager", "jit"])
@pytest.mark.parametrize("way", ["grad", "grad of jit", "checkpoint", "jvp"])
@pytest.mark.parametrize("style", STYLES)
def test_a_weight_that_is_reduced(style, way, mode, reduced):
    f = {
        "grad": lambda f: jax.grad(lambda w, x: jnp.sum(f(w, x)), (0, 1)),
        "grad of jit": lambda f: jax.grad(lambda w, x: jnp.sum(jax.jit(f)(w, x)), (0, 1)),
        "checkpoint": lambda f: jax.grad(lambda w, x: jnp.sum(jax.checkpoint(f)(w, x)), (0, 1)),
        "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x))[1],
    }[way]
    got = MODES[mode](f(STYLES[style](OF_REDUCED)), *reduced)
    rows, weight = np.float32(_ROWS), np.float32(_WEIGHT)
    if way == "jvp":
        assert_same(jax.device_get(got), np.float32((5 + 7) * rows @ weight), rtol=1e-4)
        return
    types = [jax.typeof(g).sharding.spec for g in got]
    assert types == [UNREDUCED, P("data", None)]
    dw = np.float32(5 * np.outer(rows.sum(0), np.ones(4)))
    dx = np.float32(7 * np.outer(np.ones(8), weight.sum(1)))
    assert_same(jax.device_get([jax.reshard(g, P()) for g in got]), [dw, dx], rtol=1e-4)


def test_a_gradient_that_is_summed_too_early_is_refused(reduced):
    def f(w, x):
        return x @ w, lambda dy: (jnp.matmul(x.T, dy, out_sharding=P()), None)

    said = (
        r"of type float32\[16,4\] for the input `w`; expected float32\[16,4\]{U:data}, or None. "
        r".*jax.P\(None, None, unreduced={'data'}.*\)\)`, or use this `out_sharding`"
    )
    with pytest.raises(ValueError, match=said):
        jax.grad(lambda w, x: jnp.sum(custom_gradient(f)(w, x)))(*reduced)
