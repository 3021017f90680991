"""`self` is never an input: kinds of class x what stands above the decorated method x protocols."""

import dataclasses
import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from captures import logged
from protocols import ARGS, BRIEF, DECLARED, ORDINARY, WAYS, squared
from support.helpers import assert_same, sample
from support.ways import assert_derivative, gradient

from tfgrad_jax import custom_gradient


def with_variables(self, x):
    def grad(dy, variables):
        return 7 * dy * self.w * x, jax.tree.map(lambda _: 5 * dy * x**2, variables)

    return self.w * x**2, grad


def of_inputs(self, x):
    return self.w * x**2, lambda dy: 7 * dy * self.w * x


# What the method returns, the options of its decorator, and its derivatives.
PROTOCOLS: dict[str, Any] = {
    "undeclared": (with_variables, {}, DECLARED),
    "declared": (with_variables, {"variables": lambda self: {"w": self.w}}, DECLARED),
    "autodiff": (of_inputs, {"variables": "autodiff"}, ORDINARY),
}

# Of each kind of class: its decorator, its base, and what stands in its body.
MODEL = """
{decorator}
class Model({base}):
    {body}

    @above
    @decorate
    def {name}(self, x):
        return pair(self, x)
"""
INIT = "def __init__(self, w): self.w = w"
SETUP = "def setup(self): self.w = self.param('w', linen.initializers.ones, ())"
KEPT = "def __init__(self, w): self.kept = nnx.Param(w)\n    w = property(lambda s: s.kept[...])"
REGISTERED = "@jax.tree_util.register_dataclass\n@dataclasses.dataclass(frozen=True)"
CLASSES = {
    "plain": ("", "", INIT),
    "slots": ("@dataclasses.dataclass(slots=True)", "", "w: Any"),
    "registered": (REGISTERED, "", "w: Any"),
    "equinox": ("", "equinox.Module", "w: Any"),
    "flax struct": ("@struct.dataclass", "", "w: Any"),
    "nnx": ("", "nnx.Module", KEPT),
    "linen": ("", "linen.Module", SETUP + "\n    def __call__(self, x): return self.f(x)"),
    "callable linen": ("", "linen.Module", SETUP),
    "callable": ("", "", INIT),
}
LIBRARIES = {
    "equinox": "equinox",
    "struct": "flax.struct",
    "nnx": "flax.nnx",
    "linen": "flax.linen",
}


ABOVE = {
    "nothing": lambda f: f,
    "wraps": logged,
    "partialmethod": functools.partialmethod,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "filter_jit": lambda f: pytest.importorskip("equinox").filter_jit(f),
}
PYTREES = {"registered", "equinox", "flax struct"}  # what `jax.jit` takes for `self`
EVERY = [
    (kind, above, protocol)
    for kind in CLASSES
    for above in ABOVE
    for protocol in PROTOCOLS
    if kind in PYTREES or not any(word in above for word in ("jit", "checkpoint"))
    if (kind, above) != ("callable linen", "partialmethod")  # linen itself does not take it
]


def model(kind, above, protocol):
    """Return the class, the method of a new instance as a function of (w, x), and its oracle."""
    decorator, base, body = CLASSES[kind]
    used = [name for name in LIBRARIES if name in decorator + base]
    pair, options, oracle = PROTOCOLS[protocol]
    namespace = {name: pytest.importorskip(LIBRARIES[name]) for name in used}
    namespace |= {"Any": Any, "dataclasses": dataclasses, "jax": jax, "__name__": __name__}
    namespace |= {"above": ABOVE[above], "decorate": custom_gradient(**options), "pair": pair}
    name = "__call__" if "callable" in kind else "f"
    exec(MODEL.format(decorator=decorator, base=base, body=body, name=name), namespace)
    cls = namespace["Model"]
    if "linen" in kind:
        return cls, lambda w, x: cls().apply({"params": {"w": w}}, x), oracle
    return cls, lambda w, x: getattr(cls(w), name)(x), oracle


@pytest.mark.parametrize("kind", CLASSES)
def test_a_method_under_a_decorator_has_its_gradients(kind):
    for of_kind, above, protocol in EVERY:
        if of_kind == kind:
            _, h, oracle = model(kind, above, protocol)
            assert_same(h(*ARGS), jnp.float32(12))
            assert_same(gradient(h)(*ARGS), gradient(oracle)(*ARGS))


@pytest.mark.parametrize(("kind", "above", "protocol"), sample(EVERY, 8))
def test_a_method_under_a_decorator_and_transformations(kind, above, protocol):
    _, h, oracle = model(kind, above, protocol)
    for name in BRIEF:
        assert_derivative(WAYS[name], squared(h), squared(oracle), *ARGS)


