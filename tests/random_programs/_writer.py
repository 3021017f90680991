"""Writes statements, and the transformations among them."""

import dataclasses
import functools
import random
from typing import Any

import jax

from ._vocabulary import BINARY, BLOCKS, OPERATIONS, OPERATORS, SHAPES, UNARY, Pair, constant


@dataclasses.dataclass
class Scope:
    """Where statements are written: the lines, and the names in reach."""

    shapes: dict[str, tuple[int, ...]]
    lines: list[str] = dataclasses.field(default_factory=list)
    reads: dict[str, str] = dataclasses.field(default_factory=dict)  # if not by the name itself
    functions: dict[str, Any] = dataclasses.field(default_factory=dict)
    depth: int = 1  # of nesting that is left
    inside_rule: bool = False
    loops: bool = False  # `while_loop` may stand here: nothing differentiates it in reverse
    forward: bool = False  # ... and nothing in it either

    def read(self, name):
        return self.reads.get(name, name)

    def names(self):
        return [n for n in self.shapes if not n.startswith("C")]

    def inner(self, **changes):
        copied = {n: dict(getattr(self, n)) for n in ("shapes", "reads", "functions")}
        return dataclasses.replace(self, **copied | {"lines": []} | changes)


def indented(lines):
    return ["    " + line for line in lines]


def has_keys(tree):
    """Return whether there is a dict with several keys in a tree."""
    several = lambda node: isinstance(node, dict) and len(node) > 1  # noqa: E731
    return any(map(several, jax.tree.leaves(tree, is_leaf=several)))


def leaves(tree):
    return jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)


def filled(tree, leaf):
    """Return a tree with something in the place of each leaf."""
    return jax.tree.map(leaf, tree, is_leaf=lambda leaf: leaf is None)


class Raw(str):
    __slots__ = ()
    __repr__ = str.__str__


def text(tree, read):
    """Return a tree as Python."""
    return repr(filled(tree, lambda leaf: Raw(read(leaf))))


