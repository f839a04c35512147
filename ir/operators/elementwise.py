"""Elementwise kinds with broadcasting.

Traffic is stated in multiples of the bytes of all operands and results, counting one fused kernel per operator. The
forward pass reads each operand and writes the result once (1.0). The backward pass of a unary kind reads the output
gradient and the saved tensor and writes the input gradient (3 transfers instead of 2: 1.5). That of a product reads
three tensors and writes two (5 instead of 3: 1.7). That of a sum passes its output gradient on; only the accumulation
of gradients of tensors with several consumers moves data (0.5).
"""

from __future__ import annotations

from collections.abc import Sequence

from ir.factors import Passing
from ir.graph import Tensor
from ir.operators.base import BakedBatch, Context, Dims, Result, Unsupported, kind


def broadcast(ctx: Context, operands: Sequence[tuple[int, Tensor]]) -> tuple[list[Dims], Dims]:
    """Numpy broadcasting of operands.

    Args:
        ctx: the use; the factors are added to its rule.
        operands: (position, tensor) pairs; to broadcast only some of the dims, pass tensors with those dims alone.

    Returns:
        factors of each operand, factors of the result.

    Raises:
        BakedBatch: a constant holds the exported batch size.
        MissingBatch: an operand must first be repeated over the batch.
        Unsupported: shapes do not broadcast.
    """
    rule = ctx.rule
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
        full = rule.loop(rest)
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
            elif t.batch_dim is not None and size * ctx.export_batch == rest:
                # Similarities between samples: a constant operand, such as a diagonal mask, has a column per sample.
                for i, other, c in present:
                    if other.shape[c] == rest and ctx.value(operands[i][0]) is not None:
                        raise BakedBatch(operands[i][0], c, size)
                raise Unsupported(f"sizes {size} and {rest} do not broadcast")
            else:
                raise Unsupported(f"sizes {size} and {rest} do not broadcast")
        result.append(head)
    return sides, result


def _elementwise(
    ctx: Context,
    *,
    dtype: str | None = None,
    passing: Passing = "none",
    traffic: tuple[float, float] = (1.0, 1.5),
    saved_inputs: Sequence[int] = (),
    saved_outputs: Sequence[int] = (),
) -> Result:
    """An elementwise operator that broadcasts all operands; its result has by default the dtype of the first one."""
    operands = ctx.present
    if not operands:
        raise Unsupported("it has no operand")
    rank = max(len(t.shape) for _, t in operands)
    if rank > 2 and all(t.batch_dim is None for _, t in operands):
        for i, t in operands:
            # A mask that is added to a tensor without samples, such as scores that depend on distances only.
            if len(t.shape) == rank and all(len(o.shape) < rank or o.shape[0] == 1 for j, o in operands if j != i):
                ctx.keep_one_sample(i)
    sides, result = broadcast(ctx, operands)
    return Result(
        [(i, dims) for (i, _), dims in zip(operands, sides, strict=True)],
        [result],
        [dtype or ctx.tensor(0).dtype],
        passing=passing,
        traffic=traffic,
        saved_inputs=saved_inputs,
        saved_outputs=saved_outputs,
    )


UNARY, BINARY, ANY = "... -> ...", "..., ... -> ...", "...* -> ..."


@kind("Relu", "Sigmoid", "Tanh", "Exp", "Sqrt", "Reciprocal", rule=UNARY)
def saves_output(ctx: Context) -> Result:
    """Unary kinds whose derivative is a function of the result, which is saved for the backward pass."""
    return _elementwise(ctx, saved_outputs=(0,))


@kind(
    "com.microsoft.QuickGelu", "Gelu", "Erf", "Erfc", "Cos", "Sin", "Log", "Abs", "HardSwish", "Swish",
    "Mish", "Celu", "ThresholdedRelu", "Shrink", "Softsign", "Tan", "Acos", "Asin", "Atan", "Sinh", "Cosh", "Asinh",
    "Acosh", "Atanh", "BitCast", "Elu", "Selu", "HardSigmoid", "Softplus", "LeakyRelu", rule=UNARY,
)  # fmt: skip
def saves_input(ctx: Context) -> Result:
    """Kinds whose derivative is a function of the operand, which is saved; `Erfc` is a TensorFlow kind (tf2onnx).

    The derivatives of the last five are functions of the result as well, but PyTorch saves their operand unless they
    run in place (`elu`, `selu`, `hardsigmoid`, `softplus` and `leaky_relu` in its tools/autograd/derivatives.yaml), and
    a graph does not say whether they do.
    """
    return _elementwise(ctx, saved_inputs=(0,))


@kind("Neg", rule=UNARY)
def negation(ctx: Context) -> Result:
    """Negation: linear, hence nothing is saved."""
    return _elementwise(ctx, passing="joint", traffic=(1.0, 1.0))


