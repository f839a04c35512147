"""Activations of blocks of many kinds, as they are priced, against what autograd keeps when PyTorch runs the blocks."""

import pytest
import torch
from long_cases import long_but
from torch import nn
from torch.nn import functional

from automap.cluster import parse_cluster
from automap.price.estimate import price
from automap.price.evaluator import Evaluator
from automap.price.plan_writer import to_plan
from automap.problem import Problem
from automap.runtime.torch_export import export_onnx
from automap.space.stated_strategy import Strategy, hand_made
from ir.loss import with_loss
from ir.onnx.load import load_model

WIDTH, LENGTH, HEADS, CHANNELS, SIDE, SAMPLES = 64, 32, 4, 32, 16, 8


class Attention(nn.Module):
    """PyTorch's own attention, with as many or with fewer heads of keys than of queries."""

    def __init__(self, groups: int = HEADS) -> None:
        super().__init__()
        self.groups, self.size = groups, WIDTH // HEADS
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, groups * self.size), nn.Linear(WIDTH, groups * self.size)

    def forward(self, x):
        q, k, v = (m(x).view(len(x), LENGTH, -1, self.size).transpose(1, 2) for m in (self.q, self.k, self.v))
        made = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups < HEADS)
        return self.o(made.transpose(1, 2).reshape(len(x), LENGTH, WIDTH))


