"""Rules to check: each a function, its rule `grad(dy, y, *xs)` and a point."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tfgrad_jax import custom_gradient

X = jnp.asarray([0.5, -1.2, 2.0], jnp.float32)
NEAR = "right at your point, wrong at points[1]: "
ONES, MATRIX = jnp.ones(3), 4 * jnp.eye(3) + jnp.arange(9.0).reshape(3, 3)
COMPLEX = jax.lax.complex(X, X[::-1])
STOP = jax.lax.stop_gradient


class Row(NamedTuple):
    name: str
    f: Any
    grad: Any
    args: tuple[Any, ...]
    says: str = ""  # the notes on its rows, or what a fact says
    options: dict[str, Any] = {}  # noqa: RUF012  # nothing changes it

    def decorated(self):
        return rule(self.f, self.grad)


def rule(f, grad, **options):
    @custom_gradient(**options)
    def h(*xs):
        y = f(*xs)
        return y, lambda *dys: grad(*dys, y, *xs)

    return h


def last(x):
    return jnp.sum(x, -1, keepdims=True)


def cube(a):
    return a @ a @ a


def called(f):
    """Return a callback, whose derivative JAX does not know."""
    return lambda x: jax.pure_callback(lambda x: f(x).astype(x.dtype), x, STOP(x))


SECOND = {"order": 2}
ROWS = jnp.asarray([[0.5, -1.0, 2.0], [1.5, 0.2, -0.3]])

WRONG = [
    Row("none", jnp.sin, lambda dy, y, x: None, (X,), "declared is zero"),
    Row("sign", jnp.cos, lambda dy, y, x: dy * jnp.sin(x), (X,),
        "wrong sign: declared = -1 * expected"),
    Row("straight through", jnp.round, lambda dy, y, x: dy, (X,), "expected is zero"),
    Row("transpose", cube, lambda dy, y, a: jax.vjp(cube, a)[1](dy)[0].T, (MATRIX,),
        "declared = transpose of expected"),
    Row("conjugate", lambda z: z**3, lambda dy, y, z: dy * 3 * z**2, (COMPLEX,),
        "declared = conjugate of expected"),
    Row("swapped product", jnp.multiply, lambda dz, z, x, y: (dz * x, dz * y), (ONES, ONES),
        NEAR + "swapped with `xs[1]`?|" + NEAR + "swapped with `xs[0]`?"),
    Row("missing transposes", jnp.matmul, lambda dy, y, a, b: (dy @ b, a @ dy),
        (jnp.ones((3, 3)),) * 2, NEAR + "missing transpose of `xs[1]`?|" + NEAR
        + "missing transpose of `xs[0]`?"),
    Row("a power, at ones", lambda x: x**3, lambda dy, y, x: dy * 3 * x, (ONES,),
        NEAR + "relative error "),
    Row("one wrong entry", jnp.sin, lambda dy, y, x: (dy * jnp.cos(x)).at[617].multiply(1.01),
        (jnp.linspace(0.1, 2, 1000),), "relative error "),
    Row("a part in a thousand", jnp.sin, lambda dy, y, x: 1.001 * dy * jnp.cos(x), (X,),
        "relative error 0.001, cosine 1.000"),
    Row("a callback, one point right", called(lambda x: np.asarray(x) ** 3),
        lambda dy, y, x: 3 * x * dy, (ONES,), NEAR + "relative error "),
    Row("a Python number", lambda x, n: x * n, lambda dy, y, x, n: (dy * n, dy * n), (2.0, 3.0),
        "|relative error "),
    Row("not finite", jnp.log, lambda dy, y, x: dy / x, (jnp.asarray([0.0, 1.0]),),
        "not finite for xs[0]: `jax.debug_nans` shows where"),
    Row("no factor dy", jnp.square, lambda dy, y, x: 2 * x, (X,),
        "grad(0) is not 0; did you forget to multiply by dy, or add a constant?"),
    Row("clipped far out", lambda x: x, lambda dy, y, x: jnp.clip(dy, -5, 5), (X,),
        "grad(c (dy1 + 2 dy2)) is not c (grad(dy1) + 2 grad(dy2)), for a large c. If"),
    Row("a wrong shape", jnp.sin, lambda dy, y, x: jnp.zeros(7), (X,),
        "of type float32[7] for the input `xs[0]`"),
    Row("x stopped", jnp.square, lambda dy, y, x: dy * 2 * STOP(x), (X,),
        "|declared is zero|", SECOND),
    Row("dy stopped", lambda x: 3 * x, lambda dy, y, x: 3 * STOP(dy), (X,),
        "||declared is zero", SECOND),
    Row("its output stopped", called(np.tanh), lambda dy, y, x: dy * (1 - STOP(y) ** 2), (X,),
        "|declared is zero|", SECOND),
]  # fmt: skip

SYMMETRIC, AT_POINT = MATRIX @ MATRIX.T, {"near": 0}  # rules that hold for such arrays alone

RIGHT = [
    Row("a complex square", jnp.square, lambda dy, y, z: dy * jnp.conj(2 * z), (COMPLEX,)),
    Row("softmax", jax.nn.softmax, lambda dy, y, x: y * (dy - last(dy * y)), (3 * ROWS,)),
    Row("huber, with kinks nearby", lambda x: jnp.where(abs(x) < 1, x**2 / 2, abs(x) - 0.5),
        lambda dy, y, x: dy * jnp.clip(x, -1, 1), (jnp.asarray([1.0, 1.0003, 0.999]),)),
    Row("log determinant of a symmetric one", lambda x: jnp.linalg.slogdet(x)[1],
        lambda dy, y, x: dy * jnp.linalg.inv(x), (SYMMETRIC,), "", AT_POINT),
    Row("a number and an integer", lambda x, n: x**n, lambda dy, y, x, n: dy * n * x ** (n - 1),
        (1.3, 3)),
    Row("two outputs", lambda x: (x**3, jnp.sum(x)),
        lambda d1, d2, y, x: d1 * 3 * x**2 + jnp.full_like(x, d2), (X,), "", SECOND),
    Row("a callback and its output", called(np.tanh), lambda dy, y, x: dy * (1 - y**2), (X,), "",
        SECOND),
    Row("a value in bfloat16", lambda x: (3 * x).astype("bfloat16"),
        lambda dy, y, x: 3 * dy.astype(x.dtype), (X,)),
    Row("a branch on values", lambda x: x * 3 if x > 0 else x,
        lambda dy, y, x: dy * 3 if x > 0 else dy, (2.0,)),
]  # fmt: skip
