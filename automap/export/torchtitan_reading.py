"""torchtitan's TOML read as a stated strategy: that of v0.2.2, and of versions before.

Fields: torchtitan/config/job_config.py at v0.2.2. Until 2025 the degrees stood under [training] and [experimental].
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from automap.export.stated import Stated, check_choice, check_names, check_shards, ranks_of, refuse, section, whole

_READ = {
    "parallelism": (
        *(f"{kind}_parallel_degree" for kind in ("tensor", "pipeline", "context", "expert", "expert_tensor")),
        "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward",
        "pipeline_parallel_microbatch_size", "pipeline_parallel_schedule", "module_fqns_per_model_part",
        "enable_async_tensor_parallel", "pipeline_parallel_microbatches",
    ),
    "training": (
        "local_batch_size", "global_batch_size", "seq_len", "mixed_precision_param", "enable_float8_linear",
    ),
    "activation_checkpoint": ("mode", "selective_ac_option"),
    "optimizer": ("name",),
    "model": ("converters",),
    "float8": ("enable_float8_linear", "recipe_name"),
}  # fmt: skip
"""Section -> the keys that are read."""
_AS_PRICED = {"mixed_precision_reduce": "float32"}
"""Keys with the one value that is priced; another one is named as not read."""
_NOT_PRICED = {
    "pipeline_parallel_layers_per_stage": "Write the stages as module_fqns_per_model_part.",
    "pipeline_parallel_split_points": "Write the stages as module_fqns_per_model_part.",
    "pipeline_parallel_schedule_csv": "Name a schedule of torch: 1F1B, GPipe or Interleaved1F1B.",
}
_SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved1f1b": 2}
"""Schedule of torch, in small letters -> stages of a rank where none are named (v0.2.2, pipeline_llm)."""
_NARROW = {
    "float8": "fp8", "quantize.linear.float8": "fp8", "quantize.dense.float8": "fp8", "mx": "mxfp8",
    "quantize.linear.mx": "mxfp8", "quantize.dense.mx": "mxfp8",
}  # fmt: skip
"""Converter of a model -> precision of its products."""
_MOVED = {"batch_size": "local_batch_size", "data_parallel_degree": "data_parallel_shard_degree"}
"""Names of before -> names of v0.2.2."""


def read_torchtitan(text: str) -> Stated:
    """The strategy of a TOML file.

    Raises:
        PlanError: a key that is not priced, or a value that is none; names it.
    """
    try:
        document = _modern(tomllib.loads(text))
    except tomllib.TOMLDecodeError as fault:
        raise refuse("toml", str(fault), "is not TOML", "Correct the file.") from None
    way, training = section(document, "parallelism"), section(document, "training")
    check_names(document, tuple(_READ))
    for name, read in _READ.items():
        check_names(section(document, name), read, f"{name}.")
    for name, repair in _NOT_PRICED.items():
        if way.get(name):
            raise refuse(f"parallelism.{name}", way[name], "is not priced", repair)
    sizes = ranks_of(way, "parallelism.", "", "_degree")
    tokens = whole("training.seq_len", training["seq_len"]) if "seq_len" in training else None
    found = Stated(target="torchtitan", tokens=tokens)
    tp, pp = sizes.get("tensor_parallel", 1), sizes.get("pipeline_parallel", 1)
    ep, slices = sizes.get("expert_parallel", 1), sizes.get("expert_tensor_parallel", 1)
    if ep > 1 and slices != tp:
        what = f"shares experts in {slices} slices among ranks that split other weights in {tp}, which is not priced"
        raise refuse("parallelism.expert_parallel_degree", ep, what, "Make tensor_parallel_degree 1.")
    replicas, shards = sizes.get("data_parallel_replicate", 1), sizes.get("data_parallel_shard")
    # Without a number, the replicas that are left share the states.
    check_shards("parallelism.data_parallel_replicate_degree", replicas, shards or 2)
    local = whole("training.local_batch_size", training.get("local_batch_size", 8))
    found.degrees = {
        "tp": tp,
        "pp": pp,
        "cp": sizes.get("context_parallel", 1),
        "ep": ep,
        "sequence_parallel": tp > 1,
        "micro_batch": _micro_batch(way, local) if pp > 1 else local,
        "zero": 0 if replicas > 1 else _gathers(way.get("fsdp_reshard_after_forward", "default"), pp),
        "recompute": _recomputation(section(document, "activation_checkpoint")),
    }
    if shards is not None:
        found.degrees["dp"] = replicas * shards
        # Without a global batch, no gradients are accumulated.
        found.training["global_batch"] = local * replicas * shards
    if pp > 1:
        found.degrees |= _stages(way, pp)
    if training.get("global_batch_size", -1) != -1:
        found.training["global_batch"] = whole("training.global_batch_size", training["global_batch_size"])
    if way.get("enable_async_tensor_parallel") is True and tp > 1:
        found.training["async_tensor_parallel"] = True
    if str(section(document, "optimizer").get("name", "")).lower() in ("adam", "adamw"):
        found.training["optimizer"] = "adam"
    found.training |= _precision(document)
    found.ignored = tuple(_unread(document))
    return found


def _modern(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the names and sections of v0.2.2."""
    found = {name: dict(value) if isinstance(value, dict) else value for name, value in document.items()}
    way = found.setdefault("parallelism", {})
    for name in ("training", "experimental"):
        given = found.get(name)
        if not isinstance(given, dict) or not isinstance(way, dict):
            continue
        for key in list(given):
            new = _MOVED.get(key, key)
            place = way if new in _READ["parallelism"] or new in _NOT_PRICED else given
            if new != key or place is way:
                value = given.pop(key)
                if place.setdefault(new, value) != value:
                    raise refuse(f"{name}.{key}", value, f"contradicts {new}, which is {place[new]}", "Give one.")
    if not found.get("experimental", True):
        del found["experimental"]
    return found


