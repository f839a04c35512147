"""Trials: the DQN decides which plans are run for real, and learns from what is measured.

The first plan that runs is the one that the search found. Before each further run there is a round:

1. The runs so far correct the prices of all plans. Computing and communicating are calibrated, and what calibration
   does not explain is carried over to plans that are alike (`automap.bounds.corrections`). Episodes and completions
   are rewarded by the corrected prices.
2. The network, at first the pretrained one, proposes some plans and then learns from others. Some episodes are led
   through the plans that have run, so that their measured times are in the replay.
3. The plan with the least optimistic step time runs next. This is the expected step time less one standard deviation
   (the lower confidence bound of Bayesian optimisation, arXiv 0912.3995).

The trials end early if even the optimistic step times of all other plans are no better than the fastest measured one,
by more than repeated runs differ. Units: seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agents.incumbent import Incumbent
from agents.learning.checkpoint import read_checkpoint
from agents.learning.dqn import MaskedDQN, Watch, new_agent
from agents.learning.exploration import Guide
from agents.learning.hyperparameters import Hyperparameters
from agents.learning.network import ProposalNetwork
from agents.learning.plan_vec_env import PlanVecEnv
from agents.learning.preparation import opened
from agents.learning.proposals import NETWORK, fitting, propose, readable
from agents.learning.search_tree import SearchTree
from agents.results.diverse_top_k import MOST
from agents.sampling.expert import Grid
from agents.searcher import Budget, ShouldStop
from automap.bounds.corrections import NOISE
from automap.plan import Plan, Sync
from automap.price.estimate import annotate
from automap.price.plan_reader import lower_plan
from automap.problem import Problem
from automap.runtime.trial.calibration import calibrate, calibrated
from automap.search_record import SearchRecord
from automap.space.space import Ints, PlanSpace, Values
from automap.space.target_limits import plan_space
from envs.decision import Episodes
from envs.hybrid import HybridDecisions

PROPOSED = 64
"""Number of plans that the network proposes before each run (assumed: these and `LEARNT` take about a second, and a run
takes some seconds)."""
LEARNT = 32
"""Number of further plans from which it learns before each run (assumed)."""
SHOWN = 16
"""Number of meshes whose best plans join those that may run (assumed)."""
PARAMETERS = Hyperparameters()
OPTIMISM = 1.0
"""Number of standard deviations by which a plan may be faster than expected (assumed). With 0, plans that are unlike
those that have run would never run while these look better."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A plan that is to be run."""

    plan: Plan
    """The plan with its estimate; `search.found_by` says who found it."""
    expected_s: float
    """Step time that is expected of it, from its estimate and the runs before it."""


Measure = Callable[[Proposal], float | None]
"""Runs a plan and returns the measured step time, or None where the run failed."""


@dataclass(kw_only=True, slots=True)
class Effort:
    """What the DQN has done to decide what is run."""

    evaluations: int = 0
    """Number of plans priced."""
    look_aheads: int = 0
    """Number of completions priced."""


def lead_trials(
    problem: Problem,
    start: Sequence[Plan],
    measure: Measure,
    *,
    most: int,
    round_s: float,
    seed: int = 0,
    should_stop: ShouldStop = lambda: False,
) -> Effort:
    """Runs plans until there are enough or none is left that may be the fastest.

    Args:
        problem: the problem.
        start: plans of a search for it, the best first, with estimates and records; at least one.
        measure: runs a plan.
        most: number of runs, at most `automap.bounds.corrections.MOST`.
        round_s: seconds for which the DQN looks for plans before each run, at most.
        seed: seed of network, replay and exploration.
        should_stop: called often; once it returns true, no further plan is run.
    """
    assert start[0].estimate is not None
    measured_s = measure(Proposal(plan=start[0], expected_s=start[0].estimate.step_time_s))
    if most == 1 or should_stop():
        return Effort()
    trials = _Trials(problem, start, seed)
    trials.learn(start[0], measured_s)
    for _ in range(most - 1):
        trials.look(round_s, should_stop)
        proposal = None if should_stop() else trials.next()
        if proposal is None:
            break
        trials.learn(proposal.plan, measure(proposal))
    return trials.effort


class _Round(Watch):
    """One round of the DQN, which begins with the plans that have run."""

    def __init__(self, incumbent: Incumbent, agent: MaskedDQN, tried: Sequence[Values]) -> None:
        self._shown = list(tried)
        super().__init__(incumbent, agent)

    def next_guide(self) -> Guide:
        """Through the next of the plans that have run, then as in every search."""
        return Guide(forced=np.array(self._shown.pop(0), dtype=np.int64)) if self._shown else super().next_guide()


