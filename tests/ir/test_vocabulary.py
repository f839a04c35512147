"""A padded vocabulary: the graph is that of the model with so many tokens."""

from __future__ import annotations

import pytest

from ir import zoo
from ir.loss import with_loss
from ir.vocabulary import padded

TEXT = "layers=2,hidden=32,heads=4,seq_len=16,vocab_size="
MODELS = {
    "gpt": f"gpt:{TEXT}",
    "llama": f"llama:kv_heads=2,ffn=64,{TEXT}",
    "bert": f"bert:{TEXT}",
    "t5": f"t5:ffn=64,head_size=8,{TEXT}",
}


@pytest.mark.parametrize("name", MODELS)
def test_a_padded_graph_is_the_graph_of_the_larger_vocabulary(name: str) -> None:
    small, large = (with_loss(zoo.build(f"{MODELS[name]}{size}")) for size in (102, 128))
    found = padded(small, 64)
    assert found.operators == large.operators
    assert found.tensors == large.tensors
    # It is the same model, whose vocabulary is trained with rows that no token has.
    assert found.sha256 != padded(large, 256).sha256
    assert padded(large, 64) is large


def test_classes_of_images_are_no_vocabulary() -> None:
    graph = with_loss(zoo.build("vit:layers=2,hidden=32,heads=4,image_size=16,patch_size=8,num_classes=10"))
    assert padded(graph, 64) is graph
