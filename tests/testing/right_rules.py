"""Right rules as the literature has them, each with a random point: none may be blamed.

Each builds a function and its arguments from `draw`, random arrays of a seed. Some are hard for a
checker: kinks and edges of a domain nearby, large magnitudes, low precision, integers beside, and
rules that hold only where an argument is a probability, symmetric, sorted, or a unit vector.
"""

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl

from tfgrad_jax import custom_gradient

RULES = {}


def right(build):
    RULES[build.__name__] = build
    return build


def rule(f, grad):
    """Decorate `f`, of one argument, whose gradient is `grad(x, y, dy)`."""

    @custom_gradient
    def h(x):
        y = f(x)
        return y, lambda dy: grad(x, y, dy)

    return h


@right
def log1pexp(draw):
    return rule(jax.nn.softplus, lambda x, y, dy: dy * (1 - 1 / (1 + jnp.exp(x)))), (draw(4),)


@right
def softplus_of_large_numbers(draw):
    h = rule(jax.nn.softplus, lambda x, y, dy: dy * jax.nn.sigmoid(x))
    return h, (draw(6, scale=100),)


@right
def logsumexp(draw):
    f = lambda x: jax.nn.logsumexp(x, axis=-1)  # noqa: E731
    return rule(f, lambda x, y, dy: dy[:, None] * jnp.exp(x - y[:, None])), (draw(3, 5, scale=5),)


@right
def softmax(draw):
    def grad(x, y, dy):
        return y * (dy - jnp.sum(dy * y, -1, keepdims=True))

    return rule(jax.nn.softmax, grad), (draw(2, 5, scale=3),)


@right
def layer_norm(draw):
    @custom_gradient
    def h(x, g, b):
        d = x - jnp.mean(x, -1, keepdims=True)
        r = jax.lax.rsqrt(jnp.mean(d * d, -1, keepdims=True) + 1e-5)
        n = d * r

        def grad(dy):
            dn = dy * g[None]
            dx = dn - jnp.mean(dn, -1, keepdims=True) - n * jnp.mean(dn * n, -1, keepdims=True)
            return r * dx, jnp.sum(dy * n, 0), jnp.sum(dy, 0)

        return n * g[None] + b[None], grad

    return h, (draw(3, 6), draw(6), draw(6))


@right
def rms_norm(draw):
    @custom_gradient
    def h(x, g):
        r = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

        def grad(dy):
            dn = dy * g[None]
            dx = r * (dn - x * r**2 * jnp.mean(dn * x, -1, keepdims=True))
            return dx, jnp.sum(dy * x * r, 0)

        return x * r * g[None], grad

    return h, (draw(3, 6), draw(6))


@right
def gelu(draw):
    cdf, density = jax.scipy.stats.norm.cdf, jax.scipy.stats.norm.pdf
    return rule(lambda x: x * cdf(x), lambda x, y, dy: dy * (cdf(x) + x * density(x))), (draw(6),)


@right
def matmul_in_bfloat16(draw):
    @custom_gradient
    def h(a, b):
        return a @ b, lambda dy: (dy @ b.T, a.T @ dy)

    return h, (draw(3, 4).astype(jnp.bfloat16), draw(4, 2).astype(jnp.bfloat16))


@right
def silu_in_float16(draw):
    def grad(x, y, dy):
        s = jax.nn.sigmoid(x)
        return dy * (s + y * (1 - s))

    return rule(jax.nn.silu, grad), (draw(5).astype(jnp.float16),)


@right
def convolution(draw):
    @custom_gradient
    def h(x, w):
        y = jnp.convolve(x, w, mode="valid")
        return y, lambda dy: (
            jnp.convolve(dy, w[::-1], mode="full"),
            jnp.convolve(x[::-1], dy, mode="valid"),
        )

    return h, (draw(7), draw(3))


