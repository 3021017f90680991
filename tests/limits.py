"""The limits: what does not work, where, why, and what to do instead; each with code that shows it.

`test_limits.py` runs all of them. `python tests/limits.py` prints the list of `docs/limits.md`.
"""

import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental import sparse
from jax.experimental.pallas import fuser
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.scipy.sparse.linalg import gmres
from support.helpers import assert_same, drops_in_scan, lowered_for_gpu

from tfgrad_jax import custom_gradient


class Limit(NamedTuple):
    """A limit, told by a feature of JAX where it does not hold for every version."""

    sentence: str  # what the page says
    reason: str
    shows: Callable[[], Any]  # raises
    error: type[Exception]
    message: str  # a regular expression
    instead: Callable[[], Any]  # gives `expected`
    expected: Any
    applies: Callable[[], bool] = lambda: True


LIMITS: dict[str, Limit] = {}


def limit(name: str, *parts: Any, **more: Any) -> Limit:
    LIMITS[name] = Limit(*parts, **more)
    return LIMITS[name]


def rendered() -> str:
    """Return the list of the page, by groups, in lines of at most 100 columns."""

    def items(names: Iterable[str]) -> str:
        return "\n".join(
            textwrap.fill(f"- {one.sentence}", 100, subsequent_indent="  ", break_on_hyphens=False)
            for one in map(LIMITS.__getitem__, names)
        )

    return "\n\n".join(f"## {title}\n\n{items(names)}" for title, names in GROUPS.items())


X = jnp.float32(2)


