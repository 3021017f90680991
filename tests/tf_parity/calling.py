"""Rules 1 to 10: declaring a gradient and calling the function."""

import collections
import dataclasses
import functools

import numpy as np

from .case import Differs, case, floats

Pair = collections.namedtuple("Pair", "q p")


@case(1)
def override(b):
    @b.custom_gradient
    def f(x):
        return x * x, lambda dy: 7.0 * dy

    return b.value_and_gradient(f, 3.0)


@case(1)
def two_inputs(b):
    @b.custom_gradient
    def bar(x, y):
        return x * y, lambda upstream: (upstream * y, upstream * x)

    return b.value_and_gradient(bar, 2.0, 3.0)


@case(1)
def f_may_return_a_list(b):
    return b.value_and_gradient(b.custom_gradient(lambda x: [x * x, lambda dy: dy * 5.0]), 3.0)


@case(1)
def output_keeps_its_structure(b):
    outputs = {
        "tuple": lambda x: (2 * x, 3 * x),
        "list": lambda x: [2 * x, 3 * x],
        "dict": lambda x: {"b": 2 * x, "a": 3 * x},
        "ordered": lambda x: collections.OrderedDict(b=2 * x, a=3 * x),
        "namedtuple": lambda x: Pair(2 * x, 3 * x),
        "one": lambda x: (2 * x,),
        "nested": lambda x: ((2 * x, [3 * x]), {"z": 4 * x}),
    }
    for name, output in outputs.items():
        y = b.custom_gradient(lambda x, output=output: (output(x), lambda *dys: dys[0]))(
            b.constant(2.0)
        )
        b.note(name, type(y).__name__, list(y) if isinstance(y, dict) else len(y))
    return None


@case(1)
def empty_output(b):
    f = b.custom_gradient(lambda x: ((), lambda *dys: b.constant(0.0)))
    return b.run(f, 2.0)


@case(2)
def with_parentheses(b):
    @b.custom_gradient()
    def f(x):
        return x * x, lambda dy: dy * 5.0

    return b.value_and_gradient(f, 3.0)


@case(2)
def f_by_keyword(b):
    return b.value_and_gradient(b.custom_gradient(f=lambda x: (x * x, lambda dy: dy * 5.0)), 3.0)


@case(2, modes=("eager",))
def metadata(b):
    def f(x):
        """What f does."""
        return x, lambda dy: dy

    h = b.custom_gradient(f)
    b.note(h.__name__, h.__doc__, h.__wrapped__ is f, h.__module__ == f.__module__)
    return None


@case(3)
def method(b):
    class Model:
        k = 3.0

        @b.custom_gradient
        def f(self, x):
            return self.k * x, lambda dy: dy * 5.0

    return b.value_and_gradient(Model().f, 2.0)


@case(3)
def staticmethod_outside(b):
    class A:
        @staticmethod
        @b.custom_gradient
        def f(x):
            return 3.0 * x, lambda dy: dy * 5.0

    return [b.value_and_gradient(A.f, 2.0), b.value_and_gradient(A().f, 2.0)]


@case(3)
def staticmethod_inside(b):
    class A:
        @b.custom_gradient
        @staticmethod
        def f(x):
            return 3.0 * x, lambda dy: dy * 5.0

    return [b.value_and_gradient(A.f, 2.0), b.value_and_gradient(A().f, 2.0)]


@case(3)
def classmethod_outside(b):
    class A:
        k = 3.0

        @classmethod
        @b.custom_gradient
        def f(cls, x):
            return cls.k * x, lambda dy: dy * 5.0

    return [b.value_and_gradient(A.f, 2.0), b.value_and_gradient(A().f, 2.0)]


