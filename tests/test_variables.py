"""The `variables=` protocol: what a rule gets for the values its function closes over.

Undeclared (TensorFlow's own protocol: a list), declared (`variables=` a pytree or a function of
the instance) and `variables="autodiff"`; the errors of each, word for word; and rules that call
their own function from a closure. Every rule is wrong on purpose: 7 for inputs, 5 for variables.
"""

import collections
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfgrad_jax import custom_gradient

MODES = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])


def same(got: Any, expected: Any, rtol: float = 1e-5) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert g.dtype == jnp.asarray(e).dtype
        assert g.shape == np.shape(e)
        np.testing.assert_allclose(g.astype(np.float32), np.asarray(e, np.float32), rtol=rtol)


def at(f: Any, offset: int = 0) -> str:
    """Return "file:line" of a line of a decorated function, counted from its decorator."""
    code = getattr(f, "__wrapped__", f).__code__
    return f"{code.co_filename}:{code.co_firstlineno + offset}"


# --- undeclared: TensorFlow's list ---------------------------------------------------------------


@MODES
def test_listed_once_each_in_the_order_of_first_use(mode):
    seen = []

    def loss(a, b, c, x):
        @custom_gradient
        def f(x):
            y = (b * x).sum() + (a * x[:2]).sum() * b[0] + (b * c).sum()

            def grad(dy, variables):
                seen.append([v.shape for v in variables])
                assert [v is w for v, w in zip(variables, (b, a, c), strict=True)] == [True] * 3
                return 7 * dy * x, [5 * dy * x, 50 * dy * x[:2], 500 * dy * x]

            return y, grad

        return f(x)

    a, b, c, x = jnp.ones(2), jnp.ones(3), jnp.ones(3), jnp.arange(3.0)
    got = mode(jax.grad(loss, (0, 1, 2, 3)))(a, b, c, x)
    same(got, (50 * x[:2], 5 * x, 500 * x, 7 * x))
    assert seen[0] == [(3,), (2,), (3,)]


@MODES
def test_identity_holds_in_containers_and_in_rules_that_are_no_functions(mode):
    class Rule:
        def __init__(self, params, x):
            self.params, self.x = params, x

        def __call__(self, dy, variables):
            assert len(variables) == 1
            assert variables[0] is self.params["w"]
            return 7 * dy * self.params["w"], [5 * dy * self.x]

    def loss(w, x):
        params = {"w": w}

        def of_rule(x):
            return params["w"] * x, Rule(params, x)

        def of_function(x):
            def grad(dy, *, variables):
                assert variables[0] is params["w"]
                return 7 * dy * params["w"], [5 * dy * x]

            return params["w"] * x, grad

        return custom_gradient(of_rule)(x) + custom_gradient(of_function)(x)

    same(mode(jax.grad(loss, (0, 1)))(3.0, 2.0), (jnp.float32(20), jnp.float32(42)))


@MODES
def test_gradients_accumulate_over_calls(mode):
    def loss(w, x):
        @custom_gradient
        def f(x):
            return w * x, lambda dy, variables: (7 * dy * w, [5 * dy * x])

        @custom_gradient
        def g(x):
            return w + x, lambda dy, variables: (7 * dy, [50 * dy])

        return f(x) + 2 * f(f(x)) + g(x) + w  # `w` is used outside as well

    # f(f(x)): the inner call gets 2 * 7 w; the outer gives 2 * 5 (w x) to w.
    w, x = 3.0, 2.0
    by_w = 5 * x + 2 * (5 * w * x + 7 * w * 5 * x) + 50 + 1
    by_x = 7 * w + 2 * 7 * w * 7 * w + 7
    same(mode(jax.grad(loss, (0, 1)))(w, x), (jnp.float32(by_w), jnp.float32(by_x)))


@MODES
def test_only_values_that_y_depends_on(mode):
    def loss(w, residual, mask, x):
        @custom_gradient
        def f(x):
            slope = residual * x  # for the rule alone

            def grad(dy, variables):
                (v,) = variables
                assert v is w
                return jnp.where(mask, 7 * dy * slope, 0), [5 * dy * x]

            return jnp.where(mask, w * x, 0), grad

        return f(x)

    got = mode(jax.grad(lambda w, r, x: loss(w, r, x > 0, x), (0, 1, 2)))(3.0, 11.0, 2.0)
    same(got, (jnp.float32(10), jnp.float32(0), jnp.float32(7 * 22)))


def _by_jit(w, x):
    return jax.jit(lambda x: (x * 2, w * x))(x)


def _by_checkpoint(w, x):
    return jax.checkpoint(lambda x: (x * 2, w * x))(x)


def _by_cond(w, x):
    return jax.lax.cond(x > 0, lambda x: (x * 2, w * x), lambda x: (x * 3, x), x)


def _by_scan(w, x):
    y, slopes = jax.lax.scan(lambda x, _: (x * 2, w * x), x, None, length=1)
    return y, slopes[0]


@MODES
@pytest.mark.parametrize("compute", [_by_jit, _by_checkpoint, _by_cond, _by_scan])
def test_a_value_for_the_rule_alone_from_one_operation_with_y(mode, compute):
    """`y` and the residual come from the same `jit` or `scan`; `y` does not depend on `w`."""

    def loss(w, x):
        @custom_gradient
        def f(x):
            y, slope = compute(w, x)
            return y, lambda dy: 7 * dy * slope

        return f(x)

    same(mode(jax.grad(loss, (0, 1)))(3.0, 2.0), (jnp.float32(0), jnp.float32(42)))


