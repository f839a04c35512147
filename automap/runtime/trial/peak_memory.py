"""The peak memory of the tensors of a process on the CPU, counted storage by storage.

A storage counts from the operator that returns it until the last tensor on it is freed. Temporaries inside kernels and
buffers of libraries do not count. On a GPU, `torch.cuda` counts better. Units: bytes.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts storages while the context is open, including those that exist when it is entered.

    Attributes:
        peak: the largest sum of storages at any time, bytes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._now = 0
        self._known: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch would import its compiler to leave this mode out of it: a second of processor time in each rank. Nothing
        # is compiled while the mode is open.
        return False

    def __enter__(self) -> PeakMemory:
        # A process with torch has half a million objects of some thousand types: types are looked at once.
        objects = gc.get_objects()
        kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor)}
        for found in objects:
            if type(found) in kinds:
                self._add(found)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator and counts the storages of its results."""
        made = func(*args, **(kwargs or {}))
        for found in tree_leaves(made):
            if isinstance(found, Tensor):
                self._add(found)
        return made

    def _add(self, tensor: Tensor) -> None:
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":
            return  # of a tensor of torch's exporter, which says that it is elsewhere
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self._now += size
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size
