"""A plan as the files of a target, in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from automap.errors import PlanError, ProblemError, one_of
from automap.export import accelerate, deepspeed, megatron, onnx_devices, own_trainer, pytorch, torchtitan
from automap.export.configuration import Export, Note, Run, each_host, read_run
from automap.export.decoder import distance_tables
from automap.export.rounding import rounded
from automap.plan import Plan
from automap.problem import Problem
from automap.records import to_json
from automap.space.target_limits import check_model
from automap.targets import find_target
from ir.layers import layer_spans

WRITERS: Mapping[str, Callable[[Run], Export]] = {
    "megatron-core": megatron.write,
    "torchtitan": torchtitan.write,
    "deepspeed": deepspeed.write,
    "accelerate": accelerate.write,
    "pytorch": pytorch.write,
    "onnx": onnx_devices.write,
    "automap": own_trainer.write,
}
"""Target -> what writes its files."""
REPORT = "export.json"
"""File with the report on what an export kept."""


def export(plan: Plan, problem: Problem, name: str) -> Export:
    """The files of a plan for a target.

    Args:
        problem: the problem of the plan, on its own cluster and under its own training.
        name: a key of `WRITERS`.

    Raises:
        ProblemError: there is no such target, or it trains other models.
        PlanError: the target has no files, or cannot express the plan.
    """
    target = find_target(name) if name in WRITERS else None
    if target is None:
        raise ProblemError("unknown target", field="target", value=name, repair=one_of(WRITERS, name))
    check_model(problem.graph, target, field="target")
    if problem.precision not in target.precisions:
        able = [p for p in target.precisions if all(p in kind.peak_TFLOPs for kind in problem.cluster.devices.values())]
        raise PlanError(
            f"{name} cannot train in {problem.precision}",
            field="plan.training.precision",
            value=problem.precision,
            repair=f"Search with --target {name} and --precision {' or '.join(able)}."
            if able
            else f"The devices have none of its precisions, {', '.join(target.precisions)}: export for another target.",
        )
    run = read_run(plan, problem, target)
    found = WRITERS[name](run)
    notes = (*found.notes, *_frozen(run), *_shared(run), *_hosts(run), *_unequal(run), *rounded(run))
    report = {
        "schema": "automap.export/1",
        "target": name,
        "version": found.version,
        "model": to_json(plan.model),
        "launch": found.launch,
        "notes": [to_json(note) for note in notes],
    }
    return Export(
        target=name,
        version=found.version,
        files={**found.files, REPORT: json.dumps(report, indent=1) + "\n"},
        launch=found.launch,
        notes=notes,
    )


def _frozen(run: Run) -> Iterator[Note]:
    """What is left to do where the plan counts on parameters that are not trained."""
    graph = run.problem.graph
    if graph.has_frozen:
        frozen = graph.num_parameters - graph.num_trained
        text = f"{frozen:,} of {graph.num_parameters:,} parameters are frozen: call requires_grad_(False) on them first"
        yield Note(about="frozen parameters", kept="left to you", text=text)


def _shared(run: Run) -> Iterator[Note]:
    """What trainers that build the layers themselves do not do: layers with the weights of others, as in ALBERT.

    Tables of relative positions are not weights of layers: trainers that have them keep one for all layers of a stack.
    """
    if not run.target.transformers:
        return
    graph, blocks = run.problem.graph, run.evaluator.blocks
    seen, sharing, tables = set[str](), 0, distance_tables(graph, run.shape.heads)
    spans = layer_spans(graph, blocks)
    for span in spans:
        operators = graph.operators[blocks.units[span[0]].start : blocks.units[span[-1]].stop]
        read = {graph.viewed(name) for op in operators for name in op.inputs}
        read = {name for name in read - tables if graph.tensors[name].role == "parameter"}
        sharing += not seen.isdisjoint(read)
        seen |= read
    if sharing:
        text = (
            f"{sharing} of {len(spans)} layers read weights of layers before them, and {run.target.name} gives each "
            "layer its own: share them in its code, or take the target pytorch or automap"
        )
        yield Note(about="layers that share weights", kept="left to you", text=text)


def _hosts(run: Run) -> Iterator[Note]:
    """What several hosts ask for."""
    if len(run.processes) > 1 and run.target.name != "onnx":
        text = each_host(run)
        yield Note(about="hosts", kept="left to you", text=text[0].lower() + text[1:])


def _unequal(run: Run) -> Iterator[Note]:
    """What hosts with unequal numbers of processes ask for."""
    counts = run.processes
    if len({*counts}) == 1 or run.target.name == "onnx":
        return
    each = ", ".join(map(str, counts))
    text = f"the hosts start unequal numbers of processes: {each}, in the order of the cluster"
    if run.target.name == "accelerate":
        text += "; accelerate launch starts equal ones: use torchrun, and give `Accelerator` these settings in code"
    yield Note(about="processes", kept="left to you", text=text)


def save(found: Export, folder: Path) -> None:
    """Writes all files of an export, each of them whole or not at all.

    Raises:
        PlanError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in found.files.items():
            part = folder / f".{name}.part"
            part.write_text(text, "utf-8")
        for name in found.files:
            (folder / f".{name}.part").replace(folder / name)
    except OSError as fault:
        raise PlanError(
            f"cannot be written ({fault.strerror})", field="output", value=str(folder), repair="Name another folder."
        ) from None
