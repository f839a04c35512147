"""Rates of kernels on one GPU of this host, on which the price of eager PyTorch rests, and kernels of whole steps.

    python benchmarks/gpu_kernels.py [FOLDER NAME ...] [--shrink 1]

Prints TFLOP/s of products with vocabularies whose rows are, and are not, multiples of 16 bytes (forward, gradient of
the input, gradient of the weight); bytes a second of elementwise operators; the bytes of a cross-entropy for each
element of its scores, at 3.9 TB/s; and TFLOP/s of `scaled_dot_product_attention`, whose backward pass counts 2.5 times
the forward one. With a folder of `gpu_steps.py prepare` and names of its models: the kernels that take most of the time
of a plain step. `--shrink` divides the sizes, to try the script without a GPU. The committed figures are in
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from gpu_steps import CASES, plain_step
from torch.profiler import ProfilerActivity, profile

from automap.runtime.clock import synchronize

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
ELEMENTS = 1 << 28
ASSUMED_BYTES_PER_S = 3.9e12


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The mean time of some repeats, one after the other."""
    work()
    synchronize(DEVICE)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(DEVICE)
    return (time.perf_counter() - start) / repeats


def products(shrink: int) -> None:
    """Products with a vocabulary."""
    for dtype in (torch.bfloat16, torch.float32):
        torch.backends.cuda.matmul.allow_tf32 = dtype == torch.float32
        for (m, k), n in itertools.product(
            ((16384, 768), (4096, 1600), (8192, 4096)), (50257, 50258, 50260, 50264, 50304, 30522, 30528)
        ):
            rows, depth, columns = m // shrink, k // shrink, n // shrink
            shapes = ((rows, depth), (columns, depth), (rows, columns))
            x, w, g = (torch.randn(shape, device=DEVICE, dtype=dtype) for shape in shapes)
            flops = 2.0 * rows * depth * columns / 1e12
            rates = (
                flops / seconds(lambda x=x, w=w: F.linear(x, w)),
                flops / seconds(lambda g=g, w=w: g @ w),
                flops / seconds(lambda g=g, x=x: g.t() @ x),
            )
            name = "TF32" if dtype == torch.float32 else "bf16"
            print(f"product {name} {m} x {k} x {n}:", *(f"{rate:.0f}" for rate in rates), "TFLOP/s", flush=True)


def elementwise(shrink: int) -> None:
    """Operators that are bound by memory."""
    elements = ELEMENTS // shrink
    x, y = (torch.randn(elements, device=DEVICE) for _ in range(2))
    a, b = x.bfloat16(), y.bfloat16()
    cases: dict[str, tuple[Callable[[], object], int]] = {
        "fp32 + fp32": (lambda: x + y, 12),
        "fp32 * number": (lambda: x * 0.5, 8),
        "tanh, fp32": (lambda: torch.tanh(x), 8),
        "pow, fp32": (lambda: torch.pow(x, 3), 8),
        "bf16 + bf16": (lambda: a + b, 6),
        "bf16 + fp32": (lambda: a + y, 10),
        "bf16 to fp32": (a.float, 6),
        "fp32 to bf16": (x.bfloat16, 6),
        "gelu, bf16": (lambda: F.gelu(a), 4),
    }
    for name, (work, width) in cases.items():
        print(f"elementwise {name}: {width * elements / seconds(work) / 1e9:.0f} GB/s", flush=True)


def losses(shrink: int) -> None:
    """Cross-entropies of scores in bf16, forward and backward."""
    for classes, tokens in ((50257, 16384), (128256, 8192), (30522, 8192)):
        shape = (tokens // shrink, classes // shrink)
        scores = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(shape[1], shape[:1], device=DEVICE)

        def work(scores: torch.Tensor = scores, labels: torch.Tensor = labels) -> None:
            F.cross_entropy(scores.float(), labels).backward()  # type: ignore[no-untyped-call]
            scores.grad = None

        took = seconds(work)
        width = took * ASSUMED_BYTES_PER_S / shape[0] / shape[1]
        print(f"cross-entropy {tokens} x {classes}: {1e3 * took:.2f} ms, {width:.1f} bytes an element", flush=True)


def attentions(shrink: int) -> None:
    """Fused attention."""
    shapes = (
        (16, 12, 1024, 64),
        (2, 32, 4096, 64),
        (2, 32, 8192, 64),
        (4, 32, 4096, 128),
        (16, 16, 512, 64),
        (64, 16, 128, 64),
        (64, 16, 197, 64),
    )
    for shape, dtype, causal in itertools.product(shapes, (torch.bfloat16, torch.float32), (True, False)):
        samples, heads, positions, size = shape[0], shape[1], max(1, shape[2] // shrink), shape[3]
        q, k, v = (
            torch.randn(samples, heads, positions, size, device=DEVICE, dtype=dtype, requires_grad=True)
            for _ in range(3)
        )
        gradient = torch.ones_like(q)

        def attend(
            q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v, causal: bool = causal
        ) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        def both(operands: tuple[torch.Tensor, ...] = (q, k, v), gradient: torch.Tensor = gradient) -> None:
            torch.autograd.grad(attend(), operands, gradient)

        forward = seconds(attend)
        backward = seconds(both) - forward
        flops = 4.0 * samples * heads * positions**2 * size * (0.5 if causal else 1.0) / 1e12
        words = f"{'causal' if causal else 'whole'} {'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
        print(f"attention {words}: {flops / forward:.0f} and {2.5 * flops / backward:.0f} TFLOP/s", flush=True)


def kernels_of(name: str, folder: Path) -> None:
    """The kernels of one step that take longest."""
    step = plain_step(CASES[name], folder / name, DEVICE)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        step()
        torch.cuda.synchronize()
    kinds = torch.autograd.DeviceType
    device = kinds.CUDA if DEVICE.type == "cuda" else kinds.CPU
    rows = [e for e in found.key_averages() if e.device_type == device and e.self_device_time_total > 0]
    total, count = sum(e.self_device_time_total for e in rows) / 1e3, sum(e.count for e in rows)
    print(f"step of {name}: {total:.1f} ms, {count} kernels", flush=True)
    for e in sorted(rows, key=lambda e: -e.self_device_time_total)[:14]:
        print(f"  {e.self_device_time_total / 1e3:8.2f} ms x{e.count:5d} {e.key[:100]}", flush=True)


def main() -> None:
    """Prints all sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--shrink", type=int, default=1)
    given = parser.parse_args()
    print(f"{torch.cuda.get_device_name() if DEVICE.type == 'cuda' else 'cpu'}, torch {torch.__version__}")
    for section in (products, elementwise, losses, attentions):
        section(given.shrink)
    for name in given.names:
        kernels_of(name, given.folder)


if __name__ == "__main__":
    main()
