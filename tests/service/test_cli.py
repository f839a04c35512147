from __future__ import annotations

import gc
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tiny_file import linear

import agents
from automap.device_kinds import known_devices, own_folder
from automap.errors import NothingFits, PlanError
from automap.plan import Plan, plan_schema
from automap.records import to_json
from automap.space.stated_strategy import SCHEDULES, Strategy
from ir import summary
from service import warm_up as warm
from service.about import version
from service.command.main import EXTRAS, main
from service.command.output_checks import writable
from service.command.plan_verbs import INTERRUPTED, read_strategy

HEAVY = ("torch", "numba", "stable_baselines3", "gymnasium", "onnx", "fastapi", "redis", "numpy")


PROFILE = """\
node1 -- Input -- forward_compute_time=0.5, backward_compute_time=0, activation_size=1600, parameter_size=0
node2 -- cell_1 -- forward_compute_time=3, backward_compute_time=5, activation_size=1600, parameter_size=4000
node3 -- cell_2 -- forward_compute_time=3, backward_compute_time=5, activation_size=1600, parameter_size=4000
node4 -- head -- forward_compute_time=3, backward_compute_time=5, activation_size=160, parameter_size=4000
\tnode1 -- node2
\tnode2 -- node3
\tnode3 -- node4"""


@pytest.fixture
def model(tmp_path: Path, light: Callable[[str], bytes]) -> str:
    path = tmp_path / "squeezenet.onnx"
    path.write_bytes(light("squeezenet"))
    return str(path)


@pytest.fixture
def searching(monkeypatch: pytest.MonkeyPatch, search: Any) -> None:
    monkeypatch.setattr(agents, "search_offer", search)


def test_start_up_is_light() -> None:
    code = f"import sys, service.command.main; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_a_person_waits_for_collects_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    collecting: list[bool] = []
    summarize = summary.summarize
    monkeypatch.setattr(summary, "summarize", lambda graph: collecting.append(gc.isenabled()) or summarize(graph))
    assert main(["inspect", "zoo:gpt:layers=1,hidden=64,heads=4,seq_len=8,vocab_size=32"]) == 0
    assert collecting == [False] and gc.isenabled()


def test_help_states_the_defaults_of_a_stated_plan() -> None:
    parameters = inspect.signature(read_strategy, eval_str=True).parameters
    for field in fields(Strategy):
        if field.name in parameters and isinstance(field.default, int | str) and field.default is not False:
            (option,) = parameters[field.name].annotation.__metadata__
            assert option.help.endswith(f"default: {field.default}."), (field.name, option.help)
    schedules = parameters["schedule"].annotation.__metadata__[0].help
    assert schedules.endswith("default: 1f1b, or interleaved with --virtual.")
    assert all(name in schedules for name in SCHEDULES)


