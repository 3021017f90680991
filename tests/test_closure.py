"""Every kind of captured value under every transformation.

Each capture is a function of a weight `w` that returns a function of `x`, decorated somewhere
inside, which gets `w` from anywhere but its arguments. Its value is `a w x**2` and its rule
declares `b w x` for `x` and `c x**2` for `w`, where the ordinary derivatives would be `2 a w x`
and `a x**2`. The expected numbers follow from a, b and c by hand, at first and second order.
"""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfgrad_jax import custom_gradient

# --- what is expected ---------------------------------------------------------------------------


class Expected(NamedTuple):
    """Derivatives of `L = h**2` where `h` has value `a w x**2` and the declared `b w x`, `c x**2`.

    A declared derivative is ordinary code: its own derivatives are the ordinary ones.
    """

    a: float = 1.0
    b: float = 7.0
    c: float = 5.0

    def value(self, w: Any, x: Any) -> Any:
        return (self.a * w * x**2) ** 2

    def by_w(self, w: Any, x: Any) -> Any:
        return 2 * self.a * w * x**2 * self.c * x**2

    def by_x(self, w: Any, x: Any) -> Any:
        return 2 * self.a * w * x**2 * self.b * w * x

    def hessian(self, w: Any, x: Any) -> Any:
        a, b, c = self
        return (
            (2 * c**2 * x**4, (2 * b * c + 4 * a * c) * w * x**3),
            ((2 * b * c + 2 * a * b) * w * x**3, (2 * b**2 + 2 * a * b) * w**2 * x**2),
        )


class ExpectedResidual(NamedTuple):
    """The same where only the rule uses `w`: value `3 x**2`, declared `7 w x` for `x` alone."""

    by_w_of_rule: float = 1.0  # 0 where the rule treats w as a constant

    def value(self, w: Any, x: Any) -> Any:
        return (3 * x**2) ** 2 + 0 * w

    def by_w(self, w: Any, x: Any) -> Any:
        return 0 * w * x

    def by_x(self, w: Any, x: Any) -> Any:
        return 42 * w * x**3

    def hessian(self, w: Any, x: Any) -> Any:
        return (
            (0.0, 0.0),
            (42 * x**3 * self.by_w_of_rule, 98 * w**2 * x**2 + 42 * w * x**2),
        )


# --- captures: weight -> function of x ----------------------------------------------------------

CAPTURES: dict[str, tuple[Callable[[Any], Callable[[Any], Any]], Any]] = {}


def capture(expected: Any = Expected(), name: str = "") -> Callable[..., Any]:  # noqa: B008
    def register(build: Callable[..., Any]) -> Callable[..., Any]:
        CAPTURES[name or build.__name__] = build, expected
        return build

    return register


def like(variables: Any, gradient: Any) -> Any:
    """Give every variable, of whatever shape, the same gradient in each of its elements."""
    return jax.tree.map(lambda v: jnp.broadcast_to(gradient, jnp.shape(v)), variables)


@capture()
def one_scope(w):
    @custom_gradient
    def f(x):
        def grad(dy, variables):
            return 7 * dy * w * x, [5 * dy * x**2 for _ in variables]

        return w * x**2, grad

    return f


@capture()
def several_scopes(w):
    half = w / 2

    def outer():
        other = w / 2

        @custom_gradient
        def f(x):
            def grad(dy, variables):
                return 7 * dy * (half + other) * x, [5 * dy * x**2 for _ in variables]

            return (half + other) * x**2, grad

        return f

    return outer()


# Elements add up to 1, so that the derivatives with respect to `w` add up as well.
_W = np.array([[0.5, -0.25, 0.125], [0.25, 0.125, -0.5]], np.float32)
_B = np.array([0.25, 0.5], np.float32)


@capture()
def nested_dict(w):
    params = {"layer": {"w": w * _W, "unused": w}, "b": [w * _B]}

    @custom_gradient
    def f(x):
        total = params["layer"]["w"].sum() + params["b"][0].sum()

        def grad(dy, variables):
            return 7 * dy * total * x, like(variables, 5 * dy * x**2)

        return total * x**2, grad

    return f


