"""Running statistics count what a plan trains on, each sample once; without processes."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from automap.runtime.trainer.pipeline_schedules import _Stage
from automap.runtime.trainer.recomputation import recompute
from automap.runtime.trainer.running_statistics import StatisticsKept


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
