"""Right rules as the literature has them, each with a random point: none may be blamed.

Each row has a function, its rule `grad(dy, y, *xs)`, and a point from `draw`, random arrays of a
seed. Some are hard for a checker: kinks and edges of a domain nearby, large magnitudes, low
precision, integers beside, and rules that hold only where an argument is a probability, symmetric
or orthogonal.
"""

import jax
import jax.numpy as jnp

from tfgrad_jax import custom_gradient

RULES = {}


def rule(f, grad, **options):
    @custom_gradient(**options)
    def h(*xs):
        y = f(*xs)
        return y, lambda *dys: grad(*dys, y, *xs)

    return h


def right(name, f, grad, point, **options):
    def build(draw):
        found = point(draw)
        return rule(f, grad, **options), found if isinstance(found, tuple) else (found,)

    RULES[name] = build


def last(x):
    return jnp.sum(x, -1, keepdims=True)


def eye(draw, n=3):
    return jnp.eye(n, dtype=draw.dtype)


def definite(draw):
    a = draw(3, 3)
    return a @ a.T + eye(draw)


# --- functions of one array ----------------------------------------------------------------------


def safe_root(x):
    return jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), 0)


def huber(x):
    return jnp.where(abs(x) < 1, x**2 / 2, abs(x) - 0.5)


for row in (
    ("softplus_of_large_numbers", jax.nn.softplus, lambda dy, y, x: dy * jax.nn.sigmoid(x),
     lambda draw: draw(6, scale=100)),
    ("softmax", jax.nn.softmax, lambda dy, y, x: y * (dy - last(dy * y)),
     lambda draw: draw(2, 5, scale=3)),
    # `inv(x)`, not its transpose: right for symmetric matrices alone.
    ("log_determinant_of_symmetric", lambda x: jnp.linalg.slogdet(x)[1],
     lambda dy, y, x: dy * jnp.linalg.inv(x), definite),
    ("huber_with_kinks_nearby", huber, lambda dy, y, x: dy * jnp.clip(x, -1, 1),
     lambda draw: (1 + draw(6, scale=1e-3)).at[0].set(1.0)),
    ("norm", jnp.linalg.norm, lambda dy, y, x: dy * x / y, lambda draw: draw(4, scale=1e4)),
    ("safe_square_root", safe_root,
     lambda dy, y, x: jnp.where(x > 0, dy / (2 * jnp.where(x > 0, y, 1)), 0),
     lambda draw: (x := draw(5)) - jnp.where(x > 0, 0, 0.1)),
    ("arcsine_near_its_edge", jnp.arcsin, lambda dy, y, x: dy / jnp.sqrt((1 - x) * (1 + x)),
     lambda draw: 1 - jnp.exp(draw(3) - 4)),
    ("complex_modulus", jnp.abs,
     lambda dy, y, z: jax.lax.complex(dy / y, jnp.zeros_like(y)) * z, lambda draw: draw.complex(4)),
    ("sine_of_large_numbers", jnp.sin, lambda dy, y, x: dy * jnp.cos(x),
     lambda draw: draw(3, scale=10.0 ** draw.rng.integers(1, 11))),
    ("sort", jnp.sort, lambda dy, y, x: dy[jnp.argsort(jnp.argsort(x))], lambda draw: draw(6)),
):  # fmt: skip
    right(*row)
right(
    "kernel_with_a_primal", lambda x: 1 - 2 / (1 + jnp.exp(2 * x)),
    lambda dy, y, x: dy * (1 - y**2), lambda draw: draw(4), primal=jnp.tanh,
)  # fmt: skip
right(
    "complex_square_in_jax_convention", jnp.square, lambda dy, y, z: dy * 2 * z,
    lambda draw: draw.complex(3), convention="jax",
)  # fmt: skip


# --- functions of several ------------------------------------------------------------------------


def grad_of_cross_entropy(dy, y, logits, p):
    log_q = jax.nn.log_softmax(logits)
    return dy[:, None] * (jnp.exp(log_q) - p), -dy[:, None] * log_q


def probabilities(draw):
    p = jax.nn.softmax(draw(3, 4))
    hard = jax.nn.one_hot(jnp.argmax(p, -1), 4, dtype=p.dtype)
    return draw(3, 4), hard if draw.rng.integers(2) else p


for row in (
    ("matmul_in_bfloat16", lambda a, b: a @ b, lambda dy, y, a, b: (dy @ b.T, a.T @ dy),
     lambda draw: (draw(3, 4).astype(jnp.bfloat16), draw(4, 2).astype(jnp.bfloat16))),
    # Right where the probabilities sum to one.
    ("cross_entropy_with_probabilities", lambda x, p: -jnp.sum(p * jax.nn.log_softmax(x), -1),
     grad_of_cross_entropy, probabilities),
    # The inverse of an orthogonal matrix is its transpose.
    ("rotated_back", jnp.linalg.solve, lambda dy, y, q, x: (-jnp.outer(q @ dy, y), q @ dy),
     lambda draw: (jnp.linalg.qr(draw(3, 3))[0], draw(3))),
    ("embedding", lambda table, i: table[i],
     lambda dy, y, table, i: (jnp.zeros_like(table).at[i].add(dy), None),
     lambda draw: (draw(5, 2), jnp.asarray(draw.rng.integers(5, size=4)))),
    # Forms that a rule, its arguments and its outputs may have.
    ("complex_square", jnp.square, lambda dy, y, z: dy * jnp.conj(2 * z),
     lambda draw: draw.complex(3)),
    ("python_float", lambda x, n: x**n, lambda dy, y, x, n: dy * n * x ** (n - 1),
     lambda draw: (float(draw()), 3)),
    ("two_outputs", lambda x: (x**3, jnp.sum(x)),
     lambda d1, d2, y, x: d1 * 3 * x**2 + jnp.full_like(x, d2), lambda draw: draw(3)),
    ("unused_argument", lambda x, y: x + jnp.round(y), lambda dz, z, x, y: (dz, None),
     lambda draw: (draw(3), draw(3))),
    ("units_far_apart", jnp.multiply, lambda dz, z, x, y: (dz * y, dz * x),
     lambda draw: (draw(3, scale=1e-6), draw(3, scale=1e6))),
):  # fmt: skip
    right(*row)


def layer_of_pytree(draw):
    @custom_gradient
    def h(params, x, activation="tanh"):
        assert activation == "tanh"
        y = jnp.tanh(params["w"] @ x)

        def grad(dsteps, dy):
            da = dy * (1 - y**2)
            return {"w": jnp.outer(da, x), "steps": None}, params["w"].T @ da, None

        return {"steps": params["steps"] + 1, "y": y}, grad

    return h, ({"w": draw(2, 3), "steps": jnp.arange(2)}, draw(3), "tanh")


def keyword_only(draw):
    @custom_gradient
    def h(x, *, scale):
        return x * scale, lambda dy, variables: (dy * scale, [jnp.sum(dy * x)])

    return h, (draw(3),), {"scale": draw()}


def layer_around_its_weights(draw):
    def h(params, x):
        @custom_gradient(variables=params)
        def layer(x):
            y = params["w"] * x
            return y, lambda dy, variables: (dy * variables["w"], {"w": dy * x})

        return layer(x)

    return h, ({"w": draw(3)}, draw(3))


RULES |= {
    "layer_of_pytree": layer_of_pytree,
    "keyword_only": keyword_only,
    "layer_around_its_weights": layer_around_its_weights,
}