@MODES
@pytest.mark.parametrize("none", [[None, None], (None, None), None])
def test_none_is_no_gradient(mode, none):
    def loss(w, b, x):
        @custom_gradient
        def f(x):
            return w * x + b, lambda dy, variables: (7 * dy * w, none)

        return f(x) + 11 * b

    got = mode(jax.grad(loss, (0, 1, 2)))(3.0, 1.0, 2.0)
    same(got, (jnp.float32(0), jnp.float32(11), jnp.float32(21)))


def test_some_none():
    def loss(w, b, x):
        @custom_gradient
        def f(x):
            return w * x + b, lambda dy, variables: (None, [5 * dy * x, None])

        return f(x)

    got = jax.grad(loss, (0, 1, 2))(3.0, 1.0, 2.0)
    same(got, (jnp.float32(10), jnp.float32(0), jnp.float32(0)))


@custom_gradient
def captures_nothing(x):
    def grad(dy, variables=None):
        assert variables is None
        return 7 * dy * x

    return x**2, grad


@custom_gradient
def captures_nothing_rest(x):
    def grad(dy, **keywords):
        assert not keywords
        return 7 * dy * x

    return x**2, grad


@custom_gradient
def captures_nothing_required(x):
    def grad(dy, variables):
        assert variables == []
        return 7 * dy * x, []

    return x**2, grad


@custom_gradient
def captures_nothing_and_returns_a_pair(x):
    def grad(dy, **keywords):
        assert not keywords
        return 7 * dy * x, [1000.0]

    return x**2, grad


@MODES
@pytest.mark.parametrize(
    "f",
    [
        captures_nothing,
        captures_nothing_rest,
        captures_nothing_required,
        captures_nothing_and_returns_a_pair,
    ],
    ids=lambda f: f.__name__,
)
def test_without_captured_values_no_variables(mode, f):
    same(mode(jax.grad(f))(2.0), jnp.float32(14))


@pytest.mark.parametrize("required", [True, False])
def test_concrete_captured_values_are_no_variables(required):
    w = jnp.float32(3.0)

    @custom_gradient
    def f(x):
        if required:
            return w * x, lambda dy, variables: (7 * dy * w + len(variables), variables)
        return w * x, lambda dy, **keywords: 7 * dy * w + len(keywords)

    same(jax.grad(f)(2.0), jnp.float32(21))
    same(jax.jit(jax.grad(f))(2.0), jnp.float32(21))


def test_traced_but_not_differentiated_values_are_listed():
    seen = []

    def loss(w, x):
        @custom_gradient
        def f(x):
            def grad(dy, **keywords):
                seen.append(len(keywords["variables"]))
                return 7 * dy * w, [1000 * dy]

            return w * x, grad

        return f(x)

    same(jax.jit(jax.grad(loss, 1))(3.0, 2.0), jnp.float32(21))
    same(jax.vmap(jax.grad(loss, 1))(jnp.ones(2), jnp.ones(2)), jnp.full(2, 7.0))
    assert set(seen) == {1}


@MODES
def test_positional_keyword_only_and_rest_parameters(mode):
    def loss(kind):
        def of(w, x):
            @custom_gradient
            def f(x):
                def positional(dy, variables):
                    return 7 * dy, [5 * dy for _ in variables]

                def keyword_only(dy, *, variables=None):
                    return 7 * dy, [5 * dy for _ in variables]

                def rest(*dys, **keywords):
                    return 7 * dys[0], [5 * dys[0] for _ in keywords["variables"]]

                partial = functools.partial(lambda scale, dy, variables: (7 * dy, [5 * dy]), 1)
                return w + x, [positional, keyword_only, rest, partial][kind]

            return f(x)

        return of

    for kind in range(4):
        same(mode(jax.grad(loss(kind), (0, 1)))(1.0, 1.0), (jnp.float32(5), jnp.float32(7)))


@MODES
def test_bfloat16_variables_get_bfloat16_gradients(mode):
    def loss(w, b, x):
        @custom_gradient
        def f(x):
            wide = w.astype(jnp.float32)

            def grad(dy, variables):
                assert [v.dtype for v in variables] == [jnp.bfloat16, jnp.float32]
                return 7 * dy * wide, [5 * dy * x, 50 * dy.astype(jnp.bfloat16)]

            return wide * x + b, grad

        return f(x)

    got = mode(jax.grad(loss, (0, 1, 2)))(jnp.bfloat16(3), jnp.float32(1), jnp.float32(2))
    same(got, (jnp.bfloat16(10), jnp.float32(50), jnp.float32(21)))


@MODES
def test_complex_variables_follow_the_convention_of_tensorflow(mode):
    def loss(h):
        return lambda w, x: h(w)(x).real ** 2 + h(w)(x).imag

    def with_rule(w):
        @custom_gradient
        def f(x):
            return w * x, lambda dy, variables: (dy * jnp.conj(w), [dy * jnp.conj(x)])

        return f

    def of_jax(w):
        @functools.partial(custom_gradient, convention="jax")
        def f(x):
            return w * x, lambda dy, variables: (dy * w, [dy * x])

        return f

    w, x = jnp.complex64(3 + 1j), jnp.complex64(2 - 5j)
    expected = jax.grad(loss(lambda w: lambda x: w * x), (0, 1))(w, x)
    for h in (with_rule, of_jax):
        got = mode(jax.grad(loss(h), (0, 1)))(w, x)
        np.testing.assert_allclose(np.stack(got), np.stack(expected), rtol=1e-5)


