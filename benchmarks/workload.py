"""One way to declare a workload with its contestants; every measurement follows from it.

A `Rule` is a function with its gradient. A `Way` writes a rule as a function that JAX can
differentiate: plainly, by hand, with ours, with the others. A `Workload` is a function of a way,
with arguments for each size. What it measures is named by how and what: "eager grad",
"trace hessian", "run grad", "program jvp".
"""

import dataclasses
import functools
import math
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import machine
from benchmarks.results import OURS, Group
from benchmarks.timing import Settings, Timed, compare, reason
from tfgrad_jax import custom_gradient

PLAIN = "plain JAX"
CHECKPOINT = "jax.checkpoint"
HAND = "hand-written"
EVERY = "hand-written, every order"
JVP = "hand-written custom_jvp"
TRANSPOSED = "custom_jvp that transposes"
JAX = "jax.custom_gradient"
EQUINOX = "equinox.filter_custom_vjp"
NNX = "flax.nnx.custom_vjp"
REFERENCE = {"forward": HAND, "grad": HAND, "second order": EVERY, "jvp": JVP, "hessian": JVP}
COUNTS = {"flops": "flops", "bytes accessed": "bytes", "temp memory": "bytes"}
# Compiles in half the time on a CPU, to machine code that is slow: the program and its counts are
# the same.
UNOPTIMIZED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
TOLERANCE = 1e-9  # in float64, relative to the largest entry

Function = Callable[..., Any]


# --- a rule, and the ways to write it -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rule:
    """A function with its gradient."""

    forward: Function  # (*args) -> (y, residuals)
    backward: Function  # (residuals, dy, *statics) -> a gradient for each argument
    plain: Function | None = None  # for plain autodiff; without it the value of `forward`
    residuals: Function | None = None  # (y, *args) -> residuals, for who knows `y` already
    push: Function | None = None  # (primals, tangents) -> (y, its tangent)
    captured: int = 0  # ours closes over so many arguments, the first ones,
    how: str = "declared"  # which are "declared", "undeclared" or those of a "method"
    statics: int = 0  # so many arguments, the last ones, are Python values
    many: bool = False  # `y` is a list or a tuple
    written: Mapping[str, Function] = dataclasses.field(default_factory=dict)  # ways written out

    def value(self, *args: Any) -> Any:
        return (self.plain or (lambda *args: self.forward(*args)[0]))(*args)

    def pair(self, *args: Any) -> Any:
        """Return the value and the gradient function, as `tf.custom_gradient` takes them."""
        y, residuals = self.forward(*args)
        statics = args[len(args) - self.statics :]
        return y, lambda *dys: self.backward(residuals, dys if self.many else dys[0], *statics)


def _custom_vjp(rule: Rule, forward: Callable[[Function], Function]) -> Function:
    count = rule.forward.__code__.co_argcount
    statics = tuple(range(count - rule.statics, count))
    h = jax.custom_vjp(lambda *args: rule.forward(*args)[0], nondiff_argnums=statics)
    h.defvjp(forward(h), lambda *given: rule.backward(*given[-2:], *given[:-2]))
    return h


def by_hand(rule: Rule) -> Function:
    """Return a `custom_vjp`; its second derivative is JAX's derivative of its forward rule."""
    return _custom_vjp(rule, lambda h: rule.forward)


def every_order(rule: Rule) -> Function:
    """Return a `custom_vjp` whose second derivative is right: its forward rule calls itself."""
    residuals = rule.residuals or (lambda y, *args: rule.forward(*args)[1])

    def forward(h: Function) -> Function:
        def rule_forward(*args: Any) -> Any:
            y = h(*args)
            return y, residuals(y, *args)

        return rule_forward

    return _custom_vjp(rule, forward)


def by_jvp(rule: Rule) -> Function:
    """Return a `custom_jvp`; where the rule has no `push`, the backward pass is transposed."""
    h = jax.custom_jvp(lambda *args: rule.forward(*args)[0])

    @h.defjvp
    def _push(primals: Any, tangents: Any) -> Any:
        if rule.push:
            return rule.push(primals, tangents)
        y, residuals = rule.forward(*primals)
        moved = [i for i, t in enumerate(tangents) if jnp.result_type(t) != jax.dtypes.float0]

        def pull(dy: Any) -> Any:
            gradients = rule.backward(residuals, dy)
            return [gradients[i] for i in moved]

        # Linearized first, because JAX transposes a loop only without what does not depend on dy.
        linear = jax.linearize(pull, jax.tree.map(jnp.zeros_like, y))[1]
        (tangent,) = jax.linear_transpose(linear, y)([tangents[i] for i in moved])
        return y, tangent

    return h


