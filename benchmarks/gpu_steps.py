"""Training steps of real models on one GPU of this host, beside their prices: time and peak memory.

    python benchmarks/gpu_steps.py prepare FOLDER [--only NAME ...]     exports the models and makes their plans
    python benchmarks/gpu_steps.py measure FOLDER [--ways plain ...]    takes the steps on the GPU of this host
    python benchmarks/gpu_steps.py report FOLDER [--cluster CLUSTER]    prices what was measured, and prints the errors
    python benchmarks/gpu_steps.py all FOLDER                           all of it

Models are the configurations of `CASES` with random weights and data. Each is trained in up to three ways: `plain` is a
loop of PyTorch as a user writes it (autocast, scaled_dot_product_attention, cross_entropy, AdamW), `modules` the module
trainer with the plan of `prepare`, `graph` the runtime that trials use, on the same plan. A step is the median over
some; the memory is what `torch.cuda` counts as allocated at the peak, and as reserved. `plain` is priced as the trainer
`ddp`, `modules` as `automap-modules`, `graph` as `automap`. Without a GPU, steps run on the CPU. Needs the extra `hf`
of the project. The committed figures are in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from automap.cluster import parse_cluster
from automap.plan import DeviceMemory, Plan
from automap.price.estimate import price
from automap.price.evaluator import Evaluator
from automap.price.plan_writer import to_plan
from automap.problem import Problem
from automap.space.stated_strategy import Strategy, hand_made
from automap.trainers import trainers
from ir.loss import with_loss
from ir.onnx.load import load_model

GPT2 = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
GPT2_MEDIUM = {**GPT2, "n_layer": 24, "n_embd": 1024, "n_head": 16}
GPT2_XL = {**GPT2, "n_layer": 48, "n_embd": 1600, "n_head": 25}
BERT_LARGE = {
    "num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
LLAMA_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
QWEN_HALF_B = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
MIXTRAL = {
    "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 8, "num_local_experts": 8, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip
T5_LARGE = {"d_model": 1024, "d_ff": 4096, "d_kv": 64, "num_layers": 24, "num_heads": 16, "dropout_rate": 0.0}
VIT_LARGE = {
    "num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096,
    "num_labels": 1000,
}  # fmt: skip
WHISPER_MEDIUM = {
    "d_model": 1024, "encoder_layers": 24, "decoder_layers": 24, "encoder_attention_heads": 16,
    "decoder_attention_heads": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096,
}  # fmt: skip
CONVNEXT_BASE = {"hidden_sizes": [128, 256, 512, 1024], "depths": [3, 3, 27, 3], "num_labels": 1000}
SWIN_BASE = {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32], "num_labels": 1000}
TINY = {**GPT2, "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 512, "n_positions": 64}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and how it is trained."""

    kind: str
    """The class of transformers."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """What its configuration says."""
    tokens: int = 0
    """Tokens of a sample; 0 = as the configuration says."""
    micro_batch: int
    count: int = 1
    """Micro-batches of a step."""
    precision: str = "bf16"
    recompute: str = "none"


CASES: Mapping[str, Case] = {
    "tiny": Case(kind="GPT2LMHeadModel", sizes=TINY, tokens=64, micro_batch=4),
    "gpt2": Case(kind="GPT2LMHeadModel", sizes=GPT2, tokens=1024, micro_batch=16),
    "gpt2-small-batch": Case(kind="GPT2LMHeadModel", sizes=GPT2, tokens=1024, micro_batch=1, count=8),
    "gpt2-medium-fp32": Case(kind="GPT2LMHeadModel", sizes=GPT2_MEDIUM, tokens=1024, micro_batch=4, precision="fp32"),
    "gpt2-medium-tf32": Case(kind="GPT2LMHeadModel", sizes=GPT2_MEDIUM, tokens=1024, micro_batch=4, precision="tf32"),
    "gpt2-xl": Case(kind="GPT2LMHeadModel", sizes=GPT2_XL, tokens=1024, micro_batch=4),
    "gpt2-xl-recomputed": Case(
        kind="GPT2LMHeadModel", sizes=GPT2_XL, tokens=1024, micro_batch=16, recompute="full", count=2
    ),
    "bert-large": Case(kind="BertForMaskedLM", sizes=BERT_LARGE, tokens=512, micro_batch=16),
    "bert-large-128": Case(kind="BertForMaskedLM", sizes=BERT_LARGE, tokens=128, micro_batch=64),
    "llama-1b": Case(kind="LlamaForCausalLM", sizes=LLAMA_1B, tokens=4096, micro_batch=2),
    "llama-1b-8k": Case(kind="LlamaForCausalLM", sizes=LLAMA_1B, tokens=8192, micro_batch=2, recompute="full"),
    "qwen2-0.5b": Case(kind="Qwen2ForCausalLM", sizes=QWEN_HALF_B, tokens=2048, micro_batch=4),
    "mixtral": Case(kind="MixtralForCausalLM", sizes=MIXTRAL, tokens=2048, micro_batch=4),
    "t5-large": Case(kind="T5ForConditionalGeneration", sizes=T5_LARGE, tokens=512, micro_batch=8),
    "whisper-medium": Case(kind="WhisperForConditionalGeneration", sizes=WHISPER_MEDIUM, micro_batch=8),
    "vit-large": Case(kind="ViTForImageClassification", sizes=VIT_LARGE, micro_batch=64),
    "resnet-50": Case(kind="ResNetForImageClassification", sizes={"num_labels": 1000}, micro_batch=128),
    "resnet-50-fp32": Case(
        kind="ResNetForImageClassification", sizes={"num_labels": 1000}, micro_batch=64, precision="fp32"
    ),
    "convnext-base": Case(kind="ConvNextForImageClassification", sizes=CONVNEXT_BASE, micro_batch=64),
    "swin-base": Case(kind="SwinForImageClassification", sizes=SWIN_BASE, micro_batch=64),
}
WAYS = ("plain", "modules", "graph")
TRAINERS = {"plain": "ddp", "modules": "automap-modules", "graph": "automap"}
LARGE = 5e8
"""A model with more parameters is trained by a plain loop only, since the runtime makes its values on the CPU."""
WARM_UP_STEPS, STEPS, STEPS_S = 3, 12, 2.5
"""Steps before the measured ones; most measured steps; and the seconds after which no further one begins."""
LOW = {"bf16": "bfloat16", "fp16": "float16"}


# -- Preparing


def configuration(case: Case, folder: Path) -> None:
    """Writes the configuration of a case."""
    import transformers

    config = getattr(transformers, case.kind).config_class(**case.sizes)
    config.architectures = [case.kind]
    config.save_pretrained(folder)


def spec(case: Case, folder: Path) -> str:
    """The model of a case on the command line."""
    return f"hf:{folder}" + (f":seq_len={case.tokens}" if case.tokens else "")


def priced(case: Case, folder: Path, trainer: str, cluster: str) -> Plan:
    """The plan of a case on one device, with its price."""
    graph = with_loss(load_model((folder / "model.onnx").read_bytes(), name=folder.name))
    training = {"global_batch": case.micro_batch * case.count, "precision": case.precision, "trainer": trainer}
    evaluator = Evaluator(Problem.build(graph, parse_cluster(cluster), training))
    strategy = Strategy(micro_batch=case.micro_batch, recompute=case.recompute)
    plan = to_plan(hand_made(evaluator, strategy), evaluator)
    return replace(plan, estimate=price(evaluator.problem, plan, evaluator))


def automap(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command of AutoMAP."""
    return subprocess.run(
        [sys.executable, "-m", "service.command", *words], capture_output=True, text=True, check=False
    )