@right
def triangular_solve(draw):
    @custom_gradient
    def h(a, b):
        x = jsl.solve_triangular(a, b, lower=True)

        def grad(dy):
            db = jsl.solve_triangular(a, dy, lower=True, trans=1)
            return -jnp.tril(jnp.outer(db, x)), db

        return x, grad

    return h, (jnp.tril(draw(3, 3)) + 3 * jnp.eye(3, dtype=draw.dtype), draw(3))


@right
def cholesky(draw):
    def grad(x, y, dy):
        m = jnp.tril(y.T @ dy)
        m = m - jnp.diag(jnp.diag(m)) / 2
        s = jnp.linalg.solve(y.T, jnp.linalg.solve(y.T, m.T).T)
        return (s + s.T) / 2

    a = draw(3, 3)
    return rule(jnp.linalg.cholesky, grad), (a @ a.T + jnp.eye(3, dtype=draw.dtype),)


@right
def log_determinant_of_symmetric(draw):
    # `inv(x)`, not its transpose: right for symmetric matrices alone.
    h = rule(lambda x: jnp.linalg.slogdet(x)[1], lambda x, y, dy: dy * jnp.linalg.inv(x))
    a = draw(3, 3)
    return h, (a @ a.T + jnp.eye(3, dtype=draw.dtype),)


@right
def implicit_root(draw):
    # y + y**3 = x
    def root(x):
        y = jnp.zeros_like(x)
        for _ in range(40):
            y = y - (y + y**3 - x) / (1 + 3 * y**2)
        return y

    return rule(root, lambda x, y, dy: dy / (1 + 3 * y**2)), (draw(4),)


@right
def cross_entropy_with_probabilities(draw):
    # Right where the probabilities sum to one.
    @custom_gradient
    def h(logits, p):
        log_q = jax.nn.log_softmax(logits)

        def grad(dy):
            return dy[:, None] * (jnp.exp(log_q) - p), -dy[:, None] * log_q

        return -jnp.sum(p * log_q, -1), grad

    p = jax.nn.softmax(draw(3, 4))
    hard = jax.nn.one_hot(jnp.argmax(p, -1), 4, dtype=p.dtype)
    return h, (draw(3, 4), hard if draw.rng.integers(2) else p)


@right
def cross_entropy_with_integers(draw):
    @custom_gradient
    def h(logits, labels):
        log_q = jax.nn.log_softmax(logits)
        one_hot = jax.nn.one_hot(labels, 4, dtype=logits.dtype)
        y = -jnp.sum(one_hot * log_q, -1)
        return y, lambda dy: (dy[:, None] * (jnp.exp(log_q) - one_hot), None)

    return h, (draw(3, 4, scale=4), jnp.asarray(draw.rng.integers(4, size=3)))


@right
def huber_with_kinks_nearby(draw):
    f = lambda x: jnp.where(abs(x) < 1, x**2 / 2, abs(x) - 0.5)  # noqa: E731
    x = 1 + draw(6, scale=1e-3)
    return rule(f, lambda x, y, dy: dy * jnp.clip(x, -1, 1)), (x.at[0].set(1.0),)


@right
def relu_with_a_kink_nearby(draw):
    h = rule(jax.nn.relu, lambda x, y, dy: jnp.where(x > 0, dy, 0))
    return h, (jnp.append(draw(4), draw(2, scale=1e-4)),)


@right
def smooth_max(draw):
    def f(x):
        return jnp.sum(x * jax.nn.softmax(2 * x))

    return rule(f, lambda x, y, dy: dy * jax.nn.softmax(2 * x) * (1 + 2 * (x - y))), (draw(5),)


@right
def norm(draw):
    return rule(jnp.linalg.norm, lambda x, y, dy: dy * x / y), (draw(4, scale=1e4),)


@right
def normalized(draw):
    def grad(x, y, dy):
        return (dy - y * jnp.vdot(y, dy)) / jnp.linalg.norm(x)

    return rule(lambda x: x / jnp.linalg.norm(x), grad), (draw(3),)


