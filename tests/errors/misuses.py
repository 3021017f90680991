"""Misuses: what one can get wrong, by the section of docs/errors.md that answers it.

`test_misuses.py` runs all of them, and `docs/_ext/misuses.py` shows each with what it says. The
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
    error: type[BaseException]
    says: tuple[str, ...]  # what was expected, what came, what to do
    of: str = "f"  # the function that it names, with its place; or ""
    jitted: bool = True  # whether it says the same under `jax.jit`

    @property
    def is_command(self) -> bool:
        return self.code.startswith("python ")


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
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
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


def misuse(title: str, code: str, error: type[BaseException], *says: str, **more: Any) -> Misuse:
    return Misuse(title, code.strip("\n"), error, says, **more)


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


def of_tree(returned: str, tree: str, y: str) -> str:
    """Return code that differentiates a function of a pytree."""
    return f"""
@custom_gradient
def f(p):
    def grad(dy):
        return {returned}
    return {y}, grad

jax.grad(lambda p: jnp.sum(f(p)))({tree})
"""


def beside_setting(returned: str, args: str, values: str) -> str:
    """Return code that differentiates with respect to `x` alone."""
    return f"""
@custom_gradient
def f({args}):
    def grad(dy):
        return {returned}
    return 2 * x, grad

jax.grad(lambda x: jnp.sum(f({values})))(x)
"""


def weight(body: str, dys: str = "dy, variables", option: str = "") -> str:
    """Return code that differentiates with respect to a weight that a function closes over."""
    return f"""
def loss(w, x):
    @custom_gradient{option and f"({option})"}
    def f(x):
        def grad({dys}):
            {body}
        return x @ w, grad
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


# --- the table ------------------------------------------------------------------------------------

DECORATING = [
    misuse(
        "Decorate the result of a call",
        "custom_gradient(jnp.sin(x))",
        TypeError,
        "custom_gradient takes a function that returns a pair (y, grad_fn), but got an array",
        "is not callable",
        "Maybe you wrote `custom_gradient(f(x))`",
        of="",
    ),
    misuse(
        "Pass an option by position",
        'custom_gradient("autodiff")',
        TypeError,
        "but got the str 'autodiff', which is not callable",
        "Options have names",
        of="",
    ),
    misuse(
        "Pass weights by position",
        "custom_gradient([w])(lambda x: (x @ w, None))",
        TypeError,
        "but got a list of length 1, which is not callable",
        "as in `variables=...`",
        of="",
    ),
    misuse(
        "Pass an option by position after the function",
        "custom_gradient(lambda x: (x, lambda dy: dy), [w])",
        TypeError,
        "takes one function, but got 2 positional arguments",
        "Options have names: `variables=`",
        of="",
    ),
    misuse(
        "Decorate a property",
        """
class Model:
    @custom_gradient
    @property
    def loss(self):
        return 1.0, lambda dy: None
""",
        TypeError,
        "got an object of type property",
        "Write `@property` above `@custom_gradient`",
        of="",
    ),
    misuse(
        "Misspell an option",
        "custom_gradient(varables=[w])",
        TypeError,
        "has no option 'varables'",
        "There are `variables`, `primal` and `convention`",
        of="",
    ),
    misuse(
        "Name arguments that are not differentiated, as for `jax.custom_vjp`",
        "custom_gradient(nondiff_argnums=(1,))",
        TypeError,
        "has no option 'nondiff_argnums'",
        "None is needed",
        "reaches the function as it is",
        of="",
    ),
    misuse(
        "Ask for forward mode",
        "custom_gradient(forward_mode=True)",
        TypeError,
        "has no option 'forward_mode'",
        "both modes always work",
        of="",
    ),
    misuse(
        "Ask for another convention",
        'custom_gradient(convention="torch")',
        ValueError,
        "got convention='torch'; expected 'tf' or 'jax'",
        of="",
    ),
    misuse(
        "Ask for all variables",
        'custom_gradient(variables="all")',
        ValueError,
        "got variables='all'; expected None, a pytree, a function or 'autodiff'",
        of="",
    ),
    misuse(
        "Switch variables on",
        "custom_gradient(variables=True)",
        ValueError,
        "got variables=True; expected None, a pytree, a function or 'autodiff'",
        of="",
    ),
    misuse(
        "Pass a kernel by its name",
        'custom_gradient(primal="kernel")',
        ValueError,
        "got primal='kernel'; expected None or a function",
        of="",
    ),
    misuse(
        "Decorate twice",
        "@custom_gradient" + function("").rstrip(),
        TypeError,
        "is decorated already: decorate once",
    ),
    misuse(
        "Decorate above `jax.jit`",
        """
@custom_gradient
@jax.jit
def f(x):
    return x**2, lambda dy: 2 * x * dy
""",
        TypeError,
        "is under `jax.jit`, which cannot return a gradient function",
        "`@jax.jit` above `@custom_gradient`",
    ),
]

CALLING = [
    misuse(
        "Forget an argument",
        function("f()"),
        TypeError,
        "called with arguments that do not fit its signature, (x): missing a required argument",
    ),
    misuse(
        "Pass one too many",
        function("f(x, w)"),
        TypeError,
        "do not fit its signature, (x): too many positional arguments",
    ),
    misuse(
        "Pass one that it does not have",
        function("f(x, rate=0.1)"),
        TypeError,
        "do not fit its signature, (x): got an unexpected keyword argument 'rate'",
    ),
    misuse(
        "Pass one twice",
        function("f(x, x=x)"),
        TypeError,
        "do not fit its signature, (x): multiple values for argument 'x'",
    ),
    misuse(
        "Pass options where it is called",
        function("f(x, variables=[w])"),
        TypeError,
        "do not fit its signature, (x): got an unexpected keyword argument 'variables'",
    ),
    misuse(
        "Call a method on the class",
        """
class Model:
    @custom_gradient
    def predict(self, x):
        return x**2, lambda dy: 2 * x * dy

Model.predict(x)
""",
        TypeError,
        "do not fit its signature, (self, x): missing a required argument: 'x'",
        of="Model.predict",
    ),
]

