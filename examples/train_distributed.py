"""Train the digits network of `train_digits.py` on several processes, machines or accelerators.

Each step splits its batch over all devices of all processes. Every device has all the weights,
or a shard of them (`--shard`: fully sharded data parallelism). Every hidden layer closes over its
own weights: the rule in `layer` returns their gradients, and XLA sums these over the devices.
Several processes give the result of one process, up to rounding.

On one machine this starts the processes, one for each GPU if there are any:

    python examples/train_distributed.py --processes 2 --out run

On several, start one process on each with the same command, and say which process it is:

    JAX_COORDINATOR_ADDRESS=10.0.0.1:1234 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 \
        python examples/train_distributed.py --out /shared/run

Checkpoints go to `--out`, a directory that all processes see. If a process dies, the others end
within a minute. The same command with `--resume` continues from the last checkpoint, also with
another number of processes. Each step depends only on the seed and the number of the step, so the
result equals an uninterrupted run.
"""

import argparse
import functools
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from train_digits import (
    CLASSES,
    HIDDEN,
    LEARNING_RATE,
    NOISE,
    Digits,
    Params,
    Progress,
    binary,
    initialize,
    load,
    whole_number,
)

from tfgrad_jax import custom_gradient

HEARTBEAT = 20  # seconds without a sign of life after which a process counts as dead
EXPLAINED = 2  # the exit status of a process that has said why it ends, as in argparse
PATIENCE = 5  # seconds that processes get to exit on their own after one has failed
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
AGAIN = "Start all processes again with --resume to continue from the last checkpoint."


class State(NamedTuple):
    """What a step changes, and what a checkpoint holds."""

    params: Params
    optimizer: optax.OptState


# --- the network --------------------------------------------------------------------------------


def layer(w: jax.Array, b: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """Return a layer of binary units, with a rule for the weights that it closes over."""

    @custom_gradient(variables=(w, b))
    def units(x: jax.Array):
        y, surrogate = jax.vjp(binary, x @ w + b)

        def grad(dy: jax.Array, variables: Any):
            (dz,) = surrogate(dy)
            return dz @ w.T, (x.T @ dz, dz.sum(0))

        return y, grad

    return units


def forward(params: Params, images: jax.Array, whole: NamedSharding) -> jax.Array:
    """Return the logits. Weights that are split over the devices are gathered layer by layer."""
    *hidden, (weights, biases) = params
    x = images
    for pair in hidden:
        x = layer(*jax.lax.with_sharding_constraint(pair, whole))(x)
    return x @ weights + biases


# --- the training -------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> float:
    """Train on all devices of all processes, and return the accuracy on the test images."""
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    parts: Any = load(options.seed)
    data, test = (jax.tree.map(np.asarray, part) for part in parts)
    if options.batch > len(data.labels) or options.batch % devices:
        stop(
            f"argument --batch: expected a multiple of {devices}, the number of devices, and at "
            f"most {len(data.labels)}, the images to train on; got {options.batch}"
        )
    init_key, noise_key = jax.random.split(jax.random.key(options.seed))
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, options.steps))

    def start() -> State:
        params = initialize(init_key, (data.images.shape[1], *HIDDEN, CLASSES))
        return State(params, optimizer.init(params))

    def place(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        divisible = leaf.ndim > 0 and leaf.shape[0] % devices == 0
        return split if options.shard and divisible else whole

    def batch(step: int) -> Digits:
        """Return the images of a step. Each process reads only those of its own devices."""
        random = np.random.default_rng((options.seed, step))
        chosen = random.choice(len(data.labels), options.batch, replace=False)

        def read(array: Any) -> jax.Array:
            shape = (options.batch, *array.shape[1:])
            return jax.make_array_from_callback(shape, split, lambda rows: array[chosen[rows[0]]])

        return Digits(*map(read, data))

    def loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = forward(params, images, whole)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    shardings = jax.tree.map(place, jax.eval_shape(start))

    @functools.partial(jax.jit, out_shardings=(shardings, whole))
    def advance(state: State, data: Digits, step: int) -> tuple[State, jax.Array]:
        noise = jax.random.normal(jax.random.fold_in(noise_key, step), data.images.shape)
        images = data.images + NOISE * noise
        value, gradients = jax.value_and_grad(loss)(state.params, images, data.labels)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer)
        params: Any = optax.apply_updates(state.params, updates)
        return State(params, optimizer_state), value

    @functools.partial(jax.jit, out_shardings=whole)
    def accuracy(params: Params) -> jax.Array:
        predicted = forward(params, test.images, whole).argmax(axis=-1)
        return (predicted == test.labels).mean()

    state = jax.jit(start, out_shardings=shardings)()
    with ocp.CheckpointManager(
        options.out.absolute(),
        options=ocp.CheckpointManagerOptions(
            save_interval_steps=options.save_every, max_to_keep=2, enable_async_checkpointing=False
        ),
    ) as manager:
        first, state = restore(manager, options, state)
        progress = Progress(
            range(first + 1, options.steps + 1),
            initial=first,
            total=options.steps,
            disable=jax.process_index() > 0,
        )
        for step in progress:
            state, value = advance(state, batch(step), step)
            progress.set_postfix_str(f"loss {float(value):.4f}", refresh=False)
            content = ocp.args.Composite(
                state=ocp.args.StandardSave(state), settings=ocp.args.JsonSave(settings(options))
            )
            manager.save(step, args=content, force=step == options.steps)
            if manager.reached_preemption(step):  # SIGTERM: the manager has just saved
                stop(f"told to end: saved step {step}. {AGAIN}")
        result = float(accuracy(state.params))
    if jax.process_index() == 0:
        print(f"{options.steps} steps on {devices} devices: test accuracy {result:.1%}")
    return result


