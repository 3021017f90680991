"""What the tests share: one comparison, samples, derivatives of pytrees, a wrong rule.

Rules are wrong on purpose, by a factor of 7 or so: a right result proves that the rule ran.
"""

import contextlib
import functools
import inspect
import os
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest

from tfgrad_jax import custom_gradient

eager_and_jit = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])


def sample(every: Iterable[Any], count: int, core: Iterable[Any] = ()) -> list[Any]:
    """Return the core of a cross product, and draw `count` of the others.

    `--seed` draws others, `--count` more of them.
    """
    core = list(core)
    others = [case for case in every if case not in core]
    count = max(1, round(count * float(os.environ.get("TFGRAD_COUNT", 1))))
    drawn = random.Random(int(os.environ.get("TFGRAD_SEED", 0)))
    return [*core, *drawn.sample(others, min(count, len(others)))]


def assert_same(actual: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Compare structure, shape, dtype and value at once; Python numbers have JAX's dtypes."""
    __tracebackhide__ = True  # a failure shows the line of the test, and none of chex
    try:
        chex.assert_trees_all_equal_structs(actual, expected)
        actual, expected = jax.tree.map(jnp.asarray, (actual, expected))
        chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
        chex.assert_trees_all_close(actual, expected, rtol=rtol, atol=atol)
    except AssertionError as error:
        raise AssertionError(str(error)) from None


@contextlib.contextmanager
def as_users_run_it() -> Iterator[None]:
    """Undo the strictness of `conftest.py`: users write `x @ w + b`, and mix dtypes."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def total(tree: Any) -> jax.Array:
    """Sum all entries of all leaves, as float32."""
    return sum(jnp.sum(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(tree))


def differentiated(f: Callable[..., Any], count: int, times: int) -> Callable[..., Any]:
    """Differentiate the sum of all that `f` returns, by all `count` arguments, several times."""
    if times == 0:
        return f
    below = differentiated(f, count, times - 1)
    return jax.grad(lambda *arrays: total(below(*arrays)), tuple(range(count)))


@functools.cache
def drops_in_scan() -> bool:
    """Return whether JAX takes the value of a custom_jvp for its own derivative in a `scan`."""
    inner, outer = (jax.custom_jvp(lambda x: x * 1.0) for _ in range(2))
    inner.defjvp(lambda primals, tangents: (inner(*primals), 7 * tangents[0]))
    outer.defjvp(lambda primals, tangents: (outer(*primals), inner(*primals) * tangents[0]))

    def loop(x: Any) -> Any:
        return jax.lax.scan(lambda s, x: (s + outer(x), None), 0 * x, x[None])[0]

    return float(jax.grad(jax.grad(loop))(2.0)) != 7


def lowered_for_gpu(f: Callable[..., Any], *args: Any) -> str:
    """Return the program of a function for a GPU, which need not be here."""
    with _abstract_gpu():
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def _abstract_gpu() -> contextlib.AbstractContextManager[Any]:
    """Name a GPU to the compiler of kernels, which asks for it from JAX 0.12 on."""
    device = getattr(jax.sharding, "AbstractDevice", None)
    if device is None or "platform" not in inspect.signature(device).parameters:
        return contextlib.nullcontext()
    gpu = device("NVIDIA H100 80GB HBM3", 132, "gpu")
    return jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((1,), ("x",), abstract_device=gpu)
    )


def product(get: Any, in_f: Any = None, in_rule: Any = None, **options: Any) -> Any:
    """Return the function `get() x`, declared `7 get()` by `x` and `5 x` by each variable.

    `in_f(x)` and `in_rule(x, dy)` are factors, if they are given; `get` may be a weight.
    """
    read = get if callable(get) and not hasattr(get, "dtype") else lambda: get

    @custom_gradient(**options)
    def f(x: Any) -> Any:
        factor = in_f(x) if in_f else 1

        def rule(dy: Any, variables: Any = ()) -> Any:
            dx = 7 * dy * read() * (in_rule(x, dy) if in_rule else 1)
            if not jax.tree.leaves(variables):
                return dx
            return dx, jax.tree.map(lambda _: 5 * dy * x, variables)

        return read() * x * factor, rule

    return f


@custom_gradient
def sine(x):
    c = jnp.cos(x)
    return jnp.sin(x), lambda dy: 7 * dy * c