@case(
    3,
    differs=Differs(
        "`@tf.custom_gradient` above `@classmethod` works on an instance and fails on the class",
        "both orders of the decorators work on both",
        [{"returns": [6.0, 5.0]}, {"returns": [6.0, 5.0]}],
    ),
)
def classmethod_inside(b):
    class A:
        k = 3.0

        @b.custom_gradient
        @classmethod
        def f(cls, x):
            return cls.k * x, lambda dy: dy * 5.0

    return [
        b.error(lambda: b.value_and_gradient(A.f, 2.0)),
        b.error(lambda: b.value_and_gradient(A().f, 2.0)),
    ]


class _Model:
    """At module level, so that the decorator can tell that it is in a class."""

    k = 3.0

    def f(self, x):
        return self.k * x, lambda dy: dy * 5.0


@case(
    3,
    differs=Differs(
        "`Model.f(model, x)` makes `model` an input and fails",
        "`Model.f(model, x)` is `model.f(x)`",
        {"returns": [6.0, 5.0]},
    ),
)
def method_called_on_the_class(b):
    model = type("_Model", (), {"k": 3.0, "f": b.custom_gradient(_Model.f)})
    return b.error(lambda: b.value_and_gradient(lambda x: model.f(model(), x), 2.0))


@case(
    4,
    differs=Differs(
        "a `functools.partial` can be decorated, but not called (`AttributeError`)",
        "any callable works",
        {"returns": [6.0, 5.0]},
    ),
)
def partial(b):
    def h(k, x):
        return k * x, lambda dy: dy * 5.0

    return b.error(lambda: b.value_and_gradient(b.custom_gradient(functools.partial(h, 3.0)), 2.0))


@case(
    4,
    differs=Differs(
        "a callable object can be decorated, but not called (`AttributeError`)",
        "any callable works",
        {"returns": [6.0, 5.0]},
    ),
)
def callable_object(b):
    class Scale:
        def __call__(self, x):
            return 3.0 * x, lambda dy: dy * 5.0

    return b.error(lambda: b.value_and_gradient(b.custom_gradient(Scale()), 2.0))


@case(
    4,
    differs=Differs(
        "something that is no function is decorated silently",
        "`TypeError` at the decoration",
        {"raises": "TypeError"},
    ),
)
def not_callable(b):
    return b.error(lambda: b.custom_gradient(3.0) is not None)


@case(18)
def partial_of_decorated(b):
    @b.custom_gradient
    def h(k, x):
        return k * x, lambda dy: (None, dy * 5.0)

    return b.value_and_gradient(functools.partial(h, 3.0), 2.0)


@case(5)
def kinds_of_grad_fn(b):
    class Rule:
        def __call__(self, dy):
            return dy * 6.0

        def method(self, dy):
            return dy * 7.0

    kinds = [
        functools.partial(lambda k, dy: dy * k, 5.0),
        Rule(),
        Rule().method,
        b.abs,
        b.compile(lambda dy: dy * 8.0),
    ]
    return [
        b.value_and_gradient(b.custom_gradient(lambda x, rule=rule: (x * x, rule)), 3.0)
        for rule in kinds
    ]


@case(5)
def grad_fn_no_function(b):
    return [
        b.error(lambda: b.run(b.custom_gradient(lambda x: (x * x, None)), 2.0)),
        b.error(lambda: b.run(b.custom_gradient(lambda x: (x * x, x)), 2.0)),
    ]


@case(6, modes=("eager",))
def how_often_each_runs(b):
    @b.custom_gradient
    def f(x):
        b.note("f")

        def grad(dy):
            b.note("grad")
            return dy

        return x * x, grad

    return b.value_and_gradient(f, 3.0)


@case(6, modes=("eager",))
def grad_fn_sees_concrete_values(b):
    @b.custom_gradient
    def f(x):
        b.note("f", float(x))

        def grad(dy):
            b.note("grad", float(dy), float(x))
            return dy * (5.0 if x > 1 else 6.0)

        return x * x, grad

    return b.value_and_gradient(lambda x: 2.0 * f(x), 3.0)


