"""The command line.

Exit codes: 0 ok, 1 failed, 2 bad input, 3 nothing fits. With `--json` one JSON document goes to stdout (a problem
document when the command fails) and all else to stderr. Start-up imports no torch, numba or onnx: each verb imports
what it needs.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from automap.errors import ModelError, NothingFits, PlanError, ProblemError, UserError
from service.problems import RemoteError, problem_of
from service.run_job import JobRequest, ModelOptions

if TYPE_CHECKING:
    from automap.plan import Plan
    from service.client import AutomapClient

app = typer.Typer(
    name="automap",
    help="Finds the fastest way to spread the training of a model over a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="An ONNX file, a layer profile (PipeDream's text), or zoo:NAME.")
]
ClusterOption = Annotated[str, typer.Option("--cluster", help="[NODESx]GPUSxDEVICE[@LINK], or a .json file.")]
BatchOption = Annotated[int, typer.Option("--global-batch", help="Samples of one optimizer step.")]
PrecisionOption = Annotated[
    str | None, typer.Option(help="bf16, fp16, tf32, fp32, fp8, mxfp8 or nvfp4; default: bf16 where possible.")
]
OptimizerOption = Annotated[str, typer.Option(help="adam, momentum or sgd.")]
LossOption = Annotated[str | None, typer.Option(help="cross_entropy or mse, if the model returns no loss.")]
TrainerOption = Annotated[str, typer.Option(help="The training software.")]
SearcherOption = Annotated[
    list[str],
    typer.Option(
        metavar="NAME",
        help="portfolio, dqn, dqn-pretrained, mcmc, hill-climbing, elimination, ilp, expert, random or exhaustive; "
        "several one after another, each with its share of the budget.",
    ),
]
BudgetOption = Annotated[str, typer.Option(help="30s, 2m, or a number of evaluations.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Of every random choice.")]
HintsOption = Annotated[Path | None, typer.Option(help="JSON file: what you know or insist on.")]
DimOption = Annotated[
    list[str] | None, typer.Option("--dim", metavar="NAME=SIZE", help="Size of a symbolic dim; of a profile: batch=N.")
]
BatchDimOption = Annotated[
    list[str] | None,
    typer.Option("--batch-dim", metavar="INPUT=DIM", help="The dim of an input that is its batch; default: the first."),
]
ParametersOption = Annotated[
    list[str] | None, typer.Option("--parameters", metavar="GLOB", help="Inputs that are parameters.")
]


def _writable(path: Path | None) -> Path | None:
    """Refuses an output that could not be written before the work is done, not after it."""
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise PlanError(
            "cannot be written", field="output", value=str(path), repair="Name a file in a folder of yours."
        )
    return path


OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", callback=_writable, help="Where to write the plan.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
UrlOption = Annotated[str, typer.Option(envvar="AUTOMAP_URL", help="Of the service.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]

PORTFOLIO = ["portfolio"]
URL = "http://127.0.0.1:8080"
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
    searcher: SearcherOption = PORTFOLIO,
    budget: BudgetOption = "30s",
    seed: SeedOption = 0,
    hints: HintsOption = None,
    dim: DimOption = None,
    batch_dim: BatchDimOption = None,
    parameters: ParametersOption = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Finds a plan on this machine."""
    from service.run_job import import_graph, run_job
    from service.terminal import interruptible, progress_line

    _one_thread()
    data, options = _model(model, dim, batch_dim, parameters)
    request = JobRequest(
        cluster=cluster,
        training=_training(global_batch, precision, optimizer, loss, trainer),
        hints=_read_hints(hints),
        model=options,
        budget=budget,
        searchers=tuple(searcher),
        seed=seed,
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
    _show_plan(plan, output, as_json=as_json)


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
    from service import estimation

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
    data, options = _model(model, dim, batch_dim, parameters)
    request = JobRequest(
        cluster=cluster,
        training={name: value for name, value in training.items() if value is not None},
        hints=_read_hints(hints),
        model=estimation.with_sequence(options, seq_len),
    )
    if plan is None:
        found = estimation.price_hand_made(data, request, stated)
    else:
        found = estimation.price_file(data, request, stated, plan)
    _write_plan(found, output)
    _print_json(found.to_json()) if as_json else typer.echo(estimation.page(found))
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
    from service.estimation import verify_file

    data, options = _model(model, dim, batch_dim, parameters)
    request = JobRequest(cluster=None, training={}, hints=_read_hints(hints), model=options)
    found = verify_file(data, request, plan)
    if as_json:
        _print_json({"violations": [to_json(violation) for violation in found]})
    else:
        for violation in found:
            typer.echo(f"{violation.where}: {violation.what}")
    if found:
        raise typer.Exit(1)


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
    from service.inspection import count_plans, show
    from service.run_job import import_graph

    _one_thread()
    data, options = _model(model, dim, batch_dim, parameters)
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
    _print_json(document) if as_json else show(document)


@app.command()
def clusters(as_json: JsonOption = False) -> None:
    """Lists cluster presets and devices."""
    from service.clusters import describe_clusters

    document = describe_clusters()
    if as_json:
        _print_json(document)
        return
    typer.echo("A cluster is " + document["form"] + ", or a JSON file. Examples:")
    for preset in document["presets"]:
        typer.echo(f"  {preset}")
    typer.echo("Devices:")
    for device in document["devices"]:
        peaks = ", ".join(f"{kind} {peak:g}" for kind, peak in device["peak_TFLOPs"].items())
        typer.echo(f"  {device['name']:14} {device['memory_GiB']:g} GiB, TFLOP/s: {peaks}")


@app.command()
def schema() -> None:
    """Prints the JSON Schema of plans."""
    from automap.plan import plan_schema

    _print_json(plan_schema())


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
        Path, typer.Option("-o", "--output", callback=_writable, help="Where to write the stripped file.")
    ],
    parameters: ParametersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Writes a model file without weights, paths and stack traces, which imports to the same graph."""
    from ir.onnx.strip import strip_file

    stripped = strip_file(model, parameters=tuple(parameters or ()))
    output.write_bytes(stripped.data)
    if as_json:
        _print_json(
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
    runs: Annotated[Path, typer.Argument(metavar="RUNS.json", help="Measured runs, as in docs/cost-model.md.")],
    as_json: JsonOption = False,
) -> None:
    """Compares the price with measured runs, group by group."""
    from automap import validation
    from automap.published import load_runs

    _one_thread()
    document = validation.validate(load_runs(runs))
    _print_json(document) if as_json else typer.echo(validation.table(document))


@app.command("train-agent")
def train_agent(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of the checkpoint; made if it is not there.")],
    plans: Annotated[int, typer.Option(min=1, help="To decide, over all problems of the family.")] = 20_000,
    seed: SeedOption = 0,
) -> None:
    """Trains the network of `dqn-pretrained` anew, on a family of models and clusters."""
    from agents import pretraining

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
    from service.demo import run_demo

    raise typer.Exit(run_demo(output, budget=budget, seed=seed))


# The service


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 = any free port.")] = 8080,
    workers: Annotated[int | None, typer.Option(min=0, help="Worker processes; default: AUTOMAP_NUM_WORKERS.")] = None,
    insecure: Annotated[bool, typer.Option(help="Allow an address that others can reach.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Runs the service: store, workers and REST, until Ctrl-C."""
    from service import serve as server

    settings = _settings()
    if workers is not None:
        settings = settings.model_copy(update={"num_workers": workers})
    _log(settings.log_level)

    def ready(url: str) -> None:
        typer.echo(json.dumps({"url": url}) if as_json else f"AutoMAP serves {url}/v1 (Ctrl-C ends it)")
        sys.stdout.flush()

    server.serve(settings, host=host, port=port, insecure=insecure, on_ready=ready)


