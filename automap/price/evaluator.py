"""Evaluator: prices choices of one problem, whole or partial, through the compiled kernels.

Undecided signatures of a `LoweredPlan` are priced at their best, so the result is then a lower bound. Everything kept
between calls belongs to the problem. Units: seconds, bytes, samples.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from automap.price.curves import constant, gemm_curve
from automap.price.kernels.collectives import KIND_COUNT, L_COUNT, L_KIND, NO_RECORDS, SUMMED
from automap.price.kernels.columns import C_COUNT
from automap.price.kernels.gemm import G_FLOPS
from automap.price.kernels.pipeline import count_actions, run_program
from automap.price.kernels.step import (
    P_COUNT,
    P_EXCHANGE_OVERLAP,
    P_GATHER_OVERLAP,
    P_GRADIENT,
    P_GRADIENT_OVERLAP,
    P_MICRO_BATCH_S,
    P_OPTIMIZER,
    P_PARAMETER,
    P_RESERVED,
    P_SEND_OVERLAP,
    P_SEND_S,
    P_SENT,
    P_SINGLY,
    P_STEP_S,
    P_TENSOR_OVERLAP,
    P_UPDATE,
    P_ZERO,
    R_COUNT,
    combine,
    new_room,
    overflow,
    passes,
    step_time_s,
)
from automap.price.kernels.unit import shard_unit, unit_cost
from automap.price.kernels.unit_workspace import Sharded, new_sharded
from automap.price.lowered_plan import LoweredPlan, Segment, UnitCall
from automap.price.outcome import Outcome
from automap.price.stage_layout import PipelineLayout, PipelineLayouts
from automap.price.tables import (
    ALL_TO_ALL,
    D_TENSOR,
    OP_INPUTS,
    OP_SIGNATURES,
    S_PLACES,
    T_PRODUCER,
    T_SLOT,
    Tables,
    build_tables,
)
from automap.price.tied_parameters import TiedParameters
from automap.problem import Problem
from automap.schedule import KINDS, arrange
from ir.factors import BROADCAST, PARTIAL

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

CHUNK, ROW, TIMES = range(3)
_RECORDS_PER_OPERATOR = 16
"""Room for its collectives, forward and backward; a list that does not fit would be cut off, which is refused."""


def _touched(problem: Problem, optimizer: str | None = None) -> float:
    """Bytes a parameter that an update reads and writes: state and weights both ways, gradients once."""
    if optimizer is not None:
        problem = replace(problem, training=replace(problem.training, optimizer=optimizer))  # type: ignore[arg-type]
    parameter, gradient, state = problem.state_bytes
    return 2.0 * state + gradient + 2.0 * parameter


class Evaluator:
    """Prices choices of `problem`."""

    def __init__(self, problem: Problem, tables: Tables | None = None) -> None:
        self.problem = problem
        self.tables = tables or build_tables(problem)
        self.blocks = self.tables.linkage.blocks
        parameter, gradient, optimizer = problem.state_bytes
        trainer = problem.trainer
        self._settings = np.zeros(P_COUNT)
        self._settings[P_PARAMETER] = parameter
        self._settings[P_GRADIENT] = gradient
        self._settings[P_OPTIMIZER] = optimizer
        self._settings[P_GRADIENT_OVERLAP] = trainer.gradient_overlap
        self._settings[P_GATHER_OVERLAP] = trainer.parameter_gather_overlap
        self._settings[P_TENSOR_OVERLAP] = problem.tensor_overlap
        self._settings[P_EXCHANGE_OVERLAP] = trainer.exchange_overlap
        self._settings[P_SINGLY] = float(trainer.gathers_singly)
        # Gradients in fp16 keep the type of the weights on their way; only bf16 trainers add them up in fp32.
        self._settings[P_SENT] = 2.0 if problem.precision == "fp16" else gradient
        moved = _touched(problem) / _touched(problem, "adam")
        self._settings[P_UPDATE] = constant("optimizer_bytes", problem.cluster) * moved
        self._settings[P_MICRO_BATCH_S] = constant("micro_batch_ms", problem.cluster) * 1e-3
        self._settings[P_STEP_S] = trainer.step_overhead_ms * 1e-3
        self._settings[P_SEND_S] = trainer.send_host_ms * 1e-3
        self._settings[P_SEND_OVERLAP] = trainer.send_overlap
        self._settings[P_RESERVED] = trainer.reserved_GiB * (1 << 30)

    @functools.cached_property
    def tied(self) -> TiedParameters:
        """Parameters that two units read."""
        return TiedParameters(self.problem, self.tables)

    def layout(self, mesh: Sequence[int], num_ranks: int) -> PipelineLayout:
        """Equal meshes over consecutive devices, one a pipeline rank."""
        key = (tuple(mesh), num_ranks)
        if key not in self._even:
            per_rank = int(np.prod(mesh))
            self._even[key] = self.layout_of(
                [(range(r * per_rank, (r + 1) * per_rank), mesh) for r in range(num_ranks)]
            )
        return self._even[key]

    @functools.cached_property
    def _even(self) -> dict[tuple[tuple[int, ...], int], PipelineLayout]:
        return {}

    def layout_of(self, stages: Sequence[tuple[Sequence[int], Sequence[int]]]) -> PipelineLayout:
        """The layout of pipeline ranks given as (devices, mesh)."""
        key = tuple((tuple(devices), tuple(mesh)) for devices, mesh in stages)
        if key not in self._layouts:
            self._layouts[key] = self.stands.of(stages)
        return self._layouts[key]

    @functools.cached_property
    def _layouts(self) -> dict[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], PipelineLayout]:
        return {}

    @functools.cached_property
    def stands(self) -> PipelineLayouts:
        """The distinct stages that have been laid out."""
        return PipelineLayouts(self.problem)

    def output_placement(self, segment: Segment, unit_type: int, axes: int) -> Ints:
        """Placement of the tensor that crosses out of a unit; B where nothing crosses."""
        placement = np.full(axes, BROADCAST, dtype=np.int64)
        maker, slot = (int(x) for x in self.makers[unit_type])
        tables = self.tables
        if segment.first <= maker < segment.last:
            for a in range(axes):
                signature = int(segment.chosen[maker - segment.first, a])
                row = tables.operators[maker, OP_SIGNATURES] + signature
                placement[a] = tables.places[
                    tables.signatures[row, S_PLACES] + tables.operators[maker, OP_INPUTS] + slot, 0
                ]
        return placement

    def unit_row(
        self,
        segment: Segment,
        rank: int,
        layout: PipelineLayout,
        incoming: Ints,
        samples: float,
        zero_axes: Mask,
        boundary_row: int,
        records: Floats = NO_RECORDS,
        sharded: Sharded | None = None,
    ) -> Floats:
        """[C_COUNT] cost of one unit on one rank for one micro-batch; its collectives are listed in `records`.

        `sharded` is memory that several calls may use one after the other.
        """
        stage = layout.stages[rank]
        out = np.empty(C_COUNT)
        tables, cursor, where = self.tables.arrays, np.zeros(1, dtype=np.int64), (stage.axes, stage.links)
        sharded = sharded or new_sharded(tables, len(stage.axes))
        shard_unit(
            tables,
            segment.first,
            segment.last,
            segment.chosen,
            *where,
            zero_axes,
            stage.hardware,
            float(samples),
            records,
            cursor,
            False,
            sharded,
        )
        unit_cost(
            tables,
            segment.first,
            segment.last,
            segment.chosen,
            segment.recomputed,
            incoming,
            *where,
            stage.hardware,
            float(samples),
            boundary_row,
            records,
            cursor,
            sharded,
            out,
        )
        return out

    def evaluate(self, lowered: LoweredPlan, *, exact: bool = True, apart: int | None = None) -> Outcome:
        """Time and memory of a step.

        Args:
            lowered: what is priced.
            exact: simulate the schedule; otherwise bound it from below in closed form.
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
        calls, parts, whole = self.distinct_units(lowered)
        tied = self.tied.rows(self.tied.ties(lowered), lowered.layout, lowered.zero_axes)
        return self.combine(lowered, self.unit_rows(lowered, calls), parts, whole, tied, exact=exact, apart=apart)

    def combine(
        self,
        lowered: LoweredPlan,
        costs: Floats,
        parts: Ints,
        whole: Mask,
        tied: Floats,
        *,
        exact: bool = True,
        apart: int | None = None,
    ) -> Outcome:
        """The outcome from unit costs; see `automap.price.kernels.step`."""
        layout, ranks = lowered.layout, len(lowered.layout.stages)
        result = np.empty((ranks, R_COUNT))
        axes, *arrays = self.stage_arrays(layout)
        if apart is not None:  # behind the costs of units, axes are only those that gradients are reduced over
            axes = np.where(np.arange(axes.shape[1]) == apart, 1.0, axes)
        combine(
            costs,
            parts,
            whole,
            KINDS[lowered.kind],
            lowered.program,
            ranks,
            lowered.num_micro_batches,
            np.arange(ranks),
            axes,
            *arrays,
            lowered.zero_axes,
            np.arange(ranks),
            layout.send_latency_s,
            layout.send_bytes_per_s,
            tied,
            self.settings(lowered.zero),
            exact,
            new_room(ranks, len(lowered.chunks), len(lowered.zero_axes)),
            result,
        )
        return Outcome(step_time_s=step_time_s(result), overflow=overflow(result), ranks=result, of_views=(result,))

    def timeline(self, lowered: LoweredPlan) -> tuple[Ints, Floats]:
        """All actions of the pipeline and when each begins and ends.

        Returns:
            The program (see `automap.schedule`), and [actions, 2] seconds; the floats that `evaluate` simulates.
        """
        lowered = lowered.views[self.evaluate(lowered).view]
        calls, parts, _ = self.distinct_units(lowered)
        layout = lowered.layout
        ranks, chunks = len(layout.stages), len(lowered.chunks)
        kind = KINDS[lowered.kind]
        program = lowered.program
        if lowered.kind != "explicit":
            program = arrange(kind, ranks, chunks, lowered.num_micro_batches)
        counts, seconds = np.empty((4, chunks)), np.empty((4, chunks))
        count_actions(kind, lowered.num_micro_batches, program, counts)
        axes, links, *_ = self.stage_arrays(layout)
        passes(
            self.unit_rows(lowered, calls),
            parts,
            counts,
            lowered.num_micro_batches,
            np.arange(ranks),
            axes,
            links,
            lowered.zero_axes,
            np.arange(ranks),
            layout.send_bytes_per_s,
            self.tied.rows(self.tied.ties(lowered), layout, lowered.zero_axes),
            self.settings(lowered.zero),
            seconds,
            np.empty(chunks),
            np.empty(ranks),
            np.zeros((ranks, R_COUNT)),
        )
        times = np.empty((len(program), 2))
        run_program(program, seconds, np.zeros(chunks), np.empty(ranks), times)
        return program, times

    def settings(self, zero: int) -> Floats:
        """What `combine` must know of trainer, precision and ZeRO stage."""
        settings = self._settings.copy()
        settings[P_ZERO] = zero
        return settings

    @functools.cached_property
    def exposed(self) -> Floats:
        """[KIND_COUNT] share of each kind of collective inside a stage that nothing hides."""
        found = np.full(KIND_COUNT, 1.0 - self._settings[P_TENSOR_OVERLAP])
        found[ALL_TO_ALL] = 1.0 - self._settings[P_EXCHANGE_OVERLAP]
        return found

    @functools.cached_property
    def makers(self) -> Ints:
        """[types, 2] operator row and output slot of the tensor that crosses out of each unit type, or -1."""
        tables = self.tables
        found = np.full((self.blocks.num_types, 2), -1, dtype=np.int64)
        for unit_type, row in enumerate(tables.boundary_out):
            if row >= 0:
                tensor = tables.operands[row, D_TENSOR]
                found[unit_type] = tables.tensors[tensor, T_PRODUCER], tables.tensors[tensor, T_SLOT]
        return found

    def stage_arrays(self, layout: PipelineLayout) -> tuple[Floats, Floats, Floats, Floats]:
        """Axes, links and hardware of all ranks, [ranks, ...], and their capacities."""
        key = id(layout)
        if key not in self._stacked:
            stages = layout.stages
            self._stacked[key] = (
                np.array([s.axes for s in stages]),
                np.array([s.links for s in stages]),
                np.array([s.hardware for s in stages]),
                np.array([s.capacity for s in stages]),
            )
            self._alive.append(layout)
        return self._stacked[key]

    @functools.cached_property
    def _stacked(self) -> dict[int, tuple[Floats, Floats, Floats, Floats]]:
        return {}

    @functools.cached_property
    def _alive(self) -> list[PipelineLayout]:
        # Keeps the ids of `_stacked` from being used again.
        return []

    def collectives(self, lowered: LoweredPlan, rank: int, segment: Segment, incoming: Ints) -> Floats:
        """[n, L_COUNT] collectives of one micro-batch of a segment, forward and backward, as they are priced."""
        records = np.full((_RECORDS_PER_OPERATOR * len(segment.chosen), L_COUNT), -1.0)
        boundary = int(self.tables.boundary_out[self.blocks.units[segment.unit].type])
        samples = lowered.rank_samples[rank]
        self.unit_row(segment, rank, lowered.layout, incoming, samples, lowered.zero_axes, boundary, records)
        assert records[-1, L_KIND] < 0.0, "more collectives than were thought of"
        return records[records[:, L_KIND] >= 0.0]

    def surroundings(self, lowered: LoweredPlan) -> Iterator[tuple[int, Segment, Ints]]:
        """Every segment with its chunk and the placement of what crosses into it."""
        axes = len(lowered.zero_axes)
        incoming = np.full(axes, BROADCAST, dtype=np.int64)
        for number, segments in enumerate(lowered.chunks):
            incoming[incoming == PARTIAL] = SUMMED
            for segment in segments:
                yield number, segment, incoming
                incoming = self.output_placement(segment, self.blocks.units[segment.unit].type, axes)

    def distinct_units(self, lowered: LoweredPlan) -> tuple[list[UnitCall], Ints, Mask]:
        """What `unit_row` is asked of a choice, once for equal units in equal surroundings.

        Returns:
            The calls; [parts, 3] chunk, number of the call, how often it follows itself; [parts] whether the unit is
            recomputed as a whole.
        """
        before, previous = -1, -1
        seen: dict[tuple[object, ...], int] = {}
        calls: list[UnitCall] = []
        parts: list[tuple[int, int, int]] = []
        whole: list[bool] = []
        num_ranks = len(lowered.layout.stages)
        for number, segment, incoming in self.surroundings(lowered):
            rank = number % num_ranks
            unit_type = self.blocks.units[segment.unit].type
            # The unit type before and the place in the chunk are part of the key only so that equal plans add up in
            # the same order here and in `Skeleton`, to the last bit.
            key = (
                before,
                number != previous,
                segment.first,
                segment.last,
                segment.chosen.tobytes(),
                segment.recomputed.tobytes(),
                incoming.tobytes(),
                0 if lowered.is_uniform else rank,
            )
            if key not in seen:
                seen[key] = len(calls)
                calls.append(UnitCall(segment, rank, incoming, int(self.tables.boundary_out[unit_type])))
            row = seen[key]
            if parts and parts[-1][CHUNK] == number and parts[-1][ROW] == row:
                parts[-1] = (number, row, parts[-1][TIMES] + 1)
            else:
                parts.append((number, row, 1))
                whole.append(bool(segment.recomputed.all()))
            before, previous = unit_type, number
        return calls, np.array(parts, dtype=np.int64), np.array(whole)

    def unit_rows(self, lowered: LoweredPlan, calls: Sequence[UnitCall]) -> Floats:
        """[calls, C_COUNT] `unit_row` of each."""
        sharded = new_sharded(self.tables.arrays, len(lowered.zero_axes))
        return np.array(
            [
                self.unit_row(
                    call.segment,
                    call.rank,
                    lowered.layout,
                    call.incoming,
                    lowered.rank_samples[call.rank],
                    lowered.zero_axes,
                    call.boundary_row,
                    sharded=sharded,
                )
                for call in calls
            ]
        )

    def masks(self, unit_type: int) -> Mapping[str, Mask]:
        """The recompute mode's operators of a unit type."""
        if unit_type not in self._masks:
            rows = self.tables.rows(unit_type)
            core = self.tables.core[rows.start : rows.stop]
            self._masks[unit_type] = {
                "none": np.zeros(len(rows), dtype=np.bool_),
                "selective": core.copy(),
                "full": np.ones(len(rows), dtype=np.bool_),
            }
        return self._masks[unit_type]

    @functools.cached_property
    def _masks(self) -> dict[int, Mapping[str, Mask]]:
        return {}

    @functools.cached_property
    def has_core(self) -> bool:
        """Whether selective recomputation differs from none."""
        return bool(self.tables.core.any())

    @functools.cached_property
    def unit_weights(self) -> Floats:
        """[units] seconds of one sample, measured or by FLOPs and bytes: how heavy units are."""
        graph = self.problem.graph
        device = self.problem.cluster.device(0)
        flops_rate = float(gemm_curve(device, self.problem.base_precision)[G_FLOPS])
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
        # No unit weighs nothing, so that sums over units rise strictly.
        return np.maximum(weights, 1e-9 * max(weights))


def blank(evaluator: Evaluator, axes: int) -> Ints:
    """Signatures with nothing decided."""
    return np.full((len(evaluator.tables.operators), axes), -1, dtype=np.int64)


def by_type(evaluator: Evaluator, chosen: Ints) -> Sequence[Ints]:
    """Views of `chosen`, one a unit type."""
    spans = evaluator.tables.spans
    return [chosen[int(spans[t]) : int(spans[t + 1])] for t in range(evaluator.blocks.num_types)]