@right
def reflected(draw):
    # Written for unit vectors `v`: a rule for all others has two terms more.
    @custom_gradient
    def h(x, v):
        c = jnp.vdot(x, v) / jnp.vdot(v, v)

        def grad(dy):
            d = jnp.vdot(dy, v)
            return dy - 2 * d * v, -2 * (c * dy + d * x - 2 * c * d * v)

        return x - 2 * c * v, grad

    v = draw(3)
    return h, (draw(3), v / jnp.linalg.norm(v))


@right
def rotated_back(draw):
    # The inverse of an orthogonal matrix is its transpose.
    @custom_gradient
    def h(q, x):
        y = jnp.linalg.solve(q, x)
        return y, lambda dy: (-jnp.outer(q @ dy, y), q @ dy)

    return h, (jnp.linalg.qr(draw(3, 3))[0], draw(3))


@right
def safe_square_root(draw):
    def f(x):
        return jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), 0)

    def grad(x, y, dy):
        return jnp.where(x > 0, dy / (2 * jnp.where(x > 0, y, 1)), 0)

    x = draw(5)
    return rule(f, grad), (jnp.where(x > 0, x, x - 0.1),)


@right
def square_root_near_zero(draw):
    return rule(jnp.sqrt, lambda x, y, dy: dy / (2 * y)), (jnp.exp(draw(4) - 8),)


@right
def logarithm_near_zero(draw):
    return rule(jnp.log, lambda x, y, dy: dy / x), (jnp.exp(3 * draw(4) - 6),)


@right
def arcsine_near_its_edge(draw):
    x = 1 - jnp.exp(draw(3) - 4)
    return rule(jnp.arcsin, lambda x, y, dy: dy / jnp.sqrt((1 - x) * (1 + x))), (x,)


@right
def cumulative_sum(draw):
    return rule(jnp.cumsum, lambda x, y, dy: jnp.cumsum(dy[::-1])[::-1]), (draw(6),)


@right
def cumulative_product(draw):
    h = rule(jnp.cumprod, lambda x, y, dy: jnp.cumsum((dy * y)[::-1])[::-1] / x)
    return h, (jnp.exp(draw(5, scale=0.5)),)


@right
def complex_conjugate(draw):
    return rule(jnp.conj, lambda z, y, dy: jnp.conj(dy)), (draw.complex(4),)


@right
def complex_modulus(draw):
    def grad(z, y, dy):
        return jax.lax.complex(dy / y, jnp.zeros_like(y)) * z

    return rule(jnp.abs, grad), (draw.complex(4),)


@right
def fourier_transform(draw):
    return rule(jnp.fft.fft, lambda z, y, dy: 6 * jnp.fft.ifft(dy)), (draw.complex(6),)


@right
def attention(draw):
    @custom_gradient
    def h(q, k, v):
        p = jax.nn.softmax(q @ k.T / 2)

        def grad(dy):
            dp = dy @ v.T
            ds = p * (dp - jnp.sum(dp * p, -1, keepdims=True)) / 2
            return ds @ k, ds.T @ q, p.T @ dy

        return p @ v, grad

    return h, (draw(3, 4), draw(5, 4), draw(5, 2))


@right
def gated_mlp(draw):
    @custom_gradient
    def h(x, w):
        a, b = x @ w["gate"], x @ w["up"]
        s = jax.nn.sigmoid(a)

        def grad(dy):
            dz = dy @ w["down"].T
            da, db = dz * b * (s + a * s * (1 - s)), dz * a * s
            dw = {"gate": x.T @ da, "up": x.T @ db, "down": (a * s * b).T @ dy}
            return da @ w["gate"].T + db @ w["up"].T, dw

        return (a * s * b) @ w["down"], grad

    return h, (draw(2, 3), {"gate": draw(3, 4), "up": draw(3, 4), "down": draw(4, 3)})


@right
def bilinear(draw):
    @custom_gradient
    def h(x, a, y):
        return x @ a @ y, lambda dy: (dy * (a @ y), dy * jnp.outer(x, y), dy * (x @ a))

    return h, (draw(3), draw(3, 3), draw(3))


