"""Verbs that read, write and describe models and clusters, measure this host, and check the price."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from automap.errors import ProblemError, UserError, one_of
from service.command.options import (
    BudgetOption,
    Job,
    JsonOption,
    ParametersOption,
    SeedOption,
    gathers,
    read_model,
)
from service.command.output import print_json, say
from service.command.output_checks import drawable, makable, writable
from service.jobs.run_job import import_graph
from service.output_files import write_output

app = typer.Typer()

INSPECTED = "8xA100-80GB"
"""The cluster on which `inspect` counts plans if none is named."""


@app.command()
@gathers(job=read_model)
def inspect(
    job: Job,
    cluster: Annotated[str | None, typer.Option(help=f"The cluster to count plans for; default: {INSPECTED}.")] = None,
    global_batch: Annotated[int, typer.Option(help="Samples of one optimizer step in these plans.")] = 512,
    as_json: JsonOption = False,
) -> None:
    """Shows the operators and units of a model, how well its cost is known, and how many plans it has."""
    from ir.summary import summarize
    from service.command.inspection import count_plans, show

    graph = import_graph(*job)
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


@app.command("export-onnx")
def export_onnx(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            help="A function that returns a module and its example inputs, or a model of transformers; or hf:FOLDER, "
            "the folder of a config.json.",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", callback=writable, help="Where to write the ONNX file.")],
    opset: Annotated[int, typer.Option(min=13, help="Version of ONNX's operator set to write.")] = 20,
    name: Annotated[str, typer.Option(help="Name of the graph.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Exports a PyTorch module without its weights. Runs FILE.py, so name only files that you trust."""
    from service.loading import export_source

    data, _ = export_source(source, output, opset=opset, name=name)
    if as_json:
        print_json({"output": str(output), "num_bytes": len(data)})
    else:
        say(f"{output}: {len(data):,} bytes, no weights", err=True)


@app.command()
def strip(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX file of any size.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", callback=writable, help="Where to write the stripped file.")
    ],
    parameters: ParametersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Writes a copy of an ONNX file without weights, paths and stack traces; both files have the same plans."""
    from ir.onnx.strip import strip_file

    stripped = strip_file(model, parameters=tuple(parameters or ()))
    write_output(output, stripped.data)
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
    say(
        f"{output}: {stripped.bytes_before:,} -> {len(stripped.data):,} bytes; "
        f"weights left out: {stripped.num_dropped}, small constants kept: {stripped.num_kept}",
        err=True,
    )


@app.command()
def clusters(as_json: JsonOption = False) -> None:
    """Lists the devices and links that a cluster may be made of, with examples of clusters."""
    from service.clusters import describe_clusters, device_lines, link_lines, local_line, own_line

    document = describe_clusters()
    if as_json:
        print_json(document)
        return
    say("A cluster is " + document["form"] + ", or a JSON file. Examples:")
    for preset in document["presets"]:
        say(f"  {preset}")
    say("Devices, with peaks in TFLOP/s (* no kernels of it were measured: its band is wider):")
    for line in device_lines():
        say(line)
    say("Links between nodes, as in @25Gbit, in place of those that a node has by default; any other rate is Ethernet:")
    for line in link_lines("inter"):
        say(line)
    say("Links inside a node, one direction of a device, for cluster files (docs/plan-format.md):")
    for line in link_lines("intra"):
        say(line)
    say(own_line())
    say(local_line(document["local"]))


@app.command()
def schema() -> None:
    """Prints the JSON Schema of the files that `search -o` writes."""
    from automap.plan import plan_schema

    print_json(plan_schema())


@app.command()
def profile(
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            callback=writable,
            help="Where to write a copy of the cluster file that `--cluster local` reads.",
        ),
    ] = None,
    time_limit: Annotated[
        float, typer.Option(min=40.0, max=120.0, help="Seconds that the whole measurement may take.")
    ] = 100.0,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=64,
            help="On a host without GPUs: number of devices, one process each; default: one for each core.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measures this host and describes it as a cluster, `--cluster local`. Exit code 1: it could not be measured."""
    from service.command.profiling import measure_host

    found = measure_host(output, time_limit_s=time_limit, num_devices=devices)
    if found.cluster is None:
        say(*f"automap: {found.outcome.replace('_', ' ')}: {found.message}".split("\n"), err=True)
        raise typer.Exit(1)
    if as_json:
        print_json(found.cluster.to_json())


