"""The worker: takes jobs from the queue and runs each in a forked child.

The parent imports the heavy libraries once, with one thread, and runs nothing itself; a child that hangs, crashes or
is cancelled is killed with its process group and harms nobody. A child whose worker dies is ended by the kernel. The
job of a dead child or worker is queued again by RQ; the store's fencing tokens keep late writers out.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
import rq
from rq.job import Job as QueuedJob
from rq.serializers import JSONSerializer
from rq.timeouts import JobTimeoutException

from automap.errors import UserError
from automap.records import to_json
from ir import lifetime
from service.jobs import graphs, job_queue
from service.jobs.events import Thinning
from service.jobs.run_job import run_job
from service.jobs.store import Store, Superseded, connect, impatient
from service.problems import problem, problem_of

LOG = logging.getLogger("automap.worker")

HEARTBEAT_S = 3
LEASE_S = 15
"""Seconds without a heartbeat of its worker after which a job is run again."""
MAINTENANCE_S = 5
_PACE_S = 0.2
"""Least seconds between two writes of the progress, and between two looks whether the job has ended."""

_RUN_FILE = "run"
"""Name of the file in a child's folder that holds the number of its run, the fencing token."""

_WARM = ("agents.portfolio.portfolio", "agents.learning.dqn", "ir.onnx.sandbox")


def main(redis_url: str, *, parent: int | None = None) -> None:
    """Runs a worker until SIGTERM; its unfinished job goes back into the queue.

    Args:
        redis_url: address of the service's Redis.
        parent: process that supervises this one; the worker dies with it.
    """
    if parent is not None:
        lifetime.die_with_parent(signal.SIGKILL, parent)
    try:
        with connect(redis_url) as first:
            first.ping()
    except redis.AuthenticationError as fault:
        repair = "Put name and password into AUTOMAP_REDIS_URL, as in redis://name:password@host:6379/0."
        raise UserError(f"Redis refuses the worker ({fault})", field="redis_url", value="...", repair=repair) from None
    except redis.ConnectionError as fault:
        LOG.warning("Redis does not answer (%s); the worker waits for it", fault)
    client = connect(redis_url, patient=True)
    client.ping()
    warm()
    worker: _Worker = _Worker(
        [job_queue.queue(client)],
        connection=client,
        serializer=JSONSerializer,
        job_monitoring_interval=HEARTBEAT_S,
        maintenance_interval=MAINTENANCE_S,
        worker_ttl=MAINTENANCE_S + 15,  # RQ looks up from an idle queue every worker_ttl - 15 s
        work_horse_killed_handler=lambda job, pid, status, usage: _run_died(job, worker.token_of_run()),
        exception_handlers=[_on_exception],
    )
    worker.work(logging_level=None)


def warm() -> None:
    """Imports what every job needs and reads the kernels, with one thread: children fork from here and start in
    milliseconds."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    import torch

    from service import warm_up as kernels

    torch.set_num_threads(1)
    for module in _WARM:
        importlib.import_module(module)
    kernels.main()


class _Worker(rq.Worker):  # type: ignore[misc]
    """RQ's worker with shorter leases, children that die with it, and a stop that hands the job back."""

    def get_heartbeat_ttl(self, job: QueuedJob) -> int:
        """Seconds that a job belongs to this worker after a heartbeat."""
        return LEASE_S

    def execute_job(self, job: QueuedJob, queue: rq.Queue) -> None:
        """Runs a child; temporary files that it had no time to remove go with it."""
        with tempfile.TemporaryDirectory(prefix="automap-job-", ignore_cleanup_errors=True) as folder:
            self._folder = folder
            super().execute_job(job, queue)

    def token_of_run(self) -> int | None:
        """Fencing token of the run that the child of now has begun; None where it died before it said so."""
        try:
            return int((Path(self._folder) / _RUN_FILE).read_text() or 0) or None
        except FileNotFoundError:
            return None

    def main_work_horse(self, job: QueuedJob, queue: rq.Queue) -> None:
        """Begins the child: it dies with its worker, and has a folder of its own for temporary files."""
        lifetime.die_with_parent(signal.SIGKILL, self.pid)
        tempfile.tempdir = self._folder
        super().main_work_horse(job, queue)

    def kill_horse(self, sig: signal.Signals = signal.SIGKILL) -> None:
        """Kills the child and what it started."""
        try:
            if os.getpgid(self.horse_pid) == os.getpgid(0):  # just forked: it has not left our group yet
                os.kill(self.horse_pid, sig)
                return
        except ProcessLookupError:
            return
        super().kill_horse(sig)

    def handle_warm_shutdown_request(self) -> None:
        """SIGTERM: the job goes back into the queue at once, without using up one of its retries."""
        if self.horse_pid:
            self.kill_horse()

    def handle_work_horse_killed(self, job: QueuedJob, *status: Any) -> None:
        """Called before RQ decides whether the job runs again."""
        if self._stop_requested and job.retries_left is not None:
            job.retries_left += 1
        super().handle_work_horse_killed(job, *status)


