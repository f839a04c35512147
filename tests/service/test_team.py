"""One job on several workers: it is one job to its sender, no worse than alone, and whatever dies, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
import redis
import service_work
from child_processes import called
from service_work import take, taken

from agents.searcher import Budget, Progress, SearchResult
from automap.errors import NothingFits
from automap.plan import Plan
from service.jobs import team
from service.jobs.records import members_of
from service.jobs.run_job import JobRequest, ModelOptions, build_problem, import_graph
from service.jobs.store import Store

REQUEST = JobRequest(
    cluster="8xV100-16GB",
    training={"global_batch": 64},
    model=ModelOptions(zoo="gpt2:layers=2"),
    budget="10s",
    seed=7,
    workers=3,
)
BODY = {"zoo": "gpt2:layers=2", "cluster": "8xV100-16GB", "training": {"global_batch": 64}, "budget": "10s"}


def of_step(plan: Plan, step_time_s: float) -> Plan:
    assert plan.estimate is not None
    return replace(plan, estimate=replace(plan.estimate, step_time_s=step_time_s))


@pytest.fixture
def alone(search: Any) -> SearchResult:
    """What a search by itself finds, in 0.5 s a step."""
    problem = build_problem(import_graph(b"", REQUEST), REQUEST)
    found: SearchResult = search(problem, Budget(seconds=1), on_progress=lambda progress: None)
    return found


@pytest.fixture
def job_id(store: Store) -> str:
    return store.create("", REQUEST, reserve_s=10.0).id


class Searches:
    """In place of `agents.search_offer`: finds what it began with, or what it finds alone, and remembers its calls."""

    def __init__(self, alone: SearchResult, *finds: float) -> None:
        self._alone, self._finds = alone, list(finds)
        self.calls: list[dict[str, Any]] = []

    def __call__(self, problem: Any, budget: Budget, *, start: Sequence[Plan], **more: Any) -> SearchResult:
        self.calls.append({"budget": budget, "start": start, **more})
        own = of_step(self._alone.plan, self._finds.pop(0) if self._finds else 9.0)
        times = [plan.estimate.step_time_s for plan in (own, *start) if plan.estimate is not None]
        best = of_step(own, min(times))
        more["on_progress"](
            Progress(
                searcher="fake",
                evaluations=7,
                seconds=0.0,
                best_step_time_s=min(times),
                lower_bound_s=0.1,
                fraction=1.0,
                best=lambda seed: best,
            )
        )
        return replace(self._alone, plan=best)


def kept(store: Store, member: str, plan: Plan, evaluations: int = 100) -> None:
    """A member runs and has kept a plan."""
    token = store.begin(member) or 0
    assert plan.estimate is not None
    told = {"evaluations": evaluations, "best_step_time_s": plan.estimate.step_time_s}
    store.set_progress(member, token, told)
    store.set_best(member, token, plan.to_json())


def searched(store: Store, job_id: str, search: Any, start: Sequence[Plan] = ()) -> tuple[SearchResult, list[Progress]]:
    """The search of a job with its team, and what it told."""
    job = store.job(job_id)
    assert job is not None and job.request is not None
    told: list[Progress] = []
    found = team.searching(job_id, job.request, store, search)(
        None, Budget(seconds=10.0), seed=7, on_progress=told.append, should_stop=lambda: False, start=start
    )
    return found, told


def step_s(plan: Plan) -> float:
    assert plan.estimate is not None
    return plan.estimate.step_time_s


def test_it_is_one_job_to_its_sender_and_several_to_the_queue(store: Store, client: redis.Redis, job_id: str) -> None:
    assert [job.id for job in store.jobs(10)[0]] == [job_id]
    assert (store.num_waiting(), store.searched_s()) == (3, 30.0)
    begun = [taken(client).job_id for _ in range(3)]
    assert begun == [job_id, *members_of(job_id, 3)]
    requests = [job.request for name in begun if (job := store.job(name)) is not None]
    assert requests == [REQUEST, replace(REQUEST, seed=8, tie=0.0), replace(REQUEST, seed=9, tie=0.0)]


@pytest.mark.parametrize("end", ["succeed", "fail", "cancel", "delete"])
def test_the_end_of_the_job_is_the_end_of_all(store: Store, client: redis.Redis, job_id: str, end: str) -> None:
    run, member, waiting = taken(client), taken(client), members_of(job_id, 3)[1]
    if end in ("cancel", "delete"):
        getattr(store, end)(job_id)
    else:
        getattr(store, end)(job_id, run.token, {})
    assert not store.check(member.job_id, member.token)
    assert store.state(waiting) == (None if end == "delete" else "cancelled")
    assert (store.num_waiting(), store.active(), store.running()) == (0, [], [])
    assert store.searched_s() < 1.0
    assert take(client) is None
    if end != "delete":
        store.delete(job_id)
    heard = {store.events_key(name) for name in (job_id, *members_of(job_id, 3))}
    assert {key.decode() for key in client.scan_iter(f"automap:t:*{job_id}*")} <= heard


def test_a_dead_member_runs_again_and_does_not_end_the_job(store: Store, client: redis.Redis) -> None:
    job_id = store.create("", replace(REQUEST, priority=5, workers=2)).id
    store.create("", REQUEST)
    taken(client)
    member = taken(client)
    store.died(member.job_id, member.token)
    again = taken(client)
    assert (again.job_id, again.token) == (member.job_id, 2)  # with its job's priority, before the other job
    for _ in range(2):
        store.died(again.job_id, store.job(again.job_id).attempt)  # type: ignore[union-attr]
        store.begin(again.job_id)
    assert store.state(again.job_id) == "failed"
    assert store.state(job_id) == "running"


def test_a_member_that_is_left_over_ends_itself(
    store: Store, client: redis.Redis, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the one who ended the job died before it could end the members."""
    monkeypatch.setattr("service.jobs.store.members_of", lambda *given: [])
    store.cancel(job_id)
    member = members_of(job_id, 3)[0]
    service_work.run(member, client, search=pytest.fail)
    assert store.state(member) == "cancelled"


