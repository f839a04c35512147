"""Verbs of the service: those that run it, and those that speak to it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from automap.errors import UserError
from service import logs
from service.command.options import Job, JobArgument, JsonOption, OutputOption, UrlOption, gathers, read_job
from service.command.output import print_json, say, show_plan
from service.command.server_settings import read_settings
from service.jobs.run_job import MOST_WORKERS
from service.problems import RemoteError

if TYPE_CHECKING:
    from pathlib import Path

    from service.client import AutomapClient

app = typer.Typer()

URL = "http://127.0.0.1:8080"


@app.command()
def serve(
    host: Annotated[
        str, typer.Option(help="Address to bind; on any but 127.0.0.1, every request needs a key (docs/service.md).")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to bind; 0: any free one.")] = 8080,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, help="Number of worker processes, each with one job at a time; default: AUTOMAP_NUM_WORKERS, or 1."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Runs the service on this machine (REST, queue and workers), until Ctrl-C."""
    from service import serve as server

    settings = read_settings()
    if workers is not None:
        settings = settings.model_copy(update={"num_workers": workers})
    logs.configure(settings.log_level, settings.log_format)

    def ready(url: str) -> None:
        say(json.dumps({"url": url}) if as_json else f"AutoMAP serves {url} (Ctrl-C ends it)")
        sys.stdout.flush()

    server.serve(settings, host=host, port=port, on_ready=ready)


@app.command()
def worker(parent: Annotated[int | None, typer.Option(hidden=True)] = None) -> None:
    """Runs one more worker for a service, on any machine. AUTOMAP_REDIS_URL names the Redis of the service."""
    settings = read_settings()
    logs.configure(settings.log_level, settings.log_format)
    if settings.redis_url is None:
        repair = "Set AUTOMAP_REDIS_URL; `automap serve` on its own starts its workers itself."
        raise UserError("a worker needs the service's Redis", field="redis_url", value="unset", repair=repair)
    import redis

    from service.jobs.worker import main as work

    try:
        work(settings, parent=parent)
    except redis.ConnectionError as fault:
        from service.problems import problem

        raise RemoteError(problem(503, "Redis does not answer", str(fault))) from None


# Verbs against a server


