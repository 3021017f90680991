"""Right rules as the literature has them, each with a random point: none may be blamed.

Each row has a function, its rule `grad(dy, y, *xs)`, and a point from `draw`, random arrays of a
seed. Some are hard for a checker: kinks and edges of a domain nearby, large magnitudes, low
precision, integers beside, and rules that hold only where an argument is a probability, symmetric,
sorted, or a unit vector.
"""

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl

from tfgrad_jax import custom_gradient

RULES = {}


def rule(f, grad, **options):
    @custom_gradient(**options)
    def h(*xs):
        y = f(*xs)
        return y, lambda dy: grad(dy, y, *xs)

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


def unit(x):
    return x / jnp.linalg.norm(x)


# --- functions of one array ----------------------------------------------------------------------


def root(x):  # y + y**3 = x
    y = jnp.zeros_like(x)
    for _ in range(40):
        y = y - (y + y**3 - x) / (1 + 3 * y**2)
    return y


def safe_root(x):
    return jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), 0)


def log_cosh(x):
    return abs(x) + jnp.log1p(jnp.exp(-2 * abs(x))) - jnp.log(2.0).astype(x.dtype)


def grad_of_cholesky(dy, y, x):
    m = jnp.tril(y.T @ dy)
    m = m - jnp.diag(jnp.diag(m)) / 2
    s = jnp.linalg.solve(y.T, jnp.linalg.solve(y.T, m.T).T)
    return (s + s.T) / 2


def grad_of_expm(dy, y, x):
    return jsl.expm(jnp.block([[x.T, dy], [jnp.zeros_like(x), x.T]]))[:3, 3:]


def grad_of_silu(dy, y, x):
    s = jax.nn.sigmoid(x)
    return dy * (s + y * (1 - s))


def huber(x):
    return jnp.where(abs(x) < 1, x**2 / 2, abs(x) - 0.5)


def away_from_its_edge(x):
    return jnp.where(x > 0, x, x - 0.1)


