"""Predicted against published runs: errors of time and memory, and the regret of choosing by the price.

Each run becomes a problem and a plan (`automap.validation.published_cases`) and is priced by `automap.price.estimate`.
Units: fractions unless named otherwise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from automap.errors import UserError
from automap.plan import Estimate
from automap.price.estimate import estimate_lowered
from automap.space.stated_parts import Unpriced
from automap.validation.published_cases import case_of
from automap.validation.published_runs import Run

MIN_CHOICES = 2
"""The least number of measured plans of one problem among which a choice can be judged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """A run and its estimate."""

    run: Run
    step_time_s: float = math.nan
    error_band_s: tuple[float, float] = (math.nan, math.nan)
    peak_memory_bytes: float = math.nan
    capacity_bytes: float = math.nan
    """Memory of the device with the least room left."""
    overflows: bool = False
    """Whether more is predicted than the device has."""
    fits: bool = True
    """Whether it fits with the confidence that is asked for by default."""
    assumed: tuple[str, ...] = ()
    """The names of what the source does not state."""
    why: str | None = None
    """The reason why the run could not be priced; None if it was."""


def predict(run: Run) -> Predicted:
    """Prices one run."""
    try:
        case = case_of(run)
        estimate: Estimate = estimate_lowered(case.lowered, case.evaluator)
    except (Unpriced, UserError) as fault:
        return Predicted(run=run, why=str(fault))
    return Predicted(
        run=run,
        step_time_s=estimate.step_time_s,
        error_band_s=estimate.error_band_s,
        peak_memory_bytes=max(m.total for m in estimate.memory_bytes),
        capacity_bytes=max(estimate.memory_bytes, key=lambda m: m.total / m.capacity).capacity,
        overflows=estimate.overflows,
        fits=estimate.fits,
        assumed=case.assumed,
    )


def by_group(rows: Iterable[Predicted]) -> dict[str, Any]:
    """Compares runs with their prices, group by group.

    Returns:
        {groups: {name: {n, mape, median, bias, spearman, memory_mape, band_coverage, band_half_width, infeasible,
        infeasible_if_assumed, doubtful, assumed, regret_mean, regret_max, regret3_mean, top1, num_choice_groups,
        unpriced: [{id, why}]}}}; null where nothing can be said. bias is the mean signed error, band_coverage the share
        of runs inside the error band, band_half_width the mean of its half-width over the estimate,
        infeasible_if_assumed the runs that would not fit by what was assumed of them, doubtful those that fit with less
        than the default confidence, regret3 the regret of who measures the three plans ranked first and keeps the
        fastest.
    """
    groups: dict[str, list[Predicted]] = {}
    for row in rows:
        groups.setdefault(row.run.group, []).append(row)
    return {"groups": {name: summarize(rows) for name, rows in groups.items()}}


def summarize(rows: Sequence[Predicted]) -> dict[str, Any]:
    """The figures of one group, see `by_group`."""
    priced = [row for row in rows if row.why is None]
    ratios = [row.step_time_s / row.run.iteration_s - 1.0 for row in priced]
    memory = [
        row.peak_memory_bytes / row.run.peak_memory_bytes - 1.0
        for row in priced
        if row.run.peak_memory_bytes is not None
    ]
    inside = [row.error_band_s[0] <= row.run.iteration_s <= row.error_band_s[1] for row in priced]
    widths = [(row.error_band_s[1] - row.error_band_s[0]) / 2.0 / row.step_time_s for row in priced]
    regrets = choice_regrets(priced)
    return {
        "n": len(priced),
        "mape": _mean([abs(r) for r in ratios]),
        "median": statistics.median([abs(r) for r in ratios]) if ratios else None,
        "bias": _mean(ratios),
        "spearman": spearman([row.step_time_s for row in priced], [row.run.iteration_s for row in priced]),
        "memory_mape": _mean([abs(r) for r in memory]),
        "band_coverage": _mean([float(i) for i in inside]),
        "band_half_width": _mean(widths),
        "infeasible": [row.run.id for row in priced if row.overflows and not row.assumed],
        "infeasible_if_assumed": [row.run.id for row in priced if row.overflows and row.assumed],
        "doubtful": [row.run.id for row in priced if not row.fits and not row.overflows and not row.assumed],
        "assumed": sum(bool(row.assumed) for row in priced),
        "regret_mean": _mean(regrets),
        "regret_max": max(regrets, default=None),
        "regret3_mean": _mean(choice_regrets(priced, measured=3)),
        "top1": _mean([float(r == 0.0) for r in regrets]),
        "num_choice_groups": len(regrets),
        "unpriced": [{"id": row.run.id, "why": row.why} for row in rows if row.why is not None],
    }


def choice_regrets(rows: Sequence[Predicted], *, measured: int = 1) -> list[float]:
    """The loss of time by choosing by the price, for every choice among measured plans.

    Args:
        rows: priced runs.
        measured: the number of plans ranked first of which the fastest measured one is taken.

    Returns:
        Measured time of the plan taken over that of the best one, minus one.
    """
    choices: dict[tuple[Any, ...], list[Predicted]] = {}
    for row in rows:
        choices.setdefault(row.run.choice_group, []).append(row)
    found = []
    for group in choices.values():
        if len(group) >= MIN_CHOICES:
            first = sorted(group, key=lambda row: row.step_time_s)[:measured]
            taken, best = (min(row.run.iteration_s for row in some) for some in (first, group))
            found.append(taken / best - 1.0)
    return found


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """The rank correlation, with ties at their mean rank; None for fewer than three values or for constants."""
    from scipy.stats import rankdata

    if len(one) < 3:
        return None
    a, b = rankdata(one), rankdata(other)
    mean = (len(a) + 1) / 2.0
    covariance = float(((a - mean) * (b - mean)).sum())
    spread = math.sqrt(float(((a - mean) ** 2).sum() * ((b - mean) ** 2).sum()))
    return covariance / spread if spread > 0.0 else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def table(document: Mapping[str, Any]) -> list[str]:
    """The document of `by_group` as the lines of a table for readers, one for each group."""
    names = ("mape", "median", "bias", "rank", "inside", "band", "memory", "regret", "of 3")
    lines = [f"{'group':20}{'n':>5}" + "".join(f"{name:>8}" for name in names) + "  unpriced"]

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100.0 * value:.1f}%"

    for name, g in document["groups"].items():
        rank = "-" if g["spearman"] is None else f"{g['spearman']:.3f}"
        band = "-" if g["band_half_width"] is None else f"±{percent(g['band_half_width'])}"
        columns = (
            *(percent(g[key]) for key in ("mape", "median", "bias")),
            rank,
            percent(g["band_coverage"]),
            band,
            *(percent(g[key]) for key in ("memory_mape", "regret_mean", "regret3_mean")),
        )
        lines.append(f"{name:20}{g['n']:5}" + "".join(f"{c:>8}" for c in columns) + f"  {len(g['unpriced'])}")
    lines.append("inside: share of runs in the error band; of 3: regret after measuring the three plans ranked first")
    reasons: dict[str, int] = {}
    for g in document["groups"].values():
        for row in g["unpriced"]:
            reasons[row["why"]] = reasons.get(row["why"], 0) + 1
    lines += [f"{count:5} unpriced: {why}" for why, count in sorted(reasons.items(), key=lambda item: -item[1])]
    return lines
