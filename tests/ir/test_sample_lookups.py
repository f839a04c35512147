"""Look-ups by each sample in its own rows, at places computed from the data, as networks of points use them."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from torch import Tensor, nn

from automap.runtime.operators.apply import run
from automap.runtime.torch_export import export_onnx
from ir.graph import Graph
from ir.onnx.load import load_model

pytestmark = pytest.mark.slow  # torch's exporter takes seconds to import

POINTS, CENTRES, NEAR, WIDTH = 12, 4, 3, 5


class Grouped(nn.Module):
    """PointNet++'s `index_points`: the points near each centre, by pairs of sample and place."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Linear(3, WIDTH)

    def forward(self, points: Tensor) -> Tensor:
        centres = points[:, :: POINTS // CENTRES]
        distances = ((centres[:, :, None] - points[:, None]) ** 2).sum(-1)
        places = distances.sort(-1)[1][:, :, :NEAR]
        samples = torch.arange(len(points)).view(-1, 1, 1).expand_as(places)
        return self.near(points[samples, places] - centres[:, :, None]).max(2)[0]


class Neighbours(nn.Module):
    """DGCNN's features of edges: places of all samples in one row, which count from the first point of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Linear(6, WIDTH)

    def forward(self, points: Tensor) -> Tensor:
        b = len(points)
        distances = ((points[:, :, None] - points[:, None]) ** 2).sum(-1)
        places = distances.topk(NEAR, largest=False)[1]
        places = (places + torch.arange(b).view(-1, 1, 1) * POINTS).view(-1)
        near = points.reshape(b * POINTS, 3)[places].view(b, POINTS, NEAR, 3)
        own = points[:, :, None].expand(-1, -1, NEAR, -1)
        return self.edge(torch.cat([near - own, own], 3)).amax(2)


def imported(kind: type[nn.Module], batch: int, *, dynamo: bool) -> Graph:
    points = torch.randn(batch, POINTS, 3)
    if dynamo:
        return load_model(export_onnx(lambda: (kind(), {"points": points})))
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            kind(), (points,), file, dynamo=False, input_names=["points"], do_constant_folding=False, verbose=False
        )
    return load_model(file.getvalue())


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("kind", [Grouped, Neighbours])
def test_each_sample_looks_up_its_own_rows_at_any_number_of_samples(kind: type[nn.Module], *, dynamo: bool) -> None:
    torch.manual_seed(0)
    module, points = kind(), torch.randn(5, POINTS, 3)
    graphs = [imported(kind, batch, dynamo=dynamo) for batch in (2, 3)]
    assert not any(graph.warnings for graph in graphs)
    assert [op.kind for op in graphs[0]] == [op.kind for op in graphs[1]]
    for graph in graphs:
        with torch.no_grad():
            found = run(graph, {**dict(module.named_parameters()), "points": points}, 5)[graph.outputs[0]]
            torch.testing.assert_close(found, module(points))
        # A sample needs none of the others: each operator on data can be split by samples.
        assert all(graph.tensors[op.outputs[0]].batch_dim == 0 for op in graph if op.kind in ("GatherND", "MatMul"))
