"""DeepSpeed: the JSON file that `deepspeed.initialize(config=…)` reads (deepspeed/runtime/config.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from automap.export import training_arguments
from automap.export.configuration import Export, Note, Run


def write(run: Run) -> Export:
    """The files of a run."""
    degrees, problem = run.degrees, run.problem
    document: dict[str, Any] = {
        "train_batch_size": problem.training.global_batch,
        "train_micro_batch_size_per_gpu": degrees.micro_batch,
        "gradient_accumulation_steps": degrees.accumulation_steps,
        "bf16": {"enabled": problem.precision == "bf16"},
        "fp16": {"enabled": problem.precision == "fp16"},
        "zero_optimization": {"stage": degrees.zero, "contiguous_gradients": True, "overlap_comm": True},
    }
    if run.gradients_in_4_bytes:
        document["data_types"] = {"grad_accum_dtype": "fp32"}
    if degrees.tensor > 1:
        document["tensor_parallel"] = {"autotp_size": degrees.tensor}
    return Export(
        target=run.target.name,
        version=run.target.version,
        files={
            "deepspeed.json": json.dumps(document, indent=2) + "\n",
            training_arguments.FILE: training_arguments.write(
                run, again=run.recompute == "full", more={"deepspeed": "deepspeed.json"}
            ),
        },
        launch=f"{run.torchrun} YOUR_TRAINING.py  # deepspeed.initialize(config='deepspeed.json', …)",
        notes=tuple(_notes(run)),
    )


def _notes(run: Run) -> Iterator[Note]:
    yield Note(about="degrees, batch, ZeRO, precision", kept="exact", text="as the plan says")
    if run.degrees.tensor > 1:
        what = "which products are split by columns and which by rows is AutoTP's to find, from the model's class"
        yield Note(about="tensor parallelism", kept="left to you", text=what)
    if run.recompute == "full":
        what = (
            "recomputation is no part of DeepSpeed's JSON: model.gradient_checkpointing_enable(), or TrainingArguments"
        )
        yield Note(about="recomputation of layers", kept="left to you", text=what)
    yield Note(about="model", kept="left to you", text="the model, the data and the optimizer")
