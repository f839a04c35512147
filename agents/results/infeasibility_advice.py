"""Infeasibility advice: the error message for problems of which no plan fits into memory.

It names the plan that comes nearest, where and by how much it does not fit, and changes of the problem that help. Every
change was tried on the problem: at least one template of the changed problem fits. Units: bytes, GiB.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from math import gcd, inf
from typing import Any, NamedTuple

from agents.results.cluster_parts import stated_link
from automap.bounds.priced_templates import priced_in_parts
from automap.cluster import Cluster, Node
from automap.device_kinds import in_gib, known_devices
from automap.errors import ClusterError, NothingFits, ProblemError
from automap.families import families, kernels_of
from automap.hints import Fix
from automap.memory_band import LEAST_CONFIDENCE
from automap.plan import Plan, devices_in_words, format_devices, parse_devices
from automap.price.estimate import annotate
from automap.problem import Problem
from automap.records import to_json
from automap.space.shape import divisors
from automap.space.space import PlanSpace, Values
from automap.space.target_limits import plan_space
from automap.targets import ANY

CONFIDENCES = (0.9, 0.75, LEAST_CONFIDENCE)
"""Probabilities of fitting that are tried in place of a higher one."""
WITHIN_S = 4.0
"""Processor time in seconds in which changes are tried (assumed): the budget of the search is over by then."""
MOST_DEVICES = 4096
"""Largest number of devices of a cluster that is tried (assumed)."""
ONE_BY_ONE = 6
"""Number of clusters that are tried one by one in the order of their size, before sizes are doubled (assumed)."""
HOST_DEVICES = 8
"""Largest number of devices of a host when a cluster of one host grows (assumed)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change of the problem with which some plan fits."""

    field: str
    """Name of the changed field, as in the user's request."""
    value: str
    """New value of the field."""
    about: str
    """Description of the change in words."""
    step_time_s: float
    """Step time of the best template of the changed problem."""


class Change(NamedTuple):
    """A change of the problem; the first three fields are those of `Remedy`."""

    field: str
    value: str
    about: str
    make: Callable[[], Problem]
    """Builds the changed problem."""


def nothing_fits(space: PlanSpace, nearest: Values) -> NothingFits:
    """The error for a problem of which no plan fits.

    Args:
        space: plan space of the problem.
        nearest: values of the plan that overflows memory least.
    """
    lowered = space.lowered(nearest)
    plan = annotate(space.decode(nearest), lowered, space.evaluator)
    shape = space.shape(nearest)
    sizes = (*zip(space.axes, space.meshes.mesh(shape), strict=True), ("pp", shape.pp))
    degrees = ", ".join(f"{name} {size}" for name, size in sizes)
    trials = _Trials(WITHIN_S)
    found = _remedies(space.problem, trials)
    none = "No change was found to help in the time that there was: try a larger cluster or a smaller model."
    if trials.all:
        none = (
            f"No single change helps, nor {MOST_DEVICES} such devices: a part of the model that cannot be divided is "
            "larger than a device. Train a smaller model or shorter samples."
        )
    begin = "Any of these makes a plan fit" if len(found) > 1 else "This makes a plan fit"
    return NothingFits(
        f"no plan fits: the nearest ({degrees}) {_shortage(plan)}",
        field="cluster",
        value=space.problem.cluster.name,
        repair=f"{begin}: {'; '.join(r.about for r in found)}." if found else none,
        nearest=plan.to_json(),
        changes=[to_json(r) for r in found],
    )


