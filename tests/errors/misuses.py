"""Misuses: what one can get wrong, by the section of docs/errors.md that answers it.

`test_misuses.py` runs all of them, and `docs/_ext/errors.py` shows each with what it says. The
code of one is a module of its own, `model.py`, that knows `names()`; its last line raises. A
command is one of the examples with bad options.
"""

import ast
import contextlib
import io
import runpy
import shlex
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tfgrad_jax import custom_gradient, explain, grad_pass_through, recompute_grad
from tfgrad_jax.testing import assert_gradient, check_gradient

ROOT = Path(__file__).parents[2]
ARRAYS = {"x": jnp.ones((3, 2)), "w": jnp.ones((2, 4)), "b": jnp.ones(2)}


class Misuse(NamedTuple):
    """A mistake, and what its message must say."""

    title: str  # what the user did
    code: str  # Python, or a command
    says: tuple[str, ...]  # what was expected, what came, what to do
    error: type[BaseException] = TypeError
    of: str = "f"  # the function that it names, with its place; or ""
    jitted: bool = True  # whether it says the same under `jax.jit`

    @property
    def is_command(self) -> bool:
        return self.code.startswith("python ")


def misuse(title: str, code: str, *says: str, **more: Any) -> Misuse:
    return Misuse(title, code.strip("\n"), says, **more)


# --- how one is run -------------------------------------------------------------------------------


def run(misuse: Misuse, jitted: bool = False) -> Any:
    """Run the code, with what it returns, eagerly or as what `jax.jit` traces."""
    if misuse.is_command:
        return _command(misuse.code)
    module = ast.parse(misuse.code, "model.py")
    last = module.body[-1]
    value = ast.Expression(module.body.pop().value) if isinstance(last, ast.Expr) else None

    def program(arrays: dict[str, jax.Array]) -> Any:
        space = {
            "__name__": "model", "jax": jax, "jnp": jnp, "np": np,
            "custom_gradient": custom_gradient, "recompute_grad": recompute_grad,
            "grad_pass_through": grad_pass_through, "explain": explain,
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


def _command(line: str) -> Any:
    """Run an example in a folder of its own; raise what it says as it ends."""
    _, script, *options = shlex.split(line)
    heard = io.StringIO()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "folder.png").mkdir()
        (folder / "file").touch()
        stack.enter_context(contextlib.chdir(folder))
        sys.path.insert(0, str(ROOT / "examples"))  # they import each other
        stack.callback(sys.path.remove, str(ROOT / "examples"))
        main = runpy.run_path(str(ROOT / script))["main"]
        stack.enter_context(contextlib.redirect_stderr(heard))
        stack.callback(setattr, sys, "argv", sys.argv)
        sys.argv = [script, *options]
        try:
            return main()
        except SystemExit as exit:
            assert exit.code == 2
            raise SystemExit(heard.getvalue().strip().splitlines()[-1]) from None


def message(error: BaseException) -> str:
    """Return what an error says, with its notes."""
    notes = [n for n in getattr(error, "__notes__", ()) if "custom_gradient" in n or "`" in n]
    return "\n".join([str(error), *notes])


# --- how one is written ---------------------------------------------------------------------------


def rule(body: str, args: str = "x, b", y: str = "x + b", call: str = "", dys: str = "dy") -> str:
    """Return code that differentiates a function whose rule has this body."""
    call = call or f"jnp.sum(f({args}))"
    count = len(args.split(", "))
    argnums = f", {tuple(range(count))}" if count > 1 else ""
    return f"""
@custom_gradient
def f({args}):
    def grad({dys}):
        {body}
    return {y}, grad

jax.grad(lambda {args}: {call}{argnums})({args})
"""


def of_one(returned: str) -> str:
    """Return code that differentiates `2 * x`, whose rule returns this."""
    return rule(f"return {returned}", "x", "2 * x")


def of_tree(returned: str, tree: str = '{"w": x, "b": b}', y: str = 'p["w"] + p["b"]') -> str:
    """Return code that differentiates a function of a pytree."""
    code = rule(f"return {returned}", "p", y)
    return code.replace("(p)\n\n", "(p)\n").removesuffix("(p)\n") + f"({tree})\n"


def weight(body: str, dys: str = "dy, variables", option: str = "", y: str = "x @ w") -> str:
    """Return code that differentiates with respect to a weight that a function closes over."""
    return f"""
def loss(w, x):
    @custom_gradient{option and f"({option})"}
    def f(x):
        def grad({dys}):
            {body}
        return {y}, grad
    return f(x).sum()

jax.grad(loss, (0, 1))(w, x)
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


def forward(returned: str, last: str = "jax.jvp(f, (x,), (x,))[1]") -> str:
    return function(last, f"x**2, lambda dy: {returned}")


def returning(what: str) -> str:
    return f"""
@custom_gradient
def f(x):
    def grad(dy):
        return 2 * x * dy
    {what}

f(x)
"""


def command(options: str, *says: str, script: str = "train_digits") -> Misuse:
    code = f"python examples/{script}.py {options}"
    return Misuse(f"`{options}`", code, says, SystemExit, "", False)


# --- the table ------------------------------------------------------------------------------------

NO_FUNCTION = "custom_gradient takes a function, but got"
VALUE: Any = {"error": ValueError, "of": ""}

DECORATING = [
    misuse("Decorate the result of a call", "custom_gradient(jnp.sin(x))",
        NO_FUNCTION + " an array", "is not callable. Write `custom_gradient(f)(x)`, not "
        "`custom_gradient(f(x))`",
        of=""),
    misuse("Pass weights by position", "custom_gradient([w])(lambda x: (x @ w, None))",
        NO_FUNCTION + " a list of length 1", "and options by name", of=""),
    misuse("Pass an option by position",
        "def f(x):\n    return x @ w, lambda dy: dy @ w.T\n\ncustom_gradient(f, [w])",
        "custom_gradient() takes from 0 to 1 positional arguments but 2 were given", of=""),
    misuse("Decorate a property",
        """
