"""Configurations that people train with, read as stated strategies: the way back of the exports.

Read are bash scripts and YAML maps of Megatron-LM's arguments, torchtitan's TOML, DeepSpeed's JSON and accelerate's
YAML, both with the `TrainingArguments` beside them, and our own pytorch.json. What has no bearing on the plan is listed
as not read; what has one and no place in a stated strategy is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from automap.documents import read_document
from automap.errors import PlanError
from automap.export import training_arguments
from automap.export.megatron_reading import read_map, read_script
from automap.export.onnx_devices import SCHEMA as ONNX_SCHEMA
from automap.export.pytorch import SCHEMA as PYTORCH_SCHEMA
from automap.export.stated import (
    Stated,
    check_choice,
    check_names,
    check_shards,
    ranks_of,
    refuse,
    section,
    sgd_kind,
    whole,
)
from automap.export.torchtitan_reading import read_torchtitan
from automap.targets import targets


def read_configuration(path: Path) -> Stated:
    """The strategy of a configuration file.

    Raises:
        PlanError: it cannot be read, or as in `read_text`.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) else "no UTF-8"
        repair = "Name one of its files, such as megatron.sh." if path.is_dir() else "Name a readable file."
        raise PlanError(f"cannot be read ({reason})", field="from", value=str(path), repair=repair) from None
    return read_text(path.name, text, arguments_beside(path))


def arguments_beside(path: Path) -> str:
    """The text of the `TrainingArguments` beside a configuration, empty where there are none."""
    try:
        return path.with_name(training_arguments.FILE).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def read_text(name: str, text: str, arguments: str = "") -> Stated:
    """The strategy of the text of a configuration.

    Args:
        name: name of the file, whose ending says whose configuration it is.
        text: its text.
        arguments: text of the `TrainingArguments` beside it, which DeepSpeed's and accelerate's say a part in; empty
            for none.

    Raises:
        PlanError: it says something that is not priced; names the key.
    """
    reader = _READERS.get(Path(name).suffix)
    if reader is None:
        repair = f"Name a file that ends in {', '.join(_READERS)}."
        if name.endswith(".py"):
            repair = "Code is not read: of torchtitan 0.3, give the torchtitan.toml that is exported beside it."
        raise PlanError("no configuration that is read", field="from", value=name, repair=repair)
    found = reader(text)
    if arguments and found.target in ("deepspeed", "accelerate"):
        training_arguments.complete(found, name, arguments)
    found.training.setdefault("trainer", targets()[found.target].trainer)
    return found


def _json(text: str) -> Stated:
    document = read_document(text, field="from", error=PlanError)
    if not isinstance(document, dict):
        raise PlanError("is no object", field="from", value=text[:20], repair="Give DeepSpeed's JSON, or pytorch.json.")
    schema = str(document.get("schema", ""))
    if schema.startswith("automap.plan/"):
        raise refuse("schema", schema, "is a plan of AutoMAP", "Give it by --plan.")
    if schema.startswith("automap.export/"):
        raise refuse("schema", schema, "is the report of an export", "Give the configuration beside it.")
    if schema == ONNX_SCHEMA:
        return _onnx(document)
    if document.get("schema") != PYTORCH_SCHEMA:
        return _deepspeed(document)
    try:
        return _pytorch(document)
    except (KeyError, TypeError, ValueError, AttributeError) as fault:
        raise refuse("json", str(fault), "is no pytorch.json as it was exported", "Export it again.") from None


def _onnx(document: Mapping[str, Any]) -> Stated:
    said = section(section(document, "plan"), "training")
    training = {name: value for name, value in said.items() if name not in ("target", "memory_confidence")}
    return Stated(target="onnx", training=training, document=document)