def prepare(cases: Mapping[str, Case], root: Path, cluster: str) -> None:
    """Exports the models, and makes their plans for the trainer of AutoMAP."""
    for name, case in cases.items():
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        configuration(case, folder)
        done = automap(["export-onnx", spec(case, folder), "-o", str(folder / "model.onnx")])
        if done.returncode:
            print(f"{name}: {done.stderr.strip()}", flush=True)
        else:
            plan = priced(case, folder, "automap", cluster)
            (folder / "plan.json").write_text(json.dumps(plan.to_json()))
            print(name, flush=True)


# -- Measuring


def timed(step: Callable[[], object], device: Any) -> dict[str, Any]:
    """Median and range of some steps in seconds, and the peak memory in bytes."""
    import torch

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(WARM_UP_STEPS):
        step()
    synchronize()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times, launched, end = [], [], time.perf_counter() + STEPS_S
    while len(times) < STEPS and (len(times) < 3 or time.perf_counter() < end):
        start = time.perf_counter()
        step()
        launched.append(time.perf_counter() - start)
        synchronize()
        times.append(time.perf_counter() - start)
    found = {"step_s": statistics.median(times), "least_s": min(times), "most_s": max(times), "steps": len(times)}
    found["launched_s"] = statistics.median(launched)
    if device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
    return found


