"""Named models: parameters, FLOPs, blocks; the same as an export of the same PyTorch module; and found plans for."""

from __future__ import annotations

import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from long_cases import long_but

from ir import zoo
from ir.blocks import find_units
from ir.errors import ModelError
from ir.groups import fused_groups
from ir.loss import has_loss, with_loss
from ir.operators.experts import BALANCED_LOAD
from ir.serialize import graph_from_bytes, graph_to_bytes
from ir.zoo import convolutions, transformers

GPT3 = "gpt:layers=96,hidden=12288,heads=96,seq_len=2048,vocab_size=51200"

# Published with the models, or counted by their authors' code: Hugging Face, torchvision, timm; GPT-2 with tied head,
# BERT as BertForMaskedLM, Llama 2, T5 1.0; Falcon with tied head. Those of `ROUNDED` follow from the published sizes.
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-2.7b": 2_651_553_280,
    "gpt3-6.7b": 6_658_404_352,
    "gpt3-175b": 174_604_259_328,
    "mt-nlg-530b": 529_581_506_560,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "opt-66b": 65_719_701_504,
    "opt-175b": 174_604_468_224,
    "bloom-7b": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "falcon-180b": 178_557_088_768,
    "palm-540b": 540_358_668_288,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-70b": 68_976_648_192,
    "codellama-34b": 33_743_970_304,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "yi-34b": 34_388_917_248,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "nemotron4-15b": 15_628_376_064,
    "nemotron4-340b": 341_025_638_400,
    "mistral-7b": 7_241_732_096,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mistral-large-123b": 122_610_069_504,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "deepseek-67b": 67_425_001_472,
    "dbrx-132b": 131_596_523_520,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_404_352,
    "kimi-k2": 1_026_408_209_408,
    "gpt-oss-20b": 20_914_757_184 - 24 * 64,
    "gpt-oss-120b": 116_829_156_672 - 36 * 64,
    "grok-1": 316_489_340_928,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-coder-480b-a35b": 480_154_875_392,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "vit-b": 86_567_656,
    "vit-l": 304_326_632,
    "vit-h": 632_045_800,
    "vit-giant": 1_012_611_432,
    "vit-gigantic": 1_844_440_680,
    "vit-22b": 21_757_901_800,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnext50": 25_028_904,
    "resnext101": 88_791_336,
    "se-resnext101": 48_955_416,
    "wide-resnet50": 68_883_240,
    "wide-resnet101": 126_886_696,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "efficientnet-b0": 5_288_548,
    "efficientnet-b1": 7_794_184,
    "efficientnet-b2": 9_109_994,
    "efficientnet-b3": 12_233_232,
    "efficientnet-b4": 19_341_616,
    "efficientnet-b5": 30_389_784,
    "efficientnet-b6": 43_040_704,
    "efficientnet-b7": 66_347_960,
    "unet-5-64": 232_687_328,
    "amoebanet-d": 122_470_120,
}

ROUNDED = {
    "gpt3-175b": 175e9, "gpt3-2.7b": 2.7e9, "gpt3-6.7b": 6.7e9, "mt-nlg-530b": 530e9, "opt-175b": 175e9,
    "palm-540b": 540.35e9, "falcon-180b": 180e9, "nemotron4-15b": 15.6e9, "nemotron4-340b": 341e9, "dbrx-132b": 132e9,
    "kimi-k2": 1.04e12, "grok-1": 314e9, "vit-giant": 1.011e9, "vit-gigantic": 1.843e9, "vit-22b": 21.743e9,
}  # fmt: skip
"""Numbers of parameters of models whose papers and cards round them; 2 % apart at most."""
MIXTURES = ("mixtral", "deepseek-v", "dbrx", "kimi", "gpt-oss", "grok", "qwen3-30b", "qwen3-235b", "qwen3-coder")
LATENT = (
    "moe:layers=3,hidden=64,heads=4,head_dim=16,kv_rank=32,q_rank=48,rope_dim=16,ffn=96,dense_layers=1,experts=4,"
    "top_k=2,moe_ffn=32,shared_ffn=32,vocab_size=256,seq_len=32"
)

