"""Every message a user can meet, one builder each.

A builder returns the exception for its caller to raise. Each message says whose rule it is
(function, file:line), what was expected, what came, at which argument, and what to do.
"""

import functools
import inspect
import math
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.tree_util import all_leaves, keystr, tree_flatten_with_path, tree_structure


def describe(f: Callable[..., Any]) -> str:
    """Name a function and where it is written, as in "`f` (model.py:12)"."""
    inner: Any = f
    while not hasattr(inner, "__code__"):
        if isinstance(inner, functools.partial):
            inner = inner.func
        elif hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__
        elif hasattr(inner, "__func__"):
            inner = inner.__func__
        elif isinstance(
            call := inspect.getattr_static(type(inner), "__call__", None), types.FunctionType
        ):
            return _at(type(inner).__qualname__, call.__code__)
        else:
            return f"`{getattr(f, '__qualname__', None) or repr(f)}`"
    return _at(getattr(inner, "__qualname__", inner.__code__.co_name), inner.__code__)


class Source(NamedTuple):
    """A function by its name and code, which hold no values."""

    name: str
    code: types.CodeType | None

    @classmethod
    def of(cls, f: Callable[..., Any]) -> "Source":
        code = getattr(f, "__code__", None)
        if code is None:
            return cls(describe(f), getattr(inspect.unwrap(f), "__code__", None))
        return cls(f.__qualname__, code)

    def __str__(self) -> str:
        if self.code is None or self.name.startswith("`"):
            return self.name
        return _at(self.name, self.code)


class Where(NamedTuple):
    """Whose rule an error is about."""

    source: Source
    grad_fn: Callable[..., Any]
    of: str = "input"  # what the rule gives gradients for: "input" or "variable"

    def __str__(self) -> str:
        return f"The gradient function {describe(self.grad_fn)} of {self.source}"


def _at(name: str, code: types.CodeType) -> str:
    return f"`{name.replace('<locals>.', '')}` ({code.co_filename}:{code.co_firstlineno})"


def not_callable(f: Any) -> TypeError:
    return TypeError(
        f"custom_gradient decorates a function that returns a pair (y, grad_fn), but got "
        f"{_kind(f)}, which is not callable. Maybe you wrote `custom_gradient(f(x))` instead of "
        "`custom_gradient(f)(x)`."
    )


def bad_option(name: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"custom_gradient got {name}={value!r}; expected {expected}.")


def bad_call(f: Callable[..., Any], signature: inspect.Signature, error: TypeError) -> TypeError:
    return TypeError(
        f"{describe(f)} was called with arguments that do not fit its signature, {signature}: "
        f"{error}."
    )


def not_a_pair(f: Callable[..., Any], result: Any) -> TypeError:
    return TypeError(
        f"{describe(f)} must return a pair (y, grad_fn): its value and the function that computes "
        f"its gradient. It returned {_kind(result)}. Maybe you wrote `return y` instead of "
        "`return y, grad_fn`."
    )


def grad_fn_not_callable(f: Callable[..., Any], grad_fn: Any) -> TypeError:
    return TypeError(
        f"{describe(f)} must return a pair (y, grad_fn) whose second element is a function, but "
        f"the second element is {_kind(grad_fn)}. Maybe you wrote `return y, grad(dy)` instead of "
        "`return y, grad`, or returned y alone."
    )


def output_no_array(f: Callable[..., Any], y: Any, position: int, leaf: Any) -> TypeError:
    path = keystr(tree_flatten_with_path(y)[0][position][0])
    at = f" at y{path}" if path else ""
    return TypeError(
        f"{describe(f)} returned {_kind(leaf)} among its outputs{at}; every leaf of y must be an "
        "array or a number. Return other values from an undecorated function around it."
    )


def wrong_arity(where: Where, upstreams: int, mirrored: bool, error: TypeError) -> TypeError:
    if mirrored:
        expected = (
            f"{_count(upstreams, 'upstream gradient')}, one positional argument per leaf of y "
            "(dicts in the order of their sorted keys)"
        )
    else:
        expected = "one argument, the upstream gradients in the structure of y"
    return TypeError(f"{where} cannot be called with {expected}: {error}.")


