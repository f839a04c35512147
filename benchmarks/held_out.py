"""Leaves each group of published runs out of the fitted constants, and counts how many of its runs the bands cover.

    python benchmarks/held_out.py [published_runs.json]

This is a quick form of the last column (b) of `benchmarks/fit_trainers.py`: every fit is one Gauss-Newton step from the
constants of automap/data, inside their bounds, and all fits share the derivatives. It takes minutes; complete fits take
hours. The group is then priced in full with the constants that the others give.

`stated` is the share of its runs inside the band that an estimate states today. This band of a trainer was chosen by
the errors of all its groups, this one included. `blind` is the share inside a band that was chosen without this group:
from the other groups of the trainer, or from all other groups if the trainer has no others. The second table has the
band that each trainer states, and the band that the left-out groups of today need, without what experts and unmeasured
devices add.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np
from fit_trainers import INSIDE, LEAST_BAND, band, bands, label
from fitting import Floats, robust
from fleet import Fleet, Mask
from priced_runs import PricedRun
from scipy.optimize import lsq_linear

from automap.price.estimate import error_band
from automap.space.stated_parts import Unpriced
from automap.validation.published_runs import load_runs

DIFFERENCE = 1e-3
"""Change of a constant, as a share of it, by which derivatives are taken."""
ROUNDS = 5
"""Rounds of a fit, each with the weights of the soft-L1 loss at the errors of the one before; more change nothing."""


def derivatives(fleet: Fleet, today: Floats, seconds: Floats) -> Floats:
    """[runs, constants] change of the logarithm of the time of each run for each unit of each constant."""
    found = np.zeros((len(fleet.rows), len(today)))
    for j, rows in enumerate(fleet.touched):
        step = DIFFERENCE * max(abs(float(today[j])), 0.1)
        moved = today.copy()
        moved[j] += step if moved[j] + step <= fleet.high[j] else -step
        found[rows, j] = np.log(fleet.predict(moved, rows) / seconds[rows]) / (moved[j] - today[j])
    return found


def without(fleet: Fleet, today: Floats, slopes: Floats, errors: Floats, out: Mask) -> Floats:
    """The constants that all runs but some give: one step of the fit of `Fleet.fit` from those of today.

    No constant leaves its bounds, and where one is held by a bound, the others are the best beside it.

    Args:
        fleet: all runs.
        today: constants of today.
        slopes: see `derivatives`.
        errors: [runs] logarithm of priced over measured seconds with the constants of today.
        out: [runs] those that are left out.
    """
    # Times go with the inverse of rates: constants that cannot be zero are moved by their logarithm.
    logs = fleet.low > 0.0

    def moved(x: Floats) -> Floats:
        return np.where(logs, np.log(np.where(logs, x, 1.0)), x)

    # A constant of which the other runs say nothing keeps its prior, as in a fit that begins there.
    held = np.sqrt(fleet.hold) / np.maximum(np.abs(fleet.prior), 0.02 * (fleet.high - fleet.low))
    begin = found = moved(today)
    slopes = slopes * np.where(logs, today, 1.0)
    for _ in range(ROUNDS):
        x = np.where(logs, np.exp(found), found)
        unit = np.where(logs, x, 1.0)
        left = errors + slopes @ (found - begin)
        shrunk = np.divide(robust(left), left, out=np.ones_like(left), where=left != 0.0)
        weights = fleet.weights() * ~out * shrunk
        lhs = np.concatenate([weights[:, None] * slopes, np.diag(held * unit)])
        rhs = np.concatenate([-weights * (errors - slopes @ begin), held * (fleet.prior - x + unit * found)])
        turned, triangle = np.linalg.qr(lhs)
        bounds = moved(fleet.low), moved(fleet.high)
        found = lsq_linear(triangle, turned.T @ rhs, bounds, method="bvls").x
    return np.clip(np.where(logs, np.exp(found), found), fleet.low, fleet.high)


def half_widths(fleet: Fleet, left_out: Floats, out: Mask) -> dict[str, float]:
    """The band of each trainer from the errors of all groups but one, as `fit_trainers.bands` finds it from all."""
    plain = ["vision" not in f.run.model and not out[i] for i, f in enumerate(fleet.rows)]
    pooled = band(fleet, left_out, plain)[0] if any(plain) else 0.0
    found = {}
    for name in fleet.trainers:
        mine = [plain[i] and f.problem.trainer.name == name for i, f in enumerate(fleet.rows)]
        own, _, groups = band(fleet, left_out, mine) if any(mine) else (0.0, 0, 0)
        found[name] = max(LEAST_BAND, own if groups > 1 else max(own, pooled))
    return found


def main() -> None:
    """Prints a line for each group."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", nargs="?", type=Path, default=Path("../data/published_runs.json"))
    options = parser.parse_args()
    if not options.data.is_file():
        parser.error(f"data: {options.data} is no file: name the published runs, a .json file")
    rows = []
    for run in load_runs(options.data):
        try:
            rows.append(PricedRun(run))
        except Unpriced:
            continue
    rows = [f for f in rows if f.problem.trainer.name != "generic"]
    fleet = Fleet(rows)
    fleet = Fleet([f for f, weight in zip(rows, fleet.weights(), strict=True) if weight > 0.0])
    today = fleet.of_today()
    seconds = fleet.predict(today)
    slopes = derivatives(fleet, today, seconds)
    errors = np.log(seconds / fleet.measured)
    groups: dict[str, Mask] = {}
    for f in fleet.rows:
        groups.setdefault(f.run.group, np.array([other.run.group == f.run.group for other in fleet.rows]))
    left_out = np.zeros(len(fleet.rows))
    if len(groups) < 2:
        parser.error(f"data: all runs of {options.data} are of one group: name a file with runs of two or more")
    for out in groups.values():
        left_out[out] = fleet.predict(without(fleet, today, slopes, errors, out), np.flatnonzero(out))
    fleet.apply(today)
    stated = np.array([error_band(f.problem) for f in fleet.rows])
    of_trainer = np.array([f.problem.trainer.error_band for f in fleet.rows])
    blind = np.zeros(len(fleet.rows))
    for out in groups.values():
        widths = half_widths(fleet, left_out, out)
        for i in np.flatnonzero(out):
            # What convolutions, experts and unmeasured kernels add stays as it is stated.
            blind[i] = (stated[i] ** 2 - of_trainer[i] ** 2 + widths[fleet.rows[i].problem.trainer.name] ** 2) ** 0.5
    report(fleet, seconds, left_out, stated, blind)
    print("trainer                       runs   stated     band   needed")
    needed, _ = bands(fleet, left_out)
    for name in fleet.trainers:
        inside: dict[str, list[bool]] = defaultdict(list)
        for i, f in enumerate(fleet.rows):
            if f.problem.trainer.name == name:
                inside[f.run.group].append(abs(fleet.measured[i] / left_out[i] - 1.0) <= stated[i])
        share = np.mean([np.mean(some) for some in inside.values()])
        own = next(f.problem.trainer.error_band for f in fleet.rows if f.problem.trainer.name == name)
        print(f"{name:28}{sum(map(len, inside.values())):6}{share:9.0%}{own:9.1%}{needed[name][0]:9.1%}")


