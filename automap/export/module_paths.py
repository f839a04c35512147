"""A plan in terms of the modules of a network: which are split and how, which are layers, which are in a stage.

Scopes of operators are paths of modules, as in models that were exported from PyTorch. Modules are split as in
`torch.distributed.tensor.parallel`: linear layers by columns or rows, embeddings by rows. Between split modules a
tensor is whole, or each rank has its part. This module does not need torch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from automap.errors import PlanError
from automap.export.configuration import Run, signatures
from ir.blocks import Unit
from ir.cuts import LOSSES
from ir.factors import BROADCAST, PARTIAL, Placement, Signature
from ir.graph import Graph, Operator
from ir.groups import fused_groups

Style = Literal["ColwiseParallel", "RowwiseParallel"]
"""Classes of torch.distributed.tensor.parallel."""

PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose", "DeformConv")
"""Kinds of operators that have nearly all FLOPs of a layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitModule:
    """How one module is split."""

    style: Style
    input_layouts: Literal["Replicate", "Shard"]
    """Whether the module gets a whole tensor, or each rank its part of the last dim."""
    output_layouts: Literal["Replicate", "Shard"]
    pieces: tuple[int, ...] = ()
    """Outputs of each piece of a fused weight, which are split one by one; empty: one piece."""


def tensor_axis(run: Run) -> int | None:
    """The mesh axis that splits weights; None without one.

    Raises:
        PlanError: an axis splits neither weights nor the batch, or several split weights.
    """
    uses = run.degrees.axes
    other = [axis for axis, use in uses.items() if use not in ("data", "tensor")]
    split = [axis for axis, use in uses.items() if use == "tensor"]
    if other or len(split) > 1:
        what = "splits neither weights nor the batch" if other else "is one of several axes that split weights"
        raise _refuse(run, "stages[0].mesh", (other or split)[-1], f"this axis {what}")
    return run.lowered.axes.index(split[0]) if split else None


def split_modules(run: Run) -> Mapping[str, SplitModule]:
    """Path of a module -> how the plan splits it; modules that are not named are whole.

    Raises:
        PlanError: something is split that no module splits.
    """
    axis = tensor_axis(run)
    return {} if axis is None else _Reader(run, axis).read()


def splits_classes(run: Run) -> bool:
    """Whether each rank has the scores of its own classes, so that the loss is computed on these."""
    axis = tensor_axis(run)
    if axis is None:
        return False
    return any(op.kind in LOSSES and placed[axis].divides_work for op, placed in signatures(run))


def layer_paths(run: Run) -> tuple[str, ...]:
    """The modules of the layers in dataflow order, none inside another; empty where layers are not modules.

    Where the repeated units are not modules, as they end inside of modules in BART, layers are the outermost modules
    with a number for a name.
    """
    units = run.evaluator.blocks.units
    times = [unit.type for unit in units]
    graph = run.problem.graph
    paths = [_common(graph, unit.start, unit.stop) for unit in units if times.count(unit.type) > 1]
    if all(paths) and not any(f"{path}.".startswith(f"{other}.") for path, other in itertools.permutations(paths, 2)):
        return tuple(paths)
    if not any(group.kind == "attention" for group in fused_groups(graph)):
        return ()
    around = [_around(op.scope) for op in graph.operators if op.is_live]
    numbered = [next((path for path in paths if path.rpartition(".")[2].isdecimal()), "") for paths in around]
    return tuple(path for path in dict.fromkeys(numbered) if path)


def recomputed_paths(run: Run) -> tuple[str, ...]:
    """The modules that are recomputed in the backward pass.

    A unit that has all products of one layer and no others stands for this layer: in encoders such as BERT, units
    begin with the last norm of the layer before. If a unit has code of several modules otherwise, for instance because
    one of its layers is called elsewhere too, or if a stage ends inside of its layer, these are the largest modules
    that are recomputed wherever they are called.

    Raises:
        PlanError: what is computed again is not a module.
    """
    graph, units = run.problem.graph, run.evaluator.blocks.units
    layers, stages = layer_paths(run), _stages_of_modules(run)
    lists = {other for path in layers for other in _around(path) if other != path}
    cut = {path for path, inside in stages.items() if len(inside) > 1}
    segments = [segment for chunk in run.lowered.chunks for segment in chunk if segment.recomputed.any()]
    again = {index for s in segments for index in range(units[s.unit].start, units[s.unit].stop)}
    live = [(index, op) for index, op in enumerate(graph.operators) if op.is_live]
    called = {op.scope for _, op in live}
    once = {path for index, op in live if index not in again for path in _around(op.scope)}
    found: dict[str, None] = {}
    for unit in (units[segment.unit] for segment in segments):
        whole = _layer_of(graph, unit, layers) or _common(graph, unit.start, unit.stop)
        whole = "" if whole in lists | cut else whole
        for op in graph.operators[unit.start : unit.stop] if not whole else ():
            path = next((path for path in _around(op.scope) if path in called - once - cut), "")
            if not path and graph.keeps_activations(op):
                raise _refuse(run, "stages[0].recompute", op.name, "no module holds these operators")
            found |= {path: None} if path else {}
        found |= {whole: None} if whole else {}
    return tuple(path for path in found if not any(path.startswith(f"{other}.") for other in found))


