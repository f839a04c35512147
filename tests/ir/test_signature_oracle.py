"""Every kind, every signature of its rule, on 2 to 4 virtual ranks: results and gradients equal the whole operator's.

Inputs are placed as the signature says, each rank runs the operator on what it holds (`apply_local`), and the outputs
are put together by their placements. Backward, each rank gets the output gradient in the dual placement and runs its
own vector-Jacobian product; the input gradients are put together as `Signature.input_gradients` says. Where a factor
carries `@name`, the exchange is written out here (`FORMS`), independently of the interpreter.
"""

from dataclasses import dataclass, replace
from math import prod

import pytest
import torch
from oracle_cases import CASES, NEVER_SPLIT, NOT_EXECUTED, SAMPLES
from virtual_ranks import agree, assemble, convert, largest, place, recorded, total

from automap.runtime.operators.apply import apply, apply_local, local_operator
from ir.factors import BROADCAST, PARTIAL, gradient_placement, may_be_uneven, placement_text
from ir.graph import Graph, Tensor
from ir.linkage import operator_signatures
from ir.operators import KINDS, make_operator
from ir.operators.experts import COMBINE, DISPATCH


def label(case):
    return f"{case.kind} {case.id}".strip()


# A use, whole


@dataclass
class Whole:
    op: object
    tensors: dict
    operands: list
    outputs: tuple
    output_gradients: list
    gradients: list


def operand(shape, data, generator):
    if data is bool:
        return torch.rand(shape, generator=generator) < 0.7
    if isinstance(data, int):
        return torch.randint(0, data, shape, generator=generator)
    if isinstance(data, tuple) and isinstance(data[0], int):
        return torch.randint(*data, shape, generator=generator)
    if data is not None:
        return data[0] + (data[1] - data[0]) * torch.rand(shape, dtype=torch.float64, generator=generator)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def dtype_of(data):
    whole = isinstance(data, int) or (isinstance(data, tuple) and isinstance(data[0], int))
    return "bool" if data is bool else "int64" if whole else "float32"


def make(case):
    generator = torch.Generator().manual_seed(0)
    tensors, operands = [], []
    for i, (shape, batch) in enumerate(zip(case.shapes, case.places, strict=True)):
        if shape is None:
            tensors.append(None)
            continue
        role = "parameter" if i in case.parameters else "activation"
        tensor = Tensor(name=f"x{i}", shape=shape, dtype=dtype_of(case.data.get(i)), role=role, batch_dim=batch)
        tensors.append(tensor)
        operands.append(operand(tensor.shape_at(SAMPLES), case.data.get(i), generator))
    built = make_operator(
        case.kind, name="op", inputs=tensors, outputs=case.outputs, attributes=case.attributes, opset=case.opset
    )
    op = built.operator
    named = {t.name: t for t in (*tensors, *built.outputs) if t is not None}
    operands = [operands[[t.name for t in tensors if t is not None].index(name)] for name in op.inputs]
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in operands]
    outputs = apply(op, named, leaves, SAMPLES)
    given = [torch.randn(y.shape, dtype=y.dtype, generator=generator) if y.requires_grad else None for y in outputs]
    return Whole(op, named, operands, outputs, given, differentiate(outputs, given, leaves))


