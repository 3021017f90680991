"""Structures: which upstreams a rule gets for which `y`, and in which forms it may answer."""

import collections
import dataclasses
import functools
import types
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same
from hypothesis import given
from hypothesis import strategies as st

from tfgrad_jax import custom_gradient
from tfgrad_jax._structure import Outputs, Spec, conjugate, is_operand, spec, split

F7 = jnp.float32(7)
F5 = jnp.float32(5)
F3 = jnp.float32(3)
ZERO = jnp.float32(0)


def check_gradients(h, args, expected):
    """Compare the gradients of all arguments, eagerly and jitted."""
    grad = jax.grad(h, tuple(range(len(args))))
    assert_same(grad(*args), expected)
    assert_same(jax.jit(grad)(*args), expected)


class Point(NamedTuple):
    x: Any
    y: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w", "b"], meta_fields=["name"])
@dataclasses.dataclass
class Layer:
    w: Any
    b: Any
    name: str = "layer"


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


# --- what a rule may return -----------------------------------------------------------------------

ONE_INPUT = {
    "bare": lambda g: g,
    "tuple": lambda g: (g,),
    "list": lambda g: [g],
    "NumPy array": lambda g: np.float32(7),
    "Python float": lambda g: 7.0,
    "Python int": lambda g: 7,
    "wrapped Python float": lambda g: [7.0],
    "NumPy of higher precision": lambda g: np.float64(7),
}


@pytest.mark.parametrize("form", ONE_INPUT)
def test_one_input(form):
    check_gradients(
        custom_gradient(lambda x: (2 * x, lambda dy: ONE_INPUT[form](7 * dy))), (1.0,), (F7,)
    )


NOTHING = {
    "None": None,
    "tuple": (None,),
    "list": [None],
}


@pytest.mark.parametrize("form", NOTHING)
def test_no_gradient_for_one_input(form):
    h = custom_gradient(lambda x: (2 * x, lambda dy: NOTHING[form]))
    check_gradients(h, (1.0,), (ZERO,))
    assert_same(jax.grad(lambda x: h(x) + 3 * x)(1.0), F3)  # elsewhere it still counts


TWO_INPUTS = {
    "tuple": (lambda a, b: (a, b), (F7, F5)),
    "list": (lambda a, b: [a, b], (F7, F5)),
    "None first": (lambda a, b: (None, b), (ZERO, F5)),
    "None second": (lambda a, b: [a, None], (F7, ZERO)),
    "None": (lambda a, b: None, (ZERO, ZERO)),
    "Nones": (lambda a, b: (None, None), (ZERO, ZERO)),
    "namedtuple": (lambda a, b: Point(a, b), (F7, F5)),
    "mixed kinds": (lambda a, b: (a, 5), (F7, F5)),
}


@pytest.mark.parametrize("form", TWO_INPUTS)
def test_two_inputs(form):
    answer, expected = TWO_INPUTS[form]
    check_gradients(
        custom_gradient(lambda x, y: (x * y, lambda dy: answer(7 * dy, 5 * dy))),
        (1.0, 1.0),
        expected,
    )


@pytest.mark.parametrize("form", TWO_INPUTS)
def test_two_inputs_by_a_rule_that_is_traced(form):
    """A jaxpr drops `None`; its place among the gradients must survive."""
    answer, expected = TWO_INPUTS[form]
    rule = lambda x, dy: answer(7 * dy + 0 * x, 5 * dy)  # noqa: E731
    h = custom_gradient(lambda x, y: (x * y, functools.partial(rule, x)))
    check_gradients(h, (1.0, 1.0), expected)
    second = jax.grad(lambda x, y: h(x, y) * h(x, y))
    assert_same(jax.jit(second)(1.0, 1.0), 2 * expected[0])


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
    "all": (lambda b0, b1, w, x: None, (0, 0, 0, 0)),
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


def test_one_list_is_not_mistaken_for_the_tuple_of_inputs():
    """A list of one array: its gradient is a list of one, with or without a tuple around it."""
    for answer in (lambda g: [g], lambda g: ([g],), lambda g: [[g]], lambda g: g):
        h = custom_gradient(lambda xs, a=answer: (2 * xs[0], lambda dy: a(7 * dy)))
        check_gradients(h, ([1.0],), ([F7],))


def test_two_lists_of_one():
    h = custom_gradient(lambda xs, ys: (xs[0] * ys[0], lambda dy: ([7 * dy], [5 * dy])))
    check_gradients(h, ([1.0], [1.0]), ([F7], [F5]))


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


STATIC_LEAVES = {
    "left out": lambda a, b: (a, b),
    "None": lambda a, b: (None, a, None, b),
    "anything": lambda a, b: ("mode", a, 3, b),
    "arrays": lambda a, b: (jnp.zeros(2), a, jnp.int32(1), b),
    "objects": lambda a, b: [object(), a, (1, 2), b],
}


@pytest.mark.parametrize("form", STATIC_LEAVES)
def test_leaves_without_gradient_may_be_left_out(form):
    @custom_gradient
    def h(mode, x, indices, y):
        return x * y, lambda dy: STATIC_LEAVES[form](7 * dy, 5 * dy)

    loss = lambda x, y: h("mode", x, jnp.int32(2), y)  # noqa: E731
    check_gradients(loss, (1.0, 1.0), (F7, F5))