@app.command()
@gathers(job=read_job)
def submit(
    job: Job,
    detach: Annotated[
        bool, typer.Option(help="Only print the id of the job; `automap watch` follows it later.")
    ] = False,
    priority: Annotated[int, typer.Option(min=-10, max=10, help="Your jobs with a higher priority begin first.")] = 0,
    workers: Annotated[
        int, typer.Option(min=1, max=MOST_WORKERS, help="Number of workers that search for this job at the same time.")
    ] = 1,
    url: UrlOption = URL,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sends a model to the service, follows the search to its end, and shows the plan."""
    from automap.cluster import parse_cluster
    from automap.records import to_json

    request, options = job.request, job.request.model
    cluster: str | dict[str, Any] = request.cluster
    if request.cluster.endswith(".json"):
        cluster = parse_cluster(request.cluster).to_json()
    about: dict[str, Any] = {"name": options.name, "dims": options.dims, "batch_dims": options.batch_dims}
    about["parameters"] = options.parameters
    with _client(url) as client:
        model = f"zoo:{options.zoo}" if options.zoo else client.upload_model(job.data, **about)["id"]
        with _saying_at_ctrl_c("the service may have accepted the job: `automap status` lists the latest jobs"):
            document = client.submit(
                model,
                cluster,
                request.training,
                budget=request.budget,
                searchers=request.searchers,
                tie=request.tie,
                seed=request.seed,
                hints=request.hints,
                trials=to_json(request.trials),
                priority=priority,
                workers=workers,
                **about,
            )
        if detach:
            print_json(document) if as_json else say(document["id"])
            _say_if_no_worker(client, [document])
            return
        say(f"job {document['id']}", err=True)
        _follow(client, document["id"])
        found = client.plan(document["id"])
    show_plan(found, output, as_json=as_json)


@app.command()
def status(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="The job's id; default: the latest jobs.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of jobs to list, the latest first.")] = 20,
    url: UrlOption = URL,
    as_json: JsonOption = False,
) -> None:
    """Shows the state of a job, or of the latest jobs."""
    with _client(url) as client:
        # One job more than is shown tells whether there are further ones.
        found = [client.job(job)] if job is not None else client.jobs(limit=limit + 1)
        documents = found[:limit]
        if as_json:
            print_json(documents[0] if job is not None else {"jobs": documents})
        else:
            _list(documents, limit=limit, are_further=len(found) > limit)
        _say_if_no_worker(client, documents)


@app.command()
def watch(job: JobArgument, url: UrlOption = URL, output: OutputOption = None, as_json: JsonOption = False) -> None:
    """Follows a job to its end and shows its plan."""
    with _client(url) as client:
        _follow(client, job)
        _show_plan_of(client, job, output, so_far=False, as_json=as_json)


@app.command()
def cancel(job: JobArgument, url: UrlOption = URL, as_json: JsonOption = False) -> None:
    """Cancels a job; the best plan that it has found stays (`plan --so-far`)."""
    with _client(url) as client:
        document = client.cancel(job)
    print_json(document) if as_json else say(_job_line(document))


@app.command()
def delete(job: JobArgument, url: UrlOption = URL, as_json: JsonOption = False) -> None:
    """Cancels a job and removes it from the service, its plan included."""
    with _client(url) as client:
        client.delete(job)
    print_json({"id": job}) if as_json else say(f"{job} is deleted")


@app.command()
def plan(
    job: JobArgument,
    so_far: Annotated[
        bool,
        typer.Option(
            "--so-far", help="Of a job that runs, has failed or was cancelled: the best plan that it has found."
        ),
    ] = False,
    url: UrlOption = URL,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetches the plan of a job that succeeded."""
    with _client(url) as client:
        _show_plan_of(client, job, output, so_far=so_far, as_json=as_json)


# What they share


def _show_plan_of(client: AutomapClient, job_id: str, output: Path | None, *, so_far: bool, as_json: bool) -> None:
    """Shows the plan of a job, which is a placement if the job is one of distributed GNN training."""
    if _is_gnn(client.job(job_id)):
        from service.command.gnn_verbs import show_placement

        show_placement(client.gnn_plan(job_id), output, as_json=as_json)
    else:
        show_plan(client.plan(job_id, so_far=so_far), output, as_json=as_json)


def _list(jobs: Sequence[Mapping[str, Any]], *, limit: int, are_further: bool) -> None:
    """Shows jobs, a line each, and says whether there are further ones, or none at all."""
    for job in jobs:
        say(_job_line(job))
    if are_further:
        say(f"there are further jobs; `automap status --limit {10 * limit}` lists more of them", err=True)
    if not jobs:
        say("no jobs; `automap submit` makes one")


def _is_gnn(job: Mapping[str, Any]) -> bool:
    return job["request"] is not None and job["request"].get("gnn") is not None


def _follow(client: AutomapClient, job_id: str) -> None:
    """Shows the progress of a job until it ends; Ctrl-C ends only this command, and says so.

    Raises:
        UserError, RemoteError: what became of the job otherwise; see `AutomapClient.wait`.
    """
    from service.command.terminal import progress_line

    text = f"the job goes on: `automap watch {job_id}` follows it, `automap cancel {job_id}` ends it"
    with _saying_at_ctrl_c(text):
        _say_if_no_worker(client, [client.job(job_id)])
        with progress_line() as show:
            for event in client.watch(job_id):
                told = event.data
                if event.kind == "progress":
                    show(told["searcher"], told["fraction"], told["evaluations"], told["best_step_time_s"])
                else:
                    show(told["state"], 1.0 if event.ends else 0.0, 0, None)
        client.wait(job_id)


def _say_if_no_worker(client: AutomapClient, jobs: Sequence[Mapping[str, Any]]) -> None:
    """Says on stderr that jobs wait because the service has no worker, if that is so."""
    waiting = sum(job["state"] == "queued" for job in jobs)
    # A proxy may keep the address of the readiness to itself; the jobs are accepted all the same.
    with contextlib.suppress(UserError, RemoteError):
        if waiting and client.readiness()["workers"] == 0:
            who = "the job waits" if waiting == 1 else f"{waiting} jobs wait"
            say(f"the service has no worker now; {who} until one starts (`automap worker`)", err=True)


@contextlib.contextmanager
def _saying_at_ctrl_c(text: str) -> Iterator[None]:
    """A context that says on stderr what becomes of a job if Ctrl-C ends the command."""
    try:
        yield
    except KeyboardInterrupt:
        say(text, err=True)
        raise


def _job_line(job: Mapping[str, Any]) -> str:
    request = job["request"]
    if request is None:
        return f"{job['id']}  {job['state']:9}  {job['problem']['detail']}"
    place = request["cluster"] if isinstance(request["cluster"], str) else request["cluster"].get("name", "")
    what = f"{request['model']['name'] or job['model_id'][:12]} on {place}"
    if _is_gnn(job):
        what = f"GNN training on {len(request['gnn']['machines'])} machines"
    text = f"{job['id']}  {job['state']:9}  {what}"
    progress = job["progress"] or {}
    if job["state"] == "running" and progress:
        text += f"  {progress['fraction']:.0%}"
    step_s = job["step_time_s"] or progress.get("best_step_time_s")
    if step_s is not None:
        from automap.amounts import in_seconds

        text += f"  {'step' if job['step_time_s'] else 'best'} {in_seconds(step_s)}"
    return text + (f"  {job['problem']['detail']}" if job["problem"] else "")


def _client(url: str) -> AutomapClient:
    from service.client import AutomapClient

    # An empty variable is what scripts have that know of no key.
    return AutomapClient(url, key=os.environ.get("AUTOMAP_KEY") or None)
