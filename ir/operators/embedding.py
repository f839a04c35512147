"""Look-ups by index: the Gather and Scatter kinds, and OneHot."""

from __future__ import annotations

from math import prod

from ir.graph import Tensor
from ir.operators.base import BakedBatch, Context, Dims, MissingBatch, Result, Unsupported, kind

AMONG_SAMPLES = (
    "it looks up rows of the batch dim, so that a sample would depend on others; in a graph network, make the first "
    "dim the number of graphs, and the second one the nodes"
)
"""Reason, shown to the user, why look-ups along the batch dim are refused."""


def look_up_share(table: int, rows: int) -> float:
    """Bytes that a look-up moves, as a fraction of the bytes of the table and of the result.

    A look-up reads only the rows that it returns, and writes them.

    Args:
        table: elements of the table.
        rows: elements of the result.
    """
    return min(2.0 * rows / (table + rows), 1.0) if table + rows else 0.0


def _lookup_traffic(ctx: Context, output_elements: int) -> tuple[float, float]:
    """Traffic of a look-up, forward and backward; the backward pass writes the gradient of the whole table.

    Source: `torch.nn.Embedding(sparse=False)`, whose backward pass fills a table of zeros and adds rows.
    """
    return look_up_share(ctx.tensor(0).num_elements, output_elements), 1.0


@kind("Gather", rule=("{kept rows+!}, {at} -> {kept at}", "{kept rows+!} -> {kept}"))
def gather(ctx: Context) -> Result:
    """`data[indices]` along `axis`; without the second operand, the index is one constant, and the dim is removed.

    If the rows of a parameter are split, each rank looks up its own rows and returns zeros for the others, which gives
    partial sums (`+`). Rows of activations stay whole (`!`).
    """
    data = ctx.tensor(0)
    rule = ctx.rule
    axis = ctx.axis("axis", 0, len(data.shape))
    dims = rule.dims(data)
    if data.batch_dim == axis:
        raise Unsupported(AMONG_SAMPLES)
    is_table = ctx.needs_gradient[0] and data.batch_dim is None and data.is_float and data.role == "parameter"
    rule.mark(dims[axis], summed=is_table and axis == 0, fixed=not (is_table and axis == 0))
    value = ctx.value(1)
    if "indices" in ctx.attributes or (value is not None and value.ndim == 0):
        attributes = {}
        if "indices" not in ctx.attributes and value is not None:
            attributes = {"indices": int(value) % data.shape[axis] if data.shape[axis] else 0, "axis": axis}
        out = dims[:axis] + dims[axis + 1 :]
        return Result([(0, dims)], [out], passing="first", traffic=(0.0, 1.0), attributes=attributes)
    indices = ctx.tensor(1)
    if indices.batch_dim is not None and data.batch_dim is not None:
        raise Unsupported("data and indices both depend on the sample")
    if axis == 0 and data.batch_dim is None and len(indices.shape) > 1:
        ctx.keep_one_sample(1)  # positions or kinds of tokens
    own = rule.dims(indices)
    out = [*dims[:axis], *own, *dims[axis + 1 :]]
    elements = prod(rule.size(factors) for factors in out)
    return Result(
        [(0, dims), (1, own)],
        [out],
        passing="first",
        traffic=_lookup_traffic(ctx, elements),
        saved_inputs=(1,),
        attributes={"axis": axis},
    )


def _same_batch(ctx: Context, first: tuple[int, Tensor], second: tuple[int, Tensor], axis: int) -> None:
    """Requires that both operands have the batch if one has it; their dims are the same except for `axis`.

    Raises:
        MissingBatch: an operand must first be repeated over the batch.
        BakedBatch: an operand holds the exported batch.
    """
    for (_, own), (index, other) in ((first, second), (second, first)):
        d = own.batch_dim
        if d is None or d == axis or other.batch_dim is not None or d >= len(other.shape):
            continue
        if other.shape[d] == own.shape[d]:
            raise MissingBatch(index, d)
        if other.shape[d] == own.shape[d] * ctx.export_batch:
            raise BakedBatch(index, d, own.shape[d])


@kind("GatherElements", rule="{shared rows!}, {shared at!} -> {shared at}")
def gather_elements(ctx: Context) -> Result:
    """One look-up along `axis` for each position; the axis stays whole."""
    data, indices = ctx.tensor(0), ctx.tensor(1)
    rule = ctx.rule
    axis = ctx.axis("axis", 0, len(data.shape))
    if len(indices.shape) != len(data.shape):
        raise Unsupported("its data and indices have different numbers of dims")
    if axis in (data.batch_dim, indices.batch_dim):
        raise Unsupported(AMONG_SAMPLES)
    source: Dims = []
    target: Dims = []
    _same_batch(ctx, (0, data), (1, indices), axis)
    for d, size in enumerate(data.shape):
        is_shared = d != axis and indices.shape[d] == size and (data.batch_dim == d) == (indices.batch_dim == d)
        source.append(rule.dim(data, d, fixed=not is_shared))
        target.append(source[-1] if is_shared else rule.dim(indices, d, fixed=True))
    return Result([(0, source), (1, target)], [target], passing="first", traffic=(1.0, 1.5), saved_inputs=(1,))


