"""The words of the programs, what they mean in JAX and by the oracle, and what may hold a value."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np

import tfgrad_jax

from . import _oracle as oracle


@dataclasses.dataclass
class Record:
    a: Any

    def get(self):
        return self.a


class Node:
    """An object that others know by its identity."""

    def __init__(self, a, parent=None):
        self.a, self.parent = a, parent
        self.children = [] if parent else [Node(None, self)]
        self.scales, self.nodes = {self: 1.0}, {self}

    def get(self):
        root = self.children[0].parent
        assert root in self.nodes and root is self and self.scales[root] == 1.0
        return root.a


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pair:
    """An object that is an input: of values, and of names in the text of a program."""

    a: Any
    b: Any


def identity(a):
    return a


HOLDERS = {  # how a value is put in, and read; `tests/closure/holders.py` has many more
    "dict": ("{{'a': {0}, 2: None}}", "{1}['a']"),
    "partial": ("functools.partial(identity, {0})", "{1}()"),
    "function": ("(lambda a: lambda: a)({0})", "{1}()"),
    "attribute of an attribute": ("Record(Record({0}))", "{1}.a.get()"),
    "graph": ("Node({0})", "{1}.get()"),
    "pytree": ("Pair([{0}], Node(None))", "{1}.a[0]"),
    "class attribute": ("type('Held', (), {{'a': {0}}})", "{1}.a"),
}

SHAPES = [(), (2,), (3,), (2, 3)]


def constant(shape):
    return "C" + "x".join(map(str, shape))


CONSTANTS = {
    constant(()): np.float64(0.7),
    constant((2,)): np.array([0.4, -0.9]),
    constant((3,)): np.array([-0.3, 0.8, 0.5]),
    constant((2, 3)): np.array([[0.2, -0.6, 0.9], [0.7, 0.1, -0.4]]),
}
DENSE = np.array([[0.0, 0.8, 0.0], [-0.5, 0.0, 0.3], [0.0, 0.0, 1.1]])
DEFINITE = np.array([[2.0, 0.3, 0.0], [0.3, 1.5, -0.4], [0.0, -0.4, 1.2]])
INVERSE = np.linalg.inv(DEFINITE)


# --- what the words mean in JAX -------------------------------------------------------------------


def outside(f, *args):
    args = jax.lax.stop_gradient(args)
    return jax.pure_callback(f, jax.typeof(args[0]), *args, vmap_method="sequential")


@tfgrad_jax.custom_gradient
def summed(x):
    """Return the running sums of a vector, computed outside of JAX."""
    return outside(np.cumsum, x), lambda dy: summed_back(dy)


@tfgrad_jax.custom_gradient
def summed_back(y):
    """Apply the adjoint of `summed`: each is the rule of the other."""
    return outside(lambda y: np.cumsum(y[::-1])[::-1], y), lambda dx: summed(dx)


def sparse_product(x):
    entries = jnp.asarray(DENSE[DENSE != 0]), np.argwhere(DENSE)
    return jax.experimental.sparse.BCOO(entries, shape=(3, 3)) @ x


def solved(b):
    return jax.scipy.sparse.linalg.cg(lambda x: jnp.asarray(DEFINITE) @ x, b, tol=1e-14)[0]


@tfgrad_jax.custom_gradient
def implicit(b):
    return solved(b), lambda dx: 3.0 * solved(dx)


def scaled_by(w):
    """Return a self-adjoint operator, which is its own rule."""

    @tfgrad_jax.custom_gradient
    def apply(x):
        return outside(np.multiply, x, w), apply

    return apply


def register(cls, names):
    """Make objects pytrees of these attributes, which `jax.jit` takes."""
    jax.tree_util.register_pytree_node(
        cls, lambda o: ([getattr(o, n) for n in names], None), lambda _, values: cls(*values)
    )


def logged(f):
    @functools.wraps(f)
    def wrapper(*args, **kwargs):
        return f(*args, **kwargs)

    return wrapper


def listed(variables, values, gradients, masks):
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


def undecorated(f=None, **_):
    """Stand in for `custom_gradient`: the function itself, with its true derivative."""
    if f is None:
        return undecorated
    if isinstance(f, classmethod):
        return classmethod(undecorated(f.__func__))
    return functools.wraps(f)(lambda *args, **kwargs: f(*args, **kwargs)[0])


# What each word means in JAX, and by the oracle.
WORDS = {
    "jax": (jax, SimpleNamespace(jit=identity, checkpoint=identity, vmap=oracle.vmap)),
    "jnp": (jnp, np),
    "lax": (jax.lax, SimpleNamespace(scan=oracle.scan, while_loop=oracle.while_loop)),
    "custom_gradient": (tfgrad_jax.custom_gradient, oracle.custom_gradient),
    "recompute_grad": (tfgrad_jax.recompute_grad, identity),
    "grad_pass_through": (tfgrad_jax.grad_pass_through, oracle.grad_pass_through),
    "jitted_checkpoint": (lambda f: jax.jit(jax.checkpoint(f)), identity),
    "logged": (logged, identity),
    "register": (register, lambda cls, names: None),
    "listed": (listed, lambda variables, values, dxs, masks: zip(values, dxs, strict=True)),
    "summed": (summed, np.cumsum),
    "sparse_product": (sparse_product, lambda x: DENSE @ x),
    "solved": (solved, lambda x: INVERSE @ x),
    "implicit": (implicit, oracle.matrix(INVERSE, 3.0 * INVERSE)),
    "scaled_by": (scaled_by, lambda w: lambda x: w * x),
}
WORDS |= {f.__name__: (f, f) for f in (functools, identity, Record, Pair, Node)}
WORDS |= {name: (value, value) for name, value in CONSTANTS.items()}
WORDS["jax"][1].grad = lambda f: lambda x, *xs: oracle.gradient(lambda x: f(x, *xs), x)[0]
WORDS["jax"][1].jvp = lambda f, x, v: (None, oracle.directional(f, x, v))
WORDS["lax"][1].stop_gradient = oracle.base
WORDS["lax"][1].cond = lambda condition, f, g, *args: f(*args) if condition else g(*args)
IN_JAX, BY_ORACLE = ({name: both[i] for name, both in WORDS.items()} for i in (0, 1))


# --- operations, and linear maps ------------------------------------------------------------------


def _same(*shapes):
    return shapes[0] if len(set(shapes)) == 1 else None


def _vector(x):
    return x if len(x) == 1 else None


def _three(x):
    return x if x == (3,) else None


# Each operation, and the shape of its result, None if it has none.
OPERATIONS = {
    "sin": ("jnp.sin({0})", _same),
    "cos": ("jnp.cos({0})", _same),
    "tanh": ("jnp.tanh({0})", _same),
    "scale": ("1.7 * {0}", _same),
    "stop": ("lax.stop_gradient({0})", _same),
    "flip": ("{0}[::-1]", _vector),
    "sum": ("jnp.sum({0})", lambda x: ()),
    "first": ("{0}[0]", lambda x: x[1:] if x else None),
    "outside of JAX": ("summed({0})", _vector),
    "sparse": ("sparse_product({0})", _three),
    "implicit": ("implicit({0})", _three),
    "self-adjoint": ("scaled_by(lax.stop_gradient({0}))({1})", _same),
    "add": ("{0} + {1}", _same),
    "subtract": ("{0} - {1}", _same),
    "multiply": ("{0} * {1}", lambda x, y: x if x == y or not y else None),
    "matmul": ("{0} @ {1}", lambda x, y: (*x[:-1], *y[1:]) if x and y[:1] == x[-1:] else None),
    "where": ("jnp.where({0} > 0.1, {1}, {2})", _same),
}
OPERATORS = ["outside of JAX", "sparse", "implicit"]
UNARY = ["sin", "cos", "tanh", "scale", "stop", "flip", "sum", "first", *OPERATORS]
BINARY = ["add", "subtract", "multiply", "multiply", "matmul", "self-adjoint"]

# Pieces of code: `b` is a function of the arguments, of which `x` is the first and `y` the last.
BLOCKS = {
    "jit": "jax.jit({b})({args})",
    "checkpoint": "jax.checkpoint({b})({args})",
    "vmap": "jnp.sum(jax.vmap({b}, in_axes=({axes},))({mapped}), 0)",
    "cond": "lax.cond(jnp.sum({x}) > 0.2, {b}, {other}, {args})",
    "scan": "lax.scan(lambda c, _: ({b}(c), None), {x}, None, length=2)[0]",
    "scan of two": (
        "lax.scan(lambda c, x: ({b}(c, x), None), {x}, jnp.stack([{y}, 0.5 * {y}]))[0]"
    ),
    "while_loop": (
        "lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, {b}(s[1])), (0, {x}))[1]"
    ),
    "recompute_grad": "recompute_grad({b})({args})",
    "grad_pass_through": "grad_pass_through({b})({x})",
    "grad": "jax.grad({b})({args})",
    "jvp": "jax.jvp({b}, ({args},), tuple(map(jnp.asarray, ({tangents},))))[1]",
}

# Linear maps from an upstream of the shape `of` to a gradient of the shape `to`: where each fits,
# the shapes of its residuals `a` and `b`, and its text.
_ELEMENTWISE, _VECTOR = lambda to, of: to == of, lambda to, of: to == of and len(to) == 1
_THREE = lambda to, of: to == of == (3,)  # noqa: E731
_ONE, _TWO = lambda to, of: [of], lambda to, of: [of, of]
_COND = "lax.cond(jnp.sum({c}) > 0.2, lambda d: d * {{a}}, lambda d: 2.0 * d * {{b}}, {{dy}})"
_STACK = "jnp.zeros_like({dy}), jnp.stack([{a}, {b}])"
MAPS = {
    "rank one": (lambda to, of: True, lambda to, of: [of, to], "{b} * jnp.sum({a} * {dy})"),
    "elementwise": (_ELEMENTWISE, _ONE, "{dy} * {a}"),
    "flipped": (_VECTOR, _ONE, "({dy} * {a})[::-1]"),
    "scanned": (_VECTOR, _TWO, f"lax.scan(lambda c, r: (c + r * {{dy}}, None), {_STACK})[0]"),
    "cond": (_ELEMENTWISE, _TWO, _COND.format(c="C")),
    # Mapped over a condition, `lax.cond` becomes what JAX cannot transpose.
    "cond on a residual": (_ELEMENTWISE, _TWO, _COND.format(c="{a}")),
    "where": (_ELEMENTWISE, _TWO, "jnp.where({a} > 0.1, {dy} * {a}, 2.0 * {dy} * {b})"),
    "outside of JAX": (_VECTOR, _ONE, "summed({dy} * {a})"),
    "sparse": (_THREE, _ONE, "sparse_product({dy} * {a})"),
    "solved": (_THREE, _ONE, "solved({dy} * {a})"),
    "spread": (lambda to, of: not of, lambda to, of: [to], "{dy} * {a}"),
    "total": (lambda to, of: not to, _ONE, "jnp.sum({dy} * {a})"),
}
