"""The forms in which a rule may return its gradients, as a table; and what it receives.

The value is the sum of the inputs, so that a right number shows that the rule gave it.
"""

import dataclasses
import functools
import operator
import re
import warnings
from collections import defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.helpers import assert_same, eager_and_jit

from tfgrad_jax import custom_gradient


class Point(NamedTuple):
    w: Any
    b: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w", "b"], meta_fields=["name"])
@dataclasses.dataclass
class Layer:
    w: Any
    b: Any
    name: str = "layer"


class Other(Layer):
    pass


jax.tree_util.register_dataclass(Other, data_fields=["w", "b"], meta_fields=["name"])


@jax.tree_util.register_pytree_node_class
class Table(dict[str, Any]):
    def tree_flatten(self):
        return (self["b"], self["a"]), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(zip("ba", children, strict=True))


@jax.tree_util.register_pytree_node_class
class Converting:
    def __init__(self, a):
        self.a = jnp.asarray(a, jnp.float32)

    def tree_flatten(self):
        return (self.a,), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


@jax.tree_util.register_pytree_node_class
class Op:
    def __init__(self, op):
        self.op = op

    def tree_flatten(self):
        return [{"add": 0, "mul": 1}[self.op]], None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls({0: "add", 1: "mul"}[children[0]])


def is_weight(leaf):
    return isinstance(leaf, float) or (hasattr(leaf, "dtype") and leaf.dtype == jnp.float32)


def gradients(h, args, mode):
    """Return the gradients of all floats and float arrays among the leaves of the arguments."""
    leaves, treedef = jax.tree.flatten(args)
    weights = [leaf for leaf in leaves if is_weight(leaf)]

    def loss(weights):
        rest = iter(weights)
        return h(*treedef.unflatten(next(rest) if is_weight(v) else v for v in leaves))

    return mode(jax.grad(loss))(weights)


def summed(rule):
    """Return a function of anything, whose value is the sum of the weights in it."""

    def f(*args):
        weights = [jnp.sum(leaf) for leaf in jax.tree.leaves(args) if is_weight(leaf)]
        return functools.reduce(operator.add, weights, jnp.float32(0)), rule

    return custom_gradient(f)


TWO, W = (1.0, 1.0), jnp.ones(2)
TREE = {"w": 1.0, "b": [1.0, 1.0]}, 1.0  # b0, b1, w, x
LISTS = [[1.0, 1.0], 1.0], 1.0
MIXED = "mode", 1.0, jnp.int32(2), 1.0
PAIR_AND_CALL = (1.0, 1.0), 1.0, len

