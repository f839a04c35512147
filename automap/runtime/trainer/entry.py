"""A plan applied to a network: by its modules where they can run it, else by the operators of its graph."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.tensor import DTensor

from automap.errors import PlanError, UserError
from automap.plan import Plan
from automap.runtime.trainer.compiled_code import compiling_nothing
from automap.runtime.trainer.ended_processes import announce, naming_the_ended
from automap.runtime.trainer.graph_trainer import GraphTrainer, Whole, as_trained
from automap.runtime.trainer.losses import CountFunction, LossFunction, count_labels, loss_of, summed_cross_entropy
from automap.runtime.trainer.module_trainer import ModuleTrainer
from automap.runtime.trainer.process_mesh import own_device
from automap.runtime.trainer.role_reader import read_roles
from automap.runtime.trainer.running_statistics import find_changed
from automap.runtime.trainer.same_code import PROBED, warn_of_other_code
from automap.runtime.trainer.same_start import agree
from automap.runtime.trainer.split_check import probe_inputs, runs
from automap.runtime.trainer.supported_plans import FinerThanModules, check_gradients, check_inputs, check_loss
from automap.runtime.trainer.training_graph import input_names, training_graph
from automap.runtime.trainer.whole_weights import BY_WHOLE_WEIGHTS, FAILING, refuse_optimizers
from automap.runtime.transformers_models import is_transformers, without_cache
from ir.frozen import names_in_file
from ir.graph import Graph

GLOO_THREAD = "pt_gloo_runloop"
"""Name that torch gives to gloo's worker threads (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp)."""
AT_REST = 2
"""How often in a row these threads must be seen at rest when a process ends (assumed)."""
LOOK_S = 0.005
"""Seconds between two looks (assumed)."""
MOST_LOOKS = 1_000
"""Number of looks at most (assumed)."""


@naming_the_ended
@compiling_nothing
def parallelize(
    module: nn.Module,
    plan: Plan,
    model: str | Path | Graph,
    *,
    loss: LossFunction | None = None,
    count: CountFunction | None = None,
    per_rank: Sequence[str] = (),
) -> ModuleTrainer | GraphTrainer:
    """Applies a plan to a network; every process of the plan calls it, started by torchrun.

    A plan that is finer than modules is run by the operators of the graph, with the weights of the network and without
    its code; a warning says why.

    Args:
        module: the network, built alike on every process; the values of rank 0 count.
        plan: a plan of `model`.
        model: the model that was searched: the path of its ONNX file, `zoo:NAME`, `hf:FOLDER`, or its graph. Scopes of
            its operators are paths of modules.
        loss: (outputs, labels) of some samples -> the sum of their losses. None = the loss that the plan was made
            with: cross-entropy, or the mean squared error.
        count: labels of some samples -> the number that the sum over all samples is divided by. None = that of the
            plan's loss: the labels that are not -100, or the elements.
        per_rank: globs of attributes that hold sizes of one rank, such as `h.*.attn.num_heads`: they are divided by the
            size of the sharding axis. Where none is named, they are looked for, if the code does not run without.

    Raises:
        PlanError: the plan is for another model or number of devices, or is finer than modules where the graph cannot
            stand for them: `GraphTrainer` says when. Or processes begin with something else than others.
        UserError: another process has a fault.
        ModelError: the model cannot be read.
    """
    if isinstance(module, OptimizedModule):
        raise PlanError(
            "is code that was compiled, around the module", field="module", value="torch.compile(module)",
            repair="Give the module itself, after module.compile() or compile() of its blocks.",
        )  # fmt: skip
    graph: Graph | None = None
    fault: UserError | None = None
    try:
        graph = _read(module, plan, model)
    except UserError as wrong:
        if not dist.is_initialized() and "WORLD_SIZE" not in os.environ:
            raise  # There are no others.
        fault = wrong
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        atexit.register(_end_group)
    announce()
    own_device()
    agree(plan, module, fault)
    assert graph is not None
    of_plan, its_count = loss_of(graph)
    loss, count = loss or of_plan, count or its_count
    if is_transformers(module):
        without_cache(module)
    find_changed(module, lambda: runs(module, probe_inputs(graph, module, PROBED), input_names(graph, module)))
    if dist.get_rank() == 0:
        # The experts of a graph drop what is above a capacity; those of code may do so or not.
        warn_of_other_code(module, [as_trained(graph, module), graph])
    # A cut may turn out to be impossible when modules have been changed already.
    whole = Whole.of(module, graph) if len(plan.stages) > 1 else None
    try:
        trainer = _by_modules(module, plan, graph, loss, count, per_rank)
        every = (parameter for group in trainer.parameters() for parameter in group["params"])
        refuse_optimizers(trainer, (p for p in every if isinstance(p, DTensor)), FAILING)
        return trainer
    except FinerThanModules as finer:
        if loss is not summed_cross_entropy or count is not count_labels:
            raise
        found = GraphTrainer(module, plan, graph, whole or Whole.of(module, graph), finer)
        refuse_optimizers(found, found.parts(), BY_WHOLE_WEIGHTS)
    if dist.get_rank() == 0:
        warnings.warn(f"the graph is trained in place of the module's code: {found.why}", stacklevel=2)
    return found


def _read(module: nn.Module, plan: Plan, model: str | Path | Graph) -> Graph:
    """The graph of a plan's model, once the network of this process is known to go with it as far as that tells."""
    graph = training_graph(model, plan)
    check_loss(graph)
    _check_frozen(module, graph)
    check_gradients(module)
    check_inputs(graph)
    return graph


def _check_frozen(module: nn.Module, graph: Graph) -> None:
    """Refuses a network that trains what the plan takes for frozen, and has no memory for."""
    named = dict(module.named_parameters(remove_duplicate=False))
    for tensor in graph.parameters if graph.has_frozen else ():
        for name in names_in_file(graph, tensor.name) if tensor.frozen else ():
            if name in named and named[name].requires_grad:
                raise PlanError(
                    "the plan is for a network in which this parameter is frozen", field=f"module.{name}",
                    value="trained",
                    repair="Call requires_grad_(False) on it, or search for a plan that trains it.",
                )  # fmt: skip


def _end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    await_gloo()


def await_gloo() -> None:
    """Waits until gloo's threads have let go of their last tensors; on Linux only.

    A thread does so shortly after the training has gone on, and needs the interpreter for it. If the interpreter is
    ending by then, the thread aborts the process. Groups that are still referred to keep their threads.
    """
    at_rest = 0
    for _ in range(MOST_LOOKS):
        if at_rest == AT_REST:
            break
        # A thread that waits for the interpreter gets it meanwhile.
        time.sleep(LOOK_S)
        at_rest = 0 if _is_gloo_running() else at_rest + 1


def _is_gloo_running() -> bool:
    for task in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # A thread that has ended meanwhile.
            # Its number, its name in parentheses, and its state: see proc(5).
            name, _, state = task.read_text("utf-8").partition("(")[2].rpartition(") ")
            if name == GLOO_THREAD and state[0] == "R":
                return True
    return False


def _by_modules(
    module: nn.Module, plan: Plan, graph: Graph, loss: LossFunction, count: CountFunction,
    per_rank: Sequence[str],
) -> ModuleTrainer:  # fmt: skip
    roles = read_roles(plan, graph, module)
    if roles.splits_classes and loss is not summed_cross_entropy:
        raise PlanError(
            "only the built-in cross-entropy runs on split classes", field="loss", value=loss,
            repair="Leave it out, or take a plan that keeps the classes whole.",
        )  # fmt: skip
    return ModuleTrainer(module, plan, graph, roles, loss, count, per_rank)