@case(6, modes=("eager",))
def not_run_without_need(b):
    @b.custom_gradient
    def f(x):
        def grad(dy):
            b.note("grad")
            return dy

        return x * x, grad

    return [
        b.run(f, 3.0),
        b.value_and_gradient(lambda x, u: u * 2.0 + f(x), 3.0, 4.0, wrt=[1]),
    ]


@case(6, modes=("eager",))
def f_gets_the_object_that_was_passed(b):
    seen = []

    @b.custom_gradient
    def f(x):
        seen.append(x)
        return x * x, lambda dy: dy

    x = b.constant(3.0)
    y = f(x)
    b.note(seen[0] is x)
    return y


@case(6)
def each_call_has_its_own_grad_fn(b):
    @b.custom_gradient
    def f(x):
        return x * x, lambda dy: dy * x

    return b.value_and_gradient(lambda x: f(x) + 10.0 * f(2.0 * x), 3.0)


@case(6, modes=("eager",))
def grad_fns_run_backwards_each_once(b):
    def make(name, k):
        @b.custom_gradient
        def f(x):
            b.note("forward", name)

            def grad(dy):
                b.note("backward", name)
                return dy * k

            return x + 1.0, grad

        return f

    f, g = make("f", 2.0), make("g", 3.0)
    return b.value_and_gradient(lambda x: g(f(x)), 3.0)


@case(7)
def identity_goes_through_grad_fn(b):
    @b.custom_gradient
    def f(x):
        return x, lambda dy: 3.0 * dy

    return [b.value_and_gradient(f, 3.0), b.value_and_gradient(lambda x: f(f(x)), 3.0)]


@case(7)
def input_among_the_outputs(b):
    @b.custom_gradient
    def f(x):
        return (x, x * x, x), lambda da, db, dc: da * 3.0 + db * 10.0 + dc * 100.0

    def loss(x):
        y = f(x)
        return 2.0 * y[0] + y[1] + y[2]

    return b.value_and_gradient(loss, 2.0)


@case(
    7,
    modes=("eager",),
    differs=Differs(
        "the output is always a new tensor",
        "without differentiation, what `f` returned is returned as it is (arrays are immutable)",
        {"answer": None, "notes": [True]},
    ),
)
def output_is_a_new_object(b):
    f = b.custom_gradient(lambda x: (x, lambda dy: 3.0 * dy))
    x = b.constant(2.0)
    b.note(f(x) is x)
    return None


@case(8)
def python_and_numpy_outputs(b):
    @b.custom_gradient
    def f(x):
        numbers = np.float32(1.5), np.arange(2, dtype=np.int32)
        return (2 * x, 3, 4.5, True, *numbers), lambda *dys: dys[0] * 5.0

    return b.value_and_gradient(f, 2.0)


@case(8, modes=("eager",))
def output_computed_by_numpy(b):
    @b.custom_gradient
    def f(x):
        return np.sin(np.asarray(x)), lambda dy: dy * b.cos(x)

    return b.value_and_gradient(f, 2.0)


@case(8)
def python_float_output(b):
    return b.value_and_gradient(b.custom_gradient(lambda x: (4.5, lambda dy: dy * 5.0)), 2.0)


@case(8)
def bool_and_int_outputs(b):
    @b.custom_gradient
    def f(x):
        outputs = (2 * x, x > 1.0, b.cast(x, "int32"))
        return outputs, lambda dy, *rest: dy * 5.0

    return b.value_and_gradient(f, 2.0)


@case(
    8,
    differs=Differs(
        "None among the outputs is an error",
        "None is an empty part of the structure of `y`, as everywhere in JAX",
        {"returns": [[6.0, None], 5.0]},
    ),
)
def none_among_the_outputs(b):
    f = b.custom_gradient(lambda x: ((x * 3.0, None), lambda dy: dy * 5.0))
    return b.error(lambda: b.value_and_gradient(f, 2.0))