def test_convention_of_jax_gets_one_upstream_and_the_variables():
    def loss(w, x):
        @functools.partial(custom_gradient, convention="jax")
        def f(x):
            def grad(dys, variables):
                return 7 * dys["b"] * w + dys["a"], [5 * dys["b"] * x for _ in variables]

            return {"b": w * x, "a": x}, grad

        y = f(x)
        return y["a"] + 2 * y["b"]

    same(jax.grad(loss, (0, 1))(3.0, 2.0), (jnp.float32(20), jnp.float32(43)))


@MODES
def test_forward_mode_transposes_the_gradients_of_variables(mode):
    def h(w, x):
        @custom_gradient(forward_mode=True)
        def f(x):
            return w * x**2, lambda dy, variables: (7 * dy * w * x, [5 * dy * x**2])

        return f(x)

    y, dy = mode(lambda *a: jax.jvp(h, a, (10.0, 100.0)))(3.0, 2.0)
    same((y, dy), (jnp.float32(12), jnp.float32(5 * 4 * 10 + 7 * 6 * 100)))
    same(mode(jax.grad(h, (0, 1)))(3.0, 2.0), (jnp.float32(20), jnp.float32(42)))
    by_jacfwd = mode(jax.jacfwd(jax.jacfwd(lambda w, x: h(w, x) ** 2, (0, 1)), (0, 1)))(3.0, 2.0)
    same(jax.tree.leaves(by_jacfwd), [jnp.float32(v) for v in (800, 2160, 2016, 4032)])


@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_eagerly_f_and_its_rule_see_values(argnums):
    seen = []

    def loss(w, x):
        @custom_gradient
        def f(x):
            y = w * x**2 if w > 0 and x > 0 else x

            def grad(dy, variables=()):
                seen.append(float(dy))
                dx = 7 * dy * w * x if dy > 0 else 0 * dy
                return (dx, [5 * dy * x**2]) if len(variables) else dx

            return y, grad

        return f(x)

    captured = argnums != 1
    # With this flag JAX traces every `custom_vjp`, and only known values can be kept from it.
    if captured and getattr(jax.config, "jax_custom_vjp3", False):
        with pytest.raises(jax.errors.TracerBoolConversionError):
            jax.grad(loss, argnums)(3.0, 2.0)
        return
    expected = {0: jnp.float32(20), 1: jnp.float32(42), (0, 1): (jnp.float32(20), jnp.float32(42))}
    same(jax.grad(loss, argnums)(3.0, 2.0), expected[argnums])
    assert set(seen) == {1.0}


# --- what is wrong in what a rule returns ---------------------------------------------------------


def error_of(returned, variables=None, exception=ValueError):
    """Return the decorated function and the message of the error of what its rule returns."""
    made = []

    def loss(w, b, x):
        def f(x):
            def grad(dy, variables):
                return returned(dy, x)

            return (w * x).sum() + b, grad

        made[:] = [custom_gradient(f, variables=variables and variables(w, b))]
        return made[0](x)

    with pytest.raises(exception) as caught:
        jax.grad(loss, (0, 1, 2))(jnp.ones(3), 1.0, jnp.ones(3))
    return made[0], str(caught.value)


def text(f, tail):
    """Return the golden text: whose rule it is, then the tail."""
    rule = f"`error_of.loss.f.grad` ({at(f, 1)})"
    return f"The gradient function {rule} of `error_of.loss.f` ({at(f)}) {tail}"


def test_error_for_a_wrong_number():
    f, message = error_of(lambda dy, x: (7 * dy * x, [5 * dy * x]))
    assert message == text(
        f,
        "returned 1 gradient; expected 2, for the variables `variables[0]`, `variables[1]`. "
        "Return None for every variable that has no gradient.",
    )
    f, message = error_of(lambda dy, x: (7 * dy * x, [5 * dy * x, dy, dy]))
    assert message == text(
        f, "returned 3 gradients; expected 2, for the variables `variables[0]`, `variables[1]`."
    )


def test_error_for_no_pair():
    for returned, came in [
        (lambda dy, x: 7 * dy * x, "an array of dtype float32 and shape (3,)"),
        (lambda dy, x: (x, [x, dy], None), "a tuple of length 3"),
        (lambda dy, x: None, "None"),
    ]:
        f, message = error_of(returned, exception=TypeError)
        assert message == text(
            f,
            "was called with `variables=` and must return a pair (grad_xs, grad_vars): the "
            f"gradients of the inputs and those of the variables. It returned {came}.",
        )


def test_error_for_a_wrong_shape():
    f, message = error_of(lambda dy, x: (7 * dy * x, [5 * dy, dy]))
    assert message == text(
        f,
        "returned a gradient of shape () for the variable `variables[0]`; expected its own "
        "shape, (3,). Maybe a broadcast is missing, `jnp.broadcast_to(g, (3,))`.",
    )


def test_error_for_a_wrong_kind():
    f, message = error_of(lambda dy, x: (7 * dy * x, [x.astype(int), dy]), exception=TypeError)
    assert message == text(
        f,
        "returned an array of dtype int32 and shape (3,) for the variable `variables[0]`; "
        "expected an array of dtype float32 and shape (3,). Convert it, `.astype(float32)`, or "
        "return None for no gradient.",
    )


