"""Addresses of Redis: with TLS, with sentinels, and those that are none."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from redis_servers import RedisServer, free_port

from automap.errors import UserError
from service.command.main import main
from service.embedded_redis import EmbeddedRedis
from service.jobs import connection, worker
from service.jobs.connection import AWAY, check, connect, impatient, left_out_while_away, passes, patiently
from service.jobs.run_job import JobRequest
from service.jobs.store import Store
from service.settings import Settings

REQUEST = JobRequest(cluster="8xV100-16GB", training={"global_batch": 64})


@pytest.mark.parametrize(
    "url",
    [
        "http://host",
        "redis://:hunter2@host:port",
        "redis://:hunter2@host/0?no_such_option=hunter2",
        "redis-sentinel://:hunter2@host:1",
        "redis-sentinel://:hunter2@host:x#main",
        "redis-sentinel://:hunter2@host?no_such_option=hunter2#main",
    ],
)
def test_what_is_no_address_is_told_without_its_password(url: str) -> None:
    with pytest.raises(UserError) as caught:
        connect(url)
    assert caught.value.field == "redis_url"
    assert "hunter2" not in str(caught.value)


def test_a_redis_that_refuses_is_told_at_the_start_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    # Where Redis were taken to be away, they would go on for ever.
    monkeypatch.setattr("service.serve._supervised", lambda *given: pytest.fail("it serves"))
    monkeypatch.setattr("service.jobs.worker.connect", lambda *given, **options: pytest.fail("it waits"))
    with RedisServer(tmp_path, port=port, requirepass="right"):
        for url in (f"redis://:hunter2@127.0.0.1:{port}/0", f"redis://:right@127.0.0.1:{port}/99"):
            monkeypatch.setenv("AUTOMAP_REDIS_URL", url)
            for words in (["serve", "--port", "0", "--workers", "0"], ["worker"], ["keys", "list"]):
                assert main(words) == 2
                told = capsys.readouterr().err
                assert told.startswith("automap: redis_url: Redis refuses (")
                assert "name, password and database" in told
                assert "hunter2" not in told
    # Without it nobody knows whether there is a key; and nobody is served without one.
    assert main(["serve", "--port", "0", "--host", "0.0.0.0"]) == 2
    assert "Redis does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rights", "refused"),
    [
        (("+@all", "~rq:*"), "one of the keys"),
        (("+@all", "~automap:*"), "one of the keys"),
        (("+@all", "-set", "~automap:*", "~rq:*"), "'set'"),
        (("+@all", "-@read", "+ping", "~automap:*", "~rq:*"), "'hget'"),
    ],
    ids=["keys of the service", "keys of the queue", "writing", "reading"],
)
def test_a_user_of_redis_without_rights_is_told_at_the_start(
    rights: tuple[str, ...],
    refused: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A worker tried it again and again without a word, and the service answered 503."""
    port = free_port()
    monkeypatch.setattr("service.serve._supervised", lambda *given: pytest.fail("it serves"))
    monkeypatch.setattr("service.jobs.worker.connect", lambda *given, **options: pytest.fail("it waits"))
    with RedisServer(tmp_path, port=port) as server:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "poor", "on", ">hunter2", "+@connection", *rights)
        monkeypatch.setenv("AUTOMAP_REDIS_URL", f"redis://poor:hunter2@127.0.0.1:{port}/0")
        for words in (["serve", "--port", "0"], ["serve", "--port", "0", "--host", "0.0.0.0"], ["worker"]):
            assert main(words) == 2
            told = capsys.readouterr().err
            assert told.startswith("automap: redis_url: Redis refuses (")
            assert refused in told and "docker/redis/users.sh" in told and "hunter2" not in told


def test_a_worker_says_once_what_redis_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a user may do is taken from it while the worker starts; the worker goes on trying."""
    tries = []
    monkeypatch.setattr(worker, "warm", lambda: None)
    monkeypatch.setattr(worker, "LONGEST_PAUSE_S", 0.0)

    class Refused(worker.Worker):
        def work(self, **options: Any) -> bool:
            tries.append(self)
            self.is_stopped = len(tries) == 4
            raise redis.exceptions.NoPermissionError("NOPERM" if len(tries) < 3 else "READONLY")

    monkeypatch.setattr(worker, "Worker", Refused)
    with RedisServer(tmp_path) as server:
        worker.main(Settings(redis_url=f"redis://127.0.0.1:{server.port}/0"))
    told = [record.getMessage() for record in caplog.records if record.name == "automap.worker"]
    assert [text.partition(")")[0] for text in told] == ["Redis refuses (NOPERM", "Redis refuses (READONLY"]


def certificate(folder: Path) -> dict[str, Path]:
    """A certificate for 127.0.0.1, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("not run: Redis with TLS (apt-get install openssl)")
    found = {"tls_key_file": folder / "key.pem", "tls_cert_file": folder / "cert.pem"}
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=redis"]
    files = ["-keyout", found["tls_key_file"], "-out", found["tls_cert_file"]]
    command = ["openssl", "req", *kind, "-addext", "subjectAltName=IP:127.0.0.1", *files]
    subprocess.run(command, check=True, capture_output=True)
    return found


