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
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from agents.incumbent import Incumbent
from agents.planners.dapple_formulas import Counts, Layers, Network, Placed, Planned, latency, placements
from agents.planners.pipeline_cuts import partition
from agents.planners.staged_plan import StageChoice, StagedPlan, search_staged
from agents.planners.unit_profile import unit_profile
from agents.searcher import SearchResult, SearchTask, ShouldStop
from automap.arrays import Floats, Ints
from automap.cluster import Cluster
from automap.group_links import group_link
from automap.price.lowered_plan import RECOMPUTE_MODES
from automap.space.space import PlanSpace
from automap.space.stage_sizes import MAX_PARTS

NEAR = 1.05
"""Plans whose predicted latency is within this factor of the best one are proposed (assumed)."""
FEW_STAGES = 3
"""The best plan with so many stages and with fewer is proposed in any case."""
FAR = 1.5
"""The dynamic program does not run where uniform pipelines are slower than this factor of the best plan (assumed)."""
MOST_COUNTS = 6
"""Numbers of micro-batches, each with a recompute mode, for which the dynamic program runs, at most (assumed)."""


@dataclass(frozen=True, kw_only=True)
class _Partials:
    """Partial plans of equally many stages that leave the same devices free."""

    free: Counts
    ends: Ints
    """[plans] layers before the end of the last stage."""
    forward: Floats
    """[stages, plans] F of the stages of computation and of communication between them."""
    backward: Floats
    """[stages, plans] B of the same stages."""
    reduce: Floats
    """[stages, plans] AR of the same stages."""
    state: Floats
    """[stages of computation, plans] bytes of state of a device."""
    saved: Floats
    """[stages of computation, plans] bytes that a micro-batch keeps on a device."""
    placed: list[tuple[Placed, ...]]
    """[plans] stages."""

    def take(self, rows: Ints) -> _Partials:
        """Some of the plans."""
        arrays: dict[str, Any] = {name: getattr(self, name)[..., rows] for name in _ARRAYS}
        return replace(self, placed=[self.placed[row] for row in rows.tolist()], **arrays)


_ARRAYS = ("ends", "forward", "backward", "reduce", "state", "saved")


def _joined(parts: Sequence[_Partials]) -> _Partials:
    """Partial plans with the same free devices together."""
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts], axis=-1) for name in _ARRAYS
    }
    return replace(parts[0], placed=[stages for part in parts for stages in part.placed], **arrays)


def _in_order(free: Counts, wanted: int) -> Counts:
    """The first devices that are free, host by host."""
    before = [0, *itertools.accumulate(free)]
    return tuple(min(mine, max(0, wanted - start)) for mine, start in zip(free, before, strict=False))