def report(fleet: Fleet, seconds: Floats, left_out: Floats, stated: Floats, blind: Floats) -> None:
    """Prints errors and shares inside bands of each group.

    Args:
        fleet: all runs.
        seconds: [runs] prices with the constants of today.
        left_out: [runs] prices with constants that know nothing of the group.
        stated: [runs] half-width of the band of today, as a share of the price.
        blind: [runs] half-width of a band that knows nothing of the group.
    """
    heads = ("today", "left out", "bias", "stated", "band", "blind", "band")
    print(f"{'group':28}{'runs':>5}" + "".join(f"{head:>9}" for head in heads))
    lines: dict[str, list[int]] = defaultdict(list)
    for i, f in enumerate(fleet.rows):
        lines[label(f.run)].append(i)
    covered: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, mine in sorted(lines.items()):
        at = np.array(mine)
        off = left_out[at] / fleet.measured[at] - 1.0
        # The band of an estimate is a share of the estimate.
        beside = np.abs(fleet.measured[at] / left_out[at] - 1.0)
        inside = float(np.mean(beside <= stated[at])), float(np.mean(beside <= blind[at]))
        covered[fleet.rows[mine[0]].run.group] += [
            (float(a), float(b)) for a, b in zip(beside <= stated[at], beside <= blind[at], strict=True)
        ]
        print(
            f"{name:28}{len(mine):5}{np.mean(np.abs(seconds[at] / fleet.measured[at] - 1.0)):9.1%}"
            f"{np.mean(np.abs(off)):9.1%}{np.mean(off):+9.1%}"
            f"{inside[0]:9.0%}{np.mean(stated[at]):9.1%}{inside[1]:9.0%}{np.mean(blind[at]):9.1%}"
        )
    by_stated, by_blind = np.mean([np.mean(some, axis=0) for some in covered.values()], axis=0)
    print(f"groups left out, all counting alike: stated {by_stated:.0%}, blind {by_blind:.0%}; wanted {INSIDE:.0%}")


if __name__ == "__main__":
    main()
