"""The losses that networks are trained with where the user gives no other: those of torch."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from automap.runtime.trainer.losses import (
    IGNORED,
    count_elements,
    count_labels,
    loss_of,
    summed_cross_entropy,
    summed_squares,
)
from ir.build import GraphBuilder
from ir.loss import with_loss


@pytest.mark.parametrize("shape", [(6, 5), (6, 4, 5), (6, 5, 5, 5), (6, 5, 3, 4)])
def test_the_classes_of_images_are_where_torch_has_them(shape):
    """This holds too if another dim is as large, so that the shape does not tell which one it is."""
    torch.manual_seed(0)
    scores = torch.randn(shape, dtype=torch.float64)
    is_image = len(shape) == 4
    labels = torch.randint(5, (shape[0], *shape[2:]) if is_image else shape[:-1])
    labels[0] = IGNORED
    wanted = F.cross_entropy(scores if is_image else scores.flatten(0, -2), labels if is_image else labels.flatten())
    found = summed_cross_entropy(scores, labels) / count_labels(labels)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kind", ["mse", "cross_entropy"])
def test_the_loss_is_that_of_the_plan(kind):
    builder = GraphBuilder()
    builder.add("MatMul", [builder.input("x", (1, 8)), builder.parameter("w", (8, 3))], ["y"])
    loss, count = loss_of(with_loss(builder.finish(["y"], name="linear"), kind))
    torch.manual_seed(0)
    outputs = torch.randn(6, 3, dtype=torch.float64)
    labels = torch.randint(3, (6,)) if kind == "cross_entropy" else torch.randn(6, 3, dtype=torch.float64)
    wanted = (F.cross_entropy if kind == "cross_entropy" else F.mse_loss)(outputs, labels)
    parts = [slice(0, 4), slice(4, 6)]
    found = sum(loss(outputs[part], labels[part]) for part in parts) / sum(count(labels[part]) for part in parts)
    torch.testing.assert_close(found, wanted)


def test_a_number_a_sample_is_compared_with_its_own_target_alone():
    """torch would spread targets without the dim of the outputs over all of them."""
    outputs, targets = torch.randn(6, 1, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    torch.testing.assert_close(summed_squares(outputs, targets) / 6, F.mse_loss(outputs[:, 0], targets))


@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 3, 2)])
def test_samples_without_targets_fill_up_a_smaller_batch(shape):
    """Losses and gradients are those of the others, whatever the network makes of the filling."""
    torch.manual_seed(0)
    outputs, targets = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    targets[4:] = torch.nan
    found, wanted = (outputs.clone().requires_grad_() for _ in range(2))
    with torch.no_grad():
        found[5:] = 1e30
    parts = [slice(0, 3), slice(3, 5), slice(5, 6)]
    loss = sum(summed_squares(found[p], targets[p]) for p in parts) / sum(count_elements(targets[p]) for p in parts)
    loss.backward()
    one = F.mse_loss(wanted[:4], targets[:4])
    one.backward()
    torch.testing.assert_close(loss, one)
    torch.testing.assert_close(found.grad, wanted.grad)


def test_a_target_that_is_missing_within_a_sample_is_seen_in_the_loss():
    targets = torch.zeros(2, 3)
    targets[0, 1] = torch.nan
    assert count_elements(targets) == 6
    assert summed_squares(torch.zeros(2, 3), targets).isnan()
