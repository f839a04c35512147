"""Skeletons: plans without their signatures, for planners that find the best signatures of a given skeleton.

A skeleton is the values of all decisions before the first signature: shape, cuts, recomputation, ZeRO. The first
skeletons are those of the templates, the best one of each mesh first.

A *solve* takes a plan, makes the costs of its skeleton linear at this plan (the sensitivities), and lets a planner find
the best signatures under these costs. The plan that is found is priced exactly and gives new sensitivities, which are
averaged with those before. To *polish* a plan is to price all plans that differ from it in the joint signatures of one
linkage group. To *refine* a plan is to price, many in one call, its neighbours with other skeletons, with other cuts
and with other signatures, until none is better. If a neighbour is faster, its skeleton is solved as well.

Exact prices alone decide which plan is better. The clock matters only for the end of a budget in seconds.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container

import numpy as np

from agents.incumbent import Incumbent
from agents.planners.chunk_moves import moved
from agents.planners.linearization import ROUNDS_TO_FIT, Linearization, Propose, Worth, misled, worth_of
from agents.planners.neighbouring_skeletons import neighbouring_skeletons, repaired, with_other_shares, with_other_zero
from agents.planners.pipeline_cuts import cut_anew
from agents.planners.promising_templates import split_axes
from agents.planners.recompute_less import made_to_fit, recompute_less
from agents.sampling.expert import Grid
from automap.arrays import Floats
from automap.cost_graph.graph import CostGraph, CostGraphCache
from automap.cost_graph.sensitivities import sensitivities
from automap.space.shape import Shape
from automap.space.space import Ints, Values

EVALUATIONS_A_SOLVE = 50
"""A search may make one solve for each so many evaluations of its budget (assumed). A solve prices only a few plans, so
that evaluations alone would hardly limit the time."""
FEWEST_SOLVES = 12
"""Number of solves that a search may make in any case (assumed)."""
ROUNDS = 4
"""Largest number of solves of a skeleton in `SkeletonSearch.work_out_best` (assumed)."""
WORTH_POLISHING = 1.05
"""A plan is polished if it takes at most this many times the step time of the best plan of the search."""
LATER = 0.005
"""Each turn of a mesh makes its other skeletons count as slower by this share, so that other meshes have turns too."""
CLIMBS = 3
"""Largest number of rounds of `SkeletonSearch.look_around` (assumed)."""
KEPT = 64
"""Largest number of skeletons whose best plan is shown to other searchers (assumed)."""
SAME = 0.001
"""Plans on two meshes count as the same if their step times differ by at most this share (assumed)."""
CUT_ANEW = 2
"""Number of neighbours with other micro-batches or virtual stages that are cut again (assumed): the most promising
ones, at most one for each number of virtual stages. Around a plan near the best one there is no limit."""
NEARLY_FITS = 0.2
"""Largest overflow, a share of a device's memory, that other cuts or ZeRO stages can remove (assumed)."""
PAIRED = 24
"""Number of the best single changes of signatures that are combined in pairs where none gains alone (assumed)."""
REFINED = 4
"""Largest number of rounds of `SkeletonSearch.refine` (assumed)."""

Mesh = tuple[int, ...]
"""tp, the size of the middle axis, and the devices of each stage."""
Kind = tuple[Mesh, int]
"""A mesh and the number of virtual stages, in which 2 may stand for all numbers above 1."""


