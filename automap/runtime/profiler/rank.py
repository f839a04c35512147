"""One rank of a profile: times kernels, collectives and the runtime itself, and reports rows of seconds.

All ranks measure at the same time, kernel by kernel, as they will compute at the same time. Each section has a share of
the time, and leaves out what does not fit. Nothing is fitted here. Sizes and shares of time are assumed. Units:
seconds, bytes, elements.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from automap.cluster import parse_cluster
from automap.fitted_curves import COLLECTIVES
from automap.plan import Plan
from automap.problem import Problem
from automap.runtime.clock import slowest
from automap.runtime.executor.optimizer import Optimizer
from automap.runtime.executor.runner import DTYPES, Runner
from automap.runtime.executor.synthetic_data import RandomData, RandomValues
from automap.runtime.mesh_groups import Axis, meet
from automap.runtime.operators.apply import apply, run
from automap.runtime.profiler.busy_host import Meter
from automap.runtime.profiler.device import describe
from automap.runtime.profiler.kernel_clock import KernelClock
from automap.runtime.redistribute import all_gather, all_reduce, all_to_all, reduce_scatter
from automap.runtime.tensor_layout import Step
from ir import zoo

SHARES = {"stream": 0.03, "gemm": 0.3, "attention": 0.12, "steps": 0.4, "collectives": 0.15}
"""The share of the measuring time for each section."""
BUFFER_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
"""Kind of device -> the size of the buffers that are streamed through memory, larger than caches."""
GEMM_SIZES = {
    "cpu": (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096),
    "cuda": (16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384),
}
"""Kind of device -> the extents from which the dims of matrix products are drawn: those of training on it."""
ATTENTIONS = {
    "cpu": ((4, 16, 64), (128, 256, 512, 1024, 2048, 4096), (32, 64, 128)),
    "cuda": ((16, 64, 256), (256, 512, 1024, 2048, 4096, 8192), (64, 128)),
}
"""Kind of device -> (samples * heads, positions, head sizes) of attention."""
GEMM_ROWS = 480
"""The number of matrix products that are drawn."""
LEAST_ROWS = 12
"""The number of rows of a section that are measured however little time there is."""
MOST_S = 0.02
"""The time at the device's peak above which a kernel is not measured."""
LEAST_STEPS = 4
"""The number of plans whose steps are measured however little time there is."""
TINY_MODEL = "gpt:layers=2,hidden=16,heads=2,seq_len=8,vocab_size=32"
LOSS_MODELS = {
    "cpu": "gpt:layers=1,hidden=64,heads=4,seq_len=128,vocab_size=8192",
    "cuda": "gpt:layers=1,hidden=64,heads=4,seq_len=4096,vocab_size=32768",
}
"""The models of `ir.zoo` on which host times and, for each kind of device, the loss are measured."""
COLLECTIVE_BYTES = tuple(1 << p for p in (10, 20, 16, 23, 18, 21, 14, 25, 12, 22, 24))
"""The sizes of collectives, the most informative first."""
SPLIT_ROWS = 4
"""The first dim of tensors in collectives, which are split along their second dim, as activations are."""
ADAM_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Kind of device -> the elements of a parameter that caches do not hold together with its gradient and moments, and
whose update takes longer than its launch."""

Row = list[float]
"""One measurement: sizes, then seconds."""


def run_rank(folder: Path, rank: int, num_ranks: int, argument: Mapping[str, Any]) -> dict[str, Any]:
    """Measures on one rank, see `automap.runtime.profiler.measure_host`.

    Args:
        folder: the folder in which ranks meet.
        rank: the number of this process, and of its GPU.
        argument: {device: cuda or cpu; measure_s: the time of all sections; time_s: the limit of the launch; plans:
            [[model, plan, number of its devices: one or two]], plans of one device first}.

    Returns:
        Section -> its rows; `device` -> the properties of the device; and the readings that
        `automap.runtime.profiler.busy_host.conditions` takes.
    """
    torch.set_num_threads(1)
    device = torch.device(argument["device"], rank) if argument["device"] == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    meet(folder, rank, num_ranks, device, limit_s=argument["time_s"])
    dist.barrier()
    about = describe(device, num_ranks)
    measure_s = float(argument["measure_s"])
    clock, meter = KernelClock(device), Meter()
    # All ranks time the same kernels.
    flops = -slowest(-_peak_flops(clock), device)
    sections: dict[str, Callable[[float], Any]] = {
        "stream": lambda until: _stream(clock),
        "gemm": lambda until: _gemms(clock, flops, until),
        "attention": lambda until: _attentions(clock, flops, until),
        "steps": lambda until: _steps(argument["plans"], clock, num_ranks, until),
        "collectives": lambda until: _collectives(clock, num_ranks, until),
    }
    # The optimizer is measured first, since its first use imports much.
    found: dict[str, Any] = {"device": about, "adam_s_per_element": _adam(clock), "seconds": {}}
    for name, section in sections.items():
        dist.barrier()
        begun = time.monotonic()
        found[name] = section(begun + SHARES[name] * measure_s)
        found["seconds"][name] = time.monotonic() - begun
    found["loss"] = _loss(clock)
    found["backward_ratio"] = _backward_ratio(clock)
    quiet = {"host": meter.read(), "worked_s": clock.worked_s, "computed_s": clock.passed_s, "spreads": clock.spreads}
    return found | quiet


def _precisions(device: torch.device) -> tuple[str, ...]:
    return ("bf16", "fp16", "fp32") if device.type == "cuda" else ("fp32",)


def _peak_flops(clock: KernelClock) -> float:
    """The rate of one large matrix product in the first precision of the device, FLOP/s."""
    size = 4096 if clock.device.type == "cuda" else 512
    a = torch.ones(size, size, dtype=DTYPES[_precisions(clock.device)[0]], device=clock.device)
    return 2.0 * size**3 / clock.kernel(lambda: torch.mm(a, a))


def _stream(clock: KernelClock) -> float:
    """The rate of an operator on data that no cache holds, bytes/s; a GPU's engine for copies is slower than that."""
    size = BUFFER_BYTES[clock.device.type]
    source = torch.ones(size // 4, device=clock.device)
    target = torch.empty_like(source)
    return 2.0 * size / clock.kernel(lambda: torch.mul(source, 0.5, out=target))


def _gemms(clock: KernelClock, flops: float, until: float) -> dict[str, list[Row]]:
    """Precision -> rows (batch, m, n, k, seconds), with operands stored as in a forward pass and its two gradients."""
    found: dict[str, list[Row]] = {p: [] for p in _precisions(clock.device)}
    random = np.random.default_rng(0)
    for number in range(GEMM_ROWS):
        if clock.is_late(until) and number >= LEAST_ROWS:
            break
        batch = int(random.choice((4, 16, 48))) if number % 4 == 3 else 1
        m, n, k = (int(size) for size in random.choice(GEMM_SIZES[clock.device.type], size=3))
        if (
            2.0 * batch * m * n * k > MOST_S * flops
            or 4.0 * batch * (m * k + k * n + m * n) > BUFFER_BYTES[clock.device.type]
        ):
            continue
        for precision, rows in found.items():
            how: dict[str, Any] = {"dtype": DTYPES[precision], "device": clock.device}
            a = torch.randn(batch, k, m, **how).mT if number % 3 == 1 else torch.randn(batch, m, k, **how)
            b = torch.randn(batch, n, k, **how).mT if number % 3 == 0 else torch.randn(batch, k, n, **how)
            c = torch.empty(batch, m, n, **how)
            if batch == 1:
                a, b, c = a[0], b[0], c[0]
            seconds = clock.kernel(functools.partial(torch.matmul, a, b, out=c))
            rows.append([batch, m, n, k, seconds])
    return found


def _attentions(clock: KernelClock, flops: float, until: float) -> list[Row]:
    """Rows (batch * heads, positions, head size, seconds forward, seconds backward) of causal attention."""
    dtype = DTYPES[_precisions(clock.device)[0]]
    found: list[Row] = []
    shapes = list(itertools.product(*ATTENTIONS[clock.device.type]))
    for number in np.random.default_rng(0).permutation(len(shapes)):
        heads, positions, size = shapes[number]
        is_late = clock.is_late(until) and len(found) >= LEAST_ROWS
        if is_late or 14.0 * heads * positions**2 * size > MOST_S * flops:
            continue
        how: dict[str, Any] = {"dtype": dtype, "device": clock.device, "requires_grad": True}
        q, k, v = (torch.randn(1, heads, positions, size, **how) for _ in range(3))
        gradient = torch.ones_like(q)

        def both(q: Tensor = q, k: Tensor = k, v: Tensor = v, gradient: Tensor = gradient) -> None:
            torch.autograd.grad(_attend(q, k, v), (q, k, v), gradient)

        forward_s = clock.kernel(functools.partial(_attend, q.detach(), k.detach(), v.detach()))
        # A backward pass alone cannot be recorded: autograd runs it where the forward pass ran.
        found.append([heads, positions, size, forward_s, max(clock.kernel(both) - forward_s, forward_s)])
    return found


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _loss(clock: KernelClock) -> Row:
    """The row (bytes forward and bytes backward as the price counts them, seconds of both) of a cross-entropy."""
    graph = zoo.build(LOSS_MODELS[clock.device.type])
    op = graph.operators[-1]
    shapes = [graph.tensors[name].shape for name in op.inputs]
    dtype = DTYPES[_precisions(clock.device)[0]]
    logits = torch.rand(shapes[0], dtype=dtype, device=clock.device).requires_grad_()
    labels = torch.zeros(shapes[1], dtype=torch.int64, device=clock.device)

    def both() -> None:
        (out,) = apply(op, graph.tensors, [logits, labels], 1)
        torch.autograd.grad(out, logits)

    return [logits.nbytes * op.traffic[0], logits.nbytes * op.traffic[1], clock.kernel(both)]


def _backward_ratio(clock: KernelClock) -> float:
    """The CPU time of the backward pass over that of the forward pass, of operators without other notable costs."""
    graph = zoo.build(TINY_MODEL)
    data = RandomData(graph, 1, 0, torch.float32, clock.device)
    values = {name: value.to(clock.device) for name, value in RandomValues(graph, 0).items()}
    values |= {
        t.name: data(t.name, tuple((0, extent) for extent in t.shape_at(1)), 0)
        for t in graph.tensors.values()
        if t.role == "input"
    }
    leaves = [values[t.name].requires_grad_() for t in graph.parameters if t.is_float]
    loss = run(graph, values, 1)[graph.outputs[-1]]
    forward = clock.kernel(lambda: run(graph, values, 1), with_launches=True)
    backward = clock.kernel(lambda: torch.autograd.grad(loss, leaves, retain_graph=True), with_launches=True)
    return backward / forward


def _steps(plans: Sequence[Any], clock: KernelClock, num_ranks: int, until: float) -> list[float | None]:
    """The step time of each plan; None = no time left, or more devices than this machine has.

    Every rank runs plans of one device by itself. All ranks run plans of several devices together; some have no stage.
    """
    found: list[float | None] = []
    for number, (spec, document, num_devices) in enumerate(plans):
        is_alone = num_devices == 1
        if num_devices > num_ranks or (clock.is_late(until) and number >= LEAST_STEPS):
            found.append(None)
            continue
        plan = Plan.from_json(document)
        problem = Problem.build(zoo.build(spec), parse_cluster(f"{num_devices}xcpu"), plan.training)
        runner = Runner(problem, plan, 0 if is_alone else dist.get_rank(), 0, clock.device)
        for _ in range(2):
            runner.step()
        if is_alone:
            dist.barrier()
            found.append(clock.median(runner.step, 1))
        else:
            found.append(clock.median_together(runner.step))
    return found


def _adam(clock: KernelClock) -> float:
    """The time of the optimizer for one element of a large parameter."""
    elements = ADAM_ELEMENTS[clock.device.type]
    leaf = torch.zeros(elements, device=clock.device, requires_grad=True)
    optimizer = Optimizer({"leaf": leaf}, "adam")
    gradient = torch.ones_like(leaf)

    def step() -> None:
        leaf.grad = gradient
        optimizer.step()

    for _ in range(2):
        step()
    dist.barrier()
    return clock.median(step, 1) / elements


def group_sizes(num_ranks: int) -> list[int]:
    """The sizes of the groups whose collectives are measured: powers of two, and all ranks."""
    powers = [1 << p for p in range(1, num_ranks.bit_length()) if 1 << p <= num_ranks]
    return sorted({*powers, num_ranks} - {1})


def _collectives(clock: KernelClock, num_ranks: int, until: float) -> dict[str, list[Row]]:
    """Kind -> rows (ranks, bytes, seconds); all groups of one size run at the same time."""
    found: dict[str, list[Row]] = {kind: [] for kind in COLLECTIVES}
    rank = dist.get_rank()
    sizes = group_sizes(num_ranks)
    groups = {}
    for size in sizes:
        for first in range(0, num_ranks - size + 1, size):
            group = dist.new_group(list(range(first, first + size)))
            if first <= rank < first + size:
                groups[size] = (group, first)
    for number, data in enumerate(COLLECTIVE_BYTES):
        for size in sizes:
            if clock.is_late(until) and number > 2:
                return found
            if size in groups:
                group, first = groups[size]
                for kind in COLLECTIVES if size == sizes[0] else COLLECTIVES[:-1]:
                    found[kind].append([size, data, _time_collective(clock, kind, data, size, group, first)])
    return found


def _time_collective(
    clock: KernelClock, kind: str, data: int, size: int, group: dist.ProcessGroup, first: int
) -> float:
    """The time of one collective of the runtime; `data` is the size of the larger of operand and result, bytes."""
    axis = Axis(name="", number=0, size=size, index=dist.get_rank() - first, group=group)
    width = data // (4 * SPLIT_ROWS * size)
    part = torch.zeros(SPLIT_ROWS, width, device=clock.device)
    whole = torch.zeros(SPLIT_ROWS, width * size, device=clock.device)
    out = torch.empty_like(whole)
    swap = Step("all_to_all", axis, 0, (SPLIT_ROWS,) * size, 1, (width,) * size)

    def send() -> None:
        if axis.index == 0:
            dist.send(whole, first + 1, group)
        elif axis.index == 1:
            dist.recv(out, first, group)

    run: Callable[[], object] = {
        "all_reduce": lambda: all_reduce(whole, axis),
        "all_gather": lambda: all_gather(part, axis, 1, (width,) * size),
        "reduce_scatter": lambda: reduce_scatter(whole, axis, 1, (width,) * size),
        "all_to_all": lambda: all_to_all(whole, swap),
        "send_recv": send,
    }[kind]
    run()
    return clock.median_together(run, group)
