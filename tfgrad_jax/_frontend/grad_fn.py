"""One call of a decorated function: run `f`, and run the rule that it returned.

A `CallSpec` does both: `apply` runs `f`, `gradients` runs a `grad_fn` and gives each operand its
gradient. It lives on in jaxprs after the call, so it holds no values: each run gets them. Nothing
here differentiates; `_autodiff` decides what runs when.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.tree_util import tree_flatten, tree_leaves

from .._jax.compat import explicit_sharding, summed_over, varying
from .._jax.types import (
    AnyFunction,
    Aval,
    Copied,
    Cotangents,
    Inert,
    Leaf,
    PyTree,
    is_array,
)
from .._messages import errors, gradient_errors
from .._messages.runs import annotate_rule, annotate_run
from .._messages.source import Source, Where
from .returned import gradients as read_gradients
from .returned import is_pair
from .signature import accepts_variables, requires_variables, upstream_names
from .structure import Layout, Outputs, conjugate, split
from .within import Within, enter, leave

Arguments: TypeAlias = Sequence[PyTree]
Keywords: TypeAlias = Mapping[str, PyTree]
Pair: TypeAlias = tuple[PyTree, AnyFunction]  # `(y, grad_fn)`

_PLAIN = (jax.Array, int, float, complex)


def checked_pair(
    f: AnyFunction, args: Arguments, keywords: Keywords, source: Source, within: Within
) -> Pair:
    """Run `f`, and return `(y, grad_fn)`; raise if it returned anything else."""
    # If `f` is written in a rule, so are the functions that are decorated in it.
    token = enter(f) if within is Within.RULE else None
    try:
        result = f(*args, **keywords)
    except Exception as error:
        annotate_run(error, source)
        raise
    finally:
        if token is not None:
            leave(token)
    try:
        y, grad_fn = result
    except (TypeError, ValueError, IndexError):
        y = grad_fn = None
    if not callable(grad_fn):
        raise errors.not_a_pair(f, result)
    return y, grad_fn


def checked_outputs(f: AnyFunction, y: PyTree) -> PyTree:
    """Return `y`; raise unless every leaf of it is an array or a number."""
    if isinstance(y, jax.Array):
        return y
    for i, leaf in enumerate(tree_leaves(y)):
        if not (isinstance(leaf, _PLAIN) or is_array(leaf)):
            raise errors.output_no_array(f, y, i, leaf)
    return y


def primal_value(source: Source, primal: AnyFunction, args: Arguments, kwargs: Keywords) -> PyTree:
    """Return `y`, as the `primal` of a function computes it."""
    y = _called(primal, args, kwargs, lambda misfit: errors.primal_call(source, primal, misfit))
    return checked_outputs(primal, y)


class Variables(NamedTuple):
    """What `grad_fn` gets as `variables=`, and how to read its gradients for them."""

    constants: Sequence[PyTree]  # what JAX is not tracing
    layout: Layout
    declared: bool = True

    @classmethod
    def of(cls, value: PyTree) -> tuple["Variables", list[Leaf]]:
        """Return the variables, and those of their leaves that JAX is tracing."""
        traced, constants, layout = split((value,), ("variables",))
        return cls(constants, layout), traced

    @classmethod
    def listed(cls, values: Sequence[Leaf], types: Sequence[Aval]) -> "Variables":
        """Return a list of undeclared variables, of these types in the forward pass."""
        layout = Layout(([*values],), ("variables",))
        # All are being differentiated, so each gets a gradient, even if its value is concrete.
        layout.operands = layout.holes = range(len(types))
        layout.differentiable = layout.counted = [True] * len(types)
        layout.types = [*types]
        return cls([None] * len(types), layout, declared=False)

    def value(self, traced: Sequence[Leaf]) -> PyTree:
        return self.layout.join(self.constants, traced)[0]


NO_VARIABLES = Variables.of([])[0]


class Held(NamedTuple):
    """What a call holds, as the user wrote it. JAX keeps the code that gets it, not this."""

    f: AnyFunction
    primal: AnyFunction | None
    inputs: Sequence[PyTree]  # the constants among them; once `filled`, all
    keywords: Keywords  # keyword-only arguments and **kwargs
    bound_to: Sequence[object]  # `self` of a method

    def filled(self, layout: Layout, operands: Sequence[Leaf]) -> "Held":
        return self._replace(inputs=layout.join(self.inputs, operands))


# What a rule holds: the user's `grad_fn`, or the constants of its jaxpr.
HeldByRule: TypeAlias = Any

# What a rule holds, cotangents, the variables, the values of those that JAX is tracing -> the
# gradients of the operands, and then of these values.
Gradients: TypeAlias = Callable[
    [HeldByRule, Cotangents, Variables | None, Sequence[Leaf]], list[Leaf | None]
]
# Of `f`: the leaves of `y`, as arrays, their structure, and its rule.
Result: TypeAlias = tuple[list[Leaf], Outputs, "GradFn"]
Apply: TypeAlias = Callable[[Any], Result]  # of what a call holds, filled: runs `f`
Primal: TypeAlias = Callable[[Any], PyTree]  # of the same: `y` alone


class GradFn(NamedTuple):
    """A `grad_fn` that `f` returned."""

    gradients: Gradients  # runs it
    held: HeldByRule
    accepts_variables: bool
    source: Source
    y: Leaf = None  # the only output, as `f` returned it: the rule may hold it


@dataclasses.dataclass(frozen=True, eq=False)
class CallSpec(Inert):
    """How to call `f` and its rules, and how to read their results."""

    source: Source
    inputs: Layout
    named: Sequence[str]  # the names of the last inputs, if these are passed by name
    convention: str
    within: Within

    def value(self, held: Held) -> PyTree:
        """Return `y` alone, as `f` computes it."""
        y, _ = checked_pair(held.f, *self._arguments(held), self.source, self.within)
        return checked_outputs(held.f, y)

    def primal(self, held: Held) -> PyTree:
        """Return `y` alone, as a `primal` computes it."""
        assert held.primal is not None
        return primal_value(self.source, held.primal, *self._arguments(held))

    def apply(self, held: Held) -> Result:
        """Run `f`; return the leaves of `y`, as arrays, their structure, and `grad_fn`."""
        y, grad_fn = checked_pair(held.f, *self._arguments(held), self.source, self.within)
        if isinstance(grad_fn, Copied):  # a decorated function
            grad_fn = grad_fn.as_rule()
        returned, treedef = tree_flatten(checked_outputs(held.f, y))
        leaves = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in returned]
        outputs = Outputs(y, leaves, treedef, self.convention)
        gradients = functools.partial(self.gradients, outputs)
        accepts, source = accepts_variables(grad_fn), Source.of(grad_fn)
        rule = GradFn(gradients, grad_fn, accepts, source, outputs.only(returned))
        return leaves, outputs, rule

    def _arguments(self, held: Held) -> tuple[Arguments, Keywords]:
        values = [*held.bound_to, *held.inputs]
        first = len(values) - len(self.named)
        named = dict(zip(self.named, values[first:], strict=True))
        return values[:first], {**named, **held.keywords}

    def gradients(
        self,
        outputs: Outputs,
        grad_fn: HeldByRule,
        cotangents: Cotangents,
        variables: Variables | None,
        traced: Sequence[Leaf],
    ) -> list[Leaf | None]:
        """Run a rule; return the gradients of the operands, then those of the traced variables."""
        upstreams, where = outputs.upstreams(cotangents), Where(self.source, grad_fn)
        if outputs.swapped and len(upstream_names(grad_fn) or ()) > 1:
            gradient_errors.warn_of_upstreams(where, *outputs.swapped)
        if variables is None and requires_variables(grad_fn):
            variables = NO_VARIABLES
        keywords = {} if variables is None else {"variables": variables.value(traced)}

        def misfit(error: TypeError) -> TypeError:
            is_tf = self.convention == "tf"
            takes = "dy" if len(upstreams) == 1 else "*dys"
            if keywords and not accepts_variables(grad_fn):
                return gradient_errors.takes_no_variables(where, takes)
            takes += ", variables" * len(keywords)
            count = len(upstreams) if is_tf else None
            return gradient_errors.wrong_arity(where, count, takes, error)

        token = enter(grad_fn)
        try:
            result = _called(grad_fn, upstreams, keywords, misfit)
        except Exception as error:
            annotate_rule(error, where, not keywords and accepts_variables(grad_fn))
            raise
        finally:
            leave(token)
        return self._read(variables, result, where)

    def _read(self, variables: Variables | None, result: PyTree, where: Where) -> list[Leaf | None]:
        """Return the gradients of the operands, then of the traced variables."""
        are_two = isinstance(result, (tuple, list)) and len(result) == 2
        if variables is None:
            if result is None and any(self.inputs.differentiable):
                gradient_errors.warn_of_bare_none(where, self.inputs.names)
            if are_two and accepts_variables(where.grad_fn) and is_pair(self.inputs, result):
                result = result[0]  # no variable is differentiated
            return self._finished(self.inputs, result, where)
        if not are_two:
            raise gradient_errors.no_variable_pair(where, result, self.inputs, variables.layout)
        if variables is NO_VARIABLES and tree_leaves(result[1]):
            raise gradient_errors.needless_variables(where)
        gradients = self._finished(self.inputs, result[0], where)
        if any(t is not None for t in variables.layout.types):
            where = where._replace(of="variable" if variables.declared else "undeclared variable")
            gradients += self._finished(variables.layout, result[1], where)
        return gradients

    def _finished(self, layout: Layout, result: PyTree, where: Where) -> list[Leaf | None]:
        gradients = read_gradients(layout, result, where)
        for i, position in enumerate(layout.operands):
            if gradients[i] is None:
                continue
            expected: Aval = layout.types[position]
            came: Aval = jax.typeof(gradients[i])
            wanted = explicit_sharding(expected.to_ct_aval())
            if wanted != explicit_sharding(came):
                path = layout.leaf_paths()[position]
                raise gradient_errors.wrong_sharding(where, came, expected, path)
            if missing := varying(expected) - varying(came):
                raise gradient_errors.not_varying(where, missing, layout.leaf_paths()[position])
            if self.convention == "tf":
                gradients[i] = conjugate(gradients[i], expected)
            # In a `shard_map`, the devices share an input that does not vary along an axis, and
            # each has computed its part of the gradient. JAX adds these up for its operations.
            gradients[i] = summed_over(gradients[i], varying(came) - varying(expected))
        return gradients


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call: how it runs, on what."""

    spec: CallSpec
    apply: Apply
    primal: Primal | None  # by other code than `f`
    held: Held
    operands: list[Leaf]  # the leaves of the inputs that JAX is tracing
    variables: PyTree  # None, "autodiff" or the declared pytree

    @property
    def autodiff(self) -> bool:
        """Whether captured values get the ordinary gradient of `f`."""
        return isinstance(self.variables, str)

    @functools.cached_property
    def declared(self) -> tuple[Variables | None, list[Leaf]]:
        """Return the declared variables, and those that JAX is tracing; raise without any array."""
        if self.variables is None or self.autodiff:
            return None, []
        leaves = tree_leaves(self.variables)
        if leaves and not any(is_array(v) or isinstance(v, _PLAIN) for v in leaves):
            raise errors.no_array_among_variables(self.spec.source, leaves[0])
        return Variables.of(self.variables)


def _called(
    f: AnyFunction, args: Arguments, kwargs: Keywords, misfit: Callable[[TypeError], Exception]
) -> Any:
    """Call a function; raise `misfit(error)` if its signature does not accept these arguments."""
    try:
        return f(*args, **kwargs)
    except TypeError as error:
        # If Python could not even enter `f`, the traceback has no frame below this one.
        if getattr(error.__traceback__, "tb_next", None) is None:
            with contextlib.suppress(ValueError):  # a builtin without a signature
                try:
                    inspect.signature(f).bind(*args, **kwargs)
                except TypeError as reason:
                    raise misfit(reason) from None
        raise
