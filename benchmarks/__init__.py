"""Measure the cost of a custom gradient, and the memory it saves: `python -m benchmarks`."""
