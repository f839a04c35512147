"""Hyperparameters of the DQN, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Hyperparameters:
    """Everything that can be tuned. `benchmarks/dqn_ablation.py` measures what single values are worth."""

    num_envs: int = 8
    """Number of episodes side by side: acting is batched."""
    hidden: tuple[int, ...] = (128, 128)
    """Width of each hidden layer of the network."""
    learning_rate: float = 5e-4
    """Learning rate of Adam."""
    dropout: float = 0.0
    """Share of the outputs of a hidden layer that are left out in an update."""
    weight_decay: float = 0.01
    """Weight decay of AdamW."""
    taught_weight: float = 1.0
    """Weight of the cross-entropy of a teacher's actions beside the loss of the targets."""
    batch_size: int = 128
    """Number of decisions in one update."""
    train_every: int = 2
    """Number of steps of all environments between two trainings: one update for 16 decisions takes a fifth of the
    time."""
    updates_per_step: int = 1
    """Number of updates in a training."""
    buffer_size: int = 30_000
    """Number of decisions in the replay: those of some hundred plans."""
    learning_starts: int = 200
    """Number of decisions before the first update: those of a few plans."""
    target_update: int = 400
    """Number of decisions between two copies of the network into the target network."""
    revisions: float = 0.7
    """Share of the episodes that change a few decisions of a good plan, see `agents.learning.exploration`; the others
    decide all of a plan but its mesh. Chosen by hand."""
