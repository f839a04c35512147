"""Convolutions whose weights are computed from the data of each sample: samples are groups of channels."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from automap.runtime.operators.apply import run
from automap.runtime.torch_export import export_onnx
from ir.errors import ModelError
from ir.onnx.load import load_model

pytestmark = pytest.mark.slow  # torch's exporter takes seconds to import

CHANNELS, FILTERS, SIZE = 3, 4, 3


class Dynamic(nn.Module):
    """A convolution with weights from a linear layer, as StyleGAN2 writes it."""

    def __init__(self, *, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.weights = nn.Linear(5, CHANNELS * FILTERS * SIZE**2)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        b = x.shape[0]
        rows = (b * CHANNELS, FILTERS) if self.transposed else (b * FILTERS, CHANNELS)
        weights = self.weights(style).reshape(*rows, SIZE, SIZE)
        convolution = functional.conv_transpose2d if self.transposed else functional.conv2d
        y = convolution(x.reshape(1, b * CHANNELS, *x.shape[2:]), weights, groups=b)
        return y.reshape(b, FILTERS, *y.shape[2:])


class FromConstant(nn.Module):
    """The first layers of StyleGAN2: a learned image, repeated for the samples, is convolved with weights of each."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Parameter(torch.randn(1, CHANNELS, 4, 4))
        self.weight = nn.Parameter(torch.randn(FILTERS, CHANNELS, SIZE, SIZE))
        self.style = nn.Linear(5, CHANNELS)

    def forward(self, style: Tensor) -> Tensor:
        b = style.shape[0]
        x = self.image.repeat(b, 1, 1, 1).reshape(1, b * CHANNELS, 4, 4)
        weights = (self.weight[None] * self.style(style)[:, None, :, None, None]).reshape(-1, CHANNELS, SIZE, SIZE)
        return functional.conv2d(x, weights, groups=b).reshape(b, FILTERS, 2, 2)


def exported(samples: int, *, transposed: bool) -> bytes:
    inputs = torch.zeros(samples, CHANNELS, 6, 6), torch.zeros(samples, 5)
    return export_onnx(lambda: (Dynamic(transposed=transposed), inputs))


@pytest.mark.parametrize("samples", [2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_graph_computes_what_the_module_does_at_any_number_of_samples(samples: int, *, transposed: bool) -> None:
    torch.manual_seed(0)
    module, x, style = Dynamic(transposed=transposed), torch.randn(3, CHANNELS, 6, 6), torch.randn(3, 5)
    graph = load_model(exported(samples, transposed=transposed))
    with torch.no_grad():
        found = run(graph, {**dict(module.named_parameters()), "x": x, "style": style}, 3)[graph.outputs[0]]
        torch.testing.assert_close(found, module(x, style))
    product, pixels = 2 * CHANNELS * FILTERS * SIZE**2, 36 if transposed else 16
    assert graph.forward_flops == product * (5 + pixels)


@pytest.mark.parametrize("transposed", [False, True])
def test_one_sample_is_refused_as_it_does_not_tell_samples_from_channels(*, transposed: bool) -> None:
    with pytest.raises(ModelError, match=r"each sample has weights of its own.*export it with two samples"):
        load_model(exported(1, transposed=transposed))


@pytest.mark.parametrize("dynamo", [False, True])
def test_a_learned_image_is_convolved_with_the_weights_of_each_sample(*, dynamo: bool) -> None:
    torch.manual_seed(0)
    module, style = FromConstant(), torch.randn(3, 5)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (torch.zeros(2, 5),), file, dynamo=dynamo, verbose=False)
    plain = load_model(export_onnx(lambda: (FromConstant(), {"style": torch.zeros(2, 5)})))
    # The newer exporter stores the image as it is repeated for the samples.
    for graph in (load_model(file.getvalue()), plain):
        assert graph.num_parameters == sum(p.numel() for p in module.parameters())
        assert graph.forward_flops == 2 * CHANNELS * (5 + FILTERS * SIZE**2 * 4)
    with torch.no_grad():
        found = run(plain, {**dict(module.named_parameters()), "style": style}, 3)[plain.outputs[0]]
        torch.testing.assert_close(found, module(style))
