"""torchtitan v0.2.2: a TOML file for `--job.config_file` (torchtitan/config/job_config.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from automap.export.configuration import Export, Note, Run, header

SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}
"""Schedule of a plan -> name in torch.distributed.pipelining."""


def write(run: Run) -> Export:
    """The files of a run."""
    text = header(run, ["Model, data, optimizer and checkpoints are yours: add [model], [training].dataset and so on."])
    for section, entries in _sections(run).items():
        text += f"\n[{section}]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in entries.items())
    return Export(
        target=run.target.name,
        version=run.target.version,
        files={"torchtitan.toml": text},
        launch=f"{run.torchrun} -m torchtitan.train --job.config_file torchtitan.toml",
        notes=tuple(_notes(run)),
    )


def _sections(run: Run) -> Mapping[str, Mapping[str, Any]]:
    degrees, training = run.degrees, run.problem.training
    is_piped, shards = degrees.pipeline > 1, degrees.zero > 1
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": 1 if shards or degrees.zero else degrees.data,
        "data_parallel_shard_degree": degrees.data if shards else 1,
        "fsdp_reshard_after_forward": "always" if degrees.zero == 3 else "never",
        "tensor_parallel_degree": degrees.tensor,
        "enable_async_tensor_parallel": training.async_tensor_parallel and degrees.tensor > 1,
        "context_parallel_degree": degrees.context,
        "pipeline_parallel_degree": degrees.pipeline,
    }
    if is_piped:
        parallelism["pipeline_parallel_schedule"] = SCHEDULES[run.plan.schedule.kind]
        parallelism["pipeline_parallel_microbatch_size"] = degrees.micro_batch
        parallelism["module_fqns_per_model_part"] = _parts(run)
    # The micro-batches of a pipeline are cut from the local batch; without one they are accumulated.
    local = degrees.micro_batch * (degrees.accumulation_steps if is_piped else 1)
    numbers: dict[str, Any] = {"local_batch_size": local, "global_batch_size": training.global_batch}
    if degrees.sequence_length is not None:
        numbers["seq_len"] = degrees.sequence_length
    narrow = "bfloat16" if run.problem.precision == "bf16" else "float32"
    numbers |= {"mixed_precision_param": narrow, "mixed_precision_reduce": "float32"}
    return {
        "parallelism": parallelism,
        "training": numbers,
        "activation_checkpoint": {"mode": run.recompute},
    }


def _parts(run: Run) -> list[list[str]]:
    """The modules of each stage, by their names in torchtitan's Llama models."""
    parts = [[f"layers.{layer}" for layer in layers] for layers in run.layers]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


def _notes(run: Run) -> Iterator[Note]:
    yield Note(about="degrees, stages, batch, ZeRO, recomputation, precision", kept="exact", text="as the plan says")
    if run.degrees.pipeline > 1:
        what = "modules of stages are named as in torchtitan's Llama models; rename them for others"
        yield Note(about="stages", kept="left to you", text=what)
    yield Note(about="model", kept="left to you", text="[model], the data, the optimizer and checkpoints")