def nothing_fits_on_all(fault: NothingFits, devices: Sequence[int], cluster: Cluster) -> NothingFits:
    """The error of a search on some devices of a cluster, as one of a search on all of them.

    Args:
        fault: the error.
        devices: [devices that were searched] number of each in the whole cluster.
        cluster: the whole cluster.
    """
    if fault.nearest is None:
        return fault

    def numbered(named: str) -> str:
        return format_devices(tuple(devices[device] for device in parse_devices(named)))

    found = Plan.from_json(fault.nearest)
    assert found.estimate is not None
    stages = tuple(replace(stage, devices=numbered(stage.devices)) for stage in found.stages)
    memory = tuple(replace(row, devices=numbered(row.devices)) for row in found.estimate.memory_bytes)
    estimate = replace(found.estimate, memory_bytes=memory)
    nearest = replace(found, stages=stages, estimate=estimate, cluster=cluster.to_json())
    idle = f"it leaves {cluster.num_devices - len(devices)} of the {cluster.num_devices} devices idle"
    return NothingFits(
        fault.message.replace(_shortage(found), f"{_shortage(nearest)}; {idle}"),
        field=fault.field,
        value=cluster.name,
        repair=fault.repair,
        nearest=nearest.to_json(),
        changes=fault.changes,
    )


def _shortage(plan: Plan) -> str:
    """How much memory a plan needs on the devices where most is missing, and how much they have."""
    assert plan.estimate is not None
    worst = max(plan.estimate.memory_bytes, key=lambda m: m.total - m.capacity + m.reserve)
    short = worst.total - worst.capacity + worst.reserve
    free = f", {in_gib(worst.reserve)} of them kept free to be sure" if worst.reserve > 0.0 else ""
    where = devices_in_words(worst.devices)
    have = f"each of the {where}, which have" if where.startswith("devices") else f"{where}, which has"
    fixed = ""
    if worst.buffers > worst.capacity:
        fixed = f"; {in_gib(worst.buffers)} GiB are buffers, among them those that the trainer keeps on every device"
    return (
        f"needs {in_gib(worst.total)} GiB on {have} {in_gib(worst.capacity)} GiB{free}{fixed}; "
        f"{in_gib(short)} GiB are missing"
    )


class _Trials:
    """Tries changes for some time: with a large problem each takes seconds, and the budget of the search is over.

    Attributes:
        all: whether no change was left out for lack of time.
    """

    def __init__(self, within_s: float) -> None:
        """Begins now; `within_s` seconds of processor time later, no further change is tried."""
        self._end_s = time.process_time() + within_s
        self.all = True

    def remedy(self, change: Change) -> Remedy | None:
        """The remedy that a change makes; None where no plan fits with it, or the time is over."""
        if time.process_time() > self._end_s:
            self.all = False
            return None
        try:
            seconds = fastest_template_s(change.make())
        except (ClusterError, ProblemError):
            return None  # the change contradicts other parts of the problem
        if seconds is None:
            return None
        return Remedy(field=change.field, value=change.value, about=change.about, step_time_s=seconds)

    def remedies(self, changes: Iterable[Change]) -> Iterator[Remedy]:
        """The remedies that some changes make."""
        return filter(None, map(self.remedy, changes))


def _remedies(problem: Problem, trials: _Trials) -> list[Remedy]:
    """Changes with which some template fits, the cheapest first: hints, confidence, training, batch, then hardware."""
    found = list(trials.remedies(_freed(problem))) or list(trials.remedies(_all_freed(problem)))
    trainings = (_precisions(problem), _optimizers(problem), _batches(problem))
    families = (_less_sure(problem), _without_target(problem), *trainings)
    firsts = [next(trials.remedies(family), None) for family in families]
    hardware = [_grown(problem, trials), next(trials.remedies(_larger(problem)), None)]
    return [*found, *filter(None, firsts), *filter(None, hardware)]


def could_hold(problem: Problem) -> bool:
    """Whether all devices together have memory for the parameters, gradients and the optimizer's state."""
    cluster = problem.cluster
    return problem.whole_state_bytes <= sum(cluster.device(d).memory_bytes for d in range(cluster.num_devices))


