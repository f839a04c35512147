"""Rolls of PyTorch's older exporter: two slices that are joined again, of which one may be empty."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from ir.errors import ModelError
from ir.onnx.load import load_model
from ir.onnx.strip import strip

MOST = np.iinfo(np.int64).max


def rolled(*parts: tuple[int, int], steps: int | None = None) -> bytes:
    """A file that joins rows of each sample, from `[start, end)` of each part, in front of a product."""
    numbers = {"axis": 1} | {
        f"{n}{i}": v for i, part in enumerate(parts) for n, v in zip(("s", "e"), part, strict=True)
    }
    numbers |= {} if steps is None else {"steps": steps}
    stored = [numpy_helper.from_array(np.array([v]), n) for n, v in numbers.items()]
    stored.append(numpy_helper.from_array(np.ones((4, 5), np.float32), "w"))
    more = [] if steps is None else ["steps"]
    nodes = [helper.make_node("Slice", ["x", f"s{i}", f"e{i}", "axis", *more], [f"part{i}"]) for i in range(len(parts))]
    nodes += [
        helper.make_node("Concat", [f"part{i}" for i in range(len(parts))], ["h"], axis=1),
        helper.make_node("MatMul", ["h", "w"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ("N", 6, 4))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [x], [y], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()


@pytest.mark.parametrize(
    ("parts", "steps"),
    [(((0, MOST), (0, 0)), None), (((0, MOST), (0, 0)), 1), (((-2, MOST), (0, -2)), None), (((6, 6), (0, 6)), 1)],
    ids=["by zero", "by zero with steps", "by two", "by all"],
)
def test_a_roll_has_all_rows(parts, steps):
    data = rolled(*parts, steps=steps)
    for file in (data, strip(data).data):
        graph = load_model(file)
        assert graph.tensors["y"].shape == (1, 6, 5) and graph.forward_flops == 2 * 6 * 4 * 5


def test_what_is_joined_of_nothing_is_refused():
    with pytest.raises(ModelError, match=r"\(1, 0, 4\)"):
        load_model(rolled((0, 0), (3, 3)))
