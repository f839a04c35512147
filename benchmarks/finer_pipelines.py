"""What finer choices are worth: the same searches with and without them.

    python benchmarks/finer_pipelines.py [levels | uneven-shards | branches | half-layers] [--evaluations 1500]
                                         [--seeds 1] [--pairs WORD] [--profiles FOLDER]

For each pair of a model and a cluster, and each seed, a portfolio searches a coarser and a finer space, with equal
budgets in evaluations. `levels`: in the coarser space a pipeline rank has one recompute mode for all of its units (the
pruning rule `one_mode_a_rank`). `uneven-shards`: every dim that is split divides by its ranks. `branches`: measured
layers of residual networks (PipeDream's profiles, from FOLDER) are hardly cut inside blocks, in pipelines of single
devices. `half-layers`: pipelines that AutoMAP does not offer are cut also inside repeated blocks, wherever one tensor
crosses (between attention and MLP); under recomputation each part keeps its input there. Prints both step times in the
mean over the seeds, how much faster the second is, the spread of the seeds, the share of its memory that the fullest
device uses, and the fastest plan. The committed figures are in benchmarks/results/.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from agents import Budget, search
from agents.searcher import SearchResult
from automap.cluster import parse_cluster
from automap.errors import NothingFits
from automap.plan import Plan
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.space.target_limits import plan_space
from envs.pruning import prune
from ir import zoo
from ir.blocks import repeats
from ir.profile_import import MIN_CUT_SHARE, load_profile
from service.strategy import strategy

MEMORY_BINDS = (
    ("bert-large", "8xV100-16GB", 256),
    ("gpt2-xl", "8xV100-16GB", 128),
    ("llama-7b", "4xA100-40GB", 64),
    ("llama-7b", "8xA100-40GB", 64),
    ("bert-large", "8x8xV100-16GB@25Gbit", 2048),
    ("gpt2-xl", "8x8xV100-16GB@25Gbit", 512),
    ("vit-l", "8x8xV100-16GB@25Gbit", 8192),
    ("t5-11b", "8x8xV100-32GB@25Gbit", 256),
    ("mixtral-8x7b", "8x8xA100-40GB", 256),
    ("llama-70b", "8x8xA100-80GB", 256),
    ("bert-large", "64x8xV100-16GB@25Gbit", 16384),
    ("gpt2-xl", "64x8xV100-32GB@25Gbit", 8192),
    ("llama-70b", "64x8xA100-40GB", 1024),
    ("gpt:layers=96,hidden=12288,heads=96,seq_len=2048,vocab_size=50304", "64x8xA100-80GB", 1536),
)
"""Model of the zoo, cluster, global batch: 8, 64 and 512 devices, where memory binds and where it does not."""
ODD_VOCABULARY = (
    ("bert-large", "8x8xA100-40GB", 512),
    ("gpt2-medium", "8xV100-16GB", 8),
    ("gpt2-xl", "4xV100-16GB", 64),
    ("gpt2-xl", "8xV100-16GB", 16),
    ("gpt2-xl", "4x8xA100-80GB", 32),
    ("gpt2-xl", "8x8xV100-16GB@25Gbit", 128),
    ("gpt:layers=32,hidden=4096,heads=32,seq_len=2048", "8xA100-40GB", 64),
    ("gpt:layers=32,hidden=4096,heads=32,seq_len=2048", "8xH100", 128),
    ("gpt:layers=40,hidden=5120,heads=40,seq_len=2048", "4x8xA100-40GB", 128),
    ("gpt:layers=40,hidden=5120,heads=40,seq_len=2048", "8x8xH100", 256),
    ("gpt:layers=96,hidden=12288,heads=96,seq_len=2048", "16x8xH100", 256),
    ("gpt:layers=96,hidden=12288,heads=96,seq_len=2048", "64x8xA100-80GB", 1536),
)
"""The same, of models whose vocabulary (GPT-2's of 50,257, BERT's of 30,522) few numbers of ranks divide."""
PIPELINED = (
    ("bert-large", "16x1xV100-16GB@10Gbit", 256),
    ("gpt2-xl", "8xV100-16GB", 128),
    ("gpt2-xl", "4x8xA100-80GB", 32),
    ("gpt2-xl", "16x1xV100-32GB@25Gbit", 128),
    ("gpt2-xl", "8x8xV100-16GB@25Gbit", 128),
    ("llama-7b", "4xA100-40GB", 64),
    ("llama-7b", "8x1xA100-40GB@25Gbit", 64),
    ("t5-11b", "8x8xV100-32GB@25Gbit", 256),
    ("llama-70b", "8x8xA100-80GB", 256),
    ("gpt:layers=40,hidden=5120,heads=40,seq_len=2048", "4x8xA100-40GB", 128),
)
"""The same, whose best plans known are pipelines."""
RESIDUAL = (
    ("resnet50", "4xV100-16GB", 1024),
    ("resnet50", "8xV100-16GB", 1024),
    ("resnet50", "2x8xV100-16GB@25Gbit", 1024),
    ("squeezenet1_0", "4xV100-16GB", 1024),
    ("squeezenet1_0", "8xV100-16GB", 1024),
)
"""Profile, cluster, global batch."""
PAIRS = {"levels": MEMORY_BINDS, "uneven-shards": ODD_VOCABULARY, "branches": RESIDUAL, "half-layers": PIPELINED}
PROFILED_BATCH = 64
"""Samples of the mini-batches of PipeDream's profiles."""
BETWEEN_BLOCKS = 1 / 8
"""`MIN_CUT_SHARE` of the coarser space: with it, hardly any residual block is cut inside."""


