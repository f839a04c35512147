"""A child of the service that checks requests, and prices and draws plans, so that the process that answers requests
never computes.

It reads tasks from standard input and writes an answer to each. Tasks and answers are lines of JSON; the bytes of the
model's graph follow the line of a task. It knows no store and no queue. It ends when its input ends, when a task
exceeds its time limit, and when it exceeds its memory limit. Run as `python -m service.side_process`.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from automap.errors import ClusterError, ModelError, PlanError, UserError
from automap.records import to_json
from service.problems import limit, problem_of

MEMORY_BYTES = 4 << 30
"""Memory that it may have, its libraries included: the largest plans that are found take 1 GiB (assumed)."""
KEPT_BYTES = 8 << 20
"""Largest graph that is kept for the next request: as objects it takes some ten times as much (assumed)."""
_GRACE_S = 2
"""Seconds after which it ends itself should the parent, which ends it sooner, be gone."""

Task = Callable[[Mapping[str, Any], bytes], dict[str, Any]]


def check(document: Mapping[str, Any], graph: bytes) -> dict[str, Any]:
    """Checks that model, cluster, training and hints fit each other: {request, model_id} → {}.

    Where hints decide something, it is also checked that they leave a plan, which takes as long as the beginning of a
    search: some tenths of a second for a large model.
    """
    from agents.results.fewer_devices import check_hints
    from automap.hints import Fix

    problem = _problem(document, graph)
    if problem.hints.constraints or problem.hints.fix != Fix():
        check_hints(problem)
    return {}


def export(document: Mapping[str, Any], graph: bytes) -> dict[str, Any]:
    """The configuration of a trainer for a plan: {request, plan, target} → the fields of an export."""
    from automap.export.export import export as exported
    from automap.plan import Plan

    plan = Plan.from_json(document["plan"])
    found: dict[str, Any] = to_json(exported(plan, _problem(document, graph, plan), document["target"]))
    return found


def estimate(document: Mapping[str, Any], graph: bytes) -> dict[str, Any]:
    """Prices a plan, or stated degrees: {request, plan | degrees} → the plan with its estimate."""
    from automap.plan import Plan
    from service.priced_plans import hand_made_plan, priced_anew

    if document["plan"] is None:
        evaluator = _evaluator(document, graph)
        try:
            return hand_made_plan(evaluator, document["degrees"]).to_json()
        except PlanError as fault:
            raise fault.at(f"degrees.{fault.field}") from None
    plan = Plan.from_json(document["plan"])
    return priced_anew(plan, _evaluator(document, graph, plan)).to_json()


def recommend(document: Mapping[str, Any], graph: bytes) -> dict[str, Any]:
    """Compares clusters: {request, clusters, goals} → the answer of `automap recommend`."""
    from agents.recommend import Goals
    from agents.recommend import recommend as rate
    from automap.cluster import parse_cluster
    from service.command.recommending import to_json as answer_of

    for number, text in enumerate(document["clusters"]):
        try:
            parse_cluster(text)
        except ClusterError as fault:
            raise fault.at(fault.field.replace("cluster", f"clusters[{number}]", 1)) from None
    request, goals = _request(document), Goals(**document["goals"])
    found = rate(_graph(document, graph), document["clusters"], request.training, goals, hints=request.hints)
    return answer_of(found, goals.steps)


def report(document: Mapping[str, Any], graph: bytes) -> dict[str, Any]:
    """The page of a plan: {request, plan} → {html}."""
    from service.drawing.page import report as page_of

    return {"html": page_of(_with_timeline(document, graph))}


def draw(document: Mapping[str, Any], graph: bytes) -> dict[str, Any]:
    """Draws a plan: {request, plan} → {lines, pictures: {name: {about, svg}}}."""
    from service.drawing.page import ABOUT, svg
    from service.drawing.pictures import pictures_of
    from service.report import head, summary

    drawn = _with_timeline(document, graph)
    return {
        "lines": [list(line) for line in (summary(drawn) if drawn.search is not None else head(drawn))],
        "pictures": {
            name: {"about": ABOUT[name], "svg": svg(picture(drawn))} for name, picture in pictures_of(drawn).items()
        },
    }


def _with_timeline(document: Mapping[str, Any], graph: bytes) -> Any:
    """The plan of a task, priced again with its timeline; what its search has recorded stays."""
    from automap.plan import Plan
    from service.priced_plans import priced_anew

    plan = Plan.from_json(document["plan"])
    return priced_anew(plan, _evaluator(document, graph, plan), with_timeline=True)


TASKS: Mapping[str, Task] = {
    "check": check, "estimate": estimate, "recommend": recommend, "draw": draw, "report": report,
    "export": export,
}  # fmt: skip


def _request(document: Mapping[str, Any]) -> Any:
    from service.jobs.run_job import JobRequest

    return JobRequest.from_json(document["request"])


def _graph(document: Mapping[str, Any], graph: bytes) -> Any:
    from service.jobs.run_job import import_graph

    request = _request(document)
    if request.model.zoo:
        try:
            return import_graph(b"", request)
        except ModelError as fault:
            raise (fault.at("zoo") if fault.field == "model" else fault) from None
    read = _read if len(graph) <= KEPT_BYTES else _read.__wrapped__
    return read(graph, document["model_id"])


@functools.lru_cache(maxsize=1)
def _read(graph: bytes, sha256: str) -> Any:
    """The graph of a stored model; that of the last request is kept, for jobs of one model come one after another."""
    from ir.serialize import graph_from_bytes

    return replace(graph_from_bytes(graph), sha256=sha256)


def _problem(document: Mapping[str, Any], graph: bytes, plan: Any = None) -> Any:
    from service.jobs.run_job import build_problem, completed

    request = _request(document)
    if plan is None:
        request = completed(request)
    else:
        request = replace(request, cluster=plan.cluster, training=to_json(plan.training))
    return build_problem(_graph(document, graph), request)


def _evaluator(document: Mapping[str, Any], graph: bytes, plan: Any = None) -> Any:
    from automap.price.evaluator import Evaluator

    return Evaluator(_problem(document, graph, plan))


def answer(line: bytes, graph: bytes) -> dict[str, Any]:
    """The answer to a task: {found}, or {problem} if it cannot be met."""
    task = json.loads(line)
    try:
        return {"found": TASKS[task["task"]](task["document"], graph)}
    except UserError as fault:
        return {"problem": problem_of(fault)}
    except MemoryError:
        most = f"more than {MEMORY_BYTES >> 30} GiB"
        repair = "Give a smaller model, cluster or number of micro-batches."
        return {"problem": limit(422, "The plan is too large", field=str(task["task"]), value=most, repair=repair)}
    except ModuleNotFoundError as fault:
        lacks, repair = str(fault.name), "Ask the operator to install it."
        return {"problem": limit(501, "The service lacks a library", field="library", value=lacks, repair=repair)}


def main() -> None:
    """Answers tasks until the input ends."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = "1"
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is not an answer
    while line := sys.stdin.buffer.readline():
        head = json.loads(line)
        graph = sys.stdin.buffer.read(head["num_bytes"])
        signal.alarm(head["limit_s"] + _GRACE_S)
        output.write(json.dumps(answer(line, graph)).encode() + b"\n")
        output.flush()
        signal.alarm(0)


if __name__ == "__main__":
    main()
