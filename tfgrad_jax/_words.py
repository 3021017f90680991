"""How messages write what they are about: types, dtypes, shapes, structures, numbers of things."""

from collections.abc import Sequence
from typing import Any

from jax import ShapeDtypeStruct

from ._source import describe


def counted(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def dtype_name(dtype: Any) -> str:
    return getattr(dtype, "name", str(dtype))


def kind_of(value: Any) -> str:
    """Describe a value by what matters about it: its type, or dtype and shape."""
    if value is None:
        return "None"
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    is_type = isinstance(value, type | ShapeDtypeStruct)
    if dtype is not None and shape is not None and not is_type:
        return f"an array of dtype {dtype} and shape {tuple(shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of length {len(value)}"
    if isinstance(value, bool | int | float | complex | str | bytes):
        return f"the {type(value).__name__} {value!r}"
    if callable(value):
        return f"the callable {describe(value)}"
    return f"an object of type {type(value).__qualname__}"


def types_of(types: Sequence[Any]) -> str:
    return ", ".join(f"{dtype_name(dtype)}{list(shape)}" for shape, dtype, *_ in types) or "none"


def tree_of(treedef: Any) -> str:
    return str(treedef).removeprefix("PyTreeDef(").removesuffix(")")


def type_name(array: Any) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Write the rows of a table as lines, with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
