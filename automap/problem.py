"""Problem: the input of a search, which is a graph, a cluster, training settings and hints.

`Problem.build` checks that the four fit each other; code that receives a problem relies on that.
Units: samples (one sequence, one image), bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import product
from math import prod
from typing import Annotated, Any, Literal, get_args

from automap.annotations import annotated
from automap.cluster import Cluster, parse_cluster
from automap.device_kinds import Device, Precision
from automap.errors import ProblemError, one_of
from automap.globs import select
from automap.hints import Constraint, Hints, Samples
from automap.memory_band import LEAST_CONFIDENCE, MOST_CONFIDENCE, margin
from automap.records import LEFT_OUT, Items, Range, from_json, to_json
from automap.stated_model import MAX_PATTERNS, frozen_as_stated, names_nothing, with_costs
from automap.targets import ANY, RecomputeMode, SyncKind, Target, find_target
from automap.trainers import Trainer, trainers
from ir.graph import Graph
from ir.loss import with_loss
from ir.operators.experts import DISPATCH
from ir.vocabulary import padded

WEIGHT_BYTES: Mapping[str, float] = {"fp8": 1.0, "mxfp8": 1.0, "nvfp4": 0.5}
"""Bytes of one element of a matrix product's operand, for precisions that only matrix products with weights use."""
ASYNC_TENSOR_OVERLAP = 0.5
"""Share of the collectives of a stage that asynchronous tensor parallelism hides besides what the trainer does:
products in pieces, each under the transfer of the next (docs/cost-model-formulas.md)."""
MAX_TENSOR_OVERLAP = 0.95
"""Largest share of a stage's collectives that can be hidden (assumed): the first piece waits for its operand."""
PAIRED_MICRO_BATCHES = 5
"""Fewest micro-batches of a step without pipelines whose forward and backward passes run in pairs: as many as NVIDIA's
recipes for GPT-OSS-120B have, the fewest of those that set the option (Megatron-Bridge,
src/megatron/bridge/perf_recipes)."""
PAIRED_OVERLAP = 1.0 - 1.0 / PAIRED_MICRO_BATCHES
"""Share of the all-to-alls that hides where passes run in pairs. Without pipelines, the first forward pass and the last
backward pass of a step run alone (counted: megatron/core/pipeline_parallel/combined_1f1b.py), so that with so many
micro-batches this share of the all-to-alls runs under another micro-batch, and is taken to hide (assumed). Pipelines
have so many micro-batches that at least this share of their passes runs in pairs, see `paired_micro_batches`. With more
micro-batches the share is no larger in the price, so that it does not depend on the plan."""
DEFAULT_PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "fp32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """How the model is trained."""

    global_batch: Samples
    """Samples of one optimizer step, over all devices."""
    precision: Precision | None = None
    """Precision of the arithmetic; null: bf16 if every device supports it, else fp16, else fp32. fp8, mxfp8 and nvfp4
    apply to matrix products with weights only: all else is computed and stored as with bf16."""
    scaling: Literal["tensor", "row"] = "tensor"
    """Granularity of fp8 scales: one for a whole tensor, or one for each row."""
    async_tensor_parallel: bool = False
    """Whether matrix products are cut into pieces that overlap with the collectives of tensor parallelism."""
    overlap_expert_exchange: bool = field(default=False, metadata=LEFT_OUT)
    """Whether the forward pass of a micro-batch runs together with the backward pass of the one before, each under the
    all-to-alls of experts of the other. Pipelines are then interleaved, nothing is recomputed in full, and at least
    four fifths of the passes run in pairs (`paired_micro_batches`)."""
    overlap_gradients: bool = field(default=True, metadata=LEFT_OUT)
    """Whether gradients are reduced under the backward pass as far as the trainer can, and not after it."""
    optimizer: Literal["adam", "momentum", "sgd"] = "adam"
    """Optimizer, which decides the state of a parameter: Adam two moments, momentum one, SGD none."""
    loss: Literal["cross_entropy", "mse"] | None = None
    """Loss that is appended if the graph has no scalar output; null: cross-entropy of the first output."""
    trainer: str = "generic"
    """Name of the training software, a file of `automap/data/trainers`: what it overlaps, fuses and reserves."""
    target: str = ANY
    """Name of the trainer whose configuration must express the plan, a file of `automap/data/targets`; `any` = all."""
    vocabulary_multiple: Annotated[int, Range(1, 1 << 20)] | None = None
    """The vocabulary is padded to a multiple of this, so that tensor parallelism splits it; null: to what the target's
    trainer pads it, and without one not at all."""
    memory_confidence: Annotated[float, Range(LEAST_CONFIDENCE, MOST_CONFIDENCE)] = 0.95
    """Probability with which a plan must fit into memory; 0.5 fills devices as far as the prediction says."""
    batch_norm: Literal["local", "synchronized"] = "local"
    """Whether batch normalisation uses the samples of one replica, or synchronises its statistics over all replicas."""
    sync_modes: tuple[SyncKind, ...] = ("synchronous",)
    """Modes that replicas may be synchronised in, see `automap.plan.Sync`. All but synchronous change the training."""
    sync_period: Annotated[int, Range(1, 1_000_000)] = 4
    """Longest period between two averagings in the modes that are not synchronous, steps."""
    frozen: Annotated[tuple[str, ...], Items(MAX_PATTERNS)] = field(default=(), metadata=LEFT_OUT)
    """Patterns over the names of further parameters that are not trained, see `automap.stated_model`."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The input of a search. Build it with `Problem.build`."""

    graph: Graph
    cluster: Cluster
    training: Training
    hints: Hints

    def __repr__(self) -> str:
        settings = f"batch {self.training.global_batch}, {self.precision}, {self.training.optimizer}"
        return f"Problem({self.graph.name!r} on {self.cluster.num_devices} devices: {settings})"

    @staticmethod
    def build(
        graph: Graph,
        cluster: Cluster | str | Mapping[str, Any],
        training: Training | Mapping[str, Any],
        hints: Hints | Mapping[str, Any] | None = None,
    ) -> Problem:
        """Reads what is still text or JSON, resolves defaults, appends the loss and checks that everything fits.

        Args:
            graph: the model.
            cluster: the devices; or as text (`4x8xA100-80GB`) or JSON, see `automap.cluster.parse_cluster`.
            training: global batch, precision, optimizer and so on; as a record or as JSON.
            hints: what the user knows or insists on; as a record or as JSON.

        Raises:
            ProblemError: names the field, the value and the repair.
            ClusterError: the cluster cannot be read, or its devices lack the precision.
            ModelError: the model's output fits no loss.
        """
        if not isinstance(graph, Graph):
            repair = 'Read it: ir.onnx.load.load_model(Path("model.onnx").read_bytes()), or ir.zoo.build("gpt2").'
            raise ProblemError("not a graph", field="graph", value=graph, repair=repair)
        if not isinstance(cluster, Cluster):
            cluster = parse_cluster(cluster)
        # Records too: what Python made of them may be out of range.
        training = from_json(Training, _with_trainer(to_json(training)), path="training", error=ProblemError)
        hints = from_json(Hints, to_json(hints or {}), path="hints", error=ProblemError)
        if training.trainer not in trainers():
            repair = one_of(trainers(), training.trainer)
            raise ProblemError("unknown trainer", field="training.trainer", value=training.trainer, repair=repair)
        kinds = list(cluster.devices.values())
        target = find_target(training.target)
        usual = [p for p in DEFAULT_PRECISIONS if target is None or p in target.precisions]
        common = [p for p in usual if all(p in d.peak_TFLOPs for d in kinds)]
        precision = training.precision or (common[0] if common else "fp16")
        for device in kinds:
            device.flops(precision)
        if training.scaling == "row" and precision != "fp8":
            repair = 'Set training.precision to "fp8", or leave training.scaling out.'
            raise ProblemError(
                f"{precision} has no scales of rows", field="training.scaling", value=training.scaling, repair=repair
            )
        if "synchronous" not in training.sync_modes:
            raise ProblemError(
                "synchronous training cannot be excluded",
                field="training.sync_modes",
                value=training.sync_modes,
                repair='Add "synchronous".',
            )
        if not any(t.batch_dim is not None for t in graph.tensors.values()):
            repair = "Give the model a data input whose leading dim is the batch, or set batch_dims."
            raise ProblemError(
                "no input of the model carries the batch", field="model", value=graph.name, repair=repair
            )
        training = replace(training, precision=precision)
        if target is not None:
            _check_target(training, target)
        _check_pairs(training, hints, graph)
        multiple = training.vocabulary_multiple or (1 if target is None else target.vocabulary_multiple)
        graph = padded(frozen_as_stated(with_loss(graph, training.loss), training.frozen), multiple)
        hints = replace(hints, constraints=(*hints.constraints, *annotated(graph, hints.constraints)))
        problem = Problem(graph=with_costs(graph, hints), cluster=cluster, training=training, hints=hints)
        problem._check_constraints()
        problem._check_fix()
        return problem

    @property
    def trainer(self) -> Trainer:
        """The training software of the problem as it is set, with constants measured on the cluster's hosts."""
        trainer, own = trainers()[self.training.trainer], self.cluster.constants
        given = {} if own is None else own.stated()
        changes: dict[str, Any] = {f.name: given[f.name] for f in fields(Trainer) if f.name in given} if given else {}
        if not self.training.overlap_gradients:
            changes["gradient_overlap"] = 0.0
        return replace(trainer, **changes) if changes else trainer

    @property
    def target(self) -> Target | None:
        """What a plan must be expressible in; None = anything."""
        return find_target(self.training.target)

    @property
    def any_order(self) -> bool:
        """Whether a plan may run whole passes in any order: the trainer does, and neither a target nor a hint names
        the schedules."""
        return self.trainer.any_order and self.target is None and self.hints.fix.schedule is None

    @property
    def vocabulary_multiple(self) -> int:
        """What the vocabulary is a multiple of."""
        target = self.target
        return self.training.vocabulary_multiple or (1 if target is None else target.vocabulary_multiple)

    @property
    def precision(self) -> str:
        """Resolved arithmetic precision."""
        assert self.training.precision is not None  # Problem.build resolves it
        return self.training.precision

    @property
    def activation_bytes(self) -> float:
        """Bytes of one element of a floating-point activation."""
        return 4.0 if self.precision in ("tf32", "fp32") else 2.0

    @property
    def base_precision(self) -> str:
        """Precision of all operators except matrix products with a weight."""
        return "bf16" if self.precision in WEIGHT_BYTES else self.precision

    @property
    def weight_bytes(self) -> float:
        """Bytes of one element of an operand of a matrix product with a weight."""
        return WEIGHT_BYTES.get(self.precision, self.activation_bytes)

    @property
    def tensor_overlap(self) -> float:
        """Share of the collectives of tensor and sequence parallelism that hides under compute, 0..1."""
        own = self.trainer.tensor_overlap
        if not self.training.async_tensor_parallel:
            return own
        return max(own, min(MAX_TENSOR_OVERLAP, own + ASYNC_TENSOR_OVERLAP))

    @property
    def exchange_overlap(self) -> float:
        """Share of the all-to-alls inside a stage that hides under compute, 0..1."""
        own = self.trainer.exchange_overlap
        return max(own, PAIRED_OVERLAP) if self.training.overlap_expert_exchange else own

    @property
    def recompute_modes(self) -> tuple[RecomputeMode, ...]:
        """The recompute modes that the target has, and that go with the settings of the training."""
        target = self.target
        modes = get_args(RecomputeMode) if target is None else target.recompute
        return tuple(mode for mode in modes if mode != "full" or not self.training.overlap_expert_exchange)

    def pairs(self, pp: int, virtual: int, num_micro_batches: int) -> bool:
        """Whether plans of this shape run enough passes in pairs, if the training asks for it.

        Args:
            pp: pipeline ranks.
            virtual: stages of each rank.
            num_micro_batches: micro-batches of a step.
        """
        if not self.training.overlap_expert_exchange:
            return True
        return (pp == 1 or virtual > 1) and num_micro_batches >= paired_micro_batches(pp, virtual)

    def capacity_bytes(self, devices: Iterable[Device]) -> float:
        """Bytes that a plan may fill on each of some devices: those of the smallest, without what the user reserves."""
        return min(device.memory_bytes for device in devices) - self.hints.memory_reserve_bytes

    def usable_bytes(self, devices: Iterable[Device]) -> float:
        """Bytes that a plan may be predicted to need on each of some devices, to fit with `memory_confidence`."""
        return self.capacity_bytes(devices) / margin(self.training.memory_confidence, self.trainer.memory_spread)

    @property
    def whole_state_bytes(self) -> float:
        """Bytes of all parameters, gradients and optimizer state, held once."""
        _, gradient, optimizer = self.state_bytes
        frozen = self.graph.num_parameters - self.graph.num_trained
        fewer = frozen * (gradient + optimizer - self.frozen_bytes)
        return self.graph.num_parameters * sum(self.state_bytes) - fewer

    @property
    def frozen_bytes(self) -> float:
        """Bytes of the master of a frozen element, beside the element itself: of any that the trainer converts."""
        table = self.trainer.bytes_per_parameter
        return 0.0 if self.activation_bytes == 4.0 else table.get("frozen", table["parameter"]) - table["parameter"]

    @property
    def state_bytes(self) -> tuple[float, float, float]:
        """Bytes a trained element takes as (parameter, gradient, optimizer state); for a frozen one see `frozen_bytes`.

        Mixed precision as the trainer states it for Adam; an optimizer with fewer moments drops 4 bytes each.
        """
        moments = {"adam": 2, "momentum": 1, "sgd": 0}[self.training.optimizer]
        table = self.trainer.bytes_per_parameter
        if self.activation_bytes == 4.0:
            return 4.0, 4.0, 4.0 * moments
        return table["parameter"], table["gradient"], table["optimizer"] - 4.0 * (2 - moments)

    def _check_fix(self) -> None:
        """Refuses degrees that no plan has, before anything is prepared or queued.

        Degrees that do not divide the number of devices leave some of them idle (`agents.results.fewer_devices`).
        """
        fix, devices, batch = self.hints.fix, self.cluster.num_devices, self.training.global_batch
        if fix.num_micro_batches is not None and batch % fix.num_micro_batches:
            choices = ", ".join(str(n) for n in range(1, batch + 1) if batch % n == 0)
            text, field = f"does not divide the global batch, {batch}", "hints.fix.num_micro_batches"
            raise ProblemError(text, field=field, value=fix.num_micro_batches, repair=f"Use one of {choices}.")
        degrees = fix.degrees()
        alone = {name: value for name, value in degrees.items() if value > devices}
        needed = prod(degrees.values())
        if needed > devices:
            name, needed = next(iter(alone.items())) if alone else ("", needed)
            raise ProblemError(
                f"need{'s' if name else ''} {needed} devices, and there are {devices}",
                field=f"hints.fix.{name}" if name else "hints.fix",
                value=needed if name else " x ".join(f"{one} {value}" for one, value in degrees.items()),
                repair=f"Fix fewer or smaller degrees, or name a cluster of {needed} devices or more.",
            )
        reserve = self.hints.memory_reserve_bytes
        most = max(self.cluster.devices[node.device].memory_bytes for node in self.cluster.nodes)
        if reserve >= most:
            raise ProblemError(
                "leaves no memory for a plan",
                field="hints.memory_reserve_bytes",
                value=reserve,
                repair=f"Reserve less than the {most:.0f} bytes that a device has.",
            )

    def _check_constraints(self) -> None:
        """Refuses constraints that name no operator, and two that want the opposite of one operator."""
        names = [op.name for op in self.graph.operators]
        wanted: dict[tuple[str, str], tuple[int, bool]] = {}
        for index, constraint in enumerate(self.hints.constraints):
            found = select(constraint.scope, names)
            if not found:
                raise names_nothing(f"hints.constraints[{index}].scope", constraint.scope, self.graph)
            self._check_recompute(index, constraint)
            demands = {"recompute": constraint.recompute, "whole": constraint.replicate or None}
            # To be divided is the opposite of being whole.
            pairs = [*demands.items(), ("whole", False if constraint.split else None)]
            for name, (what, value) in product(found, [pair for pair in pairs if pair[1] is not None]):
                other, first = wanted.setdefault((name, what), (index, bool(value)))
                if first != value:
                    both = f"asks for {name} to be both divided and whole"
                    raise ProblemError(
                        both if other == index else f"contradicts hints.constraints[{other}] for {name}",
                        field=f"hints.constraints[{index}]",
                        value=constraint.scope,
                        repair="Leave one of them out, or narrow its scope.",
                    )

    def _check_recompute(self, index: int, constraint: Constraint) -> None:
        """Refuses a constraint that contradicts the one mode that all ranks must have."""
        fixed = {"none": False, "full": True}.get(self.hints.fix.recompute or "")
        if None not in (fixed, constraint.recompute) and fixed != constraint.recompute:
            raise ProblemError(
                f"contradicts hints.fix.recompute, which is {self.hints.fix.recompute}",
                field=f"hints.constraints[{index}].recompute",
                value=constraint.recompute,
                repair="Leave one of them out.",
            )


