"""The interpreter (and with it the importer) against the node cases that onnx ships, and its refusals."""

import warnings
from collections import Counter

import numpy as np
import onnx
import pytest
import torch
from long_cases import long_but
from onnx import TensorProto, helper, numpy_helper
from oracle_cases import NOT_EXECUTED

from automap.runtime.operators import FUNCTIONS
from automap.runtime.operators.apply import apply, run
from ir.build import GraphBuilder, Stated
from ir.errors import ModelError
from ir.onnx.load import load_model
from ir.operators import KINDS

VALUES = {
    "Reshape": (1,), "Expand": (1,), "Slice": (1, 2, 3, 4), "Squeeze": (1,), "Unsqueeze": (1,), "Split": (1,),
    "Tile": (1,), "Pad": (1, 2, 3), "Trilu": (1,), "TopK": (1,), "CumSum": (1,), "CumProd": (1,), "Clip": (1, 2),
    "OneHot": (1, 2), "Resize": (1, 2, 3), "Upsample": (1,), "ConstantOfShape": (0,), "Range": (0, 1, 2),
    "Dropout": (1, 2), "ReduceSum": (1,), "ReduceMean": (1,), "ReduceMax": (1,), "ReduceMin": (1,),
    "ReduceProd": (1,), "ReduceL1": (1,), "ReduceL2": (1,), "ReduceLogSum": (1,), "ReduceLogSumExp": (1,),
    "ReduceSumSquare": (1,), "AffineGrid": (1,), "DFT": (1, 2), "Col2Im": (1, 2),
    "STFT": (1, 3),
}  # fmt: skip
"""Operands that the importer must know: stored in the file instead of fed."""

OTHERWISE = {
    "test_batchnorm_epsilon", "test_batchnorm_example",  # inference: the interpreter trains
    "test_bernoulli", "test_bernoulli_double", "test_bernoulli_seed", "test_bernoulli_expanded",
    "test_bernoulli_double_expanded", "test_bernoulli_seed_expanded", "test_training_dropout",
    "test_training_dropout_default", "test_training_dropout_mask", "test_training_dropout_default_mask",  # random
}  # fmt: skip
"""Cases that run and may not agree."""

REFUSALS = (
    "it reads a key-value cache",
    "no data input has this name (got past_key)",  # the cache is left out
    "a state of earlier tokens is not for training",
    "it reads lengths of keys as data",
    "4 outputs, 1 are modelled",
    "depends on data",
    "blocked quantization",
    "the mask of a Dropout is used",
    "an ellipsis in the equation",
    "a value is not a tensor",
    "this coordinate mode of Resize is not executed",
    "unsupported type",
    "has no size",
    "not computed by torch in this type",
    "cannot be computed with this type",
    "quantization to a floating-point type",
    "its result would be of shape",  # an empty one
    "term Aii",  # a diagonal
    "the version of the operator set is not known",
)
"""What may be said of a case that is not run."""


def known(case):
    kinds = {node.op_type for node in case.model.graph.node}
    standard = all(node.domain == "" for node in case.model.graph.node)
    return standard and kinds <= {*KINDS, "Shape", "Size"} and case.name.split("_")[1] != "castlike"


def plain(array):
    """Data as torch has it; None for types of numpy's extensions."""
    array = numpy_helper.to_array(array) if isinstance(array, TensorProto) else array
    if not isinstance(array, (np.ndarray, np.generic)) or array.dtype.isbuiltin != 1 or array.dtype.kind not in "biuf":
        return None
    return np.asarray(array)