def test_error_for_a_wrong_structure_of_declared_variables():
    f, message = error_of(
        lambda dy, x: (7 * dy * x, {"w": 5 * dy * x, "typo": dy}),
        lambda w, b: {"w": w, "b": b},
        TypeError,
    )
    assert message == text(
        f,
        "returned gradients in a structure that does not fit the variables.\n"
        "  expected: {'b': *, 'w': *}, for `variables['b']`, `variables['w']`\n"
        "  got:      {'typo': *, 'w': *}\n"
        "Return the structure of the variables, or a flat list with one gradient for each of "
        "the leaves above; None stands for no gradient.",
    )
    f, message = error_of(lambda dy, x: (7 * dy * x, [dy]), lambda w, b: {"w": w, "b": b})
    assert message == text(
        f,
        "returned 1 gradient; expected 2, for the variables `variables['b']`, `variables['w']`. "
        "Return None for every variable that has no gradient.",
    )


# --- declared ------------------------------------------------------------------------------------


Params = collections.namedtuple("Params", ["w", "b"])


@MODES
@pytest.mark.parametrize(
    "returned",
    [
        lambda dw, db: Params(dw, [db]),
        lambda dw, db: (dw, [db]),
        lambda dw, db: [dw, [db]],
        lambda dw, db: [dw, db],
    ],
    ids=["same", "tuple", "list", "flat"],
)
def test_declared_structure(mode, returned):
    def loss(params, x):
        @custom_gradient(variables=params)
        def f(x):
            def grad(dy, variables):
                assert isinstance(variables, Params)
                assert variables.w is params.w
                return 7 * dy * variables.w, returned(5 * dy * x, 50 * dy.sum())

            return params.w * x + params.b[0], grad

        return f(x).sum()

    params, x = Params(jnp.arange(1.0, 4), [jnp.float32(0)]), jnp.arange(3.0)
    got = mode(jax.grad(loss, (0, 1)))(params, x)
    same(got, (Params(5 * x, [jnp.float32(150)]), 7 * params.w))


def test_declared_variables_are_always_passed():
    """Whatever is differentiated, and if nothing is traced but the input."""
    seen = []
    params = {"w": jnp.float32(3.0)}

    def made(params):
        @custom_gradient(variables=params)
        def f(x):
            def grad(dy, variables):
                seen.append(set(variables))
                return 7 * dy * variables["w"], {"w": 5 * dy * x}

            return params["w"] * x, grad

        return f

    def loss(params, x):
        return made(params)(x)

    same(jax.grad(made(params))(2.0), jnp.float32(21))
    same(jax.jit(jax.grad(made(params)))(2.0), jnp.float32(21))
    same(jax.grad(loss, 1)(params, 2.0), jnp.float32(21))
    same(jax.jit(jax.grad(loss, 1))(params, 2.0), jnp.float32(21))
    same(jax.grad(loss)(params, 2.0), {"w": jnp.float32(10)})
    assert len(seen) >= 5
    assert all(names == {"w"} for names in seen)


@MODES
def test_declared_but_unused_variables_get_what_the_rule_gives(mode):
    def loss(w, unused, x):
        @custom_gradient(variables={"w": w, "unused": unused})
        def f(x):
            return w * x, lambda dy, variables: (7 * dy * w, {"w": 5 * dy * x, "unused": 500 * dy})

        return f(x)

    got = mode(jax.grad(loss, (0, 1, 2)))(3.0, 1.0, 2.0)
    same(got, (jnp.float32(10), jnp.float32(500), jnp.float32(21)))
    same(mode(jax.grad(loss, 1))(3.0, 1.0, 2.0), jnp.float32(500))


@MODES
def test_declared_twice_adds_both(mode):
    def loss(w, x):
        @custom_gradient(variables={"encoder": w, "decoder": w})
        def f(x):
            def grad(dy, variables):
                return 7 * dy * w, {"encoder": 5 * dy * x, "decoder": 50 * dy * x}

            return w * x, grad

        return f(x)

    same(mode(jax.grad(loss))(3.0, 2.0), jnp.float32(110))


@MODES
def test_declared_with_leaves_that_are_no_arrays(mode):
    def loss(w, x):
        params = {"w": w, "activation": jnp.sin, "name": "layer", "size": 3, "flag": True}

        @custom_gradient(variables=params)
        def f(x):
            def grad(dy, variables):
                assert variables["name"] == "layer"
                assert variables["activation"] is jnp.sin
                assert variables["size"] == 3
                assert variables["flag"] is True
                return 7 * dy * variables["w"], {**variables, "w": 5 * dy * x}

            return params["activation"](w) * x, grad

        return f(x)

    same(mode(jax.grad(loss, (0, 1)))(3.0, 2.0), (jnp.float32(10), jnp.float32(21)))


class Layer:
    def __init__(self, w, b):
        self.w, self.b = w, b

    @custom_gradient(variables=lambda self: {"w": self.w, "b": self.b})
    def method(self, x):
        def grad(dy, variables):
            return 7 * dy * self.w, {"w": 5 * dy * x, "b": 50 * dy}

        return self.w * x + self.b, grad

    @custom_gradient(variables=lambda self: {"w": self.w})
    def forgets_b(self, x):
        def grad(dy, variables):
            return 7 * dy * self.w, {"w": 5 * dy * x}

        return self.w * x + self.b, grad


