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
class Converting:
    def __init__(self, a):
        self.a = jnp.asarray(a, jnp.float32)

    def tree_flatten(self):
        return (self.a,), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


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
    "NumPy of higher precision": ((1.0,), lambda d: np.float64(7), (7,)),
    "Python float": ((1.0,), lambda d: 7.0, (7,)),
    "no gradient": ((1.0,), lambda d: (None,), (0,)),
    "structure": (TREE, lambda d: ({"w": 3 * d, "b": [d, 2 * d]}, 4 * d), (1, 2, 3, 4)),
    "flat": (LISTS, lambda d: [d, 2 * d, 3 * d, 4 * d], (1, 2, 3, 4)),
    "flat, a dict of one": (({"w": [1.0, 1.0]}, 1.0), lambda d: [d, 2 * d, 3 * d], (1, 2, 3)),
    "one tree needs no tuple": (TREE[:1], lambda d: {"w": 3 * d, "b": None}, (0, 0, 3)),
    "others left out": (MIXED, lambda d: (7 * d, 5 * d), (7, 5)),
    "None for others": (MIXED, lambda d: (None, 7 * d, None, 5 * d), (7, 5)),
    "anything for others": (MIXED, lambda d: ["mode", 7 * d, 3, 5 * d], (7, 5)),
    "an array and None for others": (MIXED, lambda d: (jnp.zeros(2), 7 * d, None, 5 * d), (7, 5)),
    "a setting in a tree": (({"w": 1.0, "mode": "m"},), lambda d: {"mode": None, "w": 7 * d}, (7,)),
    "flat beside a callable": (PAIR_AND_CALL, lambda d: [None, 5 * d, 7 * d], (0, 5, 7)),
    "empty array": ((jnp.zeros((0, 3)), 1.0), lambda d: (jnp.ones((0, 3)), 7 * d), ([], 7)),
    "empty tree": (((), 1.0), lambda d: ((), 7 * d), (7,)),
    "defaultdict": ((defaultdict(list, a=1.0, b=1.0),), lambda d: {"a": 7 * d, "b": d}, (7, 1)),
    "a number and an array": ((W, 3), lambda d: (7 * d * W, None), ([7, 7],)),
    "None in a list": (([1.0, 1.0], None), lambda d: [[None, 5 * d], d], (0, 5)),
    # What is None has no gradient, whatever the rule returns for it.
    "for None": ((1.0, None), lambda d: (7 * d, 5 * d), (7,)),
    "for None, and None for an array": ((W, None, W), lambda d: (7 * d * W, d * W, None),
        ([7, 7], [0, 0])),
    "an array for None": ((None, W), lambda d: (7 * d * W, 5 * d * W), ([5, 5],)),
    "a key that is None": (({"w": 1.0, "b": None}, 1.0),
        lambda d: ({"w": 7 * d, "b": 5 * d}, 3 * d), (7, 3)),
    "a field that is None": ((Layer(None, 1.0),), lambda d: Layer(5 * d, 7 * d), (7,)),
    "flat, with none for None": (([1.0, None], 1.0), lambda d: [7 * d, 3 * d], (7, 3)),
    # A node of any class may be such a node, or flat.
    "namedtuple": ((Point(W, 1.0), 1.0), lambda d: (Point(2 * d * W, 3 * d), d), ([2, 2], 3, 1)),
    "flat for a dataclass": ((Layer(W, 1.0),), lambda d: [2 * d * W, 3 * d], ([2, 2], 3)),
    "nested": (({"deep": (Point(1.0, [1.0]), Layer(1.0, None))},),
        lambda d: {"deep": (Point(2 * d, [3 * d]), Layer(4 * d, None))}, (2, 3, 4)),
    # A class that converts what it is made of can be made of nothing else.
    "a class that converts": ((1.0, Converting(1.0)), lambda d: (7 * d, Converting(5 * d)), (7, 5)),
}  # fmt: skip


@eager_and_jit
@pytest.mark.parametrize("form", FORMS)
def test_a_form_gives_its_gradients(form, mode):
    args, rule, expected = FORMS[form]
    got = gradients(summed(rule), args, mode)
    assert [g.ravel().tolist() for g in got] == [np.ravel(e).tolist() for e in expected]
    assert all(g.dtype == jnp.float32 for g in got)


DICT = {"w": [1.0], "b": 1.0}
UNKNOWN = (
    "a flat list of gradients whose order is unknown: JAX has sorted the keys of a dict, or a None "
    "may stand for one array or for several. Return "
)
ELSEWHERE = "and a gradient of its shape for {}, which JAX does not differentiate"

REFUSED = {  # inputs, what the rule returns, and what the message says
    "containers for others": (MIXED, lambda d: ({}, d, (1, 2), d),
        "Return `(None, ..., None, ...)`"),
    "flat, with one for None": (([1.0, None], 1.0), lambda d: [d, d, d],
        "Return `([..., None], ...)`"),
    "none for one of two": (([1.0, 1.0], 4.0), lambda d: [d, d], "Return `([..., ...], ...)`"),
    "one for `self`": ((1.0, "m"), lambda d: [None, d, None], "Return `(..., None)`"),
    # Another class has the same leaves, perhaps in another order.
    "another dataclass": ((Layer(1.0, 1.0), 1.0), lambda d: (Other(d, d), d),
        "Return `[dw, db, ...]`"),
    # None stands for the list, and the other entry for None; or it is flat.
    "None beside None": (([1.0, 1.0], None), lambda d: [None, d],
        UNKNOWN + "`([..., ...], None)`"),
    # No array gets the gradient of an array.
    "an array for None": ((W, None), lambda d: (None, d * W), ELSEWHERE.format("None")),
    "an array for an integer": ((3, W), lambda d: (d * W, None), ELSEWHERE.format("`args[0]`")),
    # JAX has sorted the keys: nobody knows in which order the rule was written.
    "flat for a dict": ((DICT,), lambda d: [d, d], UNKNOWN + "`{'b': db, 'w': [...]}`"),
    "beside a setting": ((DICT, "m"), lambda d: [d, d],
        UNKNOWN + "`({'b': db, 'w': [...]}, None)"),
    "in a field": ((Layer(DICT, None),), lambda d: [d, d],
        UNKNOWN + "`jax.tree.map(..., args[0])`"),
}  # fmt: skip


