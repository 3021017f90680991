"""What a rule receives: one upstream per leaf of `y`, or one in its structure."""

import functools

import jax
import jax.numpy as jnp
import pytest
from gradient_checks import F3, F7, Point, check_gradients
from helpers import assert_same

from tfgrad_jax import custom_gradient


def test_one_upstream_per_leaf_in_the_order_of_jax_tree():
    @custom_gradient
    def h(x):
        y = {"z": x, "a": (2 * x, [3 * x]), "m": Point(4 * x, 5 * x)}

        def grad(a0, a1, mx, my, z):
            return a0 + 10 * a1 + 100 * mx + 1000 * my + 10000 * z

        return y, grad

    def loss(x):
        y = h(x)
        assert list(y) == ["z", "a", "m"] or isinstance(x, jax.core.Tracer)
        assert type(y["m"]) is Point
        return y["a"][0] + 2 * y["a"][1][0] + 3 * y["m"].x + 4 * y["m"].y + 5 * y["z"]

    check_gradients(loss, (1.0,), (jnp.float32(1 + 20 + 300 + 4000 + 50000),))


def test_output_that_is_not_used_gives_zeros():
    seen = []

    @custom_gradient
    def h(x):
        def grad(da, db):
            seen.append((da, db))
            return 7 * da

        return (x, jnp.ones((2, 3), jnp.bfloat16)), grad

    assert_same(jax.grad(lambda x: h(x)[0])(1.0), F7)
    assert_same(seen, [(jnp.float32(1), jnp.zeros((2, 3), jnp.bfloat16))])


def test_upstreams_of_integers_and_booleans_are_zeros_of_their_dtype():
    seen = []

    @custom_gradient
    def h(x):
        def grad(dy, di, db, du):
            seen.append((di, db, du))
            return 7 * dy

        return (x, jnp.arange(3), x > 0, jnp.uint8(2)), grad

    expected = (jnp.zeros(3, jnp.int32), jnp.zeros((), bool), jnp.uint8(0))
    assert_same(jax.grad(lambda x: h(x)[0])(1.0), F7)
    assert_same(seen.pop(), expected)
    assert_same(jax.jit(jax.grad(lambda x: h(x)[0]))(1.0), F7)


@pytest.mark.parametrize("convention", ["tf", "jax"])
def test_upstreams_of_outputs_of_several_kinds(convention):
    """For `Re (1 + 2j) z`: 1 - 2j in TensorFlow's convention, 1 + 2j in JAX's."""
    seen = []

    @custom_gradient(convention=convention)
    def h(x):
        def grad(*dys):
            seen.append(dys)
            return 3 * x

        return (7 * jnp.stack([x, x]), jnp.int32(1), jax.lax.complex(x, x)), grad

    def loss(x):
        y, _, z = h(x)
        return jnp.sum(7 * y) + jnp.real((1 + 2j) * z)

    assert_same(jax.grad(loss)(1.0), F3)
    sevens = jnp.full(2, 7.0)
    if convention == "tf":
        assert_same(seen, [(sevens, jnp.int32(0), jnp.complex64(1 - 2j))])
    else:
        (((dy, di, dz),),) = seen
        assert_same((dy, dz), (sevens, jnp.complex64(1 + 2j)))
        assert di.dtype == jax.dtypes.float0


def test_one_upstream_is_shared_by_all_uses():
    h = custom_gradient(lambda x: (x, lambda dy: 7 * dy))

    def loss(x):
        y = h(x)
        return 2 * y + 3 * y

    check_gradients(loss, (1.0,), (jnp.float32(35),))


def test_rule_may_take_the_upstreams_together():
    h = custom_gradient(lambda x: ((x, 2 * x), lambda *dys: 7 * dys[0] + 5 * dys[1]))
    check_gradients(lambda x: h(x)[0] + 2 * h(x)[1], (1.0,), (jnp.float32(17),))


@pytest.mark.parametrize(
    "make", [lambda x: x, lambda x: (x, x), lambda x: {"b": x, "a": [x]}], ids=["x", "pair", "tree"]
)
def test_jax_convention_passes_one_upstream_with_the_structure_of_y(make):
    structures = []

    @functools.partial(custom_gradient, convention="jax")
    def h(x):
        def grad(dy):
            structures.append(jax.tree.structure(dy))
            return 7 * sum(jax.tree.leaves(dy))

        return make(x), grad

    check_gradients(
        lambda x: sum(jax.tree.leaves(h(x))),
        (1.0,),
        (7 * jnp.float32(len(jax.tree.leaves(make(1)))),),
    )
    assert set(structures) == {jax.tree.structure(make(1.0))}


def test_jax_convention_is_a_drop_in_for_jax_custom_gradient():
    def f(x, y):
        return {"s": x + y, "p": x * y}, lambda dy: (7 * dy["p"] * y, 5 * dy["s"])

    def of(decorated):
        return jax.grad(lambda x, y: decorated(x, y)["p"] * decorated(x, y)["s"], (0, 1))(2.0, 3.0)

    assert_same(of(custom_gradient(f, convention="jax")), of(jax.custom_gradient(f)))


@pytest.mark.parametrize("make", [lambda: jnp.arange(2), lambda: jax.random.key(0)])
def test_jax_convention_has_the_upstreams_of_jax_custom_gradient(make):
    """For outputs without a derivative as well: float0."""

    def upstream(decorate):
        seen = []

        def f(x):
            def grad(dys):
                seen.append(dys[1])
                return 7 * dys[0]

            return (x, make()), grad

        assert_same(jax.grad(lambda x: decorate(f)(x)[0])(1.0), F7)
        return [(dy.shape, dy.dtype) for dy in seen]

    ours = upstream(functools.partial(custom_gradient, convention="jax"))
    assert ours == upstream(jax.custom_gradient)