@MODES
def test_declared_by_a_function_of_the_instance(mode):
    expected = jnp.float32(10), jnp.float32(50), jnp.float32(21)
    bound = jax.grad(lambda w, b, x: Layer(w, b).method(x), (0, 1, 2))
    unbound = jax.grad(lambda w, b, x: Layer.method(Layer(w, b), x), (0, 1, 2))
    same(mode(bound)(3.0, 1.0, 2.0), expected)
    same(mode(unbound)(3.0, 1.0, 2.0), expected)


def test_error_for_a_captured_value_that_is_not_declared():
    def loss(w, b, x):
        return Layer(w, b).forgets_b(x)

    f = Layer.forgets_b
    with pytest.raises(TypeError) as caught:
        jax.grad(loss, 1)(3.0, 1.0, 2.0)
    assert str(caught.value) == (
        f"`Layer.forgets_b` ({at(f)}) is differentiated with respect to values that it closes "
        "over, that are not among its declared variables:\n"
        f"  float32[], first used at {at(f, 5)}\n"
        "Add them to `custom_gradient(variables=...)`, or pass them as arguments."
    )
    # Not when it is merely traced.
    same(jax.jit(jax.grad(loss, 2))(3.0, 1.0, 2.0), jnp.float32(21))
    same(jax.jit(jax.grad(loss, 0))(3.0, 1.0, 2.0), jnp.float32(10))


def test_error_also_where_the_declared_variables_are_concrete():
    def loss(b, x):
        return Layer(jnp.float32(3.0), b).forgets_b(x)

    with pytest.raises(TypeError, match="not among its declared variables"):
        jax.grad(loss)(1.0, 2.0)
    with pytest.raises(TypeError, match="not among its declared variables"):
        jax.grad(loss)(1.0, jnp.float32(2.0))

    def empty(w, x):
        @custom_gradient(variables={})
        def f(x):
            return w * x, lambda dy, variables: (7 * dy * w, variables)

        return f(x)

    same(jax.grad(empty, 1)(3.0, 2.0), jnp.float32(21))
    with pytest.raises(TypeError, match="not among its declared variables"):
        jax.grad(empty)(3.0, 2.0)


def test_bad_option():
    with pytest.raises(ValueError, match="variables='auto'"):
        custom_gradient(variables="auto")


# --- the error without `variables` ---------------------------------------------------------------


def no_variables(w, b, mask, x):
    @custom_gradient
    def f(x):
        z = jnp.where(mask, x, 0)
        z = z @ w
        y = z + b
        unused = w.sum() * b.sum()

        def grad(dy):
            return 7 * dy @ w.T * unused

        return y, grad

    no_variables.f = f
    return f(x).sum()


ARGS = jnp.ones((3, 2)), jnp.ones(2), jnp.array([True, False, True]), jnp.ones(3)


def test_error_text_names_each_value_and_both_remedies():
    with pytest.raises(TypeError) as caught:
        jax.grad(no_variables, (0, 1))(*ARGS)
    f = no_variables.f
    assert str(caught.value) == (
        f"`no_variables.f` ({at(f)}) is differentiated with respect to values that it closes "
        "over, but its gradient function takes no `variables`:\n"
        f"  float32[3, 2], first used at {at(f, 3)}\n"
        f"  float32[2], first used at {at(f, 4)}\n"
        "Pass them as arguments; or let the gradient function take them, "
        "`def grad(dy, variables): ... return grad_xs, grad_vars`; or decorate with "
        '`custom_gradient(variables="autodiff")` to give them the ordinary gradient of the '
        "function."
    )


def test_error_lists_only_what_is_differentiated():
    for argnums, line in [(0, 3), (1, 4)]:
        with pytest.raises(TypeError) as caught:
            jax.jit(jax.grad(no_variables, argnums))(*ARGS)
        values = [line for line in str(caught.value).splitlines() if line.startswith("  ")]
        assert len(values) == 1
        assert values[0].endswith(at(no_variables.f, line))


TRACED = {  # neither the weights nor the biases are differentiated in these
    "call": (lambda f, w, b, m, x: f(w, b, m, x), 6.0),
    "jit": (lambda f, *args: jax.jit(f)(*args), 6.0),
    "grad": (lambda f, *args: jax.grad(f, 3)(*args), np.full(3, 168.0)),
    "jit of grad": (lambda f, *args: jax.jit(jax.grad(f, 3))(*args), np.full(3, 168.0)),
    "vmap over inputs": (
        lambda f, w, b, m, x: jax.vmap(lambda x: jax.grad(f, 3)(w, b, m, x))(x[None]),
        np.full((1, 3), 168.0),
    ),
    "vmap over weights": (
        lambda f, w, b, m, x: jax.vmap(lambda w: jax.grad(f, 3)(w, b, m, x))(w[None]),
        np.full((1, 3), 168.0),
    ),
    "checkpoint": (
        lambda f, *args: jax.grad(jax.checkpoint(f), 3)(*args),
        np.full(3, 168.0),
    ),
    "scan": (
        lambda f, w, b, m, x: jax.lax.scan(
            lambda w, x: (w, jax.grad(f, 3)(w, b, m, x)), w, x[None]
        )[1],
        np.full((1, 3), 168.0),
    ),
}


