"""Events of a job under load: many clients listen, go away and come back. Counts lost, double and late events.

`python benchmarks/service_events.py [--clients N] [--events N]`. A service in a process of its own on the loopback;
the job's progress is written five times a second. Half of the clients leave after every few events and come back with
the id of the last one. The delay of an event is the time from its writing to its arrival. Writer and clients share one
process, so that the delay is theirs too.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from service.embedded_redis import EmbeddedRedis
from service.jobs.connection import connect
from service.jobs.store import Store

PACE_S = 0.2
"""Seconds between two events: no job writes its progress more often."""
JOB = {"zoo": "gpt2:layers=2", "cluster": "8xV100-16GB", "training": {"global_batch": 64}, "budget": "1s"}


async def listen(url: httpx.URL, job_id: str, seed: int) -> tuple[list[str], list[float]]:
    """The ids that one client hears, and how late each event of progress is, in seconds.

    It reads the connection itself: a library takes longer to read an event than the service to send it.
    """
    chance, told, delays, ended = random.Random(seed), list[str](), list[float](), False
    while not ended:
        leaves_after = chance.randint(3, 30) if seed % 2 else 10**9
        reader, writer = await asyncio.open_connection(url.host, url.port)
        last = f"Last-Event-ID: {told[-1]}\r\n" if told else ""
        writer.write(f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: {url.host}\r\n{last}\r\n".encode())
        while leaves_after and not ended and (line := await reader.readline()):
            if line.startswith(b"data: "):
                data = json.loads(line[6:])
                if data.get("seconds", 0.0) > 0.0:
                    delays.append(time.time() - data["written_at"])
                ended = data.get("state", "running") not in ("queued", "running")
            elif line.startswith(b"id: "):
                told.append(line[4:].decode().strip())
                leaves_after -= 1
        if ended:
            told.append((await reader.readline())[4:].decode().strip())
        writer.close()
    return told, delays


async def measure(url: str, store: Store, job_id: str, clients: int, events: int) -> dict[str, float]:
    """Lost and doubled events, and quantiles of the delay."""
    token = store.begin(job_id)
    listeners = [asyncio.create_task(listen(httpx.URL(url), job_id, seed)) for seed in range(clients)]
    await asyncio.sleep(2.0)  # they are on their way
    for number in range(events):
        # Writing is quick, so it hardly delays the clients in this process.
        progress = {"evaluations": number, "seconds": PACE_S * (number + 1), "written_at": time.time()}
        store.set_progress(job_id, token, progress)
        await asyncio.sleep(PACE_S)
    store.cancel(job_id)
    written = [event.id for event in store.events(job_id)]
    lost = doubled = 0
    delays: list[float] = []
    for ids, own in await asyncio.gather(*listeners):
        doubled += len(ids) - len(set(ids))
        lost += len(set(written) - set(ids))
        delays += own
    cuts = statistics.quantiles(delays, n=100)
    return {"told": len(written) * clients, "lost": lost, "doubled": doubled, "p50_s": cuts[49], "p95_s": cuts[94]}


def main() -> None:
    """Runs a service, and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--events", type=int, default=100)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder)) as redis, connect(redis.url) as client:
        command = [sys.executable, "-m", "service.command", "serve", "--port", "0", "--workers", "0", "--json"]
        path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "AUTOMAP_REDIS_URL": redis.url, "PYTHONPATH": path}
        service = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        try:
            assert service.stdout is not None
            with service.stdout:
                url = json.loads(service.stdout.readline())["url"]
            job_id = httpx.post(f"{url}/v1/jobs", json=JOB, timeout=120).json()["id"]
            found = asyncio.run(measure(url, Store(client), job_id, given.clients, given.events))
            spent = psutil.Process(service.pid).cpu_times()
        finally:
            service.terminate()
            service.wait(30)
    print(
        f"{given.clients} clients, {given.events} events at {1 / PACE_S:g} a second, half of them leave and come back"
    )
    print(f"{found['told']:,.0f} to be told: {found['lost']:.0f} lost, {found['doubled']:.0f} told twice")
    each_ms = 1e3 * (spent.user + spent.system) / found["told"]
    print(f"{each_ms:.3f} ms of the service's processor time for each, its start and new connections included")
    print(f"delay: {1e3 * found['p50_s']:.0f} ms in the median, {1e3 * found['p95_s']:.0f} ms at the 95th percentile")


if __name__ == "__main__":
    main()
