"""Rules 11 to 17: how `grad_fn` is called."""

import collections

import numpy as np

from .case import Differs, case, floats

Pair = collections.namedtuple("Pair", "q p")


def _weights(b, count):
    """Return a rule that tells the upstreams apart: 1, 10, 100, ... times each."""

    def grad(*dys):
        assert len(dys) == count
        b.seen(*dys)
        return sum(10.0**i * dy for i, dy in enumerate(dys))

    return grad


def _of_two(b, output, loss):
    f = b.custom_gradient(lambda x: (output(x), _weights(b, 2)))
    return b.value_and_gradient(lambda x: loss(f(x)), 2.0)


@case(11)
def tuple_output(b):
    return _of_two(b, lambda x: (2 * x, 3 * x), lambda y: 3.0 * y[0] + 5.0 * y[1])


@case(11)
def list_output(b):
    return _of_two(b, lambda x: [2 * x, 3 * x], lambda y: 3.0 * y[0] + 5.0 * y[1])


@case(11)
def dict_output_in_sorted_order(b):
    return _of_two(b, lambda x: {"b": 2 * x, "a": 3 * x}, lambda y: 3.0 * y["b"] + 5.0 * y["a"])


@case(
    11,
    differs=Differs(
        "the upstreams of an `OrderedDict` come in sorted-key order",
        "an `OrderedDict` is flattened in its own order, as everywhere in JAX",
        {"answer": [42.0, 53.0], "notes": ["float32[]", "float32[]"]},
    ),
)
def ordered_dict_output(b):
    return _of_two(
        b,
        lambda x: collections.OrderedDict([("b", 2 * x), ("a", 3 * x)]),
        lambda y: 3.0 * y["b"] + 5.0 * y["a"],
    )


@case(11)
def namedtuple_output(b):
    return _of_two(b, lambda x: Pair(2 * x, 3 * x), lambda y: 3.0 * y.q + 5.0 * y.p)


@case(11)
def nested_output(b):
    f = b.custom_gradient(lambda x: (((2 * x, [3 * x]), {"z": 4 * x, "y": 5 * x}), _weights(b, 4)))

    def loss(x):
        (first, (second,)), rest = f(x)
        return first + 2.0 * second + 3.0 * rest["z"] + 4.0 * rest["y"]

    return b.value_and_gradient(loss, 2.0)


@case(11)
def one_tuple_output(b):
    f = b.custom_gradient(lambda x: ((2 * x,), lambda dy: dy * 5.0))
    return b.value_and_gradient(lambda x: f(x)[0], 2.0)


@case(11)
def no_keywords(b):
    @b.custom_gradient
    def f(x):
        def grad(*args, **kwargs):
            b.note(len(args), sorted(kwargs))
            return args[0] + args[1]

        return {"a": x, "b": 2 * x}, grad

    return b.value_and_gradient(f, 2.0)


@case(
    11,
    differs=Differs(
        "a dict whose keys cannot be sorted is a `TypeError`",
        "it is the `ValueError` of JAX's pytrees",
        [{"raises": "ValueError"}, {"raises": "ValueError"}],
    ),
)
def unsortable_keys(b):
    f = b.custom_gradient(lambda x: ({"a": x, 1: 2 * x}, lambda *dys: dys[0]))
    h = b.custom_gradient(lambda d: (d["a"] * d[1], lambda dy: (dy, dy)))
    return [
        b.error(lambda: b.value_and_gradient(lambda x: f(x)["a"], 1.0)),
        b.error(lambda: b.value_and_gradient(lambda x: h({"a": x, 1: x}), 1.0)),
    ]


@case(12)
def upstream_of_a_chain(b):
    f = b.custom_gradient(lambda x: (x * x, lambda dy: 7.0 * dy))
    return b.value_and_gradient(lambda x: 5.0 * f(2.0 * x), 3.0)


@case(12)
def vector_output_is_summed(b):
    @b.custom_gradient
    def f(x):
        def grad(dy):
            b.seen(dy)
            return dy * 10.0

        return x * x, grad

    return b.value_and_gradient(f, floats(1, 2, 3))


