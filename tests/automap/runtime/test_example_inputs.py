"""Inputs of models of transformers whose configurations leave something open, and what to do where they do not suit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from automap.errors import ModelError
from automap.runtime.torch_export import export_config
from automap.runtime.transformers_models import example_inputs, from_config

TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 32}
IMAGE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 32,
         "patch_size": 16}  # fmt: skip
BLIP = {"text_config": {**TEXT, "max_position_embeddings": 12, "bos_token_id": 1, "eos_token_id": 2,
                        "sep_token_id": 3, "encoder_hidden_size": 16}, "vision_config": IMAGE}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "sizes", "shapes"),
    [
        ("TextNetForImageClassification", {"image_size": [64, 96]}, {"pixel_values": (1, 3, 64, 96)}),
        ("BlipForConditionalGeneration", BLIP, {"pixel_values": (1, 3, 32, 32), "input_ids": (1, 12)}),
        ("AltCLIPModel", {"text_config": {**TEXT, "max_position_embeddings": 12, "pad_token_id": 1,
                                          "project_dim": 8}, "vision_config": IMAGE},
         {"input_ids": (1, 10), "pixel_values": (1, 3, 32, 32)}),
        ("EncodecModel", {"audio_channels": 2}, {"input_values": (1, 2, 240_000)}),
        ("InformerForPrediction", {"prediction_length": 8, "context_length": 24, "num_time_features": 2,
                                   "lags_sequence": [1, 5], "input_size": 3, "num_static_real_features": 4},
         {"past_values": (1, 29, 3), "past_observed_mask": (1, 29, 3), "past_time_features": (1, 29, 2),
          "future_values": (1, 8, 3), "future_time_features": (1, 8, 2), "static_real_features": (1, 4)}),
    ],
)  # fmt: skip
def test_inputs_of_which_the_configuration_says_little(
    name: str, sizes: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> None:
    kind = getattr(transformers, name)
    with torch.device("meta"):
        found = example_inputs(kind(kind.config_class(**sizes)))
    assert {key: tuple(value.shape) for key, value in found.items()} == shapes


def test_of_two_classes_that_train_a_model_the_first_is_taken(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "levit"}))
    with torch.device("meta"):
        assert type(from_config(str(tmp_path))()[0]).__name__ == "LevitForImageClassification"


def test_where_the_inputs_do_not_suit_others_can_be_given(tmp_path: Path) -> None:
    """Kosmos-2 reads which tokens are images."""
    config = transformers.Kosmos2Config(
        text_config={"embed_dim": 16, "layers": 1, "attention_heads": 2, "ffn_dim": 24, "vocab_size": 32},
        vision_config=IMAGE,
    )
    document = {**config.to_dict(), "architectures": ["Kosmos2ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(ModelError, match=r"Kosmos2TextTransformer.* cannot be exported") as fault:
        export_config(f"{tmp_path}:seq_len=8")
    assert "export-onnx FILE.py:FUNCTION" in fault.value.repair