def _pytorch(document: Mapping[str, Any]) -> Stated:
    mesh, layers, stages = section(document, "mesh"), document["layers"], document["stages"]
    sizes = dict(zip(mesh["dim_names"], mesh["shape"], strict=True))
    is_outer = mesh["dim_names"].index("tensor") < mesh["dim_names"].index("shard")
    if is_outer and sizes["tensor"] > 1 and sizes["replicate"] * sizes["shard"] > 1:
        raise refuse("mesh.dim_names", mesh["dim_names"], "ranks of one replica are not side by side", "Turn the mesh.")
    check_shards("mesh.shape", sizes["replicate"], sizes["shard"])
    again = set(document["recompute"])
    if again and again != set(layers):
        raise refuse("recompute", sorted(again), "is a part of the layers", "Recompute all of them, or none.")
    degrees = {"tp": sizes["tensor"], "pp": sizes["pipe"], "zero": document["zero"], "sequence_parallel": False}
    degrees["dp"] = sizes["replicate"] * sizes["shard"]
    degrees |= {"micro_batch": document["micro_batch"], "recompute": "full" if again else "none"}
    if sizes["pipe"] > 1:
        counts = tuple(sum(path in layers for path in paths) for paths in stages)
        degrees |= {"virtual": len(stages) // sizes["pipe"], "layers": counts}
        if document["schedule"] != "interleaved":
            degrees["schedule"] = document["schedule"]
    training = {"global_batch": document["global_batch"], "precision": document["precision"]}
    return Stated(target="pytorch", training=training, degrees=degrees)


def _deepspeed(document: Mapping[str, Any]) -> Stated:
    # "auto" is filled in by transformers.
    given = {name: value for name, value in document.items() if value != "auto"}
    found = Stated(target="deepspeed")
    zero = section(given, "zero_optimization")
    for name in ("offload_optimizer", "offload_param"):
        if section(zero, name).get("device", "none") != "none":
            raise refuse(f"zero_optimization.{name}", zero[name], "is not priced", "Leave it out.")
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    batch, micro, steps = (whole(name, given[name]) if name in given else None for name in names)
    if zero.get("stage", 0) not in (0, 1, 2, 3):
        raise refuse("zero_optimization.stage", zero["stage"], "is no stage of ZeRO", "Give 0 to 3.")
    found.degrees = {"zero": zero.get("stage", 0)}
    # 0 is AutoTP switched off.
    slices = section(given, "tensor_parallel").get("autotp_size", 0)
    if slices != 0:
        found.degrees["tp"] = whole("tensor_parallel.autotp_size", slices)
    if batch is not None:
        found.training["global_batch"] = batch
    if micro is not None:
        found.degrees["micro_batch"] = micro
    if batch is not None and micro is not None and steps is not None:
        if batch % (micro * steps):
            what = f"is no multiple of {micro} samples * {steps} steps"
            raise refuse("train_batch_size", batch, what, "Make it micro-batch * accumulation * replicas.")
        found.degrees["dp"] = batch // micro // steps
    enabled = {kind: section(given, kind).get("enabled", False) for kind in ("bf16", "fp16")}
    for name, value in enabled.items():
        check_choice(f"{name}.enabled", value, (True, False, "auto"))
    kinds = [kind for kind, value in enabled.items() if value is True]
    if len(kinds) == 2:
        raise refuse("fp16.enabled", True, "contradicts bf16.enabled", "Enable one of them.")
    if kinds or "auto" not in enabled.values():
        found.training["precision"] = kinds[0] if kinds else "fp32"
    optimizer = section(given, "optimizer")
    kind = str(optimizer.get("type", "")).lower()
    if kind in ("adam", "adamw"):
        found.training["optimizer"] = "adam"
    elif kind == "sgd":
        momentum = section(optimizer, "params").get("momentum", 0)
        found.training["optimizer"] = sgd_kind("optimizer.params.momentum", momentum)
    found.degrees |= _deepspeed_stages(section(given, "pipeline"))
    known = (*names, "optimizer", "zero_optimization", "tensor_parallel", "bf16", "fp16", "pipeline")
    check_names(document, known)
    check_names(zero, ("stage", "offload_optimizer", "offload_param"), "zero_optimization.")
    if not document.keys() & {*known}:
        repair = "Give DeepSpeed's JSON, or one of the other formats."
        value = ", ".join(document)[:80] or "{}"
        raise PlanError("has no setting of DeepSpeed", field="from", value=value, repair=repair)
    found.ignored = tuple(name for name in document if name not in known)
    return found


def _deepspeed_stages(given: Mapping[str, Any]) -> dict[str, Any]:
    """The stages of an exported section; what others write there says nothing of them."""
    if "modules" not in given:
        return {}
    modules, layers, again = (given.get(name, []) for name in ("modules", "layers", "recompute"))
    for name, value in (("modules", modules), ("layers", layers), ("recompute", again)):
        if not isinstance(value, list):
            raise refuse(f"pipeline.{name}", value, "is no list", "Export it again.")
    if given.get("stages") != len(modules):
        what = f"is not the number of lists of modules, {len(modules)}"
        raise refuse("pipeline.stages", given.get("stages"), what, "Export it again.")
    if again and {*map(str, again)} != {*map(str, layers)}:
        raise refuse("pipeline.recompute", again, "is a part of the layers", "Recompute all of them, or none.")
    counts = tuple(sum(path in layers for path in paths) for paths in modules)
    return {"pp": len(modules), "layers": counts, "recompute": "full" if again else "none"}


_SHARDING = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "1": 3, "2": 2, "3": 0}
"""FSDP 1's strategies, by name or number -> stage of ZeRO."""


