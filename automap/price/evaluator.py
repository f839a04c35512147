"""Evaluator: prices lowered plans of one problem, whole or partial, through the compiled kernels.

Undecided signatures of a `LoweredPlan` are priced at a lower bound, so the result is then a lower bound too. Everything
that an `Evaluator` keeps between calls belongs to the problem. Units: seconds, bytes, samples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from automap.arrays import Floats, Ints, Mask
from automap.execution import HALF
from automap.price.curves import constant, gemm_curve
from automap.price.kernels.array_types import Record, Rows, record_of
from automap.price.kernels.collectives import SUMMED, UNKNOWN
from automap.price.kernels.cost_records import (
    COLLECTIVE_DTYPE,
    PART_DTYPE,
    RANK_COST_DTYPE,
    UNIT_COST_DTYPE,
    SettingsRow,
)
from automap.price.kernels.passes import passes
from automap.price.kernels.pipeline import run_program
from automap.price.kernels.placements import write_crossing
from automap.price.kernels.shard_unit import shard_unit
from automap.price.kernels.stage_records import Stage, Unit
from automap.price.kernels.step import overflow, step, step_time_s
from automap.price.kernels.step_records import Order, Pipeline, StageArrays, new_step_workspace
from automap.price.kernels.unit import CALL_DTYPE, Calls, unit_cost, unit_costs
from automap.price.kernels.unit_workspace import UnitWorkspace, new_unit_workspace
from automap.price.lowered_plan import LoweredPlan, Segment, UnitCall
from automap.price.outcome import Outcome
from automap.price.recompute_masks import RecomputeMasks
from automap.price.stage_layout import PipelineLayout, PipelineLayouts
from automap.price.tables import Tables, build_tables
from automap.price.tied_parameters import TiedParameters
from automap.problem import Problem
from automap.schedule import KINDS, arrange
from ir.factors import BROADCAST, PARTIAL

_COLLECTIVES_PER_OPERATOR = 16
"""Most collectives of an operator, forward and backward, for which a list has room (assumed, and checked)."""


def _sends_half(problem: Problem) -> bool:
    """Whether gradients are sent in 16 bits: in fp16, and in bf16 if the trainer does so. Most trainers reduce the
    gradients of bf16 weights as they are kept, and under autocast weights are in fp32."""
    if problem.trainer.autocast or problem.activation_bytes > HALF:
        return False
    return problem.base_precision == "fp16" or problem.trainer.reduces_in_half


def _touched(problem: Problem, optimizer: str | None = None) -> float:
    """Bytes for each parameter that an update moves: it reads and writes state and weights, and reads gradients."""
    if optimizer is not None:
        problem = replace(problem, training=replace(problem.training, optimizer=optimizer))  # type: ignore[arg-type]
    parameter, gradient, state = problem.state_bytes
    return 2.0 * state + gradient + 2.0 * parameter


class Evaluator:
    """Prices lowered plans of `problem`."""

    def __init__(self, problem: Problem, tables: Tables | None = None) -> None:
        self.problem = problem
        self.tables = tables or build_tables(problem)
        self.blocks = self.tables.linkage.blocks
        self.defaults: dict[tuple[int, int], tuple[int, int]] = {}
        """The results of `automap.price.stage_reader.default_signatures` by unit type and offset."""

    def settings(self, zero: int) -> Record:
        """A new `SettingsRow` for `step`: trainer, precision and ZeRO stage. The caller may change it."""
        found = self._settings.copy()
        found.zero_stage = zero
        return found

    @functools.cached_property
    def _settings(self) -> Record:
        """The `SettingsRow` of the problem without ZeRO."""
        problem, trainer = self.problem, self.problem.trainer
        parameter, gradient, optimizer = problem.state_bytes
        moved = _touched(problem) / _touched(problem, "adam")
        return record_of(
            SettingsRow(
                parameter_bytes=parameter,
                gradient_bytes=gradient,
                optimizer_bytes=optimizer,
                zero_stage=0.0,
                gradient_overlap=trainer.gradient_overlap,
                gather_overlap=trainer.parameter_gather_overlap,
                reserved_bytes=trainer.reserved_GiB * (1 << 30),
                sent_gradient_bytes=HALF if _sends_half(problem) else gradient,
                update_bytes=constant("optimizer_bytes", problem.cluster) * trainer.optimizer_traffic * moved,
                micro_batch_s=constant("micro_batch_ms", problem.cluster) * 1e-3,
                step_s=trainer.step_overhead_ms * 1e-3,
                send_s=trainer.send_host_ms * 1e-3,
                send_overlap=trainer.send_overlap,
                gathers_singly=float(trainer.gathers_singly),
                pipeline_bytes=trainer.pipeline_GiB * (1 << 30),
                crossing_buffers=trainer.crossing_buffers,
                keeps_gradients=float(trainer.keeps_gradients),
                unused_share=trainer.unused_share,
                held_update_bytes=trainer.update_bytes,
                bucket_bytes=trainer.bucket_bytes,
                frozen_bytes=problem.frozen_bytes,
                pairs_passes=float(problem.training.overlap_expert_exchange),
                most_gathered=math.inf if trainer.most_gathered is None else trainer.most_gathered,
            )
        )

    @functools.cached_property
    def tied(self) -> TiedParameters:
        """Parameters that two units read."""
        return TiedParameters(self.problem, self.tables)

    def layout(self, mesh: Sequence[int], num_ranks: int) -> PipelineLayout:
        """The layout of equal meshes over consecutive devices, one for each pipeline rank."""
        per_rank = int(np.prod(mesh))
        return self.layout_of([(range(r * per_rank, (r + 1) * per_rank), mesh) for r in range(num_ranks)])

    def layout_of(self, stages: Sequence[tuple[Sequence[int], Sequence[int]]]) -> PipelineLayout:
        """The layout of pipeline ranks given as (devices, mesh)."""
        key = tuple((tuple(devices), tuple(mesh)) for devices, mesh in stages)
        if key not in self._layouts:
            self._layouts[key] = self.laid_out.of(stages)
        return self._layouts[key]

    @functools.cached_property
    def _layouts(self) -> dict[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], PipelineLayout]:
        return {}

    @functools.cached_property
    def laid_out(self) -> PipelineLayouts:
        """The distinct stages that have been laid out."""
        return PipelineLayouts(self.problem)

    # -- units --------------------------------------------------------------------------------------------------------

    def new_workspace(self, num_axes: int, capacity: int = 0) -> UnitWorkspace:
        """A workspace for `unit_cost`, which several calls may use one after the other.

        Args:
            num_axes: mesh axes.
            capacity: number of collectives that its recorder can list.
        """
        found: UnitWorkspace = new_unit_workspace(self.tables.arrays, num_axes, capacity)
        return found

    def unit_cost(
        self, segment: Segment, incoming: Ints, stage: Stage, workspace: UnitWorkspace | None = None
    ) -> Record:
        """The cost of one unit on one rank for one micro-batch, a `UnitCostRow`.

        Args:
            segment: operators of the unit.
            incoming: [axes] placement of the tensor that crosses into it, or SUMMED.
            stage: mesh, links, hardware and samples of the rank.
            workspace: scratch memory, whose recorder lists the collectives; None: a new one.
        """
        arrays, unit = self.tables.arrays, Unit(segment.first, segment.last, segment.chosen)
        workspace = workspace or self.new_workspace(len(stage.axes))
        crossing = int(self.tables.boundary_out[self.tables.type_of[segment.first]])
        out = np.empty(1, dtype=UNIT_COST_DTYPE)
        shard_unit(arrays, unit, stage, False, workspace)
        unit_cost(arrays, unit, segment.recomputed, incoming, crossing, stage, workspace, out)
        return out[0]

    def unit_costs(self, lowered: LoweredPlan, calls: Sequence[UnitCall]) -> Rows:
        """[calls] the cost of each distinct unit of a plan."""
        return self.costs_of(self.packed(calls), lowered.layout.arrays, lowered.zero_axes, lowered.rank_samples)

    def packed(self, calls: Sequence[UnitCall]) -> Calls:
        """Units in the form in which the kernels read them, for `costs_of`."""
        segments = [call.segment for call in calls]
        sizes = np.array([segment.last - segment.first for segment in segments])
        crossing, first = self.tables.boundary_out, np.array([segment.first for segment in segments])
        rows = np.empty(len(calls), dtype=CALL_DTYPE)
        rows["first"], rows["last"], rows["begin"] = first, first + sizes, np.cumsum(sizes) - sizes
        rows["crossing"], rows["rank"] = crossing[self.tables.type_of[first]], [call.rank for call in calls]
        return Calls(
            rows=rows,
            chosen=np.concatenate([segment.chosen for segment in segments]),
            recomputed=np.concatenate([segment.recomputed for segment in segments]),
            incoming=np.array([call.incoming for call in calls]),
        )

    def costs_of(self, calls: Calls, stages: StageArrays, zero_axes: Mask, samples: Floats) -> Rows:
        """[calls] the cost of each unit, rows of `UnitCostRow`.

        Args:
            calls: the units; their ranks are rows of `stages`.
            zero_axes: [axes] whether ZeRO shards over the axis.
            samples: [ranks] samples of a micro-batch that each rank is priced with.
        """
        out = np.empty(len(calls.rows), dtype=UNIT_COST_DTYPE)
        unit_costs(self.tables.arrays, calls, stages, zero_axes, samples, out)
        return out

    def segment(self, unit: int, chosen: Sequence[Ints], recomputed: Mask) -> Segment:
        """All operators of a unit, with the signatures of its unit type in `chosen`; see `by_type`."""
        kind = self.blocks.units[unit].type
        rows = self.tables.rows(kind)
        return Segment(unit=unit, first=rows.start, last=rows.stop, chosen=chosen[kind], recomputed=recomputed)

    def collectives(self, lowered: LoweredPlan, rank: int, segment: Segment, incoming: Ints) -> Rows:
        """The collectives of one micro-batch of a segment, forward and backward, as they are priced.

        Returns:
            Rows of `CollectiveRow`.
        """
        workspace = self.new_workspace(len(lowered.axes), _COLLECTIVES_PER_OPERATOR * len(segment.chosen))
        self.unit_cost(segment, incoming, lowered.stages[rank], workspace)
        rows, count = workspace.recorder.rows, int(workspace.recorder.num_rows[0])
        assert count < len(rows), "more collectives than were thought of"
        return rows[:count].view(COLLECTIVE_DTYPE)

    def crossing_placement(self, segment: Segment) -> Ints:
        """[axes] placement of the tensor that crosses out of a unit; B where nothing crosses."""
        crossing, maker = self._crossings[self.tables.type_of[segment.first]]
        placement = np.empty(segment.chosen.shape[1], dtype=np.int64)
        is_inside = segment.first <= maker < segment.last
        write_crossing(self.tables.arrays, crossing if is_inside else -1, segment.first, segment.chosen, placement)
        return placement

    @functools.cached_property
    def _crossings(self) -> list[tuple[int, int]]:
        """[types] operand row whose tensor crosses out of a unit, and row of the operator that makes it; or -1."""
        operators = self.tables.arrays.operands["operator"]
        return [(row, int(operators[row]) if row >= 0 else -1) for row in self.tables.boundary_out.tolist()]

    def surroundings(self, lowered: LoweredPlan) -> Iterator[tuple[int, Segment, Ints]]:
        """For every segment in order: number of its chunk, the segment, and the placement, [axes], of the tensor that
        crosses into it."""
        incoming = np.full(len(lowered.axes), BROADCAST, dtype=np.int64)
        for number, segments in enumerate(lowered.chunks):
            incoming[incoming == PARTIAL] = SUMMED
            for segment in segments:
                yield number, segment, incoming
                incoming = self.crossing_placement(segment)

    def distinct_units(self, lowered: LoweredPlan, *, open_signatures: bool = False) -> tuple[list[UnitCall], Rows]:
        """The distinct units of a plan: equal units with equal costs occur once.

        Args:
            lowered: the plan.
            open_signatures: whether all signatures count as undecided: units that differ in them alone are then equal,
                and the placements that cross into them are unknown.

        Returns:
            The distinct units, and rows of `PartRow`, which list where each occurs.
        """
        before, previous = -1, -1
        unknown = np.full(len(lowered.axes), UNKNOWN, dtype=np.int64)
        units = ((number, segment, unknown) for number, chunk in enumerate(lowered.chunks) for segment in chunk)
        seen: dict[tuple[object, ...], int] = {}
        calls: list[UnitCall] = []
        parts: list[list[int]] = []
        num_ranks = len(lowered.layout.stages)
        for number, segment, incoming in units if open_signatures else self.surroundings(lowered):
            rank = 0 if lowered.is_uniform else number % num_ranks
            unit_type = int(self.tables.type_of[segment.first])
            # If signatures are known, the key need not contain the unit type before and the place in the chunk. It does
            # so that sums have the same order, and thus the same last bit, as with open signatures.
            key: tuple[object, ...] = (
                before,
                number != previous,
                segment.first,
                segment.last,
                segment.recomputed.tobytes(),
                rank,
            )
            if not open_signatures:
                key = (*key, segment.chosen.tobytes(), incoming.tobytes())
            if key not in seen:
                seen[key] = len(calls)
                first_rank = rank if open_signatures else number % num_ranks
                calls.append(UnitCall(segment, first_rank, incoming.copy(), unit_type, before, number != previous))
            row = seen[key]
            if parts and parts[-1][:2] == [number, row]:
                parts[-1][2] += 1
            else:
                parts.append([number, row, 1, int(segment.recomputed.all())])
            before, previous = unit_type, number
        return calls, np.array([tuple(part) for part in parts], dtype=PART_DTYPE)

    # -- steps --------------------------------------------------------------------------------------------------------

    def evaluate(self, lowered: LoweredPlan, *, exact: bool = True, apart: int | None = None) -> Outcome:
        """Time and memory of a step.

        Args:
            exact: whether the schedule is simulated; otherwise it is bounded from below in closed form.
            apart: a mesh axis over which no gradients are reduced (`automap.price.local_sgd`), without ZeRO.
        """
        if lowered.shares:
            found = [self._evaluate(each, exact=exact, apart=apart) for each in lowered.views]
            view = max(range(len(found)), key=lambda number: (found[number].step_time_s, -number))
            return Outcome(
                step_time_s=found[view].step_time_s,
                overflow=max(outcome.overflow for outcome in found),
                ranks=found[view].ranks,
                view=view,
                of_views=tuple(outcome.ranks for outcome in found),
            )
        return self._evaluate(lowered, exact=exact, apart=apart)

    def _evaluate(self, lowered: LoweredPlan, *, exact: bool, apart: int | None) -> Outcome:
        calls, parts = self.distinct_units(lowered)
        costs = self.unit_costs(lowered, calls)
        return self.step(lowered, costs, parts, self.tied.rows(lowered), exact=exact, apart=apart)

    def step(
        self,
        lowered: LoweredPlan,
        costs: Rows,
        parts: Rows,
        tied: Rows,
        *,
        exact: bool = True,
        apart: int | None = None,
    ) -> Outcome:
        """Time and memory of a step from the costs of units; see `automap.price.kernels.step`.

        Args:
            lowered: the plan.
            costs: [rows] unit costs.
            parts: where each of them occurs, see `distinct_units`.
            tied: parameters that two units read, see `TiedParameters.rows`.
            exact: see `evaluate`.
            apart: see `evaluate`.
        """
        arrays = lowered.layout.arrays
        if apart is not None:  # behind the costs of units, axes are only those that gradients are reduced over
            num_axes = arrays.axes.shape[1]
            arrays = arrays._replace(axes=np.where(np.arange(num_axes) == apart, 1.0, arrays.axes))
        pipeline = pipeline_of(lowered, parts, tied)
        result = np.empty(pipeline.num_ranks, dtype=RANK_COST_DTYPE)
        workspace = new_step_workspace(pipeline.num_ranks, pipeline.num_chunks)
        step(costs, pipeline, arrays, self.settings(lowered.zero), exact, workspace, result)
        return Outcome(step_time_s=step_time_s(result), overflow=overflow(result), ranks=result, of_views=(result,))

    def timeline(self, lowered: LoweredPlan) -> tuple[Ints, Floats]:
        """All actions of the pipeline and when each begins and ends.

        Returns:
            The program (see `automap.schedule`), and [actions, 2] seconds when each action begins and ends, equal to
            those that `evaluate` simulates.
        """
        lowered = lowered.views[self.evaluate(lowered).view]
        calls, parts = self.distinct_units(lowered)
        pipeline = pipeline_of(lowered, parts, self.tied.rows(lowered))
        ranks, chunks = pipeline.num_ranks, pipeline.num_chunks
        program = lowered.program
        if lowered.kind != "explicit":
            program = arrange(pipeline.order.kind, ranks, chunks, lowered.num_micro_batches)
        workspace = new_step_workspace(ranks, chunks)
        costs, settings = self.unit_costs(lowered, calls), self.settings(lowered.zero)
        passes(costs, pipeline, lowered.layout.arrays, settings, workspace, np.zeros(ranks, dtype=RANK_COST_DTYPE))
        times = np.empty((len(program), 2))
        run_program(program, workspace.seconds, np.zeros(chunks), np.empty(ranks), times)
        return program, times

    # -- constants of the problem -------------------------------------------------------------------------------------

    def masks(self, unit_type: int) -> Mapping[str, Mask]:
        """Recompute mode -> [operators] whether it recomputes each operator of a unit type."""
        return self.recomputed.of(unit_type)

    @functools.cached_property
    def recomputed(self) -> RecomputeMasks:
        """The operators that each recompute mode recomputes."""
        return RecomputeMasks(self.problem, self.tables)

    @functools.cached_property
    def has_core(self) -> bool:
        """Whether selective recomputation differs from none."""
        return bool(self.tables.core.any())

    @functools.cached_property
    def unit_weights(self) -> Floats:
        """[units] weights by which pipelines are cut: seconds of one sample, measured or by FLOPs and bytes."""
        graph = self.problem.graph
        device = self.problem.cluster.device(0)
        flops_rate = float(gemm_curve(device, self.problem.base_precision).flops_per_s)
        bytes_rate = device.hbm_bandwidth_GBps * 1e9 * device.memory_efficiency
        weights = []
        for unit in self.blocks.units:
            total = 0.0
            for op in graph.operators[unit.start : unit.stop]:
                if op.is_view:
                    continue
                if op.measured_s is not None:
                    total += sum(op.measured_s)
                    continue
                elements = sum(graph.tensors[n].elements.at(1) for n in (*op.inputs, *op.outputs))
                moved = elements * self.problem.activation_bytes * sum(op.traffic)
                flops = op.forward_flops.at(1) + op.backward_flops.at(1)
                total += max(flops / flops_rate, moved / bytes_rate)
            weights.append(total)
        # Every weight is positive, so that sums over units rise strictly.
        return np.maximum(weights, 1e-9 * max(weights))


def pipeline_of(lowered: LoweredPlan, parts: Rows, tied: Rows) -> Pipeline:
    """The `Pipeline` of a plan for `step`, in which each rank is a stage of its own.

    Args:
        lowered: the plan.
        parts: where each distinct unit occurs, see `Evaluator.distinct_units`.
        tied: rows of `TieRow`.
    """
    ranks = np.arange(len(lowered.layout.stages))
    return Pipeline(
        order=Order(KINDS[lowered.kind], lowered.num_micro_batches, lowered.program),
        num_ranks=len(ranks),
        num_chunks=len(lowered.chunks),
        zero_axes=lowered.zero_axes,
        parts=parts,
        tied=tied,
        stages=ranks,
        boundaries=ranks,
    )


def blank(evaluator: Evaluator, axes: int) -> Ints:
    """[operators, axes] signatures of which all are undecided, -1."""
    return np.full((len(evaluator.tables.type_of), axes), -1, dtype=np.int64)


def by_type(evaluator: Evaluator, chosen: Ints) -> Sequence[Ints]:
    """Views of `chosen`, [operators, axes], one for each unit type."""
    spans = evaluator.tables.spans
    return [chosen[int(spans[t]) : int(spans[t + 1])] for t in range(evaluator.blocks.num_types)]
