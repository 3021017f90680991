"""What does not hold under JAX's experimental flags, and why: `conftest.py` skips it there.

With `jax_custom_jvp3` or `jax_custom_vjp3` JAX traces a function with a custom derivative even when
it is called eagerly: `f` and its rule see no values there, and run more often. With `jax_remat3` a
checkpoint is an operation that JAX cannot transpose or look into.
"""

import jax

VALUES = "JAX traces the function even eagerly under this flag"
REMAT = "JAX cannot transpose a checkpoint, or look into it, under this flag"

# Forward mode of a rule that calls a decorated function is an error there, and not a wrong number.
HIGH = "JAX hides what a decorated function calls, and lowers no `linear_call`, under these flags"
ABSENT = "no limit under these flags"
ANOTHER = "JAX raises an error of its own under these flags"
ANEW = "forward mode of a checkpoint makes its values anew under this flag: `v is w` does not hold"

UNDER_FLAGS = {
    "autodiff/test_eager_values.py": VALUES,
    "closure/test_cost.py::test_a_weight_and_its_value_are_seen": VALUES,
    "closure/test_memos.py": VALUES,
    "closure/test_seen.py": VALUES,
    "test_limits.py::test_the_way_out_works[branches under jit]": VALUES,
    "test_limits.py::test_the_way_out_works[rules that jax cannot transpose]": HIGH,
    "test_the_limit_is_there[refs made under jit]": ABSENT,
    "test_the_limit_is_there[primal under checkpoint]": ABSENT,
    "test_the_limit_is_there[undeclared variables in kernels]": ABSENT,
    "[operators that are not linear]": HIGH,
    "calling.python_branches-eager": VALUES,
    "calling.when_each_runs-eager": VALUES,
    "docs/guide.md": VALUES,
    "docs/howto/kernels.md": VALUES,
    "docs/getting_started.md": VALUES,
    "01_custom_gradient": VALUES,
    "autodiff/test_operators.py": HIGH,
    "test_a_rule_that_calls_its_own_function_has_three_orders[a ": HIGH,
    "test_a_rule_of_nested_functions_that_call_twice[a function with a rule": HIGH,
    "test_a_rule_calls_a_function_that_has_a_weight_as_a_default": HIGH,
    "test_the_nested_pattern_has_the_second_derivatives": HIGH,
    "[of such functions in loops": HIGH,
    "an operator by a": HIGH,
    "an operator plus": HIGH,
    "[outside of JAX": HIGH,
    "test_forward_mode_names_the_operation[round in a function with a linear": HIGH,
    "[rules that read a ref]": HIGH,
    "[in a rule-vmap(jacfwd)]": HIGH,
    "[in a rule-jacfwd(vmap)]": HIGH,
    "[in a rule-vmap(hessian)]": HIGH,
    "[in a rule-hessian(vmap)]": HIGH,
    "both_modes[of a decorated function-": HIGH,
    "both_modes[constant custom_jvp-": HIGH,
    "right_or_an_error[a custom_vjp-hessian]": ANOTHER,
    "in_the_order_of_first_use[a shard_map]": ANOTHER,
    "its_declared_derivatives[called by the rule alone-jvp]": HIGH,
    "its_declared_derivatives[called by the rule alone-vmap(hessian)]": HIGH,
    "its_own_gradient[captured-checkpoint-": REMAT,
    "-jacfwd(checkpoint)]": ANEW,
    "-hessian(checkpoint)]": ANEW,
    "both_modes[checkpoint-": REMAT,
    "test_forward_mode_names_the_operation[checkpoint-": REMAT,
}


def reason_to_skip(name: str) -> str | None:
    """Return why a test does not hold under the flags that are on, if that is so."""
    flags = ("jax_custom_jvp3", "jax_custom_vjp3", "jax_remat3")
    if not any(getattr(jax.config, flag, False) for flag in flags):
        return None
    return next((reason for part, reason in UNDER_FLAGS.items() if part in name), None)
