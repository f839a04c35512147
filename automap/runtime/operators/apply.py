"""Computes operators and whole graphs with torch, differentiably.

The semantics are those of a training step: batch normalisation uses the statistics of its operand, and Dropout drops.
Versions of the operator set matter where their meaning differs (Softmax before 13, Resize before 11). Everything is
computed in the types of the given tensors; constants are made on their device.

A `ModelError` refuses: kinds outside `ir.operators` and measured layers (their inside is unknown), types that torch
does not compute with (float8, strings, unsigned integers but uint8), quantization to floating-point types, Resize with
`tf_crop_and_resize`. Random kinds draw from torch's generator, not from the seed of the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from automap.runtime.operators import FUNCTIONS, Use
from automap.runtime.operators.base import WHOLE_ROWS, Rows, refuse
from ir.errors import ModelError
from ir.factors import Signature
from ir.graph import Graph, Operator, Tensor

COUNTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Attention": {"q_num_heads": ("h", "g"), "kv_num_heads": ("h",)},
    "LinearAttention": {"q_num_heads": ("h", "g"), "kv_num_heads": ("h",)},
    "automap.LinearAttention": {"q_num_heads": ("h", "g"), "kv_num_heads": ("h",)},
    "RotaryEmbedding": {"num_heads": ("h",)},
    "GroupNormalization": {"num_groups": ("g",)},
}
"""Kind -> attribute that counts heads or groups -> the factors whose split divides it."""


def apply(
    op: Operator,
    graph_tensors: Mapping[str, Tensor],
    operands: Sequence[torch.Tensor],
    num_samples: int,
    device: torch.device | None = None,
) -> tuple[torch.Tensor, ...]:
    """Computes one whole operator.

    Args:
        graph_tensors: the tensors of the graph by name; those that `op` writes give the shapes.
        operands: the operands in the order of `op.inputs`; batch dims are `num_samples` times those of the graph.
        num_samples: the number of samples of the batch.
        device: the device of the results of an operator without operands; None = the CPU.

    Returns:
        The results in the order of `op.outputs`.

    Raises:
        ModelError: the operator is not executed, see the docstring of the module.
    """
    shapes = [graph_tensors[name].shape_at(num_samples) for name in op.outputs]
    return apply_local(op, operands, shapes, device)


def apply_local(
    op: Operator,
    operands: Sequence[torch.Tensor],
    shapes: Sequence[tuple[int, ...]],
    device: torch.device | None = None,
    rows: Rows = WHOLE_ROWS,
) -> tuple[torch.Tensor, ...]:
    """Computes an operator on operands that may be shards.

    Args:
        op: an operator; for shards that of `local_operator`.
        shapes: the shapes of the results of these operands.
        device: see `apply`.
        rows: the rows over which the operator takes statistics.

    Raises:
        ModelError: see `apply`.
    """
    function = FUNCTIONS.get(op.kind)
    if function is None:
        raise refuse(f"operator {op.name} is of an unknown kind", op.kind, "Export with standard operators.")
    attributes = dict(op.attributes)
    positions = attributes.pop("operands", tuple(range(len(operands))))
    spread: list[torch.Tensor | None] = [None] * (max(positions, default=-1) + 1)
    for position, operand in zip(positions, operands, strict=True):
        spread[position] = operand
    results = attributes.pop("results", tuple(range(len(op.outputs))))
    use = Use(
        name=op.name,
        kind=op.kind,
        opset=op.opset,
        operands=spread,
        shapes=shapes,
        attributes=attributes,
        device=operands[0].device if operands else device or torch.device("cpu"),
        results=results,
        rows=rows,
    )
    try:
        found = function(use)
    except NotImplementedError as error:
        raise refuse(f"operator {op.name} is not computed by torch in this type", f"{op.kind}: {error}") from error
    made = [found] if isinstance(found, torch.Tensor) else list(found)
    return tuple(made[position] for position in results)


def local_operator(op: Operator, signature: Signature, ranks: int) -> Operator:
    """The operator that one of `ranks` ranks runs under a signature: counts of heads and groups are divided."""
    if signature.factor is None or op.kind not in COUNTS:
        return op
    split = op.rule.factors[signature.factor].name
    attributes = dict(op.attributes)
    for name, factors in COUNTS[op.kind].items():
        if split in factors and attributes.get(name):
            attributes[name] //= ranks
    return replace(op, attributes=tuple(sorted(attributes.items())))


def run(graph: Graph, tensors: Mapping[str, torch.Tensor], num_samples: int) -> dict[str, torch.Tensor]:
    """Computes a whole graph.

    Args:
        tensors: inputs, parameters, buffers and stored constants by name, see `value_of`; those that require a gradient
            get one when a result is differentiated.
        num_samples: the number of samples of the batch; inputs have the graph's shapes at this number.

    Returns:
        The results by name.

    Raises:
        ModelError: a tensor is missing or of another shape, or an operator is not executed (see the module).
    """
    values = {n: value_of(graph, n, tensors, num_samples) for n in graph.tensors if n not in graph.producer}
    device = next((t.device for t in values.values()), torch.device("cpu"))
    last = {name: i for name, readers in graph.consumers.items() for i in readers[-1:]}
    for i, op in enumerate(graph.operators):
        results = apply(op, graph.tensors, [values[name] for name in op.inputs], num_samples, device)
        values.update(zip(op.outputs, results, strict=True))
        for name in {*op.inputs, *op.outputs}:
            if last.get(name, i) == i and name not in graph.outputs:
                values.pop(name, None)
    return {name: values[name] for name in graph.outputs}


def value_of(graph: Graph, name: str, values: Mapping[str, torch.Tensor], num_samples: int = 1) -> torch.Tensor:
    """The whole value of a tensor that no operator makes, from values named as in the graph or in its file.

    A piece of a fused parameter of the file is cut out of it; experts that the file stores one by one are stacked.

    Args:
        name: an input, a parameter, a buffer or a stored constant.
        num_samples: the number of samples of the batch, for inputs.

    Raises:
        ModelError: the value is missing or has another shape.
    """
    found, shape = values.get(name), graph.tensors[name].shape_at(num_samples) if name in graph.tensors else None
    if found is None and name in graph.pieces:
        whole, dim, start, stop = graph.pieces[name]
        found = value_of(graph, whole, values).narrow(dim, start, stop - start) if whole in values else None
    if found is None:
        parts = sorted((start, part) for part, (whole, _, start, _) in graph.pieces.items() if whole == name)
        if parts and all(part in values for _, part in parts):
            found = torch.stack([values[part] for _, part in parts])
    role = graph.tensors[name].role if name in graph.tensors else "tensor"
    if found is None or (shape is not None and tuple(found.shape) != shape):
        raise ModelError(
            f"{role} {name} has {'no value' if found is None else 'a value of another shape'}", field="tensors",
            value=None if found is None else tuple(found.shape), repair=f"Give one of shape {shape}.",
        )  # fmt: skip
    return found
