"""Hugging Face `transformers.TrainingArguments`: the keyword arguments that a plan decides, as JSON.

    TrainingArguments(output_dir="…", **json.loads(Path("training_arguments.json").read_text()))

Names: transformers/training_args.py at 5.23; those of 4.x too, but for `fsdp`, which was a text there.
"""

from __future__ import annotations

import json
from typing import Any

from automap.export.configuration import Run

FILE = "training_arguments.json"


def write(run: Run, *, again: bool, more: dict[str, Any]) -> str:
    """The text of the file.

    Args:
        again: whether the model computes its layers again; FSDP can do so itself.
        more: arguments of the trainer below, such as FSDP.
    """
    degrees = run.degrees
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": degrees.micro_batch,
        "gradient_accumulation_steps": degrees.accumulation_steps,
        "bf16": run.problem.precision == "bf16",
        "fp16": run.problem.precision == "fp16",
        "optim": "adamw_torch" if run.problem.training.optimizer == "adam" else "sgd",
        "gradient_checkpointing": again,
        # Every step has the global batch of the plan.
        "dataloader_drop_last": True,
    }
    if again:
        arguments["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    return json.dumps(arguments | more, indent=2) + "\n"
