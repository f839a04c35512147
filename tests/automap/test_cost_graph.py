"""The cost graph against the unit costs that it takes apart."""

import numpy as np
import pytest
from crossing_graphs import GRAPHS

from automap.cluster import parse_cluster
from automap.cost_graph.graph import CostGraph
from automap.cost_graph.sensitivities import sensitivities
from automap.price.kernels.array_types import columns_of, records_of
from automap.price.kernels.cost_records import UNIT_COST_DTYPE, UNIT_COST_WIDTH
from automap.problem import Problem
from automap.space.space import PlanSpace
from ir import zoo

ADD_UP = columns_of(
    UNIT_COST_DTYPE, "forward_s", "backward_s", "recompute_s", "parameters", "zero_parameters", "reduced", "gathered"
)
CROSSING = columns_of(UNIT_COST_DTYPE, "boundary_bytes")
(SAVED,) = columns_of(UNIT_COST_DTYPE, "saved_bytes")
STATE = columns_of(UNIT_COST_DTYPE, "parameters", "zero_parameters")


def graph_of(space, values):
    graph = CostGraph(space, tuple(values[: space.first.signature]))
    return graph, graph.picked(tuple(values))


def seconds(costs):
    """[rows, 2] forward and backward seconds of the device, with all collectives counted in full."""
    rows = records_of(np.ascontiguousarray(costs[:, :UNIT_COST_WIDTH]), UNIT_COST_DTYPE)
    forward = rows["forward_s"] + rows["forward_comm_s"].sum(axis=1)
    comm = rows["backward_comm_s"].sum(axis=1) + rows["recompute_comm_s"].sum(axis=1)
    backward = rows["backward_s"] + rows["recompute_s"] + comm
    return np.stack([forward, backward], axis=1)


def test_a_chain_adds_up_exactly(mlp, space):
    s = space(mlp((32, 64, 128, 64, 32)), "2x2xV100@10Gbit", 16)
    for values in s.random_batch(np.random.default_rng(0), 20).tolist():
        graph, picked = graph_of(s, values)
        assert graph.values(picked) == tuple(values)
        exact = graph.units.costs(graph.chosen(picked))
        np.testing.assert_allclose(graph.unit_costs(picked)[:, ADD_UP], exact[:, ADD_UP], rtol=1e-12)
        np.testing.assert_allclose(seconds(graph.unit_costs(picked)), seconds(exact), rtol=1e-12)
        np.testing.assert_allclose(graph.unit_costs(picked)[:, SAVED], exact[:, SAVED], rtol=1e-12, atol=1e-6)


@pytest.mark.parametrize("cluster", ["2x2xV100@10Gbit", "2xV100-16GB+2xP100-16GB", "5xV100-16GB@10Gbit"])
def test_a_transformer_adds_up_but_for_requests_that_come_back(gpt, space, cluster):
    """Compute, parameters and reductions always; conversions unless a tensor is asked for as A, B, A."""
    s = space(gpt(layers=3), cluster, 16)
    errors = []
    for values in s.random_batch(np.random.default_rng(1), 25).tolist():
        graph, picked = graph_of(s, values)
        exact = graph.units.costs(graph.chosen(picked))
        found = graph.unit_costs(picked)
        np.testing.assert_allclose(found[:, ADD_UP], exact[:, ADD_UP], rtol=1e-12)
        errors += (seconds(found) / seconds(exact) - 1.0).reshape(-1).tolist()
    assert np.median(np.abs(errors)) < 1e-12
    assert np.quantile(np.abs(errors), 0.8) < 1e-9
    assert min(errors) > -1e-9, "a conversion that is asked for again is charged again, never forgotten"


