"""Rotary embeddings of trainers that run operator after operator, against the kernels and bytes that torch counts."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from automap.cluster import parse_cluster
from automap.execution import ROTATION, ROTATION_KERNELS
from automap.price.evaluator import Evaluator
from automap.problem import Problem
from ir import zoo


class Counted(TorchDispatchMode):
    """Counts kernels, and the bytes of the tensors that they read and write; views are no kernels."""

    def __init__(self):
        super().__init__()
        self.kernels, self.bytes = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not any(made.alias_info is not None for made in function._schema.returns):
            self.kernels += 1
            self.bytes += sum(t.nbytes for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor))
        return result


def test_a_rotary_embedding_is_the_chain_that_torch_runs():
    x = torch.ones(2, 8, 64, 128, requires_grad=True)
    cos, sin = torch.ones(64, 128), torch.ones(64, 128)
    with Counted() as forward:
        low, high = x.chunk(2, -1)
        rotated = x * cos + torch.cat((-high, low), -1) * sin
    gradient = torch.ones_like(rotated)
    with Counted() as backward:
        torch.autograd.grad(rotated, x, gradient)
    for count in (forward, backward):
        assert count.kernels == ROTATION_KERNELS
        # The tables of cosines and sines are small.
        assert count.bytes / (2 * x.nbytes) == pytest.approx(ROTATION, rel=0.02)


def rotations(trainer):
    """Kernels of the rotary embeddings of a small Llama, as `KernelRow`s."""
    evaluator = Evaluator(
        Problem.build(
            zoo.build("llama:layers=2,hidden=64,heads=4,seq_len=32,vocab_size=128"),
            parse_cluster("1xH200"),
            {"global_batch": 4, "precision": "bf16", "trainer": trainer},
        )
    )
    operators, blocks, tables = evaluator.problem.graph.operators, evaluator.blocks, evaluator.tables
    for unit_type, first in enumerate(tables.spans[:-1]):
        unit = blocks.representative(unit_type)
        for index in range(unit.start, unit.stop):
            if operators[index].kind == "RotaryEmbedding":
                yield tables.arrays.kernels[first + index - unit.start]


@pytest.mark.parametrize(("trainer", "is_chain"), [("fsdp", True), ("automap", True), ("megatron-core", False)])
def test_eager_trainers_alone_run_rotary_embeddings_as_chains(trainer, is_chain):
    rows = list(rotations(trainer))
    assert len(rows) == 2  # of queries and of keys
    for row in rows:
        if is_chain:
            assert (row.forward_traffic, row.backward_traffic) == (ROTATION, ROTATION)
            assert row.forward_kernels == row.backward_kernels == ROTATION_KERNELS
        else:
            assert max(row.forward_traffic, row.backward_traffic) < ROTATION / 2
            assert max(row.forward_kernels, row.backward_kernels) <= 1
