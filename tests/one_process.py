"""What one process computes of a network, for comparison with ranks."""

import torch.nn.functional as F  # noqa: N812


def losses(module, optimizer, batch, steps):
    """Losses of some training steps, and of an evaluation after them; `batch(step)` gives inputs and labels."""
    found = []
    for step in range(steps):
        x, labels = batch(step)
        loss = F.cross_entropy(module(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    x, labels = batch(steps)
    return [*found, F.cross_entropy(module.eval()(x), labels).item()]
