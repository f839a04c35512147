"""`automap trial`: what it hands on and what it says; trials themselves are tested with the runtime."""

import json

import pytest

from automap.runtime.trial import trial as runtime
from service.command.main import main

MODEL = "zoo:gpt:layers=2,hidden=64,heads=4,seq_len=32,vocab_size=200"
DONE = runtime.Trial(
    outcome="ok",
    message="",
    step_time_s=0.25,
    step_times_s=(0.2, 0.25, 0.3),
    num_warm_up_steps=8,
    peak_memory_bytes=(3 << 20, 5 << 20),
    losses=(2.0, 1.0),
    predicted={"step_time_s": 0.125, "peak_memory_bytes": 4.0 * (1 << 20)},
    time_s=7.0,
)
HUNG = runtime.Trial(
    outcome="time_limit",
    message="not done after 9 s; rank 0: in step",
    step_time_s=None,
    step_times_s=(),
    num_warm_up_steps=None,
    peak_memory_bytes=(),
    losses=(),
    predicted=None,
    time_s=9.0,
)


@pytest.fixture
def plan(tmp_path, capsys):
    """A plan for two devices, in a file."""
    path = tmp_path / "plan.json"
    words = ["estimate", MODEL, "--cluster", "2xA100-80GB", "--global-batch", "8", "--precision", "fp32", "-o", path]
    assert main([str(word) for word in words]) == 0
    capsys.readouterr()
    return path


def test_a_trial_goes_into_the_plan_and_onto_the_screen(plan, monkeypatch, capsys):
    asked = {}

    def run(problem, tried, **how):
        asked.update(how, devices=[stage.devices for stage in tried.stages], estimate=tried.estimate)
        return DONE

    monkeypatch.setattr(runtime, "run_trial", run)
    output = plan.with_name("measured.json")
    assert main(["trial", str(plan), MODEL, "--steps", "3", "--time-limit", "60", "-o", str(output)]) == 0
    assert asked["steps"] == 3
    assert asked["limits"].time_s == 60.0
    assert asked["devices"] == ["0-1"]
    assert asked["estimate"] is not None
    text = capsys.readouterr().out
    assert "250 ms, the median of 3: 200 ms to 300 ms" in text
    assert "5 MiB of tensors" in text
    assert "125 ms and 4 MiB" in text
    assert json.loads(output.read_text())["measured"] == {
        "outcome": "ok", "step_time_s": 0.25, "peak_memory_bytes": 5 << 20, "num_steps": 3,
    }  # fmt: skip


def test_json_and_exit_codes(plan, monkeypatch, capsys):
    for found, code in ((DONE, 0), (HUNG, 1)):
        monkeypatch.setattr(runtime, "run_trial", lambda *_, found=found, **__: found)
        assert main(["trial", str(plan), MODEL, "--json"]) == code
        document = json.loads(capsys.readouterr().out)
        assert {"measured", "predicted", "outcome"} <= set(document)
        assert document["outcome"] == found.outcome
    assert main(["trial", str(plan), MODEL]) == 1
    assert "time limit after 9 s" in capsys.readouterr().out


def test_a_plan_for_another_model_is_bad_input(plan, capsys):
    assert main(["trial", str(plan), MODEL.replace("hidden=64", "hidden=32")]) == 2
    assert "plan.model" in capsys.readouterr().err
