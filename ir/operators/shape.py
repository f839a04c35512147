"""Kinds that rearrange elements. Operands that state shapes, axes and the like become attributes, at one sample.

Traffic: pure views move no data in either pass. Slice and Split are views in the forward pass, and their gradients are
copied into a larger tensor. Concat copies in the forward pass, and its gradients are views. The backward pass of Expand
sums over the repeated elements.
"""

from __future__ import annotations

from math import prod

from ir.batch import align, reshape_target
from ir.operators.base import BakedBatch, Context, Dims, MissingBatch, Result, Unsupported, kind, within

MAX_INT = 2**31 - 1


def _reshaped(ctx: Context, shape: tuple[int, ...], batch_dim: int | None, *, traced: bool = True) -> tuple[Dims, Dims]:
    """Factors of the operand and of its reshaped view.

    Args:
        ctx: the use; the factors are added to its rule.
        shape: shape of the view, at one sample.
        batch_dim: the dim of the view that holds the batch; None if it has none.
        traced: whether it is known which dim of the view holds the batch; if not, the batch is not split.
    """
    tensor = ctx.tensor(0)
    rule = ctx.rule
    source: list[list[int]] = [[] for _ in tensor.shape]
    target: list[list[int]] = [[] for _ in shape]
    for ins, outs, sizes in align(tensor.shape, shape):
        if not sizes:
            for dims, side, own in ((ins, source, tensor.shape), (outs, target, shape)):
                for d in dims:
                    side[d].append(rule.factor(own[d], fixed=True))
            continue
        factors = [rule.factor(s) for s in sizes]
        for dims, side, own in ((ins, source, tensor.shape), (outs, target, shape)):
            position = 0
            for d in dims:
                reached = 1
                while reached < own[d]:
                    side[d].append(factors[position])
                    reached *= rule.factors[factors[position]].size
                    position += 1
    if tensor.batch_dim is not None:
        source[tensor.batch_dim].insert(0, rule.batch())
        if batch_dim is not None:
            target[batch_dim].insert(0, rule.batch())
        if not traced or batch_dim is None:
            rule.mark([rule.batch()], fixed=True)
    return [tuple(d) for d in source], [tuple(d) for d in target]


def _view(
    ctx: Context, shape: tuple[int, ...], batch_dim: int | None, attributes: dict[str, object], *, traced: bool = True
) -> Result:
    source, target = _reshaped(ctx, shape, batch_dim, traced=traced)
    result = Result([(0, source)], [target], passing="joint", traffic=(0.0, 0.0), attributes=attributes)
    result.is_opaque = not traced
    return result


VIEW = "{(loop) rest!} -> {(loop) new!}"
"""Groups of dims with the same product of sizes on both sides share their loops."""


@kind("Reshape", rule=VIEW, is_view=True)
def reshape(ctx: Context) -> Result:
    """Reshape: groups of dims with the same product share loops, such as `(h d)` and `h d`; other dims stay whole."""
    tensor = ctx.tensor(0)
    given = ctx.ints("shape", 1)
    if given is None:
        raise Unsupported("no shape")
    allow_zero = bool(ctx.int_attribute("allowzero", 0))
    target = reshape_target(tensor, given, export_batch=ctx.export_batch, allow_zero=allow_zero)
    if target is None:
        raise Unsupported(f"shape {tensor.shape_at(ctx.export_batch)} does not fit {given}")
    return _view(
        ctx, target.shape, target.batch_dim, {"shape": target.shape, "allowzero": None}, traced=target.is_traced
    )


@kind("Flatten", rule=VIEW, is_view=True)
def flatten(ctx: Context) -> Result:
    """Reshapes to two dims: the dims before `axis`, and those from `axis` on."""
    tensor = ctx.tensor(0)
    axis = ctx.int_attribute("axis", 1)
    axis = axis + len(tensor.shape) if axis < 0 else axis
    shape = (prod(tensor.shape[:axis]), prod(tensor.shape[axis:]))
    batch = tensor.batch_dim
    if batch is None:
        return _view(ctx, shape, None, {"axis": axis})
    lead = prod(tensor.shape[:batch]) if batch < axis else prod(tensor.shape[axis:batch])
    return _view(ctx, shape, 0 if batch < axis else 1, {"axis": axis}, traced=lead == 1)


