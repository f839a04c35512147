"""DAPPLE: the planner of Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models"
(PPoPP 2021, arXiv 2007.01045, sections 4 and 5).

A pipeline with replicated stages is planned for the time of one synchronous step. A dynamic program places one stage
after the other on devices: on fresh machines, on machines already used, or scattered over all of them. Replicas of a
stage divide every micro-batch (split and concat), sample by sample. Formulas are in `dapple_formulas`. Units: seconds,
bytes, samples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from agents.incumbent import Incumbent
from agents.planners.dapple_devices import ClusterNetwork, Places
from agents.planners.dapple_formulas import Counts, Layers, Placed, Planned, latency
from agents.planners.kernels.dapple import Found, LayerTables, Partials, States, extend
from agents.planners.pipeline_cuts import partition
from agents.planners.staged_plan import StageChoice, StagedPlan, search_staged
from agents.planners.unit_profile import unit_profile
from agents.searcher import SearchResult, SearchTask, ShouldStop
from automap.arrays import Floats, Ints
from automap.price.kernels.array_types import Rows
from automap.price.lowered_plan import RECOMPUTE_MODES
from automap.space.space import PlanSpace

NEAR = 1.05
"""Plans whose predicted latency is within this factor of the best one are proposed (assumed)."""
FEW_STAGES = 3
"""The best plans with at most this many stages are proposed in any case (assumed)."""
FAR = 1.5
"""The dynamic program does not run where uniform pipelines are slower than this factor of the best plan (assumed)."""
MOST_COUNTS = 6
"""Numbers of micro-batches, each with a recompute mode, for which the dynamic program runs, at most (assumed)."""


class _Round(NamedTuple):
    """All partial plans with the same number of stages, grouped by the devices that they leave free."""

    free: list[tuple[int, int, int]]
    """For each group: number of the set of free devices, index of its first plan, and one past its last."""
    plans: Partials
    parents: Ints
    """[plans] index, in the round before, of the plan without its last stage."""


class DappleSearch:
    """The search for the best plan with one size of micro-batches.

    T_PL(j, m, g) is the latency with the first j layers on m devices, of which g says which, and all other layers in
    one stage on all other devices (section 4.2.1). Of the plans with equal j and g only the best is extended.

    Attributes:
        best: number of stages -> the best plan with that number of stages that fits into memory.
    """

    def __init__(self, layers: Layers, places: Places, *, memory_bytes: float, limit_s: float = math.inf) -> None:
        """Prepares a search.

        Args:
            layers: the model.
            places: the devices, with the links between them.
            memory_bytes: memory of a device.
            limit_s: slower plans are dropped.
        """
        self.layers, self.places, self.memory_bytes = layers, places, memory_bytes
        self.best: dict[int, Planned] = {}
        self._limit_s = limit_s
        self._num_layers = layers.forward_s.shape[1] - 1
        # Samples cannot be divided, so some numbers of replicas are no faster than the next smaller one.
        whole = (layers.forward_s + layers.backward_s)[:, -1]
        self._worthwhile = np.zeros(max(sum(places.sizes), layers.most_replicas) + 1, dtype=np.bool_)
        self._worthwhile[1] = True
        self._worthwhile[2 : layers.most_replicas + 1] = np.diff(whole[1 : layers.most_replicas + 1]) < 0.0
        self._exposed: list[Floats] = []

    def uniform(self) -> dict[int, Planned]:
        """Pipelines whose stages all have the same number of devices, cut so that the slowest stage is fastest.

        Their latencies are limits for the dynamic program.

        Returns:
            `best`, with these pipelines.
        """
        total, both = sum(self.places.sizes), self.layers.forward_s + self.layers.backward_s
        for replicas in range(1, self.layers.most_replicas + 1):
            stages = total // replicas
            if total % replicas or stages > self._num_layers:
                continue
            spans = np.where(
                np.tri(self._num_layers + 1, dtype=np.bool_), np.inf, both[replicas] - both[replicas][:, None]
            )
            free, found = self.places.sizes, []
            for end in partition([spans] * stages) or []:
                counts = _in_order(free, replicas)
                free = tuple(a - b for a, b in zip(free, counts, strict=True))
                found.append(Placed(end, counts))
            self._consider((*found, Placed(self._num_layers, free)))
        return self.best

    def run(self, should_stop: ShouldStop = lambda: False) -> dict[int, Planned]:
        """Runs the dynamic program until it ends or is stopped.

        Returns:
            `best`: the best plan for each number of stages with a plan that fits and is within the limit.
        """
        self._consider((Placed(self._num_layers, self.places.sizes),))
        rounds = [_Round([(self.places.all, 0, 1)], _no_stages(), np.zeros(1, dtype=np.int64))]
        states = _new_states(0, self._num_layers)
        while self.layers.num_micro_batches > 1.0 and rounds[-1].free and not should_stop():
            order: dict[int, None] = {}
            for free, start, stop in rounds[-1].free:
                ways = self.places.ways(free)
                ways = ways[self._worthwhile[ways["devices"]]]
                if len(self.places.counts) > len(states.known):
                    states = _grown(states, 2 * len(self.places.counts))
                self._extend(rounds, (start, stop), ways, states)
                kept = (states.parent[ways["state"]] >= 0).any(axis=1)
                order.update(dict.fromkeys(ways["state"][kept].tolist()))
            rounds.append(self._longer(rounds[-1].plans, np.array([*order], dtype=np.int64), states))
            states.parent[[*order]] = -1
        return self.best

    def _extend(self, rounds: Sequence[_Round], span: tuple[int, int], ways: Rows, states: States) -> None:
        """Adds one stage to a group of plans of the last round in every way, and keeps the best complete plan.

        Args:
            rounds: the rounds so far.
            span: index of the first plan of the group, and one past its last.
            ways: the stages that may follow.
            states: the best partial plans of the next round; written.
        """
        number, places = len(rounds) + 1, self.places
        plans = Partials._make(array[slice(*span)] for array in rounds[-1].plans)
        last, at = np.unique(plans.last, return_inverse=True)
        receivers = ways["number"].tolist()
        sends = [[places.send_s(one, other) if number > 2 else 0.0 for other in receivers] for one in last.tolist()]
        known = self.best.get(number)
        found = Found(np.array([math.inf if known is None else known.seconds]), np.full(3, -1))
        send_s = np.array(sends).reshape(len(last), len(ways))
        extend(self._tables(), plans._replace(last=at), ways, send_s, span[0], states, found)
        row, way, end = found.at.tolist()
        if row >= 0:
            before = [Placed(self._num_layers, places.counts[ways["state"][way]])]
            before.append(Placed(end, places.counts[ways["number"][way]]))
            for earlier in reversed(rounds[1:]):
                ended, on = int(earlier.plans.ends[row]), int(earlier.plans.last[row])
                before.append(Placed(ended, places.counts[on]))
                row = int(earlier.parents[row])
            self.best[number] = Planned(float(found.seconds[0]), tuple(reversed(before)))

    def _longer(self, plans: Partials, order: Ints, states: States) -> _Round:
        """The next round: the best partial plans of some states, in the order of these states.

        Args:
            plans: the partial plans of the last round.
            order: [n] numbers of the sets of devices that are left free.
            states: the best partial plans of each set.
        """
        layers, places = self.layers, self.places
        which, ends = np.nonzero(states.parent[order] >= 0)
        of, ends = order[which], np.ascontiguousarray(ends)
        parents, last = states.parent[of, ends], states.number[of, ends]
        mine, kind = np.array(places.totals)[last], np.array(places.exposed)[last]
        begins = plans.ends[parents]
        sent = states.sent[of, ends]

        def longer(before: Floats, *more: Floats) -> Floats:
            found: Floats = np.column_stack([before[parents], *more])
            return found

        communication = [sent] if plans.state.shape[1] else []
        nothing = [np.zeros_like(sent)] if plans.state.shape[1] else []
        forward, backward = (table[mine, ends] - table[mine, begins] for table in (layers.forward_s, layers.backward_s))
        saved = (layers.saved_bytes[ends] - layers.saved_bytes[begins]) / mine
        found = Partials(
            ends=ends,
            last=last,
            forward=longer(plans.forward, *communication, forward),
            backward=longer(plans.backward, *communication, backward),
            reduce=longer(plans.reduce, *nothing, self._tables().exposed_s[kind, begins, ends]),
            state=longer(plans.state, layers.state_bytes[ends] - layers.state_bytes[begins]),
            saved=longer(plans.saved, saved),
        )
        starts = np.searchsorted(which, np.arange(len(order) + 1)).tolist()
        return _Round([*zip(order.tolist(), starts, starts[1:], strict=False)], found, parents)

    def _consider(self, stages: tuple[Placed, ...]) -> None:
        """Keeps a pipeline if it fits and is the best one with its number of stages."""
        layers, places = self.layers, self.places
        rows: list[tuple[float, float, float]] = []
        begin = 0
        for number, (end, counts) in enumerate(stages):
            mine = sum(counts)
            if number:
                sent = places.network.send_s(stages[number - 1].counts, counts) * layers.crossing_bytes[begin]
                rows.append((sent, sent, 0.0))
            # Stage i of S keeps K_i = min(S - i, M) micro-batches (section 3.2, policy PA).
            kept = min(len(stages) - number, layers.num_micro_batches)
            held = layers.state_bytes[end] - layers.state_bytes[begin]
            held += kept * ((layers.saved_bytes[end] - layers.saved_bytes[begin]) / mine)
            if mine > layers.most_replicas or held > self.memory_bytes:
                return
            forward, backward = (
                table[mine, end] - table[mine, begin] for table in (layers.forward_s, layers.backward_s)
            )
            kind = places.exposed[places.number(counts)]
            rows.append((forward, backward, self._tables().exposed_s[kind, begin, end]))
            begin = end
        parts = np.array(rows).T[:, :, None]
        seconds = float(latency(parts[0], parts[1], parts[2], layers.num_micro_batches)[0])
        known = self.best.get(len(stages))
        if seconds < (self._limit_s if known is None else min(self._limit_s, known.seconds)):
            self.best[len(stages)] = Planned(seconds, stages)

    def _tables(self) -> LayerTables:
        """What the kernel reads of the model."""
        layers, kinds = self.layers, [*self.places.kinds]
        if len(self._exposed) < len(kinds):
            self._exposed += [self._exposed_of(*kind) for kind in kinds[len(self._exposed) :]]
            self._known_tables = LayerTables(
                forward_s=layers.forward_s,
                backward_s=layers.backward_s,
                crossing_bytes=layers.crossing_bytes,
                state_bytes=layers.state_bytes,
                saved_bytes=layers.saved_bytes,
                exposed_s=np.array(self._exposed),
                num_micro_batches=float(layers.num_micro_batches),
                most_replicas=layers.most_replicas,
                memory_bytes=float(self.memory_bytes),
                limit_s=self._limit_s,
            )
        return self._known_tables

    def _exposed_of(self, reduce_s: float, devices: int, is_all: bool) -> Floats:
        """[layers + 1, layers + 1] entry [i, j]: the part of AR(P, g) that nothing hides, of a stage of layers i to j -
        1.

        Gradients are reduced from the last layer to the first while the last backward pass of the stage runs.

        Args:
            reduce_s: seconds of the all-reduce of a byte.
            devices: number of devices of the stage.
            is_all: whether these are all devices of the cluster.
        """
        layers = self.layers
        whole = reduce_s * layers.gradient_bytes
        spent = layers.backward_s[min(devices, layers.most_replicas)]
        # The gradients of a layer, and of all layers before it, are reduced after the backward pass of this layer.
        late = whole[1:] - spent[:-1]
        rising = np.where(np.tri(len(late), dtype=np.bool_).T, late[None, :], -np.inf)
        found = np.zeros((len(whole), len(whole)))
        found[:-1, 1:] = np.maximum.accumulate(rising, axis=1) - (whole - spent)[:-1, None]
        total = whole[None, :] - whole[:, None]
        share = layers.overlap_alone if is_all else layers.overlap
        exposed: Floats = total - share * (total - np.maximum(found, 0.0))
        return exposed


def _no_stages() -> Partials:
    """A single partial plan that has no stages."""
    none, zero = np.zeros((1, 0)), np.zeros(1, dtype=np.int64)
    return Partials(ends=zero, last=zero, forward=none, backward=none, reduce=none, state=none, saved=none)


def _new_states(count: int, layers: int) -> States:
    shape = (count, layers)
    nowhere, number = np.full(shape, -1, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    return States(known=np.full(shape, np.inf), parent=nowhere, number=number, sent=np.zeros(shape))


def _grown(states: States, count: int) -> States:
    """The same states with room for more."""
    old, layers = states.known.shape
    more = _new_states(count - old, layers)
    return States._make(np.concatenate(pair) for pair in zip(states, more, strict=True))


def _in_order(free: Counts, wanted: int) -> Counts:
    """The first devices that are free, host by host."""
    before = [0, *itertools.accumulate(free)]
    return tuple(min(mine, max(0, wanted - start)) for mine, start in zip(free, before, strict=False))


# -- plans of ours --------------------------------------------------------------------------------------------------


def layers_of(space: PlanSpace, num_micro_batches: int, recompute: str) -> Layers:
    """The units of a problem as layers: their costs on the slowest kind of device, with a number of micro-batches."""
    problem, cluster = space.problem, space.problem.cluster
    samples = problem.training.global_batch // num_micro_batches
    most = min(cluster.num_devices, samples)
    first = [cluster.node_of.index(host) for host in sorted(set(cluster.alike.tolist()))]
    shares = [0, *(math.ceil(samples / replicas) for replicas in range(1, most + 1))]
    profiles = {
        share: max(
            (unit_profile(space, share, device=device, recompute=recompute) for device in first),
            key=lambda profile: float(profile.forward_s.sum() + profile.backward_s.sum()),
        )
        for share in set(shares[1:])
    }
    whole = profiles[samples]
    frozen = (whole.parameters - whole.trained) * (problem.state_bytes[0] + problem.frozen_bytes)

    def summed(of_units: Floats) -> Floats:
        found: Floats = np.concatenate([[0.0], np.cumsum(of_units)])
        return found

    nothing = np.zeros(space.num_units + 1)
    return Layers(
        num_micro_batches=num_micro_batches,
        most_replicas=most,
        forward_s=np.array([summed(profiles[share].forward_s) if share else nothing for share in shares]),
        backward_s=np.array([summed(profiles[share].backward_s) if share else nothing for share in shares]),
        crossing_bytes=np.concatenate([[0.0], whole.crossing_bytes]),
        gradient_bytes=summed(whole.trained * problem.state_bytes[1]),
        state_bytes=summed(whole.trained * sum(problem.state_bytes) + frozen),
        saved_bytes=summed(whole.saved_bytes),
        overlap=problem.trainer.gradient_overlap,
        overlap_alone=problem.trainer.gradient_overlap,
    )


def propose(incumbent: Incumbent) -> Iterator[StagedPlan]:
    """DAPPLE's plans that it predicts to be within `NEAR` of its best one, and the best with one, two and three stages.

    The dynamic program runs for the numbers of micro-batches, and recompute modes, with which uniform pipelines are
    best.
    """
    space = incumbent.space
    cluster, evaluator = space.problem.cluster, space.evaluator
    sizes = tuple(host.num_devices for host in cluster.hosts)
    settings = evaluator.settings(0)
    reserved = float(settings.reserved_bytes + settings.pipeline_bytes)
    free = min(space.problem.usable_bytes((device,)) for device in cluster.devices.values()) - reserved
    free /= 1.0 + float(settings.unused_share)
    places = Places(ClusterNetwork(cluster), sizes)
    found: list[tuple[float, int, str, Planned]] = []
    ranked = []
    for mode in (mode for mode, is_legal in zip(RECOMPUTE_MODES, space.modes, strict=True) if is_legal):
        for count in space.meshes.micro_batches:
            layers = layers_of(space, count, mode)
            uniform = DappleSearch(layers, places, memory_bytes=free).uniform()
            found += [(planned.seconds, count, mode, planned) for planned in uniform.values()]
            pipelines = [planned.seconds for stages, planned in uniform.items() if stages > 1]
            ranked.append((min(pipelines, default=math.inf), count, mode, layers))
    for seconds, count, mode, layers in sorted(ranked, key=lambda one: one[0])[:MOST_COUNTS]:
        best_s = min((seconds for seconds, *_ in found), default=math.inf)
        if incumbent.finished or seconds > FAR * best_s:
            break
        search = DappleSearch(layers, places, memory_bytes=free, limit_s=best_s)
        found += [
            (planned.seconds, count, mode, planned) for planned in search.run(lambda: incumbent.finished).values()
        ]
    best_s = min((seconds for seconds, *_ in found), default=math.inf)
    lengths: set[int] = set()
    for seconds, count, mode, planned in sorted(found, key=lambda one: one[0]):
        length = len(planned.stages)
        if seconds <= NEAR * best_s or (length <= FEW_STAGES and length not in lengths):
            lengths.add(length)
            yield from _staged(space, planned, count, mode)


def _staged(space: PlanSpace, planned: Planned, count: int, recompute: str) -> Iterator[StagedPlan]:
    """The plan with its warm-up by policy PA (1F1B), and by PB where any order may be run."""
    hosts = space.problem.cluster.hosts
    used = [0, *itertools.accumulate(host.num_devices for host in hosts)][:-1]
    stages = []
    for stage in planned.stages:
        devices = tuple(used[h] + i for h, mine in enumerate(stage.counts) for i in range(mine))
        used = [begin + mine for begin, mine in zip(used, stage.counts, strict=True)]
        stages.append(StageChoice(end=stage.end, devices=devices, recompute=recompute))
    plan = StagedPlan(stages=tuple(stages), num_micro_batches=count)
    yield plan
    if len(stages) > 1 and space.problem.any_order:
        yield replace(plan, schedule="eager-1f1b")


def search_dapple(task: SearchTask) -> SearchResult:
    """The best plan of DAPPLE's planner; see `Searcher`."""
    return search_staged(task, "dapple", propose)
