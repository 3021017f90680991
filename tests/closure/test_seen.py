"""What `f` and its rule see: values, in an eager first derivative.

What depends on an input or a weight is a tracer that shows its value to Python; the rule sees
values. A bare weight is JAX's own tracer. All have the value `w x`, declared `7 w` by `x` and
`5 x` by `w`, and a factor of one that is computed from what Python has seen.
"""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scipy import special
from support.helpers import assert_same, eager_and_jit
from support.ways import gradient, jvp

from tfgrad_jax import custom_gradient

W, X = jnp.float32(3), jnp.float32(2)
TABLE = np.arange(9)

# Each takes an array with the value 3, and returns 1.
SEEN = {
    "if": lambda a: 1 if a > 0 else 100,
    "if equal": lambda a: 1 if a == 3 else 100,
    "float": lambda a: float(a) / 3,
    "int": lambda a: int(a) // 3,
    "complex": lambda a: complex(a).real / 3,
    "bool": lambda a: bool(jnp.all(a > 2)) * 1,
    "format": lambda a: float(f"{a:.1f}") / 3,
    "str": lambda a: 1 if "3." in f"{a}" and "3." in str(a) else 100,
    "repr": lambda a: 1 if "3." in repr(a) else 100,
    "range": lambda a: len(range(a.astype(int))) / 3,
    "index of a list": lambda a: [9, 9, 9, 1][a.astype(int)],
    "index of NumPy": lambda a: int(TABLE[a.astype(int)]) // 3,
    "asarray": lambda a: float(np.asarray(a)) / 3,
    "NumPy": lambda a: float(np.sqrt(np.asarray(a) ** 2)) / 3,
    "NumPy of it": lambda a: float(np.negative(a)) / -3,
    "SciPy": lambda a: float(special.expit(np.asarray(a)) / special.expit(3.0)),
    "math": lambda a: math.sqrt(a * a) / 3,
    "round": lambda a: round(float(a)) / 3,
    "item": lambda a: a.item() / 3,
    "tolist": lambda a: a.tolist() / 3,
    "a shape": lambda a: jnp.ones(int(a)).sum().item() / 3,
    "a static argument": lambda a: float(jax.jit(jnp.ones, static_argnums=0)(int(a)).sum()) / 3,
    "sorted": lambda a: float(sorted([a, a - 1, a - 2])[2]) / 3,
    "max": lambda a: float(max(a - 1, a)) / 3,
    "iteration": lambda a: sum(float(b) for b in jnp.stack([a, a])) / 6,
    "a key of a table": lambda a: {3.0: 1}[float(a)],
    "an assertion": lambda a: int(a.shape == () and a.dtype == np.float32 and a.ndim == 0),
    "in a jit": lambda a: float(jax.jit(lambda b: b + a)(a)) / 6,
    "in a scan": lambda a: float(lax.scan(lambda c, _: (c + a, 0), 0 * a, None, 2)[0]) / 6,
    "in a vmap": lambda a: float(jax.vmap(lambda b: b + a)(a[None])[0]) / 6,
    "in a gradient": lambda a: float(jax.grad(lambda b: b * a)(a)) / 3,
    "in a cond": lambda a: float(lax.cond(a > 0, lambda: a, lambda: 0 * a)) / 3,
    "in a decorated function": lambda a: float(sine(a) / jnp.sin(3.0)),
}


@custom_gradient
def sine(x):
    return jnp.sin(x), lambda dy: dy * jnp.cos(x)


def by_self(w, x, in_f, in_rule):
    class Layer:
        def __init__(self):
            self.w = w

        @custom_gradient
        def __call__(self, x):
            factor = in_f(self.w, x)

            def grad(dy, variables=()):
                dx = 7 * dy * self.w * in_rule(self.w, x, dy)
                return (dx, [5 * dy * x for _ in variables]) if len(variables) else dx

            return self.w * x * factor, grad

    return Layer()(x)


def by_a_closure(w, x, in_f, in_rule, **options):
    @custom_gradient(**options)
    def f(x):
        factor = in_f(w, x)

        def grad(dy, variables=()):
            dx = 7 * dy * w * in_rule(w, x, dy)
            return (dx, [5 * dy * x for _ in variables]) if len(variables) else dx

        return w * x * factor, grad

    return f(x)


def declared(w, x, in_f, in_rule):
    return by_a_closure(w, x, in_f, in_rule, variables=[w])


CALLERS = {"closure": by_a_closure, "self": by_self, "declared": declared}
FIRST = {
    "grad": gradient,
    "vjp": lambda f: lambda *args: jax.vjp(f, *args)[1](jnp.ones_like(args[1])),
    "jvp": jvp,
    "by x alone": lambda f: lambda w, x: (5 * x, jax.grad(f, 1)(w, x)),
}
NOTHING = {"in_f": lambda w, x: 1, "in_rule": lambda w, x, dy: 1}


def check(caller, world, **seen):
    loss = functools.partial(CALLERS[caller], **{**NOTHING, **seen})
    assert_same(FIRST[world](lambda w, x: loss(w, x))(W, X), (5 * X, 7 * W))


