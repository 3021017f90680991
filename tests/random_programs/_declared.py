"""Writes decorated functions: what they take, close over and return, and their rules."""

import functools
from typing import Any

import numpy as np

from ._oracle import Declared, Env, Function, add, base, bilinear, linear, mul, scale, smooth
from ._vocabulary import CONSTANT_NAMES, HOLDERS, PLACES, SHAPES, choose
from ._writer import Scope, Signature, Writer, indented, leaves, paths, text


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
        w, scope = self.w, self.scope
        self._inputs()
        self._captures()
        d = self.declared = Declared(self.name, list(self.shapes))
        inner = self.inner = scope.inner(depth=scope.depth - 1, loops=False)
        # What it may use: constants, its inputs, and what it closes over.
        inner.shapes = {n: s for n, s in scope.shapes.items() if n.startswith("C")}
        inner.shapes |= self.shapes | {n: scope.shapes[n] for n in self.used}
        inner.functions = {n: f for n, f in scope.functions.items() if f.pure}
        inner.reads |= self.reads
        for tree, p in zip(self.trees, self.params, strict=True):
            inner.lines.extend(f"{n} = {path}" for n, path in paths(tree, p) if n != path)
        d.body, d.autodiff = inner.steps, self.protocol == "autodiff"
        if w.exact:
            outputs, maps = self._exact()
            given = self.protocol in ("tf", "declared")
            self.gradients = {n: m for n, m in maps.items() if given or n in self.shapes}
        else:
            outputs = self._body()
        d.outputs = outputs
        self.output_shapes = [inner.shapes[n] for n in outputs]
        rule_lines = self._rule()
        self._emit(rule_lines)

        pure = [n for n, f in scope.functions.items() if f.pure]

        def make(env: Env) -> None:
            names = [*self.used, *self.rule_used, *self.functions, *pure, *CONSTANT_NAMES]
            captured = {n: env[n] for n in names}
            env[self.name] = Function(d, captured)

        scope.steps.append(make)
        captured_nothing = not (self.used or self.rule_used or self.functions)
        signature = Signature(
            self.name, self.shapes, self.trees, self.static_values, self.by_name,
            self.output_tree, self.output_shapes, captured_nothing,
        )  # fmt: skip
        scope.functions[self.name] = signature
        return signature

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
        self.static_params, self.static_values = [], []
        if w.has("static arguments", 0.2):
            self.static_params = [w.name("s"), w.name("s")]
            self.static_values = [repr(self.random.choice(["sin", "cos"])), "2.5"]
        self.by_name = None

    def _captures(self) -> None:
        """Choose what it closes over, in which places, and who gives the gradients."""
        w, scope = self.w, self.scope
        names = [n for n in scope.shapes if not n.startswith("C")]
        self.protocol, self.used, self.rule_used, self.functions = "none", [], [], []
        self.reads: dict[str, str] = {}
        if self.pure or not names or w.chance(0.25):
            self.place = "cell"
            return
        self.used = self.random.sample(names, min(len(names), self.random.choice([0, 1, 1, 2])))
        self.protocol = w.feature("protocol", ["none", "declared", "tf", "autodiff"])
        if w.exact and self.protocol == "none" and not self.inside:
            self.used = []
        if self.protocol == "none" and not self.inside:
            # Not differentiated: its derivative ends here.
            self.used = [w.assign(scope, "stop", n) for n in self.used]
        if not self.used:
            self.protocol = "none"
        others = [n for n in names if n not in self.used]
        if others and not w.exact and w.has("only the rule captures", 0.35):
            self.rule_used = [self.random.choice(others)]
        outer = [n for n, f in scope.functions.items() if not f.pure]
        if outer and not w.exact and w.has("the rule calls a closure", 0.3):
            self.functions = [self.random.choice(outer)]
        if not (self.used or self.rule_used):
            self.place = "cell"
            return
        self.place = w.feature("capture", [*PLACES, *HOLDERS])
        captured = [*self.used, *self.rule_used]
        if self.place in HOLDERS:
            put, get = HOLDERS[self.place]
            for n in captured:
                held = w.name("held")
                scope.lines.append(f"{held} = {put.format(scope.read(n))}")
                self.reads[n] = get.format(None, held)
        elif self.place in ("self", "callable object", "class method"):
            self.reads = {n: f"self_{self.name}.{n}" for n in captured}
        elif self.place not in ("cell", "static method"):
            self.reads = {n: n for n in captured}

    def _body(self) -> list[str]:
        """Write what `f` computes; what only its value needs may hold a `while_loop`."""
        w, inner = self.w, self.inner
        # In the order of first use, so that all count.
        self.used = self.random.sample(self.used, len(self.used))
        uses = [w.assign(inner, self.random.choice(["sin", "tanh", "scale"]), n) for n in self.used]
        if self.static_params:
            self._statics()
        w.fill(inner, self.random.choice([0, 1, 1]))
        residuals = inner.inner()
        residuals.lines, residuals.steps = inner.lines, inner.steps
        if self.rule_used and w.has("a residual of what only the rule captures", 0.5):
            for n in self.rule_used:
                residuals.shapes[n] = self.scope.shapes[n]
                w.assign(residuals, "sin", n)
        self.residuals = residuals
        value = inner.inner(loops=self.protocol != "autodiff")
        value.lines, value.steps = inner.lines, inner.steps
        w.fill(value, self.random.choice([0, 0, 1]))
        count = self.random.choice([1, 1, 1, 2])
        outputs = []
        for i in range(count):
            shape = self.random.choice(SHAPES)
            y = w.of_shape(value, shape)
            for u in uses if i == 0 else []:
                u = w.assign(value, "sum", u) if value.shapes[u] else u
                y = w.assign(value, "multiply", y, w.assign(value, "cos", u))
            outputs.append(w.assign(value, "scale", y))
        inner.shapes |= {n: value.shapes[n] for n in outputs}
        # What a rule knows of `y` is `f`'s own; with a loop in it there is no second derivative.
        hidden = "while_loop" in "".join(inner.lines) and not self.scope.forward
        self.visible_outputs = [] if hidden else outputs
        return outputs

    def _statics(self) -> None:
        w, inner = self.w, self.inner
        mode, factor = self.static_params
        x = w.pick(inner)
        name = w.name("v")
        chosen = eval(self.static_values[0])
        same = f"type({factor}) is float" if w.has("float as it is", 0.5) else "True"
        inner.lines.append(f"assert isinstance({mode}, str) and {same}")
        inner.lines.append(
            f"{name} = {factor} * jnp.{chosen}({inner.read(x)}) if {mode} == {chosen!r} else None"
        )
        inner.shapes[name] = inner.shapes[x]

        def run(env: Env) -> None:
            env[name] = scale(2.5, smooth(chosen, env[x]))

        inner.steps.append(run)

    def _exact(self) -> tuple[list[str], dict[str, list[Any]]]:
        """Write `y = sin(x) * cos(sum(u)) ...` over all inputs and used values, and its rule."""
        w, inner = self.w, self.inner
        self.used = self.random.sample(self.used, len(self.used))
        first, *others = [*self.used, *self.shapes]
        y = w.assign(inner, "sin", first)
        slope = w.assign(inner, "cos", first)
        sums = []
        for n in others:
            s = w.assign(inner, "sum", n) if inner.shapes[n] else n
            sums.append((n, w.assign(inner, "tanh", s), s))
        product = y
        for _, t, _ in sums:
            product = w.assign(inner, "multiply", product, t)
        for _, t, _ in sums:
            slope = w.assign(inner, "multiply", slope, t)
        maps: dict[str, list[Any]] = {first: [(0, "elementwise", slope)]}
        for n, t, s in sums:
            rest = y
            for m, u, _ in sums:
                if m != n:
                    rest = w.assign(inner, "multiply", rest, u)
            squared = w.assign(inner, "multiply", t, t)
            one = w.assign(inner, "cos", w.assign(inner, "subtract", s, s))
            factor = w.assign(inner, "subtract", one, squared)
            rest = w.assign(inner, "multiply", rest, factor)
            maps[n] = [(0, "total", rest)]
        self.residuals = inner
        self.visible_outputs = []
        return [product], maps

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
        self.output_tree, upstreams = self._outputs()
        self.variables_text = None
        if self.protocol == "declared":
            self.variables = w.arrange(self.used)
            if w.has("the rule reads its variables", 0.5):
                rule.reads |= dict(paths(self.variables, "variables"))
        if not w.exact:
            if w.has("recursion", 0.15) and not self.static_params and not self.used:
                rule.functions[self.name] = Signature(
                    self.name, self.shapes, self.trees, [], None, self.output_tree,
                    self.output_shapes, False,
                )  # fmt: skip
                w.call(rule, rule.functions[self.name])
            elif self.functions:
                w.call(rule, rule.functions[self.functions[0]])
            w.fill(rule, self.random.choice([0, 0, 1]))
            self.gradients = self._maps(rule)
        gradients = {
            n: " + ".join(self._term(rule, n, *m, upstreams) for m in maps) if maps else "None"
            for n, maps in self.gradients.items()
        }
        result = self._result(gradients)
        if self.protocol == "declared":
            form = self.variables if w.chance(0.5) else leaves(self.variables)
            result = f"{result}, {text(form, gradients.get)}"
        elif self.protocol == "tf":
            values = ", ".join(rule.read(n) for n in self.used)
            given = ", ".join(gradients[n] for n in self.used)
            result = f"{result}, listed(variables, [{values}], [{given}])"
        return [*rule.lines, f"return {result}"]

    def _outputs(self) -> tuple[Any, list[str]]:
        """Arrange the outputs; return their tree and what each upstream is called."""
        w = self.w
        count = len(self.output_shapes)
        indices: list[Any] = list(range(count))
        self.integer = not w.exact and w.has("an integer output", 0.1)
        self.convention = w.feature("convention", ["tf", "tf", "jax"])
        # Names stand for leaves here, so that None can be one.
        tree: Any = w.arrange([*map(str, indices), *(["int"] if self.integer else [])])
        if w.exact:
            tree = "0"

        def numbers(tree: Any) -> Any:
            if isinstance(tree, dict):
                return {k: numbers(v) for k, v in tree.items()}
            if isinstance(tree, (list, tuple)):
                return type(tree)(numbers(t) for t in tree)
            return None if tree == "int" else int(tree)

        result = numbers(tree)
        if self.convention == "jax":
            self.upstream_params = ["dy"]
            names = dict(paths(result, "dy"))
        else:
            order = leaves(result)
            self.upstream_params = [f"d{'_int' if i is None else i}" for i in order]
            names = {i: f"d{i}" for i in order}
        return result, [names[i] for i in indices]

    def _maps(self, rule: Scope) -> dict[str, list[Any]]:
        """Choose a linear map from the upstreams to each gradient."""
        w = self.w
        found: dict[str, list[Any]] = {}
        moved = [*self.shapes, *(self.used if self.protocol in ("tf", "declared") else [])]
        for n in moved:
            maps = []
            if not w.has("None", 0.08):
                count = len(self.output_shapes)
                for j in self.random.sample(range(count), self.random.randint(1, count)):
                    maps.append((j, *self._map(rule, rule.shapes[n], self.output_shapes[j])))
            found[n] = maps
        return found

    def _map(self, rule: Scope, to: tuple[int, ...], of: tuple[int, ...]) -> tuple[Any, ...]:
        w = self.w
        kinds = ["rank one"]
        if to == of:
            kinds += ["elementwise"] * 2
            if to and len(to) == 1:
                kinds += ["flipped", "scanned", "mapped"]
            kinds += ["cond", "where"]
            if w.mode == "reverse":
                kinds += ["cond on a residual"] * 2
        if not of:
            kinds += ["spread"] * 2
        if not to:
            kinds += ["total"] * 2
        if (to, of) in [((2,), (3,)), ((3,), (2,))]:
            kinds += ["matrix"] * 2
        if to == (2, 3) and len(of) == 1:
            kinds += ["outer"] * 2
        kind = w.feature("rule", kinds)
        two = ("scanned", "cond", "where", "cond on a residual")
        if kind in ("elementwise", "flipped", "mapped", *two):
            shapes = [of, of] if kind in two else [of]
        elif kind == "spread":
            shapes = [to]
        elif kind == "total":
            shapes = [of]
        elif kind == "matrix":
            shapes = [(2, 3)]
        elif kind == "outer":
            shapes = [(3,) if of == (2,) else (2,)]
        else:
            shapes = [of, to]
        return kind, *(w.of_shape(rule, s) for s in shapes)

    def _term(self, rule: Scope, name: str, j: int, kind: str, *args: Any) -> str:
        """Return the text of one linear map, and tell the oracle its transpose."""
        *residuals, upstreams = args
        dy = upstreams[j]
        a = rule.read(residuals[0])
        b = rule.read(residuals[-1])
        x, z = residuals[0], residuals[-1]
        of, to = self.output_shapes[j], rule.shapes.get(name, self.inner.shapes.get(name))
        factor = 1.0 if self.w.exact else self.random.choice([1.0, 7.0, -3.0])
        dot = functools.partial(bilinear, lambda p, q: np.sum(p * q))
        matmul = functools.partial(bilinear, np.matmul)

        def flip(v: Any) -> Any:
            return linear(lambda p: p[::-1], v)

        if kind == "elementwise":
            pull, push = f"{dy} * {a}", lambda e, t: mul(t, e[x])
        elif kind == "flipped":
            pull, push = f"({dy} * {a})[::-1]", lambda e, t: mul(flip(t), e[x])
        elif kind == "mapped":
            pull, push = f"jax.vmap(lambda d, r: r * d)({dy}, {a})", lambda e, t: mul(t, e[x])
        elif kind == "scanned":
            pull = (
                f"lax.scan(lambda c, r: (c + r * {dy}, None), jnp.zeros_like({dy}), "
                f"jnp.stack([{a}, {b}]))[0]"
            )
            push = lambda e, t: mul(t, add(e[x], e[z]))  # noqa: E731
        elif kind in ("cond", "cond on a residual"):
            # Mapped over a condition, `lax.cond` becomes what JAX cannot transpose.
            condition = a if kind == "cond on a residual" else "C"
            branches = f"lambda d: d * {a}, lambda d: 2.0 * d * {b}"
            pull = f"lax.cond(jnp.sum({condition}) > 0.2, {branches}, {dy})"

            def push(e: Env, t: Any) -> Any:
                chosen = np.sum(base(e[x if condition == a else "C"])) > 0.2
                return mul(t, e[x]) if chosen else scale(2.0, mul(t, e[z]))
        elif kind == "where":
            pull = f"jnp.where({a} > 0.1, {dy} * {a}, 2.0 * {dy} * {b})"

            def push(e: Env, t: Any) -> Any:
                return choose(e[x], mul(t, e[x]), scale(2.0, mul(t, e[z])))
        elif kind == "spread":
            pull, push = f"{dy} * {a}", lambda e, t: dot(t, e[x])
        elif kind == "total":
            pull, push = f"jnp.sum({dy} * {a})", lambda e, t: mul(e[x], t)
            if to:  # of an exact rule: the gradient by each entry of a sum
                pull = f"jnp.sum({dy} * {a}) * jnp.ones({to})"
                push = lambda e, t: mul(e[x], linear(np.sum, t))  # noqa: E731
        elif kind == "matrix" and of == (3,):
            pull, push = f"{a} @ {dy}", lambda e, t: matmul(t, e[x])
        elif kind == "matrix":
            pull, push = f"{dy} @ {a}", lambda e, t: matmul(e[x], t)
        elif kind == "outer" and of == (2,):
            pull, push = f"jnp.outer({dy}, {a})", lambda e, t: matmul(t, e[x])
        elif kind == "outer":
            pull, push = f"jnp.outer({a}, {dy})", lambda e, t: matmul(e[x], t)
        else:
            pull = f"{b} * jnp.sum({a} * {dy})"
            push = lambda e, t: mul(e[x], dot(e[z], t))  # noqa: E731
        around = "none"
        if not self.w.exact:
            around = self.w.feature("rule in", [*["none"] * 4, "jit", "checkpoint"])
        if around != "none" and dy.isidentifier():
            pull = f"jax.{around}(lambda {dy}: {pull})({dy})"
        self.declared.maps.append((name, j, lambda e, t: scale(factor, push(e, t))))
        return f"{factor} * {pull}" if factor != 1.0 else pull

    def _result(self, gradients: dict[str, str]) -> str:
        """Return the gradients of the inputs in one of the forms that a rule may choose."""
        w = self.w
        form = w.feature("form", ["structure", "leaves"])
        if self.static_params and not w.has("leaves beside a number", 0.5):
            form = "structure"
        if form == "leaves" and len(self.shapes) + len(self.static_params) > 1:
            return "[" + ", ".join(gradients[n] for n in self.shapes) + "]"
        trees = [text(t, gradients.get) for t in self.trees]
        trees += ["None"] * (len(self.static_params) + (self.place == "argument"))
        return trees[0] if len(trees) == 1 else f"({', '.join(trees)})"

    # the text of it all

    def _emit(self, rule_lines: list[str]) -> None:
        scope, place, name = self.scope, self.place, self.name
        captured = [*self.used, *self.rule_used]
        outer = ", ".join(scope.read(n) for n in captured)
        by_name = ", ".join(f"{n}={scope.read(n)}" for n in captured)
        integer = f"jnp.argmax({next(iter(self.shapes))})"
        outputs = self.declared.outputs
        y = text(self.output_tree, lambda i: integer if i is None else outputs[i])
        takes = ["variables"] if self.protocol in ("tf", "declared") else []
        rule = [f"def grad({', '.join([*self.upstream_params, *takes])}):", *indented(rule_lines)]
        body = [*self.inner.lines, *rule, f"return {y}, grad"]

        self_name = f"self_{name}"
        options = []
        if self.convention == "jax":
            options.append("convention='jax'")
        if self.protocol == "autodiff":
            options.append("variables='autodiff'")
        if self.protocol == "declared":
            prefix = f"lambda {self_name}: " if place == "self" else ""
            read = self.reads.get if place == "self" else scope.read
            options.append(f"variables={prefix}{text(self.variables, read)}")
        decorate = f"custom_gradient({', '.join(options)})" if options else "custom_gradient"

        params = [*self.params, *self.static_params]
        self.by_name = None if place == "argument" else list(params)
        if place == "argument":
            body = [f"{', '.join(captured)}, = fetch()", *body]
            params.append("fetch")
        elif place in ("default", "keyword default"):
            params += ["*"] if place == "keyword default" else []
            params.append(by_name)
        elif place == "keyword":
            params += ["*", *captured]
        elif place == "partial of f":
            params = [*captured, *params]

        if place == "cell" and self.w.has("primal", 0.2):
            primal = [*self.inner.lines, f"return {y}"]
            scope.lines.extend([f"def {name}_value({', '.join(params)}):", *indented(primal)])
            decorate = decorate.removesuffix(")") if options else f"{decorate}("
            decorate += f"{', ' if options else ''}primal={name}_value)"
        if place in ("static method", "class method"):
            # In either order.
            orders = [[f"@{place.replace(' ', '')}", f"@{decorate}"], ["", ""]]
            orders[1] = orders[0][::-1]
            takes_class = [self_name] if place == "class method" else []
            scope.lines.append(f"class {name}_class:")
            lines = [*self.random.choice(orders)]
            lines += [f"def call({', '.join([*takes_class, *params])}):", *indented(body)]
            scope.lines.extend(indented(lines))
            if takes_class:
                values = [f"{name}_class.{n} = {scope.read(n)}" for n in captured]
                scope.lines.extend(values)
            scope.lines.append(f"{name} = {name}_class.call")
        elif place in ("self", "callable object"):
            method, made = ("call" if place == "self" else "__call__"), f"{name}_class({outer})"
            scope.lines.append(f"class {name}_class:")
            init = [f"{self_name}.{n} = {n}" for n in captured]
            lines = [f"def __init__({', '.join([self_name, *captured])}):", *indented(init)]
            lines += [f"@{decorate}"] if place == "self" else []
            lines += [f"def {method}({', '.join([self_name, *params])}):", *indented(body)]
            scope.lines.extend(indented(lines))
            made = f"{made}.call" if place == "self" else f"{decorate}({made})"
            scope.lines.append(f"{name} = {made}")
        elif place in ("keyword", "argument", "partial of f"):
            f = f"{name}_f"
            scope.lines.extend([f"def {f}({', '.join(params)}):", *indented(body)])
            made = {
                "keyword": f"functools.partial({decorate}({f}), {by_name})",
                "argument": f"functools.partial(lambda g, h, *a: h(*a, g), "
                f"(lambda a: lambda: a)(({outer},)), {decorate}({f}))",
                "partial of f": f"{decorate}(functools.partial({f}, {outer}))",
            }
            scope.lines.append(f"{name} = {made[place]}")
        else:
            head = f"def {name}({', '.join(params)}):"
            scope.lines.extend([f"@{decorate}", head, *indented(body)])


class ProgramWriter(Writer):
    """Writes all kinds of statements."""

    def define(self, scope: Scope, pure: bool = False) -> Signature:
        return Definition(self, scope, pure).write()
