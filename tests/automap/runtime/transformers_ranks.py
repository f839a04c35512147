"""Trains tiny models of transformers by plans, under torchrun; prints the losses of each as a line of JSON.

torchrun ... transformers_ranks.py FOLDER...    # each with config.json, model.onnx and plan.json
"""

import copy
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from automap.plan import Plan
from automap.runtime.trainer import parallelize
from automap.runtime.transformers_models import from_config

RATE, STEPS = 0.1, 3


def train(folder: Path) -> dict[str, object]:
    """Losses of two steps, and those of one process."""
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
    alone, named = copy.deepcopy(module), dict(zip(examples, data, strict=True))
    with torch.no_grad():
        shape = alone(**named).logits.shape
    labels = torch.randint(shape[-1], shape[:-1], generator=generator)
    optimizer = torch.optim.SGD(alone.parameters(), lr=RATE)
    wanted = []
    for _ in range(STEPS):
        loss = F.cross_entropy(alone(**named).logits.flatten(0, -2), labels.flatten())
        wanted.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if plan.training.target == "pytorch":
        return {"wanted": wanted, "losses": train_plainly(folder, module, named, labels)}
    trainer = parallelize(module, plan, folder / "model.onnx")
    optimizer = torch.optim.SGD([p for group in trainer.parameters() for p in group["params"]], lr=RATE)
    losses = []
    for _ in range(STEPS):
        losses.append(trainer.step(*(x[trainer.rows] for x in data), labels[trainer.rows]))
        optimizer.step()
        optimizer.zero_grad()
    return {"wanted": wanted, "losses": losses}


def train_plainly(folder: Path, module: torch.nn.Module, inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> Any:
    """Losses of the steps by the loader that is exported for plain PyTorch."""
    sys.path.insert(0, str(folder / "files"))
    spec = importlib.util.spec_from_file_location("plan_loader", folder / "files" / "plan_loader.py")
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    module.config.use_cache = False
    training = loader.Training(
        module, lambda found, labels: F.cross_entropy(found.logits.flatten(0, -2), labels.flatten())
    )
    optimizer = torch.optim.SGD(training.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        losses.append(training.step(*inputs.values(), labels))
        optimizer.step()
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    for name in sys.argv[1:]:
        found = train(Path(name))
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()
