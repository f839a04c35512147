"""The Python client of the REST service for asyncio; see `service.client`, whose methods these are.

async with AsyncAutomapClient("http://127.0.0.1:8080") as client:
    job = await client.submit("zoo:gpt2-xl", "4x8xA100-80GB", {"global_batch": 512})
    async for event in client.watch(job["id"]):
        print(event.kind, event.data)
    plan = await client.plan(job["id"])
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from httpx_sse import aconnect_sse

from automap.gnn.plan import GnnPlan
from automap.gnn.problem import GnnProblem
from automap.plan import Plan
from service import calls
from service.calls import ENDED, Call, Document, JobEvent, Reconnecting
from service.problems import RemoteError


class AsyncAutomapClient:
    """A connection to a service; close it, or use it as an asynchronous context manager.

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
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        network = calls.patient(transport or httpx.AsyncHTTPTransport(verify=calls.trusted(url)))
        self._http = httpx.AsyncClient(base_url=url, timeout=timeout_s, transport=network, headers=calls.headers(key))
        self._url = url

    async def __aenter__(self) -> AsyncAutomapClient:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection."""
        await self._http.aclose()

    async def upload_model(
        self,
        model: bytes | Path,
        *,
        name: str = "",
        dims: Mapping[str, int] | None = None,
        parameters: Sequence[str] = (),
        batch_dims: Mapping[str, int | None] | None = None,
    ) -> Document:
        """Uploads an ONNX file, see `AutomapClient.upload_model`."""
        # In a thread, since a file may be large.
        call = await asyncio.to_thread(
            calls.upload_model, model, name=name, dims=dims, parameters=parameters, batch_dims=batch_dims
        )
        return await self._send(call)

    async def submit(
        self, model: str, cluster: str | Mapping[str, Any], training: Mapping[str, Any], **options: Any
    ) -> Document:
        """Submits a job, see `AutomapClient.submit`."""
        return await self._send(calls.submit(model, cluster, training, options))

    async def submit_gnn(self, problem: GnnProblem | Mapping[str, Any], **options: Any) -> Document:
        """Submits a search for a placement of distributed GNN training, see `AutomapClient.submit_gnn`."""
        return await self._send(calls.submit_gnn(problem, options))

    async def job(self, job_id: str, *, wait_s: float = 0.0) -> Document:
        """A job; waits up to `wait_s` seconds for its end (the service may cut that short)."""
        return await self._send(calls.get(calls.job_path(job_id), wait=wait_s), timeout=wait_s + 30)

    async def jobs(
        self, *, limit: int | None = 100, states: Sequence[str] = (), model_id: str | None = None
    ) -> list[Document]:
        """The latest jobs, newest first; see `AutomapClient.jobs`."""
        found = calls.Listing(limit, states, model_id)
        while not found.is_whole:
            found.add(await self._send(found.call()))
        return found.jobs

    async def watch(self, job_id: str, *, after: str = "") -> AsyncIterator[JobEvent]:
        """The events of a job as they happen, see `AutomapClient.watch`."""
        place = Reconnecting(after)
        while True:
            try:
                async with aconnect_sse(
                    self._http, "GET", calls.job_path(job_id, "/events"), **place.options
                ) as source:
                    if source.response.status_code == httpx.codes.NO_CONTENT:
                        return
                    if source.response.is_error:
                        await source.response.aread()
                        calls.read(source.response, self._url)
                    place.connected = True
                    async for sent in source.aiter_sse():
                        if (event := place.heard(sent)) is not None:
                            yield event
                            if event.ends:
                                return
            except (RemoteError, httpx.TransportError) as fault:
                known = fault if isinstance(fault, RemoteError) else calls.fault_of(fault, self._url)
                await asyncio.sleep(place.pause_s(known))

    async def wait(self, job_id: str) -> Document:
        """Waits for the end of a job, see `AutomapClient.wait`; `asyncio.timeout` limits it."""
        job = await self.job(job_id, wait_s=30.0)
        while job["state"] not in ENDED:
            job = await self.job(job_id, wait_s=30.0)
        calls.check_end(job)
        return job

    async def cancel(self, job_id: str) -> Document:
        """Cancels a job that has not ended; returns the job."""
        return await self._send(Call(method="POST", path=calls.job_path(job_id, "/cancel")))

    async def delete(self, job_id: str) -> None:
        """Ends a job and removes all of it, its plan too."""
        await self._send(Call(method="DELETE", path=calls.job_path(job_id)))

    async def plan(self, job_id: str, *, so_far: bool = False) -> Plan:
        """The plan of a job that succeeded, see `AutomapClient.plan`."""
        return Plan.from_json(await self._send(calls.plan(job_id, so_far=so_far)))

    async def gnn_plan(self, job_id: str) -> GnnPlan:
        """The plan of a job of `submit_gnn`, see `AutomapClient.gnn_plan`."""
        return GnnPlan.from_json(await self._send(calls.plan(job_id, so_far=False)))

    async def export(self, job_id: str, target: str) -> Document:
        """The plan of a job as the configuration of a trainer, see `AutomapClient.export`."""
        return await self._send(calls.export(job_id, target))

    async def estimate(
        self, model: str, cluster: str | Mapping[str, Any], training: Mapping[str, Any], **options: Any
    ) -> Plan:
        """Prices a plan that somebody has made by hand, see `AutomapClient.estimate`."""
        return Plan.from_json(await self._send(calls.estimate(model, cluster, training, options)))

    async def clusters(self) -> Document:
        """Presets and known devices."""
        return await self._send(calls.get("/v1/clusters"))

    async def plan_schema(self) -> Document:
        """The published JSON Schema of plans."""
        return await self._send(calls.get("/v1/schemas/plan"))

    async def readiness(self) -> Document:
        """Whether jobs are accepted (`status`), and the number of workers that run them (`workers`)."""
        return await self._send(calls.get("/readyz"))

    async def version(self) -> str:
        """The version of the service."""
        return str((await self._send(calls.get("/version")))["version"])

    async def _send(self, call: Call, **more: Any) -> Document:
        try:
            response = await self._http.request(call.method, call.path, **call.options, **more)
        except (httpx.InvalidURL, httpx.HTTPError) as fault:
            raise calls.fault_of(fault, self._url) from None
        return calls.read(response, self._url)