SMALL = {
    "gpt": "gpt:layers={},hidden=32,heads=4,seq_len=16,vocab_size=96",
    "gpt, its scores less by distance": "gpt:layers={},hidden=32,heads=4,alibi=1,relu=1,seq_len=16,vocab_size=96",
    "llama": "llama:layers={},hidden=32,heads=4,kv_heads=2,ffn=64,seq_len=16,vocab_size=96",
    "llama, tied and with biases": "llama:layers={},hidden=32,heads=4,kv_heads=2,qkv_bias=1,ffn=64,tied=1,seq_len=16,"
    "vocab_size=96",
    "parallel": "parallel:layers={},hidden=64,heads=4,rope_dim=4,norms=2,biases=1,seq_len=16,vocab_size=96",
    "parallel, one norm": "parallel:layers={},hidden=64,heads=4,kv_heads=1,tied=1,seq_len=16,vocab_size=96",
    "parallel, gated": "parallel:layers={},hidden=64,heads=4,kv_heads=2,head_dim=8,ffn=96,mlp_matrices=3,seq_len=16,"
    "vocab_size=96",
    "moe": "moe:layers={},hidden=32,heads=4,kv_heads=2,ffn=48,experts=4,shared_ffn=24,seq_len=16,vocab_size=96",
    "moe, with biases": "moe:layers={},hidden=32,heads=4,kv_heads=2,ffn=48,experts=4,clipped=1,seq_len=16,"
    "vocab_size=96",
    "moe, its first layers dense": "moe:layers={},hidden=32,heads=4,head_dim=16,ffn=48,moe_ffn=24,experts=4,"
    "dense_layers=2,groups=2,seq_len=16,vocab_size=96",
    "bert": "bert:layers={},hidden=32,heads=4,seq_len=16,vocab_size=96",
    "vit": "vit:layers={},hidden=32,heads=4,image_size=32,patch_size=8,num_classes=10",
    "vit, its halves side by side": "vit:layers={},hidden=32,heads=4,image_size=32,patch_size=8,parallel=1,"
    "num_classes=10",
    "t5": "t5:layers={},hidden=32,heads=4,head_size=8,seq_len=16,target_len=8,vocab_size=96",
    "resnet": "resnet:blocks={}-2-5,width=8,image_size=32,num_classes=10",
    "unet": "unet:convolutions={},width=8,levels=2,image_size=16,num_classes=3",
}


def matmul_flops(layers: int, hidden: int, ffn_products: int, *, length: int, kv: int, head: int) -> int:
    """Forward FLOPs of a transformer: projections, attention, MLP, and `head` multiply-adds a sample at the end."""
    layer = hidden * hidden * 2 + hidden * kv * 2 + ffn_products + 2 * length * hidden
    return 2 * (length * layers * layer + head)


def test_every_name_is_tested() -> None:
    assert tuple(PARAMETERS) == zoo.names()


@pytest.mark.parametrize("name", PARAMETERS)
def test_named_models_have_their_published_numbers_of_parameters(name: str) -> None:
    graph = zoo.build(name)
    assert graph.num_parameters == PARAMETERS[name]
    assert graph.name == name
    assert graph.warnings == ((BALANCED_LOAD,) if name.startswith(MIXTURES) else ())
    assert has_loss(graph)
    assert graph.num_parameters == pytest.approx(ROUNDED.get(name, graph.num_parameters), rel=0.02)


# Table 2 of arXiv 1905.11946, rounded as there: billions of products.
@pytest.mark.parametrize(("name", "products"), [("b0", 0.39), ("b1", 0.7), ("b4", 4.2), ("b6", 19.0), ("b7", 37.0)])
def test_efficient_nets_work_as_much_as_their_paper_says(name: str, products: float) -> None:
    assert zoo.build(f"efficientnet-{name}").forward_flops == pytest.approx(2e9 * products, rel=0.05)


