"""Models of transformers, from a configuration on disk to a plan; tiny ones, and nothing is downloaded."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from long_cases import long_but

from agents import Budget, search_offer
from automap.errors import ModelError
from automap.export.export import export, save
from automap.export.reading import read_configuration
from automap.price.evaluator import Evaluator
from automap.problem import Problem
from automap.runtime import torch_export
from automap.runtime.operators.apply import run
from automap.runtime.torch_export import export_config, export_onnx
from automap.runtime.transformers_models import example_inputs, from_config, name_of
from automap.space.stated_strategy import Strategy, hand_made
from ir.attention_windows import CAUSAL, EVERYTHING, Window, attention_masks
from ir.blocks import find_units
from ir.cuts import carried_tensors
from ir.onnx.load import load_model
from ir.onnx.strip import strip
from service.command.main import main

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow  # torch, its exporter and transformers take seconds to import

LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 256}
TEXT = {**LAYERS, "intermediate_size": 128, "max_position_embeddings": 32}
GROUPED = {**TEXT, "num_key_value_heads": 2}
IMAGES = {"image_size": 32, "num_channels": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": 256, "n_positions": 32}),
    "llama": ("LlamaForCausalLM", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "shared_expert_intermediate_size": 64},
    ),
    "mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "bert": ("BertForMaskedLM", TEXT),
    "roberta": ("RobertaForMaskedLM", {**TEXT, "max_position_embeddings": 34}),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 256,
         "dropout_rate": 0.0},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 256,
         "max_source_positions": 32, "max_target_positions": 16, "num_mel_bins": 8, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    ),
    "vit": (
        "ViTForImageClassification",
        {**IMAGES, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "patch_size": 8},
    ),
    "convnext": ("ConvNextForImageClassification", {**IMAGES, "hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 2, 1]}),
    "deberta-v2": (
        "DebertaV2ForMaskedLM", {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
}  # fmt: skip
"""Model type: (class, what its configuration says)."""


def write(folder: Path, kind: str, **more: Any) -> Path:
    """A folder with the configuration of a model."""
    architecture, sizes = MODELS[kind]
    document = {"model_type": kind, "architectures": [architecture], "use_cache": True, **sizes}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**document, **more}))
    return folder


def module_of(folder: Path) -> torch.nn.Module:
    with torch.device("meta"):
        return from_config(str(folder))()[0]


def test_all_families_are_here() -> None:
    assert len(MODELS) == 12


@pytest.mark.parametrize("kind", long_but(("t5",), MODELS))
def test_from_a_configuration_to_a_plan_by_one_command(kind: str, tmp_path: Path) -> None:
    folder, out = write(tmp_path / "tiny", kind), tmp_path / "plan.json"
    words = ["search", f"hf:{folder}", "--cluster", "2xA100-80GB", "--global-batch", "8", "--budget", "16"]
    assert main([*words, "--searcher", "expert", "-o", str(out)]) == 0
    plan = json.loads(out.read_text())
    # Tied weights count once in both.
    assert plan["model"]["num_parameters"] == sum(p.numel() for p in module_of(folder).parameters())
    assert plan["model"]["name"] == "tiny"


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("gpt2", "gpt:layers=2,hidden=64,heads=4,seq_len=32,positions=32,vocab_size=256"),
        ("llama", "llama:layers=2,hidden=64,heads=4,kv_heads=2,ffn=128,seq_len=32,vocab_size=256"),
    ],
)
@pytest.mark.parametrize("degrees", [["--dp", "2"], ["--tp", "2"], ["--pp", "2"]], ids=" ".join)
def test_its_price_is_that_of_the_zoo(
    kind: str, sizes: str, degrees: list[str], exported: Callable[[str], Path], tmp_path: Path
) -> None:
    """The zoo writes the same network operator by operator, without an exporter."""
    steps = []
    for model in (str(exported(kind)), f"zoo:{sizes}"):
        out = tmp_path / "plan.json"
        words = ["estimate", model, "--cluster", "2xA100-80GB", "--global-batch", "8", "--trainer", "megatron-core"]
        assert main([*words, *degrees, "-o", str(out)]) == 0
        steps.append(json.loads(out.read_text())["estimate"]["step_time_s"])
    assert steps[0] == pytest.approx(steps[1], rel=0.02)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`exported(kind)`: the ONNX file of a model, made once."""
    folder = tmp_path_factory.mktemp("exported")

    @functools.cache
    def export(kind: str) -> Path:
        names = {"gpt2": ("attn_pdrop", "embd_pdrop", "resid_pdrop"),
                 "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob")}  # fmt: skip
        without = dict.fromkeys(names.get(kind, ()), 0.0)
        made = write(folder / kind, kind, **without) / "model.onnx"
        assert main(["export-onnx", f"hf:{made.parent}", "-o", str(made)]) == 0
        return made

    return export


