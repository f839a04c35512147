"""Rewrites after which equal computations have equal graphs, whichever exporter wrote them.

1. `Reshape [b,h,s,d] -> [(b h),s,d]; Transpose; Reshape back` becomes a Transpose of `[b,h,s,d]`, since in `(b h)` the
   heads are the minor part and could not be split.
2. `Reshape [b,s,k] -> [(b s),k]; product; bias; Reshape -> [b,s,n]` becomes a product and a bias on `[b,s,k]`, since
   `(b s)` could be split by samples only, and `[b,s,k]` also by positions.
3. A softmax in small steps becomes a Softmax (`ir.spelled_out`).
4. Attentions that share the product of their scores have one each (`ir.own_scores`).
5. A bias after a product has no memory traffic of its own: the kernel of the product adds it (GEMM epilogue).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ir.graph import Graph, Operator, Tensor
from ir.own_scores import with_own_scores
from ir.rewrite import Rewrite
from ir.spelled_out import spelled_out

BIAS_TRAFFIC = (0.0, 0.5)
"""Memory traffic of such a bias: forward none, in the epilogue of the product; backward, the output gradient is read
once more to be summed."""


def canonical(graph: Graph) -> Graph:
    """The rewritten graph; unchanged where nothing matches. See the module."""
    for rewrite in (_transposes, _compose, _merged_products, spelled_out, with_own_scores, _biases):
        graph = rewrite(graph)
    return graph


def _reader(graph: Graph, name: str, kind: str) -> int | None:
    """The only operator that reads `name`, if it is of `kind`."""
    readers = graph.consumers[name]
    if len(readers) != 1 or name in graph.outputs or graph.operators[readers[0]].kind != kind:
        return None
    return readers[0]


def _transposes(graph: Graph) -> Graph:
    rewrite = Rewrite(graph)
    for op in graph.operators:
        if op.kind != "Reshape" or not op.is_live:
            continue
        source, merged = graph.tensors[op.inputs[0]], graph.tensors[op.outputs[0]]
        extra = len(source.shape) - len(merged.shape)
        if extra < 1 or source.shape[extra + 1 :] != merged.shape[1:] or source.batch_dim != 0:
            continue
        middle = _reader(graph, op.outputs[0], "Transpose")
        if middle is None:
            continue
        perm = dict(graph.operators[middle].attributes)["perm"]
        last = _reader(graph, graph.operators[middle].outputs[0], "Reshape")
        if last is None or perm[0] != 0:
            continue
        whole = (*range(extra + 1), *(p + extra for p in perm[1:]))
        result = graph.tensors[graph.operators[last].outputs[0]]
        if result.shape != tuple(source.shape[p] for p in whole) or result.batch_dim != 0:
            continue
        rewrite.make(last, "Transpose", graph.operators[middle].name, op.inputs, result.name, {"perm": whole})
    return rewrite.finish()


def _compose(graph: Graph) -> Graph:
    """Two transposes in a row are one."""
    rewrite = Rewrite(graph)
    for i, op in enumerate(graph.operators):
        if op.kind != "Transpose" or not op.is_live or _reader(graph, op.inputs[0], "Transpose") != i:
            continue
        first = graph.maker(op.inputs[0])
        if first is None or first.kind != "Transpose" or first.is_view or graph.producer[op.inputs[0]] in rewrite.made:
            continue
        inner = dict(first.attributes)["perm"]
        perm = tuple(inner[p] for p in dict(op.attributes)["perm"])
        rewrite.make(i, "Transpose", op.name, first.inputs, op.outputs[0], {"perm": perm})
    return rewrite.finish()


def _merged_products(graph: Graph) -> Graph:
    """The graph with products on `[(b s), k]` rewritten for operands `[b, s, k]`."""
    rewrite = Rewrite(graph)
    for i, op in enumerate(graph.operators):
        if op.kind not in ("Gemm", "MatMul") or len(op.inputs) != 2 or not set(dict(op.attributes)) <= {"transB"}:
            continue
        weight, merged = graph.tensors[op.inputs[1]], graph.tensors[op.inputs[0]]
        if len(merged.shape) != 2 or len(weight.shape) != 2 or weight.batch_dim is not None:
            continue
        reshape = graph.maker(merged.name)
        if reshape is None or reshape.kind != "Reshape" or reshape.is_view:
            continue
        if merged.batch_dim == 0 and merged.shape[0] > 1:
            _unmerge(graph, rewrite, i, reshape)
    return rewrite.finish()


def _unmerge(graph: Graph, rewrite: Rewrite, at: int, reshape: Operator) -> None:
    """Rewrites a product on `[(b s), k]`, and its bias, for operands `[b, s, k]`; see the module.

    Nothing is done unless all readers of the result take the merged dims apart again.

    Args:
        graph: the graph.
        rewrite: takes the new operators.
        at: index of the product.
        reshape: the operator that merges the dims of its operand.
    """
    op = graph.operators[at]
    source, weight = graph.tensors[reshape.inputs[0]], graph.tensors[op.inputs[1]]
    merged = graph.tensors[op.inputs[0]]
    bias, last = _bias_of(graph, op.outputs[0])
    readers = graph.consumers[last]
    if last in graph.outputs or not readers or any(graph.operators[r].kind != "Reshape" for r in readers):
        return
    results = [graph.tensors[graph.operators[r].outputs[0]] for r in readers]
    lead = _leading_dims(source, merged.shape[1], results, graph.tensors[last].shape[1])
    if lead is None:
        return
    entry = source.name
    if source.shape != (*lead, merged.shape[1]):
        entry = f"{merged.name}#unmerged"
        rewrite.make(at, "Reshape", reshape.name, [source.name], entry, {"shape": (*lead, merged.shape[1])})
    transposed = op.inputs[1]
    if dict(op.attributes).get("transB"):
        transposed = f"{op.name}#transposed"
        name, is_view = f"{op.name}#transpose", graph.is_weight(weight.name)
        rewrite.make(at, "Transpose", name, [weight.name], transposed, {"perm": (1, 0)}, is_view=is_view)
    needs = op.backward_flops.at(1) > op.forward_flops.at(1)
    rewrite.make(at, "MatMul", op.name, [entry, transposed], op.outputs[0], {}, needs_gradient=[needs, True])
    if bias is not None:
        add = graph.operators[bias]
        rewrite.make(bias, "Add", add.name, add.inputs, add.outputs[0], {})
    whole = rewrite.tensor(last)
    for r, result in zip(readers, results, strict=True):
        if result.shape == whole.shape and result.batch_dim == whole.batch_dim:
            rewrite.renamed[result.name] = last
        else:
            rewrite.make(r, "Reshape", graph.operators[r].name, [last], result.name, {"shape": result.shape})


def _bias_of(graph: Graph, product: str) -> tuple[int | None, str]:
    """Index of the Add of a bias, one number for each column, that is the only reader of a product; and its result.

    Without such a bias: None, and the product itself.
    """
    reader = _reader(graph, product, "Add")
    if reader is None:
        return None, product
    add = graph.operators[reader]
    side = next((name for name in add.inputs if name != product), product)
    # Only a vector with one number for each column can also be added to a tensor with more leading dims.
    if side == product or len(graph.tensors[side].shape) != 1 or graph.tensors[side].batch_dim is not None:
        return None, product
    return reader, add.outputs[0]


def _leading_dims(source: Tensor, columns: int, results: Sequence[Tensor], out_columns: int) -> tuple[int, ...] | None:
    """The dims `[b, s, ...]` that were merged into the rows of a product; None where they cannot be told.

    Args:
        source: the operand before its dims were merged.
        columns: columns of the merged operand.
        results: what the readers of the product make of its result.
        out_columns: columns of this result.
    """
    of_results = {t.shape[:-1] for t in results if t.shape[-1] == out_columns and t.batch_dim == 0}
    if source.batch_dim == 0 and source.shape[-1] == columns:
        lead = source.shape[:-1]
    elif source.batch_dim == 0 and len(of_results) == 1:
        lead = next(iter(of_results))
    else:
        return None
    return lead if 2 <= len(lead) < len(source.shape) else None


def _biases(graph: Graph) -> Graph:
    rewrite = Rewrite(graph)
    for i, op in enumerate(graph.operators):
        if op.kind != "Add" or len(op.inputs) != 2:
            continue
        for product, bias in (op.inputs, op.inputs[::-1]):
            maker = graph.maker(product)
            if maker is not None and graph.tensors[bias].role == "parameter" and _adds_to_columns(graph, maker, bias):
                rewrite.made[i] = [replace(op, traffic=BIAS_TRAFFIC)]
    return rewrite.finish()


def _adds_to_columns(graph: Graph, product: Operator, bias: str) -> bool:
    """Whether a parameter has one number for each column of a product, which an einsum may write as several dims."""
    shape = graph.tensors[bias].shape
    if product.kind in ("MatMul", "Gemm"):
        return len(shape) == 1
    made = graph.tensors[product.outputs[0]].shape
    if product.kind != "Einsum" or len(product.inputs) != 2 or not shape or made[-len(shape) :] != shape:
        return False
    data, weight = sorted(range(2), key=lambda i: graph.is_weight(product.inputs[i]))
    rows = {factor for dim in product.rule.inputs[data] for factor in dim}
    columns = {factor for dim in product.rule.outputs[0][-len(shape) :] for factor in dim}
    return graph.is_weight(product.inputs[weight]) and not columns & rows