@kind("Mod", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", rule=BINARY)
@kind("Floor", "Ceil", "Round", "Sign", "BitwiseNot", rule=UNARY)
def stepwise(ctx: Context) -> Result:
    """Rounding and integer arithmetic: the gradient is zero."""
    return _elementwise(ctx, traffic=(1.0, 0.0))


@kind("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor", rule=BINARY)
@kind("Not", "IsNaN", "IsInf", rule=UNARY)
def predicate(ctx: Context) -> Result:
    """Comparisons and logic: booleans have no gradient."""
    return _elementwise(ctx, dtype="bool", traffic=(1.0, 0.0))


@kind("Add", "Sub", "Sum", rule=ANY)
def addition(ctx: Context) -> Result:
    """Sums are jointly linear: if all operands are partial, so is the result. A frozen operand needs no gradient."""
    has_frozen = any(tensor.frozen for _, tensor in ctx.present)
    return _elementwise(ctx, passing="joint", traffic=(1.0, 0.0 if has_frozen else 0.5))


@kind("Mean", rule=ANY)
def mean(ctx: Context) -> Result:
    """Jointly linear: if all operands are partial, so is the result."""
    return _elementwise(ctx, passing="joint", traffic=(1.0, 1.0))


@kind("Max", "Min", "PRelu", rule=ANY)
def selection(ctx: Context) -> Result:
    """Each element of the result is selected by a comparison, which the backward pass repeats on the saved operands."""
    return _elementwise(ctx, traffic=(1.0, 1.7), saved_inputs=[i for i, _ in ctx.present])


@kind("Mul", rule=BINARY)
def multiplication(ctx: Context) -> Result:
    """A product: the gradient of each operand needs the other operand."""
    saved = [i for i in (0, 1) if ctx.needs_gradient[1 - i]]
    return _elementwise(ctx, passing="multi", traffic=(1.0, 1.7), saved_inputs=saved)


@kind("Div", rule=BINARY)
def division(ctx: Context) -> Result:
    """Linear in the numerator, except for integers, whose quotient is rounded."""
    saved = [0, 1] if ctx.needs_gradient[1] else [1] if ctx.needs_gradient[0] else []
    passing: Passing = "first" if ctx.tensor(0).is_float else "none"
    return _elementwise(ctx, passing=passing, traffic=(1.0, 1.7), saved_inputs=saved)


@kind("Pow", rule=BINARY)
def power(ctx: Context) -> Result:
    """Saves the base, and the exponent where it has a gradient."""
    return _elementwise(ctx, traffic=(1.0, 1.5), saved_inputs=(0, 1) if ctx.needs_gradient[1] else (0,))


@kind("Where", rule="..., ..., ... -> ...")
def where(ctx: Context) -> Result:
    """Elementwise choice between two operands by a condition: saves the condition, and is linear in both operands."""
    return _elementwise(ctx, dtype=ctx.tensor(1).dtype, passing="rest", traffic=(1.0, 1.0), saved_inputs=(0,))


@kind("Clip", rule="{dims} -> {dims}")
def clip(ctx: Context) -> Result:
    """Clipping; the bounds are attributes, or from version 11 on operands whose values must be known."""
    bounds = {name: ctx.floats(name, index) for name, index in (("min", 1), ("max", 2))}
    attributes = {name: bound[0] for name, bound in bounds.items() if bound}
    return Result(*ctx.factors(), traffic=(1.0, 1.5), saved_inputs=(0,), attributes=attributes)


@kind("Cast", rule=UNARY, is_view=True)
def cast(ctx: Context) -> Result:
    """Linear between floating-point types."""
    to = str(ctx.attributes["to"])
    is_linear = ctx.tensor(0).is_float and to.startswith(("float", "bfloat"))
    return _elementwise(ctx, dtype=to, passing="joint" if is_linear else "none", traffic=(1.0, 1.0))


@kind("CastLike", rule="{dims} -> {dims}")
def cast_like(ctx: Context) -> Result:
    """A cast to the dtype of another operand."""
    dtype = ctx.tensor(1).dtype
    return Result(*ctx.factors(), [dtype], traffic=(1.0, 1.0), attributes={"to": dtype})


@kind("Identity", rule=UNARY, is_view=True)
def identity(ctx: Context) -> Result:
    """The tensor itself under a second name."""
    return _elementwise(ctx, passing="joint", traffic=(0.0, 0.0))


@kind("Dropout", rule="{dims} -> {dims}, {dims}")
def dropout(ctx: Context) -> Result:
    """Dropout in training: saves the mask, its second result, of one byte per element."""
    ratio = ctx.floats("ratio", 1) or (0.5,)
    dtypes = [ctx.tensor(0).dtype, "bool"]
    return Result(*ctx.factors(), dtypes, traffic=(1.0, 1.0), saved_outputs=(1,), attributes={"ratio": ratio[0]})


@kind("QuantizeLinear", "DequantizeLinear", rule="{dims axis}, [{axis 1}], [{axis 1}] -> {dims axis}")
def quantization(ctx: Context) -> Result:
    """Scale and zero point belong to the whole tensor, or to each element of one axis."""
    tensor = ctx.tensor(0)
    dims = ctx.rule.dims(tensor)
    operands: list[tuple[int, Dims]] = [(0, dims)]
    for i, side in ctx.present[1:]:
        if len(side.shape) > 1:
            raise Unsupported("blocked quantization")
        whole: Dims = [()] * len(side.shape)
        is_split = side.num_elements > 1
        operands.append((i, [dims[ctx.axis("axis", 1, len(tensor.shape))]] if is_split else whole))
    dtype = "float32" if ctx.kind == "DequantizeLinear" else (ctx.tensor(2).dtype if ctx.has(2) else "uint8")
    return Result(operands, [dims], [dtype], traffic=(1.0, 1.0))
