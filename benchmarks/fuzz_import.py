"""Fuzzes the import for a while: mutated real files and random graphs, with a budget of processor time each.

    python benchmarks/fuzz_import.py [SECONDS] [FIRST_SEED]

Prints how the files ended; stops with a traceback at the first that ends in anything but a graph or a clear refusal.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import onnx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "ir"))

import hostile  # noqa: E402
from test_hostile import outcome  # noqa: E402

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def main() -> None:
    """Imports files until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("seconds", nargs="?", type=float, default=60.0)
    parser.add_argument("first_seed", nargs="?", type=int, default=1)
    asked = parser.parse_args()
    seed = asked.first_seed
    seeds = [build().SerializeToString() for build in hostile.BASES.values()]
    seeds += [(LIGHT / f"light_{name}.onnx").read_bytes() for name in ("squeezenet", "bvlc_alexnet", "shufflenet")]
    ends: Counter[str] = Counter()
    first, end = seed, time.monotonic() + asked.seconds
    while time.monotonic() < end:
        for number, data in enumerate(seeds):
            for changed in hostile.mutated(data, 5, seed):
                ends[outcome(f"mutated {number} {seed}", changed)] += 1
        for _ in range(20):
            ends[outcome(f"random {seed}", hostile.random_model(seed))] += 1
            seed += 1
    print(f"{ends.total()} files from seed {first}: " + ", ".join(f"{n} {end}" for end, n in ends.most_common()))


if __name__ == "__main__":
    main()
