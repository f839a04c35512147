"""Fused groups: operators that every trainer runs as one kernel.

Exporters write attention, norms, gated activations, rotary embedding and cross-entropy as chains of small operators. If
these ran one by one, every intermediate tensor would be written to memory and saved for the backward pass. The kernels
of trainers keep intermediate tensors in registers. A group is such a chain: its inner tensors are never written to
memory, and only the tensors in `saved` are saved. The operators stay in the graph with their rules, so each has a
sharding of its own. Groups are recognised by structure, never by names.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from ir.graph import Graph, Operator, once_per_graph
from ir.group_kinds import (
    CURVES,
    LAYOUT,
    PICKED,
    PICKS,
    POINTWISE,
    REDUCTIONS,
    ROTATIONS,
    SAME_SCORES,
    SCORES,
    STATISTICS,
)
from ir.score_chains import MAX_MEMBERS, maker_of_data, scores_before, weights_behind

GroupKind = Literal["attention", "softmax", "norm", "activation", "rotary", "loss"]

BACKWARD_TRAFFIC: dict[GroupKind, float] = {
    "attention": 2.0, "softmax": 1.5, "norm": 2.0, "activation": 1.7, "rotary": 1.0, "loss": 1.0,
}  # fmt: skip
"""Bytes moved backward, in multiples of the bytes of the group's inputs and outputs, counted as in `ir.operators`.
Attention reads q, k, v, o and do and writes dq, dk, dv, which are 8 transfers for 4 inputs and outputs; a gated
activation reads three tensors and writes two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedGroup:
    """Operators that run as one kernel."""

    kind: GroupKind
    members: tuple[int, ...]
    """Indices of operators of the graph, ascending."""
    internal: frozenset[str]
    """Tensors that only members read: they never reach memory."""
    saved: frozenset[str]
    """Tensors that the backward pass of the kernel needs."""
    unfused: FusedGroup | None = None
    """Part of an attention group (scale, mask, softmax) that runs as one kernel if the trainer does not fuse
    attention."""

    runs_backward: bool = True
    """Whether some parameter at or before the members is trained."""

    @property
    def backward_traffic(self) -> float:
        """Bytes moved backward, in multiples of the bytes of the group's inputs and outputs."""
        return BACKWARD_TRAFFIC[self.kind] if self.runs_backward else 0.0


@once_per_graph
def fused_groups(graph: Graph) -> tuple[FusedGroup, ...]:
    """All fused groups of a graph, ordered by their first member; no operator is in two of them."""
    return _Finder(graph).run()


