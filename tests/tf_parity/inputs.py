"""Rules 18 to 27: what counts as an input, and what `grad_fn` may return."""

import collections

import numpy as np

from .case import Differs, case, floats

Pair = collections.namedtuple("Pair", "q p")


def _rule(b, gradient):
    """Return a function of one input whose rule returns `gradient(dy)`."""
    return b.custom_gradient(lambda x: (x * x, gradient))


def _rule2(b, gradient):
    return b.custom_gradient(lambda x, y: (x * y, gradient))


@case(18)
def list_argument(b):
    f = b.custom_gradient(lambda xs: (xs[0] * xs[1], lambda dy: [dy * 10.0, dy * 100.0]))
    return b.value_and_gradient(f, [2.0, 3.0])


@case(18)
def list_argument_beside_another(b):
    forms = [
        lambda dy: (dy, [dy * 10.0, dy * 100.0]),
        lambda dy: (dy, (dy * 10.0, dy * 100.0)),
        lambda dy: (dy, dy * 10.0, dy * 100.0),
        lambda dy: [dy, dy * 10.0, dy * 100.0],
    ]
    return [
        b.value_and_gradient(
            b.custom_gradient(lambda x, xs, g=g: (x * xs[0] * xs[1], g)), 2.0, [3.0, 4.0]
        )
        for g in forms
    ]


@case(18)
def dict_argument(b):
    forms = [
        lambda dy: (dy, {"z": dy * 100.0, "y": dy * 10.0}),
        lambda dy: (dy, dy * 10.0, dy * 100.0),  # sorted keys
    ]
    return [
        b.value_and_gradient(
            b.custom_gradient(lambda x, d, g=g: (x * d["z"] * d["y"], g)), 2.0, {"z": 3.0, "y": 4.0}
        )
        for g in forms
    ]


@case(18)
def only_a_dict_argument(b):
    f = b.custom_gradient(
        lambda d: (d["a"] * d["b"][0], lambda dy: {"a": dy * 1.0, "b": [dy * 10.0]})
    )
    return b.value_and_gradient(f, {"a": 2.0, "b": [3.0]})


@case(
    18,
    differs=Differs(
        "the keys of a returned dict are ignored: its values are taken in sorted-key order",
        "a returned dict has the keys of the argument, or it is a `TypeError`",
        {"raises": "TypeError"},
    ),
)
def dict_with_other_keys(b):
    f = b.custom_gradient(
        lambda x, d: (x * d["z"] * d["y"], lambda dy: (dy, {"a": dy * 10.0, "b": dy * 100.0}))
    )
    return b.error(lambda: b.value_and_gradient(f, 2.0, {"z": 3.0, "y": 4.0}))


@case(18)
def namedtuple_argument(b):
    f = b.custom_gradient(
        lambda s: (s[0] * s[1].q * s[1].p, lambda dy: (dy, Pair(dy * 10.0, dy * 100.0)))
    )
    return b.value_and_gradient(f, (2.0, Pair(3.0, 4.0)))


@case(18)
def forms_for_two_inputs(b):
    forms = [lambda dy: (dy * 10.0, dy * 100.0), lambda dy: [dy * 10.0, dy * 100.0]]
    return [b.value_and_gradient(_rule2(b, g), 2.0, 3.0) for g in forms]


@case(18)
def forms_for_one_input(b):
    forms = [lambda dy: dy * 10.0, lambda dy: (dy * 10.0,), lambda dy: [dy * 10.0]]
    return [b.value_and_gradient(_rule(b, g), 2.0) for g in forms]


@case(
    18,
    differs=Differs(
        "any nesting and a dict with any keys do, as long as the number of leaves is right",
        "the structure of the inputs, or a flat list of their leaves; else a `TypeError`",
        [{"raises": "TypeError"}] * 2,
    ),
)
def other_structures_for_two_inputs(b):
    forms = [lambda dy: ((dy * 10.0,), [dy * 100.0]), lambda dy: {"b": dy, "a": dy * 10.0}]
    return [b.error(lambda g=g: b.value_and_gradient(_rule2(b, g), 2.0, 3.0)) for g in forms]


@case(18, graph_differs="the type of the error is `InternalError`")
def no_sequences_for_two_inputs(b):
    forms = [lambda dy: b.stack([dy, dy]), lambda dy: dy, lambda dy: (g for g in (dy, dy))]
    return [b.error(lambda g=g: b.value_and_gradient(_rule2(b, g), 2.0, 3.0)) for g in forms]


