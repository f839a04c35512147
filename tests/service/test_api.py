"""The REST application in this process, on a real Redis, with the real importer."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import onnx
import pytest
import redis
import service_work
from tiny_file import linear, mlp

from automap.gnn import made_up
from ir.onnx.strip import strip
from service.embedded_redis import EmbeddedRedis
from service.http.routes import models
from service.http.side_processes import SideProcesses
from service.jobs import graphs
from service.jobs.connection import connect
from service.jobs.store import Store
from service.problems import MEDIA_TYPE
from service.serve import bind
from service.settings import Settings

JOB = {"cluster": "8xV100-16GB", "training": {"global_batch": 64}, "budget": "1s"}


@pytest.fixture
def model_id(api: httpx.Client, light: Callable[[str], bytes]) -> str:
    answer = api.post("/v1/models?name=squeezenet", content=light("squeezenet"))
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def check_problem(answer: Any, status: int, field: str | None = None) -> dict[str, Any]:
    document: dict[str, Any] = answer.json()
    assert answer.status_code == status, document
    assert answer.headers["content-type"] == MEDIA_TYPE
    assert document["status"] == status
    assert document["title"]
    assert document["instance"].endswith(answer.headers["x-request-id"])
    assert "Traceback" not in answer.text
    if field is not None:
        assert document["field"] == field, document
        assert document["value"] is not None
        assert document["repair"]
    return document


def test_the_same_file_uploaded_twice_is_one_model(api: httpx.Client, light: Callable[[str], bytes]) -> None:
    answer = api.post("/v1/models?name=resnet50", content=light("resnet50"))
    assert answer.status_code == 201
    body = answer.json()
    assert body["summary"]["num_parameters"] == 25_557_032
    assert answer.headers["location"] == f"/v1/models/{body['id']}"
    assert api.get(answer.headers["location"]).json() == body
    assert api.post("/v1/models?name=resnet50", content=light("resnet50")).json()["id"] == body["id"]


def test_an_upload_without_a_name_is_imported_once(
    api: httpx.Client, light: Callable[[str], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = api.post("/v1/models", content=light("squeezenet")).json()
    monkeypatch.setattr(graphs, "import_graph", lambda *given: pytest.fail("imported again"))
    answer = api.post("/v1/jobs", json={"model_id": model["id"], **JOB})
    assert (answer.status_code, answer.json()["request"]["model"]["name"]) == (202, model["name"])


def test_what_a_tenant_may_submit(settings: Settings, client: redis.Redis, serve_app: Any) -> None:
    few = settings.model_copy(update={"max_queued_jobs": 3, "max_search_s_per_day": 100.0})
    body = {**JOB, "zoo": "gpt2:layers=2"}
    with serve_app(few, client) as api:
        first = api.post("/v1/jobs", json={**body, "budget": "60s"})
        assert first.headers["ratelimit"].startswith('"queued-jobs";r=2, "search-seconds";r=40;t=')
        assert first.headers["ratelimit-policy"] == '"queued-jobs";q=3, "search-seconds";q=100;w=86400'
        answer = api.post("/v1/jobs", json={**body, "budget": "60s"})
        check_problem(answer, 429, "budget")
        assert answer.json()["repair"] == "Give it at most 40 s in all, or send it tomorrow."
        assert 0 < int(answer.headers["retry-after"]) <= 24 * 3600
        assert "40 of 100 seconds" in answer.json()["detail"] and "takes 60" in answer.json()["detail"]
        # What can never be admitted is not told to come again.
        check_problem(api.post("/v1/jobs", json={**body, "budget": "101s"}), 422, "budget")
        check_problem(api.post("/v1/jobs", json={**body, "workers": 4}), 422, "workers")
        # What was reserved and not used is there again.
        api.post(f"/v1/jobs/{first.json()['id']}/cancel")
        assert api.post("/v1/jobs", json={**body, "budget": "60s"}).status_code == 202


@pytest.mark.parametrize("limit", [{"max_queued_jobs": 3}, {"max_search_s_per_day": 200.0}])
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/gnn/jobs"])
def test_submissions_at_once_do_not_pass_a_limit_together(
    settings: Settings, client: redis.Redis, serve_app: Any, limit: dict[str, float], path: str
) -> None:
    gnn = {"problem": made_up.make_problem(made_up.Shape(machines=3, workers=2)).to_json()}
    body = {**(gnn if "gnn" in path else {**JOB, "zoo": "gpt2:layers=2"}), "budget": "60s"}
    with serve_app(settings.model_copy(update=limit), client) as api, ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda seed: api.post(path, json={**body, "seed": seed}), range(12)))
        assert sorted(answer.status_code for answer in answers) == [202] * 3 + [429] * 9
        assert len(api.get("/v1/jobs").json()["jobs"]) == 3


def test_a_budget_in_evaluations_takes_time_from_the_day(
    settings: Settings, client: redis.Redis, serve_app: Any
) -> None:
    few = settings.model_copy(update={"max_search_s_per_day": 100.0, "max_budget_s": 70.0})
    body, gnn = (
        {**JOB, "zoo": "gpt2:layers=2"},
        {"problem": made_up.make_problem(made_up.Shape(machines=3, workers=2)).to_json(), "budget": 100_000},
    )
    with serve_app(few, client) as api:

        def left(answer: httpx.Response) -> int:
            assert answer.status_code == 202
            api.post(f"/v1/jobs/{answer.json()['id']}/cancel")
            return int(answer.headers["ratelimit"].partition('"search-seconds";r=')[2].partition(";")[0])

        assert left(api.post("/v1/jobs", json={**body, "budget": 2_000})) == 80
        assert left(api.post("/v1/jobs", json={**body, "budget": 100_000})) == 30  # no run may take longer than 70 s
        assert left(api.post("/v1/gnn/jobs", json=gnn)) == 30
        assert [api.post("/v1/jobs", json={**body, "budget": 4_000}).status_code for _ in range(3)] == [202, 202, 429]


def test_a_submission_that_is_sent_again(api: httpx.Client) -> None:
    body, headers = {**JOB, "zoo": "gpt2:layers=2"}, {"Idempotency-Key": "one"}
    first, second = (api.post("/v1/jobs", json=body, headers=headers) for _ in range(2))
    assert first.status_code == second.status_code == 202
    assert first.json() == second.json()
    assert len(api.get("/v1/jobs").json()["jobs"]) == 1
    check_problem(api.post("/v1/jobs", json={**body, "seed": 1}, headers=headers), 422, "Idempotency-Key")
    for key in ("", "two words", "x" * 256):
        answer = api.post("/v1/jobs", json=body, headers={"Idempotency-Key": key})
        check_problem(answer, 422, "idempotency-key")
        assert "docs/" not in answer.json()["repair"]


def test_lists_page_by_page(api: httpx.Client) -> None:
    ids = [api.post("/v1/jobs", json={**JOB, "zoo": "gpt2:layers=2", "seed": seed}).json()["id"] for seed in range(3)]
    api.post(f"/v1/jobs/{ids[1]}/cancel")
    page = api.get("/v1/jobs?limit=2").json()
    assert [job["id"] for job in page["jobs"]] == [ids[2], ids[1]]
    page = api.get("/v1/jobs", params={"limit": 2, "cursor": page["next"]}).json()
    assert ([job["id"] for job in page["jobs"]], page["next"]) == ([ids[0]], None)
    found = api.get("/v1/jobs?state=queued&state=running").json()["jobs"]
    assert [job["id"] for job in found] == [ids[2], ids[0]]
    assert api.get("/v1/jobs?model_id=x").json()["jobs"] == []


def test_more_uploads_than_there_may_be(
    settings: Settings, client: redis.Redis, serve_app: Any, light: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended, receive = threading.Event(), threading.Event(), models._receive

    async def received(*given: Any) -> None:
        """Of an upload that has its place."""
        begun.set()
        await receive(*given)

    def slowly() -> Any:
        yield light("squeezenet")[:10]
        assert ended.wait(60)
        yield light("squeezenet")[10:]

    monkeypatch.setattr(models, "_receive", received)
    with serve_app(settings.model_copy(update={"max_uploads": 1}), client) as api, ThreadPoolExecutor() as pool:
        upload = pool.submit(api.post, "/v1/models", content=slowly())
        try:
            assert begun.wait(60)
            refused = httpx.post(f"{api.base_url}/v1/models", content=b"x", timeout=30)
        finally:
            ended.set()
        check_problem(refused, 503, "uploads")
        assert refused.headers["retry-after"]
        assert upload.result(60).status_code == 201


PROFILE = """\
node1 -- cell_1 -- forward_compute_time=3, backward_compute_time=5, activation_size=1600, parameter_size=4000
node2 -- cell_2 -- forward_compute_time=3, backward_compute_time=5, activation_size=1600, parameter_size=4000
node1 -- node2"""


def test_a_layer_profile(api: httpx.Client, client: redis.Redis, search: Any) -> None:
    answer = api.post("/v1/models?name=cells-pbs-4", content=PROFILE)
    assert answer.status_code == 201, answer.text
    model = answer.json()
    assert model["summary"]["num_parameters"] == 2000
    assert model["summary"]["coverage"]["measured"] == 1.0
    job = api.post("/v1/jobs", json={**JOB, "model_id": model["id"]}).json()
    service_work.run(job["id"], client, search=search)
    plan = api.get(f"/v1/jobs/{job['id']}/plan").json()
    assert plan["model"]["num_parameters"] == 2000
    # The name under which it was uploaded tells the batch of the profile, to the job too.
    assert any("at 4 samples" in line for line in model["summary"]["warnings"])
    assert job["request"]["model"]["name"] == "cells-pbs-4"


@pytest.mark.parametrize(
    ("text", "query", "field"),
    [
        (PROFILE.replace("=3", "=nan"), "", "model"),
        (PROFILE.replace("=3", "=-3"), "", "model"),
        (PROFILE + "\nnode2 -- node1", "", "model"),
        (PROFILE + "\nnode2 -- node7", "", "model"),
        (PROFILE + "\n" + PROFILE, "", "model"),
        ("node1 -- " + "x" * 100_000, "", "model"),
        ("node1 -- x\n" * 200_000, "", "model"),
        (PROFILE, "?dim=batch=0", "dims.batch"),
        (PROFILE, "?dim=length=2", "dims.length"),
    ],
)
def test_a_malformed_profile_is_refused(api: httpx.Client, text: str, query: str, field: str) -> None:
    check_problem(api.post(f"/v1/models{query}", content=text), 422, field)


def test_a_job_to_its_plan(api: httpx.Client, store: Store, model_id: str, search: Any, client: redis.Redis) -> None:
    answer = api.post("/v1/jobs", json={"model_id": model_id, **JOB})
    assert answer.status_code == 202, answer.text
    job = answer.json()
    here = answer.headers["location"]
    assert here == job["links"]["self"]
    assert job["state"] == "queued"
    check_problem(api.get(here + "/plan"), 409, "state")
    service_work.run(job["id"], client, search=search)
    job = api.get(here).json()
    assert (job["state"], job["attempt"], job["problem"]) == ("succeeded", 1, None)
    assert job["progress"]["fraction"] == 1.0
    plan = api.get(here + "/plan").json()
    assert plan["model"] == {"name": "squeezenet", "sha256": model_id, "num_parameters": 1235496}
    jsonschema.Draft202012Validator(api.get("/v1/schemas/plan").json()).validate(plan)
    assert [j["id"] for j in api.get("/v1/jobs").json()["jobs"]] == [job["id"]]


def test_who_asks_too_early_is_told_of_the_best_plan_so_far(api: httpx.Client, store: Store) -> None:
    here = api.post("/v1/jobs", json={**JOB, "zoo": "gpt2:layers=2"}).headers["location"]
    assert "so-far" not in check_problem(api.get(here + "/plan"), 409, "state")["repair"]
    job_id = here.rpartition("/")[2]
    token = store.begin(job_id)
    assert token is not None
    store.set_best(job_id, token, {"name": "best"})
    store.cancel(job_id)
    for asked in ("plan", "exports/deepspeed"):
        repair = check_problem(api.get(f"{here}/{asked}"), 409, "state")["repair"]
        assert repair.startswith("Submit the job again.") and f"{here}/plan?best=so-far" in repair
    assert api.get(f"{here}/plan?best=so-far").json() == {"name": "best"}


def test_a_plan_is_exported(api: httpx.Client, model_id: str, search: Any, client: redis.Redis) -> None:
    job = api.post("/v1/jobs", json={"model_id": model_id, **JOB}).json()
    here = job["links"]["self"] + "/exports"
    check_problem(api.get(f"{here}/deepspeed"), 409, "state")
    service_work.run(job["id"], client, search=search)
    found = api.get(f"{here}/deepspeed")
    assert found.status_code == 200, found.text
    assert json.loads(found.json()["files"]["deepspeed.json"])["train_batch_size"] == JOB["training"]["global_batch"]
    check_problem(api.get(f"{here}/fairscale"), 422, "target")
    check_problem(api.get(f"{here}/torchtitan"), 422, "target")
    check_problem(api.get("/v1/jobs/x/exports/deepspeed"), 404)


def test_long_poll_ends_with_the_job(api: httpx.Client, model_id: str, store: Store, until: Any) -> None:
    job = api.post("/v1/jobs", json={"model_id": model_id, **JOB}).json()
    answers: list[Any] = []
    poll = threading.Thread(target=lambda: answers.append(api.get(f"/v1/jobs/{job['id']}?wait=30")))
    poll.start()
    store.cancel(job["id"])
    poll.join(10)
    assert answers[0].json()["state"] == "cancelled"
    assert api.get(f"/v1/jobs/{job['id']}?wait=30").json()["state"] == "cancelled"


def test_long_poll_ends_in_time(api: httpx.Client, model_id: str) -> None:
    job = api.post("/v1/jobs", json={"model_id": model_id, **JOB}).json()
    assert api.get(f"/v1/jobs/{job['id']}?wait=0.1").json()["state"] == "queued"
    check_problem(api.get(f"/v1/jobs/{job['id']}?wait=-1"), 422, "wait")


def test_cancel_a_queued_job(api: httpx.Client, model_id: str, client: redis.Redis, search: Any) -> None:
    job = api.post("/v1/jobs", json={"model_id": model_id, **JOB}).json()
    for _ in range(2):
        assert api.post(f"/v1/jobs/{job['id']}/cancel").json()["state"] == "cancelled"
    service_work.run(job["id"], client, search=search)
    assert api.get(f"/v1/jobs/{job['id']}").json()["state"] == "cancelled"
    assert Store(client).num_waiting() == 0


def test_health_version_clusters_and_openapi_are_answered(api: httpx.Client) -> None:
    assert api.get("/healthz").json() == {"status": "ok"}
    assert set(api.get("/version").json()) == {"version"}
    clusters = api.get("/v1/clusters").json()
    assert "4x8xA100-80GB" in clusters["presets"]
    assert any(device["name"].startswith("V100") for device in clusters["devices"])
    assert api.get("/openapi.json").json()["openapi"].startswith("3.")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/docs", 404),
        ("GET", "/redoc", 404),
        ("DELETE", "/v1/jobs", 405),
        ("DELETE", "/v1/jobs/x", 404),
        ("DELETE", "/v1/models/x", 404),
        ("GET", "/v1/jobs?cursor=x", 422),
        ("GET", "/v1/jobs?state=asleep", 422),
        ("GET", "/v1/jobs/x", 404),
        ("POST", "/v1/jobs/x/cancel", 404),
        ("GET", "/v1/jobs/x/plan", 404),
        ("GET", "/v1/models/x", 404),
        ("GET", "/v1/jobs?limit=0", 422),
        ("GET", "/v1/jobs?limit=many", 422),
    ],
)
def test_unknown_places(api: httpx.Client, method: str, path: str, status: int) -> None:
    answer = api.request(method, path)
    check_problem(answer, status)
    if status == 405:
        assert answer.headers["allow"]


@pytest.mark.parametrize(
    ("path", "repair"),
    [
        ("/v1/jobs?limit=0", "Give a number of at least 1."),
        ("/v1/jobs?limit=1001", "Give a number of at most 1000."),
        ("/v1/jobs?limit=many", "Give an integer."),
        ("/v1/jobs?state=asleep", "Use 'queued', 'running', 'succeeded', 'failed' or 'cancelled'."),
        ("/v1/jobs?cursor=x", "Give `next` of the page before, unchanged."),
        ("/v1/jobs/x?wait=soon", "Give a number."),
        ("/v1/jobs/x?wait=inf", "Give a finite number."),
        ("/v1/jobs/x?wait=nan", "Give a finite number."),
        ("/v1/jobs/x?wait=-1", "Give a number of at least 0."),
        ("/v1/jobs?model_id=", "Leave it out, or give at least 1 character."),
        ("/v1/jobs/x/plan?best=one", "Use 'final' or 'so-far'."),
        ("/v1/jobs/x", "`automap status` and GET /v1/jobs list the jobs that there are."),
        ("/v1/jobs?stat=failed", "Did you mean state? Use one of cursor, limit, model_id, state."),
        ("/v1/jobs/x/plan?so_far=1", "Use best."),
        ("/v1/zoo?name=gpt2", "Leave it out: this request takes no parameters."),
        ("/v1/jobs/", "GET /openapi.json lists all paths."),
        ("/v1/jobs?limit=1&limit=2", "Give it once."),
    ],
)
def test_parameters_are_refused_with_a_repair(api: httpx.Client, path: str, repair: str) -> None:
    assert api.get(path).json()["repair"] == repair


def test_parameters_of_others_are_refused_where_they_would_change_the_meaning(api: httpx.Client) -> None:
    # An upload takes `batch_dim`, a job takes `batch_dims`; left out without a word, dim 0 would be the batch.
    document = check_problem(api.post("/v1/models?batch_dims=x=1", content=mlp()), 422, "query")
    assert (document["value"], document["repair"][:23]) == ("batch_dims", "Did you mean batch_dim?")
    # Who asks whether the service lives may add what he likes.
    assert api.get("/healthz?at=1").status_code == api.get("/metrics?name=x").status_code == 200


def test_every_refusal_shows_what_was_sent(api: httpx.Client) -> None:
    wrong = {"cluster": "", "zoo": "gpt2", "training": {"global_batch": 8}}
    document = check_problem(api.post("/v1/jobs", json=wrong), 422, "cluster")
    assert document["value"] == "nothing"
    assert "document" in document["repair"] and "file" not in document["repair"]
    sent = {"Content-Type": "application/json"}
    assert check_problem(api.post("/v1/jobs", content=b"", headers=sent), 422)["value"] == "nothing"
    assert check_problem(api.post("/v1/jobs", content=b"{'zoo': 1}", headers=sent), 422)["value"] == "{'zoo': 1}"
    assert check_problem(api.put("/v1/jobs"), 405, "method")["repair"] == "Use one of GET, HEAD, POST."
    assert check_problem(api.get("/v1/jobs?state=awake"), 422)["field"] == "state"


@pytest.mark.parametrize(
    ("data", "query", "field"),
    [
        (b"", "", "model"),
        (b"This is a text file, not a model.\n" * 10, "", "model"),
        (mlp()[:-20], "", "model"),
        (mlp(hidden="width"), "", "dims.width"),
        (mlp(), "?dim=width", "dims"),
        (mlp(), "?dim=width=0", "dims.width"),
        (mlp(hidden="width"), "?dim=width=8&dim=width=4", "dims.width"),
        (mlp(hidden="width"), "?dim=width=8&batch_dim=x=0&batch_dim=x=none", "batch_dims.x"),
        (mlp(), "?name=a&name=b", "name"),
        (mlp(), "?dim=width=" + 5000 * "9", "dims.width"),
    ],
    ids=[
        "empty",
        "text",
        "truncated",
        "unbound dim",
        "dim without size",
        "dim of size 0",
        "dim of two sizes",
        "batch in two places",
        "two names",
        "dim of 5,000 digits",
    ],
)
def test_a_file_that_is_no_model_is_refused(api: httpx.Client, data: bytes, query: str, field: str) -> None:
    check_problem(api.post("/v1/models" + query, content=data), 422, field)


def test_dims_can_be_bound(api: httpx.Client) -> None:
    answer = api.post("/v1/models?dim=width=8", content=mlp("n", "width"))
    assert answer.status_code == 201, answer.text
    job = {"model_id": answer.json()["id"], **JOB}
    check_problem(api.post("/v1/jobs", json=job), 422, "dims.width")
    assert api.post("/v1/jobs", json={**job, "dims": {"width": 8}}).status_code == 202


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"cluster": "8xZ9000"}, "cluster"),
        ({"cluster": "0x8xV100-16GB"}, "cluster"),
        ({"cluster": "a lot"}, "cluster"),
        ({"cluster": "/etc/passwd.json"}, "cluster"),
        ({"cluster": {"nodes": []}}, "cluster.name"),
        ({"cluster": 7}, "cluster"),
        ({"training": {"global_batch": 0}}, "training.global_batch"),
        ({"training": {"global_batch": "many"}}, "training.global_batch"),
        ({"training": {}}, "training.global_batch"),
        ({"training": {"global_batch": 64, "batch": 1}}, "training.batch"),
        ({"training": {"global_batch": 64, "precision": "bf16"}}, "training.precision"),
        ({"training": {"global_batch": 64, "precision": "int3"}}, "training.precision"),
        ({"training": {"global_batch": 64, "trainer": "mine"}}, "training.trainer"),
        ({"training": {"global_batch": 64, "target": "megatron-core"}}, "training.target"),
        ({"training": 7}, "training"),
        ({"hints": {"fix": {"dp": 0}}}, "hints.fix.dp"),
        ({"hints": {"fix": {"dp": 9}}}, "hints.fix.dp"),
        ({"hints": {"fix": {"tp": 4, "pp": 4}}}, "hints.fix"),
        ({"hints": {"fix": {"pp": 99}}}, "hints.fix.pp"),
        ({"hints": {"fix": {"num_micro_batches": 7}}}, "hints.fix.num_micro_batches"),
        ({"hints": {"fixed": {}}}, "hints.fixed"),
        ({"hints": {"constraints": [{"scope": "nothing.*", "split": True}]}}, "hints.constraints[0].scope"),
        ({"hints": {"constraints": [{"scope": "**"}]}}, "hints.constraints[0]"),
        ({"budget": "soon"}, "budget"),
        ({"budget": "9999h"}, "budget"),
        ({"budget": 0}, "budget"),
        ({"budget": 10**18}, "budget"),
        ({"training": {"global_batch": 10**9}}, "training.global_batch"),
        ({"searchers": ["oracle"]}, "searchers[0]"),
        ({"searchers": ["mcmc", "oracle"]}, "searchers[1]"),
        ({"searchers": ["mcmc", "mcmc"]}, "searchers[1]"),
        ({"searchers": []}, "searchers"),
        ({"searchers": "mcmc"}, "searchers"),
        ({"searchers": [7]}, "searchers[0]"),
        ({"searchers": ["mcmc", "dqn"], "budget": 1}, "budget"),
        ({"seed": -1}, "seed"),
        ({"clutser": "8xV100-16GB"}, "clutser"),
        ({"dims": {"x": "y"}}, "dims.x"),
    ],
)
def test_a_job_with_a_wrong_field_is_refused_by_its_name(
    api: httpx.Client, model_id: str, change: dict[str, Any], field: str
) -> None:
    check_problem(api.post("/v1/jobs", json={"model_id": model_id, **JOB, **change}), 422, field)
    assert api.get("/v1/jobs").json()["jobs"] == []


def test_a_missing_field_is_named(api: httpx.Client) -> None:
    document = check_problem(api.post("/v1/jobs", json={}), 422, "training")
    assert document["message"] == "missing"


def test_a_model_of_the_zoo_needs_no_upload(api: httpx.Client, client: redis.Redis, search: Any) -> None:
    answer = api.post("/v1/jobs", json={"zoo": "gpt2:layers=2", **JOB})
    assert answer.status_code == 202, answer.text
    job = answer.json()
    assert (job["model_id"], job["request"]["model"]["name"]) == ("", "gpt2:layers=2")
    service_work.run(job["id"], client, search=search)
    job = api.get(f"/v1/jobs/{job['id']}").json()
    assert (job["state"], job["problem"]) == ("succeeded", None)
    model = api.get(f"/v1/jobs/{job['id']}/plan").json()["model"]
    assert (model["name"], model["num_parameters"]) == ("gpt2:layers=2", 53_561_088)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "model_id"),
        ({"zoo": "gpt2", "model_id": "x"}, "model_id"),
        ({"zoo": "gpt2:width=7"}, "zoo"),
        ({"zoo": "gpt2:layers=999999999"}, "zoo"),
        ({"zoo": "gpt:layers=2"}, "zoo"),
        ({"zoo": "gpt2", "dims": {"n": 2}}, "dims"),
        ({"zoo": "gpt2", "parameters": ["*"]}, "parameters"),
    ],
)
def test_bad_named_models(api: httpx.Client, given: dict[str, Any], field: str) -> None:
    check_problem(api.post("/v1/jobs", json={**JOB, **given}), 422, field)
    assert api.get("/v1/jobs").json()["jobs"] == []


@pytest.mark.parametrize(
    ("given", "field"), [({"model_id": "unknown"}, "model_id"), ({"zoo": "zoo:gpt3"}, "zoo"), ({"zoo": "x"}, "zoo")]
)
def test_models_that_are_not_there(api: httpx.Client, given: dict[str, Any], field: str) -> None:
    document = check_problem(api.post("/v1/jobs", json={**JOB, **given}), 404, field)
    assert document["type"] == "urn:automap:problem:model"


@pytest.mark.parametrize("body", [b"{", b"[]", b"7", b"null", b"\xff\xfe", b""])
def test_bodies_that_are_no_jobs(api: httpx.Client, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    check_problem(api.post("/v1/jobs", content=body, headers=headers), 422, "document")


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_bodies_that_do_not_say_that_they_are_json(api: httpx.Client, kind: str) -> None:
    check_problem(api.post("/v1/jobs", content=b"{}", headers={"content-type": kind}), 415, "Content-Type")


def test_bodies_that_are_compressed(api: httpx.Client) -> None:
    document = check_problem(api.post("/v1/models", content=mlp(), headers={"content-encoding": "gzip"}), 415)
    assert (document["field"], document["value"]) == ("Content-Encoding", "gzip")
    assert api.post("/v1/models", content=mlp(), headers={"content-encoding": "identity"}).status_code == 201


@pytest.mark.parametrize("is_beside", [True, False], ids=["beside", "inside"])
def test_uploads_are_stored_without_weights_that_cannot_be_read(
    api: httpx.Client, client: redis.Redis, is_beside: bool
) -> None:
    """Weights in another file, which is not sent, and a file of 80 MiB; a job then plans what is stored."""
    rows = 64 if is_beside else 20 << 10
    file = linear(rows, is_beside=is_beside)
    model = api.post("/v1/models", content=file).json()
    assert model["summary"]["num_parameters"] == rows * 1024
    stored = Store(client).model_bytes(model["id"])
    assert stored is not None and stored == strip(file).data and model["num_bytes"] == len(stored) < 1000
    assert api.post("/v1/models", content=file).json() == model
    job = api.post("/v1/jobs", json={"model_id": model["id"], **JOB}).json()
    assert job["state"] == "queued", job


def test_a_small_constant_in_another_file_is_asked_for(api: httpx.Client) -> None:
    """What an index in another file selects cannot be told from the graph alone."""
    made = onnx.load_from_string(mlp())
    made.graph.initializer.add(name="i", dims=[1], data_type=onnx.TensorProto.INT64).external_data.add(
        key="location", value="mlp.data"
    )
    made.graph.node.add(op_type="Gather", input=["y", "i"], output=["z"])
    made.graph.output[0].name = "z"
    told = check_problem(api.post("/v1/models", content=made.SerializeToString()), 422, "model")
    assert told["value"] == "i" and "external_data=False" in told["repair"] and "automap strip" in told["repair"]


def test_bodies_and_models_beyond_the_limits_are_refused(
    settings: Settings, client: redis.Redis, serve_app: Any
) -> None:
    small = settings.model_copy(update={"max_model_bytes": 1000, "max_request_bytes": 100, "max_stored_bytes": 150})
    with serve_app(small, client) as api:
        told = check_problem(api.post("/v1/models", content=b"x" * 1001), 413, "body")
        assert "at most 1000 bytes; `automap strip`" in told["repair"]
        check_problem(api.post("/v1/models", content=iter([b"x" * 600] * 2)), 413, "body")
        told = check_problem(api.post("/v1/jobs", json={"model_id": "x" * 200}), 413, "body")
        assert "AUTOMAP_MAX_REQUEST_BYTES" in told["repair"]
        told = check_problem(api.post("/v1/models", content=mlp()), 507, "stored_bytes")
        assert told["value"] == "0 of 150 bytes" and "AUTOMAP_MAX_STORED_BYTES" in told["repair"]


def test_a_model_that_is_deleted_while_a_job_is_checked(
    api: httpx.Client, model_id: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(self: SideProcesses, *given: object) -> dict[str, Any]:
        assert Store(client).delete_model(model_id)
        return {}

    monkeypatch.setattr(SideProcesses, "ask", ask)
    check_problem(api.post("/v1/jobs", json={"model_id": model_id, **JOB}), 404, "model_id")
    assert api.get("/v1/jobs").json()["jobs"] == []


def test_too_many_jobs(settings: Settings, client: redis.Redis, serve_app: Any, light: Callable[[str], bytes]) -> None:
    one = settings.model_copy(update={"max_queued_jobs": 1})
    with serve_app(one, client) as api:
        model_id = api.post("/v1/models", content=light("squeezenet")).json()["id"]
        assert api.post("/v1/jobs", json={"model_id": model_id, **JOB}).status_code == 202
        answer = api.post("/v1/jobs", json={"model_id": model_id, **JOB})
        assert check_problem(answer, 429, "jobs")["value"] == "1 beside 1 that wait"
        assert int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example"])
def test_foreign_hosts_are_refused(api: httpx.Client, host: str) -> None:
    check_problem(api.get("/healthz", headers={"host": host}), 400, "Host")


@pytest.mark.parametrize("path", ["/", "/healthz", "/v1/jobs", "/v1/zoo", "/openapi.json", "/v1/jobs/x", "/nothing"])
def test_a_head_is_its_get_without_the_body(api: httpx.Client, path: str) -> None:
    whole, head = api.get(path), api.head(path)
    assert (head.status_code, head.content) == (whole.status_code, b"")
    for name in ("content-type", "etag", "allow"):
        assert head.headers.get(name) == whole.headers.get(name)
    assert api.get("/healthz").json() == {"status": "ok"}  # on the same connection


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8080", "[::1]:8080", "LOCALHOST"])
def test_own_hosts_are_served(api: httpx.Client, host: str) -> None:
    assert api.get("/healthz", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("sent_by", ["cross-site", "same-site", "Cross-Site"])
def test_other_web_pages_change_nothing(api: httpx.Client, light: Callable[[str], bytes], sent_by: str) -> None:
    """They may send forms and texts to 127.0.0.1 without permission: an upload has no type, a cancellation no body."""
    headers = {"Sec-Fetch-Site": sent_by, "Content-Type": "text/plain"}
    for method, path in (("POST", "/v1/models"), ("POST", "/v1/jobs/x/cancel"), ("DELETE", "/v1/tenant")):
        document = check_problem(api.request(method, path, content=light("squeezenet"), headers=headers), 403)
        assert (document["field"], document["value"]) == ("Sec-Fetch-Site", sent_by.lower())
    assert api.get("/v1/models").json() == {"models": []}
    assert api.get("/v1/zoo", headers=headers).status_code == 200  # a link to the page, say
    own = {"Sec-Fetch-Site": "same-origin"}
    assert api.post("/v1/models", content=light("squeezenet"), headers=own).status_code == 201


def test_the_unexpected_stays_inside(api: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def explode(*given: object, **rest: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(Store, "jobs", explode)
    answer = api.get("/v1/jobs")
    document = check_problem(answer, 500)
    assert "secret" not in answer.text
    request_id = document["instance"].rpartition(":")[2]
    assert request_id in caplog.text
    assert "secret detail" in caplog.text


def test_a_store_that_is_down(settings: Settings, tmp_path: Any, serve_app: Any) -> None:
    with EmbeddedRedis(tmp_path) as server:
        client = connect(server.url)
    with client, serve_app(settings, client) as api:
        answer = api.get("/v1/jobs")
        check_problem(answer, 503, "store")
        assert answer.headers["retry-after"]


def test_small_answers_leave_at_once() -> None:
    """asyncio sets TCP_NODELAY where the socket names its protocol; without it, parts of answers wait for 40 ms."""
    with bind("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP
