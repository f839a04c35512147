"""The problem document `automap.gnn-problem/1`: machines, tasks with roles and demands, and the flows between tasks.

Every iteration each task runs once. A sampler asks graph stores for features, makes a mini-batch of them and sends it
to a worker; a worker trains and sends gradients to parameter servers; these update and send parameters for the next
iteration. Volumes and times come from a profile: a mean and a spread, or a trace of iterations. A document uses the
units that its keys say (GiB, Gbit/s); `automap.gnn.kernels.records` holds bytes and seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from automap.errors import ProblemError, one_of
from automap.records import Items, Length, Range, from_json, json_schema, to_json

SCHEMA: Final = "automap.gnn-problem/1"
Role = Literal["store", "sampler", "worker", "server"]
PAIRS: Mapping[tuple[Role, Role], int] = {
    ("store", "sampler"): 0,
    ("sampler", "worker"): 0,
    ("worker", "server"): 0,
    ("server", "worker"): 1,
}
"""Roles that a flow may connect -> default of `Flow.lag`."""
RESOURCES = ("gpus", "cpus", "memory_GiB")
"""Resources that tasks demand from machines, in the order of arrays."""
Bound = Literal["critical path", "sending", "receiving"]
BOUNDS: tuple[Bound, ...] = ("critical path", "sending", "receiving")
"""The lower bounds on the time of a placement, see `automap.gnn.simulator.Simulator.bounds`."""
MAX_MACHINES, MAX_TASKS, MAX_FLOWS, MAX_TRACE = 1024, 16_384, 262_144, 100_000
"""Largest counts that are read; assumed: far above the clusters of the literature (tens of machines)."""

Name = Annotated[str, Length(100, 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """A quantity that varies by iteration."""

    mean: Annotated[float, Range(0.0, 1e18)] | None = None
    """Mean over iterations; null where there is a trace."""
    spread: Annotated[float, Range(0.0, 10.0)] = 0.0
    """Standard deviation as a share of the mean; values are drawn from a lognormal distribution."""
    trace: Annotated[tuple[Annotated[float, Range(0.0, 1e18)], ...], Items(MAX_TRACE)] | None = None
    """Measured values of consecutive iterations; null where there is a mean."""

    def __post_init__(self) -> None:
        if (self.mean is None) == (self.trace is None):
            value = "neither" if self.mean is None else "both"
            repair = "Give one of the two: a mean (with a spread), or a trace."
            raise ProblemError("not exactly one of mean and trace", field="mean", value=value, repair=repair)
        if self.trace is not None and not self.trace:
            raise ProblemError("empty", field="trace", value="[]", repair="Give the value of at least one iteration.")

    @property
    def average(self) -> float:
        """Mean over iterations."""
        return self.mean if self.mean is not None else sum(self.trace or ()) / len(self.trace or (0,))


NOTHING = Amount(mean=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A host and its network interface."""

    name: Name
    """Name by which tasks and plans mention the machine."""
    gpus: Annotated[int, Range(0, 1024)] = 0
    """Number of GPUs."""
    cpus: Annotated[float, Range(0.0, 65536.0)]
    """Number of processor cores."""
    memory_GiB: Annotated[float, Range(0.0, 1e6)]  # noqa: N815
    """Memory of the host, GiB."""
    nic_in_Gbps: Annotated[float, Range(0.0, 1e5, above=True)]  # noqa: N815
    """Rate at which the machine receives, in 10^9 bits a second."""
    nic_out_Gbps: Annotated[float, Range(0.0, 1e5, above=True)]  # noqa: N815
    """Rate at which the machine sends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A process of the training."""

    name: Name
    """Name by which flows and plans mention the task."""
    role: Role
    """What the process does: it stores a partition, samples, trains, or adds gradients up."""
    machine: str | None = None
    """Machine that it must run on; a graph store always has one, because its partition lies there."""
    gpus: Annotated[int, Range(0, 1024)] = 0
    """GPUs that it needs."""
    cpus: Annotated[float, Range(0.0, 65536.0)] = 0.0
    """Processor cores that it needs."""
    memory_GiB: Annotated[float, Range(0.0, 1e6)] = 0.0  # noqa: N815
    """Memory that it needs, GiB."""
    time_s: Amount = NOTHING
    """Seconds of computing in one iteration; a graph store has none, because it only sends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """The data that one task sends to another in every iteration."""

    source: str
    """Name of the task that sends."""
    target: str
    """Name of the task that receives."""
    bytes: Amount
    """Bytes that are sent in one iteration."""
    lag: Annotated[int, Range(0, 8)] | None = None
    """Number of iterations from the one that sends to the one that uses the data; null = 1 from a parameter server to a
    worker, else 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GnnProblem:
    """Machines, tasks and flows of one training."""

    schema: Literal["automap.gnn-problem/1"] = SCHEMA
    """Name and version of this form."""
    name: Annotated[str, Length(200)] = ""
    """A name for people."""
    machines: Annotated[tuple[Machine, ...], Items(MAX_MACHINES)]
    """The hosts, each with one network interface."""
    tasks: Annotated[tuple[Task, ...], Items(MAX_TASKS)]
    """The processes of the training."""
    flows: Annotated[tuple[Flow, ...], Items(MAX_FLOWS)]
    """The data that they send each other; at most one flow from one task to another."""
    prefetch: Annotated[int, Range(0, 64)] = 1
    """Mini-batches that a sampler may prepare beyond the one that its worker trains on."""

    def __post_init__(self) -> None:
        for field, things in (("machines", self.machines), ("tasks", self.tasks)):
            _check_names(field, [thing.name for thing in things])
        machines = {machine.name: machine for machine in self.machines}
        tasks = {task.name: task for task in self.tasks}
        for number, task in enumerate(self.tasks):
            _check_task(f"tasks[{number}]", task, machines)
        connected = set()
        for number, flow in enumerate(self.flows):
            _check_flow(f"flows[{number}]", flow, tasks)
            if (flow.source, flow.target) in connected:
                repair = "Add the bytes of the two up in one flow."
                raise _wrong("given twice", f"flows[{number}]", f"{flow.source} -> {flow.target}", repair)
            connected.add((flow.source, flow.target))
        self._check_traces()
        self.order()
        self._check_room()

    @staticmethod
    def from_json(document: object, *, path: str = "problem") -> GnnProblem:
        """Reads a document.

        Raises:
            ProblemError: names the field, the value and the repair.
        """
        return from_json(GnnProblem, document, path=path, error=ProblemError)

    def to_json(self) -> dict[str, Any]:
        """The document."""
        found: dict[str, Any] = to_json(self)
        return found

    def lags(self) -> list[int]:
        """[flows] the lag of each flow, see `Flow.lag`."""
        roles = {task.name: task.role for task in self.tasks}
        return [PAIRS[roles[f.source], roles[f.target]] if f.lag is None else f.lag for f in self.flows]

    def order(self) -> list[int]:
        """[tasks] numbers of the tasks, each after those that it waits for within an iteration.

        Raises:
            ProblemError: tasks wait for each other in a circle.
        """
        numbers = {task.name: number for number, task in enumerate(self.tasks)}
        behind: list[list[int]] = [[] for _ in self.tasks]
        waiting = [0] * len(self.tasks)
        for flow, lag in zip(self.flows, self.lags(), strict=True):
            if lag == 0:
                behind[numbers[flow.source]].append(numbers[flow.target])
                waiting[numbers[flow.target]] += 1
        found = [number for number, count in enumerate(waiting) if count == 0]
        for number in found:
            for target in behind[number]:
                waiting[target] -= 1
                if waiting[target] == 0:
                    found.append(target)
        if len(found) < len(self.tasks):
            stuck = {self.tasks[number].name for number, count in enumerate(waiting) if count}
            at = next(n for n, f in enumerate(self.flows) if f.source in stuck and f.target in stuck)
            flow = self.flows[at]
            raise _wrong(
                f"a circle: {', '.join(sorted(stuck)[:6])} wait for each other within one iteration",
                f"flows[{at}].lag",
                f"0 from {flow.source} to {flow.target}",
                "Give one flow of the circle a lag of 1, as parameters for the next iteration have.",
            )
        return found

    def _check_traces(self) -> None:
        """Checks that all traces have the same length: they are values of the same iterations."""
        lengths = {
            f"{field}[{number}].{name}.trace": len(amount.trace)
            for field, things, name in (("tasks", self.tasks, "time_s"), ("flows", self.flows, "bytes"))
            for number, thing in enumerate(things)
            if (amount := getattr(thing, name)).trace is not None
        }
        first = next(iter(lengths.values()), 0)
        for field, length in lengths.items():
            if length != first:
                repair = f"Give {first} values, as the first trace has."
                raise _wrong("traces have different lengths", field, length, repair)

    def _check_room(self) -> None:
        """Checks that every task fits on some machine beside the tasks that must run there."""
        left = {m.name: [getattr(m, resource) for resource in RESOURCES] for m in self.machines}
        for number, task in enumerate(self.tasks):
            if task.machine is None:
                continue
            for at, resource in enumerate(RESOURCES):
                left[task.machine][at] -= getattr(task, resource)
                if left[task.machine][at] < -1e-9:
                    repair = f"Demand less of {task.machine}, or give it more; tasks with a machine fill it."
                    raise _wrong("does not fit", f"tasks[{number}].{resource}", getattr(task, resource), repair)
        for number, task in enumerate(self.tasks):
            if task.machine is None and not any(_fits(task, free) for free in left.values()):
                resource = max(
                    RESOURCES,
                    key=lambda name: getattr(task, name) - max(free[RESOURCES.index(name)] for free in left.values()),
                )
                most = max(free[RESOURCES.index(resource)] for free in left.values())
                repair = f"Demand less, or add a machine: at most {most:g} {resource} are free beside pinned tasks."
                raise _wrong(
                    "fits on no machine", f"tasks[{number}].{resource}", f"{getattr(task, resource):g}", repair
                )


