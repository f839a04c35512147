"""One job: import → search → trials → plan. The worker and `automap search` run the same function.

A pure function of a request and callbacks, independent of HTTP, queues, files and terminals. `automap` and `agents`
are imported when a job runs, so that parsing requests stays quick.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from automap.records import Range, from_json, to_json
from service.dims import MAX_SIZE
from service.jobs.trial_options import Trials

if TYPE_CHECKING:
    from agents.searcher import Budget, OnProgress, SearchResult, ShouldStop
    from automap.plan import Plan
    from automap.problem import Problem
    from ir.graph import Graph
    from ir.onnx.sandbox import Imported


DimSize = Annotated[int, Range(1, MAX_SIZE)]
DimPlace = Annotated[int, Range(0, 63)]
"""Position of a dim in its tensor; numpy allows at most 64 dims."""
Seed = Annotated[int, Range(0, 2**32 - 1)]
Priority = Annotated[int, Range(-10, 10)]
MOST_WORKERS = 64
"""Largest number of workers that search for one job (assumed)."""
Workers = Annotated[int, Range(1, MOST_WORKERS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """What the user says about a model file, beside its bytes."""

    name: str = ""
    """Name of the model in plans and lists; empty = the name that the graph has."""
    dims: Mapping[str, DimSize] = field(default_factory=dict)
    """Size of each symbolic dim that the user names."""
    parameters: tuple[str, ...] = ()
    """Globs that match the graph inputs that are parameters."""
    batch_dims: Mapping[str, DimPlace | None] = field(default_factory=dict)
    """Batch dim of each data input whose batch is not the leading dim; null = the input has no batch dim."""
    zoo: str = ""
    """Name of a model of `ir.zoo`, without `zoo:`, that is used in place of a file; empty = a file is used."""


GRACE_S = 30.0
"""Seconds of processor time that a search may take beyond its budget (assumed). Nearly all searches end within a second
of it; where nothing fits, the search for advice takes `agents.results.infeasibility_advice.WITHIN_S` more. A graph of
2,400 operators without repeated layers (an unrolled recurrence of 400 steps) takes ten seconds to its end."""
BESIDE = 4
"""Number of plans with other degrees of parallelism that are shown beside the plan of a search."""
SEARCH_SHARE = 0.5
"""Share of the progress bar that the search fills in a job with trials (assumed)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """What to search for, how long and by which searchers. The bytes of the model are kept apart from it."""

    cluster: Any
    """Text of a preset, or a cluster document."""
    training: Mapping[str, Any]
    hints: Mapping[str, Any] = field(default_factory=dict)
    model: ModelOptions = ModelOptions()
    budget: str = "30s"
    searchers: tuple[str, ...] = ("portfolio",)
    """Names of the searchers that run one after another within the budget."""
    tie: Annotated[float, Range(0, 1)] = 0.1
    """Share of the error band within which plans count as equally fast; the plainest of them is chosen. 0 = always the
    fastest."""
    seed: Seed = 0
    trials: Trials | None = None
    """How plans are tried; None = the plan is chosen by its estimate alone."""
    priority: Priority = 0
    """A job with a higher one is begun before the sender's other jobs."""
    workers: Workers = 1
    """Number of workers that search at the same time, see `service.jobs.team`."""

    gnn: Mapping[str, Any] | None = None
    """Problem of distributed GNN training, in place of model, cluster and training; None = it is about a model."""

    def to_json(self) -> dict[str, Any]:
        """The request as JSON types."""
        document: dict[str, Any] = to_json(self)
        return document

    @staticmethod
    def from_json(document: object) -> JobRequest:
        """Inverse of `to_json`."""
        return from_json(JobRequest, document, path="job")

    def of_member(self, number: int) -> JobRequest:
        """What the member with a number, from 1 on, searches for: the fastest plan, from another seed."""
        return replace(self, seed=(self.seed + number) % 2**32, tie=0.0, trials=None)


def import_graph(data: bytes, request: JobRequest) -> Graph:
    """Reads the model in a child process with limits, or builds the named one.

    Raises:
        ModelError: the file, the name, or what the request says about it.
    """
    if request.model.zoo:
        return _named(request)
    from ir.profile_import import is_profile
    from ir.serialize import graph_from_bytes

    return (
        _measured(data, request.model, _stated_parameters(request))
        if is_profile(data)
        else graph_from_bytes(import_file(data, request).graph)
    )


