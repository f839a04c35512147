"""A plan as a launch list: which process runs which role on which host, with the environment that a framework reads.

Both frameworks start samplers as children of a trainer on its host. Where a plan places a sampler elsewhere, the list
names it as a process of its own, which needs sampling on remote hosts (GraphLearn's server mode); `warnings` says so.
"""

from __future__ import annotations

from typing import Any, Literal

from automap.gnn.plan import GnnPlan
from automap.gnn.problem import GnnProblem

SCHEMA = "automap.gnn-launch/1"
Style = Literal["dgl", "pyg"]
MASTER_PORT = "29500"
"""Where the first worker listens for the others: the port that torchrun takes by default."""


def launch_list(plan: GnnPlan, problem: GnnProblem, style: Style) -> dict[str, Any]:
    """The processes of a plan, store by store, then workers by rank, their samplers, and parameter servers.

    Args:
        plan: a plan for `problem`.
        problem: the problem.
        style: `dgl` = the variables of DGL's launcher, `pyg` = those of PyG's DistContext; workers have those of
            torch.distributed in both.

    Returns:
        A JSON document with `hosts`, `processes` and `warnings`.
    """
    hosts = [machine.name for machine in problem.machines]
    roles = {task.name: task.role for task in problem.tasks}
    by_role = {role: [t.name for t in problem.tasks if t.role == role] for role in ("store", "worker", "server")}
    worker_of = {f.source: f.target for f in problem.flows if roles[f.source] == "sampler"}
    num_samplers = len([task for task in problem.tasks if task.role == "sampler"])
    common = {
        "dgl": {
            "DGL_DIST_MODE": "distributed",
            "DGL_IP_CONFIG": "ip_config.txt",
            "DGL_CONF_PATH": "part_config.json",
            "DGL_NUM_SERVER": "1",
            "DGL_NUM_CLIENT": str(len(by_role["worker"]) + num_samplers),
            "DGL_NUM_SAMPLER": str(num_samplers // max(1, len(by_role["worker"]))),
        },
        "pyg": {},
    }[style]
    if by_role["worker"]:
        common |= {"MASTER_ADDR": plan.placement[by_role["worker"][0]], "MASTER_PORT": MASTER_PORT}
    processes, used, warnings = [], dict.fromkeys(hosts, 0), []
    for task in sorted(problem.tasks, key=lambda t: ("store", "worker", "sampler", "server").index(t.role)):
        host = plan.placement[task.name]
        process: dict[str, Any] = {"name": task.name, "role": task.role, "host": host, "environment": dict(common)}
        environment = process["environment"]
        if task.role == "store":
            process["partition"] = by_role["store"].index(task.name)
            own = {"DGL_ROLE": "server", "DGL_SERVER_ID": str(process["partition"])}
            environment.update(own if style == "dgl" else {"PARTITION": str(process["partition"])})
        if task.role == "worker":
            process["rank"] = by_role["worker"].index(task.name)
            environment.update({"RANK": str(process["rank"]), "WORLD_SIZE": str(len(by_role["worker"]))})
        if task.role == "sampler" and task.name in worker_of:
            process["rank_of_worker"] = by_role["worker"].index(worker_of[task.name])
            process["beside_worker"] = plan.placement[worker_of[task.name]] == host
        if task.role in ("worker", "sampler") and style == "dgl":
            environment["DGL_ROLE"] = "client" if task.role == "worker" else "sampler"
        if task.gpus:
            process["gpus"] = list(range(used[host], used[host] + task.gpus))
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, process["gpus"]))
            used[host] += task.gpus
        processes.append(process)
    far = [process["name"] for process in processes if process.get("beside_worker") is False]
    if far:
        more = " …" if len(far) > 4 else ""
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
