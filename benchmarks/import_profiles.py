"""Published layer profiles (PipeDream's text format): how long reading them takes, and how many units they have.

    python benchmarks/import_profiles.py [FOLDER]

FOLDER is ../data/profiles where nothing else is said; it is an error if no profile is there.
Prints one line a file: seconds to read and to find the units, measured seconds a batch in the file and in the graph
(equal but for rounding; the data loader's time is no layer), parameters, units.
"""

import argparse
import re
import time
from pathlib import Path

from ir.blocks import find_units
from ir.profile_import import batch_in_name, load_profile


def main() -> None:
    """Reads every profile below the folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("../data/profiles"))
    folder = parser.parse_args().folder
    files = sorted(folder.rglob("*.txt"))
    if not files:
        parser.error(f"folder: no profile, *.txt, below {folder}: name the folder of the profiles")
    for file in files:
        text = file.read_text()
        batch = batch_in_name(file.stem) or 64
        began = time.perf_counter()
        graph = load_profile(text, name=file.stem, batch=batch)
        units = len(find_units(graph).units)
        spent = time.perf_counter() - began
        layers = "\n".join(row for row in text.split("\n") if not re.match(r"node\d+ -- input", row, re.IGNORECASE))
        given = sum(float(v) for v in re.findall(r"(?:forward|backward)_compute_time=([\d.]+)", layers)) / 1e3
        kept = batch * sum((op.measured_forward_s or 0.0) + (op.measured_backward_s or 0.0) for op in graph.operators)
        print(
            f"{file.parent.name + '/' + file.stem:36} {spent:6.3f} s  {given:8.4f} s in the file  {kept:8.4f} s in "
            f"the graph  {graph.num_parameters / 1e6:8.1f} M parameters  {units:4} units"
        )


if __name__ == "__main__":
    main()
