from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace

import pytest
import redis
from redis_servers import ON_EVERY_REDIS

from service.jobs.job_queue import WORKERS, Claim, Queue
from service.jobs.run_job import JobRequest
from service.jobs.store import LEASES, Store

pytestmark = ON_EVERY_REDIS
REQUEST = JobRequest(cluster="8xV100-16GB", training={"global_batch": 64})


def create(store: Store, priority: int = 0) -> str:
    return store.create("m", replace(REQUEST, priority=priority)).id


def claimed(queue: Queue) -> Claim:
    found = queue.claim()
    assert found is not None
    return found


def test_high_priorities_come_first_then_the_oldest(client: redis.Redis) -> None:
    now = iter(range(1000))
    store = Store(client, clock=lambda: float(next(now)))
    plain, low, high, plain_too = create(store), create(store, -10), create(store, 10), create(store)
    queue = Queue(client, "w")
    assert [claimed(queue).job_id for _ in range(4)] == [high, plain, plain_too, low]
    assert queue.claim() is None


def test_a_requeued_job_keeps_its_place(store: Store, client: redis.Redis) -> None:
    first, second = create(store), create(store)
    queue = Queue(client, "w")
    claim = claimed(queue)
    store.requeue(claim.job_id, claim.token)
    assert [claimed(queue).job_id for _ in range(2)] == [first, second]


def test_tenants_take_turns_however_much_one_submits(store: Store, client: redis.Redis) -> None:
    for tenant, count in (("a", 30), ("b", 5), ("c", 5)):
        for _ in range(count):
            create(store.of(tenant), priority=10 if tenant == "a" else 0)
    queue = Queue(client, "w")
    begun: list[str] = []
    for _ in range(15):
        claim = claimed(queue)
        begun.append(claim.tenant)
        store.of(claim.tenant).fail(claim.job_id, claim.token, {})
    assert Counter(begun) == {"a": 5, "b": 5, "c": 5}


def test_a_tenant_whose_jobs_run_waits_for_one_that_has_none_running(store: Store, client: redis.Redis) -> None:
    for tenant in ("a", "a", "a", "b", "b"):
        create(store.of(tenant))
    queue = Queue(client, "w")
    assert {claimed(queue).tenant, claimed(queue).tenant} == {"a", "b"}
    third = claimed(queue)
    store.of(third.tenant).fail(third.job_id, third.token, {})
    # One of each runs again; whoever ran last comes last.
    assert claimed(queue).tenant != third.tenant


def test_a_run_without_a_sign_of_life_is_repeated(store: Store, client: redis.Redis) -> None:
    job_id = create(store)
    dead, alive = Queue(client, "dead", lease_s=-1.0), Queue(client, "alive")
    claim = claimed(dead)
    assert alive.reap() == 0  # seen once: Redis itself may have been away
    assert alive.reap() == 1
    assert store.state(job_id) == "queued"
    again = claimed(alive)
    assert (again.job_id, again.token) == (job_id, claim.token + 1)
    # The dead worker was only stopped: its signs of life and its writes change nothing.
    dead.renew(claim)
    assert not store.check(job_id, claim.token)
    assert store.check(job_id, again.token)


def test_a_sign_of_life_between_two_looks_saves_the_run(store: Store, client: redis.Redis) -> None:
    create(store)
    queue, other = Queue(client, "w", lease_s=-1.0), Queue(client, "other")
    claim = claimed(queue)
    other.reap()
    Queue(client, "w").renew(claim)
    assert other.reap() == 0
    assert store.check(claim.job_id, claim.token)


def test_the_end_of_a_run_ends_its_lease(store: Store, client: redis.Redis) -> None:
    create(store)
    queue = Queue(client, "w")
    claim = claimed(queue)
    assert client.zcard(LEASES) == 1
    store.succeed(claim.job_id, claim.token, {})
    queue.renew(claim)
    assert client.zcard(LEASES) == 0
    assert client.zrange(WORKERS, 0, -1) == [b"w"]
    queue.leave()
    assert client.zcard(WORKERS) == 0


def test_a_worker_killed_at_any_command_of_a_claim_loses_nothing(
    store: Store, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is either still waiting or has a lease: there is no command between the two."""
    execute = redis.client.Pipeline.execute_command
    count = 0

    class Killed(Exception):
        pass

    def dying(self: redis.client.Pipeline, *words: object, **rest: object) -> object:
        nonlocal count
        count -= 1
        if count == 0:
            raise Killed
        return execute(self, *words, **rest)

    monkeypatch.setattr(redis.client.Pipeline, "execute_command", dying)
    for at in range(1, 12):
        count = 0
        job_id = create(store)
        queue, count = Queue(client, "w"), at
        with contextlib.suppress(Killed):
            queue.claim()
        count = 0
        leased = client.zscore(LEASES, f"default/{job_id}") is not None
        assert (store.state(job_id), leased) in {("queued", False), ("running", True)}
        assert store.num_waiting() == (not leased)
        store.delete(job_id)
