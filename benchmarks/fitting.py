"""Functions that the fit scripts share: Levenberg-Marquardt on positive constants, and errors on rows left out."""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from automap.device_kinds import Device, known_devices

MEASURED = {
    "A100": "A100-80GB", "H100": "H100-80GB", "H200": "H200-141GB", "B200": "B200-180GB", "GB200": "GB200-186GB",
    "L40S": "L40S-48GB", "V100": "V100-16GB",
}  # fmt: skip
"""Name of a GPU in the measurements -> name of its device file."""

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64] | slice
EVERY = slice(None)


def asked(about: str | None, name: str, *options: tuple[str, int | str, str]) -> argparse.Namespace:
    """What the command line asks for: `data`, the file of measurements, `write`, and further options.

    Args:
        about: the script's docstring.
        name: name of the file that is read by default, `../data/NAME` beside the checkout.
        options: name, default value and help of each.

    Raises:
        SystemExit: the file is not there (2).
    """
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("data", nargs="?", type=Path, default=Path("../data") / name, help="default: %(default)s")
    parser.add_argument("--write", action="store_true", help="put what is found into automap/data")
    for option, default, text in options:
        parser.add_argument(option, type=type(default), default=default, help=text)
    found = parser.parse_args()
    if not found.data.is_file():
        parser.error(f"data: {found.data} is no file: name the measurements, a {Path(name).suffix} file as {name}")
    return found


def measured_device(gpu: str) -> Device:
    """The data file of a GPU as the measurements name it."""
    return next(device for device in known_devices() if device.name == MEASURED[gpu])


def fit(
    residuals: Callable[[Floats, Rows], Floats],
    start: Floats,
    low: Floats,
    high: Floats,
    *,
    steps: int = 40,
    ridge: Floats | float = 1e-6,
    touched: Sequence[Rows] | None = None,
    converged: float = 1e-6,
    on_step: Callable[[int, float], None] = lambda step, cost: None,
) -> Floats:
    """Constants that make the sum of squared residuals least.

    Args:
        residuals: residuals of some of the rows for given constants.
        start: first guess, inside the bounds.
        low: least values.
        high: largest values.
        steps: largest number of steps.
        ridge: how strongly each constant, in units of its own size, is held at its start.
        touched: the rows that each constant can change; None = all.
        converged: the fit is done when a step lowers the sum by less than this share of it.
        on_step: called after each step, with its number and the sum.
    """
    scale = np.maximum(np.maximum(np.abs(start), 0.02 * (high - low)), 1e-9)
    x = start.astype(float).copy()
    hold = np.sqrt(np.broadcast_to(np.asarray(ridge, dtype=float), x.shape))

    def held(y: Floats) -> Floats:
        return hold * (y - start) / scale

    def cost_of(r: Floats, y: Floats) -> float:
        return float(r @ r + held(y) @ held(y))

    r = residuals(x, EVERY)
    cost, damping = cost_of(r, x), 1e-2
    for number in range(steps):
        jacobian = np.zeros((len(r), len(x)))
        for j in range(len(x)):
            rows = EVERY if touched is None else touched[j]
            step = 1e-4 * scale[j] * (1.0 if x[j] + 1e-4 * scale[j] <= high[j] else -1.0)
            moved = x.copy()
            moved[j] += step
            jacobian[rows, j] = (residuals(moved, rows) - r[rows]) / step * scale[j]
        normal = jacobian.T @ jacobian + np.diag(hold**2)
        gradient = jacobian.T @ r + hold * held(x)
        improved = False
        for _ in range(8):
            free = ~(((x <= low) & (gradient > 0)) | ((x >= high) & (gradient < 0)))
            lhs = normal[np.ix_(free, free)] + damping * np.diag(np.diag(normal)[free] + 1e-12)
            move = np.zeros_like(x)
            move[free] = -np.linalg.solve(lhs, gradient[free])
            candidate = np.clip(x + move * scale, low, high)
            trial = residuals(candidate, EVERY)
            if cost_of(trial, candidate) < cost:
                gain = cost - cost_of(trial, candidate)
                x, r, cost, improved = candidate, trial, cost_of(trial, candidate), True
                damping = max(damping / 5, 1e-9)
                break
            damping *= 5
        on_step(number, cost)
        if not improved or gain < converged * cost:
            break
    return x


def robust(log_ratio: Floats, width: float = 0.1) -> Floats:
    """Residuals whose squares are the soft-L1 loss: quadratic up to `width`, linear beyond."""
    z = log_ratio / width
    return np.sign(z) * np.sqrt(2.0 * (np.sqrt(1.0 + z * z) - 1.0)) * width


def folds(count: int, parts: int = 5, seed: int = 0) -> list[Floats]:
    """`parts` masks of the rows that are left out in turn."""
    which = np.random.default_rng(seed).integers(parts, size=count)
    return [which == i for i in range(parts)]


def errors(predicted: Floats, measured: Floats) -> dict[str, float]:
    """Median and 90th percentile of the absolute relative error."""
    error = np.abs(predicted / measured - 1.0)
    return {
        "median_error": round(float(np.median(error)), 4),
        "p90_error": round(float(np.percentile(error, 90)), 4),
    }


def write(name: str, script: str, data: Path, curves: object, cross_validated: dict[str, float]) -> None:
    """Writes `automap/data/fitted/NAME.json`."""
    document = {
        "schema": "automap.fitted_curves/1",
        "source": {
            "script": script,
            "data": f"{data.name} (AIConfigurator systems data and others, see docs/cost-model.md)",
            "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        },
        "cross_validated": cross_validated,
        "curves": curves,
    }
    target = Path(__file__).parent.parent / "automap" / "data" / "fitted" / f"{name}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(document, indent=1) + "\n")
