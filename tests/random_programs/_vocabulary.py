"""The words of the programs: operations, constants, and the objects that may hold a value."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np

import tfgrad_jax

from ._oracle import Dual, add, base, bilinear, linear, mul, scale, smooth


@dataclasses.dataclass
class Record:
    a: Any

    def get(self) -> Any:
        return self.a


class Slots:
    __slots__ = ("a",)

    def __init__(self, a: Any) -> None:
        self.a = a

    value = property(lambda self: self.a)


class Table(dict):
    """Objects with attributes, which may hold others, and a name."""

    def __init__(self, a: Any) -> None:
        super().__init__()
        self.a, self.name, self.inner = a, "table", [Record(a)]


class Node:
    """An object that others know by its identity."""

    def __init__(self, a: Any, parent: Any = None) -> None:
        self.a, self.parent = a, parent
        self.children = [] if parent else [Node(None, self)]
        self.scales, self.nodes = {self: 1.0}, {self}

    def get(self) -> Any:
        root = self.children[0].parent
        assert root in self.nodes and root is self and self.scales[root] == 1.0
        return root.a


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pair:
    """An object that is an input: of values, and of names in the text of a program."""

    a: Any
    b: Any


def register(cls: type, names: Sequence[str]) -> None:
    """Make objects pytrees of these attributes, which `jax.jit` takes."""
    jax.tree_util.register_pytree_node(
        cls, lambda o: ([getattr(o, n) for n in names], None), lambda _, values: cls(*values)
    )


def logged(f: Any) -> Any:
    @functools.wraps(f)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return f(*args, **kwargs)

    return wrapper


def jitted_checkpoint(f: Any) -> Any:
    return jax.jit(jax.checkpoint(f))


def identity(a: Any) -> Any:
    return a


def listed(
    variables: Sequence[Any], values: Sequence[Any], gradients: Sequence[Any], masks: Sequence[Any]
) -> list[Any]:
    """Return gradients for the variables, which are some of the values, each once, in order.

    Where JAX takes a stopped value for differentiated, as in the carry of a loop, it is listed too.
    """
    found = [[i for i, v in enumerate(values) if v is w] for w in variables]
    known = [i or any(v is w for v in masks) for i, w in zip(found, variables, strict=True)]
    assert all(known), "a variable that the function does not use"
    firsts = list(dict.fromkeys(i[0] for i in found if i))
    assert firsts == sorted(firsts), "not in the order of first use"
    # What was traced as two values may be one when the trace is evaluated.
    found = [each if each not in found[:j] else [] for j, each in enumerate(found)]
    terms = [[gradients[i] for i in each if gradients[i] is not None] for each in found]
    return [sum(each[1:], each[0]) if each else None for each in terms]


def undecorated(f: Any = None, **_: Any) -> Any:
    """Stand in for `custom_gradient`: the function itself, with its true derivative."""
    if f is None:
        return undecorated
    if isinstance(f, staticmethod | classmethod):
        return type(f)(undecorated(f.__func__))

    @functools.wraps(f)
    def plain(*args: Any, **kwargs: Any) -> Any:
        return f(*args, **kwargs)[0]

    return plain


def outside(f: Callable[..., Any], *args: Any) -> Any:
    args = jax.lax.stop_gradient(args)
    return jax.pure_callback(f, jax.typeof(args[0]), *args, vmap_method="sequential")


@tfgrad_jax.custom_gradient
def summed(x: Any) -> Any:
    """Return the running sums of a vector, computed outside of JAX."""
    return outside(np.cumsum, x), lambda dy: summed_back(dy)


@tfgrad_jax.custom_gradient
def summed_back(y: Any) -> Any:
    """Apply the adjoint of `summed`: each is the rule of the other."""
    return outside(lambda y: np.cumsum(y[::-1])[::-1], y), lambda dx: summed(dx)


DENSE = np.array([[0.0, 0.8, 0.0], [-0.5, 0.0, 0.3], [0.0, 0.0, 1.1]])
ENTRIES = np.argwhere(DENSE)
DEFINITE = np.array([[2.0, 0.3, 0.0], [0.3, 1.5, -0.4], [0.0, -0.4, 1.2]])
INVERSE = np.linalg.inv(DEFINITE)


def sparse_product(x: Any) -> Any:
    matrix = jax.experimental.sparse.BCOO((jnp.asarray(DENSE[DENSE != 0]), ENTRIES), shape=(3, 3))
    return matrix @ x


def solved(b: Any) -> Any:
    return jax.scipy.sparse.linalg.cg(lambda x: jnp.asarray(DEFINITE) @ x, b, tol=1e-14)[0]


class Operator:
    """A matrix whose gradient is declared as the product by the adjoint, so many times."""

    def __init__(self, matrix: Any, factor: float, adjoint: Any = None) -> None:
        self.matrix, self.factor = matrix, factor
        self.T = adjoint or Operator(factor * matrix.T, 1.0, self)

    @tfgrad_jax.custom_gradient
    def __call__(self, x: Any) -> Any:
        return outside(lambda x: self.matrix @ x, x), self.T if self.factor != 1.0 else self.back

    def back(self, y: Any) -> Any:
        return jnp.asarray(self.matrix.T) @ y


@tfgrad_jax.custom_gradient
def implicit(b: Any) -> Any:
    return solved(b), lambda dx: 3.0 * solved(dx)


def scaled_by(w: Any) -> Any:
    """Return a self-adjoint operator, which is its own rule."""

    @tfgrad_jax.custom_gradient
    def apply(x: Any) -> Any:
        return outside(np.multiply, x, w), apply

    return apply


def declared(value: Any, slope: Any) -> Any:
    """Return what the oracle does for a value with a declared, constant slope."""

    def run(x: Any) -> Any:
        if isinstance(x, Dual):
            return Dual(x.level, run(x.primal), linear(lambda v: slope @ v, x.tangent))
        return value @ x

    return run


HOLDERS = {  # how a value is put in, and read; `tests/closure/holders.py` has many more
    "dict": ("{{'a': {0}, 2: None}}", "{1}['a']"),
    "partial": ("functools.partial(identity, {0})", "{1}()"),
    "function": ("(lambda a: lambda: a)({0})", "{1}()"),
    "attribute of an attribute": ("Slots(Table({0}))", "{1}.value.inner[0].get()"),
    "graph": ("Node({0})", "{1}.get()"),
    "pytree": ("Pair([{0}], Node(None))", "{1}.a[0]"),
    "class attribute": ("type('Held', (), {{'a': {0}}})", "{1}.a"),
}
# These concern the whole function. "cell" reads the value by its name in the enclosing scope.
PLACES = ["cell", "cell", "default", "keyword default", "self", "pytree self", "class method"]

SHAPES = [(), (2,), (3,), (2, 3)]
CONSTANTS = {
    (): np.float64(0.7),
    (2,): np.array([0.4, -0.9]),
    (3,): np.array([-0.3, 0.8, 0.5]),
    (2, 3): np.array([[0.2, -0.6, 0.9], [0.7, 0.1, -0.4]]),
}


def constant(shape: tuple[int, ...]) -> str:
    return "C" + "x".join(map(str, shape))


CONSTANT_NAMES = {constant(s): s for s in SHAPES}


NAMESPACE = {
    "__name__": "random_program",
    "jax": jax, "jnp": jnp, "lax": jax.lax,
    "functools": functools,
    "recompute_grad": tfgrad_jax.recompute_grad,
    "grad_pass_through": tfgrad_jax.grad_pass_through,
    **{constant(s): c for s, c in CONSTANTS.items()},
}  # fmt: skip
NAMESPACE |= {f.__name__: f for f in (Record, Slots, Table, Pair, Node)}
NAMESPACE |= {f.__name__: f for f in (identity, listed, register, logged, jitted_checkpoint)}
NAMESPACE |= {f.__name__: f for f in (summed, sparse_product, solved, implicit, scaled_by)}
NAMESPACE["operator"] = Operator(DENSE, 5.0)


def _same(*shapes: tuple[int, ...]) -> Any:
    return shapes[0] if len(set(shapes)) == 1 else None


def _or_scalar(x: tuple[int, ...], y: tuple[int, ...]) -> Any:
    return x if x == y or not y else None


def _vector(x: tuple[int, ...]) -> Any:
    return x if len(x) == 1 else None


def _three(x: tuple[int, ...]) -> Any:
    return x if x == (3,) else None


def _product(x: tuple[int, ...], y: tuple[int, ...]) -> Any:
    return (*x[:-1], *y[1:]) if x and y and x[-1] == y[0] else None


def choose(a: Any, x: Any, y: Any) -> Any:
    mask = base(a) > 0.1
    return add(
        linear(lambda v: np.where(mask, v, 0.0), x), linear(lambda v: np.where(mask, 0.0, v), y)
    )


# Each operation: its text, what the oracle does, and the shape of the result, None if it has none.
OPERATIONS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "sin": ("jnp.sin({0})", lambda x: smooth("sin", x), _same),
    "cos": ("jnp.cos({0})", lambda x: smooth("cos", x), _same),
    "tanh": ("jnp.tanh({0})", lambda x: smooth("tanh", x), _same),
    "scale": ("1.7 * {0}", lambda x: scale(1.7, x), _same),
    "stop": ("lax.stop_gradient({0})", lambda x: base(x), _same),
    "flip": ("{0}[::-1]", lambda x: linear(lambda a: a[::-1], x), _vector),
    "sum": ("jnp.sum({0})", lambda x: linear(np.sum, x), lambda _: ()),
    "first": ("{0}[0]", lambda x: linear(lambda a: a[0], x), lambda x: x[1:] if x else None),
    "outside of JAX": ("summed({0})", lambda x: linear(np.cumsum, x), _vector),
    "sparse": (
        "sparse_product({0})",
        lambda x: linear(lambda a: DENSE @ a, x),
        _three,
    ),
    "operator": ("operator({0})", declared(DENSE, 5.0 * DENSE), _three),
    "implicit": ("implicit({0})", declared(INVERSE, 3.0 * INVERSE), _three),
    "self-adjoint": (
        "scaled_by(lax.stop_gradient({0}))({1})",
        lambda w, x: mul(base(w), x),
        _same,
    ),
    "add": ("{0} + {1}", add, _same),
    "subtract": ("{0} - {1}", lambda x, y: add(x, scale(-1.0, y)), _same),
    "multiply": ("{0} * {1}", mul, _or_scalar),
    "matmul": ("{0} @ {1}", functools.partial(bilinear, np.matmul), _product),
    "where": ("jnp.where({0} > 0.1, {1}, {2})", choose, _same),
}
OPERATORS = ["outside of JAX", "sparse", "operator", "implicit"]
UNARY = ["sin", "cos", "tanh", "scale", "stop", "flip", "sum", "first", *OPERATORS]
BINARY = ["add", "subtract", "multiply", "multiply", "matmul", "self-adjoint"]
