"""Verbs that find, price, check and run plans, without a server."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.command.options import (
    CLUSTER_HELP,
    READING_PANEL,
    SEARCH_PANEL,
    TRAINING_PANEL,
    Job,
    JsonOption,
    OutputOption,
    PlanArgument,
    SeedOption,
    StatedTrainerOption,
    SyncPeriodOption,
    gathers,
    read_job,
    read_model_and_hints,
    read_training,
    stated,
    sync_training,
)
from service.command.output import print_json, say, show_plan, write_plan
from service.command.output_checks import drawable, writable
from service.jobs.run_job import import_graph, run_job

if TYPE_CHECKING:
    from agents.searcher import Budget, SearchResult
    from automap.problem import Problem

app = typer.Typer()

PLAN_PANEL = "The plan"
"""Heading in the help over the options that state a plan."""

INTERRUPTED = "The search was interrupted before its budget was spent; this is the best plan that it had found."
"""Warning of a plan whose search the user ended with Ctrl-C, or another program with SIGTERM."""


@app.command()
@gathers(job=read_job)
def search(
    job: Job,
    output: OutputOption = None,
    progress: Annotated[
        Path | None,
        typer.Option(
            callback=drawable,
            rich_help_panel=SEARCH_PANEL,
            help="Where to draw how the search went (.html, .svg, .png), or write its numbers (.json).",
        ),
    ] = None,
    certify: Annotated[
        float,
        typer.Option(
            min=0.0,
            rich_help_panel=SEARCH_PANEL,
            help="Seconds to spend after the search on a proof of how much faster a plan could be; 0: no proof.",
        ),
    ] = 0.0,
    as_json: JsonOption = False,
) -> None:
    """Searches for the fastest plan on this machine. Ctrl-C ends it with the best plan so far and exit code 130."""
    from service.command.terminal import interruptible, progress_line

    number = job.request.budget
    if re.fullmatch("[1-9][0-9]{0,11}", number):
        text = f"{int(number):,} plans to price, and the templates; for a time of {number} seconds, write {number}s"
        say(f"{'budget':9} {text}", err=True)
    results: list[SearchResult] = []
    problems: list[Problem] = []

    def search_it(problem: Problem, budget: Budget, **given: Any) -> SearchResult:
        from agents import search_offer

        problems.append(problem)
        return search_offer(problem, budget, **given)

    with progress_line() as show, interruptible() as interrupted:
        plan = run_job(
            job.request,
            lambda: import_graph(*job),
            on_progress=lambda now: show(now.searcher, now.fraction, now.evaluations, now.best_step_time_s),
            should_stop=interrupted,
            search=search_it,
            on_result=results.append,
        )
        stopped = interrupted()
    if certify > 0.0 and not stopped:
        from agents.portfolio.certificate import certify as certified

        plan = certified(problems[0], plan, certify)
    if progress is not None:
        from service.drawing.charts import progress_numbers, search_progress, write

        (result,) = results
        title = f"A search for {plan.model.name}"
        write(progress, title, progress_numbers(result), lambda: search_progress(result))
    if stopped:
        plan = replace(plan, warnings=(*plan.warnings, INTERRUPTED))
    show_plan(plan, output, as_json=as_json)
    if stopped:
        raise typer.Exit(130)


def read_strategy(
    dp: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=PLAN_PANEL,
            help="Data parallel: the number of replicas; default: the number of devices over the other degrees.",
        ),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=PLAN_PANEL,
            help="Tensor parallel: the number of ranks that split the weights of every layer; default: 1.",
        ),
    ] = None,
    pp: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=PLAN_PANEL,
            help="Pipeline parallel: the number of ranks, over which the layers are spread evenly; default: 1.",
        ),
    ] = None,
    cp: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=PLAN_PANEL,
            help="Context parallel: the number of ranks that split the sequence; default: 1.",
        ),
    ] = None,
    ep: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=PLAN_PANEL,
            help="Expert parallel: the number of ranks that share the experts of a layer, a divisor of dp, or of dp * "
            "cp; default: 1.",
        ),
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=PLAN_PANEL, help="Samples of a replica in a micro-batch; more may be faster; default: 1."
        ),
    ] = None,
    virtual: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=PLAN_PANEL,
            help="Virtual stages: the number of chunks of layers on each pipeline rank; default: 1.",
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=PLAN_PANEL,
            help="Order of the passes of a pipeline: 1f1b, eager-1f1b, gpipe, interleaved, zb1p or zb2p; default: "
            "1f1b, or interleaved with --virtual.",
        ),
    ] = None,
    zero: Annotated[
        int | None, typer.Option(rich_help_panel=PLAN_PANEL, help="ZeRO stage, 0 to 3; default: 0.")
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=PLAN_PANEL,
            help="What is computed again in the backward pass: none, selective (attention) or full (every layer); "
            "default: none.",
        ),
    ] = None,
    sequence_parallel: Annotated[
        bool,
        typer.Option(
            "--sequence-parallel",
            rich_help_panel=PLAN_PANEL,
            help="Let the ranks of --tp split the sequence where they do not split weights, as in norms.",
        ),
    ] = False,
) -> dict[str, Any]:
    """The degrees that the user states: fields of `automap.space.stated_strategy.Strategy`."""
    return stated({**locals(), "sequence_parallel": sequence_parallel or None})


@app.command()
@gathers(degrees=read_strategy, training=read_training, job=read_model_and_hints)
def estimate(
    *,
    cluster: Annotated[str | None, typer.Option(help=CLUSTER_HELP)] = None,
    global_batch: Annotated[int | None, typer.Option(help="Samples of one optimizer step.")] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="Price the plan of this file, on the cluster that it names.")
    ] = None,
    configuration: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Price what you run today: a script of Megatron-LM's arguments (.sh, .yaml), torchtitan's .toml, "
            "DeepSpeed's .json, accelerate's .yaml, or an exported pytorch.json or onnx_devices.json.",
        ),
    ] = None,
    degrees: dict[str, Any],
    training: dict[str, Any],
    trainer: StatedTrainerOption = None,
    sync: Annotated[
        str | None,
        typer.Option(
            metavar="MODE",
            rich_help_panel=TRAINING_PANEL,
            help="How replicas stay together: synchronous, local_sgd or dasgd; default: synchronous.",
        ),
    ] = None,
    sync_period: SyncPeriodOption = None,
    seq_len: Annotated[
        int | None,
        typer.Option(rich_help_panel=READING_PANEL, help="Tokens of each sample, of a model of the zoo (zoo:NAME)."),
    ] = None,
    job: Job,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predicts step time and memory of a plan that you state. Exit code 3: the plan does not fit into memory."""
    from service.command import estimation

    modes = None if sync is None else [sync]
    degrees = stated({**degrees, "sync": sync})
    more = {"global_batch": global_batch, "trainer": trainer, **sync_training(modes, sync_period)}
    request = replace(
        job.request,
        cluster=cluster,
        training={**training, **stated(more)},
        model=estimation.with_sequence(job.request.model, seq_len),
    )
    if plan is None and configuration is None:
        found = estimation.price_hand_made(job.data, request, degrees)
    elif plan is None and configuration is not None:
        found = estimation.price_configuration(job.data, request, degrees, configuration)
    else:
        assert plan is not None
        found = estimation.price_file(job.data, request, degrees, plan)
    write_plan(found, output)
    print_json(found.to_json()) if as_json else say(*estimation.page(found))
    for line in () if as_json else found.warnings:
        say(f"warning: {line}", err=True)
    if (lacks := estimation.lacks(found)) is not None:
        say(f"automap: does not fit: {lacks}", err=True)
        raise typer.Exit(3)


