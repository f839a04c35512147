"""Plainest: among the plans whose estimates do not differ significantly from the best one, the plainest plan.

An estimate has an error, and step times that differ by less than a fraction of it count as a tie. Of the plans in a
tie, the plainest is returned. The following criteria decide, the first one first:

1. no stage repeats all its work over an axis;
2. fewer devices, by a factor of at least two;
3. templates before other plans;
4. fewer axes.

Plans that are equal in all of these differ only in details, and their estimates have most of their error in common. Of
those that are nearly as fast as the fastest of them (`NEAR`), the one on the fewest devices is taken, and then the one
with the fewest unusual decisions.

Besides the plans that were found, two kinds of plans are considered: the best one with decisions set to their ordinary
values, and each plan without axes over which nothing is split and with like axes merged. Units: seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from agents.results.diverse_top_k import Found
from automap.bounds.priced_templates import priced_so_far
from automap.plan import Plan
from automap.price.estimate import annotate
from automap.price.evaluator import Evaluator
from automap.price.lowered_plan import LoweredPlan, Segment
from automap.price.plan_writer import to_plan
from automap.price.stage_reader import default_signatures
from automap.space.simplified_axes import ROUNDING, canonical, merges, num_unlike, repeats, sizes, without_idle
from automap.space.space import PlanSpace, Slot, Values
from automap.verify import Verifier

TIE = 0.1
"""Share of an estimate's error band, on either side, within which two step times count as equal (assumed). The band is
for plans of all models and clusters. Plans of one model on one cluster have most of their error in common; so the error
of their difference is assumed to be a tenth of the band."""
NEAR = 1.0 / 3.0
"""Share of a tie by which a plan may be slower than the fastest plan that is equal in the criteria 1 to 4 (assumed):
with a tie of 3 %, details cost at most 1 %."""
MOST_TEMPLATES = 12
"""Largest number of templates that are considered because they are plain, and of those that are because they are fast:
in a large space hundreds may be within the tie."""
T = TypeVar("T")


class Plainness(NamedTuple):
    """The criteria by which plans are compared, see `in_order`."""

    repeats: bool
    """Whether a stage repeats all its work over an axis."""
    num_devices: int
    """Number of devices in use."""
    is_no_template: bool
    """Whether the plan is not a template."""
    num_axes: int
    """Number of axes."""
    num_unusual: int
    """Number of unusual decisions."""
    step_s: float
    """Step time."""

    @property
    def kind(self) -> tuple[bool, int, bool, int]:
        """The criteria 1 to 4 of the module; the plainest kind is the smallest tuple. The number of devices is rounded
        up to a power of two: whether 6 or 7 are in use is a detail."""
        doublings = (self.num_devices - 1).bit_length()
        return self.repeats, doublings, self.is_no_template, self.num_axes


def in_order(plans: Iterable[T], rank: Callable[[T], Plainness], near_s: float) -> list[T]:
    """Plans within a tie, the plainest first.

    Args:
        plans: the plans.
        rank: how plain each is.
        near_s: seconds by which a plan may be slower than the fastest one of its kind to come before it.
    """
    plans = list(plans)
    fastest: dict[object, float] = {}
    for plan in plans:
        kind = rank(plan).kind
        fastest[kind] = min(rank(plan).step_s, fastest.get(kind, np.inf))

    def key(plan: T) -> tuple[object, ...]:
        own = rank(plan)
        is_far = own.step_s > fastest[own.kind] + near_s
        return *own.kind, is_far, own.num_devices, own.num_unusual, own.step_s

    return sorted(plans, key=key)


class IllegalPlan(RuntimeError):
    """A plan that was found breaks the rules of `automap.verify`, which is a defect of AutoMAP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A plan that a search may return."""

    plan: Plan
    """The plan with its estimate, verified."""
    found_by: str
    """Name of the searcher that found the plan, or the plan of the space from which it was made."""
    plainness: Plainness
    """How plain the plan is."""
    num_decisions: int
    """Number of decisions with more than one legal value, see `automap.plan.SearchRecord`."""
    num_operator_decisions: int
    """Number of those that are about operators."""


class Outside(NamedTuple):
    """A plan that fits and lies outside the plan space."""

    step_time_s: float
    """Step time of the plan."""
    plan: Plan
    """The plan; with its estimate where the search has ended."""
    lowered: LoweredPlan
    """The same plan in numbers."""
    found_by: str
    """Searcher that found it."""

    def offer(self, evaluator: Evaluator) -> Offer:
        """The plan as it is; it has no decisions that could be counted."""
        rank = plainness(self.lowered, evaluator, self.step_time_s, is_template=False)
        return Offer(plan=self.plan, found_by=self.found_by, plainness=rank, num_decisions=0, num_operator_decisions=0)


def plainest(
    space: PlanSpace,
    best: Found,
    others: Sequence[Found],
    limit_s: float,
    verifier: Verifier,
    known: Plan | None = None,
) -> Offer:
    """The plainest plan whose step time is within a limit.

    Args:
        space: space of the plans.
        best: the fastest plan; if the limit is below its step time, that is the limit.
        others: further plans that were found, whatever their step time.
        limit_s: largest step time.
        verifier: checks plans of the problem.
        known: the fastest plan with its estimate, verified; None where it has not been written yet.

    Raises:
        IllegalPlan: not even the best plan is legal.
    """
    best_s, evaluator = float(space.price(np.array([best[0]]))[0, 0]), space.evaluator
    found = _candidates(space, best, others, limit_s, best_s + NEAR * max(0.0, limit_s - best_s))
    times = space.price(np.array(list(found)))[:, 0].tolist()
    pool: list[tuple[Plainness, Values, LoweredPlan]] = []
    raws: dict[Values, LoweredPlan] = {}
    for (values, (_, is_template)), raw_s in zip(found.items(), times, strict=True):
        raw = raws[values] = space.lowered(values)
        simple, simple_s = _plain(raw, evaluator, limit_s, raw_s)
        # The simplified plan may break a constraint of the hints that the plan obeys as it was found.
        for lowered, step_s in ((simple, simple_s), (raw, raw_s))[simple is raw :]:
            pool.append((plainness(lowered, evaluator, step_s, is_template=is_template), values, lowered))
    near_s = NEAR * max(0.0, limit_s - min(rank.step_s for rank, _, _ in pool))
    faults = ""
    for rank, values, lowered in in_order(sorted(pool, key=lambda some: some[:2]), lambda some: some[0], near_s):
        if known is not None and lowered is raws[best[0]]:
            return _offer(space, replace(known, search=None), values, best[1], rank)
        plan = annotate(to_plan(lowered, evaluator), lowered, evaluator)
        wrong = verifier.violations(plan)
        if not wrong:
            return _offer(space, plan, values, found[values][0], rank)
        faults = "; ".join(map(str, wrong))
    raise IllegalPlan(f"{best[1]} found a plan that breaks rules: {faults}")


def as_it_is(space: PlanSpace, best: Found, plan: Plan) -> Offer:
    """The best plan of a search, unchanged.

    Args:
        space: space of the plan.
        best: its values and the searcher that found it.
        plan: the plan with its estimate.
    """
    values, found_by = best
    lowered = space.lowered(values)
    step_s = space.evaluator.evaluate(lowered).step_time_s
    rank = plainness(lowered, space.evaluator, step_s, is_template=found_by == "expert")
    return _offer(space, plan, values, found_by, rank)


def _offer(space: PlanSpace, plan: Plan, values: Values, found_by: str, rank: Plainness) -> Offer:
    free = [slot.kind for slot in space.free_slots(values)]
    return Offer(
        plan=plan,
        found_by=found_by,
        plainness=rank,
        num_decisions=len(free),
        num_operator_decisions=free.count("signature"),
    )


def plainness(lowered: LoweredPlan, evaluator: Evaluator, step_s: float, *, is_template: bool) -> Plainness:
    """How plain a lowered plan is, whose step takes `step_s`."""
    stages, cuts = lowered.layout.stages, [len(chunk) for chunk in lowered.chunks]
    devices = [device for stage in stages for device in stage.devices]
    # Of every segment, whether something in it is recomputed, and whether all of it is.
    modes = {
        (bool(segment.recomputed.any()), bool(segment.recomputed.all()))
        for chunk in lowered.chunks
        for segment in chunk
    }
    nothing = (False, False)
    unusual = {
        "ZeRO": lowered.zero,
        "recomputation": modes != {nothing},
        "recomputation of several kinds": len(modes - {nothing}) > 1,
        "recomputation that differs inside a chunk": any(_mixes(chunk, evaluator) for chunk in lowered.chunks),
        "virtual stages": len(lowered.chunks) > len(stages),
        "a schedule other than 1F1B": lowered.kind not in ("1f1b", "interleaved"),
        "micro-batches without a pipeline": lowered.num_micro_batches > 1 and len(stages) == 1,
        "devices in another order": devices != sorted(devices),
        "unlike stages": len({tuple(stage.axes) for stage in stages}) > 1,
        "unequal batch shares": any(shares is not None for shares in lowered.shares),
        "unequal chunks": max(cuts) - min(cuts) > 1,
    }
    num_axes = int((sizes(lowered) > 1).sum()) + (len(stages) > 1)
    # ZeRO counts as many unusual decisions as its stage, all others count as one.
    num_unusual = num_unlike(lowered, evaluator) + sum(unusual.values())
    return Plainness(repeats(lowered, evaluator), len(devices), not is_template, num_axes, num_unusual, step_s)


def _mixes(segments: Sequence[Segment], evaluator: Evaluator) -> bool:
    """Whether equal units of a chunk have different recomputation."""
    again = {(evaluator.blocks.units[s.unit].type, s.recomputed.tobytes()) for s in segments}
    return len(again) > len({unit_type for unit_type, _ in again})


def plain(lowered: LoweredPlan, evaluator: Evaluator, limit_s: float) -> LoweredPlan:
    """A lowered plan without axes over which nothing is split, and with like axes merged, as far as the limit allows.

    Args:
        lowered: a plan that fits.
        evaluator: evaluator of its problem.
        limit_s: largest step time; if it is below the plan's own, that is the limit.
    """
    return _plain(lowered, evaluator, limit_s, evaluator.evaluate(lowered).step_time_s)[0]


def _plain(lowered: LoweredPlan, evaluator: Evaluator, limit_s: float, step_s: float) -> tuple[LoweredPlan, float]:
    """`plain` of a plan whose step takes `step_s`, and what a step of the result takes."""
    own = canonical(lowered, evaluator)
    # An evaluation takes some hundredths of a second for thousands of unlike operators.
    own_s = step_s if own is lowered else evaluator.evaluate(own).step_time_s
    limit_s = max(limit_s, own_s * (1.0 + ROUNDING))
    for other in itertools.chain(without_idle(own, evaluator), merges(own, evaluator)):
        outcome = evaluator.evaluate(other)
        if outcome.fits and outcome.step_time_s <= limit_s:
            return _plain(other, evaluator, limit_s, outcome.step_time_s)
    return own, own_s


def _candidates(
    space: PlanSpace, best: Found, others: Sequence[Found], limit_s: float, near_s: float
) -> dict[Values, tuple[str, bool]]:
    """Plans within the limit -> the searcher that found each, and whether it is a template; `near_s` is the limit of
    plans that differ from the best one in unusual decisions alone."""
    listed, prices = priced_so_far(space)
    is_fast = (prices[:, 1] <= 0.0) & (prices[:, 0] <= limit_s)
    fast, seconds = listed[is_fast], prices[is_fast, 0]
    # Templates with the fewest values other than 0 come first.
    order = np.lexsort((seconds, (fast[:, : space.first.signature] > 0).sum(axis=1)))
    both = [*order[:MOST_TEMPLATES], *np.argsort(seconds, kind="stable")[:MOST_TEMPLATES]]
    found = {tuple(row): ("expert", True) for row in fast[both].tolist()}
    is_template = {tuple(row) for row in fast.tolist()}
    given = np.array([values for values, _ in others], dtype=np.int64).reshape(len(others), len(space.slots))
    others = [other for other, is_fast in zip(others, _within_limit(space, given, limit_s), strict=True) if is_fast]
    for values, name in (best, *others):
        found.setdefault(values, (name, values in is_template))
    for most_s in (near_s, limit_s) if best[0] not in is_template else ():
        found.setdefault(simplified(space, best[0], most_s), (best[1], False))
    return found


def simplified(space: PlanSpace, values: Values, limit_s: float) -> Values:
    """A plan with as many decisions set to their ordinary values as the limit allows.

    First all decisions of a kind are changed together, those about operators for each mesh axis; then single decisions,
    those first that cost least time.

    Args:
        space: space of the plan.
        values: a plan that fits.
        limit_s: largest step time; if it is below the plan's own, that is the limit.
    """
    limit_s = max(limit_s, float(space.price(np.array([values]))[0, 0]))
    for kind, axis in [("signature", a) for a in range(len(space.axes))] + [(k, -1) for k in ORDINARY]:
        for slots in _ordinary(space, values, kind, axis):
            tried = space.repair([slots.get(number, value) for number, value in enumerate(values)])
            if tried == values or _within_limit(space, np.array([tried]), limit_s)[0]:
                values = tried
                break
    return _one_by_one(space, values, limit_s)


ORDINARY = ("shares", "devices", "order", "schedule", "zero", "recompute", "cut")
"""Kinds of decisions whose ordinary value is 0, the most unusual ones first."""


def _one_by_one(space: PlanSpace, values: Values, limit_s: float) -> Values:
    """A plan with single decisions set to their ordinary values, those first that cost least time."""
    ordinary: dict[int, int] = {}
    for axis in range(len(space.axes)):
        *_, slots = _ordinary(space, values, "signature", axis)
        ordinary |= slots
    for kind in ("recompute", "cut"):
        (slots,) = _ordinary(space, values, kind, -1)
        ordinary |= slots
    odd = [number for number, value in ordinary.items() if values[number] != value]
    alone = [_with(space, values, number, ordinary[number]) for number in odd]
    if not odd:
        return values
    prices = space.price(np.array(alone))
    for at in np.argsort(np.where(prices[:, 1] <= 0.0, prices[:, 0], np.inf), kind="stable").tolist():
        tried = _with(space, values, odd[at], ordinary[odd[at]])
        if tried != values and _within_limit(space, np.array([tried]), limit_s)[0]:
            values = tried
    return values


def _with(space: PlanSpace, values: Values, number: int, value: int) -> Values:
    """The plan with another value of one slot, repaired after it."""
    return space.repair([*values[:number], value, *values[number + 1 :]], kept=number)


def _ordinary(space: PlanSpace, values: Values, kind: str, axis: int) -> list[dict[int, int]]:
    """Ways to give all slots of a kind their ordinary values, as slot -> value, the most ordinary way first."""
    slots = [(number, slot) for number, slot in enumerate(space.slots) if slot.kind == kind]
    if kind != "signature":
        return [{number: value for number, _ in slots} for value in (range(3) if kind == "zero" else (0,))]
    mine = [(number, *_defaults(space, slot)) for number, slot in slots if slot.index == axis]
    splits = sum((values[n] == batch) - (values[n] == whole) for n, whole, batch in mine if whole != batch)
    nothing = {number: whole for number, whole, _ in mine}
    return [nothing, {number: batch for number, _, batch in mine}] if splits > 0 else [nothing]


def _defaults(space: PlanSpace, slot: Slot) -> tuple[int, int]:
    """The signatures of a group in which its leader is replicated, and in which it splits the batch if it can."""
    leader = space.linkage.types[slot.unit_type].groups[slot.group].leader
    return default_signatures(space.evaluator, slot.unit_type, leader)


def _within_limit(space: PlanSpace, rows: np.ndarray, limit_s: float) -> np.ndarray:
    """[plans] whether each fits and its step time is within the limit."""
    if not len(rows):
        return np.zeros(0, dtype=np.bool_)
    prices = space.price(rows)
    return (prices[:, 1] <= 0.0) & (prices[:, 0] <= limit_s)


def tidy(plan: Plan, lowered: LoweredPlan, evaluator: Evaluator, verifier: Verifier) -> Plan:
    """A plan in its canonical form, without axes over which nothing is split; unchanged where that is illegal.

    Args:
        plan: a synchronous plan with its estimate.
        lowered: the same plan, lowered.
        evaluator: evaluator of its problem.
        verifier: verifier of its problem.
    """
    other = plain(lowered, evaluator, 0.0)
    again = annotate(to_plan(other, evaluator), other, evaluator)
    return plan if verifier.violations(again) else replace(again, search=plan.search, warnings=plan.warnings)
