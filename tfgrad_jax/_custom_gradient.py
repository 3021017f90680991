"""The decorator `custom_gradient`: `f(*x)` returns `(y, grad_fn)`, the result returns `y`.

`CustomGradient.__call__` runs at every call and takes one of three ways:

    plain     no input is traced, so no derivative can flow: call `f` and return `y`
    direct    `f` closes over nothing that is traced: its rule runs on the inputs
    hoisted   it does, or may: captured values become operands first (`_closure.py`)
"""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

import jax
from jax.core import Tracer
from jax.errors import UnexpectedTracerError
from jax.tree_util import all_leaves, tree_leaves, tree_unflatten

from . import _errors
from ._call import Call, Variables, check_outputs, checked_pair
from ._closure import hoist
from ._compat import traces_eagerly
from ._derivatives import differentiable
from ._direct import CapturedTracerError, Direct
from ._rules import (
    Cleared,
    NeedsValuesError,
    Transparent,
    captures,
    cleared,
    search,
)
from ._seen import branching, on_values
from ._signature import Bound, Signature
from ._structure import split

_P = ParamSpec("_P")
_R = TypeVar("_R")

_NO_KEYWORDS: Mapping[str, Any] = types.MappingProxyType({})
_CONVENTIONS = ("tf", "jax")
# Inputs of these types are not traced and hold nothing, and outputs need no second look. The
# type of a concrete `jax.Array` is added when the first one is seen.
_inert_types: set[type] = {bool, int, float, complex}


class CustomGradient(Transparent, Generic[_P, _R]):
    """A function whose derivative is the one that it declares. Made by `custom_gradient`."""

    __name__: str
    __qualname__: str
    __wrapped__: Callable[..., Any]

    def __init__(
        self, f: Callable[..., Any], variables: Any, forward_mode: bool, convention: str
    ) -> None:
        functools.update_wrapper(self, f)
        self._f = f
        self._source = _errors.Source.of(f)
        self._variables = variables
        self._forward_mode = forward_mode
        self._mirrored = convention == "tf"
        self._signature = Signature(f)
        # A function without cells and defaults can close over nothing, now or later.
        self._closed = not getattr(f, "__closure__", ()) and captures([f]) is False
        scope = getattr(f, "__qualname__", "").rpartition(".")[0]
        self._in_class = bool(scope) and not scope.endswith("<locals>")

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Return `y`, whose derivative is the declared one."""
        if self._in_class and args and self._binds(args[0]):
            return self._method(*args, **kwargs)
        signature = self._signature
        if kwargs or not signature.fits(len(args)):
            return self._call((), signature.bind(self._f, args, kwargs), signature)
        if self._closed:
            for leaf in tree_leaves(args):
                if type(leaf) not in _inert_types:
                    break
            else:
                y, traced = self._checked(self._f(*args))
                if not traced:
                    return y
        return self._call((), Bound(args, (), _NO_KEYWORDS), signature)

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        """Bind a method: `self` is no input, but part of what the function closes over."""
        return self if obj is None else types.MethodType(self._method, obj)

    @functools.cached_property
    def _method(self) -> Callable[..., Any]:
        f, signature = self._f, Signature(self._f, bound=1)

        def method(obj: Any, /, *args: Any, **kwargs: Any) -> Any:
            return self._call((obj,), signature.bind(f, args, kwargs), signature)

        return functools.update_wrapper(method, f)

    def __reduce__(self) -> str:
        return self.__qualname__  # like any function: by name

    def __repr__(self) -> str:
        return f"<custom_gradient of {_errors.describe(self._f)}>"

    def held(self) -> tuple[Any, ...]:
        return self._f, self._variables

    def _binds(self, first: Any) -> bool:
        """Tell whether `first` is the `self` of `Model.f(model, x)`, or a classmethod's `cls`."""
        is_class = isinstance(first, type)
        for cls in (first if is_class else type(first)).__mro__:
            found = vars(cls).get(self.__name__)
            if found is self:
                return not is_class
            if isinstance(found, classmethod) and found.__func__ is self:
                return is_class
        return False

    def _checked(self, result: Any) -> tuple[Any, bool]:
        """Return `y`, and whether it is traced."""
        y, _ = checked_pair(self._f, result)
        leaves = tree_leaves(y)
        for leaf in leaves:
            if type(leaf) not in _inert_types:
                check_outputs(self._f, y, leaves)
                if isinstance(leaf, Tracer):
                    return y, True
                if isinstance(leaf, jax.Array):
                    _inert_types.add(type(leaf))
        return y, False

    def _call(self, self_: tuple[Any, ...], bound: Bound, signature: Signature) -> Any:
        variables = self._variables
        if callable(variables) and all_leaves([variables]):
            variables = variables(*self_)
        operands, inputs = split(bound.inputs, signature.input_names(bound))
        call = Call(self._f, self._source, self_, inputs, bound, self._mirrored, variables)
        captured, found = self._search(call)
        token = None if found is None else cleared.set(found)
        try:
            if captured is not True and not any(isinstance(x, Tracer) for x in operands):
                args, kwargs = call.arguments(bound.inputs)
                y, traced = self._checked(self._f(*args, **kwargs))
                if not traced:
                    return y
                captured = True  # there are other ways to a tracer than those that can be seen
            if captured is not True:
                try:
                    return self._direct(call, operands, captured is None)
                except (CapturedTracerError, UnexpectedTracerError):
                    pass
            return self._hoisted(call, operands)
        finally:
            if token is not None:
                cleared.reset(token)

    def _search(self, call: Call) -> tuple[bool | None, Cleared | None]:
        """Tell whether `f` closes over a tracer; None if that cannot be seen."""
        if call.variables is not None and any(
            isinstance(v, Tracer) for v in tree_leaves(call.variables)
        ):
            return True, None
        return search(call.surroundings)

    def _direct(self, call: Call, operands: list[Any], may_capture: bool) -> Any:
        declared = call.variables is not None and not call.autodiff
        variables = Variables.of(call.variables)[0] if declared else None
        program = Direct(call, self._forward_mode, may_capture, variables)
        if traces_eagerly():
            program.run_on_values(operands)
        leaves = differentiable(program)(program, *operands)
        return tree_unflatten(program.treedef, leaves)

    def _hoisted(self, call: Call, operands: list[Any]) -> Any:
        seen = on_values(call, self._forward_mode)
        if seen is not None:
            try:
                return seen.run(operands)
            except CapturedTracerError:
                pass
        try:
            program, captured = hoist(call, operands, self._forward_mode)
            leaves = differentiable(program)(program, *captured, *operands)
            return tree_unflatten(program.treedef, leaves)
        except NeedsValuesError:
            seen = branching(call, self._forward_mode)
            if seen is None:
                raise
        return seen.run(operands)


