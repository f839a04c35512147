"""What a plan asks of each module of a network: its role on the sharding axis, and what is converted at its borders.

A plan places operators, a module trainer places modules. Every operator of the graph is looked up: those of modules
with a known role (linear layers, embeddings, norms) may change placements at the module's borders; all others run as
the user wrote them, on the local parts, which is right only where the plan changes nothing there. A plan that asks for
anything finer is refused by the operator's name. Nothing runs here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from automap.errors import PlanError
from automap.globs import most_specific, select
from automap.plan import Plan, Stage, model_ref, parse_devices
from ir.factors import BROADCAST, PARTIAL, Placement, Signature, placement_text, whole_signature
from ir.graph import Graph, Operator
from ir.linkage import operator_signatures

RoleKind = Literal["column", "row", "vocabulary", "along", "whole"]

INSTEAD = "Run the plan with `automap trial`, whose interpreter executes the graph itself, or search with hints.fix."

LOSS = ""
"""Stands for the loss among paths of modules."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A change of placement at a border of a module: S(i), B or P, numbered as in `ir.factors`."""

    given: Placement
    wanted: Placement
    gradient: Placement
    """In which the gradient of what is wanted arrives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """How one module runs on the sharding axis."""

    kind: RoleKind
    """column: weights split by outputs; row: by inputs; vocabulary: an embedding by its rows; along: weights whole and
    data split along a dim that is no feature; whole: all alike on every rank."""
    enter: Move | None = None
    leave: Move | None = None
    pieces: tuple[int, ...] = ()
    """Outputs of each piece of a fused weight, split one by one; empty = one piece."""


@dataclass(kw_only=True)
class Roles:
    """A plan in terms of modules."""

    axis: str | None = None
    """The axis that splits weights, None where no axis does."""
    axis_size: int = 1
    modules: dict[str, Role] = field(default_factory=dict)
    """Path of a module -> its role; modules that are not named run as they are."""
    summed: set[str] = field(default_factory=set)
    """Whole parameters whose gradients are sums over the sharding axis."""
    splits_classes: bool = False
    """Whether the loss gets its own classes only."""
    stages: dict[str, int] = field(default_factory=dict)
    """Scope -> stage of its operators; the smallest where a scope spans several."""
    ends: dict[str, int] = field(default_factory=dict)
    """Scope -> the largest stage of its operators."""
    recomputed: tuple[str, ...] = ()
    """Paths of modules that run again in the backward pass, none inside another; `LOSS` for the loss, behind whose
    scores nothing is kept."""


def read_roles(plan: Plan, graph: Graph, module: nn.Module) -> Roles:
    """What `plan` asks of the modules of `module`.

    Args:
        plan: of `graph`.
        graph: of the module: scopes of operators are paths of modules, names of parameters those of the module's.
        module: any network with the graph's structure.

    Raises:
        PlanError: plan, graph and module do not belong together, or the plan is finer than modules.
    """
    if plan.model.sha256 != model_ref(graph).sha256:
        raise PlanError(
            f"the plan is for {plan.model.name!r}, not for {graph.name!r}", field="plan.model.sha256",
            value=plan.model.sha256[:12], repair="Give the graph that the plan was made for.",
        )  # fmt: skip
    check_rectangular(plan)
    _check_parameters(graph, module)
    stage = plan.stages[0]
    live = [(name, size) for name, size in stage.mesh if size > 1 and name not in stage.batch_axes]
    if len(live) > 1:
        names = [name for name, _ in live]
        raise _refuse("stages[0].mesh", names, "modules are split over one axis besides the batch axes", INSTEAD)
    roles = Roles()
    if live:
        roles.axis, roles.axis_size = live[0]
    by_operator = list(_staged(plan, graph))
    for op, number in by_operator:
        roles.stages[op.scope] = min(number, roles.stages.get(op.scope, number))
        roles.ends[op.scope] = max(number, roles.ends.get(op.scope, number))
    chosen = {op.name: _signature(plan.stages[n], n, graph, op, roles.axis) for op, n in by_operator}
    if roles.axis is not None:
        _Reader(graph, module, chosen, roles).read()
    roles.recomputed = tuple(_recomputed(graph, plan, by_operator, module))
    return roles


def check_rectangular(plan: Plan) -> None:
    """Refuses plans whose stages are not alike, and what modules cannot do.

    Raises:
        PlanError: names the field.
    """
    first = plan.stages[0]
    for number, stage in enumerate(plan.stages):
        for name in ("mesh", "batch_axes", "batch_shares", "zero"):
            if getattr(stage, name) != getattr(first, name):
                raise _refuse(
                    f"stages[{number}].{name}", getattr(stage, name), "stages are not alike", INSTEAD
                )  # fmt: skip
    pipeline = len({stage.devices for stage in plan.stages}) > 1
    if len(plan.stages) > 1 and not pipeline:
        raise _refuse("stages", len(plan.stages), "all stages are on the same devices", "Make them one stage.")
    if plan.sync.kind != "synchronous":
        raise _refuse("sync.kind", plan.sync.kind, "modules are trained synchronously", "Use synchronous.")
    if plan.schedule.kind not in ("1f1b", "gpipe", "interleaved"):
        kind = plan.schedule.kind
        raise _refuse("schedule.kind", kind, "modules run 1f1b, gpipe and interleaved schedules", INSTEAD)
    foreign = [axis for axis in first.zero.axes if axis not in first.batch_axes and dict(first.mesh).get(axis, 1) > 1]
    if first.zero.stage and foreign:
        raise _refuse("stages[0].zero.axes", foreign, "states of modules are spread over batch axes only", INSTEAD)
    if first.zero.stage > 1 and pipeline and plan.num_micro_batches > 1:
        raise _refuse(
            "stages[0].zero.stage", first.zero.stage,
            "torch's pipeline stages keep gradients and gathered weights whole until the last micro-batch, as ZeRO 1",
            "Use ZeRO 1 or 0. " + INSTEAD,
        )  # fmt: skip
    if plan.training.precision not in ("fp32", "tf32", "bf16"):
        raise _refuse(
            "training.precision", plan.training.precision, "modules train in fp32, tf32 and bf16", "Use bf16."
        )


def devices_of(plan: Plan) -> list[tuple[int, ...]]:
    """Devices of each pipeline rank."""
    return [parse_devices(text) for text in dict.fromkeys(stage.devices for stage in plan.stages)]


def _check_parameters(graph: Graph, module: nn.Module) -> None:
    wanted: dict[str, int] = {}
    ties = tied_names(module)
    for tensor in graph.parameters:
        name = graph.pieces[tensor.name][0] if tensor.name in graph.pieces else tensor.name
        # A file may have any of the names of a shared parameter.
        name = ties.get(name, name)
        wanted[name] = wanted.get(name, 0) + tensor.num_elements
    found = {name: p.numel() for name, p in module.named_parameters()}
    wrong = sorted({name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)})
    if wrong:
        name = wrong[0]
        raise PlanError(
            f"the model of the plan has {wanted.get(name, 'no')} elements there, the module {found.get(name, 'none')}"
            f" ({len(wrong)} parameters differ)",
            field=f"module.{name}", value=found.get(name, 0),
            repair="Give a module of the same structure, with the names of the model that the plan was made for.",
        )  # fmt: skip


def _staged(plan: Plan, graph: Graph) -> Iterator[tuple[Operator, int]]:
    """Operators that belong to a stage, with its number."""
    number = 0
    for op in graph.operators:
        if op.is_view or op.is_constant:
            continue
        if number + 1 < len(plan.stages) and op.name == plan.stages[number + 1].operators[0]:
            number += 1
        yield op, number
    if number + 1 < len(plan.stages):
        name = plan.stages[number + 1].operators[0]
        raise _refuse(f"stages[{number + 1}].operators", name, "begins nowhere in the model", "Correct the name.")


def _signature(stage: Stage, number: int, graph: Graph, op: Operator, axis: str | None) -> Signature | None:
    """What the plan chose for an operator on the sharding axis; None where nothing is split."""
    key = most_specific(stage.shardings, op.name)
    entry = stage.shardings[key] if key is not None else {}
    live = dict(stage.mesh)
    for name in entry:
        if name != axis and live.get(name, 1) > 1:
            path = f"stages[{number}].shardings.{key}"
            raise _refuse(path, name, f"{op.name} does not split its batch over this axis", INSTEAD)
    if axis is None:
        return None
    table = operator_signatures(graph, op)
    if axis not in entry:
        return table[whole_signature(table)]
    texts = entry[axis]
    for signature in table:
        placed = (tuple(map(placement_text, signature.inputs)), tuple(map(placement_text, signature.outputs)))
        if placed == (texts.inputs, texts.outputs):
            return signature
    raise _refuse(
        f"stages[{number}].shardings.{key}.{axis}", f"{list(texts.inputs)} -> {list(texts.outputs)}",
        f"is no signature of {op.name}", "Use one that `automap inspect` lists, or leave the operator out.",
    )  # fmt: skip


def role_of(module: nn.Module) -> Literal["linear", "embedding", "norm"] | None:
    """The known role of a module; `Conv1D` is the linear layer of the transformers library."""
    if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.endswith("RMSNorm"):
        return "norm"
    return None


class _Reader:
    """Follows every tensor of the graph from its producer to its consumers."""

    def __init__(self, graph: Graph, module: nn.Module, chosen: Mapping[str, Signature | None], roles: Roles) -> None:
        self.graph, self.roles = graph, roles
        self.leaves = {path: child for path, child in module.named_modules() if path and role_of(child) is not None}
        self.operators = [(op, s) for op in graph.operators if (s := chosen.get(op.name)) is not None]
        self.by_name = {op.name: s for op, s in self.operators}
        self.ties = tied_names(module)
        self.moves: dict[str, dict[str, Move]] = {}

    def read(self) -> None:
        for op, signature in self.operators:
            self._check_operator(op, signature)
            self._read_parameters(op, signature)
        for name, tensor in self.graph.tensors.items():
            if tensor.role in ("activation", "input"):
                self._follow(name)
        for path, moves in self.moves.items():
            ops = [(op, s) for op, s in self.operators if op.scope == path]
            kind = self._kind(path, ops)
            pieces = self._pieces(path) if kind == "column" else ()
            self.roles.modules[path] = Role(
                kind=kind, enter=moves.get("enter"), leave=moves.get("leave"), pieces=pieces
            )
            leave = moves.get("leave")
            if kind == "row" and leave is not None and leave.wanted >= 0:
                # The bias is added behind the reduce-scatter, to the own part.
                self.roles.summed.add(f"{path}.bias")

    def _leaf(self, op: Operator) -> str | None:
        return op.scope if op.scope in self.leaves else None

    def _is_whole(self, signature: Signature) -> bool:
        return all(p == BROADCAST for p in (*signature.inputs, *signature.outputs))

    def _check_operator(self, op: Operator, signature: Signature) -> None:
        if self._is_whole(signature):
            return
        is_loss = op.outputs[0] == self.graph.outputs[-1]
        factor = None if signature.factor is None else op.rule.factors[signature.factor]
        if is_loss:
            if factor is None or factor.collective is None or signature.inputs[1:] != (BROADCAST,):
                raise self._finer(op, "the loss is whole or split by classes")
            self.roles.splits_classes = True
        elif factor is not None and factor.collective is not None:
            raise self._finer(op, f"exchanges data inside itself ({factor.collective.name})")
        elif self._leaf(op) is None:
            if PARTIAL in (*signature.inputs, *signature.outputs):
                raise self._finer(op, "leaves a sum untaken outside of a linear layer or an embedding")
            for name, gradient in zip(op.inputs, signature.input_gradients, strict=True):
                if gradient == PARTIAL and not self._is_constant(name):
                    raise self._finer(op, f"needs the gradient of {name} summed over ranks, and is no layer of its own")

    def _is_constant(self, name: str) -> bool:
        index = self.graph.producer.get(name)
        tensor = self.graph.tensors[name]
        if index is None:
            return tensor.role in ("constant", "buffer") or not tensor.is_float
        return self.graph.operators[index].is_constant

    def _parameters(self, name: str) -> Iterator[str]:
        """Parameters, as the module names them, that a tensor is a view of."""
        tensor, index = self.graph.tensors[name], self.graph.producer.get(name)
        if tensor.role == "parameter":
            yield self.graph.pieces[name][0] if name in self.graph.pieces else name
        elif index is not None and self.graph.operators[index].is_view:
            for operand in self.graph.operators[index].inputs:
                yield from self._parameters(operand)

    def _read_parameters(self, op: Operator, signature: Signature) -> None:
        for name, placement, gradient in zip(op.inputs, signature.inputs, signature.input_gradients, strict=True):
            for parameter in self._parameters(name):
                if placement == BROADCAST and gradient == PARTIAL:
                    self.roles.summed.add(self.ties.get(parameter, parameter))
                if self._leaf(op) is None and placement != BROADCAST:
                    raise self._finer(op, f"splits {parameter}, and is no linear layer, embedding or norm")

    def _follow(self, name: str) -> None:
        index = self.graph.producer.get(name)
        producer = None if index is None else self.graph.operators[index]
        if producer is not None and (producer.is_view or producer.is_constant):
            return self._check_constant(name)
        uses = [
            (op, self.by_name[op.name].inputs[i], self.by_name[op.name].input_gradients[i])
            for op in map(self.graph.operators.__getitem__, self.graph.consumers[name])
            if op.name in self.by_name
            for i, operand in enumerate(op.inputs)
            if operand == name
        ]
        leaf = None if producer is None else self._leaf(producer)
        held: Placement = BROADCAST
        if producer is not None:
            held = self.by_name[producer.name].outputs[producer.outputs.index(name)]
        inside = [use for use in uses if leaf is not None and use[0].scope == leaf]
        outside = [use for use in uses if use not in inside]
        plain = dict.fromkeys(wanted for op, wanted, _ in outside if self._leaf(op) is None)
        if len(plain) > 1:
            raise self._finer(outside[0][0], f"and others want {name} placed differently")
        if leaf is not None and outside:
            styled = dict.fromkeys(wanted for _, wanted, _ in outside)
            wanted = next(iter(plain or (styled if len(styled) == 1 else ())), BROADCAST if held == PARTIAL else held)
            self._move(producer, "leave", Move(given=held, wanted=wanted, gradient=_dual(wanted)))
            held = wanted
        for op, wanted, gradient in outside:
            path = self._leaf(op)
            if path is not None:
                self._move(op, "enter", Move(given=held, wanted=wanted, gradient=gradient))
            elif wanted != held:
                raise self._finer(op, f"reads {name} as {placement_text(wanted)}, and gets {placement_text(held)}")
        return None

    def _check_constant(self, name: str) -> None:
        for index in self.graph.consumers[name]:
            op = self.graph.operators[index]
            signature = self.by_name.get(op.name)
            if signature is None or any(True for _ in self._parameters(name)):
                continue
            if any(p != BROADCAST for p, n in zip(signature.inputs, op.inputs, strict=True) if n == name):
                raise self._finer(op, f"splits the constant {name}")

    def _move(self, op: Operator | None, side: str, move: Move) -> None:
        assert op is not None
        known = self.moves.setdefault(op.scope, {}).setdefault(side, move)
        if known != move:
            raise self._finer(op, "has operands of unlike placements")

    def _kind(self, path: str, ops: Sequence[tuple[Operator, Signature]]) -> RoleKind:
        if all(self._is_whole(s) for _, s in ops):
            return "whole"
        kinds: set[RoleKind] = set()
        role = role_of(self.leaves[path])
        for op, signature in ops:
            last = len(self.graph.tensors[op.outputs[0]].shape) - 1
            out = signature.outputs[0]
            weights = [
                placement
                for name, placement in zip(op.inputs, signature.inputs, strict=True)
                if any(p.endswith("weight") for p in self._parameters(name))
            ]
            if not weights:
                continue
            if all(w == BROADCAST for w in weights) and 0 <= out < last:
                kinds.add("along")
            elif role != "norm" and out == last:
                kinds.add("column")
            elif role != "norm" and out == PARTIAL:
                kinds.add("vocabulary" if role == "embedding" else "row")
            else:
                kinds.add("whole")
        if len(kinds) != 1 or "whole" in kinds:
            raise self._finer(ops[0][0], "the parts of one module are split in different ways")
        return kinds.pop()

    def _pieces(self, path: str) -> tuple[int, ...]:
        """Outputs of each piece of a fused weight, in the order in which they lie."""
        spans = sorted(
            (start, stop) for source, _, start, stop in self.graph.pieces.values() if source == f"{path}.weight"
        )
        for start, stop in spans:
            if (stop - start) % self.roles.axis_size:
                raise _refuse(path, stop - start, f"{self.roles.axis_size} ranks do not divide a piece", INSTEAD)
        return tuple(stop - start for start, stop in spans) if len(spans) > 1 else ()

    def _finer(self, op: Operator, what: str) -> PlanError:
        path = f"shardings.{op.name}.{self.roles.axis}"
        s = self.by_name[op.name]
        shown = f"{','.join(map(placement_text, s.inputs))} -> {','.join(map(placement_text, s.outputs))}"
        return _refuse(path, shown, f"finer than modules: {op.name} {what}", INSTEAD)


def _dual(placement: Placement) -> Placement:
    """Placement of the gradient of a value that its consumers read so."""
    return placement if placement >= 0 else BROADCAST


def _recomputed(
    graph: Graph, plan: Plan, by_operator: Sequence[tuple[Operator, int]], module: nn.Module
) -> Iterator[str]:
    """The largest modules that run again whole, blocks one by one, and the loss."""
    again: set[str] = set()
    for number, stage in enumerate(plan.stages):
        names = [op.name for op, n in by_operator if n == number]
        for glob in stage.recompute:
            again.update(select(glob, names))
    # What keeps nothing for its backward pass but data need not run again.
    left = {
        op.name
        for op, _ in by_operator
        if op.name in again and any(graph.tensors[t].role == "activation" for t in op.saved)
    }
    inside: dict[str, list[str]] = {}
    for op, _ in by_operator:
        parts = op.scope.split(".") if op.scope else []
        for depth in range(1, len(parts) + 1):
            inside.setdefault(".".join(parts[:depth]), []).append(op.name)
    units = unit_paths(module)
    paths = [
        path
        for path, _ in module.named_modules()
        if path in inside and not any(unit.startswith(f"{path}.") for unit in units)
    ]
    for path in sorted(paths, key=lambda path: path.count(".")):
        if again.issuperset(inside[path]) and not left.isdisjoint(inside[path]):
            left.difference_update(inside[path])
            yield path
    loss = next(op.name for op, _ in reversed(by_operator) if graph.outputs[-1] in op.outputs)
    if loss in left:
        left.discard(loss)
        yield LOSS
    if left:
        raise _refuse("stages.recompute", min(left), "is finer than a module", f"Recompute whole modules. {INSTEAD}")


def tied_names(module: nn.Module) -> dict[str, str]:
    """Names of shared parameters -> the first name of each."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            found[name] = first[id(parameter)]
    return found


def unit_paths(module: nn.Module) -> list[str]:
    """The repeated blocks of a network: children of lists, none inside another."""
    found: list[str] = []
    for path, child in module.named_modules():
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            for name, block in child.named_children():
                inner = f"{path}.{name}" if path else name
                if not any(inner.startswith(f"{p}.") for p in found) and any(True for _ in block.parameters()):
                    found.append(inner)
    return found


def _refuse(field_name: str, value: object, message: str, repair: str) -> PlanError:
    return PlanError(message, field=f"plan.{field_name}", value=value, repair=repair)