def test_the_job_takes_the_best_plan_of_all(store: Store, job_id: str, alone: SearchResult) -> None:
    store.begin(job_id)
    first, second = members_of(job_id, 3)
    kept(store, first, of_step(alone.plan, 0.4))
    kept(store, second, of_step(alone.plan, 0.3), evaluations=50)
    search = Searches(alone, 0.5)
    found, told = searched(store, job_id, search)
    assert step_s(found.plan) == 0.3
    # Its own search is the one of a single worker, and what is found at its end takes no time of others.
    assert search.calls[0]["start"] == ()
    assert sum(call["budget"].seconds for call in search.calls) == pytest.approx(10.0)
    assert search.calls[0]["budget"].seconds >= 9.0
    # What it tells is of all, and the plan that is kept meanwhile is the best of all.
    assert told[0].evaluations == 7 + 100 + 50
    assert told[0].best_step_time_s == 0.3
    assert {name: reached.best_step_time_s for name, reached in told[0].members.items()} == {
        "worker 2": 0.4,
        "worker 3": 0.3,
    }
    assert told[0].best is not None
    assert step_s(told[0].best(7)) == 0.3
    assert found.record.evaluations == 7 + 7 + 150


def test_it_is_never_worse_than_alone(store: Store, job_id: str, alone: SearchResult) -> None:
    for slower in (None, 0.5, 0.8):
        if slower is not None:
            kept(store, members_of(job_id, 3)[0 if slower == 0.5 else 1], of_step(alone.plan, slower))
        search = Searches(alone, 0.5)
        found, _ = searched(store, job_id, search)
        assert (step_s(found.plan), len(search.calls)) == (0.5, 1)


def test_a_second_run_is_no_worse_than_alone_nor_than_the_first(store: Store, job_id: str, alone: SearchResult) -> None:
    """A search that begins with a plan may be caught near it: that of a job that died begins as the first one did."""
    for kept_s, found_s in ((0.8, 0.5), (0.3, 0.3)):
        search = Searches(alone, 0.5)
        found, told = searched(store, job_id, search, [of_step(alone.plan, kept_s)])
        assert search.calls[0]["start"] == ()
        assert step_s(found.plan) == found_s
        assert told[0].best_step_time_s == found_s
        assert told[0].best is not None
        assert step_s(told[0].best(7)) == found_s


