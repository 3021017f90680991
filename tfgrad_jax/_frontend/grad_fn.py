"""One call of a decorated function: run `f`, and run the rule that it returned.

A `CallSpec` does both: `apply` runs `f`, `gradients` runs a `grad_fn` and gives each operand its
gradient. It lives on in jaxprs after the call, so it holds no values: each run gets them. Nothing
here differentiates; `_autodiff` decides what runs when.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import tree_flatten, tree_leaves

from .._jax.compat import varying
from .._jax.types import AnyFunction, Aval, Copied, Inert, Leaf, PyTree, Values, is_array
from .._messages import errors, gradient_errors
from .._messages.runs import annotate
from .._messages.source import Source, Where
from .._messages.tracebacks import frames, note
from .returned import gradients as read_gradients
from .returned import is_pair
from .signature import accepts_variables, names_upstreams, requires_variables
from .structure import Layout, Outputs, conjugate, split
from .within import Within, running


def checked_pair(
    f: AnyFunction, args: Values, keywords: Any, source: Source, within: Within
) -> tuple[PyTree, AnyFunction]:
    """Run `f`, and return `(y, grad_fn)`; raise if it returned anything else."""
    if within is Within.RULE:  # then so are the functions that are decorated in `f`
        with running(f):
            return checked_pair(f, args, keywords, source, Within.NOTHING)
    try:
        result = f(*args, **keywords)
    except Exception as error:
        annotate(error, source)
        raise
    are_two = isinstance(result, (tuple, list)) and len(result) == 2
    if not (are_two and callable(result[1])):
        raise errors.not_a_pair(f, result)
    return result[0], result[1]


def checked_outputs(f: AnyFunction, y: PyTree) -> PyTree:
    """Return `y`; raise unless every leaf of it is an array or a number."""
    if isinstance(y, jax.Array):
        return y
    for i, leaf in enumerate(tree_leaves(y)):
        if not (isinstance(leaf, (int, float, complex)) or is_array(leaf)):
            raise errors.output_no_array(f, y, i, leaf)
    return y


def value(of: Any, args: Values, keywords: Any, source: Source, within: Within) -> PyTree:
    """Return `y` alone, as the `primal` of a declaration or a call computes it, or `f`."""
    if of.primal is None:
        return checked_outputs(of.f, checked_pair(of.f, args, keywords, source, within)[0])
    return checked_outputs(of.primal, of.primal(*args, **keywords))


class Variables(NamedTuple):
    """What `grad_fn` gets as `variables=`, and how to read its gradients for them."""

    constants: Sequence[PyTree]  # what JAX is not tracing
    layout: Layout
    declared: bool = True

    @classmethod
    def listed(cls, values: Values, types: Sequence[Aval]) -> "Variables":
        """Return a list of undeclared variables, of these types in the forward pass."""
        # All are being differentiated, so each gets a gradient, even if its value is concrete.
        layout = Layout(([*values],), ("variables",), types)
        return cls([None] * len(types), layout, declared=False)


class Held(NamedTuple):
    """What a call holds, as the user wrote it. JAX keeps the code that gets it, not this."""

    f: AnyFunction
    primal: AnyFunction | None
    inputs: Sequence[PyTree]  # the constants among them; once `filled`, all
    keywords: Mapping[str, PyTree]  # keyword-only arguments and **kwargs
    bound_to: Sequence[object]  # `self` of a method

    @property
    def roots(self) -> Sequence[object]:
        return [*self.bound_to, self.f, self.primal, *self.inputs, *self.keywords.values()]

    def filled(self, layout: Layout, operands: Values) -> "Held":
        return self._replace(inputs=layout.join(self.inputs, operands))


class GradFn(NamedTuple):
    """A `grad_fn` that `f` returned."""

    # Runs it: of what is `held`, cotangents, the variables, and the values of those that JAX is
    # tracing, the gradients of the operands, and then of these values.
    gradients: Callable[..., list[Leaf | None]]
    held: Any  # the function, or what stands for it
    accepts_variables: bool
    source: Source
    outputs: Outputs  # of `f`
    y: Leaf  # the only one, as `f` returned it: the rule may hold it


@dataclasses.dataclass(frozen=True, eq=False)
class CallSpec(Inert):
    """How to call `f` and its rules, and how to read their results."""

    source: Source
    inputs: Layout
    convention: str
    within: Within

    def value(self, held: Held) -> PyTree:
        """Return `y` alone, as the `primal` computes it, or `f`."""
        return value(held, (*held.bound_to, *held.inputs), held.keywords, self.source, self.within)

    def apply(self, held: Held) -> tuple[list[Leaf], GradFn]:
        """Run `f`; return the leaves of `y`, as arrays, and `grad_fn`."""
        f, args = held.f, (*held.bound_to, *held.inputs)
        y, grad_fn = checked_pair(f, args, held.keywords, self.source, self.within)
        if isinstance(grad_fn, Copied):  # a decorated function
            grad_fn = grad_fn.as_rule()
        returned, treedef = tree_flatten(checked_outputs(held.f, y))
        leaves = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in returned]
        outputs = Outputs(y, leaves, treedef, self.convention)
        gradients = functools.partial(self.gradients, outputs)
        accepts, source = accepts_variables(grad_fn), Source.of(grad_fn)
        only = outputs.only(returned)
        return leaves, GradFn(gradients, grad_fn, accepts, source, outputs, only)

    def gradients(
        self,
        outputs: Outputs,
        grad_fn: AnyFunction,
        cotangents: Values,
        variables: Variables | None,
        traced: Values,
    ) -> list[Leaf | None]:
        """Run a rule; return the gradients of the operands, then those of the traced variables."""
        upstreams, where = outputs.upstreams(cotangents), Where(self.source, grad_fn)
        if outputs.swapped and names_upstreams(grad_fn):
            gradient_errors.warn_of_upstreams(where, *outputs.swapped)
        if variables is None and requires_variables(grad_fn):
            variables = Variables.listed([], [])
        keywords = {}
        if variables is not None:
            keywords["variables"] = variables.layout.join(variables.constants, traced)[0]

        with running(grad_fn):
            try:
                result = grad_fn(*upstreams, **keywords)
            except Exception as error:
                if isinstance(error, TypeError) and len(frames(error)) == 1:  # it did not run
                    count = len(upstreams)
                    raise gradient_errors.wrong_arity(where, count, keywords, error) from None
                if isinstance(error, AttributeError) and any(error.obj is v for v in traced):
                    note(error, gradient_errors.only_arrays(where, str(error.name)))
                annotate(error, where)
                raise
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
        of_inputs = self._finished(self.inputs, result[0], where)
        where = where._replace(of="variable" if variables.declared else "undeclared variable")
        return of_inputs + self._finished(variables.layout, result[1], where)

    def _finished(self, layout: Layout, result: PyTree, where: Where) -> list[Leaf | None]:
        gradients = read_gradients(layout, result, where)
        for i, position in enumerate(layout.operands):
            if (g := gradients[i]) is None:
                continue
            expected = layout.types[position]
            if self.convention == "tf":
                g = conjugate(g, expected)
            # In a `shard_map`, the devices share an input that does not vary along an axis, and
            # each has computed its part of the gradient. JAX adds these up for its operations.
            axes = varying(jax.typeof(g)) - varying(expected)
            gradients[i] = jax.lax.psum(g, tuple(axes)) if axes else g
        return gradients


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call: how it runs, on what."""

    spec: CallSpec
    held: Held
    operands: list[Leaf]  # the leaves of the inputs that JAX is tracing
    variables: PyTree  # None, "autodiff" or the declared pytree

    @property
    def autodiff(self) -> bool:
        """Whether captured values get the ordinary gradient of `f`."""
        return isinstance(self.variables, str)

    @functools.cached_property
    def declared(self) -> tuple[Variables | None, list[Leaf]]:
        """Return the declared variables, and those that JAX is tracing."""
        if self.variables is None or self.autodiff:
            return None, []
        traced, constants, layout = split((self.variables,), ("variables",))
        return Variables(constants, layout), traced
