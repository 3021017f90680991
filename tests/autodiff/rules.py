"""Rules that are linear, by what they are made of, and rules that are not, with what is in the way.

`LINEAR` holds every operation that JAX can transpose, alone or beside a constant, loops, solvers,
and what was once taken for something else. For each of `NOT_LINEAR` a regular expression says which
operation forward mode must name. `test_rules.py` runs both.
"""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental import sparse
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.scipy.sparse.linalg import bicgstab, cg

from tfgrad_jax import custom_gradient

N = 4
X = jnp.float32([0.5, -1.0, 2.0, 0.25])
MASK, INDEX = X > 0, jnp.int32([2, 0, 2])
OPERATOR = np.float32(np.random.default_rng(0).standard_normal((N, N)) + 4 * np.eye(N))
MATRIX = jnp.asarray(OPERATOR)
SPARSE = {
    kind.__name__: kind.fromdense(MATRIX)
    for kind in (sparse.BCOO, sparse.BCSR, sparse.CSR, sparse.COO)
}
BCOO, BCSR, CSR, COO = SPARSE.values()
ZEROS, ONES = jnp.zeros(N), jnp.ones(N)


def scanned(body):
    """Return the rule that applies `body(carry, x)` along `X`, beginning with the upstream."""
    return lambda dy: lax.scan(lambda c, x: (body(c, x), jnp.sum(c)), dy, X)


def transpose_of(f, count=1):
    """Return JAX's own pullback of a function at `X`, for `count` copies of the upstream."""
    return lambda dy: jax.vjp(f, X)[1](jnp.concatenate([dy] * count).reshape(f(X).shape))[0]


@jax.custom_jvp
def bent(x):
    return jnp.abs(x)


bent.defjvp(lambda primals, tangents: (bent(*primals), 7 * tangents[0]))


@jax.custom_batching.custom_vmap
def mapped_by_hand(x):
    return X * x


mapped_by_hand.def_vmap(lambda size, mapped, x: (X * x, mapped[0]))


@custom_gradient
def rounded(x):
    return jnp.round(x), lambda dy: dy


@custom_gradient
def tripled(x):
    return 3 * x, lambda dy: 3 * dy


def refilled(dy):
    """Fill a Ref that the rule makes: in part, in all, and by adding to it."""
    ref = jax.new_ref(ZEROS)
    ref[1:] += 3 * dy[:-1]
    old = jax.ref.swap(ref, (...,), 5 * dy)
    ref[0] += 7 * dy[1]
    return X * old + ref[...]


def kept_in_a_ref():
    ref = jax.new_ref(ZEROS)
    ref[...] = 2 * X
    return ref[...]


def called_back(f, dy):
    return jax.pure_callback(f, jax.ShapeDtypeStruct(dy.shape, dy.dtype), dy)


def by_callback(matrix, x):
    return jax.pure_callback(lambda x: matrix @ np.asarray(x), x, x, vmap_method="sequential")


def by_kernel(matrix, x):
    def kernel(m, x, y):
        y[...] = m[...] @ x[...]

    return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(matrix, x)


def by_loop(matrix, x):
    """Fill the product row by row, in a `while_loop`, which JAX cannot transpose."""
    step = lambda c: (c[0] + 1, c[1].at[c[0]].set(jnp.asarray(matrix)[c[0]] @ x))  # noqa: E731
    return lax.while_loop(lambda c: c[0] < N, step, (0, 0 * x))[1]


foreign_p = Primitive("foreign")  # of another library, without a derivative
foreign_p.def_impl(lambda matrix, x: matrix @ x)
foreign_p.def_abstract_eval(lambda matrix, x: x)
mlir.register_lowering(foreign_p, mlir.lower_fun(jnp.matmul, multiple_results=False))
batching.primitive_batchers[foreign_p] = lambda args, dims: (
    jnp.moveaxis(args[1], dims[1], 0) @ args[0].T,
    0,
)
# What applies a matrix in code that JAX cannot look into.
OPAQUE = {"callback": by_callback, "kernel": by_kernel, "primitive": foreign_p.bind}
OPAQUE["loop"] = by_loop


