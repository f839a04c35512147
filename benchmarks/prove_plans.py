"""Random plans of known models, each checked by the verifier, which knows neither the space nor the price.

What is sent for parameters and gradients in a step is counted by the definitions of ZeRO, and compared with the list of
what is priced.

    python benchmarks/prove_plans.py [PLANS] [--models WORD | --generated FIRST-LAST | --onnx FILE ...]

Random plans are drawn evenly over the cases, ten thousand together unless told otherwise; of small models every
template is checked as well, of larger ones some. Instead of the known models, the cases can be problems of the
generator (`agents.learning.problems`) by their seeds, or ONNX files, each on two clusters. Fails with the first
violations if there are any; a plan that does not fit is correct if its estimate says so. For each case it also prints
the activations of the estimate over those that the verifier counts: the least, the median and the largest ratio of all
pipeline ranks.
"""

import argparse
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
# The root comes before it: folders of tests are named after the packages.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from collective_list import list_parameter_collectives
from parameter_traffic import ParameterTraffic

from agents.learning.problems import outline
from automap.cluster import parse_cluster
from automap.errors import ProblemError
from automap.price.estimate import estimate_lowered
from automap.problem import Problem
from automap.space.target_limits import plan_space
from automap.space.templates import templates
from automap.verify import Verifier, Violation
from ir import zoo
from ir.errors import ModelError
from ir.loss import with_loss
from ir.onnx.load import load_model
from ir.onnx.strip import strip_file

PLANS = 10_000
MAX_OPERATORS = 300
"""Largest number of operators of a model whose templates are all checked."""
CLUSTERS = (("2x2xV100-16GB@25Gbit", "generic"), ("6xA100-80GB", "megatron-core"))
"""Clusters and trainers of an ONNX file."""
MOST_TEMPLATES = 10
"""Templates of larger models, taken from the whole grid."""
SMALL = "layers=4,hidden=64,heads=4,seq_len=32,vocab_size=128"
CASES = (
    (f"gpt:{SMALL}", "2x4xA100", 16, "generic", {}),
    (f"gpt:{SMALL},dropout_percent=10", "8xA100", 16, "megatron-lm", {}),
    (f"gpt:{SMALL}", "4xV100-16GB+4xP100", 8, "deepspeed", {}),
    (f"gpt:{SMALL}", "16x1xV100-16GB@10Gbit", 64, "generic", {"pp": 2}),
    (f"gpt:{SMALL}", "4xV100-16GB+4xP100", 24, "torchtitan", {"pp": 4}),
    (f"gpt:{SMALL}", "2xV100-16GB+4xP100+2xA100-40GB", 48, "deepspeed", {}),
    (f"gpt:{SMALL}", "8xA100", 16, "megatron-lm", {"cp": 2}),
    (f"gpt:{SMALL}", "8xA100", 16, "generic", {"schedule": "zb1p"}),
    (f"gpt:{SMALL}", "8xA100", 16, "generic", {"schedule": "zb2p"}),
    (f"gpt:{SMALL}", "8xA100", 16, "generic", {"schedule": "gpipe"}),
    (f"llama:{SMALL},kv_heads=2", "2x4xA100", 16, "megatron-core", {}),
    (f"moe:{SMALL},kv_heads=4,ffn=128,experts=4", "8xA100", 16, "megatron-core", {}),
    (f"moe:{SMALL},kv_heads=4,ffn=128,experts=4", "8xA100+4xV100-16GB", 48, "generic", {"pp": 3}),
    (f"bert:{SMALL}", "2x2xV100@25Gbit", 8, "megatron-lm", {}),
    (f"t5:{SMALL}", "2x4xA100", 16, "generic", {}),
    ("resnet:blocks=1-2-1-1,image_size=64", "2x4xA100", 16, "generic", {}),
    ("resnet50", "2x8xV100-16GB@25Gbit", 256, "generic", {}),
    ("vgg19", "8xV100-16GB", 256, "generic", {}),
    ("vgg19", "16x1xV100-16GB@10Gbit", 2048, "generic", {"pp": 2}),
    ("resnet:blocks=1-2-1-1,image_size=64", "8xV100-16GB+4xP100", 48, "generic", {"pp": 2}),
    ("gpt2", "2x4xA100", 64, "generic", {}),
    ("bert-base", "2x8xV100-16GB@25Gbit", 64, "megatron-lm", {}),
    ("vit-b", "8xA100", 64, "generic", {}),
    ("t5-small", "2x8xA100", 64, "generic", {}),
    ("llama-7b:layers=8", "4x8xA100-80GB", 64, "megatron-core", {}),
    ("mixtral-8x7b:layers=8", "4x8xH100-80GB", 64, "megatron-core", {}),
)


