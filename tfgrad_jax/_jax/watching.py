"""Who starts a watch, and for what: each function returns the context for code that is watched.

`_call/direct.py` starts the one for `f`.
"""

import contextlib
from collections.abc import Callable, Iterator

import jax
from jax.extend.core import find_top_trace as _current_trace

from .compat import parent_of, revived
from .shown import Run, Trace
from .trace import has_values, is_forward, is_staging, plainly
from .types import AnyFunction, PyTree, Values
from .watch import Note, Watch


def recording() -> AnyFunction:
    """Return what makes the context for code in a trace that is started next.

    There, operations on values run at once, unless JAX records all operations now, so that there
    are no values.
    """
    outside = _current_trace(())
    above = outside.above if isinstance(outside, Watch) else None
    if above is None and not is_staging():
        above = outside

    def context() -> contextlib.AbstractContextManager[Watch]:
        now = _current_trace(())
        return Watch.running(now, Run(None, (), NotImplementedError), above=above, own=(now,))

    return context


@contextlib.contextmanager
def replacing(old: Values, new: Values, note: Note | None = None) -> Iterator[Watch]:
    """Run code, which may hold arrays anywhere, as if it held others.

    Each operation that takes one of the old arrays, which it knows by identity, takes the new one.
    So do the declared variables of decorated functions: the new ones may be tracers of a derivative
    that is on. What JAX has traced with an old array inside, such as a function under `jax.jit`,
    keeps that. `note` is told of each operation, with the old arrays.
    """
    now, others = _current_trace(()), {id(v): w for v, w in zip(old, new, strict=True)}
    run = Run(None, old, NotImplementedError)  # which keeps the old ones alive
    watching = Watch.running(now, run, replaced=others, note=note)
    with watching as watch, plainly() if has_values(now) else contextlib.nullcontext():
        yield watch


def standing_for(tree: PyTree) -> PyTree:
    """Return a pytree with the values that `replacing` puts in the place of its arrays."""
    trace = _current_trace(())
    while trace is not None and not (isinstance(trace, Watch) and trace.replaced):
        trace = parent_of(trace)
    return tree if trace is None else jax.tree.map(lambda v: trace.replaced.get(id(v), v), tree)


@contextlib.contextmanager
def reviving(ofs: tuple[Trace, ...], left: Callable[[], Exception]) -> Iterator[Watch]:
    """Run a rule in which tracers of derivatives that are over count as running.

    In reverse mode, what it computes is a value, since the calls that it may leave something for
    have run before; forward mode runs it between them. Where its value alone is computed, what it
    calls needs no rules of its own; where forward mode traces it, these are its transpose.
    """
    now = _current_trace(())
    run = Run(ofs[-1] if is_forward(ofs[-1]) else None, (), left)
    with contextlib.ExitStack() as stack:
        for of in ofs:
            stack.enter_context(revived(of))
        watch = stack.enter_context(Watch.running(now, run, ofs=ofs))
        stack.enter_context(plainly() if has_values(now) else contextlib.nullcontext())
        yield watch
