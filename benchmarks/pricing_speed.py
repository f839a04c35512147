"""How many plans and decisions a second one core prices: random whole plans, and walks with look-ahead.

    python benchmarks/pricing_speed.py [SECONDS]

Distinct random plans of the whole space, nothing kept between plans but what belongs to the problem. Prints one line a
model; the committed figures are in benchmarks/results/.
"""

import platform
import sys
import time
from pathlib import Path

import numpy as np
import onnx

from automap.cluster import parse_cluster
from automap.prefix import BoundTable, Prefix
from automap.problem import Problem
from automap.space import PlanSpace
from ir.onnx.load import load_model

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
CLUSTER, BATCH = "4x8xA100-80GB", 512


def rate(step, seconds: float) -> float:
    """Calls of `step` a second, weighted by what it returns."""
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        done += step()
    return done / (time.perf_counter() - began)


def main(seconds: float) -> None:
    """Measures four light models."""
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}")
    for name in ("vgg19", "resnet50", "inception_v2", "densenet121"):
        graph = load_model((LIGHT / f"light_{name}.onnx").read_bytes(), name=name)
        space = PlanSpace(Problem.build(graph, parse_cluster(CLUSTER), {"global_batch": BATCH}))
        rng = np.random.default_rng(0)
        plans = [space.random(rng) for _ in range(500)]
        table = BoundTable(space)
        walks = iter(plans * 1000)
        whole = iter(plans * 1000)

        def price(whole=whole, space=space) -> int:
            space.evaluator.evaluate(space.choice(next(whole)))
            return 1

        def walk(walks=walks, space=space, table=table) -> int:
            values, prefix, decisions = next(walks), Prefix(space, table), 0
            while not prefix.done:
                prefix.decide(values[prefix.position])
                decisions += 1
            prefix.outcome()
            return decisions

        walk()
        print(
            f"{name:14} {rate(price, seconds):8.0f} plans/s   {rate(walk, seconds):8.0f} decisions/s with look-ahead   "
            f"10^{space.decades:.0f} plans"
        )


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 5.0)
