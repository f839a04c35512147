"""Optimizers that look at whole weights, refused where a process has parts of weights that they would take for whole.

Adafactor keeps means of rows and columns, Muon makes matrices orthogonal. With parts of matrices they would train
another way, and say nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from automap.errors import PlanError

FAILING = ("Adafactor",)
"""Classes of optimizers that fail on DTensors in torch 2.13 (`_NormPartial` of an operation in place)."""
BY_WHOLE_WEIGHTS = ("Adafactor", "Muon")
"""Classes of optimizers that look at whole weights, by name: transformers and others have their own Adafactor."""


def refuse_optimizers(trainer: object, parts: Iterable[Tensor], kinds: Collection[str]) -> None:
    """Makes steps of some kinds of optimizers fail by name where they hold parts of weights, as long as a trainer
    exists.

    Args:
        trainer: the trainer.
        parts: its parameters of which this process has a part.
        kinds: names of classes of optimizers.
    """
    held = WeakIdKeyDictionary(dict.fromkeys(parts))

    def check(optimizer: Optimizer, *unused: Any) -> None:
        name = type(optimizer).__name__
        if name in kinds and any(p in held for group in optimizer.param_groups for p in group["params"]):
            raise PlanError(
                "looks at whole weights, and this process has parts of them", field="optimizer", value=name,
                repair='Search with hints.fix {"zero": 0, "tp": 1}, or take AdamW or SGD.',
            )  # fmt: skip

    weakref.finalize(trainer, register_optimizer_step_pre_hook(check).remove)