NO_PAIR = "must return a pair (y, grad_fn): its value and the function that computes its gradient"
NO_RULE = "must return a pair (y, grad_fn) whose second element is a function, but the second"
NO_ARRAY = "every leaf of y must be an array or a number"


def returning(what: str) -> str:
    return f"""
@custom_gradient
def f(x):
    def grad(dy):
        return 2 * x * dy
    {what}

f(x)
"""


RETURNED_BY_F = [
    misuse(
        "Forget to return",
        returning("y = x**2"), TypeError,
        NO_PAIR, "It returned None", "`return y` instead of `return y, grad_fn`",
    ),
    misuse(
        "Return the value alone",
        returning("return x**2"), TypeError,
        NO_PAIR, "It returned an array of dtype float32 and shape (3, 2)",
        "`return y` instead of `return y, grad_fn`",
    ),
    misuse(
        "Return a value of two entries alone",
        returning("return x.sum(0)"), TypeError,
        NO_RULE, "element is an array of dtype float32 and shape ()", "or returned y alone",
    ),
    misuse(
        "Return the gradient function alone",
        returning("return grad"), TypeError,
        NO_PAIR, "It returned the callable `f.grad`",
    ),
    misuse(
        "Call the gradient function",
        returning("return x**2, grad(x)"), TypeError,
        NO_RULE, "`return y, grad(dy)` instead of `return y, grad`",
    ),
    misuse(
        "Return the derivative instead of a function",
        returning("return x**2, 2 * x"), TypeError,
        NO_RULE, "element is an array of dtype float32 and shape (3, 2)",
    ),
    misuse(
        "Return None as the gradient function",
        returning("return x**2, None"), TypeError,
        NO_RULE, "element is None",
    ),
    misuse(
        "Return a gradient function for each output",
        returning("return (x, x**2), (grad, grad)"), TypeError,
        NO_RULE, "element is a tuple of length 2",
    ),
    misuse(
        "Return the pair the other way round",
        returning("return grad, x**2"), TypeError,
        NO_RULE, "write `return y, grad` instead of `return grad, y`",
    ),
    misuse(
        "Return two outputs without parentheses",
        returning("return x, x**2, grad"), TypeError,
        NO_PAIR, "`return y1, y2, grad_fn` instead of `return (y1, y2), grad_fn`",
    ),
    misuse(
        "Return the pair in a dictionary",
        returning('return {"y": x**2, "grad": grad}'), TypeError,
        NO_RULE, "element is the str 'grad'",
    ),
    misuse(
        "Yield instead of return",
        returning("yield x**2"), TypeError,
        NO_PAIR, "It returned an object of type generator",
    ),
    misuse(
        "Return a string among the outputs",
        returning('return (x**2, "relu"), grad'), TypeError,
        "returned the str 'relu' among its outputs at y[1]", NO_ARRAY,
        "Return other values from an undecorated function around it",
    ),
    misuse(
        "Return an object as the output",
        returning("return object(), grad"), TypeError,
        "returned an object of type object among its outputs", NO_ARRAY,
    ),
    misuse(
        "Return an array of strings",
        returning('return np.array(["relu"]), grad'), TypeError,
        "returned an array of dtype <U4 and shape (1,) among its outputs", NO_ARRAY,
    ),
    misuse(
        "Return a shape instead of an array",
        returning("return jax.ShapeDtypeStruct((3, 2), jnp.float32), grad"), TypeError,
        "returned an object of type ShapeDtypeStruct among its outputs", NO_ARRAY,
    ),
    misuse(
        "Return a pair from `primal`",
        function("f(x)", option="primal=lambda x: (x**2, lambda dy: 2 * x * dy)"), TypeError,
        "among its outputs at y[1]", NO_ARRAY,
        "Only what `custom_gradient` decorates returns a gradient function",
        of="<lambda>",
    ),
    misuse(
        "Give `primal` other arguments",
        function("f(x)", option="primal=lambda: 1.0"), TypeError,
        "The `primal` `<lambda>` (model.py:1) cannot be called with the arguments of `f`",
        "too many positional arguments", "It takes the same ones, and returns y alone",
    ),
    misuse(
        "Return another structure from `primal`",
        function(
            "jax.grad(lambda x: jnp.sum(jax.jit(f)(x)))(x)", option="primal=lambda x: (x**2, x)"
        ),
        TypeError,
        "and its `primal` must return values of the same structure, shapes and dtypes",
        "one returned (*, *), of float32[3, 2], float32[3, 2], and the other *, of float32[3, 2]",
    ),
    misuse(
        "Return another shape from `primal`",
        function("jax.vjp(jax.jit(f), x)[0]", option="primal=lambda x: x[0] ** 2"), TypeError,
        "and its `primal` must return values of the same structure, shapes and dtypes",
        "one returned *, of float32[2], and the other *, of float32[3, 2]",
    ),
    misuse(
        "Return another dtype from `primal`",
        function("jax.vjp(jax.jit(f), x)[0]", option="primal=lambda x: x.astype(int)"), TypeError,
        "and its `primal` must return values of the same structure, shapes and dtypes",
        "one returned *, of int32[3, 2], and the other *, of float32[3, 2]",
    ),
]  # fmt: skip

PER_LEAF = "one positional argument per leaf of y"

