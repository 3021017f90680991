"""What JAX's own decorators and two of its libraries do, as two pages say it.

The same function goes through each of them: value `w x**2` at w = 3, x = 2, with the declared
derivatives `7 w x` for `x` and, where this can be told, `5 x**2` for the captured `w`. Forward
rules call the function itself, as JAX's documentation does.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.nightly
PAGES = [Path(__file__).parents[1] / "docs" / name for name in ("why.md", "hijax.md")]


def of_jax_custom_gradient(w):
    @jax.custom_gradient
    def f(x):
        return w * x**2, lambda dy: 7 * dy * w * x

    return f


def of_jax_custom_vjp(w):
    @jax.custom_vjp
    def f(x):
        return w * x**2

    f.defvjp(lambda x: (f(x), x), lambda x, dy: (7 * dy * w * x,))
    return f


def of_jax_custom_jvp(w):
    @jax.custom_jvp
    def f(x):
        return w * x**2

    f.defjvp(lambda primals, tangents: (f(*primals), 7 * w * primals[0] * tangents[0]))
    return f


def of_equinox(w):
    @eqx.filter_custom_vjp
    def f(x):
        return w * x**2

    f.def_fwd(lambda perturbed, x: (f(x), None))
    f.def_bwd(lambda residuals, dy, perturbed, x: 7 * dy * w * x)
    return f


def of_nnx(w):
    @nnx.custom_vjp
    def f(x):
        return w * x**2

    def backward(x, dys):
        _, dy = dys  # the first are those of the modules among the inputs
        return (7 * dy * w * x,)

    f.defvjp(lambda x: (f(x), x), backward)
    return f


def of_tfgrad_jax(w):
    @custom_gradient
    def f(x):
        def grad(dy, variables):
            return 7 * dy * w * x, [5 * dy * x**2 for _ in variables]

        return w * x**2, grad

    return f


PEERS = {
    "`jax.custom_gradient`": of_jax_custom_gradient,
    "`jax.custom_vjp`": of_jax_custom_vjp,
    "`jax.custom_jvp`": of_jax_custom_jvp,
    "`equinox.filter_custom_vjp`": of_equinox,
    "`flax.nnx.custom_vjp`": of_nnx,
    "`tfgrad_jax`": of_tfgrad_jax,
}

Loss = Callable[[Any, Any], Any]
W, X = jnp.float32(3.0), jnp.float32(2.0)
WS = jnp.array([3.0, 1.0])


def scanned(loss: Loss) -> Any:
    def total(x):
        return jax.lax.scan(lambda w, _: (w, loss(w, x)), W, None, 2)[1].sum()

    return jax.grad(total)(X)


USES: dict[str, Callable[[Loss], Any]] = {
    "call it": lambda loss: loss(W, X),
    "`grad` by x, w a constant": lambda loss: jax.grad(lambda x: loss(W, x))(X),
    "`jit(grad)` by x, w an argument of the `jit`": lambda loss: jax.jit(jax.grad(loss, 1))(W, X),
    "`grad` by x, `vmap` over w": lambda loss: jax.vmap(jax.grad(loss, 1), (0, None))(WS, X),
    "`grad` by x, w the carry of a `scan`": scanned,
    "`grad` by w": lambda loss: jax.grad(loss)(W, X),
    "`grad` by w, the function in a `jit`": lambda loss: jax.grad(
        lambda w: jax.jit(lambda x: loss(w, x))(X)
    )(W),
    "`jit(grad)` by w and x": lambda loss: jax.jit(jax.grad(loss, (0, 1)))(W, X),
    "`hessian` of the square by w and x": lambda loss: jax.hessian(
        lambda w, x: loss(w, x) ** 2, (0, 1)
    )(W, X),
    "second derivative of the square by x, w a constant": lambda loss: jax.grad(
        jax.grad(lambda x: loss(W, x) ** 2)
    )(X),
}

USES_OF_NUMBERS = {
    "`grad` at `jnp.float32(2.0)`": lambda f: jax.grad(f)(X),
    "`grad` at `2.0`": lambda f: jax.grad(f)(2.0),
    "`jit(grad)` at `2.0`": lambda f: jax.jit(jax.grad(f))(2.0),
}
FLAGS = getattr(jax.config, "jax_custom_vjp3", False)


def outcome(use: Callable[[Any], Any], f: Any) -> str:
    """Return the numbers, or the error, as the tables write them."""
    try:
        result = use(f)
    except Exception as error:
        return f"`{type(error).__name__}`"
    numbers = [number for leaf in jax.tree.leaves(result) for number in jnp.ravel(leaf).tolist()]
    return ", ".join(f"{number:g}" for number in numbers)


def table(heading: str) -> dict[str, dict[str, str]]:
    """Read the table below a heading: use -> peer -> outcome."""
    pages = "".join(page.read_text() for page in PAGES)
    text = pages.partition(f"## {heading}")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    header, _, *rows = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}


# --- a rule that reads `y`: a rounding, whose derivative is declared to be twice its value --------


def gradient_reads_y(decorator):
    def of(y_of=None):
        @decorator
        def f(x):
            y = jnp.round(x)
            return y, lambda dy: dy * 2 * (y if y_of else f(x))

        return f

    return of


def vjp_reads_y(y_of=None):
    f = jax.custom_vjp(lambda x: jnp.round(x))
    y_of = y_of or f
    f.defvjp(lambda x: (y_of(x),) * 2, lambda y, dy: (dy * 2 * y,))
    return f


def jvp_reads_y(y_of=None):
    f = jax.custom_jvp(lambda x: jnp.round(x))
    y_of = y_of or f

    @f.defjvp
    def _(primals, tangents):
        y = y_of(*primals)
        return y, 2 * y * tangents[0]

    return f


def equinox_reads_y(y_of=None):
    f = eqx.filter_custom_vjp(lambda x: jnp.round(x))
    y_of = y_of or f
    f.def_fwd(lambda perturbed, x: (y_of(x),) * 2)
    f.def_bwd(lambda y, dy, perturbed, x: dy * 2 * y)
    return f


def nnx_reads_y(y_of=None):
    f = nnx.custom_vjp(lambda x: jnp.round(x))
    y_of = y_of or f
    f.defvjp(lambda x: (y_of(x),) * 2, lambda y, dys: (dys[1] * 2 * y,))
    return f


READ_Y = {
    "`jax.custom_gradient`": gradient_reads_y(jax.custom_gradient),
    "`jax.custom_vjp`": vjp_reads_y,
    "`jax.custom_jvp`": jvp_reads_y,
    "`equinox.filter_custom_vjp`": equinox_reads_y,
    "`flax.nnx.custom_vjp`": nnx_reads_y,
    "`tfgrad_jax`": gradient_reads_y(custom_gradient),
}
AT = jnp.float32(2.7)
USES_OF_Y = {
    "first derivative": lambda of: jax.grad(of(jnp.round))(AT),
    "second derivative": lambda of: jax.grad(jax.grad(of(jnp.round)))(AT),
    "second derivative, the rule calls the function": lambda of: jax.grad(jax.grad(of()))(AT),
}


# --- hijax primitives ----------------------------------------------------------------------------


def of_hijax(w, shift=0.0):
    """Write a primitive with `jvp` and `batch`, and derive the other rules from `jvp`."""
    hijax = pytest.importorskip("jax.experimental.hijax")
    if not hasattr(hijax, "vjp_from_jvp"):
        pytest.skip("this JAX derives no rules")

    class Square(hijax.HiPrim):
        def __init__(self, aval):
            self.in_avals, self.out_aval, self.params = (aval,), aval, {}
            super().__init__()

        def expand(self, x):
            return w * x**2

        def jvp(self, primals, tangents):
            return self(*primals), 7 * w * primals[0] * tangents[0] + shift

        lin, linearized = hijax.linearize_from_jvp
        vjp_fwd, vjp_bwd_retval = hijax.vjp_from_jvp

        def batch(self, _, args, dims):
            return type(self)(jax.typeof(args[0]))(*args), dims[0]

    def f(x):
        return f.primitive(jax.typeof(x))(x)

    f.primitive = Square
    return f


def of_hijax_without_deriving(w):
    f = of_hijax(w)

    class Square(f.primitive):
        def vjp_fwd(self, _, x):
            return self(x), x

        def vjp_bwd_retval(self, x, dy):
            return (7 * dy * w * x,)

        def lin(self, _, x):
            return self(x), x

        def linearized(self, x, t):
            return 7 * w * x * t

    f.primitive = Square
    return f


SEVENS = {
    "`jax.custom_vjp`": of_jax_custom_vjp,
    "hijax, every rule written": of_hijax_without_deriving,
    "hijax, rules from `jvp`": of_hijax,
    "`tfgrad_jax`": of_tfgrad_jax,
}
USES_OF_SEVEN = {
    "`grad`": lambda f: jax.grad(f)(X),
    "`jit(grad)`": lambda f: jax.jit(jax.grad(f))(X),
    "`grad` through a `scan`": lambda f: scanned(lambda _, x: f(x)),
    "`vmap(grad)`": lambda f: jax.vmap(jax.grad(f))(jnp.array([2.0, 3.0])),
    "`jvp`, tangent 1": lambda f: jax.jvp(f, (X,), (jnp.ones_like(X),)),
    "`linearize`, tangent 1": lambda f: jax.linearize(f, X)[1](jnp.ones_like(X)),
    "second derivative of the square": lambda f: jax.grad(jax.grad(lambda x: f(x) ** 2))(X),
    "`hessian` of the square": lambda f: jax.hessian(lambda x: f(x) ** 2)(X),
}


TABLES = {
    "Closed-over values": (PEERS, USES),
    "Python numbers": (PEERS, USES_OF_NUMBERS),
    "A rule that reads its value": (READ_Y, USES_OF_Y),
    "Hijax primitives": (SEVENS, USES_OF_SEVEN),
}


@pytest.mark.parametrize(
    ("heading", "peer"), [(heading, peer) for heading, (made, _) in TABLES.items() for peer in made]
)
def test_the_table_says_what_happens(heading, peer):
    peers, uses = TABLES[heading]
    rows = table(heading)
    assert list(rows) == list(uses)
    assert all(list(row) == list(peers) for row in rows.values())
    loss = lambda w, x: peers[peer](w)(x)  # noqa: E731
    f = loss if uses is USES else peers[peer] if uses is USES_OF_Y else peers[peer](1.0)
    measured = {use: outcome(run, f) for use, run in uses.items()}
    written = {use: row[peer] for use, row in rows.items()}
    if (
        FLAGS
    ):  # JAX's flag `jax_custom_vjp3` changes the names of errors, and one number to an error
        old, new = "CustomVJPException", "UnexpectedTracerError"
        measured = {use: cell.replace(old, new) for use, cell in measured.items()}
        written = {use: cell.replace(old, new) for use, cell in written.items()}
        if uses is USES_OF_NUMBERS:
            written = {u: "`TypeError`" if cell == "0" else cell for u, cell in written.items()}
    assert measured == written


def test_hijax_checks_neither_a_shift_nor_a_closed_over_value():
    """The page warns of these two: the numbers are wrong without an error."""
    shifted = of_hijax(1.0, shift=1.0)
    assert jax.grad(shifted)(X) == 14
    assert jax.jvp(shifted, (X,), (jnp.ones_like(X),))[1] == 15
    loss = lambda w: of_hijax(w)(X)  # noqa: E731
    assert outcome(lambda f: jax.grad(f)(W), loss) == "`UnexpectedTracerError`"
    assert outcome(lambda f: jax.jit(jax.grad(f))(W), loss) == "0"


def test_what_newer_rules_of_custom_vjp_need():
    """The page names a flag for `defremat`, an option for a shared output, and the logs."""
    f = jax.custom_vjp(lambda x: x**2)
    if not hasattr(jax.custom_vjp, "defremat"):
        pytest.skip("this JAX has no defremat")
    f.defvjp_with_logs(lambda x: (f(x), x), lambda x, dy: ((7 * dy * x,), {"dy": dy}))
    ((dx,), logs) = jax.vjp(f, X)[1].with_logs(jnp.float32(2.0))
    assert (dx, logs["dy"]) == (28, 2)

    f = jax.custom_vjp(lambda x: x**2)
    f.defremat(lambda x: (f(x), x), lambda x, _: (f(x), x), lambda x, dy: (7 * dy * x,))
    grad = outcome(lambda f: jax.grad(f)(X), f)
    assert grad == ("14" if FLAGS else "`NotImplementedError`")

    def shared(**options):
        f = jax.custom_vjp(lambda x, w: (w**2, x * w))
        f.defvjp(
            lambda x, w: (f(x, w), (x, w)),
            lambda xw, dys: (dys[1] * xw[1], 2 * dys[0] * xw[1] + dys[1] * xw[0]),
            **options,
        )
        total = lambda w: sum(map(jnp.sum, jax.vmap(f, (0, None), (None, 0))(WS, w)))  # noqa: E731
        return outcome(lambda total: jax.grad(total)(W), total)

    assert shared() == "`ValueError`"
    assert shared(generic_batching=True) == "10"  # 2 w, and the sum of WS