FORMS = {  # inputs, what the rule returns for the upstream d, and the gradients in order
    "bare": ((1.0,), lambda d: 7 * d, (7,)),
    "tuple": ((1.0,), lambda d: (7 * d,), (7,)),
    "list": ((1.0,), lambda d: [7 * d], (7,)),
    "NumPy of higher precision": ((1.0,), lambda d: np.float64(7), (7,)),
    "Python float": ((1.0,), lambda d: 7.0, (7,)),
    "no gradient": ((1.0,), lambda d: (None,), (0,)),
    "two": (TWO, lambda d: (7 * d, 5 * d), (7, 5)),
    "list of one, bare": (([1.0],), lambda d: 7 * d, (7,)),
    "structure": (TREE, lambda d: ({"w": 3 * d, "b": [d, 2 * d]}, 4 * d), (1, 2, 3, 4)),
    "a tuple for a list": (TREE, lambda d: [{"w": 3 * d, "b": (d, 2 * d)}, 4 * d], (1, 2, 3, 4)),
    "flat": (LISTS, lambda d: [d, 2 * d, 3 * d, 4 * d], (1, 2, 3, 4)),
    "flat, a dict of one": (({"w": [1.0, 1.0]}, 1.0), lambda d: [d, 2 * d, 3 * d], (1, 2, 3)),
    "flat, a dict of settings": ((1.0, {"b": 2, "a": "m"}), lambda d: [7 * d, None, None], (7,)),
    "nothing for a dict of settings": ((1.0, {"b": 2, "a": "m"}), lambda d: 7 * d, (7,)),
    "None for a tree": (TREE, lambda d: (None, 4 * d), (0, 0, 0, 4)),
    "one tree needs no tuple": (TREE[:1], lambda d: {"w": 3 * d, "b": None}, (0, 0, 3)),
    "others left out": (MIXED, lambda d: (7 * d, 5 * d), (7, 5)),
    "None for others": (MIXED, lambda d: (None, 7 * d, None, 5 * d), (7, 5)),
    "anything for others": (MIXED, lambda d: ["mode", 7 * d, 3, 5 * d], (7, 5)),
    "arrays for others": (MIXED, lambda d: (jnp.zeros(2), 7 * d, jnp.int32(1), 5 * d), (7, 5)),
    "an array and None for others": (MIXED, lambda d: (jnp.zeros(2), 7 * d, None, 5 * d), (7, 5)),
    "None beside others": (MIXED, lambda d: ["mode", None, 3, 5 * d], (0, 5)),
    "None beside integers for others": (MIXED, lambda d: (jnp.arange(2), None, 3, d), (0, 1)),
    "a setting in a tree": (({"w": 1.0, "mode": "m"},), lambda d: {"mode": None, "w": 7 * d}, (7,)),
    "a setting in a tree, flat": (({"w": 1.0, "mode": "m"},), lambda d: [None, 7 * d], (7,)),
    "flat beside a callable": (PAIR_AND_CALL, lambda d: [None, 5 * d, 7 * d], (0, 5, 7)),
    "empty array": ((jnp.zeros((0, 3)), 1.0), lambda d: (jnp.ones((0, 3)), 7 * d), ([], 7)),
    "empty tree": (((), 1.0), lambda d: ((), 7 * d), (7,)),
    "defaultdict": ((defaultdict(list, a=1.0, b=1.0),), lambda d: {"a": 7 * d, "b": d}, (7, 1)),
    "a number and an array": ((W, 3), lambda d: (7 * d * W, None), ([7, 7],)),
    # What is None has no gradient, whatever the rule returns for it.
    "for None": ((1.0, None), lambda d: (7 * d, 5 * d), (7,)),
    "an array for None": ((None, W), lambda d: (7 * d * W, 5 * d * W), ([5, 5],)),
    "a tree for None": ((None, 1.0), lambda d: ({"w": d, "b": [d]}, 7 * d), (7,)),
    "for None beside settings": ((jnp.arange(2), 1.0, None, None, 0),
        lambda d: (None, 7 * d, jnp.ones(4), d, None), (7,)),
    "a key that is None": (({"w": 1.0, "b": None}, 1.0),
        lambda d: ({"w": 7 * d, "b": 5 * d}, 3 * d), (7, 3)),
    "a field that is None": ((Layer(None, 1.0),), lambda d: Layer(5 * d, 7 * d), (7,)),
    "one of a namedtuple": ((Point(1.0, None), 1.0), lambda d: (Point(7 * d, [d]), d), (7, 1)),
    "a pair of None": (((None, None), 1.0), lambda d: ((3 * d, 5 * d), 7 * d), (7,)),
    "flat, with none for None": (([1.0, None], 1.0), lambda d: [7 * d, 3 * d], (7, 3)),
    # A class that converts or looks up what it is made of can be made of nothing else.
    "None for a converting class": ((1.0, Converting(1.0)), lambda d: (7 * d, None), (7, 0)),
    "a class that converts": ((1.0, Converting(1.0)), lambda d: (7 * d, Converting(5 * d)), (7, 5)),
    "None for a class that looks up": ((1.0, Op("mul")), lambda d: (7 * d, None), (7,)),
    "flat, beside a class that looks up": ((1.0, Op("mul"), 1.0), lambda d: [7 * d, 5 * d], (7, 5)),
}  # fmt: skip