@overload
def custom_gradient(
    f: Callable[_P, Any],
    *,
    variables: Any = None,
    forward_mode: bool = False,
    convention: Literal["tf", "jax"] = "tf",
) -> CustomGradient[_P, Any]: ...
@overload
def custom_gradient(
    f: None = None,
    *,
    variables: Any = None,
    forward_mode: bool = False,
    convention: Literal["tf", "jax"] = "tf",
) -> Callable[[Callable[_P, Any]], CustomGradient[_P, Any]]: ...
def custom_gradient(
    f: Any = None,
    *,
    variables: Any = None,
    forward_mode: bool = False,
    convention: Literal["tf", "jax"] = "tf",
) -> Any:
    """Declare the gradient of a function.

    f : a -> (b, CT b -> CT a)
    h = custom_gradient(f) : a -> b

    `f` returns a pair: its value `y`, and a function `grad_fn` that turns the gradient of a loss
    with respect to `y` into its gradient with respect to the inputs. The decorated function
    returns `y` alone; JAX differentiates it by `grad_fn` under every transformation and at every
    order. Without `jit`, both see concrete values.

    Inputs are the positional parameters, however they are passed, as pytrees; a default that
    is left out, `self`, keyword-only arguments and `**kwargs` are none. Arrays (of JAX and
    NumPy), NumPy scalars, `float` and `complex` are traced, and every other leaf (`int`, `bool`,
    `str`, `None`, callables, other objects) reaches `f` as it is.

    Args:
        f: the function. Its `y` is any pytree of arrays and numbers. `grad_fn(*dys)` gets one
            upstream for each leaf of `y`, of its shape and dtype (zeros where the loss does not
            depend on it), and returns the gradients in the structure of the inputs, or as a flat
            list for all or for the differentiable leaves; `None` is no gradient. Each has the
            shape of its input; another floating precision is cast.
        variables: what to do about values that `f` closes over and that are differentiated.
            None: if `grad_fn` takes `variables`, it gets the list of those that JAX traces and
            `y` depends on, and returns `(grad_xs, grad_vars)`; if not, they raise. A pytree of
            arrays, or a function of the instance that returns one: `grad_fn` always gets it,
            and returns their gradients in its structure. "autodiff": the ordinary gradient of
            `f`.
        forward_mode: whether `jvp`, `jacfwd` and `linearize` work too, by transposing `grad_fn`,
            which must be linear in its upstreams.
        convention: "tf", as above, with complex gradients as in TensorFlow, `dL/dRe + i dL/dIm`.
            "jax": one upstream in the structure of `y`, complex gradients as in JAX, as
            `jax.custom_gradient` has it.

    Returns:
        The decorated function, or, without `f`, the decorator.

    Raises:
        TypeError: at the call, if the arguments do not fit, `f` does not return such a pair, or
            an output is no array; when differentiated, if a gradient is of another kind or
            structure, or a value that `f` closes over has none.
        ValueError: when differentiated, if a gradient has another shape or their number is
            wrong.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from tfgrad_jax import custom_gradient
        >>> @custom_gradient
        ... def log1pexp(x):
        ...     e = jnp.exp(x)
        ...     return jnp.log(1 + e), lambda dy: dy * (1 - 1 / (1 + e))
        >>> float(jax.grad(log1pexp)(100.0))
        1.0
    """
    if convention not in _CONVENTIONS:
        raise _errors.bad_option("convention", convention, "'tf' or 'jax'")
    if not isinstance(forward_mode, bool):
        raise _errors.bad_option("forward_mode", forward_mode, "True or False")
    if isinstance(variables, str) and variables != "autodiff":
        raise _errors.bad_option("variables", variables, "None, a pytree, a function or 'autodiff'")
    if f is None:
        return functools.partial(
            custom_gradient, variables=variables, forward_mode=forward_mode, convention=convention
        )
    if isinstance(f, staticmethod | classmethod):
        inner = CustomGradient(f.__func__, variables, forward_mode, convention)
        return type(f)(inner)
    if not callable(f):
        raise _errors.not_callable(f)
    return CustomGradient(f, variables, forward_mode, convention)
