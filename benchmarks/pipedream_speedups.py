"""PipeDream's planner on layer profiles: the predicted speed-up over one worker, beside what its released program says.

    python benchmarks/pipedream_speedups.py PROFILES [--workers 4,16] [--bandwidth 1e9] [--memory 16e9]

PROFILES is a folder of profiles in PipeDream's text format. One line a profile and number of workers: states where a
stage may end, predicted speed-up, replicas of each stage, seconds of the search; then what the released program
predicts, where it is known, and how far the two are apart. The committed figures are in benchmarks/results/.
"""

import argparse
import time
from pathlib import Path

from agents.planners.pipedream import Level, best_pipeline, states_of_layers
from ir.errors import ModelTooExpensive
from ir.profile_text import parse

RELEASED = {
    "vgg16": {4: 3.83, 16: 14.19},
    "alexnet": {4: 3.68, 16: 11.65},
    "resnet50": {4: 3.89, 16: 15.07},
    "squeezenet1_0": {4: 3.95, 16: 15.37},
    "gnmt": {4: 3.46, 16: 4.86},
}
"""Speed-ups that the program of msr-fiddle/pipedream predicts with a bandwidth of 1e9 bytes/s and 16e9 bytes of memory,
measured by running it with its memory constraint."""


def main() -> None:
    """Plans every profile of the folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("profiles", type=Path)
    parser.add_argument("--workers", default="4,16")
    parser.add_argument("--bandwidth", type=float, default=1e9, help="bytes/s between any two workers")
    parser.add_argument("--memory", type=float, default=16e9, help="bytes of a worker")
    given = parser.parse_args()
    files = sorted(given.profiles.glob("*.txt"))
    if not files:
        parser.error(f"profiles: no profile, *.txt, in {given.profiles}: name a folder of layer profiles")
    apart = []
    for file in files:
        try:
            states = states_of_layers(parse(file.read_text()))
        except ModelTooExpensive as fault:
            print(f"{file.stem:26} refused: {fault}", flush=True)
            continue
        for workers in map(int, given.workers.split(",")):
            began = time.perf_counter()
            found = best_pipeline(states, [Level(workers, given.bandwidth)], given.memory)
            spent = time.perf_counter() - began
            speed_up = states.seconds[-1] / found.seconds
            replicas = ":".join(str(stage.replicas[0]) for stage in found.stages) or "none fits"
            line = (
                f"{file.stem:26} {len(states.seconds):5} states  {workers:3} workers  {speed_up:6.2f} x  {spent:6.2f} s"
            )
            known = RELEASED.get(file.stem, {}).get(workers)
            if known is not None and (given.bandwidth, given.memory) == (1e9, 16e9):
                apart.append(abs(speed_up / known - 1.0))
                line += f"  released {known:5.2f} x  {100 * apart[-1]:4.1f} % apart"
            print(f"{line}  {replicas}", flush=True)
    if apart:
        print(f"{len(apart)} figures of the released program, at most {100 * max(apart):.1f} % apart")


if __name__ == "__main__":
    main()
