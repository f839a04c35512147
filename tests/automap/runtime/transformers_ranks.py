"""Trains tiny models of transformers by plans, under torchrun; prints the losses of each as a line of JSON.

torchrun ... transformers_ranks.py FOLDER...    # each with config.json, model.onnx and plan.json
"""

import copy
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from automap.plan import Plan
from automap.runtime.trainer import parallelize
from automap.runtime.transformers_models import from_config


def train(folder: Path) -> dict[str, object]:
    """Losses of two steps, and the first of one process."""
    torch.manual_seed(0)
    module, examples = from_config(str(folder))()
    plan = Plan.from_json(json.loads((folder / "plan.json").read_text()))
    generator = torch.Generator().manual_seed(1)
    data = []
    for x in examples.values():
        shape = (plan.training.global_batch, *x.shape[1:])
        is_float = x.is_floating_point()
        data.append(
            torch.rand(shape, generator=generator) if is_float else torch.randint(200, shape, generator=generator)
        )
    with torch.no_grad():
        scores = copy.deepcopy(module)(**dict(zip(examples, data, strict=True))).logits
    labels = torch.randint(scores.shape[-1], scores.shape[:-1], generator=generator)
    trainer = parallelize(module, plan, folder / "model.onnx")
    optimizer = torch.optim.SGD([p for group in trainer.parameters() for p in group["params"]], lr=0.1)
    losses = []
    for _ in range(2):
        losses.append(trainer.step(*(x[trainer.rows] for x in data), labels[trainer.rows]))
        optimizer.step()
        optimizer.zero_grad()
    return {"wanted": F.cross_entropy(scores.flatten(0, -2), labels.flatten()).item(), "losses": losses}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        found = train(Path(name))
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()