def pair(apply):
    """Return an operator with a wrong factor in its rule, and the pair that the rule is made of.

    `stop_gradient` is for the second order: JAX differentiates the value then, too.
    """

    @custom_gradient
    def forward(x):
        return 7 * apply(OPERATOR, lax.stop_gradient(x)), lambda dy: adjoint(dy)

    @custom_gradient
    def adjoint(y):
        return 7 * apply(OPERATOR.T, lax.stop_gradient(y)), lambda dx: forward(dx)

    h = custom_gradient(lambda x: (apply(OPERATOR, lax.stop_gradient(x)), adjoint))
    return h, forward, adjoint


ADJOINTS = {kind: pair(apply)[2] for kind, apply in OPAQUE.items()}


def opaque(value, rule):
    """Return a function of this value and rule, opaque to JAX."""

    @custom_gradient
    def inner(y):
        shown = lax.stop_gradient(y)
        return jax.pure_callback(value, y, shown, vmap_method="sequential"), lambda d: rule(y, d)

    return inner


def _pool(x, start, f):
    return lax.reduce_window(x, start, f, (2,), (1,), "SAME")


def on_a_device(f):
    """Return the function on each device of a mesh, which has one."""
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)


def outer(dy):
    return jnp.outer(dy, X)


def entries(dy):
    return outer(dy).ravel()


# Sparse matrices whose entries are the upstream times a constant.
ENTRIES = {
    "BCOO": lambda dy: sparse.BCOO((entries(dy), BCOO.indices), shape=(N, N)),
    "BCSR": lambda dy: sparse.BCSR((entries(dy), BCSR.indices, BCSR.indptr), shape=(N, N)),
    "CSR": lambda dy: sparse.CSR((entries(dy), CSR.indices, CSR.indptr), shape=(N, N)),
    "COO": lambda dy: sparse.COO((entries(dy), COO.row, COO.col), shape=(N, N)),
}