def importable(model, arrays):
    """The model with operands that it must know stored, and a parameter, without which no model can be trained."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    stored = {n for node in graph.node for i, n in enumerate(node.input) if i in VALUES.get(node.op_type, ())}
    feeds = {}
    inputs = list(graph.input)
    del graph.input[:]
    for declared, array in zip(inputs, arrays, strict=True):
        if declared.name in stored:
            graph.initializer.append(numpy_helper.from_array(array, declared.name))
        else:
            graph.input.append(declared)
            feeds[declared.name] = array
    one = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("trained_parameter", "trained_result")
    ]
    graph.input.append(one[0])
    graph.output.append(one[1])
    graph.node.append(helper.make_node("Relu", ["trained_parameter"], ["trained_result"]))
    return made, feeds


def check(case, inputs, outputs):
    model, feeds = importable(case.model, inputs)
    used = {n for node in model.graph.node for n in node.input}
    graph = load_model(
        model.SerializeToString(), parameters=["trained_parameter"], batch_dims={n: None for n in feeds if n in used}
    )
    tensors = {name: torch.from_numpy(array.copy()) for name, array in feeds.items()}
    found = run(graph, {**tensors, "trained_parameter": torch.ones(1)}, 1)
    for name, wanted in zip(graph.outputs, outputs, strict=False):
        got = found[name].numpy()
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), case.name
        if case.name not in OTHERWISE:
            np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4, err_msg=case.name)


@pytest.mark.slow
@pytest.mark.parametrize("every", long_but([3], [3, 1]))
def test_node_cases_of_onnx_agree(every):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx's own arithmetic overflows on purpose
        from onnx.backend.test.loader import load_model_tests

        cases = [case for case in load_model_tests(kind="node") if known(case)][::every]
    outcome, wrong = Counter(), []
    for case in cases:
        inputs, outputs = ([plain(a) for a in side] for side in case.data_sets[0])
        if any(a is None for a in (*inputs, *outputs)):
            outcome["not a torch type"] += 1
            continue
        try:
            check(case, inputs, outputs)
            outcome["agrees"] += 1
        except ModelError as error:
            outcome["refused"] += 1
            if not any(reason in str(error) for reason in REFUSALS):
                wrong.append(f"{case.name}: {error}")
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)
    assert outcome["agrees"] > 1000 / every, outcome


def test_every_kind_of_the_table_is_executed():
    assert set(FUNCTIONS) == {kind for kind, known in KINDS.items() if known.entry.__module__ not in NOT_EXECUTED}


def test_a_graph_runs_at_any_number_of_samples_and_is_differentiable():
    builder = GraphBuilder()
    builder.input("x", (1, 4))
    builder.parameter("w", (4, 3))
    builder.add("MatMul", ["x", "w"], ["y"])
    builder.add("Reshape", ["y"], ["z"], attributes={"shape": (1, 3, 1)})
    graph = builder.finish(["z"])
    w = torch.ones(4, 3, requires_grad=True)
    for samples in (1, 5):
        result = run(graph, {"x": torch.ones(samples, 4), "w": w}, samples)["z"]
        assert result.shape == (samples, 3, 1)
        (gradient,) = torch.autograd.grad(result.sum(), w)
        assert (gradient == samples).all()


@pytest.mark.parametrize("kind", ["Mul", "Add", "Div"])
def test_rows_that_all_samples_have_are_repeated_for_each(kind):
    """The rows of all samples are one dim, as behind an EmbeddingBag or in front of experts."""
    builder = GraphBuilder()
    builder.input("x", (1, 4, 8))
    builder.parameter("w", (4, 1))
    builder.add("Reshape", ["x"], ["rows"], attributes={"shape": (4, 8)})
    builder.add(kind, ["rows", "w"], ["y"])
    builder.add("Reshape", ["y"], ["z"], attributes={"shape": (1, 4, 8)})
    graph = builder.finish(["z"])
    generator = torch.Generator().manual_seed(0)
    w = torch.rand(4, 1, generator=generator).add(1.0).requires_grad_()
    one = [torch.rand(1, 4, 8, generator=generator) for _ in range(3)]
    parts = torch.cat([run(graph, {"x": x, "w": w}, 1)["z"] for x in one])
    whole = run(graph, {"x": torch.cat(one), "w": w}, 3)["z"]
    assert torch.equal(whole, parts)
    torch.testing.assert_close(torch.autograd.grad(whole.sum(), w), torch.autograd.grad(parts.sum(), w))


def test_missing_and_misshapen_tensors_are_named():
    builder = GraphBuilder()
    builder.input("x", (1, 4))
    builder.add("Relu", ["x"], ["y"])
    graph = builder.finish(["y"])
    with pytest.raises(ModelError, match="input x has no value"):
        run(graph, {}, 1)
    with pytest.raises(ModelError, match="another shape"):
        run(graph, {"x": torch.ones(1, 4)}, 2)


def test_an_unknown_kind_is_refused():
    builder = GraphBuilder()
    builder.input("x", (1, 4))
    builder.add("my.Kind", ["x"], ["y"], stated=Stated(shapes=[((1, 4), "float32")]))
    graph = builder.finish(["y"])
    with pytest.raises(ModelError, match="unknown kind"):
        apply(graph.operators[0], graph.tensors, [torch.ones(1, 4)], 1)
