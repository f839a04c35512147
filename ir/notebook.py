"""How notebooks show graphs, plans and results of searches: by whoever draws, if that is installed.

What is shown is drawn in a room above, which nothing below may import. So that room names its function in the entry
points of the installed package (`[project.entry-points]` in pyproject.toml), as plug-ins do.
"""

from __future__ import annotations

GROUP = "automap.notebook"
"""Group of the entry points that return HTML for an object."""


def shown(value: object) -> str | None:
    """An object as HTML; None, for which notebooks show its `repr`, where nobody draws it."""
    # Looking through what is installed takes longer than most imports, and only notebooks ask.
    from importlib.metadata import entry_points

    for entry in entry_points(group=GROUP):
        html = entry.load()(value)
        if isinstance(html, str):
            return html
    return None
