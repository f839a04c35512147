"""ZeRO by FSDP2: the repeated blocks of each stage are units of their own, with sums in place of means."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from automap.runtime.trainer.module_tree import called_parts, unshared
from automap.runtime.trainer.supported_plans import check_stages_apart


def spread_states(
    module: nn.Module, stages: Sequence[nn.Module], units: Sequence[str], mesh: DeviceMesh, *,
    low: torch.dtype | None, frees_weights: bool,
) -> list[nn.Parameter]:  # fmt: skip
    """Spreads parameters, gradients and states of an optimizer over ranks.

    Args:
        module: the modules of this rank.
        stages: its stages, which hold them.
        units: paths of the repeated blocks.
        mesh: the ranks, as replicas of shards or as shards alone.
        low: the number format of 2 bytes that the plan computes in; None = that of the weights.
        frees_weights: whether the weights of other ranks are freed after each pass (ZeRO 3).

    Returns:
        The parameters that every rank keeps whole, and whose gradients it does not sum: FSDP2 splits no single numbers.

    Raises:
        FinerThanModules: two stages of this process share a weight.
    """
    policy = MixedPrecisionPolicy()
    if low is not None and all(p.dtype == torch.float32 for p in module.parameters()):
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    check_stages_apart(stages)
    for parameter in module.parameters():
        # FSDP2 splits no others; kernels of channels-last images take contiguous weights too.
        parameter.data = parameter.data.contiguous()
    numbers = [parameter for parameter in module.parameters() if not parameter.dim()]
    for root in stages:
        inside = dict(root.named_modules())
        blocks = (part for path in units if path in inside for part in called_parts(inside[path]))
        for unit in (*unshared(root, dict.fromkeys(blocks)), root):
            fully_shard(
                unit, mesh=mesh, reshard_after_forward=frees_weights, mp_policy=policy, ignored_params=set(numbers)
            )
        for part in root.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
    return numbers
