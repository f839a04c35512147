"""`automap recommend`: what is asked of a cluster, read from options, and the answer for people."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automap.amounts import in_seconds
from automap.documents import read_file
from automap.errors import ProblemError
from automap.plan import format_devices
from service.strategy import strategy

if TYPE_CHECKING:
    from agents.candidates import Candidate
    from agents.recommend import Goals, Recommendation

HOUR, DAY = 3600.0, 86400.0


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
        ProblemError: the text is not a time.
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
        "part_of": one.part_of,
        "devices": format_devices(one.devices),
        "num_devices": one.num_devices,
        "lower_bound_s": one.lower_bound_s,
        "step_time_s": one.step_time_s,
        "cost_per_hour": one.cost_per_hour,
        "cost_per_step": one.cost_per_step,
        "device_seconds": one.device_seconds,
        "days": one.step_time_s * steps / DAY if one.step_time_s is not None and steps is not None else None,
        "cost": one.cost_per_step * steps if known and one.cost_per_step is not None and steps is not None else None,
        "fault": one.fault,
    }


def page(found: Recommendation, steps: float | None) -> list[str]:
    """The front as a table, and the plans of those that stand out."""
    columns = _columns(priced=found.fewest.cost_per_hour is not None, steps=steps)
    rows = [["cluster", "devices", "step", *columns]]
    for one in found.front:
        document = _document(one, steps)
        costs = [f"{factor * document[name]:,.4g}" for name, factor in columns.values()]
        rows.append([one.cluster, f"{one.num_devices:,}", in_seconds(one.step_time_s or 0.0), *costs])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    goal = "number of devices" if found.fewest.cost_per_hour is None else "cost"
    parts = sum(one.part_of is not None for one in found.candidates)
    those = f", {parts} of them parts of the clusters that were named" if parts else ""
    lines.append(
        f"Shown of {len(found.candidates)} candidates{those}: those that no other one beats in both {goal} and step "
        "time."
    )
    standing = {"fewest": found.fewest, "cheapest": found.cheapest, "fastest": found.fastest}
    for label, best in standing.items():
        if best is not None and best.plan is not None:
            lines.append(f"{label:9} {best.cluster}: {in_seconds(best.step_time_s or 0.0)}, {strategy(best.plan)}")
            lines += [f"          {text}" for text in _beside_whole(best, found.candidates)]
    return lines


def _columns(*, priced: bool, steps: float | None) -> dict[str, tuple[str, float]]:
    """Titles of the columns about costs -> entry of `_document`, and the factor that it is shown with."""
    columns = {"an hour": ("cost_per_hour", 1.0)} if priced else {}
    if steps is None:
        columns["1,000 steps"] = ("cost_per_step", 1e3) if priced else ("device_seconds", 1e3 / HOUR)
        return columns if priced else {"device-hours of 1,000 steps": columns["1,000 steps"]}
    columns["days"] = ("days", 1.0)
    return {**columns, "in all": ("cost", 1.0)} if priced else columns


def _beside_whole(part: Candidate, candidates: Sequence[Candidate]) -> list[str]:
    """What a part of a cluster costs beside the whole cluster; nothing for a cluster that was named."""
    whole = next((one for one in candidates if one.cluster == part.part_of), None)
    if whole is None or whole.device_seconds is None or part.device_seconds is None:
        return []
    is_priced = whole.cost_per_step is not None and part.cost_per_step is not None
    own, its = (part.cost_per_step, whole.cost_per_step) if is_priced else (part.device_seconds, whole.device_seconds)
    change = (own or 0.0) / (its or 1.0) - 1.0
    share = f"{abs(change):.1%} {'more' if change > 0.0 else 'less'}"
    costs = f"costs {share}" if is_priced else f"takes {share} device time"
    devices = f"{part.num_devices:,} of the {whole.num_devices:,} devices of {whole.cluster}"
    return [f"{devices}: a step {costs} than on all of them ({in_seconds(whole.step_time_s or 0.0)})"]
