"""The bodies of REST requests and responses.

pydantic lives only here: everything behind works with the records of `automap` and `service.run_job`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from service.run_job import JobRequest, ModelOptions, Trials
from service.store import Job, Model, State

Text = Annotated[str, StringConstraints(max_length=500)]


class TrialsBody(BaseModel):
    """`trials` of a job."""

    model_config = ConfigDict(extra="forbid")

    top_k: int = Field(default=3, description="Plans, 1 to 16; unlike each other, so that there may be fewer.")
    steps: int = Field(default=5, description="Measured of each, 1 to 1000.")
    time_limit_s: float = Field(default=120.0, description="Of each, 1 to 3600.")


class JobBody(BaseModel):
    """`POST /v1/jobs`."""

    model_config = ConfigDict(extra="forbid")

    model_id: Text = Field(default="", description="Of an uploaded model.")
    zoo: Text = Field(default="", description="A named model in place of it, such as gpt2-xl or gpt2:seq_len=512.")
    name: Text = Field(default="", description="Of the model, for people.")
    dims: dict[str, int] = Field(default={}, description="Symbolic dim -> size.")
    parameters: list[Text] = Field(default=[], description="Globs over graph inputs that are parameters.")
    batch_dims: dict[str, int | None] = Field(default={}, description="Data input -> its batch dim; null = none.")
    cluster: Text | dict[str, Any] = Field(description="A preset such as 4x8xA100-80GB, or a cluster document.")
    training: dict[str, Any] = Field(description="global_batch, precision, optimizer, loss, trainer ...")
    budget: Annotated[int, Field(ge=1)] | Text = Field(default="30s", description="30s, 2m, or evaluations.")
    searchers: list[Text] = Field(
        default=["portfolio"], description="One after another, each with its share of the budget; the best plan wins."
    )
    tie: float = Field(
        default=0.1,
        ge=0.0,
        le=1.0,
        description="Share of the error band within which plans are equally fast, and the plainest leaves.",
    )
    seed: int = Field(default=0, ge=0, lt=2**32)
    hints: dict[str, Any] = Field(default={}, description="What you know or insist on.")
    trials: TrialsBody | None = Field(
        default=None,
        description="Run the best plans where the worker runs, if that is the cluster, and choose by that.",
    )

    def request(self) -> JobRequest:
        """The same as a record."""
        return JobRequest(
            cluster=self.cluster,
            training=self.training,
            hints=self.hints,
            model=ModelOptions(
                name=self.name,
                dims=self.dims,
                parameters=tuple(self.parameters),
                batch_dims=self.batch_dims,
                zoo=self.zoo.removeprefix("zoo:"),
            ),
            budget=str(self.budget),
            searchers=tuple(self.searchers),
            tie=self.tie,
            seed=self.seed,
            trials=None if self.trials is None else Trials(**self.trials.model_dump()),
        )


class ModelView(BaseModel):
    """A stored model."""

    id: str
    name: str
    num_bytes: int
    summary: dict[str, Any]

    @staticmethod
    def of(model: Model) -> ModelView:
        """What clients see of `model`."""
        return ModelView(id=model.id, name=model.name, num_bytes=model.num_bytes, summary=dict(model.summary))


class JobView(BaseModel):
    """A job; its plan is a resource of its own."""

    id: str
    state: State
    model_id: str
    request: dict[str, Any]
    attempt: int
    progress: dict[str, Any] | None
    problem: dict[str, Any] | None
    created_at: float
    started_at: float | None
    finished_at: float | None
    links: dict[str, str]

    @staticmethod
    def of(job: Job) -> JobView:
        """What clients see of `job`."""
        here = f"/v1/jobs/{job.id}"
        return JobView(
            id=job.id,
            state=job.state,
            model_id=job.model_id,
            request=job.request.to_json(),
            attempt=job.attempt,
            progress=None if job.progress is None else dict(job.progress),
            problem=None if job.problem is None else dict(job.problem),
            created_at=job.created_at,
            started_at=job.started_at,
            finished_at=job.finished_at,
            links={"self": here, "plan": f"{here}/plan", "cancel": f"{here}/cancel"},
        )


class JobList(BaseModel):
    """The latest jobs."""

    jobs: list[JobView]


class Health(BaseModel):
    """Whether the service and its store answer."""

    status: Literal["ok"]
