"""Made-up values: in range, alike on every rank; and the optimizer that moves them."""

import numpy as np
import torch

from automap.runtime.executor.optimizer import LEARNING_RATE, Optimizer
from automap.runtime.executor.synthetic_data import RandomData, RandomValues, index_limits
from automap.runtime.operators.apply import run
from ir.build import GraphBuilder

CPU = torch.device("cpu")


def test_indices_stay_below_what_they_index(gpt):
    graph = gpt(layers=1, hidden=16, seq=8, vocab=32)
    assert index_limits(graph) == {"ids": 32, "labels": 32}
    b = GraphBuilder()
    ids = b.input("ids", (1, 8), "int64")
    (first,) = b.add(
        "Slice", [ids, *(b.constant(n, np.array([v])) for n, v in (("s", 0), ("e", 4), ("a", 1)))], ["first"]
    )
    (x,) = b.add("Gather", [b.parameter("small", (5, 3)), first], ["x"], attributes={"axis": 0})
    (y,) = b.add("Gather", [b.parameter("large", (9, 3)), ids], ["y"], attributes={"axis": 0})
    assert index_limits(b.finish([x, y])) == {"ids": 5}


def test_parts_are_those_of_the_whole_and_a_step_can_be_computed(gpt):
    graph = gpt(layers=1, hidden=16, seq=8, vocab=32)
    data = RandomData(graph, 4, 0, torch.float32, CPU)
    whole = data("ids", ((0, 4), (0, 8)), 1)
    assert torch.equal(RandomData(graph, 4, 0, torch.float32, CPU)("ids", ((1, 3), (0, 8)), 1), whole[1:3])
    assert not torch.equal(data("ids", ((0, 4), (0, 8)), 0), whole)
    values = RandomValues(graph, 0)
    assert all(torch.equal(values[name], RandomValues(graph, 0)[name]) for name in values)
    labels = data("labels", ((0, 4), (0, 8)), 1)
    loss = run(graph, {**values, "ids": whole, "labels": labels}, 4)[graph.outputs[-1]] / 32
    assert 1.0 < float(loss) < 8.0


def test_masters_take_what_bfloat16_would_round_away():
    leaf = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    optimizer = Optimizer({"w": leaf}, "sgd")
    for _ in range(8):
        leaf.grad = torch.ones_like(leaf)
        optimizer.step()
        assert leaf.grad is None
    assert torch.equal(leaf.detach(), torch.full((4,), 1.0 - 8 * LEARNING_RATE).bfloat16())


def test_adam_and_momentum_are_those_of_torch():
    for kind in ("adam", "momentum", "sgd"):
        mine, other = (torch.ones(3, requires_grad=True) for _ in range(2))
        momentum = 0.9 if kind == "momentum" else 0.0
        wanted = (
            torch.optim.Adam([other], lr=LEARNING_RATE)
            if kind == "adam"
            else torch.optim.SGD([other], lr=LEARNING_RATE, momentum=momentum)
        )
        optimizer = Optimizer({"w": mine}, kind)
        for step in range(3):
            for leaf in (mine, other):
                leaf.grad = torch.full((3,), 1.0 + step)
            optimizer.step()
            wanted.step()
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=0.0)
