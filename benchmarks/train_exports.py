"""Small GPTs trained by the trainers themselves, from the exported files of searched plans, on processes of this host.

    python benchmarks/train_exports.py [--targets NAME …] [--models NAME …] [--packages FOLDER …] [--evaluations N]

For each target some plans are searched: one without any condition, and others with one degree or ZeRO stage given. Each
is exported, and its trainer takes two steps on as many processes as the plan has devices. The losses of the steps, and
the loss after the second step, are compared with those of one process, which clips gradients as the file says.
DeepSpeed splits the weights of a small Llama of transformers, since it knows by the classes of a model how to do so;
torchtitan trains a small Llama of its own. `lightning` is Lightning's Trainer with the files for plain PyTorch. With
`--models`, small models of transformers are trained in place of the GPT, with weights split and in pipelines. Their
gradients are large enough to be clipped. `--packages` names folders with accelerate, deepspeed and torchtitan, as in
`prove_exports.py`; a trainer that cannot be imported is named and left out. All run on CPUs with gloo. DeepSpeed
compiles an extension first, for which torch takes a lock in the user's cache; where a run was killed, the lock stays,
and all later ones wait for it. So each run of this script has a cache of its own.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning_on_cpus
import torch
import torch.nn.functional as F  # noqa: N812
import torchtitan_on_cpus
from torch import Tensor, nn

from agents import Budget, search
from automap.cluster import parse_cluster
from automap.export.export import export, save
from automap.problem import Problem
from automap.runtime.torch_export import export_onnx
from automap.targets import targets
from ir import zoo
from ir.graph import Graph
from ir.onnx.load import load_model

SIZES = {"layers": 4, "hidden": 32, "heads": 4, "seq_len": 16, "vocab_size": 64}
MODEL = "gpt:" + ",".join(f"{name}={size}" for name, size in SIZES.items())
LLAMA = MODEL.replace("gpt:", "llama:") + ",kv_heads=4,ffn=64"
"""The model whose weights DeepSpeed splits, and the one of torchtitan."""
BATCH, STEPS = 8, 2
TOLERANCE = 1e-5
"""Largest relative difference of losses: sums in another order, in fp32."""
LIMIT_S = 600
"""Longest wait for the training of a plan (assumed): DeepSpeed compiles for minutes on a busy host."""
WISHES: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "pytorch": ({}, {"tp": 2}, {"pp": 2}, {"pp": 2, "virtual_stages": 2, "num_micro_batches": 4}, {"dp": 2, "zero": 3}),
    "deepspeed": (
        {},
        *({"dp": 2, "zero": stage, "num_micro_batches": 2} for stage in range(4)),
        {"pp": 2},
        {"pp": 2, "num_micro_batches": 4, "recompute": "full"},
        {"tp": 2},
    ),
    "accelerate": ({}, *({"dp": 2, "zero": stage, "num_micro_batches": 2} for stage in (0, 2, 3))),
    "torchtitan": (
        *({"dp": 2, "zero": stage, "num_micro_batches": 2} for stage in (0, 2, 3)),
        {"tp": 2},
        {"tp": 2, "recompute": "full", "num_micro_batches": 2},
        {"pp": 2, "virtual_stages": 1, "num_micro_batches": 4},
        {"pp": 2, "virtual_stages": 2, "num_micro_batches": 4},
    ),
}
"""Target -> hints.fix of its plans."""
TEXT = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64,
        "max_position_embeddings": 16}  # fmt: skip
MODELS: Mapping[str, tuple[str, Mapping[str, int], tuple[str, ...]]] = {
    "GPT2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 64, "n_positions": 16}, ()),
    "Llama": ("LlamaForCausalLM", {**TEXT, "num_key_value_heads": 2}, ("pytorch", "deepspeed", "lightning")),
    "Bert": ("BertForMaskedLM", TEXT, ("pytorch", "deepspeed", "lightning")),
    "Mixtral": ("MixtralForCausalLM", {**TEXT, "num_key_value_heads": 2, "num_local_experts": 4}, ()),
}
"""Prefix of a class of transformers -> the model, what its configuration says, and which trainers split its weights
without a change of its code."""


def example() -> ModuleType:
    """The example that has the network of the plans."""
    path = Path(__file__).resolve().parents[1] / "examples" / "train_gpt.py"
    spec = importlib.util.spec_from_file_location("train_gpt", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings_of(folder: Path) -> dict[str, Any]:
    """DeepSpeed's settings, where the files are for it."""
    file = folder / "deepspeed.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def build(folder: Path = Path()) -> nn.Module:
    """The network of the plans, alike on every process."""
    torch.manual_seed(0)
    if (folder / "model").exists():
        return of_transformers((folder / "model").read_text())
    if (folder / "torchtitan_plan.py").exists():
        return torchtitan_on_cpus.whole(titan_recipe())
    if "tensor_parallel" in settings_of(folder):
        return llama()
    found: nn.Module = example().Gpt(**SIZES)
    return found


