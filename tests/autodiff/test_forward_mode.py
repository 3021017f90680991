"""Forward mode from the same rule as reverse mode, over the cases of `mode_cases.py`."""

import jax
import pytest
from helpers import assert_same
from jax import export
from mode_cases import CASES, all_cases, compare, jvp, loss, most_slow, some_cases, stacked

pytestmark = pytest.mark.deep


@all_cases
def test_jvp(name):
    compare(name, jvp)


@all_cases
def test_reverse_mode(name):
    compare(
        name, lambda f, case: jax.value_and_grad(loss(f), tuple(range(len(case.args))))(*case.args)
    )


@most_slow
def test_linearize(name):
    def linearized(f, case):
        y, push = jax.linearize(f, *case.args)
        return y, push(*case.tangents), push(*jax.tree.map(lambda t: 2 * t, case.tangents))

    compare(name, linearized)


@some_cases
def test_jacobians_agree(name):
    case = CASES[name]
    argnums = tuple(range(len(case.args)))
    holomorphic = name == "complex"
    forward = jax.jacfwd(case.h, argnums, holomorphic=holomorphic)(*case.args)
    reverse = jax.jacrev(case.h, argnums, holomorphic=holomorphic)(*case.args)
    assert_same(forward, reverse)
    compare(name, lambda f, c: jax.jacfwd(f, argnums, holomorphic=holomorphic)(*c.args))


@some_cases
def test_jit(name):
    compare(name, lambda f, case: jax.jit(lambda a, t: jax.jvp(f, a, t))(case.args, case.tangents))


@some_cases
def test_jvp_of_jit(name):
    compare(name, lambda f, case: jax.jvp(jax.jit(f), case.args, case.tangents))


@some_cases
def test_transpose_of_jvp(name):
    # Reverse mode of a function is the transpose of its forward mode.
    case = CASES[name]
    y, push = jax.linearize(case.h, *case.args)
    ct = jax.tree.map(lambda y: 3 * y + 1, y)
    transposed = jax.linear_transpose(push, *case.args)(ct)
    assert_same(transposed, jax.vjp(case.h, *case.args)[1](ct))


@some_cases
def test_vmap_of_jvp(name):
    def pushed(f, case):
        return jax.vmap(lambda a, t: jax.jvp(f, a, t))(stacked(case.args), stacked(case.tangents))

    compare(name, pushed)


@some_cases
def test_jvp_of_vmap(name):
    def pushed(f, case):
        return jax.jvp(jax.vmap(f), stacked(case.args), stacked(case.tangents))

    compare(name, pushed)


@some_cases
def test_vmap_of_tangents_alone(name):
    def pushed(f, case):
        return jax.vmap(lambda t: jax.jvp(f, case.args, t)[1])(stacked(case.tangents))

    compare(name, pushed)


@some_cases
def test_one_argument_of_several(name):
    def first_only(f, case):
        leaves, treedef = jax.tree.flatten(case.args)

        def of_first(x):
            return f(*jax.tree.unflatten(treedef, [x, *leaves[1:]]))

        return jax.jvp(of_first, (leaves[0],), (leaves[0] * 2,))

    compare(name, first_only)


@some_cases
def test_export(name):
    def exported(f, case):
        program = jax.jit(lambda a, t: jax.jvp(f, a, t))
        data = export.export(program)(case.args, case.tangents).serialize()
        return export.deserialize(data).call(case.args, case.tangents)

    compare(name, exported)
