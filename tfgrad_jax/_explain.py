"""Show what a custom gradient does: what it keeps, where that comes from, and what it costs.

A call keeps for its backward pass what `jax.vjp` of it returns: the leaves of its pull-back.
`explain` reads where these come from, in a jaxpr in which every array is an operand.
"""

import contextlib
import functools
import math
import types
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

from ._autodiff.linearity import NotLinearError
from ._autodiff.transpose import transposed
from ._custom_gradient import CustomGradient, Declaration
from ._family import is_recomputed
from ._frontend.signature import Signature
from ._jax.compat import cotangent_type, is_ref, tangent_dtype
from ._jax.jaxpr import reads
from ._jax.types import NeedsValuesError, is_array, spec
from ._messages import tool_errors
from ._messages.source import Source
from ._messages.text import aligned, type_name
from .testing._arrays import Held, arrays_in, called, decorated, is_known, primal_of

_TYPE = jax.ShapeDtypeStruct
_runs: ContextVar[list[Any]] = ContextVar("runs")  # of a watched function: outputs, rule, arrays


class Seen(NamedTuple):
    """An array that the function reads, and the gradient it gets if JAX differentiates it."""

    name: str
    type: str
    gradient: str  # "by the rule", "autodiff", "zero", or "none: " and why


class Residual(NamedTuple):
    """An array that is kept for the backward pass."""

    name: str  # the rule's variable, or the operation and the line that compute it
    type: str
    bytes: int
    origin: str  # "new", or an array in memory anyway: "input", "captured" or "output"


class Explanation(NamedTuple):
    """What a custom gradient does at some arguments. Prints as a table."""

    name: str
    inputs: Sequence[Seen]
    captured: Sequence[Seen]
    residuals: Sequence[Residual]
    kept_bytes: int
    new_bytes: int  # of the residuals that are no input, output or captured value
    autodiff: Sequence[Residual] | None  # what plain autodiff keeps; None if it does not work
    autodiff_bytes: int | None
    forward_mode: bool | None  # None: unknown
    obstacle: str  # why forward mode does not work, or why that is unknown
    costs: Callable[[], dict[str, dict[str, float]]]  # compiles: the estimates for each program

    def __repr__(self) -> str:
        plain = "unknown" if self.autodiff_bytes is None else f"{self.autodiff_bytes:,} B"
        kept = [(r.name, r.type, f"{r.bytes:,} B", r.origin) for r in self.residuals]
        kept += [("total", "", f"{self.kept_bytes:,} B", f"of which {self.new_bytes:,} B new")]
        kept += [("by autodiff", "", plain, "")]
        lines = [f"Custom gradient of `{self.name}`"]
        for head, table in (
            (("inputs", "", "gradient"), self.inputs),
            (("closed over", "", "gradient"), self.captured),
            (("kept by the rule", "", "", ""), kept),
        ):
            rows = [(f"  {name}", *rest) for name, *rest in table]
            lines += [f"  {line}" for line in aligned([head, *rows])] if table else []
        forward = {True: "works", False: "no: ", None: "unknown: "}[self.forward_mode]
        return "\n".join([*lines, f"  forward mode: {forward}{self.obstacle}"])


