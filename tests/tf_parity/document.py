"""Write the tables of docs/from_tensorflow.md: `python -m tests.tf_parity.document`.

The text between the comments `<!-- name: begin -->` and `<!-- name: end -->` is made from the
cases, TensorFlow's recorded answers and `examples/ports`; a test compares the two.
"""

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

from .case import Case, recorded
from .cases import CASES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "from_tensorflow.md"
PORTS = (
    "log1pexp",
    "gradient_reversal",
    "clip_gradient",
    "learned_quantization",
    "spike",
    "focal_loss",
    "fused_cross_entropy",
    "reversible_block",
    "matrix_sqrt",
    "binary_layer",
)


def rendered(text: str) -> str:
    """Return the page with every generated part as it should be."""
    parts = {
        "counts": counts(),
        "better": better(),
        "differences": differences(),
        "graph mode": graph_mode(),
        "ports": ports(),
    }
    for name, part in parts.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        before, rest = text.split(begin)
        text = before + begin + part + end + rest.split(end)[1]
    return text


def counts() -> str:
    differ = sum(case.differs is not None for case in CASES.values())
    zero = sum(case.none_is_zero for case in CASES.values())
    return (
        f"{len(CASES)} cases, each tagged with the rule of TensorFlow's behavior that it shows. "
        f"In {len(CASES) - differ} of them the answers are the same, {zero} of these because a "
        f"None there is a zero here; in {differ} we differ on purpose.\n"
    )


def better() -> str:
    lines = [
        "| TensorFlow | its answer | here | our answer | test |",
        "|---|---|---|---|---|",
    ]
    answers = recorded()
    for case in CASES.values():
        if case.differs is not None and case.differs.better:
            theirs = dict.fromkeys(_short(a) for a in answers[case.name].values())
            lines.append(
                f"| {case.differs.theirs} | {'; '.join(theirs)} "
                f"| {case.differs.ours} | {_short(case.expected)} | `{case.name}` |"
            )
    return "\n".join(lines) + "\n"


def differences() -> str:
    lines = ["| rule | TensorFlow | here | test |", "|---|---|---|---|"]
    for case in _by_rule():
        if case.differs is not None:
            rules = ", ".join(map(str, case.rules))
            lines.append(
                f"| {rules} | {case.differs.theirs} | {case.differs.ours} | `{case.name}` |"
            )
    return "\n".join(lines) + "\n"


def graph_mode() -> str:
    lines = ["| rule | in graph mode | test |", "|---|---|---|"]
    for case in _by_rule():
        if case.graph_differs is not None:
            rules = ", ".join(map(str, case.rules))
            lines.append(f"| {rules} | {case.graph_differs} | `{case.name}` |")
    return "\n".join(lines) + "\n"


def _by_rule() -> list[Case]:
    return sorted(CASES.values(), key=lambda case: case.rules)


def _short(answer: Any) -> str:
    """Return an answer as a reader would write it."""
    if isinstance(answer, dict) and "dtype" in answer:
        return f"{answer['value']}".replace(".0", "")
    if isinstance(answer, dict) and "raises" in answer:
        return f"`{answer['raises']}`"
    if isinstance(answer, dict) and "returns" in answer:
        return _short(answer["returns"])
    if isinstance(answer, dict) and "answer" in answer:
        return _short(answer["answer"])
    if isinstance(answer, dict):
        return "{" + ", ".join(f"{k}: {_short(v)}" for k, v in answer.items()) + "}"
    if isinstance(answer, list):
        return ", ".join(_short(v) for v in answer)
    return str(answer)


def ports() -> str:
    return "\n".join(_port(name) for name in PORTS)


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
