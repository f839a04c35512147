"""Imports uploads in a restricted child process, so that a hostile upload can harm only that child.

Parent and child communicate over a socket: the parent sends one line of options (JSON) and the upload, the child
returns the graph or the error. Every upload has its own child, forked by a process that has imported `ir` but has read
no upload (`ir.onnx.fork_server`). Before the child parses the upload, it gives up the ability to open files and sockets
and to start processes and, if the kernel supports it, its privileges (namespaces) and all system calls that a
computation does not need (seccomp). Restrictions that the kernel does not support are logged once by the parent. The
parent never imports onnx. The forking process is started by `python -m ir.onnx.sandbox`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import json
import logging
import mmap
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Unpack

from ir.errors import ModelError, ModelTooExpensive, too_expensive
from ir.graph import Graph
from ir.onnx.fork_server import TASK_FILE, ForkServer, serve
from ir.onnx.namespaces import leave_others
from ir.onnx.options import ReadOptions
from ir.onnx.readers.limits import LARGEST_FILE, check_size
from ir.onnx.system_calls import keep_computing_only
from ir.serialize import graph_from_bytes, graph_to_bytes

LOG = logging.getLogger("automap.import")

MIB = 1 << 20
GIB = 1 << 30
PARSED_BYTES = 160 * MIB
"""Largest number of bytes of the upload and its parsed messages (measured: a typical file takes about twice its size, a
file of tiny messages 150 times its size)."""
COPIES = 4
"""Times the size of a file that taking out its weights may need in memory: the file as it is mapped, its bytes, the
parsed message, and copies of weights that are compared (measured: 3.5 times for a VGG-19 of 575 MB)."""
EXTERNAL_DATA = b"\x0a\x08location\x12"
"""Key of an ONNX file under which a tensor names the other file that holds its data."""
OUT_OF_MEMORY = 3
"""Exit status of a child that ran out of memory."""
ERRORS: Mapping[str, type[ModelError]] = {"ModelError": ModelError, "ModelTooExpensive": ModelTooExpensive}

COMMAND = (sys.executable, "-P", "-m", "ir.onnx.sandbox")


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """Limits of one import (assumed)."""

    max_bytes: int = 64 * MIB
    """Bytes of the upload."""
    memory_bytes: int = 2 * GIB
    """Address space of the child."""
    cpu_s: int = 60
    """Processor time of the child, in seconds."""
    wall_s: float = 90.0
    """Wall-clock time of the child, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """The result of an import in a child process."""

    summary: Mapping[str, Any]
    """See `ir.summary.summarize`."""
    graph: bytes
    """The Graph as canonical bytes (`ir.serialize`), not parsed yet."""


def import_model(data: bytes, *, limits: SandboxLimits | None = None, **options: Unpack[ReadOptions]) -> Graph:
    """Reads an upload as `ir.onnx.load.load_model` does, in a child process.

    Args:
        data: bytes of the upload.
        limits: bounds on the upload and on the child.
        options: see `ReadOptions`.

    Raises:
        ModelError: as for `load_model`.
        ModelTooExpensive: the child exceeded a limit or died.
    """
    return graph_from_bytes(import_bytes(data, limits=limits, **options).graph)


def import_bytes(data: bytes, *, limits: SandboxLimits | None = None, **options: Unpack[ReadOptions]) -> Imported:
    """Like `import_model`, but returns the graph as bytes, with its summary, for a process that only passes it on.

    Args:
        data: bytes of the upload.
        limits: bounds on the upload and on the child.
        options: see `ReadOptions`.

    Raises:
        ModelError: see `import_model`.
    """
    limits = limits or SandboxLimits()
    # Checked here too: an oversized upload need not be copied to a child.
    check_size(len(data), limits.max_bytes)
    order = {"options": options, "limits": asdict(limits), "size": len(data)}
    answer, body = _asked(json.dumps(order).encode() + b"\n" + data, limits)
    return Imported(summary=answer["summary"], graph=body)


