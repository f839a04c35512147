"""Metrics, readiness and log lines: the figures are those of what was done, and no secret is in a line."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import httpx
import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families
from service_work import run

from service import logs
from service.jobs import counts
from service.jobs.store import Store
from service.jobs.worker import Worker
from service.settings import Settings

JOB = {"zoo": "gpt2:layers=2", "cluster": "8xV100-16GB", "training": {"global_batch": 64}, "budget": "1s"}


def samples(api: httpx.Client) -> dict[tuple[str, ...], float]:
    """(name, values of the labels …) -> value."""
    answer = api.get("/metrics")
    assert answer.status_code == 200
    families = text_string_to_metric_families(answer.text)
    return {(s.name, *map(str, s.labels.values())): s.value for family in families for s in family.samples}


def test_they_count_what_was_done(
    api: httpx.Client, client: redis.Redis, store: Store, settings: Settings, search: Any
) -> None:
    began = time.time()
    ids = [api.post("/v1/jobs", json=JOB).json()["id"] for _ in range(4)]
    run(ids[0], client, search=search)
    store.cancel(ids[1])
    token = store.begin(ids[2])
    assert token is not None
    store.set_progress(ids[2], token, {"evaluations": 40, "seconds": 2.0})
    store.set_progress(ids[2], token, {"evaluations": 100, "seconds": 4.0})
    worker = Worker(client, settings)
    worker.register_birth()
    found = samples(api)
    assert found["automap_jobs", "queued"] == 1
    assert found["automap_jobs", "running"] == 1
    assert found["automap_evaluations_total",] == 107  # the search of these tests says 7
    assert found["automap_evaluations_per_second",] == 25.0
    assert found["automap_job_run_seconds_count", "succeeded"] == 1
    assert found["automap_job_run_seconds_count", "cancelled"] == 1
    assert found["automap_job_run_seconds_count", "failed"] == 0
    assert found["automap_job_wait_seconds_count",] == 2
    assert 0.0 < found["automap_job_wait_seconds_sum",] < 2.0 * (time.time() - began)
    assert found["automap_workers",] == 1
    assert found["automap_worker_heartbeat_age_seconds", worker.name] < 60
    assert found["automap_store_up",] == 1
    assert found["automap_store_bytes",] > 0


def test_answers_and_refusals_are_counted_by_route(api: httpx.Client) -> None:
    before = samples(api)
    for _ in range(3):
        api.get("/v1/jobs/nobody")
    api.get("/nowhere")
    after = samples(api)

    def more(*name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert more("automap_http_request_seconds_count", "GET", "/v1/jobs/{job_id}", "404") == 3
    assert more("automap_refusals_total", "/v1/jobs/{job_id}", "404") == 3
    # Addresses that nobody has declared make no series of their own.
    assert not any("nowhere" in part or "nobody" in part for name in after for part in name)


def test_durations_fall_into_classes(client: redis.Redis) -> None:
    with client.pipeline() as pipe:
        for seconds in (0.05, 0.1, 0.2, 40.0, 9000.0):
            counts.took(pipe, "run:failed", seconds)
        pipe.execute()
    found = counts.durations(counts.read(client), "run:failed")
    assert found.number == 5
    assert found.sum_s == pytest.approx(9040.35)
    assert found.classes[0] == 2 and found.classes[-1] == 1
    assert found.classes[counts.BUCKETS_S.index(60.0)] == 1


def test_ready_means_that_a_job_is_kept(api: httpx.Client, client: redis.Redis, settings: Settings) -> None:
    assert api.get("/readyz").json() == {"status": "ok", "workers": 0}
    Worker(client, settings).register_birth()
    assert api.get("/readyz").json() == {"status": "ok", "workers": 1}
    # A full memory: Redis answers, and keeps nothing.
    client.config_set("maxmemory", "1")
    client.config_set("maxmemory-policy", "noeviction")
    try:
        answer = api.get("/readyz")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert api.get("/healthz").status_code == 200
        assert samples(api)["automap_store_up",] == 1
    finally:
        client.config_set("maxmemory", "0")


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_line_names_its_request_and_job_and_no_secret(form: logs.Format, capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger().handlers[:], logging.getLogger().level
    request, job = logs.REQUEST.set("r1"), logs.JOB.set("j1")
    try:
        logs.configure("INFO", form)
        try:
            raise ValueError("redis://user:hunter2@host/0")
        except ValueError:
            logging.getLogger("automap.x").exception("Authorization: Bearer abc123 and amk_1_secret")
    finally:
        logs.REQUEST.reset(request)
        logs.JOB.reset(job)
        logging.getLogger().handlers[:], logging.getLogger().level = before[0], before[1]
    line = capsys.readouterr().err
    for secret in ("hunter2", "abc123", "amk_1_secret"):
        assert secret not in line
    assert "ValueError" in line
    if form == "json":
        document = json.loads(line)
        assert (document["request"], document["job"], document["level"]) == ("r1", "j1", "ERROR")
    else:
        assert "request=r1 job=j1" in line
