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
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import machine
from benchmarks.results import OURS, Group
from benchmarks.timing import SIZES, Call, Settings, compare, reason
from tfgrad_jax import custom_gradient

PLAIN = "plain JAX"
CHECKPOINT = "jax.checkpoint"
BOTH = "tfgrad_jax + jax.checkpoint"
HAND = "hand-written"
EVERY = "hand-written, every order"
JVP = "hand-written custom_jvp"
TRANSPOSED = "custom_jvp that transposes"
JAX = "jax.custom_gradient"
EQUINOX = "equinox.filter_custom_vjp"
NNX = "flax.nnx.custom_vjp"
PEERS = (PLAIN, HAND, EVERY, JAX, EQUINOX, NNX, OURS)
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
    backward: Function  # (residuals, dy) -> a gradient for each argument
    plain: Function | None = None  # for plain autodiff; without it the value of `forward`
    residuals: Function | None = None  # (y, *args) -> residuals, for who knows `y` already
    push: Function | None = None  # (primals, tangents) -> (y, its tangent)
    captured: int = 0  # ours closes over so many arguments, the first ones,
    how: str = "declared"  # which are "declared", "undeclared" or those of a "method"
    many: bool = False  # `y` is a list or a tuple
    written: Mapping[str, Function] = dataclasses.field(default_factory=dict)  # ways written out

    def value(self, *args: Any) -> Any:
        return self.plain(*args) if self.plain else self.forward(*args)[0]

    def pair(self, *args: Any) -> Any:
        """Return the value and the gradient function, as `tf.custom_gradient` takes them."""
        y, residuals = self.forward(*args)
        return y, lambda *dys: self.backward(residuals, dys if self.many else dys[0])


def by_hand(rule: Rule) -> Function:
    """Return a `custom_vjp`; its second derivative is JAX's derivative of its forward rule."""
    h = jax.custom_vjp(lambda *args: rule.forward(*args)[0])
    h.defvjp(rule.forward, rule.backward)
    return h


def every_order(rule: Rule) -> Function:
    """Return a `custom_vjp` whose second derivative is right: its forward rule calls itself."""
    h = jax.custom_vjp(lambda *args: rule.forward(*args)[0])
    residuals = rule.residuals or (lambda y, *args: rule.forward(*args)[1])

    def forward(*args: Any) -> Any:
        y = h(*args)
        return y, residuals(y, *args)

    h.defvjp(forward, rule.backward)
    return h


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
        return y, jax.linear_transpose(linear, y)([tangents[i] for i in moved])[0]

    return h


def by_equinox(rule: Rule) -> Function:
    import equinox

    h = equinox.filter_custom_vjp(lambda args: rule.forward(*args)[0])
    h.def_fwd(lambda perturbed, args: rule.forward(*args))
    h.def_bwd(lambda residuals, dy, perturbed, args: rule.backward(residuals, dy))
    return lambda *args: h(args)


def by_nnx(rule: Rule) -> Function:
    from flax import nnx

    h = nnx.custom_vjp(lambda *args: rule.forward(*args)[0])
    # An upstream comes with what a graph node would be updated by.
    h.defvjp(rule.forward, lambda residuals, given: rule.backward(residuals, given[1]))
    return h


def ours(rule: Rule) -> Function:
    """Return the rule under `custom_gradient`, which closes over what the rule captures."""
    n, forward, backward = rule.captured, rule.forward, rule.backward

    def gradients(residuals: Any, dys: Any) -> Any:
        found = backward(residuals, dys if rule.many else dys[0])
        dws = found[:n]
        return found[n:], jax.tree.leaves(dws) if rule.how == "undeclared" else dws

    class Layer:
        """A layer with its weights, which are no inputs of its method."""

        def __init__(self, *weights: Any) -> None:
            self.weights = weights

        @custom_gradient(variables=lambda self: self.weights)
        def __call__(self, *inputs: Any) -> Any:
            y, residuals = forward(*self.weights, *inputs)
            return y, lambda *dys, variables: gradients(residuals, dys)

    def closing(*args: Any) -> Any:
        weights = args[:n]

        @custom_gradient(variables=weights if rule.how == "declared" else None)
        def h(*inputs: Any) -> Any:
            y, residuals = forward(*weights, *inputs)
            return y, lambda *dys, variables: gradients(residuals, dys)

        return h(*args[n:])

    if not n:
        return custom_gradient(rule.pair)
    return (lambda *args: Layer(*args[:n])(*args[n:])) if rule.how == "method" else closing


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
    BOTH: ours,
}


