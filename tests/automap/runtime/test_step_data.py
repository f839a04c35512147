"""What is handed to a step of a training and is no data of its network is refused by name."""

import pytest
import torch

from automap.errors import PlanError
from automap.runtime.trainer import step_data
from automap.runtime.trainer.step_data import Indices, check_data
from ir import zoo

GRAPH = zoo.build("gpt:layers=1,hidden=16,heads=4,seq_len=8,vocab_size=24")
IDS = torch.zeros(4, 8, dtype=torch.int64)


@pytest.fixture
def alone(monkeypatch):
    """One process, which needs no other."""
    monkeypatch.setattr(step_data.dist, "get_world_size", lambda: 1)


def count(ids, labels, **how):
    return Indices(GRAPH, **how).count((labels != -100).sum(), (ids, labels), None)


def test_inputs_and_labels_pass(alone):
    check_data((IDS, IDS), GRAPH, 4)
    labels = torch.full_like(IDS, 23)
    labels[:, 3:] = -100
    assert count(labels.clamp(0), labels) == 12.0


@pytest.mark.parametrize(
    ("data", "field", "said"),
    [
        ((), "data", "takes 2 tensors"),
        ((IDS,), "data", "takes 2 tensors"),
        ((IDS, IDS, IDS), "data", "takes 2 tensors"),
        ((IDS, IDS.numpy()), "data.labels", "no tensor"),
        ((IDS[:3], IDS[:3]), "data", "this rank reads 4 samples"),
        ((IDS, torch.zeros(())), "data", "this rank reads 4 samples"),
    ],
)
def test_what_is_no_data_of_the_network_is_named(data, field, said):
    with pytest.raises(PlanError, match=said) as caught:
        check_data(data, GRAPH, 4)
    assert caught.value.field == field
    assert caught.value.repair


def test_a_batch_without_labels_is_refused(alone):
    with pytest.raises(PlanError, match=r"data\.labels: no label of the batch counts"):
        count(IDS, torch.full_like(IDS, -100))


@pytest.mark.parametrize("number", [-1, -100, 24])
def test_rows_that_no_table_has_are_refused(alone, number):
    ids = IDS.clone()
    ids[2, 5] = number
    with pytest.raises(
        PlanError, match=f"data\\.ids: the network looks up 24 rows \\(got {number}\\). Give numbers from 0"
    ):
        count(ids, IDS)


@pytest.mark.parametrize("number", [-1, 24])
def test_classes_that_the_network_does_not_have_are_refused(alone, number):
    labels = IDS.clone()
    labels[2, 5] = number
    with pytest.raises(PlanError, match=f"data\\.labels: the network has 24 classes \\(got {number}\\). Give classes"):
        count(IDS, labels)
    assert count(IDS, labels, has_classes=False) == 32.0