def llama() -> nn.Module:
    """The network of `LLAMA`; its forward gives the scores alone, and its parameters have the paths of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, hidden, heads, seq_len, words = SIZES.values()
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": words}
    found = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=64, max_position_embeddings=seq_len))
    forward = found.forward
    found.forward = lambda ids: forward(input_ids=ids).logits
    return found


def of_transformers(name: str) -> nn.Module:
    """A model of `MODELS` without dropout."""
    import transformers

    kind, sizes, _ = MODELS[name]
    found: nn.Module = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**sizes, use_cache=False))
    if name == "Mixtral":
        found.set_experts_implementation("batched_mm")
    for module in found.modules():
        module.p = 0.0 if isinstance(module, nn.Dropout) else getattr(module, "p", None)
    return found.eval()


def graph_of(model: str) -> Graph:
    """The graph of a model of the zoo or of `MODELS`."""
    if model not in MODELS:
        return zoo.build(model)
    ids = torch.zeros(2, SIZES["seq_len"], dtype=torch.int64)
    return load_model(export_onnx(lambda: (of_transformers(model), {"input_ids": ids})), name=model)


def batch() -> tuple[Tensor, Tensor]:
    """Inputs and labels of the global batch."""
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH, SIZES["seq_len"])
    ids, labels = (torch.randint(SIZES["vocab_size"], shape, generator=generator) for _ in range(2))
    return ids, labels


def loss_of(outputs: Any, labels: Tensor) -> Tensor:
    """The mean cross-entropy."""
    scores = getattr(outputs, "logits", outputs)
    return F.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())


OPTIMIZER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 1e-2}
"""The arguments of AdamW, which all trainers take."""


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all trainers."""
    return torch.optim.AdamW(parameters, **OPTIMIZER)


def titan_recipe() -> Any:
    """torchtitan's recipe of `LLAMA`."""
    return torchtitan_on_cpus.recipe({**SIZES, "ffn": 64}, batch(), OPTIMIZER)


Step = Callable[[bool], Tensor | float]
"""Computes the loss of the global batch, and updates the weights if asked."""


def by_one_process(folder: Path) -> list[float]:
    """[steps + 1] losses without any trainer."""
    model, (ids, labels) = build(folder), batch()
    default = titan_recipe().training.max_norm if (folder / "torchtitan_plan.py").exists() else math.inf
    optimizer, max_norm = optimizer_of(model.parameters()), settings_of(folder).get("gradient_clipping", default)
    found = []
    for _ in range(STEPS + 1):
        loss = loss_of(model(ids), labels)
        found.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return found


def by_pytorch(folder: Path) -> list[float]:
    """[steps + 1] losses by the loader of the export."""
    sys.path.insert(0, str(folder))
    from plan_loader import Training

    training = Training(build(folder), loss_of, folder)
    optimizer = optimizer_of(training.parameters())
    mine = [some.chunk(training.replicas)[training.replica] for some in batch()]
    found = []
    for _ in range(STEPS + 1):
        found.append(training.step(*mine))
        optimizer.step()
        optimizer.zero_grad()
    return found


def by_lightning(folder: Path) -> list[float]:
    """[steps + 1] losses by Lightning's Trainer."""
    return lightning_on_cpus.train(folder, build(folder), batch(), loss_of, optimizer_of, STEPS + 1)


