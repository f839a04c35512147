"""Jobs of the kind `gnn`: from the request to the plan, and what is refused."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import service_work

from automap.errors import UserError
from automap.gnn.made_up import Shape, make_problem
from automap.gnn.plan import GnnPlan
from automap.gnn.simulator import Simulator
from service.async_client import AsyncAutomapClient
from service.client import AutomapClient
from service.command.main import main

PROBLEM = make_problem(Shape(machines=3, workers=2, samplers=1))


def test_a_job_ends_with_a_plan(api: httpx.Client, client: redis.Redis) -> None:
    answer = api.post("/v1/gnn/jobs", json={"problem": PROBLEM.to_json(), "budget": 40, "searcher": "metropolis"})
    assert answer.status_code == 202, answer.text
    job = answer.headers["location"]
    assert api.get(f"{job}/plan").status_code == 409
    service_work.run(answer.json()["id"], client)
    found = api.get(job).json()
    assert found["state"] == "succeeded", found["problem"]
    plan = GnnPlan.from_json(api.get(f"{job}/plan").json())
    plan.places(Simulator(PROBLEM, iterations=1, seed=0))
    told = found["progress"]
    assert told["evaluations"] >= 40 and told["best_step_time_s"] == pytest.approx(plan.estimate.iteration_s, rel=0.2)
    assert plan.search.evaluations >= 40
    # Nothing else knows plans of this kind, and says so.
    assert api.get(f"{job}/exports/pytorch").status_code == 422


def test_both_clients_submit_a_problem_and_read_its_plan(api: httpx.Client, client: redis.Redis) -> None:
    with AutomapClient(str(api.base_url)) as own:
        job = own.submit_gnn(PROBLEM, budget=10, seed=1)
        service_work.run(job["id"], client)
        assert own.wait(job["id"])["state"] == "succeeded"
        plan = own.gnn_plan(job["id"])
        with pytest.raises(UserError, match="searcher"):
            own.submit_gnn(PROBLEM, searcher="luck")

    async def ask() -> GnnPlan:
        async with AsyncAutomapClient(str(api.base_url)) as other:
            again = await other.submit_gnn(PROBLEM.to_json(), budget=10, seed=1)
            await asyncio.to_thread(service_work.run, again["id"], client)
            return await other.gnn_plan(again["id"])

    other = asyncio.run(ask())
    assert (other.placement, other.priorities, other.estimate) == (plan.placement, plan.priorities, plan.estimate)


def test_the_command_line_follows_a_job_and_fetches_its_plan(
    api: httpx.Client, client: redis.Redis, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--url", str(api.base_url)]
    with AutomapClient(str(api.base_url)) as own:
        job = own.submit_gnn(PROBLEM, budget=10)["id"]
        service_work.run(job, client)
        plan = own.gnn_plan(job)
    assert main(["status", job, *where]) == 0
    told = capsys.readouterr().out.split()
    assert told[:8] == [job, "succeeded", *["GNN", "training", "on", "3", "machines", "best"]]
    for verb in ("watch", "plan"):
        path = tmp_path / f"{verb}.json"
        assert main([verb, job, *where, "-o", str(path)]) == 0
        assert f"iteration {plan.estimate.iteration_s:.4g} s" in capsys.readouterr().out
        assert GnnPlan.from_json(json.loads(path.read_text())) == plan


def test_a_request_that_comes_twice_is_one_job(api: httpx.Client) -> None:
    body, key = {"problem": PROBLEM.to_json(), "budget": 10}, {"Idempotency-Key": "once"}
    first, again = (api.post("/v1/gnn/jobs", json=body, headers=key) for _ in range(2))
    assert first.status_code == again.status_code == 202 and first.json()["id"] == again.json()["id"]
    answer = api.post("/v1/gnn/jobs", json=body | {"seed": 2}, headers=key)
    assert answer.status_code == 422 and answer.json()["field"] == "Idempotency-Key"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"problem": {"machines": []}}, "problem.tasks"),
        ({"problem": PROBLEM.to_json() | {"prefetch": -1}}, "problem.prefetch"),
        ({"problem": PROBLEM.to_json(), "searcher": "luck"}, "searcher"),
        ({"problem": PROBLEM.to_json(), "budget": "soon"}, "budget"),
        ({"problem": PROBLEM.to_json(), "budget": "999h"}, "budget"),
        ({"budget": "1s"}, "problem"),
    ],
)
def test_what_is_wrong_is_named(api: httpx.Client, body: dict[str, Any], field: str) -> None:
    answer = api.post("/v1/gnn/jobs", json=body)
    assert answer.status_code == 422, answer.text
    assert answer.json()["field"] == field and answer.json()["repair"]