class Model:
    @custom_gradient
    @property
    def loss(self):
        return 1.0, lambda dy: None
""",
        "got an object of type property, which is not callable", of="",
    ),
    misuse("Misspell an option", "custom_gradient(varables=[w])",
        "custom_gradient() got an unexpected keyword argument 'varables'", of=""),
    misuse("Name arguments that are not differentiated, as for `jax.custom_vjp`",
        "custom_gradient(nondiff_argnums=(1,))",
        "custom_gradient() got an unexpected keyword argument 'nondiff_argnums'", of=""),
    misuse("Ask for another convention", 'custom_gradient(convention="torch")',
        "got convention='torch'; expected 'tf' or 'jax'", **VALUE),
    misuse("Pass a kernel by its result", "custom_gradient(primal=x)",
        "got primal=an array of dtype float32 and shape (3, 2); expected None or a function",
        **VALUE),
    misuse("Decorate twice", "@custom_gradient" + function("").rstrip(),
        "is already decorated, or under `jax.jit`", "Decorate once"),
    misuse("Decorate what is decorated below `jax.jit`",
        "@custom_gradient\n@jax.jit" + function("").rstrip(),
        "under `jax.jit`, which cannot return a rule", "with `@jax.jit` above"),
    misuse("Decorate above `jax.jit`", function("").replace("\ndef", "\n@jax.jit\ndef").rstrip(),
        "under `jax.jit`, which cannot return a rule. Decorate once, with `@jax.jit` above: "
        "`jax.jit(custom_gradient(f))`"),
    misuse("Declare the rule as of a `jax.custom_vjp`", function("f.defvjp(None, None)"),
        "has no attribute 'defvjp'. (It returns its rule: `return y, grad_fn`.)",
        error=AttributeError),
]  # fmt: skip

FITS = "got arguments that do not fit its signature, (x): "

CALLING = [
    misuse("Forget a keyword-only argument", function("f(x)", args="x, *, scale"),
        "do not fit its signature, (x, *, scale): missing a required", "argument: 'scale'"),
    misuse("Pass a keyword-only argument by position", function("f(x, 2.0)", args="x, *, scale"),
        "do not fit its signature, (x, *, scale): too many positional arguments"),
    misuse("Forget an argument", function("f()"), FITS + "missing a required argument"),
    misuse("Call a function that is an attribute of a class", """
@custom_gradient
def f(x):
    return 2 * x, lambda dy: 2 * dy

class Layer:
    act = f

    def __call__(self, x):
        return self.act(x)

