"""Random programs of decorated functions, and an oracle that knows neither JAX nor tfgrad_jax.

    python -m tests.random_programs --count 2000 --seed 0

A program is the source of a scalar `loss` over a few small arrays, and the way its derivative is
taken. Each of its statements is made twice, by the same random choices: as a line of Python, which
JAX runs, and as a step of the oracle, which computes with nested dual numbers in NumPy.

What the oracle takes from the contract: the derivative of a decorated function *is* the linear map
that its rule declares. Rules are sums of maps whose transposes can be written down by hand, such as
`M @ dy` with `t @ M`; `M` and other residuals are random expressions, so that no rule is the true
derivative, but for a few that are so on purpose. A number with tangents of several levels is split
at the highest one, the innermost derivative:

    h(x + e t) = h(x) + e push(x, t)

where both terms are computed from numbers of the levels below; there `h` is a decorated function
again, and `push`, the transposed rule, ordinary code.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import random
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import tqdm

import tfgrad_jax

# --- the oracle: nested dual numbers --------------------------------------------------------------


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
    "tanh": lambda x: add(np.ones_like(base(x)), scale(-1.0, mul(smooth("tanh", x), smooth("tanh", x)))),
}


def smooth(name: str, x: Any) -> Any:
    if not isinstance(x, Dual):
        return getattr(np, name)(x)
    return Dual(x.level, smooth(name, x.primal), mul(SLOPES[name](x.primal), x.tangent))


def base(x: Any) -> Any:
    """Return the value without any tangents."""
    return base(x.primal) if isinstance(x, Dual) else x


def stack(xs: Sequence[Any]) -> Any:
    level = level_of(*xs)
    if not level:
        return np.stack(xs)
    primals, tangents = zip(*(split(x, level) for x in xs), strict=True)
    zeros = [np.zeros_like(base(x)) for x in xs]
    tangents = [z if t is None else t for t, z in zip(tangents, zeros, strict=True)]
    return Dual(level, stack(primals), stack(tangents))


def directional(f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], env: Any = ()):
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
        env = {**self.captured, d.name: self, **dict(zip(d.params, args, strict=True))}
        for step in [*d.body, *(d.rule if with_rule else [])]:
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


# --- what programs use ----------------------------------------------------------------------------


@dataclasses.dataclass
class Record:
    a: Any

    def get(self) -> Any:
        return self.a


class Slots:
    __slots__ = ("a",)

    def __init__(self, a: Any) -> None:
        self.a = a


class Table(dict):
    def __init__(self, a: Any) -> None:
        super().__init__()
        self.a = a


def object_array(a: Any) -> Any:
    held = np.empty(1, object)
    held[0] = a
    return held


def with_attribute(a: Any) -> Any:
    def function() -> Any:
        return function.a

    function.a = a
    return function


def identity(a: Any) -> Any:
    return a


def listed(variables: Sequence[Any], values: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """Return gradients for the variables, which are some of the values, each once, in order."""
    positions = []
    for v in variables:
        assert any(v is w for w in values), "a variable that the function does not use"
        positions.append(next(i for i, w in enumerate(values) if v is w))
    assert positions == sorted(set(positions)), "not in the order of first use"
    result = []
    for v in variables:
        found = [g for w, g in zip(values, gradients, strict=True) if v is w and g is not None]
        result.append(sum(found[1:], found[0]) if found else None)
    return result


def undecorated(f: Any = None, **_: Any) -> Any:
    """Stand in for `custom_gradient`: the function itself, with its true derivative."""
    if f is None:
        return undecorated

    @functools.wraps(f)
    def plain(*args: Any, **kwargs: Any) -> Any:
        return f(*args, **kwargs)[0]

    return plain


HOLDERS = {  # how a value is put in, and read
    "list": ("[{0}]", "{1}[0]"),
    "nested": ("({{'a': [{0}]}},)", "{1}[0]['a'][0]"),
    "dict": ("{{'a': {0}, 2: None}}", "{1}['a']"),
    "deque": ("collections.deque([{0}])", "{1}[0]"),
    "namespace": ("types.SimpleNamespace(a={0})", "{1}.a"),
    "dataclass": ("Record({0})", "{1}.a"),
    "slots": ("Slots({0})", "{1}.a"),
    "partial": ("functools.partial(identity, {0})", "{1}()"),
    "tree partial": ("jax.tree_util.Partial(identity, {0})", "{1}()"),
    "bound method": ("Record({0}).get", "{1}()"),
    "bound builtin": ("{{'a': {0}}}.get", "{1}('a')"),
    "function attribute": ("with_attribute({0})", "{1}.a"),
    "function": ("(lambda a: lambda: a)({0})", "{1}()"),
    "object array": ("object_array({0})", "{1}[0]"),
    "attribute of a dict": ("Table({0})", "{1}.a"),
    "slice": ("slice({0}, None)", "{1}.start"),
}
# These concern the whole function. "cell" reads the value by its name in the enclosing scope.
PLACES = [
    "cell", "cell", "default", "keyword default", "keyword", "self", "callable object",
    "partial of f", "argument",
]  # fmt: skip

SHAPES = [(), (2,), (3,), (2, 3)]
CONSTANTS = {
    (): np.float64(0.7),
    (2,): np.array([0.4, -0.9]),
    (3,): np.array([-0.3, 0.8, 0.5]),
    (2, 3): np.array([[0.2, -0.6, 0.9], [0.7, 0.1, -0.4]]),
}


def constant(shape: tuple[int, ...]) -> str:
    return "C" + "x".join(map(str, shape))


NAMESPACE = {
    "jax": jax, "jnp": jnp, "lax": jax.lax, "collections": collections, "types": types,
    "functools": functools, "Record": Record, "Slots": Slots, "Table": Table,
    "object_array": object_array, "with_attribute": with_attribute, "identity": identity,
    "listed": listed,
}  # fmt: skip

# Each operation: its text, what the oracle does, and the shape of the result (None: none).
Shapes = tuple[tuple[int, ...], ...]


def _same(*shapes: tuple[int, ...]) -> Any:
    return shapes[0] if len(set(shapes)) == 1 else None


def _or_scalar(x: tuple[int, ...], y: tuple[int, ...]) -> Any:
    return x if x == y or not y else None


def _vector(x: tuple[int, ...]) -> Any:
    return x if len(x) == 1 else None


def _choose(a: Any, x: Any, y: Any) -> Any:
    mask = base(a) > 0.1
    return add(linear(lambda v: np.where(mask, v, 0.0), x), linear(lambda v: np.where(mask, 0.0, v), y))


OPERATIONS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "sin": ("jnp.sin({0})", lambda x: smooth("sin", x), _same),
    "cos": ("jnp.cos({0})", lambda x: smooth("cos", x), _same),
    "tanh": ("jnp.tanh({0})", lambda x: smooth("tanh", x), _same),
    "scale": ("1.7 * {0}", lambda x: scale(1.7, x), _same),
    "stop": ("lax.stop_gradient({0})", lambda x: base(x), _same),
    "flip": ("{0}[::-1]", lambda x: linear(lambda a: a[::-1], x), _vector),
    "sum": ("jnp.sum({0})", lambda x: linear(np.sum, x), lambda _: ()),
    "first": ("{0}[0]", lambda x: linear(lambda a: a[0], x), lambda x: x[1:] if x else None),
    "add": ("{0} + {1}", add, _same),
    "subtract": ("{0} - {1}", lambda x, y: add(x, scale(-1.0, y)), _same),
    "multiply": ("{0} * {1}", mul, _or_scalar),
    "matmul": (
        "{0} @ {1}",
        functools.partial(bilinear, np.matmul),
        lambda x, y: (*x[:-1], *y[1:]) if x and y and x[-1] == y[0] else None,
    ),
    "outer": (
        "jnp.outer({0}, {1})",
        functools.partial(bilinear, np.outer),
        lambda x, y: (2, 3) if (x, y) == ((2,), (3,)) else None,
    ),
    "where": ("jnp.where({0} > 0.1, {1}, {2})", _choose, _same),
}
UNARY = ["sin", "cos", "tanh", "scale", "stop", "flip", "sum", "first"]
BINARY = ["add", "subtract", "multiply", "multiply", "matmul", "outer"]


# --- the writer of programs -----------------------------------------------------------------------


@dataclasses.dataclass
class Signature:
    """How a decorated function is called: trees of names, one for each argument."""

    name: str
    shapes: dict[str, tuple[int, ...]]  # of the parameters' leaves
    trees: list[Any]
    statics: list[str]
    keywords: list[str] | None  # names of the parameters, if they may be given by name
    output: Any  # a tree of indices; None is an integer
    output_shapes: list[tuple[int, ...]]
    pure: bool  # it closes over nothing that is traced


@dataclasses.dataclass
class Scope:
    """Where statements are written: lines of Python, steps of the oracle, the names in reach."""

    lines: list[str]
    steps: list[Step]
    shapes: dict[str, tuple[int, ...]]
    reads: dict[str, str]  # how a name is read here, if not by itself
    functions: dict[str, Signature]
    depth: int  # of nesting that is left
    inside_rule: bool = False
    loops: bool = False  # `while_loop` may stand here: nothing differentiates it in reverse
    forward: bool = False  # ... and nothing in it either

    def read(self, name: str) -> str:
        return self.reads.get(name, name)

    def inner(self, **changes: Any) -> "Scope":
        return dataclasses.replace(
            self, lines=[], steps=[], shapes=dict(self.shapes), reads=dict(self.reads),
            functions=dict(self.functions), **changes,
        )  # fmt: skip


def indented(lines: Sequence[str]) -> list[str]:
    return ["    " + line for line in lines]


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree of names in the order of JAX."""
    if isinstance(tree, dict):
        return [leaf for k in sorted(tree) for leaf in leaves(tree[k])]
    if isinstance(tree, (list, tuple)):
        return [leaf for t in tree for leaf in leaves(t)]
    return [tree]


