"""Transfers between layouts against brute force over elements."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from automap.runtime.executor.transfer_plan import extent, inside, overlap, transfer


@st.composite
def layouts(draw, shape):
    """Ranks with boxes that cover a tensor: a grid of uneven cuts, some boxes on several ranks."""
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    grid = [tuple(box) for box in itertools.product(*(list(itertools.pairwise(cut)) for cut in cuts))]
    boxes = [box for box in grid for _ in range(draw(st.integers(1, 3)))]
    ranks = draw(st.permutations(range(20)))
    return dict(zip(ranks, draw(st.permutations(boxes)), strict=False)) if len(boxes) <= 20 else None


def elements(box):
    return set(itertools.product(*(range(a, b) for a, b in box)))


@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_every_target_gets_each_of_its_elements_once_from_one_that_has_it(data, shape):
    sources, targets = (data.draw(layouts(shape).filter(bool)) for _ in range(2))
    pieces = transfer(sources, targets)
    for target, wanted in targets.items():
        got = [e for p in pieces if p.target == target for e in elements(p.box)]
        assert len(got) == len(set(got))
        assert set(got) == elements(wanted)
    for piece in pieces:
        assert elements(piece.box) <= elements(sources[piece.source])
        if elements(piece.box) <= elements(sources.get(piece.target, ((0, 0),) * len(shape))):
            assert piece.source == piece.target


def test_replicas_take_turns():
    box, halves = ((0, 4),), [((0, 2),), ((2, 4),)]
    sent = transfer({0: box, 1: box}, {2: halves[0], 3: halves[1]})
    assert [(p.source, p.target, p.box) for p in sent] == [(0, 2, halves[0]), (1, 3, halves[1])]
    kept = transfer({0: box, 1: box}, {1: box})
    assert [(p.source, p.target) for p in kept] == [(1, 1)]


def test_boxes_overlap_and_lie_inside_each_other_as_intervals_do():
    assert overlap(((0, 4), (2, 6)), ((3, 9), (0, 3))) == ((3, 4), (2, 3))
    assert overlap(((0, 4),), ((4, 5),)) is None
    assert inside(((3, 4), (2, 3)), ((0, 4), (2, 6))) == (slice(3, 4), slice(0, 1))
    assert extent(((3, 4), (2, 6))) == (1, 4)
    assert transfer({0: ()}, {1: ()})[0].box == ()
