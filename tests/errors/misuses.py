"""Misuses: what one can get wrong, by the section of docs/errors.md that answers it.

`test_misuses.py` runs all of them, and `docs/_ext/filled.py` shows each with what it says. The
code of one is a module of its own, `model.py`, with the names that `run` gives it.
"""

import ast
import contextlib
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tfgrad_jax import custom_gradient, grad_pass_through, recompute_grad
from tfgrad_jax.testing import assert_gradient, check_gradient

ROOT = Path(__file__).parents[2]
ARRAYS = {"x": jnp.ones((3, 2)), "w": jnp.ones((2, 4)), "b": jnp.ones(2)}


class Misuse(NamedTuple):
    """A mistake, and what its message must say."""

    title: str  # what the user did
    code: str
    says: tuple[str, ...]  # what was expected, what came, what to do
    error: type[BaseException] = TypeError
    of: str = "f"  # the function that it names, with its place; or ""
    jitted: bool = True  # whether it says the same under `jax.jit`


def misuse(title: str, code: str, *says: str, **more: Any) -> Misuse:
    return Misuse(title, code.strip("\n"), says, **more)


# --- how one is run -------------------------------------------------------------------------------


def run(misuse: Misuse, jitted: bool = False) -> Any:
    """Run the code, with what it returns, eagerly or as what `jax.jit` traces."""
    module = ast.parse(misuse.code, "model.py")
    last = module.body[-1]
    value = ast.Expression(module.body.pop().value) if isinstance(last, ast.Expr) else None

    def program(arrays: dict[str, jax.Array]) -> Any:
        space = {
            "__name__": "model", "jax": jax, "jnp": jnp, "np": np,
            "custom_gradient": custom_gradient, "recompute_grad": recompute_grad,
            "grad_pass_through": grad_pass_through,
            "check_gradient": check_gradient, "assert_gradient": assert_gradient, **arrays,
        }  # fmt: skip
        exec(compile(module, "model.py", "exec"), space)
        return value and eval(compile(value, "model.py", "eval"), space)

    # As users run it: the strictness of `conftest.py` is for other tests.
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("error", UserWarning)  # a warning is shown as an error is
        return jax.jit(program)(ARRAYS) if jitted else program(ARRAYS)


def message(error: BaseException) -> str:
    """Return what an error says, with its notes."""
    notes = [n for n in getattr(error, "__notes__", ()) if "custom_gradient" in n or "`" in n]
    return "\n".join([str(error), *notes])


# --- how one is written ---------------------------------------------------------------------------


def rule(body: str, args: str = "x, b", y: str = "x + b", dys: str = "dy") -> str:
    """Return code that differentiates a function whose rule has this body."""
    count = len(args.split(", "))
    argnums = f", {tuple(range(count))}" if count > 1 else ""
    return f"""
@custom_gradient
def f({args}):
    def grad({dys}):
        {body}
    return {y}, grad

jax.grad(lambda {args}: jnp.sum(f({args})){argnums})({args})
"""


def of_one(returned: str) -> str:
    """Return code that differentiates `2 * x`, whose rule returns this."""
    return rule(f"return {returned}", "x", "2 * x")


def weight(
    body: str, dys: str = "dy, variables", option: str = "", y: str = "x @ w", args: str = "w, x"
) -> str:
    """Return code that differentiates with respect to a weight that a function closes over."""
    return f"""
def loss({args}):
    @custom_gradient{option and f"({option})"}
    def f(x):
        def grad({dys}):
            {body}
        return {y}, grad
    return f(x).sum()

jax.grad(loss, (0, 1))({args})
"""


def function(
    last: str, returned: str = "x**2, lambda dy: 2 * x * dy", args: str = "x", option: str = ""
) -> str:
    """Return code that decorates a function, and then this."""
    return f"""
@custom_gradient{option and f"({option})"}
def f({args}):
    return {returned}

{last}
"""