class Way(NamedTuple):
    """Write a rule in the way of this name."""

    name: str

    def __call__(self, rule: Rule) -> Function:
        return rule.written.get(self.name) or WAYS.get(self.name, WAYS[PLAIN])(rule)

    @property
    def inner(self) -> "Way":
        """The way for rules inside of `block`."""
        return Way({CHECKPOINT: PLAIN, BOTH: OURS}.get(self.name, self.name))

    def block(self, f: Function) -> Function:
        """Return a layer, or the body of a loop, as this way has it."""
        return jax.checkpoint(f) if self.name in (CHECKPOINT, BOTH) else f


# --- a workload -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    name: str
    loss: Callable[[Way, Any], Function]  # (way, size) -> what is differentiated
    arguments: Callable[[Any, Any], tuple[Any, ...]]  # (size, dtype) -> arguments
    argnums: tuple[int, ...]
    sizes: tuple[Any, Any, Any]  # for `Settings.size`; lists of sizes show the growth
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
    size = workload.sizes[0][-1] if isinstance(workload.sizes[0], list) else workload.sizes[0]
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
    sizes = workload.sizes[SIZES.index(settings.size)]
    one = functools.partial(_measure, section, workload, settings, failures)
    for what in workload.measures:
        if not isinstance(sizes, list):
            groups += one(what, sizes)
        else:
            points = _deep(lambda what=what: [g for size in sizes for g in one(what, size)])
            groups += [*points, _slope(points, what, sizes)]
    return groups


def _measure(
    section: str, workload: Workload, settings: Settings, failures: Any, what: str, size: Any
) -> list[Group]:
    how, _, mode = what.partition(" ")
    failed = {way: why for (m, way), why in failures.items() if m == mode}
    names = [way for way in workload.contestants(mode) if way not in failed]
    if how == "program":
        if OURS not in names:
            names = []
        found = {way: counts(workload, way, size, mode) for way in names}
        return [
            Group.counted(
                section, workload.name, f"{measure}, {mode}", unit,
                {way: numbers[measure] for way, numbers in found.items()}, failures=failed,
            )
            for measure, unit in COUNTS.items()
        ]  # fmt: skip
    if workload.big and settings.size == "cpu":
        return []
    args = workload.arguments(size, jnp.float32)

    def call(way: str) -> Call:
        f = workload.function(mode, way, size)
        if how == "trace":
            return lambda: jax.jit(lambda *a: f(*a)).trace(*args)
        if how == "run":
            f = workload.jitted(mode, way, size, fast=settings.toy)
        return lambda: f(*args)

    growing = isinstance(workload.sizes[0], list)
    seconds = (3 if how == "run" else 1) * settings.scale
    slow = growing or how == "run"
    rounds = settings.rounds(3 if workload.step else 5, 50) if slow else settings.rounds()
    measured = compare({way: call(way) for way in names}, OURS, seconds, rounds)
    measured.failures.update(failed)
    label = f"{what} at {size}" if growing else what
    group = Group.timed(section, workload.name, label, measured, workload.note)
    return [group, *_rates(group, workload, args, settings)]


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
    numbers = (cost.get("flops", 0.0), cost.get("bytes accessed", 0.0), memory(compiled)[0])
    return dict(zip(COUNTS, numbers, strict=True))


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
    (small, large), (m, n) = (g.values for g in points[-2:]), sizes[-2:]
    slopes = {k: (large[k] - small[k]) / (n - m) for k in large}
    powers = {k: math.log(large[k] / small[k]) / math.log(n / m) for k in large}
    note = f"from {m} to {n}; exponents: {', '.join(f'{k} {p:.2f}' for k, p in powers.items())}"
    section, case, _ = points[-1].key
    return Group.counted(section, case, f"{what}, slope", "s", slopes, note=note)


def _deep(run: Callable[[], Any]) -> Any:
    """Run where hundreds of nested calls fit: JAX needs several Python frames for each."""
    limit, size = sys.getrecursionlimit(), threading.stack_size(1 << 29)
    sys.setrecursionlimit(1 << 17)
    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(run).result()
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(size)
