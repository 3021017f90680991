"""How values, types and tables are written in messages and reports."""

from collections.abc import Sequence
from typing import Any

from jax import ShapeDtypeStruct

from tfgrad_jax._jax.compat import Sharding, explicit_sharding
from tfgrad_jax._jax.types import Spec

from .source import describe


def counted(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def kind_of(value: Any) -> str:
    """Describe a value, such as "an array of dtype int32 and shape (2,)" or "the float 1.0"."""
    if value is None:
        return "None"
    is_type = isinstance(value, type | ShapeDtypeStruct)
    if not is_type and hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array of dtype {value.dtype} and shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of length {len(value)}"
    if isinstance(value, bool | int | float | complex | str | bytes):
        return f"the {type(value).__name__} {value!r}"
    if callable(value):
        return f"the callable {describe(value)}"
    return f"an object of type {type(value).__qualname__}"


def types_of(types: Sequence[Any]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype, *_ in types) or "none"


def tree_of(treedef: Any) -> str:
    return str(treedef).removeprefix("PyTreeDef(").removesuffix(")")


def type_name(array: Any) -> str:
    """Write a type as JAX does, with its sharding over an explicit mesh."""
    by = array.sharding if isinstance(array, Spec) else explicit_sharding(array)
    by = by or Sharding((None,) * len(array.shape))
    sizes = [
        f"{n}@{_axes(names)}" if names else str(n)
        for n, names in zip(array.shape, by.partitions, strict=True)
    ]
    sums = [f"{s}:{_axes(names)}" for s, names in (("U", by.unreduced), ("R", by.reduced)) if names]
    return f"{array.dtype}[{','.join(sizes)}]" + (f"{{{', '.join(sums)}}}" if sums else "")


def _axes(names: Any) -> str:
    """Write the name of a mesh axis, or several names."""
    listed = [names] if isinstance(names, str) else names
    listed = [*listed] if isinstance(listed, tuple) else sorted(listed)
    return listed[0] if len(listed) == 1 else f"({','.join(listed)})"


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Write the rows of a table as lines, with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
