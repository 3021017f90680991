"""The checks of `testing.check_gradient`.

`Problem` turns `h` into a function of the arrays among its arguments alone. `Check` compares what
its rule declares with what is true (`_study.py`), and with what it gives under transformations.
Whatever can be judged in double precision is judged there, so that the judges are sharp for
float32 code too.
"""

import contextlib
import functools
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._call import accepts_variables
from ._place import first_place
from ._rules import NeedsValuesError
from ._signature import Signature
from ._structure import spec, split
from ._study import Study, basis, distance, dot, like, numbers, pair, pull_back, random, ratio

# Relative errors that are rounding, by dtype; the table of jax.test_util.
_TOLERANCE = {"float16": 1e-2, "bfloat16": 1e-1, "float32": 2e-3, "complex64": 2e-3}
_DOUBLE_TOLERANCE = 1e-5
_DOUBLES = {"float64", "complex128"}
_OTHER = 1 << 20  # added to the seed of the upstreams, the seed of the directions


class Row(NamedTuple):
    """What was found for one argument; errors are relative, None where there is no answer."""

    order: int
    argument: str
    type: str
    differences: float | None  # against finite differences
    autodiff: float | None  # against plain autodiff of the undecorated function
    precision: float | None  # of the gradient in its own dtype, against double precision
    ok: bool
    note: str


class Fact(NamedTuple):
    """What was found for the rule as a whole; `ok` is None where that is no judgment."""

    name: str
    ok: bool | None
    text: str


class Problem:
    """`h` and the undecorated function, as functions of the arrays that have a derivative."""

    def __init__(
        self, h: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], reference: Any
    ) -> None:
        signature = Signature(h)
        self._bound = bound = signature.bind(h, args, kwargs)
        plain, rule = getattr(h, "__wrapped__", None), None
        if isinstance(h, types.MethodType) and plain is not None:
            plain = functools.partial(plain, h.__self__)
        with contextlib.suppress(Exception):  # not one of ours, if it returns no pair
            _, rule = self._call(plain, bound.inputs, bound.rest)
        declared = getattr(h, "_variables", None)
        self.closed_over = declared is not None and not isinstance(declared, str)
        arrays = {k: v for k, v in bound.rest.items() if _has_array(v)}
        if not callable(rule):
            plain = None
        elif self.closed_over or not (declared or accepts_variables(rule)):
            arrays = {}
        self._arrays = arrays
        values = (*bound.inputs, *arrays.values())
        self._operands, self._layout = split(values, (*signature.input_names(bound), *arrays))
        self._moving = [i for i, x in enumerate(self._operands) if spec(x).differentiable]
        self.xs = [self._operands[i] for i in self._moving]
        self.paths = [self._layout.path(i) for i in self._moving]
        self.h = functools.partial(self._run, h, False)
        self.plain: Any = None
        if plain is not None or reference is not None:
            self.plain = functools.partial(self._run, reference or plain, reference is None)

    def _call(self, f: Any, inputs: Sequence[Any], rest: Mapping[str, Any]) -> Any:
        split_at = len(inputs) - len(self._bound.named)
        named = dict(zip(self._bound.named, inputs[split_at:], strict=True))
        return f(*inputs[:split_at], **named, **rest)

    def _run(self, f: Any, pair: bool, *xs: Any) -> list[jax.Array]:
        """Return the leaves of the value that have a derivative."""
        operands = list(self._operands)
        for i, x in zip(self._moving, xs, strict=True):
            operands[i] = x
        values = self._layout.join(operands)
        count = len(self._bound.inputs)
        arrays = dict(zip(self._arrays, values[count:], strict=True))
        y = self._call(f, values[:count], {**self._bound.rest, **arrays})
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(y[0] if pair else y)]
        return [leaf for leaf in leaves if spec(leaf).differentiable]


