"""How values, types and tables are written in messages and reports."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.tree_util import PyTreeDef, all_leaves

from .._jax.types import Aval, Leaf, is_array
from .source import Source


def counted(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def kind_of(value: Any) -> str:
    """Describe a value, such as "an array of dtype int32 and shape (2,)" or "the float 1.0"."""
    if value is None:
        return "None"
    if is_array(value):
        return f"an array of dtype {value.dtype} and shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of length {len(value)}"
    if isinstance(value, bool | int | float | complex | str | bytes):
        return f"the {type(value).__name__} {value!r}"
    if callable(value) and all_leaves([value]):  # a module is a pytree
        return f"the callable {Source.of(value)}"
    return f"an object of type {type(value).__qualname__}"


def type_name(value: Leaf) -> str:
    """Write the type of an array, a number or an aval as JAX does, as in "float32[3@data,2]"."""
    aval: Any = value if hasattr(value, "to_ct_aval") else jax.typeof(value)
    return str(aval.strip_weak_type())


def types_of(avals: Sequence[Aval]) -> str:
    return ", ".join(map(type_name, avals)) or "none"


def tree_of(treedef: PyTreeDef) -> str:
    return str(treedef).removeprefix("PyTreeDef(").removesuffix(")")


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Write the rows of a table as lines, with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
