"""The same cases on TensorFlow and on this package: what a port can rely on.

backend.py      what a backend can do, and the two that can do it
case.py         what a case is, the rules that cases share, and how answers are compared
cases.py        imports the tables of cases: calling.py, upstream.py, inputs.py, ...; a case is a
                function of a `Backend`, tagged with the rules of TensorFlow's behavior it shows
recorded.json   TensorFlow's answers, for machines without it
record.py       `python -m tests.tf_parity.record` asks TensorFlow again
test_parity.py  JAX against the recorded answers
test_live.py    TensorFlow, where it is installed, against them
"""
