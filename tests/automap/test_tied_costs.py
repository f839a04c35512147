"""What tied parameters cost in a cost graph, against their definition and against exact prices."""

import itertools

import numpy as np
import pytest

from automap.cost_graph.graph import CostGraph
from automap.cost_graph.sensitivities import sensitivities
from automap.cost_graph.tied_costs import COLUMNS, SHARED, TiedCosts
from ir import zoo
from ir.build import GraphBuilder
from ir.loss import with_loss

GPT = "gpt:layers=4,hidden=64,heads=4,seq_len=16,vocab_size=8192"
T5 = "t5:layers=2,hidden=64,heads=4,ffn=128,seq_len=16,vocab_size=8192"


def graphs(space, spec, count, **fix):
    """Cost graphs of random plans, with their assignments."""
    s = space(zoo.build(spec), "2x4xV100@10Gbit", 32, tp=1, **fix)
    for values in s.random_batch(np.random.default_rng(0), count).tolist():
        graph = CostGraph(s, tuple(values[: s.first.signature]))
        yield graph, graph.picked(tuple(values))


def defined(graph, picked):
    """[columns] what large ties cost: on one rank less than two parameters, on several the largest part of one."""
    found = np.zeros(len(COLUMNS))
    rows = graph.units.tied(graph.chosen(picked))
    for row in rows[graph.units.large_ties]:
        if row.rank == row.other_rank:
            found[:-1] -= np.concatenate([np.ravel(row.excess[name]) for name in SHARED])
        else:
            found[-1] += rows["exchanged"][rows["first"] == row.first].max()
    return found


def counted(graph, picked):
    """[columns] the same by the graph around a plan, up to a constant."""
    return graph.unit_costs(picked)[:, COLUMNS].sum(axis=0)


@pytest.mark.parametrize(("spec", "readers", "pp"), [(GPT, 2, 1), (GPT, 2, 2), (T5, 3, 1), (T5, 3, 2), (T5, 3, 4)])
def test_what_readers_change_is_exact(spec, readers, pp, space):
    """This holds for one reader, and for two where there are no others."""
    for graph, picked in graphs(space, spec, 4, pp=pp, zero=1):
        near = graph.around(picked)
        nodes = sorted({node for factor, _ in near.factors[len(graph.factors) :] for node in factor.nodes})
        assert len(nodes) == readers
        before = defined(graph, picked), counted(near, picked) - counted(graph, picked)
        changes = [((node, value),) for node in nodes for value in range(len(graph.nodes[node].values))]
        if readers == 2:
            changes += [(one, other) for (one,), (other,) in itertools.combinations(changes, 2) if one[0] != other[0]]
        for change in changes:
            other = list(picked)
            for node, value in change:
                other[node] = value
            told = counted(near, other) - counted(graph, other) - before[1]
            np.testing.assert_allclose(told, defined(graph, other) - before[0], rtol=1e-9, atol=1e-3)


@pytest.mark.parametrize(("spec", "pp"), [(GPT, 1), (GPT, 2), (GPT, 4), (T5, 2), (T5, 4)])
def test_the_readers_of_a_tied_embedding_are_chosen_together(spec, pp, space):
    """Of many signatures of all readers, with others kept, the best by the graph is near the best by price."""
    with_ties, without = [], []
    for graph, picked in graphs(space, spec, 8, pp=pp):
        time, near = sensitivities(graph.units, graph.chosen(picked)).time, graph.around(picked)
        nodes = sorted({node for factor, _ in near.factors[len(graph.factors) :] for node in factor.nodes})
        some = np.array(list(itertools.product(*(range(len(graph.nodes[n].values)) for n in nodes))))
        some = np.random.default_rng(1).permutation(some)[:64].tolist()
        plans = graph.moved(picked, [list(zip(nodes, values, strict=True)) for values in some])
        exact = graph.space.price(plans)[:, 0]
        for found, by in ((with_ties, near), (without, graph)):
            told = [by.value(time, graph.picked(tuple(plan))) for plan in plans.tolist()]
            found.append(exact[int(np.argmin(told))] / exact.min() - 1.0)
    assert np.mean(with_ties) < 0.02
    assert np.mean(with_ties) < 0.6 * np.mean(without)


def test_many_readers_of_one_parameter_are_not_combined_in_every_way(space, monkeypatch):
    """Sixteen unlike layers share a product; of each way to require it, readers have several classes."""
    priced, costs = [], TiedCosts._costs

    def counting(self, ties, readers, plan, changes):
        priced.append(len(changes))
        return costs(self, ties, readers, plan, changes)

    monkeypatch.setattr(TiedCosts, "_costs", counting)
    builder = GraphBuilder()
    x = builder.input("x", (1, 16, 64))
    shared = builder.parameter("shared", (64, 64))
    kinds = ("Relu", "Tanh", "Sigmoid", "Exp", "Gelu", "Elu", "Softplus", "Erf", "Softsign", "Abs", "Neg", "Sin", "Cos")
    for number, kind in enumerate((*kinds, "HardSwish", "Mish", "Selu")):
        (x,) = builder.add("MatMul", [x, shared], [f"product{number}"], scope=f"layer{number}", opset=22)
        (x,) = builder.add(kind, [x], [f"result{number}"], scope=f"layer{number}", opset=22)
    s = space(with_loss(builder.finish([x], name="shared")), "2x4xV100@10Gbit", 32, pp=1, tp=2)
    (values,) = s.random_batch(np.random.default_rng(0), 1).tolist()
    graph = CostGraph(s, tuple(values[: s.first.signature]))
    picked = graph.picked(tuple(values))
    assert np.isfinite(counted(graph.around(picked), picked)).all()
    assert 16 < max(priced) < 50_000
