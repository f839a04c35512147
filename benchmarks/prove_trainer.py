"""Searched plans trained by the module trainer: which it accepts, and whether their losses are those of one process.

    python benchmarks/prove_trainer.py [PLANS] [--targets automap any] [--families NAME ...] [--seed 0] [--list]
                                       [--clusters 2 4] [--random]

Draws models of sixteen families, clusters of 2 and 4 devices of three kinds with their default precision, their speed
and memory scaled down, batches, seeds, budgets, and for half of the plans a degree that they must have. Searches a plan
of each, for the target `automap` and for none, and trains it for two steps on processes of this machine: in float64,
where its losses must equal those of one process but for rounding, and, where its precision is lower, in this precision,
where they must be near. With `--random`, plans are not searched, but drawn from the space of the target. Prints what
became of each plan that was not trained in this way, and why, and what the target would cost if modules cannot run a
plan.
Exit code 1: a plan for the target was refused, or a loss differs. Needs the extra `hf` of the project. The committed
figures are in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import copy
import datetime
import functools
import importlib.util
import json
import math
import multiprocessing
import multiprocessing.context
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from agents.searcher import Budget, search
from automap.cluster import Cluster, parse_cluster
from automap.errors import NothingFits, PlanError, ProblemError
from automap.plan import Plan
from automap.price.evaluator import Evaluator
from automap.price.plan_reader import lower_plan
from automap.problem import Problem
from automap.runtime.torch_export import export_onnx, quiet
from automap.runtime.trainer import IGNORED, parallelize
from automap.runtime.trainer.training_graph import training_graph
from automap.runtime.transformers_models import as_trained, from_config
from automap.space.target_limits import plan_space
from ir.graph import Graph
from ir.loss import with_loss
from ir.onnx.load import load_model
from service.strategy import strategy

HIDDEN, TOKENS, WORDS, CLASSES = 32, 16, 96, 12
LAYERS = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": HIDDEN, "vocab_size": WORDS}
TEXT = {**LAYERS, "intermediate_size": 2 * HIDDEN, "max_position_embeddings": TOKENS}
GROUPED = {**TEXT, "num_key_value_heads": 2}
GPT2 = {"n_layer": 4, "n_head": 4, "n_embd": HIDDEN, "vocab_size": WORDS, "n_positions": TOKENS}
GPT2 |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"d_model": HIDDEN, "d_ff": 2 * HIDDEN, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGES = {"image_size": 16, "num_channels": 3, "patch_size": 4, "num_labels": CLASSES}
CONFIGURATIONS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2, untied": ("GPT2LMHeadModel", {**GPT2, "tie_word_embeddings": False}),
    "llama": ("LlamaForCausalLM", GROUPED),
    "llama, tied": ("LlamaForCausalLM", {**GROUPED, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "bert": ("BertForMaskedLM", {**TEXT, **NO_DROPOUT}),
    "t5": ("T5ForConditionalGeneration", {**T5, "dropout_rate": 0.0}),
    "vit": ("ViTForImageClassification", {**LAYERS, **IMAGES, **NO_DROPOUT, "intermediate_size": 2 * HIDDEN}),
    "mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "opt": ("OPTForCausalLM", {**TEXT, **ENDS, "ffn_dim": 2 * HIDDEN, "word_embed_proj_dim": HIDDEN, "dropout": 0.0}),
    "gpt-neox": ("GPTNeoXForCausalLM", {**TEXT, **ENDS, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "gemma2": ("Gemma2ForCausalLM", {**GROUPED, **ENDS, "head_dim": HIDDEN // 4}),
    "roberta": ("RobertaForMaskedLM", {**TEXT, **NO_DROPOUT, "max_position_embeddings": TOKENS + 2}),
    "falcon": ("FalconForCausalLM", {**TEXT, **ENDS, "new_decoder_architecture": True, "num_kv_heads": 2}),
}
"""Family: (class of transformers, what its configuration says)."""
EXAMPLE, PERCEPTRON = "example", "mlp"
"""The network of examples/train_gpt.py, and a module of linear layers."""
FAMILIES = (*CONFIGURATIONS, EXAMPLE, PERCEPTRON)
DEVICES = ("cpu", "V100-16GB", "A100-80GB")
BATCHES, BUDGETS = (8, 16, 32), (16, 64, 256)
SPEEDS, MEMORIES = (1.0, 1e-2, 1e-4), (1.004, 16.0, 16.0)
"""Shares of a device's speed, and memories in GiB, of which trainers reserve one: small networks are large there."""
WISHES: tuple[dict[str, int], ...] = ({}, {}, {"tp": 2}, {"pp": 2})
"""hints.fix of plans: half of them have none; the best plans of small networks on few devices are replicas."""
NEAR = {"bf16": 3e-2, "fp16": 4e-3}
"""Largest relative difference of a loss in a lower precision from that of one process in float64 (assumed): some units
of the last place, 2^-8 and 2^-11."""
EXACT = 1e-9
RATE = 0.2
BY_MODULES, BY_GRAPH = "trained by modules", "trained by the graph"
LOOSE = 1e-6
"""The same where the graph runs: in the type of the run, also what code of transformers computes in float32."""
MODELS = tuple(
    f"transformers.models.{m}.modeling_{m}"
    for m in (
        "gpt2",
        "llama",
        "qwen2",
        "bert",
        "t5",
        "vit",
        "mixtral",
        "opt",
        "gpt_neox",
        "gemma2",
        "roberta",
        "falcon",
    )
)
"""Modules that are imported before processes are forked, since importing one takes longer than training a plan."""


