"""Programs x transformations: each derivative of each program, in, under and over what JAX has.

The transformations of `ways.py` leave the value as it is, so the oracle is differentiated plainly.
"""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same, sample
from jax import lax
from programs import PROGRAMS
from ways import FORWARD, REVERSE, SECOND, gradient, hessian


def in_while(derivative):
    def of(loss):
        def run(*args):
            def body(state):
                return state[0] + 1, derivative(loss)(*args)

            start = jax.tree.map(jnp.zeros_like, jax.eval_shape(derivative(loss), *args))
            return lax.while_loop(lambda state: state[0] < 2, body, (0, start))[1]

        return run

    return of


def in_custom_vjp(loss):
    """A hand-written rule around it, which multiplies what JAX's pullback gives."""
    h = jax.custom_vjp(loss)
    h.defvjp(lambda *args: jax.vjp(loss, *args), lambda pull, dy: pull(dy))
    return h


def under(setting, derivative):
    def of(loss):
        def run(*args):
            with setting():
                return jax.jit(derivative(loss))(*args)

        return run

    return of


SETTINGS = {
    "disable_jit": jax.disable_jit,
    "check_tracer_leaks": jax.check_tracer_leaks,
    "enable_checks": lambda: jax.enable_checks(True),
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_key_reuse": lambda: jax.debug_key_reuse(True),
    "x64": lambda: jax.enable_x64(True),
}


def _one(args):
    return jax.tree.map(lambda a: a[None], args)


INSIDE = {
    "switch": lambda loss: lambda *args: lax.switch(1, [lambda *_: jnp.float32(0), loss], *args),
    "map": lambda loss: lambda *a: lax.map(lambda a: loss(*a), _one(a))[0],
    "fori_loop": lambda loss: lambda *args: lax.fori_loop(0, 2, lambda _, c: loss(*args), 0.0),
    "checkpoint that saves nothing": lambda loss: jax.checkpoint(
        loss, policy=jax.checkpoint_policies.nothing_saveable
    ),
    "checkpoint of scan": lambda loss: jax.checkpoint(
        lambda *args: lax.scan(lambda c, _: (c + loss(*args), None), 0.0, None, length=1)[0]
    ),
    "scan of checkpoint": lambda loss: lambda *args: lax.scan(
        lambda c, _: (c + jax.checkpoint(loss)(*args), None), 0.0, None, length=1
    )[0],
    "jit(vmap(jit))": lambda loss: jax.jit(
        lambda *a: jax.vmap(jax.jit(loss))(*_one(a))[0]
    ),
}  # fmt: skip
DERIVATIVES = {"grad": gradient, "jacfwd": FORWARD["jacfwd"], "hessian": hessian}
MORE = {
    f"{n}({k})": lambda loss, d=d, f=f: d(f(loss))
    for n, d in DERIVATIVES.items()
    for k, f in INSIDE.items()
}
for name, derivative in DERIVATIVES.items():
    MORE |= {
        f"while({name})": in_while(derivative),
    } | {f"{k}({name})": under(setting, derivative) for k, setting in SETTINGS.items()}
MORE["grad(custom_vjp)"] = lambda loss: gradient(in_custom_vjp(loss))
WAYS = {**REVERSE, **FORWARD, **SECOND, **MORE}


def is_second(way):
    return way in SECOND or "hessian" in way


def check(name, way):
    loss, oracle, args = PROGRAMS[name]
    if way == "grad of grad":  # of scalars alone
        loss, oracle = (
            lambda s, f=f, args=args: f(*jax.tree.map(lambda a: s * a, args))
            for f in (loss, oracle)
        )
        args = (jnp.float32(1.1),)
    expected = (hessian if is_second(way) else gradient)(oracle)(*args)
    assert_same(WAYS[way](loss)(*args), expected, rtol=1e-3, atol=1e-3)


SOME = ["grad", "jvp", "jit(grad)", "grad(vmap)", "jacfwd of constants", "hessian(jit)"]
TWO = ["undeclared", "two inputs"]
EVERY = [(n, w) for n in PROGRAMS for w in WAYS]
CORE = [(n, w) for n in TWO for w in MORE]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program(name):
    for way in SOME:
        check(name, way)


@pytest.mark.parametrize(("name", "way"), [*CORE, *sample(EVERY, 20)])
def test_every_transformation(name, way):
    check(name, way)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_value(name):
    """Eagerly, compiled, mapped, and by its shape alone."""
    loss, oracle, args = PROGRAMS[name]
    expected = oracle(*args)
    two = jax.tree.map(lambda a: jnp.stack([a, a]), args)
    assert_same((loss(*args), jax.jit(loss)(*args)), (expected, expected))
    assert_same(jax.jit(jax.vmap(loss))(*two), jnp.stack([expected, expected]))
    assert jax.eval_shape(loss, *args).dtype == expected.dtype