@pytest.mark.parametrize("verb", ["estimate", "sweep", "recommend"])
def test_help_begins_with_what_a_verb_needs_most(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    page = capsys.readouterr().out
    assert page.index("--global-batch") < page.index("The training") < page.index("How the model is read")
    assert page.index("How the model is read") < page.index("--batch-dim")


def test_a_verb_alone_is_the_verb_of_the_whole_command_line() -> None:
    import typer.main

    from service.command.main import _with_verb, app

    whole: Any = typer.main.get_command(app)
    for name, command in whole.commands.items():
        if hasattr(command, "commands"):
            assert _with_verb([name]) is app
            continue
        (alone,) = typer.main.get_command(_with_verb([name, "--help"])).commands.items()  # type: ignore[attr-defined]
        assert alone[0] == name
        assert [p.opts for p in alone[1].params] == [p.opts for p in command.params]
    for words in ([], ["--help"], ["serch"], ["-o", "--json"]):
        assert _with_verb(words) is app


def test_an_estimate_loads_only_what_it_needs() -> None:
    unneeded = (
        *(
            "torch",
            "onnx",
            "gymnasium",
            "stable_baselines3",
            "agents",
            "envs",
            "automap.bounds.partial_plans",
            "automap.verify",
        ),
        *(f"automap.space.kernels.{name}" for name in ("price_many", "sample", "neighbours")),
        # What numba needs to compile, and not to run what lies in its cache.
        *("numba.np.linalg", "numba.np.arraymath"),
    )
    words = ["estimate", "zoo:bert-large", "--cluster", "8xA100-80GB", "--global-batch", "64", "--tp", "2", "--pp", "2"]
    shown = f"print([name for name in {unneeded} if name in sys.modules])"
    code = f"import sys; from service.command.main import main; main({words}); {shown}"
    warm.main()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_command_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"automap {version()}\n"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["zoo:gpt2-xll"], "gpt2-xl?"),
        (["MODEL", "--cluster", "8xv100_16gb"], "V100-16GB or "),
        (["MODEL", "--target", "megatron"], "megatron-core?"),
        (["MODEL", "--trainer", "torch-titan"], "torchtitan?"),
        (["MODEL", "--searcher", "mcmcc"], "mcmc?"),
    ],
)
@pytest.mark.usefixtures("searching")
def test_it_guesses_what_was_meant(
    model: str, words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [model if word == "MODEL" else word for word in words]
    words += [] if "--cluster" in words else ["--cluster", "8xV100-16GB"]
    assert main(["search", *words, "--global-batch", "64"]) == 2
    assert f"Did you mean {meant}" in capsys.readouterr().err


def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "service.client", raising=False)
    assert main(["status"]) == 1
    assert (
        "needs httpx, which is not installed: in the folder of AutoMAP, pip install '.[service]'"
        in capsys.readouterr().err
    )
    monkeypatch.setitem(sys.modules, "torch", None)
    example = Path(__file__).parents[2] / "examples" / "gpt2.py"
    assert main(["export-onnx", f"{example}:gpt2", "-o", str(tmp_path / "gpt2.onnx")]) == 1
    assert "needs torch, which is not installed" in (said := capsys.readouterr().err) and "'.[trainer]'" in said
    for name in [name for name in sys.modules if name.startswith("agents.learning.")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["train-agent", str(tmp_path / "run")]) == 1
    assert "needs torch, which is not installed" in (said := capsys.readouterr().err) and "'.[learning]'" in said