@pytest.mark.slow
@pytest.mark.long
def test_plans_train_them_with_the_loss_of_one_process(exported: Callable[[str], Path]) -> None:
    """Split layers, inputs that are not the first arguments, stages; all return a record with the scores inside."""
    folders = []
    for kind, degrees, target in (
        ("llama", "tp", "automap"), ("t5", "tp", "automap"), ("gpt2", "pp", "automap"), ("vit", "tp", "automap"),
        ("bert", "tp", "pytorch"), ("qwen2", "pp", "pytorch"),
    ):  # fmt: skip
        model = exported(kind)
        hints = model.with_name("hints.json")
        # A layer of BERT ends with a norm, which the graph has at the beginning of the next one.
        hints.write_text(json.dumps({"fix": {degrees: 2, **({"recompute": "full"} if kind == "bert" else {})}}))
        words = ["search", str(model), "--cluster", "2xcpu", "--precision", "fp32", "--global-batch", "4"]
        words += ["--target", target, "--hints", str(hints), "--searcher", "expert", "--budget", "16"]
        assert main([*words, "-o", str(plan := model.with_name("plan.json"))]) == 0
        if target == "pytorch":
            assert main(["export", str(plan), str(model), "-o", str(model.with_name("files"))]) == 0
        folders.append(str(model.parent))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = str(Path(__file__).with_name("transformers_ranks.py"))
    done = subprocess.run([*torchrun, script, *folders], capture_output=True, text=True, check=False, timeout=300)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(folders), done.stderr[-3000:]
    for found in lines:
        assert found["losses"] == pytest.approx(found["wanted"], rel=1e-5)


WINDOWED: dict[str, tuple[dict[str, Any], dict[str, Any], list[Window]]] = {
    "mistral": ({}, {"sliding_window": 96}, [Window(left=95, right=0)] * 2),
    "qwen2": ({"use_sliding_window": True, "max_window_layers": 1}, {"sliding_window": 64},
              [CAUSAL, Window(left=63, right=0)]),
    "gemma2": ({"head_dim": 16}, {"sliding_window": 100}, [Window(left=99, right=0), CAUSAL]),
    "gpt_oss": ({"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}, {"sliding_window": 32},
                [Window(left=31, right=0), CAUSAL]),
    "modernbert": ({"global_attn_every_n_layers": 2, "pad_token_id": 0}, {"local_attention": 48},
                   [EVERYTHING, Window(left=24, right=24)]),
}  # fmt: skip
"""Model type: (what its configuration says, its window, the keys that the queries of each layer see)."""


@pytest.mark.parametrize(("kind", "seq_len"), long_but([("mistral", 6000), ("modernbert", 512)],
    [(kind, length) for kind in WINDOWED for length in (64, 512, 6000)]))  # fmt: skip
def test_windows_are_found_and_priced_where_the_trainer_skips_them(kind: str, seq_len: int, tmp_path: Path) -> None:
    """At 64 positions masks are stored, at 512 computed, and of 6,000 positions the numbers are not kept."""
    sizes, window, expected = WINDOWED[kind]
    steps = {}
    for name, stated in (("with", window), ("without", dict.fromkeys(window, 4 * seq_len))):
        architecture = transformers.models.auto.modeling_auto.MODEL_MAPPING_NAMES[kind].removesuffix("Model")
        head = "ForMaskedLM" if kind == "modernbert" else "ForCausalLM"
        document = {**GROUPED, **sizes, **stated, "max_position_embeddings": seq_len, "model_type": kind}
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**document, "architectures": [architecture + head]}))
        graph = load_model(export_onnx(from_config(f"{folder}:seq_len={seq_len}")))
        masks = [mask.window for mask in attention_masks(graph).values()]
        if name == "with":
            assert masks == [one.within(seq_len, seq_len) for one in expected]
        else:
            assert set(masks) == {EVERYTHING if kind == "modernbert" else CAUSAL}
        for trainer in ("megatron-core", "ddp"):
            problem = Problem.build(graph, "2xA100-80GB", {"global_batch": 8, "trainer": trainer})
            evaluator = Evaluator(problem)
            lowered = hand_made(evaluator, Strategy())
            steps[trainer, name] = evaluator.evaluate(lowered).step_time_s
    assert steps["ddp", "with"] == steps["ddp", "without"]
    if seq_len > 64:
        assert steps["megatron-core", "with"] < steps["megatron-core", "without"]


