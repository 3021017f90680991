"""What a case can ask for, and the two that answer: JAX with this package, and TensorFlow.

A case calls methods of the `Backend` that it is given, in the mode that the backend was made
for: "eager", or "graph", where the function and its gradient are compiled as one (`jax.jit`;
`tf.function` around the tape). `Backend.plain` turns an answer into JSON.
"""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tfgrad_jax

MODES = ("eager", "graph")


class Backend:
    """A framework in a mode.

    Both subclasses have every operation on arrays (`b.sin`), and
    - `custom`, `recompute_grad`, `grad_pass_through`, `stop_gradient`: what is compared;
    - `run(f, *xs)`: `f(*xs)`, compiled if the mode says so;
    - `gradient_of(f)`: the function that computes the gradients of the sum of `f`; to be nested;
    - `grads(f, *xs, variables, wrt, upstream)`: `[y, gradients]` of `f(*xs, *variables)`.
      `variables` become trainable `tf.Variable`s for `f` to close over; for JAX they are arrays
      that are differentiated. `wrt` are the positions of the `xs` that are watched, by default
      all; the gradients are those of the watched ones, then of the variables;
    - `jvp`, `jacobian`, `compile`.
    """

    is_jax = False
    operations: dict[str, Callable[..., Any]]  # that are named otherwise
    library: Any

    def __init__(self, mode):
        self.mode = mode
        self.notes: list[Any] = []
        self.raised: Exception | None = None

    def __getattr__(self, operation):
        return self.operations.get(operation) or getattr(self.library, operation)

    def note(self, *what):
        """Keep something that a case saw on its way; `notes` is part of its answer."""
        self.notes.append(list(what) if len(what) > 1 else what[0])

    def error(self, thunk):
        """Return the type of exception that `thunk` raises, or what it returns."""
        try:
            return thunk()
        except Exception as error:
            self.raised = error
            return {"raises": type(error).__name__}

    def plain(self, answer):
        """Turn an answer into JSON: arrays become their dtype, shape and values."""
        if answer is None or isinstance(answer, bool | int | str):
            return answer
        if isinstance(answer, dict):
            return {str(k): self.plain(v) for k, v in answer.items()}
        if isinstance(answer, list | tuple):
            return [self.plain(v) for v in answer]
        return plain_array(np.float32(answer) if type(answer) is float else self.to_numpy(answer))

    def declared(self, f, *xs, **options):
        """Decorate `f`; return its value and its gradients."""
        return self.grads(self.custom(f), *xs, **options)

    def derivatives(self, f, x, order):
        """Return the derivatives of the sum of `f` at `x`, of order 0 (`y`) to `order`."""
        functions = [f]
        for _ in range(order):
            functions.append(self.gradient_of(functions[-1]))
        return [self.run(function, x) for function in functions]


def plain_array(value):
    """Return an array as JSON; complex numbers as pairs, what JSON lacks as strings."""
    value = wide = np.asarray(value)
    if value.dtype.kind == "c":
        wide = np.stack([value.real, value.imag], -1)
    if value.dtype.kind not in "biu":
        wide = wide.astype(np.float64)
    return {"dtype": value.dtype.name, "shape": list(value.shape), "value": _json(wide.tolist())}


