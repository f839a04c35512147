"""What the trainer must know of the modules of a network: their kinds, blocks and shared parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal

from torch import nn

LOSS = ""
"""The path that stands for the loss among paths of modules."""


def role_of(module: nn.Module) -> Literal["linear", "embedding", "norm"] | None:
    """The known kind of a module, None for others; `Conv1D` is the linear layer of the transformers library."""
    if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.endswith(("RMSNorm", "LayerNorm")):
        return "norm"
    return None


def tied_names(module: nn.Module) -> dict[str, str]:
    """Name of a shared parameter -> the first name of the same parameter."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            found[name] = first[id(parameter)]
    return found


def is_called(module: nn.Module) -> bool:
    """Whether a module has code of its own; lists and dictionaries of modules have none, and are never called."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def unit_paths(module: nn.Module) -> list[str]:
    """The paths of the repeated blocks of a network: children of module lists, none inside another.

    Of a list or a dictionary among these children, its own children are the blocks.
    """
    found: list[str] = []
    for path, child in module.named_modules():
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            for name, block in child.named_children():
                inner = f"{path}.{name}" if path else name
                is_inside = any(inner.startswith(f"{p}.") for p in found)
                if is_called(block) and not is_inside and any(True for _ in block.parameters()):
                    found.append(inner)
    return found


def called_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that code calls, and whose hooks run. A plain `nn.Module` only holds the part of a module that is in
    a pipeline stage: its children are returned in its place."""
    if type(module) is nn.Module:
        for child in module.children():
            yield from called_parts(child)
    else:
        yield module


def unshared(module: nn.Module, parts: Iterable[nn.Module]) -> list[nn.Module]:
    """The parts of a network that share no parameter with each other or with the code around all of them."""
    parts = list(parts)
    inside = {inner for part in parts for inner in part.modules()}
    around = [child for child in module.modules() if child not in inside]
    holders = Counter(p for part in parts for p in part.parameters())
    holders.update(p for child in around for p in child.parameters(recurse=False))
    return [part for part in parts if all(holders[p] == 1 for p in part.parameters())]
