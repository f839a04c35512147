"""The commands of the README and of the pages on the service run as they stand there, in their order.

Those that show what they print are compared with it in `test_docs.py`, and the tutorial is followed as a whole by
`benchmarks/first_use.py`. Here they must succeed, and make the files and the keys that are named beside them.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from service_work import run

from service.command.main import main

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "http://127.0.0.1:8080"
EDGES = 40
"""Edges of the graph that is profiled; any would do."""
CHEAPER = {
    "zoo:llama-70b": "zoo:gpt2",
    "--budget 1000": "--budget 16",
    "--budget 20s": "--budget 20",
    "--target automap": "--target automap --budget 16",
}
"""What a command says -> what is run in its place, which takes seconds and no minutes."""
ELSEWHERE = {
    "automap export-onnx": "in `tests/automap/runtime/test_torch_export.py`",
    "automap sweep": "with what it prints, in `test_docs.py`",
    "automap trial": "on a smaller model, in `test_trials.py`",
    "automap serve": "by the fixture `api`",
    "python -m service.warm_up": "in `test_cli.py`, by `main` of its module",
    "pip install": "in a clean environment, by `benchmarks/first_use.py`",
    "torchrun": "in `tests/automap/test_launch_line.py`, where the line of a plan is run",
}
"""Commands that others run."""


def blocks(page: str) -> list[list[str]]:
    """The commands of each block of a page that shows no output."""
    found = re.findall(r"^```\n((?:automap|curl|torchrun|pip) .*?)^```$", (ROOT / page).read_text(), re.M | re.S)
    # A line goes on behind a backslash, or inside a quotation.
    return [re.findall(r"(?:'[^']*'|\\\n|[^'\n])+", block) for block in found if "\n\n" not in block]


@pytest.fixture
def folder(tmp_path: Path, light: Callable[[str], bytes], monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("model.onnx", "gpt2-xl.onnx"):
        (tmp_path / name).write_bytes(light("squeezenet"))
    (tmp_path / "edges.txt").write_text("".join(f"{node} {(7 * node + 3) % EDGES}\n" for node in range(EDGES)))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


OF_THE_README = [
    block
    for block in blocks("README.md")
    if not any(line.startswith("curl") for line in block)
    and not all(line.startswith(tuple(ELSEWHERE)) for line in block)
]


@pytest.mark.slow
@pytest.mark.parametrize("block", OF_THE_README, ids=lambda block: block[0][:40])
def test_the_commands_of_the_readme(block: list[str], folder: Path) -> None:
    for shown in block:
        if shown.startswith(tuple(ELSEWHERE)):
            continue
        command = shown.replace("\\\n", " ")
        for said, cheap in CHEAPER.items():
            command = command.replace(said, cheap)
        words = shlex.split(command, comments=True)
        assert words[0] == "automap", command
        assert main(words[1:]) == 0, command
        outputs = [words[at + 1] for at, word in enumerate(words) if word == "-o"]
        assert all((folder / name).exists() for name in outputs), command
        for name in (name for names in re.findall(r"# → (.*)", command) for name in names.split(", ")):
            assert (folder / outputs[0] / name).exists(), command
    for command in block:
        if command.startswith("torchrun"):
            launch = json.loads((folder / "plan.json").read_text())["launch"]
            assert shlex.split(command, comments=True) == shlex.split(launch)


@pytest.mark.skipif(shutil.which("curl") is None, reason="not run: the requests of the pages (apt-get install curl)")
@pytest.mark.parametrize("page", ["README.md", "docs/api.md"])
def test_the_requests_of_a_page(page: str, api: httpx.Client, client: redis.Redis, search: Any, folder: Path) -> None:
    """`…` stands for the id of the model in a body and for that of the job in an address."""
    model_id = job_id = ""
    asked = [command for block in blocks(page) for command in block if command.startswith("curl")]
    assert len(asked) >= 4
    for shown in asked:
        command, _, said = shown.partition("# → ")
        command = re.sub(r'("model_id": )"[^"]*"', rf'\1"{model_id}"', command).replace("/jobs/…", f"/jobs/{job_id}")
        words = shlex.split(command.replace(ADDRESS, str(api.base_url).rstrip("/")).replace("\\\n", " "))
        ran = subprocess.run([*words, "--silent", "--show-error", "--fail"], capture_output=True, text=True, check=True)
        if "/events" in command:
            assert ran.stdout.count("event: state") >= 2
            continue
        answer = json.loads(ran.stdout)
        status, named = re.match(r"\d+", said), re.findall(r'"(\w+)":', said) or re.findall(r"\w+", said)
        assert set(named) - {status and status[0]} <= set(answer), command
        if "/v1/models" in command:
            model_id = answer["id"]
        elif "/v1/jobs" in command and "-d" in words:
            job_id = answer["id"]
            run(job_id, client, search=search)
        elif "?wait" in command:
            assert answer["state"] == "succeeded"
        else:
            assert answer["schema"] == "automap.plan/1" and answer["estimate"]["step_time_s"] > 0.0


@pytest.mark.slow
def test_the_commands_about_keys(
    redis_url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AUTOMAP_REDIS_URL", redis_url)
    (block,) = [block for block in blocks("docs/service.md") if "automap keys list" in block]
    *commands, last = block
    assert last == "automap serve --host 0.0.0.0"
    revoked = ""
    for command in commands:
        words = shlex.split(command, comments=True)[1:]
        if words[1] == "revoke":
            words[2] = revoked
        assert main(words) == 0, command
        printed = capsys.readouterr().out
        revoked = printed.split("_")[1] if words[1] == "create" else revoked