def forward(returned: str) -> str:
    return function("jax.jvp(f, (x,), (x,))[1]", f"x**2, lambda dy: {returned}")


def returning(what: str) -> str:
    return f"""
@custom_gradient
def f(x):
    def grad(dy):
        return 2 * x * dy
    {what}

f(x)
"""


# --- the table ------------------------------------------------------------------------------------

MISUSES: dict[str, list[Misuse]] = {}
VALUE: Any = {"error": ValueError, "of": ""}

MISUSES["decorating"] = [
    misuse("Decorate the result of a call", "custom_gradient(jnp.sin(x))",
        "custom_gradient takes a function, but got an array",
        "is not callable. Write `custom_gradient(f)(x)`, not `custom_gradient(f(x))`",
        of=""),
    misuse("Ask for another convention", 'custom_gradient(convention="torch")',
        "got convention='torch'; expected 'tf' or 'jax'", **VALUE),
    misuse("Pass a kernel by its result", "custom_gradient(primal=x)",
        "got primal=an array of dtype float32 and shape (3, 2); expected None or a function",
        **VALUE),
    misuse("Misspell autodiff", function("", option='variables="auto"').rstrip(),
        "got variables='auto'; expected arrays, not their names, or 'autodiff'", **VALUE),
    misuse("Decorate twice", "@custom_gradient" + function("").rstrip(),
        "is already decorated, or under `jax.jit`", "Decorate once"),
    misuse("Decorate above `jax.jit`", function("").replace("\ndef", "\n@jax.jit\ndef").rstrip(),
        "under `jax.jit`, which cannot return a rule. Decorate once, with `@jax.jit` above: "
        "`jax.jit(custom_gradient(f))`"),
]  # fmt: skip

MISUSES["calling"] = [
    misuse("Pass a keyword-only argument by position", function("f(x, 2.0)", args="x, *, scale"),
        "do not fit its signature, (x, *, scale): too many positional arguments"),
    misuse("Forget an argument", function("f()"),
        "got arguments that do not fit its signature, (x): missing a required argument"),
    misuse("Call a function that is an attribute of a class",
        function("class Layer:\n    act = f\n\nLayer().act(x)"),
        "do not fit its signature, (): too many positional arguments"),
]  # fmt: skip

PAIR = "must return a pair (y, grad_fn): its value and its rule, the function that computes its "
PAIR += "gradient. "
PAIRS = "Write `return y, grad_fn`, or `return (y1, y2), grad_fn` for two outputs, and do not call"
NO_ARRAY = "every leaf of y must be an array or a number"
MISMATCH = "and its `primal` must return values of the same structure, shapes and dtypes, but one "

MISUSES["returned by f"] = [
    misuse("Forget to return", returning("y = x**2"),
        PAIR + "It returned None", PAIRS),
    misuse("Return an object", returning("return type('Layer', (), {'dtype': x.dtype})()"),
        PAIR + "It returned an object of type Layer"),
    misuse("Return the value alone", returning("return x**2"),
        PAIR + "It returned an array of dtype float32 and shape (3, 2)"),
    misuse("Call the rule", returning("return x**2, grad(x)"),
        PAIR + "It returned an array of dtype float32 and shape (3, 2) as the rule"),
    misuse("Return two outputs without parentheses", returning("return x, x**2, grad"),
        PAIR + "It returned a tuple of length 3"),
    misuse("Return a string among the outputs", returning('return (x**2, "relu"), grad'),
        "returned the str 'relu' among its outputs at y[1]", NO_ARRAY,
        "Return other values from an undecorated function around it"),
    misuse("Return a pair from `primal`",
        function("f(x)", option="primal=lambda x: (x**2, lambda dy: 2 * x * dy)"),
        "returned the callable", "among its outputs at y[1]", NO_ARRAY,
        "A `primal` returns only `y`",
        of="<lambda>"),
    misuse("Return another structure from `primal`",
        function("jax.vjp(jax.jit(f), x)[0]", option="primal=lambda x: (x**2, x)"),
        MISMATCH + "returned (*, *), of float32[3,2], float32[3,2], and the other *, of float32"),
]  # fmt: skip

