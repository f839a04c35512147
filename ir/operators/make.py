"""An operator (factor rule, shapes, costs) with its results, built from its kind and operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ir.graph import Amount, Operator, Tensor, TensorRole
from ir.operators.base import KINDS, Context, Dims, Result, Unsupported, Usage

MAX_ELEMENTS = 1 << 48
"""Elements of the largest result that is accepted (assumed): no real tensor is larger, and floats hold it exactly."""
MALFORMED = (IndexError, KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError)
"""Exceptions that an entry may raise if the attributes do not fit the operands."""


@dataclass(frozen=True)
class Built:
    """An operator with the tensors it writes."""

    operator: Operator
    outputs: tuple[Tensor, ...]
    is_opaque: bool
    """Whether the operator is replicated because its kind or its batch is not understood."""
    replicated_because: str = ""
    """Why samples cannot be split although the kind is known; empty if they can."""


def make_operator(
    kind: str,
    *,
    name: str,
    inputs: Sequence[Tensor | None],
    outputs: Sequence[str],
    attributes: Mapping[str, Any] | None = None,
    needs_gradient: Sequence[bool] | None = None,
    opset: int = 0,
    usage: Usage | None = None,
) -> Built:
    """An operator (factor rule, shapes, costs) with its results, built from its kind and operands.

    Args:
        kind: ONNX operator type (`domain.Type` outside the standard domain).
        name: unique name.
        inputs: operands by ONNX position, at one sample; None = absent.
        outputs: names of the results, "" for an optional one that nothing reads.
        attributes: ONNX attributes; shape-like operands may be given here by their ONNX names, at one sample.
            `operands` and `results` are the positions of inputs and outputs where some are left out.
        needs_gradient: by position; default: float parameters and activations.
        opset: version of the operator set.
        usage: further information from the imported file.

    Raises:
        Unsupported: this use cannot be expressed.
        BakedBatch: an operand has the exported batch size although it does not depend on data.
        MissingBatch: an operand must first be repeated over the batch.
    """
    usage = usage or Usage()
    attrs = dict(attributes or {})
    results = attrs.pop("results", None)
    if results is not None:
        outputs = [dict(zip(results, outputs, strict=True)).get(i, "") for i in range(max(results) + 1)]
    positions = attrs.pop("operands", None)
    if positions is not None:
        inputs, needs_gradient = _spread(inputs, needs_gradient, positions)
    if needs_gradient is None:
        needs_gradient = [t is not None and t.is_float and t.role in ("parameter", "activation") for t in inputs]
    ctx = Context(kind, inputs, len(outputs), attrs, needs_gradient, opset, usage)
    try:
        result = KINDS[kind].entry(ctx) if kind in KINDS else _opaque(ctx)
    except MALFORMED as error:
        raise Unsupported(f"its attributes do not fit its operands ({type(error).__name__}: {error})") from error
    _check_operands(ctx, result)
    if len(result.outputs) < len(outputs):
        raise Unsupported(f"{len(outputs)} outputs, {len(result.outputs)} are modelled")
    kept = [i for i, _ in result.operands]
    written = [i for i, out in enumerate(outputs) if out]
    tensors = [_output(ctx, result, i, outputs[i]) for i in written]
    attrs.update(result.attributes)
    for key, numbers in (("operands", kept), ("results", written)):
        if numbers != list(range(len(numbers))):
            attrs[key] = tuple(numbers)
    differentiable = any(needs_gradient[i] for i in kept if i < len(needs_gradient))
    forward, backward = (0.0, 0.0) if usage.is_view else result.traffic
    gradients = sum(f for i, f in result.gradient_flops.items() if i < len(needs_gradient) and needs_gradient[i])
    operator = Operator(
        name=name,
        kind=kind,
        inputs=tuple(ctx.tensor(i).name for i in kept),
        outputs=tuple(outputs[i] for i in written),
        rule=ctx.rule.build(
            [dims for _, dims in result.operands],
            [result.outputs[i] for i in written],
            result.passing,
            [kept.index(i) for i in result.linear],
        ),
        forward_flops=_amount(ctx, result.forward_flops),
        backward_flops=_amount(ctx, gradients),
        traffic=(forward, backward if differentiable else 0.0),
        saved=_saved(ctx, result, outputs) if differentiable and not usage.is_constant else (),
        scope=usage.scope,
        is_view=usage.is_view,
        is_constant=usage.is_constant,
        attributes=tuple(sorted((k, _plain(v)) for k, v in attrs.items() if v is not None)),
        opset=opset,
    )
    return Built(operator, tuple(tensors), result.is_opaque, result.replicated_because)


def _spread(
    inputs: Sequence[Tensor | None], needs_gradient: Sequence[bool] | None, positions: Sequence[int]
) -> tuple[list[Tensor | None], list[bool] | None]:
    """Moves operands, and whether each needs a gradient, to their ONNX positions."""
    size = max(positions, default=-1) + 1
    tensors: list[Tensor | None] = [None] * size
    flags = [False] * size
    for number, position in enumerate(positions):
        tensors[position] = inputs[number]
        flags[position] = needs_gradient is not None and needs_gradient[number]
    return tensors, None if needs_gradient is None else flags


def _check_operands(ctx: Context, result: Result) -> None:
    """Checks that the sizes of operands are those of the rule.

    Raises:
        Unsupported: operands that share a loop have different sizes.
    """
    for index, dims in result.operands:
        shape = ctx.tensor(index).shape
        # A dim without factors may have any size: every rank reads it whole.
        expected = tuple(ctx.rule.size(d) if d else size for d, size in zip(dims, shape, strict=False))
        if shape != expected:
            raise Unsupported(f"operand {index} is of shape {shape}, where the others need {expected}")


def _saved(ctx: Context, result: Result, outputs: Sequence[str]) -> tuple[str, ...]:
    """Names of the tensors that the backward pass needs."""
    operands = [ctx.tensor(i).name for i in result.saved_inputs]
    written = [outputs[i] for i in result.saved_outputs if i < len(outputs) and outputs[i]]
    return tuple(dict.fromkeys(operands + written))


def _output(ctx: Context, result: Result, number: int, name: str) -> Tensor:
    """The tensor of one result."""
    dims = result.outputs[number]
    first = ctx.tensor(result.operands[0][0]).dtype if result.operands else "float32"
    shape = tuple(ctx.rule.size(d) for d in dims)
    batch = ctx.rule.batch() if ctx.rule.has_batch else None
    is_constant = ctx.usage.is_constant
    if prod(shape) > MAX_ELEMENTS or min(shape, default=1) < (0 if is_constant else 1):
        raise Unsupported(f"its result would be of shape {shape}")
    role: TensorRole = "constant" if is_constant else "activation"
    return Tensor(
        name=name,
        shape=shape,
        dtype=result.dtypes[number] if number < len(result.dtypes) else first,
        role=role,
        batch_dim=next((d for d, factors in enumerate(dims) if batch is not None and batch in factors), None),
    )


def _amount(ctx: Context, flops: float) -> Amount:
    """FLOPs, proportional to the number of samples if an operand has the batch."""
    return Amount(per_sample=float(flops)) if ctx.rule.has_batch else Amount(fixed=float(flops))


def _opaque(ctx: Context) -> Result:
    """The result for a kind that is not in the table: replicated, with the output shapes that the source states."""
    rule = ctx.rule
    operands = [(i, rule.dims(t, fixed=True)) for i, t in ctx.present]
    batch_dim = next((t.batch_dim for _, t in ctx.present if t.batch_dim is not None), None)
    outputs: list[Dims] = []
    dtypes: list[str] = []
    for i in range(ctx.num_outputs):
        stated = ctx.usage.stated[i] if i < len(ctx.usage.stated) else None
        if stated is None:
            raise Unsupported("this kind is unknown and the file does not state its output shape")
        dims: Dims = []
        for d, size in enumerate(stated[0]):
            if d == batch_dim and size % ctx.export_batch == 0:
                dims.append((rule.batch(), *rule.loop(size // ctx.export_batch, fixed=True)))
            else:
                dims.append(rule.loop(size, fixed=True))
        outputs.append(dims)
        dtypes.append(stated[1])
    if rule.has_batch:
        rule.mark([rule.batch()], fixed=True)
    return Result(operands, outputs, dtypes, saved_inputs=[i for i, _ in ctx.present], is_opaque=True)


def _plain(value: Any) -> Any:
    """An attribute value as a number, a string or a tuple."""
    if type(value) in (int, float, str):
        return value
    if isinstance(value, np.ndarray):
        return tuple(value.reshape(-1).tolist())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, (list, tuple)):
        return tuple(_plain(v) for v in value)
    return value
