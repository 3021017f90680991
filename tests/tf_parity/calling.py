"""Rules 1 to 10, 16 and 60 to 63: declaring a gradient, calling the function, errors of f."""

import concurrent.futures
import functools

from .case import TYPE_ERROR, Case, by, case, sine_rule, square, table


def _methods(b):
    """Methods; static and class methods in both orders."""

    class Methods:
        k = 3.0
        method = b.custom(lambda self, x: (self.k * x, by(5.0)))
        static_outside = staticmethod(b.custom(lambda x: (3.0 * x, by(5.0))))
        static_inside = b.custom(staticmethod(lambda x: (3.0 * x, by(5.0))))
        class_outside = classmethod(b.custom(lambda cls, x: (cls.k * x, by(5.0))))
        class_inside = b.custom(classmethod(lambda cls, x: (cls.k * x, by(5.0))))

    return Methods


@case(6, modes=("eager",))
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


@case(7, ours={"answer": None, "notes": [True]}, modes=("eager",))
def output_is_a_new_object(b):
    x = b.constant(2.0)
    b.note(b.custom(lambda x: (x, by(3.0)))(x) is x)


@case(10, modes=("eager",))
def python_branches(b):
    f = b.custom(
        lambda x: (x * x if x > 1.0 else x * 7.0, lambda dy: dy * (5.0 if x > 1.0 else 6.0))
    )
    return [b.grads(f, 2.0), b.grads(f, 0.5)]


@case(63, modes=("eager",))
def threads(b):
    f = sine_rule(b)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda x: b.derivatives(f, x, 2), [0.5, 1.0, 2.0, 3.0]))


# fmt: off
table(
    __name__,
    override=Case(1, lambda b: b.grads(square(b, by(7.0)), 3.0)),
    with_parentheses=Case(2, lambda b: b.grads(b.custom()(lambda x: (x * x, by(5.0))), 3.0)),
    static_and_class_methods=Case(3, lambda b:
        [b.grads(getattr(owner, name), 2.0) for name in ("static_outside", "static_inside",
        "class_outside") for owner in (_methods(b), _methods(b)())]),
    classmethod_inside=Case(3, lambda b: [b.error(lambda owner=owner:
        b.grads(owner.class_inside, 2.0)) for owner in (_methods(b), _methods(b)())],
        ours=[[6.0, 5.0]] * 2),
    method_called_on_the_class=Case(3, lambda b:
        b.grads(lambda x: _methods(b).method(_methods(b)(), x), 2.0), ours=[6.0, 5.0]),
    partial=Case(4, lambda b: b.declared(functools.partial(lambda k, x: (k * x, by(5.0)), 3.0),
        2.0), ours=[6.0, 5.0]),
    not_callable=Case(4, lambda b: b.custom(3.0) is not None, ours=TYPE_ERROR),
    grad_fn_no_function=Case(5, lambda b: b.run(square(b, None), 2.0)),
    identity_goes_through_grad_fn=Case(7, lambda b: b.declared(lambda x: (x, by(3.0)), 3.0)),
    none_among_the_outputs=Case(8, lambda b: b.declared(lambda x: ((x * 3.0, None), by(5.0)), 2.0),
        ours=[[6.0, None], 5.0]),
    string_output=Case(8, lambda b: len(b.custom(lambda x:
        ((x * 3.0, "a"), by(5.0)))(b.constant(2.0))), ours=TYPE_ERROR),
    decorated_twice=Case(9, lambda b: b.run(b.custom(square(b, by(5.0))), 2.0)),
    python_branch_compiled=Case(10, lambda b: b.declared(lambda x:
        (x * x if x > 1.0 else x, by(5.0)), 2.0), ours={"raises": "TracerBoolConversionError"},
        modes=("graph",)),
    grad_fn_takes_too_few=Case(16, lambda b: b.declared(lambda x: ((2 * x, 3 * x), by(1.0)), 2.0)),
    y_alone=Case(60, lambda b: b.run(b.custom(lambda x: x * x), 2.0)),
    three_results=Case(60, lambda b: b.run(b.custom(lambda x: (x * x, by(1.0), 1)), 2.0),
        ours=TYPE_ERROR),
)
