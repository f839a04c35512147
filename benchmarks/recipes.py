"""Vendors' recipes beside the plans that are found for each trainer, and what makes the difference.

    python benchmarks/recipes.py [--budget 1000] [--only WORD …] [--targets NAME …] [--write]

A recipe is the configuration that a vendor publishes for a model: degrees, micro-batch, recomputation. It is priced as
`--baseline` does. The searches for its own trainer, and for any trainer, begin with it, and must end with a plan that
is at least as fast. Plans for other trainers are priced for these trainers. With --write the tables replace those of
docs/recipes.md. No time is measured here or taken from anywhere: all are predictions.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents import Budget, search_offer
from automap.amounts import in_seconds
from automap.cluster import parse_cluster
from automap.comparisons import Change
from automap.errors import NothingFits, ProblemError
from automap.export.baseline import read_baseline
from automap.price.evaluator import Evaluator
from automap.problem import Problem
from automap.space.changes import shortage
from automap.targets import ANY, targets
from ir import zoo
from service.report import GIB, fullest
from service.strategy import strategy

PAGE = Path(__file__).resolve().parents[1] / "docs" / "recipes.md"
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->"
LARGE = 0.02
"""Share of a recipe's step from which on a change is listed by itself."""
EXPLAINED = 1.1
"""Times as fast as its recipe that a plan must be for its changes to be listed."""
TRAINERS = tuple(name for name in targets() if name != "onnx")
"""Targets that train."""
NEMO = "NVIDIA NeMo, nemo/collections/llm/recipes"
ADAM = "--use-distributed-optimizer"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a vendor publishes."""

    title: str
    model: str
    cluster: str
    target: str
    """Whose configuration it is."""
    file: str
    """Name of the configuration."""
    text: str
    """What of it decides the plan."""
    training: dict[str, Any]
    source: str


def _toml(*, tp: int, local: int, mode: str, total: int) -> str:
    return (
        f"parallelism.tensor_parallel_degree = {tp}\nactivation_checkpoint.mode = '{mode}'\n"
        f"training.local_batch_size = {local}\ntraining.global_batch_size = {total}\ntraining.seq_len = 8192"
    )


def _nemo(degrees: str, *, batch: int, micro: int, length: int, precision: str = "bf16") -> str:
    kind = "--bf16 --fp8-format hybrid" if precision == "fp8" else f"--{precision}"
    return f"{degrees} --micro-batch-size {micro} --global-batch-size {batch} --seq-length {length} {kind} {ADAM}"


LLAMA_405B = "llama:layers=126,hidden=16384,heads=128,kv_heads=8,ffn=53248,seq_len=8192,vocab_size=128256"
# Megatron-LM pads the vocabulary of 50,257 to a multiple of 128 * tp.
GPT3 = "gpt:layers=96,hidden=12288,heads=96,seq_len=2048,vocab_size=51200"
TITAN = "pytorch/torchtitan, torchtitan/models/llama3/train_configs"
GPT3_ARGS = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16"
RECIPES = (
    Recipe(
        title="ResNet-50 on 8 V100",
        model="resnet50:image_size=176", cluster="8xV100-16GB", target="accelerate", file="ddp.json",
        text=json.dumps({"train_batch_size": 1024, "train_micro_batch_size_per_gpu": 128}),
        training={"global_batch": 1024, "precision": "fp32", "optimizer": "momentum", "trainer": "ddp"},
        source="pytorch.org, How to train state-of-the-art models using TorchVision's latest primitives",
    ),
    Recipe(
        title="BERT-large on 8 A100",
        model="bert-large:seq_len=512", cluster="8xA100-80GB", target="megatron-core", file="bert_340m.sh",
        text=_nemo("", batch=32, micro=2, length=512), training={"global_batch": 32, "precision": "bf16"},
        source=f"{NEMO}/bert_340m.py",
    ),
    Recipe(
        title="Llama-3 8B on 8 H100",
        model="llama3-8b", cluster="8xH100", target="megatron-core", file="llama3_8b.sh",
        text=_nemo("--context-parallel-size 2", batch=512, micro=1, length=8192),
        training={"global_batch": 512, "precision": "bf16"}, source=f"{NEMO}/llama3_8b.py",
    ),
    Recipe(
        title="Llama-3 70B on 32 H100",
        model="llama3-70b", cluster="4x8xH100", target="megatron-core", file="llama3_70b.sh",
        text=_nemo(
            "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --context-parallel-size 2 "
            "--num-virtual-stages-per-pipeline-rank 5 --sequence-parallel", batch=512, micro=1, length=8192,
        ),
        training={"global_batch": 512, "precision": "bf16"}, source=f"{NEMO}/llama3_70b.py",
    ),
    Recipe(
        title="ViT-H/14 on 32 A100",
        model="vit-h", cluster="4x8xA100-80GB", target="megatron-core", file="H_14.sh",
        text=f"--micro-batch-size 128 --global-batch-size 4096 --bf16 {ADAM}",
        training={"global_batch": 4096, "precision": "bf16"},
        source="docs.nvidia.com, NeMo Framework 24.12, Vision Transformer Training",
    ),
    Recipe(
        title="Mixtral 8x7B on 64 H100",
        model="mixtral-8x7b:seq_len=8192", cluster="8x8xH100", target="megatron-core", file="mixtral_8x7b.sh",
        text=_nemo(
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 8 "
            "--expert-model-parallel-size 8", batch=512, micro=1, length=8192,
        ),
        training={"global_batch": 512, "precision": "bf16"}, source=f"{NEMO}/mixtral_8x7b.py",
    ),
    Recipe(
        title="Llama-3 8B on 64 A100",
        model="llama3-8b", cluster="8x8xA100-80GB", target="torchtitan", file="llama3_8b.toml",
        text=_toml(tp=1, local=1, mode="selective", total=64), training={"global_batch": 64, "precision": "bf16"},
        source=f"{TITAN}/llama3_8b.toml",
    ),
    Recipe(
        title="Llama-3 70B on 64 A100",
        model="llama3-70b", cluster="8x8xA100-80GB", target="torchtitan", file="llama3_70b.toml",
        text=_toml(tp=8, local=8, mode="full", total=64), training={"global_batch": 64, "precision": "bf16"},
        source=f"{TITAN}/llama3_70b.toml",
    ),
    Recipe(
        title="Llama-3 405B on 128 H100",
        model=LLAMA_405B, cluster="16x8xH100", target="torchtitan", file="llama3_405b.toml",
        text=_toml(tp=8, local=2, mode="full", total=32),
        training={"global_batch": 32, "precision": "bf16", "async_tensor_parallel": True},
        source=f"{TITAN}/llama3_405b.toml, in bf16 in place of its fp8",
    ),
    Recipe(
        title="T5-11B on 160 A100",
        model="t5:layers=24,hidden=1024,heads=128,head_size=128,ffn=65536,seq_len=512,target_len=128",
        cluster="20x8xA100-80GB", target="megatron-core", file="t5_11b.sh",
        text=_nemo("--tensor-model-parallel-size 4", batch=1920, micro=24, length=512),
        training={"global_batch": 1920, "precision": "bf16"}, source=f"{NEMO}/t5_11b.py",
    ),
    Recipe(
        title="GPT-3 175B on 512 H100",
        model=GPT3, cluster="64x8xH100", target="megatron-core", file="gpt3_175b.sh",
        text=_nemo(
            "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 8 --sequence-parallel "
            "--num-virtual-stages-per-pipeline-rank 6", batch=2048, micro=2, length=2048, precision="fp8",
        ),
        training={"global_batch": 2048, "precision": "fp8"}, source=f"{NEMO}/gpt3_175b.py",
    ),
    Recipe(
        title="Llama-3.1 405B on 576 H100",
        model=LLAMA_405B, cluster="72x8xH100", target="megatron-core", file="llama31_405b.sh",
        text=_nemo(
            "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 9 --context-parallel-size 4 "
            "--num-virtual-stages-per-pipeline-rank 2 --sequence-parallel", batch=504, micro=1, length=8192,
        ),
        training={"global_batch": 504, "precision": "bf16"},
        source=f"{NEMO}/llama31_405b.py, with 504 samples a step in place of 512, a multiple of its 9 stages",
    ),
    Recipe(
        title="GPT-3 175B on 1,024 A100",
        model=GPT3, cluster="128x8xA100-80GB", target="megatron-core", file="train_gpt3_175b_distributed.sh",
        text=f"{GPT3_ARGS} --micro-batch-size 1 --global-batch-size 1536 --seq-length 2048 --fp16",
        training={"global_batch": 1536, "precision": "fp16"},
        source="NVIDIA/Megatron-LM, train_gpt3_175b_distributed.sh of its examples",
    ),
)  # fmt: skip


def problem_of(recipe: Recipe, target: str) -> Problem:
    """The problem of a search for a target; with the recipe and its trainer where that is the target, or any.

    Raises:
        ProblemError: the target cannot train in this way.
    """
    training, hints = {**recipe.training, "target": target}, {}
    if target in (recipe.target, ANY):
        training.setdefault("trainer", targets()[recipe.target].trainer)
        hints = {"baseline": {"file": recipe.file, "text": recipe.text}}
    else:
        training.pop("trainer", None)
    return Problem.build(zoo.build(recipe.model), parse_cluster(recipe.cluster), training, hints)


def tables(recipe: Recipe, budget: Budget, names: Sequence[str]) -> Iterator[str]:
    """The section of a recipe.

    Args:
        recipe: the recipe.
        budget: budget of each search.
        names: targets.

    Raises:
        SystemExit: a plan for the recipe's own trainer, or for any, is slower than the recipe.
    """
    own = read_baseline(Evaluator(problem_of(recipe, ANY)))
    assert own is not None and own.plan.estimate is not None
    own_s, fits, lacks = own.plan.estimate.step_time_s, own.plan.estimate.fits, shortage(own.plan.estimate)
    room = f"; it does not fit: {lacks}" if lacks else ""
    if lacks is None and not fits:
        room = f"; it fits with {own.plan.estimate.fit_probability or 0.0:.0%} probability, and 95% are asked of plans"
    price = f"{in_seconds(own_s)} a step of {recipe.training['global_batch']} samples"
    yield f"## {recipe.title}\n"
    yield f"{recipe.source}: {price}{room}.\n"
    yield (
        "```\n"
        + "\n".join(textwrap.fill(line, 116, break_on_hyphens=False) for line in recipe.text.splitlines())
        + "\n```\n"
    )
    yield "| target | plan | step | against the recipe | memory |\n|---|---|---|---|---|"
    reasons, refusals = [], []
    for name in sorted(names, key=lambda name: (name == ANY, name != recipe.target)):
        try:
            plan = search_offer(problem_of(recipe, name), budget, tie=0.0).plan
        except (ProblemError, NothingFits) as fault:
            why = "nothing fits" if isinstance(fault, NothingFits) else fault.texts["message"]
            refusals.append(f"{name} ({why})")
            continue
        assert plan.estimate is not None and plan.search is not None
        step_s, yours, memory = plan.estimate.step_time_s, plan.search.yours, fullest(plan)
        if yours is not None and fits and step_s > own_s * (1.0 + 1e-9):
            raise SystemExit(f"{recipe.title}, {name}: {step_s} s, the recipe takes {own_s} s")
        share = f"{memory.total / GIB:.0f} of {memory.capacity / GIB:.0f} GiB"
        yield f"| `{name}` | {strategy(plan)} | {in_seconds(step_s)} | {own_s / step_s:.2f}x | {share} |"
        if yours is not None and own_s > EXPLAINED * step_s:
            reasons.append(f"`{name}`: {'; '.join(worth(yours.changes, own_s))}.\n")
    yield ""
    yield from reasons
    if refusals:
        yield f"Without a plan: {'; '.join(refusals)}.\n"


def worth(changes: tuple[Change, ...], own_s: float) -> Iterator[str]:
    """What changes save, in words; small ones together."""
    small_s = 0.0
    for change in changes:
        if abs(change.saved_s) < LARGE * own_s:
            small_s += change.saved_s
            continue
        parts = sorted(change.parts_s.items(), key=lambda part: -abs(part[1]))
        shown = [f"{name} {_signed(-s)}" for name, s in parts if abs(s) >= 0.1 * abs(change.saved_s)]
        fits = "" if change.fits else ", does not fit yet"
        yield f"{change.about} {_signed(-change.saved_s)} ({', '.join(shown)}{fits})"
    if abs(small_s) >= 0.001 * own_s:
        yield f"all others {_signed(-small_s)}"


def _signed(value: float) -> str:
    return f"{'−' if value < 0.0 else '+'}{in_seconds(abs(value))}"


def main() -> None:
    """Prints the tables, and writes them into the page if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", default="1000", help="budget of each search")
    parser.add_argument("--only", nargs="*", default=[], help="only recipes with one of these words in their title")
    parser.add_argument("--targets", nargs="*", default=[*TRAINERS, ANY], help="targets of the plans")
    parser.add_argument("--write", action="store_true", help="replace the tables of docs/recipes.md")
    given = parser.parse_args()
    budget, text = Budget.parse(given.budget), ""
    for recipe in RECIPES:
        if given.only and not any(word in recipe.title for word in given.only):
            continue
        section = "\n".join(tables(recipe, budget, given.targets)) + "\n"
        print(section, flush=True)
        text += section
    if given.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
