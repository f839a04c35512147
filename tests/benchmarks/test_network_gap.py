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
@pytest.mark.long
def test_no_problem_of_the_evaluation_was_trained_on(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    trained = set(json.loads((NETWORK / ABOUT).read_text())["digests"])
    judged = {problem_digest(build())[:DIGITS] for _, build in importlib.import_module("network_gap").problems()}
    # Digests mean today what they meant when the network was trained: problems that it knows are found.
    seeds = (seed for seed in itertools.count() if outline(seed).split == "train")
    for seed in itertools.islice(seeds, 3):
        assert problem_digest(generate(seed).problem)[:DIGITS] in trained
    assert len(trained) > 500
    assert len(judged) >= 60
    assert not trained & judged