def test_clients_verify_the_certificate_of_a_redis_with_tls(tmp_path: Path) -> None:
    files, port = certificate(tmp_path), free_port()
    options = {"tls_port": port, "tls_auth_clients": "no", "tls_ca_cert_file": files["tls_cert_file"]}
    with RedisServer(tmp_path, **files, **options):
        with connect(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={files['tls_cert_file']}") as client:
            job = Store(client).create("m", REQUEST)
            with impatient(client) as hurried:
                assert Store(hurried).job(job.id) == job
        with connect(f"rediss://127.0.0.1:{port}/0") as stranger, pytest.raises(redis.ConnectionError, match="verify"):
            stranger.ping()
        # No waiting changes that, so it is told at the start.
        for url, told in (
            (f"rediss://127.0.0.1:{port}/0", "certificate verify failed"),
            (f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={tmp_path / 'none.pem'}", "ssl_ca_certs cannot be read"),
            (f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={files['tls_key_file']}", "no TLS with this Redis"),
        ):
            with pytest.raises(UserError, match=told) as fault:
                check(url)
            assert fault.value.field == "redis_url" and "ssl_ca_certs" in fault.value.repair


@pytest.mark.parametrize("secret", ["", "hunter2"])
def test_an_address_with_the_wrong_scheme_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], secret: str
) -> None:
    """No waiting changes whether a Redis speaks TLS, so it is told at the start; a Redis that is gone is waited for."""
    monkeypatch.setattr(connection, "ANSWER_S", 1.0)
    monkeypatch.delenv("AUTOMAP_REDIS_URL", raising=False)
    files, port = certificate(tmp_path), free_port()
    options = {"tls_port": port, "tls_auth_clients": "no", "tls_ca_cert_file": files["tls_cert_file"]}
    options |= {"requirepass": secret} if secret else {}
    user = f":{secret}@" if secret else ""
    with RedisServer(tmp_path, **files, **options) as server:
        cases = (("rediss", server.port, "speaks no TLS"), ("redis", port, "speaks only TLS"))
        for scheme, wrong, told in cases:
            with pytest.raises(UserError, match=told) as fault:
                check(f"{scheme}://{user}127.0.0.1:{wrong}/0")
            other = "redis" if scheme == "rediss" else "rediss"
            assert fault.value.value == f"{scheme}://127.0.0.1:{wrong}"
            assert fault.value.repair.startswith(f"Write {other}:// in AUTOMAP_REDIS_URL")
        check(f"redis://{user}127.0.0.1:{server.port}/0")
        check(f"rediss://{user}127.0.0.1:{port}/0?ssl_ca_certs={files['tls_cert_file']}")
        monkeypatch.setenv("AUTOMAP_REDIS_URL", f"rediss://{user}127.0.0.1:{server.port}/0")
        for command in (["serve", "--port", "0"], ["worker"]):
            assert main(command) == 2
            told = capsys.readouterr().err
            assert "redis_url: this Redis speaks no TLS here" in told and "hunter2" not in told
    for scheme, gone in (("rediss", server.port), ("redis", port)):
        with pytest.raises(AWAY):
            check(f"{scheme}://{user}127.0.0.1:{gone}/0")


def test_a_redis_with_tls_that_goes_away_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)

        def cut() -> None:
            listener.accept()[0].close()

        thread = threading.Thread(target=cut)
        thread.start()
        with pytest.raises(redis.ConnectionError):
            check(f"rediss://127.0.0.1:{listener.getsockname()[1]}/0")
        thread.join()


