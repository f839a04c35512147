"""Hostile files by the hundred: each is imported or refused with field, value and repair; never anything else."""

import contextlib
import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from ir.errors import ModelError
from ir.onnx.load import load_model
from ir.onnx.readers.limits import Limits
from ir.onnx.sandbox import SandboxLimits, import_model
from ir.serialize import graph_digest, graph_from_bytes, graph_to_bytes

PROCESSOR_S = 2.0
"""Of one file; the slowest takes a twentieth of it."""


def _module(name: str, path: Path):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


HERE = Path(__file__).resolve().parent
hostile = _module("automap_hostile", HERE / "hostile.py")
FILES = dict(hostile.hostile_files())
EXTERNAL = {name: data for name, data in FILES.items() if name.startswith("external_files")}


@contextlib.contextmanager
def budget(name: str):
    """Ends what takes too long."""

    def end(_signal: int, _frame: object) -> None:
        raise TimeoutError(name)

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, PROCESSOR_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def outcome(name: str, data: bytes) -> str:
    """How an import ends: a graph that survives a round trip, or a refusal that says what to do."""
    with budget(name):
        try:
            graph = load_model(data)
        except ModelError as error:
            assert error.field and error.value and error.repair, name
            assert f"{error}".isprintable(), name
            return type(error).__name__
        assert graph_digest(graph_from_bytes(graph_to_bytes(graph))) == graph_digest(graph), name
        return "imported"


@pytest.mark.slow
def test_hundreds_of_files():
    assert len(FILES) > 2000
    ends = [outcome(name, data) for name, data in FILES.items()]
    assert ends.count("ModelError") > 1000 and ends.count("imported") > 100


def test_the_bases_are_good():
    assert [outcome(name, build().SerializeToString()) for name, build in hostile.BASES.items()] == ["imported"] * 3


@pytest.mark.parametrize("name", EXTERNAL)
def test_external_data_is_refused(name):
    with pytest.raises(ModelError, match=r"external data|training graphs"):
        load_model(EXTERNAL[name])


@pytest.mark.parametrize("name", ["squeezenet", "bvlc_alexnet", "resnet50", *hostile.BASES])
def test_mutated_files(name, light):
    data = hostile.BASES[name]().SerializeToString() if name in hostile.BASES else light(name)
    for number, changed in enumerate(hostile.mutated(data, 100, seed=1)):
        outcome(f"{name} {number}", changed)


def test_escape_sequences_stay_out_of_errors():
    error = ModelError("\x1b[2Jgone", field="f\n", value="\x07", repair="r\x00")
    assert str(error).isprintable() and "\\x1b[2Jgone" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "function laughs, depth 60",
        "a million nodes",
        "30 million empty attributes",
        "a million inputs",
        "a million strings",
        "a function of 3,000 operands, called 40,000 times",
        "Tile to 2^50",
        "64 MiB of zeros",
    ],
)
def test_small_files_with_huge_contents_are_refused_within_time_and_memory(name):
    """All of them: benchmarks/import_limits.py, whose results are the figures."""
    measure = _module("automap_import_limits", HERE.parents[1] / "benchmarks" / "import_limits.py").measure
    _, cpu_s, peak_bytes, status, answer = measure(dict(hostile.bombs())[name]())
    assert status == 0 and answer["error"] and answer["repair"], answer
    assert peak_bytes <= 256 << 20
    assert cpu_s <= 2.0  # 1 s on a machine of its own


def test_what_has_no_name_is_refused_in_words():
    """An output and an attribute of an unknown type, both without a name."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 4]) for n in ("x", "y"))
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    for change in ("output", "attribute"):
        model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], [weight]))
        if change == "output":
            model.graph.output[0].name = ""
        else:
            model.graph.node[0].attribute.add(type=onnx.AttributeProto.SPARSE_TENSOR)
        with pytest.raises(ModelError) as fault:
            load_model(model.SerializeToString())
        assert fault.value.value and fault.value.repair


def test_an_expansion_to_more_dims_than_numpy_has_is_not_folded():
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    stored = [
        numpy_helper.from_array(value, name)
        for name, value in {"w": np.ones((4, 4), np.float32), "c": np.ones(1), "dims": np.ones(64, np.int64)}.items()
    ]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Expand", ["c", "dims"], ["many"])]
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], stored))
    assert outcome("64 dims", model.SerializeToString())


@pytest.mark.slow
def test_many_large_constants_stay_operators():
    graph = import_model(hostile.folded(700))
    assert sum(op.kind == "Constant" for op in graph.operators) <= 600
    assert len(graph.operators) >= 1400


@pytest.mark.slow
def test_the_child_opens_nothing():
    """Whatever a bug might do with a name in a file: no file and no process."""
    code = (
        "import ir.onnx.sandbox as s, os\n"
        "s.forbid_opening()\n"
        "for attempt in (lambda: open('/etc/hostname'), lambda: __import__('socket').socket(), lambda: os.pipe()):\n"
        "    try:\n"
        "        attempt()\n"
        "        print('opened')\n"
        "    except OSError:\n"
        "        pass\n"
    )
    done = subprocess.run([sys.executable, "-c", "import socket\n" + code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert Limits().max_bytes == SandboxLimits().max_bytes


# Fuzzing; `make fuzz` runs the same with more examples


@pytest.fixture(scope="module")
def seeds(light):
    return [build().SerializeToString() for build in hostile.BASES.values()] + [light("squeezenet")]


@settings(derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 3), st.integers(0, 2**32))
def test_changed_bytes_are_read_or_refused(seeds, which, seed):
    for changed in hostile.mutated(seeds[which], 2, seed):
        outcome(f"seed {which} {seed}", changed)


@settings(derandomize=True, max_examples=120)
@given(st.integers(0, 2**32))
def test_fuzzed_graphs(seed):
    outcome(f"graph {seed}", hostile.random_model(seed))
