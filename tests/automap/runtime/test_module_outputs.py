"""What modules return: the scores are the first output of the exported graph, and those that a trainer takes."""

import dataclasses
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from automap.errors import PlanError
from automap.runtime.torch_export import export_onnx
from automap.runtime.trainer.training_graph import scores_of
from ir.onnx.sandbox import import_model

pytestmark = pytest.mark.slow  # torch and its exporter take seconds to import


@dataclasses.dataclass
class Output:
    hidden: Tensor | None = None
    logits: Tensor | None = None


class Net(nn.Module):
    def __init__(self, returned):
        super().__init__()
        self.body, self.head, self.returned = nn.Linear(8, 6), nn.Linear(6, 4), returned

    def forward(self, x):
        hidden = self.body(x).relu()
        return self.returned(hidden, self.head(hidden))


RETURNED = {
    "alone": lambda hidden, scores: scores,
    "tuple": lambda hidden, scores: (scores, hidden),
    "dictionary": lambda hidden, scores: {"hidden": hidden, "logits": scores},
    "ordered dictionary": lambda hidden, scores: OrderedDict(hidden=hidden, logits=scores),
    "dataclass": lambda hidden, scores: Output(hidden=hidden, logits=scores),
    "dataclass with nothing beside": lambda hidden, scores: Output(logits=scores),
}


@pytest.mark.parametrize("kind", RETURNED)
def test_graph_and_trainer_have_the_same_scores(kind):
    net, x = Net(RETURNED[kind]), torch.randn(2, 8)
    graph = import_model(export_onnx(lambda: (Net(RETURNED[kind]), torch.zeros(1, 8))))
    assert graph.tensors[graph.outputs[0]].shape[-1] == 4, "hidden features are taken for scores"
    assert torch.equal(scores_of(net, [x], ()), net.head(net.body(x).relu()))


def test_an_export_leaves_the_module_as_it_was():
    net = Net(RETURNED["dictionary"])
    export_onnx(lambda: (net, torch.zeros(1, 8)))
    assert "forward" not in vars(net)


@pytest.mark.parametrize("returned", [lambda hidden, scores: {"scores": scores}, lambda hidden, scores: Output()])
def test_what_has_no_scores_is_refused(returned):
    with pytest.raises(PlanError, match="returns no scores"):
        scores_of(Net(returned), [torch.randn(2, 8)], ())