def test_planning_needs_neither_torch_nor_the_service() -> None:
    """Of what only extras install, nothing can be imported."""
    code = f"""
import sys
sys.modules.update(dict.fromkeys({tuple(EXTRAS)}))
from service.command.main import main
words = ["--cluster", "2x4xV100@25Gbit", "--global-batch", "64", "--budget", "3000"]
sys.exit(main(["search", "zoo:gpt2", *words, "--json"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    plan = Plan.from_json(json.loads(done.stdout))
    assert plan.search is not None
    assert {"expert", "dqn", "mcmc", "elimination"} <= set(plan.search.searchers)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_search_gives_the_best_plan_so_far(
    sent: signal.Signals, model: str, search: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*given: Any, **more: Any) -> Any:
        os.kill(os.getpid(), sent)
        assert more["should_stop"]()
        return search(*given, **more)

    monkeypatch.setattr(agents, "search_offer", interrupted)
    assert main(["search", model, "--cluster", "8xV100-16GB", "--global-batch", "64", "--json"]) == 130
    assert Plan.from_json(json.loads(capsys.readouterr().out)).warnings[-1] == INTERRUPTED


@pytest.mark.usefixtures("searching")
def test_search_for_people(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main(["search", model, "--cluster", "8xV100-16GB", "--global-batch", "64", "-o", str(path)]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("strategy  dp 8")
    assert "1.20x the best expert template" in shown.out
    plan = Plan.from_json(json.loads(path.read_text()))
    assert plan.model.name == "squeezenet"


@pytest.mark.usefixtures("searching")
def test_search_for_programs(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cluster", "8xV100-16GB", "--global-batch", "64", "--precision", "fp16", "--json", "--seed", "3"]
    assert main(["search", model, *words]) == 0
    document = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(plan_schema()).validate(document)
    assert document["training"]["precision"] == "fp16"


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["nowhere.onnx"], "model"),
        (["zoo:gpt3"], "model"),
        (["zoo:"], "model"),
        (["zoo:gpt2", "--dim", "n=1"], "dims"),
        ([__file__], "model"),
        (["MODEL", "--cluster", "8xZ9000"], "cluster"),
        (["MODEL", "--cluster", "nowhere.json"], "cluster"),
        (["MODEL", "--global-batch", "0"], "training.global_batch"),
        (["MODEL", "--precision", "int3"], "training.precision"),
        (["MODEL", "--sync", "sometimes"], "training.sync_modes[1]"),
        (["MODEL", "--sync", "dasgd", "--sync-period", "0"], "training.sync_period"),
        (["MODEL", "--searcher", "oracle"], "searchers[0]"),
        (["MODEL", "--searcher", "mcmc", "--searcher", "mcmc"], "searchers[1]"),
        (["MODEL", "--searcher", "mcmc", "--searcher", "dqn", "--budget", "1"], "budget"),
        (["MODEL", "--budget", "soon"], "budget"),
        (["MODEL", "--hints", "nowhere.json"], "hints"),
        (["MODEL", "--dim", "x"], "dims"),
        (["MODEL", "--dim", "x=0"], "dims.x"),
        (["MODEL", "--dim", f"x={10**30}"], "dims.x"),
        (["MODEL", "--budget", "\N{SUPERSCRIPT TWO}"], "budget"),
        (["MODEL", "-o", "/nowhere/plan.json"], "output"),
        ([""], "model"),
    ],
)
@pytest.mark.usefixtures("searching")
def test_wrong_input_exits_with_2_and_names_its_field(
    model: str, words: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [model if word == "MODEL" else word for word in words]
    for option, value in (("--cluster", "8xV100-16GB"), ("--global-batch", "64")):
        words += [] if option in words else [option, value]
    assert main(["search", *words, "--json"]) == 2
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert document["field"] == field
    assert document["repair"] in shown.err
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--searcher", "oracle"], "--searcher"),
        (["--searcher", "mcmc", "--searcher", "mcmc"], "--searcher"),
        (["--precision=int3"], "--precision"),
        (["--sync", "sometimes"], "--sync"),
        (["--sync", "dasgd", "--sync-period", "0"], "--sync-period"),
        (["--memory-confidence", "3"], "--memory-confidence"),
        (["--trials", "99"], "--trials"),
        (["--dim", "x=0"], "--dim x"),
        (["--batch-dim", "a=b"], "--batch-dim"),
        (["--hints", "nowhere.json"], "--hints"),
        (["--hints", "HINTS"], "hints.fix.tp"),
        (["-o", "/nowhere/plan.json"], "--output"),
        (["--target", "megatron-core"], "--target"),
        (["--baseline", "HINTS"], "--baseline"),
    ],
)
@pytest.mark.usefixtures("searching")
def test_an_error_names_the_option_that_it_is_about(
    model: str, words: list[str], field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hints = tmp_path / "hints.json"
    hints.write_text('{"fix": {"tp": 0}}')
    words = [str(hints) if word == "HINTS" else word for word in words]
    assert main(["search", model, "--cluster", "8xV100-16GB", "--global-batch", "64", *words]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"automap: {field}: ")


@pytest.mark.usefixtures("searching")
def test_a_budget_that_is_refused_is_not_explained_before(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", model, "--cluster", "8xV100-16GB", "--global-batch", "64", "--budget", "0"]) == 2
    assert capsys.readouterr().err.startswith("automap: --budget: not a budget (got 0).")


@pytest.mark.parametrize(("place", "why"), [("nowhere/plan.json", "no such folder"), (".", "is a folder")])
def test_a_place_for_a_plan_that_is_none(place: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=why):
        writable(tmp_path / place)


@pytest.mark.usefixtures("searching")
def test_a_plan_that_cannot_be_written_is_kept(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["search", model, "--cluster", "8xV100-16GB", "--global-batch", "64"]
    assert main([*words, "-o", "/dev/full", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    kept = Path(document["repair"].removeprefix("The plan is kept in ").removesuffix(": copy it from there."))
    assert Plan.from_json(json.loads(kept.read_text())).stages
    kept.unlink()
    # What stood at the place of a plan stays whole until the new one is.
    there = tmp_path / "plan.json"
    there.write_text("before")
    os.link(there, tmp_path / "same")
    assert main([*words, "-o", str(there)]) == 0
    assert json.loads(there.read_text())["stages"] and (tmp_path / "same").read_text() == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"plan.json", "same", Path(model).name}


@pytest.mark.parametrize("words", [["train-agent", "FILE"], ["demo", "-o", "FILE/inside"]])
def test_a_folder_that_cannot_be_made(words: list[str], model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word.replace("FILE", model) for word in words]) == 2
    assert "the folder cannot be made or written" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["clusters", "schema"])
def test_output_that_cannot_be_written_is_one_sentence(verb: str) -> None:
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "service.command", verb]
        done = subprocess.run(words, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "automap: the output: No space left on device. Nothing more was written.\n"


@pytest.mark.parametrize(
    ("words", "field", "value", "repair"),
    [
        ("search", "MODEL", "nothing", "Give MODEL."),
        ("search m", "--cluster", "nothing", "Give --cluster."),
        ("search m --cluster c --global-batch x", "--global-batch", "x", "Give an integer."),
        ("search m --cluster c --tie 7", "--tie", "7", "at most 1."),
        ("serve --port 70000", "--port", "70000", "at most 65535."),
        ("search m --clster c", "option", "--clster", "Did you mean --cluster"),
        ("search m n --cluster c", "command", "search m n --cluster c", "`automap search --help`"),
        ("serch m", "command", "serch m", "`automap --help`"),
        ("keys crate", "command", "keys crate", "`automap keys --help`"),
    ],
)
def test_wrong_options_exit_with_2_and_a_repair(
    words: str, field: str, value: str, repair: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words.split(), "--json"]) == 2
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert document["field"] == field
    assert document["value"].removesuffix(" --json") == value
    assert repair in document["repair"]
    assert shown.err == f"automap: {document['detail']}\n"


def test_an_option_of_another_verb_is_not_taken_for_a_misspelled_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "m", "--target", "x"]) == 2
    assert "(got --target). `automap estimate --help`" in capsys.readouterr().err


def test_an_option_without_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "m", "--cluster"]) == 2
    assert "'--cluster' requires an argument (got search m --cluster). `automap --help`" in capsys.readouterr().err


def test_a_file_without_end_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "/dev/zero"]) == 2
    assert "the file is larger than 67,108,864 bytes" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["keys"]])
def test_nothing_asked_for_shows_the_help_alone(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert "Usage: automap" in shown.out
    assert shown.err == ""


def test_ctrl_c_while_libraries_are_loaded_leaves_no_traceback() -> None:
    code = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell would ignore it
class Press:
    def find_spec(self, name, *rest):
        if name == "service.command.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Press())
from service.command.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize(("closed", "shows"), [("2>&-", True), ("<&- >&-", False)])
def test_it_runs_without_the_standard_streams(closed: str, shows: bool, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    words = f"search zoo:gpt2:layers=1 --cluster 2xA100 --global-batch 4 --budget 1 --searcher expert -o {plan}"
    line = f"exec {sys.executable} -m service.command {words} {closed}"
    done = subprocess.run(["sh", "-c", line], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done
    assert ("strategy" in done.stdout) is shows
    assert Plan.from_json(json.loads(plan.read_text())).stages


def test_nothing_fits_exits_with_3(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(*given: object, **rest: object) -> None:
        raise NothingFits("too big", field="cluster", value="8xV100-16GB", repair="Take more devices.")

    monkeypatch.setattr(agents, "search_offer", nothing)
    assert main(["search", model, "--cluster", "8xV100-16GB", "--global-batch", "64"]) == 3
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Take more devices." in shown.err


def test_inspect_counts_parameters_operators_and_plans(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", model, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["num_parameters"] == 1235496
    assert document["coverage"] == {"measured": 0.0, "modelled": 1.0, "opaque": 0.0}
    assert 1.0 < document["space"]["decades_pruned"] <= document["space"]["decades"]
    assert sum(document["operators"].values()) == document["num_operators"]
    assert main(["inspect", model, "--cluster", "8xV100-16GB", "--global-batch", "64"]) == 0
    shown = capsys.readouterr().out
    assert "1,235,496" in shown
    assert "8xV100-16GB at a global batch of 64" in " ".join(shown.split())
    assert "100.0 % modelled" in shown
    # The kinds are all named where one more ends the list.
    assert main(["inspect", "zoo:llama3-8b:layers=1"]) == 0
    assert "1 SoftmaxCrossEntropyLoss" in " ".join(capsys.readouterr().out.split())


def test_inspect_shows_what_it_can(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", model, "--global-batch", "0", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["space"] is None
    assert "training.global_batch" in document["warnings"][-1]
    assert main(["inspect", model, "--cluster", "8xV100-16GB", "--global-batch", "0"]) == 2


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "cells-pbs-4.txt"
    path.write_text(PROFILE)
    return str(path)


def test_a_profile_is_inspected_and_searched(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", profile, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["num_parameters"] == 3000
    assert document["coverage"]["measured"] == 1.0
    assert document["space"]["decades"] > 1.0
    assert main(["inspect", profile]) == 0
    assert "100.0 % measured" in capsys.readouterr().out
    words = ["--cluster", "2xV100-16GB", "--global-batch", "16", "--budget", "50", "--searcher", "expert", "--json"]
    assert main(["search", profile, *words]) == 0
    plan = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(plan_schema()).validate(plan)
    # 16 samples in 4 times the measured 24 ms, shared by two devices; nothing is slower than one device alone.
    assert 4 * 0.024 / 2 <= plan["estimate"]["step_time_s"] <= 4 * 0.024


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--dim", "batch=0"], "dims.batch"),
        (["--dim", "length=4"], "dims.length"),
        (["--parameters", "*"], "parameters"),
    ],
)
def test_what_a_profile_leaves_to_say(
    profile: str, words: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", profile, *words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["field"] == field


def test_a_profile_is_known_by_its_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    path.write_text(PROFILE + "\nnode9 -- nonsense")
    assert main(["inspect", str(path), "--json"]) == 2
    assert "line 8" in json.loads(capsys.readouterr().out)["message"]


@pytest.mark.usefixtures("searching")
def test_models_of_the_zoo_are_inspected_and_searched(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "zoo:gpt2:layers=2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["name"], document["num_blocks"]) == ("gpt2:layers=2", 2)
    assert main(["search", "zoo:gpt2", "--cluster", "8xV100-16GB", "--global-batch", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["num_parameters"] == 124_439_808


def test_clusters_and_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clusters", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {device["name"] for device in document["devices"]} == {n for f in document["families"].values() for n in f}
    assert main(["clusters"]) == 0
    shown = capsys.readouterr().out
    assert "4x8xA100-80GB" in shown
    assert all(name in shown for names in document["families"].values() for name in names)
    assert all(link["name"] in shown for link in document["links"] if link["scope"] == "inter")
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == plan_schema()


def test_a_device_of_ones_own_is_listed_and_priced_and_a_broken_one_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (device,) = [device for device in known_devices() if device.name == "L4-24GB"]
    for folder, changed in (("good", {}), ("bad", {"memory_GiB": "much"})):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / folder))
        own_folder("devices").mkdir(parents=True)
        mine = to_json(replace(device, name="mine-24GB", aliases=("mine",))) | changed
        (own_folder("devices") / "mine.json").write_text(json.dumps(mine))
    words = ["estimate", "zoo:gpt2:layers=2", "--cluster", "2xmine", "--global-batch", "8"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert f"{own_folder('devices') / 'mine.json'}.memory_GiB" in error and "Give a number, not a string." in error
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "good"))
    assert main(words) == 0
    assert main(["clusters"]) == 0
    assert "Your own\n  * mine-24GB" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["status", "watch", "cancel", "plan"])
def test_a_verb_without_a_server_says_how_to_start_one(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [verb, "--url", "http://127.0.0.1:9"] + ([] if verb == "status" else ["x"])
    assert main(words) == 1
    assert "automap serve" in capsys.readouterr().err


def test_serve_refuses_to_be_reached_by_others_without_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AUTOMAP_DATA_DIR", str(tmp_path))
    assert main(["serve", "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "automap keys create" in capsys.readouterr().err


def test_a_worker_needs_redis(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("AUTOMAP_REDIS_URL", raising=False)
    assert main(["worker"]) == 2
    assert "AUTOMAP_REDIS_URL" in capsys.readouterr().err
    bad = {"NUM_WORKERS": "many", "LOG_LEVEL": "loud", "ALLOWED_HOSTS": "example.org", "MAX_BUDGET_S": "-1"}
    for name, value in bad.items():
        with monkeypatch.context() as set_here:
            set_here.setenv(f"AUTOMAP_{name}", value)
            assert main(["worker"]) == 2
            assert f"AUTOMAP_{name}: " in capsys.readouterr().err
    monkeypatch.setenv("AUTOMAP_REDIS_URL", "foo://user:secret@host")
    assert main(["worker"]) == 2
    assert "secret" not in capsys.readouterr().err


def test_export_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "net.py"
    source.write_text("def net():\n    pass\n")
    assert main(["export-onnx", f"{source}:other", "-o", str(tmp_path / "x")]) == 2
    assert "net" in capsys.readouterr().err
    assert main(["export-onnx", "nowhere.py:net", "-o", str(tmp_path / "x")]) == 2


def test_a_file_with_a_function_imports_what_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "sizes_beside.py").write_text("WIDTH = 24\n")
    source = tmp_path / "net.py"
    source.write_text(
        "import torch\nfrom sizes_beside import WIDTH\n"
        "def net():\n    return torch.nn.Linear(WIDTH, 2), torch.zeros(1, WIDTH)\n"
    )
    path = tmp_path / "net.onnx"
    assert main(["export-onnx", f"{source}:net", "-o", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"output": str(path), "num_bytes": path.stat().st_size}
    source.write_text("import sizes_elsewhere\n")
    assert main(["export-onnx", f"{source}:net", "-o", str(tmp_path / "net.onnx")]) == 2
    assert f"`python {source}` shows where it fails" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["beside", "inside"])
def test_a_model_with_its_weights_is_read_without_them(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights in a file beside the model (which need not even be there), and a file too large to be read as it is."""
    rows = 64 if layout == "beside" else 20 << 10
    path = tmp_path / "linear.onnx"
    path.write_bytes(linear(rows, is_beside=layout == "beside"))
    assert (path.stat().st_size > 64 << 20) == (layout == "inside")
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_parameters"] == rows * 1024


