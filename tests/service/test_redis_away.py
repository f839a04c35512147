"""A service whose Redis stops, is cut off, is slow, dies or is full: it refuses what it cannot keep, and goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import redis

pytestmark = pytest.mark.slow

JOB = {"zoo": "gpt2:layers=2", "cluster": "8xV100-16GB", "training": {"global_batch": 64}, "searchers": ["mcmc"]}
RECOVERY_S = 10.0


def begun(http: httpx.Client, budget: str, until: Callable[..., Any]) -> str:
    """A path of a job that runs."""
    path = "/v1/jobs/" + http.post("/v1/jobs", json={**JOB, "budget": budget}).raise_for_status().json()["id"]
    until(lambda: http.get(path).json()["progress"])
    return path


def refused(http: httpx.Client) -> None:
    """Checks that nothing is accepted, and that the service itself is well."""
    submission = {"json": {**JOB, "budget": 1}, "headers": {"Idempotency-Key": "k"}}
    calls: list[tuple[str, str, Any]] = [
        ("POST", "/v1/jobs", submission),
        ("GET", "/readyz", {}),
        ("GET", "/v1/jobs", {}),
    ]
    with ThreadPoolExecutor() as pool:
        answers = pool.map(lambda call: http.request(call[0], call[1], **call[2]), calls)
        assert http.get("/healthz").status_code == 200
        for answer in answers:
            assert answer.status_code == 503, answer.text
            assert int(answer.headers["Retry-After"]) >= 1


def ended(http: httpx.Client, path: str, until: Callable[..., Any]) -> tuple[str, int]:
    """State and number of runs of a job at its end."""
    job = until(lambda: found if (found := http.get(path, params={"wait": 20}).json())["finished_at"] else None)
    return job["state"], job["attempt"]


def test_a_redis_that_stops_and_dies(on_redis: Any, until: Callable[..., Any]) -> None:
    service, server = on_redis
    with httpx.Client(base_url=service.url, timeout=30) as http, redis.Redis.from_url(server.url) as store:
        path = begun(http, "4s", until)
        os.kill(server.pid, signal.SIGSTOP)
        refused(http)
        os.kill(server.pid, signal.SIGCONT)
        began = time.monotonic()
        until(lambda: http.get(path).status_code == 200)
        cuts = time.monotonic()
        while time.monotonic() - cuts < 1.0:
            store.client_kill_filter(_type="normal", skipme=True)
        assert http.get(path).status_code == 200
        store.client_pause(400)
        assert http.get(path).status_code == 200
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: not server.is_alive())
        refused(http)
        server.start()
        assert until(lambda: http.get("/readyz").status_code == 200)
        assert time.monotonic() - began < RECOVERY_S
        # What was refused is not there; sent again under its key it is, once.
        assert len(http.get("/v1/jobs").json()["jobs"]) == 1
        again = [http.post("/v1/jobs", json={**JOB, "budget": 1}, headers={"Idempotency-Key": "k"}) for _ in "ab"]
        assert len({answer.json()["id"] for answer in again}) == 1
        assert ended(http, path, until) == ("succeeded", 1)
        assert ended(http, again[0].headers["Location"], until) == ("succeeded", 1)


def contents(store: Any) -> dict[bytes, Any]:
    """Everything that the service keeps in a Redis; RQ's notes of its workers come and go."""
    return {key: store.dump(key) for key in store.scan_iter("automap:*")}


def test_a_redis_that_is_full(on_redis: Any, until: Callable[..., Any], light: Callable[[str], bytes]) -> None:
    service, server = on_redis
    with httpx.Client(base_url=service.url, timeout=30) as http, redis.Redis.from_url(server.url) as store:
        old = "/v1/jobs/" + http.post("/v1/jobs", json={**JOB, "budget": 1}).raise_for_status().json()["id"]
        assert ended(http, old, until) == ("succeeded", 1)
        path = begun(http, "3s", until)
        store.config_set("maxmemory", 1)
        full_at = time.monotonic()
        before = contents(store)
        for method, place, more in (
            ("POST", "/v1/jobs", {"json": {**JOB, "budget": 1}}),
            ("POST", "/v1/models", {"content": light("squeezenet")}),
            ("POST", f"{path}/cancel", {}),
        ):
            answer = http.request(method, place, **more)
            assert answer.status_code == 507, answer.text
            assert answer.json()["title"] == "The store is full"
            assert answer.json()["field"] == "store" and answer.json()["repair"].startswith("Delete models and jobs")
        assert http.get("/readyz").status_code == 503
        assert http.get("/healthz").status_code == http.get(path).status_code == 200
        assert contents(store) == before
        assert http.delete(old).status_code == 204  # which makes room
        # Until the search is over and its plan waits for room.
        until(lambda: time.monotonic() - full_at > 4.0)
        assert http.get(path).json()["state"] == "running"
        store.config_set("maxmemory", 0)
        assert ended(http, path, until) == ("succeeded", 1)
        assert http.get("/readyz").status_code == 200
        assert http.get(old).status_code == 404


def test_a_redis_that_has_lost_its_copies(on_redis: Any, until: Callable[..., Any]) -> None:
    """With `min-replicas-to-write` it takes no writes meanwhile: the search goes on, and its plan waits."""
    service, server = on_redis
    with httpx.Client(base_url=service.url, timeout=30) as http, redis.Redis.from_url(server.url) as store:
        path = begun(http, "2s", until)
        store.config_set("min-replicas-to-write", 1)
        lost_at = time.monotonic()
        answer = http.post("/v1/jobs", json={**JOB, "budget": 1})
        assert answer.status_code == 503 and answer.headers["retry-after"]
        until(lambda: time.monotonic() - lost_at > 3.0)
        assert http.get(path).json()["state"] == "running"
        store.config_set("min-replicas-to-write", 0)
        assert ended(http, path, until) == ("succeeded", 1)
