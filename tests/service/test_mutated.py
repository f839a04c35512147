"""Jobs with something wrong in them: each is refused by field, value and repair, or runs to an end that can be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import redis
import service_work
from mutated_jobs import mutated, valid, written

from service.command.main import main
from service.jobs.store import Store
from service.problems import MEDIA_TYPE

COUNT, RUN = 800, 24
HEADERS = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def bases() -> list[dict[str, Any]]:
    return valid()


def post(api: httpx.Client, body: bytes) -> Any:
    return api.post("/v1/jobs", content=body, headers=HEADERS)


def schema_of(api: httpx.Client) -> jsonschema.Draft202012Validator:
    """Of a job, as OpenAPI tells it."""
    document = api.get("/openapi.json").json()
    body = document["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return jsonschema.Draft202012Validator({**body, "components": document["components"]})


@pytest.mark.slow
@pytest.mark.long
def test_no_body_is_a_fault_of_the_service(
    api: httpx.Client, client: redis.Redis, store: Store, bases: list[dict[str, Any]]
) -> None:
    schema, accepted = schema_of(api), []
    for base in bases:
        answer = post(api, written(base).encode())
        assert answer.status_code == 202, answer.text
        schema.validate(base)
    for body in mutated(bases, COUNT):
        answer = post(api, body)
        if answer.status_code == 202:
            accepted.append(answer.json()["id"])
            # What the service takes is what its document says that it takes.
            assert schema.is_valid(json.loads(body)), body
            continue
        document = answer.json()
        assert 400 <= answer.status_code < 500, (body, document)
        assert answer.headers["content-type"] == MEDIA_TYPE
        assert document["field"] and document["repair"] and "value" in document, (body, document)
    assert len(accepted) > RUN
    listed = api.get("/v1/jobs?limit=1000")
    assert listed.status_code == 200
    assert all(job["request"] is not None for job in listed.json()["jobs"])
    # Whatever was accepted ends with a plan or with an error that its sender can repair.
    for job_id in accepted[:: len(accepted) // RUN]:
        request = json.loads(client.hget(store.job_key(job_id), "request") or b"")  # type: ignore[arg-type]
        short = {**request, "budget": "20", "searchers": ["mcmc"], "trials": None}
        client.hset(store.job_key(job_id), "request", json.dumps(short))
        service_work.run(job_id, client)
        job = store.job(job_id)
        assert job is not None
        assert job.state == "succeeded" or (job.problem or {}).get("repair"), (request, job.problem)


def test_files_are_read_as_bodies_are(tmp_path: Path, bases: list[dict[str, Any]], capsys: Any) -> None:
    cluster, hints = tmp_path / "cluster.json", tmp_path / "hints.json"
    cases = [
        (cluster, b'{"name": NaN}', "cluster.name"),
        (cluster, written(bases[0]["cluster"]).replace("900.0", "1e999").encode(), "cluster.devices"),
        (cluster, written(bases[0]["cluster"]).replace("900.0", "-900").encode(), "cluster.devices"),
        (hints, b'{"memory_reserve_bytes": 1, "memory_reserve_bytes": 2}', "hints.memory_reserve_bytes"),
        (hints, rb'{"parameters": ["\ud800"]}', "hints.parameters[0]"),
        (hints, b"[" * 100_000, "hints"),
    ]
    for path, text, field in cases:
        hints.write_text("{}")
        cluster.write_text(written(bases[0]["cluster"]))
        path.write_bytes(text)
        words = ["search", "zoo:gpt2", "--cluster", str(cluster), "--global-batch", "8", "--hints", str(hints)]
        assert main([*words, "--json"]) == 2
        document = json.loads(capsys.readouterr().out)
        assert document["field"].startswith(field), document
        assert document["repair"]


def test_a_record_that_cannot_be_read_hides_no_other(
    api: httpx.Client, client: redis.Redis, store: Store, bases: list[dict[str, Any]], capsys: Any
) -> None:
    ids = [post(api, written(base).encode()).json()["id"] for base in bases]
    spoilt = {
        "request": [b'{"cluster": NaN}', b"{", b"[]", b"\xff", b'{"cluster": "8xA100", "training": {}, "old": 1}', b""],
        "state": [b"thinking"],
        "progress": [b"{"],
        "created_at": [b"soon"],
    }
    for name, values in spoilt.items():
        for value in values:
            key = store.job_key(ids[0])
            was = client.hget(key, name)
            client.hset(key, name, value)  # type: ignore[arg-type]
            listed = api.get("/v1/jobs")
            assert listed.status_code == 200
            jobs = {job["id"]: job for job in listed.json()["jobs"]}
            assert set(jobs) == set(ids)
            assert jobs[ids[0]]["request"] is None
            assert "cannot be read" in jobs[ids[0]]["problem"]["title"]
            assert all(jobs[other]["problem"] is None for other in ids[1:])
            assert api.get(f"/v1/jobs/{ids[0]}").status_code == 200
            assert main(["status", "--url", str(api.base_url)]) == 0
            assert capsys.readouterr().out.count("\n") == len(ids)
            if was is None:
                client.hdel(key, name)
            else:
                client.hset(key, name, was)  # type: ignore[arg-type]


def test_a_job_whose_record_cannot_be_read_has_failed(
    api: httpx.Client, client: redis.Redis, store: Store, bases: list[dict[str, Any]]
) -> None:
    job_id = post(api, written(bases[5]).encode()).json()["id"]
    client.hset(store.job_key(job_id), "request", b"{")
    service_work.run(job_id, client)
    job = store.job(job_id)
    assert job is not None and job.state == "failed"
    assert job.problem is not None and "request" in job.problem["detail"]
