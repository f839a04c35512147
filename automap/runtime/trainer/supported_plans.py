"""The plans that the module trainer supports, and the refusal of all others.

A plan places operators, the trainer places modules: what is finer than modules is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import nn

from automap.errors import PlanError
from automap.plan import Plan
from automap.runtime.trainer.module_tree import tied_names
from automap.runtime.trainer.split_check import trained_ones
from automap.targets import OWN, targets
from ir.cuts import LOSSES
from ir.frozen import names_in_file
from ir.graph import Graph

INSTEAD = "Search with --target automap, whose plans modules run."
"""The repair that holds for every plan which is finer than modules."""


class FinerThanModules(PlanError):
    """A plan that modules cannot run, but the operators of the graph can."""


def refuse(field_name: str, value: object, message: str, repair: str = INSTEAD) -> FinerThanModules:
    """The error for a plan that modules cannot run.

    Args:
        field_name: the path in the plan document.
        value: the value there.
        message: why modules cannot run it.
        repair: what the user can do instead.
    """
    return FinerThanModules(message, field=f"plan.{field_name}", value=value, repair=repair)


def check_rectangular(plan: Plan) -> None:
    """Refuses plans whose stages are not alike, and what modules cannot do.

    Raises:
        PlanError: names the field; `FinerThanModules` where the graph can be run in their place.
    """
    precisions = targets()[OWN].precisions
    if plan.training.precision not in precisions:
        raise PlanError(
            f"is trained in {', '.join(precisions)}", field="plan.training.precision", value=plan.training.precision,
            repair="Use bf16.",
        )  # fmt: skip
    samples = plan.num_micro_batches * plan.samples_per_micro_batch
    if samples != plan.training.global_batch:
        # The samples beyond would be left out, or rows taken that a batch does not have.
        raise PlanError(
            f"the micro-batches have {samples} samples together", field="plan.training.global_batch",
            value=plan.training.global_batch,
            repair="Make num_micro_batches x samples_per_micro_batch the global batch.",
        )  # fmt: skip
    first = plan.stages[0]
    for number, stage in enumerate(plan.stages):
        for name in ("mesh", "batch_axes", "batch_shares", "zero"):
            if getattr(stage, name) != getattr(first, name):
                raise refuse(
                    f"stages[{number}].{name}", getattr(stage, name), "stages are not alike"
                )  # fmt: skip
    pipeline = len({stage.devices for stage in plan.stages}) > 1
    if len(plan.stages) > 1 and not pipeline:
        raise refuse("stages", len(plan.stages), "all stages are on the same devices", "Make them one stage.")
    if plan.sync.kind != "synchronous" and (first.zero.stage or not first.batch_axes):
        raise refuse(
            "sync.kind", plan.sync.kind, "replicas that are trained apart have whole states", "Use ZeRO 0."
        )  # fmt: skip


def check_statistics(plan: Plan, graph: Graph) -> None:
    """Refuses batch normalisation over the samples of several ranks: modules see those of their own.

    Raises:
        FinerThanModules: a plan with such replicas.
    """
    replicas = prod(size for name, size in plan.stages[0].mesh if name in plan.stages[0].batch_axes)
    norms = [op.name for op in graph.operators if op.kind == "BatchNormalization"]
    if plan.training.batch_norm == "synchronized" and replicas > 1 and norms:
        text = f"modules take statistics of their own samples, and this plan has {replicas} replicas of {norms[0]}"
        raise refuse("training.batch_norm", "synchronized", text, "Search with training.batch_norm = local.")


def check_stages_apart(stages: Sequence[nn.Module]) -> None:
    """Refuses ZeRO where stages of one process share a weight: FSDP2 splits each weight once.

    Raises:
        FinerThanModules: names the weight.
    """
    first: dict[nn.Parameter, int] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if first.setdefault(parameter, number) != number:
                raise refuse("stages.zero.stage", name, "two stages of one process share this weight", "Use ZeRO 0.")


def check_gradients(module: nn.Module) -> None:
    """Refuses what makes a gradient that is more than a sum over samples, or another one on each rank.

    Raises:
        PlanError: names the parameter or the module.
    """
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise PlanError(
                "has a hook, which would see the gradients of some samples, or of a part of it",
                field=f"module.{name}", value="a hook of a parameter",
                repair="Remove it, and change the gradients between trainer.step and optimizer.step.",
            )  # fmt: skip
    for path, child in module.named_modules():
        for setting in ("sparse", "scale_grad_by_freq", "max_norm") if isinstance(child, nn.Embedding) else ():
            if getattr(child, setting):
                raise PlanError(
                    "is a setting of embeddings that no plan trains with", field=f"module.{path}.{setting}",
                    value=getattr(child, setting), repair="Make the embedding without it.",
                )  # fmt: skip


def check_loss(graph: Graph) -> None:
    """Refuses a graph whose loss cannot be computed by a trainer from scores and labels.

    If the last output of a model is a single number, it is taken for the loss, even where it is something else.

    Raises:
        PlanError: names the output.
    """
    loss = graph.operators[-1]
    labels = [graph.tensors[name] for name in loss.inputs[1:]]
    if loss.kind not in LOSSES or loss.outputs[0] != graph.outputs[-1] or labels[0].role != "input":
        raise PlanError(
            "is a single number that the model computes, which the plan takes for the loss; a trainer computes the loss"
            " itself, of scores and labels", field="model.outputs", value=graph.outputs[-1],
            repair="Export the module with the scores as its only output, and search with that.",
        )  # fmt: skip


def check_inputs(graph: Graph) -> None:
    """Refuses inputs and labels whose samples are not in their first dim, by which a step takes them apart.

    Raises:
        PlanError: names the input.
    """
    for tensor in graph.tensors.values():
        if tensor.role == "input" and tensor.batch_dim != 0:
            raise PlanError(
                "samples are not its first dim", field=f"inputs.{tensor.name}", value=f"{tensor.shape} for one sample",
                repair="Make what is the same for all samples a buffer of the module; turn others round in forward.",
            )  # fmt: skip


def check_parameters(graph: Graph, module: nn.Module) -> None:
    """Refuses a network whose parameters are not those of the graph, but for those that its scores do not depend on.

    Raises:
        PlanError: names a parameter that differs.
    """
    wanted: dict[str, int] = {}
    ties = tied_names(module)
    for tensor in graph.parameters:
        names = names_in_file(graph, tensor.name)
        for name in names:
            # A file may have any of the names of a shared parameter.
            first = ties.get(name, name)
            wanted[first] = wanted.get(first, 0) + tensor.num_elements // len(names)
    found = {name: p.numel() for name, p in module.named_parameters()}
    # Exporters leave out what no output reads.
    beside = found.keys() - wanted.keys()
    unread = beside - trained_ones(module, graph, beside) if beside and wanted.keys() <= found.keys() else set()
    names_of_both = (found.keys() | wanted.keys()) - unread
    wrong = sorted({name for name in names_of_both if found.get(name) != wanted.get(name)})
    if wrong:
        name = wrong[0]
        raise PlanError(
            f"the model of the plan has {wanted.get(name, 'no')} elements there, the module {found.get(name, 'none')}"
            f" ({len(wrong)} parameters differ)",
            field=f"module.{name}", value=found.get(name, 0),
            repair="Give a module of the same structure, with the names of the model that the plan was made for.",
        )  # fmt: skip