def declared_by(rule: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return custom_gradient(lambda x: (x * 1.0, rule))


# --- forward mode ---------------------------------------------------------------------------------


def clip(dy: Any) -> Any:
    return jnp.clip(7 * dy, -3, 3)


limit(
    "rules that are not linear",
    "`jvp`, `jacfwd` and `hessian` need a rule that is linear in its upstreams. A clipped gradient "
    "is not: use `jacrev(jacrev(f))` instead of `hessian(f)`.",
    "Forward mode applies the transpose of the rule, which only a linear map has.",
    lambda: jax.jvp(declared_by(clip), (X,), (X,)),
    TypeError,
    "is not linear in its upstream gradients",
    lambda: jax.grad(declared_by(clip))(X),
    jnp.float32(3),
)


def callback(dy: Any) -> Any:
    return jax.pure_callback(lambda dy: 7 * dy, jax.ShapeDtypeStruct(dy.shape, dy.dtype), dy)


@custom_gradient
def outside(x: Any) -> Any:
    return callback(lax.stop_gradient(x)), lambda dy: adjoint(dy)


@custom_gradient
def adjoint(dy: Any) -> Any:
    return callback(lax.stop_gradient(dy)), lambda t: outside(t)


limit(
    "rules that JAX cannot transpose",
    "If the rule passes `dy` to a callback or through a `while_loop`, only first derivatives in "
    "reverse mode work. To differentiate a callback in both modes, decorate it and its adjoint, "
    "and let each be the rule of the other: [Operators outside of JAX](howto/operators.md).",
    "JAX has no transpose of `pure_callback` and of `while_loop`.",
    lambda: jax.jvp(declared_by(callback), (X,), (X,)),
    TypeError,
    "`pure_callback`, which JAX cannot transpose",
    lambda: jax.jvp(outside, (X,), (X,))[1],
    jnp.float32(7 * 2),
)


def noting(own: bool) -> Callable[[Any], Any]:
    noted = jax.new_ref(jnp.float32(0))

    def rule(dy: Any) -> Any:
        ref = jax.new_ref(jnp.float32(0)) if own else noted
        ref[...] = 7 * dy
        return ref[...]

    return declared_by(rule)


limit(
    "upstreams in a Ref",
    "`jvp` and second derivatives raise if a rule writes its upstream to a `Ref` that outlives it. "
    "Write it to a `Ref` that the rule makes, or take first derivatives in reverse mode.",
    "The transpose of a rule, and its derivative, have other values there, which nobody asked for.",
    lambda: jax.jvp(noting(own=False), (X,), (X,)),
    TypeError,
    "written to a Ref, which outlives the rule",
    lambda: jax.jvp(noting(own=True), (X,), (X,))[1],
    7 * X,
)


MATRIX = jnp.float32([[4.0, 1.0], [0.0, 3.0]])
B = jnp.float32([1.0, 2.0])


def solved(wrapped: bool) -> Callable[[Any], Any]:
    def solve(a: Any, b: Any) -> Any:
        return gmres(a, b)[0]

    def rule(dy: Any) -> Any:
        product = functools.partial(jnp.matmul, MATRIX.T)
        return 7 * (
            lax.custom_linear_solve(product, dy, solve, solve) if wrapped else solve(product, dy)
        )

    return declared_by(rule)


limit(
    "gmres in a rule",
    "`jvp` does not work if a rule calls `gmres`; `cg` and `bicgstab` work. Call it through "
    "`lax.custom_linear_solve(matvec, dy, solve, solve)`, where `solve` calls `gmres`.",
    "Its tolerance is computed from the upstream, outside of the solve that JAX can transpose.",
    lambda: jax.jvp(solved(wrapped=False), (B,), (B,)),
    TypeError,
    "of two upstreams",
    lambda: jax.jvp(solved(wrapped=True), (B,), (B,))[1],
    7 * jnp.linalg.solve(MATRIX, B),
)


def mapped_with(kind: Any) -> Any:
    matrix = kind.fromdense(MATRIX)
    return jax.jacfwd(custom_gradient(lambda x: (MATRIX.T @ x, lambda dy: 7 * (matrix @ dy))))(B)


limit(
    "sparse matrices under vmap",
    "`vmap`, `jacfwd`, `jacrev` and `hessian` raise if a rule uses a sparse matrix of the class "
    "`CSR` or `COO`. Use `BCOO` or `BCSR`.",
    "JAX has no batching rule for a product with such a matrix, with or without a custom gradient.",
    lambda: mapped_with(sparse.CSR),
    NotImplementedError,
    "Batching rule for 'csr_matvec'",
    lambda: mapped_with(sparse.BCSR),
    7 * MATRIX.T,
)


def both_slopes(constant: float) -> Any:
    def operator(x: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: 3 * x + constant, shape, lax.stop_gradient(x))

    f = declared_by(custom_gradient(lambda x: (operator(x), lambda dy: 3 * dy)))
    return jax.grad(f)(X), jax.jvp(f, (X,), (jnp.ones_like(X),))[1]


limit(
    "operators that are not linear",
    "If a rule is a decorated callback or kernel that is not linear, `jvp` and `grad` disagree "
    "without an error. Keep such an operator linear: add constants outside of it.",
    "Forward mode transposes the operator by its own rule, which says nothing about a constant.",
    lambda: assert_same(*both_slopes(constant=1.0)),
    AssertionError,
    "4",  # the value at 1; by the rule it is 3
    lambda: both_slopes(constant=0.0),
    (jnp.float32(3), jnp.float32(3)),
)


@custom_gradient
def tripled(x: Any) -> Any:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda x: 3 * x, shape, lax.stop_gradient(x)), lambda dy: 3 * dy


@custom_gradient
def with_operator(x: Any) -> Any:
    return (x, 2 * x), lambda d0, d1: 7 * d1 + tripled(d0)


def around_an_unused_output(w: Any) -> Any:
    def f(x: Any) -> Any:
        _, y = with_operator(w)
        return y * x, lambda dy: 5 * dy

    return custom_gradient(f, variables="autodiff")(X)


def slope_of(f: Callable[[Any], Any]) -> Any:
    return jax.jvp(f, (X,), (jnp.ones_like(X),))[1]


limit(
    "operators and unused outputs",
    'With `variables="autodiff"`, `jvp` raises under `jit` if the function calls one with an '
    "unused output, and the rule of that one passes the upstream of this output, zeros, to a "
    "decorated callback or kernel. Use reverse mode.",
    "Of a decorated call at zeros, nothing tells whether its result is zero; so it is a constant.",
    lambda: jax.jit(lambda: slope_of(around_an_unused_output))(),  # eagerly it has a value
    TypeError,
    "`add` of an upstream and a constant",
    lambda: jax.grad(around_an_unused_output)(X),
    jnp.float32(7 * 2),
)


def through(transpose: Callable[[Callable[[Any], Any]], Any], w: Any) -> Any:
    return transpose(custom_gradient(lambda x: (w * x, lambda dy: 7 * w * dy)))(X)[0]