LINEAR = {
    "identity": lambda dy: dy,
    "neg": lambda dy: -dy,
    "mul": lambda dy: X * dy * 2.0,
    "div": lambda dy: dy / X,
    "sub": lambda dy: dy - 3 * dy[::-1],
    "add": lambda dy: dy + 3 * dy[::-1],
    "where": lambda dy: jnp.where(MASK, dy, 0),
    "concatenate": lambda dy: jnp.concatenate([jnp.zeros(2), dy, dy[:1]]),
    "squeeze": lambda dy: lax.squeeze(lax.expand_dims(dy, [0]), [0]),
    "copy": lambda dy: jnp.copy(dy),
    "split": lambda dy: lax.split(dy, (1, 3)),
    "split of zeros": lambda dy: lax.split(ZEROS, (2, 2))[0] + dy[:2],
    "pad": lambda dy: jnp.pad(dy, (1, 2)),
    "stack": lambda dy: jnp.stack([dy, ZEROS, 2 * dy]),
    "unstack": lambda dy: jnp.unstack(jnp.outer(X, dy)),
    "broadcast": lambda dy: jnp.broadcast_to(dy[:, None], (N, 3)),
    "cumsum": lambda dy: jnp.cumsum(dy[::-1])[::-1],
    "roll": lambda dy: jnp.roll(dy, 1),
    "roll in scan": scanned(lambda c, x: x * jnp.roll(c, 1)),
    "gather": lambda dy: dy[INDEX],
    "dynamic slice": lambda dy: lax.dynamic_slice(dy, (jnp.argmax(X),), (2,)),
    "dynamic update": lambda dy: lax.dynamic_update_slice(dy, 2 * dy[:2], (1,)),
    "scatter-add": lambda dy: ZEROS.at[INDEX].add(dy[:3]),
    "scatter-sub from itself": lambda dy: dy.at[INDEX].subtract(dy[:3]),
    "scatter-mul": lambda dy: dy.at[jnp.int32([2, 0])].mul(X[:2], unique_indices=True),
    "scatter": lambda dy: ZEROS.at[jnp.int32([3, 1])].set(dy[:2]),
    "scatter into itself": lambda dy: dy.at[INDEX[:2]].set(2 * dy[:2], unique_indices=True),
    "dot": lambda dy: MATRIX @ dy,
    "ragged dot": lambda dy: lax.ragged_dot(jnp.outer(X, dy), MATRIX[None], jnp.int32([N])),
    "ragged dot from the right": lambda dy: lax.ragged_dot(
        MATRIX, jnp.outer(X, dy)[None], jnp.int32([N])
    ),
    "convolution": lambda dy: jnp.convolve(dy, X, mode="same"),
    "convolution from the right": lambda dy: jnp.convolve(X[:3], dy, mode="same"),
    "solve": lambda dy: jnp.linalg.solve(MATRIX.T, dy),
    "triangular solve": lambda dy: lax.linalg.triangular_solve(
        jnp.tril(MATRIX), dy[:, None], left_side=True, lower=True
    ),
    "tridiagonal solve": lambda dy: lax.linalg.tridiagonal_solve(
        ONES.at[0].set(0), 5 * ONES, ONES.at[-1].set(0), dy[:, None]
    ),
    "custom linear solve": lambda dy: lax.custom_linear_solve(
        lambda v: MATRIX @ v,
        dy,
        lambda _, b: jnp.linalg.inv(MATRIX) @ b,
        lambda _, b: jnp.linalg.inv(MATRIX.T) @ b,
    ),
    "fft": lambda dy: jnp.fft.rfft(dy).real,
    "complex": lambda dy: jnp.imag(jnp.conj(lax.complex(dy, X * dy))),
    "complex with a zero": lambda dy: jnp.real(lax.complex(dy, ZEROS) * lax.complex(X, X)),
    "of another precision": lambda dy: (dy.astype(jnp.float16) * 2).astype(jnp.float32),
    "reduce_precision": lambda dy: lax.reduce_precision(dy, 8, 23),
    "reduce_window": lambda dy: _pool(dy, 0.0, lax.add),
    "transpose of max pooling": transpose_of(lambda x: _pool(x, -jnp.inf, lax.max)),
    "derivative of max pooling": lambda dy: jax.jvp(
        lambda x: _pool(x, -jnp.inf, lax.max), (X,), (dy,)
    )[1],
    "optimization barrier": lambda dy: sum(lax.optimization_barrier((dy, ZEROS, 2 * dy))),
    "jit": lambda dy: jax.jit(lambda dy, x: dy * x)(dy, X),
    "checkpoint": lambda dy: jax.checkpoint(lambda dy: jnp.sin(X) * dy)(dy),
    "linear_call": lambda dy: jax.custom_derivatives.linear_call(
        lambda x, d: x * d, lambda x, t: x * t, X, dy
    ),
    "cond": lambda dy: lax.cond(X[0] > 0, lambda dy: 3 * dy, lambda dy: ZEROS, dy),
    "scan": scanned(lambda c, x: c * x + c[::-1]),
    "while of a constant": lambda dy: lax.while_loop(lambda c: c[0] < 9, lambda c: 2 * c, X) * dy,
    "fori_loop": lambda dy: lax.fori_loop(0, 3, lambda i, c: c * X[i], dy),
    "constant custom_jvp": lambda dy: bent(X) * dy,
    "constant callback": lambda dy: called_back(lambda x: np.float32(3) * x, X) * dy,
    "of a decorated function": lambda dy: X * tripled(dy),
    "of such functions in loops": scanned(lambda c, x: x * jax.jit(tripled)(c) + bent(X)[0] * c),
    "a Ref of constants": lambda dy: kept_in_a_ref() * dy,
    "stopped constant": lambda dy: lax.stop_gradient(X) * dy,
    "stopped constant in scan": scanned(lambda c, x: c * lax.stop_gradient(x)),
    **{kind: functools.partial(operator.matmul, matrix) for kind, matrix in SPARSE.items()},
    **{f"entries of {kind}": lambda dy, of=of: of(dy) @ X for kind, of in ENTRIES.items()},
    **{f"{kind} made dense": lambda dy, of=of: of(dy).todense() for kind, of in ENTRIES.items()},
    "CSR by a matrix": lambda dy: CSR @ outer(dy),
    "COO by a matrix": lambda dy: COO @ outer(dy),
    "sparse made dense": lambda dy: sparse.todense(ENTRIES["BCOO"](dy)),
    "transpose of BCOO": lambda dy: ENTRIES["BCOO"](dy).T.data,
    "entries for BCOO": lambda dy: sparse.bcoo_extract(BCOO, outer(dy)).data,
    "entries for BCSR": lambda dy: sparse.bcsr.bcsr_extract(BCSR.indices, BCSR.indptr, outer(dy)),
    "sampled product": lambda dy: sparse.bcoo_dot_general_sampled(
        outer(dy), MATRIX, BCOO.indices, dimension_numbers=(([1], [0]), ([], []))
    ),
    "device_put": lambda dy: operator.mul(*jax.device_put((dy, X))),
    "cg": lambda dy: cg(lambda v: MATRIX.T @ (MATRIX @ v), dy, tol=1e-7)[0],
    "bicgstab": lambda dy: bicgstab(lambda v: MATRIX @ v, dy, tol=1e-7)[0],
    "shard_map of cg": on_a_device(lambda dy: cg(lambda v: 2 * v, 4 * dy, tol=1e-7)[0]),
    "shard_map of device_put": on_a_device(lambda dy: 2 * jax.device_put((dy, X))[0]),
    "shard_map of psum": on_a_device(lambda dy: sum(lax.psum((dy, dy), "i"))),
    "shard_map of an optimization barrier": on_a_device(
        jax.jit(lambda dy: 2 * lax.optimization_barrier((dy, X))[0])
    ),
    **{f"an operator by a {kind}": adjoint for kind, adjoint in ADJOINTS.items()},
}


