"""The spike of a neuron: a step forward, a fast sigmoid backward (Zenke and Ganguli, 2018)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tfgrad_jax import custom_gradient


def original(tf: Any) -> Callable[..., Any]:
    """Return TensorFlow's code."""

    @tf.custom_gradient
    def spike(potential):
        def grad(upstream):
            return upstream / tf.square(1.0 + 10.0 * tf.abs(potential))

        return tf.cast(potential > 0.0, potential.dtype), grad

    return spike


@custom_gradient
def spike(potential):
    def grad(upstream):
        return upstream / jnp.square(1.0 + 10.0 * jnp.abs(potential))

    return (potential > 0).astype(potential.dtype), grad


def simulate(currents, spike=spike):
    """Return the spikes of a leaky neuron that fires at 1 and is then reset."""

    def step(potential, current):
        potential = 0.9 * potential + current
        fired = spike(potential - 1.0)
        return potential - fired, fired

    return jax.lax.scan(step, jnp.zeros_like(currents[0]), currents)[1]


if __name__ == "__main__":
    currents = jnp.array([0.6, 0.7, 0.1, 0.9])
    print(simulate(currents), jax.grad(lambda c: simulate(c).sum())(currents))