limit(
    "linear_transpose",
    "`jax.linear_transpose` of a decorated function raises under `jit` and `scan`. Use `jax.vjp`.",
    "JAX would transpose the operations of the function, and not run its rule.",
    lambda: through(lambda h: jax.linear_transpose(jax.jit(h), X), X),
    NotImplementedError,
    "Transpose rule",
    lambda: jax.vmap(jax.grad(functools.partial(through, lambda h: jax.vjp(h, X)[1])))(B),
    7 * X * jnp.ones(2),
)


def newton(x: Any) -> Any:
    return lax.while_loop(lambda y: abs(y * y - x) > 1e-5, lambda y: (y + x / y) / 2, x)


@custom_gradient
def square_root(x: Any) -> Any:
    y = newton(x)
    return y, lambda dy: 7 * dy / y  # its own output: the derivative is the declared one


def twice(root: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @custom_gradient
    def f(x: Any) -> Any:
        root_x = root(x)
        return 2 * root_x, lambda dy: 7 * dy / root_x

    return f


limit(
    "rules that read the result of a loop",
    "A rule may use a number that came out of a `while_loop` or a callback, and that is not `y` "
    "itself. JAX then cannot take `grad` of `grad`: it raises, or, if you put `stop_gradient` "
    "around that number, returns a wrong answer. Let a decorated function return the number.",
    "JAX has no reverse mode of `while_loop`; the function that returns the number has a rule.",
    lambda: jax.grad(jax.grad(twice(newton)))(jnp.float32(4)),
    ValueError,
    "while_loop",
    lambda: jax.grad(jax.grad(twice(square_root)))(jnp.float32(4)),
    jnp.float32(-7 * 7 / 2 / 2**2),  # (7 / y)' = -7 y' / y**2, and y' = 7 / y
)


def of_two_outputs(calls_itself: bool) -> Callable[[Any], Any]:
    @custom_gradient
    def f(x: Any) -> Any:
        y = jnp.round(x)
        return (y, x), lambda dy, dx: 7 * dy * (f(x)[0] if calls_itself else y) + dx

    return lambda x: f(x)[0]


limit(
    "rules that read one of several outputs",
    "If a rule reads `y`, its second derivative is the declared one. Not with several outputs: "
    "there it is that of the function's own operations. Let the rule call the function.",
    "A rule that ignores the upstream of one output would declare that this one has no derivative.",
    lambda: assert_same(jax.grad(jax.grad(of_two_outputs(calls_itself=False)))(X), 7 * 7 * X),
    AssertionError,
    "differ",
    lambda: jax.grad(jax.grad(of_two_outputs(calls_itself=True)))(X),
    7 * 7 * X,
)


SEVEN = functools.partial(jnp.multiply, 7)


def in_a_kernel(f: Callable[[Any], Any]) -> Any:
    def kernel(i: Any, o: Any) -> None:
        o[...] = f(i[...])

    x = jnp.ones((8, 128))
    call = jax.jit(pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype)))
    return call.trace(x).lower(lowering_platforms=("tpu",))


limit(
    "forward mode in kernels",
    "Inside a Pallas kernel, a decorated function gives a value (on GPUs from JAX 0.12) or a "
    "gradient, not both, and no `jvp`. Decorate the function around the kernel.",
    "Forward mode is an operation of its own, and the tables of kernel compilers are not ours.",
    lambda: in_a_kernel(lambda x: jax.jvp(declared_by(SEVEN), (x,), (x,))[1]),
    NotImplementedError,
    "push|attach",
    lambda: bool(in_a_kernel(declared_by(SEVEN))),
    True,
)


def in_a_gpu_kernel(f: Callable[[Any], Sequence[Any]]) -> bool:
    def kernel(i: Any, *os: Any) -> None:
        for o, y in zip(os, f(i[...]), strict=True):
            o[...] = y

    x = jnp.ones((64, 64))
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2
    name = "out_type" if "out_type" in inspect.signature(plgpu.kernel).parameters else "out_shape"
    return "mosaic_gpu" in lowered_for_gpu(plgpu.kernel(kernel, **{name: types}), x)


def rule_in_a_kernel(x: Any) -> Sequence[Any]:
    y, grad_fn = declared_by(SEVEN).__wrapped__(x)
    return y, grad_fn(y)


