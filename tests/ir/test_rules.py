"""Rules as lines: how they are read, and that every operator's factors are those of the line its entry declares."""

import pytest
from oracle_cases import CASES

from ir.graph import Tensor
from ir.operators import KINDS, make_operator
from ir.operators.line import BROADCAST, Line, Loop, Operand, Run, parse
from ir.zoo import build


def test_a_line_is_operands_and_results_of_dims():
    line = parse("... m k+!, [{rows axis@softmax}], 1 (g c!)* -> (), ... m")
    assert line.inputs[0] == Operand((BROADCAST, (Loop("m"),), (Loop("k", ("+", "!")),)))
    assert line.inputs[1] == Operand((Run(((Loop("rows"),), (Loop("axis", ("@softmax",)),))),), is_optional=True)
    assert line.inputs[2] == Operand(((), (Loop("g"), Loop("c", ("!",)))), is_repeated=True)
    assert line.outputs == (Operand(()), Operand((BROADCAST, (Loop("m"),))))
    assert line.collectives == {"softmax"}
    assert parse("-> size!") == Line((), (Operand(((Loop("size", ("!",)),),)),))


@pytest.mark.parametrize("text", ["m k", "m{ -> m", "m -> (n", "m% -> m", "4 -> m"])
def test_a_line_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=r"rule|dims|loop"):
        parse(text)


class Matcher:
    """Searches for an assignment of an operator's factors to the loops of a line."""

    def __init__(self, factors, line):
        self.factors = factors
        self.marks = {}
        for operand in (*line.inputs, *line.outputs):
            for dim in operand.dims:
                for choice in dim.choices if isinstance(dim, Run) else (dim,):
                    for loop in choice:
                        self.marks[loop.name] = self.marks.get(loop.name, ()) or loop.marks
        self.line = line

    def matches(self, inputs, outputs):
        return any(True for named in self.tensors(self.line.inputs, inputs, {})
                   for _ in self.results(outputs, named))  # fmt: skip

    def results(self, outputs, named):
        if not outputs:
            yield named
            return
        (number, dims), *rest = outputs
        specs = self.line.outputs
        spec = specs[min(number, len(specs) - 1)] if specs[-1].is_repeated else specs[number]
        for more in self.dims(spec.dims, dims, named):
            yield from self.results(rest, more)

    def tensors(self, specs, tensors, named):
        if not specs:
            if not tensors:
                yield named
            return
        spec, rest = specs[0], specs[1:]
        if spec.is_optional or spec.is_repeated:
            yield from self.tensors(rest, tensors, named)
        if tensors:
            for more in self.dims(spec.dims, tensors[0], named):
                yield from self.tensors(specs if spec.is_repeated else rest, tensors[1:], more)

    def dims(self, specs, dims, named):
        if not specs:
            if not dims:
                yield named
            return
        spec, rest = specs[0], specs[1:]
        if not isinstance(spec, Run):
            if dims:
                for more in self.loops(spec, dims[0], named, in_braces=False):
                    yield from self.dims(rest, dims[1:], more)
            return
        if dims:
            choices = ((Loop("..."),),) if spec == BROADCAST else spec.choices
            for choice in choices:
                for more in self.loops(choice, dims[0], named, in_braces=True):
                    yield from self.dims(specs, dims[1:], more)
        yield from self.dims(rest, dims, named)

    def loops(self, choice, factors, named, *, in_braces):
        """Assignments of the factors of one dim; one in braces may be made of several of the same name (views)."""
        own = [f for f in factors if not self.factors[f].is_batch]
        batch = [f for f in factors if self.factors[f].is_batch]
        if batch and not all(self.allows_batch(self.factors[batch[0]], self.marks.get(o.name, ())) for o in choice[:1]):
            return
        yield from self.assign(choice, own, named, many=in_braces and len(choice) == 1)

    def assign(self, choice, own, named, *, many):
        if not choice:
            if not own:
                yield named
            return
        loop, rest = choice[0], choice[1:]
        yield from self.assign(rest, own, named, many=many)  # a loop of size 1 has no factor
        if own and named.get(own[0], loop.name) == loop.name and self.allows(self.factors[own[0]], loop.name):
            more = {**named, own[0]: loop.name}
            yield from self.assign(choice if many else rest, own[1:], more, many=many)

    def allows(self, factor, name):
        if len(name) == 1 and factor.name != name:
            return False
        marks = self.marks.get(name, ())
        found = self.own_marks(factor)
        return found <= {m.replace("!!", "!") for m in marks} if found else not marks or "?" in marks

    def allows_batch(self, batch, marks):
        """Samples bear the marks of the dim that carries them, but `!`."""
        required = {m.replace("!!", "!") for m in marks} - ({"!"} if "!!" not in marks else set())
        return "?" in marks or not required or bool(required & self.own_marks(batch))

    @staticmethod
    def own_marks(factor):
        collective = {f"@{factor.collective.name}"} if factor.collective else set()
        return collective | ({"!"} if factor.fixed else set()) | ({"+"} if factor.summed else set())


def follows_its_line(op):
    rule = op.rule
    results = dict(op.attributes).get("results", range(len(op.outputs)))
    outputs = list(zip(results, rule.outputs, strict=True))
    return any(Matcher(rule.factors, line).matches(rule.inputs, outputs) for line in KINDS[op.kind].lines)


def spelled(op):
    rule = op.rule
    return f"{op.kind}: {[f.name for f in rule.factors]} {rule.inputs} -> {rule.outputs}, {KINDS[op.kind].rules}"


def made(case):
    dtypes = {i: "int64" if isinstance(given, int) else "float32" for i, given in case.data.items()}
    inputs = [
        None if shape is None else
        Tensor(name=str(i), shape=shape, dtype=dtypes.get(i, "float32"), batch_dim=case.places[i],
               role="parameter" if i in case.parameters else "activation")
        for i, shape in enumerate(case.shapes)
    ]  # fmt: skip
    return make_operator(
        case.kind, name="op", inputs=inputs, outputs=case.outputs, attributes=case.attributes, opset=case.opset
    ).operator


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind} {case.id}".strip())
def test_factors_are_those_of_the_declared_line(case):
    op = made(case)
    assert follows_its_line(op), spelled(op)


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "mixtral-8x7b", "bert-base", "vit-b", "t5-small", "resnet50"])
def test_factors_of_known_models_are_those_of_their_lines(name):
    wrong = {spelled(op) for op in build(name) if not follows_its_line(op)}
    assert not wrong


def test_a_wrong_line_is_noticed():
    op = made(next(case for case in CASES if case.kind == "Softmax"))
    rule = op.rule
    for text in ("{rows axis} -> {rows axis}", "{rows axis!} -> {rows axis}", "{rows@softmax} -> {rows}", "m n -> m n"):
        assert not Matcher(rule.factors, parse(text)).matches(rule.inputs, [(0, rule.outputs[0])])
