"""Train a network of binary units on real handwritten digits.

Each hidden unit of this network outputs -1 or +1. The derivative of `sign` is zero, so plain
gradient descent never changes the weights before a sign: only the last layer learns. `binary` is
the same sign with the derivative of tanh declared as its gradient, and then every layer learns.
The script trains both networks from the same weights on the same batches:

    python examples/train_digits.py
    python examples/train_digits.py --steps 2000 --batch 256 --seed 1 --out digits.png

It prints the accuracy of both on images that neither was trained on, and writes a figure. The
images, 1,797 digits of 8 x 8 pixels, come with scikit-learn.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

from tfgrad_jax import custom_gradient

HIDDEN = (256, 256, 256)
CLASSES = 10
LEARNING_RATE = 3e-3
NOISE = 0.3  # added to the pixels in training, against overfitting
TEST_SHARE = 0.25
SURROGATE, PLAIN = "surrogate gradient", "plain jnp.sign"

Activation = Callable[[jax.Array], jax.Array]
Params = list[tuple[jax.Array, jax.Array]]  # the weights and biases of each layer


@custom_gradient
def binary(x: jax.Array):
    """Return the sign of x, with the gradient of tanh, which is not zero where sign is flat."""

    def grad(dy: jax.Array) -> jax.Array:
        return dy * (1 - jnp.tanh(x) ** 2)

    return jnp.sign(x), grad


class Digits(NamedTuple):
    """Images and their labels."""

    images: jax.Array  # float32[n, 64], each pixel in [-1, 1]
    labels: jax.Array  # int32[n]


class Run(NamedTuple):
    """A trained network, and the history of its training."""

    params: Params
    losses: np.ndarray  # the training loss at each step
    evaluated: np.ndarray  # the steps after which it was tested, ...
    accuracies: np.ndarray  # ... and the test accuracy after each
    moved: float  # distance of the hidden weights from their start, relative to its norm
    hidden: np.ndarray  # float32[test, 256]: the last hidden layer on the test images
    predicted: np.ndarray  # int32[test]


def load(seed: int) -> tuple[Digits, Digits]:
    """Return the images to train on and those to test on, with equal shares of each digit."""
    pixels, labels = map(np.asarray, load_digits(return_X_y=True))  # pixels from 0 to 16
    images = (pixels / 8 - 1).astype(np.float32)
    split = train_test_split(
        images, labels, test_size=TEST_SHARE, stratify=labels, random_state=seed
    )
    train_images, test_images, train_labels, test_labels = map(jnp.asarray, split)
    return Digits(train_images, train_labels), Digits(test_images, test_labels)


def initialize(key: jax.Array, sizes: Sequence[int]) -> Params:
    """Draw weights that keep the pre-activations of binary units at variance one."""
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        (jax.random.normal(k, (n, m)) / np.sqrt(n), jnp.zeros(m))
        for k, n, m in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def forward(
    activation: Activation, params: Params, images: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the logits, and the last hidden layer they are read from."""
    *hidden, (weights, biases) = params
    x = images
    for w, b in hidden:
        x = activation(x @ w + b)
    return x @ weights + biases, x