def by_deepspeed(folder: Path) -> list[float]:
    """[steps + 1] losses by DeepSpeed's engine."""
    import deepspeed
    import torch.distributed as dist

    deepspeed.init_distributed("gloo")
    model = build(folder)
    config = str(folder / "deepspeed.json")
    if (folder / "deepspeed_pipeline.py").exists():
        return by_deepspeed_pipeline(folder)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model.parameters()), config=config)
    # Ranks that split weights have the same samples.
    slices = settings_of(folder).get("tensor_parallel", {"autotp_size": 1})["autotp_size"]
    mine = [some.chunk(dist.get_world_size() // slices)[dist.get_rank() // slices] for some in batch()]
    found = []
    for _ in range(STEPS + 1):
        losses = []
        for ids, labels in zip(*(some.split(engine.train_micro_batch_size_per_gpu()) for some in mine), strict=True):
            loss = loss_of(engine(ids), labels)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        found.append(mean_of(losses))
    return found


def by_deepspeed_pipeline(folder: Path) -> list[float]:
    """[steps + 1] losses by DeepSpeed's engine of pipelines."""
    import deepspeed

    sys.path.insert(0, str(folder))
    from deepspeed_pipeline import pipeline

    module = pipeline(build(folder), loss_of, folder)
    config = str(folder / "deepspeed.json")
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer_of(module.parameters()), config=config)
    replicas, replica = engine.grid.get_data_parallel_world_size(), engine.grid.get_data_parallel_rank()
    mine = [some.chunk(replicas)[replica].split(engine.train_micro_batch_size_per_gpu()) for some in batch()]
    return [float(engine.train_batch(iter(zip(*mine, strict=True)))) for _ in range(STEPS + 1)]


def by_accelerate(folder: Path) -> list[float]:
    """[steps + 1] losses by accelerate, which the launcher told the configuration."""
    import torch.distributed as dist
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType

    state = PartialState(cpu=True)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        # accelerate has FSDP for other devices alone: it would take plain replicas.
        state.distributed_type = DistributedType.MULTI_GPU
    arguments = json.loads((folder / "training_arguments.json").read_text())
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=arguments["gradient_accumulation_steps"])
    model = build()
    # Models of transformers name their layers, and tie weights again after they were loaded.
    model._no_split_modules = ["Block"]
    model.tie_weights = lambda: setattr(model.lm_head, "weight", model.wte.weight)
    optimizer = optimizer_of(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    mine = [some.chunk(dist.get_world_size())[dist.get_rank()] for some in batch()]
    found = []
    for _ in range(STEPS + 1):
        losses = []
        for ids, labels in zip(*(some.split(arguments["per_device_train_batch_size"]) for some in mine), strict=True):
            with accelerator.accumulate(model):
                loss = loss_of(model(ids), labels)
                losses.append(loss.item())
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        found.append(mean_of(losses))
    return found


def by_torchtitan(folder: Path) -> list[float]:
    """[steps + 1] losses by torchtitan's trainer."""
    return torchtitan_on_cpus.train(folder, titan_recipe, STEPS + 1)


def mean_of(losses: list[float]) -> float:
    """The mean over the micro-batches of all processes."""
    import torch.distributed as dist

    total = torch.tensor(sum(losses) / len(losses), dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


TRAINERS: Mapping[str, Callable[[Path], list[float]]] = {
    "pytorch": by_pytorch,
    "lightning": by_lightning,
    "deepspeed": by_deepspeed,
    "accelerate": by_accelerate,
    "torchtitan": by_torchtitan,
}


def launch(target: str, folder: Path, processes: int, packages: list[str]) -> list[float] | str:
    """The losses of a target's training, or the last lines of its error."""
    runner = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    if target == "accelerate":
        runner = ["accelerate.commands.launch", "--config_file", str(folder / "accelerate.yaml")]
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *packages, os.environ.get("PYTHONPATH", "")]
    settings = {"PYTHONPATH": os.pathsep.join(paths), "ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu",
                "TORCH_EXTENSIONS_DIR": str(folder.parent / "extensions")}  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", *runner, __file__, "--worker", target, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        # The workers too: each is a child of the launcher, which alone would be ended.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"it takes more than {LIMIT_S} s"
    if not (folder / "losses.json").exists():
        return (errors or out)[-2000:]
    found: list[float] = json.loads((folder / "losses.json").read_text())
    return found


def train(trainer: str, model: str, fix: Mapping[str, Any], given: argparse.Namespace, scratch: str) -> str | None:
    """Prints a line for a plan; returns what went wrong.

    Args:
        trainer: a key of `TRAINERS`.
        model: the model, of the zoo or of `MODELS`.
        fix: `hints.fix` of the search.
        given: the arguments of the script.
        scratch: a folder for the files of all plans.
    """
    target = "pytorch" if trainer == "lightning" else trainer
    training = {"global_batch": BATCH, "target": target, "precision": "fp32"}
    problem = Problem.build(graph_of(model), parse_cluster(f"{given.processes}xcpu"), training, {"fix": fix})
    plan = search(problem, Budget(evaluations=given.evaluations), seed=0).plan
    degrees = plan.degrees[0]
    words = {"dp": degrees.data, "tp": degrees.tensor, "pp": degrees.pipeline, "virtual": degrees.virtual_stages}
    text = " ".join([model] * (model in MODELS) + [f"{name} {size}" for name, size in words.items() if size > 1])
    text += f" ZeRO {degrees.zero}, {plan.num_micro_batches} micro-batches"
    text += ", recomputed" if any(stage.recompute for stage in plan.stages) else ""
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        save(export(plan, problem, target), folder)
        if model in MODELS:
            (folder / "model").write_text(model)
        found, wanted = launch(trainer, folder, given.processes, given.packages), by_one_process(folder)
    if isinstance(found, str):
        print(f"{trainer:11} {text:44} did not train: {found}", flush=True)
        return found
    worst = max(abs(a - b) / b for a, b in zip(found, wanted, strict=True))
    losses = " ".join(f"{loss:.5f}" for loss in found)
    print(f"{trainer:11} {text:44} losses {losses}, off by {worst:.0e}", flush=True)
    return None if worst < TOLERANCE else f"{trainer}: {text}"


def plans_of(trainer: str, models: list[str]) -> list[tuple[str, Mapping[str, Any]]]:
    """The model and hints.fix of each plan of a trainer."""
    if not models:
        fixed = WISHES["pytorch" if trainer == "lightning" else trainer]
        own = trainer == "torchtitan"
        return [(LLAMA if own or (trainer == "deepspeed" and "tp" in fix) else MODEL, fix) for fix in fixed]
    split = [(name, {"tp": 2}) for name in models if trainer in MODELS[name][2]]
    return [*((name, {"dp": 2, "zero": 1}) for name in models), *split, *((name, {"pp": 2}) for name in models)]


def main() -> int:
    """Prints a line for each plan; the exit code tells whether all losses agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=list(TRAINERS), choices=list(TRAINERS))
    parser.add_argument("--models", nargs="+", default=[], choices=list(MODELS), help="models of transformers")
    parser.add_argument("--packages", nargs="+", default=[], help="folders with the trainers")
    parser.add_argument("--evaluations", type=int, default=400, help="plans that each search prices")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--plans", type=int, default=None, help="plans of each target, all by default")
    parser.add_argument("--worker", nargs=2, metavar=("TARGET", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        target, folder = given.worker[0], Path(given.worker[1])
        torch.set_num_threads(1)
        losses = TRAINERS[target](folder)
        # torchtitan knows the loss of a pipeline on the processes of its last stage alone.
        if int(os.environ["RANK"]) == (int(os.environ["WORLD_SIZE"]) - 1 if target == "torchtitan" else 0):
            (folder / "losses.json").write_text(json.dumps(losses))
        torch.distributed.destroy_process_group()
        return 0
    wanted = " ".join(f"{loss:.5f}" for loss in by_one_process(Path()))
    print(f"{MODEL}, batch {BATCH}, {given.processes} processes; one process: losses {wanted}")
    sys.path += given.packages
    faults = []
    with tempfile.TemporaryDirectory() as scratch:
        for target in given.targets:
            if target != "pytorch" and importlib.util.find_spec(target) is None:
                print(f"{target:11} not trained: there is no package {target}")
                continue
            version = (
                f"Lightning {importlib.metadata.version(target)}"
                if target == "lightning"
                else targets()[target].version
            )
            print(f"{target:11} {version}")
            plans = plans_of(target, given.models)[: given.plans]
            found = [train(target, model, fix, given, scratch) for model, fix in plans]
            faults += [fault for fault in found if fault is not None]
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
