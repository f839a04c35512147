"""Exploration: which mesh the next episode of a search has, and which decisions of its plan the agent takes.

There are two kinds of episodes:

- A *visit* decides all of a plan except its mesh, or its skeleton alone. The skeletons of some are solved. Another mesh
  may have a better plan than the best one so far, although the plans that are known there are worse. So all promising
  meshes are visited, the better ones more often. This is a multi-armed bandit whose arms are the meshes (`MeshBandit`).
  A mesh is rated by its best plan and by the gain that another visit may bring (optimism in the face of uncertainty).
  This assumed gain becomes smaller with each visit of the mesh that found nothing better, and larger with the visits of
  all meshes, so that no mesh is left out for good.
- A *revision* starts from the best plan of a mesh. It takes another value for one of its decisions, or makes a move of
  MCMC, and decides some of the later decisions again. So it can find several changes that pay only together, even if
  the first of them is a loss by itself.

Units: seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from agents.learning.mesh_plans import MeshPlans
from automap.bounds.partial_plans import BoundTable
from automap.space.space import Ints, Values
from envs.decision import Episodes

ASSUMED_GAIN = 0.2
"""Gain that is assumed of the first visit of a mesh, as a difference of the logarithms of step times; after n visits
without success it is this gain over n + 1. Chosen by hand between 0.1, with which searches of BERT-large ended further
from the best plan known, and 0.3, with which those of T5-11B did."""
PATIENCE = 100.0
"""Number of visits of all meshes, since the best plan of each was found, after which all assumed gains are larger by
the square root of 2; after n of them they are larger by that of 1 + n / 100 (assumed; bandits for trees grow in this
way, as PUCT in AlphaGo Zero). Without it, searches of VGG-19 on 16 V100 visited one mesh a thousand times and ended
11 % above a plan of another mesh, whose known plans were 2.5 times as slow."""
BEATEN = 100.0
"""Added to the logarithm of the step time of a mesh whose bound says that nothing there is faster."""
TRUSTED = 0.5
"""Share of the revisions in which the network is asked (assumed); the others follow the best completions, which need no
learning where a change is repaired by changes that pay one after another."""
FROM_NEIGHBOURS = 0.5
"""Share of the revisions that begin with a neighbour of the plan. Without these, searches of GPT-2 XL on 512 devices
ended 2 to 3 % above the best plan known."""
DONORS = 16
"""Number of the best plans of other meshes from which the move to such a neighbour may borrow (assumed)."""
SOLVED = 0.5
"""Share of the visits of a mesh, after the first one, that decide a skeleton alone, which is solved (assumed). The
first visit decides all of a plan, whose skeleton is solved too: the signatures to which completions lead are sometimes
better. Without them, searches of GPT-2 XL on 512 H100 ended 1 % above the best plan known."""
SHORTEST, LONGEST = 4, 64
"""Smallest and largest number of slots that a revision decides (assumed); drawn uniformly on a logarithmic scale."""
LEAST_NOISE, MOST_NOISE = 0.03, 1.0
"""Scales of the Gumbel noise on the ratings in a visit of a mesh that has been visited before (assumed)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Guide:
    """What one episode decides, what the network is shown, and how it explores."""

    forced: Ints | None = None
    """[slots] values that are taken wherever they are open; -1 where the network decides."""
    taught: Ints | None = None
    """[slots] the plan of a teacher, whose decisions are shown to the network."""
    base: Ints | None = None
    """[slots] plan whose decisions are followed where none is asked for; None = `taught`."""
    shown_from: int = 0
    """First slot at which they are shown."""
    random: float = 0.0
    """Probability of a random decision."""
    noise: float = 0.0
    """Scale of the Gumbel noise on ratings."""
    trust: float = 1.0
    """Factor of what the network adds to the completions at hand."""
    window: tuple[int, int] | None = None
    """First slot that an episode decides, and the first slot after those that it decides; None = all are decided."""
    is_solved: bool = False
    """Whether the skeleton that the episode decides is solved in the end."""

    @property
    def is_revision(self) -> bool:
        """Whether the episode decides a part of a good plan again."""
        return self.window is not None and not self.is_solved