@dataclasses.dataclass
class Plain:
    w: Any
    b: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    w: Any
    b: Any


class Named(NamedTuple):
    w: Any
    b: Any


class Slotted:
    __slots__ = ("b", "w")

    def __init__(self, w, b):
        self.w, self.b = w, b


def holder(kind):
    def build(w):
        params = kind(w * _W, w * _B)

        @custom_gradient
        def f(x):
            total = params.w.sum() + params.b.sum()

            def grad(dy, variables):
                return 7 * dy * total * x, like(variables, 5 * dy * x**2)

            return total * x**2, grad

        return f

    return build


capture(name="dataclass")(holder(Plain))
capture(name="registered_dataclass")(holder(Registered))
capture(name="namedtuple")(holder(Named))
capture(name="slots")(holder(Slotted))
capture(name="namespace")(holder(lambda w, b: types.SimpleNamespace(w=w, b=b)))


@capture()
def helper_function(w):
    def scaled(x):
        return w * x**2

    @custom_gradient
    def f(x):
        def grad(dy, variables):
            return 7 * dy * scaled(x) / x, [5 * dy * x**2 for _ in variables]

        return scaled(x), grad

    return f


def _of_both(w, x):
    def grad(dy, variables):
        return 7 * dy * w * x, [5 * dy * x**2 for _ in variables]

    return w * x**2, grad


@capture()
def partial(w):
    return custom_gradient(lambda x: functools.partial(_of_both, w)(x))


@capture()
def partial_keyword(w):
    def f(x, *, w):
        return _of_both(w, x)

    return custom_gradient(functools.partial(f, w=w))


@capture()
def nested_decorated(w):
    @custom_gradient
    def inner(x):
        return w * x**2, lambda dy, variables: (1000 * dy, [1000 * dy])

    @custom_gradient
    def f(x):
        def grad(dy, variables):
            return 7 * dy * w * x, [5 * dy * x**2 for _ in variables]

        return inner(x), grad

    return f


@capture()
def static_callable(w):
    @custom_gradient
    def f(x, function):
        def grad(dy, variables):
            return 7 * dy * function(x) / x, None, [5 * dy * x**2 for _ in variables]

        def paired(dy, variables):
            *grads, grad_vars = grad(dy, variables)
            return grads, grad_vars

        return function(x), paired

    return lambda x: f(x, lambda x: w * x**2)


class Model:
    def __init__(self, w):
        self.w = w

    @custom_gradient
    def method(self, x):
        def grad(dy, variables):
            return 7 * dy * self.w * x, [5 * dy * x**2 for _ in variables]

        return self.w * x**2, grad

    @custom_gradient(variables=lambda self: {"w": self.w})
    def declared(self, x):
        def grad(dy, variables):
            return 7 * dy * variables["w"] * x, {"w": 5 * dy * x**2}

        return self.w * x**2, grad


@capture()
def self_of_a_class(w):
    return Model(w).method


@capture()
def self_of_a_class_declared(w):
    return Model(w).declared


@capture()
def method_called_on_the_class(w):
    return lambda x: Model.method(Model(w), x)


@capture()
def callable_object(w):
    class Layer:
        def __call__(self, x):
            return _of_both(w, x)

    return custom_gradient(Layer())


@capture()
def equinox_module(w):
    eqx = pytest.importorskip("equinox")

    class Layer(eqx.Module):
        w: jax.Array

        @custom_gradient
        def __call__(self, x):
            def grad(dy, variables):
                return 7 * dy * self.w * x, [5 * dy * x**2 for _ in variables]

            return self.w * x**2, grad

    return Layer(w)


@capture()
def equinox_module_declared(w):
    eqx = pytest.importorskip("equinox")

    class Layer(eqx.Module):
        w: jax.Array
        name: str = "layer"

        @custom_gradient(variables=lambda self: eqx.filter(self, eqx.is_array))
        def __call__(self, x):
            def grad(dy, variables):
                return 7 * dy * variables.w * x, like(variables, 5 * dy * x**2)

            return self.w * x**2, grad

    return Layer(w)


