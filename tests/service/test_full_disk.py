"""A service whose disk is full: it refuses what it cannot keep, stays up, and goes on once there is room."""

from __future__ import annotations

import errno
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

pytestmark = pytest.mark.slow

JOB = {"zoo": "gpt2:layers=2", "cluster": "8xV100-16GB", "training": {"global_batch": 64}, "searchers": ["random"]}
DISK = "12m"


@pytest.fixture
def disk() -> Iterator[Path]:
    """A small disk of its own, at a path that is short enough for sockets."""
    folder = Path(tempfile.mkdtemp())
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode != 0:
        folder.rmdir()
        pytest.skip("not run: the service on a full disk (mounting a small one needs root)")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
    folder.rmdir()


def fill(path: Path) -> None:
    """Takes all room that is left."""
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left") as caught:
        for size in (1 << 16, 1 << 8, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                if size == 1:
                    raise
    assert caught.value.errno == errno.ENOSPC


def use_up(store: Any) -> None:
    """Writes until the store's file has no byte of its last page left."""
    with pytest.raises(redis.ConnectionError):
        while True:
            store.set("x", "")


def contents(store: Any) -> dict[bytes, Any]:
    """Everything that the service keeps, however it is laid out; RQ's notes of its workers come and go."""
    read = {
        b"string": store.get,
        b"hash": store.hgetall,
        b"set": store.smembers,
        b"zset": lambda key: store.zrange(key, 0, -1, withscores=True),
        b"list": lambda key: store.lrange(key, 0, -1),
        b"stream": store.xrange,
    }
    return {key: read[store.type(key)](key) for key in store.scan_iter("automap:*")}


def test_a_full_disk_refuses_writes_and_loses_nothing(
    disk: Path, start: Callable[..., Any], until: Callable[..., Any], light: Any
) -> None:
    service = start(data_dir=disk / "data", TMPDIR=str(disk))
    url = (disk / "data" / "redis" / "address").read_text()
    with httpx.Client(base_url=service.url, timeout=30) as http, redis.Redis.from_url(url) as store:

        def ended(path: str) -> str:
            job = until(lambda: found if (found := http.get(path, params={"wait": 20}).json())["finished_at"] else None)
            return str(job["state"])

        def safely(read: Callable[[], Any]) -> Any:
            """What a read returns, as soon as the private Redis, which ends where it cannot write, is back."""

            def attempt() -> Any:
                try:
                    return [read()]
                except redis.RedisError:
                    return None

            return until(attempt)[0]

        old = "/v1/jobs/" + http.post("/v1/jobs", json={**JOB, "budget": 1}).raise_for_status().json()["id"]
        assert ended(old) == "succeeded"
        plan, before, worker = http.get(f"{old}/plan").json(), contents(store), service.worker().pid
        filler = disk / "filler"
        fill(filler)
        use_up(store)
        for data in (light("bvlc_alexnet"), light("densenet121")):
            answer = http.post("/v1/models", content=data)
            assert (answer.status_code, answer.json()["title"]) == (507, "The disk is full")
            assert answer.json()["field"] == "disk" and answer.json()["repair"].startswith("Ask the operator")
        for _ in range(3):
            answer = http.post("/v1/jobs", json={**JOB, "budget": 2}, headers={"Idempotency-Key": "k"})
            assert answer.status_code == 503, answer.text
            assert int(answer.headers["Retry-After"]) >= 1
            assert http.get("/healthz").status_code == 200
        assert http.get("/readyz").status_code == 503
        # What was kept can be read, and nothing was half written.
        assert until(lambda: (found := http.get(f"{old}/plan")).status_code == 200 and found.json()) == plan
        assert safely(lambda: contents(store)) == before
        filler.unlink()
        until(lambda: http.get("/readyz").status_code == 200)
        assert service.process.poll() is None and service.worker().pid == worker
        assert [f"/v1/jobs/{job['id']}" for job in http.get("/v1/jobs").json()["jobs"]] == [old]
        assert http.get("/v1/models").json()["models"] == []
        again = [
            http.post("/v1/jobs", json={**JOB, "budget": 2}, headers={"Idempotency-Key": "k"}).raise_for_status()
            for _ in "ab"
        ]
        assert len({answer.json()["id"] for answer in again}) == 1
        assert ended(again[0].headers["Location"]) == "succeeded"
        assert http.post("/v1/models", content=light("squeezenet")).status_code == 201
        assert url == (disk / "data" / "redis" / "address").read_text()
