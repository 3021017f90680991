"""The same cases on TensorFlow and on this package: what a port can rely on.

cases/        the cases, each written once against a `Backend` and tagged with its rules
backend.py    what a backend can do, and the two that can do it
recorded.json TensorFlow's answers, for machines without it
record.py     `python -m tests.tf_parity.record` asks TensorFlow anew
document.py   `python -m tests.tf_parity.document` writes the tables of docs/from_tensorflow.md
"""
