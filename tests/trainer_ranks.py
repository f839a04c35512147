"""What ranks do in the tests of the module trainer; imported once by the process that they are forked from."""

import datetime
import importlib.util
import multiprocessing
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from automap.plan import Plan
from automap.runtime.trainer import IGNORED, parallelize
from ir import zoo

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_gpt.py"
SIZES = {"layers": 2, "hidden": 16, "heads": 4, "seq_len": 8, "vocab_size": 24}
MODEL = "gpt:" + ",".join(f"{key}={value}" for key, value in SIZES.items())
BATCH = 8


def build():
    """The network of the example, with values far from any symmetry."""
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    gpt = module.Gpt(**SIZES).double()
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return gpt


def batch(seed=1):
    """Inputs and labels; samples have unequal numbers of labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, SIZES["vocab_size"], (BATCH, SIZES["seq_len"]), generator=generator)
    labels = torch.randint(0, SIZES["vocab_size"], ids.shape, generator=generator)
    for sample in range(BATCH):
        labels[sample, : sample % 5] = IGNORED
    return ids, labels


def run(name, document, folder, resume):
    """Losses of a step and, after it, of one more; weights in between are saved."""
    plan = Plan.from_json(document)
    trainer = parallelize(build(), plan, zoo.build(MODEL))
    optimizer = torch.optim.SGD(trainer.parameters(), lr=1.0, momentum=0.9)
    step = trainer.load(Path(folder) / resume, optimizer, step=0)["step"] if resume else 1
    losses = []
    for number in range(step, 3):
        losses.append(trainer.step(*(x[trainer.rows] for x in batch(number))))
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            trainer.save(Path(folder) / name, optimizer, step=2)
    return losses


def _rank(rank, size, folder, cases):
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
    found = []
    for case in cases:
        try:
            found.append(run(*case))
        except Exception:
            found.append(traceback.format_exc())  # the parent judges it
            break
    torch.save(found, Path(folder) / f"{rank}.pt")
    if len(found) == len(cases) and not isinstance(found[-1], str):
        dist.destroy_process_group()
    os._exit(0)


def run_ranks(size, cases, folder):
    """[rank][case] what `run` returns, or a traceback behind which nothing more was run."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    multiprocessing.set_forkserver_preload(["trainer_ranks"])
    try:
        mp.start_processes(_rank, (size, str(folder), cases), size, start_method="forkserver")
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(size)]
