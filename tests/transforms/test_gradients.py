"""The declared gradient under every transformation, over the cases of `loss_cases.py`."""

import jax
import jax.numpy as jnp
from helpers import assert_same, total
from jax import lax
from selection import products

from tfgrad_jax import custom_gradient


def _in_cond(case):
    def loss(*arrays):
        return lax.cond(total(arrays) > 0, case.loss, lambda *_: jnp.float32(0), *arrays)

    return case.grad(loss)(*case.arrays)


def _in_switch(case):
    def loss(*arrays):
        branches = [lambda *_: jnp.float32(0), case.loss, lambda *a: 0 * total(a)]
        return lax.switch(jnp.int32(total(arrays) > 0), branches, *arrays)

    return case.grad(loss)(*case.arrays)


def _checkpointed(case, **options):
    return case.grad(jax.checkpoint(case.loss, **options))(*case.arrays)


def _leak_checked(case):
    with jax.check_tracer_leaks():
        return jax.jit(case.grad())(*case.arrays)


def _without_jit(case):
    with jax.disable_jit():
        return jax.jit(case.grad())(*case.arrays)


GRADIENTS = {
    "grad": lambda case: case.grad()(*case.arrays),
    "jit of grad": lambda case: jax.jit(case.grad())(*case.arrays),
    "grad of jit": lambda case: case.grad(jax.jit(case.loss))(*case.arrays),
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


@products(GRADIENTS, always=("grad", "jit of grad"), slow=("check_tracer_leaks", "switch"))
def test_gradient(case, transformation):
    assert_same(GRADIENTS[transformation](case), case.expected(), rtol=case.rtol)


def _scanned(case):
    def loss(*pairs):
        body = lambda c, arrays: (c + case.loss(*arrays), None)  # noqa: E731
        return lax.scan(body, jnp.float32(0), pairs)[0]

    return case.grad(loss)(*case.pairs)


def _gradients_in_scan(case):
    body = lambda c, arrays: (c, case.grad()(*arrays))  # noqa: E731
    return lax.scan(body, 0, case.pairs)[1]


def _gradients_in_while(case):
    def body(state):
        i, gradients = state
        found = case.grad()(*jax.tree.map(lambda a: a[i], case.pairs))
        return i + 1, jax.tree.map(lambda all_, g: all_.at[i].set(g), gradients, found)

    start = (0, jax.tree.map(jnp.zeros_like, case.pairs))
    return lax.while_loop(lambda state: state[0] < 2, body, start)[1]


OF_PAIRS = {
    "vmap of grad": lambda case: jax.vmap(case.grad())(*case.pairs),
    "grad of vmap": lambda case: case.grad(lambda *p: jnp.sum(jax.vmap(case.loss)(*p)))(
        *case.pairs
    ),
    "jit of vmap of grad": lambda case: jax.jit(jax.vmap(case.grad()))(*case.pairs),
    "scan": _scanned,
    "grad in scan": _gradients_in_scan,
    "map": lambda case: lax.map(lambda arrays: case.grad()(*arrays), case.pairs),
    "grad in while_loop": _gradients_in_while,
}


@products(OF_PAIRS, always=("vmap of grad", "scan"))
def test_gradients_of_two_examples(case, transformation):
    assert_same(OF_PAIRS[transformation](case), case.expected_of_pairs(), rtol=case.rtol)


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
