"""Fits the link curves of `automap.price.kernels.collectives` to measured collectives, and says how well they hold.

    python benchmarks/fit_collectives.py [collectives_measured.csv] [--write]

--write puts them into automap/data/fitted/collectives.json. One curve a GPU and operation over all group sizes inside a
node, as shares of the link's datasheet rate. Links without a switch (PCIe, the mesh of a DGX-1) follow no law of the
group's size: for them the achieved bandwidth of each size is kept as it was measured. Errors are those of rows left
out, five parts in turn.
"""

from __future__ import annotations

import csv
from collections import defaultdict

import numpy as np
from fitting import Floats, asked, errors, fit, folds, measured_device, robust, write

from automap.device_kinds import known_links
from automap.fitted_curves import COLLECTIVES
from automap.price.kernels.collectives import collective_s, host_link

NAMES = ("latency_us", "latency_growth", "efficiency", "small_group", "ramp")
START = np.array([8.0, 0.2, 0.75, 0.3, 2.5])
LOW = np.array([0.5, 0.0, 0.005, 0.0, 0.0])
HIGH = np.array([400.0, 2.0, 1.2, 6.0, 60.0])
SWITCHED = {"A100", "H100", "H200", "B200", "GB200"}
MIN_BYTES = 4096.0
"""Number of bytes below which a collective costs only its latency."""


def predict(x: Floats, rows: Floats, kind: int, rate: float, sizes: Floats | None) -> Floats:
    """Seconds of each row (ranks, bytes); `sizes` are the group sizes with an efficiency of their own."""
    seconds = []
    for ranks, data in rows[:, :2]:
        share = x[2] if sizes is None else x[len(NAMES) + int(np.flatnonzero(sizes == ranks)[0])]
        small = x[3] if sizes is None else 0.0
        link = host_link(
            int(ranks), latency_s=x[0] * 1e-6, growth=x[1], bytes_per_s=rate * share, small_group=small, ramp=x[4]
        )
        seconds.append(collective_s(kind, ranks, link, data))
    return np.array(seconds)


def main() -> None:
    """Fits the curve of every GPU and operation in the file."""
    options = asked(__doc__, "collectives_measured.csv")
    data: dict[tuple[str, str, str], list[list[float]]] = defaultdict(list)
    with options.data.open() as file:
        for row in csv.DictReader(file):
            ranks = int(row["num_gpus"])
            if ranks <= int(row["gpus_per_node"]) and float(row["bytes"]) >= MIN_BYTES:
                source = row["source"].split("-")[0].split(" ")[0]
                key = (row["gpu"].removesuffix("-SXM"), source, row["op"])
                data[key].append([ranks, float(row["bytes"]), float(row["time_us"]) * 1e-6])
    links = {link.name: link for link in known_links()}
    curves: dict[str, dict[str, object]] = {}
    everything = []
    for (gpu, source, op), listed in sorted(data.items()):
        rows, kind = np.array(listed), COLLECTIVES.index(op)
        rate = links[measured_device(gpu).intra_node_link].bandwidth_GBps * 1e9
        sizes = None if gpu in SWITCHED else np.unique(rows[:, 0])
        more = 0 if sizes is None else len(sizes)
        start, low, high = (np.concatenate([v, np.full(more, v[2])]) for v in (START, LOW, HIGH))

        def of(part: Floats) -> Floats:
            return fit(
                lambda x, rows: robust(np.log(predict(x, part, kind, rate, sizes) / part[:, 2]))[rows],  # noqa: B023
                start,  # noqa: B023
                low,  # noqa: B023
                high,  # noqa: B023
            )

        left_out = np.zeros(len(rows))
        for out in folds(len(rows)):
            if out.any():
                left_out[out] = predict(of(rows[~out]), rows[out], kind, rate, sizes)
        everything.append(np.abs(left_out / rows[:, 2] - 1.0))
        x, found = of(rows), errors(left_out, rows[:, 2])
        constants: dict[str, object] = {n: float(f"{v:.4g}") for n, v in zip(NAMES, x, strict=False)}
        if sizes is not None:
            constants["efficiency"] = {
                str(int(s)): float(f"{v:.4g}") for s, v in zip(sizes, x[len(NAMES) :], strict=True)
            }
        name = f"{op} ({source})"
        curves.setdefault(gpu, {})[name] = {**constants, "rows": len(rows), "cross_validated": found}
        line = f"median {found['median_error']:.1%}  p90 {found['p90_error']:.1%}"
        print(f"{gpu:6}{op:16}{source:16}{len(rows):5} rows  {line}")
    median = float(np.median(np.concatenate(everything)))
    print(f"all rows left out: median {median:.1%}")
    if options.write:
        write("collectives", "benchmarks/fit_collectives.py", options.data, curves, {"median_error": round(median, 4)})


if __name__ == "__main__":
    main()