def wrong_structure(where: Where, result: Any, layout: Any, wanted: Sequence[bool]) -> Exception:
    """Return the error for gradients that are too many, too few or in the wrong places."""
    paths = layout.leaf_paths()
    needed = [p for p, w in zip(paths, wanted, strict=True) if w]
    listed = ", ".join(f"`{p}`" for p in (needed or paths)) or "none"
    result = [result] if all_leaves([result]) else result
    if isinstance(result, list | tuple) and not any(
        isinstance(r, list | tuple | dict) for r in result
    ):
        count = len(needed) if len(needed) == len(paths) else f"{len(needed)} or {len(paths)}"
        hint = ""
        if len(result) < len(needed):
            hint = f" Return None for every {where.of} that has no gradient."
        elif len(paths) == 1 and len(result) > 1:
            hint = f" `{paths[0]}` is one array: return one gradient of its shape."
        return ValueError(
            f"{where} returned {_count(len(result), 'gradient')}; expected {count}, for the "
            f"{where.of}s {listed}.{hint}"
        )
    values = layout.treedef.children()
    expected = values[0] if len(values) == 1 else layout.treedef
    return TypeError(
        f"{where} returned gradients in a structure that does not fit the {where.of}s.\n"
        f"  expected: {_tree(expected)}, for {listed}\n"
        f"  got:      {_tree(tree_structure(result, is_leaf=lambda v: v is None))}\n"
        f"Return the structure of the {where.of}s, or a flat list with one gradient for each of "
        "the leaves above; None stands for no gradient."
    )


def wrong_kind(where: Where, gradient: Any, wanted: Any, path: str) -> TypeError:
    hint = "Return None if there is no gradient."
    dtype = getattr(gradient, "dtype", None)
    if isinstance(gradient, complex) or (dtype is not None and np.dtype(dtype).kind == "c"):
        hint = "Return its real part, `jnp.real(...)`, if that is what you mean."
    elif np.issubdtype(wanted.dtype, np.complexfloating) and dtype is not None:
        hint = f"Convert it, `.astype({_name(wanted.dtype)})`, if it really has no imaginary part."
    elif dtype is not None and np.dtype(dtype).kind in "biu":
        hint = f"Convert it, `.astype({_name(wanted.dtype)})`, or return None for no gradient."
    elif callable(gradient):
        hint = "Maybe you wrote `return g` instead of `return g(dy)`."
    return TypeError(
        f"{where} returned {_kind(gradient)} for the {where.of} `{path}`; expected an array of "
        f"dtype {_name(wanted.dtype)} and shape {wanted.shape}. {hint}"
    )


def wrong_shape(where: Where, got: Any, wanted: Any, path: str) -> ValueError:
    return ValueError(
        f"{where} returned a gradient of shape {got.shape} for the {where.of} `{path}`; expected "
        f"its own shape, {wanted.shape}.{_shape_hint(got.shape, wanted.shape)}"
    )