UPSTREAMS = [
    misuse(
        "Take two upstreams of one output",
        rule("return dy, dz", dys="dy, dz"), TypeError,
        "cannot be called with 1 upstream gradient", PER_LEAF, "missing a required argument: 'dz'",
    ),
    misuse(
        "Take no upstream",
        rule("return x", "x", "x**2", dys=""), TypeError,
        "cannot be called with 1 upstream gradient", PER_LEAF, "too many positional arguments",
    ),
    misuse(
        "Take one upstream of two outputs",
        rule("return 2 * dy", "x", "(x, 2 * x)", "jnp.sum(f(x)[1])"), TypeError,
        "cannot be called with 2 upstream gradients", PER_LEAF, "too many positional arguments",
    ),
    misuse(
        "Take one upstream of a dictionary",
        rule("return dy['y']", "x", "{'y': x, 'z': 2 * x}", "jnp.sum(f(x)['y'])"), TypeError,
        "cannot be called with 2 upstream gradients", "dicts in the order of their sorted keys",
    ),
    misuse(
        "Want more than upstreams",
        rule("return scale * dy", "x", "x**2", dys="dy, *, scale"), TypeError,
        "cannot be called with 1 upstream gradient", "argument: 'scale'",
    ),
    misuse(
        'Take one upstream per output in `convention="jax"`',
        function(
            "jax.grad(lambda x: jnp.sum(f(x)[1]))(x)", "(x, 2 * x), lambda dy, dz: dy + 2 * dz",
            option='convention="jax"',
        ),
        TypeError,
        "cannot be called with one argument, the upstream gradients in the structure of y",
        "missing a required argument: 'dz'",
    ),
    misuse(
        "Declare variables, and do not take them",
        weight("return dy @ w.T", "dy", "variables=[w]"), TypeError,
        "got an unexpected keyword argument 'variables'",
        "It takes the declared variables too: `def grad(dy, variables)`",
        of="loss.f",
    ),
]  # fmt: skip

STRUCTURE = "returned gradients in a structure that does not fit the inputs"
FLAT = "or a flat list with one gradient for each of the leaves above"
WANTED = "for the input `x`; expected an array of dtype float32 and shape (3, 2)"

