"""The worker: takes jobs from the queue and runs each in a forked child.

The parent imports the heavy libraries once, with one thread, and runs nothing itself; a child that hangs, crashes,
takes too much memory or is cancelled is killed with its process group and harms nobody. A child whose worker dies is
ended by the kernel. The job of a dead child is queued again at once, that of a dead worker when its lease is over; the
store's fencing tokens keep late writers out.
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
import select
import shutil
import signal
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import redis

from agents.searcher import Budget, Progress
from automap.errors import ProblemError, UserError
from automap.plan import Plan
from automap.records import to_json
from ir import lifetime
from service import temporary
from service.jobs import graphs
from service.jobs.connection import connect, impatient
from service.jobs.deadline import deadline
from service.jobs.events import Thinning
from service.jobs.gnn_job import run_gnn
from service.jobs.job_queue import HEARTBEAT_S, OVERHEAD_S, REAP_S, Claim, Queue, paced, time_limit_s
from service.jobs.run_job import JobRequest, run_job
from service.jobs.store import DAY_S, Store, Superseded
from service.logs import JOB
from service.problems import problem, problem_of
from service.settings import GIB, Settings

LOG = logging.getLogger("automap.worker")

OUT_OF_MEMORY = 3
"""Exit status of a child that has reached its limit."""
LOOK_S = 0.25
"""Time between two looks whether a job is cancelled."""
KILL_S = 60.0
"""Seconds beyond its time limit after which the child is killed."""
RETENTION_S = 600.0
"""Time between two looks for jobs that are kept no longer."""
CHECKPOINT_S, CHECKPOINT_SHARE = 1.0, 0.02
"""Least seconds between two writes of the best plan, and largest share of the search's time that they take."""
_PACE_S = 0.2
"""Least seconds between two writes of the progress, and between two looks whether the job has ended."""

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
        with connect(settings.redis_url) as first:
            first.ping()
    except redis.AuthenticationError as fault:
        repair = "Put name and password into AUTOMAP_REDIS_URL, as in redis://name:password@host:6379/0."
        raise UserError(f"Redis refuses the worker ({fault})", field="redis_url", value="...", repair=repair) from None
    except redis.ConnectionError as fault:
        LOG.warning("Redis does not answer (%s); the worker waits for it", fault)
    client = connect(settings.redis_url, patient=True)
    client.ping()
    warm()
    Worker(client, settings).work()


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
    # Objects of now are never looked at again by the collector, so that children do not copy their pages.
    gc.collect()
    gc.freeze()


