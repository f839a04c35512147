"""Graphs, plans and results of searches as notebooks show them: tables, and pictures where matplotlib is installed."""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from automap.amounts import in_seconds
from automap.plan import Plan
from ir.graph import Graph
from service.report import head, summary
from service.strategy import strategy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from agents.searcher import SearchResult

OTHERS = 4
"""Number of plans that are shown beside that of a search."""


def shown(value: object) -> str | None:
    """HTML of a graph, a plan or the result of a search; None for anything else."""
    if isinstance(value, Graph):
        return _graph(value)
    if isinstance(value, Plan):
        return _plan(value)
    from agents.searcher import SearchResult

    return _result(value) if isinstance(value, SearchResult) else None


def _graph(graph: Graph) -> str:
    from ir.summary import summarize

    facts = summarize(graph)
    kinds = ", ".join(f"{number} {kind}" for kind, number in facts["fused_groups"].items())
    rows = [
        ("model", graph.name),
        ("parameters", f"{facts['num_parameters']:,}"),
        ("forward FLOPs", f"{facts['forward_flops']:.4g} a sample"),
        ("operators", f"{facts['num_operators']:,}, of which trainers run as one kernel: {kinds or 'none'}"),
        (
            "units",
            f"{facts['num_units']}, of which a pipeline has whole ones, {facts['num_blocks']} of them repeated blocks",
        ),
    ]
    rows += [("heaviest", f"{row['share']:.1%} {row['name']}, {row['count']} times") for row in facts["heaviest"]]
    return _table(rows)


def _plan(plan: Plan) -> str:
    if plan.estimate is None:
        return _table([("strategy", strategy(plan))])
    from service.drawing.pictures import pictures_of

    rows = summary(plan) if plan.search is not None else head(plan)
    # Other pictures need the timeline of a step, and plans are returned without it.
    shown = [draw for name, draw in pictures_of(plan).items() if name in ("breakdown", "memory", "search")]
    return _table(rows) + _pictures(*(functools.partial(draw, plan) for draw in shown))


def _result(result: SearchResult) -> str:
    from service.drawing.charts import search_progress

    rows = [
        ("" if number else "others", f"{in_seconds(plan.estimate.step_time_s)}: {strategy(plan)}")
        for number, plan in enumerate(result.others(OTHERS))
        if plan.estimate is not None
    ]
    return _table([*summary(result.plan), *rows]) + _pictures(lambda: search_progress(result))


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(
        f"<tr><th style='text-align: left'>{html.escape(label)}</th>"
        f"<td style='text-align: left'>{html.escape(text)}</td></tr>"
        for label, text in rows
    )
    return f"<table>{cells}</table>"


def _pictures(*draw: Callable[[], Figure]) -> str:
    if find_spec("matplotlib") is None:
        return ""
    from service.drawing.page import svg

    return "".join(f"<div style='background: white'>{svg(one())}</div>" for one in draw)
