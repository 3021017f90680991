"""Every transformation of JAX, over the cases of `helpers.py`."""

import jax
import jax.numpy as jnp
import pytest
from helpers import CASES, assert_same, differentiated, total
from jax import export, lax

from tfgrad_jax import custom_gradient

cases = pytest.mark.parametrize("case", CASES, ids=str)

# One case for each way that a call can take; under most transformations the others are slow tests.
REPRESENTATIVE = {"pytree", "traced rule", "nested", "closes over parameters", "bfloat16"}


def products(transformations, always=()):
    """Pair the cases with transformations."""
    return pytest.mark.parametrize(
        ("case", "transformation"),
        [
            pytest.param(
                case,
                t,
                id=f"{case}-{t}",
                marks=() if t in always or case.name in REPRESENTATIVE else pytest.mark.slow,
            )
            for case in CASES
            for t in transformations
        ],
    )


some_cases = pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=str(c), marks=() if c.name in REPRESENTATIVE else pytest.mark.slow)
        for c in CASES
    ],
)


def _grad(case, loss=None):
    return jax.grad(loss or case.loss, case.argnums)


def _in_cond(case):
    def loss(*arrays):
        return lax.cond(total(arrays) > 0, case.loss, lambda *_: jnp.float32(0), *arrays)

    return _grad(case, loss)(*case.arrays)


def _in_switch(case):
    def loss(*arrays):
        branches = [lambda *_: jnp.float32(0), case.loss, lambda *a: 0 * total(a)]
        return lax.switch(jnp.int32(total(arrays) > 0), branches, *arrays)

    return _grad(case, loss)(*case.arrays)


def _checkpointed(case, **options):
    return _grad(case, jax.checkpoint(case.loss, **options))(*case.arrays)


def _leak_checked(case):
    with jax.check_tracer_leaks():
        return jax.jit(_grad(case))(*case.arrays)


def _without_jit(case):
    with jax.disable_jit():
        return jax.jit(_grad(case))(*case.arrays)


