"""What is handed to a step of a training and is no data of its network is refused by name."""

import pytest
import torch
from torch import nn

from automap.errors import PlanError
from automap.runtime.torch_export import export_onnx
from automap.runtime.trainer import step_data
from automap.runtime.trainer.split_check import probe_inputs
from automap.runtime.trainer.step_data import Indices, check_step
from ir import zoo
from ir.loss import with_loss
from ir.onnx.sandbox import import_model

GRAPH = zoo.build("gpt:layers=1,hidden=16,heads=4,seq_len=8,vocab_size=24")
IDS = torch.zeros(4, 8, dtype=torch.int64)


@pytest.fixture
def alone(monkeypatch):
    """One process, which needs no other."""
    monkeypatch.setattr(step_data.dist, "get_world_size", lambda: 1)


def count(ids, labels, **how):
    return Indices(GRAPH, **how).count((labels != -100).sum(), (ids, labels), None)


def test_inputs_and_labels_pass(alone):
    check_step((IDS, IDS), GRAPH, 4)
    labels = torch.full_like(IDS, 23)
    labels[:, 3:] = -100
    assert count(labels.clamp(0), labels) == 12.0


@pytest.mark.parametrize(
    ("data", "field", "said"),
    [
        ((), "data", "takes 2 tensors"),
        ((IDS,), "data", "takes 2 tensors"),
        ((IDS, IDS, IDS), "data", "takes 2 tensors"),
        ((IDS, IDS.numpy()), "data.labels", "not a tensor"),
        ((IDS[:3], IDS[:3]), "data", "this rank reads 4 samples"),
        ((IDS, torch.zeros(())), "data", "this rank reads 4 samples"),
    ],
)
def test_what_is_no_data_of_the_network_is_named(data, field, said):
    with pytest.raises(PlanError, match=said) as caught:
        check_step(data, GRAPH, 4)
    assert caught.value.field == field
    assert caught.value.repair


def test_a_step_inside_of_autocast_is_refused():
    """The backward pass would run in bf16 behind a forward pass in the plan's precision."""
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PlanError, match=r"outside of it") as caught:
        check_step((IDS, IDS), GRAPH, 4)
    assert caught.value.field == "training.precision"


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


class Several(nn.Module):
    """Reads its inputs in another order than it takes them."""

    def __init__(self):
        super().__init__()
        self.rows, self.kinds, self.out = nn.Embedding(5, 4), nn.Embedding(3, 4), nn.Linear(4, 2)

    def forward(self, first, keep, last):
        x = self.kinds(last) + self.rows(first)
        return self.out(x.masked_fill(~keep[:, :, None], 0.0))


def test_a_step_takes_inputs_in_the_order_of_the_file():
    ids, keep = torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 3, dtype=torch.bool)
    data = export_onnx(lambda: (Several(), (ids, keep, ids.int())))
    graph = with_loss(import_model(data))
    assert [tensor.name for tensor in graph.data_inputs] == ["first", "keep", "last"]
    probes = probe_inputs(graph, Several(), 2)
    assert [x.dtype for x in probes] == [torch.int64, torch.bool, torch.int32]
    Several()(*probes)
