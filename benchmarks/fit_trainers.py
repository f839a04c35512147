"""Fits what trainers, devices and links do to a training step, and prints the errors three ways.

    python benchmarks/fit_trainers.py [published_runs.json] [--write] [--processes 1] [--only NAME,NAME]

The three ways are: (a) priors: every constant has the value where its fit begins; (b) blocks of runs (model and number
of GPUs) are left out, five parts in turn, and then whole groups; (c) constants are fitted to all runs. Every fit begins
at the priors and runs until a step gains next to nothing. The price itself is fitted, through the data that it reads;
`benchmarks/constants.py` lists the constants. --write puts those of (c) and the bands into automap/data.

The band of a trainer says how large errors are for its user on another cluster: each group of runs is left out as a
whole, and 80 % of the runs have errors below the band, where all groups count alike. If a trainer has runs in only one
group, nothing but priors is known of it then; its band is no less than that of all trainers together. Networks with
convolutions count for a band of their own. Routed experts add to the band of a trainer what 80 % of the runs with
experts need.

--only fits the named constants alone, with all others at their values in automap/data, and leaves the bands as they
are: for a constant that has become one of its own, such as the clock of a new device.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from constants import SHARED, TRAINERS, clock_of, link_kind, owner
from fitting import Floats, asked
from fleet import Fleet, Mask, too_fast
from priced_runs import PricedRun

import automap
from automap.device_kinds import known_devices
from automap.price.estimate import EXPERTS, share_of_flops
from automap.space.stated_parts import Unpriced
from automap.validation.errors_by_group import Predicted, summarize
from automap.validation.published_runs import Run, load_runs

DATA = Path(automap.__file__).parent / "data"
INSIDE = 0.8
"""Share of the runs inside a band."""
LEAST_BAND = 0.03


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


def blocks(rows: list[PricedRun]) -> list[object]:
    """Part of each row: runs of one model on one number of GPUs stay together."""
    keys = [(f.run.group, f.run.model.get("name"), f.run.cluster.get("num_gpus")) for f in rows]
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    parts = np.random.default_rng(0).permutation(len(numbers)) % 5
    return [int(parts[numbers[key]]) for key in keys]


def band(fleet: Fleet, left_out: Floats, mine: list[bool]) -> tuple[float, int, int]:
    """The error below which the share INSIDE of some runs stay, where groups count alike; numbers of runs and groups.

    The error is a share of the price, as the band of an estimate is: what is priced at half its time is off by 100 %.

    Args:
        fleet: all runs; a run whose published batch cannot be right does not count.
        left_out: [runs] predicted seconds of each run by a fit without its group.
        mine: [runs] whether each run is one of those in question.
    """
    errors = np.abs(fleet.measured / left_out - 1.0)
    used = [i for i, f in enumerate(fleet.rows) if mine[i] and not too_fast(f)]
    sizes = Counter(fleet.rows[i].run.group for i in used)
    used.sort(key=lambda i: errors[i])
    inside = np.cumsum([1.0 / sizes[fleet.rows[i].run.group] for i in used])
    return float(errors[used[int(np.searchsorted(inside, INSIDE * len(sizes)))]]), len(used), len(sizes)


def bands(fleet: Fleet, left_out: Floats) -> tuple[dict[str, tuple[float, str]], float]:
    """The band of each trainer with its source, and that of convolutions."""
    is_network = ["vision" in f.run.model for f in fleet.rows]
    pooled, _, _ = band(fleet, left_out, [not one for one in is_network])
    found = {}
    for name in fleet.trainers:
        mine = [f.problem.trainer.name == name and not is_network[i] for i, f in enumerate(fleet.rows)]
        own, runs, groups = band(fleet, left_out, mine) if any(mine) else (0.0, 0, 1)
        text = f"{INSIDE:.0%} of its {runs} runs lie inside when their group is left out of the fit"
        if groups == 1 and own < pooled:
            own, text = pooled, f"{INSIDE:.0%} of all trainers' runs lie inside when their group is left out of the fit"
        found[name] = (max(LEAST_BAND, own), text)
    return found, band(fleet, left_out, is_network)[0] if any(is_network) else 0.0


def expert_band(fleet: Fleet, left_out: Floats, of_trainers: dict[str, tuple[float, str]]) -> float:
    """What the arithmetic of routed experts adds to a trainer's band, in squares and by its share of the arithmetic, so
    that INSIDE of the runs with experts lie inside, groups counting alike; 0.0 if there is none."""
    lacking: dict[str, list[float]] = defaultdict(list)
    for f, error in zip(fleet.rows, np.abs(fleet.measured / left_out - 1.0), strict=True):
        share = share_of_flops(f.problem.graph, EXPERTS)
        if share > 0.0 and not too_fast(f):
            beyond = max(0.0, error**2 - of_trainers[f.problem.trainer.name][0] ** 2)
            lacking[f.run.group].append(beyond**0.5 / share)
    weighted = sorted((one, 1.0 / len(values)) for values in lacking.values() for one in values)
    inside = np.cumsum([weight for _, weight in weighted])
    return weighted[int(np.searchsorted(inside, INSIDE * len(lacking)))][0] if weighted else 0.0


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def write_constants(fleet: Fleet, x: Floats, names: Sequence[str], held: str) -> None:
    """Puts constants into automap/data, each with its source.

    Args:
        fleet: all runs.
        x: values of all constants.
        names: those that are written.
        held: what the source says besides.
    """
    value = {name: _rounded(x[fleet.at[name]]) for name in names}
    source = f"fitted: benchmarks/fit_trainers.py, published_runs.json, {time.strftime('%Y-%m-%d')}{held}"
    for name in fleet.trainers:
        with edited(DATA / "trainers" / f"{name}.json") as document:
            for key in TRAINERS:
                holder = owner(name, key)
                if f"{holder}.{key}" in value:
                    document[key] = value[f"{holder}.{key}"]
                    sharing = next(names for names, _ in TRAINERS[key] if name in names)
                    shared = "" if len(sharing) == 1 else f", one for {len(sharing)} trainers"
                    document["source"][key] = source + shared
                    if key == "gradient_overlap":
                        document["parameter_gather_overlap"] = document[key]
    measured = {f.problem.cluster.device(0).name for f in fleet.rows}
    for kind in known_devices():
        of = clock_of(kind)
        if kind.name == "cpu":
            continue
        with edited(DATA / "devices" / f"{kind.name}.json") as document:
            for key, constant in (("sustained_clock", f"clock.{of}"), ("portable_attention", "portable_attention")):
                if constant in value:
                    plain = key == "portable_attention" and kind.curves_of == "A100"
                    document[key] = 1.0 if plain else value[constant]
                    assumed = f"assumed: that of the {of} ({source})"
                    document["source"][key] = source if kind.name in measured else assumed
    for path in sorted((DATA / "links").glob("*.json")):
        with edited(path) as document:
            kind_of_link = link_kind(document["name"])
            if f"link.{kind_of_link}" in value:
                document["efficiency"] = value[f"link.{kind_of_link}"]
                document["source"]["efficiency"] = f"{source}, one for all {kind_of_link}"
    with edited(DATA / "fitted" / "step.json") as document:
        for key in SHARED:
            if key in value:
                document["constants"][key] |= {"value": value[key], "source": source}


def write_bands(fleet: Fleet, left_out: Floats) -> None:
    """Puts the bands into automap/data, each with its source."""
    today = time.strftime("%Y-%m-%d")
    found, of_convolutions = bands(fleet, left_out)
    for name in fleet.trainers:
        with edited(DATA / "trainers" / f"{name}.json") as document:
            document["error_band"], text = _rounded(found[name][0]), found[name][1]
            document["source"]["error_band"] = f"{text} ({today})"
    with edited(DATA / "fitted" / "step.json") as document:
        for key, half in (("convolution_band", of_convolutions), ("expert_band", expert_band(fleet, left_out, found))):
            document["constants"][key] |= {
                "value": _rounded(half),
                "source": f"{INSIDE:.0%} of such runs lie inside when their group is left out of the fit ({today})",
            }


@contextmanager
def edited(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON document of a file, which is written back with what has been changed in it."""
    document = json.loads(path.read_text())
    before = json.dumps(document)
    yield document
    if json.dumps(document) != before:
        path.write_text(json.dumps(document, indent=1) + "\n")