class SkeletonSearch:
    """Solves skeletons with one planner, and keeps the best plan of each.

    Attributes:
        best: skeleton -> worth and values of its best plan so far.
        done: skeletons that `work_out_best` has taken.
        taken: proposed or promising skeletons that have been solved.
        begun: plans from which descents have begun.
        ended: plans at which a descent found nothing better.
        lightened: skeletons of good plans with less recomputation, or another ZeRO stage, that have been solved.
        interleaved: shapes whose other numbers of virtual stages have been tried.
        split: sets of axes over which solved skeletons split work, see `split_axes`.
    """

    def __init__(self, incumbent: Incumbent, propose: Propose) -> None:
        """Begins a search.

        Args:
            incumbent: prices every plan; the rest of its budget in evaluations limits the number of solves.
            propose: the planner.
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
        self._most_solves = np.inf if left is None else max(FEWEST_SOLVES, left // EVALUATIONS_A_SOLVE)

    def begin_with(self, plans: Ints) -> None:
        """Adds plans, [n, slots], that do not count as evaluations, and limits solves by the rest of the budget."""
        for values, price in zip(map(tuple, plans.tolist()), self.space.price(plans).tolist(), strict=True):
            self.keep(values, worth_of(*price))
        left = self.incumbent.left
        self._most_solves = np.inf if left is None else self._solves + max(FEWEST_SOLVES, left // EVALUATIONS_A_SOLVE)

    def mesh(self, skeleton: Values) -> Mesh:
        """The mesh of a skeleton."""
        # No slot from `shares` on changes the mesh.
        decided = skeleton[: self.space.first.shares]
        if decided not in self._meshes:
            shape = self.space.shape(decided)
            self._meshes[decided] = (shape.tp, shape.middle, *self.space.stage_devices(decided))
        return self._meshes[decided]

    def allow(self, solves: int) -> None:
        """Raises the limit of solves so that at least `solves` more are possible."""
        self._most_solves = max(self._most_solves, self._solves + solves)

    def grant(self, solves: int) -> None:
        """Raises the limit of solves by `solves`."""
        self._most_solves += solves

    @property
    def finished(self) -> bool:
        """Whether the budget or the limit of solves has been reached."""
        return self.incumbent.finished or self._solves >= self._most_solves

    def plans(self, most: int | None = KEPT) -> Grid:
        """The best plans of the `most` best skeletons with their prices, the best first; None = of all skeletons."""
        found = [values for _, values in sorted(self.best.values())[:most]]
        rows = np.array(found, dtype=np.int64).reshape(len(found), len(self.space.slots))
        return Grid(rows, self.space.price(rows))

    def solve(self, values: Values, *, rounds: int) -> list[Values]:
        """Solves the skeleton of a plan; the plans found are kept in `best`.

        Args:
            values: values of the plan, whose sensitivities the first solve uses.
            rounds: largest number of solves, each at the plan that the one before has found. One more follows if the
                last one was `misled`, and up to `ROUNDS_TO_FIT` while one that fits might be the best of the search.

        Returns:
            At most two plans of the last solve that do not fit but might be made to fit. If the skeleton has a plan
            that fits, these are faster than it: the fastest one, and the fastest that overflows memory by at most
            `NEARLY_FITS`. Otherwise only the second of these two.
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
                self.keep(graph.values(one.picked), one.worth)
            best = min(found, key=lambda one: one.worth)
            picked = best.picked
            if picked in seen or self.finished:
                break
            seen.add(picked)
            may_win = best.overflow > 0.0 and min(given_s, *(one.seconds for one in found)) < self.incumbent.best_s
            is_misled = done + 1 == rounds and misled(best, given_s, self.incumbent.best_s)
            self.grant(int(is_misled))
            if done + 1 >= rounds and not (may_win or is_misled):
                break
        (is_over, best_s), _ = self.best[graph.skeleton]
        over = [one for one in found if one.overflow > 0.0 and (is_over or one.seconds < best_s)]
        nearly = [one for one in over if one.overflow <= NEARLY_FITS]
        fastest = [min(some, key=lambda one: one.seconds) for some in ([] if is_over else over, nearly) if some]
        return list(dict.fromkeys(graph.values(one.picked) for one in fastest))

    def is_worth_polishing(self, worth: Worth) -> bool:
        """Whether a plan of this worth fits and is nearly as fast as the best plan of the search."""
        is_over, seconds = worth
        return not is_over and seconds <= WORTH_POLISHING * self.incumbent.best_s

    def _graph(self, skeleton: Values) -> CostGraph:
        if skeleton not in self._graphs:
            if len(self._graphs) > 64:
                self._graphs.pop(next(iter(self._graphs)))
            self._graphs[skeleton] = CostGraph(self.space, skeleton, self._cache)
        return self._graphs[skeleton]

    def keep(self, values: Values, worth: Worth) -> None:
        """Keeps a plan if it is the best of its skeleton so far."""
        skeleton = values[: self.space.first.signature]
        if skeleton not in self.best or worth < self.best[skeleton][0]:
            self.best[skeleton] = (worth, values)

    def work_out_best(self) -> bool:
        """Solves the best skeleton that this method has not taken before; returns False if none is left.

        If the plan that is found does not fit, or is near the best plan of the search, it is polished and its
        neighbours are priced. Skeletons of a mesh that has had several turns come a little later (`LATER`).
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
        """The best plan so far of each mesh with virtual stages, and of each mesh without; the best first.

        If the best plans of two meshes with the same devices in each stage are equally fast, only the first one is
        returned: the axis that the other one adds probably splits nothing.

        Args:
            each_number: whether every number of virtual stages has a plan of its own.
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
        """The mesh of a plan and its number of virtual stages, or min(2, this number) unless `each_number`."""
        virtual = self.space.shape(values).virtual
        return self.mesh(values[: self.space.first.signature]), virtual if each_number else min(virtual, 2)

    def share_out(self, values: Values) -> None:
        """Prices a plan with other batch shares, where the cluster has hosts of several kinds."""
        plans = with_other_shares(self.space, values)
        self.price(np.array(plans, dtype=np.int64).reshape(len(plans), len(values)))

    def try_around(self, values: Values) -> None:
        """Solves the skeleton of a plan, prices the neighbours of the plan found, and cuts some of them again.

        The old cuts do not suit neighbours with other numbers of micro-batches or virtual stages, nor those with
        another order of the devices. So the most promising of them are cut again, and all of them near the best plan.
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
        """Cuts a plan again under two ZeRO stages: the most promising one and the fastest one with which it fits.

        Args:
            values: values of the plan.
            overflow: its overflow of memory; other ZeRO stages are tried only where it does not fit.
            moves: whether units also move between chunks, by exact simulation: `cut_anew` ignores how the order of the
                devices changes the links.
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
        """Improves a plan on its mesh until nothing gains: tries its neighbours and moves units between chunks.

        Args:
            values: values of the plan.
            polishes: whether all changes of joint signatures are tried as well, which takes many evaluations.
            each_number: whether the number of virtual stages stays as it is.
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
        """Whether a call of `refine` has ended with this plan, and has polished it if `polishes`."""
        return values in self._refined and (self._refined[values] or not polishes)

    def is_near(self, values: Values) -> bool:
        """Whether the best plan with the skeleton of a plan fits and is nearly as fast as the best plan of the
        search."""
        return self.is_worth_polishing(self.best[values[: self.space.first.signature]][0])

    def look_around(self, values: Values, step_time_s: float, overflow: float) -> None:
        """Prices the neighbours of a plan on its mesh, then combinations of the changes that gain alone.

        The best change of each decision is taken: first the best two together, then the best three, and so on. If a
        combination is better than any single change, the next round begins with it, in at most `CLIMBS` rounds.

        Args:
            values: values of the plan.
            step_time_s, overflow: its price.
        """
        worth = worth_of(step_time_s, overflow)
        self.keep(values, worth)
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
        """Prices plans, [n, slots], and returns their worth; only the first ones if the budget is too short for all."""
        return [worth_of(seconds, overflow) for seconds, overflow in self.prices(plans).tolist()]

    def prices(self, plans: Ints) -> Floats:
        """[n, 2] step time in seconds and overflow of memory of plans, [n, slots]; only of the first ones if the budget
        is too short for all. The best plans of their skeletons are kept."""
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
        """Tries every other joint signature of each linkage group, then the changes that gain alone together.

        This is repeated until nothing gains. If no change gains alone, pairs of the best ones are tried: an embedding
        and the output layer that shares its parameter gain only together. Changes that are faster but nearly fit are
        tried with more recomputation.
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
        """[n, slots] the neighbours of a plan that have other skeletons (`neighbouring_skeletons`) and are new.

        Args:
            values: values of the plan.
            again: whether a neighbour is new if this method has not returned it before; otherwise it is new only if no
                plan with its skeleton is known.
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
    """Numbers of plans, sorted by step time; those that overflow by more than `NEARLY_FITS` last, by their overflow.

    Args:
        prices: [n, 2] seconds of a step and overflow of memory.
    """
    over = prices[:, 1] > NEARLY_FITS
    ranked: Ints = np.lexsort((np.where(over, prices[:, 1], prices[:, 0]), over))
    return ranked
