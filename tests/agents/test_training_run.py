"""The training run of `automap train-agent`, from labels to a network with its card and learning curve."""

import json
import re

import pytest
from template_labels import template_label

from agents.learning.card import card, write_card
from agents.learning.checkpoint import ABOUT, read_network
from agents.learning.labels import LabelWriter
from agents.learning.problems import outline
from agents.learning.proposals import NETWORK
from automap.errors import ProblemError
from service.command.main import main

TRAINED, HELD_OUT = (9, 10, 17), 15


@pytest.mark.slow
def test_a_training_writes_its_network_and_card_and_goes_on(tmp_path, capsys):
    assert [outline(seed).split for seed in TRAINED] == ["train"] * 3 and outline(HELD_OUT).split != "train"
    with LabelWriter(tmp_path / "labels") as writer:
        for seed in (*TRAINED, HELD_OUT):
            writer.write(template_label(seed))
    words = ["train-agent", str(tmp_path / "network"), "--labels", str(tmp_path / "labels"), "--seed", "3"]
    assert main([*words, "--duration", "3s"]) == 0
    assert "the first plan is" in capsys.readouterr().err
    folder = tmp_path / "network"
    read_network(folder)
    about = json.loads((folder / ABOUT).read_text())
    text = (folder / "README.md").read_text()
    assert text == card(about)
    assert "3 labelled problems" in text
    assert f"train-agent {folder}" in text and "--duration 3s" in text and "--seed 3" in text
    last = about["curve"][-1]
    assert f"| first plan, last exam | {100 * last['first_mean']:.1f} %" in text
    assert f"{last['problems']:,} visits" in text
    # The same again, for longer: it does not begin anew.
    before = json.loads((folder / "training" / ABOUT).read_text())
    assert main([*words, "--duration", "5s"]) == 0
    after = json.loads((folder / "training" / ABOUT).read_text())
    assert after["seconds"] > before["seconds"] and after["problems"] >= before["problems"]
    assert after["curve"][: len(before["curve"])] == before["curve"]


def test_a_card_says_the_size_of_the_network_and_what_is_missing():
    about = json.loads((NETWORK / ABOUT).read_text())
    network = read_network(NETWORK)
    size = sum(weights.size + bias.size for weights, bias in network._layers)
    assert f"{size:,} parameters" in card(about)
    alone = card({**about, "curve": [], "trained_on": "problems without a teacher"})
    assert "It was not examined" in alone and "Problems without a teacher." in alone
    held_out = {outline(seed).model.family for seed in range(300) if outline(seed).split == "unseen-family"}
    families = re.search(r"no model of the families ([^\n]*), none", alone)[1].split(", ")
    assert held_out <= set(families)


def test_a_card_of_another_generator_is_refused(tmp_path):
    about = json.loads((NETWORK / ABOUT).read_text())
    (tmp_path / ABOUT).write_text(json.dumps({**about, "generator": 0}))
    with pytest.raises(ProblemError, match="version 0 of the generator"):
        write_card(tmp_path)
    assert not (tmp_path / "README.md").exists()


def test_what_a_training_cannot_go_on_from_is_refused(tmp_path, capsys):
    words = ["train-agent", str(tmp_path), "--duration", "1s", "--problems", "32", "--processes", "0"]
    assert main([*words, "--labels", str(tmp_path / "nowhere")]) == 2
    assert "labels: no labels are there" in capsys.readouterr().err
    (tmp_path / "training").mkdir()
    for damaged in ('{"curve": [', "[]"):
        (tmp_path / "training" / ABOUT).write_text(damaged)
        assert main(words) == 2
        assert "Name another folder" in capsys.readouterr().err
