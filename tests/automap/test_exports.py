"""Exports read back by the rules of each trainer's own parser; the numbers are those of the plan."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import trainer_ranks
import yaml
from small_graphs import build_mlp
from torch.distributed.pipelining.schedules import FORWARD, _Action, _add_send_recv
from transformers import TrainingArguments

from automap.cluster import parse_cluster
from automap.errors import PlanError, ProblemError
from automap.export import plan_loader
from automap.export.export import REPORT, WRITERS, export, save
from automap.plan import Plan, model_ref, parse_devices
from automap.price.estimate import annotate
from automap.price.evaluator import Evaluator
from automap.price.plan_reader import lower_plan
from automap.price.plan_writer import to_plan
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.space.stated_strategy import Strategy, hand_made
from automap.space.target_limits import plan_space
from automap.space.templates import templates
from ir import zoo
from ir.zoo.net import Net

GPT = "gpt:layers=4,hidden=64,heads=4,seq_len=32,vocab_size=102"
MODELS = {
    "gpt": (GPT, {}),
    "long": (GPT, {"cp": 2}),
    "moe": ("moe:layers=4,hidden=64,heads=4,kv_heads=2,ffn=128,experts=4,seq_len=32,vocab_size=96", {}),
    "resnet": ("resnet:blocks=2-2,width=8,image_size=32,num_classes=16", {}),
    "first dense": (
        "moe:layers=4,hidden=64,heads=4,kv_heads=2,ffn=128,experts=4,dense_layers=1,seq_len=32,vocab_size=96", {},
    ),
}  # fmt: skip
CASES = [
    (model, target)
    for model in MODELS
    for target in WRITERS
    if model != "first dense" or target == "megatron-core"
    if model != "resnet" or target not in ("megatron-core", "torchtitan")
    if model != "long" or target not in ("deepspeed", "pytorch", "automap")
]
"""Models without attention are not for all; some split no sequence."""
DEVICES, BATCH, LENGTH = 8, 16, 32


@functools.cache
def space_of(model: str, target: str) -> PlanSpace:
    name, fix = MODELS[model]
    training = {"global_batch": BATCH, "target": target}
    return plan_space(Problem.build(zoo.build(name), parse_cluster("2x4xA100"), training, {"fix": fix}))


def exported(space: PlanSpace, values: Any, target: str) -> tuple[Plan, Mapping[str, str]]:
    plan = annotate(space.decode(values), space.lowered(values), space.evaluator)
    return plan, export(plan, space.problem, target).files


def layers_of(plan: Plan, problem: Problem) -> list[int]:
    """[stages] number of layers, counted by the names of their operators."""
    names = [op.name for op in problem.graph.operators]
    found = []
    for stage in plan.stages:
        inside = names[names.index(stage.operators[0]) : names.index(stage.operators[1]) + 1]
        found.append(len({name.split(".")[1].split("/")[0] for name in inside if name.startswith(("h.", "layers."))}))
    return found


# -- Megatron-LM: flags of megatron/training/arguments.py

NUMBERS = (
    "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size", "expert-model-parallel-size",
    "expert-tensor-parallel-size", "num-layers-per-virtual-pipeline-stage", "micro-batch-size", "global-batch-size",
    "recompute-num-layers", "num-layers", "hidden-size", "num-attention-heads", "seq-length", "max-position-embeddings",
    "num-experts", "moe-router-topk", "make-vocab-size-divisible-by", "ffn-hidden-size", "moe-ffn-hidden-size",
    "moe-shared-expert-intermediate-size", "kv-channels", "num-query-groups",
)  # fmt: skip
CHOICES = {
    "cp-comm-type": ("p2p", "a2a", "allgather", "a2a+p2p"),
    "moe-token-dispatcher-type": ("allgather", "alltoall", "flex"),
    "moe-flex-dispatcher-backend": ("deepep", "hybridep"),
    "recompute-granularity": ("full", "selective"),
    "recompute-method": ("uniform", "block"),
    "recompute-modules": ("core_attn",),
    "fp8-format": ("e4m3", "hybrid"),
    "fp8-recipe": ("tensorwise", "delayed", "mxfp8", "blockwise"),
    "optimizer": ("adam", "sgd"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "position-embedding-type": ("learned_absolute", "rope", "mrope", "relative", "none"),
}
SWITCHES = (
    "sequence-parallel", "use-distributed-optimizer", "overlap-grad-reduce", "overlap-param-gather", "tp-comm-overlap",
    "bf16", "fp16", "accumulate-allreduce-grads-in-fp32", "grad-reduce-in-bf16", "disable-bias-linear", "swiglu",
    "group-query-attention",
    "untie-embeddings-and-output-weights", "add-qkv-bias", "qk-layernorm",
    "moe-grouped-gemm", "overlap-moe-expert-parallel-comm", "delay-wgrad-compute",
)  # fmt: skip


def megatron_arguments(script: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    for name in NUMBERS:
        parser.add_argument(f"--{name}", type=int)
    for name, choices in CHOICES.items():
        parser.add_argument(f"--{name}", choices=choices)
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--pipeline-model-parallel-layout")
    parser.add_argument("--moe-layer-freq")
    parser.add_argument("--sgd-momentum", type=float)
    words = shlex.split(script.replace("MODEL_PARALLEL_ARGS=(", " ").replace("MODEL_ARGS=(", " "), comments=True)
    flags = [word for word in words[: words.index("torchrun")] if word not in (")", "#!/bin/bash")]
    return parser.parse_args(flags[2:])


def check_megatron(plan: Plan, problem: Problem, files: Mapping[str, str]) -> None:
    found = megatron_arguments(files["megatron.sh"])
    mapped = yaml.safe_load(files["megatron.yaml"])["MODEL_ARGS"]
    given = {key: value for key, value in vars(found).items() if value not in (None, False)}
    assert {key.removeprefix("--").replace("-", "_"): value for key, value in mapped.items()} == given
    (degrees,) = plan.degrees
    tp, pp, cp = found.tensor_model_parallel_size, found.pipeline_model_parallel_size, found.context_parallel_size
    # validate_args
    data = DEVICES // (tp * pp * cp)
    assert data * tp * pp * cp == DEVICES
    assert found.global_batch_size % (found.micro_batch_size * data) == 0
    assert found.seq_length % (2 * cp if cp > 1 else 1) == 0
    assert found.num_attention_heads % tp == 0
    # Gradients are in fp32 beside bf16 weights, unless they are reduced in bf16.
    is_narrow = found.fp16 or (found.bf16 and found.grad_reduce_in_bf16)
    is_wide = found.accumulate_allreduce_grads_in_fp32 or not is_narrow
    assert problem.state_bytes[1] == (4.0 if is_wide else 2.0)
    # _vocab_size_with_padding of the tokenizer: the same as the rows of the plan's embedding.
    multiple = found.make_vocab_size_divisible_by * tp
    own = int(problem.graph.name.split("vocab_size=")[1].split(",")[0]) if "vocab_size=" in problem.graph.name else 102
    rows = {problem.graph.tensors[op.inputs[0]].shape[0] for op in problem.graph if op.kind == "Gather"}
    assert -(-own // multiple) * multiple in rows
    counts = layers_of(plan, problem)
    virtual = 1
    if found.pipeline_model_parallel_layout:
        assert found.num_layers_per_virtual_pipeline_stage is None
        parts = found.pipeline_model_parallel_layout.split("|")
        virtual = len(parts) // pp
        assert virtual * pp == len(parts)
        assert "".join(parts) == "E" + "t" * found.num_layers + "L"
        assert [part.count("t") for part in parts] == counts
    else:
        each = found.num_layers // pp
        assert each * pp == found.num_layers
        if found.num_layers_per_virtual_pipeline_stage:
            virtual = each // found.num_layers_per_virtual_pipeline_stage
            assert virtual * found.num_layers_per_virtual_pipeline_stage == each
        assert counts == [each // virtual] * (pp * virtual)
    assert virtual == 1 or pp > 1
    if found.num_experts:
        assert found.num_experts % found.expert_model_parallel_size == 0
        assert data * cp * tp % (found.expert_model_parallel_size * found.expert_tensor_parallel_size) == 0
        assert found.sequence_parallel or tp == 1
        # moe_freq_type evaluates the list.
        has_experts = eval(found.moe_layer_freq) if found.moe_layer_freq else [1] * found.num_layers
        scopes = {op.name.split(".mlp")[0] for op in problem.graph if ".experts" in op.name}
        assert has_experts == [int(f"layers.{number}" in scopes) for number in range(found.num_layers)]
    assert found.disable_bias_linear == bool(found.num_experts)
    assert found.recompute_granularity == "full" or found.recompute_num_layers is None
    # The numbers of the plan.
    assert (data, tp, cp, pp, virtual) == (
        degrees.data,
        degrees.tensor,
        degrees.context,
        degrees.pipeline,
        degrees.virtual_stages,
    )
    assert found.global_batch_size // found.micro_batch_size // data == plan.num_micro_batches
    assert found.use_distributed_optimizer == (degrees.zero == 1)
    assert found.sequence_parallel == degrees.sequence_parallel
    assert (found.expert_model_parallel_size or 1) == degrees.expert
    assert (found.recompute_granularity is not None) == any(stage.recompute for stage in plan.stages)
    assert (found.num_layers, found.hidden_size, found.num_attention_heads, found.seq_length) == (4, 64, 4, LENGTH)


# -- torchtitan: fields of torchtitan/config/configs.py at 0.3.0, and of torchtitan/config/job_config.py at v0.2.2

TITAN = {
    "parallelism": {
        "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward",
        "tensor_parallel_degree", "enable_async_tensor_parallel", "pipeline_parallel_degree",
        "module_fqns_per_model_part", "pipeline_parallel_schedule", "pipeline_parallel_microbatch_size",
        "context_parallel_degree", "expert_parallel_degree",
    },
    "training": {"local_batch_size", "global_batch_size", "seq_len", "mixed_precision_param", "mixed_precision_reduce"},
    "activation_checkpoint": {"mode"},
}  # fmt: skip
NEW_TITAN = {
    "parallelism": TITAN["parallelism"] - {"enable_async_tensor_parallel"} | {"enable_sequence_parallel"},
    "training": TITAN["training"] | {"disable_cuda_graphs"},
}


@dataclass
class TitanTraining:
    """The numbers of a recipe, which the module replaces."""

    local_batch_size: int = 8
    global_batch_size: int = -1
    seq_len: int = 2048
    mixed_precision_param: str = "bfloat16"
    mixed_precision_reduce: str = "float32"
    disable_cuda_graphs: bool = False


@dataclass
class TitanConfig:
    """A recipe."""

    parallelism: dict[str, Any]
    training: TitanTraining
    activation_checkpoint: str | None = "selective"


def titan_module(text: str) -> TitanConfig:
    """The configuration of 0.3, with stand-ins for the classes of torchtitan."""
    names = ["", ".config", ".distributed", ".distributed.activation_checkpoint", ".models", ".models.llama3",
             ".models.llama3.config_registry", ".trainer"]  # fmt: skip
    made = {f"torchtitan{name}": ModuleType(f"torchtitan{name}") for name in names}
    made["torchtitan.config"].ParallelismConfig = dict  # type: ignore[attr-defined]
    made["torchtitan.distributed.activation_checkpoint"].FullAC = SimpleNamespace(  # type: ignore[attr-defined]
        Config=lambda: "full"
    )
    recipe = functools.partial(TitanConfig, {"tensor_parallel_degree": 99}, TitanTraining())
    made["torchtitan.models.llama3.config_registry"].llama3_8b = recipe  # type: ignore[attr-defined]
    made["torchtitan.trainer"].Trainer = SimpleNamespace(Config=TitanConfig)  # type: ignore[attr-defined]
    inside: dict[str, Any] = {}
    with mock.patch.dict(sys.modules, made):
        exec(text, inside)
    found: TitanConfig = inside["plan"]()
    return found


def check_new_torchtitan(files: Mapping[str, str]) -> None:
    """The module says the same as the TOML file."""
    new, old = titan_module(files["torchtitan_plan.py"]), tomllib.loads(files["torchtitan.toml"])
    assert new.parallelism.keys() <= NEW_TITAN["parallelism"]
    assert new.activation_checkpoint == (None if old["activation_checkpoint"]["mode"] == "none" else "full")
    # Trainer.Config._validate_cuda_graphs
    without = max(new.parallelism[f"{kind}_parallel_degree"] for kind in ("pipeline", "expert")) > 1
    assert new.training.disable_cuda_graphs == without
    assert {**vars(new.training), **old["training"]} == vars(new.training)
    way = {name: value for name, value in old["parallelism"].items() if name != "enable_async_tensor_parallel"}
    renamed = [["lm_head" if name == "output" else name for name in part]
               for part in way.pop("module_fqns_per_model_part", [])]  # fmt: skip
    assert new.parallelism.get("module_fqns_per_model_part", []) == renamed
    assert {**new.parallelism, **way} == new.parallelism


def check_torchtitan(plan: Plan, problem: Problem, files: Mapping[str, str]) -> None:
    check_new_torchtitan(files)
    found = tomllib.loads(files["torchtitan.toml"])
    assert found.keys() == TITAN.keys()
    assert all(found[section].keys() <= TITAN[section] for section in found)
    (degrees,) = plan.degrees
    way, training = found["parallelism"], found["training"]
    replicate, shard = way["data_parallel_replicate_degree"], way["data_parallel_shard_degree"]
    tp, cp, pp = way["tensor_parallel_degree"], way["context_parallel_degree"], way["pipeline_parallel_degree"]
    # ParallelDims._validate, and parallelize_llama
    assert replicate * shard * cp * tp * pp == DEVICES
    assert replicate == 1 or (shard, cp, tp, pp) == (1, 1, 1, 1)
    ep = way["expert_parallel_degree"]
    assert shard * cp * tp % ep == 0
    assert ep == 1 or tp == 1
    assert ep == degrees.expert
    assert tp * cp == 1 or training["seq_len"] % (tp * 2 * cp) == 0
    data = replicate * shard
    # The trainer accumulates what its local batch leaves of the global one.
    assert training["global_batch_size"] % (training["local_batch_size"] * data) == 0
    steps = training["global_batch_size"] // training["local_batch_size"] // data
    if pp > 1:
        assert steps == 1
        assert training["local_batch_size"] % way["pipeline_parallel_microbatch_size"] == 0
        steps = training["local_batch_size"] // way["pipeline_parallel_microbatch_size"]
        parts = way["module_fqns_per_model_part"]
        assert [name for part in parts for name in part] == [
            "tok_embeddings",
            *(f"layers.{i}" for i in range(4)),
            "norm",
            "output",
        ]
        assert [sum(name.startswith("layers.") for name in part) for part in parts] == layers_of(plan, problem)
        assert len(parts) == pp * degrees.virtual_stages
        assert steps >= pp
        assert (way["pipeline_parallel_schedule"] == "Interleaved1F1B") == (degrees.virtual_stages > 1)
    assert (data, tp, cp, pp, steps) == (
        degrees.data,
        degrees.tensor,
        degrees.context,
        degrees.pipeline,
        plan.num_micro_batches,
    )
    if shard > 1:
        # Stages of torch scatter gradients once a step.
        assert {"always": 3, "never": 1 if pp > 1 else 2}[way["fsdp_reshard_after_forward"]] == degrees.zero
    assert found["activation_checkpoint"]["mode"] == ("full" if any(s.recompute for s in plan.stages) else "none")


# -- DeepSpeed and accelerate


def check_deepspeed(plan: Plan, problem: Problem, files: Mapping[str, str]) -> None:
    found = json.loads(files["deepspeed.json"])
    # Releases clip by other defaults; transformers refuses another norm than its own, of the same default.
    assert found["gradient_clipping"] == 1.0
    (degrees,) = plan.degrees
    tp = found.get("tensor_parallel", {"autotp_size": 1})["autotp_size"]
    micro, steps = found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]
    pp = found.get("pipeline", {"stages": 1})["stages"]
    data = DEVICES // tp // pp
    # DeepSpeedConfig._batch_assertion, which takes the ranks that split weights for replicas
    assert found.get("train_batch_size") == (micro * steps * data if tp == 1 else None)
    assert micro * steps * data == problem.training.global_batch
    assert (data, tp, pp, steps) == (degrees.data, degrees.tensor, degrees.pipeline, plan.num_micro_batches)
    assert found["zero_optimization"]["stage"] == degrees.zero
    # AutoTP goes with no ZeRO 3 and no pipeline, PipelineEngine with ZeRO 0 and 1.
    assert tp == 1 or (degrees.zero < 3 and pp == 1)
    assert pp == 1 or degrees.zero < 2
    assert found["bf16"]["enabled"] != found["fp16"]["enabled"]
    if pp == 1:
        check_training_arguments(plan, files)
        assert json.loads(files["training_arguments.json"])["deepspeed"] in files
        return
    assert files.keys() == {"deepspeed.json", "deepspeed_pipeline.py", "plan_loader.py", "plan_stages.py", REPORT}
    again = found["pipeline"]["recompute"]
    assert again == (found["pipeline"]["layers"] if any(stage.recompute for stage in plan.stages) else [])
    layers = [sum(path in found["pipeline"]["layers"] for path in stage) for stage in found["pipeline"]["modules"]]
    assert layers == layers_of(plan, problem)


def check_training_arguments(plan: Plan, files: Mapping[str, str]) -> None:
    found = json.loads(files["training_arguments.json"])
    assert found.keys() <= {field.name for field in fields(TrainingArguments)}
    batch = found["per_device_train_batch_size"] * plan.degrees[0].data * found["gradient_accumulation_steps"]
    assert batch == BATCH
    assert found["bf16"] != found["fp16"]
    again = found["gradient_checkpointing"] or found.get("fsdp_config", {}).get("activation_checkpointing", False)
    assert again == any(stage.recompute for stage in plan.stages)


ACCELERATE = {
    "compute_environment", "debug", "distributed_type", "downcast_bf16", "enable_cpu_affinity", "machine_rank",
    "main_training_function", "mixed_precision", "num_machines", "num_processes", "rdzv_backend", "same_network",
    "use_cpu", "main_process_ip", "main_process_port", "fsdp_config", "parallelism_config",
}  # fmt: skip
"""Keys of accelerate's `ClusterConfig`; it refuses others."""


