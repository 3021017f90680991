"""Writes decorated functions: what they take, close over and return, and their rules."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ._oracle import Declared, Env, Function, add, base, bilinear, linear, mul, scale
from ._vocabulary import CONSTANT_NAMES, DENSE, HOLDERS, INVERSE, PLACES, SHAPES, choose
from ._writer import Scope, Signature, Writer, filled, has_keys, indented, leaves, paths, text

dot = functools.partial(bilinear, lambda p, q: np.sum(p * q))
flip = functools.partial(linear, lambda v: v[::-1])
running = functools.partial(linear, np.cumsum)
product = functools.partial(linear, lambda v: DENSE.T @ v)
inverse = functools.partial(linear, lambda v: INVERSE @ v)


def by_residual(t: Any, a: Any, b: Any) -> Any:
    return mul(t, a) if np.sum(base(a)) > 0.2 else scale(2.0, mul(t, b))


# Linear maps from an upstream of the shape `of` to a gradient of the shape `to`: where each fits,
# the shapes of its residuals, its text, and its transpose, of a tangent and the residuals.
Map = tuple[Callable[..., bool], Callable[..., list[Any]], str, Callable[..., Any]]
SAME, VECTOR = lambda to, of: to == of, lambda to, of: to == of and len(to) == 1
THREE = lambda to, of: to == of == (3,)  # noqa: E731
ONE, TWO = lambda to, of: [of], lambda to, of: [of, of]
COND = "lax.cond(jnp.sum({c}) > 0.2, lambda d: d * {{a}}, lambda d: 2.0 * d * {{b}}, {{dy}})"
SCAN = "lax.scan(lambda c, r: (c + r * {dy}, None), jnp.zeros_like({dy}), jnp.stack([{a}, {b}]))[0]"
MAPS: dict[str, Map] = {
    "rank one": (
        lambda to, of: True, lambda to, of: [of, to],
        "{b} * jnp.sum({a} * {dy})", lambda t, a, b: mul(a, dot(b, t)),
    ),
    "elementwise": (SAME, ONE, "{dy} * {a}", lambda t, a, b: mul(t, a)),
    "flipped": (VECTOR, ONE, "({dy} * {a})[::-1]", lambda t, a, b: mul(flip(t), a)),
    "scanned": (VECTOR, TWO, SCAN, lambda t, a, b: mul(t, add(a, b))),
    "cond": (SAME, TWO, COND.format(c="C"), lambda t, a, b: mul(t, a)),
    # Mapped over a condition, `lax.cond` becomes what JAX cannot transpose.
    "cond on a residual": (SAME, TWO, COND.format(c="{a}"), by_residual),
    "where": (
        SAME, TWO, "jnp.where({a} > 0.1, {dy} * {a}, 2.0 * {dy} * {b})",
        lambda t, a, b: choose(a, mul(t, a), scale(2.0, mul(t, b))),
    ),
    "outside of JAX": (
        VECTOR, ONE, "summed({dy} * {a})", lambda t, a, b: mul(flip(running(flip(t))), a),
    ),
    "sparse": (THREE, ONE, "sparse_product({dy} * {a})", lambda t, a, b: mul(product(t), a)),
    "solved": (THREE, ONE, "solved({dy} * {a})", lambda t, a, b: mul(inverse(t), a)),
    "spread": (lambda to, of: not of, lambda to, of: [to], "{dy} * {a}", lambda t, a, b: dot(t, a)),
    "total": (lambda to, of: not to, ONE, "jnp.sum({dy} * {a})", lambda t, a, b: mul(a, t)),
}  # fmt: skip
ABOVE = ["nothing", "logged", "jax.jit", "jax.checkpoint", "jitted_checkpoint"]
OBJECTS = ("self", "pytree self")  # what holds the captured values itself


class Definition:
    """Writes one decorated function."""

    def __init__(self, writer: Writer, scope: Scope, pure: bool) -> None:
        self.w, self.scope, self.random = writer, scope, writer.random
        self.name = writer.name("h")
        self.pure = pure
        self.inside = scope.inside_rule
        if self.inside:
            writer.features.add("written in a rule")

    def write(self) -> Signature:
        scope = self.scope
        self._inputs()
        self._captures()
        d = self.declared = Declared(self.name, list(self.shapes))
        inner = self.inner = scope.inner(depth=scope.depth - 1, loops=False)
        # What it may use: constants, its inputs, and what it closes over.
        inner.shapes = {n: s for n, s in scope.shapes.items() if n.startswith("C")}
        inner.shapes |= self.shapes | {n: scope.shapes[n] for n in [*self.used, *self.masks]}
        inner.functions = {n: f for n, f in scope.functions.items() if f.pure}
        inner.reads |= self.reads
        for tree, p in zip(self.trees, self.params, strict=True):
            inner.lines.extend(f"{n} = {path}" for n, path in paths(tree, p) if n != path)
        d.body, d.autodiff = inner.steps, self.protocol == "autodiff"
        d.outputs = self._body()
        self.output_shapes = [inner.shapes[n] for n in d.outputs]
        self._emit(self._rule())
        pure = [n for n, f in scope.functions.items() if f.pure]

        def make(env: Env) -> None:
            names = [*self.captured, *self.functions, *pure, *CONSTANT_NAMES]
            env[self.name] = Function(d, {n: env[n] for n in names})

        scope.steps.append(make)
        captured_nothing = not (self.captured or self.functions)
        signature = Signature(
            self.name, self.shapes, self.trees, ["2.5"] * len(self.statics), self.by_name,
            self.output_tree, self.output_shapes, captured_nothing,
        )  # fmt: skip
        scope.functions[self.name] = signature
        return signature

    @property
    def captured(self) -> list[str]:
        return [*self.used, *self.masks, *self.rule_used]

    def _inputs(self) -> None:
        w = self.w
        count = self.random.choice([1, 1, 2, 2, 3])
        names = [w.name("v") for _ in range(count)]
        self.shapes = {n: self.random.choice(SHAPES) for n in names}
        cut = self.random.randrange(1, count + 1)
        groups = [names[:cut], names[cut:]] if cut < count else [names]
        if w.chance(0.5):
            groups = [[n] for n in names]
        self.trees = [w.arrange(g) for g in groups]
        # A tree that is a bare name is the parameter itself.
        self.params = [t if isinstance(t, str) else w.name("p") for t in self.trees]
        self.shapes = {n: self.shapes[n] for t in self.trees for n in leaves(t)}
        self.statics = [w.name("s")] if w.has("a static argument", 0.2) else []
        self.omitted = w.has("an omitted default", 0.15)

    def _captures(self) -> None:
        """Choose what it closes over, in which places, and who gives the gradients."""
        w, scope = self.w, self.scope
        names = [n for n in scope.shapes if not n.startswith("C")]
        self.protocol, self.used, self.rule_used, self.functions = "none", [], [], []
        self.masks: list[str] = []  # which nothing differentiates: no variables
        self.reads: dict[str, str] = {}
        self.place = "cell"
        if self.pure or not names or w.chance(0.25):
            return
        self.used = self.random.sample(names, min(len(names), self.random.choice([0, 1, 1, 2])))
        self.protocol = w.feature("protocol", ["none", "declared", "tf", "autodiff"])
        if self.protocol == "none" and not self.inside:
            # Not differentiated: its derivative ends here.
            self.used = [w.assign(scope, "stop", n) for n in self.used]
        if self.protocol == "tf":  # its rule tells them apart by identity, which these do not have
            self.used = [n for n in self.used if n not in w.stopped]
        if not self.used:
            self.protocol = "none"
        others = [n for n in names if n not in self.used]
        if others and w.has("only the rule captures", 0.35):
            self.rule_used = [self.random.choice(others)]
        outer = [n for n, f in scope.functions.items() if not f.pure]
        if outer and w.has("the rule calls a closure", 0.3):
            self.functions = [self.random.choice(outer)]
        if self.protocol == "tf" and w.has("a mask beside the variables", 0.5):
            self.masks = [w.assign(scope, "stop", self.random.choice(names))]
        captured = self.captured
        if not captured:
            return
        self.place = w.feature("capture", [*PLACES, *HOLDERS])
        if self.place in ("class attribute", "class method"):  # its rule is recorded
            self.masks, captured = [], [*self.used, *self.rule_used]
        if self.place in HOLDERS:
            put, get = HOLDERS[self.place]
            for n in captured:
                held = w.name("held")
                scope.lines.append(f"{held} = {put.format(scope.read(n))}")
                self.reads[n] = get.format(None, held)
        elif self.place in (*OBJECTS, "class method"):
            self.reads = {n: f"self_{self.name}.{n}" for n in captured}
        elif self.place != "cell":
            self.reads = {n: n for n in captured}

    def _body(self) -> list[str]:
        """Write what `f` computes; what only its value needs may hold a `while_loop`."""
        w, inner = self.w, self.inner
        # In the order of first use, so that all count.
        read = self.random.sample([*self.used, *self.masks], len(self.used) + len(self.masks))
        self.used = [n for n in read if n in self.used]
        uses = [w.assign(inner, self.random.choice(["sin", "tanh", "scale"]), n) for n in read]
        inner.lines += [f"assert type({s}) is float" for s in self.statics]
        w.fill(inner, self.random.choice([0, 1, 1]))
        residuals = inner.inner()
        residuals.lines, residuals.steps = inner.lines, inner.steps
        self.residuals = residuals
        value = inner.inner(loops=self.protocol != "autodiff")
        value.lines, value.steps = inner.lines, inner.steps
        w.fill(value, self.random.choice([0, 0, 1]))
        outputs = []
        for i in range(self.random.choice([1, 1, 1, 2])):
            y = w.of_shape(value, self.random.choice(SHAPES))
            for u in uses if i == 0 else []:
                u = w.assign(value, "sum", u) if value.shapes[u] else u
                y = w.assign(value, "multiply", y, w.assign(value, "cos", u))
            outputs.append(w.assign(value, "scale", y))
        inner.shapes |= {n: value.shapes[n] for n in outputs}
        # What a rule knows of `y` is `f`'s own; with a loop in it there is no second derivative.
        hidden = "while_loop" in "".join(inner.lines) and not self.scope.forward
        self.visible_outputs = [] if hidden else outputs
        return outputs

    # the rule

    def _rule(self) -> list[str]:
        w, d = self.w, self.declared
        rule = self.residuals.inner(inside_rule=True, loops=False, depth=self.scope.depth - 1)
        d.rule = rule.steps
        for n in self.rule_used:
            rule.shapes[n] = self.scope.shapes[n]
        rule.shapes |= {n: self.inner.shapes[n] for n in self.visible_outputs}
        for n in self.functions:
            rule.functions[n] = self.scope.functions[n]
        upstreams = self._outputs()
        if self.protocol == "declared":
            self.variables = w.arrange(self.used)
            if w.has("the rule reads its variables", 0.5):
                # By a name of its own: rules inside this one have `variables`, too.
                rule.lines.append(f"{self.name}_variables = variables")
                rule.reads |= dict(paths(self.variables, f"{self.name}_variables"))
        if w.has("recursion", 0.15) and not self.statics and not self.used:
            rule.functions[self.name] = Signature(
                self.name, self.shapes, self.trees, [], None, self.output_tree,
                self.output_shapes, False,
            )  # fmt: skip
            w.call(rule, rule.functions[self.name])
        elif self.functions:
            w.call(rule, rule.functions[self.functions[0]])
        w.fill(rule, self.random.choice([0, 0, 1]))
        moved = [*self.shapes, *(self.used if self.protocol in ("tf", "declared") else [])]
        gradients = {n: self._gradient(rule, n, upstreams) for n in moved}
        result = self._result(gradients)
        if self.protocol == "declared":
            nested = w.chance(0.5) or has_keys(self.variables)  # JAX sorts them: no flat list
            form = self.variables if nested else leaves(self.variables)
            result = f"{result}, {text(form, gradients.get)}"
        elif self.protocol == "tf":
            values = ", ".join(rule.read(n) for n in self.used)
            given = ", ".join(gradients[n] for n in self.used)
            masks = ", ".join(rule.read(n) for n in self.masks)
            result = f"{result}, listed(variables, [{values}], [{given}], [{masks}])"
        return [*rule.lines, f"return {result}"]

    def _outputs(self) -> list[str]:
        """Arrange the outputs; return what each upstream is called."""
        w = self.w
        indices: list[Any] = list(range(len(self.output_shapes)))
        integer = w.has("an integer output", 0.1)
        self.convention = w.feature("convention", ["tf", "tf", "jax"])
        # Names stand for leaves here, so that None can be one.
        tree = w.arrange([*map(str, indices), *(["int"] if integer else [])])
        self.output_tree = filled(tree, lambda n: None if n == "int" else int(n))
        if self.convention == "jax":
            self.upstream_params = ["dy"]
            names = dict(paths(self.output_tree, "dy"))
        else:
            order = leaves(self.output_tree)
            self.upstream_params = [f"d{'_int' if i is None else i}" for i in order]
            names = {i: f"d{i}" for i in order}
        return [names[i] for i in indices]

    def _gradient(self, rule: Scope, name: str, upstreams: list[str]) -> str:
        """Write a linear map of upstreams, and tell the oracle its transpose."""
        if self.w.has("None", 0.08):
            return "None"
        count, to, terms = len(upstreams), rule.shapes[name], []
        for j in self.random.sample(range(count), self.random.randint(1, count)):
            of, dy = self.output_shapes[j], upstreams[j]
            kinds = [k for k, (fits, *_) in MAPS.items() if fits(to, of)]
            if self.w.mode != "reverse":
                kinds = [k for k in kinds if k != "cond on a residual"]
            if not self.w.solves:
                kinds = [k for k in kinds if k != "solved"]
            kind = self.w.feature("rule", kinds)
            _, shapes, pull, push = MAPS[kind]
            residuals = [self.w.of_shape(rule, s) for s in shapes(to, of)]
            x, z = residuals[0], residuals[-1]
            term = pull.format(dy=dy, a=rule.read(x), b=rule.read(z))
            around = self.w.feature("rule in", [*["none"] * 4, "jit", "checkpoint"])
            if around != "none" and dy.isidentifier():
                term = f"jax.{around}(lambda {dy}: {term})({dy})"
            factor = self.random.choice([1.0, 7.0, -3.0])

            def transpose(e: Env, t: Any, p: Any = (push, x, z, factor)) -> Any:
                push, x, z, factor = p
                return scale(factor, push(t, e[x], e[z]))

            self.declared.maps.append((name, j, transpose))
            terms.append(f"{factor} * {term}" if factor != 1.0 else term)
        return " + ".join(terms)

    def _result(self, gradients: dict[str, str]) -> str:
        """Return the gradients of the inputs in one of the forms that a rule may choose."""
        w = self.w
        form = w.feature("form", ["structure", "leaves"])
        several = len(self.shapes) + len(self.statics) > 1
        if form == "leaves" and several and not has_keys(self.trees):  # JAX sorts them
            leaves = [gradients[n] for n in self.shapes] + ["None"] * len(self.statics)
            return f"[{', '.join(leaves)}]"
        trees = [text(t, gradients.get) for t in self.trees]
        trees += ["None"] * len(self.statics)
        if self.omitted and w.has("None for the default", 0.5):
            captured = self.captured if self.place == "default" else []
            trees += ["None"] * (1 + len(captured))  # of all defaults, or of none
        # A bare None would be a forgotten `return`. Beside a default, a None in a tree may be that
        # of the tree, and the rest for the default.
        single = (
            len(trees) == 1 and trees[0] != "None" and not (self.omitted and "None" in trees[0])
        )
        return trees[0] if single else f"({', '.join(trees)},)"

    # the text of it all

    def _emit(self, rule_lines: list[str]) -> None:
        scope, place, name, captured = self.scope, self.place, self.name, self.captured
        outer = ", ".join(scope.read(n) for n in captured)
        by_name = ", ".join(f"{n}={scope.read(n)}" for n in captured)
        integer = f"jnp.argmax({next(iter(self.shapes))})"
        y = text(self.output_tree, lambda i: integer if i is None else self.declared.outputs[i])
        takes = ["variables"] if self.protocol in ("tf", "declared") else []
        rule = [f"def grad({', '.join([*self.upstream_params, *takes])}):", *indented(rule_lines)]
        body = [*self.inner.lines, *rule, f"return {y}, grad"]

        self_name = f"self_{name}"
        if self.w.has("state", 0.25):  # what nobody reads again
            log = self_name if place == "self" else f"{name}_log"
            rule.insert(1, f"    {log}.noted = {self.upstream_params[0]}")
            note = f"{log}.noted = {next(iter(self.shapes))}"
            body = [*self.inner.lines, note, *rule, f"return {y}, grad"]
            scope.lines += [] if place == "self" else [f"{log} = Record(None)"]
        options = []
        if self.convention == "jax":
            options.append("convention='jax'")
        if self.protocol == "autodiff":
            options.append("variables='autodiff'")
        if self.protocol == "declared":
            of_self = place in ("self", "pytree self")
            read = self.reads.get if of_self else scope.read
            prefix = f"lambda {self_name}: " if of_self else ""
            options.append(f"variables={prefix}{text(self.variables, read)}")
        params = [*self.params, *self.statics]
        self.by_name = list(params)
        if self.omitted:
            params.append("omitted=None")
        if place in ("default", "keyword default"):
            params += ["*"] if place == "keyword default" else []
            params.append(by_name)

        if place == "cell" and self.w.has("primal", 0.2):
            primal = [*self.inner.lines, f"return {y}"]
            scope.lines.extend([f"def {name}_value({', '.join(params)}):", *indented(primal)])
            options.append(f"primal={name}_value")
        decorate = f"custom_gradient({', '.join(options)})" if options else "custom_gradient"
        if place == "class method":
            order = ["@classmethod", f"@{decorate}"][:: self.random.choice([1, -1])]  # either order
            head = f"def call({', '.join(['cls', *params])}):"
            lines = [*order, head, *indented([f"{self_name} = cls", *body])]
            scope.lines.extend([f"class {name}_class:", *indented(lines)])
            scope.lines.extend(f"{name}_class.{n} = {scope.read(n)}" for n in captured)
            scope.lines.append(f"{name} = {name}_class.call")
        elif place in OBJECTS:
            lines = [f"def __init__({', '.join([self_name, *captured])}):"]
            lines += indented([f"{self_name}.{n} = {n}" for n in captured])
            kinds = ABOVE if place == "pytree self" and not self.statics else ABOVE[:2]
            above = self.w.feature("above a method", kinds)
            lines += [f"@{above}"] if above != "nothing" else []
            head = f"def call({', '.join(['self', *params])}):"
            lines += [f"@{decorate}", head, *indented([f"{self_name} = self", *body])]
            scope.lines.extend([f"class {name}_class:", *indented(lines)])
            if place == "pytree self":
                scope.lines.append(f"register({name}_class, {captured!r})")
            scope.lines.append(f"{name} = {name}_class({outer}).call")
        else:
            head = f"def {name}({', '.join(params)}):"
            scope.lines.extend([f"@{decorate}", head, *indented(body)])


class ProgramWriter(Writer):
    """Writes all kinds of statements."""

    def define(self, scope: Scope, pure: bool = False) -> Signature:
        return Definition(self, scope, pure).write()