def _fits(task: Task, free: Sequence[float]) -> bool:
    return all(getattr(task, name) <= left + 1e-9 for name, left in zip(RESOURCES, free, strict=True))


def _wrong(message: str, field: str, value: object, repair: str) -> ProblemError:
    return ProblemError(message, field=field, value=value, repair=repair)


def _check_names(field: str, names: list[str]) -> None:
    if not names:
        raise _wrong("none", field, "[]", "Give at least one.")
    seen: set[str] = set()
    for number, name in enumerate(names):
        if name in seen:
            raise _wrong(
                "the same name is given twice", f"{field}[{number}].name", name, "Give every one a name of its own."
            )
        seen.add(name)


def _check_task(field: str, task: Task, machines: Mapping[str, Machine]) -> None:
    if task.machine is not None and task.machine not in machines:
        raise _wrong("unknown machine", f"{field}.machine", task.machine, one_of(machines, task.machine))
    if task.role == "store":
        if task.machine is None:
            raise _wrong("missing", f"{field}.machine", "nothing", "Say where the partition of this store lies.")
        if task.time_s.average > 0.0:
            repair = "Leave it out; what a store computes belongs to the samplers that ask it."
            raise _wrong("a store has no compute time", f"{field}.time_s", task.time_s.average, repair)


def _check_flow(field: str, flow: Flow, tasks: Mapping[str, Task]) -> None:
    for end in ("source", "target"):
        name = getattr(flow, end)
        if name not in tasks:
            raise _wrong("unknown task", f"{field}.{end}", name, one_of(list(tasks)[:50], name))
    roles = tasks[flow.source].role, tasks[flow.target].role
    if roles not in PAIRS:
        allowed = ", ".join(f"{source} to {target}" for source, target in PAIRS)
        raise _wrong("no such flow", f"{field}.target", " to ".join(roles), f"Connect {allowed}.")
    if roles[0] == "store" and flow.lag:
        raise _wrong("a flow from a store has no lag", f"{field}.lag", flow.lag, "Leave it out.")


def problem_schema() -> dict[str, Any]:
    """JSON Schema of problems."""
    return json_schema(GnnProblem, title=SCHEMA)
