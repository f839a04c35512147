"""Networks and plans that modules are not trained by."""

import pytest
import torch
from torch import nn

from automap.errors import PlanError
from automap.runtime.trainer import parallelize
from automap.runtime.trainer.supported_plans import (
    FinerThanModules,
    check_gradients,
    check_inputs,
    check_loss,
    check_stages_apart,
)
from ir import zoo
from ir.build import GraphBuilder
from ir.loss import with_loss


def network():
    return nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))


def double(gradient):
    return 2.0 * gradient


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_refused(hook):
    """A plan replaces parameters, without their hooks, and sums gradients behind them."""
    module = network()
    check_gradients(module)
    handle = getattr(module[1].weight, hook)(double)
    with pytest.raises(PlanError, match="has a hook") as fault:
        check_gradients(module)
    assert fault.value.field == "module.1.weight"
    handle.remove()
    check_gradients(module)


@pytest.mark.parametrize("setting", [{"sparse": True}, {"scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_embeddings_whose_gradient_is_no_sum_over_samples_are_refused(setting):
    (name,) = setting
    with pytest.raises(PlanError, match="no plan trains with") as fault:
        check_gradients(nn.Sequential(nn.Embedding(4, 4, **setting)))
    assert fault.value.field == f"module.0.{name}"


def test_stages_of_one_process_that_share_a_weight_have_no_zero():
    one, two = network(), network()
    check_stages_apart([one, two])
    two[1].weight = one[1].weight
    with pytest.raises(FinerThanModules, match="two stages of one process share"):
        check_stages_apart([one, two])


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_a_number_that_the_model_computes_is_no_loss_of_a_training(loss):
    """Such as a second loss beside the scores: plans take it for the loss, and steps compute theirs from labels."""
    builder = GraphBuilder()
    builder.add("Relu", [builder.input("x", (1, 4))], ["scores"])
    check_loss(with_loss(builder.finish(["scores"], name="one"), loss))
    builder.add("ReduceMean", ["scores"], ["mean"], attributes={"axes": (0, 1), "keepdims": 0})
    with pytest.raises(PlanError, match="with the scores as its only output") as fault:
        check_loss(with_loss(builder.finish(["scores", "mean"], name="two"), loss))
    assert fault.value.field == "model.outputs" and fault.value.value == "mean"


def test_what_was_compiled_around_a_module_is_refused_by_name():
    """Its parameters have other names than those of the plan's model."""
    with pytest.raises(PlanError, match=r"module\.compile\(\)"):
        parallelize(torch.compile(network(), backend="eager"), None, "model.onnx")


def test_inputs_that_are_no_samples_are_refused():
    """A step would take some of the features of a vector that is the same for all samples."""
    builder = GraphBuilder()
    x, scale = builder.input("x", (1, 8)), builder.input("scale", (8,), batch_dim=None)
    (x,) = builder.add("Mul", [x, scale], ["scaled"])
    builder.add("MatMul", [x, builder.parameter("w", (8, 3))], ["y"])
    graph = with_loss(builder.finish(["y"], name="scaled"))
    with pytest.raises(PlanError, match="samples are not its first dim") as fault:
        check_inputs(graph)
    assert fault.value.field == "inputs.scale"
    check_inputs(zoo.build("gpt:layers=1,hidden=16,heads=4,seq_len=8,vocab_size=24"))
