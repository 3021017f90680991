"""Gradients of pytrees: in the structure of the inputs, flat, or None for a part of it."""

import collections
import types
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from gradient_checks import F5, F7, ZERO, Layer, Point, check_gradients
from helpers import assert_same
from hypothesis import given
from hypothesis import strategies as st

from tfgrad_jax import custom_gradient


@chex.dataclass
class ChexLayer:
    w: Any
    b: Any


@jax.tree_util.register_pytree_node_class
class Node:
    """A node of a class of its own, which refuses what it does not know."""

    def __init__(self, w, b):
        self.w, self.b = w, b

    def tree_flatten(self):
        return (self.w, self.b), "data"

    @classmethod
    def tree_unflatten(cls, data, children):
        assert data == "data"
        return cls(*children)


# The inputs {"b": [b0, b1], "w": w} and x, with the gradients 1, 2, 3 and 4 of their leaves.
TREE = {"w": jnp.ones(2), "b": [1.0, 1.0]}

WHOLE_TREE = {
    "same": lambda b0, b1, w, x: ({"w": w, "b": [b0, b1]}, x),
    "list for tuple": lambda b0, b1, w, x: [{"w": w, "b": [b0, b1]}, x],
    "tuple for list": lambda b0, b1, w, x: ({"w": w, "b": (b0, b1)}, x),
    "other order of keys": lambda b0, b1, w, x: ({"b": [b0, b1], "w": w}, x),
    "OrderedDict": lambda b0, b1, w, x: (
        collections.OrderedDict([("w", w), ("b", [b0, b1])]),
        x,
    ),
    "read-only mapping": lambda b0, b1, w, x: (
        types.MappingProxyType({"w": w, "b": [b0, b1]}),
        x,
    ),
    "flat list": lambda b0, b1, w, x: [b0, b1, w, x],
    "flat tuple": lambda b0, b1, w, x: (b0, b1, w, x),
}


def tree_function(answer):
    @custom_gradient
    def h(params, x):
        y = jnp.sum(params["w"]) * params["b"][0] * params["b"][1] * x

        def grad(dy):
            return answer(1 * dy, 2 * dy, 3 * dy * jnp.ones(2), 4 * dy)

        return y, grad

    return h


@pytest.mark.parametrize("form", WHOLE_TREE)
def test_tree(form):
    expected = ({"w": 3 * jnp.ones(2), "b": [jnp.float32(1), jnp.float32(2)]}, jnp.float32(4))
    check_gradients(tree_function(WHOLE_TREE[form]), (TREE, 1.0), expected)


NONE_IN_TREE = {
    "leaf": (lambda b0, b1, w, x: ({"w": None, "b": [b0, None]}, x), (1, 0, 0, 4)),
    "list": (lambda b0, b1, w, x: ({"w": w, "b": None}, x), (0, 0, 3, 4)),
    "dict": (lambda b0, b1, w, x: (None, x), (0, 0, 0, 4)),
    "flat": (lambda b0, b1, w, x: [None, b1, None, x], (0, 2, 0, 4)),
    "all": (lambda b0, b1, w, x: (None, None), (0, 0, 0, 0)),
}


@pytest.mark.parametrize("form", NONE_IN_TREE)
def test_none_for_a_leaf_or_subtree(form):
    answer, (b0, b1, w, x) = NONE_IN_TREE[form]
    expected = (
        {"w": w * jnp.ones(2), "b": [jnp.float32(b0), jnp.float32(b1)]},
        jnp.float32(x),
    )
    check_gradients(tree_function(answer), (TREE, 1.0), expected)


def test_one_tree_needs_no_tuple():
    for answer in (lambda g: {"w": g, "b": None}, lambda g: ({"w": g, "b": None},)):
        h = custom_gradient(lambda p, a=answer: (p["w"] * p["b"], lambda dy: a(7 * dy)))
        check_gradients(h, ({"w": 1.0, "b": 1.0},), ({"w": F7, "b": ZERO},))


