"""Elementwise kinds with broadcasting.

Traffic: forward each operand is read and the result written once (1.0). Backward of a unary kind reads the output
gradient and what was saved and writes the input gradient (3 transfers against 2, 1.5); of a product it reads three
and writes two (5 against 3, 1.7); of a sum nothing moves but the accumulation where gradients meet (0.5).
Source: counting of one fused kernel per operator.
"""

from __future__ import annotations

from collections.abc import Sequence

from ir.graph import Tensor
from ir.operators.base import BakedBatch, Context, Dims, MissingBatch, Result, Rule, Unsupported, kind


def broadcast(
    ctx: Context, operands: Sequence[tuple[int, Tensor]], rule: Rule | None = None
) -> tuple[list[Dims], Dims]:
    """Numpy broadcasting of operands.

    Args:
        ctx: the use.
        operands: (position, tensor) pairs; for a part of the dims pass tensors cut to that part.
        rule: where to add factors, default the use's own.

    Returns:
        factors of each operand, factors of the result.

    Raises:
        BakedBatch: a constant holds the exported batch size.
        Unsupported: shapes do not broadcast.
    """
    rule = rule or ctx.rule
    rank = max(len(t.shape) for _, t in operands)
    sides: list[Dims] = [[] for _ in operands]
    result: Dims = []
    for out in range(rank):
        cells = [(k, t, out - rank + len(t.shape)) for k, (_, t) in enumerate(operands)]
        present = [(k, t, d) for k, t, d in cells if d >= 0]
        carriers = [(t, d) for _, t, d in present if t.batch_dim == d]
        rest = max((t.shape[d] for t, d in carriers), default=1)
        if not carriers:
            rest = 0 if any(t.shape[d] == 0 for _, t, d in present) else max(t.shape[d] for _, t, d in present)
        factor = rule.factor(rest) if rest != 1 else None
        full: tuple[int, ...] = () if factor is None else (factor,)
        head = (rule.batch(), *full) if carriers else full
        for k, t, d in present:
            size = t.shape[d]
            if t.batch_dim == d:
                if size not in (rest, 1):
                    raise Unsupported(f"sizes {size} and {rest} do not broadcast")
                sides[k].append(head if size == rest else (rule.batch(),))
            elif size == 1:
                sides[k].append(())
            elif size == rest and not (carriers and ctx.export_batch > 1 and rest == 1):
                sides[k].append(full)
            elif carriers and size == rest * ctx.export_batch:
                raise BakedBatch(operands[k][0], d, rest)
            else:
                raise Unsupported(f"sizes {size} and {rest} do not broadcast")
        result.append(head)
    return sides, result


def _elementwise(
    ctx: Context,
    *,
    dtype: str | None = None,
    passing: str = "none",
    traffic: tuple[float, float] = (1.0, 1.5),
    saved_inputs: Sequence[int] = (),
    saved_outputs: Sequence[int] = (),
    first_float: int = 0,
) -> Result:
    operands = [(i, t) for i, t in enumerate(ctx.inputs) if t is not None]
    if not operands:
        raise Unsupported("no operand")
    rank = max(len(t.shape) for _, t in operands)
    if rank > 2 and all(t.batch_dim is None for _, t in operands):
        for i, t in operands:
            # A mask that is added to what all samples share, such as the scores of distances.
            if len(t.shape) == rank and all(len(o.shape) < rank or o.shape[0] == 1 for j, o in operands if j != i):
                ctx.keep_one_sample(i)
    sides, result = broadcast(ctx, operands)
    chosen = dtype or ctx.tensor(first_float).dtype
    return Result(
        [(i, dims) for (i, _), dims in zip(operands, sides, strict=True)],
        [result],
        [chosen],
        passing=passing,  # type: ignore[arg-type]
        traffic=traffic,
        saved_inputs=saved_inputs,
        saved_outputs=saved_outputs,
    )


@kind("Relu", "Sigmoid", "Tanh", "Exp", "Sqrt", "Reciprocal", "Elu", "Selu", "HardSigmoid", "Softplus", "LeakyRelu")
def saves_output(ctx: Context) -> Result:
    """Unary kinds whose derivative is a function of the result."""
    return _elementwise(ctx, saved_outputs=(0,))


@kind(
    "com.microsoft.Gelu",
    "com.microsoft.FastGelu",
    "com.microsoft.QuickGelu",
    "com.microsoft.BiasGelu",
    "Gelu",
    "Erf",
    "Cos",
    "Sin",
    "Log",
    "Abs",
    "HardSwish",
    "Swish",
    "Mish",
    "Celu",
    "ThresholdedRelu",
    "Shrink",
    "Softsign",
    "Tan",
    "Acos",
    "Asin",
    "Atan",
    "Sinh",
    "Cosh",
    "Asinh",
    "Acosh",
    "Atanh",
    "BitCast",
)
def saves_input(ctx: Context) -> Result:
    """Unary kinds whose derivative is a function of the operand."""
    return _elementwise(ctx, saved_inputs=(0,))


@kind("Neg")
def negation(ctx: Context) -> Result:
    """Linear, nothing saved."""
    return _elementwise(ctx, passing="joint", traffic=(1.0, 1.0))


@kind("Floor", "Ceil", "Round", "Sign", "BitwiseNot")
def stepwise(ctx: Context) -> Result:
    """Gradient is zero."""
    return _elementwise(ctx, traffic=(1.0, 0.0))


