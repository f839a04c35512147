"""GraphBuilder: builds a Graph from tensors and operators that are added one after the other.

It is used by the importer, by rewriting passes and by builders without a file. It keeps the roles of tensors
(parameter, view of parameters, constant), the set of tensors that need a gradient, and the values of small constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ir.errors import ask_for_batch, refuse
from ir.graph import Graph, Operator, Tensor
from ir.operators import (
    KINDS,
    AcrossSamples,
    BakedBatch,
    Built,
    MissingBatch,
    SortedSamples,
    Unsupported,
    Usage,
    Value,
    make_operator,
)
from ir.repairs import MIXED_SAMPLES, SORTED_REPAIR, TWO_SAMPLES, repair_of_unknown

MAX_VALUE_ELEMENTS = 4096
"""Elements of the largest constant whose value is read (assumed); larger ones are operators, or have no value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stated:
    """Statements of a source about an operator besides its kind and operands."""

    shapes: Sequence[tuple[tuple[int, ...], str] | None] = ()
    """Exported shape and dtype of each result of a kind outside the table, where the source has them."""
    costs: Mapping[str, float] = field(default_factory=dict)
    """Costs for one sample: forward_s and backward_s in seconds, flops and bytes of the forward pass."""
    annotations: tuple[tuple[str, int], ...] = ()
    """See `Operator.annotations`."""


_NOTHING = Stated()


