"""The documentation as a site: `make docs` builds it, and any link that leads nowhere ends the build.

The pages are the Markdown files that are read on their own; their order is that of the links in docs/README.md.
"""

import re

from sphinx.application import Sphinx

project = "AutoMAP"
extensions = ["myst_parser"]
root_doc = "docs/README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md"]
html_theme = "furo"
html_title = "AutoMAP"
nitpicky = True
# Headings are named as GitHub names them, and as pages link to them.
myst_heading_anchors = 4
# Of what the pages show, JSON with an ellipsis is no JSON.
suppress_warnings = ["misc.highlighting_failure"]


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Makes the index the table of contents of the site: one part for each of its headings."""
    if page != root_doc:
        return
    for title, part in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", source[0], re.MULTILINE | re.DOTALL):
        pages = re.findall(r"^\| \[[^]]*\]\((\w[\w-]*)\.md\)", part, re.MULTILINE)
        source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", *pages, "```", ""])
    source[0] += "\n".join(
        ["", "```{toctree}", ":hidden:", ":caption: The project", "../README", "../CONTRIBUTING", "../CHANGELOG", "```"]
    )


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_contents)
