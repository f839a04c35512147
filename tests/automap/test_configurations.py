"""Configurations read back as stated strategies: exports round trip, and what others write."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from automap.cluster import parse_cluster
from automap.errors import PlanError
from automap.export.export import export, save
from automap.export.onnx_devices import planned
from automap.export.reading import read_configuration
from automap.price.estimate import annotate
from automap.price.evaluator import Evaluator
from automap.price.plan_reader import lower_plan
from automap.price.plan_writer import to_plan
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.space.stated_strategy import Strategy, hand_made
from automap.space.target_limits import plan_space
from ir import zoo

GPT = "gpt:layers=6,hidden=64,heads=4,seq_len=32,vocab_size=96"
MODELS = {
    "gpt": (GPT, {}),
    "long": (GPT, {"cp": 2}),
    "moe": ("moe:layers=4,hidden=64,heads=4,kv_heads=4,ffn=128,experts=4,seq_len=32,vocab_size=96", {}),
    "latent": (
        "moe:layers=6,hidden=64,heads=4,head_dim=16,kv_rank=32,rope_dim=16,ffn=128,dense_layers=2,experts=4,seq_len=32,"
        "vocab_size=96",
        {},
    ),
    "images": ("vit:layers=3,hidden=64,heads=4,image_size=16,patch_size=4,num_classes=8", {}),
    "two stacks": ("t5:layers=3,hidden=64,heads=4,head_size=16,ffn=128,seq_len=32,vocab_size=1024", {"tp": 2}),
    "norms behind": ("bert:layers=3,hidden=64,heads=4,seq_len=32,vocab_size=96", {"recompute": "full", "tp": 2}),
}
FILES = {
    "megatron-core": ("megatron.sh", "megatron.yaml"),
    "torchtitan": ("torchtitan.toml",),
    "deepspeed": ("deepspeed.json",),
    "accelerate": ("accelerate.yaml",),
    "pytorch": ("pytorch.json",),
    "onnx": ("onnx_devices.json",),
}
NO_PLANS = {
    ("long", "deepspeed"), ("long", "pytorch"), ("moe", "pytorch"), ("latent", "pytorch"), ("images", "megatron-core"),
    ("images", "torchtitan"),
}  # fmt: skip
CASES = [(model, target) for model in MODELS for target in FILES if (model, target) not in NO_PLANS]


@functools.cache
def space_of(model: str, target: str) -> PlanSpace:
    name, fix = MODELS[model]
    training = {"global_batch": 24, "target": target}
    return plan_space(Problem.build(zoo.build(name), parse_cluster("8xA100"), training, {"fix": fix}))


@pytest.mark.parametrize(("model", "target"), CASES)
def test_an_export_read_back_has_the_same_price(model: str, target: str, tmp_path: Path) -> None:
    space = space_of(model, target)
    problem = space.problem
    for values in space.random_batch(np.random.default_rng(7), 5).tolist():
        plan = annotate(space.decode(values), space.lowered(values), space.evaluator)
        save(export(plan, problem, target), tmp_path)
        for name in FILES[target]:
            found = read_configuration(tmp_path / name)
            assert found.target == target
            # DeepSpeed's file leaves the batch out where weights are split: it does not know the number of replicas.
            again = Problem.build(problem.graph, problem.cluster, {"global_batch": 24, **found.training})
            evaluator = Evaluator(again)
            if found.document is None:
                lowered = hand_made(evaluator, Strategy(**found.degrees, may_idle=True, target=found.target))
            else:
                lowered = lower_plan(planned(found.document, again), evaluator)
            assert plan.estimate is not None
            assert evaluator.evaluate(lowered).step_time_s == pytest.approx(plan.estimate.step_time_s, rel=1e-9)


@pytest.mark.parametrize("optimizer", ["adam", "momentum", "sgd"])
@pytest.mark.parametrize("target", ["megatron-core", "accelerate", "deepspeed", "pytorch"])
def test_the_optimizer_is_read_back(target: str, optimizer: str, tmp_path: Path) -> None:
    training = {"global_batch": 24, "target": target, "optimizer": optimizer}
    problem = Problem.build(zoo.build(GPT), parse_cluster("8xA100"), training, {"fix": {"pp": 1}})
    space = plan_space(problem)
    plan = annotate(
        space.decode(values := space.random(np.random.default_rng(0))), space.lowered(values), space.evaluator
    )
    save(export(plan, problem, target), tmp_path)
    for name in FILES[target]:
        assert read_configuration(tmp_path / name).training["optimizer"] == optimizer


@pytest.mark.parametrize("target", ["pytorch", "torchtitan"])
def test_a_script_whose_optimizer_is_left_open_is_told_of_the_planned_one(target: str) -> None:
    for optimizer, said in (("sgd", "optimizer (the plan is for sgd)"), ("adam", "the optimizer")):
        training = {"global_batch": 24, "target": target, "optimizer": optimizer}
        problem = Problem.build(zoo.build(GPT), parse_cluster("8xA100"), training, {"fix": {"pp": 1}})
        space = plan_space(problem)
        plan = annotate(space.decode(v := space.random(np.random.default_rng(0))), space.lowered(v), space.evaluator)
        (note,) = (note.text for note in export(plan, problem, target).notes if note.about == "model")
        assert said in note and ("plan is" in note) == (optimizer == "sgd")


def test_optimizers_that_others_write(tmp_path: Path) -> None:
    for text, kind in (
        ('{"type": "AdamW"}', "adam"),
        ('{"type": "SGD", "params": {"momentum": 0.9}}', "momentum"),
        ('{"type": "SGD", "params": {"lr": 0.1}}', "sgd"),
    ):
        path = written(tmp_path / "deepspeed.json", '{"train_batch_size": 8, "optimizer": ' + text + "}")
        assert read_configuration(path).training["optimizer"] == kind
    flags = "torchrun --nproc-per-node 8 pretrain_gpt.py --optimizer sgd"
    assert read_configuration(written(tmp_path / "a.sh", flags)).training["optimizer"] == "momentum"
    with pytest.raises(PlanError, match=r"--optimizer: is not a value of this key .*foo.* Use adam, sgd"):
        read_configuration(written(tmp_path / "b.sh", flags.replace("sgd", "foo")))
    with pytest.raises(PlanError, match=r"--sgd-momentum: is not a number"):
        read_configuration(written(tmp_path / "c.sh", flags + " --sgd-momentum much"))


def test_arguments_say_how_many_processes_they_are_for(tmp_path: Path) -> None:
    # Of 8 devices, the plan has 2.
    problem = Problem.build(zoo.build(GPT), parse_cluster("2x4xA100"), {"global_batch": 24, "target": "megatron-core"})
    evaluator = Evaluator(problem)
    lowered = hand_made(evaluator, Strategy(tp=2, dp=1, sequence_parallel=True, may_idle=True))
    plan = annotate(to_plan(lowered, evaluator), lowered, evaluator)
    save(export(plan, problem, "megatron-core"), tmp_path)
    for name in FILES["megatron-core"]:
        found = read_configuration(tmp_path / name)
        assert found.degrees["dp"] == 1
        again = evaluator.evaluate(hand_made(evaluator, Strategy(**found.degrees, may_idle=True, target=found.target)))
        assert plan.estimate is not None
        assert again.step_time_s == pytest.approx(plan.estimate.step_time_s, rel=1e-9)
    with pytest.raises(PlanError, match=r"ENV_VARS\.GPUS_PER_NODE: processes are not a multiple"):
        text = "ENV_VARS:\n  GPUS_PER_NODE: 3\nMODEL_ARGS:\n  --tensor-model-parallel-size: 2\n"
        read_configuration(written(tmp_path / "odd.yaml", text))


def test_hosts_with_unequal_numbers_of_processes_are_named() -> None:
    for target, words in (("megatron-core", "4, 2, in the order"), ("accelerate", "accelerate launch starts equal")):
        training = {"global_batch": 24, "target": target}
        space = plan_space(Problem.build(zoo.build(GPT), parse_cluster("4xA100+2xA100"), training))
        found = export(space.decode(space.random(np.random.default_rng(0))), space.problem, target)
        assert [words in note.text for note in found.notes if note.about == "processes"] == [True]
        assert "GPUS_PER_NODE" not in found.files.get("megatron.yaml", "")


@pytest.mark.parametrize("target", ["megatron-core", "torchtitan", "accelerate"])
def test_a_name_of_a_model_is_no_line_of_a_script(target: str) -> None:
    training = {"global_batch": 24, "target": target}
    graph = replace(zoo.build(GPT), name="mine\ntouch here\r\u2028import os")
    space = plan_space(Problem.build(graph, parse_cluster("4xA100"), training))
    found = export(space.decode(space.random(np.random.default_rng(0))), space.problem, target)
    for name, text in found.files.items():
        named = [line for line in text.splitlines() if "touch here" in line or "import os" in line]
        assert named if name.endswith((".sh", ".py")) else True
        assert all(line.startswith(("# ", "    #")) for line in named if not name.endswith(".json"))


@pytest.mark.parametrize("target", ["megatron-core", "torchtitan", "accelerate"])
def test_several_hosts_are_told_how_to_start(target: str) -> None:
    training = {"global_batch": 24, "target": target}
    space = plan_space(Problem.build(zoo.build(GPT), parse_cluster("2x4xA100"), training))
    found = export(space.decode(space.random(np.random.default_rng(0))), space.problem, target)
    (note,) = [note for note in found.notes if note.about == "hosts"]
    assert "each of the 2 hosts" in note.text and ("--machine_rank" in note.text) == (target == "accelerate")
    files = [text for name, text in found.files.items() if name.endswith((".sh", ".py", ".toml", "accelerate.yaml"))]
    assert files and all("# Start it on each of the 2 hosts" in text for text in files)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("recompute", ["h.0"], "recompute: names only some of the layers"),
        ("mesh", {"dim_names": ["pipe", "tensor", "replicate", "shard"], "shape": [1, 2, 4, 1]}, "in front of .shard."),
        ("mesh", {"dim_names": ["pipe", "replicate", "shard", "tensor"], "shape": [1, 2, 2, 2]}, "cannot be priced"),
        ("mesh", {"dim_names": ["pipe"], "shape": [1, 2]}, "Export it again"),
        ("stages", None, "Export it again"),
    ],
)
def test_a_pytorch_file_that_no_degrees_describe_is_refused(key: str, value: Any, words: str, tmp_path: Path) -> None:
    mesh = {"dim_names": ["pipe", "replicate", "shard", "tensor"], "shape": [2, 2, 1, 2]}
    sound = {"schema": "automap.pytorch/1", "mesh": mesh, "layers": ["h.0", "h.1"], "recompute": [], "zero": 0}
    sound |= {"micro_batch": 1, "stages": [["h.0"], ["h.1"]], "schedule": "1f1b", "precision": "bf16"}
    sound["global_batch"] = 8
    found = read_configuration(written(tmp_path / "pytorch.json", json.dumps(sound)))
    assert found.degrees["layers"] == (1, 1)
    with pytest.raises(PlanError, match=words):
        read_configuration(written(tmp_path / "pytorch.json", json.dumps(sound | {key: value})))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda document: document["tensors"]["wte.weight"][0].update(stage=1), "from.tensors.wte.weight"),
        (lambda document: document["tensors"].pop("wte.weight"), "from.tensors.wte.weight"),
        (lambda document: document["metadata"].update({"automap.zero": "9"}), "from.metadata.automap.zero"),
        (lambda document: document["configuration"].update(num_devices=9), "cluster"),
        (lambda document: document.pop("plan"), "from.plan"),
    ],
)
def test_an_annotation_that_contradicts_its_plan_is_refused(change: Any, field: str) -> None:
    space = space_of("gpt", "onnx")
    plan = space.decode(space.random(np.random.default_rng(0)))
    document = json.loads(export(plan, space.problem, "onnx").files["onnx_devices.json"])
    assert planned(document, space.problem).stages == plan.stages
    change(document)
    with pytest.raises(PlanError) as fault:
        planned(document, space.problem)
    assert fault.value.field == field


SCRIPT = """
#!/bin/bash
GPUS=8
ARGS=(
    --tensor-model-parallel-size 4  # inside the host
    --pipeline-model-parallel-size=2
    --num-layers 6 --num-virtual-stages-per-pipeline-rank 3
    --micro-batch-size 2 --global-batch-size 24 --seq-length 32
    --sequence-parallel --use-distributed-optimizer --recompute-activations --fp16
    --data-path "a path/with spaces" --lr 0.1
)
torchrun --nproc-per-node $GPUS pretrain_gpt.py ${ARGS[@]}
"""
ACCELERATE = """\
# comment
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config:
  fsdp_version: 1
  fsdp_sharding_strategy: SHARD_GRAD_OP   # ZeRO 2
  fsdp_activation_checkpointing: true
