"""Rules 28 to 32: keywords and defaults. Here a name is bound to its position, always."""

from .case import Differs, case, floats


@case(
    28,
    30,
    differs=Differs(
        "`f(x=x)` in eager mode: the declared gradient is silently ignored and the ordinary one "
        "comes back; in graph mode a `ValueError`",
        "`f(x=x)` is `f(x)`",
        {"returns": [6.0, 5.0]},
        better=True,
    ),
)
def input_by_name(b):
    f = b.custom_gradient(lambda x: (x * 3.0, lambda dy: dy * 5.0))
    return b.error(lambda: b.value_and_gradient(lambda x: f(x=x), 2.0))


@case(
    28,
    29,
    differs=Differs(
        "in eager mode a tensor passed by name is no input: it gets None",
        "an input by name is an input like any other",
        {"returns": [6.0, [5.0, 7.0]]},
    ),
)
def second_input_by_name(b):
    f = b.custom_gradient(lambda x, k: (x * k, lambda dy: (dy * 5.0, dy * 7.0)))
    return b.error(lambda: b.value_and_gradient(lambda x, k: f(x, k=k), 2.0, 3.0))


@case(
    29,
    differs=Differs(
        "in eager mode the gradients are counted without the inputs that are passed by name",
        "every input counts, however it is passed",
        {"raises": "ValueError"},
    ),
)
def one_gradient_for_two_inputs_one_by_name(b):
    f = b.custom_gradient(lambda x, k: (x * k, lambda dy: dy * 5.0))
    return b.error(lambda: b.value_and_gradient(lambda x, k: f(x, k=k), 2.0, 3.0))


@case(
    30,
    differs=Differs(
        "`f(x, k=k)` with only `k` watched: the ordinary gradient of `f`, the rule is not called",
        "the declared gradient",
        {"returns": [6.0, 7.0]},
        better=True,
    ),
)
def only_the_named_input_is_watched(b):
    f = b.custom_gradient(lambda x, k: (x * k, lambda dy: (dy * 5.0, dy * 7.0)))
    return b.error(lambda: b.value_and_gradient(lambda x, k: f(x, k=k), 2.0, 3.0, wrt=[1]))


@case(
    28,
    29,
    differs=Differs(
        "keyword-only arguments are a `ValueError` in graph mode",
        "keyword-only arguments reach `f` in every mode",
        [{"returns": [6.0, 5.0]}] * 2,
    ),
)
def keyword_only(b):
    @b.custom_gradient
    def f(x, *, k):
        return x * k, lambda dy: dy * 5.0

    k = b.constant(3.0)
    return [
        b.error(lambda: b.value_and_gradient(lambda x: f(x, k=3.0), 2.0)),
        b.error(lambda: b.value_and_gradient(lambda x: f(x, k=k), 2.0)),
    ]


@case(
    29,
    differs=Differs(
        "in eager mode a watched keyword-only tensor silently gets None",
        "it is closed over, so to differentiate it is a `TypeError` unless the rule takes "
        "`variables`",
        {"raises": "TypeError"},
    ),
)
def keyword_only_differentiated(b):
    @b.custom_gradient
    def f(x, *, k):
        return x * k, lambda dy: dy * 5.0

    return b.error(lambda: b.value_and_gradient(lambda x, k: f(x, k=k), 2.0, 3.0))


@case(
    29,
    32,
    differs=Differs(
        "a Variable passed by keyword is left out of `variables` and gets None",
        "a differentiated keyword-only argument is among the `variables`",
        {"returns": [6.0, [5.0, 7.0]]},
    ),
)
def keyword_only_variable(b):
    @b.custom_gradient
    def f(x, *, w):
        def grad(dy, variables=None):
            return (dy * 5.0, [dy * 7.0]) if variables else dy * 5.0

        return x * w, grad

    return b.error(lambda: b.value_and_gradient(lambda x, v: f(x, w=v), 2.0, variables=[3.0]))


@case(
    32,
    differs=Differs(
        "a Variable passed by name gets None",
        "a parameter that may be positional is an input, however it is passed",
        {"returns": [6.0, [5.0, 7.0]]},
    ),
)
def variable_by_name(b):
    @b.custom_gradient
    def f(x, w=None):
        def grad(dy, variables=None):
            return dy * 5.0, dy * 7.0

        return x * w, grad

    return b.error(lambda: b.value_and_gradient(lambda x, v: f(x, w=v), 2.0, variables=[3.0]))


@case(
    28,
    29,
    differs=Differs(
        "in graph mode keywords that are no tensors are a `ValueError` too",
        "strings, None and functions by name reach `f` as they are, in every mode",
        {"returns": [9.0, floats(5, 5)]},
    ),
)
def static_keywords(b):
    @b.custom_gradient
    def f(x, mode="a", axis=None, function=None):
        y = b.sum(x) * (3.0 if mode == "b" and axis is None and function is len else 2.0)
        return y, lambda dy: dy * b.ones_like(x) * 5.0

    return b.error(
        lambda: b.value_and_gradient(
            lambda x: f(x, mode="b", axis=None, function=len), floats(1, 2)
        )
    )


@case(
    28,
    29,
    differs=Differs(
        "`**kwargs` are a `ValueError` in graph mode",
        "they reach `f` in every mode",
        {"returns": [6.0, 5.0]},
    ),
)
def var_keyword(b):
    @b.custom_gradient
    def f(x, **kwargs):
        return x * kwargs.get("k", 1.0), lambda dy: dy * 5.0

    return b.error(lambda: b.value_and_gradient(lambda x: f(x, k=3.0), 2.0))


@case(31)
def default_left_out(b):
    f = b.custom_gradient(lambda x, k=3.0: (x * k, lambda dy: dy * 5.0))
    return b.value_and_gradient(lambda x: f(x), 2.0)


@case(31)
def default_given(b):
    f = b.custom_gradient(lambda x, k=3.0: (x * k, lambda dy: (dy * 5.0, dy * 7.0)))
    return b.value_and_gradient(f, 2.0, 4.0)


@case(
    31,
    differs=Differs(
        "`tf.function(f)` passes the defaults of `f` positionally, so that they count",
        "a default that is left out is no input, compiled or not",
        [{"returns": [6.0, 5.0]}, {"returns": [6.0, 5.0]}],
    ),
)
def default_of_a_compiled_function(b):
    f = b.custom_gradient(lambda x, k=3.0: (x * k, lambda dy: dy * 5.0))
    h = b.custom_gradient(lambda x, name=None: (x * 3.0, lambda dy: dy * 5.0))
    return [
        b.error(lambda: b.value_and_gradient(b.compile(f), 2.0)),
        b.error(lambda: b.value_and_gradient(b.compile(h), 2.0)),
    ]


@case(
    31,
    differs=Differs(
        "an input after a skipped default, by name, gets None",
        "it is an input",
        {"returns": [6.0, [5.0, 7.0]]},
    ),
)
def input_after_a_skipped_default(b):
    f = b.custom_gradient(lambda x, k=1.0, z=2.0: (x * k * z, lambda dy: (dy * 5.0, dy * 7.0)))
    return b.error(lambda: b.value_and_gradient(lambda x, z: f(x, z=z), 2.0, 3.0))


@case(28, 60)
def call_that_does_not_fit(b):
    f = b.custom_gradient(lambda x: (x, lambda dy: dy))
    one = b.constant(1.0)
    return [
        b.error(lambda: f()),
        b.error(lambda: f(one, one)),
    ]
