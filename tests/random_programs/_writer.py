"""Writes statements, each for Python and for the oracle, and the transformations among them."""

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ._oracle import (
    Env,
    Step,
    add,
    base,
    directional,
    gradient,
    linear,
    scale,
    stack,
    with_base,
    without_tangents,
)
from ._vocabulary import BINARY, CONSTANTS, OPERATIONS, OPERATORS, SHAPES, UNARY, Pair, constant


@functools.cache
def drops_in_scan() -> bool:
    """Return whether JAX takes the value of a custom_jvp for its own derivative in a `scan`."""
    inner, outer = (jax.custom_jvp(lambda x: x * 1.0) for _ in range(2))
    inner.defjvp(lambda primals, tangents: (inner(*primals), 7 * tangents[0]))
    outer.defjvp(lambda primals, tangents: (outer(*primals), inner(*primals) * tangents[0]))

    def loop(x: Any) -> Any:
        return jax.lax.scan(lambda s, x: (s + outer(x), None), 0 * x, x[None])[0]

    return float(jax.grad(jax.grad(loop))(2.0)) != 7


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


def has_keys(tree: Any) -> bool:
    """Return whether there is a dict with several keys in a tree."""
    several = lambda node: isinstance(node, dict) and len(node) > 1  # noqa: E731
    return any(map(several, jax.tree.leaves(tree, is_leaf=several)))


def leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)