def test_static_leaves_within_a_tree():
    for answer in (lambda g: {"mode": None, "w": g}, lambda g: [g], lambda g: [None, g]):
        h = custom_gradient(lambda p, a=answer: (p["w"] * 2, lambda dy: a(7 * dy)))
        loss = lambda w, h=h: h({"w": w, "mode": "m"})  # noqa: E731
        check_gradients(loss, (1.0,), (F7,))


def test_gradient_of_another_precision_is_cast():
    h = custom_gradient(lambda x, w: (x * w, lambda dy: (np.float64(7), jnp.bfloat16(5))))
    check_gradients(h, (jnp.float16(1), jnp.float16(1)), (jnp.float16(7), jnp.float16(5)))


def test_number_for_a_scalar_only():
    h = custom_gradient(lambda x: (x.sum(), lambda dy: 7.0))
    with pytest.raises(ValueError, match=r"shape \(\)"):
        jax.grad(h)(jnp.ones(3))


def test_empty_arrays():
    h = custom_gradient(lambda x: (x.sum(), lambda dy: 7 * dy * jnp.ones_like(x)))
    check_gradients(h, (jnp.zeros((0, 3)),), (jnp.zeros((0, 3)),))


def test_same_input_twice():
    h = custom_gradient(lambda x, y: (x * y, lambda dy: (7 * dy, 5 * dy)))
    check_gradients(lambda x: h(x, x), (1.0,), (jnp.float32(12),))


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


# --- what a rule receives -------------------------------------------------------------------------


def test_one_upstream_per_leaf_in_the_order_of_jax_tree():
    @custom_gradient
    def h(x):
        y = {"z": x, "a": (2 * x, [3 * x]), "m": Point(4 * x, 5 * x)}

        def grad(a0, a1, mx, my, z):
            return a0 + 10 * a1 + 100 * mx + 1000 * my + 10000 * z

        return y, grad

    def loss(x):
        y = h(x)
        assert list(y) == ["z", "a", "m"] or isinstance(x, jax.core.Tracer)
        assert type(y["m"]) is Point
        return y["a"][0] + 2 * y["a"][1][0] + 3 * y["m"].x + 4 * y["m"].y + 5 * y["z"]

    check_gradients(loss, (1.0,), (jnp.float32(1 + 20 + 300 + 4000 + 50000),))


def test_output_that_is_not_used_gives_zeros():
    seen = []

    @custom_gradient
    def h(x):
        def grad(da, db):
            seen.append((da, db))
            return 7 * da

        return (x, jnp.ones((2, 3), jnp.bfloat16)), grad

    assert_same(jax.grad(lambda x: h(x)[0])(1.0), F7)
    assert_same(seen, [(jnp.float32(1), jnp.zeros((2, 3), jnp.bfloat16))])


def test_upstreams_of_integers_and_booleans_are_zeros_of_their_dtype():
    seen = []

    @custom_gradient
    def h(x):
        def grad(dy, di, db, du):
            seen.append((di, db, du))
            return 7 * dy

        return (x, jnp.arange(3), x > 0, jnp.uint8(2)), grad

    expected = (jnp.zeros(3, jnp.int32), jnp.zeros((), bool), jnp.uint8(0))
    assert_same(jax.grad(lambda x: h(x)[0])(1.0), F7)
    assert_same(seen.pop(), expected)
    assert_same(jax.jit(jax.grad(lambda x: h(x)[0]))(1.0), F7)


def test_one_upstream_is_shared_by_all_uses():
    h = custom_gradient(lambda x: (x, lambda dy: 7 * dy))

    def loss(x):
        y = h(x)
        return 2 * y + 3 * y

    check_gradients(loss, (1.0,), (jnp.float32(35),))


OUTPUTS = {
    "tuple": lambda x: (x, 2 * x),
    "list": lambda x: [x, 2 * x],
    "one in a tuple": lambda x: (x,),
    "dict": lambda x: {"b": x, "a": 2 * x},
    "namedtuple": lambda x: Point(x, 2 * x),
    "dataclass": lambda x: Layer(x, 2 * x),
    "OrderedDict": lambda x: collections.OrderedDict([("b", x), ("a", x)]),
    "with None": lambda x: {"a": x, "none": None},
    "empty": lambda x: (),
    "numbers": lambda x: (x, 2.5, 3, True, 1j),
    "NumPy": lambda x: (x, np.float32(2), np.arange(2)),
    "input itself": lambda x: x,
}


@pytest.mark.parametrize("form", OUTPUTS)
def test_structure_of_the_output(form):
    make = OUTPUTS[form]
    h = custom_gradient(lambda x: (make(x), lambda *dys: 7 * dys[0]))
    expected = make(jnp.float32(1))
    assert_same(h(jnp.float32(1)), expected)
    assert_same(jax.jit(h)(jnp.float32(1)), expected)
    assert_same(jax.vjp(h, jnp.float32(1))[0], expected)
    if len(jax.tree.leaves(expected)) > 0:
        check_gradients(lambda x: jax.tree.leaves(h(x))[0], (1.0,), (F7,))