def data_of(case: Case, inputs: Mapping[str, Any], scores: Any, device: Any) -> tuple[dict[str, Any], Any]:
    """Random inputs of a global batch by name, and labels."""
    import torch

    samples, drawn = case.micro_batch * case.count, {}
    for name, x in inputs.items():
        shape = (samples, *x.shape[1:])
        is_float = x.is_floating_point()
        drawn[name] = torch.randn(shape, device=device) if is_float else torch.randint(100, shape, device=device)
        if not is_float and "mask" in name:
            drawn[name] = torch.ones(shape, dtype=torch.int64, device=device)
    labels = torch.randint(scores.shape[-1], (samples, *scores.shape[1:-1]), device=device)
    return drawn, labels


def built(case: Case, folder: Path, device: Any) -> tuple[Any, dict[str, Any], Any, Any]:
    """Module on the device, random inputs of a global batch, labels and a function of (outputs, labels)."""
    import torch
    import torch.nn.functional as F  # noqa: N812

    from automap.runtime.transformers_models import from_config

    with device:
        module, inputs = from_config(spec(case, folder).removeprefix("hf:"))()
    module.train()
    if hasattr(module.config, "use_cache"):
        module.config.use_cache = False
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        scores = module(**{name: x.to(device) for name, x in inputs.items()}).logits
    drawn, labels = data_of(case, inputs, scores, device)

    def loss(scores: Any, labels: Any) -> Any:
        return F.cross_entropy(scores.flatten(0, -2).float(), labels.flatten())

    return module, drawn, labels, loss


def plain(case: Case, folder: Path, device: Any) -> dict[str, Any]:
    """A loop of PyTorch."""
    return timed(plain_step(case, folder, device), device)


def plain_step(case: Case, folder: Path, device: Any) -> Callable[[], None]:
    """A step of a loop of PyTorch."""
    import torch

    module, drawn, labels, loss = built(case, folder, device)
    if case.recompute == "full":
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = case.precision == "tf32"
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
    low = getattr(torch, LOW.get(case.precision, "bfloat16"))
    cast = torch.autocast(device.type, low, enabled=case.precision in LOW)
    return training_step(module, parts_of(case, drawn, labels), loss, optimizer, cast)


def parts_of(case: Case, drawn: Mapping[str, Any], labels: Any) -> list[tuple[dict[str, Any], Any]]:
    """Inputs and labels of each micro-batch."""
    size = case.micro_batch
    return [({n: x[i : i + size] for n, x in drawn.items()}, labels[i : i + size]) for i in range(0, len(labels), size)]


def training_step(
    model: Any, parts: Sequence[tuple[Mapping[str, Any], Any]], loss: Any, optimizer: Any, cast: Any
) -> Callable[[], None]:
    """A step over some micro-batches, whose forward passes run under the context `cast`."""

    def step() -> None:
        for inputs, wanted in parts:
            with cast:
                scores = model(**inputs).logits
                mean = loss(scores, wanted) / len(parts)
            del scores
            mean.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_modules(case: Case, folder: Path, device: Any) -> dict[str, Any]:
    """The module trainer."""
    import torch

    from automap.runtime.trainer import parallelize

    module, drawn, labels, _ = built(case, folder, device)
    plan = Plan.from_json(json.loads((folder / "plan.json").read_text()))
    trainer = parallelize(module, plan, folder / "model.onnx")
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-5)
    rows = trainer.rows.to(device)
    data = [*(x[rows] for x in drawn.values()), labels[rows]]

    def step() -> None:
        trainer.step(*data)
        optimizer.step()
        optimizer.zero_grad()

    return {**timed(step, device), "why": trainer.why}