def test_a_class_is_exported_as_it_is() -> None:
    """The class is used as a user writes it: caches on, default kernels for experts, and no inputs named."""

    def build() -> torch.nn.Module:
        module: torch.nn.Module = transformers.MixtralForCausalLM(transformers.MixtralConfig(**MODELS["mixtral"][1]))
        return module

    graph = load_model(export_onnx(build))
    assert [graph.tensors[name].shape for name in graph.outputs] == [(1, 32, 256)]
    assert any("expert" in text for text in graph.warnings)


@pytest.mark.parametrize(
    ("name", "kind", "sizes", "shapes"),
    [
        ("Mpt", "ForCausalLM", {"max_seq_len": 48, "d_model": 32, "n_heads": 2, "n_layers": 1}, {"input_ids": (1, 48)}),
        (
            "VideoMAE",
            "ForVideoClassification",
            {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "num_frames": 4},
            {"pixel_values": (1, 4, 3, 32, 32)},
        ),
        ("CLIP", "Model", {"text_config": {"max_position_embeddings": 20}, "vision_config": {"image_size": 32}},
         {"input_ids": (1, 20), "pixel_values": (1, 3, 32, 32)}),
        ("Wav2Vec2", "ForCTC", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "intermediate_size": 64}, {"input_values": (1, 240_000)}),
        ("AST", "ForAudioClassification", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "max_length": 64, "num_mel_bins": 32}, {"input_values": (1, 64, 32)}),
        ("Speech2Text", "ForConditionalGeneration", {"max_source_positions": 64, "input_feat_per_channel": 8,
         "max_target_positions": 12, "encoder_layers": 1, "decoder_layers": 1},
         {"input_features": (1, 64, 8), "decoder_input_ids": (1, 10)}),
        ("VJEPA2", "ForVideoClassification", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "crop_size": 32, "frames_per_clip": 4}, {"pixel_values_videos": (1, 4, 3, 32, 32)}),
        ("Vilt", "ForMaskedLM", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64},
         {"input_ids": (1, 40), "pixel_values": (1, 3, 64, 64)}),
        ("PatchTST", "ForPrediction", {"num_input_channels": 3, "context_length": 48}, {"past_values": (1, 48, 3)}),
        ("OneFormer", "ForUniversalSegmentation", {}, {"pixel_values": (1, 3, 224, 224), "task_inputs": (1, 77)}),
        ("Bart", "ForConditionalGeneration", {"d_model": 32, "max_position_embeddings": 24, "encoder_layers": 1,
         "decoder_layers": 1}, {"input_ids": (1, 24), "decoder_input_ids": (1, 24)}),
    ],
)  # fmt: skip
def test_inputs_follow_the_configuration(
    name: str, kind: str, sizes: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> None:
    with torch.device("meta"):
        module = getattr(transformers, name + kind)(getattr(transformers, f"{name}Config")(**sizes))
        assert {name: tuple(value.shape) for name, value in example_inputs(module).items()} == shapes


def test_a_body_that_is_trained_as_it_is_keeps_its_class(tmp_path: Path) -> None:
    """SAM has no class with a head: masks are made by the body."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64, "window_size": 4}
    vision = {**sizes, "mlp_dim": 64, "output_channels": 16, "num_pos_feats": 8, "global_attn_indexes": []}
    decoder = {
        "hidden_size": 16, "num_hidden_layers": 1, "mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 16,
    }  # fmt: skip
    prompt = {"hidden_size": 16, "image_size": 64, "mask_input_channels": 4}
    parts = {"vision_config": vision, "mask_decoder_config": decoder, "prompt_encoder_config": prompt}
    document = {"model_type": "sam", "architectures": ["SamModel"], **parts}
    (tmp_path / "config.json").write_text(json.dumps(document))
    out = tmp_path / "plan.json"
    words = ["search", f"hf:{tmp_path}", "--cluster", "2xA100-80GB", "--global-batch", "8", "--budget", "16"]
    assert main([*words, "--searcher", "expert", "-o", str(out)]) == 0
    assert json.loads(out.read_text())["stages"]


def test_further_heads_stay() -> None:
    """Of all that a model of transformers returns, what has parameters of its own; the rest is left out."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(**sizes, vocab_size=96, max_position_embeddings=16)
    graph = load_model(export_onnx(lambda: transformers.BertForPreTraining(config)))
    assert [graph.tensors[name].shape for name in graph.outputs] == [(1, 16, 96), (1, 2)]
    with torch.device("meta"):
        assert graph.num_parameters == transformers.BertForPreTraining(config).num_parameters()
    assert not graph.warnings


def test_slices_of_experts_behind_merged_tokens_are_read_back_at_their_price(tmp_path: Path) -> None:
    """Routers of transformers read tokens as `[(b s), h]`, where the sequence cannot be split."""
    graph = load_model(export_onnx(from_config(str(folder := write(tmp_path / "tiny", "mixtral")))))
    assert graph.num_parameters == sum(p.numel() for p in module_of(folder).parameters())
    training = {"global_batch": 16, "target": "megatron-core"}
    problem = Problem.build(graph, "2x4xA100-80GB", training, {"fix": {"tp": 2, "ep": 4}})
    plan = search_offer(problem, Budget.parse("20")).plan
    save(export(plan, problem, "megatron-core"), tmp_path)
    found = read_configuration(tmp_path / "megatron.sh")
    again = Evaluator(Problem.build(graph, "2x4xA100-80GB", found.training))
    step = again.evaluate(hand_made(again, Strategy(**found.degrees))).step_time_s
    assert step == pytest.approx(plan.estimate.step_time_s, rel=1e-9)


def test_labels_among_the_inputs_make_the_loss_the_output() -> None:
    def build() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
        ids = torch.zeros(1, 16, dtype=torch.int64)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**MODELS["gpt2"][1])), {
            "input_ids": ids,
            "labels": ids,
        }

    graph = load_model(export_onnx(build))
    assert [graph.tensors[name].shape for name in graph.outputs] == [()]