def check_accelerate(plan: Plan, problem: Problem, files: Mapping[str, str]) -> None:
    found = yaml.safe_load(files["accelerate.yaml"])
    assert found.keys() <= ACCELERATE
    arguments = json.loads(files["training_arguments.json"])
    (degrees,) = plan.degrees
    sizes = {
        key.removeprefix("parallelism_config_"): value for key, value in found.get("parallelism_config", {}).items()
    }
    fsdp = found.get("fsdp_config")
    tp, cp = sizes.get("tp_size", 1), sizes.get("cp_size", 1)
    shard = sizes.get("dp_shard_size", DEVICES)
    # ParallelismConfig.__post_init__ and _validate_accelerator
    assert sizes.get("dp_replicate_size", 1) * shard * tp * cp == DEVICES == found["num_processes"]
    assert found["distributed_type"] == ("FSDP" if fsdp else "MULTI_GPU")
    assert not sizes or (fsdp and fsdp["fsdp_version"] == 2 and shard * cp > 1)
    assert (shard, tp, cp) == (degrees.data, degrees.tensor, degrees.context)
    check_training_arguments(plan, files)
    assert arguments["gradient_accumulation_steps"] == plan.num_micro_batches
    # Both files say the same of FSDP.
    assert fsdp == ({f"fsdp_{k}": v for k, v in arguments["fsdp_config"].items()} if arguments.get("fsdp") else None)
    assert (
        fsdp is None or degrees.data * degrees.context == 1 or fsdp["fsdp_reshard_after_forward"] == (degrees.zero == 3)
    )


