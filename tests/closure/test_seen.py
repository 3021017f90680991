"""What `f` and its rule see: values, in an eager first derivative.

What depends on an input or a weight is a tracer that shows its value to Python; the rule sees
values. A bare weight is JAX's own tracer. All have the value `w x`, declared `7 w` by `x` and
`5 x` by `w`, and a factor of one that is computed from what Python has seen.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scipy import special
from support.helpers import assert_same, product
from support.ways import WAYS

from tfgrad_jax import custom_gradient

W, X = jnp.float32(3), jnp.float32(2)

# Each takes an array with the value 3, and returns 1.
SEEN = {
    "if": lambda a: 1 if a > 0 else 100,
    "float": lambda a: float(a) / 3,
    "int": lambda a: int(a) // 3,
    "complex": lambda a: complex(a).real / 3,
    "bool": lambda a: bool(jnp.all(a > 2)) * 1,
    "str": lambda a: 1 if "3." in f"{a}" and "3." in str(a) and "3." in repr(a) else 100,
    "format": lambda a: float(f"{a:.1f}") / 3,
    "index of a list": lambda a: [9, 9, 9, 1][a.astype(int)],
    "asarray": lambda a: float(np.asarray(a)) / 3,
    "SciPy": lambda a: float(special.expit(np.asarray(a)) / special.expit(3.0)),
    "tolist": lambda a: a.tolist() / 3,
    "item": lambda a: a.item() / 3,
    "a shape": lambda a: jnp.ones(int(a)).sum().item() / 3,
    "iteration": lambda a: sum(float(b) for b in jnp.stack([a, a])) / 6,
    "in a jit": lambda a: float(jax.jit(lambda b: b + a)(a)) / 6,
    "in a scan": lambda a: float(lax.scan(lambda c, _: (c + a, 0), 0 * a, None, 2)[0]) / 6,
    "in a vmap": lambda a: float(jax.vmap(lambda b: b + a)(a[None])[0]) / 6,
    "in a gradient": lambda a: float(jax.grad(lambda b: b * a)(a)) / 3,
}


class Layer:
    def __init__(self, w):
        self.w = w

    @custom_gradient
    def __call__(self, x, *, in_f, in_rule):
        in_f, in_rule = (look and functools.partial(look, self) for look in (in_f, in_rule))
        return product(lambda: self.w, in_f, in_rule).__wrapped__(x)


def of_a_closure(w, x, in_f, in_rule, **options):
    held = Layer(w)
    in_f, in_rule = (look and functools.partial(look, held) for look in (in_f, in_rule))
    return product(w, in_f, in_rule, **options)(x)


CALLERS = {
    "closure": of_a_closure,
    "self": lambda w, x, **seen: Layer(w)(x, **seen),
    "declared": lambda w, x, **seen: of_a_closure(w, x, variables=[w], **seen),
}


def check(caller, world, in_f=None, in_rule=None):
    loss = functools.partial(CALLERS[caller], in_f=in_f, in_rule=in_rule)
    if world == "by x alone":
        assert_same(jax.grad(lambda x: loss(W, x))(X), 7 * W)
    else:
        assert_same(WAYS[world](lambda w, x: loss(w, x))(W, X), (5 * X, 7 * W))


@pytest.mark.parametrize("kind", SEEN)
def test_eagerly_f_sees_what_depends_on_weights_and_inputs_and_the_rule_values(kind):
    """Forward mode transposes the rule, which is a trace: there it branches on no upstream."""
    look = SEEN[kind]
    for caller, world in itertools.product(CALLERS, ["grad", "jvp", "by x alone"]):
        check(caller, world, lambda o, x: look(o.w * 1) * look(x * 1.5) * look(o.w + x - 2))
        check(caller, world, lambda o, x: look(lax.stop_gradient(x + 1)))
        if world != "jvp":
            check(caller, world, None, lambda o, x, dy: look(o.w * 1) * look(x + 1) * look(3 * dy))


@pytest.mark.parametrize("caller", CALLERS)
def test_a_print_shows_values(caller, capsys):
    in_f = lambda o, x: print(o.w * 1, x * 1, o.w) or 1  # noqa: E731
    check(caller, "grad", in_f, lambda o, x, dy: print(o.w * 1, x, dy) or 1)
    in_f, in_rule = capsys.readouterr().out.splitlines()
    assert re.search(r"3\..* .*2\..* .*3\.", in_f) and "JitTracer" not in in_f
    assert re.search(r"3\..* .*2\..* .*1\.", in_rule) and "Tracer" not in in_rule


@pytest.mark.parametrize("convert", [float, np.asarray])
@pytest.mark.parametrize("caller", CALLERS)
def test_a_bare_weight_is_jaxs_own_tracer_in_f_and_the_note_says_so(caller, convert):
    in_f = lambda o, x: 1 if o.w > 0 and o.w * x == 6 else 9  # noqa: E731
    check(caller, "grad", in_f)  # what an operation makes of it shows its value
    with pytest.raises(TypeError) as caught:
        check(caller, "grad", lambda o, x: convert(o.w) and 1)
    note = "\n".join(getattr(caught.value, "__notes__", []))
    assert ("Layer.__call__" if caller == "self" else "product.f") in note
    assert "jnp.asarray" in note
    check(caller, "grad", lambda o, x: convert(jnp.asarray(o.w)) and 1)


@pytest.mark.parametrize("where", ["in_f", "in_rule"])
@pytest.mark.parametrize("caller", CALLERS)
def test_elsewhere_they_see_what_jax_shows(caller, where):
    """Under `jit` a branch on a value is JAX's error, with our note."""
    see = {"in_f": None, "in_rule": None, where: lambda o, x, *_: 1 if o.w * x > 0 else 9}
    for world in ("jit(grad)", "grad(jit)", "grad(checkpoint)", "vmap(grad)", "grad(scan)"):
        with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
            WAYS[world](lambda w, x: CALLERS[caller](w, x, **see))(W, X)
        note = "\n".join(caught.value.__notes__)
        assert ("Layer.__call__" if caller == "self" else "product.f") in note


NOT_SHOWN = ["float", "complex", "format", "asarray", "item", "tolist"]


@pytest.mark.parametrize("kind", NOT_SHOWN)
def test_what_jax_differentiates_again_shows_no_value(kind):
    """Python would take it for a constant: its derivative was 0, silently. A branch is right."""
    by_weight = lambda look: lambda o, x: look(o.w * x / 2)  # noqa: E731
    by_both = lambda w, x, look, **options: of_a_closure(w, x, by_weight(look), None, **options)  # noqa: E731
    losses = {
        "autodiff": lambda look: lambda x: by_both(x, X, look, variables="autodiff"),
        "by x": lambda look: jax.grad(lambda x: by_both(W, x, look)),
        "by w": lambda look: jax.grad(lambda w: by_both(w, X, look)),
        "of an object": lambda look: jax.grad(
            lambda w: Layer(w)(X, in_f=by_weight(look), in_rule=None)
        ),
    }
    for loss in losses.values():
        with pytest.raises(TypeError):
            jax.grad(loss(SEEN[kind]))(W)
        assert_same(jax.grad(loss(SEEN["if"]))(W), jax.grad(loss(lambda a: 1))(W))
