"""Names in files may be anything: no verb hands their control characters to a terminal, a log, a page or a picture."""

from __future__ import annotations

import io
import json
import logging
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import httpx
import onnx
import pytest
import redis
import service_work
from onnx import TensorProto, helper

from service.command.main import main
from service.command.output import LONGEST
from service.logs import configure

EVIL = "\x1b]0;owned\x07\x1b[31m\r\nvalid     nothing\u202e<img src=x onerror=alert(1)>[red]$\\frac{$\x9b\u2028"
"""What steers terminals, what ends lines, what turns their direction, markup of pages and consoles, formulas."""
PLACE = ["--cluster", "2xA100", "--global-batch", "8"]


def evil_model(layers: int = 4, longer: str = "") -> bytes:
    """A chain of products all of whose names are hostile."""
    nodes, weights = [], []
    for i in range(layers):
        weights.append(
            helper.make_tensor(f"w{EVIL}{longer}{i}", TensorProto.FLOAT, [64, 64], b"\0" * 4 * 64 * 64, raw=True)
        )
        ends = [f"t{EVIL}{longer}{i}", f"t{EVIL}{longer}{i + 1}"]
        nodes.append(helper.make_node("MatMul", [ends[0], weights[-1].name], ends[1:], name=f"n{EVIL}{longer}/{i}"))
    first, last = nodes[0].input[0], nodes[-1].output[0]
    x = helper.make_tensor_value_info(first, TensorProto.FLOAT, [f"b{EVIL}", 64])
    y = helper.make_tensor_value_info(last, TensorProto.FLOAT, [f"b{EVIL}", 64])
    graph = helper.make_graph(nodes, f"g{EVIL}{longer}", [x], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    for node in model.graph.node:
        node.metadata_props.add(key=f"k{EVIL}", value=f"v{EVIL}")
    helper.set_model_props(model, {f"key{EVIL}": f"value{EVIL}"})
    return onnx.ModelProto.SerializeToString(model)


def check(text: str) -> None:
    """Refuses what is not printable, but for the ends of lines, and a line that the name makes."""
    odd = {c for c in text if not c.isprintable() and c != "\n"}
    assert not odd, (odd, text[:2000])
    assert not [line for line in text.split("\n") if line.startswith("valid     nothing\\u202e")]
    assert max(map(len, text.split("\n"))) <= LONGEST


@pytest.mark.parametrize("longer", ["", "x" * 500])
def test_no_verb_hands_control_characters_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], longer: str
) -> None:
    model, plan = tmp_path / f"m{EVIL.replace('/', '')[:60]}.onnx", tmp_path / "plan.json"
    model.write_bytes(evil_model(longer=longer))
    other = tmp_path / "other.json"
    found = {}
    for words in (
        ["search", str(model), *PLACE, "--budget", "30", "--searcher", "expert", "-o", str(plan)],
        ["estimate", str(model), *PLACE, "--tp", "2", "-o", str(other)],
        ["estimate", str(model), *PLACE, "--pp", "2"],
        ["estimate", str(model), *PLACE, "--pp", "2", "--dim", f"{EVIL}=3"],
        ["inspect", str(model)],
        ["verify", str(plan), str(model)],
        ["verify", str(plan), "zoo:gpt2"],
        ["explain", str(plan), str(model)],
        ["diff", str(plan), str(other), str(model)],
        ["export", str(plan), str(model), "--target", "pytorch", "-o", str(tmp_path / "files")],
        ["export", str(plan), str(model), "--target", "onnx", "-o", str(tmp_path / "onnx")],
        ["sweep", str(model), *PLACE, "--over", "pp=1,2"],
        ["recommend", str(model), "--clusters", "2xA100,1xA100", "--global-batch", "8"],
        ["strip", str(model), "-o", str(tmp_path / f"s{EVIL.replace('/', '')[:60]}.onnx")],
        ["draw", str(plan), str(model), "-o", str(tmp_path / "report.html")],
        ["search", f"zoo:{EVIL}", *PLACE],
        ["search", EVIL, *PLACE],
        [EVIL],
        ["status", EVIL, "--url", "http://127.0.0.1:9"],
    ):
        found[words[0], words[-1]] = main(words)
        said = capsys.readouterr()
        check(said.out)
        check(said.err)
    assert found["search", str(plan)] == found["draw", str(tmp_path / "report.html")] == 0, found
    assert found["inspect", str(model)] == found["verify", str(model)] == 0, found
    report = (tmp_path / "report.html").read_text("utf-8")
    assert "<img" not in report and "\u202e" not in report and "\x1b" not in report


