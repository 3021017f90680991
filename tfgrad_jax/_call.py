"""One call of a decorated function: run `f`, and run the rule that it returned.

`Call.apply` runs `f` on new values of the operands. `Contract.gradients` runs a `grad_fn` and
gives each operand its gradient; it outlives the call, inside jaxprs, and so refers to nothing
that JAX traces. Nothing here differentiates: `_derivatives.py` decides what runs when.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.tree_util import tree_flatten

from . import _errors
from ._compat import same_axes
from ._signature import Bound
from ._structure import Layout, Outputs, Spec, conjugate, is_operand, spec, split

# Set while a rule runs: what a decorated function called there closes over is constant for it.
inside_rule: ContextVar[bool] = ContextVar("inside_rule", default=False)
# Set while a forward pass or a rule runs: what is called there is differentiated by the next
# level at the earliest, and that may be in either mode.
inside_derivative: ContextVar[bool] = ContextVar("inside_derivative", default=False)

_NUMBERS = (int, float, complex)


def checked_pair(f: Callable[..., Any], result: Any) -> tuple[Any, Callable[..., Any]]:
    """Return what `f` returned as `(y, grad_fn)`, or raise."""
    try:
        y, grad_fn = result
    except (TypeError, ValueError, IndexError):
        raise _errors.not_a_pair(f, result) from None
    if not callable(grad_fn):
        raise _errors.grad_fn_not_callable(f, grad_fn)
    return y, grad_fn


def check_outputs(f: Callable[..., Any], y: Any, leaves: Sequence[Any]) -> None:
    """Raise unless every leaf of `y` is an array or a number."""
    for i, leaf in enumerate(leaves):
        if not (is_operand(leaf) or isinstance(leaf, _NUMBERS)):
            raise _errors.output_no_array(f, y, i, leaf)


class Variables(NamedTuple):
    """What `grad_fn` gets as `variables=`, and how to read its gradients for them."""

    value: Any
    layout: Layout
    specs: Sequence[Spec]

    @classmethod
    def of(cls, value: Any) -> tuple["Variables", list[Any]]:
        """Return the variables and their leaves that are arrays."""
        leaves, layout = split((value,), ("variables",))
        return cls(value, layout, [spec(leaf) for leaf in leaves]), leaves


class Contract:
    """How the rules of a call are called, and how their results are read."""

    __slots__ = ("_inputs", "_mirrored", "source")

    def __init__(self, source: _errors.Source, inputs: Layout, mirrored: bool) -> None:
        self.source = source
        self._inputs = inputs
        self._mirrored = mirrored  # TensorFlow's convention, not JAX's

    def gradients(
        self,
        grad_fn: Callable[..., Any],
        outputs: Outputs,
        cotangents: Sequence[Any],
        specs: Sequence[Spec],
        variables: Variables | None,
    ) -> list[Any]:
        """Run `grad_fn`; return the gradients of the operands, then those of the variables."""
        where = _errors.Where(self.source, grad_fn)
        if variables is None and requires_variables(grad_fn):
            variables = Variables.of([])[0]
        result = self._run(grad_fn, outputs.upstreams(cotangents), variables, where)
        if variables is None:
            if self._gives_unasked_variables(grad_fn, result):
                result = result[0]
            gradients = self._inputs.gradients(result, specs, where)
        else:
            if not (isinstance(result, (tuple, list)) and len(result) == 2):
                raise _errors.no_variable_pair(where, result)
            gradients = self._inputs.gradients(result[0], specs, where)
            if variables.specs:
                where = where._replace(of="variable")
                gradients += variables.layout.gradients(result[1], variables.specs, where)
                specs = [*specs, *variables.specs]
        return [
            None if g is None else self._finished(g, s)
            for g, s in zip(gradients, specs, strict=True)
        ]

    def _finished(self, gradient: Any, wanted: Spec) -> Any:
        if self._mirrored:
            gradient = conjugate(gradient, wanted)
        return same_axes(gradient, wanted.axes)

    def _run(
        self,
        grad_fn: Callable[..., Any],
        upstreams: Sequence[Any],
        variables: Variables | None,
        where: _errors.Where,
    ) -> Any:
        keywords = {} if variables is None else {"variables": variables.value}
        token, outer = inside_rule.set(True), inside_derivative.set(True)
        try:
            return grad_fn(*upstreams, **keywords)
        except TypeError as error:
            # Only a call that never entered the rule leaves no frame below this one.
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                misfit = _misfit(grad_fn, upstreams, keywords)
                if misfit is not None:
                    count = len(upstreams)
                    raise _errors.wrong_arity(where, count, self._mirrored, misfit) from None
            raise
        finally:
            inside_rule.reset(token)
            inside_derivative.reset(outer)

    def _gives_unasked_variables(self, grad_fn: Callable[..., Any], result: Any) -> bool:
        """Tell whether a rule that was given no variables returned gradients for some."""
        return (
            isinstance(result, (tuple, list))
            and len(result) == 2
            and (result[1] is None or isinstance(result[1], (tuple, list, dict)))
            and accepts_variables(grad_fn)
            and not self._inputs.accepts(result)
        )


class Call:
    """The function, and all of its arguments that are no operands."""

    __slots__ = ("_f", "_inputs", "_mirrored", "_named", "_rest", "_self", "contract", "variables")

    def __init__(
        self,
        f: Callable[..., Any],
        source: _errors.Source,
        self_: tuple[Any, ...],
        inputs: Layout,
        bound: Bound,
        mirrored: bool,
        variables: Any,
    ) -> None:
        self._f = f
        self._self = self_  # what a method is bound to, or ()
        self._inputs = inputs
        self._named = bound.named
        self._rest = bound.rest
        self._mirrored = mirrored
        self.variables = variables  # None, "autodiff" or the declared pytree
        self.contract = Contract(source, inputs.without_statics(), mirrored)

    @property
    def autodiff(self) -> bool:
        """Whether captured values get the ordinary gradient of `f`."""
        return isinstance(self.variables, str)

    def with_function(self, f: Callable[..., Any]) -> "Call":
        """Return the same call of another function."""
        other = copy.copy(self)
        other._f = f
        return other

    @property
    def surroundings(self) -> list[Any]:
        """All that `f` can see beside its operands: tracers may hide here."""
        return [self._f, *self._self, *self._inputs.statics, *self._rest.values()]

    def same_as(self, other: "Call") -> bool:
        """Tell whether the other call differs in its operands at most."""
        return (
            self._f is other._f
            and self._named == other._named
            and self._inputs.same_as(other._inputs)
            and _identical(self._self, other._self)
            and self._rest.keys() == other._rest.keys()
            and _identical(self._rest.values(), other._rest.values())
        )

    def arguments(self, values: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return the arguments of `f`, given values for its inputs."""
        split_at = len(values) - len(self._named)
        keywords = dict(zip(self._named, values[split_at:], strict=True))
        return [*self._self, *values[:split_at]], keywords | dict(self._rest)

    def apply(
        self, operands: Sequence[Any], in_forward_pass: bool = False
    ) -> tuple[list[Any], Outputs, Callable[..., Any]]:
        """Run `f`; return the leaves of `y`, as arrays, their structure, and `grad_fn`."""
        args, kwargs = self.arguments(self._inputs.join(operands))
        outer = inside_derivative.set(in_forward_pass or inside_derivative.get())
        try:
            result = self._f(*args, **kwargs)
        finally:
            inside_derivative.reset(outer)
        y, grad_fn = checked_pair(self._f, result)
        leaves, treedef = tree_flatten(y)
        check_outputs(self._f, y, leaves)
        traced = any(isinstance(leaf, Tracer) for leaf in leaves)  # which `asarray` may make one
        leaves = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in leaves]
        return leaves, Outputs(leaves, treedef, self._mirrored, traced), grad_fn


