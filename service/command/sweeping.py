"""`automap sweep`: the step time of a model in a table over one or two quantities, such as tp and the cluster.

A cell is the price of a plan with the stated degrees, or, with a budget, the best plan that a search finds under them.
"""

from __future__ import annotations

import itertools
import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from automap.amounts import in_seconds
from automap.errors import NothingFits, ProblemError, UserError, one_of
from service.command.estimation import with_sequence
from service.jobs.run_job import JobRequest, build_problem, import_graph, run_job
from service.priced_plans import FIXED, hand_made_plan
from service.report import memory_share
from service.strategy import strategy

if TYPE_CHECKING:
    from automap.plan import Plan
    from automap.price.evaluator import Evaluator
    from ir.graph import Graph

DEGREES = ("dp", "tp", "pp", "cp", "ep", "micro_batch", "virtual", "zero")
"""Quantities that are degrees, and numbers."""
MODES = ("recompute", "schedule")
"""Quantities of a plan that are words."""
TRAINING = ("global_batch", "precision", "optimizer", "trainer", "target")
"""Quantities of the training."""
QUANTITIES = (*DEGREES, *MODES, *TRAINING, "cluster", "seq_len")
"""Everything that can be swept over."""
NUMBERS = frozenset((*DEGREES, "global_batch", "seq_len"))
MAX_CELLS = 10_000
"""Largest table: a price takes some milliseconds, so this is a minute."""

MOST_REASONS = 4
"""Most reasons under a table (assumed): a table of the degrees of one machine seldom has more kinds of faults."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side of the table."""

    name: str
    """One of `QUANTITIES`."""
    values: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the table."""

    at: Mapping[str, int | str]
    """Quantity -> its value here."""
    plan: Plan | None
    """The plan, which may not fit into memory; None where there is none."""
    fault: str | None = None
    """Why there is none."""

    def to_json(self) -> dict[str, Any]:
        """The cell as JSON."""
        if self.plan is None or self.plan.estimate is None:
            return {**self.at, "fault": self.fault}
        estimate = self.plan.estimate
        return {
            **self.at,
            "step_time_s": estimate.step_time_s,
            "error_band_s": list(estimate.error_band_s),
            "fits": estimate.fits,
            "memory_share": memory_share(self.plan),
            "strategy": strategy(self.plan),
        }


def read_sides(texts: Sequence[str]) -> tuple[Side, ...]:
    """The sides of the table that are written as NAME=VALUE,VALUE,...

    Raises:
        ProblemError: a name or a value is not understood, or the table would be too large.
    """
    if not 1 <= len(texts) <= 2:
        raise ProblemError(
            "a table has one or two quantities", field="over", value=len(texts), repair="Give --over once or twice."
        )
    sides = tuple(map(_read_side, texts))
    if len({side.name for side in sides}) < len(sides):
        repair = "Name two quantities that differ."
        raise ProblemError("named twice", field="over", value=sides[0].name, repair=repair)
    count = math.prod(len(side.values) for side in sides)
    if count > MAX_CELLS:
        repair = f"Give fewer values: {MAX_CELLS:,} cells at most, such as {math.isqrt(MAX_CELLS)} by as many."
        raise ProblemError("too many cells", field="over", value=f"{count:,} cells", repair=repair)
    return sides


def _read_side(text: str) -> Side:
    name, equals, rest = text.partition("=")
    name = name.strip().replace("-", "_")
    if not equals:
        raise ProblemError("no values", field="over", value=text, repair="Write it as in tp=1,2,4.")
    if name not in QUANTITIES:
        raise ProblemError("not a quantity of a plan", field="over", value=name, repair=one_of(QUANTITIES, name))
    words = [word.strip() for word in rest.split(",")]
    if name not in NUMBERS:
        choices = _choices(name)
        for word in words:
            if choices and word not in choices:
                raise ProblemError("unknown value", field=f"over.{name}", value=word, repair=one_of(choices, word))
        return Side(name, tuple(dict.fromkeys(words)))
    for word in words:
        if not word.isdecimal() or len(word) > 18:
            raise ProblemError("not a number", field=f"over.{name}", value=word, repair="Write it as in tp=1,2,4.")
    return Side(name, tuple(dict.fromkeys(map(int, words))))


def _choices(name: str) -> tuple[str, ...]:
    """The words that a quantity may be; none for clusters, which are read later."""
    from automap.price.lowered_plan import RECOMPUTE_MODES
    from automap.problem import Training
    from automap.space.stated_strategy import SCHEDULES
    from automap.targets import ANY, targets
    from automap.trainers import trainers

    if name in ("precision", "optimizer"):
        kinds = typing.get_args(typing.get_type_hints(Training)[name])
        # Of a type that may be None, the choices stand in its first part.
        return tuple(kind for kind in kinds if isinstance(kind, str)) or typing.get_args(kinds[0])
    known = {"recompute": RECOMPUTE_MODES, "schedule": SCHEDULES, "trainer": trainers(), "target": (ANY, *targets())}
    return tuple(known.get(name, ()))


def sweep(
    data: bytes,
    request: JobRequest,
    stated: Mapping[str, Any],
    sides: Sequence[Side],
    *,
    searched: bool,
    on_cell: Callable[[str], None] = lambda text: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Cell]:
    """The cells of the table, the last side's values running fastest.

    Args:
        data: the model's file; empty for a named model.
        request: model, cluster, training, hints and budget, but for what is swept over.
        stated: degrees that all cells have, fields of `automap.space.stated_strategy.Strategy`.
        sides: what is swept over, see `read_sides`.
        searched: whether each cell is searched within the budget of the request; else the stated degrees are priced.
        on_cell: called with a text after each cell.
        should_stop: once it returns true, the cells so far are returned.

    Raises:
        UserError: the model or the request; that a value of a side does not go with it makes a cell without a plan.
    """
    kept = _Kept(data)
    cells = []
    for values in itertools.product(*(side.values for side in sides)):
        if should_stop():
            break
        at = dict(zip((side.name for side in sides), values, strict=True))
        cell_request, degrees = _divided(request, {**stated, **at})
        try:
            if searched:
                plan = kept.searched(cell_request, degrees, should_stop)
            else:
                plan = hand_made_plan(kept.evaluator(cell_request), degrees)
            cells.append(Cell(at, plan))
        except NothingFits:
            cells.append(Cell(at, None, "nothing fits into memory"))
        except UserError as fault:
            if fault.field in ("model", "hints"):
                raise
            cells.append(Cell(at, None, str(fault)))
        on_cell(" ".join(f"{name}={value}" for name, value in at.items()))
    return cells


def _divided(request: JobRequest, given: Mapping[str, Any]) -> tuple[JobRequest, dict[str, Any]]:
    """The request of a cell, and its degrees."""
    training = {**request.training, **{name: given[name] for name in TRAINING if name in given}}
    model = with_sequence(request.model, given.get("seq_len"))
    cluster = given.get("cluster", request.cluster)
    degrees = {name: value for name, value in given.items() if name not in (*TRAINING, "cluster", "seq_len")}
    return replace(request, training=training, model=model, cluster=cluster), degrees


class _Kept:
    """The graph and the evaluator of the last request, which the next cell often has too."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._graphs: dict[str, Graph] = {}
        self._last: tuple[JobRequest, Evaluator] | None = None

    def graph(self, request: JobRequest) -> Graph:
        """The model."""
        key = f"{request.model} {request.training.get('loss')}"
        if key not in self._graphs:
            self._graphs = {key: import_graph(self._data, request)}
        return self._graphs[key]

    def evaluator(self, request: JobRequest) -> Evaluator:
        """The price of plans of the request."""
        from automap.price.evaluator import Evaluator

        if self._last is None or self._last[0] != request:
            self._last = request, Evaluator(build_problem(self.graph(request), request))
        return self._last[1]

    def searched(self, request: JobRequest, degrees: Mapping[str, Any], should_stop: Callable[[], bool]) -> Plan:
        """The best plan that a search under the degrees finds."""
        fixed = {FIXED.get(name, name): value for name, value in degrees.items()}
        if "micro_batch" in fixed:
            repair = "Sweep over global_batch, or leave --budget out."
            raise ProblemError("a search cannot keep it fixed", field="over", value="micro_batch", repair=repair)
        hints = {**request.hints, "fix": {**request.hints.get("fix", {}), **fixed}}
        request = replace(request, hints=hints)
        return run_job(request, lambda: self.graph(request), on_progress=lambda progress: None, should_stop=should_stop)