@app.command()
def worker(parent: Annotated[int | None, typer.Option(hidden=True)] = None) -> None:
    """Runs jobs of the service whose Redis AUTOMAP_REDIS_URL names; any number, on any machine."""
    settings = _settings()
    _log(settings.log_level)
    if settings.redis_url is None:
        raise UserError(
            "a worker needs the service's Redis",
            field="redis_url",
            value="unset",
            repair="Set AUTOMAP_REDIS_URL; `automap serve` on its own starts its workers itself.",
        )
    import redis

    from service.worker import main as work

    try:
        work(settings.redis_url, parent=parent)
    except redis.ConnectionError as fault:
        from service.problems import problem

        raise RemoteError(problem(503, "Redis does not answer", str(fault))) from None


# Verbs against a server


@app.command()
def submit(
    model: ModelArgument,
    cluster: ClusterOption,
    global_batch: BatchOption,
    precision: PrecisionOption = None,
    optimizer: OptimizerOption = "adam",
    loss: LossOption = None,
    trainer: TrainerOption = "generic",
    searcher: SearcherOption = PORTFOLIO,
    budget: BudgetOption = "30s",
    seed: SeedOption = 0,
    hints: HintsOption = None,
    dim: DimOption = None,
    batch_dim: BatchDimOption = None,
    parameters: ParametersOption = None,
    url: UrlOption = URL,
    as_json: JsonOption = False,
) -> None:
    """Sends a model to the service and starts a search; prints the job's id."""
    from automap.cluster import parse_cluster

    data, options = _model(model, dim, batch_dim, parameters)
    place: str | dict[str, Any] = parse_cluster(cluster).to_json() if cluster.endswith(".json") else cluster
    with _client(url) as client:
        about: Mapping[str, Any] = {
            "name": options.name,
            "dims": options.dims,
            "parameters": options.parameters,
            "batch_dims": options.batch_dims,
        }
        job = client.submit(
            model if options.zoo else client.upload_model(data, **about)["id"],
            place,
            _training(global_batch, precision, optimizer, loss, trainer),
            budget=budget,
            searchers=tuple(searcher),
            seed=seed,
            hints=_read_hints(hints),
            **about,
        )
    _print_json(job) if as_json else typer.echo(job["id"])


