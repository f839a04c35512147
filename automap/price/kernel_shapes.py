"""The kernel that runs each operator, and the extents of its loops, on which its time depends.

A product of two operands has four classes of loops: batch (in both operands and the result), m (left operand and
result), n (right operand and result) and k (summed). Fused attention has these four, of the product that makes its
scores, and a fifth class `values`, the elements of a head in its second product. Each factor of an operator's rule
belongs to one class, so a split of a factor divides the extent of its class. Nothing here depends on the plan. Units:
elements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

import numpy as np

from automap.execution import host_of
from automap.image_layouts import KINDS as CONVOLUTIONS
from automap.image_layouts import images_last
from automap.price.kernels.records import (
    ATTENTION,
    BATCH,
    BATCHED_PRODUCT,
    CONVOLUTION,
    INSIDE,
    MEASURED,
    MEMORY,
    NUM_CLASSES,
    PRODUCT,
    ROOFLINE,
    VALUES,
    K,
    KernelRow,
    M,
    N,
)
from automap.price.visible_keys import mean_of, visible_keys
from automap.problem import Problem
from ir.blocks import Blocks
from ir.graph import Operator
from ir.group_kinds import PRODUCTS
from ir.groups import FusedGroup, fused_groups
from ir.operators.experts import COMBINE, DISPATCH
from ir.operators.experts import PRODUCT as EXPERT_PRODUCT

_ATTENTION_CLASSES = {"h": BATCH, "g": BATCH, "s": M, "t": N, "d": K, "e": VALUES}


Classes = tuple[int, ...]
"""[factors] class of the loop of each factor of an operator's rule, or -1."""