@pytest.mark.slow
def test_sentinels_name_another_redis_when_one_is_gone(tmp_path: Path, until: Callable[..., Any]) -> None:
    folders = [tmp_path / name for name in ("first", "second", "sentinel")]
    for folder in folders:
        folder.mkdir()
    secret = {"requirepass": "inside", "masterauth": "inside", "repl_diskless_sync_delay": 0}
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(RedisServer(folders[0], **secret))
        second = stack.enter_context(RedisServer(folders[1], replicaof=f"127.0.0.1 {first.port}", **secret))
        with redis.Redis(port=first.port, password="inside") as own:
            # A sentinel asks for copies when it begins, and then every ten seconds.
            until(lambda: own.info("replication")["connected_slaves"])
        watch = f"""
            sentinel monitor main 127.0.0.1 {first.port} 1
            sentinel down-after-milliseconds main 300
            sentinel auth-pass main inside
        """
        sentinel = stack.enter_context(RedisServer(folders[2], sentinel=watch, requirepass="outside"))
        # One sentinel that is not there: the next one is asked.
        hosts = f"127.0.0.1:{free_port()},127.0.0.1:{sentinel.port}"
        url = f"redis-sentinel://:inside@{hosts}/0?sentinel_password=outside&socket_timeout=4#main"
        client: Any = stack.enter_context(connect(url, patient=True))
        job = Store(client).create("m", REQUEST)
        until(lambda: named(client) == first.port)
        assert client.wait(1, 10_000) == 1
        until(lambda: known(sentinel))
        first.kill()
        with impatient(client) as hurried, pytest.raises(redis.ConnectionError):
            Store(hurried).job(job.id)
        assert Store(client).begin(job.id) == 1  # as soon as the other one has taken over
        until(lambda: named(client) == second.port)


def named(client: Any) -> int | None:
    """The port of the server that the sentinels name; None while a busy host keeps it from answering them in time."""
    try:
        return int(client.connection_pool.get_master_address()[1])
    except redis.ConnectionError:
        return None


def known(sentinel: RedisServer) -> bool:
    """Whether a sentinel knows of the copy to which it may turn."""
    with redis.Redis(port=sentinel.port, password="outside") as client:
        return bool(client.sentinel_slaves("main"))


class CutOff(redis.Connection):
    """A connection that is cut off so many times before it has brought a command."""

    times = 0

    def can_read(self, timeout: float = 0.0) -> bool:
        if type(self).times:
            type(self).times -= 1
            raise redis.ConnectionError("cut")
        return bool(super().can_read(timeout))


def test_a_patient_client_waits_for_a_connection_that_is_cut_again_and_again(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        with connect(server.url, patient=True) as patient:
            patient.connection_pool.connection_class = CutOff
            CutOff.times = 5
            assert patient.ping()
            patient.connection_pool.disconnect()
            CutOff.times = 5
            with patient.pipeline() as pipe:  # as of a heartbeat
                pipe.set("a", 1)
                assert pipe.execute() == [True]
        with connect(server.url) as hurried:
            hurried.connection_pool.connection_class = CutOff
            CutOff.times = 5
            with pytest.raises(redis.ConnectionError):
                hurried.ping()
        CutOff.times = 0


def test_a_write_waits_for_room() -> None:
    answers = [redis.exceptions.OutOfMemoryError("full"), redis.exceptions.ReadOnlyError("a copy")]

    def write() -> str:
        if answers:
            raise answers.pop()
        return "written"

    assert patiently(write, pause_s=0.0) == "written"
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        patiently(lambda: (_ for _ in ()).throw(redis.ResponseError("WRONGTYPE Operation against a key")))


@pytest.mark.parametrize(
    ("change", "back"),
    [
        ({"min-replicas-to-write": "1"}, {"min-replicas-to-write": "0"}),
        ({"maxmemory": "1"}, {"maxmemory": "0"}),
        (("replicaof", "127.0.0.1", "1"), ("replicaof", "no", "one")),
    ],
    ids=["too few copies", "full", "a copy itself"],
)
def test_a_redis_that_takes_no_writes_for_now(tmp_path: Path, change: Any, back: Any) -> None:
    """Single commands and transactions; what no waiting helps against is raised."""

    def done(words: Any) -> None:
        if isinstance(words, dict):
            admin.config_set(*next(iter(words.items())))
        else:
            admin.execute_command(*words)

    def together() -> None:
        with admin.pipeline() as pipe:
            pipe.incr("a")
            pipe.incr("b")
            pipe.execute()

    with EmbeddedRedis(tmp_path) as server, connect(server.url) as admin:
        admin.set("text", "x")
        done(change)
        for write in (lambda: admin.incr("a"), together):
            with pytest.raises(redis.ResponseError) as caught:
                write()
            assert passes(caught.value)
            with left_out_while_away():
                write()
        assert admin.get("text") == b"x" and admin.get("a") is None
        check(server.url)
        done(back)
        together()
        for wrong in (lambda: admin.hget("text", "field"), lambda: admin.execute_command("NOTHING")):
            with pytest.raises(redis.ResponseError) as caught, left_out_while_away():
                wrong()
            assert not passes(caught.value)
