"""Ask TensorFlow for its answers again: `python -m tests.tf_parity.record`."""

import json
import os

from . import CASES, operations
from .backend import TensorFlow
from .case import RECORDED


def main() -> None:
    import tensorflow as tf

    operations.record()
    answers = {
        name: {mode: case.answer(TensorFlow(mode)) for mode in case.modes}
        for name, case in sorted(CASES.items())
    }
    lines = [f"  {json.dumps(name)}: {json.dumps(answer)}" for name, answer in answers.items()]
    head = {"tensorflow": tf.__version__, "command": "python -m tests.tf_parity.record"}
    text = json.dumps(head)[:-1] + ',\n "answers": {\n' + ",\n".join(lines) + "\n }}\n"
    RECORDED.write_text(text)
    print(f"{len(answers)} cases, TensorFlow {tf.__version__}")


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main()
