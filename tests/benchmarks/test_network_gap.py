"""The problems on which the network is judged are none that it was trained on."""

import importlib
import itertools
import json
from pathlib import Path

import pytest

from agents.learning.checkpoint import ABOUT
from agents.learning.problems import generate, outline, problem_digest
from agents.learning.proposals import NETWORK
from agents.learning.training_run import DIGITS

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow
def test_digests_mean_what_they_meant_when_the_network_was_trained():
    """Also where the rates of devices and links have been measured better since: problems that it knows are found."""
    trained = set(json.loads((NETWORK / ABOUT).read_text())["digests"])
    seeds = (seed for seed in itertools.count() if outline(seed).split == "train")
    found = [problem_digest(generate(seed).problem)[:DIGITS] in trained for seed in itertools.islice(seeds, 40)]
    # The others had no label: no plan was known, or the training did not come to them.
    assert sum(found) >= 29


@pytest.mark.slow
@pytest.mark.long
def test_no_problem_of_the_evaluation_was_trained_on(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    trained = set(json.loads((NETWORK / ABOUT).read_text())["digests"])
    judged = {problem_digest(build())[:DIGITS] for _, build in importlib.import_module("network_gap").problems()}
    assert len(trained) > 500
    assert len(judged) >= 60
    assert not trained & judged
