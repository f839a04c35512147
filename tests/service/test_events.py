"""Events of jobs: none lost, none told twice, from any place on; and answers that a client has already."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis
import service_work
from redis_servers import ON_EVERY_REDIS

from service.jobs import events
from service.jobs.job_changes import Superseded
from service.jobs.store import Store
from service.settings import Settings

pytestmark = ON_EVERY_REDIS
JOB = {"zoo": "gpt2:layers=2", "cluster": "8xV100-16GB", "training": {"global_batch": 64}, "budget": "1s"}


def told(answer: httpx.Response) -> list[tuple[str, str, dict[str, Any]]]:
    """(id, kind, data) of the events of a stream that has ended."""
    found = []
    for block in answer.text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append((fields["id"], fields["event"], json.loads(fields["data"])))
    return found


@pytest.fixture
def job(api: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = api.post("/v1/jobs", json=JOB).json()
    return found


def test_a_job_tells_its_life(api: httpx.Client, job: dict[str, Any], client: redis.Redis, search: Any) -> None:
    service_work.run(job["id"], client, search=search)
    answer = api.get(job["links"]["events"])
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = told(answer)
    states = [(data["state"], data["attempt"]) for _, kind, data in found if kind == "state"]
    assert states == [("queued", 0), ("running", 1), ("succeeded", 1)]
    assert [data["best_step_time_s"] for _, kind, data in found if kind == "progress"][-1] == 0.5
    places = [events.place_of(event_id) for event_id, _, _ in found]
    assert places == sorted(set(places))
    # From every place on, exactly the rest; behind the last one nothing, and browsers stop asking at 204.
    for number, (event_id, _, _) in enumerate(found[:-1]):
        assert told(api.get(job["links"]["events"], headers={"Last-Event-ID": event_id})) == found[number + 1 :]
    assert api.get(job["links"]["events"], headers={"Last-Event-ID": found[-1][0]}).status_code == 204


def test_those_who_listen_early_late_and_again_hear_the_same(
    api: httpx.Client, job: dict[str, Any], store: Store, until: Any
) -> None:
    token = store.begin(job["id"])
    assert token is not None
    heard: list[list[tuple[str, str, dict[str, Any]]]] = [[] for _ in range(4)]

    def listen(number: int) -> None:
        with httpx.Client(base_url=api.base_url, timeout=60) as own:
            last: dict[str, str] = {}
            while not heard[number] or heard[number][-1][1] != "state" or heard[number][-1][2]["state"] != "cancelled":
                with own.stream("GET", job["links"]["events"], headers=last) as answer:
                    block: dict[str, str] = {}
                    for line in answer.iter_lines():
                        if line and not line.startswith(":"):
                            block |= [line.split(": ", 1)]
                        elif block:
                            heard[number].append((block["id"], block["event"], json.loads(block["data"])))
                            last = {"Last-Event-ID": block["id"]}
                            block = {}
                            if number % 2 and len(heard[number]) % 3 == 0:
                                break  # goes away, and comes back

    threads = [threading.Thread(target=listen, args=(number,)) for number in range(4)]
    for thread in threads[:2]:
        thread.start()
    for number in range(40):
        progress = {"evaluations": number, "best_step_time_s": None, "seconds": 0.0, "fraction": 0.5}
        store.set_progress(job["id"], token, progress)
        if number == 20:
            until(lambda: heard[0])
            for thread in threads[2:]:
                thread.start()
    store.cancel(job["id"])
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert [data["evaluations"] for _, kind, data in heard[0] if kind == "progress"] == list(range(40))
    assert all(other == heard[0] for other in heard)


def test_an_error_that_nobody_expected_does_not_end_the_events(
    api: httpx.Client, job: dict[str, Any], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that reads for all reads again."""
    read, faults = events.read, [RuntimeError("out of memory"), redis.ResponseError("UNBLOCKED")]

    def sometimes(client: redis.Redis, stream: str, after: str = "") -> list[events.Event]:
        if faults and threading.current_thread().name == "events":
            raise faults.pop()
        return read(client, stream, after)

    monkeypatch.setattr("service.http.feed._PAUSE_S", 0.01)
    monkeypatch.setattr(events, "read", sometimes)
    with api.stream("GET", job["links"]["events"], timeout=60) as answer:
        lines = answer.iter_lines()
        while "queued" not in next(lines):
            pass
        store.cancel(job["id"])
        assert any("cancelled" in line for line in lines)
    assert not faults


def test_an_event_is_there_if_and_only_if_the_change_is(store: Store, job: dict[str, Any]) -> None:
    token = store.begin(job["id"])
    assert token is not None
    store.cancel(job["id"])
    before = store.events(job["id"])
    with pytest.raises(Superseded):
        store.set_progress(job["id"], token, {"fraction": 1.0})
    assert store.events(job["id"]) == before
    assert before[-1].ends and not before[-2].ends


