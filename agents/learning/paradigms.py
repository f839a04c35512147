"""The three paradigms of Auto-MAP (arXiv 2007.04069, section 3), each searched by the DQN alone.

In each of them the agent decides one part of a plan; the rest follows the best template. `dqn` decides everything.
"""

from __future__ import annotations

from collections.abc import Callable

from agents.incumbent import Incumbent
from agents.learning.dqn import run_dqn
from agents.sampling.expert import grid_of
from agents.searcher import SearchResult, SearchTask
from automap.space.space import PlanSpace
from envs.decision import Decisions
from envs.pipeline import PipelineDecisions
from envs.replication import ReplicationDecisions
from envs.sharding import ShardingDecisions


def search_sharding(task: SearchTask) -> SearchResult:
    """Operator partition: the signatures of the operators, on the mesh of the best template; see `Searcher`."""
    return _search(task, "sharding", ShardingDecisions)


def search_replication(task: SearchTask) -> SearchResult:
    """Auto data parallelism: replicas, mesh, micro-batches, recomputation and ZeRO of one stage; see `Searcher`."""
    return _search(task, "replication", ReplicationDecisions)


def search_pipeline(task: SearchTask) -> SearchResult:
    """Auto pipeline: stages, cuts, schedule, recomputation and ZeRO; see `Searcher`."""
    return _search(task, "pipeline", PipelineDecisions)


def _search(task: SearchTask, name: str, decisions: Callable[[PlanSpace], Decisions]) -> SearchResult:
    incumbent = Incumbent.begin(task, name)
    run_dqn(incumbent, seed=task.seed, templates=grid_of(incumbent.space), decisions=decisions)
    return incumbent.result(seed=task.seed)
