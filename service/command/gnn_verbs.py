"""Verbs of distributed GNN training: `automap gnn search`, `profile`, `trial`, `export` and `schema`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from automap.documents import read_file
from automap.errors import PlanError, ProblemError, one_of
from service.command.options import JsonOption, SeedOption
from service.command.output import print_json, say
from service.command.output_checks import writable
from service.output_files import write_output

if TYPE_CHECKING:
    from automap.gnn.plan import GnnPlan

app = typer.Typer(
    name="gnn",
    no_args_is_help=True,
    help="Plans distributed GNN training: which machine runs which sampler, worker and server.",
)

ProblemArgument = Annotated[
    Path, typer.Argument(metavar="PROBLEM.json", help="Machines, tasks and flows, as docs/gnn.md describes them.")
]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan that `gnn search` wrote.")]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", callback=writable, help="Where to write the result, a JSON file.")
]


@app.command()
def search(
    problem: ProblemArgument,
    budget: Annotated[
        str, typer.Option(help="How long to search: a time (20s), or a number of placements to simulate (400).")
    ] = "20s",
    searcher: Annotated[str, typer.Option(help="auto, metropolis, enumeration or dqn (docs/gnn.md).")] = "auto",
    seed: SeedOption = 0,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Searches for the placement of tasks and the order of their messages with the shortest iteration."""
    from agents.gnn import search as searching
    from agents.searcher import Budget
    from automap.gnn.problem import GnnProblem
    from service.command.terminal import interruptible, progress_line

    amount = Budget.parse(budget)
    read = GnnProblem.from_json(read_file(problem, field="problem", error=ProblemError))
    with progress_line("placing") as show, interruptible() as interrupted:
        plan = searching.search(
            read,
            amount,
            seed=seed,
            searcher=searcher,
            on_progress=lambda fraction, evaluations, best_s: show("", fraction, evaluations, best_s),
            should_stop=interrupted,
        )
        stopped = interrupted()
    show_placement(plan, output, as_json=as_json)
    if stopped:
        say("automap: interrupted: this is the best placement so far", err=True)
        raise typer.Exit(130)


def show_placement(plan: GnnPlan, output: Path | None, *, as_json: bool) -> None:
    """Prints a plan and writes it to a file, if there is one."""
    _write(output, plan.to_json())
    if as_json:
        print_json(plan.to_json())
        return
    _show(plan)
    if output is not None:
        say(f"plan      {output}")


def _show(plan: GnnPlan) -> None:
    estimate, made = plan.estimate, plan.search
    machines: dict[str, list[str]] = {}
    for task, machine in plan.placement.items():
        machines.setdefault(machine, []).append(task)
    low, high = (f"{seconds:.4g} s" for seconds in (estimate.low_s, estimate.high_s))
    varies = f"between {low} and {high}" if low != high else "the same in every draw: only volumes with a spread vary"
    say(f"iteration {estimate.iteration_s:.4g} s ({varies}), schedule {plan.schedule}")
    optimal = ", the best of all placements" if made.is_optimal else ""
    say(f"found by  {made.searcher} in {made.evaluations:,} simulations, {made.seconds:.1f} s{optimal}")
    for name, seconds in plan.against.items():
        ratio = f", {seconds / estimate.iteration_s:.2f}x" if estimate.iteration_s > 0.0 else ""
        say(f"against   {name}: {seconds:.4g} s{ratio}")
    for machine in sorted(machines, key=lambda name: (len(name), name))[:16]:
        tasks = machines[machine]
        more = f" and {len(tasks) - 8} more" if len(tasks) > 8 else ""
        say(f"on        {machine}: {', '.join(tasks[:8])}{more}")
    for line in plan.why:
        say(f"why       {line}")


@app.command()
def profile(
    graph: Annotated[
        str,
        typer.Argument(
            metavar="EDGES.txt|NODESxDEGREE",
            help="The file of an edge list, or the size of a made-up power-law graph, such as 100000x15.",
        ),
    ],
    output: OutputOption = None,
    machines: Annotated[
        int, typer.Option(min=1, max=1024, help="Number of machines, each with one partition of the graph.")
    ] = 4,
    gpus: Annotated[int, typer.Option(min=0, max=64, help="GPUs of each machine.")] = 2,
    cpus: Annotated[float, typer.Option(min=1, max=65536, help="Processor cores of each machine.")] = 16.0,
    memory: Annotated[float, typer.Option(min=0.001, max=1e6, help="GiB of memory of each machine.")] = 256.0,
    nic: Annotated[
        float, typer.Option(min=0.001, max=1e5, help="Gbit/s at which each machine sends, and receives.")
    ] = 25.0,
    workers: Annotated[int, typer.Option(min=1, max=4096, help="Number of workers in all, with one GPU each.")] = 6,
    samplers: Annotated[int, typer.Option(min=1, max=64, help="Samplers of each worker.")] = 2,
    batch: Annotated[int, typer.Option(min=1, help="Seed nodes of a mini-batch.")] = 1000,
    fan_outs: Annotated[str, typer.Option(help="How many neighbours of a node are sampled, hop by hop.")] = "15,10,5",
    features: Annotated[int, typer.Option(min=1, max=10_000_000, help="Features of a node, of 4 bytes each.")] = 100,
    train_s: Annotated[
        str,
        typer.Option(
            help="Seconds of training on a mini-batch; or `measured`: training and sampling are timed on this host."
        ),
    ] = "0.06",
    iterations: Annotated[int, typer.Option(min=1, max=10_000, help="Number of iterations to sample.")] = 20,
    seed: SeedOption = 0,
) -> None:
    """Makes a problem of a graph: partitions it, samples mini-batches, and counts the bytes that samplers fetch."""
    import numpy as np

    from automap.gnn.graphs import power_law_graph, read_edges
    from automap.gnn.profile import Setting, parse_made_up, profile_graph, summary

    hops = fan_outs.split(",")
    if not all(hop.strip().isdecimal() and len(hop) <= 100 and 0 < int(hop) <= 10_000 for hop in hops):
        raise ProblemError(
            "not a list of numbers", field="fan_outs", value=fan_outs, repair="Give numbers as in 15,10,5."
        )
    setting = Setting(
        machines=machines,
        gpus=gpus,
        cpus=cpus,
        memory_GiB=memory,
        nic_Gbps=nic,
        workers=workers,
        samplers=samplers,
        batch=batch,
        fan_outs=tuple(map(int, hops)),
        features=features,
        train_s=_seconds(train_s),
        iterations=iterations,
    )
    rng = np.random.default_rng(seed)
    is_made_up = graph.partition("x")[0].isdigit() and not Path(graph).exists()
    read = power_law_graph(*parse_made_up(graph), rng) if is_made_up else read_edges(Path(graph))
    found = profile_graph(read, setting, rng)
    for label, text in summary(found).items():
        say(f"{label:9} {text}", err=True)
    if output is None:
        print_json(found.problem.to_json())
        return
    _write(output, found.problem.to_json())
    say(f"problem   {output}", err=True)


