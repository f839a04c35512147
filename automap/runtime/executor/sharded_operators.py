"""What a rank runs of an operator that is split: the plain kernel on its shard, or one of the forms below.

Most signatures need nothing but `apply_local` on local operands. The forms are the exceptions: operators that exchange
inside (`@` factors of a rule) and those whose result depends on where the shard lies. Sums over ranks are
differentiable; `gradient` says in which placement their users hand the gradient back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from automap.errors import PlanError
from automap.runtime.mesh_groups import Axis
from automap.runtime.operators.apply import apply_local
from automap.runtime.operators.loss import wide
from automap.runtime.operators.weight_gradients import product
from automap.runtime.redistribute import Tag, all_reduce, convert
from automap.runtime.stage_program import Box
from automap.runtime.tensor_layout import Step
from ir.factors import BROADCAST, PARTIAL, Factor, Placement, Signature
from ir.graph import Operator
from ir.operators.experts import COMBINE, DISPATCH

RANDOM = {"Dropout", "Bernoulli", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
LOSSES = {"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"}
Form = Callable[["Local"], Sequence[Tensor]]
AFFINE: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (torch.mul, torch.add)
"""What joins operands 1 and 2 to what is normalised."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """What an operator does on one axis of more than one rank."""

    axis: Axis
    signature: Signature
    factor: Factor | None

    @property
    def exchange(self) -> str:
        """Name of the internal collective, empty without one."""
        return self.factor.collective.name if self.factor and self.factor.collective else ""


@dataclass(frozen=True, kw_only=True)
class Place:
    """An operator on one rank, known when the program is built."""

    op: Operator
    """With counts of heads and groups of the shard."""
    splits: tuple[Split, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Of the local results."""
    boxes: tuple[Box, ...]
    """What this rank holds of each operand."""
    result_boxes: tuple[Box, ...]
    whole: tuple[tuple[int, ...], ...]
    """Shapes of the whole operands."""
    device: torch.device

    @property
    def attributes(self) -> dict[str, Any]:
        """Of the operator."""
        return dict(self.op.attributes)

    def axes(self, exchange: str) -> tuple[Axis, ...]:
        """Axes on which the operator exchanges inside under this name."""
        return tuple(s.axis for s in self.splits if s.exchange == exchange)