ALONE = ": a rule takes one upstream for each leaf of y (dicts in the order of sorted keys; with "
ALONE += '`convention="jax"`, one in the structure of y) and reads anything else from the function'

MISUSES["upstreams"] = [
    misuse("Take residuals, as for `jax.custom_vjp`",
        rule("return 2 * res * g", "x", "x**2", dys="res, g"),
        "cannot be called with 1 upstream gradient: ",
        "missing 1 required positional argument: 'g'", "Write `def grad(dy)`" + ALONE),
    misuse("Take one upstream of two outputs",
        function("jax.grad(lambda x: jnp.sum(f(x)[1]))(x)", "(x, 2 * x), lambda dy: 2 * dy"),
        "cannot be called with 2 upstream gradients: ", "takes 1 positional argument but 2 were "
        "given", "Write `def grad(*dys)`" + ALONE),
    misuse('Take one upstream per output in `convention="jax"`',
        function(
            "jax.grad(lambda x: jnp.sum(f(x)[1]))(x)", "(x, 2 * x), lambda dy, dz: dy + 2 * dz",
            option='convention="jax"',
        ),
        "cannot be called with 1 upstream gradient: ",
        "missing 1 required positional argument: 'dz'", "Write `def grad(dy)`" + ALONE),
    misuse("Declare variables, and do not take them",
        weight("return dy @ w.T", "dy", "variables=[w]"),
        "cannot be called with 1 upstream gradient and `variables`: ",
        "got an unexpected keyword argument 'variables'", "Write `def grad(dy, variables)`",
        of="loss.f"),
]  # fmt: skip

WANTED = "for the input `x`; expected float32[3,2], or None"
WARNING: Any = {"error": UserWarning}
COUNT: Any = {"error": ValueError}
NO_ORDER = "returned a flat list of gradients whose order is unknown: JAX has sorted the keys of a "
NO_ORDER += "dict, or a None may stand for one array or for several. "