def by_equinox(rule: Rule) -> Function:
    import equinox

    def split(args: tuple[Any, ...]) -> tuple[Any, ...]:
        n = len(args) - rule.statics
        return args[:n], *args[n:]

    h = equinox.filter_custom_vjp(lambda args, *statics: rule.forward(*args, *statics)[0])
    h.def_fwd(lambda perturbed, args, *statics: rule.forward(*args, *statics))
    h.def_bwd(lambda residuals, dy, perturbed, args, *s: rule.backward(residuals, dy, *s))
    return lambda *args: h(*split(args))


def by_nnx(rule: Rule) -> Function:
    from flax import nnx

    count = rule.forward.__code__.co_argcount
    statics = tuple(range(count - rule.statics, count))
    h = nnx.custom_vjp(lambda *args: rule.forward(*args)[0], nondiff_argnums=statics)

    def pull(*given: Any) -> Any:
        *statics, residuals, (_, dy) = given  # what a graph node would be updated by, and dy
        return rule.backward(residuals, dy, *statics)

    h.defvjp(rule.forward, pull)
    return h


def ours(rule: Rule) -> Function:
    """Return the rule under `custom_gradient`, which closes over what the rule captures."""
    if not rule.captured:
        return custom_gradient(rule.pair)
    if rule.how == "method":
        return lambda *args: _Layer(rule, args[: rule.captured])(*args[rule.captured :])

    def closing(*args: Any) -> Any:
        weights, inputs = args[: rule.captured], args[rule.captured :]

        @custom_gradient(variables=weights if rule.how == "declared" else None)
        def h(*inputs: Any) -> Any:
            y, pull = rule.pair(*weights, *inputs)

            def grad(*dys: Any, variables: Any) -> Any:
                gradients = pull(*dys)
                dws = gradients[: rule.captured]
                inputs = gradients[rule.captured :]
                return inputs, dws if rule.how == "declared" else jax.tree.leaves(dws)

            return y, grad

        return h(*inputs)

    return closing


class _Layer:
    """A layer with its weights, which are no inputs of its method."""

    def __init__(self, rule: Rule, weights: tuple[Any, ...]) -> None:
        self.rule, self.weights = rule, weights

    @custom_gradient(variables=lambda self: self.weights)
    def __call__(self, *inputs: Any) -> Any:
        y, pull = self.rule.pair(*self.weights, *inputs)

        def grad(*dys: Any, variables: Any) -> Any:
            gradients, n = pull(*dys), self.rule.captured
            return gradients[n:], gradients[:n]

        return y, grad


WAYS: dict[str, Callable[[Rule], Function]] = {
    PLAIN: lambda rule: rule.value,
    CHECKPOINT: lambda rule: jax.checkpoint(rule.value),
    HAND: by_hand,
    EVERY: every_order,
    JVP: by_jvp,
    TRANSPOSED: lambda rule: by_jvp(dataclasses.replace(rule, push=None)),
    JAX: lambda rule: jax.custom_gradient(rule.pair),
    EQUINOX: by_equinox,
    NNX: by_nnx,
    OURS: ours,
}


class Way(NamedTuple):
    """Write a rule in the way of this name."""

    name: str

    def __call__(self, rule: Rule) -> Function:
        return rule.written.get(self.name) or WAYS.get(self.name, WAYS[PLAIN])(rule)

    @property
    def inner(self) -> "Way":
        """The way for rules inside of `block`."""
        return Way(PLAIN) if self.name == CHECKPOINT else self

    def block(self, f: Function) -> Function:
        """Return a layer, or the body of a loop, as this way has it."""
        return jax.checkpoint(f) if self.name == CHECKPOINT else f


