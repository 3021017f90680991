"""The messages on how a rule is called and on the gradients that it returns, as in `errors.py`."""

import itertools
import re
import warnings
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef, all_leaves, tree_structure

from .._jax.compat import explicit_sharding, varying
from .._jax.types import Aval, PyTree, Values, is_array, is_kind
from .source import Source, Where
from .text import counted, kind_of, tree_of, type_name, types_of

Layout: TypeAlias = Any  # that of `_frontend.structure`, which imports this module

# --- how a rule is called -------------------------------------------------------------------------


def wrong_arity(where: Where, upstreams: int, keywords: Any, error: TypeError) -> TypeError:
    takes = ("dy" if upstreams == 1 else "*dys") + ", variables" * bool(keywords)
    given = counted(upstreams, "upstream gradient") + " and `variables`" * bool(keywords)
    return TypeError(
        f"{where} cannot be called with {given}: {error}. Write `def grad({takes})`: a rule takes "
        "one upstream for each leaf of y (dicts in the order of sorted keys; with "
        '`convention="jax"`, one in the structure of y) and reads anything else from the function '
        "around it."
    )


def only_arrays(where: Where, name: str) -> str:
    return (
        f"{where} asks a variable for `{name}`. They are arrays, not `tf.Variable`s: the keys of a "
        "dict, `custom_gradient(variables={...})`, tell them apart, or `v is w`."
    )


# --- the structure of what it returns -------------------------------------------------------------


def _written_out(layout: Layout) -> str:
    """Write what to return for some values, as in `(dx, {'scale': ..., 'bias': ...})`."""
    values, tree = layout.treedef.children(), layout.treedef
    leaves = zip(layout.leaf_paths(), layout.counted, strict=True)
    # `dw` for a leaf whose path ends in `w`, as `params['w']` and `self.w` do. (In nnx, each ends
    # in `value`.)
    named = [(re.search(r"(?:^|\.|\[')([A-Za-z_]\w*)(?:'\])?$", p), has) for p, has in leaves]
    words = [p[1] for p, has in named if p and has]
    each = (
        (f"d{p[1]}" if p and words.count(p[1]) == 1 else "...") if has else "None"
        for p, has in named
    )
    tree = values[0] if len(values) == 1 else tree
    if not _is_written_as_shown(tree):
        if not layout.are_in_a_dict([*itertools.compress(itertools.count(), layout.counted)]):
            return f"[{', '.join(each)}]"
        return ", ".join(f"jax.tree.map(..., {name})" for name in layout.names)
    return re.sub(r"\*", lambda _: next(each, "*"), tree_of(tree))


def _is_written_as_shown(tree: PyTreeDef) -> bool:
    """Return whether a structure has no class, which may be made in another way than JAX shows."""
    data = tree.node_data()
    return (data is None or data[0] in (tuple, list, dict, type(None))) and all(
        map(_is_written_as_shown, tree.children())
    )


def _the(of: str, paths: Sequence[str]) -> str:
    return f"the {of}{'s' * (len(paths) != 1)} {', '.join(f'`{p}`' for p in paths)}".rstrip()


def no_variable_pair(where: Where, result: PyTree, inputs: Layout, variables: Layout) -> TypeError:
    return TypeError(
        f"{where} was called with `variables=` and must return a pair (grad_xs, grad_vars), but "
        f"returned {kind_of(result)}. Write `return {_written_out(inputs)}, "
        f"{_written_out(variables)}`; or drop `variables` if no weight has a gradient."
    )


def wrong_structure(where: Where, result: PyTree, layout: Layout) -> Exception:
    needed = list(itertools.compress(layout.leaf_paths(), layout.counted))
    error, came = ValueError, kind_of(result)
    if isinstance(result, list | tuple) and all(g is None or all_leaves([g]) for g in result):
        came = counted(len(result), "gradient")
    elif isinstance(result, list | tuple | dict):
        tree = tree_structure(result, is_leaf=lambda g: g is None)
        error, came = TypeError, f"gradients as `{tree_of(tree)}`"
    hint = ""
    if where.of == "undeclared variable":
        hint = " A frozen weight is not one: `custom_gradient(variables=...)` lists it always."
    elif any(t is None and c for t, c in zip(layout.types, layout.counted, strict=True)):
        hint = " If a number is a setting, pass it by keyword: put it behind a `*`."
    return error(
        f"{where} returned {came}; expected {len(needed)}, for {_the(where.of, needed)}. Return "
        f"`{_written_out(layout)}`; None stands for no gradient.{hint}"
    )


def no_order(where: Where, layout: Layout) -> TypeError:
    return TypeError(
        f"{where} returned a flat list of gradients whose order is unknown: JAX has sorted the "
        "keys of a dict, or a None may stand for one array or for several. Return "
        f"`{_written_out(layout)}` for the {where.of}s."
    )


def misplaced(where: Where, layout: Layout, leaf: int, other: int | None) -> TypeError:
    """`other`: the leaf that got the gradient of this one; None if it was an argument of None."""
    paths = layout.leaf_paths()
    instead = "None" if other is None else f"`{paths[other]}`"
    return TypeError(
        f"{where} returned None for the {where.of} `{paths[leaf]}`, and a gradient of its shape "
        f"for {instead}, which JAX does not differentiate. Return them in the order of the "
        f"{where.of}s."
    )


def pass_through_mismatch(
    source: Source, inputs: Sequence[Aval | None], given: Values
) -> ValueError:
    wanted = ", ".join("float" if t is None else type_name(t) for t in inputs) or "none"
    return ValueError(
        f"grad_pass_through gives each input of {source} the gradient of the corresponding "
        f"output, so inputs and outputs must match in number and shape.\n  inputs:  {wanted}\n"
        f"  outputs: {types_of([g for g in given if g is not None])}\nClose over the inputs that "
        "need no gradient, or write the rule with `custom_gradient`."
    )


