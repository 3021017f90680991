from . import compat as compat  # first: it says which JAX is needed
