"""Einsums cost what torch counts when it computes them, whatever they are written as."""

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.utils.flop_counter import FlopCounterMode

from ir.onnx.load import load_model

SIZES = {"b": 1, "s": 6, "d": 8, "e": 5, "r": 2, "h": 3, "...": (6, 3)}
EQUATIONS = [
    "bsd,dr,re->bse", "bsd,bse,de->bs", "...d,dr,re->...e", "bsd,dr,re", "bsd,bsd->bsd", "bs,bd->bsd", "bsd,d->bsd",
    "bs,de->bsd", "bsd,er->br", "b s d , d e -> b s e", "bsd,bsd,d->bs", "bs,bsd,bsh,bhe->bed", "bsd,hde->bshe",
]  # fmt: skip


def shape(term):
    dots = SIZES["..."] if "..." in term else ()
    return (*((1, *dots) if dots else ()), *(SIZES[c] for c in term if c.isalpha()))


def imported(equation, first, others):
    """The graph of an einsum of the data `x` and weights."""
    held = [numpy_helper.from_array(np.zeros(size, np.float32), f"w{i}") for i, size in enumerate(others)]
    names = [t.name for t in held]
    nodes = [helper.make_node("Einsum", ["x", *names], ["y"], equation=equation)]
    values = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("N", *first[1:]))]
    values.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, None))
    graph = helper.make_graph(nodes, "einsum", values[:1], values[1:], held)
    return load_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())


@pytest.mark.parametrize("equation", EQUATIONS)
def test_flops_are_those_of_torch(equation, monkeypatch):
    monkeypatch.setattr(torch.backends.opt_einsum, "enabled", False)
    first, *others = (shape(term) for term in equation.replace(" ", "").partition("->")[0].split(","))
    with FlopCounterMode(display=False) as counted:
        found = torch.einsum(equation, *(torch.zeros(size) for size in (first, *others)))
    graph = imported(equation, first, others)
    assert graph.forward_flops == counted.get_total_flops()
    assert graph.tensors[graph.outputs[0]].shape == tuple(found.shape)
