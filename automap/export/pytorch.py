"""Plain PyTorch: pytorch.json, the order of the pipeline as schedule.csv, and the loader that applies them.

The loader (`plan_loader`) needs torch alone. The CSV file is that of `torch.distributed.pipelining`: a line a rank, in
the words of `automap.schedule`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from importlib import resources
from typing import Any

from automap.errors import PlanError
from automap.export import module_paths
from automap.export.configuration import Export, Note, Run
from automap.schedule import write_order

LOADER, STAGES = "plan_loader.py", "plan_stages.py"
SCHEMA = "automap.pytorch/1"


def write(run: Run) -> Export:
    """The files of a run.

    Raises:
        PlanError: something is split, cut or computed again that is not a module.
    """
    is_piped = run.degrees.pipeline > 1
    files = {"pytorch.json": json.dumps(_document(run), indent=1) + "\n"}
    if is_piped:
        files["schedule.csv"] = "".join(",".join(row) + "\n" for row in _order(run))
    package = resources.files("automap").joinpath("export")
    names = (LOADER, STAGES) if is_piped else (LOADER,)
    files |= {name: package.joinpath(name).read_text("utf-8") for name in names}
    return Export(
        target=run.target.name,
        version=run.target.version,
        files=files,
        launch=f"{run.torchrun} YOUR_TRAINING.py  # from plan_loader import Training",
        notes=tuple(_notes(run)),
    )


def _document(run: Run) -> dict[str, Any]:
    degrees, graph = run.degrees, run.problem.graph
    split, has_split_scores = module_paths.split_modules(run), module_paths.splits_classes(run)
    names, shape = _mesh(run)
    # The loss takes the scores as a distributed tensor.
    maker = graph.maker(graph.operators[-1].inputs[0]) if has_split_scores else None
    while maker is not None and maker.scope not in split:
        maker = graph.maker(maker.inputs[0])
    styles = {
        path: {**asdict(module), "use_local_output": maker is None or maker.scope != path}
        for path, module in module_paths.as_globs(split, graph).items()
    }
    return {
        "schema": SCHEMA,
        "about": f"Written by AutoMAP for {run.target.version}: model {run.plan.model.name}, {run.devices} devices.",
        "mesh": {"dim_names": names, "shape": shape},
        "inputs": inputs_of(run),
        "global_batch": run.problem.training.global_batch,
        "micro_batch": degrees.micro_batch,
        "num_micro_batches": degrees.accumulation_steps,
        "precision": run.problem.precision,
        "optimizer": run.problem.training.optimizer,
        "zero": degrees.zero,
        "layers": list(module_paths.layer_paths(run)),
        "recompute": list(module_paths.recomputed_paths(run)),
        "tensor_parallel": styles,
        "loss_parallel": has_split_scores,
        "schedule": run.plan.schedule.kind,
        "stages": [list(paths) for paths in module_paths.stage_paths(run)] if degrees.pipeline > 1 else [[]],
    }


def inputs_of(run: Run) -> list[dict[str, Any]]:
    """Name, shape and dtype of each input of the model, for one micro-batch of a replica."""
    found = run.problem.graph.data_inputs
    samples = run.degrees.micro_batch
    return [{"name": x.argument, "shape": list(x.shape_at(samples)), "dtype": x.dtype} for x in found]


def _mesh(run: Run) -> tuple[list[str], list[int]]:
    """Names and sizes of the dims of the device mesh, in the order of the plan's axes.

    Raises:
        PlanError: the axes that split the batch are not side by side, or replicas inside shards.
    """
    zero = [name for name, on in zip(run.lowered.axes, run.lowered.zero_axes.tolist(), strict=True) if on]
    found: dict[str, int] = {}
    last = ""
    for name, size in run.plan.stages[0].mesh:
        use = run.degrees.axes.get(name)
        dim = "tensor" if use == "tensor" else "shard" if run.degrees.zero and name in zero else "replicate"
        if use is not None and size > 1:
            if dim in found and dim != last:
                what = f"axes of its {dim} dim are not side by side"
                repair = f"Search with --target {run.target.name}."
                raise PlanError(what, field="plan.stages[0].mesh", value=name, repair=repair)
            found[dim] = found.get(dim, 1) * size
            last = dim
    data = [dim for dim in found if dim != "tensor"]
    if data == ["shard", "replicate"]:
        what = "replicas are inside shards"
        repair = f"Search with --target {run.target.name}."
        raise PlanError(what, field="plan.stages[0].zero.axes", value=zero, repair=repair)
    names = ["replicate", "shard"]
    # FSDP2 takes both dims together, wherever one of them is.
    names = ["tensor", *names] if [*found][:1] == ["tensor"] else [*names, "tensor"]
    return ["pipe", *names], [run.degrees.pipeline, *(found.get(dim, 1) for dim in names)]


def _order(run: Run) -> tuple[tuple[str, ...], ...]:
    plan, degrees = run.plan, run.degrees
    number = degrees.pipeline * degrees.virtual_stages
    return plan.schedule.order or write_order(plan.schedule.kind, degrees.pipeline, number, plan.num_micro_batches)


def _notes(run: Run) -> Iterator[Note]:
    degrees = run.degrees
    about = "degrees, stages, order, batch, ZeRO, recomputation, precision, split modules"
    yield Note(about=about, kept="exact", text="as the plan says")
    if degrees.tensor > 1:
        what = "code inside of split layers counts heads by -1 or by their size: a rank has only some of them"
        yield Note(about="split attention", kept="left to you", text=what)
    if degrees.pipeline > 1:
        what = "the forward above the layers asks for no values of tensors, and gets inputs of the shapes of the plan"
        yield Note(about="stages", kept="left to you", text=what)
    optimizer = f"the optimizer{run.other_optimizer}"
    what = f"the model, the data, {optimizer}, and a loss that is a mean over samples of equal weight"
    yield Note(about="model", kept="left to you", text=what)
