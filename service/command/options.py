"""What the verbs of the command line take: options and their help, and the files that they name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from automap.documents import read_file
from automap.errors import ModelError, PlanError, ProblemError
from service.jobs.run_job import ModelOptions

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
SyncOption = Annotated[
    list[str] | None,
    typer.Option(metavar="MODE", help="local_sgd or dasgd, or both: allowed beside synchronous training."),
]
SyncPeriodOption = Annotated[
    int | None, typer.Option(help="The most steps from one averaging of replicas to the next; default: 4.")
]
SearcherOption = Annotated[
    list[str],
    typer.Option(
        metavar="NAME",
        help="portfolio, dqn, dqn-pretrained, mcmc, hill-climbing, elimination, ilp, expert, random or exhaustive; "
        "several one after another, each with its share of the budget.",
    ),
]
BudgetOption = Annotated[str, typer.Option(help="30s, 2m, or a number of evaluations.")]
TieOption = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Share of the error band within which plans are equally fast, and the plainest leaves; 0: the fastest.",
    ),
]
SeedOption = Annotated[int, typer.Option(min=0, help="Of every random choice.")]
TrialsOption = Annotated[
    int | None,
    typer.Option(
        metavar="K", help="Run the best K plans for some steps, if this host is the cluster, and choose by that."
    ),
]
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


def writable(path: Path | None) -> Path | None:
    """Refuses an output that could not be written before the work is done, not after it."""
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise PlanError(
            "cannot be written", field="output", value=str(path), repair="Name a file in a folder of yours."
        )
    return path


OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", callback=writable, help="Where to write the plan.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
UrlOption = Annotated[str, typer.Option(envvar="AUTOMAP_URL", help="Of the service.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]

PORTFOLIO = ["portfolio"]

_EXTERNAL = b"\x0a\x08location\x12"
"""In an ONNX file: the key under which a tensor says in which other file its data lies."""


def read_input(
    path: str, dims: list[str] | None, batch_dims: list[str] | None, parameters: list[str] | None
) -> tuple[bytes, ModelOptions]:
    """The model that `path` names, without its bytes if it is one of the zoo, and what is said about it.

    Raises:
        ModelError: it cannot be read, or what is said about its dims is not understood.
    """
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
    from ir.onnx.sandbox import SandboxLimits

    is_large = path.stat().st_size > SandboxLimits().max_bytes
    data = b"" if is_large else path.read_bytes()
    if not is_large and _EXTERNAL not in data:
        return data
    from ir.onnx.strip import strip_file

    return strip_file(path, parameters=parameters).data


def training_of(
    global_batch: int,
    precision: str | None,
    optimizer: str,
    loss: str | None,
    trainer: str,
    sync: list[str] | None,
    sync_period: int | None,
) -> dict[str, Any]:
    """The training document, without what was not said."""
    given = {
        "global_batch": global_batch,
        "precision": precision,
        "optimizer": optimizer,
        "loss": loss,
        "trainer": trainer,
        "sync_modes": list(dict.fromkeys(["synchronous", *sync])) if sync else None,
        "sync_period": sync_period,
    }
    return {key: value for key, value in given.items() if value is not None}


def read_hints(path: Path | None) -> dict[str, Any]:
    """The hints of a file.

    Raises:
        ProblemError: it is no readable JSON object.
    """
    if path is None:
        return {}
    document = read_file(path, field="hints", error=ProblemError)
    if not isinstance(document, dict):
        raise ProblemError("not an object", field="hints", value=str(path), repair="Write a JSON object.")
    return document