def test_plans_with_hostile_words_are_shown_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, plan = tmp_path / "m.onnx", tmp_path / "plan.json"
    model.write_bytes(evil_model())
    assert main(["estimate", str(model), *PLACE, "--tp", "2", "-o", str(plan)]) == 0
    capsys.readouterr()
    document = json.loads(plan.read_text())
    document["model"]["name"] = document["cluster"]["name"] = EVIL
    document["stages"][0]["operators"] = [EVIL, EVIL]
    plan.write_text(json.dumps(document))
    for words in (["verify", str(plan), str(model)], ["estimate", str(model), "--plan", str(plan)]):
        main(words)
        said = capsys.readouterr()
        check(said.out + said.err)


def test_the_service_shows_hostile_names_escaped(
    api: httpx.Client,
    client: redis.Redis,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its pictures are XML that a browser draws, its report has no markup of the names, its lines are lines."""
    url = str(api.base_url)
    uploaded = api.post("/v1/models", params={"name": f"../../{EVIL}"}, content=evil_model())
    assert uploaded.status_code == 201, uploaded.text
    body = {"model_id": uploaded.json()["id"], "cluster": "2xA100", "training": {"global_batch": 8}, "budget": 30}
    job = api.post("/v1/jobs", json={**body, "searchers": ["expert"], "hints": {"fix": {"pp": 2}}})
    assert job.status_code == 202, job.text
    path = f"/v1/jobs/{job.json()['id']}"
    service_work.run(job.json()["id"], client)
    assert api.get(path).json()["state"] == "succeeded", api.get(path).text
    drawn = api.get(f"{path}/pictures")
    assert drawn.status_code == 200, drawn.text
    for picture in drawn.json()["pictures"].values():
        ET.parse(io.StringIO(picture["svg"]))
        assert "<img" not in picture["svg"] and "\u202e" not in picture["svg"]
    report = api.get(f"{path}/report")
    assert report.status_code == 200 and "<img" not in report.text and "\u202e" not in report.text
    assert report.headers["content-disposition"].isprintable()
    for words in (["status"], ["status", job.json()["id"]], ["watch", job.json()["id"]], ["cancel", job.json()["id"]]):
        assert main([*words, "--url", url]) == 0
        said = capsys.readouterr()
        check(said.out + said.err)
    for words in (["status", EVIL], ["cancel", EVIL], ["plan", EVIL]):
        assert main([*words, "--url", url]) == 2
        check(capsys.readouterr().err)


def test_log_lines_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        configure("INFO", "text")
        log = logging.getLogger("automap.test")
        log.warning("job %s", EVIL)
        try:
            raise ValueError(EVIL.replace("\n", ""))  # lines of a traceback stay lines
        except ValueError:
            log.exception("request %s", EVIL)
    finally:
        logging.getLogger().handlers[:], _ = before
        logging.getLogger().setLevel(before[1])
    said = capsys.readouterr().err
    check(said)
    assert "Traceback" in said and said.count("automap.test") == 2


def test_verbs_print_by_the_functions_that_escape() -> None:
    folder = Path(__file__).resolve().parents[2] / "service" / "command"
    others = [path for path in folder.glob("*.py") if path.name not in ("output.py", "demo.py")]
    assert len(others) > 15
    found = {path.name for path in others if re.search(r"typer\.echo\(|(?<![\w.])print\(", path.read_text("utf-8"))}
    assert not found
