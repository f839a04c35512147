"""What is handed to a step of a training and is no data of its network is refused by name."""

import pytest
import torch

from automap.errors import PlanError
from automap.runtime.trainer.training_graph import check_count, check_data
from ir import zoo

GRAPH = zoo.build("gpt:layers=1,hidden=16,heads=4,seq_len=8,vocab_size=24")
IDS = torch.zeros(4, 8, dtype=torch.int64)


def test_inputs_and_labels_pass():
    check_data((IDS, IDS), GRAPH, 4)
    assert check_count(3.0) == 3.0


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


def test_a_batch_without_labels_is_refused():
    with pytest.raises(PlanError, match=r"data\.labels: no label of the batch counts"):
        check_count(0.0)
