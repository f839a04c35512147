"""DeepSpeed: the JSON file that `deepspeed.initialize(config=…)` reads (deepspeed/runtime/config.py).

DeepSpeed's pipelines are made in code and not in JSON. So for a plan with a pipeline, the JSON gets a section
`pipeline`, which DeepSpeed ignores, and the export gets further files: `deepspeed_pipeline.py`, which makes a
`PipelineModule` from this section, and those that it needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from typing import Any

from automap.export import module_paths, training_arguments
from automap.export.configuration import Export, Note, Run
from automap.export.pytorch import LOADER, STAGES, inputs_of

PIPELINE = "deepspeed_pipeline.py"
MAX_NORM = 1.0
"""The norm that gradients are clipped at: DeepSpeed's default since June 2026 (pull request 8068; before, none were
clipped), and `max_grad_norm` of transformers' `TrainingArguments`, which must be equal."""


def write(run: Run) -> Export:
    """The files of a run."""
    degrees, problem = run.degrees, run.problem
    # Without a mesh, DeepSpeed takes all ranks for replicas, and refuses the batch of fewer (`_batch_assertion`).
    batch = {"train_batch_size": problem.training.global_batch} if degrees.tensor == 1 else {}
    document: dict[str, Any] = {
        **batch,
        "train_micro_batch_size_per_gpu": degrees.micro_batch,
        "gradient_accumulation_steps": degrees.accumulation_steps,
        "gradient_clipping": MAX_NORM,
        "bf16": {"enabled": problem.precision == "bf16"},
        "fp16": {"enabled": problem.precision == "fp16"},
        "zero_optimization": {"stage": degrees.zero, "contiguous_gradients": True, "overlap_comm": True},
    }
    if run.gradients_in_4_bytes:
        document["data_types"] = {"grad_accum_dtype": "fp32"}
    if degrees.tensor > 1:
        document["tensor_parallel"] = {"autotp_size": degrees.tensor}
    files, recipe = {}, "deepspeed.initialize(config='deepspeed.json', …)"
    if degrees.pipeline > 1:
        document["pipeline"] = _pipeline(run)
        package = resources.files("automap").joinpath("export")
        files = {name: package.joinpath(name).read_text("utf-8") for name in (PIPELINE, LOADER, STAGES)}
        recipe = "from deepspeed_pipeline import pipeline"
    else:
        again = run.recompute == "full"
        text = training_arguments.write(run, again=again, more={"deepspeed": "deepspeed.json"})
        files = {training_arguments.FILE: text}
    return Export(
        target=run.target.name,
        version=run.target.version,
        files={"deepspeed.json": json.dumps(document, indent=2) + "\n", **files},
        launch=f"{run.torchrun} YOUR_TRAINING.py  # {recipe}",
        notes=tuple(_notes(run)),
    )


def _pipeline(run: Run) -> dict[str, Any]:
    """The section of the stages; `deepspeed_pipeline` reads it.

    Raises:
        PlanError: a stage is not a list of modules.
    """
    return {
        "stages": run.degrees.pipeline,
        "inputs": inputs_of(run),
        "modules": [list(paths) for paths in module_paths.stage_paths(run)],
        "layers": list(module_paths.layer_paths(run)),
        "recompute": list(module_paths.recomputed_paths(run)),
    }


def _notes(run: Run) -> Iterator[Note]:
    yield Note(about="degrees, batch, ZeRO, precision", kept="exact", text="as the plan says")
    if run.degrees.tensor > 1:
        what = "which products are split by columns and which by rows is AutoTP's to find, from the model's class"
        yield Note(about="tensor parallelism", kept="left to you", text=what)
    if run.degrees.pipeline > 1:
        what = f"{PIPELINE} makes them; the forward above the layers asks for no values of tensors"
        yield Note(about="stages", kept="left to you", text=what)
    elif run.recompute == "full":
        what = (
            "recomputation is not part of DeepSpeed's JSON: model.gradient_checkpointing_enable(), or TrainingArguments"
        )
        yield Note(about="recomputation of layers", kept="left to you", text=what)
    what = f"gradients are clipped at a norm of {MAX_NORM}; 0.0 clips nothing (in TrainingArguments: max_grad_norm)"
    yield Note(about="gradient clipping", kept="left to you", text=what)
    yield Note(about="model", kept="left to you", text="the model, the data and the optimizer")