# Table 1 of GPipe (arXiv 1811.06965), rounded as there.
@pytest.mark.parametrize(
    ("layers", "width", "parameters"),
    [(18, 208, 82e6), (18, 416, 318e6), (18, 544, 542e6), (36, 544, 1.05e9), (72, 512, 1.8e9)],
)
def test_amoeba_net_is_as_large_as_gpipe_says(layers: int, width: int, parameters: float) -> None:
    graph = zoo.build(f"amoebanet:layers={layers},width={width}")
    assert graph.num_parameters == pytest.approx(parameters, rel=0.025)
    # Normal cells of a stack are alike, but for its first and its last ones.
    assert find_units(graph).num_blocks >= layers - 9
    assert not zoo.build("amoebanet-d").warnings


def test_gpt3_has_the_published_number_of_parameters() -> None:
    graph = zoo.build(GPT3)
    assert graph.num_parameters == pytest.approx(175e9, rel=0.01)
    layer = 12 * 12288**2 + 13 * 12288
    assert graph.num_parameters == 96 * layer + (51200 + 2048 + 2) * 12288
    blocks = find_units(graph)
    assert blocks.num_blocks == 96
    assert blocks.num_types <= 4


@pytest.mark.parametrize(
    ("spec", "flops"),
    [
        ("gpt2", matmul_flops(12, 768, 8 * 768**2, length=1024, kv=768, head=1024 * 768 * 50257)),
        (GPT3, matmul_flops(96, 12288, 8 * 12288**2, length=2048, kv=12288, head=2048 * 12288 * 51200)),
        ("llama-7b", matmul_flops(32, 4096, 3 * 4096 * 11008, length=4096, kv=4096, head=4096 * 4096 * 32000)),
        ("llama-70b", matmul_flops(80, 8192, 3 * 8192 * 28672, length=4096, kv=1024, head=4096 * 8192 * 32000)),
        (
            "mixtral-8x7b",  # two experts a token, and the router
            matmul_flops(32, 4096, 2 * 3 * 4096 * 14336 + 8 * 4096, length=4096, kv=1024, head=4096 * 4096 * 32000),
        ),
        (
            "bert-base",
            matmul_flops(12, 768, 8 * 768**2, length=512, kv=768, head=512 * 768 * (768 + 30522)),
        ),
        (
            "vit-b",
            matmul_flops(12, 768, 8 * 768**2, length=197, kv=768, head=196 * 768 * 3 * 16**2 + 768 * 1000),
        ),
        ("resnet50", 2 * 4_089_184_256),
        ("resnet101", 2 * 7_801_405_440),
        ("vgg16", 2 * 15_470_264_320),
        ("vgg19", 2 * 19_632_062_464),
    ],
)
def test_forward_flops_are_the_counted_ones(spec: str, flops: int) -> None:
    assert zoo.build(spec).forward_flops == flops


def test_leading_dense_layers_and_heads_of_another_size() -> None:
    graph = zoo.build(SMALL["moe, its first layers dense"].format(5))
    attention = 4 * 32 * (4 * 16)
    dense, experts = 3 * 32 * 48, 4 * 3 * 32 * 24 + 4 * 32
    norms = 2 * 32
    assert graph.num_parameters == 5 * (attention + norms) + 2 * dense + 3 * experts + 32 + 2 * 96 * 32
    assert [unit.type for unit in find_units(graph).units] == sorted(unit.type for unit in find_units(graph).units)


def test_flops_of_t5() -> None:
    n, m, hidden, inner, ffn = 16, 8, 32, 32, 128
    encoder = n * (4 * hidden * inner + 2 * hidden * ffn) + 2 * n * n * inner
    decoder = m * (6 * hidden * inner + 2 * hidden * ffn) + 2 * n * hidden * inner + 2 * m * (m + n) * inner
    assert zoo.build(SMALL["t5"].format(3)).forward_flops == 2 * (3 * (encoder + decoder) + m * hidden * 96)


