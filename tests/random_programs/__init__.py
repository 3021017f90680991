"""Random programs of decorated functions, and an oracle that takes only pytrees from JAX.

A program is the source of a scalar `loss` over a few small arrays, and the way its derivative is
taken. It runs twice: its words mean JAX and this package, or the oracle, which computes with nested
dual numbers in NumPy. No rule of a program is the true derivative.
"""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tfgrad_jax

from . import _oracle as oracle
from ._declared import Definition
from ._vocabulary import BY_ORACLE, CONSTANTS, IN_JAX, SHAPES
from ._vocabulary import undecorated as undecorated
from ._writer import Scope, Writer, filled, indented, paths

# All derivatives of a scalar function of pytrees, in the order of the leaves.
FULL = {
    "grad": "jax.grad(f, (*range(len(x)),))(*x)",
    "jacrev": "jax.jacrev(f, (*range(len(x)),))(*x)",
    "vjp": "jax.vjp(f, *x)[1](jnp.ones(()))",
    "jacfwd": "jax.jacfwd(f, (*range(len(x)),))(*x)",
}
# The derivative in a direction; by all others it is an inner product.
ALONG = {"jvp": "jax.jvp(f, x, v)[1]", "linearize": "jax.linearize(f, *x)[1](*v)"}
ALONG |= {name: f"inner_product({full}, v)" for name, full in FULL.items()}
# The sum of a function at `x` and at `x / 2`, by a transformation, or the function itself.
AROUND = {
    "jit": "jax.jit(f)(*x)",
    "checkpoint": "jax.checkpoint(f)(*x)",
    "cond": "lax.cond(True, f, lambda *_: jnp.zeros(()), *x)",
    "vmap": "jnp.sum(jax.vmap(f)(*paired(x)))",
    "scan": "lax.scan(lambda c, x: (c + f(*x), None), jnp.zeros(()), paired(x))[0]",
}
MODES = {
    "both": [*FULL, "jvp", "linearize"],
    "reverse": ["grad", "jacrev", "vjp"],
    "forward": ["jvp", "jacfwd"],
}


def inner_product(a, b):
    products = jax.tree.map(lambda p, q: jnp.sum(p * q), a, b)
    return functools.reduce(jnp.add, jax.tree.leaves(products))


def step(words, f, way, v=None):
    """Return a function of `x` that takes a derivative of `f`, or that transforms it."""

    def paired(x):
        return jax.tree.map(lambda a: words["jnp"].stack([a, 0.5 * a]), x)

    names = {"f": f, "v": v, "paired": paired, "inner_product": inner_product}
    return eval(f"lambda *x: {way}", words | names)


@dataclasses.dataclass
class Program:
    """A random program."""

    seed: int
    source: str
    features: set[str]
    steps: list[tuple[str, Any]]  # what is done to the loss: a way, and a direction or nothing
    last: str  # the derivative by all arguments that is taken in the end
    jit: bool
    args: tuple[Any, ...]

    @property
    def size(self):
        """What it costs to check, roughly."""
        return self.source.count("\n") * 3 ** len(self.steps) * (1 if self.jit else 4)

    def describe(self):
        steps = " -> ".join([*(name for name, _ in self.steps), self.last])
        way = "under jit" if self.jit else "eagerly"
        given = str(self.args).replace("\n", "\n#")
        return f"# {steps}, {way}, at\n# {given}\n{self.source}"

    def but_the_last(self, words, along):
        """Define the loss with the words' meaning, and take all but the last derivative."""
        words = {**words, "__name__": "random_program"}
        exec(compile(self.source, f"<random program {self.seed}>", "exec"), words)
        f = words["loss"]
        for name, v in self.steps:
            f = step(words, f, AROUND[name] if v is None else along[name], v)
        return f

    def actual(self, decorator):
        """Return all derivatives as JAX finds them."""
        f = self.but_the_last(IN_JAX | {"custom_gradient": decorator}, ALONG)
        f = step(IN_JAX, f, FULL[self.last])
        with explicit_mesh() if "an explicit mesh" in self.features else contextlib.nullcontext():
            return jax.tree.leaves((jax.jit(f) if self.jit else f)(*self.args))

    def expected(self):
        f = self.but_the_last(BY_ORACLE, dict.fromkeys(ALONG, ALONG["jvp"]))
        return oracle.gradient(f, *self.args)


