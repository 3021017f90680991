"""`jit` of arrays on a mesh: XLA places what is between, or the types say where everything is."""

import jax
import pytest
from devices import assert_as_by_hand, mesh, needs_eight_devices, put, squared
from helpers import assert_same
from jax.sharding import AxisType, PartitionSpec
from pairs import RULES, STYLES, by_hand

pytestmark = [needs_eight_devices, pytest.mark.deep]
every_style = pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
BOTH = ("data", "model")
CASES = [*((name, "undeclared") for name in RULES), ("dense", "inputs"), ("dense", "declared")]

SQUARE = [name for name, rule in RULES.items() if rule.arrays[0].shape == rule.arrays[1].shape]

# Where the weight is split, and where the examples are, over 2 x 4 devices.
PLACEMENTS = {
    "data parallel": (PartitionSpec(), PartitionSpec(BOTH)),
    "tensor parallel": (PartitionSpec(None, "model"), PartitionSpec("data")),
    "fully sharded": (PartitionSpec(None, BOTH), PartitionSpec(BOTH)),
}


def placed(rule, placement, kind):
    over = mesh(("data", 2), ("model", 4), kind=kind)
    return over, [put(a, over, spec) for a, spec in zip(rule.arrays, placement, strict=True)]


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize(("name", "style"), CASES)
def test_placed_by_xla(name, style, placement):
    rule = RULES[name]
    _, arrays = placed(rule, placement, AxisType.Auto)
    hand = squared(by_hand(rule))
    got, sent = assert_as_by_hand(squared(STYLES[style](rule)), hand, *arrays)
    assert_same(jax.device_get(got), jax.device_get(hand(*rule.arrays)), rtol=1e-4, atol=1e-4)
    assert sent.total() > 0 or name != "dense"  # the count is no accident


# In `dense`, the types do not say where a product over a split axis is to be.
@pytest.mark.parametrize(
    ("name", "style", "specs"),
    [
        *((name, style, ("data", "data")) for name, style in CASES if name in SQUARE),
        *(("normalize", style, (None, rows)) for style in STYLES for rows in ("data", BOTH)),
    ],
)
def test_placed_by_type(name, style, specs):
    rule = RULES[name]
    over, arrays = placed(rule, map(PartitionSpec, specs), AxisType.Explicit)
    with jax.set_mesh(over):
        hand = squared(by_hand(rule))
        got, _ = assert_as_by_hand(squared(STYLES[style](rule)), hand, *arrays)
        assert got[1].sharding.spec == PartitionSpec(specs[1], None)
    assert_same(jax.device_get(got), jax.device_get(hand(*rule.arrays)), rtol=1e-4)


@every_style
def test_gradient_that_is_placed_elsewhere_is_refused(style):
    """The weight is whole and the rule's gradient for it is not: by hand that is an error too."""
    rule = RULES["elementwise"]
    over, arrays = placed(rule, PLACEMENTS["data parallel"], AxisType.Explicit)
    with jax.set_mesh(over):
        for way in (by_hand, style):
            with pytest.raises((TypeError, ValueError), match=r"float32\[8@\(data,model\),16\]"):
                jax.jit(squared(way(rule)))(*arrays)