@dataclass(frozen=True)
class Local:
    """One use of an operator on one rank."""

    place: Place
    operands: Sequence[Tensor]
    step: tuple[int, int]
    """Number of the step and of the micro-batch, which random numbers depend on."""

    @property
    def x(self) -> Tensor:
        """The first operand."""
        return self.operands[0]

    @property
    def tag(self) -> Tag:
        """For the record of collectives."""
        return self.place.op.name, self.place.op.inputs[0]

    def start(self, slot: int, dim: int) -> int:
        """Where the shard of an operand begins in the whole."""
        return self.place.boxes[slot][dim][0]

    def plain(self, op: Operator | None = None, operands: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
        """The kernel on what this rank holds."""
        place = self.place
        given = self.operands if operands is None else operands
        return apply_local(op or place.op, given, place.shapes, place.device)

    def total(self, x: Tensor, axes: Sequence[Axis], gradient: Placement) -> Tensor:
        """The sum over some axes, known to all their ranks."""
        for axis in axes:
            step = (Step("all_reduce", axis),)
            x = convert(x, step, step if gradient == PARTIAL else (), self.tag)
        return x

    def largest(self, x: Tensor, axes: Sequence[Axis]) -> Tensor:
        """The elementwise maximum over some axes, without gradient."""
        x = x.detach()
        for axis in axes:
            x = all_reduce(x, axis, self.tag, largest=True)
        return x


def with_attributes(op: Operator, **changes: Any) -> Operator:
    """An operator with some attributes set, or removed by None."""
    merged = {k: v for k, v in {**dict(op.attributes), **changes}.items() if v is not None}
    return replace(op, attributes=tuple(sorted(merged.items())))


def choose(place: Place) -> Form:
    """What the ranks run.

    Raises:
        PlanError: splits that exchange inside in ways that are not known to go together.
    """
    kind, names = place.op.kind, {s.exchange for s in place.splits} - {""}
    factors = {s.factor.name for s in place.splits if s.factor}
    if kind in LOSSES and names:
        names = {"loss"}
    if len(names) > 1:
        signatures = [f"{s.factor.name} on {s.axis.name}" for s in place.splits if s.factor]
        raise PlanError(
            f"operator {place.op.name} ({kind}) cannot be split so on several axes at once: {', '.join(sorted(names))}",
            field=f"plan.stages.shardings.{place.op.name}",
            value=signatures,
            repair="Leave it whole on all axes but one.",
        )
    if kind == "Attention" and ({"s", "t"} & factors):
        return attention
    if names:
        return FORMS[names.pop()]
    if kind == "Add" and any(set(s.signature.inputs) == {BROADCAST, PARTIAL} for s in place.splits):
        return bias
    if kind == "Gather" and any(s.factor and s.factor.summed for s in place.splits):
        return look_up
    if kind in (DISPATCH, COMBINE) and "e" in factors:
        return experts
    return random if kind in RANDOM else Local.plain


def bias(use: Local) -> list[Tensor]:
    """Added on the first rank only; the others know its gradient as well, since the output's is whole."""
    mixed = [s for s in use.place.splits if set(s.signature.inputs) == {BROADCAST, PARTIAL}]
    slot = mixed[0].signature.inputs.index(BROADCAST)
    x, b = use.operands[1 - slot], use.operands[slot]
    if all(s.axis.index == 0 for s in mixed):
        return [x + b]
    # A mask, which has no gradient, may be infinite.
    return [x + (b - b.detach()) if b.requires_grad else x.expand(use.place.shapes[0])]


def with_bias(use: Local) -> list[Tensor]:
    """A matrix product and the addition behind it."""
    return [product(*use.operands)]


def random(use: Local) -> Sequence[Tensor]:
    """The same numbers on replicas of a result, others on every part of it, and again when recomputed."""
    box = use.place.result_boxes[0]
    key = repr((use.place.op.name, use.step, [start for start, _ in box])).encode()
    device = use.place.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest()))
        return use.plain()


def look_up(use: Local) -> list[Tensor]:
    """Rows of the table are split: each rank looks up its own and gives zeros for the others."""
    table, axis = use.x, use.place.attributes.get("axis", 0)
    size, start = table.shape[axis], use.start(0, axis)
    if "indices" in use.place.attributes:
        index = use.place.attributes["indices"] - start
        row = table.select(axis, min(max(index, 0), size - 1))
        return [row if 0 <= index < size else row * 0.0]
    ids = use.operands[1].to(torch.int64)
    ids = torch.where(ids < 0, ids + use.place.whole[0][axis], ids) - start
    mine = (ids >= 0) & (ids < size)
    rows = table.index_select(axis, torch.where(mine, ids, 0).reshape(-1))
    rows = rows.reshape(*table.shape[:axis], *ids.shape, *table.shape[axis + 1 :])
    mask = mine.reshape([1] * axis + list(ids.shape) + [1] * (table.ndim - axis - 1))
    return [rows * mask]


def experts(use: Local) -> tuple[Tensor, ...]:
    """Experts are split: each rank counts them from the first of its own."""
    is_dispatch = use.place.op.kind == DISPATCH
    first = (use.place.result_boxes if is_dispatch else use.place.boxes)[0][0][0]
    return use.plain(operands=[use.x, use.operands[1] - first, *use.operands[2:]])


def softmax(use: Local) -> list[Tensor]:
    """Maximum and sum of each row are all-reduced."""
    place, x, axes = use.place, use.x, use.place.axes("softmax")
    flattens = 0 < place.op.opset < 13
    axis = place.attributes.get("axis", 1 if flattens else -1) % x.ndim
    dims = tuple(range(axis, x.ndim)) if flattens else (axis,)
    top = use.largest(x.amax(dims, keepdim=True), axes)
    if place.op.kind == "Hardmax":
        return [_first_largest(use, x, top, dims, axes)]
    powers = torch.exp(x - top)
    total = use.total(powers.sum(dims, keepdim=True), axes, PARTIAL)
    return [powers / total if place.op.kind == "Softmax" else x - top - torch.log(total)]


