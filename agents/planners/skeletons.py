"""Frames: shapes, cuts, recomputation and ZeRO for planners that find the best signatures of a given one.

The templates give the frames to begin with, the best of each mesh first. In a frame a planner solves at the slopes of
a plan; what it finds is priced exactly and gives new slopes, averaged with those before. Then plans next to the best
are priced in whole batches: one group's joint signatures changed, one cut, one rank's recomputation, another ZeRO
stage, other numbers of micro-batches and virtual stages; where the latter win, their frame is solved as well. Only
exact prices decide. Nothing depends on the clock but the end of a budget in seconds.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agents.incumbent import Incumbent
from agents.planners.pipeline_cuts import cut_anew
from agents.sampling.expert import grid
from agents.searcher import Budget, OnProgress, SearchResult, ShouldStop
from automap.cost_graph.graph import CostGraph, Known
from automap.cost_graph.sensitivities import Slopes, slopes
from automap.plan import Plan
from automap.problem import Problem
from automap.space.batch_shares import NUM_WAYS
from automap.space.space import PlanSpace, Values

Floats = npt.NDArray[np.float64]

EVALUATIONS_A_SOLVE = 50
"""Of a budget in evaluations one solve is granted for so many, and `FEWEST_SOLVES` in any case: each prices but a few
plans, and the search must end some time."""
FEWEST_SOLVES = 12
TURNS = 3
"""After so many frames less one that were waiting, one is worked out."""
ROUNDS = 4
"""Solves in a frame at most."""
WORTH_POLISHING = 1.05
"""Frames are polished whose best plan takes at most so many times the best of all."""
LATER = 0.005
"""What a turn of a mesh adds to the rank of its other frames, as a share."""
TRIED_CUTS = 4
"""Ends of a chunk, those nearest to its share first."""
TRIED_ORDERS = 8
"""Of the devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A plan of a frame with its exact price."""

    picked: tuple[int, ...]
    seconds: float
    overflow: float

    @property
    def worth(self) -> tuple[bool, float]:
        """Sorts what fits by time before what does not by overflow."""
        return (self.overflow > 0.0, self.seconds if self.overflow <= 0.0 else self.overflow)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What a planner is given: a graph, the slopes at a plan of it, and a way to price."""

    graph: CostGraph
    picked: tuple[int, ...]
    """The plan at hand."""
    slopes: Slopes
    """At it."""
    time: Floats
    """[rows, C_COUNT] slopes of the step time, averaged over the plans so far."""
    incumbent: Incumbent

    def price(self, picked: tuple[int, ...]) -> Candidate:
        """The exact price; the incumbent takes note."""
        ((seconds, overflow),) = self.incumbent.price([self.graph.values(picked)]).tolist()
        return Candidate(picked=picked, seconds=seconds, overflow=overflow)


Propose = Callable[[Frame], list[Candidate]]
"""Prices what a planner thinks best at the slopes of a frame, at least one plan."""


def run_frames(space: PlanSpace, incumbent: Incumbent, propose: Propose, *, start: Sequence[Values]) -> None:
    """Solves frames until the budget ends or nothing is left to try.

    Args:
        space: of the problem.
        incumbent: takes every plan.
        propose: the planner.
        start: plans whose frames are solved, the best first.
    """
    work = _Frames(space, incumbent, propose)
    waiting = _by_mesh(space, start)
    for turn in itertools.count():
        if work.finished:
            return
        if waiting and turn % TURNS:
            work.solve(waiting.pop(0), rounds=1)
        elif not work.finish_best() and not waiting:
            return


def _mesh(space: PlanSpace, values: Values) -> tuple[int, ...]:
    shape = space.shape(values)
    return (shape.tp, shape.middle, *space.stage_devices(values))


def _by_mesh(space: PlanSpace, plans: Sequence[Values]) -> list[Values]:
    """The first plan of each frame: first the first frames of all meshes, then their second ones."""
    frames: dict[Values, Values] = {}
    for values in plans:
        frames.setdefault(values[: space.first_signature], values)
    turns: Counter[tuple[int, ...]] = Counter()
    ranked = []
    for number, (frame, values) in enumerate(frames.items()):
        mesh = _mesh(space, frame)
        # Stages of unlike size come a turn later: there are many ways, and each has unlike costs to look at.
        late = len(set(space.stage_devices(frame))) > 1
        ranked.append((turns[mesh] + late, number, values))
        turns[mesh] += 1
    return [values for _, _, values in sorted(ranked)]


