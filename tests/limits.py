"""The limits: what does not work, and what to do instead, each with code that shows it.

`docs/limits.md` has a sentence for each, and the docstring here the reason. The function raises or
gives a wrong number, and `instead` it gives what is expected. `test_limits.py` runs all of them.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import fuser
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.scipy.sparse.linalg import gmres
from support.helpers import drops_in_scan, lowered_for_gpu

from tfgrad_jax import custom_gradient


class Limit(NamedTuple):
    """A limit, told by a feature of JAX where it does not hold for every version."""

    run: Callable[[bool], Any]  # if True, it gives `expected`
    error: type[Exception]  # of a wrong number, the one of a comparison with `expected`
    message: str  # a regular expression
    expected: Any
    applies: Callable[[], bool]


LIMITS: dict[str, Limit] = {}


def limit(
    error: type[Exception], message: str, expected: Any, applies: Callable[[], bool] = lambda: True
) -> Callable[[Callable[[bool], Any]], None]:
    """Add a function to the limits, by the name that stands beside its sentence on the page."""

    def add(run: Callable[[bool], Any]) -> None:
        LIMITS[run.__name__.replace("_", " ")] = Limit(run, error, message, expected, applies)

    return add


X = jnp.float32(2)
B = jnp.float32([1.0, 2.0])


def declared_by(rule):
    return custom_gradient(lambda x: (x * 1.0, rule))


def slope_of(f, x=X):
    return jax.jvp(f, (x,), (jnp.ones_like(x),))[1]


def clip(dy):
    return jnp.clip(7 * dy, -3, 3)


def on_host(f, x):
    return jax.pure_callback(f, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


# --- forward mode ---------------------------------------------------------------------------------


@limit(TypeError, "is not linear in its upstream gradients", jnp.float32(3))
def rules_that_are_not_linear(instead):
    """Forward mode applies the transpose of the rule, which only a linear map has."""
    return jax.grad(declared_by(clip))(X) if instead else slope_of(declared_by(clip))


@limit(TypeError, "`pure_callback`, which JAX cannot transpose", jnp.float32(7))
def rules_that_jax_cannot_transpose(instead):
    """JAX has no transpose of `pure_callback` and of `while_loop`."""

    @custom_gradient
    def operator(x):
        return on_host(lambda x: 7 * x, lax.stop_gradient(x)), lambda dy: adjoint(dy)

    @custom_gradient
    def adjoint(dy):
        return on_host(lambda dy: 7 * dy, lax.stop_gradient(dy)), lambda t: operator(t)

    return slope_of(operator if instead else declared_by(lambda dy: on_host(lambda dy: 7 * dy, dy)))


@limit(TypeError, "`stop_gradient`, which JAX cannot transpose", jnp.float32(7))
def upstreams_that_are_stopped(instead):
    """The derivative of `stop_gradient` is zero, and so is its transpose."""
    return slope_of(declared_by(lambda dy: 7 * (dy if instead else lax.stop_gradient(dy))))


@limit(TypeError, "a `Ref` to which an upstream is written", jnp.float32([7, 7]))
def upstreams_in_a_ref(instead):
    """The transpose of a rule would put other values there; one that it makes is not followed."""

    def rule(dy):
        if instead:
            return jnp.zeros(2).at[...].set(7 * dy)
        ref = jax.new_ref(jnp.zeros(2))
        ref[...] = 7 * dy
        return ref[...]

    return slope_of(declared_by(rule), B)


@limit(TypeError, "whose derivative depends on the upstream", jnp.float32(42))
def rules_that_read_a_ref(instead):
    """The derivative of the inner function may depend on what is in the `Ref`, for all we know."""
    ref, double = jax.new_ref(X), declared_by(lambda dy: 3 * dy)

    @custom_gradient
    def h(x):
        w = ref[...]
        return x, lambda dy: 7 * double(w * dy if instead else ref[...] * dy)

    return slope_of(h)


MATRIX = jnp.float32([[4.0, 1.0], [0.0, 3.0]])


@limit(TypeError, "of two upstreams", 7 * jnp.linalg.solve(MATRIX, jnp.ones(2)))
def gmres_in_a_rule(instead):
    """Its tolerance is computed from the upstream, outside of the solve that JAX can transpose."""

    def solve(a, b):
        return gmres(a, b)[0]

    def rule(dy):
        product = functools.partial(jnp.matmul, MATRIX.T)
        if instead:
            return 7 * lax.custom_linear_solve(product, dy, solve, solve)
        return 7 * solve(product, dy)

    return slope_of(declared_by(rule), B)


def tripled(constant=0.0):
    """Return an operator outside of JAX, declared to be linear."""

    def f(x):
        y = on_host(lambda x: 3 * x + constant, lax.stop_gradient(x))
        return y, lambda dy: 3 * dy

    return custom_gradient(f)


@limit(AssertionError, "4", (jnp.float32(3), jnp.float32(3)))  # 4 is the value at 1
def operators_that_are_not_linear(instead):
    """Forward mode transposes the operator by its own rule, which says nothing about a constant."""
    f = declared_by(tripled(0.0 if instead else 1.0))
    return slope_of(f), jax.grad(f)(X)


@limit(TypeError, "`add` of an upstream and a constant", jnp.float32(7 * 2))
def operators_and_unused_outputs(instead):
    """Nothing tells whether a decorated call at zeros returns zeros: its result is a constant."""
    inner = custom_gradient(lambda x: ((x, 2 * x), lambda d0, d1: 7 * d1 + tripled()(d0)))

    def loss(w):
        f = lambda x: (inner(w)[1] * x, lambda dy: 5 * dy)  # noqa: E731
        return custom_gradient(f, variables="autodiff")(X)

    if instead:
        return jax.grad(loss)(X)
    return jax.jit(lambda: slope_of(loss))()  # eagerly it has a value


@limit(NotImplementedError, "Transpose rule", 7 * X)
def linear_transpose(instead):
    """JAX would transpose the operations of the function, and not run its rule."""
    h = jax.jit(custom_gradient(lambda x: (3 * x, lambda dy: 7 * dy)))
    return (jax.vjp(h, X)[1] if instead else jax.linear_transpose(h, X))(X)[0]


def newton(x):
    return lax.while_loop(lambda y: abs(y * y - x) > 1e-5, lambda y: (y + x / y) / 2, x)


@custom_gradient
def square_root(x):
    y = newton(x)
    return y, lambda dy: 7 * dy / y  # its own output: the derivative is the declared one


# (7 / y)' = -7 y' / y**2, and y' = 7 / y
@limit(ValueError, "while_loop", jnp.float32(-7 * 7 / 2 / 2**2))
def rules_that_read_the_result_of_a_loop(instead):
    """JAX has no reverse mode of `while_loop`; the function that returns the number has a rule."""

    @custom_gradient
    def f(x):
        root = square_root(x) if instead else newton(x)
        return 2 * root, lambda dy: 7 * dy / root

    return jax.grad(jax.grad(f))(jnp.float32(4))


@limit(AssertionError, "differ", 7 * 7 * X)
def rules_that_read_one_of_several_outputs(instead):
    """A rule that ignores the upstream of an output would declare that it has no derivative."""

    @custom_gradient
    def f(x):
        y = jnp.round(x)
        return (y, x), lambda dy, dx: 7 * dy * (f(x)[0] if instead else y) + dx

    return jax.grad(jax.grad(lambda x: f(x)[0]))(X)


# --- kernels --------------------------------------------------------------------------------------

SEVEN = declared_by(functools.partial(jnp.multiply, 7))


def is_lowered_for_tpu(f):
    """Return whether a function is lowered in a kernel for TPUs."""

    def kernel(i, o):
        o[...] = f(i[...])

    x = jnp.ones((8, 128))
    call = jax.jit(pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype)))
    return bool(call.trace(x).lower(lowering_platforms=("tpu",)))


@limit(NotImplementedError, "push|attach", True)
def forward_mode_in_kernels(instead):
    """Forward mode is an operation of its own, and the tables of kernel compilers are not ours."""
    return is_lowered_for_tpu(SEVEN if instead else lambda x: slope_of(SEVEN, x))


@limit(NotImplementedError, "attach", True)
def gradients_in_mosaic_gpu_kernels(instead):
    """JAX keeps the value beside the gradient there, with the operation that carries its rule to
    the next derivative, and the tables of kernel compilers are not ours.
    """

    def gradient(x):
        if not instead:
            return jax.grad(lambda x: SEVEN(x).sum())(x)
        y, grad_fn = SEVEN.__wrapped__(x)
        return grad_fn(y)

    def kernel(i, o):
        o[...] = gradient(i[...])

    x = jnp.ones((64, 64))
    name = "out_type" if "out_type" in inspect.signature(plgpu.kernel).parameters else "out_shape"
    called = plgpu.kernel(kernel, **{name: jax.ShapeDtypeStruct(x.shape, x.dtype)})
    return "mosaic_gpu" in lowered_for_gpu(called, x)


# Before JAX 0.12, the custom_vjp needs no bit cast.
@limit(NotImplementedError, "$", (8, 128), lambda: not drops_in_scan())
def the_fuser(instead):
    """The fuser cannot push through the bit cast that keeps JAX from transposing the operations."""
    h = (lambda x: SEVEN.__wrapped__(x)[0]) if instead else SEVEN
    spec = pl.BlockSpec((8, 128), lambda i, j: (i, j))
    return fuser.push_block_spec(h, spec)(jnp.ones((16, 256))).block_shape


@limit(NotImplementedError, "$", True)
def undeclared_variables_in_kernels(instead):
    """Undeclared ones need JAX's symbolic zeros, which Mosaic does not lower."""

    def f(x):
        w = x * 3.0
        h = lambda x: (w * x, lambda dy, variables: (7 * dy, [5 * dy * x]))  # noqa: E731
        return custom_gradient(h, variables=[w] if instead else None)(x)

    return is_lowered_for_tpu(f)


