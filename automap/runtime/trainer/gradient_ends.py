"""Code that ends or changes gradients (`detach`, `no_grad`, functions with a backward pass of their own).

An exported graph has only the forward pass. So a trainer that runs the graph would compute other gradients than such
code does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from automap.runtime.trainer.split_check import evaluating
from automap.runtime.trainer.training_graph import scores_of

DETACHES = {Tensor.detach, Tensor.detach_, torch.detach, torch.detach_, Tensor.data.__get__}  # type: ignore[attr-defined]


class _Ends(TorchFunctionMode):
    """Notes the first function whose floating-point result has no gradient although an operand has one.

    Functions with a backward pass of their own are found too: their forward pass runs under `no_grad`.

    Attributes:
        found: its name; empty = there is none.
    """

    found = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_end = func in DETACHES or not torch.is_grad_enabled()
        if is_end and not self.found and isinstance(made, Tensor) and made.is_floating_point():
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
            name = "data" if func == Tensor.data.__get__ else str(getattr(func, "__name__", func))  # type: ignore[attr-defined]
            self.found = (name if func in DETACHES else f"{name} under no_grad") if given else ""
        return made


def gradient_end(module: nn.Module, inputs: Sequence[Tensor], names: tuple[str, ...]) -> str:
    """The function that ends or changes a gradient inside the code of a network; empty where none does.

    Args:
        module: the network, of which a forward pass is run in evaluation mode.
        inputs: its inputs.
        names: see `scores_of`.
    """
    ends = _Ends()
    with evaluating(module), torch.enable_grad(), ends:
        scores_of(module, list(inputs), names)
    return ends.found
