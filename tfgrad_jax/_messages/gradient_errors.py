"""The messages on how a rule is called and on the gradients that it returns, as in `errors.py`."""

import itertools
import math
import re
import types
import warnings
from collections.abc import Collection, Sequence
from typing import Any

from jax.tree_util import all_leaves, tree_structure

from .errors import builder
from .source import Source, Where
from .text import counted, kind_of, tree_of, type_name, types_of

gradient_of_no_array = builder(
    "{} returned a gradient for `{}`, which JAX does not differentiate; expected None. "
    "Return the gradients in the order of the inputs."
)

_PAIR = (
    "{} was called with `variables=` and must return a pair (grad_xs, grad_vars), but returned {}. "
)
no_variable_pair = builder(_PAIR + "Write `return {}, {}`.")
needless_variables = builder(
    _PAIR + "Nothing that the function closes over is differentiated here: drop `variables`. Or "
    "write `return {}, {}`."
)
swapped = builder(
    "{} returned a gradient of shape {} for `{}`, which is a number, and None for `{}`, which has "
    "this shape: are they swapped? Return the gradients in the order of the inputs."
)
keys_without_names = builder(
    "{} returned a flat list of gradients for a dict. A list does not name the keys, and JAX may "
    "have sorted them, so its order is unknown: return `{}`."
)
ambiguous = builder(
    "{} returned a list that can be read in two ways, with another gradient for `{}` in each. "
    "Return the structure of the inputs, with a None for each array that has no gradient: `{}`."
)
no_variables = builder(
    "{} got no `variables`, because none is being differentiated in this call. Write `variables or "
    "[]`, or `def grad(dy, variables)`, which gets an empty list then.",
    str,  # a note
)
not_differentiable = builder(
    "{} computes something that JAX cannot differentiate, at {}. Derivatives of the gradient need "
    "those of its operations: let the rule call a decorated function for this one.",
    str,  # a note
)
reads_ended_tracer = builder(
    "{} reads a tracer of a transformation that has ended, in an unsearched place such as a global "
    "variable. Pass the value as an argument, or read it in the function and not in its rule.",
    str,  # a note
)


def written_out(layout: Any) -> str:
    """Write what to return for some values, as in `(dx, {'scale': ..., 'bias': ...})`."""
    values = layout.treedef.children()
    text = tree_of(values[0] if len(values) == 1 else layout.treedef)
    leaves = zip(layout.leaf_paths(), layout.counted(), strict=True)
    each = (("d" + p if p.isidentifier() else "...") if has else "None" for p, has in leaves)
    return re.sub(r"\*", lambda _: next(each, "*"), text)


def takes_no_variables(where: Where, others: Sequence[str]) -> TypeError:
    """`others` are parameters that get no upstream."""
    hint = "Write `def grad(dy, variables)`, which returns (grad_xs, grad_vars)."
    if others:
        hint = f"If `{others[0]}` is meant for them, name this parameter `variables`."
    return TypeError(
        f"{where} takes no `variables`, but `custom_gradient(variables=...)` declares them. {hint}"
    )


def wrong_arity(
    where: Where, upstreams: int | None, names: Any, variables: str, error: TypeError
) -> TypeError:
    """`upstreams` is None for one in the structure of `y`, `names` for `*dys`."""
    expected = "one argument, the upstream gradients in the structure of y"
    hint = "A rule takes only upstreams: it reads anything else from the function around it."
    if upstreams is None:
        hint += " It unpacks several upstreams itself, as in `da, db = dy`."
    else:
        count = counted(upstreams, "upstream gradient")
        each = "one positional argument per leaf of y (dicts in the order of sorted keys)"
        expected = f"{count}, {each}"
        if names is not None and len(names) < upstreams:
            each = "dy" if upstreams == 1 else "da, db" + ", ..." * (upstreams > 2)
            hint = f"Write `def grad({each}{variables})` or `def grad(*dys{variables})`."
    return TypeError(f"{where} cannot be called with {expected}: {error}. {hint}")


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
    wanted, hint = _the(where, needed), ""
    flat = [result] if all_leaves([result]) else result
    is_flat = isinstance(flat, list | tuple) and all(g is None or all_leaves([g]) for g in flat)
    if is_flat and may_be_list:
        if any(hasattr(g, "__next__") for g in flat):  # an iterator
            hint = f"Instead of {kind_of(result)}, return a list: `list(...)`."
        elif len(flat) < len(needed) and where.of == "undeclared variable":
            hint = "Return one for each, in the order of first use; None for no gradient."
        elif len(flat) < len(needed):
            hint = f"Return None for every {where.of} that has no gradient."
            numbers = [p for p, is_one in zip(paths, layout.numbers, strict=True) if is_one]
            if where.of == "input" and len(flat) + len(numbers) == len(needed):
                settings = "a setting, which needs" if len(numbers) == 1 else "settings, which need"
                hint += f" Behind a `*`, {_listed(numbers)} would be {settings} no gradient."
        elif where.of == "undeclared variable":
            hint = "A frozen weight is not one: `custom_gradient(variables=...)` lists it always."
        elif len(paths) == 1:
            hint = f"`{paths[0]}` is one array: return one gradient of its shape."
        if needless:
            wanted += f", or {len(needed) + len(needless)}, with None for {_listed(needless)}"
        given = counted(len(flat), "gradient")
        return _returned(ValueError, where, given, f"{len(needed)}, for {wanted}", hint)
    if where.of != "input" and (held := [p[:-6] for p in needed if p.endswith(".value")]):
        hint = f" `{held[0]}` is an object: declare the array that it holds, `param[...]` in nnx."
    values = layout.treedef.children()
    expected = values[0] if len(values) == 1 else layout.treedef
    or_list = f", or a flat list with one gradient for each {where.of}" if may_be_list else ""
    return TypeError(
        f"{where} returned gradients in a structure that does not fit {_the(where, ())}.\n"
        f"  expected: {tree_of(expected)}, for {wanted}\n"
        f"  got:      {tree_of(tree_structure(result, is_leaf=lambda g: g is None))}\n"
        f"Return the structure of {_the(where, ())}{or_list}; None stands for no gradient.{hint}"
    )


