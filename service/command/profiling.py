"""`automap profile`: this host measured, written where `--cluster local` looks, and what was fitted for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from automap.cluster import local_profile
from service.command.output import say
from service.output_files import write_output

if TYPE_CHECKING:
    from automap.runtime.profiler.measure_host import Profile


def measure_host(output: Path | None, *, time_limit_s: float, num_devices: int | None) -> Profile:
    """Measures this host and writes its cluster file to the user's data folder, and to `output` if one is named.

    The residuals of every curve go to stderr, and what was seen of a host that was not quiet.

    Args:
        output: file of a second copy; None = no second copy.
        time_limit_s: seconds that the whole measurement may take.
        num_devices: processes on a host without GPUs; None = one a core.
    """
    from automap.runtime.profiler.measure_host import profile_host, residuals

    found = profile_host(time_limit_s=time_limit_s, num_devices=num_devices)
    if found.cluster is None:
        return found
    text = json.dumps(found.cluster.to_json(), indent=1) + "\n"
    target = local_profile()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_output(target, text, repair="Make room there, or set AUTOMAP_DATA_DIR to another folder.")
    say(f"written to {target}", err=True)
    if output is not None:
        write_output(output, text)
        say(f"written to {output}", err=True)
    say(f"measured in {found.time_s:.0f} s; errors on measurements that were left out of the fit:", err=True)
    for name, rows, median, p90 in residuals(found.cluster):
        say(f"  {name:16} {rows:5.0f} measurements, median {median:6.1%}, 90th percentile {p90:6.1%}", err=True)
    for line in found.cluster.warnings:
        say(f"warning: {line}", err=True)
    return found
