"""The scale of the loss follows torch's GradScaler."""

import torch
from torch import nn

from automap.runtime.trainer import loss_scaling
from automap.runtime.trainer.loss_scaling import LossScale

GOOD_STEPS = 10


def test_it_follows_the_gradient_scaler_of_torch(monkeypatch):
    monkeypatch.setattr(loss_scaling.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(loss_scaling, "GOOD_STEPS", GOOD_STEPS)
    torch.manual_seed(0)
    network, other = nn.Linear(3, 1), nn.Linear(3, 1)
    other.load_state_dict(network.state_dict())
    own, oracle = LossScale(torch.device("cpu"), on=True), torch.amp.GradScaler("cpu", growth_interval=GOOD_STEPS)
    ours, theirs = (torch.optim.Adam(part.parameters(), lr=0.1) for part in (network, other))
    for number in range(GOOD_STEPS + 40):
        x = torch.full((2, 3), torch.inf if number in (3, 4, 30) else 1.0 + number % 5)
        (network(x).sum() * own.scale).backward()
        own.finish(network.parameters())
        ours.step()
        ours.zero_grad()
        oracle.scale(other(x).sum()).backward()
        oracle.step(theirs)
        oracle.update()
        theirs.zero_grad()
        assert own.scale == oracle.get_scale(), number
    assert own.num_skipped == 3
    for mine, wanted in zip(network.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0.0, atol=0.0)


def test_a_checkpoint_holds_it():
    saved, fresh = (LossScale(torch.device("cpu"), on=True) for _ in range(2))
    saved.scale = 8.0
    fresh.restore(saved.state())
    assert fresh.scale == 8.0
    # One of a training in bf16 has none.
    fresh.restore(LossScale(torch.device("cpu"), on=False).state())
    assert fresh.scale == 8.0