# -- plain PyTorch: what plan_loader.py reads; that it trains alike is tested in test_plan_loader.py


def check_pytorch(plan: Plan, problem: Problem, files: Mapping[str, str]) -> None:
    found = json.loads(files["pytorch.json"])
    (degrees,) = plan.degrees
    mesh = dict(zip(found["mesh"]["dim_names"], found["mesh"]["shape"], strict=True))
    assert (mesh["pipe"], mesh["tensor"]) == (degrees.pipeline, degrees.tensor)
    assert mesh["replicate"] * mesh["shard"] == degrees.data
    assert (mesh["shard"] > 1) == (degrees.zero > 0 and degrees.data > 1)
    assert found["micro_batch"] * degrees.data * found["num_micro_batches"] == found["global_batch"] == BATCH
    assert found["num_micro_batches"] == plan.num_micro_batches
    assert found["zero"] == degrees.zero
    # The linear layers of a split model are split, the outer ones in columns.
    globs = found["tensor_parallel"]
    for path in {op.scope for op in problem.graph if op.kind == "MatMul" and op.scope.startswith("h.")}:
        styles = [globs[glob]["style"] for glob in globs if plan_loader.matches(path, glob)]
        style = "RowwiseParallel" if path.endswith("c_proj") else "ColwiseParallel"
        assert styles == ([style] if degrees.tensor > 1 and not path.endswith(".attn") else [])
    again = any(stage.recompute for stage in plan.stages)
    assert found["recompute"] == ([] if not again else found["layers"] or found["recompute"])
    if degrees.pipeline > 1:
        layers = [sum(path in found["layers"] for path in stage) for stage in found["stages"]]
        assert layers == layers_of(plan, problem) or not found["layers"]
        # torch itself reads and completes the order.
        order = {rank: [_Action.from_str(word) for word in line.split(",")]
                 for rank, line in enumerate(files["schedule.csv"].splitlines())}  # fmt: skip
        number = degrees.pipeline * degrees.virtual_stages
        comms = _add_send_recv(order, lambda stage: stage % degrees.pipeline, number)
        made = [action for some in comms.values() for action in some if action.computation_type == FORWARD]
        assert len(made) == number * plan.num_micro_batches