def _json(value):
    if isinstance(value, list):
        return [_json(v) for v in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


def _one(gradients):
    return gradients[0] if len(gradients) == 1 else list(gradients)


IN_JAX = {
    "custom": tfgrad_jax.custom_gradient,
    "recompute_grad": tfgrad_jax.recompute_grad,
    "grad_pass_through": tfgrad_jax.grad_pass_through,
    "stop_gradient": jax.lax.stop_gradient,
    "constant": jnp.asarray,
    "cast": lambda x, dtype: jnp.asarray(x).astype(dtype),
    "complex": jax.lax.complex,
    "gather": lambda x, indices: jnp.take(x, jnp.asarray(indices), axis=0),
    "cond": lambda p, yes, no: jax.lax.cond(p, lambda: yes(), lambda: no()),
    "vectorized_map": lambda f, x: jax.vmap(f)(x),
    "compile": jax.jit,
}


class Jax(Backend):
    """JAX, with this package in the place of TensorFlow's functions."""

    is_jax = True
    jax, library = jax, jnp
    to_numpy = staticmethod(np.asarray)
    operations = IN_JAX

    @contextlib.contextmanager
    def settings(self, double):
        """Run a case as a user would: promotion is what JAX does by default."""
        with (
            jax.numpy_rank_promotion("allow"),
            jax.numpy_dtype_promotion("standard"),
            jax.enable_x64(double),
            warnings.catch_warnings(),  # TensorFlow has no such warning
        ):
            warnings.filterwarnings("ignore", ".* returned None, which means no gradient")
            yield

    def run(self, f, *xs):
        return (jax.jit(f) if self.mode == "graph" else f)(*jax.tree.map(jnp.asarray, xs))

    def gradient_of(self, f):
        return lambda *xs: self._value_and_gradients(f, xs)[1]

    def _value_and_gradients(self, f, xs, upstream=None):
        def ones(leaf):
            if jnp.issubdtype(leaf.dtype, jnp.inexact):
                return jnp.ones_like(leaf)
            return np.zeros(leaf.shape, jax.dtypes.float0)

        y, pull_back = jax.vjp(f, *xs)
        gradients = pull_back(jax.tree.map(ones, y) if upstream is None else upstream)
        # Of integers they are float0, which TensorFlow reports as None.
        connected = lambda g: None if g.dtype == jax.dtypes.float0 else g  # noqa: E731
        return [y, _one(jax.tree.map(connected, gradients))]

    def grads(self, f, *xs, variables=(), wrt=None, upstream=None):
        watched = list(range(len(xs)) if wrt is None else wrt)
        watched += range(len(xs), len(xs) + len(variables))

        def answer(xs, upstream):
            def of_watched(*moved):
                given = dict(zip(watched, moved, strict=True))
                return f(*(given.get(i, x) for i, x in enumerate(xs)))

            return self._value_and_gradients(of_watched, [xs[i] for i in watched], upstream)

        return self.run(answer, (*xs, *variables), upstream)

    def jvp(self, f, xs, tangents):
        return list(self.run(lambda *both: jax.jvp(f, *both), tuple(xs), tuple(tangents)))

    def jacobian(self, f, x):
        return self.run(jax.jacrev(f), x)


class TensorFlow(Backend):
    """TensorFlow itself, for the recorded answers and for the live comparison."""

    def __init__(self, mode):
        super().__init__(mode)
        import tensorflow as tf

        self.tf = self.library = tf
        self.operations = {
            "custom": tf.custom_gradient,
            "sum": tf.reduce_sum,
            "compile": tf.function,
        } | {name: getattr(tf.math, name) for name in ("log", "conj", "real", "imag")}

    def to_numpy(self, value):
        if isinstance(value, self.tf.IndexedSlices):
            value = self.tf.convert_to_tensor(value)
        return value.numpy() if hasattr(value, "numpy") else np.asarray(value)

    def constant(self, value, dtype=None):
        if isinstance(value, self.tf.Tensor):
            return value
        if isinstance(value, np.ndarray | np.generic):
            return self.tf.constant(value)
        return self.tf.constant(value, dtype)

    def settings(self, double):
        return contextlib.nullcontext()

    def run(self, f, *xs):
        xs = self.tf.nest.map_structure(self.constant, xs)
        return (f if self.mode == "eager" else self.tf.function(f, autograph=False))(*xs)

    def gradient_of(self, f):
        def gradient(*xs):
            with self.tf.GradientTape() as tape:
                tape.watch(xs)
                y = f(*xs)
            return None if y is None else _one(tape.gradient(y, list(xs)))

        return gradient

    def grads(self, f, *xs, variables=(), wrt=None, upstream=None):
        kept = [self.tf.Variable(v) for v in variables]
        watched = list(range(len(xs)) if wrt is None else wrt)
        if upstream is not None:
            upstream = self.tf.nest.map_structure(self.constant, upstream)

        def answer(*xs):
            with self.tf.GradientTape() as tape:
                floats = self.tf.nest.flatten([xs[i] for i in watched])
                tape.watch([x for x in floats if x.dtype.is_floating or x.dtype.is_complex])
                y = f(*xs, *kept)
            sources = [xs[i] for i in watched] + kept
            return [y, _one(tape.gradient(y, sources, output_gradients=upstream))]

        return self.run(answer, *xs)

    def jvp(self, f, xs, tangents):
        def answer(xs, tangents):
            with self.tf.autodiff.ForwardAccumulator(list(xs), list(tangents)) as accumulator:
                y = f(*xs)
            return [y, self.tf.nest.map_structure(accumulator.jvp, y)]

        return self.run(answer, tuple(xs), tuple(tangents))

    def jacobian(self, f, x):
        def answer(x):
            with self.tf.GradientTape() as tape:
                tape.watch(x)
                y = f(x)
            return tape.jacobian(y, x)

        return self.run(answer, x)