GRADIENTS = {
    "grad": lambda case: _grad(case)(*case.arrays),
    "jit of grad": lambda case: jax.jit(_grad(case))(*case.arrays),
    "grad of jit": lambda case: _grad(case, jax.jit(case.loss))(*case.arrays),
    "vjp": lambda case: jax.vjp(case.loss, *case.arrays)[1](jnp.float32(1)),
    "jacrev": lambda case: jax.jacrev(case.loss, case.argnums)(*case.arrays),
    "cond": _in_cond,
    "switch": _in_switch,
    "checkpoint": _checkpointed,
    "checkpoint that saves": lambda case: _checkpointed(
        case, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
    "checkpoint that saves everything": lambda case: _checkpointed(
        case, policy=jax.checkpoint_policies.everything_saveable
    ),
    "disable_jit": _without_jit,
    "check_tracer_leaks": _leak_checked,
}


@products(GRADIENTS, always=("grad", "jit of grad"))
def test_gradient(case, transformation):
    assert_same(GRADIENTS[transformation](case), case.expected(), rtol=case.rtol)


def _scanned(case):
    def loss(*pairs):
        body = lambda c, arrays: (c + case.loss(*arrays), None)  # noqa: E731
        return lax.scan(body, jnp.float32(0), pairs)[0]

    return _grad(case, loss)(*case.pairs)


def _gradients_in_scan(case):
    body = lambda c, arrays: (c, _grad(case)(*arrays))  # noqa: E731
    return lax.scan(body, 0, case.pairs)[1]


def _gradients_in_while(case):
    def body(state):
        i, gradients = state
        found = _grad(case)(*jax.tree.map(lambda a: a[i], case.pairs))
        return i + 1, jax.tree.map(lambda all_, g: all_.at[i].set(g), gradients, found)

    start = (0, jax.tree.map(jnp.zeros_like, case.pairs))
    return lax.while_loop(lambda state: state[0] < 2, body, start)[1]


OF_PAIRS = {
    "vmap of grad": lambda case: jax.vmap(_grad(case))(*case.pairs),
    "grad of vmap": lambda case: _grad(case, lambda *p: jnp.sum(jax.vmap(case.loss)(*p)))(
        *case.pairs
    ),
    "jit of vmap of grad": lambda case: jax.jit(jax.vmap(_grad(case)))(*case.pairs),
    "scan": _scanned,
    "grad in scan": _gradients_in_scan,
    "map": lambda case: lax.map(lambda arrays: _grad(case)(*arrays), case.pairs),
    "grad in while_loop": _gradients_in_while,
}


@products(OF_PAIRS, always=("vmap of grad", "scan"))
def test_gradients_of_two_examples(case, transformation):
    assert_same(OF_PAIRS[transformation](case), case.expected_of_pairs(), rtol=case.rtol)


def test_vmap_over_some_inputs_sums_the_gradient_of_the_others():
    @custom_gradient
    def product(w, x):
        return w * x, lambda dy: (7 * dy * x, 5 * dy * w)

    w, xs = jnp.float32(2.0), jnp.float32([1.0, 2.0, 3.0])
    per_example = jax.vmap(jax.grad(product, (0, 1)), in_axes=(None, 0))(w, xs)
    assert_same(per_example, (7 * xs, jnp.float32([10.0, 10.0, 10.0])))
    batch = jax.grad(lambda w, xs: jax.vmap(product, (None, 0))(w, xs).sum(), (0, 1))(w, xs)
    assert_same(batch, (jnp.float32(42.0), jnp.float32([10.0, 10.0, 10.0])))


def test_jacobian_of_a_vector_function():
    """`jacrev` runs the rule on a batch of upstreams."""

    @custom_gradient
    def rotated(x):
        return jnp.roll(x, 1) ** 2, lambda dy: 7 * jnp.roll(dy, -1) * x

    x = jnp.float32([1, 2, 3])
    # Row i of the Jacobian has 7 x at the entry that comes to the place i.
    expected = 7 * jnp.roll(jnp.diag(x), 1, axis=0)
    assert_same(jax.jacrev(rotated)(x), expected)
    assert_same(jax.jit(jax.jacrev(rotated))(x), expected)
    assert_same(jax.vmap(jax.jacrev(rotated))(jnp.stack([x, x]))[1], expected)


def test_shapes_without_running():
    """`eval_shape` and `make_jaxpr` know the result, and the rule is not run."""

    @custom_gradient
    def h(x):
        def grad(dy):
            raise AssertionError("the rule was run")

        return {"y": x.astype(jnp.bfloat16)}, grad

    shape = jax.eval_shape(h, jax.ShapeDtypeStruct((2, 3), jnp.float32))
    assert (shape["y"].shape, shape["y"].dtype) == ((2, 3), jnp.bfloat16)
    assert jax.make_jaxpr(h)(jnp.ones(2)).out_avals[0].shape == (2,)


# --- values ---------------------------------------------------------------------------------------


def _in_while(case):
    """Differentiating a while loop backward is no business of JAX; running it is."""
    return lax.while_loop(
        lambda state: state[0] < 2,
        lambda state: (state[0] + 1, state[1] + case.loss(*case.arrays) / 2),
        (0, jnp.float32(0)),
    )[1]


VALUES = {
    "eager": lambda case: case.loss(*case.arrays),
    "jit": lambda case: jax.jit(case.loss)(*case.arrays),
    "value_and_grad": lambda case: jax.value_and_grad(case.loss, case.argnums)(*case.arrays)[0],
    "jit of value_and_grad": lambda case: jax.jit(jax.value_and_grad(case.loss, case.argnums))(
        *case.arrays
    )[0],
    "while_loop": _in_while,
    "fori_loop": lambda case: lax.fori_loop(
        0, 2, lambda _, c: c + case.loss(*case.arrays) / 2, jnp.float32(0)
    ),
}


@products(VALUES, always=("eager",))
def test_value(case, transformation):
    expected = jnp.float32(case.value(*case.arrays))
    actual = VALUES[transformation](case)
    assert_same(actual.astype(jnp.float32), expected, rtol=case.rtol)


def test_value_and_gradient_of_a_forward_loop():
    """A `fori_loop` of known length is a scan, and has a derivative."""

    @custom_gradient
    def square(x):
        return x**2, lambda dy: 7 * dy * x

    def iterated(x):
        return lax.fori_loop(0, 2, lambda _, x: square(x), x)

    # d/dx square(square(x)) = 7 x**2 * 7 x
    assert_same(jax.value_and_grad(iterated)(2.0), (jnp.float32(16.0), jnp.float32(392.0)))
    assert_same(jax.jit(jax.grad(iterated))(2.0), jnp.float32(392.0))


# --- orders ---------------------------------------------------------------------------------------


@cases
def test_second_order(case):
    gradient = differentiated(case.loss, len(case.arrays), 2)
    assert_same(gradient(*case.arrays), case.expected(2), rtol=case.rtol)


@some_cases
def test_third_order(case):
    gradient = differentiated(case.loss, len(case.arrays), 3)
    assert_same(gradient(*case.arrays), case.expected(3), rtol=case.rtol)


@some_cases
def test_second_order_under_jit_vmap_and_checkpoint(case):
    count = len(case.arrays)

    def second(*arrays):
        return differentiated(jax.checkpoint(case.loss), count, 2)(*arrays)

    pairs = jax.tree.map(lambda a: jnp.stack([a, a]), case.arrays)
    expected = jax.tree.map(lambda a: jnp.stack([a, a]), case.expected(2))
    assert_same(jax.jit(jax.vmap(second))(*pairs), expected, rtol=case.rtol)


# --- environments ---------------------------------------------------------------------------------


@some_cases
def test_x64_leaves_float32_alone(case, x64):
    assert_same(_grad(case)(*case.arrays), case.expected(), rtol=case.rtol)


@some_cases
def test_x64(case, x64):
    def widened(tree):
        return jax.tree.map(lambda a: a.astype(jnp.float64), tree)

    actual = jax.jit(_grad(case))(*widened(case.arrays))
    assert_same(actual, widened(case.expected()), rtol=case.rtol)


@some_cases
def test_export(case):
    pytest.importorskip("flatbuffers")  # what `jax.export` serializes with
    exported = export.export(jax.jit(case.loss))(*case.arrays)
    loss = export.deserialize(exported.serialize(vjp_order=2)).call
    count = len(case.arrays)
    assert_same(differentiated(loss, count, 1)(*case.arrays), case.expected(), rtol=case.rtol)
    assert_same(differentiated(loss, count, 2)(*case.arrays), case.expected(2), rtol=case.rtol)


# --- inputs that only the rule uses --------------------------------------------------------------


@custom_gradient
def _scaled_gradient(x, z):
    return x**2, lambda dy: (dy * z, None)


@custom_gradient
def _one_output_ignores(x, z):
    return (x**2, x * z), lambda d1, d2: (d1 * z + d2, None)


# With this flag JAX traces every function on its own, as `jit` does, and then refuses.
refused = pytest.mark.skipif(
    getattr(jax.config, "jax_custom_vjp3", False), reason="JAX refuses, as under a `jit` of its own"
)


@refused
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("first", [0, 1], ids=["x outside", "z outside"])
def test_vmaps_in_each_other_over_what_only_the_rule_uses(first, jit):
    axes = ((None, 0), (0, None)) if first == 0 else ((0, None), (None, 0))
    xs, zs = jnp.asarray([1.0, 2.0, 3.0]), jnp.asarray([1.0, 10.0])

    def total_of(h):
        def f(xs):
            return total(jax.vmap(jax.vmap(h, axes[0]), axes[1])(xs, zs))

        return jax.jit(jax.grad(f))(xs) if jit else jax.grad(f)(xs)

    assert_same(total_of(_scaled_gradient), jnp.full(3, 11.0))
    assert_same(total_of(_one_output_ignores), jnp.full(3, 11.0 + 2))


@refused
def test_three_vmaps_in_each_other_over_what_only_the_rule_uses():
    xs, zs = jnp.asarray([1.0, 2.0, 3.0]), jnp.asarray([1.0, 10.0])

    def f(xs):
        h = jax.vmap(_scaled_gradient, (None, 0))
        for axes in ((0, None), (0, None)):
            h = jax.vmap(h, axes)
        return total(h(jnp.stack([xs, xs, xs]), zs))

    assert_same(jax.grad(f)(xs), jnp.full(3, 33.0))