limit(
    "gradients in Mosaic GPU kernels",
    "In a kernel of Pallas' Mosaic GPU backend (`plgpu.kernel`), a decorated function gives a "
    "value (from JAX 0.12), and no gradient. Run the rule there: `y, grad = h.__wrapped__(x)`.",
    "JAX keeps the value beside the gradient there, with the operation that carries its rule to "
    "the next derivative, and the tables of kernel compilers are not ours.",
    lambda: in_a_gpu_kernel(lambda x: [jax.grad(lambda x: declared_by(SEVEN)(x).sum())(x)] * 2),
    NotImplementedError,
    "attach",
    lambda: in_a_gpu_kernel(rule_in_a_kernel),
    True,
)


def pushed_by_the_fuser(h: Callable[[Any], Any]) -> Any:
    spec = pl.BlockSpec((8, 128), lambda i, j: (i, j))
    return fuser.push_block_spec(h, spec)(jnp.ones((16, 256))).block_shape


limit(
    "the fuser",
    "`push_block_spec` of Pallas' fuser raises for a decorated function; `pull_block_spec` and "
    "`fuse` accept it. Push through the function below the decorator: "
    "`lambda x: h.__wrapped__(x)[0]`.",
    "The fuser cannot push through the bit cast that keeps JAX from transposing the operations.",
    lambda: pushed_by_the_fuser(declared_by(SEVEN)),
    NotImplementedError,
    "$",
    lambda: pushed_by_the_fuser(lambda x: declared_by(SEVEN).__wrapped__(x)[0]),
    (8, 128),
    applies=lambda: not drops_in_scan(),  # before, the custom_vjp needs no bit cast
)


# --- values ---------------------------------------------------------------------------------------


@custom_gradient
def branching(x: Any) -> Any:
    return (x * 1.0, lambda dy: 7 * dy) if x > 0 else (-x, lambda dy: -5 * dy)


limit(
    "branches under jit",
    "`if x > 0` works where a function sees values. Under `jit`, `vmap` and `scan` it raises JAX's "
    "error: use `jnp.where`.",
    "Under `jit` nothing has a value; `lax.cond` and `jnp.where` branch there.",
    lambda: jax.jit(jax.grad(branching))(X),
    jax.errors.TracerBoolConversionError,
    "boolean conversion of traced array",
    lambda: jax.grad(branching)(X),
    jnp.float32(7),
)


class Changed:
    scale = 3.0

    def times(self, local: bool) -> Callable[[Any], Any]:
        @custom_gradient
        def f(x: Any) -> Any:
            scale = self.scale
            return scale * x, lambda dy: 7 * dy * (scale if local else self.scale)

        return f


def of_a_changed(local: bool) -> Any:
    changed = Changed()

    def loss(x: Any) -> Any:
        y = changed.times(local)(x)
        changed.scale = 5.0  # after the call, and before the rule runs
        return y

    return jax.grad(loss)(X)


limit(
    "objects that change",
    "A rule that reads an object reads its state at the time of the backward pass. If the object "
    "may change before that, read what the rule needs into a local variable of the function.",
    "JAX's functions are pure; a rule reads an object when it runs, as in TensorFlow.",
    lambda: assert_same(of_a_changed(local=False), jnp.float32(7 * 3)),
    AssertionError,
    "35",  # 7 * 5
    lambda: of_a_changed(local=True),
    jnp.float32(7 * 3),
)


@custom_gradient
def pair(x: Any, y: Any) -> Any:
    return (x * 1.0, y * 1.0), lambda dx, dy: (7 * dx, 5 * dy)


limit(
    "outputs that ignore what is mapped",
    "Under `jit`, `vmap` maps each output of a decorated function that has a mapped input, even "
    "one that ignores it: `out_axes=None` raises. Map the output, and take `[0]`.",
    "What is staged may be differentiated under the vmap, where the rule may use what is mapped.",
    lambda: jax.jit(jax.vmap(pair, (None, 0), (None, 0)))(B, B),
    ValueError,
    "at vmap out_axes",
    lambda: jax.jit(lambda x, y: jax.vmap(pair, (None, 0))(x, y)[0][0])(B, B),
    B,
)


# --- what JAX itself refuses ----------------------------------------------------------------------