@app.command()
def status(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="The job's id; without it, the latest.")] = None,
    url: UrlOption = URL,
    as_json: JsonOption = False,
) -> None:
    """Shows a job, or the latest ones."""
    with _client(url) as client:
        documents = [client.job(job)] if job is not None else client.jobs(limit=20)
    if as_json:
        _print_json(documents[0] if job is not None else {"jobs": documents})
        return
    for document in documents:
        typer.echo(_job_line(document))


@app.command()
def watch(job: JobArgument, url: UrlOption = URL, output: OutputOption = None, as_json: JsonOption = False) -> None:
    """Follows a job to its end and shows its plan."""
    from service.terminal import progress_line

    with _client(url) as client:
        with progress_line() as show:
            client.wait(job, on_progress=lambda document: _show_job(show, document))
        plan = client.plan(job)
    _show_plan(plan, output, as_json=as_json)


@app.command()
def cancel(job: JobArgument, url: UrlOption = URL, as_json: JsonOption = False) -> None:
    """Cancels a job."""
    with _client(url) as client:
        document = client.cancel(job)
    _print_json(document) if as_json else typer.echo(_job_line(document))


@app.command()
def plan(job: JobArgument, url: UrlOption = URL, output: OutputOption = None, as_json: JsonOption = False) -> None:
    """Fetches the plan of a job that succeeded."""
    with _client(url) as client:
        found = client.plan(job)
    _show_plan(found, output, as_json=as_json)


# What the verbs share

_EXTERNAL = b"\x0a\x08location\x12"
"""In an ONNX file: the key under which a tensor says in which other file its data lies."""


def _model(
    path: str, dims: list[str] | None, batch_dims: list[str] | None, parameters: list[str] | None
) -> tuple[bytes, ModelOptions]:
    from service.dims import parse_batch_dims, parse_dims

    sizes, places, globs = parse_dims(dims or []), parse_batch_dims(batch_dims or []), tuple(parameters or ())
    if path.startswith("zoo:"):
        return b"", ModelOptions(zoo=path.removeprefix("zoo:"), dims=sizes, batch_dims=places, parameters=globs)
    try:
        data = _read_model(Path(path), globs)
    except OSError as fault:
        raise ModelError(
            f"cannot be read ({fault.strerror})",
            field="model",
            value=path,
            repair="Give the path of an ONNX file or a layer profile.",
        ) from None
    return data, ModelOptions(name=Path(path).stem, dims=sizes, batch_dims=places, parameters=globs)


