"""What stands for layers of transformers in an export computes what these layers do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.informer.modeling_informer import InformerProbSparseAttention
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashMoE
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeSparseMLP
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

from automap.runtime import layer_exports
from automap.runtime.torch_export import export_config
from ir.onnx.load import load_model
from ir.operators.experts import DISPATCH

WIDTH, LENGTH, EXPERTS = 16, 12, 6


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def filled(layer: nn.Module) -> Any:
    """The layer with values far from any symmetry: those of experts are not set when they are made."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.5)
    return layer.eval()


def test_switch_without_dropped_tokens() -> None:
    config = transformers.SwitchTransformersConfig(
        d_model=WIDTH, d_ff=24, num_experts=EXPERTS, expert_capacity=2 * LENGTH
    )
    layer, x = filled(SwitchTransformersSparseMLP(config)), torch.randn(2, LENGTH, WIDTH)
    torch.testing.assert_close(layer_exports.switch(layer, x), layer(x))


def test_longcat_without_experts_that_return_their_tokens() -> None:
    layer, x = filled(LongcatFlashMoE(longcat_config(zero_expert_num=0))), torch.randn(2, LENGTH, WIDTH)
    torch.testing.assert_close(layer_exports.longcat(layer, x), layer(x))


def test_experts_of_longcat_return_the_share_of_the_others() -> None:
    layer, x = filled(LongcatFlashMoE(longcat_config(zero_expert_num=3))), torch.randn(2, LENGTH, WIDTH)
    with torch.no_grad():
        layer.experts.down_proj.zero_()
    share = torch.softmax(layer.router.classifier(x), dim=-1)[..., EXPERTS:].sum(-1, keepdim=True)
    torch.testing.assert_close(layer_exports.longcat(layer, x), 1.5 * share * x)


def longcat_config(**more: int) -> Any:
    return transformers.LongcatFlashConfig(
        hidden_size=WIDTH, expert_ffn_hidden_size=8, n_routed_experts=EXPERTS, moe_topk=3, routed_scaling_factor=1.5,
        **more,
    )  # fmt: skip


def test_nllb_weights_the_two_best_experts() -> None:
    config = transformers.NllbMoeConfig(d_model=WIDTH, num_experts=EXPERTS, moe_token_dropout=0.0)
    layer, x = filled(NllbMoeSparseMLP(config, 24)), torch.randn(2, LENGTH, WIDTH)
    scores = torch.softmax(layer.router.classifier(x), dim=-1)
    experts = [part for name, part in layer.experts.named_children() if name.startswith("expert_")]
    made = torch.stack([expert(x) for expert in experts], dim=-1)
    kept = torch.where(scores >= scores.sort(dim=-1)[0][..., -2:-1], scores, 0.0)
    wanted = (made * (kept / kept.sum(-1, keepdim=True))[:, :, None]).sum(-1)
    torch.testing.assert_close(layer_exports.nllb(layer, x), wanted)


@pytest.mark.parametrize("is_decoder", [False, True])
def test_informer_where_all_queries_look_at_the_keys(is_decoder: bool) -> None:
    """Which keys are drawn at random makes no difference then."""
    layer, x = filled(InformerProbSparseAttention(WIDTH, 4, is_decoder=is_decoder)), torch.randn(2, LENGTH, WIDTH)
    mask = torch.full((LENGTH, LENGTH), -1e9).triu(1).expand(2, 1, LENGTH, LENGTH) if is_decoder else None
    torch.testing.assert_close(
        layer_exports.informer(layer, x, attention_mask=mask)[0], layer(x, attention_mask=mask)[0]
    )


def test_other_queries_of_informer_get_the_mean() -> None:
    layer, length = filled(InformerProbSparseAttention(WIDTH, 4, sampling_factor=1)), 64
    with torch.no_grad():
        layer.out_proj.weight.copy_(torch.eye(WIDTH))
        layer.out_proj.bias.zero_()
    x = torch.randn(1, length, WIDTH)
    made = layer_exports.informer(layer, x)[0][0].unflatten(1, (4, -1))
    mean = layer.v_proj(x).mean(dim=1)[0].view(4, -1)
    is_mean = torch.isclose(made, mean, atol=1e-6).all(dim=-1)
    assert is_mean.sum(dim=0).tolist() == [length - 5] * 4  # 5 = ceil(log(1 + 64))


FORECAST = {
    "prediction_length": 8, "context_length": 24, "num_time_features": 2, "lags_sequence": [1, 3], "d_model": 16,
}  # fmt: skip
EXPORTS: dict[str, tuple[type, dict[str, Any], int]] = {
    "SwitchTransformersForConditionalGeneration": (
        transformers.SwitchTransformersConfig,
        {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 2,
         "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4, "vocab_size": 32},
        2,
    ),
    "NllbMoeForConditionalGeneration": (
        transformers.NllbMoeConfig,
        {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
         "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_experts": 4, "encoder_sparse_step": 2,
         "decoder_sparse_step": 2, "vocab_size": 32},
        2,
    ),
    "LongcatFlashForCausalLM": (
        transformers.LongcatFlashConfig,
        {"hidden_size": 16, "num_layers": 2, "num_attention_heads": 2, "ffn_hidden_size": 24, "vocab_size": 32,
         "expert_ffn_hidden_size": 8, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 3, "q_lora_rank": 8,
         "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8},
        2,
    ),
    "InformerForPrediction": (transformers.InformerConfig, FORECAST, 0),
    "TimeSeriesTransformerForPrediction": (transformers.TimeSeriesTransformerConfig, FORECAST, 0),
}  # fmt: skip
"""Class -> its configuration, sizes, and layers with experts."""


@pytest.mark.parametrize("name", EXPORTS)
def test_models_are_exported(name: str, tmp_path: Path) -> None:
    kind, sizes, layers = EXPORTS[name]
    document = {**kind(**sizes).to_dict(), "architectures": [name]}
    (tmp_path / "config.json").write_text(json.dumps(document))
    graph = load_model(export_config(f"hf:{tmp_path}" + (":seq_len=8" if layers else "")))
    with torch.device("meta"):
        module = getattr(transformers, name)(kind(**sizes))
    assert graph.num_parameters == sum(parameter.numel() for parameter in module.parameters())
    assert sum(op.kind == DISPATCH for op in graph) == layers