Layer()(x)
""",
        "do not fit its signature, (): too many positional arguments. It is an attribute of a "
        "class, so Python passes the instance as its first argument. In the class, write "
        "`staticmethod(h)` instead of `h`"),
]  # fmt: skip

PAIR = "must return a pair (y, grad_fn): its value and its rule, the function that computes its "
PAIR += "gradient. "
NO_RULE = PAIR + "It returned {} as the rule"
PAIRS = "Write `return y, grad_fn`, or `return (y1, y2), grad_fn` for two outputs, and do not call"
NO_ARRAY = "every leaf of y must be an array or a number"
MISMATCH = "and its `primal` must return values of the same structure, shapes and dtypes, but one "

RETURNED_BY_F = [
    misuse("Forget to return", returning("y = x**2"),
        PAIR + "It returned None", PAIRS),
    misuse("Return the value alone", returning("return x**2"),
        PAIR + "It returned an array of dtype float32 and shape (3, 2)",
        PAIRS),
    misuse("Return the rule alone", returning("return grad"),
        PAIR + "It returned the callable `f.grad`"),
    misuse("Call the rule", returning("return x**2, grad(x)"),
        NO_RULE.format("an array of dtype float32 and shape (3, 2)"), PAIRS),
    misuse("Return the pair the other way round", returning("return grad, x**2"),
        NO_RULE.format("an array of dtype float32 and shape (3, 2)"),
        PAIRS),
    misuse("Return two outputs without parentheses", returning("return x, x**2, grad"),
        PAIR + "It returned a tuple of length 3", PAIRS),
    misuse("Return a string among the outputs", returning('return (x**2, "relu"), grad'),
        "returned the str 'relu' among its outputs at y[1]", NO_ARRAY,
        "Return other values from an undecorated function around it"),
    misuse("Return a pair from `primal`",
        function("f(x)", option="primal=lambda x: (x**2, lambda dy: 2 * x * dy)"),
        "returned the callable", "among its outputs at y[1]", NO_ARRAY,
        "A `primal` returns only `y`",
        of="<lambda>"),
    misuse("Give `primal` other arguments", function("f(x)", option="primal=lambda: 1.0"),
        "<lambda>() takes 0 positional arguments but 1 was given", of=""),
    misuse("Return another structure from `primal`",
        function("jax.vjp(jax.jit(f), x)[0]", option="primal=lambda x: (x**2, x)"),
        MISMATCH + "returned (*, *), of float32[3,2], float32[3,2], and the other *, of float32"),
]  # fmt: skip

ALONE = ": a rule takes one upstream for each leaf of y (dicts in the order of sorted keys; with "
ALONE += '`convention="jax"`, one in the structure of y) and reads anything else from the function'

UPSTREAMS = [
    misuse("Take residuals, as for `jax.custom_vjp`",
        rule("return 2 * res * g", "x", "x**2", dys="res, g"),
        "cannot be called with 1 upstream gradient: ",
        "missing 1 required positional argument: 'g'",
        "Write `def grad(dy)`" + ALONE),
    misuse("Take one upstream of two outputs",
        rule("return dys[1]", "x", "(x, 2 * x)", "jnp.sum(f(x)[1])", "dys"),
        "cannot be called with 2 upstream gradients: ", "takes 1 positional argument but 2 were "
        "given", "Write `def grad(*dys)`"),
    misuse('Take one upstream per output in `convention="jax"`',
        function(
            "jax.grad(lambda x: jnp.sum(f(x)[1]))(x)", "(x, 2 * x), lambda dy, dz: dy + 2 * dz",
            option='convention="jax"',
        ),
        "cannot be called with 1 upstream gradient: ",
        "missing 1 required positional argument: 'dz'"),
    misuse("Declare variables, and do not take them",
        weight("return dy @ w.T", "dy", "variables=[w]"),
        "cannot be called with 1 upstream gradient and `variables`: ",
        "got an unexpected keyword argument 'variables'", "Write `def grad(dy, variables)`",
        of="loss.f"),
    misuse("Take one upstream of two outputs, and variables",
        weight("return dy @ w.T, [x.T @ dy]", y="(x @ w, x)").replace("f(x).sum()", "f(x)[1].sum()"
               ).replace("(loss, (0, 1))(w, x)", "(lambda w: loss(w, x))(w)"),
        "Write `def grad(*dys, variables)`", of="loss.f"),
]  # fmt: skip

WANTED = "for the input `x`; expected float32[3,2], or None"
NONE = "Did it forget its `return`? `return {}` means no gradient without this warning"
WARNING: Any = {"error": UserWarning}
COUNT: Any = {"error": ValueError}
NO_ORDER = "returned a flat list of gradients whose order is unknown: "
NO_ORDER += "JAX has sorted the keys of a dict, or a None may stand for one array or for several. "
MISPLACED = (
    "returned None for the input `x`, and a gradient of its shape for a value that JAX does "
)
MISPLACED += "not differentiate. Return them in the order of the inputs"
CONVERT = "Convert it, by `jnp.real` or `.astype`"

GRADIENTS = [
    misuse("Return two gradients of one input", of_one("dy, dy"),
        "returned 2 gradients; expected 1, for the input `x`",
        "None stands for no gradient", **COUNT),
    misuse("Return a gradient too few", rule("return dy"),
        "returned an array of dtype float32 and shape (3, 2); expected 2, for the inputs `x`, `b`. "
        "Return `(dx, db)`; None stands", **COUNT),
    misuse("Return one gradient of an array and a number, which `jax.jit` traces",
        function("jax.grad(lambda x: f(x, 3.0).sum())(x)", "n * x, lambda dy: n * dy", "x, n"),
        "expected 2, for the inputs `x`, `n`. Return `(dx, dn)`; None stands for no gradient. If a "
        "number is a setting, pass it by keyword: put it behind a `*`", **COUNT),
    misuse("Forget the `return` of the rule", rule("dx = 2 * dy", "x", "2 * x"),
        "returned None, which means no gradient for the input `x`", NONE.format("(None,)"),
        **WARNING),
    misuse("Forget the `return` of a rule for two", rule("dx, db = dy, dy.sum(0)"),
        "returned None, which means no gradient for the inputs `x`, `b`",
        NONE.format("(None, None)"), **WARNING),
    misuse("Forget to sum over an axis, beside integers of its shape",
        function("jax.grad(lambda r: f(jnp.ones((3, 2), int), r).sum())(b)",
                 "k * r, lambda dy: (None, dy * k)", "k, r"),
        "of type float32[3,2] for the input `r`; expected float32[2], or None. It has more entries",
        "as in `g.sum(axis=0)`?", **COUNT),
    misuse("Return a generator", rule("return (g for g in (dy, dy.sum(0)))"),
        "returned an object of type generator; expected 2, for the inputs `x`, `b`", **COUNT),
    misuse("Yield the gradient", rule("yield 2 * dy", "x", "2 * x"),
        f"returned an object of type generator {WANTED}"),
    misuse("Return a dictionary by argument", rule('return {"x": dy, "b": dy.sum(0)}'),
        "returned gradients as `{'b': *, 'x': *}`; expected 2, for the inputs `x`, `b`. Return "
        "`(dx, db)`; None stands for no gradient"),
    misuse("Return a flat list for a dict",
        """
@custom_gradient
def f(x, p):
    return x * p["scale"] + p["bias"], lambda dy: (dy * p["scale"], dy * x, dy)

jax.grad(f, 1)(2.0, {"scale": 3.0, "bias": 1.0})
""",
        NO_ORDER + "Return `(dx, {'bias': ..., 'scale': ...})` for the inputs"),
    misuse("Return None for a list, in a list that could be one for its arrays",
        function("jax.grad(lambda p: f(p).sum())([x, x])", "p[0] + scale * p[1], "
                 "lambda dy: (None, dy)", "p, scale=2.0"),
        NO_ORDER + "Return `[..., ...]`"),
    misuse("Return the gradient in the place of what is None",
        function("jax.grad(lambda x: f(None, x).sum())(x)", "2 * x, lambda dy: (2 * dy, None)",
                 "mask, x"),
        MISPLACED),
    misuse("Take upstreams in the order in which the keys of y were written",
        """
