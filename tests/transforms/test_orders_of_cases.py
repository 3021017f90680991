"""Second and third derivatives of the cases of `loss_cases.py`, also in other environments."""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same, differentiated
from jax import export
from selection import cases, some_cases

pytestmark = pytest.mark.slow

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
    assert_same(case.grad()(*case.arrays), case.expected(), rtol=case.rtol)


@some_cases
def test_x64(case, x64):
    def widened(tree):
        return jax.tree.map(lambda a: a.astype(jnp.float64), tree)

    actual = jax.jit(case.grad())(*widened(case.arrays))
    assert_same(actual, widened(case.expected()), rtol=case.rtol)


@some_cases
def test_export(case):
    pytest.importorskip("flatbuffers")  # what `jax.export` serializes with
    exported = export.export(jax.jit(case.loss))(*case.arrays)
    loss = export.deserialize(exported.serialize(vjp_order=2)).call
    count = len(case.arrays)
    assert_same(differentiated(loss, count, 1)(*case.arrays), case.expected(), rtol=case.rtol)
    assert_same(differentiated(loss, count, 2)(*case.arrays), case.expected(2), rtol=case.rtol)