def unpaid(plan, lowered, space, traffic):
    """Differences between what the parameters of a plan send and what is priced."""
    found, wanted = defaultdict(float), defaultdict(float)
    for one in list_parameter_collectives(lowered, space.evaluator):
        found[one.rank, one.kind, one.axis, one.what, one.when] += one.elements
    for one, elements in traffic.collectives(plan).items():
        wanted[one.rank, one.kind, one.axis, one.what, one.when] += elements
    for ranks, elements in traffic.exchanged(plan).items():
        for rank in ranks:
            wanted[rank, "send_recv", "", "gradients", "step"] += elements
    for key in {*found, *wanted}:
        if not math.isclose(found[key], wanted[key], rel_tol=1e-9, abs_tol=1e-3):
            yield Violation(
                where=" ".join(map(str, key)), what=f"{found[key]:g} elements are priced of {wanted[key]:g}"
            )


@dataclass(frozen=True, slots=True)
class Case:
    """Plans of one problem."""

    name: str
    build: Callable[[], Problem]


def known(spec, cluster, batch, trainer, fix):
    """The case of a known model."""
    return Case(
        f"{spec} on {cluster}, {trainer}, {fix or 'all plans'}",
        lambda: Problem.build(
            zoo.build(spec), parse_cluster(cluster), {"global_batch": batch, "trainer": trainer}, {"fix": fix}
        ),
    )


def generated(seed):
    """The case of a generated problem."""
    drawn = outline(seed)
    return Case(f"{seed}: {drawn.model.text} on {drawn.cluster.text}", lambda: drawn.build().problem)


def imported(path, cluster, trainer):
    """The case of an ONNX file."""
    training = {"global_batch": 12, "trainer": trainer}
    return Case(
        f"{path.name} on {cluster}, {trainer}",
        lambda: Problem.build(with_loss(load_model(strip_file(path).data)), parse_cluster(cluster), training),
    )


def prove(case, count, rng):
    """Prints one line about `count` random plans of a case, and returns their violations."""
    try:
        problem = case.build()
        space = plan_space(problem)
    except (ModelError, ProblemError) as error:
        print(f"{case.name}: left out: {error}", flush=True)
        return []
    check, traffic = Verifier(problem), ParameterTraffic(problem)
    rows = [tuple(row.tolist()) for row in space.random_batch(rng, count)]
    found = [values for _, values in templates(space)]
    if len(problem.graph.operators) >= MAX_OPERATORS:
        found = found[:: -(-len(found) // MOST_TEMPLATES)] if found else []
    rows += found
    faults, ratios, too_large, seconds = [], [], 0, 0.0
    for row in rows:
        lowered = space.lowered(row)
        plan = replace(space.decode(row), estimate=estimate_lowered(lowered, space.evaluator))
        began = time.process_time()
        found = check.violations(plan)
        seconds += time.process_time() - began
        too_large += not plan.estimate.fits
        faults += [(row, v) for v in found if plan.estimate.fits or not v.what.startswith("does not fit")]
        faults += [(row, v) for v in unpaid(plan, lowered, space, traffic)]
        ratios += [
            said.activations / mine.activations
            for said, (mine, _) in zip(plan.estimate.memory_bytes, check.memory(plan), strict=True)
            if mine.activations
        ]
    ratios = ratios or [math.nan]
    print(
        f"{case.name}: {count} random plans, {len(rows) - count} templates; "
        f"{too_large} do not fit, {len(faults)} violations; activations said / counted {min(ratios):.3f} "
        f"{statistics.median(ratios):.3f} {max(ratios):.3f}; {1e3 * seconds / len(rows):.0f} ms a plan",
        flush=True,
    )
    return faults


def main() -> int:
    """Checks all cases; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("plans", nargs="?", type=int, default=PLANS, help="number of random plans in all")
    parser.add_argument("--models", default="", help="only models with this word in their name")
    parser.add_argument("--generated", metavar="FIRST-LAST", default="", help="seeds of generated problems")
    parser.add_argument("--onnx", metavar="FILE", type=Path, nargs="+", default=[])
    asked = parser.parse_args()
    if asked.generated:
        first, last = map(int, asked.generated.split("-"))
        cases = [generated(seed) for seed in range(first, last + 1)]
    elif asked.onnx:
        cases = [imported(path, *where) for path in asked.onnx for where in CLUSTERS]
    else:
        cases = [known(*case) for case in CASES if asked.models in case[0]]
    began, rng = time.monotonic(), np.random.default_rng(0)
    counts = [asked.plans // len(cases) + (i < asked.plans % len(cases)) for i in range(len(cases))]
    faults = [
        (case.name, *fault) for case, count in zip(cases, counts, strict=True) for fault in prove(case, count, rng)
    ]
    for name, row, violation in faults[:10]:
        print(f"{name} {row}: {violation.where}: {violation.what}")
    print(f"{sum(counts)} random plans, {len(faults)} violations, {time.monotonic() - began:.0f} s")
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main())
