from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from service.command import sweeping
from service.command.main import main

GPT = "zoo:gpt:layers=4,hidden=256,heads=4,vocab_size=1024,seq_len=128"
WORDS = [GPT, "--cluster", "8xA100-80GB", "--global-batch", "64"]


def shown(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_every_cell_is_what_estimate_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "table.json"
    found = shown(
        capsys, "sweep", *WORDS, "--over", "tp=1,2,3,4", "--over", "pp=1,2,4", "--micro-batch", "2", "-o", str(path)
    )
    assert json.loads(path.read_text()) == found
    assert found["over"] == {"tp": [1, 2, 3, 4], "pp": [1, 2, 4]}
    assert len(found["cells"]) == 12
    priced = 0
    for cell in found["cells"]:
        degrees = ["--tp", str(cell["tp"]), "--pp", str(cell["pp"]), "--micro-batch", "2"]
        if "fault" in cell:
            assert main(["estimate", *WORDS, *degrees]) == 2
            assert cell["fault"] in capsys.readouterr().err
            continue
        plan = shown(capsys, "estimate", *WORDS, *degrees)
        assert cell["step_time_s"] == plan["estimate"]["step_time_s"]
        assert cell["fits"]
        priced += 1
    # Three of four sizes of tp divide the heads, whatever pp is, and 4 x 4 ranks are too many.
    assert priced == 8


def test_clusters_and_lengths_are_swept_over(capsys: pytest.CaptureFixture[str]) -> None:
    model = GPT.replace(",seq_len=128", "")
    over = ["--over", "cluster=4xA100-80GB,8xA100-80GB", "--over", "seq-len=64,128"]
    found = shown(capsys, "sweep", model, "--global-batch", "64", *over)
    for cell in found["cells"]:
        place = ["--cluster", cell["cluster"], "--seq-len", str(cell["seq_len"]), "--global-batch", "64"]
        plan = shown(capsys, "estimate", model, *place)
        assert cell["step_time_s"] == plan["estimate"]["step_time_s"]


def test_cells_are_searched_within_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    over = ["--over", "tp=1,2", "--budget", "100"]
    found = shown(capsys, "sweep", GPT, "--cluster", "8xV100-16GB@25Gbit", "--global-batch", "64", *over)
    request = sweeping.JobRequest(cluster="8xV100-16GB@25Gbit", training={"global_batch": 64}, budget="100")
    request = sweeping.replace(request, model=sweeping.replace(request.model, zoo=GPT.removeprefix("zoo:")))
    for cell in found["cells"]:
        fixed = sweeping.replace(request, hints={"fix": {"tp": cell["tp"]}})
        plan = sweeping.run_job(
            fixed,
            lambda: sweeping.import_graph(b"", request),
            on_progress=lambda progress: None,
            should_stop=lambda: False,
        )
        assert plan.estimate is not None
        assert cell["step_time_s"] == plan.estimate.step_time_s


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", *WORDS, "--over", "tp=1,3,4", "--over", "zero=0,1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["zero", "0", "zero", "1"]
    assert [line.split()[1] for line in lines[1:4]] == ["1", "3", "4"]
    assert lines[2].split()[2:] == ["-", "-"]
    assert sum(line.count("*") for line in lines[:4]) == 1
    # Under the legend stands why a cell is impossible, once for both cells.
    (reason,) = lines[5:]
    assert reason.startswith("-  tp 3, zero 0: tp: ")
    assert reason.endswith("(1 more like it)")


def test_ctrl_c_gives_the_cells_so_far(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = sweeping.hand_made_plan

    def interrupted(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return real(*given)

    monkeypatch.setattr(sweeping, "hand_made_plan", interrupted)
    found = shown(capsys, "sweep", *WORDS, "--over", "tp=1,2,4", code=130)
    assert [cell["tp"] for cell in found["cells"]] == [1]


@pytest.mark.parametrize(
    ("words", "field", "part"),
    [
        (["--over", "tpp=1"], "over", "Did you mean tp?"),
        (["--over", "tp=\N{SUPERSCRIPT TWO}"], "over.tp", "tp=1,2,4"),
        (["--over", "tp"], "over", "tp=1,2,4"),
        (["--over", "tp=1,x"], "over.tp", "not a number"),
        (["--over", "tp=1", "--over", "tp=2"], "over", "named twice"),
        (["--over", "tp=1", "--over", "pp=2", "--over", "dp=1"], "over", "once or twice"),
        (["--over", f"tp={','.join(map(str, range(1000)))}", "--over", f"pp={','.join(map(str, range(1000)))}"], "over",
         "1,000,000 cells"),
        (["--over", "tp=1", "--tp", "2"], "tp", "Leave --tp out"),
        (["--over", "tp=3,5"], "over", "no cell has a plan"),
        (["--over", "tp=3,5"], "over", "tp 3: tp: tp * pp * cp = 3 does not divide"),
        (["--over", "tp=3,5"], "over", "(1 more like it)"),
        (["--over", "tp=3,1", "--pp", "1", "--over", "ep=8,2"], "over", "; tp 1, ep 8: ep: the model has no experts"),
        (["--over", "micro_batch=1", "--budget", "10"], "over", "no cell has a plan"),
    ],
)  # fmt: skip
def test_wrong_input_exits_with_2_and_names_its_field(
    words: list[str], field: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *WORDS, *words, "--json"]) == 2
    shown = capsys.readouterr()
    assert json.loads(shown.out)["field"] == field
    assert part in shown.err


def test_a_cluster_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", GPT, "--over", "tp=1", "--global-batch", "64"]) == 2
    assert "Give --cluster." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("side", "wrong", "right"),
    [
        ("optimizer=adam,adamm", "adamm", "adam"),
        ("precision=bf16,bf61", "bf61", "bf16"),
        ("recompute=none,ful", "ful", "full"),
        ("schedule=1f1b,1fb1", "1fb1", "1f1b"),
        ("trainer=megatron", "megatron", "megatron-core"),
        ("target=any,torchtitn", "torchtitn", "torchtitan"),
    ],
)
def test_words_that_nothing_is_called_are_refused(
    side: str, wrong: str, right: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *WORDS, "--over", side]) == 2
    told = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert f"--over {side.partition('=')[0]}: " in told
    assert f"got {wrong}" in told
    assert right in told.partition(f"got {wrong}")[2]


def test_degrees_that_the_hints_fix_hold_for_estimates_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hints = tmp_path / "hints.json"
    hints.write_text('{"fix": {"tp": 2, "zero": 1}}')
    given = ["--hints", str(hints)]
    wanted = shown(capsys, "estimate", *WORDS, "--tp", "2", "--zero", "1")
    assert shown(capsys, "estimate", *WORDS, *given)["estimate"] == wanted["estimate"]
    assert shown(capsys, "estimate", *WORDS, "--tp", "4", *given, code=2)["field"] == "tp"
    found = shown(capsys, "sweep", *WORDS, "--over", "tp=2,4", *given)
    assert [cell.get("step_time_s") for cell in found["cells"]] == [wanted["estimate"]["step_time_s"], None]
    assert "contradicts hints.fix.tp" in found["cells"][1]["fault"]