def _first_largest(use: Local, x: Tensor, top: Tensor, dims: tuple[int, ...], axes: Sequence[Axis]) -> Tensor:
    """One at the first place of each row's maximum, zero elsewhere."""
    place = torch.zeros_like(x, dtype=torch.int64)
    for dim in dims:
        size = [1] * x.ndim
        size[dim] = -1
        own = torch.arange(x.shape[dim], device=x.device) + use.start(0, dim)
        place = place * use.place.whole[0][dim] + own.reshape(size)
    far = prod(use.place.whole[0])
    own_first = torch.where(x == top, place, far).amin(dims, keepdim=True)
    first = -use.largest(-own_first, axes)
    return (place == first).to(x.dtype)


def _standardised(
    use: Local,
    x: Tensor,
    dims: tuple[int, ...],
    count: int,
    epsilon: float,
    axes: Sequence[Axis],
    *,
    centre: bool = True,
) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon), of `count` elements on all ranks together."""
    wide = x if x.dtype == torch.float64 else x.float()
    if centre:
        wide = wide - use.total(wide.sum(dims, keepdim=True), axes, PARTIAL) / count
    squares = use.total((wide * wide).sum(dims, keepdim=True), axes, PARTIAL)
    return (wide * torch.rsqrt(squares / count + epsilon)).to(x.dtype)


def _statistics(
    use: Local,
    x: Tensor,
    dims: tuple[int, ...],
    count: int,
    epsilon: float,
    axes: Sequence[Axis],
    *,
    centre: bool = True,
) -> tuple[Tensor, Tensor]:
    """Mean and inverse deviation as results, which all ranks use alike."""
    wide = x if x.dtype == torch.float64 else x.float()
    squares = use.total((wide * wide).sum(dims, keepdim=True), axes, BROADCAST) / count
    if not centre:
        inverse = torch.rsqrt(squares + epsilon)
        return inverse, inverse
    mean = use.total(wide.sum(dims, keepdim=True), axes, BROADCAST) / count
    return mean, torch.rsqrt(squares - mean * mean + epsilon)


def _affine(use: Local, x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Times operand 1 plus operand 2."""
    for side, joined in zip(use.operands[1:3], AFFINE, strict=False):
        x = joined(x, side if shape is None else side.reshape(*shape))
    return x


def norm(use: Local) -> list[Tensor]:
    """Statistics of rows that are split are all-reduced."""
    place, x, axes = use.place, use.x, use.place.axes("norm")
    kind, shape, attributes = place.op.kind, place.whole[0], place.attributes
    rank, epsilon = len(shape), attributes.get("epsilon", 1e-5)
    if kind.startswith("Reduce"):
        return [_reduction(use, axes)]
    if kind in ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"):
        dims = tuple(range(attributes.get("axis", -1) % rank, rank))
        count, centre = prod(shape[d] for d in dims), kind == "LayerNormalization"
        found = _affine(use, _standardised(use, x, dims, count, epsilon, axes, centre=centre))
        if len(place.shapes) == 1:
            return [found]
        return _wanted(place, [found, *_statistics(use, x, dims, count, epsilon, axes, centre=centre)])
    if "Skip" in kind:
        return _skip_norm(use, axes)
    if kind == "InstanceNormalization":
        found = _standardised(use, x, tuple(range(2, rank)), prod(shape[2:]), epsilon, axes)
        return [_affine(use, found, (-1, *[1] * (rank - 2)))]
    if kind == "GroupNormalization":
        return [_group_norm(use, axes)]
    if kind == "LpNormalization":
        p = attributes.get("p", 2)
        total = use.total((x.abs() ** p).sum(attributes.get("axis", -1), keepdim=True), axes, PARTIAL)
        length = total ** (1 / p)
        return [x / torch.where(length == 0, torch.ones_like(length), length)]
    dims = tuple(d % rank for d in attributes.get("axes", (0, 2, 3)))
    count = prod(shape[d] for d in dims)
    centred = x - use.total(x.sum(dims, keepdim=True), axes, PARTIAL) / count
    squares = use.total((centred * centred).sum(dims, keepdim=True), axes, PARTIAL) / count
    return [centred / (torch.sqrt(squares) + 1e-9)]