@eager_and_jit
@pytest.mark.parametrize("form", FORMS)
def test_a_form_gives_its_gradients(form, mode):
    args, rule, expected = FORMS[form]
    got = gradients(summed(rule), args, mode)
    assert [g.ravel().tolist() for g in got] == [np.ravel(e).tolist() for e in expected]
    assert all(g.dtype == jnp.float32 for g in got)


ODD = {  # what has none of the forms, and what the message writes out
    "containers for others": (MIXED, lambda d: ({}, d, (1, 2), d), "`(None, ..., None, ...)`"),
    "flat, with one for None": (([1.0, None], 1.0), lambda d: [d, d, d], "`([..., None], ...)`"),
    "none for one of two": (([1.0, 1.0], 4.0), lambda d: [d, d], "`([..., ...], ...)`"),
    "one for `self`": ((1.0, "m"), lambda d: [None, d, None], "`(..., None)`"),
}


@eager_and_jit
@pytest.mark.parametrize("form", ODD)
def test_an_odd_spelling_is_an_error_that_writes_out_what_to_return(form, mode):
    args, rule, written = ODD[form]
    with pytest.raises((TypeError, ValueError), match=re.escape(f"Return {written}")):
        gradients(summed(rule), args, mode)


NODES = {
    "namedtuple": Point,
    "dataclass": Layer,
    "nested": lambda w, b: {"deep": (Point(w, [b]), Layer(b, {"w": w}))},
    "beside None": lambda w, b: (None, [w, None, (), {}], b),
}


@eager_and_jit
@pytest.mark.parametrize("node", NODES)
def test_gradients_of_a_node_are_such_a_node_or_flat(node, mode):
    params = NODES[node](W, jnp.float32(1))
    leaves, treedef = jax.tree.flatten(params)
    expected = [(i + 2) * leaf for i, leaf in enumerate(leaves)]
    for answer in (treedef.unflatten(expected), expected, (treedef.unflatten(expected),)):
        h = summed(lambda dy, answer=answer: jax.tree.map(lambda g: g * dy, answer))
        assert_same(gradients(h, (params,), mode), expected)


@pytest.mark.parametrize("wrong", [Other(7.0, 5.0), Point(7.0, 5.0), {"w": 7.0, "b": 5.0}, 7.0])
def test_gradients_in_another_class_are_refused(wrong):
    """Of the same leaves: their order need not be that of the input's."""
    h = summed(lambda dy: (wrong, 1.0))
    with pytest.raises((TypeError, ValueError), match="; expected 3, for the inputs `args"):
        gradients(h, (Layer(1.0, 1.0), 1.0), lambda f: f)
    assert gradients(summed(lambda dy: (Layer(7.0, 5.0), 1.0)), (Layer(1.0, 1.0), 1.0), jax.jit)


@eager_and_jit
def test_a_number_may_have_a_gradient_where_it_is_not_differentiated(mode):
    h = custom_gradient(lambda x, n, setting: (n * x, lambda dy: [7 * dy, 5 * dy]))
    assert_same(mode(jax.grad(lambda x: h(x, 2.5, "mode")))(1.0), jnp.float32(7))
    h = custom_gradient(lambda p: (p["n"] * p["x"], lambda dy: {"n": 5 * dy, "x": 7 * dy}))
    assert_same(mode(jax.grad(lambda x: h({"n": 2.5, "x": x})))(1.0), jnp.float32(7))
    h = custom_gradient(lambda x, n: (n * x, lambda dy: (None, 5 * dy)))
    assert_same(mode(jax.grad(lambda x: h(x, 2.5)))(1.0), jnp.float32(0))


def test_python_numbers_have_the_kind_of_their_input():
    z = jnp.complex64(1 + 2j)
    for given in (7, 7.0, 7j):
        h = custom_gradient(lambda z, given=given: (jnp.real(z), lambda dy: given))
        assert_same(jax.grad(h)(z), jnp.complex64(given).conj())


