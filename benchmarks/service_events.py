"""Events of a job under load: many clients listen, go away and come back. Is an event lost or told twice, how late?

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

from service.async_client import AsyncAutomapClient
from service.calls import JobEvent
from service.embedded_redis import EmbeddedRedis
from service.jobs.connection import connect
from service.jobs.store import Store

PACE_S = 0.2
"""Seconds between two events: no job writes its progress more often."""
JOB = {"zoo": "gpt2:layers=2", "cluster": "8xV100-16GB", "training": {"global_batch": 64}, "budget": "1s"}


async def listen(url: str, job_id: str, seed: int) -> tuple[list[JobEvent], list[float]]:
    """What one client hears, and how late each event of progress is, in seconds."""
    chance, told, delays, last = random.Random(seed), [], [], ""
    async with AsyncAutomapClient(url) as client:
        while not (told and told[-1].ends):
            leaves_after = chance.randint(3, 30) if seed % 2 else 10**9
            async for event in client.watch(job_id, after=last):
                told.append(event)
                last = event.id
                if event.kind == "progress" and event.data["seconds"] > 0.0:
                    delays.append(time.time() - event.data["written_at"])
                leaves_after -= 1
                if leaves_after == 0:
                    break
    return told, delays


async def measure(url: str, store: Store, job_id: str, clients: int, events: int) -> dict[str, float]:
    """Lost and doubled events, and quantiles of the delay."""
    token = store.begin(job_id)
    listeners = [asyncio.create_task(listen(url, job_id, seed)) for seed in range(clients)]
    await asyncio.sleep(2.0)  # they are on their way
    for number in range(events):
        # Quick to write: it holds up the clients of this process by nothing that counts.
        progress = {"evaluations": number, "seconds": PACE_S * (number + 1), "written_at": time.time()}
        store.set_progress(job_id, token, progress)
        await asyncio.sleep(PACE_S)
    store.cancel(job_id)
    written = [event.id for event in store.events(job_id)]
    lost = doubled = 0
    delays: list[float] = []
    for told, own in await asyncio.gather(*listeners):
        ids = [event.id for event in told]
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
        command = [sys.executable, "-m", "service.command.main", "serve", "--port", "0", "--workers", "0", "--json"]
        path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "AUTOMAP_REDIS_URL": redis.url, "PYTHONPATH": path}
        service = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        try:
            assert service.stdout is not None
            with service.stdout:
                url = json.loads(service.stdout.readline())["url"]
            job_id = httpx.post(f"{url}/v1/jobs", json=JOB, timeout=120).json()["id"]
            found = asyncio.run(measure(url, Store(client), job_id, given.clients, given.events))
        finally:
            service.terminate()
            service.wait(30)
    print(
        f"{given.clients} clients, {given.events} events at {1 / PACE_S:g} a second, half of them leave and come back"
    )
    print(f"{found['told']:,.0f} to be told: {found['lost']:.0f} lost, {found['doubled']:.0f} told twice")
    print(f"delay: {1e3 * found['p50_s']:.0f} ms in the median, {1e3 * found['p95_s']:.0f} ms at the 95th percentile")


if __name__ == "__main__":
    main()
