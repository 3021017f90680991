"""The cases, by the part of TensorFlow's behavior that they show. Importing them registers them."""

import importlib
import sys
from pathlib import Path

from .case import CASES as CASES

MODULES = (
    "calling", "upstream", "inputs", "keywords", "variables", "orders", "transforms", "numbers",
    "family", "ports",
)  # fmt: skip

# `examples` is no part of the package; the cases of `ports` import it from the repository.
sys.path.insert(0, str(Path(__file__).parents[2]))

for _name in MODULES:
    importlib.import_module(f".{_name}", __package__)