# --- one gradient ---------------------------------------------------------------------------------


def wrong_type(where: Where, given: Sequence[Any], leaf: int, layout: Layout) -> Exception:
    """One of the gradients that are given for the leaves is not of the type of its leaf."""
    gradient, paths, wanted = given[leaf], layout.leaf_paths(), layout.types[leaf].to_ct_aval()
    came: Any = jax.typeof(gradient) if is_array(gradient) else None
    shown = kind_of(gradient) if came is None else f"a gradient of type {type_name(came)}"
    text = (
        f"{where} returned {shown} for the {where.of} `{paths[leaf]}`; expected "
        f"{type_name(wanted)}, or None."
    )
    how = "Convert it, by `jnp.real` or `.astype`."
    if is_kind(wanted.dtype, jnp.complexfloating):
        how = "The gradient of a complex array is complex: was `jnp.real` applied?"
    convert = TypeError(f"{text} {how}")
    if not all_leaves([gradient]):
        of_variables = "; those of `variables` come last" * (where.of == "input")
        return TypeError(
            f"{text} Return the gradients in the order of the {where.of}s{of_variables}."
        )
    if callable(gradient):
        return TypeError(f"{text} Maybe you wrote `return g` instead of `return g(dy)`.")
    if came is None:
        return convert
    if came.shape != wanted.shape:
        text += _sum_hint(where.of, came.shape, wanted.shape)
        every = zip(paths, layout.types, layout.differentiable, map(np.shape, given), strict=True)
        others = [path for path, t, has, g in every if has and t.shape == came.shape != g]
        if others:
            text += f" It fits {_the(where.of, others)}: return the gradients in their order."
    elif axes := varying(wanted) - varying(came):
        names = ", ".join(f"'{a}'" for a in sorted(axes, key=str))
        text += (
            f" It is the same along the mesh axis {names}. If the rule sums it (`psum`), drop "
            "that: a checked `shard_map` sums what all devices share. Otherwise, return "
            f"`jax.lax.pcast(g, ({names},), to='varying')`."
        )
    elif (by := explicit_sharding(wanted)) != explicit_sharding(came):
        by = by or f"P{(None,) * len(wanted.shape)}"
        text += f" Return `jax.sharding.reshard(g, jax.{by})`, or use this `out_sharding`."
    else:
        return convert
    return ValueError(text)


def _sum_hint(of: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    extra = len(got) - len(wanted)
    padded = (None,) * extra + tuple(wanted)  # the wanted shape, aligned as in broadcasting
    axes = tuple(i for i, (g, w) in enumerate(zip(got, padded, strict=False)) if g != w)
    if extra < 0 or any(padded[i] not in (None, 1) for i in axes):
        return ""
    axis: object = axes[0] if len(axes) == 1 else axes
    keep = ", keepdims=True" if any(padded[i] == 1 for i in axes) else ""
    return (
        f" It has more entries than the {of}, along axis {axis}: did you forget to sum over it, as "
        f"in `g.sum(axis={axis}{keep})`?"
    )


# --- warnings -------------------------------------------------------------------------------------


def warn_of_bare_none(where: Where, names: Sequence[str]) -> None:
    code = Source.of(where.grad_fn).code
    if code is not None and code.co_name == "<lambda>":  # it has no `return` to forget
        return
    warn(
        where,
        f"returned None, which means no gradient for {_the(where.of, names)}. Did it forget its "
        f"`return`? `return {(None,) * len(names)}` means no gradient without this warning.",
    )


def warn_of_upstreams(where: Where, are: Sequence[str], would_be: Sequence[str]) -> None:
    by_key, as_written = (", ".join(f"`{p}`" for p in paths) for paths in (are, would_be))
    warn(
        where,
        f"gets the upstreams of y by the sorted keys of a dict, as in TensorFlow: of {by_key}. "
        f"{where.source} wrote the keys in another order, {as_written}. Write them in sorted "
        "order, or return a tuple as y.",
    )


def warn_of_no_output(source: Source, dtypes: Collection[str]) -> None:
    warn(
        source,
        f"is differentiated, and returned no output that has a gradient, but {', '.join(dtypes)}: "
        "its gradient is zero, whatever its rule returns. To declare one (a surrogate), return a "
        "float, as in `(x > 0).astype(x.dtype)`.",
    )


def warn_of_unlisted(source: Source, values: Sequence[tuple[str, Aval]]) -> None:
    # Without shapes, so that each place has one text.
    names = (f"`{name}`" if name else f"a {aval.dtype} array" for name, aval in values)
    warn(
        source,
        f"is differentiated with respect to {', '.join(names)}, which only its rule reads: this "
        "gradient is zero. If there is one, declare the value, `custom_gradient(variables=...)`, "
        "and return it; if there is none, read `jax.lax.stop_gradient` of the value.",
    )


_REGISTRY: dict[Any, Any] = {}  # of the warnings that were shown, as modules of users have one


def warn(who: Source | Where, text: str) -> None:
    """Warn at a function of the user's: Python's filters then show it once for each place."""
    sources = [who] if isinstance(who, Source) else [Source.of(who.grad_fn), who.source]
    code = next((s.code for s in sources if s.code), None)
    file, line = (code.co_filename, code.co_firstlineno) if code else ("<unknown>", 0)
    warnings.warn_explicit(f"{who} {text}", UserWarning, file, line, registry=_REGISTRY)