def program(seed):
    w = Writer(seed, Definition)
    order = w.random.choice([1, 2, 2, 3])
    w.features.add(f"order {order}")
    w.orders = int(order < 3 and w.chance(0.3))
    w.solves = order + w.orders < 3
    forward = w.mode == "forward"
    numbers = np.random.default_rng(seed)

    # The arguments
    names = [w.name("x") for _ in range(w.random.choice([1, 2, 2, 3]))]
    shapes = {n: w.random.choice(SHAPES[:3]) for n in names}
    if w.chance(0.3):
        shapes[names[0]] = (2, 3)
    cut = w.random.randrange(1, len(names) + 1)
    trees = [w.arrange(g) for g in (names[:cut], names[cut:]) if g]

    def draw():
        return tuple(filled(t, lambda n: numbers.uniform(-1, 1, shapes[n])) for t in trees)

    args = draw()

    # The loss, and functions at the level of the module
    module = Scope({name: value.shape for name, value in CONSTANTS.items()})
    if w.chance(0.3):
        w.define(module, pure=True)
    params = [t if isinstance(t, str) else w.name("p") for t in trees]
    scope = module.inner(depth=w.random.choice([1, 1, 2, 2, 3]), forward=forward, loops=forward)
    scope.shapes |= shapes
    for tree, p in zip(trees, params, strict=True):
        scope.lines.extend(f"{n} = {path}" for n, path in paths(tree, p) if n != path)
    w.call(scope, w.define(scope))
    w.fill(scope, w.random.choice([0, 0, 1, 2]))
    total = None
    for n in dict.fromkeys([w.random.choice(names), *list(scope.shapes)[-2:]]):
        n = w.scalar(scope, n)
        total = n if total is None else w.assign(scope, "add", total, n)
    result = w.assign(scope, "sin", total)
    if w.has("a square", 0.5):  # its second derivative asks for the first of the functions again
        result = w.assign(scope, "multiply", result, result)
    head = f"def loss({', '.join(params)}):"
    source = [*module.lines, head, *indented([*scope.lines, f"return {result}"])]

    # Its derivatives
    modes = MODES[w.mode]
    last, steps = w.feature("last", [n for n in modes if n in FULL]), []
    for _ in range(order - 1):
        steps.append((w.feature("derivative", modes), draw()))
    for _ in range(w.random.choice([0, 0, 1, 2])):
        at = w.random.randint(0, len(steps))
        around = [n for n in AROUND if w.scans or n != "scan"]
        steps.insert(at, (w.feature("around", around), None))
    jit = not w.has("eager", 0.25)
    w.has("an explicit mesh", 0.15)
    return Program(seed, "\n".join(source), w.features, steps, last, jit, args)


def explicit_mesh():
    """Let types carry their sharding, on one device."""
    return jax.set_mesh(jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,)))


class DisagreementError(AssertionError):
    """JAX and the oracle have different numbers."""


def check(p, decorator=tfgrad_jax.custom_gradient, rtol=1e-8):
    """Raise unless JAX and the oracle agree, with 64-bit numbers; the error has the program."""
    with x64(), described(p):
        actual, expected = p.actual(decorator), p.expected()
        size = max([1.0, *(np.max(np.abs(e)) for e in expected)])
        assert np.isfinite(size)
        for a, e in zip(actual, expected, strict=True):
            assert a.dtype == np.float64 and a.shape == e.shape, (a.dtype, a.shape, e.shape)
            if not np.max(np.abs(a - e)) <= rtol * size:
                raise DisagreementError(f"JAX has\n{a}\nand the oracle\n{e}")


@contextlib.contextmanager
def described(p):
    try:
        yield
    except Exception as error:
        error.add_note(p.describe())
        raise


@contextlib.contextmanager
def x64():
    """Let float64 exist in all threads: `jax.enable_x64` does not hold in those of callbacks."""
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)
