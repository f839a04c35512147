"""Graphs are read and made, samples are neighbourhoods, and the volumes of a profile are those of what was sampled."""

import itertools

import networkx
import numpy as np
import pytest

from automap.errors import ProblemError
from automap.gnn import graphs, training_time
from automap.gnn.graphs import partition, power_law_graph, read_edges, sample
from automap.gnn.profile import NODE_BYTES, Setting, parse_made_up, profile_graph


@pytest.fixture(scope="module")
def graph():
    return power_law_graph(3000, 10.0, np.random.default_rng(0))


def test_a_made_up_graph_is_symmetric_and_has_a_heavy_tail(graph):
    assert (graph != graph.T).nnz == 0 and graph.diagonal().sum() == 0
    degree = np.sort(np.diff(graph.indptr))
    assert 7.0 < degree.mean() < 10.0
    # With a tail of exponent 3 the largest degree grows as the root of the number of nodes.
    assert degree[-1] > 10 * np.median(degree)


def test_an_edge_list_is_read(tmp_path):
    path = tmp_path / "edges.txt"
    path.write_text("# a comment\n10 20\n20,30\n\n30\t10\n10 10\n20 10\n")
    found = read_edges(path)
    assert found.shape == (3, 3)
    assert found.toarray().tolist() == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "edges"),
        ("1 2\n3\n", "edges, line 2"),
        ("1 -2\n", "edges, line 1"),
        ("a b", "edges, line 1"),
        (f"1 {(1 << 63) - 1}\n1 {1 << 63}\n", "edges, line 2"),
        ("1 " + "9" * 5000, "edges, line 1"),
    ],
)
def test_what_is_no_edge_list_is_named(text, field, tmp_path):
    path = tmp_path / "edges.txt"
    path.write_text(text)
    with pytest.raises(ProblemError) as caught:
        read_edges(path)
    assert caught.value.field == field
    with pytest.raises(ProblemError, match="cannot be read"):
        read_edges(tmp_path / "missing")


@pytest.mark.parametrize("fan_outs", [(3,), (4, 2), (15, 10, 5)])
def test_a_sample_lies_in_the_neighbourhood_and_keeps_to_the_fan_outs(graph, fan_outs):
    seeds = np.array([5, 17, 400])
    found = set(sample(graph, seeds, fan_outs, np.random.default_rng(0)).tolist())
    whole = networkx.from_scipy_sparse_array(graph)
    lengths = networkx.multi_source_dijkstra_path_length(whole, set(seeds.tolist()), cutoff=len(fan_outs))
    assert set(seeds.tolist()) <= found <= set(lengths)
    most, front = 3, 3
    for fan_out in fan_outs:
        front *= fan_out
        most += front
    assert len(found) <= most
    assert any(lengths[node] == len(fan_outs) for node in found)


def test_fan_outs_above_all_degrees_take_the_whole_neighbourhood(graph):
    whole = networkx.from_scipy_sparse_array(graph)
    near = networkx.single_source_shortest_path_length(whole, 9, cutoff=2)
    assert set(sample(graph, np.array([9]), (3000, 3000), np.random.default_rng(0)).tolist()) == set(near)


@pytest.mark.parametrize("is_there", [True, False])
def test_partitions_are_even_and_cut_fewer_edges_than_chance(graph, is_there, monkeypatch):
    if not is_there:
        monkeypatch.setattr(graphs.importlib.util, "find_spec", lambda name: None)
    else:
        pytest.importorskip("pymetis")
    part, name = partition(graph, 4)
    assert (name == "METIS") == is_there
    assert np.bincount(part, minlength=4).max() <= 1.1 * 3000 / 4
    cut = (np.repeat(part, np.diff(graph.indptr)) != part[graph.indices]).mean()
    assert cut < 0.6  # by chance 3 of 4 edges


def test_volumes_are_those_of_the_nodes_that_were_sampled(graph):
    setting = Setting(machines=3, workers=3, samplers=2, batch=40, fan_outs=(4, 3), features=10, iterations=5)
    found = profile_graph(graph, setting, np.random.default_rng(1))
    problem = found.problem
    into = {f.target: 0.0 for f in problem.flows}
    for flow in problem.flows:
        into[flow.target] += flow.bytes.average
    for flow in problem.flows:
        if flow.source.startswith("sampler"):
            # A sampler sends on what it has received.
            assert flow.bytes.average == pytest.approx(into[flow.source])
            assert len(flow.bytes.trace) == 5
    seeds, node_bytes = 2 * 20, NODE_BYTES + 40.0
    assert seeds < found.batch_nodes <= seeds * (1 + 4 + 12)
    assert into["worker0"] > seeds * node_bytes
    assert 1 / 3 < found.own_share < 1.0
    again = profile_graph(graph, setting, np.random.default_rng(1))
    assert again.problem == problem