MISUSES["gradients"] = [
    misuse("Return two gradients of one input", of_one("dy, dy"),
        "returned 2 gradients; expected 1, for the input `x`",
        "None stands for no gradient", **COUNT),
    misuse("Return one gradient of an array and a number, which `jax.jit` traces",
        function("jax.grad(lambda x: f(x, 3.0).sum())(x)", "n * x, lambda dy: n * dy", "x, n"),
        "returned an array of dtype float32 and shape (3, 2); expected 2, for the inputs `x`, `n`. "
        "Return `(dx, dn)`; None stands for no gradient. If a number is a setting, pass it by "
        "keyword: put it behind a `*`", **COUNT),
    misuse("Forget the `return` of the rule", rule("dx = 2 * dy", "x", "2 * x"),
        "returned None, which means no gradient for the input `x`", "Did it forget its `return`? "
        "`return (None,)` means no gradient without this warning",
        **WARNING),
    misuse("Return a generator", rule("return (g for g in (dy, dy.sum(0)))"),
        "returned an object of type generator; expected 2, for the inputs `x`, `b`", **COUNT),
    misuse("Return a dictionary by argument", rule('return {"x": dy, "b": dy.sum(0)}'),
        "returned gradients as `{'b': *, 'x': *}`; expected 2, for the inputs `x`, `b`. Return "
        "`(dx, db)`; None stands for no gradient"),
    misuse("Return a flat list for a dict",
        function("jax.grad(f, 1)(2.0, {'scale': 3.0, 'bias': 1.0})",
                 "x * p['scale'] + p['bias'], lambda dy: (dy * p['scale'], dy * x, dy)", "x, p"),
        NO_ORDER + "Return `(dx, {'bias': dbias, 'scale': dscale})` for the inputs"),
    misuse("Take upstreams in the order in which the keys of y were written",
        function("jax.grad(lambda x: f(x)['mean'].sum())(x)",
                 "{'mean': x, 'bound': 2 * x}, lambda dmean, dbound: dmean + 2 * dbound"),
        "gets the upstreams of y by the sorted keys of a dict, as in TensorFlow: of `y['bound']`, "
        "`y['mean']`", "wrote the keys in another order, `y['mean']`, `y['bound']`. Write them in "
        "sorted order, or return a tuple as y", **WARNING),
    misuse("Declare the gradient of a comparison",
        function("jax.grad(lambda x: jnp.where(f(x), x, 0).sum())(x)", "x > 0, lambda dy: 3 * dy"),
        "is differentiated, and returned no output that has a gradient, but bool: its "
        "gradient is zero, whatever its rule returns. To declare one (a surrogate), "
        "return a float, as in `(x > 0).astype(x.dtype)`", **WARNING),
    misuse("Swap the gradients of an array and a number",
        function("jax.grad(lambda x: f(x, 0.5).sum())(x)",
                 "jnp.clip(x, -limit, limit), lambda dy: (None, dy)", "x, limit"),
        "returned None for the input `x`, and a gradient of its shape for `limit`, which JAX does "
        "not differentiate. Return them in the order of the inputs"),
    misuse("Forget to sum over a broadcast axis", rule("return dy, dy"),
        "returned a gradient of type float32[3,2] for the input `b`; expected float32[2], or None. "
        "It has more entries than the input, along axis 0: did you forget to sum over it, as in "
        "`g.sum(axis=0)`?", **COUNT),
    misuse("Shard a gradient unlike its input", """
from jax.sharding import AxisType, PartitionSpec as P

@custom_gradient
def f(x):
    return 2 * x, lambda dy: jax.sharding.reshard(2 * dy, P(None, "data"))

with jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))):
    jax.grad(lambda x: f(x).sum())(jax.device_put(x, P("data", None)))
""",
        "a gradient of type float32[3,2@data] for the input `x`; expected float32[3@data,2], or "
        "None. Return `jax.sharding.reshard(g, jax.P", "('data', None))`",
        error=ValueError, jitted=False),
    misuse("Swap two gradients", rule("return x.T @ dy, dy @ w.T", "x, w", "x @ w"),
        "returned a gradient of type float32[2,4] for the input `x`; expected float32[3,2], or "
        "None. It fits the input `w`: return the gradients in their order", **COUNT),
    misuse("Return a complex gradient of a real input", of_one("2j * dy"),
        f"returned a gradient of type complex64[3,2] {WANTED}. Convert it, by `jnp.real` or "
        "`.astype`"),
    misuse("Return a function", of_one("lambda dy: 2 * dy"),
        f"returned the callable `f.grad.<lambda>` (model.py:4) {WANTED}",
        "Maybe you wrote `return g` instead of `return g(dy)`"),
]  # fmt: skip

UNDECLARED = "is differentiated with respect to values that it closes over"
LOSS: Any = {"of": "loss.f"}