@custom_gradient
def f(x):
    return {"mean": x, "bound": 2 * x}, lambda dmean, dbound: dmean + 2 * dbound

jax.grad(lambda x: f(x)["mean"].sum())(x)
""",
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
        MISPLACED),
    misuse("Forget to sum over a broadcast axis", rule("return dy, dy"),
        "returned a gradient of type float32[3,2] for the input `b`; expected float32[2], or None. "
        "It has more entries than the input, along axis 0: did you forget to sum over it, as in "
        "`g.sum(axis=0)`?", **COUNT),
    misuse("Give a constant a gradient of another shape",
        """
@custom_gradient
def f(x, b):
    return x + b, lambda dy: (dy, dy)

jax.grad(lambda x: f(x, jnp.ones(2)).sum())(x)
""",
        "of type float32[3,2] for the input `b`; expected float32[2], or None",
        "did you forget to sum over it, as in `g.sum(axis=0)`?",
        error=ValueError, jitted=False),
    misuse("Shard a gradient unlike its input",
        """
from jax.sharding import AxisType, PartitionSpec as P

mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))

@custom_gradient
def f(x):
    return 2 * x, lambda dy: jax.sharding.reshard(2 * dy, P(None, "data"))

with jax.set_mesh(mesh):
    jax.grad(lambda x: f(x).sum())(jax.device_put(x, P("data", None)))
""",
        "a gradient of type float32[3,2@data] for the input `x`; expected float32[3@data,2], or "
        "None. Return `jax.sharding.reshard(g, jax.P", "('data', None))`",
        error=ValueError, jitted=False),
    misuse("Swap two gradients", rule("return x.T @ dy, dy @ w.T", "x, w", "x @ w"),
        "returned a gradient of type float32[2,4] for the input `x`; expected float32[3,2], or "
        "None. It fits the input `w`: return the gradients in their order", **COUNT),
    misuse("Return a complex gradient of a real input", of_one("2j * dy"),
        f"returned a gradient of type complex64[3,2] {WANTED}. {CONVERT}"),
    misuse("Return a real gradient of a complex input",
        rule("return dy", "z", "z.real").replace("(z)\n", "(x + 1j)\n"),
        "returned a gradient of type float32[3,2] for the input `z`; expected complex64[3,2]",
        CONVERT),
    misuse("Return a function", of_one("lambda dy: 2 * dy"),
        f"returned the callable `f.grad.<lambda>` (model.py:4) {WANTED}",
        "Maybe you wrote `return g` instead of `return g(dy)`"),
]  # fmt: skip

UNDECLARED = "is differentiated with respect to values that it closes over"
REMEDIES = ("pass them as arguments", "`def grad(dy, variables): ... return grad_xs, grad_vars`")
GROUPS = "was called with `variables=` and must return a pair (grad_xs, grad_vars), but returned "
FEW = "for the undeclared variable `variables[0]`"
LOSS: Any = {"of": "loss.f"}
LOSS_COUNT: Any = {"of": "loss.f", "error": ValueError}

VARIABLES = [
    misuse("Close over a weight, and give it no gradient", weight("return dy @ w.T", "dy"),
        UNDECLARED, "takes no `variables`", "  `w`: float32[2,4], first used at model.py:6\n",
        "Declare them, `custom_gradient(variables=[...])`", *REMEDIES,
        'Or decorate with `custom_gradient(variables="autodiff")`', **LOSS),
    misuse("Close over what is computed from a weight", """
def loss(w, x):
    scale = jnp.sum(w)

    @custom_gradient
    def f(x):
        return scale * x, lambda dy: scale * dy
    return f(x).sum()