# --- a workload -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    name: str
    loss: Callable[[Way, Any], Function]  # (way, size) -> what is differentiated
    arguments: Callable[[Any, Any], tuple[Any, ...]]  # (size, dtype) -> arguments
    argnums: tuple[int, ...]
    sizes: Mapping[str, list[Any]]  # "toy", "cpu" and "gpu" -> sizes; several show the growth
    measures: tuple[str, ...] = ("run grad", "program grad", "program second order", "program jvp")
    ways: tuple[str, ...] = (PLAIN, CHECKPOINT, HAND, OURS)  # of what is no other derivative
    step: Callable[[Function], Function] | None = None  # loss -> what runs, if not its gradient
    big: bool = False  # on a CPU compiled, but not run
    traffic: Callable[..., float] | None = None  # arguments -> least bytes to read and write
    work: Callable[..., float] | None = None  # arguments -> flops of the matrix products
    note: str = ""

    def contestants(self, mode: str) -> list[str]:
        if mode in ("forward", "grad"):
            return list(self.ways)
        also = [JVP if mode == "second order" else TRANSPOSED] if JVP in self.ways else []
        return [PLAIN, REFERENCE[mode], *also, OURS]

    def function(self, mode: str, way: str, size: Any, step: bool = False) -> Function:
        loss = self.loss(Way(way), size)
        if step and mode == "grad" and self.step is not None:
            return self.step(loss)
        return derivative(mode, loss, self.argnums)

    @functools.cache  # noqa: B019 - a workload lives as long as the process
    def jitted(self, mode: str, way: str, size: Any, fast: bool) -> Function:
        options = UNOPTIMIZED if fast and jax.default_backend() == "cpu" else None
        return jax.jit(self.function(mode, way, size, step=True), compiler_options=options)


def derivative(mode: str, f: Function, argnums: tuple[int, ...]) -> Function:
    gradient = jax.value_and_grad(f, argnums)
    if mode == "forward":
        return f
    if mode == "grad":
        return gradient
    if mode == "hessian":
        return jax.hessian(f, argnums)

    def total(*args: Any) -> Any:
        return sum(jnp.sum(g) for g in jax.tree.leaves(gradient(*args)[1]))

    if mode == "second order":
        return jax.grad(total, argnums)

    def pushed(*args: Any) -> Any:
        def of(*moved: Any) -> Any:
            given = dict(zip(argnums, moved, strict=True))
            return f(*(given.get(i, a) for i, a in enumerate(args)))

        primals = tuple(args[i] for i in argnums)
        return jax.jvp(of, primals, primals)

    return pushed


def normal(seed: int, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype) * jnp.asarray(scale, dtype)


def check(workload: Workload) -> tuple[dict[str, float], dict[tuple[str, str], str]]:
    """Return the largest relative error of each contestant in float64, and who cannot.

    Raise where one is wrong, or where ours has no value or no gradient.
    """
    errors: dict[str, float] = {}
    failures: dict[tuple[str, str], str] = {}
    size = workload.sizes["toy"][-1]
    options = UNOPTIMIZED if jax.default_backend() == "cpu" else None
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        args = workload.arguments(size, jnp.float64)
        for mode in dict.fromkeys(m.partition(" ")[2] for m in workload.measures):
            expected = None
            for way in workload.contestants(mode):
                try:
                    f = jax.jit(workload.function(mode, way, size), compiler_options=options)
                    got = [np.asarray(x) for x in jax.tree.leaves(f(*args))]
                except Exception as error:
                    if way == OURS and mode in ("forward", "grad"):
                        raise
                    failures[mode, way] = reason(error)
                    continue
                expected = expected or got
                error = max(map(_error, got, expected))
                if not error < TOLERANCE:
                    raise AssertionError(f"{workload.name}, {mode}, {way}: error {error:.1e}")
                errors[way] = max(error, errors.get(way, 0.0))
    finally:
        jax.config.update("jax_enable_x64", before)
    return errors, failures


def _error(got: Any, expected: Any) -> float:
    if got.dtype != expected.dtype or got.shape != expected.shape:
        raise AssertionError(f"{got.dtype}{got.shape} instead of {expected.dtype}{expected.shape}")
    return float(np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-30))


def measure(section: str, workload: Workload, settings: Settings) -> list[Group]:
    """Check a workload, then take every measure at every size."""
    errors, failures = check(workload)
    groups = [Group(section, workload.name, "error in float64", "relative", errors)]
    sizes = workload.sizes[settings.size]
    run = functools.partial(_measure, section, workload, settings, failures)
    for what in workload.measures:
        if len(sizes) == 1:
            groups += run(what, sizes[0], what)
            continue
        points: list[Group] = []
        _deep(lambda what=what, points=points: points.extend(
            group for size in sizes for group in run(what, size, f"{what} at {size}")
        ))  # fmt: skip
        groups += [*points, _slope(points, what, sizes)]
    return groups