def leaves_a_penalty(x: Any) -> Any:
    penalty = jnp.zeros_like(x)

    @custom_gradient
    def f(x: Any) -> Any:
        nonlocal penalty
        penalty = x**2
        return 2 * x, lambda dy: 7 * dy

    return f(x) + penalty


def returns_a_penalty(x: Any) -> Any:
    f = custom_gradient(lambda x: ((2 * x, x**2), lambda dy, dpenalty: 7 * dy + dpenalty * 2 * x))
    return sum(f(x))


limit(
    "memos that a function fills",
    "What a function computes from a weight and leaves in an object or a variable can be used by "
    "decorated functions of the same derivative alone, and raises elsewhere. Fill it before the "
    "derivative is taken, or return it as a part of `y`.",
    "JAX attaches the derivative to what the function returns; as a constant it would be lost.",
    lambda: jax.grad(leaves_a_penalty)(X),
    jax.errors.UnexpectedTracerError,
    "is left in an object",
    lambda: jax.grad(returns_a_penalty)(X),
    7 + 2 * X,
)


def tangent_with_a_memo(fills_in_the_rule: bool) -> Any:
    """Return `jvp` of `f(x) + x**2`; the square is a memo of the rule, or computed beside it."""

    def loss(x: Any) -> Any:
        memo: dict[str, Any] = {}

        @custom_gradient
        def f(x: Any) -> Any:
            def rule(dy: Any) -> Any:
                memo["square"] = x**2
                return 7 * dy

            return 2 * x, rule

        y = f(x)
        return y + (memo["square"] if fills_in_the_rule else x**2)

    return jax.jvp(loss, (X,), (1.0,))[1]


limit(
    "memos that a rule fills",
    "`jvp` runs a rule at once, so what the rule leaves in a dictionary or a variable can be read "
    "there: it has its value but no derivative, without an error. Do not read it in the "
    "differentiated function.",
    "The rule runs on plain values; its result is not seen until it is read.",
    lambda: assert_same(tangent_with_a_memo(True), 7 + 2 * X),
    AssertionError,
    "differ",
    lambda: tangent_with_a_memo(False),
    7 + 2 * X,
)


