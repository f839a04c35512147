"""Checks that a configuration is for the model that is priced: number and sizes of layers, and tokens of a sample."""

from __future__ import annotations

from automap.errors import PlanError
from automap.export.configuration import numbered_layers, shape_of
from automap.export.decoder import decoder_of
from automap.export.stated import Stated, refuse
from automap.price.degrees import sequence_length
from automap.price.evaluator import Evaluator
from ir.layers import is_one_stack


def check_model(stated: Stated, name: str, evaluator: Evaluator) -> None:
    """Refuses a configuration whose sizes of layers are not those of the model, as far as both state them.

    Args:
        stated: the configuration.
        name: name of its file.
        evaluator: of the model.

    Raises:
        PlanError: a size differs; names it, and what the model has.
    """
    graph, blocks = evaluator.problem.graph, evaluator.blocks
    tokens = sequence_length(graph)
    layers = numbered_layers(graph, blocks)
    repair = f"Give the model of {name}, or the configuration of this one."
    count = sum(map(len, layers.values()))
    if is_one_stack(graph, blocks):
        if stated.num_layers not in (None, count):
            raise refuse("--num-layers", stated.num_layers, f"the model has {count}", repair)
        for flag, size in _sizes(evaluator).items():
            if size is not None and stated.sizes.get(flag, size) != size:
                raise refuse(f"--{flag}", stated.sizes[flag], f"the model has {size}", repair)
    if stated.tokens not in (None, tokens) and tokens is not None:
        repair = f"Export the model with that length, or choose it: zoo:NAME:seq_len={stated.tokens}."
        raise PlanError(f"{name} has other samples", field="seq_len", value=stated.tokens, repair=repair)


def _sizes(evaluator: Evaluator) -> dict[str, int | None]:
    """Sizes of the model by Megatron-LM's names; None where the graph does not say them plainly."""
    graph, blocks = evaluator.problem.graph, evaluator.blocks
    shape = shape_of(graph, blocks, numbered_layers(graph, blocks))
    found = decoder_of(graph, blocks, shape.hidden, shape.heads)
    # Layers without experts have the width that those with experts take by default.
    width = found.ffn if shape.experts == 0 or not all(shape.has_experts) else None
    return {
        "hidden-size": shape.hidden,
        "num-attention-heads": shape.heads,
        "ffn-hidden-size": width,
        "num-query-groups": found.kv_heads,
        "num-experts": max(1, shape.experts),
        "moe-router-topk": shape.top_k or None,
        "moe-ffn-hidden-size": found.expert_ffn,
        "moe-shared-expert-intermediate-size": found.shared_ffn,
    }