def forked() -> multiprocessing.context.ForkServerContext:
    """Processes that begin with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([Path(__file__).stem, *MODELS])
    return context


# -- Models


@functools.cache
def example() -> Any:
    """The script of the example."""
    path = Path(__file__).parents[1] / "examples" / "train_gpt.py"
    spec = importlib.util.spec_from_file_location("train_gpt", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(family: str, folder: Path) -> tuple[nn.Module, dict[str, Tensor]]:
    """The network of a family, and inputs of one sample."""
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    if family == EXAMPLE:
        return example().Gpt(layers=4, hidden=HIDDEN, heads=4, seq_len=TOKENS, vocab_size=WORDS), {"ids": ids}
    if family == PERCEPTRON:
        layers = [part for _ in range(4) for part in (nn.Linear(HIDDEN, HIDDEN), nn.GELU())]
        return nn.Sequential(*layers, nn.Linear(HIDDEN, CLASSES)), {"input": torch.zeros(1, HIDDEN)}
    kind, changes = CONFIGURATIONS[family]
    import transformers

    configuration = getattr(transformers, kind).config_class(**changes)
    document = {**configuration.to_dict(), "architectures": [kind]}
    file = folder / f"{family.replace(', ', '-')}-{os.getpid()}.json"
    file.write_text(json.dumps(document))
    module, inputs = from_config(str(file) if family == "vit" else f"{file}:seq_len={TOKENS}")()
    as_trained(module)
    return module, inputs


def network(family: str, folder: Path) -> nn.Module:
    """The same with weights far from any symmetry, alike in every process."""
    torch.manual_seed(0)
    module, _ = build(family, folder)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def export(family: str, folder: Path) -> Path:
    """The ONNX file of a family."""
    path = folder / f"{family.replace(', ', '-')}.onnx"
    if not path.exists():
        export_onnx(lambda: build(family, folder), path, name=family)
    return path


# -- Plans


@dataclass(frozen=True, kw_only=True)
class Case:
    """A searched plan."""

    family: str
    cluster: str
    target: str
    plan: dict[str, Any]
    """Its document."""
    number: int
    """The number from which, with the seed, its problem is drawn."""

    @property
    def ranks(self) -> int:
        """Processes that it takes."""
        return int(self.cluster.partition("x")[0])

    def __str__(self) -> str:
        plan = Plan.from_json(self.plan)
        head = f"{self.family} on {self.cluster}, {plan.training.precision}, batch {plan.training.global_batch}"
        return f"{head}, {strategy(plan)}"


def shrunk(cluster: Cluster, speed: float, memory: float) -> Cluster:
    """A cluster for which small networks are large: devices and links of a share of their speed, and little memory."""
    devices = {
        name: replace(
            device,
            peak_TFLOPs={key: rate * speed for key, rate in device.peak_TFLOPs.items()},
            hbm_bandwidth_GBps=device.hbm_bandwidth_GBps * speed,
            memory_GiB=memory,
        )
        for name, device in cluster.devices.items()
    }
    links = {name: replace(link, bandwidth_GBps=link.bandwidth_GBps * speed) for name, link in cluster.links.items()}
    return replace(cluster, devices=devices, links=links)


def searched(target: str, given: argparse.Namespace, folder: Path) -> list[Case]:
    """Plans of drawn problems."""
    for family in given.families:
        export(family, folder)
    one = functools.partial(drawn, target, given, folder)
    found: list[Case] = []
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), forked()) as pool:
        next_number = 0
        while len(found) < given.plans:
            numbers = range(next_number, next_number + given.plans - len(found))
            found += filter(None, pool.map(one, numbers))
            next_number = numbers.stop
    return found


def drawn(target: str, given: argparse.Namespace, folder: Path, number: int) -> Case | None:
    """The plan of one drawn problem; None where no plan has the degrees that it must have."""
    rng, family = generator(given, number), given.families[number % len(given.families)]
    try:
        problem = drawn_problem(rng, target, given, folder, number)
        if given.random:
            space = plan_space(problem)
            plan = space.decode(space.random(rng))
        else:
            plan = search(problem, Budget(evaluations=int(rng.choice(BUDGETS))), seed=number + 1).plan
    except (NothingFits, ProblemError):
        return None
    cluster = f"{problem.cluster.num_devices}x{next(iter(problem.cluster.devices))}"
    return Case(family=family, cluster=cluster, target=target, plan=plan.to_json(), number=number)


def generator(given: argparse.Namespace, number: int) -> np.random.Generator:
    """What a problem and its search are drawn from."""
    return np.random.default_rng([given.seed, number])


def drawn_problem(
    rng: np.random.Generator,
    target: str,
    given: argparse.Namespace,
    folder: Path,
    number: int,
    *,
    is_fixed: bool = True,
) -> Problem:
    """One drawn problem, with the degree that its plan must have, or without.

    Raises:
        ProblemError: no plan of the target has the degree.
    """
    family = given.families[number % len(given.families)]
    cluster = f"{rng.choice(given.clusters)}x{rng.choice(DEVICES)}"
    training = {"global_batch": int(rng.choice(BATCHES)), "target": target}
    small = shrunk(parse_cluster(cluster), float(rng.choice(SPEEDS)), float(rng.choice(MEMORIES)))
    fix = WISHES[int(rng.integers(len(WISHES)))]
    graph = load_model(export(family, folder).read_bytes(), name=family)
    return Problem.build(with_loss(graph), small, training, {"fix": fix if is_fixed else {}})


# -- Training


def batch(graph: Graph, plan: Plan, seed: int) -> tuple[list[Tensor], Tensor]:
    """Inputs of a global batch and its labels, of which samples have unequal numbers."""
    generator = torch.Generator().manual_seed(seed)
    samples = plan.training.global_batch
    found = []
    for tensor in graph.data_inputs:
        shape = tensor.shape_at(samples)
        ids = torch.randint(WORDS, shape, generator=generator)
        found.append(torch.randn(shape, generator=generator) if tensor.is_float else ids)
    scores = graph.tensors[graph.operators[-1].inputs[0]]
    labels = torch.randint(CLASSES, graph.tensors[graph.operators[-1].inputs[1]].shape_at(samples), generator=generator)
    del scores
    flat = labels.view(samples, -1)
    for sample in range(samples):
        flat[sample, : sample % 4 if flat.shape[1] > 4 else 0] = IGNORED
    return found, labels


def losses_of(module: nn.Module, graph: Graph, plan: Plan) -> list[float]:
    """The losses of two steps in one process."""
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    names, losses = [t.name for t in graph.data_inputs], []
    for seed in (1, 2):
        inputs, labels = batch(graph, plan, seed)
        data = [x.double() if x.is_floating_point() else x for x in inputs]
        found: Any = (
            module(*data) if isinstance(module, nn.Sequential) else module(**dict(zip(names, data, strict=True)))
        )
        scores = found if isinstance(found, Tensor) else found["logits"]
        loss = F.cross_entropy(scores.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(module: nn.Module, plan: Plan, path: Path, graph: Graph) -> tuple[list[float], str]:
    """The losses of two steps of this process by a plan, and why modules cannot run it, if they cannot."""
    double = next(module.parameters()).dtype == torch.float64
    trainer = parallelize(module, plan, path)
    optimizer = torch.optim.SGD(trainer.parameters(), lr=RATE)
    losses = []
    for seed in (1, 2):
        inputs, labels = batch(graph, plan, seed)
        data = [x.double() if double and x.is_floating_point() else x for x in inputs]
        skipped = -1
        # Dynamic loss scaling leaves out steps until the scale is small enough.
        while skipped < trainer.scaling.num_skipped:
            skipped = trainer.scaling.num_skipped
            loss = trainer.step(*(x[trainer.rows] for x in data), labels[trainer.rows])
        losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses, trainer.why


def both(case: Case, folder: Path) -> dict[str, Any]:
    """What a rank finds of a plan: its losses in float64 and in its own precision, or why it was refused."""
    plan = Plan.from_json(case.plan)
    path = export(case.family, folder)
    with quiet():
        module = network(case.family, folder)
    graph = training_graph(path, plan)
    exact = replace(plan, training=replace(plan.training, precision="fp32"))
    found: dict[str, Any] = {}
    if dist.get_rank() == 0:
        found["wanted"] = losses_of(copy.deepcopy(module).double(), graph, plan)
    try:
        found["exact"], found["finer"] = train(copy.deepcopy(module).double(), exact, path, graph)
        if plan.training.precision in NEAR:
            found["near"], _ = train(module, plan, path, graph)
    except PlanError as fault:
        found["refused"] = str(fault)
    return found


def rank(number: int, size: int, folder: Path, cases: Sequence[Case]) -> None:
    """One process: trains plan after plan until one fails, and writes what it found after each."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for position, case in enumerate(cases):
        store = dist.FileStore(str(folder / f"store-{position}"), size)
        limit = datetime.timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=number, world_size=size, timeout=limit)
        try:
            found = both(case, folder.parent)
        except Exception:
            found = {"failed": traceback.format_exc()}
        file = folder / f"{number}-{position}.json"
        file.with_suffix(".part").write_text(json.dumps(found))
        file.with_suffix(".part").rename(file)
        if "failed" in found:
            break
        # Groups of thousands of plans would be too many threads.
        dist.destroy_process_group()
    os._exit(0)  # this process would wait for groups that wait for a failed process


