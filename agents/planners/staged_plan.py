"""Staged plans: the output of planners of the literature, and how it becomes a plan of AutoMAP.

Such a planner divides the units of a model into stages and gives each stage a set of devices. All else has a default:
every operator splits its batch over the devices of its stage, nothing is recomputed, and the schedule is 1F1B.
`search_staged` makes a `Searcher` of a planner. Its proposals are priced exactly, also those outside the plan space,
such as an explicit order of the micro-batches or a stage whose devices are not consecutive. Units: samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from agents.incumbent import Incumbent
from agents.searcher import SearchResult, SearchTask
from automap.arrays import Ints
from automap.hints import Fix
from automap.price.evaluator import Evaluator, blank, by_type
from automap.price.lowered_plan import LoweredPlan, Segment
from automap.price.stage_reader import default_signatures
from automap.schedule import NO_PROGRAM, read_order
from automap.space.space import PlanSpace


@dataclass(frozen=True, kw_only=True)
class StageChoice:
    """One stage of a pipeline."""

    end: int
    """Number of units of the model before the end of the stage."""
    devices: tuple[int, ...]
    """Numbers of its devices, in the order of its mesh."""
    tp: int = 1
    """Size of the inner mesh axis; the outer axis has the other devices."""
    recompute: str | tuple[str, ...] = "none"
    """Recompute mode of all its units, or of each of them."""
    signatures: Ints | None = None
    """[operator rows, axes] signatures; None = `data_parallel`."""
    batch_shares: tuple[int, ...] | None = None
    """Samples of a micro-batch for each index of the outer axis; None = as even as possible."""


@dataclass(frozen=True, kw_only=True)
class StagedPlan:
    """A plan as planners of the literature decide it."""

    stages: tuple[StageChoice, ...]
    """In dataflow order; with virtual stages several stages have the same devices."""
    num_micro_batches: int
    """A divisor of the global batch."""
    schedule: str = "1f1b"
    """See `automap.schedule.KINDS`."""
    order: tuple[tuple[str, ...], ...] = ()
    """Actions of each pipeline rank in torch's words, if the schedule is explicit."""
    zero: int = 0
    """ZeRO stage, over the outer axis."""


Planner = Callable[[Incumbent], Iterable[StagedPlan]]
"""A planner of the literature: yields the plans that it proposes for the problem of an incumbent. Each is priced before
the next one is asked for, until the budget ends."""


def data_parallel(evaluator: Evaluator, num_axes: int) -> Ints:
    """[operator rows, axes] signatures that split the batch over the outermost axis and replicate over the others."""
    found = blank(evaluator, num_axes)
    for kind in range(evaluator.blocks.num_types):
        for offset, row in enumerate(evaluator.tables.rows(kind)):
            whole, split = default_signatures(evaluator, kind, offset)
            found[row] = whole
            found[row, 0] = split
    return found