class DappleSearch:
    """The search for the best plan with one size of micro-batches.

    T_PL(j, m, g) is the latency with the first j layers on m devices, of which g says which, and all other layers in
    one stage on all other devices (section 4.2.1). Of the plans with equal j and g only the best is extended.

    Attributes:
        best: number of stages -> the best plan with so many that fits into memory.
    """

    def __init__(
        self, layers: Layers, network: Network, sizes: Counts, *, memory_bytes: float, limit_s: float = math.inf
    ) -> None:
        """Prepares a search.

        Args:
            layers: the model.
            network: links between devices.
            sizes: devices of each host.
            memory_bytes: memory of a device.
            limit_s: plans that are slower are of no interest.
        """
        self.layers, self.network, self.sizes, self.memory_bytes = layers, network, sizes, memory_bytes
        self.best: dict[int, Planned] = {}
        self._limit_s = limit_s
        self._num_layers = layers.forward_s.shape[1] - 1
        # Samples are whole: some replicas do not shorten a stage. Large clusters are dealt out in parts.
        whole, part = (layers.forward_s + layers.backward_s)[:, -1], math.ceil(sum(sizes) / MAX_PARTS)
        self._worthwhile = [
            r for r in range(1, layers.most_replicas + 1) if r % part == 0 and (r == 1 or whole[r] < whole[r - 1])
        ]
        self._known: dict[Counts, Floats] = {}
        self._reduced: dict[Counts, Floats] = {}

    @property
    def _empty(self) -> _Partials:
        """One plan without stages."""
        none = np.zeros((0, 1))
        return _Partials(
            free=self.sizes,
            ends=np.zeros(1, dtype=np.int64),
            forward=none,
            backward=none,
            reduce=none,
            state=none,
            saved=none,
            placed=[()],
        )

    def uniform(self) -> dict[int, Planned]:
        """Pipelines whose stages have equally many devices, cut so that the slowest stage is fastest.

        They give the dynamic program a limit.
        """
        total, both = sum(self.sizes), self.layers.forward_s + self.layers.backward_s
        for replicas in range(1, self.layers.most_replicas + 1):
            stages = total // replicas
            if total % replicas or stages > self._num_layers:
                continue
            spans = np.where(
                np.tri(self._num_layers + 1, dtype=np.bool_), np.inf, both[replicas] - both[replicas][:, None]
            )
            group = self._empty
            for end in partition([spans] * stages) or []:
                counts = _in_order(group.free, replicas)
                group = self._longer(group, counts, np.zeros(1, dtype=np.int64), np.array([end]))
            self._finish(group, group.free)
        return self.best

    def run(self, should_stop: ShouldStop = lambda: False) -> dict[int, Planned]:
        """The best plan for each number of stages, where one fits and is within the limit, until it is stopped."""
        self._finish(self._empty, self.sizes)
        waiting = [self._empty] if self.layers.num_micro_batches > 1.0 else []
        while waiting and not should_stop():
            found: dict[Counts, list[_Partials]] = {}
            for group in waiting:
                for wanted in (replicas for replicas in self._worthwhile if replicas < sum(group.free)):
                    for counts in placements(group.free, self.sizes, wanted):
                        longer = self._extended(group, counts)
                        if longer is not None:
                            found.setdefault(longer.free, []).append(longer)
            waiting = [self._best_of(_joined(parts)) for parts in found.values()]
        return self.best

    def _extended(self, group: _Partials, counts: Counts) -> _Partials | None:
        """The plans of a group with one more stage on given devices, the best of each end that is better than known."""
        layers, mine = self.layers, sum(counts)
        free = tuple(a - b for a, b in zip(group.free, counts, strict=True))
        both = layers.forward_s + layers.backward_s
        spent = both[mine][None, :-1] - both[mine][group.ends][:, None]
        even = (both[1, -1] - both[1, :-1]) / sum(free)
        # By Algorithm 1, L >= (M - 1) (F_s + B_s) + sum of F_a + B_a of all a < s, for all s; and of the stages to come
        # one is no faster than if all devices that are left shared their layers evenly.
        filled, least = self._bounds(group)
        busy = np.maximum(spent, even[None, :] + spent / max(1.0, layers.num_micro_batches - 1.0))
        bound = np.maximum(least[:, None], (layers.num_micro_batches - 1.0) * busy + filled[:, None])
        is_able = (np.arange(self._num_layers)[None, :] > group.ends[:, None]) & (bound < self._limit_s)
        rows, ends = np.nonzero(is_able)
        if not len(rows):
            return None
        found = self._longer(group, counts, rows, ends)
        seconds = self._finish(found, free)
        known = self._known.setdefault(free, np.full(self._num_layers, np.inf))
        np.minimum.at(known, ends, seconds)
        kept = np.flatnonzero(np.isfinite(seconds) & (seconds <= known[ends]))
        return found.take(kept) if len(kept) else None

    def _longer(self, group: _Partials, counts: Counts, rows: Ints, ends: Ints) -> _Partials:
        """Some plans of a group, each with one more stage to an end, on given devices."""
        layers, mine = self.layers, sum(counts)
        before = group.take(rows)
        begins = before.ends
        forward, backward, reduce = before.forward, before.backward, before.reduce
        if before.placed[0]:
            sent = self._sent(before, counts)
            forward, backward = np.vstack([forward, sent]), np.vstack([backward, sent])
            reduce = np.vstack([reduce, np.zeros_like(sent)])
        return _Partials(
            free=tuple(a - b for a, b in zip(group.free, counts, strict=True)),
            ends=ends,
            forward=np.vstack([forward, layers.forward_s[mine][ends] - layers.forward_s[mine][begins]]),
            backward=np.vstack([backward, layers.backward_s[mine][ends] - layers.backward_s[mine][begins]]),
            reduce=np.vstack([reduce, self._exposed(counts)[begins, ends]]),
            state=np.vstack([before.state, layers.state_bytes[ends] - layers.state_bytes[begins]]),
            saved=np.vstack([before.saved, (layers.saved_bytes[ends] - layers.saved_bytes[begins]) / mine]),
            placed=[(*stages, Placed(end, counts)) for stages, end in zip(before.placed, ends.tolist(), strict=True)],
        )

    def _bounds(self, group: _Partials) -> tuple[Floats, Floats]:
        """[plans] F + B of all stages, and a lower bound on the latency."""
        both = group.forward + group.backward
        filled = np.cumsum(both, axis=0)
        least = (self.layers.num_micro_batches - 1.0) * both + filled - both
        return both.sum(axis=0), least.max(axis=0, initial=0.0)

    def _best_of(self, group: _Partials) -> _Partials:
        """Of the plans with the same end, the last, which was no worse than those before."""
        _, last = np.unique(group.ends[::-1], return_index=True)
        return group.take(len(group.ends) - 1 - last)

    def _sent(self, group: _Partials, receivers: Counts) -> Floats:
        """[plans] F and B of the stage of communication behind each plan."""
        rate = {c: self.network.send_s(c, receivers) for c in {stages[-1].counts for stages in group.placed}}
        rates = np.array([rate[stages[-1].counts] for stages in group.placed])
        found: Floats = rates * self.layers.crossing_bytes[group.ends]
        return found

    def _finish(self, group: _Partials, counts: Counts) -> Floats:
        """Puts all layers that are left on all devices that are left, and keeps the best plans that fit.

        Returns:
            [plans] latency; infinite where the stages before do not fit.
        """
        layers, ends, others = self.layers, group.ends, sum(counts)
        stages = [[*group.forward], [*group.backward], [*group.reduce]]
        if group.placed[0]:
            sent = self._sent(group, counts)
            stages = [[*stages[0], sent], [*stages[1], sent], [*stages[2], np.zeros_like(sent)]]
        reduce = self._exposed(counts)[ends, -1]

        def with_rest(tables: tuple[Floats, Floats], share: float) -> Floats:
            """Latency where the last stage takes a share of these times."""
            own = [share * (table[-1] - table[ends]) for table in tables]
            forward, backward, reduced = ([*done, last] for done, last in zip(stages, [*own, reduce], strict=True))
            return latency(forward, backward, reduced, layers.num_micro_batches)

        # Stage i of S keeps K_i = min(S - i, M) micro-batches (section 3.2, policy PA).
        number = len(group.state)
        kept = np.minimum(number + 1 - np.arange(number), layers.num_micro_batches)[:, None]
        fits = (group.state + kept * group.saved <= self.memory_bytes).all(axis=0)
        if others <= layers.most_replicas:
            held = layers.state_bytes[-1] - layers.state_bytes[ends]
            held = held + (layers.saved_bytes[-1] - layers.saved_bytes[ends]) / others
            whole = with_rest((layers.forward_s[others], layers.backward_s[others]), 1.0)
            whole = np.where(fits & (held <= self.memory_bytes), whole, np.inf)
            at = int(whole.argmin())
            known = self.best.get(number + 1)
            if whole[at] < (self._limit_s if known is None else min(self._limit_s, known.seconds)):
                plan = (*group.placed[at], Placed(self._num_layers, counts))
                self.best[number + 1] = Planned(float(whole[at]), plan)
        # A sample cannot be shared: what tells partial plans apart is an even share of what is left.
        return np.where(fits, with_rest((layers.forward_s[1], layers.backward_s[1]), 1.0 / others), np.inf)

    def _exposed(self, counts: Counts) -> Floats:
        """[layers + 1, layers + 1] AR(P, g) of a stage from the first to before the second layer, as far as nothing
        hides it: gradients are reduced from back to front while the last backward pass of the stage goes on."""
        if counts not in self._reduced:
            layers = self.layers
            whole = self.network.reduce_s(counts) * layers.gradient_bytes
            spent = layers.backward_s[min(sum(counts), layers.most_replicas)]
            # The all-reduces of a layer and of all before it follow its backward pass.
            late = whole[1:] - spent[:-1]
            rising = np.where(np.tri(len(late), dtype=np.bool_).T, late[None, :], -np.inf)
            found = np.zeros((len(whole), len(whole)))
            found[:-1, 1:] = np.maximum.accumulate(rising, axis=1) - (whole - spent)[:-1, None]
            total = whole[None, :] - whole[:, None]
            share = layers.overlap_alone if counts == self.sizes else layers.overlap
            self._reduced[counts] = total - share * (total - np.maximum(found, 0.0))
        return self._reduced[counts]


