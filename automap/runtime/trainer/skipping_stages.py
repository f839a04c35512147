"""Pipeline stages of a network whose forward cannot be traced, such as the models of transformers.

Every stage runs the user's whole forward method, but modules of other stages return zeros of the right shapes instead
of computing. The tensor that crosses from one stage to the next is the output of the last module of the first stage, or
else the input of the first module of the next stage, as in blocks that end in an addition before a norm. The first
stage leaves the forward method at this tensor; the next stage puts the received tensor in its place. Before any weight
is dropped, stages and network are compared on random data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from automap.errors import PlanError
from automap.runtime.trainer.module_tree import is_called
from automap.runtime.trainer.roles import Roles
from automap.runtime.trainer.split_check import computes, evaluating
from automap.runtime.trainer.stage_modules import handed_on, refuse_cut, sent_on, span_of
from automap.runtime.trainer.supported_plans import FinerThanModules
from automap.runtime.trainer.training_graph import scores_of


class _Ended(Exception):
    """Raised to leave the user's forward method with the tensor that crosses to the next stage."""

    def __init__(self, crossing: Tensor) -> None:
        self.crossing = crossing


class Border(NamedTuple):
    """Where one stage ends and the next begins."""

    unit: str
    is_behind: bool
    """Whether the output of the unit crosses; otherwise its input does."""


class _Run:
    """State that all modules of a network read: the number of the stage that runs now, and its tensors."""

    def __init__(self) -> None:
        self.stage = -1
        """-1 = the whole network."""
        self.crossing: Tensor | None = None
        self.is_taken = False
        """Whether the unit at the begin of the stage has run, which takes the tensor that crosses."""
        self.borders: list[Border] = []
        self.samples = 0
        self.made: dict[str, list[tuple[Any, list[Any]]]] = {}
        """Path of a unit -> for one sample and for two, the structure of its output and the leaves of it."""


class SkippingStage(nn.Module):
    """One stage; its modules have the paths that they have in the network."""

    def __init__(self, whole: nn.Module, number: int, owned: Sequence[str], run: _Run) -> None:
        """Makes a stage of a network whose units run by `_guarded`.

        Args:
            whole: the network, which is run but is not a child module of the stage.
            number: the number of the stage.
            owned: paths of the units of the stage.
            run: the state that the units read.
        """
        super().__init__()
        self._whole, self._number, self._run = (whole,), number, run
        for path in owned:
            place: nn.Module = self
            *above, name = path.split(".")
            for part in above:
                if not hasattr(place, part):
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            place.add_module(name, whole.get_submodule(path))

    def forward(self, *crossing: Tensor, **inputs: Tensor) -> Tensor:
        """Computes the tensor that leaves this stage from the one that enters it, if there is one, and the model's
        inputs."""
        (whole,), run = self._whole, self._run
        run.stage, run.crossing = self._number, handed_on(crossing[0]) if crossing else None
        run.is_taken, run.samples = not crossing, len(next(iter(inputs.values())))
        hook = None
        if self._number < len(run.borders):
            unit, is_behind = run.borders[self._number]
            child = whole.get_submodule(unit)
            # The hook is registered in every pass, so that it runs after the hooks of FSDP2.
            if is_behind:
                hook = child.register_forward_hook(_end_behind)
            else:
                hook = child.register_forward_pre_hook(_end_before, prepend=True, with_kwargs=True)
        try:
            found = scores_of(whole, list(inputs.values()), tuple(inputs))
            if hook is not None:
                raise _left_out(run.borders[self._number])
        except _Ended as end:
            found = sent_on(end.crossing)
        finally:
            run.stage = -1
            if hook is not None:
                hook.remove()
        if not run.is_taken:
            raise _left_out(run.borders[self._number - 1])
        return found


def _end_behind(module: nn.Module, inputs: Any, output: Any) -> None:
    raise _Ended(next(leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)))


def _end_before(module: nn.Module, args: Any, kwargs: Any) -> None:
    raise _Ended(next(leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)))


def cut_untraced(
    module: nn.Module, roles: Roles, ends: Sequence[tuple[str, str]], inputs: Callable[[int], list[Tensor]],
    names: tuple[str, ...],
) -> list[nn.Module]:  # fmt: skip
    """The stages of a network as `stage_modules.cut` makes them, without a trace.

    Args:
        module: the network.
        roles: the stages of its operators by scope.
        ends: for each stage but the last, the scopes of its last operator and of the first operator of the next stage.
        inputs: number of samples -> random data.
        names: the arguments of `forward` that are the inputs.

    Raises:
        FinerThanModules: a stage needs more of the others than one tensor.
    """
    units = _units(module, roles)
    run = _Run()
    run.borders = [_border(last, first, number, units) for number, (last, first) in enumerate(ends)]
    for path, number in units.items():
        child = module.get_submodule(path)
        child.forward = functools.partial(_guarded, child.forward, path, number, run)
    whole = [computes(module, inputs(samples), names) for samples in (1, 2)]
    stages: list[nn.Module] = [
        SkippingStage(module, n, [path for path, at in units.items() if at == n], run) for n in range(len(ends) + 1)
    ]
    _check(stages, dict(zip(names, inputs(2), strict=True)), whole[1], module)
    return stages