class _Finder:
    """Finds the groups of one graph; an operator belongs to the first group in which it is found."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.taken: set[int] = set()
        self.found: list[FusedGroup] = []

    def run(self) -> tuple[FusedGroup, ...]:
        passes: tuple[tuple[Callable[[int], None], set[str]], ...] = (
            (self._attention, {"Softmax", "Attention"}),
            (self._rotary, {"Neg", "Sub", "RotaryEmbedding"}),
            (self._loss, {"LogSoftmax", "Log", "ReduceLogSumExp", "SoftmaxCrossEntropyLoss"}),
            (self._norm, REDUCTIONS),
            (self._activation, CURVES),
        )
        for find, anchors in passes:
            for index, op in enumerate(self.graph.operators):
                if op.kind in anchors and index not in self.taken and op.is_live:
                    find(index)
        return tuple(sorted(self.found, key=lambda g: g.members[0]))

    # Tensors and regions

    def _op(self, index: int) -> Operator:
        return self.graph.operators[index]

    def _is_constant(self, name: str) -> bool:
        """Whether a tensor depends on neither data nor parameters."""
        maker = self.graph.maker(name)
        return self.graph.tensors[name].role in ("constant", "buffer") if maker is None else maker.is_constant

    def _outputs(self, members: set[int]) -> list[str]:
        """Names of tensors that members write, and that other operators or the user read."""
        graph = self.graph
        return [
            name
            for i in sorted(members)
            for name in self._op(i).outputs
            if name in graph.outputs or any(r not in members for r in graph.consumers[name])
        ]

    def _add(self, kind: GroupKind, members: Iterable[int], unfused: FusedGroup | None = None) -> None:
        chosen = set(members)
        if 1 < len(chosen) <= MAX_MEMBERS and not chosen & self.taken:
            self.taken |= chosen
            self.found.append(self._group(kind, chosen, unfused))

    def _group(self, kind: GroupKind, members: set[int], unfused: FusedGroup | None = None) -> FusedGroup:
        outputs = set(self._outputs(members))
        made = {name for i in members for name in self._op(i).outputs}
        read = {name for i in members for name in self._op(i).inputs} - made
        operands = {n for n in read if n in self.graph.of_parameters and not self.graph.is_weight(n)}
        kept = {"attention": operands | outputs, "softmax": outputs, "rotary": set[str]()}.get(kind, operands)
        runs_backward = any(self.graph.runs_backward(self._op(i)) for i in members)
        return FusedGroup(
            kind=kind,
            members=tuple(sorted(members)),
            internal=frozenset(made - outputs),
            saved=frozenset(kept if runs_backward else ()),
            unfused=unfused,
            runs_backward=runs_backward,
        )

    def _region(
        self, root: str, kinds: set[str], is_side: Callable[[str], bool], of_smaller: Collection[str] = ()
    ) -> list[int]:
        """Operators of `kinds` that depend on `root` and otherwise only on side tensors, ascending.

        Args:
            root: name of the tensor.
            kinds: kinds of operators.
            is_side: whether a tensor is a side tensor.
            of_smaller: further kinds, for operators whose first operand has fewer elements than `root`.
        """
        size = self.graph.tensors[root].num_elements
        inside = {root}
        members: list[int] = []
        queue = list(self.graph.consumers[root])
        heapq.heapify(queue)
        seen = -1
        while queue and len(members) < MAX_MEMBERS:
            index = heapq.heappop(queue)
            op = self._op(index)
            if index <= seen:
                continue
            seen = index
            is_of_smaller = op.kind in of_smaller and self.graph.tensors[op.inputs[0]].num_elements < size
            if not (op.kind in kinds or is_of_smaller) or index in self.taken or not op.is_live:
                continue
            if all(n in inside or is_side(n) for n in op.inputs):
                members.append(index)
                for name in op.outputs:
                    inside.add(name)
                    for reader in self.graph.consumers[name]:
                        heapq.heappush(queue, reader)
        return members

    def _closed(self, region: Sequence[int], anchors: set[int], root: str) -> set[int]:
        """The longest prefix of a region that contains all anchors and writes one tensor, with as many elements as
        `root`; empty if there is none."""
        size = self.graph.tensors[root].num_elements
        for stop in range(len(region), 1, -1):
            members = set(region[:stop])
            if not anchors <= members:
                return set()
            outputs = self._outputs(members)
            if len(outputs) == 1 and self.graph.tensors[outputs[0]].num_elements == size:
                return members
        return set()

    # Attention

    def _attention(self, anchor: int) -> None:
        if self._op(anchor).kind == "Attention":
            members = {anchor} | self._layout_behind(anchor)
            for name in self._op(anchor).inputs[:3]:
                members |= self._layout_before(name, members)
            self._add("attention", members)
            return
        before = scores_before(self.graph, anchor)
        after = weights_behind(self.graph, anchor)
        if before is None or after is None:
            self._plain_softmax(anchor)
            return
        (first, scoring), (second, weighting) = before, after
        middle = {*scoring, anchor, *weighting}
        members = {first, second, *middle}
        if len(self._outputs(members)) != 1:
            self._plain_softmax(anchor)
            return
        for index in (first, second):
            for name in self._op(index).inputs:
                members |= self._layout_before(name, members)
        members |= self._layout_behind(second)
        # Without fused attention the weights are written to memory, and dropout is a kernel of its own.
        dropped = {i for i in weighting if self._op(i).kind == "Dropout"}
        kept = {i for i in weighting if not any(i >= d for d in dropped)}
        self._add("attention", members, self._group("softmax", {*scoring, anchor, *kept}))

    def _plain_softmax(self, anchor: int) -> None:
        """Adds a softmax with the scale and mask before it: one kernel that reads the scores and writes the weights."""
        members = {anchor}
        name = self._op(anchor).inputs[0]
        while True:
            index = maker_of_data(self.graph, name)
            if index is None or self._op(index).kind not in SCORES or len(self.graph.consumers[name]) != 1:
                break
            mains = [n for n in self._op(index).inputs if n in self.graph.of_parameters and not self.graph.is_weight(n)]
            if len(mains) != 1:
                break
            members.add(index)
            name = mains[0]
        self._add("softmax", members)

    def _layout_before(self, name: str, readers: set[int]) -> set[int]:
        """Transposes, repeats of kv heads and scalings before tensor `name` that only attention reads."""
        chain: set[int] = set()
        while True:
            index = maker_of_data(self.graph, name)
            inside = readers | chain
            if index is None or index in self.taken or not set(self.graph.consumers[name]) <= inside:
                return chain
            op = self._op(index)
            mains = [n for n in op.inputs if not self._is_constant(n)]
            if op.kind not in LAYOUT or len(mains) != 1 or self.graph.is_weight(mains[0]):
                return chain
            chain.add(index)
            name = mains[0]

    def _layout_behind(self, index: int) -> set[int]:
        """Transposes and reshapes that put the heads side by side again, after operator `index`."""
        readers = self.graph.consumers[self._op(index).outputs[0]]
        if len(readers) != 1 or self._op(readers[0]).kind not in ("Transpose", "Reshape"):
            return set()
        return {readers[0]} | self._layout_behind(readers[0])

    # Chains of small operators

    def _norm(self, anchor: int) -> None:
        op = self._op(anchor)
        rank = len(self.graph.tensors[op.inputs[0]].shape)
        axes = (2,) if op.kind == "GlobalAveragePool" and rank == 3 else dict(op.attributes).get("axes", ())
        if not isinstance(axes, tuple) or tuple(axes) != tuple(range(rank - len(axes), rank)) or not axes:
            return
        # A variance that is computed as a difference of moments is clipped at zero by a Max.
        kinds = POINTWISE | REDUCTIONS | {"Max"}

        def is_side(name: str) -> bool:
            shape = self.graph.tensors[name].shape
            is_scale = self.graph.is_weight(name) or name in self._of_weights
            return self._is_constant(name) or (is_scale and prod(shape[: -len(axes)]) == 1)

        # The input of the norm may have other readers too, such as a scaled embedding.
        for root in reversed(self._roots(op.inputs[0], POINTWISE)):
            members = self._closed(self._region(root, kinds, is_side, STATISTICS), {anchor}, root)
            if members:
                scales = self._scales_before(members)
                self._add("norm", members | scales if len(members | scales) <= MAX_MEMBERS else members)
                return

    @functools.cached_property
    def _of_weights(self) -> frozenset[str]:
        """Names of tensors whose elements are computed one by one from weights and constants."""
        found: set[str] = set()
        for op in self.graph.operators:
            is_step = op.kind in POINTWISE and op.is_live
            if is_step and all(n in found or self.graph.is_weight(n) or self._is_constant(n) for n in op.inputs):
                found.update(op.outputs)
        return frozenset(found)

    def _scales_before(self, members: set[int]) -> set[int]:
        """Operators on weights alone whose results only members of a norm read.

        Gemma multiplies by `1 + weight`. Transformer Engine adds the 1 inside its kernel (`zero_centered_gamma`), and
        compilers fuse it like any other elementwise operator.
        """
        found: set[int] = set()
        stack = list(members)
        while stack:
            for name in self._op(stack.pop()).inputs:
                index = maker_of_data(self.graph, name)
                if index is None or index in members | found | self.taken or name not in self._of_weights:
                    continue
                if name not in self.graph.outputs and set(self.graph.consumers[name]) <= members | found:
                    found.add(index)
                    stack.append(index)
        return found

    def _activation(self, anchor: int) -> None:
        root = self._roots(self._op(anchor).inputs[0], POINTWISE)[-1]
        members = self._closed(self._region(root, POINTWISE | CURVES, self._is_constant), {anchor}, root) or {anchor}
        self._add("activation", self._gated(members))

    def _gated(self, members: set[int]) -> set[int]:
        """The members and, if only a product with a gate of the same shape reads the activation, that product."""
        outputs = self._outputs(members)
        readers = self.graph.consumers[outputs[0]] if len(outputs) == 1 else ()
        if len(readers) != 1 or self._op(readers[0]).kind != "Mul" or readers[0] in self.taken:
            return members
        shapes = {self.graph.tensors[n].shape for n in self._op(readers[0]).inputs}
        return members | set(readers) if len(shapes) == 1 else members

    def _roots(self, name: str, kinds: set[str]) -> list[str]:
        """The possible inputs of a chain: tensors such that everything up to `name` depends on this tensor alone; the
        farthest from `name` last."""
        found, frontier = [name], {name}
        for _ in range(MAX_MEMBERS):
            makers = {n: maker_of_data(self.graph, n) for n in frontier}
            latest = max((i for i in makers.values() if i is not None), default=None)
            if latest is None or latest in self.taken or self._op(latest).kind not in kinds:
                break
            if any(self.graph.is_weight(n) for n in self._op(latest).inputs):
                break
            frontier -= set(self._op(latest).outputs)
            frontier |= {n for n in self._op(latest).inputs if not self._is_constant(n)}
            if len(frontier) == 1:
                found.append(next(iter(frontier)))
            elif len(frontier) > 4:
                break
        return found

    def _rotary(self, anchor: int) -> None:
        name = self._op(anchor).inputs[0]
        if self._op(anchor).kind == "RotaryEmbedding":
            self._add("rotary", {anchor} | self._layout_before(name, {anchor}))
            return
        if self._op(anchor).kind == "Sub":
            # x * cos - y * sin of the two halves, or of each two neighbours.
            index = maker_of_data(self.graph, name)
            if index is None or self._op(index).kind != "Mul":
                return
            name = next((n for n in self._op(index).inputs if n in self.graph.of_parameters), name)
        roots = []
        for _ in range(8):
            index = maker_of_data(self.graph, name)
            if index is None or self._op(index).kind not in ("Slice", "Split", "Gather", "Squeeze", "Reshape"):
                break
            name = self._op(index).inputs[0]
            roots.append(name)

        def is_side(tensor: str) -> bool:
            return tensor not in self.graph.of_parameters

        # The farthest tensor may contain the queries, keys and values of one product together (GPT-NeoX).
        for root in reversed(roots):
            members = self._closed(self._region(root, ROTATIONS, is_side), {anchor}, root)
            # A rotary embedding has a Concat. A chain without one may be the negated score of a loss.
            is_turned = any(self._op(i).kind == "Concat" for i in members)
            if is_turned and root in self.graph.of_parameters:
                self._add("rotary", members | self._layout_before(root, members))
                return

    def _loss(self, anchor: int) -> None:
        def is_side(tensor: str) -> bool:
            return tensor not in self.graph.of_parameters

        for root in reversed(self._scores_before(self._op(anchor).inputs[0])):
            region = set(self._region(root, PICKS, is_side))
            outputs = self._outputs(region)
            if anchor in region and len(outputs) == 1 and self.graph.tensors[outputs[0]].num_elements == 1:
                self._add("loss", region)
                return

    def _scores_before(self, name: str) -> list[str]:
        """Tensors that may be the scores of a loss, the farthest last: `name` itself, and the tensor before a softmax,
        also if the logarithm is applied to a single picked probability."""
        found, kinds = [name], {*SAME_SCORES, *PICKED, "Softmax"}
        while len(found) < MAX_MEMBERS:
            index = maker_of_data(self.graph, found[-1])
            if index is None or index in self.taken or self._op(index).kind not in kinds:
                break
            kinds = kinds if self._op(index).kind in PICKED else kinds - PICKED
            mains = [n for n in self._op(index).inputs if n in self.graph.of_parameters]
            if len(mains) != 1 or self.graph.is_weight(mains[0]):
                break
            found.append(mains[0])
        return found
