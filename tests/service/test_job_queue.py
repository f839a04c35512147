"""Which job a delivery of RQ begins, and that none is lost however deliveries are."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace

import pytest
import redis
from redis_servers import ON_EVERY_REDIS
from rq.utils import current_timestamp
from service_work import delivered, take, taken

from service.jobs import delivery, job_queue
from service.jobs.run_job import JobRequest
from service.jobs.store import Store
from service.jobs.worker import Worker
from service.settings import Settings

pytestmark = ON_EVERY_REDIS
REQUEST = JobRequest(cluster="8xV100-16GB", training={"global_batch": 64})


def create(store: Store, priority: int = 0) -> str:
    return store.create("m", replace(REQUEST, priority=priority)).id


def test_high_priorities_come_first_then_the_oldest(client: redis.Redis) -> None:
    now = iter(range(1000))
    store = Store(client, clock=lambda: float(next(now)))
    plain, low, high, plain_too = create(store), create(store, -10), create(store, 10), create(store)
    assert [taken(client).job_id for _ in range(4)] == [high, plain, plain_too, low]
    assert take(client) is None


def test_a_requeued_job_keeps_its_place(store: Store, client: redis.Redis) -> None:
    first, second = create(store), create(store)
    run = taken(client)
    store.requeue(run.job_id, run.token)
    assert [taken(client).job_id for _ in range(2)] == [first, second]


def test_tenants_take_turns_however_much_one_submits(store: Store, client: redis.Redis) -> None:
    for tenant, count in (("a", 30), ("b", 5), ("c", 5)):
        for _ in range(count):
            create(store.of(tenant), priority=10 if tenant == "a" else 0)
    begun: list[str] = []
    for _ in range(15):
        run = taken(client)
        begun.append(run.tenant)
        store.of(run.tenant).fail(run.job_id, run.token, {})
    assert Counter(begun) == {"a": 5, "b": 5, "c": 5}


def test_a_tenant_whose_jobs_run_waits_for_one_that_has_none_running(store: Store, client: redis.Redis) -> None:
    for tenant in ("a", "a", "a", "b", "b"):
        create(store.of(tenant))
    assert {taken(client).tenant, taken(client).tenant} == {"a", "b"}
    third = taken(client)
    store.of(third.tenant).fail(third.job_id, third.token, {})
    # One of each runs again; whoever ran last comes last.
    assert taken(client).tenant != third.tenant


@pytest.fixture
def worker(client: redis.Redis, settings: Settings) -> Worker:
    found = Worker(client, settings)
    found.register_birth()
    return found


def look(worker: Worker, monkeypatch: pytest.MonkeyPatch, *, after_s: int) -> None:
    """What a worker does between deliveries, at a time from now."""
    monkeypatch.setattr("service.jobs.worker.current_timestamp", lambda: current_timestamp() + after_s)
    worker.clean_registries()


def begun(worker: Worker, client: redis.Redis) -> tuple[delivery.Run, str]:
    """A run of a worker, which dies then, and the delivery's id."""
    found = delivered(client)
    assert found is not None
    worker.prepare_execution(found)
    run = delivery.noted(found)
    assert run is not None
    return run, found.id


