"""Makes the pipeline of DeepSpeed that the section `pipeline` of deepspeed.json beside this file describes.

module = pipeline(model, loss)  # every process builds the same model; loss(outputs, labels) is a mean
engine, *_ = deepspeed.initialize(model=module, optimizer=…, config="deepspeed.json")
loss = engine.train_batch(pairs)  # an iterator over (inputs, labels), a micro-batch of this replica each

It needs torch, deepspeed, and plan_loader.py and plan_stages.py beside it.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from plan_loader import check_recomputed, parameter_names, shared_names
from plan_stages import cut
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Stage(nn.Module):
    """One stage, which takes what the stage before hands on; the first one takes the inputs of the model."""

    def __init__(self, inner: nn.Module, missing: int) -> None:
        super().__init__()
        self.inner, self.missing = inner, missing

    def forward(self, given: Tensor | tuple[Tensor, ...]) -> Any:
        """What the next stage takes."""
        inputs = given if isinstance(given, tuple) else (given,)
        found = self.inner(*inputs, *[None] * self.missing)
        for each in found if isinstance(found, tuple) and torch.is_grad_enabled() else ():
            # DeepSpeed sends gradients of all floats that cross, also of the positions of rotary embeddings.
            if each.is_floating_point() and not each.requires_grad:
                each.requires_grad_()
        return found


def pipeline(
    model: nn.Module, loss: Callable[[Any, Tensor], Tensor], folder: Path = Path(__file__).parent
) -> PipelineModule:
    """The stages of a model, of which this process holds one.

    Raises:
        ValueError: the model is not that of the plan, or cannot be cut as the plan says.
    """
    plan = json.loads((folder / "deepspeed.json").read_bytes())["pipeline"]
    known = dict(model.named_modules())
    missing = [path for paths in plan["modules"] for path in paths if path not in known]
    if missing:
        raise ValueError(f"the model has no module {missing[0]} of deepspeed.json; give the model of the plan")
    check_recomputed(known, plan["recompute"])
    tied = shared_names(model)
    device = torch.device(get_accelerator().current_device_name())
    parts, loss = cut(model, plan["modules"], plan["inputs"], device, loss)
    names = {f"input_{number}": given["name"] for number, given in enumerate(plan["inputs"])}
    for path in plan["recompute"]:
        known[path].forward = partial(checkpoint, known[path].forward, use_reentrant=False)
    for part in parts[1:]:
        used = [node.target for node in part.graph.nodes if node.op == "placeholder" and node.users]
        late = [names[name] for name in used if name in names]
        if late:
            raise ValueError(f"DeepSpeed hands the input {late[0]} to the first stage alone, and a later one reads it")
    stages = [Stage(part, len(names) if number else 0) for number, part in enumerate(parts)]
    layers = specs(stages, tied)
    made = PipelineModule(layers=layers, num_stages=len(stages), loss_fn=loss, partition_method="uniform")
    for key, comm in made.tied_comms.items():
        module = made.tied_modules[key]
        shared = {id(module.get_parameter(name)) for name in comm["weight_attr"]}
        for parameter in module.parameters():
            # DeepSpeed takes all parameters of the stage for replicated, and leaves them out of the gradient's norm.
            parameter.ds_pipe_replicated &= id(parameter) in shared
    for parameter in made.parameters():
        # Of other parameters, DeepSpeed counts those of the first stage alone in the gradient's norm.
        parameter.model_parallel = not getattr(parameter, "ds_pipe_replicated", False)
    return made


def specs(stages: Sequence[Stage], tied: Sequence[set[str]]) -> list[nn.Module | TiedLayerSpec]:
    """The layers of the PipelineModule, one a stage; stages that share weights are tied."""
    found: list[nn.Module | TiedLayerSpec] = list(stages)
    own = [{name.removeprefix("inner."): name for name in sorted(parameter_names(stage))} for stage in stages]
    groups: dict[tuple[int, ...], list[set[str]]] = {}
    for names in tied:
        holders = tuple(number for number, mine in enumerate(own) if names & mine.keys())
        groups.setdefault(holders, []).append(names)
    groups = {holders: some for holders, some in groups.items() if len(holders) > 1}
    for holders, some in groups.items():
        for number in holders:
            if not isinstance(found[number], Stage):
                raise ValueError("a stage shares weights with different stages, and DeepSpeed ties it with one group")
            own_names = [next(own[number][name] for name in sorted(shared) if name in own[number]) for shared in some]
            stage = stages[number]
            found[number] = TiedLayerSpec(str(holders), Stage, stage.inner, stage.missing, tied_weight_attr=own_names)
    return found