def lower_staged(space: PlanSpace, plan: StagedPlan) -> LoweredPlan:
    """The lowered plan of a staged plan.

    Raises:
        PlanError: an explicit order is malformed.
    """
    axes = space.axes
    batch = space.problem.training.global_batch
    samples = batch // plan.num_micro_batches
    assert samples * plan.num_micro_batches == batch, "micro-batches that do not add up to the batch"
    assert plan.stages[-1].end == space.num_units, "stages that do not cover the model"
    distinct = list(dict.fromkeys(stage.devices for stage in plan.stages))
    ranks = plan.stages[: len(distinct)]
    sizes = [(len(stage.devices) // stage.tp, *[1] * (len(axes) - 2), stage.tp) for stage in ranks]
    chunks = _chunks(space, plan)
    program = NO_PROGRAM
    if plan.schedule == "explicit":
        program = read_order(plan.order, len(ranks), len(chunks), plan.num_micro_batches)
    is_uneven = any(samples % size[0] for size in sizes) or len({size[0] for size in sizes}) > 1
    shares = tuple(stage.batch_shares for stage in ranks)
    return LoweredPlan(
        axes=axes,
        layout=space.evaluator.layout_of(list(zip([stage.devices for stage in ranks], sizes, strict=True))),
        num_micro_batches=plan.num_micro_batches,
        samples=samples,
        kind=plan.schedule,
        chunks=chunks,
        zero=plan.zero,
        zero_axes=np.array([any(size[a] > 1 for size in sizes) for a in range(len(axes) - 1)] + [False]),
        program=program,
        spread_over=(0,) * len(ranks) if is_uneven else (),
        shares=shares if any(share is not None for share in shares) else (),
    )


def _chunks(space: PlanSpace, plan: StagedPlan) -> tuple[tuple[Segment, ...], ...]:
    """The segments of each stage: one for each unit, with its signatures and its recomputation."""
    evaluator, units = space.evaluator, space.linkage.blocks.units
    # Most stages share one array of signatures, which is then divided by unit types only once.
    sorted_signatures: dict[int, Sequence[Ints]] = {}
    chunks, begin = [], 0
    for stage in plan.stages:
        if id(stage.signatures) not in sorted_signatures:
            own = data_parallel(evaluator, len(space.axes)) if stage.signatures is None else stage.signatures
            sorted_signatures[id(stage.signatures)] = by_type(evaluator, own)
        signatures = sorted_signatures[id(stage.signatures)]
        numbers = range(begin, stage.end)
        modes = [stage.recompute] * len(numbers) if isinstance(stage.recompute, str) else stage.recompute
        segments = []
        for number, mode in zip(numbers, modes, strict=True):
            mask = evaluator.masks(units[number].type)[mode]
            segments.append(evaluator.segment(number, signatures, mask))
        chunks.append(tuple(segments))
        begin = stage.end
    return tuple(chunks)


def search_staged(task: SearchTask, name: str, propose: Planner) -> SearchResult:
    """The best plan that a planner of the literature proposes; see `Searcher`.

    If none of its plans fits into memory, the best template is returned, as by every search that finds nothing. The
    entry of the planner in the result's `searchers` then has no step time.

    Args:
        task: what to search.
        name: name of the planner.
        propose: the planner.
    """
    incumbent = Incumbent.begin(task, name)
    incumbent.price_start(task)
    price_staged(incumbent, propose(incumbent))
    return incumbent.result(seed=task.seed)


def price_staged(incumbent: Incumbent, plans: Iterable[StagedPlan]) -> float:
    """Prices proposals until the budget ends; the incumbent keeps the best.

    Returns:
        Step time of the best of these proposals that fits, or infinity.
    """
    best_s = float("inf")
    for plan in plans:
        if incumbent.left == 0:
            break
        seconds, overflow = incumbent.offer(lower_staged(incumbent.space, plan))
        best_s = min(best_s, seconds if overflow <= 0.0 else float("inf"))
        if incumbent.finished:
            break
    return best_s


def fastest_staged(incumbent: Incumbent, plans: Iterable[StagedPlan], count: int) -> list[StagedPlan]:
    """The fastest of many plans, those that fit before the others, until the budget ends.

    Plans that do not obey the user's `hints.fix` are left out. Each plan counts as one evaluation, and is not verified:
    to become the plan of the search it must be priced by `price_staged`.

    Args:
        incumbent: prices the plans.
        plans: the plans.
        count: number of plans to return.
    """
    found: list[tuple[bool, float, StagedPlan]] = []
    for plan in plans:
        if not obeys(incumbent.space.problem.hints.fix, plan):
            continue
        if incumbent.left == 0 or (incumbent.left == 1 and found):
            break
        if incumbent.left == 1:
            return [plan]  # `price_staged` needs the last evaluation.
        outcome = incumbent.space.evaluator.evaluate(lower_staged(incumbent.space, plan))
        incumbent.count(1)
        found.append((not outcome.fits, outcome.step_time_s, plan))
        if incumbent.finished:
            break
    return [plan for _, _, plan in sorted(found, key=lambda one: one[:2])[:count]]


def obeys(fix: Fix, plan: StagedPlan) -> bool:
    """Whether a plan without virtual stages has the degrees that the user has fixed."""
    stages = [(len(stage.devices) // stage.tp, stage.tp) for stage in plan.stages]
    return fix.pp in (None, len(stages)) and all(fix.dp in (None, dp) and fix.tp in (None, tp) for dp, tp in stages)


def consecutive(counts: Sequence[int], order: Sequence[int]) -> list[tuple[int, ...]]:
    """The devices of each stage: the stages take `counts` devices one after the other, in the given order."""
    ends = np.cumsum([0, *counts]).tolist()
    return [tuple(order[a:b]) for a, b in itertools.pairwise(ends)]