@eager_and_jit
def test_a_gradient_in_doubt_is_refused(mode):
    """None may stand for the whole list, and the other for a number that has no gradient."""

    def by_p(rule):
        h = custom_gradient(lambda p, n: (p[0] * p[1], lambda dy: rule(p, dy)))
        return mode(jax.grad(lambda p: h(p, 4.0)))([2.0, 3.0])

    got = by_p(lambda p, dy: [7 * dy * p[1], 5 * dy * p[0], None])
    assert_same(got, [jnp.float32(21), jnp.float32(10)])
    got = by_p(lambda p, dy: [[None, 5 * dy * p[0]], dy])  # by structure: no doubt
    assert_same(got, [jnp.float32(0), jnp.float32(10)])
    with pytest.raises(TypeError, match="list of gradients whose order is unknown"):
        by_p(lambda p, dy: [None, 5 * dy * p[0]])


@eager_and_jit
@pytest.mark.parametrize("none", [True, False])
def test_a_list_that_fits_in_two_ways_is_refused(none, mode):
    """None stands for the whole list and the other for None, or for a default; or it is flat."""
    args = ([1.0, 1.0], None) if none else ([1.0, 1.0],)

    def h(answer):
        return custom_gradient(lambda p, n=1.0: (p[0] + p[1], lambda d: answer(7 * d)))

    with pytest.raises(TypeError, match="list of gradients whose order is unknown"):
        gradients(h(lambda g: [None, g]), args, mode)
    assert gradients(h(lambda g: ([None, g], g)), args, mode) == [0, 7]


@eager_and_jit
def test_a_list_without_settings_may_have_gradients_of_omitted_defaults(mode):
    h = custom_gradient(lambda m, a, b, c=1.0: (a + b, lambda d: [7 * d, 5 * d, 3 * d]))
    assert gradients(h, ("mode", 1.0, 1.0), mode) == [7, 5]
    assert gradients(h, ("mode", 1.0, 1.0, 1.0), mode) == [7, 5, 3]


@eager_and_jit
def test_the_gradient_of_an_array_for_what_is_none_is_refused(mode):
    """If no array gets one; else no structure tells, and it is ignored."""
    for given in (jnp.ones(3), 1.0):
        h = custom_gradient(lambda x, n: (2.0 * x, lambda dy: (None, 7 * dy)))
        with pytest.raises(TypeError, match="returned None for the input `x`, and a gradient of"):
            mode(jax.grad(lambda x, h=h: jnp.sum(h(x, None))))(given)
    h = custom_gradient(lambda x, n, t: (x - t, lambda dy: (7 * dy, 5 * dy, None)))
    got = mode(jax.grad(lambda x, t: jnp.sum(h(x, None, t)), (0, 1)))(W, W)
    assert_same(got, (7 * W, 0 * W))


@eager_and_jit
def test_a_gradient_in_a_numpy_buffer_is_copied(mode):
    """The rule may write to it again. A number that is real may be complex."""
    for ones in (np.ones(3, np.float32), np.ones(3), np.ones((3,), np.complex64)):
        w = ones.astype(np.result_type(ones, np.float32))
        w = jnp.asarray(w, jnp.complex64 if np.iscomplexobj(w) else jnp.float32)
        buffer = ones * 0

        def rule(dy, buffer=buffer):
            buffer[:] += 7
            return buffer

        h = custom_gradient(lambda x, rule=rule: (jnp.sum(jnp.real(x)), rule))
        gradient = mode(jax.grad(lambda x, h=h: h(x)))
        first = gradient(w)
        assert isinstance(first, jax.Array)
        gradient(w), jax.grad(h)(w)  # writes to it
        assert buffer[0] >= 14
        assert_same(first, jnp.full_like(w, 7))


