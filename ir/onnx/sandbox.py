"""Import in a child process with limits: what an upload can do ends with the child.

Parent and child speak JSON over pipes: the upload goes in after one line of options, the Graph (or the error) comes
back. The child imports `ir` only. Run by `python -m ir.onnx.sandbox`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ir.errors import ModelError, ModelTooExpensive
from ir.graph import Graph
from ir.lifetime import die_with_parent

GIB = 1 << 30
DEFAULT_MEMORY_BYTES = 2 * GIB
DEFAULT_CPU_S = 60
DEFAULT_WALL_S = 90.0
ERRORS: Mapping[str, type[ModelError]] = {"ModelError": ModelError, "ModelTooExpensive": ModelTooExpensive}


def import_model(
    data: bytes,
    *,
    name: str = "",
    dims: Mapping[str, int] | None = None,
    parameters: Sequence[str] = (),
    batch_dims: Mapping[str, int | None] | None = None,
    loss: str | None = None,
    max_bytes: int | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    cpu_s: int = DEFAULT_CPU_S,
    wall_s: float = DEFAULT_WALL_S,
) -> Graph:
    """`ir.onnx.load.load_model` in a child process.

    Args:
        data: the upload.
        name: see `load_model`, like the next four.
        dims: see there.
        parameters: see there.
        batch_dims: see there.
        loss: see there.
        max_bytes: cap on the upload, default 64 MiB.
        memory_bytes: address space of the child.
        cpu_s: its processor time.
        wall_s: its wall-clock time.

    Raises:
        ModelError: the model is refused, as `load_model` says.
        ModelTooExpensive: the child was ended by a limit or died.
    """
    options = {
        "name": name,
        "dims": dict(dims or {}),
        "parameters": list(parameters),
        "batch_dims": dict(batch_dims or {}),
        "loss": loss,
        "max_bytes": max_bytes,
        "memory_bytes": memory_bytes,
        "cpu_s": cpu_s,
        "size": len(data),
        "parent": os.getpid(),
    }
    # Checked here too: an oversized upload need not be copied to a child.
    if max_bytes is not None and len(data) > max_bytes:
        raise ModelTooExpensive(
            f"the file is larger than {max_bytes} bytes",
            field="model",
            value=f"{len(data)} bytes",
            repair="Strip the weights first: only shapes are needed.",
        )
    root = str(Path(__file__).resolve().parents[2])
    environment = {
        k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
    }
    environment |= {
        "PYTHONPATH": root,
        "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "upb",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "ir.onnx.sandbox"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
        close_fds=True,
    )
    try:
        out, _ = child.communicate(json.dumps(options).encode() + b"\n" + data, timeout=wall_s)
    except subprocess.TimeoutExpired:
        raise _expensive(f"took longer than {wall_s:g} s", "wall clock") from None
    finally:
        _end(child)
    if child.returncode != 0 or not out:
        raise _expensive(_why(child.returncode, cpu_s, memory_bytes), f"exit status {child.returncode}")
    head, _, body = out.partition(b"\n")
    answer = json.loads(head)
    if "error" in answer:
        kind = ERRORS.get(answer["error"], ModelError)
        raise kind(answer["message"], field=answer["field"], value=answer["value"], repair=answer["repair"])
    return Graph.from_bytes(body)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    child.wait()


def _why(status: int, cpu_s: int, memory_bytes: int) -> str:
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"used more than {cpu_s} s of processor time or was ended"
    return f"needed more than {memory_bytes / GIB:g} GiB of memory or failed"


def _expensive(what: str, value: str) -> ModelTooExpensive:
    return ModelTooExpensive(
        f"reading the model {what}",
        field="model",
        value=value,
        repair="Strip the weights and simplify the graph, or raise the import limits.",
    )


def _limit(memory_bytes: int, cpu_s: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def main() -> int:
    """The child: options and upload from stdin, the answer to stdout."""
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    options: dict[str, Any] = json.loads(stdin.readline())
    die_with_parent(signal.SIGKILL, options.pop("parent"))
    _limit(options.pop("memory_bytes"), options.pop("cpu_s"))
    data = stdin.read(options.pop("size"))
    max_bytes = options.pop("max_bytes")
    try:
        from ir.onnx.guard import Limits
        from ir.onnx.load import load_model

        limits = Limits() if max_bytes is None else Limits(max_bytes=max_bytes)
        graph = load_model(data, limits=limits, **options)
        answer: dict[str, str] = {"ok": "graph"}
        body = graph.to_bytes()
    except ModelError as error:
        answer = {
            "error": type(error).__name__,
            "message": error.message,
            "field": error.field,
            "value": error.value,
            "repair": error.repair,
        }
        body = b""
    except MemoryError:
        return 3
    stdout.write(json.dumps(answer).encode() + b"\n" + body)
    stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
