"""The function that a rank runs for a split operator, and the functions that need no collective.

Most signatures need nothing but the plain kernel on the local operands. The exceptions are operators with a collective
inside (the `@` factors of their rule) and operators whose result depends on the position of the shard in the whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from automap.errors import PlanError
from automap.runtime.operators.embedding import fixed_row
from automap.runtime.operators.weight_gradients import product
from automap.runtime.sharded_operators.call import Call, ShardedFunction, ShardedOperator
from automap.runtime.sharded_operators.convolution import halo
from automap.runtime.sharded_operators.loss import loss
from automap.runtime.sharded_operators.split_rows import over_split_rows
from ir.factors import BROADCAST, PARTIAL
from ir.operators.experts import COMBINE, DISPATCH

RANDOM = {"Dropout", "Bernoulli", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
LOSSES = {"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"}
EXCHANGES: Mapping[str, ShardedFunction] = {
    **dict.fromkeys(("softmax", "norm", "batch_norm", "attention"), over_split_rows),
    "halo": halo,
    "loss": loss,
}
"""The name of the collective inside an operator -> the function that the ranks run; cross-entropy is part of `loss`."""


def choose(operator: ShardedOperator) -> ShardedFunction:
    """The function that the ranks run.

    Raises:
        PlanError: the operator has unlike collectives inside on several axes, for which no function is known.
    """
    kind, names = operator.op.kind, {s.exchange for s in operator.splits} - {""}
    factors = {s.factor.name for s in operator.splits if s.factor}
    if kind in LOSSES and names:
        names = {"loss"}
    if len(names) > 1:
        raise PlanError(
            f"operator {operator.op.name} ({kind}) cannot be split so on several axes at once: "
            + ", ".join(sorted(names)),
            field=f"plan.stages.shardings.{operator.op.name}",
            value=[f"{s.factor.name} on {s.axis.name}" for s in operator.splits if s.factor],
            repair="Leave it whole on all axes but one.",
        )
    if kind == "Attention" and ({"s", "t"} & factors):
        return over_split_rows
    if names:
        return EXCHANGES[names.pop()]
    if kind == "Add" and any(set(s.signature.inputs) == {BROADCAST, PARTIAL} for s in operator.splits):
        return bias
    if kind == "Gather" and any(s.factor and s.factor.summed for s in operator.splits):
        return look_up
    if kind in (DISPATCH, COMBINE) and "e" in factors:
        return experts
    return random if kind in RANDOM else Call.plain


def bias(call: Call) -> list[Tensor]:
    """A whole operand added to a partial sum: on the first rank only, with a gradient on all ranks.

    The gradient of the sum is whole on each rank, and so is that of the operand.
    """
    mixed = [s for s in call.operator.splits if set(s.signature.inputs) == {BROADCAST, PARTIAL}]
    slot = mixed[0].signature.inputs.index(BROADCAST)
    x, b = call.operands[1 - slot], call.operands[slot]
    if all(s.axis.index == 0 for s in mixed):
        return [x + b]
    # A mask, which has no gradient, may be infinite.
    return [x + (b - b.detach()) if b.requires_grad else x.expand(call.operator.shapes[0])]


def with_bias(call: Call) -> list[Tensor]:
    """A matrix product and the bias that is added to it."""
    return [product(*call.operands)]


def random(call: Call) -> Sequence[Tensor]:
    """Random numbers that are equal on replicas of a result, differ between its parts, and repeat on recomputation."""
    key = repr((call.operator.op.name, call.step, [start for start, _ in call.operator.result_boxes[0]])).encode()
    device = call.operator.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest()))
        return call.plain()


def look_up(call: Call) -> list[Tensor]:
    """A look-up in a table whose rows are split: each rank reads its own rows and gives zeros for the others."""
    table, axis = call.x, call.operator.attributes.get("axis", 0)
    size, start = table.shape[axis], call.start(0, axis)
    if "indices" in call.operator.attributes:
        index = call.operator.attributes["indices"] - start
        row = table.select(axis, min(max(index, 0), size - 1))
        return [row if 0 <= index < size else row * 0.0]
    ids = call.operands[1].to(torch.int64)
    ids = torch.where(ids < 0, ids + call.operator.whole[0][axis], ids)
    padded, ids = ids, ids - start
    mine = (ids >= 0) & (ids < size)
    rows = table.index_select(axis, torch.where(mine, ids, 0).reshape(-1))
    rows = rows.reshape(*table.shape[:axis], *ids.shape, *table.shape[axis + 1 :])
    mask = mine.reshape([1] * axis + list(ids.shape) + [1] * (table.ndim - axis - 1))
    return [fixed_row(rows * mask, padded, call.operator.attributes.get("padding_idx"))]


def experts(call: Call) -> tuple[Tensor, ...]:
    """Dispatch or combine where experts are split: each rank counts experts from the first of its own."""
    is_dispatch = call.operator.op.kind == DISPATCH
    first = (call.operator.result_boxes if is_dispatch else call.operator.boxes)[0][0][0]
    return call.plain(operands=[call.x, call.operands[1] - first, *call.operands[2:]])
