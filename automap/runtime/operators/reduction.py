"""Reductions, scans and selections."""

from __future__ import annotations

import torch
from torch import Tensor

from automap.runtime.operators.base import FUNCTIONS, Use, function
from ir.factors import BROADCAST

FUNCTIONS["Trilu"] = lambda use: (torch.triu if use.integer("upper", 1) else torch.tril)(use.x, use.integer("k"))


HOW = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")


@function(*(f"Reduce{how}" for how in HOW))
def reduce(use: Use) -> Tensor:
    """The reduction over `axes`, which are all named; none = nothing is reduced."""
    x, rows, dims, keep = use.x, use.rows, use.ints("axes"), bool(use.integer("keepdims", 1))
    how = use.kind.removeprefix("Reduce")
    if how == "Prod":
        for dim in sorted(dims, reverse=True):
            x = x.prod(dim, keepdim=keep)
        return rows.product(x)
    if how in ("L1", "L2", "SumSquare"):
        x = x.abs() if how == "L1" else x * x
    if not dims:
        found = x
    elif how in ("Max", "Min"):
        found = (torch.amax if how == "Max" else torch.amin)(x, dims, keepdim=keep)
        if rows.is_split:
            sign = 1 if how == "Max" else -1
            # The gradient goes to the ranks that hold the extreme element.
            top = sign * rows.largest(sign * found)
            found = torch.where(found == top, found, top)
    elif how == "Mean":
        found = rows.mean(x, dims, BROADCAST, keep=keep)
    elif how == "LogSumExp":
        if not rows.is_split:
            return torch.logsumexp(x, dims, keepdim=keep)
        top = rows.largest(x.amax(dims, keepdim=True))
        total = rows.total(torch.exp(x - top).sum(dims, keepdim=keep), BROADCAST)
        return torch.log(total) + top.reshape(total.shape)
    else:
        found = rows.total(x.sum(dims, keepdim=keep, dtype=x.dtype), BROADCAST)
    if how == "L2":
        return torch.sqrt(found)
    return torch.log(found) if how == "LogSum" else found


@function("ArgMax", "ArgMin")
def arg(use: Use) -> Tensor:
    """The position of the largest or smallest element; of equal ones the first, or with an attribute the last."""
    x, axis, keep = use.x, use.integer("axis") % use.x.ndim, bool(use.integer("keepdims", 1))
    made = torch.argmax if use.kind == "ArgMax" else torch.argmin
    if not use.integer("select_last_index"):
        return made(x, axis, keepdim=keep)
    return x.shape[axis] - 1 - made(x.flip(axis), axis, keepdim=keep)


@function("CumSum", "CumProd")
def scan(use: Use) -> Tensor:
    """The running sum or product, from either end, with or without the element itself."""
    axis = use.integer("axis") % use.x.ndim
    x = use.x.flip(axis) if use.integer("reverse") else use.x
    if use.integer("exclusive"):
        first = torch.zeros_like if use.kind == "CumSum" else torch.ones_like
        x = torch.cat([first(x.narrow(axis, 0, 1)), x.narrow(axis, 0, x.shape[axis] - 1)], axis)
    found = (x.cumsum if use.kind == "CumSum" else x.cumprod)(axis).to(x.dtype)
    return found.flip(axis) if use.integer("reverse") else found


@function("TopK")
def top_k(use: Use) -> list[Tensor]:
    """The k largest or smallest values, sorted, and their positions; of equal values the first."""
    axis, largest = use.integer("axis", -1), bool(use.integer("largest", 1))
    _, order = torch.sort(use.x, stable=True, dim=axis, descending=largest)
    places = order.narrow(axis, 0, use.integer("k"))
    return [use.x.gather(axis, places), places]


@function("DFT")
def fourier(use: Use) -> Tensor:
    """The Fourier transform; the last dim holds real and imaginary parts. A one-sided spectrum is its first half."""
    x, axis = use.x, use.integer("axis")
    wide = x if x.dtype == torch.float64 else x.float()
    signal = wide[..., 0] if x.shape[-1] == 1 else torch.complex(wide[..., 0], wide[..., 1])
    inverse, onesided = use.integer("inverse"), use.integer("onesided")
    length = use.integer("dft_length") or (2 * (x.shape[axis] - 1) if inverse and onesided else x.shape[axis])
    found: Tensor
    if inverse and onesided:
        found = torch.fft.irfft(signal, length, axis).unsqueeze(-1)
    elif onesided:
        found = torch.view_as_real(torch.fft.rfft(signal, length, axis))
    else:
        found = torch.view_as_real((torch.fft.ifft if inverse else torch.fft.fft)(signal, length, axis))
    return found.to(x.dtype)


@function("STFT")
def windowed_fourier(use: Use) -> Tensor:
    """The Fourier transforms of the windows of a signal; the last dim holds real and imaginary parts."""
    x, window, length = use.x, use.optional(2), use.integer("frame_length")
    wide = x if x.dtype == torch.float64 else x.float()
    if x.ndim == 3:
        wide = torch.view_as_complex(wide.contiguous()) if x.shape[2] == 2 else wide[..., 0]
    frames = wide.unfold(1, length, use.integer("frame_step"))
    if window is not None:
        frames = frames * window
    transform = torch.fft.rfft if use.integer("onesided", 1) else torch.fft.fft
    return torch.view_as_real(transform(frames)).to(x.dtype)
