"""Measures how many plans and decisions one core prices in a second: random whole plans, and episodes.

    python benchmarks/pricing_speed.py [SECONDS] [--models WORD] [--batches 60]

Prices distinct random plans of the whole space; unit costs are cached between plans, as in a search. With WORD, only
models that have it in their name are measured. Prints one line a model; the committed figures are in
benchmarks/results/.
"""

import argparse
import itertools
import platform
import time
from pathlib import Path

import numpy as np
import onnx

from automap.cluster import parse_cluster
from automap.price.estimate import price
from automap.problem import Problem
from automap.space.space import PlanSpace
from envs.decision import Episodes
from envs.hybrid import HybridDecisions
from ir import zoo
from ir.onnx.load import load_model

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
CLUSTER, BATCH = "4x8xA100-80GB", 512
MANY = 1000
"""Number of plans in one call."""
BATCHES = 60
"""Number of such calls, one after another: more plans than the cache of unit costs holds."""
EPISODES = 64
"""Number of episodes that run side by side."""
SPEC = (
    ("zoo:gpt2-xl", "8x8xH100-80GB", {"pp": 1}),
    ("zoo:gpt2-xl", "8x8xH100-80GB", {"pp": 4}),
    ("zoo:gpt2-xl", "8x8xH100-80GB", {}),
    (
        "zoo:gpt:layers=96,hidden=12288,heads=96,seq_len=2048,vocab_size=51200",
        "16x8xH100-80GB",
        {"pp": 16, "num_micro_batches": 128},
    ),
)
"""Problems of the measurement: 48 blocks on 64 GPUs; 96 blocks in 16 stages with 128 micro-batches."""


def rate(step, seconds: float) -> float:
    """Sum of the results of `step`, called again and again, for each second of processor time."""
    began, done = time.process_time(), 0
    while time.process_time() - began < seconds:
        done += step()
    return done / (time.process_time() - began)


def many(seconds: float, word: str, num_batches: int) -> None:
    """Prices random whole plans, many in one call; they have less in common than the plans of a search."""
    for spec, cluster, fix in SPEC:
        if word not in spec:
            continue
        graph = zoo.build(spec.removeprefix("zoo:"))
        space = PlanSpace(Problem.build(graph, parse_cluster(cluster), {"global_batch": BATCH}, {"fix": fix}))
        rng = np.random.default_rng(0)
        batches = itertools.cycle([space.random_batch(rng, MANY) for _ in range(num_batches)])
        space.price(next(batches)[:2])
        speed = rate(lambda batches=batches, space=space: len(space.price(next(batches))), seconds)
        print(f"{spec} on {cluster}, {fix or 'all plans'}: {speed:.0f} plans/s")


def with_timeline(seconds: float) -> None:
    """Prices one plan document after the other by `price`, with the timeline of its pipeline."""
    spec, cluster, fix = SPEC[-1]
    graph = zoo.build(spec.removeprefix("zoo:"))
    for schedule, virtual in (("1f1b", 1), ("zb2p", 1), ("interleaved", 6)):
        fixed = {**fix, "schedule": schedule, "virtual_stages": virtual}
        space = PlanSpace(Problem.build(graph, parse_cluster(cluster), {"global_batch": BATCH}, {"fix": fixed}))
        plan = space.decode(space.random(np.random.default_rng(0)))

        def price_one(plan=plan, space=space) -> int:
            price(space.problem, plan, space.evaluator, with_timeline=True)
            return 1

        price_one()
        print(f"{spec}, {schedule} with timeline: {1e3 / rate(price_one, seconds):.0f} ms")


def main() -> None:
    """Measures plans in one call, plans with timelines, then four light models one plan at a time."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("seconds", nargs="?", type=float, default=5.0, help="processor time for each line")
    parser.add_argument("--models", default="", help="measure only models with this word in their name")
    parser.add_argument("--batches", type=int, default=BATCHES, help="batches of plans that are drawn beforehand")
    asked = parser.parse_args()
    seconds, word = asked.seconds, asked.models
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}")
    many(seconds, word, asked.batches)
    if word in SPEC[-1][0]:
        with_timeline(seconds)
    for name in ("vgg19", "resnet50", "inception_v2", "densenet121"):
        if word not in name:
            continue
        graph = load_model((LIGHT / f"light_{name}.onnx").read_bytes(), name=name)
        space = PlanSpace(Problem.build(graph, parse_cluster(CLUSTER), {"global_batch": BATCH}))
        rng = np.random.default_rng(0)
        plans = [tuple(values) for values in space.random_batch(rng, 500).tolist()]
        whole = iter(plans * 1000)

        def whole_plan(whole=whole, space=space) -> int:
            space.evaluator.evaluate(space.lowered(next(whole)))
            return 1

        episodes = Episodes(HybridDecisions(space), EPISODES)

        def step(episodes=episodes, rng=rng) -> int:
            """Takes one random decision in every episode, and makes the observation of an agent."""
            offered = episodes.partial_plans.episodes
            picked = (rng.random(EPISODES) * offered.offered).astype(np.int64)
            _, done = episodes.step(offered.legal[np.arange(EPISODES), picked])
            if done.any():
                episodes.begin(done)
            episodes.observe()
            return EPISODES

        print(
            f"{name:14} {rate(whole_plan, seconds):8.0f} plans/s   "
            f"{rate(step, seconds):8.0f} decisions/s with look-ahead and observation   "
            f"10^{space.decades:.0f} plans"
        )


if __name__ == "__main__":
    main()
