"""Rules 28 to 32: keywords and defaults. Here a name is bound to its position, always."""

from .case import TYPE_ERROR, Case, by, case, floats, table


def _keyword_only(b, rule):
    def f(x, *, k):
        return x * k, rule

    return b.custom(f)


@case(28, 29, ours=[9.0, floats(5, 5)])
def static_keywords(b):
    @b.custom
    def f(x, mode="a", axis=None, function=None):
        y = b.sum(x) * (3.0 if mode == "b" and axis is None and function is len else 2.0)
        return y, lambda dy: dy * b.ones_like(x) * 5.0

    return b.grads(lambda x: f(x, mode="b", axis=None, function=len), floats(1, 2))


@case(31, ours=[[6.0, 5.0], [6.0, 5.0]])
def default_of_a_compiled_function(b):
    functions = [lambda x, k=3.0: (x * k, by(5.0)), lambda x, name=None: (x * 3.0, by(5.0))]
    return [b.error(lambda f=f: b.grads(b.compile(b.custom(f)), 2.0)) for f in functions]


# fmt: off
table(
    __name__,
    input_by_name=Case((28, 30), lambda b: b.grads(lambda x:
        b.custom(lambda x: (x * 3.0, by(5.0)))(x=x), 2.0), ours=[6.0, 5.0]),
    second_input_by_name=Case((28, 29), lambda b:
        b.grads(lambda x, k: b.custom(lambda x, k: (x * k, by(5.0, 7.0)))(x, k=k), 2.0, 3.0),
        ours=[6.0, [5.0, 7.0]]),
    keyword_only=Case((28, 29), lambda b: b.grads(lambda x:
        _keyword_only(b, by(5.0))(x, k=b.constant(3.0)), 2.0), ours=[6.0, 5.0]),
    keyword_only_differentiated=Case(29, lambda b:
        b.grads(lambda x, k: _keyword_only(b, by(5.0))(x, k=k), 2.0, 3.0), ours=TYPE_ERROR),
    variable_by_name=Case(32, lambda b: b.grads(lambda x, v:
        b.custom(lambda x, w=None: (x * w, lambda dy, variables=None: (dy * 5.0, dy * 7.0)))(x,
        w=v), 2.0, variables=[3.0]), ours=[6.0, [5.0, 7.0]]),
    full_set_though_a_default_is_left_out=Case(31, lambda b:
        b.grads(lambda x: b.custom(lambda x, key=None: (x * 3.0, by(5.0, None)))(x), 2.0),
        ours=[6.0, 5.0]),
    input_after_a_skipped_default=Case(31, lambda b:
        b.grads(lambda x, z: b.custom(lambda x, k=1.0, z=2.0: (x * z, by(5.0, None, 7.0)))(x, z=z),
        2.0, 3.0), ours=[6.0, [5.0, 7.0]]),
)
