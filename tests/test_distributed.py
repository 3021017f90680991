"""`examples/train_distributed.py` on one and on several processes: the same training, to rounding.

What is right comes from a loop without decorated layers, meshes and processes: plain autodiff of
the network of `train_digits.py`, in double precision, where rounding flips none of the signs.
"""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from support.helpers import assert_same

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("as_users_run_it", "x64")]

for package in ("matplotlib", "sklearn", "tqdm"):
    pytest.importorskip(package)
optax = pytest.importorskip("optax")
ocp = pytest.importorskip("orbax.checkpoint")

EXAMPLES = Path(__file__).parent.parent / "examples"
AGAIN = "Start all processes again with --resume to continue from the last checkpoint."
BATCH, SEED = 32, 3
START = 900  # seconds that processes may take to start on a busy machine
MINUTE = 60


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module("train_distributed")
    finally:
        sys.path.remove(str(EXAMPLES))


def arguments(out, steps, *more):
    common = {"--steps": steps, "--batch": BATCH, "--seed": SEED, "--out": out}
    return [*(str(part) for option in common.items() for part in option), *more]


def start(out, steps, *more):
    """Start the program as a user does, in double precision."""
    return subprocess.Popen(
        [sys.executable, EXAMPLES / "train_distributed.py", *arguments(out, steps, *more)],
        env=os.environ | {"JAX_ENABLE_X64": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def expected(example, steps):
    """Return the weights at the start, and the state after training by plain autodiff."""
    data, _ = example.load(SEED)
    init_key, noise_key = jax.random.split(jax.random.key(SEED))
    sizes = (data.images.shape[1], *example.HIDDEN, example.CLASSES)
    params = initial = example.initialize(init_key, sizes)
    optimizer = optax.adam(optax.cosine_decay_schedule(example.LEARNING_RATE, steps))
    state = optimizer.init(params)

    def activation(x):  # its value is a sign, and its derivative that of tanh
        smooth = jax.numpy.tanh(x)
        return smooth + jax.lax.stop_gradient(jax.numpy.sign(x) - smooth)

    @jax.jit
    def advance(params, state, images, labels, step):
        noise = jax.random.normal(jax.random.fold_in(noise_key, step), images.shape)

        def loss(params):
            x = images + example.NOISE * noise
            *hidden, (weights, biases) = params
            for w, b in hidden:
                x = activation(x @ w + b)
            logits = x @ weights + biases
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    for step in range(1, steps + 1):
        random = np.random.default_rng((SEED, step))
        chosen = random.choice(len(data.labels), BATCH, replace=False)
        params, state = advance(params, state, data.images[chosen], data.labels[chosen], step)
    return initial, example.State(params, state)


def assert_trained(example, out, steps):
    """Compare all that the last checkpoint holds."""
    initial, right = expected(example, steps)
    content = ocp.args.Composite(
        state=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, right))
    )
    with ocp.CheckpointManager(out) as manager:
        assert manager.latest_step() == steps
        actual = manager.restore(steps, args=content).state
    assert actual.params[0][0].dtype == np.float64
    for (start, _), (end, _) in zip(initial, right.params, strict=True):
        assert abs(end - start).max() > 1e-3  # each layer learned something
    assert_same(actual, right, rtol=1e-7, atol=1e-9)


class TestSameResult:
    def test_all_devices_of_one_process(self, example, tmp_path, capsys):
        example.main(arguments(tmp_path / "run", 4, "--shard"))
        assert "4 steps on" in capsys.readouterr().out
        assert_trained(example, tmp_path / "run", 4)

    @pytest.mark.parametrize(
        ("processes", "more", "steps"), [(2, ["--shard"], 4), (4, [], 60)], ids=["2, sharded", "4"]
    )
    def test_processes(self, example, tmp_path, processes, more, steps):
        program = start(tmp_path / "run", steps, "--processes", str(processes), *more)
        out, err = program.communicate(timeout=START)
        assert program.returncode == 0, err
        assert f"{steps} steps on {processes} devices: test accuracy" in out
        assert f"{steps}/{steps}" in err and err.count(f"{steps}/{steps}") <= 2  # one progress bar
        assert_trained(example, tmp_path / "run", steps)


def children_at(path, program):
    """Wait for a checkpoint, in the middle of the work; return the ids of the processes."""
    deadline = time.monotonic() + START
    while not path.exists():
        assert program.poll() is None, program.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    found = subprocess.check_output(["pgrep", "-P", str(program.pid)], text=True)
    return [int(line) for line in found.split()]


@pytest.mark.timeout(3 * START)
@pytest.mark.skipif(shutil.which("pgrep") is None, reason="finds the processes with pgrep")
class TestFailure:
    STEPS = 120

    def test_the_others_end_and_resume_loses_nothing(self, example, tmp_path):
        run = tmp_path / "run"
        often = ["--shard", "--save-every", "10", "--processes", "2"]
        program = start(run, self.STEPS, *often)
        pids = children_at(run / "20", program)
        os.kill(pids[0], signal.SIGKILL)
        _, err = program.communicate(timeout=MINUTE)
        assert program.returncode == 2
        assert "process 0 of 2 died of SIGKILL" in err and AGAIN in err
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        reached = max(int(path.name) for path in run.iterdir() if path.name.isdigit())
        assert 20 <= reached < self.STEPS

        program = start(run, self.STEPS, "--shard", "--resume", "--processes", "4")
        out, err = program.communicate(timeout=START)
        assert program.returncode == 0, err
        assert f"resumed after step {reached}\n" in out
        assert_trained(example, run, self.STEPS)
