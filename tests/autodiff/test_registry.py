"""Every operation that JAX can transpose, in a rule: alone, and beside a constant operand.

The rule is 7 times the operation. Its forward mode is compared with the transpose of what plain
`jax.jvp` says of the operation, column by column. Beside a constant, an operation that adds is
refused, and any other is linear.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse
from jax.interpreters import ad
from support.helpers import assert_same

from tfgrad_jax import custom_gradient

N = 4
X, T = jnp.float32([0.5, -1.0, 2.0, 0.25]), jnp.float32([1.0, 2.0, -1.0, 0.5])
ONES, INDEX = jnp.ones(N), jnp.int32([2, 0])
MATRIX = jnp.float32(np.random.default_rng(0).standard_normal((N, N))) + 4 * jnp.eye(N)
BCOO, BCSR = sparse.BCOO.fromdense(MATRIX), sparse.BCSR.fromdense(MATRIX)
COO, CSR = sparse.COO.fromdense(MATRIX), sparse.CSR.fromdense(MATRIX)


def bcoo_of(dy):
    return sparse.BCOO((jnp.outer(dy, X).ravel(), BCOO.indices), shape=(N, N))


def bcsr_of(dy):
    return sparse.BCSR((jnp.outer(dy, X).ravel(), BCSR.indices, BCSR.indptr), shape=(N, N))


def coo_of(dy):
    return sparse.COO((jnp.outer(dy, X).ravel(), COO.row, COO.col), shape=(N, N))


def csr_of(dy):
    return sparse.CSR((jnp.outer(dy, X).ravel(), CSR.indices, CSR.indptr), shape=(N, N))


def pooled(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (2,), (1,), "SAME")


def solved(a, b):
    return lax.custom_linear_solve(
        a, b, lambda a, b: jnp.linalg.inv(MATRIX) @ b, lambda a, b: jnp.linalg.inv(MATRIX.T) @ b
    )


def tridiagonal(b):
    return lax.linalg.tridiagonal_solve(ONES.at[0].set(0), 5 * ONES, ONES.at[-1].set(0), b[:, None])


UNIQUE = {"unique_indices": True}
REFUSED = "refused beside a constant"
# By the name of the operation: a rule with the upstream alone, and one with a constant beside it.
OPERATIONS = {
    "add": (lambda dy: dy + dy[::-1], lambda dy: dy + X, REFUSED),
    "sub": (lambda dy: dy - dy[::-1], lambda dy: X - dy, REFUSED),
    "neg": (lambda dy: -dy, None),
    "mul": (lambda dy: dy * 3.0, lambda dy: dy * X),
    "div": (lambda dy: dy / 3.0, lambda dy: dy / X),
    "broadcast_in_dim": (lambda dy: jnp.broadcast_to(dy[:, None], (N, 3)), None),
    "reshape": (lambda dy: dy.reshape(2, 2), None),
    "squeeze": (lambda dy: lax.squeeze(lax.expand_dims(dy, [0]), [0]), None),
    "transpose": (lambda dy: jnp.outer(X, dy).T, None),
    "rev": (lambda dy: lax.rev(dy, [0]), None),
    "reduce_sum": (lambda dy: jnp.sum(dy), None),
    "cumsum": (lambda dy: lax.cumsum(dy), None),
    "concatenate": (
        lambda dy: jnp.concatenate([dy, dy[:1]]),
        lambda dy: jnp.concatenate([dy, X]),
        REFUSED,
    ),
    "stack": (lambda dy: jnp.stack([dy, 2 * dy]), lambda dy: jnp.stack([dy, X]), REFUSED),
    "unstack": (lambda dy: jnp.unstack(jnp.outer(X, dy)), None),
    "split": (lambda dy: lax.split(dy, (1, 3)), None),
    "pad": (
        lambda dy: lax.pad(dy, 0.0, [(1, 1, 0)]),
        lambda dy: lax.pad(dy, 1.0, [(1, 1, 0)]),
        REFUSED,
    ),
    "select_n": (
        lambda dy: jnp.where(X > 0, dy, 2 * dy),
        lambda dy: jnp.where(X > 0, dy, X),
        REFUSED,
    ),
    "complex": (
        lambda dy: jnp.imag(lax.complex(dy, 2 * dy)),
        lambda dy: jnp.real(lax.complex(dy, X)),
        REFUSED,
    ),
    "conj": (lambda dy: jnp.imag(jnp.conj(lax.complex(dy, dy))), None),
    "real": (lambda dy: jnp.real(lax.complex(dy, dy)), None),
    "imag": (lambda dy: jnp.imag(lax.complex(dy, 2 * dy)), None),
    "convert_element_type": (lambda dy: dy.astype(jnp.bfloat16).astype(jnp.float32), None),
    "copy": (lambda dy: jnp.copy(dy), None),
    "device_put": (
        lambda dy: jax.device_put(dy),
        lambda dy: (lambda a, b: a * b)(*jax.device_put((dy, X))),
    ),
    "optimization_barrier": (
        lambda dy: lax.optimization_barrier(dy),
        lambda dy: (lambda a, b: a * b)(*lax.optimization_barrier((dy, X))),
    ),
    "reduce_precision": (lambda dy: lax.reduce_precision(dy, 8, 23), None),
    "slice": (lambda dy: dy[1:3], None),
    "dynamic_slice": (lambda dy: lax.dynamic_slice(dy, [INDEX[1]], [2]), None),
    "gather": (lambda dy: dy[INDEX], None),
    "dynamic_update_slice": (
        lambda dy: lax.dynamic_update_slice(dy, 2 * dy[:2], (1,)),
        lambda dy: lax.dynamic_update_slice(X, dy[:2], (1,)),
        REFUSED,
    ),
    "scatter": (
        lambda dy: dy.at[INDEX].set(2 * dy[:2], **UNIQUE),
        lambda dy: X.at[INDEX].set(dy[:2], **UNIQUE),
        REFUSED,
    ),
    "scatter-add": (
        lambda dy: dy.at[INDEX].add(dy[:2]),
        lambda dy: dy.at[INDEX].add(X[:2]),
        REFUSED,
    ),
    "scatter-sub": (
        lambda dy: dy.at[INDEX].subtract(dy[:2]),
        lambda dy: X.at[INDEX].subtract(dy[:2]),
        REFUSED,
    ),
    "scatter-mul": (
        lambda dy: dy.at[INDEX].mul(3.0, **UNIQUE),
        lambda dy: dy.at[INDEX].mul(X[:2], **UNIQUE),
    ),
    "dot_general": (lambda dy: jnp.dot(dy, ONES), lambda dy: MATRIX @ dy),
    "conv_general_dilated": (
        lambda dy: jnp.convolve(dy, ONES[:2], mode="same"),
        lambda dy: jnp.convolve(X[:3], dy, mode="same"),
    ),
    "ragged_dot_general": (
        lambda dy: lax.ragged_dot(jnp.outer(X, dy), MATRIX[None], jnp.int32([N])),
        lambda dy: lax.ragged_dot(MATRIX, jnp.outer(X, dy)[None], jnp.int32([N])),
    ),
    "reduce_window_sum": (lambda dy: lax.reduce_window(dy, 0.0, lax.add, (2,), (1,), "SAME"), None),
    "select_and_scatter_add": (None, lambda dy: jax.vjp(pooled, X)[1](dy)[0]),
    "select_and_gather_add": (None, lambda dy: jax.jvp(pooled, (X,), (dy,))[1]),
    "fft": (lambda dy: jnp.fft.rfft(dy).real, None),
    "triangular_solve": (
        None,
        lambda dy: lax.linalg.triangular_solve(
            jnp.tril(MATRIX), dy[:, None], left_side=True, lower=True
        ),
    ),
    "tridiagonal_solve": (None, tridiagonal),
    "custom_linear_solve": (None, lambda dy: solved(lambda v: MATRIX @ v, dy)),
    "linear_call": (
        None,
        lambda dy: jax.custom_derivatives.linear_call(
            lambda x, d: x * d, lambda x, t: x * t, X, dy
        ),
    ),
    "bcoo_fromdense": (
        lambda dy: sparse.bcoo_fromdense(jnp.outer(dy, ONES), nse=N * N).data,
        lambda dy: sparse.bcoo_fromdense(jnp.outer(dy, X), nse=N * N).data,
    ),
    "bcoo_todense": (None, lambda dy: bcoo_of(dy).todense()),
    "bcoo_transpose": (None, lambda dy: bcoo_of(dy).T.data),
    "bcoo_extract": (None, lambda dy: sparse.bcoo_extract(BCOO, jnp.outer(dy, X)).data),
    "bcoo_dot_general": (lambda dy: BCOO @ dy, lambda dy: bcoo_of(dy) @ X),
    "bcoo_dot_general_sampled": (
        None,
        lambda dy: sparse.bcoo_dot_general_sampled(
            jnp.outer(dy, X), MATRIX, BCOO.indices, dimension_numbers=(([1], [0]), ([], []))
        ),
    ),
    "bcsr_fromdense": (None, lambda dy: sparse.bcsr_fromdense(jnp.outer(dy, X), nse=N * N).data),
    "bcsr_todense": (None, lambda dy: bcsr_of(dy).todense()),
    "bcsr_extract": (
        None,
        lambda dy: sparse.bcsr.bcsr_extract(BCSR.indices, BCSR.indptr, jnp.outer(dy, X)),
    ),
    "bcsr_dot_general": (lambda dy: BCSR @ dy, lambda dy: bcsr_of(dy) @ X),
    "coo_fromdense": (None, lambda dy: sparse.COO.fromdense(jnp.outer(dy, X), nse=N * N).data),
    "coo_todense": (None, lambda dy: coo_of(dy).todense()),
    "coo_matvec": (lambda dy: COO @ dy, lambda dy: coo_of(dy) @ X),
    "coo_matmat": (lambda dy: COO @ jnp.outer(dy, X), lambda dy: coo_of(dy) @ MATRIX),
    "csr_fromdense": (None, lambda dy: sparse.CSR.fromdense(jnp.outer(dy, X), nse=N * N).data),
    "csr_todense": (None, lambda dy: csr_of(dy).todense()),
    "csr_matvec": (lambda dy: CSR @ dy, lambda dy: csr_of(dy) @ X),
    "csr_matmat": (lambda dy: CSR @ jnp.outer(dy, X), lambda dy: csr_of(dy) @ MATRIX),
    "todense": (None, lambda dy: sparse.todense(bcoo_of(dy))),
    "while": (None, lambda dy: lax.fori_loop(0, INDEX[0], lambda _, d: d * X, dy), REFUSED),
}
# What the table does not hold, and why.
APART = {
    "names of the devices (tests/devices)": """all_gather all_gather_invariant all_gather_reduced
        all_to_all pbroadcast pbroadcast_dynamic ppermute preduced psum psum_invariant pvary
        ragged_all_to_all reduce_scatter reduced_vary_cast reduced_vary_cast_p unreduced_psum
        unreduced_reduce_scatter vary_unreduced_cast vary_unreduced_cast_p""",
    "calls, loops and branches (LINEAR of test_rules.py)": """call closed_call cond composite
        custom_jvp_call custom_lin custom_transpose_call jit remat2 remat_opt scan shard_map vmap
        xla_pmap call_hi_primitive_linearized mpmd_map""",
    "callbacks and kernels, refused (test_operators.py)": """pure_callback io_callback ffi_call
        pallas_call""",
    "no results": "debug_callback debug_print dce_sink",
    "mutable arrays, boxes and logs": """get swap addupdate box_get box_set new_box new_log
        log_extend log_read""",
    "made by JAX alone, or by none of its public functions": """add_any polynomial stage tie tile
        xla_metadata_value""",
    "placement: a sharding, a layout, a memory": """layout_constraint reshard sharding_constraint
        with_memory_space_constraint""",
    "floats that are stored as integers": "from_edtype to_edtype",
    "a solver of GPUs": "spsolve",
    "of this package": "push depend",
    "of lineax": "linear_solve",
    "of several processes": """global_array_to_host_local_array
        host_local_array_to_global_array""",
}
# Where the entries are depends on the upstream.
MADE_SPARSE = [name for name in OPERATIONS if name.endswith("_fromdense")]
CASES = [
    (name, kind)
    for name, rules in OPERATIONS.items()
    for kind in (0, 1)
    if rules[kind] is not None and name not in MADE_SPARSE
]


def leaves_of(rule):
    return lambda dy: jax.tree.leaves(rule(dy))


def names_in(jaxpr):
    """Return the names of the operations in a jaxpr, and in those that it holds."""
    found = set()
    for eqn in jaxpr.eqns:
        found.add(eqn.primitive.name)
        for value in eqn.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(one, "jaxpr", one)
                found |= names_in(inner) if hasattr(inner, "eqns") else set()
    return found


def with_rule(rule):
    """Return a function with the rule, and its inputs: one for each gradient."""
    xs = [jnp.zeros(g.shape, g.dtype) for g in jax.tree.leaves(jax.eval_shape(rule, X))]
    f = custom_gradient(lambda *xs: (X + sum(map(jnp.sum, xs)), leaves_of(lambda dy: rule(7 * dy))))
    ts = [jnp.arange(1, x.size + 1, dtype=x.dtype).reshape(x.shape) for x in xs]
    return f, tuple(xs), tuple(ts)


@pytest.mark.sampled(30)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_forward_mode_is_the_transpose_that_jvp_says(name, kind):
    rule = OPERATIONS[name][kind]
    f, xs, ts = with_rule(rule)
    if kind == 1 and REFUSED in OPERATIONS[name]:
        with pytest.raises(TypeError, match=f"`{name}`(, which| of an upstream and a constant)"):
            jax.jvp(f, xs, ts)
        return
    columns = [jax.jvp(leaves_of(rule), (X,), (unit,))[1] for unit in jnp.eye(N)]
    expected = 7 * jnp.stack(
        [sum(jnp.sum(c * t) for c, t in zip(column, ts, strict=True)) for column in columns]
    )
    assert_same(
        jax.jvp(f, xs, ts)[1], expected, rtol=1e-2 if "convert" in name else 1e-4, atol=1e-3
    )


@pytest.mark.parametrize("name", MADE_SPARSE)
def test_a_sparse_matrix_made_of_the_upstream_is_refused(name):
    f, xs, ts = with_rule(OPERATIONS[name][1])
    with pytest.raises(TypeError, match="an operation, whose derivative depends on the upstream"):
        jax.jvp(f, xs, ts)


def test_the_table_holds_every_operation_that_jax_can_transpose():
    known = set(OPERATIONS).union(*map(str.split, APART.values()))
    # Libraries that other tests import register operations of theirs.
    rules = {p: getattr(rule, "func", rule) for p, rule in ad.primitive_transposes.items()}
    of_jax = {p.name for p, rule in rules.items() if rule.__module__.partition(".")[0] == "jax"}
    assert of_jax - known == set()


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_rules_of_the_table_are_made_of_the_operation(name):
    if name in {"dynamic_slice", "copy", "stack", "unstack"}:  # of another name in some version
        pytest.skip("by version")
    for rule in OPERATIONS[name][:2]:
        if rule is not None:
            assert name in names_in(jax.make_jaxpr(rule)(X).jaxpr)
