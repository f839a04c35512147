"""Megatron-LM's arguments, in a script or as a map, read as a stated strategy.

Names of flags: megatron/training/arguments.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from automap.documents import read_document
from automap.errors import PlanError
from automap.export.deepspeed_reading import read_deepspeed, read_named
from automap.export.megatron_script import script_flags
from automap.export.script_processes import Started
from automap.export.stated import (
    Beside,
    Stated,
    check_choice,
    check_names,
    check_shards,
    nothing_beside,
    refuse,
    sgd_kind,
    whole,
)

_DEGREES = {
    "tensor-model-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp",
    "context-parallel-size": "cp",
    "expert-model-parallel-size": "ep",
    "model-parallel-size": "tp",
    "moe-expert-parallel-size": "ep",
    "micro-batch-size": "micro_batch",
    "num-virtual-stages-per-pipeline-rank": "virtual",
}
"""Flags of Megatron-LM, of its first versions and of Megatron-DeepSpeed -> degrees."""
_VOCABULARY = 128
"""Default of Megatron-LM's --make-vocab-size-divisible-by, which is multiplied by tp."""
_MOST_REPEATS = 10_000
"""Most repeats in a layout that are written out: more than any model has layers (assumed)."""
_NOT_PRICED = {
    "virtual-pipeline-model-parallel-size": "Use --num-layers-per-virtual-pipeline-stage: there is no such flag.",
    "use-megatron-fsdp": "Price it as --zero 2 or --zero 3.",
    "use-custom-fsdp": "Price it as --zero 2 or --zero 3.",
    "use-torch-fsdp2": "Price it as --zero 3.",
    "account-for-embedding-in-pipeline-split": "Write the stages as --pipeline-model-parallel-layout.",
    "account-for-loss-in-pipeline-split": "Write the stages as --pipeline-model-parallel-layout.",
    "fp4-format": "Price it by --precision nvfp4.",
    "optimizer-cpu-offload": "Leave it out: offload is not priced.",
    "cpu-offloading": "Leave it out: offload is not priced.",
    "cpu-optimizer": "Leave it out: offload is not priced.",
    "fine-grained-activation-offloading": "Leave it out: offload is not priced.",
    "mtp-num-layers": "Leave it out: layers that predict further tokens are not priced.",
    "yaml-cfg": "Write what that file says as arguments of the script.",
}
"""Flags that change the plan, and what to do instead."""
_SIZES = (
    "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups", "num-experts", "moe-router-topk",
    "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size",
)  # fmt: skip
"""Flags for sizes of the model, which are compared with those of the model that is priced."""
_SWITCHES = frozenset({
    "sequence-parallel", "use-distributed-optimizer", "recompute-activations", "checkpoint-activations", "bf16", "fp16",
    "fp8-hybrid", "fp8-e4m3", "tp-comm-overlap", "overlap-grad-reduce", "overlap-param-gather",
    "group-query-attention", "moe-grouped-gemm", "deepspeed", "deepspeed-activation-checkpointing",
    "grad-reduce-in-bf16", "overlap-moe-expert-parallel-comm", "delay-wgrad-compute",
})  # fmt: skip
"""Flags without a value."""
_READ = frozenset({
    *_DEGREES, *_SIZES, *_NOT_PRICED, *_SWITCHES, "num-layers",
    "num-layers-per-virtual-pipeline-stage", "global-batch-size", "seq-length", "make-vocab-size-divisible-by",
    "expert-tensor-parallel-size", "pipeline-model-parallel-layout", "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers", "recompute-granularity", "recompute-method", "recompute-num-layers",
    "recompute-modules", "activations-checkpoint-method", "fp8-format", "fp8-recipe", "optimizer", "sgd-momentum",
    "rampup-batch-size", "zero-stage", "num-distributed-optimizer-instances", "ds-sequence-parallel-size",
    "cp-comm-type", "moe-token-dispatcher-type", "moe-flex-dispatcher-backend",
})  # fmt: skip
"""Flags that say something of the plan or of its price."""


def read_script(text: str, beside: Beside) -> Stated:
    """The strategy of a bash script.

    Args:
        text: the script.
        beside: the files beside it, of which DeepSpeed's JSON is read.

    Raises:
        PlanError: a flag that is not priced, or a value that is none; names it.
    """
    script = script_flags(text, _READ, _SWITCHES)
    found = read_flags(script.flags, script.started, script.documents, beside)
    found.ignored = (*found.ignored, *script.others)
    found.defaults = script.defaults
    return found


