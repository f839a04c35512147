"""The problem document: what is read, and what is refused with field, value and repair."""

import copy

import jsonschema
import pytest

from automap.errors import ProblemError
from automap.gnn.made_up import Shape, make_problem
from automap.gnn.problem import GnnProblem, problem_schema


@pytest.fixture(scope="module")
def document():
    return make_problem(Shape(machines=3, workers=3, samplers=1)).to_json()


def changed(document, path, value):
    """The document with one value replaced."""
    document = copy.deepcopy(document)
    *way, last = path
    at = document
    for key in way:
        at = at[key]
    at[last] = value
    return document


def number_of(document, source, target):
    return next(n for n, f in enumerate(document["flows"]) if (f["source"], f["target"]) == (source, target))


def test_documents_are_read_back_and_follow_the_schema(document):
    problem = GnnProblem.from_json(document)
    assert problem.to_json() == document
    jsonschema.validate(document, problem_schema())


def test_tasks_stand_behind_what_they_wait_for(document):
    problem = GnnProblem.from_json(document)
    order = [problem.tasks[number].name for number in problem.order()]
    for flow, lag in zip(problem.flows, problem.lags(), strict=True):
        assert lag == 1 or order.index(flow.source) < order.index(flow.target)


WRONG = [
    (("machines", 1, "nic_in_Gbps"), 0.0, "problem.machines[1].nic_in_Gbps", "0.0", "above 0"),
    (("machines", 1, "nic_out_Gbps"), -1.0, "problem.machines[1].nic_out_Gbps", "-1.0", "above 0"),
    (("machines", 1, "name"), "m0", "problem.machines[1].name", "m0", "a name of its own"),
    (("machines",), [], "problem.machines", "[]", "at least one"),
    (("tasks", 0, "role"), "graph store", "problem.tasks[0].role", "graph store", "store, sampler, worker, server"),
    (("tasks", 0, "machine"), None, "problem.tasks[0].machine", "nothing", "partition"),
    (("tasks", 0, "machine"), "m9", "problem.tasks[0].machine", "m9", "m0, m1, m2"),
    (("tasks", 0, "time_s"), {"mean": 1.0}, "problem.tasks[0].time_s", "1.0", "Leave it out"),
    (("tasks", 3, "gpus"), 9, "problem.tasks[3].gpus", "9", "Demand less, or add a machine"),
    (("tasks", 0, "memory_GiB"), 999.0, "problem.tasks[0].memory_GiB", "999.0", "Demand less of m0"),
    (("flows", 0, "bytes", "mean"), -5.0, "problem.flows[0].bytes.mean", "-5.0", "0 to"),
    (("flows", 0, "bytes"), {}, "problem.flows[0].bytes.mean", "neither", "one of the two"),
    (("flows", 0, "bytes"), {"trace": []}, "problem.flows[0].bytes.trace", "[]", "at least one"),
    (("flows", 0, "target"), "nobody", "problem.flows[0].target", "nobody", "Use one of"),
    (("flows", 0, "target"), "worker0", "problem.flows[0].target", "store to worker", "store to sampler"),
    (("flows", 0, "lag"), 1, "problem.flows[0].lag", "1", "Leave it out"),
    (("schema",), "automap.gnn-problem/2", "problem.schema", "automap.gnn-problem/2", "automap.gnn-problem/1"),
    (("prefetch",), -1, "problem.prefetch", "-1", "0 to 64"),
]


@pytest.mark.parametrize(("path", "value", "field", "shown", "repair"), WRONG, ids=lambda p: str(p)[:30])
def test_what_is_wrong_is_named(document, path, value, field, shown, repair):
    with pytest.raises(ProblemError) as caught:
        GnnProblem.from_json(changed(document, path, value))
    assert (caught.value.field, caught.value.value) == (field, shown)
    assert repair in caught.value.repair


def test_a_circle_is_named(document):
    at = number_of(document, "server0", "worker0")
    with pytest.raises(ProblemError, match=r"a circle: .*worker0.*lag of 1"):
        GnnProblem.from_json(changed(document, ("flows", at, "lag"), 0))


def test_traces_have_one_length_and_flows_are_given_once(document):
    wrong = changed(document, ("flows", 0, "bytes"), {"trace": [1.0, 2.0]})
    wrong = changed(wrong, ("flows", 1, "bytes"), {"trace": [1.0]})
    with pytest.raises(ProblemError) as caught:
        GnnProblem.from_json(wrong)
    assert caught.value.field == "problem.flows[1].bytes.trace" and "2 values" in caught.value.repair
    with pytest.raises(ProblemError, match="given twice"):
        GnnProblem.from_json(changed(document, ("flows", 1), document["flows"][0]))
