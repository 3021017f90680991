"""Check a gradient that you wrote."""
