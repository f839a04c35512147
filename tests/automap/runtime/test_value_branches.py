"""Models of transformers that branch on values: what the error says, and the example of docs/models.md that repairs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from automap.errors import ModelError
from automap.runtime.torch_export import export_config, export_onnx
from ir.attention_windows import Window, attention_masks
from ir.onnx.load import load_model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow  # torch, its exporter and transformers take seconds to import

WIDTH = 16
"""Keys of a window; half of them are in front of the query and half behind it."""
SIZES: dict[str, dict[str, Any]] = {
    "longformer": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
        "max_position_embeddings": 66, "architectures": ["LongformerForMaskedLM"],
    },
    "led": {
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
        "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64,
        "architectures": ["LEDForConditionalGeneration"],
    },
}  # fmt: skip
"""Model type: what its configuration says."""


def folder_of(kind: str, at: Path) -> Path:
    """A folder with the configuration of a model."""
    document = {"model_type": kind, "vocab_size": 256, "attention_window": WIDTH, **SIZES[kind]}
    (at / "config.json").write_text(json.dumps(document))
    return at


def shown(folder: Path) -> dict[str, Any]:
    """What the example of the documentation defines, for the configuration of a folder."""
    blocks = re.findall(r"```python\n(.*?)```", Path("docs/models.md").read_text("utf-8"), re.DOTALL)
    (text,) = (block for block in blocks if "LongformerSelfAttention" in block)
    names = {name: getattr(transformers, name) for name in ("AutoConfig", "AutoModelForMaskedLM")}
    product = torch.nn.functional.scaled_dot_product_attention
    defined: dict[str, Any] = {"torch": torch, "scaled_dot_product_attention": product, **names}
    exec(text.replace("my-longformer", str(folder)), defined)
    return defined


@pytest.mark.parametrize(
    ("kind", "cls"), [("longformer", "LongformerSelfAttention"), ("led", "LEDEncoderSelfAttention")]
)
def test_the_error_of_a_package_names_its_class_and_what_to_replace(kind: str, cls: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        export_config(f"hf:{folder_of(kind, tmp_path)}")
    said = str(caught.value)
    assert re.search(rf"\({cls}, modeling_{kind}\.py line \d+\) branches or loops on the values", said)
    assert (
        f"package transformers. Write a function that builds the model and gives its modules of the class {cls}" in said
    )
    assert "**Branches on values**" in Path("docs/models.md").read_text("utf-8")
    assert len(said) < 600


def test_the_example_computes_what_longformer_does_and_its_window_is_read(tmp_path: Path) -> None:
    build = shown(folder_of("longformer", tmp_path))["build"]
    torch.manual_seed(0)
    changed = build().eval()
    own = transformers.LongformerForMaskedLM(changed.config).eval()
    own.load_state_dict(changed.state_dict())
    tokens = torch.randint(2, 256, (2, 64))
    torch.testing.assert_close(changed(tokens).logits, own(tokens).logits, rtol=1e-4, atol=1e-5)
    graph = load_model(export_onnx(build))
    assert [mask.window for mask in attention_masks(graph).values()] == [Window(left=WIDTH // 2, right=WIDTH // 2)] * 2


def test_the_example_computes_what_the_encoder_of_led_does(tmp_path: Path) -> None:
    attend = shown(tmp_path)["attend"]
    config = transformers.LEDConfig.from_pretrained(folder_of("led", tmp_path))
    torch.manual_seed(0)
    model = transformers.LEDForConditionalGeneration(config).eval()
    tokens = torch.randint(2, 256, (2, 64))
    with torch.no_grad():
        expected = model(tokens, decoder_input_ids=tokens).logits
        for part in model.modules():
            if type(part).__name__ == "LEDEncoderSelfAttention":
                part.forward = attend.__get__(part)
        torch.testing.assert_close(model(tokens, decoder_input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-5)
