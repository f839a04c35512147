"""What a user states about a model: which parameters are frozen, and what its operators cost.

A pattern names parameters as their file does, by `fnmatch`: `*` is anything, dots too. `!` before a pattern takes out
again what patterns before it name, so that `*` and `!*lora*` freeze all but the adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from automap.errors import ProblemError
from automap.globs import matches_operator, select
from automap.hints import MAX_GLOBS, Hints
from automap.records import to_json
from ir.frozen import backward_share, freeze, names_in_file
from ir.graph import Graph, Operator

MAX_PATTERNS = 1_000
"""Largest number of patterns: each is compared with every parameter."""
_NAMED = 3
"""Number of parameters that an error names."""


def frozen_as_stated(graph: Graph, patterns: Sequence[str]) -> Graph:
    """The graph with the parameters that some patterns name frozen, beside those that are frozen in its file.

    Raises:
        ProblemError: a pattern names no parameter, or no parameter is left to be trained.
    """
    names = list(dict.fromkeys(name for t in graph.parameters for name in names_in_file(graph, t.name)))
    named = [(name, name) for name in names] + _other_names(graph) if patterns else []
    chosen: dict[str, None] = {}
    for number, pattern in enumerate(patterns):
        takes_out = pattern.startswith("!")
        found = [name for alias, name in named if fnmatchcase(alias, pattern[takes_out:])]
        if not found:
            there = f"The model has {len(names):,} parameters, such as {_examples(names)}."
            field, repair = f"training.frozen[{number}]", f"{there} Name some of them by a pattern."
            raise ProblemError("no parameter has such a name", field=field, value=pattern, repair=repair)
        if takes_out:
            chosen = {name: None for name in chosen if name not in set(found)}
        else:
            chosen |= dict.fromkeys(found)
    graph = freeze(graph, chosen)
    if graph.has_frozen and not graph.num_trained:
        repair = "Leave some out again by a pattern with `!` in front, such as `!*head*`."
        raise ProblemError("no parameter is left to be trained", field="training.frozen", value=list(patterns),
                           repair=repair)  # fmt: skip
    return graph


def _other_names(graph: Graph) -> list[tuple[str, str]]:
    """(name, name in the file) of tied parameters by the modules that read them, of which a file names one.

    A module counts that has no modules inside: other code may read a parameter of a module that is not its own.
    """
    around = {op.scope.rpartition(".")[0] for op in graph.operators}
    found: dict[tuple[str, str], None] = {}
    for tensor in graph.parameters:
        scopes = {graph.operators[index].scope for index in graph.consumers[tensor.name]} - around - {""}
        for name in names_in_file(graph, tensor.name) if len(scopes) > 1 else ():
            found |= dict.fromkeys((f"{scope}.{name.rpartition('.')[2]}", name) for scope in sorted(scopes))
    return list(found)


def _examples(names: Sequence[str]) -> str:
    """Parameters from the beginning, the middle and the end of a model, for an error."""
    step = max(1, (len(names) - 1) // max(1, _NAMED - 1))
    return ", ".join(names[::step][:_NAMED])


def with_costs(graph: Graph, hints: Hints) -> Graph:
    """The graph with the user's operator costs in place of the modelled ones."""
    used = set()
    operators: list[Operator] = []
    place = {glob: number for number, glob in enumerate(hints.costs)}
    wild = [glob for glob in hints.costs if "*" in glob or "?" in glob]
    if len(wild) > MAX_GLOBS:
        repair = f"Give at most {MAX_GLOBS:,} with wildcards; names of operators may be more."
        raise ProblemError("too many globs", field="hints.costs", value=f"{len(wild):,} globs", repair=repair)
    for op in graph.operators:
        # The first one that matches, whether it is a name or a glob.
        matching = next((g for g in wild if matches_operator(g, op.name)), None)
        own = [g for g in (op.name, matching) if g in place]
        glob = min(own, key=lambda g: place[g], default=None)
        if glob is not None:
            used.add(glob)
            op = op.with_costs(to_json(hints.costs[glob]), backward=backward_share(graph, op))  # noqa: PLW2901
        operators.append(op)
    for glob in hints.costs:
        if glob not in used:
            raise _unused(glob, list(hints.costs), graph)
    return replace(graph, operators=tuple(operators)) if used else graph


def _unused(glob: str, globs: Sequence[str], graph: Graph) -> ProblemError:
    """The error for a glob of costs that no operator takes its cost from: for one before it, or as it names modules."""
    field, names = f"hints.costs.{glob}", [op.name for op in graph.operators]
    own = next((name for name in names if matches_operator(glob, name)), None)
    if own is not None:
        first = next(g for g in globs if matches_operator(g, own))
        repair = f"Of several that match, the first counts: write it before {first!r}, or leave it out."
        return ProblemError("its operators have the cost of one before it", field=field, value=glob, repair=repair)
    within = select(glob, names)
    if within:
        repair = f"A cost is that of each operator: name operators by a glob, such as {within[0]!r}."
        return ProblemError("names modules, and no operator", field=field, value=glob, repair=repair)
    return names_nothing(field, glob, graph)


def names_nothing(field: str, glob: str, graph: Graph) -> ProblemError:
    """The error for a glob that matches no operator, to be raised by the caller."""
    repair = f"Name operators of the model by a glob, such as {graph.operators[-1].name!r}."
    return ProblemError("no operator has such a name", field=field, value=glob, repair=repair)
