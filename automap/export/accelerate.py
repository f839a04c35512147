"""accelerate: the YAML file of `accelerate launch --config_file`, and `transformers.TrainingArguments`.

Keys: accelerate/commands/config/config_args.py (`ClusterConfig`); a key that it does not know is an error there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from automap.export import training_arguments
from automap.export.configuration import Export, Note, Run, header


def write(run: Run) -> Export:
    """The files of a run."""
    precision = run.problem.precision
    mixed = precision if precision in ("bf16", "fp16") else "no"
    text = header(run, ["Batch and accumulation are in training_arguments.json."]) + _yaml(_settings(run, mixed))
    return Export(
        target=run.target.name,
        version=run.target.version,
        files={
            "accelerate.yaml": text,
            # FSDP computes wrapped layers again itself.
            training_arguments.FILE: training_arguments.write(
                run, again=run.recompute == "full" and not _is_fsdp(run), more=_sharding(run)
            ),
        },
        launch="accelerate launch --config_file accelerate.yaml YOUR_TRAINING.py",
        notes=tuple(_notes(run)),
    )


def _is_fsdp(run: Run) -> bool:
    degrees = run.degrees
    return degrees.zero > 0 or degrees.tensor * degrees.context > 1


def _sharding(run: Run) -> dict[str, Any]:
    """FSDP in the words of `TrainingArguments`, which leave out a prefix."""
    if not _is_fsdp(run):
        return {}
    return {"fsdp": True, "fsdp_config": {name.removeprefix("fsdp_"): value for name, value in _fsdp(run).items()}}


def _fsdp(run: Run) -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": run.degrees.zero == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": run.recompute == "full",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _settings(run: Run, mixed: str) -> Mapping[str, Any]:
    degrees = run.degrees
    found: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "FSDP" if _is_fsdp(run) else "MULTI_GPU" if run.devices > 1 else "NO",
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": mixed,
        "num_machines": len(run.processes),
        "num_processes": run.devices,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if len(run.processes) > 1:
        found |= {"main_process_ip": "HOST", "main_process_port": 29500}
    if _is_fsdp(run):
        found["fsdp_config"] = _fsdp(run)
    if degrees.tensor * degrees.context > 1:
        found["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": 1,
            "parallelism_config_dp_shard_size": degrees.data,
            "parallelism_config_tp_size": degrees.tensor,
            "parallelism_config_cp_size": degrees.context,
        }
        if degrees.context > 1:
            found["parallelism_config"]["parallelism_config_cp_backend"] = "torch"
            found["parallelism_config"]["parallelism_config_cp_comm_strategy"] = "allgather"
    return found


def _yaml(settings: Mapping[str, Any], indent: str = "") -> str:
    """Two levels of keys; texts in JSON's quotes, which YAML reads too."""
    text = ""
    for name, value in settings.items():
        shown = f"\n{_yaml(value, indent + '  ')}" if isinstance(value, Mapping) else f" {json.dumps(value)}\n"
        text += f"{indent}{name}:{shown}"
    return text


def _notes(run: Run) -> Iterator[Note]:
    yield Note(about="degrees, batch, ZeRO, recomputation, precision", kept="exact", text="as the plan says")
    if run.degrees.tensor > 1:
        what = (
            "which products are split is the model's own plan (`tp_plan` of transformers, which Llama has and GPT-2 has"
            " not): load it split, with from_pretrained. accelerate 1.15.0 does this with transformers 5.0 alone: it"
            " imports ReplicateParallel, which 5.4 and later do not have"
        )
        yield Note(about="tensor parallelism", kept="left to you", text=what)
    if _is_fsdp(run):
        what = (
            "of models of transformers they are known; else name fsdp_transformer_layer_cls_to_wrap, and give the model"
            " tie_weights(): without it FSDP2 unties weights in silence"
        )
        yield Note(about="layers and tied weights", kept="left to you", text=what)
    if run.recompute == "full" and not _is_fsdp(run):
        yield Note(about="recomputation", kept="left to you", text="gradient_checkpointing of TrainingArguments")
    yield Note(about="model", kept="left to you", text="the script with the model, the data and the optimizer")