@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize("layers", [1, 2, 3, 5])
def test_copied_layers_are_exact(family: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SMALL[family].format(layers)
    graph = zoo.build(spec)
    monkeypatch.setattr(transformers, "BUILT", 99)
    monkeypatch.setattr(convolutions, "BUILT", 99)
    direct = zoo.build(spec)
    assert graph.operators == direct.operators
    assert graph == direct
    assert list(graph.tensors) == list(direct.tensors)
    assert graph_from_bytes(graph_to_bytes(graph)) == graph


@pytest.mark.parametrize(
    ("spec", "blocks"),
    [
        ("gpt2", 12),
        ("gpt2-xl", 48),
        ("bloom-7b", 30),
        ("falcon-40b", 60),
        ("llama-70b", 80),
        ("mixtral-8x7b", 32),
        ("bert-large", 24),
        ("vit-l", 24),
    ],
)
def test_layers_are_blocks(spec: str, blocks: int) -> None:
    found = find_units(zoo.build(spec))
    assert found.num_blocks == blocks
    assert len(Counter(unit.type for unit in found.units)) <= 6


def test_names_are_those_of_modules() -> None:
    graph = zoo.build("gpt2")
    assert graph.by_name["h.3.mlp.c_fc/MatMul"].scope == "h.3.mlp.c_fc"
    assert graph.pieces["h.11.attn.c_attn.weight#k"] == ("h.11.attn.c_attn.weight", 0, 768, 1536)
    assert {op.scope for op in graph if op.kind == "Softmax"} == {f"h.{i}.attn" for i in range(12)}
    assert len({op.name for op in graph}) == len(graph.operators)
    readers = [graph.operators[i].scope for i in graph.consumers["wte.weight"]]
    assert readers == ["wte", "lm_head"]  # tied
    assert "layers.79.self_attn.k_proj.weight" in zoo.build("llama-70b").tensors
    assert "encoder.layer.11.attention.self.query.weight" in zoo.build("bert-base").tensors


def test_sizes_may_be_changed() -> None:
    graph = zoo.build("zoo:gpt2-xl:seq_len=512")
    assert graph.num_parameters == PARAMETERS["gpt2-xl"]  # the table of positions stays
    assert graph.tensors["ids"].shape == (1, 512)
    assert zoo.build("gpt2:seq_len=2048").num_parameters == PARAMETERS["gpt2"] + 1024 * 768
    assert zoo.build("gpt2:layers=24,hidden=1024,heads=16").num_parameters == PARAMETERS["gpt2-medium"]
    assert zoo.build("resnet:blocks=3-4-6-3").num_parameters == PARAMETERS["resnet50"]
    t5 = zoo.build("t5-small:heads=6")  # heads of T5 have a size of their own
    assert t5.num_parameters == PARAMETERS["t5-small"] - 6 * 3 * 4 * 512 * 2 * 64 - 2 * 32 * 2
    llama = zoo.build("llama:layers=32,hidden=4096,heads=32,ffn=11008,seq_len=128,vocab_size=32000")
    assert llama.num_parameters == PARAMETERS["llama-7b"]


@pytest.mark.parametrize(("spelled", "name"), zoo.SPELLINGS.items())
def test_other_spellings_lead_to_the_same_model(spelled: str, name: str) -> None:
    assert spelled not in zoo.names() and name in zoo.names()
    assert zoo._model(spelled, {}) == zoo._model(name, {})


def test_a_model_is_built_by_another_spelling() -> None:
    spelled, name = min(zoo.SPELLINGS.items(), key=lambda one: PARAMETERS[one[1]])
    assert zoo.build(f"zoo:{spelled}").operators == zoo.build(name).operators


def test_the_documentation_lists_every_name() -> None:
    """As `name`, or as one of a row `name-7b, -13b`."""
    text = Path("docs/models.md").read_text("utf-8")
    section = text[text.index("## Known models") :].split("\n## ")[0]
    listed = set[str]()
    for row in re.findall(r"^\| [^|]+ \| (.+) \|$", section, re.MULTILINE):
        for first, *others in (group.split(", ") for group in re.findall(r"`([^`]+)`", row)):
            listed |= {first, *(first[: first.rindex("-")] + other for other in others)}
    assert listed == set(zoo.names())


def test_a_model_is_built_with_the_loss_that_is_asked_for() -> None:
    assert zoo.build("vit-b", loss="mse").operators[-1].kind == "MeanSquaredErrorLoss"


@pytest.mark.parametrize(
    ("spec", "repair"),
    [
        ("", "docs/models.md"),
        ("gpt3", "gpt-3"),
        ("gpt3", "gpt, llama, moe"),
        ("gpt-neox", "gpt-neox-20b"),
        ("qwen2-71b", "qwen2-72b"),
        ("parallel:layers=2,hidden=36,heads=4", "heads"),
        ("parallel:layers=2,hidden=64,heads=4,rope_dim=32", "rope_dim"),
        ("zoo:GPT2", "gpt2-xl"),
        ("gpt2:sequence=7", "seq_len"),
        ("gpt2:seq_len", "seq_len=512"),
        ("gpt2:seq_len=1,seq_len=2", "gpt2:seq_len=512"),
        ("gpt2:seq_len=0", "whole number"),
        ("gpt2:seq_len=1e3", "whole number"),
        ("gpt2:seq_len=99999999999999999999", "whole number"),
        ("gpt2:seq_len=٣", "whole number"),
        ("gpt2:layers=100000", "at most"),
        ("gpt", "layers, hidden, heads"),
        ("gpt:layers=2,hidden=30,heads=4", "multiple of heads"),
        ("llama:layers=2,hidden=32,heads=4,kv_heads=3", "multiple of kv_heads"),
        ("llama:layers=2,hidden=12,heads=4", "heads"),
        ("moe:layers=2,hidden=32,heads=4,experts=4,top_k=5", "at most experts"),
        ("moe:layers=2,hidden=32,heads=4", "experts"),
        ("moe:layers=2,hidden=32,heads=4,experts=4,groups=3", "multiple of groups"),
        ("mixtral-8x7b:heads=33", "multiple of heads"),
        ("mixtral-8x7b:experts=0", "whole number"),
        ("mixtral-8x7b:layers=-1", "whole number"),
        ("moe:layers=8,hidden=8388608,heads=8,experts=2048,ffn=8192", "at most 1e+15"),
        ("vit-b:image_size=225", "multiple of patch_size"),
        ("resnet:blocks=3-x", "3-4-6-3"),
        ("resnet:blocks=900-900-900", "at most"),
        ("resnet:blocks=" + "-".join("1" * 500), "at most 8 numbers"),
        ("vgg16:image_size=16", ""),
    ],
)
def test_what_is_not_known_is_refused(spec: str, repair: str) -> None:
    with pytest.raises(ModelError) as fault:
        zoo.build(spec)
    assert fault.value.field == "model"
    assert fault.value.value
    assert repair in fault.value.repair


# The same architectures in PyTorch


def mixture(models: ModuleType) -> Any:
    """Llama with experts as transformers writes them for export: weights looked up for each routed token."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(32, 24, bias=False), nn.Linear(32, 24, bias=False)
            self.down = nn.Linear(24, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(functional.silu(self.gate(x)) * self.up(x))

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.shared = nn.Linear(32, 4, bias=False), Gated()
            self.gate_up = nn.Parameter(0.02 * torch.randn(4, 96, 32))
            self.down = nn.Parameter(0.02 * torch.randn(4, 32, 48))

        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = functional.softmax(self.router(x), dim=-1).topk(2)
            weights, index = weights / weights.sum(-1, keepdim=True), chosen.reshape(-1)
            y = x.reshape(-1, 32).repeat_interleave(2, dim=0).unsqueeze(-1)
            gate, up = torch.bmm(self.gate_up[index], y).squeeze(-1).chunk(2, dim=-1)
            y = torch.bmm(self.down[index], (functional.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
            return (y * weights.reshape(-1, 1)).view(-1, 2, 32).sum(1).reshape(x.shape) + self.shared(x)

    class Layer(models.LlamaLayer):
        def __init__(self, width: int, heads: int, kv_heads: int) -> None:
            super().__init__(width, heads, kv_heads)
            del self.gate_up_proj, self.down_proj
            self.experts = Experts()

        def mlp(self, x: Tensor) -> Tensor:
            return self.experts(x)

    model = models.Llama(layers=4)
    model.layers = nn.ModuleList([Layer(32, 4, 2) for _ in range(4)])
    return model, (models.ids(1),)


def torch_models() -> dict[str, Callable[[], Any]]:
    """What `tests/ir/models.py` has not: BERT with the head it is trained with, and ResNet with bottlenecks."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value, self.dense = (nn.Linear(32, 32) for _ in range(4))
            self.norm, self.up, self.down, self.norm_out = (
                nn.LayerNorm(32),
                nn.Linear(32, 128),
                nn.Linear(128, 32),
                nn.LayerNorm(32),
            )

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            b, t, c = x.shape
            q, k, v = (f(x).view(b, t, 4, 8).transpose(1, 2) for f in (self.query, self.key, self.value))
            p = functional.softmax(q @ k.transpose(2, 3) / 8**0.5 + mask, dim=-1)
            x = self.norm(x + self.dense((p @ v).transpose(1, 2).reshape(b, t, c)))
            return self.norm_out(x + self.down(functional.gelu(self.up(x))))

    class Bert(nn.Module):
        def __init__(self, layers: int) -> None:
            super().__init__()
            self.words, self.places, self.kinds = nn.Embedding(96, 32), nn.Embedding(16, 32), nn.Embedding(2, 32)
            self.norm = nn.LayerNorm(32)
            self.layers = nn.ModuleList([Layer() for _ in range(layers)])
            self.dense, self.head_norm, self.decoder = nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 96)
            self.decoder.weight = self.words.weight

        def forward(self, ids: Tensor, kinds: Tensor, seen: Tensor) -> Tensor:
            places = torch.arange(ids.shape[1], device=ids.device)
            x = self.norm(self.words(ids) + self.kinds(kinds) + self.places(places))
            mask = (1.0 - seen[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
            for layer in self.layers:
                x = layer(x, mask)
            return self.decoder(self.head_norm(functional.gelu(self.dense(x))))

    class Bottleneck(nn.Module):
        def __init__(self, width: int, inner: int, stride: int) -> None:
            super().__init__()
            sizes = ((width, inner, 1, 1), (inner, inner, 3, stride), (inner, 4 * inner, 1, 1))
            self.convs = nn.ModuleList([nn.Conv2d(a, b, k, s, k // 2, bias=False) for a, b, k, s in sizes])
            self.norms = nn.ModuleList([nn.BatchNorm2d(b) for _, b, _, _ in sizes])
            self.down = nn.Identity()
            if stride != 1 or width != 4 * inner:
                conv = nn.Conv2d(width, 4 * inner, 1, stride, bias=False)
                self.down = nn.Sequential(conv, nn.BatchNorm2d(4 * inner))

        def forward(self, x: Tensor) -> Tensor:
            y = x
            for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
                y = norm(conv(y))
                y = functional.relu(y) if i < 2 else y
            return functional.relu(y + self.down(x))

    class ResNet(nn.Module):
        def __init__(self, blocks: tuple[int, ...]) -> None:
            super().__init__()
            self.stem, self.bn = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
            layers, width = [], 8
            for stage, count in enumerate(blocks):
                for i in range(count):
                    layers.append(Bottleneck(width, 8 << stage, 2 if stage and not i else 1))
                    width = 32 << stage
            self.pool, self.layers = nn.MaxPool2d(3, 2, 1), nn.Sequential(*layers)
            self.average, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(width, 10)

        def forward(self, image: Tensor) -> Tensor:
            x = self.layers(self.pool(functional.relu(self.bn(self.stem(image)))))
            return self.fc(self.average(x).flatten(1))

    def convolutions(channels: int, inner: int, out: int) -> nn.Module:
        sizes = itertools.pairwise((channels, inner, inner, inner, out))
        return nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, 1, 1, bias=False), nn.InstanceNorm2d(b), nn.LeakyReLU(0.01))
                for a, b in sizes
            )
        )

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool, self.up = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
            self.first, self.second = convolutions(3, 8, 8), convolutions(8, 16, 16)
            self.bottom, self.segment = convolutions(16, 32, 16), nn.Conv2d(4, 3, 1, bias=False)
            self.left, self.right = convolutions(32, 8, 8), convolutions(16, 4, 4)

        def forward(self, image: Tensor) -> Tensor:
            first = self.first(image)
            second = self.second(self.pool(first))
            x = torch.cat((self.up(self.bottom(self.pool(second))), second), 1)
            return self.segment(self.right(torch.cat((self.up(self.left(x)), first), 1)))

    def ints() -> Tensor:
        return torch.zeros(1, 16, dtype=torch.long)

    return {
        "bert": lambda: (Bert(4), (ints(), ints(), ints())),
        "resnet": lambda: (ResNet((4, 2, 5)), (torch.zeros(1, 3, 32, 32),)),
        "unet": lambda: (UNet(), (torch.zeros(1, 3, 16, 16),)),
    }


def module(family: str, models: ModuleType) -> Any:
    """The module of `SMALL[family]` with four layers, and its inputs."""
    import torch

    if family == "gpt":
        return models.Gpt(torch.nn.Linear, layers=4), (models.ids(1),)
    if family == "llama":
        return models.Llama(layers=4), (models.ids(1),)
    if family == "moe":
        return mixture(models)
    if family == "vit":
        return models.Vit(layers=4), (torch.zeros(1, 3, 32, 32),)
    return torch_models()[family]()


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", long_but(("gpt", "moe", "unet"), ("gpt", "llama", "moe", "bert", "vit", "resnet", "unet"))
)
def test_agrees_with_an_export(family: str, build: Callable[..., Any]) -> None:
    import torch

    from automap.runtime.torch_export import export_onnx
    from ir.onnx.load import load_model

    torch.set_num_threads(1)
    models = sys.modules[build.__module__]
    exported = with_loss(load_model(export_onnx(lambda: module(family, models))))
    graph = zoo.build(SMALL[family].format(4))
    assert graph.num_parameters == exported.num_parameters
    assert Counter(t.shape for t in graph.parameters) == Counter(t.shape for t in exported.parameters)
    assert graph.forward_flops == pytest.approx(exported.forward_flops, rel=0.01)
    multiplied = [
        Counter(
            (op.kind, op.forward_flops, op.backward_flops) for op in g if op.forward_flops.at(1) and not op.is_constant
        )
        for g in (graph, exported)
    ]
    assert multiplied[0] == multiplied[1]
    here, there = find_units(graph), find_units(exported)
    assert here.num_blocks == there.num_blocks > 0
    assert [unit.type for unit in here.units] == [unit.type for unit in there.units]