class MeshBandit:
    """The visits of each mesh with each schedule since its best known plan was found.

    Attributes:
        num_slots: number of slots that decide the mesh and the schedule.
    """

    def __init__(self, episodes: Episodes, table: BoundTable, revisions: float, *, solves: bool = False) -> None:
        """Takes the known plans of episodes, see `MeshPlans`.

        Args:
            episodes: episodes of the problem.
            table: bounds of its space.
            revisions: share of the episodes that are revisions, of those in meshes that have been visited before.
            solves: whether the skeletons of some visits are solved.
        """
        self._revisions, self._solves = revisions, solves
        self._space, self._asked = episodes.space, episodes.asked
        self._meshes = MeshPlans(episodes, table)
        self.num_slots = self._meshes.num_slots
        self._visits = np.zeros(len(self._meshes.values), dtype=np.int64)
        self._free: dict[int, list[list[int]]] = {}

    def add(self, values: Values, worth_s: float) -> None:
        """Takes a plan, which becomes the best of its mesh if it is faster than those known."""
        number = self._meshes.add(values, worth_s)
        if number is not None:
            self._visits[number] = 0
            self._free.pop(number, None)

    def best(self, count: int) -> list[Values]:
        """The best plans of at most `count` meshes, the best first."""
        return [tuple(plan) for plan in self._meshes.values[self._meshes.ranked()[:count]].tolist()]

    def guide(self, rng: np.random.Generator, best_s: float) -> Guide:
        """How the next episode is guided, where the best plan so far takes `best_s`."""
        gain = ASSUMED_GAIN * math.sqrt(1.0 + float(self._visits.sum()) / PATIENCE)
        optimistic = np.log(self._meshes.worth_s) - gain / (1.0 + self._visits)
        # A penalty and no infinity: where every other mesh is beaten, that of the best plan is left.
        is_beaten = self._meshes.bound_s >= best_s
        mesh = int((np.where(self._meshes.is_open, optimistic, np.inf) + BEATEN * is_beaten).argmin())
        is_first = self._visits[mesh] == 0
        self._visits[mesh] += 1
        if not is_first and rng.random() < self._revisions:
            return self._revision(rng, mesh)
        forced = self._meshes.values[mesh].copy()
        forced[self.num_slots :] = -1
        # The first time, what the completions say is followed.
        noise = 0.0 if is_first else float(np.exp(rng.uniform(np.log(LEAST_NOISE), np.log(MOST_NOISE))))
        is_solved = self._solves and (is_first or rng.random() < SOLVED)
        return Guide(
            forced=forced,
            taught=self._meshes.values[mesh].copy(),
            # It is not known whether the mesh is a good one.
            shown_from=self.num_slots,
            noise=noise,
            trust=float(not is_first),
            window=(0, self._space.first.signature) if is_solved and not is_first else None,
            is_solved=is_solved,
        )

    def _revision(self, rng: np.random.Generator, mesh: int) -> Guide:
        best = self._meshes.values[mesh].copy()
        if mesh not in self._free:
            by_kind: dict[str, list[int]] = {}
            for number, slot in enumerate(self._space.slots[self.num_slots :], self.num_slots):
                if self._asked[number] and self._space.legal(best[:number]).sum() > 1:
                    by_kind.setdefault(slot.kind, []).append(number)
            self._free[mesh] = list(by_kind.values())
        free = self._free[mesh]
        if not free:
            return Guide(taught=best)
        kind = free[int(rng.integers(len(free)))]
        begin = kind[int(rng.integers(len(kind)))]
        length = int(np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST))))
        trust = float(rng.random() < TRUSTED)
        if rng.random() < FROM_NEIGHBOURS:
            donors = self._meshes.values[self._meshes.ranked()[:DONORS]]
            near = self._space.neighbours(rng, best[None], donors)[0]
            differing = np.flatnonzero(near != best)
            begin = max(self.num_slots, int(differing[0]) + 1 if len(differing) else begin)
            return Guide(taught=best, base=near, window=(begin, begin + length), trust=trust)
        return Guide(taught=best, window=(begin, begin + length), trust=trust)