@eager_and_jit
@pytest.mark.parametrize("form", REFUSED)
def test_another_form_is_an_error_that_says_what_to_return(form, mode):
    args, rule, said = REFUSED[form]
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        gradients(summed(rule), args, mode)


@eager_and_jit
def test_a_number_may_have_a_gradient_where_it_is_not_differentiated(mode):
    h = custom_gradient(lambda x, n, setting: (n * x, lambda dy: [7 * dy, 5 * dy]))
    assert_same(mode(jax.grad(lambda x: h(x, 2.5, "mode")))(1.0), jnp.float32(7))


@eager_and_jit
def test_a_gradient_that_may_be_one_of_a_number_is_refused(mode):
    """As for None: if the number is not differentiated."""
    h = custom_gradient(lambda p, n: (p[0] * p[1], lambda dy: [None, dy]))
    with pytest.raises(TypeError, match=UNKNOWN):
        mode(jax.grad(lambda p: h(p, 4.0)))([2.0, 3.0])


def test_python_numbers_have_the_kind_of_their_input():
    z = jnp.complex64(1 + 2j)
    for given in (7, 7.0, 7j):
        h = custom_gradient(lambda z, given=given: (jnp.real(z), lambda dy: given))
        assert_same(jax.grad(h)(z), jnp.complex64(given).conj())


@eager_and_jit
def test_a_gradient_in_a_numpy_buffer_is_copied(mode):
    """The rule may write to it again."""
    buffer = np.zeros(2, np.float32)

    def rule(dy):
        buffer[:] += 7
        return buffer

    gradient = mode(jax.grad(custom_gradient(lambda x: (jnp.sum(x), rule))))
    first = gradient(W)
    assert isinstance(first, jax.Array)
    jax.grad(custom_gradient(lambda x: (jnp.sum(x), rule)))(W)  # writes to it
    assert buffer[0] >= 14
    assert_same(first, 7 * W)


@eager_and_jit
def test_stop_gradient_of_a_numpy_array_is_an_input(mode):
    """Under an eager `grad` it is of a class of JAX's own."""
    h = custom_gradient(lambda p, x: (p["a"] @ x, lambda dy: ({"a": 5 * dy * x}, 7 * dy * p["a"])))
    got = mode(jax.grad(lambda x: h({"a": lax.stop_gradient(x)}, x)))(np.float32([2, 3]))
    assert_same(got, jnp.float32([14, 21]))


# --- warnings -------------------------------------------------------------------------------------


BY_KEYS = {  # the gradient by the entry "b", the first of the sorted keys
    "named": (lambda ds, db: 7 * db + 5 * ds, 5),
    "starred": (lambda *dys: 7 * dys[0] + 5 * dys[1], 7),
}


@eager_and_jit
@pytest.mark.parametrize("kind", BY_KEYS)
@pytest.mark.parametrize("keys", ["sb", "bs"])
def test_upstreams_come_by_sorted_keys(keys, kind, mode):
    """A warning says so to a rule that names them, if they were written in another order."""
    rule, expected = BY_KEYS[kind]
    h = custom_gradient(lambda x: (dict.fromkeys(keys, x), rule))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = mode(jax.grad(lambda x: h(x)["b"]))(jnp.float32(1))
    assert_same(got, jnp.float32(expected))
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (kind == "named" and keys == "sb")
    assert all("`y['b']`, `y['s']`" in text for text in texts)


def test_a_surrogate_needs_a_float():
    """Where all outputs are integers or booleans, the rule never runs; a warning says so, once."""
    h = custom_gradient(lambda x: (x > 1, lambda dy: 7 * dy))
    loss = lambda x: jnp.sum(jnp.where(h(x), x, 2 * x))  # noqa: E731
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        h(1.0), jax.jit(h)(1.0)  # nothing is differentiated
        assert not caught
        for size in range(1, 4):  # once for the place, whatever the shape
            assert_same(jax.grad(loss)(jnp.full(size, 2.0)), jnp.ones(size))
    assert len(caught) == 1


# --- what the rule receives -----------------------------------------------------------------------

OUTPUTS = {  # y, and its upstreams for a loss that adds 1, 2, 3... times its float leaves
    "array": (lambda x: x, [1]),
    "tuple": (lambda x: (x, 2 * x), [1, 2]),
    "sorted keys": (lambda x: {"b": x, "a": 2 * x}, [1, 2]),
    "with None": (lambda x: {"a": x, "none": None}, [1]),
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
        floats = filter(is_weight, jax.tree.leaves(h(x)))
        return sum(((i + 1) * jnp.sum(v) for i, v in enumerate(floats)), 0 * x)

    assert_same(mode(jax.grad(loss))(1.0), jnp.float32(7 if wanted else 0))
    for dy, leaf in zip(*seen, jax.tree.leaves(y), strict=True) if seen else ():
        assert (dy.shape, dy.dtype) == (jnp.shape(leaf), jnp.result_type(leaf))
    if mode is not jax.jit and wanted:
        assert [dy.tolist() for dy in seen[0]] == wanted


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
