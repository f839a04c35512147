"""Megatron-LM: arguments of its pretraining scripts, as a bash array and as the YAML map of its functional tests.

Names of flags: megatron/training/arguments.py. NUM_NODES and GPUS_PER_NODE are what the runner of these tests starts
(tests/functional_tests/shell_test_utils/_run_training.sh). A layout has one part a virtual stage: E embedding, t layer,
L loss.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from automap.errors import PlanError
from automap.export.configuration import Export, ModelShape, Note, Run, header
from automap.export.decoder import Decoder, decoder_of
from automap.export.pretraining import Pretraining, pretraining_of
from automap.price.visible_keys import has_ring
from automap.trainers import Trainer

Flag = tuple[str, str | None]
"""A flag and its value, None for one without."""
YOURS = (
    "Data, tokenizer, learning rate and checkpoints are yours: add their arguments.",
    "So is what a model without its weights does not say, such as --rotary-base, --norm-epsilon, dropout and windows.",
)
"""Lines at the top of the script that say what is left to the user."""
SIDE_BY_SIDE = (
    "Attention and MLP stand side by side in a layer: Megatron-LM has such layers by a specification (--spec)."
)
"""The line over a model of parallel layers, which no argument asks for."""
RELU = "Layers have ReLU, for which Megatron-LM has no argument: set activation_func of its TransformerConfig in code."
"""The line over a model whose MLPs have it; without an argument Megatron-LM takes GELU."""
PAIRED_CONNECTIONS = 32
"""CUDA_DEVICE_MAX_CONNECTIONS where passes run in pairs: as Megatron-Bridge sets it with moe_a2a_overlap. With 1, the
usual value, kernels wait for exchanges that were launched before them."""
UNTOLD = "The graph does not say these plainly. State them: by default Megatron-LM may train another model."
"""The line over the arguments that a graph does not say plainly."""


def write(run: Run) -> Export:
    """The files of a run.

    Raises:
        PlanError: a setting that Megatron-LM has no words for.
    """
    layers = decoder_of(run.problem.graph, run.evaluator.blocks, run.shape.hidden, run.shape.heads)
    pretraining = pretraining_of(run.problem.graph, run.evaluator.blocks)
    if layers.positions == "relative" and pretraining.stacks is None:
        layers = replace(layers, positions=None)  # The models of the other scripts have no such positions.
    parallel, model = list(_parallel(run)), [*_sizes(run, pretraining), *_model(run), *_layers(layers, run.shape)]
    untold = _untold(layers, run.shape)
    default = f"-{pretraining.script}" if pretraining.script else "?names the script that trains this model"
    start = f'{run.torchrun} "${{PRETRAIN:{default}}}"'
    said = [*([UNTOLD, f"{untold}."] if untold else []), *_beyond_arguments(layers)]
    connections = PAIRED_CONNECTIONS if _pairs(run) else 1
    script = (
        "#!/bin/bash\n"
        + header(run, [*YOURS, *said])
        + f"export CUDA_DEVICE_MAX_CONNECTIONS={connections}\n\n"
        + _array("MODEL_PARALLEL_ARGS", parallel)
        + _array("MODEL_ARGS", model)
        + f'{start} "${{MODEL_PARALLEL_ARGS[@]}}" "${{MODEL_ARGS[@]}}" "$@"\n'
    )
    settings = header(run) + f"ENV_VARS:\n  CUDA_DEVICE_MAX_CONNECTIONS: {connections}\n"
    if len({*run.processes}) == 1:
        settings += f"  NUM_NODES: {len(run.processes)}\n  GPUS_PER_NODE: {run.processes[0]}\n"
    settings += "MODEL_ARGS:\n"
    settings += "".join(f"  {name}: {_yaml(value)}\n" for name, value in (*parallel, *model))
    return Export(
        target=run.target.name,
        version=run.target.version,
        files={"megatron.sh": script, "megatron.yaml": settings},
        launch="bash megatron.sh --data-path …",
        notes=(*_notes(untold, layers, pretraining), *_graphs(run)),
    )


def _array(name: str, flags: list[Flag]) -> str:
    lines = "".join(f"    {flag}{'' if value is None else f' {_bash(value)}'}\n" for flag, value in flags)
    return f"{name}=(\n{lines})\n\n"


def _bash(value: str) -> str:
    return value if value.replace(".", "").isalnum() or value.replace("_", "").isalnum() else f"'{value}'"


def _yaml(value: str | None) -> str:
    return "true" if value is None else value if value.isalnum() else f"'{value}'"


def _parallel(run: Run) -> Iterator[Flag]:
    degrees, training = run.degrees, run.problem.training
    yield "--tensor-model-parallel-size", str(degrees.tensor)
    yield "--pipeline-model-parallel-size", str(degrees.pipeline)
    yield "--context-parallel-size", str(degrees.context)
    if degrees.context > 1:
        yield "--cp-comm-type", "p2p" if has_ring(run.problem) else "allgather"
    if degrees.sequence_parallel:
        yield "--sequence-parallel", None
    if run.shape.experts:
        yield "--expert-model-parallel-size", str(degrees.expert)
        yield "--expert-tensor-parallel-size", str(degrees.tensor)
        yield from _experts(run.problem.trainer)
        if _pairs(run):
            yield "--overlap-moe-expert-parallel-comm", None
            yield "--delay-wgrad-compute", None
    yield from _stages(run)
    yield "--micro-batch-size", str(degrees.micro_batch)
    yield "--global-batch-size", str(training.global_batch)
    if degrees.zero:
        yield "--use-distributed-optimizer", None
    if training.overlap_gradients and (degrees.zero or degrees.data > 1):
        yield "--overlap-grad-reduce", None
        if degrees.zero:
            yield "--overlap-param-gather", None
    if run.recompute == "selective":
        yield "--recompute-granularity", "selective"
        yield "--recompute-modules", "core_attn"
    elif run.recompute == "full":
        yield "--recompute-granularity", "full"
        yield "--recompute-method", "uniform"
        yield "--recompute-num-layers", "1"
    if training.async_tensor_parallel and degrees.sequence_parallel:
        yield "--tp-comm-overlap", None
    yield from _precision(run)


def _pairs(run: Run) -> bool:
    """Whether passes run in pairs; Megatron-LM refuses that without expert parallelism, when there is no exchange."""
    return run.problem.training.overlap_expert_exchange and run.shape.experts > 0 and run.degrees.expert > 1


def _experts(trainer: Trainer) -> Iterator[Flag]:
    """How tokens travel to experts, and how these are multiplied, where they are priced so."""
    if trainer.dispatcher == "rank":
        yield "--moe-token-dispatcher-type", "flex"
        yield "--moe-flex-dispatcher-backend", "hybridep"
    else:
        yield "--moe-token-dispatcher-type", "alltoall"
    if trainer.groups_experts:
        yield "--moe-grouped-gemm", None


def _stages(run: Run) -> Iterator[Flag]:
    """Which layers each virtual stage has: nothing where all have equally many."""
    degrees, counts = run.degrees, [len(layers) for layers in run.layers]
    if degrees.pipeline == 1:
        return
    if len({*counts}) > 1:
        parts = ["t" * count for count in counts]
        yield "--pipeline-model-parallel-layout", "|".join(["E" + parts[0], *parts[1:-1], parts[-1] + "L"])
    elif degrees.virtual_stages > 1:
        yield "--num-layers-per-virtual-pipeline-stage", str(counts[0])


def _precision(run: Run) -> Iterator[Flag]:
    precision = run.problem.precision
    if precision == "fp8" and run.problem.training.scaling != "tensor":
        raise PlanError(
            "Megatron-LM has no fp8 scales of rows",
            field="plan.training.scaling",
            value=run.problem.training.scaling,
            repair='Search with training.scaling "tensor".',
        )
    if precision == "fp8":
        yield "--fp8-format", "hybrid"
        yield "--fp8-recipe", "tensorwise"
    if run.problem.base_precision in ("bf16", "fp16"):
        yield f"--{run.problem.base_precision}", None
    if run.gradients_in_4_bytes:
        yield "--accumulate-allreduce-grads-in-fp32", None
    elif run.problem.base_precision == "bf16":
        # Otherwise Megatron-LM keeps and reduces the gradients of bf16 weights in fp32.
        yield "--grad-reduce-in-bf16", None


def _sizes(run: Run, pretraining: Pretraining) -> Iterator[Flag]:
    """Numbers of layers and tokens."""
    stacks, length = pretraining.stacks, run.degrees.sequence_length
    if stacks is not None:
        yield "--encoder-num-layers", str(stacks.encoder)
        yield "--decoder-num-layers", str(stacks.decoder)
        yield "--encoder-seq-length", str(stacks.encoder_length)
        yield "--decoder-seq-length", str(stacks.decoder_length)
        yield "--max-position-embeddings", str(max(stacks.encoder_length, stacks.decoder_length))
        return
    yield "--num-layers", str(run.shape.num_layers)
    if length is not None:
        yield "--seq-length", str(length)
        yield "--max-position-embeddings", str(length)


def _model(run: Run) -> Iterator[Flag]:
    shape = run.shape
    for name, value in (("--hidden-size", shape.hidden), ("--num-attention-heads", shape.heads)):
        if value is not None:
            yield name, str(value)
    if not shape.has_biases:
        yield "--disable-bias-linear", None
    if shape.experts:
        yield "--num-experts", str(shape.experts)
        yield "--moe-router-topk", str(shape.top_k)
        if not all(shape.has_experts):
            runs = (f"[{int(has)}]*{len(list(some))}" for has, some in itertools.groupby(shape.has_experts))
            yield "--moe-layer-freq", f"({'+'.join(runs)})"
    # Padded to a multiple of this and tp: as in the plan, whatever tp is.
    multiple = run.problem.vocabulary_multiple
    yield "--make-vocab-size-divisible-by", str(multiple // math.gcd(multiple, run.degrees.tensor))
    yield "--optimizer", "adam" if run.problem.training.optimizer == "adam" else "sgd"
    if run.problem.training.optimizer == "sgd":
        yield "--sgd-momentum", "0.0"  # 0.9 by default (megatron/training/arguments.py, _add_regularization_args)


def _layers(found: Decoder, shape: ModelShape) -> Iterator[Flag]:
    """What layers are made of, as far as the graph says it."""
    for name, value in (
        ("--ffn-hidden-size", found.ffn),
        ("--moe-ffn-hidden-size", found.expert_ffn),
        ("--moe-shared-expert-intermediate-size", found.shared_ffn),
    ):
        if value is not None:
            yield name, str(value)
    if found.has_qkv_biases_alone:
        yield "--disable-bias-linear", None
        yield "--add-qkv-bias", None
    if found.has_qk_norm:
        yield "--qk-layernorm", None
    if found.activation == "swiglu":
        yield "--swiglu", None
    if found.norm is not None:
        yield "--normalization", found.norm
    if found.positions is not None:
        yield "--position-embedding-type", found.positions
    if found.positions == "relative" and found.distances is not None:
        yield "--relative-attention-num-buckets", str(found.distances)
    if found.head_size is not None and shape.heads and found.head_size * shape.heads != shape.hidden:
        yield "--kv-channels", str(found.head_size)
    if found.kv_heads is not None and shape.heads and found.kv_heads < shape.heads:
        yield "--group-query-attention", None
        yield "--num-query-groups", str(found.kv_heads)
    if found.is_tied is False:
        yield "--untie-embeddings-and-output-weights", None


def _beyond_arguments(found: Decoder) -> list[str]:
    """What the layers have that no argument of Megatron-LM asks for, a line each."""
    return [*([SIDE_BY_SIDE] * found.is_parallel), *([RELU] * (found.activation == "relu"))]


def _untold(found: Decoder, shape: ModelShape) -> str:
    """The arguments that the graph does not say plainly, in words; "" where it says all."""
    has_dense = not all(shape.has_experts)
    untold = [
        *(["--ffn-hidden-size"] if found.ffn is None and has_dense else []),
        *(["--moe-ffn-hidden-size"] if found.expert_ffn is None and shape.experts else []),
        *(["--swiglu or another activation"] if found.activation is None else []),
        *(["--normalization"] if found.norm is None else []),
        *(["--position-embedding-type"] if found.positions is None else []),
        *(["--group-query-attention with --num-query-groups"] if found.kv_heads is None else []),
        *(["--untie-embeddings-and-output-weights"] if found.is_tied is None else []),
    ]
    return ", ".join(untold)


def _notes(untold: str, found: Decoder, pretraining: Pretraining) -> Iterator[Note]:
    yield Note(about="degrees, stages, batch, ZeRO, recomputation, precision", kept="exact", text="as the plan says")
    script, stacks = pretraining.script, pretraining.stacks
    without = f"without it {script}" if script else "Megatron-LM has none for such a model, or its graph does not tell"
    what = (
        f"the script that trains it (PRETRAIN; {without}), the data, and what a model without its weights does not say"
        " (base of rotary positions, epsilon of norms, dropout, windows, vocabulary)"
    )
    if found.positions == "relative":
        what += "; also from which distance on all tokens have one bias (--relative-attention-max-distance)"
    if stacks is not None and stacks.encoder != stacks.decoder:
        what += f"; also the decoder, which {script} gives as many layers as the encoder"
    if untold:
        what += f"; also {untold}, which the graph does not say plainly"
    yield Note(about="model", kept="left to you", text=what)
    for line in _beyond_arguments(found):
        yield Note(about="layers", kept="left to you", text=f"{line[0].lower()}{line[1:-1]}")


def _graphs(run: Run) -> Iterator[Note]:
    """What a release is priced with that its arguments do not say."""
    if run.problem.trainer.groups_experts and run.shape.experts:
        text = "CUDA graphs, with which the step is priced (--cuda-graph-impl and its scope)"
        yield Note(about="speed", kept="left to you", text=text)
