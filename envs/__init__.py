"""A plan as a sequence of decisions: gymnasium environments over `automap.space.space.PlanSpace`."""

from envs.decision import Episodes, PlanEnv
from envs.hybrid import HybridEnv
from envs.pipeline import PipelineEnv
from envs.replication import ReplicationEnv
from envs.sharding import ShardingEnv

__all__ = ["Episodes", "HybridEnv", "PipelineEnv", "PlanEnv", "ReplicationEnv", "ShardingEnv"]
