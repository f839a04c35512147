"""From a seed to a problem: model, cluster, training and hints, and the split to which the problem belongs."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any, Literal

from agents.learning.problems.clusters import RandomCluster, counted, draw_cluster, is_unseen_size
from agents.learning.problems.draw import Draw
from agents.learning.problems.models import OTHERS, TRANSFORMERS, UNSEEN_FAMILIES, draw_model
from agents.learning.problems.settings import draw_hints, draw_training
from agents.learning.problems.transformers import DEEP, RandomModel
from automap.errors import ProblemError
from automap.problem import Problem, Training
from automap.records import to_json
from automap.space.space import PlanSpace
from ir.serialize import graph_digest

Split = Literal["train", "unseen-family", "unseen-size"]
SPLITS: tuple[Split, ...] = ("train", "unseen-family", "unseen-size")
VERSION = 1
"""Number of the generator: it grows when a seed gives another problem than before."""
USUAL_SHARE = 0.75
"""Share of the transformers that have a usual size on a usual cluster (assumed); they are half of all problems."""
TIGHT_SHARE = 0.12
"""Share of the problems whose memory is chosen so that they hardly fit."""
STATE_BYTES = 16.0
"""Bytes of one parameter, its gradient and its optimizer state, for the choice of sizes (mixed precision, Adam)."""


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A problem that has been drawn and not yet been built: what is known in a millisecond."""

    seed: int
    split: Split
    model: RandomModel
    cluster: RandomCluster
    training: dict[str, Any]
    """Fields of `automap.problem.Training`."""
    is_tight: bool
    """Whether memory is reserved until the model hardly fits."""

    @property
    def description(self) -> str:
        """Model, cluster and training in one line."""
        training = " ".join(f"{name}={value}" for name, value in self.training.items())
        return f"{self.model.text} on {self.cluster.text}, {training}"

    def build(self) -> GeneratedProblem:
        """The problem, with its graph and its hints."""
        graph = self.model.build()
        cluster = self.cluster.cluster
        problem = Problem.build(graph, cluster, self.training)
        hints = draw_hints(Draw(self.seed, 1), problem, is_tight=self.is_tight)
        if hints:
            hinted = _hinted(problem, hints)
            problem, hints = (problem, {}) if hinted is None else (hinted, hints)
        told = ", hints " + json.dumps(hints) if hints else ""
        return GeneratedProblem(
            seed=self.seed,
            split=self.split,
            family=self.model.family,
            description=self.description + told,
            problem=problem,
        )


@dataclass(frozen=True, kw_only=True)
class GeneratedProblem:
    """A problem of the generator."""

    seed: int
    split: Split
    """Whether it may be trained on, or why it is held out."""
    family: str
    """Family of the model."""
    description: str
    """Model, cluster, training and hints in one line."""
    problem: Problem

    @functools.cached_property
    def digest(self) -> str:
        """See `problem_digest`."""
        return problem_digest(self.problem)


def problem_digest(problem: Problem) -> str:
    """The sha256 of all that a problem holds but the names of its model and cluster, in hexadecimal."""
    # What is as by default is left out: labels and networks refer to digests from before there were such settings.
    plain = to_json(Training(global_batch=1))
    later = {name: plain[name] for name in ("target", "memory_confidence", "vocabulary_multiple")}
    training = {
        name: value for name, value in to_json(problem.training).items() if name not in later or value != later[name]
    }
    parts = {
        "graph": graph_digest(replace(problem.graph, name="", sha256="", warnings=())),
        "cluster": counted(replace(problem.cluster, name="")),
        "training": training,
        "hints": to_json(problem.hints),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def outline(seed: int) -> Outline:
    """Draws the problem of a seed without building its graph."""
    draw = Draw(seed, 0)
    family = draw.weighted({**TRANSFORMERS, **OTHERS})
    is_usual = family in TRANSFORMERS and draw.chance(USUAL_SHARE)
    cluster = draw_cluster(draw, is_usual=is_usual)
    kinds = cluster.cluster
    memory = sum(kinds.devices[node.device].memory_bytes * node.num_devices * node.count for node in kinds.nodes)
    is_tight = draw.chance(TIGHT_SHARE)
    model = draw_model(draw, family, _parameters(draw, memory, is_usual=is_usual))
    training = draw_training(draw, kinds, tokens=model.tokens)
    split: Split = "train"
    if family in UNSEEN_FAMILIES:
        split = "unseen-family"
    elif model.num_blocks > DEEP or is_unseen_size(kinds.num_devices):
        split = "unseen-size"
    return Outline(seed=seed, split=split, model=model, cluster=cluster, training=training, is_tight=is_tight)


def generate(seed: int) -> GeneratedProblem:
    """The problem of a seed, always the same; see the package for what there is."""
    return outline(seed).build()


def _parameters(draw: Draw, memory: float, *, is_usual: bool) -> float:
    """A number of parameters whose state fills a share of the cluster's memory, in bytes."""
    most = memory / STATE_BYTES
    if draw.chance(0.05):
        return most * draw.between(0.6, 1.3)
    if is_usual:
        return min(max(most * draw.log_between(0.005, 0.7), 5e7), 5e11, most)
    return draw.log_between(1e5, min(2e11, 0.6 * most))


def _hinted(problem: Problem, hints: dict[str, Any]) -> Problem | None:
    """The problem with hints, or None where they leave no plan."""
    try:
        found = Problem.build(problem.graph, problem.cluster, problem.training, hints)
        if set(hints) != {"memory_reserve_bytes"}:
            PlanSpace(found)
    except ProblemError:
        return None
    return found
