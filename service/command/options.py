"""Options of the verbs of the command line with their help, and the files that they name.

Options that several verbs have in common are the parameters of one function here, which makes one value of them; a verb
takes that value (`gathers`). These functions have as many parameters as there are options.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from automap.documents import read_file
from automap.errors import ModelError, ProblemError
from service.command.output_checks import writable
from service.jobs.run_job import JobRequest, ModelOptions
from service.jobs.trial_options import Trials

TRAINING_PANEL = "The training"
SEARCH_PANEL = "The search"
READING_PANEL = "How the model is read"
"""Headings in the help of a verb, over options that few commands need. All others are under "Options", in front."""

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="An ONNX file, zoo:NAME for a known model, hf:FOLDER for a config.json of transformers, or a profile of "
        "layers in PipeDream's text (docs/models.md).",
    ),
]
CLUSTER_HELP = (
    "The devices, such as 2x8xH100: two nodes of eight H100 each. @LINK after it names the link between the nodes. "
    "Or a .json file. `automap clusters` lists devices and links."
)
ClusterOption = Annotated[str, typer.Option("--cluster", help=CLUSTER_HELP)]
BatchOption = Annotated[
    int | None, typer.Option("--global-batch", help="Samples of one optimizer step; default: those of --baseline.")
]
BaselineOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="What you run today: a script of Megatron-LM's arguments (.sh, .yaml), torchtitan's .toml, DeepSpeed's "
        ".json, accelerate's .yaml, or a plan. The search begins with it, and prints what each change to it saves.",
    ),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=TRAINING_PANEL,
        help="bf16, fp16, tf32, fp32, fp8, mxfp8 or nvfp4; default: the first of bf16, fp16 and fp32 that all devices "
        "have.",
    ),
]
FrozenOption = Annotated[
    list[str] | None,
    typer.Option(
        "--frozen",
        metavar="PATTERN",
        rich_help_panel=TRAINING_PANEL,
        help="Parameters that are not trained, by name; may be repeated. --frozen '*' --frozen '!*lora*' freezes all "
        "but the adapters.",
    ),
]
OptimizerOption = Annotated[
    str | None, typer.Option(rich_help_panel=TRAINING_PANEL, help="adam, momentum or sgd; default: adam.")
]
LossOption = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=TRAINING_PANEL,
        help="cross_entropy or mse, of a model that returns no loss; default: cross_entropy where its output has a dim "
        "of classes.",
    ),
]
TrainerOption = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=TRAINING_PANEL,
        help="The training software that step time and memory are predicted for, such as megatron-core, or "
        "megatron-core-26.06 for its newer releases (docs/cost-model.md); default: that of --target, or generic.",
    ),
]
StatedTrainerOption = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=TRAINING_PANEL,
        help="The training software that step time and memory are predicted for, such as megatron-core, or "
        "megatron-core-26.06 for its newer releases (docs/cost-model.md); default: generic.",
    ),
]
"""As `TrainerOption`, for verbs without `--target`."""
TargetOption = Annotated[
    str | None,
    typer.Option(
        help="Search only the plans that this trainer can run (docs/exports.md), or all plans: any; default: any."
    ),
]
SyncOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODE",
        rich_help_panel=TRAINING_PANEL,
        help="Also search plans whose replicas exchange their parameters only every few steps: local_sgd or dasgd; "
        "may be repeated.",
    ),
]
SyncPeriodOption = Annotated[
    int | None,
    typer.Option(
        rich_help_panel=TRAINING_PANEL,
        help="With --sync: the largest number of steps between two averagings of the replicas; default: 4.",
    ),
]
MemoryConfidenceOption = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=TRAINING_PANEL,
        help="The probability with which a plan must fit into memory, 0.5 to 0.999; default: 0.95.",
    ),
]
SearcherOption = Annotated[
    list[str],
    typer.Option(
        metavar="NAME",
        rich_help_panel=SEARCH_PANEL,
        help="The algorithm; may be repeated: several search one after another, each with its share of the budget. "
        "One of portfolio, dqn, sharding, replication, pipeline, mcmc, hill-climbing, elimination, ilp, expert, "
        "random, exhaustive (docs/search.md), or a planner of the literature: pipedream, dapple, spp, whale, aceso, "
        "galvatron, piper, alpa (docs/planners.md).",
    ),
]
BudgetOption = Annotated[
    str, typer.Option(help="How long to search: a time (30s, 2m), or a number of plans to price (1000).")
]
TieOption = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1.0,
        rich_help_panel=SEARCH_PANEL,
        help="Plans whose step times differ by less than this share of the error band count as equally fast, and the "
        "simplest of them is returned; 0: always the fastest.",
    ),
]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of every random choice.")]
TrialsOption = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        rich_help_panel=SEARCH_PANEL,
        help="After the search, run up to K plans for some steps on this host, which must be the cluster, and return "
        "the one that was measured fastest.",
    ),
]
HintsOption = Annotated[
    Path | None, typer.Option(help="A JSON file with what you know or insist on, such as a fixed tp (docs/api.md).")
]
DimOption = Annotated[
    list[str] | None,
    typer.Option(
        "--dim",
        metavar="NAME=SIZE",
        rich_help_panel=READING_PANEL,
        help="The size of a symbolic dim of the model, such as seq=1024; batch=N is the number of samples with which "
        "a layer profile was measured.",
    ),
]
BatchDimOption = Annotated[
    list[str] | None,
    typer.Option(
        "--batch-dim",
        metavar="INPUT=DIM",
        rich_help_panel=READING_PANEL,
        help="Which dim of an input is the batch, such as tokens=1; default: the one that the file names batch, or the "
        "first.",
    ),
]
ParametersOption = Annotated[
    list[str] | None,
    typer.Option(
        "--parameters",
        metavar="GLOB",
        rich_help_panel=READING_PANEL,
        help="Names of inputs or constants of the file that are parameters of the model, where the file does not say.",
    ),
]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", callback=writable, help="Where to write the plan.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and all else on stderr.")]
UrlOption = Annotated[str, typer.Option(envvar="AUTOMAP_URL", help="Address of the service.")]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="The plan, a JSON file; - reads it from stdin.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]

FromScratchOption = Annotated[
    bool,
    typer.Option(
        "--from-scratch", rich_help_panel=SEARCH_PANEL, help="With --searcher dqn: begin with an untrained network."
    ),
]
PORTFOLIO = ["portfolio"]


class Job(NamedTuple):
    """The model and the request that most verbs work on."""

    data: bytes
    """The model's file; empty for a model of the zoo."""
    request: JobRequest