def paired_micro_batches(pp: int, virtual: int) -> int:
    """Fewest micro-batches of a step with which all ranks run at least `PAIRED_OVERLAP` of their passes in pairs.

    The first of pp ranks with v stages each does 2 (pp - 1) + (v - 1) pp + 1 of its v m forward passes before its first
    backward pass, and as many backward passes after its last forward pass; all others run in pairs. The other ranks do
    fewer alone. (megatron/core/pipeline_parallel/schedules.py, `get_pp_rank_microbatches`, Megatron-Core 0.16)

    Args:
        pp: pipeline ranks.
        virtual: v, stages of each rank; more than 1 if there are several ranks.
    """
    alone = 2 * (pp - 1) + (virtual - 1) * pp + 1
    return -(-PAIRED_MICRO_BATCHES * alone // virtual)


def _with_trainer(training: Any) -> Any:
    """Training settings in which a target that is named names the trainer, unless the user does."""
    name = training.get("target", ANY) if isinstance(training, dict) else ANY
    if name == ANY or not isinstance(name, str) or "trainer" in training:
        return training
    target = find_target(name)
    return training if target is None else {**training, "trainer": target.trainer}


def _check_pairs(training: Training, hints: Hints, graph: Graph) -> None:
    """Refuses to overlap exchanges of experts where trainer, target, model, batch or hints do not let it."""
    if not training.overlap_expert_exchange:
        return
    name, target, fix = training.trainer, find_target(training.target), hints.fix
    able = [trainer.name for trainer in trainers().values() if trainer.pairs_passes]
    fault: tuple[str, str] | None = None
    if name not in able:
        fault = f"{name} does not run passes in pairs", f"Use the trainer {' or '.join(able)}, or leave it out."
    elif target is not None and name not in (target.trainer, *target.releases):
        fault = f"the target {target.name} is not the trainer {name}", "Leave out the target, or this setting."
    elif training.precision in ("tf32", "fp32"):
        fault = f"does not go with {training.precision}", "Use the precision bf16 or fp16, or one of 8 or 4 bits."
    elif not any(op.kind == DISPATCH for op in graph):
        fault = "the model has no experts", "Leave it out."
    elif training.global_batch < PAIRED_MICRO_BATCHES:
        fault = (
            f"a global batch of {training.global_batch} has no {PAIRED_MICRO_BATCHES} micro-batches",
            f"Use a training.global_batch of {PAIRED_MICRO_BATCHES} or more, or leave it out.",
        )
    if fault is not None:
        raise ProblemError(fault[0], field="training.overlap_expert_exchange", value=True, repair=fault[1])
    for key, value, is_legal, legal in (
        ("recompute", fix.recompute, fix.recompute != "full", "none or selective"),
        ("virtual_stages", fix.virtual_stages, fix.virtual_stages != 1 or fix.pp in (None, 1), "2 or more"),
        ("schedule", fix.schedule, fix.schedule in (None, "interleaved") or fix.pp in (None, 1), "interleaved"),
        (
            "num_micro_batches",
            fix.num_micro_batches,
            (fix.num_micro_batches or PAIRED_MICRO_BATCHES) >= PAIRED_MICRO_BATCHES,
            f"{PAIRED_MICRO_BATCHES} or more",
        ),
    ):
        if not is_legal:
            repair = f"Fix {legal}, or leave out training.overlap_expert_exchange."
            what = "does not go with training.overlap_expert_exchange"
            raise ProblemError(what, field=f"hints.fix.{key}", value=value, repair=repair)


def _check_target(training: Training, target: Target) -> None:
    """Refuses settings that the target's configuration cannot express."""
    for name, word, stated, legal in (
        ("precision", "precision", [training.precision], target.precisions),
        ("sync_modes", "mode", training.sync_modes, target.sync),
        ("batch_norm", "statistics", [training.batch_norm], target.batch_norm),
    ):
        if not set(stated) <= set(legal):
            repair, given = f"Use {', '.join(legal)}, or another target.", getattr(training, name)
            raise ProblemError(
                f"{target.name} has no such {word}", field=f"training.{name}", value=given, repair=repair
            )
