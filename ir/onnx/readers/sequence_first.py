"""Finds the batch dims of inputs whose leading dim is the sequence.

PyTorch's layers of attention have the sequence first unless `batch_first=True` is given: `nn.Transformer` and
`nn.TransformerEncoder` read `[sequence, batch, features]`, and padding masks `[batch, sequence]`. Nothing in a file
says so; but with the sequence as the batch, attention combines samples, and the file cannot be read.
"""

from __future__ import annotations

from collections.abc import Sequence

from ir.onnx.readers.nodes import Source

WEIGHTS = ("PARAMETER", "BUFFER")
"""Marks of inputs that hold no data."""
ATTENTION = ("Softmax", "Attention")
"""Kinds of which one is in every file with attention."""


def sequence_first(source: Source) -> dict[str, int | None]:
    """The batch dims of the data inputs if the second dim of the first one that has two is the batch.

    Args:
        source: the file.

    Returns:
        name of an input -> its batch dim: 1 where its second dim has the size of the batch, else 0 where its leading
        dim has, else None (an input that is the same for all samples). Empty if no input has two dims, or if the file
        has no attention.
    """
    used = {name for node in source.nodes for name in node.inputs}
    data: dict[str, Sequence[int | str]] = {
        name: declared.shape or ()
        for name, declared in source.inputs.items()
        if name in used and declared.kind not in WEIGHTS and not declared.is_read_as_weight
    }
    size = next((shape[1] for shape in data.values() if len(shape) > 1), None)
    if size is None or not any(node.kind in ATTENTION for node in source.nodes):
        return {}
    fits = {name: [dim for dim in (1, 0) if len(shape) > dim and shape[dim] == size] for name, shape in data.items()}
    return {name: dims[0] if dims else None for name, dims in fits.items()}
