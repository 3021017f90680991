"""Run the tests of Keras and the cases of TensorFlow Probability, before and after.

    python -m tests.adopters [keras] [tfp]

"Before" is `jax.custom_gradient`, "after" our decorator in its place. Nothing is installed
here: `pip install keras "tfp-nightly[jax]" jax pytest`. Exits with 1 if a test that passed
before fails after, or if our decorator never ran.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Keras's own tests of what calls `keras.ops.custom_gradient`: the operation, the quantizers, and
# the layers whose quantized forms have a rule.
KERAS = ["ops.core", "quantizers.quantizers", "layers.core.dense", "layers.core.einsum_dense"]
CHOSEN = "custom_gradient or CustomGradient or quantiz or lora or float8 or int8 or int4 or fake"
SUITES = {
    "keras": ["--pyargs", *(f"keras.src.{name}_test" for name in KERAS), "-k", CHOSEN],
    "tfp": ["tests/adopters/tfp_cases.py"],
}


def run(arguments, replaced):
    """Run pytest in a process of its own; return the outcomes, and the calls of our functions."""
    command = [sys.executable, "-m", "pytest", "-vv", "-c", os.devnull, f"--rootdir={ROOT}"]
    command += ["-p", "no:cacheprovider", "-W", "ignore", "--noconftest", "--color=no"]
    command += ["-p", "tests.adopters.replace"] if replaced else []
    environment = {"JAX_PLATFORMS": "cpu", **os.environ, "KERAS_BACKEND": "jax"}
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    outcomes = dict(re.findall(r"^(\S+::.+) (PASSED|FAILED|ERROR)\b", done.stdout, re.M))
    if not outcomes:
        raise RuntimeError(done.stdout + done.stderr)
    calls = re.search(r"tfgrad_jax decorated \d+ functions, (\d+) calls", done.stdout)
    return outcomes, int(calls[1]) if calls else 0


def compare(name):
    """Report on one adopter; return whether nothing was lost."""
    (before, _), (after, calls) = run(SUITES[name], False), run(SUITES[name], True)
    passed = [[*outcomes.values()].count("PASSED") for outcomes in (before, after)]
    print(
        f"{name}: {passed[0]} of {len(before)} pass before, {passed[1]} of {len(after)} after "
        f"({calls} calls of functions that custom_gradient decorates)"
    )
    for test in sorted(before | after):
        old, new = before.get(test, "missing"), after.get(test, "missing")
        if (old, new) != ("PASSED", "PASSED"):
            print(f"  {test}: {old} before, {new} after")
    lost = [test for test in before if before[test] == "PASSED" and after.get(test) != "PASSED"]
    return not lost and calls > 0


if __name__ == "__main__":
    kept = [compare(name) for name in sys.argv[1:] or SUITES]
    sys.exit(not all(kept))
