"""What needs a process of its own: memory of a check, and training steps on several devices.

`checks` and `distributed` are called by `python -m benchmarks`. They start
`python -m benchmarks.child TASK '{...}'`, which prints a line of JSON.
"""

import functools
import json
import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tfgrad_jax
from benchmarks.networks import GPT, TOY, Shape
from benchmarks.results import OURS, Group
from benchmarks.rules import RMSNORM
from benchmarks.timing import race
from benchmarks.ways import HAND, PLAIN, Way
from benchmarks.workload import UNOPTIMIZED, normal
from tfgrad_jax import testing

CHECK, AUTODIFF, GRADIENT = "check_gradient", "jax.test_util.check_grads", "one gradient"
MOVED = {"collectives": "", "moved": "bytes", "temp memory": "bytes"}
COLLECTIVE = re.compile(
    r"= (.*?) (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-\w+)(?:-start)?\("
)
ARRAY = re.compile(r"(?:pred|[a-z]+(\d+))\[([\d,]*)\]")


def ask(task: str, devices: int = 1, **question: Any) -> dict[str, Any]:
    """Do the task in a new process, with so many devices, and return its answer."""
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),  # as here
    }
    command = [sys.executable, "-P", "-m", "benchmarks.child", task, json.dumps(question)]
    pipe = {"stdout": subprocess.PIPE, "text": True, "timeout": 600}
    done = subprocess.run(command, env=env, check=True, **pipe)
    return json.loads(done.stdout.splitlines()[-1])


# --- time and memory of check_gradient and explain ------------------------------------------------


def _checks(n: int) -> dict[str, Callable[[], Any]]:
    from jax.test_util import check_grads

    h = Way(OURS)(RMSNORM)
    args = normal(1, (n,), jnp.float32), normal(0, (n, n), jnp.float32)
    gradient = jax.value_and_grad(lambda *a: h(*a).sum(), (0, 1))
    inputs_only = tfgrad_jax.custom_gradient(RMSNORM.pair)
    return {
        GRADIENT: lambda: gradient(*args),
        AUTODIFF: lambda: check_grads(h, args, 1, rtol=1e-1, atol=1e-1),
        CHECK: lambda: bool(testing.check_gradient(h, *args, reference=RMSNORM.value)),
        "explain": lambda: str(tfgrad_jax.explain(inputs_only, *args)),
    }


def checks(size: str) -> list[Group]:
    """Compare `check_gradient` and `explain` with a gradient, and with JAX's own check."""
    n = 16 if size == "toy" else 512
    calls = _checks(n)
    peaks = {name: ask("checks", name=name, n=n)["bytes"] for name in calls}
    times = race(calls, CHECK, size, seconds=3)
    return [
        Group("checks", "RMSNorm", "time", "s", **times),
        Group("checks", "RMSNorm", "memory", "bytes", peaks),
    ]


def _peak(name: str, n: int) -> dict[str, float]:
    """Return by how much one call raises the peak of this process."""
    call = _checks(n)[name]
    before = _high_water()
    jax.block_until_ready(call())
    return {"bytes": _high_water() - before}


def _high_water() -> float:
    """Return the peak of this process; `getrusage` would begin with the peak of its parent."""
    text = Path("/proc/self/status").read_text()
    return 1024.0 * int(re.search(r"VmHWM:\s*(\d+)", text)[1])


# --- a training step on several devices -----------------------------------------------------------


def distributed(devices: int, processes: int, size: str) -> list[Group]:
    """Train GPT-2 data-parallel on so many devices, the cores of this CPU, in so many processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    given = {"address": address, "processes": processes, "size": size}
    with ThreadPoolExecutor(processes) as pool:  # each waits for a process
        train = functools.partial(ask, "distributed", devices // processes, **given)
        found, *_ = pool.map(lambda process: train(process=process), range(processes))
    key = "distributed", f"{devices} devices, {processes} processes"
    counted = [Group(*key, what, unit, found[what]) for what, unit in MOVED.items()]
    return [*counted, Group(*key, "time", "s", **found["time"])]


def _train(address: str, processes: int, process: int, size: str) -> dict[str, Any]:
    if processes > 1:
        jax.distributed.initialize(address, processes, process)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    spec = jax.sharding.PartitionSpec
    whole, split = (jax.sharding.NamedSharding(mesh, s) for s in (spec(), spec("data")))
    shape = (TOY if size == "toy" else Shape(2, 8, 64, 256, 4, 4096))._replace(batch=8)
    shardings = whole, split, split
    args = jax.jit(lambda: GPT.arguments(shape, jnp.float32), out_shardings=shardings)()
    steps, found = {}, {measure: {} for measure in MOVED}
    for way in (PLAIN, HAND, OURS):
        step = jax.jit(GPT.function("grad", way, shape), in_shardings=shardings)
        program = step.lower(*args).compile(UNOPTIMIZED if size == "toy" else None)
        steps[way] = functools.partial(program, *args)
        moved = collectives(program.as_text())
        found["collectives"][way] = len(moved)
        found["moved"][way] = sum(moved)
        found["temp memory"][way] = program.memory_analysis().temp_size_in_bytes
    # A step takes longer than `SHORTEST`, so that all processes make the same calls.
    return {**found, "time": race(steps, OURS, size, rounds=9)}


def collectives(text: str) -> list[int]:
    """Return the bytes of the result of each collective operation of a compiled program."""
    return [
        sum(
            int(bits or 8) // 8 * math.prod(int(n) for n in dims.split(",") if n)
            for bits, dims in ARRAY.findall(arrays)
        )
        for arrays in COLLECTIVE.findall(text)
    ]


if __name__ == "__main__":
    task, text = sys.argv[1:]
    print(json.dumps({"checks": _peak, "distributed": _train}[task](**json.loads(text))))
