"""Reads control flow and sequences that can be expressed without them.

An `If` whose condition is known is replaced by its branch. The loop that PyTorch's exporters write for
`nn.EmbeddingBag` (which looks up and reduces the rows between two offsets, one bag per iteration) is read as one
look-up and one reduction. Sequences of known length become lists of tensors, and loops of known length are unrolled.
Everything else is rejected, since a training graph has no control flow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax")
LOOPS = ("Loop", "Scan")
SEQUENCES = frozenset(
    {"SequenceEmpty", "SequenceConstruct", "SequenceInsert", "SequenceAt", "SequenceLength", "ConcatFromSequence",
     "SplitToSequence"}
)  # fmt: skip


@dataclass
class Branch:
    """One branch of an `If`, which is read only if the condition selects it."""

    read: Callable[[], tuple[list[Any], dict[str, Any]]]
    """Function that returns the nodes and the stored tensors of the branch, with the names of the enclosing graph."""
    outputs: list[str]
    """Names of its results."""


@dataclass
class Body:
    """The body of a `Loop` or `Scan`, which is read once per iteration."""

    read: Callable[[Sequence[str], int], tuple[list[Any], list[str]]]
    """Function of an iteration's operands and index that returns its nodes and the names of its results."""
    stored: dict[str, Any]
    """The stored tensors of the body, which all iterations read."""
    operands: list[str]
    """Names of the inputs of the body, one per operand of the loop in the file; further operands of the node are the
    tensors that the body reads from the enclosing graph."""


@dataclass(frozen=True)
class Bags:
    """The loop of an `nn.EmbeddingBag`."""

    rows: str
    """Tensor that is divided into bags at the offsets: looked-up rows, or the indices of rows of `table`."""
    offsets: str
    """Tensor with the index of the first row of each bag."""
    table: str
    """Tensor of embeddings; empty if `rows` has the looked-up rows themselves."""
    reduction: str
    """Kind that reduces a bag, one of `REDUCTIONS`."""
    keeps_dim: bool
    """Whether the reduction keeps the dim of the rows."""
    result: int
    """Index of the loop's result that contains the bags; it differs between exporters."""


def graphs(proto: Any) -> Iterator[Any]:
    """The subgraphs of a node."""
    for attribute in proto.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def all_nodes(holder: Any) -> Iterator[Any]:
    """The nodes of a graph or function, and of their subgraphs."""
    for node in holder.node:
        yield node
        for sub in graphs(node):
            yield from all_nodes(sub)


def all_graphs(model: Any) -> Iterator[Any]:
    """The graph of a model, the bodies of its functions, and their subgraphs."""
    pending = [model.graph, *model.functions]
    while pending:
        holder = pending.pop()
        yield holder
        pending += (sub for node in holder.node if node.attribute for sub in graphs(node))


def written(holder: Any) -> Iterator[str]:
    """Names of the tensors that a graph (without its subgraphs) or a function stores or computes."""
    yield from (t.name for t in getattr(holder, "initializer", ()))
    yield from (name for node in holder.node for name in node.output if name)


def free_names(graph: Any) -> dict[str, None]:
    """Names that a subgraph reads from the enclosing graph, in order of first use."""
    own = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    free: dict[str, None] = {}
    for node in graph.node:
        inner = [name for sub in graphs(node) for name in free_names(sub)]
        free.update((name, None) for name in (*node.input, *inner) if name and name not in own)
        own.update(node.output)
    free.update((v.name, None) for v in graph.output if v.name not in own)
    return free


def bags(loop: Any) -> Bags | None:
    """The parts of a Loop that reduces one slice per iteration; None for any other loop."""
    body = next(graphs(loop), None)
    if body is None:
        return None
    nodes = list(all_nodes(body))
    made = {name: node for node in nodes for name in node.output}
    # Slices whose bounds are computed in the loop.
    cuts = [n for n in nodes if n.op_type == "Slice" and n.input[0] not in made and made.keys() & set(n.input[1:])]
    reductions = [n for n in nodes if n.op_type in REDUCTIONS]
    looked = [n for n in nodes if n.op_type == "Gather" and n.input[0] not in made and n.input[1] in made]
    others = {n.op_type for n in nodes} - {
        "Slice", "Gather", "Constant", "Unsqueeze", "Squeeze", "Cast", "CastLike", "Add", "Less", "Equal", "If",
        "Reshape", "SequenceInsert", "Div", "Sub", "Greater", "Identity", "ConstantOfShape", "Shape", "Concat",
        "Expand", *REDUCTIONS,
    }  # fmt: skip
    if others or not reductions or len({n.input[0] for n in reductions}) != 1:
        return None
    # A mean is written as a sum and a division, or as branches with a mean of weighted rows.
    kind = "ReduceMean" if any(n.op_type in ("Div", "ReduceMean") for n in nodes) else reductions[0].op_type
    reduction = reductions[0]
    source = made.get(reduction.input[0])
    table = ""
    if source is not None and source.op_type == "Gather":
        table, source = source.input[0], made.get(source.input[1])
    if source is None or source.op_type != "Slice" or table in made:
        return None
    offsets = _origin(source.input[1], made)
    if not offsets or source.input[0] in made or (not cuts and not looked):
        return None
    keeps = next((a.i for a in reduction.attribute if a.name == "keepdims"), 1)
    lists = {name for node in nodes if node.op_type == "SequenceInsert" for name in node.output}
    results = [v.name for v in body.output][1:]
    place = next((i for i, name in enumerate(results) if name in lists), len(results) - 1)
    return Bags(source.input[0], offsets, table, kind, bool(keeps), place)


def _origin(name: str, made: Mapping[str, Any]) -> str:
    """Name of the tensor outside the loop from which the start of a slice is read; empty if there is none."""
    while name in made:
        node = made[name]
        if node.op_type in ("Unsqueeze", "Squeeze", "Cast", "Reshape", "Identity", "Slice", "Gather"):
            name = node.input[0]
        else:
            return ""
    return name