def settings(options: argparse.Namespace) -> dict[str, int]:
    """Return the options that are fixed when a run starts."""
    return {name: getattr(options, name) for name in ("steps", "batch", "seed")}


def restore(
    manager: ocp.CheckpointManager, options: argparse.Namespace, state: State
) -> tuple[int, State]:
    """Return the step of the last checkpoint and the state after it, placed as `state` is."""
    latest = manager.latest_step()
    if latest is None:
        return 0, state
    if not options.resume:
        stop(
            f"argument --out: {options.out} holds a run that is at step {latest}; "
            "continue it with --resume, or name another directory"
        )
    content = ocp.args.Composite(
        state=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, state)),
        settings=ocp.args.JsonRestore(),
    )
    found: Any = manager.restore(latest, args=content)
    if found.settings != settings(options):
        stop(
            f"argument --resume: the run in {options.out} was started with {found.settings}; "
            f"expected the same, got {settings(options)}"
        )
    if jax.process_index() == 0:
        print(f"resumed after step {latest}")
    return latest, found.state


# --- the processes ------------------------------------------------------------------------------


def stop(message: str) -> NoReturn:
    """Exit with one message. All processes call this."""
    if jax.process_index() == 0:
        print(message, file=sys.stderr)
    raise SystemExit(EXPLAINED)


def work(options: argparse.Namespace, address: str, count: int, own: int) -> float:
    """Train as one of several processes."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, count, own, heartbeat_timeout_seconds=HEARTBEAT)
    try:
        return train(options)
    except Exception as error:
        if not isinstance(error, jax.errors.JaxRuntimeError):
            traceback.print_exc()
        # Most likely another process died, and an orderly exit would wait for it.
        print(f"\nprocess {own} of {count} cannot go on: {error}\n{AGAIN}", file=sys.stderr)
        sys.stderr.flush()
        if own == 0:  # it runs the coordinator, which the others need until they have said the same
            time.sleep(PATIENCE / 2)
        os._exit(EXPLAINED)
    finally:
        jax.distributed.shutdown()


def launch(argv: Sequence[str], count: int) -> None:
    """Run the command in several processes of this machine. If one fails, end them all."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, *argv, "--processes", "1"],
            env=os.environ
            | dict(zip(VARIABLES, (address, str(count), str(i)), strict=True))
            | {"JAX_LOCAL_DEVICE_IDS": str(i)},  # its GPU, where there are any
        )
        for i in range(count)
    ]
    # Pass SIGTERM on to the processes, which save their state and exit.
    signal.signal(signal.SIGTERM, lambda *_: [process.terminate() for process in processes])
    try:
        while not any(process.poll() for process in processes):
            if all(process.returncode == 0 for process in processes):
                return
            time.sleep(0.1)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and None in [process.poll() for process in processes]:
            time.sleep(0.1)
        unexplained = [
            f"process {i} of {count} {_fate(process.returncode)}"
            for i, process in enumerate(processes)
            if process.returncode not in (0, EXPLAINED)
        ]
        if unexplained:
            print(*unexplained, AGAIN, sep="\n", file=sys.stderr)
        raise SystemExit(EXPLAINED)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _fate(status: int | None) -> str:
    if status is None:
        return "does not answer"
    return f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"


# --- the command --------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line and the environment, or end with what is wrong with them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    positive = whole_number(1)
    parser.add_argument("--processes", type=positive, default=1, help="to start here (%(default)s)")
    parser.add_argument("--shard", action="store_true", help="split the weights over the devices")
    parser.add_argument(
        "--steps", type=positive, default=1000, help="number of training steps (%(default)s)"
    )
    parser.add_argument("--batch", type=positive, default=128, help="images per step (%(default)s)")
    parser.add_argument(
        "--seed",
        type=whole_number(0, 2**31 - 1),
        default=0,
        help="of split, weights and batches (%(default)s)",
    )
    parser.add_argument(
        "--out", type=_directory, default="digits_run", help="for checkpoints (%(default)s)"
    )
    parser.add_argument(
        "--save-every", type=positive, default=100, help="number of steps (%(default)s)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the last checkpoint, if there is one"
    )
    options = parser.parse_args(argv)
    options.peers = _peers(parser)
    if options.peers and options.processes > 1:
        parser.error(
            f"argument --processes: starts processes on this machine alone; where {VARIABLES[0]} "
            "is set, each process is started by its own command"
        )
    return options


def _peers(parser: argparse.ArgumentParser) -> tuple[str, int, int] | None:
    """Return the coordinator's address, the number of processes and which of them this is."""
    given = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if not given:
        return None
    try:
        address, count, own = (given[name] for name in VARIABLES)
        return address, whole_number(1)(count), whole_number(0, int(count) - 1)(own)
    except KeyError as missing:
        parser.error(f"expected {', '.join(VARIABLES)} in the environment, or none; no {missing}")
    except argparse.ArgumentTypeError as error:
        parser.error(f"{VARIABLES[1]} and {VARIABLES[2]}: {error}")


def _directory(text: str) -> Path:
    """Read the path of a directory that may not exist yet."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a directory")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {str(path.parent)!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"no permission to write {text!r}")
    return path


def main(argv: Sequence[str] | None = None) -> None:
    """Train in this process, or in processes that it starts."""
    options = parse(argv)
    if options.processes > 1:
        launch(sys.argv[1:] if argv is None else argv, options.processes)
    elif options.peers:
        work(options, *options.peers)
    else:
        train(options)


if __name__ == "__main__":
    main()
