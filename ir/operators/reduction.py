"""Reductions, cumulative sums, Fourier transforms and selections over dims."""

from __future__ import annotations

from ir.factors import Passing
from ir.operators.base import Context, Result, SortedSamples, Unsupported, kind, statistics, within
from ir.operators.rule import Dims

SAVED_BY_REDUCTIONS = {
    "ReduceSum": ((), ()), "ReduceMean": ((), ()), "ReduceL2": ((0,), (0,)), "ReduceLogSumExp": ((0,), (0,)),
}  # fmt: skip
"""Kind -> positions of operands and results that the backward pass needs; other reductions save their operand."""


def _axes(ctx: Context) -> tuple[int, ...]:
    rank = len(ctx.tensor(0).shape)
    axes = ctx.ints("axes", 1)
    if axes:
        return tuple(sorted({within(a, rank) for a in axes}))
    is_noop = axes is not None and ctx.int_attribute("noop_with_empty_axes", 0)
    return () if is_noop else tuple(range(rank))


@kind("ReduceSum", rule=("{kept axes+} -> {kept 1}", "{kept axes+} -> {kept}"))
@kind(
    "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp",
    "ReduceSumSquare", rule=("{kept axes@norm} -> {kept 1}", "{kept axes@norm} -> {kept}"),
)  # fmt: skip
def reduce(ctx: Context) -> Result:
    """Reductions: splitting a reduced dim of ReduceSum gives partial sums; other kinds all-reduce their result."""
    tensor = ctx.tensor(0)
    axes = _axes(ctx)
    keep = bool(ctx.int_attribute("keepdims", 1))
    floats = 2.0 if ctx.kind == "ReduceLogSumExp" else 1.0
    exchange = statistics("norm", tensor, axes, floats, backward=0.0)
    saved_inputs, saved_outputs = SAVED_BY_REDUCTIONS.get(ctx.kind, ((0,), ()))
    return Result(
        *ctx.factors(where={"axes": axes}, collectives=exchange, line=0 if keep else 1),
        passing="joint" if ctx.kind in ("ReduceSum", "ReduceMean") else "none",
        traffic=(1.0, 1.0),
        saved_inputs=saved_inputs,
        saved_outputs=saved_outputs,
        attributes={"axes": axes, "keepdims": int(keep)},
    )


@kind("ArgMax", "ArgMin", rule=("{kept axis!!} -> {kept 1}", "{kept axis!!} -> {kept}"))
def arg(ctx: Context) -> Result:
    """The index of the maximum or minimum along `axis`, which stays whole."""
    axis = ctx.axis("axis", 0, len(ctx.tensor(0).shape))
    line = 0 if ctx.int_attribute("keepdims", 1) else 1
    return Result(*ctx.factors(where={"axis": (axis,)}, line=line), ["int64"], traffic=(1.0, 0.0))


@kind("CumSum", "CumProd", rule="{kept axis!!} -> {kept axis}")
def scan(ctx: Context) -> Result:
    """Cumulative sums or products along an axis, which stays whole."""
    rank = len(ctx.tensor(0).shape)
    axes = ctx.ints("axis", 1)
    if not axes:
        raise Unsupported("its axis is missing or depends on data")
    passing: Passing = "joint" if ctx.kind == "CumSum" else "none"
    factors = ctx.factors(where={"axis": (within(axes[0], rank),)})
    return Result(*factors, traffic=(1.0, 1.0), attributes={"axis": axes[0]}, passing=passing)


@kind("DFT", rule="{kept axis! parts!} -> {kept axis frequencies! parts pair! 1}")
def fourier(ctx: Context) -> Result:
    """A Fourier transform along `axis`; the last dim holds real and imaginary parts. Both dims stay whole."""
    tensor = ctx.tensor(0)
    rank = len(tensor.shape)
    axes, length = ctx.ints("axis", 2), ctx.ints("dft_length", 1)
    axis = within(axes[0] if axes else (1 if 0 < ctx.opset < 20 else -2), rank)
    if tensor.batch_dim in (axis, rank - 1) or axis == rank - 1:
        raise Unsupported("a transform over samples, or over real and imaginary part")
    is_onesided, is_inverse = bool(ctx.int_attribute("onesided", 0)), bool(ctx.int_attribute("inverse", 0))
    is_real = is_onesided and is_inverse
    if tensor.shape[-1] not in (1, 2) or (is_onesided and (tensor.shape[-1] == 2) != is_inverse):
        raise Unsupported(f"a last dim of {tensor.shape[-1]} is not real and imaginary part")
    size = length[0] if length else 2 * (tensor.shape[axis] - 1) if is_real else tensor.shape[axis]
    if is_onesided and not is_inverse:
        size = size // 2 + 1
    dims = ctx.rule.dims(tensor)
    ctx.rule.mark([*dims[axis], *dims[-1]], fixed=True)
    out = list(dims)
    if size != tensor.shape[axis]:
        out[axis] = ctx.rule.loop(size, fixed=True)
    if is_real:
        out[-1] = ()
    elif tensor.shape[-1] == 1:
        out[-1] = ctx.rule.loop(2, fixed=True)
    attributes = {"axis": axis, "dft_length": length[0] if length else None}
    return Result([(0, dims)], [out], passing="joint", traffic=(1.0, 1.0), attributes=attributes)