@case(12)
def explicit_upstream(b):
    f = b.custom_gradient(lambda x: (x * x, lambda dy: dy * 10.0))
    return b.value_and_gradient(f, floats(1, 2), upstream=floats(5, 6))


@case(12)
def explicit_upstreams_of_a_structure(b):
    f = b.custom_gradient(lambda x: ({"b": x, "a": 2 * x}, lambda da, db: da + 10.0 * db))
    return b.value_and_gradient(f, 1.0, upstream={"b": 3.0, "a": 5.0})


@case(12)
def uses_are_summed(b):
    @b.custom_gradient
    def f(x):
        def grad(dy):
            b.seen(dy)
            return dy * dy

        return 2 * x, grad

    def loss(x):
        y = f(x)
        return y + 3.0 * y + 4.0 * y

    return b.value_and_gradient(loss, 1.0)


@case(12)
def upstream_has_the_shape_of_the_output(b):
    @b.custom_gradient
    def f(x):
        def grad(dy):
            b.seen(dy)
            return dy

        return 2 * x, grad

    return b.value_and_gradient(lambda x: f(x) * b.constant([[1.0, 2.0], [3.0, 4.0]]), 3.0)


@case(12)
def output_of_another_shape(b):
    f = b.custom_gradient(lambda x: (b.sum(x), lambda dy: dy * b.ones_like(x) * 2.0))
    return b.value_and_gradient(f, floats(1, 2, 3, 4))


@case(12)
def ranks_and_empty_arrays(b):
    @b.custom_gradient
    def f(x):
        def grad(dy):
            b.seen(dy)
            return dy * 5.0

        return x * x, grad

    shapes = [(), (1,), (1, 1), (0,), (2, 0)]
    return [b.value_and_gradient(f, np.full(s, 2, np.float32)) for s in shapes]


@case(12)
def nan_and_inf_pass(b):
    f = b.custom_gradient(lambda x: (x * x, lambda dy: dy * 5.0))
    return [b.value_and_gradient(f, 2.0, upstream=u) for u in (float("nan"), float("inf"))]


@case(13)
def unused_output_gives_zeros(b):
    @b.custom_gradient
    def f(x):
        def grad(*dys):
            b.seen(*dys)
            return dys[0] * 5.0 + b.sum(dys[1]) + 1.0

        return (2 * x, b.stack([x, x, x])), grad

    return b.value_and_gradient(lambda x: f(x)[0], 2.0)


@case(13, double=True)
def unused_outputs_keep_their_dtypes(b):
    @b.custom_gradient
    def f(x):
        def grad(*dys):
            b.seen(*dys)
            return dys[0] * 5.0

        dtypes = ("float64", "complex64", "bfloat16", "float16")
        return (2 * x, *[b.cast(x, d) for d in dtypes]), grad

    return b.value_and_gradient(lambda x: f(x)[0], b.constant(2.0, "float32"))


@case(13)
def zero_upstream_still_calls(b):
    f = b.custom_gradient(lambda x: (x * x, lambda dy: dy + 5.0))
    return b.value_and_gradient(lambda x: 0.0 * f(x), 3.0)


@case(13)
def none_above_is_zero_below(b):
    """One output used through a rule that returns None: its upstream is zeros."""
    above = b.custom_gradient(lambda x: (x * x, lambda dy: None))

    @b.custom_gradient
    def f(x):
        def grad(*dys):
            b.seen(*dys)
            return dys[0] * 3.0 + dys[1] * 5.0

        return (x * 3.0, x * 4.0), grad

    def loss(x):
        first, second = f(x)
        return above(first) + second

    return b.value_and_gradient(loss, 2.0)


@case(13, none_is_zero=True)
def none_above_stops_the_gradient(b):
    above = b.custom_gradient(lambda x: (x * x, lambda dy: None))
    f = b.custom_gradient(lambda x: (x * 3.0, lambda dy: dy * 5.0))
    return b.value_and_gradient(lambda x: above(f(x)), 2.0)


