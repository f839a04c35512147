"""Imported models are made once, and kept for whoever needs them next."""

from __future__ import annotations

from typing import Any

import httpx
import onnx
import pytest
from onnx import TensorProto, helper

from automap.plan import model_ref
from service.http.routes import models
from service.jobs.run_job import JobRequest, ModelOptions, import_file, import_graph


def with_symbolic_batch() -> bytes:
    """A small model whose batch has a name."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 8]) for name in "xy")
    weight = helper.make_tensor("w", TensorProto.FLOAT, [8, 8], [0.0] * 64)
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "net", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return onnx.ModelProto.SerializeToString(model)


def test_a_file_that_comes_again_is_not_imported_again(api: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[Any] = []

    def counted(data: bytes, request: JobRequest) -> Any:
        imported.append(dict(request.model.dims))
        return import_file(data, request)

    monkeypatch.setattr(models, "import_file", counted)
    data = with_symbolic_batch()
    first = api.post("/v1/models?name=mine&dim=N=2", content=data).json()
    for query in ("dim=N=2", "name=mine&dim=N=2"):
        assert api.post(f"/v1/models?{query}", content=data).json() == first
    assert imported == [{"N": 2}]
    assert api.post("/v1/models?dim=N=4", content=data).json()["id"] == first["id"]
    assert imported == [{"N": 2}, {"N": 4}]


def test_a_name_for_people_makes_no_other_model() -> None:
    """A plan of the service under a name can be exported on the command line, where the model has its own."""

    def built(zoo: str, name: str = "") -> Any:
        options = ModelOptions(zoo=zoo, name=name)
        return model_ref(import_graph(b"", JobRequest(cluster="8xA100", training={"global_batch": 8}, model=options)))

    mine = built("gpt2:layers=2", "mine")
    assert mine.name == "mine"
    assert mine.sha256 == built("gpt2:layers=2").sha256
    assert mine.sha256 != built("gpt2:layers=3", "mine").sha256
