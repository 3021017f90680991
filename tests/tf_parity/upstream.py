"""Rules 11 to 17: the upstream gradients that `grad_fn` gets."""

import collections

import numpy as np

from .case import Case, by, case, floats, square, table


def _noting(b, *factors):
    """Return a rule that notes its upstreams and adds them up, so many times each."""

    def grad(*dys):
        assert len(dys) == len(factors)
        for dy in dys:
            b.note(f"{dy.dtype.name}{list(dy.shape)}")
        return sum(factor * dy for factor, dy in zip(factors, dys, strict=True) if factor)

    return grad


def _of_two(b, output, loss):
    f = b.custom(lambda x: (output(x), _noting(b, 1.0, 10.0)))
    return b.grads(lambda x: loss(f(x)), 2.0)


@case(12)
def ranks_and_empty_arrays(b):
    shapes = [(), (1,), (1, 1), (0,), (2, 0)]
    return [b.grads(square(b, _noting(b, 5.0)), np.full(s, 2, np.float32)) for s in shapes]


@case(13, double=True)
def unused_outputs_keep_their_dtypes(b):
    dtypes = ("float64", "complex64", "bfloat16", "float16")
    rule = _noting(b, 5.0, 0, 0, 0, 0)
    f = b.custom(lambda x: ((2 * x, *[b.cast(x, d) for d in dtypes]), rule))
    return b.grads(lambda x: f(x)[0], b.constant(2.0, "float32"))


@case(13, ours=[38.0, 6.0])
def none_above_calls_the_rule(b):
    f = b.custom(lambda x: (x * 3.0, lambda dy: b.constant(5.0)))
    return b.grads(lambda x: square(b, by(None))(f(x)) + x, 2.0)


@case(14)
def integer_and_bool_outputs(b):
    f = b.custom(lambda x: ((2 * x, b.cast(x, "int32"), x > 1.0), _noting(b, 5.0, 0, 0)))

    def loss(x):
        y, n, _ = f(x)
        return y + 7.0 * b.cast(n, "float32")

    return b.grads(loss, 2.0)


@case(14, ours=[[4.0, np.asarray(2, np.int32)], 5.0])
def integer_target(b):
    @b.custom
    def f(x):
        def grad(dy, dn):
            return dy * 5.0 + 100.0 * b.cast(dn, "float32")

        return (2 * x, b.cast(x, "int32")), grad

    return b.grads(f, 2.0)


def _after_gather(b, rule):
    f = b.custom(lambda x: (2 * x, rule))
    return b.grads(lambda x: b.gather(f(x), [0, 0, 2]), floats(1, 2, 3))


# fmt: off
table(
    __name__,
    dict_output_in_sorted_order=Case(11, lambda b:
        _of_two(b, lambda x: {"b": 2 * x, "a": 3 * x}, lambda y: 3.0 * y["b"] + 5.0 * y["a"])),
    ordered_dict_output=Case(11, lambda b: _of_two(b, lambda x:
        collections.OrderedDict([("b", 2 * x), ("a", 3 * x)]), lambda y:
        3.0 * y["b"] + 5.0 * y["a"]), ours={"answer": [42.0, 53.0],
        "notes": ["float32[]", "float32[]"]}),
    upstream_after_gather=Case(15, lambda b: _after_gather(b, lambda dy: dy * 2.0),
        ours=[floats(2, 2, 6), floats(4, 0, 2)]),
)
