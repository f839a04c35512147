"""What the user runs today, sent to the service: the same search as on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
import redis
import service_work

from service.command.main import main

GPT = "gpt:layers=4,hidden=256,heads=4,vocab_size=1024,seq_len=128"
SCRIPT = "--tensor-model-parallel-size 4 --global-batch-size 64 --bf16 --micro-batch-size 2\n"
ASKED = {"zoo": GPT, "cluster": "1x8xA100", "budget": "40", "searchers": ["expert"]}


@pytest.mark.parametrize("more", [{}, {"global_batch": 64, "trainer": "ddp"}, {"target": "any"}])
def test_a_baseline_over_rest_is_the_search_of_the_command_line(
    more: dict[str, object],
    api: httpx.Client,
    client: redis.Redis,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its trainer, target, batch and overlap of gradients are those of the file, unless the sender says otherwise."""
    path = tmp_path / "today.sh"
    path.write_text(SCRIPT)
    options = [word for name, value in more.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words = ["search", f"zoo:{GPT}", "--cluster", "1x8xA100", "--budget", "40", "--searcher", "expert", *options]
    assert main([*words, "--baseline", str(path), "--json"]) == 0
    own = json.loads(capsys.readouterr().out)
    assert own["training"]["overlap_gradients"] is False
    hints = {"baseline": {"file": "today.sh", "text": SCRIPT}}
    job = api.post("/v1/jobs", json={**ASKED, "training": more, "hints": hints})
    assert job.status_code == 202, job.text
    service_work.run(job.json()["id"], client)
    found = api.get(f"/v1/jobs/{job.json()['id']}/plan").json()
    assert found["training"] == own["training"]
    assert found["stages"] == own["stages"]
    assert found["search"]["yours"] == own["search"]["yours"]
    drawn = api.get(f"/v1/jobs/{job.json()['id']}/pictures")
    assert drawn.status_code == 200, drawn.text


def test_a_baseline_that_does_not_say_the_batch_is_refused_at_once(api: httpx.Client) -> None:
    silent = {"baseline": {"file": "ds.json", "text": json.dumps({"bf16": {"enabled": True}})}}
    answer = api.post("/v1/jobs", json={**ASKED, "training": {}, "hints": silent})
    assert (answer.status_code, answer.json()["field"]) == (422, "training.global_batch")
    assert answer.json()["repair"] == "Give it: the baseline does not say it."
    other = {"baseline": {"file": "today.sh", "text": SCRIPT}}
    answer = api.post("/v1/jobs", json={**ASKED, "training": {"global_batch": 32}, "hints": other})
    assert (answer.status_code, answer.json()["field"]) == (422, "hints.baseline.global_batch")


@pytest.mark.parametrize("more", [{}, {"global_batch": 64, "trainer": "ddp"}])
def test_a_baseline_completes_the_training_of_an_estimate_as_that_of_a_job(
    more: dict[str, object],
    api: httpx.Client,
    client: redis.Redis,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hints = {"baseline": {"file": "today.sh", "text": SCRIPT}}
    job = api.post("/v1/jobs", json={**ASKED, "training": more, "hints": hints})
    service_work.run(job.json()["id"], client)
    searched = api.get(f"/v1/jobs/{job.json()['id']}/plan").json()
    asked = {"zoo": GPT, "training": more, "hints": hints}
    priced = api.post("/v1/estimates", json={**asked, "cluster": "1x8xA100", "degrees": {"tp": 4}})
    assert priced.status_code == 200, priced.text
    assert priced.json()["training"] == searched["training"]
    (tmp_path / "hints.json").write_text(json.dumps(hints))
    options = [word for name, value in more.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words = ["estimate", f"zoo:{GPT}", "--cluster", "1x8xA100", "--tp", "4", "--hints", str(tmp_path / "hints.json")]
    assert main([*words, *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["training"] == searched["training"]
    compared = api.post("/v1/recommendations", json={**asked, "clusters": ["1x4xA100", "1x8xA100"]})
    assert compared.status_code == 200, compared.text
    assert compared.json()["fastest"]["plan"]["training"] == searched["training"]


def test_clusters_are_compared_for_one_batch(api: httpx.Client) -> None:
    """DeepSpeed's file says the samples of a replica: a cluster of twice the size would train twice as many."""
    text = json.dumps(
        {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}}
    )
    asked = {"zoo": GPT, "clusters": ["1x4xA100", "1x8xA100"], "hints": {"baseline": {"file": "ds.json", "text": text}}}
    answer = api.post("/v1/recommendations", json={**asked, "training": {}})
    found = answer.json()
    assert (answer.status_code, found["field"]) == (422, "training.global_batch")
    assert found["value"] == "32 on 1x4xA100, 64 on 1x8xA100"
    same = api.post("/v1/recommendations", json={**asked, "training": {"global_batch": 64}})
    assert same.status_code == 200 and same.json()["fastest"]["plan"]["training"]["global_batch"] == 64


def test_the_document_says_that_a_baseline_may_say_the_batch(api: httpx.Client) -> None:
    schemas = api.get("/openapi.json").json()["components"]["schemas"]
    for body in ("JobBody", "EstimateBody", "RecommendationBody"):
        assert schemas[body]["properties"]["training"]["required"] == []
    assert schemas["Training"]["required"] == ["global_batch"]