def _measure(
    section: str, workload: Workload, settings: Settings, failures: Any, what: str, size: Any,
    label: str,
) -> list[Group]:  # fmt: skip
    how, _, mode = what.partition(" ")
    names = [way for way in workload.contestants(mode) if (mode, way) not in failures]
    failed = {way: failures[m, way] for m, way in failures if m == mode}
    if how == "program":
        return _programs(section, workload, size, mode, names, failed)
    if workload.big and settings.size == "cpu":
        return []
    args = workload.arguments(size, jnp.float32)
    toy = settings.size == "toy"
    contestants = {way: _call(how, workload, mode, way, size, toy, args) for way in names}
    heavy = how == "run" or isinstance(size, int)
    seconds = (3 if how in ("run", "compile") else 1) * settings.scale
    rounds = settings.rounds(5, 50) if heavy else settings.rounds()
    measured = compare(contestants, OURS, seconds, rounds)
    measured.failures.update(failed)
    group = Group.timed(section, workload.name, label, measured, workload.note)
    return [group, *_rates(group, workload, args, settings)] if how == "run" else [group]


def _call(
    how: str, workload: Workload, mode: str, way: str, size: Any, toy: bool, args: tuple[Any, ...]
) -> Function | Timed:
    f = workload.function(mode, way, size)

    def traced() -> Any:
        return jax.jit(lambda *a: f(*a)).trace(*args)

    if how == "eager":
        return lambda: f(*args)
    if how == "run":
        compiled = workload.jitted(mode, way, size, fast=toy)
        return lambda: compiled(*args)
    return traced if how == "trace" else Timed(lambda t: t.lower().compile(), traced)


def memory(compiled: Any) -> tuple[float, float]:
    """Return the temporary memory of a program and all that it needs, by the compiler."""
    m = compiled.memory_analysis()
    operands = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    return m.temp_size_in_bytes, m.temp_size_in_bytes + operands


def counts(workload: Workload, way: str, size: Any, mode: str = "grad") -> dict[str, float]:
    """Compile without running and return what the compiler says: exact, the same at every run."""
    args = jax.eval_shape(lambda: workload.arguments(size, jnp.float32))
    compiled = workload.jitted(mode, way, size, fast=True).lower(*args).compile()
    cost = compiled.cost_analysis()
    cost = cost[0] if isinstance(cost, (list, tuple)) else cost
    return {
        "flops": cost.get("flops", 0.0),
        "bytes accessed": cost.get("bytes accessed", 0.0),
        "temp memory": memory(compiled)[0],
    }


def _programs(
    section: str, workload: Workload, size: Any, mode: str, names: list[str], failed: Any
) -> list[Group]:
    found = {}
    for way in names if OURS in names else ():
        found[way] = counts(workload, way, size, mode)
    return [
        Group.counted(
            section, workload.name, f"{what}, {mode}", unit,
            {way: numbers[what] for way, numbers in found.items()}, failures=failed,
        )
        for what, unit in COUNTS.items()
    ]  # fmt: skip


def _rates(
    group: Group, workload: Workload, args: tuple[Any, ...], settings: Settings
) -> list[Group]:
    """Return how near a workload comes to what the machine can do."""
    groups = []
    for what, least, best in (
        ("share of copy bandwidth", workload.traffic, machine.bandwidth),
        ("share of matmul rate", workload.work, machine.product_rate),
    ):
        if least is not None:
            amount, rate = least(*args), best(settings, args[0].dtype)
            share = {way: 100 * amount / t / rate for way, t in group.values.items()}
            note = f"{amount / 1e9:.3g} G at least, of {rate / 1e9:.3g} G a second"
            groups.append(Group(group.section, group.case, what, "%", share, note=note))
    return groups


def _slope(points: list[Group], what: str, sizes: list[int]) -> Group:
    """Return what one more leaf, call, ... costs, between the two largest sizes."""
    (small, large), (m, n) = points[-2:], sizes[-2:]
    slopes = {k: (large.values[k] - small.values[k]) / (n - m) for k in large.values}
    powers = ", ".join(
        f"{k}: {math.log(large.values[k] / small.values[k]) / math.log(n / m):.2f}" for k in slopes
    )
    note = f"from {m} to {n}; exponents of the growth: {powers}"
    group = Group.counted(large.section, large.case, f"{what}, slope", "s", slopes, note=note)
    return dataclasses.replace(group, samples=large.samples)


def _deep(run: Callable[[], None]) -> None:
    """Run where hundreds of nested calls fit: JAX needs several Python frames for each."""
    errors: list[BaseException] = []

    def target() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    limit, size = sys.getrecursionlimit(), threading.stack_size(1 << 29)
    sys.setrecursionlimit(1 << 17)
    try:
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(size)
    if errors:
        raise errors[0]
