"""Writes decorated functions: what they take, close over and return, and their rules.

A rule is a sum of linear maps of the upstreams, whose residuals are random expressions: no rule is
the true derivative.
"""

from ._vocabulary import HOLDERS, MAPS, SHAPES
from ._writer import filled, has_keys, indented, leaves, paths, text

# These concern the whole function. "cell" reads the value by its name in the enclosing scope.
PLACES = ["cell", "cell", "default", "keyword default", "self", "pytree self", "class method"]
ABOVE = ["nothing", "logged", "jax.jit", "jax.checkpoint", "jitted_checkpoint"]  # a method
OBJECTS = ("self", "pytree self")  # what holds the captured values itself


class Definition:
    """Writes one decorated function, and says how it is called."""

    def __init__(self, writer, scope, pure=False):
        self.w, self.scope, self.random, self.pure = writer, scope, writer.random, pure
        self.name = writer.name("h")
        if scope.inside_rule:
            writer.features.add("written in a rule")
        self._inputs()
        self._captures()
        inner = self.inner = scope.inner(depth=scope.depth - 1, loops=False)
        # What it may use: constants, its inputs, and what it closes over.
        inner.shapes = {n: s for n, s in scope.shapes.items() if n.startswith("C")}
        inner.shapes |= self.shapes | {n: scope.shapes[n] for n in [*self.used, *self.masks]}
        inner.functions = {n: f for n, f in scope.functions.items() if f.is_pure}
        inner.reads |= self.reads
        for tree, p in zip(self.trees, self.params, strict=True):
            inner.lines.extend(f"{n} = {path}" for n, path in paths(tree, p) if n != path)
        self.outputs = self._body()
        self.output_shapes = [inner.shapes[n] for n in self.outputs]
        self._emit(self._rule())
        scope.functions[self.name] = self

    @property
    def is_pure(self):
        """Return whether it closes over nothing that is traced."""
        return not (self.captured or self.functions)

    @property
    def captured(self):
        return [*self.used, *self.masks, *self.rule_used]

    def _inputs(self):
        w = self.w
        names = [w.name("v") for _ in range(self.random.choice([1, 1, 2, 2, 3]))]
        shapes = {n: self.random.choice(SHAPES) for n in names}
        cut = self.random.randrange(1, len(names) + 1)
        groups = [g for g in (names[:cut], names[cut:]) if g]
        if w.chance(0.5):
            groups = [[n] for n in names]
        self.trees = [w.arrange(g) for g in groups]
        # A tree that is a bare name is the parameter itself.
        self.params = [t if isinstance(t, str) else w.name("p") for t in self.trees]
        self.shapes = {n: shapes[n] for n in leaves(self.trees)}
        self.statics = [w.name("s")] if w.has("a static argument", 0.2) else []
        self.omitted = w.has("an omitted default", 0.15)

    def _captures(self):
        """Choose what it closes over, in which places, and who gives the gradients."""
        w, scope, names = self.w, self.scope, self.scope.names()
        self.used, self.masks, self.rule_used, self.functions = [], [], [], []
        self.protocol, self.place, self.reads = "none", "cell", {}
        if self.pure or not names or w.chance(0.25):
            return
        self.used = self.random.sample(names, min(len(names), self.random.choice([0, 1, 1, 2])))
        self.protocol = w.feature("protocol", ["none", "declared", "tf", "autodiff"])
        if self.protocol == "none" and not scope.inside_rule:
            # Not differentiated: its derivative ends here.
            self.used = [w.assign(scope, "stop", n) for n in self.used]
        if self.protocol == "tf":  # its rule tells them apart by identity, which these do not have
            self.used = [n for n in self.used if n not in w.stopped]
        if not self.used:
            self.protocol = "none"
        others = [n for n in names if n not in self.used]
        if others and w.has("only the rule captures", 0.35):
            self.rule_used = [self.random.choice(others)]
        outer = [n for n, f in scope.functions.items() if not f.is_pure]
        if outer and w.has("the rule calls a closure", 0.3):
            self.functions = [self.random.choice(outer)]
        if self.protocol == "tf" and w.has("a mask beside the variables", 0.5):
            # Nothing differentiates these: they are no variables.
            self.masks = [w.assign(scope, "stop", self.random.choice(names))]
        if not self.captured:
            return
        self.place = w.feature("capture", [*PLACES, *HOLDERS])
        if self.place in ("class attribute", "class method"):  # its rule is recorded
            self.masks = []
        for n in self.captured:
            if self.place in HOLDERS:
                put, get = HOLDERS[self.place]
                held = w.name("held")
                scope.lines.append(f"{held} = {put.format(scope.read(n))}")
                self.reads[n] = get.format(None, held)
            elif self.place in (*OBJECTS, "class method"):
                self.reads[n] = f"self_{self.name}.{n}"
            elif self.place != "cell":
                self.reads[n] = n

    def _body(self):
        """Write what `f` computes; what only its value needs may hold a `while_loop`."""
        w, inner = self.w, self.inner
        # In the order of first use, so that all count.
        read = self.random.sample([*self.used, *self.masks], len(self.used) + len(self.masks))
        self.used = [n for n in read if n in self.used]
        uses = [w.assign(inner, self.random.choice(["sin", "tanh", "scale"]), n) for n in read]
        inner.lines += [f"assert type({s}) is float" for s in self.statics]
        w.fill(inner, self.random.choice([0, 1, 1]))
        self.residuals = inner.inner()
        value = inner.inner(lines=inner.lines, loops=self.protocol != "autodiff")
        w.fill(value, self.random.choice([0, 0, 1]))
        outputs = []
        for i in range(self.random.choice([1, 1, 1, 2])):
            y = w.of_shape(value, self.random.choice(SHAPES))
            for u in uses if i == 0 else []:
                cosine = w.assign(value, "cos", w.scalar(value, u))
                y = w.assign(value, "multiply", y, cosine)
            outputs.append(w.assign(value, "scale", y))
        inner.shapes |= {n: value.shapes[n] for n in outputs}
        return outputs

    # the rule

    def _rule(self):
        w, scope = self.w, self.scope
        rule = self.residuals.inner(inside_rule=True, loops=False, depth=scope.depth - 1)
        rule.shapes |= {n: scope.shapes[n] for n in self.rule_used}
        # What a rule knows of `y` is `f`'s own; with a loop in it there is no second derivative.
        if scope.forward or "while_loop" not in "".join(self.inner.lines):
            rule.shapes |= {n: self.inner.shapes[n] for n in self.outputs}
        rule.functions |= {n: scope.functions[n] for n in self.functions}
        upstreams = self._upstreams()
        if self.protocol == "declared":
            self.variables = w.arrange(self.used)
            if w.has("the rule reads its variables", 0.5):
                # By a name of its own: rules inside this one have `variables`, too.
                rule.lines.append(f"{self.name}_variables = variables")
                rule.reads |= dict(paths(self.variables, f"{self.name}_variables"))
        if w.has("recursion", 0.15) and not self.statics and not self.used:
            rule.functions[self.name] = self
            w.call(rule, self)
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
            values, masks = (", ".join(map(rule.read, ns)) for ns in (self.used, self.masks))
            given = ", ".join(gradients[n] for n in self.used)
            result = f"{result}, listed(variables, [{values}], [{given}], [{masks}])"
        return [*rule.lines, f"return {result}"]

    def _upstreams(self):
        """Arrange the outputs; return what each upstream is called."""
        w, count = self.w, len(self.output_shapes)
        integer = ["int"] if w.has("an integer output", 0.1) else []
        self.convention = w.feature("convention", ["tf", "tf", "jax"])
        # Names stand for leaves here, so that None can be one.
        tree = w.arrange([*map(str, range(count)), *integer])
        self.output_tree = filled(tree, lambda n: None if n == "int" else int(n))
        if self.convention == "jax":
            self.upstream_params, names = ["dy"], dict(paths(self.output_tree, "dy"))
        else:
            names = {i: f"d{'_int' if i is None else i}" for i in leaves(self.output_tree)}
            self.upstream_params = [*names.values()]
        return [names[i] for i in range(count)]

    def _gradient(self, rule, name, upstreams):
        """Write a linear map of upstreams."""
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
            _, shapes, linear = MAPS[self.w.feature("rule", kinds)]
            residuals = [rule.read(n) for n in [self.w.of_shape(rule, s) for s in shapes(to, of)]]
            term = linear.format(dy=dy, a=residuals[0], b=residuals[-1])
            around = self.w.feature("rule in", [*["none"] * 4, "jit", "checkpoint"])
            if around != "none" and dy.isidentifier():
                term = f"jax.{around}(lambda {dy}: {term})({dy})"
            factor = self.random.choice([1.0, 7.0, -3.0])
            terms.append(f"{factor} * {term}" if factor != 1.0 else term)
        return " + ".join(terms)

    def _result(self, gradients):
        """Return the gradients of the inputs in one of the forms that a rule may choose."""
        w = self.w
        form = w.feature("form", ["structure", "leaves"])
        several = len(self.shapes) + len(self.statics) > 1
        of_statics = ["None"] * len(self.statics)
        if form == "leaves" and several and not has_keys(self.trees):  # JAX sorts them
            return f"[{', '.join([*map(gradients.get, self.shapes), *of_statics])}]"
        trees = [text(t, gradients.get) for t in self.trees] + of_statics
        if self.omitted and w.has("None for the default", 0.5):
            captured = self.captured if self.place == "default" else []
            trees += ["None"] * (1 + len(captured))  # of all defaults, or of none
        # A bare None would be a forgotten `return`. Beside a default, a None in a tree may be that
        # of the tree, and the rest for the default.
        if len(trees) == 1 and trees[0] != "None" and not (self.omitted and "None" in trees[0]):
            return trees[0]
        return f"({', '.join(trees)},)"

    # the text of it all

    def _emit(self, rule_lines):
        scope, place, name, captured = self.scope, self.place, self.name, self.captured
        takes = ["variables"] if self.protocol in ("tf", "declared") else []
        rule = [f"def grad({', '.join([*self.upstream_params, *takes])}):", *indented(rule_lines)]
        body, first, itself = [*self.inner.lines], next(iter(self.shapes)), f"self_{name}"
        if self.w.has("state", 0.25):  # what nobody reads again
            log = itself if place == "self" else f"{name}_log"
            body.append(f"{log}.noted = {first}")
            rule.insert(1, f"    {log}.noted = {self.upstream_params[0]}")
            scope.lines += [] if place == "self" else [f"{log} = Record(None)"]
        y = text(
            self.output_tree, lambda i: f"jnp.argmax({first})" if i is None else self.outputs[i]
        )
        body += [*rule, f"return {y}, grad"]
        options = ["convention='jax'"] if self.convention == "jax" else []
        if self.protocol == "autodiff":
            options.append("variables='autodiff'")
        if self.protocol == "declared":
            read, prefix = scope.read, ""
            if place in OBJECTS:
                read, prefix = self.reads.get, f"lambda {itself}: "
            options.append(f"variables={prefix}{text(self.variables, read)}")
        params = [*self.params, *self.statics] + ["omitted=None"] * self.omitted
        if place in ("default", "keyword default"):
            params += ["*"] if place == "keyword default" else []
            params.append(", ".join(f"{n}={scope.read(n)}" for n in captured))
        if place == "cell" and self.w.has("primal", 0.2):
            primal = [*self.inner.lines, f"return {y}"]
            scope.lines.extend([f"def {name}_value({', '.join(params)}):", *indented(primal)])
            options.append(f"primal={name}_value")
        decorate = [f"@custom_gradient({', '.join(options)})" if options else "@custom_gradient"]
        if place not in (*OBJECTS, "class method"):
            scope.lines += [*decorate, f"def {name}({', '.join(params)}):", *indented(body)]
            return
        owner = "cls" if place == "class method" else "self"
        lines, method = [], [f"def call({owner}, {', '.join(params)}):"]
        method += indented([f"{itself} = {owner}", *body])
        given = ", ".join(map(scope.read, captured))
        if place == "class method":
            decorate = ["@classmethod", *decorate][:: self.random.choice([1, -1])]  # either order
            after = [f"{name}_class.{n} = {scope.read(n)}" for n in captured]
            after.append(f"{name} = {name}_class.call")
        else:
            lines = [f"def __init__({', '.join([itself, *captured])}):"]
            lines += indented([f"{itself}.{n} = {n}" for n in captured])
            kinds = ABOVE if place == "pytree self" and not self.statics else ABOVE[:2]
            above = self.w.feature("above a method", kinds)
            decorate = [*([f"@{above}"] if above != "nothing" else []), *decorate]
            after = [f"register({name}_class, {captured!r})"] if place == "pytree self" else []
            after.append(f"{name} = {name}_class({given}).call")
        scope.lines += [f"class {name}_class:", *indented([*lines, *decorate, *method]), *after]