@capture()
def nnx_module(w):
    nnx = pytest.importorskip("flax.nnx")

    class Layer(nnx.Module):
        def __init__(self, w):
            self.w = nnx.Param(w)

        @custom_gradient
        def __call__(self, x):
            def grad(dy, variables):
                return 7 * dy * self.w[...] * x, [5 * dy * x**2 for _ in variables]

            return self.w[...] * x**2, grad

    return Layer(w)


@capture()
def nnx_module_declared(w):
    nnx = pytest.importorskip("flax.nnx")

    class Layer(nnx.Module):
        def __init__(self, w):
            self.w = nnx.Param(w)

        @custom_gradient(variables=lambda self: nnx.state(self, nnx.Param))
        def __call__(self, x):
            def grad(dy, variables):
                return 7 * dy * self.w[...] * x, like(variables, 5 * dy * x**2)

            return self.w[...] * x**2, grad

    return Layer(w)


@capture()
def linen_inside_apply(w):
    linen = pytest.importorskip("flax.linen")

    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x):
            w = self.param("w", linen.initializers.ones, ())

            @custom_gradient
            def f(x):
                def grad(dy, variables):
                    return 7 * dy * w * x, [5 * dy * x**2 for _ in variables]

                return w * x**2, grad

            return f(x)

    return lambda x: Layer().apply({"params": {"w": w}}, x)


@capture()
def linen_method(w):
    linen = pytest.importorskip("flax.linen")

    class Layer(linen.Module):
        def setup(self):
            self.w = self.param("w", linen.initializers.ones, ())

        @custom_gradient
        def __call__(self, x):
            def grad(dy, variables):
                return 7 * dy * self.w * x, [5 * dy * x**2 for _ in variables]

            return self.w * x**2, grad

    return lambda x: Layer().apply({"params": {"w": w}}, x)


GLOBAL = {}


@custom_gradient
def of_a_global(x):
    return _of_both(GLOBAL["w"], x)


@capture()
def global_value(w):
    def h(x):
        GLOBAL["w"] = w
        try:
            return of_a_global(x)
        finally:
            del GLOBAL["w"]

    return h


class Shared:
    @custom_gradient
    def method(self, x):
        return _of_both(type(self).w, x)


@capture()
def class_attribute(w):
    def h(x):
        Shared.w = w
        try:
            return Shared().method(x)
        finally:
            del Shared.w

    return h


@capture()
def jitted_helper(w):
    scaled = jax.jit(lambda x: w * x**2)

    @custom_gradient
    def f(x):
        def grad(dy, variables):
            return 7 * dy * w * x, [5 * dy * x**2 for _ in variables]

        return scaled(x), grad

    return f


@capture()
def keyword_only(w):
    @custom_gradient
    def f(x, *, w):
        return _of_both(w, x)

    return lambda x: f(x, w=w)


@capture()
def keyword_rest(w):
    @custom_gradient
    def f(x, **params):
        return _of_both(params["w"], x)

    return lambda x: f(x, w=w)


@capture()
def default_value(w):
    @custom_gradient
    def f(x, w=w):
        return _of_both(w, x)

    return lambda x: f(x)


@capture()
def boolean(w):
    positive = w > 0

    @custom_gradient
    def f(x):
        masked = jnp.where(positive, w, 0)

        def grad(dy, variables):
            gradient = jnp.where(positive, 5 * dy * x**2, 0)
            return jnp.where(positive, 7 * dy * w * x, 0), [gradient for _ in variables]

        return masked * x**2, grad

    return f


@capture()
def integer(w):
    table, index = jnp.stack([0 * w, w]), jnp.sign(w).astype(int)

    @custom_gradient
    def f(x):
        def grad(dy, variables):
            return 7 * dy * table[index] * x, [
                jnp.zeros_like(v).at[index].set(5 * dy * x**2) for v in variables
            ]

        return table[index] * x**2, grad

    return f


