from __future__ import annotations

import pytest
import redis

from service.jobs.run_job import JobRequest
from service.jobs.store import Store, StoreFull, Superseded

REQUEST = JobRequest(cluster="8xV100-16GB", training={"global_batch": 64})


def create(store: Store) -> str:
    return store.create("m", REQUEST, lambda pipe, job_id: None).id


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


def test_a_job_and_its_queue_entry_are_one_transaction(store: Store, client: redis.Redis) -> None:
    def explode(pipe: object, job_id: str) -> None:
        raise RuntimeError("no queue")

    with pytest.raises(RuntimeError):
        store.create("m", REQUEST, explode)
    assert store.jobs(10) == []
    assert list(client.scan_iter("*")) == []


def test_lists(client: redis.Redis) -> None:
    now = iter(range(100))
    store = Store(client, clock=lambda: float(next(now)))
    ids = [create(store) for _ in range(3)]
    assert [job.id for job in store.jobs(2)] == [ids[2], ids[1]]
    store.cancel(ids[1])
    assert [job.id for job in store.active()] == [ids[0], ids[2]]


def test_models_are_kept_by_content(store: Store) -> None:
    one = store.add_model(b"abc", name="a", summary={"num_parameters": 3}, capacity=5)
    again = store.add_model(b"abc", name="b", summary={"num_parameters": 3}, capacity=5)
    assert (one.id, "a") == (again.id, again.name)
    assert store.model_bytes(one.id) == b"abc"
    found = store.model(one.id)
    assert found is not None
    assert (found.name, found.num_bytes, found.summary) == ("a", 3, {"num_parameters": 3})
    with pytest.raises(StoreFull):
        store.add_model(b"defg", name="c", summary={}, capacity=5)
    store.add_model(b"de", name="c", summary={}, capacity=5)


def test_imported_models_can_be_forgotten(store: Store) -> None:
    store.add_graph("k", b"graph")
    assert store.graph("k") == b"graph"
    store.forget_graphs()
    assert store.graph("k") is None
