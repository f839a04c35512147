"""A copy of the data folder is all that there is: what a restored service knows is what the old one knew."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from service_work import run

from service.embedded_redis import EmbeddedRedis
from service.jobs.connection import connect
from service.jobs.job_queue import recover
from service.jobs.keys import Keys, place_of
from service.jobs.run_job import JobRequest, ModelOptions
from service.jobs.store import Store

REQUEST = JobRequest(
    cluster="8xV100-16GB", training={"global_batch": 64}, model=ModelOptions(zoo="gpt2:layers=2"), budget="7"
)


def test_a_copy_brings_everything_back(tmp_path: Path, search: Any) -> None:
    with EmbeddedRedis(tmp_path / "old") as server, connect(server.url) as client:
        store = Store(client)
        model = store.add_model(b"bytes", name="net", summary={"n": 1}, capacity=100)
        done, running, waiting = (store.create(model.id, REQUEST) for _ in range(3))
        run(done.id, client, search=search)
        assert store.begin(running.id) == 1
        key, _ = Keys(client).create("default", ["read"])
        plan, events = store.plan(done.id), store.events(done.id)
        assert plan is not None
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    shutil.rmtree(tmp_path / "old")
    with EmbeddedRedis(tmp_path / "new") as server, connect(server.url) as client:
        store = Store(client)
        assert recover(store) == 2
        assert [job.id for job in store.active()] == [running.id, waiting.id]
        assert all(job.state == "queued" for job in store.active())
        assert (store.plan(done.id), store.events(done.id)) == (plan, events)
        assert (store.model(model.id), store.model_bytes(model.id)) == (model, b"bytes")
        assert Keys(client).checked(key, client.hget(*place_of(key))).tenant == "default"
        run(running.id, client, search=search)
        assert store.state(running.id) == "succeeded"