class Worker:
    """Takes jobs and runs each in a child.

    Args:
        client: the service's Redis, one that waits for it (`service.jobs.connection.connect`).
        settings: limits.
    """

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        self._client = client
        self._hurried = impatient(client)
        self._settings = settings
        name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._queue, self._renewing = Queue(client, name), Queue(self._hurried, name)
        self._stopping = False
        self._child = 0

    def work(self) -> None:
        """Runs jobs until SIGTERM."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        temporary.sweep()
        alive = paced(lambda: self._renewing.renew(None), every_s=HEARTBEAT_S)
        reap = paced(self._renewing.reap, every_s=REAP_S)
        trim = paced(self._trim, every_s=RETENTION_S)
        while not self._stopping:
            for look in (alive, reap, trim):
                look()
            claim = self._queue.claim()
            if claim is None:
                self._queue.wait(1.0)
            else:
                self.run_child(claim)
        with contextlib.suppress(redis.RedisError):
            self._renewing.leave()

    def run_child(self, claim: Claim) -> None:
        """Runs a job in a child, and writes what the child could not write itself."""
        store = Store(self._client, claim.tenant)
        job = store.job(claim.job_id)
        limit_s = (
            OVERHEAD_S if job is None or job.request is None else time_limit_s(job.request, self._settings.max_budget_s)
        )
        # Temporary files that the child had no time to remove go with the folder.
        folder = temporary.make("job")
        try:
            reader, writer = os.pipe()
            parent = os.getpid()
            self._child = os.fork()
            if self._child == 0:
                os.close(reader)
                self._be_child(claim, folder, limit_s, parent)
            os.close(writer)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.setpgid(self._child, self._child)
            try:
                late = self._watch(claim, reader, limit_s + KILL_S)
            finally:
                os.close(reader)
                _, status = os.waitpid(self._child, 0)
                # What the child started ends with it.
                self._kill()
                self._child = 0
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(Superseded):
            self._end(store, claim, status, late=late)

    def _watch(self, claim: Claim, reader: int, most_s: float) -> bool:
        """Waits for the end of the child, which is the end of a pipe, and kills it where it must not go on.

        Returns:
            Whether it was killed because it took too long.
        """
        renew = paced(lambda: self._renewing.renew(claim), every_s=HEARTBEAT_S)
        reap = paced(self._renewing.reap, every_s=REAP_S)
        store, began, late = Store(self._hurried, claim.tenant), time.monotonic(), False
        while not select.select([reader], [], [], LOOK_S)[0]:
            renew()
            reap()
            with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
                if not store.check(claim.job_id, claim.token):
                    self._kill()
            if time.monotonic() - began > most_s:
                late = True
                self._kill()
        return late

    def _end(self, store: Store, claim: Claim, status: int, *, late: bool) -> None:
        """Writes the end of a run whose child has not written it."""
        if status == 0:
            return
        if self._stopping:
            store.requeue(claim.job_id, claim.token)
        elif late:
            store.fail(claim.job_id, claim.token, problem(500, "The job took too long", "Give it a smaller budget."))
        elif os.waitstatus_to_exitcode(status) == OUT_OF_MEMORY:
            text = f"It needed more than {self._settings.max_job_bytes / GIB:g} GiB. Give a smaller model or cluster."
            store.fail(claim.job_id, claim.token, problem(500, "The job ran out of memory", text))
        else:
            LOG.warning("job %s: its process died (%d)", claim.job_id, status)
            store.died(claim.job_id, claim.token)

    def _be_child(self, claim: Claim, folder: str, limit_s: float, parent: int) -> NoReturn:
        """The child: it dies with its worker, and has a folder of its own for temporary files."""
        code = 1
        try:
            os.setpgid(0, 0)
            JOB.set(claim.job_id)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            lifetime.die_with_parent(signal.SIGKILL, parent)
            tempfile.tempdir = folder
            _limit_memory(self._settings.max_job_bytes)
            repair = "Give it a smaller budget or model."
            late = ProblemError("the job took too long", field="budget", value=f"{limit_s} s", repair=repair)
            try:
                with deadline(limit_s, KILL_S, late):
                    run(claim, self._client)
            except ProblemError as fault:
                Store(self._client, claim.tenant).fail(claim.job_id, claim.token, problem_of(fault))
            code = 0
        except MemoryError:
            code = OUT_OF_MEMORY
        except BaseException:
            LOG.exception("job %s", claim.job_id)
        finally:
            os._exit(code)

    def _stop(self, *_: object) -> None:
        """SIGTERM: the job goes back into the queue at once, and no death is counted."""
        self._stopping = True
        self._kill()

    def _kill(self) -> None:
        if self._child:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child, signal.SIGKILL)

    def _trim(self) -> None:
        store, settings = Store(self._hurried), self._settings
        for tenant in store.tenants():
            store.of(tenant).trim(oldest_s=settings.keep_days * DAY_S, most_bytes=settings.max_kept_bytes)


def _limit_memory(most_bytes: int) -> None:
    """Bounds what this process may allocate beyond what it has from the worker."""
    status = Path("/proc/self/status")
    found = re.search(r"VmData:\s+(\d+) kB", status.read_text()) if status.exists() else None
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = most_bytes + (int(found[1]) << 10 if found else 0)
    resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def run(claim: Claim, client: redis.Redis, *, search: Any = None) -> None:
    """Does the work of a run; what comes of it is in the store.

    The search goes on while Redis is away; only its progress is not written then.

    Args:
        claim: the run, which has begun.
        client: the service's Redis, one that waits for it (`service.jobs.connection.connect`).
        search: in place of `agents.search_offer`.

    Raises:
        MemoryError: the job needs more than the process may have.
    """
    store, hurried = Store(client, claim.tenant), Store(impatient(client), claim.tenant)
    job_id, token = claim.job_id, claim.token
    job = store.job(job_id)
    if job is None:
        return  # deleted meanwhile
    if (request := job.request) is None:
        with contextlib.suppress(Superseded):
            store.fail(job_id, token, job.problem or {})
        return
    counts = _remembered(lambda: hurried.check(job_id, token))
    written, thinning = -_PACE_S, Thinning()
    start = _checkpointed(store, job_id, request)
    keep_best = _Checkpoint(lambda plan: hurried.set_best(job_id, token, plan), start)

    def on_progress(progress: Progress) -> None:
        nonlocal written
        now = time.monotonic()
        if now - written >= _PACE_S or progress.fraction >= 1:
            written = now
            told = to_json(replace(progress, best=None))
            del told["best"]
            with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
                hurried.set_progress(job_id, token, told, is_event=thinning.passes(told))
                keep_best(progress, request.seed)

    try:
        try:
            if request.gnn is not None:
                placed = run_gnn(request, on_progress=on_progress, should_stop=lambda: not counts())
                store.succeed(job_id, token, placed.to_json())
                return
            plan = run_job(
                request,
                lambda: graphs.load(store, job.model_id, request),
                on_progress=on_progress,
                should_stop=lambda: not counts(),
                search=search,
                start=start,
            )
            store.succeed(job_id, token, plan.to_json())
        except UserError as fault:
            store.fail(job_id, token, problem_of(fault))
        except (redis.RedisError, Superseded, MemoryError):
            raise
        except Exception:
            LOG.exception("job %s failed", job_id)
            store.fail(job_id, token, problem(500, "Internal error", f"See the worker's log for job {job_id}."))
    except Superseded:
        LOG.info("job %s: run %d was superseded", job_id, token)


class _Checkpoint:
    """Keeps the best plan so far, as often as that takes little of the time of the search.

    Args:
        write: writes a plan.
        kept: the plan that was kept before, if any.
    """

    def __init__(self, write: Callable[[Any], None], kept: Sequence[Plan]) -> None:
        self._write = write
        # A plan takes a while to be made in full; a search that is over in a moment need not wait for it.
        self._again = time.monotonic() + CHECKPOINT_S / 2
        self._best_s = min((plan.estimate.step_time_s for plan in kept if plan.estimate is not None), default=math.inf)

    def __call__(self, progress: Progress, seed: int) -> None:
        """Keeps the plan of a report if it is better than the one that was kept."""
        began = time.monotonic()
        reached = progress.best_step_time_s
        if progress.best is None or reached is None or reached >= self._best_s or began < self._again:
            return
        from agents.results.plainest import IllegalPlan

        try:
            plan = progress.best(seed)
        except (UserError, IllegalPlan) as fault:
            LOG.warning("the best plan so far is not kept: %s", fault)
        else:
            self._write(plan.to_json())
            self._best_s = reached
        now = time.monotonic()
        self._again = now + max(CHECKPOINT_S, (now - began) / CHECKPOINT_SHARE)


def _checkpointed(store: Store, job_id: str, request: JobRequest) -> list[Plan]:
    """The best plan of the runs before, with which a run begins; none where a budget in evaluations promises the same
    plan however often a job is begun."""
    kept = store.plan(job_id, so_far=True) if Budget.parse(request.budget).seconds is not None else None
    if kept is None:
        return []
    return [Plan.from_json(kept)]


def _remembered(ask: Callable[[], bool]) -> Callable[[], bool]:
    """The function `ask`, called at most every `_PACE_S` seconds; in between, and without Redis, it gives its last
    answer."""
    answer = True

    def look() -> None:
        nonlocal answer
        answer = ask()

    look_again = paced(look, every_s=_PACE_S)

    def remembered() -> bool:
        look_again()
        return answer

    return remembered
