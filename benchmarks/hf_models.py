"""Configurations of Hugging Face's transformers, each from its config.json to a plan by one command.

    python benchmarks/hf_models.py [--models NAME,...] [--budget 500]

Writes the default configuration of each class to a folder and runs `automap search hf:FOLDER` on it, in a process of
its own; llama-70b is Llama 3 70B, to show that no weights are allocated. Prints parameters, the seconds of the whole
command, and the step time of the plan. Exit code 1: a command failed. Needs the extra `hf` of the project.
The committed figures are in benchmarks/results/.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from automap.amounts import in_seconds

LLAMA_70B = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
MODELS = {
    "gpt2": ("GPT2LMHeadModel", {}),
    "llama": ("LlamaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-moe": ("Qwen2MoeForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {}),
    "bert": ("BertForMaskedLM", {}),
    "roberta": ("RobertaForMaskedLM", {}),
    "t5": ("T5ForConditionalGeneration", {}),
    "whisper": ("WhisperForConditionalGeneration", {}),
    "vit": ("ViTForImageClassification", {}),
    "convnext": ("ConvNextForImageClassification", {}),
    "deberta-v2": ("DebertaV2ForMaskedLM", {}),
    "llama-70b": ("LlamaForCausalLM", LLAMA_70B),
    "qwen3-next": ("Qwen3NextForCausalLM", {}),
    "falcon-mamba": ("FalconMambaForCausalLM", {"hidden_size": 4096, "num_hidden_layers": 64}),
}
"""Name: (class, what differs from the defaults of its configuration)."""
LARGE = ("llama-70b", "qwen3-next")
"""Models whose training takes more devices."""


def plan(name: str, folder: Path, budget: str) -> bool:
    """Runs the command for one model and prints its line; returns whether a plan came out."""
    import transformers

    architecture, sizes = MODELS[name]
    config = getattr(transformers, architecture).config_class(**sizes)
    config.architectures = [architecture]
    config.save_pretrained(folder / name)
    cluster = "8x8xH100" if name in LARGE else "2x8xA100-80GB"
    words = ["search", f"hf:{folder / name}", "--cluster", cluster, "--global-batch", "128", "--json"]
    began = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-m", "service.command", *words, "--budget", budget],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, err = child.communicate()
    took = time.perf_counter() - began
    if child.returncode != 0:
        print(f"{name:11} failed after {took:.0f} s: {err.strip().splitlines()[-1]}", flush=True)
        return False
    found = json.loads(out)
    billions = found["model"]["num_parameters"] / 1e9
    step = in_seconds(found["estimate"]["step_time_s"])
    print(f"{name:11} {billions:7.3f} G parameters   {took:4.0f} s   step {step:>8} on {cluster}", flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--budget", default="500")
    arguments = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with tempfile.TemporaryDirectory() as folder:
        done = [plan(name, Path(folder), arguments.budget) for name in arguments.models.split(",")]
    raise SystemExit(not all(done))


if __name__ == "__main__":
    main()