def train(
    name: str, activation: Activation, data: Digits, test: Digits, steps: int, batch: int, seed: int
) -> Run:
    """Train a network; the seed determines its initial weights and its batches."""
    init_key, batch_key = jax.random.split(jax.random.key(seed))
    start = params = initialize(init_key, (data.images.shape[1], *HIDDEN, CLASSES))
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps))
    state = optimizer.init(params)

    def loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits, _ = forward(activation, params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def step(params: Params, state: optax.OptState, data: Digits, key: jax.Array):
        choice_key, noise_key = jax.random.split(key)
        chosen = jax.random.choice(choice_key, len(data.labels), (batch,), replace=False)
        images, labels = data.images[chosen], data.labels[chosen]
        images += NOISE * jax.random.normal(noise_key, images.shape)
        value, gradients = jax.value_and_grad(loss)(params, images, labels)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    @jax.jit
    def predict(params: Params, images: jax.Array):
        logits, hidden = forward(activation, params, images)
        return logits.argmax(axis=-1), hidden

    # Compile both before the bar starts, which estimates the remaining time from the steps so far.
    first = step(params, state, data, jax.random.fold_in(batch_key, 0))
    jax.block_until_ready((first, predict(params, test.images)))

    losses, evaluated, accuracies = [], [], []
    every = max(1, steps // 100)
    progress = Progress(range(1, steps + 1), desc=f"{name:<{len(SURROGATE)}}")
    for i in progress:
        params, state, value = step(params, state, data, jax.random.fold_in(batch_key, i))
        losses.append(value)
        if i % every == 0 or i == steps:
            predicted, _ = predict(params, test.images)
            evaluated.append(i)
            accuracies.append(float((predicted == test.labels).mean()))
            progress.set_postfix_str(f"test accuracy {accuracies[-1]:.1%}", refresh=False)

    predicted, hidden = predict(params, test.images)
    return Run(
        params,
        np.asarray(losses),
        np.asarray(evaluated),
        np.asarray(accuracies),
        moved=_distance(start[:-1], params[:-1]),
        hidden=np.asarray(hidden),
        predicted=np.asarray(predicted),
    )


class Progress(tqdm):
    """A progress bar on a terminal; in a log file, a line every ten seconds.

    The first step, which compiles, is no part of the estimate of the time that remains.
    """

    def __init__(self, steps: Iterable[int], **options: Any) -> None:
        self.is_log = not sys.stderr.isatty()
        if self.is_log:
            options |= {"mininterval": 10, "maxinterval": 10, "ncols": 0, "leave": False}
        super().__init__(steps, unit="step", **options)

    def update(self, n: float | None = 1) -> bool | None:
        if self.n == self.initial and n == 1:
            self.n = self.last_print_n = self.initial = self.initial + 1
            self.start_t = self.last_print_t = time.time()
            return None
        return super().update(n)

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        if not self.is_log:
            return super().display(msg, pos)
        if msg is None and self.n > self.initial:  # an empty message would clear a bar
            print(self, file=sys.stderr, flush=True)
        return False

    def close(self) -> None:
        if self.is_log and not self.disable:
            self.display()
        super().close()


def _distance(start: Params, end: Params) -> float:
    before, after = ravel_pytree(start)[0], ravel_pytree(end)[0]
    return float(jnp.linalg.norm(after - before) / jnp.linalg.norm(before))


# --- the figure ---------------------------------------------------------------------------------

COLORS = {SURROGATE: "#1f5fa8", PLAIN: "#c8752b"}
WRONG = "#c1272d"


def draw(runs: dict[str, Run], test: Digits) -> Figure:
    """Draw the activation, the learning curves, and one test image of each digit."""
    figure = Figure(figsize=(11, 6.2), layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=[1, 0.9]).ravel()
    _draw_curves(above, runs)
    _draw_digits(below, runs, test)
    return figure


def _draw_curves(figure: SubFigure, runs: dict[str, Run]) -> None:
    activation, loss, accuracy = figure.subplots(1, 3)
    x = jnp.linspace(-3, 3, 601)
    activation.plot(x, binary(x), color="0.25", label="sign(x)")
    activation.plot(
        x, jax.vmap(jax.grad(binary))(x), color=COLORS[SURROGATE], label="its declared gradient"
    )
    activation.plot(
        x, jax.vmap(jax.grad(jnp.sign))(x), color=COLORS[PLAIN], label="its own gradient"
    )
    activation.set(title="a binary unit", xlabel="x", xlim=(-3.2, 3.8), yticks=(-1, 0, 1))
    for name, run in runs.items():
        steps = np.arange(1, len(run.losses) + 1)
        window = min(20, len(steps))
        mean = np.convolve(run.losses, np.full(window, 1 / window), mode="valid")
        loss.semilogy(steps, run.losses, color=COLORS[name], lw=0.6, alpha=0.3)
        loss.semilogy(steps[window - 1 :], mean, color=COLORS[name], label=name)
        label = f"{name}: {run.accuracies[-1]:.1%}"
        accuracy.plot(run.evaluated, 100 * run.accuracies, color=COLORS[name], label=label)
    loss.set(title="training loss", xlabel="step")
    accuracy.set(title="test accuracy (%)", xlabel="step", ylim=(None, 100.5))
    activation.legend(loc="lower right", fontsize="small", frameon=False, handlelength=1.2)
    loss.legend(loc="upper right", fontsize="small", frameon=False)
    accuracy.legend(loc="lower right", fontsize="small", frameon=False)
    for axes in (activation, loss, accuracy):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.93")


def _draw_digits(figure: SubFigure, runs: dict[str, Run], test: Digits) -> None:
    """Draw the first test image of each digit: chosen by label, not by prediction."""
    labels = np.asarray(test.labels)
    chosen = [int(np.argmax(labels == digit)) for digit in range(CLASSES) if digit in labels]
    figure.suptitle(
        "the first test image of each digit, the 256 signs of the last hidden layer, "
        "and the digit that each network reads",
        fontsize="medium",
    )
    labelled = {**{f"read with the {name}": COLORS[name] for name in runs}, "wrong": WRONG}
    figure.legend(
        handles=[Patch(color=color, label=label) for label, color in labelled.items()],
        loc="outside lower center",
        ncols=len(labelled),
        fontsize="small",
        frameon=False,
    )
    images, codes = figure.subplots(2, len(chosen))
    for image, code, i in zip(images, codes, chosen, strict=True):
        image.imshow(test.images[i].reshape(8, 8), cmap="gray_r")
        code.imshow(runs[SURROGATE].hidden[i].reshape(16, 16), cmap="gray_r", vmin=-1, vmax=1)
        for axes in (image, code):
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_color("0.7")
        for position, (name, run) in enumerate(runs.items()):
            right = run.predicted[i] == labels[i]
            code.text(
                *(0.25 + 0.5 * position, -0.08, str(run.predicted[i])),
                color=COLORS[name] if right else WRONG,
                fontsize=15,
                fontweight="normal" if right else "bold",
                ha="center",
                va="top",
                transform=code.transAxes,
            )


# --- the command --------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or end with a message that says what is wrong with it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--steps", type=whole_number(1), default=1000, help="number of training steps (%(default)s)"
    )
    parser.add_argument(
        "--batch", type=whole_number(1), default=128, help="images per step (%(default)s)"
    )
    parser.add_argument(
        "--seed",
        type=whole_number(0, 2**31 - 1),
        default=0,
        help="of split, weights and batches (%(default)s)",
    )
    parser.add_argument("--out", type=_figure, default="digits.png", help="figure (%(default)s)")
    options = parser.parse_args(argv)
    options.data, options.test = load(options.seed)
    available = len(options.data.labels)
    if options.batch > available:
        parser.error(
            f"argument --batch: there are {available} images to train on, fewer than the "
            f"{options.batch} wanted in each batch"
        )
    return options


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a parser of whole numbers within bounds."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"expected a whole number {bounds}, got {text!r}")
        return number

    return parse


def _figure(text: str) -> Path:
    """Read the path of a figure; raise before the training if it cannot be written."""
    path = Path(text)
    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        known = ", ".join(sorted(formats))
        raise argparse.ArgumentTypeError(f"{text!r} must end in one of the formats {known}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a directory")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {str(path.parent)!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"no permission to write {text!r}")
    return path


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    """Train both networks, print how they do, and write the figure."""
    options = parse(argv)
    data, test = options.data, options.test
    print(
        f"{len(data.labels)} images to train on, {len(test.labels)} to test on; hidden layers of "
        f"{', '.join(map(str, HIDDEN))} signs; {options.steps} steps of {options.batch} images"
    )
    runs = {
        name: train(name, activation, data, test, options.steps, options.batch, options.seed)
        for name, activation in {SURROGATE: binary, PLAIN: jnp.sign}.items()
    }
    print(f"{'':<20}{'test accuracy':>15}{'last 50 losses':>17}{'hidden weights moved by':>26}")
    for name, run in runs.items():
        loss = run.losses[-50:].mean()
        print(f"{name:<20}{run.accuracies[-1]:>15.1%}{loss:>17.4f}{run.moved:>26.0%}")
    draw(runs, test).savefig(options.out, dpi=110)
    print(f"wrote {options.out}")
    return runs


if __name__ == "__main__":
    main()
