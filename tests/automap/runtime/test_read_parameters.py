from __future__ import annotations

import torch
from torch import Tensor, nn

from automap.runtime.torch_export import export_onnx
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


def test_parameters_that_need_no_gradient_are_named_also_after_a_strip() -> None:
    data = export_onnx(lambda: (Adapted("backbone"), torch.zeros(1, 8)))
    parameters = list(Adapted("backbone").parameters())
    held, number = sum(p.numel() for p in parameters if not p.requires_grad), sum(p.numel() for p in parameters)
    for file in (data, strip(data).data):
        (warning,) = import_model(file).warnings
        assert warning.startswith(
            f"{held} of {number} parameters are frozen (requires_grad=False): backbone ({held}). "
        )


def test_nothing_is_said_where_all_parameters_are_frozen_or_almost_none() -> None:
    for frozen in ("", "adapter.none", "backbone.2.bias"):
        data = export_onnx(lambda frozen=frozen: (Adapted(frozen), torch.zeros(1, 8)))  # type: ignore[misc]
        assert not import_model(data).warnings
