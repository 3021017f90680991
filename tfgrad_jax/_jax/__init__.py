from . import compat as compat
