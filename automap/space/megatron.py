"""Megatron's pattern: the signature of one operator on one mesh axis in plans that experts write by hand.

Templates and published runs share these rules: data parallelism splits the batch, tensor parallelism splits weights
(columns, then rows; arXiv 1909.08053), context parallelism splits the sequence, and expert parallelism spreads whole
experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from automap.arrays import Mask
from automap.space.space import PlanSpace
from ir.adapters import adapters
from ir.factors import BROADCAST, PARTIAL, Placement, Signature, whole_signature
from ir.graph import Operator
from ir.operators.experts import COMBINE, DISPATCH, PRODUCT

_NOT_MEGATRON, _USUAL, _BETTER, _BEST = range(4)
"""Ranks of signatures in `AxisChoice.weights`; the signature with the highest rank is chosen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisChoice:
    """The choice of a signature for one operator on one mesh axis."""

    space: PlanSpace
    op: Operator
    table: tuple[Signature, ...]
    """The signatures of the operator."""
    legal: Mask
    """[signatures] which of them are allowed."""
    placed: Mapping[str, Placement]
    """The placements on this axis of tensors that are made before the operator; all others are whole."""

    @property
    def whole(self) -> int:
        """The signature that splits nothing."""
        return whole_signature(self.table)

    def batch(self) -> int | None:
        """The signature that splits the batch, or None."""
        for index, signature in enumerate(self.table):
            if signature.factor is not None and self.op.rule.factors[signature.factor].is_batch:
                return index
        return None

    def experts(self) -> int | None:
        """The signature that spreads experts, or None."""
        names = [None if s.factor is None else self.op.rule.factors[s.factor].name for s in self.table]
        return names.index("e") if self.op.kind in (DISPATCH, PRODUCT) and "e" in names else None

    def given(self) -> int | None:
        """The signature that requires every activation in its present placement, if at least one is split; else
        None."""
        own = [(i, self.placed.get(n, BROADCAST)) for i, n in enumerate(self.op.inputs) if self._is_activation(n)]
        for index, signature in enumerate(self.table):
            taken = [(signature.inputs[slot], placement) for slot, placement in own]
            if signature.divides_work and all(p == h for p, h in taken) and any(p >= 0 for p, _ in taken):
                return index
        return None

    def follow(self) -> int:
        """The signature that requires the first split operand, and as many others as possible, in their present
        placement; if there is none, the one that splits nothing."""
        names = enumerate(self.op.inputs)
        have = {i: self.placed.get(n, BROADCAST) for i, n in names if n in self.placed or self._is_activation(n)}
        first = next((slot for slot, placement in have.items() if placement >= 0), None)
        best, best_score = self.whole, -1
        for index, signature in enumerate(self.table):
            if first is not None and self._usable(index) and signature.inputs[first] == have[first]:
                score = sum(signature.inputs[slot] == placement for slot, placement in have.items())
                if score > best_score:
                    best, best_score = index, score
        return best

    def weights(self, *, sequence_parallel: bool) -> int:
        """Megatron's signature on the axis of tensor parallelism; if it is not legal, the one that splits nothing.

        - A product with a weight whose input is split along the summed dim takes it in this placement (rows). Otherwise
          it splits the weight and the output (columns).
        - An embedding splits its vocabulary.
        - Products of activations and losses take split inputs in their placement (heads, classes).
        - So do operators that combine split inputs (a gate and the gated tensor), also with an input that is whole, of
          which each rank uses its part (the scores of heads and a bias of positions).
        - An adapter is never split between its two products: the first one splits no output, and the second one splits
          none if the layer beside it has split inputs.
        - All other operators are whole, or split the sequence.
        """
        if self.op.kind == COMBINE:
            # The sum over experts, or over slices of them, stays P: it is reduced on tokens, which are fewer than the
            # slots of experts.
            own = self.placed.get(self.op.inputs[0], BROADCAST)
            for index, signature in enumerate(self.table):
                taken = signature.inputs == (own, BROADCAST, BROADCAST)
                if self.legal[index] and taken and signature.outputs[0] == PARTIAL:
                    return index
        given, batch = self.given(), self.batch()
        best, best_rank = self.whole, _NOT_MEGATRON
        for index, signature in enumerate(self.table):
            if self._usable(index) and index != batch:
                rank = self._rank(signature, is_given=index == given, sequence_parallel=sequence_parallel)
                if rank > best_rank:
                    best, best_rank = index, rank
        return best

    def _rank(self, signature: Signature, *, is_given: bool, sequence_parallel: bool) -> int:
        """The rank of a signature in `weights`.

        Args:
            signature: a signature that divides work and does not split the batch.
            is_given: whether it is that of `given`.
            sequence_parallel: whether other operators split the sequence.
        """
        op, tensors = self.op, self.space.problem.graph.tensors
        made, flops, output = tensors[op.outputs[0]], op.forward_flops.at(1), signature.outputs[0]
        has_weight, splits_weight = False, False
        others: list[tuple[Placement, Placement]] = []  # required and present placement of the other operands
        for name, placement in zip(op.inputs, signature.inputs, strict=True):
            if tensors[name].role == "parameter" or self.space.is_view(name):
                has_weight, splits_weight = True, splits_weight or placement >= 0
            else:
                others.append((placement, self.placed.get(name, BROADCAST)))
        follows = any(p >= 0 and p == h for p, h in others) and all(p in (h, BROADCAST) for p, h in others)
        if op.kind == "Gather" and has_weight:
            splits_vocabulary = made.batch_dim is not None and splits_weight and output == PARTIAL
            return _USUAL if splits_vocabulary else _NOT_MEGATRON
        if flops > 0 and has_weight:
            if splits_weight and follows:
                return _BETTER
            splits_columns = all(p == BROADCAST for p, _ in others) and output >= 0 and not self._is_thin()
            return _USUAL if splits_weight and splits_columns else _NOT_MEGATRON
        if flops > 0 or op.kind == "SoftmaxCrossEntropyLoss":
            return _USUAL if follows else _NOT_MEGATRON
        if is_given:
            return _BEST
        if self._joins(signature):
            return _BETTER
        splits_sequence = output == 1 and made.batch_dim == 0 and len(made.shape) == 3
        return _USUAL if sequence_parallel and splits_sequence else _NOT_MEGATRON

    def _is_thin(self) -> bool:
        """Whether the operator is the first product of an adapter, or the second one of a layer with split inputs."""
        graph = self.space.problem.graph
        of_second = adapters(graph)
        if self.op.name not in of_second:
            return self.op.name in of_second.values()
        first = graph.by_name[of_second[self.op.name]]
        return any(self.placed.get(name, BROADCAST) >= 0 for name in first.inputs if self._is_activation(name))

    def _joins(self, signature: Signature) -> bool:
        """Whether a signature requires a split operand as it is, and its part of all other activations, which are
        whole."""
        own = [
            (p, self.placed.get(n, BROADCAST))
            for n, p in zip(self.op.inputs, signature.inputs, strict=True)
            if self._is_activation(n)
        ]
        return any(p == h >= 0 for p, h in own) and all(p == h or (h == BROADCAST and p >= 0) for p, h in own)

    def _is_activation(self, name: str) -> bool:
        return self.space.problem.graph.tensors[name].role == "activation" and not self.space.is_view(name)

    def _usable(self, index: int) -> bool:
        return bool(self.legal[index]) and self.table[index].divides_work
