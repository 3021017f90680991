"""What a call captured: which of it a rule gives gradients for, and what must not need one."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .._closure.walk import named
from .._frontend.grad_fn import Call, GradFn, Held, Variables
from .._frontend.within import Within
from .._jax.compat import is_ref, type_of
from .._jax.shown import Run
from .._jax.types import Aval, Indices, Leaf, OperandIndex, Values, has_gradient
from .._messages import errors, gradient_errors
from .._messages.source import Source

Names = Mapping[OperandIndex, str]


class Refused(NamedTuple):
    """A captured value that `f` uses and that has no gradient: an error if it needs one."""

    type: Aval
    is_ref: bool
    line: object


class Weights(NamedTuple):
    """The values that a call captured, the first operands; how its rule is asked about them."""

    operands: list[Leaf]  # emptied in what JAX keeps
    declared: Variables | None
    listed: Indices  # in the order of the variables
    is_by_use: bool  # `variables` lists those that are being differentiated
    types: Sequence[Aval]  # of these
    refused: Mapping[OperandIndex, Refused]
    source: Source
    may_warn: bool  # of a value that only the rule reads

    @classmethod
    def of(cls, call: Call, grad_fn: GradFn, run: Run | None) -> "Weights":
        """Return what a run of `f` took; None: nothing."""
        variables, declared = call.declared
        operands = [*declared]
        known = {id(v) for v in operands}
        within = call.spec.within
        is_by_use = grad_fn.accepts_variables and variables is None
        listed, refused = [*range(len(declared))], dict[OperandIndex, Refused]()
        may_refuse = not (within is Within.RULE or call.autodiff)
        run = run or Run(None, (), NotImplementedError)  # which takes nothing
        for v, line in run.uses:
            if id(v) in known:
                continue
            known.add(id(v))
            if has_gradient(v):
                if is_ref(v):
                    if within is not Within.RULE:
                        refused[len(operands)] = Refused(type_of(v), True, line)
                elif is_by_use:
                    listed.append(len(operands))
                elif may_refuse and not (within is Within.IS_RULE and run.is_compared(v)):
                    refused[len(operands)] = Refused(type_of(v), False, line)
            operands.append(v)
        operands += [v for v in run.taken[run.inputs :] if id(v) not in known]
        types = [type_of(operands[i]) for i in listed]
        source = call.spec.source
        return cls(operands, variables, listed, is_by_use, types, refused, source, may_refuse)

    @property
    def values(self) -> Values:
        return [self.operands[i] for i in self.listed]

    def argument(self, values: Values, wanted: Indices) -> tuple[Variables | None, Values, Indices]:
        """Return what the rule gets: the declared variables, or those that are differentiated."""
        if not self.is_by_use:
            return self.declared, values, self.listed
        some = [k for k, i in enumerate(self.listed) if i in wanted]
        values = [values[k] for k in some]
        variables = Variables.listed(values, [self.types[k] for k in some]) if some else None
        return variables, values, [self.listed[k] for k in some]

    def check(self, wanted: Indices, names: Names) -> None:
        """Raise if a value is differentiated that has no gradient."""
        found = {i: self.refused[i] for i in wanted if i in self.refused}
        if not found:
            return
        if all(one.is_ref for one in found.values()):
            raise errors.foreign_ref(self.source)
        every = [(names.get(i, ""), r.type, self.source.line(r.line)) for i, r in found.items()]
        raise errors.no_gradient_for_captured(self.source, every, self.declared is not None)

    def warn(self, values: Mapping[OperandIndex, Aval], names: Names) -> None:
        """Warn of values that are differentiated, and that only the rule reads."""
        if values and self.may_warn:
            every = [(names.get(i, ""), t) for i, t in values.items()]
            gradient_errors.warn_of_unlisted(self.source, every)

    def warn_of(self, held: Held, values: Values, rule: object) -> None:
        """Warn of such values, which a call or its rule holds."""
        every = dict(enumerate(values))
        self.warn({i: type_of(v) for i, v in every.items()}, names_of(held, every, rule))


def names_of(held: Held, values: Mapping[OperandIndex, Leaf], rule: object = None) -> Names:
    """Name some of the values that a call captured as the user writes them."""
    if not values:
        return {}
    roots = [("", held.f), *(("self", v) for v in held.bound_to), *held.keywords.items()]
    roots += [("args", held.inputs), ("", held.primal), ("", rule)]
    found = named(roots, map(id, values.values()))
    return {i: found[id(v)] for i, v in values.items() if id(v) in found}
