"""A report of a plan as one HTML page that needs no network: the words, the pictures, and the plan itself."""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from automap.amounts import in_seconds
from automap.errors import printable
from automap.plan import MEMORY_CLASSES, Plan
from service.drawing.pictures import PICTURES, pictures_of, with_plain_texts
from service.report import GIB, head, summary, time_parts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST = 4000
"""Most characters of a line (assumed)."""
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; } caption { text-align: left; padding-bottom: .4rem; }
th[scope=row] { white-space: nowrap; }
th, td { text-align: left; vertical-align: top; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #8884; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
figure { margin: 1rem 0; padding: .5rem; background: white; border-radius: .4rem; overflow-x: auto; }
figure svg { width: 100%; height: auto; }
pre { overflow-x: auto; max-height: 30rem; }
"""
ABOUT = {
    "timeline": "What each pipeline rank does in a step, and when.",
    "memory-over-time": "Memory of a device of each pipeline rank in the course of a step.",
    "memory": "What fills the memory of each group of devices at its peak.",
    "breakdown": "Where the time of the busiest rank goes.",
    "placement": "Which part of the model is on which devices.",
    "search": "The best plan of each searcher in the course of the search, against the bound.",
}
"""Name of a picture -> what it shows, for those who cannot see it too."""


def svg(figure: Figure) -> str:
    """A figure as an `svg` element."""
    import matplotlib

    file = io.StringIO()
    # Without a date the same plan gives the same bytes; with texts as text they can be searched and read aloud.
    with matplotlib.rc_context({"svg.hashsalt": "automap", "svg.fonttype": "none"}):
        with_plain_texts(figure).savefig(file, format="svg", metadata={"Date": None})
    return re.sub(r"^.*?(?=<svg)", "", file.getvalue(), flags=re.DOTALL)


def png(figure: Figure) -> bytes:
    """A figure as a PNG file."""
    file = io.BytesIO()
    with_plain_texts(figure).savefig(file, format="png", dpi=150)
    return file.getvalue()


def report(plan: Plan) -> str:
    """The page of a plan.

    Args:
        plan: a plan whose estimate holds a timeline.
    """
    estimate = plan.estimate
    assert estimate is not None
    said = summary(plan) if plan.search is not None else head(plan)
    rows = [f"<tr><th scope='row'>{_safe(label)}</th><td>{_safe(text)}</td></tr>" for label, text in said]
    times = [
        f"<tr><th scope='row'>{_safe(name)}</th><td class='number'>{value:.4g}</td>"
        f"<td class='number'>{value / estimate.step_time_s:.1%}</td></tr>"
        for name, value in time_parts(estimate).items()
    ]
    memory = [
        "<tr>"
        + f"<th scope='row'>{_safe(row.devices)}</th>"
        + "".join(f"<td class='number'>{getattr(row, name) / GIB:.2f}</td>" for name in MEMORY_CLASSES)
        + f"<td class='number'>{row.total / GIB:.2f}</td><td class='number'>{row.capacity / GIB:.2f}</td></tr>"
        for row in estimate.memory_bytes
    ]
    heads = "".join(f"<th scope='col' class='number'>{name}</th>" for name in (*MEMORY_CLASSES, "total", "capacity"))
    drawn = {name: _picture(plan, name) for name in pictures_of(plan)}
    document = plan.to_json()
    document["estimate"].pop("timeline", None)
    text = html.escape(json.dumps(document, indent=1))
    title = f"{plan.model.name}: {in_seconds(estimate.step_time_s)} a step"
    body = f"""<table><tbody>{"".join(rows)}</tbody></table>
<h2>Why</h2>
<ul>{"".join(f"<li>{_safe(line)}</li>" for line in plan.why)}</ul>
{_warnings(plan)}<h2>What happens when</h2>
{drawn["timeline"]}
{drawn["memory-over-time"]}
<h2>Where the time goes</h2>
{drawn["breakdown"]}
<table><thead><tr><th scope='col'>part</th><th scope='col' class='number'>seconds</th>
<th scope='col' class='number'>share</th></tr></thead><tbody>{"".join(times)}</tbody></table>
<h2>Where the memory goes</h2>
{drawn["memory"]}
<table><thead><tr><th scope='col'>GiB on devices</th>{heads}</tr></thead><tbody>{"".join(memory)}</tbody></table>
<h2>The model on the devices</h2>
{drawn["placement"]}
{_search(drawn)}<h2>The plan</h2>
<details><summary>{_safe(plan.schema)} as JSON</summary><pre>{text}</pre></details>
"""
    return _document(title, body)


def page_of(title: str, figure: Figure) -> str:
    """A page with one picture."""
    element = svg(figure).replace("<svg ", f'<svg role="img" aria-label="{_safe(title)}" ', 1)
    return _document(title, f"<figure>{element}</figure>\n")


def _picture(plan: Plan, name: str) -> str:
    element = svg(PICTURES[name](plan)).replace("<svg ", f'<svg role="img" aria-label="{ABOUT[name]}" ', 1)
    return f'<figure id="{name}">{element}</figure>'


def _search(drawn: Mapping[str, str]) -> str:
    return f"<h2>How it was found</h2>\n{drawn['search']}\n" if "search" in drawn else ""


def _warnings(plan: Plan) -> str:
    if not plan.warnings:
        return ""
    return f"<h2>Warnings</h2>\n<ul>{''.join(f'<li>{_safe(line)}</li>' for line in plan.warnings)}</ul>\n"


def _safe(text: str) -> str:
    """A text from a plan, whose unprintable characters are shown as in a terminal: one may turn the direction of a
    line."""
    return html.escape(printable(text, LONGEST))


def _document(title: str, body: str) -> str:
    """A page with a title over its body."""
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_safe(title)}</title>
<style>{STYLE}</style>
<main>
<h1>{_safe(title)}</h1>
{body}</main>
</html>
"""
