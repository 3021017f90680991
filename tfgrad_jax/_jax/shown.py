"""What a run of `f` computes from what it takes: tracers that show their values, and end with it.

`Run` notes what one run takes; `Shown` is a value that it has computed. `watch.py` makes both.
"""

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.source_info_util import current as _here

from .compat import concrete, is_ref, is_ref_type, is_valid, opens, trace_of
from .trace import is_around, local
from .types import Aval, Leaf, Values, is_differentiable

Trace: TypeAlias = Any  # one of JAX's; a type checker does not know them
Mask: TypeAlias = int  # a set of what a run takes: bit `i` stands for `taken[i]`


def has_derivative(aval: Aval) -> bool:
    return not is_ref_type(aval) and is_differentiable(aval.dtype)


def is_live(v: object) -> bool:
    """Return whether a value must be an operand: a tracer whose trace runs, or a Ref."""
    if not isinstance(v, Tracer):
        return is_ref(v)
    if type(v) is Shown:
        return v.run.is_known()
    # Which derivatives enclose this one, the current trace does not always tell.
    return is_valid(v) and (opens(trace_of(v)) or is_around(v))


class Run(jax.core.Trace):
    """What one run of a function takes. It is also the trace of what the run shows.

    The values that a run computes may be left in an object of the user's. JAX asks whether the
    trace of an operand is still valid: it is, in every run under the same derivative.
    """

    def __init__(self, of: Trace, inputs: Values, left: Callable[[], Exception]) -> None:
        super().__init__()
        self.of, self.key = of, object()  # what JAX keeps of a run, which holds tracers
        self.taken: list[Leaf] = list(inputs)
        self.inputs = len(self.taken)
        self.uses: list[tuple[Leaf, object]] = []  # in order, with the line, as JAX records it
        self.numbers: dict[int, tuple[Leaf, Leaf]] = {}  # tracers, and arrays for what is inside
        self._used: Mask = 0
        self._moving: Mask = 0  # what an operation takes whose result has a derivative
        self._bits: dict[int, Mask] = {}
        self._left = left

    def check(self) -> bool:
        """Return True, or raise an error that names the function which has left a value behind."""
        watches = local.watches  # as a rule, this is the innermost
        if not (watches and watches[-1].run is self) and not self.is_known():
            raise self._left()
        return True

    is_valid = check  # JAX asks at each operation

    def is_known(self) -> bool:
        """Return whether a run under the same derivative is on, in this thread."""
        return any(self.of is of for watch in local.watches for of in watch.ofs)

    def is_captured(self, v: Leaf) -> bool:
        """Return whether a value is a tracer from outside that no earlier run has left."""
        if type(v) is Shown:
            return v.run is not self and v.run.is_on()
        return isinstance(v, Tracer) and not is_ref(v)

    def is_on(self) -> bool:
        return any(watch.run is self for watch in local.watches)

    def bit(self, v: Leaf) -> Mask:
        """Return the bit of a value from outside."""
        if id(v) not in self._bits:
            self._bits[id(v)] = 1 << len(self.taken)
            self.taken.append(v)
        return self._bits[id(v)]

    def of_mask(self, mask: Mask) -> list[Leaf]:
        found = list[Leaf]()
        while mask:
            lowest = mask & -mask
            found.append(self.taken[lowest.bit_length() - 1])
            mask ^= lowest
        return found

    def use(self, mask: Mask, results: Values = (), moves: bool = False) -> None:
        """Note that an operation with results takes some values, or that the code returns them."""
        mask = mask >> self.inputs << self.inputs
        if new := mask & ~self._used:
            line = _here()
            self.uses += [(v, line) for v in self.of_mask(new)]
            self._used |= new
        if mask & ~self._moving and (moves or any(map(has_derivative, map(jax.typeof, results)))):
            self._moving |= mask

    def is_compared(self, v: Leaf) -> bool:
        """Return whether operations without a derivative alone take a value from outside."""
        return not self._bits[id(v)] & self._moving


def _of_value(convert: Callable[[Any], Any]) -> Any:
    """Return a method of `Shown` that converts its value."""
    return lambda self: convert(self._now())


class Shown(Tracer):
    """What a run has computed from what it takes. It shows its value to Python.

    A plain value would do, but for what is left in an object: a `cached_property` that `f` fills
    was a constant for the loss that read it later, and its gradient was lost without an error.
    """

    __slots__ = ("_type", "mask", "run", "value")

    def __init__(self, run: Run, value: Leaf, mask: Mask, type: Aval) -> None:
        super().__init__(run, type)
        self.run, self.value, self.mask = run, value, mask

    @property
    def aval(self) -> Any:
        """Raise where JAX takes what is left for a constant: a loss may return it as it is."""
        self.run.check()
        return self._type

    @aval.setter
    def aval(self, aval: Any) -> None:
        self._type = aval

    @property
    def _debug_info(self) -> None:
        """Raise our error where JAX makes its own, for a tracer that it finds too late."""
        self.run.check()

    def _now(self) -> Any:
        self.run.check()
        # Not what a tracer stands for: JAX differentiates it, so NumPy must not take its value for
        # a constant. With "autodiff", `np.exp(w * x)` had no gradient by `w`, and what a rule read
        # by way of `float` had none at the second order. JAX's own tracer raises.
        return self.value

    def to_concrete_value(self) -> Any:
        value = concrete(self._now())
        return None if isinstance(value, Tracer) else value

    __float__, __int__, __complex__, __bool__, __index__ = map(
        _of_value, (float, int, complex, bool, operator.index)
    )

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.asarray(self._now(), *args, **kwargs)

    def __format__(self, spec: str) -> str:
        return format(self._now(), spec)

    def item(self, *args: int) -> Any:
        return np.asarray(self).item(*args)  # not that of a tracer, which does not raise

    def tolist(self) -> Any:
        return np.asarray(self).tolist()

    def __repr__(self) -> str:
        return repr(self.value)

    def __str__(self) -> str:
        return str(self.value)  # as `print` shows an array
