"""Look-ups and writes by index, and one-hot vectors. Negative indices count from the end."""

from __future__ import annotations

import torch
from torch import Tensor

from automap.runtime.operators.base import Use, function, refuse, torch_dtype


def _wrapped(indices: Tensor, size: int) -> Tensor:
    indices = indices.to(torch.int64)
    return torch.where(indices < 0, indices + size, indices)


def fixed_row(rows: Tensor, ids: Tensor, padding: int | None) -> Tensor:
    """Rows that were looked up, those of the id `padding` without a gradient, as `torch.nn.Embedding` has it."""
    return rows if padding is None else torch.where((ids == padding).unsqueeze(-1), rows.detach(), rows)


@function("Gather")
def gather(use: Use) -> Tensor:
    """The elements of the operand at some indices along `axis`; a constant scalar index is an attribute.

    An attribute `padding_idx`, which no file has, is the row of a table that is not trained by the look-up.
    """
    x = use.x
    axis = use.integer("axis") % max(x.ndim, 1)
    if "indices" in use.attributes:
        return x.select(axis, use.integer("indices"))
    indices = _wrapped(use.operand(1), x.shape[axis])
    rows = x.index_select(axis, indices.reshape(-1))
    rows = rows.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    return fixed_row(rows, indices, use.attributes.get("padding_idx"))


@function("GatherElements")
def gather_elements(use: Use) -> Tensor:
    """One look-up along `axis` for each element of the indices."""
    axis = use.integer("axis") % use.x.ndim
    return torch.gather(use.x, axis, _wrapped(use.operand(1), use.x.shape[axis]))


def _coordinates(indices: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(_wrapped(indices[..., i], shape[i]) for i in range(indices.shape[-1]))


@function("GatherND")
def gather_nd(use: Use) -> Tensor:
    """A look-up by coordinates, which the last dim of the indices holds, after `batch_dims` shared dims."""
    x, indices, shared = use.x, use.operand(1), use.integer("batch_dims")
    places = _coordinates(indices, tuple(x.shape[shared:]))
    if not shared:
        return x[places]
    lead = [
        torch.arange(x.shape[d], device=use.device).reshape([-1 if i == d else 1 for i in range(indices.ndim - 1)])
        for d in range(shared)
    ]
    return x[(*lead, *places)]


@function("ScatterElements", "Scatter")
def scatter_elements(use: Use) -> Tensor:
    """The operand with updates along `axis`: written, or joined by sum, product, maximum or minimum."""
    x, updates = use.x, use.operand(2)
    axis = use.integer("axis") % x.ndim
    indices = _wrapped(use.operand(1), x.shape[axis])
    how = use.text("reduction", "none")
    if how == "none":
        return x.scatter(axis, indices, updates)
    return x.scatter_reduce(axis, indices, updates, _REDUCTIONS[how], include_self=True)


_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@function("ScatterND")
def scatter_nd(use: Use) -> Tensor:
    """The operand with updates at coordinates; of several writes to one element any may remain."""
    x, indices, updates = use.x, use.operand(1), use.operand(2)
    how = use.text("reduction", "none")
    depth = indices.shape[-1]
    if how in ("none", "add"):
        return x.index_put(_coordinates(indices, tuple(x.shape)), updates, accumulate=how == "add")
    lead, tail = x.shape[:depth], x.shape[depth:]
    flat = torch.zeros_like(indices[..., 0])
    for place, size in zip(_coordinates(indices, tuple(x.shape)), lead, strict=True):
        flat = flat * size + place
    rows = x.reshape(-1, *tail)
    index = flat.reshape(-1, *[1] * len(tail)).expand(-1, *tail)
    merged = rows.scatter_reduce(0, index, updates.reshape(-1, *tail), _REDUCTIONS[how], include_self=True)
    return merged.reshape(x.shape)


@function("OneHot")
def one_hot(use: Use) -> Tensor:
    """One-hot vectors; `values` are (off, on), and an index outside the depth gives a row of off."""
    depth = use.integer("depth")
    values = use.floats("values", (0.0, 1.0))
    dtype = torch_dtype(use.text("dtype", "float32"))
    if len(values) != 2:
        raise refuse("OneHot takes two values", values)
    axis = use.integer("axis", -1) % (use.x.ndim + 1)
    hit = _wrapped(use.x, depth).unsqueeze(axis) == torch.arange(depth, device=use.device).reshape(
        [-1 if d == axis else 1 for d in range(use.x.ndim + 1)]
    )
    off, on = torch.tensor(values, dtype=dtype, device=use.device)
    return torch.where(hit, on, off)