@pytest.mark.parametrize("traced", TRACED)
def test_no_error_for_what_is_merely_traced(traced):
    run, expected = TRACED[traced]  # 168 = 7 * (dy @ w.T = 2) * (w.sum() * b.sum() = 12)
    same(run(no_variables, *ARGS), jnp.asarray(expected, jnp.float32))


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda loss: jax.grad(loss),
        lambda loss: jax.jit(jax.grad(loss)),
        lambda loss: jax.grad(jax.jit(loss)),
        lambda loss: lambda w, x: jax.vmap(jax.grad(loss))(w[None], x[None]),
        lambda loss: jax.grad(jax.checkpoint(loss)),
        lambda loss: jax.grad(lambda w, x: jax.lax.cond(x > 0, loss, loss, w, x)),
        lambda loss: jax.grad(
            lambda w, x: jax.lax.scan(lambda c, x: (c + loss(w, x), None), 0.0, x[None])[0]
        ),
        lambda loss: jax.grad(jax.grad(loss, 1)),
        lambda loss: jax.hessian(loss),
    ],
    ids=["eager", "jit", "grad jit", "vmap", "checkpoint", "cond", "scan", "order 2", "hessian"],
)
def test_error_under_every_transformation(differentiate):
    def loss(w, x):
        @custom_gradient
        def f(x):
            return w * x, lambda dy: 7 * dy * w

        return f(x) ** 2

    with pytest.raises(TypeError, match="is differentiated with respect to values that it closes"):
        differentiate(loss)(jnp.float32(3.0), jnp.float32(2.0))


def test_error_points_into_f_where_a_helper_uses_the_value():
    def loss(w, x):
        def helper(x):
            return w * x

        @custom_gradient
        def f(x):
            z = jnp.sin(x)
            y = helper(z)
            return y, lambda dy: 7 * dy * w

        loss.f = f
        return f(x)

    with pytest.raises(TypeError, match=re.escape(f"float32[], first used at {at(loss, 7)}\n")):
        jax.grad(loss)(3.0, 2.0)


def test_error_where_the_value_is_returned_as_it_is():
    def loss(w, x):
        @custom_gradient
        def f(x):
            return w, lambda dy: 7 * dy

        loss.f = f
        return f(x)

    same(jax.grad(loss, 1)(3.0, 2.0), jnp.float32(7))
    with pytest.raises(TypeError) as caught:
        jax.grad(loss)(3.0, 2.0)
    assert f"float32[], first used at {at(loss.f)}" in str(caught.value)


# --- variables="autodiff" ------------------------------------------------------------------------


def rounded(w, x):
    """A straight-through layer: the input sees the identity, the weight what it is."""

    @custom_gradient(variables="autodiff")
    def f(x):
        return jnp.sin(w * x), lambda dy: 7 * dy

    return f(x)


W, X = jnp.float32(0.75), jnp.float32(0.5)
WS, XS = jnp.array([0.75, -0.5, 1.5]), jnp.array([0.5, 2.0, -1.0])


def by_w(w, x):  # of rounded**2
    return 2 * np.sin(w * x) * np.cos(w * x) * x


def by_x(w, x):
    return 2 * np.sin(w * x) * 7


AUTODIFF = {
    "eager": (lambda L: jax.grad(L, (0, 1))(W, X), (by_w(W, X), by_x(W, X))),
    "jit": (lambda L: jax.jit(jax.grad(L, (0, 1)))(W, X), (by_w(W, X), by_x(W, X))),
    "grad of jit": (lambda L: jax.grad(jax.jit(L), (0, 1))(W, X), (by_w(W, X), by_x(W, X))),
    "weights": (lambda L: (jax.grad(L)(W, X),), (by_w(W, X),)),
    "inputs": (lambda L: (jax.grad(L, 1)(W, X),), (by_x(W, X),)),
    "vmap": (
        lambda L: jax.vmap(jax.grad(L, (0, 1)))(WS, XS),
        (by_w(WS, XS), by_x(WS, XS)),
    ),
    "grad of vmap": (
        lambda L: jax.grad(lambda w, x: jax.vmap(lambda x: L(w, x))(x).sum(), (0, 1))(W, XS),
        (by_w(W, XS).sum(), by_x(W, XS)),
    ),
    "scan": (
        lambda L: jax.grad(
            lambda w, x: jax.lax.scan(lambda c, x: (c + L(w, x), None), 0.0, x)[0], (0, 1)
        )(W, XS),
        (by_w(W, XS).sum(), by_x(W, XS)),
    ),
    "checkpoint": (
        lambda L: jax.grad(jax.checkpoint(L), (0, 1))(W, X),
        (by_w(W, X), by_x(W, X)),
    ),
    "cond": (
        lambda L: jax.grad(lambda w, x: jax.lax.cond(x > 0, L, lambda w, x: w * x, w, x), (0, 1))(
            W, X
        ),
        (by_w(W, X), by_x(W, X)),
    ),
    "checkpoint in scan of vmap": (
        lambda L: jax.grad(
            lambda w, x: jax.lax.scan(
                lambda c, x: (c + jax.checkpoint(jax.vmap(L, (None, 0)))(w, x).sum(), None), 0.0, x
            )[0],
            (0, 1),
        )(W, XS[None]),
        (by_w(W, XS).sum(), by_x(W, XS)[None]),
    ),
}


