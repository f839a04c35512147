"""Orders in torch's words: written, read again, refused."""

import pytest

from automap.errors import PlanError
from automap.schedule import (
    A_BEFORE,
    A_CHUNK,
    A_MICRO_BATCH,
    A_RANK,
    A_WORD,
    KINDS,
    arrange,
    read_order,
    words,
    write_order,
)

SIZES = [("gpipe", 3, 1, 5), ("1f1b", 4, 1, 7), ("interleaved", 4, 3, 8), ("interleaved", 3, 2, 3), ("zb1p", 4, 1, 9),
         ("zb2p", 4, 1, 9), ("zb2p", 5, 1, 2), ("eager-1f1b", 4, 1, 9), ("1f1b", 1, 1, 1)]  # fmt: skip


@pytest.mark.parametrize(("kind", "pp", "v", "m"), SIZES)
def test_written_orders_are_complete_and_read_again(kind, pp, v, m):
    order = write_order(kind, pp, pp * v, m)
    program = read_order(order, pp, pp * v, m)
    assert words(program, pp) == order
    letters = "FIW" if kind.startswith("zb") else "FB"
    for rank, line in enumerate(order):
        chunks = range(rank, pp * v, pp)
        assert sorted(line) == sorted(f"{c}{letter}{j}" for c in chunks for letter in letters for j in range(m))


@pytest.mark.parametrize(("kind", "pp", "v", "m"), SIZES)
def test_programs_stand_behind_what_they_wait_for(kind, pp, v, m):
    program = arrange(KINDS[kind], pp, pp * v, m)
    for number, row in enumerate(program):
        chunk, word, before = int(row[A_CHUNK]), int(row[A_WORD]), int(row[A_BEFORE])
        assert before < number
        neighbour = chunk - 1 if word == 0 else chunk + 1
        if word == 3 or not 0 <= neighbour < pp * v:
            assert before == -1
            continue
        assert program[before, A_CHUNK] == neighbour
        assert program[before, A_MICRO_BATCH] == row[A_MICRO_BATCH]
        assert program[before, A_RANK] == neighbour % pp
        assert (program[before, A_WORD] == 0) == (word == 0)


def test_eager_1f1b_injects_2_s_minus_i_minus_1_forwards():
    """DAPPLE, section 3.2: stage i of S keeps K_i = 2 (S - i) - 1 micro-batches under policy PB, S - i under PA."""
    for kind, step in (("1f1b", 1), ("eager-1f1b", 2)):
        for i, line in enumerate(write_order(kind, 4, 4, 12)):
            first = next(place for place, word in enumerate(line) if "B" in word)
            assert first == step * (4 - i) - (step - 1)


def test_1f1b_and_zero_bubble_read_as_in_their_papers():
    assert write_order("1f1b", 2, 2, 3)[0] == ("0F0", "0F1", "0B0", "0F2", "0B1", "0B2")
    assert write_order("zb1p", 2, 2, 3) == (
        ("0F0", "0F1", "0I0", "0W0", "0F2", "0I1", "0W1", "0I2", "0W2"),
        ("1F0", "1I0", "1F1", "1I1", "1W0", "1F2", "1I2", "1W1", "1W2"),
    )
    assert write_order("zb2p", 2, 2, 3)[0][:4] == ("0F0", "0F1", "0F2", "0I0")


def test_a_rank_may_mix_whole_and_split_backward_passes():
    order = [["0F0", "0F1", "0B0", "0I1", "0W1"], ["1F0", "1I0", "1F1", "1B1", "1W0"]]
    assert words(read_order(order, 2, 2, 2), 2) == tuple(map(tuple, order))


@pytest.mark.parametrize(
    ("order", "field", "message"),
    [
        ([["0F0", "0B0"]], "order", "one list for each of 2 ranks"),
        ([["0F0", "0X0"], ["1F0", "1B0"]], "order[0][1]", "not an action"),
        ([["0F0", "0SEND_F0"], ["1F0", "1B0"]], "order[0][1]", "not an action"),
        ([["0F0", "0B1"], ["1F0", "1B0"]], "order[0][1]", "no such chunk or micro-batch"),
        ([["0F0", "2B0"], ["1F0", "1B0"]], "order[0][1]", "no such chunk or micro-batch"),
        ([["0F0", "1B0"], ["1F0", "1B0"]], "order[0][1]", "chunk 1 is not on rank 0"),
        ([["0F0", "0B0"], ["1F0", "1B0", "1F0"]], "order[1][2]", "stands there twice"),
        ([["0F0", "0B0"], ["1F0", "1I0"]], "order[1]", "need F, and either B or both I and W"),
        ([["0F0", "0B0", "0W0"], ["1F0", "1B0"]], "order[0]", "need F, and either B or both I and W"),
        ([["0F0", "0B0"], ["1F0"]], "order[1]", "need F"),
        ([["0F0"], []], "order", "too few actions"),
        ([["0B0", "0F0"], ["1F0", "1B0"]], "order[0][0]", "rank 0 waits forever: 0B0 needs the forward of chunk 0"),
        ([["0F0", "0B0"], ["1B0", "1F0"]], "order[0][1]", "0B0 needs the gradient of chunk 1"),
        ([["0F0", "0W0", "0I0"], ["1F0", "1B0"]], "order[0][1]", "0W0 needs the gradient of chunk 0"),
    ],
)
def test_what_cannot_run_is_refused_with_its_place(order, field, message):
    with pytest.raises(PlanError, match=message) as caught:
        read_order(order, 2, 2, 1)
    assert caught.value.field == f"plan.schedule.{field}"
    assert caught.value.repair


def test_a_deadlock_of_two_ranks_is_named():
    """Rank 0 wants a gradient before it sends the forward that rank 1 needs for it."""
    order = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    message = r"rank 0 waits forever: 0B0 needs the gradient of chunk 1 and micro-batch 0.*; rank 1 waits at 1F1"
    with pytest.raises(PlanError, match=message):
        read_order(order, 2, 2, 2)
