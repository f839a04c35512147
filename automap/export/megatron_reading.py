"""Megatron-LM's arguments, in a script or as a map, read as a stated strategy.

Names of flags: megatron/training/arguments.py.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from typing import Any

from automap.export.stated import Stated, check_choice, check_names, refuse, sgd_kind, whole

_DEGREES = {
    "tensor-model-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp",
    "context-parallel-size": "cp",
    "expert-model-parallel-size": "ep",
    "micro-batch-size": "micro_batch",
    "num-virtual-stages-per-pipeline-rank": "virtual",
}
_VOCABULARY = 128
"""Default of Megatron-LM's --make-vocab-size-divisible-by, which is multiplied by tp."""
_MOST_REPEATS = 10_000
"""Most repeats in a layout that are written out: more than any model has layers (assumed)."""
_NOT_PRICED = {
    "virtual-pipeline-model-parallel-size": "Use --num-layers-per-virtual-pipeline-stage: there is no such flag.",
    "use-megatron-fsdp": "Price it as --zero 2 or --zero 3.",
    "use-torch-fsdp2": "Price it as --zero 3.",
    "account-for-embedding-in-pipeline-split": "Write the stages as --pipeline-model-parallel-layout.",
    "account-for-loss-in-pipeline-split": "Write the stages as --pipeline-model-parallel-layout.",
    "fp4-format": "Price it by --precision nvfp4.",
    "optimizer-cpu-offload": "Leave it out: offload is not priced.",
}
"""Flags that change the plan, and what to do instead."""
_LAUNCHER = {"nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port", "rdzv-backend", "rdzv-endpoint"}
"""Flags of torchrun in the same script."""


def read_script(text: str) -> Stated:
    """The strategy of a bash script.

    Raises:
        PlanError: a flag that is not priced, or a value that is none; names it.
    """
    try:
        words = shlex.split(text.replace("=(", "=( "), comments=True)
    except ValueError as fault:
        raise refuse("script", str(fault), "is no shell script", "Close every quote.") from None
    flags: dict[str, str | None] = {}
    for number, word in enumerate(words):
        if word.startswith("--") and word != "--":
            name, _, value = word.removeprefix("--").partition("=")
            after = words[number + 1] if number + 1 < len(words) else ")"
            is_value = not after.startswith("--") and after not in (")", "\\")
            # torchrun's own flags and arrays of the script come without a bearing on the plan.
            flags[name] = value or (after if is_value else None)
    each, nodes = (flags.get(name, flags.get(name.replace("-", "_"))) for name in ("nproc-per-node", "nnodes"))
    return read_flags(flags, ("--nproc-per-node", each, nodes))


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


# long: one branch a kind of flag, in Megatron-LM's order
def read_flags(flags: Mapping[str, str | None], started: tuple[str, str | None, str | None]) -> Stated:
    """The strategy of arguments.

    Args:
        flags: arguments by their names without dashes; None = a flag without a value.
        started: name and value of what says how many processes a host starts, and the number of hosts; None where
            nothing is said.

    Raises:
        PlanError: as in `read_script`.
    """
    found = Stated(target="megatron-core")
    for name, repair in _NOT_PRICED.items():
        if name in flags:
            raise refuse(f"--{name}", flags[name] or "set", "is not priced", repair)
    read = {*_DEGREES}
    for name, key in _DEGREES.items():
        if name in flags:
            found.degrees[key] = whole(f"--{name}", flags[name])
    pp = found.degrees.get("pp", 1)

    def number(name: str) -> int | None:
        read.add(name)
        return whole(f"--{name}", flags[name]) if name in flags else None

    found.degrees |= _replicas(started, math.prod(found.degrees.get(name, 1) for name in ("tp", "pp", "cp")))
    layers, each, batch = (
        number("num-layers"),
        number("num-layers-per-virtual-pipeline-stage"),
        number("global-batch-size"),
    )
    found.num_layers = layers
    if each is not None:
        if layers is None or layers % (pp * each):
            what = f"{layers or 'an unknown number of'} layers are not so many in stages of {pp} ranks"
            raise refuse(
                "--num-layers-per-virtual-pipeline-stage", each, what, "Give --num-layers, a multiple of both."
            )
        found.degrees["virtual"] = layers // pp // each
    layout = flags.get("pipeline-model-parallel-layout")
    if layout is not None:
        found.degrees |= _layout(layout, pp)
    ends = tuple(number(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    if any(ends):
        found.degrees["layers"] = _uneven(ends, layers, pp, found.degrees.get("virtual", 1))
    if batch is not None:
        found.training["global_batch"] = batch
    found.tokens = number("seq-length")
    found.training["vocabulary_multiple"] = (number("make-vocab-size-divisible-by") or _VOCABULARY) * found.degrees.get(
        "tp", 1
    )
    slices = number("expert-tensor-parallel-size")
    if slices is not None and slices != found.degrees.get("tp", 1) and found.degrees.get("ep", 1) > 1:
        raise refuse(
            "--expert-tensor-parallel-size", slices, "only slices of experts over tp are priced", "Make it equal to tp."
        )
    if "sequence-parallel" in flags:
        found.degrees["sequence_parallel"] = True
    if "use-distributed-optimizer" in flags:
        found.degrees["zero"] = 1
    if "recompute-activations" in flags or flags.get("recompute-granularity"):
        found.degrees["recompute"] = flags.get("recompute-granularity") or "selective"
        check_choice("--recompute-granularity", found.degrees["recompute"], ("selective", "full"))
    if flags.get("recompute-method") == "block":
        raise refuse("--recompute-method", "block", "recomputes some layers", "Use uniform, which recomputes all.")
    narrow = [name for name in ("bf16", "fp16") if name in flags]
    if len(narrow) == 2:
        raise refuse("--fp16", "set", "contradicts --bf16", "Give one of them.")
    found.training["precision"] = "fp8" if flags.get("fp8-format") else narrow[0] if narrow else "fp32"
    if "optimizer" in flags:
        check_choice("--optimizer", flags["optimizer"], ("adam", "sgd"))
        found.training["optimizer"] = (
            "adam" if flags["optimizer"] == "adam" else sgd_kind("--sgd-momentum", flags.get("sgd-momentum", "0.9"))
        )
    if "tp-comm-overlap" in flags:
        found.training["async_tensor_parallel"] = True
    read |= {
        "pipeline-model-parallel-layout", "sequence-parallel", "use-distributed-optimizer", "recompute-activations",
        "recompute-granularity", "recompute-method", "recompute-num-layers", "recompute-modules", "bf16", "fp16",
        "fp8-format", "fp8-recipe", "optimizer", "sgd-momentum", "tp-comm-overlap",
    }  # fmt: skip
    check_names(flags, read | _LAUNCHER, "--")
    found.ignored = tuple(f"--{name}" for name in flags if name not in read | _LAUNCHER)
    return found


def _replicas(started: tuple[str, str | None, str | None], others: int) -> dict[str, int]:
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
        raise refuse(name, world, f"processes are no multiple of tp * pp * cp = {others}", "Start as many.")
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
        what = f"{layers or 'an unknown number of'} layers are not so many in {virtual} stages of each of {pp} ranks"
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
        raise refuse("--pipeline-model-parallel-layout", text, "is no layout that is read", repair)
    return {"virtual": len(parts) // pp, "layers": tuple(part.count("t") for part in parts)}
