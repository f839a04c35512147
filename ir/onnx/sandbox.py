"""Import in a child process with limits: what an upload can do ends with the child.

Parent and child speak JSON over pipes: the upload goes in after one line of options, the Graph (or the error) comes
back. The child imports `ir` only; before it parses the upload it gives up opening files, sockets and processes. The
parent never imports onnx. Run by `python -m ir.onnx.sandbox`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ir.errors import ModelError, ModelTooExpensive
from ir.graph import Graph
from ir.lifetime import die_with_parent
from ir.serialize import graph_from_bytes, graph_to_bytes

MIB = 1 << 20
GIB = 1 << 30
DEFAULT_MAX_BYTES = 64 * MIB
DEFAULT_MEMORY_BYTES = 2 * GIB
DEFAULT_CPU_S = 60
DEFAULT_WALL_S = 90.0
PARSED_BYTES = 160 * MIB
"""Upload and parsed messages together; a real file takes about twice its size, tiny messages take 150 times theirs."""
OUT_OF_MEMORY = 3
"""Exit status."""
ERRORS: Mapping[str, type[ModelError]] = {"ModelError": ModelError, "ModelTooExpensive": ModelTooExpensive}

COMMAND = (sys.executable, "-P", "-m", "ir.onnx.sandbox")


def import_model(
    data: bytes,
    *,
    name: str = "",
    dims: Mapping[str, int] | None = None,
    parameters: Sequence[str] = (),
    batch_dims: Mapping[str, int | None] | None = None,
    loss: str | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
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
        max_bytes: cap on the upload.
        memory_bytes: address space of the child.
        cpu_s: its processor time.
        wall_s: its wall-clock time.

    Raises:
        ModelError: the model is refused, as `load_model` says.
        ModelTooExpensive: the child was ended by a limit or died.
    """
    # Checked here too: an oversized upload need not be copied to a child.
    if len(data) > max_bytes:
        raise ModelTooExpensive(
            f"the file is larger than {max_bytes} bytes",
            field="model",
            value=f"{len(data)} bytes",
            repair="Strip the weights first: only shapes are needed (`automap strip model.onnx`).",
        )
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
    child = subprocess.Popen(
        COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(),
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
    return graph_from_bytes(body)


def environment() -> dict[str, str]:
    """Variables of the child: no secrets of the parent's, protobuf's C parser (the pure Python one has no limits)."""
    kept = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
    return {key: value for key, value in os.environ.items() if key in kept} | {
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "upb",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


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
    if status == OUT_OF_MEMORY:
        return f"needed more than {memory_bytes / GIB:g} GiB of memory"
    return f"failed, or needed more than {memory_bytes / GIB:g} GiB of memory"


def _expensive(what: str, value: str) -> ModelTooExpensive:
    return ModelTooExpensive(
        f"reading the model {what}",
        field="model",
        value=value,
        repair="Strip the weights and simplify the graph, or raise the import limits.",
    )


# The child


def _limit(memory_bytes: int, cpu_s: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _shut() -> None:
    """From here on nothing can be opened or started: neither a file beside the model nor a connection."""
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def _address_space() -> int:
    """Bytes mapped now; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


@contextlib.contextmanager
def _parse_budget(mapped: int, size: int) -> Iterator[None]:
    """Less memory while the upload is parsed: protobuf stops by itself, long before anything could count messages."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if mapped:
        resource.setrlimit(resource.RLIMIT_AS, (min(soft, mapped + max(PARSED_BYTES - size, size + 64 * MIB)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _read(size: int, max_bytes: int, options: Mapping[str, Any]) -> bytes:
    """The answer to the upload on stdin, which nothing refers to any more once it is parsed."""
    from ir.onnx.load import read_graph
    from ir.onnx.readers.guard import Limits, parse

    data = sys.stdin.buffer.read(size)
    mapped = _address_space()
    _shut()
    with _parse_budget(mapped, size):
        model = parse(data, Limits(max_bytes=max_bytes))
    sha256 = hashlib.sha256(data).hexdigest()
    del data
    return graph_to_bytes(read_graph(model, sha256=sha256, **options))


def main() -> int:
    """The child: options and upload from stdin, the answer to stdout."""
    options: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    die_with_parent(signal.SIGKILL, options.pop("parent"))
    _limit(options.pop("memory_bytes"), options.pop("cpu_s"))
    answer, body = {"ok": "graph"}, b""
    try:
        body = _read(options.pop("size"), options.pop("max_bytes"), options)
    except ModelError as error:
        answer = {
            "error": type(error).__name__,
            "message": error.message,
            "field": error.field,
            "value": error.value,
            "repair": error.repair,
        }
    except MemoryError:
        return OUT_OF_MEMORY
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n" + body)
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
