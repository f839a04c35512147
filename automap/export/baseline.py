"""The plan that a user runs today, from `hints.baseline`: a plan document, or the text of a trainer's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from automap.cluster import Cluster
from automap.documents import read_document
from automap.errors import PlanError
from automap.export.onnx_devices import planned
from automap.export.reading import arguments_beside, files_beside, read_text
from automap.export.same_model import check_model
from automap.export.stated import Stated
from automap.plan import Plan
from automap.price.estimate import annotate
from automap.price.evaluator import Evaluator
from automap.price.lowered_plan import LoweredPlan
from automap.price.plan_reader import lower_plan
from automap.price.plan_writer import to_plan
from automap.problem import Problem
from automap.records import Length, from_json
from automap.space.stated_strategy import Strategy, hand_made, recomputes_nothing, undivided
from automap.targets import ANY, targets

FIELD = "hints.baseline"


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """A trainer's configuration under `hints.baseline`, in place of a plan document."""

    file: Annotated[str, Length(500, least=1)]
    """Name of the file; its ending says whose configuration it is, see `automap.export.reading`."""
    text: Annotated[str, Length(1 << 20)]
    """Its text."""
    arguments: Annotated[str, Length(1 << 20)] = ""
    """Text of the training_arguments.json beside it; empty = there is none."""
    beside: Mapping[str, Annotated[str, Length(1 << 20)]] = field(default_factory=dict)
    """Texts of further files beside it that it names, such as DeepSpeed's JSON, by their names without folders."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """The plan that a user runs today."""

    name: str
    """Name of its file; `plan` for a plan document."""
    plan: Plan
    """The plan with its estimate."""
    lowered: LoweredPlan
    notes: tuple[str, ...]
    """What of the file was not read, and what is unusual about the plan."""


def load(path: Path) -> dict[str, Any]:
    """The value of `hints.baseline` for a file: a plan document, or the text of a configuration.

    Raises:
        PlanError: it cannot be read.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) else "not UTF-8"
        repair = "Name a readable file."
        raise PlanError(f"cannot be read ({reason})", field="baseline", value=str(path), repair=repair) from None
    if path.suffix == ".json":
        document = read_document(text, field="baseline", error=PlanError)
        if isinstance(document, dict) and str(document.get("schema", "")).startswith("automap.plan/"):
            return document
    found, arguments, named = {"file": path.name, "text": text}, arguments_beside(path), dict[str, str]()

    def noted(name: str) -> str | None:
        content = files_beside(path)(name)
        if content is not None:
            named[name.rpartition("/")[2]] = content
        return content

    with suppress(PlanError):  # which whoever reads the baseline meets again
        read_text(path.name, text, arguments, noted)
    return {**found, **({"arguments": arguments} if arguments else {}), **({"beside": named} if named else {})}


def with_stated(training: Mapping[str, Any], hints: Mapping[str, Any], cluster: Cluster) -> Mapping[str, Any]:
    """Training settings in which a configuration under `baseline` says what the user does not.

    Its target too, so that the plan that is found is one that its trainer runs; but not beside another trainer.

    Raises:
        PlanError: the configuration cannot be read.
    """
    document = hints.get("baseline")
    if not _is_configuration(document):
        return training
    stated = _stated(document)[1]
    stated.complete_batch(cluster.num_devices, {})
    said, target = dict(stated.training), targets()[stated.target]
    if training.get("target", ANY) != ANY:
        # The target names the trainer, but for its release.
        if training["target"] != stated.target or said["trainer"] not in target.releases:
            del said["trainer"]
    elif stated.document is None and training.get("trainer", said["trainer"]) in (target.trainer, *target.releases):
        said["target"] = stated.target
    return {**said, **training}


def read_baseline(evaluator: Evaluator) -> Baseline | None:
    """The plan under `hints.baseline`, or None without one.

    Raises:
        PlanError: it is malformed, illegal, or for another model or another training.
    """
    document = evaluator.problem.hints.baseline
    if document is None:
        return None
    try:
        if _is_configuration(document):
            return _configured(evaluator, *_stated(document))
        problem, plan = evaluator.problem, Plan.from_json(dict(document))
        plan = replace(plan, cluster=problem.cluster.to_json(), training=problem.training, search=None, measured=None)
        lowered = lower_plan(plan, evaluator)
        return Baseline(name="plan", plan=annotate(plan, lowered, evaluator), lowered=lowered, notes=())
    except PlanError as fault:
        if fault.field.startswith(FIELD):
            raise
        field = f"{FIELD}.{fault.field}".replace(f"{FIELD}.plan", FIELD).replace(f"{FIELD}.from", FIELD)
        raise PlanError(**fault.texts | {"field": field}) from None


def _is_configuration(document: object) -> bool:
    return isinstance(document, Mapping) and ("text" in document or "file" in document)


def _stated(document: object) -> tuple[str, Stated]:
    """Name and content of a configuration."""
    found = from_json(Configuration, document, path=FIELD, error=PlanError)
    try:
        beside = {name.rpartition("/")[2]: text for name, text in found.beside.items()}
        return found.file, read_text(
            found.file, found.text, found.arguments, lambda name: beside.get(name.rpartition("/")[2])
        )
    except PlanError as fault:
        raise PlanError(**fault.texts | {"field": fault.field.replace("from", FIELD, 1)}) from None


def _configured(evaluator: Evaluator, name: str, stated: Stated) -> Baseline:
    stated.complete_batch(evaluator.problem.cluster.num_devices, {})
    _check_training(evaluator.problem, name, stated)
    if stated.document is not None:
        plan = planned(stated.document, evaluator.problem)
        lowered = lower_plan(plan, evaluator)
        return Baseline(name=name, plan=annotate(plan, lowered, evaluator), lowered=lowered, notes=())
    check_model(stated, name, evaluator)
    strategy = Strategy(**stated.degrees, may_idle=True, target=stated.target)
    lowered = hand_made(evaluator, strategy)
    notes = (*undivided(evaluator, lowered), *recomputes_nothing(strategy, lowered, evaluator.problem.trainer.name))
    notes = (*notes, *stated.notes)
    if stated.training.get("overlap_gradients", True) != evaluator.problem.training.overlap_gradients:
        notes = (*notes, "it reduces gradients behind the backward pass; give overlap_gradients false to price it so")
    overlaps = evaluator.problem.training.overlap_expert_exchange
    if stated.training.get("overlap_expert_exchange", False) != overlaps and stated.degrees.get("ep", 1) > 1:
        given = str(not overlaps).lower()
        notes = (
            *notes,
            f"its exchanges of experts are priced otherwise; give overlap_expert_exchange {given} for them",
        )
    if "micro_batch" not in stated.degrees:
        notes = (*notes, "it does not say the samples of a micro-batch: 1 is assumed")
    plan = annotate(to_plan(lowered, evaluator), lowered, evaluator)
    return Baseline(name=name, plan=plan, lowered=lowered, notes=notes)


def _check_training(problem: Problem, name: str, stated: Stated) -> None:
    """Refuses a configuration that trains otherwise than the problem: the two steps would not be the same work."""
    for key, value in stated.training.items():
        own = getattr(problem.training, key)
        # The vocabulary is padded as in the search, for both alike; what runs at the same time is no other work.
        same_work = ("trainer", "vocabulary_multiple", "overlap_gradients", "overlap_expert_exchange")
        if key not in same_work and own != value:
            repair = f"Give {key} {value} to the search too, or change the file."
            raise PlanError(f"the search is for {own}, {name} says", field=key, value=value, repair=repair)
