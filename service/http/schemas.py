"""The bodies of REST requests and responses.

What clients send is a record and read like every other document; what they get is made by pydantic, which lives only
here. Everything behind works with the records of `automap` and `service.jobs.run_job`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel

from agents.searcher import MAX_EVALUATIONS
from automap.cluster import Cluster
from automap.device_kinds import MAX_DEVICES
from automap.gnn.problem import GnnProblem
from automap.hints import Hints
from automap.problem import Training
from automap.records import DocumentOf, Items, Length, Range, to_json
from service.jobs.records import Job, Model, State
from service.jobs.run_job import DimPlace, DimSize, JobRequest, ModelOptions, Priority, Seed, Workers
from service.jobs.trial_options import Trials

Text = Annotated[str, Length(500)]
Name = Annotated[str, Length(500, least=1)]
Degree = Annotated[int, Range(1, MAX_DEVICES)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBody:
    """A model and its training."""

    model_id: Annotated[Name, "Id of an uploaded model."] = ""
    zoo: Annotated[Name, "A named model in place of an uploaded one, such as gpt2-xl or gpt2:seq_len=512."] = ""
    name: Annotated[Text, "Name of the model, for people."] = ""
    dims: Annotated[Mapping[str, DimSize], "Symbolic dim -> its size."] = field(default_factory=dict)
    parameters: Annotated[tuple[Text, ...], "Globs over graph inputs that are parameters."] = ()
    batch_dims: Annotated[Mapping[str, DimPlace | None], "Data input -> its batch dim; null = none."] = field(
        default_factory=dict
    )
    training: Annotated[
        Mapping[str, Any],
        DocumentOf(Training, completed=("global_batch",)),
        "What it leaves out is as the file under hints.baseline says, if there is one.",
    ]
    hints: Annotated[Mapping[str, Any], DocumentOf(Hints)] = field(default_factory=dict)

    def options(self) -> ModelOptions:
        """What the request says about the model."""
        return ModelOptions(
            name=self.name,
            dims=self.dims,
            parameters=self.parameters,
            batch_dims=self.batch_dims,
            zoo=self.zoo.removeprefix("zoo:"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemBody(ModelBody):
    """A model, its training, and the cluster for it."""

    cluster: Annotated[
        Text | Annotated[Mapping[str, Any], DocumentOf(Cluster)],
        "A preset such as 4x8xA100-80GB, or a cluster document.",
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobBody(ProblemBody):
    """`POST /v1/jobs`."""

    budget: Annotated[
        Annotated[int, Range(1, MAX_EVALUATIONS)] | Text, "A time, as in 30s or 2m, or a number of evaluations."
    ] = "30s"
    searchers: Annotated[
        tuple[Text, ...],
        "Names of search algorithms, which run one after another, each with its share of the budget; the best plan of "
        "all is returned.",
    ] = ("portfolio",)
    tie: Annotated[
        float,
        Range(0, 1),
        "Plans whose step times differ by less than this share of the error band count as equally fast, and the "
        "simplest of them is returned; 0: always the fastest.",
    ] = 0.1
    seed: Seed = 0
    trials: Annotated[
        Trials | None,
        "Run up to `top_k` plans for some steps on the host of the worker, if this host is the cluster, and return the "
        "one that was measured fastest.",
    ] = None
    priority: Annotated[Priority, "Of the jobs of a tenant that wait, those with a higher priority begin first."] = 0
    workers: Annotated[
        Workers,
        "Number of workers that search for this job at the same time, with different seeds. Each counts as a job "
        "of the tenant that waits, and its seconds count for the day. Needs a budget in time.",
    ] = 1

    def request(self) -> JobRequest:
        """The job as a record of the service."""
        return JobRequest(
            cluster=self.cluster,
            training=self.training,
            hints=self.hints,
            model=self.options(),
            budget=str(self.budget),
            searchers=self.searchers,
            tie=self.tie,
            seed=self.seed,
            trials=self.trials,
            priority=self.priority,
            workers=self.workers,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GnnJobBody:
    """`POST /v1/gnn/jobs`."""

    problem: Annotated[Mapping[str, Any], DocumentOf(GnnProblem)]
    budget: Annotated[
        Annotated[int, Range(1, MAX_EVALUATIONS)] | Text, "A time, as in 20s, or a number of simulated placements."
    ] = "20s"
    searcher: Annotated[Text, "auto, metropolis, enumeration or dqn."] = "auto"
    seed: Seed = 0

    def request(self) -> JobRequest:
        """The job as a record of the service."""
        return JobRequest(
            cluster="",
            training={},
            budget=str(self.budget),
            searchers=(self.searcher,),
            seed=self.seed,
            gnn=self.problem,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DegreesBody:
    """A plan that is stated by its degrees; see `automap.space.stated_strategy.Strategy`."""

    dp: Annotated[Degree | None, "Ranks that split the batch; null = all devices that the other degrees leave."] = None
    tp: Annotated[Degree, "Ranks that split the weights."] = 1
    pp: Annotated[Degree, "Pipeline ranks."] = 1
    cp: Annotated[Degree, "Ranks that split the sequence."] = 1
    ep: Annotated[Degree, "Ranks that share the experts."] = 1
    micro_batch: Annotated[Degree, "Samples of a micro-batch on one replica."] = 1
    virtual: Annotated[Degree, "Virtual stages of each pipeline rank."] = 1
    schedule: Annotated[Text | None, "Name of the pipeline schedule; null = interleaved or 1f1b."] = None
    zero: Annotated[int, Range(0, 3), "ZeRO stage."] = 0
    recompute: Annotated[Text, "Recompute mode of all layers: none, selective or full."] = "none"
    sequence_parallel: Annotated[bool, "Whether tp splits the sequence between products."] = False
    layers: Annotated[tuple[Degree, ...] | None, "Layers of each stage; null = as even as they go."] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateBody(ProblemBody):
    """`POST /v1/estimates`."""

    degrees: Annotated[DegreesBody, "The plan, by its degrees."] = DegreesBody()
    plan: Annotated[
        Mapping[str, Any] | None,
        "The plan as a document (GET /v1/schemas/plan), in place of degrees; its cluster and training count.",
    ] = None

    def request(self) -> JobRequest:
        """What is priced, as a record of the service."""
        return JobRequest(cluster=self.cluster, training=self.training, hints=self.hints, model=self.options())


@dataclass(frozen=True, kw_only=True, slots=True)
class RecommendationBody(ModelBody):
    """`POST /v1/recommendations`."""

    clusters: Annotated[tuple[Text, ...], Items(32), "Texts of the clusters that are compared, such as 4x8xA100-80GB."]
    prices: Annotated[
        Mapping[str, Annotated[float, Range(0, 1e9, above=True)]] | None,
        "Kind of device -> your price of one for an hour; null = devices cost alike.",
    ] = None
    target_step_s: Annotated[Annotated[float, Range(0, 1e9, above=True)] | None, "Longest step."] = None
    max_cost_per_hour: Annotated[
        Annotated[float, Range(0, 1e12, above=True)] | None, "Highest price of a cluster for an hour; needs prices."
    ] = None
    steps: Annotated[Annotated[float, Range(1, 1e12)] | None, "Steps of the whole training, for days and cost."] = None

    def request(self) -> JobRequest:
        """The model and its training, as a record of the service."""
        return JobRequest(cluster="", training=self.training, hints=self.hints, model=self.options())


class ModelView(BaseModel):
    """A stored model."""

    id: str
    name: str
    num_bytes: int
    summary: dict[str, Any]

    @staticmethod
    def of(model: Model) -> ModelView:
        """The view of a model's record."""
        return ModelView(**to_json(model))