def _layer_of(graph: Graph, unit: Unit, layers: Collection[str]) -> str:
    """The layer that has the same products as a unit; empty if none has."""
    mine = {op.scope for op in graph.operators[unit.start : unit.stop] if op.kind in PRODUCTS}
    paths = {next((path for path in _around(scope) if path in layers), "") for scope in mine}
    layer = paths.pop() if len(paths) == 1 else ""
    others = (*graph.operators[: unit.start], *graph.operators[unit.stop :])
    return "" if any(op.kind in PRODUCTS and layer in _around(op.scope) for op in others) else layer


def _stages_of_modules(run: Run) -> Mapping[str, set[int]]:
    """Path of a module -> the stages that have its operators."""
    units, operators = run.evaluator.blocks.units, run.problem.graph.operators
    found: dict[str, set[int]] = {}
    for number, chunk in enumerate(run.lowered.chunks):
        for unit in (units[segment.unit] for segment in chunk):
            for op in operators[unit.start : unit.stop]:
                for path in _around(op.scope) if op.is_live else ():
                    found.setdefault(path, set()).add(number)
    return found


def _around(scope: str) -> Iterator[str]:
    """The paths of the modules around code, the largest first."""
    return itertools.accumulate(scope.split("."), "{}.{}".format) if scope else iter(())


def stage_paths(run: Run) -> tuple[tuple[str, ...], ...]:
    """[stages] the modules of each, none inside another of its stage; a layer is one module unless a stage ends in it.

    Modules around layers are in no stage: their own code runs where the tensors are that it reads.

    Raises:
        PlanError: operators are in no module, or a module is in two stages.
    """
    graph, units = run.problem.graph, run.evaluator.blocks.units
    layers, stages = layer_paths(run), _stages_of_modules(run)
    around = {other for path in layers for other in _around(path) if other != path}
    alone = {path for path in layers if len(stages[path]) == 1}
    found, home = [], dict[str, int]()
    for number, chunk in enumerate(run.lowered.chunks):
        paths: dict[str, None] = {}
        for segment in chunk:
            unit = units[segment.unit]
            scopes = [op.scope for op in graph.operators[unit.start : unit.stop] if op.scope and op.scope not in around]
            whole = [next((path for path in _around(scope) if path in alone), scope) for scope in scopes]
            paths |= dict.fromkeys(whole)
        kept = [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]
        for path in kept:
            if home.setdefault(path, number) != number:
                raise _refuse(run, f"stages[{number}].operators", path, "this module is in two stages")
        if not kept:
            first = run.plan.stages[number].operators[0]
            raise _refuse(run, f"stages[{number}].operators", first, "the model names no modules here")
        found.append(tuple(kept))
    return tuple(found)


def _common(graph: Graph, start: int, stop: int) -> str:
    """The innermost module that holds some operators; empty for the model itself."""
    scopes = [op.scope.split(".") for op in graph.operators[start:stop] if op.scope]
    parts = itertools.takewhile(lambda level: len({*level}) == 1, zip(*scopes, strict=False))
    return ".".join(level[0] for level in parts)


def _refuse(run: Run, field: str, value: object, what: str) -> PlanError:
    repair = f"Search with --target {run.target.name}, with a model that was exported from PyTorch."
    return PlanError(f"{run.target.name} cannot express the plan: {what}", field=f"plan.{field}", value=value,
                     repair=repair)  # fmt: skip