MISUSES["variables"] = [
    misuse("Close over a weight, and give it no gradient", weight("return dy @ w.T", "dy"),
        UNDECLARED, "takes no `variables`", "  `w`: float32[2,4], first used at model.py:6\n",
        "Declare them, `custom_gradient(variables=[...])`",
        "pass them as arguments", "`def grad(dy, variables): ... return grad_xs, grad_vars`",
        '`variables="autodiff"`; for none', **LOSS),
    misuse("Declare other variables than those in use",
        weight("return dy @ w.T, [None]", option="variables=[b]"),
        UNDECLARED, "missing from its `variables`", "Declare them", **LOSS),
    misuse("Return the gradient of the input alone", weight("return dy @ w.T"),
        "was called with `variables=` and must return a pair (grad_xs, grad_vars), but returned "
        "an array of dtype float32 and shape (3, 2). Write `return dx, [...]`", **LOSS),
    misuse("Return a gradient for a list of variables that is empty",
        function("jax.grad(lambda x: f(x).sum())(x)",
                 "x**2, lambda dy, variables: (2 * x * dy, [dy])"),
        "returned 1 gradient; expected 0, for the undeclared variables. Return `[]`", **COUNT),
    misuse("Return the gradient of a frozen weight too",
        weight("return dy @ w.T, [x.T @ dy, dy.sum()]", y="x @ w * b[0]"),
        "returned 2 gradients; expected 1, for the undeclared variable `variables[0]`. "
        "Return `[...]`", "A frozen weight is not one: `custom_gradient(variables=...)` lists it "
        "always", error=ValueError, **LOSS),
    misuse("Misspell a key of the variables",
        weight('return dy @ w.T, {"w": None, "bias": None}', option='variables={"w": w, "b": b}'),
        "returned gradients as `{'bias': *, 'w': *}`; expected 2, for the variables "
        "`variables['b']`, `variables['w']`. Return `{'b': db, 'w': dw}`; None stands for",
        **LOSS),
    misuse("Return a list for the variables in a dict",
        weight("return dy @ w.T, [x.T @ dy, dy.sum()]", option='variables={"w": w, "b": b}'),
        NO_ORDER + "Return `{'b': db, 'w': dw}` for the variables", **LOSS),
    misuse("Declare variables by their names",
        weight("return dy @ w.T, [x.T @ dy]", option='variables=["w"]'),
        UNDECLARED, "missing from its `variables`", "arrays, or a pytree of them",
        **LOSS),
    misuse("Read a variable by its key, and declare none",
        weight('return dy @ w.T, {"w": x.T @ dy @ variables["w"]}'),
        "list indices must be integers or slices, not str", of=""),
    misuse("Ask a variable for its name",
        weight("return dy @ w.T, [x.T @ dy for v in variables if v.name]"),
        "has no attribute", "asks a variable for `name`. They are arrays, not `tf.Variable`s: the "
        "keys of a dict, `custom_gradient(variables={...})`, tell them apart, or `v is w`",
        error=AttributeError, jitted=False, **LOSS),
    misuse("Change a variable that the rule reads through an object", """
from types import SimpleNamespace

def loss(x):
    scale = 2.0
    helper = SimpleNamespace(call=lambda v: v * scale)

    @custom_gradient
    def f(x):
        return helper.call(x), lambda dy: helper.call(dy)

    y = f(x).sum()
    scale = 3.0
    return y

jax.grad(loss)(x)
""",
        "leads, through an object, to `loss.<lambda>`, whose variable 'scale' holds something "
        "else by now", "Hold that function in a local variable of the function that returns the "
        "rule, or bind the value where it is made, `lambda x, scale=scale: ...`",
        of="loss.f.<lambda>", error=ValueError, jitted=False),
    misuse("Append to a list that holds weights, in a rule", """
def loss(w):
    seen = [w]

    @custom_gradient
    def f(x):
        def grad(dy, variables):
            seen.append(dy)
            return dy * w, [dy * x]
        return w * x, grad
    return f(2.0)

jax.jit(jax.grad(loss))(1.0)
""",
        "changed a list or a dict of an outer function", "so the change would be lost. Keep notes "
        "in one that holds no traced values, or in a `jax.new_ref`",
        of="loss.f.grad"),
    misuse("Assign a weight to a layer that outlives the loss", """
class Layer:
    @custom_gradient(variables="autodiff")
    def f(self, x):
        return self.w * x, lambda dy: self.w * dy

layer = Layer()

def loss(w):
    layer.w = w
    return layer.f(2.0)

jax.grad(loss)(1.0)
jax.grad(layer.f)(2.0)
""",
        "`Layer.f` (model.py:2) reads a tracer of a transformation that has ended", "Most often a "
        "loss assigned it, as in `layer.w = w`: build or copy the layer inside the loss",
        of="Layer.f", error=jax.errors.UnexpectedTracerError, jitted=False),
    misuse("Branch in the rule of a method, under `jax.jit`", """
class Layer:
    def __init__(self, w):
        self.w = w

    @custom_gradient(variables=lambda self: self.w)
    def f(self, x):
        return self.w * x, lambda dy, variables: (dy * self.w if dy > 0 else dy, dy * x)

jax.jit(jax.grad(lambda w: Layer(w).f(2.0)))(1.0)
""",
        "needs the value of an array that JAX is tracing", "Raised by the rule of `Layer.f` "
        "(model.py:5) (model.py:7): JAX records it", "JAX records `Layer.f` (model.py:5) at "
        "the call, without values: it reads a traced value in an object. Read it from a "
        "variable or a list, tuple or dict",
        of="Layer.f", error=jax.errors.TracerBoolConversionError),
    misuse("Call a decorated function in a thread pool, in a loss", """
from concurrent.futures import ThreadPoolExecutor

f = custom_gradient(lambda x: (x, lambda dy: -dy))

def loss(x):
    with ThreadPoolExecutor() as pool:
        return sum(pool.map(f, x))

jax.grad(loss)(b)
""",
        "but nothing in the thread that calls it, so its gradient would be lost", "Call the "
        "function in the thread that differentiates it, and not in a thread pool",
        of="<lambda>", error=jax.errors.UnexpectedTracerError),
    misuse("Loop over `variables` where none is differentiated",
        weight("return dy @ w.T, [x.T @ dy for v in variables]", "dy, variables=None",
               args="x, w").replace("(0, 1)", "0"),
        "'NoneType' object is not iterable", of=""),
    misuse("Use NumPy on a weight that is not declared",
        weight("return dy @ w.T, [x.T @ dy]", y="x @ np.asarray(w)"),
        "`loss.f` (model.py:2) needs the value of an array that JAX is tracing", "If it is a "
        "weight that the function closes over: eagerly, any operation on it, such as `jnp.asarray",
        error=jax.errors.TracerArrayConversionError, jitted=False, **LOSS),
    misuse("Read a learned temperature in the rule alone",
        weight("return dy @ w.T / b, [x.T @ dy for _ in variables]", args="b, w, x"),
        "is differentiated with respect to `b`, which only its rule reads: "
        "this gradient is zero", "declare the value, `custom_gradient(variables=...)`, and "
        "return it; if there is none, read `jax.lax.stop_gradient` of the value",
        error=UserWarning, **LOSS),
]  # fmt: skip

