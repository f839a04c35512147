"""A plan as a sequence of decisions: gymnasium environments over `automap.space.space.PlanSpace`.

    gymnasium.make("automap/Hybrid-v0", problem=problem)

makes one of them by its name: `automap/Hybrid-v0`, `automap/Sharding-v0`, `automap/Replication-v0` or
`automap/Pipeline-v0`.
"""

import gymnasium

from envs.decision import Episodes, PlanEnv
from envs.hybrid import HybridEnv
from envs.pipeline import PipelineEnv
from envs.replication import ReplicationEnv
from envs.sharding import ShardingEnv

__all__ = ["Episodes", "HybridEnv", "PipelineEnv", "PlanEnv", "ReplicationEnv", "ShardingEnv"]

for _kind in (HybridEnv, ShardingEnv, ReplicationEnv, PipelineEnv):
    _name = f"automap/{_kind.__name__.removesuffix('Env')}-v0"
    if _name not in gymnasium.registry:
        gymnasium.register(_name, f"{_kind.__module__}:{_kind.__name__}")
