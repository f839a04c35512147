import re

import pytest

from automap.cluster import parse_cluster
from automap.errors import ClusterError, ProblemError
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.trainers import trainers
from ir import zoo


def build(graph, *, cluster="2x2xA100", hints=None, **training):
    return Problem.build(graph, parse_cluster(cluster), {"global_batch": 8, **training}, hints)


def test_precision_defaults_to_what_every_device_has(mlp):
    assert build(mlp()).precision == "bf16"
    assert build(mlp(), cluster="2xV100").precision == "fp16"
    with pytest.raises(ClusterError, match="no bf16") as caught:
        build(mlp(), cluster="2xV100", precision="bf16")
    assert caught.value.field == "training.precision"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"global_batch": 0}, "training.global_batch"),
        ({"global_batch": -4}, "training.global_batch"),
        ({"global_batch": "8"}, "training.global_batch"),
        ({"batchsize": 8}, "training.batchsize"),
        ({"optimizer": "lion"}, "training.optimizer"),
        ({"trainer": "nobody"}, "training.trainer"),
        ({"sync_modes": ["dasgd"]}, "training.sync_modes"),
        ({"hints": {"fix": {"dp": 8}}}, "hints.fix.dp"),
        ({"hints": {"fix": {"tp": 0}}}, "hints.fix.tp"),
        ({"hints": {"fix": {"dp": 4, "tp": 2}}}, "hints.fix"),
        ({"hints": {"fix": {"zero": 7}}}, "hints.fix.zero"),
        ({"hints": {"fix": {"recompute": "some"}}}, "hints.fix.recompute"),
        ({"hints": {"constraints": [{"scope": "nobody.*", "replicate": True}]}}, "hints.constraints[0].scope"),
        ({"hints": {"costs": {"nobody": {"flops": 1.0}}}}, "hints.costs.nobody"),
        ({"hints": {"memory_reserve_bytes": -1.0}}, "hints.memory_reserve_bytes"),
        ({"hints": {"colour": 1}}, "hints.colour"),
    ],
)
def test_bad_settings_name_field_and_repair(mlp, change, field):
    with pytest.raises(ProblemError) as caught:
        PlanSpace(build(mlp(), **change))
    assert caught.value.field == field
    assert caught.value.repair


def test_what_is_no_graph_is_refused_with_a_way_to_read_one():
    with pytest.raises(ProblemError, match="not a graph") as caught:
        build("gpt2")
    assert (caught.value.field, caught.value.value) == ("graph", "gpt2") and "load_model" in caught.value.repair


def test_state_bytes_follow_the_optimizer(mlp):
    assert sum(build(mlp(), optimizer="adam", trainer="megatron-deepspeed").state_bytes) == 20
    assert sum(build(mlp(), optimizer="sgd", trainer="megatron-deepspeed").state_bytes) == 12
    assert sum(build(mlp(), optimizer="adam", precision="fp32").state_bytes) == 16


def test_trainer_files_state_sources_and_ranges():
    for trainer in trainers().values():
        for share in (trainer.gradient_overlap, trainer.parameter_gather_overlap, trainer.tensor_overlap):
            assert 0.0 <= share <= 1.0
        assert trainer.source


def test_user_costs_replace_the_model(mlp):
    graph = mlp()
    name = next(op.name for op in graph.operators if op.kind == "MatMul")
    problem = build(graph, hints={"costs": {name: {"flops": 123.0}}})
    assert problem.graph.by_name[name].forward_flops.at(2) == 246.0


@pytest.mark.parametrize(
    ("hints", "field"),
    [
        ({"fix": {"dp": 999}}, "hints.fix.dp"),
        ({"fix": {"num_micro_batches": 5}}, "hints.fix.num_micro_batches"),
        ({"constraints": [{"scope": "**", "replicate": True}] * 1001}, "hints.constraints"),
        ({"parameters": ["x"] * 10_001}, "hints.parameters"),
        ({"costs": {f"fc{i}": {"flops": 1} for i in range(20_001)}}, "hints.costs"),
        ({"costs": {f"fc{i}*": {"flops": 1} for i in range(1_001)}}, "hints.costs"),
    ],
)
def test_hints_that_no_plan_obeys_or_nobody_means_are_refused_at_once(mlp, hints, field):
    with pytest.raises(ProblemError) as refused:
        Problem.build(mlp([8, 8, 8]), "8xA100-80GB", {"global_batch": 64}, hints)
    assert refused.value.field == field


def test_the_first_cost_that_names_an_operator_counts(mlp):
    graph = mlp([8, 8, 8])
    name = next(op.name for op in graph.operators if op.forward_flops.at(1) > 0)

    def flops(*globs):
        costs = {glob: {"flops": number + 1} for number, glob in enumerate(globs)}
        built = Problem.build(graph, "8xA100-80GB", {"global_batch": 64}, {"costs": costs})
        return built.graph.by_name[name].forward_flops.at(1)

    assert flops(name, "**") == 1
    # Behind a glob that matches it the name would say nothing, which is refused.
    with pytest.raises(ProblemError, match="have the cost of one before it") as refused:
        flops("**", name)
    assert "write it before '**'" in refused.value.repair


def test_a_cost_of_a_module_is_refused_with_the_name_of_an_operator_in_it():
    graph = zoo.build("gpt:layers=2,hidden=64,heads=4,seq_len=32,vocab_size=128")
    training = {"global_batch": 64}
    with pytest.raises(ProblemError, match="names modules, and no operator") as refused:
        Problem.build(graph, "8xA100-80GB", training, {"costs": {"h.1": {"flops": 1.0}}})
    named = re.search(r"such as '(h\.1\..*)'", refused.value.repair)[1]
    assert Problem.build(graph, "8xA100-80GB", training, {"costs": {named: {"flops": 1.0}}})
    with pytest.raises(ProblemError, match="no operator has such a name"):
        Problem.build(graph, "8xA100-80GB", training, {"costs": {"h.7": {"flops": 1.0}}})