def test_the_batch_may_stand_anywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recurrent layer over [time, batch, features] says which dim it is, and so does an option."""
    from onnx import TensorProto, helper

    shapes = {"w": (1, 32, 4), "r": (1, 32, 8)}
    graph = helper.make_graph(
        [helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=8)],
        "recurrent",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [6, 3, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [helper.make_tensor(n, TensorProto.FLOAT, s, bytes(4 * s[1] * s[2]), raw=True) for n, s in shapes.items()],
    )
    path = tmp_path / "recurrent.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString())
    assert main(["inspect", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["forward_flops"] == 2 * 6 * (32 * 4 + 32 * 8)
    assert any("batch" in warning for warning in found["warnings"])
    assert main(["inspect", str(path), "--batch-dim", "x=1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["forward_flops"] == found["forward_flops"] and told["warnings"] == []
    assert main(["inspect", str(path), "--batch-dim", "x"]) == 2
    assert "input=dim" in capsys.readouterr().err


def test_a_model_that_is_no_file_is_told_what_may_be_meant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    for model, repair in (
        ("gpt2", "Write zoo:gpt2 for the known model"),
        ("llama:layers=80", "Write zoo:llama:layers=80 for"),
        ("resnet-50", "Write zoo:resnet-50 for"),
        (str(tmp_path), f"Write hf:{tmp_path} for a configuration"),
        ("gpt2.onnx", "Give the path of an ONNX file or a layer profile, zoo:NAME or hf:FOLDER."),
    ):
        assert main(["inspect", model]) == 2
        assert repair in capsys.readouterr().err
