"""Prices of convolutions: products of equal extents that read images once; layouts against PyTorch's own."""

import importlib
import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from automap.cluster import parse_cluster
from automap.device_kinds import known_devices
from automap.image_layouts import converted, images_last
from automap.price.curves import convolves_on_tensor_cores
from automap.price.evaluator import Evaluator
from automap.price.kernels.array_types import record_of
from automap.price.kernels.gemm import gemm_s
from automap.price.kernels.operators import convolution_s
from automap.price.kernels.records import BATCH, CONVOLUTION, NUM_CLASSES, K, KernelRow, M, N
from automap.problem import Problem
from automap.runtime.torch_export import export_onnx
from ir import zoo
from ir.loss import with_loss
from ir.onnx.load import load_model

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def hardware(precision="bf16", cluster="1xH200"):
    problem = Problem.build(
        zoo.build("resnet:blocks=1-1,width=8"), cluster, {"global_batch": 1, "precision": precision}
    )
    return Evaluator(problem).layout([1], 1).stages[0].hardware.copy()


def seconds(extents, window, moved, found, *, whole=None, divisor=0.0):
    """Forward seconds, those of the gradient of the images and of the weight; `whole` are the unsplit extents."""
    row = KernelRow(kind=CONVOLUTION, left_gradient=1, right_gradient=1, forward_traffic=1.0, window=window)
    row.extents[: len(extents)] = extents if whole is None else whole
    times = np.zeros(3)
    convolution_s(record_of(row), np.array(extents, dtype=float), divisor, moved, found, times)
    return times[0], times[1] - times[2], times[2]


def test_large_convolutions_run_at_the_rates_of_products():
    """They take as long as products of equal extents, over the fitted rates; the time of their memory is hidden."""
    found = hardware()
    rows, filters, channels, window = 64 * 56 * 56, 256, 256, 9
    extents = [1.0] * NUM_CLASSES
    extents[BATCH], extents[M], extents[N], extents[K] = 1, rows, filters, channels
    forward, images, weights = seconds(extents, window, 1.0, found)
    curve, rates = found["products"], found["convolution_rates"]
    assert forward == pytest.approx(gemm_s(rows, filters, channels * window, 1.0, 0.0, 0.0, curve) / rates[0], rel=0.02)
    assert images == pytest.approx(gemm_s(rows, channels, filters * window, 1.0, 0.0, 0.0, curve) / rates[1], rel=0.02)
    flops = 2.0 * rows * filters * channels * window
    assert weights == pytest.approx(flops / float(curve["flops_per_s"]) / rates[2], rel=0.05)


def test_images_are_read_once_whatever_the_window():
    """Where the memory decides, a window of nine costs what its bytes cost; a product would read nine images."""
    found = hardware()
    moved = 1e9
    forward, _, _ = seconds([1, 1e6, 8, 8], 9.0, moved, found)
    assert forward == pytest.approx(moved / float(found["bytes_per_s"]), rel=0.25)


def test_channels_that_fill_no_vector_and_small_groups_leave_the_tensor_cores():
    found = hardware()
    flops = {name: 2.0 * 1e6 * k * n * 9 * g for name, (g, n, k) in
             {"full": (1, 64, 64), "odd": (1, 64, 63), "grouped": (64, 1, 1)}.items()}  # fmt: skip
    per_flop = {
        "full": seconds([1, 1e6, 64, 64], 9.0, 1.0, found)[0] / flops["full"],
        "odd": seconds([1, 1e6, 64, 63], 9.0, 1.0, found)[0] / flops["odd"],
        "grouped": seconds([64, 1e6, 1, 1], 9.0, 1.0, found)[0] / flops["grouped"],
    }
    assert per_flop["full"] * 5 < per_flop["odd"] < per_flop["grouped"]