def searched(problem: Problem, budget: Budget, seed: int, choice: str, *, finer: bool) -> SearchResult | None:
    """The result of a portfolio in the finer or the coarser space; None where nothing fits."""

    def made(asked: Problem) -> PlanSpace:
        if choice == "uneven-shards" and not finer:
            with mock.patch("automap.price.tables.may_be_uneven", return_value=False):
                return plan_space(asked)
        space = plan_space(asked)
        return prune(space, ("one_mode_a_rank",)) if choice == "levels" and not finer else space

    apart = choice == "half-layers" and finer
    with (
        mock.patch("agents.incumbent.plan_space", made),
        mock.patch("ir.blocks.repeats", _each if apart else repeats),
    ):
        try:
            return search(problem, budget, seed=seed)
        except NothingFits:
            return None


def _each(kinds: Sequence[int]) -> list[tuple[int, int]]:
    """Every piece as a group of its own, in place of `repeats`."""
    return [(number, number + 1) for number in range(len(kinds))]


def fullest(plan: Plan) -> float:
    """Share of the memory which a plan may use that the fullest device uses."""
    assert plan.estimate is not None
    return max(rank.total / (rank.capacity - rank.reserve) for rank in plan.estimate.memory_bytes)


def built(asked: tuple[str, str, int], profiles: Path | None, *, finer: bool) -> Problem:
    """The problem of a pair: a model of the zoo, or a profile as a pipeline of single devices."""
    model, name, batch = asked
    cluster = parse_cluster(name)
    if profiles is None:
        return Problem.build(zoo.build(model), cluster, {"global_batch": batch})
    text = (profiles / f"{model}.txt").read_text()
    with mock.patch("ir.profile_import.MIN_CUT_SHARE", MIN_CUT_SHARE if finer else BETWEEN_BLOCKS):
        graph = load_profile(text, name=model, batch=PROFILED_BATCH)
    return Problem.build(graph, cluster, {"global_batch": batch}, {"fix": {"pp": cluster.num_devices}})


def pair(asked: tuple[str, str, int], budget: Budget, seeds: range, choice: str, profiles: Path | None) -> None:
    """Runs the searches of one pair and prints its line."""
    model, cluster, batch = asked
    found = []
    for finer in (False, True):
        problem = built(asked, profiles, finer=finer)
        found.append([searched(problem, budget, seed, choice, finer=finer) for seed in seeds])
    name = f"{model[:3]} {problem.graph.num_parameters / 1e9:.1f} B" if ":" in model else model
    head = f"{name:12} {cluster:21} {batch:5}"
    times = [[r.plan.estimate.step_time_s for r in some if r and r.plan.estimate] for some in found]
    if not all(times):
        print(head, "nothing fits" + (f" without {choice}" if times[1] else ""), flush=True)
        return
    before, after = map(statistics.mean, times)
    spread = max(times[1]) / min(times[1]) - 1.0
    best = min((r for r in found[1] if r), key=lambda r: r.plan.estimate.step_time_s if r.plan.estimate else 0.0)
    print(
        f"{head} {before:9.4f} s {after:9.4f} s {before / after - 1.0:7.1%} {spread:6.1%} "
        f"{fullest(best.plan):6.0%}  {strategy(best.plan)}",
        flush=True,
    )


def main() -> None:
    """Prints one line for each pair."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("choice", nargs="?", choices=tuple(PAIRS), default="levels")
    parser.add_argument("--evaluations", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--pairs", default="", help="only pairs with this word in the model or the cluster")
    parser.add_argument("--profiles", type=Path, default=Path("../data/profiles/pipedream"))
    asked = parser.parse_args()
    profiles = asked.profiles if asked.choice == "branches" else None
    budget = Budget(evaluations=asked.evaluations)
    print(f"{'model':12} {'cluster':21} {'batch':>5} {'without':>11} {'with':>11}   gain spread memory  plan")
    for one in PAIRS[asked.choice]:
        if asked.pairs in f"{one[0]} {one[1]}":
            pair(one, budget, range(asked.seeds), asked.choice, profiles)


if __name__ == "__main__":
    main()