def gathers(**readers: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replaces parameters of a verb by the options that they are read from.

    Args:
        readers: parameter of the verb -> function whose parameters are options, and which returns its value.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(verb, eval_str=True)
        options: list[inspect.Parameter] = []
        for name, parameter in signature.parameters.items():
            reader = readers.get(name)
            options += [parameter] if reader is None else inspect.signature(reader, eval_str=True).parameters.values()

        @functools.wraps(verb)
        def run(**given: Any) -> None:
            for name, reader in readers.items():
                taken = {option: given.pop(option) for option in inspect.signature(reader).parameters}
                given[name] = reader(**taken)
            verb(**given)

        named = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]
        run.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
        run.__annotations__ = {option.name: option.annotation for option in named}
        return run

    return decorate


def stated(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the user stated: those that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def read_model(
    model: ModelArgument, dim: DimOption = None, batch_dim: BatchDimOption = None, parameters: ParametersOption = None
) -> Job:
    """The model of a file, of the zoo or of a configuration, with nothing that is said about its training.

    Raises:
        ModelError: it cannot be read, or what is said about its dims is not understood.
    """
    from service.dims import parse_batch_dims, parse_dims

    globs = tuple(parameters or ())
    options = ModelOptions(dims=parse_dims(dim or []), batch_dims=parse_batch_dims(batch_dim or []), parameters=globs)
    if not model:
        from service.model_files import MODEL_FORMS

        raise ModelError("no model", field="model", value=model, repair=MODEL_FORMS)
    if model.startswith("zoo:"):
        name = model.removeprefix("zoo:")
        if not name:
            from ir import zoo

            zoo.check_known(name)  # raises, and says which names there are
        data, options = b"", replace(options, zoo=name)
    elif model.startswith("hf:"):
        from service.loading import export_source

        data, name = export_source(model)
        options = replace(options, name=name)
    else:
        from service.model_files import read_model_file

        data, options = read_model_file(Path(model), globs), replace(options, name=Path(model).stem)
    return Job(data, JobRequest(cluster=None, training={}, model=options))


def read_model_and_hints(
    model: ModelArgument,
    hints: HintsOption = None,
    dim: DimOption = None,
    batch_dim: BatchDimOption = None,
    parameters: ParametersOption = None,
) -> Job:
    """The model as `read_model` reads it, with the hints of a file.

    Raises:
        UserError: the model or the hints.
    """
    data, request = read_model(model, dim, batch_dim, parameters)
    return Job(data, replace(request, hints=_read_hints(hints)))


def read_training(
    precision: PrecisionOption = None,
    optimizer: OptimizerOption = None,
    loss: LossOption = None,
    frozen: FrozenOption = None,
) -> dict[str, Any]:
    """The settings of the training that the user states: fields of `automap.problem.Training`."""
    return stated({"precision": precision, "optimizer": optimizer, "loss": loss, "frozen": frozen or None})


def sync_training(modes: Sequence[str] | None, period: int | None) -> dict[str, Any]:
    """The settings of the training that `--sync` and `--sync-period` state."""
    return {"sync_modes": list(dict.fromkeys(["synchronous", *modes])) if modes else None, "sync_period": period}


def read_job(
    model: ModelArgument,
    cluster: ClusterOption,
    global_batch: BatchOption = None,
    baseline: BaselineOption = None,
    precision: PrecisionOption = None,
    optimizer: OptimizerOption = None,
    loss: LossOption = None,
    frozen: FrozenOption = None,
    trainer: TrainerOption = None,
    target: TargetOption = None,
    sync: SyncOption = None,
    sync_period: SyncPeriodOption = None,
    memory_confidence: MemoryConfidenceOption = None,
    searcher: SearcherOption = PORTFOLIO,
    from_scratch: FromScratchOption = False,
    budget: BudgetOption = "30s",
    tie: TieOption = 0.1,
    seed: SeedOption = 0,
    trials: TrialsOption = None,
    hints: HintsOption = None,
    dim: DimOption = None,
    batch_dim: BatchDimOption = None,
    parameters: ParametersOption = None,
) -> Job:
    """The whole request of a search.

    Raises:
        UserError: the model or the hints.
    """
    if from_scratch and "dqn" not in searcher:
        raise ProblemError(
            "is for the searcher dqn alone",
            field="from_scratch",
            value="true",
            repair="Add --searcher dqn, or leave --from-scratch out.",
        )
    training = {
        "global_batch": global_batch,
        "precision": precision,
        "optimizer": optimizer,
        "loss": loss,
        "frozen": frozen or None,
        "trainer": trainer,
        "target": target,
        **sync_training(sync, sync_period),
        "memory_confidence": memory_confidence,
    }
    data, request = read_model_and_hints(model, hints, dim, batch_dim, parameters)
    said = stated(training)
    if baseline is not None:
        from automap.export.baseline import load

        if request.hints.get("baseline") is not None:
            repair = "Leave --baseline out, or the one in the hints."
            raise ProblemError("the hints have one already", field="baseline", value=str(baseline), repair=repair)
        request = replace(request, hints={**request.hints, "baseline": load(baseline)})
    if "global_batch" not in said and request.hints.get("baseline") is None:
        repair = "Give --global-batch, or --baseline with a file that says it."
        raise ProblemError("missing", field="global_batch", value="nothing", repair=repair)
    request = replace(
        request,
        cluster=cluster,
        training=said,
        budget=budget,
        searchers=tuple("dqn-from-scratch" if from_scratch and name == "dqn" else name for name in searcher),
        tie=tie,
        seed=seed,
        trials=None if trials is None else Trials(top_k=trials),
    )
    return Job(data, request)


def _read_hints(path: Path | None) -> dict[str, Any]:
    """The hints of a file.

    Raises:
        ProblemError: it is not a readable JSON object.
    """
    if path is None:
        return {}
    document = read_file(path, field="hints", error=ProblemError)
    if not isinstance(document, dict):
        raise ProblemError("not an object", field="hints", value=str(path), repair="Write a JSON object.")
    return document
