"""What a decorated function closes over: holders x protocols x ways."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from captures import COMPUTED, COPIED, DECORATED, HOLD, TRACED, Emptied, Finalized
from protocols import ARGS, BRIEF, DECLARED, NUMBERS, ORDINARY, WAYS, squared
from support.helpers import assert_same, eager_and_jit, sample
from support.ways import SECOND, assert_derivative, gradient, hand_written

from tfgrad_jax import custom_gradient


def like(variables, gradient):
    return jax.tree.map(lambda v: jnp.broadcast_to(gradient, jnp.shape(v)), variables)


# --- protocols: (get, w) -> a function of x, and its oracle ---------------------------------------

OF_THE_RULE = hand_written(
    lambda w, x: 3 * x**2 + 0 * w, lambda w, x: 0 * w * x, lambda w, x: 7 * w * x
)
PROTOCOLS = {}


def protocol(oracle):
    def register(make):
        PROTOCOLS[make.__name__.replace("_", " ")] = make, oracle
        return make

    return register


@protocol(DECLARED)
def undeclared(get, w):
    @custom_gradient
    def f(x):
        def grad(dy, variables):
            return 7 * dy * get() * x, like(variables, 5 * dy * x**2)

        return get() * x**2, grad

    return f


@protocol(DECLARED)
def declared(get, w):
    @custom_gradient(variables={"w": [w]})
    def f(x):
        def grad(dy, variables):
            assert variables["w"][0] is w
            return 7 * dy * variables["w"][0] * x, {"w": [5 * dy * x**2]}

        return get() * x**2, grad

    return f


@protocol(ORDINARY)
def autodiff(get, w):
    @custom_gradient(variables="autodiff")
    def f(x):
        return get() * x**2, lambda dy: 7 * dy * get() * x

    return f


@protocol(DECLARED)
def input_and_rule(get, w):
    """The rule reads the weight from its holder; the gradient is an input's."""
    f = custom_gradient(lambda x, w: (w * x**2, lambda dy: (7 * dy * get() * x, 5 * dy * x**2)))
    return lambda x: f(x, w)


@protocol(OF_THE_RULE)
def residual(get, w):
    """`y` does not depend on the weight: it is a residual of the rule, and no variable."""
    return custom_gradient(lambda x: (3 * x**2, lambda dy: 7 * dy * get() * x))


@protocol(DECLARED)
def called_below_other_traces(get, w):
    """One mapped, one staged, one differentiated around the call."""
    f = undeclared(get, w)
    return lambda x: jax.vmap(jax.jit(lambda one: jax.checkpoint(f)(one * x)))(jnp.ones(1))[0]


@protocol(DECLARED)
def called_in_a_scan(get, w):
    """Of two weights, one is a constant of the loop, and one its carry."""

    def body(carry, x):
        return carry, (undeclared(get, w)(x) + undeclared(lambda: carry, carry)(x)) / 2

    return lambda x: jax.lax.scan(body, w, x[None])[1][0]


def loss_of(holder, name, value=squared):
    make, oracle = PROTOCOLS[name]
    return value(lambda w, x: make(HOLD[holder](w), w)(x)), value(oracle)


# --- the table ------------------------------------------------------------------------------------


def fits(holder, name, way=""):
    if holder in COMPUTED and "declared" in name.split():
        return False
    if holder in DECORATED and (name == "autodiff" or "residual" in name or way in SECOND):
        return False
    # JAX's own: a Ref of a value that is not mapped cannot be mapped.
    return holder != "ref" or not any(w in way for w in ("jac", "hessian", "vmap"))


SEEN, HIDDEN = "cell", "jitted function"  # one that is copied, and one that must be traced
EVERY = [t for t in itertools.product(HOLD, PROTOCOLS, WAYS) if fits(*t)]


@pytest.mark.parametrize("holder", HOLD)
def test_every_holder_has_its_gradients_under_every_protocol(holder):
    """Eagerly and compiled, in one program; what only stands around another protocol left out."""
    names = [n for n in PROTOCOLS if fits(holder, n) and not n.startswith("called")]
    losses = {name: loss_of(holder, name) for name in names}
    expected = {name: gradient(oracle)(*ARGS) for name, (_, oracle) in losses.items()}
    for name, (loss, _) in losses.items():
        assert_same(gradient(loss)(*NUMBERS), expected[name])
    together = jax.jit(lambda *args: {n: gradient(loss)(*args) for n, (loss, _) in losses.items()})
    assert_same(together(*ARGS), expected)


@pytest.mark.parametrize("holder", [*(h for h in HOLD if h not in COMPUTED), *COPIED])
def test_eagerly_f_and_its_rule_see_values_unless_the_call_is_traced(holder):
    def loss(w, x):
        get = (HOLD | COPIED)[holder](w)

        @custom_gradient(variables=[w])
        def f(x):
            return x**2 * float(get()), lambda dy, variables: (7 * dy * float(get()), [5 * dy])

        return f(x)

    if holder in TRACED:
        with pytest.raises(jax.errors.ConcretizationTypeError):
            jax.grad(loss)(*ARGS)
    else:
        assert_same(jax.grad(loss, (0, 1))(*ARGS), (jnp.float32(5), jnp.float32(21)))


