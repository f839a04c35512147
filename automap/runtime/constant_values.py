"""Keeps the values of constants that a forward method creates, while a module on the meta device is exported.

Code such as `x[:, [-2]]` or `torch.tensor(limit, device=x.device)` creates a tensor on the device of its inputs. On the
meta device this tensor would have no values, and neither would the constant in the exported file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

META = torch.device("meta")


class ConstantValues(TorchFunctionMode):
    """A context in which constants are created on the CPU and then moved to the meta device. The trace contains the
    move, so the constants keep their values."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs `func`, with values for the constants that it makes."""
        given = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0] if args else None, Tensor | None):
            device = given.get("device")
            if device is not None and torch.device(device) == META:
                return func(*args, **{**given, "device": "cpu"}).to(META)
        elif func is Tensor.new_tensor and args[0].device == META and not isinstance(args[1], Tensor):
            kind = given.pop("dtype", None) or args[0].dtype
            return torch.tensor(args[1], dtype=kind, **{**given, "device": "cpu"}).to(META)
        elif func is Tensor.__getitem__ and args[0].device == META:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return func(args[0], tuple(_positions(part) for part in index))
        return func(*args, **given)


def _positions(part: object) -> object:
    """A part of an index, as a tensor of positions where it is a list of numbers or of truth values."""
    if not isinstance(part, list) or not part or not all(isinstance(value, int) for value in part):
        return part
    chosen = [i for i, value in enumerate(part) if value] if isinstance(part[0], bool) else part
    return torch.tensor(chosen, dtype=torch.int64).to(META)
