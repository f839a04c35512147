"""Hyperparameters of the DQN, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Hyperparameters:
    """Everything that can be tuned. `benchmarks/dqn_ablation.py` measures what single values are worth."""

    num_envs: int = 16
    """Number of episodes side by side: acting is batched."""
    hidden: tuple[int, ...] = (64, 64)
    """Width of each hidden layer of the network."""
    num_signs: int = 64
    """Number of random signs that tell the decisions of one problem apart, see `PlanVecEnv`."""
    learning_rate: float = 5e-4
    """Learning rate of Adam."""
    batch_size: int = 64
    """Number of decisions in one update."""
    updates_per_step: int = 4
    """Number of updates for one step of all environments: one update for 4 decisions. One for 8 decisions takes half
    the time of learning and some more plans (`benchmarks/dqn_ablation.py`, two updates a step)."""
    buffer_size: int = 30_000
    """Number of decisions in the replay: those of some thousand plans."""
    learning_starts: int = 200
    """Number of decisions before the first update: those of a few plans."""
    target_update: int = 400
    """Number of decisions between two copies of the network into the target network."""
    elite_plans: int = 16
    """Number of best distinct plans whose episodes are kept apart."""
    elite_share: float = 0.25
    """Share of a batch that comes from these episodes."""
    led_share: float = 0.5
    """Share of the episodes that are led to a neighbour of one of the best plans: bounds say little until all stages
    are cut, and a plan that is good but for one end of a stage is hardly met by decisions drawn one by one."""
    cycle_plans: int = 400
    """Number of plans in one exploration cycle. The schedule does not depend on the budget, so that the search can be
    stopped at any time."""
    explored_first: float = 0.3
    """Share of random decisions at the start of a cycle."""
    explored_last: float = 2.0
    """Number of random decisions an episode in the second half of a cycle (`benchmarks/dqn_ablation.py`, one random
    decision)."""
