"""Stand-ins under ZeRO: collectives for a block that the code of one rank skips, because of its samples or at random.

All ranks gather the weights of a block together and scatter its gradients together. If one rank skips the block, the
others wait for it forever, or take its messages for the next block as those for this one. So a rank that skips a block
takes part in its collectives, at the position of the block in the order of all blocks: it gathers the weights, passes a
tensor through unchanged, and scatters gradients of zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from automap.runtime.trainer.left_out_blocks import Call
from automap.runtime.trainer.module_tree import called_parts


class StandIns:
    """Follows the blocks of a stage in each forward pass, and runs the collectives of those that are skipped."""

    def __init__(self, stage: nn.Module, order: Sequence[Call]) -> None:
        """Adds hooks to the blocks; they run outside the hooks of FSDP2.

        Args:
            stage: a stage that ZeRO has split already.
            order: the calls of the blocks of the network, as its code makes them.
        """
        inside = dict(stage.named_modules())
        self._calls = [
            (part, call.has_gradient)
            for call in order
            for part in (called_parts(inside[call.path]) if call.path in inside else ())
            if isinstance(part, FSDPModule) and part is not stage
        ]
        self._order: list[nn.Module] = [block for block, _ in self._calls]
        self._place = 0
        if self._order:
            stage.register_forward_pre_hook(self._begin, prepend=True)
            stage.register_forward_hook(self._end, prepend=True)
        for block in dict.fromkeys(self._order):
            block.register_forward_pre_hook(self._meet, prepend=True, with_kwargs=True)

    def _begin(self, stage: nn.Module, args: Any) -> None:
        self._place = 0

    def _meet(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Called before a block: runs the collectives of the blocks that were skipped since the last one that ran."""
        if torch._C._current_graph_task_id() != -1 or block not in self._order[self._place :]:
            return None  # The block is recomputed in the backward pass, or called more often than in `order`.
        place = self._order.index(block, self._place)
        passed, self._place = self._calls[self._place : place], place + 1
        return _through(passed, (args, kwargs)) if passed else None

    def _end(self, stage: nn.Module, args: Any, output: Any) -> Any:
        passed, self._place = self._calls[self._place :], len(self._calls)
        # What FSDP2 does for the stage begins at a tensor of its own.
        return tree_map_only(Tensor, Tensor.clone, _through(passed, output)) if passed else None


def _through(calls: Sequence[tuple[nn.Module, bool]], tree: Any) -> Any:
    """A structure of values whose first tensor with a gradient, or that may have one, has passed the hooks of FSDP2
    around some blocks."""
    leaves, structure = tree_flatten(tree)
    floats = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    for place in [n for n in floats if leaves[n].requires_grad][:1] or floats[:1]:
        for block, has_gradient in calls:
            leaves[place] = _stand_in(block, leaves[place], has_gradient=has_gradient)
    return tree_unflatten(leaves, structure)


def _stand_in(block: nn.Module, x: Tensor, *, has_gradient: bool) -> Tensor:
    """Runs the hooks of FSDP2 around a block as if the block returned its input.

    Args:
        has_gradient: whether the block's input gets a gradient. If so, the gradients of the block are scattered right
            after that one, otherwise at the end of the backward pass, as on the ranks that run the block.
    """
    state = fully_shard.state(block)  # type: ignore[attr-defined]
    args: Any = (x if has_gradient else x.detach(),)
    for group in state._fsdp_param_groups:
        args, _ = group.pre_forward(block, args, {})
    y: Tensor = args[0] if has_gradient else x
    if torch.is_grad_enabled():
        # The result of a block has a gradient and is not a view, whatever its input is.
        y = y + y.new_zeros(()).requires_grad_()
    for group in state._fsdp_param_groups:
        y = group.post_forward(block, None, y)
    out: Tensor = state._register_pre_backward_hook(y)
    return out
