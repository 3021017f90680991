"""Print the versions of what is tested, for docs/interop.md: `python -m tests.interop`."""

import importlib.metadata

for name in (
    "jax", "flax", "equinox", "dm-haiku", "optax", "chex", "jaxtyping", "beartype",
    "orbax-checkpoint", "keras", "tfp-nightly", "tensorflow-probability",
):  # fmt: skip
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        print(name, "is not installed")