def read_map(flags: Mapping[str, str | None], variables: Mapping[str, Any]) -> Stated:
    """The strategy of the map of Megatron-LM's functional tests.

    Args:
        flags: as in `read_flags`.
        variables: its environment.

    Raises:
        PlanError: as in `read_script`.
    """
    each, nodes = (variables.get(name) for name in ("GPUS_PER_NODE", "NUM_NODES"))
    return read_flags(flags, ("ENV_VARS.GPUS_PER_NODE", each, nodes))


def read_flags(
    flags: Mapping[str, str | None], started: Started, documents: Sequence[str] = (), beside: Beside = nothing_beside
) -> Stated:
    """The strategy of arguments.

    Args:
        flags: arguments by their names without dashes; None = a flag without a value.
        started: how many processes there are.
        documents: texts that a script writes, of which DeepSpeed's JSON is read.
        beside: the files beside the script.

    Raises:
        PlanError: as in `read_script`.
    """
    found = Stated(target="megatron-core")
    for name, repair in _NOT_PRICED.items():
        if name in flags:
            raise refuse(f"--{name}", flags[name] or "set", "is not priced", repair)
    _read_degrees(flags, started, found)
    _read_layers(flags, found)
    _refuse_other_splits(flags, found)
    if "sequence-parallel" in flags:
        found.degrees["sequence_parallel"] = True
    if "use-distributed-optimizer" in flags:
        found.degrees["zero"] = 1
        num_instances = _number(flags, "num-distributed-optimizer-instances") or 1
        check_shards("--num-distributed-optimizer-instances", num_instances, 2)
    num_chunks = found.degrees.get("pp", 1) * found.degrees.get("virtual", 1)
    found.degrees |= _recomputation(flags, found.num_layers, num_chunks)
    _read_training(flags, found)
    if "deepspeed" in flags:
        _megatron_deepspeed(flags, found, documents, beside)
    elif "overlap-grad-reduce" not in flags and found.degrees.get("dp") != 1:
        found.training["overlap_gradients"] = False
    if flags.get("moe-token-dispatcher-type") == "flex" and flags.get("moe-flex-dispatcher-backend") == "hybridep":
        found.training["trainer"] = "megatron-core-26.06"
    found.sizes = {name: size for name in _SIZES if (size := _number(flags, name)) is not None}
    if "group-query-attention" not in flags:
        found.sizes.pop("num-query-groups", None)
    if "bf16" in flags and "deepspeed" not in flags and "grad-reduce-in-bf16" not in flags:
        found.remarks += (
            "gradients are priced in bf16, as NVIDIA's recipes reduce them; without --grad-reduce-in-bf16, Megatron-LM "
            "keeps and reduces them in fp32: 2 bytes more for each parameter of a device, and twice the traffic",
        )
    if "rampup-batch-size" in flags:
        found.remarks += (
            f"the price is of a step of the full batch, after --rampup-batch-size {flags['rampup-batch-size']}",
        )
    check_names(flags, _READ, "--")
    # A note of its own says whether DeepSpeed's file was read.
    read = {*_READ, "deepspeed_config"} if "deepspeed" in flags else _READ
    found.ignored = tuple(f"--{name}" for name in flags if name not in read)
    return found


def _number(flags: Mapping[str, str | None], name: str) -> int | None:
    """The value of a flag, a number of 1 or more; None where the flag is not given."""
    return whole(f"--{name}", flags[name]) if name in flags else None


def _read_degrees(flags: Mapping[str, str | None], started: Started, found: Stated) -> None:
    """Adds the degrees of parallelism, that of data parallelism included, and the samples of a micro-batch."""
    for name, key in _DEGREES.items():
        if name in flags:
            found.degrees[key] = whole(f"--{name}", flags[name])
    found.degrees |= _replicas(started, math.prod(found.degrees.get(name, 1) for name in ("tp", "pp", "cp")))


