import pytest

from automap.cluster import parse_cluster
from automap.errors import ClusterError, ProblemError
from automap.problem import Problem, trainers
from automap.space.space import PlanSpace


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
        ({"hints": {"fix": {"dp": 3}}}, "hints.fix.dp"),
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
