"""Gradients of weights put off: nothing of them before, all of them after, equal to autograd's."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from automap.runtime.operators.weight_gradients import Deferred, convolution, product, splitting


def network(x, w, v, c):
    """Three weights; `v` is used through a view, twice."""
    h = torch.tanh(product(x, w))
    h = product(product(h, v.t()), v)
    y = convolution(h.reshape(2, 3, 2, -1), c, None, (1, 1), (1, 1), 1)
    return (y**2).sum()


def values():
    torch.manual_seed(0)
    shapes = [(2, 6, 4), (4, 8), (5, 8), (2, 3, 1, 2)]
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("again", [False, True])
def test_inputs_first_then_weights(again):
    wanted = values()
    network(*wanted).backward()
    x, *weights = values()
    with splitting(weights):
        loss = checkpoint(network, x, *weights, use_reentrant=False) if again else network(x, *weights)
    store = Deferred()
    with splitting(weights, store):
        loss.backward()
    torch.testing.assert_close(x.grad, wanted[0].grad)
    assert all(weight.grad is None for weight in weights)
    store.run()
    for weight, other in zip(weights, wanted[1:], strict=True):
        torch.testing.assert_close(weight.grad, other.grad)


def test_whole_backward_passes_and_batches_of_weights():
    x, w = torch.randn(3, 1, 2, 4), torch.randn(5, 4, 2)
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    with splitting([leaves[1]]):
        product(*leaves).sin().sum().backward()
    others = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    (others[0] @ others[1]).sin().sum().backward()
    for leaf, other in zip(leaves, others, strict=True):
        torch.testing.assert_close(leaf.grad, other.grad)


def test_only_recorded_parameters_are_put_off():
    w, v = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    store = Deferred()
    with splitting([w]):
        y = product(product(torch.ones(1, 2), w * v), v).sum()
    with splitting([w], store):
        y.backward()
    assert w.grad is not None
    assert v.grad is not None
