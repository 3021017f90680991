"""What JAX's own decorators and two of its libraries do, as `docs/why.md` says it.

The same function goes through each of them: value `w x**2` at w = 3, x = 2, with the declared
derivatives `7 w x` for `x` and, where this can be told, `5 x**2` for the captured `w`. Forward
rules call the function itself, as JAX's documentation does.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tfgrad_jax import custom_gradient

pytestmark = pytest.mark.nightly
PAGE = Path(__file__).parents[1] / "docs" / "why.md"


class Declared(NamedTuple):
    """What a peer is told: a value, its slope, and whether the rule reads the function's own `y`.

    A forward rule calls the function itself, unless `reads` is what it calls instead.
    """

    value: Callable[[Any], Any]
    slope: Callable[[Any, Any], Any]  # of the input and `y`
    reads: Callable[[Any], Any] | None = None


def by_jax_custom_gradient(of, decorator=jax.custom_gradient):
    @decorator
    def f(x):
        y = of.value(x)
        return y, lambda dy: dy * of.slope(x, y if of.reads else f(x))

    return f


def by_jax_custom_vjp(of):
    f = jax.custom_vjp(of.value)
    y = of.reads or f
    f.defvjp(lambda x: (y(x), (x, y(x))), lambda kept, dy: (dy * of.slope(*kept),))
    return f


def by_jax_custom_jvp(of):
    f = jax.custom_jvp(of.value)

    @f.defjvp
    def _(primals, tangents):
        y = (of.reads or f)(*primals)
        return y, of.slope(*primals, y) * tangents[0]

    return f


def by_equinox(of):
    f = eqx.filter_custom_vjp(of.value)
    y = of.reads or f
    f.def_fwd(lambda perturbed, x: (y(x), y(x)))
    f.def_bwd(lambda kept, dy, perturbed, x: dy * of.slope(x, kept))
    return f


def by_nnx(of):
    f = nnx.custom_vjp(of.value)
    y = of.reads or f
    # The first of the upstreams are those of the modules among the inputs.
    f.defvjp(lambda x: (y(x), (x, y(x))), lambda kept, dys: (dys[1] * of.slope(*kept),))
    return f


def square(w):
    return Declared(lambda x: w * x**2, lambda x, y: 7 * w * x)


def of_tfgrad_jax(w):
    @custom_gradient
    def f(x):
        def grad(dy, variables):
            return 7 * dy * w * x, [5 * dy * x**2 for _ in variables]

        return w * x**2, grad

    return f


MAKERS = {
    "`jax.custom_gradient`": by_jax_custom_gradient,
    "`jax.custom_vjp`": by_jax_custom_vjp,
    "`jax.custom_jvp`": by_jax_custom_jvp,
    "`equinox.filter_custom_vjp`": by_equinox,
    "`flax.nnx.custom_vjp`": by_nnx,
}
PEERS = {name: lambda w, make=make: make(square(w)) for name, make in MAKERS.items()}
PEERS["`tfgrad_jax`"] = of_tfgrad_jax

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
    text = PAGE.read_text().partition(f"## {heading}")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    header, _, *rows = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}


# --- a rule that reads `y`: a rounding, whose derivative is declared to be twice its value --------


def reading(make):
    return lambda reads=None: make(Declared(lambda x: jnp.round(x), lambda x, y: 2 * y, reads))


READ_Y = {name: reading(make) for name, make in MAKERS.items()}
READ_Y["`tfgrad_jax`"] = reading(lambda of: by_jax_custom_gradient(of, custom_gradient))
AT = jnp.float32(2.7)
USES_OF_Y = {
    "first derivative": lambda of: jax.grad(of(jnp.round))(AT),
    "second derivative": lambda of: jax.grad(jax.grad(of(jnp.round)))(AT),
    "second derivative, the rule calls the function": lambda of: jax.grad(jax.grad(of()))(AT),
}


TABLES = {
    "Closed-over values": (PEERS, USES),
    "Python numbers": (PEERS, USES_OF_NUMBERS),
    "A rule that reads its value": (READ_Y, USES_OF_Y),
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
    # JAX's flag changes the names of errors, and one number to an error.
    if getattr(jax.config, "jax_custom_vjp3", False):
        old, new = "CustomVJPException", "UnexpectedTracerError"
        measured = {use: cell.replace(old, new) for use, cell in measured.items()}
        written = {use: cell.replace(old, new) for use, cell in written.items()}
        if uses is USES_OF_NUMBERS:
            written = {u: "`TypeError`" if cell == "0" else cell for u, cell in written.items()}
    assert measured == written