_fleet: list[Fleet] = []
"""The one that a process of `left_out` inherits."""


def _without(out: Mask) -> Floats:
    """Seconds of the runs `out`, from a fit without them."""
    (fleet,) = _fleet
    return fleet.predict(fleet.fit(out), np.flatnonzero(out))


def left_out(fleet: Fleet, parts: list[object], processes: int) -> Floats:
    """Seconds of each run, from a fit without the runs of its part."""
    found = np.zeros(len(fleet.rows))
    outs = [np.array([mine == part for mine in parts]) for part in dict.fromkeys(parts)]
    with multiprocessing.get_context("fork").Pool(processes, _fleet.append, (fleet,)) as pool:
        for out, seconds in zip(outs, pool.imap(_without, outs), strict=True):
            found[out] = seconds
    return found


def main() -> None:
    """Fits, prints the errors three ways, and writes the constants if it is asked to."""
    options = asked(
        __doc__,
        "published_runs.json",
        ("--processes", 1, "processes that fit at the same time"),
        ("--only", "", "constants to fit, with commas between them; all if empty"),
    )
    rows, unpriced = [], defaultdict(int)
    for run in load_runs(options.data):
        try:
            rows.append(PricedRun(run))
        except Unpriced as fault:
            unpriced[f"{run.group}: {fault}"] += 1
    # Runs of unknown trainers are priced as `generic`, so they say nothing about any trainer.
    rows = [f for f in rows if f.problem.trainer.name != "generic"]
    for why, count in unpriced.items():
        print(f"{count:4} not priced, {why}")
    fleet = Fleet(rows)
    only = [name for name in options.only.split(",") if name]
    if only:
        table(fleet, fleet.predict(fleet.of_today()), "as they are")
        try:
            fleet.free_only(only)
        except ValueError as fault:
            sys.exit(str(fault))
    else:
        table(fleet, fleet.predict(fleet.prior), "(a) priors")
    x = fleet.fit(np.zeros(len(rows), dtype=bool))
    table(fleet, fleet.predict(x), "(c) fitted")
    for constant, value in zip(fleet.constants, x, strict=True):
        if not only or constant.name in only:
            bound = "  at its bound" if value in (constant.low, constant.high) else ""
            print(f"  {constant.name:45} {value:8.3g}  ({constant.prior:g}){bound}")
    if only:
        if options.write:
            write_constants(fleet, x, only, ", with all other constants held")
        return
    table(fleet, left_out(fleet, blocks(rows), options.processes), "(b) blocks left out")
    of_groups = left_out(fleet, [f.run.group for f in rows], options.processes)
    table(fleet, of_groups, "(b) groups left out")
    found, of_convolutions = bands(fleet, of_groups)
    for name, (half, text) in found.items():
        print(f"  {name:26} ± {half:.1%}: {text}")
    print(f"  {'convolutions':26} ± {of_convolutions:.1%}")
    print(f"  {'routed experts':26} ± {expert_band(fleet, of_groups, found):.1%} of their share, beside the trainer's")
    if options.write:
        write_constants(fleet, x, list(fleet.at), "")
        write_bands(fleet, of_groups)


if __name__ == "__main__":
    main()
