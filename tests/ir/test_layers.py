"""Which units are layers: repeated ones, and what is like them beside them."""

import pytest

from ir import zoo
from ir.blocks import find_units
from ir.layers import is_one_stack, layer_spans, layer_units

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
    assert len(layer_units(graph, blocks)) == 6
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
    assert layer_units(graph, find_units(graph)) == ()
    assert not is_one_stack(graph, find_units(graph))