@pytest.mark.parametrize("name", GRAPHS)
def test_models_in_which_several_tensors_cross_add_up(name, space):
    s = space(GRAPHS[name](), "2x2xV100@10Gbit", 16)
    for values in s.random_batch(np.random.default_rng(5), 20).tolist():
        graph, picked = graph_of(s, values)
        exact, found = graph.units.costs(graph.chosen(picked)), graph.unit_costs(picked)
        np.testing.assert_allclose(found[:, ADD_UP], exact[:, ADD_UP], rtol=1e-12)
        np.testing.assert_allclose(found[:, CROSSING], exact[:, CROSSING], rtol=1e-12)
        assert (seconds(found) > seconds(exact) * (1.0 - 1e-9)).all()


@pytest.mark.parametrize("experts", ["experts=8,top_k=1", "experts=4,top_k=2"])
def test_tokens_of_experts_are_exchanged_together_and_other_tensors_of_their_size_are_not(experts, space):
    """Of 60 plans of a mixture, whose tokens for one expert each are as large as those of its attention."""
    s = space(zoo.build(f"moe:layers=2,hidden=64,heads=4,{experts},seq_len=32,vocab_size=128"), "8xA100-80GB", 32)
    errors = []
    for values in s.random_batch(np.random.default_rng(2), 60).tolist():
        graph, picked = graph_of(s, values)
        exact = graph.units.costs(graph.chosen(picked))
        errors += (seconds(graph.unit_costs(picked)) / seconds(exact) - 1.0).reshape(-1).tolist()
    assert np.quantile(np.abs(errors), 0.95) < 1e-12
    assert min(errors) > -1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cluster", "batch"),
    [
        ("gpt2", "8xA100-80GB", 64),
        ("resnet50", "2x8xV100-16GB@25Gbit", 256),
        ("moe:layers=2,hidden=64,heads=4,experts=4,seq_len=32,vocab_size=128", "2x4xA100-80GB", 32),
    ],
)
def test_models_of_the_zoo_add_up(model, cluster, batch):
    s = PlanSpace(Problem.build(zoo.build(model), parse_cluster(cluster), {"global_batch": batch}, {}))
    errors = []
    for values in s.random_batch(np.random.default_rng(2), 15).tolist():
        graph, picked = graph_of(s, values)
        exact = graph.units.costs(graph.chosen(picked))
        errors += (seconds(graph.unit_costs(picked)) / seconds(exact) - 1.0).reshape(-1).tolist()
    assert np.median(np.abs(errors)) < 1e-12
    assert np.abs(errors).max() < 0.1


def test_scalars_weigh_the_same_costs(gpt, space):
    s = space(gpt(layers=3), "2x2xV100@10Gbit", 16)
    rng = np.random.default_rng(3)
    for values in s.random_batch(rng, 10).tolist():
        graph, picked = graph_of(s, values)
        weights = rng.random(graph.base.shape)
        expected = float((graph.unit_costs(picked) * weights).sum())
        every = [np.arange(len(node.values)) for node in graph.nodes]
        assert graph.weighted(weights).scalars(every).value(picked) == pytest.approx(expected, rel=1e-9)


def test_sensitivities_are_those_of_the_price(gpt, space):
    """They are tested on the linear part of the price: more compute on the only rank, more parameters."""
    s = space(gpt(layers=3), "4xA100", 16, pp=1)
    values = s.random_batch(np.random.default_rng(4), 1)[0].tolist()
    graph, picked = graph_of(s, values)
    chosen = graph.chosen(picked)
    units = graph.units
    costs, tied = units.costs(chosen), units.tied(chosen)
    at = sensitivities(units, chosen)
    before = units.outcome(costs, tied, exact=True)
    for row in range(len(costs)):
        more = costs.copy()
        more[row, STATE] += 1e6
        after = units.outcome(more, tied, exact=True)
        predicted = 1e6 * at.time[row, STATE].sum()
        assert after.step_time_s - before.step_time_s == pytest.approx(predicted, rel=1e-3, abs=1e-12)
        used = 1e6 * at.memory[0, row, STATE].sum()
        capacity = at.capacity[0]
        assert (after.overflow - before.overflow) * capacity == pytest.approx(used, rel=1e-3)