@case(18)
def each_of_var_positional(b):
    @b.custom_gradient
    def f(*xs):
        return sum(xs), lambda dy: [dy * float(i + 1) for i in range(len(xs))]

    return b.value_and_gradient(f, 2.0, 3.0, 4.0)


@case(18)
def python_number_is_an_input(b):
    h = b.custom_gradient(lambda x, k: (x * k, lambda dy: (dy * 5.0, dy * 7.0)))
    return b.value_and_gradient(lambda x: h(x, 3.0), 2.0)


@case(18)
def python_list_is_a_structure(b):
    h = b.custom_gradient(lambda x, k: (x * k[0] * k[1], lambda dy: (dy, dy * 10.0, dy * 100.0)))
    return b.value_and_gradient(lambda x: h(x, [3.0, 4.0]), 2.0)


@case(18)
def unwatched_input_counts(b):
    f = _rule2(b, lambda dy: (dy * 10.0, dy * 100.0))
    return b.value_and_gradient(f, 2.0, 3.0, wrt=[0])


@case(18)
def empty_structures_are_no_inputs(b):
    f = b.custom_gradient(lambda x, nothing, d: (x * 3.0, lambda dy: dy * 5.0))
    return b.value_and_gradient(lambda x: f(x, [], {}), 2.0)


@case(18, 23)
def integer_input(b):
    f = b.custom_gradient(lambda x, n: (x * b.cast(n, "float32"), lambda dy: (dy * 5.0, None)))
    return b.value_and_gradient(f, 2.0, 3)


@case(23)
def gradient_for_an_integer_is_dropped(b):
    f = b.custom_gradient(lambda x, n: (x * b.cast(n, "float32"), lambda dy: (dy * 5.0, dy * 7.0)))
    return b.value_and_gradient(f, 2.0, 3)


@case(23)
def gradient_for_a_bool_is_dropped(b):
    f = b.custom_gradient(lambda x, p: (b.where(p, x, -x), lambda dy: (dy * 5.0, dy * 7.0)))
    return b.value_and_gradient(f, 2.0, np.asarray(True))


@case(
    18,
    differs=Differs(
        "an integer input has to be given a gradient too, if only None",
        "an integer, boolean or static input may be left out of the gradients",
        [{"returns": [6.0, [5.0, None]]}, {"returns": [6.0, 5.0]}],
    ),
)
def integer_left_out(b):
    f = b.custom_gradient(lambda x, n: (x * b.cast(n, "float32"), lambda dy: dy * 5.0))
    return [
        b.error(lambda: b.value_and_gradient(f, 2.0, 3)),
        b.error(lambda: b.value_and_gradient(lambda x: f(x, 3), 2.0)),
    ]


@case(23)
def source_that_is_an_integer_alone(b):
    f = b.custom_gradient(lambda n: (b.cast(n, "float32") * 2.0, lambda dy: dy * 7.0))
    return b.value_and_gradient(f, 3)


@case(
    19,
    differs=Differs(
        "None, objects, functions and dtypes as arguments are an error at the call",
        "what is no array is handed to `f` as it is, and needs no gradient",
        [{"returns": [6.0, 5.0]}] * 5,
    ),
)
def static_arguments(b):
    values = [None, object(), len, np.dtype("float32"), slice(1, 2)]

    def call(value):
        f = b.custom_gradient(
            lambda x, v: (x * 3.0 if v is value else x, lambda dy: (dy * 5.0, None))
        )
        return b.value_and_gradient(lambda x: f(x, value), 2.0)

    return [b.error(lambda v=v: call(v)) for v in values]


@case(19, 20, modes=("eager",))
def string_argument(b):
    @b.custom_gradient
    def f(x, mode):
        return x * (3.0 if mode == "triple" else 2.0), lambda dy: (dy * 5.0, None)

    return b.value_and_gradient(lambda x: f(x, "triple"), 2.0)


@case(20, modes=("eager",))
def what_f_receives(b):
    @b.custom_gradient
    def f(*values):
        b.note(*[type(v).__name__ for v in values])
        return values[0], lambda dy: [dy] * len(values)

    f(b.constant(1.0), 2.0, 3, True, "a", np.float64(1.0), np.ones(2, np.float32))
    b.notes[-1] = b.notes[-1][1:]
    return None


