from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
import redis
import service_work
from tiny_file import mlp

from automap.errors import ClusterError, ModelError, NothingFits, UserError
from service import calls
from service.async_client import AsyncAutomapClient
from service.calls import JobEvent
from service.client import AutomapClient
from service.http.routes import events
from service.jobs.run_job import JobRequest, ModelOptions
from service.jobs.store import Store
from service.problems import RemoteError

TRAINING = {"global_batch": 64}


@pytest.fixture
def automap(api: httpx.Client) -> Iterator[AutomapClient]:
    with AutomapClient(str(api.base_url)) as found:
        yield found


@pytest.fixture
def job(automap: AutomapClient, light: Callable[[str], bytes]) -> dict[str, Any]:
    model = automap.upload_model(light("squeezenet"), name="net")
    return automap.submit(model["id"], "8xV100-16GB", TRAINING, budget=7)


def test_a_file_is_sent_without_weights_but_with_small_constants_beside_it(
    automap: AutomapClient, tmp_path: Path
) -> None:
    """As `torch.onnx.export` writes them by default: all tensors in a file beside the graph."""
    made = onnx.load_from_string(mlp())
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.array([2, 0]), "i"))
    made.graph.node.add(op_type="Gather", input=["y", "i"], output=["z"]).attribute.append(
        onnx.helper.make_attribute("axis", 1)
    )
    made.graph.output[0].name, made.graph.output[0].type.tensor_type.shape.dim[1].dim_value = "z", 2
    path = tmp_path / "model.onnx"
    onnx.save(made, path, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    with pytest.raises(ModelError, match="small constant"):
        automap.upload_model(path.read_bytes())
    assert automap.upload_model(path)["summary"]["num_parameters"] == 32


def test_from_upload_to_plan(automap: AutomapClient, job: dict[str, Any], client: redis.Redis, search: Any) -> None:
    service_work.run(job["id"], client, search=search)
    seen: list[dict[str, Any]] = []
    assert automap.wait(job["id"], on_progress=seen.append)["state"] == "succeeded"
    assert seen[-1]["progress"]["best_step_time_s"] == 0.5
    plan = automap.plan(job["id"])
    assert plan.search is not None
    assert plan.search.found_by == "fake"
    assert automap.jobs()[0]["id"] == job["id"]
    assert automap.plan_schema()["title"].startswith("AutoMAP plan")
    assert automap.version()
    assert automap.clusters()["presets"]


def test_jobs_are_listed_over_all_pages(automap: AutomapClient, store: Store) -> None:
    model, hints = ModelOptions(name="net"), {"parameters": ["x" * 900_000]}
    large = JobRequest(cluster="8xA100", training=TRAINING, model=model, budget="7", hints=hints)
    ids = [store.create("m" if number % 2 else "other", large).id for number in range(12)][::-1]
    for job_id in ids[6:]:
        store.cancel(job_id)
    # A page holds five of these.
    assert len(automap._send(calls.get("/v1/jobs"))["jobs"]) == 5
    assert [job["id"] for job in automap.jobs()] == ids
    assert [job["id"] for job in automap.jobs(limit=7)] == ids[:7]
    assert [job["id"] for job in automap.jobs(limit=None, states=["queued", "running"], model_id="m")] == ids[:6:2]
    assert automap.jobs(states=["failed"]) == []
    with pytest.raises(UserError, match="limit"):
        automap.jobs(limit=0)

    async def ask() -> list[dict[str, Any]]:
        async with AsyncAutomapClient(str(automap._url)) as other:
            return await other.jobs(limit=9, states=["cancelled"])

    assert [job["id"] for job in asyncio.run(ask())] == ids[6:]


def test_a_named_model_needs_no_upload(automap: AutomapClient, client: redis.Redis, search: Any) -> None:
    job = automap.submit("zoo:gpt2:layers=2", "8xV100-16GB", TRAINING, budget=7)
    service_work.run(job["id"], client, search=search)
    assert automap.wait(job["id"])["state"] == "succeeded"


def test_faults_are_raised_as_in_the_library(automap: AutomapClient, job: dict[str, Any], store: Store) -> None:
    with pytest.raises(ModelError) as model:
        automap.upload_model(b"text")
    assert model.value.field == "model"
    with pytest.raises(ClusterError):
        automap.submit(job["model_id"], "8xZ9000", TRAINING)
    with pytest.raises(UserError):
        automap.submit(job["model_id"], "8xV100-16GB", TRAINING, seed=-1)
    with pytest.raises(RemoteError) as early:
        automap.plan(job["id"])
    assert early.value.status == 409
    store.fail(job["id"], None, {"type": "urn:automap:problem:nothing-fits", "message": "too big", "repair": "More."})
    with pytest.raises(NothingFits, match="too big"):
        automap.wait(job["id"])


def test_a_cancelled_job_has_no_plan(automap: AutomapClient, job: dict[str, Any]) -> None:
    assert automap.cancel(job["id"])["state"] == "cancelled"
    with pytest.raises(RemoteError, match="cancelled"):
        automap.wait(job["id"])


def test_waiting_has_an_end(automap: AutomapClient, job: dict[str, Any]) -> None:
    with pytest.raises(TimeoutError):
        automap.wait(job["id"], on_progress=lambda document: None, every_s=0.01, timeout_s=0.05)


def test_a_job_is_watched_to_its_end(
    automap: AutomapClient, job: dict[str, Any], client: redis.Redis, search: Any
) -> None:
    service_work.run(job["id"], client, search=search)
    told = list(automap.watch(job["id"]))
    assert [event.data["state"] for event in told if event.kind == "state"] == ["queued", "running", "succeeded"]
    assert [event.ends for event in told] == [False] * (len(told) - 1) + [True]
    assert list(automap.watch(job["id"], after=told[1].id)) == told[2:]
    assert list(automap.watch(job["id"], after=told[-1].id)) == []
    with pytest.raises(RemoteError, match="No such job"):
        list(automap.watch("nobody"))


def test_both_clients_are_alike(api: httpx.Client, job: dict[str, Any], client: redis.Redis, search: Any) -> None:
    service_work.run(job["id"], client, search=search)

    async def ask() -> tuple[list[JobEvent], Any]:
        async with AsyncAutomapClient(str(api.base_url)) as own:
            told = [event async for event in own.watch(job["id"])]
            assert (await own.wait(job["id"]))["state"] == "succeeded"
            assert (await own.jobs())[0]["id"] == job["id"]
            with pytest.raises(RemoteError, match="No such job"):
                await own.job("nobody")
            return told, await own.plan(job["id"])

    told, plan = asyncio.run(ask())
    with AutomapClient(str(api.base_url)) as other:
        assert told == list(other.watch(job["id"]))
        assert plan == other.plan(job["id"])
    names = {name for name in vars(AutomapClient) if not name.startswith("_")}
    assert names == {name for name in vars(AsyncAutomapClient) if not name.startswith("_")}


class Failing(httpx.BaseTransport):
    """Cuts connections after some bytes, and says now and then that it is busy."""

    def __init__(self) -> None:
        self.calls = 0
        self._real = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.calls += 1
        if self.calls % 3 == 1:
            raise httpx.ConnectError("cut")
        if self.calls % 3 == 2:
            return httpx.Response(503, json={"title": "busy", "status": 503}, headers={"Retry-After": "0"})
        answer = self._real.handle_request(request)
        return httpx.Response(answer.status_code, headers=answer.headers, stream=_Cut(answer))

    def close(self) -> None:
        self._real.close()


class _Cut(httpx.SyncByteStream):
    def __init__(self, answer: httpx.Response) -> None:
        self._answer = answer

    def __iter__(self) -> Iterator[bytes]:
        left = 700
        for data in self._answer.iter_raw():
            yield data[:left]
            left -= len(data)
            if left <= 0:
                raise httpx.ReadError("cut")

    def close(self) -> None:
        self._answer.close()


def test_a_bad_network_loses_no_event(
    api: httpx.Client, automap: AutomapClient, job: dict[str, Any], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    token = store.begin(job["id"])
    assert token is not None
    for number in range(30):
        store.set_progress(job["id"], token, {"evaluations": number})
    store.cancel(job["id"])
    transport = Failing()
    with AutomapClient(str(api.base_url), transport=transport) as unlucky:
        assert list(unlucky.watch(job["id"])) == list(automap.watch(job["id"]))
    assert transport.calls > 10


def test_a_job_that_is_sent_again_has_the_same_key() -> None:
    keys = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["idempotency-key"])
        return httpx.Response(503 if len(keys) < 3 else 202, json={"id": "x"}, headers={"Retry-After": "0"})

    with AutomapClient("http://x", key="amk_1", transport=httpx.MockTransport(answer)) as client:
        assert client.submit("zoo:gpt2", "8xV100-16GB", TRAINING) == {"id": "x"}
        client.submit("zoo:gpt2", "8xV100-16GB", TRAINING)
    assert len(keys) == 4 and keys[0] == keys[1] == keys[2] != keys[3]


def test_a_client_without_a_service_says_how_to_start_one() -> None:
    with AutomapClient("http://127.0.0.1:9") as client, pytest.raises(RemoteError, match="automap serve"):
        client.version()
    with AutomapClient("nonsense") as client, pytest.raises(UserError, match="URL"):
        client.version()


def test_an_address_with_a_path_too_much(api: httpx.Client) -> None:
    with AutomapClient(f"{api.base_url}/v1") as client, pytest.raises(UserError, match="without /v1") as fault:
        client.jobs()
    assert fault.value.field == "url"


@pytest.mark.parametrize(
    ("status", "more"),
    [(200, {"text": "<html>"}), (200, {"json": [1]}), (403, {"json": ["no"]}), (403, {"json": {"status": "error"}})],
)
def test_an_answer_of_another_server_is_an_error(status: int, more: dict[str, Any]) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, **more))
    with AutomapClient("http://x", transport=transport) as client, pytest.raises(RemoteError, match="Not an AutoMAP"):
        client.version()


@pytest.mark.parametrize("is_async", [False, True])
def test_silence_is_no_event(
    api: httpx.Client, job: dict[str, Any], store: Store, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    monkeypatch.setattr(events, "PING_S", 0.01)
    # The stream says ten times and more that nothing happens, behind its first event.
    end, told = threading.Timer(0.15, store.cancel, (job["id"],)), list[JobEvent]()

    def hear(event: JobEvent) -> None:
        told.append(event)
        if not event.ends:
            end.start()

    async def watch() -> None:
        async with AsyncAutomapClient(str(api.base_url)) as client:
            async for event in client.watch(job["id"]):
                hear(event)

    if is_async:
        asyncio.run(watch())
    else:
        with AutomapClient(str(api.base_url)) as client:
            for event in client.watch(job["id"]):
                hear(event)
    end.join()
    assert [event.data["state"] for event in told] == ["queued", "cancelled"]
