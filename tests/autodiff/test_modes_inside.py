"""Both modes, and one over the other, inside `scan`, `cond`, `checkpoint` and `map`."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from mode_cases import compare, grads, jvp, loss, some_cases, stacked

pytestmark = pytest.mark.deep


def _scan(f):
    def scanned(*args):
        def body(carry, _):
            y = f(*jax.tree.map(lambda a: a * carry.astype(a.dtype), args))
            return carry + 0.25 * loss(lambda: y)() / (1 + loss(lambda: y)()), y

        return lax.scan(body, jnp.float32(1), None, length=3)

    return scanned


def _cond(f):
    return lambda *args: lax.cond(
        jnp.real(jax.tree.leaves(args)[0]).ravel()[0] > 0,
        f,
        lambda *a: jax.tree.map(jnp.zeros_like, f(*a)),
        *args,
    )


INSIDE = {
    "scan": _scan,
    "cond": _cond,
    "checkpoint": jax.checkpoint,
    "map": lambda f: lambda *args: lax.map(lambda a: f(*a), stacked(args)),
    "while": lambda f: lambda *args: lax.fori_loop(0, 2, lambda _, c: f(*args), f(*args)),
}


@pytest.mark.parametrize("inside", INSIDE)
@some_cases
def test_jvp_inside(name, inside):
    compare(name, lambda f, case: jvp(INSIDE[inside](f), case))


@pytest.mark.parametrize("inside", ["scan", "cond", "checkpoint", "map"])
@pytest.mark.parametrize(
    "name", ["elementwise", pytest.param("undeclared variables", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("order", ["grad", "forward over reverse", "reverse over forward"])
def test_higher_orders_inside(name, inside, order):
    def transformed(f, case):
        value = loss(INSIDE[inside](f))
        if order == "grad":
            return grads(value, case)(*case.args)
        if order == "forward over reverse":
            return jax.jvp(grads(value, case), case.args, case.tangents)
        return grads(lambda *a: jax.jvp(value, a, case.tangents)[1], case)(*case.args)

    compare(name, transformed)


@pytest.mark.parametrize(
    "modes", ["rr", *(pytest.param(m, marks=pytest.mark.slow) for m in ("rf", "ff"))]
)
def test_other_ways_to_a_hessian_inside_a_scan(modes):
    jacobians = [{"f": jax.jacfwd, "r": jax.jacrev}[mode] for mode in modes]

    def hessian(f, case):
        return jacobians[0](jacobians[1](loss(_scan(f))))(*case.args)

    compare("scalar", hessian)
