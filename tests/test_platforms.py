"""What is lowered for CPUs, GPUs and TPUs: the operations of hand-written rules, and no others.

`jax.export` lowers for platforms that this machine does not have.
"""

import collections
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same
from jax import export, lax
from pairs import RULES, STYLES, Rule, by_hand, undeclared

pytestmark = pytest.mark.deep

PLATFORMS = ("cpu", "cuda", "tpu")
W, X = RULES["elementwise"].arrays


def _cumulative_sum(w, x):
    return jnp.cumsum(w * x, axis=1), (w, x)


def _cumulative_sum_rule(residuals, dy):
    w, x = residuals
    dz = 7 * lax.cumsum(dy, axis=1, reverse=True)
    return dz * x, dz * w


def _log_sum_exp(w, x):
    y = jax.nn.logsumexp(w * x, axis=1)
    return y, (w, x, y)


def _log_sum_exp_rule(residuals, dy):
    w, x, y = residuals
    dz = 7 * dy[:, None] * jnp.exp(w * x - y[:, None])
    return dz * x, dz * w


def _spike(w, x):
    z = w * x - 0.5
    return (z > 0).astype(z.dtype), (w, x, z)


def _spike_rule(residuals, dy):
    w, x, z = residuals
    dz = 7 * dy / (1 + jnp.abs(z)) ** 2
    return dz * x, dz * w


def _convolution(w, x):
    same = lax.conv_general_dilated(x[None, None], w[None, None, :3, :3], (1, 1), "SAME")
    return same[0, 0], (w, x)


def _convolution_rule(residuals, dy):
    w, x = residuals
    turned = w[None, None, 2::-1, 2::-1]
    dx = lax.conv_general_dilated(7 * dy[None, None], turned, (1, 1), "SAME")[0, 0]
    dw = jnp.zeros_like(w).at[1, 1].set(7 * jnp.sum(dy * x))
    return dw, dx


def _newton_root(w, x):
    def step(state):
        i, y = state
        return i + 1, 0.5 * (y + w * x / y)

    y = lax.while_loop(lambda state: state[0] < 6, step, (0, jnp.ones_like(x)))[1]
    return y, (w, x)


def _newton_root_rule(residuals, dy):
    w, x = residuals
    dz = 7 * dy * 0.5 * lax.rsqrt(w * x)  # the loop itself has no gradient
    return dz * x, dz * w


def _gathered(w, x):
    rows = jnp.argsort(x[:, 0])
    return w[rows] * x, (w, x, rows)


def _gathered_rule(residuals, dy):
    w, x, rows = residuals
    return jnp.zeros_like(w).at[rows].add(7 * dy * x), 7 * dy * w[rows]


DOZEN = RULES | {
    "cumulative sum": Rule(_cumulative_sum, _cumulative_sum_rule, (W, X)),
    "log-sum-exp": Rule(_log_sum_exp, _log_sum_exp_rule, (W, X)),
    "spike": Rule(_spike, _spike_rule, (W, X)),
    "convolution": Rule(_convolution, _convolution_rule, (W, X)),
    "while loop": Rule(_newton_root, _newton_root_rule, (W, X)),
    "gather": Rule(_gathered, _gathered_rule, (W, X)),
}
ALL_STYLES = ("dense", "spike")
CASES = [
    (name, style)
    for name in DOZEN
    for style in STYLES
    if style == "undeclared" or name in ALL_STYLES
]


def linear(f):
    return lambda *args: jnp.sum(f(*args))


def square(f):
    return lambda *args: jnp.sum(f(*args) ** 2)


def gradient(loss):
    return jax.grad(loss, (0, 1))


def second(loss):
    """Return the derivative of a function of the gradient."""
    return jax.grad(lambda *args: sum(jnp.sum(jnp.sin(g)) for g in gradient(loss)(*args)), (0, 1))


def operations(f, args):
    """Count the operations of the StableHLO for all platforms."""
    exported = export.export(jax.jit(f), platforms=PLATFORMS)(*args)
    assert exported.platforms == PLATFORMS
    return collections.Counter(re.findall(r"\b(?:stablehlo|chlo)\.\w+", exported.mlir_module()))


@pytest.mark.parametrize(("name", "style"), CASES)
@pytest.mark.parametrize(
    "of",
    [
        lambda f: f,
        lambda f: gradient(square(f)),
        lambda f: second(linear(f)),
    ],
    ids=["value", "gradient", "second derivative"],
)
def test_operations_of_hand_written_rules(name, style, of):
    rule = DOZEN[name]
    ours = operations(of(STYLES[style](rule)), rule.arrays)
    assert ours == operations(of(by_hand(rule)), rule.arrays)
    assert ours.total() > 1


@pytest.mark.parametrize(("name", "style"), CASES)
def test_operations_where_the_value_is_differentiated_again(name, style):
    """By hand it takes a forward pass that calls the function itself, or a wrong number results."""
    rule = DOZEN[name]
    right = jax.custom_vjp(lambda *args: rule.forward(*args)[0])
    right.defvjp(lambda *args: (right(*args), rule.forward(*args)[1]), rule.backward)
    h = STYLES[style](rule)
    ours, hand = (operations(second(square(f)), rule.arrays) for f in (h, right))
    assert not ours - hand  # no operation more often
    assert_same(
        jax.jit(second(square(h)))(*rule.arrays),
        jax.jit(second(square(right)))(*rule.arrays),
        rtol=1e-4,
        atol=1e-3,
    )


LOADED = """
import json, sys
import jax, jax.numpy as jnp
import numpy as np
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
    loss = jax.jit(linear(undeclared(rule)))
    exported = export.export(loss, platforms=PLATFORMS)(*rule.arrays)
    program, arrays = tmp_path / "loss", tmp_path / "arrays.npz"
    program.write_bytes(exported.serialize(vjp_order=2))
    np.savez(arrays, *rule.arrays)
    done = subprocess.run(
        [sys.executable, "-c", LOADED, program, arrays], capture_output=True, text=True, check=True
    )
    value, *derivatives = map(np.float32, json.loads(done.stdout))

    def plain(w, x):
        return jnp.sum(jnp.sin(w * x))

    first = jax.grad(plain, (0, 1))
    second = jax.grad(lambda *args: sum(jnp.sum(g) for g in first(*args)), (0, 1))
    expected = [7 * d for d in (*first(*rule.arrays), *second(*rule.arrays))]
    assert_same([value, *derivatives], [plain(*rule.arrays), *expected], rtol=1e-4)
