"""Load on a running service: tiny jobs of several tenants, polls beside searches, slow connections, and a mix of all.

    python benchmarks/service_load.py [--jobs 1000] [--polls 2000] [--slow 1000] [--submissions 100] [--minutes 30]
        [--workers 2]

The parts, of which 0 leaves one out:

- throughput (`--jobs`): four tenants submit as fast as they can. Measured are the jobs a second from the first
  submission to the last end, the processor time that a job takes in its worker, and how far tenants are apart.
- polls (`--polls`): 500 a second are offered on 16 connections beside a running search.
- slow connections (`--slow`): a process of its own holds connections that send one byte of a request every two seconds.
  Measured is how long the polls of others take meanwhile.
- submissions (`--submissions`): models of 1 MB, one with its weights in the file and a much deeper one without any, are
  uploaded again and again, as another file and as the same. Jobs for them are submitted, beside the same search.
- mix (`--minutes`): uploads, jobs, lists, cancels and deletes in turn. Measured is how the memory and the open files of
  the service, its workers and its store grow after the first tenth. The exit status is 1 if memory has grown by 5 % or
  files were left open.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import multiprocessing
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
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import httpx
import numpy as np
import onnx
import psutil
from onnx import helper, numpy_helper

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
MODEL_BYTES = 1_000_000
_FEW_FILES = 3
"""Open files more than before that are no leak: connections of the moment."""


def start(url: str, workers: int) -> tuple[subprocess.Popen[bytes], str]:
    """Starts the service on a Redis; returns it and its address."""
    words = ["serve", "--port", "0", "--json", "--workers", str(workers)]
    more = {"AUTOMAP_REDIS_URL": url, "AUTOMAP_REQUIRE_KEYS": "1", "AUTOMAP_LOG_LEVEL": "CRITICAL"}
    process = subprocess.Popen(
        [sys.executable, "-m", "service.command", *words],
        env={**os.environ, **more, "AUTOMAP_MAX_QUEUED_JOBS": "100000"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    with process.stdout as out:
        line = out.readline().decode()
    return process, line.split('"')[3]


def at_once(work: Callable[[int], object], number: int) -> None:
    """Does work in `number` threads."""
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

    place = httpx.URL(url)

    def poll(number: int) -> None:
        # The standard library's client: it leaves the processors to the service.
        with contextlib.closing(http.client.HTTPConnection(place.host, place.port, timeout=60)) as own:
            due = time.monotonic() + every_s * number / CONNECTIONS
            for _ in range(share):
                time.sleep(max(0.0, due - time.monotonic()))
                own.request("GET", path, headers=headers)
                answer = own.getresponse()
                answer.read()
                assert answer.status == 200
                found.append(time.monotonic() - due)
                due += every_s

    at_once(poll, CONNECTIONS)
    return found


def shown(seconds: list[float]) -> str:
    """Percentiles."""
    cuts = statistics.quantiles(seconds, n=100)
    return f"p50 {cuts[49] * 1000:.1f}, p95 {cuts[94] * 1000:.1f}, p99 {cuts[98] * 1000:.1f} ms"


def slowly(host: str, port: int, number: int, closed: Synchronized[int]) -> None:
    """Holds connections that send a byte of a long head every two seconds, each at its own time, for ever; counts those
    that the service closes."""
    held = [socket.create_connection((host, port)) for _ in range(number)]
    for one in held:
        one.setblocking(False)
    head = b"GET /version HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
    for at in itertools.count():
        byte = head[at : at + 1] or b"x"
        for index, one in enumerate(held):
            if index % 4 == 0:
                time.sleep(8.0 / number)
            try:
                one.send(byte)
                if one.recv(1) == b"":
                    raise ConnectionResetError
            except BlockingIOError:
                continue
            except OSError:
                one.close()
                held[index] = socket.socket()  # not connected
                closed.value += 1


def polls(url: str, path: str, headers: dict[str, str], given: argparse.Namespace, own: psutil.Process) -> None:
    """Measures polls alone, and beside slow connections."""

    def each() -> tuple[list[float], str]:
        before = own.cpu_times()
        found = poll_s(url, path, headers, given.polls)
        now = own.cpu_times()
        each_s = (now.user + now.system - before.user - before.system) / given.polls
        return found, f"{shown(found)}, {each_s * 1000:.2f} ms of processor time each"

    alone, told = each()
    print(f"polls, {POLLS_A_SECOND}/s offered: {told}")
    if not given.slow:
        return
    spawned, place = multiprocessing.get_context("spawn"), httpx.URL(url)
    closed = spawned.Value("i", 0)
    holder = spawned.Process(target=slowly, args=(place.host, place.port, given.slow, closed), daemon=True)
    holder.start()
    while own.num_fds() < given.slow:
        time.sleep(0.1)
    beside, told = each()
    holder.kill()
    holder.join()
    times = statistics.quantiles(beside, n=20)[-1] / statistics.quantiles(alone, n=20)[-1]
    print(f"beside {given.slow} slow connections, {closed.value} closed meanwhile: {told}; p95 {times:.2f} x (asked: "
          "below 2)")  # fmt: skip


def stripped(num_bytes: int) -> onnx.ModelProto:
    """A model without weights whose file has so many bytes: blocks of a normalisation and two matrix products."""
    width, nodes, weights, values = 256, [], [], []
    head = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 128, width])
    size, at = 0, "x"
    while size < num_bytes:
        place = f"/transformer/decoder/layers.{len(nodes) // 7}"
        names = [f"{place}/{name}_output_0" for name in ("norm", "up", "up/Add", "act", "down", "down/Add", "Add")]
        shapes = {"norm/weight": [width], "norm/bias": [width], "up/weight": [width, 4 * width], "up/bias": [4 * width]}
        shapes |= {"down/weight": [4 * width, width], "down/bias": [width]}
        own = [
            onnx.TensorProto(name=f"{place}/{k}", dims=d, data_type=onnx.TensorProto.FLOAT) for k, d in shapes.items()
        ]
        wide = (1, 2, 3)
        made = [
            helper.make_node(kind, [*inputs, *(f"{place}/{w}" for w in of)], [out], name=out.removesuffix("_output_0"))
            for kind, inputs, of, out in (
                ("LayerNormalization", [at], ["norm/weight", "norm/bias"], names[0]),
                ("MatMul", [names[0]], ["up/weight"], names[1]),
                ("Add", [names[1]], ["up/bias"], names[2]),
                ("Relu", [names[2]], [], names[3]),
                ("MatMul", [names[3]], ["down/weight"], names[4]),
                ("Add", [names[4]], ["down/bias"], names[5]),
                ("Add", [names[5], at], [], names[6]),
            )
        ]
        known = [
            helper.make_tensor_value_info(
                name, onnx.TensorProto.FLOAT, ["batch", 128, 4 * width if number in wide else width]
            )
            for number, name in enumerate(names)
        ]
        nodes, weights, values, at = [*nodes, *made], [*weights, *own], [*values, *known], names[6]
        size += sum(part.ByteSize() + 4 for part in (*own, *made, *known))
    graph = helper.make_graph(nodes, "decoder", [head], [values[-1]], weights, value_info=values[:-1])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def weighted(size: int) -> onnx.ModelProto:
    """A perceptron whose file is about so large, nearly all of it weights."""
    width = 64
    names = ["x", *(f"y{layer}" for layer in range(max(1, size // (4 * width * width))))]
    nodes, weights = [], []
    for layer, (before, after) in enumerate(itertools.pairwise(names)):
        weights.append(numpy_helper.from_array(np.full((width, width), layer, np.float32), f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [before, f"w{layer}"], [f"p{layer}"], name=f"layers.{layer}/MatMul"))
        nodes.append(helper.make_node("Relu", [f"p{layer}"], [after], name=f"layers.{layer}/Relu"))
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", width]) for name in ("x", names[-1])]
    graph = helper.make_graph(nodes, "perceptron", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def submissions(
    client: httpx.Client, model: onnx.ModelProto, count: int, own: psutil.Process, workers: list[psutil.Process]
) -> None:
    """Measures uploads of a model, as files that differ and as the same file, and jobs for it."""

    def spent_s() -> float:
        """Processor time of the service, and of the children that import and check."""
        beside = [child.cpu_times() for child in own.children() if child not in workers]
        return sum(t.user + t.system + t.children_user + t.children_system for t in (own.cpu_times(), *beside))

    ids: list[str] = []
    uploads: list[float] = []
    spent = [spent_s()]
    for number in range(count):
        model.graph.name = f"model {number}"
        data = model.SerializeToString()
        began = time.monotonic()
        ids.append(client.post("/v1/models?dim=batch=8", content=data).raise_for_status().json()["id"])
        uploads.append(time.monotonic() - began)
    spent.append(spent_s())
    again: list[float] = []
    for _ in range(count):
        began = time.monotonic()
        client.post("/v1/models?dim=batch=8", content=data).raise_for_status()
        again.append(time.monotonic() - began)
    spent.append(spent_s())
    jobs: list[float] = []
    body = {"model_id": ids[0], "dims": {"batch": 8}, "cluster": "8xV100-16GB", "training": {"global_batch": 64}}
    for number in range(count):
        began = time.monotonic()
        answer = client.post("/v1/jobs", json={**body, "budget": 1, "searchers": ["random"], "seed": number})
        jobs.append(time.monotonic() - began)
        client.delete(answer.raise_for_status().headers["Location"]).raise_for_status()
    spent.append(spent_s())
    for model_id in ids:
        client.delete(f"/v1/models/{model_id}").raise_for_status()
    print(f"submissions of a model of {len(data) / 1e6:.1f} MB, {len(model.graph.node)} nodes:")
    measured = {"a new file": uploads, "the same file again": again, "a job": jobs}
    for (name, seconds), (before_s, after_s) in zip(measured.items(), itertools.pairwise(spent), strict=True):
        each_ms = (after_s - before_s) / count * 1000
        print(f"  {name}: {shown(seconds)}, {each_ms:.0f} ms of processor time each (asked: p95 below 150)")


def mix(client: httpx.Client, minutes: float, processes: dict[str, psutil.Process], upload: bytes) -> bool:
    """Measures growth under everything in turn; returns whether there was none that counts."""

    def look() -> dict[str, tuple[int, int]]:
        return {name: (p.memory_info().rss, p.num_fds()) for name, p in processes.items()}

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
    print(f"mix: {number} rounds in {minutes:g} min")
    fine = True
    for name, (memory, files) in first.items():
        growth, opened = last[name][0] / memory - 1, last[name][1] - files
        fine &= growth < 0.05 and opened <= _FEW_FILES
        print(f"  {name}: memory {memory / 2**20:.1f} -> {last[name][0] / 2**20:.1f} MiB, {growth:+.1%} (asked: below "
              f"5 %); open files {files} -> {last[name][1]}")  # fmt: skip
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("jobs", 1000), ("polls", 2000), ("slow", 1000), ("submissions", 100), ("workers", 2)):
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
        own, one, fine = psutil.Process(process.pid), clients["a"], True
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
                polls(url, path, heads["a"], given, own)
            if given.submissions:
                for model in (weighted(MODEL_BYTES), stripped(MODEL_BYTES)):
                    submissions(one, model, given.submissions, own, workers)
            one.delete(path)
            if given.minutes:
                parts = {"service": own, "store": psutil.Process(server.pid)}
                parts |= {f"worker {i}": worker for i, worker in enumerate(workers, 1)}
                fine = mix(one, given.minutes, parts, f"{PROFILE}\nnode1 -- node2".encode())
        finally:
            process.terminate()
            process.wait(60)
            for client in clients.values():
                client.close()
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
