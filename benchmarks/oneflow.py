"""OneFlow's boxing costs beside our collectives, and its actors' registers as a pipeline schedule beside 1F1B.

    python benchmarks/oneflow.py [--models NAME,…]

The first table has the bytes that all devices together send to turn one placement of a tensor of T bytes into another
on an axis of p devices: OneFlow's (oneflow/core/auto_parallel/sbp_infer_util.cpp) and ours, read off the compiled price
with links of one byte a second and no latency.

The second table schedules eight stages on eight V100s with 32 micro-batches. An actor runs whenever its inputs are
there and a register is free for its output (arXiv 2110.15032, section 5), so registers decide how far a rank runs
ahead. The orders that actors find are priced and run as explicit orders. "Copies apart" means that transfers run beside
the ranks, as between OneFlow's actors, and each takes a tenth of the passes before it; in our price, a rank waits while
it sends. Memory is that of the fullest rank. The committed figures are in benchmarks/results/; docs/planners.md shows
them.
"""

import argparse

import numpy as np

from agents.planners.device_partition import Partition, StageOf
from agents.planners.list_schedule import Stages, list_schedule
from agents.planners.pipeline_cuts import partition
from agents.planners.spp import passes
from agents.planners.stage_strategies import Strategy
from agents.planners.stage_table import StageTable
from agents.planners.staged_plan import StagedPlan, data_parallel, lower_staged
from automap.cluster import parse_cluster
from automap.cost_graph.sensitivities import MEMORY
from automap.device_kinds import GIB
from automap.price.kernels.collectives import Reason, convert, host_link
from automap.price.kernels.cost_records import COLLECTIVE_DTYPE, Recorder
from automap.price.kernels.pipeline import run_program
from automap.price.kernels.records import NUM_COLLECTIVES
from automap.price.kernels.stage_records import LINK_DTYPE, Stage
from automap.problem import Problem
from automap.schedule import ONE_F_ONE_B, arrange
from automap.space.space import PlanSpace
from ir import zoo
from ir.factors import BROADCAST, PARTIAL

ONEFLOW = {
    ("S(i)", "S(i)"): lambda p: 0.0,
    ("S(i)", "S(j)"): lambda p: (p - 1) / p,
    ("S(i)", "B"): lambda p: p - 1.0,
    ("P", "S(i)"): lambda p: p - 1.0,
    ("P", "B"): lambda p: 2.0 * (p - 1),
    ("B", "S(i)"): lambda p: 0.0,
    ("B", "P"): lambda p: 8.0 * p,
    ("S(i)", "P"): lambda p: None,
}
"""(from, to) -> bytes that all devices send, of a tensor of one byte; None: refused. B to S costs one byte whatever the
tensor, a token. B to P is a penalty, four times the tensor for each device on either side, so that it is avoided."""
PLACEMENTS = {"S(i)": 0, "S(j)": 1, "B": BROADCAST, "P": PARTIAL}
CLUSTER, STAGES, MICRO_BATCHES = "1x8xV100-32GB", 8, 32


def our_bytes(source: str, target: str, devices: int, space: PlanSpace) -> float:
    """Bytes that all devices send by our price, of a tensor of one byte."""
    link = host_link(devices, latency_s=0.0, growth=0.0, bytes_per_s=1.0, small_group=0.0, ramp=0.0)
    (layout,) = space.evaluator.layout((1,) * len(space.axes), 1).stages
    one = np.array([float(devices)])
    stage = Stage(one, np.array([link], dtype=LINK_DTYPE), layout.hardware, np.zeros(1, dtype=np.bool_), 1.0)
    seconds, nobody = np.zeros(NUM_COLLECTIVES), Recorder(np.empty(0, dtype=COLLECTIVE_DTYPE), np.zeros(1, np.int64))
    placements = np.array([PLACEMENTS[source]]), np.array([PLACEMENTS[target]])
    convert(1.0, *placements, 0, stage, seconds, Reason(0, 0, 0, 1.0), nobody)
    return float(seconds.sum()) * devices


