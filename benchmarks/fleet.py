"""All published runs with the constants that their price depends on: what is predicted, and how they are fitted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from constants import OF_STEP, SHARED, TRAINERS, clock_of, constants, depends, link_kind, owner, parts_of
from fitting import EVERY, Floats, Rows, fit, robust
from priced_runs import PricedRun

from automap.device_kinds import known_devices, known_links
from automap.price.curves import fitted
from automap.price.stage_layout import PipelineLayout
from automap.trainers import trainers

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
MOST_STEPS = 60
"""Largest number of steps of one fit; six are enough with the published runs."""
MOST_RUNS = 240
"""Largest number of runs of one group that a fit uses, evenly spaced; they stand for the whole group."""
CONVERGED = 5e-4
"""A fit is done when a step lowers the sum of squares by less than this share of it: errors then change by a
hundredth of a per cent."""


class Fleet:
    """All runs, and the constants that their price depends on."""

    def __init__(self, rows: list[PricedRun]) -> None:
        self.rows = rows
        self.trainers = sorted({f.problem.trainer.name for f in rows})
        self.constants = constants(set(self.trainers))
        self.at = {c.name: i for i, c in enumerate(self.constants)}
        self.prior, self.low, self.high, self.hold = (
            np.array([getattr(c, field) for c in self.constants]) for field in ("prior", "low", "high", "hold")
        )
        self.measured = np.array([f.run.iteration_s for f in rows])
        self.touched = [np.flatnonzero([depends(f, c.name) for f in rows]) for c in self.constants]
        self._of_units = np.array([c.name.split(".")[-1] not in OF_STEP for c in self.constants])
        self._applied: Floats | None = None
        self._near_priors: dict[bytes, Floats] = {}

    def of_today(self) -> Floats:
        """The values in automap/data."""
        gpus = [device for device in known_devices() if device.name != "cpu"]
        value = {f"clock.{clock_of(device)}": device.sustained_clock for device in gpus}
        value |= {f"link.{link_kind(link.name)}": link.efficiency for link in known_links()}
        value |= {name: fitted("step")["constants"][name]["value"] for name in SHARED}
        value["portable_attention"] = next(gpu.portable_attention for gpu in gpus if gpu.curves_of != "A100")
        for name in self.at:
            kind, key = parts_of(name)
            if key in TRAINERS:
                value[name] = getattr(trainers()[kind], key)
        return np.array([value[name] for name in self.at])

    def free_only(self, names: Sequence[str]) -> None:
        """From now on, fits hold every constant at its value of today, except for those of these names.

        Raises:
            ValueError: there is no such constant.
        """
        unknown = [name for name in names if name not in self.at]
        if unknown:
            raise ValueError(f"--only: no constant {unknown[0]!r} is fitted; known: {', '.join(sorted(self.at))}")
        today = self.of_today()
        for name, i in self.at.items():
            if name not in names:
                self.prior[i] = self.low[i] = self.high[i] = today[i]
                self.touched[i] = np.array([], dtype=np.int64)

    def apply(self, x: Floats) -> None:
        """Sets the constants that the price reads."""
        before = np.full(len(x), np.nan) if self._applied is None else self._applied
        changed = {self.constants[i].name: float(x[i]) for i in np.flatnonzero(x != before)}
        self._applied = x.copy()
        software: Any = trainers()
        for name, value in changed.items():
            kind, key = parts_of(name)
            if kind in SHARED:
                fitted("step")["constants"][kind]["value"] = value
            for trainer in self.trainers:
                if key in TRAINERS and owner(trainer, key) == kind:
                    software[trainer] = replace(software[trainer], **{key: value})
                    if key == "gradient_overlap":
                        software[trainer] = replace(software[trainer], parameter_gather_overlap=value)
        kinds = {parts_of(name)[0] for name in changed}
        clusters: Any = {id(f.problem.cluster): f.problem.cluster for f in self.rows}.values()
        if kinds & {"clock", "portable_attention"}:
            portable = float(x[self.at["portable_attention"]])
            for devices in (cluster.devices for cluster in clusters):
                for name, device in devices.items():
                    clock = self.at.get(f"clock.{clock_of(device)}")
                    devices[name] = replace(
                        device,
                        sustained_clock=device.sustained_clock if clock is None else float(x[clock]),
                        portable_attention=1.0 if device.curves_of == "A100" else portable,
                    )
        if "link" in kinds:
            for links in (cluster.links for cluster in clusters):
                for name, link in links.items():
                    if link_kind(name):
                        links[name] = replace(link, efficiency=float(x[self.at[f"link.{link_kind(name)}"]]))

    def predict(self, x: Floats, rows: Rows = EVERY) -> Floats:
        """Seconds of some of the runs."""
        wanted = np.arange(len(self.rows))[rows]
        # Every fit begins at the priors and changes them one by one: these prices are computed once for all fits.
        if np.count_nonzero(x != self.prior) > 1:
            return self._priced(x, wanted)
        known = self._near_priors.setdefault(x.tobytes(), np.full(len(self.rows), np.nan))
        missing = wanted[np.isnan(known[wanted])]
        known[missing] = self._priced(x, missing)
        return known[wanted]

    def _priced(self, x: Floats, rows: Ints) -> Floats:
        self.apply(x)
        layouts: dict[object, PipelineLayout] = {}
        units = x[self._of_units].tobytes()
        return np.array([self.rows[i].price(layouts, units).step_time_s for i in rows])

    def weights(self) -> Floats:
        """[runs] weight of each run: large groups count for less than their size, suspect runs for nothing."""
        groups: dict[str, list[int]] = defaultdict(list)
        for i, f in enumerate(self.rows):
            groups[f.run.group].append(i)
        found = np.zeros(len(self.rows))
        for rows in groups.values():
            every = -(-len(rows) // MOST_RUNS)
            found[rows[::every]] = 6.0 * len(rows) ** -0.1 * every**0.5
        for i, f in enumerate(self.rows):
            if too_fast(f):
                found[i] = 0.0
            if f.run.group == "megatron-bridge" or "vision" in f.run.model:
                found[i] *= 0.3
        return found

    def fit(self, left_out: Mask) -> Floats:
        """The constants from all rows but those left out, from the priors until a step gains next to nothing.

        Raises:
            RuntimeError: the fit does not converge.
        """
        weights = self.weights() * ~left_out

        def residuals(x: Floats, rows: Rows) -> Floats:
            found = np.zeros(len(self.rows))
            used = np.arange(len(found))[rows]
            used = used[weights[used] > 0.0]
            found[used] = weights[used] * robust(np.log(self.predict(x, used) / self.measured[used]))
            return found[rows]

        steps = []
        found = fit(
            residuals,
            self.prior,
            self.low,
            self.high,
            steps=MOST_STEPS,
            ridge=self.hold,
            touched=self.touched,
            converged=CONVERGED,
            on_step=lambda number, _: steps.append(number),
        )
        if len(steps) == MOST_STEPS:
            raise RuntimeError(f"no end after {MOST_STEPS} steps")
        return found


def too_fast(f: PricedRun) -> bool:
    """Whether the products alone would need more than 75 % of the peak: then the published batch cannot be right."""
    problem = f.problem
    flops = sum(op.forward_flops.at(1) + op.backward_flops.at(1) for op in problem.graph.operators)
    peak = problem.cluster.num_devices * problem.cluster.device(0).flops(problem.precision)
    return flops * problem.training.global_batch / f.run.iteration_s > 0.75 * peak
