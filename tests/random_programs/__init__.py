"""Random programs of decorated functions, and an oracle that knows neither JAX nor tfgrad_jax.

    python -m tests.random_programs --count 2000 --seed 0

A program is the source of a scalar `loss` over a few small arrays, and the way its derivative is
taken. Each of its statements is made twice, by the same random choices: as a line of Python, which
JAX runs, and as a step of the oracle, which computes with nested dual numbers in NumPy.

What the oracle takes from the contract: the derivative of a decorated function *is* the linear map
that its rule declares. Rules are sums of maps with known transposes, such as `M @ dy` with `t @ M`;
`M` and other residuals are random expressions, so that no rule is the true derivative. A number
with tangents of several levels is split at the highest one, the innermost derivative:

    h(x + e t) = h(x) + e push(x, t)

where both terms are computed from numbers of the levels below; there `h` is a decorated function
again, and `push`, the transposed rule, ordinary code.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tfgrad_jax

from ._declared import ProgramWriter
from ._oracle import Env, add, directional, gradient, scale
from ._vocabulary import CONSTANT_NAMES, CONSTANTS, NAMESPACE, SHAPES, constant
from ._vocabulary import undecorated as undecorated
from ._writer import Scope, filled, indented, leaves, paths
from ._writer import drops_in_scan as drops_in_scan

Loss = Callable[..., Any]

# All derivatives of a scalar function of pytrees, in the order of the leaves.
FULL: dict[str, Callable[[Loss], Loss]] = {
    "grad": lambda f: lambda *x: jax.grad(f, argnums(x))(*x),
    "jacrev": lambda f: lambda *x: jax.jacrev(f, argnums(x))(*x),
    "vjp": lambda f: lambda *x: jax.vjp(f, *x)[1](jnp.ones(())),
    "jacfwd": lambda f: lambda *x: jax.jacfwd(f, argnums(x))(*x),
}
# The derivative in a direction; by all others it is an inner product.
ALONG: dict[str, Callable[[Loss, Any], Loss]] = {
    "jvp": lambda f, v: lambda *x: jax.jvp(f, x, v)[1],
    "linearize": lambda f, v: lambda *x: jax.linearize(f, *x)[1](*v),
}
MODES = {
    "both": [*FULL, *ALONG],
    "reverse": ["grad", "jacrev", "vjp"],
    "forward": ["jvp", "jacfwd"],
}


def argnums(x: Sequence[Any]) -> tuple[int, ...]:
    return tuple(range(len(x)))


def along(name: str, f: Loss, direction: Any) -> Loss:
    if name in ALONG:
        return ALONG[name](f, direction)
    return lambda *x: inner_product(FULL[name](f)(*x), direction)


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
    "scan": lambda f: (
        lambda *x: jax.lax.scan(lambda c, x: (c + f(*x), None), jnp.zeros(()), paired(x))[0]
    ),
}


@dataclasses.dataclass
class Program:
    """A random program."""

    seed: int
    source: str
    features: set[str]
    steps: list[tuple[str, Any]]  # what is done to the loss: a name, and a direction or nothing
    args: tuple[Any, ...]
    value: Callable[..., Any]  # the loss, by the oracle

    @property
    def size(self) -> int:
        """What it costs to check, roughly."""
        jit = self.steps[-1][1]
        return self.source.count("\n") * 3 ** len(self.steps) * (1 if jit else 4)

    def describe(self) -> str:
        steps = " -> ".join(name for name, _ in self.steps)
        way = "under jit" if self.steps[-1][1] else "eagerly"
        head = f"# python -m tests.random_programs --seed {self.seed} --count 1"
        given = str(self.args).replace("\n", "\n#")
        return f"{head}\n# {steps}, {way}, at\n# {given}\n{self.source}"

    def actual(self, decorator: Any) -> list[Any]:
        """Return all derivatives as JAX finds them."""
        namespace = {**NAMESPACE, "custom_gradient": decorator}
        exec(compile(self.source, f"<random program {self.seed}>", "exec"), namespace)
        f = namespace["loss"]
        for name, direction in self.steps[:-1]:
            f = AROUND[name](f) if direction is None else along(name, f, direction)
        name, jit = self.steps[-1]
        f = FULL[name](f)
        with explicit_mesh() if "an explicit mesh" in self.features else contextlib.nullcontext():
            return jax.tree.leaves((jax.jit(f) if jit else f)(*self.args))

    def expected(self) -> list[np.ndarray]:
        f, xs = self.value, leaves(self.args)
        for name, direction in self.steps[:-1]:
            f = _oracle_step(f, name, direction)
        ends = np.cumsum([x.size for x in xs])[:-1]
        parts = np.split(np.array(gradient(f, xs), np.float64), ends)
        return [part.reshape(x.shape) for part, x in zip(parts, xs, strict=True)]


def _oracle_step(f: Loss, name: str, direction: Any) -> Loss:
    if direction is not None:
        return lambda *x: directional(f, x, leaves(direction))
    if name in ("jit", "checkpoint", "cond"):
        return f
    return lambda *x: add(f(*x), f(*(scale(0.5, a) for a in x)))


def program(seed: int, without: Sequence[str] = ()) -> Program:
    """Make the program of this seed, without features such as "capture: dict" or "capture"."""
    w = ProgramWriter(seed, without)
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
    order_of_leaves = leaves(trees)

    def draw() -> tuple[Any, ...]:
        return tuple(filled(t, lambda n: numbers.uniform(-1, 1, shapes[n])) for t in trees)

    args = draw()

    # The loss, and functions at the level of the module
    module = Scope([], [], dict(CONSTANT_NAMES), {}, {}, depth=1)
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
        n = w.assign(scope, "sum", n) if scope.shapes[n] else n
        total = n if total is None else w.assign(scope, "add", total, n)
    result = w.assign(scope, "sin", total)
    if w.has("a square", 0.5):  # its second derivative asks for the first of the functions again
        result = w.assign(scope, "multiply", result, result)
    head = f"def loss({', '.join(params)}):"
    source = [*module.lines, head, *indented([*scope.lines, f"return {result}"])]

    def value(*xs: Any) -> Any:
        env: Env = {constant(s): c for s, c in CONSTANTS.items()}
        env |= dict(zip(order_of_leaves, xs, strict=True))
        for step in [*module.steps, *scope.steps]:
            step(env)
        return env[result]

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
    return Program(seed, "\n".join(source), w.features, [*steps, (last, jit)], args, value)


def explicit_mesh() -> contextlib.AbstractContextManager[Any]:
    """Let types carry their sharding, on one device."""
    return jax.set_mesh(jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,)))


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


@contextlib.contextmanager
def x64() -> Iterator[None]:
    """Let float64 exist in all threads: `jax.enable_x64` does not hold in those of callbacks."""
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)