class _Reader:
    """Finds how modules are split from the signatures of their operators on one axis, and checks tensors between
    them."""

    def __init__(self, run: Run, axis: int) -> None:
        self.run, self.graph = run, run.problem.graph
        self.ranks = run.degrees.tensor
        self.placed = {op.name: placed[axis] for op, placed in signatures(run)}
        self.operators = [(op, self.placed[op.name]) for op in self.graph.operators if op.name in self.placed]
        self.inputs: dict[str, set[str]] = {}
        self.outputs: dict[str, set[str]] = {}

    def read(self) -> dict[str, SplitModule]:
        """The split modules by path."""
        styles: dict[str, Style] = {}
        for op, signature in self.operators:
            style = None if self._scales(op, signature, styles) else self._style(op, signature)
            if style is not None and styles.setdefault(op.scope, style) != style:
                raise self._finer(op, "parts of one module are split in different ways")
        for name, tensor in self.graph.tensors.items():
            if tensor.role in ("activation", "input"):
                self._follow(name, styles)
        for name in self.graph.tensors:
            self._check_shared(name)
        return {path: self._module(path, style) for path, style in styles.items()}

    def _style(self, op: Operator, signature: Signature) -> Style | None:
        """The style that an operator asks of its module; None if it asks for none."""
        if signature.is_whole or op.is_view:
            return None
        last = len(self.graph.tensors[op.outputs[0]].shape) - 1
        split = [p for n, p in zip(op.inputs, signature.inputs, strict=True) if p >= 0 and self._is_parameter(n)]
        if not split:
            summed = PARTIAL in signature.outputs and not self._adds_bias(op, signature)
            exchanges = signature.factor is not None and op.rule.factors[signature.factor].collective is not None
            if summed or (exchanges and op.kind not in LOSSES):
                raise self._finer(op, "only linear layers and embeddings may be split")
            return None
        if op.kind not in ("MatMul", "Gemm", "Gather", "Add") or not op.scope:
            raise self._finer(op, "only linear layers and embeddings may be split")
        if signature.outputs[0] == last:
            return "ColwiseParallel"
        if signature.outputs[0] == PARTIAL:
            return "RowwiseParallel"
        raise self._finer(op, "is split neither by columns nor by rows")

    def _scales(self, op: Operator, signature: Signature, styles: Mapping[str, Style]) -> bool:
        """Whether an operator scales partial sums before its module adds them up, as Gemma's embedding does."""
        passes = PARTIAL in signature.inputs and PARTIAL in signature.outputs and signature.factor is None
        return passes and styles.get(op.scope) == "RowwiseParallel" and not any(map(self._is_parameter, op.inputs))

    def _adds_bias(self, op: Operator, signature: Signature) -> bool:
        """Whether a bias is added to the sums of a product by rows, which torch adds behind the reduction."""
        return op.kind == "Add" and signature.factor is None and any(self._is_parameter(n) for n in op.inputs)

    def _is_parameter(self, name: str) -> bool:
        maker = self.graph.maker(name)
        if maker is not None and maker.is_view:
            return any(self._is_parameter(operand) for operand in maker.inputs)
        return self.graph.tensors[name].role == "parameter"

    def _check_shared(self, name: str) -> None:
        """Refuses a parameter that modules share and split differently."""
        users = [self.graph.operators[number] for number in self.graph.consumers[name]]
        users = [op for op in users if op.name in self.placed] if self.graph.tensors[name].role == "parameter" else []
        placements = {
            p for op in users for n, p in zip(op.inputs, self.placed[op.name].inputs, strict=True) if n == name
        }
        if len(placements) > 1:
            raise self._finer(users[-1], f"and others split {name} differently")

    def _follow(self, name: str, styles: Mapping[str, Style]) -> None:
        """Records the layouts in which split modules read and return a tensor, and refuses changes elsewhere."""
        maker = self.graph.maker(name)
        held: Placement = BROADCAST
        if maker is not None:
            if maker.name not in self.placed:
                return
            held = self.placed[maker.name].outputs[maker.outputs.index(name)]
        for number in self.graph.consumers[name]:
            op = self.graph.operators[number]
            if op.name not in self.placed or (maker is not None and maker.scope == op.scope and op.scope in styles):
                continue
            given = held
            for operand, wanted in zip(op.inputs, self.placed[op.name].inputs, strict=True):
                if operand != name:
                    continue
                if maker is not None and maker.scope in styles:
                    given = BROADCAST if held == PARTIAL else wanted
                    self.outputs.setdefault(maker.scope, set()).add(_layout(given))
                if op.scope in styles:
                    self.inputs.setdefault(op.scope, set()).add(_layout(given))
                    given = wanted
                if given != wanted:
                    raise self._finer(op, f"gets {name} in another placement than it needs")

    def _module(self, path: str, style: Style) -> SplitModule:
        graph = self.graph
        inputs, outputs = self.inputs.get(path, {"Replicate"}), self.outputs.get(path, {"Replicate"})
        if len(inputs) > 1 or len(outputs) > 1:
            raise _refuse(self.run, "stages[0].shardings", path, "readers of one tensor need unlike placements")
        spans = sorted({span[2:] for span in graph.pieces.values() if span[0] == f"{path}.weight"})
        pieces = tuple(stop - start for start, stop in spans) if style == "ColwiseParallel" and len(spans) > 1 else ()
        if any(size % self.ranks for size in pieces):
            raise _refuse(self.run, "stages[0].shardings", path, f"{self.ranks} ranks do not divide a piece")
        return SplitModule(
            style=style,
            input_layouts="Shard" if "Shard" in inputs else "Replicate",
            output_layouts="Shard" if "Shard" in outputs else "Replicate",
            pieces=pieces,
        )

    def _finer(self, op: Operator, what: str) -> PlanError:
        return _refuse(self.run, f"shardings.{op.name}", self.placed[op.name].text, what)


def _layout(placement: Placement) -> str:
    return "Replicate" if placement == BROADCAST else "Shard"


def as_globs(modules: Mapping[str, SplitModule], graph: Graph) -> dict[str, SplitModule]:
    """The modules with `*` for the numbers in their paths, wherever all modules of such a path have the same split."""
    groups: dict[str, list[str]] = {}
    for path in dict.fromkeys(op.scope for op in graph.operators):
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path), []).append(path)
    found: dict[str, SplitModule] = {}
    for glob, paths in groups.items():
        alike = len({modules.get(path) for path in paths}) == 1 and len(paths) > 1
        names = {glob: paths[0]} if alike else {path: path for path in paths}
        found |= {name: modules[path] for name, path in names.items() if path in modules}
    return found
