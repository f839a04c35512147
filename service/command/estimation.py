"""`automap estimate` and `automap verify`: plans that somebody made by hand or wrote to a file; a page for people."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automap.documents import read_file
from automap.errors import ModelError, PlanError, ProblemError
from automap.plan import MEMORY_CLASSES
from automap.records import to_json
from service.jobs.run_job import JobRequest, ModelOptions, build_problem, completed, import_graph
from service.priced_plans import hand_made_plan, priced_anew
from service.report import GIB, head, probability, time_parts

if TYPE_CHECKING:
    from automap.export.configuration import Export
    from automap.plan import Estimate, Plan
    from automap.price.evaluator import Evaluator
    from automap.problem import Problem
    from automap.verify import Violation

WIDTH = 118
"""Characters of a line of reasons."""


def with_sequence(options: ModelOptions, length: int | None) -> ModelOptions:
    """The options of a named model whose samples have `length` tokens.

    Raises:
        ModelError: the model is a file.
    """
    if length is None:
        return options
    if not options.zoo:
        repair = "Leave it out; --dim gives the size of a symbolic dim, hf:FOLDER:seq_len=N that of a configuration."
        raise ModelError("the length of a file's sequences is its own", field="seq_len", value=length, repair=repair)
    separator = "," if ":" in options.zoo else ":"
    return replace(options, zoo=f"{options.zoo}{separator}seq_len={length}")


def price_hand_made(data: bytes, request: JobRequest, stated: Mapping[str, Any]) -> Plan:
    """The plan of the stated degrees, with its estimate and reasons.

    Args:
        data: the model's file; empty for a named model.
        request: model, cluster, training and hints.
        stated: fields of `automap.space.stated_strategy.Strategy`.

    Raises:
        UserError: the request, the model, or a degree that does not fit.
    """
    return hand_made_plan(_evaluator(data, request), stated)


def _evaluator(data: bytes, request: JobRequest) -> Evaluator:
    """The evaluator of the problem that a request describes.

    Raises:
        UserError: the request lacks something, or the model cannot be read.
    """
    from automap.price.evaluator import Evaluator

    batch = request.training.get("global_batch", request.hints.get("baseline"))
    for name, given in (("cluster", request.cluster), ("global_batch", batch)):
        if given is None:
            repair = f"Give --{name.replace('_', '-')}, or a file by --plan."
            raise ProblemError("missing", field=name, value="nothing", repair=repair)
    return Evaluator(build_problem(import_graph(data, request), completed(request)))


def price_configuration(data: bytes, request: JobRequest, stated: Mapping[str, Any], path: Path) -> Plan:
    """The plan of a trainer's configuration, with its estimate and reasons; what it does not say may be stated.

    Args:
        data: the model's file; empty for a named model.
        request: model, cluster, training and hints.
        stated: fields of `automap.space.stated_strategy.Strategy`.
        path: the file.

    Raises:
        UserError: as `price_hand_made`; or the file cannot be read, or says otherwise than what is stated.
    """
    from automap.cluster import parse_cluster
    from automap.export.onnx_devices import planned
    from automap.export.reading import read_configuration
    from automap.export.same_model import check_model

    found = read_configuration(path)
    if found.document is not None and stated:
        name, value = next(iter(stated.items()))
        repair = "Leave it out: the file has a whole plan."
        raise PlanError(f"{path.name} says it already", field=name, value=value, repair=repair)
    found.complete_batch(parse_cluster(request.cluster).num_devices, stated)
    for given, own in ((request.training, found.training), (stated, found.degrees)):
        for name, value in given.items():
            if name in own and own[name] != value and name != "trainer":
                repair = "Leave it out, or change the file."
                raise PlanError(f"{path.name} says {own[name]}", field=name, value=value, repair=repair)
    request = replace(request, training={**found.training, **request.training})
    evaluator = _evaluator(data, request)
    if found.document is not None:
        return priced_anew(planned(found.document, evaluator.problem), evaluator)
    check_model(found, path.name, evaluator)
    plan = hand_made_plan(evaluator, {**found.degrees, **stated, "may_idle": True, "target": found.target})
    return replace(plan, warnings=(*plan.warnings, *(f"{path.name}: {note}" for note in found.notes)))


def read_plan(path: Path) -> Plan:
    """The plan of a file.

    Raises:
        PlanError: it cannot be read, or is not a plan.
    """
    from automap.plan import Plan

    return Plan.from_json(read_file(path, field="plan", error=PlanError))


def own_problem(data: bytes, request: JobRequest, plan: Plan) -> Problem:
    """The problem of a plan on its own cluster and under its own training, with the model and hints of a request."""
    request = replace(request, cluster=plan.cluster, training=to_json(plan.training))
    return build_problem(import_graph(data, request), request)


def verify_file(data: bytes, request: JobRequest, path: Path) -> tuple[Violation, ...]:
    """The violations of the plan of a file, on the cluster and under the training that it states.

    The model and the hints come as in `price_hand_made`.

    Raises:
        UserError: the file or the model cannot be read.
    """
    from automap.verify import verify

    plan = read_plan(path)
    return verify(own_problem(data, request, plan), plan)


def export_file(data: bytes, request: JobRequest, path: Path, *, target: str | None, folder: Path) -> Export:
    """Writes the plan of a file as the configuration of a trainer.

    The model and the hints come as in `price_hand_made`.

    Args:
        target: the trainer; None = that which the plan was searched for.
        folder: the folder for the files; it is made if there is none.

    Raises:
        UserError: the file, the model, the folder, or a plan that the target cannot express. Nothing is written then.
    """
    from automap.export.export import WRITERS, export, save
    from automap.targets import ANY

    plan = read_plan(path)
    problem = own_problem(data, request, plan)
    if target is None and plan.training.target == ANY:
        repair = f"Give --target, one of {', '.join(WRITERS)}."
        raise ProblemError("the plan was searched for no target", field="target", value="", repair=repair)
    found = export(plan, problem, target or plan.training.target)
    save(found, folder)
    return found


def price_file(data: bytes, request: JobRequest, stated: Mapping[str, Any], path: Path) -> Plan:
    """The plan of a file with a new estimate, on the cluster and under the training that it states.

    The model and the hints come as in `price_hand_made`; nothing else may be stated, because the file says it.

    Raises:
        UserError: the file, the model, or that the plan is illegal or for another model.
    """
    given = {"cluster": request.cluster, **request.training, **stated}
    for name, value in given.items():
        if value is not None:
            repair = "Leave it out, or leave --plan out."
            raise PlanError("the plan says it already", field=name, value=value, repair=repair)
    from automap.price.evaluator import Evaluator

    plan = read_plan(path)
    return priced_anew(plan, Evaluator(own_problem(data, request, plan)))


def page(plan: Plan) -> list[str]:
    """The lines of a plan's estimate for people."""
    estimate = plan.estimate
    assert estimate is not None
    return [
        *(f"{label:9} {text}" for label, text in head(plan)),
        "",
        *_times(estimate),
        "",
        *_memory(estimate),
        *_fits(plan),
        "",
        *(line for reason in plan.why for line in _folded(reason)),
    ]


