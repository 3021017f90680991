"""Right rules of every form that a rule may have, each with a random point in a given precision."""

import jax
import jax.numpy as jnp

from tfgrad_jax import custom_gradient

RIGHT = {}


def right(build):
    RIGHT[build.__name__] = build
    return build


@right
def square(draw):
    @custom_gradient
    def h(x):
        return x**2, lambda dy: dy * 2 * x

    return h, (draw(3),)


@right
def scalar_sine(draw):
    @custom_gradient
    def h(x):
        return jnp.sin(x), lambda dy: dy * jnp.cos(x)

    return h, (draw(),)


@right
def python_float(draw):
    @custom_gradient
    def h(x, n):
        return x**n, lambda dy: dy * n * x ** (n - 1)

    return h, (float(draw()), 3)


@right
def product(draw):
    @custom_gradient
    def h(x, y):
        return x * jnp.exp(y), lambda dy: (dy * jnp.exp(y), dy * x * jnp.exp(y))

    return h, (draw(2, 3), draw(2, 3))


@right
def log1pexp(draw):
    @custom_gradient
    def h(x):
        return jnp.logaddexp(x, 0), lambda dy: dy * jax.nn.sigmoid(x)

    return h, (draw(4, scale=10),)


@right
def dense(draw):
    @custom_gradient
    def h(x, w, b):
        y = x @ w + jnp.broadcast_to(b, (x.shape[0], b.shape[0]))
        return y, lambda dy: (dy @ w.T, x.T @ dy, dy.sum(0))

    return h, (draw(4, 3), draw(3, 2), draw(2))


@right
def softmax(draw):
    @custom_gradient
    def h(x):
        y = jax.nn.softmax(x)
        return y, lambda dy: y * (dy - jnp.sum(dy * y))

    return h, (draw(5),)


@right
def norm(draw):
    @custom_gradient
    def h(x):
        y = jnp.sqrt(jnp.sum(x**2))
        return y, lambda dy: dy * x / y

    return h, (draw(4),)


@right
def matrix_product(draw):
    @custom_gradient
    def h(a, b):
        return a @ b, lambda dy: (dy @ b.T, a.T @ dy)

    return h, (draw(3, 3), draw(3, 3))


@right
def solve(draw):
    @custom_gradient
    def h(a, b):
        x = jnp.linalg.solve(a, b)

        def grad(dy):
            db = jnp.linalg.solve(a.T, dy)
            return -jnp.outer(db, x), db

        return x, grad

    return h, (draw(3, 3, scale=0.1) + 2 * jnp.eye(3, dtype=draw.dtype), draw(3))


@right
def complex_square(draw):
    @custom_gradient
    def h(z):
        return z * z, lambda dy: dy * jnp.conj(2 * z)

    return h, (draw.complex(3),)


@right
def complex_square_in_jax_convention(draw):
    @custom_gradient(convention="jax")
    def h(z):
        return z * z, lambda dy: dy * 2 * z

    return h, (draw.complex(3),)


@right
def complex_modulus(draw):
    @custom_gradient
    def h(z):
        y = jnp.abs(z)
        return y, lambda dy: jax.lax.complex(dy / y, jnp.zeros_like(y)) * z

    return h, (draw.complex(3),)


@right
def phase(draw):
    @custom_gradient
    def h(x):
        y = jax.lax.complex(jnp.cos(x), jnp.sin(x))
        return y, lambda dy: jnp.imag(jnp.conj(y) * dy)

    return h, (draw(3),)


@right
def layer_of_pytree(draw):
    @custom_gradient
    def h(params, x, activation="tanh"):
        assert activation == "tanh"
        y = jnp.tanh(params["w"] @ x)

        def grad(dy):
            da = dy * (1 - y**2)
            return {"w": jnp.outer(da, x), "steps": None}, params["w"].T @ da, None

        return {"y": y, "steps": params["steps"] + 1}, lambda dsteps, dy: grad(dy)

    return h, ({"w": draw(2, 3), "steps": jnp.arange(2)}, draw(3), "tanh")


@right
def relu(draw):
    @custom_gradient
    def h(x):
        return jnp.maximum(x, 0), lambda dy: jnp.where(x > 0, dy, 0)

    return h, (draw(6),)


@right
def kinks(draw):
    @custom_gradient
    def h(x):
        return jnp.abs(x), lambda dy: dy * jnp.sign(x)

    return h, (draw(4).at[1].set(0.0),)


@right
def two_outputs(draw):
    @custom_gradient
    def h(x):
        return (x**3, jnp.sum(x)), lambda d1, d2: d1 * 3 * x**2 + jnp.full_like(x, d2)

    return h, (draw(3),)


@right
def unused_argument(draw):
    @custom_gradient
    def h(x, y):
        return x + jnp.round(y), lambda dy: (dy, None)

    return h, (draw(3), draw(3))


@right
def cumulative_sum(draw):
    @custom_gradient
    def h(x):
        return jnp.cumsum(x), lambda dy: jnp.cumsum(dy[::-1])[::-1]

    return h, (draw(5),)


@right
def gather(draw):
    @custom_gradient
    def h(x, index):
        return x[index], lambda dy: (jnp.zeros_like(x).at[index].add(dy), None)

    return h, (draw(5), jnp.array([0, 3, 3]))


@right
def keyword_only(draw):
    @custom_gradient
    def h(x, *, scale):
        return x * scale, lambda dy, variables: (dy * scale, [jnp.sum(dy * x)])

    return h, (draw(3),), {"scale": draw()}


@right
def declared_variables(draw):
    def h(params, x):
        @custom_gradient(variables=params)
        def layer(x):
            y = params["w"] * x

            def grad(dy, variables):
                return dy * variables["w"], {"w": dy * x}

            return y, grad

        return layer(x)

    return h, ({"w": draw(3)}, draw(3))


@right
def captured_constant(draw):
    w = draw(3)

    @custom_gradient
    def h(x):
        return w * jnp.cos(x), lambda dy: -w * jnp.sin(x) * dy

    return h, (draw(3),)


@right
def units_far_apart(draw):
    @custom_gradient
    def h(x, y):
        return x * y, lambda dy: (dy * y, dy * x)

    return h, (draw(3, scale=1e-6), draw(3, scale=1e6))


@right
def domain_with_an_edge(draw):
    @custom_gradient
    def h(x):
        return jnp.log(x), lambda dy: dy / x

    return h, (jnp.exp(draw(4, scale=4)),)
