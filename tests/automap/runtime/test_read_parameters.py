from __future__ import annotations

import onnx
import pytest
import torch
from torch import Tensor, nn

from automap.runtime.torch_export import export_onnx
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