def table(sides: Sequence[Side], cells: Sequence[Cell]) -> list[str]:
    """The lines of the table for people: step time and share of memory; `*` marks the fastest that fits."""
    texts = {tuple(cell.at.values()): _text(cell) for cell in cells}
    fitting = [cell for cell in cells if cell.plan is not None and cell.plan.estimate and cell.plan.estimate.fits]
    best = min(fitting, key=_step_s, default=None)
    if best is not None:
        texts[tuple(best.at.values())] = f"*{texts[tuple(best.at.values())]}"
    rows = [(f"{sides[0].name} {value}", (value,)) for value in sides[0].values]
    columns: list[tuple[str, tuple[int | str, ...]]] = [("", ())]
    if len(sides) > 1:
        columns = [(f"{sides[1].name} {value}", (value,)) for value in sides[1].values]
    grid = [["", *(name for name, _ in columns)]] if len(sides) > 1 else []
    grid += [[name, *(texts.get(row + column, "") for _, column in columns)] for name, row in rows]
    widths = [max(len(line[i]) for line in grid) for i in range(len(grid[0]))]
    return ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in grid]


def reasons(cells: Sequence[Cell]) -> list[str]:
    """Why cells have no plan, for people: faults that differ in their numbers alone are one line, the first of them."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        if cell.fault is not None:
            where = ", ".join(f"{name} {value}" for name, value in cell.at.items())
            found.setdefault(re.sub(r"\d+", "#", cell.fault), []).append(f"{where}: {cell.fault}")
    lines = [f"-  {first}" + (f" ({len(others)} more like it)" if others else "") for first, *others in found.values()]
    more = len(lines) - MOST_REASONS
    return lines if more <= 0 else [*lines[:MOST_REASONS], f"-  {more} more reasons: --json gives that of each cell"]


def _step_s(cell: Cell) -> float:
    assert cell.plan is not None
    assert cell.plan.estimate is not None
    return cell.plan.estimate.step_time_s


def _text(cell: Cell) -> str:
    if cell.plan is None or cell.plan.estimate is None:
        return "-"
    share = memory_share(cell.plan)
    return f"{in_seconds(_step_s(cell))} {share:.0%}" + ("" if cell.plan.estimate.fits else "!")