def _seconds(text: str) -> float | None:
    """A time, or None for one that is measured."""
    if text == "measured":
        return None
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0.0 <= found < 1e6:
        raise ProblemError("not a time", field="train_s", value=text, repair="Give seconds as in 0.06, or `measured`.")
    return found


@app.command()
def trial(
    plan: PlanArgument,
    problem: ProblemArgument,
    iterations: Annotated[int, typer.Option(min=1, max=1000, help="Number of iterations to run.")] = 3,
    by_kernel: Annotated[
        bool,
        typer.Option(
            "--by-kernel", help="Limit the rates by tc between network namespaces, in place of token buckets."
        ),
    ] = False,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Runs a plan on this host, a process for each machine, with real bytes, as slowly as the host needs."""
    from automap.gnn.loopback.trial import try_plan
    from automap.gnn.plan import GnnPlan
    from automap.gnn.problem import GnnProblem

    read = GnnProblem.from_json(read_file(problem, field="problem", error=ProblemError))
    made = GnnPlan.from_json(read_file(plan, field="plan", error=PlanError))
    found = try_plan(read, made, iterations=iterations, seed=seed, by_kernel=by_kernel)
    if as_json:
        print_json(
            {
                "measured": {"iteration_s": found.measured_s},
                "predicted": {"iteration_s": found.simulated_s},
                "iterations": found.iterations,
                "slowed": found.slowed,
            }
        )
        return
    error = f" ({found.measured_s / found.simulated_s - 1.0:+.1%})" if found.simulated_s else ""
    say(f"simulated {found.simulated_s:.4g} s an iteration")
    say(f"measured  {found.measured_s:.4g} s{error}")
    pace = f"{found.slowed:.3g} times slower" if found.slowed >= 1.0 else f"{1.0 / found.slowed:.3g} times faster"
    say(f"ran       {found.iterations} iterations between {len(read.machines)} machines of this host, {pace}")


@app.command()
def export(
    plan: PlanArgument,
    problem: ProblemArgument,
    style: Annotated[
        str, typer.Option(help="dgl or pyg: the framework whose environment variables are written.")
    ] = "dgl",
    output: OutputOption = None,
) -> None:
    """Writes a launch list for a plan: every process with its role, host and environment variables."""
    from automap.gnn.launch import launch_list
    from automap.gnn.plan import GnnPlan
    from automap.gnn.problem import GnnProblem
    from automap.gnn.simulator import Simulator

    read = GnnProblem.from_json(read_file(problem, field="problem", error=ProblemError))
    made = GnnPlan.from_json(read_file(plan, field="plan", error=PlanError))
    made.places(Simulator(read, iterations=1, seed=0))
    if style not in ("dgl", "pyg"):
        raise ProblemError("unknown", field="style", value=style, repair=one_of(("dgl", "pyg"), style))
    found = launch_list(made, read, "dgl" if style == "dgl" else "pyg")
    for line in found["warnings"]:
        say(f"warning   {line}", err=True)
    if output is None:
        print_json(found)
        return
    _write(output, found)
    say(f"wrote     {output}")


@app.command()
def schema(
    document: Annotated[str, typer.Argument(metavar="DOCUMENT", help="problem or plan.")] = "problem",
) -> None:
    """Prints the JSON Schema of problems or of plans."""
    from automap.gnn.plan import gnn_plan_schema
    from automap.gnn.problem import problem_schema

    known = {"problem": problem_schema, "plan": gnn_plan_schema}
    if document not in known:
        raise ProblemError("unknown", field="document", value=document, repair=one_of(known, document))
    print_json(known[document]())


def _write(output: Path | None, document: object) -> None:
    if output is not None:
        write_output(output, json.dumps(document, indent=1) + "\n")
