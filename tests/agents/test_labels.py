"""Labels of generated problems: what is stored is read back, whatever interrupts it, and says only what matters."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from template_labels import template_label

from agents.incumbent import Incumbent
from agents.learning import labelling, teacher
from agents.learning.checkpoint import network_digest
from agents.learning.labelling import chosen_seeds
from agents.learning.labels import Label, LabelWriter, drawn_version, read_labels
from agents.learning.problems import generate, outline
from agents.learning.proposals import NETWORK
from agents.learning.teacher import MAX_SLOWER, Proposer, label, simplify
from agents.planners.staged_plan import StageChoice, StagedPlan, search_staged
from agents.sampling.expert import price_grid
from agents.searcher import Budget, SearchTask
from agents.worker_processes import ProcessKilled, WorkerProcesses
from automap.cluster import parse_cluster
from automap.errors import ProblemError
from automap.problem import Problem
from automap.schedule import write_order
from automap.space.space import PlanSpace
from service.command.main import main


def made_up(seed, step_time_s=1.0):
    return Label(
        seed=seed,
        version=drawn_version(seed),
        digest="",
        fits=True,
        values=(1, 2),
        step_time_s=step_time_s,
        seconds=0.1,
    )


def test_labels_are_read_back(tmp_path):
    nothing = replace(made_up(3), fits=False, values=None, step_time_s=None)
    with LabelWriter(tmp_path) as writer:
        for found in (made_up(1), made_up(2), nothing):
            writer.write(found)
    assert read_labels(tmp_path) == {1: made_up(1), 2: made_up(2), 3: nothing}


def test_of_several_labels_of_a_problem_the_fastest_counts(tmp_path):
    with LabelWriter(tmp_path) as writer:
        writer.write(replace(made_up(1), fits=False, values=None, step_time_s=None))
        for seconds in (3.0, 1.0, 2.0):
            writer.write(made_up(1, seconds))
    assert read_labels(tmp_path) == {1: made_up(1, 1.0)}


def test_a_line_that_was_cut_short_is_left_out_and_does_no_harm_to_the_next(tmp_path):
    with LabelWriter(tmp_path) as writer:
        writer.write(made_up(1))
        writer.write(made_up(2))
    file = tmp_path / "labels-0.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    assert set(read_labels(tmp_path)) == {1}
    with LabelWriter(tmp_path) as writer:
        writer.write(made_up(3))
    assert set(read_labels(tmp_path)) == {1, 3}
    assert [path.name for path in tmp_path.iterdir()] == ["labels-0.jsonl"]


def test_writers_side_by_side_have_files_of_their_own(tmp_path):
    with LabelWriter(tmp_path) as first, LabelWriter(tmp_path) as second:
        first.write(made_up(1))
        second.write(made_up(2))
    assert {path.name for path in tmp_path.iterdir()} == {"labels-0.jsonl", "labels-1.jsonl"}
    assert set(read_labels(tmp_path)) == {1, 2}


def test_labels_of_another_generator_are_left_out_with_one_warning(tmp_path, caplog):
    with LabelWriter(tmp_path) as writer:
        for seed in (1, 2, 3):
            writer.write(replace(made_up(seed), version="another"))
        writer.write(made_up(4))
    with caplog.at_level(logging.WARNING, logger="automap.search"):
        assert set(read_labels(tmp_path)) == {4}
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "3 labels of another version of the generator are left out"
    ]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ProblemError, match="cannot be written"):
        LabelWriter(tmp_path / "file")


def test_seeds_are_chosen_by_their_split():
    assert chosen_seeds(5, 3, None) == [5, 6, 7]
    held_out = chosen_seeds(0, 5, "unseen-size")
    assert {outline(seed).split for seed in held_out} == {"unseen-size"}
    assert held_out == [s for s in range(held_out[-1] + 1) if outline(s).split == "unseen-size"]


@pytest.mark.parametrize("seed", [1, 10, 12])
@pytest.mark.parametrize("max_slower", [MAX_SLOWER, 0.2])
def test_a_simplified_plan_is_legal_and_no_slower_than_said(seed, max_slower):
    space = PlanSpace(generate(seed).problem)
    grid = price_grid(Incumbent(space, Budget(), searcher="expert"))
    rng = np.random.default_rng(seed)
    fitting = grid.values[grid.prices[:, 1] <= 0.0]
    some = fitting[rng.choice(len(fitting), 40)]
    moved = np.concatenate([some, space.neighbours(rng, space.neighbours(rng, some, some), some)])
    for values in moved[space.price(moved)[:, 1] <= 0.0][-20:]:
        found = np.array(simplify(space, tuple(values.tolist()), grid, max_slower))
        before, after = space.price(np.array([values, found]))
        assert after[1] <= 0.0
        assert after[0] <= (1.0 + max_slower) * before[0]
        assert space.repair(found.tolist()) == tuple(found.tolist())
        assert (fitting != found).sum(axis=1).min() <= (fitting != values).sum(axis=1).min()


def test_decisions_without_influence_are_put_back():
    space = PlanSpace(generate(1).problem)
    grid = price_grid(Incumbent(space, Budget(), searcher="expert"))
    best = grid.values[np.where(grid.prices[:, 1] <= 0.0, grid.prices[:, 0], np.inf).argmin()]
    rng = np.random.default_rng(0)
    moved = space.neighbours(rng, np.repeat(best[None], 200, axis=0), best[None])
    prices = space.price(moved)
    slower = prices[:, 0] / space.price(best[None])[0, 0] - 1.0
    others = moved[(prices[:, 1] <= 0.0) & ((moved != best).sum(axis=1) == 1) & (slower >= 0.0)]
    assert len(others) > 5
    for values in others:
        found = simplify(space, tuple(values.tolist()), grid)
        assert (grid.values == np.array(found)).all(axis=1).any()


@pytest.mark.slow
def test_a_label_holds_a_plan_of_its_problem():
    generated = generate(1)
    found = label(generated, Budget(evaluations=400), 0)
    space = PlanSpace(generated.problem)
    seconds, overflow = space.price(np.array([found.values]))[0]
    assert found.fits
    assert overflow <= 0.0
    assert seconds == found.step_time_s
    assert found.lower_bound_s <= seconds <= (1.0 + MAX_SLOWER) * found.expert_s
    assert found.is_of(generated)
    assert not found.is_of(generate(2))
    again = label(generated, Budget(evaluations=20), 1, before=found)
    assert replace(again, seconds=0.0) == replace(found, seconds=0.0), "no better one is found so soon"


@pytest.mark.parametrize("known_inside", [True, False])
def test_a_plan_outside_the_space_is_no_label(mlp, monkeypatch, known_inside):
    """Planners of the literature propose such plans. The best one inside is the label where there is one."""
    problem = Problem.build(mlp((512, 2048, 256, 2048, 512)), parse_cluster("4xV100"), {"global_batch": 64})
    units = PlanSpace(problem).num_units

    def staged(*sizes, **schedule):
        choices = [(1, tuple(range(sizes[0]))), (units, tuple(range(sizes[0], sum(sizes))))]
        stages = tuple(StageChoice(end=end, devices=devices) for end, devices in choices)
        return StagedPlan(stages=stages, num_micro_batches=8, **schedule)

    outside = staged(1, 3, schedule="explicit", order=write_order("1f1b", 2, 2, 8))
    plans = [outside, *([staged(3, 1)] if known_inside else [])]
    task = SearchTask(problem=problem, budget=Budget(evaluations=10))
    found = search_staged(task, "spp", lambda incumbent: plans)
    assert PlanSpace(problem).encode(found.plan) is None
    # The portfolio prices templates too.
    found = replace(found, plan=replace(found.plan, search=replace(found.record, baselines={"expert": 1.0})))
    monkeypatch.setattr(teacher, "search", lambda *given, **named: found)
    made = label(replace(generate(1), problem=problem), Budget(evaluations=10), 0)
    assert (made.fits, made.found_by, made.proven) == (known_inside, None, False)
    if known_inside:
        assert made.step_time_s == PlanSpace(problem).price(np.array([made.values]))[0, 0]


@pytest.mark.slow
def test_a_problem_that_fits_nowhere_is_labelled_so():
    generated = generate(1)
    problem, memory = generated.problem, generated.problem.cluster.device(0).memory_bytes
    hints = {"memory_reserve_bytes": 0.9999 * memory}
    crowded = replace(generated, problem=Problem.build(problem.graph, problem.cluster, problem.training, hints))
    found = label(crowded, Budget(evaluations=50), 0)
    assert (found.fits, found.values, found.step_time_s) == (False, None, None)


@pytest.mark.slow
def test_labelling_goes_on_where_it_was_killed(tmp_path, capsys):
    words = ["label-problems", str(tmp_path), "--problems", "6", "--budget", "0.3s", "--split", "train"]
    process = subprocess.Popen((sys.executable, "-m", "service.command", *words), start_new_session=True)
    deadline = time.monotonic() + 60.0
    while len(read_labels(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = read_labels(tmp_path)
    assert len(before) >= 2
    assert main(words) == 0
    after = read_labels(tmp_path)
    assert sorted(after) == chosen_seeds(0, 6, "train")
    assert before.items() <= after.items()
    lines = [line for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    assert len(lines) == len(after)
    assert main([*words, "--processes", "1"]) == 0
    assert "6 labels" in capsys.readouterr().err


@pytest.mark.parametrize("done", [0, 1, 2])
def test_problems_of_killed_processes_are_labelled_by_others(tmp_path, monkeypatch, caplog, done):
    """This holds if some problem is labelled before processes are killed; then the others have no label."""
    asked = []

    class Killed(WorkerProcesses):
        def each(self, work, tasks):
            asked.append([seed for seed, _ in tasks])
            yield from ((task, made_up(task[0])) for task in tasks[:done])
            if tasks[done:]:
                raise ProcessKilled

    monkeypatch.setattr(labelling, "WorkerProcesses", Killed)
    found = list(labelling.label_problems(tmp_path, [3, 4, 5, 6], Budget(evaluations=1), 2))
    assert found == ([made_up(seed) for seed in (3, 4, 5, 6)] if done else [None] * 4)
    assert asked == {0: [[3, 4, 5, 6]], 1: [[3, 4, 5, 6], [4, 5, 6], [5, 6], [6]], 2: [[3, 4, 5, 6], [5, 6]]}[done]
    assert ("the problems of seeds [3, 4, 5, 6]" in caplog.text) == (done == 0)


@pytest.fixture
def other_network(tmp_path):
    """The folder of a network that is nearly the shipped one."""
    folder = tmp_path / "network"
    shutil.copytree(NETWORK, folder)
    numbers = load_file(folder / "agent.safetensors")
    rng = np.random.default_rng(0)
    moved = {name: (x * rng.normal(1.0, 0.01, x.shape)).astype(x.dtype) for name, x in numbers.items()}
    save_file(moved, folder / "agent.safetensors")
    return folder


@pytest.mark.slow
@pytest.mark.long
def test_what_a_network_finds_becomes_a_label(other_network):
    before, generated = template_label(11), generate(11)
    budget = Budget(evaluations=3)
    assert label(generated, budget, 11, before=before).network is None
    found = label(generated, budget, 11, Proposer.read(other_network), before)
    space = PlanSpace(generated.problem)
    assert (found.found_by, found.step_time_s < 0.95 * before.step_time_s) == ("dqn", True)
    assert space.price(np.array([found.values]))[0].tolist()[0] == found.step_time_s
    assert found.network == network_digest(other_network) != network_digest(NETWORK)


@pytest.mark.slow
@pytest.mark.long
def test_labels_are_improved_with_a_network_and_once_only(tmp_path, other_network, capsys):
    folder = tmp_path / "labels"
    with LabelWriter(folder) as writer:
        writer.write(template_label(11))
        writer.write(template_label(12))
    before = read_labels(folder)
    words = ["label-problems", str(folder), "--problems", "2", "--first-seed", "11", "--budget", "64"]
    words += ["--network", str(other_network), "--processes", "1"]
    assert main(words) == 0
    assert "2 labels, 2 with a plan, 2 better than before" in capsys.readouterr().err
    after = read_labels(folder)
    assert all(after[seed].step_time_s < 0.95 * before[seed].step_time_s for seed in (11, 12))
    lines = (folder / "labels-0.jsonl").read_text()
    assert main(words) == 0
    assert "2 labels, 2 with a plan, 0 better than before" in capsys.readouterr().err
    assert (folder / "labels-0.jsonl").read_text() == lines, "nothing is searched twice with one network"
    assert read_labels(folder) == after


def test_a_network_that_cannot_be_read_is_refused_before_anything_is_searched(tmp_path, capsys):
    words = ["label-problems", str(tmp_path / "labels"), "--problems", "2", "--network", str(tmp_path / "nothing")]
    assert main(words) == 2
    assert "the checkpoint cannot be read" in capsys.readouterr().err


def test_an_unknown_split_is_refused(tmp_path):
    assert main(["label-problems", str(tmp_path / "labels"), "--split", "validation"]) == 2
    assert not (tmp_path / "labels").exists()
