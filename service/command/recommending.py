"""`automap recommend`: what is asked of a cluster, read from options, and the answer for people."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automap.documents import read_file
from automap.errors import ProblemError
from service.report import seconds
from service.strategy import strategy

if TYPE_CHECKING:
    from agents.recommend import Candidate, Goals, Recommendation

DAY = 86400.0


def read_prices(texts: Sequence[str]) -> dict[str, float] | None:
    """Prices of devices for an hour, written as DEVICE=PRICE, or in a JSON file; None where nothing is written.

    Raises:
        ProblemError: a price is not understood, or not above zero.
    """
    if not texts:
        return None
    found: dict[str, Any] = {}
    for text in texts:
        if text.endswith(".json"):
            document = read_file(Path(text), field="prices", error=ProblemError)
            if not isinstance(document, dict):
                repair = 'Write an object such as {"H100": 2.5}.'
                raise ProblemError("not an object", field="prices", value=text, repair=repair)
            found |= document
            continue
        for pair in text.split(","):
            name, equals, price = pair.partition("=")
            if not equals:
                raise ProblemError("no price", field="prices", value=pair, repair="Write it as in H100=2.5.")
            found[name.strip()] = price
    return {name: _positive(price, f"prices.{name}") for name, price in found.items()}


def _positive(value: object, field: str) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not 0.0 < number < math.inf:
        raise ProblemError("not a number above zero", field=field, value=str(value), repair="Write it as in 2.5.")
    return number


def read_step(text: str | None) -> float | None:
    """Seconds of a step that are written as `2s`, `500ms` or `2`.

    Raises:
        ProblemError: the text is no time.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(ms|s)?", text.strip())
    if match is None or float(match[1]) <= 0.0:
        raise ProblemError("not a time", field="target_step", value=text, repair="Write it as in 2s or 500ms.")
    return float(match[1]) * (1e-3 if match[2] == "ms" else 1.0)


def read_goals(
    target_step: str | None,
    target_days: float | None,
    steps: float | None,
    max_cost_per_hour: float | None,
    prices: Mapping[str, float] | None,
) -> Goals:
    """What a cluster must reach.

    Args:
        target_step: longest step, as text.
        target_days: longest training.
        steps: number of steps of the training; None if it is not known.
        max_cost_per_hour: highest price of the cluster.
        prices: of the devices, see `read_prices`.

    Raises:
        ProblemError: a goal is not above zero, or one is missing that another one needs.
    """
    from agents.recommend import Goals

    if max_cost_per_hour is not None and prices is None:
        repair = "Give --price DEVICE=PRICE for each kind of device."
        raise ProblemError("no prices", field="max_cost_per_hour", value=max_cost_per_hour, repair=repair)

    step_s = read_step(target_step)
    if target_days is not None:
        _positive(target_days, "target_days")
        if steps is None:
            repair = "Give --tokens, the number of tokens of the whole training."
            raise ProblemError(
                "the number of steps is not known", field="target_days", value=target_days, repair=repair
            )
        most_s = target_days * DAY / steps
        if step_s is not None and step_s < most_s:
            target_days = None  # it asks for no more than the longest step does
        else:
            step_s = most_s
    if max_cost_per_hour is not None:
        _positive(max_cost_per_hour, "max_cost_per_hour")
    return Goals(
        target_step_s=step_s, target_days=target_days, max_cost_per_hour=max_cost_per_hour, steps=steps, prices=prices
    )


def to_json(found: Recommendation, steps: float | None) -> dict[str, Any]:
    """The recommendation as JSON: the candidates, names of those on the front, and those that stand out."""
    standing = {"fewest": found.fewest, "cheapest": found.cheapest, "fastest": found.fastest}
    return {
        "candidates": [_document(one, steps) for one in found.candidates],
        "front": [one.cluster for one in found.front],
        **{
            name: None if one is None else {**_document(one, steps), "plan": one.plan and one.plan.to_json()}
            for name, one in standing.items()
        },
    }


def _document(one: Candidate, steps: float | None) -> dict[str, Any]:
    known = one.step_time_s is not None and steps is not None
    return {
        "cluster": one.cluster,
        "num_devices": one.num_devices,
        "lower_bound_s": one.lower_bound_s,
        "step_time_s": one.step_time_s,
        "cost_per_hour": one.cost_per_hour,
        "cost_per_step": one.cost_per_step,
        "days": one.step_time_s * steps / DAY if one.step_time_s is not None and steps is not None else None,
        "cost": one.cost_per_step * steps if known and one.cost_per_step is not None and steps is not None else None,
        "fault": one.fault,
    }


def page(found: Recommendation, steps: float | None) -> list[str]:
    """The front as a table, and the plans of those that stand out."""
    rows = [["cluster", "devices", "step"]]
    priced = found.fewest.cost_per_hour is not None
    rows[0] += ["an hour"] * priced + ["days"] * (steps is not None) + ["in all"] * (priced and steps is not None)
    for one in found.front:
        document = _document(one, steps)
        row = [one.cluster, f"{one.num_devices:,}", seconds(one.step_time_s or 0.0)]
        names = ["cost_per_hour"] * priced + ["days"] * (steps is not None) + ["cost"] * (priced and steps is not None)
        rows.append([*row, *(f"{document[name]:,.4g}" for name in names)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    goal = "cost" if priced else "number of devices"
    lines.append(
        f"Shown of {len(found.candidates)} candidates: those that no other one beats in both {goal} and step time."
    )
    standing = {"fewest": found.fewest, "cheapest": found.cheapest, "fastest": found.fastest}
    for label, best in standing.items():
        if best is not None and best.plan is not None:
            lines.append(f"{label:9} {best.cluster}: {seconds(best.step_time_s or 0.0)}, {strategy(best.plan)}")
    return lines
