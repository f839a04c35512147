"""Expert, context and state axes of published runs: collectives, gradients, memory; better parts are never slower."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from collective_list import Collective, list_collectives

from automap.cluster import parse_cluster
from automap.price.evaluator import Evaluator
from automap.space.stated_parts import Unpriced, mesh
from automap.validation.published_cases import Case, case_of
from automap.validation.published_runs import Run

HIDDEN, WIDTH, EXPERTS, TOP, LENGTH, KV, HEAD = 256, 128, 8, 2, 512, 2, 64
LAYERS = 2
MODEL = {
    "name": "Mixture", "layers": LAYERS, "hidden": HIDDEN, "heads": 8, "kv_heads": KV, "ffn": 512, "head_dim": HEAD,
    "vocab_size": 1024, "seq_len": LENGTH, "gated_mlp": True,
}  # fmt: skip
MOE = {"experts": EXPERTS, "topk": TOP, "moe_ffn": WIDTH}


def case(*, moe: dict[str, Any] | None = None, gpus: int = 8, per_node: int = 8, stack: str = "megatron-core",
         model: dict[str, Any] | None = None, source: str = "", gpu: str = "H100-SXM",
         **strategy: Any) -> Case:  # fmt: skip
    stated = {"dp": 8, "tp": 1, "pp": 1, "micro_batch": 2, "global_batch": 32, "precision": "bf16",
              "recompute": "none", "zero_stage": 1, **strategy}  # fmt: skip
    run = Run(
        id="r0", group="made-up", stack=stack, model={**MODEL, "moe": moe, **(model or {})}, strategy=stated,
        iteration_s=1.0, peak_memory_bytes=None, source=source,
        cluster={"gpu": gpu, "num_gpus": gpus, "gpus_per_node": per_node},
    )  # fmt: skip
    return case_of(run)


@pytest.mark.parametrize(
    ("source", "trainer"),
    [
        ("performance-summary.md, 26.08 NeMo Container", "megatron-core-26.06"),
        ("performance-summary-archive.md, 26.06.01 NeMo Container", "megatron-core-26.06"),
        ("performance-summary-archive.md, 26.04.01 NeMo Container", "megatron-core"),
        ("performance-summary-archive.md, 25.11 NeMo Container", "megatron-core"),
        ("NVIDIA/dgxc-benchmarking tag v25.05.05", "megatron-core"),
    ],
)
def test_a_run_has_the_trainer_of_its_container(source: str, trainer: str) -> None:
    found = case(moe=MOE, ep=4, source=source)
    assert found.problem.trainer.name == trainer
    older = case(moe=MOE, ep=4)
    assert older.problem.trainer.name == "megatron-core"
    # Newer containers send a token once to each rank, and launch one kernel for all experts of a rank.
    step, before = (one.evaluator.evaluate(one.lowered).step_time_s for one in (found, older))
    assert step == before if trainer == "megatron-core" else step < 0.9 * before


def test_exchanges_overlap_where_the_recipe_says_so() -> None:
    newer = {"source": "26.06 NeMo Container", "gpu": "GB300", "precision": "mxfp8", "model": {"name": "Qwen3-30B-A3B"}}
    newer |= {"moe": MOE, "ep": 4, "global_batch": 80}
    assert case(**newer).problem.training.overlap_expert_exchange
    for other in (
        {"source": "26.04 NeMo Container"},
        {"gpu": "B200"},
        {"precision": "bf16"},
        {"model": {"name": "Kimi-K2"}},
        {"dp": 4, "pp": 2},
    ):
        assert not case(**{**newer, **other}).problem.training.overlap_expert_exchange


def test_products_of_experts_are_launched_one_by_one_or_as_one() -> None:
    """Eight experts on a rank in two products (gate and up are one): 8 launches each, or one."""
    launched = []
    for source in ("26.04 NeMo Container", "26.06 NeMo Container"):
        found = case(moe=MOE, dp=1, micro_batch=16, gpus=1, per_node=1, source=source)
        segment, incoming = next(
            (s, i)
            for _, s, i in found.evaluator.surroundings(found.lowered)
            if found.evaluator.blocks.units[s.unit].type == 1
        )
        launched.append(float(found.evaluator.unit_cost(segment, incoming, found.lowered.stages[0]).launched))
    assert launched[0] - launched[1] == pytest.approx((EXPERTS - 1) * 2)


def sizes(found: Case) -> list[int]:
    return [int(size) for size in found.lowered.layout.stages[0].axes]


def collectives(found: Case) -> list[Collective]:
    """The collectives of the second layer."""
    every = list_collectives(found.lowered, found.evaluator)
    return [c for c in every if c.operator.startswith("layers.1.")]


def test_experts_get_their_tokens_by_two_exchanges_each_way() -> None:
    found = case(moe=MOE, ep=4)
    assert sizes(found) == [2, 4, 1]
    exchanges = [c for c in collectives(found) if c.kind == "all_to_all"]
    assert Counter((c.axis, c.direction) for c in exchanges) == {("ep", "forward"): 2, ("ep", "backward"): 2}
    # Two samples a rank, each token to two experts, in bf16.
    assert {c.bytes for c in exchanges} == {2 * LENGTH * TOP * HIDDEN * 2.0}
    assert not [c for c in collectives(case(moe=MOE)) if c.kind == "all_to_all"]


def test_gradients_of_experts_are_reduced_by_those_that_share_them() -> None:
    found = case(moe=MOE, ep=4)
    segment, incoming = next(
        (s, i)
        for _, s, i in found.evaluator.surroundings(found.lowered)
        if found.evaluator.blocks.units[s.unit].type == 1
    )
    cost = found.evaluator.unit_cost(segment, incoming, found.lowered.stages[0])
    dense = HIDDEN * HEAD * (8 + 2 * KV + 8) + HIDDEN * EXPERTS + 2 * HIDDEN
    experts = EXPERTS // 4 * 3 * HIDDEN * WIDTH
    # Inside, dense gradients are scattered over four ranks; then each part is reduced over two, with the experts'.
    assert cost.reduced[:3].tolist() == [dense / 4 + experts, dense, 0.0]
    # Expert states are sharded over the two ranks that hold the same ones, all others over eight.
    outcome = found.evaluator.evaluate(found.lowered)
    other = 1024 * HIDDEN * 2 + HIDDEN
    states = LAYERS * (dense / 8 + experts / 2) + other / 8
    assert outcome.ranks[0]["optimizer_bytes"] == pytest.approx(12.0 * states)


def test_experts_take_ranks_from_the_inside_out() -> None:
    def shape(**degrees: Any) -> list[tuple[str, int, str]]:
        return [(a.name, a.size, a.experts) for a in mesh(sequence_parallel=True, **degrees)]

    assert shape(dp=8, tp=4, cp=2, ep=8) == [
        ("dp", 2, "alike"), ("ep", 4, "spread"), ("cp", 2, "spread"), ("tp", 4, "sliced"),
    ]  # fmt: skip
    assert shape(dp=32, tp=2, ep=64) == [("dp", 1, "alike"), ("ep", 32, "spread"), ("tp", 2, "spread")]
    assert shape(dp=4, tp=2) == [("dp", 4, "alike"), ("tp", 2, "sliced")]
    assert shape(dp=256, tp=1, states=8)[:2] == [("dp", 32, "alike"), ("zero", 8, "alike")]
    whole = {"dp": 4, "tp": 4, "slices": 1}
    assert shape(**whole, ep=8)[1:] == [("ep", 2, "spread"), ("tp", 4, "spread")]
    for wrong in (
        {"dp": 4, "tp": 1, "ep": 3},
        {"dp": 4, "tp": 4, "ep": 2, "slices": 2, "sequence_parallel": True},
        # Ranks of tp have the same tokens without sequence parallelism, and some would have no expert.
        {**whole, "ep": 8},
        {**whole, "ep": 2, "sequence_parallel": True},
    ):
        with pytest.raises(Unpriced, match=r"experts|does not fit"):
            mesh(**wrong)


def test_sliced_experts_gather_routed_tokens_and_spread_ones_exchange_them() -> None:
    sliced = collectives(case(moe=MOE, dp=4, tp=2, ep=4))
    spread = collectives(case(moe=MOE, dp=4, tp=2, ep=8))
    inside = [
        Counter((c.kind, c.axis) for c in found if ".mlp.experts" in c.operator and c.direction == "forward")
        for found in (sliced, spread)
    ]
    assert inside[0] == {("all_to_all", "ep"): 2, ("all_gather", "tp"): 1, ("reduce_scatter", "tp"): 1}
    assert inside[1] == {("all_to_all", "ep"): 2, ("all_to_all", "tp"): 2}


def test_keys_and_values_go_round_once_a_head() -> None:
    ring, gathered = (case(dp=4, cp=2, stack=s) for s in ("megatron-core", "llm-foundry-fsdp"))
    assert sizes(ring) == [4, 2, 1]
    for found in (ring, gathered):
        moved = [c for c in collectives(found) if c.axis == "cp"]
        assert Counter((c.kind, c.direction) for c in moved) == {
            ("all_gather", "forward"): 2, ("reduce_scatter", "backward"): 2,
        }  # fmt: skip
        # Keys, and values, of two samples in bf16: no repetition for the queries that share them.
        assert {c.bytes for c in moved} == {2 * LENGTH * KV * HEAD * 2.0}
    # Once attention takes longer than the ring, nothing of the ring is paid; a gather is.
    long = (case(dp=4, cp=2, stack=s, model={"seq_len": 16384}) for s in ("megatron-core", "llm-foundry-fsdp"))
    paid = [(cost.forward_comm_s + cost.backward_comm_s).sum() for cost in map(_cost, (ring, *long))]
    assert paid[0] > 0.0 == paid[1] < paid[2]


def _cost(found: Case) -> Any:
    segment, incoming = [(s, i) for _, s, i in found.evaluator.surroundings(found.lowered)][2]
    return found.evaluator.unit_cost(segment, incoming, found.lowered.stages[0])


def test_states_shared_inside_a_host_are_spread_inside_it() -> None:
    large: dict[str, Any] = {"gpus": 16, "dp": 16, "stack": "internevo", "model": {"vocab_size": 1 << 18}}
    whole, inside = case(**large), case(**large, zero1_group=8)
    assert sizes(inside) == [2, 8, 1] and inside.lowered.zero_axes.tolist() == [False, True, False]
    one, other = (c.evaluator.evaluate(c.lowered).ranks[0] for c in (whole, inside))
    assert other["optimizer_bytes"] == pytest.approx(2.0 * one["optimizer_bytes"])
    assert other["sync_s"] < one["sync_s"]


@pytest.mark.parametrize(
    "strategy",
    [
        {"moe": MOE, "ep": 4},
        {"moe": MOE, "dp": 4, "cp": 2, "ep": 8},
        {"moe": MOE, "dp": 2, "tp": 2, "cp": 2, "ep": 2, "precision": "fp8"},
        {"dp": 2, "tp": 2, "cp": 2},
    ],
)
@pytest.mark.parametrize("per_node", [8, 2])
def test_better_parts_are_never_slower(strategy: dict[str, Any], per_node: int) -> None:
    found = case(per_node=per_node, **strategy)
    before = found.evaluator.evaluate(found.lowered).step_time_s
    cluster = found.problem.cluster
    for name in ("links", "flops", "memory"):
        links = {k: replace(v, bandwidth_GBps=2 * v.bandwidth_GBps) for k, v in cluster.links.items()}
        devices = {
            k: replace(v, peak_TFLOPs={p: 2 * x for p, x in v.peak_TFLOPs.items()})
            if name == "flops"
            else replace(v, hbm_bandwidth_GBps=2 * v.hbm_bandwidth_GBps)
            for k, v in cluster.devices.items()
        }
        better = replace(cluster, **({"links": links} if name == "links" else {"devices": devices}))
        problem = replace(found.problem, cluster=parse_cluster(better.to_json()))
        evaluator = Evaluator(problem, found.evaluator.tables)
        after = evaluator.evaluate(replace(found.lowered, layout=evaluator.layout(sizes(found), 1))).step_time_s
        assert after <= before, name


def test_latent_attention_has_the_sizes_that_were_published_with_it() -> None:
    moe = {**MOE, "dense_layers": 1, "shared": 1}
    graph = case(moe=moe, model={"name": "DeepSeek-V3", "head_dim": None, "kv_heads": 8}).problem.graph
    assert graph.tensors["layers.0.self_attn.kv_b_proj.weight"].shape == (8 * (128 + 128), 512)
    assert graph.tensors["layers.0.self_attn.q_b_proj.weight"].shape == (8 * (128 + 64), 1536)
    assert {op.scope.split(".mlp")[0] for op in graph if "experts" in op.name} == {"layers.1"}
    assert any("shared_expert" in op.name for op in graph)


def test_a_mixture_has_the_biases_that_its_paper_gives_it() -> None:
    """GPT-OSS: four in attention, one in the router, two for each expert."""
    plain, biased = (case(moe=MOE, model={"name": name}).problem.graph for name in ("Mixture", "GPT-OSS-120B"))
    heads = 8 * HEAD
    of_attention = heads + 2 * KV * HEAD + HIDDEN
    of_experts = EXPERTS + EXPERTS * (2 * WIDTH + HIDDEN)
    assert biased.num_parameters - plain.num_parameters == LAYERS * (of_attention + of_experts)


@pytest.mark.parametrize(
    ("name", "image", "parameters"),
    [
        ("ResNet-50-v1.5", 224, 25_557_032),
        ("ResNet-152", None, 60_192_808),
        ("ResNeXt101-32x4d", 224, 44_177_704),
        ("Wide-ResNet-50-2", 320, 68_883_240),
        ("ViT-L/16", 224, 304_326_632),
        ("AmoebaNet-D(18,256)", 224, 122_470_120),
        ("SE-ResNeXt101-32x4d", 224, 48_955_416),
        ("EfficientNet-B4", 380, 19_341_616),
        ("U-Net (5, 64)", 192, 232_687_328),
    ],
)
def test_networks_are_known_by_the_names_of_papers(name: str, image: int | None, parameters: int) -> None:
    model = {"name": name, "vision": {"image": image}}
    graph = case(stack="deeplearningexamples", model=model, zero_stage=0).problem.graph
    assert graph.num_parameters == parameters
    assert graph.tensors["image"].shape[2:] == (image or 224,) * 2


def test_a_network_that_the_zoo_has_not_is_named() -> None:
    with pytest.raises(Unpriced, match="the zoo has no Inception"):
        case(model={"name": "Inception-v3", "vision": {}})


def first_operators(found: Case) -> list[str]:
    units, operators = found.evaluator.blocks.units, found.problem.graph.operators
    return [operators[units[chunk[0].unit].start].name for chunk in found.lowered.chunks]


def test_stages_of_so_many_cells_end_where_these_do() -> None:
    """They end at the nearest cut, and all their units run again."""
    stated = {"dp": 1, "pp": 8, "global_batch": 32, "micro_batch": 4, "recompute": "full", "zero_stage": 0}
    model = {"name": "AmoebaNet-D(18,256)", "vision": {"image": 224}}
    found = case(model=model, stack="torchgpipe", balance=[2, 2, 2, 3, 3, 4, 4, 4], schedule="GPipe", **stated)
    cells = ["stem1", "stem3", "cell1_normal2", "cell1_normal4", "cell2_reduction", "cell3_normal3"]
    assert [name.partition(".")[0] for name in first_operators(found)] == [*cells, "cell4_reduction", "cell5_normal4"]
    assert all(segment.recomputed.all() for chunk in found.lowered.chunks[:-1] for segment in chunk)


def test_finer_modules_than_the_outermost_are_a_share_of_all() -> None:
    stated = {"dp": 1, "pp": 2, "global_batch": 32, "micro_batch": 4, "zero_stage": 0}
    model = {"name": "ResNet-101", "vision": {"image": 224}}
    early, late = (
        first_operators(case(model=model, stack="torchgpipe", gpus=2, balance=balance, **stated))[1]
        for balance in ([90, 280], [280, 90])
    )
    assert early.startswith(("layer2", "layer3.0", "layer3.1.", "layer3.2.")) and late.startswith("layer3.")
    with pytest.raises(Unpriced, match=r"balance = \[100, 100, 170\] for 2 stages"):
        case(model=model, stack="torchgpipe", gpus=2, balance=[100, 100, 170], **stated)
