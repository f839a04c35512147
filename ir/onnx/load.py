"""Converts ONNX files to graphs: roles of tensors, symbolic dims, constant folding, canonical operators.

The numbers of weights are never read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Unpack

import numpy as np

from ir.alike_order import alike_order
from ir.build import GraphBuilder, Stated
from ir.canonical import canonical
from ir.errors import ModelError, refuse, too_expensive
from ir.experts import recognise_experts
from ir.frozen import freeze
from ir.graph import Graph, Tensor, TensorRole
from ir.loss import with_loss
from ir.onnx.options import ReadOptions
from ir.onnx.read import read_model
from ir.onnx.readers.control_flow import LOOPS, SEQUENCES
from ir.onnx.readers.guard import parse
from ir.onnx.readers.inputs import add_inputs
from ir.onnx.readers.limits import Limits
from ir.onnx.readers.nodes import BAGS, DTYPES, Node, Source, Stored, dtype_name, small_value
from ir.onnx.readers.roles import stored_role, unmarked_roles
from ir.onnx.readers.schemas import check_is_standard, check_num_operands, infer, plain_attributes, with_picked_boxes
from ir.onnx.readers.sequence_first import sequence_first
from ir.onnx.rewrites.constant_folding import fold
from ir.onnx.rewrites.contributed import with_turns
from ir.onnx.rewrites.dispatch_masks import DispatchMasks
from ir.onnx.rewrites.einsum_products import as_product, in_pairs
from ir.onnx.rewrites.embedding_bags import add_bags
from ir.onnx.rewrites.expert_layers import EXPERTS, add_experts
from ir.onnx.rewrites.joined_samples import JoinedSamples
from ir.onnx.rewrites.loops import Loops
from ir.onnx.rewrites.masked_rows import AT_MASKS
from ir.onnx.rewrites.merged_views import MergedViews
from ir.onnx.rewrites.repeated_rows import add_rows
from ir.onnx.rewrites.repeated_samples import expanded_once, of_one_sample, once, shape_once, view_of_one_sample
from ir.onnx.rewrites.reversed_sequences import reverse_sequence
from ir.onnx.rewrites.routed_tokens import ROUTED
from ir.onnx.rewrites.sample_lookups import SampleLookups
from ir.onnx.rewrites.sequences import Sequences
from ir.onnx.rewrites.slice_writes import write_slice
from ir.operators import KINDS, Value
from ir.operators.make import MAX_ELEMENTS
from ir.parameters import split_fused
from ir.repairs import CLASSICAL, CLASSICAL_REPAIR, SIZED_BY_DATA
from ir.stacks import unstacked

SMALL_VALUE = 64
"""Constants of at most this number of elements are always folded; shapes and axes are smaller (assumed)."""
MAX_FOLDED = 1 << 21
"""Largest number of elements of all other folded constants together (assumed); the rest remain operators."""
WHOLE = {BAGS: add_bags, EXPERTS: add_experts, **ROUTED, **AT_MASKS}
"""Kind of a node that stands for several operators -> function that adds these to the builder."""
MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError)
"""Exceptions that a file that violates the ONNX specification may cause anywhere in the import."""


def load_model(data: bytes, *, limits: Limits | None = None, **options: Unpack[ReadOptions]) -> Graph:
    """Reads an ONNX file, with or without weights.

    Args:
        data: bytes of the file.
        limits: bounds on the file.
        options: see `ReadOptions`.

    Raises:
        ModelError: the file or an option is invalid; the error states field, value and repair.
    """
    return read_graph(parse(data, limits), sha256=hashlib.sha256(data).hexdigest(), **options)


def read_graph(model: Any, *, sha256: str = "", **options: Unpack[ReadOptions]) -> Graph:
    """Reads a parsed file that `ir.onnx.readers.guard.parse` has checked; see `load_model`.

    Args:
        model: the parsed file.
        sha256: digest of the file.
        options: see `ReadOptions`.
    """
    try:
        try:
            graph = _graph(read_model(model), options, sha256)
        except ModelError as error:
            graph = _sequence_first(error, model, options, sha256)
    except ModelError as error:
        raise with_picked_boxes(error, model) from None
    except MALFORMED as error:
        # Bytes that parse as protobuf may still violate the ONNX specification anywhere.
        raise refuse("the file is malformed", f"{type(error).__name__}: {error}", "Export the model again.") from error
    except RecursionError:
        repair = "Export without nested functions."
        raise too_expensive("the model is nested too deeply", "functions or views", repair) from None
    loss = options.get("loss")
    return with_loss(graph, loss) if loss is not None else graph


def _graph(source: Source, options: ReadOptions, sha256: str) -> Graph:
    """The graph of a file without the loss that is asked for."""
    graph = _Importer(source, options).run(options.get("name") or source.name, sha256)
    graph = canonical(recognise_experts(graph))
    # Files from PyTorch keep stacked parameters, so that parameters have the same names as in the module.
    graph = graph if source.is_pytorch else unstacked(graph)
    return freeze(alike_order(split_fused(graph)), source.frozen)


def _sequence_first(error: ModelError, model: Any, options: ReadOptions, sha256: str) -> Graph:
    """The graph with second dims of inputs as the batch; raises the error of leading dims if that is not its reason."""
    asks = error.field == "model" and "--batch-dim" in error.repair and not options.get("batch_dims")
    if not (asks and (places := sequence_first(source := read_model(model)))):
        raise error
    try:
        graph = _graph(source, {**options, "batch_dims": places}, sha256)
    except ModelError:
        raise error from None
    found = ", ".join(name for name, place in places.items() if place == 1)
    found += ": dim 1 is the batch, since operators combine what they read along dim 0"
    return replace(graph, warnings=(found, *graph.warnings))


@dataclass
class _Importer:
    """The import of one file: adds its nodes, one after the other, to a graph builder."""

    source: Source
    options: ReadOptions
    builder: GraphBuilder = field(default_factory=GraphBuilder)
    alias: dict[str, str] = field(default_factory=dict)
    """Name in the file -> another name of the same tensor, which the builder knows or which is an alias itself."""
    roles: dict[str, TensorRole] = field(default_factory=dict)
    """Roles of tensors that the exporter did not mark."""
    folded: int = 0
    """Number of elements folded so far in constants of more than `SMALL_VALUE` elements."""

    def __post_init__(self) -> None:
        self.joined = JoinedSamples(self.builder)
        self.merged = MergedViews(self.builder, self.joined)
        self.masks = DispatchMasks(self.builder, self.merged)
        self.sequences = Sequences(self.builder, self.merged, self.alias, self._node)
        self.loops = Loops(self.builder, self.merged, self.alias, self._node, self._declare, self._resolve)
        self.samples = SampleLookups(self.builder, self.source.nodes, self._resolve, self._node)

    def run(self, name: str, sha256: str) -> Graph:
        """The graph of the whole file."""
        self.builder.warnings.extend(self.source.warnings)
        add_inputs(self.builder, self.source, self.options)
        uses = {n for node in self.source.nodes for n in node.inputs} | set(self.source.outputs)
        self._stored(uses)
        for node in self.source.nodes:
            self._node(node, uses)
        self.sequences.check_tensors([self._resolve(n) for n in self.source.outputs], "an output of the model")
        if not self.source.outputs:
            repair = "Declare what the model computes as an output of the graph."
            raise refuse("the graph has no outputs, so nothing of it is needed", "no outputs", repair)
        outputs = [self.merged.make(self._resolve(n)) for n in self.source.outputs]
        missing = [n for n in outputs if n not in self.builder.tensors and n not in self.builder.values]
        if missing:
            raise refuse("an output is computed by nothing", missing[0], "Send the whole graph.")
        graph = self.builder.finish(outputs, name=name, sha256=sha256)
        if not graph.parameters:
            is_classical = any(op.kind.startswith(CLASSICAL) for op in graph)
            by_glob = "Name the graph inputs that are parameters by globs, for instance `--parameters '*weight*'`."
            raise ModelError(
                "no trainable parameter was found",
                field="hints.parameters",
                value=list(self.source.inputs)[:8],
                repair=CLASSICAL_REPAIR if is_classical else by_glob,
            )
        return graph

    def _stored(self, uses: set[str]) -> None:
        """Adds the stored tensors among the names in `uses` to the builder."""
        self.roles = unmarked_roles(self.source)
        self._declare({n: given for n, given in self.source.stored.items() if n in uses})

    def _declare(self, held: Mapping[str, Stored]) -> None:
        """Adds stored tensors to the builder: constants with their values, others as tensors with a role."""
        for name, stored in held.items():
            role = stored_role(name, stored, self.roles, self.options.get("parameters") or ())
            if role == "constant" and stored.value is not None:
                self.builder.constant(name, once(stored.value, self.builder.export_batch))
            else:
                shape = stored.shape
                if role in ("parameter", "constant"):
                    shape = of_one_sample(shape, stored.periods, self.builder.export_batch, role)
                self.builder.add_tensor(Tensor(name=name, shape=shape, dtype=stored.dtype, role=role))

    def _resolve(self, name: str) -> str:
        """The name under which the builder knows a tensor of the file."""
        while name in self.alias:
            name = self.alias[name]
        return name

    # Nodes

    def _node(self, node: Node, uses: set[str]) -> None:
        """Imports one node; `uses` has the names of all tensors that are read."""
        inputs = [self._resolve(n) for n in node.inputs]
        while inputs and not inputs[-1]:
            inputs.pop()
        check_num_operands(node, len(inputs))
        if node.kind == "Einsum" and len(inputs) > 2:
            for product in in_pairs(node):
                self._node(product, uses)
            return
        if node.kind == "FusedMatMul":
            for part in with_turns(node, [len(self._exported_shape(name) or ()) for name in inputs]):
                self._node(part, uses)
            return
        if node.kind == "Einsum" and not self.source.is_pytorch:
            node = as_product(self.builder, node, inputs)
        elif node.kind == "CastLike" and len(inputs) == 2:
            node, inputs = self._as_cast(node, inputs)
        elif node.kind == "Conv" and self.source.is_pytorch and len(inputs) > 2:
            # For a 3-D convolution without bias, the newer exporter writes zeros `[channels, 2]`, an invalid bias.
            inputs = inputs[: 3 - (len(self._exported_shape(inputs[2]) or ()) == 2)]
        if node.kind == "If":
            self._branch(node, inputs[0], uses)
        elif node.kind in WHOLE:
            for name in inputs:
                self.merged.make(name)
            WHOLE[node.kind](self.builder, node, inputs)
        elif node.kind in LOOPS:
            self.loops.add(node, inputs, uses)
        elif node.kind in SEQUENCES:
            self.sequences.add(node, inputs, uses)
        elif not (self._is_elided(node, inputs, uses) or self._is_filled(node, inputs) or self._fold(node, inputs)):
            self.sequences.check_tensors(inputs, f"an operand of {node.name or node.outputs[0]} ({node.kind})")
            attributes = plain_attributes(node)
            if not (self.masks.add(node, inputs, attributes) or self.merged.put_off(node, inputs, attributes)):
                for name in inputs:
                    self.merged.make(name, node.kind)
                self._operator(node, inputs, attributes, uses)

    def _as_cast(self, node: Node, inputs: list[str]) -> tuple[Node, list[str]]:
        """Replaces a CastLike whose target dtype is known by a Cast, which can be folded."""
        held = self.builder.tensors.get(inputs[1]) or self.builder.values.get(inputs[1])
        number = None if held is None else next((n for n, dtype in DTYPES.items() if dtype == str(held.dtype)), None)
        if number is None:
            return node, inputs
        return replace(node, kind="Cast", attributes={"to": number}), inputs[:1]

    def _is_elided(self, node: Node, inputs: Sequence[str], uses: set[str]) -> bool:
        """Registers the result of a node without effect as an alias of its operand; returns whether it is one."""
        if node.kind in ("Identity", "Dropout") and inputs and not self._trains(node, inputs):
            self.alias[node.outputs[0]] = inputs[0]
            if len(node.outputs) > 1 and node.outputs[1] in uses:
                raise refuse("the mask of a Dropout is used", node.outputs[1], "Export in evaluation mode.")
            return True
        if node.kind in ("Squeeze", "Cast") and self._changes_nothing(node, inputs):
            self.alias[node.outputs[0]] = inputs[0]
            return True
        # Expands of float constants over samples are dropped as well; integer constants may be indices or sizes.
        known = self.builder.values.get(inputs[0]) if node.kind == "Expand" and len(inputs) > 1 else None
        return known is not None and known.dtype.kind == "f" and self._elide_repeats(node, inputs)

    def _changes_nothing(self, node: Node, inputs: Sequence[str]) -> bool:
        """Whether a node squeezes dims that are all larger than 1, or casts to the type that its operand has.

        PyTorch's newer exporter writes such a Squeeze, which is invalid in ONNX; jax2onnx ends iterations with a Cast.
        """
        if not self.source.is_pytorch:
            given = self.builder.tensors.get(inputs[0]) if node.kind == "Cast" else None
            return given is not None and given.dtype == DTYPES.get(node.attributes["to"])
        value = self.builder.values.get(inputs[1]) if len(inputs) > 1 else None
        axes = node.attributes.get("axes") if value is None else tuple(int(v) for v in value.reshape(-1))
        shape = self._exported_shape(inputs[0]) if node.kind == "Squeeze" and axes else None
        return shape is not None and all(-len(shape) <= axis < len(shape) and shape[axis] > 1 for axis in axes or ())

    def _is_filled(self, node: Node, inputs: Sequence[str]) -> bool:
        """Adds the parameter that a ConstantOfShape replaces in a file without weights; returns whether it is one."""
        output = node.outputs[0] if node.outputs else ""
        if output not in self.roles or output in self.source.stored:
            return False
        shape = self.builder.values.get(inputs[0]) if inputs else None
        if shape is None:
            return False
        fill = small_value(node.attributes["value"]) if "value" in node.attributes else None
        sizes = tuple(int(v) for v in shape.reshape(-1))
        if prod(sizes) > MAX_ELEMENTS or min(sizes, default=1) < 1:
            return False
        dtype = "float32" if fill is None else str(fill.dtype)
        self.builder.add_tensor(Tensor(name=output, shape=sizes, dtype=dtype, role=self.roles[output]))
        return True

    def _operator(self, node: Node, inputs: list[str], attributes: Mapping[str, Any], uses: set[str]) -> None:
        """Adds the operators of a node, whose operands the builder already has."""
        builder, scope, opset = self.builder, node.scope, node.opset
        if node.kind in ("Expand", "Tile") and len(inputs) > 1 and self._elide_repeats(node, inputs):
            return
        if add_rows(builder, node, inputs, attributes) or write_slice(builder, node, inputs):
            return
        if self.samples.add(node, inputs) or self.joined.add(node, inputs, attributes):
            return
        if reverse_sequence(builder, node, inputs, attributes):
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
            dtype = dtype_name(tensor.data_type)
            shape = shape_once(tensor, builder.export_batch)
            builder.add_tensor(Tensor(name=node.outputs[0], shape=shape, dtype=dtype, role="constant"))
            return
        if node.kind == "Gemm" and len(inputs) > 2 and not {"alpha", "beta"} & set(attributes):
            # With a separate Add for the bias, the contracted dim can be split (see the entry of Gemm).
            product, bias = f"{node.outputs[0]}#product", f"{node.name}#bias" if node.name else ""
            wanted = Stated(annotations=node.annotations)
            builder.add(
                "Gemm", inputs[:2], [product], name=node.name, scope=scope, attributes=attributes, opset=opset,
                stated=wanted,
            )  # fmt: skip
            builder.add("Add", [product, inputs[2]], outputs, name=bias, scope=scope, opset=opset, stated=wanted)
            return
        # Names of nodes contain numbers that depend on details of the export, so only the kind is used.
        label = node.kind if self.source.has_metadata and not scope else node.name
        shapes = self._stated_shapes(node, inputs) if node.kind not in KINDS else ()
        stated = Stated(shapes=shapes, costs=node.costs, annotations=node.annotations)
        builder.add(
            node.kind, inputs, outputs, name=label, scope=scope, attributes=attributes, opset=opset, stated=stated
        )

    def _branch(self, node: Node, condition: str, uses: set[str]) -> None:
        """Imports the branch of an If that its condition, which must be known, selects."""
        value = self.builder.values.get(condition)
        if value is None:
            text = "control flow is not supported: the condition of an If depends on data"
            repair = "Export with one branch only: a training graph is a straight line."
            raise refuse(text, node.name or node.outputs[0], repair)
        branch = node.attributes["then_branch" if bool(value.reshape(-1)[0]) else "else_branch"]
        nodes, stored = branch.read()
        self._declare(stored)
        inner = uses | {n for each in nodes for n in each.inputs} | set(branch.outputs)
        for each in nodes:
            self._node(each, inner)
        for outer, name in zip(node.outputs, branch.outputs, strict=True):
            self.alias[outer] = self._resolve(name)

    def _trains(self, node: Node, inputs: Sequence[str]) -> bool:
        """Whether a Dropout is in training mode; without `training_mode`, it is in inference mode."""
        if node.kind != "Dropout" or len(inputs) < 3:
            return False
        flag = self.builder.values.get(inputs[2])
        return flag is not None and bool(flag.reshape(-1)[0])

    def _fold(self, node: Node, inputs: Sequence[str]) -> bool:
        """Folds a node whose operands are known (for Shape and Size: whose shapes are); returns whether it did."""
        builder = self.builder
        results: Sequence[Value] | None = None
        if node.kind in ("Shape", "Size"):
            shape = self._exported_shape(inputs[0]) if inputs else None
            if shape is not None and node.kind == "Size":
                results = [np.asarray(prod(shape), dtype=np.int64)]
            elif shape is not None:
                part = slice(node.attributes.get("start", 0), node.attributes.get("end"))
                results = [np.asarray(shape[part], dtype=np.int64)]
        elif all(not n or n in builder.values for n in inputs):
            values = [builder.values.get(n) if n else None for n in inputs]
            viewed = view_of_one_sample(node, values, builder.export_batch)
            results = fold(node, values) if viewed is None else [viewed]
        if results is None:
            return False
        large = sum(r.size for r in results if r.size > SMALL_VALUE)
        self.folded += large
        if large and self.folded > MAX_FOLDED:
            return False
        for name, value in zip(node.outputs, results, strict=False):
            if name:
                builder.constant(name, once(value, builder.export_batch) if node.kind == "Constant" else value)
        return True

    def _exported_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor or constant at the exported batch size; None if it is unknown."""
        builder, view = self.builder, self.merged.views.get(name)
        if view is not None:
            return view.shape
        if name in builder.tensors:
            return builder.tensors[name].shape_at(builder.export_batch)
        return builder.values[name].shape if name in builder.values else None

    def _elide_repeats(self, node: Node, inputs: Sequence[str]) -> bool:
        """Drops an Expand or Tile that only repeats its operand for each sample, since consumers broadcast it anyway.

        Files exported at one sample, at several, or with a symbolic batch thus give the same graph.

        Returns:
            whether the node was dropped or simplified.
        """
        builder = self.builder
        target = builder.values.get(inputs[1])
        if target is None or (inputs[0] not in builder.tensors and inputs[0] not in builder.values):
            return False
        tensor = builder.operand(inputs[0])
        sizes = [int(v) for v in target.reshape(-1)]
        shape = tensor.shape_at(builder.export_batch)
        if node.kind == "Tile":
            if len(sizes) != len(shape):
                return False
            sizes = [size * times for size, times in zip(shape, sizes, strict=True)]
        target_once = expanded_once(tensor, sizes, builder.export_batch)
        if target_once == [*shape]:
            self.alias[node.outputs[0]] = inputs[0]
            return True
        if target_once is None or node.kind == "Tile":
            return False
        known = builder.constant(f"{node.outputs[0]}#shape", np.asarray(target_once))
        builder.add("Expand", [inputs[0], known], [node.outputs[0]], name=node.name, scope=node.scope)
        return True

    def _stated_shapes(self, node: Node, inputs: Sequence[str]) -> list[tuple[tuple[int, ...], str] | None]:
        """Exported shapes of the results of an unknown kind: as declared in the file, or inferred by onnx."""
        stated = {**self.source.outputs, **self.source.declared}
        if any(stated.get(name) is None or stated[name].shape is None for name in node.outputs):
            builder = self.builder
            stated |= infer(node, inputs, builder.tensors, builder.values, builder.export_batch)
        dims = self.options.get("dims") or {}
        # A leading dim whose size depends on the data is not the batch.
        leading = 0 if node.kind in SIZED_BY_DATA else self.builder.export_batch
        found: list[tuple[tuple[int, ...], str] | None] = []
        for name in node.outputs:
            declared = stated.get(name)
            shape = [
                size if isinstance(size, int) else dims.get(size, 0 if d else leading)
                for d, size in enumerate((declared and declared.shape) or ())
            ]
            is_known = declared is not None and declared.shape is not None and all(s > 0 for s in shape)
            found.append((tuple(shape), declared.dtype) if declared is not None and is_known else None)
        if None in found:
            check_is_standard(node)
        return found
