"""The oracle: dual numbers of several levels in NumPy, and functions with a declared derivative."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass
class Dual:
    """`primal + e tangent`, with `e` of this level; both are of the levels below."""

    level: int
    primal: Any
    tangent: Any


def dual(level: int, primal: Any, tangent: Any) -> Any:
    """Return the number with this tangent; None is no tangent."""
    return primal if tangent is None else Dual(level, primal, tangent)


def level_of(*values: Any) -> int:
    """Return the highest level of all values."""
    levels = [0]
    for v in values:
        if isinstance(v, Dual):
            levels.append(v.level)
        elif isinstance(v, Function):
            levels.append(level_of(*v.captured.values()))
    return max(levels)


def split(value: Any, level: int) -> tuple[Any, Any]:
    """Return primal and tangent at this level, which is at least that of the value."""
    if isinstance(value, Function):
        captured = {k: split(v, level)[0] for k, v in value.captured.items()}
        return Function(value.declared, captured), None
    if isinstance(value, Dual) and value.level == level:
        return value.primal, value.tangent
    return value, None


def linear(f: Callable[..., Any], x: Any) -> Any:
    if isinstance(x, Dual):
        return Dual(x.level, linear(f, x.primal), linear(f, x.tangent))
    return f(x)


def add(x: Any, y: Any) -> Any:
    if x is None or y is None:
        return y if x is None else x
    level = level_of(x, y)
    if not level:
        return x + y
    (x, dx), (y, dy) = split(x, level), split(y, level)
    return dual(level, add(x, y), add(dx, dy))


def bilinear(f: Callable[..., Any], x: Any, y: Any) -> Any:
    level = level_of(x, y)
    if not level:
        return f(x, y)
    (x, dx), (y, dy) = split(x, level), split(y, level)
    left = None if dx is None else bilinear(f, dx, y)
    right = None if dy is None else bilinear(f, x, dy)
    return dual(level, bilinear(f, x, y), add(left, right))


mul = functools.partial(bilinear, np.multiply)


def scale(c: float, x: Any) -> Any:
    return linear(lambda a: c * a, x)


SLOPES = {
    "sin": lambda x: smooth("cos", x),
    "cos": lambda x: scale(-1.0, smooth("sin", x)),
    "tanh": lambda x: add(
        np.ones_like(base(x)), scale(-1.0, mul(smooth("tanh", x), smooth("tanh", x)))
    ),
}


def smooth(name: str, x: Any) -> Any:
    if not isinstance(x, Dual):
        return getattr(np, name)(x)
    return Dual(x.level, smooth(name, x.primal), mul(SLOPES[name](x.primal), x.tangent))


def base(x: Any) -> Any:
    """Return the value without any tangents."""
    return base(x.primal) if isinstance(x, Dual) else x


def with_base(x: Any, value: Any) -> Any:
    """Return the value with the tangents of `x`."""
    return Dual(x.level, with_base(x.primal, value), x.tangent) if isinstance(x, Dual) else value


def stack(xs: Sequence[Any]) -> Any:
    level = level_of(*xs)
    if not level:
        return np.stack(xs)
    primals, tangents = zip(*(split(x, level) for x in xs), strict=True)
    zeros = [np.zeros_like(base(x)) for x in xs]
    tangents = [z if t is None else t for t, z in zip(tangents, zeros, strict=True)]
    return Dual(level, stack(primals), stack(tangents))


def directional(
    f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], env: Any = ()
):
    """Return the derivative of `f`, which may use the values of `env` too, in a direction."""
    level = 1 + level_of(*primals, *tangents, *env)
    y = f(*[dual(level, p, t) for p, t in zip(primals, tangents, strict=True)])
    primal, tangent = split(y, level)
    return scale(0.0, primal) if tangent is None else tangent


def directions(xs: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield the unit directions, those of the first array first."""
    for i, x in enumerate(xs):
        for j in range(base(x).size):
            unit = np.zeros(base(x).size)
            unit[j] = 1.0
            yield [unit.reshape(base(x).shape) if k == i else None for k in range(len(xs))]


def gradient(f: Callable[..., Any], xs: Sequence[Any], env: Any = ()) -> list[Any]:
    """Return all derivatives of a scalar `f`, as one list."""
    return [directional(f, xs, v, env) for v in directions(xs)]


Env = dict[str, Any]


def without_tangents(env: Env) -> Env:
    while level := level_of(*env.values()):
        env = {k: split(v, level)[0] for k, v in env.items()}
    return env


Step = Callable[[Env], None]


@dataclasses.dataclass
class Declared:
    """What the oracle knows of a decorated function."""

    name: str
    params: list[str]
    body: list[Step] = dataclasses.field(default_factory=list)
    rule: list[Step] = dataclasses.field(default_factory=list)
    outputs: list[str] = dataclasses.field(default_factory=list)
    # (input or variable, output, transpose): what the tangent of one adds to that of the other
    maps: list[tuple[str, int, Callable[[Env, Any], Any]]] = dataclasses.field(default_factory=list)
    autodiff: bool = False


@dataclasses.dataclass
class Function:
    """A decorated function and the values that it closes over."""

    declared: Declared
    captured: Env

    def run(self, args: Sequence[Any], with_rule: bool = False) -> Env:
        d = self.declared
        given = {**self.captured, d.name: self, **dict(zip(d.params, args, strict=True))}
        env = dict(given)
        for step in d.body:
            step(env)
        if with_rule and len(d.outputs) == 1:
            # What a rule reads of its own output has the declared derivative.
            (y,) = d.outputs
            if not any(env[y] is value for value in given.values()):
                (env[y],) = self(*args)
        for step in d.rule if with_rule else ():
            step(env)
        return env

    def __call__(self, *args: Any) -> list[Any]:
        level = level_of(self, *args)
        if not level:
            env = self.run(args)
            return [env[k] for k in self.declared.outputs]
        primals, tangents = zip(*(split(a, level) for a in args), strict=True)
        below = split(self, level)[0]
        moved = {k: split(v, level)[1] for k, v in self.captured.items()}
        moved |= dict(zip(self.declared.params, tangents, strict=True))
        pushed = below.push(primals, moved)
        if self.declared.autodiff:
            env = self.run(primals)
            ordinary = [split(env[k], level)[1] for k in self.declared.outputs]
            pushed = [add(p, o) for p, o in zip(pushed, ordinary, strict=True)]
        return [dual(level, y, t) for y, t in zip(below(*primals), pushed, strict=True)]

    def push(self, primals: Sequence[Any], tangents: Env) -> list[Any]:
        out = [None] * len(self.declared.outputs)
        env = self.run(primals, with_rule=True)
        for source, output, transpose in self.declared.maps:
            if tangents[source] is not None:
                out[output] = add(out[output], transpose(env, tangents[source]))
        return out