@pytest.mark.parametrize("kind", SEEN)
def test_eagerly_f_sees_what_depends_on_weights_and_inputs(kind):
    look = SEEN[kind]
    for caller, world in itertools.product(CALLERS, ["grad", "jvp", "by x alone"]):
        check(caller, world, in_f=lambda w, x: look(w * 1) * look(x * 1.5) * look(w + x - 2))
        check(caller, world, in_f=lambda w, x: look(lax.stop_gradient(x + 1)))


@pytest.mark.parametrize("kind", SEEN)
def test_eagerly_the_rule_sees_values(kind):
    """Forward mode transposes the rule, which is a trace: there it branches on no upstream."""
    look = SEEN[kind]
    for caller, world in itertools.product(CALLERS, ["grad", "vjp", "by x alone"]):
        check(caller, world, in_rule=lambda w, x, dy: look(w * 1) * look(x + 1) * look(3 * dy))


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("where", ["in_f", "in_rule"])
def test_eagerly_a_condition_on_the_weight_itself(where, caller):
    for world in ("grad", "by x alone"):
        check(caller, world, **{where: lambda w, x, *_: 1 if w > 0 and x > 0 and w * x == 6 else 9})


@pytest.mark.parametrize("caller", CALLERS)
def test_a_print_shows_values(caller, capsys):
    loss = functools.partial(
        CALLERS[caller],
        in_f=lambda w, x: print("f", w * 1, x * 1, w) or 1,
        in_rule=lambda w, x, dy: print("rule", w * 1, x, dy) or 1,
    )
    assert_same(gradient(lambda w, x: loss(w, x))(W, X), (5 * X, 7 * W))
    out = capsys.readouterr().out
    in_f, in_rule = out.splitlines()
    assert re.search(r"f .*3\..* .*2\..* .*3\.", in_f) and "JitTracer" not in in_f
    assert re.search(r"rule .*3\..* .*2\..* .*1\.", in_rule) and "Tracer" not in in_rule


BARE = {"float": float, "asarray": np.asarray, "format": lambda w: f"{w:.2f}", "math": math.sqrt}


@pytest.mark.parametrize("kind", BARE)
@pytest.mark.parametrize("caller", CALLERS)
def test_a_bare_weight_is_jaxs_own_tracer_in_f_and_the_note_says_so(caller, kind):
    def loss(w, x):
        return CALLERS[caller](w, x, **{**NOTHING, "in_f": lambda w, x: BARE[kind](w) and 1})

    with pytest.raises(TypeError) as caught:
        jax.grad(loss)(W, X)
    note = "\n".join(caught.value.__notes__)
    assert "by_self" in note or "by_a_closure" in note
    assert "jnp.asarray" in note
    check(caller, "grad", in_f=lambda w, x: BARE[kind](jnp.asarray(w) * 1) and 1)


@pytest.mark.parametrize("order", ["hessian", "jacrev of jacrev", "jvp of grad"])
def test_eagerly_f_sees_values_at_every_order(order):
    """Its own derivative is not JAX's: what it computes is a value below all of them."""
    second = {
        "hessian": lambda f: jax.hessian(f, (0, 1)),
        "jacrev of jacrev": lambda f: jax.jacrev(jax.jacrev(f, (0, 1)), (0, 1)),
        "jvp of grad": lambda f: lambda *a: jax.jvp(gradient(f), a, (jnp.ones(()),) * 2)[1],
    }[order]

    def loss(w, x):
        return by_a_closure(w, x, lambda w, x: 1 if jnp.all(x * w > 0) else 100, lambda *_: 1)

    zero, five, seven = jnp.float32(0), jnp.float32(5), jnp.float32(7)
    full = (zero, five), (seven, zero)
    try:
        got = second(loss)(W, X)
    except jax.errors.TracerBoolConversionError:
        if order == "jvp of grad":
            raise
        return  # JAX maps over directions there
    assert_same(got, full if order != "jvp of grad" else (five, seven))


@eager_and_jit
def test_elsewhere_they_see_what_jax_shows(mode):
    """Under `jit` a branch on a value is JAX's error, with our note; eagerly there is none."""

    def loss(w, x):
        return by_a_closure(w, x, lambda w, x: 1 if w * x > 0 else 100, lambda *_: 1)

    if mode is not jax.jit:
        assert_same(jax.grad(loss, (0, 1))(W, X), (5 * X, 7 * W))
        return
    for around in (
        jax.jit(jax.grad(loss)),
        jax.grad(jax.jit(loss)),
        jax.grad(jax.checkpoint(loss)),
    ):
        with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
            around(W, X)
        assert "by_a_closure" in "\n".join(caught.value.__notes__)


def test_what_is_not_traced_reaches_f_as_it_is():
    given = jnp.float32(3), np.float32(2), 4, "name", None, jnp.sin, jnp.float32

    @custom_gradient
    def f(x, *others):
        assert all(a is b for a, b in zip(others, given, strict=True))
        return x * others[0], lambda dy: (7 * dy * others[2] / 4, *[None] * len(others))

    for around in (lambda g: g, jax.jit, jax.checkpoint):
        assert_same(jax.grad(around(lambda x: f(x, *given)))(X), jnp.float32(7))
