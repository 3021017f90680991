"""Which cases run under which transformations: one of each kind, and all in the slow tests."""

import pytest
from loss_cases import CASES

cases = pytest.mark.parametrize("case", CASES, ids=str)

# One case for each way that a call can take; under most transformations the others are slow tests.
REPRESENTATIVE = {"pytree", "traced rule", "nested", "closes over parameters"}


def products(transformations, always=(), slow=()):
    """Pair the cases with transformations, of which some run always and some in the slow tests."""
    return pytest.mark.parametrize(
        ("case", "transformation"),
        [
            pytest.param(
                case,
                t,
                id=f"{case}-{t}",
                marks=()
                if t in always or (case.name in REPRESENTATIVE and t not in slow)
                else pytest.mark.slow,
            )
            for case in CASES
            for t in transformations
        ],
    )


some_cases = pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=str(c), marks=() if c.name in REPRESENTATIVE else pytest.mark.slow)
        for c in CASES
    ],
)
