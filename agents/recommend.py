"""Which cluster to train on: the best template on each of many candidates, and those that no other one beats.

Candidates are the clusters that the user names and parts of them (`agents.candidates`). A candidate has the step time
that `search` with the searcher `expert` finds on it; other searchers find faster plans, mostly by some percent. Where
the degrees that the user fixes, or the target, have no plan on all devices of a cluster, it is that of the best part of
them, and the others are idle. Prices of devices come from the user. Units: seconds, device-seconds, the user's
currency.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agents.candidates import Candidate, named_candidates, with_parts
from agents.results.fewer_devices import needed, on_all, promising, space_on_all, told_idle
from agents.results.infeasibility_advice import fastest_template_s
from agents.searcher import Budget, search
from agents.worker_processes import ProcessKilled, WorkerProcesses
from automap.cluster import parse_cluster
from automap.device_kinds import MAX_DEVICES
from automap.errors import ProblemError, UserError
from automap.export.baseline import with_stated
from automap.plan import Plan
from automap.price.degrees import sequence_length
from automap.price.estimate import lower_bound_s
from automap.price.evaluator import Evaluator
from automap.problem import Problem
from automap.space.target_limits import plan_space
from ir.graph import Graph

LOG = logging.getLogger("automap.search")

PER_NODE = 8
"""Devices of a full node of the candidates that `sizes` makes, as in the usual servers."""
SINGLE_STEPS = 16
"""Number of nodes up to which every number is a candidate (assumed); beyond it, steps are a quarter of a power of
two."""
FEW = 16
"""Number of candidates below which processes of their own take longer to begin than they save (assumed)."""
WAVE = 16
"""Number of candidates that are rated before those that they beat are left out (assumed)."""
DAY = 86400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Goals:
    """What a cluster must reach; None where it does not matter."""

    target_step_s: float | None = None
    """Longest step."""
    target_days: float | None = None
    """Longest training, where `target_step_s` follows from it."""
    max_cost_per_hour: float | None = None
    """Highest price of all devices of the cluster for an hour."""
    prices: Mapping[str, float] | None = None
    """Kind of device -> price of a device for an hour; None = devices cost alike."""
    steps: float | None = None
    """Number of steps of the whole training, from which its days and its cost follow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """The candidates, and those that stand out among them."""

    candidates: tuple[Candidate, ...]
    """All of them: the clusters in the order given, each followed by its parts."""
    front: tuple[Candidate, ...]
    """Those that meet the goals and that no other one beats: fewer devices, or with prices less per hour, and a shorter
    step. The cheapest first."""
    fewest: Candidate
    """The fewest devices that meet the goals; of several the fastest."""
    cheapest: Candidate | None
    """The lowest cost of a step, thus of a training, among those that meet the goals. Without prices it has the fewest
    device-seconds of a step; null if the candidates then have devices of several kinds."""
    fastest: Candidate
    """The shortest step among those that meet the goals."""


def sizes(devices: Sequence[str], most: int) -> list[str]:
    """Texts of clusters of each kind of device: parts of a node, then nodes of eight devices.

    Args:
        devices: kinds, as in `4x8xA100-80GB`.
        most: largest number of devices.

    Raises:
        ProblemError: the number is not one of a cluster.
    """
    if not 1 <= most <= MAX_DEVICES:
        repair = f"Give 1 to {MAX_DEVICES:,}."
        raise ProblemError("not a number of devices", field="max_devices", value=most, repair=repair)
    found = []
    for device in devices:
        found += [f"1x{count}x{device}" for count in (1, 2, 4) if count <= most]
        nodes, step = 1, 1
        while nodes * PER_NODE <= most:
            found.append(f"{nodes}x{PER_NODE}x{device}")
            while nodes >= max(SINGLE_STEPS, 8 * step):
                step *= 2
            nodes += step
    return found