@kind("Squeeze", rule=VIEW, is_view=True)
def squeeze(ctx: Context) -> Result:
    """Removes dims of size 1; the batch dim remains unless `axes` names it."""
    tensor = ctx.tensor(0)
    rank = len(tensor.shape)
    axes = ctx.ints("axes", 1)
    if axes is None:
        axes = tuple(i for i, s in enumerate(tensor.shape) if s == 1 and tensor.batch_dim != i)
    gone = {within(a, rank) for a in axes} if rank else set()
    if tensor.batch_dim in gone or any(tensor.shape[a] != 1 for a in gone):
        raise Unsupported(f"dims {sorted(gone)} of {tensor.shape} are not of size 1 for every batch")
    keep = [i for i in range(rank) if i not in gone]
    batch = keep.index(tensor.batch_dim) if tensor.batch_dim is not None else None
    return _view(ctx, tuple(tensor.shape[i] for i in keep), batch, {"axes": tuple(sorted(gone))})


@kind("Unsqueeze", rule=VIEW, is_view=True)
def unsqueeze(ctx: Context) -> Result:
    """Inserts dims of size 1."""
    tensor = ctx.tensor(0)
    axes = ctx.ints("axes", 1)
    if axes is None:
        raise Unsupported("its axes are missing or depend on data")
    rank = len(tensor.shape) + len(axes)
    new = {within(a, rank) for a in axes}
    if len(new) < len(axes):
        raise Unsupported(f"axes {axes} repeat")
    shape: list[int] = []
    batch = None
    old = iter(range(len(tensor.shape)))
    for i in range(rank):
        if i in new:
            shape.append(1)
            continue
        d = next(old)
        if d == tensor.batch_dim:
            batch = i
        shape.append(tensor.shape[d])
    return _view(ctx, tuple(shape), batch, {"axes": tuple(sorted(new))})


@kind("Transpose", rule="{dims} -> {dims}", is_view=True)
def transpose(ctx: Context) -> Result:
    """A permutation of dims, which copies activations, because their consumers need contiguous tensors."""
    tensor = ctx.tensor(0)
    rank = len(tensor.shape)
    given = ctx.ints("perm") or tuple(reversed(range(rank)))
    # PyTorch's older exporter leaves negative dims as the module wrote them.
    perm = tuple(p + rank if -rank <= p < 0 else p for p in given)
    if sorted(perm) != list(range(rank)):
        raise Unsupported(f"perm={given} does not name each of {rank} dims once")
    dims = ctx.rule.dims(tensor)
    return Result(
        [(0, dims)], [[dims[p] for p in perm]], passing="joint", traffic=(1.0, 1.0), attributes={"perm": perm}
    )


def _bounds(ctx: Context) -> list[tuple[int, int, int, int]]:
    """(axis, start, stop, step) for each axis of a Slice, at one sample; start and stop are clipped to the dim."""
    tensor = ctx.tensor(0)
    rank = len(tensor.shape)
    starts, ends = ctx.ints("starts", 1), ctx.ints("ends", 2)
    if starts is None or ends is None:
        raise Unsupported("its starts or ends are missing or depend on data")
    axes = ctx.ints("axes", 3) or tuple(range(len(starts)))
    steps = ctx.ints("steps", 4) or (1,) * len(starts)
    found = []
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise Unsupported(f"{len(starts)} starts, {len(ends)} ends, {len(axes)} axes, {len(steps)} steps")
    if len({within(axis, rank) for axis in axes}) < len(axes):
        raise Unsupported(f"axes {axes} repeat")
    for start, stop, axis, step in zip(starts, ends, axes, steps, strict=True):
        d = within(axis, rank)
        size = tensor.shape[d] * (ctx.export_batch if tensor.batch_dim == d else 1)
        if step == 0:
            raise Unsupported("a step of 0")
        if tensor.batch_dim == d:
            whole = step == 1 and slice(start, stop).indices(size)[:2] == (0, size)
            if not whole:
                raise Unsupported("it takes some of the samples")
            continue
        first, last, stride = slice(start, stop if stop > -MAX_INT or step > 0 else None, step).indices(size)
        found.append((d, first, last, stride))
    return found


