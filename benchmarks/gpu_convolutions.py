"""Times of convolutions on one GPU of this host, and the rates of the price that are fitted to them.

    python benchmarks/gpu_convolutions.py measure FILE.json [--only NETWORK ...]    times them, and writes the file
    python benchmarks/gpu_convolutions.py fit FILE.json [--write]    fits the rates of automap/data to them
    python benchmarks/gpu_convolutions.py report FILE.json           prints rates, and the price beside them

A convolution is a product of `samples x positions` by `channels x window` by `filters`; its three passes (forward,
gradient of the input, gradient of the weight) are timed apart, each as the mean of some launches after one another.
`SHAPES` are those of common networks. Each is timed in bf16 in both layouts of images, in tf32 and in fp32, with the
algorithm that cuDNN's heuristic takes; in bf16 with channels last also with the fastest that a trial of cuDNN finds.
`--shrink` divides samples and sizes, to try the script without a GPU. The committed figures are in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import automap
from automap.cluster import parse_cluster
from automap.device_kinds import known_devices
from automap.price.evaluator import Evaluator
from automap.price.kernels.array_types import Record, record_of
from automap.price.kernels.operators import convolution_s
from automap.price.kernels.records import CONVOLUTION, KernelRow
from automap.problem import Problem
from ir import zoo

FILE = Path(automap.__file__).parent / "data" / "fitted" / "convolutions.json"
WIDTHS = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Shape:
    """A convolution; `size` and `window` have one number for each dim of space."""

    network: str
    samples: int
    channels: int
    size: tuple[int, ...]
    filters: int
    window: tuple[int, ...]
    stride: int = 1
    groups: int = 1
    transposed: bool = False

    @property
    def padding(self) -> tuple[int, ...]:
        """Zeros at each side of each dim, as many as keep the size; none for patches and what is transposed."""
        is_patch = 1 < self.window[0] <= self.stride
        return tuple(0 if is_patch or self.transposed else window // 2 for window in self.window)

    @property
    def positions(self) -> int:
        """Positions of the result."""
        if self.transposed:
            return math.prod((size - 1) * self.stride + k for size, k in zip(self.size, self.window, strict=True))
        dims = zip(self.size, self.window, self.padding, strict=True)
        return math.prod((size + 2 * padding - window) // self.stride + 1 for size, window, padding in dims)

    @property
    def flops(self) -> float:
        """Arithmetic of one pass."""
        places = math.prod(self.size) if self.transposed else self.positions
        per_filter = self.channels // self.groups * math.prod(self.window)
        return 2.0 * self.samples * places * self.filters * per_filter

    @property
    def elements(self) -> tuple[int, int, int]:
        """Elements of the input, the weight and the result."""
        given = self.samples * self.channels * math.prod(self.size)
        weight = self.filters * self.channels // self.groups * math.prod(self.window)
        return given, weight, self.samples * self.filters * self.positions

    def __str__(self) -> str:
        size, window = ("x".join(map(str, dims)) for dims in (self.size, self.window))
        beside = f" /{self.stride}" if self.stride > 1 else ""
        beside += f" in {self.groups} groups" if self.groups > 1 else ""
        beside += " transposed" if self.transposed else ""
        return f"{self.network} {self.samples} x {self.channels} x {size} -> {self.filters} by {window}{beside}"


def squares(network: str, samples: int, rows: Sequence[tuple[int, ...]]) -> list[Shape]:
    """Shapes on square images from rows of channels, size, filters, window, and where they differ stride and groups."""
    return [Shape(network, samples, c, (size, size), f, (k, k), *rest) for c, size, f, k, *rest in rows]


RESNET = [
    (3, 224, 64, 7, 2), (64, 56, 64, 1), (64, 56, 64, 3), (64, 56, 256, 1), (256, 56, 64, 1), (256, 56, 128, 1),
    (128, 56, 128, 3, 2), (128, 28, 512, 1), (256, 56, 512, 1, 2), (512, 28, 128, 1), (128, 28, 128, 3),
    (256, 28, 256, 3, 2), (256, 14, 1024, 1), (1024, 14, 256, 1), (256, 14, 256, 3), (512, 14, 512, 3, 2),
    (512, 7, 2048, 1), (2048, 7, 512, 1), (512, 7, 512, 3),
]  # fmt: skip
SHAPES: Sequence[Shape] = [
    *squares("ResNet-50", 128, RESNET),
    *squares("ResNet-50", 16, RESNET[2:4] + RESNET[10:11] + RESNET[14:15] + RESNET[18:]),
    *squares("ResNet-18", 256, [(64, 56, 64, 3), (64, 56, 128, 3, 2), (256, 14, 256, 3)]),
    *squares(
        "VGG-19", 64, [(3, 224, 64, 3), (64, 224, 64, 3), (128, 112, 128, 3), (256, 56, 256, 3), (512, 28, 512, 3),
                       (512, 14, 512, 3)],
    ),
    *squares("WideResNet", 32, [(320, 56, 320, 3), (1280, 14, 1280, 3), (640, 28, 1280, 1)]),
    *squares("ResNeXt", 64, [(128, 56, 128, 3, 1, 32), (512, 14, 512, 3, 1, 32), (1024, 7, 1024, 3, 1, 32)]),
    *squares(
        "diffusion", 8, [(320, 64, 320, 3), (640, 32, 640, 3), (1280, 16, 1280, 3), (1280, 8, 1280, 3),
                         (960, 64, 320, 3), (640, 64, 320, 1), (4, 64, 320, 3), (320, 64, 4, 3)],
    ),
    *squares("autoencoder", 4, [(128, 512, 128, 3), (256, 256, 256, 3), (512, 128, 512, 3)]),
    *squares("ConvNeXt", 64, [(3, 224, 128, 4, 4), (128, 56, 256, 2, 2), (512, 14, 1024, 2, 2)]),
    *squares("ConvNeXt", 64, [(c, s, c, 7, 1, c) for c, s in ((128, 56), (256, 28), (512, 14), (1024, 7))]),
    *squares(
        "EfficientNet", 128, [(32, 112, 32, 3, 1, 32), (96, 112, 96, 3, 2, 96), (144, 56, 144, 3, 1, 144),
                              (240, 28, 240, 5, 1, 240), (672, 14, 672, 5, 1, 672), (1152, 7, 1152, 3, 1, 1152),
                              (32, 112, 16, 1), (40, 28, 240, 1), (192, 7, 1152, 1)],
    ),
    *squares("ViT", 64, [(3, 224, 1024, 16, 16), (3, 224, 768, 32, 32)]),
    *squares("segmentation", 8, [(64, 256, 64, 3), (256, 64, 256, 3), (2048, 64, 256, 1), (19, 128, 19, 3)]),
    Shape("Inception", 64, 192, (17, 17), 192, (1, 7)),
    Shape("U-Net", 8, 512, (32, 32), 256, (2, 2), 2, 1, True),
    Shape("U-Net", 8, 128, (128, 128), 64, (2, 2), 2, 1, True),
    Shape("GAN", 64, 512, (8, 8), 256, (4, 4), 2, 1, True),
    Shape("Whisper", 8, 80, (3000,), 1024, (3,)),
    Shape("Whisper", 8, 1024, (3000,), 1024, (3,), 2),
    Shape("wav2vec", 8, 512, (16000,), 512, (3,), 2),
    Shape("WaveNet", 8, 128, (16000,), 256, (3,)),
    Shape("video", 4, 64, (16, 56, 56), 64, (3, 3, 3)),
    Shape("video", 4, 256, (4, 14, 14), 256, (3, 3, 3)),
    Shape("3D U-Net", 1, 32, (128, 128, 128), 32, (3, 3, 3)),
    Shape("3D U-Net", 1, 128, (32, 32, 32), 128, (3, 3, 3)),
]  # fmt: skip
WAYS: Mapping[str, tuple[str, bool, bool, bool]] = {
    "bf16 channels last": ("bfloat16", True, False, False),
    "bf16 channels last, tried": ("bfloat16", True, False, True),
    "bf16": ("bfloat16", False, False, False),
    "tf32": ("float32", False, True, False),
    "tf32 channels last": ("float32", True, True, False),
    "fp32": ("float32", False, False, False),
}
"""Way -> number format of tensors, whether channels come last, TF32, whether cuDNN tries its algorithms."""
TRIED = ("ResNet-50", "VGG-19", "WideResNet", "diffusion")
"""Networks whose convolutions are timed with algorithms that were tried; trials take long."""
LAUNCHES, LAUNCHES_S = 20, 0.02
"""The most launches that are timed after one another, and the seconds that they may take."""


# -- Measuring


def smaller(shape: Shape, shrink: int) -> Shape:
    """A shape with fewer samples and positions."""
    size = tuple(max(window, size // shrink) for size, window in zip(shape.size, shape.window, strict=True))
    return replace(shape, samples=max(1, shape.samples // shrink), size=size)


def seconds(work: Callable[[], object], device: Any) -> float:
    """Mean time of some launches after one another."""
    import torch

    def timed(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    timed(1)
    return timed(max(3, min(LAUNCHES, int(LAUNCHES_S / timed(1)))))


def times_it(shape: Shape, way: str) -> bool:
    """Whether a shape is timed this way: sequences have one layout."""
    _, last, _, tried = WAYS[way]
    return not (last and len(shape.size) == 1) and (not tried or shape.network in TRIED)


def passes(shape: Shape, way: str, device: Any) -> dict[str, float]:
    """Seconds of the three passes of a convolution, and of the forward product of equal extents."""
    import torch

    name, last, tf32, tried = WAYS[way]
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = tried
    dtype, dims = getattr(torch, name), len(shape.size)
    kinds = {2: torch.channels_last, 3: torch.channels_last_3d}
    form = kinds.get(dims, torch.contiguous_format) if last else torch.contiguous_format
    samples = shape.samples
    x = torch.randn(samples, shape.channels, *shape.size, device=device, dtype=dtype).to(memory_format=form)
    pair = (shape.channels, shape.filters) if shape.transposed else (shape.filters, shape.channels)
    w = torch.randn(pair[0], pair[1] // shape.groups, *shape.window, device=device, dtype=dtype).to(memory_format=form)
    rest = ([shape.stride] * dims, list(shape.padding), [1] * dims, shape.transposed, [0] * dims, shape.groups)
    convolve, back = torch.ops.aten.convolution, torch.ops.aten.convolution_backward
    g = torch.randn_like(convolve(x, w, None, *rest))
    found = {
        "forward": seconds(lambda: convolve(x, w, None, *rest), device),
        "input": seconds(lambda: back(g, x, w, None, *rest, [True, False, False]), device),
        "weight": seconds(lambda: back(g, x, w, None, *rest, [False, True, False]), device),
    }
    rows, depth = samples * shape.positions, shape.channels // shape.groups * math.prod(shape.window)
    if shape.groups == 1 and rows * depth < 1 << 31 and not shape.transposed:
        a, b = (torch.randn(m, n, device=device, dtype=dtype) for m, n in ((rows, depth), (depth, shape.filters)))
        found["product"] = seconds(lambda: a @ b, device)
    return found


def measure(file: Path, networks: Collection[str], shrink: int) -> None:
    """Times the convolutions of some networks in all ways."""
    import torch

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "rows": []}
    for way in WAYS:
        started = time.perf_counter()
        for shape in (smaller(shape, shrink) for shape in SHAPES if shape.network in networks):
            if not times_it(shape, way):
                continue
            try:
                one: dict[str, Any] = passes(shape, way, device)
            except RuntimeError as error:
                one = {"failed": str(error).splitlines()[0][:200]}
            found["rows"].append({"shape": asdict(shape), "way": way, **one})
        file.write_text(json.dumps(found))
        print(f"{way}: {time.perf_counter() - started:.0f} s", flush=True)


# -- Against the price


PRECISIONS = {"bf16": "half", "bf16 channels last": "half", "tf32": "tf32", "tf32 channels last": "tf32"} | {
    "fp32": "fp32"
}  # fmt: skip
"""Ways that are priced -> the precision of their rates. With channels first, tensor cores convert images; the cost of
this is not part of the convolution's price."""
CONVERTED = (("bf16", "dense"), ("tf32", "dense"))
"""Ways and classes of kernels for which images are converted."""
PASSES = ("forward", "input", "weight")
DEVICE = "H200-141GB"
LEAST_S = 60e-6
"""If the mean is shorter than this, the launches decide it, and it is not used."""
SHARES = np.geomspace(0.002, 2.0, 400)
"""The rates that are tried."""
OLDER_FP32 = 1.15
"""Rate of convolutions in fp32 over that of products where units are not paired (chosen: see `fit`)."""
PAIRED_UNITS = 2.0
"""Units for fp32 of a multiprocessor of the H200 over those of an A100 or V100 (NVIDIA's architecture whitepapers)."""


