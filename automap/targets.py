"""Targets: what the configuration of a trainer can express, read from files of `automap/data/targets`.

A search for a target decides among the plans that this trainer runs as they are; nothing is rounded afterwards. What a
plan would cost there is a matter of the trainer (`automap.problem.Trainer`), which a target names.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Annotated, Literal

from automap.documents import read_document
from automap.errors import ProblemError, one_of
from automap.records import Range, from_json

SyncKind = Literal["synchronous", "local_sgd", "dasgd"]
"""How replicas are kept together."""
RecomputeMode = Literal["none", "selective", "full"]
"""What the backward pass computes again: nothing, the scores of attention, or whole units."""
ANY = "any"
"""Name of no target: every plan of the space."""
OWN = "automap"
"""The target that reads plans themselves: the trainer of this project."""


Parallelism = Literal["data", "tensor", "context", "expert", "pipeline"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What the configuration of a trainer can express."""

    name: str
    about: str
    version: str
    """The version of the trainer whose configuration is meant."""
    trainer: str
    """The trainer that the price follows unless the user names another one."""
    releases: tuple[str, ...] = ()
    """Further trainers that read the same configuration: releases of other speed."""
    parallel: tuple[Parallelism, ...]
    """Kinds of parallelism that have a degree in the configuration."""
    transformers: bool
    """Whether only models of transformer layers can be trained, and cut between layers of one kind alone."""
    patterned: bool
    """Whether operators are split in Megatron's pattern alone (`automap.space.megatron`)."""
    sequence_parallel: tuple[bool, ...]
    """Whether ranks that split weights split the sequence in normalisations: always, never, or as a plan says."""
    tensor_alone: bool
    """Whether ranks that split weights need no replicas beside them."""
    layers_only: bool
    """Whether recomputation is of repeated layers alone, not of embeddings, heads and losses."""
    virtual_stages: bool
    """Whether a pipeline rank may have several stages (the interleaved schedule)."""
    fills_pipelines: bool
    """Whether a step must have at least as many micro-batches as a pipeline has ranks."""
    schedules: tuple[Literal["1f1b", "gpipe", "zb1p", "zb2p"], ...]
    """Pipeline schedules without virtual stages, the usual one first."""
    recompute: tuple[RecomputeMode, ...]
    """Recompute modes."""
    recompute_levels: bool
    """Whether each rank computes as many of its units again as it must; else one mode holds for all ranks."""
    zero: tuple[Annotated[int, Range(0, 3)], ...]
    """ZeRO stages of plans that split the batch alone."""
    zero_with_others: tuple[Annotated[int, Range(0, 3)], ...]
    """ZeRO stages of plans without a pipeline that split anything else; some of `zero`."""
    zero_in_pipelines: tuple[Annotated[int, Range(0, 3)], ...]
    """ZeRO stages of pipelines."""
    precisions: tuple[str, ...]
    """Precisions of the arithmetic."""
    sync: tuple[SyncKind, ...]
    """How replicas are kept together."""
    batch_norm: tuple[Literal["local", "synchronized"], ...]
    """Statistics of batch normalisation: of the samples of each replica, or of all of them."""
    alike: bool
    """Whether all pipeline ranks are alike: as many devices, in their order, with equal shares of the samples."""
    even_sequence: Annotated[int, Range(1, 2)]
    """The sequence is a multiple of this many times the ranks of context parallelism."""
    uneven: bool
    """Whether ranks share dims outside of the layers, such as the vocabulary, where their number does not divide them:
    in equal parts rounded up, the last rank having the rest."""
    grain: Literal["operators", "layers", "linear"]
    """What placements are given to. `layers`: placements change at the borders of linear layers, embeddings and norms
    alone, and the code between them runs on what each rank has (`automap.space.module_limits`). `linear`: the same, but
    norms stay whole, in models with layers of one kind and without experts."""
    stages_of_modules: bool
    """Whether the stages of a pipeline are lists of modules: every stage has one, and layers are of one kind."""
    apart: tuple[tuple[Parallelism, Parallelism], ...]
    """Pairs of kinds of parallelism that no plan has together."""
    vocabulary_multiple: Annotated[int, Range(1, 1 << 20)]
    """The trainer pads the vocabulary to a multiple of this (`automap.problem.Training.vocabulary_multiple`)."""
    schema: Literal["automap.target/1"] = "automap.target/1"
    source: Mapping[str, str] | None = None


@functools.cache
def targets() -> Mapping[str, Target]:
    """Every target that has a data file, by name."""
    found = {}
    for entry in sorted(resources.files("automap").joinpath("data", "targets").iterdir(), key=lambda e: e.name):
        target = from_json(Target, read_document(entry.read_bytes()), path=entry.name, error=ProblemError)
        found[target.name] = target
    return found


def find_target(name: str) -> Target | None:
    """The target of a name; None for `any`.

    Raises:
        ProblemError: there is no such target.
    """
    if name != ANY and name not in targets():
        repair = one_of([ANY, *targets()], name)
        raise ProblemError("unknown target", field="training.target", value=name, repair=repair)
    return targets().get(name)
