"""Kills parts of a running service at random, and counts what is lost.

    python benchmarks/service_chaos.py [--jobs 200] [--minutes 5] [--every 2] [--recoveries 3] [--stale 2]

Small jobs with budgets in evaluations are sent over REST, each with an Idempotency-Key, again and again until it is
answered, while at random moments the service, a worker, the process of a job or the private Redis gets SIGKILL; a
service that is dead is started again on the same data. At the end every job must have ended once, and those with the
same seed must have the same plan. Then workers are killed while they run a job, until another attempt begins
(recovery), and stopped until others have taken their jobs over, and continued (stale).
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
from pathlib import Path
from typing import Any

import httpx
import psutil

MODEL = "gpt:layers=1,hidden=64,heads=2,seq_len=32,vocab_size=64"
SEEDS = 5
GIVE_UP_S = 900.0


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
    for number in range(trials):
        job_id = submit(service, number, "30s")
        attempt(service, job_id, 1)
        worker = holder(service)
        stopped = [worker, *worker.children(recursive=True)]
        for process in stopped:
            process.suspend()
        attempt(service, job_id, 2)
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        while service.call("GET", f"/v1/jobs/{job_id}", params={"wait": 5})["state"] == "running":
            pass
        states = [(event["state"], event["attempt"]) for event in told(service, job_id)]
        while busy(service):
            time.sleep(0.1)
        wrong += states != [("queued", 0), ("running", 1), ("queued", 1), ("running", 2), ("succeeded", 2)]
    if trials:
        print(f"stale: {wrong} of {trials} workers that were stopped and went on wrote anything")
    return wrong == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two kills, in the mean")
    parser.add_argument("--recoveries", type=int, default=3)
    parser.add_argument("--stale", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    print(f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {os.cpu_count()} cores, "
          f"load {os.getloadavg()[0]:.1f}")  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="automap-chaos-") as folder:
        service = Service(Path(folder), workers=given.workers)
        try:
            fine = chaos(service, given.jobs, given.minutes, given.every)
            fine &= recovery(service, given.recoveries)
            fine &= stale(service, given.stale)
        finally:
            service.stop()
    return 0 if fine else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