def _read_model(path: Path, parameters: tuple[str, ...]) -> bytes:
    """The file, without its weights where they lie outside of it or make it larger than an upload may be."""
    from ir.onnx.sandbox import DEFAULT_MAX_BYTES

    is_large = path.stat().st_size > DEFAULT_MAX_BYTES
    data = b"" if is_large else path.read_bytes()
    if not is_large and _EXTERNAL not in data:
        return data
    from ir.onnx.strip import strip_file

    return strip_file(path, parameters=parameters).data


def _training(
    global_batch: int, precision: str | None, optimizer: str, loss: str | None, trainer: str
) -> dict[str, Any]:
    given = {
        "global_batch": global_batch,
        "precision": precision,
        "optimizer": optimizer,
        "loss": loss,
        "trainer": trainer,
    }
    return {key: value for key, value in given.items() if value is not None}


def _read_hints(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as fault:
        raise ProblemError(
            f"cannot be read ({fault})", field="hints", value=str(path), repair="Name a readable JSON file."
        ) from None
    if not isinstance(document, dict):
        raise ProblemError("not an object", field="hints", value=str(path), repair="Write a JSON object.")
    return document


def _write_plan(plan: Plan, output: Path | None) -> None:
    if output is not None:
        try:
            output.write_text(json.dumps(plan.to_json(), indent=1) + "\n")
        except OSError as fault:
            raise PlanError(
                f"cannot be written ({fault.strerror})", field="output", value=str(output), repair="Name another file."
            ) from None


def _show_plan(plan: Plan, output: Path | None, *, as_json: bool) -> None:
    from service.report import summary

    _write_plan(plan, output)
    if as_json:
        _print_json(plan.to_json())
        return
    for label, text in summary(plan):
        typer.echo(f"{label:9} {text}")
    for line in plan.why:
        typer.echo(f"{'why':9} {line}")
    for line in plan.warnings:
        typer.echo(f"{'warning':9} {line}", err=True)
    if output is not None:
        typer.echo(f"{'plan':9} {output}")


def _show_job(show: Any, job: Mapping[str, Any]) -> None:
    progress = job["progress"] or {}
    fraction = 1.0 if job["state"] not in ("queued", "running") else progress.get("fraction", 0.0)
    label = progress.get("searcher", job["state"])
    show(label, fraction, progress.get("evaluations", 0), progress.get("best_step_time_s"))


def _job_line(job: Mapping[str, Any]) -> str:
    request = job["request"]
    place = request["cluster"] if isinstance(request["cluster"], str) else request["cluster"].get("name", "")
    text = f"{job['id']}  {job['state']:9}  {request['model']['name'] or job['model_id'][:12]} on {place}"
    return text + (f"  {job['problem']['detail']}" if job["problem"] else "")


def _client(url: str) -> AutomapClient:
    from service.client import AutomapClient

    return AutomapClient(url)


def _settings() -> Any:
    from pydantic import ValidationError

    from service.settings import Settings

    try:
        return Settings()
    except ValidationError as fault:
        first = fault.errors()[0]
        name = "AUTOMAP_" + str(first["loc"][0]).upper()
        raise UserError(
            first["msg"], field=name, value=first.get("input"), repair=f"Set {name} to another value."
        ) from None


def _log(level: str) -> None:
    logging.basicConfig(
        stream=sys.stderr, level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def _one_thread() -> None:
    # Searches are many small computations: a second thread only slows them (measured), and results stay the same.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")


def _print_json(document: object) -> None:
    typer.echo(json.dumps(document, indent=1))


def _complain(text: str, document: dict[str, Any], *, as_json: bool) -> None:
    typer.echo(f"automap: {text}", err=True)
    if as_json:
        _print_json(document)


if __name__ == "__main__":
    sys.exit(main())
