from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import redis
from redis_servers import ON_EVERY_REDIS

from service.jobs import job_reader
from service.jobs.connection import connect
from service.jobs.job_changes import Superseded
from service.jobs.model_store import MOST_GRAPHS, StoreFull
from service.jobs.records import job_of
from service.jobs.run_job import JobRequest
from service.jobs.store import AnotherRequest, Once, Store

pytestmark = ON_EVERY_REDIS
REQUEST = JobRequest(cluster="8xV100-16GB", training={"global_batch": 64})


def create(store: Store) -> str:
    return store.create("m", REQUEST).id


def test_a_job_from_birth_to_plan(store: Store) -> None:
    job_id = create(store)
    job = store.job(job_id)
    assert job is not None
    assert (job.state, job.attempt, job.request, job.progress, job.started_at) == ("queued", 0, REQUEST, None, None)
    token = store.begin(job_id)
    assert token == 1
    store.set_progress(job_id, token, {"fraction": 0.5})
    job = store.job(job_id)
    assert job is not None
    assert (job.state, job.progress) == ("running", {"fraction": 0.5})
    store.succeed(job_id, token, {"schema": "automap.plan/1"})
    assert store.state(job_id) == "succeeded"
    assert store.plan(job_id) == {"schema": "automap.plan/1"}
    assert store.active() == []


def test_unknown_names(store: Store) -> None:
    assert store.job("x") is None
    assert store.state("x") is None
    assert store.plan("x") is None
    assert store.begin("x") is None
    assert store.model("x") is None
    assert store.model_bytes("x") is None
    assert not store.cancel("x")


def test_a_stale_run_cannot_write(store: Store) -> None:
    job_id = create(store)
    old = store.begin(job_id)
    store.requeue(job_id, None)
    with pytest.raises(Superseded):
        store.succeed(job_id, old or 0, {"by": "old"})
    new = store.begin(job_id)
    assert (old, new) == (1, 2)
    assert not store.check(job_id, 1)
    assert store.check(job_id, 2)
    for write in (store.set_progress, store.succeed, store.fail):
        with pytest.raises(Superseded):
            write(job_id, 1, {"by": "old"})
    store.succeed(job_id, 2, {"by": "new"})
    with pytest.raises(Superseded):
        store.succeed(job_id, 2, {"by": "new again"})
    assert store.plan(job_id) == {"by": "new"}


MEANWHILE: dict[str, Callable[[Store, str], object]] = {
    "waits": lambda store, job_id: None,
    "runs": lambda store, job_id: store.begin(job_id),
    "succeeded": lambda store, job_id: store.succeed(job_id, store.begin(job_id) or 0, {"by": "new"}),
    "failed": lambda store, job_id: store.fail(job_id, store.begin(job_id), {"title": "new"}),
    "cancelled": lambda store, job_id: store.cancel(job_id),
    "deleted": lambda store, job_id: store.delete(job_id),
}
"""What has become of a job since a run of it was thought dead."""
WRITES: dict[str, Callable[[Store, str, int], object]] = {
    "progress": lambda store, job_id, token: store.set_progress(job_id, token, {"fraction": 0.5}),
    "best": lambda store, job_id, token: store.set_best(job_id, token, {"by": "old"}),
    "succeed": lambda store, job_id, token: store.succeed(job_id, token, {"by": "old"}),
    "fail": lambda store, job_id, token: store.fail(job_id, token, {"title": "old"}),
    "requeue": lambda store, job_id, token: store.requeue(job_id, token),
    "died": lambda store, job_id, token: store.died(job_id, token),
}


@pytest.mark.parametrize("meanwhile", MEANWHILE)
@pytest.mark.parametrize("write", WRITES)
def test_no_stale_write_changes_anything(store: Store, client: redis.Redis, meanwhile: str, write: str) -> None:
    job_id = create(store)
    token = store.begin(job_id) or 0
    store.set_best(job_id, token, {"by": "old"})
    store.died(job_id, token)
    MEANWHILE[meanwhile](store, job_id)
    before = {key: client.dump(key) for key in client.scan_iter("*")}
    with pytest.raises(Superseded):
        WRITES[write](store, job_id, token)
    assert {key: client.dump(key) for key in client.scan_iter("*")} == before


