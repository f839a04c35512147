"""accelerate's YAML read as a stated strategy: FSDP and replicas of its own, DeepSpeed and Megatron-LM in its words.

Keys: accelerate/commands/config/config_args.py and utils/dataclasses.py at 1.15.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from automap.export.deepspeed_reading import read_deepspeed, read_named
from automap.export.megatron_reading import read_flags
from automap.export.stated import (
    Beside,
    Stated,
    check_choice,
    check_names,
    check_shards,
    ranks_of,
    refuse,
    section,
    whole,
)

_MEGATRON = {"tp_degree": "tensor-model-parallel-size", "pp_degree": "pipeline-model-parallel-size"}
"""Sizes of the section of Megatron-LM, without their prefix -> arguments."""
_MEGATRON_SWITCHES = {
    "sequence_parallelism": "sequence-parallel",
    "recompute_activations": "recompute-activations",
    "use_distributed_optimizer": "use-distributed-optimizer",
}
"""Switches there -> arguments."""
_KEYS = frozenset({
    "compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes", "machine_rank",
    "num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend", "same_network",
    "main_training_function", "enable_cpu_affinity", "fp8_config", "deepspeed_config", "fsdp_config",
    "parallelism_config", "megatron_lm_config", "mpirun_config", "downcast_bf16", "tpu_name", "tpu_zone",
    "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env",
    "dynamo_config", "dynamo_backend", "fp16", "ipex_config", "use_mps_device",
})  # fmt: skip
"""Keys of accelerate's `ClusterConfig`, which refuses others, and of earlier versions of it."""
_SHARDING = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "1": 3, "2": 2, "3": 0}
"""FSDP 1's strategies, by name or number -> stage of ZeRO."""


def read_accelerate(document: Mapping[str, Any], beside: Beside) -> Stated:
    """The strategy of accelerate's YAML, which may name another trainer.

    Args:
        document: its keys.
        beside: the files beside it, of which DeepSpeed's JSON is read.

    Raises:
        PlanError: a setting that is not priced, or a value that is none; names it.
    """
    check_names(document, _KEYS)
    if unknown := [name for name in document if name not in _KEYS]:
        what = "is not a key of accelerate's files; the only other YAML that is read has Megatron-LM's MODEL_ARGS"
        repair = "Take it out, or state the degrees of another trainer by options such as --tp 8."
        raise refuse(unknown[0], document[unknown[0]], what, repair)
    if "distributed_type" not in document:
        raise refuse("distributed_type", "nothing", "is missing", "Write it, as `accelerate config` does.")
    mixed = document.get("mixed_precision") or ("fp16" if document.get("fp16") is True else "no")
    check_choice("mixed_precision", mixed, ("no", "fp32", "bf16", "fp16", "fp8"))
    other = {
        "DEEPSPEED": ("deepspeed_config", _deepspeed),
        "MEGATRON_LM": ("megatron_lm_config", _megatron),
    }
    name, reader = other.get(str(document.get("distributed_type")), ("", _own))
    found = reader(document, beside)
    own = found.training.get("precision", "fp32") if found.beside else None
    if own in ("bf16", "fp16") and mixed not in ("no", own):
        raise refuse("mixed_precision", mixed, f"contradicts {found.beside}, which says {own}", "Make them equal.")
    said = mixed if mixed in ("bf16", "fp16", "fp8") else "fp32"
    found.training["precision"] = own if own is not None and mixed == "no" else said
    read = {"fsdp_config", "parallelism_config"} if reader is _own else {name}
    found.ignored += tuple(one for one, value in document.items() if isinstance(value, dict) and one not in read)
    return found


def _stage(value: object) -> int:
    check_choice("deepspeed_config.zero_stage", str(value), ("0", "1", "2", "3"))
    return int(str(value))


def _processes(document: Mapping[str, Any]) -> int | None:
    return whole("num_processes", document["num_processes"]) if "num_processes" in document else None


def _deepspeed(document: Mapping[str, Any], beside: Beside) -> Stated:
    """DeepSpeed's settings in accelerate's words, or in the file that it names."""
    given = section(document, "deepspeed_config")
    file = given.get("deepspeed_config_file")
    if file:
        return _from_file(str(file), document, beside)
    zero: dict[str, Any] = {"stage": _stage(given.get("zero_stage", 2))}
    for name in ("offload_optimizer", "offload_param"):
        device = given.get(f"{name}_device") or "none"
        if device != "none":
            raise refuse(f"deepspeed_config.{name}_device", device, "is not priced", "Write none.")
    said: dict[str, Any] = {"zero_optimization": zero}
    if "gradient_accumulation_steps" in given:
        said["gradient_accumulation_steps"] = given["gradient_accumulation_steps"]
    found = read_deepspeed(said)
    processes = _processes(document)
    return found if processes is None else replace(found, degrees={**found.degrees, "dp": processes})