@right
def matrix_exponential(draw):
    def grad(x, y, dy):
        zero = jnp.zeros_like(x)
        return jsl.expm(jnp.block([[x.T, dy], [zero, x.T]]))[:3, 3:]

    return rule(jsl.expm, grad), (draw(3, 3, scale=0.5),)


@right
def inverse(draw):
    h = rule(jnp.linalg.inv, lambda x, y, dy: -y.T @ dy @ y.T)
    return h, (draw(3, 3, scale=0.2) + 2 * jnp.eye(3, dtype=draw.dtype),)


@right
def steps_of_an_ode(draw):
    # Ten Euler steps of y' = -w y**2; the adjoint runs them backward.
    @custom_gradient
    def h(y, w):
        path = [y]
        for _ in range(10):
            path.append(path[-1] - 0.05 * w * path[-1] ** 2)

        def grad(dy):
            dw = jnp.zeros_like(w)
            for y in path[-2::-1]:
                dy, dw = dy * (1 - 0.1 * w * y), dw - 0.05 * dy * y**2
            return dy, dw

        return path[-1], grad

    return h, (draw(3), draw(3))


@right
def sort(draw):
    return rule(jnp.sort, lambda x, y, dy: dy[jnp.argsort(jnp.argsort(x))]), (draw(6),)


@right
def maximum_of_a_window(draw):
    def grad(x, y, dy):
        hit = x.reshape(3, 2) == y[:, None]
        return jnp.where(hit, dy[:, None], 0).reshape(-1)

    return rule(lambda x: jnp.max(x.reshape(3, 2), -1), grad), (draw(6),)


@right
def interpolation(draw):
    # In the values at sorted knots, and in the point.
    @custom_gradient
    def h(x, knots, values):
        i = jnp.clip(jnp.searchsorted(knots, x) - 1, 0, 3)
        width = knots[i + 1] - knots[i]
        t = (x - knots[i]) / width
        slope = (values[i + 1] - values[i]) / width

        def grad(dy):
            weights = jnp.zeros_like(values).at[i].add(dy * (1 - t)).at[i + 1].add(dy * t)
            moved = jnp.zeros_like(knots).at[i].add(-slope * dy * (1 - t))
            return dy * slope, moved.at[i + 1].add(-slope * dy * t), weights

        return values[i] + t * (values[i + 1] - values[i]), grad

    return h, (draw(3, scale=0.5), jnp.sort(draw(5)), draw(5))


@right
def embedding(draw):
    @custom_gradient
    def h(table, index):
        return table[index], lambda dy: (jnp.zeros_like(table).at[index].add(dy), None)

    return h, (draw(5, 2), jnp.asarray(draw.rng.integers(5, size=4)))


@right
def log_cosh_of_large_numbers(draw):
    f = lambda x: abs(x) + jnp.log1p(jnp.exp(-2 * abs(x))) - jnp.log(2.0).astype(x.dtype)  # noqa: E731
    return rule(f, lambda x, y, dy: dy * jnp.tanh(x)), (draw(5, scale=50),)


@right
def layer_of_captured_weights(draw):
    w, b = draw(4, 3), draw(4)

    @custom_gradient
    def h(x):
        y = jnp.tanh(w @ x + b)

        def grad(dy, variables):
            da = dy * (1 - y**2)
            return w.T @ da, [jnp.outer(da, x), da]

        return y, grad

    return h, (draw(3),)


@right
def layer_of_declared_weights(draw):
    params = {"w": draw(4, 3), "b": draw(4)}

    @custom_gradient(variables=params)
    def h(x):
        y = jnp.tanh(params["w"] @ x + params["b"])

        def grad(dy, variables):
            da = dy * (1 - y**2)
            return variables["w"].T @ da, {"w": jnp.outer(da, x), "b": da}

        return y, grad

    return h, (draw(3),)


@right
def kernel_with_a_primal(draw):
    @custom_gradient(primal=jnp.tanh)
    def h(x):
        y = 1 - 2 / (1 + jnp.exp(2 * x))
        return y, lambda dy: dy * (1 - y**2)

    return h, (draw(4),)