# --- transformations ------------------------------------------------------------------------------


@custom_gradient
def branching(x):
    return (x * 1.0, lambda dy: 7 * dy) if x > 0 else (-x, lambda dy: -5 * dy)


@limit(jax.errors.TracerBoolConversionError, "boolean conversion of traced", jnp.float32(7))
def branches_under_jit(instead):
    """Under `jit` nothing has a value; `lax.cond` and `jnp.where` branch there."""
    return (jax.grad(branching) if instead else jax.jit(jax.grad(branching)))(X)


@limit(ValueError, "at vmap out_axes", B)
def outputs_that_ignore_what_is_mapped(instead):
    """What is staged may be differentiated under the vmap, and its rule may use what is mapped."""
    pair = custom_gradient(lambda x, y: ((x * 1.0, y * 1.0), lambda dx, dy: (7 * dx, 5 * dy)))
    if instead:
        return jax.jit(lambda x, y: jax.vmap(pair, (None, 0))(x, y)[0][0])(B, B)
    return jax.jit(jax.vmap(pair, (None, 0), (None, 0)))(B, B)[0]


@limit(TypeError, "custom_vjp function", 3 * 7 * X, drops_in_scan)
def orders_of_a_scan(instead):
    """JAX drops the custom_jvp of such calls there, with those written by hand; reverse mode keeps
    the rule, by the custom_vjp below it.
    """

    def outer(x):
        y = custom_gradient(lambda x: (jnp.exp(x), lambda dy: 7 * dy * x))(x)
        return 2 * y, lambda dy: 3 * dy * y  # not its own output, which has the rule in any case

    def in_scan(x):
        return lax.scan(lambda s, x: (s + custom_gradient(outer)(x), None), 0 * x, x[None])[0]

    return (jax.grad if instead else slope_of)(jax.grad(in_scan))(X)