# -- ONNX: onnx_devices.json; that it makes valid models is tested in test_onnx_devices.py


def check_onnx(plan: Plan, problem: Problem, files: Mapping[str, str]) -> None:
    found = json.loads(files["onnx_devices.json"])
    assert found["configuration"]["num_devices"] == DEVICES
    assert found["metadata"]["automap.num_micro_batches"] == str(plan.num_micro_batches)
    uses = [use for some in found["tensors"].values() for use in some]
    # Every stage has weights, whose shards are on its devices, each on one.
    assert {use["stage"] for use in uses} | {len(plan.stages) - 1} == set(range(len(plan.stages)))
    for use in uses:
        held = sorted(device for shard in use["shards"] for device in shard)
        assert held == list(parse_devices(plan.stages[use["stage"]].devices))
    names = {tensor.name for tensor in problem.graph.parameters}
    fused = {source for source, *_ in problem.graph.pieces.values()}
    assert names - found["tensors"].keys() <= problem.graph.pieces.keys() | fused


def check_own(plan: Plan, problem: Problem, files: Mapping[str, str]) -> None:
    assert Plan.from_json(json.loads(files["automap_plan.json"])) == plan
    assert f'MODEL = "zoo:{plan.model.name}"' in files["train.py"]


CHECKS = {
    "automap": check_own,
    "onnx": check_onnx,
    "pytorch": check_pytorch,
    "megatron-core": check_megatron,
    "torchtitan": check_torchtitan,
    "deepspeed": check_deepspeed,
    "accelerate": check_accelerate,
}


