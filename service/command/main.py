"""The command line.

Exit codes: 0 ok, 1 failed, 2 bad input, 3 nothing fits. With `--json` one JSON document goes to stdout (a problem
document when the command fails) and all else to stderr. Start-up imports no torch, numba or onnx: each verb imports
what it needs.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from automap.errors import NothingFits, UserError
from service.command.options import (
    PORTFOLIO,
    BatchDimOption,
    BatchOption,
    BudgetOption,
    ClusterOption,
    DimOption,
    HintsOption,
    JsonOption,
    LossOption,
    ModelArgument,
    OptimizerOption,
    OutputOption,
    ParametersOption,
    PrecisionOption,
    SearcherOption,
    SeedOption,
    SyncOption,
    SyncPeriodOption,
    TieOption,
    TrainerOption,
    TrialsOption,
    read_hints,
    read_input,
    training_of,
    writable,
)
from service.command.output import print_json, show_plan, write_plan
from service.command.server_verbs import app as service_verbs
from service.jobs.run_job import JobRequest, Trials
from service.problems import RemoteError, problem_of

app = typer.Typer(
    name="automap",
    help="Finds the fastest way to spread the training of a model over a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

INSPECTED = "8xA100-80GB"
"""Where `inspect` counts plans if no cluster is named."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        app(words, standalone_mode=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except UserError as fault:
        _complain(str(fault), problem_of(fault), as_json="--json" in words)
        return 3 if isinstance(fault, NothingFits) else 2
    except RemoteError as fault:
        _complain(str(fault), dict(fault.document), as_json="--json" in words)
        return 1
    return 0


# Verbs that need no server