cdf, density = jax.scipy.stats.norm.cdf, jax.scipy.stats.norm.pdf
for row in (
    ("log1pexp", jax.nn.softplus, lambda dy, y, x: dy * (1 - 1 / (1 + jnp.exp(x))),
     lambda draw: draw(4)),
    ("softplus_of_large_numbers", jax.nn.softplus, lambda dy, y, x: dy * jax.nn.sigmoid(x),
     lambda draw: draw(6, scale=100)),
    ("logsumexp", lambda x: jax.nn.logsumexp(x, axis=-1),
     lambda dy, y, x: dy[:, None] * jnp.exp(x - y[:, None]), lambda draw: draw(3, 5, scale=5)),
    ("softmax", jax.nn.softmax, lambda dy, y, x: y * (dy - last(dy * y)),
     lambda draw: draw(2, 5, scale=3)),
    ("gelu", lambda x: x * cdf(x), lambda dy, y, x: dy * (cdf(x) + x * density(x)),
     lambda draw: draw(6)),
    ("silu_in_float16", jax.nn.silu, grad_of_silu, lambda draw: draw(5).astype(jnp.float16)),
    ("cholesky", jnp.linalg.cholesky, grad_of_cholesky, definite),
    # `inv(x)`, not its transpose: right for symmetric matrices alone.
    ("log_determinant_of_symmetric", lambda x: jnp.linalg.slogdet(x)[1],
     lambda dy, y, x: dy * jnp.linalg.inv(x), definite),
    ("implicit_root", root, lambda dy, y, x: dy / (1 + 3 * y**2), lambda draw: draw(4)),
    ("huber_with_kinks_nearby", huber, lambda dy, y, x: dy * jnp.clip(x, -1, 1),
     lambda draw: (1 + draw(6, scale=1e-3)).at[0].set(1.0)),
    ("relu_with_a_kink_nearby", jax.nn.relu, lambda dy, y, x: jnp.where(x > 0, dy, 0),
     lambda draw: jnp.append(draw(4), draw(2, scale=1e-4))),
    ("smooth_max", lambda x: jnp.sum(x * jax.nn.softmax(2 * x)),
     lambda dy, y, x: dy * jax.nn.softmax(2 * x) * (1 + 2 * (x - y)), lambda draw: draw(5)),
    ("norm", jnp.linalg.norm, lambda dy, y, x: dy * x / y, lambda draw: draw(4, scale=1e4)),
    ("normalized", unit, lambda dy, y, x: (dy - y * jnp.vdot(y, dy)) / jnp.linalg.norm(x),
     lambda draw: draw(3)),
    ("safe_square_root", safe_root,
     lambda dy, y, x: jnp.where(x > 0, dy / (2 * jnp.where(x > 0, y, 1)), 0),
     lambda draw: away_from_its_edge(draw(5))),
    ("square_root_near_zero", jnp.sqrt, lambda dy, y, x: dy / (2 * y),
     lambda draw: jnp.exp(draw(4) - 8)),
    ("logarithm_near_zero", jnp.log, lambda dy, y, x: dy / x,
     lambda draw: jnp.exp(3 * draw(4) - 6)),
    ("arcsine_near_its_edge", jnp.arcsin, lambda dy, y, x: dy / jnp.sqrt((1 - x) * (1 + x)),
     lambda draw: 1 - jnp.exp(draw(3) - 4)),
    ("cumulative_sum", jnp.cumsum, lambda dy, y, x: jnp.cumsum(dy[::-1])[::-1],
     lambda draw: draw(6)),
    ("cumulative_product", jnp.cumprod, lambda dy, y, x: jnp.cumsum((dy * y)[::-1])[::-1] / x,
     lambda draw: jnp.exp(draw(5, scale=0.5))),
    ("complex_conjugate", jnp.conj, lambda dy, y, z: jnp.conj(dy), lambda draw: draw.complex(4)),
    ("complex_modulus", jnp.abs,
     lambda dy, y, z: jax.lax.complex(dy / y, jnp.zeros_like(y)) * z, lambda draw: draw.complex(4)),
    ("fourier_transform", jnp.fft.fft, lambda dy, y, z: 6 * jnp.fft.ifft(dy),
     lambda draw: draw.complex(6)),
    ("matrix_exponential", jsl.expm, grad_of_expm, lambda draw: draw(3, 3, scale=0.5)),
    ("inverse", jnp.linalg.inv, lambda dy, y, x: -y.T @ dy @ y.T,
     lambda draw: draw(3, 3, scale=0.2) + 2 * eye(draw)),
    ("sort", jnp.sort, lambda dy, y, x: dy[jnp.argsort(jnp.argsort(x))], lambda draw: draw(6)),
    ("maximum_of_a_window", lambda x: jnp.max(x.reshape(3, 2), -1),
     lambda dy, y, x: jnp.where(x.reshape(3, 2) == y[:, None], dy[:, None], 0).reshape(-1),
     lambda draw: draw(6)),
    ("log_cosh_of_large_numbers", log_cosh, lambda dy, y, x: dy * jnp.tanh(x),
     lambda draw: draw(5, scale=50)),
):  # fmt: skip
    right(*row)
right(
    "kernel_with_a_primal", lambda x: 1 - 2 / (1 + jnp.exp(2 * x)),
    lambda dy, y, x: dy * (1 - y**2), lambda draw: draw(4), primal=jnp.tanh,
)  # fmt: skip


# --- functions of several ------------------------------------------------------------------------


def centered(x):
    d = x - jnp.mean(x, -1, keepdims=True)
    return d, jax.lax.rsqrt(jnp.mean(d * d, -1, keepdims=True) + 1e-5)


def layer_norm(x, g, b):
    d, r = centered(x)
    return d * r * g[None] + b[None]