@case(
    20,
    modes=("graph",),
    differs=Differs(
        "in graph mode `f` receives a tensor for an int, a bool and a string",
        "`f` receives them as they are, compiled or not",
        {"answer": 1.0, "notes": [["int", "bool", "str"]]},
    ),
)
def what_f_receives_compiled(b):
    @b.custom_gradient
    def f(x, *values):
        b.note(*[type(v).__name__ for v in values])
        return x, lambda dy: [dy] + [None] * len(values)

    return b.run(lambda x: f(x, 3, True, "a"), 1.0)


@case(21, graph_differs="the type of the error is `InternalError`")
def too_few_gradients(b):
    return b.error(lambda: b.value_and_gradient(_rule2(b, lambda dy: dy), 2.0, 3.0))


@case(21, graph_differs="the type of the error is `InternalError`")
def too_many_gradients(b):
    return [
        b.error(lambda: b.value_and_gradient(_rule2(b, lambda dy: (dy, dy, dy)), 2.0, 3.0)),
        b.error(lambda: b.value_and_gradient(_rule(b, lambda dy: (dy, dy)), 2.0)),
    ]


@case(21, graph_differs="the type of the error is `InternalError`")
def no_gradients_for_one_input(b):
    return b.error(lambda: b.value_and_gradient(_rule(b, lambda dy: []), 2.0))


@case(21)
def wrong_count_is_not_noticed_before_it_matters(b):
    return b.run(_rule(b, lambda dy: (dy, dy, dy)), 2.0)


@case(21, graph_differs="the type of the error is `InternalError`")
def all_inputs_count_though_one_is_watched(b):
    f = _rule2(b, lambda dy: dy * 10.0)
    return b.error(lambda: b.value_and_gradient(f, 2.0, 3.0, wrt=[0]))


@case(21, 22, graph_differs="the type of the error is `InternalError`")
def one_none_for_two(b):
    return b.error(lambda: b.value_and_gradient(_rule2(b, lambda dy: None), 2.0, 3.0))


@case(22, none_is_zero=True)
def none_for_one_input(b):
    return b.value_and_gradient(_rule(b, lambda dy: None), 2.0)


@case(22, none_is_zero=True)
def none_for_one_of_two(b):
    return b.value_and_gradient(_rule2(b, lambda dy: (None, dy * 100.0)), 2.0, 3.0)


@case(22, none_is_zero=True)
def none_for_all(b):
    return b.value_and_gradient(_rule2(b, lambda dy: (None, None)), 2.0, 3.0)


@case(22)
def none_beside_another_path(b):
    f = _rule(b, lambda dy: None)
    return b.value_and_gradient(lambda x: f(3.0 * x) + x, 2.0)


@case(22, none_is_zero=True)
def none_on_the_only_path(b):
    f = _rule(b, lambda dy: None)
    return b.value_and_gradient(lambda x: f(3.0 * x), 2.0)


@case(22, none_is_zero=True)
def none_in_a_structure(b):
    f = b.custom_gradient(lambda d: (d["a"] * d["b"][0], lambda dy: {"a": None, "b": [dy * 10.0]}))
    return b.value_and_gradient(f, {"a": 2.0, "b": [3.0]})


@case(22, none_is_zero=True)
def unrelated_input(b):
    f = _rule(b, lambda dy: dy * 5.0)
    return b.value_and_gradient(lambda x, u: f(x), 2.0, 3.0)


@case(
    24,
    differs=Differs(
        "in eager mode a gradient of another shape than its input is handed back as it is",
        "it is a `ValueError` that names the input and what would make it fit",
        [{"raises": "ValueError"}] * 5,
    ),
)
def wrong_shape(b):
    wrong = [5.0, [5.0], [5.0, 6.0], [[5.0], [6.0], [7.0]], [[1.0] * 3] * 2]
    return [
        b.error(
            lambda w=w: b.value_and_gradient(_rule(b, lambda dy: b.constant(w)), floats(1, 2, 3))
        )
        for w in wrong
    ]


@case(
    24,
    differs=Differs(
        "a gradient of another floating dtype is handed back as it is",
        "it is cast to the dtype of its input",
        [4.0, 5.0],
    ),
)
def wrong_precision(b):
    return b.value_and_gradient(_rule(b, lambda dy: b.cast(dy * 5.0, "float16")), 2.0)