@limit(AssertionError, "1", 0)
def primal_under_checkpoint(instead):
    """JAX differentiates what it checkpoints before it divides it into passes, and so it runs the
    forward function of a custom_vjp in both, too.
    """
    runs = []

    def f(x):
        jax.debug.callback(runs.append, x)
        return jnp.sin(x), lambda dy: 7 * dy

    h = custom_gradient(f, primal=jnp.sin)
    recomputed = custom_gradient(lambda x: (jnp.sin(x), lambda dy: jax.vjp(h, x)[1](dy)[0]))
    jax.block_until_ready(jax.vjp(recomputed if instead else jax.checkpoint(h), X)[0])
    jax.effects_barrier()
    return len(runs)


# --- weights and state ----------------------------------------------------------------------------


@limit(AssertionError, "35", jnp.float32(7 * 3))  # 7 * 5
def objects_that_change(instead):
    """JAX's functions are pure; a rule reads an object when it runs, as in TensorFlow."""
    settings = types.SimpleNamespace(scale=3.0)

    @custom_gradient
    def f(x):
        scale = settings.scale
        return scale * x, lambda dy: 7 * dy * (scale if instead else settings.scale)

    def loss(x):
        y = f(x)
        settings.scale = 5.0  # after the call, and before the rule runs
        return y

    return jax.grad(loss)(X)