@kind("GatherND", rule="{shared rows! kept}, {shared at} depth! -> {shared at kept}")
def gather_nd(ctx: Context) -> Result:
    """Leading dims of the indices can be split; the dims of the data that the indices address stay whole."""
    data, indices = ctx.tensor(0), ctx.tensor(1)
    rule = ctx.rule
    shared = ctx.int_attribute("batch_dims", 0)
    depth = indices.shape[-1]
    if shared + depth > len(data.shape) or indices.batch_dim == len(indices.shape) - 1:
        raise Unsupported("indices do not fit the data")
    if data.batch_dim is not None and shared <= data.batch_dim < shared + depth:
        raise Unsupported(AMONG_SAMPLES)
    if not shared and data.batch_dim is None and len(indices.shape) > 2:
        ctx.keep_one_sample(1)
    if any(t.batch_dim is not None and t.batch_dim < shared for t in (data, indices)):
        _same_batch(ctx, (0, data), (1, indices), -1)
    dims = rule.dims(data)
    for factors in dims[shared : shared + depth]:
        rule.mark(factors, fixed=True)
    own: Dims = []
    for d in range(len(indices.shape) - 1):
        if d < shared:
            if indices.shape[d] != data.shape[d] or indices.batch_dim != data.batch_dim:
                raise Unsupported("indices do not fit the data")
            own.append(dims[d])
        else:
            own.append(rule.dim(indices, d))
    own.append(rule.loop(depth, fixed=True))
    if data.batch_dim is not None and not data.batch_dim < shared and indices.batch_dim is not None:
        raise Unsupported("data and indices both depend on the sample")
    out = [*own[:-1], *dims[shared + depth :]]
    return Result([(0, dims), (1, own)], [out], passing="first", traffic=(1.0, 1.5), saved_inputs=(1,))


@kind("ScatterElements", "Scatter", rule="{rows!}, {at!}, {new!} -> {rows}")
def scatter(ctx: Context) -> Result:
    """Replicated; only the batch can be split, if data, indices and updates all have it in the same dim."""
    data, indices, updates = ctx.tensor(0), ctx.tensor(1), ctx.tensor(2)
    rule = ctx.rule
    axis = ctx.axis("axis", 0, len(data.shape))
    for pair in (((1, indices), (0, data)), ((2, updates), (0, data)), ((1, indices), (2, updates))):
        _same_batch(ctx, *pair, axis)
    same = data.batch_dim is not None and indices.batch_dim == updates.batch_dim == data.batch_dim != axis
    operands: list[tuple[int, Dims]] = [(i, rule.dims(t, fixed=True)) for i, t in enumerate((data, indices, updates))]
    result = Result(operands, [operands[0][1]], traffic=(1.0, 1.5), saved_inputs=(1,))
    if not same and any(t.batch_dim is not None for t in (data, indices, updates)):
        rule.mark([rule.batch()], fixed=True)
        result.replicated_because = "it writes to other samples"
    return result


@kind("ScatterND", rule="{rows! kept}, {at!}, {new! kept} -> {rows kept}")
def scatter_nd(ctx: Context) -> Result:
    """The dims of the data that follow those addressed by indices can be split; they are the last of the updates."""
    data, indices, updates = ctx.tensor(0), ctx.tensor(1), ctx.tensor(2)
    rule = ctx.rule
    lead, depth = len(indices.shape) - 1, indices.shape[-1]
    if len(updates.shape) != lead + len(data.shape) - depth:
        raise Unsupported("the updates do not fit the indices")
    shift = depth - lead
    for index, own, other, move in ((0, updates, data, shift), (2, data, updates, -shift)):
        d = None if own.batch_dim is None else own.batch_dim + move
        free = d is not None and other.batch_dim is None and d >= (depth if index == 0 else lead)
        if d is None or not free or indices.batch_dim is not None:
            continue
        size = own.shape[own.batch_dim or 0]
        if other.shape[d] == size:
            raise MissingBatch(index, d)
        if other.shape[d] == size * ctx.export_batch:
            raise BakedBatch(index, d, size)
    same = data.batch_dim is not None and data.batch_dim >= depth and updates.batch_dim == data.batch_dim - shift
    dims = [rule.dim(data, d, fixed=d < depth) for d in range(len(data.shape))]
    places = rule.dims(indices, fixed=True)
    own_dims: Dims = [rule.dim(updates, d, fixed=True) for d in range(lead)]
    for d in range(lead, len(updates.shape)):
        if updates.shape[d] != data.shape[d + shift]:
            raise Unsupported("the updates do not fit the data")
        own_dims.append(dims[d + shift] if same or updates.batch_dim != d else rule.dim(updates, d, fixed=True))
    result = Result([(0, dims), (1, places), (2, own_dims)], [dims], traffic=(1.0, 1.5), saved_inputs=(1,))
    carriers = [t for t in (data, indices, updates) if t.batch_dim is not None]
    if carriers and not (same and indices.batch_dim is None):
        rule.mark([rule.batch()], fixed=True)
        result.replicated_because = "it writes to other samples"
    return result


@kind("OneHot", rule="{kept} -> {kept depth!}")
def one_hot(ctx: Context) -> Result:
    """One-hot encoding: adds a dim of size `depth`."""
    indices = ctx.tensor(0)
    depth = ctx.ints("depth", 1)
    if not depth:
        raise Unsupported("its depth is missing or depends on data")
    rank = len(indices.shape) + 1
    axis = ctx.axis("axis", -1, rank)
    dims = ctx.rule.dims(indices)
    out = list(dims)
    out.insert(axis, ctx.rule.loop(depth[0], fixed=True))
    dtype = ctx.tensor(2).dtype if ctx.has(2) else str(ctx.attributes.get("dtype", "float32"))
    values = ctx.floats("values", 2) or (0.0, 1.0)
    return Result(
        [(0, dims)],
        [out],
        [dtype],
        traffic=(1.0, 0.0),
        attributes={"depth": depth[0], "values": values, "dtype": dtype},
    )