def launch(cases: Sequence[Case], folder: Path) -> list[dict[str, Any]]:
    """What the ranks found of some plans, together; fewer than the plans where one failed."""
    size = cases[0].ranks
    place = Path(tempfile.mkdtemp(dir=folder))
    context = forked()
    children = [context.Process(target=rank, args=(number, size, place, cases)) for number in range(size)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    found = []
    for position in range(len(cases)):
        files = [place / f"{number}-{position}.json" for number in range(size)]
        if not all(file.exists() for file in files):
            break
        rows = [json.loads(file.read_text()) for file in files]
        merged = dict(collections.ChainMap(*rows))
        if "failed" in merged:
            # The last words of a process that lost another one say nothing.
            merged["failed"] = min((r["failed"] for r in rows if "failed" in r), key=lambda text: "Connection" in text)
        if any(row.get(key) != rows[0].get(key) for row in rows for key in ("exact", "near") if key in merged):
            merged.setdefault("failed", "ranks report different losses")
        found.append(merged)
    return found


def judge(case: Case, found: Mapping[str, Any]) -> str:
    """What became of a plan: `BY_MODULES`, `BY_GRAPH` and why, or what went wrong."""
    if "failed" in found:
        return "failed: " + str(found["failed"]).strip()
    if "refused" in found:
        return "refused: " + str(found["refused"])
    exact, near = LOOSE if found["finer"] else EXACT, NEAR.get(Plan.from_json(case.plan).training.precision, 0.0)
    for key, limit in (("exact", exact), ("near", near)):
        for loss, wanted in zip(found.get(key, ()), found["wanted"], strict=False):
            if not math.isclose(loss, wanted, rel_tol=limit):
                return f"differs: {found[key]} where one process has {found['wanted']} ({key})"
    return f"{BY_GRAPH}: {found['finer']}" if found["finer"] else BY_MODULES


def run(cases: Sequence[Case], folder: Path) -> list[tuple[Case, str]]:
    """Every plan with what became of it."""
    done: list[tuple[Case, str]] = []

    def work(size: int) -> None:
        waiting = [case for case in cases if case.ranks == size]
        while waiting:
            found = launch(waiting, folder)
            done.extend((case, judge(case, what)) for case, what in zip(waiting, found, strict=False))
            waiting = waiting[max(1, len(found)) :]

    # Processes of one plan wait for each other for much of their time.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(work, sorted({case.ranks for case in cases})))
    return done


def report(target: str, done: Sequence[tuple[Case, str]], *, every: bool) -> int:
    """Prints what became of the plans of a target; returns how many were trained by modules as by one process."""
    modules, graph = (sum(what.startswith(way) for _, what in done) for way in (BY_MODULES, BY_GRAPH))
    print(f"target {target}: {modules + graph} of {len(done)} searched plans train with the losses of one process")
    print(f"  {modules} by the modules of the network, {graph} by the operators of its graph", flush=True)
    documents = {json.dumps([case.family, case.plan["stages"], case.plan["schedule"]]) for case, _ in done}
    print(f"  {len(documents)} distinct plans", flush=True)
    for case, what in done:
        if every or not what.startswith((BY_MODULES, BY_GRAPH)):
            print(f"  {case}: {what.replace(chr(10), chr(10) + '    ')}", flush=True)
    return modules


def costs(done: Sequence[tuple[Case, str]], given: argparse.Namespace, folder: Path) -> None:
    """Prints, for plans that modules cannot run, how much longer the best plan for the target takes.

    Both have the price of the problem without a target: with one, the price follows the habits of its trainer.
    """
    for case, what in done:
        if what != BY_MODULES:
            print(f"  {case}: {cost(case, given, folder)}", flush=True)


def cost(case: Case, given: argparse.Namespace, folder: Path) -> str:
    """What the target costs where a plan was searched without it."""
    own = Plan.from_json(case.plan).estimate
    evaluator = Evaluator(drawn_problem(generator(given, case.number), case.target, given, folder, case.number))
    for is_fixed in (True, False):
        rng = generator(given, case.number)
        try:
            problem = drawn_problem(rng, "automap", given, folder, case.number, is_fixed=is_fixed)
            plan = search(problem, Budget(evaluations=int(rng.choice(BUDGETS))), seed=case.number + 1).plan
        except (NothingFits, ProblemError):
            continue
        assert own is not None
        more = evaluator.evaluate(lower_plan(plan, evaluator)).step_time_s / own.step_time_s - 1.0
        return f"--target automap costs {more:.0%}" + (
            "" if is_fixed else ", without the degree that the plan must have"
        )
    return "nothing fits for --target automap"


def main() -> int:
    """Prints what became of the plans of each target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", type=int, nargs="?", default=200, help="plans of each target")
    parser.add_argument("--targets", nargs="+", default=["automap", "any"])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print plans that were trained, too")
    parser.add_argument("--clusters", nargs="+", type=int, default=[2, 4], help="numbers of devices")
    parser.add_argument("--random", action="store_true", help="plans of the space at random, not the best found")
    given = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        for target in given.targets:
            cases = searched(target, given, Path(name))
            done = run(cases, Path(name))
            good = report(target, done, every=given.list)
            costs(done, given, Path(name))
            failed |= target == "automap" and good < len(cases)
    return int(failed)


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sys.exit(main())