def _shape_hint(got: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """Say what would make one shape of the other, if one reduction or broadcast would."""
    extra = len(got) - len(wanted)
    padded = (None,) * extra + tuple(wanted)  # the wanted shape, aligned as in broadcasting
    axes = [i for i, (g, w) in enumerate(zip(got, padded, strict=False)) if g != w]
    if extra >= 0 and axes and all(padded[i] in (None, 1) for i in axes):
        axis = axes[0] if len(axes) == 1 else tuple(axes)
        keep = ", keepdims=True" if any(padded[i] == 1 for i in axes) else ""
        return (
            f" The forward pass broadcasts this input along axis {axis} of the gradient: did you "
            f"forget to sum over axis {axis}, as in `g.sum(axis={axis}{keep})`?"
        )
    if len(got) > 1 and got == tuple(reversed(wanted)):
        return " Maybe a transpose is missing, `g.T`."
    if math.prod(got) == math.prod(wanted):
        return f" Maybe a reshape is missing, `g.reshape{wanted}`."
    if extra <= 0 and all(g in (1, w) for g, w in zip(got, wanted[-extra:], strict=True)):
        return f" Maybe a broadcast is missing, `jnp.broadcast_to(g, {wanted})`."
    return ""


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _name(dtype: Any) -> str:
    return np.dtype(dtype).name


def _kind(value: Any) -> str:
    """Describe a value by what matters about it: its type, or dtype and shape."""
    if value is None:
        return "None"
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is not None and shape is not None and not isinstance(value, type):
        return f"an array of dtype {dtype} and shape {tuple(shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of length {len(value)}"
    if isinstance(value, bool | int | float | complex | str | bytes):
        return f"the {type(value).__name__} {value!r}"
    if callable(value):
        return f"the callable {describe(value)}"
    return f"an object of type {type(value).__qualname__}"


def _tree(treedef: Any) -> str:
    return str(treedef).removeprefix("PyTreeDef(").removesuffix(")")


def no_variable_pair(where: Where, result: Any) -> TypeError:
    return TypeError(
        f"{where} was called with `variables=` and must return a pair (grad_xs, grad_vars): the "
        f"gradients of the inputs and those of the variables. It returned {_kind(result)}."
    )


def not_linear(source: Source, operation: str) -> TypeError:
    return TypeError(
        f"The gradient function of {source} is not linear in its upstream gradients: it contains "
        f"{operation}. Forward mode transposes the gradient function, which only a linear map "
        "has. Write the rule as a linear function of the upstreams, or decorate without "
        "`forward_mode=True` and use reverse mode (`jax.grad`, `jax.vjp`, `jax.jacrev`)."
    )


def first_use(eqn: Any, source: Source) -> str:
    """Return "file:line" of the first use of a captured value, as seen from `f`."""
    code = source.code
    if code is None:
        return ""
    lines = {line for _, _, line in code.co_lines()}
    traceback = getattr(getattr(eqn, "source_info", None), "traceback", None)
    for frame in getattr(traceback, "frames", ()):
        if frame.file_name == code.co_filename and frame.line_num in lines:
            return f"{frame.file_name}:{frame.line_num}"
    return f"{code.co_filename}:{code.co_firstlineno}"


def no_gradient_for_captured(
    source: Source, uses: Sequence[tuple[Any, str]], declared: bool
) -> TypeError:
    lines = "\n".join(
        f"  {_name(s.dtype)}{list(s.shape)}{f', first used at {use}' if use else ''}"
        for s, use in uses
    )
    if declared:
        reason = "that are not among its declared variables"
        remedy = "Add them to `custom_gradient(variables=...)`, or pass them as arguments."
    else:
        reason = "but its gradient function takes no `variables`"
        remedy = (
            "Pass them as arguments; or let the gradient function take them, "
            "`def grad(dy, variables): ... return grad_xs, grad_vars`; or decorate with "
            '`custom_gradient(variables="autodiff")` to give them the ordinary gradient of the '
            "function."
        )
    return TypeError(
        f"{source} is differentiated with respect to values that it closes over, {reason}:\n"
        f"{lines}\n{remedy}"
    )


def pass_through_mismatch(
    f: Callable[..., Any], inputs: Sequence[Any], outputs: Sequence[Any]
) -> ValueError:
    def shapes(specs: Sequence[Any]) -> str:
        return ", ".join(f"{_name(s.dtype)}{list(s.shape)}" for s in specs) or "none"

    return ValueError(
        f"grad_pass_through gives each input of {describe(f)} the gradient of the output in its "
        "place, so the two must match in number and shape.\n"
        f"  inputs:  {shapes(inputs)}\n"
        f"  outputs: {shapes(outputs)}\n"
        "Close over the inputs that need no gradient, or write the rule with `custom_gradient`."
    )
