"""ZeRO 3: the bytes of a parameter, against what FSDP2 and AdamW hold, and the time of its gathers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from small_graphs import build_mlp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from automap.price.evaluator import Evaluator
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.space.stated_strategy import Strategy, hand_made
from automap.space.templates import megatron_signatures
from ir import zoo


@pytest.fixture
def held_bytes() -> float:
    """Bytes of each parameter that are there between two steps of FSDP2 in bf16: shards, gradients, moments."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False))
        count = sum(p.numel() for p in model.parameters())
        mesh = dist.init_device_mesh("cpu", (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*model, model):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        tensors = [p.to_local() for p in model.parameters()] + [p.grad.to_local() for p in model.parameters()]
        for state in optimizer.state.values():
            tensors += [moment.to_local() for name, moment in state.items() if name != "step"]
        return sum(t.numel() * t.element_size() for t in tensors) / count
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("trainer", "converts"), [("fsdp", True), ("torchtitan", True), ("automap-modules", True), ("deepspeed", False)]
)
def test_shards_of_converted_weights_are_their_masters(
    held_bytes: float, trainer: str, converts: bool, space: Callable[..., PlanSpace]
) -> None:
    """Weights that are converted as they are gathered have no shards in bf16; all others have both."""
    graph = build_mlp((512, 2048, 512))
    s = space(graph, "4xA100", 32, training={"trainer": trainer, "precision": "bf16"})
    shape = next(t for t in s.shapes if (t.dp, t.num_micro_batches) == (4, 2))
    values = megatron_signatures(s, shape, s.even_values(shape, recompute="none", zero=3), sequence_parallel=False)
    row = s.evaluator.evaluate(s.lowered(values)).ranks[0]
    found = sum(float(row[name]) for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"))
    assert found == (held_bytes if converts else sum(s.problem.state_bytes)) * graph.num_parameters / 4
    assert held_bytes == 16.0


@pytest.mark.parametrize("trainer", ["fsdp", "ddp", "automap-modules", "torchtitan"])
def test_fsdp_gathers_a_block_while_another_computes(trainer: str) -> None:
    """FSDP prefetches in both passes. So where compute takes far longer, less than half of what it moves is exposed:
    weights twice, and gradients, all of two bytes or more."""
    graph = zoo.build("llama:layers=4,hidden=4096,heads=32,seq_len=4096,vocab_size=1000")
    evaluator = Evaluator(Problem.build(graph, "8xH100", {"global_batch": 64, "trainer": trainer}))
    lowered = hand_made(evaluator, Strategy(zero=3, micro_batch=8))
    row = evaluator.evaluate(lowered).ranks[0]
    moved_s = 7 / 8 * graph.num_parameters * (2 + 2 + 2) / 450e9  # at the line rate of NVLink
    exposed_s = sum(row.comm_s.tolist())
    assert row.compute_s > 10 * moved_s
    assert exposed_s < moved_s / 2