def filled(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a tree with something in the place of each leaf."""
    return jax.tree.map(leaf, tree, is_leaf=lambda leaf: leaf is None)


class Raw(str):
    __slots__ = ()
    __repr__ = str.__str__


def text(tree: Any, read: Callable[[Any], str]) -> str:
    """Return a tree as Python."""
    return repr(filled(tree, lambda leaf: Raw(read(leaf))))


def paths(tree: Any, root: str) -> list[tuple[Any, str]]:
    """Return each leaf with the expression that reads it."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)
    return [(leaf, root + jax.tree_util.keystr(path)) for path, leaf in found]


class Writer:
    """Writes one program. `features` says what is in it; what is in `without` never is."""

    def __init__(self, seed: int, without: Sequence[str] = ()) -> None:
        self.random = random.Random(seed)
        self.without = set(without)
        self.features: set[str] = set()
        self.stopped: set[str] = set()  # names of values whose derivative ends there
        self.count = 0
        self.orders = 0  # of derivatives that the program itself may take
        self.solves = True  # JAX raises an error for third derivatives of some solutions
        self.mode = self.feature("mode", ["both", "both", "both", "both", "reverse", "forward"])
        self.scans = self.chance(0.75)

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
        kind = self.random.randrange(5)
        if len(names) == 1:
            return [names[0], names[0], {"a": names[0]}, [names[0]], names[0]][kind]
        if kind == 4:
            return Pair(self.arrange(names[:-1]), names[-1])
        if kind == 0:
            return {"b": names[0], "a": self.arrange(names[1:])}
        if kind == 1:
            return [names[0], self.arrange(names[1:])]
        return tuple(names) if kind == 2 else {f"k{9 - i}": n for i, n in enumerate(names)}

    # statements

    def assign(self, scope: Scope, operation: str, *args: str, name: str | None = None) -> str:
        template, step, shape = OPERATIONS[operation]
        if operation in (*OPERATORS, "self-adjoint"):
            self.features.add(f"operation: {operation}")
        name = name or self.name("v")
        if operation == "stop":
            self.stopped.add(name)
        found = shape(*(scope.shapes[a] for a in args))
        expression = template.format(*map(scope.read, args))
        return self.set(scope, name, found, expression, lambda env: step(*(env[a] for a in args)))

    def pick(self, scope: Scope) -> str:
        """Choose a name, preferably a recent one."""
        names = [n for n in scope.shapes if not n.startswith("C")]
        if not names or self.chance(0.05):
            return constant(self.random.choice(SHAPES))
        return self.random.choice(names[-4:] if self.chance(0.6) else names)

    def of_shape(self, scope: Scope, shape: tuple[int, ...]) -> str:
        """Choose or make a value of this shape."""
        names = [n for n, s in scope.shapes.items() if s == shape and not n.startswith("C")]
        if names and self.chance(0.9):
            return self.random.choice(names)
        x = self.pick(scope)
        if scope.shapes[x]:
            x = self.assign(scope, "sum", x)
        x = self.assign(scope, self.random.choice(["sin", "tanh"]), x)
        return self.assign(scope, "multiply", constant(shape), x) if shape else x

    def operation(self, scope: Scope) -> str:
        for _ in range(20):
            operation = self.random.choice([*UNARY, *BINARY, *BINARY, "where"])
            if operation == "implicit" and not self.solves:
                continue
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
        self, scope: Scope, shapes: Sequence[Any], result: Any, count: int = 1, **changes: Any
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
        kinds = ["jit", "checkpoint", "vmap", "vmap", "cond"]
        kinds += ["scan"] if self.scans else []
        kinds += ["while_loop"] * 3 if self.scans and (scope.loops or scope.forward) else []

        kinds += ["recompute_grad", "grad_pass_through"]
        if self.orders:
            kinds += {"reverse": ["grad"], "forward": ["jvp"]}.get(self.mode, ["grad", "jvp"])
        kind = self.feature("block", kinds)
        args = [self.pick(scope) for _ in range(self.random.choice([1, 2]))]
        shapes = [scope.shapes[a] for a in args]
        result = self.random.choice(SHAPES)
        name = self.name("v")
        write = functools.partial(self.set, scope, name)
        reads = [scope.read(a) for a in args]
        given = ", ".join(reads)

        def values(env: Env) -> list[Any]:
            return [env[a] for a in args]

        if kind in ("jit", "checkpoint", "recompute_grad"):
            b, run = self.nested(scope, shapes, result)
            function = f"{kind}({b})" if kind == "recompute_grad" else f"jax.{kind}({b})"
            return write(result, f"{function}({given})", lambda env: run(env, *values(env)))
        if kind == "grad_pass_through":
            # The derivative of the identity; what it closes over has none.
            b, run = self.nested(scope, shapes[:1], shapes[0], loops=True)

            def passed(env: Env) -> Any:
                value = run(without_tangents(env), base(env[args[0]]))
                return with_base(env[args[0]], value)

            return write(shapes[0], f"{kind}({b})({reads[0]})", passed)
        if kind == "vmap":
            return self._vmap(scope, args, shapes, result, write)
        if kind in ("scan", "while_loop"):
            changes = {"loops": scope.loops} if kind == "while_loop" else {}
            both = kind == "scan" and len(args) == 2
            b, run = self.nested(scope, shapes if both else shapes[:1], shapes[0], **changes)
            stacked = f"jnp.stack([{reads[-1]}, 0.5 * {reads[-1]}])"
            of_x = f"lax.scan(lambda c, x: ({b}(c, x), None), {reads[0]}, {stacked})[0]"
            of_c = f"lax.scan(lambda c, _: ({b}(c), None), {reads[0]}, None, length=2)[0]"
            body = f"lambda s: s[0] < 2, lambda s: (s[0] + 1, {b}(s[1]))"
            steps = {
                "scan": of_x if both else of_c,
                "while_loop": f"lax.while_loop({body}, (0, {reads[0]}))[1]",
            }

            def loop(env: Env) -> Any:
                c, x = values(env)[0], values(env)[-1]
                for factor in (1.0, 0.5):
                    c = run(env, c, scale(factor, x)) if both else run(env, c)
                return c

            return write(shapes[0], steps[kind], loop)
        if kind == "cond":
            b, run = self.nested(scope, shapes, result)
            c, other = self.nested(scope, shapes, result)

            def chosen(env: Env) -> Any:
                return (run if np.sum(base(env[args[0]])) > 0.2 else other)(env, *values(env))

            condition = f"lax.cond(jnp.sum({reads[0]}) > 0.2, {b}, {c}, {given})"
            return write(result, condition, chosen)
        return self._derivative(scope, kind, args, shapes, given, write)

    def set(self, scope: Scope, name: str, shape: Any, expression: str, value: Any) -> str:
        scope.shapes[name] = shape
        scope.lines.append(f"{name} = {expression}")

        def run(env: Env) -> None:
            env[name] = value(env)

        scope.steps.append(run)
        return name

    def _vmap(self, scope: Scope, args: Any, shapes: Any, result: Any, write: Any) -> str:
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
        expression = f"jax.vmap({b}, in_axes=({', '.join(axes)},))({', '.join(texts)})"

        def value(env: Env) -> Any:
            halves = [
                scale(0.5, env[a]) if m else env[a] for a, m in zip(args, mapped, strict=True)
            ]
            return add(run(env, *(env[a] for a in args)), run(env, *halves))

        return write(result, f"jnp.sum({expression}, 0)", value)

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

        def pulled(env: Env) -> Any:
            x, *rest = [env[a] for a in args]
            found = gradient(lambda x: run(env, x, *rest), [x], [*env.values(), *rest])
            flat = stack(found)
            return linear(lambda v: v.reshape(shapes[0]), flat)

        return write(shapes[0], f"jax.grad({b})({given})", pulled)

    # decorated functions

    def call(self, scope: Scope, f: Signature) -> None:
        """Write a call of a decorated function."""
        args = {p: self.of_shape(scope, s) for p, s in f.shapes.items()}
        arguments = [text(t, lambda p: scope.read(args[p])) for t in f.trees]
        function, name = scope.read(f.name), self.name("y")
        results = [self.name("v") for _ in f.output_shapes]
        if f.statics:
            arguments += f.statics
        elif self.has("direct: jit", 0.15):
            function = f"jax.jit({function})"
        elif self.has("direct: checkpoint", 0.1):
            function = f"jax.checkpoint({function})"
        if f.keywords and function == f.name and self.has("by name", 0.5):
            arguments = [f"{k}={a}" for k, a in zip(f.keywords, arguments, strict=True)]
        scope.lines.append(f"{name} = {function}({', '.join(arguments)})")
        for index, path in paths(f.output, name):
            if index is not None:
                scope.lines.append(f"{results[index]} = {path}")
        scope.shapes |= dict(zip(results, f.output_shapes, strict=True))

        def run(env: Env) -> None:
            values = env[f.name](*(env[args[p]] for p in f.shapes))
            env.update(zip(results, values, strict=True))

        scope.steps.append(run)

    def define(self, scope: Scope, pure: bool = False) -> Signature:
        """Write a decorated function."""
        raise NotImplementedError