def _identical(these: Iterable[Any], those: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(these, those, strict=True))


def _misfit(grad_fn: Any, upstreams: Sequence[Any], keywords: dict[str, Any]) -> TypeError | None:
    """Return the reason why a rule cannot be called with these arguments, if there is one."""
    try:
        inspect.signature(grad_fn).bind(*upstreams, **keywords)
    except TypeError as misfit:
        return misfit
    except ValueError:  # no signature is known
        pass
    return None


def _variables_parameter(grad_fn: Callable[..., Any]) -> inspect.Parameter | None:
    """Return the parameter of `grad_fn` that `variables=` would reach."""
    code = getattr(grad_fn, "__code__", None)
    if (
        code is not None
        and not code.co_flags & inspect.CO_VARKEYWORDS
        and "variables" not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    ):
        return None  # the usual rule, without the price of a signature
    try:
        parameters = inspect.signature(grad_fn).parameters
    except (TypeError, ValueError):
        return None
    named = parameters.get("variables")
    if named is not None and named.kind in (named.POSITIONAL_OR_KEYWORD, named.KEYWORD_ONLY):
        return named
    return next((p for p in parameters.values() if p.kind is p.VAR_KEYWORD), None)


def accepts_variables(grad_fn: Callable[..., Any]) -> bool:
    """Tell whether `grad_fn` takes `variables=`, by name or as part of `**kwargs`."""
    return _variables_parameter(grad_fn) is not None


def requires_variables(grad_fn: Callable[..., Any]) -> bool:
    """Tell whether `grad_fn` cannot be called without `variables=`."""
    p = _variables_parameter(grad_fn)
    return p is not None and p.kind is not p.VAR_KEYWORD and p.default is p.empty