def paths(tree, root):
    """Return each leaf with the expression that reads it."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)
    return [(leaf, root + jax.tree_util.keystr(path)) for path, leaf in found]


class Writer:
    """Writes one program. `features` says what is in it."""

    def __init__(self, seed, define):
        self.define = functools.partial(define, self)  # a decorated function
        self.random = random.Random(seed)
        self.features = set()
        self.stopped = set()  # names of values whose derivative ends there
        self.count = 0
        self.orders = 0  # of derivatives that the program itself may take
        self.solves = True  # JAX raises an error for third derivatives of some solutions
        self.mode = self.feature("mode", ["both", "both", "both", "both", "reverse", "forward"])
        self.scans = self.chance(0.75)

    # choices

    def name(self, prefix):
        self.count += 1
        return f"{prefix}{self.count}"

    def chance(self, p):
        return self.random.random() < p

    def feature(self, kind, options):
        chosen = self.random.choice(options)
        self.features.add(f"{kind}: {chosen}")
        return chosen

    def has(self, feature, p):
        chosen = self.chance(p)
        self.features |= {feature} if chosen else set()
        return chosen

    def arrange(self, names):
        """Return a random tree of these names."""
        kind, first = self.random.randrange(5), names[0]
        if len(names) == 1:
            return [first, first, {"a": first}, [first], first][kind]
        if kind == 4:
            return Pair(self.arrange(names[:-1]), names[-1])
        if kind == 0:
            return {"b": first, "a": self.arrange(names[1:])}
        if kind == 1:
            return [first, self.arrange(names[1:])]
        return tuple(names) if kind == 2 else {f"k{9 - i}": n for i, n in enumerate(names)}

    # statements

    def set(self, scope, shape, expression, name=None):
        name = name or self.name("v")
        scope.shapes[name] = shape
        scope.lines.append(f"{name} = {expression}")
        return name

    def assign(self, scope, operation, *args):
        template, shape = OPERATIONS[operation]
        if operation in (*OPERATORS, "self-adjoint"):
            self.features.add(f"operation: {operation}")
        found = shape(*(scope.shapes[a] for a in args))
        name = self.set(scope, found, template.format(*map(scope.read, args)))
        if operation == "stop":
            self.stopped.add(name)
        return name

    def pick(self, scope):
        """Choose a name, preferably a recent one."""
        names = scope.names()
        if not names or self.chance(0.05):
            return constant(self.random.choice(SHAPES))
        return self.random.choice(names[-4:] if self.chance(0.6) else names)

    def scalar(self, scope, name):
        return self.assign(scope, "sum", name) if scope.shapes[name] else name

    def of_shape(self, scope, shape):
        """Choose or make a value of this shape."""
        names = [n for n in scope.names() if scope.shapes[n] == shape]
        if names and self.chance(0.9):
            return self.random.choice(names)
        x = self.scalar(scope, self.pick(scope))
        x = self.assign(scope, self.random.choice(["sin", "tanh"]), x)
        return self.assign(scope, "multiply", constant(shape), x) if shape else x

    def operation(self, scope):
        for _ in range(20):
            operation = self.random.choice([*UNARY, *BINARY, *BINARY, "where"])
            if operation == "implicit" and not self.solves:
                continue
            count = 1 if operation in UNARY else 2 if operation in BINARY else 3
            args = [self.pick(scope) for _ in range(count)]
            if OPERATIONS[operation][1](*(scope.shapes[a] for a in args)) is not None:
                name = self.assign(scope, operation, *args)
                # Products grow; what is differentiated three times should not.
                return self.assign(scope, "tanh", name) if operation == "multiply" else name
        return self.assign(scope, "sin", self.pick(scope))

    def fill(self, scope, count):
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

    def nested(self, scope, shapes, result, **changes):
        """Write a function of arrays of these shapes; return its name."""
        name, params = self.name("b"), [self.name("v") for _ in shapes]
        inner = scope.inner(depth=scope.depth - 1, **changes)
        inner.shapes |= dict(zip(params, shapes, strict=True))
        self.fill(inner, 1)
        x = self.of_shape(inner, result)
        for p in params:  # all of them count
            x = self.assign(inner, "multiply", x, self.assign(inner, "cos", self.scalar(inner, p)))
        scope.lines.append(f"def {name}({', '.join(params)}):")
        scope.lines.extend(indented([*inner.lines, f"return {x}"]))
        return name

    def block(self, scope):
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
        result, name = self.random.choice(SHAPES), self.name("v")
        reads = [scope.read(a) for a in args]
        parts = {"x": reads[0], "y": reads[-1], "args": ", ".join(reads)}
        takes, returns, changes = shapes, result, {}
        if kind in ("scan", "while_loop", "grad_pass_through"):
            takes, returns = shapes if kind == "scan" else shapes[:1], shapes[0]
            result = shapes[0]
            if kind != "scan":
                changes = {"loops": scope.loops or kind == "grad_pass_through"}
        if kind in ("grad", "jvp"):  # a gradient penalty, a tangent
            self.orders -= 1
            returns, result = (), shapes[0] if kind == "grad" else ()
            changes = {"forward": False, "loops": False} if kind == "grad" else {}
            parts["tangents"] = ", ".join(map(constant, shapes))
        parts["b"] = self.nested(scope, takes, returns, **changes)
        if kind == "cond":
            parts["other"] = self.nested(scope, takes, returns)
        if kind == "vmap":
            parts |= self.mapped(reads, shapes)
        template = BLOCKS["scan of two" if kind == "scan" and len(args) == 2 else kind]
        return self.set(scope, result, template.format(**parts), name)

    def mapped(self, reads, shapes):
        """Stack some of the arguments of a `vmap`, along random axes."""
        mapped = [i == 0 or self.chance(0.5) for i in range(len(reads))]
        if self.chance(0.3):
            mapped.reverse()
        axes, texts = [], []
        for x, shape, m in zip(reads, shapes, mapped, strict=True):
            axis = self.random.choice([0, -1, len(shape)]) if m else None
            axes.append(str(axis))
            texts.append(f"jnp.stack([{x}, 0.5 * {x}], {axis})" if m else x)
        return {"axes": ", ".join(axes), "mapped": ", ".join(texts)}

    # decorated functions

    def call(self, scope, f):
        """Write a call of a decorated function."""
        args = {p: self.of_shape(scope, s) for p, s in f.shapes.items()}
        arguments = [text(t, lambda p: scope.read(args[p])) for t in f.trees]
        function, name = scope.read(f.name), self.name("y")
        results = [self.name("v") for _ in f.outputs]
        if f.statics:
            arguments += ["2.5"]
        elif self.has("direct: jit", 0.15):
            function = f"jax.jit({function})"
        elif self.has("direct: checkpoint", 0.1):
            function = f"jax.checkpoint({function})"
        if function == f.name and self.has("by name", 0.5):
            names = [*f.params, *f.statics]
            arguments = [f"{k}={a}" for k, a in zip(names, arguments, strict=True)]
        scope.lines.append(f"{name} = {function}({', '.join(arguments)})")
        for index, path in paths(f.output_tree, name):
            if index is not None:
                scope.lines.append(f"{results[index]} = {path}")
        scope.shapes |= dict(zip(results, f.output_shapes, strict=True))