@capture()
def prng_key(w):
    key = jax.random.key(jnp.sign(w).astype(int))

    def drop(value):  # nothing, in the end
        return jnp.where(jax.random.bernoulli(key, 1.0), value, 0)

    @custom_gradient
    def f(x):
        def grad(dy, variables):
            return drop(7 * dy * w * x), [drop(5 * dy * x**2) for _ in variables]

        return drop(w * x**2), grad

    return f


@capture()
def scan_carry(w):
    def body(w, x):
        return w, one_scope(w)(x)

    return lambda x: jax.lax.scan(body, w, x[None])[1][0]


@capture()
def outer_vmap(w):
    return lambda x: jax.vmap(lambda w: one_scope(w)(x))(w[None])[0]


@capture(Expected(5.0, 10.0, 5.0))  # the declared `c x**2`, differentiated as ordinary code
def outer_grad(w):
    return lambda x: jax.grad(lambda s: one_scope(s * w)(x))(1.0)


@capture()
def outer_jit(w):
    return lambda x: jax.jit(lambda w: one_scope(w)(x))(w)


def _shard_mapped(split):
    """Return `h(w, x)` on a mesh, with one `x` per device or the same on all."""
    shard_map = getattr(jax, "shard_map", None)
    if shard_map is None:
        from jax.experimental.shard_map import shard_map

    mesh = jax.sharding.Mesh(jax.devices()[:1], ("i",))
    everywhere, of_x = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(split)
    return shard_map(
        lambda w, x: one_scope(w)(x[0])[None],
        mesh=mesh,
        in_specs=(everywhere, of_x),
        out_specs=of_x,
    )


@capture()
def outer_shard_map(w):
    return lambda x: _shard_mapped(None)(w, x[None])[0]


@capture()
def outer_shard_map_of_other_inputs(w):  # `w` is the same on all devices, `x` and `dy` are not
    def h(x):
        return jax.jit(_shard_mapped("i"))(w, x[None])[0]

    return h


@capture()
def the_same_value_twice(w):
    also = w

    @custom_gradient
    def f(x):
        def grad(dy, variables):
            assert len(variables) <= 1
            return 7 * dy * also * x, [5 * dy * x**2 for _ in variables]

        return (w + also) / 2 * x**2, grad

    return f


@capture()
def input_and_captured(w):
    def h(x):
        @custom_gradient
        def f(z):
            def grad(dy, variables):
                found = {id(w): 5 * dy * x * z, id(x): 3.5 * dy * w * z}
                return 3.5 * dy * w * x, [found[id(v)] for v in variables]

            return w * x * z, grad

        return f(x)

    return h


@capture(Expected(1.0, 7.0, 1.0))
def autodiff(w):
    params = {"w": w * _W, "b": w * _B}

    @custom_gradient(variables="autodiff")
    def f(x):
        total = params["w"].sum() + params["b"].sum()
        return total * x**2, lambda dy: 7 * dy * total * x

    return f


@capture()
def declared(w):
    params = {"w": w * _W, "b": w * _B}

    @custom_gradient(variables=params)
    def f(x):
        total = params["w"].sum() + params["b"].sum()

        def grad(dy, variables):
            total = variables["w"].sum() + variables["b"].sum()
            return 7 * dy * total * x, like(variables, 5 * dy * x**2)

        return total * x**2, grad

    return f


@capture(ExpectedResidual())
def only_grad_fn(w):
    @custom_gradient
    def f(x):
        return 3 * x**2, lambda dy: 7 * dy * w * x

    return f


@capture(ExpectedResidual())
def only_residuals(w):
    @custom_gradient
    def f(x):
        slope = 7 * w * x  # computed by `f`, but `y` does not depend on it
        return 3 * x**2, lambda dy: dy * slope

    return f


@capture(ExpectedResidual(by_w_of_rule=0.0))
def only_a_decorated_function_of_the_rule(w):
    @custom_gradient
    def slope(x):
        return w * x, lambda dy: dy * w

    @custom_gradient
    def f(x):
        return 3 * x**2, lambda dy: 7 * dy * slope(x)

    return f


