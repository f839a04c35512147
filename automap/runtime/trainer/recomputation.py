"""Recomputation by modules: which modules run a second time in the backward pass, and how only a part of one does.

If the plan recomputes a whole module, the module runs again as it is. If it recomputes only the code of a module
between its layers, such as the core of attention, the code of the module runs again, but its layers return the results
of the first pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from automap.errors import PlanError
from automap.globs import select
from automap.plan import Plan
from automap.runtime.trainer.module_tree import LOSS, is_called, role_of, unit_paths
from automap.runtime.trainer.running_statistics import StatisticsKept, counts_samples
from automap.runtime.trainer.supported_plans import INSTEAD, refuse
from ir.graph import Graph, Operator


def recomputed_modules(
    graph: Graph, plan: Plan, by_operator: Sequence[tuple[Operator, int]], module: nn.Module
) -> dict[str, tuple[str, ...]]:
    """The modules that are recomputed, none inside another, and `LOSS` if the loss is.

    Args:
        graph: the graph of the network.
        plan: the plan whose `recompute` is read.
        by_operator: operators with the numbers of their stages.
        module: the network.

    Returns:
        Path of a recomputed module -> the paths of the modules inside it that do not run again. Modules are as large as
        possible, but each lies in one stage and holds at most one block.

    Raises:
        PlanError: the plan recomputes a part of a layer, or of code that is cut.
    """
    again: set[str] = set()
    for number, stage in enumerate(plan.stages):
        names = [op.name for op, n in by_operator if n == number]
        for glob in stage.recompute:
            again.update(select(glob, names))
    # It does not matter whether an operator runs again whose backward pass needs no activation.
    left = {op.name for op, _ in by_operator if op.name in again and graph.keeps_activations(op)}
    inside: dict[str, list[str]] = {}
    stages: dict[str, set[int]] = {}
    for op, number in by_operator:
        parts = op.scope.split(".") if op.scope else []
        for depth in range(1, len(parts) + 1):
            inside.setdefault(".".join(parts[:depth]), []).append(op.name)
            stages.setdefault(".".join(parts[:depth]), set()).add(number)
    units = unit_paths(module)
    paths = [
        path
        for path, child in module.named_modules()
        # Each stage runs another part of a module that is cut; the code of the module would run all of it again.
        if is_called(child) and len(stages.get(path, ())) == 1 and not any(u.startswith(f"{path}.") for u in units)
    ]
    found: dict[str, tuple[str, ...]] = {}
    loss = next(op.name for op, _ in reversed(by_operator) if graph.outputs[-1] in op.outputs)
    if loss in left:
        left.discard(loss)
        found[LOSS] = ()
    for path in sorted(paths, key=lambda path: path.count(".")):
        if again.issuperset(inside[path]) and not left.isdisjoint(inside[path]):
            left.difference_update(inside[path])
            found[path] = ()
    scopes = {op.name: op.scope for op, _ in by_operator}
    for path in sorted({scopes[name] for name in left}, key=lambda path: path.count(".")):
        child = module.get_submodule(path) if path in paths else None
        if child is None or role_of(child) is not None:
            name = min(name for name in left if scopes[name] == path)
            raise refuse("stages.recompute", name, "is finer than a module", f"Recompute whole modules. {INSTEAD}")
        if any(path.startswith(f"{other}.") for other in found if other):
            continue  # its code is part of a recomputed module around it
        kept = tuple(_kept(child, path, {p: again.isdisjoint(names) for p, names in inside.items()}))
        for other in [p for p in found if p.startswith(f"{path}.")]:
            del found[other]
        found[path] = kept
    return found


def _kept(module: nn.Module, path: str, stays: Mapping[str, bool]) -> Iterator[str]:
    """The largest modules inside a module that do not run again. Dropout always runs again, with the same random
    numbers.

    Args:
        module: the module.
        path: its path.
        stays: path of a module with operators -> whether none of them runs again.
    """
    for name, child in module.named_children():
        inner = f"{path}.{name}"
        draws = any(isinstance(part, _DropoutNd) for part in child.modules())
        if stays.get(inner, False) and not draws and is_called(child):
            yield inner
        else:
            yield from _kept(child, inner, stays)


def run_again(module: nn.Module | None, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a forward pass that saves only its inputs, and runs again in the backward pass.

    Args:
        module: the module that runs, if there is one: the second pass does not change its running statistics.
        forward: the code.
        args: the arguments of the code.
        kwargs: its keyword arguments.
    """
    if module is None or not counts_samples(module):
        # torch.compile does not support contexts around recomputed code.
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    again = StatisticsKept(module)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), again

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def recompute(module: nn.Module, recomputed: Mapping[str, tuple[str, ...]]) -> None:
    """Makes modules of a network run again in the backward pass.

    Args:
        module: the network, whose layers have been split already.
        recomputed: as `recomputed_modules` returns it.
    """
    for path, kept in recomputed.items():
        if path != LOSS:
            child = module.get_submodule(path)
            if kept:
                child.forward = _InParts(child, path, [module.get_submodule(inner) for inner in kept])
            else:
                child.forward = functools.partial(run_again, child, child.forward)


class _Pass:
    """One forward pass of a module of which only parts run again."""

    def __init__(self, made: list[Any], *, repeats: bool) -> None:
        self.made, self.repeats, self.next = made, repeats, 0
        self.versions: list[tuple[Tensor, int]] = []
        """Every result of an inner module in the first pass, and how often it had been changed in place then."""


class _InParts:
    """The forward method of a module whose code runs again in the backward pass, except some of the modules inside it.

    The excepted modules save their activations, as without recomputation. Their results are kept, and returned to the
    code around them in its second pass.
    """

    def __init__(self, module: nn.Module, path: str, kept: Sequence[nn.Module]) -> None:
        self._module, self._forward, self._path = module, module.forward, path
        self._present: _Pass | None = None
        for child in kept:
            child.forward = functools.partial(self._run_once, child.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        made: list[Any] = []
        passes: list[_Pass] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self._present = self._present, _Pass(made, repeats=bool(passes))
            passes[:1] = [self._present]
            try:
                return self._forward(*args, **kwargs)
            finally:
                self._present = before

        found = run_again(self._module, run, *args, **kwargs)
        if any(tensor._version != version for tensor, version in passes[0].versions):
            raise PlanError(
                "its code changes in place what a layer of it made, so that it cannot run again in parts",
                field="plan.stages.recompute", value=self._path, repair="Recompute the whole module, or change a copy.",
            )  # fmt: skip
        return found

    def _run_once(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        now = self._present
        if now is None:
            return forward(*args, **kwargs)
        if now.repeats:
            now.next += 1
            return now.made[now.next - 1]
        # Only the innermost hooks apply, so tensors saved here are kept and not recomputed.
        with saved_tensors_hooks(_same, _same):
            found = forward(*args, **kwargs)
        # The result is kept as a leaf: with its graph, the graph of the first pass would refer to itself.
        made = tree_map_only(Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), found)
        now.made.append(made)
        now.versions += [(leaf, leaf._version) for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        return found


def _same(saved: Tensor) -> Tensor:
    return saved
