"""Children that check requests, and price and draw plans for them, a few at a time; see `service.side_process`.

A child serves one request after another. If a request takes too long, its child is ended, and no other request is
affected. If a child dies otherwise, its request is given to another child once, because the request need not be the
cause.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread
from anyio import CapacityLimiter
from fastapi import HTTPException

from automap.records import to_json
from service.problems import limit

LOG = logging.getLogger("automap.api")
MOST = 2
"""Children (assumed: they must leave processors to the searches)."""
LIMIT_S = 60
"""Seconds that a request may take in a child, the start of the child included."""


class SideProcesses:
    """Children of one service; they are started when they are first needed.

    Args:
        most_waiting: requests that wait for a child; more are told to come again.
    """

    def __init__(self, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._closed = False
        self._limiter: CapacityLimiter | None = None

    async def ask(self, task: str, document: Mapping[str, Any], graph: bytes) -> dict[str, Any]:
        """What a child answers to a task.

        Args:
            task: one of `service.side_process.TASKS`.
            document: what the task needs: JSON types, and records, which become such in a thread.
            graph: the model, see `ir.serialize`.

        Raises:
            HTTPException: the task cannot be met, takes too long, or too many wait.
        """
        if self._limiter is None:
            self._limiter = CapacityLimiter(MOST)
        if self._limiter.statistics().tasks_waiting >= self._most_waiting:
            waiting = f"{self._most_waiting} wait"
            document = limit(
                503, "Too many requests are waiting", field=task, value=waiting, repair="Send it again shortly."
            )
            raise HTTPException(503, document, {"Retry-After": "5"})
        head = {"task": task, "document": document, "num_bytes": len(graph), "limit_s": LIMIT_S}
        line = await anyio.to_thread.run_sync(self._ask, head, graph, limiter=self._limiter)
        if not line:
            repair = "Give a smaller model, cluster or number of micro-batches."
            took = f"more than {LIMIT_S} s, or than its memory"
            title = "It took too long or too much memory"
            raise HTTPException(422, limit(422, title, field=task, value=took, repair=repair))
        answer: dict[str, Any] = json.loads(line)
        if "problem" in answer:
            raise HTTPException(answer["problem"]["status"], answer["problem"])
        found: dict[str, Any] = answer["found"]
        return found

    def close(self) -> None:
        """Ends the children."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for child in idle:
            _end(child)

    def _taken(self) -> subprocess.Popen[bytes] | None:
        """A child that has nothing to do, if there is one; one that was killed meanwhile is forgotten."""
        while True:
            with self._lock:
                child = self._idle.pop() if self._idle else None
            if child is None or child.poll() is None:
                return child
            _end(child)

    def _ask(self, head: Mapping[str, Any], graph: bytes) -> bytes:
        """The answer of a child, or of a second one; empty where it took too long or both died."""
        data, began = json.dumps(to_json(head)).encode() + b"\n" + graph, time.monotonic()
        line = self._asked(data)
        return line if line or time.monotonic() - began >= LIMIT_S else self._asked(data)

    def _asked(self, data: bytes) -> bytes:
        """A child's answer; empty where it died."""
        child = self._taken() or _start()
        assert child.stdin is not None and child.stdout is not None
        timer = threading.Timer(LIMIT_S, child.kill)
        timer.start()
        try:
            child.stdin.write(data)
            child.stdin.flush()
            line = child.stdout.readline()
        except OSError:
            line = b""
        finally:
            timer.cancel()
        with self._lock:
            if line and not self._closed:
                self._idle.append(child)
                return line
        _end(child)
        if not line:
            LOG.warning("a child that serves requests died with status %s", child.returncode)
        return line


def _start() -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    # It ends with its input, which ends with this process, however that ends.
    return subprocess.Popen(
        (sys.executable, "-P", "-m", "service.side_process"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # The address and password of the store are nothing for it.
        env={k: v for k, v in os.environ.items() if not k.startswith("AUTOMAP_")} | {"PYTHONPATH": path},
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what it had not read
                pipe.close()
    child.wait()
