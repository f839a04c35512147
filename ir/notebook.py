"""HTML for notebooks of graphs, plans and results of searches.

The code that draws them is in a higher layer (`service.drawing`), which this layer may not import. So the drawing
function is registered as an entry point of the installed package (`[project.entry-points]` in pyproject.toml), like a
plug-in.
"""

from __future__ import annotations

GROUP = "automap.notebook"
"""Group of the entry points that return HTML for an object."""


def shown(value: object) -> str | None:
    """An object as HTML; None if no entry point draws it: notebooks then show its `repr`."""
    # Imported here because only notebooks need it, and looking through installed packages is slow.
    from importlib.metadata import entry_points

    for entry in entry_points(group=GROUP):
        html = entry.load()(value)
        if isinstance(html, str):
            return html
    return None