def _unread(document: Mapping[str, Any]) -> list[str]:
    """Names of what is not read: sections, and keys of sections that are read in part."""
    found = []
    for name, value in document.items():
        if name not in _READ:
            found.append(name)
        elif isinstance(value, dict):
            found += [f"{name}.{key}" for key in value if key not in _READ[name] and value[key] != _AS_PRICED.get(key)]
    return found


def _micro_batch(way: Mapping[str, Any], local: int) -> int:
    """Samples of a micro-batch of a pipeline; before v0.2 it was stated by the number of micro-batches."""
    if "pipeline_parallel_microbatches" in way and "pipeline_parallel_microbatch_size" not in way:
        name = "parallelism.pipeline_parallel_microbatches"
        count = whole(name, way["pipeline_parallel_microbatches"])
        if local % count:
            raise refuse(name, count, f"does not divide the local batch of {local}", "Use a divisor.")
        return local // count
    return whole("parallelism.pipeline_parallel_microbatch_size", way.get("pipeline_parallel_microbatch_size", 1))


def _recomputation(given: Mapping[str, Any]) -> str:
    mode, option = str(given.get("mode", "selective")), str(given.get("selective_ac_option", "op"))
    if mode == "memory_budget":
        what, repair = "chooses what it keeps while it compiles, which is not priced", "Use none, selective or full."
        raise refuse("activation_checkpoint.mode", mode, what, repair)
    check_choice("activation_checkpoint.mode", mode, ("none", "selective", "full"))
    if mode != "selective" or option == "op":
        return mode
    if option != "1":
        what = "recomputes some of the layers, which is not priced"
        raise refuse("activation_checkpoint.selective_ac_option", option, what, 'Use "op", or mode "full".')
    return "full"


def _stages(way: Mapping[str, Any], pp: int) -> dict[str, Any]:
    """Schedule, virtual stages of a rank and layers of each stage."""
    schedule = str(way.get("pipeline_parallel_schedule", "1F1B"))
    virtual = _SCHEDULES.get(schedule.lower())
    if virtual is None:
        repair = "Use 1F1B, GPipe or Interleaved1F1B."
        raise refuse("parallelism.pipeline_parallel_schedule", schedule, "is not priced", repair)
    found: dict[str, Any] = {"virtual": virtual} if virtual > 1 else {}
    if schedule.lower() == "gpipe":
        found["schedule"] = "gpipe"
    parts = way.get("module_fqns_per_model_part")
    if parts:
        if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts):
            what = "is not a list of lists of modules"
            raise refuse("parallelism.module_fqns_per_model_part", parts, what, 'Write it as [["layers.0"], …].')
        counts = tuple(sum(str(name).startswith("layers.") for name in part) for part in parts)
        found |= {"virtual": max(1, len(parts) // pp), "layers": counts}
    return found


def _precision(document: Mapping[str, Any]) -> dict[str, str]:
    """Precision and scaling: of the states' copies, or narrower ones of products, as three generations of files say."""
    training, float8 = section(document, "training"), section(document, "float8")
    wide = training.get("mixed_precision_param", "bfloat16")
    check_choice("training.mixed_precision_param", wide, ("bfloat16", "float32"))
    converters = section(document, "model").get("converters", [])
    kinds = (
        {_NARROW[name] for name in map(str, converters) if name in _NARROW} if isinstance(converters, list) else set()
    )
    if any(given.get("enable_float8_linear") is True for given in (training, float8)):
        kinds.add("fp8")
    if len(kinds) > 1:
        raise refuse("model.converters", converters, "has two precisions", "Give one of them.")
    if not kinds:
        return {"precision": "bf16" if wide == "bfloat16" else "fp32"}
    given = section(section(section(document, "quantize"), "linear"), "float8") or float8
    rows = str(given.get("recipe_name", "")).startswith("rowwise")
    return {"precision": kinds.pop(), **({"scaling": "row"} if rows else {})}


def _gathers(reshard: object, pp: int) -> int:
    """The stage of ZeRO that torchtitan's FSDP comes to: pipelines scatter gradients once a step."""
    if reshard not in ("default", "always", "never"):
        repair = "Use default, always or never."
        raise refuse("parallelism.fsdp_reshard_after_forward", reshard, "is not one of torchtitan's choices", repair)
    if pp == 1:
        return 2 if reshard == "never" else 3
    return 3 if reshard == "always" else 1