GRADIENTS = [
    misuse(
        "Return a gradient too many",
        rule("return dy, dy.sum(0), None"), ValueError,
        "returned 3 gradients; expected 2, for the inputs `x`, `b`",
    ),
    misuse(
        "Return two gradients of one input",
        rule("return dy, dy", "x", "2 * x"), ValueError,
        "returned 2 gradients; expected 1", "`x` is one array: return one gradient of its shape",
    ),
    misuse(
        "Return a gradient for a default that was left out",
        """
@custom_gradient
def f(x, scale=2.0):
    return x * scale, lambda dy: (dy * scale, (dy * x).sum())

jax.grad(lambda x: jnp.sum(f(x)))(x)
""",
        ValueError,
        "returned 2 gradients; expected 1, for the inputs `x`",
    ),
    misuse(
        "Return a gradient too few",
        rule("return dy"), ValueError,
        "returned 1 gradient; expected 2, for the inputs `x`, `b`",
        "Return None for every input that has no gradient",
    ),
    misuse(
        "Return no gradient",
        rule("return []", "x", "2 * x"), ValueError,
        "returned 0 gradients; expected 1, for the inputs `x`",
    ),
    misuse(
        "Forget the `return` of the rule",
        rule("dx, db = dy, dy.sum(0)"), ValueError,
        "returned None; expected gradients for the inputs `x`, `b`", "Did it forget its `return`?",
    ),
    misuse(
        "Return a generator",
        rule("return (g for g in (dy, dy.sum(0)))"), ValueError,
        "returned an object of type generator; expected a list or tuple", "`list(...)`",
    ),
    misuse(
        "Return `map(...)`",
        rule("return map(jnp.negative, (dy, dy.sum(0)))"), ValueError,
        "returned an object of type map; expected a list or tuple", "Make a list of it",
    ),
    misuse(
        "Yield the gradient",
        rule("yield 2 * dy", "x", "2 * x"), TypeError,
        f"returned an object of type generator {WANTED}",
    ),
    misuse(
        "Return a dictionary by argument",
        rule('return {"x": dy, "b": dy.sum(0)}'), TypeError,
        STRUCTURE, "expected: (*, *), for `x`, `b`", "got:      {'b': *, 'x': *}", FLAT,
    ),
    misuse(
        "Nest the gradients",
        rule("return dy, [dy.sum(0)]"), TypeError,
        STRUCTURE, "expected: (*, *), for `x`, `b`", "got:      (*, [*])", FLAT,
    ),
    misuse(
        "Return gradients of variables without taking them",
        rule("return 2 * dy, [dy]", "x", "2 * x"), TypeError,
        STRUCTURE, "expected: *, for `x`", "got:      (*, [*])",
    ),
    misuse(
        "Return nested lists for an array",
        rule("return [[2.0, 2.0]] * 3", "x", "2 * x"), TypeError,
        STRUCTURE, "expected: *, for `x`", "got:      [[*, *], [*, *], [*, *]]",
    ),
    misuse(
        "Misspell a key",
        of_tree('{"w": dy, "bias": dy.sum(0)}', '{"w": x, "b": b}', 'p["w"] + p["b"]'), TypeError,
        STRUCTURE, "expected: {'b': *, 'w': *}, for `p['b']`, `p['w']`",
        "got:      {'bias': *, 'w': *}", FLAT,
    ),
    misuse(
        "Leave a key out",
        of_tree('{"w": dy}', '{"w": x, "b": b}', 'p["w"] + p["b"]'), TypeError,
        STRUCTURE, "expected: {'b': *, 'w': *}, for `p['b']`, `p['w']`", "got:      {'w': *}",
    ),
    misuse(
        "Return a flat list in another order than that of sorted keys",
        of_tree("[dy, dy.sum(0)]", '{"w": x, "b": b}', 'p["w"] + p["b"]'), ValueError,
        "returned a gradient of shape (3, 2) for the input `p['b']`; expected its own shape, (2,)",
    ),
    misuse(
        "Return a list of another length",
        of_tree("[dy]", "[x, x]", "p[0] + p[1]"), ValueError,
        "returned 1 gradient; expected 2, for the inputs `p[0]`, `p[1]`", "Return None for every",
    ),
    misuse(
        "Return a dictionary for a list",
        of_tree("{0: dy, 1: dy}", "[x, x]", "p[0] + p[1]"), TypeError,
        STRUCTURE, "expected: [*, *], for `p[0]`, `p[1]`", "got:      {0: *, 1: *}", FLAT,
    ),
    misuse(
        "Return the gradient in the place of a function",
        beside_setting("2 * dy, None", "act, x", "jnp.sin, x"), TypeError,
        "returned a gradient in the place of `act`, which is no array; expected None there",
        "in the order of the inputs",
    ),
    misuse(
        "Return the gradient in the place of a string",
        beside_setting("None, 2 * dy", "x, mode", 'x, "relu"'), TypeError,
        "returned a gradient in the place of `mode`, which is no array; expected None there",
    ),
    misuse(
        "Return more gradients than arguments",
        beside_setting("2 * dy, None, None", "x, mode", 'x, "relu"'), ValueError,
        "returned 3 gradients; expected 1 or 2, for the inputs `x`",
    ),
    misuse(
        "Forget to sum over a broadcast axis",
        rule("return dy, dy"), ValueError,
        "returned a gradient of shape (3, 2) for the input `b`; expected its own shape, (2,)",
        "did you forget to sum over axis 0, as in `g.sum(axis=0)`?",
    ),
    misuse(
        "Sum over an axis and keep it",
        rule("return dy, dy.sum(0, keepdims=True)"), ValueError,
        "returned a gradient of shape (1, 2) for the input `b`; expected its own shape, (2,)",
    ),
    misuse(
        "Forget to keep an axis that is broadcast",
        of_tree("[dy, dy]", "[x, x[:1]]", "p[0] + p[1]"), ValueError,
        "of shape (3, 2) for the input `p[1]`; expected its own shape, (1, 2)",
        "as in `g.sum(axis=0, keepdims=True)`?",
    ),
    misuse(
        "Sum too much",
        rule("return dy, dy.sum()"), ValueError,
        "returned a gradient of shape () for the input `b`; expected its own shape, (2,)",
        "Maybe a broadcast is missing, `jnp.broadcast_to(g, (2,))`",
    ),
    misuse(
        "Forget to broadcast the gradient of a sum",
        rule("return dy", "x", "x.sum()"), ValueError,
        "returned a gradient of shape () for the input `x`; expected its own shape, (3, 2)",
        "`jnp.broadcast_to(g, (3, 2))`",
    ),
    misuse(
        "Forget a transpose",
        rule("return dy @ w.T, dy.T @ x", "x, w", "x @ w"), ValueError,
        "returned a gradient of shape (4, 2) for the input `w`; expected its own shape, (2, 4)",
        "Maybe a transpose is missing, `g.T`",
    ),
    misuse(
        "Forget a reshape",
        rule("return 2 * dy.ravel()", "x", "2 * x"), ValueError,
        "returned a gradient of shape (6,) for the input `x`; expected its own shape, (3, 2)",
        "Maybe a reshape is missing, `g.reshape(3, 2)`",
    ),
    misuse(
        "Swap two gradients",
        rule("return x.T @ dy, dy @ w.T", "x, w", "x @ w"), ValueError,
        "returned a gradient of shape (2, 4) for the input `x`; expected its own shape, (3, 2)",
    ),
    misuse(
        "Return a complex gradient of a real input",
        rule("return 2j * dy", "x", "2 * x"), TypeError,
        f"returned an array of dtype complex64 and shape (3, 2) {WANTED}",
        "Return its real part, `jnp.real(...)`",
    ),
    misuse(
        "Return a real gradient of a complex input",
        rule("return dy", "z", "z.real").replace("(z)\n", "(x + 1j)\n"), TypeError,
        "returned an array of dtype float32 and shape (3, 2) for the input `z`",
        "Convert it, `.astype(complex64)`, if it really has no imaginary part",
    ),
    misuse(
        "Return integers",
        rule("return jnp.ones((3, 2), int)", "x", "2 * x"), TypeError,
        f"returned an array of dtype int32 and shape (3, 2) {WANTED}",
        "Convert it, `.astype(float32)`, or return None",
    ),
    misuse(
        "Return a mask",
        rule("return x > 0", "x", "jax.nn.relu(x)"), TypeError,
        f"returned an array of dtype bool and shape (3, 2) {WANTED}", "Convert it",
    ),
    misuse(
        "Return a boolean",
        rule("return False", "x", "2 * x"), TypeError,
        f"returned the bool False {WANTED}", "Return None if there is no gradient",
    ),
    misuse(
        "Return a word",
        rule('return "zero"', "x", "2 * x"), TypeError,
        f"returned the str 'zero' {WANTED}", "Return None if there is no gradient",
    ),
    misuse(
        "Return a function",
        rule("return lambda dy: 2 * dy", "x", "2 * x"), TypeError,
        f"returned the callable `f.grad.<lambda>` (model.py:4) {WANTED}",
        "Maybe you wrote `return g` instead of `return g(dy)`",
    ),
    misuse(
        "Return a shape instead of a gradient",
        rule("return jax.ShapeDtypeStruct((3, 2), jnp.float32)", "x", "2 * x"), TypeError,
        f"returned an object of type ShapeDtypeStruct {WANTED}",
    ),
    misuse(
        "Return a random key",
        rule("return jax.random.key(0)", "x", "2 * x"), TypeError,
        f"returned an array of dtype key<fry> and shape () {WANTED}",
        "Return None if there is no gradient",
    ),
]  # fmt: skip

