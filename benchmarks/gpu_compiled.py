"""Compiled training steps on one GPU of this host: their time, their memory and the kernels that they consist of.

    python benchmarks/gpu_compiled.py FOLDER [NAME ...] [--shrink 1]

First it measures a cross-entropy of scores in bf16, eager and compiled: its time, and what it holds at the peak beside
the scores and what came before. Then it measures steps of models that `gpu_steps.py prepare FOLDER` made: weights in
bf16, each block and the loss compiled, a fused optimizer, as TorchTitan runs them on one device. Kernels are sorted by
their names into products, attention, what torch.compile fused (triton), the optimizer, and others. Each kind is printed
with its milliseconds and its launches. `--shrink` divides the sizes of the loss, to try the script without a GPU, where
nothing is fused. The committed figures are in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from gpu_sharded import blocks_of
from gpu_steps import CASES, built
from torch.profiler import ProfilerActivity, profile

from automap.runtime.clock import synchronize

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
ASSUMED_BYTES_PER_S = 3.9e12
SCORES = ((8192, 128256), (16384, 50257))
"""Tokens and classes of the losses."""
BACKEND = "inductor" if DEVICE.type == "cuda" else "eager"
KINDS = {
    "triton": ("triton",),
    "attention": ("flash", "fmha", "sdpa", "attention", "cudnn_generated"),
    "gemm": ("gemm", "nvjet", "cutlass", "splitk"),
    "adam": ("adam", "multi_tensor"),
}
"""Kind of kernels -> parts of their names, the first that fits."""
WARM_UP, STEPS, SHOWN = 4, 8, 12


def kind_of(name: str) -> str:
    """The kind of a kernel."""
    low = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in low for part in parts)), "other")


def entropy(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of scores that are widened to fp32."""
    return F.cross_entropy(scores.float(), labels)


def held() -> int:
    """Bytes that tensors hold on the GPU; resets the peak."""
    if DEVICE.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak() -> int:
    """The most bytes that tensors held on the GPU."""
    return torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else 0


def timed(work: Callable[[], object], warm_up: int, count: int) -> tuple[float, int, int]:
    """The mean seconds of some calls, the bytes that were held before them and the most in them."""
    for _ in range(warm_up):
        work()
    synchronize(DEVICE)
    before, start = held(), time.perf_counter()
    for _ in range(count):
        work()
    synchronize(DEVICE)
    return (time.perf_counter() - start) / count, before, peak()


def losses(shrink: int) -> None:
    """Prints the losses."""
    for (tokens, classes), (name, loss) in (
        (shape, way)
        for shape in SCORES
        for way in (("eager", entropy), ("compiled", torch.compile(entropy, backend=BACKEND)))
    ):
        scores = torch.randn(
            tokens // shrink, classes // shrink, device=DEVICE, dtype=torch.bfloat16, requires_grad=True
        )
        labels = torch.randint(classes // shrink, (tokens // shrink,), device=DEVICE)

        def work(
            loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = loss,
            scores: torch.Tensor = scores,
            labels: torch.Tensor = labels,
        ) -> None:
            loss(scores, labels).backward()  # type: ignore[no-untyped-call]
            scores.grad = None

        took, before, most = timed(work, 3, 10)
        print(
            f"loss {name} {tokens}x{classes}: {1e3 * took:.2f} ms,"
            f" {took * ASSUMED_BYTES_PER_S / scores.numel():.1f} bytes an element at 3.9 TB/s;"
            f" peak beside scores {(most - before) / scores.numel():.2f} bytes an element",
            flush=True,
        )


def compiled_step(name: str, folder: Path) -> tuple[Callable[[], None], int]:
    """A step, and the parameters of its model."""
    case = CASES[name]
    torch._dynamo.reset()
    module, drawn, labels, loss = built(case, folder, DEVICE)
    module.to(torch.bfloat16)
    inputs = {key: x.to(torch.bfloat16) if x.is_floating_point() else x for key, x in drawn.items()}
    if case.recompute == "full":
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for block in blocks_of(module):
        block.compile(backend=BACKEND)
    loss = torch.compile(loss, backend=BACKEND)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=DEVICE.type == "cuda")

    def step() -> None:
        scores = module(**inputs).logits
        mean = loss(scores, labels)
        del scores
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, sum(parameter.numel() for parameter in module.parameters())


def kernels_of(name: str, folder: Path) -> None:
    """Prints a step and its kernels."""
    step, parameters = compiled_step(name, folder)
    took, _, most = timed(step, WARM_UP, STEPS)
    states = 6 * parameters / 2**30
    print(f"{name} compiled bf16: {1e3 * took:.1f} ms, peak {most / 2**30:.2f} GiB, states {states:.2f}", flush=True)
    with profile(activities=[ProfilerActivity.CUDA if DEVICE.type == "cuda" else ProfilerActivity.CPU]) as found:
        step()
        synchronize(DEVICE)
    kinds = torch.autograd.DeviceType
    device = kinds.CUDA if DEVICE.type == "cuda" else kinds.CPU
    rows = [e for e in found.key_averages() if e.device_type == device and e.self_device_time_total > 0]
    totals: dict[str, tuple[float, int]] = {}
    for e in rows:
        spent, count = totals.get(kind_of(e.key), (0.0, 0))
        totals[kind_of(e.key)] = (spent + e.self_device_time_total / 1e3, count + e.count)
    print("   ", {kind: (round(spent, 1), count) for kind, (spent, count) in totals.items()}, flush=True)
    for e in sorted(rows, key=lambda e: -e.self_device_time_total)[:SHOWN]:
        print(f"   {e.self_device_time_total / 1e3:8.2f} ms x{e.count:4d} {e.key[:120]}", flush=True)


def main() -> None:
    """Prints the losses and the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--shrink", type=int, default=1)
    given = parser.parse_args()
    print(f"{torch.cuda.get_device_name() if DEVICE.type == 'cuda' else 'cpu'}, torch {torch.__version__}")
    losses(given.shrink)
    for name in given.names:
        kernels_of(name, given.folder / name)
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