@pytest.mark.parametrize("case", AUTODIFF)
def test_autodiff(case):
    run, expected = AUTODIFF[case]
    got = run(lambda w, x: rounded(w, x) ** 2)
    same(got, jax.tree.map(lambda e: jnp.asarray(e, jnp.float32), expected))


@pytest.mark.parametrize(
    "second", [jax.hessian, lambda f, n: jax.jacrev(jax.grad(f, n), n)], ids=["hessian", "reverse"]
)
@MODES
def test_autodiff_second_order(mode, second):
    """The declared `7` for x at every order, the ordinary `x cos(w x)` for w at every order."""
    s, c = np.sin(W * X), np.cos(W * X)
    # d/dw = 2 s c x, of which s is h (declared) and the rest plain code: d h/dx is 7.
    expected = (
        (2 * (c * X) ** 2 - 2 * s * s * X**2, 2 * 7 * c * X + 2 * s * (c - s * W * X)),
        (2 * 7 * c * X, 2 * 7 * 7),
    )
    got = mode(second(lambda w, x: rounded(w, x) ** 2, (0, 1)))(W, X)
    same(got, jax.tree.map(jnp.float32, expected), rtol=1e-4)


@MODES
def test_autodiff_uses_the_rule_of_a_decorated_function_inside(mode):
    def loss(w, x):
        @custom_gradient
        def inner(x):
            return w * x, lambda dy, variables: (700 * dy * w, [5 * dy * x])

        @custom_gradient(variables="autodiff")
        def f(x):
            return 2 * inner(x), lambda dy: 7 * dy * w

        return f(x)

    same(mode(jax.grad(loss, (0, 1)))(3.0, 2.0), (jnp.float32(20), jnp.float32(21)))


@MODES
def test_autodiff_of_several_outputs_and_of_values_without_derivative(mode):
    def loss(w, index, x):
        @custom_gradient(variables="autodiff")
        def f(x):
            y = w[index] * x
            return (y, jnp.argmax(w), {"z": w.sum() * x}), lambda a, i, z: 7 * a + 70 * z

        y, i, rest = f(x)
        return y + 3 * rest["z"] + i.astype(jnp.float32)

    w, x = jnp.array([1.0, 4.0, 2.0]), jnp.float32(2)
    got = mode(jax.grad(loss, (0, 2)))(w, jnp.int32(1), x)
    same(got, (jnp.array([6.0, 8.0, 6.0]), jnp.float32(7 + 3 * 70)))


def test_autodiff_without_captured_values_is_the_plain_rule():
    f = custom_gradient(lambda x: (x**2, lambda dy: 7 * dy * x), variables="autodiff")
    same(jax.grad(f)(2.0), jnp.float32(14))
    same(jax.jit(jax.grad(jax.grad(lambda x: f(x) ** 2)))(2.0), jnp.float32(448))


# --- second order and recursion ------------------------------------------------------------------


def weighted(variables):
    def loss(w, x):
        @custom_gradient(variables=variables and variables(w))
        def f(x):
            return w * x**2, lambda dy, variables: (7 * dy * w * x, [5 * dy * x**2])

        return f(x) ** 2

    return loss


@MODES
@pytest.mark.parametrize("variables", [None, lambda w: [w]], ids=["undeclared", "declared"])
def test_the_declared_gradients_hold_at_second_order(mode, variables):
    expected = (800, 2160), (2016, 4032)
    loss = weighted(variables)
    got = mode(jax.hessian(loss, (0, 1)))(3.0, 2.0)
    same(got, jax.tree.map(jnp.float32, expected))
    got = mode(jax.jacrev(jax.jacrev(loss, (0, 1)), (0, 1)))(3.0, 2.0)
    same(got, jax.tree.map(jnp.float32, expected))


def test_a_weight_captured_at_each_level_of_differentiation():
    def outer(w2, x):
        def inner(w1):
            @custom_gradient
            def f(x):
                def grad(dy, variables):
                    gradients = {id(w1): 5 * dy * w2 * x, id(w2): 7 * dy * w1 * x}
                    return 3 * dy * w1 * w2, [gradients[id(v)] for v in variables]

                return w1 * w2 * x, grad

            return f(x) ** 2

        return jax.grad(inner)(11.0)  # 2 f * 5 w2 x

    w1, w2, x = 11.0, 3.0, 2.0
    expected = (
        2 * 7 * w1 * x * 5 * w2 * x + 2 * w1 * w2 * x * 5 * x,
        2 * 3 * w1 * w2 * 5 * w2 * x + 2 * w1 * w2 * x * 5 * w2,
    )
    for mode in (lambda f: f, jax.jit):
        same(mode(outer)(w2, x), jnp.float32(10 * w1 * w2**2 * x**2))
        same(mode(jax.grad(outer, (0, 1)))(w2, x), jax.tree.map(jnp.float32, expected))


def exponential(w):
    """`exp(w x)` whose rule calls itself; declared: 2 w y for x and 5 x y for w."""

    @custom_gradient
    def exp(x):
        def grad(dy, variables=()):
            dx = 2 * dy * w * exp(x)
            return (dx, [5 * dy * x * exp(x)]) if len(variables) else dx

        return jnp.exp(w * x), grad

    return exp