UNDECLARED = "is differentiated with respect to values that it closes over"
REMEDIES = ("Pass them as arguments", "`def grad(dy, variables): ... return grad_xs, grad_vars`")
PAIR = "was called with `variables=` and must return a pair (grad_xs, grad_vars)"
NO_VARIABLES = "and no array. Pass the arrays themselves"

VARIABLES = [
    misuse(
        "Close over a weight, and give it no gradient",
        weight("return dy @ w.T", "dy"), TypeError,
        UNDECLARED, "takes no `variables`", "float32[2, 4], first used at model.py:6", *REMEDIES,
        of="loss.f",
    ),
    misuse(
        "Call the parameter for variables something else",
        weight("return dy @ w.T, [x.T @ dy]", "dy, weights=None"), TypeError,
        UNDECLARED, "takes no `variables`", *REMEDIES,
        of="loss.f",
    ),
    misuse(
        "Keep a weight in `self`, and give it no gradient",
        """
class Layer:
    def __init__(self, w):
        self.w = w

    @custom_gradient
    def f(self, x):
        return x @ self.w, lambda dy: dy @ self.w.T

jax.grad(lambda w: jnp.sum(Layer(w).f(x)))(w)
""",
        TypeError,
        UNDECLARED, "float32[2, 4], first used at model.py:7", *REMEDIES,
        of="Layer.f",
    ),
    misuse(
        "Differentiate a keyword-only argument",
        function("jax.grad(lambda b: f(x, scale=b).sum())(b)", "x * scale, lambda dy: dy * scale",
                 args="x, *, scale"),
        TypeError,
        UNDECLARED, "float32[2], first used at model.py:3", *REMEDIES,
    ),
    misuse(
        "Ask for forward mode in a weight without a gradient",
        """
def layer(w):
    @custom_gradient
    def f(x):
        return x @ w, lambda dy: dy @ w.T
    return f(x)

jax.jvp(layer, (w,), (w,))
""",
        TypeError,
        UNDECLARED, "float32[2, 4], first used at model.py:4", *REMEDIES,
        of="layer.f",
    ),
    misuse(
        "Declare other variables than those in use",
        weight("return dy @ w.T, [None]", option="variables=[b]"), TypeError,
        UNDECLARED, "not among its declared variables", "Add them to `custom_gradient(variables=",
        of="loss.f",
    ),
    misuse(
        "Return the gradient of the input alone",
        weight("return dy @ w.T"), TypeError,
        PAIR, "It returned an array of dtype float32 and shape (3, 2)",
        of="loss.f",
    ),
    misuse(
        "Forget the `return` of a rule with variables",
        weight("dw = x.T @ dy"), TypeError,
        PAIR, "It returned None",
        of="loss.f",
    ),
    misuse(
        "Return the gradients of two variables without a list",
        weight("return dy @ w.T, x.T @ dy, None"), TypeError,
        PAIR, "It returned a tuple of length 3",
        of="loss.f",
    ),
    misuse(
        "Return the variables first",
        weight("return [x.T @ dy], dy @ w.T"), ValueError,
        "of shape (2, 4) for the input `x`; expected its own shape, (3, 2)",
        of="loss.f",
    ),
    misuse(
        "Return a gradient of variables too many",
        weight("return dy @ w.T, [x.T @ dy, x.T @ dy]"), ValueError,
        "returned 2 gradients; expected 1, for the variables `variables[0]`",
        of="loss.f",
    ),
    misuse(
        "Return no gradient of a variable",
        weight("return dy @ w.T, []"), ValueError,
        "returned 0 gradients; expected 1, for the variables `variables[0]`",
        "Return None for every variable that has no gradient",
        of="loss.f",
    ),
    misuse(
        "Return a dictionary for the list of variables",
        weight('return dy @ w.T, {"w": x.T @ dy}'), TypeError,
        "returned gradients in a structure that does not fit the variables",
        "expected: [*], for `variables[0]`", "got:      {'w': *}",
        of="loss.f",
    ),
    misuse(
        "Misspell a declared variable",
        weight('return dy @ w.T, {"weight": x.T @ dy}', option='variables={"w": w}'), TypeError,
        "returned gradients in a structure that does not fit the variables",
        "expected: {'w': *}, for `variables['w']`", "got:      {'weight': *}",
        of="loss.f",
    ),
    misuse(
        "Forget a transpose in the gradient of a variable",
        weight("return dy @ w.T, [dy.T @ x]"), ValueError,
        "of shape (4, 2) for the variable `variables[0]`; expected its own shape, (2, 4)",
        "Maybe a transpose is missing, `g.T`",
        of="loss.f",
    ),
    misuse(
        "Return a complex gradient of a real variable",
        weight("return dy @ w.T, [1j * x.T @ dy]"), TypeError,
        "of dtype complex64 and shape (2, 4) for the variable `variables[0]`; expected an array "
        "of dtype float32", "Return its real part",
        of="loss.f",
    ),
    misuse(
        "Declare variables by their names",
        weight("return dy @ w.T, [x.T @ dy]", option='variables=["w"]'), TypeError,
        "`variables` of `loss.f`", "holds the str 'w'", NO_VARIABLES, "not their names",
        of="loss.f",
    ),
    misuse(
        "Declare a Keras Variable",
        """
class Variable:
    def __init__(self, value):
        self.value = value

def loss(w, x):
    kernel = Variable(w)

    @custom_gradient(variables=[kernel])
    def f(x):
        def grad(dy, variables):
            return dy @ kernel.value.T, [x.T @ dy]
        return x @ kernel.value, grad
    return f(x).sum()

jax.grad(loss, (0, 1))(w, x)
""",
        TypeError,
        "`variables` of `loss.f`", "holds an object of type Variable", "such as its `value`",
        of="loss.f",
    ),
    misuse(
        "Declare an attribute that a model does not have",
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
        AttributeError,
        "no attribute 'params'", "the function that was given as `variables` of `Layer.f`",
        "called with the instance where a method is decorated",
        of="Layer.f",
    ),
    misuse(
        "Declare the variables of a function as those of a method",
        weight("return dy @ w.T, [x.T @ dy]", option="variables=lambda self: [w]"), TypeError,
        "missing 1 required positional argument: 'self'",
        "the function that was given as `variables` of `loss.f`", "and without arguments otherwise",
        of="loss.f",
    ),
]  # fmt: skip

