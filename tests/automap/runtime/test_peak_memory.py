"""Peak memory against a case that is counted by hand."""

import torch

from automap.runtime.trial.peak_memory import PeakMemory

MIB = 2**20


def test_peak_of_a_step_with_a_known_answer():
    weight = torch.zeros(MIB // 4, requires_grad=True)  # 1 MiB, there from the start
    view = weight.detach().view(2, -1)
    with PeakMemory() as memory:
        base = memory.peak
        a = torch.ones(2 * MIB // 4)  # 2
        b = a * 2  # 4
        del a  # 2
        c = b[: MIB // 4] * weight  # 3: a slice is no copy, and the product keeps it
        c.sum().backward()  # 3, the gradient of the sum is a view of one number: 4 at most with that of the weight
        del b, c
        torch.ones(3 * MIB // 4)  # 1 and 3
    assert view.shape[0] == 2
    extra = memory.peak - base
    assert 4 * MIB <= extra <= 4 * MIB + 64


def test_what_was_in_memory_before_a_step_counts_once():
    kept = [torch.zeros(MIB) for _ in range(2)]
    views = [t[1:] for t in kept]
    with PeakMemory() as memory:
        first = memory.peak
        views[0].add_(1)
    with PeakMemory() as again:
        pass
    assert first == memory.peak
    assert abs(first - again.peak) < MIB
    kept.clear()
    views.clear()
    with PeakMemory() as less:
        pass
    assert again.peak - less.peak >= 2 * 4 * MIB
