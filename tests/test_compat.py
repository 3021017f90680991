"""JAX does not document these attributes. `_jax/compat.py` alone reads them, one function for each.

Where JAX changes one, the test of that function fails, by its name; the tests of what stands on it
fail elsewhere.
"""

import ast
import pathlib
import runpy

import jax
import jax.numpy as jnp
import pytest

import tfgrad_jax
from tfgrad_jax._jax import compat

PRIVATE = {
    *("_invalidated", "_trace", "explicit_mesh_axis", "inner_aval", "is_valid", "is_vjp"),
    *("manual_axis_type", "memory_space", "parent_trace", "spmd_name", "tag"),
    *("to_concrete_value", "to_primal_tangent_pair"),
}
ROOT = pathlib.Path(tfgrad_jax.__file__).parent


def reads(tree):
    """Yield the private attributes that code reads, but for those of its own `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE:
            if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                yield node.attr
        elif isinstance(node, ast.Constant) and node.value in PRIVATE:  # getattr, hasattr
            yield node.value


def test_an_older_jax_is_named(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 9, 0))
    with pytest.raises(ImportError, match=r"needs jax 0\.10\.2 or newer, found"):
        runpy.run_path(compat.__file__)


def test_one_module_alone_reads_them():
    files = [f for f in ROOT.rglob("*.py") if f.name != "compat.py"]
    found = {f.relative_to(ROOT): [*reads(ast.parse(f.read_text()))] for f in files}
    assert not {name: some for name, some in found.items() if some}
    assert {*reads(ast.parse((ROOT / "_jax" / "compat.py").read_text()))} == PRIVATE


def inside(transform, look):
    """Return what `look` says of a tracer inside a transformation."""
    seen = []
    transform(lambda x: (seen.append(look(x)), x)[1])(2.0)
    return seen[0]


FACTS = {
    # function: what it must say, transformation by transformation
    "trace_of": lambda: [
        compat.trace_of(inside(f, lambda x: x)) is not None for f in (jax.grad, jax.jit)
    ],
    "parent_of": lambda: [
        inside(jax.grad, lambda x: compat.parent_of(compat.trace_of(x))) is not None,
        compat.parent_of(None) is None,
    ],
    "tag_of": lambda: [
        inside(jax.grad, lambda x: compat.tag_of(compat.trace_of(x)) is not compat.trace_of(x)),
        inside(jax.jit, lambda x: compat.tag_of(compat.trace_of(x)) is compat.trace_of(x)),
    ],
    "opens": lambda: [
        inside(jax.grad, lambda x: compat.opens(compat.trace_of(x))),
        not inside(jax.jit, lambda x: compat.opens(compat.trace_of(x))),
    ],
    "primal": lambda: [inside(jax.grad, lambda x: compat.primal(x, compat.trace_of(x))) == 2.0],
    "FORWARD": lambda: [inside(jax.jacfwd, lambda x: type(compat.trace_of(x)) is compat.FORWARD)],
    "concrete": lambda: [
        inside(jax.grad, lambda x: compat.concrete(x)) == 2.0,
        isinstance(inside(jax.jit, compat.concrete), jax.core.Tracer),
    ],
    "is_valid": lambda: [
        inside(jax.grad, compat.is_valid),
        # Before JAX 0.12 the trace does not say that the derivative is over.
        compat.is_valid(inside(jax.grad, lambda x: x)) is (jax.__version_info__ < (0, 12)),
    ],
    "revived": lambda: [revives()],
    "is_reverse": lambda: [
        inside(jax.grad, lambda x: compat.is_reverse(compat.trace_of(x))),
        not inside(jax.jit, lambda x: compat.is_reverse(compat.trace_of(x))),
    ],
    "is_ref": lambda: [compat.is_ref(jax.new_ref(1.0)), not compat.is_ref(jnp.ones(2))],
    "type_of": lambda: [compat.type_of(jax.new_ref(jnp.ones(2))) == jax.typeof(jnp.ones(2))],
    "varying": lambda: [compat.varying(jax.typeof(jnp.ones(2))) == frozenset()],
    "zeros": lambda: [compat.zeros(jax.typeof(jnp.ones(2))).tolist() == [0, 0]],
    "can_transpose": lambda: [compat.can_transpose(jax.lax.neg_p)],
    "can_differentiate": lambda: [compat.can_differentiate(jax.lax.sin_p)],
}


def revives():
    x = inside(jax.grad, lambda x: x)
    with compat.revived(compat.trace_of(x)):
        return compat.is_valid(x)


@pytest.mark.parametrize("name", FACTS)
def test_the_fact(name):
    assert all(FACTS[name]())
