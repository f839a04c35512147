"""What the user runs today as `hints.baseline`: a plan document, or the text of a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agents import Budget, search
from automap.cluster import parse_cluster
from automap.errors import PlanError
from automap.export.baseline import load, read_baseline, with_stated
from automap.export.export import export
from automap.price.evaluator import Evaluator
from automap.problem import Problem
from ir import zoo

GPT = "gpt:layers=6,hidden=64,heads=4,seq_len=32,vocab_size=96"
SCRIPT = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 24 "
    "--seq-length 32 --fp16 --lr 0.1"
)
CLUSTER = parse_cluster("8xA100")
TRAINING = {"global_batch": 24, "precision": "fp16", "trainer": "megatron-core"}


def evaluator(document: Any, training: Any = TRAINING) -> Evaluator:
    return Evaluator(Problem.build(zoo.build(GPT), CLUSTER, training, {"baseline": document}))


def test_a_configuration_and_its_plan_are_the_same_baseline(tmp_path: Path) -> None:
    path = tmp_path / "args.sh"
    path.write_text(SCRIPT)
    document = load(path)
    assert document == {"file": "args.sh", "text": SCRIPT}
    training = with_stated({}, {"baseline": document}, CLUSTER)
    said = {"vocabulary_multiple": 256, "overlap_gradients": False, "target": "megatron-core"}
    assert training == {**TRAINING, **said}
    found = read_baseline(evaluator(document, training))
    assert found is not None and found.name == "args.sh"
    assert found.notes == ("not read: --lr",)
    (degrees,) = found.plan.degrees
    assert (degrees.tensor, degrees.pipeline, degrees.data, degrees.micro_batch) == (2, 2, 2, 2)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(found.plan.to_json()))
    again = read_baseline(evaluator(load(path), training))
    assert again is not None and again.name == "plan"
    assert again.plan.estimate == found.plan.estimate


def test_files_that_a_script_names_go_with_it(tmp_path: Path) -> None:
    path, said = tmp_path / "args.sh", '{"zero_optimization": {"stage": 1}, "train_batch_size": 24}'
    path.write_text(f"deepspeed a.py {SCRIPT} --deepspeed --deepspeed_config conf/ds.json")
    (tmp_path / "ds.json").write_text(said)
    (tmp_path / "other.json").write_text("{}")
    document = load(path)
    assert document == {"file": "args.sh", "text": path.read_text(), "beside": {"ds.json": said}}
    training = with_stated({}, {"baseline": document}, CLUSTER)
    found = read_baseline(evaluator(document, training))
    assert found is not None and found.notes[:1] == ("read with ds.json beside it",)
    assert found.plan.stages[0].zero.stage == 1
    with pytest.raises(PlanError, match="leaves the stage of ZeRO") as fault:
        with_stated({}, {"baseline": {**document, "beside": {}}}, CLUSTER)
    assert fault.value.field == "hints.baseline.--deepspeed"
    with pytest.raises(PlanError) as fault:
        with_stated({}, {"baseline": {**document, "beside": {"ds.json": 3}}}, CLUSTER)
    assert fault.value.field == "hints.baseline.beside.ds.json"


def test_what_the_user_says_goes_before_what_the_file_says() -> None:
    hints = {"baseline": {"file": "args.sh", "text": SCRIPT}}
    assert with_stated({"global_batch": 8}, hints, CLUSTER)["global_batch"] == 8
    # A target names the trainer.
    assert "trainer" not in with_stated({"target": "torchtitan"}, hints, CLUSTER)
    assert with_stated({"global_batch": 8}, {}, CLUSTER) == {"global_batch": 8}
    # Plans that are searched for are those that the trainer of the file runs, unless another one is meant.
    assert with_stated({}, hints, CLUSTER)["target"] == "megatron-core"
    assert with_stated({"target": "any"}, hints, CLUSTER)["target"] == "any"
    assert "target" not in with_stated({"trainer": "ddp"}, hints, CLUSTER)
    assert read_baseline(Evaluator(Problem.build(zoo.build(GPT), CLUSTER, TRAINING))) is None


def test_a_release_is_read_from_the_options_that_it_is_priced_with() -> None:
    """What is exported of its plans is read as the same release and plan, also where a target is named."""
    model = zoo.build("moe:layers=4,hidden=64,heads=4,kv_heads=2,ffn=128,experts=4,seq_len=32,vocab_size=96")
    stated = {"global_batch": 16, "trainer": "megatron-core-26.06", "target": "megatron-core"}
    problem = Problem.build(model, CLUSTER, stated, {"fix": {"ep": 2, "pp": 1, "tp": 1}})
    plan = search(problem, Budget(evaluations=100), seed=0).plan
    written = export(plan, problem, "megatron-core")
    script = written.files["megatron.sh"]
    assert "--moe-token-dispatcher-type flex\n    --moe-flex-dispatcher-backend hybridep\n" in script
    assert "--moe-grouped-gemm" in script
    assert "CUDA graphs" in next(note.text for note in written.notes if note.about == "speed")
    hints = {"baseline": {"file": "megatron.sh", "text": script}}
    for training in ({}, {"target": "megatron-core"}):
        said = with_stated(training, hints, CLUSTER)
        assert (said["trainer"], said["target"]) == ("megatron-core-26.06", "megatron-core")
    again = read_baseline(Evaluator(Problem.build(model, CLUSTER, said, hints)))
    assert again is not None and again.plan.degrees == plan.degrees
    assert again.plan.estimate.step_time_s == pytest.approx(plan.estimate.step_time_s, rel=1e-9)
    older = script.replace("type flex", "type alltoall").replace("--moe-flex-dispatcher-backend hybridep", "")
    assert with_stated({}, {"baseline": {"file": "a.sh", "text": older}}, CLUSTER)["trainer"] == "megatron-core"


def test_gradients_are_reduced_when_the_script_says() -> None:
    """Without --overlap-grad-reduce, exactly what the backward pass had hidden comes to the step."""
    found = {}
    alone = SCRIPT.replace("--pipeline-model-parallel-size 2", "")
    for script in (alone, alone + " --overlap-grad-reduce"):
        document = {"file": "args.sh", "text": script}
        own = evaluator(document, with_stated({"target": "any"}, {"baseline": document}, CLUSTER))
        baseline = read_baseline(own)
        assert baseline is not None
        found[script] = baseline.plan.estimate
        # A search for the other way says so.
        other = read_baseline(evaluator(document, TRAINING))
        assert other is not None and ("overlap_gradients" in "".join(other.notes)) == (script == alone)
    behind, under = found.values()
    shown = [e.breakdown_s["exposed_communication"].get("gradient_sync", 0.0) for e in (behind, under)]
    assert behind.step_time_s - under.step_time_s == pytest.approx(shown[0] - shown[1])
    assert shown[0] > shown[1]


def test_a_file_without_a_micro_batch_says_what_is_assumed() -> None:
    document = {"file": "ds.json", "text": json.dumps({"train_batch_size": 24, "fp16": {"enabled": True}})}
    found = read_baseline(evaluator(document))
    assert found is not None and "1 is assumed" in found.notes[-1]


def test_the_arguments_beside_a_file_are_part_of_the_baseline(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 24, "fp16": {"enabled": True}}))
    arguments = {"per_device_train_batch_size": 3, "deepspeed": "ds.json"}
    (tmp_path / "training_arguments.json").write_text(json.dumps(arguments))
    found = read_baseline(evaluator(load(tmp_path / "ds.json")))
    assert found is not None and found.plan.samples_per_micro_batch == 3 * 8
    assert found.notes[-1] == "read with training_arguments.json beside it"


@pytest.mark.parametrize(
    ("document", "arguments", "batch"),
    [
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}, {}, 3 * 2 * 8),
        # One step is DeepSpeed's default, `auto` leaves it to the arguments.
        ({"train_micro_batch_size_per_gpu": 3}, {}, 3 * 8),
        ({"train_micro_batch_size_per_gpu": 3, "tensor_parallel": {"autotp_size": 2}}, {}, 3 * 4),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": "auto"}, {}, None),
        (
            {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "bf16": {}},
            {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2},
            3 * 2 * 8,
        ),
    ],
)
def test_a_batch_is_that_of_all_replicas(document: Any, arguments: Any, batch: int | None) -> None:
    given = {"file": "ds.json", "text": json.dumps(document)}
    if arguments:
        given["arguments"] = json.dumps({"deepspeed": "ds.json", **arguments})
    assert with_stated({}, {"baseline": given}, CLUSTER).get("global_batch") == batch


def test_a_batch_that_grows_is_priced_when_it_is_full() -> None:
    document = {"file": "args.sh", "text": SCRIPT + " --rampup-batch-size 8 8 1000"}
    found = read_baseline(evaluator(document))
    assert found is not None and any(note.endswith("--rampup-batch-size 8 8 1000") for note in found.notes)


@pytest.mark.parametrize(
    ("document", "field", "repair"),
    [
        ({"file": "a.txt", "text": ""}, "hints.baseline", ".toml"),
        ({"file": "a.sh"}, "hints.baseline.text", "Give"),
        ({"file": "a.sh", "text": SCRIPT, "tp": 2}, "hints.baseline.tp", "Remove"),
        ({"file": "a.sh", "text": "--micro-batch-size $MBS"}, "hints.baseline.--micro-batch-size", "as a number"),
        ({"file": "a.sh", "text": SCRIPT.replace("24", "32")}, "hints.baseline.global_batch", "Give global_batch 32"),
        ({"file": "a.sh", "text": SCRIPT.replace("--fp16", "--bf16")}, "hints.baseline.precision", "precision bf16"),
        (
            {"file": "a.sh", "text": SCRIPT.replace("parallel-size 2", "parallel-size 3")},
            "hints.baseline.tp",
            "product",
        ),
        ({"file": "a.sh", "text": SCRIPT.replace("length 32", "length 64")}, "hints.baseline.seq_len", "seq_len=64"),
        ({"stages": []}, "hints.baseline", "Give"),
    ],
)
def test_what_is_wrong_is_named(document: dict[str, Any], field: str, repair: str) -> None:
    with pytest.raises(PlanError) as fault:
        read_baseline(evaluator(document))
    assert fault.value.field.startswith(field)
    assert repair in fault.value.repair


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="baseline: cannot be read"):
        load(tmp_path / "none.sh")


@pytest.mark.parametrize(
    ("flags", "repair"),
    [
        ("--hidden-size 128", "the model has 64"),
        ("--num-attention-heads 8", "the model has 4"),
        ("--ffn-hidden-size 512", "the model has 256"),
        ("--num-experts 8", "the model has 1"),
        ("--group-query-attention --num-query-groups 2", "the model has 4"),
        ("--num-layers 4", "the model has 6"),
        ("--num-layers 6 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 256 --num-experts 1", None),
        # Without --group-query-attention, Megatron-LM does not look at it.
        ("--num-query-groups 2", None),
    ],
)
def test_a_script_for_another_model_is_refused(flags: str, repair: str | None) -> None:
    found = evaluator({"file": "a.sh", "text": f"{SCRIPT} {flags}"})
    if repair is None:
        assert read_baseline(found) is not None
        return
    with pytest.raises(PlanError, match=repair) as fault:
        read_baseline(found)
    assert fault.value.field == f"hints.baseline.{flags.split()[-2]}"
