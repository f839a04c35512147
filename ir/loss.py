"""The training loss: found in the graph, or appended, so that price, memory and runtime all see it."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Literal

from ir.build import rebuilt
from ir.errors import ModelError, refuse
from ir.graph import Graph, Operator, Tensor, once_per_graph
from ir.groups import fused_groups
from ir.operators import make_operator

VIEWS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity")
"""Kinds that may follow the softmax of a classifier."""


def has_loss(graph: Graph) -> bool:
    """Whether the last output is a scalar float computed by the graph."""
    return bool(graph.outputs) and _is_loss(graph, graph.outputs[-1])


def _is_loss(graph: Graph, name: str) -> bool:
    tensor = graph.tensors[name]
    return name in graph.producer and tensor.is_float and tensor.batch_dim is None and tensor.num_elements == 1


def class_dim(tensor: Tensor) -> int:
    """The dim of the classes in a tensor of scores, see `class_dim_of`."""
    return class_dim_of(len(tensor.shape))


def class_dim_of(rank: int) -> int:
    """The dim of the classes of scores with this number of dims: 1 for images (rank 4 and more), else the last."""
    return 1 if rank >= 4 else rank - 1


@once_per_graph
def scores_of_losses(graph: Graph) -> frozenset[str]:
    """The tensors that losses take as scores, and all that these are views of."""
    inside = {index: group for group in fused_groups(graph) if group.kind == "loss" for index in group.members}
    found = set()
    for index, op in enumerate(graph.operators):
        if index in inside:
            made = {name for member in inside[index].members for name in graph.operators[member].outputs}
            taken = [name for name in op.inputs if name in graph.of_parameters and name not in made]
        else:
            taken = [op.inputs[0]] if "Loss" in op.kind else []
        for name in taken:
            found.add(name)
            maker = graph.maker(name)
            while maker is not None and maker.is_alias:
                found.add(maker.inputs[0])
                maker = graph.maker(maker.inputs[0])
    return frozenset(found)


def _scores(graph: Graph, name: str) -> str:
    """Name of the scores after output `name`: a trailing Softmax, with views after it, is left out."""
    op = graph.maker(name)
    while op is not None and op.kind in VIEWS:
        op = graph.maker(op.inputs[0])
    # A softmax over rows of [n, c, 1, 1] (before version 13) covers exactly the classes as well.
    return op.inputs[0] if op is not None and op.kind in ("Softmax", "LogSoftmax") else name


def _free(graph: Graph, base: str) -> str:
    """A name that no tensor or operator has."""
    name = base
    while name in graph.tensors or name in graph.by_name:
        name += "_"
    return name


def with_loss(graph: Graph, loss: str | None = None) -> Graph:
    """The graph with a scalar loss as its last output.

    Args:
        graph: any imported or built graph; an output that is a scalar float is its loss already.
        loss: `cross_entropy` (default) of the first output over its class dim, against an int64 input `labels`; or
            `mse` (default where there is no class dim) of the first output against a float input `target`. Both are
            summed over samples.

    Raises:
        ModelError: an unknown loss, or an output that has no sample or no class.
    """
    if loss not in (None, "cross_entropy", "mse"):
        raise ModelError("unknown loss", field="training.loss", value=loss, repair="Use `cross_entropy` or `mse`.")
    for position, name in enumerate(graph.outputs):
        if _is_loss(graph, name):
            outputs = (*graph.outputs[:position], *graph.outputs[position + 1 :], name)
            return graph if outputs == graph.outputs else replace(graph, outputs=outputs)
    scores = graph.tensors[graph.outputs[0]]
    if loss != "mse":
        scores = graph.tensors[_scores(graph, scores.name)]
    if not scores.is_float or not scores.shape or scores.batch_dim is None:
        repair = "Export the model so that its first output holds the scores of each sample, or its loss."
        raise refuse("the first output is not a float tensor with a batch", f"{scores.name} {scores.shape}", repair)
    if loss is None and class_dim(scores) == scores.batch_dim:
        # There is one number for each sample, so there are no classes.
        warning = f"{graph.outputs[0]}: no class dim, the loss is taken to be the mean squared error"
        graph = replace(graph, warnings=(*graph.warnings, warning))
        return _append(graph, graph.tensors[graph.outputs[0]], "mse")
    return _append(graph, scores, "mse" if loss == "mse" else "cross_entropy")


def _append(graph: Graph, scores: Tensor, loss: Literal["cross_entropy", "mse"]) -> Graph:
    tensors = dict(graph.tensors)
    operators = list(graph.operators)
    if loss == "mse":
        target = replace(scores, name=_free(graph, "target"), role="input")
        kind, attributes = "MeanSquaredErrorLoss", {}
    else:
        scores = _squeezed(graph, scores, operators, tensors)
        dim = class_dim(scores)
        if dim == scores.batch_dim:
            repair = "Use `training.loss` = `mse`, or export the loss."
            raise refuse("the output has no class dim", f"{scores.name} {scores.shape}", repair)
        shape = tuple(s for i, s in enumerate(scores.shape) if i != dim)
        batch = scores.batch_dim if scores.batch_dim is None or scores.batch_dim < dim else scores.batch_dim - 1
        target = Tensor(name=_free(graph, "labels"), shape=shape, dtype="int64", role="input", batch_dim=batch)
        kind = "SoftmaxCrossEntropyLoss"
        attributes = {"class_dim": dim, "reduction": "sum"}
    tensors[target.name] = target
    name = _free(graph, "loss")
    built = make_operator(kind, name=name, inputs=[scores, target], outputs=(name,), attributes=attributes)
    tensors[name] = built.outputs[0]
    operators.append(built.operator)
    first = graph.outputs[0] if loss == "mse" else scores.name
    outputs = (first, *(o for o in graph.outputs[1:] if o in tensors), name)
    return rebuilt(graph, operators, tensors, outputs)


def _squeezed(graph: Graph, scores: Tensor, operators: list[Operator], tensors: dict[str, Tensor]) -> Tensor:
    """`scores` as `[n, c]`; an image classifier without a final Flatten gives `[n, c, 1, 1]`."""
    if len(scores.shape) < 4 or prod(scores.shape[2:]) != 1:
        return scores
    name = _free(graph, "scores")
    built = make_operator("Flatten", name=name, inputs=[scores], outputs=(name,), attributes={"axis": 1})
    operators.append(built.operator)
    tensors[name] = built.outputs[0]
    return built.outputs[0]
