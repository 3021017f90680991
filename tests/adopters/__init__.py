"""Keras and TensorFlow Probability with our decorator where they use `jax.custom_gradient`.

replace.py     the pytest plugin that puts the decorator in its place
tfp_cases.py   custom gradients of TensorFlow Probability (whose own tests are not installed
               with it); those of Keras are tested by Keras's own tests, which are
__main__.py    `python -m tests.adopters` runs both, before and after, and counts
"""