def waves(w):
    """sin and cos of `w x`, each with the other in its rule."""

    @custom_gradient
    def sin(x):
        def grad(dy, variables=()):
            dx = 7 * dy * w * cos(x)
            return (dx, [5 * dy * x * cos(x)]) if len(variables) else dx

        return jnp.sin(w * x), grad

    @custom_gradient
    def cos(x):
        def grad(dy, variables=()):
            dx = -7 * dy * w * sin(x)
            return (dx, [-5 * dy * x * sin(x)]) if len(variables) else dx

        return jnp.cos(w * x), grad

    return sin


def derivatives(h, count):
    """Return the derivatives of `h` by x of the orders 0 to `count`."""
    functions = [h]
    for _ in range(count):
        functions.append(jax.grad(functions[-1], 1))
    return lambda w, x: [f(w, x) for f in functions]


@MODES
def test_a_rule_that_calls_its_own_function(mode):
    w, x = 1.5, 0.5
    got = mode(derivatives(lambda w, x: exponential(w)(x), 3))(w, x)
    same(got, [jnp.float32((2 * w) ** n * np.exp(w * x)) for n in range(4)])


@MODES
def test_two_rules_that_call_each_other(mode):
    w, x = 1.5, 0.5
    got = mode(derivatives(lambda w, x: waves(w)(x), 3))(w, x)
    s, c = np.sin(w * x), np.cos(w * x)
    same(got, [jnp.float32(v) for v in (s, 7 * w * c, -((7 * w) ** 2) * s, -((7 * w) ** 3) * c)])


@MODES
@pytest.mark.parametrize("made", [exponential, waves])
def test_recursion_without_captured_tracers(mode, made):
    w, x = 1.5, 0.5
    h = made(w)
    got = mode(lambda x: derivatives(lambda _, x: h(x), 3)(w, x))(x)
    s, c, e = np.sin(w * x), np.cos(w * x), np.exp(w * x)
    expected = (
        [(2 * w) ** n * e for n in range(4)]
        if made is exponential
        else [s, 7 * w * c, -((7 * w) ** 2) * s, -((7 * w) ** 3) * c]
    )
    same(got, [jnp.float32(v) for v in expected])


@MODES
def test_recursion_with_respect_to_the_captured_weight(mode):
    """The second derivatives of a rule that calls its own function, by w and by x.

    In a rule, what the inner call closes over has a derivative, as its rule takes variables.
    """
    w, x = 1.5, 0.5

    def h(w, x):
        return exponential(w)(x)

    e = np.exp(w * x)
    # d/dx = 2 w exp(x) and d/dw = 5 x exp(x), where exp has the derivatives 2 w e and 5 x e.
    expected = (
        (5 * x * 5 * x * e, 5 * e + 5 * x * 2 * w * e),
        (2 * e + 2 * w * 5 * x * e, 2 * w * 2 * w * e),
    )
    got = mode(jax.jacrev(jax.grad(h, (0, 1)), (0, 1)))(w, x)
    same(got, jax.tree.map(jnp.float32, expected))
    third = mode(jax.grad(jax.grad(jax.grad(h))))(w, x)
    same(third, jnp.float32((5 * x) ** 3 * e))


@MODES
def test_hessian_of_a_rule_that_calls_its_own_function(mode):
    w, x = 1.5, 0.5
    e = np.exp(w * x)
    got = mode(jax.hessian(lambda x: exponential(w)(x)))(x)
    same(got, jnp.float32((2 * w) ** 2 * e))


@pytest.mark.parametrize("h", [lambda w, x: exponential(w)(x), lambda w, x: rounded(w, x) ** 2])
def test_no_tracer_outlives_its_trace(h):
    with jax.checking_leaks():
        jax.jit(jax.grad(h, (0, 1)))(1.5, 0.5)


def test_in_a_rule_captured_values_are_constant_unless_it_takes_variables():
    """As in TensorFlow's `op_with_fused_backprop`: no error, and no derivative."""

    def loss(takes_variables):
        def of(w, x):
            @custom_gradient
            def slope(x):
                if takes_variables:
                    return w * x, lambda dy, variables: (3 * dy * w, [11 * dy * x])
                return w * x, lambda dy: 3 * dy * w

            @custom_gradient
            def f(x):
                return x**2, lambda dy: 7 * dy * slope(x)

            return f(x)

        return of

    for takes_variables, by_w in [(True, 7 * 11 * 2.0), (False, 0.0)]:
        second = jax.grad(jax.grad(loss(takes_variables), 1), (0, 1))
        for mode in (lambda f: f, jax.jit):
            same(mode(second)(3.0, 2.0), (jnp.float32(by_w), jnp.float32(7 * 3 * 3)))


@pytest.mark.parametrize("forward_mode", [False, True])
def test_autodiff_inside_a_rule(forward_mode):
    """It was asked for, so it is given, also where a rule calls the function."""

    def declared(f):
        def outer(x, v):
            @custom_gradient(variables="autodiff", forward_mode=forward_mode)
            def h(x):
                def grad(dy):
                    return jax.vjp(lambda x: f(x, v), x)[1](dy)[0]

                return f(x, v), grad

            return h(x)

        return outer

    f = declared(lambda x, v: declared(lambda x, v: jnp.sin(x * v))(x, v) ** 2)
    x, v = jnp.float32(0.5), jnp.float32(0.7)
    expected = jax.grad(jax.grad(lambda x, v: jnp.sin(x * v) ** 2), 1)(x, v)
    for around in (lambda f: f, jax.jit):
        same(around(jax.grad(jax.grad(f), 1))(x, v), expected)
        same(around(jax.grad(jax.grad(f, 1)))(x, v), expected)
