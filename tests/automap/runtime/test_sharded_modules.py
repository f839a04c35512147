"""Modules that run on a part: what the ranks of an axis compute together is what one process computes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from automap.runtime.mesh_groups import Axis
from automap.runtime.trainer import sharded_modules
from automap.runtime.trainer.roles import Role

RANKS, HIDDEN = 2, 8


class Gain(nn.Module):
    """A norm as models of transformers write it, whose weight is what is more than 1."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * (1.0 + self.weight)


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm, Gain])
def test_a_norm_of_split_features_runs_its_own_code(kind, monkeypatch):
    torch.manual_seed(0)
    whole, x = kind(HIDDEN).double(), torch.randn(3, HIDDEN, dtype=torch.float64)
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    given, meeting = {}, threading.Barrier(RANKS)

    def sum_over(part, axes, _placement):
        """Adds up what the threads of all ranks give."""
        given[axes[0].index] = part
        meeting.wait(10)
        total = sum(given.values())
        meeting.wait(10)
        return total

    def run(rank):
        module = kind(HIDDEN // RANKS).double()
        for name, parameter in module.named_parameters():
            parameter.data = whole.get_parameter(name).data.chunk(RANKS)[rank]
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.eps = whole.eps
        axis = Axis(name="tp", number=0, size=RANKS, index=rank, group=None)
        with torch.no_grad():
            return sharded_modules._norm(
                module.forward, Role(kind="features"), sharded_modules.layouts_of(axis), x.chunk(RANKS, -1)[rank]
            )

    monkeypatch.setattr(sharded_modules, "sum_over", sum_over)
    with ThreadPoolExecutor(RANKS) as pool:
        found = torch.cat(list(pool.map(run, range(RANKS))), -1)
    assert torch.allclose(found, whole(x).detach(), atol=1e-12)


class Shifted(nn.Embedding):
    """An embedding with code of its own, as OPT's positions have it."""

    def forward(self, mask, *, ids):
        return 3.0 * super().forward(ids + 2) + mask


def test_a_split_embedding_runs_its_own_code():
    table = torch.randn(6, HIDDEN, dtype=torch.float64)
    ids, parts = torch.tensor([[0, 1, 2], [3, 3, 0]]), []
    for rank in range(RANKS):
        # A table that another module holds whole: each rank takes its rows.
        module = Shifted(len(table), HIDDEN, dtype=torch.float64)
        module.weight.data = table
        axis = Axis(name="tp", number=0, size=RANKS, index=rank, group=None)
        role, layouts = Role(kind="vocabulary"), sharded_modules.layouts_of(axis)
        parts.append(sharded_modules._own_embedding(module.forward, module, role, layouts, torch.zeros(1), ids=ids))
    assert torch.equal(sum(parts).detach(), 3.0 * F.embedding(ids + 2, table))


class Sharing(nn.Module):
    """An embedding that the network holds by two names and calls by the second, as T5 does."""

    def __init__(self):
        super().__init__()
        self.shared, self.words = nn.Embedding(6, 4), nn.Embedding(6, 4)
        self.words.weight = self.shared.weight


def test_a_shared_parameter_is_split_for_modules_that_are_never_called_too(monkeypatch):
    """Otherwise ranks would keep the whole weight besides, which no step trains."""
    network = Sharing()
    monkeypatch.setattr(sharded_modules, "_split", lambda p, name, dim, *_: nn.Parameter(p.detach().chunk(2, dim)[0]))
    axis = Axis(name="tp", number=0, size=RANKS, index=0, group=None)
    roles = {"words": Role(kind="vocabulary")}
    sharded_modules.split_modules(network, roles, sharded_modules.layouts_of(axis), mesh=None)
    assert network.shared.weight is network.words.weight
    assert network.shared.weight.shape == (3, 4)
