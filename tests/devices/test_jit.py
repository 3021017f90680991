"""`jit` of arrays on a mesh: XLA places what is between, or the types say where everything is."""

import itertools

import jax
import pytest
from devices import assert_as_by_hand, mesh, needs_eight_devices, put, squared
from helpers import assert_same, sample
from jax.sharding import AxisType, PartitionSpec
from pairs import RULES, STYLES, by_hand

pytestmark = needs_eight_devices
BOTH = ("data", "model")
# Where the weight is split, and where the examples are, over 2 x 4 devices.
PLACEMENTS = {
    "data parallel": (PartitionSpec(), PartitionSpec(BOTH)),
    "tensor parallel": (PartitionSpec(None, "model"), PartitionSpec("data")),
    "fully sharded": (PartitionSpec(None, BOTH), PartitionSpec(BOTH)),
}


def placed(rule, placement, kind):
    over = mesh(("data", 2), ("model", 4), kind=kind)
    return over, [put(a, over, spec) for a, spec in zip(rule.arrays, placement, strict=True)]


CASES = list(itertools.product(RULES, STYLES, PLACEMENTS))


@pytest.mark.parametrize(("name", "style", "placement"), sample(CASES, 6))
def test_placed_by_xla(name, style, placement):
    rule = RULES[name]
    _, arrays = placed(rule, PLACEMENTS[placement], AxisType.Auto)
    hand = squared(by_hand(rule))
    got, sent = assert_as_by_hand(squared(STYLES[style](rule)), hand, *arrays)
    assert_same(jax.device_get(got), jax.device_get(hand(*rule.arrays)), rtol=1e-4, atol=1e-4)
    assert sent.total() > 0 or name != "dense"  # the count is no accident
