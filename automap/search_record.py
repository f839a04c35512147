"""How a plan was found, as its document keeps it: searchers, what the plan is compared with, trials, calibration.

Records alone. Units: seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from automap.comparisons import Beside, TargetCost, Yours

LEFT_IDLE = "idle: no plan on all of them has these degrees"
"""End of the warning about devices that are idle because of the degrees that the user fixes."""
LEFT_BY_TARGET = "idle: it has no plan of this model with this batch on all of them"
"""The same where the target is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRecord:
    """The result of a trial run of one plan."""

    strategy: str
    """One line that describes the plan."""
    found_by: str
    """Searcher that found the plan; `dqn` also for plans that it chose for a trial."""
    expected_s: float
    """Step time that was expected of the plan from its estimate and the trials before it, seconds."""
    outcome: str
    """`ok`, or the kind of failure: one of the outcomes that docs/runtime.md lists."""
    message: str
    """Reason of a failure; empty if the outcome is ok."""
    predicted: Mapping[str, float]
    """{step_time_s, peak_memory_bytes} of the estimate."""
    measured: Mapping[str, float] | None
    """{step_time_s, peak_memory_bytes, num_steps}; null unless the outcome is ok."""
    time_s: float
    """Wall time of the whole trial, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """How the step times that trials measured compare with the estimates, which are left as they are."""

    num_trials: int
    """Number of trials that were measured."""
    factor: float
    """Geometric mean of measured over predicted step times."""
    spread: float
    """Largest ratio of measured to predicted time over the smallest; 1 if all trials agree."""
    compute: float
    """Measured over predicted time of everything but communication."""
    communication: float
    """Measured over predicted time of collectives and sends; equal to `factor` if the trials cannot tell them apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRecord:
    """Which searcher found the plan, and how it compares."""

    found_by: str
    """The searcher that found the plan; `yours`: the user's own plan."""
    seed: int
    """Seed of all random choices of the search."""
    evaluations: int
    """Number of complete plans priced by all searchers together."""
    look_aheads: int = 0
    """Number of further plans that agents priced to see what is after a decision."""
    baselines: Mapping[str, float | None]
    """Step times in seconds of pure data parallelism (`dp`), the best template (`expert`) and `hints.baseline`
    (`yours`); null if it does not fit into memory. `dp` is absent if the batch or the hints allow no such plan, `yours`
    if there is none."""
    searchers: Mapping[str, float | None] = field(default_factory=dict)
    """Best step time of each searcher that ran, seconds; null if it found no plan that fits."""
    history: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    """How each searcher got faster: pairs of the number of plans that all searchers had priced and its best step time
    in seconds, one for each faster plan that it found, thinned out to at most 32."""
    yours: Yours | None = None
    """The plan that the user runs today (`hints.baseline`), and what this plan changes; null without one."""
    any_trainer: TargetCost | None = None
    """The best plan found without the target, and what of it the target cannot express; null without a target, or if
    that plan is hardly faster."""
    beside: tuple[Beside, ...] = ()
    """The best plans with other degrees of parallelism, the fastest first."""
    first_s: float | None = None
    """Step time of the first plan that the network proposed, seconds; null if it proposed none that fits."""
    first_after_s: float | None = None
    """Seconds from the start of the search to that plan."""
    seconds: float | None = None
    """Length of the search; null where it is not known."""
    fastest_s: float | None = None
    """Step time of the fastest plan found if a simpler plan, equal within `tie`, was preferred to it; else null."""
    proven: bool = False
    """Whether no plan of the space that fits is faster than the fastest one found, by the estimate."""
    lower_bound_s: float | None = None
    """Lower bound of the step times of all plans of the space, seconds."""
    certified_after_s: float | None = None
    """Seconds that were spent on a certificate, which sharpens `lower_bound_s`; null where none was asked for."""
    num_decisions: int = 0
    """Number of decisions for which more than one value was legal."""
    num_operator_decisions: int = 0
    """Number of those decisions that shard operators."""
    trials: tuple[TrialRecord, ...] = ()
    """Trial runs, in the order in which they ran."""
    calibration: Calibration | None = None
    """Comparison of the successful trials with their estimates; null if there was none."""
