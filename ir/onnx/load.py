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
from ir.onnx.control import SEQUENCES
from ir.onnx.fold import fold
from ir.onnx.guard import Limits, parse, refuse
from ir.onnx.infer import infer
from ir.onnx.merged import MergedViews
from ir.onnx.nodes import BAGS, Declared, Node, Source, dtype_name, small_value
from ir.onnx.read import read_model
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

    def __post_init__(self) -> None:
        self._by_output: dict[str, Node] = {}
        self._sequences: dict[str, list[str]] = {}
        self.merged = MergedViews(self.builder)

    def run(self, name: str, sha256: str) -> Graph:
        self._inputs()
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

    # Inputs and stored tensors

    def _inputs(self) -> None:
        marked = {"PARAMETER": "parameter", "USER_INPUT": "input", "": "input"}
        roles = {}
        for name, declared in self.source.inputs.items():
            is_named = any(fnmatchcase(name, pattern) for pattern in self.parameters)
            # Other marks (CONSTANT_TENSOR) are values that the trace made, neither data nor trained.
            roles[name] = "parameter" if is_named else marked.get(declared.kind, "buffer")
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
                    field=f"batch_dims.{name}",
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
                    field=f"batch_dims.{name}",
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
        if node.kind in SEQUENCES and self._sequence(node, inputs, uses):
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
        if node.kind == "Gather" and (self._gather_samples(node, inputs) or self._gather_own(node, inputs)):
            return
        if node.kind == "GatherND" and (self._gather_pairs(node, inputs) or self._gather_own(node, inputs)):
            return
        if node.kind == "ScatterND" and self._scatter_samples(node, inputs):
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

    def _sequence(self, node: Node, inputs: Sequence[str], uses: set[str]) -> bool:
        """Sequences of known length, as lists of names; False for one that an embedding bag made (a tensor already)."""
        lists = self._sequences
        out = node.outputs[0]
        if node.kind == "SequenceEmpty":
            lists[out] = []
        elif node.kind == "SequenceConstruct":
            lists[out] = list(inputs)
        elif node.kind == "SplitToSequence":
            self._split_to_sequence(node, inputs, uses)
        elif inputs[0] in lists:
            self._on_sequence(node, inputs, uses)
        elif node.kind == "ConcatFromSequence" and inputs[0] in self.builder.tensors:
            self.alias[out] = inputs[0]
        else:
            raise _unknown_sequence(node)
        return True

    def _on_sequence(self, node: Node, inputs: Sequence[str], uses: set[str]) -> None:
        out, items = node.outputs[0], self._sequences[inputs[0]]
        at = self.builder.values.get(inputs[-1]) if len(inputs) > 1 else None
        if node.kind == "SequenceInsert":
            if len(inputs) > 2 and at is None:
                raise _unknown_sequence(node)
            place = int(at.reshape(-1)[0]) if len(inputs) > 2 and at is not None else len(items)
            self._sequences[out] = [*items[:place], inputs[1], *items[place:]]
        elif node.kind == "SequenceLength":
            self.builder.constant(out, np.asarray(len(items), dtype=np.int64))
        elif node.kind == "SequenceAt":
            if at is None or not -len(items) <= int(at.reshape(-1)[0]) < len(items):
                raise _unknown_sequence(node)
            self.alias[out] = items[int(at.reshape(-1)[0])]
        else:
            axis = int(node.attributes.get("axis", 0))
            if node.attributes.get("new_axis"):
                self.builder.constant(f"{out}#axis", np.asarray([axis]))
                fresh = [f"{out}#{i}" for i in range(len(items))]
                for name, item in zip(fresh, items, strict=True):
                    self._node(Node("Unsqueeze", [item, f"{out}#axis"], [name], {}, node.name, node.scope, 13), uses)
                items = fresh
            self._node(Node("Concat", items, [out], {"axis": axis}, node.name, node.scope, node.opset), uses)

    def _split_to_sequence(self, node: Node, inputs: Sequence[str], uses: set[str]) -> None:
        for name in inputs:
            self.merged.make(name)
        tensor, out = self.builder.tensors.get(inputs[0]), node.outputs[0]
        given = self.builder.values.get(inputs[1]) if len(inputs) > 1 else np.asarray(1)
        if tensor is None or given is None:
            raise _unknown_sequence(node)
        axis = int(node.attributes.get("axis", 0)) % len(tensor.shape)
        size = tensor.shape_at(self.builder.export_batch)[axis]
        sizes = [int(v) for v in given.reshape(-1)]
        if not given.ndim:
            sizes = [min(sizes[0], size - at) for at in range(0, size, max(sizes[0], 1))]
        drops = len(inputs) < 2 and not node.attributes.get("keepdims", 1)
        names = [f"{out}#{i}" for i in range(len(sizes))]
        self.builder.constant(f"{out}#sizes", np.asarray(sizes, dtype=np.int64))
        split = Node("Split", [inputs[0], f"{out}#sizes"], names, {"axis": axis}, node.name, node.scope, 13)
        self._node(split, uses | set(names))
        if drops:
            self.builder.constant(f"{out}#axis", np.asarray([axis]))
            for name in names:
                self._node(Node("Squeeze", [name, f"{out}#axis"], [f"{name}s"], {}, node.name, node.scope, 13), uses)
            names = [f"{name}s" for name in names]
        self._sequences[out] = names

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

    def _gather_samples(self, node: Node, inputs: Sequence[str]) -> bool:
        """A look-up along `(b s)` by known places that stay within each sample: a look-up along `s` of `[b, s]`.

        Indexing by `[arange(b)[:, None], places]` and `as_strided` are exported like that.
        """
        builder = self.builder
        data, value = builder.tensors.get(inputs[0]), builder.values.get(inputs[1])
        if data is None or value is None or data.batch_dim is None or not value.ndim:
            return False
        axis = int(node.attributes.get("axis", 0)) % len(data.shape)
        batch, rows = builder.export_batch, data.shape[axis]
        if axis != data.batch_dim or value.shape[0] != batch:
            return False
        value = np.where(value < 0, value + rows * batch, value)
        own = value[:1]
        samples = np.arange(batch).reshape(-1, *[1] * (value.ndim - 1))
        if own.min(initial=0) < 0 or own.max(initial=0) >= rows or not np.array_equal(value, own + samples * rows):
            return False
        lead, tail = data.shape[:axis], data.shape[axis + 1 :]
        kept = own.reshape(-1)
        entry, made, result = f"{node.outputs[0]}#apart", f"{node.outputs[0]}#rows", node.outputs[0]

        def reshape(source: str, target: str, shape: Sequence[int]) -> None:
            given = np.asarray([n * batch if d == axis else n for d, n in enumerate(shape)])
            builder.constant(f"{target}#shape", given)
            builder.add("Reshape", [source, f"{target}#shape"], [target], scope=node.scope, name=node.name)

        reshape(inputs[0], entry, (*lead, 1, rows, *tail))
        if not np.array_equal(kept, np.arange(rows)):
            builder.constant(f"{made}#places", kept)
            builder.add("Gather", [entry, f"{made}#places"], [made], scope=node.scope, attributes={"axis": axis + 1})
            entry = made
        reshape(entry, result, (*lead, *own.shape, *tail))
        return True

    def _is_by_sample(self, value: Value) -> bool:
        """Whether index tuples are `(sample, places...)`, with the same places for each sample in turn."""
        if value.ndim < 2 or value.shape[-1] < 2 or value.shape[0] != self.builder.export_batch:
            return False
        samples = np.arange(len(value)).reshape(-1, *[1] * (value.ndim - 2))
        own = value[:1, ..., 1:]
        return bool((value[..., 0] == samples).all() and (value[..., 1:] == own).all())

    def _gather_pairs(self, node: Node, inputs: Sequence[str]) -> bool:
        """`x[arange(b)[:, None], places]` with known places: a look-up along dim 1, the same for each sample.

        Masks of transformers are exported like that.
        """
        builder = self.builder
        data, value = builder.tensors.get(inputs[0]), builder.values.get(inputs[1])
        if data is None or data.batch_dim != 0 or data.shape[0] != 1 or value is None or value.shape[-1:] != (2,):
            return False
        if node.attributes.get("batch_dims") or not self._is_by_sample(value):
            return False
        places, out = value[0, ..., 1], node.outputs[0]
        if np.array_equal(places.reshape(-1), np.arange(data.shape[1])):
            builder.constant(f"{out}#shape", np.asarray([builder.export_batch, *places.shape, *data.shape[2:]]))
            builder.add("Reshape", [inputs[0], f"{out}#shape"], [out], name=node.name, scope=node.scope)
        else:
            builder.constant(f"{out}#places", np.ascontiguousarray(places))
            builder.add(
                "Gather",
                [inputs[0], f"{out}#places"],
                [out],
                name=node.name,
                scope=node.scope,
                attributes={"axis": 1},
            )
        return True

    def _scatter_samples(self, node: Node, inputs: Sequence[str]) -> bool:
        """`x[arange(b), places] = y` with known places: the batch is moved behind the dims that are looked into."""
        builder = self.builder
        value = builder.values.get(inputs[1])
        if value is None or not self._is_by_sample(value) or node.attributes.get("reduction", "none") != "none":
            return False
        operands = [builder.tensors.get(n) or builder.values.get(n) for n in (inputs[0], inputs[2])]
        if any(o is None for o in operands):
            return False
        out, depth, lead = node.outputs[0], value.shape[-1], value.ndim - 1
        ranks = [len(o.shape) for o in operands if o is not None]
        names = []
        for name, rank, place, label in (
            (inputs[0], ranks[0], depth - 1, "data"),
            (inputs[2], ranks[1], lead - 1, "new"),
        ):
            perm = (*range(1, place + 1), 0, *range(place + 1, rank))
            turned = Node("Transpose", [name], [f"{out}#{label}"], {"perm": perm}, node.name, node.scope, node.opset)
            self._node(turned, set())
            names.append(f"{out}#{label}")
        builder.constant(f"{out}#places", np.ascontiguousarray(value[0, ..., 1:]))
        made = Node("ScatterND", [names[0], f"{out}#places", names[1]], [f"{out}#moved"], {}, node.name, node.scope)
        self._node(made, set())
        back = (depth - 1, *range(depth - 1), *range(depth, ranks[0]))
        self._node(Node("Transpose", [f"{out}#moved"], [out], {"perm": back}, node.name, node.scope), set())
        return True

    def _gather_own(self, node: Node, inputs: Sequence[str]) -> bool:
        """`x[arange(b), places]`: a look-up by each sample in its own rows.

        The older exporter adds `arange(b) * rows` to the places and looks up in `[(b rows), ...]`, the newer one joins
        `arange(b)` and the places to pairs.
        """
        builder = self.builder
        data, index = builder.tensors.get(inputs[0]), builder.tensors.get(inputs[1])
        if data is None or index is None or data.batch_dim != 0 or index.batch_dim != 0:
            return False
        maker = self._producers().get(inputs[1])
        rows, name = data.shape[0], node.outputs[0]
        if node.kind == "Gather":
            if int(node.attributes.get("axis", 0)) or maker is None or maker.kind != "Add" or len(index.shape) != 1:
                return False
            places = self._other_than_samples(maker, rows)
            if places is None:
                return False
            builder.constant(f"{name}#shape", np.asarray([builder.export_batch, rows, *data.shape[1:]]))
            builder.add("Reshape", [inputs[0], f"{name}#shape"], [f"{name}#rows"], name=node.name, scope=node.scope)
            builder.constant(f"{name}#axis", np.asarray([-1]))
            builder.add("Unsqueeze", [places, f"{name}#axis"], [f"{name}#places"], name=node.name, scope=node.scope)
            source, places = f"{name}#rows", f"{name}#places"
        else:
            if node.attributes.get("batch_dims") or maker is None or maker.kind != "Concat" or len(maker.inputs) != 2:
                return False
            rest = self._other_than_samples(maker, 1)
            if rest is None or rows != 1 or self._resolve(maker.inputs[1]) != rest:
                return False
            source, places = inputs[0], rest
        builder.add(
            "GatherND",
            [source, places],
            [name],
            name=node.name,
            scope=node.scope,
            attributes={"batch_dims": 1},
            opset=node.opset,
        )
        return True

    def _producers(self) -> Mapping[str, Node]:
        if not self._by_output:
            self._by_output = {name: node for node in self.source.nodes for name in node.outputs}
        return self._by_output

    def _other_than_samples(self, maker: Node, rows: int) -> str | None:
        """The operand of a two-operand node whose other one is `arange(b) * rows`."""
        names = [self._resolve(n) for n in maker.inputs]
        for i, name in enumerate(names):
            value = self.builder.values.get(name)
            if value is None or names[1 - i] not in self.builder.tensors:
                continue
            # Where the sum was made, a constant that held all samples was cut to the first.
            if value.size in (1, self.builder.export_batch) and np.array_equal(
                value.reshape(-1), np.arange(value.size) * rows
            ):
                return names[1 - i]
        return None

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


def _unknown_sequence(node: Node) -> ModelError:
    return refuse(
        f"a sequence of tensors is not known at import: {node.kind}",
        node.name or node.outputs[0],
        "Export with tensors only: stack or split them by constant sizes.",
    )


def data_inputs(graph: Graph) -> Iterable[Tensor]:
    """The tensors that a batch fills."""
    return (t for t in graph.tensors.values() if t.role == "input")
