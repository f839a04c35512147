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
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from constants import (
    OF_STEP,
    SHARED,
    TRAINERS,
    clock_of,
    constants,
    depends,
    link_kind,
    owner,
)
from fitting import EVERY, Floats, Rows, fit, measurements, robust
from priced_runs import PricedRun

import automap
from automap.cluster import Device
from automap.price.curves import fitted
from automap.price.layout import Layout
from automap.problem import trainers
from automap.published import Run, Unpriced, load_runs
from automap.validation import Predicted, summarize

DATA = Path(automap.__file__).parent / "data"
MOST_STEPS = 60
"""Of one fit; one that is not done by then is said to be so."""
CONVERGED = 1e-4
"""A fit is done when a step lowers the sum of squares by less than this share of it."""


class Fleet:
    """All runs, and the constants that their price depends on."""

    def __init__(self, rows: list[PricedRun]) -> None:
        self.rows = rows
        self.trainers = sorted({f.problem.trainer.name for f in rows})
        self.constants = constants(set(self.trainers))
        self.at = {c.name: i for i, c in enumerate(self.constants)}
        self.prior, self.low, self.high, self.hold = (
            np.array([getattr(c, field) for c in self.constants]) for field in ("prior", "low", "high", "hold")
        )
        self.measured = np.array([f.run.iteration_s for f in rows])
        self.touched = [np.flatnonzero([depends(f, c.name) for f in rows]) for c in self.constants]
        self._of_units = np.array([c.name.split(".")[-1] not in OF_STEP for c in self.constants])
        self._applied: Floats | None = None

    def apply(self, x: Floats) -> None:
        """Gives the constants to the price."""
        before = np.full(len(x), np.nan) if self._applied is None else self._applied
        changed = {self.constants[i].name: float(x[i]) for i in np.flatnonzero(x != before)}
        self._applied = x.copy()
        software: Any = trainers()
        for name, value in changed.items():
            kind, _, key = name.partition(".")
            if kind in SHARED:
                fitted("step")["constants"][kind]["value"] = value
            for trainer in self.trainers:
                if key in TRAINERS and owner(trainer, key) == kind:
                    software[trainer] = replace(software[trainer], **{key: value})
                    if key == "gradient_overlap":
                        software[trainer] = replace(software[trainer], parameter_gather_overlap=value)
        kinds = {name.partition(".")[0] for name in changed}
        clusters: Any = {id(f.problem.cluster): f.problem.cluster for f in self.rows}.values()
        if kinds & {"clock", "portable_attention"}:
            portable = float(x[self.at["portable_attention"]])
            for devices in (cluster.devices for cluster in clusters):
                for name, device in devices.items():
                    devices[name] = replace(
                        device,
                        sustained_clock=float(x[self.at[f"clock.{clock_of(device)}"]]),
                        portable_attention=1.0 if device.curves_of == "A100" else portable,
                    )
        if "link" in kinds:
            for links in (cluster.links for cluster in clusters):
                for name, link in links.items():
                    if link_kind(name):
                        links[name] = replace(link, efficiency=float(x[self.at[f"link.{link_kind(name)}"]]))

    def predict(self, x: Floats, rows: Rows = EVERY) -> Floats:
        """Seconds of some of the runs."""
        self.apply(x)
        layouts: dict[object, Layout] = {}
        units = x[self._of_units].tobytes()
        return np.array([self.rows[i].price(layouts, units).step_time_s for i in np.arange(len(self.rows))[rows]])

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

    def fit(self, left_out: Any, on_step=lambda n, c: None) -> Floats:
        """The constants from all rows but those left out, from the priors until a step gains nothing."""
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
            steps=MOST_STEPS,
            ridge=self.hold,
            touched=self.touched,
            converged=CONVERGED,
            on_step=on_step,
        )


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
