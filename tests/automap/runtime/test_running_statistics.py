"""Running statistics count what a plan trains on, each sample once; without processes."""

import contextlib
from dataclasses import replace
from unittest import mock

import changing_buffers
import pytest
import torch
import torch.distributed as dist
from runtime_ranks import expert_plan, make_problem
from torch import nn
from torch.distributed.pipelining import PipelineStage

from automap.runtime.trainer.pipeline_schedules import _Stage
from automap.runtime.trainer.recomputation import recompute
from automap.runtime.trainer.running_statistics import StatisticsKept, average_statistics, changed_buffers, find_changed
from automap.runtime.trainer.supported_plans import FinerThanModules, check_statistics
from ir import zoo


class Network(nn.Module):
    """A block with two layers, and normalisations around them."""

    def __init__(self, momentum=0.1):
        super().__init__()
        torch.manual_seed(0)
        norms = (nn.BatchNorm1d(4, momentum=momentum), nn.BatchNorm1d(4, momentum=momentum))
        self.block = nn.Sequential(norms[0], nn.Linear(4, 4), norms[1], nn.Linear(4, 4))

    def forward(self, x):
        return self.block(x)


def trained(network):
    for seed in range(3):
        network(torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    return {**network.state_dict(), **{n: p.grad for n, p in network.named_parameters()}}


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("kept", [(), ("block.1", "block.3")])
def test_what_runs_again_counts_once(kept, momentum):
    network = Network(momentum)
    recompute(network, {"block": kept})
    found, wanted = trained(network), trained(Network(momentum))
    assert found["block.0.num_batches_tracked"] == 3
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.0)


def test_code_that_runs_again_reads_the_buffers_of_the_first_time():
    found, wanted = (changing_buffers.network() for _ in range(2))
    x = torch.randn(5, changing_buffers.WIDTH, dtype=torch.float64)
    before = {name: value.clone() for name, value in found.state_dict().items()}
    find_changed(found, lambda: found(x))
    assert changed_buffers(found) == [f"h.{number}.average" for number in range(changing_buffers.BLOCKS)]
    assert all(torch.equal(value, before[name]) for name, value in found.state_dict().items())
    recompute(found, {"h.0": (), "h.2": ()})
    for step in range(3):
        for network in (found, wanted):
            network(x + step).square().sum().backward()
    torch.testing.assert_close(found.state_dict(), wanted.state_dict(), rtol=0.0, atol=0.0)
    for (name, parameter), other in zip(found.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name


def test_samples_that_shapes_are_found_with_do_not_count():
    network = Network()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    stage = _Stage.__new__(_Stage)
    stage.submod = network
    with mock.patch.object(PipelineStage, "_forward_metadata_inference", lambda self, x: self.submod(x)):
        stage._forward_metadata_inference(torch.full((2, 4), torch.inf))
    torch.testing.assert_close(network.state_dict(), before)


def test_statistics_are_those_of_before_behind_it():
    network = Network()
    before = dict(network.named_buffers())
    with StatisticsKept(network), StatisticsKept(network):
        network(torch.ones(2, 4))
    with pytest.raises(RuntimeError), StatisticsKept(network):
        network(torch.zeros(2, 3))
    assert all(buffer is before[name] for name, buffer in network.named_buffers())
    assert network.block[0].num_batches_tracked == 0


class Pair:
    """A group of two replicas, the other one of which always has the same tensors."""

    def __init__(self, other):
        self.other = iter(other)

    def size(self):
        return 2

    def all_reduce(self, x, group):
        x.add_(next(group.other))


def test_a_checkpoint_has_the_mean_of_the_replicas():
    one, two = Network(), Network()
    one(torch.randn(5, 4, generator=torch.Generator().manual_seed(1)))
    two(torch.randn(5, 4, generator=torch.Generator().manual_seed(2)))
    floats = [[x for x in network.buffers() if x.is_floating_point()] for network in (one, two)]
    wanted = [(x + y) / 2 for x, y in zip(*floats, strict=True)]
    pair = Pair(floats[1])
    with mock.patch.object(dist, "all_reduce", pair.all_reduce):
        average_statistics(one, [pair])
    torch.testing.assert_close(floats[0], wanted)
    assert one.block[0].num_batches_tracked == 1


@pytest.mark.parametrize(("kind", "refused"), [("local", False), ("synchronized", True)])
def test_statistics_over_several_ranks_are_refused(kind, refused):
    gpt, resnet = zoo.build("gpt:layers=1,hidden=16,heads=4,seq_len=8,vocab_size=24"), zoo.build("resnet50")
    plan = expert_plan(make_problem(gpt, 2, 8, {}))
    plan = replace(plan, training=replace(plan.training, batch_norm=kind))
    check_statistics(plan, gpt)
    alone = replace(plan.stages[0], mesh=tuple((name, 1) for name, _ in plan.stages[0].mesh))
    check_statistics(replace(plan, stages=(alone,)), resnet)
    with pytest.raises(FinerThanModules, match="this plan has 2 replicas") if refused else contextlib.nullcontext():
        check_statistics(plan, resnet)