jax.grad(loss, (0, 1))(w, x)
""",
        UNDECLARED, "float32[], first used at model.py:6\n",
        "For no gradient, let the function close over `jax.lax.stop_gradient(w)` instead of `w`",
        **LOSS),
    misuse("Differentiate a keyword-only argument",
        function("jax.grad(lambda b: f(x, scale=b).sum())(b)", "x * scale, lambda dy: dy * scale",
                 args="x, *, scale"),
        UNDECLARED, "float32[2], first used at model.py:3"),
    misuse("Declare other variables than those in use",
        weight("return dy @ w.T, [None]", option="variables=[b]"),
        UNDECLARED, "missing from its `variables`", "Declare them",
        **LOSS),
    misuse("Return the gradient of the input alone", weight("return dy @ w.T"),
        GROUPS + "an array of dtype float32 and shape (3, 2). Write `return dx, [...]`", **LOSS),
    misuse("Take `variables` where nothing is closed over",
        function("jax.grad(lambda x: f(x).sum())(x)",
                 "x**2, lambda dy, variables: 2 * x * dy"),
        GROUPS + "an array of dtype float32 and shape (3, 2). Write `return dx, []`; or drop "
        "`variables` if no weight has a gradient"),
    misuse("Return a gradient for a list of variables that is empty",
        function("jax.grad(lambda x: f(x).sum())(x)",
                 "x**2, lambda dy, variables: (2 * x * dy, [dy])"),
        "returned 1 gradient; expected 0, for the undeclared variables. Return `[]`", **COUNT),
    misuse("Return the gradient of a frozen weight too",
        weight("return dy @ w.T, [x.T @ dy, dy.sum(0)]", y="x @ w + v").replace(
            "def loss", "v = jnp.ones(4)\n\ndef loss"),
        f"returned 2 gradients; expected 1, {FEW}. Return `[...]`", "A frozen weight is not one: "
        "`custom_gradient(variables=...)` lists it always", **LOSS_COUNT),
    misuse("Return the gradients of variables in another order than that of their first use",
        weight("return dy @ w.T, [dy.sum(0), x.T @ dy]", y="x @ w + v").replace(
            "(w, x):", "(w, v, x):").replace("(0, 1))(w, x)", "(0, 1, 2))(w, jnp.ones(4), x)"),
        "returned a gradient of type float32[4] for the undeclared variable `variables[0]`",
        "It fits the undeclared variable `variables[1]`: return the gradients in their order",
        **LOSS_COUNT),
    misuse("Return a dictionary for the list of variables",
        weight('return dy @ w.T, {"w": x.T @ dy}'),
        f"returned gradients as `{{'w': *}}`; expected 1, {FEW}. Return `[...]`", **LOSS),
    misuse("Misspell a key of the variables",
        weight('return dy @ w.T, {"w": x.T @ dy, "bias": dy.sum(0)}', y="x @ w + v",
               option='variables={"w": w, "v": v}').replace(
            "def loss", "v = jnp.ones(4)\n\ndef loss"),
        "returned gradients as `{'bias': *, 'w': *}`; expected 2, for the variables "
        "`variables['v']`, `variables['w']`. Return `{'v': ..., 'w': ...}`; None stands for",
        **LOSS),
    misuse("Return a list for the variables in a dict",
        weight("return dy @ w.T, [x.T @ dy, dy.sum(0)]", y="x @ w + v",
               option='variables={"w": w, "v": v}').replace(
            "def loss", "v = jnp.ones(4)\n\ndef loss"),
        NO_ORDER + "Return `{'v': ..., 'w': ...}` for the variables", **LOSS),
    misuse("Declare variables by their names",
        weight("return dy @ w.T, [x.T @ dy]", option='variables=["w"]'),
        UNDECLARED, "missing from its `variables`", "arrays, not the objects that hold them",
        **LOSS),
    misuse("Declare an object that holds an array, such as an nnx Param",
        """
class Param:
    def __init__(self, value):
        self.value = value

jax.tree_util.register_dataclass(Param, ["value"], [])
"""
        + weight("return dy @ w.T, {'w': x.T @ dy}", option='variables={"w": Param(w)}'),
        "expected 1, for the variable `variables['w'].value`",
        **LOSS),
    misuse("Declare an attribute that a model does not have",
        """
class Layer:
    def __init__(self, w):
        self.w = w

    @custom_gradient(variables=lambda self: self.params)
    def f(self, x):
        def grad(dy, variables):
            return dy @ self.w.T, {"w": x.T @ dy}
        return x @ self.w, grad

jax.grad(lambda w: jnp.sum(Layer(w).f(x)))(w)
""",
        "no attribute 'params'", error=AttributeError, of="",
    ),
    misuse("Read what a function has left behind", """
import functools

class Layer:
    def __init__(self, w):
        self.w = w

    @functools.cached_property
    def scale(self):
        return jnp.exp(self.w)

    @custom_gradient(variables=lambda self: self.w)
    def f(self, x):
        return self.scale * x, lambda dy, variables: (dy * self.scale, dy * x * self.scale)

def loss(w):
    layer = Layer(w)
    return layer.f(2.0) + layer.scale

jax.grad(loss)(1.0)
""",
        "A value that `Layer.f` (model.py:11) has computed is left in an object, and used outside "
        "of the function, where its gradient would be lost. Fill it before the gradient is taken, "
        "return it as a part of `y`, or keep it in a `jax.new_ref`",
        of="Layer.f", error=jax.errors.UnexpectedTracerError),
    misuse("Change a variable that the rule reads through an object", """
class Helper:
    def __init__(self, call):
        self.call = call

def loss(x):
    scale = 2.0
    helper = Helper(lambda v: v * scale)

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
def loss(w, x):
    seen = [w]

    @custom_gradient
    def f(x):
        def grad(dy, variables):
            seen.append(dy)
            return dy * w, [dy * x]
        return w * x, grad
    return f(x)

jax.jit(jax.grad(loss))(1.0, 2.0)
""",
        "changed a list or a dict of an outer function", "so the change would be lost. Keep notes "
        "in one that holds no traced values, or in a `jax.new_ref`",
        of="loss.f.grad"),
    misuse("Assign a weight to a layer that outlives the loss", """