class Gated(nn.Module):
    """A perceptron with a gate."""

    def __init__(self, activation) -> None:
        super().__init__()
        self.activation = activation
        self.gate, self.up = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Squeezed(nn.Module):
    """Channels are multiplied by what their means say."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(CHANNELS, 8, 1), nn.Conv2d(8, CHANNELS, 1)

    def forward(self, x):
        means = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.second(torch.relu(self.first(means))))


class Residual(nn.Module):
    """Adds what some modules make to what they read."""

    def __init__(self, *inner: nn.Module, last: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.last = nn.Sequential(*inner), last or nn.Identity()

    def forward(self, x):
        return self.last(x + self.inner(x))


def normed(*inner: nn.Module) -> nn.Module:
    """A residual block behind a norm."""
    return Residual(nn.LayerNorm(WIDTH), *inner)


def perceptron(activation: nn.Module) -> nn.Module:
    """A block whose hidden layer has this activation."""
    return normed(nn.Linear(WIDTH, 4 * WIDTH), activation, nn.Linear(4 * WIDTH, WIDTH))


def convolution(**settings) -> nn.Module:
    """A convolution that keeps the size of its image."""
    return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, **settings)


def norm() -> nn.Module:
    """Batch normalisation."""
    return nn.BatchNorm2d(CHANNELS)


ON_TOKENS = {
    "attention": lambda: normed(Attention()),
    "grouped queries": lambda: normed(Attention(groups=2)),
    "norm behind": lambda: nn.Sequential(Residual(Attention(), last=nn.LayerNorm(WIDTH)), nn.Linear(WIDTH, WIDTH)),
    "swiglu": lambda: normed(Gated(functional.silu)),
    "geglu": lambda: normed(Gated(functional.gelu)),
    "reglu": lambda: normed(Gated(functional.relu)),
    "rms norm": lambda: Residual(nn.RMSNorm(WIDTH), Gated(functional.silu)),
}
ACTIVATIONS = [
    nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.PReLU, nn.Mish,
    nn.Hardswish, nn.Hardsigmoid, nn.ReLU6, nn.Softsign,
]  # fmt: skip
ON_IMAGES = {
    "bias": lambda: nn.Sequential(convolution(), nn.ReLU()),
    "batch norm": lambda: nn.Sequential(convolution(bias=False), norm(), nn.ReLU()),
    "residual": lambda: Residual(convolution(), norm(), nn.ReLU(), convolution(), norm(), last=nn.ReLU()),
    "norm in front": lambda: Residual(norm(), nn.ReLU(), convolution(), norm(), nn.ReLU(), convolution()),
    "squeezed": lambda: Residual(convolution(), norm(), Squeezed(), last=nn.ReLU()),
    "leaky": lambda: nn.Sequential(convolution(), norm(), nn.LeakyReLU()),
    "depthwise": lambda: Residual(convolution(groups=CHANNELS), norm(), nn.ReLU6(), convolution(), norm()),
    "pooled": lambda: nn.Sequential(convolution(), nn.ReLU(), nn.MaxPool2d(2), nn.Upsample(scale_factor=2)),
    "transposed": lambda: nn.Sequential(
        nn.Conv2d(CHANNELS, CHANNELS, 3, 2, 1), norm(), nn.ReLU(), nn.ConvTranspose2d(CHANNELS, CHANNELS, 2, 2)
    ),
}


class OnTokens(nn.Module):
    """Some equal blocks on a sequence."""

    def __init__(self, make, count: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 16)
        self.blocks = nn.ModuleList(make() for _ in range(count))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class OnImages(nn.Module):
    """Some equal blocks on images."""

    def __init__(self, make, count: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, CHANNELS, 3, padding=1), nn.Linear(CHANNELS, 16)
        self.blocks = nn.ModuleList(make() for _ in range(count))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def kept(build, count: int, samples: torch.Tensor) -> int:
    """Bytes of the memory that autograd keeps for the backward pass, without parameters and buffers."""
    model = build(count)
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage  # held, so that no later tensor has the same address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = model(samples)
    assert made.requires_grad
    return sum(storage.nbytes() for storage in found.values())


def priced(build, count: int, samples: torch.Tensor) -> float:
    """Bytes of activations in the price; with two micro-batches, all are in memory in the fullest moment."""
    graph = with_loss(load_model(export_onnx(lambda: (build(count), (samples[:2],)))))
    training = {"global_batch": 2 * len(samples), "precision": "fp32", "trainer": "ddp"}
    evaluator = Evaluator(Problem.build(graph, parse_cluster("1xA100"), training))
    plan = to_plan(hand_made(evaluator, Strategy(micro_batch=len(samples))), evaluator)
    return price(evaluator.problem, plan, evaluator).memory_bytes[0].activations


def compare(kind, make, samples) -> None:
    """A block more makes as many more bytes: the means and variances of norms are no more than 4 % of these."""
    build = lambda count: kind(make, count)  # noqa: E731
    torch.manual_seed(0)
    measured, expected = (how(build, 3, samples) - how(build, 2, samples) for how in (kept, priced))
    assert expected == pytest.approx(measured, rel=0.04)


@pytest.mark.parametrize("name", long_but(["attention", "swiglu"], ON_TOKENS))
def test_blocks_of_transformers_keep_what_autograd_keeps(name):
    compare(OnTokens, ON_TOKENS[name], torch.randn(SAMPLES, LENGTH, 8))


@pytest.mark.parametrize("activation", long_but([nn.LeakyReLU, nn.Hardsigmoid], ACTIVATIONS))
def test_activations_keep_what_autograd_keeps(activation):
    compare(OnTokens, lambda: perceptron(activation()), torch.randn(SAMPLES, LENGTH, 8))


class Recurrent(nn.Module):
    """A recurrent layer, of which all states are read."""

    def __init__(self, kind) -> None:
        super().__init__()
        self.layer = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


@pytest.mark.parametrize(("kind", "elements"), [(nn.LSTM, 7), (nn.GRU, 6), (nn.RNN, 2)])
def test_recurrent_layers_keep_states_and_gates(kind, elements):
    """An element of the input, and what `GATES` counts for one of the states; an RNN keeps the states alone.

    PyTorch's kernels keep more than the formulas of the layers need; how much more depends on the library.
    """
    build = lambda count: OnTokens(lambda: Recurrent(kind), count)  # noqa: E731
    samples = torch.randn(SAMPLES, LENGTH, 8)
    measured, expected = (how(build, 3, samples) - how(build, 2, samples) for how in (kept, priced))
    assert expected == pytest.approx(elements * SAMPLES * LENGTH * WIDTH * 4, rel=0.01)
    assert measured > 0.98 * expected


@pytest.mark.parametrize("name", long_but(["batch norm", "pooled"], ON_IMAGES))
def test_blocks_of_convolutions_keep_what_autograd_keeps(name):
    compare(OnImages, ON_IMAGES[name], torch.randn(SAMPLES, 3, SIDE, SIDE))
