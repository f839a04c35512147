"""Models whose layers update a state token by token are exported as one operator a layer, and compute the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from automap.runtime.operators.apply import run
from automap.runtime.torch_export import export_onnx
from automap.runtime.transformers_models import from_config
from ir.graph import Tensor
from ir.onnx.load import load_model
from ir.operators import make_operator

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 96}
QWEN: dict[str, Any] = {
    **SIZES, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "mlp_only_layers": [0, 1], "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MODELS = {
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", QWEN, "automap.LinearAttention", 1),
    "FalconMambaForCausalLM": ("FalconMambaConfig", {**SIZES, "state_size": 4}, "automap.SelectiveScan", 2),
}
"""Class: its configuration, the kind of its scan, and the number of layers that have one."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_is_one_operator_that_computes_the_same(name: str, tmp_path: Path) -> None:
    kind, sizes, scan, count = MODELS[name]
    config = getattr(transformers, kind)(**sizes)
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    build = from_config(f"hf:{tmp_path}:seq_len=80")
    torch.manual_seed(0)
    module, inputs = build()
    tokens = torch.randint(0, 48, (2, *inputs["input_ids"].shape[1:]))
    graph = load_model(export_onnx(build))
    assert Counter(op.kind for op in graph.operators)[scan] == count
    assert graph.num_parameters == sum(p.numel() for p in module.parameters())
    tensors = {**module.state_dict(), **dict(module.named_buffers()), "input_ids": tokens}
    with torch.no_grad():
        found = next(iter(run(graph, tensors, 2).values()))
        torch.testing.assert_close(found, module.eval()(tokens).logits, rtol=1e-4, atol=1e-4)


def test_flops_are_those_of_the_products_in_chunks() -> None:
    """torch counts all products but the inverse of the triangles, and what these multiply."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    samples, length, heads, d, e, chunk = 1, 192, 3, 8, 12, 64
    keys, values = torch.randn(samples, length, heads, d), torch.randn(samples, length, heads, e)
    with FlopCounterMode(display=False) as counted:
        torch_chunk_gated_delta_rule(keys, keys, values, -torch.rand(1, length, heads), torch.rand(1, length, heads))
    sizes = (heads * d, heads * d, heads * e, None, heads, heads)
    op = make_operator(
        "LinearAttention", name="op", outputs=("y",), opset=27,
        attributes={"q_num_heads": heads, "kv_num_heads": heads},
        inputs=[
            size and Tensor(name=str(i), shape=(samples, length, size), dtype="float32", role="activation", batch_dim=0)
            for i, size in enumerate(sizes)
        ],
    ).operator  # fmt: skip
    triangles = samples * length * heads * (2 * chunk * (d + e) + 2 * chunk**2 / 3)
    assert op.forward_flops.at(1) == pytest.approx(counted.get_total_flops() + triangles)
    assert op.backward_flops.at(1) == pytest.approx(2 * op.forward_flops.at(1))
