"""Fits what trainers, devices and links do to a training step, and prints the errors three ways.

    python benchmarks/fit_trainers.py [published_runs.json] [--write] [--leave-groups-out]

(a) defaults: every constant at its prior; (b) blocks of runs (model and number of GPUs) left out, five parts in turn,
and with --leave-groups-out whole groups; (c) fitted to all. What is fitted is the price itself, through the data that
it reads. --write puts the constants of (c) into automap/data. A constant belongs to a device kind, a link kind or a
trainer and serves all runs of it; none scales a whole step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from fitting import EVERY, Floats, Rows, fit, measurements, robust
from priced_runs import PricedRun

import automap
from automap.cluster import Device
from automap.fitted import fitted
from automap.price.layout import Layout
from automap.problem import WEIGHT_BYTES, trainers
from automap.published import Run, Unpriced, load_runs
from automap.validation import Predicted, summarize

DATA = Path(automap.__file__).parent / "data"
TRAINER = (
    "elementwise_traffic",
    "attention_rate",
    "host_us_per_operator",
    "host_us_per_collective",
    "gradient_overlap",
    "tensor_overlap",
    "gather_bandwidth_share",
    "step_overhead_ms",
    "send_host_ms",
    "loss_passes",
)
"""The fields of automap/data/trainers that are fitted; at most ten, so that a trainer stays a few physical facts."""
OF_KERNELS = ("elementwise_traffic", "attention_rate", "loss_passes")
SAME_KERNELS = {"megatron-deepspeed": "megatron-lm"}
"""A fork runs the kernels of what it was forked from."""
INTER = ("infiniband-edr", "infiniband-hdr", "infiniband-ndr", "ethernet", "omni-path")
INTRA = ("nvlink2", "nvlink3", "nvlink4", "nvlink5", "pcie")
CLOCKS = ("V100", "A100", "H100", "H100-96GB", "H200", "GB200")
MEMORIES = ("V100", "A100", "H100", "GB200")
FOLD_STEPS = 2
"""From the constants of all runs to those of a part of them."""


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
        ("elementwise_traffic", traffic.get(name, 1.0), 0.5, 2.2, 0.003),
        ("attention_rate", 0.5 if name == "llm-foundry-fsdp" else 0.9, 0.2, 1.0, 0.01),
        ("host_us_per_operator", 40.0 if name in ("megatron-deepspeed", "megatron-lm") else 15.0, 2.0, 90.0, 0.1),
        ("host_us_per_collective", 40.0, 0.0, 300.0, 0.01),
        ("gradient_overlap", 0.9 if core else 0.5 if name in ("oneflow", "alpa") else 0.0, 0.0, 1.0, 0.3),
        ("tensor_overlap", {"torchtitan": 0.3, "megatron-core": 0.5}.get(name, 0.0), 0.0, 0.8, 0.01),
        ("gather_bandwidth_share", 0.14 if name == "deepspeed" else 0.25, 0.1, 0.8, 0.3),
        ("step_overhead_ms", 5.0, 0.0, 20.0, 0.01),
        ("send_host_ms", 0.25, 0.0, 0.8, 0.03),
        ("loss_passes", 24.0 if name in ("megatron-deepspeed", "megatron-lm") else 8.0, 1.0, 30.0, 0.1),
    )
    assert tuple(row[0] for row in rows) == TRAINER
    return [
        Constant(name=f"{name}.{key}", prior=p, low=lo, high=hi, hold=h)
        for key, p, lo, hi, h in rows
        if _owner(name, key) == name
    ]


def _owner(trainer: str, key: str) -> str:
    """The trainer whose constant it is."""
    return SAME_KERNELS.get(trainer, trainer) if key in OF_KERNELS else trainer


SHARED = {
    "overlap_exponent": (2.2, 1.2, 6.0, 0.01),
    "host_backward": (1.24, 1.0, 2.0, 0.01),
    "node_latency_us": (20.0, 5.0, 60.0, 0.01),
    "kernel_us": (2.0, 0.0, 5.0, 0.1),
    "attention_backward": (3.1, 2.0, 5.0, 0.1),
    "optimizer_bytes": (24.0, 12.0, 40.0, 0.3),
    "micro_batch_ms": (0.5, 0.0, 3.0, 0.01),
    "group_wait_exponent": (0.5, 0.0, 2.0, 0.01),
    "fallback_kernels": (10.0, 0.0, 40.0, 0.01),
    "misaligned": (4.0, 1.0, 12.0, 0.01),
    "ring_us": (4.0, 0.0, 30.0, 0.1),
    "fp32_efficiency": (0.9, 0.5, 1.0, 0.001),
    "fp8_speedup": (1.0, 0.5, 1.5, 0.01),
    "nvfp4_speedup": (1.8, 1.2, 2.0, 0.1),
    "row_scaled_rate": (0.6, 0.3, 1.0, 0.1),
    "quantise_kernels": (1.0, 0.0, 4.0, 0.01),
    "routing_passes": (2.0, 1.0, 4.0, 0.01),
    "routing_kernels": (20.0, 5.0, 60.0, 0.0005),
    "expert_rate": (0.85, 0.5, 1.0, 0.1),
}
"""Constants of automap/data/fitted/step.json that are fitted: prior, least, most, strength of the prior."""
OF_PRECISION = {
    "fp8_speedup": tuple(WEIGHT_BYTES),
    "quantise_kernels": tuple(WEIGHT_BYTES),
    "nvfp4_speedup": ("nvfp4",),
    "fp32_efficiency": ("fp32",),
}
"""Constants that matter in some precisions alone."""
OF_EXPERTS = ("routing_passes", "routing_kernels", "expert_rate")


class Fleet:
    """All runs, and the constants that their price depends on."""

    def __init__(self, rows: list[PricedRun]) -> None:
        self.rows = rows
        names = {f.problem.trainer.name for f in rows}
        self.trainers = sorted(names | {SAME_KERNELS[name] for name in names if name in SAME_KERNELS})
        self.constants = [Constant(name=f"clock.{k}", prior=0.85, low=0.4, high=1.1, hold=0.001) for k in CLOCKS]
        self.constants += [Constant(name=f"memory.{k}", prior=0.8, low=0.7, high=0.95, hold=1.0) for k in MEMORIES]
        for name in self.trainers:
            self.constants += _trainer_constants(name)
        self.constants += [Constant(name=n, prior=p, low=lo, high=hi, hold=h) for n, (p, lo, hi, h) in SHARED.items()]
        self.constants += [Constant(name=f"link.{k}", prior=0.65, low=0.5, high=1.0, hold=0.3) for k in INTER]
        self.constants += [Constant(name=f"link.{k}", prior=0.75, low=0.6, high=0.95, hold=0.1) for k in INTRA[:3]]
        self.constants += [Constant(name="portable_attention", prior=0.5, low=0.3, high=0.8, hold=0.1)]
        self.at = {c.name: i for i, c in enumerate(self.constants)}
        self.prior = np.array([c.prior for c in self.constants])
        self.low = np.array([c.low for c in self.constants])
        self.high = np.array([c.high for c in self.constants])
        self.hold = np.array([c.hold for c in self.constants])
        self.measured = np.array([f.run.iteration_s for f in rows])
        self.current = np.clip([self._now(c.name) for c in self.constants], self.low, self.high)
        self.touched = [np.flatnonzero([_depends(f, c.name) for f in rows]) for c in self.constants]

    def _now(self, name: str) -> float:
        """What the data files say of a constant: where a fit begins."""
        kind, _, rest = name.partition(".")
        if kind in SHARED:
            return float(fitted("step")["constants"][kind]["value"])
        if kind in self.trainers:
            return float(getattr(trainers()[kind], rest))
        devices = [d for f in self.rows for d in f.problem.cluster.devices.values()]
        if kind == "link":
            links = [k for f in self.rows for k in f.problem.cluster.links.values()]
            return next((k.efficiency for k in links if _link_kind(k.name) == rest), self.prior[self.at[name]])
        fields = {"clock": ("sustained_clock", CLOCKS), "memory": ("memory_efficiency", MEMORIES)}
        field, kinds = fields.get(kind, ("portable_attention", ()))
        alike = (d for d in devices if (_nearest(d, kinds) == rest if kinds else d.curves_of != "A100"))
        return next((float(getattr(d, field)) for d in alike), self.prior[self.at[name]])

    def apply(self, x: Floats) -> None:
        """Gives the constants to the price."""
        value = {name: float(x[i]) for name, i in self.at.items()}
        for name in SHARED:
            fitted("step")["constants"][name]["value"] = value[name]
        software: Any = trainers()
        for name in self.trainers:
            fields = {key: value[f"{_owner(name, key)}.{key}"] for key in TRAINER}
            software[name] = replace(software[name], **fields, parameter_gather_overlap=fields["gradient_overlap"])
        for cluster in {id(f.problem.cluster): f.problem.cluster for f in self.rows}.values():
            devices: Any = cluster.devices
            links: Any = cluster.links
            for name, device in devices.items():
                devices[name] = replace(
                    device,
                    sustained_clock=value[f"clock.{_nearest(device, CLOCKS)}"],
                    memory_efficiency=value[f"memory.{_nearest(device, MEMORIES)}"],
                    portable_attention=1.0 if device.curves_of == "A100" else value["portable_attention"],
                )
            for name, link in links.items():
                kind = _link_kind(name)
                if f"link.{kind}" in value:
                    links[name] = replace(link, efficiency=value[f"link.{kind}"])

    def predict(self, x: Floats, rows: Rows = EVERY) -> Floats:
        """Seconds of some of the runs."""
        self.apply(x)
        layouts: dict[object, Layout] = {}
        return np.array([self.rows[i].price(layouts).step_time_s for i in np.arange(len(self.rows))[rows]])

    def weights(self) -> Floats:
        """Of the rows: large groups count for less than their size; suspect rows not at all."""
        groups: dict[str, int] = defaultdict(int)
        for f in self.rows:
            groups[f.run.group] += 1
        found = np.array([6.0 * groups[f.run.group] ** -0.1 for f in self.rows])
        for i, f in enumerate(self.rows):
            if _too_fast(f):
                found[i] = 0.0
            if f.run.group == "megatron-bridge" or "vision" in f.run.model:
                found[i] *= 0.3
        return found

    def fit(self, left_out: Any, steps: int, begin: Floats | None = None) -> Floats:
        """The constants from all rows but those left out."""
        weights = self.weights() * ~left_out

        def residuals(x: Floats, rows: Rows) -> Floats:
            found = np.zeros(len(self.rows))
            used = np.arange(len(found))[rows]
            used = used[weights[used] > 0.0]
            found[used] = weights[used] * robust(np.log(self.predict(x, used) / self.measured[used]))
            return found[rows]

        return fit(
            residuals,
            self.prior,
            self.low,
            self.high,
            steps=steps,
            ridge=self.hold,
            begin=begin,
            touched=self.touched,
        )


def _depends(f: PricedRun, name: str) -> bool:
    """Whether a constant can change the price of a run."""
    kind, _, rest = name.partition(".")
    device = f.problem.cluster.device(0)
    precision = f.problem.precision
    if kind == "clock":
        return _nearest(device, CLOCKS) == rest
    if kind == "memory":
        return _nearest(device, MEMORIES) == rest
    if kind == "link":
        return any(_link_kind(link) == rest for link in f.problem.cluster.links)
    if kind in OF_PRECISION:
        return precision in OF_PRECISION[kind]
    if kind == "row_scaled_rate":
        return f.problem.training.scaling == "row"
    if kind in OF_EXPERTS:
        return bool(f.run.model.get("moe"))
    name = f.problem.trainer.name
    return kind in SHARED or kind in ("portable_attention", _owner(name, rest))


def _link_kind(name: str) -> str:
    return next((k for k in (*INTER, *INTRA) if name.startswith(k)), "")


def _nearest(device: Device, kinds: tuple[str, ...]) -> str:
    base = device.name.split("-")[0]
    alike = {"P40": "V100", "P100": "V100", "A800": "A100", "B200": "GB200", "B300": "GB200", "GB300": "GB200"}
    if device.name in kinds:
        return device.name
    base = alike.get(base, base)
    return base if base in kinds else "H100"


def _too_fast(f: PricedRun) -> bool:
    """Whether the products alone would need more than 75 % of the peak: then the printed batch is another."""
    problem = f.problem
    flops = sum(op.forward_flops.at(1) + op.backward_flops.at(1) for op in problem.graph.operators)
    peak = problem.cluster.num_devices * problem.cluster.device(0).flops(problem.precision)
    return flops * problem.training.global_batch / f.run.iteration_s > 0.75 * peak


def label(run: Run) -> str:
    """The group of a run, mixtures of experts and low precisions apart."""
    precision = str(run.strategy.get("precision"))
    words = [
        run.group,
        "moe" if run.model.get("moe") else "",
        precision if "8" in precision or "4" in precision else "",
    ]
    return " ".join(word for word in words if word)


def table(fleet: Fleet, predicted: Floats, title: str) -> None:
    """Prints the errors of each group."""
    print(f"== {title}")
    groups: dict[str, list[Predicted]] = defaultdict(list)
    for f, seconds in zip(fleet.rows, predicted, strict=True):
        groups[label(f.run)].append(Predicted(run=f.run, step_time_s=float(seconds)))
    for name, rows in sorted(groups.items()):
        found = summarize(rows)
        regret = "" if found["regret_mean"] is None else f"  regret {found['regret_mean']:.1%}"
        print(
            f"  {name:26}{found['n']:5}  mean {found['mape']:6.1%}  median {found['median']:6.1%}"
            f"  bias {found['bias']:+6.1%}{regret}"
        )


def blocks(rows: list[PricedRun]) -> Any:
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
        mine = np.array([f.problem.trainer.name == name for f in fleet.rows])
        for key in TRAINER:
            constant = fleet.constants[at[f"{_owner(name, key)}.{key}"]]
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
        is_measured = document["name"] in {f.problem.cluster.device(0).name for f in fleet.rows}
        if "num_multiprocessors" not in document or document["name"] == "cpu":
            continue
        kind = Device(**{k: v for k, v in document.items() if k != "source"})
        clock, memory = _nearest(kind, CLOCKS), _nearest(kind, MEMORIES)
        document["sustained_clock"] = _rounded(x[at[f"clock.{clock}"]])
        document["memory_efficiency"] = _rounded(x[at[f"memory.{memory}"]])
        document["portable_attention"] = 1.0 if kind.curves_of == "A100" else _rounded(x[at["portable_attention"]])
        for key, of in (("sustained_clock", clock), ("memory_efficiency", memory), ("portable_attention", clock)):
            notes[key] = source if is_measured else f"assumed: that of the {of} ({source})"
        path.write_text(json.dumps({**document, "source": notes}, indent=1) + "\n")
    for path in sorted((DATA / "links").glob("*.json")):
        document = json.loads(path.read_text())
        key = f"link.{_link_kind(document['name'])}"
        if key in at:
            document["efficiency"] = _rounded(x[at[key]])
            document["source"]["efficiency"] = source
            path.write_text(json.dumps(document, indent=1) + "\n")
    path = DATA / "fitted" / "step.json"
    document = json.loads(path.read_text())
    for key in SHARED:
        document["constants"][key] |= {"value": _rounded(x[at[key]]), "source": source}
    path.write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="?")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--leave-groups-out", action="store_true")
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    runs = load_runs(measurements("published_runs.json"))
    rows, unpriced = [], defaultdict(int)
    for run in runs:
        try:
            rows.append(PricedRun(run))
        except Unpriced as fault:
            unpriced[f"{run.group}: {fault}"] += 1
    rows = [f for f in rows if f.run.stack != "torchgpipe"]
    for why, count in unpriced.items():
        print(f"{count:4} not priced, {why}")
    fleet = Fleet(rows)
    table(fleet, fleet.predict(fleet.prior), "(a) defaults")
    x = fleet.fit(np.zeros(len(rows), dtype=bool), options.steps, fleet.current)
    table(fleet, fleet.predict(x), "(c) fitted")
    for constant, value in zip(fleet.constants, x, strict=True):
        if value != constant.prior:
            print(f"  {constant.name:45} {value:8.3g}  ({constant.prior:g})")
    part, left_out = blocks(rows), np.zeros(len(rows))
    for i in range(5):
        out = part == i
        left_out[out] = fleet.predict(fleet.fit(out, FOLD_STEPS, x), np.flatnonzero(out))
    table(fleet, left_out, "(b) blocks left out")
    if options.write:
        write(fleet, x, left_out)
    if options.leave_groups_out:
        names: list[str] = sorted({f.run.group for f in rows})
        for name in names:
            out = np.array([f.run.group == name for f in rows])
            left_out[out] = fleet.predict(fleet.fit(out, FOLD_STEPS, x), np.flatnonzero(out))
        table(fleet, left_out, "(b) groups left out")


if __name__ == "__main__":
    main()
