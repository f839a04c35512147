"""The service below a path of a proxy: every address that it gives leads back to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest
import redis
from service_work import run

from service.client import AutomapClient
from service.settings import Settings

ROOT = "/planning/automap"
JOB = {"zoo": "gpt2:layers=2", "cluster": "8xV100-16GB", "training": {"global_batch": 64}, "budget": "200"}


@pytest.fixture
def below(settings: Settings, client: redis.Redis, serve_app: Any) -> Iterator[httpx.Client]:
    """The service as one reaches it through a proxy that leaves the path as it is."""
    with serve_app(settings.model_copy(update={"root_path": ROOT}), client) as found:
        yield found


def test_a_proxy_may_take_the_path_away_or_leave_it(below: httpx.Client) -> None:
    assert below.get("/v1/zoo").content == below.get(f"{ROOT}/v1/zoo").content
    assert below.get("/").content == below.get(f"{ROOT}/").content
    assert below.get(ROOT).headers["location"] == f"{ROOT}/"
    assert below.get(f"{ROOT}x/v1/zoo").status_code == 404
    assert below.get(f"{ROOT}{ROOT}/v1/zoo").status_code == 404


def test_addresses_in_answers_are_below_the_path(below: httpx.Client, light: Any) -> None:
    at = f"{below.base_url}{ROOT}/"
    assert below.get(urljoin(at, "openapi.json")).json()["servers"] == [{"url": ROOT}]
    # An upload, which may be larger than other bodies.
    model = below.post(urljoin(at, "v1/models"), content=light("squeezenet"))
    assert below.get(urljoin(at, model.headers["location"])).json()["id"] == model.json()["id"]
    job = below.post(urljoin(at, "v1/jobs"), json=JOB)
    for answer in (job.json(), below.get(urljoin(at, "v1/jobs")).json()["jobs"][0]):
        assert all(link.startswith(f"{ROOT}/v1/jobs/") for link in answer["links"].values())
        assert below.get(urljoin(at, answer["links"]["self"])).json()["links"] == answer["links"]
    assert job.headers["location"] == job.json()["links"]["self"]


def test_the_client_takes_an_address_with_a_path(below: httpx.Client) -> None:
    with AutomapClient(f"{below.base_url}{ROOT}") as client:
        job = client.submit("zoo:gpt2:layers=2", "8xV100-16GB", {"global_batch": 64}, budget="200")
        client.cancel(job["id"])
        assert [event.data["state"] for event in client.watch(job["id"])][-1] == "cancelled"


@pytest.mark.slow
def test_the_page_works_below_the_path(browser: Any, below: httpx.Client, client: redis.Redis, search: Any) -> None:
    job = below.post("/v1/jobs", json=JOB).json()["id"]
    run(job, client, search=search)
    page = browser.new_context().new_page()
    page.set_default_timeout(60_000)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{below.base_url}{ROOT}/")
    page.get_by_role("link", name="gpt2").click()
    page.get_by_role("heading", name="Files").wait_for()
    page.get_by_role("link", name="New search").click()
    page.get_by_label("Name of the model").wait_for()
    served = [url for url in asked if url.startswith("http")]
    assert served
    assert all(url.startswith(f"{below.base_url}{ROOT}/") for url in served), served
    page.context.close()