@pytest.mark.parametrize("fan_outs", [(5,), (4, 3), (3, 2, 2), (2, 2, 2, 2)])
def test_gradients_are_those_of_a_module_with_one_layer_a_hop(graph, fan_outs):
    torch = pytest.importorskip("torch")
    setting = Setting(machines=1, workers=1, samplers=1, batch=5, fan_outs=fan_outs, features=10, hidden=7, classes=3)
    widths = [10, *[7] * (len(fan_outs) - 1), 3]
    layers = [torch.nn.Linear(2 * read, made) for read, made in itertools.pairwise(widths)]
    held = sum(4 * parameter.numel() for layer in layers for parameter in layer.parameters())
    problem = profile_graph(graph, setting, np.random.default_rng(0)).problem
    sent = {(flow.source, flow.target): flow.bytes.average for flow in problem.flows}
    assert sent["worker0", "server0"] == sent["server0", "worker0"] == held


def test_measured_times_are_positive_and_follow_the_mini_batches(graph):
    pytest.importorskip("torch")
    setting = Setting(
        machines=2, workers=2, samplers=1, batch=60, fan_outs=(4, 3), features=16, iterations=4, train_s=None
    )
    found = profile_graph(graph, setting, np.random.default_rng(1))
    sent = {flow.target: flow.bytes.trace for flow in found.problem.flows if flow.source.startswith("sampler")}
    for task in found.problem.tasks:
        if task.role == "worker":
            ratios = np.array(task.time_s.trace) / np.array(sent[task.name])
            assert ratios == pytest.approx(np.full(4, ratios[0])) and ratios[0] > 0.0
        if task.role == "sampler":
            assert min(task.time_s.trace) > 0.0 and len(set(task.time_s.trace)) == 4
    assert "on " in found.measured


def test_layers_compute_what_the_next_one_reads(graph):
    seeds, fan_outs = np.array([5, 17, 400]), (3, 2, 2)
    blocks, nodes = training_time._blocks(graph, seeds, fan_outs, np.random.default_rng(0))
    assert nodes == len(sample(graph, seeds, fan_outs, np.random.default_rng(0)))
    computed = [count for _, _, count in blocks]
    assert computed == sorted(computed, reverse=True) and computed[-1] == len(seeds) and computed[0] <= nodes
    for (heads, tails, count), read in zip(blocks, [nodes, *computed], strict=False):
        # Every node that is computed has neighbours, and all of them are there.
        assert sorted(set(heads.tolist())) == list(range(count)) and tails.max() < read


@pytest.mark.parametrize("text", ["100", "1x5", "axb", "100x-1", "100x0"])
def test_what_is_no_graph_is_named(text):
    with pytest.raises(ProblemError, match="100000x15"):
        parse_made_up(text)


def test_more_machines_than_nodes_are_refused():
    with pytest.raises(ProblemError, match="at most 4 machines"):
        profile_graph(power_law_graph(4, 2.0, np.random.default_rng(0)), Setting(machines=5), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("setting", "field", "words"),
    [
        # 3,000 nodes of 1,000,000 features are 11 GiB, a quarter of them on each machine.
        ({"features": 1_000_000, "memory_GiB": 1.0}, "tasks[0].memory_GiB", "m0"),
        ({"gpus": 0}, "tasks[4].gpus", "at most 0 gpus"),
        ({"workers": 9, "gpus": 2}, "tasks.gpus", "all together have 8"),
        ({"workers": 8, "cpus": 8.0}, "tasks.cpus", "all together have 32"),
    ],
)
def test_a_profile_without_room_is_refused_before_it_is_sampled(graph, setting, field, words, monkeypatch):
    monkeypatch.setattr("automap.gnn.profile.partition", lambda graph, parts: pytest.fail("sampled"))
    with pytest.raises(ProblemError) as caught:
        profile_graph(graph, Setting(**setting), np.random.default_rng(0))
    assert caught.value.field == field and words in caught.value.repair


def test_a_profile_says_how_much_memory_its_tasks_need(graph):
    setting = Setting(workers=2, batch=20, fan_outs=(3,), iterations=2, features=100)
    problem = profile_graph(graph, setting, np.random.default_rng(0)).problem
    stores = [task.memory_GiB for task in problem.tasks if task.role == "store"]
    assert sum(stores) * (1 << 30) == pytest.approx(3000 * 408 + 8 * graph.nnz)
    (worker, *_) = [task for task in problem.tasks if task.role == "worker"]
    samplers = [task.memory_GiB for task in problem.tasks if task.name.startswith("sampler0.")]
    assert worker.memory_GiB == pytest.approx(sum(samplers)) and 0.0 < worker.memory_GiB * (1 << 30) <= 80 * 408
