"""Forward and reverse mode over each other, to third order."""

import jax
import jax.numpy as jnp
import pytest
from mode_cases import compare, grads, loss, most_slow, some_cases, stacked

pytestmark = pytest.mark.slow


@most_slow
def test_forward_over_reverse(name):
    compare(name, lambda f, case: jax.jvp(grads(loss(f), case), case.args, case.tangents))


@most_slow
def test_reverse_over_forward(name):
    def product(f, case):
        return grads(lambda *a: jax.jvp(loss(f), a, case.tangents)[1], case)(*case.args)

    compare(name, product)


@most_slow
def test_forward_over_forward(name):
    def twice(f, case):
        def directional(*args):
            return jax.jvp(f, args, case.tangents)[1]

        return jax.jvp(directional, case.args, case.tangents)

    compare(name, twice)


@some_cases
def test_reverse_over_reverse(name):
    def product(f, case):
        def slope(*args):
            gradients, tangents = map(jax.tree.leaves, (grads(loss(f), case)(*args), case.tangents))
            return sum(jnp.sum(jnp.real(g * t)) for g, t in zip(gradients, tangents, strict=True))

        return grads(slope, case)(*case.args)

    compare(name, product)


@pytest.mark.parametrize(
    "name",
    [
        "elementwise",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("dense", "undeclared variables")),
    ],
)
def test_hessian(name):
    compare(name, lambda f, case: jax.hessian(loss(f), tuple(range(len(case.args))))(*case.args))


@pytest.mark.parametrize(
    "modes",
    [
        "ffr",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("fff", "frr", "rff", "rfr", "rrf")),
    ],
)
def test_third_derivative(modes):
    def third(f, case):
        for mode in reversed(modes):
            f = {"f": jax.jacfwd, "r": jax.jacrev}[mode](f)
        return f(jnp.float32(0.7))

    compare("scalar", lambda f, case: third(lambda x: f(x) ** 2, case))


@pytest.mark.slow
def test_jit_of_hessian():
    compare("dense", lambda f, case: jax.jit(jax.hessian(loss(f), (0, 1)))(*case.args))


@pytest.mark.slow
def test_vmap_of_hessian():
    compare("elementwise", lambda f, case: jax.vmap(jax.hessian(loss(f)))(stacked(case.args[0])))
