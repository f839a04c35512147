"""Fewer devices: parts of a cluster on which a plan may be no slower than on all of its devices.

Where the network is slow or the batch small, fewer devices are as fast, and the others are free for other work. A part
is considered where its lower bound is below the step time of the best template on all devices. Units: seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import NamedTuple

import numpy as np

from agents.results.infeasibility_advice import fastest_template_s
from automap.arrays import Floats
from automap.bounds.partial_plans import BoundTable
from automap.cluster import Cluster, Node
from automap.errors import PlanError, ProblemError, UserError
from automap.plan import Plan, format_devices, parse_devices
from automap.price.estimate import annotate, lower_bound_s
from automap.price.evaluator import Evaluator
from automap.price.plan_reader import lower_plan
from automap.problem import Problem
from automap.space.device_order import MAX_CUT, best_connected
from automap.space.mesh_shapes import FEW_TIMES
from automap.space.shape import divisors
from automap.space.target_limits import plan_space
from automap.verify import Verifier

NEAR = 1.25
"""A part is searched if its best template takes at most so many times as long as the best template on all devices. The
gain of a search over the templates differs between two clusters by about that much, and seldom by more. Assumed."""
SHARED_BY = (2, 3, 4, 8)
"""Numbers that divide a part where few numbers divide what is there: sizes of inner axes that the heads and widths of
most models can be split by (assumed)."""
MOST_KINDS = 3
"""Kinds of devices of which all sets are parts; of more, the fastest ones are. Templates of all ten sets of four kinds
took 24 s for T5-large on 32 devices, where the fastest two are the best part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Some devices of a cluster as a cluster of their own."""

    problem: Problem
    """The problem on these devices alone."""
    devices: tuple[int, ...]
    """[devices of the part] number of each in the whole cluster."""
    bound_s: float
    """Lower bound on the step time of all plans of the part."""
    template_s: float | None
    """Step time of the best template of the part; None where none fits, or none was priced."""
    reference_s: float
    """Step time of the best template on all devices."""


def clusters_within(cluster: Cluster, batch: int) -> Iterator[tuple[Cluster, tuple[int, ...]]]:
    """Equal whole hosts, devices of one host, or all hosts of some kinds, as clusters with their devices' numbers.

    The numbers of hosts and of devices are divisors of those of the cluster, the largest number that divides the batch,
    the largest power of two, which the heads, widths and experts of most models can be split by, and, where divisors
    are far apart, the largest numbers that others divide (`SHARED_BY`): 22 of 23 devices may be split in two, 23 may
    not. Where links were measured one by one, the best connected ones stay, and those with far slower links are left
    out also where no such number does it. No device of a host is idle where other hosts are in use, since hosts share
    their links to the network.
    """
    first = 0
    matrix = None if cluster.bandwidth_GBps is None else np.array(cluster.bandwidth_GBps)
    # Equal hosts may stand in several rows.
    for one, alike in itertools.groupby(cluster.nodes, key=lambda node: replace(node, count=1)):
        node = replace(one, count=sum(row.count for row in alike))
        each_first = range(first, first + node.count * node.num_devices, node.num_devices)
        hosts = _staying([tuple(range(at, at + node.num_devices)) for at in each_first], matrix)
        inside = _staying([(device,) for device in hosts.members[0]], matrix)
        rows = [(count, node.num_devices) for count in _counts(node.count, batch) | hosts.counts]
        own = _counts(node.num_devices, batch) | inside.counts
        rows += [(1, each) for each in own if each < node.num_devices]
        for count, each in sorted(rows, reverse=True):
            some = hosts.members[:count] if each == node.num_devices else inside.members[:each]
            devices = tuple(sorted(itertools.chain.from_iterable(some)))
            if len(devices) < cluster.num_devices:
                yield _within(cluster, (replace(node, count=count, num_devices=each),), devices), devices
        first += node.count * node.num_devices
    for nodes in _of_kinds(cluster):
        of_nodes = (number for number, node in enumerate(cluster.nodes) for _ in range(node.count * node.num_devices))
        devices = tuple(device for device, number in enumerate(of_nodes) if number in nodes)
        yield _within(cluster, tuple(cluster.nodes[number] for number in nodes), devices), devices


class _Staying(NamedTuple):
    """Hosts, or devices of a host, in the order in which they stay: the first ones where few do."""

    members: Sequence[tuple[int, ...]]
    """The devices of each."""
    counts: set[int]
    """Numbers that stay where those are left out whose links are far slower than those of the others."""


def _staying(members: Sequence[tuple[int, ...]], matrix: Floats | None) -> _Staying:
    """The order in which some stay; that of their numbers, where links were not measured one by one.

    Args:
        members: devices of each host, or each device of one host.
        matrix: [devices, devices] measured bandwidth.
    """
    if matrix is None or not 1 < len(members) <= MAX_CUT:
        return _Staying(members, set())
    links = np.array([[matrix[np.ix_(one, other)].min() for other in members] for one in members])
    order = best_connected(links)
    # Slowest link of the first ones of the order, in either direction.
    slowest = [min(links[a, b] for a in order[:n] for b in order[:n] if a != b) for n in range(2, len(order) + 1)]
    pairs = enumerate(itertools.pairwise(slowest), 2)
    return _Staying([members[one] for one in order], {few for few, (now, more) in pairs if now > FEW_TIMES * more})


def _of_kinds(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Numbers of the entries of `nodes` that some kinds of devices have together, but not all kinds: two or more."""
    kinds = [node.device for node in cluster.nodes]
    by_speed = sorted(set(kinds), key=lambda kind: (-max(cluster.devices[kind].peak_TFLOPs.values()), kind))
    # Of many kinds only the fastest ones: all sets of two or more are ten of four kinds, and 246 of eight.
    sizes = range(1, len(by_speed))
    if len(by_speed) <= MOST_KINDS:
        sets = [some for size in sizes for some in itertools.combinations(by_speed, size)]
    else:
        sets = [tuple(by_speed[:size]) for size in sizes]
    for some in sets:
        nodes = tuple(number for number, kind in enumerate(kinds) if kind in some)
        if len(nodes) > 1:
            yield nodes


