"""Exports of random plans read by the parsers of the trainers themselves, and the numbers compared with the plans.

Each file that `automap estimate --from` reads is also priced again, and must have the price of its plan; nothing may be
rounded.

Megatron-Core checks its `TransformerConfig` and the layout of pipelines; torchtitan, 0.3 or v0.2.2, its `ConfigManager`
and `ParallelDims`; DeepSpeed its `DeepSpeedConfig`; accelerate its `ClusterConfig` and `ParallelismConfig`;
transformers its `TrainingArguments`; torch reads and completes the orders of pipelines; onnx checks an annotated model
with the weights of the plan. A trainer that cannot be imported is named and left out; torchtitan's recipes need triton.

    python benchmarks/prove_exports.py [PLANS] [--targets NAME …] [--packages FOLDER …]

`--packages` names folders with the unpacked packages, such as `pip install --target FOLDER` makes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import logging
import re
import shlex
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from automap.cluster import parse_cluster
from automap.errors import ProblemError
from automap.export.export import export, save
from automap.export.onnx_devices import planned
from automap.export.reading import read_configuration
from automap.plan import Degrees, Plan
from automap.price.estimate import annotate
from automap.price.evaluator import Evaluator
from automap.price.plan_reader import lower_plan
from automap.problem import Problem
from automap.space.stated_strategy import Strategy, hand_made
from automap.space.target_limits import plan_space
from automap.targets import targets
from ir import zoo

CASES = (
    ("gpt:layers=12,hidden=128,heads=8,seq_len=64,vocab_size=1022", "2x8xA100", 64, {}),
    ("llama:layers=8,hidden=128,heads=8,kv_heads=4,ffn=256,seq_len=64,vocab_size=512", "4x8xH100", 96, {}),
    ("gpt:layers=8,hidden=128,heads=8,seq_len=64,vocab_size=512", "2x8xA100", 32, {"cp": 4}),
    ("moe:layers=8,hidden=128,heads=8,kv_heads=8,ffn=256,experts=8,seq_len=64,vocab_size=512", "2x8xH100", 64, {}),
    ("vit:layers=6,hidden=96,heads=6,image_size=32,patch_size=8,num_classes=12", "8xA100", 48, {}),
    ("t5:layers=4,hidden=64,heads=8,head_size=8,ffn=256,seq_len=64,vocab_size=512", "2x4xA100", 32, {}),
    ("bert:layers=6,hidden=64,heads=4,seq_len=64,vocab_size=512", "6xH100", 36, {}),
)
"""Models, clusters, global batches and hints.fix of the plans."""

LAYER = re.compile(r"(encoder\.|decoder\.)?(h|layers?|block|blocks)\.\d+\b")
"""Path of a layer in the names of operators."""
SAME = 1e-9
"""Largest relative difference of prices, which plans state with ten digits."""
Numbers = Mapping[str, Any]
"""What a parser read: dp, tp, cp, pp, micro_batch, steps, stages and the like; compared where the plan has it too."""


def from_megatron(folder: Path, devices: int) -> Numbers:
    """Megatron-Core's checks of the arguments."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_config import TransformerConfig

    words = shlex.split((folder / "megatron.sh").read_text().replace("=(", "=( "), comments=True)
    flags: dict[str, str] = {}
    for number, word in enumerate(words[: words.index("torchrun")]):
        if word.startswith("--"):
            flags[word] = "" if words[number + 1][:2] in ("--", ")") else words[number + 1]
    tp, pp = (int(flags[f"--{name}-model-parallel-size"]) for name in ("tensor", "pipeline"))
    cp = int(flags["--context-parallel-size"])
    layout, two = flags.get("--pipeline-model-parallel-layout"), ("--encoder-num-layers", "--decoder-num-layers")
    # An encoder and a decoder have one configuration, whose number of layers is that of the encoder.
    num_layers = int(flags["--num-layers"]) if "--num-layers" in flags else int(flags[two[0]])
    every = num_layers + (0 if "--num-layers" in flags else int(flags[two[1]]))
    each = int(flags.get("--num-layers-per-virtual-pipeline-stage", 0))
    virtual = num_layers // pp // each if each else None
    experts = int(flags.get("--num-experts", 0))
    TransformerConfig(
        num_layers=num_layers,
        hidden_size=int(flags["--hidden-size"]),
        num_attention_heads=int(flags["--num-attention-heads"]),
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_model_parallel_layout=layout,
        pipeline_dtype=__import__("torch").bfloat16,
        sequence_parallel="--sequence-parallel" in flags,
        num_moe_experts=experts or None,
        expert_model_parallel_size=int(flags.get("--expert-model-parallel-size", 1)),
        expert_tensor_parallel_size=int(flags.get("--expert-tensor-parallel-size", tp)),
        moe_token_dispatcher_type=flags.get("--moe-token-dispatcher-type", "allgather"),
        recompute_granularity=flags.get("--recompute-granularity"),
        recompute_method=flags.get("--recompute-method"),
        recompute_num_layers=int(flags["--recompute-num-layers"]) if "--recompute-num-layers" in flags else None,
        bf16="--bf16" in flags,
        add_bias_linear="--disable-bias-linear" not in flags,
    )
    stages = [every // pp // (virtual or 1)] * pp * (virtual or 1)
    if layout:
        read = PipelineParallelLayerLayout.from_str(layout, pp)
        rows = [read.layout[c % pp][c // pp] for c in range(pp * read.virtual_pipeline_model_parallel_size)]
        stages = [sum(layer.name == "decoder" for layer in row) for row in rows]
    dp = devices // (tp * pp * cp)
    micro = int(flags["--micro-batch-size"])
    # `_vocab_size_with_padding` of megatron/training, which is not in the package.
    multiple = int(flags["--make-vocab-size-divisible-by"]) * tp
    steps = int(flags["--global-batch-size"]) // micro // dp
    read = {"dp": dp, "tp": tp, "cp": cp, "pp": pp, "ep": int(flags.get("--expert-model-parallel-size", 1))}
    return {**read, "micro_batch": micro, "steps": steps, "stages": stages, "multiple": multiple}


def from_torchtitan(folder: Path, devices: int) -> Numbers:
    """The configuration and `ParallelDims` of the version of torchtitan that is installed."""
    is_toml = importlib.metadata.version("torchtitan").startswith("0.2")
    config, dims = (titan_toml if is_toml else titan_module)(folder, devices)
    way, training = config.parallelism, config.training
    dp = dims.dp_replicate * dims.dp_shard
    steps, micro = training.global_batch_size // (training.local_batch_size * dp), training.local_batch_size
    stages = None
    if dims.pp > 1:
        from torch.distributed.pipelining.schedules import get_schedule_class

        get_schedule_class(way.pipeline_parallel_schedule)
        micro = way.pipeline_parallel_microbatch_size
        steps *= training.local_batch_size // micro
        parts = way.module_fqns_per_model_part
        stages = [sum(name.startswith("layers.") for name in part) for part in parts]
    found = {"dp": dp, "tp": dims.tp, "cp": dims.cp, "pp": dims.pp, "ep": dims.ep, "micro_batch": micro}
    found["steps"] = steps
    return {**found, **({"stages": stages} if stages else {})}


def titan_toml(folder: Path, devices: int) -> tuple[Any, Any]:
    """What v0.2.2 reads."""
    if "torchtitan" not in sys.modules and (spec := importlib.util.find_spec("torchtitan")) is not None:
        # Importing the package itself would import its models, which need Triton.
        sys.modules["torchtitan"] = importlib.util.module_from_spec(spec)
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.parallel_dims import ParallelDims

    config = ConfigManager().parse_args(["--job.config_file", str(folder / "torchtitan.toml")])
    way = config.parallelism
    return config, ParallelDims(
        dp_replicate=way.data_parallel_replicate_degree,
        dp_shard=way.data_parallel_shard_degree,
        cp=way.context_parallel_degree,
        tp=way.tensor_parallel_degree,
        pp=way.pipeline_parallel_degree,
        ep=way.expert_parallel_degree,
        etp=way.expert_tensor_parallel_degree,
        world_size=devices,
    )


def titan_module(folder: Path, devices: int) -> tuple[Any, Any]:
    """What 0.3 reads."""
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.parallel_dims import ParallelDims

    sys.modules.pop("torchtitan_plan", None)
    with mock.patch.object(sys, "path", [str(folder), *sys.path]):
        config = ConfigManager().parse_args(["--module", "torchtitan_plan", "--config", "plan"])
    return config, ParallelDims.from_config(config.parallelism, devices)


def from_deepspeed(folder: Path, devices: int) -> Numbers:
    """DeepSpeed's `DeepSpeedConfig`, with the replicas of its world."""
    from deepspeed.runtime.config import DeepSpeedConfig

    given = json.loads((folder / "deepspeed.json").read_text())
    tp, pp = given.get("tensor_parallel", {}).get("autotp_size", 1), given.get("pipeline", {}).get("stages", 1)
    # Outside of pipelines, DeepSpeed takes all ranks for replicas.
    world = SimpleNamespace(get_data_parallel_world_size=lambda: devices // pp)
    with mock.patch("deepspeed.comm.get_rank", return_value=0):  # no process group
        config = DeepSpeedConfig(str(folder / "deepspeed.json"), mpu=world)
    stages = {}
    if pp > 1:
        layers = config.pipeline["layers"]
        stages = {"stages": stages_of(layers, config.pipeline["modules"])}
    else:
        arguments = training_arguments(folder)
        assert arguments.per_device_train_batch_size == config.train_micro_batch_size_per_gpu
        assert arguments.gradient_accumulation_steps == config.gradient_accumulation_steps
    return {
        **stages,
        "pp": len(stages.get("stages", [0])),
        "dp": config.world_size // tp,
        "tp": max(1, config.tensor_parallel_config.autotp_size),
        "micro_batch": config.train_micro_batch_size_per_gpu,
        "steps": config.gradient_accumulation_steps,
        "zero": int(config.zero_optimization_stage),
    }


def from_accelerate(folder: Path, devices: int) -> Numbers:
    """accelerate's `ClusterConfig`, and its `ParallelismConfig` as the launcher would set it."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DistributedType

    config = load_config_from_file(str(folder / "accelerate.yaml"))
    given = {k.removeprefix("parallelism_config_"): v for k, v in config.parallelism_config.items()}
    is_fsdp = config.distributed_type == DistributedType.FSDP
    sizes = {k: v for k, v in given.items() if k.endswith("_size")} or {"dp_shard_size": devices}
    if is_fsdp:
        way = ParallelismConfig(**sizes)
        world = SimpleNamespace(
            multi_device=True, num_processes=config.num_processes, is_fsdp2=config.fsdp_config["fsdp_version"] == 2
        )
        way._validate_accelerator(SimpleNamespace(**vars(world), is_main_process=False, distributed_type=None))
    arguments = training_arguments(folder)
    if is_fsdp:
        plugin = {f"fsdp_{name.removeprefix('fsdp_')}": value for name, value in arguments.fsdp_plugin_args.items()}
        assert plugin == {name: value for name, value in config.fsdp_config.items() if name in plugin}
    return {
        "dp": sizes["dp_shard_size"],
        "tp": sizes.get("tp_size", 1),
        "cp": sizes.get("cp_size", 1),
        "micro_batch": arguments.per_device_train_batch_size,
        "steps": arguments.gradient_accumulation_steps,
    }


def training_arguments(folder: Path) -> Any:
    """The `TrainingArguments` of transformers, which check themselves; those of DeepSpeed need a process group."""
    from transformers import TrainingArguments

    given = json.loads((folder / "training_arguments.json").read_text())
    kept = {name: value for name, value in given.items() if name != "deepspeed"}
    return TrainingArguments(output_dir=str(folder), use_cpu=True, **kept)


def from_pytorch(folder: Path, devices: int) -> Numbers:
    """torch's own reading of the order of a pipeline, to which it adds messages; then the order is simulated."""
    from torch.distributed.pipelining import schedules

    found = json.loads((folder / "pytorch.json").read_text())
    mesh = dict(zip(found["mesh"]["dim_names"], found["mesh"]["shape"], strict=True))
    pp, stages = mesh["pipe"], found["stages"]
    if pp > 1:
        rows = (folder / "schedule.csv").read_text().splitlines()
        order = {rank: [schedules._Action.from_str(word) for word in row.split(",")] for rank, row in enumerate(rows)}
        whole = schedules._add_send_recv(order, lambda stage: stage % pp, len(stages))
        schedules._simulate_comms_compute(whole, lambda stage: stage % pp, len(stages))
    return {
        "dp": mesh["replicate"] * mesh["shard"],
        "tp": mesh["tensor"],
        "pp": pp,
        "micro_batch": found["micro_batch"],
        "steps": found["num_micro_batches"],
        "zero": found["zero"],
        **({"stages": stages_of(found["layers"], stages)} if pp > 1 else {}),
    }


def stages_of(layers: list[str], stages: list[list[str]]) -> list[int]:
    """[stages] number of the layers of which a module is in no stage before."""
    found, seen = [], set[str]()
    for paths in stages:
        kept = {layer for layer in layers for path in paths if f"{path}.".startswith(f"{layer}.")} - seen
        seen |= kept
        found.append(len(kept))
    return found


def from_onnx(folder: Path, devices: int) -> Numbers:
    """onnx's checker of a model with the weights and inputs of the plan, each read as often as the plan reads it."""
    import onnx
    from onnx import TensorProto, helper

    from automap.export.annotate_model import annotate

    found = json.loads((folder / "onnx_devices.json").read_text())
    ranks = {
        name: 1 + max((dim["axis"] for use in uses for dim in use["dims"]), default=0)
        for name, uses in found["tensors"].items()
    }
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * rank) for name, rank in ranks.items()]
    nodes = [
        helper.make_node("Identity", [name], [f"{name}.{number}"])
        for name, uses in found["tensors"].items()
        for number in range(len(uses))
    ]
    ends = [helper.make_tensor_value_info(nodes[0].output[0], TensorProto.FLOAT, [None])]
    model = helper.make_model(helper.make_graph(nodes, "weights", values, ends))
    annotate(model, found)
    onnx.checker.check_model(model)
    told = {entry.key: entry.value for entry in model.metadata_props}
    for node in model.graph.node:
        for spec in (spec for some in node.device_configurations for spec in some.sharding_spec):
            groups = {entry.key: list(entry.value) for entry in spec.index_to_device_group_map}
            held = [device for number in spec.device for device in groups.get(number, [number])]
            assert len(held) == len({*held}) <= devices
    return {"steps": int(told["automap.num_micro_batches"]), "zero": int(told["automap.zero"])}


PARSERS: Mapping[str, Callable[[Path, int], Numbers]] = {
    "megatron-core": from_megatron,
    "torchtitan": from_torchtitan,
    "deepspeed": from_deepspeed,
    "accelerate": from_accelerate,
    "pytorch": from_pytorch,
    "onnx": from_onnx,
}


def wanted(plan: Plan, degrees: Degrees, layers: list[int], multiple: int) -> Numbers:
    """The numbers of a plan under the names of `Numbers`."""
    return {
        "dp": degrees.data,
        "tp": degrees.tensor,
        "cp": degrees.context,
        "pp": degrees.pipeline,
        "ep": degrees.expert,
        "micro_batch": degrees.micro_batch,
        "steps": plan.num_micro_batches,
        "zero": degrees.zero,
        "stages": layers,
        "multiple": multiple,
    }


def layers_of(plan: Plan, problem: Problem) -> list[int]:
    """[stages] number of layers, by the names of their operators: of those that begin in each stage."""
    names = [op.name for op in problem.graph.operators]
    found, seen = [], set[str]()
    for stage in plan.stages:
        inside = names[names.index(stage.operators[0]) : names.index(stage.operators[1]) + 1]
        kept = {layer.group() for name in inside if (layer := LAYER.match(name))} - seen
        seen |= kept
        found.append(len(kept))
    return found


STATED = {
    "megatron-core": ("megatron.sh", "megatron.yaml"),
    "torchtitan": ("torchtitan.toml",),
    "deepspeed": ("deepspeed.json",),
    "accelerate": ("accelerate.yaml",),
    "pytorch": ("pytorch.json",),
    "onnx": ("onnx_devices.json",),
}
"""Target -> the files that `automap estimate --from` reads."""


def priced_again(path: Path, problem: Problem, known: dict[str, Evaluator]) -> float:
    """Seconds of a step that a file states, priced as `automap estimate --from` does.

    Args:
        known: evaluators by training settings; a new one is added.
    """
    found = read_configuration(path)
    found.complete_batch(problem.cluster.num_devices, {})
    key = json.dumps(found.training, sort_keys=True)
    known.setdefault(key, Evaluator(Problem.build(problem.graph, problem.cluster, found.training)))
    if found.document is not None:
        return known[key].evaluate(lower_plan(planned(found.document, known[key].problem), known[key])).step_time_s
    strategy = Strategy(**found.degrees, may_idle=True, target=found.target)
    return known[key].evaluate(hand_made(known[key], strategy)).step_time_s


def prove(target: str, count: int) -> tuple[int, int, list[str]]:
    """Plans exported, read back and priced again, distinct configurations among them, and differences."""
    read, texts, faults, spaces = 0, set(), [], {}
    for model, cluster, batch, fix in CASES:
        training = {"global_batch": batch, "target": target}
        with contextlib.suppress(ProblemError):  # not of this target
            problem = Problem.build(zoo.build(model), parse_cluster(cluster), training, {"fix": fix})
            spaces[f"{model}, {fix}"] = plan_space(problem)
    for model, space in spaces.items():
        known: dict[str, Evaluator] = {}
        for values in space.random_batch(np.random.default_rng(0), -(-count // len(spaces))).tolist():
            plan = annotate(space.decode(values), space.lowered(values), space.evaluator)
            found = export(plan, space.problem, target)
            with tempfile.TemporaryDirectory() as name:
                save(found, Path(name))
                devices = space.problem.cluster.num_devices
                numbers = PARSERS[target](Path(name), devices)
                prices = [priced_again(Path(name) / file, space.problem, known) for file in STATED[target]]
            assert plan.estimate is not None
            step_time_s = plan.estimate.step_time_s
            faults += [
                f"{model}: {p} s, {step_time_s} s in the plan" for p in prices if abs(p / step_time_s - 1) > SAME
            ]
            if any(note.kept == "rounded" for note in found.notes):
                faults.append(f"{model}: something is rounded")
            own = wanted(plan, plan.degrees[0], layers_of(plan, space.problem), space.problem.vocabulary_multiple)
            faults += [f"{model}: {k} {v}, {own[k]} in the plan" for k, v in numbers.items() if v != own[k]]
            read += 1
            texts.add(tuple(found.files.values()))
    return read, len(texts), faults


def main() -> int:
    """Prints a line for each target; the exit code tells whether all numbers agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", type=int, nargs="?", default=200, help="about how many plans of each target")
    parser.add_argument("--targets", nargs="+", default=list(PARSERS), choices=list(PARSERS))
    parser.add_argument("--packages", nargs="+", default=[], help="folders with the trainers")
    given = parser.parse_args()
    sys.path += given.packages
    print(f"about {given.plans} plans a target, read by the trainers' own parsers")
    failed = False
    for target in given.targets:
        try:
            read, distinct, faults = prove(target, given.plans)
        except ImportError as fault:
            print(f"{target:14} not read: {fault}")
            continue
        version = targets()[target].version
        print(f"{target:14} {read} plans, {distinct} distinct configurations, {len(faults)} differences ({version})")
        for fault in faults[:5]:
            print(f"{'':14} {fault}")
        failed |= bool(faults)
    return int(failed)


if __name__ == "__main__":
    # Trainers warn of what they lack on this machine. Here, because tests call `main` in their own process.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    sys.exit(main())