class ModelList(BaseModel):
    """All models of a tenant, by name."""

    models: list[ModelView]


class JobView(BaseModel):
    """A job; its plan is a resource of its own."""

    id: str
    state: State
    model_id: str
    request: dict[str, Any] | None
    """Null if the stored record cannot be read; `problem` then says why."""
    attempt: int
    progress: dict[str, Any] | None
    problem: dict[str, Any] | None
    created_at: float
    started_at: float | None
    finished_at: float | None
    step_time_s: float | None
    """Predicted seconds of a step of the plan; null if the job has none. `progress.best_step_time_s` may be less: of
    plans that the estimate cannot tell apart, the plainest is returned."""
    links: dict[str, str]

    @staticmethod
    def of(job: Job, root_path: str) -> JobView:
        """The view of a job's record, for clients that reach the service below a path."""
        here = f"{root_path}/v1/jobs/{job.id}"
        return JobView(
            **to_json(job),
            links={"self": here, "plan": f"{here}/plan", "cancel": f"{here}/cancel", "events": f"{here}/events"},
        )


class ExportView(BaseModel):
    """The configuration of a trainer that runs a plan."""

    target: str
    version: str
    files: dict[str, str]
    """Name -> text."""
    launch: str
    notes: list[dict[str, str | float | None]]
    """For each decision of the plan: exact, rounded, or left to the user."""


class Rated(BaseModel):
    """A cluster with the step time of the best template on it."""

    cluster: str
    part_of: str | None
    """The cluster of the request that it is a part of; null for a cluster of the request."""
    devices: str
    """Numbers of its devices in the cluster of the request."""
    num_devices: int
    lower_bound_s: float | None
    step_time_s: float | None
    cost_per_hour: float | None
    cost_per_step: float | None
    device_seconds: float | None
    """Device-seconds of a step."""
    days: float | None
    cost: float | None
    fault: str | None
    """Why the cluster is left out."""


class Chosen(Rated):
    """The cluster with the fewest devices, the cheapest or the fastest one, with its plan."""

    plan: dict[str, Any] | None


class RecommendationView(BaseModel):
    """The clusters that no other one beats in both time and price; and the fewest, cheapest and fastest."""

    candidates: list[Rated]
    front: list[str]
    fewest: Chosen | None
    cheapest: Chosen | None
    fastest: Chosen | None


class Picture(BaseModel):
    """A picture of a plan."""

    about: str
    """What the picture shows, as text for screen readers."""
    svg: str


class Drawing(BaseModel):
    """A plan in words and pictures."""

    lines: list[tuple[str, str]]
    """Label and text of each line of the summary."""
    pictures: dict[str, Picture]
    """Name -> picture."""


class JobList(BaseModel):
    """Jobs, newest first."""

    jobs: list[JobView]
    next: str | None
    """The `cursor` of the next page; null at the end."""


class Fault(BaseModel):
    """A problem document, RFC 9457; `field`, `value` and `repair` are there where the request can be repaired."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    field: str | None = None
    value: str | None = None
    message: str | None = None
    repair: str | None = None


class NamedModels(BaseModel):
    """Models that need no upload."""

    models: list[str]


class Targets(BaseModel):
    """Trainers that plans are exported for."""

    targets: dict[str, str]
    """Name -> what it is."""


class Version(BaseModel):
    """The version of the installed package."""

    version: str


class Health(BaseModel):
    """Whether the service answers."""

    status: Literal["ok"]


class Readiness(Health):
    """Whether jobs are accepted, and by how many workers they are run."""

    workers: int
    """Workers that have reported within the last minute."""
