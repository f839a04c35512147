"""`automap gnn` from a problem to a plan and its launch list."""

import json
from pathlib import Path

import pytest

from service.command.main import main

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gnn_products.json"


def test_the_example_becomes_a_plan_and_a_launch_list(tmp_path, capsys):
    plan, launch = tmp_path / "plan.json", tmp_path / "launch.json"
    assert main(["gnn", "search", str(EXAMPLE), "--budget", "50", "-o", str(plan)]) == 0
    said = capsys.readouterr().out
    assert "iteration 0." in said and "against" in said and "why" in said
    assert json.loads(plan.read_text())["schema"] == "automap.gnn-plan/1"
    assert main(["gnn", "export", str(plan), str(EXAMPLE), "--style", "pyg", "-o", str(launch)]) == 0
    assert json.loads(launch.read_text())["style"] == "pyg"
    assert f"wrote     {launch}" in capsys.readouterr().out
    assert main(["gnn", "trial", str(plan), str(EXAMPLE), "--iterations", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured"]["iteration_s"] > 0.9 * found["predicted"]["iteration_s"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["search", "missing.json"], "problem: cannot be read"),
        (["search", str(EXAMPLE), "--budget", "soon"], "budget: not a budget"),
        (["search", str(EXAMPLE), "--searcher", "luck"], "searcher: unknown"),
        (["export", str(EXAMPLE), str(EXAMPLE)], "plan.schema: unknown value"),
        (["trial", str(EXAMPLE), str(EXAMPLE)], "plan.schema: unknown value"),
        (["schema", "cluster"], "document: unknown"),
    ],
)
def test_what_is_wrong_is_named(arguments, said, capsys):
    assert main(["gnn", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("document", ["problem", "plan"])
def test_schemas_are_printed(document, capsys):
    assert main(["gnn", "schema", document]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == f"automap.gnn-{document}/1"


def test_a_graph_becomes_a_problem_that_is_searched(tmp_path, capsys):
    problem = tmp_path / "problem.json"
    made = ["2000x8", "--batch", "50", "--fan-outs", "4,3", "--iterations", "4", "-o", str(problem)]
    assert main(["gnn", "profile", *made]) == 0
    said = capsys.readouterr().err
    assert "2,000 nodes" in said and f"problem   {problem}" in said
    assert main(["gnn", "search", str(problem), "--budget", "20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "automap.gnn-plan/1"
    assert main(["gnn", "search", str(problem), "--budget", "20"]) == 0
    # Traces are read alike in every draw: there is no range to show.
    first = capsys.readouterr().out.splitlines()[0]
    assert "(the same in every draw: only volumes with a spread vary)" in first and "between" not in first
    for option, value in (("fan-outs", "four"), ("fan-outs", "5,²"), ("train-s", "soon")):
        assert main(["gnn", "profile", "2000x8", f"--{option}", value]) == 2
        assert f"--{option}: " in capsys.readouterr().err
    # A document that `gnn search` would refuse is not written.
    for option, value in (("nic", "inf"), ("cpus", "1e9"), ("features", "99999999999")):
        assert main(["gnn", "profile", "2000x8", f"--{option}", value]) == 2
        assert f"--{option}" in capsys.readouterr().err