def _within(cluster: Cluster, nodes: tuple[Node, ...], devices: tuple[int, ...]) -> Cluster:
    """The cluster of some hosts or devices of another one."""
    matrix = cluster.bandwidth_GBps
    return replace(
        cluster,
        name="+".join(f"{node.count}x{node.num_devices}x{node.device}" for node in nodes),
        nodes=nodes,
        devices={node.device: cluster.devices[node.device] for node in nodes},
        bandwidth_GBps=matrix and tuple(tuple(matrix[a][b] for b in devices) for a in devices),
    )


def _counts(number: int, batch: int) -> set[int]:
    """Divisors of a number, the largest divisor of the batch and the largest power of two up to it, and multiples of
    others where it has few divisors."""
    own = divisors(number)
    found = {*own, max(d for d in divisors(batch) if d <= number), 1 << (number.bit_length() - 1)}
    if any(more > FEW_TIMES * few for few, more in itertools.pairwise(own)):
        found |= {number // by * by for by in SHARED_BY if by < number}
    return found


def promising(problem: Problem, should_stop: Callable[[], bool] = lambda: False) -> tuple[Part, ...]:
    """Parts of a problem's cluster on which a plan may be as fast as on all devices, the fastest template's first.

    Args:
        problem: the problem on all devices.
        should_stop: called before each part; once it returns true, templates of the further parts are not priced.
    """
    known = list(clusters_within(problem.cluster, problem.training.global_batch))
    reference_s = _reference_s(problem) if known else None
    if reference_s is None:
        return ()
    found: list[Part] = []
    # The plan that the user runs today is for all devices.
    hints = replace(problem.hints, baseline=None)
    # A ZeRO stage that the user fixes asks for replicas, where all devices have any.
    needs_replicas = bool(hints.fix.zero) and reference_s < inf and _has_replicas(problem)
    for cluster, devices in known:
        try:
            part = Problem.build(problem.graph, cluster, problem.training, hints)
            if needs_replicas and not _has_replicas(part):
                continue
            bound_s, template_s = lower_bound_s(part), None
            if bound_s < reference_s and not should_stop():
                bound_s = max(bound_s, BoundTable(plan_space(part)).first.time_s)
                template_s = fastest_template_s(part) if bound_s < reference_s else None
        except UserError:
            continue  # the hints require more devices
        if bound_s < reference_s:
            found.append(
                Part(problem=part, devices=devices, bound_s=bound_s, template_s=template_s, reference_s=reference_s)
            )
    return tuple(sorted(found, key=lambda part: part.template_s or inf))


def _has_replicas(problem: Problem) -> bool:
    return any(shape.replicas > 1 for shape in plan_space(problem).shapes)


def _reference_s(problem: Problem) -> float | None:
    """Step time of the best template on all devices; None where none fits, infinite where degrees leave some idle.

    Raises:
        ProblemError: no plan has what the hints fix, on no part either.
    """
    try:
        return fastest_template_s(problem)
    except ProblemError:
        if not _leave_idle(problem):
            raise
        return inf


def _leave_idle(problem: Problem) -> bool:
    """Whether the degrees that the user fixes are those of a plan on fewer devices than there are."""
    fix = problem.hints.fix
    if None in (fix.dp, fix.tp, fix.pp) or problem.hints.baseline is not None:
        return False
    degrees = (fix.dp, fix.tp, fix.pp, fix.cp, fix.ep)
    return prod(degree or 1 for degree in degrees) < problem.cluster.num_devices


def needed(problem: Problem) -> Part | None:
    """The part with the fastest template, where the degrees that the user fixes leave devices idle.

    So it is with the degrees of a plan that leaves devices idle: no plan on all devices has them. None where one has,
    and where no part has one that fits.
    """
    if not _leave_idle(problem) or _reference_s(problem) != inf:
        return None
    best = next(iter(promising(problem)), None)
    return None if best is None or best.template_s is None else best


def part_to_search(parts: tuple[Part, ...]) -> Part | None:
    """The part with the fastest template, if that is nearly as fast as the best one on all devices (`NEAR`)."""
    best = parts[0] if parts else None
    if best is None or best.template_s is None or best.template_s > NEAR * best.reference_s:
        return None
    return best


def on_all(plan: Plan, part: Part, problem: Problem, evaluator: Evaluator) -> Plan | None:
    """A plan of a part as a plan of the whole cluster, whose other devices are idle; None where the hints forbid it.

    Args:
        plan: the plan of the part.
        part: part of the problem's cluster.
        problem: the problem on all devices.
        evaluator: evaluator of this problem.
    """
    stages = tuple(
        replace(stage, devices=format_devices(tuple(part.devices[d] for d in parse_devices(stage.devices))))
        for stage in plan.stages
    )
    lifted = replace(plan, stages=stages, cluster=problem.cluster.to_json(), training=problem.training)
    try:
        lifted = annotate(lifted, lower_plan(lifted, evaluator), evaluator)
    except PlanError:
        return None
    return None if Verifier(problem).violations(lifted) else lifted