def test_eager_output_is_what_f_returned():
    """Python numbers stay Python numbers, and arrays are not copied."""
    array = jnp.ones(3)
    h = custom_gradient(lambda x: ((array, 2.5, "a" == "a"), lambda *dys: None))
    y = h(1.0)
    assert y[0] is array
    assert y[1] == 2.5
    assert type(y[1]) is float
    assert y[2] is True


def test_rule_may_take_the_upstreams_together():
    h = custom_gradient(lambda x: ((x, 2 * x), lambda *dys: 7 * dys[0] + 5 * dys[1]))
    check_gradients(lambda x: h(x)[0] + 2 * h(x)[1], (1.0,), (jnp.float32(17),))


@pytest.mark.parametrize(
    "make", [lambda x: x, lambda x: (x, x), lambda x: {"b": x, "a": [x]}], ids=["x", "pair", "tree"]
)
def test_jax_convention_passes_one_upstream_with_the_structure_of_y(make):
    structures = []

    @functools.partial(custom_gradient, convention="jax")
    def h(x):
        def grad(dy):
            structures.append(jax.tree.structure(dy))
            return 7 * sum(jax.tree.leaves(dy))

        return make(x), grad

    check_gradients(
        lambda x: sum(jax.tree.leaves(h(x))),
        (1.0,),
        (7 * jnp.float32(len(jax.tree.leaves(make(1)))),),
    )
    assert set(structures) == {jax.tree.structure(make(1.0))}


def test_jax_convention_is_a_drop_in_for_jax_custom_gradient():
    def f(x, y):
        return {"s": x + y, "p": x * y}, lambda dy: (7 * dy["p"] * y, 5 * dy["s"])

    def of(decorated):
        return jax.grad(lambda x, y: decorated(x, y)["p"] * decorated(x, y)["s"], (0, 1))(2.0, 3.0)

    assert_same(of(custom_gradient(f, convention="jax")), of(jax.custom_gradient(f)))


# --- the parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "traced"),
    [
        (1.0, True),
        (1j, True),
        (jnp.ones(2), True),
        (np.ones(2), True),
        (np.float64(1), True),
        (np.int8(1), True),
        (np.bool_(True), True),
        (jnp.bfloat16(1), True),
        (np.asarray(1, jnp.bfloat16), True),
        (1, False),
        (True, False),
        ("s", False),
        (np.array(["s"]), False),
        (np.array([None]), False),
        (np.datetime64("2020-01-01"), False),
        (len, False),
    ],
    ids=repr,
)
def test_operands(value, traced):
    assert is_operand(value) is traced


def test_split_and_join():
    values = ({"w": np.float32(1), "mode": "m"}, None, 2.0, (3,))
    operands, layout = split(values, ("params", "none", "x", "n"))
    assert operands == [1.0, 2.0]
    assert layout.statics == ["m", 3]
    assert layout.join(["a", "b"]) == ({"w": "a", "mode": "m"}, None, "b", (3,))
    assert layout.path(0) == "params['w']"
    assert layout.path(1) == "x"
    assert layout.leaf_paths() == ["params['mode']", "params['w']", "x", "n[0]"]
    assert layout.without_statics().statics == [None, None]


def test_layouts_compare_structure_and_statics():
    def layout(*values):
        return split(values, [f"x{i}" for i in range(len(values))])[1]

    marker = object()
    assert layout(1.0, "a", marker).same_as(layout(2.0, "a", marker))
    assert not layout(1.0, "a").same_as(layout(1.0, "b"))
    assert not layout(1.0, 1).same_as(layout(1.0, True))
    assert not layout(1.0, object()).same_as(layout(1.0, object()))
    assert not layout(1.0).same_as(layout((1.0,)))


def test_spec():
    assert spec(jnp.ones((2, 3), jnp.bfloat16)) == Spec((2, 3), jnp.bfloat16)
    assert spec(1.0) == Spec((), jnp.float32)
    assert spec(1j).differentiable
    assert not spec(np.arange(3)).differentiable
    assert not spec(jax.random.key(0)).differentiable


def test_outputs():
    leaves = [jnp.ones(2), jnp.int32(1), jnp.complex64(1j)]
    treedef = jax.tree.structure([0, 0, 0])
    cotangents = [7 * jnp.ones(2), jnp.complex64(1 + 2j)]
    tf = Outputs(leaves, treedef, mirrored=True)
    assert tf.differentiable == [0, 2]
    assert_same(
        list(tf.upstreams(cotangents)), [cotangents[0], jnp.int32(0), jnp.complex64(1 - 2j)]
    )
    of_jax = Outputs(leaves, treedef, mirrored=False).upstreams(cotangents)
    assert_same(of_jax, ([cotangents[0], jnp.int32(0), cotangents[1]],))


def test_conjugate_leaves_real_values_alone():
    x = jnp.ones(2)
    assert conjugate(x, spec(x)) is x
    assert_same(conjugate(jnp.complex64(1j), spec(1j)), jnp.complex64(-1j))
