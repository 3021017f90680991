"""What is lowered: for CPUs, GPUs and TPUs the operations of hand-written rules.

`jax.export` lowers for platforms that this machine does not have.
"""

import collections
import itertools
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from support.helpers import assert_same, sample
from support.pairs import RULES, STYLES, by_hand, undeclared

from tfgrad_jax._jax.compat import KEEPS_CUSTOM_JVP

PLATFORMS = ("cpu", "cuda", "tpu")
CASES = list(itertools.product(RULES, STYLES))


def linear(f):
    return lambda *args: sum(jnp.sum(y) for y in jax.tree.leaves(f(*args)))


def square(f):
    return lambda *args: jnp.sum(f(*args) ** 2)


def gradient(loss):
    return jax.grad(loss, (0, 1))


def second(loss):
    """Return the derivative of a function of the gradient."""
    return gradient(linear(lambda *args: jax.tree.map(jnp.sin, gradient(loss)(*args))))


def operations(f, args):
    """Count the operations of the StableHLO for all platforms."""
    exported = export.export(jax.jit(f), platforms=PLATFORMS)(*args)
    assert exported.platforms == PLATFORMS
    return collections.Counter(re.findall(r"\b(?:stablehlo|chlo)\.\w+", exported.mlir_module()))


@pytest.mark.parametrize(("name", "style"), sample(CASES, 4, [("dense", s) for s in STYLES]))
def test_the_operations_are_those_of_a_hand_written_rule(name, style):
    rule = RULES[name]
    h, hand = STYLES[style](rule), by_hand(rule)
    of_order = (lambda f: f, lambda f: gradient(square(f)), lambda f: second(linear(f)))
    reads_output = name in ("dense", "softmax")  # by hand, JAX differentiates what made it
    for of in of_order[: 3 - reads_output]:
        ours = operations(of(h), rule.arrays)
        # From JAX 0.12 on, a bit cast to its own type marks what is not differentiated, so that JAX
        # does not transpose it. It compiles to nothing.
        assert ours.pop("stablehlo.bitcast_convert", 0) <= KEEPS_CUSTOM_JVP
        assert ours == operations(of(hand), rule.arrays)
        assert ours.total() > 1


LOADED = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax import export
loss = export.deserialize(bytearray(open(sys.argv[1], "rb").read())).call
args = [jnp.asarray(a) for a in np.load(sys.argv[2]).values()]
first = jax.grad(loss, (0, 1))
second = jax.grad(lambda *args: sum(jnp.sum(g) for g in first(*args)), (0, 1))
assert "tfgrad_jax" not in sys.modules
print(json.dumps([np.asarray(a).tolist() for a in (loss(*args), *first(*args), *second(*args))]))
"""


def test_loaded_in_a_fresh_process(tmp_path):
    """What is written needs this package no more, and has two derivatives: both 7 times plain's."""
    pytest.importorskip("flatbuffers")  # what `jax.export` serializes with
    rule = RULES["elementwise"]
    exported = export.export(jax.jit(linear(undeclared(rule))), platforms=PLATFORMS)(*rule.arrays)
    program, arrays = tmp_path / "loss", tmp_path / "arrays.npz"
    program.write_bytes(exported.serialize(vjp_order=2))
    np.savez(arrays, *rule.arrays)
    done = subprocess.run(
        [sys.executable, "-c", LOADED, program, arrays], capture_output=True, text=True, check=True
    )
    value, *derivatives = map(np.float32, json.loads(done.stdout))

    plain = linear(lambda w, x: jnp.sin(w * x))
    first, again = gradient(plain), gradient(linear(gradient(plain)))
    expected = [7 * d for d in (*first(*rule.arrays), *again(*rule.arrays))]
    assert_same([value, *derivatives], [plain(*rule.arrays), *expected], rtol=1e-4)
