from __future__ import annotations

import pytest

from automap.errors import ClusterError, ModelError, ModelTooExpensive, NothingFits, PlanError, ProblemError, UserError
from service.problems import RemoteError, error_of, problem, problem_of


@pytest.mark.parametrize(
    "kind", [UserError, ModelError, ModelTooExpensive, ClusterError, ProblemError, PlanError, NothingFits]
)
def test_an_error_survives_the_wire(kind: type[UserError]) -> None:
    fault = kind("is odd", field="training.global_batch", value=7, repair="Give 8.")
    document = problem_of(fault)
    assert document["status"] == 422
    back = error_of(document)
    assert type(back) is kind
    assert isinstance(back, UserError)
    assert (back.message, back.field, back.value, back.repair) == ("is odd", "training.global_batch", "7", "Give 8.")


def test_other_problems_are_not_the_users() -> None:
    back = error_of(problem(503, "The store does not answer", "Try again."))
    assert isinstance(back, RemoteError)
    assert back.status == 503
    assert "Try again" in str(back)


def test_what_the_title_says_is_said_once() -> None:
    assert str(error_of({"title": "No such job", "status": 404, "detail": "No such job."})) == "No such job"
    assert str(error_of({"title": "Busy", "status": 503, "detail": "Come back."})) == "Busy: Come back."
    full = problem(507, "Full", "The disk is full. Make room.", field="disk", value="full", repair="Make room.")
    assert str(error_of(full)) == "Full: The disk is full. Make room."
    told = problem(405, "Not allowed", "PUT /v1/jobs", field="method", value="PUT", repair="Use POST.")
    assert str(error_of(told)) == "Not allowed: PUT /v1/jobs (got PUT). Use POST."


@pytest.mark.parametrize(
    ("code", "statuses"),
    [(2, (400, 401, 403, 404, 413, 415, 422)), (75, (429, 503)), (1, (0, 408, 409, 500, 507))],
)
def test_a_script_is_told_whether_to_repair_its_request_or_to_come_back(code: int, statuses: tuple[int, ...]) -> None:
    assert {RemoteError(problem(status, "Refused")).exit_code for status in statuses} == {code}
