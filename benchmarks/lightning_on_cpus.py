"""Lightning's Trainer with the files that are exported for plain PyTorch, on processes of a host without accelerators.

The module is the one of docs/exports.md. `train_exports.py` calls it on each process of torchrun.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def train(
    folder: Path,
    net: nn.Module,
    data: tuple[Tensor, Tensor],
    loss: Callable[[Any, Tensor], Tensor],
    optimizer_of: Callable[[Any], torch.optim.Optimizer],
    steps: int,
) -> list[float]:
    """[steps] losses.

    Args:
        folder: the exported files.
        net: the network, alike on every process.
        data: inputs and labels of the global batch, which each step takes.
        loss: the mean loss of the results and labels.
        optimizer_of: makes the optimizer of the parameters.
        steps: number of steps.
    """
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    sys.path.insert(0, str(folder))
    from plan_loader import Training

    losses: list[float] = []

    class Planned(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = net

        def configure_model(self) -> None:
            self.planned = Training(self.net, loss, folder)
            self.net = nn.ModuleList(self.planned.stages)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.planned.parameters())

        def train_dataloader(self) -> Any:
            dataset, planned = TensorDataset(*data), self.planned
            sampler = DistributedSampler(dataset, planned.replicas, planned.replica, shuffle=False)
            return DataLoader(dataset, planned.samples, sampler=sampler, drop_last=True)

        def training_step(self, batch: list[Tensor], number: int) -> None:
            losses.append(self.planned.step(*batch))
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()

    processes = int(os.environ["WORLD_SIZE"])
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=ModelParallelStrategy(data_parallel_size=processes, tensor_parallel_size=1),
        use_distributed_sampler=False,
        max_epochs=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Planned())
    return losses
