"""Parts: clusters made of some of a cluster's devices, on which a plan may be no slower than on all.

Where the network is slow, or the batch small, fewer devices are as fast, and the others are left for something else. A
part is worth a look where not even its bound is above what the best template takes on all devices. Units: seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from agents.results.infeasibility_advice import fastest_template_s
from automap.bounds.partial_plans import BoundTable
from automap.cluster import Cluster
from automap.errors import PlanError, UserError
from automap.plan import Plan, format_devices, parse_devices
from automap.price.estimate import annotate, lower_bound_s
from automap.price.evaluator import Evaluator
from automap.price.plan_reader import lower_plan
from automap.problem import Problem
from automap.space.shape import divisors
from automap.space.space import PlanSpace
from automap.verify import Verifier

NEAR = 1.25
"""A part is searched where its best template takes at most so many times what the best one takes on all devices: by
that much, and seldom by more, searches are ahead of templates on one of two clusters and not on the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Some devices of a cluster as a cluster of their own."""

    problem: Problem
    """The same on these devices alone."""
    devices: tuple[int, ...]
    """Their numbers in the whole cluster, in the order of those in the part."""
    bound_s: float
    """No plan of the part takes less."""
    template_s: float | None
    """Step time of its best template; None where none fits, or none was priced."""
    reference_s: float
    """Step time of the best template on all devices."""


def clusters_within(cluster: Cluster, batch: int) -> Iterator[tuple[Cluster, tuple[int, ...]]]:
    """Clusters of whole equal hosts, or of devices of one host, with their devices' numbers, the largest first.

    Numbers of hosts and of devices are divisors of what there is, and the largest that divides the batch: what leaves
    no device of a host idle beside busy ones of other hosts, whose links it would share.
    """
    first = 0
    for node in cluster.nodes:
        rows = [(count, node.num_devices) for count in _counts(node.count, batch)]
        rows += [(1, each) for each in _counts(node.num_devices, batch) if each < node.num_devices]
        for count, each in sorted(rows, reverse=True):
            devices = tuple(range(first, first + count * each))
            if len(devices) == cluster.num_devices:
                continue
            matrix = cluster.bandwidth_GBps
            yield (
                replace(
                    cluster,
                    name=f"{count}x{each}x{node.device}",
                    nodes=(replace(node, count=count, num_devices=each),),
                    devices={node.device: cluster.devices[node.device]},
                    bandwidth_GBps=matrix and tuple(tuple(matrix[a][b] for b in devices) for a in devices),
                ),
                devices,
            )
        first += node.count * node.num_devices


def _counts(number: int, batch: int) -> list[int]:
    """Divisors of a number, and the largest number up to it that divides the batch."""
    return sorted({*divisors(number), max(d for d in divisors(batch) if d <= number)})


def promising(problem: Problem, should_stop: Callable[[], bool] = lambda: False) -> tuple[Part, ...]:
    """Parts of a problem's cluster that may hold a plan as fast as any on all devices, the best template's first.

    Args:
        problem: whose cluster is looked at.
        should_stop: asked before each part; once true, templates of the others are not priced.
    """
    found: list[Part] = []
    known = list(clusters_within(problem.cluster, problem.training.global_batch))
    reference_s = fastest_template_s(problem) if known else None
    if reference_s is None:
        return ()
    # What the user runs today is for all devices.
    hints = replace(problem.hints, baseline=None)
    for cluster, devices in known:
        try:
            part = Problem.build(problem.graph, cluster, problem.training, hints)
            bound_s, template_s = lower_bound_s(part), None
            if bound_s < reference_s and not should_stop():
                bound_s = max(bound_s, BoundTable(PlanSpace(part)).first.time_s)
                template_s = fastest_template_s(part) if bound_s < reference_s else None
        except UserError:
            continue  # the hints ask for more devices
        if bound_s < reference_s:
            found.append(
                Part(problem=part, devices=devices, bound_s=bound_s, template_s=template_s, reference_s=reference_s)
            )
    return tuple(sorted(found, key=lambda part: part.template_s or float("inf")))


def near(parts: tuple[Part, ...]) -> Part | None:
    """The part to search: that with the fastest template, if that is near the best one on all devices."""
    best = parts[0] if parts else None
    if best is None or best.template_s is None or best.template_s > NEAR * best.reference_s:
        return None
    return best


def on_all(plan: Plan, part: Part, problem: Problem, evaluator: Evaluator) -> Plan | None:
    """A plan of a part as one of the whole cluster whose other devices are idle; None where the hints forbid it.

    Args:
        plan: of the part.
        part: of the problem's cluster.
        problem: the whole.
        evaluator: of the whole.
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
