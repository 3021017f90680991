"""Every kind of captured value under every transformation."""

import captures_by_libraries  # noqa: F401  (importing these registers their captures)
import captures_by_python  # noqa: F401
import captures_of_tracers  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from captures import CAPTURES
from uses_of_captures import TRANSFORMATIONS


def refusal(capture, transformation):
    """Return the error that JAX itself raises for this pair, if it does."""
    staged = transformation in STAGED or transformation == "cond"
    if capture in ("global_value", "class_attribute") and staged:
        # Where nothing is concrete, a tracer that a function finds in a global is not seen until
        # the trace ends, and JAX then says what it says of every such side effect.
        return pytest.raises(
            Exception, match=r"[Uu]nexpected tracer|closed-over value|No constant handler"
        )
    return None


STAGED = {
    *("jit_of_grad", "grad_of_jit", "jit_of_grad_weights_only", "jit_of_hessian", "checkpoint"),
    *("scan_with_the_weight_outside",),
}
# The fast suite: every capture under the first of these, every transformation over the second.
CORE_TRANSFORMATIONS = {"eager", "jit_of_grad"}
CORE_CAPTURES = {"one_scope", "declared"}

PAIRS = [
    pytest.param(
        capture,
        transformation,
        id=f"{capture}-{transformation}",
        marks=()
        if capture in CORE_CAPTURES or transformation in CORE_TRANSFORMATIONS
        else pytest.mark.slow,
    )
    for capture in CAPTURES
    for transformation in TRANSFORMATIONS
]


@pytest.mark.parametrize(("capture", "transformation"), PAIRS)
def test_capture(capture, transformation):
    build, expected = CAPTURES[capture]

    def loss(w, x):
        return build(jnp.asarray(w, jnp.float32))(jnp.asarray(x, jnp.float32)) ** 2

    if (refused := refusal(capture, transformation)) is not None:
        with refused:
            TRANSFORMATIONS[transformation](loss, expected)
        return
    got, wanted = TRANSFORMATIONS[transformation](loss, expected)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert g.dtype == jnp.float32
        np.testing.assert_allclose(g, np.broadcast_to(w, g.shape), rtol=1e-5)


def test_the_pairs_are_many():
    assert len(PAIRS) == len(CAPTURES) * len(TRANSFORMATIONS) > 750
    assert CAPTURES.keys() > CORE_CAPTURES
    assert TRANSFORMATIONS.keys() > CORE_TRANSFORMATIONS
