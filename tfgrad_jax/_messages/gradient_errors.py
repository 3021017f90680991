"""The messages on how a rule is called and on the gradients that it returns, as in `errors.py`."""

import itertools
import re
import warnings
from collections.abc import Collection, Sequence
from typing import Any

from jax.tree_util import all_leaves, tree_structure

from .errors import builder, captured
from .source import Source, Where
from .text import counted, kind_of, tree_of, type_name, types_of

misplaced = builder(
    "{} returned None for an array, and a gradient for `{}`, which JAX does not differentiate; "
    "expected None. Return the gradients in the order of the inputs."
)
no_variable_pair = builder(
    "{} was called with `variables=` and must return a pair (grad_xs, grad_vars), but returned {}. "
    "Write `return {}, {}`; or drop `variables` if no weight has a gradient."
)
no_order = builder(
    "{} returned a flat list of gradients whose order is unknown: JAX may have sorted the keys of "
    "a dict, and a None may stand for one array or for several. Return `{}`."
)
no_variables = builder(
    "{} got no `variables`, because none is being differentiated in this call. Write `variables or "
    "[]`, or `def grad(dy, variables)`, which gets an empty list then.",
    str,  # a note
)


def written_out(layout: Any) -> str:
    """Write what to return for some values, as in `(dx, {'scale': ..., 'bias': ...})`."""
    values = layout.treedef.children()
    text = tree_of(values[0] if len(values) == 1 else layout.treedef)
    leaves = zip(layout.leaf_paths(), layout.counted(), strict=True)
    each = (("d" + p if p.isidentifier() else "...") if has else "None" for p, has in leaves)
    return re.sub(r"\*", lambda _: next(each, "*"), text)


takes_no_variables = builder(
    "{} takes no `variables`, but `custom_gradient(variables=...)` declares them. Write `def "
    "grad({}, variables)`, which returns (grad_xs, grad_vars)."
)


def wrong_arity(where: Where, upstreams: int | None, takes: str, error: TypeError) -> TypeError:
    """`upstreams` is None for one in the structure of `y`."""
    expected = "one argument, the upstream gradients in the structure of y"
    if upstreams is not None:
        each = "one positional argument per leaf of y (dicts in the order of sorted keys)"
        expected = f"{counted(upstreams, 'upstream gradient')}, {each}"
    return TypeError(
        f"{where} cannot be called with {expected}: {error}. Write `def grad({takes})`: a rule "
        "takes only upstreams, and reads anything else from the function around it."
    )


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(f"`{path}`" for path in paths)


def _the(where: Where, paths: Sequence[str]) -> str:
    listed = _listed(paths)
    return f"the {where.of} {listed}" if len(paths) == 1 else f"the {where.of}s {listed}".rstrip()


def _returned(kind: type[Exception], where: Where, what: str, expected: str, hint: str) -> Any:
    return kind(f"{where} returned {what}; expected {expected}. {hint}".rstrip())


def wrong_structure(
    where: Where, result: Any, layout: Any, needless: Sequence[str], may_be_list: bool
) -> Exception:
    """`needless` are the inputs for which a rule need not return anything."""
    paths = layout.leaf_paths()
    if where.of == "undeclared variable":  # they have no names of their own
        paths = [f"{p}: {type_name(s)}" for p, s in zip(paths, layout.specs, strict=True)]
    needed = list(itertools.compress(paths, layout.counted()))
    wanted = _the(where, needed)
    flat = [result] if all_leaves([result]) else result
    if may_be_list and isinstance(flat, list | tuple) and all(map(_is_one, flat)):
        if needless:
            wanted += f", or {len(needed) + len(needless)}, with None for {_listed(needless)}"
        is_iterator = hasattr(result, "__next__")
        given = kind_of(result) if is_iterator else counted(len(flat), "gradient")
        hint = "None stands for no gradient."
        if where.of == "undeclared variable":
            hint = "A frozen weight is not one: `custom_gradient(variables=...)` lists it always."
        return _returned(ValueError, where, given, f"{len(needed)}, for {wanted}", hint)
    values = layout.treedef.children()
    expected = values[0] if len(values) == 1 else layout.treedef
    or_list = f", or a flat list with one gradient for each {where.of}" if may_be_list else ""
    return TypeError(
        f"{where} returned gradients in a structure that does not fit {_the(where, ())}.\n"
        f"  expected: {tree_of(expected)}, for {wanted}\n"
        f"  got:      {tree_of(tree_structure(result, is_leaf=lambda g: g is None))}\n"
        f"Return the structure of {_the(where, ())}{or_list}; None stands for no gradient."
    )


def _is_one(gradient: Any) -> bool:
    return gradient is None or all_leaves([gradient])


def warn_of_bare_none(where: Where, names: Sequence[str]) -> None:
    code = Source.of(where.grad_fn).code
    if code is not None and code.co_name == "<lambda>":  # it has no `return` to forget
        return
    warn(
        where,
        f"returned None, which means no gradient for {_the(where, names)}. Did it forget its "
        f"`return`? `return {(None,) * len(names)}` means no gradient without this warning.",
    )


