"""Twenty custom gradients from TensorFlow code, each beside its port.

`original` in each module is TensorFlow's code; the rest is the port. The tests compare the two.
"""