def text(tree: Any, read: Callable[[Any], str]) -> str:
    """Return a tree as Python."""
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{k!r}: {text(v, read)}" for k, v in tree.items()) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(text(t, read) for t in tree) + "]"
    if isinstance(tree, tuple):
        return "(" + "".join(text(t, read) + ", " for t in tree) + ")"
    return read(tree)


def paths(tree: Any, root: str) -> Iterator[tuple[Any, str]]:
    """Yield each leaf with the expression that reads it."""
    if isinstance(tree, dict):
        for k, v in tree.items():
            yield from paths(v, f"{root}[{k!r}]")
    elif isinstance(tree, (list, tuple)):
        for i, v in enumerate(tree):
            yield from paths(v, f"{root}[{i}]")
    else:
        yield tree, root


class Writer:
    """Writes one program. `features` says what is in it; what is in `without` never is."""

    def __init__(self, seed: int, without: Sequence[str] = (), exact: bool = False) -> None:
        self.random = random.Random(seed)
        self.without = set(without)
        self.exact = exact  # rules are the true derivatives
        self.features: set[str] = set()
        self.count = 0
        self.orders = 0  # of derivatives that the program itself may take

    # choices

    def name(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def feature(self, kind: str, options: Sequence[str]) -> str:
        """Choose, among those that are not switched off, and remember the choice."""
        allowed = [o for o in options if not {kind, f"{kind}: {o}"} & self.without] or options[:1]
        chosen = self.random.choice(allowed)
        self.features.add(f"{kind}: {chosen}")
        return chosen

    def has(self, feature: str, p: float) -> bool:
        chosen = self.chance(p) and feature not in self.without
        if chosen:
            self.features.add(feature)
        return chosen

    def arrange(self, names: list[str]) -> Any:
        """Return a random tree of these names."""
        names = list(names)
        kind = self.random.randrange(4)
        if len(names) == 1:
            return [names[0], names[0], {"a": names[0]}, [names[0]]][kind]
        if kind == 0:
            return {"b": names[0], "a": self.arrange(names[1:])}
        if kind == 1:
            return [names[0], self.arrange(names[1:])]
        return tuple(names) if kind == 2 else {f"k{9 - i}": n for i, n in enumerate(names)}

    # statements

    def assign(self, scope: Scope, operation: str, *args: str, name: str | None = None) -> str:
        template, step, shape = OPERATIONS[operation]
        name = name or self.name("v")
        scope.shapes[name] = shape(*(scope.shapes[a] for a in args))
        assert scope.shapes[name] is not None
        scope.lines.append(f"{name} = " + template.format(*map(scope.read, args)))

        def run(env: Env) -> None:
            env[name] = step(*(env[a] for a in args))

        scope.steps.append(run)
        return name

    def pick(self, scope: Scope) -> str:
        """Choose a name, preferably a recent one."""
        names = [n for n in scope.shapes if not n.startswith("C")]
        if not names or self.chance(0.05):
            return constant(self.random.choice(SHAPES))
        return self.random.choice(names[-4:] if self.chance(0.6) else names)

    def of_shape(self, scope: Scope, shape: tuple[int, ...]) -> str:
        """Choose or make a value of this shape."""
        names = [n for n, s in scope.shapes.items() if s == shape and not n.startswith("C")]
        if names and self.chance(0.8):
            return self.random.choice(names)
        x = self.pick(scope)
        if scope.shapes[x]:
            x = self.assign(scope, "sum", x)
        x = self.assign(scope, self.random.choice(["sin", "tanh"]), x)
        return self.assign(scope, "multiply", constant(shape), x) if shape else x

    def operation(self, scope: Scope) -> str:
        for _ in range(20):
            operation = self.random.choice([*UNARY, *BINARY, *BINARY, "where"])
            count = 1 if operation in UNARY else 2 if operation in BINARY else 3
            args = [self.pick(scope) for _ in range(count)]
            if OPERATIONS[operation][2](*(scope.shapes[a] for a in args)) is not None:
                name = self.assign(scope, operation, *args)
                # Products grow; what is differentiated three times should not.
                return self.assign(scope, "tanh", name) if operation == "multiply" else name
        return self.assign(scope, "sin", self.pick(scope))

    def fill(self, scope: Scope, count: int) -> None:
        """Write some statements."""
        for _ in range(count):
            r = self.random.random()
            if scope.depth and r < 0.3:
                self.call(scope, self.define(scope))
            elif scope.functions and r < 0.45:
                self.call(scope, self.random.choice(list(scope.functions.values())))
            elif scope.depth and r < 0.65:
                self.block(scope)
            else:
                self.operation(scope)

    def nested(
        self, scope: Scope, shapes: Sequence[Any], result: Any, count: int = 2, **changes: Any
    ) -> tuple[str, Callable[..., Any]]:
        """Write a function of arrays of these shapes; return its name and what it computes."""
        name, params = self.name("b"), [self.name("v") for _ in shapes]
        inner = scope.inner(depth=scope.depth - 1, **changes)
        inner.shapes |= dict(zip(params, shapes, strict=True))
        self.fill(inner, count)
        x = self.of_shape(inner, result)
        # All parameters count.
        for p in params:
            y = self.assign(inner, "sum", p) if inner.shapes[p] else p
            x = self.assign(inner, "multiply", x, self.assign(inner, "cos", y))
        scope.lines.append(f"def {name}({', '.join(params)}):")
        scope.lines.extend(indented([*inner.lines, f"return {x}"]))

        def run(env: Env, *args: Any) -> Any:
            local = {**env, **dict(zip(params, args, strict=True))}
            for step in inner.steps:
                step(local)
            return local[x]

        return name, run

    def block(self, scope: Scope) -> str:
        """Write a transformation of a piece of code, which may close over what is around it."""
        kinds = ["jit", "checkpoint", "jit of jit", "vmap", "vmap of vmap", "scan", "fori_loop",
                 "map", "cond", "switch", "custom_jvp"]  # fmt: skip
        if scope.loops or scope.forward:
            kinds += ["while_loop"] * 3
        if self.orders:
            kinds += ["grad", "jvp", "vjp"]
        kind = self.feature("block", kinds)
        args = [self.pick(scope) for _ in range(self.random.choice([1, 2]))]
        shapes = [scope.shapes[a] for a in args]
        result = self.random.choice(SHAPES)
        name = self.name("v")
        write = functools.partial(self._set, scope, name)
        reads = [scope.read(a) for a in args]
        given = ", ".join(reads)

        def values(env: Env) -> list[Any]:
            return [env[a] for a in args]

        if kind in ("jit", "checkpoint", "jit of jit"):
            b, run = self.nested(scope, shapes, result)
            around = {"jit of jit": "jax.jit(jax.jit({}))"}.get(kind, f"jax.{kind}({{}})")
            return write(result, f"{around.format(b)}({given})", lambda env: run(env, *values(env)))
        if kind in ("vmap", "vmap of vmap"):
            return self._vmap(scope, kind, args, shapes, result, write)
        if kind in ("scan", "fori_loop", "while_loop"):
            changes = {"loops": scope.loops} if kind == "while_loop" else {}
            xs = shapes if kind == "scan" else shapes[:1]
            b, run = self.nested(scope, xs, shapes[0], **changes)
            steps = {
                "scan": f"lax.scan(lambda c, x: ({b}(c, x), None), {reads[0]}, "
                f"jnp.stack([{reads[-1]}, 0.5 * {reads[-1]}]))[0]",
                "fori_loop": f"lax.fori_loop(0, 2, lambda i, c: {b}(c), {reads[0]})",
                "while_loop": f"lax.while_loop(lambda s: s[0] < 2, "
                f"lambda s: (s[0] + 1, {b}(s[1])), (0, {reads[0]}))[1]",
            }
            if kind == "scan" and len(args) == 1:
                steps[kind] = (
                    f"lax.scan(lambda c, _: ({b}(c), None), {reads[0]}, None, length=2)[0]"
                )

            def loop(env: Env) -> Any:
                c, x = values(env)[0], values(env)[-1]
                for factor in (1.0, 0.5):
                    c = run(env, c, scale(factor, x)) if len(xs) == 2 else run(env, c)
                return c

            return write(shapes[0], steps[kind], loop)
        if kind == "map":
            b, run = self.nested(scope, shapes[:1], result)
            xs = f"jnp.stack([{reads[0]}, 0.5 * {reads[0]}])"
            return write(
                result,
                f"jnp.sum(lax.map({b}, {xs}), 0)",
                lambda env: add(run(env, env[args[0]]), run(env, scale(0.5, env[args[0]]))),
            )
        if kind in ("cond", "switch"):
            b, run = self.nested(scope, shapes, result)
            c, other = self.nested(scope, shapes, result, count=1)
            if kind == "switch":
                index = self.random.choice([0, 1])
                chosen = [run, other][index]
                return write(
                    result,
                    f"lax.switch({index}, [{b}, {c}], {given})",
                    lambda env: chosen(env, *values(env)),
                )
            return write(
                result,
                f"lax.cond(jnp.sum({reads[0]}) > 0.2, {b}, {c}, {given})",
                lambda env: (run if np.sum(base(env[args[0]])) > 0.2 else other)(env, *values(env)),
            )
        if kind == "custom_jvp":
            return self._custom_jvp(scope, args, shapes, result, given, write)
        return self._derivative(scope, kind, args, shapes, given, write)

    def _set(self, scope: Scope, name: str, shape: Any, expression: str, value: Any) -> str:
        scope.shapes[name] = shape
        scope.lines.append(f"{name} = {expression}")

        def run(env: Env) -> None:
            env[name] = value(env)

        scope.steps.append(run)
        return name

    def _vmap(self, scope: Scope, kind: str, args: Any, shapes: Any, result: Any, write: Any) -> str:
        b, run = self.nested(scope, shapes, result)
        mapped = [i == 0 or self.chance(0.5) for i in range(len(args))]
        if self.chance(0.3):
            mapped.reverse()
        axes, texts = [], []
        for a, m in zip(args, mapped, strict=True):
            axis = self.random.choice([0, -1, len(scope.shapes[a])]) if m else None
            axes.append(str(axis))
            x = scope.read(a)
            texts.append(f"jnp.stack([{x}, 0.5 * {x}], {axis})" if m else x)
        factors = [[f if m else 1.0 for m in mapped] for f in (1.0, 0.5)]
        function = f"jax.vmap({b}, in_axes=({', '.join(axes)},))"
        given = ", ".join(texts)
        if kind == "vmap of vmap":
            function = f"jax.vmap(lambda *a: jnp.sum({function}(*a), 0), in_axes=(-1,{' None,' * (len(args) - 1)}))"
            x = texts[0]
            given = ", ".join([f"jnp.stack([{x}, 0.3 * {x}], -1)", *texts[1:]])
            factors = [[g * f[0], *f[1:]] for g in (1.0, 0.3) for f in factors]

        def value(env: Env) -> Any:
            ys = [run(env, *(scale(c, env[a]) for c, a in zip(f, args, strict=True))) for f in factors]
            return functools.reduce(add, ys)

        return write(result, f"jnp.sum({function}({given}), 0)", value)

    def _custom_jvp(
        self, scope: Scope, args: Any, shapes: Any, result: Any, given: str, write: Any
    ) -> str:
        """Write a hand-written derivative, three times too large; it closes over constants."""
        local = scope.inner(depth=scope.depth, inside_rule=False)
        local.shapes = {n: s for n, s in scope.shapes.items() if n.startswith("C")}
        local.functions = {n: f for n, f in scope.functions.items() if f.pure}
        b, run = self.nested(local, shapes, result)
        scope.lines.extend(local.lines)
        j = self.name("j")
        factor = 1.0 if self.exact else 3.0
        scope.lines.extend(
            [
                f"{j} = jax.custom_jvp({b})",
                f"{j}.defjvp(lambda p, t: ({j}(*p), {factor} * jax.jvp({b}, p, t)[1]))",
            ]
        )

        def call(env: Env, *values: Any) -> Any:
            level = level_of(*values)
            if not level:
                return run(env, *values)
            primals = [split(v, level)[0] for v in values]
            tangent = split(run(env, *values), level)[1]
            tangent = None if tangent is None else scale(factor, tangent)
            return dual(level, call(env, *primals), tangent)

        return write(result, f"{j}({given})", lambda env: call(env, *(env[a] for a in args)))

    def _derivative(
        self, scope: Scope, kind: str, args: Any, shapes: Any, given: str, write: Any
    ) -> str:
        """Write a derivative as part of the program: a gradient penalty, a tangent."""
        self.orders -= 1
        changes = {} if kind == "jvp" else {"forward": False, "loops": False}
        b, run = self.nested(scope, shapes, (), **changes)
        if kind == "jvp":
            tangents = ", ".join(constant(s) for s in shapes)
            expression = f"jax.jvp({b}, ({given},), tuple(map(jnp.asarray, ({tangents},))))[1]"

            def pushed(env: Env) -> Any:
                vs = [CONSTANTS[s] for s in shapes]
                return directional(
                    lambda *x: run(env, *x), [env[a] for a in args], vs, list(env.values())
                )

            return write((), expression, pushed)
        if kind == "grad":
            expression = f"jax.grad({b})({given})"
        else:
            expression = f"jax.vjp({b}, {given})[1](1.0)[0]"

        def pulled(env: Env) -> Any:
            x, *rest = [env[a] for a in args]
            found = gradient(lambda x: run(env, x, *rest), [x], [*env.values(), *rest])
            flat = stack(found)
            return linear(lambda v: v.reshape(shapes[0]), flat)

        return write(shapes[0], expression, pulled)

    # decorated functions

    def call(self, scope: Scope, f: Signature) -> None:
        """Write a call of a decorated function."""
        args = {p: self.of_shape(scope, s) for p, s in f.shapes.items()}
        arguments = [text(t, lambda p: scope.read(args[p])) for t in f.trees]
        function, name = scope.read(f.name), self.name("y")
        params = list(f.shapes)
        results = [self.name("v") for _ in f.output_shapes]
        factors = [1.0]
        if f.statics:
            arguments += f.statics
        elif self.has("direct: jit", 0.15):
            function = f"jax.jit({function})"
        elif self.has("direct: checkpoint", 0.1):
            function = f"jax.checkpoint({function})"
        elif self.has("direct: vmap", 0.15):
            mapped = self.random.randrange(len(arguments))
            axes = tuple(0 if i == mapped else None for i in range(len(arguments)))
            function = f"jax.vmap({function}, in_axes={axes})"
            x = arguments[mapped]
            arguments[mapped] = f"jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), {x})"
            factors = [1.0, 0.5]
            varied = set(leaves(f.trees[mapped]))
        if f.keywords and function == f.name and self.has("by name", 0.5):
            arguments = [f"{k}={a}" for k, a in zip(f.keywords, arguments, strict=True)]
        scope.lines.append(f"{name} = {function}({', '.join(arguments)})")
        for index, path in paths(f.output, name):
            if index is not None:
                over = f"jnp.sum({path}, 0)" if len(factors) > 1 else path
                scope.lines.append(f"{results[index]} = {over}")
        scope.shapes |= dict(zip(results, f.output_shapes, strict=True))

        def run(env: Env) -> None:
            total: list[Any] = [None] * len(results)
            for c in factors:
                values = [env[args[p]] for p in params]
                if c != 1.0:
                    values = [scale(c, v) if p in varied else v for p, v in zip(params, values)]
                total = [add(t, y) for t, y in zip(total, env[f.name](*values), strict=True)]
            env.update(zip(results, total, strict=True))

        scope.steps.append(run)

    def define(self, scope: Scope, pure: bool = False) -> Signature:
        """Write a decorated function."""
        return Definition(self, scope, pure).write()


class Definition:
    """Writes one decorated function."""

    def __init__(self, writer: Writer, scope: Scope, pure: bool) -> None:
        self.w, self.scope, self.random = writer, scope, writer.random
        self.name = writer.name("h")
        self.pure = pure
        self.inside = scope.inside_rule
        if self.inside:
            writer.features.add("written in a rule")

    def write(self) -> Signature:
        w, scope = self.w, self.scope
        if scope.depth < 2:
            w.features.add("leaf function")
        self._inputs()
        self._captures()
        d = self.declared = Declared(self.name, list(self.shapes))
        inner = self.inner = scope.inner(depth=scope.depth - 1, loops=False)
        # What it may use: constants, its inputs, and what it closes over.
        inner.shapes = {n: s for n, s in scope.shapes.items() if n.startswith("C")}
        inner.shapes |= self.shapes | {n: scope.shapes[n] for n in self.used}
        inner.functions = {n: f for n, f in scope.functions.items() if f.pure}
        inner.reads |= self.reads
        for tree, p in zip(self.trees, self.params, strict=True):
            inner.lines.extend(f"{n} = {path}" for n, path in paths(tree, p) if n != path)
        d.body, d.autodiff = inner.steps, self.protocol == "autodiff"
        if w.exact:
            outputs, maps = self._exact()
            given = self.protocol in ("tf", "declared")
            self.gradients = {n: m for n, m in maps.items() if given or n in self.shapes}
        else:
            outputs = self._body()
        d.outputs = outputs
        self.output_shapes = [inner.shapes[n] for n in outputs]
        rule_lines = self._rule()
        self._emit(rule_lines)

        pure = [n for n, f in scope.functions.items() if f.pure]

        def make(env: Env) -> None:
            names = [*self.used, *self.rule_used, *self.functions, *pure, *CONSTANT_NAMES]
            captured = {n: env[n] for n in names}
            env[self.name] = Function(d, captured)

        scope.steps.append(make)
        captured_nothing = not (self.used or self.rule_used or self.functions)
        signature = Signature(
            self.name, self.shapes, self.trees, self.static_values, self.by_name,
            self.output_tree, self.output_shapes, captured_nothing,
        )  # fmt: skip
        scope.functions[self.name] = signature
        return signature

    def _inputs(self) -> None:
        w = self.w
        count = self.random.choice([1, 1, 2, 2, 3])
        names = [w.name("v") for _ in range(count)]
        self.shapes = {n: self.random.choice(SHAPES) for n in names}
        cut = self.random.randrange(1, count + 1)
        groups = [names[:cut], names[cut:]] if cut < count else [names]
        if w.chance(0.5):
            groups = [[n] for n in names]
        self.trees = [w.arrange(g) for g in groups]
        # A tree that is a bare name is the parameter itself.
        self.params = [t if isinstance(t, str) else w.name("p") for t in self.trees]
        self.shapes = {n: self.shapes[n] for t in self.trees for n in leaves(t)}
        self.static_params, self.static_values = [], []
        if w.has("static arguments", 0.2):
            self.static_params = [w.name("s"), w.name("s")]
            self.static_values = [repr(self.random.choice(["sin", "cos"])), "2.5"]
        self.by_name = None

    def _captures(self) -> None:
        """Choose what it closes over, in which places, and who gives the gradients."""
        w, scope = self.w, self.scope
        names = [n for n in scope.shapes if not n.startswith("C")]
        self.protocol, self.used, self.rule_used, self.functions = "none", [], [], []
        self.reads: dict[str, str] = {}
        if self.pure or not names or w.chance(0.25):
            self.place = "cell"
            return
        self.used = self.random.sample(names, min(len(names), self.random.choice([0, 1, 1, 2])))
        self.protocol = w.feature("protocol", ["none", "declared", "tf", "autodiff"])
        if w.exact and self.protocol == "none" and not self.inside:
            self.used = []
        if self.protocol == "none" and not self.inside:
            # Not differentiated: its derivative ends here.
            self.used = [w.assign(scope, "stop", n) for n in self.used]
        if not self.used:
            self.protocol = "none"
        others = [n for n in names if n not in self.used]
        if others and not w.exact and w.has("only the rule captures", 0.35):
            self.rule_used = [self.random.choice(others)]
        outer = [n for n, f in scope.functions.items() if not f.pure]
        if outer and not w.exact and w.has("the rule calls a closure", 0.3):
            self.functions = [self.random.choice(outer)]
        if not (self.used or self.rule_used):
            self.place = "cell"
            return
        self.place = w.feature("capture", [*PLACES, *HOLDERS])
        captured = [*self.used, *self.rule_used]
        if self.place in HOLDERS:
            put, get = HOLDERS[self.place]
            for n in captured:
                held = w.name("held")
                scope.lines.append(f"{held} = {put.format(scope.read(n))}")
                self.reads[n] = get.format(None, held)
        elif self.place in ("self", "callable object"):
            self.reads = {n: f"self_{self.name}.{n}" for n in captured}
        elif self.place != "cell":
            self.reads = {n: n for n in captured}

    def _body(self) -> list[str]:
        """Write what `f` computes; what only its value needs may hold a `while_loop`."""
        w, inner = self.w, self.inner
        if self.static_params:
            self._statics()
        order = self.used = self.random.sample(self.used, len(self.used))
        # In the order of first use, so that all count.
        uses = [w.assign(inner, self.random.choice(["sin", "tanh", "scale"]), n) for n in order]
        w.fill(inner, self.random.choice([0, 1, 2]))
        residuals = inner.inner()
        residuals.lines, residuals.steps = inner.lines, inner.steps
        if self.rule_used and w.has("a residual of what only the rule captures", 0.5):
            for n in self.rule_used:
                residuals.shapes[n] = self.scope.shapes[n]
                w.assign(residuals, "sin", n)
        self.residuals = residuals
        value = inner.inner(loops=self.protocol != "autodiff")
        value.lines, value.steps = inner.lines, inner.steps
        w.fill(value, self.random.choice([0, 1, 2]))
        count = self.random.choice([1, 1, 1, 2, 3])
        outputs = []
        for i in range(count):
            shape = self.random.choice(SHAPES)
            y = w.of_shape(value, shape)
            for u in uses if i == 0 else []:
                u = w.assign(value, "sum", u) if value.shapes[u] else u
                y = w.assign(value, "multiply", y, w.assign(value, "cos", u))
            outputs.append(w.assign(value, "scale", y))
        inner.shapes |= {n: value.shapes[n] for n in outputs}
        # What a rule knows of `y` is `f`'s own; with a loop in it there is no second derivative.
        hidden = "while_loop" in "".join(inner.lines) and not self.scope.forward
        self.visible_outputs = [] if hidden else outputs
        return outputs

    def _statics(self) -> None:
        w, inner = self.w, self.inner
        mode, factor = self.static_params
        x = w.pick(inner)
        name = w.name("v")
        chosen = eval(self.static_values[0])
        same = f"type({factor}) is float" if w.has("float as it is", 0.5) else "True"
        inner.lines.append(f"assert isinstance({mode}, str) and {same}")
        inner.lines.append(
            f"{name} = {factor} * jnp.{chosen}({inner.read(x)}) if {mode} == {chosen!r} else None"
        )
        inner.shapes[name] = inner.shapes[x]

        def run(env: Env) -> None:
            env[name] = scale(2.5, smooth(chosen, env[x]))

        inner.steps.append(run)

    def _exact(self) -> tuple[list[str], dict[str, list[Any]]]:
        """Write `y = sin(x) * cos(sum(u)) ...` over all inputs and used values, and its rule."""
        w, inner = self.w, self.inner
        self.used = self.random.sample(self.used, len(self.used))
        first, *others = [*self.used, *self.shapes]
        y = w.assign(inner, "sin", first)
        slope = w.assign(inner, "cos", first)
        sums = []
        for n in others:
            s = w.assign(inner, "sum", n) if inner.shapes[n] else n
            sums.append((n, w.assign(inner, "tanh", s), s))
        product = y
        for _, t, _ in sums:
            product = w.assign(inner, "multiply", product, t)
        for _, t, _ in sums:
            slope = w.assign(inner, "multiply", slope, t)
        maps: dict[str, list[Any]] = {first: [(0, "elementwise", slope)]}
        for n, t, s in sums:
            rest = y
            for m, u, _ in sums:
                if m != n:
                    rest = w.assign(inner, "multiply", rest, u)
            squared = w.assign(inner, "multiply", t, t)
            one = w.assign(inner, "cos", w.assign(inner, "subtract", s, s))
            factor = w.assign(inner, "subtract", one, squared)
            rest = w.assign(inner, "multiply", rest, factor)
            maps[n] = [(0, "total", rest)]
        self.residuals = inner
        self.visible_outputs = []
        return [product], maps

    # the rule

    def _rule(self) -> list[str]:
        w, d = self.w, self.declared
        rule = self.residuals.inner(inside_rule=True, loops=False, depth=self.scope.depth - 1)
        d.rule = rule.steps
        for n in self.rule_used:
            rule.shapes[n] = self.scope.shapes[n]
        rule.shapes |= {n: self.inner.shapes[n] for n in self.visible_outputs}
        for n in self.functions:
            rule.functions[n] = self.scope.functions[n]
        self.output_tree, upstreams = self._outputs()
        self.variables_text = None
        if self.protocol == "declared":
            self.variables = w.arrange(self.used)
            if w.has("the rule reads its variables", 0.5):
                rule.reads |= dict(paths(self.variables, "variables"))
        if not w.exact:
            if w.has("recursion", 0.15) and not self.static_params and not self.used:
                rule.functions[self.name] = Signature(
                    self.name, self.shapes, self.trees, [], None, self.output_tree,
                    self.output_shapes, False,
                )  # fmt: skip
                w.call(rule, rule.functions[self.name])
            elif self.functions:
                w.call(rule, rule.functions[self.functions[0]])
            w.fill(rule, self.random.choice([0, 0, 1, 2]))
            self.gradients = self._maps(rule)
        gradients = {
            n: " + ".join(self._term(rule, n, *m, upstreams) for m in maps) if maps else "None"
            for n, maps in self.gradients.items()
        }
        result = self._result(gradients)
        if self.protocol == "declared":
            form = self.variables if w.chance(0.5) else leaves(self.variables)
            result = f"{result}, {text(form, gradients.get)}"
        elif self.protocol == "tf":
            values = ", ".join(rule.read(n) for n in self.used)
            given = ", ".join(gradients[n] for n in self.used)
            result = f"{result}, listed(variables, [{values}], [{given}])"
        return [*rule.lines, f"return {result}"]

    def _outputs(self) -> tuple[Any, list[str]]:
        """Arrange the outputs; return their tree and what each upstream is called."""
        w = self.w
        count = len(self.output_shapes)
        indices: list[Any] = list(range(count))
        self.integer = not w.exact and w.has("an integer output", 0.1)
        self.convention = w.feature("convention", ["tf", "tf", "jax"])
        # Names stand for leaves here, so that None can be one.
        tree: Any = w.arrange([*map(str, indices), *(["int"] if self.integer else [])])
        if w.exact:
            tree = "0"

        def numbers(tree: Any) -> Any:
            if isinstance(tree, dict):
                return {k: numbers(v) for k, v in tree.items()}
            if isinstance(tree, (list, tuple)):
                return type(tree)(numbers(t) for t in tree)
            return None if tree == "int" else int(tree)

        result = numbers(tree)
        if self.convention == "jax":
            self.upstream_params = ["dy"]
            names = {i: path for i, path in paths(result, "dy")}
        else:
            order = leaves(result)
            self.upstream_params = [f"d{'_int' if i is None else i}" for i in order]
            names = {i: f"d{i}" for i in order}
        return result, [names[i] for i in indices]

    def _maps(self, rule: Scope) -> dict[str, list[Any]]:
        """Choose a linear map from the upstreams to each gradient."""
        w = self.w
        found: dict[str, list[Any]] = {}
        moved = [*self.shapes, *(self.used if self.protocol in ("tf", "declared") else [])]
        for n in moved:
            maps = []
            if not w.has("None", 0.08):
                for j in self.random.sample(range(len(self.output_shapes)), self.random.randint(1, len(self.output_shapes))):
                    maps.append((j, *self._map(rule, rule.shapes[n], self.output_shapes[j])))
            found[n] = maps
        return found

    def _map(self, rule: Scope, to: tuple[int, ...], of: tuple[int, ...]) -> tuple[Any, ...]:
        w = self.w
        kinds = ["rank one"]
        if to == of:
            kinds += ["elementwise"] * 2
            if to and len(to) == 1:
                kinds += ["flipped", "scanned", "mapped"]
            kinds += ["cond"]
        if not of:
            kinds += ["spread"] * 2
        if not to:
            kinds += ["total"] * 2
        if (to, of) in [((2,), (3,)), ((3,), (2,))]:
            kinds += ["matrix"] * 2
        if to == (2, 3) and len(of) == 1:
            kinds += ["outer"] * 2
        kind = w.feature("rule", kinds)
        if kind in ("elementwise", "flipped", "scanned", "mapped", "cond"):
            shapes = [of, of] if kind in ("cond", "scanned") else [of]
        elif kind == "spread":
            shapes = [to]
        elif kind == "total":
            shapes = [of]
        elif kind == "matrix":
            shapes = [(2, 3)]
        elif kind == "outer":
            shapes = [(3,) if of == (2,) else (2,)]
        else:
            shapes = [of, to]
        return kind, *(w.of_shape(rule, s) for s in shapes)

    def _term(
        self, rule: Scope, name: str, j: int, kind: str, *args: Any
    ) -> str:
        """Return the text of one linear map, and tell the oracle its transpose."""
        *residuals, upstreams = args
        dy = upstreams[j]
        a = rule.read(residuals[0])
        b = rule.read(residuals[-1])
        x, z = residuals[0], residuals[-1]
        of, to = self.output_shapes[j], rule.shapes.get(name, self.inner.shapes.get(name))
        factor = 1.0 if self.w.exact else self.random.choice([1.0, 7.0, -3.0])
        dot = functools.partial(bilinear, lambda p, q: np.sum(p * q))
        matmul, outer = (functools.partial(bilinear, f) for f in (np.matmul, np.outer))

        def flip(v: Any) -> Any:
            return linear(lambda p: p[::-1], v)

        if kind == "elementwise":
            pull, push = f"{dy} * {a}", lambda e, t: mul(t, e[x])
        elif kind == "flipped":
            pull, push = f"({dy} * {a})[::-1]", lambda e, t: mul(flip(t), e[x])
        elif kind == "mapped":
            pull, push = f"jax.vmap(lambda d, r: r * d)({dy}, {a})", lambda e, t: mul(t, e[x])
        elif kind == "scanned":
            pull = (
                f"lax.scan(lambda c, r: (c + r * {dy}, None), jnp.zeros_like({dy}), "
                f"jnp.stack([{a}, {b}]))[0]"
            )
            push = lambda e, t: mul(t, add(e[x], e[z]))  # noqa: E731
        elif kind == "cond":
            pull = f"lax.cond(jnp.sum({a}) > 0.2, lambda d: d * {a}, lambda d: 2.0 * d * {b}, {dy})"

            def push(e: Env, t: Any) -> Any:
                return mul(t, e[x]) if np.sum(base(e[x])) > 0.2 else scale(2.0, mul(t, e[z]))
        elif kind == "spread":
            pull, push = f"{dy} * {a}", lambda e, t: dot(t, e[x])
        elif kind == "total":
            pull, push = f"jnp.sum({dy} * {a})", lambda e, t: mul(e[x], t)
            if to:  # of an exact rule: the gradient by each entry of a sum
                pull = f"jnp.sum({dy} * {a}) * jnp.ones({to})"
                push = lambda e, t: mul(e[x], linear(np.sum, t))  # noqa: E731
        elif kind == "matrix" and of == (3,):
            pull, push = f"{a} @ {dy}", lambda e, t: matmul(t, e[x])
        elif kind == "matrix":
            pull, push = f"{dy} @ {a}", lambda e, t: matmul(e[x], t)
        elif kind == "outer" and of == (2,):
            pull, push = f"jnp.outer({dy}, {a})", lambda e, t: matmul(t, e[x])
        elif kind == "outer":
            pull, push = f"jnp.outer({a}, {dy})", lambda e, t: matmul(e[x], t)
        else:
            pull = f"{b} * jnp.sum({a} * {dy})"
            push = lambda e, t: mul(e[x], dot(e[z], t))  # noqa: E731
        around = "none" if self.w.exact else self.w.feature("rule in", ["none"] * 4 + ["jit", "checkpoint"])
        if around != "none" and dy.isidentifier():
            pull = f"jax.{around}(lambda {dy}: {pull})({dy})"
        self.declared.maps.append((name, j, lambda e, t: scale(factor, push(e, t))))
        return f"{factor} * {pull}" if factor != 1.0 else pull

    def _result(self, gradients: dict[str, str]) -> str:
        """Return the gradients of the inputs in one of the forms that a rule may choose."""
        w = self.w
        form = w.feature("form", ["structure", "leaves"])
        if self.static_params and not w.has("leaves beside a number", 0.5):
            form = "structure"
        if form == "leaves" and len(self.shapes) + len(self.static_params) > 1:
            return "[" + ", ".join(gradients[n] for n in self.shapes) + "]"
        trees = [text(t, gradients.get) for t in self.trees]
        trees += ["None"] * (len(self.static_params) + (self.place == "argument"))
        return trees[0] if len(trees) == 1 else f"({', '.join(trees)})"

    # the text of it all

    def _emit(self, rule_lines: list[str]) -> None:
        scope, place, name = self.scope, self.place, self.name
        captured = [*self.used, *self.rule_used]
        outer = ", ".join(scope.read(n) for n in captured)
        by_name = ", ".join(f"{n}={scope.read(n)}" for n in captured)
        integer = f"jnp.argmax({next(iter(self.shapes))})"
        outputs = self.declared.outputs
        y = text(self.output_tree, lambda i: integer if i is None else outputs[i])
        takes = ["variables"] if self.protocol in ("tf", "declared") else []
        rule = [f"def grad({', '.join([*self.upstream_params, *takes])}):", *indented(rule_lines)]
        body = [*self.inner.lines, *rule, f"return {y}, grad"]

        self_name = f"self_{name}"
        options = []
        if self.convention == "jax":
            options.append("convention='jax'")
        if self.protocol == "autodiff":
            options.append("variables='autodiff'")
        if self.protocol == "declared":
            prefix = f"lambda {self_name}: " if place == "self" else ""
            read = self.reads.get if place == "self" else scope.read
            options.append(f"variables={prefix}{text(self.variables, read)}")
        decorate = f"custom_gradient({', '.join(options)})" if options else "custom_gradient"

        params = [*self.params, *self.static_params]
        self.by_name = None if place == "argument" else list(params)
        if place == "argument":
            body = [f"{', '.join(captured)}, = fetch()", *body]
            params.append("fetch")
        elif place in ("default", "keyword default"):
            params += ["*"] if place == "keyword default" else []
            params.append(by_name)
        elif place == "keyword":
            params += ["*", *captured]
        elif place == "partial of f":
            params = [*captured, *params]

        if place in ("self", "callable object"):
            method, made = ("call" if place == "self" else "__call__"), f"{name}_class({outer})"
            scope.lines.append(f"class {name}_class:")
            init = [f"{self_name}.{n} = {n}" for n in captured]
            lines = [f"def __init__({', '.join([self_name, *captured])}):", *indented(init)]
            lines += [f"@{decorate}"] if place == "self" else []
            lines += [f"def {method}({', '.join([self_name, *params])}):", *indented(body)]
            scope.lines.extend(indented(lines))
            made = f"{made}.call" if place == "self" else f"{decorate}({made})"
            scope.lines.append(f"{name} = {made}")
        elif place in ("keyword", "argument", "partial of f"):
            f = f"{name}_f"
            scope.lines.extend([f"def {f}({', '.join(params)}):", *indented(body)])
            made = {
                "keyword": f"functools.partial({decorate}({f}), {by_name})",
                "argument": f"functools.partial(lambda g, h, *a: h(*a, g), "
                f"(lambda a: lambda: a)(({outer},)), {decorate}({f}))",
                "partial of f": f"{decorate}(functools.partial({f}, {outer}))",
            }
            scope.lines.append(f"{name} = {made[place]}")
        else:
            head = f"def {name}({', '.join(params)}):"
            scope.lines.extend([f"@{decorate}", head, *indented(body)])


CONSTANT_NAMES = [constant(s) for s in SHAPES]


# --- programs -------------------------------------------------------------------------------------

Loss = Callable[..., Any]

# A derivative in a direction, of a scalar function of pytrees; what it is of is the same in all.
DERIVATIVES: dict[str, Callable[[Loss, Any], Loss]] = {
    "grad": lambda f, v: lambda *x: inner_product(jax.grad(f, argnums(x))(*x), v),
    "jacrev": lambda f, v: lambda *x: inner_product(jax.jacrev(f, argnums(x))(*x), v),
    "vjp": lambda f, v: lambda *x: inner_product(jax.vjp(f, *x)[1](jnp.ones(())), v),
    "jvp": lambda f, v: lambda *x: jax.jvp(f, x, v)[1],
    "jacfwd": lambda f, v: lambda *x: inner_product(jax.jacfwd(f, argnums(x))(*x), v),
    "linearize": lambda f, v: lambda *x: jax.linearize(f, *x)[1](*v),
}
FORWARD = ["jvp", "jacfwd"]

# The full derivative: all of the gradients, in the order of the leaves.
LAST: dict[str, Callable[[Loss], Loss]] = {
    "grad": lambda f: lambda *x: jax.grad(f, argnums(x))(*x),
    "value_and_grad": lambda f: lambda *x: jax.value_and_grad(f, argnums(x))(*x)[1],
    "jacrev": lambda f: lambda *x: jax.jacrev(f, argnums(x))(*x),
    "vjp": lambda f: lambda *x: jax.vjp(f, *x)[1](jnp.ones(())),
    "jacfwd": lambda f: lambda *x: jax.jacfwd(f, argnums(x))(*x),
    "hessian": lambda f: lambda *x: jax.hessian(f, argnums(x))(*x),
}


def argnums(x: Sequence[Any]) -> tuple[int, ...]:
    return tuple(range(len(x)))


def inner_product(a: Any, b: Any) -> Any:
    products = jax.tree.map(lambda p, q: jnp.sum(p * q), a, b)
    return functools.reduce(jnp.add, jax.tree.leaves(products))


def paired(x: Any) -> Any:
    return jax.tree.map(lambda a: jnp.stack([a, 0.5 * a]), x)


# The sum of a function at `x` and at `x / 2`, by a transformation, or the function itself.
AROUND: dict[str, Callable[[Loss], Loss]] = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda *x: jax.lax.cond(True, f, lambda *_: jnp.zeros(()), *x),
    "vmap": lambda f: lambda *x: jnp.sum(jax.vmap(f)(*paired(x))),
    "vmap of the first": lambda f: lambda *x: jnp.sum(
        jax.vmap(f, (0,) + (None,) * (len(x) - 1))(paired(x[0]), *x[1:])
    ),
    "scan": lambda f: lambda *x: jax.lax.scan(
        lambda c, x: (c + f(*x), None), jnp.zeros(()), paired(x)
    )[0],
    "map": lambda f: lambda *x: jnp.sum(jax.lax.map(lambda x: f(*x), paired(x))),
}


