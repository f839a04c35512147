"""ONNX bytes to Graph: roles, symbolic dims, folding, canonical operators. Weights are never read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ir.build import GraphBuilder, Stated
from ir.canonical import canonical
from ir.errors import ModelError, ModelTooExpensive, refuse
from ir.experts import recognise_experts
from ir.graph import Graph, Tensor
from ir.localize import localize
from ir.loss import with_loss
from ir.onnx.read import read_model
from ir.onnx.readers.control import SEQUENCES
from ir.onnx.readers.guard import Limits, parse
from ir.onnx.readers.infer import infer
from ir.onnx.readers.inputs import add_inputs
from ir.onnx.readers.nodes import BAGS, Node, Source, dtype_name, small_value
from ir.onnx.readers.roles import roles_without_metadata, stored_role
from ir.onnx.rewrites.fold import fold
from ir.onnx.rewrites.merged import MergedViews
from ir.onnx.rewrites.rows import add_rows
from ir.onnx.rewrites.samples import SampleLookups
from ir.onnx.rewrites.sequences import Sequences
from ir.operators import KINDS, Value
from ir.parameters import split_fused

Dim = int | str
SMALL_VALUE = 64
"""Shapes and axes are smaller: they are always computed."""
MAX_FOLDED = 1 << 21
"""Elements of all larger computed constants together; beyond it they stay operators."""
ELIDED = {"Identity", "Dropout"}
DTYPE_ATTRIBUTES = {
    "Cast": "to",
    "EyeLike": "dtype",
    "RandomNormal": "dtype",
    "RandomUniform": "dtype",
    "RandomNormalLike": "dtype",
    "RandomUniformLike": "dtype",
    "Bernoulli": "dtype",
}
MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError)
DEFAULTS = {"Gemm": {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}}


def load_model(
    data: bytes,
    *,
    name: str = "",
    dims: Mapping[str, int] | None = None,
    parameters: Sequence[str] = (),
    batch_dims: Mapping[str, int | None] | None = None,
    loss: str | None = None,
    limits: Limits | None = None,
) -> Graph:
    """Reads an ONNX file (operator sets 9 and later), with or without weights.

    Args:
        data: the bytes of the file.
        name: of the graph; default the one in the file.
        dims: sizes of symbolic dims other than the batch.
        parameters: globs over graph inputs that are parameters, for files whose exporter did not say.
        batch_dims: data input -> dim that is the batch, or None; default the leading dim.
        loss: appended if given (`cross_entropy`, `mse`); see `ir.loss.with_loss`.
        limits: bounds on the file.

    Raises:
        ModelError: the file or what is said about it is wrong; names field, value and repair.
    """
    return read_graph(
        parse(data, limits),
        sha256=hashlib.sha256(data).hexdigest(),
        name=name,
        dims=dims,
        parameters=parameters,
        batch_dims=batch_dims,
        loss=loss,
    )


def read_graph(
    model: Any,
    *,
    sha256: str = "",
    name: str = "",
    dims: Mapping[str, int] | None = None,
    parameters: Sequence[str] = (),
    batch_dims: Mapping[str, int | None] | None = None,
    loss: str | None = None,
) -> Graph:
    """`load_model` of what `ir.onnx.readers.guard.parse` let through; `sha256` is of the file."""
    try:
        source = read_model(model)
        graph = _Importer(source, dims or {}, tuple(parameters), batch_dims or {}).run(name or source.name, sha256)
        graph = localize(split_fused(canonical(recognise_experts(graph))))
    except MALFORMED as error:
        # The last net: bytes that parse as protobuf may still break any rule of ONNX.
        raise refuse("the file is malformed", f"{type(error).__name__}: {error}", "Export the model again.") from error
    except RecursionError:
        raise ModelTooExpensive(
            "the model is nested too deeply",
            field="model",
            value="functions or views",
            repair="Export without nested functions.",
        ) from None
    return with_loss(graph, loss) if loss is not None else graph


@dataclass
class _Importer:
    source: Source
    dims: Mapping[str, int]
    parameters: tuple[str, ...]
    batch_dims: Mapping[str, int | None]
    builder: GraphBuilder = field(default_factory=GraphBuilder)
    alias: dict[str, str] = field(default_factory=dict)
    folded: int = 0
    """Elements of the larger constants computed so far."""

    def __post_init__(self) -> None:
        self.merged = MergedViews(self.builder)
        self.sequences = Sequences(self.builder, self.merged, self.alias, self._node)
        self.samples = SampleLookups(self.builder, self.source.nodes, self._resolve, self._node)

    def run(self, name: str, sha256: str) -> Graph:
        add_inputs(self.builder, self.source, dims=self.dims, parameters=self.parameters, batch_dims=self.batch_dims)
        self._stored()
        uses = {n for node in self.source.nodes for n in node.inputs} | set(self.source.outputs)
        for node in self.source.nodes:
            self._node(node, uses)
        outputs = [self.merged.make(self._resolve(n)) for n in self.source.outputs]
        missing = [n for n in outputs if n not in self.builder.tensors and n not in self.builder.values]
        if missing:
            raise refuse("an output is computed by nothing", missing[0], "Send the complete graph.")
        graph = self.builder.finish(outputs, name=name, sha256=sha256)
        if not graph.parameters:
            raise ModelError(
                "no trainable parameter was found",
                field="hints.parameters",
                value=list(self.source.inputs)[:8],
                repair="Name the graph inputs that are parameters by globs, for instance `--parameters '*weight*'`.",
            )
        return graph

    # Stored tensors

    def _stored(self) -> None:
        guess = roles_without_metadata(self.source)
        if self.source.has_metadata:
            # A tensor that the exporter's optimiser made again lost its mark; parameters have dotted names.
            guess = {n: r for n, r in guess.items() if "." in n and n in self.source.stored}
        used = {n for node in self.source.nodes for n in node.inputs} | set(self.source.outputs)
        for name, stored in self.source.stored.items():
            if name not in used:
                continue
            role = stored_role(name, stored, guess, self.parameters)
            if role == "constant" and stored.value is not None:
                self.builder.constant(name, stored.value)
                continue
            self.builder.add_tensor(Tensor(name=name, shape=stored.shape, dtype=stored.dtype, role=role))
        self._filled = {n for n, role in guess.items() if n not in self.source.stored}
        self._roles = guess

    # Nodes

    def _resolve(self, name: str) -> str:
        while name in self.alias:
            name = self.alias[name]
        return name

    def _node(self, node: Node, uses: set[str]) -> None:
        builder = self.builder
        inputs = [self._resolve(n) for n in node.inputs]
        while inputs and not inputs[-1]:
            inputs.pop()
        if node.kind == "If":
            self._branch(node, inputs[0], uses)
            return
        if node.kind == BAGS:
            self._bags(node, inputs)
            return
        if node.kind in SEQUENCES:
            self.sequences.add(node, inputs, uses)
            return
        if node.kind in ELIDED and inputs and not self._trains(node, inputs):
            self.alias[node.outputs[0]] = inputs[0]
            if len(node.outputs) > 1 and node.outputs[1] in uses:
                raise refuse("the mask of a Dropout is used", node.outputs[1], "Export in evaluation mode.")
            return
        if node.outputs and node.outputs[0] in self._filled:
            shape = builder.values.get(inputs[0]) if inputs else None
            if shape is not None:
                fill = small_value(node.attributes["value"]) if "value" in node.attributes else None
                dtype = str(fill.dtype) if fill is not None else "float32"
                role = self._roles[node.outputs[0]]
                sizes = tuple(int(v) for v in shape.reshape(-1))
                builder.add_tensor(Tensor(name=node.outputs[0], shape=sizes, dtype=dtype, role=role))
                return
        # Constants of floats are repeated for each sample like tensors; those of integers may be indices or sizes.
        known = builder.values.get(inputs[0]) if node.kind == "Expand" and len(inputs) > 1 else None
        if known is not None and known.dtype.kind == "f" and self._elide_expand(node, inputs):
            return
        if self._fold(node, inputs):
            return
        attributes = self._attributes(node)
        if self.merged.put_off(node, inputs, attributes):
            return
        for name in inputs:
            self.merged.make(name)
        if node.kind == "Expand" and len(inputs) > 1 and self._elide_expand(node, inputs):
            return
        if add_rows(builder, node, inputs, attributes):
            return
        if self.samples.add(node, inputs):
            return
        outputs = [n if n and (i == 0 or n in uses or node.kind == "Split") else "" for i, n in enumerate(node.outputs)]
        while len(outputs) > 1 and not outputs[-1]:
            outputs.pop()
        if node.kind == "Dropout" and len(outputs) == 1:
            outputs.append(f"{outputs[0]}#mask")
        if node.kind == "Constant":
            tensor = node.attributes.get("value")
            if tensor is None:
                raise refuse("a Constant has an unsupported value", node.outputs[0], "Export with numeric constants.")
            builder.add_tensor(
                Tensor(
                    name=node.outputs[0], shape=tuple(tensor.dims), dtype=dtype_name(tensor.data_type), role="constant"
                )
            )
            return
        if node.kind == "Gemm" and len(inputs) > 2 and self._is_plain_gemm(node):
            product = f"{node.outputs[0]}#product"
            builder.add(
                "Gemm", inputs[:2], [product], name=node.name, scope=node.scope, attributes=attributes, opset=node.opset
            )
            builder.add(
                "Add",
                [product, inputs[2]],
                outputs,
                name=f"{node.name}#bias" if node.name else "",
                scope=node.scope,
                opset=node.opset,
            )
            return
        # Numbers in node names depend on details of the export; the kind alone does not.
        label = node.kind if self.source.has_metadata and not node.scope else node.name
        shapes = self._stated_shapes(node, inputs) if node.kind not in KINDS else ()
        builder.add(
            node.kind,
            inputs,
            outputs,
            name=label,
            scope=node.scope,
            attributes=attributes,
            opset=node.opset,
            stated=Stated(shapes=shapes, costs=node.costs),
        )

    def _branch(self, node: Node, condition: str, uses: set[str]) -> None:
        """Goes on with the branch that a known condition takes."""
        value = self.builder.values.get(condition)
        if value is None:
            raise refuse(
                "control flow is not supported: the condition of an If depends on data",
                node.name or node.outputs[0],
                "Export with one branch only: a training graph is a straight line.",
            )
        branch = node.attributes["then_branch" if bool(value.reshape(-1)[0]) else "else_branch"]
        nodes, stored = branch.read()
        for name, given in stored.items():
            if given.value is not None:
                self.builder.constant(name, given.value)
            else:
                self.builder.add_tensor(Tensor(name=name, shape=given.shape, dtype=given.dtype, role="constant"))
        inner = uses | {n for each in nodes for n in each.inputs} | set(branch.outputs)
        for each in nodes:
            self._node(each, inner)
        for outer, name in zip(node.outputs, branch.outputs, strict=True):
            self.alias[outer] = self._resolve(name)

    def _bags(self, node: Node, inputs: Sequence[str]) -> None:
        """Bags of equal size: `[(b rows), ...]` is viewed as `[b, rows, ...]` and reduced over the rows."""
        builder = self.builder
        for name in inputs:
            self.merged.make(name)
        rows, offsets = builder.tensors.get(inputs[0]), builder.values.get(inputs[1])
        starts = [] if offsets is None or rows is None else [int(v) for v in offsets.reshape(-1)]
        total = rows.shape_at(builder.export_batch)[0] if rows is not None and rows.shape else 0
        starts = [v for v in starts if v < total]
        size = total // len(starts) if starts else 0
        if rows is None or not starts or starts != list(range(0, total, size)) or size * len(starts) != total:
            raise refuse(
                "an embedding bag has bags of different or unknown sizes",
                node.name or node.outputs[0],
                "Export with bags of equal size: `[batch, places]` without offsets.",
            )
        out, scope = node.outputs[0], node.scope
        entry = f"{out}#bags"
        builder.constant(f"{out}#shape", np.asarray([len(starts), size, *rows.shape[1:]]))
        builder.add("Reshape", [inputs[0], f"{out}#shape"], [entry], name=f"{node.name}#bags", scope=scope)
        if len(inputs) > 2:
            builder.add("Gather", [inputs[2], entry], [f"{out}#rows"], name=f"{node.name}#rows", scope=scope)
            entry = f"{out}#rows"
        attributes = {"axes": (1,), "keepdims": 0}
        kind = str(node.attributes["reduction"])
        builder.add(kind, [entry], [out], name=node.name, scope=scope, attributes=attributes, opset=18)

    def _trains(self, node: Node, inputs: list[str]) -> bool:
        """A Dropout that says it is in training mode stays; the ratio alone is for inference."""
        if node.kind != "Dropout" or len(inputs) < 3:
            return False
        flag = self.builder.values.get(inputs[2])
        return flag is not None and bool(flag.reshape(-1)[0])

    def _is_plain_gemm(self, node: Node) -> bool:
        return all(node.attributes.get(k, 1.0) == 1.0 for k in ("alpha", "beta"))

    def _attributes(self, node: Node) -> dict[str, Any]:
        found = dict(node.attributes)
        key = DTYPE_ATTRIBUTES.get(node.kind)
        if key and key in found:
            found[key] = dtype_name(int(found[key]))
        for name, default in DEFAULTS.get(node.kind, {}).items():
            if name in found and found[name] == default:
                del found[name]
        if node.kind == "ConstantOfShape":
            fill = small_value(found["value"]) if "value" in found else None
            found["value"] = 0.0 if fill is None else fill.reshape(-1)[0].item()
            found["dtype"] = "float32" if fill is None else str(fill.dtype)
        if node.kind == "Constant":
            return {}
        return {k: v for k, v in found.items() if isinstance(v, (int, float, str, tuple))}

    def _fold(self, node: Node, inputs: Sequence[str]) -> bool:
        """Computes a node of known operands; Shape and Size need no values."""
        builder = self.builder
        if node.kind in ("Shape", "Size") and not inputs:
            return False
        if node.kind in ("Shape", "Size") and (inputs[0] in builder.tensors or inputs[0] in self.merged):
            view = self.merged.views.get(inputs[0])
            shape = view.shape if view else builder.tensors[inputs[0]].shape_at(builder.export_batch)
            if node.kind == "Size":
                results: Sequence[Value] | None = [np.asarray(int(np.prod(shape, dtype=object)), dtype=np.int64)]
            else:
                start, end = node.attributes.get("start", 0), node.attributes.get("end")
                results = [np.asarray(shape[slice(start, end)], dtype=np.int64)]
        elif node.kind in ("Shape", "Size") and inputs[0] in builder.values:
            shape = builder.values[inputs[0]].shape
            start, end = node.attributes.get("start", 0), node.attributes.get("end")
            size = np.asarray(builder.values[inputs[0]].size, dtype=np.int64)
            results = [size if node.kind == "Size" else np.asarray(shape[slice(start, end)], dtype=np.int64)]
        elif all(not n or n in builder.values for n in inputs):
            results = fold(node, [builder.values.get(n) if n else None for n in inputs])
        else:
            return False
        if results is None:
            return False
        large = sum(r.size for r in results if r.size > SMALL_VALUE)
        self.folded += large
        if large and self.folded > MAX_FOLDED:
            return False
        for name, value in zip(node.outputs, results, strict=False):
            if name:
                builder.constant(name, value)
        return True

    def _elide_expand(self, node: Node, inputs: Sequence[str]) -> bool:
        """Drops an Expand that only repeats something for each sample: consumers broadcast it anyway.

        It is the same graph then whether the file was exported at one sample, at many or with a symbolic batch.
        """
        builder = self.builder
        target = builder.values.get(inputs[1])
        if target is None or (inputs[0] not in builder.tensors and inputs[0] not in builder.values):
            return False
        tensor = builder.operand(inputs[0])
        wanted = [int(v) for v in target.reshape(-1)]
        shape = tensor.shape_at(builder.export_batch)
        if len(wanted) > len(shape):
            if tensor.batch_dim is not None or wanted[0] != builder.export_batch or wanted[0] == 1:
                return False
            once = builder.constant(f"{node.outputs[0]}#shape", np.asarray([1, *wanted[1:]]))
            builder.add("Expand", [inputs[0], once], [node.outputs[0]], name=node.name, scope=node.scope)
            return True
        offset = len(shape) - len(wanted)
        for i, want in enumerate(wanted):
            size = shape[offset + i]
            # Of `[s, b, h]`, what all samples share is a constant of three dims.
            leads = offset + i == 0 or (offset + i == 1 and len(shape) == 3 and tensor.role == "constant")
            repeats = leads and tensor.batch_dim is None and size == 1 and want == builder.export_batch
            if want not in (1, size) and not repeats:
                return False
        self.alias[node.outputs[0]] = inputs[0]
        return True

    def _stated_shapes(self, node: Node, inputs: Sequence[str]) -> list[tuple[tuple[int, ...], str] | None]:
        """Exported output shapes of a kind outside the table: as declared, else inferred by onnx."""
        found: list[tuple[tuple[int, ...], str] | None] = []
        stated = {**self.source.outputs, **self.source.declared}
        if any(stated.get(name) is None or stated[name].shape is None for name in node.outputs):
            builder = self.builder
            stated |= infer(node, inputs, builder.tensors, builder.values, builder.export_batch)
        for name in node.outputs:
            declared = stated.get(name)
            if declared is None or declared.shape is None:
                found.append(None)
                continue
            first = True
            shape: list[int] = []
            for size in declared.shape:
                if isinstance(size, str):
                    shape.append(self.dims.get(size, self.builder.export_batch if first else 0))
                else:
                    shape.append(size)
                first = False
            found.append((tuple(shape), declared.dtype) if all(s > 0 for s in shape) else None)
        return found
