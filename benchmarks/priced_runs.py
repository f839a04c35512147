"""Published runs, prepared so that each can be priced again and again while constants change.

What depends on a run alone (the units of its plan, their signatures and surroundings) is found once; what depends on
devices, links, trainers and the shared constants is computed afresh on every call, by the price's own functions.
"""

from __future__ import annotations

import json
from dataclasses import replace

from automap.price.evaluator import Evaluator
from automap.price.kernels.array_types import Rows
from automap.price.lowered_plan import LoweredPlan, UnitCall
from automap.price.outcome import Outcome
from automap.price.stage_layout import PipelineLayout, PipelineLayouts
from automap.validation.published_cases import case_of
from automap.validation.published_runs import Run


def _key(call: UnitCall) -> tuple[object, ...]:
    segment = call.segment
    arrays = (segment.chosen, segment.recomputed, call.incoming)
    return (segment.first, segment.last, call.rank, *(array.tobytes() for array in arrays))


class PricedRun:
    """One run; making it raises `Unpriced` where the price has nothing to say."""

    def __init__(self, run: Run) -> None:
        self.run = run
        case = case_of(run)
        self.problem = case.problem
        self.lowered = case.lowered
        self._tables = case.evaluator.tables
        self._stages = [(stage.devices, tuple(int(s) for s in stage.axes)) for stage in case.lowered.layout.stages]
        problem, first = case.problem, self._stages[0][1]
        document = json.dumps(problem.cluster.to_json(), sort_keys=True)
        self._where = (document, replace(problem.training, global_batch=1), first, len(self._stages))
        calls, self._parts = case.evaluator.distinct_units(case.lowered)
        # Calls that differ only in their surroundings cost the same.
        numbers = {_key(call): i for i, call in reversed(list(enumerate(calls)))}
        kept = {number: i for i, number in enumerate(sorted(numbers.values()))}
        self._calls = [calls[number] for number in kept]
        self._parts["row"] = [kept[numbers[_key(calls[row])]] for row in self._parts["row"].tolist()]
        self._tied = case.evaluator.tied.rows(case.lowered)
        self._last: tuple[bytes, LoweredPlan, Rows] | None = None

    def price(self, layouts: dict[object, PipelineLayout], units: bytes) -> Outcome:
        """The outcome under the constants as they are now.

        Args:
            layouts: cache of stage layouts of other runs under the same constants; it is filled.
            units: digest of the constants that the costs of units depend on; while it stays the same, so do the costs.
        """
        evaluator = Evaluator(self.problem, self._tables)
        if self._last is None or self._last[0] != units:
            if self._where not in layouts:
                layouts[self._where] = PipelineLayouts(self.problem).of(self._stages)
            lowered = replace(self.lowered, layout=layouts[self._where])
            self._last = units, lowered, evaluator.unit_costs(lowered, self._calls)
        _, lowered, costs = self._last
        return evaluator.step(lowered, costs, self._parts, self._tied)