def recommend(
    graph: Graph,
    clusters: Sequence[str],
    training: Mapping[str, Any],
    goals: Goals,
    *,
    hints: Mapping[str, Any] | None = None,
    processes: int = 1,
    on_candidate: Callable[[str, int], None] = lambda text, count: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Recommendation:
    """Rates clusters, and parts of them, by the best template on each.

    Args:
        graph: the model.
        clusters: texts of the clusters.
        training: as in `Problem.build`; what it leaves out is as the file under `hints.baseline` says.
        goals: what a cluster must reach; one whose lower bound is above the longest step is not searched.
        hints: as in `Problem.build`.
        processes: number of processes that rate candidates.
        on_candidate: called with a candidate once it is rated, and with the number of all candidates.
        should_stop: once it returns true, no more candidates are rated.

    Raises:
        UserError: a cluster or a setting is not understood; no candidate meets the goals, and what would.
    """
    named = named_candidates(clusters, goals.prices)
    training = _completed(training, hints or {}, clusters)
    # What is wrong with the settings is wrong on every cluster, so it is found before processes are started.
    batch = Problem.build(graph, clusters[0], training, hints).training.global_batch
    found = with_parts(named, batch, goals.prices)
    rated: dict[str, Candidate] = {}
    for candidate in _rated(found, graph, training, hints, goals, processes):
        rated[candidate.cluster] = candidate
        on_candidate(candidate.cluster, len(found))
        if should_stop():
            break
    candidates = tuple(rated[one.cluster] for one in found if one.cluster in rated)
    able = [one for one in candidates if one.step_time_s is not None]
    meeting = [one for one in able if _meets(one, goals)]
    if not meeting:
        raise _impossible(candidates, able, goals)

    def planned(one: Candidate) -> Candidate:
        return replace(one, plan=_best_template(_problem_on(one, graph, training, hints)))

    cheapest = _cheapest(meeting, goals)
    return Recommendation(
        candidates=candidates,
        front=tuple(_front(meeting)),
        fewest=planned(min(meeting, key=lambda one: (one.num_devices, one.step_time_s))),
        cheapest=None if cheapest is None else planned(cheapest),
        fastest=planned(min(meeting, key=lambda one: (one.step_time_s, _expense(one)))),
    )


def _problem_on(
    candidate: Candidate, graph: Graph, training: Mapping[str, Any], hints: Mapping[str, Any] | None
) -> Problem:
    """The problem on a candidate; the plan that the user runs today is for all devices of a cluster."""
    if candidate.part_of is not None and hints is not None:
        hints = {name: value for name, value in hints.items() if name != "baseline"}
    return Problem.build(graph, candidate.where, training, hints)


def _cheapest(meeting: Sequence[Candidate], goals: Goals) -> Candidate | None:
    """The candidate with the lowest cost of a step, see `Recommendation.cheapest`."""
    if goals.prices is not None:
        return min(meeting, key=lambda one: (one.cost_per_step, one.step_time_s))
    if len({node.device for one in meeting for node in one.where.nodes}) > 1:
        return None
    return min(meeting, key=lambda one: (one.device_seconds, one.step_time_s))


def _best_template(problem: Problem) -> Plan:
    """The best template on all devices; where none of them has a plan, that of the best part, beside idle devices."""
    space = space_on_all(problem)
    part = needed(promising(problem)) if space is None else None
    if part is None:
        return search(space or problem, Budget(), searcher="expert").plan
    found = search(part.problem, Budget(), searcher="expert").plan
    plan = on_all(found, part, problem, Evaluator(problem))
    if plan is None:
        repair = "Fix fewer degrees, or leave the cluster out."
        raise ProblemError("no plan on all devices", field="hints.fix", value=problem.cluster.name, repair=repair)
    return replace(plan, search=found.search, warnings=(*plan.warnings, told_idle(problem, plan)))


def _completed(training: Mapping[str, Any], hints: Mapping[str, Any], clusters: Sequence[str]) -> Mapping[str, Any]:
    """Training settings with those that the file under `hints.baseline` states, the same on every cluster.

    Raises:
        PlanError: the file cannot be read.
        ProblemError: it says the samples of a replica and not of a step, so that each cluster would do other work.
    """
    stated = [with_stated(training, hints, parse_cluster(text)) for text in clusters]
    batches = {str(one.get("global_batch", "nothing")): text for one, text in zip(stated, clusters, strict=True)}
    if len(batches) > 1:
        value = ", ".join(f"{batch} on {text}" for batch, text in batches.items())
        what = "depends on the cluster, because the baseline says the samples of a replica"
        raise ProblemError(what, field="training.global_batch", value=value, repair="Give the samples of a step.")
    return stated[0]


def _front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that no other one beats in both expense and step time, the cheapest first."""
    front: list[Candidate] = []
    for one in sorted(candidates, key=lambda one: (_expense(one), one.step_time_s or 0.0)):
        if not front or (one.step_time_s or 0.0) < (front[-1].step_time_s or 0.0):
            front.append(one)
    return front


def steps_of(graph: Graph, global_batch: int, tokens: float) -> float:
    """Number of steps after which a model has seen `tokens` tokens.

    Raises:
        ProblemError: its samples have no tokens, or no positive number of tokens is given.
    """
    if not 0 < tokens < math.inf:
        raise ProblemError("not a number of tokens", field="tokens", value=tokens, repair="Give them as in 1e12.")
    length = sequence_length(graph)
    if length is None:
        repair = "Leave --tokens and --target-days out, and state the longest step by --target-step."
        raise ProblemError("the model has no sequence", field="tokens", value=tokens, repair=repair)
    return tokens / (global_batch * length)


def _expense(candidate: Candidate) -> float:
    """What a cluster costs: its price for an hour, or without prices its devices."""
    return candidate.num_devices if candidate.cost_per_hour is None else candidate.cost_per_hour


def _meets(candidate: Candidate, goals: Goals) -> bool:
    step_s, cost = candidate.step_time_s, candidate.cost_per_hour
    in_time = goals.target_step_s is None or (step_s is not None and step_s <= goals.target_step_s)
    return in_time and (goals.max_cost_per_hour is None or cost is None or cost <= goals.max_cost_per_hour)


def _impossible(candidates: Sequence[Candidate], able: Sequence[Candidate], goals: Goals) -> UserError:
    """Why no candidate meets the goals, and what would be possible."""
    bounded = [one for one in candidates if one.lower_bound_s is not None]
    if not able and (goals.target_step_s is None or not bounded):
        first = next((one.fault for one in candidates if one.fault), "none was rated")
        repair = f"Give more or larger devices. {candidates[0].cluster if candidates else 'Nothing'}: {first}"
        return ProblemError("no candidate can train the model", field="clusters", value=len(candidates), repair=repair)
    if not able:
        best = min(bounded, key=lambda one: one.lower_bound_s or 0.0)
        text = f"On {best.cluster} no plan takes less than {_time(best.lower_bound_s or 0.0, goals)}."
        return _too_slow(goals, text)
    affordable = [one for one in able if goals.max_cost_per_hour is None or _expense(one) <= goals.max_cost_per_hour]
    if not affordable:
        least = min(able, key=_expense)
        repair = f"{least.cluster}, the cheapest that can train the model, costs {_expense(least):,.4g}; allow that."
        value = goals.max_cost_per_hour
        return ProblemError("no candidate is as cheap", field="max_cost_per_hour", value=value, repair=repair)
    best = min(affordable, key=lambda one: one.step_time_s or 0.0)
    return _too_slow(goals, f"The fastest candidate, {best.cluster}, takes {_time(best.step_time_s or 0.0, goals)}.")


def _too_slow(goals: Goals, text: str) -> ProblemError:
    repair = f"{text} Allow that, or name more or faster devices."
    field, value = "target_step", f"{goals.target_step_s:.4g} s a step"
    if goals.target_days is not None:
        field, value = "target_days", f"{goals.target_days:g} days, {value}"
    return ProblemError("no candidate is as fast", field=field, value=value, repair=repair)


def _time(step_s: float, goals: Goals) -> str:
    days = "" if goals.steps is None else f", {goals.steps * step_s / DAY:,.4g} days for the training"
    return f"{step_s:.4g} s a step{days}"


def _rated(
    candidates: Sequence[Candidate],
    graph: Graph,
    training: Mapping[str, Any],
    hints: Mapping[str, Any] | None,
    goals: Goals,
    processes: int,
) -> Iterator[Candidate]:
    """The candidates with their step times, in any order; those that are beaten whatever their plan have none.

    Bounds take milliseconds and templates tenths of a second. So all bounds come first, then waves of candidates from
    the least device-seconds on, as the fastest devices beat many others. What is known after a wave does not depend on
    the number of processes.
    """
    rater = _Rater(graph, training, hints, goals)
    known: list[Candidate] = []
    waiting = sorted(map(rater.bounded, candidates), key=lambda one: (one.lower_bound_s or 0.0) * one.num_devices)
    with contextlib.ExitStack() as stack:
        rate: Callable[[Sequence[Candidate]], Iterable[Candidate]] = rater.rate_each
        if processes > 1 and len(candidates) >= FEW:
            workers = stack.enter_context(WorkerProcesses(processes, _Rater.begin, rater))
            rate = functools.partial(_rated_by, workers, rater)
        while waiting:
            left = []
            for one in waiting:
                better = None if one.fault is not None else _unbeatable(one, known)
                if one.fault is not None:
                    yield one
                elif better is not None:
                    yield replace(one, fault=f"no plan on it is as fast as {better.cluster}, which costs no more")
                else:
                    left.append(one)
            for one in rate(left[:WAVE]):
                known.append(one)
                yield one
            waiting = left[WAVE:]


def _rated_by(workers: WorkerProcesses, rater: _Rater, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Rates candidates in other processes, in any order; in this one from then on where one of those was killed."""
    left = {one.cluster: one for one in candidates}
    if not workers.is_lost:
        try:
            for one, rated in workers.each(_Rater.rate_here, candidates):
                del left[one.cluster]
                yield rated
        except ProcessKilled:
            LOG.warning("a process that rated clusters was killed: the other clusters are rated one by one")
    yield from rater.rate_each(list(left.values()))


def _unbeatable(candidate: Candidate, known: Iterable[Candidate]) -> Candidate | None:
    """A known candidate that costs no more, has no more devices, and is faster than any plan on this candidate."""
    bound_s = candidate.lower_bound_s
    for one in known:
        no_more = one.num_devices <= candidate.num_devices and _expense(one) <= _expense(candidate)
        if no_more and bound_s is not None and one.step_time_s is not None and one.step_time_s < bound_s:
            return one
    return None


def _fastest_template_s(problem: Problem, *, is_part: bool) -> float | None:
    """Step time of `_best_template`; None where no template fits.

    Args:
        problem: the problem on a candidate.
        is_part: whether this is a part of a cluster, all of whose devices must work.

    Raises:
        ProblemError: there is no plan, on all devices and on parts of them.
    """
    space = plan_space(problem) if is_part else space_on_all(problem)
    if space is not None:
        return fastest_template_s(problem, space)
    part = needed(promising(problem))
    return fastest_template_s(problem, plan_space(problem)) if part is None else part.template_s


class _Rater:
    """Rates candidates, in this process or in one of its own."""

    here: _Rater

    def __init__(
        self, graph: Graph, training: Mapping[str, Any], hints: Mapping[str, Any] | None, goals: Goals
    ) -> None:
        self._graph, self._training, self._hints, self._goals = graph, training, hints, goals

    @classmethod
    def begin(cls, rater: _Rater) -> None:
        """Prepares a process."""
        cls.here = rater

    @classmethod
    def rate_here(cls, candidate: Candidate) -> Candidate:
        """Rates a candidate in the process that `begin` has prepared."""
        return cls.here.rate(candidate)

    def rate_each(self, candidates: Sequence[Candidate]) -> Iterable[Candidate]:
        """Rates candidates one after another in this process."""
        return map(self.rate, candidates)

    def bounded(self, candidate: Candidate) -> Candidate:
        """The candidate with its lower bound, or with the reason why nothing on it needs to be rated."""
        try:
            bound_s, target_s = lower_bound_s(self._problem(candidate)), self._goals.target_step_s
        except UserError as refused:
            return replace(candidate, fault=str(refused))
        late = f"no plan takes less than {bound_s:.4g} s" if target_s is not None and bound_s > target_s else None
        return replace(candidate, lower_bound_s=bound_s, fault=late)

    def rate(self, candidate: Candidate) -> Candidate:
        """The candidate with its best template, or with the reason why there is none."""
        try:
            step_s = _fastest_template_s(self._problem(candidate), is_part=candidate.part_of is not None)
        except UserError as refused:
            return replace(candidate, fault=str(refused))
        if step_s is None:
            return replace(candidate, fault="no template fits into memory")
        return replace(candidate, step_time_s=step_s)

    def _problem(self, candidate: Candidate) -> Problem:
        return _problem_on(candidate, self._graph, self._training, self._hints)