@pytest.mark.parametrize(
    ("method", "more"), [("gptq", {"bits": 4, "group_size": 128}), ("fp8", {"weight_block_size": [128, 128]})]
)
def test_quantised_weights_are_trained_as_numbers_and_said_so(
    method: str, more: dict[str, Any], exported: Callable[[str], Path], tmp_path: Path
) -> None:
    plain = load_model(exported("llama").read_bytes())
    folder = write(tmp_path / method, "llama", quantization_config={"quant_method": method, **more})
    data = export_onnx(from_config(str(folder)))
    for graph in (load_model(data), load_model(strip(data).data)):
        assert (graph.num_parameters, graph.forward_flops) == (plain.num_parameters, plain.forward_flops)
        assert [w for w in graph.warnings if w not in plain.warnings] == [w for w in graph.warnings if method in w]
        assert any(f"quantised weights ({method})" in warning for warning in graph.warnings)


def test_keys_replace_numbers(tmp_path: Path) -> None:
    folder = write(tmp_path / "tiny", "llama")
    module, inputs = from_config(f"hf:{folder}:seq_len=8,num_hidden_layers=1")()
    assert inputs["input_ids"].shape == (1, 8)
    assert len([name for name, _ in module.named_modules() if name.endswith("self_attn")]) == 1
    assert name_of(f"hf:{folder}:seq_len=8") == name_of(str(folder / "config.json")) == "tiny"


def test_an_infinite_number_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    config = transformers.Mamba2Config(num_hidden_layers=1, num_heads=4, head_dim=32, hidden_size=64, vocab_size=256)
    config.save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text(), "its steps have no upper limit"
    assert module_of(tmp_path).config.time_step_limit[1] == float("inf")


def test_a_model_that_makes_no_mask_in_an_export_gets_one(tmp_path: Path) -> None:
    sizes = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "longt5", "vocab_size": 256, **sizes}))
    spec = f"hf:{tmp_path}:seq_len=16"
    graph = load_model(export_onnx(from_config(spec)))
    assert graph.num_parameters == sum(p.numel() for p in module_of(tmp_path).parameters())
    assert graph.tensors[graph.outputs[0]].shape == (1, 16, 256) and graph.tensors[graph.outputs[0]].batch_dim == 0


