"""Activations of a compiled block against what torch.compile's own partitioner keeps for the backward pass."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from automap.cluster import parse_cluster
from automap.price.estimate import price
from automap.price.evaluator import Evaluator
from automap.price.plan_writer import to_plan
from automap.problem import Problem
from automap.runtime.torch_export import export_onnx
from automap.space.stated_strategy import Strategy, hand_made
from ir.loss import with_loss
from ir.onnx.load import load_model

WIDTH, WIDE, SAMPLES, TOKENS = 64, 176, 4, 32


class Block(nn.Module):
    """The second half of a layer of Llama."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.gate, self.up = nn.Linear(WIDTH, WIDE, bias=False), nn.Linear(WIDTH, WIDE, bias=False)
        self.down = nn.Linear(WIDE, WIDTH, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def kept_by_torch(compiled):
    """Elements that autograd keeps of a block, without parameters and without a number for each token."""
    torch.manual_seed(0)
    block = Block()
    run = torch.compile(block, backend="aot_eager_decomp_partition") if compiled else block
    parameters = {parameter.data_ptr() for parameter in block.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.data_ptr() not in parameters and tensor.shape[-1] > 1:
            kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    x = torch.randn(SAMPLES, TOKENS, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(x).sum()
    return sum(kept.values())


def priced_activations(blocks):
    """Bytes of a micro-batch's activations under torchtitan."""

    def build():
        model = nn.Sequential(nn.Linear(8, WIDTH), *(Block() for _ in range(blocks)), nn.Linear(WIDTH, 16))
        return model, (torch.randn(SAMPLES, TOKENS, 8),)

    graph = with_loss(load_model(export_onnx(build), name="blocks"))
    training = {"global_batch": SAMPLES, "precision": "bf16", "trainer": "torchtitan"}
    evaluator = Evaluator(Problem.build(graph, parse_cluster("1xA100"), training))
    plan = to_plan(hand_made(evaluator, Strategy(micro_batch=SAMPLES)), evaluator)
    return price(evaluator.problem, plan, evaluator).memory_bytes[0].activations


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_block_keeps_what_the_partitioner_keeps():
    """Products materialise their operands, so these are kept; what the kernels in between make is computed again."""
    own = priced_activations(3) - priced_activations(2)
    assert own == 2 * kept_by_torch(compiled=True)
    assert own < 2 * kept_by_torch(compiled=False)
