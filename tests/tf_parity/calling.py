"""Rules 1 to 10, 16 and 60 to 63: declaring a gradient, calling the function, errors of f."""

import concurrent.futures
import dataclasses
import functools

from .case import TYPE_ERROR, Case, by, floats, sine_rule, square, table


class _Model:
    """At module level, so that its name says that `f` is a method."""

    k = 3.0

    def f(self, x):
        return self.k * x, lambda dy: dy * 5.0

    def __call__(self, x):
        return self.f(x)


def _methods(b):
    """A model with its method decorated in every way; static and class methods in both orders."""

    class Methods:
        k = 3.0
        method = b.custom(lambda self, x: (self.k * x, by(5.0)))
        static_outside = staticmethod(b.custom(lambda x: (3.0 * x, by(5.0))))
        static_inside = b.custom(staticmethod(lambda x: (3.0 * x, by(5.0))))
        class_outside = classmethod(b.custom(lambda cls, x: (cls.k * x, by(5.0))))
        class_inside = b.custom(classmethod(lambda cls, x: (cls.k * x, by(5.0))))

    return Methods


def method_called_on_the_class(b):
    model = type("_Model", (), {"k": 3.0, "f": b.custom(_Model.f)})
    return b.grads(lambda x: model.f(model(), x), 2.0)


def when_each_runs(b):
    """Each `f` once, forward; each rule once, backward, with values; none without need."""

    def make(name, k):
        @b.custom
        def f(x):
            b.note("forward", name, float(x))

            def grad(dy):
                b.note("backward", name, float(dy))
                return dy * (k if x > 1 else 100.0)

            return x + 1.0, grad

        return f

    f, g, h = make("f", 2.0), make("g", 3.0), make("h", 5.0)
    return [b.grads(lambda x, u: g(f(x)) + h(u), 3.0, 4.0, wrt=[0]), b.run(f, 3.0)]


def output_is_a_new_object(b):
    x = b.constant(2.0)
    b.note(b.custom(lambda x: (x, by(3.0)))(x) is x)


@dataclasses.dataclass
class _Outputs:
    a: object


def python_branches(b):
    f = b.custom(
        lambda x: (x * x if x > 1.0 else x * 7.0, lambda dy: dy * (5.0 if x > 1.0 else 6.0))
    )
    return [b.grads(f, 2.0), b.grads(f, 0.5)]


def string_argument_compiled(b):
    @b.custom
    def f(x, mode):
        k = 2.0 if isinstance(mode, str) and mode == "double" else 3.0
        return x * k, by(5.0, None)

    return b.grads(lambda x: f(x, "double"), floats(1, 2))


def threads(b):
    f = sine_rule(b)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda x: b.derivatives(f, x, 2), [0.5, 1.0, 2.0, 3.0]))


# fmt: off
table(
    __name__,
    override=Case(1, lambda b: b.grads(square(b, by(7.0)), 3.0)),
    two_inputs=Case(1, lambda b: b.declared(lambda x, y: (x * y, by(3.0, 5.0)), 2.0, 3.0)),
    with_parentheses=Case(2, lambda b: b.grads(b.custom()(lambda x: (x * x, by(5.0))), 3.0)),
    method=Case(3, lambda b: b.grads(_methods(b)().method, 2.0)),
    static_and_class_methods=Case(3, lambda b: [b.grads(getattr(owner, name),
        2.0) for name in ("static_outside", "static_inside",
        "class_outside") for owner in (_methods(b), _methods(b)())]),
    classmethod_inside=Case(3, lambda b: [b.error(lambda owner=owner:
        b.grads(owner.class_inside, 2.0)) for owner in (_methods(b), _methods(b)())],
        ours=[{"returns": [6.0, 5.0]}] * 2),
    method_called_on_the_class=Case(3, method_called_on_the_class, ours={"returns": [6.0, 5.0]},
        error=True),
    partial=Case(4, lambda b: b.declared(functools.partial(lambda k, x: (k * x, by(5.0)), 3.0),
        2.0), ours={"returns": [6.0, 5.0]}, error=True),
    callable_object=Case(4, lambda b: b.declared(_Model(), 2.0), ours={"returns": [6.0, 5.0]},
        error=True),
    not_callable=Case(4, lambda b: b.custom(3.0) is not None, ours=TYPE_ERROR,
        error=True),
    grad_fn_no_function=Case(5, lambda b: b.run(square(b, None), 2.0), error=True),
    when_each_runs=Case(6, when_each_runs, modes=("eager",)),
    identity_goes_through_grad_fn=Case(7, lambda b: b.declared(lambda x: (x, by(3.0)), 3.0)),
    output_is_a_new_object=Case(7, output_is_a_new_object, ours={"answer": None, "notes": [True]},
        modes=("eager",)),
    none_among_the_outputs=Case(8, lambda b: b.declared(lambda x: ((x * 3.0, None), by(5.0)), 2.0),
        ours={"returns": [[6.0, None], 5.0]}, error=True),
    string_output=Case(8, lambda b: len(b.custom(lambda x:
        ((x * 3.0, "a"), by(5.0)))(b.constant(2.0))), ours=TYPE_ERROR, error=True),
    dataclass_output=Case(8, lambda b: b.run(b.custom(lambda x: (_Outputs(x), by(1.0))), 2.0),
        ours=TYPE_ERROR, error=True),
    compiled_above=Case(9, lambda b: b.grads(b.compile(b.custom(lambda x: (3.0 * x, by(5.0)))),
        2.0)),
    decorated_twice=Case(9, lambda b: b.run(b.custom(square(b, by(5.0))), 2.0), graph_differs=True,
        error=True),
    python_branches=Case(10, python_branches, modes=("eager",)),
    python_branch_compiled=Case(10, lambda b: b.declared(lambda x:
        (x * x if x > 1.0 else x, by(5.0)), 2.0), ours={"raises": "TracerBoolConversionError"},
        modes=("graph",), error=True),
    string_argument_compiled=Case((12, 20), string_argument_compiled,
        ours=[floats(2, 4), floats(5, 5)], modes=("graph",)),
    grad_fn_with_defaults=Case(16, lambda b: b.grads(square(b, lambda dy, scale=10.0: dy * scale),
        2.0)),
    grad_fn_takes_too_many=Case(16, lambda b: b.grads(square(b, max), 2.0), error=True),
    grad_fn_takes_too_few=Case(16, lambda b: b.declared(lambda x: ((2 * x, 3 * x), by(1.0)), 2.0),
        error=True),
    y_alone=Case(60, lambda b: b.run(b.custom(lambda x: x * x), 2.0), graph_differs=True,
        error=True),
    three_results=Case(60, lambda b: b.run(b.custom(lambda x: (x * x, by(1.0), 1)), 2.0),
        ours=TYPE_ERROR, error=True),
    threads=Case(63, threads, modes=("eager",)),
)