@pytest.mark.parametrize("holder", [h for h in HOLD if h not in DECORATED])
def test_a_lost_weight_is_an_error(holder):
    def loss(w, x):
        get = HOLD[holder](w)
        return custom_gradient(lambda x: (get() * x**2, lambda dy: 7 * dy * get() * x))(x)

    for around in (lambda f: f, jax.jit):
        with pytest.raises(TypeError, match=r"(float32|int32)\["):
            around(jax.grad(loss))(*ARGS)
        assert_same(around(jax.grad(loss, 1))(*ARGS), jnp.float32(42))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", PROTOCOLS)
@pytest.mark.parametrize("holder", [SEEN, HIDDEN])
def test_every_protocol_under_transformations(holder, name):
    for way in BRIEF:
        assert_derivative(WAYS[way], *loss_of(holder, name), *ARGS)


@pytest.mark.parametrize(("holder", "name", "way"), sample(EVERY, 25))
def test_a_sample_of_holders_protocols_and_ways(holder, name, way):
    assert_derivative(WAYS[way], *loss_of(holder, name), *ARGS)


@eager_and_jit
def test_a_declared_weight_that_f_ignores_gets_what_the_rule_says(mode):
    def loss(w, x, unused):
        others = {"activation": jnp.sin, "n": 3, "name": "layer"}

        @custom_gradient(variables={"w": w, "unused": unused, **others})
        def f(x):
            def grad(dy, variables):
                assert variables["activation"] is jnp.sin and variables["n"] == 3
                return 7 * dy * w, {**variables, "w": 5 * dy * x, "unused": 11 * dy}

            return w * x, grad

        return f(x)

    got = mode(jax.grad(loss, (0, 1, 2)))(*NUMBERS, 1.0)
    assert_same(got, (jnp.float32(10), jnp.float32(21), jnp.float32(11)))
    assert_same(mode(jax.grad(loss, 2))(*NUMBERS, 1.0), jnp.float32(11))  # `y` is a plain number


@eager_and_jit
@pytest.mark.parametrize("missing", [None, 0, 1, 2])
def test_a_weight_declared_several_times_gets_all_gradients_that_there_are(missing, mode):
    def loss(w, x):
        @custom_gradient(variables=(w, [w, w]))
        def f(x):
            def grad(dy, variables):
                v, (a, b) = variables
                gradients = [7 * dy * x, 11 * dy * a, 13 * dy * b]
                first, *others = [None if i == missing else g for i, g in enumerate(gradients)]
                return dy * v, (first, others)

            return w * x, grad

        return f(x)

    gradients = [7 * 2, 11 * 3, 13 * 3]
    expected = sum(g for i, g in enumerate(gradients) if i != missing)
    assert_same(mode(jax.grad(loss))(3.0, 2.0), jnp.float32(expected))


@eager_and_jit
def test_f_may_call_functions_with_other_custom_derivatives(mode):
    """Where nothing of the call is traced but a `vmap` around it."""
    h = custom_gradient(lambda x: (jax.nn.relu(x), lambda dy: 7 * dy))
    assert_same(mode(jax.jacfwd(h))(2.0), jnp.float32(7))
    assert_same(mode(jax.vmap(lambda y: jax.grad(h)(2.0) + y))(jnp.ones(2)), jnp.full(2, 8.0))


@eager_and_jit
def test_layers_made_in_a_loop_keep_their_weights(mode):
    """Their closures are read at the call, though the rules run after the loop."""

    def loss(weights, x):
        for w in weights:

            @custom_gradient(variables=lambda: [w])
            def layer(x):
                return w * x, lambda dy, variables: (7 * dy * w, [5 * dy * x])  # noqa: B023

            x = layer(x)
        return x

    # Of `5 * 3 * 2 x`, at x = 1.5: 5 by the input of a weight, and 7 w by each layer above it.
    by_weights = 5 * 1.5 * 7 * 3 * 7 * 5, 5 * 3 * 7 * 5, 5 * 9
    for derivative, inputs in itertools.product((jax.grad, jax.jacfwd), ((0, 1), 1)):
        expected = tuple(map(jnp.float32, by_weights)), jnp.float32(7**3 * 30)
        got = mode(derivative(loss, inputs))((2.0, 3.0, 5.0), 1.5)
        assert_same(got, expected if inputs == (0, 1) else expected[1])


def test_no_object_is_made_where_its_class_counts_them():
    def loss(w):
        held = Emptied(w)
        f = custom_gradient(lambda x: (held.w * x, lambda dy, variables: (dy, [7 * dy * x])))
        return f(jnp.float32(2))

    Emptied.made = 0
    assert_same(jax.grad(loss)(jnp.float32(3)), jnp.float32(14))
    assert Emptied.made == 1


@eager_and_jit
def test_a_traced_rule_keeps_the_variables_that_it_was_traced_with(mode):
    """The rule cannot be copied, so its list is fixed, with whatever JAX is tracing in it."""

    def loss(w, mask, x):
        held = Finalized(w)

        @custom_gradient
        def f(x):
            rule = lambda dy, variables: (7 * dy * held.w, [5 * dy * x, None][: len(variables)])  # noqa: E731
            return mask * held.w * x, rule

        return f(x)

    args = jnp.float32(3), jnp.float32(1), jnp.float32(2)
    assert_same(mode(jax.grad(loss, 2))(*args), jnp.float32(21))
    if mode is jax.jit:
        with pytest.raises(TypeError, match="was traced with gradients for all variables"):
            mode(jax.grad(loss))(*args)
    else:
        assert_same(mode(jax.grad(loss))(*args), jnp.float32(10))
