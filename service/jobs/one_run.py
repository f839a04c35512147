"""One run of a job in the child process of a worker; its progress and result are written to the store.

The best plan so far is stored during the search, so that after any end of the run, the next run begins with it. The
search continues while Redis is away. Knows nothing of processes.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import redis
from rq.timeouts import JobTimeoutException

from agents import search_offer
from agents.searcher import Budget, Progress
from automap.errors import UserError
from automap.plan import Plan
from automap.records import to_json
from service.jobs import graphs
from service.jobs.connection import impatient, left_out_while_away, paced, patiently
from service.jobs.delivery import Run
from service.jobs.events import Thinning
from service.jobs.gnn_job import run_gnn
from service.jobs.job_changes import Superseded
from service.jobs.job_queue import OVERHEAD_S
from service.jobs.records import ACTIVE, parent_of
from service.jobs.run_job import JobRequest, run_job
from service.jobs.store import Store
from service.jobs.team import searching
from service.problems import limit, problem, problem_of

LOG = logging.getLogger("automap.worker")

CHECKPOINT_S = 1.0
"""Least seconds between two writes of the best plan."""
CHECKPOINT_SHARE = 0.02
"""Largest share of the search's time that these writes take."""
TOO_LONG = limit(
    500,
    "The job took too long",
    f"A run may take its budget (AUTOMAP_MAX_BUDGET_S for one in evaluations), its trials and {OVERHEAD_S} s.",
    field="budget",
    value="more time",
    repair="Give it a smaller budget or model. `automap plan JOB --so-far` has the best plan that it found.",
)
_PACE_S = 0.2
"""Least seconds between two writes of the progress, and between two looks whether the job has ended."""


def run(current: Run, client: redis.Redis, *, search: Any = None) -> None:
    """Does the work of a run, and writes its result or its error to the store.

    Args:
        current: the run, which has begun.
        client: the service's Redis, one that waits for it (`service.jobs.connection.connect`).
        search: in place of `agents.search_offer`.

    Raises:
        MemoryError: the job needs more than the process may have.
    """
    with impatient(client) as other:
        _run(current, Store(client, current.tenant), Store(other, current.tenant), search)


def _run(current: Run, store: Store, hurried: Store, search: Any) -> None:
    """Does the work of a run, see `run`.

    Args:
        current: the run.
        store: waits for Redis while it is away.
        hurried: does not wait for it.
        search: see `run`.
    """
    job_id, token = current.job_id, current.token
    job = store.job(job_id)
    if job is None:
        return  # deleted meanwhile
    if (request := job.request) is None:
        with contextlib.suppress(Superseded):
            store.fail(job_id, token, job.problem or {})
        return
    parent = parent_of(job_id)
    if parent is not None and store.state(parent) not in ACTIVE:
        store.cancel(job_id)  # its job has ended without it
        return
    is_wanted = _remembered(
        lambda: hurried.check(job_id, token) and (parent is None or hurried.state(parent) in ACTIVE)
    )
    start = _checkpointed(store, job_id, request)
    keep_best = _Checkpoint(lambda plan: hurried.set_best(job_id, token, plan), start, request.seed)
    on_progress = _ProgressWriter(hurried, current, keep_best)
    with _failures_stored(store, current):
        result: Any
        if request.gnn is not None:
            result = run_gnn(request, on_progress=on_progress, should_stop=lambda: not is_wanted())
        else:
            result = run_job(
                request,
                lambda: graphs.load(store, job.model_id, request),
                on_progress=on_progress,
                should_stop=lambda: not is_wanted(),
                search=searching(job_id, request, hurried, search or search_offer),
                start=start,
            )
        plan = result.to_json()
        patiently(lambda: store.succeed(job_id, token, plan, on_progress.unwritten))


