"""`Problem`: the function to check and what it decorates, as functions of arrays.

What is checked are the arrays among the arguments, and those that `variables` declares. These the
function may hold anywhere: other values take their place at each operation (`replacing`). Whatever
else the value depends on is `unchecked`: a `_Tape` sees which arrays operations take.
"""

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.source_info_util import current, summarize
from jax.tree_util import all_leaves, keystr, tree_flatten_with_path, tree_leaves

from .._jax.types import AnyFunction, Leaf, PyTree, has_gradient, is_array, is_traced
from .._jax.watching import replacing
from .._messages import tool_errors
from .._messages.text import type_name
from .._tools import Call, Checked, attempt, decorated, differentiable, name_of

OfArrays: TypeAlias = Callable[..., list[jax.Array]]
_Id: TypeAlias = int  # of an array
_Constants: TypeAlias = frozenset[_Id]  # arrays that operations take and none has made


class Problem:
    """`h` and the undecorated function, as functions of the arrays that are checked."""

    def __init__(
        self,
        h: Checked,
        args: tuple[PyTree, ...],
        kwargs: Mapping[str, PyTree],
        reference: AnyFunction | None,
    ) -> None:
        self._call = call = Call.of(h, args, kwargs)
        self.name = name_of(call.h)
        if is_traced(call.leaves):
            raise tool_errors.checks_values(call.h)
        owner, y = decorated(call.h), call.run(call.h, {})  # an error of the user's stays as it is
        is_plain, self._declared, self.unchecked = owner is None, list[jax.Array](), list[str]()
        self._at = [i for i, v in enumerate(call.leaves) if self._is_checked(i, v, is_plain)]
        self.names = [call.names[i] for i in self._at]
        self.arguments = len(self._at)  # how many of the arrays are arguments
        variables = owner and owner._declaration.variables
        self._look_at_variables(variables)
        self.xs = [*(call.leaves[i] for i in self._at), *self._declared]
        if not (self.xs and differentiable(y)):
            raise tool_errors.nothing_to_check(call.h, "outputs" if self.xs else "arguments")
        value = call.h if is_plain else self._plain
        self.h, self.value = self._of_arrays(call.h), self._of_arrays(value)
        plain = reference or (None if is_plain else value)
        self.plain = None if plain is None else self._of_arrays(plain)
        if reference is not None and self.plain is not None:
            got, wanted = ([y.shape for y in f(*self.xs)] for f in (self.plain, self.value))
            if got != wanted:
                raise tool_errors.bad_reference(reference, call.h, wanted, got)
        if not isinstance(variables, str):  # JAX differentiates these as it does without a rule
            self._look_at_the_rest(value)

    def holding(self, xs: Sequence[Leaf]) -> contextlib.AbstractContextManager[object]:
        """Let the function hold other values than its declared variables, the last of `xs`."""
        held = self._declared, xs[self.arguments :]
        return replacing(*held) if self._declared else contextlib.nullcontext()

    @property
    def example(self) -> str:
        """Return how to check a weight that the function holds."""
        h, inputs = self._call.h, ", ".join(dict.fromkeys(self._call.arguments))
        made = f"{self.name.rpartition('.')[0] or 'make'}(w)"
        if isinstance(h, types.MethodType):
            method = f".{h.__name__}" * (h.__name__ != "__call__")
            made = f"{type(h.__self__).__name__}(w){method}"
        return f"check_gradient(lambda w, {inputs}: {made}({inputs}), w, {inputs})"

    def _of_arrays(self, f: AnyFunction) -> OfArrays:
        def of_arrays(*xs: Leaf) -> list[jax.Array]:
            with self.holding(xs):
                return differentiable(self._call.run(f, dict(zip(self._at, xs, strict=False))))

        return of_arrays

    def _plain(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self._call.h.__wrapped__(*self._call.bound_to, *args, **kwargs)[0]

    def _is_checked(self, i: int, leaf: Leaf, is_plain: bool) -> bool:
        """Return whether a leaf has a gradient: of a rule, not if it is passed by keyword alone."""
        if isinstance(leaf, float | complex):
            return self._call.is_input[i]
        is_input = self._call.is_input[i] or is_plain
        return is_input and is_array(leaf) and has_gradient(leaf)

    def _look_at_variables(self, variables: PyTree) -> None:
        """Note which declared variables are checked, each once; a number has no identity."""
        if callable(variables) and all_leaves([variables]):
            variables = variables(*self._call.bound_to)
        known: set[_Id] = set()
        for path, v in tree_flatten_with_path(variables)[0]:
            name = f"variables{keystr(path)}"
            if isinstance(v, float | complex | np.ndarray | np.generic):
                kind = "NumPy array" if is_array(v) else "Python number"
                self.unchecked.append(f"{name} (a {kind}: make it a `jax.Array`)")
            elif isinstance(v, jax.Array) and has_gradient(v) and id(v) not in known:
                known.add(id(v))
                self._declared.append(v)
                self.names.append(name)

    def _look_at_the_rest(self, f: AnyFunction) -> None:
        """Note the arrays that the value depends on, and that are not checked.

        An array that the code makes anew each time, as `jnp.float32(2)`, is another one in a second
        run: the first one still lives, so no other has its id.
        """
        call, one, other = self._call, self._tape(f), self._tape(f)
        names = {id(v): call.names[i] for i, v in enumerate(call.leaves) if i not in self._at}
        declared = dict(zip(map(id, self._declared), self.names[self.arguments :], strict=True))
        for key in one.constants & other.constants:
            array, line = one.found[key]
            text = f"{names.get(key, f'a {type_name(array)}')} ({line})"
            if key in declared:
                text = f"{declared[key]} (also where it is not replaced, as inside of a `jax.jit`)"
            self.unchecked.append(text)

    def _tape(self, f: AnyFunction) -> "_Tape":
        # Copies: an argument may be the very array that the function holds.
        xs = [jax.numpy.array(x) if is_array(x) else x for x in self.xs[: self.arguments]]
        tape = _Tape(xs, self._declared)
        with replacing(self._declared, self._declared, tape.note):
            y = attempt(self._call.run, f, dict(zip(self._at, xs, strict=True)))
        tape.constants = _Constants().union(*map(tape.constants_of, tree_leaves(y)))
        return tape


class _Tape:
    """What operations take that none of them has made, and what depends on it."""

    constants: _Constants = frozenset()  # on which the value depends

    def __init__(self, inputs: Sequence[Leaf], declared: Sequence[Leaf]) -> None:
        self._declared = {id(v) for v in declared}
        # Arrays are kept alive, so that no other one gets the id of one.
        self._of = {id(v): (v, _Constants()) for v in (*inputs, *declared)}
        self.found: dict[_Id, tuple[jax.Array, str]] = {}  # with the line that takes it

    def note(
        self, values: Sequence[Leaf], params: Mapping[str, Any], results: Sequence[Leaf]
    ) -> None:
        of = _Constants().union(*map(self.constants_of, values))
        for v in _constants_inside(params, set()):  # JAX has traced them: they are not replaced
            if id(v) in self._declared:
                self.found[id(v)], of = (v, ""), of | {id(v)}
            of |= self.constants_of(v)
        # A call with a derivative of its own returns what operations inside have made.
        before = {id(r): self._of[id(r)][1] for r in results if id(r) in self._of}
        self._of |= {id(r): (r, of | before.get(id(r), _Constants())) for r in results}

    def constants_of(self, v: Leaf) -> _Constants:
        if id(v) not in self._of:
            is_array = isinstance(v, jax.Array) and not isinstance(v, Tracer)
            if is_array and has_gradient(v):
                self.found[id(v)] = v, summarize(current()).rpartition("/")[2]
            self._of[id(v)] = v, _Constants([id(v)] if id(v) in self.found else ())
        return self._of[id(v)][1]


def _constants_inside(params: Mapping[str, Any], known: set[int]) -> Iterator[Leaf]:
    """Yield the constants of the jaxprs that an operation calls, and of those that these call."""
    for part in tree_leaves([*params.values()]):
        if isinstance(part, ClosedJaxpr):
            yield from part.consts
            part = part.jaxpr
        if isinstance(part, Jaxpr) and id(part) not in known:
            known.add(id(part))
            for eqn in part.eqns:
                yield from _constants_inside(eqn.params, known)