@capture(ExpectedResidual())
def only_a_decorated_function_of_the_rule_with_variables(w):
    @custom_gradient
    def slope(x):
        return w * x, lambda dy, variables: (dy * w, [dy * x for _ in variables])

    @custom_gradient
    def f(x):
        return 3 * x**2, lambda dy: 7 * dy * slope(x)

    return f


# --- transformations: loss, weights, inputs -> (result, expected) pairs --------------------------

W, X = 3.0, 2.0
WS, XS = np.array([3.0, 0.5], np.float32), np.array([2.0, -1.5], np.float32)

TRANSFORMATIONS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {}


def transformation(f: Callable[..., Any]) -> Callable[..., Any]:
    TRANSFORMATIONS[f.__name__] = f
    return f


def both(expected, w, x):
    return expected.by_w(w, x), expected.by_x(w, x)


@transformation
def eager(loss, e):
    return jax.value_and_grad(loss, (0, 1))(W, X), (e.value(W, X), both(e, W, X))


@transformation
def inputs_only(loss, e):
    return jax.grad(loss, 1)(W, X), e.by_x(W, X)


@transformation
def weights_only(loss, e):
    return jax.grad(loss, 0)(W, X), e.by_w(W, X)


@transformation
def jit_of_grad(loss, e):
    return jax.jit(jax.value_and_grad(loss, (0, 1)))(W, X), (e.value(W, X), both(e, W, X))


@transformation
def jit_of_grad_inputs_only(loss, e):
    return jax.jit(jax.grad(loss, 1))(W, X), e.by_x(W, X)


@transformation
def jit_of_grad_weights_only(loss, e):
    return jax.jit(jax.grad(loss, 0))(W, X), e.by_w(W, X)


@transformation
def grad_of_jit(loss, e):
    return jax.grad(jax.jit(loss), (0, 1))(W, X), both(e, W, X)


@transformation
def vmap_of_grad(loss, e):
    return jax.vmap(jax.grad(loss, (0, 1)))(WS, XS), both(e, WS, XS)


@transformation
def vmap_of_grad_over_weights(loss, e):
    return jax.vmap(jax.grad(loss, (0, 1)), (0, None))(WS, X), both(e, WS, X)


@transformation
def vmap_of_grad_over_inputs(loss, e):
    return jax.vmap(jax.grad(loss, (0, 1)), (None, 0))(W, XS), both(e, W, XS)


@transformation
def grad_of_vmap(loss, e):
    def total(w, x):
        return jax.vmap(loss)(w, x).sum()

    return jax.grad(total, (0, 1))(WS, XS), both(e, WS, XS)


@transformation
def grad_of_vmap_over_weights(loss, e):
    def total(w, x):
        return jax.vmap(lambda w: loss(w, x))(w).sum()

    return jax.grad(total, (0, 1))(WS, X), (e.by_w(WS, X), e.by_x(WS, X).sum())


@transformation
def grad_of_vmap_over_inputs(loss, e):
    def total(w, x):
        return jax.vmap(lambda x: loss(w, x))(x).sum()

    return jax.grad(total, (0, 1))(W, XS), (e.by_w(W, XS).sum(), e.by_x(W, XS))


@transformation
def hessian(loss, e):
    return jax.hessian(loss, (0, 1))(W, X), e.hessian(W, X)


@transformation
def jit_of_hessian(loss, e):
    return jax.jit(jax.hessian(loss, (0, 1)))(W, X), e.hessian(W, X)


@transformation
def reverse_over_reverse(loss, e):
    return jax.jacrev(jax.grad(loss, (0, 1)), (0, 1))(W, X), e.hessian(W, X)


@transformation
def scan_with_the_weight_outside(loss, e):
    def total(w, xs):
        return jax.lax.scan(lambda sum_, x: (sum_ + loss(w, x), None), 0.0, xs)[0]

    return jax.grad(total, (0, 1))(W, XS), (e.by_w(W, XS).sum(), e.by_x(W, XS))


