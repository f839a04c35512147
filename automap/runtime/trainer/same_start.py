"""What all processes of a training begin with: one plan, one network, one version of the code, and no fault.

Processes that begin with something else would wait for each other in other collectives, or train on other samples.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
from collections.abc import Mapping

import torch.distributed as dist
from torch import nn

from automap.errors import PlanError, UserError
from automap.plan import Plan

DECIDING = (
    "model", "cluster", "training", "stages", "schedule", "num_micro_batches", "samples_per_micro_batch", "sync",
)  # fmt: skip
"""The parts of a plan that decide what a process does."""
NOTHING = "nothing there"


def agree(plan: Plan, module: nn.Module, fault: UserError | None) -> None:
    """Raises an error on every process where one of them has a fault, or begins with something else than process 0.

    A collective of all processes.

    Args:
        plan: the plan of this process.
        module: its network, before anything of it is changed.
        fault: what it has found wrong already.

    Raises:
        UserError: the fault of this process; of another process, or what differs, with its number.
    """
    texts = begins_with(plan, module)
    own = {name: hashlib.sha256("\n".join(text).encode()).hexdigest() for name, text in texts.items()}
    every: list[tuple[dict[str, str], dict[str, str]]] = [({}, {})] * dist.get_world_size()
    dist.all_gather_object(every, ({} if fault is None else fault.texts, own))
    if fault is not None:
        raise fault
    for rank, (wrong, _) in enumerate(every):
        if wrong:
            raise UserError(**{**wrong, "message": f"process {rank} cannot begin: {wrong['message']}"})
    for name in own:
        other = next((rank for rank, (_, theirs) in enumerate(every) if theirs[name] != every[0][1][name]), None)
        if other is not None:
            raise _differs(name, texts[name], other)


def begins_with(plan: Plan, module: nn.Module) -> Mapping[str, list[str]]:
    """What must be alike on all processes: lines of text by the name of what they describe."""
    document = plan.to_json()
    described = {
        "version": [f"{name} {importlib.metadata.version(name)}" for name in ("automap", "torch")],
        **{f"plan.{key}": json.dumps(document.get(key), indent=1).splitlines() for key in DECIDING},
    }
    described["module"] = [
        f"{name}: {tuple(p.shape)} of {p.dtype}, {'trained' if p.requires_grad else 'frozen'}"
        for name, p in module.named_parameters(remove_duplicate=False)
    ]
    described["module"] += [f"{name}: {tuple(b.shape)} of {b.dtype}" for name, b in module.named_buffers()]
    return described


def _differs(name: str, own: list[str], other: int) -> PlanError:
    """The error for what processes do not have alike. A collective."""
    every: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(every, own)
    lines = itertools.zip_longest(every[0], every[other], fillvalue=NOTHING)
    one, two = next((a.strip(" ,"), b.strip(" ,")) for a, b in lines if a != b)
    return PlanError(
        f"is not alike on all processes: process 0 has {one}, process {other} has {two}",
        field=name, value=f"process {other}",
        repair="Give all processes the same plan, network and versions; build the network from one seed or file.",
    )  # fmt: skip