def differentiate(outputs, given, leaves):
    """Gradients of the float leaves; zeros where nothing depends on one."""
    wanted = [x for x in leaves if x.requires_grad]
    pairs = [(y, g) for y, g in zip(outputs, given, strict=True) if y.requires_grad and g is not None]
    if not wanted or not pairs:
        return [None] * len(leaves)
    found = iter(
        torch.autograd.grad(
            [y for y, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True, materialize_grads=True
        )
    )
    return [next(found) if x.requires_grad else None for x in leaves]


# The exchanges of `@` marks, written out


@dataclass
class Shards:
    """One use as the ranks see it."""

    op: object
    signature: object
    ranks: int
    parts: list
    """operand -> rank -> tensor"""
    shapes: list
    """rank -> result -> shape"""
    whole: list
    """operand -> shape of the whole"""

    @property
    def attributes(self):
        return dict(self.op.attributes)

    @property
    def x(self):
        return self.parts[0]

    def each(self, function, *more):
        """`function` on every rank, of what it holds of `more`."""
        return [function(*held) for held in zip(*more, strict=True)]

    def local(self, op=None, extra=None):
        """The plain local program; `extra` is one more operand by rank."""
        op = op or local_operator(self.op, self.signature, self.ranks)
        columns = [*self.parts, *([] if extra is None else [extra])]
        return [apply_local(op, [c[r] for c in columns], self.shapes[r]) for r in range(self.ranks)]


def summed(shards, parts, dims, gradient=PARTIAL, keep=True):
    return total([p.sum(dims, keepdim=keep) for p in parts], gradient)


def softmax(s):
    axis = s.attributes.get("axis", 1 if s.op.opset < 13 else -1) % len(s.whole[0])
    dims = tuple(range(axis, len(s.whole[0]))) if s.op.opset < 13 else (axis,)
    top = largest([x.amax(dims, keepdim=True) for x in s.x])
    if s.op.kind == "Hardmax":
        size = s.x[0].shape[axis]
        first = [
            torch.where(x.amax(axis, keepdim=True) == top, x.argmax(axis, keepdim=True) + r * size, 10**6)
            for r, x in enumerate(s.x)
        ]
        places = agree(first, torch.amin)
        hot = torch.zeros(s.whole[0], dtype=top.dtype).scatter(axis, places, 1.0)
        return [(part,) for part in hot.chunk(s.ranks, axis)]
    powers = [torch.exp(x - top) for x in s.x]
    sums = summed(s, powers, dims)
    if s.op.kind == "Softmax":
        return [(p / t,) for p, t in zip(powers, sums, strict=True)]
    return [(x - top - torch.log(t),) for x, t in zip(s.x, sums, strict=True)]


def standardised(s, parts, dims, count, epsilon, centre=True):
    """(x - mean) / sqrt(variance + epsilon) by two all-reduces, with mean and inverse."""
    mean = [t / count for t in summed(s, parts, dims)] if centre else [0.0] * s.ranks
    centred = [x - m for x, m in zip(parts, mean, strict=True)]
    inverse = [torch.rsqrt(t / count + epsilon) for t in summed(s, [c * c for c in centred], dims)]
    return [c * i for c, i in zip(centred, inverse, strict=True)], mean, inverse


def statistics(s, parts, dims, count, epsilon, centre=True):
    """Mean and inverse as results, which are used alike by all ranks."""
    squares = [t / count for t in summed(s, [x * x for x in parts], dims, BROADCAST)]
    if not centre:
        inverses = [torch.rsqrt(q + epsilon) for q in squares]
        return inverses, inverses
    means = [t / count for t in summed(s, parts, dims, BROADCAST)]
    return means, [torch.rsqrt(q - m * m + epsilon) for q, m in zip(squares, means, strict=True)]


def skip_norm(s):
    """The residual sum is local, its statistics are those of a normalisation."""
    held = dict(zip(s.attributes.get("operands", range(len(s.parts))), s.parts, strict=True))
    centre = "Simplified" not in s.op.kind
    bias = held.get(4 if centre else 3)
    joined = s.each(lambda *rows: sum(rows), *([held[0], held[1]] + ([] if bias is None else [bias])))
    over = ((-1,), s.whole[0][-1], s.attributes.get("epsilon", 1e-12), centre)
    found, _, _ = standardised(s, joined, *over)
    found = s.each(torch.mul, found, held[2])
    found = s.each(torch.add, found, held[3]) if centre and 3 in held else found
    wanted = s.attributes.get("results", range(len(s.shapes[0])))
    rows = statistics(s, joined, *over) if 1 in wanted else ([None] * s.ranks,) * 2
    return [tuple(one[i] for i in wanted) for one in zip(found, *rows, joined, strict=True)]


def affine(s, parts, view=lambda side: side):
    for index, operation in ((1, torch.mul), (2, torch.add)):
        if index < len(s.parts):
            parts = [operation(x, view(side)) for x, side in zip(parts, s.parts[index], strict=True)]
    return parts


def norm(s):
    kind, shape, rank = s.op.kind, s.whole[0], len(s.whole[0])
    epsilon = s.attributes.get("epsilon", 1e-5)
    if kind.startswith("Reduce"):
        return reduction(s)
    if kind.endswith("Loss"):
        return mean_loss(s)
    if kind in ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"):
        dims = tuple(range(s.attributes.get("axis", -1) % rank, rank))
        count = prod(shape[d] for d in dims)
        centre = kind == "LayerNormalization"
        found, _, _ = standardised(s, s.x, dims, count, epsilon, centre)
        found = affine(s, found)
        if len(s.shapes[0]) == 1:
            return [(y,) for y in found]
        return list(zip(found, *statistics(s, s.x, dims, count, epsilon), strict=True))
    if "Skip" in kind:
        return skip_norm(s)
    if kind == "InstanceNormalization":
        dims = tuple(range(2, rank))
        found, _, _ = standardised(s, s.x, dims, prod(shape[2:]), epsilon)
        return [(y,) for y in affine(s, found, lambda side: side.reshape(-1, *[1] * (rank - 2)))]
    if kind == "GroupNormalization":
        groups = s.attributes["num_groups"]
        split = [x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]) for x in s.x]
        dims = tuple(range(2, rank + 1))
        found, _, _ = standardised(s, split, dims, prod(shape[1:]) // groups, epsilon)
        found = [y.reshape(x.shape) for y, x in zip(found, s.x, strict=True)]
        repeat = shape[1] // s.whole[1][0]
        return [
            (y,) for y in affine(s, found, lambda side: side.repeat_interleave(repeat).reshape(-1, *[1] * (rank - 2)))
        ]
    if kind == "LpNormalization":
        axis, p = s.attributes.get("axis", -1), s.attributes.get("p", 2)
        norms = [t ** (1 / p) for t in summed(s, [x.abs() ** p for x in s.x], (axis,))]
        return [(x / n,) for x, n in zip(s.x, norms, strict=True)]
    assert kind == "MeanVarianceNormalization"
    dims = s.attributes.get("axes", (0, 2, 3))
    found, _, _ = standardised(s, s.x, dims, prod(shape[d] for d in dims), 0.0)
    return [(y,) for y in found]


def reduction(s):
    how, dims, keep = s.op.kind.removeprefix("Reduce"), s.attributes["axes"], bool(s.attributes["keepdims"])
    if how in ("Max", "Min"):
        sign = 1 if how == "Max" else -1
        local = [sign * (sign * x).amax(dims, keepdim=keep) for x in s.x]
        top = sign * largest([sign * x for x in local])
        return [(torch.where(x == top, x, top),) for x in local]
    if how == "Prod":
        local = s.x
        for d in sorted(dims, reverse=True):
            local = [x.prod(d, keepdim=keep) for x in local]
        product = agree(local, torch.prod)
        return [(x * (product / x.detach()),) for x in local]
    top = 0.0
    if how == "LogSumExp":
        top = largest([x.amax(dims, keepdim=True) for x in s.x])
    function = {
        "L1": torch.abs,
        "L2": torch.square,
        "SumSquare": torch.square,
        "LogSumExp": lambda x: torch.exp(x - top),
    }
    sums = summed(s, [function.get(how, lambda x: x)(x) for x in s.x], dims, BROADCAST, keep)
    if how == "Mean":
        count = prod(s.whole[0][d] for d in dims)
        return [(t / count,) for t in sums]
    if how == "LogSumExp":
        return [(torch.log(t) + top.reshape(t.shape),) for t in sums]
    return [({"L2": torch.sqrt, "LogSum": torch.log}.get(how, lambda t: t)(t),) for t in sums]


def mean_loss(s):
    """Rows are split: the sum of the losses and of their weights are all-reduced."""
    plain = replace(s.op, attributes=tuple(sorted({**s.attributes, "reduction": "sum"}.items())))
    sums = s.local(plain)
    labels = s.parts[1]
    kept = [torch.ones_like(y) if "ignore_index" not in s.attributes else (y != s.attributes["ignore_index"]).long()
            for y in labels]  # fmt: skip
    weights = (
        s.parts[2]
        if len(s.parts) > 2
        else [torch.ones(s.whole[0][s.attributes.get("class_dim", 1)]).double()] * s.ranks
    )
    share = [(w[y] * k).sum() for w, y, k in zip(weights, labels, kept, strict=True)]
    losses = total([one[0] for one in sums], BROADCAST)
    counts = total(share, BROADCAST)
    return [(loss / count, *one[1:]) for loss, count, one in zip(losses, counts, sums, strict=True)]


def batch_norm(s):
    dims = tuple(d for d in range(len(s.whole[0])) if d != 1)
    count = prod(s.whole[0][d] for d in dims)
    found, _, _ = standardised(s, s.x, dims, count, s.attributes.get("epsilon", 1e-5))
    shape = (-1, *[1] * (len(dims) - 1))
    found = affine(s, found, lambda side: side.reshape(shape))
    if len(s.shapes[0]) == 1:
        return [(y,) for y in found]
    means = [t.flatten() / count for t in summed(s, [x.detach() for x in s.x], dims)]
    squares = [t.flatten() / count for t in summed(s, [x.detach() ** 2 for x in s.x], dims)]
    kept = s.attributes.get("momentum", 0.9)
    running = [
        (old_m.detach() * kept + m * (1 - kept), old_v.detach() * kept + (q - m * m) * (1 - kept))
        for old_m, old_v, m, q in zip(s.parts[3], s.parts[4], means, squares, strict=True)
    ]
    return [(y, *both) for y, both in zip(found, running, strict=True)]


def halo(s):
    """Each rank gets the rows that its windows cover beside its own, zeros at the border."""
    dim = s.signature.inputs[0]
    i, rank = dim - 2, len(s.whole[0]) - 2
    a = s.attributes
    strides, dilations = a.get("strides", (1,) * rank), a.get("dilations", (1,) * rank)
    windows = [d * (k - 1) + 1 for d, k in zip(dilations, s.whole[1][2:], strict=True)]
    pads = list(a.get("pads", (0,) * (2 * rank)))
    if a.get("auto_pad") == "SAME_UPPER":
        spare = [
            max((-(-n // st) - 1) * st + w - n, 0) for n, st, w in zip(s.whole[0][2:], strides, windows, strict=True)
        ]
        pads = [t // 2 for t in spare] + [t - t // 2 for t in spare]
    begin = pads[i]
    pads[i] = pads[i + rank] = 0
    op = replace(s.op, attributes=tuple(sorted({**a, "pads": tuple(pads), "auto_pad": "NOTSET"}.items())))
    wholes = convert(s.x, dim, BROADCAST, PARTIAL)
    rows = s.shapes[0][0][dim]
    found = []
    for r, whole in enumerate(wholes):
        first = r * rows * strides[i] - begin
        stop = first + (rows - 1) * strides[i] + windows[i]
        inside = whole.narrow(dim, max(first, 0), min(stop, whole.shape[dim]) - max(first, 0))
        border = [0, 0] * (whole.ndim - 1 - dim) + [max(-first, 0), max(stop - whole.shape[dim], 0)]
        shard = torch.nn.functional.pad(inside, border)
        found.append(apply_local(op, [shard, *[p[r] for p in s.parts[1:]]], s.shapes[r]))
    return found


def visible(s):
    """[queries, keys] where the causal mask and the window let a query look."""
    queries, keys = s.whole[0][-2], s.whole[1][-2]
    ahead = torch.arange(keys) - torch.arange(queries)[:, None]
    left, right = s.attributes.get("left_window_size", -1), s.attributes.get("right_window_size", -1)
    right = 0 if s.attributes.get("is_causal") else right
    return ((ahead <= right) | (right < 0)) & ((ahead >= -left) | (left < 0))


def attention(s):
    """Keys are split: row maximum, row sum and result are all-reduced."""
    a, kept = s.attributes, visible(s)
    heads = lambda x, h: x if x.ndim == 4 else x.reshape(x.shape[0], x.shape[1], h, -1).transpose(1, 2)  # noqa: E731
    qs = [heads(x, a.get("q_num_heads")) for x in s.parts[0]]
    ks, vs = ([heads(x, a.get("kv_num_heads")) for x in side] for side in s.parts[1:3])
    group = qs[0].shape[1] // ks[0].shape[1]
    scale = a.get("scale", qs[0].shape[-1] ** -0.5)
    cap = a.get("softcap", 0.0)
    size = ks[0].shape[2]
    scores = []
    for r, (q, k) in enumerate(zip(qs, ks, strict=True)):
        score = scale * q @ k.repeat_interleave(group, 1).mT
        score = cap * torch.tanh(score / cap) if cap else score
        if len(s.parts) > 3:
            mask = s.parts[3][r]
            score = score.masked_fill(~mask, -1e30) if mask.dtype == torch.bool else score + mask
        scores.append(score.masked_fill(~kept[:, r * size : (r + 1) * size], -1e30))
    top = largest([x.amax(-1, keepdim=True) for x in scores])
    powers = [torch.exp(x - top) for x in scores]
    sums = summed(s, powers, -1)
    parts = [p / t @ v.repeat_interleave(group, 1) for p, t, v in zip(powers, sums, vs, strict=True)]
    found = total(parts, BROADCAST)
    return [(y if s.parts[0][0].ndim == 4 else y.transpose(1, 2).reshape(s.shapes[0][0]),) for y in found]


def cross_entropy(s):
    """Classes are split: maximum, sum of powers and the picked score (with its weight) are all-reduced."""
    a, labels = s.attributes, s.parts[1]
    dim = a.get("class_dim", 1)
    size = s.x[0].shape[dim]

    def log_sum(gradient):
        if s.op.kind == "NegativeLogLikelihoodLoss":
            return [torch.zeros(())] * s.ranks
        top = largest([x.amax(dim, keepdim=True) for x in s.x])
        return [torch.log(t) + top for t in summed(s, [torch.exp(x - top) for x in s.x], (dim,), gradient)]

    picked, share = [], []
    for r, (x, y) in enumerate(zip(s.x, labels, strict=True)):
        mine = (y >= r * size) & (y < (r + 1) * size)
        place_ = torch.where(mine, y - r * size, 0)
        kept = (y != a.get("ignore_index", -1)).to(x.dtype)
        picked.append(x.gather(dim, place_.unsqueeze(dim)).squeeze(dim) * mine)
        share.append(s.parts[2][r][place_] * mine * kept if len(s.parts) > 2 else kept)
    picked = total(picked, BROADCAST)
    share = total(share, BROADCAST) if len(s.parts) > 2 else share
    norms = [n.squeeze(dim) if n.ndim else n for n in log_sum(BROADCAST)]
    rows = [(n - p) * w for n, p, w in zip(norms, picked, share, strict=True)]
    reduction = a.get("reduction", "mean")
    losses = rows if reduction == "none" else [row.sum() for row in rows]
    if reduction == "mean":
        losses = [loss / w.sum() for loss, w in zip(losses, share, strict=True)]
    if len(s.shapes[0]) == 1:
        return [(loss,) for loss in losses]
    return [(loss, x - n) for loss, x, n in zip(losses, s.x, log_sum(PARTIAL), strict=True)]


FORMS = {
    "softmax": softmax, "norm": norm, "batch_norm": batch_norm, "halo": halo, "attention": attention,
    "cross_entropy": cross_entropy,
}  # fmt: skip
"""Name of an internal collective -> the program of the ranks."""


def lookup(s):
    """Rows of the table are split: each rank looks up its own and gives zeros for the others."""
    size = s.x[0].shape[0]
    found = []
    for r, (table, ids) in enumerate(zip(*s.parts, strict=True)):
        mine = (ids >= r * size) & (ids < (r + 1) * size)
        rows = table[torch.where(mine, ids - r * size, 0)]
        found.append((rows * mine[..., None],))
    return found


def experts(s):
    """Experts are split: each rank counts them from the first of its own."""
    count = (s.shapes[0][0] if s.op.kind == DISPATCH else s.x[0].shape)[0]
    chosen = [held - r * count for r, held in enumerate(s.parts[1])]
    return replace(s, parts=[s.parts[0], chosen, *s.parts[2:]]).local()


def queries(s):
    """Queries are split: each rank masks by the positions of its own."""
    plain = {k: v for k, v in s.attributes.items() if k not in ("is_causal", "left_window_size")}
    op = replace(local_operator(s.op, s.signature, s.ranks), attributes=tuple(sorted(plain.items())))
    return s.local(op, extra=list(visible(s).chunk(s.ranks, 0)))


def bias(s):
    """Added on the first rank only; the others know its gradient as well, since the output's is whole."""
    slot = s.signature.inputs.index(BROADCAST)
    others = s.parts[1 - slot]
    return [
        (x + b if r == 0 else x + (b - b.detach()),) for r, (x, b) in enumerate(zip(others, s.parts[slot], strict=True))
    ]


def program(s):
    """What the ranks run."""
    factor = None if s.signature.factor is None else s.op.rule.factors[s.signature.factor]
    if factor is None:
        return bias(s) if s.op.kind == "Add" and set(s.signature.inputs) == {BROADCAST, PARTIAL} else s.local()
    if factor.collective is not None:
        return FORMS[factor.collective.name](s)
    if s.op.kind == "Gather" and factor.summed:
        return lookup(s)
    if s.op.kind in (DISPATCH, COMBINE) and factor.name == "e":
        return experts(s)
    if s.op.kind == "Attention" and factor.name == "s" and not visible(s).all():
        return queries(s)
    return s.local()


# The comparison


def table(op, tensors):
    graph = Graph(name="one", operators=(op,), tensors=tensors, outputs=op.outputs)
    return operator_signatures(graph, op)


def share(shape, placement, ranks, rank):
    """Shape of the part of a rank: equal parts rounded up, the last one shorter where the size does not divide."""
    each = [-(-n // ranks) for n in shape]
    return tuple(
        min(e, n - rank * e) if d == placement else n for d, (n, e) in enumerate(zip(shape, each, strict=True))
    )


def rank_counts(op, signature):
    """Sizes of a mesh axis among 2, 3, 4 that divide the split factor, or whose parts may be of unlike sizes."""
    if signature.factor is None:
        return [3]
    factor = op.rule.factors[signature.factor]
    size = SAMPLES if factor.is_batch else factor.size
    unevenly = may_be_uneven(op.rule, signature.factor)
    return [n for n in (2, 3, 4) if size % n == 0 or (unevenly and size > (n - 1) * -(-size // n))]


def text(op, signature, ranks):
    sides = [", ".join(placement_text(p) for p in side) for side in (signature.inputs, signature.outputs)]
    factor = "" if signature.factor is None else f" by {op.rule.factors[signature.factor].name}"
    gradients = ", ".join(placement_text(p) for p in signature.input_gradients)
    return f"{op.kind}: {sides[0]} -> {sides[1]}{factor} on {ranks} ranks, input gradients {gradients}"


def check(whole, signature, ranks):
    op, generator = whole.op, torch.Generator().manual_seed(ranks)
    parts = []
    for x, placement in zip(whole.operands, signature.inputs, strict=True):
        held = place(x.detach(), placement, ranks, generator)
        parts.append([p.requires_grad_() if x.is_floating_point() else p for p in held])
    placed = list(zip(whole.outputs, signature.outputs, strict=True))
    shapes = [[share(y.shape, p, ranks, rank) for y, p in placed] for rank in range(ranks)]
    shards = Shards(op, signature, ranks, parts, shapes, [tuple(x.shape) for x in whole.operands])
    found = program(shards)
    for number, (y, placement) in enumerate(zip(whole.outputs, signature.outputs, strict=True)):
        held = [one[number].detach() for one in found]
        message = f"output {number} of {text(op, signature, ranks)}"
        assert [tuple(h.shape) for h in held] == [shape[number] for shape in shapes], message
        close(assemble(held, placement), y.detach(), message)
    given = [
        [None] * ranks if g is None else place(g, gradient_placement(p), ranks, generator)
        for g, p in zip(whole.output_gradients, signature.outputs, strict=True)
    ]
    outputs = [y for one in found for y in one]
    gradients = [given[number][r] for r in range(ranks) for number in range(len(shapes[0]))]
    leaves = [p for held in parts for p in held]
    flat = iter(differentiate(outputs, gradients, leaves))
    for index, (gradient, placement) in enumerate(zip(whole.gradients, signature.input_gradients, strict=True)):
        held = [next(flat) for _ in range(ranks)]
        if gradient is None:
            continue
        message = f"gradient {index} of {text(op, signature, ranks)}"
        close(assemble([torch.zeros_like(gradient) if h is None else h for h in held], placement), gradient, message)


def close(found, wanted, message):
    torch.testing.assert_close(
        found, wanted, rtol=1e-7, atol=1e-7, equal_nan=True, msg=lambda details: f"{message}\n{details}"
    )


@pytest.mark.parametrize("case", CASES, ids=label)
def test_every_signature_computes_the_whole(case):
    whole = make(case)
    wrong = []
    for signature in table(whole.op, whole.tensors):
        for ranks in rank_counts(whole.op, signature):
            try:
                check(whole, signature, ranks)
            except AssertionError as error:
                wrong.append(f"{text(whole.op, signature, ranks)}:\n  {error}")
    assert not wrong, "\n".join(wrong)


def splits(op, tensors):
    return [s for s in table(op, tensors) if s.factor is not None]


def test_every_kind_has_a_case_with_a_split():
    split = set()
    for case in CASES:
        whole = make(case)
        if any(rank_counts(whole.op, s) for s in splits(whole.op, whole.tensors)):
            split.add(case.kind)
    own = {kind for kind, known in KINDS.items() if known.entry.__module__ not in NOT_EXECUTED}
    assert {case.kind for case in CASES} >= own
    assert own - split == set(NEVER_SPLIT)


def test_every_internal_collective_is_exercised():
    used = set()
    for case in CASES:
        op = make(case).op
        used |= {op.rule.factors[s.factor].collective.name for s in splits(op, make(case).tensors)
                 if op.rule.factors[s.factor].collective is not None and rank_counts(op, s)}  # fmt: skip
    named = {name for kind in KINDS.values() for line in kind.lines for name in line.collectives}
    assert named == used == set(FORMS)


def wrong_claims(whole, signature):
    """The signature with one of its B and P swapped."""
    swap = {BROADCAST: PARTIAL, PARTIAL: BROADCAST}
    for i, placement in enumerate(signature.outputs):
        if placement in swap:
            changed = (*signature.outputs[:i], swap[placement], *signature.outputs[i + 1 :])
            yield replace(signature, outputs=changed)
    for i, (placement, gradient) in enumerate(zip(signature.input_gradients, whole.gradients, strict=True)):
        if placement in swap and gradient is not None and gradient.any():
            changed = (*signature.input_gradients[:i], swap[placement], *signature.input_gradients[i + 1 :])
            yield replace(signature, input_gradients=changed)


@pytest.mark.slow
def test_the_oracle_notices_every_wrong_claim():
    count, missed = 0, []
    for case in CASES:
        whole = make(case)
        for signature in table(whole.op, whole.tensors):
            is_trivial = signature.factor is None and PARTIAL not in signature.inputs
            for ranks in [] if is_trivial else rank_counts(whole.op, signature)[:1]:
                for claim in wrong_claims(whole, signature):
                    count += 1
                    try:
                        check(whole, claim, ranks)
                    except (AssertionError, RuntimeError):
                        continue
                    missed.append(text(whole.op, claim, ranks))
    assert not missed
    assert count > 500


def test_the_oracle_finds_a_wrong_placement():
    """A rule that claims too much fails."""
    case = next(c for c in CASES if label(c) == "MatMul")
    whole = make(case)
    summed_over = next(s for s in table(whole.op, whole.tensors) if s.outputs == (PARTIAL,) and s.factor is not None)
    with pytest.raises(AssertionError, match="replicas differ"):
        check(whole, replace(summed_over, outputs=(BROADCAST,)), 2)
    columns = next(s for s in table(whole.op, whole.tensors) if s.inputs == (BROADCAST, 1))
    with pytest.raises(AssertionError, match="replicas differ"):
        check(whole, replace(columns, input_gradients=(BROADCAST, 1)), 2)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_results_are_made_on_the_device_of_the_operands(case):
    whole = make(case)
    held = [x.detach().to("meta") for x in whole.operands]
    found = apply(whole.op, whole.tensors, held, SAMPLES, torch.device("meta"))
    for y, wanted in zip(found, whole.outputs, strict=True):
        assert (y.device.type, y.shape, y.dtype) == ("meta", wanted.shape, wanted.dtype)


EXTRA = {"weights", "two dims", "running", "statistics"}
"""Cases with operands or results beyond what the rule prices."""


def test_internal_collectives_cost_what_the_rules_say():
    """Elements that the forms all-reduce are the bytes of the rule, 4 each; the halo is counted in test_operators."""
    wrong, count = [], 0
    for case in CASES:
        whole = make(case)
        for signature in splits(whole.op, whole.tensors):
            exchange = whole.op.rule.factors[signature.factor].collective
            if exchange is None or exchange.name == "halo" or case.id in EXTRA:
                continue
            for ranks in rank_counts(whole.op, signature)[:1]:
                with recorded() as log:
                    check(whole, signature, ranks)
                sent = {way: sum(n for _, d, n in log if d == way) for way in ("forward", "backward")}
                names = {name for name, _, _ in log}
                priced = {way: (pair[0] + pair[1] * SAMPLES) / 4 for way, pair in
                          (("forward", exchange.forward_bytes), ("backward", exchange.backward_bytes))}  # fmt: skip
                has_gradient = any(g is not None for g in whole.gradients)
                count += 1
                if sent["forward"] != priced["forward"] or (has_gradient and sent["backward"] != priced["backward"]):
                    wrong.append(f"{case.id} {text(whole.op, signature, ranks)}: sent {sent}, priced {priced}")
                if names != {exchange.kind}:
                    wrong.append(f"{text(whole.op, signature, ranks)}: runs {names}, priced {exchange.kind}")
    assert not wrong, "\n".join(wrong)
    assert count > 30
