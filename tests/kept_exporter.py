"""PyTorch's newer exporter reads the source of its 500 functions again for each export, which takes 0.7 s, and looks up
torch's composite operators some fifty times; to export a small model takes 0.5 s. Tests export some hundred models, so
each process of tests reads the functions and looks up the operators once.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch.onnx


def keep() -> None:
    """Makes each further export of this process use what the first one has read."""
    export = torch.onnx.export

    @functools.wraps(export)
    def export_with_kept(*args: Any, **options: Any) -> Any:
        # Importing this takes a second, so it is done only if something is exported.
        from torch._export import utils
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        if not hasattr(ONNXRegistry.from_torchlib, "cache_info"):
            ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
            utils._materialize_cpp_cia_ops = _when_there_are_others(utils._materialize_cpp_cia_ops)
        return export(*args, **options)

    torch.onnx.export = export_with_kept


def _when_there_are_others(look_up: Callable[[], None]) -> Callable[[], None]:
    """`look_up`, which looks up all composite operators, run only if there are others than when it ran before."""
    known: list[str] = []

    def run() -> None:
        listed = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if listed != known:
            known[:] = listed
            look_up()

    return run