@pytest.mark.slow
def test_latent_attention_is_that_of_deepseek_v3(tmp_path: Path) -> None:
    """Parameters, arithmetic and units are those of the model of transformers."""
    from transformers import DeepseekV3Config

    from automap.runtime.torch_export import export_onnx
    from automap.runtime.transformers_models import from_config
    from ir.onnx.load import load_model

    config = DeepseekV3Config(
        vocab_size=256, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=4, kv_lora_rank=32,
        q_lora_rank=48, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, n_group=1, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, max_position_embeddings=64,
    )  # fmt: skip
    config.architectures = ["DeepseekV3ForCausalLM"]
    config.save_pretrained(tmp_path)
    exported = with_loss(load_model(export_onnx(from_config(f"{tmp_path}:seq_len=32"))))
    graph = zoo.build(LATENT)
    assert Counter(t.shape for t in graph.parameters) == Counter(t.shape for t in exported.parameters)
    assert graph.forward_flops == exported.forward_flops
    kinds = [Counter(group.kind for group in fused_groups(one))["attention"] for one in (graph, exported)]
    assert kinds == [3, 3]
    here, there = find_units(graph), find_units(exported)
    assert [unit.type for unit in here.units] == [unit.type for unit in there.units]


def of_transformers(family: str) -> Any:
    """The configuration of transformers for `SMALL[family]` with four layers, and its class."""
    from transformers import BloomConfig, FalconConfig, GPTNeoXConfig, Qwen2Config

    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 16}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if family == "parallel":
        rope |= {"partial_rotary_factor": 0.25}
        return GPTNeoXConfig(**sizes, hidden_size=64, intermediate_size=256, rope_parameters=rope), "GPTNeoXForCausalLM"
    if family == "parallel, one norm":
        config = FalconConfig(**sizes, hidden_size=64, rope_parameters=rope, multi_query=True, bias=False)
        return config, "FalconForCausalLM"
    if family == "llama, tied and with biases":
        sizes |= {"hidden_size": 32, "intermediate_size": 64, "num_key_value_heads": 2}
        return Qwen2Config(**sizes, tie_word_embeddings=True), "Qwen2ForCausalLM"
    return BloomConfig(hidden_size=32, n_layer=4, n_head=4, vocab_size=96), "BloomForCausalLM"


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    long_but(
        ["parallel", "llama, tied and with biases"],
        ["parallel", "parallel, one norm", "llama, tied and with biases", "gpt, its scores less by distance"],
    ),
)
def test_agrees_with_transformers(family: str, tmp_path: Path) -> None:
    """Parameters, arithmetic and blocks are those of GPT-NeoX, Falcon, Qwen 2 and BLOOM in transformers."""
    from automap.runtime.torch_export import export_onnx
    from automap.runtime.transformers_models import from_config
    from ir.onnx.load import load_model

    config, name = of_transformers(family)
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    exported = with_loss(load_model(export_onnx(from_config(f"{tmp_path}:seq_len=16"))))
    graph = zoo.build(SMALL[family].format(4))
    assert graph.num_parameters == exported.num_parameters
    assert graph.forward_flops == exported.forward_flops
    assert find_units(graph).num_blocks == find_units(exported).num_blocks == 4
    kinds = [Counter(group.kind for group in fused_groups(one))["attention"] for one in (graph, exported)]
    assert kinds == [4, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "cluster"),
    [
        ("gpt2", "8xV100-16GB"),
        ("llama:layers=16,hidden=2048,heads=16,kv_heads=4,seq_len=1024", "2x8xA100-80GB"),
    ],
)
def test_a_plan_is_found(spec: str, cluster: str) -> None:
    from agents import Budget, search
    from automap.cluster import parse_cluster
    from automap.problem import Problem

    problem = Problem.build(zoo.build(spec), parse_cluster(cluster), {"global_batch": 64})
    found = search(problem, Budget.parse("50"), searcher="expert")
    assert found.evaluations > 0
    assert found.plan.model.name == spec
    assert found.plan.estimate.step_time_s >= found.plan.estimate.lower_bound_s > 0
    assert found.plan.estimate.tokens_per_s_per_device
