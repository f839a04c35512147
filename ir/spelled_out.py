"""Softmax, log-softmax and logsumexp that a model writes in small steps become single operators.

1. `Exp(u) / ReduceSum(Exp(u))` becomes a Softmax of `u`, and `u - Log(ReduceSum(Exp(u)))` a LogSoftmax.
2. `Log(ReduceSum(Exp(u)))` becomes a ReduceLogSumExp of `u`.
3. If `u = x - ReduceMax(x)`, the operator reads `x` instead of `u`: subtracting the maximum before the exponentials
   (and adding it again after a logsumexp) changes only the rounding.

So they have the price of `torch.softmax`, `log_softmax` and `logsumexp`, and attention and cross-entropy that contain
them are recognised as one kernel.
"""

from __future__ import annotations

from ir.graph import Graph, Operator
from ir.rewrite import Rewrite

FIRST_OF_ONE_DIM = 13
"""First version of the operator set whose softmax is over one dim, https://onnx.ai/onnx/operators/onnx__Softmax.html."""


def spelled_out(graph: Graph) -> Graph:
    """The graph with one operator for each softmax, log-softmax and logsumexp in small steps; see the module."""
    for rewrite in (_softmaxes, _sums, _log_softmaxes):
        graph = rewrite(graph)
    return graph


def _made_by(graph: Graph, name: str, kind: str) -> Operator | None:
    """The operator that computes a tensor from data, if it is of a kind."""
    op = graph.maker(name)
    return op if op is not None and op.kind == kind and op.is_live else None


def _axis(graph: Graph, op: Operator) -> int | None:
    """The single dim over which an operator reduces; None if there are several, or if it is the dim of the samples.

    Before version 13, a softmax over another dim than the last one was over all following dims together.
    """
    tensor = graph.tensors[op.inputs[0]]
    axes = dict(op.attributes).get("axes", ())
    if not isinstance(axes, tuple) or len(axes) != 1:
        return None
    axis, last = int(axes[0]) % len(tensor.shape), len(tensor.shape) - 1
    return axis if axis != tensor.batch_dim and (axis == last or op.opset >= FIRST_OF_ONE_DIM) else None


def _keeps_dim(op: Operator) -> bool:
    """Whether a reduction keeps its dim, with size 1."""
    return bool(dict(op.attributes).get("keepdims", 1))


def _is_read_by(graph: Graph, name: str, number: int) -> bool:
    """Whether this number of operators reads a tensor, and the user does not."""
    return name not in graph.outputs and len(graph.consumers[name]) == number


def _summed_exponential(graph: Graph, name: str) -> tuple[Operator, Operator] | None:
    """The Exp and the ReduceSum over one dim that compute a tensor; None if it is no such sum."""
    total = _made_by(graph, name, "ReduceSum")
    power = None if total is None else _made_by(graph, total.inputs[0], "Exp")
    return None if total is None or power is None or _axis(graph, total) is None else (power, total)


def _unshifted(graph: Graph, name: str, axis: int) -> tuple[str, str | None]:
    """`x` and `ReduceMax(x)` if a tensor is their difference; else the tensor and None."""
    shift = _made_by(graph, name, "Sub")
    top = None if shift is None else _made_by(graph, shift.inputs[1], "ReduceMax")
    if shift is None or top is None or top.inputs[0] != shift.inputs[0]:
        return name, None
    return (shift.inputs[0], top.outputs[0]) if _axis(graph, top) == axis and _keeps_dim(top) else (name, None)


def _softmaxes(graph: Graph) -> Graph:
    rewrite = Rewrite(graph)
    for index, op in enumerate(graph.operators):
        if op.kind not in ("Div", "Mul") or len(op.inputs) != 2:
            continue
        power_name, below = op.inputs
        if op.kind == "Mul":
            inverses = [
                (a, made) for a, b in (op.inputs, op.inputs[::-1]) if (made := _made_by(graph, b, "Reciprocal"))
            ]
            if not inverses:
                continue
            power_name, below = inverses[0][0], inverses[0][1].inputs[0]
        repeated = _made_by(graph, below, "Expand")
        found = _summed_exponential(graph, below if repeated is None else repeated.inputs[0])
        if found is None or found[0].outputs[0] != power_name or not _is_read_by(graph, power_name, 2):
            continue
        axis = _axis(graph, found[1])
        if axis is not None and _keeps_dim(found[1]):
            source, _ = _unshifted(graph, found[0].inputs[0], axis)
            rewrite.make(index, "Softmax", op.name, [source], op.outputs[0], {"axis": axis})
    return rewrite.finish()


def _sums(graph: Graph) -> Graph:
    """Rewrites logarithms of sums: first without the shift by the maximum, and then with it if it is added again."""
    rewrite = Rewrite(graph)
    for index, op in enumerate(graph.operators):
        found = _summed_exponential(graph, op.inputs[0]) if op.kind == "Log" and op.is_live else None
        if found is None or not _is_read_by(graph, found[0].outputs[0], 1) or not _is_read_by(graph, op.inputs[0], 1):
            continue
        attributes = {"axes": (_axis(graph, found[1]),), "keepdims": int(_keeps_dim(found[1]))}
        rewrite.make(index, "ReduceLogSumExp", op.name, [found[0].inputs[0]], op.outputs[0], attributes)
    graph = rewrite.finish()
    rewrite = Rewrite(graph)
    for index, op in enumerate(graph.operators):
        if op.kind != "Add" or len(op.inputs) != 2:
            continue
        for name, other in (op.inputs, op.inputs[::-1]):
            total = _made_by(graph, name, "ReduceLogSumExp")
            axis = None if total is None else _axis(graph, total)
            if total is None or axis is None or not _is_read_by(graph, name, 1):
                continue
            source, top = _unshifted(graph, total.inputs[0], axis)
            back = graph.maker(other)
            is_same = other == top or (
                back is not None and back.kind in ("Squeeze", "Reshape") and back.inputs[0] == top
            )
            shape = graph.tensors[op.outputs[0]].shape
            if top is not None and is_same and shape == graph.tensors[name].shape:
                attributes = {"axes": (axis,), "keepdims": int(_keeps_dim(total))}
                rewrite.make(index, "ReduceLogSumExp", op.name, [source], op.outputs[0], attributes)
                break
    return rewrite.finish()


def _log_softmaxes(graph: Graph) -> Graph:
    rewrite = Rewrite(graph)
    for index, op in enumerate(graph.operators):
        total = _made_by(graph, op.inputs[1], "ReduceLogSumExp") if op.kind == "Sub" and len(op.inputs) == 2 else None
        axis = None if total is None else _axis(graph, total)
        if total is None or axis is None or not _keeps_dim(total) or total.inputs[0] != op.inputs[0]:
            continue
        source, _ = _unshifted(graph, op.inputs[0], axis)
        rewrite.make(index, "LogSoftmax", op.name, [source], op.outputs[0], {"axis": axis})
    return rewrite.finish()
