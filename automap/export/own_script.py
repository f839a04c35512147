"""Trains a network by the plan beside this file: `build` and `batch` are yours, see docs/training.md of AutoMAP."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automap.plan import Plan
from automap.runtime.trainer import parallelize

MODEL = "model.onnx"  # what was searched: an ONNX file, zoo:NAME or hf:FOLDER
STEPS, CHECKPOINT = 100, Path("checkpoint")


def build() -> nn.Module:
    """Your network, built alike on every process, with the names of the modules of MODEL."""
    raise NotImplementedError("return the network that MODEL was exported from")


def batch(step: int, samples: int) -> tuple[Tensor, ...]:
    """The inputs of a global batch of `samples` samples, in the order of MODEL, and after them the labels."""
    raise NotImplementedError("return the inputs and the labels of a step")


def main() -> None:
    """Trains for STEPS steps, from the checkpoint if there is one, and writes a checkpoint."""
    plan = Plan.from_json(json.loads(Path(__file__).with_name("automap_plan.json").read_bytes()))
    trainer = parallelize(build(), plan, MODEL)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=3e-4)
    first = trainer.load(CHECKPOINT, optimizer, step=0)["step"] if CHECKPOINT.exists() else 0
    for step in range(first, STEPS):
        loss = trainer.step(*(x[trainer.rows] for x in batch(step, plan.training.global_batch)))
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.4f}", flush=True)
    trainer.save(CHECKPOINT, optimizer, step=STEPS)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