def _on_exception(job: QueuedJob, kind: type[BaseException], *rest: object) -> bool:
    # RQ calls this for a job whose worker vanished (AbandonedJobError); `perform` itself raises nothing.
    _run_died(job, None)
    return True


def _run_died(job: QueuedJob, token: int | None) -> None:
    """Queues a job again whose run has died, or gives it up.

    Args:
        job: RQ's record of it.
        token: fencing token of the run; None = whatever run is the latest.
    """
    store = Store(job.connection)
    try:
        if job.retries_left:
            store.requeue(job.id, token)
        else:
            detail = f"It died {job_queue.NUM_RETRIES + 1} times, perhaps of memory."
            store.fail(job.id, token, problem(500, "The job's process died", detail))
    except Superseded:
        return  # cancelled meanwhile, or another run has taken over
    LOG.warning("job %s: its process died", job.id)


def perform(job_id: str) -> None:
    """Runs a job in the child; what comes of it is in the store. Called by RQ."""
    current = rq.get_current_job()
    assert current is not None
    note = Path(tempfile.gettempdir()) / _RUN_FILE
    run(job_id, current.connection, on_begin=lambda token: note.write_text(str(token)))


def run(
    job_id: str, client: redis.Redis, *, search: Any = None, on_begin: Callable[[int], object] = lambda token: None
) -> None:
    """Runs a job against the store of `client`.

    The search goes on while Redis is away; only its progress is not written then.

    Args:
        job_id: id of a queued job.
        client: the service's Redis, one that waits for it (`service.jobs.store.connect`).
        search: in place of `agents.search_offer`.
        on_begin: called with the fencing token of the run.
    """
    store, hurried = Store(client), Store(impatient(client))
    token = store.begin(job_id)
    job = store.job(job_id)
    if token is None or job is None:
        return
    on_begin(token)
    if (request := job.request) is None:
        store.fail(job_id, token, job.problem or {})
        return
    counts = _paced(lambda: hurried.check(job_id, token))
    written, thinning = -_PACE_S, Thinning()

    def on_progress(progress: Any) -> None:
        nonlocal written
        now = time.monotonic()
        if now - written >= _PACE_S or progress.fraction >= 1:
            written = now
            told = to_json(progress)
            with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
                hurried.set_progress(job_id, token, told, is_event=thinning.passes(told))

    try:
        try:
            plan = run_job(
                request,
                lambda: graphs.load(store, job.model_id, request),
                on_progress=on_progress,
                should_stop=lambda: not counts(),
                search=search,
            )
            store.succeed(job_id, token, plan.to_json())
        except UserError as fault:
            store.fail(job_id, token, problem_of(fault))
        except JobTimeoutException:
            store.fail(job_id, token, problem(500, "The job took too long", "Give it a smaller budget or model."))
        except (redis.RedisError, Superseded):
            raise
        except Exception:
            LOG.exception("job %s failed", job_id)
            store.fail(job_id, token, problem(500, "Internal error", f"See the worker's log for job {job_id}."))
    except Superseded:
        LOG.info("job %s: run %d was superseded", job_id, token)


def _paced(ask: Callable[[], bool]) -> Callable[[], bool]:
    """The function `ask`, called at most every `_PACE_S` seconds; in between, and without Redis, it gives its last
    answer."""
    answer, asked = True, -_PACE_S

    def paced() -> bool:
        nonlocal answer, asked
        now = time.monotonic()
        if now - asked >= _PACE_S:
            asked = now
            with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
                answer = ask()
        return answer

    return paced
