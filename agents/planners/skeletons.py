"""Skeletons: plans without their signatures, for planners that find the best signatures of a given skeleton.

A skeleton is the values of all decisions before the first signature: shape, cuts, recomputation, ZeRO. The first
skeletons are those of the templates, the best one of each mesh first.

A planner solves the cost graph of a skeleton at the sensitivities of a plan. The plan that it finds is priced exactly
and gives new sensitivities, which are averaged with those before. Then plans near the best one are priced, many in one
call: the joint signatures of one group changed, as little recomputation as fits, one cut, another ZeRO stage, other
numbers of micro-batches and virtual stages. If a plan with another skeleton is faster, that skeleton is solved as well.
Only exact prices decide. Only the end of a budget in seconds depends on the clock.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container

import numpy as np

from agents.incumbent import Incumbent
from agents.planners.chunk_moves import moved
from agents.planners.linearization import ROUNDS_TO_FIT, Linearization, Propose, Worth, worth_of
from agents.planners.neighbouring_skeletons import neighbouring_skeletons, repaired, with_other_shares, with_other_zero
from agents.planners.pipeline_cuts import cut_anew
from agents.planners.promising import split_axes
from agents.planners.recompute_less import made_to_fit, recompute_less
from agents.sampling.expert import Grid
from automap.arrays import Floats
from automap.cost_graph.graph import CostGraph, CostGraphCache
from automap.cost_graph.sensitivities import sensitivities
from automap.space.shape import Shape
from automap.space.space import Ints, Values

EVALUATIONS_A_SOLVE = 50
"""Evaluations of a budget for which one solve is granted (assumed): a solve prices only a few plans, and the search
must end some time."""
FEWEST_SOLVES = 12
"""Number of solves that are granted in any case (assumed)."""
ROUNDS = 4
"""Largest number of solves when a skeleton is worked out."""
WORTH_POLISHING = 1.05
"""A skeleton is polished if its best plan takes at most this many times the step time of the best plan of all."""
LATER = 0.005
"""Share by which each turn of a mesh raises the rank of its other skeletons."""
CLIMBS = 3
"""Number of times at most that changes which gain alone are made together, see `SkeletonSearch.look_around`."""
KEPT = 64
"""Number of skeletons whose best plan is shown to other searchers, at most."""
SAME = 0.001
"""Share by which two step times differ at least, or else the plans count as the same on two meshes (assumed)."""
CUT_ANEW = 2
"""Number of neighbours with other micro-batches or virtual stages, the most promising ones, that are cut again, of each
number of virtual stages one at most; near the best plan all are."""
NEARLY_FITS = 0.2
"""Overflow up to which other cuts or another stage of ZeRO may make a plan fit, as share of a device's memory
(assumed)."""
PAIRED = 24
"""Number of changes of one group's signatures, the best ones, of which two are made at once where none gains alone
(assumed)."""
REFINED = 4
"""Number of times at most that all kinds of changes are tried in turn, see `SkeletonSearch.refine`."""

Mesh = tuple[int, ...]
"""tp, the size of the middle axis, and the devices of each stage."""
Kind = tuple[Mesh, int]
"""A mesh and the number of virtual stages, in which 2 may stand for all numbers above 1."""


class SkeletonSearch:
    """The skeletons that a planner has solved.

    Attributes:
        best: worth and values of the best plan of each skeleton so far.
        done: skeletons that have been worked out.
        taken: skeletons that were proposed or promising and have been solved.
        begun: plans from which descents began.
        ended: plans from which a descent led nowhere else.
        lightened: skeletons that were solved because they are those of good plans without their recomputation.
        interleaved: shapes whose other numbers of virtual stages have been tried.
        split: sets of axes over which solved skeletons split work, see `split_axes`.
    """

    def __init__(self, incumbent: Incumbent, propose: Propose, fewest_solves: int = FEWEST_SOLVES) -> None:
        """Begins a search.

        Args:
            incumbent: prices every plan; what is left of its budget in evaluations limits the number of solves.
            propose: the planner.
            fewest_solves: number of solves that are granted in any case.
        """
        self.space, self.incumbent, self.propose = incumbent.space, incumbent, propose
        self.best: dict[Values, tuple[Worth, Values]] = {}
        self.done: set[Values] = set()
        self.taken: set[Values] = set()
        self.split: set[tuple[bool, ...]] = set()
        self.begun: set[Values] = set()
        self.ended: set[Values] = set()
        self.lightened: set[Values] = set()
        self.interleaved: set[Shape] = set()
        self._refined: dict[Values, bool] = {}
        self._turns: Counter[Mesh] = Counter()
        self._meshes: dict[Values, Mesh] = {}
        self._graphs: dict[Values, CostGraph] = {}
        self._cache = CostGraphCache(self.space)
        self._tried: set[Values] = set()
        self._solves = 0
        left = incumbent.left
        self._most_solves = np.inf if left is None else max(fewest_solves, left // EVALUATIONS_A_SOLVE)

    def begin_with(self, plans: Ints) -> None:
        """Learns of plans, which are not counted, and grants as many solves as what is left of the budget allows."""
        for values, price in zip(map(tuple, plans.tolist()), self.space.price(plans).tolist(), strict=True):
            self._keep(values, worth_of(*price))
        left = self.incumbent.left
        self._most_solves = np.inf if left is None else self._solves + max(FEWEST_SOLVES, left // EVALUATIONS_A_SOLVE)

    def mesh(self, skeleton: Values) -> Mesh:
        """The mesh of a skeleton."""
        # The slots after `shares` change nothing of it.
        decided = skeleton[: self.space.first.shares]
        if decided not in self._meshes:
            shape = self.space.shape(decided)
            self._meshes[decided] = (shape.tp, shape.middle, *self.space.stage_devices(decided))
        return self._meshes[decided]

    def allow(self, solves: int) -> None:
        """Makes sure that at least `solves` further solves are granted, in a budget in evaluations."""
        self._most_solves = max(self._most_solves, self._solves + solves)

    def grant(self, solves: int) -> None:
        """Grants `solves` more solves, in a budget in evaluations."""
        self._most_solves += solves

    @property
    def finished(self) -> bool:
        """Whether the budget has ended."""
        return self.incumbent.finished or self._solves >= self._most_solves

    def plans(self, most: int | None = KEPT) -> Grid:
        """The best plan of each of the `most` best skeletons, the best first; None = of all skeletons."""
        found = [values for _, values in sorted(self.best.values())[:most]]
        rows = np.array(found, dtype=np.int64).reshape(len(found), len(self.space.slots))
        return Grid(rows, self.space.price(rows))

    def solve(self, values: Values, *, rounds: int) -> list[Values]:
        """Solves the skeleton of a plan, the first time at the sensitivities of this plan.

        Args:
            values: the plan.
            rounds: number of solves at most, each at the last plan; then `ROUNDS_TO_FIT` where none of its plans fits.

        Returns:
            Plans of the last solve that do not fit, faster than the best one known with the skeleton where that fits:
            the fastest, and the fastest that overflows memory by at most `NEARLY_FITS`.
        """
        self.split.add(split_axes(self.space, values))
        graph = self._graph(values[: self.space.first.signature])
        picked = graph.picked(values) or tuple(0 for _ in graph.nodes)
        given_s = float(self.space.price(np.array([values]))[0, 0])
        time, seen = None, {picked}
        for done in range(rounds + ROUNDS_TO_FIT):
            at = sensitivities(graph.units, graph.chosen(picked))
            time = at.time if time is None else 0.5 * (time + at.time)
            self._solves += 1
            near = graph.around(picked)
            found = self.propose(Linearization(graph=near, picked=picked, at=at, time=time, incumbent=self.incumbent))
            for one in found:
                self._keep(graph.values(one.picked), one.worth)
            best = min(found, key=lambda one: one.worth)
            picked = best.picked
            if picked in seen or self.finished:
                break
            seen.add(picked)
            may_win = best.overflow > 0.0 and min(given_s, *(one.seconds for one in found)) < self.incumbent.best_s
            if done + 1 >= rounds and not may_win:
                break
        (is_over, best_s), _ = self.best[graph.skeleton]
        over = [one for one in found if one.overflow > 0.0 and (is_over or one.seconds < best_s)]
        nearly = [one for one in over if one.overflow <= NEARLY_FITS]
        fastest = [min(some, key=lambda one: one.seconds) for some in ([] if is_over else over, nearly) if some]
        return list(dict.fromkeys(graph.values(one.picked) for one in fastest))

    def is_worth_polishing(self, worth: Worth) -> bool:
        """Whether a plan of this worth fits and is near the best plan of all."""
        is_over, seconds = worth
        return not is_over and seconds <= WORTH_POLISHING * self.incumbent.best_s

    def _graph(self, skeleton: Values) -> CostGraph:
        if skeleton not in self._graphs:
            if len(self._graphs) > 64:
                self._graphs.pop(next(iter(self._graphs)))
            self._graphs[skeleton] = CostGraph(self.space, skeleton, self._cache)
        return self._graphs[skeleton]

    def _keep(self, values: Values, worth: Worth) -> None:
        """Keeps a plan if it is the best of its skeleton."""
        skeleton = values[: self.space.first.signature]
        if skeleton not in self.best or worth < self.best[skeleton][0]:
            self.best[skeleton] = (worth, values)

    def work_out_best(self) -> bool:
        """Solves the best skeleton that was not yet worked out further, then prices the neighbours of its best plan.

        Skeletons of a mesh that has had several turns come a little later. Returns False where no skeleton is left.
        """
        left = [skeleton for skeleton in self.best if skeleton not in self.done]
        if not left:
            return False

        def rank(skeleton: Values) -> tuple[bool, float, Values]:
            (is_over, worth), _ = self.best[skeleton]
            return is_over, worth * (1.0 + LATER * self._turns[self.mesh(skeleton)]), skeleton

        skeleton = min(left, key=rank)
        self._turns[self.mesh(skeleton)] += 1
        self.done.add(skeleton)
        self.solve(self.best[skeleton][1], rounds=ROUNDS)
        worth, values = self.best[skeleton]
        if worth[0] or self.is_worth_polishing(worth):
            self._polish(values)
            self.price(self.neighbours(self.best[skeleton][1]))
        return True

    def best_of_kinds(self, *, each_number: bool = False) -> list[Values]:
        """The best plan of each mesh with and without virtual stages so far, the best first.

        Of meshes with the same stages whose best plans are equally fast only one is there: they may split nothing more.

        Args:
            each_number: whether plans with unlike numbers of virtual stages are of unlike kinds.
        """
        kinds: set[Kind] = set()
        steps: dict[Kind, list[float]] = {}
        found = []
        for (is_over, step_s), values in sorted(self.best.values()):
            kind = self._kind(values, each_number)
            if is_over or kind in kinds:
                continue
            kinds.add(kind)
            alike = steps.setdefault((kind[0][2:], kind[1]), [])
            if all(step_s > other * (1.0 + SAME) for other in alike):
                alike.append(step_s)
                found.append(values)
        return found

    def _kind(self, values: Values, each_number: bool) -> Kind:
        virtual = self.space.shape(values).virtual
        return self.mesh(values[: self.space.first.signature]), virtual if each_number else min(virtual, 2)

    def share_out(self, values: Values) -> None:
        """Prices a plan with each way to share out samples, where devices of a stage are unlike."""
        plans = with_other_shares(self.space, values)
        self.price(np.array(plans, dtype=np.int64).reshape(len(plans), len(values)))

    def try_around(self, values: Values) -> None:
        """Solves the skeleton of a plan, then prices the neighbours of what is found, and cuts some of them again.

        Those with other numbers of micro-batches or of virtual stages are cut again which promise most, and so are
        those with another order of the devices: the cuts at hand do not suit them. Near the best plan none is left out.
        """
        first = self.space.first
        self.solve(values, rounds=1)
        plans = self.neighbours(self.best[values[: first.signature]][1], again=True)
        prices = self.prices(plans)
        plans = plans[: len(prices)]
        shapes = (plans[:, first.micro_batches : first.schedule] != values[first.micro_batches : first.schedule]).any(1)
        orders = plans[:, first.order] != values[first.order]
        for some, kind, most in ((shapes, first.virtual, CUT_ANEW), (orders, first.order, 1)):
            rows, of_kind = np.flatnonzero(some), dict[int, int]()
            for row in rows[by_promise(prices[rows])].tolist():
                of_kind.setdefault(int(plans[row, kind]), row)
            for row in list(of_kind.values())[: None if self.is_near(values) else most]:
                if not self.finished:
                    self._cut_neighbour(tuple(plans[row].tolist()), float(prices[row, 1]), moves=kind == first.order)

    def _cut_neighbour(self, values: Values, overflow: float, *, moves: bool) -> None:
        """Cuts a plan with this overflow again, also under the stage of ZeRO with which it is the fastest that fits.

        Where it `moves`, units also move between its chunks: new cuts do not see how far apart links are.
        """
        zeros = [values, *(with_other_zero(self.space, values) if overflow > 0.0 else ())]
        prices = self.prices(np.array(zeros, dtype=np.int64))
        if self.finished or not len(prices):
            return
        fitting = np.flatnonzero(prices[:, 1] <= 0.0)
        begins = dict.fromkeys([int(by_promise(prices)[0]), *fitting[prices[fitting, 0].argsort()][:1].tolist()])
        cuts = [cut for number in begins for cut in cut_anew(self.space, zeros[number])]
        candidates = dict.fromkeys(plan for cut in cuts for plan in (cut, *recompute_less(self.space, cut)))
        candidates |= dict.fromkeys(moved(self.space, zeros[number], also_evenly=True) for number in begins if moves)
        self.price(np.array(list(candidates), dtype=np.int64).reshape(len(candidates), len(values)))

    def refine(self, values: Values, *, polishes: bool, each_number: bool = False) -> None:
        """Improves a plan on its mesh until nothing gains: neighbours, units moved between chunks.

        Args:
            values: the plan.
            polishes: whether all changes of joint signatures are tried as well, which takes many prices.
            each_number: whether the number of virtual stages stays.
        """
        first = self.space.first.signature
        kind, worth = self._kind(values, each_number), self.best[values[:first]][0]

        def best() -> tuple[Worth, Values]:
            return min(one for one in self.best.values() if self._kind(one[1], each_number) == kind)

        for _ in range(REFINED):
            self.try_around(values)
            values = best()[1]
            self.price(np.array([moved(self.space, values, also_evenly=True)], dtype=np.int64))
            values = best()[1]
            if polishes and not self.finished:
                self._polish(values)
            before = worth
            worth, values = best()
            if self.finished or worth >= before:
                break
        self._refined[values] = polishes or self._refined.get(values, False)

    def is_refined(self, values: Values, *, polishes: bool) -> bool:
        """Whether `refine` has ended with a plan."""
        return values in self._refined and (self._refined[values] or not polishes)

    def is_near(self, values: Values) -> bool:
        """Whether the best plan with the skeleton of a plan fits and is near the best plan of all."""
        return self.is_worth_polishing(self.best[values[: self.space.first.signature]][0])

    def look_around(self, values: Values, step_time_s: float, overflow: float) -> None:
        """Prices the neighbours of a plan with this price on its mesh, then those changes together that gain alone.

        Of each decision the best change is taken. While the changes together are better than any single one, the same
        is done around the plan that they give, `CLIMBS` times at most.
        """
        worth = worth_of(step_time_s, overflow)
        self._keep(values, worth)
        for _ in range(CLIMBS):
            plans = self.neighbours(values)
            gains: dict[int, tuple[Worth, int]] = {}
            found = self.price(plans)
            for plan, one in zip(plans, found, strict=False):
                changed = np.flatnonzero(plan[: self.space.first.signature] != values[: self.space.first.signature])
                if one < worth and len(changed) == 1:
                    at, gain = int(changed[0]), (one, int(plan[changed[0]]))
                    gains[at] = min(gains.get(at, gain), gain)
            if len(gains) < 2:
                return
            together, steps = list(values), []
            for _, at, value in sorted((one, at, value) for at, (one, value) in gains.items()):
                together[at] = value
                steps.append(repaired(self.space, together, values))
            plans = np.array(steps[1:], dtype=np.int64)
            joint = self.price(plans)
            if not joint or min(joint) >= min(found):
                return
            best = min(range(len(joint)), key=joint.__getitem__)
            values, worth = tuple(plans[best].tolist()), joint[best]

    def price(self, plans: Ints) -> list[Worth]:
        """Prices plans, [n, slots], as many of the first ones as the budget allows, and returns their worth."""
        return [worth_of(seconds, overflow) for seconds, overflow in self.prices(plans).tolist()]

    def prices(self, plans: Ints) -> Floats:
        """[n, 2] seconds of a step and overflow of memory of plans, [n, slots], of as many as the budget allows."""
        left, first = self.incumbent.left, self.space.first.signature
        plans = plans[:left]
        if not len(plans):
            return np.empty((0, 2))
        prices = self.incumbent.price(plans)
        for row, price in zip(plans, prices.tolist(), strict=True):
            skeleton, worth = tuple(row[:first].tolist()), worth_of(*price)
            if skeleton not in self.best or worth < self.best[skeleton][0]:
                self.best[skeleton] = worth, tuple(row.tolist())
        return prices

    def _polish(self, values: Values) -> None:
        """Tries every change of one group's joint signatures, then all changes that gain together, until none gains.

        Where none gains alone, two of the best ones are made at once (an embedding and the scores that share its
        parameter gain only together), and those that nearly fit are made to fit.
        """
        graph = self._graph(values[: self.space.first.signature])
        picked = graph.picked(values)
        while picked is not None and not self.incumbent.finished:
            worth, _ = self.best[graph.skeleton]
            moves = [(n, v) for n, node in enumerate(graph.nodes) for v in range(len(node.values)) if v != picked[n]]
            plans = graph.moved(picked, [[move] for move in moves])[: self.incumbent.left]
            prices = self.prices(plans)
            by_worth = sorted(zip((worth_of(*price) for price in prices.tolist()), moves, strict=False))
            gains: dict[int, tuple[int, int]] = {}
            for one, move in by_worth:
                if one < worth:
                    gains.setdefault(move[0], move)
            ranked = list(gains.values())
            together = [ranked[:count] for count in range(2, len(ranked) + 1)]
            if not ranked:
                pairs = itertools.combinations(sorted(move for _, move in by_worth[:PAIRED]), 2)
                together = [[one, other] for one, other in pairs if (one[0], other[0]) in graph.linked]
            self.price(graph.moved(picked, together))
            after, plan = self.best[graph.skeleton]
            picked = graph.picked(plan) if after < worth else None
            if picked is None and not worth[0]:
                over = (prices[:, 1] > 0.0) & (prices[:, 1] <= NEARLY_FITS) & (prices[:, 0] < worth[1])
                self.price(made_to_fit(self.space, plans[over], prices[over, 0]))

    def neighbours(self, values: Values, *, again: bool = False) -> Ints:
        """[n, slots] the neighbours of a plan that have other skeletons (`neighbouring_skeletons`).

        Args:
            values: the plan.
            again: whether skeletons are tried again of which plans with other signatures are known.
        """
        first = self.space.first.signature
        known: Container[Values] = self._tried if again else self.best
        fresh = [
            plan
            for plan in neighbouring_skeletons(self.space, values)
            if plan[:first] != values[:first] and (plan if again else plan[:first]) not in known
        ]
        if again:
            self._tried.update(fresh)
        return np.array(fresh, dtype=np.int64).reshape(len(fresh), len(values))


def by_promise(prices: Floats) -> Ints:
    """Numbers of plans, those first that may be the fastest when they are made to fit.

    Args:
        prices: [n, 2] seconds of a step and overflow of memory.
    """
    over = prices[:, 1] > NEARLY_FITS
    ranked: Ints = np.lexsort((np.where(over, prices[:, 1], prices[:, 0]), over))
    return ranked
