"""A plan as a sequence of decisions: gymnasium environments over `automap.space.space.PlanSpace`.

    gymnasium.make("automap/Hybrid-v0", problem=problem)

makes one of them by its name: `automap/Hybrid-v0`, `automap/Sharding-v0`, `automap/Replication-v0` or
`automap/Pipeline-v0`; and `automap/Placement-v0` over the placements of an `automap.gnn.problem.GnnProblem`.
"""

import gymnasium

from envs.decision import Episodes, PlanEnv
from envs.hybrid import HybridEnv
from envs.pipeline import PipelineEnv
from envs.placement import PlacementEnv
from envs.replication import ReplicationEnv
from envs.sharding import ShardingEnv

__all__ = ["Episodes", "HybridEnv", "PipelineEnv", "PlacementEnv", "PlanEnv", "ReplicationEnv", "ShardingEnv"]

for _kind in (HybridEnv, ShardingEnv, ReplicationEnv, PipelineEnv, PlacementEnv):
    _name = f"automap/{_kind.__name__.removesuffix('Env')}-v0"
    if _name not in gymnasium.registry:
        gymnasium.register(_name, f"{_kind.__module__}:{_kind.__name__}")
