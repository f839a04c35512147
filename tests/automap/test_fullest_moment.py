"""The memory of the fullest moment of a step: against brute force, and against the tensors of steps of PyTorch."""

import functools
import gc
import itertools
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from long_cases import long_but
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from automap.cluster import parse_cluster
from automap.price.estimate import price
from automap.price.evaluator import Evaluator
from automap.price.kernels.array_types import record_of
from automap.price.kernels.cost_records import MomentRow
from automap.price.kernels.memory import add_to_moment
from automap.price.plan_writer import to_plan
from automap.problem import Problem
from automap.runtime.torch_export import export_onnx
from automap.runtime.trial.peak_memory import PeakMemory
from automap.space.stated_strategy import Strategy, hand_made
from ir.loss import with_loss
from ir.onnx.load import load_model

WIDTH, HEADS, LENGTH, WORDS, LAYERS = 128, 4, 64, 512, 4
SIZES = st.integers(0, 9)


@given(st.lists(st.tuples(SIZES, SIZES, SIZES, SIZES, st.integers(1, 4)), min_size=1, max_size=6))
def test_the_fullest_moment_of_any_units_is_that_of_brute_force(parts):
    moment = record_of(MomentRow(saved=0.0, activations=0.0, gradients=0.0, working=0.0))
    units = []
    for saved, live, working, gradient, times in parts:
        add_to_moment((float(saved), float(live), float(working)), float(gradient), float(times), moment)
        units += [(saved, live, working, gradient)] * times
    most = 0
    for now, (_, live, working, _) in enumerate(units):
        activations, gradients = sum(u[0] for u in units[: now + 1]), sum(u[3] for u in units[now:])
        most = max(most, activations + live + working + gradients)
    assert moment["activations"] + moment["gradients"] + moment["working"] == most
    assert moment["saved"] == sum(u[0] for u in units)


class Layer(nn.Module):
    """Attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.before, self.behind = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        y = self.before(x)
        heads = (m(y).view(len(y), LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2) for m in (self.q, self.k, self.v))
        made = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(made.transpose(1, 2).reshape(len(y), LENGTH, WIDTH))
        return x + self.down(functional.gelu(self.up(self.behind(x))))


class Model(nn.Module):
    """A decoder, whose head has weights of its own."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return self.head(x)


def measured(again: bool, samples: int, count: int) -> int:
    """Bytes of the fullest moment of the second step, whose optimizer has its state."""
    tokens = torch.randint(WORDS, (count, samples, LENGTH))
    return measured_peak(lambda: Model(again), tokens, lambda scores, some: (scores.view(-1, WORDS), some.view(-1)))


def measured_peak(make, batches, scored):
    """Bytes of the fullest moment of the second step, with what is read and without what was in memory before.

    Args:
        make: makes the model.
        batches: what it reads, one micro-batch after the other.
        scored: scores and classes from what it makes and what it has read.
    """
    gc.collect()
    with PeakMemory() as before:
        pass
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)  # as on a GPU
    for _ in range(2):
        with PeakMemory() as memory:
            for some in batches:
                made = model(some)
                functional.cross_entropy(*scored(made, some)).backward()
                del made
            optimizer.step()
        optimizer.zero_grad()
    return memory.peak - before.peak + batches.nbytes


@functools.cache
def exported():
    """The file of the decoder."""
    return export_onnx(lambda: (Model(again=False), torch.zeros(1, LENGTH, dtype=torch.int64)))


def priced(again: bool, samples: int, count: int) -> float:
    """The same bytes as they are priced, without what libraries and the allocator hold."""
    return priced_peak(exported(), samples, count, recompute="full" if again else "none")


def priced_peak(data, samples, count, *, recompute="none"):
    """The same of a file."""
    training = {"global_batch": samples * count, "precision": "fp32", "trainer": "ddp"}
    problem = Problem.build(with_loss(load_model(data)), parse_cluster("1xcpu"), training)
    evaluator = Evaluator(problem)
    strategy = Strategy(micro_batch=samples, recompute=recompute)
    (memory,) = price(problem, to_plan(hand_made(evaluator, strategy), evaluator), evaluator).memory_bytes
    trainer = problem.trainer
    return (memory.total - trainer.reserved_GiB * 2**30) / (1.0 + trainer.unused_share)


@pytest.mark.parametrize(
    ("again", "samples", "count"),
    long_but(
        [(False, 1, 1), (True, 1, 2), (False, 16, 2), (True, 16, 1)],
        itertools.product([False, True], [1, 16], [1, 2]),
    ),
)
def test_the_memory_of_a_step_is_that_of_the_tensors_of_pytorch(again, samples, count):
    assert priced(again, samples, count) == pytest.approx(measured(again, samples, count), rel=0.03)


def test_a_layer_that_runs_again_has_its_input_in_memory_once(monkeypatch):
    """With few words, the fullest moment is that of the last layer; its input is 2 % of that."""
    monkeypatch.setattr(sys.modules[__name__], "WORDS", 8)
    exported.cache_clear()
    try:
        assert priced(True, 16, 2) == pytest.approx(measured(True, 16, 2), rel=0.05)
    finally:
        exported.cache_clear()


class Bottleneck(nn.Module):
    """A block of a ResNet: its last ReLU is the next block's operand, which both keep."""

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        sizes = ((channels, width, 1), (width, width, 3), (width, channels, 1))
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, k, padding=k // 2, bias=False) for a, b, k in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _ in sizes)

    def forward(self, x):
        first, second, last = zip(self.convolutions, self.norms, strict=True)
        y = x
        for convolution, norm in (first, second):
            y = torch.relu(norm(convolution(y)))
        return torch.relu(last[1](last[0](y)) + x)


def residual():
    """Some blocks behind a stem."""
    stem = [nn.Conv2d(3, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*stem, *(Bottleneck(16, 64) for _ in range(4)), *ending(64))


def pyramid():
    """Convolutions as in VGG, each with a ReLU, and pooling of maxima, whose places are kept."""
    layers, channels = [], 3
    for width in (16, 32, 64):
        for made in (width, width):
            layers += [nn.Conv2d(channels, made, 3, padding=1), nn.ReLU()]
            channels = made
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, *ending(64))


def ending(channels):
    """A classifier of what is left."""
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)


@pytest.mark.parametrize("make", [residual, pyramid])
def test_the_memory_of_convolutions_is_that_of_the_tensors_of_pytorch(make):
    images = torch.randn(1, 32, 3, 32, 32)
    counted = measured_peak(make, images, lambda scores, some: (scores, torch.zeros(len(some), dtype=torch.int64)))
    data = export_onnx(lambda: (make(), torch.zeros(1, 3, 32, 32)))
    assert priced_peak(data, 32, 1) == pytest.approx(counted, rel=0.04)
