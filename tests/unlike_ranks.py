"""Ranks that begin a training with other files, networks or versions than the rest, for tests."""

import contextlib
import importlib.metadata
from dataclasses import replace
from unittest import mock

import partly_reached
import torch.distributed as dist
from torch import nn

from automap.errors import UserError
from automap.plan import Plan
from automap.runtime.trainer import parallelize

CASES = ("model", "plan", "batch", "network", "frozen", "version")


def begin(case, documents):
    """The texts of the error with which a rank ends its set-up; the last rank has what the case says."""
    is_other = dist.get_rank() == dist.get_world_size() - 1
    plan = Plan.from_json(documents[is_other and case == "plan"])
    model, network = partly_reached.graph(), partly_reached.network()
    if is_other and case == "model":
        model = "/nowhere/model.onnx"
    if is_other and case == "batch":
        plan = replace(plan, training=replace(plan.training, global_batch=2 * partly_reached.BATCH))
    if is_other and case == "network":
        network.last = nn.Linear(partly_reached.WIDTH, 7).double()
    if is_other and case == "frozen":
        network.first.bias.requires_grad_(False)
    version = mock.patch.object(importlib.metadata, "version", return_value="0.0")
    with version if is_other and case == "version" else contextlib.nullcontext():
        try:
            parallelize(network, plan, model)
        except UserError as fault:
            return [type(fault).__name__, fault.field, fault.message]
    return []


def all_cases(documents):
    """What `begin` returns of each case."""
    return [begin(case, documents) for case in CASES]
