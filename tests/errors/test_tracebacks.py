"""A traceback shows the user's lines: none of ours stands between the call and the mistake."""

import re
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import tfgrad_jax
from tfgrad_jax import custom_gradient, recompute_grad

OURS = str(Path(tfgrad_jax.__file__).parent)
X = jnp.arange(3.0)


@custom_gradient
def fails(x):
    return x + jnp.ones(4), lambda dy: dy


@custom_gradient
def rule_fails(x):
    return x, lambda dy: dy + jnp.ones(4)


@custom_gradient
def interrupted(x):
    raise KeyboardInterrupt


wrong_shape = custom_gradient(lambda x: (x, lambda dy: dy[:2]))
not_linear = custom_gradient(lambda x: (x, lambda dy: jnp.sin(dy)))


class Model:
    @custom_gradient
    def method(self, x):
        return x + jnp.ones(4), lambda dy: dy


def captured(w):
    return jnp.sum(custom_gradient(lambda x: (x * w, lambda dy: dy))(X))


def total(h):
    return lambda x: jnp.sum(h(x))


MISTAKES = {  # and the last of the functions that the traceback shows here
    "f": (lambda: fails(X), TypeError, "fails"),
    "f, differentiated": (lambda: jax.grad(total(fails))(X), TypeError, "fails"),
    "f of a method, mapped": (lambda: jax.vmap(Model().method)(X[None]), TypeError, "method"),
    "f under recompute_grad": (
        lambda: jax.grad(total(recompute_grad(fails.__wrapped__)))(X), TypeError, "fails",
    ),
    "f, interrupted": (lambda: jax.grad(interrupted)(X), KeyboardInterrupt, "interrupted"),
    "the arguments": (lambda: fails(X, X), TypeError, "<lambda>"),
    "the rule": (lambda: jax.grad(total(rule_fails))(X), TypeError, "<lambda>"),
    "a gradient": (lambda: jax.grad(total(wrong_shape))(X), ValueError, "<lambda>"),
    "a captured value": (lambda: jax.grad(captured)(2.0), TypeError, "captured"),
    "forward mode": (lambda: jax.jvp(not_linear, (X,), (X,)), TypeError, "<lambda>"),
}  # fmt: skip


def frames(mistake):
    """Return the file, the function and the line of each frame."""
    run, kind, _ = MISTAKES[mistake]
    with pytest.raises(kind) as caught:
        run()
    return traceback.extract_tb(caught.value.__traceback__)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_none_of_our_frames(mistake):
    shown = frames(mistake)
    assert not [f for f in shown if f.filename.startswith(OURS)]
    here = [f for f in shown if f.filename == __file__]
    assert here[-1].name == MISTAKES[mistake][2]
    if mistake == "f, differentiated":  # the rest keeps its order and its lines
        wanted = ["return lambda x: jnp.sum(h(x))", "return x + jnp.ones(4), lambda dy: dy"]
        assert [f.line for f in here][-2:] == wanted


@pytest.mark.parametrize("mistake", ["f, differentiated", "a gradient", "forward mode"])
def test_they_are_shown_where_jax_shows_its_own(mistake):
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        shown = frames(mistake)
    finally:
        jax.config.update("jax_traceback_filtering", before)
    assert [f for f in shown if f.filename.startswith(OURS)]


def test_operations_carry_the_name_and_the_line_of_the_user():
    """In the compiled program, and so in profiles, and in the jaxpr: of `f` and of the rule."""

    @custom_gradient
    def spike(x):
        return jnp.tanh(x), lambda dy: dy * jnp.cosh(x)

    for mode in (lambda f: f, jax.jit):  # also where JAX differentiates what was traced before
        lowered = jax.jit(jax.value_and_grad(total(mode(spike)))).lower(X)
        text = lowered.as_text(debug_info=True)
        assert re.search(r"spike\)*/tanh", text)
        assert re.search(r"spike\)*/cosh", text)
        assert OURS not in text
    assert "name=spike" in str(jax.make_jaxpr(spike)(1.0))
    jaxpr = jax.make_jaxpr(jax.grad(spike))(1.0)
    assert f"spike` ({__file__}:{spike.__wrapped__.__code__.co_firstlineno})" in str(jaxpr)
    shown = jaxpr.pretty_print(source_info=True)
    assert OURS not in shown
    assert __file__ in shown
