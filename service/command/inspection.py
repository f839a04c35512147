"""The number of plans that `automap inspect` adds to a model's summary, and its page for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from automap.errors import printable
from service.command.output import LONGEST, say

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from ir.graph import Graph

NUM_KINDS = 12
"""Kinds of operators that are shown one by one."""


def count_plans(graph: Graph, cluster: str, global_batch: int) -> dict[str, Any]:
    """Size of the plan space.

    Returns:
        cluster and global_batch; decades: log10 of the number of plans; decades_pruned: of those that all rules leave;
        rules: {name: {before, after, lossless}} in the order in which they are applied, the first ones built into the
        space; symmetry_decades: of the ways to exchange equal devices, of which the space has one; decisions: slots of
        a plan.

    Raises:
        UserError: the cluster, or that the model cannot be trained on it as asked.
    """
    from automap.cluster import parse_cluster
    from automap.problem import Problem
    from automap.space.space import PlanSpace
    from envs.pruning import steps, symmetry_decades

    found = parse_cluster(cluster)
    space = PlanSpace(Problem.build(graph, found, {"global_batch": global_batch}))
    rules = steps(space)
    return {
        "cluster": found.name,
        "global_batch": global_batch,
        "decades": round(space.decades, 2),
        "decades_pruned": round(rules[-1].after, 2),
        "rules": {
            step.rule: {"before": round(step.before, 2), "after": round(step.after, 2), "lossless": step.lossless}
            for step in rules
        },
        "symmetry_decades": round(symmetry_decades(space), 2),
        "decisions": len(space.slots),
    }


def _trained(document: Mapping[str, Any]) -> str:
    """How many parameters are trained, where not all are."""
    return f", {document['num_trained']:,} of them trained" if "num_trained" in document else ""


def show(document: Mapping[str, Any]) -> None:
    """Prints a summary as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for label, text in _facts(document):
        facts.add_row(label, _cell(text))
    console.print(facts)
    if document["heaviest"]:
        rows = [(_percent(row["share"]), str(row["count"]), row["name"]) for row in document["heaviest"]]
        console.print(_table("heaviest operators", ("share", "count"), ("name",), rows))
    if document["space"] is not None:
        texts = ("rule", "can lose the optimum")
        steps = [
            (f"{step['before']:.1f}", f"{step['after']:.1f}", rule, "no" if step["lossless"] else "yes")
            for rule, step in document["space"]["rules"].items()
        ]
        console.print(_table("log10 of the number of plans, by pruning rule", ("before", "after"), texts, steps))
    for line in document["warnings"]:
        say(f"warning: {line}")


def _table(title: str, numbers: Sequence[str], texts: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    """A table whose columns hold numbers first, then texts."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2), header_style="bold", title=title, title_justify="left")
    for name in numbers:
        table.add_column(name, justify="right")
    for name in texts:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def _cell(text: str) -> Text:
    """A text as it stands, which may be a name of a file: no markup, nothing that steers a terminal."""
    from rich.text import Text

    return Text(printable(text, LONGEST))


def _facts(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    kinds = list(document["operators"].items())
    shown = ", ".join(f"{number} {kind}" for kind, number in kinds[:NUM_KINDS])
    if len(kinds) > NUM_KINDS:
        rest = sum(number for _, number in kinds[NUM_KINDS:])
        others = len(kinds) - NUM_KINDS
        shown += f", {rest} of {others} other kinds" if others > 1 else f", {rest} {kinds[-1][0]}"
    coverage = " · ".join(f"{_percent(share)} {state}" for state, share in document["coverage"].items() if share)
    lines = [
        ("model", document["name"]),
        ("parameters", f"{document['num_parameters']:,}{_trained(document)}"),
        ("forward FLOPs", f"{document['forward_flops']:.4g} a sample"),
        ("operators", f"{document['num_operators']:,}: {shown}"),
        ("fused", ", ".join(f"{number} {kind}" for kind, number in document["fused_groups"].items()) or "none"),
        ("units", f"{document['num_units']}, {document['num_blocks']} of them repeated blocks"),
        ("linkage groups", str(document["num_linkage_groups"])),
        ("cost known", coverage),
    ]
    space = document["space"]
    if space is not None:
        plans = f"10^{space['decades']:.1f} on {space['cluster']} at a global batch of {space['global_batch']}, "
        lines.append(("plans", f"{plans}10^{space['decades_pruned']:.1f} after pruning"))
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