def _folded(reason: str) -> list[str]:
    first, others = "why       ", " " * 10
    return textwrap.wrap(reason, WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


def _times(estimate: Estimate) -> list[str]:
    parts = time_parts(estimate)
    lines = [f"{'time of the busiest rank':28}{'seconds':>10}{'share':>8}"]
    lines += [f"{name:28}{value:10.4f}{value / estimate.step_time_s:8.1%}" for name, value in parts.items()]
    return lines


def _memory(estimate: Estimate) -> list[str]:
    width = max(len("memory in GiB, devices"), *(len(m.devices) for m in estimate.memory_bytes))
    header = "".join(f"{name:>12}" for name in (*MEMORY_CLASSES, "total", "capacity"))
    lines = [f"{'memory in GiB, devices':{width}}{header}"]
    for memory in estimate.memory_bytes:
        amounts = [*(getattr(memory, name) for name in MEMORY_CLASSES), memory.total, memory.capacity]
        columns = "".join(f"{amount / GIB:12.2f}" for amount in amounts)
        over = "  does not fit" if memory.total > memory.capacity else ""
        over = over or ("  may not fit" if memory.total > memory.capacity - memory.reserve else "")
        lines.append(f"{memory.devices:{width}}{columns} {memory.total / memory.capacity:5.0%}{over}")
    return lines


def _fits(plan: Plan) -> list[str]:
    estimate = plan.estimate
    assert estimate is not None
    if estimate.fit_probability is None:
        return []
    wanted = f"a search asks for {100 * plan.training.memory_confidence:.3g}%"
    free = min(memory.reserve for memory in estimate.memory_bytes) / GIB
    wanted += f", which keeps {free:.2f} GiB of each device free" if free > 0.0 else ""
    return [f"fits with {probability(estimate.fit_probability)} ({wanted})"]


def lacks(plan: Plan) -> str | None:
    """Where and by how much a plan most probably does not fit; None if it may fit."""
    from automap.space.changes import shortage

    assert plan.estimate is not None
    return shortage(plan.estimate)
