"""Kills parts of a running service at random, and counts what is lost.

    python benchmarks/service_chaos.py [--jobs 200] [--minutes 5] [--every 2] [--recoveries 3] [--stale 50]
        [--teams 3]

Small jobs with budgets in evaluations are sent over REST, each with an Idempotency-Key, again and again until it is
answered, while at random moments the service, a worker, the process of a job or the private Redis gets SIGKILL; a
service that is dead is started again on the same data. At the end every job must have ended once, and those with the
same seed must have the same plan. Then workers are killed while they run a job, until another attempt begins
(recovery). One job is searched by one worker, by two in the same time, and by two of which one is killed (teams). Last,
workers are stopped until others have taken their jobs over, and continued (stale).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

MODEL = "gpt:layers=1,hidden=64,heads=2,seq_len=32,vocab_size=64"
SEEDS = 5
GIVE_UP_S = 900.0
STALE_AT_ONCE = 4
"""Jobs whose workers are stopped at once; as many other workers take them over."""
TEAM = {"zoo": "llama3-70b", "cluster": "128x8xH100", "training": {"global_batch": 1536}, "searchers": ["mcmc"]}
TEAM_S = 15
"""Seconds of each search of a team."""
EQUAL = 1e-3
"""Share of a step by which a team may be slower: the one that leads it is not given the very same processor time."""


class Service:
    """`automap serve` on a folder, started again whenever it was killed."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder, self._workers = folder, workers
        self.start()

    def start(self) -> None:
        """Starts it and waits until it answers."""
        words = ["serve", "--port", "0", "--json", "--workers", str(self._workers)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "service.command.main", *words],
            env={**os.environ, "AUTOMAP_DATA_DIR": str(self._folder), "AUTOMAP_LOG_LEVEL": "CRITICAL"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self.process.stdout is not None
        with self.process.stdout as out:
            self.http = httpx.Client(base_url=json.loads(out.readline())["url"], timeout=30)

    def stop(self) -> None:
        """Ends it."""
        self.process.terminate()
        self.process.wait(60)
        self.http.close()

    def call(self, method: str, path: str, **options: Any) -> Any:
        """An answer, however often that takes; None for one that is not there."""
        ends = time.monotonic() + GIVE_UP_S
        while time.monotonic() < ends:
            with contextlib.suppress(httpx.HTTPError, RuntimeError):
                answer = self.http.request(method, path, **options)
                if answer.status_code == 404:
                    return None
                if answer.is_success:
                    return answer.json()
                assert answer.status_code in (429, 503), answer.text
            if self.process.poll() is not None:
                self.http.close()
                self.start()
            time.sleep(0.05)
        raise TimeoutError(path)

    def parts(self) -> dict[str, list[psutil.Process]]:
        """The processes that may be killed, by kind."""
        found: dict[str, list[psutil.Process]] = {"service": [psutil.Process(self.process.pid)]}
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in found["service"][0].children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    kind = "redis" if "redis-server" in child.name() else "worker"
                    found.setdefault(kind, []).append(child)
                    if kind == "worker":
                        found.setdefault("job", []).extend(child.children())
        return found


@contextlib.contextmanager
def running(workers: int) -> Iterator[Service]:
    """A service of its own."""
    with tempfile.TemporaryDirectory(prefix="automap-chaos-") as folder:
        service = Service(Path(folder), workers)
        try:
            yield service
        finally:
            service.stop()


def submit(service: Service, number: int, budget: str | int) -> str:
    """Submits a job; returns its id."""
    body = {"zoo": MODEL, "cluster": "1xV100-16GB", "training": {"global_batch": 8}, "budget": budget}
    body |= {"searchers": ["random"], "seed": number % SEEDS, "tie": 0}
    headers = {"Idempotency-Key": f"chaos-{number}-{budget}"}
    return str(service.call("POST", "/v1/jobs", json=body, headers=headers)["id"])


def told(service: Service, job_id: str) -> list[dict[str, Any]]:
    """The states that a job has had."""
    text = service.http.get(f"/v1/jobs/{job_id}/events").text
    lines = [block.split("\ndata: ")[1].split("\nid:")[0] for block in text.split("\n\n") if "event: state" in block]
    return [json.loads(line) for line in lines]


def chaos(service: Service, jobs: int, minutes: float, every_s: float) -> bool:
    """Kills while jobs run; returns whether nothing was lost, doubled or changed."""
    ids: list[str] = []
    kills: Counter[str] = Counter()
    ends, kill_at = time.monotonic() + 60 * minutes, time.monotonic() + every_s
    draw = random.Random(0)
    while time.monotonic() < ends or len(ids) < jobs:
        if len(ids) < jobs:
            ids.append(submit(service, len(ids), 20))
        else:
            time.sleep(0.1)
        if time.monotonic() >= kill_at and time.monotonic() < ends:
            kind, processes = draw.choice(sorted(service.parts().items()))
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                draw.choice(processes).kill()
                kills[kind] += 1
            kill_at = time.monotonic() + every_s * draw.uniform(0.2, 1.8)
    for job_id in ids:
        while service.call("GET", f"/v1/jobs/{job_id}", params={"wait": 5})["state"] in ("queued", "running"):
            pass
    found = [service.call("GET", f"/v1/jobs/{job_id}") for job_id in ids]
    states = Counter(job["state"] for job in found)
    doubled = sum(
        sum(event["state"] not in ("queued", "running") for event in told(service, job_id)) != 1 for job_id in ids
    )
    plans: dict[int, set[str]] = {}
    for job in found:
        if job["state"] == "succeeded":
            plan = service.call("GET", f"/v1/jobs/{job['id']}/plan")
            plan["search"] = None  # holds times
            plans.setdefault(job["request"]["seed"], set()).add(json.dumps(plan, sort_keys=True))
    unlike = sum(len(same) - 1 for same in plans.values())
    runs = sum(job["attempt"] for job in found)
    total, distinct = len(service.call("GET", "/v1/jobs", params={"limit": 1000})["jobs"]), len(set(ids))
    print(f"chaos: {jobs} jobs in {runs} runs, {sum(kills.values())} kills {dict(sorted(kills.items()))}")
    print(f"  ended: {dict(states)}; submitted twice {total - distinct}, ended twice or never {doubled}, "
          f"unlike plans of one seed {unlike}")  # fmt: skip
    return sum(states.values()) == jobs == distinct == total and doubled == 0 and unlike == 0


def attempt(service: Service, job_id: str, number: int) -> dict[str, Any]:
    """Waits until a job runs for the given time; returns it."""
    while True:
        job: dict[str, Any] = service.call("GET", f"/v1/jobs/{job_id}")
        if job["state"] == "running" and job["attempt"] >= number:
            return job
        assert job["state"] in ("queued", "running"), job
        time.sleep(0.05)


def busy(service: Service) -> list[psutil.Process]:
    """The workers that run a job; one that starts may have children of another kind."""
    found = []
    for worker in service.parts().get("worker", ()):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(child.cmdline() == worker.cmdline() for child in worker.children()):
                found.append(worker)
    return found


def holder(service: Service) -> psutil.Process:
    """The worker that runs the only job."""
    while len(found := busy(service)) != 1:
        time.sleep(0.1)
    return found[0]


def recovery(service: Service, trials: int) -> bool:
    """Kills workers; returns whether every job was begun again within 30 s."""
    seconds = []
    for number in range(trials):
        job_id = submit(service, number, "120s")
        attempt(service, job_id, 1)
        holder(service).kill()
        began = time.monotonic()
        attempt(service, job_id, 2)
        seconds.append(time.monotonic() - began)
        service.call("POST", f"/v1/jobs/{job_id}/cancel")
        while busy(service):  # or the next trial would kill the worker of this one
            time.sleep(0.1)
    if seconds:
        print("recovery: another attempt after " + ", ".join(f"{s:.1f}" for s in seconds) + " s (asked: 30)")
    return all(s <= 30.0 for s in seconds)


def stale(service: Service, trials: int) -> bool:
    """Stops workers until their jobs run elsewhere, and lets them go on; returns whether they changed nothing."""
    wrong = 0
    for first in range(0, trials, STALE_AT_ONCE):
        ids = [submit(service, number, "10s") for number in range(first, min(first + STALE_AT_ONCE, trials))]
        for job_id in ids:
            attempt(service, job_id, 1)
        while len(workers := busy(service)) != len(ids):
            time.sleep(0.1)
        stopped = [process for worker in workers for process in (worker, *worker.children(recursive=True))]
        for process in stopped:
            process.suspend()
        for job_id in ids:
            attempt(service, job_id, 2)
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        for job_id in ids:
            while service.call("GET", f"/v1/jobs/{job_id}", params={"wait": 5})["state"] == "running":
                pass
            states = [(event["state"], event["attempt"]) for event in told(service, job_id)]
            wrong += states != [("queued", 0), ("running", 1), ("queued", 1), ("running", 2), ("succeeded", 2)]
        while busy(service):
            time.sleep(0.1)
    print(f"stale: {wrong} of {trials} workers that were stopped and went on wrote anything")
    return wrong == 0


def searched(service: Service, seed: int, workers: int, *, kill: bool = False) -> float:
    """Step time that a job reaches, in seconds."""
    body = {**TEAM, "budget": f"{TEAM_S}s", "seed": seed, "tie": 0, "workers": workers}
    job_id = service.call("POST", "/v1/jobs", json=body)["id"]
    if kill:
        attempt(service, job_id, 1)
        while len(found := busy(service)) < workers:
            time.sleep(0.1)
        time.sleep(TEAM_S / 4)
        found[seed % workers].kill()
    while (job := service.call("GET", f"/v1/jobs/{job_id}", params={"wait": 5}))["state"] in ("queued", "running"):
        pass
    assert job["state"] == "succeeded", job["problem"]
    while busy(service):
        time.sleep(0.1)
    return float(service.call("GET", f"/v1/jobs/{job_id}/plan")["estimate"]["step_time_s"])


def teams(service: Service, trials: int) -> bool:
    """Searches alone and in teams; returns whether no team was worse."""
    fine = True
    for seed in range(trials):
        one, two = searched(service, seed, 1), searched(service, seed, 2)
        killed = searched(service, seed, 2, kill=True)
        print(f"team, seed {seed}: {one:.4f} s a step with one worker, {two:.4f} s with two, {killed:.4f} s with two "
              f"of which one was killed, each after {TEAM_S} s")  # fmt: skip
        fine &= max(two, killed) <= (1.0 + EQUAL) * one
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two kills, in the mean")
    parser.add_argument("--recoveries", type=int, default=3)
    parser.add_argument("--stale", type=int, default=50)
    parser.add_argument("--teams", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    print(f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {os.cpu_count()} cores, "
          f"load {os.getloadavg()[0]:.1f}")  # fmt: skip
    with running(given.workers) as service:
        fine = chaos(service, given.jobs, given.minutes, given.every)
        fine &= recovery(service, given.recoveries)
        fine &= teams(service, given.teams)
    if given.stale:
        with running(2 * STALE_AT_ONCE) as service:
            fine &= stale(service, given.stale)
    return 0 if fine else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