def import_file(data: bytes, request: JobRequest) -> Imported:
    """What `import_graph` reads of a file, with its summary, for a process that hands it on.

    Raises:
        ModelError: the file, or what the request says about it.
    """
    from ir.onnx.sandbox import Imported, SandboxLimits, import_bytes
    from ir.profile_import import is_profile

    options, parameters = request.model, _stated_parameters(request)
    if is_profile(data):
        from ir.serialize import graph_to_bytes
        from ir.summary import summarize

        measured = _measured(data, options, parameters)
        return Imported(summary=summarize(measured), graph=graph_to_bytes(measured))
    from automap.phases import phase

    with phase("reading the model"):
        return import_bytes(
            data,
            name=options.name,
            dims=options.dims,
            parameters=(*options.parameters, *parameters),
            batch_dims=options.batch_dims,
            loss=_loss(request),
            # The limit of the settings was applied when the file was accepted.
            limits=SandboxLimits(max_bytes=max(len(data), 1)),
        )


def _loss(request: JobRequest) -> str | None:
    loss = request.training.get("loss")
    return loss if isinstance(loss, str) else None


def _stated_parameters(request: JobRequest) -> tuple[str, ...]:
    """The globs under `hints.parameters`; empty where they are malformed, which is told when the hints are read."""
    given = request.hints.get("parameters", ())
    return tuple(map(str, given)) if isinstance(given, Sequence) and not isinstance(given, str) else ()


def _measured(data: bytes, options: ModelOptions, parameters: Sequence[str]) -> Graph:
    """A layer profile; it is small text and read with bounds, so no child process is needed."""
    from ir.profile_import import read_profile

    _refuse(
        {"parameters": options.parameters, "hints.parameters": parameters, "batch_dims": options.batch_dims}
        | {f"dims.{dim}": size for dim, size in options.dims.items() if dim != "batch"},
        "a layer profile does not take this",
        "Leave it out; of a profile only dims.batch, the samples of its mini-batch, may be given.",
    )
    return read_profile(data, name=options.name, batch=options.dims.get("batch"))


def _refuse(given: Mapping[str, Any], message: str, repair: str) -> None:
    from automap.errors import ModelError

    for name, value in given.items():
        if value:
            raise ModelError(
                message, field=name, value=", ".join(value) if isinstance(value, tuple) else value, repair=repair
            )


def _named(request: JobRequest) -> Graph:
    from ir import zoo

    options = request.model
    _refuse(
        {name: getattr(options, name) for name in ("dims", "parameters", "batch_dims")}
        | {"hints.parameters": _stated_parameters(request)},
        "a model of the zoo does not take this",
        "Leave it out; sizes are part of the name, as in zoo:gpt2:seq_len=512.",
    )
    graph = zoo.build(options.zoo, loss=_loss(request))
    if not options.name:
        return graph
    from ir.serialize import graph_digest

    # A name for people makes no other model: plans under both names are for the same one.
    return replace(graph, name=options.name, sha256=graph_digest(graph))


def completed(request: JobRequest) -> JobRequest:
    """The request with the settings of the training that the file of its baseline states and its sender does not.

    Raises:
        UserError: the cluster or the baseline cannot be read, or neither says the global batch.
    """
    if request.hints.get("baseline") is None:
        return request

    from automap.cluster import parse_cluster
    from automap.errors import ProblemError
    from automap.export.baseline import with_stated

    training = with_stated(request.training, request.hints, parse_cluster(request.cluster))
    if "global_batch" not in training:
        repair = "Give it: the baseline does not say it."
        raise ProblemError("missing", field="training.global_batch", value="nothing", repair=repair)
    return replace(request, training=training)


def build_problem(graph: Graph, request: JobRequest) -> Problem:
    """Checks that model, cluster, training and hints, the plan of today in them too, fit each other.

    Raises:
        UserError: names what does not.
    """
    from automap.cluster import parse_cluster
    from automap.problem import Problem

    problem = Problem.build(graph, parse_cluster(request.cluster), request.training, request.hints)
    if problem.target is not None:
        from automap.space.target_limits import check_model

        check_model(problem.graph, problem.target, field="training.target")
    if problem.hints.baseline is not None:
        from automap.export.baseline import read_baseline
        from automap.price.evaluator import Evaluator

        read_baseline(Evaluator(problem))
    return problem


def check_search(request: JobRequest) -> Budget:
    """Checks budget, searchers, tie, seed, trials and workers.

    Raises:
        ProblemError: one of them is not known or out of range, or they do not go together.
    """
    from agents.portfolio.in_turn import check_searchers
    from agents.searcher import Budget
    from automap.errors import ProblemError

    # A record too: what Python or the command line made of it may be out of range.
    from_json(JobRequest, request.to_json(), path="", error=ProblemError)
    budget = Budget.parse(request.budget)
    check_searchers(request.searchers, budget)
    if request.workers > 1 and budget.seconds is None:
        raise ProblemError(
            "several workers need a budget in time: a number of evaluations stands for always the same plan",
            field="workers",
            value=request.workers,
            repair="Give a time, as in 30s, or one worker.",
        )
    return budget


