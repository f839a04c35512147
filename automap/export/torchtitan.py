"""torchtitan: a Python module for `--module` and `--config` of 0.3, and a TOML file for `--job.config_file` of v0.2.2.

Fields: torchtitan/config/configs.py and trainer.py at 0.3.0, torchtitan/config/job_config.py at v0.2.2.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from automap.export.configuration import Export, Note, Run, header, one_line

SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}
"""Schedule of a plan -> name in torch.distributed.pipelining."""
MODULE, FUNCTION = "torchtitan_plan", "plan"
"""What `--module` and `--config` name."""


def write(run: Run) -> Export:
    """The files of a run."""
    return Export(
        target=run.target.name,
        version=run.target.version,
        files={f"{MODULE}.py": _module(run), "torchtitan.toml": _toml(run)},
        launch=f"{run.torchrun} -m torchtitan.train --module {MODULE} --config {FUNCTION}",
        notes=tuple(_notes(run)),
    )


def _toml(run: Run) -> str:
    """The file of v0.2.2."""
    launch = f"{run.torchrun} -m torchtitan.train --job.config_file torchtitan.toml"
    yours = "Model, data, optimizer and checkpoints are yours: add [model], [training].dataset and so on."
    text = header(run, [yours, launch], version="torchtitan v0.2.2, the last one that reads TOML")
    for section, entries in _sections(run).items():
        text += f"\n[{section}]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in entries.items())
    return text


def _module(run: Run) -> str:
    """The module of 0.3, which keeps of a recipe what a plan does not decide."""
    sections = _sections(run)
    way, numbers = {**sections["parallelism"]}, {**sections["training"]}
    is_asynchronous = way.pop("enable_async_tensor_parallel")
    if run.degrees.tensor > 1:
        way["enable_sequence_parallel"] = run.degrees.sequence_parallel
    if run.degrees.pipeline > 1:
        way["module_fqns_per_model_part"] = _parts(run, head="lm_head")
    if max(run.degrees.pipeline, run.degrees.expert) > 1:
        # CUDA graphs go there neither with pipelines nor with the all-to-all of recipes with experts.
        numbers["disable_cuda_graphs"] = True
    yours = "The recipe with the model, the data, the optimizer and checkpoints is yours: import it as `recipe`."
    lines = [
        header(run, [yours], version="torchtitan 0.3.0"),
        "from dataclasses import replace\n",
        "from torchtitan.config import ParallelismConfig",
        *(["from torchtitan.distributed.activation_checkpoint import FullAC"] if run.recompute == "full" else []),
        f"# Put the recipe of {one_line(run.plan.model.name)} in place of this one, which is that of Llama 3 8B.",
        "from torchtitan.models.llama3.config_registry import llama3_8b as recipe",
        "from torchtitan.trainer import Trainer\n\n",
        f"def {FUNCTION}() -> Trainer.Config:",
        "    config = recipe()",
        "    return replace(",
        "        config,",
        "        parallelism=ParallelismConfig(",
        *(f"            {name}={value!r}," for name, value in way.items()),
        "        ),",
        "        training=replace(",
        "            config.training,",
        *(f"            {name}={value!r}," for name, value in numbers.items()),
        "        ),",
        f"        activation_checkpoint={'FullAC.Config()' if run.recompute == 'full' else None},",
        *(["        # Asynchronous tensor parallelism needs compiled blocks.",
           "        compile=replace(config.compile, enable=True, enable_async_tensor_parallel=True),"]
          if is_asynchronous else []),
        "    )\n",
    ]  # fmt: skip
    return "\n".join(lines)


def _sections(run: Run) -> Mapping[str, Mapping[str, Any]]:
    degrees, training = run.degrees, run.problem.training
    is_piped, shards = degrees.pipeline > 1, degrees.zero > 0
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": 1 if shards else degrees.data,
        "data_parallel_shard_degree": degrees.data if shards else 1,
        "fsdp_reshard_after_forward": "always" if degrees.zero == 3 else "never",
        "tensor_parallel_degree": degrees.tensor,
        "enable_async_tensor_parallel": training.async_tensor_parallel and degrees.tensor > 1,
        "context_parallel_degree": degrees.context,
        "expert_parallel_degree": degrees.expert,
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


def _parts(run: Run, head: str = "output") -> list[list[str]]:
    """The modules of each stage, by their names in torchtitan's Llama models.

    Args:
        head: the name of the last product, which differs between versions.
    """
    parts = [[f"layers.{layer}" for layer in layers] for layers in run.layers]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", head]
    return parts


def _notes(run: Run) -> Iterator[Note]:
    yield Note(about="degrees, stages, batch, ZeRO, recomputation, precision", kept="exact", text="as the plan says")
    if run.degrees.pipeline > 1:
        what = "modules of stages are named as in torchtitan's Llama models; rename them for others"
        yield Note(about="stages", kept="left to you", text=what)
    yield Note(
        about="model",
        kept="left to you",
        text=f"the recipe, or [model]: the model, the data, the optimizer{run.other_optimizer} and checkpoints",
    )