def warn_of_upstreams(where: Where, are: Sequence[str], would_be: Sequence[str]) -> None:
    warn(
        where,
        f"gets the upstreams of y by the sorted keys of a dict, as in TensorFlow: of "
        f"{_listed(are)}. {where.source} wrote the keys in another order, {_listed(would_be)}. "
        "Write them in sorted order, or return a tuple as y.",
    )


def warn_of_no_output(source: Source, types: Sequence[Any]) -> None:
    warn(
        source,
        f"is differentiated, and returned no output that has a gradient, but {types_of(types)}: "
        "its gradient is zero, whatever its gradient function returns. To declare one (a "
        "surrogate), return a float, as in `(x > 0).astype(x.dtype)`.",
    )


def warn_of_unlisted(source: Source, values: Sequence[tuple[str, Any]]) -> None:
    warn(
        source,
        f"is differentiated with respect to {', '.join(captured(*v) for v in values)}, which only "
        "its gradient function reads: this gradient is zero. If there is one, declare the value, "
        "`custom_gradient(variables=...)`, and return it; if there is none, read "
        "`jax.lax.stop_gradient` of the value.",
    )


_REGISTRY: dict[Any, Any] = {}  # of the warnings that were shown, as modules of users have one


def warn(who: Source | Where, text: str) -> None:
    """Warn at a function of the user's: Python's filters then show it once for each place."""
    code, module = who.code if isinstance(who, Source) else None, ""
    if isinstance(who, Where):
        code = Source.of(who.grad_fn).code or who.source.code
        module = getattr(who.grad_fn, "__globals__", {}).get("__name__", "")
    file, line = (code.co_filename, code.co_firstlineno) if code else ("<unknown>", 0)
    module = module or file.removesuffix(".py")  # as Python does; it shows nothing without one
    warnings.warn_explicit(f"{who} {text}", UserWarning, file, line, module, _REGISTRY)


def wrong_kind(where: Where, gradient: Any, wanted: Any, path: str) -> TypeError:
    hint = "Convert it, by `jnp.real` or `.astype`, or return None for no gradient."
    if callable(gradient):
        hint = "Maybe you wrote `return g` instead of `return g(dy)`."
    came = f"{kind_of(gradient)} for the {where.of} `{path}`"
    expected = f"an array of dtype {wanted.dtype} and shape {wanted.shape}"
    return _returned(TypeError, where, came, expected, hint)


def wrong_shape(where: Where, got: Any, wanted: Any, path: str, others: Any) -> ValueError:
    hint = _sum_hint(where.of, got, wanted)
    if others:
        hint = f"It fits {_the(where, others)}: return the gradients in the order of these."
    came = f"a gradient of shape {got} for the {where.of} `{path}`"
    return _returned(ValueError, where, came, f"its own shape, {wanted}, or None", hint)


def wrong_sharding(where: Where, gradient: Any, wanted: Any, path: str) -> ValueError:
    hint = f"Return `jax.sharding.reshard(g, jax.{wanted.sharding!r})`."
    if wanted.sharding.unreduced:
        hint = (
            "The input is reduced over this axis, so JAX sums its gradients later: compute yours "
            f"with `out_sharding=jax.{wanted.sharding!r}`, as `jnp.matmul` takes it."
        )
    came = f"a gradient of type {type_name(gradient)} for the {where.of} `{path}`"
    return _returned(ValueError, where, came, f"its own sharding, {type_name(wanted)}", hint)


def not_varying(where: Where, axes: Collection[Any], path: str) -> ValueError:
    names = ", ".join(f"'{a}'" for a in sorted(axes, key=str))
    return ValueError(
        f"{where} returned a gradient for the {where.of} `{path}` that is the same along the mesh "
        f"axis {names}; expected one that varies along it, as the {where.of} does. If the value is "
        f"right, return `jax.lax.pcast(g, ({names},), to='varying')`. In a rule for "
        "`shard_map(..., check_vma=False)`, check every `psum` too: a checked `shard_map` has "
        "already summed the upstreams of values that all devices share."
    )


def _sum_hint(of: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    extra = len(got) - len(wanted)
    padded = (None,) * extra + tuple(wanted)  # the wanted shape, aligned as in broadcasting
    axes = [i for i, (g, w) in enumerate(zip(got, padded, strict=False)) if g != w]
    if extra < 0 or any(padded[i] not in (None, 1) for i in axes):
        return ""
    axis = axes[0] if len(axes) == 1 else tuple(axes)
    keep = ", keepdims=True" if any(padded[i] == 1 for i in axes) else ""
    return (
        f"The gradient has more entries than the {of}, along axis {axis}: did you forget to sum "
        f"over it, as in `g.sum(axis={axis}{keep})`?"
    )
