"""Jobs of the kind `gnn`: from the request to the plan, and what is refused."""

from typing import Any

import httpx
import pytest
import redis
import service_work

from automap.gnn.made_up import Shape, make_problem
from automap.gnn.plan import GnnPlan
from automap.gnn.simulator import Simulator

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
    assert plan.search.evaluations >= 40
    # Nothing else knows plans of this kind, and says so.
    assert api.get(f"{job}/exports/pytorch").status_code == 422


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
