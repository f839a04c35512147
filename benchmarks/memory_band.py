"""How far the peak memory of published runs is from its prediction, and what a confidence allows and refuses.

    python benchmarks/memory_band.py [published_runs.json] [--write]

A run exceeds a confidence if it needed more memory than the smallest device has on which it is said to fit with this
confidence. For this, the spread of its trainer is computed without the runs of its model in its source. A run is
refused if it ran on its device, but is said to fit there with a lower probability than the confidence. --write puts the
spreads into automap/data.
"""

from __future__ import annotations

import datetime
import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from fitting import asked

import automap
from automap.memory_band import fit_probability, margin
from automap.validation import published_cases
from automap.validation.errors_by_group import Predicted, predict
from automap.validation.memory_errors import Peak, left_out, peaks, spreads
from automap.validation.published_cases import trainer_of
from automap.validation.published_runs import Run, load_runs

DATA = Path(automap.__file__).parent / "data" / "trainers"
CONFIDENCES = (0.5, 0.75, 0.9, 0.95, 0.99)
DEFAULT = 0.95
DIGITS = 3


def by_trainer(some: tuple[Peak, ...], out: tuple[tuple[Peak, float], ...], found: dict[str, float]) -> None:
    """Prints the errors and the spread of each trainer."""
    print(
        f"{'trainer':21}{'peaks':>6}{'mean error':>12}{'middle':>8}{'least':>8}{'most':>7}"
        f"{'spread':>9}{'kept free':>11}{'exceed':>8}"
    )
    for name, spread in found.items():
        mine = [math.exp(peak.error) for peak in some if peak.trainer == name]
        free = 1.0 - 1.0 / margin(DEFAULT, spread)
        columns = f"{spread:9.3f}{free:11.1%}"
        if mine:
            over = sum(peak.exceeds(DEFAULT, without) for peak, without in out if peak.trainer == name)
            mean = statistics.mean(abs(ratio - 1.0) for ratio in mine)
            ratios = f"{statistics.median(mine):8.2f}{min(mine):8.2f}{max(mine):7.2f}"
            print(f"{name:21}{len(mine):6}{mean:12.1%}{ratios}{columns}{over:8}")
        else:
            print(f"{name:21}{0:6}{'':35}{columns}")
    print("middle, least and most: measured over predicted; kept free of each device, and exceeding, at 95 %")


def by_release(runs: Sequence[Run]) -> None:
    """Prints runs of earlier releases with a peak, priced as today's release of their software."""
    with mock.patch.dict(published_cases.RELEASES, clear=True):
        rows = [predict(run) for run in runs]
    for row in rows:
        peak = row.peak_memory_bytes / row.run.peak_memory_bytes - 1.0 if row.run.peak_memory_bytes else math.nan
        step = row.step_time_s / row.run.iteration_s - 1.0
        print(f"as today's {row.run.stack}: {row.run.id} memory {peak:+.1%}, step {step:+.1%}")


def by_confidence(out: tuple[tuple[Peak, float], ...], ran: list[Predicted], found: dict[str, float]) -> None:
    """Prints how many peaks exceed each confidence, and which runs it refuses."""
    of_peaks, of_runs = f"exceed, of {len(out)}", f"refused, of {len(ran)}"
    print(f"\n{'confidence':>10}{of_peaks:>16}{of_runs:>20}  refused by source")
    for confidence in CONFIDENCES:
        over = sum(peak.exceeds(confidence, spread) for peak, spread in out)
        refused = Counter(
            row.run.group
            for row in ran
            if fit_probability(row.peak_memory_bytes, row.capacity_bytes, found[trainer_of(row.run)]) < confidence
        )
        names = ", ".join(f"{name} {count}" for name, count in refused.most_common())
        print(f"{confidence:10.2f}{over:9} ({over / len(out):5.1%}){sum(refused.values()):20}  {names}")


def write(found: dict[str, float], texts: dict[str, str]) -> None:
    """Puts the spreads into the files of the trainers, each with its source."""
    today = datetime.date.today().isoformat()
    for path in sorted(DATA.glob("*.json")):
        document = json.loads(path.read_text())
        name = document["name"]
        document["memory_spread"] = found[name]
        text = texts[name] if texts[name].startswith("assumed") else f"fitted: {texts[name]}"
        document["source"]["memory_spread"] = f"{text} (benchmarks/memory_band.py, {today})"
        path.write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    """Prints both tables, and writes the spreads if it is asked to."""
    options = asked(__doc__, "published_runs.json")
    rows = [predict(run) for run in load_runs(options.data)]
    some = peaks(rows)
    ran = [row for row in rows if row.why is None and not row.assumed]
    made = spreads(some)
    found = {name: float(f"{spread:.{DIGITS}f}") for name, (spread, _) in made.items()}
    out = left_out(some)
    by_trainer(some, out, found)
    by_confidence(out, ran, found)
    earlier = [row.run for row in rows if row.run.stack in published_cases.RELEASES and row.run.peak_memory_bytes]
    by_release(earlier)
    if options.write:
        write(found, {name: text for name, (_, text) in made.items()})


if __name__ == "__main__":
    main()
