"""ONNX: shards of weights and inputs and the pipeline stages of nodes, and a script that writes them into a model.

The model of a plan has its operators renamed, fused and split; its weights and inputs have the names of the file. So
these are annotated, and nodes get their stages from them (`annotate_model`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

import numpy as np

from automap.errors import PlanError
from automap.export.configuration import Export, Note, Run, read_run, staged_signatures
from automap.export.stated import section
from automap.plan import Plan, parse_devices
from automap.problem import Problem
from automap.targets import find_target
from ir.cuts import LOSSES
from ir.factors import Placement

SCRIPT, FILE = "annotate_model.py", "onnx_devices.json"
SCHEMA = "automap.onnx/1"
EXPORT = "Change the plan, and export it again."


def write(run: Run) -> Export:
    """The files of a run."""
    tensors, unstated = _tensors(run)
    text = json.dumps(_document(run, tensors), indent=1)
    return Export(
        target=run.target.name,
        version=run.target.version,
        files={
            FILE: text + "\n",
            SCRIPT: resources.files("automap").joinpath("export", SCRIPT).read_text("utf-8"),
        },
        launch=f"python {SCRIPT} MODEL.onnx ANNOTATED.onnx",
        notes=tuple(_notes(unstated)),
    )


def _document(run: Run, tensors: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    plan = run.plan
    return {
        "schema": SCHEMA,
        "about": f"Written by AutoMAP for {run.target.version}: model {plan.model.name}, {run.devices} devices.",
        "configuration": {"name": "automap", "num_devices": run.problem.cluster.num_devices},
        "metadata": _metadata(run),
        "tensors": tensors,
        # With the shards between operators, which ONNX has no place for: what `estimate --from` reads.
        "plan": replace(plan, estimate=None, search=None, measured=None, why=(), warnings=()).to_json(),
    }


def _metadata(run: Run) -> dict[str, str]:
    """What ONNX has no field for."""
    plan, degrees = run.plan, run.degrees
    settings = {
        "schedule": plan.schedule.kind,
        "num_micro_batches": plan.num_micro_batches,
        "samples_per_micro_batch": plan.samples_per_micro_batch,
        "zero": degrees.zero,
        "recompute": run.recompute,
        "precision": run.problem.precision,
        "model_sha256": plan.model.sha256,
    }
    return {f"automap.{name}": str(value) for name, value in settings.items()}


def planned(document: Mapping[str, Any], problem: Problem) -> Plan:
    """The plan of an exported file, on the cluster of a problem and under its training.

    Raises:
        PlanError: it is no such file, or what it says of weights, stages and devices is not what its plan does.
    """
    path = f"from.{FILE}"
    if not isinstance(document.get("plan"), Mapping):
        raise PlanError("has no plan", field="from.plan", value=document.get("plan"), repair=EXPORT)
    plan = Plan.from_json(document["plan"])
    own, number = problem.cluster.num_devices, section(document, "configuration").get("num_devices")
    if number != own:
        repair = f"Give a cluster of {number} devices, or search on this one."
        raise PlanError(f"{path} is for {number} devices", field="cluster", value=f"{own} devices", repair=repair)
    plan = replace(plan, cluster=problem.cluster.to_json(), training=problem.training)
    target = find_target("onnx")
    assert target is not None
    run = read_run(plan, problem, target)
    for part, own_values in (("tensors", _tensors(run)[0]), ("metadata", _metadata(run))):
        said = section(document, part)
        for name in dict.fromkeys([*own_values, *said]):
            if said.get(name) != own_values.get(name):
                what = "is not what the plan in the file says"
                raise PlanError(what, field=f"from.{part}.{name}", value=said.get(name), repair=EXPORT)
    return plan


def _tensors(run: Run) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """Weight or input -> what each operator that reads it does with it; and weights that no spec can describe."""
    graph = run.problem.graph
    pieces: dict[str, list[int]] = {}
    for name, (fused, _, start, stop) in graph.pieces.items():
        if name in graph.tensors:
            pieces.setdefault(fused, []).append(stop - start)
    # Experts that are weights of their own in the file are one tensor in the plan.
    stacked = {whole for name, (whole, *_) in graph.pieces.items() if name not in graph.tensors}
    found: dict[str, list[dict[str, Any]]] = {}
    unstated = {*stacked}
    for stage, op, placed in staged_signatures(run):
        for slot, name in enumerate(op.inputs):
            # The file may be without the loss and its labels.
            if graph.tensors[name].role not in ("parameter", "input") or op.kind in LOSSES:
                continue
            fused, dim, start, _ = graph.pieces.get(name, (name, -1, 0, 0))
            if fused in unstated or len({*pieces.get(fused, [])}) > 1:
                unstated.add(fused)
            elif start == 0:
                placements = [signature.inputs[slot] for signature in placed]
                use = _use(run, stage, name, placements, (dim, len(pieces.get(fused, [0]))))
                found.setdefault(fused, []).append(use)
    return found, sorted(unstated)


def _use(run: Run, stage: int, name: str, placements: Sequence[Placement], fused: tuple[int, int]) -> dict[str, Any]:
    """How one operator reads a tensor.

    Args:
        placements: [axes of the plan].
        fused: the dim along which pieces are fused in the file, and their number.
    """
    tensor, whole = run.problem.graph.tensors[name], run.plan.stages[stage]
    mesh = [(axis, size) for axis, size in whole.mesh if size > 1]
    on = {axis: placements[run.lowered.axes.index(axis)] for axis, _ in mesh}
    devices = np.array(parse_devices(whole.devices)).reshape([size for _, size in mesh])
    dims = sorted({dim for dim in on.values() if dim >= 0})
    # Axes that split a dim come first, in the order of the dims; the others hold copies.
    order = [number for dim in dims for number, (axis, _) in enumerate(mesh) if on[axis] == dim]
    copies = [number for number in range(len(mesh)) if number not in order]
    counts = [math.prod(size for axis, size in mesh if on[axis] == dim) for dim in dims]
    shards = devices.transpose([*order, *copies]).reshape(math.prod(counts), -1)
    described = []
    for dim, count in zip(dims, counts, strict=True):
        part: dict[str, Any] = {"num_shards": count}
        if dim != tensor.batch_dim:
            part["dim_value"] = tensor.shape[dim]
        parts = [{"num_shards": 1, "dim_value": fused[1]}, part] if dim == fused[0] and fused[1] > 1 else [part]
        described.append({"axis": dim, "parts": parts})
    return {"stage": stage, "dims": described, "shards": shards.tolist()}


def _notes(unstated: Sequence[str]) -> Iterator[Note]:
    yield Note(about="shards of weights and inputs, stages, devices", kept="exact", text="as the plan says")
    what = "shards between operators follow from those of the weights; ONNX leaves them to the runtime"
    yield Note(about="shards of other tensors", kept="left to you", text=what)
    what = "no field of ONNX: written as metadata of the model (automap.*)"
    yield Note(about="micro-batches, schedule, ZeRO, recomputation", kept="left to you", text=what)
    if unstated:
        what = f"{len(unstated)} weights are stored otherwise than they are split, {unstated[0]} first"
        yield Note(about="weights without shards", kept="left to you", text=what)
