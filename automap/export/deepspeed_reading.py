"""DeepSpeed's JSON read as a stated strategy.

Keys: deepspeed/runtime/config.py and zero/config.py at 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from automap.documents import read_document
from automap.errors import PlanError
from automap.export.stated import (
    Stated,
    check_choice,
    check_names,
    check_shards,
    layers_of_stages,
    recomputes,
    refuse,
    section,
    sgd_kind,
    whole,
)

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_SECTIONS = (
    "optimizer", "zero_optimization", "tensor_parallel", "expert_parallel", "sequence_parallel_size", "amp", "bf16",
    "bfloat16", "fp16", "pipeline",
)  # fmt: skip
"""Keys that are read beside those of the batch."""
_CHEAPER = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights", "zenflow")
"""Settings of ZeRO that make it cheaper than it is priced."""


def read_deepspeed(document: Mapping[str, Any]) -> Stated:
    """The strategy of DeepSpeed's JSON.

    Raises:
        PlanError: a setting that is not priced, or a value that is none; names it.
    """
    # "auto" is filled in by transformers.
    given = {name: value for name, value in document.items() if value != "auto"}
    if "bfloat16" in given:
        given.setdefault("bf16", given["bfloat16"])
    zero = section(given, "zero_optimization")
    _check_shares(given, zero)
    found = Stated(target="deepspeed", degrees=_zero(zero) | _slices(given) | _experts(given))
    _read_batch(found, given, is_filled_in=document.get("gradient_accumulation_steps") == "auto")
    found.training |= _precision(given)
    if "optimizer" in given:
        found.training |= _optimizer(section(given, "optimizer"))
    found.degrees |= _deepspeed_stages(section(given, "pipeline"))
    _check_settings(document, zero)
    found.ignored = _ignored(document, given, zero, found)
    return found


def read_named(name: str, text: str) -> Stated:
    """The strategy of DeepSpeed's JSON that another configuration names.

    Args:
        name: name of the file.
        text: its text.

    Raises:
        PlanError: it is not such a file, or as in `read_deepspeed`; names the file and the key.
    """
    try:
        document = read_document(text, field="from", error=PlanError)
        if not isinstance(document, dict):
            raise PlanError("is not a JSON object", field="from", value=text[:20], repair="Give DeepSpeed's JSON.")
        return read_deepspeed(document)
    except PlanError as fault:
        raise PlanError(**fault.texts | {"field": fault.field.replace("from", f"from.{name}", 1)}) from None


def _check_shares(given: Mapping[str, Any], zero: Mapping[str, Any]) -> None:
    """Refuses what changes the plan and has no price."""
    for name in ("cpu_offload", "cpu_offload_params"):
        if zero.get(name):
            raise refuse(f"zero_optimization.{name}", zero[name], "is not priced", "Leave it out.")
    for name in ("zero_hpz_partition_size", "mics_shard_size"):
        size = zero.get(name, 1)
        check_shards(f"zero_optimization.{name}", 1 if size in (-1, 0, 1) else size, 2)
    size = given.get("sequence_parallel_size", 1)
    if size != 1:
        what = "splits sequences for attention by exchanging heads, which is not priced"
        raise refuse("sequence_parallel_size", size, what, "Leave it out.")
    if section(given, "amp").get("enabled") is True:
        raise refuse("amp.enabled", True, "leaves the precision to Apex, which is not priced", "Use bf16 or fp16.")


def _zero(zero: Mapping[str, Any]) -> dict[str, int]:
    """The stage of ZeRO."""
    for name in ("offload_optimizer", "offload_param"):
        if section(zero, name).get("device", "none") != "none":
            raise refuse(f"zero_optimization.{name}", zero[name], "is not priced", "Leave it out.")
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise refuse("zero_optimization.stage", stage, "is not a ZeRO stage", "Give 0 to 3.")
    return {"zero": stage}


def _slices(given: Mapping[str, Any]) -> dict[str, int]:
    """Ranks that share the weights of a layer."""
    slices = section(given, "tensor_parallel").get("autotp_size", 0)
    # 0 is AutoTP switched off.
    return {} if slices == 0 else {"tp": whole("tensor_parallel.autotp_size", slices)}


def _experts(given: Mapping[str, Any]) -> dict[str, int]:
    """Ranks that share the experts."""
    experts = section(given, "expert_parallel")
    if experts.get("enabled") is not True or "autoep_size" not in experts:
        return {}
    return {"ep": whole("expert_parallel.autoep_size", experts["autoep_size"])}


def _read_batch(found: Stated, given: Mapping[str, Any], *, is_filled_in: bool) -> None:
    """Reads the samples of a step and of a micro-batch, and what follows from them.

    Args:
        found: what the file says; the batch is added.
        given: the settings that the file states itself.
        is_filled_in: whether transformers fills in the steps of accumulation, which are then unknown.
    """
    batch, micro, steps = (whole(name, given[name]) if name in given else None for name in _BATCH)
    if batch is not None:
        found.training["global_batch"] = batch
    if micro is None:
        return
    found.degrees["micro_batch"] = micro
    if batch is None:
        found.accumulated = None if is_filled_in else micro * (steps or 1)
    elif steps is not None:
        if batch % (micro * steps):
            what = f"is not a multiple of {micro} samples * {steps} steps"
            raise refuse("train_batch_size", batch, what, "Make it micro-batch * accumulation * replicas.")
        found.degrees["dp"] = batch // micro // steps


def _precision(given: Mapping[str, Any]) -> dict[str, str]:
    """The precision; nothing where transformers fills it in."""
    enabled = {kind: section(given, kind).get("enabled", False) for kind in ("bf16", "fp16")}
    for name, value in enabled.items():
        check_choice(f"{name}.enabled", value, (True, False, "auto"))
    kinds = [kind for kind, value in enabled.items() if value is True]
    if len(kinds) == 2:
        raise refuse("fp16.enabled", True, "contradicts bf16.enabled", "Enable one of them.")
    if not kinds and "auto" in enabled.values():
        return {}
    return {"precision": kinds[0] if kinds else "fp32"}


def _optimizer(given: Mapping[str, Any]) -> dict[str, str]:
    """The kind of optimizer; nothing for another one than Adam and SGD."""
    kind = str(given.get("type", "")).lower()
    if kind == "sgd":
        momentum = section(given, "params").get("momentum", 0)
        return {"optimizer": sgd_kind("optimizer.params.momentum", momentum)}
    return {"optimizer": "adam"} if kind in ("adam", "adamw", "") else {}


def _deepspeed_stages(given: Mapping[str, Any]) -> dict[str, Any]:
    """The stages of an exported section; what others write there says nothing of them."""
    if "modules" not in given:
        return {}
    modules, layers, again = (given.get(name, []) for name in ("modules", "layers", "recompute"))
    for name, value in (("modules", modules), ("layers", layers), ("recompute", again)):
        if not isinstance(value, list):
            raise refuse(f"pipeline.{name}", value, "is not a list", "Export it again.")
    if given.get("stages") != len(modules):
        what = f"is not the number of lists of modules, {len(modules)}"
        raise refuse("pipeline.stages", given.get("stages"), what, "Export it again.")
    again = recomputes("pipeline.recompute", again, layers)
    return {"pp": len(modules), "layers": layers_of_stages(layers, modules), "recompute": again}


def _check_settings(document: Mapping[str, Any], zero: Mapping[str, Any]) -> None:
    """Refuses names that look like misspelt settings, and a document without any setting of DeepSpeed."""
    known = (*_BATCH, *_SECTIONS)
    check_names(document, known)
    check_names(zero, ("stage", "offload_optimizer", "offload_param"), "zero_optimization.")
    if not document.keys() & {*known}:
        repair = "Give DeepSpeed's JSON, or one of the other formats."
        value = ", ".join(document)[:80] or "{}"
        raise PlanError("has no setting of DeepSpeed", field="from", value=value, repair=repair)


def _ignored(
    document: Mapping[str, Any], given: Mapping[str, Any], zero: Mapping[str, Any], found: Stated
) -> tuple[str, ...]:
    """Names of the settings that were not read.

    Args:
        document: the whole file.
        given: the settings that the file states itself.
        zero: its section on ZeRO.
        found: what was read.
    """
    ignored = [name for name in document if name not in _BATCH and name not in _SECTIONS]
    if "gradient_accumulation_steps" in given and "micro_batch" not in found.degrees:
        # Without the samples of a micro-batch it says nothing of the batch.
        ignored.append("gradient_accumulation_steps")
    ignored += [f"zero_optimization.{name}" for name in _CHEAPER if zero.get(name)]
    if "optimizer" in given and "optimizer" not in found.training:
        ignored.append(f"optimizer.type {section(given, 'optimizer').get('type')}")
    return tuple(ignored)
