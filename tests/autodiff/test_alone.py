"""`_autodiff` by itself: it differentiates a `Function` that is written here, without a decorator.

The value is `w x**2`, with a number of steps beside it. The rule says `5 x**2` for `w` and `7 w x`
for `x`, so right numbers prove that it ran.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest
from support.helpers import assert_same, eager_and_jit, sample
from support.ways import FORWARD, REVERSE, SECOND, assert_derivative, hand_written

from tfgrad_jax._autodiff.attached import Forward
from tfgrad_jax._autodiff.custom import differentiated
from tfgrad_jax._autodiff.rule import Run
from tfgrad_jax._messages.source import Source

W, X = jnp.float32(3), jnp.float32(2)
ORACLE = hand_written(lambda w, x: w * x**2, lambda w, x: 5 * x**2, lambda w, x: 7 * w * x)


def rule(residuals, cotangents, wanted):
    (w, x), (dy,) = residuals, cotangents
    gradients = 5 * dy * x**2, 7 * dy * w * x
    return [gradients[i] for i in wanted]


def clipped(residuals, cotangents, wanted):
    return rule(residuals, [jnp.clip(cotangents[0], -1, 1)], wanted)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Square:
    """The value, the number of steps, and the rule of the first of the two."""

    run: Run = rule
    needs_perturbed: bool = False
    has_primal: bool = False
    gives: Sequence[int] = (0, 1)

    @property
    def source(self):
        return Source.of(self.run)

    def names(self):
        return "w", "x"

    def value(self, operands):
        w, x = operands
        return [w * x**2, jnp.int32(2)]

    def forward(self, operands, perturbed):
        return Forward(self.value(operands), [0], self.run, list(operands), self.gives)


def square(function):
    return lambda *operands: differentiated(function, "square", operands)[0]


def squared(h):
    return lambda *operands: h(*operands) ** 2  # its second derivative needs the rule again


FUNCTIONS = {"plain": Square(), "asks what is perturbed": Square(needs_perturbed=True)}
WAYS = {**REVERSE, **FORWARD, **SECOND}
BRIEF = "grad", "jit(grad)", "grad(vmap)", "jvp", "jacfwd(jit)", "grad of grad", "hessian"


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("way", sample(WAYS, 5, BRIEF))
def test_the_rule_is_the_derivative_at_every_order_in_both_modes(function, way):
    h = square(FUNCTIONS[function])
    assert_derivative(WAYS[way], squared(h), squared(ORACLE), W, X)


@eager_and_jit
def test_every_output_comes_back_and_one_operand_may_be_a_constant(mode):
    y, steps = mode(lambda: differentiated(Square(), "square", [W, X]))()
    assert_same((y, steps), (jnp.float32(12), jnp.int32(2)))
    h = square(FUNCTIONS["asks what is perturbed"])
    assert_same(mode(jax.grad(lambda x: h(W, x)))(X), jnp.float32(42))
    assert_same(mode(jax.grad(lambda w: h(w, X)))(W), jnp.float32(20))


@eager_and_jit
def test_the_rule_gives_what_is_asked_of_it_and_no_more(mode):
    asked = []

    def run(residuals, cotangents, wanted):
        asked.append(list(wanted))
        return rule(residuals, cotangents, wanted)

    h = square(Square(run, needs_perturbed=True))
    assert_same(mode(jax.grad(lambda x: h(W, x)))(X), jnp.float32(42))
    assert asked == [[1]]


@eager_and_jit
@pytest.mark.parametrize("gives", [(), (0,), (1,)])
def test_an_operand_that_the_rule_does_not_give_has_a_gradient_of_zero(mode, gives):
    def run(residuals, cotangents, wanted):
        gradients = rule(residuals, cotangents, wanted)
        return [g if i in gives else None for i, g in zip(wanted, gradients, strict=True)]

    h = square(Square(run, gives=gives))
    expected = [jnp.float32(right if i in gives else 0) for i, right in enumerate((20, 42))]
    assert_same(mode(jax.grad(h, (0, 1)))(W, X), tuple(expected))


@eager_and_jit
def test_a_rule_that_is_not_linear_has_reverse_mode_alone(mode):
    h = square(Square(clipped))
    gradients = jnp.float32(20), jnp.float32(42)
    assert_same(mode(jax.grad(lambda w, x: 3 * h(w, x), (0, 1)))(W, X), gradients)
    with pytest.raises(TypeError, match=r"`clipped` \(.*test_alone.py:.* is not linear in its ups"):
        mode(lambda w, x: jax.jvp(h, (w, x), (w, x)))(W, X)
