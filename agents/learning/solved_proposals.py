"""Solved proposals: how the search of a pretrained DQN begins, before it learns.

The search shall find a good plan and price as few plans as possible. The first plan takes the actions with the best
completions. Then there are several turns, each with these steps:

1. The decisions of the best plan so far are tried on all meshes, as completions: signatures that are good on one mesh
   are mostly good on another.
2. A descent (`agents.planners.descents`) starts from the known plan that is the most promising one of those from which
   no descent has started yet.
3. If the plan found is near the best one, an episode keeps its mesh and takes all other decisions again, so that single
   changes that gain are found.
4. Episodes decide one plan on each of some meshes that were not visited before, in the order of the step times that the
   network expects on them. The very first of these episodes also decides the mesh, and takes the actions that the
   network rates best. All others take the actions with the best completions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from agents.incumbent import Incumbent
from agents.learning.mesh_plans import MeshPlans
from agents.learning.network import Floats32, ProposalNetwork
from agents.learning.proposals import Proposed, note_first, take
from agents.learning.solved_skeletons import SolvedSkeletons
from automap.bounds.known_plans import worth_s
from automap.space.space import Values
from envs.decision import COMPLETION, MAX_ACTIONS, REWARD_SCALE, WAITING, Episodes, Observation
from envs.kernels import ACTION_FEATURES, STATE_FEATURES

VISITS = 3
"""Number of meshes that are visited after each descent. On ten problems of `benchmarks/dqn_alone.py`, searches without
visits took 35 plans instead of 10 to come near the best plan of BERT-large on 512 H100, and as many as now on most
others."""
RATED = 128
"""Number of meshes that the network rates: those with the best known plans (assumed)."""
NEAR = 1.05
"""A plan found is decided again if it takes at most this many times the step time of the best plan (assumed)."""
AGAIN = 0.03
"""Each descent from a plan of a mesh lets further plans with this mesh count as slower by this share (assumed)."""


class SolvedProposals:
    """Proposes plans in turns, and has their skeletons solved."""

    def __init__(
        self,
        incumbent: Incumbent,
        episodes: Episodes,
        priced: set[Values],
        network: ProposalNetwork,
        skeletons: SolvedSkeletons,
    ) -> None:
        """Begins with the plans that the episodes know.

        Args:
            incumbent: takes every plan that is found.
            episodes: episodes of the problem that decide whole plans; they learn of the plans that are found.
            priced: plans that were decided and priced; those that are found join them.
            network: rates meshes.
            skeletons: solves skeletons.
        """
        self._incumbent, self._episodes, self._priced = incumbent, episodes, priced
        self._network, self._skeletons = network, skeletons
        self._space, self._meshes = incumbent.space, MeshPlans(episodes, incumbent.table)
        self._taken: set[tuple[Values, str]] = set()
        self._visited: set[Values] = set()
        self._descents: Counter[Values] = Counter()
        self._spread: Values | None = None

    def go_on(self, turns: int) -> None:
        """Proposes plans for so many turns, or until the budget ends or every known plan has been taken."""
        incumbent = self._incumbent
        self._decide(None, by_network=False)
        for turn in range(turns):
            if incumbent.finished:
                return
            self._spread_best()
            values = self._promising()
            if values is None:
                return
            self._descend(values)
            for visit in range(VISITS):
                if incumbent.finished:
                    return
                if turn == visit == 0:
                    note_first(incumbent, self._decide(None, by_network=True))
                else:
                    self._visit()

    def _spread_best(self) -> None:
        """Tries the decisions of the best plan on all meshes, once."""
        best = self._incumbent.best
        if best is not None and best != self._spread:
            self._spread = best
            self._incumbent.look_aheads += self._meshes.spread(best)

    def _promising(self) -> Values | None:
        """The best known plan of a mesh from which no descent has begun, and that is unlike all that were taken."""
        meshes = self._meshes
        shapes = [self._shape(values) for values in map(tuple, meshes.values.tolist())]
        again = np.array([self._descents[shape] for shape in shapes])
        for number in np.argsort(meshes.worth_s * (1.0 + AGAIN * again), kind="stable").tolist():
            values = tuple(meshes.values[number].tolist())
            is_taken = self._alike(values, meshes.worth_s[number]) in self._taken
            if meshes.is_open[number] and not is_taken and self._skeletons.led_to(values) is None:
                return values
        return None

    def _descend(self, values: Values) -> None:
        """Solves the skeleton of a plan, and has the plan found decided again where it is near the best one."""
        if values not in self._priced:
            # A completion or a template has not counted as an evaluation.
            self._priced.add(values)
            self._incumbent.price([values])
        self._take(values)
        found = self._skeletons.solve(values)
        seconds, overflow = self._space.price(np.array([found]))[0].tolist()
        self._episodes.known.add(found, (seconds, overflow))
        self._add(found, seconds, overflow)
        self._take(found)
        if overflow <= 0.0 and seconds <= NEAR * self._incumbent.best_s and not self._incumbent.finished:
            self._decide(found, by_network=False)

    def _take(self, values: Values) -> None:
        """Notes that a descent has begun from a plan, or ended with it."""
        price = self._space.price(np.array([values]))
        shape = self._shape(values)
        self._taken.add(self._alike(values, float(worth_s(price, self._episodes.reference_s)[0])))
        self._visited.add(shape)
        self._descents[shape] += 1

    def _alike(self, values: Values, worth: float) -> tuple[Values, str]:
        """What plans have in common that differ only in what changes nothing, such as the schedule of a plan with one
        micro-batch: the shape and the price."""
        return self._shape(values), f"{worth:.9g}"

    def _shape(self, values: Values) -> Values:
        return values[: self._space.first.schedule]

    def _visit(self) -> None:
        """Decides a plan on the mesh of which the network expects the shortest step time, of those not visited yet."""
        self._spread_best()
        left = [tuple(self._meshes.values[number].tolist()) for number in self._meshes.ranked()[:RATED].tolist()]
        left = [values for values in left if self._shape(values) not in self._visited]
        if left:
            expected_s = expected_of_meshes(self._episodes, self._network, left, self._meshes.num_slots)
            values = left[expected_s.index(min(expected_s))]
            self._visited.add(self._shape(values))
            self._decide(values, by_network=False)

    def _decide(self, lead: Values | None, *, by_network: bool) -> list[Proposed]:
        """Decides and prices one plan.

        Args:
            lead: a plan whose mesh the plan has; None = any mesh.
            by_network: whether the actions are taken that the network rates best, not those with the best completions.

        Returns:
            The plan, and the best completion if one fits.
        """
        episodes = self._episodes
        episodes.confine(0, lead, None if lead is None else (self._meshes.num_slots, len(lead)))
        is_first = np.arange(episodes.count) == 0
        episodes.begin(is_first)
        done, expected_s = False, math.inf
        while not done:
            observation = episodes.observe()
            rated = self._network.rate(observation) if by_network else -REWARD_SCALE * completions(observation)
            legal = np.flatnonzero(observation["action_mask"][0])
            action = int(legal[rated[0, legal].argmax()])
            bound_s = float(episodes.partial_plans.episodes.bound[0, 0])
            expected_s = bound_s * math.exp(-float(rated[0, action]) / REWARD_SCALE)
            done = bool(episodes.step(np.where(is_first, action, WAITING))[1][0])
        found = take(self._incumbent, episodes, 0, self._priced, expected_s)
        for one in found:
            self._add(one.values, one.step_time_s, one.overflow)
        return found

    def _add(self, values: Values, step_time_s: float, overflow: float) -> None:
        """Takes a plan that was found as one of its mesh."""
        price = np.array([[step_time_s, overflow]])
        self._meshes.add(values, float(worth_s(price, self._episodes.reference_s)[0]))


def expected_of_meshes(
    episodes: Episodes, network: ProposalNetwork, plans: Sequence[Values], num_slots: int
) -> list[float]:
    """Step times that a network expects on the meshes of plans when it has decided only these.

    Args:
        episodes: episodes of the problem, at any place; they are begun anew.
        network: rates the next decision after the mesh.
        plans: one plan for each mesh.
        num_slots: number of slots that decide the mesh, see `MeshPlans`.

    Returns:
        A step time in seconds for each plan.
    """
    found = list[float]()
    for begin in range(0, len(plans), episodes.count):
        some = plans[begin : begin + episodes.count]
        for number, values in enumerate(some):
            episodes.confine(number, values, (num_slots, len(values)))
        episodes.begin(np.arange(episodes.count) < len(some))
        best = network.rate(episodes.observe())[: len(some)].max(axis=1)
        bounds = episodes.partial_plans.episodes.bound[: len(some), 0]
        found += (bounds * np.exp(-best / REWARD_SCALE)).tolist()
    return found


def completions(observation: Observation) -> Floats32:
    """[episodes, MAX_ACTIONS] what the completion of each action says, see `envs.kernels`."""
    seen = observation["observation"]
    found: Floats32 = seen[:, STATE_FEATURES:].reshape(len(seen), MAX_ACTIONS, ACTION_FEATURES)[:, :, COMPLETION]
    return found
