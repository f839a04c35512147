"""Random numbers of ranks: alike where a layer is split, of their own where samples are others."""

from unittest import mock

import torch

from automap.runtime.mesh_groups import Axis
from automap.runtime.trainer import split_dropout

ALONE = Axis(name="", number=0, size=1, index=0, group=None)
CPU = torch.device("cpu")


def drawn(rank, ranks):
    """What a rank draws in a step, and behind it; scripts seed all processes alike."""
    torch.manual_seed(0)
    with (
        mock.patch.object(split_dropout.dist, "get_rank", return_value=rank),
        mock.patch.object(split_dropout.dist, "get_world_size", return_value=ranks),
        split_dropout.alike(ALONE, CPU),
    ):
        inside = torch.rand(8)
    return inside, torch.rand(8)


def test_replicas_that_are_seeded_alike_draw_numbers_of_their_own():
    (one, behind), (two, behind_too) = drawn(0, 2), drawn(1, 2)
    assert not torch.equal(one, two)
    assert torch.equal(behind, behind_too), "a script goes on alike on all ranks"
    assert torch.equal(drawn(1, 2)[0], two), "a run can be repeated"


def test_a_process_that_is_alone_draws_what_it_would_draw_without_a_plan():
    torch.manual_seed(0)
    wanted = torch.rand(8)
    assert torch.equal(drawn(0, 1)[0], wanted)
