"""Inputs joined along the batch and taken apart later: the imported graph computes what the module does."""

import io
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import relu

from automap.runtime.operators.apply import run
from ir.errors import ModelError
from ir.onnx.load import load_model

SAMPLES = 3


class Pair(nn.Module):
    """Two images of each sample go through shared layers as one batch of twice the samples."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.wide = nn.Linear(8, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, a, b):
        samples = a.shape[0]
        joined = torch.stack([a, b]).flatten(0, 1) if self.form == "stack" else torch.cat([a, b])
        x = relu(self.norm(self.conv(joined)))
        if self.form == "tokens":
            x = self.wide(x.flatten(2).transpose(1, 2).reshape(-1, 8)).reshape(2 * samples, -1, 6).mean(1)
        else:
            x = self.wide(x.mean((2, 3)))
        if self.form == "slice":
            left, right = x[:samples], x[samples:]
        elif self.form == "view":
            left, right = x.view(2, samples, 6)
        elif self.form == "three":
            left, right, last = torch.cat([x, x[samples:].exp()]).split([samples, samples, samples])
            right = right - last
        else:
            left, right = x.chunk(2)
        return self.head(left.exp() * right)


def _imported(module, batch):
    images = torch.zeros(batch, 3, 4, 4), torch.zeros(batch, 3, 4, 4)
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, images, out, dynamo=False, input_names=["a", "b"], training=torch.onnx.TrainingMode.TRAINING
        )
    return load_model(out.getvalue())


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("form", ["chunk", "slice", "view", "tokens", "stack", "three"])
def test_rows_of_joined_inputs_stay_those_of_their_samples(form, batch):
    torch.manual_seed(0)
    module = Pair(form)
    graph = _imported(module, batch)
    assert not graph.warnings
    (result,) = graph.outputs
    assert graph.tensors[result].batch_dim == 0
    images = torch.randn(SAMPLES, 3, 4, 4), torch.randn(SAMPLES, 3, 4, 4)
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    fed = {**state, **dict(zip("ab", images, strict=True))}
    found = run(graph, {n: t for n, t in fed.items() if n in graph.tensors}, SAMPLES)[result]
    torch.testing.assert_close(found, module.train()(*images), rtol=1e-4, atol=1e-5)


class Contrasted(nn.Module):
    """SimCLR: every image is compared with all others, and a diagonal of the whole batch leaves itself out."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, a, b):
        z = self.layer(torch.cat([a, b]))
        return (z @ z.t()).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_diagonal_of_the_whole_batch_is_counted_for_one_sample(batch):
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(Contrasted().eval(), (torch.zeros(batch, 5), torch.zeros(batch, 5)), out, dynamo=False)
    graph = load_model(out.getvalue())
    assert graph.tensors[graph.outputs[0]].shape == (2, 2)
    (warning,) = graph.warnings
    assert "compares the samples of a batch with each other" in warning


class Shifted(nn.Module):
    """A part that crosses from one input to the other."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, a, b):
        return self.layer(torch.cat([a, b]))[1:3]


def test_a_part_of_both_inputs_is_refused():
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(Shifted().eval(), (torch.zeros(2, 5), torch.zeros(2, 5)), out, dynamo=False)
    with pytest.raises(ModelError, match="it takes some of the samples"):
        load_model(out.getvalue())


class Frames(nn.Module):
    """As TimeSformer: of the class tokens of all frames, which are equal, as many as there are samples are read."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))
        self.token = nn.Parameter(torch.randn(1, 1, 5))

    def forward(self, video):
        samples, frames, *rest = video.shape
        tokens = torch.cat([self.token.expand(samples * frames, -1, -1), video.reshape(-1, *rest)], 1)
        x = tokens @ self.weight
        return torch.cat([x[:samples, :1], x[:, 1:].reshape(samples, -1, 4)], 1)


@pytest.mark.parametrize("batch", [1, 2])
def test_the_leading_rows_of_a_batch_are_one_row_of_each_sample(batch):
    torch.manual_seed(0)
    module, out = Frames().eval(), io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (torch.zeros(batch, 3, 2, 5),), out, dynamo=False, input_names=["video"])
    graph = load_model(out.getvalue())
    assert ["the first row of each sample" in warning for warning in graph.warnings] == [True] * (batch > 1)
    video, (result,) = torch.randn(SAMPLES, 3, 2, 5), graph.outputs
    fed = {"video": video, **dict(module.named_parameters())}
    found = run(graph, {n: t for n, t in fed.items() if n in graph.tensors}, SAMPLES)[result]
    torch.testing.assert_close(found, module(video), rtol=1e-4, atol=1e-5)


class SomeRows(nn.Module):
    """Leading rows that are not as many as the samples."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, video):
        return self.layer(video.reshape(-1, 5))[:3]


def test_other_leading_rows_of_a_batch_are_refused():
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(SomeRows().eval(), (torch.zeros(2, 3, 5),), out, dynamo=False)
    with pytest.raises(ModelError, match="it takes some of the samples"):
        load_model(out.getvalue())