def _read_layers(flags: Mapping[str, str | None], found: Stated) -> None:
    """Adds the number of layers and how they are divided among virtual stages."""
    pp = found.degrees.get("pp", 1)
    layers = found.num_layers = _number(flags, "num-layers")
    per_stage = _number(flags, "num-layers-per-virtual-pipeline-stage")
    if per_stage is not None:
        if layers is None or layers % (pp * per_stage):
            name, repair = "--num-layers-per-virtual-pipeline-stage", "Give --num-layers, a multiple of both."
            what = f"{layers or 'an unknown number of'} layers do not divide into stages of this size on {pp} ranks"
            raise refuse(name, per_stage, what, repair)
        found.degrees["virtual"] = layers // pp // per_stage
    layout = flags.get("pipeline-model-parallel-layout")
    if layout is not None:
        found.degrees |= _layout(layout, pp)
    ends = tuple(_number(flags, f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    if any(ends):
        found.degrees["layers"] = _uneven(ends, layers, pp, found.degrees.get("virtual", 1))


def _refuse_other_splits(flags: Mapping[str, str | None], found: Stated) -> None:
    """Refuses ways to split attention and experts that are not priced.

    Args:
        flags: as in `read_flags`.
        found: has the degrees.
    """
    exchanged = flags.get("cp-comm-type") or "p2p"
    if exchanged != "p2p" and found.degrees.get("cp", 1) > 1:
        raise refuse("--cp-comm-type", exchanged, "is not priced: attention is priced as a ring", "Use p2p.")
    if (_number(flags, "ds-sequence-parallel-size") or 1) > 1:
        what = "splits sequences for attention by exchanging heads, which is not priced"
        raise refuse("--ds-sequence-parallel-size", flags["ds-sequence-parallel-size"], what, "Leave it out.")
    expert_tp = _number(flags, "expert-tensor-parallel-size")
    if expert_tp is not None and expert_tp != found.degrees.get("tp", 1) and found.degrees.get("ep", 1) > 1:
        what = "experts are priced only with the tensor parallelism of the other layers"
        raise refuse("--expert-tensor-parallel-size", expert_tp, what, "Make it equal to tp.")


def _read_training(flags: Mapping[str, str | None], found: Stated) -> None:
    """Adds the batch, the sizes of samples and vocabulary, the precision, the optimizer and what is overlapped."""
    batch = _number(flags, "global-batch-size")
    if batch is not None:
        found.training["global_batch"] = batch
    found.tokens = _number(flags, "seq-length")
    multiple = _number(flags, "make-vocab-size-divisible-by") or _VOCABULARY
    found.training["vocabulary_multiple"] = multiple * found.degrees.get("tp", 1)
    found.training["precision"] = _precision(flags)
    if "optimizer" in flags:
        check_choice("--optimizer", flags["optimizer"], ("adam", "sgd"))
        is_adam = flags["optimizer"] == "adam"
        momentum = flags.get("sgd-momentum", "0.9")
        found.training["optimizer"] = "adam" if is_adam else sgd_kind("--sgd-momentum", momentum)
    if "tp-comm-overlap" in flags:
        found.training["async_tensor_parallel"] = True
    if "overlap-moe-expert-parallel-comm" in flags and found.degrees.get("ep", 1) > 1:
        found.training["overlap_expert_exchange"] = True


def _recomputation(flags: Mapping[str, str | None], layers: int | None, stages: int) -> dict[str, Any]:
    """What is computed again, in the words of Megatron-LM today and before.

    Args:
        flags: as in `read_flags`.
        layers: layers of the model, where they are said.
        stages: virtual stages of all pipeline ranks.
    """
    old = flags.get("activations-checkpoint-method")
    kind = flags.get("recompute-granularity")
    if kind is None and ("checkpoint-activations" in flags or old is not None):
        kind = "full"
    if kind is None and "recompute-activations" in flags:
        kind = "selective"
    if kind is None:
        return {}
    check_choice("--recompute-granularity", kind, ("selective", "full"))
    modules = (flags.get("recompute-modules") or "core_attn").replace(",", " ").strip("[] ").split()
    if kind == "selective" and modules != ["core_attn"]:
        what, repair = "are not priced", "Use core_attn alone, or --recompute-granularity full."
        raise refuse("--recompute-modules", " ".join(modules), what, repair)
    every = flags.get("recompute-num-layers")
    is_all = every is not None and layers is not None and whole("--recompute-num-layers", every) * stages >= layers
    for name in ("recompute-method", "activations-checkpoint-method"):
        if kind == "full" and flags.get(name) == "block" and not is_all:
            raise refuse(f"--{name}", "block", "recomputes some layers", "Use uniform, which recomputes all.")
    return {"recompute": kind}


def _precision(flags: Mapping[str, str | None]) -> str:
    narrow = [name for name in ("bf16", "fp16") if name in flags]
    if len(narrow) == 2:
        raise refuse("--fp16", "set", "contradicts --bf16", "Give one of them.")
    if flags.get("fp8-format") or "fp8-hybrid" in flags or "fp8-e4m3" in flags:
        return "mxfp8" if flags.get("fp8-recipe") == "mxfp8" else "fp8"
    return narrow[0] if narrow else "fp32"


def _megatron_deepspeed(
    flags: Mapping[str, str | None], found: Stated, documents: Sequence[str], beside: Beside
) -> None:
    """Adds what Megatron-DeepSpeed says of ZeRO, which is in its file of DeepSpeed too: DeepSpeed trains by the file.

    Args:
        flags: as in `read_flags`.
        found: what the flags say; the stage is added.
        documents: as in `read_flags`.
        beside: as in `read_flags`.
    """
    found.training["trainer"] = "megatron-deepspeed"
    stage, named = flags.get("zero-stage"), flags.get("deepspeed_config")
    files = [("DeepSpeed's JSON in the script", read_deepspeed(written)) for written in _deepspeed_files(documents)]
    if named is not None and not files:
        text, name = beside(named), named.rpartition("/")[2]
        if text is None:
            found.remarks += (
                f"{named} is not read, as no {name} lies beside the script: it is taken to say of ZeRO and the batch "
                "what the script says, and no offload",
            )
        else:
            found.beside = name
            files = [(name, read_named(name, text))]
    for place, own in files:
        said = {
            "zero-stage": (stage, own.degrees["zero"]),
            "micro-batch-size": (flags.get("micro-batch-size"), own.degrees.get("micro_batch")),
            "global-batch-size": (flags.get("global-batch-size"), own.training.get("global_batch")),
        }
        for flag, (value, other) in said.items():
            if value is not None and other is not None and value != str(other):
                raise refuse(f"--{flag}", value, f"contradicts {place}, which says {other}", "Make them equal.")
        stage = str(own.degrees["zero"])
    if stage is None:
        what = "leaves the stage of ZeRO to the file of DeepSpeed"
        repair = "Put that file beside the script, or give --zero-stage in the script too."
        raise refuse("--deepspeed", named or "set", what, repair)
    check_choice("--zero-stage", stage, ("0", "1", "2", "3"))
    found.degrees["zero"] = int(stage)


def _deepspeed_files(documents: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The documents among some texts that are configurations of DeepSpeed."""
    for text in documents:
        try:
            found = read_document(text, field="from", error=PlanError)
        except PlanError:
            continue
        if isinstance(found, dict) and {"zero_optimization", "train_batch_size"} & found.keys():
            yield found


def _replicas(started: Started, others: int) -> dict[str, int]:
    """The data parallel degree, where it is said how many processes there are.

    Args:
        started: as in `read_flags`.
        others: tp * pp * cp.
    """
    name, each, nodes = started
    if each is None or not each.isdecimal() or not (nodes or "1").isdecimal():
        return {}
    world = int(each) * int(nodes or "1")
    if world == 0 or world % others:
        repair = f"Start a multiple of {others} processes, or change the degrees."
        raise refuse(name, world, f"processes are not a multiple of tp * pp * cp = {others}", repair)
    return {"dp": world // others}


def _uneven(ends: tuple[int | None, ...], layers: int | None, pp: int, virtual: int) -> tuple[int, ...]:
    """Layers of each stage where the first or the last rank has a number of its own, and the others share the rest.

    Args:
        ends: layers of the first and of the last rank, None where nothing is said.
        layers: layers of the model.
        pp: pipeline ranks.
        virtual: stages of each.
    """
    first, last = ([] if end is None else [end] for end in ends)
    others = pp - len(first) - len(last)
    rest = (layers or 0) - sum((*first, *last))
    ranks = [*first, *[rest // max(1, others)] * others, *last]
    if layers is None or others < 0 or sum(ranks) != layers or min(ranks) < 1 or any(n % virtual for n in ranks):
        what = f"{layers or 'an unknown number of'} layers do not divide so into {virtual} stages on each of {pp} ranks"
        value = ", ".join("-" if end is None else str(end) for end in ends)
        repair = "Give --num-layers, and numbers of which the other ranks share the rest evenly."
        raise refuse("--decoder-{first,last}-pipeline-num-layers", value, what, repair)
    return tuple(number // virtual for _ in range(virtual) for number in ranks)


def _layout(text: str, pp: int) -> dict[str, Any]:
    """Virtual stages and layers of each stage, from a layout: (t|)*3 and t*3 are written out."""
    plain = text.replace(",", "")
    for pattern in (r"\(([^()]*)\)\*(\d+)", r"(.)\*(\d+)"):
        plain = re.sub(pattern, lambda match: match[1] * min(int(match[2]), _MOST_REPEATS), plain)
    parts = plain.split("|")
    if set("".join(parts)) - set("EtL") or len(parts) % pp:
        repair = f"Write a multiple of {pp} stages of E, t and L, as in Et*2|(tt|)*2ttL."
        raise refuse("--pipeline-model-parallel-layout", text, "is not a layout that can be read", repair)
    return {"virtual": len(parts) // pp, "layers": tuple(part.count("t") for part in parts)}
