"""The OpenAPI document is true: schemathesis sends what it allows and what it forbids, and finds nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import redis
from long_cases import long_but

from service.http.openapi import examples
from service.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
METHODS = {"get", "put", "post", "delete", "options", "head", "patch", "trace"}


@pytest.mark.slow
@pytest.mark.parametrize("examples_each", long_but([1], [1, 20]))
def test_schemathesis_finds_nothing(
    examples_each: int, settings: Settings, client: redis.Redis, serve_app: Any, tmp_path: Path
) -> None:
    program = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    assert program is not None, "make setup installs it"
    # Nobody runs the jobs, so that waiting for their end only takes time.
    with serve_app(settings.model_copy(update={"max_wait_s": 0.2, "max_stream_s": 0.2}), client) as api:
        words = ["--config-file", str(ROOT / "schemathesis.toml"), "run", f"{api.base_url.join('/openapi.json')}"]
        limits = ["--max-examples", str(examples_each), "--no-color", "--report-dir", str(tmp_path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        run = subprocess.run(
            [program, *words, *limits], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
        assert api.get("/v1/jobs").status_code == 200


def test_every_operation_tells_its_errors(api: httpx.Client) -> None:
    document = api.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            answers = operation["responses"]
            assert {"400", "408", "413", "500", "503"} <= set(answers), (path, method)
            for status, answer in answers.items():
                assert "X-Request-Id" in answer["headers"]
                if status >= "400":
                    assert list(answer["content"]) == ["application/problem+json"], (path, method, status)
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_generators_of_clients_find_names_and_types(api: httpx.Client) -> None:
    document = api.get("/openapi.json").json()
    operations = [one for operations in document["paths"].values() for one in operations.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+){0,2}", name) for name in names), names
    assert {"upload_model", "submit_job", "get_job", "cancel_job", "get_plan"} <= set(names)
    for operation in operations:
        for content in operation.get("requestBody", {}).get("content", {}).values():
            assert list(content["schema"]) in ([], ["$ref"], ["type", "format"]), operation["operationId"]
    known = {"components": document["components"]}
    check = jsonschema.Draft202012Validator({"$ref": "#/components/schemas/JobBody", **known})
    body = {"cluster": "8xA100", "training": {"global_batch": 8}}
    assert check.is_valid({**body, "zoo": "gpt2"}) and check.is_valid({**body, "model_id": "x"})
    assert not check.is_valid(body) and not check.is_valid({**body, "zoo": "gpt2", "model_id": "x"})


def test_every_operation_has_an_example_that_its_schema_allows(api: httpx.Client) -> None:
    document = api.get("/openapi.json").json()
    known = {"components": document["components"]}

    def check(content: dict[str, Any], name: str, media_type: str) -> None:
        assert "example" in content, name
        examples = [content["example"]]
        if media_type == "text/event-stream":  # the schema is that of one event
            lines = [event.splitlines() for event in content["example"].strip().split("\n\n")]
            examples = [dict(line.split(": ", 1) for line in event) for event in lines]
        if content["schema"]:
            for example in examples:
                jsonschema.Draft202012Validator({**content["schema"], **known}).validate(example)

    names = set()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            name = f"{method} {path}"
            names.add(name)
            for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
                if media_type == "application/json":
                    check(content, name, media_type)
            for status, answer in operation["responses"].items():
                for media_type, content in answer.get("content", {}).items():
                    if status < "300":
                        check(content, name, media_type)
    assert set(examples()) <= names


def test_allow_names_all_methods_of_a_path(api: httpx.Client) -> None:
    for path, operations in api.get("/openapi.json").json()["paths"].items():
        # A HEAD is answered as its GET.
        known = {*operations, "head"} if "get" in operations else set(operations)
        wanted = {method.upper() for method in known}
        for method in METHODS - known:
            answer = api.request(method, path.replace("{job_id}", "x").replace("{model_id}", "x"))
            assert answer.status_code == 405, (method, path)
            assert set(answer.headers["allow"].split(", ")) == wanted, (method, path)


def test_numbers_have_bounds(api: httpx.Client) -> None:
    schemas = api.get("/openapi.json").json()["components"]["schemas"]
    batch = schemas["Training"]["properties"]["global_batch"]
    assert batch == {
        "type": "integer",
        "minimum": 1,
        "maximum": 1 << 20,
        "description": "Samples of one optimizer step, over all devices.",
    }
    assert schemas["Trials"]["properties"]["top_k"]["maximum"] == 64
    assert schemas["Device"]["properties"]["memory_GiB"]["minimum"] == 1e-3
    assert schemas["JobBody"]["properties"]["seed"]["maximum"] == 2**32 - 1
