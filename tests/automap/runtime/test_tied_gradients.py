"""What stages send of the gradient of a parameter that several of them read, against the bytes of a ring."""

import math
from collections import Counter
from fractions import Fraction

import pytest
import torch

from automap.runtime.executor.routes import StageBorder
from automap.runtime.executor.tied_gradients import tied_parameters
from automap.runtime.executor.transfer_plan import extent
from automap.runtime.tensor_layout import StageTensor

SHAPE = (12, 60)
WHOLE = tuple((0, size) for size in SHAPE)
HALVES = tuple(((0, 12), (30 * i, 30 * (i + 1))) for i in range(2))


def stage(ranks, boxes, shape=SHAPE):
    how = {"placements": (), "dtype": torch.float32, "carries_gradient": True}
    table = StageTensor(name="table", shape=shape, boxes=tuple(boxes), **how)
    return StageBorder(ranks=tuple(ranks), inputs=(), outputs=(), parameters={"table": table})


def exchanged(stages):
    """Rank -> (elements that it sends, elements that it receives)."""
    sent, received = Counter(), Counter()
    for block in tied_parameters(stages)["table"].blocks:
        for piece in (piece for route in (*block.coming, *block.going) for piece in route.pieces):
            if piece.source != piece.target:
                sent[piece.source] += math.prod(extent(piece.box))
                received[piece.target] += math.prod(extent(piece.box))
    return {rank: (sent[rank], received[rank]) for rank in sorted(sent | received)}


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_every_rank_sends_and_receives_as_much_as_in_a_ring(count):
    ring = Fraction(2 * (count - 1), count) * math.prod(SHAPE)
    alone = [stage([rank], [WHOLE]) for rank in range(count)]
    assert exchanged(alone) == dict.fromkeys(range(count), (ring, ring))
    halved = [stage([2 * rank, 2 * rank + 1], HALVES) for rank in range(count)]
    if 12 % count == 0:
        assert exchanged(halved) == dict.fromkeys(range(2 * count), (ring / 2, ring / 2))


def test_chunks_of_one_rank_are_added_up_there_first():
    looped = [stage([number % 3], [WHOLE]) for number in range(9)]
    ring = Fraction(4, 3) * math.prod(SHAPE)
    assert exchanged(looped) == dict.fromkeys(range(3), (ring, ring))
    assert exchanged([stage([0], [WHOLE])] * 2) == {}


def test_numbers_without_a_dim_and_short_tensors_are_exchanged_too():
    numbers = [stage([rank], [()], ()) for rank in range(3)]
    assert exchanged(numbers) == {0: (2, 2), 1: (1, 1), 2: (1, 1)}
    short = [stage([rank], [((0, 2),)], (2,)) for rank in range(3)]
    assert sum(sent for sent, _ in exchanged(short).values()) == 2 * 2 * 2
