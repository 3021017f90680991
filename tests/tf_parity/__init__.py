"""The same cases on TensorFlow and on this package: what a port can rely on.

backend.py      what a backend can do, and the two that can do it
case.py         what a case is, the rules that cases share, and how answers are compared
calling.py, ... the tables of cases; a case is a function of a `Backend`, tagged with the rules of
                TensorFlow's behavior it shows
recorded.json   TensorFlow's answers, for machines without it
record.py       `python -m tests.tf_parity.record` asks TensorFlow again
test_parity.py  JAX against the recorded answers
test_live.py    TensorFlow, where it is installed, against them
"""

import importlib
import sys
from pathlib import Path

from .case import CASES as CASES

TABLES = "calling family inputs keywords numbers orders ports transforms upstream variables"

# `examples` is no part of the package; the cases of `ports` import it from the repository.
sys.path.insert(0, str(Path(__file__).parents[2]))
for _table in TABLES.split():
    importlib.import_module(f".{_table}", __name__)
