"""Faults that were found from outside, of which no other module shows that they are gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis

from automap.hints import MAX_CONSTRAINTS
from ir import lifetime
from service import processes
from service.command.main import main
from service.embedded_redis import EmbeddedRedis
from service.jobs.connection import connect
from service.jobs.delivery import workers
from service.jobs.run_job import JobRequest, ModelOptions
from service.jobs.store import Store
from service.settings import MIB, Settings

JOB = {"zoo": "gpt2:layers=2", "cluster": "8xV100-16GB", "training": {"global_batch": 64}, "budget": 1}
MANY = 40_000
CONSTRAINTS = [{"scope": f"layers.{number}.*", "replicate": True} for number in range(MANY)]
COSTS = {f"layers.{number}.mlp": {"forward_s": 1e-3} for number in range(MANY)}


@pytest.fixture
def roomy(settings: Settings, client: redis.Redis, serve_app: Any) -> Iterator[httpx.Client]:
    """A service that takes large requests."""
    with serve_app(settings.model_copy(update={"max_request_bytes": 64 * MIB}), client) as found:
        yield found


def spent_s(work: Callable[[], httpx.Response]) -> tuple[httpx.Response, float]:
    """An answer, and the processor time that this process, which serves the application, and its children took."""

    def family_s() -> float:
        own = [psutil.Process(), *psutil.Process().children(recursive=True)]
        return sum(times.user + times.system for times in (process.cpu_times() for process in own))

    before = family_s()
    return work(), family_s() - before


@pytest.mark.parametrize(
    ("hints", "field"),
    [({"constraints": CONSTRAINTS}, "hints.constraints"), ({"costs": COSTS}, "hints.costs")],
    ids=["constraints", "costs"],
)
def test_too_many_to_check_are_refused_at_once(
    api: httpx.Client, roomy: httpx.Client, hints: dict[str, Any], field: str
) -> None:
    body = json.dumps({**JOB, "hints": hints}).encode()
    refused = api.post("/v1/jobs", content=body, headers={"content-type": "application/json"})
    assert refused.status_code == 413, "larger than a request is by default"
    answer, seconds = spent_s(
        lambda: roomy.post("/v1/jobs", content=body, headers={"content-type": "application/json"})
    )
    document = answer.json()
    assert (answer.status_code, document["field"]) == (422, field)
    assert document["repair"]
    assert seconds < 3.2, "41 s and more once, of 100,000"


@pytest.mark.slow
def test_as_many_as_there_may_be_are_checked_in_time(roomy: httpx.Client) -> None:
    roomy.post("/v1/jobs", json=JOB).raise_for_status()  # loads libraries
    for hints in ({"constraints": CONSTRAINTS[:MAX_CONSTRAINTS]}, {"costs": dict(list(COSTS.items())[:20_000])}):
        answer, seconds = spent_s(lambda hints=hints: roomy.post("/v1/jobs", json={**JOB, "hints": hints}))
        assert answer.status_code in (202, 422), answer.text
        assert seconds < 8.0


@pytest.mark.slow
def test_a_bare_worker_waits_for_a_redis_that_is_away_and_comes_back(tmp_path: Path, until: Callable[..., Any]) -> None:
    with EmbeddedRedis(tmp_path) as server:
        with connect(server.url) as client:
            job = Store(client).create("", JobRequest(
                cluster="8xV100-16GB", training={"global_batch": 64}, budget="1", searchers=("random",),
                model=ModelOptions(zoo="gpt2:layers=2"),
            ))  # fmt: skip
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: not server.is_alive())
        worker = subprocess.Popen(
            lifetime.command(signal.SIGKILL, [sys.executable, "-m", "service.command", "worker"]),
            env={**os.environ, "AUTOMAP_REDIS_URL": server.url, "AUTOMAP_LOG_LEVEL": "WARNING"},
            stderr=subprocess.PIPE,
        )
        try:
            assert worker.stderr is not None
            assert b"the worker waits for it" in worker.stderr.readline()
            server.start()
            with connect(server.url) as client:
                until(lambda: Store(client).state(job.id) == "succeeded")
                os.kill(server.pid, signal.SIGKILL)  # once more, while the worker waits for jobs
                until(lambda: not server.is_alive())
                server.start()
                began = time.time()
                until(lambda: [at for at in workers(client).values() if at > began])
            assert worker.poll() is None
        finally:
            processes.stop(worker)
            if worker.stderr is not None:
                worker.stderr.close()


@pytest.mark.slow
def test_a_relative_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[..., Any]) -> None:
    monkeypatch.chdir(tmp_path)
    service = start("--workers", "0", data_dir=Path("here"))
    with httpx.Client(base_url=service.url, timeout=30) as http:
        assert http.post("/v1/jobs", json=JOB).status_code == 202
    service.stop()
    assert any((tmp_path / "here").rglob("*.aof")), "what was accepted is there"


@pytest.mark.parametrize("verb", ["serve", "worker"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("LOG_LEVEL", "loud"), ("LOG_FORMAT", "xml"), ("ALLOWED_HOSTS", "example.org"), ("ALLOWED_HOSTS", '{"a": 1}')],
)
def test_settings_that_cannot_be_read_are_one_sentence(
    verb: str, name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"AUTOMAP_{name}", value)
    assert main([verb]) == 2
    told = capsys.readouterr().err.strip()
    assert f"AUTOMAP_{name}" in told
    assert "\n" not in told
    assert "Traceback" not in told


def test_a_name_stays_where_others_upload_the_same_bytes(api: httpx.Client, light: Callable[[str], bytes]) -> None:
    data = light("squeezenet")
    first = api.post("/v1/models?name=ours", content=data).json()
    assert api.post("/v1/models?name=theirs", content=data).json()["id"] == first["id"]
    assert api.get(f"/v1/models/{first['id']}").json()["name"] == "ours"