@case(
    13,
    differs=Differs(
        "a rule whose upstreams would all be None is not called",
        "None is zero, so a rule is called with zeros, as any `jax.custom_vjp` (it shows in a "
        "rule that does not multiply by its upstream)",
        [38.0, 6.0],
    ),
)
def none_above_calls_the_rule(b):
    above = b.custom_gradient(lambda x: (x * x, lambda dy: None))
    f = b.custom_gradient(lambda x: (x * 3.0, lambda dy: b.constant(5.0)))
    return b.value_and_gradient(lambda x: above(f(x)) + x, 2.0)


@case(13, none_is_zero=True)
def stop_gradient_outside(b):
    f = b.custom_gradient(lambda x: (x * 3.0, lambda dy: dy * 5.0))
    return b.value_and_gradient(lambda x: b.stop_gradient(f(x)), 2.0)


@case(14)
def integer_and_bool_outputs(b):
    @b.custom_gradient
    def f(x):
        def grad(*dys):
            b.seen(*dys)
            return dys[0] * 5.0

        return (2 * x, b.cast(x, "int32"), x > 1.0), grad

    return b.value_and_gradient(lambda x: f(x)[0], 2.0)


@case(14)
def integer_output_carries_nothing_through_a_cast(b):
    @b.custom_gradient
    def f(x):
        def grad(*dys):
            b.seen(*dys)
            return dys[0] * 5.0 + b.cast(dys[1], "float32")

        return (2 * x, b.cast(x, "int32")), grad

    def loss(x):
        y = f(x)
        return y[0] + 7.0 * b.cast(y[1], "float32")

    return b.value_and_gradient(loss, 2.0)


@case(
    14,
    differs=Differs(
        "an integer output as the target of the gradient has an integer one as its upstream",
        "an integer output has no derivative: its upstream is zero",
        [[4.0, np.asarray(2, np.int32)], 5.0],
    ),
)
def integer_target(b):
    @b.custom_gradient
    def f(x):
        def grad(dy, dn):
            return dy * 5.0 + 100.0 * b.cast(dn, "float32")

        return (2 * x, b.cast(x, "int32")), grad

    return b.value_and_gradient(f, 2.0)


@case(
    15,
    differs=Differs(
        "after `tf.gather` the upstream is a `tf.IndexedSlices`, and `dy * 2.` a `TypeError`",
        "every upstream is an array",
        {"returns": [floats(2, 2, 6), floats(4, 0, 2)]},
    ),
)
def upstream_after_gather(b):
    f = b.custom_gradient(lambda x: (2 * x, lambda dy: dy * 2.0))
    return b.error(
        lambda: b.value_and_gradient(lambda x: b.gather(f(x), [0, 0, 2]), floats(1, 2, 3))
    )


@case(15)
def upstream_after_gather_converted(b):
    f = b.custom_gradient(lambda x: (2 * x, lambda dy: b.asarray(dy) * 2.0))
    return b.value_and_gradient(lambda x: b.gather(f(x), [0, 0, 2]), floats(1, 2, 3))


@case(15)
def upstream_after_gather_passed_on(b):
    f = b.custom_gradient(lambda x: (2 * x, lambda dy: dy))
    return b.value_and_gradient(lambda x: b.gather(f(x), [0, 0, 2]), floats(1, 2, 3))


@case(15)
def upstream_after_gather_and_a_dense_use(b):
    f = b.custom_gradient(lambda x: (2 * x, lambda dy: b.asarray(dy) * 10.0))

    def loss(x):
        y = f(x)
        return b.sum(b.gather(y, [0, 2])) + 3.0 * b.sum(y)

    return b.value_and_gradient(loss, floats(1, 2, 3))


@case(16)
def grad_fn_with_defaults(b):
    f = b.custom_gradient(lambda x: (x * x, lambda dy, scale=10.0: dy * scale))
    return b.value_and_gradient(f, 2.0)


@case(16)
def grad_fn_takes_too_many(b):
    f = b.custom_gradient(lambda x: (2 * x, lambda da, db: da))
    return b.error(lambda: b.value_and_gradient(f, 2.0))


@case(16)
def grad_fn_takes_too_few(b):
    f = b.custom_gradient(lambda x: ((2 * x, 3 * x), lambda da: da))
    return b.error(lambda: b.value_and_gradient(f, 2.0))