@pytest.mark.parametrize(("model", "target"), CASES)
def test_what_is_read_back_is_the_plan(model: str, target: str) -> None:
    space = space_of(model, target)
    for values in space.random_batch(np.random.default_rng(4), 8).tolist():
        plan, files = exported(space, values, target)
        CHECKS[target](plan, space.problem, files)
        report = json.loads(files[REPORT])
        assert report["target"] == target
        kept = [note["kept"] for note in report["notes"]]
        assert kept.count("exact") == 1 and "rounded" not in kept


def notes_of(files: Mapping[str, str], kept: str) -> list[dict[str, Any]]:
    return [note for note in json.loads(files[REPORT])["notes"] if note["kept"] == kept]


def test_a_vocabulary_is_padded_before_the_search() -> None:
    space = space_of("gpt", "megatron-core")
    # 102 tokens become 128, which every tp divides; the oracle is a model that has so many.
    padded = zoo.build(MODELS["gpt"][0].replace("vocab_size=102", "vocab_size=128"))
    training = replace(space.problem.training, target="any")
    evaluator = Evaluator(Problem.build(padded, space.problem.cluster, training))
    assert evaluator.problem.graph.num_parameters == space.problem.graph.num_parameters
    seen = set()
    for values in space.random_batch(np.random.default_rng(5), 12).tolist():
        plan, _ = exported(space, values, "megatron-core")
        same = replace(plan, model=model_ref(evaluator.problem.graph), training=training)
        assert plan.estimate is not None
        step_time_s = evaluator.evaluate(lower_plan(same, evaluator)).step_time_s
        assert step_time_s == pytest.approx(plan.estimate.step_time_s, rel=1e-9)
        seen.add(plan.degrees[0].tensor)
    assert {1, 4} <= seen


