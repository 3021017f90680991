"""What captures are, and what is expected of them.

Each capture is a function of a weight `w` that returns a function of `x`, decorated somewhere
inside, which gets `w` from anywhere but its arguments. Its value is `a w x**2` and its rule
declares `b w x` for `x` and `c x**2` for `w`, where the ordinary derivatives would be `2 a w x`
and `a x**2`. The expected numbers follow from a, b and c by hand, at first and second order.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# --- what is expected ---------------------------------------------------------------------------


class Expected(NamedTuple):
    """Derivatives of `L = h**2` where `h` has value `a w x**2` and the declared `b w x`, `c x**2`.

    A declared derivative is ordinary code: its own derivatives are the ordinary ones.
    """

    a: float = 1.0
    b: float = 7.0
    c: float = 5.0

    def value(self, w: Any, x: Any) -> Any:
        return (self.a * w * x**2) ** 2

    def by_w(self, w: Any, x: Any) -> Any:
        return 2 * self.a * w * x**2 * self.c * x**2

    def by_x(self, w: Any, x: Any) -> Any:
        return 2 * self.a * w * x**2 * self.b * w * x

    def hessian(self, w: Any, x: Any) -> Any:
        a, b, c = self
        return (
            (2 * c**2 * x**4, (2 * b * c + 4 * a * c) * w * x**3),
            ((2 * b * c + 2 * a * b) * w * x**3, (2 * b**2 + 2 * a * b) * w**2 * x**2),
        )


class ExpectedResidual(NamedTuple):
    """The same where only the rule uses `w`: value `3 x**2`, declared `7 w x` for `x` alone."""

    by_w_of_rule: float = 1.0  # 0 where the rule treats w as a constant

    def value(self, w: Any, x: Any) -> Any:
        return (3 * x**2) ** 2 + 0 * w

    def by_w(self, w: Any, x: Any) -> Any:
        return 0 * w * x

    def by_x(self, w: Any, x: Any) -> Any:
        return 42 * w * x**3

    def hessian(self, w: Any, x: Any) -> Any:
        return (
            (0.0, 0.0),
            (42 * x**3 * self.by_w_of_rule, 98 * w**2 * x**2 + 42 * w * x**2),
        )


# --- captures: weight -> function of x ----------------------------------------------------------

CAPTURES: dict[str, tuple[Callable[[Any], Callable[[Any], Any]], Any]] = {}


def capture(expected: Any = Expected(), name: str = "") -> Callable[..., Any]:  # noqa: B008
    def register(build: Callable[..., Any]) -> Callable[..., Any]:
        CAPTURES[name or build.__name__] = build, expected
        return build

    return register


def like(variables: Any, gradient: Any) -> Any:
    """Give every variable, of whatever shape, the same gradient in each of its elements."""
    return jax.tree.map(lambda v: jnp.broadcast_to(gradient, jnp.shape(v)), variables)


# Elements add up to 1, so that the derivatives with respect to `w` add up as well.
W_PARTS = np.array([[0.5, -0.25, 0.125], [0.25, 0.125, -0.5]], np.float32)
B_PARTS = np.array([0.25, 0.5], np.float32)


def of_both(w, x):
    def grad(dy, variables):
        return 7 * dy * w * x, [5 * dy * x**2 for _ in variables]

    return w * x**2, grad
