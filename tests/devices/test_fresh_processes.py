"""Which call is the first of a process must not matter: nothing is learned about JAX inside a mesh.

The suite would hide it: another test has been there before. So each kind of mesh has a process of
its own, and each program there a package that has just been imported. The gradients are declared
seven times too large, and compared with those of the same function without a decorator.
"""

import contextlib
import importlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

N = 4
PROGRAMS = {  # on each device: a weight that all of them share, and some rows
    "no collective": lambda w, x: w * x,
    "pmean": lambda w, x: w * (x - lax.pmean(x.mean(0), "data")),
    "psum": lambda w, x: x * lax.psum(w * x, "data"),
    "all_gather": lambda w, x: x * lax.all_gather(w * x, "data")[1],
    "all_to_all": lambda w, x: lax.all_to_all(w * x, "data", 0, 0, tiled=True),
    "axis_index": lambda w, x: w * x * lax.axis_index("data"),
}
WORLDS = {  # around the function on each device; around all devices
    "value": (lambda f: f, lambda f: f),
    "jit": (lambda f: f, jax.jit),
    "jit inside": (jax.jit, lambda f: f),
    "checkpoint": (jax.checkpoint, lambda f: f),
    "scan": (lambda f: lambda x: lax.map(f, x[None])[0], lambda f: f),
    "cond": (lambda f: lambda x: lax.cond(True, f, f, x), lambda f: f),
}


def decorated(f, w):
    """Return `x -> f(w, x)` by a package that has been imported for the first time."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tfgrad_jax"]:
        del sys.modules[name]
    custom_gradient = importlib.import_module("tfgrad_jax").custom_gradient

    @custom_gradient(variables=w)
    def h(x):
        y, pull = jax.vjp(f, w, x)

        def grad(dy, variables):
            dw, dx = pull(7 * dy)
            return dx, dw

        return y, grad

    return h


def check(kind, program, world, with_gradient):
    mesh = jax.make_mesh((N,), ("data",), axis_types=(AxisType[kind],))
    f, (inside, around) = PROGRAMS[program], WORLDS[world]
    w = jax.device_put(np.arange(1.0, 4.0, dtype=np.float32), NamedSharding(mesh, P()))
    x = np.arange(12.0 * N, dtype=np.float32).reshape(4 * N, 3) / 10
    x = jax.device_put(x, NamedSharding(mesh, P("data")))

    def over(run):
        specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
        return around(jax.shard_map(run, mesh=mesh, **specs))

    ours = over(lambda w, x: inside(decorated(f, w))(x))
    plain = over(f)
    loss = lambda f: lambda w, x: jnp.sum(jnp.sin(f(w, x)))  # noqa: E731
    with jax.set_mesh(mesh) if kind == "Explicit" else contextlib.nullcontext():
        if not with_gradient:
            return np.testing.assert_allclose(ours(w, x), plain(w, x), rtol=1e-5)
        for a, b in zip(*(jax.grad(loss(h), (0, 1))(w, x) for h in (ours, plain)), strict=True):
            np.testing.assert_allclose(a, 7 * b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_the_first_call_of_a_process_may_be_inside_a_mesh(kind):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={N}"
    env = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", __file__, kind]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    for program, world in zip(PROGRAMS, WORLDS, strict=True):  # each of them once
        print(program, world, flush=True)
        check(sys.argv[1], program, world, with_gradient=False)
        check(sys.argv[1], program, world, with_gradient=True)
