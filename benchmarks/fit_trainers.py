"""Fits what trainers, devices and links do to a training step, and prints the errors three ways.

    python benchmarks/fit_trainers.py [published_runs.json] [--write] [--leave-groups-out]

(a) defaults: every constant at its prior; (b) blocks of runs (model and number of GPUs) left out, five parts in turn,
and with --leave-groups-out whole groups; (c) fitted to all. --write puts the constants of (c) into automap/data. A
constant belongs to a device kind, a link kind or a trainer and serves all runs of it; none scales a whole step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import step_model as model
from fitting import Floats, fit, measurements, robust
from run_features import O_COUNT, Features, features

import automap
from automap.cluster import Device
from automap.price.attention import A_COUNT
from automap.price.curves import attention_curve, gemm_curve
from automap.price.gemm import G_COUNT
from automap.published import Unpriced, load_runs
from automap.validation import Predicted, summarize

DATA = Path(automap.__file__).parent / "data"
PORTABLE = {"llm-foundry-fsdp", "torchtitan"}
"""Trainers whose attention kernel is FlashAttention 2 or Triton (their documentation)."""
SCATTERED = ("megatron",)
"""Trainers that send each tensor-parallel rank's share of a whole tensor (Megatron-LM's scatter-gather)."""
INTER = ("infiniband-edr", "infiniband-hdr", "infiniband-ndr", "ethernet", "omni-path")
INTRA = ("nvlink2", "nvlink3", "nvlink4", "nvlink5", "pcie")
CLOCKS = ("V100", "A100", "H100", "H100-96GB", "H200", "GB200")
MEMORIES = ("V100", "A100", "H100", "GB200")
OUTLIERS = ("rowwise",)
"""Runs that another run contradicts under the same printed configuration."""


@dataclass(frozen=True, kw_only=True)
class Constant:
    """One fitted number."""

    name: str
    prior: float
    low: float
    high: float
    hold: float = 0.01
    """Strength of the prior."""


def _trainer_constants(name: str) -> list[Constant]:
    core = name in ("megatron-core", "torchtitan", "llm-foundry-fsdp", "internevo")
    traffic = {"llm-foundry-fsdp": 1.2, "torchtitan": 0.7, "megatron-core": 0.8, "deeplearningexamples": 0.8}
    rows = (
        ("elementwise_traffic", traffic.get(name, 1.0), 0.5, 1.8, 0.001),
        ("attention_rate", 0.5 if name == "llm-foundry-fsdp" else 0.9, 0.2, 1.0, 0.01),
        ("host_us_per_operator", 40.0 if name in ("megatron-deepspeed", "megatron-lm") else 15.0, 2.0, 90.0, 0.1),
        ("host_us_per_collective", 40.0, 0.0, 300.0, 0.01),
        ("gradient_overlap", 0.9 if core else 0.5 if name in ("oneflow", "alpa") else 0.0, 0.0, 1.0, 0.01),
        ("tensor_overlap", {"torchtitan": 0.3, "megatron-core": 0.5}.get(name, 0.0), 0.0, 0.8, 0.01),
        ("gather_bandwidth_share", 0.14 if name == "deepspeed" else 0.25, 0.05, 0.8, 0.01),
        ("step_overhead_ms", 5.0, 0.0, 100.0, 0.01),
        ("send_host_ms", 0.25, 0.0, 0.8, 0.03),
        ("send_overlap", 0.5 if name in ("megatron-core", "oneflow") else 0.0, 0.0, 1.0, 0.01),
    )
    assert tuple(row[0] for row in rows) == model.TRAINER
    return [Constant(name=f"{name}.{key}", prior=p, low=lo, high=hi, hold=h) for key, p, lo, hi, h in rows]


SHARED = {
    "overlap_exponent": (2.2, 1.2, 6.0, 0.01),
    "host_backward": (1.24, 1.0, 2.0, 0.01),
    "node_latency_us": (20.0, 5.0, 60.0, 0.01),
    "kernel_us": (2.0, 0.0, 8.0, 0.01),
    "attention_backward": (3.1, 2.0, 5.0, 0.1),
    "optimizer_bytes": (24.0, 14.0, 40.0, 0.1),
    "micro_batch_ms": (0.5, 0.0, 3.0, 0.01),
    "loss_passes": (6.0, 0.5, 12.0, 0.01),
    "group_wait_exponent": (0.5, 0.0, 1.2, 0.01),
    "fallback_kernels": (10.0, 0.0, 40.0, 0.01),
    "misaligned": (4.0, 1.0, 12.0, 0.01),
    "ring_us": (4.0, 0.0, 30.0, 0.1),
    "fp32_efficiency": (0.9, 0.5, 1.0, 0.001),
    "fp8_speedup": (1.0, 0.5, 1.5, 0.01),
}
ABOUT = {
    "overlap_exponent": "host and device of a unit overlap as (host^p + device^p)^(1/p)",
    "host_backward": "host time of the backward pass over that of the forward pass",
    "node_latency_us": "latency of a collective",
    "kernel_us": "device time of the smallest kernel",
    "attention_backward": "arithmetic of the backward attention kernel over the forward one, at their rates",
    "optimizer_bytes": "bytes that the optimizer moves a parameter",
    "micro_batch_ms": "host time of a micro-batch beside its operators",
    "loss_passes": "bytes of an unfused fp32 cross-entropy over those of one pass over the logits",
    "group_wait_exponent": "how the wait for the slowest of n ranks grows with n - 1",
    "fallback_kernels": "kernels of a softmax that the fused one refuses",
    "misaligned": "time of products whose dims are no multiples of 8 elements over that of others",
    "ring_us": "latency of a ring between hosts, a rank",
    "fp32_efficiency": "share of the peak without tensor cores",
    "fp8_speedup": "rate of fp8 products in training over that of the measured kernel, which quantises alone",
}


class Fleet:
    """All runs as arrays, and their constants."""

    def __init__(self, rows: list[Features]) -> None:
        self.rows = rows
        self.trainers = sorted({f.case.problem.trainer.name for f in rows})
        named = {f.case.problem.cluster.device(0).name: f.case.problem.cluster.device(0) for f in rows}
        self.devices = list(named.values())
        self.constants = [Constant(name=f"clock.{k}", prior=0.85, low=0.4, high=1.1, hold=0.001) for k in CLOCKS]
        self.constants += [Constant(name=f"memory.{k}", prior=0.8, low=0.7, high=0.95, hold=1.0) for k in MEMORIES]
        for name in self.trainers:
            self.constants += _trainer_constants(name)
        self.constants += [Constant(name=n, prior=p, low=lo, high=hi, hold=h) for n, (p, lo, hi, h) in SHARED.items()]
        self.constants += [Constant(name=f"link.{k}", prior=0.65, low=0.3, high=1.0, hold=0.03) for k in INTER]
        self.constants += [Constant(name=f"link.{k}", prior=0.75, low=0.5, high=0.95, hold=0.01) for k in INTRA[:3]]
        self.constants += [Constant(name="portable_attention", prior=0.5, low=0.3, high=0.8, hold=0.1)]
        self.at = {c.name: i for i, c in enumerate(self.constants)}
        self.prior = np.array([c.prior for c in self.constants])
        self.low = np.array([c.low for c in self.constants])
        self.high = np.array([c.high for c in self.constants])
        self.hold = np.array([c.hold for c in self.constants])
        self.measured = np.array([f.run.iteration_s for f in rows])
        self._flatten()
        self._curves()

    def _flatten(self) -> None:
        operators: list[list[float]] = []
        collectives: list[list[float]] = []
        units: list[list[float]] = []
        parts: list[list[int]] = []
        runs, axes = [], []
        devices = [d.name for d in self.devices]
        for f in self.rows:
            o, x, u, p = len(operators), len(collectives), len(units), len(parts)
            operators += f.operators
            collectives += f.collectives
            units += [[r[0] + o, r[1] + o, r[2] + x, r[3] + x, *r[4:]] for r in f.units]
            parts += [[c, r + u, n] for c, r, n in f.parts]
            axes.append([*f.axes, *[(1.0, 1.0, 1.0)] * (3 - len(f.axes))])
            runs.append([p, len(parts), u, len(units), *_run_row(f, devices, self.trainers)])
        self.arrays = (
            np.array(operators).reshape(-1, O_COUNT),
            np.array(collectives, dtype=float).reshape(-1, 5),
            np.array(units, dtype=float),
            np.array(parts),
            np.array(runs, dtype=float),
            np.array(axes, dtype=float),
        )

    def _curves(self) -> None:
        """Curves at a sustained clock of one; the constants scale their rates."""
        count = len(self.devices)
        self.products = np.zeros((count, 4, G_COUNT))
        self.attentions = np.zeros((count, 2, A_COUNT))
        self.bandwidths = np.array([d.hbm_bandwidth_GBps * 1e9 for d in self.devices])
        for i, device in enumerate(self.devices):
            for j, precision in enumerate(("bf16", "tf32", "fp32", "fp8")):
                stand_in = next((p for p in (precision, "bf16", "fp16", "fp32") if p in device.peak_TFLOPs), "fp32")
                self.products[i, j] = gemm_curve(device, stand_in)
            self.attentions[i, :] = attention_curve(device, rate=1.0, portable=False)

    def predict(self, x: Floats) -> Floats:
        """Seconds of every run."""
        products, attentions = self.products.copy(), self.attentions.copy()
        memory = self.bandwidths.copy()
        for i, device in enumerate(self.devices):
            clock = x[self.at[f"clock.{_nearest(device, CLOCKS)}"]] / device.sustained_clock
            products[i, : model.FP8, 1] *= clock
            products[i, model.FP8, 1] *= clock * x[self.at["fp8_speedup"]] / _shared_now("fp8_speedup")
            products[i, model.FP32, 1] *= x[self.at["fp32_efficiency"]] / _shared_now("fp32_efficiency") / clock
            attentions[i, :, 1] *= clock
            if device.curves_of != "A100":
                attentions[i, 1, 1] *= x[self.at["portable_attention"]]
            memory[i] *= x[self.at[f"memory.{_nearest(device, MEMORIES)}"]]
        intra = np.array([x[self.at[f"link.{k}"]] if f"link.{k}" in self.at else 0.7 for k in INTRA])
        inter = np.array([x[self.at[f"link.{k}"]] for k in INTER])
        trainers = np.array([[x[self.at[f"{t}.{k}"]] for k in model.TRAINER] for t in self.trainers])
        shared = np.array([x[self.at[k]] for k in model.SHARED])
        out = np.zeros(len(self.rows))
        model.predict(self.arrays, products, attentions, memory, intra, inter, trainers, shared, out)
        return out

    def weights(self) -> Floats:
        """Of the rows: large groups count for less than their size; suspect rows not at all."""
        groups = defaultdict(int)
        for f in self.rows:
            groups[f.run.group] += 1
        found = np.array([6.0 * groups[f.run.group] ** -0.1 for f in self.rows])
        for i, f in enumerate(self.rows):
            if any(word in f.run.id for word in OUTLIERS) or _too_fast(f):
                found[i] = 0.0
            if f.run.group == "megatron-bridge" or "vision" in f.run.model:
                found[i] *= 0.3
        return found

    def fit(self, left_out: Any, steps: int) -> Floats:
        """The constants from all rows but those left out."""
        weights = self.weights() * ~left_out
        return fit(
            lambda x: weights * robust(np.log(self.predict(x) / self.measured)),
            self.prior,
            self.low,
            self.high,
            steps=steps,
            ridge=self.hold,
        )


def _shared_now(name: str) -> float:
    from automap.price.curves import shared

    return shared(name)


def _nearest(device: Device, kinds: tuple[str, ...]) -> str:
    base = device.name.split("-")[0]
    alike = {"P40": "V100", "P100": "V100", "A800": "A100", "B200": "GB200", "B300": "GB200", "GB300": "GB200"}
    if device.name in kinds:
        return device.name
    base = alike.get(base, base)
    return base if base in kinds else "H100"


def _too_fast(f: Features) -> bool:
    """Whether the products alone would need more than 75 % of the peak: then the printed batch is another."""
    case = f.case
    flops = sum(op.forward_flops.at(1) + op.backward_flops.at(1) for op in case.problem.graph.operators)
    peak = case.problem.cluster.num_devices * case.problem.cluster.device(0).flops(case.problem.precision)
    low = {0: 1.0, 1: 2.0, 2: 2.0, 3: 4.0}[f.low_precision]
    return flops * case.problem.training.global_batch / f.run.iteration_s > 0.75 * peak * low


def _run_row(f: Features, devices: list[str], trainers: list[str]) -> list[float]:
    case, strategy = f.case, f.run.strategy
    problem, choice = case.problem, case.choice
    host = problem.cluster.hosts[0]
    inter, intra = problem.cluster.links[host.inter_node_link], problem.cluster.links[host.intra_node_link]
    trainer = problem.trainer.name
    parameter, gradient, _ = problem.state_bytes
    if problem.precision == "fp16":
        # Gradients keep the type of the weights; only bf16 trainers add them up in fp32.
        gradient = 2.0
    tp = f.axes[1][0]
    along = bool(strategy.get("sequence_parallel")) or trainer in ("megatron-core", "torchtitan")
    return [
        len(choice.layout.stages),
        choice.num_micro_batches,
        len(choice.chunks) / len(choice.layout.stages),
        choice.zero,
        devices.index(host.device),
        trainers.index(trainer),
        host.num_devices,
        host.nics * inter.bandwidth_GBps * 1e9,
        float(f.crosses_hosts),
        {"bf16": 0, "fp16": 0, "tf32": 1, "fp32": 2}[problem.precision],
        f.low_precision,
        f.zero_bubble,
        float(intra.name == "nvlink2"),
        intra.bandwidth_GBps * 1e9,
        parameter,
        gradient,
        f.tied,
        *f.shared,
        strategy.get("zero1_group") or 0,
        float(trainer in PORTABLE),
        tp if trainer.startswith(SCATTERED) and not along else 1.0,
        float(bool(strategy.get("async_tp"))),
        next(i for i, name in enumerate(INTER) if inter.name.startswith(name)),
        next(i for i, name in enumerate(INTRA) if intra.name.startswith(name)),
    ]


def table(fleet: Fleet, predicted: Floats, title: str) -> None:
    """Prints the errors of each group."""
    print(f"== {title}")
    groups: dict[str, list[Predicted]] = defaultdict(list)
    for f, seconds in zip(fleet.rows, predicted, strict=True):
        groups[f.run.group].append(Predicted(run=f.run, step_time_s=float(seconds)))
    for name, rows in sorted(groups.items()):
        found = summarize(rows)
        regret = "" if found["regret_mean"] is None else f"  regret {found['regret_mean']:.1%}"
        print(
            f"  {name:18}{found['n']:5}  mean {found['mape']:6.1%}  median {found['median']:6.1%}"
            f"  bias {found['bias']:+6.1%}{regret}"
        )


def blocks(rows: list[Features]) -> Any:
    """Part of each row: runs of one model on one number of GPUs stay together."""
    keys = [(f.run.group, f.run.model.get("name"), f.run.cluster.get("num_gpus")) for f in rows]
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    parts = np.random.default_rng(0).permutation(len(numbers)) % 5
    return np.array([parts[numbers[key]] for key in keys])


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def write(fleet: Fleet, x: Floats, left_out: Floats) -> None:
    """Puts the constants into automap/data, each with its source; bands from the errors of rows left out."""
    at, today = fleet.at, time.strftime("%Y-%m-%d")
    source = f"fitted: benchmarks/fit_trainers.py, published_runs.json, {today}"
    errors = np.abs(left_out / fleet.measured - 1.0)
    for name in fleet.trainers:
        path = DATA / "trainers" / f"{name}.json"
        document = json.loads(path.read_text())
        notes = document.pop("source")
        mine = np.array([f.case.problem.trainer.name == name for f in fleet.rows])
        for key in model.TRAINER:
            constant = fleet.constants[at[f"{name}.{key}"]]
            value = x[at[constant.name]]
            document[key] = _rounded(value)
            kept = abs(value - constant.prior) < 0.02 * max(abs(constant.prior), 0.1)
            notes[key] = "assumed: the runs of this trainer do not tell" if kept else source
        document["parameter_gather_overlap"] = document["gradient_overlap"]
        notes["parameter_gather_overlap"] = "as gradient_overlap: one prefetch serves both"
        document["error_band"] = _rounded(max(0.03, float(np.quantile(errors[mine], 0.8))))
        notes["error_band"] = f"80 % of its {int(mine.sum())} runs lie inside when left out of the fit ({today})"
        path.write_text(json.dumps({**document, "source": notes}, indent=1) + "\n")
    for path in sorted((DATA / "devices").glob("*.json")):
        document = json.loads(path.read_text())
        notes = document.pop("source")
        device = next((d for d in fleet.devices if d.name == document["name"]), None)
        if "num_multiprocessors" not in document or document["name"] == "cpu":
            continue
        kind = Device(**{k: v for k, v in document.items() if k != "source"})
        clock, memory = _nearest(kind, CLOCKS), _nearest(kind, MEMORIES)
        document["sustained_clock"] = _rounded(x[at[f"clock.{clock}"]])
        document["memory_efficiency"] = _rounded(x[at[f"memory.{memory}"]])
        document["portable_attention"] = 1.0 if kind.curves_of == "A100" else _rounded(x[at["portable_attention"]])
        for key, of in (("sustained_clock", clock), ("memory_efficiency", memory), ("portable_attention", clock)):
            notes[key] = source if device is not None else f"assumed: that of the {of} ({source})"
        path.write_text(json.dumps({**document, "source": notes}, indent=1) + "\n")
    for path in sorted((DATA / "links").glob("*.json")):
        document = json.loads(path.read_text())
        kind_name = next((k for k in (*INTER, *INTRA) if document["name"].startswith(k)), None)
        if kind_name is not None and f"link.{kind_name}" in at:
            document["efficiency"] = _rounded(x[at[f"link.{kind_name}"]])
            document["source"]["efficiency"] = source
            path.write_text(json.dumps(document, indent=1) + "\n")
    constants = {k: {"value": _rounded(x[at[k]]), "meaning": ABOUT[k], "source": source} for k in SHARED}
    document = {"schema": "automap.fitted/1", "constants": constants}
    (DATA / "fitted" / "step.json").write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="?")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--leave-groups-out", action="store_true")
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    rows, unpriced = [], defaultdict(int)
    for run in load_runs(measurements("published_runs.json")):
        try:
            rows.append(features(run))
        except Unpriced as fault:
            unpriced[f"{run.group}: {fault}"] += 1
    rows = [f for f in rows if f.run.stack != "torchgpipe"]
    for why, count in unpriced.items():
        print(f"{count:4} not priced, {why}")
    fleet = Fleet(rows)
    table(fleet, fleet.predict(fleet.prior), "(a) defaults")
    x = fleet.fit(np.zeros(len(rows), dtype=bool), options.steps + 4)
    table(fleet, fleet.predict(x), "(c) fitted")
    for constant, value in zip(fleet.constants, x, strict=True):
        if value != constant.prior:
            print(f"  {constant.name:45} {value:8.3g}  ({constant.prior:g})")
    part, left_out = blocks(rows), np.zeros(len(rows))
    for i in range(5):
        out = part == i
        left_out[out] = fleet.predict(fleet.fit(out, options.steps))[out]
    table(fleet, left_out, "(b) blocks left out")
    if options.write:
        write(fleet, x, left_out)
    if options.leave_groups_out:
        names: list[str] = sorted({f.run.group for f in rows})
        for name in names:
            out = np.array([f.run.group == name for f in rows])
            left_out[out] = fleet.predict(fleet.fit(out, options.steps))[out]
        table(fleet, left_out, "(b) groups left out")


if __name__ == "__main__":
    main()
