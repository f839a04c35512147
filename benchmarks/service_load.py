"""Load on a running service: tiny jobs of several tenants, polls beside searches, slow connections, and a mix of all.

    python benchmarks/service_load.py [--jobs 1000] [--polls 2000] [--slow 1000] [--minutes 30] [--workers 2]

Throughput: four tenants submit as fast as they can; jobs a second from the first submission to the last end, the
processor time that a job takes in its worker, and how far tenants are apart. Polls: 500 offered a second on 16
connections beside a running search. Slow: so many connections that send one byte in two seconds, and what the polls of
others take meanwhile. Mix (`--minutes`): uploads, jobs, lists, cancels and deletes in turn; growth of memory and open
files of the service and its workers behind the first tenth. 0 leaves a part out.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil

from service.embedded_redis import EmbeddedRedis
from service.jobs.connection import connect
from service.jobs.keys import SCOPES, Keys

MODEL = "gpt:layers=1,hidden=64,heads=2,seq_len=32,vocab_size=64"
JOB = {"zoo": MODEL, "cluster": "1xV100-16GB", "training": {"global_batch": 8}, "searchers": ["random"], "tie": 0}
PROFILE = "\n".join(
    f"node{i} -- cell_{i} -- forward_compute_time=3, backward_compute_time=5, activation_size=16, parameter_size=40"
    for i in (1, 2)
)
TENANTS = ("a", "b", "c", "d")
POLLS_A_SECOND = 500
CONNECTIONS = 16


def start(url: str, workers: int) -> tuple[subprocess.Popen[bytes], str]:
    """Starts the service on a Redis; returns it and its address."""
    words = ["serve", "--port", "0", "--json", "--workers", str(workers)]
    more = {"AUTOMAP_REDIS_URL": url, "AUTOMAP_REQUIRE_KEYS": "1", "AUTOMAP_LOG_LEVEL": "CRITICAL"}
    process = subprocess.Popen(
        [sys.executable, "-m", "service.command.main", *words],
        env={**os.environ, **more, "AUTOMAP_MAX_QUEUED_JOBS": "100000"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    with process.stdout as out:
        line = out.readline().decode()
    return process, line.split('"')[3]


def at_once(work: Callable[[int], object], number: int) -> None:
    """Does work in so many threads."""
    threads = [threading.Thread(target=work, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def throughput(clients: dict[str, httpx.Client], jobs: int, workers: list[psutil.Process]) -> None:
    """Measures tiny jobs."""
    share = jobs // len(TENANTS)

    def spent_s() -> float:
        times = [process.cpu_times() for process in workers]
        return sum(t.user + t.system + t.children_user + t.children_system for t in times)

    ids: dict[str, list[str]] = {tenant: [] for tenant in TENANTS}

    def submit(number: int) -> None:
        tenant = TENANTS[number]
        for seed in range(share):
            answer = clients[tenant].post("/v1/jobs", json={**JOB, "budget": 1, "seed": seed})
            ids[tenant].append(answer.raise_for_status().json()["id"])

    before_s, began, began_at = spent_s(), time.monotonic(), time.time()
    at_once(submit, len(TENANTS))
    submitted_s = time.monotonic() - began
    ends: dict[str, list[float]] = {tenant: [] for tenant in TENANTS}
    for tenant, own in ids.items():
        for job_id in own:
            while (job := clients[tenant].get(f"/v1/jobs/{job_id}?wait=30").json())["finished_at"] is None:
                pass
            assert job["state"] == "succeeded", job
            ends[tenant].append(job["finished_at"] - began_at)
    whole_s = max(map(max, ends.values()))
    means = [statistics.mean(own) for own in ends.values()]
    count = share * len(TENANTS)
    print(f"throughput: {count / whole_s:.1f} jobs/s ({count} jobs, submitted in {submitted_s:.1f} s); "
          f"{(spent_s() - before_s) / count * 1000:.0f} ms of processor time a job in its worker; "
          f"tenants' mean ends {max(means) / min(means) - 1:.0%} apart")  # fmt: skip


def poll_s(url: str, path: str, headers: dict[str, str], count: int) -> list[float]:
    """Seconds of so many polls, offered at `POLLS_A_SECOND`, from the moment each was due."""
    found: list[float] = []
    share, every_s = count // CONNECTIONS, CONNECTIONS / POLLS_A_SECOND

    def poll(number: int) -> None:
        with httpx.Client(base_url=url, headers=headers, timeout=60) as own:
            due = time.monotonic() + every_s * number / CONNECTIONS
            for _ in range(share):
                time.sleep(max(0.0, due - time.monotonic()))
                own.get(path).raise_for_status()
                found.append(time.monotonic() - due)
                due += every_s

    at_once(poll, CONNECTIONS)
    return found


def shown(seconds: list[float]) -> str:
    """Percentiles."""
    cuts = statistics.quantiles(seconds, n=100)
    return f"p50 {cuts[49] * 1000:.1f}, p95 {cuts[94] * 1000:.1f}, p99 {cuts[98] * 1000:.1f} ms"


def slowly(url: httpx.URL, number: int, ended: threading.Event) -> int:
    """Holds connections that send a byte now and then; returns how many were closed by the service."""
    found = []
    for _ in range(number):
        one = socket.create_connection((url.host, url.port or 80))
        one.setblocking(False)
        found.append(one)
    closed = 0
    while not ended.wait(2.0):
        for one in list(found):
            try:
                one.send(b"G")
                if one.recv(1) == b"":
                    raise ConnectionResetError
            except BlockingIOError:
                continue
            except OSError:
                one.close()
                found.remove(one)
                closed += 1
    for one in found:
        one.close()
    return closed


def mix(client: httpx.Client, minutes: float, processes: list[psutil.Process], upload: bytes) -> None:
    """Measures growth under everything in turn."""

    def look() -> tuple[list[int], list[int]]:
        return [p.memory_info().rss for p in processes], [p.num_fds() for p in processes]

    began, first, number = time.monotonic(), None, 0
    while first is None or time.monotonic() - began < 60 * minutes:
        number += 1
        model = client.post("/v1/models", content=upload).json()["id"]
        ids = [client.post("/v1/jobs", json={**JOB, "budget": 1, "seed": number + i}).json()["id"] for i in range(4)]
        client.get("/v1/jobs?limit=50").raise_for_status()
        client.post(f"/v1/jobs/{ids[0]}/cancel").raise_for_status()
        for job_id in ids:
            while client.get(f"/v1/jobs/{job_id}?wait=30").json()["state"] in ("queued", "running"):
                pass
            client.delete(f"/v1/jobs/{job_id}").raise_for_status()
        client.delete(f"/v1/models/{model}").raise_for_status()
        if first is None and time.monotonic() - began > 6 * minutes:
            first = look()
    last = look()
    growth = ", ".join(f"{b / a - 1:+.1%}" for a, b in zip(first[0], last[0], strict=True))
    print(f"mix: {number} rounds in {minutes:g} min; memory of service and workers {growth} (asked: below 5 %); "
          f"open files {first[1]} -> {last[1]}")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("jobs", 1000), ("polls", 2000), ("slow", 1000), ("workers", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--minutes", type=float, default=30.0)
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    print(f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {os.cpu_count()} cores, "
          f"load {os.getloadavg()[0]:.1f}")  # fmt: skip
    with (
        tempfile.TemporaryDirectory(prefix="automap-load-") as folder,
        EmbeddedRedis(Path(folder)) as server,
        connect(server.url) as store,
    ):
        heads = {t: {"Authorization": f"Bearer {Keys(store).create(t, SCOPES)[0]}"} for t in TENANTS}
        process, url = start(server.url, given.workers)
        clients = {tenant: httpx.Client(base_url=url, headers=head, timeout=120) for tenant, head in heads.items()}
        own, one = psutil.Process(process.pid), clients["a"]
        try:
            first = one.post("/v1/jobs", json={**JOB, "budget": 1}).raise_for_status().json()["id"]
            while one.get(f"/v1/jobs/{first}?wait=30").json()["state"] != "succeeded":
                pass
            workers = [child for child in own.children() if "worker" in child.cmdline()]
            if given.jobs:
                throughput(clients, given.jobs, workers)
            search = one.post("/v1/jobs", json={**JOB, "budget": "600s", "searchers": ["mcmc"]}).json()["id"]
            path = f"/v1/jobs/{search}"
            if given.polls:
                before = own.cpu_times()
                told = shown(poll_s(url, path, heads["a"], given.polls))
                after = own.cpu_times()
                each_s = (after.user + after.system - before.user - before.system) / given.polls
                print(f"polls: {told} at {POLLS_A_SECOND}/s offered; {each_s * 1000:.2f} ms of processor time each")
            if given.polls and given.slow:
                alone = statistics.quantiles(poll_s(url, path, heads["a"], given.polls), n=20)[-1]
                ended, closed = threading.Event(), list[int]()
                holder = threading.Thread(target=lambda: closed.append(slowly(one.base_url, given.slow, ended)))
                holder.start()
                time.sleep(0.5)
                beside = statistics.quantiles(poll_s(url, path, heads["a"], given.polls), n=20)[-1]
                ended.set()
                holder.join()
                print(f"slow: p95 of polls {beside / alone:.2f} x beside {given.slow} slow connections")
            one.delete(path)
            if given.minutes:
                mix(one, given.minutes, [own, *workers], f"{PROFILE}\nnode1 -- node2".encode())
        finally:
            process.terminate()
            process.wait(60)
            for client in clients.values():
                client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