@eager_and_jit
def test_a_gradient_for_an_integer_is_refused_where_an_array_gets_none(mode):
    swapped = custom_gradient(lambda n, x: (x**n, lambda dy: (dy * n * x ** (n - 1), None)))
    with pytest.raises(TypeError, match="returned None for the input `x`, and a gradient of"):
        jax.grad(lambda x: mode(swapped)(3, x).sum())(jnp.ones(2))

    class Layer:
        @custom_gradient
        def __call__(self, x, power=2):
            return x**power, lambda dy: [None, 7 * dy * x]  # None for `self`, which is no input

    with pytest.raises(ValueError, match="returned 2 gradients; expected 1, for the input `x`"):
        jax.grad(lambda x: mode(Layer())(x).sum())(jnp.ones(2))


@eager_and_jit
def test_stop_gradient_of_a_numpy_array_is_an_input(mode):
    """Under an eager `grad` it is of a class of JAX's own."""

    def f(p, x):
        return jnp.sum(p["a"] * x), lambda dy: ({"a": 5 * dy * x}, 7 * dy * p["a"])

    h = custom_gradient(f)
    got = mode(jax.grad(lambda x: h({"a": lax.stop_gradient(x)}, x)))(np.float32([2, 3]))
    assert_same(got, jnp.float32([14, 21]))


# --- a list in another order, or in another place -------------------------------------------------

DICTS = {
    "by itself": (lambda s, b: ({"scale": s, "bias": b},), "{'bias': ..., 'scale': ...}"),
    "sorted": (lambda s, b: ({"bias": b, "scale": s},), "{'bias': ..., 'scale': ...}"),
    "beside another": (lambda s, b: ({"w": s, "b": b}, "m"), "({'b': ..., 'w': ...}, None)"),
    "in a list": (lambda s, b: ([{"w": [s], "b": b}],), "[{'b': ..., 'w': [...]}]"),
    "in a field": (lambda s, b: (Layer({"w": s, "b": b}, None),), "[{'b': ..., 'w': ...}, None])"),
}


@eager_and_jit
@pytest.mark.parametrize("which", DICTS)
def test_a_flat_list_for_a_dict_is_refused(which, mode):
    """JAX has sorted its keys: nobody knows in which order the rule was written."""
    make, written = DICTS[which]
    h = custom_gradient(lambda p, b=None: (jnp.float32(1), lambda dy: [dy] * 2))
    with pytest.raises(TypeError, match=f"unknown: .* Return .*{re.escape(written)}"):
        mode(jax.grad(lambda s, b: h(*make(s, b)), (0, 1)))(1.0, 1.0)


@eager_and_jit
@pytest.mark.parametrize(
    ("rule", "warns"),
    [(lambda ds, db: 7 * db + 5 * ds, True), (lambda *dys: 7 * dys[0] + 5 * dys[1], False)],
    ids=["named", "starred"],
)
def test_upstreams_come_by_sorted_keys(rule, warns, mode):
    """The first is that of "b". A warning says so to a rule that names them."""

    def gradient(make):
        h = custom_gradient(lambda x: (make(x), rule))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = mode(jax.grad(lambda x: jnp.sum(h(x)["b"])))(jnp.float32(1))
        return got, ["`y['b']`, `y['s']`" in str(w.message) for w in caught]

    by_first = jnp.float32(5 if warns else 7)
    assert_same(gradient(lambda x: {"s": x, "b": x}), (by_first, [True] * warns))
    assert_same(gradient(lambda x: {"b": x, "s": x}), (by_first, []))


def test_a_surrogate_needs_a_float():
    """Where all outputs are integers or booleans, the rule never runs; a warning says so, once."""

    def gradient(make):
        h = custom_gradient(lambda x: (make(x), lambda dy: 7 * dy))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for size in range(1, 4):  # once for the place, whatever the shape
                h(1.0), jax.jit(h)(1.0)  # nothing is differentiated
                got = jax.grad(lambda x: jnp.where(h(x), x, 2 * x).sum() / x.size)(
                    jnp.full(size, 2.0)
                )
            got = got.sum()
        return got, len(caught)

    assert_same(gradient(lambda x: x > 1), (jnp.float32(1), 1))
    assert_same(gradient(lambda x: jnp.int32(x)), (jnp.float32(1), 1))
    h = custom_gradient(lambda x: ((x > 1).astype(x.dtype), lambda dy: 7 * dy))
    assert_same(jax.grad(h)(jnp.float32(2)), jnp.float32(7))


