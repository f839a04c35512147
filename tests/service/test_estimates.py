"""Plans priced and drawn over REST: the same figures as on the command line, in another process, within limits."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis
import service_work
from child_processes import called

from automap.cluster import parse_cluster
from service import side_process
from service.command.main import main
from service.drawing.pictures import PICTURES
from service.http import side_processes
from service.http.schemas import JobView
from service.http.side_processes import SideProcesses
from service.jobs.run_job import JobRequest

GPT = "gpt:layers=4,hidden=256,heads=4,vocab_size=1024,seq_len=128"
ASKED = {"zoo": GPT, "cluster": "8xA100-80GB", "training": {"global_batch": 64}}


def children() -> list[psutil.Process]:
    return called("service.side_process", psutil.Process().children())


def test_degrees_are_priced_as_on_the_command_line(api: httpx.Client, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cluster", "8xA100-80GB", "--global-batch", "64", "--pp", "2", "--tp", "2", "--zero", "1", "--json"]
    assert main(["estimate", f"zoo:{GPT}", *words]) == 0
    own = json.loads(capsys.readouterr().out)
    found = api.post("/v1/estimates", json={**ASKED, "degrees": {"pp": 2, "tp": 2, "zero": 1}})
    assert found.status_code == 200, found.text
    plan = found.json()
    assert plan["model"]["name"] == GPT
    assert {**plan, "model": None} == {**own, "model": None}
    # The plan as a document has the same price; here nothing was computed.
    again = api.post("/v1/estimates", json={**ASKED, "plan": plan}).json()
    assert again["estimate"] == plan["estimate"]
    assert len(children()) == 1


@pytest.mark.parametrize(
    ("more", "status", "field"),
    [
        ({"degrees": {"pp": 3}}, 422, "degrees.pp"),
        ({"degrees": {"layers": [1, 2]}}, 422, "degrees.layers"),
        ({"degrees": {"tp": 0}}, 422, "degrees.tp"),
        ({"degrees": {"speed": 2}}, 422, "degrees.speed"),
        ({"plan": {}}, 422, "plan"),
        ({"plan": {"schema": "automap.plan/1"}, "degrees": {"tp": 2}}, 422, "degrees"),
        ({"zoo": "gpt9"}, 404, "zoo"),
        ({"cluster": "cluster.json"}, 422, "cluster"),
        ({"training": {"global_batch": 63}, "degrees": {"dp": 8}}, 422, "degrees.micro_batch"),
    ],
)
def test_what_cannot_be_priced(api: httpx.Client, more: dict[str, Any], status: int, field: str) -> None:
    answer = api.post("/v1/estimates", json={**ASKED, **more})
    document = answer.json()
    assert answer.status_code == status, document
    assert document["field"].startswith(field), document
    assert document["repair"]


def test_an_uploaded_model_is_priced_and_drawn(
    api: httpx.Client, client: redis.Redis, light: Callable[[str], bytes], search: Any
) -> None:
    model = api.post("/v1/models?name=net", content=light("squeezenet")).json()
    asked = {"model_id": model["id"], "cluster": "8xV100-16GB", "training": {"global_batch": 64}}
    plan = api.post("/v1/estimates", json=asked).json()
    assert plan["model"] == {"name": "net", "sha256": model["id"], "num_parameters": 1235496}
    job = api.post("/v1/jobs", json=asked).json()
    assert api.get(job["links"]["self"] + "/pictures").status_code == 409
    service_work.run(job["id"], client, search=search)
    drawn = api.get(job["links"]["self"] + "/pictures")
    assert drawn.status_code == 200, drawn.text
    pictures = drawn.json()["pictures"]
    assert set(pictures) == set(PICTURES) - {"search"}  # nothing was searched for this plan
    for picture in pictures.values():
        assert picture["about"] and picture["svg"].startswith("<svg ")
    assert dict(drawn.json()["lines"])["step"]
    page = api.get(job["links"]["self"] + "/report")
    assert page.text.startswith("<!doctype html>") and page.headers["content-disposition"].startswith("attachment")


def test_clusters_are_compared_as_on_the_command_line(api: httpx.Client, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--clusters", "8xA100-80GB,2x8xA100-80GB", "--global-batch", "64", "--price", "A100-80GB=2", "--json"]
    assert main(["recommend", f"zoo:{GPT}", *words]) == 0
    own = json.loads(capsys.readouterr().out)
    asked = {"zoo": GPT, "clusters": ["8xA100-80GB", "2x8xA100-80GB"], "training": {"global_batch": 64}}
    found = api.post("/v1/recommendations", json={**asked, "prices": {"A100-80GB": 2.0}})
    assert found.status_code == 200, found.text
    document = found.json()
    assert document["front"] == own["front"]
    assert document["candidates"] == own["candidates"]
    for more, field in (
        ({"clusters": []}, "clusters"),
        ({"clusters": ["x.json"]}, "clusters[0]"),
        ({"clusters": ["8xA100", "8xZ9000"]}, "clusters[1]"),
        ({"prices": {"V100": 1.0}}, "prices"),
        ({"zoo": "gpt:layers=2"}, "zoo"),
        ({"max_cost_per_hour": 3.0}, "max_cost_per_hour"),
        ({"target_step_s": 1e-9}, "target"),
    ):
        answer = api.post("/v1/recommendations", json={**asked, **more})
        assert (answer.status_code, answer.json()["field"].startswith(field)) == (422, True), answer.text


GRAPH = b""


def test_a_child_that_hangs_or_dies_takes_only_its_request_along(
    monkeypatch: pytest.MonkeyPatch, until: Callable[..., Any]
) -> None:
    import anyio

    own, before = SideProcesses(1), children()
    told = {"request": {"cluster": "8xA100-80GB", "training": {"global_batch": 64}, "model": {"zoo": GPT}}}
    told |= {"model_id": "", "plan": None, "degrees": {}}
    try:
        # Killed in the middle of its start: another one answers; killed again: whoever asked is told so.
        def kill(times: int) -> None:
            killed = set(before)
            for _ in range(times):
                child = until(lambda: [child for child in children() if child not in killed])[0]
                child.kill()
                killed.add(child)

        thread = threading.Thread(target=kill, args=(2,))
        thread.start()
        with pytest.raises(side_processes.HTTPException) as raised:
            anyio.run(own.ask, "check", told, GRAPH)
        thread.join()
        assert raised.value.status_code == 422
        assert (
            raised.value.detail["field"] == "check"
            and raised.value.detail["value"] == "more than 60 s, or than its memory"
        )
        thread = threading.Thread(target=kill, args=(1,))
        thread.start()
        assert anyio.run(own.ask, "check", told, GRAPH) == {}
        thread.join()
        for child in children():
            if child not in before:
                child.kill()
                child.wait()
        # No time at all: it is ended.
        with monkeypatch.context() as patch:
            patch.setattr(side_processes, "LIMIT_S", 0)
            with pytest.raises(side_processes.HTTPException):
                anyio.run(own.ask, "estimate", told, GRAPH)
        # Killed while it had nothing to do: nobody notices.
        assert anyio.run(own.ask, "check", told, GRAPH) == {}
        (idle,) = (child for child in children() if child not in before)
        idle.kill()
        idle.wait()
        assert anyio.run(own.ask, "check", told, GRAPH) == {}
    finally:
        own.close()
    assert children() == before


def test_it_ends_with_its_input_and_knows_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOMAP_REDIS_URL", "redis://:secret@nowhere")
    child = side_processes._start()
    assert b"secret" not in Path(f"/proc/{child.pid}/environ").read_bytes()
    assert child.stdin is not None and child.stdout is not None
    child.stdin.close()
    assert child.wait(30) == 0
    child.stdout.close()


def test_a_task_that_needs_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(document: Any, graph: bytes) -> dict[str, Any]:
        raise MemoryError

    monkeypatch.setattr(side_process, "TASKS", {"greedy": greedy})
    answer = side_process.answer(b'{"task": "greedy", "document": {}}', b"")
    assert answer["problem"]["status"] == 422


def test_checks_are_no_work_of_the_process_that_answers(api: httpx.Client) -> None:
    """This process, in which the application runs, has next to nothing to do while its child builds a large model."""
    asked = {"cluster": "8xA100-80GB", "training": {"global_batch": 64}}

    def spent_s(zoo: str) -> tuple[float, float]:
        before, children_before = time.process_time(), {child: child.cpu_times() for child in children()}
        answer = api.post("/v1/jobs", json={**asked, "zoo": zoo})
        assert answer.status_code == 202, answer.text
        theirs = sum(
            now.user + now.system - then.user - then.system
            for now, then in ((child.cpu_times(), then) for child, then in children_before.items())
        )
        return time.process_time() - before, theirs

    spent_s("gpt2:layers=1")  # loads libraries
    mine, theirs = spent_s("gpt2:layers=1000")
    assert theirs > 0.1
    assert mine < 0.25 * theirs


def test_large_bodies_are_read_where_others_are_served_meanwhile(
    api: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step that takes as long as the body is large is made in the thread that answers, nor are two at a time."""
    threads: set[int] = set()
    at_once = [0, 0]
    to_json, dumps = JobRequest.to_json, JobView.model_dump_json

    def noted(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(self: Any) -> Any:
            threads.add(threading.get_ident())
            at_once[0] += 1
            at_once[1] = max(at_once)
            try:
                return step(self)
            finally:
                at_once[0] -= 1

        return run

    monkeypatch.setattr(JobRequest, "to_json", noted(to_json))
    monkeypatch.setattr(JobView, "model_dump_json", noted(dumps))
    matrix = [[0.0 if i == k else 100.125 for k in range(128)] for i in range(128)]
    cluster = {**parse_cluster("16x8xA100-80GB").to_json(), "bandwidth_GBps": matrix}
    body = {"zoo": GPT, "cluster": cluster, "training": {"global_batch": 128}, "budget": 1}
    url = str(api.base_url)
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda _: httpx.post(f"{url}/v1/jobs", json=body, timeout=60), range(3)))
    assert {answer.status_code for answer in answers} == {202}, answers[0].text
    (loop,) = (thread.ident for thread in threading.enumerate() if thread.name == "server")
    assert threads and loop not in threads
    assert at_once[1] == 1
