"""A plan as a sequence of decisions: gymnasium environments over `automap.space.PlanSpace`."""

from envs.decision import HybridEnv, PlanEnv
from envs.pipeline import PipelineEnv
from envs.sharding import ShardingEnv

__all__ = ["HybridEnv", "PipelineEnv", "PlanEnv", "ShardingEnv"]
