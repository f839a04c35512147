"""Verbs that compare plans."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from automap.errors import PlanError, ProblemError
from service.command.options import (
    CLUSTER_HELP,
    Job,
    JsonOption,
    PlanArgument,
    StatedTrainerOption,
    TargetOption,
    TrainerOption,
    gathers,
    read_model_and_hints,
    read_training,
    stated,
)
from service.command.output import print_json, say
from service.command.output_checks import drawable, writable
from service.command.plan_verbs import read_strategy
from service.output_files import write_output

app = typer.Typer()


@app.command()
@gathers(job=read_model_and_hints)
def explain(plan: PlanArgument, job: Job, as_json: JsonOption = False) -> None:
    """Shows where the time and the memory of a plan go, and what the next best choices cost."""
    from automap.records import to_json
    from service.command.comparison import explain_file, explanation

    explained, found = explain_file(*job, plan)
    if as_json:
        print_json({"plan": explained.to_json(), "alternatives": [to_json(one) for one in found]})
    else:
        say(*explanation(explained, found))


@app.command()
@gathers(job=read_model_and_hints)
def diff(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="A plan, a JSON file.")],
    second: Annotated[
        Path, typer.Argument(metavar="SECOND", help="Another plan for the same model, cluster and training.")
    ],
    job: Job,
    as_json: JsonOption = False,
) -> None:
    """Shows in which decisions two plans differ, and how much time each of them saves."""
    from automap.records import to_json
    from service.command.comparison import difference, differences

    one, other, found = difference(*job, first, second)
    if as_json:
        estimates = [plan.to_json()["estimate"] for plan in (one, other)]
        changes = [to_json(change) for change in found]
        print_json({"first": estimates[0], "second": estimates[1], "changes": changes})
    else:
        say(*differences(one, other, found))


@app.command()
@gathers(degrees=read_strategy, training=read_training, job=read_model_and_hints)
def sweep(
    *,
    over: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=A,B,...",
            help="A quantity and its values, such as tp=1,2,4: the rows of the table; given once more, the columns. "
            "One of dp, tp, pp, cp, ep, micro_batch, virtual, zero, recompute, schedule, global_batch, precision, "
            "optimizer, trainer, target, seq_len, cluster.",
        ),
    ],
    cluster: Annotated[str | None, typer.Option(help=CLUSTER_HELP)] = None,
    global_batch: Annotated[int | None, typer.Option(help="Samples of one optimizer step.")] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Search the best plan for every cell, each for this long (5s, or a number of plans); default: price "
            "the plan that the options state."
        ),
    ] = None,
    degrees: dict[str, Any],
    training: dict[str, Any],
    trainer: StatedTrainerOption = None,
    job: Job,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", callback=writable, help="Where to write the table as JSON.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Prices a table of plans over one or two quantities. Ctrl-C ends it with the cells so far and exit code 130."""
    from service.command.sweeping import read_sides, reasons, table
    from service.command.sweeping import sweep as price_cells
    from service.command.terminal import counting_bar, interruptible

    sides = read_sides(over)
    swept = {side.name for side in sides}
    training = stated({**training, "global_batch": global_batch, "trainer": trainer})
    given = {**training, **stated({"cluster": cluster}), **degrees}
    for name, value in given.items():
        if name in swept:
            repair = f"Leave --{name.replace('_', '-')} out, or --over {name}."
            raise ProblemError("stated and swept over", field=name, value=value, repair=repair)
    for name in ("cluster", "global_batch"):
        if name not in swept and name not in given:
            raise ProblemError("missing", field=name, value="nothing", repair=f"Give --{name.replace('_', '-')}.")
    request = replace(job.request, cluster=cluster, training=training)
    if budget is not None:
        request = replace(request, budget=budget)
    count = 1
    for side in sides:
        count *= len(side.values)
    with counting_bar("sweeping", count) as tick, interruptible() as interrupted:
        cells = price_cells(
            job.data, request, degrees, sides, searched=budget is not None, on_cell=tick, should_stop=interrupted
        )
        stopped = interrupted()
    if cells and all(cell.plan is None for cell in cells):
        why = "; ".join(line.removeprefix("-  ") for line in reasons(cells))
        raise PlanError("no cell has a plan", field="over", value=" ".join(over), repair=f"Of each kind one: {why}")
    document = {"over": {side.name: list(side.values) for side in sides}, "cells": [cell.to_json() for cell in cells]}
    if as_json:
        print_json(document)
    else:
        legend = "Step time and share of memory. * the fastest that fits, ! does not fit, - not possible"
        say(*table(sides, cells), legend, *reasons(cells))
    # Last, so that a long search is shown also where its file cannot be written.
    if output is not None:
        write_output(output, json.dumps(document, indent=1) + "\n")
    if stopped:
        raise typer.Exit(130)


