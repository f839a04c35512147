"""Optimizers that would take parts of weights for whole ones are refused before they change anything."""

import gc

import pytest
import torch

from automap.errors import PlanError
from automap.runtime.trainer.whole_weights import BY_WHOLE_WEIGHTS, FAILING, refuse_optimizers


class Trainer:
    """Anything that can end."""


@pytest.fixture
def weights():
    """A part of a weight and a whole one, with gradients."""
    found = [torch.nn.Parameter(torch.ones(4, 6)) for _ in range(2)]
    for weight in found:
        weight.grad = torch.ones(4, 6)
    return found


@pytest.mark.parametrize("kind", BY_WHOLE_WEIGHTS)
def test_parts_are_refused_and_whole_weights_trained(kind, weights):
    trainer, (part, whole) = Trainer(), weights
    refuse_optimizers(trainer, [part], BY_WHOLE_WEIGHTS)
    with pytest.raises(PlanError, match=r"looks at whole weights") as caught:
        getattr(torch.optim, kind)([whole, part]).step()
    assert (caught.value.field, caught.value.value) == ("optimizer", kind)
    assert torch.equal(part, torch.ones(4, 6)) and torch.equal(whole, torch.ones(4, 6))
    getattr(torch.optim, kind)([whole]).step()
    torch.optim.AdamW([part]).step()
    assert not torch.equal(whole, torch.ones(4, 6)) and not torch.equal(part, torch.ones(4, 6))


def test_muon_trains_what_it_sees_as_whole(weights):
    trainer = Trainer()
    refuse_optimizers(trainer, weights, FAILING)
    torch.optim.Muon(weights).step()


def test_the_end_of_a_trainer_ends_its_refusals(weights):
    trainer = Trainer()
    refuse_optimizers(trainer, weights, BY_WHOLE_WEIGHTS)
    del trainer
    gc.collect()
    torch.optim.Adafactor(weights).step()