@dataclass
class GraphBuilder:
    """Collects the tensors and operators of a graph."""

    export_batch: int = 1
    """Number of samples that constants of the source were written for."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Declared and computed tensors by name."""
    operators: list[Operator] = field(default_factory=list)
    """Operators in the order in which they were added."""
    values: dict[str, Value] = field(default_factory=dict)
    """Known constants by tensor name, at `export_batch` samples; emitted as `Constant` at their first use."""
    warnings: list[str] = field(default_factory=list)
    """Sentences for the user about assumptions and replicated operators."""
    _names: dict[str, int] = field(default_factory=dict)
    _views: set[str] = field(default_factory=set)
    """Parameters, and tensors that depend on parameters only."""
    _gradients: set[str] = field(default_factory=set)
    """Tensors that need a gradient."""
    _sampled: dict[tuple[str, int, int], str] = field(default_factory=dict)
    """(Tensor, dim, size) -> its part for one sample."""
    _made: dict[tuple[Any, ...], Built] = field(default_factory=dict)
    """Cache of `_alike`, by its arguments."""

    def add_tensor(self, tensor: Tensor) -> str:
        """Declares a graph input, parameter, buffer or constant without producer."""
        self.tensors[tensor.name] = tensor
        if tensor.role == "parameter":
            self._views.add(tensor.name)
            if tensor.is_float:
                self._gradients.add(tensor.name)
        return tensor.name

    def input(self, name: str, shape: Sequence[int], dtype: str = "float32", batch_dim: int | None = 0) -> str:
        """Declares a data input with its shape at one sample."""
        return self.add_tensor(Tensor(name=name, shape=tuple(shape), dtype=dtype, role="input", batch_dim=batch_dim))

    def parameter(self, name: str, shape: Sequence[int], dtype: str = "float32") -> str:
        """Declares a trainable tensor."""
        return self.add_tensor(Tensor(name=name, shape=tuple(shape), dtype=dtype, role="parameter"))

    def constant(self, name: str, value: Value) -> str:
        """Declares a small known constant."""
        self.values[name] = value
        return name

    def unique(self, base: str) -> str:
        """A name that is not used yet: `base`, or else `base` followed by `_1`, `_2` ..."""
        name = base
        while name in self._names:
            number = self._names[base]
            self._names[base] = number + 1
            name = f"{base}_{number}"
        self._names[name] = 1
        return name

    def needs_gradient(self, name: str) -> bool:
        """Whether the tensor depends on a float parameter."""
        return name in self._gradients

    def operand(self, name: str) -> Tensor:
        """The tensor or known constant of this name."""
        if name in self.tensors:
            return self.tensors[name]
        value = self.values[name]
        return Tensor(name=name, shape=value.shape, dtype=str(value.dtype), role="constant")

    def _emit_constant(self, name: str) -> None:
        value = self.values[name]
        flat = value.reshape(-1)
        plain: Any = flat.tolist()
        if flat.size and (flat == flat[0]).all():
            plain = plain[0]
        attributes = {"shape": value.shape, "dtype": str(value.dtype), "value": plain}
        usage = Usage(is_constant=True)
        built = make_operator(
            "Constant", name=self.unique(name), inputs=(), outputs=(name,), attributes=attributes, usage=usage
        )
        self._append(built.operator, built.outputs)

    def _append(self, operator: Operator, outputs: Iterable[Tensor]) -> None:
        self.operators.append(operator)
        for tensor in outputs:
            self.tensors[tensor.name] = tensor
        if operator.is_view:
            self._views.update(operator.outputs)
        if not self._gradients.isdisjoint(operator.inputs):
            self._gradients.update([n for n in operator.outputs if self.tensors[n].is_float])

    def _alike(
        self,
        kind: str,
        tensors: Sequence[Tensor | None],
        is_read: tuple[bool, ...],
        attributes: Mapping[str, Any],
        needs_gradient: tuple[bool, ...],
        opset: int,
        usage: Usage,
    ) -> Built:
        """The operator with operands named 0, 1 ... and results named :0, :1 ...; equal operators are computed once."""
        key = (
            kind,
            tuple([None if t is None else (t.shape, t.dtype, t.role, t.batch_dim) for t in tensors]),
            is_read,
            tuple([(k, type(v), v) for k, v in attributes.items()]),
            tuple([None if v is None else (v.shape, v.dtype.str, v.tobytes()) for v in usage.values]),
            needs_gradient,
            opset,
            tuple(usage.stated),
            usage.is_view,
            usage.is_constant,
        )
        built = self._made.get(key)
        if built is None:
            built = self._made[key] = make_operator(
                kind,
                name="",
                inputs=[None if t is None else replace(t, name=str(i)) for i, t in enumerate(tensors)],
                outputs=[f":{i}" if is_wanted else "" for i, is_wanted in enumerate(is_read)],
                attributes=attributes,
                needs_gradient=list(needs_gradient),
                opset=opset,
                usage=usage,
            )
        return built

    def _one_sample(self, name: str, dim: int, size: int) -> str:
        """Name of the first `size` of `dim` of a tensor, which every exported sample holds again."""
        key = (name, dim, size)
        if key in self._sampled:
            return self._sampled[key]
        if name in self.values:
            # A constant that was not emitted yet keeps its name, so that exports at other batch sizes agree.
            value = np.ascontiguousarray(np.take(self.values[name], range(size), axis=dim))
            fresh = name if name not in self.tensors else f"{name}#sample"
            self.values[fresh] = value
        elif self.tensors[name].role == "parameter" and not any(name in op.inputs for op in self.operators):
            # The exporter repeated a parameter for each sample and stored the result.
            shape = tuple(size if d == dim else s for d, s in enumerate(self.tensors[name].shape))
            self.tensors[name] = replace(self.tensors[name], shape=shape)
            fresh = name
        else:
            (fresh,) = self.add(
                "Slice",
                [name],
                [f"{name}#sample"],
                scope="",
                name=f"{name}#sample",
                attributes={"axes": (dim,), "starts": (0,), "ends": (size,), "steps": (1,)},
            )
        self._sampled[key] = fresh
        return fresh

    def _repeated(self, name: str, dim: int) -> str:
        """Name of the tensor repeated over the batch in `dim`."""
        fresh = f"{name}#batch"
        if fresh not in self.tensors:
            shape = self.operand(name).shape
            self.add("Expand", [name], [fresh], name=fresh, attributes={"shape": shape, "batch_dim": dim})
        return fresh

    def add(
        self,
        kind: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        name: str = "",
        scope: str = "",
        attributes: Mapping[str, Any] | None = None,
        opset: int = 0,
        stated: Stated | None = None,
    ) -> tuple[str, ...]:
        """Appends an operator.

        Args:
            kind: ONNX operator type, `domain.Type` outside the standard domain.
            inputs: names of tensors or known constants by ONNX position, "" for an absent one.
            outputs: names of the results, "" for one that nothing reads.
            name: name in the source, used where there is no scope.
            scope: dotted path of the module that the operator belongs to.
            attributes: ONNX attributes.
            opset: version of the operator set.
            stated: what else the source states about it.

        Returns:
            the names of its results.

        Raises:
            ModelError: the table cannot express this use.
        """
        stated = stated or _NOTHING
        base = f"{scope}/{kind}" if scope else name or outputs[0]
        names, like = self._like(base, kind, inputs, outputs, attributes or {}, opset, stated)
        unique = self.unique(base)
        operator, results = _named(like, unique, scope, names, outputs)
        if stated.costs:
            operator = operator.with_costs(stated.costs)
        if stated.annotations:
            operator = replace(operator, annotations=stated.annotations)
        for used in operator.inputs:
            if used not in self.tensors:
                self._emit_constant(used)
        self._append(operator, results)
        if like.is_opaque:
            known = "its batch cannot be traced" if kind in KINDS else "kind is not in the table"
            free = "" if stated.costs or kind in KINDS else "; it has no cost but its bytes: give one in hints.costs"
            self.warnings.append(f"{unique}: {kind} is replicated: {known}{free}")
        elif like.replicated_because:
            self.warnings.append(f"{unique}: {kind} is replicated: {like.replicated_because}")
        return operator.outputs

    def _like(
        self,
        base: str,
        kind: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        attributes: Mapping[str, Any],
        opset: int,
        stated: Stated,
    ) -> tuple[list[str], Built]:
        """The names of the operands, sliced to one sample or repeated as the kind requires, and the operator by
        `_alike`."""
        names, is_read = list(inputs), tuple([bool(n) for n in outputs])
        arranges = (kind in KINDS and KINDS[kind].is_view) or (kind == "Gather" and "indices" in attributes)
        is_random = kind.startswith("Random")
        for _ in range(2 * len(names) + 2):
            tensors = [self.operand(n) if n else None for n in names]
            usage = Usage(
                values=[self.values.get(n) if n else None for n in names],
                export_batch=self.export_batch,
                stated=stated.shapes,
                is_view=arranges
                and any(n in self._views for n in names)
                and all(n in self._views or not n or n in self.values for n in names),
                is_constant=not is_random and {t.role for t in tensors if t is not None} <= {"constant", "buffer"},
            )
            needs = tuple([n in self._gradients for n in names])
            try:
                return names, self._alike(kind, tensors, is_read, attributes, needs, opset, usage)
            except BakedBatch as found:
                names[found.index] = self._one_sample(names[found.index], found.dim, found.size)
            except MissingBatch as found:
                names[found.index] = self._repeated(names[found.index], found.dim)
            except Unsupported as why:
                shapes = ", ".join(str(t.shape) if t else "-" for t in tensors)
                repair = "Export with static shapes and standard operators, or leave this operator out."
                # The question which dim is the batch only helps if the operator could be read without a batch.
                if isinstance(why, SortedSamples):
                    repair = SORTED_REPAIR
                elif isinstance(why, AcrossSamples) or (
                    kind in KINDS and self._is_readable_without_batch(kind, names, is_read, attributes, opset)
                ):
                    repair += f" {self.batch_question}{TWO_SAMPLES if self.export_batch == 1 else ''}"
                    repair += MIXED_SAMPLES if isinstance(why, AcrossSamples) else ""
                if kind not in KINDS:
                    repair = repair_of_unknown(kind, [n for n in outputs if n])
                raise refuse(f"operator {base} ({kind}) cannot be read: {why}", f"{kind}({shapes})", repair) from None
        repair = f"Export the model with a symbolic batch dimension. {self.batch_question}"
        raise refuse(f"the batch of operator {base} ({kind}) cannot be traced", kind, repair)

    @property
    def batch_question(self) -> str:
        """A repair that asks for the batch dim of the first data input whose first dim was assumed to be the batch."""
        given = [t for t in self.tensors.values() if t.role == "input" and t.batch_dim == 0]
        return ask_for_batch(given[0].name if given else "", len(given[0].shape) if given else 0)

    def _is_readable_without_batch(
        self, kind: str, names: Sequence[str], is_read: tuple[bool, ...], attributes: Mapping[str, Any], opset: int
    ) -> bool:
        """Whether the table can express an operator with the sizes of the file if none of its dims is the batch."""
        tensors = [self.operand(n) if n else None for n in names]
        whole = [t and replace(t, shape=t.shape_at(self.export_batch), batch_dim=None) for t in tensors]
        usage = Usage(values=[self.values.get(n) if n else None for n in names])
        try:
            self._alike(kind, whole, is_read, attributes, tuple([False] * len(names)), opset, usage)
        except (Unsupported, BakedBatch, MissingBatch):
            return False
        return True

    def finish(self, outputs: Sequence[str], *, name: str = "", sha256: str = "") -> Graph:
        """The Graph: dead operators dropped, constants first, parameter views before their first consumer."""
        for result in outputs:
            if result not in self.tensors and result in self.values:
                self._emit_constant(result)
        operators = arrange(self.operators, outputs)
        return make_graph(operators, self.tensors, outputs, name=name, warnings=tuple(self.warnings), sha256=sha256)