@dataclasses.dataclass
class Program:
    """A random program."""

    seed: int
    source: str
    features: set[str]
    steps: list[tuple[str, Any]]  # what is done to the loss: a name, and a direction or nothing
    args: tuple[Any, ...]
    trees: list[Any]
    value: Callable[..., Any]  # the loss, by the oracle

    def describe(self) -> str:
        steps = " -> ".join(name for name, _ in self.steps)
        return f"# seed {self.seed}: {steps}\n# arguments: {self.args}\n{self.source}"

    def actual(self, decorator: Any) -> list[Any]:
        """Return all derivatives as JAX finds them."""
        namespace = {**NAMESPACE, "custom_gradient": decorator}
        namespace |= {constant(s): c for s, c in CONSTANTS.items()}
        exec(compile(self.source, f"<random program {self.seed}>", "exec"), namespace)
        f = namespace["loss"]
        for name, direction in self.steps[:-1]:
            f = AROUND[name](f) if direction is None else DERIVATIVES[name](f, direction)
        name, jit = self.steps[-1]
        f = LAST[name](f)
        return jax.tree.leaves((jax.jit(f) if jit else f)(*self.args))

    def expected(self) -> list[np.ndarray]:
        f, xs = self.value, leaves_of(self.args)
        first = len(leaves_of(self.args[0]))
        for name, direction in self.steps[:-1]:
            f = _oracle_step(f, name, direction, first)
        if self.steps[-1][0] != "hessian":
            return _shaped(gradient(f, xs), [x.shape for x in xs])
        found: list[Any] = []
        for u in directions(xs):  # rows: the inner derivative
            found.append(gradient(lambda *x, u=u: directional(f, x, u), xs))
        rows, at, out = np.array(found), 0, []
        for x in xs:
            block = rows[at : at + x.size]
            at += x.size
            parts = np.split(block, np.cumsum([y.size for y in xs])[:-1], axis=1)
            out += [b.reshape(x.shape + y.shape) for b, y in zip(parts, xs, strict=True)]
        return out