@kind("Slice", rule="{kept cut!} -> {kept rest!}", is_view=True)
def slice_(ctx: Context) -> Result:
    """Dims that are sliced stay whole; dims that are kept entirely can be split."""
    tensor = ctx.tensor(0)
    rule = ctx.rule
    cuts = {}
    for axis, start, stop, step in _bounds(ctx):
        size = len(range(start, stop, step))
        if size != tensor.shape[axis] or step != 1:
            cuts[axis] = (start, stop, step, size)
    source: Dims = []
    target: Dims = []
    for d in range(len(tensor.shape)):
        source.append(rule.dim(tensor, d, fixed=d in cuts))
        target.append(rule.loop(cuts[d][3], fixed=True) if d in cuts else source[-1])
    axes = tuple(sorted(cuts))
    attributes = {
        "axes": axes,
        "starts": tuple(cuts[a][0] for a in axes),
        # With a negative step down to the first element, Python's stop is -1, which in ONNX denotes the last element.
        "ends": tuple(cuts[a][1] if cuts[a][1] >= 0 else -tensor.shape[a] - 1 for a in axes),
        "steps": tuple(cuts[a][2] for a in axes),
    }
    return Result([(0, source)], [target], passing="joint", traffic=(0.0, 1.0), attributes=attributes)


