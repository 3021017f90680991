"""The messages on how a rule is called and on the gradients that it returns, as in `errors.py`."""

import itertools
import re
import warnings
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

from jax.tree_util import PyTreeDef, all_leaves, tree_structure

from tfgrad_jax._jax.compat import explicit_sharding
from tfgrad_jax._jax.types import Aval, Leaf, PyTree

from .source import Source, Where
from .text import counted, is_written, kind_of, tree_of, type_name, types_of

# --- how a rule is called -------------------------------------------------------------------------


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


def takes_no_variables(where: Where, takes: str) -> TypeError:
    return TypeError(
        f"{where} takes no `variables`, but `custom_gradient(variables=...)` declares them. Write "
        f"`def grad({takes}, variables)`, which returns (grad_xs, grad_vars)."
    )


def no_variables(where: Where) -> str:
    """Return a note."""
    return (
        f"{where} got no `variables`, because none is being differentiated in this call. Write "
        "`variables or []`, or `def grad(dy, variables)`, which gets an empty list then."
    )


# --- the structure of what it returns -------------------------------------------------------------


Layout: TypeAlias = Any  # that of `_frontend.structure`, which imports this module


def _values(layout: Layout) -> PyTreeDef:
    values = layout.treedef.children()
    return values[0] if len(values) == 1 else layout.treedef


def written_out(layout: Layout) -> str:
    """Write what to return for some values, as in `(dx, {'scale': ..., 'bias': ...})`."""
    leaves = zip(layout.leaf_paths(), layout.counted, strict=True)
    each = (("d" + p if p.isidentifier() else "...") if has else "None" for p, has in leaves)
    return re.sub(r"\*", lambda _: next(each, "*"), tree_of(_values(layout)))


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(f"`{path}`" for path in paths)


def _the(where: Where, paths: Sequence[str]) -> str:
    listed = _listed(paths)
    return f"the {where.of} {listed}" if len(paths) == 1 else f"the {where.of}s {listed}".rstrip()


def _to_return(layout: Layout) -> str:
    """Say what to return: written out, if it can be."""
    if is_written(layout.treedef):
        return f"Return `{written_out(layout)}`"
    return "Return their structure, as `jax.tree.map` does"


def no_variable_pair(where: Where, result: PyTree, inputs: Layout, variables: Layout) -> TypeError:
    pair = ", ".join(
        written_out(v) if is_written(v.treedef) else "..." for v in (inputs, variables)
    )
    return TypeError(
        f"{where} was called with `variables=` and must return a pair (grad_xs, grad_vars), but "
        f"returned {kind_of(result)}. Write `return {pair}`; or drop `variables` if no weight has "
        "a gradient."
    )


def needless_variables(where: Where) -> ValueError:
    return ValueError(
        f"{where} got an empty list of `variables`, because none is being differentiated in this "
        "call, and returned gradients for them, which would be lost. Return one for each: "
        "`[... for v in variables]`; or declare the weights, `custom_gradient(variables=...)`."
    )


def wrong_structure(where: Where, result: PyTree, layout: Layout) -> Exception:
    paths = layout.leaf_paths()
    if where.of == "undeclared variable":  # they have no names of their own
        paths = [f"{p}: {type_name(t)}" for p, t in zip(paths, layout.types, strict=True)]
    needed = list(itertools.compress(paths, layout.counted))
    flat = [result] if all_leaves([result]) else result
    if isinstance(flat, list | tuple) and all(g is None or all_leaves([g]) for g in flat):
        is_iterator = hasattr(result, "__next__")
        came = kind_of(result) if is_iterator else counted(len(flat), "gradient")
        hint = f"{_to_return(layout)}; None stands for no gradient."
        if where.of == "undeclared variable":
            hint = "A frozen weight is not one: `custom_gradient(variables=...)` lists it always."
        both = zip(layout.types, layout.counted, strict=True)
        if len(flat) < len(needed) and any(t is None and counts for t, counts in both):
            hint += " If a number is a setting, pass it by keyword: put it behind a `*`."
        return ValueError(
            f"{where} returned {came}; expected {len(needed)}, for {_the(where, needed)}. {hint}"
        )
    got = tree_structure(result, is_leaf=lambda g: g is None)
    came = f" {tree_of(got)}" if is_written(got) else f" {kind_of(result)}"
    expected = tree_of(_values(layout)) if is_written(layout.treedef) else "a gradient each"
    or_list = f", or a flat list with one gradient for each {where.of}"
    if layout.are_in_a_dict([i for i, counts in enumerate(layout.counted) if counts]):
        or_list = ""
    return TypeError(
        f"{where} returned gradients in a structure that does not fit {_the(where, ())}.\n"
        f"  expected: {expected}, for {_the(where, needed)}\n  got:     {came}\n"
        f"{_to_return(layout)}{or_list}; None stands for no gradient."
    )


