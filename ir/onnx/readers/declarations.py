"""Reads the declarations of values: dtype, sizes or names of dims, and the exporter's mark."""

from __future__ import annotations

from typing import Any

from ir.errors import refuse
from ir.onnx.readers.nodes import KIND_KEY, UNKNOWN_DIM, Declared, dtype_name, metadata


def declared(value: Any) -> Declared:
    """The declared type of a value; dims with neither size nor name are named after their position.

    Raises:
        ModelError: the value is not a tensor.
    """
    if not value.type.HasField("tensor_type"):
        if value.type.WhichOneof("value") is None:
            return Declared(None, "float32")
        raise refuse(
            "a value is not a tensor",
            value.name,
            "Export with tensors only, no sequences or maps (skl2onnx: options={'zipmap': False}).",
        )
    tensor = value.type.tensor_type
    shape: tuple[int | str, ...] | None = None
    if tensor.HasField("shape"):
        shape = tuple([_size(dim, f"{value.name}.{i}") for i, dim in enumerate(tensor.shape.dim)])
    dtype = dtype_name(tensor.elem_type) if tensor.elem_type else "float32"
    return Declared(shape, dtype, metadata(value).get(KIND_KEY, ""))


def _size(dim: Any, name: str) -> int | str:
    """The size of a dim, or its name; `name` if the file states neither."""
    if dim.WhichOneof("value") == "dim_value" and dim.dim_value != UNKNOWN_DIM:
        size: int = dim.dim_value
        return size
    text: str = dim.dim_param
    return text or name
