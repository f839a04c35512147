"""The factors of operands and results of one use of a kind, according to a line of `ir.operators.line`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ir.factors import InternalCollective
from ir.graph import Tensor
from ir.operators.line import Line, Loop, Operand, Run
from ir.operators.rule import Dims, Rule


class Unsupported(Exception):
    """An entry cannot express this use of its kind; the message states the reason."""


class Follower:
    """Adds the loops of a line to a rule, in the order in which the line names them.

    It supports dims of one loop each and at most one pair of braces per operand; entries with merged dims build their
    factors themselves. A loop with alternative marks gets none of them: its entry adds the mark.

    Args:
        rule: the rule to which the factors are added.
        where: name in braces -> dims of the operand with that name; all other dims have the first name in the braces.
        sizes: name -> sizes of the dims that only results have; in braces they are inserted in place of the first dim
            that the result lacks.
        collectives: `@name` -> the collective of the mark; a mark that is missing here costs nothing in this use.
    """

    def __init__(
        self,
        rule: Rule,
        where: Mapping[str, Collection[int]],
        sizes: Mapping[str, Sequence[int]],
        collectives: Mapping[str, InternalCollective],
    ) -> None:
        self.rule, self.where, self.sizes, self.collectives = rule, where, sizes, collectives
        self.factors: dict[str, Dims] = {}
        """Name -> factors of each dim with that name."""
        self.braces: list[str] = []
        """Names of the dims in the braces of the first operand that has any, in their order there."""
        self.choices: set[str] = set()
        """The distinct names in those braces."""

    def follow(self, line: Line, tensors: Sequence[Tensor | None]) -> tuple[list[tuple[int, Dims]], list[Dims]]:
        """The factors of operands, with their ONNX positions, and of results.

        Raises:
            Unsupported: an operand is missing, or its dims do not match the line.
        """
        operands = []
        for position, operand in enumerate(line.inputs):
            tensor = tensors[position] if position < len(tensors) else None
            if tensor is not None:
                operands.append((position, self._operand(operand, tensor)))
            elif not operand.is_optional:
                raise Unsupported(f"operand {position} is missing")
        return operands, [self._result(result) for result in line.outputs]

    def _operand(self, operand: Operand, tensor: Tensor) -> Dims:
        loops = self._loops(operand, len(tensor.shape))
        found: Dims = []
        seen: dict[str, int] = {}
        for d, loop in enumerate(loops):
            if loop is None:
                found.append(())
                continue
            count = seen[loop.name] = seen.get(loop.name, 0) + 1
            known = self.factors.setdefault(loop.name, [])
            if len(known) < count:
                known.append(self._marked(loop, self.rule.dim(tensor, d, name=_label(loop))))
            elif self.rule.size(known[count - 1]) != tensor.shape[d]:
                raise Unsupported(f"sizes {self.rule.size(known[count - 1])} and {tensor.shape[d]} differ in dim {d}")
            found.append(known[count - 1])
        return found

    def _loops(self, operand: Operand, rank: int) -> list[Loop | None]:
        """The loop of each dim of an operand; None for a dim of size 1, which has no loop."""
        in_braces = rank - sum(not isinstance(dim, Run) for dim in operand.dims)
        loops: list[Loop | None] = []
        for dim in operand.dims:
            if not isinstance(dim, Run):
                loops.append(dim[0] if dim else None)
                continue
            choices = {choice[0].name: choice[0] for choice in dim.choices}
            names = [name for name in self.braces if name in choices]
            if not names:
                first, *others = choices
                span = range(len(loops), len(loops) + in_braces)
                names = [next((n for n in others if d in self.where.get(n, ())), first) for d in span]
                if not self.choices:
                    self.braces, self.choices = names, set(choices)
            loops += [choices[name] for name in names]
        if len(loops) != rank:
            raise Unsupported(f"an operand has {rank} dims, the rule says {len(loops)}")
        return loops

    def _result(self, result: Operand) -> Dims:
        found: Dims = []
        for dim in result.dims:
            if not isinstance(dim, Run):
                found += self._known(dim[0]) if dim else [()]
                continue
            choices = {choice[0].name: choice[0] for choice in dim.choices if choice}
            instead = [choice for choice in dim.choices if not choice or choice[0].name not in self.choices]
            seen: dict[str, int] = {}
            for name in self.braces:
                number = seen[name] = seen.get(name, 0) + 1
                if name in choices:
                    found.append(self.factors[name][number - 1])
                elif instead and not instead[0]:
                    found.append(())
                elif instead:
                    found += self._known(instead.pop()[0])
        return found

    def _known(self, loop: Loop) -> Dims:
        """The dims with the loop's name in the operands, or new dims if no operand has it."""
        if loop.name not in self.factors:
            made = [self.rule.loop(size, name=_label(loop)) for size in self.sizes[loop.name]]
            self.factors[loop.name] = [self._marked(loop, factors) for factors in made]
        return self.factors[loop.name]

    def _marked(self, loop: Loop, factors: tuple[int, ...]) -> tuple[int, ...]:
        if len(loop.marks) == 1:
            mark = loop.marks[0]
            own = [f for f in factors if mark != "!" or not self.rule.factors[f].is_batch]
            collective = self.collectives.get(mark[1:]) if mark[0] == "@" else None
            self.rule.mark(own, fixed=mark in ("!", "!!"), summed=mark == "+", collective=collective)
        return factors


def _label(loop: Loop) -> str:
    """The name of a loop's factor: empty, so that the factor is numbered, if the loop's name is not a single letter."""
    return loop.name if len(loop.name) == 1 else ""
