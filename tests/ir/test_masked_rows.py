"""Rows that a mask selects are computed as all rows: the imported graph computes what onnxruntime does."""

import io
import warnings

import pytest
import torch
from ort_oracle import compare
from torch import Tensor, nn

from ir.errors import ModelError
from ir.onnx.load import load_model


class OfRows(nn.Module):
    """A layer for the rows of a mask; the others stay as they are, or get something added."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.enter, self.layer = form, nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        mask = y.sum(-1) > 0
        rows = self.layer(y[mask])
        if self.form == "mean":
            rows = rows - rows.mean(0)
        if self.form == "softmax":
            rows = rows.softmax(0)
        y = y.clone()
        if self.form == "add":
            y[mask] += rows.tanh()
        elif self.form == "other":
            y[self.enter(x).flip(-2).sum(-1) > 0] = rows  # another mask with as many rows
        else:
            y[mask] = rows.tanh()
        return y


def exported(form: str, *, dynamo: bool) -> bytes:
    torch.manual_seed(0)
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            OfRows(form).eval(), (torch.randn(1, 3, 6),), out, dynamo=dynamo, input_names=["x"],
            **({"verbose": False, "external_data": False} if dynamo else {}),
        )  # fmt: skip
    return out.getvalue()


@pytest.mark.parametrize(("form", "dynamo"), [("write", False), ("add", False), ("write", True), ("add", True)])
def test_a_layer_for_the_rows_of_a_mask(form, dynamo):
    data = exported(form, dynamo=dynamo)
    graph = load_model(data)
    assert "NonZero" not in {op.kind for op in graph}
    assert graph.tensors[graph.outputs[0]].batch_dim == 0
    assert graph.num_parameters == 84
    assert graph.forward_flops == 2 * (2 * 3 * 6 * 6)  # both layers on all three rows of a sample
    assert [w for w in graph.warnings if "rows that a mask selects are priced as all rows" in w]
    assert compare(data) < 1e-5


@pytest.mark.parametrize("form", ["softmax", "mean", "other"])
def test_rows_that_are_combined_are_refused(form):
    with pytest.raises(ModelError, match="NonZero"):
        load_model(exported(form, dynamo=False))
