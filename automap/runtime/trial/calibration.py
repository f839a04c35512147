"""Calibrates the price of a host by trials: how much slower it computes and communicates than its figures say.

The two factors are told apart as far as the trials differ in their share of communication; where they do not differ,
both are the ratio that all trials share. Runs nothing. Units: seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from automap.arrays import Floats
from automap.cluster import Cluster
from automap.device_kinds import Device
from automap.fitted_curves import CollectiveCurve, Constants
from automap.links import Link
from automap.plan import Estimate
from automap.search_record import Calibration

NOISE = 0.1
"""The relative error of the price of one step when both factors are right: repeated trials differ by 5 %, and the price
errs by 11 % on 17 plans of one host (measured, `benchmarks/order_of_runs.py`)."""
APART = 0.5
"""The standard deviation of the logarithm of each factor before any trial (assumed). With 1, and a noise of 5 %, three
trials could say that communication takes 3 times as long, which left an error of 17 % on the other plans."""
COMPUTING = ("kernel_us", "host_us_per_operator", "host_us_per_collective", "micro_batch_ms", "step_overhead_ms")
COMMUNICATING = ("send_host_ms",)
"""The constants of a cluster that are times, by the part of a step that they belong to."""


def communication_s(estimate: Estimate) -> float:
    """The time of a step in which the slowest rank waits for collectives, neighbours and gradients."""
    exposed: Mapping[str, float] = estimate.breakdown_s["exposed_communication"]
    return sum(exposed.values())


def calibrate(trials: Sequence[tuple[Estimate, float]]) -> Calibration | None:
    """The factors between measured and estimated steps; None without trials.

    Args:
        trials: the estimate and the measured step time of each plan.
    """
    from scipy.optimize import least_squares

    if not trials:
        return None
    ratios = [seconds / estimate.step_time_s for estimate, seconds in trials]
    factor = math.exp(statistics.fmean(map(math.log, ratios)))
    shares = np.array([communication_s(estimate) / estimate.step_time_s for estimate, _ in trials])
    measured = np.log(np.array(ratios) / factor)

    def residuals(apart: Floats) -> Floats:
        computing, communicating = np.exp(apart)
        found = np.log((1.0 - shares) * computing + shares * communicating)
        return np.concatenate([(found - measured) / NOISE, apart / APART])

    computing, communicating = factor * np.exp(least_squares(residuals, np.zeros(2)).x)
    return Calibration(
        num_trials=len(ratios),
        factor=factor,
        spread=max(ratios) / min(ratios),
        compute=float(computing),
        communication=float(communicating),
    )


def calibrated(cluster: Cluster, found: Calibration) -> Cluster:
    """The cluster with all times multiplied by the factors of a calibration."""
    constants = cluster.constants
    return replace(
        cluster,
        devices={name: _device(device, found.compute) for name, device in cluster.devices.items()},
        links={name: _link(link, found.communication) for name, link in cluster.links.items()},
        constants=None if constants is None else _constants(constants, found),
    )


def _device(device: Device, factor: float) -> Device:
    rest: dict[str, Any] = {"memory_efficiency": device.memory_efficiency / factor}
    if device.kernels is None:
        rest["sustained_clock"] = device.sustained_clock / factor
    else:
        kernels = device.kernels
        gemm = {precision: _kernel(curve, factor) for precision, curve in kernels.gemm.items()}
        rest["kernels"] = replace(kernels, gemm=gemm, attention=_kernel(kernels.attention, factor))
    return replace(device, **rest)


def _kernel(curve: Any, factor: float) -> Any:
    """The `GemmCurve` or `AttentionCurve` of kernels that take `factor` times as long."""
    return replace(
        curve,
        floor_us=curve.floor_us * factor,
        compute_efficiency=curve.compute_efficiency / factor,
        memory_efficiency=curve.memory_efficiency / factor,
    )


def _link(link: Link, factor: float) -> Link:
    curves = {kind: _curve(curve, factor) for kind, curve in link.collectives.items()}
    return replace(link, efficiency=link.efficiency / factor, collectives=curves)


def _curve(curve: CollectiveCurve, factor: float) -> CollectiveCurve:
    return replace(
        curve,
        latency_us=curve.latency_us * factor,
        efficiency=curve.efficiency / factor,
        # The ramp is multiplied by the square root of a time that grows by the factor.
        ramp=curve.ramp * math.sqrt(factor),
    )


def _constants(constants: Constants, found: Calibration) -> Constants:
    changed: dict[str, Any] = {}
    for names, factor in ((COMPUTING, found.compute), (COMMUNICATING, found.communication)):
        for name in names:
            value = getattr(constants, name)
            changed[name] = None if value is None else value * factor
    return replace(constants, **changed)