def by_graph(case: Case, folder: Path, device: Any) -> dict[str, Any]:
    """The runtime of trials."""
    from automap.runtime.executor.runner import Runner
    from automap.runtime.trainer.training_graph import training_graph

    plan = Plan.from_json(json.loads((folder / "plan.json").read_text()))
    graph = training_graph(folder / "model.onnx", plan)
    runner = Runner(Problem.build(graph, parse_cluster("1xH100"), plan.training), plan, 0, 0, device)
    return timed(runner.step, device)


def measure(cases: Mapping[str, Case], ways: Sequence[str], root: Path) -> None:
    """Takes the steps of all cases, and writes them to `measured.json` after each."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    file = root / "measured.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"steps": {}}
    found["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    found["torch"] = torch.__version__
    store = dist.HashStore()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
    run = {"plain": plain, "modules": by_modules, "graph": by_graph}
    for way in ways:
        for name, case in cases.items():
            if way != "plain" and parameters(root / name) > LARGE:
                continue
            started = time.perf_counter()
            try:
                one = run[way](case, root / name, device)
            except Exception:
                one = {"failed": traceback.format_exc()}
            found["steps"][f"{name} {way}"] = one
            file.write_text(json.dumps(found, indent=1))
            text = one.get("failed", "").strip().splitlines()[-1:] or [f"{1e3 * one['step_s']:8.1f} ms"]
            print(f"{name:20} {way:8} {text[0][:300]}   ({time.perf_counter() - started:.0f} s)", flush=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    dist.destroy_process_group()


def parameters(folder: Path) -> float:
    """Parameters of a prepared model; infinite where it was not exported."""
    with contextlib.suppress(OSError):
        return float(json.loads((folder / "plan.json").read_text())["model"]["num_parameters"])
    return float("inf")


# -- Reporting


def report(cases: Mapping[str, Case], root: Path, cluster: str) -> None:
    """Prints measured and priced steps."""
    measured = json.loads((root / "measured.json").read_text())
    print(f"{measured['device']}, torch {measured['torch']}, priced on {cluster}")
    print(f"{'model':20} {'way':8} {'step':>9} {'priced':>9} {'error':>7}   {'peak':>6} {'priced':>6} {'error':>6}")
    errors: dict[str, list[tuple[float, float]]] = {}
    for key, one in measured["steps"].items():
        name, way = key.split(" ")
        if name not in cases:
            continue
        if "failed" in one:
            print(f"{name:20} {way:8} {one['failed'].strip().splitlines()[-1][:80]}")
            continue
        estimate = priced(cases[name], root / name, TRAINERS[way], cluster).estimate
        assert estimate is not None
        step = estimate.step_time_s / one["step_s"] - 1.0
        gib, own = one.get("peak_bytes", 0) / 2**30, counted(*estimate.memory_bytes, trainer=TRAINERS[way])
        memory = own / gib - 1.0 if gib else 0.0
        errors.setdefault(way, []).append((step, memory))
        print(
            f"{name:20} {way:8} {1e3 * one['step_s']:6.1f} ms {1e3 * estimate.step_time_s:6.1f} ms {step:+7.1%}"
            f"   {gib:6.2f} {own:6.2f} {memory:+6.1%}",
            flush=True,
        )
    for way, pairs in errors.items():
        times, memories = ([abs(pair[i]) for pair in pairs] for i in (0, 1))
        print(
            f"{way}: {len(pairs)} models, step off by {statistics.fmean(times):.1%} in the mean,"
            f" {statistics.median(times):.1%} in the median; memory by {statistics.fmean(memories):.1%}"
        )


def counted(rank: DeviceMemory, trainer: str) -> float:
    """The memory of a rank in GiB that `torch.cuda` counts as allocated: without libraries and what nothing uses."""
    about = trainers()[trainer]
    return (rank.total / 2**30 - about.reserved_GiB) / (1.0 + about.unused_share)


def main() -> None:
    """Does what the first word says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prepare", "measure", "report", "all"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=[name for name in CASES if name != "tiny"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--cluster", default="1xH100")
    given = parser.parse_args()
    cases = {name: CASES[name] for name in given.only}
    if given.what in ("prepare", "all"):
        prepare(cases, given.folder, given.cluster)
    if given.what in ("measure", "all"):
        measure(cases, given.ways, given.folder)
    if given.what in ("report", "all"):
        report(cases, given.folder, given.cluster)


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    main()
