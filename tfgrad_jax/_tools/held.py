"""The arrays that functions and objects hold, by name, and copies of these around other arrays."""

import types
from collections.abc import Iterable, Sequence

from tfgrad_jax._closure.names import Named, Roots, is_known, is_of_library, named
from tfgrad_jax._closure.objects import Object
from tfgrad_jax._closure.reach import Id, survey
from tfgrad_jax._closure.referents import globals_of
from tfgrad_jax._closure.skeleton import hoist_tracers
from tfgrad_jax._jax.compat import is_ref
from tfgrad_jax._jax.types import Leaf
from tfgrad_jax._messages.text import type_name


class HeldArrays:
    """The arrays that values hold, by name. Called with others, it returns copies that hold these.

    What cannot be copied is shared: its arrays, and those in global variables, are `constants`.
    A jitted function is copied without the `jit`.
    """

    def __init__(self, roots: Roots) -> None:
        values = [value for _, value in roots]
        found = survey(values, lambda v: is_known(v) or is_ref(v))
        self._skeleton, self._taken = hoist_tracers(values, found)
        names = named(roots, found)
        self.arrays = [v for v in self._taken if not is_ref(v)]
        unnamed = (Named(f"(unnamed {type_name(v)})", v, "") for v in self.arrays)
        self.names = [names.get(id(one.value), one).name for one in unnamed]
        self.places = {**names, **_in_global_variables(values)}
        taken = {id(v) for v in self._taken}
        self.constants = [v for key, v in self.places.items() if key not in taken]

    def __call__(self, arrays: Iterable[Leaf]) -> Sequence[Object]:
        """Return the values, copied around other arrays. A Ref stays itself."""
        rest = iter(arrays)
        return self._skeleton.copies([v if is_ref(v) else next(rest) for v in self._taken])


# --- global variables -----------------------------------------------------------------------------


def _in_global_variables(values: Sequence[Object]) -> dict[Id, Named]:
    """Return the arrays in global variables of the functions that values hold, and so on."""
    roots: dict[Id, tuple[str, Object]] = {}
    while True:
        more = [value for _, value in roots.values()]
        found = survey([*values, *more], is_known)
        functions = [f for f, *_ in found.visited.values() if isinstance(f, types.FunctionType)]
        own = (f for f in functions if not is_of_library(f))
        every = {id(v): (name, v) for f in own for name, v in globals_of(f).items()}
        if every.keys() <= roots.keys():
            arrays = named([*roots.values()], found).items()
            return {key: one._replace(why=one.why or "a global variable") for key, one in arrays}
        roots |= every