class KernelShapes:
    """The kernels of a problem's operators.

    Args:
        problem: model, cluster and training.
        trained: names of the tensors that depend on trained parameters.
        blocks: the units of the problem's graph.
        repeated: for tensors inside fused attention that repeat keys or values for several heads, 1 / repetitions.
    """

    def __init__(
        self, problem: Problem, trained: AbstractSet[str], blocks: Blocks, repeated: Mapping[str, float]
    ) -> None:
        self.graph = problem.graph
        self.trained = trained
        self.is_fused = problem.trainer.fused_attention
        self.blocks = blocks
        self.repeated = repeated
        self.visible = visible_keys(problem)
        self.images_last = images_last(problem)

    def of(self, index: int, group: FusedGroup | None, unit: range) -> tuple[KernelRow, Classes]:
        """The kernel of one operator, without its FLOPs, traffic and times, and the classes of its loops.

        Args:
            index: number of the operator in the graph.
            group: the fused group that it belongs to, or None.
            unit: numbers of the operators of its unit.
        """
        op = self.graph.operators[index]
        none = (-1,) * len(op.rule.factors)
        if op.measured_s is not None:
            return KernelRow(kind=MEASURED, weight_share=self._weight(op)), none
        if group is not None and group.kind == "attention" and self.is_fused:
            if index != host_of(self.graph, group):
                return KernelRow(kind=INSIDE), none
            found = self._product(op, group.members)
            if found is not None:
                self._second(found[0], op, group.members)
                return self._masked(found[0], group.members, unit), found[1]
        if op.stated_bytes is None:
            found = self._product(op, () if op.kind != "Attention" else (index,))
            if found is not None and found[0].kind == ATTENTION:
                self._second(found[0], op, (index,))
                return self._masked(found[0], (index,), unit), found[1]
            if found is not None:
                return self._piece(found[0], op, unit), found[1]
            if op.kind in CONVOLUTIONS and op.forward_flops.at(1) > 0:
                return self._convolution(index, op)
        if op.forward_flops.at(1) > 0 or self._is_written_out:
            weight = self._weight(op) if op.forward_flops.at(1) > 0 else 0.0
            return KernelRow(kind=ROOFLINE, weight_share=weight), none
        is_loss = "Loss" in op.kind or (group is not None and group.kind == "loss")
        is_routed = op.kind in (DISPATCH, COMBINE)
        return KernelRow(
            kind=MEMORY, is_loss=int(is_loss), heads=self._heads(index, op), is_routed=int(is_routed)
        ), none

    @functools.cached_property
    def _is_written_out(self) -> bool:
        """Whether every memory-bound operator is a kernel of its own: no trainer fuses those of convolutional
        networks."""
        return any(op.kind == "BatchNormalization" for op in self.graph.operators)

    def _weight(self, op: Operator) -> float:
        """Share of a backward pass that makes gradients of weights: half if other operands need gradients too
        (assumed)."""
        weights = {name for name in op.inputs if name in self.trained and self._is_weight(name)}
        if not weights:
            return 0.0
        return 0.5 if any(name in self.trained and name not in weights for name in op.inputs) else 1.0

    def _heads(self, index: int, op: Operator) -> int:
        """See `KernelRow.heads`: 0 for the first operator between the products of an attention that is not fused, if
        its first operand has more than two dims; else -1."""
        for group in fused_groups(self.graph):
            if group.kind == "attention" and group.unfused is not None and not self.is_fused:
                is_first = group.unfused.members[0] == index
                if is_first and len(self.graph.tensors[op.inputs[0]].shape) > 2:
                    return 0
        return -1

    def _product(self, op: Operator, attention: tuple[int, ...]) -> tuple[KernelRow, Classes] | None:
        """The kernel of a product of two operands; None if the operator is none.

        Args:
            op: the operator.
            attention: members of the fused attention whose scores it makes; empty for other products.
        """
        flops = op.forward_flops.at(1)
        kinds = PRODUCTS | {EXPERT_PRODUCT} | ({"Attention"} if attention else set())
        if flops <= 0.0 or op.kind not in kinds or len(op.inputs) < 2:
            return None
        weight = next((i for i in (0, 1) if not attention and self._is_weight(op.inputs[i])), None)
        left, right = (1, 0) if weight == 0 else (0, 1)
        rule = op.rule
        a, b, out = ({f for dim in dims for f in dim} for dims in (rule.inputs[left], rule.inputs[right],
                                                                   rule.outputs[0]))  # fmt: skip
        classes = []
        extents = np.ones(NUM_CLASSES)
        sampled = -1
        for number, factor in enumerate(rule.factors):
            if op.kind == "Attention":
                found = BATCH if factor.is_batch else _ATTENTION_CLASSES.get(factor.name, -1)
            else:
                found = -1 if number not in a | b else K if number not in out else (N, M)[number in a]
                if number in a and number in b and number in out:
                    found = BATCH
            classes.append(found)
            if found >= 0:
                extents[found] *= factor.size
                sampled = found if factor.is_batch else sampled
        both = op.backward_flops.at(1) >= 2.0 * flops and not self.graph.has_frozen
        row = KernelRow(
            kind=ATTENTION if attention else BATCHED_PRODUCT if weight is None else PRODUCT,
            extents=extents,
            sampled=sampled,
            left_gradient=int(both or op.inputs[left] in self.trained),
            right_gradient=int(both or op.inputs[right] in self.trained),
        )
        if attention:
            return row, tuple(classes)
        # FLOPs may differ from the extents: experts have empty slots, and users state costs. Rows are scaled to them.
        whole = 2.0 * math.prod(extents.tolist())
        if not math.isclose(flops, whole):
            extents[M] *= flops / whole
        if weight is not None:
            row.weight_share = row.right_gradient / max(1, row.left_gradient + row.right_gradient)
        return row, tuple(classes)

    def _convolution(self, index: int, op: Operator) -> tuple[KernelRow, Classes]:
        """The kernel of a convolution as a matrix product.

        The classes of loops are: batch, its groups; m, positions of the result (of the input, if it is transposed); n,
        filters; k, channels of a group. `KernelRow.window` holds the elements of the window.
        """
        rule = op.rule
        images, weight, out = ({f for dim in dims for f in dim} for dims in (*rule.inputs[:2], rule.outputs[0]))
        rows = images if op.kind == "ConvTranspose" else out
        row = KernelRow(
            kind=CONVOLUTION,
            images_last=int(index in self.images_last),
            left_gradient=int(op.inputs[0] in self.trained),
            right_gradient=int(op.inputs[1] in self.trained),
        )
        classes = []
        for number, factor in enumerate(rule.factors):
            if number in weight:
                found = {(True, True): BATCH, (True, False): K, (False, True): N}.get(
                    (number in images, number in out), -1
                )
                row.window *= factor.size if found < 0 else 1
            else:
                found = M if number in rows else -1
            classes.append(found)
            if found >= 0:
                row.extents[found] *= factor.size
                row.sampled = found if factor.is_batch else row.sampled
        # FLOPs may differ from the extents where users state costs. Rows are scaled to them.
        row.extents[M] *= op.forward_flops.at(1) / (2.0 * math.prod(row.extents.tolist()) * row.window)
        return row, tuple(classes)

    def _second(self, row: KernelRow, op: Operator, members: tuple[int, ...]) -> None:
        """Completes the kernel of an attention by its second product: elements of a head of values, and the number of
        heads of keys and values over that of queries.

        Args:
            row: the kernel, from the first product; written.
            op: the first product, or the `Attention` operator.
            members: operators of the attention.
        """
        if op.kind == "Attention":
            row.kv_share = 1.0 / math.prod(factor.size for factor in op.rule.factors if factor.name == "g")
            return
        row.kv_share = min(self.repeated.get(name, 1.0) for name in op.inputs)
        others = (self._product(self.graph.operators[i], members) for i in members if self.graph.operators[i] != op)
        second = next((other for other in others if other is not None), None)
        if second is not None:
            pairs = math.prod(row.extents.tolist()) / row.extents[K]
            row.extents[VALUES] = math.prod(second[0].extents.tolist()) / pairs

    def _masked(self, row: KernelRow, members: tuple[int, ...], unit: range) -> KernelRow:
        """Adds to the kernel of an attention which keys it reads. This is the mean over all units of its type, since
        some of them may have a window and others none."""
        anchor = next(i for i in members if i in self.visible) - unit.start
        kind = next(one.type for one in self.blocks.units if one.start == unit.start)
        places = [one.start + anchor for one in self.blocks.units if one.type == kind]
        mean = mean_of([self.visible[place] for place in places if place in self.visible])
        row.visible_share, row.visible_edges, row.widest_share = mean
        return row

    def _is_weight(self, name: str) -> bool:
        return self._parameter(name) is not None

    def _parameter(self, name: str) -> str | None:
        """Name of the parameter that a tensor is or is a view of; None if there is none."""
        while self.graph.tensors[name].role != "parameter":
            index = self.graph.producer.get(name)
            if index is None or not self.graph.operators[index].is_view:
                return None
            name = self.graph.operators[index].inputs[0]
        return name

    def _piece(self, row: KernelRow, op: Operator, unit: range) -> KernelRow:
        """Completes the kernel of a product with a piece of a fused weight.

        All products of one input with pieces of one weight run as one kernel, and each has its share of the time.
        """
        source = self.fused_source(op) if row.kind == PRODUCT else None
        if source is None:
            return row
        alike = [
            other.forward_flops.at(1)
            for other in (self.graph.operators[i] for i in unit)
            if other.kind == op.kind and other.forward_flops.at(1) > 0 and self.fused_source(other) == source
        ]
        row.share = op.forward_flops.at(1) / sum(alike)
        row.extents[N] /= row.share
        return row

    def fused_source(self, op: Operator) -> tuple[str, str] | None:
        """Names of the data input and of the fused weight of a product with a piece of it; None for other operators."""
        for weight, data in ((1, 0), (0, 1)):
            name = self._parameter(op.inputs[weight]) if len(op.inputs) > 1 else None
            if name is not None and name in self.graph.pieces:
                return op.inputs[data], self.graph.pieces[name][0]
        return None