LINEAR = "is not linear in its upstream gradients, or JAX cannot transpose it: it contains "
WHY = "Forward mode (`jax.jvp`, `jax.jacfwd`, `jax.linearize`) transposes the rule."
REVERSE = "or use reverse mode (`jax.grad`; for the Hessian `H`, `jax.jacrev(jax.jacrev(f))`; for "
REVERSE += "`v @ H`, `jax.grad(lambda x: jnp.vdot(jax.grad(f)(x), v))(x)`)"

MISUSES["forward mode"] = [
    *(
        misuse(title, forward(returned), LINEAR, operation, WHY,
               "Make it linear in its upstreams", REVERSE)
        for title, returned, operation in (
            ("Clip the gradient", "jnp.clip(2 * x * dy, -1, 1)",
             "`max`, which is not linear (in `clip`), at model.py:3."),
            ("Add a constant", "2 * x * dy + 1",
             "`add` of an upstream and a constant, at model.py:3."),
            ("Forget to multiply by the upstream", "2 * x", "does not depend on the upstreams"),
        )
    ),
    misuse("Branch on the upstream", forward("dy if dy.sum() > 0 else -dy"),
        "Write it with `jax.numpy`", "Under `jax.jvp` and `jax.jacfwd`, upstreams have no values",
        error=jax.errors.TracerBoolConversionError, jitted=False),
    misuse("Compute the gradient outside of JAX",
        forward("jax.pure_callback(lambda dy: 2 * dy, dy, dy)"),
        LINEAR + "`pure_callback`, which JAX cannot transpose, at model.py:3.", WHY,
        "decorate code outside of JAX and its adjoint as each other's rules"),
    misuse("Loop until the upstream is small",
        forward("jax.lax.while_loop(lambda d: d.sum() > 1, lambda d: d / 2, dy)"),
        LINEAR + "`while`, which JAX cannot transpose, at model.py:3.", WHY,
        "write a loop as a `scan`"),
]  # fmt: skip