def leaves_of(tree: Any) -> list[Any]:
    return leaves(tree)


def _shaped(values: list[Any], shapes: Sequence[Any]) -> list[np.ndarray]:
    out, rest = [], np.array(values, np.float64)
    for shape in shapes:
        size = int(np.prod(shape))
        out.append(rest[:size].reshape(shape))
        rest = rest[size:]
    return out


def _oracle_step(f: Loss, name: str, direction: Any, first: int) -> Loss:
    if direction is not None:
        return lambda *x: directional(f, x, leaves_of(direction))
    if name in ("jit", "checkpoint", "cond"):
        return f
    count = first if name == "vmap of the first" else None

    def both(*x: Any) -> Any:
        half = [scale(0.5, a) if count is None or i < count else a for i, a in enumerate(x)]
        return add(f(*x), f(*half))

    return both


def program(seed: int, without: Sequence[str] = (), exact: bool = False) -> Program:
    """Make the program of this seed; `without` are features that it must not have."""
    w = Writer(seed, without, exact)
    constants = {constant(s): s for s in SHAPES}
    # How it is differentiated
    order = w.random.choice([1, 2, 2, 3])
    forward = w.has("forward mode alone", 0.15)
    if order < 3 and w.chance(0.3):
        w.orders = 1
    prelude = Scope([], [], dict(constants), {}, {}, depth=1)
    if w.chance(0.3):
        w.define(prelude, pure=True)
    # The loss
    names = [w.name("x") for _ in range(w.random.choice([1, 2, 2, 3]))]
    shapes = {n: w.random.choice(SHAPES[:3]) for n in names}
    if w.chance(0.3):
        shapes[names[0]] = (2, 3)
    cut = w.random.randrange(1, len(names) + 1)
    trees = [w.arrange(g) for g in (names[:cut], names[cut:]) if g]
    params = [t if isinstance(t, str) else w.name("p") for t in trees]
    scope = prelude.inner(depth=w.random.choice([1, 2, 2, 3]), forward=forward, loops=forward)
    scope.shapes |= shapes
    for tree, p in zip(trees, params, strict=True):
        scope.lines.extend(f"{n} = {path}" for n, path in paths(tree, p) if n != path)
    w.call(scope, w.define(scope))
    w.fill(scope, w.random.choice([0, 1, 2]))
    used = w.random.sample(sorted(n for n in scope.shapes if n not in constants), 2)
    ends = [*names, list(scope.shapes)[-1], *used]
    total = None
    for n in dict.fromkeys(ends):
        n = w.assign(scope, "sin", n)
        n = w.assign(scope, "sum", n) if scope.shapes[n] else n
        total = n if total is None else w.assign(scope, "add", total, n)
    squared = w.assign(scope, "multiply", total, w.assign(scope, "cos", total))
    lines = [*prelude.lines, f"def loss({', '.join(params)}):"]
    lines += indented([*scope.lines, f"return {squared}"])
    # The arguments
    numbers = np.random.default_rng(seed)
    values = {n: numbers.uniform(-1, 1, shapes[n]) for n in names}

    def tree_of(tree: Any, of: Callable[[str], Any]) -> Any:
        if isinstance(tree, dict):
            return {k: tree_of(t, of) for k, t in tree.items()}
        if isinstance(tree, (list, tuple)):
            return type(tree)(tree_of(t, of) for t in tree)
        return of(tree)

    # The steps
    steps: list[tuple[str, Any]] = []
    last = ["jacfwd"] if forward else list(LAST)
    if order < 2 or forward:
        last = [n for n in last if n != "hessian"]
    final = w.feature("last", last)
    left = order - (2 if final == "hessian" else 1)
    kinds = FORWARD if forward else list(DERIVATIVES)
    around = 2
    while left or (around and w.chance(0.4)):
        if left and w.chance(0.6):
            left -= 1
            direction = tuple(
                tree_of(t, lambda n: numbers.uniform(-1, 1, shapes[n])) for t in trees
            )
            steps.append((w.feature("derivative", kinds), direction))
        elif around:
            around -= 1
            steps.append((w.feature("around", list(AROUND)), None))
    steps.append((final, w.has("jit of all", 0.4)))
    w.features.add(f"order {order}")

    def value(*xs: Any) -> Any:
        env: Env = {constant(s): c for s, c in CONSTANTS.items()}
        env |= dict(zip([n for t in trees for n in leaves(t)], xs, strict=True))
        for step in [*prelude.steps, *scope.steps]:
            step(env)
        return env[squared]

    args = tuple(tree_of(t, values.get) for t in trees)
    return Program(seed, "\n".join(lines), w.features, steps, args, trees, value)


