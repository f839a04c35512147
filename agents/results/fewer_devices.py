"""Fewer devices: parts of a cluster on which a plan may be no slower than on all of its devices.

Where the network is slow or the batch small, fewer devices are as fast, and the others are free for other work. A part
is considered where its lower bound is below the step time of the best template on all devices. Units: seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, prod

from agents.results.cluster_parts import clusters_within, filled_within
from agents.results.infeasibility_advice import could_hold, fastest_template_s
from automap.bounds.partial_plans import BoundTable
from automap.cluster import Cluster
from automap.errors import PlanError, ProblemError, UserError
from automap.plan import Plan, format_devices, parse_devices
from automap.price.estimate import annotate, lower_bound_s
from automap.price.evaluator import Evaluator
from automap.price.plan_reader import lower_plan
from automap.problem import Problem
from automap.search_record import LEFT_BY_TARGET, LEFT_IDLE
from automap.space.space import PlanSpace
from automap.space.target_limits import plan_space
from automap.verify import Verifier

NEAR = 1.25
"""A part is searched if its best template takes at most this many times the time of the best template on all devices.
The gain of a search over the templates differs between two clusters by about that much, and seldom by more. Assumed."""


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
    """Step time of the best template on all devices; infinite where none of them fits, or no plan is on all devices."""


def promising(problem: Problem | PlanSpace, should_stop: Callable[[], bool] = lambda: False) -> tuple[Part, ...]:
    """Parts of a problem's cluster on which a plan may be as fast as on all devices, the fastest template's first.

    Args:
        problem: the problem on all devices, or all its plans.
        should_stop: called often; once it returns true, no further templates are priced.
    """
    space = space_on_all(problem) if isinstance(problem, Problem) else problem
    problem = problem if isinstance(problem, Problem) else problem.problem
    batch = problem.training.global_batch
    known = list(clusters_within(problem.cluster, batch))
    if not known and space is not None:
        return ()
    reference_s = inf if space is None else fastest_template_s(problem, space, should_stop) or inf
    if space is not None and reference_s == inf and not could_hold(problem):
        return ()
    if space is None:
        known = list(filled_within(problem.cluster, batch, problem.hints.fix))
    found: list[Part] = []
    # A ZeRO stage that the user fixes needs replicas: parts without them are skipped, unless there are plans on all
    # devices and none of these has replicas.
    needs_replicas = bool(problem.hints.fix.zero) and (space is None or _has_replicas(space))
    for cluster, devices in known:
        # Where no template fits on all devices, memory decides, and whole hosts have more of it.
        if space is not None and reference_s == inf and _is_spread(cluster, problem.cluster):
            continue
        try:
            part = _on(problem, cluster)
            bound_s, template_s = lower_bound_s(part), None
            looks = bound_s < reference_s and not should_stop()
            # Where there is no plan on all devices, some parts have no plan either.
            of_part = plan_space(part) if looks or space is None or needs_replicas else None
            if of_part is not None and needs_replicas and not _has_replicas(of_part):
                continue
            if of_part is not None and looks:
                bound_s = max(bound_s, BoundTable(of_part).first.time_s)
                template_s = fastest_template_s(part, of_part, should_stop) if bound_s < reference_s else None
        except UserError:
            continue  # the hints require more devices, or the target has no plan
        if bound_s < reference_s:
            found.append(
                Part(problem=part, devices=devices, bound_s=bound_s, template_s=template_s, reference_s=reference_s)
            )
    return tuple(sorted(found, key=lambda part: (part.template_s or inf, -len(part.devices))))


def _is_spread(part: Cluster, cluster: Cluster) -> bool:
    """Whether a part of a cluster has some devices of each of several hosts."""
    idle = {node.idle_devices for node in part.nodes} - {node.idle_devices for node in cluster.nodes}
    return len(part.hosts) > 1 and bool(idle)


def _has_replicas(space: PlanSpace) -> bool:
    return any(shape.replicas > 1 for shape in space.shapes)


def space_on_all(problem: Problem) -> PlanSpace | None:
    """The plans on all devices; None where degrees that the user fixes, or the target, leave some idle.

    Raises:
        ProblemError: no plan has what the hints fix, on no part either.
    """
    try:
        return plan_space(problem)
    except ProblemError:
        if not leave_idle(problem):
            raise
        return None


def leave_idle(problem: Problem) -> bool:
    """Whether the degrees that the user fixes, or the target, may leave devices of the cluster idle in every plan."""
    degrees = problem.hints.fix.degrees()
    is_limited = bool(degrees) or problem.target is not None
    return is_limited and prod(degrees.values()) < problem.cluster.num_devices


def check_hints(problem: Problem) -> None:
    """Refuses hints that leave no plan, on all devices or on a part of them.

    Raises:
        ProblemError: says why there is none on all devices.
    """
    try:
        plan_space(problem)
    except ProblemError:
        batch, fix = problem.training.global_batch, problem.hints.fix
        parts = filled_within(problem.cluster, batch, fix) if leave_idle(problem) else ()
        if not any(_has_plans(problem, cluster) for cluster, _ in parts):
            raise


def _has_plans(problem: Problem, cluster: Cluster) -> bool:
    """Whether there are plans on a part of a problem's cluster."""
    with contextlib.suppress(UserError):
        plan_space(_on(problem, cluster))
        return True
    return False


def _on(problem: Problem, cluster: Cluster) -> Problem:
    """The problem on a part of its cluster: the plan that the user runs today is for all devices."""
    return Problem.build(problem.graph, cluster, problem.training, replace(problem.hints, baseline=None))


def on_every(space: PlanSpace) -> Part:
    """All devices of a problem's cluster as a part, without a template that fits."""
    devices, bound_s = tuple(range(space.problem.cluster.num_devices)), BoundTable(space).first.time_s
    return Part(problem=space.problem, devices=devices, bound_s=bound_s, template_s=None, reference_s=inf)


def needed(parts: tuple[Part, ...]) -> Part | None:
    """The part to search where there is no plan on all devices: the one with the fastest template; where no template
    fits, the largest one, on which the search says so. None where no part has a plan.

    Args:
        parts: see `promising`.
    """
    return next(iter(parts), None)


def told_idle(problem: Problem, plan: Plan) -> str:
    """A sentence that says how many devices a plan leaves idle: because of the degrees that the user fixes, because of
    the target, or because no plan on all devices was found that fits."""
    devices = problem.cluster.num_devices
    idle = devices - len({device for stage in plan.stages for device in parse_devices(stage.devices)})
    stated = ", ".join(f"{name} {value}" for name, value in problem.hints.fix.degrees().items())
    target = "" if problem.target is None else f"the target {problem.target.name}"
    if not stated and not target:
        return f"the plan leaves {idle} of {devices} devices idle: no plan that fits was found on all of them"
    if not stated:
        return f"{target} leaves {idle} of {devices} devices {LEFT_BY_TARGET}"
    return f"hints.fix, {stated},{target and f' with {target}'} leaves {idle} of {devices} devices {LEFT_IDLE}"


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