BODY = "computes something that JAX cannot differentiate"
STOP = "nothing of it but `y`, the only output, write `jax.lax.stop_gradient` around its"

VJP = """
@jax.custom_vjp
def squared(x):
    return x**2

squared.defvjp(lambda x: (x**2, x), lambda x, dy: (2 * x * dy,))
"""

MISUSES["bodies"] = [
    misuse("Call back to Python in the function, and ask for the second order",
        function("jax.jacrev(jax.grad(lambda x: f(x).sum()))(x)",
                 "jax.pure_callback(lambda x: x**3, x, x), lambda dy: 3 * x**2 * dy"),
        "`f` (model.py:1) " + BODY, STOP,
        error=ValueError),
    misuse("Call a `jax.custom_vjp` in the function, and ask for a Hessian",
        VJP + function("jax.hessian(lambda x: f(x).sum())(x)", "squared(x), lambda dy: 2 * x * dy"),
        BODY, STOP),
]  # fmt: skip

MISUSES["helpers"] = [
    misuse("Recompute the result of a call", "recompute_grad(jnp.sin(x))",
        "recompute_grad takes a function, but got an array",
        "Write `recompute_grad(f)(x)`, not `recompute_grad(f(x))`", of=""),
    misuse("Name a policy", 'recompute_grad(jnp.sin, policy="dots")',
        "recompute_grad got policy='dots'; expected None or a function",
        "such as those in jax.checkpoint_policies", **VALUE),
    misuse("Pass through a sum", "jax.grad(grad_pass_through(lambda x: x.sum()))(x)",
        "the gradient of the corresponding output, so inputs and outputs must match in number",
        "inputs:  float32[3,2]", "outputs: float32[]",
        "or write the rule with `custom_gradient`", error=ValueError, of="<lambda>"),
]  # fmt: skip

FLOATS = "a function with float inputs (2.0, not 2): `x` is an array of dtype int32 and shape"

MISUSES["checking"] = [
    misuse("Check the result of a call", function("check_gradient(f(x), x)"),
        "check_gradient got h=an array", "expected a function, and its arguments after it", **VALUE,
    ),
    misuse("Check at integers", function("check_gradient(f, jnp.arange(3))"),
        "check_gradient got h='f'", FLOATS, **VALUE),
    *(
        misuse(
            f"Check with `{name}={value}`", function(f"check_gradient(f, x, {name}={value})"),
            f"check_gradient got {name}={value}; expected {expected}", **VALUE,
        )
        for name, value, expected in (
            ("order", "0", "a whole number of at least 1"),
            ("expect", "'close'", "'exact' or 'surrogate'"),
        )
    ),
    misuse("Declare a gradient that is wrong by a factor",
        function("assert_gradient(f, x)", "x**2, lambda dy: dy * x"),
        "Gradient of `f`: WRONG", "declared = 0.5 * expected",
        error=AssertionError, of="", jitted=False),
    misuse("Check a function that reads a global layer",
        function(
            "layer = f\nassert_gradient(lambda x: layer(x), x)",
            "x * w[0, :2], lambda dy, variables: (dy * w[0, :2], [None])"),
        "not checked in full", "not checked   a float32[2,4] (model.py:3:",
        "make it an argument, as in `check_gradient(lambda w, x: make(w)(x), w, x)`",
        error=AssertionError, of="", jitted=False),
]  # fmt: skip

LINE_1 = "tracing the function f at model.py:1"

