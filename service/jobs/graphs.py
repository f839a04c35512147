"""Imported models, made once and kept for a while: uploads, requests and runs read the same one.

Knows nothing of HTTP or queues.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading

from automap.errors import ModelError
from automap.records import to_json
from ir.graph import Graph
from ir.serialize import graph_from_bytes, graph_to_bytes
from service.jobs.run_job import JobRequest, import_graph
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
    if (known := kept(store, model_id, request)) is not None:
        return known
    data = store.model_bytes(model_id)
    if data is None:
        repair = "Upload the file first: POST /v1/models."
        raise ModelError("no such model", field="model_id", value=model_id, repair=repair)
    with IMPORTS:
        graph = import_graph(data, request)
    keep(store, model_id, request, graph)
    return graph


def kept(store: Store, model_id: str, request: JobRequest) -> Graph | None:
    """The graph of a stored model if it has been imported lately, else None."""
    found = store.graph(_key(model_id, request))
    # The canonical bytes leave out which file they came from; here that is known.
    return None if found is None else dataclasses.replace(graph_from_bytes(found), sha256=model_id)


def load_bytes(store: Store, model_id: str, request: JobRequest) -> bytes:
    """The graph of a stored model as bytes, for another process; empty for a named model, which is built there.

    Raises:
        ModelError: see `load`.
    """
    if request.model.zoo:
        return b""
    return store.graph(_key(model_id, request)) or graph_to_bytes(load(store, model_id, request))


def keep(store: Store, model_id: str, request: JobRequest, graph: Graph) -> None:
    """Keeps a graph that was imported outside the store."""
    store.add_graph(_key(model_id, request), graph_to_bytes(graph))


def _key(model_id: str, request: JobRequest) -> str:
    """Digest of everything that `import_graph` reads."""
    reads = [model_id, to_json(request.model), request.hints.get("parameters"), request.training.get("loss")]
    return hashlib.sha256(json.dumps(reads, sort_keys=True).encode()).hexdigest()
