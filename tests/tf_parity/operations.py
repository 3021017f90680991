"""The tables of operations in the docs: TensorFlow's expressions beside ours, evaluated.

The pages are the tables. `record.py` keeps TensorFlow's answers in `operations.json`: the leaves
of the value, and the gradients of a weighted sum of them.
"""

import functools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .backend import plain_array

RECORDED = Path(__file__).with_name("operations.json")
DOCS = Path(__file__).parents[2] / "docs"
GUIDE, REFERENCE = DOCS / "from_tensorflow.md", DOCS / "from_tensorflow_reference.md"

Answer = list[list[dict[str, Any]]]


def rows(page: Path, heading: str) -> Iterator[list[str]]:
    """Yield the cells of each row of a table; of a cell that begins with code, the code alone."""
    section = re.search(rf"^## {heading}$.*?(?=^## |\Z)", page.read_text(), re.M | re.S)
    assert section
    for row in re.findall(r"^\| (`tf\..*) \|$", section[0], re.M):
        yield [re.sub(r"^`([^`]+)`.*", r"\1", cell.strip()) for cell in row.split(" | ")]


def inputs() -> dict[str, np.ndarray]:
    """Return the arrays that the reference page defines above its table."""
    code = re.search(r"^x = .*?(?=^```)", REFERENCE.read_text(), re.M | re.S)
    assert code
    names: dict[str, Any] = {}
    exec(code[0], {"np": np}, names)
    return names


def questions() -> dict[str, tuple[str, dict[str, np.ndarray]]]:
    """Return what TensorFlow is asked: an expression and its inputs, for each row."""
    names = inputs()
    tables = (GUIDE, "Same name, another meaning"), (REFERENCE, "Operations")
    asked = {row[0]: (row[0], names) for page, heading in tables for row in rows(page, heading)}
    for expression, _, x, *_ in rows(REFERENCE, "Gradients at edges"):
        asked[f"{expression} at {x}"] = expression, {"x": np.float32(x)}
    return asked


def _floats(expression: str, names: dict[str, np.ndarray]) -> list[str]:
    used = set(re.findall(r"(?<![\w.])\w+(?![\w=])", expression))
    return [name for name in names if name in used and names[name].dtype == np.float32]


def _weights(shape: Sequence[int]) -> np.ndarray:
    return np.cos(np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)


def _plain(leaves: Any, gradients: Any) -> Answer:
    """Return arrays as JSON; integers have 32 bits in JAX."""
    return [
        [
            plain_array(v) | {"dtype": np.asarray(v).dtype.name.replace("int64", "int32")}
            for v in part
        ]
        for part in (leaves, gradients)
    ]


def of_tensorflow(expression: str, names: dict[str, np.ndarray]) -> Answer:
    """Evaluate an expression of TensorFlow, and its gradients."""
    import tensorflow as tf

    tensors = {name: tf.constant(value) for name, value in names.items()}
    sources = [tensors[name] for name in _floats(expression, names)]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        y = tf.nest.flatten(eval(expression, {"tf": tf, "np": np, **tensors}))
        y = [tf.convert_to_tensor(leaf) for leaf in y]
        terms = [tf.reduce_sum(v * _weights(v.shape)) for v in y if v.dtype == tf.float32]
        loss = tf.add_n([tf.constant(0.0), *terms])
    gradients = tape.gradient(loss, sources, unconnected_gradients="zero")
    return _plain([v.numpy() for v in y], [tf.convert_to_tensor(g).numpy() for g in gradients])


def of_jax(expression: str, names: dict[str, np.ndarray]) -> Answer:
    """Evaluate an expression of JAX, and its gradients."""
    import flax.linen
    import jax
    import jax.numpy as jnp
    import optax

    known = {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "flax": flax}
    known |= {"functools": functools, **{k: jnp.asarray(v) for k, v in names.items()}}
    moved = _floats(expression, names)

    def loss(xs: list[Any]) -> Any:
        result = eval(expression, {**known, **dict(zip(moved, xs, strict=True))})
        leaves = [jnp.asarray(v) for v in jax.tree.leaves(result)]
        terms = [jnp.sum(v * _weights(v.shape)) for v in leaves if v.dtype == jnp.float32]
        return sum(terms, jnp.float32(0)), leaves

    gradients, leaves = jax.grad(loss, has_aux=True)([known[name] for name in moved])
    return _plain(leaves, gradients)


def record() -> None:
    """Ask TensorFlow for its answers again."""
    lines = []
    for name, question in sorted(questions().items()):
        text = json.dumps(of_tensorflow(*question))
        text = re.sub(r"\d\.\d{8,}(e-\d+)?", lambda n: f"{float(n[0]):.7g}", text)
        lines.append(f"  {json.dumps(name)}: {text}")
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
