"""Repairs for operators that cannot be read, as errors state them."""

from __future__ import annotations

from collections.abc import Sequence

TWO_SAMPLES = " Or export it with two samples: exporters leave out views that change nothing at one."
"""A further repair if the batch of a file that was exported with one sample cannot be traced."""
CLASSICAL = "ai.onnx.ml."
"""Prefix of the kinds of classical models, such as trees, support vectors and preparation of inputs."""
CLASSICAL_REPAIR = (
    "Operators of ai.onnx.ml are those of classical models, which no gradient trains: hand in the neural network "
    "alone, without what prepares its input or names its classes."
)
SIZED_BY_DATA = ("NonZero", "Unique", "Compress", "NonMaxSuppression", "StringSplit")
"""Kinds with a result whose number of elements depends on the data."""
SORTED_REPAIR = (
    "A mixture of experts that sorts the tokens of all samples by their expert (JetMoE) is read where its export runs "
    "a loop over all experts, or products with one-hot masks, in place of the sort."
)
ROUTED = (
    " An expert of a mixture may read the tokens that chose it by a mask, and add to them at the same mask: "
    "`y[mask] += expert(x[mask]) * weights[mask, None]`, where `mask` is `(chosen == expert).any(-1)`."
)
"""A further repair for NonZero, which experts compute that read only their tokens."""
SELF_LOOPS = (
    " Layers of graph networks write it where they add self-loops to the edges: put these among the edges of the data, "
    "and export with `add_self_loops=False`."
)
"""A further repair for NonZero, which torch_geometric's `add_remaining_self_loops` computes."""
MIXED_SAMPLES = (
    " If it is the batch, the model combines samples with each other here, which no plan can divide: write this part "
    "so that it stays within each sample."
)
"""A further repair for operators that sum over what is taken for samples."""


def repair_of_unknown(kind: str, outputs: Sequence[str]) -> str:
    """The repair for an operator outside the table whose results have no shapes."""
    if kind in SIZED_BY_DATA:
        repair = f"{kind} gives as much as the data holds: export with a mask, or with TopK of a fixed number, instead."
        return f"{repair}{ROUTED}{SELF_LOOPS}" if kind == "NonZero" else repair
    where = f"State the shape of {', '.join(outputs[:3])} in the file (graph.value_info): it is then read, replicated."
    if kind.startswith("com.microsoft."):
        return f"ONNX Runtime wrote this file for inference: hand in the one that the exporter wrote. Or: {where}"
    if kind.startswith(CLASSICAL):
        return f"{CLASSICAL_REPAIR} Or: {where}"
    return where