def grad_of_layer_norm(dy, y, x, g, b):
    d, r = centered(x)
    n, dn = d * r, dy * g[None]
    dx = dn - jnp.mean(dn, -1, keepdims=True) - n * jnp.mean(dn * n, -1, keepdims=True)
    return r * dx, jnp.sum(dy * n, 0), jnp.sum(dy, 0)


def inverse_rms(x):
    return jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def grad_of_rms_norm(dy, y, x, g):
    r, dn = inverse_rms(x), dy * g[None]
    dx = r * (dn - x * r**2 * jnp.mean(dn * x, -1, keepdims=True))
    return dx, jnp.sum(dy * x * r, 0)


def grad_of_convolution(dy, y, x, w):
    return jnp.convolve(dy, w[::-1], mode="full"), jnp.convolve(x[::-1], dy, mode="valid")


def grad_of_triangular_solve(dy, y, a, b):
    db = jsl.solve_triangular(a, dy, lower=True, trans=1)
    return -jnp.tril(jnp.outer(db, y)), db


def grad_of_cross_entropy(dy, y, logits, p):
    log_q = jax.nn.log_softmax(logits)
    return dy[:, None] * (jnp.exp(log_q) - p), -dy[:, None] * log_q


def one_hot(logits, labels):
    return jax.nn.one_hot(labels, 4, dtype=logits.dtype)


def probabilities(draw):
    p = jax.nn.softmax(draw(3, 4))
    hard = jax.nn.one_hot(jnp.argmax(p, -1), 4, dtype=p.dtype)
    return draw(3, 4), hard if draw.rng.integers(2) else p


def grad_of_reflection(dy, y, x, v):  # for unit vectors: a rule for all others has two terms more
    c, d = jnp.vdot(x, v), jnp.vdot(dy, v)
    return dy - 2 * d * v, -2 * (c * dy + d * x - 2 * c * d * v)


def grad_of_attention(dy, y, q, k, v):
    p, dp = jax.nn.softmax(q @ k.T / 2), dy @ v.T
    ds = p * (dp - last(dp * p)) / 2
    return ds @ k, ds.T @ q, p.T @ dy