@case(
    8,
    differs=Differs(
        "a string is a valid output",
        "every leaf of `y` is an array or a number; anything else is a `TypeError`",
        {"raises": "TypeError"},
    ),
)
def string_output(b):
    f = b.custom_gradient(lambda x: ((x * 3.0, "a"), lambda dy, ds: dy * 5.0))
    return b.error(lambda: len(f(b.constant(2.0))))


@dataclasses.dataclass
class _Outputs:
    a: object


@case(
    8,
    differs=Differs(
        "a dataclass among the outputs is a `ValueError`",
        "a class that is no registered pytree is a `TypeError`",
        {"raises": "TypeError"},
    ),
)
def dataclass_output(b):
    return b.error(lambda: b.run(b.custom_gradient(lambda x: (_Outputs(x), lambda dy: dy)), 2.0))


@case(9)
def compiled_above(b):
    @b.compile
    @b.custom_gradient
    def f(x):
        return 3.0 * x, lambda dy: dy * 5.0

    return b.value_and_gradient(f, 2.0)


@case(9)
def compiled_below(b):
    def run():
        @b.custom_gradient
        @b.compile
        def f(x):
            return 3.0 * x, lambda dy: dy * 5.0

        return b.run(f, 2.0)

    return b.error(run)


@case(9)
def compiled_functions_inside(b):
    forward = b.compile(lambda x: 3.0 * x)
    backward = b.compile(lambda dy, x: dy * 5.0 * x)

    @b.custom_gradient
    def f(x):
        return forward(x), lambda dy: backward(dy, x)

    return b.value_and_gradient(f, 2.0)


@case(9, graph_differs="the type of the error is `OperatorNotAllowedInGraphError`")
def decorated_twice(b):
    def run():
        @b.custom_gradient
        @b.custom_gradient
        def f(x):
            return 3.0 * x, lambda dy: dy * 5.0

        return b.run(f, 2.0)

    return b.error(run)


@case(10, modes=("eager",))
def python_branches(b):
    @b.custom_gradient
    def f(x):
        def grad(dy):
            return dy * 5.0 if x > 1.0 else dy * 6.0

        return (x * x if x > 1.0 else x * 7.0), grad

    return [b.value_and_gradient(f, 2.0), b.value_and_gradient(f, 0.5)]


@case(
    10,
    modes=("graph",),
    differs=Differs(
        "a Python `if` on a tensor in a compiled function is `OperatorNotAllowedInGraphError`",
        "it is JAX's `TracerBoolConversionError`",
        {"raises": "TracerBoolConversionError"},
    ),
)
def python_branch_compiled(b):
    f = b.custom_gradient(lambda x: (x * x if x > 1.0 else x, lambda dy: dy * 5.0))
    return b.error(lambda: b.value_and_gradient(f, 2.0))


@case(10)
def cond_inside(b):
    @b.custom_gradient
    def f(x):
        y = b.cond(x > 1.0, lambda: x * x, lambda: x * 7.0)

        def grad(dy):
            return b.cond(x > 1.0, lambda: dy * 5.0, lambda: dy * 6.0)

        return y, grad

    return [b.value_and_gradient(f, 2.0), b.value_and_gradient(f, 0.5)]


@case(
    12,
    20,
    differs=Differs(
        "in graph mode every leaf of the arguments reaches `f` as a tensor, so that "
        "`mode == 'double'` is never true",
        "strings, ints and bools reach `f` as they are, compiled or not",
        [floats(2, 4), floats(5, 5)],
    ),
    modes=("graph",),
)
def string_argument_compiled(b):
    @b.custom_gradient
    def f(x, mode):
        k = 2.0 if isinstance(mode, str) and mode == "double" else 3.0
        return x * k, lambda dy: (dy * 5.0, None)

    return b.value_and_gradient(lambda x: f(x, "double"), floats(1, 2))