def _from_file(file: str, document: Mapping[str, Any], beside: Beside) -> Stated:
    """DeepSpeed's settings in a file of its own: what accelerate's YAML says beside it is what that file leaves open.

    accelerate refuses settings that stand in both, in `DeepSpeedPlugin` at 1.15.0.
    """
    text, name = beside(file), file.rpartition("/")[2]
    if text is None:
        what = f"has the settings of DeepSpeed, and no {name} lies beside this file"
        raise refuse("deepspeed_config.deepspeed_config_file", file, what, f"Put {name} beside it.")
    found = read_named(name, text)
    processes = _processes(document)
    if processes is not None:
        others = found.degrees.get("tp", 1)
        if processes % others:
            what = f"is not a multiple of tp = {others} in {name}"
            raise refuse("num_processes", processes, what, "Give a multiple.")
        replicas = found.degrees.setdefault("dp", processes // others)
        if replicas * others != processes:
            what = f"contradicts {name}, whose batch is for {replicas} replicas"
            repair = "Make train_batch_size micro-batch * accumulation * replicas."
            raise refuse("num_processes", processes, what, repair)
    found.beside = name
    return found


def _megatron(document: Mapping[str, Any], beside: Beside) -> Stated:
    """Megatron-LM's arguments in accelerate's words."""
    given = {
        name.removeprefix("megatron_lm_"): value for name, value in section(document, "megatron_lm_config").items()
    }
    flags: dict[str, str | None] = {flag: str(given[name]) for name, flag in _MEGATRON.items() if name in given}
    flags |= dict.fromkeys(flag for name, flag in _MEGATRON_SWITCHES.items() if given.get(name) is True)
    processes = _processes(document)
    found = read_flags(flags, ("num_processes", None if processes is None else str(processes), None))
    read = {*_MEGATRON, *_MEGATRON_SWITCHES}
    found.ignored += tuple(f"megatron_lm_{name}" for name in given if name not in read)
    return found


def _own(document: Mapping[str, Any], beside: Beside) -> Stated:
    """What accelerate does itself, by FSDP or with replicas."""
    found = Stated(target="accelerate")
    kind = document.get("distributed_type", "NO")
    if kind not in ("FSDP", "MULTI_GPU", "MULTI_CPU", "NO"):
        repair = "Use FSDP, MULTI_GPU, DEEPSPEED or MEGATRON_LM."
        raise refuse("distributed_type", kind, "is not read", repair)
    fsdp = section(document, "fsdp_config")
    read = ("version", "reshard_after_forward", "sharding_strategy", "activation_checkpointing")
    check_names(fsdp, [f"fsdp_{name}" for name in read], "fsdp_config.")
    sizes = ranks_of(section(document, "parallelism_config"), "", "parallelism_config_", "_size")
    found.degrees = {"tp": sizes.get("tp", 1), "cp": sizes.get("cp", 1), "zero": 0, "recompute": "none"}
    if sizes.get("sp", 1) > 1:
        what = "splits sequences for attention by exchanging heads, which is not priced"
        raise refuse("parallelism_config_sp_size", sizes["sp"], what, "Use parallelism_config_cp_size.")
    if kind == "FSDP":
        if fsdp.get("fsdp_offload_params") is True:
            raise refuse("fsdp_config.fsdp_offload_params", True, "is not priced", "Write false.")
        again = fsdp.get("fsdp_reshard_after_forward", True)
        # FSDP 1 takes its strategy under both names.
        strategy = fsdp.get("fsdp_sharding_strategy", again if isinstance(again, str) else "FULL_SHARD")
        check_choice("fsdp_config.fsdp_sharding_strategy", strategy, tuple(_SHARDING))
        is_second = str(fsdp.get("fsdp_version", 1)) == "2"
        found.degrees["zero"] = _SHARDING[strategy] if not is_second else 3 if again is True else 2
        found.degrees["recompute"] = "full" if fsdp.get("fsdp_activation_checkpointing") is True else "none"
    check_shards("parallelism_config_dp_replicate_size", sizes.get("dp_replicate", 1), sizes.get("dp_shard", 1))
    processes = _processes(document)
    if processes is not None:
        others = found.degrees["tp"] * found.degrees["cp"]
        if processes % others:
            raise refuse("num_processes", processes, f"is not a multiple of tp * cp = {others}", "Give a multiple.")
        found.degrees["dp"] = processes // others
    return found