def test_a_plan_outside_the_space_is_handed_out_too(store: Store, job_id: str, alone: SearchResult) -> None:
    kept(store, members_of(job_id, 3)[0], of_step(alone.plan, 0.3))

    def deaf(*given: Any, **more: Any) -> SearchResult:
        return alone

    assert step_s(searched(store, job_id, deaf)[0].plan) == 0.3


def test_nothing_fits_only_where_nobody_found_anything(store: Store, job_id: str, alone: SearchResult) -> None:
    def nothing(*given: Any, start: Sequence[Plan], **more: Any) -> SearchResult:
        if not start:
            raise NothingFits("too big", field="cluster", value="8xV100-16GB", repair="Take more devices.")
        return replace(alone, plan=start[0])

    with pytest.raises(NothingFits):
        searched(store, job_id, nothing)
    kept(store, members_of(job_id, 3)[0], of_step(alone.plan, 0.3))
    assert step_s(searched(store, job_id, nothing)[0].plan) == 0.3


def test_members_begin_each_round_with_the_best_of_all(
    store: Store, job_id: str, alone: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = members_of(job_id, 3)
    token = store.begin(job_id) or 0
    store.set_best(job_id, token, of_step(alone.plan, 0.6).to_json())
    kept(store, second, of_step(alone.plan, 0.4))
    search = Searches(alone, 0.5, 0.2)
    found, told = searched(store, first, search)
    starts = [[step_s(plan) for plan in call["start"]] for call in search.calls]
    assert starts == [[0.4], [0.4, 0.4], [0.2, 0.4], [0.2, 0.4]]
    assert step_s(found.plan) == 0.2
    assert len({call["seed"] for call in search.calls}) == team.ROUNDS
    # Those who find at once leave their time to the next rounds, and nobody takes more than the budget.
    assert search.calls[0]["budget"].seconds == pytest.approx(2.5, abs=0.1)
    assert search.calls[-1]["budget"].seconds <= 10.0
    assert [progress.evaluations for progress in told] == [7, 14, 21, 28]
    assert told[-1].fraction == 1.0


def test_what_is_refused(api: httpx.Client, store: Store) -> None:
    for body, field in (({"workers": 2, "budget": "200"}, "workers"), ({"workers": 65}, "workers")):
        answer = api.post("/v1/jobs", json=BODY | body)
        assert (answer.status_code, answer.json()["field"]) == (422, field), answer.text
    left = int(api.post("/v1/jobs", json=BODY).headers["RateLimit"].split("r=")[1].split(",")[0])
    answer = api.post("/v1/jobs", json=BODY | {"workers": 8})
    assert answer.status_code == 202
    assert f'"queued-jobs";r={left - 8}' in answer.headers["RateLimit"]
    assert answer.json()["request"]["workers"] == 8


def test_plans_are_counted_once(store: Store, client: redis.Redis, api: httpx.Client, job_id: str) -> None:
    run, member = taken(client), taken(client)
    store.set_progress(member.job_id, member.token, {"evaluations": 40, "seconds": 2.0})
    store.set_progress(job_id, run.token, {"evaluations": 100, "seconds": 2.0})
    text = api.get("/metrics").text
    assert "automap_evaluations_total 100.0" in text
    assert "automap_evaluations_per_second 50.0" in text


@pytest.mark.slow
def test_two_real_workers_and_the_death_of_one_of_their_processes(
    start: Callable[..., Any], until: Callable[..., Any]
) -> None:
    service = start("--workers", "2")
    # Where one starts much later than the other, it finds the search over.
    with httpx.Client(base_url=service.url) as http:
        until(lambda: "automap_workers 2.0" in http.get("/metrics").text)
    job = service.client.submit(
        "zoo:gpt2:layers=2", "8xV100-16GB", {"global_batch": 64}, budget="3s", searchers=["mcmc"], workers=2
    )

    def shown() -> Any:
        return (service.client.job(job["id"])["progress"] or {}).get("members", {}).get("worker 2")

    until(shown)
    next(child for worker in called("worker", service.children()) for child in worker.children()).kill()
    found = service.client.wait(job["id"], timeout_s=90)
    assert found["state"] == "succeeded"
    plan = service.client.plan(job["id"])
    assert plan.search.evaluations > 0
    assert len(service.client.jobs()) == 1
