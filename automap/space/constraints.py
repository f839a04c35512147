"""Constrained: the user's constraints (`hints.constraints`, and the axes that `hints.fix` names), compiled once for the
masks of a PlanSpace.

They do not depend on decisions and their order. The operators of a unit are in one stage, and equal units have equal
signatures, so a constraint on one of them holds for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from automap.arrays import Mask
from automap.errors import ProblemError
from automap.globs import select
from automap.hints import Constraint
from automap.price.evaluator import Evaluator
from automap.price.lowered_plan import RECOMPUTE_MODES
from automap.problem import Problem
from automap.space.limits import Limits
from ir.factors import BROADCAST, parse_placement, placement_text
from ir.graph import Operator
from ir.linkage import Group
from ir.operators.experts import COMBINE, DISPATCH, PRODUCT, num_experts


class Constrained:
    """The decisions that the constraints of a problem allow.

    Attributes:
        stages: whether operators are bound to stages.
        recomputes: whether operators are bound to be recomputed or not.
        splits: whether some operators must be split over tp.
        kept: [units, modes] whether a recompute mode recomputes none of the operators that must not be recomputed.
        again: [units, modes] whether a recompute mode recomputes all operators that must be recomputed. All units of a
            rank have one mode; if it cannot obey both `kept` and `again`, it obeys `again`.
        narrowed: whether constraints or limits forbid cuts in which every chunk has a unit.
    """

    def __init__(self, problem: Problem, evaluator: Evaluator, limits: Limits) -> None:
        """Compiles the constraints.

        Raises:
            ProblemError: two constraints bind the same unit to different stages.
        """
        self.problem = problem
        self.linkage = evaluator.tables.linkage
        self._units = self.linkage.blocks.units
        named = self._named()
        self._signatures: dict[tuple[int, int], list[Constraint]] = {}
        self._unit_stage: dict[int, int] = {}
        self.splits = False
        forced = np.ones((2, len(self._units), len(RECOMPUTE_MODES)), dtype=np.bool_)
        for index, (constraint, places) in enumerate(zip(problem.hints.constraints, named, strict=True)):
            self.splits = self.splits or bool(constraint.split)
            for unit, offset in places:
                kind = self._units[unit].type
                self._signatures.setdefault((kind, offset), []).append(constraint)
                if constraint.stage is not None and self._unit_stage.setdefault(unit, constraint.stage) != (
                    constraint.stage
                ):
                    raise ProblemError(
                        "operators that cannot be cut apart are bound to different stages",
                        field=f"hints.constraints[{index}].stage",
                        value=constraint.stage,
                        repair=f"Give them the same stage: {self._unit_name(unit)}.",
                    )
                again = [bool(evaluator.masks(kind)[name][offset]) for name in RECOMPUTE_MODES]
                # Operators that no mode recomputes, such as those of units without a backward pass, do not count.
                if constraint.recompute is not None and _runs_again(problem, again):
                    forced[int(constraint.recompute), unit] &= np.array(again) == constraint.recompute
            self._check_recompute(index, constraint, places, evaluator)
            self._check_sharding(index, constraint, places)
        self._check_equal_layers(named)
        self.kept, self.again = forced
        self.recomputes = bool((~forced).any())
        self.stages = bool(self._unit_stage)
        self._limits = limits.windows
        self.narrowed = self.stages or bool(limits.windows)
        self._windows: dict[int, list[tuple[int, int]] | None] = {}

    def _named(self) -> list[list[tuple[int, int]]]:
        """For each constraint, the (unit, offset in the unit) of the operators that it names."""
        if not self.problem.hints.constraints:
            return []
        names = [op.name for op in self.problem.graph.operators]
        place = {
            names[index]: (number, index - unit.start)
            for number, unit in enumerate(self._units)
            for index in range(unit.start, unit.stop)
        }
        chosen = [select(constraint.scope, names) for constraint in self.problem.hints.constraints]
        return [[place[name] for name in found if name in place] for found in chosen]

    def _check_recompute(
        self, index: int, constraint: Constraint, places: Iterable[tuple[int, int]], evaluator: Evaluator
    ) -> None:
        """Raises a `ProblemError` if the target can recompute none of the operators that must be recomputed."""
        target = self.problem.target
        masks = [(self._units[unit].type, offset) for unit, offset in places]
        masks = [(kind, offset) for kind, offset in masks if not evaluator.recomputed.is_frozen(kind)]
        if constraint.recompute and target is not None and masks:
            again = ([bool(evaluator.masks(kind)[name][at]) for name in RECOMPUTE_MODES] for kind, at in masks)
            if not any(_runs_again(self.problem, one) for one in again):
                raise ProblemError(
                    f"{target.name} can recompute none of these operators",
                    field=f"hints.constraints[{index}].recompute",
                    value=True,
                    repair="Name operators of layers, leave it out, or use another target.",
                )

    def _check_sharding(self, index: int, constraint: Constraint, places: Iterable[tuple[int, int]]) -> None:
        """Raises a `ProblemError` for a placement that none of the named operators can have."""
        kinds = {(self._units[unit].type, offset) for unit, offset in places}
        for axis in constraint.sharding or {}:
            if not any(
                self._obeys(constraint, kind, offset, lowered, axis)
                for kind, offset in kinds
                for lowered in range(len(self.linkage.types[kind].signatures[offset]))
                if not self._operator(kind, offset).is_view
            ):
                tables = [self.linkage.types[kind].signatures[offset] for kind, offset in sorted(kinds)]
                legal = dict.fromkeys(placement_text(s.outputs[0]) for table in tables for s in table if s.outputs)
                raise ProblemError(
                    "no operator of the scope can have this placement",
                    field=f"hints.constraints[{index}].sharding.{axis}",
                    value=(constraint.sharding or {})[axis],
                    repair="Use one of " + (", ".join(legal) or "none: the scope holds constants only") + ".",
                )

    def _check_equal_layers(self, named: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Raises a `ProblemError` for constraints with different shardings of the same operator of equal layers."""
        wanted: dict[tuple[int, int, str], tuple[int, str]] = {}
        for index, (constraint, places) in enumerate(zip(self.problem.hints.constraints, named, strict=True)):
            asked = {f"sharding.{axis}": text for axis, text in (constraint.sharding or {}).items()}
            if constraint.replicate or constraint.split:
                asked["split"] = "divided" if constraint.split else "whole"
            for (unit, offset), (what, value) in itertools.product(places, asked.items()):
                first, other = wanted.setdefault((self._units[unit].type, offset, what), (index, value))
                if other != value:
                    operators = self.problem.graph.operators
                    name = operators[self._units[unit].start + offset].name
                    raise ProblemError(
                        f"asks for {name} as {value}, and hints.constraints[{first}] asks for the same operator, or "
                        f"that of an equal layer, as {other}; equal layers have equal shardings",
                        field=f"hints.constraints[{index}]",
                        value=constraint.scope,
                        repair="Leave one of them out, or narrow its scope.",
                    )

    def _operator(self, unit_type: int, offset: int) -> Operator:
        return self.problem.graph.operators[self.linkage.blocks.representative(unit_type).start + offset]

    def _unit_name(self, unit: int) -> str:
        operators, where = self.problem.graph.operators, self._units[unit]
        return f"{operators[where.start].name} to {operators[where.stop - 1].name}"

    # -- shapes and cuts -----------------------------------------------------------------------------------------

    def check_axes(self, axes: Sequence[str]) -> None:
        """Checks that the problem's meshes have the axes of all constrained placements.

        Raises:
            ProblemError: names the constraint.
        """
        for index, constraint in enumerate(self.problem.hints.constraints):
            for axis in constraint.sharding or {}:
                if axis not in axes:
                    raise ProblemError(
                        "no such mesh axis",
                        field=f"hints.constraints[{index}].sharding",
                        value=axis,
                        repair="Use "
                        + ", ".join(axes)
                        + "; hints.fix.cp or hints.fix.ep brings one between dp and tp.",
                    )

    def allows(self, pp: int, tp: int) -> bool:
        """Whether plans with `pp` stages and an inner axis of `tp` ranks can obey the constraints."""
        return not (self.splits and tp == 1) and (not self.stages or self._of_chunks(pp) is not None)

    def explain(self, degrees: Iterable[int]) -> None:
        """Raises an error if constraints are the reason why there is no shape.

        Raises:
            ProblemError: no number of stages fits the constraints, or nothing can be split.
        """
        if self.stages and not any(self._of_chunks(pp) is not None for pp in degrees):
            raise ProblemError(
                "no pipeline has these stages in the order of the model, each with some operators",
                field="hints.constraints",
                value={self._unit_name(unit): stage for unit, stage in sorted(self._unit_stage.items())},
                repair="Number the stages from 0 in the order of the model, below the largest pp that divides the "
                "number of devices.",
            )
        fix = self.problem.hints.fix
        if self.splits and fix.tp == 1:
            raise ProblemError(
                "constraints with split need an inner mesh axis of several ranks",
                field="hints.fix.tp",
                value=1,
                repair="Give 2 or more, or leave it out.",
            )

    def window(self, chunk: int, num_chunks: int) -> tuple[int, int]:
        """First and last legal end of a chunk, in units before it; the last chunk ends after all units."""
        if num_chunks in self._limits:
            return self._limits[num_chunks][chunk]
        if not self.stages:
            return chunk + 1, len(self._units) - (num_chunks - 1 - chunk)
        windows = self._of_chunks(num_chunks)
        assert windows is not None, "no such shape"
        return windows[chunk]

    def _of_chunks(self, num_chunks: int) -> list[tuple[int, int]] | None:
        """The windows of all chunks; None if some chunk would be empty or the constraints name a stage beyond them."""
        if num_chunks not in self._windows:
            self._windows[num_chunks] = self._find_windows(num_chunks)
        return self._windows[num_chunks]

    def _find_windows(self, num_chunks: int) -> list[tuple[int, int]] | None:
        units = len(self._units)
        low = list(range(1, num_chunks + 1))
        high = [units - (num_chunks - 1 - chunk) for chunk in range(num_chunks)]
        low[-1] = units
        for unit, stage in self._unit_stage.items():
            if stage >= num_chunks:
                return None
            low[stage] = max(low[stage], unit + 1)
            if stage:
                high[stage - 1] = min(high[stage - 1], unit)
        for chunk in range(1, num_chunks):
            low[chunk] = max(low[chunk], low[chunk - 1] + 1)
        for chunk in range(num_chunks - 2, -1, -1):
            high[chunk] = min(high[chunk], high[chunk + 1] - 1)
        windows = list(zip(low, high, strict=True))
        return windows if all(first <= last for first, last in windows) else None

    # -- signatures ----------------------------------------------------------------------------------------------

    def signatures(self, unit_type: int, group: Group, axis: str) -> Mask:
        """[signatures of the group's leader] whether each obeys the constraints and fixed degrees on a mesh axis.

        A constraint that names the leader is checked on the leader, any other one on the members that it names. If no
        signature obeys both the constraints and the fixed degrees, the constraints count alone.
        """
        allowed = np.ones(len(group.assignment), dtype=np.bool_)
        about_leader = self._signatures.get((unit_type, group.leader), [])
        for position, member in enumerate(group.members):
            for constraint in self._signatures.get((unit_type, member), []):
                if member != group.leader and constraint in about_leader:
                    continue
                for value in np.flatnonzero(allowed):
                    if not self._obeys(constraint, unit_type, member, group.assignment[value][position], axis):
                        allowed[value] = False
        fix = self.problem.hints.fix
        if fix.may_split_batch(axis) and fix.ep is None:
            return allowed
        named = np.zeros(len(group.assignment), dtype=np.bool_)
        for number, lowered in enumerate(group.assignment):
            pairs = zip(group.members, lowered, strict=True)
            named[number] = all(self._is_as_named(unit_type, member, row, axis) for member, row in pairs)
        return allowed & named if (allowed & named).any() else allowed

    def _is_as_named(self, unit_type: int, offset: int, lowered: int, axis: str) -> bool:
        """Whether a signature splits the dim that the name of its axis stands for, if the degree is fixed (`Fix`)."""
        signature, fix = self.linkage.types[unit_type].signatures[offset][lowered], self.problem.hints.fix
        op, graph = self._operator(unit_type, offset), self.problem.graph
        factor = None if signature.factor is None else op.rule.factors[signature.factor]
        splits_experts = factor is not None and factor.name == "e"
        if fix.shares_experts(num_experts(op)):
            if splits_experts != (axis == "ep"):
                return False
        elif fix.ep == 1 and op.kind in (DISPATCH, PRODUCT, COMBINE) and splits_experts:
            return False
        if factor is None:
            return True
        if fix.may_split_batch(axis):
            return True
        if factor.is_batch:
            return False
        weights = [p for n, p in zip(op.inputs, signature.inputs, strict=True) if graph.is_weight(n)]
        if not weights or op.forward_flops.at(1) == 0 or getattr(fix, axis) is None:
            return True
        return any(p >= 0 for p in weights) == (axis == "tp")

    def _obeys(self, constraint: Constraint, unit_type: int, offset: int, lowered: int, axis: str) -> bool:
        signature = self.linkage.types[unit_type].signatures[offset][lowered]
        op = self._operator(unit_type, offset)
        if op.is_view:
            return True
        factor = None if signature.factor is None else op.rule.factors[signature.factor]
        own = factor is not None and not factor.is_batch
        is_whole = factor is None and all(p == BROADCAST for p in signature.inputs + signature.outputs)
        if constraint.replicate and not (is_whole or (factor is not None and factor.is_batch)):
            return False
        if constraint.split and axis == "tp" and not own:
            return False
        wanted = (constraint.sharding or {}).get(axis)
        return wanted is None or signature.outputs[0] == parse_placement(wanted)


def _runs_again(problem: Problem, again: Sequence[bool]) -> bool:
    """Whether some recompute mode of the problem recomputes an operator; `again`: [modes] whether a mode recomputes
    it."""
    return any(found and name in problem.recompute_modes for name, found in zip(RECOMPUTE_MODES, again, strict=True))