class _Frames:
    """The best plan of each frame so far."""

    def __init__(self, space: PlanSpace, incumbent: Incumbent, propose: Propose) -> None:
        self.space, self.incumbent, self.propose = space, incumbent, propose
        self.best: dict[Values, tuple[tuple[bool, float], Values]] = {}
        self.done: set[Values] = set()
        self._turns: Counter[tuple[int, ...]] = Counter()
        self._graphs: dict[Values, CostGraph] = {}
        self._known = Known(space)
        self._solves = 0
        left = incumbent.left
        self._most_solves = np.inf if left is None else max(FEWEST_SOLVES, left // EVALUATIONS_A_SOLVE)

    @property
    def finished(self) -> bool:
        """Whether the budget has ended."""
        return self.incumbent.finished or self._solves >= self._most_solves

    def solve(self, values: Values, *, rounds: int) -> None:
        """Solves the frame of `values`, at slopes there first."""
        frame = values[: self.space.first_signature]
        graph = self._graph(frame)
        picked = graph.picked(values)
        if picked is None:
            picked = tuple(0 for _ in graph.nodes)
        time: Floats | None = None
        seen = {picked}
        for _ in range(rounds):
            at = slopes(graph.units, graph.chosen(picked))
            time = at.time if time is None else 0.5 * (time + at.time)
            self._solves += 1
            found = self.propose(Frame(graph=graph, picked=picked, slopes=at, time=time, incumbent=self.incumbent))
            for one in found:
                self._note(graph.values(one.picked), one.worth)
            picked = min(found, key=lambda one: one.worth).picked
            if picked in seen or self.finished:
                return
            seen.add(picked)

    def _graph(self, frame: Values) -> CostGraph:
        if frame not in self._graphs:
            if len(self._graphs) > 64:
                self._graphs.pop(next(iter(self._graphs)))
            self._graphs[frame] = CostGraph(self.space, frame, self._known)
        return self._graphs[frame]

    def _note(self, values: Values, worth: tuple[bool, float]) -> None:
        frame = values[: self.space.first_signature]
        if frame not in self.best or worth < self.best[frame][0]:
            self.best[frame] = (worth, values)

    def finish_best(self) -> bool:
        """Works out the best frame that was not yet: more rounds, then its neighbours. False where none is left.

        Frames of a mesh that has had its turns come a little later.
        """
        frames = [frame for frame in self.best if frame not in self.done]
        if not frames:
            return False

        def rank(frame: Values) -> tuple[bool, float, Values]:
            (is_over, worth), _ = self.best[frame]
            return is_over, worth * (1.0 + LATER * self._turns[_mesh(self.space, frame)]), frame

        frame = min(frames, key=rank)
        self._turns[_mesh(self.space, frame)] += 1
        self.done.add(frame)
        self.solve(self.best[frame][1], rounds=ROUNDS)
        worth, values = self.best[frame]
        if worth[0] or worth[1] <= WORTH_POLISHING * self.incumbent.best_s:
            self._polish(values)
            self._price(self._neighbours(self.best[frame][1]))
        return True

    def _price(self, plans: Sequence[Values]) -> list[tuple[bool, float]]:
        """Worth of plans, as many of the first of them as the budget allows."""
        left = self.incumbent.left
        room = len(plans) if left is None else min(len(plans), left)
        if room <= 0:
            return []
        found = []
        for values, (seconds, overflow) in zip(plans, self.incumbent.price(plans[:room]).tolist(), strict=False):
            found.append((overflow > 0.0, seconds if overflow <= 0.0 else overflow))
            self._note(values, found[-1])
        return found

    def _polish(self, values: Values) -> None:
        """Changes the joint signatures of one group after the other, each time all that gain together."""
        graph = self._graph(values[: self.space.first_signature])
        picked = graph.picked(values)
        while picked is not None and not self.incumbent.finished:
            worth, _ = self.best[graph.frame]
            moves = [(n, v) for n, node in enumerate(graph.nodes) for v in range(len(node.values)) if v != picked[n]]
            found = self._price([graph.values(_moved(picked, [move])) for move in moves])
            gains: dict[int, tuple[tuple[bool, float], tuple[int, int]]] = {}
            for move, one in zip(moves, found, strict=False):
                if one < worth:
                    gains[move[0]] = min(gains.get(move[0], (one, move)), (one, move))
            ranked = [move for _, move in sorted(gains.values())]
            joint = [graph.values(_moved(picked, ranked[:count])) for count in range(2, len(ranked) + 1)]
            self._price(joint)
            picked = graph.picked(self.best[graph.frame][1]) if ranked else None

    def _neighbours(self, values: Values) -> list[Values]:
        """Plans of other frames on the same mesh with the signatures of `values`, where those are legal there."""
        space, first = self.space, self.space.first_signature
        shape = space.shape(values)
        found: list[list[int]] = []
        tried = {"cut": TRIED_CUTS, "recompute": len(space.modes), "zero": len(space.zeros)}
        tried["shares"] = NUM_WAYS
        tried["order"] = min(TRIED_ORDERS, space.meshes.num_orders(shape.pp))
        if shape.pp > 1 and shape.virtual == 1:
            tried["schedule"] = len(space.schedules)
        idle = {"cut": shape.num_chunks - 1, "recompute": shape.pp}
        for at, slot in enumerate(space.slots[:first]):
            if slot.index < idle.get(slot.kind, 1):
                others = range(min(slot.num_values, tried.get(slot.kind, 0)))
                found += [[*values[:at], other, *values[at + 1 :]] for other in others if other != values[at]]
        ranks = range(space.first_recompute, space.first_recompute + shape.pp)
        for mode in np.flatnonzero(space.modes).tolist():
            found.append([mode if at in ranks else v for at, v in enumerate(values)])
        for other in space.shapes:
            if other != shape and (other.pp, other.tp, other.middle) == (shape.pp, shape.tp, shape.middle):
                row = space.meshes.values(other)
                plan = [*row, *values[len(row) :]]
                if other.virtual != shape.virtual:
                    plan[space.first_cut : space.first_recompute] = [0] * (space.first_recompute - space.first_cut)
                if other.virtual > 1:
                    plan[space.first_stage] = 0
                found.append(plan)
        frames = dict.fromkeys([*(v[:first] for v in cut_anew(space, values)), *map(self._settled, found)])
        fresh = [frame for frame in frames if frame != values[:first] and frame not in self.best]
        return [self._known.with_signatures(frame, values[first:]) for frame in fresh]

    def _settled(self, plan: Sequence[int]) -> Values:
        """The frame of a plan whose shape is legal: all else of it kept as far as it is legal."""
        space = self.space
        shape = space.shape(plan)
        first = space.first_stage + 2
        frame = list(plan[: first if any(plan[first : space.first_cut]) else space.first_cut])
        for slot in space.slots[len(frame) : space.first_signature]:
            value = plan[len(frame)]
            if slot.index >= {"cut": shape.num_chunks - 1, "recompute": shape.pp, "zero": 1}.get(slot.kind, shape.pp):
                frame.append(0)
                continue
            legal = space.legal(frame)
            frame.append(int(value) if legal[value] else int(np.flatnonzero(legal)[0]))
        return tuple(frame)


def _moved(picked: tuple[int, ...], moves: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    changed = dict(moves)
    return tuple(changed.get(n, v) for n, v in enumerate(picked))


def search_frames(
    problem: Problem,
    budget: Budget,
    propose: Propose,
    name: str,
    *,
    seed: int,
    on_progress: OnProgress,
    should_stop: ShouldStop,
    start: Sequence[Plan] = (),
) -> SearchResult:
    """The best plan of a planner alone: frames of `start`, then those of all templates; see `Searcher`."""
    space = PlanSpace(problem)
    incumbent = Incumbent(space, budget, searcher=name, on_progress=on_progress, should_stop=should_stop)
    given = [values for values in map(space.encode, start) if values is not None]
    if given:
        incumbent.price(given)
    templates = grid(space, incumbent)
    fitting = np.flatnonzero(templates.prices[:, 1] <= 0.0)
    ranked = templates.values[fitting[np.argsort(templates.prices[fitting, 0], kind="stable")]]
    known = [*given, *(tuple(row) for row in ranked.tolist())] or [
        values for values in [incumbent.nearest] if values is not None
    ]
    run_frames(space, incumbent, propose, start=known)
    return incumbent.result(seed=seed, baselines=templates.baselines)