def needs_strip(file: IO[bytes]) -> bool:
    """Whether an open file is too large to be read as it is, or has weights in other files: see `strip_upload`."""
    size = os.fstat(file.fileno()).st_size
    if not 0 < size <= SandboxLimits().max_bytes:
        return size > 0
    with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
        return mapped.find(EXTERNAL_DATA) >= 0


def strip_upload(file: IO[bytes], *, limits: SandboxLimits | None = None, parameters: Sequence[str] = ()) -> bytes:
    """Takes the weights out of an upload as `ir.onnx.strip.strip` does, in a child process.

    Args:
        file: the upload, an open file of the system; it is read from its beginning, in place.
        limits: bounds on the child, whose memory may be `COPIES` times the size of the file in addition.
        parameters: globs that match the names of weights, for files whose exporter did not mark them.

    Raises:
        ModelError: the file is no ONNX model, or a small constant that is needed lies in another file.
        ModelTooExpensive: it has more than `LARGEST_FILE` bytes, or the child exceeded a limit or died.
    """
    size = os.fstat(file.fileno()).st_size
    check_size(size, LARGEST_FILE)
    limits = limits or SandboxLimits()
    limits = replace(limits, memory_bytes=limits.memory_bytes + COPIES * size)
    order = {"parameters": list(parameters), "limits": asdict(limits), "size": size}
    return _asked(json.dumps(order).encode() + b"\n", limits, file.fileno())[1]


def _asked(task: bytes, limits: SandboxLimits, file: int | None = None) -> tuple[dict[str, Any], bytes]:
    """The header and the body of the answer of a child; see `import_bytes` for the errors raised."""
    try:
        out, status = fork_server().ask(task, limits.wall_s, file)
    except TimeoutError:
        raise _expensive(f"took longer than {limits.wall_s:g} s", "wall clock") from None
    if status != 0 or not out:
        raise _expensive(_why(status, limits), f"exit status {status}")
    head, _, body = out.partition(b"\n")
    answer: dict[str, Any] = json.loads(head)
    _tell(tuple(answer.pop("refused", ())))
    if "error" in answer:
        raise ERRORS.get(answer.pop("error"), ModelError)(**answer)
    return answer, body


@functools.cache
def fork_server() -> ForkServer:
    """The process that forks the children of this one; it is started by the first import, or by `start`."""
    return ForkServer(COMMAND, environment())


@functools.cache
def _tell(refused: tuple[str, ...]) -> None:
    """Logs, once per process, which restrictions of the child this system does not support."""
    if refused:
        LOG.info("files are read with limits and without %s: the system refuses it", " and ".join(refused))