class _Trials:
    """The runs so far, and the plans that may run next.

    Prices are those of the host as far as it is known: of the cluster with the times that `calibrate` makes of the runs
    so far, and these corrected by `automap.bounds.corrections`. Calibration changes no decision's meaning: plans have
    the same values in either space.
    """

    def __init__(self, problem: Problem, start: Sequence[Plan], seed: int) -> None:
        self.effort = Effort()
        self._problem, self._seed = problem, seed
        self._incumbent = Incumbent(plan_space(problem), Budget(), searcher="dqn")
        self._opened = opened(self._incumbent.space).values
        assert start[0].search is not None
        self._record: SearchRecord = replace(start[0].search, found_by="dqn", fastest_s=None, proven=False)
        self._plans: dict[Values, Plan | None] = {}
        self._strangers: list[Plan] = []
        self._tried: list[tuple[Plan, Values | None, float | None]] = []
        self._best_s = math.inf
        for plan in start:
            values = self._incumbent.space.encode(plan)
            if values is None:
                self._strangers.append(plan)
            else:
                self._plans[values] = plan
        self._episodes = self._begun()
        self._agent = new_agent(PlanVecEnv([self._episodes]), PARAMETERS, seed)
        if readable(NETWORK) is not None:
            read_checkpoint(self._agent, PARAMETERS, NETWORK)

    def learn(self, plan: Plan, measured_s: float | None) -> None:
        """Takes what a run has measured."""
        values = self._incumbent.space.encode(plan)
        if values is None:
            self._strangers.remove(plan)
        self._tried.append((plan, values, measured_s))
        self._best_s = min(self._best_s, math.inf if measured_s is None else measured_s)
        self._episodes = self._begun()

    def _begun(self) -> Episodes:
        """Episodes with the prices that follow from the runs so far."""
        measured = [(plan.estimate, s) for plan, _, s in self._tried if plan.estimate is not None and s is not None]
        found = calibrate(measured)
        cluster = self._problem.cluster if found is None else calibrated(self._problem.cluster, found)
        space = PlanSpace(replace(self._problem, cluster=cluster), limits=self._incumbent.space.limits)
        known = Grid(self._opened, space.price(self._opened))
        episodes = Episodes(HybridDecisions(space), PARAMETERS.num_envs, known=known)
        for plan, values, measured_s in self._tried:
            price_s = _price_s(space, plan)
            episodes.known.learn(values, None if measured_s is None else measured_s / price_s)
        rows = self._rows(list(self._plans))
        for values, price in zip(self._plans, episodes.known.corrected(rows, space.price(rows)).tolist(), strict=True):
            episodes.known.add(values, tuple(price))
        return episodes

    def _rows(self, plans: Sequence[Values]) -> Ints:
        return np.array(plans, dtype=np.int64).reshape(len(plans), len(self._incumbent.space.slots))

    @property
    def _tried_values(self) -> list[Values]:
        return [values for _, values, _ in self._tried if values is not None]

    def look(self, round_s: float, should_stop: ShouldStop) -> None:
        """Lets the DQN make a round of plans."""
        agent, episodes = self._agent, self._episodes
        corrections, space = episodes.known.corrections, episodes.space
        budget = Budget(evaluations=PROPOSED + LEARNT, seconds=round_s)
        incumbent = Incumbent(space, budget, searcher="dqn", should_stop=should_stop)
        # In the units of the bounds, which know nothing of the corrections.
        limit_s = self._best_s / math.exp(corrections.common) / corrections.least_factor
        tree = SearchTree(episodes, lambda: limit_s)
        agent.plan_env.episodes[0] = episodes
        network = ProposalNetwork({name: value.numpy() for name, value in agent.q_net.state_dict().items()})
        seed = self._seed + len(self._tried)
        found = fitting(propose(incumbent, episodes, tree, network, seed=seed, most=PROPOSED))
        if not (incumbent.finished or tree.is_exhausted):
            # What has been seen so far was rewarded by prices that the last run has corrected.
            agent.replay_buffer.forget()
            agent.tree = SearchTree(episodes, lambda: limit_s)
            watch = _Round(incumbent, agent, self._tried_values)
            agent._last_obs = agent.plan_env.reset()
            agent.learn(total_timesteps=10**12, callback=watch, log_interval=10**12, reset_num_timesteps=False)
            found += watch.meshes.best(SHOWN)
        self.effort.evaluations += incumbent.evaluations
        self.effort.look_aheads += int(episodes.known.arrays.priced[0])
        for values in [*found, *(values for values, _ in incumbent.unlike(MOST))]:
            self._plans.setdefault(values, None)

    def next(self) -> Proposal | None:
        """The plan to run next, or None where none may be the fastest."""
        known, space, tried = self._episodes.known, self._episodes.space, set(self._tried_values)
        factor, found = math.exp(known.corrections.common), []
        for plan in self._strangers:
            found.append((_price_s(space, plan) * factor, known.corrections.spread, plan))
        rows = self._rows([values for values in self._plans if values not in tried])
        prices, apart = known.corrected(rows, space.price(rows)), known.corrections.uncertainty(rows)
        fits = np.flatnonzero(prices[:, 1] <= 0.0)
        if len(fits):
            least = fits[(prices[fits, 0] * np.exp(-OPTIMISM * apart[fits])).argmin()]
            plan = self._plan(tuple(rows[least].tolist()))
            found.append((float(prices[least, 0]) * factor, float(apart[least]), plan))
        optimistic = [seconds * math.exp(-OPTIMISM * deviation) for seconds, deviation, _ in found]
        if not found or min(optimistic) >= (1.0 - NOISE) * self._best_s:
            return None
        seconds, _, plan = found[int(np.argmin(optimistic))]
        return Proposal(plan=plan, expected_s=seconds)

    def _plan(self, values: Values) -> Plan:
        plan = self._plans[values]
        return plan if plan is not None else self._incumbent.plan(values, Sync(), self._record)


def _price_s(space: PlanSpace, plan: Plan) -> float:
    """Step time of a plan by the price of a space, whether it is in the space or not."""
    found = annotate(plan, lower_plan(plan, space.evaluator), space.evaluator).estimate
    assert found is not None
    return found.step_time_s