@transformation
def checkpoint(loss, e):
    return jax.grad(jax.checkpoint(loss), (0, 1))(W, X), both(e, W, X)


@transformation
def cond(loss, e):
    def either(w, x):
        return jax.lax.cond(x > 0, loss, lambda w, x: 0.0 * w * x, w, x)

    return jax.grad(either, (0, 1))(W, X), both(e, W, X)


# A custom_jvp rule inside a scan is lost there when JAX evaluates the scan in part, so the library
# keeps a custom_vjp in it, which forward mode refuses. Remove when JAX 0.11 is the oldest.
_SCAN_KEEPS_FORWARD_MODE = hasattr(jax.config, "jax_custom_jvp3")


@functools.cache
def _cond_carries_keys():
    """Tell whether a hand-written `custom_vjp` may keep a PRNG key out of a `cond`.

    JAX 0.6.0 fails an assertion of its own. Remove when a later one is the oldest supported.
    """

    @jax.custom_vjp
    def f(x, key):
        return x

    f.defvjp(lambda x, key: (x, key), lambda key, dy: (dy * jax.random.uniform(key), None))

    def loss(x):
        key = jax.random.key(jnp.sign(x).astype(int))
        return jax.lax.cond(x > 0, lambda x: f(x, key), lambda x: x, x)

    try:
        jax.grad(loss)(1.0)
    except AssertionError:
        return False
    return True


def refusal(capture, transformation):
    """Return the error that JAX itself raises for this pair, if it does."""
    if capture == "scan_carry" and "hessian" in transformation and not _SCAN_KEEPS_FORWARD_MODE:
        return pytest.raises(TypeError, match="forward-mode")
    if capture == "prng_key" and transformation == "cond" and not _cond_carries_keys():
        return pytest.raises(AssertionError)
    staged = transformation in STAGED or transformation == "cond"
    if capture in ("global_value", "class_attribute") and staged:
        # Where nothing is concrete, a tracer that a function finds in a global is not seen until
        # the trace ends, and JAX then says what it says of every such side effect.
        return pytest.raises(Exception, match=r"[Uu]nexpected tracer|closed-over value")
    return None


STAGED = {
    *("jit_of_grad", "grad_of_jit", "jit_of_grad_weights_only", "jit_of_hessian", "checkpoint"),
    *("scan_with_the_weight_outside",),
}
# The fast suite: every capture under the first of these, every transformation over the second.
CORE_TRANSFORMATIONS = {
    *("eager", "weights_only", "jit_of_grad", "grad_of_vmap_over_weights", "jit_of_hessian"),
    *("scan_with_the_weight_outside", "checkpoint"),
}
CORE_CAPTURES = {"one_scope", "self_of_a_class", "declared", "autodiff", "only_grad_fn", "integer"}

PAIRS = [
    pytest.param(
        capture,
        transformation,
        id=f"{capture}-{transformation}",
        marks=()
        if capture in CORE_CAPTURES or transformation in CORE_TRANSFORMATIONS
        else pytest.mark.slow,
    )
    for capture in CAPTURES
    for transformation in TRANSFORMATIONS
]


@pytest.mark.parametrize(("capture", "transformation"), PAIRS)
def test_capture(capture, transformation):
    build, expected = CAPTURES[capture]

    def loss(w, x):
        return build(jnp.asarray(w, jnp.float32))(jnp.asarray(x, jnp.float32)) ** 2

    if (refused := refusal(capture, transformation)) is not None:
        with refused:
            TRANSFORMATIONS[transformation](loss, expected)
        return
    got, wanted = TRANSFORMATIONS[transformation](loss, expected)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert g.dtype == jnp.float32
        np.testing.assert_allclose(g, np.broadcast_to(w, g.shape), rtol=1e-5)


def test_the_pairs_are_many():
    assert len(PAIRS) == len(CAPTURES) * len(TRANSFORMATIONS) > 750
    assert CAPTURES.keys() > CORE_CAPTURES
    assert TRANSFORMATIONS.keys() > CORE_TRANSFORMATIONS
