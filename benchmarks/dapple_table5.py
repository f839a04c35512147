"""Early backward beside GPipe: throughput and memory of BERT-48 in two stages, Table 5 of DAPPLE's paper.

    python benchmarks/dapple_table5.py

Each row is a schedule with a number of micro-batches of 2 samples, on two hosts of one V100 with 25 Gbit/s between.
There are three groups of columns, each with samples a second and the mean peak memory of both devices in GB:

- as the paper measured them;
- computed with our schedules from what DAPPLE's authors published beside the table (times of BERT-Large, memory of its
  activations, 16 bytes of state a parameter);
- by our own price, which uses none of these numbers, divided by its value in the first row.

Two numbers are taken from the table itself, and are marked with * below: what a step takes besides its passes, from the
first row, and what a micro-batch keeps under recomputation, from two rows. The committed figures are in
benchmarks/results/.
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from automap.cluster import parse_cluster
from automap.price.estimate import estimate_lowered
from automap.price.kernels.pipeline import run_schedule
from automap.price.kernels.step_records import Order
from automap.problem import Problem
from automap.schedule import BACKWARD, FORWARD, KINDS, NO_PROGRAM
from automap.space.space import PlanSpace
from automap.space.templates import megatron_signatures
from ir import zoo


class Row(NamedTuple):
    """One cell of the table."""

    kind: str
    recompute: str
    num_micro_batches: int
    speed: float
    """Samples a second; 0 where memory did not suffice."""
    memory: float
    """GB in the mean of both devices."""


ROWS = (
    Row("gpipe", "none", 2, 5.10, 12.1),
    Row("gpipe", "none", 3, 0.0, 0.0),
    Row("gpipe", "full", 2, 4.00, 9.9),
    Row("gpipe", "full", 5, 5.53, 13.2),
    Row("gpipe", "full", 8, 0.0, 0.0),
    Row("1f1b", "none", 2, 5.10, 10.6),
    Row("1f1b", "none", 8, 7.60, 10.6),
    Row("1f1b", "none", 16, 8.18, 10.6),
    Row("1f1b", "full", 2, 4.24, 8.5),
    Row("1f1b", "full", 8, 6.23, 8.5),
    Row("1f1b", "full", 16, 6.77, 8.5),
)
SAMPLES = 2
FORWARD_S, BACKWARD_S = 0.077, 0.129
"""Seconds of 24 layers with 2 samples: BERT-Large in the authors' `analysis_dapple.py`. A stage of BERT-48 has as many
layers."""
SEND_S = 4.325e6 / 0.8e9
"""Seconds to send what crosses the cut (`bert-48-pbs-2`) at the authors' rate between hosts of configuration B."""
SAVED = SAMPLES * 1736689664.0
"""Bytes of activations of 24 layers and 2 samples, from the settings of the authors' planner for BERT-24."""
STATE = 640e6 / 2 * 16.0
"""Bytes of the state of a stage: 640 million parameters (Table 1) of 16 bytes (Table 7)."""
CAPACITY, RESERVED = 16e9, 1.07e9
"""Bytes of a V100, and what CUDA and the framework hold of them (assumed, as of the trainer `generic`)."""
BEYOND_S = 2 * SAMPLES / ROWS[0].speed - 3 * (FORWARD_S + BACKWARD_S) - 2 * SEND_S
"""* What a step takes besides its passes: the update of the parameters."""
KEPT = (ROWS[3].memory - ROWS[2].memory) / 3 * 1e9
"""* Bytes that a micro-batch keeps under the paper's recomputation."""


def run(row: Row) -> tuple[float, float, float]:
    """Samples a second, and the mean and the largest peak memory in bytes, from the authors' numbers."""
    again = row.recompute == "full"
    seconds = np.zeros((4, 2))
    seconds[FORWARD], seconds[BACKWARD] = FORWARD_S, BACKWARD_S + again * FORWARD_S
    order = Order(KINDS[row.kind], row.num_micro_batches, NO_PROGRAM)
    busy = row.num_micro_batches * seconds.sum(0)
    ends, peak = np.zeros(2), np.zeros(2)
    saved = np.full(2, np.round(KEPT if again else SAVED))
    run_schedule(order, seconds, np.array([SEND_S, 0.0]), saved, busy, ends, peak)
    # A micro-batch that runs again has the rest of its activations as well.
    memory = STATE + peak + again * (SAVED - KEPT)
    return SAMPLES * row.num_micro_batches / (float(ends.max()) + BEYOND_S), float(memory.mean()), float(memory.max())


def price(row: Row) -> tuple[float, float]:
    """Samples a second and mean peak memory in bytes by the price."""
    fix = {"pp": 2, "num_micro_batches": row.num_micro_batches, "schedule": row.kind}
    training = {"global_batch": SAMPLES * row.num_micro_batches, "precision": "fp32"}
    graph = zoo.build("bert:layers=48,hidden=1024,heads=16,seq_len=512")
    space = PlanSpace(Problem.build(graph, parse_cluster("2x1xV100-16GB@25Gbit"), training, {"fix": fix}))
    shape = next(shape for shape in space.shapes if (shape.tp, shape.virtual) == (1, 1))
    prefix = space.even_values(shape, recompute=row.recompute, zero=0)
    values = megatron_signatures(space, shape, prefix, sequence_parallel=False)
    found = estimate_lowered(space.lowered(values), space.evaluator)
    return found.samples_per_s, float(np.mean([rank.total for rank in found.memory_bytes]))


def off(found: float, wanted: float) -> str:
    """How far a figure is from the paper's."""
    return f"{found / wanted - 1.0:+6.1%}"


def show(rows: Sequence[Row]) -> None:
    """Prints one line a row, and the largest differences from the paper."""
    speeds, memories = [], []
    first_speed, first_memory = price(ROWS[0])
    print("schedule  recompute   M   paper            by the authors' numbers           our price, to row 1")
    for row in rows:
        speed, mean, largest = run(row)
        own_speed, own_memory = price(row)
        head = f"{row.kind:9} {row.recompute:9} {row.num_micro_batches:3}"
        own = f"{own_speed / first_speed:5.2f} x {own_memory / first_memory:5.2f} x"
        if not row.speed:
            fits = "FITS" if largest + RESERVED <= CAPACITY else "out of memory"
            print(f"{head}   out of memory    {fits}, {(largest + RESERVED) / 1e9:4.1f} GB".ljust(76), own, sep="")
            continue
        if row != ROWS[0]:
            speeds.append(abs(speed / row.speed - 1.0))
        memories.append(abs(mean / 1e9 / row.memory - 1.0))
        theirs = f"{row.speed:5.2f}/s {row.memory:5.1f} GB"
        ours = f"{speed:5.2f}/s {off(speed, row.speed)}  {mean / 1e9:5.1f} GB {off(mean / 1e9, row.memory)}"
        paper = f"{row.speed / ROWS[0].speed:5.2f} x {row.memory / ROWS[0].memory:5.2f} x"
        print(f"{head}   {theirs}   {ours}   {own}   (paper {paper})")
    print(f"largest differences: throughput {max(speeds):.1%}, memory {max(memories):.1%}")


def main() -> None:
    """Prints the table."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    show(ROWS)


if __name__ == "__main__":
    main()
