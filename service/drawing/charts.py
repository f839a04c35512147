"""Pictures of searches, recommendations and validations, and how they are written to files.

Like those of plans they are drawn by matplotlib. `.html` is a page that needs no network, `.json` holds the numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automap.errors import PlanError
from service.drawing.pictures import PARTS, ROWS, best_so_far, figure_of, plain_numbers
from service.output_files import write_output

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from agents.candidates import Candidate
    from agents.recommend import Recommendation
    from agents.searcher import SearchResult
    from automap.validation.errors_by_group import Predicted

KINDS = (".html", ".svg", ".png", ".json")
"""Ends of the names of files that can be written."""
FIRST_S = 1e-3
"""The least time that is shown, in seconds: the axis of times is logarithmic."""


def check_kind(path: Path, field: str = "output") -> None:
    """Refuses a file that cannot be written by what its name ends in.

    Args:
        path: the file.
        field: name of the option that names it.

    Raises:
        PlanError: the end of the name is unknown.
    """
    if path.suffix.lower() not in KINDS:
        repair = "Name a file that ends in .html, .svg, .png or .json."
        raise PlanError("an unknown kind of picture", field=field, value=str(path), repair=repair)


def write(path: Path, title: str, document: Mapping[str, Any], draw: Callable[[], Figure]) -> None:
    """Writes a picture, or the numbers that it shows.

    Args:
        path: file, see `check_kind`.
        title: what the picture shows, for pages and for those who cannot see it.
        document: the numbers.
        draw: returns the picture; not called for `.json`.
    """
    kind = path.suffix.lower()
    if kind == ".json":
        write_output(path, json.dumps(document, indent=1) + "\n")
        return
    from service.drawing.page import page_of, png, svg

    figure = draw()
    write_output(path, page_of(title, figure) if kind == ".html" else svg(figure) if kind == ".svg" else png(figure))


def progress_numbers(result: SearchResult) -> dict[str, Any]:
    """The numbers of a search over time, as JSON types.

    Returns:
        step_time_s of the plan found; lower_bound_s of all plans of the space; searchers: name -> [[plans priced so far
        by all, seconds, step time]] at each moment when it found a faster plan than it had.
    """
    return {
        "step_time_s": result.step_time_s,
        "lower_bound_s": result.record.lower_bound_s,
        "searchers": {name: [list(one) for one in own] for name, own in result.by_searcher.items()},
    }


def search_progress(result: SearchResult) -> Figure:
    """The best plan of each searcher in the course of a search, against the bound."""
    curves = {
        name: [(max(after, FIRST_S), step_s) for _, after, step_s in own] for name, own in result.by_searcher.items()
    }
    label = "seconds since the beginning of the search"
    return best_so_far(curves, result.seconds, result.record.lower_bound_s, label)


def front(found: Recommendation) -> Figure:
    """Step time against devices, or against the price of an hour, of all candidates, with those that none beats."""
    priced = found.fewest.cost_per_hour is not None
    figure, axes = figure_of(ROWS, "Clusters: what they cost, and how fast they are")

    def places(some: Sequence[Candidate]) -> tuple[list[float], list[float]]:
        able = [one for one in some if one.step_time_s is not None]
        costs = [one.cost_per_hour if one.cost_per_hour is not None else float(one.num_devices) for one in able]
        return costs, [one.step_time_s for one in able if one.step_time_s is not None]

    axes.scatter(*places(found.candidates), s=12, color=PARTS[-2], label="candidates")
    axes.plot(
        *places(found.front), marker="o", markersize=4, color=PARTS[0], label="no other one is cheaper and faster"
    )
    for one, cost, step_s in zip(found.front, *places(found.front), strict=True):
        axes.annotate(one.cluster, (cost, step_s), xytext=(4, 4), textcoords="offset points", fontsize=7)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("price of an hour" if priced else "devices")
    axes.set_ylabel("seconds of a step")
    plain_numbers(axes)
    axes.legend(frameon=False, fontsize=8)
    return figure


def validation_numbers(rows: Sequence[Predicted]) -> dict[str, Any]:
    """Measured and predicted step time of each run that has a price, with the band of the prediction."""
    return {
        "runs": [
            {
                "id": row.run.id,
                "group": row.run.group,
                "measured_s": row.run.iteration_s,
                "predicted_s": row.step_time_s,
                "error_band_s": list(row.error_band_s),
            }
            for row in rows
            if row.why is None
        ]
    }


def predicted_against_measured(rows: Sequence[Predicted]) -> Figure:
    """Predicted against measured step times of runs, by group."""
    figure, axes = figure_of(ROWS, "Predicted against measured step times")
    priced = [row for row in rows if row.why is None]
    for number, group in enumerate(dict.fromkeys(row.run.group for row in priced)):
        own = [row for row in priced if row.run.group == group]
        marker = "osv^D"[number // len(PARTS) % 5]
        axes.scatter(
            [row.run.iteration_s for row in own],
            [row.step_time_s for row in own],
            s=10,
            color=PARTS[number % len(PARTS)],
            marker=marker,
            label=f"{group} ({len(own)})",
        )
    ends = [row.run.iteration_s for row in priced] or [1.0]
    ends = [min(ends), max(ends)]
    axes.plot(ends, ends, color="black", linewidth=0.8, label="as measured")
    axes.plot(ends, [1.2 * end for end in ends], color="black", linewidth=0.5, linestyle=":", label="20% off")
    axes.plot(ends, [end / 1.2 for end in ends], color="black", linewidth=0.5, linestyle=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("seconds measured")
    axes.set_ylabel("seconds predicted")
    plain_numbers(axes)
    figure.legend(frameon=False, fontsize=7, ncols=3, loc="outside lower center")
    return figure