def test_a_vocabulary_that_does_not_divide_is_rounded_in_a_plan_for_any_trainer() -> None:
    training = {"global_batch": BATCH, "trainer": "megatron-core"}
    evaluator = Evaluator(Problem.build(zoo.build(MODELS["gpt"][0]), parse_cluster("2x4xA100"), training))
    for tp in (1, 2, 4):
        plan = to_plan(hand_made(evaluator, Strategy(tp=tp, sequence_parallel=tp > 1)), evaluator)
        rounded = notes_of(export(plan, evaluator.problem, "megatron-core").files, "rounded")
        assert [note["about"] for note in rounded] == ["vocabulary"] * (tp == 4)
        # A part of the product in place of the whole one.
        assert all(note["cost_s"] < 0.0 for note in rounded)


def test_pipelines_of_torchtitan_scatter_gradients_once() -> None:
    space = space_of("gpt", "torchtitan")
    seen = set()
    for values in space.random_batch(np.random.default_rng(6), 24).tolist():
        plan, _ = exported(space, values, "torchtitan")
        degrees = plan.degrees[0]
        seen.add((degrees.pipeline > 1, degrees.zero))
        if degrees.pipeline > 1 and degrees.zero == 1:
            stages = tuple(replace(stage, zero=replace(stage.zero, stage=2)) for stage in plan.stages)
            with pytest.raises(PlanError, match="has no ZeRO 2 there"):
                export(replace(plan, stages=stages), space.problem, "torchtitan")
    assert {(True, 1), (False, 2), (False, 3)} <= seen <= {(True, 0), (True, 1), *((False, n) for n in (0, 2, 3))}


