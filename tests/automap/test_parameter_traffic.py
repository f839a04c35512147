"""What parameters and gradients send in a step: the price and its list against a count from the definitions of ZeRO."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from collective_list import list_parameter_collectives
from parameter_traffic import ParameterTraffic

from automap.space.templates import templates
from ir import zoo
from ir.build import GraphBuilder
from ir.loss import with_loss

SIZES = "layers=2,hidden=64,heads=4,seq_len=32,vocab_size=128"
CASES = {
    "gpt": (f"gpt:{SIZES}", "2x4xA100", 16, {}),
    "three axes": (f"gpt:{SIZES}", "8xA100", 16, {"cp": 2}),
    "experts": (f"moe:{SIZES},kv_heads=4,ffn=128,experts=4", "8xA100", 16, {}),
    "a table that three parts read": (f"t5:{SIZES}", "2x4xA100", 16, {}),
    "convolutions": ("resnet:blocks=1-1,width=8,image_size=32,num_classes=12", "2x4xA100", 16, {}),
    "mixed devices": (f"gpt:{SIZES}", "4xV100-16GB+4xP100", 24, {"pp": 2}),
}


def listed(lowered, evaluator):
    """(rank, kind, axis, what, when) -> elements; and what pairs of pipeline ranks exchange, by rank."""
    found, exchanged = Counter(), Counter()
    for one in list_parameter_collectives(lowered, evaluator):
        if one.kind == "send_recv":
            exchanged[one.rank] += one.elements
        else:
            found[one.rank, one.kind, one.axis, one.what, one.when] += one.elements
    return dict(found), dict(exchanged)


def counted(check, plan):
    """Likewise, from the definitions."""
    found = {(t.rank, t.kind, t.axis, t.what, t.when): n for t, n in check.collectives(plan).items()}
    exchanged = Counter()
    for ranks, elements in check.exchanged(plan).items():
        for rank in ranks:
            exchanged[rank] += elements
    return found, dict(exchanged)


@pytest.mark.parametrize("name", CASES)
def test_the_list_is_what_the_definitions_say(name, space):
    spec, cluster, batch, fix = CASES[name]
    s = space(zoo.build(spec), cluster, batch, **fix)
    check, stages = ParameterTraffic(s.problem), Counter()
    for values in s.random_batch(np.random.default_rng(1), 60):
        lowered = s.lowered(tuple(values.tolist()))
        for priced, wanted in zip(
            listed(lowered, s.evaluator), counted(check, s.decode(tuple(values.tolist()))), strict=True
        ):
            assert priced == pytest.approx(wanted)
        stages[lowered.zero] += 1
    assert min(stages[zero] for zero in range(4)) > 3


@pytest.mark.parametrize("norm_first", [True, False])
def test_what_parameters_make_is_summed_where_it_meets_data(norm_first, space):
    """Learned queries go on to an attention, before which they are repeated for all samples, and over a residual."""
    b = GraphBuilder()
    x = b.input("x", (1, 16, 64))
    (queries,) = b.add("MatMul", [b.parameter("queries", (16, 64)), b.parameter("before", (64, 64))], ["q"])
    (keys,) = b.add("Transpose", [x], ["keys"], attributes={"perm": (0, 2, 1)})
    if norm_first:
        (normed,) = b.add("Relu", [queries], ["normed"])
        (repeated,) = b.add("Expand", [normed], ["repeated"], attributes={"shape": (1, 16, 64), "batch_dim": 0})
        (scores,) = b.add("MatMul", [repeated, keys], ["scores"])
        (met,) = b.add("MatMul", [scores, x], ["met"])
        (out,) = b.add("Add", [queries, met], ["out"])
    else:
        (scores,) = b.add("MatMul", [queries, keys], ["scores"])
        (met,) = b.add("MatMul", [scores, x], ["met"])
        (repeated,) = b.add("Expand", [queries], ["repeated"], attributes={"shape": (1, 16, 64), "batch_dim": 0})
        (out,) = b.add("Add", [repeated, met], ["out"])
    s = space(with_loss(b.finish([out])), "4xA100", 16, pp=1)
    check = ParameterTraffic(s.problem)
    for _, values in templates(s):
        lowered = s.lowered(values)
        assert listed(lowered, s.evaluator)[0] == pytest.approx(counted(check, s.decode(values))[0])


RATE = 1e9


def seconds(traffic, elements, ranks):
    """Seconds of a large message by the ring's volume: 4 bytes a weight, 3 a gradient, links without latency."""
    sent = elements * {"weights": 4.0, "gradients": 3.0}[traffic.what] / RATE
    return (2.0 if traffic.kind == "all_reduce" else 1.0) * (ranks - 1) / ranks * sent


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_price_pays_for_all_that_is_sent(zero, gpt, space):
    """If nothing is hidden and all links have one rate, seconds are the counted bytes over that rate."""
    s = space(gpt(), "2x4xA100", 16, zero=zero, pp=1)
    settings = s.evaluator._settings
    settings.gradient_overlap = settings.gather_overlap = settings.gathers_singly = 0.0
    settings.parameter_bytes, settings.sent_gradient_bytes = 4.0, 3.0
    check, rng, seen = ParameterTraffic(s.problem), np.random.default_rng(2), 0
    for _ in range(40):
        values = s.random(rng)
        lowered = s.lowered(values)
        links = np.zeros_like(lowered.layout.stages[0].links)
        links["bytes_per_s"] = links["gather_bytes_per_s"] = RATE
        stage = replace(lowered.layout.stages[0], links=links)
        lowered = replace(lowered, layout=replace(lowered.layout, stages=(stage,)))
        found = s.evaluator.evaluate(lowered).ranks[0]
        wanted = Counter()
        for traffic, elements in check.collectives(s.decode(values)).items():
            wanted[traffic.when] += seconds(traffic, elements, stage.axes[lowered.axes.index(traffic.axis)])
        assert found["sync_s"] == pytest.approx(wanted["step"])
        assert found["zero_s"] == pytest.approx(lowered.num_micro_batches * wanted["micro_batch"])
        # What passes send besides does not depend on ZeRO.
        bare = s.evaluator.evaluate(replace(lowered, zero=0)).ranks[0]
        assert found.comm_s.tolist() == bare.comm_s.tolist()
        assert bare["zero_s"] == 0.0
        seen += wanted.total() > 0.0
    assert seen > 20


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_pure_data_parallelism_sends_every_parameter(zero, space):
    """The closed form is that of a deep model; the table that is also the head is used twice in a micro-batch."""
    graph = zoo.build("gpt:layers=96,hidden=64,heads=4,seq_len=32,vocab_size=128")
    s = space(graph, "8xA100", 16, zero=zero, pp=1, tp=1)
    shape = next(shape for shape in s.shapes if shape.dp == 8)
    values = next(values for _, values in templates(s) if s.shape(values) == shape)
    every, table = (
        graph.num_parameters,
        max(t.num_elements for t in graph.parameters if len(graph.consumers[t.name]) > 1),
    )
    wanted = {
        0: {("all_reduce", "step"): every},
        1: {("reduce_scatter", "step"): every, ("all_gather", "step"): every},
        2: {("reduce_scatter", "micro_batch"): every + table, ("all_gather", "step"): every},
        3: {("reduce_scatter", "micro_batch"): every + table, ("all_gather", "micro_batch"): 2 * (every + table)},
    }[zero]
    found = Counter()
    for traffic, elements in ParameterTraffic(s.problem).collectives(s.decode(values)).items():
        assert (traffic.rank, traffic.axis) == (0, "dp")
        found[traffic.kind, traffic.when] += elements
    assert dict(found) == wanted