def test_the_end_of_a_job_is_final(store: Store) -> None:
    job_id = create(store)
    assert store.cancel(job_id)
    assert not store.cancel(job_id)
    assert store.begin(job_id) is None
    with pytest.raises(Superseded):
        store.requeue(job_id, None)
    with pytest.raises(Superseded):
        store.fail(job_id, None, {"title": "late"})
    assert store.state(job_id) == "cancelled"


def test_a_job_and_its_place_in_the_queue_are_one_transaction(
    store: Store, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*given: object) -> None:
        raise RuntimeError("no queue")

    monkeypatch.setattr(Store, "_wait", explode)
    with pytest.raises(RuntimeError):
        create(store)
    assert list(client.scan_iter("*")) == []


def test_jobs_are_listed_newest_first_over_pages(client: redis.Redis) -> None:
    now = iter(range(1000))
    store = Store(client, clock=lambda: float(next(now)))
    ids = [create(store) for _ in range(3)]
    page, cursor = store.jobs(2)
    assert [job.id for job in page] == [ids[2], ids[1]]
    page, end = store.jobs(2, cursor=cursor)
    assert ([job.id for job in page], end) == ([ids[0]], None)
    store.cancel(ids[1])
    assert [job.id for job in store.active()] == [ids[0], ids[2]]
    page, _ = store.jobs(9, states=["cancelled"])
    assert [job.id for job in page] == [ids[1]]
    assert [job.id for job in store.jobs(9, model_id="m")[0]] == [ids[2], ids[1], ids[0]]
    assert store.jobs(9, model_id="other") == ([], None)


