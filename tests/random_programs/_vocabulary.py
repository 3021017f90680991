"""The words of the programs: operations, constants, and the objects that may hold a value."""

import collections
import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tfgrad_jax

from ._oracle import add, base, bilinear, linear, mul, scale, smooth


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

    def __call__(self) -> Any:
        return self.a


class Table(dict):
    """Objects with attributes, which may hold others, and a name."""

    def __init__(self, a: Any) -> None:
        super().__init__()
        self.a, self.name, self.inner = a, "table", [Record(a)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pair:
    """An object that is an input: of values, and of names in the text of a program."""

    a: Any
    b: Any


@jax.tree_util.register_pytree_node_class
class Auxiliary(Slots):
    """A pytree without leaves: what it holds is in its definition."""

    __slots__ = ()

    def tree_flatten(self) -> Any:
        return (), self.a

    @classmethod
    def tree_unflatten(cls, a: Any, _: Any) -> Any:
        return cls(a)


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
    if isinstance(f, staticmethod | classmethod):
        return type(f)(undecorated(f.__func__))

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
    "attribute of an attribute": ("Slots(Table({0}))", "{1}.value.inner[0].get()"),
    "slice": ("slice({0}, None)", "{1}.start"),
    "mapping proxy": ("types.MappingProxyType({{'a': {0}}})", "{1}['a']"),
    "class attribute": ("type('Held', (), {{'a': {0}}})", "{1}.a"),
    "property": ("Slots({0})", "{1}.value"),
    "callable object held": ("Slots({0})", "{1}()"),
    "tree definition": ("jax.tree.structure(Auxiliary({0}))", "jax.tree.unflatten({1}, ()).a"),
}
# These concern the whole function. "cell" reads the value by its name in the enclosing scope.
PLACES = [
    "cell", "cell", "default", "keyword default", "keyword", "self", "pytree self", "pytree self",
    "callable object", "partial of f", "argument", "static method", "class method",
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


CONSTANT_NAMES = {constant(s): s for s in SHAPES}


NAMESPACE = {
    "__name__": "random_program",
    "jax": jax, "jnp": jnp, "lax": jax.lax,
    "collections": collections, "functools": functools, "types": types,
    "recompute_grad": tfgrad_jax.recompute_grad,
    "grad_pass_through": tfgrad_jax.grad_pass_through,
    **{constant(s): c for s, c in CONSTANTS.items()},
}  # fmt: skip
NAMESPACE |= {
    f.__name__: f
    for f in (
        Record, Slots, Auxiliary, Table, Pair, object_array, with_attribute, identity, listed,
        register, logged, jitted_checkpoint,
    )
}  # fmt: skip


def _same(*shapes: tuple[int, ...]) -> Any:
    return shapes[0] if len(set(shapes)) == 1 else None


def _or_scalar(x: tuple[int, ...], y: tuple[int, ...]) -> Any:
    return x if x == y or not y else None


def _vector(x: tuple[int, ...]) -> Any:
    return x if len(x) == 1 else None


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
    "where": ("jnp.where({0} > 0.1, {1}, {2})", choose, _same),
}
UNARY = ["sin", "cos", "tanh", "scale", "stop", "flip", "sum", "first"]
BINARY = ["add", "subtract", "multiply", "multiply", "matmul", "outer"]