class Layer:
    @custom_gradient
    def f(self, x):
        return self.w * x, lambda dy, variables=(): (self.w * dy, [dy * x for _ in variables])

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
    misuse("Close over a `Ref` that the loss makes", """
def loss(w, x):
    ref = jax.new_ref(w)

    @custom_gradient
    def f(x):
        return ref[...] * x, lambda dy, variables: (ref[...] * dy, [x * dy])
    return f(x).sum()

jax.grad(loss, (0, 1))(x, x)
""",
        "closes over a `Ref` that was made where JAX traces or differentiates. Make it before the",
        **LOSS),
    misuse("Branch in the rule of a method, under `jax.jit`", """
class Layer:
    def __init__(self, w):
        self.w = w

    @custom_gradient(variables=lambda self: self.w)
    def f(self, x):
        def grad(dy, variables):
            return (dy * self.w if dy > 0 else dy), dy * x
        return self.w * x, grad

jax.jit(jax.grad(lambda w: Layer(w).f(2.0)))(1.0)
""",
        "needs the value of an array that JAX is tracing", "JAX records `Layer.f` (model.py:5) at "
        "the call, without values: it reads a traced value in an object that is no pytree. Read it "
        "from a variable, a small container or a pytree",
        of="Layer.f", error=jax.errors.TracerBoolConversionError),
    misuse("Call a decorated function in a thread pool, in a loss", """
from concurrent.futures import ThreadPoolExecutor

@custom_gradient
def reverse(x):
    return x, lambda dy: -dy

def loss(x):
    with ThreadPoolExecutor() as pool:
        return sum(pool.map(reverse, x))

jax.grad(loss)(b)
""",
        "but nothing in the thread that calls it, so its gradient would be lost", "Call the "
        "function in the thread that differentiates it, and not in a thread pool",
        of="reverse", error=jax.errors.UnexpectedTracerError),
    misuse("Loop over `variables` where none is differentiated", """
def loss(w, x):
    @custom_gradient
    def f(x):
        def grad(dy, variables=None):
            return dy @ w.T, [x.T @ dy for v in variables]
        return x @ w, grad
    return f(x).sum()

jax.grad(loss, 1)(w, x)
""",
        "'NoneType' object is not iterable", of=""),
    misuse("Use NumPy on a weight that is not declared", """
class Layer:
    def __init__(self, w):
        self.w = w

    @custom_gradient
    def f(self, x):
        y = x @ np.asarray(self.w)
        return y, lambda dy, variables: (dy @ self.w.T, [x.T @ dy])

jax.grad(lambda w: Layer(w).f(x).sum())(w)
""",
        "`Layer.f` (model.py:5) needs the value of an array that JAX is tracing", "If it is a "
        "weight that the function closes over: eagerly, any operation on it, such as `jnp.asarray",
        of="Layer.f", error=jax.errors.TracerArrayConversionError, jitted=False),
    misuse("Read a learned temperature in the rule alone", """
def loss(w, t, x):
    @custom_gradient
    def f(x):
        def grad(dy, variables):
            return dy @ w.T / t, [x.T @ dy / t for _ in variables]
        return x @ w, grad
    return f(x).sum()

jax.grad(loss, (0, 1))(w, 2.0, x)
""",
        "is differentiated with respect to `t`, which only its rule reads: "
        "this gradient is zero", "declare the value, `custom_gradient(variables=...)`, and "
        "return it; if there is none, read `jax.lax.stop_gradient` of the value",
        of="loss.f", error=UserWarning),
]  # fmt: skip

LINEAR = "is not linear in its upstream gradients: it contains"
WHY = "Forward mode (`jax.jvp`, `jax.jacfwd`, `jax.linearize`) transposes the rule."
REVERSE = "or use reverse mode (`jax.grad`; for `jax.hessian(f)`, `jax.jacrev(jax.jacrev(f))`; for "
REVERSE += "its product with `v`, `jax.grad(lambda x: jnp.vdot(jax.grad(f)(x), v))(x)`)."

FORWARD_MODE = [
    *(
        misuse(title, forward(returned), LINEAR, operation, WHY,
               "make the rule linear in its upstreams", REVERSE)
        for title, returned, operation in (
            ("Clip the gradient", "jnp.clip(2 * x * dy, -1, 1)",
             "`max`, which is not linear (in `clip`), at model.py:3."),
            ("Add a constant", "2 * x * dy + 1",
             "`add` of an upstream and a constant, at model.py:3."),
            ("Forget to multiply by the upstream", "2 * x", "does not depend on the upstreams"),
            ("Square the upstream", "dy * dy", "`mul` of two"),
            ("Drop negative gradients", "jnp.where(dy > 0, dy, 0)", "`gt`, which is not linear"),
        )
    ),
    *(
        misuse(title, forward(returned), "Write it with `jax.numpy`",
               "its upstream gradients have no values there", "Use reverse mode (`jax.grad`",
               error=error, jitted=False)
        for title, returned, error in (
            ("Branch on the upstream", "dy if dy.sum() > 0 else -dy",
             jax.errors.TracerBoolConversionError),
            ("Use NumPy on the upstream", "2 * np.asarray(dy) * x",
             jax.errors.TracerArrayConversionError),
            ("Convert the upstream to a Python number", "x * float(dy.sum())",
             jax.errors.ConcretizationTypeError),
        )
    ),
    misuse("Compute the gradient outside of JAX",
        forward("jax.pure_callback(lambda dy: 2 * dy, dy, dy)"),
        "(model.py:1) contains `pure_callback`, which JAX cannot transpose, at model.py:3.", WHY,
        "Decorate this operation and its adjoint as each other's rules", REVERSE),
    misuse("Loop until the upstream is small",
        forward("jax.lax.while_loop(lambda d: d.sum() > 1, lambda d: d / 2, dy)"),
        "(model.py:1) contains `while`, which JAX cannot transpose, at model.py:3.", WHY,
        "Write the loop as a `scan`, or as a `fori_loop` whose bounds are Python integers",
        REVERSE),
]  # fmt: skip

BODY = "computes something that JAX cannot differentiate"
STOP = "nothing of it but `y`, write `jax.lax.stop_gradient` around its arguments"