@kind("Not", "IsNaN", "IsInf")
def predicate(ctx: Context) -> Result:
    """Booleans have no gradient."""
    return _elementwise(ctx, dtype="bool", traffic=(1.0, 0.0))


@kind("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor")
def comparison(ctx: Context) -> Result:
    """Booleans have no gradient."""
    return _elementwise(ctx, dtype="bool", traffic=(1.0, 0.0))


@kind("Mod", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor")
def integer(ctx: Context) -> Result:
    """Integer arithmetic."""
    return _elementwise(ctx, traffic=(1.0, 0.0))


@kind("Add", "Sub", "Sum")
def addition(ctx: Context) -> Result:
    """Jointly linear: all operands partial gives a partial result."""
    return _elementwise(ctx, passing="joint", traffic=(1.0, 0.5))


@kind("Mean")
def mean(ctx: Context) -> Result:
    """Jointly linear too."""
    return _elementwise(ctx, passing="joint", traffic=(1.0, 1.0))


@kind("Max", "Min", "PRelu")
def selection(ctx: Context) -> Result:
    """Which operand won is decided again in backward."""
    return _elementwise(ctx, traffic=(1.0, 1.7), saved_inputs=[i for i, t in enumerate(ctx.inputs) if t is not None])


@kind("Mul")
def multiplication(ctx: Context) -> Result:
    """Each operand is needed for the gradient of the other."""
    saved = [i for i in (0, 1) if ctx.needs_gradient[1 - i]]
    return _elementwise(ctx, passing="multi", traffic=(1.0, 1.7), saved_inputs=saved)


@kind("Div")
def division(ctx: Context) -> Result:
    """Linear in the numerator; integers are rounded."""
    saved = [1] if ctx.needs_gradient[0] else []
    if ctx.needs_gradient[1]:
        saved = [0, 1]
    return _elementwise(
        ctx, passing="first" if ctx.tensor(0).is_float else "none", traffic=(1.0, 1.7), saved_inputs=saved
    )


@kind("Pow")
def power(ctx: Context) -> Result:
    """Saves base and exponent."""
    return _elementwise(ctx, traffic=(1.0, 1.5), saved_inputs=(0, 1) if ctx.needs_gradient[1] else (0,))


@kind("Where")
def where(ctx: Context) -> Result:
    """The condition chooses, and is kept for backward; linear in what is chosen from."""
    return _elementwise(ctx, passing="rest", traffic=(1.0, 1.0), saved_inputs=(0,), first_float=1)


@kind("Clip")
def clip(ctx: Context) -> Result:
    """Bounds are operands from version 11 on."""
    tensor = ctx.tensor(0)
    dims = ctx.rule.dims(tensor)
    extra = {}
    for name, index in (("min", 1), ("max", 2)):
        bound = ctx.floats(name, index)
        if bound:
            extra[name] = bound[0]
    return Result([(0, dims)], [dims], traffic=(1.0, 1.5), saved_inputs=(0,), attributes=extra)


@kind("Cast", is_view=True)
def cast(ctx: Context) -> Result:
    """Linear between floating-point types."""
    to = str(ctx.attributes["to"])
    tensor = ctx.tensor(0)
    is_linear = tensor.is_float and to.startswith(("float", "bfloat"))
    return _elementwise(ctx, dtype=to, passing="joint" if is_linear else "none", traffic=(1.0, 1.0))


@kind("CastLike")
def cast_like(ctx: Context) -> Result:
    """Cast to the type of another operand."""
    like = ctx.tensor(1)
    dims = ctx.rule.dims(ctx.tensor(0))
    return Result([(0, dims)], [dims], [like.dtype], traffic=(1.0, 1.0), attributes={"to": like.dtype})


@kind("Identity", is_view=True)
def identity(ctx: Context) -> Result:
    """A second name."""
    return _elementwise(ctx, passing="joint", traffic=(0.0, 0.0))


@kind("Dropout")
def dropout(ctx: Context) -> Result:
    """In training: backward needs the mask, the second result, of one byte an element."""
    dims = ctx.rule.dims(ctx.tensor(0))
    ratio = ctx.floats("ratio", 1) or (0.5,)
    return Result(
        [(0, dims)],
        [dims, dims],
        [ctx.tensor(0).dtype, "bool"],
        traffic=(1.0, 1.0),
        saved_outputs=(1,),
        attributes={"ratio": ratio[0]},
    )


@kind("QuantizeLinear", "DequantizeLinear")
def quantization(ctx: Context) -> Result:
    """Per-tensor or per-axis scale: the axis of the scale stays whole."""
    tensor = ctx.tensor(0)
    dims = ctx.rule.dims(tensor)
    operands: list[tuple[int, Dims]] = [(0, dims)]
    for i in (1, 2):
        if ctx.has(i):
            side = ctx.tensor(i)
            if len(side.shape) > 1:
                raise Unsupported("blocked quantization")
            whole: Dims = [()] * len(side.shape)
            is_split = side.num_elements > 1
            operands.append((i, [dims[ctx.axis("axis", 1, len(tensor.shape))]] if is_split else whole))
    dtype = "float32" if ctx.kind == "DequantizeLinear" else (ctx.tensor(2).dtype if ctx.has(2) else "uint8")
    return Result(operands, [dims], [dtype], traffic=(1.0, 1.0))


__all__ = ["MissingBatch", "broadcast"]
