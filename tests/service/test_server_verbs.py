"""`automap submit` and `watch` follow a job and exit by what became of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import httpx
import pytest
import redis
import service_work

from automap.errors import NothingFits, ProblemError, UserError
from automap.problem import Problem
from service.client import AutomapClient
from service.command.main import main
from service.command.server_settings import read_settings
from service.jobs.run_job import JobRequest
from service.jobs.store import Store
from service.jobs.worker import Worker
from service.settings import Settings

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
        try:
            service_work.run(job.id, client, search=search if kind is None else kind(store))
        finally:
            store.cancel(job.id)  # changes nothing unless the run has failed; then whoever follows it hears an end

    with ThreadPoolExecutor() as pool:
        worked = pool.submit(work)
        assert main(["submit", *WORDS, "--url", str(api.base_url)]) == code
        worked.result(60)
    (job,), _ = store.jobs(2)
    output = capsys.readouterr()
    assert f"job {job.id}" in output.err
    assert said in output.out + output.err
    # To watch it afterwards comes to the same.
    assert main(["watch", job.id, "--url", str(api.base_url), "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert ("schema" in document) == (code == 0)


def test_a_job_that_no_worker_will_run_is_told(
    api: httpx.Client, settings: Settings, client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ["--url", str(api.base_url)]
    words = ["submit", *WORDS, *at, "--detach"]
    assert main(["status", *at]) == 0
    assert "worker" not in capsys.readouterr().err, "no job waits"
    assert main(words) == 0
    assert "has no worker now; the job waits" in capsys.readouterr().err
    assert main(words) == 0
    job_id = capsys.readouterr().out.strip()
    for asked, waits in (([], "2 jobs wait"), ([job_id], "the job waits"), ([job_id, "--json"], "the job waits")):
        assert main(["status", *asked, *at]) == 0
        output = capsys.readouterr()
        assert f"has no worker now; {waits} until" in output.err and "no worker" not in output.out
    Worker(client, settings).register_birth()
    assert main(words) == 0
    assert main(["status", *at]) == 0
    assert "worker" not in capsys.readouterr().err


def test_delete_removes_a_job_once(api: httpx.Client, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    at = ["--url", str(api.base_url)]
    assert main(["submit", *WORDS, *at, "--detach"]) == 0
    job_id = capsys.readouterr().out.strip()
    assert main(["delete", job_id, *at, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"id": job_id}
    assert store.job(job_id) is None
    assert main(["delete", job_id, *at]) == 2


def test_an_id_is_no_path(api: httpx.Client, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    at = ["--url", str(api.base_url)]
    assert main(["submit", *WORDS, *at, "--detach"]) == 0
    assert main(["delete", "../tenant", *at]) == 2
    assert main(["status", "../jobs", *at]) == 2
    assert len(store.jobs(2)[0]) == 1


def test_a_full_queue_is_a_reason_to_come_back(
    settings: Settings, client: redis.Redis, serve_app: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_app(settings.model_copy(update={"max_queued_jobs": 1}), client) as api:
        words = ["submit", *WORDS, "--url", str(api.base_url), "--detach", "--json"]
        assert [main(words), main(words)] == [0, 75]
    assert '"status": 429' in capsys.readouterr().out


@pytest.mark.parametrize("key", ["", "amk_mistyped", "amk_of a note\n", "cl\N{LATIN SMALL LETTER E WITH ACUTE}"])
def test_a_key_that_is_none(
    settings: Settings,
    client: redis.Redis,
    serve_app: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    key: str,
) -> None:
    monkeypatch.setenv("AUTOMAP_KEY", key)
    with serve_app(settings.model_copy(update={"require_keys": True}), client) as api:
        assert main(["status", "--url", str(api.base_url)]) == 2
    said = capsys.readouterr().err
    assert "key" in said and "automap keys create" in said
    assert not key or key.strip() not in said


def test_ctrl_c_leaves_the_job_and_says_how_to_end_it(
    api: httpx.Client, store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(client: AutomapClient, job_id: str) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(AutomapClient, "watch", interrupted)
    assert main(["submit", *WORDS, "--url", str(api.base_url)]) == 130
    (job,) = store.active()
    assert job.state == "queued"
    said = capsys.readouterr()
    assert f"automap watch {job.id}" in said.err and f"automap cancel {job.id}" in said.err and not said.out


def test_ctrl_c_before_the_answer_says_where_the_job_may_be(
    api: httpx.Client, store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service has accepted the job, and its answer was not waited for: the command knows no id."""
    submit = AutomapClient.submit

    def interrupted(client: AutomapClient, *words: Any, **more: Any) -> NoReturn:
        submit(client, *words, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(AutomapClient, "submit", interrupted)
    assert main(["submit", *WORDS, "--url", str(api.base_url)]) == 130
    assert len(store.active()) == 1
    said = capsys.readouterr()
    assert "may have accepted the job: `automap status`" in said.err and not said.out


def test_submit_and_leave(api: httpx.Client, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", *WORDS, "--url", str(api.base_url), "--detach"]) == 0
    (job,), _ = store.jobs(2)
    assert capsys.readouterr().out.split() == [job.id]
    assert job.state == "queued"


def test_status_says_how_far_a_search_is(api: httpx.Client, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    at = ["--url", str(api.base_url)]
    assert main(["submit", *WORDS, *at, "--detach"]) == 0
    job_id = capsys.readouterr().out.strip()

    def told() -> str:
        assert main(["status", job_id, *at]) == 0
        return capsys.readouterr().out.rstrip()

    assert told().endswith(" on 8xV100-16GB")
    token = store.begin(job_id)
    assert token is not None
    store.set_progress(job_id, token, {"fraction": 0.451, "best_step_time_s": None})
    assert told().endswith("  45%")
    store.set_progress(job_id, token, {"fraction": 0.5, "best_step_time_s": 0.0224})
    assert told().endswith("  50%  best 22.4 ms")
    store.succeed(job_id, token, {"estimate": {"step_time_s": 0.0226}})  # the plainest of those that are as fast
    assert told().endswith("  step 22.6 ms")
    assert api.get(f"/v1/jobs/{job_id}").json()["step_time_s"] == 0.0226


def test_a_list_says_whether_there_are_further_jobs(
    api: httpx.Client, settings: Settings, client: redis.Redis, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    Worker(client, settings).register_birth()  # where there is none, this is said too
    request = JobRequest(cluster="8xV100-16GB", training={"global_batch": 64})
    ids = [store.create("m", request).id for _ in range(2)]
    hint = "there are further jobs; `automap status --limit 10` lists more of them\n"
    for limit, shown, said in ((1, ids[1:], hint), (2, ids[::-1], "")):
        assert main(["status", "--limit", str(limit), "--url", str(api.base_url)]) == 0
        printed = capsys.readouterr()
        assert [line.split()[0] for line in printed.out.splitlines()] == shown
        assert printed.err == said


def test_a_list_of_no_jobs_says_so(api: httpx.Client, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", str(api.base_url)]) == 0
    assert capsys.readouterr().out == "no jobs; `automap submit` makes one\n"


@pytest.mark.parametrize(
    ("name", "most"), [("AUTOMAP_MAX_MODEL_BYTES", 2047 << 20), ("AUTOMAP_MAX_REQUEST_BYTES", 512 << 20)]
)
def test_a_limit_that_cannot_be_kept_is_refused(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """protobuf reads no larger model; Redis cuts the connection that sends a larger value."""
    monkeypatch.setenv(name, str(most))
    read_settings()
    monkeypatch.setenv(name, str(most + 1))
    with pytest.raises(UserError) as fault:
        read_settings()
    assert (fault.value.field, fault.value.repair) == (name, f"Give a number of at most {most}.")


@pytest.mark.parametrize("field", sorted(Settings.model_fields))
def test_a_misspelled_setting_is_refused(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"AUTOMAP_{field.upper()}"
    monkeypatch.setenv(name[:-1], "secret")
    with pytest.raises(UserError, match=f"Did you mean {name}") as fault:
        read_settings()
    assert fault.value.field == name[:-1] and "secret" not in str(fault.value)


def test_variables_that_are_no_settings_are_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, others = ("KEY", "URL"), ("PORT", "SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT_8080_TCP_ADDR")
    for name in (*mine, *others):
        monkeypatch.setenv(f"AUTOMAP_{name}", "x")
    read_settings()


def test_a_setting_that_must_be_above_a_number_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOMAP_KEEP_DAYS", "-1")
    with pytest.raises(UserError, match="Give a number above 0"):
        read_settings()
