"""What schemathesis sends where the document says that a body is a model file: models, and bytes that are none."""

import importlib.util
import re
import uuid
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import strategies as st

_ONNX = importlib.util.find_spec("onnx")
assert _ONNX is not None and _ONNX.submodule_search_locations is not None
LIGHT = Path(_ONNX.submodule_search_locations[0]) / "backend" / "test" / "data" / "light"

MODELS = [(LIGHT / "light_squeezenet.onnx").read_bytes()]
PROFILE = "\n".join(
    f"node{i} -- cell_{i} -- forward_compute_time={i}, backward_compute_time=5, activation_size=16, parameter_size=40"
    for i in (1, 2)
)
PROFILES = [PROFILE.encode(), f"{PROFILE}\nnode1 -- node2".encode()]

schemathesis.openapi.media_type(
    "application/octet-stream", st.one_of(st.sampled_from([*MODELS, *PROFILES]), st.binary(max_size=200))
)


@schemathesis.hook
def map_headers(context: schemathesis.HookContext, headers: dict[str, Any] | None) -> dict[str, Any] | None:
    """Every Idempotency-Key that may be sent is a new one: the same one with another body is refused, as it should."""
    for name, value in (headers or {}).items():
        if name.lower() == "idempotency-key" and isinstance(value, str) and re.fullmatch(r"[!-~]{1,255}", value):
            headers = {**(headers or {}), name: uuid.uuid4().hex}
    return headers
