"""The Python client of the REST service.

    client = AutomapClient("http://127.0.0.1:8080")
    model = client.upload_model(Path("model.onnx"))
    job = client.submit(model["id"], "4x8xA100-80GB", {"global_batch": 512}, budget="30s")
    client.wait(job["id"])
    plan = client.plan(job["id"])

What the user can repair is raised as in the library (`automap.errors`), everything else as `RemoteError`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from automap.errors import UserError
from automap.plan import Plan
from service.problems import RemoteError, error_of, problem

Document = dict[str, Any]
ENDED = ("succeeded", "failed", "cancelled")


class AutomapClient:
    """A connection to a service; close it, or use it as a context manager.

    Args:
        url: address of the service.
        api_key: the key that the service asks for; None = that of the environment, AUTOMAP_API_KEY, if there is one.
        timeout_s: seconds that a request may take; uploads of large models may need more.
        transport: in place of the network.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        key = api_key or os.environ.get("AUTOMAP_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=url, timeout=timeout_s, transport=transport, headers=headers)
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
            model: bytes or path of the file.
            name: name for people; empty = the name of the graph.
            dims: sizes of symbolic dims.
            parameters: globs over graph inputs that are parameters.
            batch_dims: data input -> its batch dim where that is not the leading one; None = it has none.

        Returns:
            {id, name, num_bytes, summary}.

        Raises:
            ModelError: the file cannot be used.
        """
        data = model if isinstance(model, bytes) else model.read_bytes()
        query: list[tuple[str, str | int | float | bool | None]] = [("name", name)]
        query += [("dim", f"{key}={size}") for key, size in (dims or {}).items()]
        query += [("parameters", glob) for glob in parameters]
        places = {name: "none" if place is None else place for name, place in (batch_dims or {}).items()}
        query += [("batch_dim", f"{name}={place}") for name, place in places.items()]
        return self._call(
            "POST", "/v1/models", params=query, content=data, headers={"Content-Type": "application/octet-stream"}
        )

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
                leaves), seed (of every random choice), hints (see `automap.hints`), trials ({top_k, steps,
                time_limit_s}: run plans before one of them is chosen), name (of the model in the plan); of an
                uploaded model also dims, batch_dims and parameters, as it was uploaded with.

        Returns:
            the job; its id is under `id`.

        Raises:
            UserError: the request is refused.
        """
        named = model.startswith("zoo:")
        source = {"zoo": model.removeprefix("zoo:")} if named else {"model_id": model}
        body = {**source, "cluster": cluster, "training": training, **options}
        return self._call("POST", "/v1/jobs", json=body)

    def job(self, job_id: str, *, wait_s: float = 0.0) -> Document:
        """A job; waits up to `wait_s` seconds for its end (the service may cut that short)."""
        return self._call("GET", f"/v1/jobs/{job_id}", params={"wait": wait_s}, timeout=wait_s + 30)

    def jobs(self, *, limit: int = 100) -> list[Document]:
        """The latest jobs, newest first."""
        found: list[Document] = self._call("GET", "/v1/jobs", params={"limit": limit})["jobs"]
        return found

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
        if job["state"] == "failed":
            raise error_of(job["problem"])
        if job["state"] == "cancelled":
            raise RemoteError(problem(409, "The job was cancelled"))
        return job

    def cancel(self, job_id: str) -> Document:
        """Cancels a job that has not ended; returns the job."""
        return self._call("POST", f"/v1/jobs/{job_id}/cancel")

    def plan(self, job_id: str) -> Plan:
        """The plan of a job that succeeded.

        Raises:
            RemoteError: there is none (yet).
        """
        return Plan.from_json(self._call("GET", f"/v1/jobs/{job_id}/plan"))

    def clusters(self) -> Document:
        """Presets and known devices."""
        return self._call("GET", "/v1/clusters")

    def plan_schema(self) -> Document:
        """The published JSON Schema of plans."""
        return self._call("GET", "/v1/schemas/plan")

    def version(self) -> str:
        """The version of the service."""
        return str(self._call("GET", "/version")["version"])

    def _call(self, method: str, path: str, **options: Any) -> Document:
        try:
            response = self._http.request(method, path, **options)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as fault:
            repair = "Write it as in http://127.0.0.1:8080."
            raise UserError(f"not a URL ({fault})", field="url", value=self._url, repair=repair) from None
        except httpx.HTTPError as fault:
            text = f"{self._url} does not answer ({fault}). Is `automap serve` running there?"
            raise RemoteError(problem(0, "No answer", text)) from None
        try:
            document = response.json()
        except ValueError:
            document = problem(response.status_code, "Not an AutoMAP service", f"{self._url} answered something else.")
            raise RemoteError(document) from None
        if response.is_error:
            raise error_of(document)
        return dict(document)
