"""Which units are layers: repeated ones, and what is like them beside them."""

import numpy as np
import pytest

from automap.cluster import parse_cluster
from automap.errors import PlanError
from automap.export.export import export, save
from automap.export.reading import read_configuration
from automap.export.same_model import check_model
from automap.price.estimate import annotate
from automap.problem import Problem
from automap.runtime.torch_export import export_onnx
from automap.runtime.transformers_models import from_config
from automap.space.stated_strategy import Strategy, hand_made
from automap.space.target_limits import plan_space
from ir import zoo
from ir.blocks import find_units
from ir.layers import is_one_stack, layer_spans, layer_types, layer_units, layers_of_modules, layers_with
from ir.loss import with_loss
from ir.onnx.load import load_model
from ir.operators.experts import DISPATCH
from ir.zoo.net import Net

SIZES = "hidden=32,heads=4,seq_len=16,vocab_size=96"
MOE = f"moe:experts=4,ffn=48,moe_ffn=24,{SIZES}"


def scopes_of(graph, prefix):
    """[layers] names of the modules of each layer, by the units that it has."""
    units = find_units(graph).units
    return [
        {
            op.scope.split(".")[1]
            for n in span
            for op in graph.operators[units[n].start : units[n].stop]
            if prefix in op.scope
        }
        for span in layer_spans(graph, find_units(graph))
    ]


@pytest.mark.parametrize("dense", [0, 1, 2, 3])
def test_first_layers_without_experts_are_layers(dense):
    graph = zoo.build(f"{MOE},layers=6" + (f",dense_layers={dense}" if dense else ""))
    blocks = find_units(graph)
    assert scopes_of(graph, "layers.") == [{str(number)} for number in range(6)]
    assert list(layer_units(graph, blocks).values()) == [1] * 6
    assert layers_with(graph, blocks, DISPATCH) == tuple(number >= dense for number in range(6))
    assert is_one_stack(graph, blocks)


def test_embeddings_heads_and_patches_are_none():
    for spec in (
        f"gpt:layers=5,{SIZES}",
        f"bert:layers=5,{SIZES}",
        "vit:layers=5,hidden=32,heads=4,image_size=32,patch_size=8",
    ):
        graph = zoo.build(spec)
        assert len(layer_units(graph, find_units(graph))) == 5
        assert is_one_stack(graph, find_units(graph))


@pytest.mark.parametrize("spec", [f"t5:layers=3,head_size=8,{SIZES}", "resnet:blocks=3-3,width=8,image_size=32"])
def test_encoders_with_decoders_and_pyramids_are_several_stacks(spec):
    graph = zoo.build(spec)
    assert layer_units(graph, find_units(graph))
    assert not is_one_stack(graph, find_units(graph))


def test_a_model_without_repeats_has_no_layers():
    graph = zoo.build(f"gpt:layers=1,{SIZES}")
    assert layer_units(graph, find_units(graph)) == {}
    assert not is_one_stack(graph, find_units(graph))


@pytest.mark.slow
def test_layers_that_take_turns_are_counted_one_by_one(tmp_path):
    """Every second one has experts, so that two of them are what is repeated; a stage cannot end between these two."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        decoder_sparse_step=2, max_position_embeddings=32,
    )  # fmt: skip
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    graph = with_loss(load_model(export_onnx(from_config(f"{tmp_path}:seq_len=16"))))
    blocks = find_units(graph)
    assert list(layer_units(graph, blocks).values()) == [2] * 4
    assert layers_with(graph, blocks, DISPATCH) == (False, True) * 4
    training = {"global_batch": 16, "target": "megatron-core"}
    problem = Problem.build(graph, parse_cluster("2xA100"), training, {"fix": {"pp": 2}})
    space = plan_space(problem)
    for values in space.random_batch(np.random.default_rng(0), 8).tolist():
        plan = annotate(space.decode(values), space.lowered(values), space.evaluator)
        save(export(plan, problem, "megatron-core"), tmp_path)
        text = (tmp_path / "megatron.sh").read_text()
        assert "--num-layers 8" in text
        found = read_configuration(tmp_path / "megatron.sh")
        lowered = hand_made(space.evaluator, Strategy(**found.degrees, may_idle=True, target=found.target))
        assert space.evaluator.evaluate(lowered).step_time_s == pytest.approx(plan.estimate.step_time_s, rel=1e-9)
        check_model(found, "megatron.sh", space.evaluator)
    with pytest.raises(PlanError, match="repeats as one"):
        hand_made(space.evaluator, Strategy(pp=2, layers=(3, 5)))


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_layer_that_shares_a_module_with_others_is_none_of_modules(is_shared: bool) -> None:
    """As the activation of the first block of a U-Net of diffusers, with which its embedding of time is computed."""
    net = Net()
    x = net.linear(net.builder.input("x", (1, 8)), "embedding", 8)
    x = net.op("Sigmoid", [x], "layers.1.act" if is_shared else "act")
    for number in range(4):
        x = net.op("Sigmoid", [net.linear(x, f"layers.{number}.linear", 8)], f"layers.{number}.act")
    graph = net.finish(net.linear(x, "head", 8), loss="mse")
    blocks = find_units(graph)
    layers = layer_types(graph, blocks)
    assert sum(unit.type in layers for unit in blocks.units) == 4
    # All layers are of one type: what runs again is decided for all of them.
    assert layers_of_modules(graph, blocks) == (frozenset() if is_shared else layers)