def test_groups_of_replicas_are_called_rounded_and_priced_as_one_group() -> None:
    cluster, training = parse_cluster("2x4xV100-16GB@25Gbit"), {"global_batch": BATCH}
    problem = Problem.build(zoo.build(MODELS["gpt"][0]), cluster, training, {"fix": {"pp": 1}})
    space = PlanSpace(problem)
    whole = Problem.build(problem.graph, cluster, training, {"fix": {"dp": 8, "tp": 1, "pp": 1}})
    for shape, values in templates(space):
        if (shape.dp, shape.tp, shape.num_micro_batches) != (2, 4, 1):
            continue
        plan = annotate(space.decode(values), space.lowered(values), space.evaluator)
        if set(plan.degrees[0].axes.values()) == {"data"} and plan.stages[0].zero.stage == 0:
            (note,) = notes_of(export(plan, problem, "deepspeed").files, "rounded")
            one = PlanSpace(whole)
            prices = [
                one.price(np.array([v]))[0, 0]
                for s, v in templates(one)
                if s.num_micro_batches == 1 and not any(v[one.first.recompute : one.first.signature])
            ]
            assert plan.estimate is not None
            assert plan.estimate.step_time_s + note["cost_s"] == pytest.approx(min(prices), rel=1e-6)
            return
    raise AssertionError("no template has two axes of replicas")


def test_what_a_target_cannot_express_is_refused_by_name(tmp_path: Path) -> None:
    space = space_of("gpt", "megatron-core")
    shape = next(s for s in space.shapes if (s.pp, s.tp, s.virtual) == (2, 2, 1))
    values = next(v.tolist() for v in space.random_batch(np.random.default_rng(6), 400) if space.shape(v) == shape)
    plan, _ = exported(space, values, "megatron-core")
    with pytest.raises(PlanError) as fault:
        export(plan, space.problem, "deepspeed")
    assert "no pipeline beside tensor" in str(fault.value)
    with pytest.raises(PlanError, match="no pipelines"):
        export(plan, space.problem, "accelerate")
    assert fault.value.repair.startswith("Search with --target deepspeed,")
    assert (fault.value.field, fault.value.value) == ("target", "deepspeed")
    with pytest.raises(ProblemError, match="unknown target") as unknown:
        export(plan, space.problem, "any")
    assert "any," not in unknown.value.repair and "deepspeed" in unknown.value.repair
    with pytest.raises(ProblemError, match="unknown target") as unknown:
        export(plan, space.problem, "megatron")
    assert unknown.value.field == "target"
    narrow = replace(space.problem, training=replace(space.problem.training, precision="fp16"))
    with pytest.raises(PlanError, match="torchtitan cannot train in fp16") as fault:
        export(plan, narrow, "torchtitan")
    assert "--precision bf16 or fp32" in fault.value.repair


