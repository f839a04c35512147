"""What configurations say of the layers of a transformer is what the model was built with."""

from dataclasses import replace
from unittest import mock

import pytest
from transformers import Phi3Config

from automap.cluster import parse_cluster
from automap.export import megatron
from automap.export.configuration import read_run
from automap.export.decoder import Decoder, decoder_of
from automap.export.export import export
from automap.export.pretraining import Pretraining
from automap.problem import Problem
from automap.space.target_limits import plan_space
from automap.space.templates import templates
from ir import zoo
from ir.onnx.load import load_model
from service.loading import export_source

GPT = Decoder(
    ffn=256,
    expert_ffn=None,
    shared_ffn=None,
    activation="gelu",
    norm="LayerNorm",
    positions="learned_absolute",
    distances=None,
    head_size=16,
    kv_heads=4,
    is_tied=True,
    has_qk_norm=False,
    has_qkv_biases_alone=False,
    is_parallel=False,
)
LLAMA = replace(
    GPT, ffn=160, activation="swiglu", norm="RMSNorm", positions="rope", head_size=8, kv_heads=2, is_tied=False
)
MIXTURE = replace(LLAMA, ffn=128, expert_ffn=128, shared_ffn=48, head_size=16)


def exported(graph):
    """The run of a template for Megatron-LM, and what its files say."""
    problem = Problem.build(graph, parse_cluster("4xA100"), {"global_batch": 16, "target": "megatron-core"})
    space = plan_space(problem)
    plan = space.decode(next(values for _, values in templates(space)))
    return read_run(plan, problem, problem.target), export(plan, problem, "megatron-core")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("gpt:layers=3,hidden=64,heads=4,seq_len=32,vocab_size=100", GPT),
        ("llama:layers=3,hidden=64,heads=8,kv_heads=2,ffn=160,seq_len=32,vocab_size=100", LLAMA),
        (
            "moe:layers=3,hidden=64,heads=4,kv_heads=2,ffn=128,experts=4,seq_len=32,vocab_size=96,shared_ffn=48,"
            "dense_layers=1",
            MIXTURE,
        ),
        (
            "llama:layers=3,hidden=64,heads=8,kv_heads=2,ffn=160,qkv_bias=1,tied=1,seq_len=32,vocab_size=100",
            replace(LLAMA, has_qkv_biases_alone=True, is_tied=True),
        ),
        (
            "llama:layers=3,hidden=64,heads=8,kv_heads=2,ffn=160,qk_norm=1,seq_len=32,vocab_size=100",
            replace(LLAMA, has_qk_norm=True),
        ),
        (
            "parallel:layers=3,hidden=64,heads=4,norms=2,biases=1,tied=1,seq_len=32,vocab_size=100",
            replace(GPT, positions="rope", is_parallel=True),
        ),
        (
            "parallel:layers=3,hidden=64,heads=8,kv_heads=2,ffn=160,mlp_matrices=3,seq_len=32,vocab_size=100",
            replace(LLAMA, norm="LayerNorm", is_parallel=True),
        ),
    ],
)
def test_models_of_the_zoo(spec, expected):
    run, found = exported(zoo.build(spec))
    blocks = run.evaluator.blocks
    assert decoder_of(run.problem.graph, blocks, run.shape.hidden, run.shape.heads) == expected
    script = found.files["megatron.sh"]
    flags = {
        f"--ffn-hidden-size {expected.ffn}": True,
        f"--num-query-groups {expected.kv_heads}": expected.kv_heads < run.shape.heads,
        "--swiglu": expected.activation == "swiglu",
        f"--normalization {expected.norm}": True,
        f"--moe-ffn-hidden-size {expected.expert_ffn}": expected.expert_ffn is not None,
        f"--moe-shared-expert-intermediate-size {expected.shared_ffn}": expected.shared_ffn is not None,
        "--untie-embeddings-and-output-weights": not expected.is_tied,
        "--add-qkv-bias": expected.has_qkv_biases_alone,
        "--disable-bias-linear": expected.has_qkv_biases_alone or expected.activation == "swiglu",
        "--qk-layernorm": expected.has_qk_norm,
    }
    assert {flag: f"    {flag}\n" in script for flag in flags} == flags
    assert "does not say these plainly" not in script
    assert ("stand side by side" in script) == expected.is_parallel
    assert any("stand side by side" in note.text for note in found.notes) == expected.is_parallel


def test_one_product_for_queries_keys_and_values_and_one_for_gate_and_width(tmp_path):
    """Phi-3 as PyTorch exports it: both are taken apart by slices."""
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 64}
    Phi3Config(**sizes, **heads, pad_token_id=0, eos_token_id=1, bos_token_id=2).save_pretrained(tmp_path)
    graph = load_model(export_source(f"hf:{tmp_path}:seq_len=32")[0])
    run, _ = exported(graph)
    assert decoder_of(graph, run.evaluator.blocks, run.shape.hidden, run.shape.heads) == LLAMA


def test_a_clipped_gate_is_another_activation_than_swiglu():
    _, found = exported(
        zoo.build("moe:layers=3,hidden=64,heads=4,kv_heads=2,ffn=128,experts=4,clipped=1,seq_len=32,vocab_size=96")
    )
    script = found.files["megatron.sh"]
    assert "    --swiglu\n" not in script and "    --disable-bias-linear\n" not in script
    assert "# --swiglu or another activation.\n" in script


T5 = "t5:layers=3,hidden=64,heads=4,head_size=16,ffn=160,seq_len=32,vocab_size=96"


def test_relu_and_the_relative_positions_of_t5():
    run, found = exported(zoo.build(T5))
    shape = decoder_of(run.problem.graph, run.evaluator.blocks, run.shape.hidden, run.shape.heads)
    assert (shape.ffn, shape.norm, shape.activation, shape.positions) == (160, "RMSNorm", "relu", "relative")
    script = found.files["megatron.sh"]
    assert "    --position-embedding-type relative\n    --relative-attention-num-buckets 32\n" in script
    assert "does not say these plainly" not in script
    assert "# Layers have ReLU, for which Megatron-LM has no argument" in script
    texts = {note.about: note.text for note in found.notes}
    assert "ReLU" in texts["layers"] and "--relative-attention-max-distance" in texts["model"]
    assert "layers that share weights" not in texts, "all layers of a stack have one table in Megatron-LM, too"


def test_relative_positions_are_named_where_the_script_has_none():
    """The encoder of T5 by itself, which pretrain_bert.py trains without them."""
    graph = zoo.build(T5)
    with mock.patch.object(megatron, "pretraining_of", return_value=Pretraining(script="pretrain_bert.py")):
        _, found = exported(graph)
    assert "# --position-embedding-type.\n" in found.files["megatron.sh"]
    (note,) = [note for note in found.notes if note.about == "model"]
    assert "--position-embedding-type, which the graph does not say plainly" in note.text