MISUSES["jax"] = [
    misuse("Branch on a value under `jax.jit`",
        function("jax.jit(f)(x)", "x if x.sum() > 0 else -x, lambda dy: dy"),
        "boolean conversion of traced array", LINE_1,
        "it depends on the value of the argument x.",
        "`f` (model.py:1) needs the value of an array that JAX is tracing. Write it with "
        "`jax.numpy`, `jnp.where` instead of `if`", error=jax.errors.TracerBoolConversionError),
    misuse("Format a value under `jax.jit`",
        function("jax.jit(f)(1.0)", "(print(f'x = {x:g}'), x)[1], lambda dy: dy"),
        "unsupported format string passed to", "`f` (model.py:1) needs the value of an array "
        "that JAX is tracing", "`jax.debug.print` instead of a format (or drop what follows the "
        "colon, as in `{x:g}`)"),
    misuse("Let `jax.jit` trace a number that is a setting",
        function("jax.jit(f)(x, 6)", "x.reshape(n), lambda dy: (dy.reshape(3, 2), None)", "x, n"),
        LINE_1, "static_argnums", of=""),
    misuse("Differentiate with respect to a string",
        function("jax.grad(f, 1)(x, 'relu')", "x, lambda dy: dy", "x, mode"),
        "'relu' of type <class 'str'> is not a valid JAX type", of=""),
    misuse("Let a value out by a list",
        "kept = []\nf = custom_gradient(lambda x: (kept.append(2 * x) or x, lambda dy: dy))\n\n"
        "jax.jit(f)(x)\nkept[0] + 1",
        "to escape the scope of the transformation", "intermediate value with type float32[3,2]",
        error=jax.errors.UnexpectedTracerError, of="", jitted=False),  # the message has columns
    misuse("Call back to Python in a rule, and ask for the second order",
        function(
            "jax.grad(jax.grad(f))(1.0)",
            "x**2, lambda dy: dy * jax.pure_callback(lambda x: 2 * x, x, x)",
        ),
        BODY,
        "let the rule call a decorated function for it", error=ValueError),
    misuse("Call back to Python in a jitted rule, and ask for the second order",
        function(
            "jax.jacfwd(jax.jit(jax.grad(f)))(1.0)",
            "x**2, lambda dy: dy * jax.pure_callback(lambda x: 2 * x, x, x)",
        ),
        "Pure callbacks do not support JVP", **VALUE),
    misuse("Call a `jax.custom_vjp` in a jitted function, and ask for a Hessian",
        VJP + function("jax.hessian(jax.jit(f))(1.0)", "squared(x), lambda dy: 2 * x * dy"),
        "can't apply forward-mode autodiff (jvp) to a custom_vjp function", of=""),
    misuse("Transpose a jitted function",
        function("jax.linear_transpose(jax.jit(f), x)(x)", "3 * x, lambda dy: 3 * dy"),
        "Transpose rule (for reverse-mode differentiation) for ",
        error=NotImplementedError, of=""),
    misuse("Map an output that ignores what is mapped, under `jit`",
        function("jax.jit(jax.vmap(f, (None, 0), (None, 0)))(x, x)", "(x, y), lambda dx, dy: "
                 "(dx, dy)", "x, y"),
        "at vmap out_axes[0], got axis spec None", **VALUE),
    misuse("Put a decorated function in a `while_loop`",
        function("jax.grad(lambda x: jax.lax.while_loop(lambda x: x < 9, f, x))(2.0)"),
        "Reverse-mode differentiation does not work for lax.while_loop", **VALUE),
    misuse("Sum over devices in a rule that runs outside of the mesh",
        function("jax.grad(f)(1.0)", 'x**2, lambda dy: jax.lax.psum(2 * x * dy, "devices")'),
        "unbound axis name", "names an axis that is not bound where JAX runs it. Call the function "
        "inside the `shard_map` or `vmap` that names it", error=NameError, jitted=False),
]  # fmt: skip