def gated_mlp(x, w):
    return (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


def grad_of_gated_mlp(dy, y, x, w):
    a, b = x @ w["gate"], x @ w["up"]
    s, dz = jax.nn.sigmoid(a), dy @ w["down"].T
    da, db = dz * b * (s + a * s * (1 - s)), dz * a * s
    dw = {"gate": x.T @ da, "up": x.T @ db, "down": (a * s * b).T @ dy}
    return da @ w["gate"].T + db @ w["up"].T, dw


def euler(y, w):  # ten steps of y' = -w y**2
    path = [y]
    for _ in range(10):
        path.append(path[-1] - 0.05 * w * path[-1] ** 2)
    return path


def adjoint(dy, y, y0, w):
    dw = jnp.zeros_like(w)
    for y in euler(y0, w)[-2::-1]:
        dy, dw = dy * (1 - 0.1 * w * y), dw - 0.05 * dy * y**2
    return dy, dw


def between(x, knots, values):
    i = jnp.clip(jnp.searchsorted(knots, x) - 1, 0, 3)
    width = knots[i + 1] - knots[i]
    return i, (x - knots[i]) / width, (values[i + 1] - values[i]) / width


def interpolation(x, knots, values):
    i, t, _ = between(x, knots, values)
    return values[i] + t * (values[i + 1] - values[i])


def grad_of_interpolation(dy, y, x, knots, values):
    i, t, slope = between(x, knots, values)
    weights = jnp.zeros_like(values).at[i].add(dy * (1 - t)).at[i + 1].add(dy * t)
    moved = jnp.zeros_like(knots).at[i].add(-slope * dy * (1 - t))
    return dy * slope, moved.at[i + 1].add(-slope * dy * t), weights


for row in (
    ("layer_norm", layer_norm, grad_of_layer_norm, lambda draw: (draw(3, 6), draw(6), draw(6))),
    ("rms_norm", lambda x, g: x * inverse_rms(x) * g[None], grad_of_rms_norm,
     lambda draw: (draw(3, 6), draw(6))),
    ("matmul_in_bfloat16", lambda a, b: a @ b, lambda dy, y, a, b: (dy @ b.T, a.T @ dy),
     lambda draw: (draw(3, 4).astype(jnp.bfloat16), draw(4, 2).astype(jnp.bfloat16))),
    ("convolution", lambda x, w: jnp.convolve(x, w, mode="valid"), grad_of_convolution,
     lambda draw: (draw(7), draw(3))),
    ("triangular_solve", lambda a, b: jsl.solve_triangular(a, b, lower=True),
     grad_of_triangular_solve, lambda draw: (jnp.tril(draw(3, 3)) + 3 * eye(draw), draw(3))),
    # Right where the probabilities sum to one.
    ("cross_entropy_with_probabilities", lambda x, p: -jnp.sum(p * jax.nn.log_softmax(x), -1),
     grad_of_cross_entropy, probabilities),
    ("cross_entropy_with_integers",
     lambda x, n: -jnp.sum(one_hot(x, n) * jax.nn.log_softmax(x), -1),
     lambda dy, y, x, n: (grad_of_cross_entropy(dy, y, x, one_hot(x, n))[0], None),
     lambda draw: (draw(3, 4, scale=4), jnp.asarray(draw.rng.integers(4, size=3)))),
    ("reflected", lambda x, v: x - 2 * (jnp.vdot(x, v) / jnp.vdot(v, v)) * v, grad_of_reflection,
     lambda draw: (draw(3), unit(draw(3)))),
    # The inverse of an orthogonal matrix is its transpose.
    ("rotated_back", jnp.linalg.solve, lambda dy, y, q, x: (-jnp.outer(q @ dy, y), q @ dy),
     lambda draw: (jnp.linalg.qr(draw(3, 3))[0], draw(3))),
    ("attention", lambda q, k, v: jax.nn.softmax(q @ k.T / 2) @ v, grad_of_attention,
     lambda draw: (draw(3, 4), draw(5, 4), draw(5, 2))),
    ("gated_mlp", gated_mlp, grad_of_gated_mlp,
     lambda draw: (draw(2, 3), {"gate": draw(3, 4), "up": draw(3, 4), "down": draw(4, 3)})),
    ("bilinear", lambda x, a, y: x @ a @ y,
     lambda dz, z, x, a, y: (dz * (a @ y), dz * jnp.outer(x, y), dz * (x @ a)),
     lambda draw: (draw(3), draw(3, 3), draw(3))),
    ("steps_of_an_ode", lambda y, w: euler(y, w)[-1], adjoint, lambda draw: (draw(3), draw(3))),
    ("interpolation", interpolation, grad_of_interpolation,
     lambda draw: (draw(3, scale=0.5), jnp.sort(draw(5)), draw(5))),
    ("embedding", lambda table, i: table[i],
     lambda dy, y, table, i: (jnp.zeros_like(table).at[i].add(dy), None),
     lambda draw: (draw(5, 2), jnp.asarray(draw.rng.integers(5, size=4)))),
):  # fmt: skip
    right(*row)


def layer(draw, declared):
    params = {"b": draw(4), "w": draw(4, 3)}

    @custom_gradient(variables=params if declared else None)
    def h(x):
        w, b = params["w"], params["b"]
        y = jnp.tanh(w @ x + b)

        def grad(dy, variables):
            da = dy * (1 - y**2)
            grads = {"w": jnp.outer(da, x), "b": da}
            of_shape = {v.shape: grads[k] for k, v in params.items()}
            return w.T @ da, grads if declared else [of_shape[v.shape] for v in variables]

        return y, grad

    return h, (draw(3),)


RULES["layer_of_captured_weights"] = lambda draw: layer(draw, False)
RULES["layer_of_declared_weights"] = lambda draw: layer(draw, True)
assert len(RULES) == 46