@app.command()
@gathers(job=read_model_and_hints)
def verify(plan: PlanArgument, job: Job, as_json: JsonOption = False) -> None:
    """Checks a plan, by code that is independent of the search. Exit code 1: something is wrong with the plan."""
    from automap.records import to_json
    from service.command.estimation import verify_file

    found = verify_file(*job, plan)
    if as_json:
        print_json({"violations": [to_json(violation) for violation in found]})
    else:
        for violation in found:
            say(f"{violation.where}: {violation.what}")
        if not found:
            say("valid     nothing is wrong with this plan")
    if found:
        raise typer.Exit(1)


@app.command(name="export")
@gathers(job=read_model_and_hints)
def write_export(
    plan: PlanArgument,
    job: Job,
    folder: Annotated[Path, typer.Option("-o", "--output", help="The folder for the files.")],
    target: Annotated[
        str | None,
        typer.Option(
            help="megatron-core, torchtitan, deepspeed, accelerate, pytorch, onnx or automap (docs/exports.md); "
            "default: the one that the plan was searched for."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Writes the configuration of a trainer for a plan, or says what of the plan that trainer cannot run."""
    from automap.amounts import in_seconds
    from service.command.estimation import export_file

    found = export_file(*job, plan, target=target, folder=folder)
    if as_json:
        print_json({"files": [str(folder / name) for name in found.files], **json.loads(found.files["export.json"])})
        return
    for note in found.notes:
        price = (
            ""
            if note.cost_s is None
            else f" ({in_seconds(abs(note.cost_s))} a step {'more' if note.cost_s > 0.0 else 'less'})"
        )
        say(f"{note.kept:12} {note.about}: {note.text}{price}")
    for name in found.files:
        say(f"{'wrote':12} {folder / name}")
    say(f"{'launch':12} {found.launch}")


@app.command()
@gathers(job=read_model_and_hints)
def trial(
    plan: PlanArgument,
    job: Job,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are measured, after a warm-up.")] = 10,
    time_limit: Annotated[float, typer.Option(min=1.0, help="Seconds that the whole trial may take.")] = 300.0,
    seed: SeedOption = 0,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", callback=writable, help="Where to write the plan with what was measured."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Runs a few steps of a plan on this host, one process a device, and measures them. Exit code 1: it did not run."""
    from service.command.trials import page, try_file

    tried, found = try_file(*job, plan, steps=steps, time_s=time_limit, seed=seed)
    write_plan(tried, output)
    print_json(found.to_json()) if as_json else say(*page(found))
    if found.outcome != "ok":
        raise typer.Exit(2 if found.outcome == "refused" else 1)