def run_job(
    request: JobRequest,
    load_graph: Callable[[], Graph],
    *,
    on_progress: OnProgress,
    should_stop: ShouldStop,
    search: Callable[..., SearchResult] | None = None,
    on_result: Callable[[SearchResult], None] = lambda result: None,
    start: Sequence[Plan] = (),
) -> Plan:
    """The fastest plan that fits: by the estimate or, where plans are tried, by what is measured.

    Args:
        request: everything but the model's bytes.
        load_graph: returns the imported model; called once the rest of the request is known to be good.
        on_progress: called a few times a second.
        should_stop: called often; once it returns true, the best plan so far is returned.
        search: in place of `agents.search_offer`.
        on_result: called with the result of the search, before any trials.
        start: plans with which the search begins.

    Raises:
        UserError: the request, the model, or that nothing fits.
    """
    budget = check_search(request)
    request = completed(request)
    problem = build_problem(load_graph(), request)
    if search is None:
        from agents import search_offer

        search = search_offer
    trials, lacks = request.trials, None
    if trials is not None:
        from automap.runtime.launch.host import lacking

        lacks = lacking(problem.cluster)
    share = SEARCH_SHARE if trials is not None and lacks is None else 1.0
    work = functools.partial(
        search,
        problem,
        budget,
        searchers=request.searchers,
        tie=request.tie,
        seed=request.seed,
        on_progress=lambda progress: on_progress(replace(progress, fraction=share * progress.fraction)),
        should_stop=should_stop,
        start=start,
    )
    result = _in_time(work, budget)
    on_result(result)
    if trials is None:
        return _side_by_side(problem, result, request.tie)
    if lacks is not None:
        text = f"no plan was tried: a trial {lacks}. Trials run on clusters that are this host, or a part of it"
        return replace(result.plan, warnings=(*result.plan.warnings, text))
    return _tried(problem, result, trials, request.seed, on_progress, should_stop)


def _side_by_side(problem: Problem, result: SearchResult, tie: float) -> Plan:
    """The plan of a search, with the best ones of other degrees of parallelism in its record."""
    from automap.comparisons import Beside
    from automap.price.estimate import error_band
    from service.report import memory_share
    from service.strategy import data_parallel, strategy

    limit_s = (result.record.fastest_s or result.step_time_s) * (1.0 + tie * error_band(problem))
    beside = [
        Beside(
            strategy=strategy(plan),
            step_time_s=plan.estimate.step_time_s,
            memory=memory_share(plan),
            tie=plan.estimate.step_time_s <= limit_s,
            data_parallel=data_parallel(plan),
        )
        for plan in result.others(BESIDE)
        if plan.estimate is not None
    ]
    return replace(result.plan, search=replace(result.record, beside=tuple(beside)))


def _in_time(search: Callable[[], SearchResult], budget: Budget) -> SearchResult:
    """The result of a search, which is ended if it still runs `GRACE_S` after its budget."""
    from automap.errors import ProblemError
    from service.jobs.deadline import in_time

    if budget.seconds is None:
        return search()
    late = ProblemError(
        f"the search did not end in {budget.seconds:g} s: the problem is too large for so little time",
        field="budget",
        value=str(budget),
        repair="Give it more time, or a smaller global batch, cluster or model.",
    )
    return in_time(search, budget.seconds, GRACE_S, late)


def _tried(
    problem: Problem, result: SearchResult, trials: Trials, seed: int, on_progress: OnProgress, should_stop: ShouldStop
) -> Plan:
    """The plan that trials measure as the fastest."""
    from agents.results.diverse_top_k import MOST
    from agents.searcher import Progress
    from service.jobs.job_trials import try_plans

    plans, began = result.unlike(MOST), time.monotonic()
    estimate = result.plan.estimate
    assert estimate is not None

    def told(number: int, fraction: float, best_s: float | None) -> None:
        on_progress(
            Progress(
                searcher=f"trial {number + 1} of {trials.top_k}",
                evaluations=result.evaluations,
                seconds=result.seconds + time.monotonic() - began,
                best_step_time_s=best_s or estimate.step_time_s,
                lower_bound_s=estimate.lower_bound_s,
                fraction=SEARCH_SHARE + (1.0 - SEARCH_SHARE) * (number + fraction) / trials.top_k,
            )
        )

    return try_plans(problem, plans, trials, seed=seed, on_trial=told, should_stop=should_stop)
