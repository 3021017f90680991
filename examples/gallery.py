"""Twenty-one custom gradients from papers and libraries, in one list, `GALLERY`.

`docs/gallery` shows each with its code and a picture: after a change here, run
`python docs/_ext/gallery.py`. The tests check the same list. `python examples/gallery.py` prints
the reports of `check_gradient`.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tfgrad_jax import custom_gradient
from tfgrad_jax.testing import GradientReport, check_gradient

# --- the derivative, computed better -------------------------------------------------------------


@custom_gradient
def log1pexp(x):
    y = jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
    return y, lambda dy: dy * jnp.exp(-log1pexp(-x))  # the sigmoid of x


@custom_gradient
def swish(x):
    def grad(dy):
        s = jax.nn.sigmoid(x)  # recomputed: only x is kept
        return dy * s * (1 + x * (1 - s))

    return x * jax.nn.sigmoid(x), grad


@custom_gradient
def safe_norm(x):
    y = jnp.sqrt(jnp.sum(x**2))

    def grad(dy):
        return dy * x / jnp.where(y > 0, y, 1)  # zero at zero

    return y, grad


@custom_gradient
def cross_entropy(logits, label):
    p = jax.nn.softmax(logits)

    def grad(dy):
        return dy * (p - jax.nn.one_hot(label, p.size, dtype=p.dtype))

    return -jax.nn.log_softmax(logits)[label], grad


@custom_gradient
def lennard_jones(r):
    attraction = r**-6
    energy = 4 * (attraction**2 - attraction)
    force = 24 * (2 * attraction**2 - attraction) / r  # the simulator returns both
    return energy, lambda dy: -dy * force


@custom_gradient
def lambert_w(x):
    def newton(_, w):
        e = jnp.exp(w)
        return w - (w * e - x) / (e * (1 + w))

    w = jax.lax.fori_loop(0, 20, newton, jnp.log1p(x))
    return w, lambda dy: dy / (jnp.exp(lambert_w(x)) * (1 + lambert_w(x)))


@custom_gradient
def kepler(mean, eccentricity):
    def newton(_, a):
        return a - (a - eccentricity * jnp.sin(a) - mean) / (1 - eccentricity * jnp.cos(a))

    anomaly = jax.lax.fori_loop(0, 30, newton, mean + eccentricity * jnp.sin(mean))

    def grad(dy):
        a = kepler(mean, eccentricity)
        dx = dy / (1 - eccentricity * jnp.cos(a))
        return dx, dx * jnp.sin(a)

    return anomaly, grad


@custom_gradient
def mixture_sample(mean, uniform):
    """Sample from N(-1, 1)/2 + N(mean, 1)/2 by bisection of its distribution function."""

    def cdf(z):
        return (jax.scipy.stats.norm.cdf(z, -1) + jax.scipy.stats.norm.cdf(z, mean)) / 2

    def bisect(_, ends):
        middle = sum(ends) / 2
        below = cdf(middle) < uniform
        return jnp.where(below, middle, ends[0]), jnp.where(below, ends[1], middle)

    z = sum(jax.lax.fori_loop(0, 60, bisect, (mean * 0 - 9, mean * 0 + 9))) / 2

    def grad(dy):
        ours, theirs = jax.scipy.stats.norm.pdf(z, mean), jax.scipy.stats.norm.pdf(z, -1)
        return dy * ours / (ours + theirs), dy * 2 / (ours + theirs)

    return z, grad


@custom_gradient
def sparsemax(z):
    ordered = jnp.sort(z)[::-1]
    sums, count = jnp.cumsum(ordered), jnp.arange(1, z.size + 1)
    k = jnp.sum(1 + count * ordered > sums)
    p = jnp.maximum(z - (sums[k - 1] - 1) / k, 0)

    def grad(dy):
        support = p > 0
        return jnp.where(support, dy - jnp.sum(dy * support) / k, 0)

    return p, grad


@custom_gradient
def clipped_relu(x, bound):
    def grad(dy):
        dx = jnp.where((x > 0) & (x < bound), dy, 0)
        return dx, jnp.sum(jnp.where(x >= bound, dy, 0))

    return jnp.clip(x, 0, bound), grad


@custom_gradient
def projections(image):
    """Sum an image along its columns and rows, outside of JAX: a scanner with two angles."""
    m, n = image.shape

    def outside(f, shape, x):
        y = jax.ShapeDtypeStruct(shape, x.dtype)
        return jax.pure_callback(f, y, jax.lax.stop_gradient(x), vmap_method="sequential")

    @custom_gradient
    def smear(sums):
        y = outside(lambda s: np.add.outer(s[n:], s[:n]), (m, n), sums)
        return y, lambda dy: projections(dy)

    return outside(lambda i: np.concatenate([i.sum(0), i.sum(1)]), (n + m,), image), smear


# --- not the derivative, on purpose --------------------------------------------------------------


@custom_gradient
def round_straight_through(x):
    return jnp.round(x), lambda dy: dy


@custom_gradient
def binarize(x):
    return jnp.where(x >= 0, 1.0, -1.0), lambda dy: jnp.where(jnp.abs(x) <= 1, dy, 0)


@custom_gradient
def spike(potential):
    fired = (potential > 0).astype(potential.dtype)
    return fired, lambda dy: dy / (1 + 10 * jnp.abs(potential)) ** 2


@custom_gradient
def quantize(x, step, *, bits=3):
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    scaled = x / step
    rounded = jnp.round(jnp.clip(scaled, low, high))

    def grad(dy):
        inside = (scaled > low) & (scaled < high)
        per_entry = jnp.where(inside, rounded - scaled, rounded)
        return jnp.where(inside, dy, 0), jnp.sum(dy * per_entry) / (x.size * high) ** 0.5

    return rounded * step, grad


@custom_gradient
def hard_argmax(logits):
    choice = jax.nn.one_hot(jnp.argmax(logits), logits.size, dtype=logits.dtype)
    _, pull_back = jax.vjp(jax.nn.softmax, logits)
    return choice, lambda dy: pull_back(dy)[0]


@custom_gradient
def cheapest(costs, *, smoothing=1.0):
    """Return the solution of a combinatorial solver: here, which of the options costs least."""

    def solve(costs):
        return jax.nn.one_hot(jnp.argmin(costs), costs.size, dtype=costs.dtype)

    y = solve(costs)
    return y, lambda dy: (solve(costs + smoothing * dy) - y) / smoothing


@custom_gradient
def reverse_gradient(x):
    return x, lambda dy: -dy


@custom_gradient
def clip_gradient_norm(x):
    def grad(dy):
        return dy / jnp.sqrt(jnp.maximum(jnp.sum(dy**2), 1))

    return x, grad


@custom_gradient
def guided_relu(x):
    return jnp.maximum(x, 0), lambda dy: jnp.where((x > 0) & (dy > 0), dy, 0)


@custom_gradient
def lower_bound(x):
    """Return max(x, 1). Below 1, gradients that move x up still pass."""
    return jnp.maximum(x, 1), lambda dy: jnp.where((x >= 1) | (dy < 0), dy, 0)


# --- the list ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of the gallery.

    Args:
        f: the decorated function.
        title: its heading on the site.
        source: who published it.
        about: why it is useful, in a sentence or two (Markdown).
        point: the arguments at which `check_gradient` checks it.
        surrogate: whether the gradient deliberately differs from the derivative.
        curve: the scalar function that the picture shows; `f` itself if it is one.
        over: the ends of the horizontal axis.
        upstreams: instead of a curve and its gradient, the gradient for each of these upstreams.
        of_upstream: the horizontal axis is the upstream, at the input 0.
    """

    f: Callable[..., Any]
    title: str
    source: str
    about: str
    point: tuple[Any, ...]
    surrogate: bool = False
    curve: Callable[..., Any] | None = None
    over: tuple[float, float] = (-3.0, 3.0)
    upstreams: tuple[float, ...] = ()
    of_upstream: bool = False

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.f.__name__

    @property
    def code(self) -> str:
        """The code of the function, decorator included."""
        return inspect.getsource(self.f).strip()

    def check(self) -> GradientReport:
        """Return the report of `check_gradient`."""
        expect = "surrogate" if self.surrogate else "exact"
        return check_gradient(self.f, *self.point, expect=expect)

    def lines(self) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the data of the picture: the horizontal axis, and each line by its label."""
        x = jnp.linspace(*self.over, 601)

        def gradient(x: jax.Array, dy: Any) -> jax.Array:
            return jax.vjp(self.curve or self.f, x)[1](jnp.asarray(dy, x.dtype))[0]

        if self.of_upstream:
            zeros = jnp.zeros_like(x)
            return x, {"upstream": x, "gradient": jax.vmap(gradient)(zeros, x)}
        if self.upstreams:
            labels = {f"gradient, upstream {dy:+g}": dy for dy in self.upstreams}
            values = {"value": jax.vmap(self.curve or self.f)(x)}
            return x, values | {
                label: jax.vmap(lambda x, dy=dy: gradient(x, dy))(x) for label, dy in labels.items()
            }
        y = jax.vmap(self.curve or self.f)(x)
        return x, {"value": y, "gradient": jax.vmap(lambda x: gradient(x, 1.0))(x)}


X = jnp.array([-1.3, 0.4, 2.2])
GALLERY = [
    Entry(
        log1pexp,
        "Softplus that does not overflow",
        "The example of TensorFlow's documentation of `tf.custom_gradient`",
        r"Autodiff of $\log(1 + e^x)$ divides infinity by infinity from $x = 89$ on. The rule "
        "calls the function, so higher derivatives are precise, too: the second at 20 is 2.06e-9. "
        "With `dy * jax.nn.sigmoid(x)` it would be 0: JAX computes the derivative of a sigmoid "
        "$s$ as $s (1 - s)$, and $s$ rounds to 1.",
        (X,),
    ),
    Entry(
        swish,
        "Swish that keeps only its input",
        "Ramachandran, Zoph and Le, 2017; memory-efficient versions in EfficientNet code",
        "Autodiff keeps the input and the sigmoid; this rule keeps only the input and recomputes "
        "the sigmoid.",
        (X,),
        over=(-6, 6),
    ),
    Entry(
        safe_norm,
        "A norm that can be zero",
        "optax.safe_norm, and JAX's FAQ on `where` and gradients",
        r"Autodiff of $\sqrt{\sum x_i^2}$ is NaN at zero. The picture is the norm of $(x, 0.1)$.",
        (X,),
        curve=lambda x: safe_norm(jnp.array([1.0, 0.0]) * x + jnp.array([0.0, 0.1])),
        over=(-1, 1),
    ),
    Entry(
        cross_entropy,
        "Softmax and cross-entropy in one",
        "`SoftmaxCrossEntropyWithLogits` in TensorFlow, and fused-loss kernels since",
        r"The gradient is $\mathrm{softmax}(z) - e_k$: JAX differentiates no logarithm. The label, "
        "an integer, needs no gradient.",
        (X, jnp.int32(2)),
        curve=lambda x: cross_entropy(x * jnp.array([1.0, 0.0, 0.0]), 0),
        over=(-5, 5),
    ),
    Entry(
        lennard_jones,
        "An energy whose simulator returns the force",
        "Force matching; the interface of ASE, OpenMM and of most force fields",
        "Molecular simulators return energy and force together. The force is minus the gradient: "
        "JAX differentiates nothing. The simulator may be a library that JAX cannot trace.",
        (jnp.float32(1.3),),
        over=(0.98, 2.5),
    ),
    Entry(
        lambert_w,
        "The Lambert W function",
        "Corless, Gonnet, Hare, Jeffrey and Knuth, 1996",
        r"Newton's iteration solves $w e^w = x$; the rule is "
        r"$w' = 1 / (e^w (1 + w))$ and calls the function itself, so every derivative exists.",
        (jnp.array([0.3, 1.0, 5.0]),),
        over=(0, 6),
    ),
    Entry(
        kepler,
        "Kepler's equation, by the implicit function theorem",
        "The textbook example; jaxoplanet and exoplanet solve it the same way",
        r"An iteration solves $a - e \sin a = m$ for $a$. The rule differentiates the equation, so "
        "JAX stores no iteration.",
        (jnp.float32(0.9), jnp.float32(0.7)),
        curve=lambda m: kepler(m, 0.8),
        over=(-3.1, 3.1),
    ),
    Entry(
        mixture_sample,
        "A sample that is differentiated by its distribution",
        "Figurnov, Mohamed and Mnih, 2018 (implicit reparameterization)",
        r"A bisection has no useful derivative. With $F(z; \mu) = u$ held fixed, "
        r"$dz/d\mu = -(\partial F / \partial \mu) / p(z)$.",
        (jnp.float32(1.5), jnp.float32(0.6)),
        curve=lambda mean: mixture_sample(mean, jnp.float32(0.6)),
        over=(-3, 4),
    ),
    Entry(
        sparsemax,
        "Sparsemax",
        "Martins and Astudillo, 2016",
        "The projection onto the simplex: many probabilities are exactly zero. The rule subtracts "
        "the mean over the support; JAX does not differentiate the sort.",
        (jnp.array([0.3, 0.5, -0.9]),),
        curve=lambda x: sparsemax(x * jnp.array([1.0, 0.0, 0.0]))[0],
        over=(-2, 2),
    ),
    Entry(
        clipped_relu,
        "A clipped ReLU that learns its bound",
        "Choi et al., 2018 (PACT)",
        "The bound gets the sum of the upstreams of the entries that it clips.",
        (X, jnp.float32(1.0)),
        curve=lambda x: clipped_relu(x, jnp.float32(1.5)),
    ),
    Entry(
        projections,
        "A projector outside of JAX and its adjoint",
        "Tomography libraries: ASTRA, TIGRE, ODL",
        "Each of the two operators is the rule of the other, so both modes work at every order. "
        "The picture is the squared misfit of scaled images.",
        (jnp.array([[0.2, 1.0, -0.5], [0.7, 0.1, 0.3]]),),
        curve=lambda t: jnp.sum((projections(t * jnp.eye(2)) - 1) ** 2),
        over=(-1, 3),
    ),
    Entry(
        round_straight_through,
        "The straight-through estimator",
        "Bengio, Léonard and Courville, 2013",
        "Rounding, with the gradient of the identity. `grad_pass_through(jnp.round)` is the same.",
        (X,),
        surrogate=True,
    ),
    Entry(
        binarize,
        "Binary units",
        "Courbariaux, Hubara, Soudry, El-Yaniv and Bengio, 2016",
        r"The sign, with the gradient of the identity where $|x| \le 1$.",
        (X,),
        surrogate=True,
    ),
    Entry(
        spike,
        "The spike of a neuron",
        "Zenke and Ganguli, 2018 (SuperSpike)",
        r"A step, with the gradient of the fast sigmoid, $1 / (1 + 10 |x|)^2$.",
        (X,),
        surrogate=True,
        over=(-1, 1),
    ),
    Entry(
        quantize,
        "Quantization with a learned step",
        "Esser et al., 2020 (LSQ)",
        "The weights get a straight-through gradient inside the range. The step has a gradient "
        "too: the picture shows a quantized weight of 1 and its gradient by the step.",
        (X, jnp.float32(0.7)),
        surrogate=True,
        curve=lambda step: quantize(jnp.float32(1.0), step),
        over=(0.15, 1.5),
    ),
    Entry(
        hard_argmax,
        "A choice with the gradient of a softmax",
        "Jang, Gu and Poole, 2017 (straight-through Gumbel-softmax)",
        "The forward pass takes one option; the backward pass differentiates a softmax over all.",
        (X,),
        surrogate=True,
        curve=lambda x: hard_argmax(x * jnp.array([1.0, 0.0]))[0],
    ),
    Entry(
        cheapest,
        "A combinatorial solver as a layer",
        "Pogančić, Paulus, Musil, Martius and Rolínek, 2020",
        "The rule solves again, with costs shifted along the upstream, and takes the difference. "
        "It is not linear in the upstream.",
        (jnp.array([0.3, 0.5, 0.9]),),
        surrogate=True,
        curve=lambda x: cheapest(jnp.array([1.0, 0.0]) * x)[0],
        over=(-2, 2),
    ),
    Entry(
        reverse_gradient,
        "Gradient reversal",
        "Ganin and Lempitsky, 2015",
        "The identity, with the sign of its gradient flipped: the layers below learn to confuse "
        "the layers above.",
        (X,),
        surrogate=True,
    ),
    Entry(
        clip_gradient_norm,
        "Clipping the gradient in the middle of a network",
        "Pascanu, Mikolov and Bengio, 2013",
        "The identity, with its gradient clipped to norm one. The picture is over the upstream.",
        (X,),
        surrogate=True,
        of_upstream=True,
    ),
    Entry(
        guided_relu,
        "Guided backpropagation",
        "Springenberg, Dosovitskiy, Brox and Riedmiller, 2015",
        "A ReLU that passes back only positive gradients, to show what a network responds to.",
        (X,),
        surrogate=True,
        upstreams=(1.0, -1.0),
    ),
    Entry(
        lower_bound,
        "A lower bound that a parameter can leave",
        "Ballé et al., 2018; `lower_bound` of TensorFlow Compression",
        "The derivative of `max(x, 1)` is zero below 1, so a parameter that gets there stays. "
        "This rule passes the gradients that move it up.",
        (X,),
        surrogate=True,
        over=(-1, 3),
        upstreams=(1.0, -1.0),
    ),
]

if __name__ == "__main__":
    for entry in GALLERY:
        print(f"{entry.title} ({entry.source})\n{entry.check()}\n")
