"""Right rules of every form that a rule may have, each with a random point in a given precision."""

import jax
import jax.numpy as jnp
from right_rules import eye, rule

from tfgrad_jax import custom_gradient


def solve(draw):
    def grad(dy, x, a, b):
        db = jnp.linalg.solve(a.T, dy)
        return -jnp.outer(db, x), db

    return rule(jnp.linalg.solve, grad), (draw(3, 3, scale=0.1) + 2 * eye(draw), draw(3))


def dense(draw):
    def f(x, w, b):
        return x @ w + jnp.broadcast_to(b, (x.shape[0], b.shape[0]))

    grad = lambda dy, y, x, w, b: (dy @ w.T, x.T @ dy, dy.sum(0))  # noqa: E731
    return rule(f, grad), (draw(4, 3), draw(3, 2), draw(2))


def phase(draw):
    f = lambda x: jax.lax.complex(jnp.cos(x), jnp.sin(x))  # noqa: E731
    return rule(f, lambda dy, y, x: jnp.imag(jnp.conj(y) * dy)), (draw(3),)


def layer_of_pytree(draw):
    @custom_gradient
    def h(params, x, activation="tanh"):
        assert activation == "tanh"
        y = jnp.tanh(params["w"] @ x)

        def grad(dsteps, dy):
            da = dy * (1 - y**2)
            return {"w": jnp.outer(da, x), "steps": None}, params["w"].T @ da, None

        return {"y": y, "steps": params["steps"] + 1}, grad

    return h, ({"w": draw(2, 3), "steps": jnp.arange(2)}, draw(3), "tanh")


def two_outputs(draw):
    @custom_gradient
    def h(x):
        return (x**3, jnp.sum(x)), lambda d1, d2: d1 * 3 * x**2 + jnp.full_like(x, d2)

    return h, (draw(3),)


def keyword_only(draw):
    @custom_gradient
    def h(x, *, scale):
        return x * scale, lambda dy, variables: (dy * scale, [jnp.sum(dy * x)])

    return h, (draw(3),), {"scale": draw()}


def declared_variables(draw):
    def h(params, x):
        @custom_gradient(variables=params)
        def layer(x):
            y = params["w"] * x
            return y, lambda dy, variables: (dy * variables["w"], {"w": dy * x})

        return layer(x)

    return h, ({"w": draw(3)}, draw(3))


def captured_constant(draw):
    w = draw(3)
    return rule(lambda x: w * jnp.cos(x), lambda dy, y, x: -w * jnp.sin(x) * dy), (draw(3),)


RIGHT = {
    "square": lambda draw: (rule(jnp.square, lambda dy, y, x: dy * 2 * x), (draw(3),)),
    "scalar_sine": lambda draw: (rule(jnp.sin, lambda dy, y, x: dy * jnp.cos(x)), (draw(),)),
    "python_float": lambda draw: (
        rule(lambda x, n: x**n, lambda dy, y, x, n: dy * n * x ** (n - 1)), (float(draw()), 3)),
    "product": lambda draw: (
        rule(lambda x, y: x * jnp.exp(y), lambda dz, z, x, y: (dz * jnp.exp(y), dz * z)),
        (draw(2, 3), draw(2, 3))),
    "log1pexp": lambda draw: (
        rule(lambda x: jnp.logaddexp(x, 0), lambda dy, y, x: dy * jax.nn.sigmoid(x)),
        (draw(4, scale=10),)),
    "dense": dense,
    "norm": lambda draw: (
        rule(lambda x: jnp.sqrt(jnp.sum(x**2)), lambda dy, y, x: dy * x / y), (draw(4),)),
    "matrix_product": lambda draw: (
        rule(jnp.matmul, lambda dy, y, a, b: (dy @ b.T, a.T @ dy)), (draw(3, 3), draw(3, 3))),
    "solve": solve,
    "complex_square": lambda draw: (
        rule(jnp.square, lambda dy, y, z: dy * jnp.conj(2 * z)), (draw.complex(3),)),
    "complex_square_in_jax_convention": lambda draw: (
        rule(jnp.square, lambda dy, y, z: dy * 2 * z, convention="jax"), (draw.complex(3),)),
    "phase": phase,
    "layer_of_pytree": layer_of_pytree,
    "kinks": lambda draw: (
        rule(jnp.abs, lambda dy, y, x: dy * jnp.sign(x)), (draw(4).at[1].set(0.0),)),
    "two_outputs": two_outputs,
    "unused_argument": lambda draw: (
        rule(lambda x, y: x + jnp.round(y), lambda dz, z, x, y: (dz, None)), (draw(3), draw(3))),
    "keyword_only": keyword_only,
    "declared_variables": declared_variables,
    "captured_constant": captured_constant,
    "units_far_apart": lambda draw: (
        rule(jnp.multiply, lambda dz, z, x, y: (dz * y, dz * x)),
        (draw(3, scale=1e-6), draw(3, scale=1e6))),
    "domain_with_an_edge": lambda draw: (
        rule(jnp.log, lambda dy, y, x: dy / x), (jnp.exp(draw(4, scale=4)),)),
}  # fmt: skip
