"""Hugging Face `transformers.TrainingArguments`: the keyword arguments that a plan decides, as JSON.

    TrainingArguments(output_dir="…", **json.loads(Path("training_arguments.json").read_text()))

Names: transformers/training_args.py at 5.23; those of 4.x too, but for `fsdp`, which was a text there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from automap.documents import read_document
from automap.errors import PlanError
from automap.export.configuration import Run
from automap.export.stated import Stated, refuse, sgd_kind, whole

FILE = "training_arguments.json"
MOMENTUM = 0.9
"""Factor that is written for SGD with momentum, which transformers calls without any (Megatron-LM's default)."""


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
        **({"optim_args": f"momentum={MOMENTUM}"} if run.problem.training.optimizer == "momentum" else {}),
        "gradient_checkpointing": again,
        # Every step has the global batch of the plan.
        "dataloader_drop_last": True,
    }
    if again:
        arguments["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    return json.dumps(arguments | more, indent=2) + "\n"


def complete(found: Stated, name: str, text: str) -> None:
    """Adds the settings that DeepSpeed's JSON and accelerate's YAML leave to `TrainingArguments` in the same folder.

    These are the batch of a rank, the accumulation, the kind of optimizer, and whether layers are recomputed. Arguments
    that name another file of DeepSpeed do not belong to this configuration, and are not read; nor are those beside a
    pipeline of DeepSpeed.

    Args:
        found: the configuration.
        name: the name of its file.
        text: the text of the file of arguments.

    Raises:
        PlanError: the arguments cannot be read, or contradict the configuration.
    """
    document = read_document(text, field="from", error=PlanError)
    if not isinstance(document, dict) or "pp" in found.degrees:
        return
    if document.get("deepspeed") != (name if found.target == "deepspeed" else None):
        return
    micro, steps = (_number(document, key) for key in ("per_device_train_batch_size", "gradient_accumulation_steps"))
    if micro is not None:
        _agree("per_device_train_batch_size", micro, found.degrees.setdefault("micro_batch", micro), name)
    if micro is not None and steps is not None and "global_batch" not in found.training:
        found.accumulated = found.accumulated or micro * steps
        _agree("gradient_accumulation_steps", steps, found.accumulated / micro, name)
    if micro is not None and steps is not None and "dp" in found.degrees:
        batch = micro * steps * found.degrees["dp"]
        _agree(
            "gradient_accumulation_steps", steps, found.training.setdefault("global_batch", batch) / batch * steps, name
        )
    if document.get("gradient_checkpointing") is True:
        found.degrees["recompute"] = "full"
    kind = _optimizer(document)
    if kind is not None:
        found.training.setdefault("optimizer", kind)
    found.beside = FILE


def _optimizer(document: Mapping[str, Any]) -> str | None:
    """The kind of optimizer; None where another one than Adam and SGD is named, or none."""
    name = str(document.get("optim", ""))
    if name == "sgd":
        words = dict(word.strip().partition("=")[::2] for word in str(document.get("optim_args") or "").split(","))
        return sgd_kind(f"{FILE}.optim_args", words.get("momentum", 0))
    return "adam" if name.startswith("adamw") else None


def _number(document: Mapping[str, Any], key: str) -> int | None:
    return whole(f"{FILE}.{key}", document[key]) if key in document else None


def _agree(key: str, value: float, said: float, name: str) -> None:
    if value != said:
        repair = f"Make it {said:g}, or take {FILE} away."
        raise refuse(f"{FILE}.{key}", value, f"contradicts {name}", repair)
