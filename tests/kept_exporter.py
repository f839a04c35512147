"""PyTorch's newer exporter reads the source of its 500 functions again for each export, which takes 0.7 s; to export a
small model takes 0.5 s. Tests export some hundred models, so each process of tests reads the functions once.
"""

import functools
from typing import Any

import torch.onnx


def keep() -> None:
    """Makes each further export of this process use what the first one has read."""
    export = torch.onnx.export

    @functools.wraps(export)
    def export_with_kept(*args: Any, **options: Any) -> Any:
        # Importing this takes a second, so it is done only if something is exported.
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        if not hasattr(ONNXRegistry.from_torchlib, "cache_info"):
            ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
        return export(*args, **options)

    torch.onnx.export = export_with_kept