def _wanted(place: Place, results: Sequence[Tensor]) -> list[Tensor]:
    """Those results of a kind that the operator writes."""
    return [results[i] for i in place.attributes.get("results", range(len(place.shapes)))]


def _skip_norm(use: Local, axes: Sequence[Axis]) -> list[Tensor]:
    """The residual sum is local, its statistics are those of a normalisation."""
    place = use.place
    held = dict(zip(place.attributes.get("operands", range(len(use.operands))), use.operands, strict=True))
    centre = "Simplified" not in place.op.kind
    added = held.get(4 if centre else 3)
    joined = held[0] + held[1] if added is None else held[0] + held[1] + added
    over = ((-1,), place.whole[0][-1], place.attributes.get("epsilon", 1e-12), axes)
    found = _standardised(use, joined, *over, centre=centre) * held[2]
    if centre and 3 in held:
        found = found + held[3]
    results = place.attributes.get("results", range(len(place.shapes)))
    rows = _statistics(use, joined, *over, centre=centre) if {1, 2} & set(results) else (found, found)
    return _wanted(place, [found, *rows, joined])


def _group_norm(use: Local, axes: Sequence[Axis]) -> Tensor:
    """Channels of a group stay together; space is split. The number of groups is that of the shard."""
    place, x = use.place, use.x
    groups, shape = place.attributes.get("num_groups", 1), place.whole[0]
    split = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    count = x.shape[1] // groups * prod(shape[2:])
    dims = tuple(range(2, split.ndim))
    found = _standardised(use, split, dims, count, place.attributes.get("epsilon", 1e-5), axes).reshape(x.shape)
    for side, joined in zip(use.operands[1:3], AFFINE, strict=False):
        wide = side if side.shape[0] == x.shape[1] else side.repeat_interleave(x.shape[1] // groups)
        found = joined(found, wide.reshape(-1, *[1] * (x.ndim - 2)))
    return found


def _reduction(use: Local, axes: Sequence[Axis]) -> Tensor:
    """The results of all ranks' parts are reduced once more."""
    place, x = use.place, use.x
    how, dims = place.op.kind.removeprefix("Reduce"), tuple(place.attributes["axes"])
    keep = bool(place.attributes["keepdims"])
    if how in ("Max", "Min"):
        sign = 1 if how == "Max" else -1
        local = sign * (sign * x).amax(dims, keepdim=keep)
        top = sign * use.largest(sign * local, axes)
        found: Tensor = torch.where(local == top, local, top)
        return found
    if how == "Prod":
        return _product(use, x, dims, axes, keep=keep)
    if how == "LogSumExp":
        top = use.largest(x.amax(dims, keepdim=True), axes)
        total = use.total(torch.exp(x - top).sum(dims, keepdim=keep), axes, BROADCAST)
        return torch.log(total) + top.reshape(total.shape)
    if how in ("L1", "L2", "SumSquare"):
        x = x.abs() if how == "L1" else x * x
    total = use.total(x.sum(dims, keepdim=keep), axes, BROADCAST)
    if how == "Mean":
        total = total / prod(place.whole[0][d] for d in dims)
    if how == "L2":
        total = torch.sqrt(total)
    return torch.log(total) if how == "LogSum" else total


def _product(use: Local, x: Tensor, dims: Sequence[int], axes: Sequence[Axis], *, keep: bool) -> Tensor:
    """Times the product of the other ranks, which is got without dividing by the own one."""
    for d in sorted(dims, reverse=True):
        x = x.prod(d, keepdim=keep)
    for axis in axes:
        slots = x.new_zeros(axis.size, *x.shape)
        slots[axis.index] = x.detach()
        slots = all_reduce(slots, axis, use.tag)
        slots[axis.index] = 1.0
        x = x * slots.prod(0)
    return x


def batch_norm(use: Local) -> list[Tensor]:
    """Sums over all samples are all-reduced."""
    place, x, axes = use.place, use.x, use.place.axes("batch_norm")
    dims, shape = tuple(d for d in range(x.ndim) if d != 1), (-1, *[1] * (x.ndim - 2))
    # Dims that are split without an exchange count as this rank has them.
    summed = {s.signature.inputs[0] for s in place.splits if s.exchange}
    count = prod(place.whole[0][d] if d in summed else x.shape[d] for d in dims)
    found = _affine(use, _standardised(use, x, dims, count, place.attributes.get("epsilon", 1e-5), axes), shape)
    if len(place.shapes) == 1:
        return [found]
    kept, detached = place.attributes.get("momentum", 0.9), x.detach()
    mean = use.total(detached.sum(dims), axes, BROADCAST) / count
    variance = use.total(((detached - mean.reshape(shape)) ** 2).sum(dims), axes, BROADCAST) / count
    running = [
        old.detach() * kept + new * (1 - kept) for old, new in zip(use.operands[3:5], (mean, variance), strict=False)
    ] or [mean, variance]
    return _wanted(place, [found, *running, mean, variance])


def halo(use: Local) -> tuple[Tensor, ...]:
    """Space is split: each rank gets the rows that its windows cover beside its own, zeros at the border."""
    place, x = use.place, use.x
    a, rank = place.attributes, x.ndim - 2
    strides, dilations = a.get("strides", (1,) * rank), a.get("dilations", (1,) * rank)
    windows = [d * (k - 1) + 1 for d, k in zip(dilations, place.whole[1][2:], strict=True)]
    begin, end = _pads(a, place.whole[0][2:], strides, windows)
    for split in place.splits:
        if split.exchange != "halo":
            continue
        dim = split.signature.inputs[0]
        i = dim - 2
        if sum(s.signature.inputs[0] == dim for s in place.splits) > 1:
            raise AssertionError("choose refuses this")
        bounds = []
        rows = place.shapes[0][dim]
        for index in range(split.axis.size):
            first = index * rows * strides[i] - begin[i]
            bounds.append((first, first + (rows - 1) * strides[i] + windows[i]))
        x = _ranges(x, split.axis, dim, bounds, use.tag)
        begin[i] = end[i] = 0
    op = with_attributes(place.op, pads=(*begin, *end), auto_pad="NOTSET")
    return use.plain(op, [x, *use.operands[1:]])


def _pads(
    attributes: Mapping[str, Any], sizes: Sequence[int], strides: Sequence[int], windows: Sequence[int]
) -> tuple[list[int], list[int]]:
    """(begin, end) padding of each spatial dim of the whole."""
    mode, rank = attributes.get("auto_pad", "NOTSET"), len(sizes)
    if mode == "VALID":
        return [0] * rank, [0] * rank
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        spare = [max((-(-n // s) - 1) * s + w - n, 0) for n, s, w in zip(sizes, strides, windows, strict=True)]
        small, large = [t // 2 for t in spare], [t - t // 2 for t in spare]
        return (small, large) if mode == "SAME_UPPER" else (large, small)
    pads = attributes.get("pads", (0,) * (2 * rank))
    return list(pads[:rank]), list(pads[rank:])


def _ranges(x: Tensor, axis: Axis, dim: int, bounds: Sequence[tuple[int, int]], tag: Tag) -> Tensor:
    """The elements [start, stop) of `dim` that each rank asks for, zeros where the whole has none."""
    found: Tensor = _Ranges.apply(x, axis, dim, tuple(bounds), tag)  # type: ignore[no-untyped-call]
    return found


class _Ranges(torch.autograd.Function):
    """Rows from neighbours; backward their gradients go home and are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, bounds: tuple[tuple[int, int], ...], tag: Tag) -> Tensor:
        from automap.runtime.redistribute import exchange_rows

        size = x.shape[dim]
        own = [(i * size, (i + 1) * size) for i in range(axis.size)]
        ctx.where = axis, dim, bounds, own, tag
        return exchange_rows(x, axis, dim, own, bounds, tag)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        from automap.runtime.redistribute import direction, exchange_rows

        axis, dim, bounds, own, tag = ctx.where
        with direction("backward"):
            return exchange_rows(gradients[0], axis, dim, bounds, own, tag), None, None, None, None


def attention(use: Local) -> list[Tensor]:
    """Queries, keys or both are split: masks go by the places of the own ones; parts of keys combine their softmaxes.

    Row maximum, row sum and result are all-reduced over the axes that split the keys.
    """
    place, a = use.place, use.place.attributes
    axes = place.axes("attention")

    def heads(x: Tensor, count: int) -> Tensor:
        return x if x.ndim == 4 else x.reshape(x.shape[0], x.shape[1], count, -1).transpose(1, 2)

    q = heads(use.x, a.get("q_num_heads", 0))
    k, v = (heads(x, a.get("kv_num_heads", 0)) for x in use.operands[1:3])
    shared = q.shape[1] // k.shape[1]
    if shared > 1:
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scale = a.get("scale", 0.0) or q.shape[-1] ** -0.5
    scores = scale * (q @ k.transpose(-1, -2))
    cap = a.get("softcap", 0.0)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    if len(use.operands) > 3:
        mask = use.operands[3]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    hidden = _hidden(use, scores)
    scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
    top = use.largest(scores.amax(-1, keepdim=True), axes)
    powers = torch.exp(scores - torch.where(top == -torch.inf, torch.zeros_like(top), top))
    total = use.total(powers.sum(-1, keepdim=True), axes, PARTIAL)
    # A query that may see no key gets zeros.
    found = use.total(powers / torch.where(total == 0, torch.ones_like(total), total) @ v, axes, BROADCAST)
    return [found if use.x.ndim == 4 else found.transpose(1, 2).reshape(place.shapes[0])]


def _hidden(use: Local, scores: Tensor) -> Tensor | None:
    """[queries, keys] of this rank, where the causal mask or the window hides a key."""
    a, dim = use.place.attributes, -2 if use.x.ndim == 4 else 1
    left, right = a.get("left_window_size", -1), a.get("right_window_size", -1)
    right = 0 if a.get("is_causal") else right
    if left < 0 and right < 0:
        return None
    keys = torch.arange(scores.shape[-1], device=scores.device) + use.start(1, dim)
    queries = torch.arange(scores.shape[-2], device=scores.device) + use.start(0, dim)
    ahead = keys - queries[:, None]
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if right >= 0:
        hidden |= ahead > right
    return hidden | (ahead < -left) if left >= 0 else hidden


def loss(use: Local) -> list[Tensor]:
    """Classes split: maximum, sum of powers and the picked score are all-reduced. Rows split: sums and counts are."""
    place, a = use.place, use.place.attributes
    x = wide(use.x)
    dim = a.get("class_dim", 1 if x.ndim > 1 else 0)
    classes, rows = place.axes("cross_entropy"), place.axes("norm")
    labels, weight = use.operands[1].to(torch.int64), use.operands[2] if len(use.operands) > 2 else None
    kept = torch.ones_like(labels, dtype=torch.bool)
    if "ignore_index" in a:
        kept = labels != a["ignore_index"]
    labels = torch.where(kept, labels, torch.zeros_like(labels)) - use.start(0, dim)
    mine = (labels >= 0) & (labels < x.shape[dim])
    labels = torch.where(mine, labels, torch.zeros_like(labels))
    is_log = place.op.kind == "NegativeLogLikelihoodLoss"
    powers = top = None
    if not is_log:
        top = use.largest(x.amax(dim, keepdim=True), classes)
        powers = torch.exp(x - top).sum(dim, keepdim=True)

    def log_sum(gradient: Placement) -> Tensor:
        if powers is None or top is None:
            return torch.zeros_like(x.narrow(dim, 0, 1))
        return torch.log(use.total(powers, classes, gradient)) + top

    picked = use.total(x.gather(dim, labels.unsqueeze(dim)).squeeze(dim) * mine, classes, BROADCAST)
    share = kept.to(x.dtype)
    if weight is not None:
        share = use.total(weight[labels] * (mine & kept), classes, BROADCAST)
    losses = (log_sum(BROADCAST).squeeze(dim) - picked) * share
    reduction = a.get("reduction", "mean")
    found = losses if reduction == "none" else losses.sum()
    if reduction == "mean":
        found = use.total(found, rows, BROADCAST) / use.total(share.sum(), rows, BROADCAST)
    return [found] if len(place.shapes) == 1 else _wanted(place, [found, x - log_sum(PARTIAL)])


FORMS: Mapping[str, Form] = {
    "softmax": softmax, "norm": norm, "batch_norm": batch_norm, "halo": halo, "attention": attention, "loss": loss,
}  # fmt: skip
"""Name of an internal collective -> what the ranks run; cross-entropy is part of `loss`."""
