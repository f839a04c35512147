"""Keys, and the matrix of every route with every kind of key."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from automap.errors import UserError
from service.command.main import main
from service.http.routes import events
from service.jobs.keys import SCOPES, BadKey, Key, Keys, place_of
from service.settings import Settings

DAY_S = 24 * 3600.0
OPEN = {("get", "/healthz"), ("get", "/readyz"), ("get", "/version")}
"""Written down here, so that a route that is opened by mistake is noticed."""
ADMIN = {("delete", "/v1/tenant"), ("get", "/metrics")}


def find(client: redis.Redis, text: str, *, now: float = 5.0) -> Key:
    return Keys(client, clock=lambda: now).checked(text, client.hget(*place_of(text)))  # type: ignore[arg-type]


def test_a_key_is_found_until_it_is_revoked(client: redis.Redis) -> None:
    keys = Keys(client, clock=lambda: 5.0)
    text, made = keys.create("vision", ["submit", "read"], name="CI")
    assert find(client, text, now=5.0) == made
    keys.note(made)
    assert (made.tenant, made.scopes, made.expires_at) == ("vision", ("read", "submit"), None)
    assert keys.all() == [(made, 5.0)]
    keys.revoke(made.id)
    with pytest.raises(BadKey, match="revoked"):
        find(client, text)
    assert not keys.any_usable()
    with pytest.raises(UserError, match="no such key"):
        keys.revoke("x")


def test_a_key_expires(client: redis.Redis) -> None:
    now = [0.0]
    keys = Keys(client, clock=lambda: now[0])
    text, _ = keys.create("a", SCOPES, lasts_s=DAY_S)
    now[0] = DAY_S - 1
    find(client, text, now=DAY_S - 1)
    now[0] = DAY_S
    with pytest.raises(BadKey, match="expired"):
        find(client, text, now=DAY_S)
    assert not keys.any_usable()


def test_the_store_holds_no_secret(client: redis.Redis) -> None:
    text, _ = Keys(client).create("a", SCOPES)
    secret = text.split("_")[2].encode()
    stored = b"".join(b"".join(client.hgetall(key).values()) for key in client.scan_iter("*"))  # type: ignore[union-attr]
    assert stored
    assert secret not in stored


def test_texts_that_are_no_keys(client: redis.Redis) -> None:
    keys = Keys(client)
    text, _ = keys.create("a", SCOPES)
    head, key_id, secret, checksum = text.split("_")
    swapped = secret[1] + secret[0] + secret[2:] if secret[0] != secret[1] else "a" + secret[1:]
    for wrong in ("", "amk", text[:-1], text + "0", f"{head}_{key_id}_{swapped}_{checksum}", text.upper()):
        with pytest.raises(BadKey, match="not a key"):
            find(client, wrong)
    other, _ = Keys(client).create("a", SCOPES)
    client.delete("automap:keys")
    with pytest.raises(BadKey, match="unknown"):
        find(client, other)


@pytest.mark.parametrize("tenant", ["", "A", "a b", "a:b", "-a", "ä", "x" * 41, "a\n"])
def test_names_of_tenants(client: redis.Redis, tenant: str) -> None:
    with pytest.raises(UserError, match="tenant"):
        Keys(client).create(tenant, SCOPES)


@pytest.fixture
def locked(settings: Settings, client: redis.Redis, serve_app: Any) -> Iterator[httpx.Client]:
    with serve_app(settings.model_copy(update={"require_keys": True}), client) as api:
        yield api


def test_who_only_looks_may_look_where_redis_refuses_to_write(locked: httpx.Client, client: redis.Redis) -> None:
    """As one does that has lost its copies; when a key was used is then not noted."""
    text, _ = Keys(client).create("a", SCOPES)
    headers = {"Authorization": f"Bearer {text}"}
    client.config_set("min-replicas-to-write", 1)
    try:
        assert locked.get("/v1/jobs", headers=headers).status_code == 200
        job = {"zoo": "gpt2", "cluster": "8xA100", "training": {"global_batch": 8}}
        refused = locked.post("/v1/jobs", headers=headers, json=job)
        assert refused.status_code == 503 and refused.headers["retry-after"]
    finally:
        client.config_set("min-replicas-to-write", 0)
    assert [used for _, used in Keys(client).all()] == [None]


def test_the_matrix_of_routes_and_keys(locked: httpx.Client, client: redis.Redis) -> None:
    keys = Keys(client)
    now = [0.0]
    old, _ = Keys(client, clock=lambda: now[0]).create("a", SCOPES, lasts_s=1.0)
    revoked, record = keys.create("a", SCOPES)
    keys.revoke(record.id)
    unusable = {
        "none": None,
        "wrong": "Bearer amk_x",
        "basic": "Basic YTpi",
        "expired": f"Bearer {old}",
        "revoked": f"Bearer {revoked}",
    }
    whole, _ = keys.create("a", SCOPES)
    without = {scope: keys.create("a", [other for other in SCOPES if other != scope])[0] for scope in SCOPES}
    document = locked.get("/openapi.json").json()
    checked = 0
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            place = path.replace("{job_id}", "x").replace("{model_id}", "x").replace("{target}", "x")

            def call(header: str | None, method: str = method, place: str = place) -> httpx.Response:
                return locked.request(method, place, headers={} if header is None else {"authorization": header})

            scopes = [scope for option in operation["security"] for scope in option.get("key", ())]
            assert (scopes == []) == ((method, path) in OPEN), (method, path)
            assert (scopes == ["admin"]) == ((method, path) in ADMIN), (method, path)
            for kind, header in unusable.items():
                answer = call(header)
                if scopes:
                    assert answer.status_code == 401, (kind, method, path)
                    assert answer.headers["www-authenticate"].startswith("Bearer")
                else:
                    assert answer.status_code == 200, (kind, method, path)
                checked += 1
            for scope in scopes:
                assert scope == ("admin" if (method, path) in ADMIN else "read" if method == "get" else "submit")
                answer = call(f"Bearer {without[scope]}")
                assert answer.status_code == 403, (scope, method, path)
                assert answer.json()["repair"] == f"Use a key with the scope {scope}."
                assert call(f"Bearer {whole}").status_code not in (401, 403), (method, path)
                checked += 2
    assert checked > 80


def test_what_is_another_tenants_is_not_there(locked: httpx.Client, client: redis.Redis, light: Any) -> None:
    keys = Keys(client)
    mine, theirs = ({"authorization": f"Bearer {keys.create(tenant, SCOPES)[0]}"} for tenant in ("mine", "theirs"))
    model = locked.post("/v1/models", content=light("squeezenet"), headers=mine).json()
    body = {"model_id": model["id"], "cluster": "8xV100-16GB", "training": {"global_batch": 64}, "budget": "1s"}
    job = locked.post("/v1/jobs", json=body, headers=mine).json()
    places = {"{job_id}": job["id"], "{model_id}": model["id"], "{target}": "deepspeed"}
    checked = 0
    for path, operations in locked.get("/openapi.json").json()["paths"].items():
        if "{" not in path:
            continue
        place, unknown = path, path
        for name, value in places.items():
            place, unknown = place.replace(name, value), unknown.replace(name, "f" * len(value))
        for method in operations:
            answer, same = (locked.request(method, at, headers=theirs) for at in (place, unknown))
            assert answer.status_code == same.status_code == 404, (method, path)
            assert answer.json()["title"] == same.json()["title"]
            checked += 1
    assert checked >= 7
    assert locked.get("/v1/jobs", headers=theirs).json()["jobs"] == []
    assert locked.get("/v1/models", headers=theirs).json()["models"] == []
    assert locked.post("/v1/jobs", json=body, headers=theirs).status_code == 404
    assert locked.delete("/v1/tenant", headers=theirs).status_code == 204
    assert locked.get(f"/v1/jobs/{job['id']}", headers=mine).json()["state"] == "queued"
    assert locked.delete(f"/v1/models/{model['id']}", headers=mine).status_code == 409
    assert locked.delete(f"/v1/jobs/{job['id']}", headers=mine).status_code == 204
    assert locked.delete(f"/v1/models/{model['id']}", headers=mine).status_code == 204


def test_refused_and_changing_requests_are_logged_one_line_each(
    locked: httpx.Client, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    text, key = Keys(client).create("a", ["submit"])
    header = {"authorization": f"Bearer {text}"}
    with caplog.at_level(logging.INFO, "automap.audit"):
        locked.delete("/v1/jobs/x%0ay", headers=header)
        locked.get("/v1/jobs", headers=header)
        locked.get("/v1/jobs")
        locked.get("/healthz")
        Keys(client).revoke(key.id)
        locked.get("/v1/jobs", headers=header)
    lines = [record.getMessage() for record in caplog.records if record.name == "automap.audit"]
    assert lines == [
        f"tenant=a key={key.id} DELETE /v1/jobs/x\\ny -> 404",
        f"tenant=a key={key.id} GET /v1/jobs -> 403",
        "tenant=- key=- GET /v1/jobs -> 401",
        f"tenant=a key={key.id} GET /v1/jobs -> 401",
    ]
    assert text not in caplog.text


def test_keys_on_the_command_line(
    redis_url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AUTOMAP_REDIS_URL", redis_url)
    assert main(["keys", "create", "--tenant", "vision", "--name", "CI", "--days", "30", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert find(client, made["key"]).scopes == ("read", "submit")
    assert main(["keys", "create", "--tenant", "speech", "--scope", "admin"]) == 0
    text = capsys.readouterr().out.strip()
    assert find(client, text).scopes == ("admin",)
    assert main(["keys", "list"]) == 0
    shown = capsys.readouterr().out
    assert "vision" in shown and "until" in shown and "CI" in shown
    assert made["key"] not in shown
    assert main(["keys", "revoke", made["id"]]) == 0
    assert "sha256" not in capsys.readouterr().out
    with pytest.raises(BadKey):
        find(client, made["key"])
    assert main(["keys", "revoke", "x"]) == 2
    assert main(["keys", "create", "--tenant", "a", "--scope", "root"]) == 2


def test_keys_of_a_service_that_runs_and_of_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from service.embedded_redis import EmbeddedRedis

    monkeypatch.delenv("AUTOMAP_REDIS_URL", raising=False)
    monkeypatch.setenv("AUTOMAP_DATA_DIR", str(tmp_path))
    assert main(["keys", "create", "--tenant", "a"]) == 0
    with EmbeddedRedis(tmp_path):
        assert main(["keys", "create", "--tenant", "b"]) == 0
        capsys.readouterr()
        assert main(["keys", "list", "--json"]) == 0
    assert [key["tenant"] for key in json.loads(capsys.readouterr().out)["keys"]] == ["a", "b"]


def test_a_revoked_key_hears_no_more_of_a_stream(
    settings: Settings, client: redis.Redis, serve_app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "KEY_S", 0.0)
    keys, body = Keys(client), {"zoo": "gpt2:layers=2", "cluster": "8xV100-16GB", "training": {"global_batch": 64}}
    (good, _), (bad, made) = (keys.create("a", ("read", "submit"), name=name) for name in ("good", "bad"))
    with serve_app(settings.model_copy(update={"require_keys": True}), client) as api:
        head = {"Authorization": f"Bearer {good}"}
        links = api.post("/v1/jobs", json=body, headers=head).json()["links"]
        with (
            api.stream("GET", links["events"], headers=head) as kept,
            api.stream("GET", links["events"], headers={"Authorization": f"Bearer {bad}"}) as cut,
        ):
            heard, ended = kept.iter_lines(), cut.iter_lines()
            for lines in (heard, ended):
                while "queued" not in next(lines):
                    pass
            keys.revoke(made.id)
            api.post(links["cancel"], headers=head)
            assert any("cancelled" in line for line in heard)
            assert not any("cancelled" in line for line in ended)


def test_a_revoked_key_gets_no_answer_to_its_long_poll(settings: Settings, client: redis.Redis, serve_app: Any) -> None:
    keys, body = Keys(client), {"zoo": "gpt2:layers=2", "cluster": "8xV100-16GB", "training": {"global_batch": 64}}
    text, made = keys.create("a", ("read", "submit"))
    with serve_app(settings.model_copy(update={"require_keys": True}), client) as api:
        api.headers["Authorization"] = f"Bearer {text}"
        at = api.post("/v1/jobs", json=body).json()["links"]["self"]
        revoking = threading.Timer(0.3, keys.revoke, [made.id])
        revoking.start()
        began = time.monotonic()
        answer = api.get(at, params={"wait": 20})
        took_s = time.monotonic() - began
    assert (answer.status_code, answer.json()["field"]) == (401, "Authorization")
    assert 0.3 <= took_s < 5.0


def test_no_keys_are_said_to_be_none(
    redis_url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AUTOMAP_REDIS_URL", redis_url)
    assert main(["keys", "list"]) == 0
    assert capsys.readouterr().out == "no keys; `automap keys create --tenant NAME` makes one\n"
