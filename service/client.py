"""The Python client of the REST service.

    client = AutomapClient("http://127.0.0.1:8080")
    model = client.upload_model(Path("model.onnx"))
    job = client.submit(model["id"], "4x8xA100-80GB", {"global_batch": 512}, budget="30s")
    for event in client.watch(job["id"]):
        print(event.kind, event.data)
    plan = client.plan(job["id"])

What the user can repair is raised as in the library (`automap.errors`), everything else as `RemoteError`. Requests that
reached nobody are sent again. `service.async_client.AsyncAutomapClient` is the same for asyncio.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from httpx_sse import connect_sse

from automap.gnn.plan import GnnPlan
from automap.gnn.problem import GnnProblem
from automap.plan import Plan
from service import calls
from service.calls import ENDED, Call, Document, JobEvent, Reconnecting
from service.problems import RemoteError


class AutomapClient:
    """A connection to a service; close it, or use it as a context manager.

    Args:
        url: address of the service.
        key: your key, where the service asks for one.
        timeout_s: seconds that a request may take; uploads of large models may need more.
        transport: in place of the network.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout_s: float = 60.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        network = calls.patient(transport or httpx.HTTPTransport(verify=calls.trusted(url)))
        self._http = httpx.Client(base_url=url, timeout=timeout_s, transport=network, headers=calls.headers(key))
        self._url = url

    def __enter__(self) -> AutomapClient:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        self._http.close()

    def upload_model(
        self,
        model: bytes | Path,
        *,
        name: str = "",
        dims: Mapping[str, int] | None = None,
        parameters: Sequence[str] = (),
        batch_dims: Mapping[str, int | None] | None = None,
    ) -> Document:
        """Uploads an ONNX file.

        Args:
            model: bytes or path of the file. Of a file of more than 64 MiB, and of one whose weights are in other files
                beside it, the weights are taken out here, and only the rest is sent.
            name: name for people; empty = the name of the graph.
            dims: sizes of symbolic dims.
            parameters: globs over graph inputs that are parameters.
            batch_dims: data input -> its batch dim where that is not the leading one; None = it has none.

        Returns:
            {id, name, num_bytes, summary}.

        Raises:
            ModelError: the file cannot be used.
        """
        return self._send(calls.upload_model(model, name=name, dims=dims, parameters=parameters, batch_dims=batch_dims))

    def submit(
        self, model: str, cluster: str | Mapping[str, Any], training: Mapping[str, Any], **options: Any
    ) -> Document:
        """Submits a job.

        Args:
            model: id of an uploaded model, or `zoo:NAME`.
            cluster: text of a preset, or a cluster document.
            training: training settings, at least `global_batch`.
            options: budget (`30s` or a number of evaluations), searchers (one after another, each with its share of
                the budget), tie (share of the error band within which plans are equally fast, and the plainest
                is returned), seed (of every random choice), hints (see `automap.hints`), trials ({top_k, steps,
                time_limit_s}: run plans before one of them is chosen), priority (a job with a higher one is begun
                before your other jobs), workers (that search at once; needs a budget in time), name (of the model in
                the plan); of an uploaded model also dims, batch_dims and parameters, as it was uploaded with.

        Returns:
            the job; its id is under `id`.

        Raises:
            UserError: the request is refused.
        """
        return self._send(calls.submit(model, cluster, training, options))

    def submit_gnn(self, problem: GnnProblem | Mapping[str, Any], **options: Any) -> Document:
        """Submits a search for a placement of distributed GNN training.

        Args:
            problem: the problem, or its document.
            options: budget (`20s` or a number of simulated placements), searcher, seed.

        Returns:
            the job, which is a job like any other; `gnn_plan` fetches its plan.

        Raises:
            UserError: the request is refused.
        """
        return self._send(calls.submit_gnn(problem, options))

    def job(self, job_id: str, *, wait_s: float = 0.0) -> Document:
        """A job; waits up to `wait_s` seconds for its end (the service may cut that short)."""
        return self._send(calls.get(calls.job_path(job_id), wait=wait_s), timeout=wait_s + 30)

    def jobs(
        self, *, limit: int | None = 100, states: Sequence[str] = (), model_id: str | None = None
    ) -> list[Document]:
        """The latest jobs, newest first.

        Args:
            limit: most jobs, of as many pages as it takes; None = all.
            states: only jobs in one of these states (queued, running, succeeded, failed, cancelled); none = all.
            model_id: only jobs of this model; None = all.
        """
        found = calls.Listing(limit, states, model_id)
        while not found.is_whole:
            found.add(self._send(found.call()))
        return found.jobs

    def watch(self, job_id: str, *, after: str = "") -> Iterator[JobEvent]:
        """The events of a job as they happen, until the one that says how it ended; none is lost or told twice.

        It connects again, for up to two minutes, where the service goes away.

        Args:
            job_id: id of the job.
            after: id of an event behind which to begin; empty = at the beginning.

        Raises:
            RemoteError: there is no such job, or the service stays away.
        """
        place = Reconnecting(after)
        while True:
            try:
                with connect_sse(self._http, "GET", calls.job_path(job_id, "/events"), **place.options) as source:
                    if source.response.status_code == httpx.codes.NO_CONTENT:
                        return
                    if source.response.is_error:
                        source.response.read()
                        calls.read(source.response, self._url)
                    place.connected = True
                    for sent in source.iter_sse():
                        if (event := place.heard(sent)) is not None:
                            yield event
                            if event.ends:
                                return
            except (RemoteError, httpx.TransportError) as fault:
                known = fault if isinstance(fault, RemoteError) else calls.fault_of(fault, self._url)
                time.sleep(place.pause_s(known))

    def wait(
        self,
        job_id: str,
        *,
        on_progress: Callable[[Document], None] | None = None,
        every_s: float = 0.5,
        timeout_s: float | None = None,
    ) -> Document:
        """Waits for the end of a job.

        Args:
            job_id: id of the job.
            on_progress: called with the job every `every_s` seconds and at its end.
            every_s: seconds between two calls of `on_progress`.
            timeout_s: largest number of seconds to wait; None = no limit.

        Returns:
            the job, which succeeded.

        Raises:
            UserError: the job failed for a reason that the user can repair, such as `NothingFits`.
            RemoteError: it failed otherwise, or was cancelled.
            TimeoutError: it has not ended in time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            job = self.job(job_id, wait_s=every_s if on_progress else 30.0)
            if on_progress is not None:
                on_progress(job)
            if job["state"] in ENDED:
                break
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"job {job_id} is still {job['state']}")
        calls.check_end(job)
        return job

    def cancel(self, job_id: str) -> Document:
        """Cancels a job that has not ended; returns the job."""
        return self._send(Call(method="POST", path=calls.job_path(job_id, "/cancel")))

    def delete(self, job_id: str) -> None:
        """Ends a job and removes all of it, its plan too."""
        self._send(Call(method="DELETE", path=calls.job_path(job_id)))

    def plan(self, job_id: str, *, so_far: bool = False) -> Plan:
        """The plan of a job that succeeded; with `so_far` also the best so far of one that has not.

        Raises:
            RemoteError: there is none (yet).
        """
        return Plan.from_json(self._send(calls.plan(job_id, so_far=so_far)))

    def gnn_plan(self, job_id: str) -> GnnPlan:
        """The plan of a job of `submit_gnn` that succeeded.

        Raises:
            RemoteError: there is none (yet).
        """
        return GnnPlan.from_json(self._send(calls.plan(job_id, so_far=False)))

    def export(self, job_id: str, target: str) -> Document:
        """The plan of a job as the configuration of a trainer: {target, version, files, launch, notes}.

        Raises:
            UserError: there is no such target, or it cannot express the plan.
        """
        return self._send(calls.export(job_id, target))

    def estimate(
        self, model: str, cluster: str | Mapping[str, Any], training: Mapping[str, Any], **options: Any
    ) -> Plan:
        """Prices a plan that somebody has made by hand, at once and without a job.

        Args:
            model, cluster, training: as in `submit`.
            options: degrees (dp, tp, pp, ... as of `automap estimate`), or plan, a plan document; hints, name, dims,
                batch_dims and parameters as in `submit`.

        Returns:
            the plan with its estimate.

        Raises:
            UserError: the request, the model, or a degree that does not fit.
        """
        return Plan.from_json(self._send(calls.estimate(model, cluster, training, options)))

    def clusters(self) -> Document:
        """Presets and known devices."""
        return self._send(calls.get("/v1/clusters"))

    def plan_schema(self) -> Document:
        """The published JSON Schema of plans."""
        return self._send(calls.get("/v1/schemas/plan"))

    def readiness(self) -> Document:
        """Whether jobs are accepted (`status`), and the number of workers that run them (`workers`)."""
        return self._send(calls.get("/readyz"))

    def version(self) -> str:
        """The version of the service."""
        return str(self._send(calls.get("/version"))["version"])

    def _send(self, call: Call, **more: Any) -> Document:
        try:
            response = self._http.request(call.method, call.path, **call.options, **more)
        except (httpx.InvalidURL, httpx.HTTPError) as fault:
            raise calls.fault_of(fault, self._url) from None
        return calls.read(response, self._url)