class DisagreementError(AssertionError):
    """JAX and the oracle have different numbers."""


def check(p: Program, decorator: Any = None, rtol: float = 1e-8) -> None:
    """Raise unless JAX and the oracle agree, with 64-bit numbers."""
    with x64():
        actual = p.actual(decorator or tfgrad_jax.custom_gradient)
        expected = p.expected()
        assert len(actual) == len(expected)
        size = max([1.0, *(np.max(np.abs(e)) for e in expected)])
        assert np.isfinite(size)
        for a, e in zip(actual, expected, strict=True):
            assert a.dtype == np.float64 and a.shape == e.shape, (a.dtype, a.shape, e.shape)
            if not np.max(np.abs(a - e)) <= rtol * size:
                raise DisagreementError(f"JAX has\n{a}\nand the oracle\n{e}")


def x64() -> contextlib.AbstractContextManager[Any]:
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


def main() -> None:
    parser = argparse.ArgumentParser(description="Check random programs against the oracle.")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--without", action="append", default=[], help="a feature, or its kind")
    parser.add_argument("--exact", action="store_true", help="check the oracle: no decorator")
    parser.add_argument("--show", action="store_true", help="print every program")
    parser.add_argument("--trace", action="store_true", help="print tracebacks")
    options = parser.parse_args()
    decorator = undecorated if options.exact else tfgrad_jax.custom_gradient
    failed: list[tuple[Program, BaseException]] = []
    seen: collections.Counter[str] = collections.Counter()
    bad: collections.Counter[str] = collections.Counter()
    seeds = range(options.seed, options.seed + options.count)
    for seed in (bar := tqdm.tqdm(seeds, unit="program")):
        p = program(seed, options.without, options.exact)
        if options.show:
            tqdm.tqdm.write(p.describe())
        seen.update(p.features)
        try:
            check(p, decorator)
        except Exception as error:
            failed.append((p, error))
            bad.update(p.features)
            if options.trace:
                tqdm.tqdm.write(traceback.format_exc())
            bar.set_postfix(failed=len(failed))
        if seed % 50 == 49:
            jax.clear_caches()
    wrong = [p for p, e in failed if isinstance(e, DisagreementError)]
    if failed:
        smallest, error = min(failed, key=lambda f: (len(f[0].source), f[0].seed))
        print(smallest.describe())
        print(f"{type(error).__name__}: {error}")
        print("features of those that failed:")
        for feature, count in sorted(bad.items(), key=lambda f: -f[1] / seen[f[0]])[:25]:
            print(f"  {count:4} of {seen[feature]:4}  {feature}")
        for p, e in failed:
            print(f"seed {p.seed}: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}")
    print(f"{options.count} programs: {len(wrong)} wrong, {len(failed) - len(wrong)} raised")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