@app.command()
def search(
    model: ModelArgument,
    cluster: ClusterOption,
    global_batch: BatchOption,
    precision: PrecisionOption = None,
    optimizer: OptimizerOption = "adam",
    loss: LossOption = None,
    trainer: TrainerOption = "generic",
    sync: SyncOption = None,
    sync_period: SyncPeriodOption = None,
    searcher: SearcherOption = PORTFOLIO,
    budget: BudgetOption = "30s",
    tie: TieOption = 0.1,
    seed: SeedOption = 0,
    trials: TrialsOption = None,
    hints: HintsOption = None,
    dim: DimOption = None,
    batch_dim: BatchDimOption = None,
    parameters: ParametersOption = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Finds a plan on this machine."""
    from service.command.terminal import interruptible, progress_line
    from service.jobs.run_job import import_graph, run_job

    _one_thread()
    data, options = read_input(model, dim, batch_dim, parameters)
    request = JobRequest(
        cluster=cluster,
        training=training_of(global_batch, precision, optimizer, loss, trainer, sync, sync_period),
        hints=read_hints(hints),
        model=options,
        budget=budget,
        searchers=tuple(searcher),
        tie=tie,
        seed=seed,
        trials=None if trials is None else Trials(top_k=trials),
    )
    with progress_line() as show, interruptible() as interrupted:
        plan = run_job(
            request,
            lambda: import_graph(data, request),
            on_progress=lambda progress: show(
                progress.searcher, progress.fraction, progress.evaluations, progress.best_step_time_s
            ),
            should_stop=interrupted,
        )
    show_plan(plan, output, as_json=as_json)


@app.command()
def estimate(
    model: ModelArgument,
    cluster: Annotated[str | None, typer.Option(help="[NODESx]GPUSxDEVICE[@LINK], or a .json file.")] = None,
    global_batch: Annotated[int | None, typer.Option(help="Samples of one optimizer step.")] = None,
    dp: Annotated[int | None, typer.Option(help="Replicas; default: all devices that the others leave.")] = None,
    tp: Annotated[int | None, typer.Option(help="Ranks that share every layer.")] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline ranks; layers are spread evenly.")] = None,
    cp: Annotated[int | None, typer.Option(help="Ranks that share the sequence.")] = None,
    ep: Annotated[int | None, typer.Option(help="Ranks that share the experts: a part of dp, or of dp * cp.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Samples of a replica at once; default: 1.")] = None,
    virtual: Annotated[int | None, typer.Option(help="Stages a pipeline rank.")] = None,
    schedule: Annotated[str | None, typer.Option(help="1f1b, gpipe, interleaved, zb1p or zb2p; default: 1f1b.")] = None,
    zero: Annotated[int | None, typer.Option(help="ZeRO stage, 0 to 3.")] = None,
    recompute: Annotated[str | None, typer.Option(help="none, selective or full.")] = None,
    sequence_parallel: Annotated[bool, typer.Option("--sequence-parallel", help="Between the products on tp.")] = False,
    precision: PrecisionOption = None,
    optimizer: Annotated[str | None, typer.Option(help="adam, momentum or sgd; default: adam.")] = None,
    loss: LossOption = None,
    trainer: Annotated[str | None, typer.Option(help="The training software; default: generic.")] = None,
    hints: HintsOption = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sample, of a zoo: model.")] = None,
    dim: DimOption = None,
    batch_dim: BatchDimOption = None,
    parameters: ParametersOption = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="Price this file's plan, on its own cluster.")] = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prices a plan that you made: step time, where it goes, memory, and why. Exit code 3: it does not fit."""
    from service.command import estimation

    _one_thread()
    degrees: dict[str, Any] = {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": ep,
        "micro_batch": micro_batch,
        "virtual": virtual,
    }
    degrees |= {"schedule": schedule, "zero": zero, "recompute": recompute}
    degrees["sequence_parallel"] = sequence_parallel or None
    stated = {name: value for name, value in degrees.items() if value is not None}
    training: dict[str, Any] = {
        "global_batch": global_batch,
        "precision": precision,
        "optimizer": optimizer,
        "loss": loss,
    }
    training["trainer"] = trainer
    data, options = read_input(model, dim, batch_dim, parameters)
    request = JobRequest(
        cluster=cluster,
        training={name: value for name, value in training.items() if value is not None},
        hints=read_hints(hints),
        model=estimation.with_sequence(options, seq_len),
    )
    if plan is None:
        found = estimation.price_hand_made(data, request, stated)
    else:
        found = estimation.price_file(data, request, stated, plan)
    write_plan(found, output)
    print_json(found.to_json()) if as_json else typer.echo(estimation.page(found))
    for line in () if as_json else found.warnings:
        typer.echo(f"warning: {line}", err=True)
    shortage = estimation.shortage(found)
    if shortage is not None:
        typer.echo(f"automap: {shortage}", err=True)
        raise typer.Exit(3)


@app.command()
def verify(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan, a JSON file.")],
    model: ModelArgument,
    hints: HintsOption = None,
    dim: DimOption = None,
    batch_dim: BatchDimOption = None,
    parameters: ParametersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Checks a plan without the code that finds and prices plans. Exit code 1: something is wrong with it."""
    from automap.records import to_json
    from service.command.estimation import verify_file

    data, options = read_input(model, dim, batch_dim, parameters)
    request = JobRequest(cluster=None, training={}, hints=read_hints(hints), model=options)
    found = verify_file(data, request, plan)
    if as_json:
        print_json({"violations": [to_json(violation) for violation in found]})
    else:
        for violation in found:
            typer.echo(f"{violation.where}: {violation.what}")
    if found:
        raise typer.Exit(1)


@app.command()
def trial(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan, a JSON file.")],
    model: ModelArgument,
    steps: Annotated[int, typer.Option(min=1, help="That are measured, behind a warm-up.")] = 10,
    time_limit: Annotated[float, typer.Option(min=1.0, help="Of the whole trial, seconds.")] = 300.0,
    seed: SeedOption = 0,
    hints: HintsOption = None,
    dim: DimOption = None,
    batch_dim: BatchDimOption = None,
    parameters: ParametersOption = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Runs a plan for some steps on this host, one process a device, and measures it. Exit code 1: it did not run."""
    from service.command.trials import page, try_file

    _one_thread()
    data, options = read_input(model, dim, batch_dim, parameters)
    request = JobRequest(cluster=None, training={}, hints=read_hints(hints), model=options)
    tried, found = try_file(data, request, plan, steps=steps, time_s=time_limit, seed=seed)
    write_plan(tried, output)
    print_json(found.to_json()) if as_json else typer.echo(page(found))
    if found.outcome != "ok":
        raise typer.Exit(2 if found.outcome == "refused" else 1)


@app.command()
def profile(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", callback=writable, help="A second copy of the cluster file.")
    ] = None,
    time_limit: Annotated[float, typer.Option(min=40.0, max=120.0, help="Of the whole measurement, seconds.")] = 100.0,
    devices: Annotated[
        int | None, typer.Option(min=1, max=64, help="Processes on the CPU; default: one a core.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measures this host; then `--cluster local` means it. Exit code 1: it could not be measured."""
    from service.command.profiling import measure_host

    _one_thread()
    found = measure_host(output, time_limit_s=time_limit, num_devices=devices)
    if found.cluster is None:
        typer.echo(f"automap: {found.outcome.replace('_', ' ')}: {found.message}", err=True)
        raise typer.Exit(1)
    if as_json:
        print_json(found.cluster.to_json())


@app.command()
def inspect(
    model: ModelArgument,
    dim: DimOption = None,
    batch_dim: BatchDimOption = None,
    parameters: ParametersOption = None,
    cluster: Annotated[str | None, typer.Option(help=f"Count the plans on it; default: {INSPECTED}.")] = None,
    global_batch: Annotated[int, typer.Option(help="Samples of one step, for the count of plans.")] = 512,
    as_json: JsonOption = False,
) -> None:
    """Shows what a model is made of, how well its cost is known, and how many plans it has."""
    from ir.summary import summarize
    from service.command.inspection import count_plans, show
    from service.jobs.run_job import import_graph

    _one_thread()
    data, options = read_input(model, dim, batch_dim, parameters)
    graph = import_graph(data, JobRequest(cluster="", training={}, model=options))
    document = summarize(graph)
    try:
        document["space"] = count_plans(graph, cluster or INSPECTED, global_batch)
    except UserError as fault:
        if cluster is not None:
            raise
        # Nobody asked for this cluster: what the model is made of can be shown all the same.
        document["space"] = None
        document["warnings"].append(f"plans cannot be counted: {fault}")
    print_json(document) if as_json else show(document)


@app.command()
def clusters(as_json: JsonOption = False) -> None:
    """Lists cluster presets and devices."""
    from service.clusters import describe_clusters, local_line

    document = describe_clusters()
    if as_json:
        print_json(document)
        return
    typer.echo("A cluster is " + document["form"] + ", or a JSON file. Examples:")
    for preset in document["presets"]:
        typer.echo(f"  {preset}")
    typer.echo("Devices:")
    for device in document["devices"]:
        peaks = ", ".join(f"{kind} {peak:g}" for kind, peak in device["peak_TFLOPs"].items())
        typer.echo(f"  {device['name']:14} {device['memory_GiB']:g} GiB, TFLOP/s: {peaks}")
    typer.echo(local_line(document["local"]))


@app.command()
def schema() -> None:
    """Prints the JSON Schema of plans."""
    from automap.plan import plan_schema

    print_json(plan_schema())


@app.command("export-onnx")
def export_onnx(
    source: Annotated[str, typer.Argument(metavar="FILE.py:FUNCTION", help="Returns a module and example inputs.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the ONNX file.")],
    opset: Annotated[int, typer.Option(min=13, help="Version of the operator set.")] = 20,
    name: Annotated[str, typer.Option(help="Of the graph.")] = "",
) -> None:
    """Exports a PyTorch module without its weights. Runs FILE.py, so name only files that you trust."""
    from service.loading import load_function

    _one_thread()
    build = load_function(source)
    from automap.runtime import torch_export

    data = torch_export.export_onnx(build, output, opset=opset, name=name)
    typer.echo(f"{output}: {len(data):,} bytes, no weights", err=True)


@app.command()
def strip(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX file of any size.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", callback=writable, help="Where to write the stripped file.")
    ],
    parameters: ParametersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Writes a model file without weights, paths and stack traces, which imports to the same graph."""
    from ir.onnx.strip import strip_file

    stripped = strip_file(model, parameters=tuple(parameters or ()))
    output.write_bytes(stripped.data)
    if as_json:
        print_json(
            {
                "bytes_before": stripped.bytes_before,
                "bytes_after": len(stripped.data),
                "num_dropped": stripped.num_dropped,
                "num_kept": stripped.num_kept,
            }
        )
        return
    typer.echo(
        f"{output}: {stripped.bytes_before:,} -> {len(stripped.data):,} bytes; {stripped.num_dropped} tensors without "
        f"their data, {stripped.num_kept} small constants kept",
        err=True,
    )


@app.command()
def validate(
    runs: Annotated[
        Path, typer.Argument(metavar="RUNS.json", help="Measured runs, as docs/measured-runs.md describes them.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Compares the price with measured runs, group by group."""
    from automap.validation import errors_by_group as validation
    from automap.validation.published_runs import load_runs

    _one_thread()
    document = validation.validate(load_runs(runs))
    print_json(document) if as_json else typer.echo(validation.table(document))


@app.command("train-agent")
def train_agent(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of the checkpoint; made if it is not there.")],
    plans: Annotated[int, typer.Option(min=1, help="To decide, over all problems of the family.")] = 20_000,
    seed: SeedOption = 0,
) -> None:
    """Trains the network of `dqn-pretrained` anew, on a family of models and clusters."""
    from agents.learning import pretraining

    def told(count: int, gap: float) -> None:
        typer.echo(f"{count} plans; the last take {math.exp(gap):.2f} times the lower bound, in the mean", err=True)

    command = ["automap", "train-agent", str(folder), "--plans", str(plans), "--seed", str(seed)]
    pretraining.train_agent(folder, plans=plans, seed=seed, on_progress=told, command=command)


@app.command()
def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the plans.")] = Path("demo"),
    budget: BudgetOption = "25s",
    seed: SeedOption = 0,
) -> None:
    """Runs the main job: three real models through the service."""
    from service.command.demo import run_demo

    raise typer.Exit(run_demo(output, budget=budget, seed=seed))


def _one_thread() -> None:
    # Searches are many small computations: a second thread only slows them (measured), and results stay the same.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")


def _complain(text: str, document: dict[str, Any], *, as_json: bool) -> None:
    typer.echo(f"automap: {text}", err=True)
    if as_json:
        print_json(document)


app.add_typer(service_verbs)

if __name__ == "__main__":
    sys.exit(main())