# --- what the rule receives -----------------------------------------------------------------------

OUTPUTS = {  # y, and its upstreams for a loss that adds 1, 2, 3... times its float leaves
    "array": (lambda x: x, [1]),
    "tuple": (lambda x: (x, 2 * x), [1, 2]),
    "sorted keys": (lambda x: {"b": x, "a": 2 * x}, [1, 2]),
    "with None": (lambda x: {"a": x, "none": None}, [1]),
    "a dict of a class": (lambda x: Table(b=x, a=2 * x), [1, 2]),
    "numbers": (lambda x: (x, 2.5, 3, True, np.array(True)), [1, 2, 0, False, False]),
    "integers": (lambda x: (jnp.arange(2), x, x > 0), [[0, 0], 1, False]),
    "empty": (lambda x: (), []),
}  # fmt: skip


@eager_and_jit
@pytest.mark.parametrize("form", OUTPUTS)
def test_a_rule_gets_one_upstream_for_each_leaf_of_y(form, mode):
    make, wanted = OUTPUTS[form]
    seen = []
    h = custom_gradient(lambda x: (make(x), lambda *dys: (seen.append(dys), jnp.float32(7))[1]))
    y = make(jnp.float32(1))
    assert_same(mode(h)(jnp.float32(1)), y)

    def loss(x):
        floats = [
            v for v in jax.tree.leaves(h(x)) if jnp.issubdtype(jnp.result_type(v), jnp.inexact)
        ]
        return sum(((i + 1) * jnp.sum(v) for i, v in enumerate(floats)), 0 * x)

    assert_same(mode(jax.grad(loss))(1.0), jnp.float32(7 if wanted else 0))
    for dy, leaf in zip(*seen, jax.tree.leaves(y), strict=True) if seen else ():
        assert (dy.shape, dy.dtype) == (jnp.shape(leaf), jnp.result_type(leaf))
    if mode is not jax.jit and wanted:
        assert [dy.tolist() for dy in seen[0]] == wanted


def test_an_output_that_is_not_used_gives_zeros():
    seen = []
    rule = lambda *dys: (seen.append(dys), 7 * dys[0])[1]  # noqa: E731
    h = custom_gradient(lambda x: ((x, jnp.ones((2, 3), jnp.bfloat16)), rule))
    assert_same(jax.grad(lambda x: h(x)[0])(1.0), jnp.float32(7))
    assert_same(seen, [(jnp.float32(1), jnp.zeros((2, 3), jnp.bfloat16))])


def test_eager_output_is_what_f_returned():
    """Python numbers stay Python numbers, and arrays are not copied."""
    y = custom_gradient(lambda x: ((W, 2.5, True), lambda *dys: None))(1.0)
    assert y[0] is W
    assert y[1:] == (2.5, True)
    assert [type(v) for v in y[1:]] == [float, bool]


@pytest.mark.parametrize(
    "make", [lambda: jnp.arange(2), lambda: jax.random.key(0)], ids=["int", "key"]
)
def test_jax_convention_is_a_drop_in_for_jax_custom_gradient(make):
    """Names of outputs, and the upstreams of those without a derivative."""

    def of(decorate):
        seen = []

        def f(x, y):
            rule = lambda dy: (seen.append(dy["n"]), (7 * dy["p"] * y, 5 * dy["s"]))[1]  # noqa: E731
            return {"s": x + y, "p": x * y, "n": make()}, rule

        h = decorate(f)
        got = jax.grad(lambda x, y: h(x, y)["p"] * h(x, y)["s"], (0, 1))(2.0, 3.0)
        return got, [(n.shape, n.dtype) for n in seen]

    ours, jaxs = of(functools.partial(custom_gradient, convention="jax")), of(jax.custom_gradient)
    assert_same(ours[0], jaxs[0])
    assert ours[1] == jaxs[1]
