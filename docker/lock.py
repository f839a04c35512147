"""Prints the versions of all that `automap[service]` brings, as they are installed here, where the tests pass.

.venv/bin/python docker/lock.py > docker/constraints.txt
"""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("service", "learning", "plots")
"""Extras of the project that the image installs."""


def direct() -> list[Requirement]:
    """What the image asks for, as pyproject.toml says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for extra in EXTRAS for text in project["optional-dependencies"][extra])]
    return [found for found in map(Requirement, texts) if found.name != project["name"]]


def locked() -> dict[str, str]:
    """Name of each distribution that is installed for them -> its version."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    left = direct()
    while left:
        wanted = left.pop()
        if str(wanted) in seen or not (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            continue
        seen.add(str(wanted))
        own = distribution(wanted.name)
        # The part behind + names where it was built.
        found[re.sub(r"[-_.]+", "-", wanted.name).lower()] = own.version.partition("+")[0]
        for text in own.requires or ():
            further = Requirement(text)
            if further.marker is None or any(further.marker.evaluate({"extra": e}) for e in (*wanted.extras, "")):
                further.marker = None
                left.append(further)
    return found


if __name__ == "__main__":
    for name, version in sorted(locked().items()):
        print(f"{name}=={version}")