"""


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_what_people_write(tmp_path: Path) -> None:
    found = read_configuration(written(tmp_path / "args.sh", SCRIPT))
    sizes = {"tp": 4, "pp": 2, "virtual": 3, "micro_batch": 2, "dp": 1}
    assert found.degrees == {**sizes, "sequence_parallel": True, "zero": 1, "recompute": "selective"}
    # 128, the default, times tp.
    said = {"global_batch": 24, "precision": "fp16", "trainer": "megatron-core", "vocabulary_multiple": 512}
    assert found.training == said
    assert found.tokens == 32
    assert {"--data-path", "--lr"} <= set(found.ignored)
    found = read_configuration(written(tmp_path / "config.yaml", ACCELERATE))
    assert found.degrees == {"tp": 1, "cp": 1, "zero": 2, "recompute": "full", "dp": 8}
    assert found.training["precision"] == "bf16"
    document = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": "auto", "fp16": {"enabled": True}}
    found = read_configuration(written(tmp_path / "ds.json", json.dumps(document | {"optimizer": {}, "scheduler": {}})))
    assert found.degrees == {"zero": 0}
    assert found.ignored == ("scheduler",)
    # transformers decides.
    found = read_configuration(written(tmp_path / "ds.json", json.dumps({"bf16": {"enabled": "auto"}})))
    assert "precision" not in found.training


STAGES = "--pipeline-model-parallel-size 2"
OFFLOAD = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
UNEQUAL = {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
TWO_KINDS = {"bf16": {"enabled": True}, "fp16": {"enabled": True}}
SIX = "distributed_type: FSDP\nnum_processes: 6\nparallelism_config:\n  parallelism_config_tp_size: 4"
SHARED, RESHARD = "expert_parallel_degree = 2\ntensor_parallel_degree = 2", "fsdp_reshard_after_forward"
VIRTUAL, LAYOUT = "num-layers-per-virtual-pipeline-stage", "pipeline-model-parallel-layout"
FIRST, LAST, ENDS = (f"decoder-{end}-pipeline-num-layers" for end in ("first", "last", "{first,last}"))


@pytest.mark.parametrize(
    ("name", "text", "field", "repair"),
    [
        ("a.sh", "--micro-batch-size $MBS", "--micro-batch-size", "as a number"),
        ("a.sh", "--tensor-model-parallel-size 0", "--tensor-model-parallel-size", "number"),
        ("a.sh", "--virtual-pipeline-model-parallel-size 2", "--virtual-pipeline-model-parallel-size", "no such flag"),
        ("a.sh", "--use-torch-fsdp2", "--use-torch-fsdp2", "--zero 3"),
        ("a.sh", f"{STAGES} --{LAYOUT} 'Et*3|mL'", f"--{LAYOUT}", "Et*2"),
        ("a.sh", f"{STAGES} --{LAYOUT} '(t|)*2t'", f"--{LAYOUT}", "a multiple of 2 stages"),
        ("a.sh", f"{STAGES} --num-layers 6 --{FIRST} 4 --{LAST} 3", f"--{ENDS}", "evenly"),
        ("a.sh", f"{STAGES} --{FIRST} 4", f"--{ENDS}", "--num-layers"),
        ("a.sh", f"{STAGES} --num-layers 6 --{VIRTUAL} 2", f"--{VIRTUAL}", "--num-layers"),
        ("a.sh", "--data-path 'open", "script", "quote"),
        ("a.toml", "[parallelism", "toml", "Correct the file"),
        ("a.toml", "parallelism = 3", "parallelism", "map"),
        (
            "a.toml",
            "[parallelism]\npipeline_parallel_degree = 2\nmodule_fqns_per_model_part = 3",
            "parallelism.module_fqns_per_model_part",
            "layers",
        ),
        ("a.toml", f"[parallelism]\n{SHARED}", "parallelism.expert_parallel_degree", "tensor_parallel_degree 1"),
        ("a.toml", '[parallelism]\nfsdp_reshard_after_forward = "no"', f"parallelism.{RESHARD}", "never"),
        ("a.json", json.dumps({"pipeline": {"modules": [["h.0"]], "stages": 2}}), "pipeline.stages", "again"),
        ("a.json", json.dumps({"pipeline": {"modules": 1, "stages": 2}}), "pipeline.modules", "again"),
        ("a.json", '{"zero_optimization": {"stage": 4}}', "zero_optimization.stage", "0 to 3"),
        ("a.json", json.dumps(OFFLOAD), "zero_optimization.offload_param", "Leave"),
        ("a.json", json.dumps(UNEQUAL), "train_batch_size", "replicas"),
        ("a.json", json.dumps(TWO_KINDS), "fp16.enabled", "one of them"),
        ("a.yaml", "distributed_type: XLA", "distributed_type", "FSDP, MULTI_GPU"),
        ("a.yaml", SIX, "num_processes", "Give a multiple"),
        ("a.yaml", "- a\n- b", "line 1", "two levels"),
        ("a.json", "[]", "", "DeepSpeed"),
        ("a.txt", "", "", ".toml"),
        ("torchtitan_plan.py", "", "", "torchtitan.toml"),
        ("plan.json", '{"schema": "automap.plan/1"}', "schema", "--plan"),
        ("export.json", '{"schema": "automap.export/1"}', "schema", "beside it"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(name: str, text: str, field: str, repair: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as fault:
        read_configuration(written(tmp_path / name, text))
    assert fault.value.field == (f"from.{field}" if field else "from")
    assert repair in fault.value.repair


@pytest.mark.parametrize(
    ("pp", "words", "virtual", "layers"),
    [
        (2, f"--{LAYOUT} 'Et*3|(t,)*3L'", 1, (3, 3)),
        (2, f"--{LAYOUT} 'E|(t|t|)*1tttt|L'", 2, None),
        (4, f"--{LAYOUT} 'E(tt|)*3|L'", 1, None),
        (2, f"--{LAYOUT} 'E|(tt|)*2ttL'", 2, (0, 2, 2, 2)),
        (3, f"--{FIRST} 1 --{LAST} 1", 1, (1, 4, 1)),
        (3, f"--{LAST} 2", 1, (2, 2, 2)),
        (2, f"--{FIRST} 2 --num-virtual-stages-per-pipeline-rank 2", 2, (1, 2, 1, 2)),
    ],
)
def test_stages_of_megatron_are_read(
    pp: int, words: str, virtual: int, layers: tuple[int, ...] | None, tmp_path: Path
) -> None:
    text = f"--pipeline-model-parallel-size {pp} --num-layers 6 {words}"
    if layers is None:
        with pytest.raises(PlanError, match="not a layout"):
            read_configuration(written(tmp_path / "a.sh", text))
        return
    found = read_configuration(written(tmp_path / "a.sh", text)).degrees
    assert (found.get("virtual", 1), found["layers"]) == (virtual, layers)


ARGUMENTS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "gradient_checkpointing": True}


def test_the_arguments_beside_a_file_are_read(tmp_path: Path) -> None:
    beside = tmp_path / "training_arguments.json"
    beside.write_text(json.dumps(ARGUMENTS))
    found = read_configuration(written(tmp_path / "accelerate.yaml", ACCELERATE))
    assert (found.degrees["micro_batch"], found.degrees["recompute"], found.beside) == (2, "full", beside.name)
    assert found.training["global_batch"] == 2 * 3 * 8
    # Those of accelerate are not DeepSpeed's.
    said = json.dumps({"train_micro_batch_size_per_gpu": 4, "train_batch_size": 8})
    assert read_configuration(written(tmp_path / "ds.json", said)).degrees == {"zero": 0, "micro_batch": 4}
    beside.write_text(json.dumps(ARGUMENTS | {"deepspeed": "ds.json"}))
    assert "micro_batch" not in read_configuration(tmp_path / "accelerate.yaml").degrees
    with pytest.raises(PlanError, match=r"contradicts ds\.json") as fault:
        read_configuration(tmp_path / "ds.json")
    assert fault.value.field == "from.training_arguments.json.per_device_train_batch_size"
    assert "Make it 4" in fault.value.repair


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        read_configuration(tmp_path / "none.sh")
    with pytest.raises(PlanError, match="Name one of its files"):
        read_configuration(tmp_path)


def test_layers_that_are_not_those_of_the_model() -> None:
    evaluator: Any = Evaluator(Problem.build(zoo.build(GPT), parse_cluster("2xA100"), {"global_batch": 4}))
    lowered = hand_made(evaluator, Strategy(pp=2, layers=(5, 1)))
    assert [len(segments) for segments in lowered.chunks] == [6, 3]
    with pytest.raises(PlanError, match="6 layers in 2 stages are not 3, 2"):
        hand_made(evaluator, Strategy(pp=2, layers=(3, 2)))


def test_other_json_is_not_read_as_deepspeeds(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="has no setting of DeepSpeed") as fault:
        read_configuration(written(tmp_path / "training_arguments.json", json.dumps({"fsdp": True})))
    assert "DeepSpeed's JSON" in fault.value.repair


def test_a_part_of_pytorch_json_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"is not a pytorch\.json that was exported") as fault:
        read_configuration(written(tmp_path / "pytorch.json", json.dumps({"schema": "automap.pytorch/1", "zero": 3})))
    assert fault.value.repair == "Export it again."
