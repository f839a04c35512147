"""`automap submit` and `watch` follow a job and exit by what became of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import redis
import service_work

from automap.errors import NothingFits, ProblemError
from automap.problem import Problem
from service.command.main import main
from service.jobs.store import Store

WORDS = ["zoo:gpt2:layers=2", "--cluster", "8xV100-16GB", "--global-batch", "64", "--budget", "7"]


def cancels(store: Store) -> Callable[..., Any]:
    def search(problem: Problem, budget: Any, **rest: Any) -> Any:
        store.cancel(store.active()[0].id)
        raise ProblemError("never read", field="x", value="x", repair="x")

    return search


def refuses(store: Store) -> Callable[..., Any]:
    def search(problem: Problem, budget: Any, **rest: Any) -> Any:
        raise ProblemError("not today", field="budget", value="7", repair="Wait.")

    return search


def finds_nothing(store: Store) -> Callable[..., Any]:
    def search(problem: Problem, budget: Any, **rest: Any) -> Any:
        raise NothingFits("too large", field="cluster", value="8xV100-16GB", repair="More.")

    return search


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [(None, 0, "strategy"), (cancels, 1, "cancelled"), (refuses, 2, "not today"), (finds_nothing, 3, "too large")],
)
def test_submit_exits_by_outcome(
    api: httpx.Client,
    client: redis.Redis,
    store: Store,
    search: Any,
    until: Any,
    kind: Callable[[Store], Callable[..., Any]] | None,
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work() -> None:
        (job,) = until(store.active)
        service_work.run(job.id, client, search=search if kind is None else kind(store))

    thread = threading.Thread(target=work)
    thread.start()
    assert main(["submit", *WORDS, "--url", str(api.base_url)]) == code
    thread.join()
    (job,), _ = store.jobs(2)
    output = capsys.readouterr()
    assert f"job {job.id}" in output.err
    assert said in output.out + output.err
    # To watch it afterwards comes to the same.
    assert main(["watch", job.id, "--url", str(api.base_url), "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert ("schema" in document) == (code == 0)


def test_delete(api: httpx.Client, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    at = ["--url", str(api.base_url)]
    assert main(["submit", *WORDS, *at, "--detach"]) == 0
    job_id = capsys.readouterr().out.strip()
    assert main(["delete", job_id, *at]) == 0
    assert store.job(job_id) is None
    assert main(["delete", job_id, *at]) == 1


def test_submit_and_leave(api: httpx.Client, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", *WORDS, "--url", str(api.base_url), "--detach"]) == 0
    (job,), _ = store.jobs(2)
    assert capsys.readouterr().out.split() == [job.id]
    assert job.state == "queued"