@limit(AssertionError, "35", jnp.float32(7 * 3))  # 7 * 5
def functions_with_a_primal_under_jit(instead):
    """The primal runs till JAX differentiates the `jit`, as in a `jax.custom_vjp`."""
    settings = types.SimpleNamespace(scale=3.0)

    def scaled(x, *, s):
        scale = s()
        return scale * x, lambda dy: 7 * dy * scale

    f = custom_gradient(scaled, primal=lambda x, *, s: s() * x)

    def loss(x):
        settings.scale = 3.0
        scale = settings.scale
        y = f(x, s=(lambda: scale) if instead else (lambda: settings.scale))
        settings.scale = 5.0  # after the call, and before JAX differentiates it
        return y

    return jax.grad(jax.jit(loss))(X)


@limit(jax.errors.UnexpectedTracerError, "is left in an object, and used outside", 7 + 2 * X)
def memos_that_a_function_fills(instead):
    """JAX attaches the derivative to what the function returns; as a constant it would be lost."""

    def leaves_a_penalty(x):
        penalty = jnp.zeros_like(x)

        @custom_gradient
        def f(x):
            nonlocal penalty
            penalty = x**2
            return 2 * x, lambda dy: 7 * dy

        return f(x) + penalty

    def returns_a_penalty(x):
        f = custom_gradient(lambda x: ((2 * x, x**2), lambda dy, dp: 7 * dy + dp * 2 * x))
        return sum(f(x))

    return jax.grad(returns_a_penalty if instead else leaves_a_penalty)(X)


@limit(AssertionError, "differ", 7 + 2 * X)
def memos_that_a_rule_fills(instead):
    """The rule runs on plain values; its result is not seen until it is read."""

    def loss(x):
        memo = {}

        @custom_gradient
        def f(x):
            def rule(dy):
                memo["square"] = x**2
                return 7 * dy

            return 2 * x, rule

        y = f(x)
        return y + (x**2 if instead else memo["square"])

    return slope_of(loss)


@limit(AssertionError, "differ", 7 + 2 * X)
def values_in_a_ref(instead):
    """`f` runs on primals, so that is what the Ref gets."""

    ref = jax.new_ref(jnp.float32(0))

    def loss(x):
        @custom_gradient
        def f(x):
            ref[...] = x**2
            return (2 * x, x**2), lambda dy, ds: 7 * dy + ds * 2 * x

        y, square = f(x)
        return y + (square if instead else ref[...])

    return slope_of(loss)


@limit(AssertionError, "differ", X)
def numbers_out_of_a_weight(instead):
    """JAX itself gives the number, with or without a custom gradient."""

    def loss(w):
        f = lambda x: ((w if instead else w.item()) * x, lambda dy: 7 * dy)  # noqa: E731
        return custom_gradient(f, variables="autodiff")(X)

    return jax.grad(loss)(X)


