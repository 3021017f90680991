"""How the cost grows: with leaves, with depth, and with values that are closed over.

Against a hand-written rule that is right at every order, like ours, and that is given as
arguments what ours closes over. The last rows of each case compare the slopes: what one more
leaf or call costs, between the two largest sizes, and the exponent of the growth there (1: in
proportion).
"""

import functools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.overhead import every_order
from benchmarks.results import HAND_EVERY_ORDER, OURS, Group
from benchmarks.settings import Settings, Task
from benchmarks.timing import compare
from tfgrad_jax import custom_gradient

SECTION = "growth"
SIZES = (1, 8, 64, 512)
Pair = tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]  # ours, by hand, arguments


def tasks(settings: Settings) -> Iterator[Task]:
    for name, (build, sizes) in CASES.items():
        for kind in ("trace", "eager grad"):
            chosen = sizes[:2] if settings.quick else sizes
            run = functools.partial(measure, name, kind, build, chosen, settings)
            yield Task(SECTION, f"{name} {kind}", run)


def measure(
    name: str,
    kind: str,
    build: Callable[[int], Pair],
    sizes: tuple[int, ...],
    settings: Settings,
) -> list[Group]:
    groups: list[Group] = []

    def run() -> None:
        for size in sizes:
            ours, by_hand, args = build(size)
            argnums = tuple(range(len(args)))
            contestants = {
                key: _call(kind, f, argnums, args)
                for key, f in ((OURS, ours), (HAND_EVERY_ORDER, by_hand))
            }
            least, most = settings.rounds
            measured = compare(contestants, OURS, settings.scale, (min(least, 5), most))
            groups.append(Group.timed(SECTION, f"{name}, {kind}", str(size), measured))

    _deep(run)
    times = [g.values for g in groups]
    if len(times) > 1 and all(len(t) == 2 for t in times[-2:]):
        (small, large), (m, n) = times[-2:], sizes[-2:]
        slopes = {key: (large[key] - small[key]) / (n - m) for key in large}
        exponents = {key: math.log(large[key] / small[key]) / math.log(n / m) for key in large}
        case = f"{name}, {kind}"
        groups.append(Group.counted(SECTION, case, "slope", "s", slopes, f"from {m} to {n}"))
        groups.append(Group.counted(SECTION, case, "exponent", "", exponents, f"from {m} to {n}"))
    return groups


def _call(kind: str, f: Callable[..., Any], argnums: Any, args: Any) -> Callable[[], Any]:
    if kind == "trace":
        return lambda: jax.jit(lambda *a: jax.grad(f, argnums)(*a)).trace(*args)
    return lambda: jax.grad(f, argnums)(*args)


def _deep(run: Callable[[], None]) -> None:
    """Run where 512 nested calls fit: JAX needs several Python frames for each."""
    errors: list[BaseException] = []

    def target() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    limit, size = sys.getrecursionlimit(), threading.stack_size(1 << 29)
    sys.setrecursionlimit(1 << 17)
    try:
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(size)
    if errors:
        raise errors[0]


def _numbers(count: int) -> list[Any]:
    return [jnp.float32(1 + i % 7 / 100) for i in range(count)]


def leaves(count: int) -> Pair:
    """A pytree of so many leaves in, as many out."""

    @custom_gradient
    def ours(tree: Any) -> Any:
        def grad(*dys: Any) -> Any:
            return [2 * a * dy for a, dy in zip(tree, dys, strict=True)]

        return [a * a for a in tree], grad

    def backward(tree: Any, dys: Any) -> Any:
        return ([2 * a * dy for a, dy in zip(tree, dys, strict=True)],)

    by_hand = every_order(lambda tree: ([a * a for a in tree], tree), backward)
    return lambda t: ours(t)[0], lambda t: by_hand(t)[0], (_numbers(count),)


def _bump(x: Any) -> Any:
    y = jnp.exp(-x * x)
    return y, (x, y)


