"""The device of each rank of a test: the CPU, or with `pytest --device cuda` a GPU.

Where there are fewer GPUs than ranks, ranks share them; NCCL allows that since 2.30, with `NCCL_MULTI_RANK_GPU_ENABLE`.
Torch is imported where it is used: pytest calls `choose` before it starts the processes that run tests.
"""

import datetime
import os
from pathlib import Path

KIND, SHARED = "AUTOMAP_TEST_DEVICE", "NCCL_MULTI_RANK_GPU_ENABLE"
"""The environment variables that ranks inherit."""


def choose(kind):
    """Makes all processes that follow take devices of a kind, `cpu` or `cuda`; called before any CUDA function."""
    os.environ[KIND] = kind
    if kind == "cpu":
        # The trainer takes a GPU where there is one.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        os.environ[SHARED] = "1"


def meet(rank, size, folder, *, limit_s=60):
    """Joins the ranks of a test, which meet in a file of a folder; returns the device of this one."""
    import torch
    import torch.distributed as dist

    kind = os.environ.get(KIND, "cpu")
    device = torch.device("cpu")
    if kind == "cuda":
        number = rank % torch.cuda.device_count()
        os.environ["LOCAL_RANK"] = str(number)
        torch.cuda.set_device(number)
        device = torch.device("cuda", number)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    limit = datetime.timedelta(seconds=limit_s)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=size, timeout=limit
    )
    return device


def on_cpu(found):
    """Results of a rank with all tensors on the CPU, so that any process can load them."""
    import torch

    if isinstance(found, torch.Tensor):
        return found.cpu()
    if isinstance(found, dict):
        return {key: on_cpu(value) for key, value in found.items()}
    return [on_cpu(value) for value in found] if isinstance(found, list) else found
