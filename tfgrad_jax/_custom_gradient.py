"""The decorator `custom_gradient`: `f(*x)` returns `(y, grad_fn)`, the decorated function `y`.

`CustomGradient.__call__` runs at every call. If no transformation is running, nothing can be
differentiated, and `_plain` only calls `f`. Otherwise `_called` sorts the arguments, and the folder
`_call` does the rest.
"""

import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import (
    Any,
    Concatenate,
    Generic,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from jax import Array
from jax.core import Tracer
from jax.tree_util import all_leaves, tree_leaves

from ._call.run import run
from ._closure.walk import JITTED
from ._frontend.grad_fn import Call, CallSpec, Held, value
from ._frontend.signature import Signature
from ._frontend.structure import split
from ._frontend.within import Within, written_within
from ._jax.trace import is_idle, is_plain
from ._jax.types import Copied, Values
from ._jax.watching import standing_for
from ._messages import errors
from ._messages.source import Source
from ._messages.tracebacks import hidden, hide, is_raised_here

_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_R = TypeVar("_R")
_T = TypeVar("_T")
_Pair: TypeAlias = tuple[_R, Callable[..., Any]]

_LOCK = threading.Lock()
_SET_BY_WRAPS = {*functools.WRAPPER_ASSIGNMENTS, "__wrapped__", "__signature__", "__type_params__"}


class Declaration(NamedTuple):
    """What the user has declared."""

    f: Callable[..., Any]
    variables: Any
    primal: Callable[..., Any] | None
    convention: Literal["tf", "jax"]
    within: Within

    @classmethod
    def of(cls, f: Any, variables: Any, primal: Any, convention: Any) -> "Declaration":
        """Return the declaration of a function that is decorated now."""
        return cls(f, variables, primal, convention, written_within(Source.of(f)))


class CustomGradient(Copied, Generic[_P, _R]):
    """A function with a declared gradient. `custom_gradient` makes it."""

    # Our attributes are slots: `functools.update_wrapper` overwrites those in `__dict__`.
    __slots__ = (
        "__dict__",
        "__weakref__",
        "_declaration",
        "_is_method",
        "_method",
        "_name",
        "_signature",
        "_source",
    )

    def __init__(self, declaration: Declaration) -> None:
        f = declaration.f
        functools.update_wrapper(self, f)
        self._declaration = declaration
        self._source = Source.of(f)
        self._name = self._source.name.rpartition(".")[2]
        self._signature = Signature(f)
        self._signature.show_on(self)
        self._method: Any = None  # `_bound` makes it at the first access
        # By convention, the instance comes first, wherever `f` is written and whatever wraps it.
        # No class is searched for the method: `jax.jit`, linen and `functools.wraps` in the class
        # body each hide it in another way, and a `self` that is missed would be an input.
        scope = getattr(f, "__qualname__", "").rpartition(".")[0]
        in_class = bool(scope) and not scope.endswith("<locals>")
        self._is_method = self._signature.names[:1] == ("self",) or (
            in_class and self._signature.names[:1] == ("cls",)
        )

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Return `y`, with the declared gradient."""
        try:
            if self._is_method and args:  # called on the class, or by a wrapper in the class
                return self._bound(args[0])(*args[1:], **kwargs)
            return self._called((), args, kwargs, self._signature)
        except BaseException as error:
            hide(error)
            raise

    @overload
    def __get__(
        self: Callable[Concatenate[type[_T], _Q], _R], obj: _T | None, owner: type[_T]
    ) -> Callable[_Q, _R]: ...
    @overload
    def __get__(self, obj: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: Callable[Concatenate[_T, _Q], _R], obj: _T, owner: type | None = None
    ) -> Callable[_Q, _R]: ...
    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        """Bind a method: `self` is not an input; it counts as closed over."""
        return self if obj is None else self._bound(obj)

    def _bound(self, obj: Any) -> Any:
        if self._method is None:
            signature = Signature(self._declaration.f, bound=1)

            @hidden
            def method(obj: Any, /, *args: Any, **kwargs: Any) -> Any:
                return self._called((obj,), args, kwargs, signature)

            functools.update_wrapper(method, self._declaration.f)
            self._signature.show_on(method)
            vars(method)["_custom_gradient"] = self
            with _LOCK:  # the same object in all threads: `==` of bound methods compares it
                self._method = self._method or method
        return types.MethodType(self._method, obj)

    @property
    def __globals__(self) -> dict[str, Any]:  # jaxtyping reads it
        return self._declaration.f.__globals__

    def __reduce__(self) -> Any:
        if _is_importable(self):
            return vars(self)["__qualname__"]  # pickled by name, like any function
        attributes = {k: v for k, v in vars(self).items() if k not in _SET_BY_WRAPS}
        return type(self), (self._declaration,), attributes

    def as_rule(self) -> "CustomGradient[..., Any]":
        """Return this function as the rule of another one."""
        made = type(self)(self._declaration._replace(within=Within.IS_RULE))
        vars(made).update(vars(self))
        return made

    def __repr__(self) -> str:
        return f"<custom_gradient of {Source.of(self._declaration.f)}>"

    def _called(self, bound_to: Values, args: Any, kwargs: Any, signature: Signature) -> Any:
        if is_idle():
            return self._plain(bound_to, args, kwargs, signature)
        declared = self._declaration
        bound, variables = signature.bind(declared.f, args, kwargs), declared.variables
        if callable(variables) and all_leaves([variables]):
            variables = variables(*bound_to)
        variables = standing_for(variables)
        operands, constants, inputs = split(bound.inputs, signature.input_names(len(bound.inputs)))
        if bound.omitted:
            inputs.add_omitted(bound.inputs, bound.omitted)
        spec = CallSpec(self._source, inputs, declared.convention, declared.within)
        held = Held(declared.f, declared.primal, constants, bound.rest, bound_to)
        return run(Call(spec, held, operands, variables), self._name)

    def _plain(self, bound_to: Values, args: Any, kwargs: Any, signature: Signature) -> Any:
        """Return `y` where nothing can be differentiated: Python binds the arguments."""
        declared, source = self._declaration, self._source
        try:
            if kwargs and declared.primal is not None:  # by position, as where JAX traces a call
                args, kwargs, _ = signature.bind(declared.f, args, kwargs)
            y = value(declared, (*bound_to, *args), kwargs, source, declared.within)
        except TypeError as error:
            if is_raised_here(error):  # Python did not enter `f`: say what its signature is
                signature.bind(declared.f, args, kwargs)
            raise
        # JAX traces in one thread. In another one it would not ask the rule, and differentiate what
        # `f` returns: its argument, if it is an identity.
        leaves = (y,) if isinstance(y, Array) else tree_leaves(y)
        for v in (*args, *kwargs.values(), *leaves):
            if isinstance(v, Tracer) and not is_plain():
                raise errors.traced_elsewhere(source)
        return y


def _is_importable(value: object) -> bool:
    """Return whether a function can be imported by its name."""
    found: Any = sys.modules.get(getattr(value, "__module__", ""))
    for name in getattr(value, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found is value


class _Options(TypedDict, total=False):
    """The options of `custom_gradient`."""

    # Any would do, but that a strict pyright does not know the type of `self` in a lambda then.
    variables: Callable[[Any], Any] | Callable[[], Any] | Any
    primal: Callable[..., Any] | None
    convention: Literal["tf", "jax"]


class _Decorator(Protocol):
    """The type of `custom_gradient(...)`, called with options alone."""

    @overload
    def __call__(self, f: "staticmethod[_P, _Pair[_R]]", /) -> "staticmethod[_P, _R]": ...
    @overload
    def __call__(self, f: "classmethod[_T, _P, _Pair[_R]]", /) -> "classmethod[_T, _P, _R]": ...
    @overload
    def __call__(self, f: Callable[_P, _Pair[_R]], /) -> CustomGradient[_P, _R]: ...


# `_Options` could have other keys, for a type checker: PEP 728 closes such types.
@overload
def custom_gradient(  # pyrefly: ignore[inconsistent-overload]
    f: "staticmethod[_P, _Pair[_R]]", **options: Unpack[_Options]
) -> "staticmethod[_P, _R]": ...
@overload
def custom_gradient(  # pyrefly: ignore[inconsistent-overload]
    f: "classmethod[_T, _P, _Pair[_R]]", **options: Unpack[_Options]
) -> "classmethod[_T, _P, _R]": ...
@overload
def custom_gradient(  # pyrefly: ignore[inconsistent-overload]
    f: Callable[_P, _Pair[_R]], **options: Unpack[_Options]
) -> CustomGradient[_P, _R]: ...
@overload
def custom_gradient(  # pyrefly: ignore[inconsistent-overload]
    f: None = None, **options: Unpack[_Options]
) -> _Decorator: ...
def custom_gradient(
    f: Any = None,
    *,
    variables: Any = None,
    primal: Any = None,
    convention: Literal["tf", "jax"] = "tf",
) -> Any:
    """Declare the gradient of a function.

    f : a -> (b, CT b -> CT a)
    h = custom_gradient(f) : a -> b

    `h(x)` calls `f(x)`, which returns a pair: its value `y` and a function `grad_fn`, the rule. The
    call returns `y`. Where JAX differentiates it, JAX calls `grad_fn(dy)` with the gradient of the
    loss with respect to `y`, and `grad_fn` returns the gradient with respect to `x`. That is the
    derivative of `h` in reverse and forward mode, of any order, under every transformation, with
    few limits (`docs/limits.md`). Forward mode transposes `grad_fn`, which must be linear in `dy`.

    `f` runs as it is, on your own objects, and what it assigns is kept. In a first derivative
    outside `jit`, `vmap`, `scan` and `checkpoint`, `f` and `grad_fn` see values; a bare weight is
    JAX's own tracer in `f` (`jnp.asarray(w)` shows its value).

    The inputs are the positional parameters, as pytrees. `grad_fn` returns a gradient, or None, for
    each array and each float that the caller passes. `self` and keyword-only arguments are not
    inputs, so put settings behind `*`. What JAX is not tracing reaches `f` unchanged.

    Args:
        f: the function. Its `y` is any pytree of arrays and numbers. `grad_fn(*dys)` gets one
            upstream for each leaf of `y` (zeros for an unused one), and returns the gradients in
            the structure of the inputs, each of the shape of its input; None is no gradient.
        variables: how the weights get gradients that `f` reads from outside, and not as inputs.

            - `params`, a pytree of arrays: `grad_fn(dy, variables=params)` returns a pair,
              `(dx, d_params)`, with `d_params` in the structure of `params`.
            - `lambda self: self.params`, for a method: the same, with the arrays of the instance.
            - "autodiff": JAX differentiates `f`, and `grad_fn` returns gradients of inputs alone.
            - None, the default: as in TensorFlow. `grad_fn(dy, variables)` gets a list of the
              weights that an operation of `f` takes and that JAX is differentiating, each once, in
              the order of first use, and returns a pair, with a list of their gradients. If
              `grad_fn` does not take `variables`, differentiating a weight is an error.
        primal: a function to run instead of `f` where nothing is differentiated, such as a kernel
            that writes no residuals. It takes the same arguments and returns only `y`.
        convention: "tf": one upstream for each leaf of `y`, and complex gradients as in TensorFlow,
            `dL/dRe + i dL/dIm`. "jax": one upstream in the structure of `y`, and complex gradients
            as in JAX, like `jax.custom_gradient`.

    Returns:
        The decorated function, or, without `f`, the decorator.

    Raises:
        TypeError: if the arguments do not fit, `f` does not return such a pair, or an output is
            not an array; where JAX differentiates the call, if a gradient has the wrong structure
            or kind (complex for real), or if a weight has none.
        ValueError: if a gradient has the wrong shape, or if there are too few or too many.

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
    if convention not in ("tf", "jax"):
        raise errors.bad_option("convention", convention, "'tf' or 'jax'")
    if primal is not None and not callable(primal):
        raise errors.bad_option("primal", primal, "None or a function")
    if f is None:
        return functools.partial(
            custom_gradient, variables=variables, primal=primal, convention=convention
        )
    if isinstance(variables, str | bool) and variables != "autodiff":
        raise errors.bad_option("variables", variables, "arrays, not their names, or 'autodiff'")
    if isinstance(f, staticmethod | classmethod):
        return type(f)(CustomGradient(Declaration.of(f.__func__, variables, primal, convention)))
    if not callable(f):
        raise errors.not_callable(f)
    if isinstance(f, CustomGradient | JITTED):
        raise errors.cannot_decorate(f)
    return CustomGradient(Declaration.of(f, variables, primal, convention))
