"""A linear rule has both modes at every order; any other reverse mode, and an error that says why.

A linear rule is a matrix, whatever operations it is made of; for each that is not linear, a regular
expression says which operation forward mode must name. For an input `x` the declared gradient is
`7 rule(dy) x`, whatever the value is. The oracles are written for JAX's own decorators: a
`custom_jvp` that multiplies by the matrix of the rule, and a `custom_vjp` that runs the rule.
"""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.extend.core import Var
from jax.interpreters import ad
from rules import FIRST_ORDER_ALONE, LINEAR, NOT_LINEAR, ZEROS, N, X
from support.helpers import assert_same, differentiated, sample, total

from tfgrad_jax import custom_gradient

# --- what each is compared with -------------------------------------------------------------------


def leaves_of(rule):
    return lambda dy: jax.tree.leaves(rule(dy))


def inputs(rule):
    """Return one input for each gradient, and tangents for them."""
    random = np.random.default_rng(1)
    shapes = [(g.shape, g.dtype) for g in jax.eval_shape(leaves_of(rule), X)]
    return [tuple(jnp.asarray(random.uniform(0.5, 1.5, s), d) for s, d in shapes) for _ in "xt"]


def value_at(xs):
    """Return a value that is `X` at `xs`; its own derivative is none of those declared."""
    there = total(xs)
    return lambda *xs: X + 3 * (total(xs) - there)


def decorated(rule, xs):
    value = value_at(xs)

    @custom_gradient
    def declared_here(*xs):
        def grad(dy):
            return [x * g for x, g in zip(xs, leaves_of(rule)(7 * dy), strict=True)]

        return value(*xs), grad

    return declared_here


def by_matrix(rule, xs):
    """Return the same with both modes, by the rule's columns: it must be linear."""
    columns = [leaves_of(rule)(unit) for unit in jnp.eye(N)]
    matrices = [jnp.stack([c.ravel() for c in several]) for several in zip(*columns, strict=True)]
    h = jax.custom_jvp(value_at(xs))

    def push(xs, ts):
        moved = zip(matrices, xs, ts, strict=True)
        return h(*xs), sum((7 * m @ (x * t).ravel() for m, x, t in moved), ZEROS)

    h.defjvp(push)
    return h


def by_running(rule, xs):
    """Return the same for reverse mode: the forward pass of the rule calls the function."""
    attached = jax.custom_vjp(lambda y, *xs: y)

    def backward(xs, dy):
        gradients = leaves_of(rule)(7 * dy)
        return jnp.zeros_like(dy), *(x * g for x, g in zip(xs, gradients, strict=True))

    attached.defvjp(lambda y, *xs: (attached(y, *xs), xs), backward)
    return lambda *xs: attached(lax.stop_gradient(value_at(xs)(*xs)), *xs)


def loss(h):
    return lambda *xs: jnp.sum(jnp.sin(h(*xs)) * jnp.arange(1.0, N + 1))


def pushed(f, xs, ts):
    return jax.jvp(f, xs, ts)[1]


FORWARD = {
    "jvp": pushed,
    "linearize": lambda h, xs, ts: jax.linearize(h, *xs)[1](*ts),
    "transposed linearize": lambda h, xs, ts: jax.linear_transpose(jax.linearize(h, *xs)[1], *xs)(
        X
    ),
    "jvp of jit": lambda h, xs, ts: pushed(jax.jit(h), xs, ts),
    "jvp of scan": lambda h, xs, ts: pushed(
        lambda *xs: lax.scan(lambda c, _: (c + loss(h)(*xs), None), 0.0, None, length=2)[0], xs, ts
    ),
    "vmap over tangents": lambda h, xs, ts: jax.vmap(
        lambda s: pushed(h, xs, tuple(s * t for t in ts))
    )(jnp.float32([1, -2])),
    "jvp of grad": lambda h, xs, ts: pushed(differentiated(loss(h), len(xs), 1), xs, ts),
    "jvp of jvp": lambda h, xs, ts: pushed(lambda *xs: pushed(loss(h), xs, ts), xs, ts),
    "grad of jvp": lambda h, xs, ts: differentiated(
        lambda *xs: pushed(loss(h), xs, ts), len(xs), 1
    )(*xs),
    "jvp of grad of grad": lambda h, xs, ts: pushed(differentiated(loss(h), len(xs), 2), xs, ts),
}


def _pairs(xs):
    return [jnp.stack([x, x]) for x in xs]


REVERSE = {
    order: lambda h, xs, ts, order=order: differentiated(loss(h), len(xs), order)(*xs)
    for order in (1, 2, 3)
} | {"vmap of grad": lambda h, xs, ts: jax.vmap(differentiated(loss(h), len(xs), 1))(*_pairs(xs))}
MODES = {
    "eager": lambda way, h, xs, ts: way(h, xs, ts),
    "jit": lambda way, h, xs, ts: jax.jit(lambda xs, ts: way(h, xs, ts))(xs, ts),
    "jit of constants": lambda way, h, xs, ts: jax.jit(lambda: way(h, xs, ts))(),
}
UNMAPPED = re.compile(
    r"linear_call|ragged dot|CSR|\bCOO|Ref from outside|custom_vmap"
)  # JAX has no `vmap` of these


def agree(got, expected, name=""):
    __tracebackhide__ = True
    rtol = 2e-2 if "precision" in name else 1e-3
    assert_same(got, expected, rtol=rtol, atol=2 * rtol)