LINEAR = "is not linear in its upstream gradients: it contains"
INSTEAD = "or use reverse mode (`jax.grad`, `jax.vjp`, `jax.jacrev`)"


def forward(returned: str, last: str = "jax.jvp(f, (x,), (x,))[1]") -> str:
    return function(last, f"x**2, lambda dy: {returned}")


FORWARD_MODE = [
    misuse(
        "Clip the gradient",
        forward("jnp.clip(2 * x * dy, -1, 1)"), TypeError, LINEAR, "`max`", INSTEAD,
    ),
    misuse("Add a constant", forward("2 * x * dy + 1"), TypeError, LINEAR, "`add`", INSTEAD),
    misuse(
        "Forget to multiply by the upstream",
        forward("2 * x"), TypeError, LINEAR, "does not depend on the upstreams", INSTEAD,
    ),
    misuse("Square the upstream", forward("dy * dy"), TypeError, LINEAR, "`mul` of two", INSTEAD),
    misuse("Take the sign", forward("jnp.sign(dy)"), TypeError, LINEAR, "`sign`", INSTEAD),
    misuse("Round", forward("jnp.round(dy)"), TypeError, LINEAR, "`round`", INSTEAD),
    misuse(
        "Drop negative gradients",
        forward("jnp.where(dy > 0, dy, 0)"), TypeError, LINEAR, "`select_n`", INSTEAD,
    ),
    misuse(
        "Normalize the upstream",
        forward("dy / jnp.linalg.norm(dy)"), TypeError, LINEAR, "`mul` of two upstreams", INSTEAD,
    ),
    misuse(
        "Branch on the upstream",
        forward("dy if dy.sum() > 0 else -dy"), TypeError, LINEAR, "a branch on the upstream",
        INSTEAD,
    ),
    misuse(
        "Compute the gradient outside of JAX",
        forward("jax.pure_callback(lambda dy: 2 * dy, dy, dy)"), TypeError,
        LINEAR, "`pure_callback`, which JAX cannot transpose", INSTEAD,
    ),
    misuse(
        "Loop until the upstream is small",
        forward("jax.lax.while_loop(lambda d: d.sum() > 1, lambda d: d / 2, dy)"), TypeError,
        LINEAR, "`while` whose predicate depends on an upstream", INSTEAD,
    ),
    misuse(
        "Ask for the Hessian through a clip",
        forward("jnp.clip(2 * x * dy, -1, 1)", "jax.hessian(lambda x: (f(x) ** 2).sum())(x)"),
        TypeError, LINEAR, "`max`", INSTEAD,
    ),
    misuse(
        "Linearize a rectified gradient",
        forward("jnp.maximum(dy, 0)", "jax.linearize(f, x)[1](x)"), TypeError,
        LINEAR, "`max`", INSTEAD,
    ),
    misuse(
        "Ask forward mode of a rule with a wrong shape",
        forward("2 * dy[0]"), ValueError,
        "returned a gradient of shape (2,) for the input `x`; expected its own shape, (3, 2)",
    ),
]  # fmt: skip

MATCH = "the gradient of the output in its place, so the two must match in number and shape"

HELPERS = [
    misuse(
        "Recompute the result of a call",
        "recompute_grad(jnp.sin(x))", TypeError,
        "recompute_grad takes a function, but got an array",
        "Maybe you wrote `recompute_grad(f(x))` instead of `recompute_grad(f)(x)`",
        of="",
    ),
    misuse(
        "Name a policy",
        'recompute_grad(jnp.sin, policy="dots")', ValueError,
        "recompute_grad got policy='dots'; expected None or a function",
        "such as those in jax.checkpoint_policies",
        of="",
    ),
    misuse(
        "Pass through the result of a call",
        "grad_pass_through(jnp.round(x))", TypeError,
        "grad_pass_through takes a function, but got an array",
        "Maybe you wrote `grad_pass_through(f(x))` instead of `grad_pass_through(f)(x)`",
        of="",
    ),
    misuse(
        "Pass through a sum",
        "grad_pass_through(lambda x: x.sum())(x)", ValueError,
        MATCH, "inputs:  float32[3, 2]", "outputs: float32[]",
        "or write the rule with `custom_gradient`",
        of="<lambda>",
    ),
    misuse(
        "Pass two inputs through to one output",
        "grad_pass_through(lambda x, b: x + b)(x, b)", ValueError,
        MATCH, "inputs:  float32[3, 2], float32[2]", "outputs: float32[3, 2]",
        "Close over the inputs that need no gradient",
        of="<lambda>",
    ),
    misuse(
        "Forget to return from what is passed through",
        """
@grad_pass_through
def f(x):
    y = jnp.round(x)

f(x)
""",
        ValueError,
        MATCH, "inputs:  float32[3, 2]", "outputs: none",
    ),
    misuse(
        "Give a rule to what is passed through",
        function("f(x)").replace("@custom_gradient", "@grad_pass_through"), TypeError,
        "among its outputs at y[1]", NO_ARRAY,
        "Only what `custom_gradient` decorates returns a gradient function",
    ),
    misuse(
        "Pass a string through",
        "grad_pass_through(lambda x, mode: (x, mode))(x, 'relu')", TypeError,
        "returned the str 'relu' among its outputs at y[1]", NO_ARRAY,
        of="<lambda>",
    ),
    misuse(
        "Decorate what is passed through",
        "custom_gradient(grad_pass_through(lambda x: x))", TypeError,
        "is decorated already: decorate once",
        of="<lambda>",
    ),
]  # fmt: skip


