"""Plan: how one training step is spread over a cluster; the JSON document that users and trainers read.

`from_json` reads strictly, `Plan.check` validates a plan against a problem, `plan_schema` is the published JSON
Schema. Names, never numbers, refer to operators. An operator without an entry in `shardings` splits its batch over
the stage's batch axes and is whole on the others. Units: seconds, bytes, samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from automap.cluster import MAX_DEVICES, Count
from automap.errors import PlanError
from automap.hints import Samples
from automap.problem import Problem, SyncKind, Training
from automap.records import Range, from_json, json_schema, to_json
from ir.graph import Graph
from ir.serialize import graph_digest

ScheduleKind = Literal["1f1b", "gpipe", "interleaved", "zb1p", "zb2p", "explicit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRef:
    """Which model the plan is for."""

    name: str
    sha256: str
    """Of the model file; of the canonical graph when it was built without a file."""
    num_parameters: Annotated[int, Range(0, 10**18)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Order of micro-batches in the pipeline."""

    kind: ScheduleKind = "1f1b"
    order: tuple[tuple[str, ...], ...] | None = None
    """For `explicit`: per pipeline rank its actions in torch's words, see `automap.schedule`; null of other kinds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Zero:
    """Sharding of optimizer state (1), gradients (2) and parameters (3) over mesh axes."""

    stage: Annotated[int, Range(0, 3)] = 0
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisSharding:
    """Placements of an operator's operands on one mesh axis: S(i), B or P."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A run of operators on a mesh of devices."""

    operators: tuple[str, str]
    """First and last operator, in the graph's order."""
    devices: str
    """Device numbers, as in 0-7 or 0,2,4; those of the cluster that no stage names are idle."""
    mesh: tuple[tuple[str, Count], ...]
    """Axes and sizes; the last axis runs over consecutive devices."""
    batch_axes: tuple[str, ...]
    batch_shares: tuple[Samples, ...] | None = None
    """Samples of a micro-batch for each index of the first batch axis, at least 1; null = as even as possible."""
    zero: Zero = Zero()
    shardings: Mapping[str, Mapping[str, AxisSharding]] = field(default_factory=dict)
    """Operator or glob (see `automap.globs`) -> axis -> placements; the most specific glob wins."""
    recompute: tuple[str, ...] = ()
    """Operators or globs: regions whose inputs are kept and whose inside is computed again in the backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sync:
    """How replicas, the ranks of the first batch axis, stay together; see `automap.runtime.executor.replica_averaging`.

    Raises:
        PlanError: fields that do not belong to the kind, or are out of bounds.
    """

    kind: SyncKind = "synchronous"
    """synchronous: gradients are summed over the replicas in every step. local_sgd: each takes steps of its own, and
    parameters are averaged every `period` steps. dasgd: likewise, but the average arrives `delay` steps later."""
    period: Annotated[int, Range(1, 1_000_000)] | None = None
    """Steps from one averaging to the next, at least 1; null if synchronous."""
    delay: Annotated[int, Range(1, 1_000_000)] | None = None
    """Of dasgd: steps that hide the averaging, 1 to `period`; else null."""
    merge: Literal["corrected", "mixing"] | None = None
    """Of dasgd: what becomes of the steps taken meanwhile. corrected: kept, w <- average + (w - what was averaged);
    mixing: w <- local_share w + (1 - local_share) average. Default corrected; of other kinds null."""
    local_share: Annotated[float, Range(0, 1)] | None = None
    """Of mixing: 0 to less than 1; else null."""

    def __post_init__(self) -> None:
        if self.kind == "dasgd" and self.merge is None:
            object.__setattr__(self, "merge", "corrected")
        self._belongs("period", self.kind != "synchronous")
        self._belongs("delay", self.kind == "dasgd")
        self._belongs("merge", self.kind == "dasgd")
        self._belongs("local_share", self.merge == "mixing")
        if self.period is not None and self.period < 1:
            raise self._fault("period", "must be positive", "Give at least 1 step.")
        if self.delay is not None and not 1 <= self.delay <= (self.period or 0):
            text = f"is not from 1 to the period of {self.period}: one averaging must end before the next begins"
            raise self._fault("delay", text, "Shorten the delay, or lengthen the period; local_sgd does not wait.")
        if self.local_share is not None and not 0.0 <= self.local_share < 1.0:
            raise self._fault("local_share", "is no share that leaves room for the average", "Give 0 to less than 1.")

    def _belongs(self, name: str, wanted: bool) -> None:
        if (getattr(self, name) is not None) != wanted:
            of = f"{self.kind}, merge {self.merge}" if self.merge else self.kind
            repair = "Give it." if wanted else "Leave it out."
            raise self._fault(name, f"{'is needed' if wanted else 'has no meaning'} with {of}", repair)

    def _fault(self, name: str, text: str, repair: str) -> PlanError:
        value = getattr(self, name)
        return PlanError(text, field=name, value="null" if value is None else value, repair=repair)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Peak memory of each device of a stage by class, bytes."""

    devices: str
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    """Communication and gather buffers, temporaries and what the framework holds."""
    capacity: float

    @property
    def total(self) -> float:
        """All classes together."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a plan is predicted to cost."""

    step_time_s: float
    error_band_s: tuple[float, float]
    samples_per_s: float
    tokens_per_s_per_device: float | None
    """Of those that the plan uses; null where the model has no sequence."""
    mfu: float
    """Model FLOP/s over peak FLOP/s of the devices that the plan uses, recomputation not counted."""
    memory_bytes: tuple[DeviceMemory, ...]
    breakdown_s: Mapping[str, Any]
    """compute, exposed_communication {kind: s}, bubble, optimizer, overhead: they add up to the step time."""
    lower_bound_s: float
    """No plan of the problem can be faster under this price."""
    timeline: tuple[tuple[tuple[str, float, float], ...], ...] | None = None
    """Per pipeline rank its actions in order, with the seconds at which each begins and ends; null unless asked for."""

    @property
    def fits(self) -> bool:
        """Whether every device has room."""
        return all(m.total <= m.capacity for m in self.memory_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRecord:
    """What came of one plan when the best ones were tried."""

    strategy: str
    """The plan in a line."""
    outcome: str
    """See `automap.runtime.launch.launcher`."""
    message: str
    """Why it is not ok."""
    predicted: Mapping[str, float]
    """{step_time_s, peak_memory_bytes} by the estimate."""
    measured: Mapping[str, float] | None
    """{step_time_s, peak_memory_bytes, num_steps}; null unless the outcome is ok."""
    time_s: float
    """Of the whole trial."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """How measured step times compare with the estimates; applied to none of them, see
    `automap.runtime.trial.calibration`."""

    num_trials: int
    factor: float
    """Geometric mean of measured over predicted."""
    spread: float
    """The largest such ratio over the smallest; 1 = all trials agree."""
    compute: float
    """Times as long as estimated that everything takes but communication."""
    communication: float
    """Likewise collectives, sends and reductions of gradients; as `factor` where the trials cannot tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRecord:
    """Where the plan came from."""

    found_by: str
    seed: int
    evaluations: int
    """Complete plans priced by all searchers together."""
    baselines: Mapping[str, float | None]
    """Step times in seconds: dp = pure data parallelism, expert = best template, yours = hints.baseline; null where
    none of these fits, no dp where the batch or the hints leave no such plan."""
    searchers: Mapping[str, float | None] = field(default_factory=dict)
    """Best step time of each searcher that ran, seconds; null if it found nothing that fits."""
    seconds: float | None = None
    fastest_s: float | None = None
    """Step time of the fastest plan found, of which this one is a plainer equal within `tie`; null: of this one."""
    proven: bool = False
    """Whether no plan of the space that fits is faster than the fastest one found, by the estimate."""
    lower_bound_s: float | None = None
    """No plan of the space is faster, seconds."""
    num_decisions: int = 0
    """Decisions that this plan takes where more than one value is legal."""
    num_operator_decisions: int = 0
    """Those about the sharding of operators."""
    trials: tuple[TrialRecord, ...] = ()
    """Of the plans that were tried, in the order of their estimates."""
    calibration: Calibration | None = None
    """Of the trials that were ok."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The whole decision, with what is predicted and measured of it."""

    model: ModelRef
    cluster: Mapping[str, Any]
    training: Training
    num_micro_batches: Samples
    samples_per_micro_batch: Samples
    """Over all replicas of a stage."""
    schedule: Schedule
    stages: tuple[Stage, ...]
    """Chunks of the graph in dataflow order; a device may serve several (virtual stages)."""
    sync: Sync = Sync()
    estimate: Estimate | None = None
    measured: Mapping[str, Any] | None = None
    launch: str | None = None
    why: tuple[str, ...] = ()
    search: SearchRecord | None = None
    warnings: tuple[str, ...] = ()
    schema: Literal["automap.plan/1"] = "automap.plan/1"

    def to_json(self) -> dict[str, Any]:
        """The document, `schema` first."""
        document = to_json(self)
        return {"schema": document.pop("schema"), **document}

    @staticmethod
    def from_json(document: object) -> Plan:
        """Reads a plan document.

        Raises:
            PlanError: names the path of the fault.
        """
        return from_json(Plan, document, path="plan", error=PlanError)


def plan_schema() -> dict[str, Any]:
    """The published JSON Schema of plan documents."""
    return json_schema(Plan, title="AutoMAP plan, version 1")


def model_ref(graph: Graph) -> ModelRef:
    """How plans name `graph`."""
    return ModelRef(name=graph.name, sha256=graph.sha256 or graph_digest(graph), num_parameters=graph.num_parameters)


def parse_devices(text: str) -> tuple[int, ...]:
    """Device numbers of `0-3,8`.

    Raises:
        PlanError: not such a list.
    """
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last if dash else first)
        if not all(end.isdecimal() and len(end) <= len(str(MAX_DEVICES)) for end in ends):
            raise PlanError("not a list of devices", field="devices", value=text, repair="Write it as in 0-7 or 0,2,4.")
        numbers += range(int(ends[0]), int(ends[1]) + 1)
    return tuple(numbers)


def format_devices(numbers: tuple[int, ...]) -> str:
    """Inverse of `parse_devices`, with runs as ranges."""
    parts: list[str] = []
    start = previous = numbers[0]
    for number in (*numbers[1:], -1):
        if number == previous + 1:
            previous = number
            continue
        parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = number
    return ",".join(parts)


def check_model(plan: Plan, problem: Problem) -> None:
    """Refuses a plan that was made for another model.

    Raises:
        PlanError: the model's hash differs.
    """
    expected = model_ref(problem.graph)
    if plan.model.sha256 != expected.sha256:
        raise PlanError(
            f"the plan is for {plan.model.name!r}, not for {expected.name!r}",
            field="plan.model.sha256",
            value=plan.model.sha256[:12],
            repair="Give the model that the plan was made for.",
        )