ORDERS = FORWARD | REVERSE
EVERY = [
    (name, way, mode)
    for name in LINEAR
    for way in ORDERS
    for mode in MODES
    if not UNMAPPED.search(name) or "vmap" not in str(way)
    # JAX itself has no derivative of their derivatives.
    if name != "ragged dot from the right" or way == "jvp"
]
# Each rule once, three in every way, and those with derivatives of their own in every mode.
OWN = [n for n in LINEAR if n.startswith(("an operator by", "shard_map"))]
CORE = [(n, "jvp", "jit") for n in LINEAR]
CORE += [
    (n, w, "jit") for n in ("dot", "roll in scan", "an operator by a callback") for w in ORDERS
]
CORE += [(n, w, m) for n in OWN for w in (1, "jvp") for m in MODES]


@pytest.mark.sampled(100)
@pytest.mark.parametrize(("name", "way", "mode"), sample(EVERY, 20, dict.fromkeys(CORE)))
def test_a_linear_rule_is_the_derivative_at_every_order_in_both_modes(name, way, mode):
    rule = LINEAR[name]
    xs, ts = inputs(rule)
    run = MODES[mode]
    expected = run(ORDERS[way], by_matrix(rule, xs), xs, ts)
    agree(run(ORDERS[way], decorated(rule, xs), xs, ts), expected, name)


def test_a_large_constant_is_not_looked_into_for_zeros():
    def push(size):
        zeros, x = np.zeros(size, np.float32), jnp.ones(size)
        return jax.jvp(custom_gradient(lambda x: (x, lambda dy: 7 * dy + zeros)), (x,), (x,))[1]

    assert_same(push(1 << 16), jnp.full(1 << 16, 7.0))
    with pytest.raises(TypeError, match="`add` of an upstream and a constant"):
        push((1 << 16) + 1)


def test_a_rule_that_logs_its_upstream_is_linear():
    log = lambda dy: io_callback(lambda d: None, None, dy)  # noqa: E731
    f = custom_gradient(lambda x: (x, lambda dy: (log(dy), 7 * dy)[1]))
    assert_same(jax.jvp(f, (X,), (X,))[1], 7 * X)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", NOT_LINEAR)
def test_reverse_mode_runs_any_rule_at_every_order(name):
    rule, _ = NOT_LINEAR[name]
    xs, ts = inputs(rule)
    for order in (1, 2, 3) if name not in FIRST_ORDER_ALONE else (1,):
        expected = REVERSE[order](by_running(rule, xs), xs, ts)
        agree(REVERSE[order](decorated(rule, xs), xs, ts), expected)
    if "callback" not in name:
        for way in (1,) if UNMAPPED.search(name) else (1, "vmap of grad"):
            expected = jax.jit(lambda way=way: REVERSE[way](by_running(rule, xs), xs, ts))()
            agree(jax.jit(lambda way=way: REVERSE[way](decorated(rule, xs), xs, ts))(), expected)


REFUSED = [(name, "jvp", "eager") for name in NOT_LINEAR]
# Wherever forward mode is evaluated; the transpose of `linearize` is reverse mode.
WHEREVER = itertools.product(
    ["clip", "add a constant"], {*FORWARD} - {"transposed linearize"}, MODES
)


@pytest.mark.parametrize(("name", "way", "mode"), sample(sorted(WHEREVER), 12, REFUSED))
def test_forward_mode_names_the_operation(name, way, mode):
    rule, operation = NOT_LINEAR[name]
    xs, ts = inputs(rule)
    with pytest.raises(TypeError, match=operation) as caught:
        MODES[mode](FORWARD[way], decorated(rule, xs), xs, ts)
    message = str(caught.value)
    assert "declared_here" in message and "test_rules.py" in message  # whose rule
    assert "reverse mode" in message and "jax.grad" in message  # the way out


# --- the tables hold whatever JAX can transpose ---------------------------------------------------

# What no rule of the tables has, and why.
APART = {
    "names of the devices (tests/devices)": """all_gather all_gather_invariant all_gather_reduced
        all_to_all pbroadcast pbroadcast_dynamic ppermute preduced psum psum_invariant pvary
        ragged_all_to_all reduce_scatter reduced_vary_cast reduced_vary_cast_p unreduced_psum
        unreduced_reduce_scatter vary_unreduced_cast vary_unreduced_cast_p""",
    "calls, loops and branches": """call closed_call cond composite
        custom_jvp_call custom_lin custom_transpose_call jit remat2 remat_opt scan shard_map vmap
        xla_pmap call_hi_primitive_linearized mpmd_map""",
    "callbacks and kernels, refused if they have no adjoint": """pure_callback io_callback ffi_call
        pallas_call""",
    "refused as bcoo_fromdense is": "bcsr_fromdense csr_fromdense coo_fromdense",
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


def reached(jaxpr):
    """Return the names of the operations that the inputs reach, in the jaxprs they call, too."""
    names, moved = set(), set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        if moved.isdisjoint(v for v in eqn.invars if isinstance(v, Var)):
            continue
        names.add(eqn.primitive.name)
        moved.update(eqn.outvars)
        for value in eqn.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(one, "jaxpr", one)
                names |= reached(inner) if hasattr(inner, "eqns") else set()
    return names


def test_the_tables_hold_every_operation_that_jax_can_transpose():
    rules = [*LINEAR.values(), *(rule for rule, _ in NOT_LINEAR.values())]
    held = set().union(*(reached(jax.make_jaxpr(leaves_of(rule))(X).jaxpr) for rule in rules))
    # Libraries that other tests import register operations of theirs.
    transposed = {p: getattr(rule, "func", rule) for p, rule in ad.primitive_transposes.items()}
    of_jax = {
        p.name for p, rule in transposed.items() if rule.__module__.partition(".")[0] == "jax"
    }
    assert of_jax - held - set().union(*map(str.split, APART.values())) == set()