@pytest.mark.parametrize("name", sorted(d.name for d in known_devices() if {"tf32", "fp32"} <= d.peak_TFLOPs.keys()))
def test_tf32_takes_less_time_than_fp32_or_runs_as_fp32_does(name):
    """Convolutions whose arithmetic decides; where tensor cores gain nothing, no image is converted for them either."""
    (device,) = (d for d in known_devices() if d.name == name)
    tensor, plain = hardware("tf32", f"1x{name}"), hardware("fp32", f"1x{name}")
    extents = [1, 64 * 56 * 56, 256, 256]
    passes = [sum(seconds(extents, 9.0, 1.0, found)) for found in (tensor, plain)]
    if convolves_on_tensor_cores(device, "tf32"):
        assert passes[0] < passes[1]
    else:
        assert passes[0] == pytest.approx(passes[1])
        graph = zoo.build("resnet:blocks=1-1,width=8")
        casts = [
            Evaluator(Problem.build(graph, f"1x{name}", {"global_batch": 1, "precision": precision, "trainer": "ddp"}))
            .tables.arrays.kernels["casts"].sum()
            for precision in ("tf32", "fp32")
        ]  # fmt: skip
        assert casts == [0.0, 0.0]


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.tuples(*(st.integers(1, 12) for _ in range(4))),
    splits=st.tuples(*(st.integers(1, 8) for _ in range(4))),
    window=st.sampled_from([1.0, 9.0, 27.0]),
    moved=st.sampled_from([1.0, 1e6, 1e9]),
    precision=st.sampled_from(["bf16", "tf32", "fp32"]),
)
def test_no_split_takes_less_than_the_least_of_an_undecided_one(sizes, splits, window, moved, precision):
    found = hardware(precision)
    local = [float(size) for size in sizes]
    local[M] *= 1024.0
    whole = [size * split for size, split in zip(local, splits, strict=True)]
    least = seconds(whole, window, moved, found, whole=whole, divisor=float(math.prod(splits)))
    own = seconds(local, window, moved, found, whole=whole)
    assert all(a <= b * (1 + 1e-9) for a, b in zip(least, own, strict=True))


class Stack(torch.nn.Module):
    """A convolution, a block of ConvNeXt, an image made of tokens, and a convolution behind each."""

    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 2, 2)
        self.norm = torch.nn.LayerNorm(8)
        self.depthwise = torch.nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.wide = torch.nn.Linear(8, 8)
        self.behind = torch.nn.Conv2d(8, 16, 1)
        self.first = torch.nn.Conv2d(16, 8, 3, padding=1)
        self.last = torch.nn.Linear(8, 10)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        first = self.first(torch.cat([x, x], dim=1))
        y = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        y = y + self.wide(self.depthwise(y).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        tokens = torch.relu(self.behind(y)).flatten(2).transpose(1, 2)
        image = tokens.transpose(1, 2).reshape(x.shape[0], 16, *x.shape[2:])
        return self.last((first + self.first(image)).mean(dim=(2, 3)))


def test_layouts_are_those_that_torch_has():
    """What a convolution finds in memory when PyTorch runs the module."""
    torch.manual_seed(0)
    module, x = Stack(), torch.randn(2, 3, 8, 8)
    called = []
    for name, child in module.named_children():
        if isinstance(child, torch.nn.Conv2d):
            child.register_forward_pre_hook(
                lambda _, given, name=name: called.append(
                    (name, given[0].is_contiguous(memory_format=torch.channels_last))
                )
            )
    module(x)
    # By module, and of one module in the order of its calls.
    seen = [layout for _, layout in sorted(called, key=lambda one: one[0])]
    graph = with_loss(load_model(export_onnx(lambda: (Stack(), (x,))), name="stack"))
    convolutions = [index for index, op in enumerate(graph.operators) if op.kind == "Conv"]
    convolutions.sort(key=lambda index: graph.operators[index].name)
    problem = Problem.build(graph, parse_cluster("1xH200"), {"global_batch": 8, "trainer": "ddp", "precision": "bf16"})
    last = images_last(problem)
    assert [index in last for index in convolutions] == seen
    assert len(set(seen)) == 2
    # Dense ones with channels first are converted; in fp32 nothing is.
    weights = [graph.tensors[graph.operators[index].inputs[1]].shape for index in convolutions]
    dense = {i for i, shape in zip(convolutions, weights, strict=True) if shape[1] > 1}
    assert set(converted(problem)) == dense - last
    assert not converted(Problem.build(graph, parse_cluster("1xH200"), {"global_batch": 8, "precision": "fp32"}))


def test_measured_convolutions_are_met(monkeypatch):
    """The shipped rates, on the file that they were fitted to: dense convolutions as exactly as products are."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("gpu_convolutions")
    (file,) = (BENCHMARKS / "results").glob("gpu_convolutions-*.json")
    found = json.loads(file.read_text())
    for way, kind, most in (
        ("bf16 channels last", "dense", 0.16),
        ("tf32 channels last", "dense", 0.16),
        ("bf16 channels last", "grouped", 0.35),
        ("bf16", "grouped", 0.35),
    ):
        errors = [
            abs(time_s / row[name] - 1.0)
            for shape, row in script.usable(found, way, kind)
            for name, time_s in zip(script.PASSES, script.priced(shape, way, script.hardware_of(way)), strict=True)
            if row[name] >= script.LEAST_S
        ]
        assert len(errors) > 20
        assert statistics.median(errors) < most, (way, kind)