@contextlib.contextmanager
def _failures_stored(store: Store, current: Run) -> Iterator[None]:
    """A context that stores errors in its block as the failure of a run, unless another run of the job has begun.

    Raises:
        redis.RedisError: the store cannot be reached; the job is attempted again.
        MemoryError: the job needs more than the process may have.
    """
    job_id, token = current.job_id, current.token

    def fail(fault: Mapping[str, Any]) -> None:
        patiently(lambda: store.fail(job_id, token, fault))

    try:
        try:
            yield
        except UserError as fault:
            fail(problem_of(fault))
        except JobTimeoutException:
            fail(TOO_LONG)
        except (redis.RedisError, Superseded, MemoryError):
            raise
        except Exception:
            LOG.exception("job %s failed", job_id)
            fail(problem(500, "Internal error", f"See the worker's log for job {job_id}."))
    except Superseded:
        LOG.info("job %s: run %d was superseded", job_id, token)


class _ProgressWriter:
    """Writes the progress of a run and its best plan so far into the store, at most every `_PACE_S` seconds.

    Without Redis, progress is lost and the search goes on.
    """

    def __init__(self, store: Store, current: Run, keep_best: _Checkpoint) -> None:
        self._store, self._job_id, self._token = store, current.job_id, current.token
        self._keep_best, self._thinning = keep_best, Thinning()
        self._written, self._fraction = -_PACE_S, 0.0
        self._unwritten: Progress | None = None

    def __call__(self, progress: Progress) -> None:
        """Takes a report of the search."""
        now = time.monotonic()
        if now - self._written < _PACE_S and not self._fraction < 1 <= progress.fraction:
            self._unwritten = progress
            return
        self._written, self._fraction, self._unwritten = now, progress.fraction, None
        document = _progress_json(progress)
        with left_out_while_away():
            is_event = self._thinning.passes(document)
            self._store.set_progress(self._job_id, self._token, document, is_event=is_event)
            self._keep_best(progress)

    @property
    def unwritten(self) -> dict[str, Any] | None:
        """The last report, which is to be written with the plan; None where it has been written already."""
        return None if self._unwritten is None else _progress_json(self._unwritten)


def _progress_json(progress: Progress) -> dict[str, Any]:
    """Progress as JSON types, without its plan."""
    document: dict[str, Any] = to_json(replace(progress, best=None))
    del document["best"]
    return document


class _Checkpoint:
    """Keeps the best plan so far, as often as that takes little of the time of the search.

    Args:
        write: writes a plan.
        kept: the plan that was kept before, if any.
        seed: seed of the search, for the record of the plan.
    """

    def __init__(self, write: Callable[[Any], None], kept: Sequence[Plan], seed: int) -> None:
        self._write, self._seed = write, seed
        # A plan takes a while to be made in full; a search that is over in a moment need not wait for it.
        self._again = time.monotonic() + CHECKPOINT_S / 2
        self._best_s = min((plan.estimate.step_time_s for plan in kept if plan.estimate is not None), default=math.inf)

    def __call__(self, progress: Progress) -> None:
        """Keeps the plan of a report if it is better than the one that was kept."""
        began = time.monotonic()
        reached = progress.best_step_time_s
        if progress.best is None or reached is None or reached >= self._best_s or began < self._again:
            return
        from agents.results.plainest import IllegalPlan

        try:
            plan = progress.best(self._seed)
        except (UserError, IllegalPlan) as fault:
            LOG.warning("the best plan so far is not kept: %s", fault)
        else:
            self._write(plan.to_json())
            assert plan.estimate is not None
            self._best_s = plan.estimate.step_time_s  # of several workers, the one that has reached it may be late
        now = time.monotonic()
        self._again = now + max(CHECKPOINT_S, (now - began) / CHECKPOINT_SHARE)


def _checkpointed(store: Store, job_id: str, request: JobRequest) -> list[Plan]:
    """The best plan of earlier runs, with which a run begins. None if the budget is in evaluations: then the result
    must not depend on how often the job was begun."""
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