@pytest.mark.parametrize("target", ["megatron-core", "torchtitan"])
def test_trainers_of_transformers_get_no_other_model(target: str) -> None:
    problem = Problem.build(
        zoo.build("resnet:blocks=1-1-1-1,image_size=64"), parse_cluster("4xA100"), {"global_batch": BATCH}
    )
    space = PlanSpace(problem)
    plan = space.decode(next(values for _, values in templates(space)))
    with pytest.raises(ProblemError, match="trains transformers, and the model has no attention") as fault:
        export(plan, problem, target)
    assert fault.value.field == "target"


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    space = space_of("gpt", "deepspeed")
    plan, files = exported(space, space.random(np.random.default_rng(0)), "deepspeed")
    save(export(plan, space.problem, "deepspeed"), tmp_path / "new" / "folder")
    assert {path.name: path.read_text() for path in (tmp_path / "new" / "folder").iterdir()} == dict(files)
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="cannot be written"):
        save(export(plan, space.problem, "deepspeed"), tmp_path / "file")


def test_the_script_of_our_own_trainer_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two functions that the user writes are filled in."""
    training = {"global_batch": 4, "target": "automap", "precision": "fp32"}
    space = plan_space(Problem.build(zoo.build(trainer_ranks.MODEL), parse_cluster("1xcpu"), training))
    plan = space.decode(next(values for _, values in templates(space)))
    save(export(plan, space.problem, "automap"), tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("own_script", tmp_path / "train.py")
    assert spec is not None and spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with pytest.raises(NotImplementedError, match="the network"):
        script.main()
    ids = torch.arange(8).repeat(4, 1)
    script.build, script.batch, script.STEPS = trainer_ranks.build, lambda step, samples: (ids[:samples],) * 2, 2
    script.main()
    assert (tmp_path / "checkpoint").is_dir()


def test_a_plan_for_any_target_exports_where_it_happens_to_fit() -> None:
    problem = Problem.build(zoo.build(GPT), parse_cluster("8xA100"), {"global_batch": BATCH})
    space = PlanSpace(problem)
    shape = next(s for s in space.shapes if (s.pp, s.tp, s.num_micro_batches) == (1, 1, 2))
    plan = space.decode(next(values for of, values in templates(space) if of == shape))
    assert json.loads(export(plan, problem, "deepspeed").files["deepspeed.json"])["train_micro_batch_size_per_gpu"] == 1


@pytest.mark.parametrize("target", ["deepspeed", "accelerate"])
def test_work_that_all_ranks_repeat_is_no_data_parallelism(target: str) -> None:
    """This holds in a network without equal layers too: a trainer of it has replicas on all devices, or refuses."""
    problem = Problem.build(build_mlp((96, 64, 32, 16)), parse_cluster("4xA100"), {"global_batch": BATCH})
    space = PlanSpace(problem)
    plan = space.decode(next(v for s, v in templates(space) if s.dp == 4 and s.pp == 1 and s.tp == 1))
    export(plan, problem, target)
    (stage,) = plan.stages
    repeated = replace(plan, stages=(replace(stage, mesh=(("tp", 4),), batch_axes=()),))
    with pytest.raises(PlanError, match="no axis for repetition"):
        export(repeated, problem, target)


@pytest.mark.parametrize(("target", "says"), [("megatron-core", True), ("torchtitan", True), ("pytorch", False)])
def test_layers_that_share_weights_are_left_to_the_user_where_the_trainer_builds_them(target: str, says: bool) -> None:
    """The model is like ALBERT, which calls one layer again and again."""
    parameter = Net.parameter

    def of_first(net: Net, name: str, *shape: int) -> str:
        return parameter(net, re.sub(r"^h\.\d\.", "h.0.", name), *shape)

    for shares in (False, True):
        with mock.patch.object(Net, "parameter", of_first if shares else parameter):
            graph = zoo.build(GPT)
        training = {"global_batch": BATCH, "target": target}
        problem = Problem.build(graph, parse_cluster("4xA100"), training, {"fix": {"pp": 1, "tp": 1}})
        space = plan_space(problem)
        plan = space.decode(next(values for shape, values in templates(space) if shape.dp == 4))
        notes = [note for note in export(plan, problem, target).notes if note.about == "layers that share weights"]
        assert bool(notes) == (shares and says)
        assert all("3 of 4 layers" in note.text and target in note.text for note in notes)
