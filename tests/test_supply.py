"""What comes with an import: nothing but JAX, no network, no file that is written, no `eval`."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import tfgrad_jax

PACKAGE = Path(tfgrad_jax.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
# Parts of the standard library that reach out of the process, or run text.
REACHING = {
    "asyncio", "ctypes", "ftplib", "http", "importlib", "marshal", "multiprocessing", "os",
    "pickle", "runpy", "shutil", "smtplib", "socket", "ssl", "subprocess",
    "tempfile", "urllib", "webbrowser",
}  # fmt: skip

# Events of what looks at objects, makes functions of code that exists, imports parts of its own.
HARMLESS = {"builtins", "function", "gc", "import", "object"}

USE = """
import json, sys
import jax, jax.numpy as jnp
before = set(sys.modules)
events = []

def watch(event, args):
    # What our own code opens, writes, starts or evaluates, once it is imported.
    global ready
    if ready and event != "sys._getframe":
        ready = False  # to ask who calls is an event too
        caller = sys._getframe(1)
        if "tfgrad_jax" in caller.f_code.co_filename:
            events.append([event, str(args), caller.f_lineno])
        ready = True

ready = False
sys.addaudithook(watch)
import tfgrad_jax
from tfgrad_jax import testing
ready = True
new = sorted({m.partition(".")[0] for m in set(sys.modules) - before})

@tfgrad_jax.custom_gradient
def square(x):
    return x * x, lambda dy: dy * 2 * x

assert square(3.0) == 9.0
assert jax.jit(jax.hessian(square))(3.0) == 2.0
assert testing.check_gradient(square, jnp.float32(3.0)).ok
assert "square" in str(tfgrad_jax.explain(square, jnp.float32(3.0)))
ready = False
print(json.dumps([new, events]))
"""


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_source(module):
    tree = ast.parse(module.read_text())
    roots = {name.partition(".")[0] for name in imported(tree)}
    known = {*sys.stdlib_module_names, "annotationlib"}  # which Python has from 3.14 on
    assert roots <= {*known, "jax", "numpy", "tfgrad_jax"}  # JAX brings NumPy
    assert not roots & REACHING
    assert not [name for name in imported(tree) if name.startswith("jax._src")]
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"eval", "exec", "compile", "open", "__import__"}


def test_use():
    """In a process of its own, whose audit events are watched, from the import on."""
    run = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    new, events = json.loads(run.stdout.splitlines()[-1])
    assert {*new} <= {*sys.stdlib_module_names, "jax", "jaxlib", "numpy", "ml_dtypes", "tfgrad_jax"}
    assert [e for e in events if e[0].partition(".")[0] not in HARMLESS] == []
