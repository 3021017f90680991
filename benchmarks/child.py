"""What needs a process of its own: memory of a check, and training steps on several devices.

`python -m benchmarks.child TASK '{...}'` prints a line of JSON.
"""

import functools
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tfgrad_jax
from benchmarks.real import TOY, Shape, adam_step, gpt, gpt_arguments
from benchmarks.results import OURS, Group
from benchmarks.rules import RMSNORM
from benchmarks.timing import Settings, compare
from benchmarks.workload import HAND, PLAIN, UNOPTIMIZED, Way, normal
from tfgrad_jax import testing

CHECKS, DISTRIBUTED = "checks", "distributed"
CHECK, AUTODIFF, GRADIENT = "check_gradient", "jax.test_util.check_grads", "one gradient"
COLLECTIVE = re.compile(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-\w+)"
                        r"(?:-start)?\(")  # fmt: skip
ARRAY = re.compile(r"(pred|[a-z]+(\d+))\[([\d,]*)\]")


def start(task: str, given: Mapping[str, Any], devices: int = 1) -> subprocess.Popen[str]:
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),  # as here
    }
    command = [sys.executable, "-P", "-m", "benchmarks.child", task, json.dumps(given)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=env, text=True, **pipes)


def answer(child: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = child.communicate()
    if child.returncode:
        raise RuntimeError(err[-2000:])
    return json.loads(out.splitlines()[-1])


# --- time and memory of check_gradient and explain ------------------------------------------------


def _checks(size: int) -> dict[str, Callable[[], Any]]:
    from jax.test_util import check_grads

    h = Way(OURS)(RMSNORM)
    args = normal(1, (size,), jnp.float32), normal(0, (size, size), jnp.float32)
    gradient = jax.value_and_grad(lambda *a: h(*a).sum(), (0, 1))
    inputs_only = tfgrad_jax.custom_gradient(RMSNORM.pair)
    return {
        GRADIENT: lambda: gradient(*args),
        AUTODIFF: lambda: check_grads(h, args, 1, rtol=1e-1, atol=1e-1),
        CHECK: lambda: bool(testing.check_gradient(h, *args, reference=RMSNORM.value)),
        "explain": lambda: str(tfgrad_jax.explain(inputs_only, *args)),
    }


def checks(settings: Settings) -> list[Group]:
    """Compare `check_gradient` and `explain` with a gradient, and with JAX's own check."""
    size = 16 if settings.toy else 512
    calls = _checks(size)
    measured = compare(calls, CHECK, 3 * settings.scale, settings.rounds(5, 20))
    peaks = {
        name: float(answer(start(CHECKS, {"name": name, "size": size}))["bytes"]) for name in calls
    }
    case, note = "RMSNorm", f"{size} x {size}; memory: how much the peak of the process rose"
    return [
        Group.timed(CHECKS, case, "time", measured, note),
        Group(CHECKS, case, "memory", "bytes", peaks, note=note),
    ]


def _peak(name: str, size: int) -> dict[str, Any]:
    call = _checks(size)[name]
    before = _high_water()
    jax.block_until_ready(call())
    return {"bytes": _high_water() - before}


def _high_water() -> int:
    """Return the peak of this process; `getrusage` would begin with that of its parent."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s*(\d+)", text)[1])


# --- a training step on several devices -----------------------------------------------------------


def distributed(devices: int, processes: int, settings: Settings) -> list[Group]:
    """Train data-parallel on so many devices of this machine, its CPU, in so many processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    given = {"address": address, "processes": processes, "quick": settings.toy}
    children = [
        start(DISTRIBUTED, {**given, "process": i}, devices // processes) for i in range(processes)
    ]
    try:
        found, *_ = [answer(child) for child in children]
    finally:  # where one has failed, the others wait for it
        for child in children:
            child.kill()
    case = f"{devices} devices, {processes} processes"
    note = "GPT-2 training step, data-parallel; devices share the cores of one CPU"
    groups = [
        Group.counted(DISTRIBUTED, case, measure, unit, found[measure], note=note)
        for measure, unit in (("collectives", ""), ("moved", "bytes"), ("temp memory", "bytes"))
    ]
    times = found["times"]
    return [*groups, Group(DISTRIBUTED, case, "time", "s", note=note, **times)]


def _train(address: str, processes: int, process: int, quick: bool) -> dict[str, Any]:
    if processes > 1:
        jax.distributed.initialize(address, processes, process)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    whole, split = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        for axes in ((), ("data",))
    )
    shape = (TOY if quick else Shape(2, 8, 64, 256, 4, 4096))._replace(batch=8)
    shardings = whole, split, split
    make = functools.partial(gpt_arguments, shape, jnp.float32)
    args = jax.jit(make, out_shardings=shardings)()
    programs, found = {}, {"collectives": {}, "moved": {}, "temp memory": {}}
    for way in (PLAIN, HAND, OURS):
        step = jax.jit(adam_step(gpt(Way(way), shape)), in_shardings=shardings)
        programs[way] = step.lower(*args).compile(UNOPTIMIZED if quick else None)
        moved = collectives(programs[way].as_text())
        found["collectives"][way], found["moved"][way] = float(len(moved)), float(sum(moved))
        found["temp memory"][way] = programs[way].memory_analysis().temp_size_in_bytes
    # A step takes longer than `SHORTEST`, so that all processes make the same calls.
    steps = {way: functools.partial(program, *args) for way, program in programs.items()}
    group = Group.timed("", "", "", compare(steps, OURS, 0, (2, 2) if quick else (9, 9)))
    fields = ("values", "quartiles", "samples", "ratios", "ratio_quartiles")
    return {**found, "times": {field: getattr(group, field) for field in fields}}


def collectives(text: str) -> list[int]:
    """Return the bytes of the result of each collective operation of a compiled program."""
    sizes = []
    for shapes, _ in COLLECTIVE.findall(text):
        sizes.append(
            sum(
                int(bits or 8) // 8 * int(np.prod([int(n) for n in dims.split(",") if n]))
                for _, bits, dims in ARRAY.findall(shapes)
            )
        )
    return sizes


if __name__ == "__main__":
    task, text = sys.argv[1:]
    print(json.dumps({CHECKS: _peak, DISTRIBUTED: _train}[task](**json.loads(text))))