def late(dy):
    """Add a constant to the upstream in the third round of a loop, and not before."""
    step = lambda c, _: ((c[0] + c[1], c[2], X), None)  # noqa: E731
    return lax.scan(step, (dy, ZEROS, ZEROS), None, length=4)[0][0]


shifted = custom_gradient(lambda x: (3 * x, lambda dy: 7 * dy * (x + 1)))


@jax.custom_vjp
def affine(x):
    return 3 * x + 1


affine.defvjp(lambda x: (3 * x + 1, x), lambda x, dy: (3 * dy,), optimize_remat=True)


OUTSIDE = jax.new_ref(ZEROS)


def written_outside(dy):
    OUTSIDE[...] = dy
    return OUTSIDE[...]


NOT_LINEAR = {
    "a Ref": (refilled, "`add` of an upstream and a constant"),  # which it reads
    "a Ref from outside": (written_outside, "a `Ref` to which an upstream is written"),
    "product": (lambda dy: dy * dy[::-1], "`mul` of two upstreams"),
    "square in a dot": (lambda dy: jnp.dot(dy, dy), "`dot_general` of two upstreams"),
    "quotient": (lambda dy: X / dy, "`div`"),
    "clip": (lambda dy: jnp.clip(dy, -1, 1), "max|min|clamp"),
    "round": (lambda dy: jnp.round(dy), "`round`, which is not linear"),
    "round in a function with a linear gradient": (lambda dy: rounded(dy), "`round`"),
    "concatenate": (lambda dy: jnp.concatenate([dy, X]), "`concatenate` of an upstream and a"),
    "device_put": (lambda dy: sum(jax.device_put((dy, X))), "of an upstream and a constant"),
    "solve without a transpose": (
        lambda dy: lax.custom_linear_solve(lambda v: 2 * v, dy, lambda _, b: b / 2),
        "an operation that JAX cannot transpose",
    ),
    "solve with the upstream": (lambda dy: jnp.linalg.solve(jnp.diag(dy), X), "two upstreams|lu"),
    "integer": (lambda dy: (4 * dy).astype(int).astype(float), "`convert_element_type` to int32"),
    "comparison": (lambda dy: jnp.where(dy > 0, dy, 0), "select_n|gt"),
    "index": (lambda dy: X[jnp.argmax(dy)] * ONES, "argmax|gather|dynamic_slice|add"),
    "add a constant": (lambda dy: dy + 1, "`add` of an upstream and a constant"),
    "subtract": (lambda dy: X - dy, "`sub` of an upstream and a constant"),
    "add what a callback made of zeros": (
        lambda dy: dy + called_back(lambda z: z + np.float32(1), ZEROS),
        "`add` of an upstream and a constant",
    ),
    "where": (lambda dy: jnp.where(MASK, dy, 1), "`select_n` of an upstream and a constant"),
    "complex": (lambda dy: jnp.real(1j * lax.complex(dy, X)), "`complex` of an upstream and"),
    "pad": (lambda dy: jnp.pad(dy, 1, constant_values=1), "`pad` of an upstream and a constant"),
    "optimization barrier": (
        lambda dy: sum(lax.optimization_barrier((7 * dy, X))),
        "of an upstream and a",
    ),
    "scatter": (lambda dy: ONES.at[1].set(dy[0]), "`scatter` of an upstream and a constant"),
    "scatter-add": (lambda dy: X.at[INDEX].add(dy[:3]), "`scatter-add` of an upstream and"),
    "scatter-sub": (lambda dy: X.at[INDEX].subtract(dy[:3]), "`scatter-sub` of an upstream and"),
    "scatter-mul into a constant": (
        lambda dy: X.at[INDEX[:2]].multiply(dy[:2], unique_indices=True),
        "`scatter-mul`, which is not linear in its operand 2",
    ),
    "gather that fills": (
        lambda dy: dy.at[jnp.array([0, 99])].get(mode="fill", fill_value=7.0),
        "`gather` of an upstream and a constant",
    ),
    "derivative at the upstream": (
        lambda dy: jax.jvp(shifted, (dy,), (ONES,))[1],
        "the derivative of a decorated function at an upstream",
    ),
    "dynamic update": (lambda dy: lax.dynamic_update_slice(X, dy[:2], (1,)), "`dynamic_update_"),
    "forward pass of a custom_vjp": (lambda dy: jax.vjp(affine, dy)[0], "`add` of an upstream"),
    "callback": (lambda dy: called_back(lambda d: 7 * d, dy), "`pure_callback`, which JAX cannot"),
    "custom_vmap": (mapped_by_hand, "`custom_vmap_call`, which JAX cannot transpose"),
    "stopped": (
        lambda dy: dy + 2 * lax.stop_gradient(dy),
        "`stop_gradient`, which JAX cannot transpose",
    ),
    "stopped in scan": (scanned(lambda c, x: c + x * lax.stop_gradient(c)), "`stop_gradient`, wh"),
    "outside of JAX, a clip": (
        opaque(lambda y: np.clip(y, -1, 1), lambda y, d: jnp.where(abs(y) < 1, d, 0)),
        "`inner`, whose derivative depends on",
    ),
    "outside of JAX, with an affine gradient": (
        opaque(np.asarray, lambda y, d: d + 1),
        "`add` of an upstream and a constant",
    ),
    "an operator plus a constant": (lambda dy: ADJOINTS["callback"](dy) + 1, "`add` of an"),
    "checkpoint": (lambda dy: jax.checkpoint(lambda dy: dy + X)(dy), "`add` of an upstream and"),
    "scan": (scanned(lambda c, x: jnp.sin(c)), "sin|scan"),
    "a constant that comes late": (late, "add|scan"),
    "affine cond": (lambda dy: lax.cond(MASK[0], lambda d: d + X, lambda d: d, dy), "add|cond"),
    "while of unknown length": (
        # Not a `fori_loop`: eagerly, its bound has a value, and the loop is a `scan`.
        lambda dy: lax.while_loop(
            lambda c: c[0] < INDEX[0], lambda c: (c[0] + 1, c[1] * X), (0, dy)
        )[1],
        "while",
    ),
    "made BCOO": (
        lambda dy: sparse.bcoo_fromdense(outer(dy), nse=N * N).data,
        "an operation, whose derivative depends on the upstream",
    ),
    "ignores the upstream": (lambda dy: X, "upstream"),
    "constant in one gradient": (lambda dy: [dy, X], "upstream"),
}
if hasattr(lax, "polynomial"):  # from JAX 0.12 on
    NOT_LINEAR["polynomial"] = (
        lambda dy: lax.polynomial(2 * ONES, [1.0, dy]),
        "`polynomial` of an upstream and a constant",
    )
    NOT_LINEAR["polynomial of the upstream"] = (
        lambda dy: lax.polynomial(dy, [2.0, 3.0]),
        "`polynomial`, which is not linear in its operand 0",
    )
# JAX itself has no derivative of these in reverse mode: the rule is right at the first order alone.
FIRST_ORDER_ALONE = {
    "custom_vmap",
    "a Ref from outside",
    "forward pass of a custom_vjp",
    "callback",
    "while of unknown length",
    "solve without a transpose",
    *(["a Ref"] if jax.__version_info__ < (0, 12) else []),  # JAX's own error, in plain JAX, too
}