# -- plans of ours --------------------------------------------------------------------------------------------------


class ClusterNetwork:
    """The links of a cluster, as they are priced."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._first = [0, *itertools.accumulate(host.num_devices for host in cluster.hosts)]
        self._reduce: dict[Counts, float] = {}

    def _devices(self, counts: Counts) -> list[int]:
        return [first + i for first, count in zip(self._first, counts, strict=False) for i in range(count)]

    def reduce_s(self, counts: Counts) -> float:
        """See `Network`: a ring sends 2 (n - 1) / n of the bytes over its slowest link."""
        if counts not in self._reduce:
            total = sum(counts)
            rate = group_link(self._cluster, self._devices(counts)).bytes_per_s
            self._reduce[counts] = 2.0 * (total - 1) / total / rate
        return self._reduce[counts]

    def send_s(self, senders: Counts, receivers: Counts) -> float:
        """See `Network`: each device of the smaller stage exchanges its part, over the slowest link that is needed."""
        one, other = sum(senders), sum(receivers)
        leaving = [h for h, (a, b) in enumerate(zip(senders, receivers, strict=True)) if a / one > b / other]
        arriving = [h for h, (a, b) in enumerate(zip(senders, receivers, strict=True)) if a / one < b / other]
        if leaving:
            pairs = [(self._first[a], self._first[b]) for a in leaving for b in arriving]
            rate = min(group_link(self._cluster, pair).bytes_per_s for pair in pairs[:1] + pairs[-1:])
        else:
            links = {self._cluster.hosts[h].intra_node_link for h, count in enumerate(senders) if count}
            rate = min(self._cluster.links[name].bytes_per_s for name in links)
        return 1.0 / (min(one, other) * rate)


def layers_of(space: PlanSpace, num_micro_batches: int, recompute: str) -> Layers:
    """What the units of a problem cost, on the slowest kind of its devices, with a number of micro-batches."""
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
        gradient_bytes=summed(whole.parameters * problem.state_bytes[1]),
        state_bytes=summed(whole.parameters * sum(problem.state_bytes)),
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
    network = ClusterNetwork(cluster)
    found: list[tuple[float, int, str, Planned]] = []
    ranked = []
    for mode in (mode for mode, is_legal in zip(RECOMPUTE_MODES, space.modes, strict=True) if is_legal):
        for count in space.meshes.micro_batches:
            layers = layers_of(space, count, mode)
            uniform = DappleSearch(layers, network, sizes, memory_bytes=free).uniform()
            found += [(planned.seconds, count, mode, planned) for planned in uniform.values()]
            pipelines = [planned.seconds for stages, planned in uniform.items() if stages > 1]
            ranked.append((min(pipelines, default=math.inf), count, mode, layers))
    for seconds, count, mode, layers in sorted(ranked, key=lambda one: one[0])[:MOST_COUNTS]:
        best_s = min((seconds for seconds, *_ in found), default=math.inf)
        if incumbent.finished or seconds > FAR * best_s:
            break
        search = DappleSearch(layers, network, sizes, memory_bytes=free, limit_s=best_s)
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