def fastest_template_s(
    problem: Problem, space: PlanSpace | None = None, should_stop: Callable[[], bool] = lambda: False
) -> float | None:
    """Step time of the best template of a problem, or None if none fits.

    Args:
        problem: any problem.
        space: its plans, if they are known.
        should_stop: called now and then; once it returns true, the best template until then is taken.
    """
    if not could_hold(problem):
        return None
    space = space or plan_space(problem)
    best_s = inf
    for _, prices in priced_in_parts(space):
        best_s = min(best_s, float(prices[prices[:, 1] <= 0.0, 0].min(initial=inf)))
        if should_stop():
            break
    return best_s if best_s < inf else None


# -- hints and training ----------------------------------------------------------------------------------------------


def _freed(problem: Problem) -> Iterator[Change]:
    """Changes that leave out one hint each."""
    hints = problem.hints
    for name in (f.name for f in fields(Fix)):
        value = getattr(hints.fix, name)
        if value is not None:
            about = f"leave {name} free (hints.fix.{name} is {value})"
            free = _changed(problem, hints=replace(hints, fix=replace(hints.fix, **{name: None})))
            yield Change(f"hints.fix.{name}", "null", about, free)
    if hints.constraints:
        free = _changed(problem, hints=replace(hints, constraints=()))
        yield Change("hints.constraints", "[]", "leave out hints.constraints", free)
    if hints.memory_reserve_bytes > 0:
        about = f"reserve no memory (now {in_gib(hints.memory_reserve_bytes)} GiB)"
        free = _changed(problem, hints=replace(hints, memory_reserve_bytes=0.0))
        yield Change("hints.memory_reserve_bytes", "0", about, free)


def _all_freed(problem: Problem) -> Iterator[Change]:
    """The change that leaves out all hints together."""
    hints = problem.hints
    if hints.fix != Fix() or hints.constraints or hints.memory_reserve_bytes:
        about = "leave out hints.fix, hints.constraints and hints.memory_reserve_bytes together"
        free = _changed(problem, hints=replace(hints, fix=Fix(), constraints=(), memory_reserve_bytes=0.0))
        yield Change("hints", "{}", about, free)


def _changed(problem: Problem, **changes: Any) -> Callable[[], Problem]:
    """Builds the problem with another cluster, training or hints."""
    parts = {field.name: getattr(problem, field.name) for field in fields(Problem)}
    return partial(Problem.build, **parts | changes)


def _less_sure(problem: Problem) -> Iterator[Change]:
    """Lower probabilities with which the plan must fit, the highest first."""
    for confidence in (c for c in CONFIDENCES if c < problem.training.memory_confidence):
        yield _trained(problem, f"accept a plan that fits with {confidence:.0%}", "memory_confidence", confidence)


def _without_target(problem: Problem) -> Iterator[Change]:
    """The change that allows plans which the configuration of the target cannot express."""
    target = problem.training.target
    if target != ANY:
        yield _trained(problem, f"search without the target {target} (training.target {ANY})", "target", ANY)


def _precisions(problem: Problem) -> Iterator[Change]:
    """Precisions with activations of half the size."""
    if problem.activation_bytes == 4.0:
        for name in ("bf16", "fp16"):
            yield _trained(problem, f"train in {name}", "precision", name)


def _optimizers(problem: Problem) -> Iterator[Change]:
    """Optimizers with fewer moments, the one with most first."""
    optimizers = ("adam", "momentum", "sgd")
    for name in optimizers[optimizers.index(problem.training.optimizer) + 1 :]:
        yield _trained(problem, f"use the optimizer {name}", "optimizer", name)


def _batches(problem: Problem) -> Iterator[Change]:
    """Smaller global batches, the largest first."""
    batch = problem.training.global_batch
    for size in [d for d in divisors(batch)[::-1] if d < batch]:
        yield _trained(problem, f"a global batch of {size}", "global_batch", size)


def _trained(problem: Problem, about: str, name: str, value: Any) -> Change:
    training = to_json(problem.training) | {name: value}
    return Change(f"training.{name}", str(value), about, _changed(problem, training=training))


# -- hardware --------------------------------------------------------------------------------------------------------