def test_a_model_that_cannot_be_read_with_one_sample_is_exported_with_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inkling's shared experts read all tokens of all samples side by side: at one sample no view says so."""
    sizes = {
        **GROUPED, "head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
        "sliding_window_size": 4, "rel_extent": 16, "moe_intermediate_size": 32, "n_routed_experts": 2,
        "num_experts_per_tok": 2, "layer_types": ["hybrid_sliding", "hybrid"], "mlp_layer_types": ["dense", "sparse"],
    }  # fmt: skip
    # Every token goes to both experts, so that their slots suffice.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "inkling_text", **sizes}))
    spec = f"hf:{tmp_path}:seq_len=8"
    samples = []

    def recorded(spec: str, num_samples: int = 1) -> Callable[[], Any]:
        samples.append(num_samples)
        return from_config(spec, num_samples=num_samples)

    monkeypatch.setattr(torch_export, "from_config", recorded)
    graph = load_model(export_config(spec))
    assert samples == [1, 2], "two samples are for models that are refused with one"
    torch.manual_seed(0)
    module = from_config(spec)()[0].eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    assert graph.num_parameters == sum(p.numel() for p in module.parameters())
    tokens = torch.randint(256, (3, 8))
    with torch.no_grad():
        wanted = module(tokens).logits
        given = {**dict(module.named_parameters()), **dict(module.named_buffers()), "input_ids": tokens}
        found = run(graph, given, 3)[graph.outputs[0]]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_sample_has_as_many_tokens_as_there_are_positions(tmp_path: Path) -> None:
    for kind, tokens in (("llama", 32), ("roberta", 32), ("t5", 512)):
        assert example_inputs(module_of(write(tmp_path / kind, kind)))["input_ids"].shape == (1, tokens), kind
    long = write(tmp_path / "long", "llama", max_position_embeddings=1 << 17)
    assert example_inputs(module_of(long))["input_ids"].shape == (1, 8192)


def test_a_body_alone_gets_the_head_that_trains_it(tmp_path: Path) -> None:
    for architectures in (["BertModel"], None):
        assert type(module_of(write(tmp_path / "tiny", "bert", architectures=architectures))).__name__ == (
            "BertForMaskedLM"
        )
    clip = {"text_config": {"num_hidden_layers": 1}, "vision_config": {"num_hidden_layers": 1}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip", "architectures": ["CLIPModel"], **clip}))
    assert type(module_of(tmp_path)).__name__ == "CLIPModel", "it is trained as it is, on pairs of texts and images"


def test_a_class_that_is_also_code_of_the_folder_is_that_of_transformers(tmp_path: Path) -> None:
    """This holds too under the name that the code gave it, which may be written in other letters."""
    for name in ("LlamaForCausalLM", "LLaMAForCausalLM"):
        folder = write(tmp_path / name, "llama", architectures=[name], auto_map=CODE)
        assert type(module_of(folder)).__name__ == "LlamaForCausalLM"


def test_a_multimodal_body_gets_its_head(tmp_path: Path) -> None:
    parts = {"text_config": {"num_hidden_layers": 1}, "vision_config": {"num_hidden_layers": 1}}
    document = {"model_type": "llava", "architectures": ["LlavaModel"], **parts}
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert type(module_of(tmp_path)).__name__ == "LlavaForConditionalGeneration"


CODE = {"AutoModelForCausalLM": "modeling.Model"}
"""What a configuration says of classes that its folder's code defines."""


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nowhere", "nothing is downloaded"),
        ("tiny:seq_len=33", "1 to 32"),
        ("tiny:seq_len=many", "not a number"),
        ("tiny:layers=3", "num_hidden_layers"),
        ("tiny:model_type=3", "not a number of the configuration"),
        ("uneven", "not a multiple"),
        ("unknown", "no such kind of model"),
        ("coded", "code of the folder is not run"),
        ("broken", "not JSON"),
        ("list", "not a JSON object"),
    ],
)
def test_wrong_configurations_are_refused_in_words(spec: str, said: str, tmp_path: Path) -> None:
    write(tmp_path / "tiny", "llama")
    write(tmp_path / "uneven", "bert", hidden_size=66)
    write(tmp_path / "coded", "llama", architectures=["MyModelForCausalLM"], auto_map=CODE)
    for name, text in (("unknown", '{"model_type": "perceptron9"}'), ("broken", "{"), ("list", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    with pytest.raises(ModelError) as caught:
        from_config(f"hf:{tmp_path / spec}")()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layers_of_an_encoder_and_a_decoder_are_units(tmp_path: Path) -> None:
    """The memory, the biases of positions and the masks cross the layers of a decoder; the first alone is sent."""
    folder = write(tmp_path / "t5", "t5", num_layers=3)
    graph = load_model(export_onnx(from_config(f"{folder}:seq_len=32")), loss="cross_entropy")
    units = find_units(graph).units
    times = Counter(unit.type for unit in units)
    assert sorted(times.values())[-2:] == [3, 3]
    assert len(carried_tensors(graph)) == 1
