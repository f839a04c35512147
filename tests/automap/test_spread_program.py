"""The linear program of a spread of units, against closed forms."""

import numpy as np
import pytest

from automap.cost_graph import spread_program
from automap.cost_graph.spread_program import SpreadProgram


def ranks_of(each_s, room=np.inf):
    """The program of ranks that take `each_s`, [ranks, types], for all units of a type, which are a byte each."""
    program = SpreadProgram(each_s.shape[1], 1.0)
    for rank, row in enumerate(np.eye(len(each_s))):
        program.add_seconds(row[:, None] * each_s, 0.0)
        if rank == 0 and np.isfinite(room):
            program.add_room(row[:, None] * np.ones_like(each_s), room)
    return program


def test_ranks_share_the_work_by_their_speed():
    # 1 / (1 / 2 + 1 / 6) of one type.
    assert ranks_of(np.array([[2.0], [6.0]])).seconds() == pytest.approx(1.5, rel=1e-5)
    # Each type is where it is faster.
    assert ranks_of(np.array([[1.0, 9.0], [9.0, 1.0]])).seconds() == pytest.approx(1.0, rel=1e-5)
    # The first rank has room for a quarter.
    assert ranks_of(np.array([[2.0], [6.0]]), 0.25).seconds() == pytest.approx(4.5, rel=1e-5)
    assert ranks_of(np.array([[2.0], [6.0]]), -1.0).seconds() == np.inf


def test_a_program_that_is_not_solved_in_time_bounds_nothing(monkeypatch):
    each_s = np.random.default_rng(0).uniform(1.0, 2.0, (6, 8))
    assert ranks_of(each_s).seconds() > 0.0
    monkeypatch.setattr(spread_program, "MOST_ITERATIONS", 1)
    assert ranks_of(each_s).seconds() == 0.0