def of_an_item(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def loss(w: Any) -> Any:
        @custom_gradient(variables="autodiff")
        def f(x: Any) -> Any:
            return read(w) * x, lambda dy: 7 * dy

        return f(X)

    return loss


limit(
    "numbers out of a weight",
    "`w.item()` of a weight is a number without a derivative: its gradient is 0, without an error. "
    "Write `w`.",
    "JAX itself gives the number, with or without a custom gradient.",
    lambda: assert_same(jax.grad(of_an_item(lambda w: w.item()))(X), X),
    AssertionError,
    "differ",
    lambda: jax.grad(of_an_item(lambda w: w))(X),
    X,
)


def in_scan(x: Any) -> Any:
    def outer(x: Any) -> Any:
        y = custom_gradient(lambda x: (jnp.exp(x), lambda dy: 7 * dy * x))(x)
        return 2 * y, lambda dy: 3 * dy * y  # not its own output, which has the rule in any case

    return lax.scan(lambda s, x: (s + custom_gradient(outer)(x), None), 0 * x, x[None])[0]


DROPPED_IN_SCAN = limit(
    "orders of a scan",
    "Before JAX 0.12, `jvp` of `grad` of a `scan` may fail if a decorated function in the `scan` "
    "calls another. Use `grad` of `grad`.",
    "JAX drops the custom_jvp of such calls there, with those written by hand; reverse mode keeps "
    "the rule, by the custom_vjp below it.",
    lambda: jax.jvp(jax.grad(in_scan), (X,), (X,)),
    TypeError,
    "custom_vjp function",
    lambda: jax.grad(jax.grad(in_scan))(X),
    3 * 7 * X,
    applies=drops_in_scan,
)


def of_a_stopped_weight(w: Any, **options: Any) -> Any:
    stopped = lax.stop_gradient(w)

    @custom_gradient(**options)
    def f(x: Any) -> Any:
        def rule(dy: Any, variables: Any) -> Any:
            known = (stopped, 3 * dy), (w, 5 * dy)
            return 0 * dy, [next(g for v, g in known if v is given) for given in variables]

        return w * stopped * x, (lambda dy, variables: (0 * dy, [5 * dy])) if options else rule

    return f(X)


limit(
    "variables by identity",
    "Without `jit`, `lax.stop_gradient(w)` may be `w` itself, and two weights may be one array, so "
    "a rule that identifies its `variables` by `is` cannot tell them apart. Declare the variables.",
    "To JAX an array is its value: operations may return their operand.",
    lambda: assert_same(*(f(jax.grad(of_a_stopped_weight))(X) for f in (lambda f: f, jax.jit))),
    AssertionError,
    "5",  # under `jit`, and 3 without
    lambda: jax.grad(lambda w: of_a_stopped_weight(w, variables=[w]))(X),
    jnp.float32(5),
)


class Power:
    """The exponential of `w x`, whose rule calls it, or reads its value."""

    def __init__(self, w: Any, reads_y: bool) -> None:
        self.w, self.reads_y = w, reads_y

    @custom_gradient(variables=lambda self: self.w)
    def __call__(self, x: Any) -> Any:
        y = jnp.exp(self.w * x)

        def rule(dy: Any, variables: Any) -> Any:
            dz = dy * (y if self.reads_y else self(x))
            return dz * self.w, dz * x

        return y, rule


def fourth(reads_y: bool) -> Any:
    derivative = functools.reduce(
        lambda f, _: jax.grad(f), range(4), lambda w: Power(w, reads_y)(X)
    )
    return derivative(jnp.float32(0.5))


limit(
    "rules of methods that call themselves",
    "A rule that reaches its weight through an object, as a method does, and calls its own "
    "function raises from the fourth derivative on. Let it read `y`.",
    "Within derivatives such a rule is recorded, and to record it again has no end.",
    lambda: fourth(reads_y=False),
    RecursionError,
    "calls the function itself|recursion depth",
    lambda: fourth(reads_y=True),
    16 * jnp.exp(jnp.float32(1)),
)


def through_an_object(w: Any, local: bool) -> Callable[[Any], Any]:
    held = types.SimpleNamespace(w=w)

    @custom_gradient(variables=w)
    def f(x: Any) -> Any:
        read = (lambda: w) if local else (lambda: held.w)
        return w * x, lambda dy, variables: ((7 * dy if dy > 0 else dy) * read(), 5 * dy * x)

    return f


def looking_for_leaks(local: bool) -> Any:
    with jax.checking_leaks():
        return jax.grad(lambda w, x: through_an_object(w, local)(x), (0, 1))(jnp.float32(3), X)


limit(
    "rules that are recorded",
    "Under `jax.checking_leaks`, a rule that reads its weight through an object, as a method does, "
    "sees no values. Let it read a variable, `w = self.w` in the function.",
    "Without it such a rule reads the tracer itself in the backward pass, which JAX calls a leak.",
    lambda: looking_for_leaks(local=False),
    jax.errors.TracerBoolConversionError,
    "boolean conversion of traced array",
    lambda: looking_for_leaks(local=True),
    (5 * X, jnp.float32(7 * 3)),
)


def rebound_behind(objects: int, bound: bool) -> Any:
    def loss(x: Any) -> Any:
        scale = 3.0
        helper = (lambda dy, scale=scale: scale * dy) if bound else (lambda dy: scale * dy)
        kept = types.SimpleNamespace(helpers=[*(object() for _ in range(objects)), helper])
        y = custom_gradient(lambda x: (3 * x, lambda dy: 7 * kept.helpers[-1](dy)))(x)
        scale = 5.0
        return y

    return jax.grad(loss)(X)


limit(
    "functions behind many objects",
    "If a variable of a function that a rule reaches through an object has changed since, the "
    "rule raises; not beyond 1,000 objects, where it sees the new value. Bind the value where the "
    "function is made, `lambda x, scale=scale: ...`.",
    "Each gradient would look through all of them.",
    lambda: assert_same(rebound_behind(2000, bound=False), jnp.float32(21)),
    AssertionError,
    "35",  # 7 * 5
    lambda: rebound_behind(2000, bound=True),
    jnp.float32(21),
)


def of_a_ref(captured: bool) -> Callable[[Any], Any]:
    def f(r: Any, x: Any) -> Any:
        kept = r[...]
        return kept * x, lambda dy: (None, 7 * dy * kept)

    def loss(x: Any) -> Any:
        r = jax.new_ref(jnp.float32(3))
        return custom_gradient(lambda x: f(r, x))(x) if captured else custom_gradient(f)(r, x)

    return loss


limit(
    "captured Refs",
    "A `Ref` that is created inside the differentiated function must be an argument of each "
    "decorated function that reads it, or one of its declared `variables`.",
    "JAX takes every such Ref for differentiated, whatever it holds.",
    lambda: jax.grad(of_a_ref(captured=True))(X),
    TypeError,
    "closes over",
    lambda: jax.grad(of_a_ref(captured=False))(X),
    jnp.float32(21),
)


@custom_gradient
def with_own_ref(x: Any) -> Any:
    return jax.freeze(jax.new_ref(x)), lambda dy: 7 * dy


@custom_gradient
def with_given_ref(r: Any, x: Any) -> Any:
    r[...] = x
    return r[...], lambda dy: (None, 7 * dy)


def in_loops(h: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def loop(x: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, h(c[1])), (0, x))[1]

    return lambda x: lax.scan(lambda c, _: (loop(c), None), x, None, length=2)[0]


limit(
    "Refs made under jit",
    "A decorated function that creates a `Ref` raises where its value is traced: by `jit`, `scan` "
    "or `while_loop`. Create the `Ref` outside, and pass it as an argument.",
    "JAX has no rule to remove mutable arrays from a custom_jvp, and no public place for one. It "
    "has one for a custom_vjp, which has no forward mode.",
    lambda: jax.jit(jax.checkpoint(in_loops(custom_gradient(lambda x: (with_own_ref(x), clip)))))(
        X
    ),
    NotImplementedError,
    "state discharge rule",
    lambda: jax.jit(lambda x: with_given_ref(jax.new_ref(jnp.float32(0)), x))(X),
    X,
)


def pulled_back_twice(next_of: Callable[[list[Any]], Callable[[], Any]]) -> Any:
    """Return the gradient by a second run of the rule."""

    @custom_gradient
    def f(x: Any) -> Any:
        scale = next_of([3.0])
        return x * 1.0, lambda dy: 7 * dy * scale()

    _, pull = jax.vjp(f, X)
    pull(jnp.float32(1))
    return pull(jnp.float32(1))[0]


limit(
    "rules that use up what is read",
    "A rule that pops a list, advances an iterator or writes to a NumPy array, which its function "
    "has made, finds it so when it runs again for the same run of the function: in a second "
    "pull-back, or in another mode of a jitted function. Make it in the rule.",
    "They are the user's own objects, and nothing of the user's is copied.",
    lambda: assert_same(pulled_back_twice(lambda k: k[::-1].pop), 21.0),
    IndexError,
    "pop from empty list",
    lambda: pulled_back_twice(lambda k: lambda: k[::-1].pop()),
    jnp.float32(21),
)


def undeclared_in_a_kernel(declare: bool) -> Any:
    def f(x: Any) -> Any:
        w = x * 3.0
        h = lambda x: (w * x, lambda dy, variables: (7 * dy, [5 * dy * x]))  # noqa: E731
        return custom_gradient(h, variables=[w] if declare else None)(x)

    kernel = pl.pallas_call(
        lambda i, o: o.__setitem__(..., f(i[...])), jax.ShapeDtypeStruct((8, 128), jnp.float32)
    )
    x = jnp.ones((8, 128), jnp.float32)
    return bool(jax.jit(kernel).trace(x).lower(lowering_platforms=("tpu",)))


def forward_pass(decorate: Callable[..., Any]) -> list[str]:
    """Return which of `f` and its `primal` the first pass of a derivative runs."""
    runs: list[str] = []

    def noted(name: str, x: Any) -> Any:
        jax.debug.callback(lambda _: runs.append(name), x)
        return jnp.sin(x)

    def primal(x: Any) -> Any:
        return noted("primal", x)

    h = custom_gradient(lambda x: (noted("f", x), lambda dy: 7 * dy), primal=primal)
    jax.block_until_ready(jax.vjp(decorate(h, primal), X)[0])
    jax.effects_barrier()
    return runs


def recomputed(h: Callable[[Any], Any], primal: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return custom_gradient(lambda x: (primal(x), lambda dy: jax.vjp(h, x)[1](dy)[0]))


def assert_primal_runs(decorate: Callable[..., Any]) -> bool:
    assert forward_pass(decorate) == ["primal"], "f runs"
    return True


limit(
    "primal under checkpoint",
    "Under `jax.checkpoint`, `f` runs in both passes, not `primal`. Let the rule recompute: "
    "`lambda x: (primal(x), lambda dy: jax.vjp(h, x)[1](dy)[0])`, decorated, keeps only `x`.",
    "JAX differentiates what it checkpoints before it divides it into passes, and so it runs the "
    "forward function of a custom_vjp in both, too.",
    lambda: assert_primal_runs(lambda h, _: jax.checkpoint(h)),
    AssertionError,
    "f runs",
    lambda: assert_primal_runs(recomputed),
    True,
)


limit(
    "undeclared variables in kernels",
    "In a Pallas kernel for TPUs, declare the closed-over weights of a decorated function: "
    "`custom_gradient(variables=...)`.",
    "Undeclared ones need JAX's symbolic zeros, which Mosaic does not lower.",
    lambda: undeclared_in_a_kernel(declare=False),
    NotImplementedError,
    "$",
    lambda: undeclared_in_a_kernel(declare=True),
    True,
)


@custom_gradient
def choosing(x: Any) -> Any:
    return jnp.where(x > 0, x, -x), lambda dy: jnp.where(x > 0, 7 * dy, -5 * dy)


limit(
    "JAX's new custom derivatives",
    "With both of JAX's flags `jax_custom_vjp3` and `jax_custom_jvp3`, a function that is being "
    "differentiated sees no values. Use `jnp.where` instead of `if`.",
    "The new custom derivatives stage the functions that they are given.",
    lambda: jax.grad(branching)(X),
    jax.errors.TracerBoolConversionError,
    "boolean conversion of traced array",
    lambda: jax.grad(choosing)(X),
    jnp.float32(7),
    applies=lambda: all(
        getattr(jax.config, f"jax_custom_{mode}3", False) for mode in ("jvp", "vjp")
    ),
)


def sines(f: Callable[[Any], Any]) -> int:
    """Return how often a checkpoint that saves the name "s" computes a sine, in both passes."""
    policy = jax.checkpoint_policies.save_only_these_names("s")
    kept = jax.checkpoint(f, policy=policy)
    return str(jax.make_jaxpr(lambda x: jax.vjp(kept, x)[1](x))(X)).count("= sin ")


@custom_gradient
def naming(x: Any) -> Any:
    s = checkpoint_name(jnp.sin(x), "s")
    return s * 1.0, lambda dy: 7 * dy * s


@custom_gradient
def named(x: Any, s: Any) -> Any:
    return s * 1.0, lambda dy: (7 * dy * s, None)


limit(
    "names in a checkpoint",
    "With JAX's flag `jax_remat3`, a policy of `jax.checkpoint` does not save what a decorated "
    "function names by `checkpoint_name`. Name the value outside, and pass it as an argument.",
    "The new checkpoint recomputes what a custom derivative keeps; a hand-written custom_vjp, too.",
    lambda: assert_same(sines(naming), 1),
    AssertionError,
    "2",
    lambda: sines(lambda x: named(x, checkpoint_name(jnp.sin(x), "s"))),
    1,
    applies=lambda: getattr(jax.config, "jax_remat3", False),
)


GROUPS = {  # on the page of limits
    "Forward mode and transposes": (
        "rules that are not linear",
        "rules that JAX cannot transpose",
        "upstreams in a Ref",
        "gmres in a rule",
        "sparse matrices under vmap",
        "operators that are not linear",
        "operators and unused outputs",
        "linear_transpose",
        "rules that read the result of a loop",
        "rules that read one of several outputs",
    ),
    "Weights and state": (
        "objects that change",
        "memos that a function fills",
        "memos that a rule fills",
        "numbers out of a weight",
        "rules that use up what is read",
        "variables by identity",
        "captured Refs",
        "Refs made under jit",
        "rules of methods that call themselves",
        "rules that are recorded",
        "functions behind many objects",
    ),
    "Transformations": (
        "branches under jit",
        "outputs that ignore what is mapped",
        "orders of a scan",
        "primal under checkpoint",
    ),
    "Kernels": (
        "forward mode in kernels",
        "gradients in Mosaic GPU kernels",
        "the fuser",
        "undeclared variables in kernels",
    ),
    "JAX's experimental flags": ("JAX's new custom derivatives", "names in a checkpoint"),
}


if __name__ == "__main__":
    print(rendered())
