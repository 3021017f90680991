"""Rules 18 to 27: what counts as an input, and what `grad_fn` may return."""

import numpy as np

from .case import TYPE_ERROR, VALUE_ERROR, Case, by, case, floats, product, square, table


def _forms(f, *xs):
    """Return a case: the gradients of `f` with each of the forms that its rule may return."""

    def gradients(b, forms):
        return [b.declared(lambda *xs, g=g: (f(*xs), g), *xs) for g in forms]

    return gradients


_beside_a_list = _forms(lambda x, xs: x * xs[0] * xs[1], 2.0, [3.0, 4.0])
_beside_a_dict = _forms(lambda x, d: x * d["z"] * d["y"], 2.0, {"z": 3.0, "y": 4.0})


def _errors(b, forms, *xs, then=lambda answer: answer):
    """Return the type of error that each form of gradients is, for the product of the inputs."""
    f = square if len(xs) == 1 else product
    return [b.error(lambda g=g: then(b.grads(f(b, g), *xs))) for g in forms]


@case(19, ours=[[6.0, 5.0]] * 5)
def static_arguments(b):
    values = [None, object(), len, np.dtype("float32"), slice(1, 2)]

    def call(value):
        f = b.custom(lambda x, v: (x * 3.0 if v is value else x, by(5.0, None)))
        return b.grads(lambda x: f(x, value), 2.0)

    return [b.error(lambda v=v: call(v)) for v in values]


def _note_types(b):
    @b.custom
    def f(x, *values):
        b.note(*[type(v).__name__ for v in values])
        return x, by(1.0, *[None] * len(values))

    return f


def _integer(b, *factors):
    return b.custom(lambda x, n: (x * b.cast(n, "float32"), by(*factors)))


@case(24, ours=[VALUE_ERROR] * 5)
def wrong_shape(b):
    wrong = [5.0, [5.0], [5.0, 6.0], [[5.0], [6.0], [7.0]], [[1.0] * 3] * 2]
    return _errors(b, [lambda dy, w=w: b.constant(w) for w in wrong], floats(1, 2, 3))


# fmt: off
table(
    __name__,
    list_argument_beside_another=Case(18, lambda b:
        _beside_a_list(b, [lambda dy: (dy, [dy * 10.0, dy * 100.0]), lambda dy:
        (dy, (dy * 10.0, dy * 100.0)), lambda dy: (dy, dy * 10.0, dy * 100.0), lambda dy:
        [dy, dy * 10.0, dy * 100.0]])),
    list_for_a_dict=Case(18, lambda b: _beside_a_dict(b, [lambda dy: (dy, dy * 10.0, dy * 100.0)]),
        ours=TYPE_ERROR),
    dict_with_other_keys=Case(18, lambda b: _beside_a_dict(b,
        [lambda dy: (dy, {"a": dy * 10.0, "b": dy * 100.0})]), ours=TYPE_ERROR),
    other_structures_for_two_inputs=Case(18, lambda b:
        _errors(b, [lambda dy: ((dy * 10.0,), [dy * 100.0]), lambda dy: {"b": dy, "a": dy * 10.0}],
        2.0, 3.0), ours=[TYPE_ERROR] * 2),
    gradient_for_an_integer_is_dropped=Case(23, lambda b: b.grads(_integer(b, 5.0, 7.0), 2.0, 3)),
    integer_left_out=Case(18, lambda b: [b.error(lambda: b.grads(_integer(b, 5.0), 2.0, 3)),
        b.error(lambda: b.grads(lambda x: _integer(b, 5.0)(x, 3), 2.0))],
        ours=[[6.0, [5.0, None]], [6.0, 5.0]]),
    what_f_receives_compiled=Case(20, lambda b:
        b.run(lambda x: _note_types(b)(x, 3, True, "a"), 1.0),
        ours={"answer": 1.0, "notes": [["int", "bool", "str"]]}, modes=("graph",)),
    wrong_numbers_for_two_inputs=Case(21, lambda b:
        _errors(b, [by(1.0), by(1.0, 1.0, 1.0), lambda dy: None], 2.0, 3.0),
        ours=[VALUE_ERROR, VALUE_ERROR, [6.0, [0.0, 0.0]]]),
    forgotten_return=Case(22, lambda b: b.grads(square(b, lambda dy: None), 2.0)),
    none_for_one_of_two=Case(22, lambda b: b.grads(product(b, by(None, 100.0)), 2.0, 3.0)),
    wrong_precision=Case(24, lambda b: b.grads(square(b, lambda dy: b.cast(dy * 5.0, "float16")),
        2.0), ours=[4.0, 5.0]),
    wrong_kind=Case(24, lambda b: _errors(b, [lambda dy, d=d:
        b.cast(dy, d) for d in ("int32", "bool", "complex64")], 2.0), ours=[TYPE_ERROR] * 3),
    no_array_at_all=Case(24, lambda b: _errors(b,
        [lambda dy: "abc", lambda dy: object, lambda dy: True], 2.0, then=lambda a: str(a[0])),
        ours=[TYPE_ERROR] * 3, modes=("eager",)),
    python_number_that_is_added=Case(25, lambda b:
        b.grads(lambda x: square(b, lambda dy: 10.0)(x) + x, 2.0), ours=[6.0, 11.0]),
    same_array_twice=Case(27, lambda b: b.grads(lambda x: product(b, by(10.0, 100.0))(x, x), 3.0)),
)
