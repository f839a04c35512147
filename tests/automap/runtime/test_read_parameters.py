from __future__ import annotations

import onnx
import pytest
import torch
from torch import Tensor, nn

from automap.errors import PlanError
from automap.runtime.torch_export import export_onnx
from automap.runtime.trainer.supported_plans import check_parameters
from ir.errors import ModelError
from ir.onnx.readers.nodes import FROZEN_KEY
from ir.onnx.sandbox import import_model
from ir.onnx.strip import strip


class Adapted(nn.Module):
    """A backbone, an adapter and a head; the parameters whose names begin in one way are frozen."""

    def __init__(self, frozen: str) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.adapter, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 64)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x) + self.adapter(x))


def test_parameters_that_need_no_gradient_are_frozen_in_the_graph_also_after_a_strip() -> None:
    data = export_onnx(lambda: (Adapted("backbone"), torch.zeros(1, 8)))
    wanted = {name for name, p in Adapted("backbone").named_parameters() if not p.requires_grad}
    for file in (data, strip(data).data):
        graph = import_model(file)
        assert {t.name for t in graph.parameters if t.frozen} == wanted
        assert not graph.warnings


def test_a_module_of_which_nothing_is_trained_was_made_for_inference() -> None:
    assert not import_model(export_onnx(lambda: (Adapted(""), torch.zeros(1, 8)))).has_frozen
    assert not import_model(export_onnx(lambda: (Adapted("adapter.none"), torch.zeros(1, 8)))).has_frozen


def with_metadata(text: str) -> bytes:
    model = onnx.load_from_string(export_onnx(lambda: (Adapted("adapter.none"), torch.zeros(1, 8))))
    model.metadata_props.add(key=FROZEN_KEY, value=text)
    return model.SerializeToString()


def test_files_of_before_say_a_sentence_and_broken_names_are_refused() -> None:
    graph = import_model(with_metadata("8 of 16 parameters are frozen"))
    assert graph.warnings == ("8 of 16 parameters are frozen",)
    assert not graph.has_frozen
    assert (
        import_model(with_metadata('["adapter.weight", "not.there"]')).num_trained
        == sum(p.numel() for p in Adapted("").parameters()) - 64
    )
    for broken in ("[", "[1]", '["adapter.weight"'):
        with pytest.raises(ModelError, match="as a JSON list"):
            import_model(with_metadata(broken))


class Mixture(nn.Module):
    """Experts that are modules of their own: each computes all tokens, and counts for those routed to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate, self.head = nn.Embedding(16, 8), nn.Linear(8, 4, bias=False), nn.Linear(8, 16)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(self.gate.out_features)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        parts = [(weights * (chosen == n)).sum(-1, keepdim=True) * e(x) for n, e in enumerate(self.experts)]
        return self.head(sum(parts, torch.zeros_like(x)))


def test_experts_of_a_network_are_those_of_its_graph() -> None:
    """The graph has the weights of all experts in one tensor, the network one parameter for each."""
    graph = import_model(export_onnx(lambda: (Mixture(), torch.zeros(1, 6, dtype=torch.int64))))
    assert graph.expert_names
    check_parameters(graph, Mixture())
    other = Mixture()
    other.experts[3][2] = nn.Linear(12, 8, bias=False)
    with pytest.raises(
        PlanError, match=r"experts\.3\.2\.bias: the model of the plan has 8 elements there, the module none"
    ):
        check_parameters(graph, other)
