"""PipeDream: the optimizer of Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training"
(SOSP 2019, arXiv 1806.03377, section 3.1), as its released program computes it.

Layers are divided into stages, and each stage is replicated on a number of workers, so that the slowest stage is as
fast as possible. A stage ends at a *state*: a set of layers that contains all predecessors of each of its layers, so
that models may branch. Bandwidth is flat or has levels: a worker of an upper level is a machine, whose own workers are
again divided among stages. In the paper the replicas of a stage take micro-batches in turn; our plans divide every
micro-batch among them, and are priced so. Units: seconds, bytes, workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from agents.incumbent import Incumbent
from agents.planners.staged_plan import StageChoice, StagedPlan, consecutive, search_staged
from agents.planners.unit_profile import UnitProfile, unit_profile
from agents.searcher import SearchResult, SearchTask
from automap.arrays import Floats, Mask
from automap.group_links import group_link
from automap.price.lowered_plan import RECOMPUTE_MODES
from ir.errors import too_expensive
from ir.profile_text import ProfiledLayer, topological_order

MAX_STATES = 2_000
"""Largest number of states of a branching model (assumed): the time grows with its square, 5 s with 1,495 states."""


@dataclass(frozen=True, kw_only=True)
class States:
    """Where stages may end: each state is a set of layers with all their predecessors; the last one is the whole
    model."""

    seconds: Floats
    """[states] time of the forward and backward passes of the layers of each."""
    weight_bytes: Floats
    """[states] parameters of the layers of each."""
    activation_bytes: Floats
    """[states] outputs of the layers of each."""
    crossing_bytes: Floats
    """[states] what is sent from a stage that ends here to the next; zeros as in the released program."""
    before: Mask
    """[states, states] whether the first state is a proper subset of the second one. States are sorted by their
    seconds, so this is true only for pairs in this order."""

    def spans(self, of_states: Floats, otherwise: float = 0.0) -> Floats:
        """[states + 1, states] entry [i, j]: sum over the layers of state j that are not in state i - 1, or over all
        layers of state j for i = 0.

        Args:
            of_states: [states] sums over all layers of each state.
            otherwise: the entry where state i - 1 is not a subset of state j.
        """
        sums: Floats = of_states[None, :] - np.concatenate([[0.0], of_states])[:, None]
        sums[1:][~self.before] = otherwise
        return sums

    @property
    def narrows(self) -> Mask:
        """[states] whether each other state is a subset or a superset of this one: a cut where the model does not
        branch.
        """
        either = self.before | self.before.T | np.eye(len(self.seconds), dtype=np.bool_)
        return np.asarray(either.all(axis=0), dtype=np.bool_)

    def only(self, kept: Mask) -> States:
        """Some of the states."""
        return States(
            seconds=self.seconds[kept],
            weight_bytes=self.weight_bytes[kept],
            activation_bytes=self.activation_bytes[kept],
            crossing_bytes=self.crossing_bytes[kept],
            before=self.before[np.ix_(kept, kept)],
        )


class Level(NamedTuple):
    """One level of a hierarchy of workers: equal workers, or on upper levels equal machines of such workers."""

    workers: int
    """Number of workers."""
    bytes_per_s: float
    """Bandwidth between any two of them."""


class Stage(NamedTuple):
    """One stage of the best pipeline."""

    begin: int
    """State before it; -1 for the first stage."""
    end: int
    """State at its end."""
    replicas: tuple[int, ...]
    """Workers of each level, the innermost first."""


class Pipeline(NamedTuple):
    """The best pipeline."""

    seconds: float
    """Time of the slowest stage for a micro-batch; infinite where no pipeline fits."""
    stages: tuple[Stage, ...]
    """Stages in the order of the layers."""


def states_of_layers(layers: Mapping[int, ProfiledLayer]) -> States:
    """The states of a profile, which PipeDream calls antichains.

    From one state to the next, a layer is added that reads a layer of the state, together with all its predecessors. So
    sources other than the first one are in the stage of their first reader. As in the released program, a layer named
    Input... costs nothing, and a `__getitem__` without readers is dropped.

    Raises:
        ModelError: the layers form a cycle.
        ModelTooExpensive: there are more than `MAX_STATES` states.
    """
    gone = {n for n, layer in layers.items() if not layer.before and layer.label.startswith("Input")}
    gone |= {n for n, layer in layers.items() if not layer.after and layer.label.startswith("__getitem__")}
    order = [number for number in topological_order(layers) if number not in gone]
    place = {number: i for i, number in enumerate(order)}
    before = [[place[b] for b in layers[number].before if b in place] for number in order]
    # The profile lists layers in the order in which they were traced: its first source begins the model.
    first = place[next(number for number in layers if number in place and not before[place[number]])]
    found = _state_sets(before, first)
    nodes = [layers[number] for number in order]
    member = np.array([[state >> i & 1 for i in range(len(order))] for state in found], dtype=np.float64)
    seconds = member @ np.array([node.forward_s + node.backward_s for node in nodes])
    rising = np.lexsort((member.sum(axis=1), seconds))
    member, seconds = member[rising], seconds[rising]
    # i is a part of j where j has as many of i's layers as i itself.
    shared = member @ member.T
    return States(
        seconds=seconds,
        weight_bytes=member @ np.array([node.parameters for node in nodes]),
        activation_bytes=member @ np.array([sum(node.sizes) for node in nodes]),
        crossing_bytes=np.zeros(len(found)),
        before=(shared == np.diag(shared)[:, None]) & ~np.eye(len(found), dtype=np.bool_),
    )


def _state_sets(before: Sequence[Sequence[int]], first: int) -> set[int]:
    """The states of `states_of_layers` as sets of layers: bit i of a number stands for layer i.

    Args:
        before: [layers] layers that each layer reads, in topological order.
        first: the layer with which the first state begins.

    Raises:
        ModelTooExpensive: there are more than `MAX_STATES` states.
    """
    closure: list[int] = []  # each layer and all layers before it
    after: list[list[int]] = [[] for _ in before]
    for i, sources in enumerate(before):
        closure.append(1 << i)
        for source in sources:
            closure[i] |= closure[source]
            after[source].append(i)
    found, waiting = {closure[first]}, [closure[first]]
    while waiting:
        state = waiting.pop()
        inside = [i for i in range(len(before)) if state >> i & 1]
        for wider in {state | closure[reader] for i in inside for reader in after[i]} - found:
            found.add(wider)
            waiting.append(wider)
        if len(found) > MAX_STATES:
            repair = "Profile coarser layers, such as whole blocks."
            raise too_expensive(
                f"the branches can be cut in more than {MAX_STATES} ways", f"{len(before)} layers", repair
            )
    return found


def states_of_units(profile: UnitProfile, weight_bytes: float) -> States:
    """The states of a chain of units, with what crosses between two of them."""
    count = len(profile.forward_s)
    return States(
        seconds=np.cumsum(profile.forward_s + profile.backward_s),
        weight_bytes=np.cumsum(profile.trained * weight_bytes),
        activation_bytes=np.cumsum(profile.saved_bytes),
        crossing_bytes=profile.crossing_bytes.copy(),
        before=np.triu(np.ones((count, count), dtype=np.bool_), 1),
    )


def best_pipeline(states: States, levels: Sequence[Level], memory_bytes: float = math.inf) -> Pipeline:
    """The pipeline whose slowest stage is fastest.

    Args:
        states: where stages may end.
        levels: workers and bandwidth, the innermost level first.
        memory_bytes: memory of a worker, which holds a version of weights and activations for each micro-batch in
            flight.
    """
    solved: list[_Level] = []
    inner = states.spans(states.seconds, math.inf)
    inside, limit_s = 1, math.inf
    narrows = states.narrows
    if len(levels) == 1 and not narrows.all():
        # The best pipeline with cuts where the model does not branch is found first; slower ones are then skipped.
        limit_s = best_pipeline(states.only(narrows), levels, memory_bytes).seconds
    for number, level in enumerate(levels):
        rows = range(1) if number == len(levels) - 1 else range(len(inner))
        solved.append(_Level(states, level, inner, inside, memory_bytes))
        inner = solved[-1].solve(rows, limit_s)
        inside = level.workers
    seconds = float(inner[0, -1])
    if not math.isfinite(seconds):
        return Pipeline(seconds, ())
    stages = [Stage(-1, len(states.seconds) - 1, ())]
    for one in reversed(solved):
        stages = [
            Stage(begin, end, (workers, *stage.replicas))
            for stage in stages
            for begin, end, workers in one.stages(stage.begin + 1, stage.end)
        ]
    return Pipeline(seconds, tuple(stages))


class _Level:
    """The dynamic program of one level."""

    def __init__(self, states: States, level: Level, inner: Floats, inside: int, memory_bytes: float) -> None:
        """Prepares the times of stages.

        Args:
            inner: [states + 1, states] seconds of a stage on one worker of this level.
            inside: workers of the level below in each of this level.
        """
        self._states, self._level, self._inner = states, level, inner
        self._weights = states.spans(states.weight_bytes) / inside
        self._held = states.spans(states.weight_bytes) + states.spans(states.activation_bytes)
        self._memory_bytes = memory_bytes
        self._best = np.empty((0, 0, 0))

    def _stage_s(self, replicas: int, behind: int, rows: slice, ends: slice | int) -> Floats:
        """T(i -> j, m) for some rows i and ends j: time of one stage on m workers, with `behind` workers after it.

        T(i -> j, m) = (sum of T_l + 4 (m - 1) |w| / (m B)) / m, where B is the bandwidth and |w| are the bytes of the
        weights, sent and received in the forward and in the backward pass (section 3.1; the released program adds what
        the paper takes the larger of).
        """
        sync = 4.0 * (replicas - 1) / replicas / self._level.bytes_per_s
        found: Floats = (self._inner[rows, ends] + sync * self._weights[rows, ends]) / replicas
        # Weight versions that a worker holds: one for each micro-batch in flight between it and the end (the released
        # program counts none for the last stage).
        if not math.isinf(self._memory_bytes):
            found[math.ceil(behind / replicas) * self._held[rows, ends] > self._memory_bytes] = np.inf
        return found

    def _send_s(self, replicas: int) -> Floats:
        """[states] 2 a_i / (m B): seconds to receive the activations of a cut and to send their gradients."""
        found: Floats = 2.0 * self._states.crossing_bytes / (self._level.bytes_per_s * replicas)
        return found

    def solve(self, rows: range, limit_s: float) -> Floats:
        """[states + 1, states] A(i -> j, m) with all workers of the level, for these rows i; infinite in others.

        A(i -> j, m) = min(T(i -> j, m), min over s, m' of max(A(i -> s, m - m'), 2 a_s / B, T(s + 1 -> j, m')))

        Args:
            rows: the rows.
            limit_s: time that the best pipeline does not exceed; finite with row 0 alone.
        """
        most = self._level.workers
        self._best = np.full((most + 1, *self._inner.shape), np.inf)
        for total in range(1, most + 1):
            behind = most - total
            best = self._best[total]
            best[rows.start : rows.stop] = self._stage_s(total, behind, slice(rows.start, rows.stop), slice(None))
            ends = self._within(total, limit_s)
            for mine in range(1, total):
                begins = self._within(total - mine, limit_s)
                last = self._stage_s(mine, behind, slice(begins.start + 1, begins.stop + 1), ends)
                np.maximum(last, self._send_s(mine)[begins, None], out=last)
                for row in rows:
                    way = np.maximum(self._best[total - mine, row, begins, None], last)
                    np.minimum(best[row, ends], way.min(axis=0, initial=np.inf), out=best[row, ends])
        found: Floats = self._best[most]
        return found

    def _within(self, workers: int, limit_s: float) -> slice:
        """The states at which `workers` workers may end: they, and the workers after them, have no more work than they
        can do within the limit."""
        if math.isinf(limit_s):
            return slice(0, len(self._states.seconds))
        limit_s *= 1.0 + 1e-9
        done = self._states.seconds
        first = done[-1] - (self._level.workers - workers) * limit_s
        return slice(int(np.searchsorted(done, first)), int(np.searchsorted(done, workers * limit_s, "right")))

    def stages(self, row: int, end: int) -> list[tuple[int, int, int]]:
        """(state before, state at the end, workers) of the stages of the best pipeline of a span."""
        found: list[tuple[int, int, int]] = []
        total = self._level.workers
        while True:
            behind, best = self._level.workers - total, self._best[total, row, end]
            if self._stage_s(total, behind, slice(row, row + 1), end)[0] == best:
                return [(row - 1, end, total), *reversed(found)]
            for mine in range(1, total):
                last = np.maximum(self._stage_s(mine, behind, slice(1, None), end), self._send_s(mine))
                ways = np.maximum(self._best[total - mine, row], last)
                at = int(ways.argmin())
                if ways[at] == best:
                    break
            found.append((at, end, mine))
            total, end = total - mine, at


def propose(incumbent: Incumbent) -> Iterator[StagedPlan]:
    """PipeDream's pipelines for each number of micro-batches, with flat and with hierarchical bandwidth.

    Our plans keep one version of the weights, so the paper's limit of memory does not apply; plans that do not fit are
    tried with recomputation.
    """
    space = incumbent.space
    problem = space.problem
    batch = problem.training.global_batch
    gradient_bytes = problem.state_bytes[1]
    modes = [mode for mode, is_legal in zip(RECOMPUTE_MODES, space.modes, strict=True) if is_legal]
    seen: set[StagedPlan] = set()
    for mode in modes:
        for count in space.meshes.micro_batches:
            if incumbent.finished:
                return
            states = states_of_units(unit_profile(space, batch // count, recompute=mode), gradient_bytes)
            for levels in bandwidth_levels(incumbent):
                found = best_pipeline(states, levels)
                plan = StagedPlan(
                    stages=tuple(
                        StageChoice(end=stage.end + 1, devices=devices, recompute=mode)
                        for stage, devices in zip(found.stages, placed(found.stages, levels), strict=True)
                    ),
                    num_micro_batches=count,
                )
                if plan not in seen:
                    seen.add(plan)
                    yield plan


def bandwidth_levels(incumbent: Incumbent) -> list[tuple[Level, ...]]:
    """The cluster as one level with a flat bandwidth; and, if all of its hosts have the same size, as two levels:
    inside a host and between hosts."""
    cluster = incumbent.space.problem.cluster
    every = range(cluster.num_devices)
    flat = group_link(cluster, every).bytes_per_s
    found: list[tuple[Level, ...]] = [(Level(cluster.num_devices, flat),)]
    sizes = {host.num_devices for host in cluster.hosts}
    if len(cluster.hosts) > 1 and len(sizes) == 1 and sizes != {1}:
        (size,) = sizes
        inside = group_link(cluster, every[:size]).bytes_per_s
        found.append((Level(size, inside), Level(len(cluster.hosts), flat)))
    return found


def placed(stages: Sequence[Stage], levels: Sequence[Level]) -> list[tuple[int, ...]]:
    """The devices of each stage.

    Args:
        stages: the stages of a pipeline, whose replicas are counted for each level.
        levels: the workers of each level, the innermost first.
    """
    if len(levels) == 1:
        return consecutive([stage.replicas[0] for stage in stages], range(levels[0].workers))
    found, size, host, worker = [], levels[0].workers, 0, 0
    for stage in stages:
        inner, hosts = stage.replicas
        mine = range(host, host + hosts)
        found.append(tuple(h * size + worker + i for h in mine for i in range(inner)))
        worker += inner
        if worker == size:
            host, worker = host + hosts, 0
    return found


def search_pipedream(task: SearchTask) -> SearchResult:
    """The best plan of PipeDream's optimizer; see `Searcher`."""
    return search_staged(task, "pipedream", propose)
