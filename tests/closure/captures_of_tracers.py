"""Captures of tracers of every kind: other dtypes, other traces, inputs, residuals."""

import jax
import jax.numpy as jnp
from captures import B_PARTS, W_PARTS, Expected, ExpectedResidual, capture, like
from captures_by_python import one_scope

from tfgrad_jax import custom_gradient


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
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("i",))
    everywhere, of_x = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(split)
    return jax.shard_map(
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
    params = {"w": w * W_PARTS, "b": w * B_PARTS}

    @custom_gradient(variables="autodiff")
    def f(x):
        total = params["w"].sum() + params["b"].sum()
        return total * x**2, lambda dy: 7 * dy * total * x

    return f


@capture()
def declared(w):
    params = {"w": w * W_PARTS, "b": w * B_PARTS}

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
    def f(x):
        def grad(dy):
            @custom_gradient
            def slope(x):
                return w * x, lambda dy: dy * w

            return 7 * dy * slope(x)

        return 3 * x**2, grad

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