def no_order(where: Where, layout: Layout, is_unknown: bool) -> TypeError:
    why = "JAX has sorted the keys of a dict"
    if is_unknown:
        why = "a None may stand for one array or for several"
    return TypeError(
        f"{where} returned a flat list of gradients whose order is unknown: {why}. "
        f"{_to_return(layout)} for the {where.of}s."
    )


def misplaced(where: Where, *paths: str) -> TypeError:
    return TypeError(
        f"{where} returned None for an array, and a gradient for "
        f"{_listed(paths) or 'a field that is None'}, which JAX does not differentiate; expected "
        "None. Return the gradients in the order of the inputs."
    )


def pass_through_mismatch(
    source: Source, inputs: Sequence[Aval | None], given: Sequence[Leaf]
) -> ValueError:
    came = types_of([g for g in given if g is not None])
    wanted = ", ".join("float" if t is None else type_name(t) for t in inputs) or "none"
    return ValueError(
        f"grad_pass_through gives each input of {source} the gradient of the corresponding "
        f"output, so inputs and outputs must match in number and shape.\n  inputs:  {wanted}\n"
        f"  outputs: {came}\nClose over the inputs that need no gradient, or write the rule with "
        "`custom_gradient`."
    )


# --- one gradient ---------------------------------------------------------------------------------


def wrong_kind(where: Where, gradient: object, wanted: Aval, path: str) -> TypeError:
    hint = "Convert it, by `jnp.real` or `.astype`, or return None for no gradient."
    if callable(gradient):
        hint = "Maybe you wrote `return g` instead of `return g(dy)`."
    return TypeError(
        f"{where} returned {kind_of(gradient)} for the {where.of} `{path}`; expected an array of "
        f"dtype {wanted.dtype} and shape {wanted.shape}. {hint}"
    )


def wrong_shape(
    where: Where,
    got: tuple[int, ...],
    wanted: tuple[int, ...],
    path: str,
    others: Sequence[str],
) -> ValueError:
    """`others` have the shape of the gradient, and no gradient of it."""
    hint = _sum_hint(where.of, got, wanted)
    if others:
        order = "return the gradients in the order of these"
        hint += f" It fits {_the(where, others)}: {'or ' if hint else ''}{order}."
    text = (
        f"{where} returned a gradient of shape {got} for the {where.of} `{path}`; expected its own"
    )
    return ValueError(f"{text} shape, {wanted}, or None. {hint.strip()}".rstrip())


def wrong_sharding(where: Where, came: Aval, wanted: Aval, path: str) -> ValueError:
    by = explicit_sharding(wanted.to_ct_aval()) or f"P{(None,) * len(wanted.shape)}"
    hint = f"Return `jax.sharding.reshard(g, jax.{by!s})`."
    if getattr(by, "unreduced", ()):
        hint = (
            "The input is reduced over this axis, so JAX sums its gradients later: compute yours "
            f"with `out_sharding=jax.{by!s}`, as `jnp.matmul` takes it."
        )
    return ValueError(
        f"{where} returned a gradient of type {type_name(came)} for the {where.of} `{path}`; "
        f"expected its own sharding, {type_name(wanted.to_ct_aval())}. {hint}"
    )


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


# --- warnings -------------------------------------------------------------------------------------


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


def warn_of_no_output(source: Source, dtypes: Collection[str]) -> None:
    warn(
        source,
        f"is differentiated, and returned no output that has a gradient, but {', '.join(dtypes)}: "
        "its gradient is zero, whatever its rule returns. To declare one (a surrogate), return a "
        "float, as in `(x > 0).astype(x.dtype)`.",
    )


def warn_of_unlisted(source: Source, values: Sequence[tuple[str, Aval]]) -> None:
    warn(
        source,
        f"is differentiated with respect to {', '.join(_short(*v) for v in values)}, which only "
        "its rule reads: this gradient is zero. If there is one, declare the value, "
        "`custom_gradient(variables=...)`, and return it; if there is none, read "
        "`jax.lax.stop_gradient` of the value.",
    )


def _short(name: str, aval: Aval) -> str:
    """Name a value without its shape, so that each place has one text."""
    return f"`{name}`" if name else f"a {aval.dtype} array"


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