@app.command()
def validate(
    runs: Annotated[
        Path, typer.Argument(metavar="RUNS.json", help="The runs, as docs/measured-runs.md describes them.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            callback=drawable,
            help="Where to draw predicted against measured step times (.html, .svg, .png), or write them (.json).",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compares predicted step times and memory with runs that were measured, group by group."""
    from automap.validation import errors_by_group as validation
    from automap.validation.published_runs import load_runs

    rows = [validation.predict(run) for run in load_runs(runs)]
    document = validation.by_group(rows)
    if output is not None:
        from service.drawing.charts import predicted_against_measured, validation_numbers, write

        title = f"Predicted against measured: {runs.name}"
        write(output, title, validation_numbers(rows), lambda: predicted_against_measured(rows))
    print_json(document) if as_json else say(*validation.table(document))


@app.command("train-agent")
def train_agent(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            callback=makable,
            help="The folder of the network. If a training in it was interrupted, it is continued.",
        ),
    ],
    labels: Annotated[
        Path | None,
        typer.Option(
            help="The folder that `label-problems` wrote: plans to learn from; default: generated "
            "problems without plans."
        ),
    ] = None,
    duration: Annotated[str, typer.Option(help="How long to train, such as 90m or 2h.")] = "90m",
    problems: Annotated[int, typer.Option(min=32, help="Without --labels: the number of generated problems.")] = 4000,
    processes: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=1024,
            help="Processes that prepare problems for the one that trains; default: one for each other core.",
        ),
    ] = None,
    seed: SeedOption = 0,
) -> None:
    """Trains the network that proposes the first plans of every search, on generated problems."""
    from agents.learning.training_run import Curriculum, train
    from agents.portfolio.portfolio import cores
    from agents.searcher import Budget
    from service.command.terminal import progress_line

    seconds = Budget.parse(duration).seconds
    if seconds is None:
        raise ProblemError("not a duration", field="duration", value=duration, repair="Give minutes as in 90m.")
    command = ["automap", "train-agent", str(folder), "--duration", duration, "--problems", str(problems)]
    command += ["--labels", str(labels)] if labels is not None else []
    command += ["--processes", str(processes)] if processes is not None else []
    others = cores() - 1 if processes is None else processes
    with progress_line("training") as show:
        train(
            folder,
            Curriculum(labels=labels, problems=problems, seed=seed, processes=others),
            seconds=seconds,
            command=[*command, "--seed", str(seed)],
            on_progress=lambda text, fraction: show(text, fraction, 0, None),
            on_exam=lambda text: say(*text.split("\n"), err=True),
        )


@app.command("label-problems")
def label_problems(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder for the labels; made if it is not there.")
    ],
    problems: Annotated[
        int, typer.Option(min=1, help="Number of problems; those that have a label already are left out.")
    ] = 100,
    budget: BudgetOption = "5s",
    processes: Annotated[int, typer.Option(min=1, max=1024, help="Number of processes, each on one core.")] = 2,
    first_seed: Annotated[int, typer.Option(min=0, help="Seed of the first problem.")] = 0,
    split: Annotated[
        str | None, typer.Option(help="Only problems of this split: train, unseen-family or unseen-size; default: all.")
    ] = None,
    network: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Begin each search with the proposals of this network, also where there is a "
            "label; the better plan is kept.",
        ),
    ] = None,
) -> None:
    """Searches plans for generated problems and writes them as labels, from which `train-agent` learns."""
    from agents.learning import labelling
    from agents.learning.labels import is_better, read_labels
    from agents.learning.problems import SPLITS
    from agents.searcher import Budget
    from service.command.terminal import counting_bar

    known = {name: name for name in SPLITS}
    if split is not None and split not in known:
        raise ProblemError("unknown split", field="split", value=split, repair=one_of(SPLITS, split))
    amount = Budget.parse(budget)
    seeds = labelling.chosen_seeds(first_seed, problems, known[split] if split is not None else None)
    before = read_labels(folder)
    fitting = failed = better = 0
    with counting_bar("labels", len(seeds)) as done:
        for found in labelling.label_problems(folder, seeds, amount, processes, network):
            fitting += found is not None and found.fits
            failed += found is None
            better += found is not None and found.seed in before and is_better(found, before[found.seed])
            done("" if found is None else f"seed {found.seed}: {found.found_by or 'nothing fits'}")
    told = f"{len(seeds) - failed} labels, {fitting} with a plan, {better} better than before; {failed} problems failed"
    say(f"{folder}: {told}", err=True)


@app.command()
def demo(
    output: Annotated[Path, typer.Option("-o", "--output", callback=makable, help="The folder for the plans.")] = Path(
        "demo"
    ),
    budget: BudgetOption = "25s",
    seed: SeedOption = 0,
) -> None:
    """Finds plans for three well-known models through the service, which it starts and ends."""
    from service.command.demo import run_demo

    raise typer.Exit(run_demo(output, budget=budget, seed=seed))
