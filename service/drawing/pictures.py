"""The pictures of a plan, drawn by matplotlib.

Each function takes a plan whose estimate holds a timeline and returns a figure. Colours are those of Okabe and Ito,
which people with any colour vision tell apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from automap.amounts import in_seconds
from automap.arrays import Floats, Ints
from automap.errors import printable
from automap.plan import MEMORY_CLASSES, DeviceMemory, Estimate, Plan, Stage, parse_devices
from service.drawing.trace import KINDS, Action, Passes, read_actions
from service.report import GIB, time_parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

COLOURS = {
    "F": "#0072B2",
    "B": "#E69F00",
    "I": "#E69F00",
    "W": "#CC79A7",
}
"""Letter of an action -> its colour."""
PARTS = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#D55E00", "#CC79A7", "#999999", "#000000")
"""Colours of parts of a whole."""
LINES = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#999999", "#000000")
"""Colours of lines: without yellow, which is hard to see on white, and the red of limits."""
DASHES: tuple[Literal["-", "--", ":"], ...] = ("-", "--", ":")
"""Styles of lines, which tell apart lines of the same colour."""
MOST_SHAPES = 2000
"""Number of actions above which they are drawn as pixels: a file with more shapes is slow to open (assumed)."""
PIXELS = 1500
"""Pixels of the picture of a step with more actions than `MOST_SHAPES`, at twice the resolution of a screen
(assumed)."""
MOST_ROWS = 48
"""Most rows of a picture of which each has a text: with more, the texts would touch, so only some rows have one
(tried)."""
MOST_COLUMNS = 12
"""As `MOST_ROWS`, for columns with a text under each (tried)."""
MOST_LABELLED = 1e3
"""Ratio of the ends of a logarithmic axis above which only the powers of ten are labelled (assumed)."""
LONGEST = 200
"""Most characters of a line of a text (assumed)."""
WIDTH = 10.0
"""Width of a figure in inches."""
NEAR = 1.5
"""Plans that take more than this many times as long as the fastest one are cut off, if their searcher found better ones
(assumed): otherwise all others would be close together in the picture."""
ROWS = 12
"""Height of a picture of a search, of clusters or of runs, in rows."""


def timeline(plan: Plan) -> Figure:
    """What each pipeline rank does in a step, and when."""
    ranks, end_s = [read_actions(own) for own in _actions(plan)], _estimate(plan).step_time_s
    figure, axes = figure_of(len(ranks), "A step of each pipeline rank")
    many = sum(len(own.letters) for own in ranks) > MOST_SHAPES
    if many:
        axes.imshow(
            _pixels(ranks, end_s), extent=(0.0, end_s, len(ranks) - 0.5, -0.5), aspect="auto", interpolation="none"
        )
    else:
        for rank, own in enumerate(ranks):
            for letter in KINDS:
                some = own.letters == letter
                spans = list(zip(own.begins[some], own.ends[some] - own.begins[some], strict=True))
                axes.broken_barh(spans, (rank - 0.4, 0.8), color=COLOURS[letter], edgecolor="white", linewidth=0.3)
    shown = [letter for letter in KINDS if any((own.letters == letter).any() for own in ranks)]
    _legend(figure, {KINDS[letter]: COLOURS[letter] for letter in shown})
    axes.set_yticks(*_labelled([f"rank {rank}" for rank in range(len(ranks))]))
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlim(0.0, end_s)
    short_ones = "; colours of passes too short to see are mixed" if many else ""
    axes.set_xlabel(f"seconds; white: waiting, the host, gradients and the optimizer{short_ones}")
    return figure


def _pixels(ranks: Sequence[Passes], end_s: float) -> Floats:
    """An image of the actions of pipeline ranks: each pixel has the mean colour of its time.

    Args:
        ranks: the actions of each.
        end_s: the time at the right edge.

    Returns:
        Red, green and blue, 0 to 1: [ranks × height, `PIXELS`, 3]. Few ranks have white between them.
    """
    from matplotlib.colors import to_rgb

    height, white = (5, 1) if len(ranks) <= MOST_ROWS else (1, 0)
    image = np.ones((len(ranks), height, PIXELS, 3))
    edges = np.linspace(0.0, end_s, PIXELS + 1)
    for rows, own in zip(image, ranks, strict=True):
        for letter, colour in COLOURS.items():
            some = own.letters == letter
            spans = np.stack([own.begins[some], own.ends[some]], axis=1)
            done_s = np.cumsum(np.stack([np.zeros(len(spans)), spans[:, 1] - spans[:, 0]], axis=1))
            share = np.diff(np.interp(edges, spans.ravel(), done_s)) / (edges[1] - edges[0]) if len(spans) else 0.0
            rows[: height - white] -= np.multiply.outer(share, 1.0 - np.array(to_rgb(colour)))
    return image.clip(0.0, 1.0).reshape(-1, PIXELS, 3)


def memory_over_time(plan: Plan) -> Figure:
    """Memory of a device of each pipeline rank in the course of a step, as micro-batches come and go."""
    actions, estimate = _actions(plan), _estimate(plan)
    figure, axes = figure_of(6, "Memory of a device of each pipeline rank")
    fullest = _fullest(plan, len(actions))
    for rank, (own, memory) in enumerate(zip(actions, fullest, strict=True)):
        times, kept = in_flight(own)
        always = (memory.total - memory.activations) / GIB
        level = always + memory.activations / GIB * kept / max(1, int(kept.max()))
        (line,) = axes.step([0.0, *times, estimate.step_time_s], [always, *level, always], where="post")
        _tell_apart(line, rank, f"rank {rank}")
    capacity = min(memory.capacity for memory in estimate.memory_bytes) / GIB
    axes.axhline(capacity, color="#D55E00", linestyle="--", label="memory of a device")
    axes.set_ylim(0.0)
    axes.set_xlim(0.0, estimate.step_time_s)
    axes.set_xlabel("seconds")
    axes.set_ylabel("GiB")
    if len(actions) <= len(LINES):
        axes.legend(frameon=False, fontsize=8)
    return figure


def _tell_apart(line: Line2D, number: int, label: str) -> None:
    """Gives a line the look of its number, and its label."""
    line.set_color(LINES[number % len(LINES)])
    line.set_linestyle(DASHES[number // len(LINES) % len(DASHES)])
    line.set_label(label)


def in_flight(actions: Sequence[Action]) -> tuple[Floats, Ints]:
    """When the number of micro-batches changes whose activations a rank keeps, and the numbers from then on.

    Args:
        actions: those of one rank, in order. A forward pass keeps activations from its beginning; the last backward
            pass of the micro-batch in the stage frees them at its end.
    """
    own = read_actions(actions)
    is_forward = own.letters == "F"
    # The last backward pass of each micro-batch in a stage is the first one in reverse order.
    keys = own.stages * (own.micro_batches.max() + 1) + own.micro_batches
    _, last = np.unique(keys[~is_forward][::-1], return_index=True)
    begins, ends = own.begins[is_forward], own.ends[~is_forward][::-1][last]
    times = np.concatenate([begins, ends])
    change = np.repeat([1, -1], [len(begins), len(ends)])
    # What ends goes before what begins at the same time.
    order = np.lexsort((change, times))
    return times[order], change[order].cumsum()


def memory(plan: Plan) -> Figure:
    """What fills the memory of the devices, with their capacity."""
    rows = _estimate(plan).memory_bytes
    figure, axes = figure_of(len(rows), "Memory of each device at its peak")
    left = np.zeros(len(rows))
    for name, colour in zip(MEMORY_CLASSES, PARTS, strict=False):
        amounts = np.array([getattr(row, name) for row in rows]) / GIB
        axes.barh(range(len(rows)), amounts, left=left, color=colour, label=name)
        left += amounts
    places = np.arange(len(rows))
    axes.vlines([row.capacity / GIB for row in rows], places - 0.4, places + 0.4, color="#D55E00", linewidth=2)
    axes.set_yticks(*_labelled([f"devices {row.devices}" for row in rows]))
    axes.invert_yaxis()
    axes.set_xlabel("GiB; the red line is what a device has")
    figure.legend(frameon=False, fontsize=8, ncols=len(MEMORY_CLASSES), loc="outside lower center")
    return figure


def breakdown(plan: Plan) -> Figure:
    """Where the time of the busiest rank goes."""
    estimate = _estimate(plan)
    parts = {name: value for name, value in time_parts(estimate).items() if value > 0.0}
    figure, axes = figure_of(len(parts), "Where the time of the busiest rank goes")
    bars = axes.barh(range(len(parts)), list(parts.values()), color=PARTS[0])
    share = [f"{in_seconds(value)}, {value / estimate.step_time_s:.1%}" for value in parts.values()]
    axes.bar_label(bars, share, padding=3, fontsize=8)
    axes.set_yticks(range(len(parts)), list(parts))
    axes.invert_yaxis()
    axes.set_xlim(0.0, 1.25 * max(parts.values()))
    axes.set_xlabel("seconds")
    return figure


def placement(plan: Plan) -> Figure:
    """Which part of the model is on which devices, and how it is spread there."""
    stages, ranks = plan.stages, len(_actions(plan))
    figure, axes = figure_of(len(stages), "The model from the input to the loss, and its devices")
    on_rank = np.arange(len(stages)) % ranks
    colours = [PARTS[rank % len(PARTS)] for rank in on_rank]
    axes.barh(range(len(stages)), 0.96, left=on_rank + 0.02, height=0.86, color=colours, alpha=0.25)
    places, texts = _labelled([f"stage {number}" for number in range(len(stages))])
    for number in places:
        stage, rank = stages[number], on_rank[number]
        names = f"{short(stage.operators[0])} … {short(stage.operators[1])}"
        if ranks > MOST_COLUMNS:
            # Beside its stage, on the side with more room.
            text, is_left = f"  {names}, {_mesh_text(stage)}  ", rank < ranks // 2
            axes.text(rank + is_left, number, text, ha="left" if is_left else "right", va="center", fontsize=7)
            continue
        axes.text(rank + 0.5, number - 0.16, names, ha="center", va="center", fontsize=7)
        axes.text(rank + 0.5, number + 0.2, _mesh_text(stage), ha="center", va="center", fontsize=7)
    axes.set_yticks(places, texts)
    axes.set_xlim(0.0, ranks)
    places, texts = _labelled([f"devices\n{stage.devices}" for stage in stages[:ranks]], MOST_COLUMNS)
    axes.set_xticks([place + 0.5 for place in places], texts)
    axes.set_ylim(len(stages) - 0.4, -0.6)
    return figure


def search(plan: Plan) -> Figure:
    """The best plan of each searcher, by the number of plans that all had priced, against the bound."""
    record = plan.search
    assert record is not None, "the plan must be that of a search"
    curves = {name: [(float(count), step_s) for count, step_s in own] for name, own in record.history.items()}
    return best_so_far(
        curves, float(record.evaluations), record.lower_bound_s, "plans priced by all searchers together"
    )


def best_so_far(
    curves: Mapping[str, Sequence[tuple[float, float]]], end: float, bound_s: float | None, label: str
) -> Figure:
    """The step time of the best plan of each searcher in the course of a search, against the bound.

    Args:
        curves: name of a searcher -> when it found a faster plan than it had, and the seconds of a step of that plan.
        end: when the search ended.
        bound_s: seconds that no plan takes less than.
        label: in what the moments are measured.
    """
    figure, axes = figure_of(ROWS, "The best plan of each searcher so far")
    for number, (name, own) in enumerate(curves.items()):
        steps = [step_s for _, step_s in own]
        times = [*(when for when, _ in own), max(end, own[-1][0])]
        (line,) = axes.step(times, [*steps, steps[-1]], where="post")
        _tell_apart(line, number, f"{name}, {in_seconds(steps[-1])}")
    if bound_s is not None:
        text = f"no plan takes less, {in_seconds(bound_s)}"
        axes.axhline(bound_s, color="#D55E00", linestyle="--", linewidth=1, label=text)
    axes.set_xscale("log")
    axes.set_xlabel(label)
    axes.set_ylabel("seconds of a step; the axis does not begin at 0")
    axes.set_ylim(*_heights([[step_s for _, step_s in own] for own in curves.values()], bound_s))
    plain_numbers(axes)
    figure.legend(frameon=False, fontsize=8, ncols=4, loc="outside lower center")
    return figure


def _heights(curves: Sequence[Sequence[float]], bound_s: float | None) -> tuple[float, float]:
    """Ends of an axis on which the bound and the end of each falling curve are seen, and beginnings that are near."""
    ends = [own[-1] for own in curves]
    least, most = min(ends), max(own[0] for own in curves)
    high = min(most, max(*ends, NEAR * least))
    low = least if bound_s is None else min(bound_s, least)
    margin = 0.05 * (high - low) or 0.05 * least
    return low - margin, high + margin


PICTURES: Mapping[str, Callable[[Plan], Figure]] = {
    "timeline": timeline,
    "memory-over-time": memory_over_time,
    "memory": memory,
    "breakdown": breakdown,
    "placement": placement,
    "search": search,
}
"""Name of a picture -> the function that draws it."""


def pictures_of(plan: Plan) -> Mapping[str, Callable[[Plan], Figure]]:
    """The pictures that a plan can have: if no search has found it, there is none of its search."""
    searched = plan.search is not None and bool(plan.search.history)
    return {name: draw for name, draw in PICTURES.items() if searched or name != "search"}


def short(name: str) -> str:
    """The module of an operator, as far as its first number: `layers.9` of `layers.9.mlp.up_proj/MatMul`."""
    scope, _, kind = name.partition("/")
    parts = scope.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: number + 1])[-24:] or kind[-24:]


def _mesh_text(stage: Stage) -> str:
    words = [f"{axis} {size}" for axis, size in stage.mesh if size > 1]
    words += [f"ZeRO {stage.zero.stage}"] if stage.zero.stage else []
    words += ["recomputed"] if stage.recompute else []
    return " × ".join(words) or "one device"


def figure_of(rows: int, title: str) -> tuple[Figure, Axes]:
    """An empty figure, high enough for this number of rows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 1.4 + 0.45 * min(rows, 24)), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def with_plain_texts(figure: Figure) -> Figure:
    """The figure, with its texts shown as they are: names from files are not formulas, and may hold characters that are
    not allowed in XML or on a page."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
        lines = text.get_text().split("\n")
        text.set_text("\n".join(printable(line, LONGEST) for line in lines))
    return figure


def plain_numbers(axes: Axes) -> None:
    """Writes 1, 2, 5, 10 beside axes that are logarithmic, in place of powers; to be called once all is drawn."""
    for axis, scale, (low, high) in (
        (axes.xaxis, axes.get_xscale(), axes.get_xlim()),
        (axes.yaxis, axes.get_yscale(), axes.get_ylim()),
    ):
        if scale == "log":
            axis.set_major_formatter(functools.partial(_number, firsts="1"))
            axis.set_minor_formatter(functools.partial(_number, firsts="25" if high < MOST_LABELLED * low else ""))


def _number(value: float, place: int | None, *, firsts: str) -> str:
    """A number without an exponent, if it begins with one of the digits `firsts`."""
    return f"{value:,g}" if f"{value:e}"[0] in firsts else ""


def _legend(figure: Figure, colours: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, frameon=False, fontsize=8, ncols=len(handles), loc="outside lower center")


def _labelled(texts: Sequence[str], most: int = MOST_ROWS) -> tuple[Sequence[int], Sequence[str]]:
    """The places that have a text beside them, and these texts: all, or at equal distances as many as are readable."""
    places = range(0, len(texts), -(-len(texts) // most))
    return places, [texts[place] for place in places]


def _estimate(plan: Plan) -> Estimate:
    assert plan.estimate is not None, "the plan must be priced"
    return plan.estimate


def _actions(plan: Plan) -> Sequence[Sequence[Action]]:
    found = _estimate(plan).timeline
    assert found is not None, "the estimate must hold a timeline"
    return found


def _fullest(plan: Plan, ranks: int) -> list[DeviceMemory]:
    """Memory of the fullest device of each pipeline rank."""
    row_of = {number: row for row in _estimate(plan).memory_bytes for number in parse_devices(row.devices)}
    of_ranks = (parse_devices(stage.devices) for stage in plan.stages[:ranks])
    return [max((row_of[number] for number in numbers), key=lambda row: row.total) for numbers in of_ranks]