@app.command()
@gathers(training=read_training, job=read_model_and_hints)
def recommend(
    *,
    global_batch: Annotated[int, typer.Option(help="Samples of one optimizer step.")],
    clusters: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B,...", help="Clusters to compare, and parts of them, as in 4x8xA100,8x8xH100; may be repeated."
        ),
    ] = None,
    devices: Annotated[
        list[str] | None,
        typer.Option(
            metavar="H100,A100,...",
            help="In place of --clusters: kinds of devices; of each 1, 2, 4 devices and nodes of 8. May be repeated.",
        ),
    ] = None,
    max_devices: Annotated[int, typer.Option(help="With --devices: the largest number of devices.")] = 512,
    target_step: Annotated[
        str | None, typer.Option(help="The longest step that is fast enough, as in 2s or 500ms.")
    ] = None,
    target_days: Annotated[
        float | None, typer.Option(help="With --tokens: the longest training that is fast enough.")
    ] = None,
    tokens: Annotated[float | None, typer.Option(help="Tokens of the whole training, as in 1e12.")] = None,
    max_cost_per_hour: Annotated[float | None, typer.Option(help="With --price: the highest hourly cost.")] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICE=PRICE",
            help="What an hour of a device costs you, or a .json file of such prices; may be repeated.",
        ),
    ] = None,
    target: TargetOption = None,
    training: dict[str, Any],
    trainer: TrainerOption = None,
    job: Job,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            callback=drawable,
            help="Where to write the answer (.json), or draw it (.html, .svg, .png).",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compares clusters for a model: the fewest devices that are fast enough, the cheapest, and the fastest."""
    from agents.recommend import recommend as rate
    from agents.recommend import sizes, steps_of
    from service.command.recommending import page, read_goals, read_prices, to_json
    from service.command.terminal import counting_bar, interruptible
    from service.jobs.run_job import import_graph

    named = _named(clusters or [], devices or [])
    chosen = sizes(named, max_devices) if devices else named
    prices = read_prices(price or [])
    graph = import_graph(job.data, job.request)
    steps = None if tokens is None else steps_of(graph, global_batch, tokens)
    goals = read_goals(target_step, target_days, steps, max_cost_per_hour, prices)
    with counting_bar("rating", len(chosen)) as tick, interruptible() as interrupted:
        found = rate(
            graph,
            chosen,
            {**training, **stated({"global_batch": global_batch, "trainer": trainer, "target": target})},
            goals,
            hints=job.request.hints,
            processes=len(os.sched_getaffinity(0)),
            on_candidate=tick,
            should_stop=interrupted,
        )
        stopped = interrupted()
    document = to_json(found, steps)
    print_json(document) if as_json else say(*page(found, steps))
    if output is not None:
        from service.drawing.charts import front, write

        write(output, f"Clusters for {graph.name}", document, lambda: front(found))
    if stopped:
        raise typer.Exit(130)


def _named(clusters: Sequence[str], devices: Sequence[str]) -> list[str]:
    """The names in those of `--clusters` and `--devices` that are given."""
    text = ",".join(clusters or devices)
    if bool(clusters) == bool(devices):
        given = "--clusters and --devices are both" if clusters else "neither --clusters nor --devices is"
        raise ProblemError(f"{given} given", field="clusters", value=text, repair="Give one of them.")
    named = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not named:
        field = "clusters" if clusters else "devices"
        repair = "Name at least one, such as 8xA100." if clusters else "Name at least one kind, such as H100."
        raise ProblemError("is empty", field=field, value=text, repair=repair)
    return named


@app.command()
@gathers(job=read_model_and_hints)
def draw(
    plan: PlanArgument,
    job: Job,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            callback=writable,
            help="A report (.html), a picture (.svg, .png), or a trace of the step for ui.perfetto.dev (.json).",
        ),
    ],
    picture: Annotated[
        str | None,
        typer.Option(
            help="For .svg and .png, which picture: timeline, memory-over-time, memory, breakdown, placement or search."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Draws a plan: the passes in time, the layers on their devices, and where time and memory go."""
    from service.command.comparison import draw_file

    draw_file(*job, plan, output, picture)
    print_json({"output": str(output)}) if as_json else say(f"wrote     {output}")
