"""Graph to JSON and back."""

import json

import pytest

from ir.onnx.load import load_model
from ir.serialize import graph_digest, graph_from_bytes, graph_from_json, graph_to_bytes, graph_to_json


@pytest.mark.parametrize("name", ["gpt", "bert", "vit", "resnet"])
def test_round_trip_is_exact(name, export):
    graph = load_model(export(name), loss="cross_entropy")
    again = graph_from_json(json.loads(json.dumps(graph_to_json(graph))))
    assert again == graph and again.pieces == graph.pieces and again.sha256 == graph.sha256
    assert graph_digest(graph_from_bytes(graph_to_bytes(graph))) == graph_digest(graph)


def test_infinities_survive(export):
    graph = load_model(export("llama"))
    constants = [dict(op.attributes).get("value") for op in graph if op.kind == "Constant"]
    assert any("inf" in str(c) for c in constants)
    assert b"Infinity" not in graph_to_bytes(graph)
    assert graph_from_bytes(graph_to_bytes(graph)) == graph


@pytest.mark.parametrize("bad", [b"{}", b"[]", b"nonsense", b'{"schema": "automap.graph/1"}', b'{"schema": 2}'])
def test_other_documents_are_refused(bad):
    with pytest.raises(ValueError):
        graph_from_bytes(bad)
