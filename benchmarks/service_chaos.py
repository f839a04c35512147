"""Kills parts of a running service at random, and counts what is lost.

    python benchmarks/service_chaos.py [--jobs 200] [--minutes 5] [--every 2] [--recoveries 3] [--stale 50] [--teams 3]
        [--away 60]

The parts, of which 0 leaves one out:

- chaos (`--jobs`, `--minutes`, `--every`): small jobs with budgets in evaluations are sent over REST all the time. Each
  has an Idempotency-Key and is sent again until it is answered. Meanwhile, at random moments, the service, a worker,
  the process of a job or the private Redis gets SIGKILL; a dead service is started again on the same data. At the end
  every job must have ended once, and jobs with the same seed must have the same plan.
- recovery: a worker is killed while it runs a job; when another attempt has begun, the job is cancelled.
- stale: four workers at a time are stopped until others have taken over their jobs, and then continued.
- teams: a job is searched by one worker, by two in the same time, and by two of which one is killed.
- away: the Redis of a service is away for some seconds while a search runs and clients submit: it is stopped, or
  killed, or its connections are cut again and again, or its answers are late.
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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import redis

from service.embedded_redis import EmbeddedRedis

MODEL = "gpt:layers=1,hidden=64,heads=2,seq_len=32,vocab_size=64"
SEEDS = 5
EVALUATIONS = 200_000
"""Budget of the jobs of the chaos, about a second: most kills hit one that runs."""
GIVE_UP_S = 900.0
STALE_AT_ONCE = 4
"""Jobs whose workers are stopped at once; as many other workers take them over."""
KINDS = ("stopped", "killed", "cut", "late")
TEAM = {"zoo": "llama3-70b", "cluster": "128x8xH100", "training": {"global_batch": 1536}, "searchers": ["mcmc"]}
TEAM_S = 15
"""Seconds of each search of a team."""
EQUAL = 1e-3
"""Share of a step by which a team may be slower: the worker that leads it does not get exactly the processor time that
one worker gets alone."""


class Service:
    """`automap serve` on a folder, started again whenever it was killed."""

    def __init__(self, folder: Path, workers: int, **environment: str) -> None:
        self._workers = workers
        self._environment = {"AUTOMAP_DATA_DIR": str(folder), "AUTOMAP_LOG_LEVEL": "CRITICAL", **environment}
        self.start()

    def start(self) -> None:
        """Starts it and waits until it answers."""
        words = ["serve", "--port", "0", "--json", "--workers", str(self._workers)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "service.command", *words],
            env=os.environ | self._environment,
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
        """The answer to a call, which is repeated until there is one; None if there is no such thing."""
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


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The processes that have not ended."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextlib.contextmanager
def running(workers: int, **environment: str) -> Iterator[Service]:
    """A service of its own."""
    with tempfile.TemporaryDirectory(prefix="automap-chaos-") as folder:
        service = Service(Path(folder), workers, **environment)
        try:
            yield service
        finally:
            service.stop()


def body(number: int, budget: str | int) -> dict[str, Any]:
    """A small job."""
    found = {"zoo": MODEL, "cluster": "1xV100-16GB", "training": {"global_batch": 8}, "budget": budget}
    return {**found, "searchers": ["random"], "seed": number % SEEDS, "tie": 0}


def submit(service: Service, number: int, budget: str | int) -> str:
    """Submits a job; returns its id."""
    headers = {"Idempotency-Key": f"chaos-{number}-{budget}"}
    return str(service.call("POST", "/v1/jobs", json=body(number, budget), headers=headers)["id"])


def told(service: Service, job_id: str) -> list[dict[str, Any]]:
    """All events of a job that has ended; those of its state have one."""
    text = service.http.get(f"/v1/jobs/{job_id}/events").text
    return [
        json.loads(block.split("\ndata: ")[1].split("\nid:")[0]) for block in text.split("\n\n") if "\ndata: " in block
    ]


def chaos(service: Service, jobs: int, minutes: float, every_s: float) -> bool:
    """Kills while jobs are sent and run; returns whether nothing was lost, doubled or changed."""
    ids: list[str] = []
    kills: Counter[str] = Counter()
    began, kill_at, draw = time.monotonic(), every_s, random.Random(0)
    while (passed := time.monotonic() - began) < 60 * minutes or len(ids) < jobs:
        if len(ids) < jobs and passed >= 60 * minutes * len(ids) / jobs:
            ids.append(submit(service, len(ids), EVALUATIONS))
        else:
            service.call("GET", "/healthz")  # starts it again if it was killed
            time.sleep(0.05)
        if kill_at <= passed < 60 * minutes:
            alive = {kind: there for kind, processes in service.parts().items() if (there := living(processes))}
            kind = draw.choice(sorted(alive) or [""])
            with contextlib.suppress(psutil.NoSuchProcess, KeyError):
                draw.choice(alive[kind]).kill()
                kills[kind] += 1
            kill_at = passed + every_s * draw.uniform(0.2, 1.8)
    for job_id in ids:
        while service.call("GET", f"/v1/jobs/{job_id}", params={"wait": 5})["state"] in ("queued", "running"):
            pass
    found = [service.call("GET", f"/v1/jobs/{job_id}") for job_id in ids]
    states = Counter(job["state"] for job in found)
    doubled = sum(
        sum(event.get("state", "running") not in ("queued", "running") for event in told(service, job_id)) != 1
        for job_id in ids
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


def holders(service: Service, count: int) -> list[psutil.Process]:
    """The workers that run jobs, when there are `count` of them."""
    while len(found := busy(service)) != count:
        time.sleep(0.1)
    return found


def recovery(service: Service, trials: int) -> bool:
    """Kills workers, and cancels the jobs that were begun again.

    Returns whether every job was begun again within 30 s, and every cancelled one ended within a second.
    """
    seconds, cancelled = [], []
    for number in range(trials):
        job_id = submit(service, number, "120s")
        attempt(service, job_id, 1)
        holders(service, 1)[0].kill()
        began = time.monotonic()
        attempt(service, job_id, 2)
        seconds.append(time.monotonic() - began)
        time.sleep(number / trials)  # workers look once a second: at all moments between two looks
        service.call("POST", f"/v1/jobs/{job_id}/cancel")
        began = time.monotonic()
        while busy(service):  # otherwise the next trial would kill the worker of this one
            time.sleep(0.01)
        cancelled.append(time.monotonic() - began)
    if seconds:
        print("recovery: another attempt after " + ", ".join(f"{s:.1f}" for s in seconds) + " s (asked: 30)")
        print("cancel: no process of the job after " + ", ".join(f"{s:.2f}" for s in cancelled) + " s (asked: 1)")
    return all(s <= 30.0 for s in seconds) and all(s <= 1.0 for s in cancelled)


def stale(service: Service, trials: int) -> bool:
    """Stops workers until their jobs run elsewhere, and lets them go on; returns whether they changed nothing."""
    wrong, left = 0, trials
    while left > 0:
        count = min(STALE_AT_ONCE, left)
        # Its time is over while it is stopped: the first thing that it does then is to write its plan.
        ids = [submit(service, left - i, "14s") for i in range(count)]
        for job_id in ids:
            attempt(service, job_id, 1)
        workers = holders(service, count)
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
            events = told(service, job_id)
            states = [(event["state"], event["attempt"]) for event in events if "state" in event]
            late = events[next(i for i, event in enumerate(events) if event["attempt"] == 2) :]
            kept = states == [("queued", 0), ("running", 1), ("queued", 1), ("running", 2), ("succeeded", 2)]
            wrong += not kept or any(event["attempt"] != 2 for event in late)
        while busy(service):
            time.sleep(0.1)
        left -= count
    print(f"stale: {wrong} of {trials} workers that were stopped and went on wrote anything")
    return wrong == 0


@contextlib.contextmanager
def trouble(kind: str, server: EmbeddedRedis) -> Iterator[Callable[[], None]]:
    """Takes a Redis away for the block; yields a function that is to be called again and again meanwhile."""
    more: Callable[[], None] = lambda: None  # noqa: E731
    if kind == "stopped":
        os.kill(server.pid, signal.SIGSTOP)
    elif kind == "killed":
        os.kill(server.pid, signal.SIGKILL)
    else:
        own = redis.Redis.from_url(server.url)
        if kind == "cut":
            more = lambda: own.client_kill_filter(_type="normal", skipme=True)  # noqa: E731
        else:
            more = lambda: own.client_pause(300)  # noqa: E731
    try:
        yield more
    finally:
        if kind == "stopped":
            os.kill(server.pid, signal.SIGCONT)
        elif kind == "killed":
            while server.is_alive():
                time.sleep(0.01)
            server.start()


def away(service: Service, server: EmbeddedRedis, kind: str, seconds: float) -> bool:
    """Takes Redis away while a search runs and clients submit; returns whether nothing was lost and all came back."""
    search = submit(service, KINDS.index(kind), f"{seconds + 5:g}s")
    attempt(service, search, 1)
    answers: Counter[int] = Counter()
    accepted: list[str] = []
    number, silent, ends = 0, 0, time.monotonic() + seconds
    with trouble(kind, server) as more:
        while time.monotonic() < ends:
            more()
            number += 1
            headers = {"Idempotency-Key": f"{kind}-{number}"}
            answer = service.http.post("/v1/jobs", json=body(number, 1), headers=headers)
            answers[answer.status_code] += 1
            if answer.status_code == 202:
                accepted.append(answer.json()["id"])
            else:
                silent += answer.status_code != 503 or "Retry-After" not in answer.headers
            assert service.http.get("/healthz").is_success
            time.sleep(0.2)
    began = time.monotonic()
    while not service.http.get("/readyz").is_success:
        time.sleep(0.05)
    back_s = time.monotonic() - began
    # Those that were refused are sent again; those that were accepted must be there.
    ids = {service.call("POST", "/v1/jobs", json=body(i, 1), headers={"Idempotency-Key": f"{kind}-{i}"})["id"]
           for i in range(1, number + 1)}  # fmt: skip
    for job_id in (search, *ids):
        while service.call("GET", f"/v1/jobs/{job_id}", params={"wait": 5})["state"] in ("queued", "running"):
            pass
    jobs = [service.call("GET", f"/v1/jobs/{job_id}") for job_id in (search, *ids)]
    lost = sum(job["state"] != "succeeded" for job in jobs) + len(set(accepted) - ids) + number - len(ids)
    runs = jobs[0]["attempt"]
    print(f"away: {kind} for {seconds:g} s: answers {dict(answers)}, {silent} of them neither 202 nor 503 with "
          f"Retry-After; back after {back_s:.1f} s (asked: 10); lost {lost}; runs of the search {runs}")  # fmt: skip
    return silent == lost == 0 and back_s <= 10.0 and runs == 1


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
    parser.add_argument("--away", type=float, default=60.0, help="seconds")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    print(f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {os.cpu_count()} cores, "
          f"load {os.getloadavg()[0]:.1f}")  # fmt: skip
    fine = True
    if given.jobs or given.recoveries or given.teams:
        with running(given.workers) as service:
            fine &= chaos(service, given.jobs, given.minutes, given.every) if given.jobs else True
            fine &= recovery(service, given.recoveries)
            fine &= teams(service, given.teams)
    if given.stale:
        with running(2 * STALE_AT_ONCE) as service:
            fine &= stale(service, given.stale)
    if given.away:
        with (
            tempfile.TemporaryDirectory(prefix="automap-chaos-") as folder,
            EmbeddedRedis(Path(folder)) as server,
            running(1, AUTOMAP_REDIS_URL=server.url) as service,
        ):
            for kind in KINDS:
                fine &= away(service, server, kind, given.away)
    return 0 if fine else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