def test_the_run_of_a_dead_worker_is_repeated(
    store: Store, client: redis.Redis, worker: Worker, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, alive = create(store), Worker(client, settings)
    run, _ = begun(worker, client)
    for after_s in (0, 5, 10, 13):
        look(alive, monkeypatch, after_s=after_s)
        assert store.check(job_id, run.token)
    look(alive, monkeypatch, after_s=16)
    assert store.state(job_id) == "queued"
    again = taken(client)
    assert (again.job_id, again.token) == (job_id, run.token + 1)
    # The dead worker was only stopped: its signs of life change nothing.
    found = worker.execution
    assert found is not None
    worker.maintain_heartbeats(found.job)
    look(alive, monkeypatch, after_s=100)
    assert store.check(job_id, again.token)


def test_a_sign_of_life_between_two_looks_saves_the_run(
    store: Store, client: redis.Redis, worker: Worker, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a Redis that was away: the first look finds every run too old."""
    create(store)
    run, _ = begun(worker, client)
    registry, alive = delivery.queue(client).started_job_registry, Worker(client, settings)
    found = worker.execution
    assert found is not None
    client.zadd(registry.key, {found.composite_key: current_timestamp() - 60})
    look(alive, monkeypatch, after_s=0)
    worker.maintain_heartbeats(found.job)
    look(alive, monkeypatch, after_s=3)
    assert store.check(run.job_id, run.token)


def test_lost_deliveries_are_replaced_after_two_looks(
    store: Store, client: redis.Redis, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = {create(store) for _ in range(3)}
    assert delivered(client) and delivered(client)  # by workers that die before they register them
    look(worker, monkeypatch, after_s=0)
    assert len(delivery.queue(client)) == 1
    look(worker, monkeypatch, after_s=3)
    assert {taken(client).job_id for _ in range(3)} == jobs
    assert take(client) is None


def test_a_delivery_without_a_job_does_nothing(store: Store, client: redis.Redis, worker: Worker) -> None:
    store.cancel(create(store))
    found = delivered(client)
    assert found is not None
    worker.execute_job(found, delivery.queue(client))  # no child: its folder would be gone
    assert not [key for key in client.keys("rq:*") if found.id.encode() in key]
    assert client.zcard(delivery.queue(client).started_job_registry.key) == 0
    assert client.llen(delivery.queue(client).intermediate_queue_key) == 0


def test_the_lock_that_a_killed_worker_leaves_stops_nobody(
    store: Store, client: redis.Redis, worker: Worker, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(store)
    run, _ = begun(worker, client)
    assert delivery.queue(client).acquire_maintenance_lock()
    alive = Worker(client, settings)
    for after_s in (13, 16):
        look(alive, monkeypatch, after_s=after_s)
    assert store.state(run.job_id) == "queued"


def test_a_worker_killed_at_any_command_of_a_delivery_loses_nothing(
    store: Store, client: redis.Redis, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job either waits, or RQ knows a delivery that says it runs."""
    execute, count = redis.client.Pipeline.execute_command, 0

    class Killed(BaseException):
        pass

    def dying(self: redis.client.Pipeline, *words: object, **rest: object) -> object:
        nonlocal count
        count -= 1
        if count == 0:
            raise Killed
        return execute(self, *words, **rest)

    monkeypatch.setattr(redis.client.Pipeline, "execute_command", dying)
    states = []
    for at in range(1, 40):
        count = 0
        job_id, found = create(store), delivered(client)
        assert found is not None
        dead, count = Worker(client, settings), at
        with contextlib.suppress(Killed):
            dead.prepare_execution(found)
        count = 0
        states.append(store.state(job_id))
        if states[-1] == "running":
            assert found.id in delivery.queue(client).started_job_registry.get_job_ids(cleanup=False)
            run = delivery.noted(found)
            assert run is not None and (run.job_id, run.token) == (job_id, 1)
        else:
            assert store.next_waiting() == job_id
        store.delete(job_id)
        client.delete(delivery.queue(client).key)
    # It was killed before and behind the transaction that begins the run.
    assert set(states) == {"queued", "running"}


def test_the_answer_that_was_lost_is_asked_for_again(
    store: Store, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run begins, the connection breaks, and the second attempt finds the job running: it is the delivery's own."""
    job_id = create(store)
    begin = Store.begin

    def twice(self: Store, job_id: str, note: object) -> int | None:
        begin(self, job_id, note)  # type: ignore[arg-type]
        return begin(self, job_id, note)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "begin", twice)
    run = taken(client)
    assert (run.job_id, run.token) == (job_id, 1)
    assert store.check(job_id, 1)


def test_workers_are_listed_while_they_live(client: redis.Redis, worker: Worker) -> None:
    ((name, at),) = delivery.workers(client).items()
    assert name == worker.name
    assert abs(at - current_timestamp()) < 60
    worker.register_death()
    assert delivery.workers(client) == {}


def test_recovery_queues_what_has_not_ended(store: Store, client: redis.Redis) -> None:
    first, second, third = create(store), create(store), create(store)
    store.begin(first)
    store.cancel(second)
    assert job_queue.recover(store) == 2
    assert store.state(first) == "queued"
    # One delivery too many, of the job that was cancelled.
    assert [run and run.job_id for run in (take(client) for _ in range(4))] == [first, third, None, None]


def test_what_is_left_of_a_job_that_is_gone_holds_nobody_up(store: Store, client: redis.Redis) -> None:
    gone, ended, other = (store.create("m", REQUEST).id for _ in range(3))
    client.delete(store.job_key(gone))
    client.hset(store.job_key(ended), "state", "cancelled")
    assert store.begin(gone) is None and store.num_waiting() == 2
    run = take(client)
    assert run is not None and run.job_id == other
    assert store.num_waiting() == 0 and [job.id for job in store.active()] == [other]
    assert store.state(ended) == "cancelled"