def option(name: str, value: str, expected: str) -> Misuse:
    return misuse(
        f"Check with `{name}={value}`",
        function(f"check_gradient(f, x, {name}={value})"), ValueError,
        f"check_gradient got {name}={value}; expected {expected}",
        of="",
    )  # fmt: skip


NOTHING = "check_gradient found nothing to differentiate in `f`"

CHECKING = [
    misuse(
        "Check the result of a call",
        function("check_gradient(f(x), x)"), ValueError,
        "check_gradient got h=an array", "expected a function, and its arguments after it",
        of="",
    ),
    misuse(
        "Check without a point",
        function("check_gradient(f)"), TypeError,
        "do not fit its signature, (x): missing a required argument: 'x'",
    ),
    misuse(
        "Check with an option by position",
        function("assert_gradient(f, x, 2)"), TypeError,
        "do not fit its signature, (x): too many positional arguments",
    ),
    misuse(
        "Check at integers",
        function("check_gradient(f, jnp.arange(3))"), ValueError,
        NOTHING, "no floating array among its arguments", "Pass floats, not integers",
        jitted=False,
    ),
    misuse(
        "Check at a shape",
        function("check_gradient(f, jax.ShapeDtypeStruct((3, 2), jnp.float32))"), ValueError,
        NOTHING, "no floating array among its arguments", "Pass floats",
    ),
    misuse(
        "Check a function whose value is an index",
        function("check_gradient(f, x)", "x.argmax(), lambda dy: None"), ValueError,
        NOTHING, "no floating array among its outputs",
        jitted=False,
    ),
    misuse(
        "Check a function that is not decorated",
        function("check_gradient(f, x)").replace("@custom_gradient\n", ""), TypeError,
        "among its outputs at y[1]", "Only what `custom_gradient` decorates returns a gradient",
        jitted=False,
    ),
    misuse(
        "Check under `jax.jit`",
        function("jax.jit(lambda x: check_gradient(f, x).ok)(x)"), TypeError,
        "check_gradient compares values", "an argument that JAX is tracing",
        "Call it outside of `jax.jit`",
    ),
    misuse(
        "Check against a reference of other arguments",
        """
def reference(x, b):
    return x**2 + b
""" + function("check_gradient(f, x, reference=reference)"),
        TypeError,
        "do not fit its signature, (x, b): missing a required argument: 'b'",
        of="reference", jitted=False,
    ),
    misuse(
        "Check against a reference of another shape",
        """
def reference(x):
    return (x**2).sum()
""" + function("check_gradient(f, x, reference=reference)"),
        ValueError,
        "The reference `reference` (model.py:1) of check_gradient must return arrays of the shapes",
        "that `f` (model.py:4) returns, [(3, 2)], but returned [()]",
        jitted=False,
    ),
    option("reference", "1.0", "None or a function"),
    option("kwargs", "['x']", "None or a dict"),
    option("expect", "'close'", "'exact' or 'surrogate'"),
    option("order", "0", "a whole number of at least 1"),
    option("order", "1.5", "a whole number of at least 1"),
    option("near", "-1", "a whole number of at least 0"),
    option("near", "0.1", "a whole number of at least 0"),
    option("directions", "0", "a whole number of at least 1"),
    option("transforms", "'jit'", "a list of 'jit' and 'vmap'"),
    option("transforms", "('pmap',)", "a list of 'jit' and 'vmap'"),
    option("tolerance", "0", "None or a positive number"),
    option("tolerance", "'1e-3'", "None or a positive number"),
    option("seed", "-1", "a whole number of at least 0"),
    misuse(
        "Declare a gradient that is wrong by a factor",
        function("assert_gradient(f, x)", "x**2, lambda dy: dy * x"), AssertionError,
        "Gradient of `f`: WRONG", "declared = 0.5 x expected",
        of="", jitted=False,
    ),
    misuse(
        "Return another value from `primal`",
        function("assert_gradient(f, x)", option="primal=lambda x: 2 * x"), AssertionError,
        "Gradient of `f`: WRONG", "disagrees with the function's value",
        of="", jitted=False,
    ),
    misuse(
        "Explain the result of a call",
        function("explain(f(x))"), TypeError,
        "explain takes a function that custom_gradient, grad_pass_through or recompute_grad "
        "returned, but got an array", "Pass the decorated function itself, and its arguments",
        of="",
    ),
    misuse(
        "Explain an undecorated function",
        function("explain(f, x)").replace("@custom_gradient\n", ""), TypeError,
        "explain takes a function that custom_gradient,", "but got the callable `f`",
    ),
    misuse(
        "Explain a jitted function",
        function("explain(jax.jit(f), x)"), TypeError,
        "explain takes a function that custom_gradient,", "`explain(h.__wrapped__, ...)`",
    ),
    misuse(
        "Explain without arguments",
        function("explain(f)"), TypeError,
        "do not fit its signature, (x): missing a required argument: 'x'",
    ),
    misuse(
        "Explain a function that branches, by a shape",
        function(
            "explain(f, jax.ShapeDtypeStruct((3, 2), jnp.float32))",
            "x if x.sum() > 0 else -x, lambda dy: dy",
        ),
        TypeError,
        "explain cannot run `f` without values: it branches on them", "Pass arrays instead",
        of="",
    ),
]  # fmt: skip