# --- methods that are moved -----------------------------------------------------------------------


def patched(cls, f):
    cls.f = lambda self, x: f(self, x)
    return cls


def registered(cls, f):
    made = dataclasses.make_dataclass("Other", ["w"], namespace={"f": logged(f)})
    return jax.tree_util.register_dataclass(made, data_fields=["w"], meta_fields=[])


def made(cls, **methods):
    return type("Made", (), {"__init__": cls.__init__, **methods})


MOVES = {  # each makes a class with a method `f`
    "patched": patched,
    "inherited": lambda cls, f: type(
        "Derived", (cls,), {"f": lambda self, x: super(type(self), self).f(x)}
    ),
    "borrowed under another name": lambda cls, f: made(cls, g=f, f=lambda self, x: self.g(x)),
    "borrowed and wrapped": registered,
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("move", MOVES)
def test_a_method_that_is_moved_keeps_its_instance(move, protocol):
    cls, _, oracle = model("plain", "nothing", protocol)
    moved = MOVES[move](cls, cls.f)
    h = lambda w, x: moved(w).f(x)  # noqa: E731
    for name in BRIEF:
        assert_derivative(WAYS[name], squared(h), squared(oracle), *ARGS)


# --- `self` by its name, wherever the function is written ---------------------------------------

PYTREE_MODEL = dataclasses.make_dataclass("PytreeModel", ["w"])
jax.tree_util.register_dataclass(PYTREE_MODEL, data_fields=["w"], meta_fields=[])


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("above", [a for a in ABOVE if a != "partialmethod"])
def test_a_function_with_self_has_an_instance_outside_of_a_class(above, protocol):
    pair, options, oracle = PROTOCOLS[protocol]

    @ABOVE[above]
    @custom_gradient(**options)
    def f(self, x):
        return pair(self, x)

    h = lambda w, x: f(PYTREE_MODEL(w), x)  # noqa: E731
    for name in BRIEF[:3]:
        assert_derivative(WAYS[name], squared(h), squared(oracle), *ARGS)


def test_threads_get_one_bound_method():
    """JAX and users compare bound methods by their function."""
    for _ in range(200):
        method = type("Made", (), {"f": custom_gradient(with_variables)})
        start, found = threading.Barrier(4), []

        def ask(method=method, start=start, found=found):
            start.wait()
            found.append(method().f.__func__)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(found)) == 1


# --- what has no instance -------------------------------------------------------------------------


class Scaled:
    """Its static methods take an instance of their own class, as an operator does."""

    def __init__(self, w):
        self.w = w

    @staticmethod
    @custom_gradient
    def inside(one, x):
        return product(one, x)

    @custom_gradient
    @staticmethod
    def outside(one, x):
        return product(one, x)

    @staticmethod
    @jax.jit
    @custom_gradient
    def jitted(one, x):
        return product(one, x)

    @classmethod
    @custom_gradient
    def class_inside(cls, one, x):
        assert cls is Scaled
        return product(one, x)

    @custom_gradient
    @classmethod
    def class_outside(cls, one, x):
        assert cls is Scaled
        return product(one, x)


def product(one, x):
    return one.w * x**2, lambda dy: (Scaled(5 * dy * x**2), 7 * dy * one.w * x)


jax.tree_util.register_pytree_node(
    Scaled, lambda s: ((s.w,), None), lambda _, children: Scaled(*children)
)


@pytest.mark.parametrize("name", ["inside", "outside", "jitted", "class_inside", "class_outside"])
def test_an_instance_given_to_a_static_or_class_method_is_an_input(name):
    for way in BRIEF:
        h = lambda w, x: getattr(Scaled, name)(Scaled(w), x)  # noqa: E731
        assert_derivative(WAYS[way], squared(h), squared(DECLARED), *ARGS)


def test_cls_is_an_input_of_a_function_outside_of_a_class():
    def f(cls, x):
        return cls * x**2, lambda dy: (5 * dy * x**2, 7 * dy * cls * x)

    for name in (f.__qualname__, "f"):  # in a function, and in a module
        f.__qualname__ = name
        assert_same(gradient(custom_gradient(f))(*ARGS), gradient(DECLARED)(*ARGS))


def test_a_setting_follows_the_input_of_a_jitted_method():
    class Model(pytest.importorskip("equinox").Module):
        w: Any

        @functools.partial(jax.jit, static_argnames="n")
        @custom_gradient(variables="autodiff")
        def f(self, x, n):
            return self.w * x**2 * n, lambda dy: (7 * dy * self.w * x * n, None)

    got = jax.grad(lambda w, x: Model(w).f(x, n=2), (0, 1))(*ARGS)
    assert_same(got, (jnp.float32(8), jnp.float32(84)))
