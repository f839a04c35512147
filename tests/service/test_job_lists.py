"""The lists of jobs by state against the records themselves."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from redis_servers import ON_EVERY_REDIS, RedisServer

from service.jobs.connection import connect
from service.jobs.counts import read
from service.jobs.job_changes import Superseded
from service.jobs.records import STATES, Job, State
from service.jobs.run_job import JobRequest
from service.jobs.store import Store

REQUEST = JobRequest(cluster="8xV100-16GB", training={"global_batch": 64}, budget="1s")
MODELS = ["m", "n", ""]
"""Ids of models; a known model of the zoo has none."""

CHANGES: list[Callable[[Store, str, int], object]] = [
    lambda store, job_id, token: store.begin(job_id),
    lambda store, job_id, token: store.begin(job_id),
    lambda store, job_id, token: store.set_progress(job_id, token, {"evaluations": 1, "fraction": 0.5}),
    lambda store, job_id, token: store.succeed(job_id, token, {"schema": "automap.plan/1"}),
    lambda store, job_id, token: store.fail(job_id, None, {"title": "failed"}),
    lambda store, job_id, token: store.requeue(job_id, token),
    lambda store, job_id, token: store.died(job_id, token),
    lambda store, job_id, token: store.cancel(job_id),
    lambda store, job_id, token: store.delete(job_id),
]


def change_anything(store: Store, chance: random.Random) -> None:
    """Creates a job, or changes any one that there is."""
    jobs = store.jobs(50)[0]
    if len(jobs) < 5 or chance.random() < 0.2:
        store.create(chance.choice(MODELS), replace(REQUEST, workers=chance.randint(1, 2)))
    else:
        job = chance.choice(jobs)
        with contextlib.suppress(Superseded):
            chance.choice(CHANGES)(store, job.id, job.attempt)


def pages(store: Store, limit: int, states: list[State], model_id: str | None) -> list[str]:
    """Ids of all jobs in some states, of a model or all, page after page."""
    found, cursor = list[Job](), None
    while True:
        page, cursor = store.jobs(limit, cursor=cursor, states=states, model_id=model_id)
        assert page or not found, "a page named a next one that is empty"
        found += page
        if cursor is None:
            return [job.id for job in found]
        assert len(page) == limit


def check_lists(store: Store) -> None:
    """Compares every list with the records of all jobs, and the keys of the lists with each other."""
    jobs, end = store.jobs(1000)
    assert end is None
    for count in (0, 1, 2):
        for states in itertools.combinations(STATES, count):
            for model_id in (None, "m", "n", "unknown"):
                chosen = [job for job in jobs if not states or job.state in states]
                wanted = [job.id for job in chosen if model_id in (None, job.model_id)]
                assert pages(store, 7, [*states], model_id) == wanted
    for model_id in ("", "m", "n"):
        keys = [store.list_keys(state, model_id)[-1] for state in STATES]
        listed = [name for key in keys for name in store.client.zrange(key, 0, -1)]
        assert sorted(listed) == sorted(job.id.encode() for job in jobs if model_id in ("", job.model_id))


@pytest.fixture
def ticking(client: redis.Redis) -> Store:
    """A store in which several jobs are of one moment."""
    now = (float(number // 3) for number in itertools.count())
    return Store(client, clock=lambda: next(now))


class TestOnEveryRedis:
    """What holds on the service's own Redis and on another one."""

    pytestmark = ON_EVERY_REDIS

    def test_every_change_moves_a_job_between_the_lists(self, ticking: Store) -> None:
        chance = random.Random(0)
        for _ in range(6):
            for _ in range(20):
                change_anything(ticking, chance)
            check_lists(ticking)

    @pytest.mark.parametrize("state", STATES)
    @pytest.mark.parametrize("model_id", [None, "m"])
    def test_newer_jobs_of_others_are_not_read(self, ticking: Store, state: State, model_id: str | None) -> None:
        """Newer ones are in another state, or of another model: they hide none, however many they are."""
        ends: dict[State, Callable[[str, int], object]] = {
            "running": lambda job_id, token: None,
            "queued": ticking.requeue,
            "succeeded": lambda job_id, token: ticking.succeed(job_id, token, {}),
            "failed": lambda job_id, token: ticking.fail(job_id, token, {}),
            "cancelled": lambda job_id, token: ticking.cancel(job_id),
        }
        wanted = [ticking.create("m", REQUEST).id for _ in range(2)]
        others = [ticking.create("m" if model_id is None else "n", REQUEST).id for _ in range(30)]
        other: State = state if model_id else "running" if state != "running" else "queued"
        for job_id in (*wanted, *others):
            ends[state if job_id in wanted else other](job_id, ticking.begin(job_id) or 0)

        def num_read() -> int:
            return int(ticking.client.info("commandstats")["cmdstat_hstrlen"]["calls"])

        ticking.jobs(1, states=[state], model_id=model_id)
        before = num_read()
        page, end = ticking.jobs(100, states=[state], model_id=model_id)
        assert ({job.id for job in page}, end) == ({*wanted}, None)
        assert num_read() - before == len(wanted)

    def test_changes_at_once(self, client: redis.Redis, redis_url: str) -> None:
        def work(seed: int) -> None:
            with connect(redis_url) as own:
                chance = random.Random(seed)
                for _ in range(40):
                    change_anything(Store(own), chance)

        run_at_once([lambda seed=seed: work(seed) for seed in range(4)])
        check_lists(Store(client))

    def test_a_tenant_is_removed_beside_changes(self, client: redis.Redis, redis_url: str) -> None:
        store = Store(client)
        for _ in range(120):
            store.create("m", replace(REQUEST, workers=2))
        store.begin(store.next_waiting() or "")

        def work() -> None:
            with connect(redis_url) as own:
                chance = random.Random(0)
                for _ in range(40):
                    change_anything(Store(own), chance)

        run_at_once([work, store.delete_all])
        check_lists(store)
        store.delete_all()
        assert [name for name in client.scan_iter("automap:t:*") if b":searched:" not in name] == []

    @pytest.mark.parametrize("workers", [1, 2])
    def test_a_tenant_of_many_jobs_is_removed_by_few_commands(self, ticking: Store, workers: int) -> None:
        """Of jobs that wait and of jobs that have ended; Redis counts what it is asked for."""
        for number in range(150):
            job_id = ticking.create("m", replace(REQUEST, workers=workers)).id
            if number % 2:
                ticking.cancel(job_id)
        before = ticking.client.info("stats")
        ticking.delete_all()
        after = ticking.client.info("stats")
        assert after["total_reads_processed"] - before["total_reads_processed"] < 100
        assert after["total_commands_processed"] - before["total_commands_processed"] < 150 * (1 + 8 * workers)
        assert ticking.jobs(9) == ([], None)
        assert read(ticking.client)["run:cancelled:0"] == 150


def test_a_redis_that_is_killed_loses_no_place(tmp_path: Path) -> None:
    """Killed while jobs change, and started again from its file."""
    with RedisServer(tmp_path) as server:
        threads = []
        for round_ in range(3):
            begun = threading.Barrier(4)

            def work(seed: int, begun: threading.Barrier = begun) -> None:
                chance = random.Random(seed)
                with connect(server.url) as own, contextlib.suppress(redis.ConnectionError):
                    for number in itertools.count():
                        change_anything(Store(own), chance)
                        if number == 20:
                            begun.wait()

            threads = [threading.Thread(target=work, args=(10 * round_ + seed,)) for seed in range(3)]
            for thread in threads:
                thread.start()
            begun.wait()
            server.kill()
            for thread in threads:
                thread.join()
            server.start()
            with server.client() as client:
                check_lists(Store(client))


def run_at_once(works: list[Callable[[], Any]]) -> None:
    """Runs functions in threads; what one raises is raised here."""
    faults = list[BaseException]()

    def guarded(work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for fault in faults:
        raise fault
