"""Imported models, made once and kept for a while: uploads, requests and runs read the same one.

Knows nothing of HTTP or queues.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from automap.errors import ModelError
from automap.records import to_json
from ir.graph import Graph
from ir.onnx.sandbox import Imported
from ir.serialize import graph_from_bytes
from service.jobs.run_job import JobRequest, import_file, import_graph
from service.jobs.store import Store

IMPORTS = threading.BoundedSemaphore(2)
"""To be held while a model file is in memory and read: each takes a few hundred MB, in a process of its own too."""


def load(store: Store, model_id: str, request: JobRequest) -> Graph:
    """The graph of a stored or named model.

    Raises:
        ModelError: the model is not stored, or cannot be read with the options of the request.
    """
    if request.model.zoo:
        return import_graph(b"", request)  # built sooner than read back
    # The canonical bytes leave out which file they came from; here that is known.
    return replace(graph_from_bytes(load_bytes(store, model_id, request)), sha256=model_id)


def load_bytes(store: Store, model_id: str, request: JobRequest) -> bytes:
    """The graph of a stored model as bytes, for another process; empty for a named model, which is built there.

    Raises:
        ModelError: see `load`.
    """
    if request.model.zoo:
        return b""
    if (known := store.graph(_key(model_id, request))) is not None:
        return known
    data = store.model_bytes(model_id)
    if data is None:
        repair = "Upload the file first: POST /v1/models."
        raise ModelError("no such model", field="model_id", value=model_id, repair=repair)
    with IMPORTS:
        found = import_file(data, request)
    keep(store, model_id, request, found)
    return found.graph


def kept_summary(store: Store, model_id: str, request: JobRequest) -> Mapping[str, Any] | None:
    """The summary of a stored model if it has been imported lately, else None."""
    return store.graph_summary(_key(model_id, request))


def keep(store: Store, model_id: str, request: JobRequest, found: Imported) -> None:
    """Keeps what was imported outside the store."""
    store.add_graph(_key(model_id, request), found.graph, found.summary)


def _key(model_id: str, request: JobRequest) -> str:
    """Digest of everything that `import_file` reads."""
    reads = [model_id, to_json(request.model), request.hints.get("parameters"), request.training.get("loss")]
    return hashlib.sha256(json.dumps(reads, sort_keys=True).encode()).hexdigest()