def boxing(space: PlanSpace) -> None:
    """Prints the first table."""
    counts = (2, 4, 8)
    print("from  to    " + "".join(f"{f'p = {p}: OneFlow':>16} {'ours':>6}" for p in counts))
    for (source, target), bytes_of in ONEFLOW.items():
        cells = []
        for p in counts:
            theirs = bytes_of(p)
            text = "refused" if theirs is None else f"{theirs:.2f} T"
            cells.append(f"{text:>16} {our_bytes(source, target, p, space):6.2f}")
        print(f"{source:5} {target:5} " + "".join(cells))


def even_pipeline(space: PlanSpace) -> StagedPlan:
    """One device a stage, divided so that the slowest stage is fastest."""
    plain = Strategy(tp=1, signatures=data_parallel(space.evaluator, len(space.axes)))
    table = StageTable(space, tuple(range(STAGES)), MICRO_BATCHES, [plain])
    ends = partition([table.seconds(STAGES - rank, rank, 1) for rank in range(STAGES)])
    assert ends is not None, "nothing fits"
    bounds = zip([0, *ends], [*ends, space.num_units], strict=True)
    stages = tuple(StageOf(first, last, rank, 1) for rank, (first, last) in enumerate(bounds))
    return table.staged(Partition(0.0, stages))


def apart(stages: Stages) -> Stages:
    """The same stages with copies beside them, each as long as a tenth of the passes of the stage before it."""
    copy_s = 0.1 * (stages.forward_s + stages.backward_s)[:-1]
    return Stages(
        forward_s=stages.forward_s,
        backward_s=stages.backward_s,
        onward_s=copy_s,
        back_s=copy_s,
        reduce_s=stages.reduce_s,
    )


def schedules(model: str) -> None:
    """Prints the second table of a model."""
    training = {"global_batch": 4 * MICRO_BATCHES}
    space = PlanSpace(Problem.build(zoo.build(model), parse_cluster(CLUSTER), training))
    plan = even_pipeline(space)
    stages = passes(space, plan)
    ahead = list(range(STAGES, 0, -1))
    program = arrange(ONE_F_ONE_B, STAGES, STAGES, MICRO_BATCHES)
    seconds = np.zeros((4, STAGES))
    seconds[:2] = stages.forward_s, stages.backward_s
    copies = apart(stages)
    ends, times = np.empty(STAGES), np.empty((len(program), 2))
    run_program(program, seconds, np.append(copies.onward_s, 0.0), ends, times)
    rows = [("1F1B", plan, max(ends), ahead)]
    ways = {"1 register": [1] * STAGES, "2 registers": [2] * STAGES, "4 registers": [4] * STAGES}
    ways |= {"as many as ranks follow": ahead, "twice as many, less 1": [2 * n - 1 for n in ahead]}
    ways["no limit"] = [MICRO_BATCHES] * STAGES
    for name, registers in ways.items():
        listed = list_schedule(stages, MICRO_BATCHES, registers)
        explicit = StagedPlan(
            stages=plan.stages, num_micro_batches=MICRO_BATCHES, schedule="explicit", order=listed.order
        )
        rows.append((name, explicit, list_schedule(copies, MICRO_BATCHES, registers).seconds, listed.alive))
    for name, one, copied_s, alive in rows:
        outcome = space.evaluator.evaluate(lower_staged(space, one))
        used = sum(outcome.ranks[kind] for kind in MEMORY).max() / GIB
        print(
            f"{model:11} {name:24} step {1e3 * outcome.step_time_s:8.1f} ms   copies apart {1e3 * copied_s:8.1f} ms   "
            f"{used:5.1f} GiB{'' if outcome.fits else ' (too much)'}   micro-batches held {max(alive)}",
            flush=True,
        )


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="bert-large,gpt2,resnet50")
    given = parser.parse_args()
    small = Problem.build(zoo.build("vgg19"), parse_cluster("2xV100-16GB"), {"global_batch": 2})
    boxing(PlanSpace(small))
    for model in given.models.split(","):
        schedules(model)


if __name__ == "__main__":
    main()