@case(
    24,
    differs=Differs(
        "an integer, boolean or complex gradient of a real input is handed back as it is",
        "it is a `TypeError` that names the input",
        [{"raises": "TypeError"}] * 3,
    ),
)
def wrong_kind(b):
    dtypes = ["int32", "bool", "complex64"]
    return [
        b.error(lambda d=d: b.value_and_gradient(_rule(b, lambda dy: b.cast(dy, d)), 2.0))
        for d in dtypes
    ]


@case(
    24,
    modes=("eager",),
    differs=Differs(
        "a string, an object or a generator is handed back as the gradient",
        "it is a `TypeError` that names the input",
        [{"raises": "TypeError"}] * 3,
    ),
)
def no_array_at_all(b):
    wrong = [lambda dy: "abc", lambda dy: object, lambda dy: (g for g in (dy,))]
    return [
        b.error(lambda w=w: str(type(b.value_and_gradient(_rule(b, w), 2.0)[1]))) for w in wrong
    ]


@case(
    24,
    modes=("eager",),
    differs=Differs(
        "`True` is handed back as the gradient",
        "it is a `TypeError` that names the input",
        {"raises": "TypeError"},
    ),
)
def a_bool(b):
    return b.error(lambda: b.value_and_gradient(_rule(b, lambda dy: True), 2.0))


@case(24)
def python_number_at_a_leaf(b):
    return b.value_and_gradient(_rule(b, lambda dy: 10.0), 2.0)


@case(
    24,
    differs=Differs(
        "a NumPy float64 number is handed back as float64",
        "it is cast to the dtype of its input",
        [4.0, 10.0],
    ),
    double=True,
)
def numpy_number_at_a_leaf(b):
    f = _rule(b, lambda dy: np.float64(10))
    return b.value_and_gradient(f, b.constant(2.0, "float32"))


@case(25, modes=("eager",))
def python_numbers_that_flow_on(b):
    forms = [lambda dy: 10.0, lambda dy: 10, lambda dy: np.float32(10)]
    return [b.value_and_gradient(lambda x, g=g: _rule(b, g)(3.0 * x), 2.0) for g in forms]


@case(
    25,
    differs=Differs(
        "a Python number as a gradient that is added to another path's is a bare `AssertionError`",
        "it is a number",
        {"returns": [6.0, 11.0]},
    ),
)
def python_number_that_is_added(b):
    f = _rule(b, lambda dy: 10.0)
    return b.error(lambda: b.value_and_gradient(lambda x: f(x) + x, 2.0))


@case(
    25,
    differs=Differs(
        "a wrong shape that flows on silently gives a gradient of a wrong shape",
        "it is a `ValueError` that names the input",
        {"raises": "ValueError"},
    ),
)
def wrong_shape_that_flows_on(b):
    f = _rule(b, lambda dy: b.constant([10.0, 20.0]))
    return b.error(lambda: b.value_and_gradient(lambda x: f(3.0 * x), 2.0))


@case(
    25,
    differs=Differs(
        "a gradient of another precision that flows on is an error",
        "it is cast to the dtype of its input",
        {"returns": [36.0, 15.0]},
    ),
)
def wrong_precision_that_flows_on(b):
    f = _rule(b, lambda dy: b.cast(dy * 5.0, "float16"))
    return b.error(lambda: b.value_and_gradient(lambda x: f(3.0 * x), 2.0))


@case(27)
def same_array_twice(b):
    f = b.custom_gradient(lambda x, y: (x * y, lambda dy: (dy * 10.0, dy * 100.0)))
    return b.value_and_gradient(lambda x: f(x, x), 3.0)


@case(27)
def variable_as_an_argument(b):
    @b.custom_gradient
    def f(x):
        def grad(dy, **kwargs):
            b.note(sorted(kwargs))
            return dy * 5.0

        return x * 3.0, grad

    return b.value_and_gradient(lambda v: f(v), variables=[2.0])


@case(27)
def gradients_have_the_structure_of_the_sources(b):
    f = b.custom_gradient(lambda d: (d["a"] * d["b"][0], lambda dy: [dy * 1.0, dy * 10.0]))
    return b.value_and_gradient(f, {"a": 2.0, "b": [3.0]})
