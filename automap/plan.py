"""Plan: how one training step is spread over a cluster; the JSON document that users and trainers read.

`from_json` reads strictly, `Plan.check` validates a plan against a problem, `plan_schema` is the published JSON
Schema. Names, never numbers, refer to operators. An operator without an entry in `shardings` splits its batch over
the stage's batch axes and is whole on the others. Units: seconds, bytes, samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from automap.device_kinds import MAX_DEVICES, Count
from automap.errors import PlanError
from automap.hints import Samples
from automap.problem import Problem, Training
from automap.records import Range, from_json, json_schema, to_json
from automap.search_record import SearchRecord
from automap.targets import SyncKind
from ir.factors import Signature, placement_text
from ir.graph import Graph
from ir.notebook import shown
from ir.serialize import graph_digest

ScheduleKind = Literal["1f1b", "gpipe", "interleaved", "zb1p", "zb2p", "eager-1f1b", "explicit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRef:
    """Which model the plan is for."""

    name: str
    """Name of the model; a plan is for the model of the same `sha256`, whatever its name."""
    sha256: str
    """SHA-256 of the model file, or of the canonical graph where there is no file."""
    num_parameters: Annotated[int, Range(0, 10**18)]
    """Number of trained and frozen parameters."""

    def __str__(self) -> str:
        return f"{self.name!r} ({self.sha256[:8]})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Order of micro-batches in the pipeline."""

    kind: ScheduleKind = "1f1b"
    """Rule that orders the passes of each pipeline rank; `explicit`: the list in `order`."""
    order: tuple[tuple[str, ...], ...] | None = None
    """Actions of each pipeline rank if the kind is `explicit`, else null: `0F3` is the forward pass of micro-batch 3 on
    stage 0, `0B3` its backward pass, `0I3` and `0W3` the gradients of inputs and of weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Zero:
    """ZeRO: stage 1 shards optimizer state over mesh axes, stage 2 gradients too, stage 3 parameters too."""

    stage: Annotated[int, Range(0, 3)] = 0
    """ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 also the gradients, 3 also the parameters."""
    axes: tuple[str, ...] = ()
    """Mesh axes over which they are sharded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisSharding:
    """Placements of an operator's operands on one mesh axis: S(i), B or P."""

    inputs: tuple[str, ...]
    """One placement for each tensor operand, in the order of the operator."""
    outputs: tuple[str, ...]
    """One placement for each result of the operator."""

    @staticmethod
    def of(signature: Signature) -> AxisSharding:
        """The placements of a signature."""
        texts = [tuple(map(placement_text, placements)) for placements in (signature.inputs, signature.outputs)]
        return AxisSharding(inputs=texts[0], outputs=texts[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Consecutive operators of the graph and the mesh of devices that computes them."""

    operators: tuple[str, str]
    """First and last operator, in the graph's order."""
    devices: str
    """Device numbers, as in 0-7 or 0,2,4. Devices of the cluster that no stage names are idle."""
    mesh: tuple[tuple[str, Count], ...]
    """Name and size of each axis; the last axis runs over consecutive devices."""
    batch_axes: tuple[str, ...]
    """Mesh axes over which operators split their batch, unless `shardings` says otherwise."""
    batch_shares: tuple[Samples, ...] | None = None
    """Samples of a micro-batch for each index of the first batch axis, at least 1; null = as even as possible."""
    zero: Zero = Zero()
    """What is sharded among the replicas; the same in all stages."""
    shardings: Mapping[str, Mapping[str, AxisSharding]] = field(default_factory=dict)
    """Operator or glob -> axis -> placements; the most specific glob wins. `*` matches one dotted component of a name
    or a part of it, `**` anything."""
    recompute: tuple[str, ...] = ()
    """Operators or globs of regions that keep only their inputs and are computed again in the backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sync:
    """How replicas, which are the ranks of the first batch axis, stay consistent.

    Raises:
        PlanError: fields that do not belong to the kind, or are out of bounds.
    """

    kind: SyncKind = "synchronous"
    """synchronous: gradients are summed over the replicas in every step. local_sgd: each replica updates its own
    parameters, which are averaged every `period` steps. dasgd: as local_sgd, but the average is applied `delay` steps
    later."""
    period: Annotated[int, Range(1, 1_000_000)] | None = None
    """Number of steps from one averaging to the next, at least 1; null if synchronous."""
    delay: Annotated[int, Range(1, 1_000_000)] | None = None
    """Number of steps during which a dasgd averaging is under way, 1 to `period`; null for other kinds."""
    merge: Literal["corrected", "mixing"] | None = None
    """How dasgd applies an average to parameters w that have changed meanwhile. corrected (the default):
    w <- average + (w - w at the start of the averaging). mixing: w <- local_share w + (1 - local_share) average. Null
    for other kinds."""
    local_share: Annotated[float, Range(0, 1)] | None = None
    """Weight of the local parameters if `merge` is mixing, 0 to less than 1; else null."""

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
            raise self._fault("local_share", "leaves no room for the average", "Give 0 to less than 1.")

    def _belongs(self, name: str, wanted: bool) -> None:
        if (getattr(self, name) is not None) != wanted:
            of = f"{self.kind}, merge {self.merge}" if self.merge else self.kind
            repair = "Give it." if wanted else "Leave it out."
            raise self._fault(name, f"{'is needed' if wanted else 'has no meaning'} with {of}", repair)

    def _fault(self, name: str, text: str, repair: str) -> PlanError:
        value = getattr(self, name)
        return PlanError(text, field=name, value="null" if value is None else value, repair=repair)


AxisUse = Literal["data", "tensor", "context", "other", "repeated"]
"""What the operators that do most of the arithmetic split over a mesh axis. `data`: their batch; `tensor`: weights;
`context`: the sequence of a model with attention; `other`: another dim of activations, such as rows of pixels;
`repeated`: nothing, all ranks do the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """The degrees of parallelism of a stage, by what its operators do on the mesh axes, whatever these are called.

    data * tensor * context * other * repeated = number of devices of the stage. They are derived from the shardings
    (`automap.price.degrees`); what a document says of them is not read.
    """

    data: Count
    """Ranks that split the batch."""
    tensor: Count
    """Ranks that split weights."""
    context: Count
    """Ranks that split the sequence of attention, and not the batch."""
    expert: Count
    """Ranks over which whole experts are spread. Other operators use these ranks for something else, mostly to split
    the batch, so that they count in `data` or another degree too."""
    other: Count
    """Ranks that split another dim of activations, such as rows of pixels."""
    repeated: Count
    """Ranks that repeat each other's work."""
    sequence_parallel: bool
    """Whether the ranks that split weights split the sequence in normalisations."""
    pipeline: Count
    """Number of pipeline ranks."""
    virtual_stages: Count
    """Stages of each pipeline rank."""
    zero: Annotated[int, Range(0, 3)]
    """ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 also the gradients, 3 also the parameters."""
    micro_batch: Samples
    """Samples of a micro-batch on one device; if devices have different numbers of samples, the largest of them."""
    accumulation_steps: Samples
    """Micro-batches of a step, whose gradients are added up."""
    sequence_length: Annotated[int, Range(1, 1 << 40)] | None
    """Tokens of a sample; null if the model has no sequence."""
    axes: Mapping[str, AxisUse]
    """Mesh axis of several ranks -> its use."""
    expert_axes: tuple[str, ...]
    """The axes over which whole experts are spread."""


MEMORY_CLASSES = ("parameters", "gradients", "optimizer", "activations", "buffers")
"""Fields of `DeviceMemory` that add up to the whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Memory of each device of a stage in the fullest moment of a step, by class, bytes."""

    devices: str
    """Device numbers, as in 0-7 or 0,2,4."""
    parameters: float
    """Parameters in the precision of training; float32 masters are part of `optimizer`."""
    gradients: float
    """Gradients that exist in this moment; 0 if the backward pass has made none yet."""
    optimizer: float
    """State of the optimizer, such as moments and masters."""
    activations: float
    """Tensors that are saved for the backward pass, of all micro-batches in flight."""
    buffers: float
    """Communication and gather buffers, temporaries and what the framework holds."""
    capacity: float
    """Memory of the device, without what `hints.memory_reserve_bytes` keeps for other programs."""
    reserve: float = 0.0
    """Part of the capacity that is kept free because predictions may be too low: with it, the probability that a plan
    fits is `training.memory_confidence`."""

    @property
    def total(self) -> float:
        """All classes together."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a plan is predicted to cost."""

    step_time_s: float
    """Predicted time of one optimizer step, seconds."""
    error_band_s: tuple[float, float]
    """Seconds between which the measured step time is expected with a probability of 80 %."""
    samples_per_s: float
    """The global batch over the step time."""
    tokens_per_s_per_device: float | None
    """Tokens per second divided by the number of devices in use; null if the model has no sequence."""
    mfu: float
    """Model FLOPs utilisation: FLOP/s of the model, without recomputation, over the peak FLOP/s of the devices in
    use."""
    memory_bytes: tuple[DeviceMemory, ...]
    """One entry for each pipeline rank, or for each kind of device of a rank where their shares differ."""
    breakdown_s: Mapping[str, Any]
    """compute, exposed_communication {kind: s}, bubble, optimizer, overhead: they add up to the step time."""
    lower_bound_s: float
    """Seconds below which no plan of the problem can be, by the same cost model."""
    fit_probability: float | None = None
    """Probability that the plan fits into the memory of all its devices, 0..1."""
    timeline: tuple[tuple[tuple[str, float, float], ...], ...] | None = None
    """Actions of each pipeline rank in order, each with the seconds at which it begins and ends; null unless
    requested."""

    @property
    def fits(self) -> bool:
        """Whether every device has room, with `training.memory_confidence`."""
        return all(m.total <= m.capacity - m.reserve for m in self.memory_bytes)

    @property
    def overflows(self) -> bool:
        """Whether the plan is predicted to need more than a device has: most probably it does not fit."""
        return any(m.total > m.capacity for m in self.memory_bytes)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one training step is spread over a cluster, with its predicted and measured cost."""

    model: ModelRef
    """The model that the plan is for."""
    cluster: Mapping[str, Any]
    """The devices that the plan is for, in the form of a cluster file."""
    training: Training
    """The settings that the plan was priced with."""
    num_micro_batches: Samples
    """Micro-batches of a step; times `samples_per_micro_batch` it is the global batch."""
    samples_per_micro_batch: Samples
    """Samples of one micro-batch over all replicas of a stage."""
    schedule: Schedule
    """In which order the passes of the pipeline run."""
    stages: tuple[Stage, ...]
    """Chunks of the graph in dataflow order; a device may serve several (virtual stages)."""
    sync: Sync = Sync()
    """How the replicas stay consistent."""
    degrees: tuple[Degrees, ...] = ()
    """Degrees of parallelism: one entry if all stages have the same, else one for each stage. Written with the
    estimate, and not read."""
    estimate: Estimate | None = None
    """What the plan is predicted to cost; null in a plan by hand that has not been priced."""
    measured: Mapping[str, Any] | None = None
    """What a trial measured: step time, memory, number of steps; null without a trial."""
    launch: str | None = None
    """The command that starts the training, with one process for each device."""
    why: tuple[str, ...] = ()
    """The reasons for the step time, one sentence for each of the largest costs."""
    search: SearchRecord | None = None
    """How the plan was found; null in a plan that no search found."""
    warnings: tuple[str, ...] = ()
    """What was assumed, and what may make the estimate wrong."""
    schema: Literal["automap.plan/1"] = "automap.plan/1"
    """Name and version of this form."""

    @property
    def step_time_s(self) -> float:
        """Predicted step time in seconds, of a plan that has an estimate."""
        assert self.estimate is not None
        return self.estimate.step_time_s

    def __repr__(self) -> str:
        parts = [f"{len(self.stages)} stage{'s' if len(self.stages) > 1 else ''}"]
        parts.append(f"{self.num_micro_batches} x {self.samples_per_micro_batch} samples a step")
        parts += [f"{self.estimate.step_time_s:.4g} s a step"] if self.estimate is not None else []
        return f"Plan({self.model.name!r}: {', '.join(parts)})"

    def _repr_html_(self) -> str | None:
        return shown(self)

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


MOST_PARTS = 8
"""Parts of a list of devices that is shown whole."""


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
        if int(ends[0]) > int(ends[1]):
            repair = f"Write it as {ends[1]}-{ends[0]}, or list the devices in their order: 3,2,1,0."
            raise PlanError("a range of devices ends before it begins", field="devices", value=text, repair=repair)
        numbers += range(int(ends[0]), int(ends[1]) + 1)
    return tuple(numbers)


def devices_in_words(text: str) -> str:
    """A list of devices for people: `device 7`, `devices 0-3`; a long list ends with its number of devices."""
    if text.isdecimal():
        return f"device {text}"
    parts = text.split(",")
    if len(parts) <= MOST_PARTS:
        return f"devices {text}"
    return f"devices {','.join(parts[:3])}, … ({len(parse_devices(text))} in all)"


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
        text, repair = f"the plan is for {plan.model}, not for {expected}", "Give the model that the plan was made for."
        if plan.model.num_parameters == expected.num_parameters:
            repair += (
                " If it is this one, exported again or built by another version of AutoMAP, search again, or set the "
                f"plan's model.sha256 to {expected.sha256}: its operators are then looked up in this model."
            )
        raise PlanError(text, field="plan.model.sha256", value=plan.model.sha256[:12], repair=repair)