def environment() -> dict[str, str]:
    """Environment of the child: no secrets of the parent; protobuf in C, since its Python parser has no limits."""
    kept = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
    return {key: value for key, value in os.environ.items() if key in kept} | {
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "upb",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _why(status: int, limits: SandboxLimits) -> str:
    """Description of the reason for which a child ended with this exit status."""
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"used more than {limits.cpu_s} s of processor time or was ended"
    if status == OUT_OF_MEMORY:
        return f"needed more than {limits.memory_bytes / GIB:g} GiB of memory"
    return f"failed, or needed more than {limits.memory_bytes / GIB:g} GiB of memory"


def _expensive(what: str, value: str) -> ModelTooExpensive:
    repair = "Strip the weights and simplify the graph, or raise the import limits."
    return too_expensive(f"reading the model {what}", value, repair)


# The child


def _limit(limits: SandboxLimits) -> None:
    """Limits the memory, processor time and files of this process."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def forbid_opening() -> None:
    """Prevents this process from opening files or connections and from starting processes."""
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def _address_space() -> int:
    """Bytes of address space that this process has mapped; 0 if the system does not report it."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text("utf-8").split()[0]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


@contextlib.contextmanager
def _parse_budget(mapped: int, size: int) -> Iterator[None]:
    """Lowers the memory limit while protobuf parses the upload: it creates messages before they can be counted."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if mapped:
        resource.setrlimit(resource.RLIMIT_AS, (min(soft, mapped + max(PARSED_BYTES - size, size + 64 * MIB)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _wall_in() -> list[str]:
    """Applies all restrictions to this process; returns the names of those that the system does not support."""
    forbid_opening()
    walls = {"namespaces": leave_others, "a filter of system calls": keep_computing_only}
    return [name for name, build in walls.items() if not build()]


def _read(source: IO[bytes], size: int, max_bytes: int, options: ReadOptions) -> tuple[dict[str, Any], bytes]:
    """Reads the upload; returns the header of the answer, and the graph as canonical bytes."""
    from ir.onnx.load import read_graph
    from ir.onnx.readers.guard import parse
    from ir.onnx.readers.limits import Limits
    from ir.summary import summarize

    data = source.read(size)
    mapped = _address_space()
    refused = _wall_in()
    with _parse_budget(mapped, size):
        model = parse(data, Limits(max_bytes=max_bytes))
    sha256 = hashlib.sha256(data).hexdigest()
    del data
    graph = read_graph(model, sha256=sha256, **options)
    return {"refused": refused, "summary": summarize(graph)}, graph_to_bytes(graph)


def _strip(size: int, parameters: Sequence[str]) -> tuple[dict[str, Any], bytes]:
    """Takes the weights out of the file of the task; returns the header of the answer, and the stripped file."""
    from ir.onnx.strip import strip

    with mmap.mmap(TASK_FILE, size, access=mmap.ACCESS_READ) as mapped:
        os.close(TASK_FILE)
        refused = _wall_in()
        view = memoryview(mapped)
        try:
            return {"refused": refused}, strip(view, parameters=parameters).data
        finally:
            view.release()


def answer(source: IO[bytes], sink: IO[bytes]) -> int:
    """The child: an order and perhaps an upload from `source`, the answer to `sink`; returns the exit status."""
    order: dict[str, Any] = json.loads(source.readline())
    limits = SandboxLimits(**order["limits"])
    _limit(limits)
    body = b""
    try:
        if "options" in order:
            head, body = _read(source, order["size"], limits.max_bytes, order["options"])
        else:
            head, body = _strip(order["size"], order["parameters"])
    except ModelError as error:
        head = {"error": type(error).__name__, **error.texts}
    except MemoryError:
        return OUT_OF_MEMORY
    sink.write(json.dumps(head).encode() + b"\n" + body)
    sink.flush()
    return 0


def _rehearse() -> None:
    """Reads a small file before any child is forked, so that children inherit everything that is created lazily."""
    from onnx import TensorProto, helper

    from ir.onnx.load import load_model
    from ir.summary import summarize

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy")
    stored = [
        TensorProto(name=name, dims=dims, data_type=TensorProto.FLOAT)
        for name, dims in (("up.weight", (4, 4)), ("up.bias", (4,)))
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "up.weight"], ["h"], name="/up/MatMul"),
        helper.make_node("Add", ["h", "up.bias"], ["y"], name="/up/Add"),
    ]
    opsets = [helper.make_opsetid("", 20)]
    model = helper.make_model(helper.make_graph(nodes, "rehearsal", [x], [y], stored), opset_imports=opsets)
    graph_from_bytes(graph_to_bytes(graph := load_model(model.SerializeToString())))
    summarize(graph)


def main() -> None:
    """Runs the process that forks the children."""
    _rehearse()
    # Garbage collection in a child would copy the shared pages of all imported modules, and a child is short-lived.
    gc.disable()
    gc.freeze()
    serve(lambda: answer(sys.stdin.buffer, sys.stdout.buffer))


if __name__ == "__main__":
    main()
