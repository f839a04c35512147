"""Files imported and computed: with the module's own weights its results and gradients; with any, onnxruntime's."""

import pytest
import torch
from long_cases import long_but
from ort_oracle import compare

from automap.runtime.operators.apply import run
from ir.onnx.load import load_model

SAMPLES = 3
LIGHT = [
    "bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet", "vgg19",
    "zfnet512",
]  # fmt: skip
"""VGG-19 has the kinds of operators of AlexNet, and takes four times as long."""
EXPORTED = ["gpt", "gpt_linear", "llama", "bert", "vit", "resnet", "mlp"]


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(["llama", "resnet"], EXPORTED))
def test_onnxruntime_agrees(name, export):
    """The modules themselves are compared below, with their gradients."""
    assert compare(export(name)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("light_name", long_but([name for name in LIGHT if name != "vgg19"], LIGHT))
def test_onnxruntime_agrees_on_the_light_models(light, light_name):
    assert compare(light(light_name)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_the_graph_computes_what_the_module_does(name, export, build):
    graph = load_model(export(name))
    torch.manual_seed(0)
    module, inputs = build(name, SAMPLES)
    module.train()  # batch normalisation as the interpreter has it; the export leaves Dropout out
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    inputs = [torch.randn(x.shape) if x.is_floating_point() else x for x in inputs]
    state = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    fed = [n for n, t in graph.tensors.items() if t.role == "input" and n not in graph.producer]
    assert len(fed) == len(inputs)
    found = run(graph, {**state, **dict(zip(fed, inputs, strict=True))}, SAMPLES)[graph.outputs[0]]
    wanted = module(*inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    weight = torch.randn_like(wanted)
    parameters = list(module.parameters())
    ours, theirs = (torch.autograd.grad((y * weight).sum(), parameters, allow_unused=True) for y in (found, wanted))
    largest = max(g.abs().max() for g in theirs if g is not None)
    for mine, true in zip(ours, theirs, strict=True):
        if true is not None:
            torch.testing.assert_close(mine / largest, true / largest, rtol=1e-4, atol=1e-5)
