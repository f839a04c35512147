from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import redis
import service_work

from automap.errors import ClusterError, ModelError, NothingFits, UserError
from service.client import AutomapClient
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


def test_nobody_there() -> None:
    with AutomapClient("http://127.0.0.1:9") as client, pytest.raises(RemoteError, match="automap serve"):
        client.version()
    with AutomapClient("nonsense") as client, pytest.raises(UserError, match="URL"):
        client.version()


def test_somebody_else_there() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text="<html>"))
    with AutomapClient("http://x", transport=transport) as client, pytest.raises(RemoteError, match="Not an AutoMAP"):
        client.version()
