"""Reads the shardings and the recomputation of a stage in a plan document, for `automap.price.plan_reader`.

A key of `shardings` is the full name of an operator or a glob. The most specific key that matches an operator states
its signature on some mesh axes; on the others the operator has its default signature (`default_signatures`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from automap.arrays import Ints
from automap.errors import PlanError
from automap.globs import by_precision, first_match, matches, matches_operator
from automap.plan import AxisSharding, Stage
from automap.price.evaluator import Evaluator
from automap.price.kernels.placements import divides
from automap.price.lowered_plan import Segment
from ir.factors import parse_placement, whole_signature


def refuse(field: str, value: object, message: str, repair: str) -> PlanError:
    """The error for a field of a plan, given by its path without the leading `plan.`."""
    return PlanError(message, field=f"plan.{field}", value=value, repair=repair)


def default_signatures(evaluator: Evaluator, unit_type: int, offset: int) -> tuple[int, int]:
    """The default signatures of an operator: on axes that are not batch axes, where it is whole (B), and on batch axes,
    where it splits its batch if it can.

    Args:
        evaluator: of the problem.
        unit_type: type of the operator's unit.
        offset: position of the operator in the unit.
    """
    known = evaluator.defaults.get((unit_type, offset))
    if known is not None:
        return known
    table = evaluator.tables.linkage.types[unit_type].signatures[offset]
    whole = whole_signature(table)
    arrays = evaluator.tables.arrays
    begin = arrays.operators["first_signature"][int(evaluator.tables.spans[unit_type]) + offset]
    split = np.flatnonzero(arrays.signatures["splits_batch"][begin : begin + len(table)])
    found = evaluator.defaults[unit_type, offset] = whole, int(split[0]) if len(split) else whole
    return found


class KnownOperators:
    """Results that are the same for equal operators of a plan, each computed once."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.default = functools.partial(default_signatures, evaluator)
        self.signature = functools.cache(functools.partial(_find_signature, evaluator))
        self._arrays = evaluator.tables.arrays
        self._divides: set[tuple[int, int, bytes, tuple[float, ...]]] = set()

    def check_divides(
        self, row: int, chosen: Ints, mesh_sizes: tuple[float, ...], samples: Sequence[int], path: str
    ) -> None:
        """Raises a `PlanError` for signatures that split a dim unevenly over the ranks of the mesh.

        Args:
            row: row of the operator.
            chosen: [axes] its signatures.
            mesh_sizes: [axes] ranks.
            samples: the numbers of samples with which the dims must divide evenly.
            path: where the plan states the signatures.
        """
        for count in samples:
            case = (row, count, chosen.tobytes(), mesh_sizes)
            if case in self._divides:
                continue
            if not divides(self._arrays, row, np.ascontiguousarray(chosen), np.array(mesh_sizes), count):
                what = "a dim cannot be shared by the ranks of the mesh"
                repair = "Split another dim, or change the mesh or the micro-batch."
                raise refuse(path, [int(size) for size in mesh_sizes], what, repair)
            self._divides.add(case)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageReader:
    """Reads the shardings and the recomputation of stages."""

    evaluator: Evaluator
    axes: Sequence[str]
    """Mesh axes of the lowered plan, outermost first."""
    live: AbstractSet[str]
    """The axes that have several ranks in some stage of the plan."""
    known: KnownOperators
    """Results for equal operators of all stages."""

    def segments(
        self, stage: Stage, number: int, operators: Sequence[tuple[str, int, int]], samples: Sequence[int]
    ) -> tuple[Segment, ...]:
        """The segments of one stage, one for each of its units.

        Args:
            stage: the stage.
            number: its number, for errors.
            operators: (name, unit, offset in the unit) of its operators, in order.
            samples: the numbers of samples with which dims that are split by samples must divide evenly.
        """
        by_unit: dict[int, list[tuple[str, int]]] = {}
        for name, unit, offset in operators:
            by_unit.setdefault(unit, []).append((name, offset))
        mesh = dict(stage.mesh)
        mesh_sizes = tuple(float(mesh.get(axis, 1)) for axis in self.axes)
        # A key that is the full name of an operator is for this operator alone, even if it could be read as a glob.
        names = {name for name, _, _ in operators}
        globs = by_precision(key for key in stage.shardings if key not in names)
        regions = tuple(glob for glob in stage.recompute if glob not in names)
        used: set[str] = set()
        segments = []
        for unit, members in by_unit.items():
            base = int(self.evaluator.tables.spans[self.evaluator.blocks.units[unit].type])
            chosen = self._signatures(stage, number, unit, members, (globs, used))
            for k, (name, offset) in enumerate(members):
                path = f"stages[{number}].shardings.{name}"
                self.known.check_divides(base + offset, chosen[k], mesh_sizes, samples, path)
            recomputed = np.array(
                [name in stage.recompute or first_match(regions, name) is not None for name, _ in members],
                dtype=np.bool_,
            )
            first, last = base + members[0][1], base + members[-1][1] + 1
            segments.append(Segment(unit=unit, first=first, last=last, chosen=chosen, recomputed=recomputed))
        _check_named(stage, number, used, names)
        return tuple(segments)

    def _signatures(
        self,
        stage: Stage,
        number: int,
        unit: int,
        members: Sequence[tuple[str, int]],
        keys: tuple[tuple[str, ...], set[str]],
    ) -> Ints:
        """[operators, axes] the signatures of the operators of one unit.

        Args:
            stage, number: the stage and its number.
            unit: the unit.
            members: (name, offset in the unit) of its operators.
            keys: the globs among the keys of `stage.shardings`, the most specific first; and the set of keys that are
                used by an operator, to which the keys used here are added.
        """
        (globs, used), unit_type = keys, self.evaluator.blocks.units[unit].type
        chosen = np.zeros((len(members), len(self.axes)), dtype=np.int64)
        followers: list[tuple[int, int, str]] = []
        for k, (name, offset) in enumerate(members):
            key = name if name in stage.shardings else first_match(globs, name)
            stated = stage.shardings[key] if key is not None else {}
            if key is not None and not stated.keys() >= {*self.axes} and matches_operator(key, name):
                used.add(key)
            on_other_axes, on_batch_axes = self.known.default(unit_type, offset)
            for a, axis in enumerate(self.axes):
                if axis not in stated:
                    chosen[k, a] = on_batch_axes if axis in stage.batch_axes and axis in self.live else on_other_axes
                    continue
                assert key is not None
                found = self.known.signature(unit_type, offset, stated[axis])
                if found is not None:
                    chosen[k, a] = found
                    used.add(key)
                elif matches_operator(key, name):
                    path = f"stages[{number}].{key}.{axis}"
                    raise _no_signature(self.evaluator, unit_type, offset, stated[axis], path)
                else:
                    chosen[k, a] = on_other_axes
                    followers.append((k, a, key))
        _follow(self.evaluator, unit_type, members, followers, chosen)
        return chosen