def _named(
    built: Built, name: str, scope: str, inputs: Sequence[str], outputs: Sequence[str]
) -> tuple[Operator, list[Tensor]]:
    """An operator of `GraphBuilder._alike` with the names of its tensors, and those that it writes."""
    names = {str(i): n for i, n in enumerate(inputs)}
    for i, n in enumerate(outputs):
        names[f":{i}"] = n
    tensors = [
        Tensor(name=names[t.name], shape=t.shape, dtype=t.dtype, role=t.role, batch_dim=t.batch_dim)
        for t in built.outputs
    ]
    return built.operator.renamed(names, name=name, scope=scope), tensors


def make_graph(
    operators: Sequence[Operator], tensors: Mapping[str, Tensor], outputs: Sequence[str], **rest: Any
) -> Graph:
    """A Graph with only the tensors that its operators read or write, in this order.

    Inputs are in the order of `tensors`, which is that of the file, since users pass inputs in this order.

    Args:
        operators: the operators.
        tensors: tensors by name.
        outputs: names of the results.
        rest: other fields of the Graph.
    """
    touched = dict.fromkeys(name for op in operators for names in (op.inputs, op.outputs) for name in names)
    touched |= dict.fromkeys(outputs)
    inputs = iter([name for name, tensor in tensors.items() if tensor.role == "input" and name in touched])
    ordered = (next(inputs) if tensors[name].role == "input" else name for name in touched)
    used = {name: tensors[name] for name in ordered}
    return Graph(operators=tuple(operators), tensors=used, outputs=tuple(outputs), **rest)


