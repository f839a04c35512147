"""The worker: RQ's worker, which for every delivery runs the next job of the store in a forked child process.

RQ waits for deliveries, forks, enforces time limits, sends heartbeats, and notices workers that send none any more. The
parent process imports the heavy libraries once, with one thread, and runs no job itself. A child that hangs, crashes,
takes too much memory or is cancelled is killed with its process group, and no other job is affected. If a worker dies,
the kernel ends its child. The job of a dead child is queued again at once, that of a dead worker when its last
heartbeat is too old. The store's fencing tokens refuse writes of runs that have been replaced.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import math
import os
import re
import resource
import shutil
import signal
import socket
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import redis
import rq
from rq.exceptions import StopRequested
from rq.executions import Execution
from rq.job import Job as Delivery
from rq.serializers import JSONSerializer
from rq.timeouts import JobTimeoutException
from rq.utils import current_timestamp, now
from rq.worker_registration import clean_worker_registry

from ir import lifetime
from service import temporary
from service.jobs import delivery as deliveries
from service.jobs import job_queue, one_run
from service.jobs.connection import ANSWER_S, LONGEST_PAUSE_S, check, connect, impatient, paced, patiently
from service.jobs.delivery import Run
from service.jobs.job_changes import DAY_S, Superseded
from service.jobs.store import Store
from service.logs import JOB
from service.problems import limit
from service.settings import GIB, Settings

LOG = logging.getLogger("automap.worker")

OUT_OF_MEMORY = 3
"""Exit status of a child that has reached its limit."""
BEAT_S = 1
"""Seconds between two heartbeats of a run, and between two checks whether its job is cancelled; RQ needs an integer."""
LEASE_S = 12
"""Seconds without a heartbeat of its worker after which a run counts as dead."""
MAINTENANCE_S = 3
"""Seconds between two checks for dead runs and lost deliveries. A run counts as dead only if two checks in a row find
it so; otherwise runs that could not reach Redis while it was away would be ended."""
NICE = 5
"""Priority of a child's process, below that of the one that answers requests on the same machine (assumed)."""
REFUSALS_S = 60.0
"""Least time between two log lines about a Redis that refuses for one reason (assumed)."""
RETENTION_S = 600.0
"""Time between two looks for jobs that are kept no longer."""

_WARM = ("agents.portfolio.portfolio", "agents.learning.dqn", "ir.onnx.sandbox")


def main(settings: Settings, *, parent: int | None = None) -> None:
    """Runs a worker until SIGTERM; its unfinished job goes back into the queue.

    Args:
        settings: the address of the service's Redis, and limits.
        parent: process that supervises this one; the worker dies with it.
    """
    if parent is not None:
        lifetime.die_with_parent(signal.SIGKILL, parent)
    assert settings.redis_url is not None
    try:
        check(settings.redis_url)
    except redis.RedisError as fault:
        LOG.warning("Redis does not answer (%s); the worker waits for it", fault)
    client = connect(settings.redis_url, patient=True)
    patiently(client.ping)
    warm()
    temporary.sweep()
    refusals, log = Refusals(), logging.getLogger("rq.worker")
    with contextlib.ExitStack() as stack, contextlib.suppress(StopRequested):
        log.addFilter(refusals)
        stack.callback(log.removeFilter, refusals)
        while True:
            worker = Worker(client, settings)
            try:
                worker.work(logging_level=None)
            except redis.RedisError as fault:
                refusals.say(fault)
            if worker.is_stopped:
                return
            # RQ ends its loop where Redis refuses a command, as with a full memory.
            time.sleep(LONGEST_PAUSE_S)