def outside(called: str, before: str = "") -> str:
    """Return a function that calls this, and its second derivative."""
    return before + function("jax.jacrev(jax.grad(lambda x: f(x).sum()))(x)", called)


CUBED = "jax.pure_callback(lambda x: np.asarray(x) ** 3, x, x), lambda dy: 3 * x**2 * dy"
VMAPPED = """
@jax.custom_batching.custom_vmap
def cubed(x):
    return x**3

cubed.def_vmap(lambda size, mapped, x: (x**3, mapped[0]))
"""

VJP = """
@jax.custom_vjp
def squared(x):
    return x**2

squared.defvjp(lambda x: (x**2, x), lambda x, dy: (2 * x * dy,))
"""

BODIES = [
    misuse("Call back to Python in the function, and ask for the second order", outside(CUBED),
        "`f` (model.py:1) " + BODY, STOP,
        error=ValueError),
    misuse("Call a `jax.custom_vjp` in the function, and ask for a Hessian",
        VJP + function("jax.hessian(lambda x: f(x).sum())(x)", "squared(x), lambda dy: 2 * x * dy"),
        BODY, STOP),
    misuse("Return what a `custom_vmap` computes, and ask for the second order",
        outside("cubed(x), lambda dy: 3 * x**2 * dy", VMAPPED),
        BODY, STOP, error=ValueError),
]  # fmt: skip

MATCH = "the gradient of the corresponding output, so inputs and outputs must match in number"

HELPERS = [
    misuse("Recompute the result of a call", "recompute_grad(jnp.sin(x))",
        "recompute_grad takes a function, but got an array",
        "Write `recompute_grad(f)(x)`, not `recompute_grad(f(x))`", of=""),
    misuse("Name a policy", 'recompute_grad(jnp.sin, policy="dots")',
        "recompute_grad got policy='dots'; expected None or a function",
        "such as those in jax.checkpoint_policies", **VALUE),
    misuse("Pass through the result of a call", "grad_pass_through(jnp.round(x))",
        "grad_pass_through takes a function, but got an array",
        "Write `grad_pass_through(f)(x)`, not `grad_pass_through(f(x))`", of=""),
    misuse("Pass through a sum", "jax.grad(grad_pass_through(lambda x: x.sum()))(x)",
        MATCH, "inputs:  float32[3,2]", "outputs: float32[]",
        "or write the rule with `custom_gradient`", error=ValueError, of="<lambda>"),
]  # fmt: skip


NOTHING = "check_gradient found nothing to differentiate in `f`"

CHECKING = [
    misuse("Check the result of a call", function("check_gradient(f(x), x)"),
        "check_gradient got h=an array", "expected a function, and its arguments after it", **VALUE,
    ),
    misuse("Check without an argument", function("check_gradient(f)"),
        "got arguments that do not fit its signature, (x): missing a required argument: 'x'"),
    misuse("Check at integers", function("check_gradient(f, jnp.arange(3))"),
        NOTHING, "no floating array among its arguments",
        "Pass floats: integer inputs and outputs have no gradient",
        error=ValueError, jitted=False),
    misuse("Check under `jax.jit`", function("jax.jit(lambda x: check_gradient(f, x).ok)(x)"),
        "check_gradient compares values", "an argument that JAX is tracing",
        "Call it outside of `jax.jit`"),
    misuse("Check against a reference of another shape",
        "\ndef reference(x):\n    return (x**2).sum()\n"
        + function("check_gradient(f, x, reference=reference)"),
        "The reference `reference` (model.py:1) of check_gradient must return arrays of the shapes",
        "that `f` (model.py:4) returns, [(3, 2)], but returned [()]",
        error=ValueError, jitted=False),
    *(
        misuse(
            f"Check with `{name}={value}`", function(f"check_gradient(f, x, {name}={value})"),
            f"check_gradient got {name}={value}; expected {expected}", **VALUE,
        )
        for name, value, expected in (
            ("reference", "1.0", "None or a function"),
            ("order", "0", "a whole number of at least 1"),
            ("expect", "'close'", "'exact' or 'surrogate'"),
            ("tolerance", "0", "None or a positive number"),
        )
    ),
    misuse("Declare a gradient that is wrong by a factor",
        function("assert_gradient(f, x)", "x**2, lambda dy: dy * x"),
        "Gradient of `f`: WRONG", "declared = 0.5 * expected",
        error=AssertionError, of="", jitted=False),
    misuse("Check a gradient that is clipped",
        function("assert_gradient(f, x)", "x * 2, lambda dy: jnp.clip(2 * dy, -5, 5)"),
        "linear in dy  WRONG: no: grad(1000 dy) is not 1000 grad(dy)", "expect='surrogate'",
        error=AssertionError, of="", jitted=False),
    misuse("Check where the value is not finite",
        function("assert_gradient(f, -x)", "jnp.log(x), lambda dy: dy / x"),
        "Gradient of `f`: not judged", "not judged: the value is not finite",
        "choose a point at which the value is finite and smooth",
        "`assert_gradient(..., unchecked='allow')`",
        error=AssertionError, of="", jitted=False),
    misuse("Check a function that reads a global layer",
        function(
            "layer = f\nassert_gradient(lambda x: layer(x), x)",
            "x * w[0, :2], lambda dy, variables: (dy * w[0, :2], [None])"),
        "ok where it was checked", "not checked   a float32[2,4] (model.py:3:",
        "What `not checked` names was not checked: make it an argument",
        "`assert_gradient(..., unchecked='allow')`",
        error=AssertionError, of="", jitted=False),
    misuse("Accept unchecked weights by another word",
        function("assert_gradient(f, x, unchecked='ignore')"),
        "assert_gradient got unchecked='ignore'; expected 'error' or 'allow'", **VALUE),
    misuse("Explain the result of a call", function("explain(f(x))"),
        "explain got h=an array", "expected a function, and its arguments after it", **VALUE),
    misuse("Explain a function that branches on values",
        function("explain(f, x)", "x if x.sum() > 0 else -x, lambda dy: dy"),
        "explain traces `f` (model.py:1), as `jax.jit` does, and it needs a value"),
]  # fmt: skip