def rebuilt(
    graph: Graph,
    operators: Sequence[Operator],
    tensors: Mapping[str, Tensor],
    outputs: Sequence[str] | None = None,
    **changes: Any,
) -> Graph:
    """A graph with other operators, in canonical order.

    Args:
        graph: the graph that was rewritten; its name, warnings and pieces are copied.
        operators: its new operators, each after those whose results it reads.
        tensors: all tensors that they read or write.
        outputs: names of the results, by default those of `graph`.
        changes: other fields of `Graph` that change.
    """
    outputs = graph.outputs if outputs is None else outputs
    made = make_graph(arrange(operators, outputs), tensors, outputs, name=graph.name)
    return replace(graph, operators=made.operators, tensors=made.tensors, outputs=made.outputs, **changes)


def arrange(operators: Sequence[Operator], outputs: Iterable[str]) -> list[Operator]:
    """Canonical order: live operators only, constants first, parameter views directly before their first consumer."""
    producer = {name: i for i, op in enumerate(operators) for name in op.outputs}
    live: set[int] = set()
    stack = [producer[n] for n in outputs if n in producer]
    while stack:
        index = stack.pop()
        if index in live:
            continue
        live.add(index)
        stack.extend(producer[n] for n in operators[index].inputs if n in producer)
    order = [operators[i] for i in sorted(live) if operators[i].is_constant]
    placed: set[int] = set()
    views = {name: i for i in live if operators[i].is_view for name in operators[i].outputs}

    def place(index: int) -> None:
        if index in placed:
            return
        placed.add(index)
        for tensor in operators[index].inputs:
            if tensor in views:
                place(views[tensor])
        order.append(operators[index])

    ordinary = [i for i in sorted(live) if not operators[i].is_constant]
    for index in ordinary:
        if not operators[index].is_view:
            place(index)
    for index in ordinary:
        place(index)
    return order