def command(options: str, *says: str, script: str = "train_digits") -> Misuse:
    code = f"python examples/{script}.py {options}"
    return misuse(f"`{options}`", code, SystemExit, *says, of="", jitted=False)


WHOLE = "expected a whole number of at least 1, got"
DISTRIBUTED = {"script": "train_distributed"}

EXAMPLES = [
    command("--steps 0", f"--steps: {WHOLE} '0'"),
    command("--steps many", f"--steps: {WHOLE} 'many'"),
    command("--batch -5", f"--batch: {WHOLE} '-5'"),
    command("--batch 1348", "--batch: there are 1347 images to train on, fewer than the 1348"),
    command("--seed 1.5", "--seed: expected a whole number from 0 to 2147483647, got '1.5'"),
    command("--seed 2147483648", "--seed: expected a whole number from 0 to 2147483647, got"),
    command("--out digits.xyz", "--out: 'digits.xyz' must end in one of the formats"),
    command("--out nowhere/digits.png", "--out: there is no directory 'nowhere'"),
    command("--out folder.png", "--out: 'folder.png' is a directory"),
    command("--epochs 3", "unrecognized arguments: --epochs 3"),
    command("--processes 0", f"--processes: {WHOLE} '0'", **DISTRIBUTED),
    command("--save-every x", f"--save-every: {WHOLE} 'x'", **DISTRIBUTED),
    command("--out file", "--out: 'file' is not a directory", **DISTRIBUTED),
    command("--out nowhere/run", "--out: there is no directory 'nowhere'", **DISTRIBUTED),
]

JAX_ITSELF = [
    misuse(
        "Branch on a value under `jax.jit`",
        function("jax.jit(f)(x)", "x if x.sum() > 0 else -x, lambda dy: dy"),
        jax.errors.TracerBoolConversionError,
        "boolean conversion of traced array", "tracing the function f at model.py:1",
        of="",
    ),
    misuse(
        "Let `jax.jit` trace a number that is a setting",
        function("jax.jit(f)(x, 6)", "x.reshape(n), lambda dy: (dy.reshape(3, 2), None)", "x, n"),
        TypeError,
        "tracing the function f at model.py:1", "static_argnums",
        of="",
    ),
    misuse(
        "Give `jax.jit` a string",
        function("jax.jit(f)(x, 'relu')", "x, lambda dy: dy", "x, mode"), TypeError,
        "type <class 'str'>", "static_argnums",
    ),
    misuse(
        "Differentiate with respect to a string",
        function("jax.grad(f, 1)(x, 'relu')", "x, lambda dy: dy", "x, mode"), TypeError,
        "'relu' of type <class 'str'> is not a valid JAX type",
        of="",
    ),
    misuse(
        "Differentiate with respect to an integer",
        function("jax.grad(f)(3)"), TypeError,
        "grad requires real- or complex-valued inputs", "but got int32",
        of="",
    ),
    misuse(
        "Compute with Python's `math` under `jax.jit`",
        function("jax.jit(f)(1.0)", "float(x) ** 2, lambda dy: dy"),
        jax.errors.ConcretizationTypeError,
        "concrete value is expected", "tracing the function f at model.py:1",
        of="",
    ),
    misuse(
        "Let a value out by a list",
        """
kept = []

@custom_gradient
def f(x):
    kept.append(2 * x)
    return x**2, lambda dy: 2 * x * dy

jax.jit(f)(x)
kept[0] + 1
""",
        jax.errors.UnexpectedTracerError,
        "to escape the scope of the transformation", "intermediate value with type float32[3,2]",
        of="",
        jitted=False,  # the message has columns
    ),
    misuse(
        "Call a `custom_vjp` in a rule, and ask for forward mode of the gradient",
        """
@jax.custom_vjp
def g(x):
    return 2 * x

g.defvjp(lambda x: (2 * x, None), lambda _, dy: (2 * dy,))
""" + function("jax.jacfwd(jax.grad(lambda x: jnp.sum(f(x))))(x)", "x**2, lambda dy: g(x) * dy"),
        TypeError,
        "can't apply forward-mode autodiff (jvp) to a custom_vjp function",
        of="",
    ),
    misuse(
        "Call back to Python in a rule, and ask for the second order",
        function(
            "jax.grad(jax.grad(f))(1.0)",
            "x**2, lambda dy: dy * jax.pure_callback(lambda x: 2 * x, x, x)",
        ),
        ValueError,
        "Pure callbacks do not support JVP",
        of="",
    ),
    misuse(
        "Put a decorated function in a `while_loop`",
        function("jax.grad(lambda x: jax.lax.while_loop(lambda x: x < 9, f, x))(2.0)"), ValueError,
        "Reverse-mode differentiation does not work for lax.while_loop",
        of="",
    ),
    misuse(
        "Sum over devices in a rule that runs outside of the mesh",
        function("jax.grad(f)(1.0)", 'x**2, lambda dy: jax.lax.psum(2 * x * dy, "devices")'),
        NameError,
        "unbound axis name",
        of="",
        jitted=False,
    ),
    misuse(
        "Return a string from what is recomputed",
        """
@recompute_grad
def f(x):
    return x**2, "relu"

jax.grad(lambda x: jnp.sum(f(x)[0]))(x)
""",
        TypeError,
        "function f at model.py:1", "returned a value of type <class 'str'>",
        "not a valid JAX type",
        of="",
    ),
]  # fmt: skip

MISUSES: dict[str, list[Misuse]] = {
    "decorating": DECORATING,
    "calling": CALLING,
    "returned by f": RETURNED_BY_F,
    "upstreams": UPSTREAMS,
    "gradients": GRADIENTS,
    "variables": VARIABLES,
    "forward mode": FORWARD_MODE,
    "helpers": HELPERS,
    "checking": CHECKING,
    "examples": EXAMPLES,
    "jax": JAX_ITSELF,
}