def test_reports_are_thinned_out_and_nothing_better_is_missed() -> None:
    thinning = events.Thinning()
    passed = []
    for number in range(18_000):  # an hour
        best = 1.0 / (1 + number // 3000)
        seconds = 0.2 * number
        report = {"members": {}, "best_step_time_s": best, "seconds": seconds, "fraction": seconds / 3600.0}
        if thinning.passes(report):
            passed.append(number)
    assert {0, 3000, 6000, 9000, 12000, 15000} <= set(passed)
    assert len(passed) < 1000 < events.MOST_EVENTS


def test_what_cannot_be_listened_to(api: httpx.Client, job: dict[str, Any], client: redis.Redis, store: Store) -> None:
    assert api.get("/v1/jobs/nobody/events").status_code == 404
    for header in ("x", "1-2-3", "9" * 30):
        answer = api.get(job["links"]["events"], headers={"Last-Event-ID": header})
        assert (answer.status_code, answer.json()["field"]) == (422, "last-event-id")
    # A job from before there were events.
    store.cancel(job["id"])
    client.delete(Store(client).events_key(job["id"]))
    ((_, kind, data),) = told(api.get(job["links"]["events"]))
    assert (kind, data["state"]) == ("state", "cancelled")


@pytest.fixture
def short_streams(settings: Settings, client: redis.Redis, serve_app: Any) -> Iterator[httpx.Client]:
    with serve_app(settings.model_copy(update={"max_stream_s": 0.05}), client) as found:
        yield found


def test_a_stream_has_an_end(short_streams: httpx.Client, client: redis.Redis) -> None:
    job = short_streams.post("/v1/jobs", json=JOB).json()
    ((_, _, data),) = told(short_streams.get(job["links"]["events"]))
    assert data["state"] == "queued"


def test_what_a_client_has_is_not_sent_again(api: httpx.Client, job: dict[str, Any], store: Store) -> None:
    here = job["links"]["self"]
    first = api.get(here)
    tag = first.headers["etag"]
    assert api.get(here, headers={"If-None-Match": tag}).status_code == 304
    assert api.get(here, headers={"If-None-Match": f'"other", {tag}'}).status_code == 304
    assert api.get(here, headers={"If-None-Match": '"other"'}).json() == first.json()
    # A long poll of what the client has returns with the first change.
    changing = threading.Timer(0.05, store.begin, [job["id"]])
    changing.start()
    answer = api.get(here, params={"wait": 30}, headers={"If-None-Match": tag})
    changing.join()
    assert (answer.status_code, answer.json()["state"]) == (200, "running")
    assert answer.headers["etag"] != tag
    # Without a tag it waits for the end.
    ending = threading.Timer(0.05, store.cancel, [job["id"]])
    ending.start()
    assert api.get(here, params={"wait": 30}).json()["state"] == "cancelled"
    ending.join()


@pytest.mark.parametrize(
    "path", ["/v1/jobs", "/v1/models", "/v1/clusters", "/v1/zoo", "/v1/targets", "/v1/schemas/plan"]
)
def test_an_unchanged_list_is_not_sent_again(api: httpx.Client, path: str) -> None:
    first = api.get(path)
    again = api.get(path, headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    assert first.headers["cache-control"] == again.headers["cache-control"] == "private, no-cache"
    assert api.get(path, headers={"If-None-Match": 'W/"other"'}).json() == first.json()


def test_a_list_that_has_changed_is_sent(api: httpx.Client, store: Store, search: Any, client: redis.Redis) -> None:
    empty = api.get("/v1/jobs").headers["etag"]
    job = api.post("/v1/jobs", json=JOB).json()
    queued = api.get("/v1/jobs", headers={"If-None-Match": empty})
    assert (queued.status_code, queued.headers["etag"] == empty) == (200, False)
    service_work.run(job["id"], client, search=search)
    ended = api.get("/v1/jobs", headers={"If-None-Match": queued.headers["etag"]})
    assert (ended.status_code, ended.json()["jobs"][0]["state"]) == (200, "succeeded")
    plan = api.get(job["links"]["plan"])
    assert api.get(job["links"]["plan"], headers={"If-None-Match": plan.headers["etag"]}).status_code == 304


def test_a_service_that_ends_lets_those_go_who_listen(settings: Settings, client: redis.Redis, serve_app: Any) -> None:
    with contextlib.ExitStack() as stack:
        with serve_app(settings, client) as api:
            job = api.post("/v1/jobs", json=JOB).json()
            own = stack.enter_context(httpx.Client(base_url=api.base_url, timeout=60))
            answer = stack.enter_context(own.stream("GET", job["links"]["events"]))
            lines = answer.iter_lines()
            assert next(lines).startswith(":")
        # It has ended; a stream that it had cut off would raise here.
        assert any(line.startswith("data:") for line in lines)
