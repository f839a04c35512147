"""What a run writes, in this process."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil
import pytest
import redis
import service_work
from rq.timeouts import HorseMonitorTimeoutException, JobTimeoutException
from service_work import delivered

from agents import search_offer
from automap.errors import NothingFits
from service.jobs import delivery, job_queue, one_run, worker
from service.jobs.connection import connect
from service.jobs.delivery import Run
from service.jobs.job_changes import Superseded
from service.jobs.run_job import JobRequest, ModelOptions
from service.jobs.store import NUM_RETRIES, Store
from service.jobs.trial_options import PROPOSE_S, Trials
from service.settings import Settings

REQUEST = JobRequest(cluster="8xV100-16GB", training={"global_batch": 64}, model=ModelOptions(name="net"), budget="1s")


@pytest.fixture
def submit(store: Store, client: redis.Redis, light: Callable[[str], bytes]) -> Callable[[], str]:
    def begin() -> str:
        model = store.add_model(light("squeezenet"), name="net", summary={}, capacity=1 << 30)
        return store.create(model.id, REQUEST).id

    return begin


def test_a_run_stores_its_plan_and_a_second_delivery_does_nothing(
    store: Store, client: redis.Redis, submit: Callable[[], str], search: Any
) -> None:
    job_id = submit()
    service_work.run(job_id, client, search=search)
    plan = store.plan(job_id)
    assert plan is not None
    assert plan["search"]["found_by"] == "fake"
    service_work.run(job_id, client, search=None)  # a second delivery of a job that has ended does nothing
    job = store.job(job_id)
    assert job is not None
    assert job.attempt == 1


def test_what_the_user_can_repair(store: Store, client: redis.Redis, submit: Callable[[], str]) -> None:
    def nothing(*given: object, **rest: object) -> None:
        raise NothingFits("too big", field="cluster", value="8xV100-16GB", repair="Take more devices.")

    job_id = submit()
    service_work.run(job_id, client, search=nothing)
    job = store.job(job_id)
    assert job is not None
    assert job.state == "failed"
    assert job.problem is not None
    assert job.problem["type"].endswith("nothing-fits")
    assert job.problem["repair"] == "Take more devices."


def test_what_nobody_expected(
    store: Store, client: redis.Redis, submit: Callable[[], str], caplog: pytest.LogCaptureFixture
) -> None:
    def explode(*given: object, **rest: object) -> None:
        raise RuntimeError("secret detail")

    job_id = submit()
    service_work.run(job_id, client, search=explode)
    job = store.job(job_id)
    assert job is not None
    assert job.state == "failed"
    assert "secret" not in str(job.problem)
    assert "secret detail" in caplog.text


def test_a_run_that_reaches_its_time_limit(store: Store, client: redis.Redis, submit: Callable[[], str]) -> None:
    def late(*given: object, **rest: object) -> None:
        raise JobTimeoutException

    job_id = submit()
    service_work.run(job_id, client, search=late)
    job = store.job(job_id)
    assert job is not None
    assert job.problem is not None
    assert (job.state, job.problem["title"]) == ("failed", "The job took too long")
    assert "AUTOMAP_MAX_BUDGET_S" in job.problem["detail"] and " 120 s" in job.problem["detail"]


def test_rq_logs_as_the_service_does(client: redis.Redis, settings: Settings) -> None:
    assert worker.Worker(client, settings).log.getEffectiveLevel() == logging.getLogger().level


def test_a_redis_that_refuses_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """RQ writes a traceback every second, and that the worker quits."""
    log, refusals = logging.Logger("rq.worker"), worker.Refusals()
    log.addHandler(caplog.handler)
    log.addFilter(refusals)
    for number in range(5):
        try:
            raise redis.exceptions.OutOfMemoryError(f"Command # {number} (SET) of pipeline caused error: full")
        except redis.RedisError:
            log.error("Worker %s: found an unhandled exception, quitting...", "w", exc_info=True)
    refusals.say(redis.exceptions.ReadOnlyError("another"))
    try:
        raise ValueError("a fault of ours")
    except ValueError:
        log.error("Worker %s: found an unhandled exception, quitting...", "w", exc_info=True)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "Redis refuses (Command # 0 (SET) of pipeline caused error: full); the worker tries again every 1 s",
        "Redis refuses (another); the worker tries again every 1 s",
        "Worker w: found an unhandled exception, quitting...",
    ]


def test_a_superseded_run_stops_and_writes_nothing(
    store: Store, client: redis.Redis, submit: Callable[[], str], search: Any
) -> None:
    job_id = submit()
    stopped = []

    def slow(problem: Any, budget: Any, *, should_stop: Any, **rest: Any) -> Any:
        store.requeue(job_id, None)
        assert store.begin(job_id) == 2
        stopped.append(should_stop())
        return search(problem, budget, should_stop=should_stop, **rest)

    service_work.run(job_id, client, search=slow)
    assert stopped == [True]
    assert store.state(job_id) == "running"
    assert store.plan(job_id) is None


def test_dead_runs_are_repeated_and_then_given_up(store: Store, submit: Callable[[], str]) -> None:
    job_id = submit()
    for _ in range(NUM_RETRIES):
        token = store.begin(job_id) or 0
        store.requeue(job_id, token)  # as when a worker is stopped: no death
        token = store.begin(job_id) or 0
        store.died(job_id, token)
        assert store.state(job_id) == "queued"
    store.died(job_id, store.begin(job_id) or 0)
    job = store.job(job_id)
    assert job is not None
    assert job.state == "failed"
    assert "died 3 times" in str(job.problem)
    with pytest.raises(Superseded):
        store.died(job_id, job.attempt)  # the end is final


def test_the_best_plan_so_far_is_kept_and_the_next_run_begins_with_it(
    store: Store, client: redis.Redis, light: Callable[[str], bytes]
) -> None:
    """With real searches: the second run has next to no time of its own."""
    model = store.add_model(light("squeezenet"), name="net", summary={}, capacity=1 << 30)
    job_id = store.create(model.id, replace(REQUEST, budget="600s", searchers=("mcmc",))).id
    began: list[Any] = []

    def stopped(problem: Any, budget: Any, *, start: Any, on_progress: Any, should_stop: Any, **rest: Any) -> Any:
        began.append(start)

        def enough() -> bool:
            return store.plan(job_id, so_far=True) is not None or should_stop()

        found = search_offer(problem, budget, start=start, on_progress=on_progress, should_stop=enough, **rest)
        store.requeue(job_id, None)  # as when the worker is stopped before it can write the plan
        return found

    service_work.run(job_id, client, search=stopped)
    kept = store.plan(job_id, so_far=True)
    assert kept is not None
    assert (store.state(job_id), store.plan(job_id)) == ("queued", None)
    service_work.run(job_id, client, search=stopped)
    assert [[plan.to_json() for plan in start] for start in began] == [[], [kept]]
    assert kept["search"]["seed"] == REQUEST.seed
    assert store.cancel(job_id)
    assert store.plan(job_id, so_far=True) == kept


def test_a_budget_in_evaluations_begins_anew(store: Store, client: redis.Redis, submit: Callable[[], str]) -> None:
    job_id = submit()
    store.set_best(job_id, store.begin(job_id) or 0, {"schema": "automap.plan/1"})
    assert one_run._checkpointed(store, job_id, replace(REQUEST, budget="50")) == []


def test_a_late_death_does_not_end_the_run_after_it(store: Store, submit: Callable[[], str]) -> None:
    job_id = submit()
    assert store.begin(job_id) == 1
    store.requeue(job_id, 1)
    assert store.begin(job_id) == 2
    for _ in range(NUM_RETRIES + 1):
        with pytest.raises(Superseded):
            store.died(job_id, 1)
        assert store.check(job_id, 2)
    # A second delivery does not take over from a run that is under way.
    assert store.begin(job_id) is None
    assert store.check(job_id, 2)


def test_a_search_goes_on_while_redis_is_away() -> None:
    client = connect("unix:///nowhere/redis.sock")
    store, asked = Store(client), []

    def ask() -> bool:
        asked.append(1)
        return store.check("job", 1)

    counts = one_run._remembered(ask)
    assert counts()
    assert asked == [1]


def test_a_run_may_take_its_budget_its_trials_and_the_overhead() -> None:
    assert job_queue.time_limit_s(replace(REQUEST, budget="30s"), 3600) == 150
    assert job_queue.time_limit_s(replace(REQUEST, budget="2000"), 3600) == 3720
    trials = Trials(top_k=2, time_limit_s=60.0)
    assert job_queue.time_limit_s(replace(REQUEST, budget="30s", trials=trials), 3600) == 150 + 2 * (60 + PROPOSE_S)


@pytest.mark.parametrize(
    ("end", "state", "title"),
    [
        ("memory", "failed", "The job ran out of memory"),
        ("hangs", "failed", "The job took too long"),
        ("killed", "queued", None),
        ("raises", "queued", None),
        ("cancelled", "cancelled", None),
        ("stopped", "queued", None),
        ("late", "succeeded", None),
    ],
)
def test_how_a_child_ends(
    end: str,
    state: str,
    title: str | None,
    store: Store,
    client: redis.Redis,
    settings: Settings,
    submit: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In a child of this process, which does what a job should not."""
    job_id = submit()
    others = psutil.Process().children()
    boss = worker.Worker(client, settings.model_copy(update={"max_job_bytes": 64 << 20}))

    def misbehave(run: Run, client: redis.Redis) -> None:
        if end == "memory":
            bytearray(1 << 30)
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "raises":
            raise RuntimeError
        if end == "cancelled":
            Store(client).cancel(run.job_id)
        if end == "stopped":
            os.kill(os.getppid(), signal.SIGTERM)
        if end == "late":  # the alarm of the job's time limit, when all of it has been done
            Store(client).succeed(run.job_id, run.token, {})
            raise JobTimeoutException
        signal.pause()

    monkeypatch.setattr(one_run, "run", misbehave)
    if end == "hangs":
        # RQ kills it 60 s behind its limit; an alarm at the limit itself, which it might swallow, never rings.
        monkeypatch.setattr(job_queue, "time_limit_s", lambda *given: -60)
    before = signal.signal(signal.SIGTERM, boss.request_stop)
    try:
        found = delivered(client)
        assert found is not None
        boss.execute_job(found, delivery.queue(client))
    finally:
        signal.signal(signal.SIGTERM, before)
    job = store.job(job_id)
    assert job is not None
    assert job.state == state
    # One line for who runs the service, with the job's own id; a job that its owner cancelled is nothing to look at.
    said = {"memory": "it ran out of memory", "hangs": "it took too long", "killed": "its process died (9)"}
    said["raises"] = "its process died (256)"
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ([f"job {job_id}: {said[end]}"] if end in said else [])
    assert job.problem is None if title is None else job.problem and job.problem["title"] == title
    if end in ("killed", "raises", "stopped"):
        # A stop is no death: two more deaths, and only then the job has failed.
        for _ in range(NUM_RETRIES - (end != "stopped")):
            store.died(job_id, store.begin(job_id) or 0)
            assert store.state(job_id) == "queued"
    assert [child for child in psutil.Process().children() if child not in others] == []


def test_the_alarm_of_a_worker_loses_no_exit_status(
    client: redis.Redis, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RQ's alarm ends a wait for the child. When the exit status is read, which works once, it is off."""
    boss, left = worker.Worker(client, settings), []
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.setpgrp()
        os.close(writing)
        os.read(reading, 1)
        os._exit(worker.OUT_OF_MEMORY)
    boss._horse_pid = child
    read_status = os.wait4

    def noted(pid: int, options: int) -> Any:
        left.append(signal.alarm(0))
        return read_status(pid, options)

    monkeypatch.setattr(os, "wait4", noted)
    with pytest.raises(HorseMonitorTimeoutException), boss.death_penalty_class(1, HorseMonitorTimeoutException):
        boss.wait_for_horse()
    os.close(writing)
    with boss.death_penalty_class(60, HorseMonitorTimeoutException):
        _, status, _ = boss.wait_for_horse()
    os.close(reading)
    assert (left, os.waitstatus_to_exitcode(status or 0)) == ([0], worker.OUT_OF_MEMORY)