def shape_of(row: Mapping[str, Any]) -> Shape:
    """The shape of a measured row."""
    said = row["shape"]
    return Shape(**{**said, "size": tuple(said["size"]), "window": tuple(said["window"])})


def class_of(shape: Shape, way: str) -> str:
    """Which kernels run a shape: dense, odd or grouped."""
    vector = 16 // WIDTHS[WAYS[way][0]]
    if shape.groups > 1 and shape.channels // shape.groups < vector:
        return "grouped"
    return "odd" if any(c // shape.groups % vector for c in (shape.channels, shape.filters)) else "dense"


@functools.cache
def hardware_of(way: str) -> Record:
    """What the price knows of an H200 in the precision of a way, at the clock that it reaches in a short run."""
    precision = {"half": "bf16"}.get(PRECISIONS[way], PRECISIONS[way])
    cluster = parse_cluster("1xH200")
    devices = {name: replace(kind, sustained_clock=1.0) for name, kind in cluster.devices.items()}
    cluster = replace(cluster, devices=devices)
    problem = Problem.build(zoo.build("resnet50"), cluster, {"global_batch": 1, "precision": precision})
    return Evaluator(problem).layout([1], 1).stages[0].hardware


def priced(shape: Shape, way: str, hardware: Record) -> npt.NDArray[np.float64]:
    """Seconds of the three passes."""
    places = math.prod(shape.size) if shape.transposed else shape.positions
    extents = [shape.groups, shape.samples * places, shape.filters // shape.groups, shape.channels // shape.groups]
    kernel = KernelRow(kind=CONVOLUTION, left_gradient=1, right_gradient=1, forward_traffic=1.0)
    kernel.extents[: len(extents)], kernel.window = extents, float(math.prod(shape.window))
    kernel.images_last = int(WAYS[way][1])
    moved = float(hardware["element_bytes"]) * sum(shape.elements)
    times = np.zeros(3)
    convolution_s(record_of(kernel), kernel.extents, 0.0, moved, hardware, times)
    return np.array([times[0], times[1] - times[2], times[2]])


def usable(found: Mapping[str, Any], way: str, kind: str) -> list[tuple[Shape, Mapping[str, float]]]:
    """The measured rows of a way and a class of kernels."""
    rows = [(shape_of(row), row) for row in found["rows"] if row["way"] == way and "failed" not in row]
    return [(shape, row) for shape, row in rows if class_of(shape, way) == kind]


def fitted_rates(found: Mapping[str, Any], way: str, kind: str) -> list[float]:
    """The rates of the three passes that are least off, as a mean of logarithms."""
    fields = ("convolution_rates",) if kind == "dense" else (f"{kind}_first", f"{kind}_last")
    unit = 1.0 if kind == "dense" else 1e12 * next(d for d in known_devices() if d.name == DEVICE).peak_TFLOPs["fp32"]
    errors = np.zeros((3, len(SHARES)))
    for number, share in enumerate(SHARES):
        hardware = hardware_of(way).copy()
        for field in fields:
            hardware[field] = share * unit
        for shape, row in usable(found, way, kind):
            times = priced(shape, way, hardware)
            for j, name in enumerate(PASSES):
                if row[name] >= LEAST_S:
                    errors[j, number] += abs(math.log(times[j] / row[name]))
    return [round(float(SHARES[i]), 3) for i in errors.argmin(axis=1)]


def fit(found: Mapping[str, Any], write: bool) -> None:
    """Fits the rates to what was measured, prints them, and writes them into the data of the project."""
    curves: dict[str, dict[str, dict[str, list[float]]]] = {"A100": {}, "H200": {}}
    for precision in ("half", "tf32", "fp32"):
        first = next(way for way, named in PRECISIONS.items() if named == precision)
        last = f"{first} channels last" if f"{first} channels last" in PRECISIONS else first
        own = {
            "dense": fitted_rates(found, last, "dense"),
            "odd_last": fitted_rates(found, last, "odd"),
            "odd_first": fitted_rates(found, first, "odd"),
            "grouped_last": fitted_rates(found, last, "grouped"),
            "grouped_first": fitted_rates(found, first, "grouped"),
        }
        curves["H200"][precision] = own
        other = {name: [round(PAIRED_UNITS * rate, 3) for rate in rates] for name, rates in own.items()}
        other["dense"] = [OLDER_FP32] * 3 if precision == "fp32" else own["dense"]
        curves["A100"][precision] = other
        print(precision, json.dumps(own))
    if write:
        source = {
            "script": "benchmarks/gpu_convolutions.py",
            "data": "benchmarks/results/gpu_convolutions-2026-11-27.json",
            "H200": f"fitted to {len(SHAPES)} convolutions on one {found['device']}, torch {found['torch']}",
            "A100": "also for what came before: the H200's rates. Where no tensor core takes part, as much a "
            "multiprocessor, of which the H200's has twice the fp32 units; in fp32 one rate over that of products: "
            "published runs of ResNet on V100 and P40 are met best, their three publishers counted alike",
        }
        document = {"schema": "automap.fitted_curves/1", "source": source, "curves": curves}
        FILE.write_text(json.dumps(document, indent=1) + "\n")


def report(found: Mapping[str, Any]) -> None:
    """Prints what was measured beside the price, and the errors of each way and class of kernels."""
    print(f"{found['device']}, torch {found['torch']}")
    print("way, convolution: TFLOP/s forward, of the input's and of the weight's gradient; the price over each")
    errors: dict[tuple[str, str, str], list[float]] = {}
    for row in found["rows"]:
        shape, way = shape_of(row), row["way"]
        if "failed" in row:
            print(f"{way:26} {shape}: {row['failed']}")
            continue
        rates = [shape.flops / row[name] / 1e12 for name in PASSES]
        text = " ".join(f"{rate:6.1f}" for rate in rates)
        if way in PRECISIONS:
            times = priced(shape, way, hardware_of(way))
            for name, time_s in zip(PASSES, times, strict=True):
                text += f" {time_s / row[name]:5.2f}"
                if row[name] >= LEAST_S:
                    errors.setdefault((way, class_of(shape, way), name), []).append(math.log(time_s / row[name]))
        print(f"{way:26} {shape!s:70} {text}")
    print(f"without those shorter than {1e6 * LEAST_S:.0f} us, which are launches:")
    for (way, kind, name), some in errors.items():
        sizes = [abs(math.expm1(error)) for error in some]
        beside = "; without what converting the images costs" if (way, kind) in CONVERTED else ""
        middle = f"off by {statistics.median(sizes):.0%} in the median"
        print(f"{way:20} {kind:8} {name:8} {len(some):3} passes, {middle}{beside}")


def main() -> None:
    """Does what the first word says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "fit", "report"])
    parser.add_argument("file", type=Path)
    names = list(dict.fromkeys(shape.network for shape in SHAPES))
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.what == "measure":
        measure(given.file, given.only, given.shrink)
    found = json.loads(given.file.read_text())
    if given.what == "fit":
        fit(found, given.write)
    else:
        report(found)


if __name__ == "__main__":
    main()