def _units(module: nn.Module, roles: Roles) -> dict[str, int]:
    """Path of each largest module that lies in a single stage (a unit) -> the number of this stage.

    Raises:
        FinerThanModules: a module with parts in several stages has parameters of its own.
    """
    found: dict[str, int] = {}
    own: list[tuple[str, bool, nn.Parameter]] = []
    for path, child in module.named_modules():
        if any(path.startswith(f"{unit}.") for unit in found):
            continue
        span = span_of(roles, path)
        if path and span is not None and span[0] == span[1] and is_called(child):
            found[path] = span[0]
        else:
            own += [(path, span is None, parameter) for parameter in child.parameters(recurse=False)]
    inside = {id(parameter) for path in found for parameter in module.get_submodule(path).parameters()}
    for path, is_idle, parameter in own:
        # A module that only names a weight of others, such as the embedding of encoder and decoder, is never run.
        if not (is_idle and id(parameter) in inside):
            raise refuse_cut(f"{path or 'the model'} has parameters of its own", "Put them into a module of their own.")
    return found


def _border(last: str, first: str, stage: int, units: Mapping[str, int]) -> Border:
    """The border behind a stage.

    Args:
        last: the scope of its last operator.
        first: the scope of the operator behind it.
        stage: its number.
        units: the units, with the numbers of their stages.
    """
    for scope, number in ((last, stage), (first, stage + 1)):
        for path, at in units.items():
            if at == number and f"{scope}.".startswith(f"{path}."):
                return Border(path, is_behind=number == stage)
    raise refuse_cut(f"stage {stage} ends in the code between modules", "Cut between blocks.")


def _guarded(forward: Callable[..., Any], path: str, stage: int, run: _Run, *args: Any, **kwargs: Any) -> Any:
    """Runs a unit in its own stage, and returns zeros of the same shapes in all others."""
    if run.stage < 0:
        output = forward(*args, **kwargs)
        leaves, structure = tree_flatten(output)
        shapes = [(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves]
        run.made.setdefault(path, []).append((structure, shapes))
        return output
    begins = run.borders[run.stage - 1] if run.stage else None
    if run.stage == stage:
        if begins == Border(path, is_behind=False):
            run.is_taken = True
            args, kwargs = _put((args, kwargs), run.crossing)
        return forward(*args, **kwargs)
    (structure, one), (_, two) = run.made[path][:2]
    output = tree_unflatten([_zeros(a, b, run) for a, b in zip(one, two, strict=True)], structure)
    if begins != Border(path, is_behind=True):
        return output
    run.is_taken = True
    return _put(output, run.crossing)


def _put(tree: Any, crossing: Tensor | None) -> Any:
    """A structure of values with `crossing` in the place of its first tensor."""
    leaves, structure = tree_flatten(tree)
    leaves[next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))] = crossing
    return tree_unflatten(leaves, structure)


def _zeros(one: Any, two: Any, run: _Run) -> Any:
    """A tensor of zeros with the samples of the present micro-batch, or what is not a tensor."""
    if not isinstance(one, tuple):
        return one
    assert run.samples
    shape = [a + (b - a) * (run.samples - 1) for a, b in zip(one[0], two[0], strict=True)]
    device = None if run.crossing is None else run.crossing.device
    return torch.zeros(shape, dtype=one[1], device=device)


def _check(stages: Sequence[nn.Module], inputs: Mapping[str, Tensor], wanted: Tensor, module: nn.Module) -> None:
    """Refuses stages that compute something else than the network, one after the other."""
    try:
        with evaluating(module), torch.no_grad():
            crossing: tuple[Tensor, ...] = ()
            for stage in stages:
                crossing = (stage(*crossing, **inputs),)
    except Exception as fault:
        raise _different(str(fault).split("\n")[0]) from fault
    if not torch.equal(crossing[0], wanted):
        raise _different("stages compute something else than the network")


def _different(message: str) -> FinerThanModules:
    return refuse_cut(message, "Blocks must hand on one tensor; use a plan without a pipeline for others.")


def _left_out(border: Border) -> PlanError:
    return PlanError(
        "is left out by the code for these samples, and a stage of the pipeline ends or begins there",
        field=f"module.{border.unit}", value="a block that does not always run", repair="Search with hints.fix pp 1.",
    )  # fmt: skip


def drop_weights(module: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Drops the parameters of modules that no kept stage has; the modules stay, for the code that asks for them."""
    kept = {id(child) for stage in stages for child in stage.modules()}
    for child in module.modules():
        if id(child) not in kept:
            for name, parameter in list(child.named_parameters(recurse=False)):
                # Code may ask for its shape, type and device.
                del child._parameters[name]
                child.__dict__[name] = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(
                    parameter.shape
                )
