from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from service.command.main import main

WORDS = ["recommend", "zoo:gpt:layers=2,hidden=128,heads=4,vocab_size=512,seq_len=64", "--global-batch", "32"]


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*WORDS, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_days_and_costs_follow_from_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prices, path = tmp_path / "prices.json", tmp_path / "found.json"
    prices.write_text('{"H100": 2.5, "A100": 1.5}')
    words = ["--clusters", "1x8xA100,1x8xH100", "--tokens", "1e9", "--price", str(prices), "-o", str(path)]
    found = shown(capsys, *words)
    assert json.loads(path.read_text()) == found
    steps = 1e9 / (32 * 64)
    whole = [one for one in found["candidates"] if one["part_of"] is None]
    assert [one["cost_per_hour"] for one in whole] == [8 * 1.5, 8 * 2.5]
    for one in found["candidates"]:
        hour = one["num_devices"] * (1.5 if "A100" in one["cluster"] else 2.5)
        assert one["cost_per_hour"] == hour and one["devices"]
        if one["step_time_s"] is None:
            continue
        assert one["days"] == pytest.approx(steps * one["step_time_s"] / 86400)
        assert one["cost"] == pytest.approx(hour * 24 * one["days"])
    assert found["fastest"]["plan"]["estimate"]["step_time_s"] == found["fastest"]["step_time_s"]


def test_a_page_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--devices", "A100,H100", "--max-devices", "4", "--price", "A100=1,H100=2", "--target-step", "10s"]
    assert main([*WORDS, *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["cluster", "devices", "step", "an", "hour", "1,000", "steps"]
    assert [line.split()[0] for line in lines[-3:]] == ["fewest", "cheapest", "fastest"]


def test_the_page_says_what_a_part_costs_beside_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--clusters", "2x8xA100@10Gbit"]
    found = shown(capsys, *words)
    assert main([*WORDS, *words]) == 0
    page = capsys.readouterr().out
    cheapest = found["cheapest"]
    (whole,) = (one for one in found["candidates"] if one["part_of"] is None)
    share = 1.0 - cheapest["device_seconds"] / whole["device_seconds"]
    assert cheapest["part_of"] == whole["cluster"] and share > 0.0
    told = f"{cheapest['num_devices']} of the 16 devices of 2x8xA100@10Gbit: a step takes {share:.1%} less device time"
    assert told in page


@pytest.mark.parametrize(
    ("option", "first", "second"), [("--devices", "A100", "H100"), ("--clusters", "1xA100", "2xH100")]
)
def test_options_that_are_repeated_count_together(
    option: str, first: str, second: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--max-devices", "2"]
    found = shown(capsys, option, first, option, f" {second},{first}", *words)
    both = shown(capsys, option, f"{first},{second}", *words)
    assert found["candidates"] == both["candidates"] and found["front"] == both["front"]
    kinds = {one["cluster"].rpartition("x")[2].removesuffix("-80GB") for one in found["candidates"]}
    assert kinds == {"A100", "H100"}


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ([], "clusters"),
        (["--clusters", "1x8xA100", "--devices", "A100"], "clusters"),
        (["--clusters", " , "], "clusters"),
        (["--devices", ","], "devices"),
        (["--devices", "A100", "--max-devices", "0"], "max_devices"),
        (["--devices", "Z9000"], "cluster"),
        (["--clusters", "1x8xA100", "--target-step", "soon"], "target_step"),
        (["--clusters", "1x8xA100", "--target-step", "1e-9s"], "target_step"),
        (["--clusters", "1x8xA100", "--target-days", "3"], "target_days"),
        (["--clusters", "1x8xA100", "--target-days", "1e-6", "--tokens", "1e12"], "target_days"),
        (["--clusters", "1x8xA100", "--target-days", "9", "--tokens", "1e12", "--target-step", "1e-9s"], "target_step"),
        (["--clusters", "1x8xA100", "--target-days", "-3", "--tokens", "1e9"], "target_days"),
        (["--clusters", "1x8xA100", "--price", "A100"], "prices"),
        (["--clusters", "1x8xA100", "--price", "A100=-1"], "prices.A100"),
        (["--clusters", "1x8xA100", "--price", "H100=1"], "prices"),
        (["--clusters", "1x8xA100", "--max-cost-per-hour", "3"], "max_cost_per_hour"),
        (["--clusters", "1x8xA100", "--max-cost-per-hour", "0.5", "--price", "A100=1"], "max_cost_per_hour"),
    ],
)
def test_wrong_input_exits_with_2_and_names_its_field(
    words: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, *words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["field"] == field