def warm() -> None:
    """Imports what every job needs and reads the kernels, with one thread: children fork from here and start in
    milliseconds."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    import torch

    from automap import compile_all
    from service.jobs.rehearsal import rehearse

    torch.set_num_threads(1)
    for module in _WARM:
        importlib.import_module(module)
    compile_all.main()
    rehearse()
    # The garbage collector ignores all present objects from now on, so that children do not copy their memory pages.
    gc.collect()
    gc.freeze()


def _is_ours_to_say(record: logging.LogRecord) -> bool:
    """Whether a log line of RQ is kept. The line that a delivery has failed is dropped: RQ writes it for every killed
    child, also if the job was cancelled. The end of a job is logged where it is stored."""
    return record.msg != "Worker %s: job %s failed (%s)"


class Refusals(logging.Filter):
    """In place of RQ's log lines about a Redis that refuses a command, as with a full memory.

    RQ says with a traceback, every second, that the worker quits. It tries again, and this says so now and then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._told, self._again = "", -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line of RQ is kept."""
        fault = record.exc_info[1] if record.exc_info else None
        if not isinstance(fault, redis.RedisError):
            return True
        self.say(fault)
        return False

    def say(self, fault: redis.RedisError) -> None:
        """Writes a line about what Redis refuses, unless one for the same reason is less than `REFUSALS_S` old."""
        why = str(fault).rpartition("caused error: ")[2]  # behind the command of a transaction that was refused
        if why != self._told or time.monotonic() >= self._again:
            self._told, self._again = why, time.monotonic() + REFUSALS_S
            LOG.error("Redis refuses (%s); the worker tries again every %g s", fault, LONGEST_PAUSE_S)


class _NothingWaits(Exception):
    """A delivery has come for which there is no job: it was cancelled, or another delivery has begun it."""


class Worker(rq.Worker):
    """Takes deliveries and runs for each the next job in a child.

    Args:
        client: the service's Redis, one that waits for it (`service.jobs.connection.connect`).
        settings: limits.
    """

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        super().__init__(
            [deliveries.queue(client)],
            f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}",
            connection=client,
            serializer=JSONSerializer,
            job_monitoring_interval=BEAT_S,
            maintenance_interval=MAINTENANCE_S,
            worker_ttl=MAINTENANCE_S + 15,  # RQ looks up from an idle queue every worker_ttl - 15 s
            exception_handlers=[self._died],
        )
        self.log.setLevel(logging.NOTSET)  # RQ's own shows several lines a job whatever AUTOMAP_LOG_LEVEL says
        self.log.addFilter(_is_ours_to_say)
        self.is_stopped = False
        self._store, self._settings = Store(client), settings
        self._run: Run | None = None
        self._folder = ""
        self._looked_at = 0.0
        self._beat_at = -math.inf
        self._num_missing = 0
        self._trim_now_and_then = paced(self._trim, every_s=RETENTION_S)

    # One delivery

    def execute_job(self, job: Delivery, queue: rq.Queue) -> None:
        """Runs the next job in a child."""
        # Temporary files that the child had no time to remove go with the folder.
        self._folder = temporary.make("job")
        try:
            super().execute_job(job, queue)
        except _NothingWaits:
            self._drop(job, queue)
        finally:
            if self.horse_pid:  # Redis has refused something meanwhile
                self.kill_horse()
                self.wait_for_horse()
                self._horse_pid = 0
            shutil.rmtree(self._folder, ignore_errors=True)

    def prepare_execution(self, job: Delivery) -> Execution:
        """Begins the next job. The delivery is registered before, so that RQ notices from then on that we die."""
        execution = super().prepare_execution(job)
        self._run = run = job_queue.begin_next(self._store, job)
        if run is None:
            raise _NothingWaits
        found = self._store.of(run.tenant).job(run.job_id)
        request = found and found.request
        job.timeout = job_queue.time_limit_s(request, self._settings.max_budget_s) if request else job_queue.OVERHEAD_S
        return execution

    def main_work_horse(self, job: Delivery, queue: rq.Queue) -> None:
        """The child: it dies with its worker, and has a folder of its own for temporary files."""
        try:
            assert self._run is not None
            JOB.set(self._run.job_id)
            lifetime.die_with_parent(signal.SIGKILL, self.pid or 0)
            os.nice(NICE)
            tempfile.tempdir = self._folder
            _limit_memory(self._settings.max_job_bytes)
            super().main_work_horse(job, queue)
        except BaseException:
            LOG.exception("the child of a worker")
        finally:
            os._exit(1)

    @property
    def connection_timeout(self) -> int:
        """Longest time that Redis may take to answer; RQ waits for deliveries for less."""
        return int(ANSWER_S)

    def get_heartbeat_ttl(self, job: Delivery) -> int:
        """Seconds that a run belongs to this worker after a heartbeat."""
        return LEASE_S

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        """Sends a heartbeat: between deliveries at most one every beat, in one round trip."""
        if pipeline is not None:
            super().heartbeat(timeout, pipeline)
        elif time.monotonic() - self._beat_at >= BEAT_S:
            self._beat_at = time.monotonic()
            with self.connection.pipeline() as pipe:
                super().heartbeat(timeout, pipe)
                pipe.execute()

    def set_state(self, state: str, pipeline: Any = None) -> None:
        """Notes whether a job runs; it is not written to Redis, where nothing reads it."""
        self._state = state

    def set_current_job_working_time(self, current_job_working_time: float, pipeline: Any = None) -> None:
        """Notes the working time; it is not written to Redis, where nothing reads it."""
        self.current_job_working_time = current_job_working_time

    def maintain_heartbeats(self, job: Delivery) -> None:
        """Sends a heartbeat, looks for dead runs, and kills the child where it must not go on."""
        run = self._run
        assert run is not None
        try:
            super().maintain_heartbeats(job)
            if self.should_run_maintenance_tasks:
                self.run_maintenance_tasks()
            over = self._stop_requested or not self._store.of(run.tenant).check(run.job_id, run.token)
        except redis.ResponseError as fault:  # as of a full memory; the search goes on
            self.log.warning("no heartbeat", exc_info=fault)  # one line in a while: `Refusals`
        else:
            if over:
                self.kill_horse()

    def wait_for_horse(self) -> tuple[int | None, int | None, Any]:
        """Waits for the end of the child; what the child started ends with it."""
        # RQ's alarm ends this wait. It must not come later: the child's exit status can be read only once.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.horse_pid, os.WEXITED | os.WNOWAIT)
        signal.alarm(0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.horse_pid, signal.SIGKILL)
        return super().wait_for_horse()

    def kill_horse(self, sig: signal.Signals = signal.SIGKILL) -> None:
        """Kills the child, if there is one, and what it started; RQ's would kill our own group while the child has not
        left it yet."""
        if not self.horse_pid:
            return
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(self.horse_pid) == os.getpgrp():
                os.kill(self.horse_pid, sig)
            else:
                super().kill_horse(sig)

    def handle_work_horse_killed(self, job: Delivery, retpid: int, ret_val: int, rusage: Any) -> None:
        """Writes the end of a run whose child has not written it."""
        run = self._run
        assert run is not None
        assert job.started_at is not None and job.timeout is not None
        late = (now() - job.started_at).total_seconds() > job.timeout
        with contextlib.suppress(Superseded):
            patiently(lambda: self._settle(run, ret_val, late=late))

    def _settle(self, run: Run, status: int | None, *, late: bool) -> None:
        """Writes what has become of a run that ended with a status."""
        store = self._store.of(run.tenant)
        if self._stop_requested:
            store.requeue(run.job_id, run.token)
        elif late:
            store.fail(run.job_id, run.token, one_run.TOO_LONG)
            LOG.warning("job %s: it took too long", run.job_id)
        elif status is not None and os.waitstatus_to_exitcode(status) == OUT_OF_MEMORY:
            title, most = "The job ran out of memory", f"more than {self._settings.max_job_bytes / GIB:g} GiB"
            repair = "Give a smaller model or cluster."
            document = limit(500, title, f"It needed {most}.", field="memory", value=most, repair=repair)
            store.fail(run.job_id, run.token, document)
            LOG.warning("job %s: it ran out of memory", run.job_id)
        else:
            # Raises `Superseded` if the job has ended or was cancelled: then nothing is logged.
            store.died(run.job_id, run.token)
            LOG.warning("job %s: its process died (%s)", run.job_id, status)

    def _died(self, job: Delivery, *fault: Any) -> None:
        """Queues the job again that a delivery has begun, or gives it up; RQ calls this where a worker is gone."""
        if (run := deliveries.noted(job)) is not None:
            with contextlib.suppress(Superseded):
                self._store.of(run.tenant).died(run.job_id, run.token)
                LOG.warning("job %s: its worker died", run.job_id)

    def _drop(self, job: Delivery, queue: rq.Queue) -> None:
        """Ends a delivery without a child."""
        with self.connection.pipeline() as pipe:
            self._forget(job, pipe)
            pipe.lrem(queue.intermediate_queue_key, 1, job.id)
            pipe.execute()

    def handle_execution_ended(self, job: Delivery, queue: rq.Queue, heartbeat_ttl: int) -> None:
        """Notes when a delivery ended; no heartbeat is needed, as it is removed at once."""
        job.ended_at = now()

    def handle_job_success(self, job: Delivery, queue: rq.Queue, started_job_registry: Any) -> None:
        """Removes a delivery that is done: it has no result, and no other one waits for it."""
        with self.connection.pipeline() as pipe:
            self._forget(job, pipe)
            pipe.execute()

    def _forget(self, job: Delivery, pipe: Any) -> None:
        self.cleanup_execution(job, pipeline=pipe)
        pipe.delete(job.key)

    # What RQ does between deliveries

    def run_maintenance_tasks(self) -> None:
        """RQ's upkeep, which waits where Redis refuses to write."""
        try:
            super().run_maintenance_tasks()
        except redis.ResponseError as fault:
            self.log.warning("no upkeep", exc_info=fault)

    def clean_registries(self) -> None:
        """Queues the jobs of dead workers again, replaces lost deliveries, removes jobs that are kept no longer.

        Every worker does so, also while its child runs, and without RQ's lock, which a kill would leave behind for a
        quarter of an hour: all of it may be done twice.
        """
        looked_at = current_timestamp()
        for queue in self.queues:
            # Only runs that the check before found dead too, and that have had time to send a heartbeat since.
            queue.started_job_registry.cleanup(self._looked_at, self._exc_handlers)
            queue.failed_job_registry.cleanup()
            clean_worker_registry(queue)
            if not self.horse_pid:  # RQ would take our child's delivery for the one that it removes
                queue.intermediate_queue.cleanup(self, queue)
        missing = job_queue.num_missing(self._store)
        with self.connection.pipeline() as pipe:
            for _ in range(min(missing, self._num_missing)):
                deliveries.put(self.connection, pipe)
            pipe.execute()
        self._looked_at, self._num_missing = looked_at, missing
        self._trim_now_and_then()
        self.last_cleaned_at = now()  # type: ignore[assignment]  # RQ does so

    def subscribe(self) -> None:
        """Does nothing: RQ's commands are not used, and listening to them needs a thread beside the one that forks."""

    def _set_ip_address(self, connection: redis.Redis) -> None:
        """Does not ask Redis for it: the list of clients is for those who administer Redis."""
        self.ip_address = "unknown"

    # The end

    def request_stop(self, signum: int, frame: Any) -> None:
        """SIGTERM: the job goes back into the queue at once, and no death is counted."""
        self.is_stopped = True
        super().request_stop(signum, frame)

    def handle_warm_shutdown_request(self) -> None:
        """Kills the child."""
        self.kill_horse()

    def set_shutdown_requested_date(self) -> None:
        """Does nothing: the handler of a signal must not wait for Redis."""

    def register_death(self) -> None:
        """Takes this worker out of the list, unless Redis is away."""
        with impatient(self.connection) as self.connection, contextlib.suppress(redis.RedisError):
            super().register_death()

    def _trim(self) -> None:
        settings = self._settings
        for tenant in self._store.tenants():
            self._store.of(tenant).trim(oldest_s=settings.keep_days * DAY_S, most_bytes=settings.max_kept_bytes)


def run_next() -> None:
    """The run that a delivery has begun; RQ calls this in the child."""
    delivery = rq.get_current_job()
    assert delivery is not None
    run = deliveries.noted(delivery)
    assert run is not None
    try:
        one_run.run(run, delivery.connection)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except JobTimeoutException:
        # Before the run began its work, or after it has written its end: the worker writes an end that is missing.
        os._exit(1)
    except BaseException:
        LOG.exception("job %s", run.job_id)
        os._exit(1)


def _limit_memory(most_bytes: int) -> None:
    """Bounds what this process may allocate beyond what it has from the worker."""
    status = Path("/proc/self/status")
    found = re.search(r"VmData:\s+(\d+) kB", status.read_text("utf-8")) if status.exists() else None
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = most_bytes + (int(found[1]) << 10 if found else 0)
    resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