def _grown(problem: Problem, trials: _Trials) -> Remedy | None:
    """The smallest larger cluster of the same devices that helps.

    The first sizes are tried one by one, the next ones by doubling and then halving the interval.
    """
    batch = problem.training.global_batch
    # Replicas need a number of devices with a common factor with the batch; tensor parallelism can use any even number.
    sizes = [s for s in _sizes(problem.cluster) if gcd(_devices(problem.cluster, *s), 2 * batch) > 1 or batch == 1]
    found: Remedy | None = None
    low, high = -1, 0
    while found is None and low < len(sizes) - 1:
        high = min(low + max(1, low - ONE_BY_ONE), len(sizes) - 1)
        found = trials.remedy(_enlarged(problem, *sizes[high]))
        low = low if found else high
    while found is not None and high - low > 1:
        middle = (low + high) // 2
        smaller = trials.remedy(_enlarged(problem, *sizes[middle]))
        low, high, found = (low, middle, smaller) if smaller else (middle, high, found)
    return found


def _roomiest(cluster: Cluster) -> Node:
    """The row of equal hosts whose devices have most memory."""
    return max(cluster.nodes, key=lambda node: cluster.devices[node.device].memory_bytes)


def _devices(cluster: Cluster, hosts: int, each: int) -> int:
    """Number of devices of the cluster, if its roomiest row had `hosts` hosts with `each` devices each."""
    row = _roomiest(cluster)
    return cluster.num_devices - row.count * row.num_devices + hosts * each


def _sizes(cluster: Cluster) -> list[tuple[int, int]]:
    """(hosts, devices of each) of larger clusters, for the row of equal hosts whose devices have most memory."""
    row = _roomiest(cluster)
    others = _devices(cluster, 0, 0)
    sizes = []
    each = row.num_devices
    if row.count == 1:
        sizes = [(1, n) for n in range(each + 1, HOST_DEVICES + 1)]
        each = max(each, HOST_DEVICES)
    return [*sizes, *((count, each) for count in range(row.count + 1, (MOST_DEVICES - others) // each + 1))]


def _enlarged(problem: Problem, hosts: int, each: int) -> Change:
    """The change to so many hosts with so many devices each in the roomiest row."""
    cluster = problem.cluster
    row = _roomiest(cluster)
    nodes = tuple(replace(node, count=hosts, num_devices=each) if node is row else node for node in cluster.nodes)
    name = "+".join(f"{n.count}x{n.num_devices}x{n.device}" for n in nodes) + stated_link(cluster)
    # The links of further devices were not measured; usual links are good enough to find a plan that fits.
    grown = replace(cluster, nodes=nodes, name=name, bandwidth_GBps=None)
    return Change("cluster", name, f"{grown.num_devices} such devices ({name})", _changed(problem, cluster=grown))


def _larger(problem: Problem) -> Iterator[Change]:
    """Clusters with devices of the same family and more memory in place of those with least, the smallest memory
    first."""
    cluster = problem.cluster
    kinds = {node.device for node in cluster.nodes}
    least = min(sorted(kinds), key=lambda kind: cluster.devices[kind].memory_GiB)
    present = cluster.devices[least]
    family = next((names for names in families().values() if present.name in names), kernels_of())
    roomier = [d for d in known_devices() if d.memory_GiB > present.memory_GiB and d.name in family]
    for device in sorted(roomier, key=lambda d: (d.memory_GiB, d.name)):
        names = (device.name if node.device == least else node.device for node in cluster.nodes)
        rows = (f"{node.count}x{node.num_devices}x{name}" for node, name in zip(cluster.nodes, names, strict=True))
        text = "+".join(rows) + stated_link(cluster)
        place = f" in place of {least}" if len(kinds) > 1 else ""
        about = f"devices with {device.memory_GiB:.0f} GiB{place}, such as {device.name} ({text})"
        yield Change("cluster", text, about, _changed(problem, cluster=text))