def _bump_backward(residuals: Any, dy: Any) -> Any:
    x, y = residuals
    return (dy * (-2 * x * y),)


def _bump_with_rule(x: Any) -> Any:
    y, residuals = _bump(x)
    return y, lambda dy: _bump_backward(residuals, dy)


def chained(count: int) -> Pair:
    """One call after another."""

    def chain(h: Callable[..., Any]) -> Callable[..., Any]:
        def f(x: Any) -> Any:
            for _ in range(count):
                x = h(x)
            return x

        return f

    args = (jnp.float32(0.3),)
    return chain(custom_gradient(_bump_with_rule)), chain(every_order(_bump, _bump_backward)), args


def nested(count: int) -> Pair:
    """Each function calls the one before it, which it closes over."""

    def ours_around(inner: Callable[..., Any]) -> Callable[..., Any]:
        @custom_gradient
        def outer(x: Any) -> Any:
            y = 0.5 * inner(x)
            return y, lambda dy: dy * y

        return outer

    def hand_around(inner: Callable[..., Any]) -> Callable[..., Any]:
        outer = jax.custom_vjp(lambda x: 0.5 * inner(x))

        def forward(x: Any) -> Any:
            y = outer(x)
            return y, y

        outer.defvjp(forward, lambda y, dy: (dy * y,))
        return outer

    ours: Callable[..., Any] = custom_gradient(_bump_with_rule)
    by_hand = every_order(_bump, _bump_backward)
    for _ in range(count - 1):
        ours, by_hand = ours_around(ours), hand_around(by_hand)
    return ours, by_hand, (jnp.float32(0.3),)


def captured(declared: bool) -> Callable[[int], Pair]:
    """One function that closes over so many values."""

    def build(count: int) -> Pair:
        def value(weights: Any, x: Any) -> Any:
            y = x
            for w in weights:
                y = y * w
            return y

        def backward(weights: Any, x: Any, dy: Any) -> Any:
            return [dy * x * w for w in weights], dy * x

        def ours(weights: Any, x: Any) -> Any:
            @custom_gradient(variables=weights if declared else None)
            def f(x: Any) -> Any:
                def grad(dy: Any, variables: Any) -> Any:
                    dws, dx = backward(weights, x, dy)
                    return dx, dws

                return value(weights, x), grad

            return f(x)

        by_hand = every_order(
            lambda weights, x: (value(weights, x), (weights, x)),
            lambda residuals, dy: backward(*residuals, dy),
        )
        return ours, by_hand, (_numbers(count), jnp.float32(0.3))

    return build


def layers(count: int) -> Pair:
    """So many calls, each of its own function that closes over its own weight."""

    def backward(residuals: Any, dy: Any) -> Any:
        w, x, y = residuals
        d = dy * (1 - y * y)
        return d * x, d * w

    def layer(w: Any, x: Any) -> Any:
        y = jnp.tanh(x * w)
        return y, (w, x, y)

    def ours(weights: Any, x: Any) -> Any:
        for w in weights:

            @custom_gradient
            def h(x: Any, w: Any = w) -> Any:
                y, residuals = layer(w, x)

                def grad(dy: Any, variables: Any) -> Any:
                    dw, dx = backward(residuals, dy)
                    return dx, [dw]

                return y, grad

            x = h(x)
        return x

    hand = every_order(layer, backward)

    def by_hand(weights: Any, x: Any) -> Any:
        for w in weights:
            x = hand(w, x)
        return x

    return ours, by_hand, (_numbers(count), jnp.float32(0.3))


CASES: dict[str, tuple[Callable[[int], Pair], tuple[int, ...]]] = {
    "leaves": (leaves, (*SIZES, 4096)),
    "chained calls": (chained, SIZES),
    "nested calls": (nested, SIZES),
    "captured values": (captured(False), SIZES),
    "declared variables": (captured(True), SIZES),
    "layers that capture": (layers, SIZES),
}