def warn_of_bare_none(where: Where, names: Sequence[str]) -> None:
    code = Source.of(where.grad_fn).code
    if code is not None and code.co_name == "<lambda>":  # it has no `return` to forget
        return
    _warn_at_rule(
        where,
        f"{where} returned None, which means no gradient for {_the(where, names)}. Did it forget "
        f"its `return`? `return {(None,) * len(names)}` means no gradient without this warning.",
    )


def warn_of_upstreams(where: Where, are: Sequence[str], would_be: Sequence[str]) -> None:
    _warn_at_rule(
        where,
        f"{where} gets the upstreams of y by the sorted keys of a dict, as in TensorFlow: of "
        f"{_listed(are)}. {where.source} wrote the keys in another order, {_listed(would_be)}. "
        "Write them in sorted order, or return a tuple as y.",
    )


def _warn_at_rule(where: Where, text: str) -> None:
    code = Source.of(where.grad_fn).code or where.source.code
    warn(text, code, getattr(where.grad_fn, "__globals__", {}).get("__name__", ""))


def warn_of_no_output(source: Source, types: Sequence[Any]) -> None:
    warn(
        f"{source} is differentiated, and returned no output that has a gradient, but "
        f"{types_of(types)}: its gradient is zero, whatever its gradient function returns. To "
        "declare one (a surrogate), return a float, as in `(x > 0).astype(x.dtype)`.",
        source.code,
    )


_REGISTRY: dict[Any, Any] = {}  # of the warnings that were shown, as modules of users have one


def warn(text: str, code: types.CodeType | None, module: str = "") -> None:
    """Warn at a function of the user's: Python's filters then show it once for each place."""
    file, line = (code.co_filename, code.co_firstlineno) if code else ("<unknown>", 0)
    module = module or file.removesuffix(".py")  # as Python does; it shows nothing without one
    warnings.warn_explicit(text, UserWarning, file, line, module, _REGISTRY)


_CONVERT = {
    "c": "Return its real part, `jnp.real(...)`, if that is what you mean.",
    "f": "Convert it with `.astype('{}')`, if its imaginary part is really zero.",
    **dict.fromkeys("biu", "Convert it with `.astype('{}')`, or return None for no gradient."),
}


def wrong_kind(where: Where, gradient: Any, wanted: Any, path: str) -> TypeError:
    dtype = getattr(gradient, "dtype", None)
    kind = "c" if isinstance(gradient, complex) else getattr(dtype, "kind", "")
    hint = _CONVERT.get(kind, "Return None if there is no gradient.").format(wanted.dtype)
    if callable(gradient):
        hint = "Maybe you wrote `return g` instead of `return g(dy)`."
    came = f"{kind_of(gradient)} for the {where.of} `{path}`"
    expected = f"an array of dtype {wanted.dtype} and shape {wanted.shape}"
    return _returned(TypeError, where, came, expected, hint)


_ORDERS = {
    "input": "the inputs",
    "variable": "the declared variables",
    "undeclared variable": "`variables` (the order of first use), or declare them",
}


def wrong_shape(
    where: Where, got: Any, wanted: Any, path: str, others: Any, idle: bool
) -> ValueError:
    hint = _shape_hint(where.of, got, wanted)
    if others:
        order = _ORDERS[where.of]
        hint = f"It fits {_the(where, others)}: return the gradients in the order of {order}."
    if idle:
        hint += (
            f" Nothing differentiates `{path}` in this call, but another call may: return a "
            "gradient of its shape, or None for no gradient."
        )
    came = f"a gradient of shape {got} for the {where.of} `{path}`"
    return _returned(ValueError, where, came, f"its own shape, {wanted}", hint.lstrip())


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


def _shape_hint(of: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    extra = len(got) - len(wanted)
    padded = (None,) * extra + tuple(wanted)  # the wanted shape, aligned as in broadcasting
    axes = [i for i, (g, w) in enumerate(zip(got, padded, strict=False)) if g != w]
    if extra >= 0 and all(padded[i] in (None, 1) for i in axes):
        axis = axes[0] if len(axes) == 1 else tuple(axes)
        keep = ", keepdims=True" if any(padded[i] == 1 for i in axes) else ""
        return (
            f"The gradient has more entries than the {of}, along axis {axis}: did you forget to "
            f"sum over it, as in `g.sum(axis={axis}{keep})`?"
        )
    if got == wanted[::-1]:
        return "Maybe a transpose is missing, `g.T`."
    if math.prod(got) == math.prod(wanted):
        return f"Maybe a reshape is missing, `g.reshape{wanted}`."
    if extra <= 0 and all(g in (1, w) for g, w in zip(got[::-1], wanted[::-1], strict=False)):
        return (
            "Maybe the rule sums too much. If the gradient is the same for all entries, return "
            f"`jnp.broadcast_to(g, {wanted})`."
        )
    return ""