WHOLE = "expected a whole number of at least 1, got"
EXAMPLES = [
    command("--steps 0", f"--steps: {WHOLE} '0'"),
    command("--batch 1348", "--batch: there are 1347 images to train on, fewer than the 1348"),
    command("--out digits.xyz", "--out: 'digits.xyz' must end in one of the formats"),
    command("--out nowhere/digits.png", "--out: there is no directory 'nowhere'"),
    command("--epochs 3", "unrecognized arguments: --epochs 3"),
    command("--out file", "--out: 'file' is not a directory", script="train_distributed"),
]

LINE_1 = "tracing the function f at model.py:1"

JAX_ITSELF = [
    misuse("Branch on a value under `jax.jit`",
        function("jax.jit(f)(x)", "x if x.sum() > 0 else -x, lambda dy: dy"),
        "boolean conversion of traced array", LINE_1,
        "it depends on the value of the argument x.",
        "`f` (model.py:1) needs the value of an array that JAX is tracing. Write it with "
        "`jax.numpy`, `jnp.where` instead of `if` and `jax.debug.print` "
        "instead of `print`", error=jax.errors.TracerBoolConversionError),
    misuse("Fill an array of NumPy in a rule, and ask for the second order", """
@custom_gradient
def f(x):
    def grad(dy):
        slope = np.zeros(1)
        slope[0] = 2 * x
        return dy * slope[0]
    return x**2, grad

jax.grad(jax.grad(f))(1.0)
""",
        "setting an array element with a sequence", "The rule `f.grad` (model.py:3)",
        "needs the value of an array that JAX is tracing", error=ValueError,
        jitted=False),
    misuse("Let `jax.jit` trace a number that is a setting",
        function("jax.jit(f)(x, 6)", "x.reshape(n), lambda dy: (dy.reshape(3, 2), None)", "x, n"),
        LINE_1, "static_argnums", of=""),
    misuse("Differentiate with respect to a string",
        function("jax.grad(f, 1)(x, 'relu')", "x, lambda dy: dy", "x, mode"),
        "'relu' of type <class 'str'> is not a valid JAX type", of=""),
    misuse("Differentiate with respect to an integer", function("jax.grad(f)(3)"),
        "grad requires real- or complex-valued inputs", "but got int32", of=""),
    misuse("Let a value out by a list",
        function("jax.jit(f)(x)\nkept[0] + 1").replace("    return", "    kept.append(2 * x)\n    "
        "return").replace("@", "kept = []\n\n@", 1),
        "to escape the scope of the transformation", "intermediate value with type float32[3,2]",
        error=jax.errors.UnexpectedTracerError, of="", jitted=False,  # the message has columns
    ),
    misuse("Give `jax.jit` a list as a static argument",
        function("jax.jit(f, static_argnums=0)([1.0])", "x, lambda dy: dy"),
        "Non-hashable static arguments", "unhashable type: 'list'",
        **VALUE),
    misuse("Call back to Python in a rule, and ask for the second order",
        function(
            "jax.grad(jax.grad(f))(1.0)",
            "x**2, lambda dy: dy * jax.pure_callback(lambda x: 2 * x, x, x)",
        ),
        "computes something that JAX cannot differentiate",
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
    misuse("Return what a `custom_vmap` computes, under `jax.jit`",
        VMAPPED + function(
            "jax.jacrev(jax.grad(lambda x: jax.jit(f)(x).sum()))(x)",
            "cubed(x), lambda dy: 3 * x**2 * dy"),
        "Linearization failed to produce known values for all output primals", **VALUE),
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
    misuse("Read the result of a `while_loop` in the rule, and ask for the second order",
        """
@custom_gradient
def f(x):
    z = jax.lax.while_loop(lambda z: z < 9, lambda z: z * x, x)
    return 2 * z, lambda dy: dy * z / x

jax.grad(jax.grad(f))(2.0)
""",
        "Reverse-mode differentiation does not work for lax.while_loop", **VALUE,
    ),
    misuse("Sum over devices in a rule that runs outside of the mesh",
        function("jax.grad(f)(1.0)", 'x**2, lambda dy: jax.lax.psum(2 * x * dy, "devices")'),
        "unbound axis name", error=NameError, of="", jitted=False),
]  # fmt: skip

MISUSES: dict[str, list[Misuse]] = {
    "decorating": DECORATING,
    "calling": CALLING,
    "returned by f": RETURNED_BY_F,
    "upstreams": UPSTREAMS,
    "gradients": GRADIENTS,
    "variables": VARIABLES,
    "forward mode": FORWARD_MODE,
    "bodies": BODIES,
    "helpers": HELPERS,
    "checking": CHECKING,
    "examples": EXAMPLES,
    "jax": JAX_ITSELF,
}
