"""The number format in which a GPU multiplies operands of four bytes."""

from __future__ import annotations

import torch


def set_tf32(*, on: bool) -> None:
    """Products and convolutions of float32 operands in TF32, or in full float32, for this whole process.

    Both have their own switch in PyTorch, and by default convolutions alone use TF32 (documentation of
    `torch.backends`).
    """
    torch.backends.cuda.matmul.allow_tf32 = on
    torch.backends.cudnn.allow_tf32 = on


LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Number formats of 2 bytes by precision."""


def low_precision(precision: str | None) -> torch.dtype | None:
    """The number format of 2 bytes of a precision, if it has one."""
    return LOW.get(precision or "")
