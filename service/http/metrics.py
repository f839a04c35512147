"""Metrics in the format of Prometheus: the answers of this process, and numbers of the whole service from the store.

https://prometheus.io/docs/concepts/data_model/. Names of tenants, models and jobs are not labels: they would make as
many series as there are jobs, and tell one tenant of another.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import redis
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from service.http.feed import Feed
from service.jobs import counts, delivery
from service.jobs.connection import impatient
from service.jobs.records import parent_of
from service.jobs.store import Store

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENDS = ("succeeded", "failed", "cancelled")
_ANSWERS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 30.0, 120.0)
"""Classes of the times of answers; 20 ms is what a poll may take."""


class Metrics:
    """The metrics of one process that answers requests.

    Args:
        client: the service's Redis.
        feed: who listens to events here.
    """

    def __init__(self, client: redis.Redis, feed: Feed) -> None:
        self._registry = CollectorRegistry()
        self.answers = Histogram(
            "automap_http_request_seconds",
            "Time until an answer had left.",
            ("method", "route", "status"),
            buckets=_ANSWERS_S,
            registry=self._registry,
        )
        self.refusals = Counter(
            "automap_refusals", "Requests that were refused.", ("route", "status"), registry=self._registry
        )
        self._client = impatient(client)
        self._registry.register(_OfTheStore(self._client, feed))

    def close(self) -> None:
        """Ends the connection."""
        self._client.close()

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Counts an answer.

        Args:
            method: of the request.
            route: path of the route as it was declared, with names in place of ids.
            status: of the answer.
            seconds: since the request came.
        """
        self.answers.labels(method, route, str(status)).observe(seconds)
        if status >= 400:
            self.refusals.labels(route, str(status)).inc()

    def text(self) -> bytes:
        """All metrics."""
        return generate_latest(self._registry)


class _OfTheStore:
    """Collects the metrics of the store; if the store does not answer, only the metric that says so."""

    def __init__(self, client: redis.Redis, feed: Feed) -> None:
        self._client: Any = client  # redis-py types its replies too widely
        self._feed = feed

    def describe(self) -> list[Metric]:
        """No metrics: prometheus-client calls this when the collector is registered, before the store should be
        asked."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics at this moment."""
        yield GaugeMetricFamily("automap_event_listeners", "Open streams of events.", self._feed.num_listeners)
        try:
            found = list(self._of_jobs())
        except redis.RedisError:
            found = []
        yield GaugeMetricFamily("automap_store_up", "Whether the store answers.", 1.0 if found else 0.0)
        yield from found

    def _of_jobs(self) -> Iterator[Metric]:
        store = Store(self._client)
        tenants = [store.of(tenant) for tenant in store.tenants()]
        jobs = GaugeMetricFamily("automap_jobs", "Jobs that have not ended.", labels=["state"])
        jobs.add_metric(["queued"], sum(tenant.num_waiting() for tenant in tenants))
        running = [(tenant, job_id) for tenant in tenants for job_id in tenant.running()]
        jobs.add_metric(["running"], len(running))
        yield jobs
        yield GaugeMetricFamily("automap_evaluations_per_second", "Plans priced a second now.", _speed(running))
        so_far = counts.read(self._client)
        yield CounterMetricFamily("automap_evaluations", "Plans priced.", so_far.get("evaluations", 0.0))
        ended = HistogramMetricFamily("automap_job_run_seconds", "Last run of jobs that ended.", labels=["state"])
        for state in ENDS:
            _add(ended, [state], counts.durations(so_far, f"run:{state}"))
        yield ended
        waited = HistogramMetricFamily("automap_job_wait_seconds", "Time in the queue before a run.", labels=[])
        _add(waited, [], counts.durations(so_far, "wait"))
        yield waited
        yield from self._of_workers()
        with contextlib.suppress(redis.ResponseError):  # a user of Redis need not have the right to ask
            memory = self._client.info("memory")
            yield GaugeMetricFamily("automap_store_bytes", "Memory of the store.", float(memory["used_memory"]))

    def _of_workers(self) -> Iterator[Metric]:
        age = GaugeMetricFamily("automap_worker_heartbeat_age_seconds", "Since the last heartbeat.", labels=["worker"])
        now = time.time()
        beats = delivery.workers(self._client)
        for name, at in beats.items():
            age.add_metric([name], max(0.0, now - at))
        yield age
        yield GaugeMetricFamily("automap_workers", "Workers that have sent a heartbeat.", float(len(beats)))


def _speed(running: list[tuple[Store, str]]) -> float:
    """Plans that all running searches together price in a second."""
    total = 0.0
    for store, job_id in running:
        job = store.job(job_id) if parent_of(job_id) is None else None  # a job tells of its members too
        progress = (job and job.progress) or {}
        if progress.get("seconds", 0.0) > 0.0:
            total += progress["evaluations"] / progress["seconds"]
    return total


def _add(family: HistogramMetricFamily, labels: list[str], found: counts.Durations) -> None:
    ends = [*map(str, counts.BUCKETS_S), "+Inf"]
    family.add_metric(labels, list(zip(ends, itertools.accumulate(found.classes), strict=True)), found.sum_s)
