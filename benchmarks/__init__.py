"""What a custom gradient costs and what it saves: `python -m benchmarks`."""
