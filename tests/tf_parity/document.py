"""Write the ports into docs/from_tensorflow.md: `python -m tests.tf_parity.document`.

The text between two comments there is made from `examples/ports`; a test compares the two.
"""

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "from_tensorflow.md"
PORTS = (
    "log1pexp", "gradient_reversal", "clip_gradient", "learned_quantization", "spike",
    "focal_loss", "fused_cross_entropy", "reversible_block", "matrix_sqrt", "binary_layer",
)  # fmt: skip


def rendered(text: str) -> str:
    """Return the page with the ports as they are."""
    begin, end = "<!-- ports: begin -->\n", "<!-- ports: end -->"
    before, rest = text.split(begin)
    return before + begin + "\n".join(map(_port, PORTS)) + end + rest.split(end)[1]


def _port(name: str) -> str:
    """Return a port as a section: what it is, TensorFlow's code, ours."""
    source = (ROOT / "examples" / "ports" / f"{name}.py").read_text()
    lines = source.splitlines()
    module = ast.parse(source)
    about = (ast.get_docstring(module) or "").splitlines()[0]
    theirs, ours = "", []
    for node in module.body[1:]:
        decorated = getattr(node, "decorator_list", [])
        start = min([node.lineno, *(d.lineno for d in decorated)]) - 1
        code = "\n".join(lines[start : node.end_lineno])
        if isinstance(node, ast.FunctionDef) and node.name == "original":
            first, last = node.body[1], node.body[-2]  # without the docstring and the return
            decorated = getattr(first, "decorator_list", [])
            start = min([first.lineno, *(d.lineno for d in decorated)]) - 1
            theirs = textwrap.dedent("\n".join(lines[start : last.end_lineno]))
        elif isinstance(node, ast.If):
            continue  # the demonstration
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if "typing" not in code and "collections" not in code:
                ours.append(code)
        else:
            ours.append("\n" + code)
    if not any(re.search(r"\bjax\.", code) for code in ours if not code.startswith("import")):
        ours.remove("import jax")
    text = "\n".join(ours).replace(
        "import jax.numpy as jnp\nfrom", "import jax.numpy as jnp\n\nfrom"
    )
    return (
        f"### `examples/ports/{name}.py`\n\n{about}\n\nTensorFlow:\n\n```py\n{theirs}\n```\n\n"
        f"Here:\n\n```python\n{text}\n```\n"
    )


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