def test_a_filtered_list_reads_only_the_records_that_it_shows(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [create(store) for _ in range(230)]
    for job_id in ids[5:-1]:
        store.cancel(job_id)
    broken = ids[200]
    store.client.hset(store.job_key(broken), "state", "lost")
    read: list[str] = []
    monkeypatch.setattr(job_reader, "job_of", lambda name, row: read.append(name) or job_of(name, row))
    page, cursor = store.jobs(4, states=["queued", "running"])
    rest, end = store.jobs(4, cursor=cursor, states=["queued", "running"])
    assert [job.id for job in (*page, *rest)] == [ids[-1], *ids[4::-1]]
    assert end is None and {*read} == {ids[-1], *ids[:5]}
    # A record whose state cannot be read counts as failed.
    assert [(job.id, job.state) for job in store.jobs(500)[0] if job.id == broken] == [(broken, "failed")]


def test_pages_hold_every_job_once_also_when_all_are_of_one_moment(client: redis.Redis) -> None:
    store = Store(client, clock=lambda: 5.0)
    ids = {create(store) for _ in range(120)}
    seen: list[str] = []
    cursor = None
    while True:
        page, cursor = store.jobs(7, cursor=cursor)
        seen += [job.id for job in page]
        if cursor is None:
            break
    assert len(seen) == len(ids)
    assert set(seen) == ids


def test_large_requests_end_a_page(store: Store) -> None:
    large = replace(REQUEST, hints={"parameters": ["x" * 1_000_000]})
    for _ in range(8):
        store.create("m", large)
    page, cursor = store.jobs(100)
    assert len(page) == 5
    assert len(store.jobs(100, cursor=cursor)[0]) == 3


def test_a_key_that_comes_again_makes_no_second_job(client: redis.Redis, redis_url: str) -> None:
    """100 requests at once, from connections of their own."""
    found: set[str] = set()

    def submit() -> None:
        with connect(redis_url) as own:
            found.add(Store(own).create("m", REQUEST, once=Once(key="k", request_sha256="a")).id)

    threads = [threading.Thread(target=submit) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = Store(client)
    assert len(found) == 1
    assert {job.id for job in store.jobs(200)[0]} == found
    assert store.num_waiting() == 1
    with pytest.raises(AnotherRequest):
        store.create("m", REQUEST, once=Once(key="k", request_sha256="b"))
    # A tenant's keys are its own, and a job that was deleted frees its key.
    assert store.of("other").create("m", REQUEST, once=Once(key="k", request_sha256="b")).id not in found
    store.delete(found.pop())
    store.create("m", REQUEST, once=Once(key="k", request_sha256="b"))


def test_tenants_do_not_see_each_other(store: Store) -> None:
    other = store.of("other")
    job_id = create(store)
    model = store.add_model(b"abc", name="a", summary={}, capacity=10_000)
    store.add_graph("k", b"graph", {})
    assert other.job(job_id) is None
    assert other.jobs(9) == ([], None)
    assert other.plan(job_id, so_far=True) is None
    assert not other.cancel(job_id)
    assert not other.delete(job_id)
    assert (other.model(model.id), other.model_bytes(model.id), other.graph("k")) == (None, None, None)
    assert not other.delete_model(model.id)
    assert other.stored_bytes() == 0 < store.stored_bytes()
    other.delete_all()
    assert store.state(job_id) == "queued"
    assert store.model_bytes(model.id) == b"abc"


def test_nothing_is_left_of_what_is_deleted(store: Store, client: redis.Redis) -> None:
    first, second = create(store), create(store)
    token = store.begin(first) or 0
    store.set_best(first, token, {"schema": "automap.plan/1"})
    for job_id in (first, second):
        assert store.delete(job_id)
        assert not store.delete(job_id)
    with pytest.raises(Superseded):
        store.succeed(first, token, {})
    assert not any(first in name.decode() or second in name.decode() for name in client.scan_iter("*"))
    create(store)
    store.add_model(b"abc", name="a", summary={}, capacity=10_000)
    store.delete_all()
    assert [name for name in client.scan_iter("automap:t:*") if b":searched:" not in name] == []
    assert store.tenants() == []


def test_old_and_too_many_jobs_are_removed(client: redis.Redis) -> None:
    now = [0.0]
    store = Store(client, clock=lambda: now[0])
    old, running, *rest = [create(store) for _ in range(5)]
    store.begin(running)
    for job_id in (old, *rest):
        store.cancel(job_id)
    now[0] = 50.0
    young = create(store)
    store.cancel(young)
    assert store.trim(oldest_s=100.0, most_bytes=1 << 20) == 0
    assert store.trim(oldest_s=40.0, most_bytes=1 << 20) == 4
    assert {job.id for job in store.jobs(9)[0]} == {running, young}
    assert store.trim(oldest_s=100.0, most_bytes=1) == 1
    assert [job.id for job in store.jobs(9)[0]] == [running]


def test_the_searches_of_a_day(client: redis.Redis) -> None:
    now = [1000.0]
    store = Store(client, clock=lambda: now[0])
    kept = store.create("m", REQUEST, reserve_s=60.0).id
    cancelled = store.create("m", REQUEST, reserve_s=60.0).id
    assert store.searched_s() == 120.0
    store.cancel(cancelled)
    assert store.searched_s() == 60.0
    token = store.begin(kept) or 0
    now[0] += 10.0
    store.requeue(kept, token)
    token = store.begin(kept) or 0
    now[0] += 7.0
    store.succeed(kept, token, {})
    assert store.searched_s() == pytest.approx(17.0)
    now[0] += 24 * 3600
    assert store.searched_s() == 0.0


def test_models_are_kept_by_content(store: Store) -> None:
    one = store.add_model(b"abc", name="a", summary={"name": "a", "num_parameters": 3}, capacity=5)
    again = store.add_model(b"abc", name="b", summary={"name": "b", "num_parameters": 3}, capacity=5)
    assert one == again
    assert store.model_bytes(one.id) == b"abc"
    found = store.model(one.id)
    assert found is not None
    assert (found.name, found.num_bytes, found.summary) == ("a", 3, {"name": "a", "num_parameters": 3})
    with pytest.raises(StoreFull):
        store.add_model(b"defg", name="c", summary={}, capacity=5)
    store.add_model(b"de", name="c", summary={}, capacity=5)


def test_imported_models_can_be_forgotten(store: Store) -> None:
    store.add_graph("k", b"graph", {})
    assert store.graph("k") == b"graph"
    for number in range(MOST_GRAPHS):
        store.add_graph(str(number), b"graph", {})
    assert (store.graph("k"), store.graph("0")) == (None, b"graph")
    store.forget_graphs()
    assert store.graph("0") is None


def test_a_job_never_comes_to_wait_for_a_model_that_is_removed_meanwhile(store: Store) -> None:
    """Whichever of the two is first, the other one is refused."""
    model = store.add_model(b"file", name="m", summary={}, capacity=100)
    looks = 0

    def there() -> None:
        nonlocal looks
        looks += 1
        if store.model(model.id) is None:
            raise LookupError
        if looks == 1:
            assert Store(store.client).delete_model(model.id)

    with pytest.raises(LookupError):
        store.create(model.id, REQUEST, admit=there)
    assert (looks, store.num_waiting(), store.active()) == (2, 0, [])

    model, made = store.add_model(b"file", name="m", summary={}, capacity=100), list[str]()

    def unused() -> None:
        if any(job.model_id == model.id for job in store.active()):
            raise LookupError
        made.append(Store(store.client).create(model.id, REQUEST).id)

    with pytest.raises(LookupError):
        store.delete_model(model.id, admit=unused)
    assert len(made) == 1 and store.model(model.id) == model


def test_a_model_can_be_removed_while_memory_is_full(store: Store) -> None:
    model = store.add_model(b"file", name="m", summary={}, capacity=100)
    store.client.config_set("maxmemory", 1)
    try:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            create(store)
        assert store.delete_model(model.id)
    finally:
        store.client.config_set("maxmemory", 0)
    assert store.model(model.id) is None and store.stored_bytes() == 0


def test_uploads_that_come_at_once_do_not_pass_the_limit_together(store: Store) -> None:
    class Late(Store):
        """One between whose look and record another upload comes, once."""

        came = False

        def stored_bytes(self) -> int:
            found = super().stored_bytes()
            if not self.came:
                self.came = True
                Store(self.client).add_model(b"x" * 60, name="first", summary={}, capacity=100)
            return found

    with pytest.raises(StoreFull):
        Late(store.client).add_model(b"y" * 60, name="second", summary={}, capacity=100)
    assert [model.name for model in store.models()] == ["first"]


def test_a_job_that_comes_while_its_tenant_is_removed_stays_whole(
    store: Store, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it among those that wait would be chosen by all workers again and again."""
    old, once, made = create(store), Once(key="k", request_sha256="0"), list[str]()
    scan = client.scan_iter

    def scan_with_others(match: str, count: int) -> Iterator[bytes]:
        # Everything may be seen before and after it comes.
        yield from list(scan(match))
        made.append(Store(client).create("m", replace(REQUEST, workers=2), once=once).id)
        yield from list(scan(match))

    store.create("m", REQUEST, once=Once(key="other", request_sha256="0"))
    monkeypatch.setattr(client, "scan_iter", scan_with_others)
    store.delete_all()
    assert store.state(old) is None
    assert [job.id for job in store.jobs(9)[0]] == made
    assert (store.num_waiting(), store.tenants()) == (2, ["default"])
    assert {job.id for job in store.active()} == {made[0], f"{made[0]}-1"}
    assert store.create("m", REQUEST, once=once).id == made[0]
    assert store.next_waiting() == made[0] and store.begin(made[0]) == 1
    assert not [name for name in scan("automap:t:*") if old.encode() in name]


def test_a_clock_that_is_set_back_gives_no_time_away(client: redis.Redis) -> None:
    now = [1000.0]
    store = Store(client, clock=lambda: now[0])
    job_id = store.create("m", REQUEST, reserve_s=30.0).id
    now[0] = 900.0
    token = store.begin(job_id)
    now[0] = 500.0
    store.succeed(job_id, token or 0, {})
    assert store.searched_s() == 0.0
