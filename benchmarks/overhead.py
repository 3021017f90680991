"""What the decorator itself costs: tiny functions, where nothing else takes time.

Each case is one function in every way that JAX offers to declare its gradient. All of them
compute the same numbers (checked before anything is timed), and where a peer cannot express the
case, its row says why. A peer that cannot close over values is given them as arguments.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.results import (
    EQUINOX,
    HAND,
    HAND_EVERY_ORDER,
    HAND_JVP,
    JAX_CUSTOM_GRADIENT,
    NNX,
    OURS,
    UNDECORATED,
    Group,
)
from benchmarks.settings import Settings, Task
from benchmarks.timing import Timed, compare
from tfgrad_jax import custom_gradient

SECTION = "overhead"
MEASURES = ("eager forward", "eager grad", "jitted grad", "trace", "lower + compile")

Function = Callable[..., Any]


class Case(NamedTuple):
    args: tuple[Any, ...]
    argnums: tuple[int, ...]
    functions: Mapping[str, Function]
    make: Mapping[str, Callable[[], Function]] = {}  # those that may be impossible to make
    note: str = ""


def tasks(settings: Settings) -> Iterator[Task]:
    for name, case in CASES.items():
        yield Task(SECTION, name, functools.partial(measure, name, case, settings))


def measure(name: str, build: Callable[[], Case], settings: Settings) -> list[Group]:
    """Time one case in each way of calling it."""
    case = build()
    functions = dict(case.functions)
    failures = {}
    for peer, make in case.make.items():
        try:
            functions[peer] = make()
            jax.grad(functions[peer], case.argnums)(*case.args)
        except Exception as error:
            functions.pop(peer, None)
            failures[peer] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
    check(case, functions)

    def calls(kind: str, f: Function) -> Timed | Function:
        args, grad = case.args, jax.grad(f, case.argnums)

        def traced() -> Any:
            return jax.jit(lambda *a: jax.grad(f, case.argnums)(*a)).trace(*args)

        if kind == "eager forward":
            return lambda: f(*args)
        if kind == "eager grad":
            return lambda: grad(*args)
        if kind == "jitted grad":
            compiled = jax.jit(grad)
            return lambda: compiled(*args)
        if kind == "trace":
            return traced
        return Timed(lambda t: t.lower().compile(), traced)

    groups = []
    measures = list(MEASURES)
    if name == "forward mode":
        measures += ["eager jvp", "trace of jvp"]
    for kind in measures:
        if kind.endswith("jvp"):
            contestants = {
                key: _pushed(kind, f, case)
                for key, f in functions.items()
                if key in (UNDECORATED, HAND_JVP, OURS)
            }
        else:
            contestants = {key: calls(kind, f) for key, f in functions.items()}
        seconds = 3 if kind == "lower + compile" else 1
        measured = compare(contestants, OURS, seconds * settings.scale, settings.rounds)
        measured.failures.update(failures)
        groups.append(Group.timed(SECTION, name, kind, measured, case.note))
    return groups


def _pushed(kind: str, f: Function, case: Case) -> Function:
    def jvp(*primals: Any) -> Any:
        return jax.jvp(f, primals, primals)

    if kind == "eager jvp":
        return lambda: jvp(*case.args)
    return lambda: jax.jit(lambda *a: jvp(*a)).trace(*case.args)


def check(case: Case, functions: Mapping[str, Function]) -> None:
    """Raise unless all contestants have one value and one gradient."""
    expected = jax.value_and_grad(functions[UNDECORATED], case.argnums)(*case.args)
    for name, f in functions.items():
        got = jax.value_and_grad(f, case.argnums)(*case.args)
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, err_msg=name)


# --- one rule, in every way there is to declare it ------------------------------------------------


def hand_written(forward: Function, backward: Function, statics: tuple[int, ...] = ()) -> Function:
    """Return a `custom_vjp`; `forward` returns the value and the residuals."""
    h = jax.custom_vjp(lambda *args: forward(*args)[0], nondiff_argnums=statics)
    h.defvjp(forward, backward)
    return h


def every_order(forward: Function, backward: Function, statics: tuple[int, ...] = ()) -> Function:
    """Return a `custom_vjp` whose second derivative is right: its forward rule calls itself."""
    h = jax.custom_vjp(lambda *args: forward(*args)[0], nondiff_argnums=statics)
    h.defvjp(lambda *args: (h(*args), forward(*args)[1]), backward)
    return h


def equinox_vjp(forward: Function, backward: Function) -> Function:
    """Return an `equinox.filter_custom_vjp` of a function of one pytree and static values."""
    import equinox

    h = equinox.filter_custom_vjp(lambda args, *statics: forward(*args, *statics)[0])
    h.def_fwd(lambda perturbed, args, *statics: forward(*args, *statics))
    h.def_bwd(lambda residuals, dy, perturbed, args, *statics: backward(*statics, residuals, dy))
    return h


def nnx_vjp(forward: Function, backward: Function, statics: tuple[int, ...] = ()) -> Function:
    from flax import nnx

    h = nnx.custom_vjp(lambda *args: forward(*args)[0], nondiff_argnums=statics)

    def pull_back(*args: Any) -> Any:
        *before, (_, dy) = args  # what a graph node would be updated by, and the upstream
        return backward(*before, dy)

    h.defvjp(forward, pull_back)
    return h


# --- log1pexp: inputs only ------------------------------------------------------------------------


def _log1pexp(x: Any) -> tuple[Any, Any]:
    e = jnp.exp(x)
    return jnp.log(1 + e), e


def _log1pexp_backward(e: Any, dy: Any) -> tuple[Any]:
    return (dy * (1 - 1 / (1 + e)),)


def log1pexp_with_rule(x: Any) -> Any:
    e = jnp.exp(x)
    return jnp.log(1 + e), lambda dy: dy * (1 - 1 / (1 + e))


def inputs_only() -> Case:
    def for_equinox() -> Function:
        h = equinox_vjp(_log1pexp, lambda e, dy: _log1pexp_backward(e, dy))
        return lambda x: h((x,))

    return Case(
        (jnp.float32(1.5),),
        (0,),
        {
            UNDECORATED: lambda x: jnp.log(1 + jnp.exp(x)),
            HAND: hand_written(_log1pexp, _log1pexp_backward),
            HAND_EVERY_ORDER: every_order(_log1pexp, _log1pexp_backward),
            OURS: custom_gradient(log1pexp_with_rule),
        },
        {
            JAX_CUSTOM_GRADIENT: lambda: jax.custom_gradient(log1pexp_with_rule),
            EQUINOX: for_equinox,
            NNX: lambda: nnx_vjp(_log1pexp, _log1pexp_backward),
        },
    )


def forward_mode() -> Case:
    by_jvp = jax.custom_jvp(lambda x: jnp.log(1 + jnp.exp(x)))
    by_jvp.defjvp(lambda p, t: (by_jvp(*p), t[0] * (1 - 1 / (1 + jnp.exp(p[0])))))
    return Case(
        (jnp.float32(1.5),),
        (0,),
        {
            UNDECORATED: lambda x: jnp.log(1 + jnp.exp(x)),
            HAND: hand_written(_log1pexp, _log1pexp_backward),
            HAND_EVERY_ORDER: every_order(_log1pexp, _log1pexp_backward),
            HAND_JVP: by_jvp,
            OURS: custom_gradient(log1pexp_with_rule, forward_mode=True),
        },
        note="the custom_vjp rows have no forward mode at all",
    )


# --- a linear layer under logsumexp: weights that are closed over ---------------------------------


def _head(w: Any, x: Any) -> tuple[Any, Any]:
    logits = x @ w
    y = jax.nn.logsumexp(logits)
    return y, (w, x, logits, y)


def _head_backward(residuals: Any, dy: Any) -> tuple[Any, Any]:
    w, x, logits, y = residuals
    p = dy * jnp.exp(logits - y)
    return jnp.outer(x, p), w @ p


def _head_with_rule(w: Any, x: Any) -> Any:
    y, residuals = _head(w, x)
    return y, lambda dy: _head_backward(residuals, dy)


def _weights() -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (8, 8)), jax.random.normal(keys[1], (8,))


def _closed_over(ours: Function) -> Case:
    def for_equinox() -> Function:
        h = equinox_vjp(_head, _head_backward)
        return lambda w, x: h((w, x))

    return Case(
        _weights(),
        (0, 1),
        {
            UNDECORATED: lambda w, x: _head(w, x)[0],
            HAND: hand_written(_head, _head_backward),
            HAND_EVERY_ORDER: every_order(_head, _head_backward),
            OURS: ours,
        },
        {
            JAX_CUSTOM_GRADIENT: lambda: jax.custom_gradient(_head_with_rule),
            EQUINOX: for_equinox,
            NNX: lambda: nnx_vjp(_head, _head_backward),
        },
        note="the others cannot close over weights: they are given them as arguments",
    )


def closed_over() -> Case:
    def ours(w: Any, x: Any) -> Any:
        @custom_gradient
        def head(x: Any) -> Any:
            y, residuals = _head(w, x)

            def grad(dy: Any, variables: Any) -> Any:
                dw, dx = _head_backward(residuals, dy)
                return dx, [dw]

            return y, grad

        return head(x)

    return _closed_over(ours)


def declared() -> Case:
    def ours(w: Any, x: Any) -> Any:
        @custom_gradient(variables=w)
        def head(x: Any) -> Any:
            y, residuals = _head(w, x)

            def grad(dy: Any, variables: Any) -> Any:
                dw, dx = _head_backward(residuals, dy)
                return dx, dw

            return y, grad

        return head(x)

    return _closed_over(ours)


class _Head:
    """A layer with its weights, which are no inputs of its method."""

    def __init__(self, w: Any) -> None:
        self.w = w

    @custom_gradient(variables=lambda self: self.w)
    def __call__(self, x: Any) -> Any:
        y, residuals = _head(self.w, x)

        def grad(dy: Any, variables: Any) -> Any:
            dw, dx = _head_backward(residuals, dy)
            return dx, dw

        return y, grad


def method() -> Case:
    return _closed_over(lambda w, x: _Head(w)(x))


# --- three static arguments -----------------------------------------------------------------------


def _static(x: Any, kind: str, stable: bool, order: int) -> tuple[Any, Any]:
    y = jnp.tanh(x) if kind == "tanh" and stable else x
    return y**order, (y,)


def _static_backward(kind: str, stable: bool, order: int, residuals: Any, dy: Any) -> tuple[Any]:
    (y,) = residuals
    return (dy * order * y ** (order - 1) * (1 - y * y),)


def _static_with_rule(x: Any, kind: str, stable: bool, order: int) -> Any:
    y, residuals = _static(x, kind, stable, order)
    return y, lambda dy: _static_backward(kind, stable, order, residuals, dy)


def three_statics() -> Case:
    statics = ("tanh", True, 2)

    def given(h: Function) -> Function:
        return lambda x: h(x, *statics)

    def for_equinox() -> Function:
        h = equinox_vjp(_static, _static_backward)
        return lambda x: h((x,), *statics)

    return Case(
        (jnp.float32(0.7),),
        (0,),
        {
            UNDECORATED: lambda x: _static(x, *statics)[0],
            HAND: given(hand_written(_static, _static_backward, (1, 2, 3))),
            HAND_EVERY_ORDER: given(every_order(_static, _static_backward, (1, 2, 3))),
            OURS: given(custom_gradient(_static_with_rule)),
        },
        {
            JAX_CUSTOM_GRADIENT: lambda: given(jax.custom_gradient(_static_with_rule)),
            EQUINOX: for_equinox,
            NNX: lambda: given(nnx_vjp(_static, _static_backward, (1, 2, 3))),
        },
    )


CASES: dict[str, Callable[[], Case]] = {
    "inputs only": inputs_only,
    "closed-over weights": closed_over,
    "declared variables": declared,
    "forward mode": forward_mode,
    "method": method,
    "3 static arguments": three_statics,
}
