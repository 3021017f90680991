"""Functions and rules may print and log, any number of times, under every transformation.

A log keeps tracers of traces that are over, which nobody captures; nothing stored is read again.
"""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.helpers import assert_same, sample

from tfgrad_jax import custom_gradient

A, B = jnp.float32(0.3), jnp.float32(1.1)


class Log:
    def __init__(self):
        self.items, self.last, self.count = [], {}, 0

    def note(self, value):
        self.items.append(value)
        self.last["value"] = value
        self.count += 1


def by_self(w):
    class Layer(Log):
        f = custom_gradient(lambda self, x: logged(w, x, self.note))

    return Layer().f


def by(make):
    """Log with the function that `make()` returns."""

    def of(w):
        note = make()
        return custom_gradient(lambda x: logged(w, x, note))

    return of


def logged(w, x, note):
    c = jnp.cos(x)
    note(c)

    def grad(dy, variables=()):
        note(dy)
        dx = 7 * dy * w * c
        return (dx, [5 * dy * jnp.sin(x) for _ in variables]) if len(variables) else dx

    return w * jnp.sin(x), grad


LOGS = {
    "append": by(lambda: [].append),
    "object": by(lambda: Log().note),
    "self": by_self,
    "print": by(lambda: print),
}
PROGRAMS = {
    "eager": jax.grad,
    "jit": lambda h: jax.jit(jax.grad(lambda x: h(x))),
    "grad of jit": lambda h: jax.grad(jax.jit(lambda x: h(x))),
    "vmap": lambda h: lambda x: jax.vmap(jax.grad(h))(x[None])[0],
    "jvp": lambda h: lambda x: jax.jvp(h, (x,), (jnp.ones_like(x),))[1],
    "scan": lambda h: jax.grad(lambda x: lax.map(h, x[None])[0]),
    "constants": lambda h: lambda x: jax.jit(lambda: jax.grad(h)(x))(),
}
EVERY = list(itertools.product(LOGS, PROGRAMS, PROGRAMS))


@pytest.mark.parametrize(("log", "first", "second"), sample(EVERY, 25))
def test_a_log_with_tracers_of_an_earlier_call_is_no_capture(log, first, second):
    h = LOGS[log](2.0)
    assert_same(PROGRAMS[first](h)(A), 14 * jnp.cos(A))
    assert_same(PROGRAMS[second](h)(B), 14 * jnp.cos(B))
    assert_same(jax.jit(jax.hessian(h))(A), -14 * jnp.sin(A))


BESIDE = [(log, program) for log in LOGS for program in PROGRAMS]


@pytest.mark.parametrize(("log", "program"), sample(BESIDE, 15))
def test_a_function_that_logs_beside_a_differentiated_weight(log, program):
    def loss(x):
        h = LOGS[log](3 * x)
        return h(x) + h(x)  # with what the first call has logged

    if log == "object" and program in ("jit", "constants", "vmap"):
        # The first call has left a live tracer there, so the second one gets a copy.
        with pytest.raises(TypeError, match="assigned to the attribute `count` of a `Log`"):
            PROGRAMS[program](loss)(A)
        return
    # By each call: 3 * 5 sin(x) through the weight, 7 * 3 x cos(x) by the input.
    expected = 2 * (15 * jnp.sin(A) + 21 * A * jnp.cos(A))
    assert_same(PROGRAMS[program](loss)(A), expected)


# --- containers that are passed ------------------------------------------------------------------


class Counts(dict):
    pass


CONTAINERS = {
    "list": ([], lambda c: c.append(1), lambda c: len(c)),
    "dict": ({}, lambda c: c.update(n=c.get("n", 0) + 1), lambda c: c.get("n", 0)),
    "subclass": (Counts, lambda c: c.update(n=c.get("n", 0) + 1), lambda c: c.get("n", 0)),
    "nested": ({"log": []}, lambda c: c["log"].append(1), lambda c: len(c["log"])),
    "object": (Log, lambda c: c.note(1), lambda c: c.count),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("place", ["alone", "in a list", "beside an operand", "by name"])
@pytest.mark.parametrize(
    "stage", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"]
)
@pytest.mark.parametrize("who", ["f", "rule"])
def test_a_container_without_an_operand_is_the_callers_own(container, place, stage, who):
    made, count, total = CONTAINERS[container]
    given = made() if callable(made) else type(made)(made)
    if container == "nested":
        given = {"log": []}
    seen = []

    @custom_gradient
    def f(x, held):
        inner = {"in a list": lambda: held[0], "beside an operand": lambda: held["c"]}
        c = inner.get(place, lambda: held)()
        seen.append(c is given)
        if who == "f":
            count(c)

        def grad(dy):
            if who == "rule":
                count(c)
            return 7 * dy, None

        return 3 * x, grad

    def loss(x):
        held = {"in a list": [given], "beside an operand": {"x": 2 * x, "c": given}}
        if place == "by name":
            return f(x=x, held=given)
        return f(x, held.get(place, given))

    assert_same(jax.grad(stage(loss))(A), jnp.float32(7))
    assert all(seen)
    assert total(given) == (len(seen) if who == "f" else 1)


@pytest.mark.parametrize("who", ["f", "rule"])
@pytest.mark.parametrize("stage", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "change",
    [lambda c: c.append(1), lambda c: c.__setitem__(0, 1.0), lambda c: c.clear()],
    ids=["append", "set", "clear"],
)
def test_a_container_around_an_operand_may_not_be_assigned_to(who, stage, change):
    @custom_gradient
    def f(x, held):
        if who == "f":
            change(held)

        def grad(dy):
            if who == "rule":
                change(held)
            return 7 * dy, None

        return 3 * x, grad

    with pytest.raises(TypeError, match=r"assigned to a `list`"):
        jax.grad(stage(lambda x: f(x, [2 * x, 1.0])))(A)