class Check:
    """The checks; each adds to `rows` and `facts`."""

    def __init__(
        self, problem: Problem, exact: bool, full: bool, count: int, tolerance: Any, seed: int
    ) -> None:
        self._problem, self._exact, self._full = problem, exact, full
        self._count, self._seed = count, seed
        self._f, self._xs, self._ys = problem.h, problem.xs, problem.h(*problem.xs)
        self.rows: list[Row] = []
        self.facts: list[Fact] = []
        if problem.closed_over:
            text = "closed over, not checked: check a function of them and the arguments"
            self.facts.append(Fact("variables", None, text))
        dtypes = {str(spec(v).dtype) for v in (*self._xs, *self._ys)}
        known = [_TOLERANCE.get(d, _DOUBLE_TOLERANCE) for d in dtypes]
        self._native = self._tolerance = tolerance or max(known, default=_DOUBLE_TOLERANCE)
        self._types = [f"{s.dtype}[{','.join(map(str, s.shape))}]" for s in map(spec, self._xs)]
        self._us = self._upstreams(self._ys)
        # The judges: the same point in double precision, if the function is the same there.
        self._double, self._point = False, self._xs
        if not dtypes <= _DOUBLES:
            with contextlib.suppress(Exception), _double_precision():
                xs = [jnp.asarray(numbers(jnp.asarray(x))) for x in self._xs]
                ys = self._f(*xs)
                near = max(map(distance, ys, self._ys), default=0) <= self._native
                if near and {str(y.dtype) for y in ys} <= _DOUBLES:
                    self._double, self._point = True, xs
                    self._tolerance = tolerance or _DOUBLE_TOLERANCE

    def _precise(self) -> Any:
        return _double_precision() if self._double else contextlib.nullcontext()

    def _upstreams(self, ys: Sequence[Any]) -> list[list[np.ndarray]]:
        """Return factors for the outputs, zero where an output is not finite."""
        rows = basis(ys) if self._full else random(ys, self._count, self._seed)
        return [[u * np.isfinite(numbers(y)) for u, y in zip(us, ys, strict=True)] for us in rows]

    def _failed(self, name: str, error: Exception, ok: bool | None = False) -> None:
        text = str(error).strip().partition("\n")[0]
        text = re.sub(r"\([^()]*[\\/]([^()\\/]+:\d+)\)", r"(\1)", text)  # files without folders
        self.facts.append(Fact(name, ok, text if text else type(error).__name__))

    def differentiate(self) -> bool:
        """Tell whether there is a gradient at all, and where it is not finite."""
        try:
            self._gradients = pull_back(self._f, self._xs, self._us)
        except Exception as error:
            self._failed("rule", error)
            return False
        for i, path in enumerate(self._problem.paths):
            if not all(np.isfinite(g[i]).all() for g in self._gradients):
                place = first_place(self._f, self._xs, self._us)
                text = f"the gradient of `{path}` is not finite{place}"
                self.facts.append(Fact("finite", False, text))
        if not all(np.isfinite(numbers(y)).all() for y in self._ys):
            text = f"left out where it is not finite{first_place(self._f, self._xs)}"
            self.facts.append(Fact("value", None, text))
        return True

    def agreement(self, order: int) -> None:
        """Compare the gradient with both judges, argument by argument."""
        f, plain = self._f, self._problem.plain
        with self._precise():
            for level in range(1, order + 1):
                try:
                    self._agreement(level, f, plain)
                except Exception as error:
                    self._failed(f"order {level}", error)
                    return
                f, plain = self._derivative(f), plain and self._derivative(plain)

    def _derivative(self, f: Callable[..., Any]) -> Callable[..., Any]:
        def derivative(*xs: Any) -> Any:
            ys, pull_back = jax.vjp(f, *xs)
            return list(pull_back(like(random(ys, 1, self._seed)[0], ys)))

        return derivative

    def _agreement(self, level: int, f: Callable[..., Any], plain: Any) -> None:
        xs, paths, us = self._point, self._problem.paths, self._upstreams(f(*self._point))
        declared, ordinary = pull_back(f, xs, us), None
        if plain is not None:
            with contextlib.suppress(Exception):
                ordinary = pull_back(plain, xs, us)
        studies = []
        for i, x in enumerate(xs):
            # Equal for arrays of equal shape, so that a swapped pair shows.
            rows = basis([x]) if self._full else random([x], self._count, self._seed + _OTHER)
            vs = [v for (v,) in rows]
            studies.append(Study(f, xs, i, us, vs, declared, ordinary, self._tolerance))
        for i, (path, s) in enumerate(zip(paths, studies, strict=True)):
            others = {p: o for p, o in zip(paths, studies, strict=True) if p != path}
            note, precision = "", None
            if not s.ok:
                note = s.mistake(others) if self._exact else s.difference()
            elif s.differences is not None and (s.autodiff or 0) > self._tolerance:
                note = "plain autodiff differs"
            elif s.differences is s.autodiff is None:
                note = "not judged: finite differences are too noisy here"
            if self._double and level == 1:
                precision = ratio(pair(self._gradients, i, s.vs) - s.declared, s.scale)
                if s.ok and precision > self._native:
                    note = note or "imprecise in its own dtype"
            errors = (s.differences, s.autodiff, precision)
            self.rows.append(
                Row(level, path, self._types[i], *errors, s.ok or not self._exact, note)
            )

    def linearity(self, required: bool) -> None:
        """Tell whether the gradient is a linear function of the upstream."""
        finite = [np.isfinite(numbers(y)) for y in self._ys]
        rows = random(self._ys, 2, self._seed)
        a, b = ([u * ok for u, ok in zip(us, finite, strict=True)] for us in rows)
        sums = [u + v for u, v in zip(a, b, strict=True)]
        with self._precise():
            try:
                points = (a, b, sums, [1000 * u for u in a], [0 * u for u in a])
                results = pull_back(self._f, self._point, points)
            except Exception as error:
                self._failed("linear", error, None)
                return
        flat = [np.concatenate([np.zeros(1), *map(np.ravel, r)]) for r in results]
        of_a, of_b, of_sum, of_1000, of_zero = flat
        small = self._tolerance * (np.linalg.norm(of_a) + np.linalg.norm(of_b))
        text = ""
        if not np.isfinite(flat).all():
            text = "unknown: the gradient is not finite"
        elif np.linalg.norm(of_zero) > small:
            text = "no: grad(0) is not 0"
            if np.linalg.norm(of_a - of_zero) <= small:
                text = "no: the rule ignores dy; did you forget to multiply by it?"
        elif np.linalg.norm(of_sum - of_a - of_b) > small:
            text = "no: grad(dy1 + dy2) is not grad(dy1) + grad(dy2)"
        elif np.linalg.norm(of_1000 / 1000 - of_a) > small:
            text = "no: grad(1000 dy) is not 1000 grad(dy)"
        self.facts.append(Fact("linear", not text if required else None, text or "yes"))

    def forward_mode(self) -> None:
        """Compare forward mode with reverse mode."""
        with self._precise():
            try:
                (vs,) = random(self._point, 1, self._seed + _OTHER)
                _, tangents = jax.jvp(self._f, tuple(self._point), tuple(like(vs, self._point)))
                gradients = pull_back(self._f, self._point, self._us)
            except Exception as error:
                self._failed("forward mode", error)
                return
        reverse = sum(pair(gradients, i, [v])[:, 0] for i, v in enumerate(vs))
        forward = [sum(map(dot, us, map(numbers, tangents))) for us in self._us]
        self._compare("forward mode", [(np.array(forward), reverse)], self._tolerance)

    def transformed(self, name: str) -> None:
        """Compare the value and the gradient with those under a transformation."""

        def both(xs: Any, us: Any) -> Any:
            ys, pull_back = jax.vjp(self._f, *xs)
            return ys, pull_back(us)

        xs, us = [jnp.asarray(x) for x in self._xs], like(self._us[0], self._ys)
        points = [(xs, us), ([x * jnp.asarray(1 + 2**-6, x.dtype) for x in xs], [-u for u in us])]
        try:
            if name == "jit":
                results, points = [jax.jit(both)(*points[0])], points[:1]
            else:
                batch = jax.vmap(both)(*jax.tree.map(lambda a, b: jnp.stack([a, b]), *points))
                results = [jax.tree.map(lambda leaf, k=k: leaf[k], batch) for k in range(2)]
        except NeedsValuesError as error:
            self._failed(name, error, None)
        except Exception as error:
            self._failed(name, error)
        else:
            pairs = [
                pair
                for got, point in zip(results, points, strict=True)
                for pair in zip(jax.tree.leaves(got), jax.tree.leaves(both(*point)), strict=True)
            ]
            self._compare(name, pairs, self._native)

    def _compare(self, name: str, pairs: Sequence[tuple[Any, Any]], tolerance: float) -> None:
        error = max((distance(a, b) for a, b in pairs), default=0.0)
        ok = bool(error <= tolerance)
        text = f"agrees with the rule run eagerly, {error:.1e}"
        self.facts.append(Fact(name, ok, text if ok else text.replace("agrees", "disagrees")))


def _has_array(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return any(isinstance(v, (jax.Array, np.ndarray)) and spec(v).differentiable for v in leaves)


@contextlib.contextmanager
def _double_precision() -> Iterator[None]:
    enable = getattr(jax, "enable_x64", None)
    if enable is None:  # before JAX 0.8
        from jax.experimental import enable_x64 as enable
    with enable(True), jax.numpy_dtype_promotion("standard"):
        yield