@kind("STFT", rule="{samples time! part!}, [window!] -> {samples frames! bins! pair!}")
def windowed_fourier(ctx: Context) -> Result:
    """Fourier transforms of the windows of a signal `[samples, time]` or `[samples, time, 1]`: samples can be split."""
    signal = ctx.tensor(0)
    if signal.batch_dim not in (None, 0) or len(signal.shape) not in (2, 3):
        raise Unsupported("its signal is not [samples, time, real part]")
    is_complex, is_onesided = signal.shape[2:] == (2,), bool(ctx.int_attribute("onesided", 1))
    if signal.shape[2:] not in ((), (1,), (2,)) or (is_complex and is_onesided):
        raise Unsupported(f"a last dim of {signal.shape[-1]} is not the real part, or real and imaginary part")
    step, given = ctx.ints("frame_step", 1), ctx.ints("frame_length", 3)
    if not step or step[0] < 1:
        raise Unsupported("its frame_step is missing, depends on data, or is less than 1")
    window = ctx.tensor(2).shape if ctx.has(2) else given or signal.shape[1:2]
    if len(window) != 1 or (given and tuple(given) != tuple(window)):
        raise Unsupported(f"a window of shape {tuple(window)} does not fit frame_length={given}")
    length, time = window[0], signal.shape[1]
    if not 0 < length <= time:
        raise Unsupported(f"a frame of {length} does not fit into a signal of {time}")
    rule = ctx.rule
    samples = rule.dim(signal, 0)
    dims: Dims = [samples, *[rule.loop(size, fixed=True) for size in signal.shape[1:]]]
    sizes = ((time - length) // step[0] + 1, length // 2 + 1 if is_onesided else length, 2)
    operands: list[tuple[int, Dims]] = [(0, dims)]
    if ctx.has(2):
        operands.append((2, [rule.loop(length, fixed=True)]))
    return Result(
        operands,
        [[samples, *[rule.loop(size, fixed=True) for size in sizes]]],
        [signal.dtype],
        passing="first",
        traffic=(1.0, 1.0),
        saved_inputs=(2,) if ctx.has(2) else (),
        attributes={"frame_step": step[0], "frame_length": length, "onesided": int(is_onesided)},
    )


@kind("TopK", rule="{kept axis!} -> {kept chosen!}, {kept chosen}")
def top_k(ctx: Context) -> Result:
    """The `k` largest values along `axis`, which stays whole, and their indices."""
    tensor = ctx.tensor(0)
    axis = ctx.axis("axis", -1, len(tensor.shape))
    k = ctx.ints("k", 1)
    if not k:
        raise Unsupported("its k is missing or depends on data")
    if tensor.batch_dim == axis:
        why = "it compares samples with each other"
        raise SortedSamples(why) if len(tensor.shape) == 1 else Unsupported(why)
    if not 0 <= k[0] <= tensor.shape[axis]:
        raise Unsupported(f"it takes the largest k={k[0]} of {tensor.shape[axis]} values")
    return Result(
        *ctx.factors(where={"axis": (axis,)}, sizes={"chosen": k[:1]}),
        [tensor.dtype, "int64"],
        traffic=(1.0, 1.0),
        saved_outputs=(1,),
        attributes={"k": k[0]},
    )


@kind("Trilu", rule="{kept matrix!!} -> {kept matrix}")
def trilu(ctx: Context) -> Result:
    """The upper or lower triangle of matrices: an element's position in the last two dims matters; both stay whole."""
    rank = len(ctx.tensor(0).shape)
    offset = ctx.ints("k", 1) or (0,)
    factors = ctx.factors(where={"matrix": range(rank - 2, rank)})
    return Result(*factors, passing="joint", traffic=(1.0, 1.0), attributes={"k": offset[0]})