def _accelerate(document: Mapping[str, Any]) -> Stated:
    found = Stated(target="accelerate")
    kind = document.get("distributed_type", "NO")
    if kind not in ("FSDP", "MULTI_GPU", "MULTI_CPU", "NO"):
        repair = "Give DeepSpeed's own JSON." if kind == "DEEPSPEED" else "Use FSDP or MULTI_GPU."
        raise refuse("distributed_type", kind, "is not read", repair)
    fsdp = section(document, "fsdp_config")
    check_names(document, ("num_processes", "mixed_precision", "distributed_type", "fsdp_config", "parallelism_config"))
    read = ("version", "reshard_after_forward", "sharding_strategy", "activation_checkpointing")
    check_names(fsdp, [f"fsdp_{name}" for name in read], "fsdp_config.")
    sizes = ranks_of(section(document, "parallelism_config"), "", "parallelism_config_", "_size")
    found.degrees = {"tp": sizes.get("tp", 1), "cp": sizes.get("cp", 1), "zero": 0, "recompute": "none"}
    if sizes.get("sp", 1) > 1:
        what = "splits sequences for attention by exchanging heads, which is not priced"
        raise refuse("parallelism_config_sp_size", sizes["sp"], what, "Use parallelism_config_cp_size.")
    if kind == "FSDP":
        strategy = fsdp.get("fsdp_sharding_strategy", "FULL_SHARD")
        check_choice("fsdp_config.fsdp_sharding_strategy", strategy, tuple(_SHARDING))
        again = fsdp.get("fsdp_reshard_after_forward", True)
        is_second = str(fsdp.get("fsdp_version", 1)) == "2"
        found.degrees["zero"] = _SHARDING[strategy] if not is_second else 3 if again is True else 2
        found.degrees["recompute"] = "full" if fsdp.get("fsdp_activation_checkpointing") is True else "none"
    check_shards("parallelism_config_dp_replicate_size", sizes.get("dp_replicate", 1), sizes.get("dp_shard", 1))
    if "num_processes" in document:
        processes = whole("num_processes", document["num_processes"])
        others = found.degrees["tp"] * found.degrees["cp"]
        if processes % others:
            raise refuse("num_processes", processes, f"is no multiple of tp * cp = {others}", "Start as many.")
        found.degrees["dp"] = processes // others
    mixed = document.get("mixed_precision", "no")
    check_choice("mixed_precision", mixed, ("no", "fp32", "bf16", "fp16", "fp8"))
    found.training["precision"] = mixed if mixed in ("bf16", "fp16", "fp8") else "fp32"
    return found


def _yaml(text: str) -> Stated:
    document = _maps(text)
    if "MODEL_ARGS" in document:
        given = section(document, "MODEL_ARGS")
        flags = {name.removeprefix("--"): value for name, value in given.items() if value is not False}
        said = {name: None if value is True else str(value) for name, value in flags.items()}
        return read_map(said, section(document, "ENV_VARS"))
    return _accelerate(document)


def _maps(text: str) -> dict[str, Any]:
    """YAML of at most two levels of keys with plain values: all that these configurations use.

    Raises:
        PlanError: anything else, with the number of the line.
    """
    found: dict[str, Any] = {}
    inside: dict[str, Any] = found
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.split(" #")[0].rstrip()
        if not bare or bare.lstrip().startswith("#") or bare == "---":
            continue
        name, colon, value = bare.strip().partition(":")
        is_nested = bare.startswith(" ")
        if not colon or name.startswith(("-  ", "- ")) or (value and not value.startswith(" ")):
            raise refuse(f"line {number}", bare, "is not read", "Write keys with plain values, in at most two levels.")
        if not is_nested:
            inside = found
        if not value and not is_nested:
            found[name] = inside = {}
        else:
            inside[name] = _plain(value.strip())
    return found


def _plain(text: str) -> Any:
    lowered = text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    return text.strip("'\"")


_READERS: Mapping[str, Callable[[str], Stated]] = {
    ".sh": read_script,
    ".toml": read_torchtitan,
    ".json": _json,
    ".yaml": _yaml,
    ".yml": _yaml,
}
"""Ending of a file -> its reader."""
