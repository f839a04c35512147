"""ONNX bytes to Graph: roles, symbolic dims, folding, canonical operators. Weights are never read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from ir.build import GraphBuilder
from ir.canonical import canonical
from ir.errors import ModelError, ModelTooExpensive
from ir.experts import recognise_experts
from ir.graph import Graph, Tensor
from ir.localize import localize
from ir.loss import with_loss
from ir.onnx.fold import fold
from ir.onnx.guard import Limits, parse, refuse
from ir.onnx.infer import infer
from ir.onnx.nodes import Declared, Node, Source, dtype_name, read_model, small_value
from ir.onnx.rows import add_rows
from ir.operators import KINDS, Value
from ir.parameters import roles_without_metadata, split_fused, stored_role

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
    """`load_model` of what `ir.onnx.guard.parse` let through; `sha256` is of the file."""
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

    def run(self, name: str, sha256: str) -> Graph:
        self._inputs()
        self._stored()
        uses = {n for node in self.source.nodes for n in node.inputs} | set(self.source.outputs)
        for node in self.source.nodes:
            self._node(node, uses)
        outputs = [self._resolve(n) for n in self.source.outputs]
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

    # Inputs and stored tensors

    def _inputs(self) -> None:
        marked = {"PARAMETER": "parameter", "BUFFER": "buffer"}
        roles = {}
        for name, declared in self.source.inputs.items():
            is_named = any(fnmatchcase(name, pattern) for pattern in self.parameters)
            roles[name] = "parameter" if is_named else marked.get(declared.kind, "input")
        used = {n for node in self.source.nodes for n in node.inputs}
        data = {n: d for n, d in self.source.inputs.items() if roles[n] == "input" and n in used}
        places = self._batch_places(data)
        for name, declared in self.source.inputs.items():
            if name not in used and name not in self.source.outputs:
                continue
            if declared.shape is None:
                raise refuse("an input has no declared shape", name, "Export with shapes.")
            place = places.get(name)
            shape = [self._bind(name, i, size, is_batch=i == place) for i, size in enumerate(declared.shape)]
            if place is not None:
                shape[place] //= self.builder.export_batch
            self.builder.add_tensor(
                Tensor(name=name, shape=tuple(shape), dtype=declared.dtype, role=roles[name], batch_dim=place)  # type: ignore[arg-type]
            )

    def _bind(self, name: str, index: int, size: Dim, *, is_batch: bool) -> int:
        if isinstance(size, str):
            if is_batch:
                return self.builder.export_batch
            if size not in self.dims:
                raise ModelError(
                    f"dim {index} of input {name} is symbolic and has no size",
                    field=f"dims.{size}",
                    value="unbound",
                    repair=f'Bind it: `--dim {size}=128`, or in a request the field `dims`: {{"{size}": 128}}.',
                )
            size = self.dims[size]
        if size <= 0:
            raise ModelError(
                f"dim {index} of input {name} has no size",
                field="model",
                value=size,
                repair="Export with positive sizes.",
            )
        return size

    def _batch_places(self, data: Mapping[str, Declared]) -> dict[str, int | None]:
        """The batch dim of each data input, and the exported batch size (1 when symbolic)."""
        for name in self.batch_dims:
            if name not in data:
                raise ModelError(
                    "no data input has this name",
                    field=f"training.batch_dims.{name}",
                    value=name,
                    repair=f"Data inputs are: {', '.join(data) or 'none'}.",
                )
        places: dict[str, int | None] = {}
        sizes: dict[str, Dim] = {}
        for name, declared in data.items():
            rank = len(declared.shape or ())
            place = self.batch_dims.get(name, 0 if rank else None)
            if place is not None and not 0 <= place < rank:
                raise ModelError(
                    "the batch dim is outside the input's rank",
                    field=f"training.batch_dims.{name}",
                    value=place,
                    repair=f"Give a dim from 0 to {rank - 1}, or null.",
                )
            places[name] = place
            if place is not None and declared.shape is not None:
                size = declared.shape[place]
                sizes[name] = self.dims.get(size, size) if isinstance(size, str) and size in self.dims else size
        symbolic = {n for n, s in sizes.items() if isinstance(s, str)}
        static = [s for s in sizes.values() if not isinstance(s, str)]
        # One input tells the batch: a symbolic leading dim if there is any, else the first explicit or data input.
        first = next((n for n in self.batch_dims if n in sizes and n not in symbolic), None)
        batch = 1 if symbolic else (int(sizes[first]) if first else int(static[0]) if static else 1)
        for name, size in sizes.items():
            agrees = name in symbolic if symbolic else size == batch
            if not agrees and name not in self.batch_dims:
                places[name] = None
                self.builder.warnings.append(
                    f"{name}: leading dim {size} is not the batch, taken as the same for all samples"
                )
        if batch <= 0:
            raise refuse("the batch dim has no size", batch, "Export at a batch of 1 or more.")
        self.builder.export_batch = batch
        return places

    def _stored(self) -> None:
        guess = {} if self.source.has_metadata else roles_without_metadata(self.source)
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
        if self._fold(node, inputs):
            return
        attributes = self._attributes(node)
        if node.kind == "Expand" and len(inputs) > 1 and self._elide_expand(node, inputs):
            return
        if add_rows(builder, node, inputs, attributes):
            return
        outputs = [n if n and (i == 0 or n in uses or node.kind == "Split") else "" for i, n in enumerate(node.outputs)]
        while len(outputs) > 1 and not outputs[-1]:
            outputs.pop()
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
        hints = self._hints(node, inputs) if node.kind not in KINDS else ()
        builder.add(
            node.kind,
            inputs,
            outputs,
            name=label,
            scope=node.scope,
            attributes=attributes,
            opset=node.opset,
            hints=hints,
            costs=node.costs,
        )

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
        if node.kind in ("Shape", "Size") and inputs[0] in builder.tensors:
            shape = builder.tensors[inputs[0]].shape_at(builder.export_batch)
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
        tensor, target = builder.tensors.get(inputs[0]), builder.values.get(inputs[1])
        if tensor is None or target is None:
            return False
        wanted = [int(v) for v in target.reshape(-1)]
        shape = tensor.shape_at(builder.export_batch)
        if len(wanted) > len(shape):
            return False
        offset = len(shape) - len(wanted)
        for i, want in enumerate(wanted):
            size = shape[offset + i]
            leads = offset + i == 0 and tensor.batch_dim is None and size == 1 and want == builder.export_batch
            if want not in (1, size) and not leads:
                return False
        self.alias[node.outputs[0]] = inputs[0]
        return True

    def _hints(self, node: Node, inputs: Sequence[str]) -> list[tuple[tuple[int, ...], str] | None]:
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


def data_inputs(graph: Graph) -> Iterable[Tensor]:
    """The tensors that a batch fills."""
    return (t for t in graph.tensors.values() if t.role == "input")