def _check_named(stage: Stage, number: int, used: AbstractSet[str], own: AbstractSet[str]) -> None:
    """Raises a `PlanError` if a key or an axis of a stage matches nothing.

    Args:
        used: keys of the shardings that are used by an operator.
        own: names of the operators of the stage.
    """
    mesh = dict(stage.mesh)
    for key, entry in stage.shardings.items():
        for axis in entry:
            if axis not in mesh:
                repair = f"Use {', '.join(mesh)}." if mesh else "The mesh has none: remove it."
                raise refuse(f"stages[{number}].shardings.{key}", axis, "no such mesh axis", repair)
        if key not in used:
            raise refuse(
                f"stages[{number}].shardings",
                key,
                "matches no operator of the stage that can have these placements",
                "Remove or correct the key.",
            )
    for glob in stage.recompute:
        if glob not in own and not any(matches(glob, name) for name in own):
            what = "matches no operator of the stage"
            raise refuse(f"stages[{number}].recompute", glob, what, "Remove or correct the entry.")


def _follow(
    evaluator: Evaluator,
    unit_type: int,
    members: Sequence[tuple[str, int]],
    inside: Iterable[tuple[int, int, str]],
    chosen: Ints,
) -> None:
    """Gives signatures to the operators of a sharded module that cannot have the one of its key.

    They follow the leader of their linkage group.
    """
    place = {offset: k for k, (_, offset) in enumerate(members)}
    groups = evaluator.tables.linkage.types[unit_type].groups
    for k, a, key in inside:
        offset = members[k][1]
        group = next((g for g in groups if offset in g.members), None)
        if group is not None and group.leader in place and matches(key, members[place[group.leader]][0]):
            chosen[k, a] = group.assignment[chosen[place[group.leader], a]][group.members.index(offset)]


def _find_signature(evaluator: Evaluator, unit_type: int, offset: int, entry: AxisSharding) -> int | None:
    """Number of the operator's signature with the placements of `entry`, or None."""
    table = evaluator.tables.linkage.types[unit_type].signatures[offset]
    for index, signature in enumerate(table):
        if AxisSharding.of(signature) == entry:
            return index
    return None


@functools.lru_cache(maxsize=4096)
def _no_signature(evaluator: Evaluator, unit_type: int, offset: int, entry: AxisSharding, path: str) -> PlanError:
    """The error for placements that no signature of the operator has: they are malformed, or not legal for it."""
    table = evaluator.tables.linkage.types[unit_type].signatures[offset]
    try:
        for text in (*entry.inputs, *entry.outputs):
            parse_placement(text)
    except ValueError as fault:
        return refuse(path, [*entry.inputs, *entry.outputs], str(fault), "Write B, P or S(dim).")
    legal = "; ".join(signature.text for signature in table)
    return refuse(
        path, f"{list(entry.inputs)} -> {list(entry.outputs)}", "not a legal signature", f"Use one of: {legal}."
    )