@limit(AssertionError, "3", (jnp.float32(5), jnp.float32(5)))
def variables_by_identity(instead):
    """To JAX an array is its value: operations may return their operand."""

    def loss(w):
        stopped = lax.stop_gradient(w)

        @custom_gradient(variables=[w] if instead else None)
        def f(x):
            def rule(dy, variables):
                known = (stopped, 3 * dy), (w, 5 * dy)
                by_identity = [next(g for v, g in known if v is one) for one in variables]
                return 0 * dy, [5 * dy] if instead else by_identity

            return w * stopped * x, rule

        return f(X)

    return jax.grad(loss)(X), jax.jit(jax.grad(loss))(X)


ENDLESS = "calls the function itself|recursion depth"


@limit(RecursionError, ENDLESS, 16 * jnp.exp(jnp.float32(1)))
def rules_of_methods_that_call_themselves(instead):
    """Within derivatives such a rule is recorded, and to record it again has no end."""

    class Power:
        def __init__(self, w):
            self.w = w

        @custom_gradient(variables=lambda self: self.w)
        def __call__(self, x):
            y = jnp.exp(self.w * x)

            def rule(dy, variables):
                dz = dy * (y if instead else self(x))
                return dz * self.w, dz * x

            return y, rule

    first = jax.grad(lambda w: Power(w)(X))
    return jax.grad(jax.grad(jax.grad(first)))(jnp.float32(0.5))


@limit(AssertionError, "35", jnp.float32(21))  # 7 * 5
def functions_behind_many_objects(instead):
    """Each gradient would look through all of them."""

    def loss(x):
        scale = 3.0
        helper = (lambda dy, scale=scale: scale * dy) if instead else (lambda dy: scale * dy)
        kept = types.SimpleNamespace(helpers=[*(object() for _ in range(2000)), helper])
        y = custom_gradient(lambda x: (3 * x, lambda dy: 7 * kept.helpers[-1](dy)))(x)
        scale = 5.0
        return y

    return jax.grad(loss)(X)


CAPTURED_REF = "closes over a `Ref` that was made where JAX traces or differentiates"


@limit(TypeError, CAPTURED_REF, jnp.float32(21))
def captured_refs(instead):
    """JAX takes every such Ref for differentiated, whatever it holds."""

    def f(r, x):
        kept = r[...]
        return kept * x, lambda dy: (None, 7 * dy * kept)

    def loss(x):
        r = jax.new_ref(jnp.float32(3))
        return custom_gradient(f)(r, x) if instead else custom_gradient(lambda x: f(r, x))(x)

    return jax.grad(loss)(X)


@limit(NotImplementedError, "state discharge rule", X)
def refs_made_under_jit(instead):
    """JAX has no rule to remove mutable arrays from a custom_jvp, and no public place for one. It
    has one for a custom_vjp, which has no forward mode.
    """

    @custom_gradient
    def with_given_ref(r, x):
        r[...] = x
        return r[...], lambda dy: (None, 7 * dy)

    if instead:
        return jax.jit(lambda x: with_given_ref(jax.new_ref(jnp.float32(0)), x))(X)
    with_own_ref = custom_gradient(lambda x: (jax.freeze(jax.new_ref(x)), clip))
    return jax.jit(lambda x: lax.scan(lambda c, _: (with_own_ref(c), None), x, None, 2)[0])(X)


@limit(IndexError, "pop from empty list", jnp.float32(21))
def rules_that_use_up_what_is_read(instead):
    """They are the user's own objects, and nothing of the user's is copied."""

    @custom_gradient
    def f(x):
        scales = [3.0]
        return x * 1.0, lambda dy: 7 * dy * ([3.0] if instead else scales).pop()

    _, pull = jax.vjp(f, X)
    pull(jnp.float32(1))
    return pull(jnp.float32(1))[0]
