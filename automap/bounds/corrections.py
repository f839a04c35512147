"""Corrections of the price by real runs on this host: a regression over the plans that have run.

The logarithm of measured over predicted step time is modelled as a Gaussian process: a mean that all plans share, and
deviations that are similar for similar plans. Its standard deviation is the error band of the price. Its kernel is
exp(-distance). The distance of two plans is a sum over the kinds of decisions in which they differ, with the largest
weights for decisions about the mesh; a kind with several slots counts by the share of slots that differ. See chapter 2
of Rasmussen and Williams, Gaussian Processes for Machine Learning. Units: seconds.
"""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np

from automap.arrays import Floats, Ints
from automap.bounds.kernels.corrections import CorrectionArrays, correction_many
from automap.bounds.kernels.known_plans import MISFIT
from automap.price.estimate import error_band
from automap.space.space import PlanSpace, Values

NOISE = 0.05
"""Relative difference of repeated runs of one plan (measured, `benchmarks/order_of_runs.py`)."""
MESH_KINDS = ("pp", "tp", "middle")
"""Kinds of decisions about the mesh."""
OF_MESH = 1.0
"""Distance of plans that differ in one of these (assumed). It is large because errors of the price, such as those of a
collective or of a bubble, are similar for plans on the same mesh."""
OF_OTHERS = 0.25
"""Distance of plans that differ in one other decision (assumed)."""
MOST = 64
"""Largest number of plans that may run."""


class Corrections:
    """The corrections of a space.

    Attributes:
        arrays: the corrections in the form that kernels read.
        common: logarithm of measured over predicted step time that all plans share; 0 while nothing was measured.
    """

    def __init__(self, space: PlanSpace) -> None:
        self._problem, kinds = space.problem, [slot.kind for slot in space.slots]
        counts = Counter(kinds)
        self.common = 0.0
        self._measured: list[float | None] = []
        self._inverse: Floats = np.zeros((0, 0))
        self.arrays = CorrectionArrays(
            tried=np.zeros((MOST, len(kinds)), dtype=np.int64),
            num_tried=np.zeros(1, dtype=np.int64),
            log_ratio=np.zeros(MOST),
            weight=np.zeros(MOST),
            slot_weight=np.array([(OF_MESH if kind in MESH_KINDS else OF_OTHERS) / counts[kind] for kind in kinds]),
        )

    @functools.cached_property
    def spread(self) -> float:
        """Standard deviation of the logarithm of measured over predicted step time, for a plan unlike all that ran."""
        # Computed on first use: it takes some milliseconds for a large model, and is needed only after a measurement.
        return max(NOISE, error_band(self._problem))

    def learn(self, values: Values | None, ratio: float | None) -> None:
        """Adds a plan that has run.

        Args:
            values: [slots] the plan; None if it is not in the space, and then it corrects only the common mean.
            ratio: measured over predicted step time; None if the run failed. Similar plans are then expected to take
                longer, by the same factor as for plans that do not fit into memory.
        """
        arrays, count = self.arrays, len(self._measured) + 1
        # A value that no plan has in any slot is far from all plans.
        arrays.tried[count - 1] = -count if values is None else values
        arrays.num_tried[0] = count
        self._measured.append(None if ratio is None else float(np.log(ratio)))
        kernel = self._likeness(arrays.tried[:count]) + (NOISE / self.spread) ** 2 * np.eye(count)
        worked = np.array([log is not None for log in self._measured])
        if worked.any():
            # The generalised least squares estimate of the mean.
            shares = np.linalg.solve(kernel[np.ix_(worked, worked)], np.ones(int(worked.sum())))
            logs = np.array([log for log in self._measured if log is not None])
            self.common = float(shares @ logs / shares.sum())
        apart = np.array([MISFIT if log is None else log - self.common for log in self._measured])
        self._inverse = np.asarray(np.linalg.inv(kernel), dtype=np.float64)
        arrays.log_ratio[:count] = apart
        arrays.weight[:count] = self._inverse @ apart

    def factors(self, values: Ints) -> Floats:
        """[n] expected step time of each plan, [n, slots], over its price, without the factor that all plans share."""
        found = np.empty(len(values))
        correction_many(self.arrays, np.ascontiguousarray(values, dtype=np.int64), found)
        return found

    def uncertainty(self, values: Ints) -> Floats:
        """[n] standard deviation of the logarithm of the expected step time of each plan, [n, slots]."""
        likeness = self._likeness(values)
        explained = np.einsum("ni,ij,nj->n", likeness, self._inverse, likeness)
        found: Floats = self.spread * np.sqrt(np.maximum(0.0, 1.0 - explained))
        return found

    @property
    def least_factor(self) -> float:
        """Lower bound on `factors` of any plan."""
        lowest = float(self.arrays.log_ratio[: len(self._measured)].min(initial=0.0))
        return float(np.exp(lowest - self.spread))

    def _likeness(self, values: Ints) -> Floats:
        """[n, tried] exp(-distance) of plans, [n, slots], from those that have run."""
        arrays = self.arrays
        differs = values[:, None, :] != arrays.tried[None, : arrays.num_tried[0]]
        found: Floats = np.exp(-(differs @ arrays.slot_weight))
        return found
