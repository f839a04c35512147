"""A plan as a launch list: the role and the host of each process, with the environment variables of a framework.

Both frameworks start samplers as children of a trainer on its host. Where a plan places a sampler elsewhere, the list
names it as a process of its own, which needs sampling on remote hosts (GraphLearn's server mode); `warnings` says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from automap.gnn.plan import GnnPlan
from automap.gnn.problem import GnnProblem, Role, Task

SCHEMA = "automap.gnn-launch/1"
Style = Literal["dgl", "pyg"]
ORDER: tuple[Role, ...] = ("store", "worker", "sampler", "server")
"""Roles in the order of the list."""
MASTER_PORT = "29500"
"""Where the first worker listens for the others: the port that torchrun takes by default."""


def launch_list(plan: GnnPlan, problem: GnnProblem, style: Style) -> dict[str, Any]:
    """The processes of a plan: stores, then workers by rank, their samplers, and parameter servers.

    Args:
        plan: a plan for `problem`.
        problem: the problem.
        style: `dgl` = the variables of DGL's launcher, `pyg` = those of PyG's DistContext; workers have those of
            torch.distributed in both.

    Returns:
        A JSON document with `hosts`, `processes` and `warnings`.
    """
    hosts = [machine.name for machine in problem.machines]
    by_role: dict[Role, list[str]] = {role: [t.name for t in problem.tasks if t.role == role] for role in ORDER}
    common = _shared_environment(plan, by_role, style)
    processes, used, warnings = [], dict.fromkeys(hosts, 0), []
    for task in sorted(problem.tasks, key=lambda t: ORDER.index(t.role)):
        host = plan.placement[task.name]
        about, own = _of_role(task, plan, problem, by_role, style)
        environment = {**common, **own}
        process: dict[str, Any] = {"name": task.name, "role": task.role, "host": host, "environment": environment}
        process.update(about)
        if task.gpus:
            process["gpus"] = list(range(used[host], used[host] + task.gpus))
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, process["gpus"]))
            used[host] += task.gpus
        processes.append(process)
    far = [process["name"] for process in processes if process.get("beside_worker") is False]
    if far:
        more, num_samplers = " …" if len(far) > 4 else "", len(by_role["sampler"])
        warnings.append(
            f"not on the host of their worker: {', '.join(far[:4])}{more} ({len(far)} of {num_samplers} samplers); "
            "they need sampling on remote hosts"
        )
    return {
        "schema": SCHEMA,
        "style": style,
        "hosts": hosts,
        "processes": processes,
        "schedule": plan.schedule,
        "priorities": [f"{source} -> {target}" for source, target in plan.priorities],
        "warnings": warnings,
    }


def _shared_environment(plan: GnnPlan, by_role: Mapping[Role, Sequence[str]], style: Style) -> dict[str, str]:
    """The variables that all processes have; `by_role`: role -> its tasks in the order of the problem."""
    workers, num_samplers, found = by_role["worker"], len(by_role["sampler"]), dict[str, str]()
    if style == "dgl":
        found |= {
            "DGL_DIST_MODE": "distributed",
            "DGL_IP_CONFIG": "ip_config.txt",
            "DGL_CONF_PATH": "part_config.json",
            "DGL_NUM_SERVER": "1",
            "DGL_NUM_CLIENT": str(len(workers) + num_samplers),
            "DGL_NUM_SAMPLER": str(num_samplers // max(1, len(workers))),
        }
    if workers:
        found |= {"MASTER_ADDR": plan.placement[workers[0]], "MASTER_PORT": MASTER_PORT}
    return found


def _of_role(
    task: Task, plan: GnnPlan, problem: GnnProblem, by_role: Mapping[Role, Sequence[str]], style: Style
) -> tuple[dict[str, Any], dict[str, str]]:
    """The entries of the list for a process that depend on the role of its task, and its environment variables."""
    is_dgl = style == "dgl"
    if task.role == "store":
        partition = by_role["store"].index(task.name)
        own = {"DGL_ROLE": "server", "DGL_SERVER_ID": str(partition)} if is_dgl else {"PARTITION": str(partition)}
        return {"partition": partition}, own
    if task.role == "worker":
        rank = by_role["worker"].index(task.name)
        own = {"RANK": str(rank), "WORLD_SIZE": str(len(by_role["worker"]))}
        return {"rank": rank}, own | ({"DGL_ROLE": "client"} if is_dgl else {})
    if task.role == "sampler":
        own = {"DGL_ROLE": "sampler"} if is_dgl else {}
        fed = [flow.target for flow in problem.flows if flow.source == task.name]
        if not fed:
            return {}, own
        is_beside = plan.placement[fed[-1]] == plan.placement[task.name]
        return {"rank_of_worker": by_role["worker"].index(fed[-1]), "beside_worker": is_beside}, own
    return {}, {}
