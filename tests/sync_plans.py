"""Plans of a small decoder whose replicas may be apart."""

from small_graphs import build_gpt

from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.space.templates import megatron_signatures

MODES = ("synchronous", "local_sgd", "dasgd")
SLOW = "4x1xV100-16GB@10Gbit"
"""Where an all-reduce takes longer than a step."""


def space_of(graph=None, cluster=SLOW, batch=16, **training):
    settings = {"precision": "fp32", "sync_modes": list(MODES), "sync_period": 64, **training}
    problem = Problem.build(
        graph or build_gpt(hidden=512, vocab=8192), parse_cluster(cluster), {"global_batch": batch, **settings}
    )
    return PlanSpace(problem)


def plan_of(space, *, pp=1, tp=1, micro=1, zero=0):
    """A plan in Megatron's manner, and its choice."""
    shape = next(
        s for s in space.shapes if (s.pp, s.tp, s.virtual, s.num_micro_batches) == (pp, tp, 1, micro)
        and s.replicas * s.tp * s.pp == space.problem.cluster.num_devices
    )  # fmt: skip
    prefix = space.even_values(shape, recompute="none", zero=zero)
    values = megatron_signatures(space, shape, prefix, sequence_parallel=False, expert_axis="")
    return space.decode(values), space.lowered(values)
