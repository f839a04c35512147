"""Writes where a mask is set are choices by the mask: the imported graph computes what onnxruntime does."""

import io
import warnings

import pytest
import torch
from ort_oracle import compare
from torch import Tensor, nn

from ir.onnx.load import load_model


class Written(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.layer = form, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.form == "elements":
            y = y.clone()
            y[y > 0.2] = 0.5
        elif self.form == "rows":
            y = y.clone()
            y[y.sum(-1) > 0] = -1.0
        else:  # Mask2Former's: a row of a mask that hides everything hides nothing
            hidden = (y > 0).clone()
            hidden[torch.where(hidden.sum(-1) == hidden.shape[-1])] = False
            y = y.masked_fill(hidden, -9.0)
        return y


@pytest.mark.parametrize(
    ("form", "dynamo"),
    # The older exporter writes an invalid Where for rows.
    [("elements", False), ("elements", True), ("rows", True), ("places", False),
     ("places", True)],
)  # fmt: skip
def test_a_write_where_a_mask_is_set(form, dynamo):
    torch.manual_seed(0)
    module, out = Written(form), io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, (torch.zeros(1, 3, 6),), out, dynamo=dynamo, input_names=["x"],
            **({"verbose": False, "external_data": False} if dynamo else {}),
        )  # fmt: skip
    graph = load_model(out.getvalue())
    assert "Where" in {op.kind for op in graph}
    assert "NonZero" not in {op.kind for op in graph}
    assert graph.tensors[graph.outputs[0]].batch_dim == 0
    assert compare(out.getvalue()) < 1e-5
