"""What pages and examples publish: its code, what it prints, and each parameter passed in two ways.

A rule that works where its author calls it may fail where somebody passes one argument more.
`every_parameter_passed()` watches the calls of decorated functions. At the first call of each, it
differentiates two more, which pass the defaults as well: one by position where that is allowed, and
one by name.
"""

import contextlib
import inspect
import io
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfgrad_jax import custom_gradient

DECORATED = type(custom_gradient(len))
SETTINGS = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)


def has_several(h: Callable[..., Any]) -> bool:
    """Return whether a function, not a method, has more than one parameter."""
    names = [*inspect.signature(h).parameters]
    return len(names) > 1 and names[0] != "self"


@contextlib.contextmanager
def every_parameter_passed() -> Iterator[set[str]]:
    """Yield the names of the functions that were called in both ways."""
    called: set[str] = set()
    original = DECORATED.__call__

    def call(h: Any, *args: Any, **kwargs: Any) -> Any:
        if has_several(h) and h.__qualname__ not in called:
            called.add(h.__qualname__)  # before the calls: a rule may call its own function
            with contextlib.redirect_stdout(io.StringIO()):
                _call_in_both_ways(h, args, kwargs)
        return original(h, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DECORATED, "__call__", call)
        yield called


def never_called(namespace: Mapping[str, Any], called: set[str]) -> set[str]:
    """Return which decorated functions of a page or a program nobody called."""
    decorated = [h for h in namespace.values() if isinstance(h, DECORATED)]
    return {h.__qualname__ for h in decorated if has_several(h)} - called


def _call_in_both_ways(h: Any, args: Any, kwargs: Any) -> None:
    signature = inspect.signature(h)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    settings = {
        n: v for n, v in bound.arguments.items() if signature.parameters[n].kind in SETTINGS
    }
    names, inputs = zip(
        *((n, v) for n, v in bound.arguments.items() if n not in settings), strict=True
    )
    _differentiate(lambda *inputs: h(*inputs, **settings), inputs)
    _differentiate(lambda *inputs: h(**dict(zip(names, inputs, strict=True)), **settings), inputs)


def _differentiate(f: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    """Run a function and its rule; without numbers where an argument is traced."""
    leaves, treedef = jax.tree.flatten(inputs)
    arrays = {i: x for i, x in enumerate(leaves) if _is_float_array(x)}

    def gradients(arrays: dict[int, Any]) -> Any:
        def of(arrays: dict[int, Any]) -> Any:
            given = [arrays.get(i, x) for i, x in enumerate(leaves)]
            return f(*jax.tree.unflatten(treedef, given))

        y, pull_back = jax.vjp(of, arrays)
        return pull_back(jax.tree.map(jnp.ones_like, y))

    is_traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
    jax.eval_shape(gradients, arrays) if is_traced else gradients(arrays)


def _is_float_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.inexact)


# --- code and what it prints ----------------------------------------------------------------------

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?(?![\w.]*\w)")


def code_of(page: Path) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))


def numbers(text: str) -> list[float]:
    return [float(n) for n in _NUMBER.findall(text)]


def _shape(text: str) -> str:
    """Return a text with every number as `#`, and no more spaces than it needs."""
    text = " ".join(_NUMBER.sub("#", text).split())
    return re.sub(r" ?([\[\](),]) ?", r"\1", text)


def is_printed(actual: str, expected: str) -> bool:
    """Return whether a text is the expected one, with the numbers close."""
    pattern = ".*?".join(re.escape(_shape(part)) for part in expected.split("...\n"))
    if not re.fullmatch(pattern.replace(".*?", " ?.*? ?"), _shape(actual)):
        return False
    if "...\n" in expected:
        return True
    return numbers(actual) == pytest.approx(numbers(expected), rel=2e-4, abs=1e-5)