@kind("Split", rule="{kept axis!} -> {kept piece!}*", is_view=True)
def split(ctx: Context) -> Result:
    """Splits a tensor into pieces along `axis`, which stays whole."""
    tensor = ctx.tensor(0)
    axis = ctx.axis("axis", 0, len(tensor.shape))
    size = tensor.shape[axis]
    sizes = ctx.ints("split", 1)
    if tensor.batch_dim == axis:
        raise Unsupported("it splits the samples into groups")
    if sizes is None:
        parts = ctx.int_attribute("num_outputs", ctx.num_outputs)
        if not 0 < parts <= max(size, ctx.num_outputs):
            raise Unsupported(f"it splits a dim of {size} into {parts} pieces")
        chunk = -(-size // parts)
        sizes = tuple(max(min(chunk, size - chunk * i), 0) for i in range(parts))
    if sum(sizes) != size:
        raise Unsupported(f"it splits a dim of {size} into pieces of {sizes}")
    dims = ctx.rule.dims(tensor)
    ctx.rule.mark(dims[axis], fixed=True)
    outputs: list[Dims] = [[*dims[:axis], ctx.rule.loop(piece, fixed=True), *dims[axis + 1 :]] for piece in sizes]
    return Result(
        [(0, dims)],
        outputs,
        [tensor.dtype] * len(sizes),
        passing="joint",
        traffic=(0.0, 1.0),
        attributes={"axis": axis, "split": sizes, "num_outputs": None},
    )


@kind("Concat", rule="{kept axis!}* -> {kept joined!}", is_view=True)
def concat(ctx: Context) -> Result:
    """The axis stays whole; if some operands have the batch, the others must be repeated over it first."""
    tensors = ctx.present
    rank = len(tensors[0][1].shape)
    axis = ctx.axis("axis", 0, rank)
    rule = ctx.rule
    operands: list[tuple[int, Dims]] = [(i, []) for i, _ in tensors]
    out: Dims = []
    for d in range(rank):
        carrier = next((t for _, t in tensors if t.batch_dim == d), None)
        if d == axis:
            if carrier is not None:
                raise Unsupported("samples are joined; stack them in a dim of their own instead (torch.stack)")
            for (_, dims), (_, t) in zip(operands, tensors, strict=True):
                dims.append(rule.dim(t, d, fixed=True))
            out.append(rule.loop(sum(t.shape[d] for _, t in tensors), fixed=True))
            continue
        shared = rule.dim(carrier or tensors[0][1], d)
        size = rule.size(shared)
        for (i, dims), (_, t) in zip(operands, tensors, strict=True):
            if carrier is not None and t.batch_dim != d:
                if t.shape[d] == size * ctx.export_batch and ctx.export_batch > 1:
                    raise BakedBatch(i, d, size)
                raise MissingBatch(i, d)
            if t.shape[d] != size:
                raise Unsupported(f"sizes {t.shape[d]} and {size} differ in dim {d}")
            dims.append(shared)
        out.append(shared)
    return Result(operands, [out], passing="joint", traffic=(1.0, 0.0), attributes={"axis": axis})


@kind("Expand", rule="{kept 1} -> {kept repeated}")
def expand(ctx: Context) -> Result:
    """Broadcasting; attribute `shape` is the output shape, `batch_dim` the dim in which the result gets a batch."""
    tensor = ctx.tensor(0)
    rule = ctx.rule
    given = ctx.ints("shape", 1)
    if given is None:
        raise Unsupported("no shape")
    new_batch = ctx.attributes.get("batch_dim")
    rank = max(len(given), len(tensor.shape))
    sizes = (1,) * (rank - len(given)) + tuple(given)
    offset = rank - len(tensor.shape)
    source: Dims = []
    target: Dims = []
    for out, new in enumerate(sizes):
        d = out - offset
        size = tensor.shape[d] if d >= 0 else 1
        own: tuple[int, ...] = ()
        if d >= 0 and tensor.batch_dim == d:
            if new not in (1, size, size * ctx.export_batch):
                raise Unsupported(f"it expands the batch to a size of {new}, which is not that of the export")
            own = rule.dim(tensor, d)
            target.append(own)
        elif new_batch == out:
            target.append((rule.batch(), *rule.loop(new)))
        elif size == 1 or new in (1, size):
            target.append(rule.loop(max(size, new)))
            own = target[-1] if size != 1 else ()
        else:
            raise Unsupported(f"sizes {size} and {new} do not broadcast")
        if d >= 0:
            source.append(own)
    shape = tuple(rule.size(f) for f in target)
    return Result([(0, source)], [target], passing="joint", traffic=(0.0, 1.0), attributes={"shape": shape})


@kind("Tile", rule="{kept axis!} -> {kept repeated!}")
def tile(ctx: Context) -> Result:
    """Repetition along dims; repeated dims stay whole."""
    tensor = ctx.tensor(0)
    repeats = ctx.ints("repeats", 1)
    if repeats is None or len(repeats) != len(tensor.shape):
        raise Unsupported("its repeats are missing, depend on data, or are not one for each dim")
    rule = ctx.rule
    source: Dims = []
    target: Dims = []
    for d, times in enumerate(repeats):
        if times != 1 and tensor.batch_dim == d:
            raise Unsupported("it repeats samples")
        source.append(rule.dim(tensor, d, fixed=times != 1))
        target.append(source[-1] if times == 1 else rule.loop(tensor.shape[d] * times, fixed=True))
    return Result([(0, source)], [target], passing="joint", traffic=(1.0, 1.0), attributes={"repeats": repeats})


@kind("DepthToSpace", "SpaceToDepth", rule="samples {block!} -> samples {new!}")
def depth_space(ctx: Context) -> Result:
    """Moves elements between channels and space: samples can be split, all other dims stay whole."""
    tensor = ctx.tensor(0)
    block = ctx.int_attribute("blocksize", 1)
    _, c, h, w = tensor.shape
    sizes = (
        (c // block**2, h * block, w * block) if ctx.kind == "DepthToSpace" else (c * block**2, h // block, w // block)
    )
    lead = ctx.rule.dim(tensor, 0)
    source: Dims = [lead, *[ctx.rule.loop(s, fixed=True) for s in (c, h, w)]]
    target: Dims = [lead, *[ctx.rule.loop(s, fixed=True) for s in sizes]]
    return Result([(0, source)], [target], passing="joint", traffic=(1.0, 1.0))
