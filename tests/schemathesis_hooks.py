"""What schemathesis sends where the document says that a body is a model file: models, and bytes that are none."""

import importlib.util
from pathlib import Path

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
