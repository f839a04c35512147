"""`automap estimate`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from automap.cluster import parse_cluster
from automap.plan import Plan, plan_schema
from service.command.main import main

GPT = "zoo:gpt:layers=4,hidden=256,heads=4,vocab_size=1024"
PLACE = ["--cluster", "1x8xA100", "--global-batch", "64", "--seq-len", "128"]
HEAVY = ("torch", "stable_baselines3", "gymnasium", "onnx", "fastapi", "redis", "rich")


def test_a_page_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tp", "2", "--pp", "2", "--micro-batch", "4", "--trainer", "megatron-lm", "--recompute", "full"]
    assert main(["estimate", GPT, *PLACE, *words]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "strategy  pipeline 2 × 2 replicas × tensor parallel 2 · 8 micro-batches of 8 · recompute full"
    assert lines[1] == "batch     4 samples of 128 tokens a device in each of 8 micro-batches, 64 samples a step"
    assert lines[2].startswith("step      ")
    assert " a device), MFU " in lines[3]
    for part in ("compute", "bubble", "optimizer", "overhead", "exposed all-reduce", "exposed pipeline"):
        assert f"\n{part} " in out
    shares = [float(line[-8:].strip().rstrip("%")) for line in lines[lines.index("") + 2 : lines.index("", 6)]]
    assert sum(shares) == pytest.approx(100.0, abs=0.6)
    memory = [line.split() for line in lines if line.startswith(("0-3", "4-7"))]
    assert len(memory) == 2
    for row in memory:
        assert sum(map(float, row[1:6])) == pytest.approx(float(row[6]), abs=0.03)
        assert row[7] == "80.00"
    assert sum(line.startswith("why       ") for line in lines) == 3


def test_a_plan_for_programs_can_be_priced_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    words = ["--tp", "4", "--zero", "1", "--sequence-parallel", "--precision", "fp16", "--json"]
    assert main(["estimate", GPT, *PLACE, *words, "-o", str(path)]) == 0
    document = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(plan_schema()).validate(document)
    assert json.loads(path.read_text()) == document
    assert document["training"]["precision"] == "fp16"
    assert main(["estimate", GPT, "--seq-len", "128", "--plan", str(path), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert Plan.from_json(again).estimate == Plan.from_json(document).estimate
    assert again["why"] == document["why"]


def test_a_plan_of_a_model_that_is_built_otherwise_today(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, again = tmp_path / "plan.json", ["estimate", GPT, "--seq-len", "128", "--plan", str(tmp_path / "plan.json")]
    assert main(["estimate", GPT, *PLACE, "--tp", "4", "-o", str(path)]) == 0
    document = json.loads(path.read_text())
    step_time_s = document["estimate"]["step_time_s"]
    document["model"]["sha256"] = "0" * 64
    path.write_text(json.dumps(document))
    capsys.readouterr()
    assert main([*again, "--json"]) == 2
    repair = json.loads(capsys.readouterr().out)["repair"]
    assert "search again, or set the plan's model.sha256" in repair
    document["model"]["sha256"] = next(word for word in re.findall(r"\w+", repair) if len(word) == 64)
    path.write_text(json.dumps(document))
    assert main([*again, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["estimate"]["step_time_s"] == step_time_s
    # A model with another number of parameters is another one.
    document["model"] |= {"sha256": "0" * 64, "num_parameters": 5}
    path.write_text(json.dumps(document))
    assert main([*again, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["repair"] == "Give the model that the plan was made for."


def test_replicas_may_be_averaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    words = ["estimate", GPT, *PLACE, "--json", "-o", str(path)]

    def step_s(*more: str) -> float:
        assert main([*words, *more]) == 0
        return float(json.loads(capsys.readouterr().out)["estimate"]["step_time_s"])

    steps = {period: step_s("--sync", "local_sgd", "--sync-period", str(period)) for period in (1, 2, 8)}
    # t + a / period: three periods lie on one line.
    assert (steps[1] - steps[2]) / 0.5 == pytest.approx((steps[2] - steps[8]) / 0.375)
    assert step_s("--sync", "synchronous") == step_s()
    assert step_s("--sync", "dasgd") < step_s("--sync", "local_sgd", "--sync-period", "1")
    sync = json.loads(path.read_text())["sync"]
    assert (sync["kind"], sync["period"]) == ("local_sgd", 1)
    assert main(["verify", str(path), GPT + ",seq_len=128"]) == 0
    assert main([*words, "--sync", "local_sgd", "--zero", "1"]) == 2
    assert "plan.sync.kind: replicas cannot be trained apart: under ZeRO" in capsys.readouterr().err
    assert main(["estimate", GPT, "--plan", str(path), "--sync", "dasgd"]) == 2


def test_a_plan_in_a_file_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, model = tmp_path / "plan.json", GPT + ",seq_len=128"
    assert main(["estimate", model, *PLACE[:4], "--tp", "4", "--pp", "2", "-o", str(path)]) == 0
    capsys.readouterr()
    assert main(["verify", str(path), model]) == 0
    assert capsys.readouterr().out == "valid     nothing is wrong with this plan\n"
    document = json.loads(path.read_text())
    document["stages"][1]["devices"] = "3-6"
    path.write_text(json.dumps(document))
    assert main(["verify", str(path), model]) == 1
    assert capsys.readouterr().out == "stages[1].devices: device 3 is also of pipeline rank 0\n"
    assert main(["verify", str(path), model, "--json"]) == 1
    (violation,) = json.loads(capsys.readouterr().out)["violations"]
    assert violation["where"] == "stages[1].devices"


def test_a_plan_is_exported_or_refused_with_nothing_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, folder, model = tmp_path / "plan.json", tmp_path / "files", GPT + ",seq_len=128"
    stated = ["--tp", "2", "--pp", "2", "--sequence-parallel", "--zero", "1", "--micro-batch", "4"]
    assert main(["estimate", model, *PLACE[:4], *stated, "-o", str(path)]) == 0
    capsys.readouterr()
    words = ["export", str(path), model, "-o", str(folder)]
    assert main([*words, "--target", "deepspeed"]) == 2
    assert "deepspeed has no pipeline beside tensor parallelism" in capsys.readouterr().err
    assert main([*words, "--target", "megatron"]) == 2
    assert "target: unknown target (got megatron)" in capsys.readouterr().err
    # The plan was made for no target.
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "searched for no target (got nothing). Give --target, one of megatron-core" in told
    assert not folder.exists()
    assert main([*words, "--target", "megatron-core"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("exact        degrees")
    assert lines[-1] == "launch       bash megatron.sh --data-path …"
    script = (folder / "megatron.sh").read_text()
    assert "--tensor-model-parallel-size 2\n" in script
    assert "--micro-batch-size 4\n" in script
    subprocess.run(["bash", "-n", str(folder / "megatron.sh")], check=True)
    assert main([*words, "--target", "megatron-core", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [Path(name).name for name in document["files"]] == ["megatron.sh", "megatron.yaml", "export.json"]
    assert document["notes"][0]["kept"] == "exact"
    # What was exported is read back as what it was.
    price = json.loads(path.read_text())["estimate"]["step_time_s"]
    back = ["estimate", model, "--cluster", "1x8xA100", "--from", str(folder / "megatron.sh"), "--json"]
    assert main([*back, "--trainer", "generic"]) == 0
    assert json.loads(capsys.readouterr().out)["estimate"]["step_time_s"] == pytest.approx(price)
    assert main([*back, "--tp", "4"]) == 2
    assert "tp: megatron.sh says 2 (got 4)" in capsys.readouterr().err
    assert main([*back[:1], GPT + ",seq_len=64", *back[2:]]) == 2
    assert "seq_len: megatron.sh has other samples (got 128)" in capsys.readouterr().err


def test_a_plan_that_does_not_fit_is_shown_and_ends_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    large = ["estimate", "zoo:gpt2-xl", "--cluster", "1x8xV100-16GB", "--global-batch", "64", "--micro-batch", "8"]
    assert main(large) == 3
    shown = capsys.readouterr()
    assert "does not fit" in shown.out
    assert "does not fit: devices 0-7 need" in shown.err
    assert main([*large, "--json"]) == 3
    shown = capsys.readouterr()
    memory = json.loads(shown.out)["estimate"]["memory_bytes"][0]
    assert sum(v for k, v in memory.items() if k not in ("devices", "capacity")) > memory["capacity"]


def test_a_device_of_a_few_megabytes_has_figures_that_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = parse_cluster("2xA100-80GB").to_json()
    document["devices"]["A100-80GB"]["memory_GiB"] = 0.01
    path = tmp_path / "small.json"
    path.write_text(json.dumps(document))
    assert main(["estimate", "zoo:gpt2:layers=2", "--cluster", str(path), "--global-batch", "4"]) == 3
    shown = capsys.readouterr()
    (row,) = (line.split() for line in shown.out.splitlines() if line.startswith("0-1 "))
    total, capacity, share = float(row[6]), float(row[7]), float(row[8].rstrip("%"))
    assert capacity == 0.01 and share == pytest.approx(100.0 * total / capacity, rel=0.01)
    assert "GiB of 0.01, most of it" in shown.err


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--tp", "3"], "tp"),
        (["--tp", "8"], "tp"),
        (["--dp", "2", "--tp", "2"], "dp"),
        (["--micro-batch", "5"], "micro_batch"),
        (["--ep", "8"], "ep"),
        (["--cp", "3"], "cp"),
        (["--schedule", "late"], "schedule"),
        (["--zero", "7"], "zero"),
        (["--recompute", "often"], "recompute"),
        (["--trainer", "nobody"], "training.trainer"),
        (["--precision", "int3"], "training.precision"),
        (["--plan", "nowhere.json"], "cluster"),
    ],
)
def test_wrong_input_exits_with_2_and_names_its_field(
    words: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", GPT, *PLACE, *words, "--json"]) == 2
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert document["field"] == field
    assert document["repair"] in shown.err


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--global-batch", "8"], "cluster"),
        (["--cluster", "8xA100"], "global_batch"),
        (["--plan", "nowhere.json"], "plan"),
        (["--plan", "nowhere.json", "--tp", "2"], "tp"),
        (["--plan", "nowhere.json", "--trainer", "ddp"], "trainer"),
    ],
)
def test_what_is_missing_or_said_twice(words: list[str], field: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", GPT, *words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["field"] == field


def test_a_file_and_its_hints(
    tmp_path: Path, light: Callable[[str], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    model, hints = tmp_path / "squeezenet.onnx", tmp_path / "hints.json"
    model.write_bytes(light("squeezenet"))
    hints.write_text(json.dumps({"costs": {"**": {"forward_s": 1.0}}}))
    words = ["estimate", str(model), "--cluster", "1x4xA100", "--global-batch", "64", "--json"]
    assert main(words) == 0
    modelled = json.loads(capsys.readouterr().out)["estimate"]["step_time_s"]
    assert main([*words, "--hints", str(hints)]) == 0
    assert json.loads(capsys.readouterr().out)["estimate"]["step_time_s"] > 10 * modelled
    assert main([*words, "--seq-len", "8"]) == 2
    assert json.loads(capsys.readouterr().out)["field"] == "seq_len"


@pytest.mark.slow
def test_it_loads_neither_torch_nor_readers_of_files() -> None:
    code = (
        "import sys; from service.command.main import main; "
        f"code = main(['estimate', {GPT!r}, *{PLACE!r}, '--tp', '2']); "
        f"print([n for n in {HEAVY} if n in sys.modules], code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0"


def test_the_layers_of_a_profile_are_its_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever their times: those that happen to be equal are no more of a layer than the others."""
    path = tmp_path / "cells-pbs-8.txt"
    about = "forward_compute_time={0}, backward_compute_time={0}, activation_size=1600, parameter_size=4000"
    lines = [f"node{i} -- cell_{i} -- " + about.format(3 + 2 * (i % 5) + i // 8) for i in range(32)]
    path.write_text("\n".join([*lines, *(f"node{i} -- node{i + 1}" for i in range(31))]))
    place = ["--cluster", "8xA100", "--global-batch", "64", "--micro-batch", "8"]
    assert main(["estimate", str(path), *place, "--pp", "8", "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    firsts = [int(stage["operators"][0].split("/")[0].removeprefix("node")) for stage in stages[1:]]
    assert firsts == [4, 8, 12, 16, 20, 24, 28]
    wide = ["--cluster", "64xA100", "--global-batch", "64", "--micro-batch", "1"]
    assert main(["estimate", str(path), *wide, "--pp", "64"]) == 2
    assert "32 layers cannot be cut into 64 stages" in capsys.readouterr().err


def test_a_search_begins_with_what_runs_today(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, model = tmp_path / "today.sh", GPT + ",seq_len=128"
    path.write_text("--tensor-model-parallel-size 8 --sequence-parallel --global-batch-size 64 --bf16 --lr 1\n")
    words = ["search", model, "--cluster", "1x8xA100", "--budget", "40", "--searcher", "expert"]
    assert main([*words, "--baseline", str(path)]) == 2  # 4 heads
    assert "hints.baseline.tp: does not divide the 4 heads" in capsys.readouterr().err
    path.write_text("--tensor-model-parallel-size 4 --global-batch-size 64 --bf16 --lr 1\n")
    assert main([*words, "--baseline", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (yours,) = [line for line in lines if line.startswith("yours")]
    assert yours.startswith("yours     today.sh takes ")
    assert "          not read: --lr" in lines
    assert any(line.startswith("change    devices 8 → 4, tensor parallel 4 → 1, replicas 2 → 4: ") for line in lines)
    assert main([*words, "--baseline", str(path), "--global-batch", "32"]) == 2
    assert "hints.baseline.global_batch: the search is for 32, today.sh says (got 64)" in capsys.readouterr().err
    assert main(words) == 2
    assert "global_batch: missing" in capsys.readouterr().err