NODES = {
    "namedtuple": lambda w, b: Point(w, b),
    "dataclass": lambda w, b: Layer(w, b),
    "chex dataclass": lambda w, b: ChexLayer(w=w, b=b),
    "class": lambda w, b: Node(w, b),
    "OrderedDict": lambda w, b: collections.OrderedDict([("w", w), ("b", b)]),
    "defaultdict": lambda w, b: collections.defaultdict(int, {"w": w, "b": b}),
    "nested": lambda w, b: {"deep": (Point(w, [b]), Layer(b, {"w": w}))},
    "beside None": lambda w, b: (None, [w, None, (), {}], b),
}


@pytest.mark.parametrize("answer", ["same", "flat", "None"])
@pytest.mark.parametrize("node", NODES)
def test_node(node, answer):
    make = NODES[node]
    params = make(jnp.ones(2), jnp.float32(1))
    leaves, treedef = jax.tree.flatten(params)
    gradients = [(i + 2) * leaf for i, leaf in enumerate(leaves)]

    @custom_gradient
    def h(p):
        assert jax.tree.structure(p) == treedef
        assert type(p) is type(params)

        def grad(dy):
            scaled = [g * dy for g in gradients]
            if answer == "same":
                return jax.tree.unflatten(treedef, scaled)
            return scaled if answer == "flat" else None

        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(p)), grad

    expected = jax.tree.unflatten(
        treedef, [jnp.zeros_like(g) if answer == "None" else g for g in gradients]
    )
    check_gradients(h, (params,), (expected,))


def test_keys_of_an_ordered_dict_are_not_sorted():
    """A flat answer follows `jax.tree`, which keeps the order of an OrderedDict."""
    h = custom_gradient(lambda p: (p["z"] * p["a"], lambda dy: [7 * dy, 5 * dy]))
    ordered = collections.OrderedDict([("z", 1.0), ("a", 1.0)])
    expected = collections.OrderedDict([("z", F7), ("a", F5)])
    check_gradients(h, (ordered,), (expected,))
    check_gradients(h, ({"z": 1.0, "a": 1.0},), ({"a": F7, "z": F5},))


# Random inputs: "w" stands for an array, "i" for one of integers, "s" for a static leaf.
TREES = st.recursive(
    st.sampled_from(["w", "w", "w", "i", "s", None]),
    lambda children: (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), children, max_size=3)
    ),
    max_leaves=6,
)


def swapped(tree):
    """Make tuples of the lists in a tree, and lists of the tuples."""
    if isinstance(tree, dict):
        return {key: swapped(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return tuple(swapped(value) for value in tree)
    return [swapped(value) for value in tree] if isinstance(tree, tuple) else tree


@given(inputs=st.lists(TREES, min_size=1, max_size=3).map(tuple), data=st.data())
def test_random_structures(inputs, data):
    """Every form of the same answer gives the same gradients: leaf number n gets n + 1."""
    kinds, treedef = jax.tree.flatten(inputs)
    count = len(kinds)
    make = {"w": lambda: jnp.ones(2), "i": lambda: jnp.arange(2), "s": lambda: "static"}
    leaves = [make[kind]() for kind in kinds]
    dropped = data.draw(st.lists(st.booleans(), min_size=count, max_size=count), label="None")
    numbers = [
        (n + 1) * jnp.ones(2) if kind == "w" and not drop else None
        for n, (kind, drop) in enumerate(zip(kinds, dropped, strict=True))
    ]
    answers = {
        "structure": jax.tree.unflatten(treedef, numbers),
        "swapped": swapped(jax.tree.unflatten(treedef, numbers)),
    }
    if not any(dropped):  # a flat answer with None in it may also be one of subtrees
        answers["flat"] = numbers
        answers["differentiable"] = tuple(g for g in numbers if g is not None)
    weights = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind == "w"]
    expected = [
        jnp.zeros(2) if g is None else g
        for g, kind in zip(numbers, kinds, strict=True)
        if kind == "w"
    ]

    for answer in answers.values():
        h = custom_gradient(
            lambda *args, answer=answer: (
                sum((jnp.sum(w) for w in jax.tree.leaves(args) if is_weight(w)), jnp.float32(0)),
                lambda dy: answer,
            )
        )

        def loss(weights, h=h):
            rest = iter(weights)
            mixed = [
                next(rest) if kind == "w" else leaf
                for leaf, kind in zip(leaves, kinds, strict=True)
            ]
            return h(*jax.tree.unflatten(treedef, mixed))

        assert_same(jax.grad(loss)(weights), expected)


def is_weight(leaf):
    return isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32