def explain(h: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Report where each gradient comes from, what the rule keeps, and what that costs.

    All arrays among the arguments, and all that the function closes over, are treated as traced,
    as under `jax.jit`. `h` is traced, and executed only if it branches on values.

    Args:
        h: a function that `custom_gradient`, `grad_pass_through` or `recompute_grad` returned.
        *args: its arguments, or `jax.ShapeDtypeStruct` in the place of arrays.
        **kwargs: its keyword arguments.

    Returns:
        An `Explanation`, which prints as a table: the arrays that `h` reads and the gradient of
        each; what the rule keeps, and what JAX would keep for the undecorated function (depends on
        its version); whether forward mode works. `costs()` compiles, and returns estimates.

    Raises:
        TypeError: if `h` is not such a function, or needs values and got none.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from tfgrad_jax import custom_gradient, explain
        >>> square = custom_gradient(lambda x: (x * x, lambda dy: 2 * x * dy))
        >>> found = explain(square, jax.ShapeDtypeStruct((512, 512), jnp.float32))
        >>> [(r.name, r.bytes, r.origin) for r in found.residuals], found.new_bytes
        ([('x', 1048576, 'input')], 0)
    """
    return copy_context().run(_Call(h, args, kwargs).explained)


class _Call:
    """A call of a decorated function, and what is found out about copies of it."""

    def __init__(self, h: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        h = called(h)
        f, bound_to = (h.__func__, (h.__self__,)) if isinstance(h, types.MethodType) else (h, ())
        owner, inner = decorated(h), getattr(h, "__wrapped__", None)
        variables, primal, self._convention = "autodiff", None, "tf"
        if owner is not None:
            f, variables, primal, self._convention, _ = owner._declaration
        elif not is_recomputed(f):
            wraps = isinstance(inner, CustomGradient) or is_recomputed(inner)
            raise tool_errors.not_explainable(h, wraps)
        self._recomputes, self._is_method, self._eager = is_recomputed(f), bool(bound_to), False
        self._source = Source.of(f)
        self.name = self._source.name.replace("<locals>.", "")
        is_self = lambda v: any(v is obj for obj in bound_to)  # noqa: E731
        leaves, self._treedef = tree_flatten(((*bound_to, *args), kwargs), is_leaf=is_self)
        signature, names = Signature(f), [""] * len(leaves)
        bound = signature.bind(f, *tree_unflatten(self._treedef, range(len(leaves))))
        first = [*signature.input_names(bound), *bound.rest]
        for path, i in tree_flatten_with_path((*bound.inputs, *bound.rest.values()))[0]:
            names[i] = first[path[0].idx] + keystr(path[1:])
        given = [isinstance(v, _TYPE) or (is_array(v) and not is_ref(v)) for v in leaves]
        self._given = [i for i, is_one in enumerate(given) if is_one]
        settings = [(names[i], None if given[i] else v) for i, v in enumerate(leaves)]
        self._held = held = Held([("", f), *settings, ("", primal), ("variables", variables)])
        self._values = [*held.arrays, *(leaves[i] for i in self._given)]
        self._names = [*held.names, *(names[i] for i in self._given)]
        autodiff = [isinstance(variables, str)] * len(held.arrays)
        autodiff += [self._recomputes] * len(self._given)
        self._kinds = ["autodiff" if known else "by the rule" for known in autodiff]

    def explained(self) -> Explanation:
        """Trace the call, or run it where it branches on values."""
        _runs.set([])
        try:
            closed, shapes = jax.make_jaxpr(self._look, return_shape=True)(*self._values)
            found = tree_unflatten(jax.tree.structure(shapes), closed.jaxpr.outvars)
            constants = zip(closed.jaxpr.constvars, closed.consts, strict=True)
            return self._explanation(closed.jaxpr.invars, closed.jaxpr.eqns, constants, *found)
        except NeedsValuesError as error:
            if any(isinstance(v, _TYPE) for v in self._values):
                raise tool_errors.explain_needs_values(self.name) from error
            self._eager, values = True, list(map(jnp.asarray, self._values))
            return self._explanation(values, (), (), *self._look(*values))

    def _value(self, values: Sequence[Any], plain: bool = False) -> Any:
        """Return the value of a copy of the function, or of the undecorated one."""
        n = len(self._held.arrays)
        f, *leaves, primal, variables = self._held(values[:n])
        for i, v in zip(self._given, values[n:], strict=True):
            leaves[i] = v
        args, kwargs = tree_unflatten(self._treedef, leaves)
        if self._recomputes:
            return (f.__wrapped__ if plain else f)(*args, **kwargs)
        if plain:
            return f(*args, **kwargs)[0]

        @functools.wraps(f)
        def watched(*args: Any, **kwargs: Any) -> Any:
            pair = f(*args, **kwargs)
            with contextlib.suppress(TypeError, ValueError, LookupError):  # no pair: an error later
                runs, (y, grad_fn) = _runs.get(), pair
                ys = {f"y{keystr(path)}": v for path, v in tree_flatten_with_path(y)[0]}
                ys = {name: primal_of(v) for name, v in ys.items() if isinstance(v, jax.Array)}
                held = [(a.name, primal_of(a.value)) for a in arrays_in([("", grad_fn)]).values()]
                runs.append((ys, grad_fn, held))
            return pair

        h: Any = CustomGradient(Declaration.of(watched, variables, primal, self._convention))
        return h.__get__(args[0])(*args[1:], **kwargs) if self._is_method else h(*args, **kwargs)

    def _vjp(self, positions: Sequence[int], values: Sequence[Any], plain: bool = False) -> Any:
        """Return the outputs that have a derivative, their pull-back, and what that keeps."""

        def of_some(some: dict[int, Any]) -> list[Any]:
            y = self._value([some.get(i, v) for i, v in enumerate(values)], plain)
            return [jnp.asarray(v) for v in tree_leaves(y) if spec(v).differentiable]

        ys, pull = jax.vjp(of_some, {i: values[i] for i in positions})
        return ys, pull, [v for v in tree_leaves(pull) if not is_ref(v)]

    def _has_derivative(self, positions: Sequence[int], values: Sequence[Any]) -> bool | None:
        with contextlib.suppress(TypeError):  # it says that a captured value has no gradient
            return bool(self._vjp(positions, values))

    def _look(self, *values: Any) -> tuple[Any, ...]:
        """Find out which values have gradients, and whether forward mode works.

        Return what is kept, the outputs, what the rule holds, and what plain autodiff keeps.
        """
        self._differentiated = positions = [
            i for i, v in enumerate(values) if spec(v).differentiable
        ]
        self._gradients = [f"none: {spec(v).dtype} has no derivative" for v in values]
        for i in positions:
            self._gradients[i] = self._kinds[i]
        if not self._has_derivative(positions, values):
            for i in [i for i in positions if not self._has_derivative([i], values)]:
                self._gradients[i] = "none: an error where it is differentiated"
                positions.remove(i)
        ys, pull, kept = self._vjp(positions, values)
        runs = [run for run in _runs.get() if all(map(is_known, run[0].values()))]
        outputs, grad_fn, arrays = runs[-1] if runs else ({}, None, [])
        held = {(i, name): v for i, (name, v) in enumerate(arrays) if is_known(v)}
        kept += held.values() if self._eager else ()  # the rule keeps what JAX is not tracing
        self._ys = jax.tree.map(jax.typeof, ys)
        read = self._look_at_rule(ys, pull, values, grad_fn)
        if not self._eager:  # what the rule reads and no operand stands for, such as a global array
            kept += [a.value for a in self._held.constants if id(a.value) in read]
        plain = None
        with contextlib.suppress(Exception):  # of any type: that of what has no derivative
            zs, plain_pull, kept_plainly = self._vjp(positions, values, plain=True)
            jax.eval_shape(plain_pull, zs)  # a loop says only now that it has none
            plain = kept_plainly
        return kept, outputs, held, plain

    def _look_at_rule(self, ys: Any, pull: Any, values: Sequence[Any], grad_fn: Any) -> set[int]:
        """Find out whether forward mode works, and which gradients are zero.

        Return the ids of the constants that the rule reads.
        """
        arrays = [values[i] for i in self._differentiated]
        tangents = [jnp.zeros_like(v, tangent_dtype(v.dtype)) for v in arrays]
        closed: Any = None
        self._forward, zero = (True, ""), "zero"
        try:
            closed = None if self._eager else jax.make_jaxpr(pull)(ys)  # it may need values
            types = [cotangent_type(y) for y in ys]
            transposed(lambda cotangents: tree_leaves(pull(cotangents)), types, tangents)
        except NotLinearError as error:
            line = Source.of(grad_fn).first_use(error.eqn)
            self._forward, zero = (False, f"{error} ({Path(line).name})"), "zero or constant"
        except Exception as error:  # of any type: that of the rule
            if isinstance(error, NeedsValuesError):
                raise
            text = f"the rule raised {type(error).__name__}: {error}".partition("\n")[0]
            self._forward, closed = (None, text), None
        every = reads(closed) if closed else []
        for i, (upstreams, _) in zip(self._differentiated, every, strict=False):
            if not upstreams:
                self._gradients[i] = zero
        return {id(array) for _, arrays in every for array in arrays}

    def _explanation(
        self, operands: Any, eqns: Any, fixed: Iterable[tuple[Any, Any]], *found: Any
    ) -> Explanation:
        """Return what was found out: variables of a jaxpr, or arrays, stand for the values."""
        kept, outputs, held, plain = found
        constants, n = self._held.constants, len(self._held.arrays)
        rows = [(name, "new", v) for (_, name), v in held.items()]
        rows += [(name, "output", v) for name, v in outputs.items()]
        rows += [(a.name, "captured", a.value) for a in constants]
        names = {id(a.value): a.name for a in constants}
        rows += [(names.get(id(c), "(unnamed)"), "captured", v) for v, c in fixed]
        origins = ["captured"] * n + ["input"] * len(self._given)
        rows += zip(self._names, origins, operands, strict=True)
        known: dict[int, tuple[str, str]] = {}
        for name, origin, v in rows:
            known[id(v)] = known.get(id(v), (name,))[0], origin  # the rule's name comes first
        made = {id(v): eqn for eqn in eqns for v in eqn.outvars}

        def maker(v: Any) -> Any:
            eqn = made.get(id(v))
            if eqn is None or eqn.primitive.name != "reduce_precision":
                return eqn
            return made.get(id(eqn.invars[0]), eqn)  # a `checkpoint` rounds what its policy keeps

        def row(v: Any) -> Residual:
            name, origin = known.get(id(v), ("(unnamed)", "new"))
            if id(v) not in known and (eqn := maker(v)):
                line = Path(self._source.first_use(eqn)).name
                name = f"`{eqn.params.get('name', eqn.primitive.name)}` ({line})"
            t = getattr(v, "aval", v)
            return Residual(name, type_name(t), math.prod(t.shape) * t.dtype.itemsize, origin)

        residuals = list({id(v): row(v) for v in kept}.values())
        autodiff = None if plain is None else list({id(v): row(v) for v in plain}.values())
        types = map(type_name, self._values)
        seen = list(map(Seen, self._names, types, self._gradients))
        captured = seen[:n]
        for name, v, why in constants:
            captured.append(Seen(name, type_name(v), f"unknown: {why or 'not replaced'}"))
        new = [r for r in residuals if r.origin == "new"]
        forward_mode, obstacle = self._forward
        return Explanation(
            name=self.name,
            inputs=seen[n:],
            captured=captured,
            residuals=residuals,
            kept_bytes=_bytes(residuals),
            new_bytes=_bytes(new),
            autodiff=autodiff,
            autodiff_bytes=None if autodiff is None else _bytes(autodiff),
            forward_mode=forward_mode,
            obstacle=obstacle,
            costs=self._costs,
        )

    def _costs(self) -> dict[str, dict[str, float]]:
        positions = self._differentiated
        programs: dict[str, Callable[..., Any]] = {
            "value": lambda _, *values: self._value(values),
            "gradient": lambda dys, *vs: self._vjp(positions, vs)[1](dys),
            "gradient by autodiff": lambda dys, *vs: self._vjp(positions, vs, plain=True)[1](dys),
        }
        found = {}
        for of, program in programs.items():
            with contextlib.suppress(Exception):  # of any type: that of tracing or compiling
                compiled = jax.jit(program).lower(self._ys, *self._values).compile()
                temporary = getattr(compiled.memory_analysis(), "temp_size_in_bytes", math.nan)
                costs: Any = compiled.cost_analysis()
                found[of] = {**costs, "temporary bytes": temporary}
        return found


def _bytes(residuals: Sequence[Residual]) -> int:
    return sum(r.bytes for r in residuals)
