"""A search says which hints change nothing in its plan, and is silent about those that do."""

import pytest
from small_graphs import build_mlp

from agents import Budget, search_offer
from automap.cluster import parse_cluster
from automap.errors import ProblemError
from automap.problem import Problem
from ir import zoo

GPT = "gpt:layers=4,hidden=64,heads=4,seq_len=32,vocab_size=128"


def warnings(fix, constraints=(), cluster="4xA100-80GB"):
    hints = {"fix": fix, "constraints": list(constraints)}
    problem = Problem.build(zoo.build(GPT), parse_cluster(cluster), {"global_batch": 16}, hints)
    plan = search_offer(problem, Budget.parse(40), searchers=("expert",)).plan
    return [text for text in plan.warnings if text.startswith("hints.")]


@pytest.mark.parametrize(
    ("fix", "said"),
    [
        # The fused kernel keeps no scores that could be computed again.
        ({"recompute": "selective"}, "hints.fix.recompute, selective, changes nothing"),
        ({"recompute": "full"}, None),
        ({"recompute": "none"}, None),
        ({"schedule": "zb1p", "pp": 1}, "hints.fix.schedule, zb1p, changes nothing: the plan has no pipeline"),
        ({"schedule": "zb1p", "pp": 2}, None),
        ({"schedule": "interleaved", "pp": 2, "virtual_stages": 1}, "each rank of the pipeline has one stage"),
        ({"schedule": "interleaved", "pp": 2, "virtual_stages": 2}, None),
        ({"batch_shares": "proportional"}, "hints.fix.batch_shares, proportional, changes nothing"),
        ({"batch_shares": "even"}, None),
    ],
)
def test_decisions_about_what_is_not_there(fix, said):
    found = warnings(fix)
    assert len(found) == (said is not None) and all(said in text for text in found)


def test_shares_in_proportion_to_unequal_devices_are_no_idle_hint():
    assert not warnings({"batch_shares": "proportional", "pp": 1, "dp": 4}, cluster="2xA100-80GB+2xV100-16GB")


def test_placements_on_an_axis_that_is_not_there():
    scope = {"scope": "h.*.mlp.c_fc/MatMul", "sharding": {"tp": "S(2)"}}
    (found,) = warnings({"tp": 1}, [scope])
    assert found.startswith("hints.constraints[0].sharding.tp, S(2), changes nothing: the plan has no axis tp")
    assert not warnings({"tp": 2}, [scope])
    assert not warnings({"tp": 1}, [scope | {"sharding": {"tp": "B"}}]), "a whole tensor needs no axis"


def test_ranks_of_dp_that_are_no_replicas():
    """A step with few samples and many weights is faster where these are split."""
    graph, cluster = build_mlp((2048, 8192, 2048)), parse_cluster("2xA100-80GB@10Gbit")

    def found(*constraints):
        hints = {"fix": {"dp": 2}, "constraints": list(constraints)}
        plan = search_offer(Problem.build(graph, cluster, {"global_batch": 2}, hints), Budget.parse(200)).plan
        return plan, [text for text in plan.warnings if text.startswith("hints.")]

    plan, (text,) = found()
    assert plan.degrees[0].data == 1
    assert text.startswith("hints.fix.dp, 2, has ranks that split no samples")
    plan, texts = found({"scope": "**", "replicate": True})
    assert plan.degrees[0].data == 2
    assert not texts


def test_ranks_of_ep_split_the_experts():
    """Where the weights of experts are small, other axes would split them at a lower price."""
    graph = zoo.build("moe:layers=4,hidden=1024,heads=8,experts=8,seq_len=1024,vocab_size=512")

    def found(*constraints):
        hints = {"fix": {"ep": 4, "tp": 2}, "constraints": list(constraints)}
        plan = search_offer(Problem.build(graph, "8xA100-80GB", {"global_batch": 64}, hints), Budget.parse(200)).plan
        return plan, [text for text in plan.warnings if text.startswith("hints.")]

    plan, texts = found()
    assert all(degrees.expert_axes == ("ep",) for degrees in plan.degrees)
    assert not texts
    # A constraint that asks for something else counts more.
    plan, (text,) = found({"scope": "layers.*.mlp.experts*", "replicate": True})
    assert "ep" not in plan.degrees[0].expert_axes
    assert text.startswith("hints.fix.ep, 4, has ranks that split no experts")


def test_a_cost_that_says_nothing_is_refused():
    with pytest.raises(ProblemError, match="an empty cost") as caught:
        Problem.build(zoo.build(GPT), parse_cluster("1xA100"), {"global_batch": 16}, {"costs": {"*": {}}})
    assert caught.value.field.endswith("costs.*")


def test_a_constraint_that_says_nothing_is_refused():
    hints = {"constraints": [{"scope": "h.0", "recompute": False}, {"scope": "layers.*"}]}
    with pytest.raises(ProblemError, match="an empty constraint") as caught:
        Problem.build(zoo.build(GPT), parse_cluster("1xA100"), {"global_batch": 16}, hints)
    assert caught.value.field == "hints.constraints[1]"
